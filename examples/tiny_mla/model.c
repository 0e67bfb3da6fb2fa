/* model.c - reads the tiny MLA model: a folder in the Hugging Face DeepSeek-V3 format.

   config.json says how wide everything is; what this program cannot run (experts, a low-rank query
   projection, scaled rope, biases) is refused by name instead of being ignored. */
#define _POSIX_C_SOURCE 200809L

#include <errno.h>
#include <math.h>

#include "safetensors.h"

char *read_file(const char *path, size_t *size, char *error)
{
    size_t capacity = 1 << 16, used = 0, got;
    char *bytes = NULL, *more;
    FILE *file = fopen(path, "rb");

    if (!file) {
        refuse(error, "%s: %s", path, strerror(errno));
        return NULL;
    }
    do {
        capacity *= 2;
        if (capacity > (size_t)1 << 31 || !(more = (char *)realloc(bytes, capacity))) {
            refuse(error, "%s: too large, or out of memory", path);
            goto failed;
        }
        bytes = more;
        got = fread(bytes + used, 1, capacity - used - 1, file);
        used += got;
    } while (used == capacity - 1);
    if (ferror(file)) { /* a folder, for one */
        refuse(error, "%s: %s", path, strerror(errno));
        goto failed;
    }
    fclose(file);
    bytes[used] = 0;
    *size = used;
    return bytes;

failed:
    fclose(file);
    free(bytes);
    return NULL;
}

/* ---------------------------------------------------------------------------------------------
   config.json */

typedef struct config_reader {
    const char *path;
    json root;
    char *error;
    int failed; /* the first failure is the one that is reported */
} config_reader;

static void config_fail(config_reader *c, const char *field, const char *what)
{
    if (!c->failed) refuse(c->error, "%s: %s: %s", c->path, field, what);
    c->failed = 1;
}

static int config_whole(config_reader *c, const char *field, int low, int high, int multiple)
{
    json v;
    uint64_t n = 0;
    char what[96];
    if (json_find(c->root, field, &v) != 1 || json_whole(v, &n) || n < (uint64_t)low ||
        n > (uint64_t)high || n % (uint64_t)multiple) {
        if (low == high)
            snprintf(what, sizeof what, "must be given, once, and be %d", low);
        else
            snprintf(what, sizeof what, "must be given, once: a multiple of %d from %d to %d",
                     multiple, low, high);
        config_fail(c, field, what);
        return low;
    }
    return (int)n;
}

static double config_number(config_reader *c, const char *field, double low, double high)
{
    json v;
    double x = 0;
    if (json_find(c->root, field, &v) != 1 || json_number(v, &x) || !(x >= low && x <= high)) {
        config_fail(c, field, "missing, given twice, no number, or out of range");
        return low;
    }
    return x;
}

/* The field must have this text; where it may be absent, that means the same. */
static void config_fixed(config_reader *c, json object, const char *field, const char *text,
                         int may_be_absent)
{
    char what[96];
    json v;
    int found = json_find(object, field, &v);
    if ((found == 0 && may_be_absent) || (found == 1 && json_is(v, text))) return;
    snprintf(what, sizeof what, "must be %s; this program runs nothing else", text);
    config_fail(c, field, what);
}

static int config_load(model *m, const char *path, char *error)
{
    config_reader c = {path, {NULL, NULL}, error, 0};
    json rope, v;
    double theta = 0;
    size_t size;
    char *text = read_file(path, &size, error);
    if (!text) return -1;
    if (json_parse(text, size, &c.root)) {
        free(text);
        return refuse(error, "%s: whole file: not a JSON object", path);
    }

    config_fixed(&c, c.root, "model_type", "\"deepseek_v3\"", 0);
    config_whole(&c, "vocab_size", VOCAB, VOCAB, 1);
    config_whole(&c, "kv_lora_rank", LATENT, LATENT, 1);
    config_whole(&c, "qk_rope_head_dim", ROPE, ROPE, 1);
    m->hidden = config_whole(&c, "hidden_size", 16, 8192, 16);
    m->mlp = config_whole(&c, "intermediate_size", 16, 32768, 16);
    m->layers = config_whole(&c, "num_hidden_layers", 1, MAX_LAYERS, 1);
    m->heads = config_whole(&c, "num_attention_heads", 1, 128, 1);
    m->nope = config_whole(&c, "qk_nope_head_dim", 16, 512, 16);
    m->v_dim = config_whole(&c, "v_head_dim", 16, 512, 16);
    m->max_context = config_whole(&c, "max_position_embeddings", 64, 65536, 1);
    m->norm_eps = config_number(&c, "rms_norm_eps", 0, 1);
    m->rope_theta = config_number(&c, "rope_theta", 1, 1e9);
    config_whole(&c, "first_k_dense_replace", m->layers, 1 << 20, 1); /* no layer has experts */
    config_fixed(&c, c.root, "q_lora_rank", "null", 1);
    config_fixed(&c, c.root, "hidden_act", "\"silu\"", 0);
    config_fixed(&c, c.root, "tie_word_embeddings", "true", 0);
    config_fixed(&c, c.root, "attention_bias", "false", 1);
    config_fixed(&c, c.root, "rope_interleave", "true", 1);
    config_fixed(&c, c.root, "rope_scaling", "null", 1);
    config_fixed(&c, c.root, "torch_dtype", "\"bfloat16\"", 1);
    if (json_find(c.root, "num_key_value_heads", &v))
        config_whole(&c, "num_key_value_heads", m->heads, m->heads, 1);
    if (json_find(c.root, "qk_head_dim", &v))
        config_whole(&c, "qk_head_dim", m->nope + ROPE, m->nope + ROPE, 1);
    if (json_find(c.root, "rope_parameters", &rope) && !json_is(rope, "null")) {
        if (*rope.at != '{') {
            config_fail(&c, "rope_parameters", "must be an object");
        } else {
            config_fixed(&c, rope, "rope_type", "\"default\"", 1);
            if (json_find(rope, "rope_theta", &v) && (json_number(v, &theta) || theta != m->rope_theta))
                config_fail(&c, "rope_parameters", "its rope_theta must be the other rope_theta");
        }
    }
    free(text);
    return c.failed ? -1 : 0;
}

/* ---------------------------------------------------------------------------------------------
   Weights */

/* Tensor `name` of layer `index`, or of the model when index is negative. */
static int weight(model *m, const safetensors *st, int index, const char *name, int rows,
                  int columns, float **out, char *error)
{
    char full[128];
    if (index < 0)
        snprintf(full, sizeof full, "model.%s.weight", name);
    else
        snprintf(full, sizeof full, "model.layers.%d.%s.weight", index, name);
    m->parameters += (int64_t)columns * (rows ? rows : 1);
    return safetensors_load(st, full, rows, columns, out, error);
}

static int weights_load(model *m, const safetensors *st, char *error)
{
    const int hidden = m->hidden, heads = m->heads;
    if (weight(m, st, -1, "embed_tokens", VOCAB, hidden, &m->embedding, error) ||
        weight(m, st, -1, "norm", 0, hidden, &m->final_norm, error))
        return -1;
    for (int i = 0; i < m->layers; i++) {
        layer_weights *l = &m->layer[i];
        size_t uk = (size_t)m->nope * LATENT, uv = (size_t)m->v_dim * LATENT;
        float *kv_b = NULL;

        if (weight(m, st, i, "input_layernorm", 0, hidden, &l->attention_norm, error) ||
            weight(m, st, i, "self_attn.q_proj", heads * (m->nope + ROPE), hidden, &l->q_proj,
                   error) ||
            weight(m, st, i, "self_attn.kv_a_proj_with_mqa", ROW, hidden, &l->kv_a_proj, error) ||
            weight(m, st, i, "self_attn.kv_a_layernorm", 0, LATENT, &l->latent_norm, error) ||
            weight(m, st, i, "self_attn.o_proj", hidden, heads * m->v_dim, &l->o_proj, error) ||
            weight(m, st, i, "post_attention_layernorm", 0, hidden, &l->mlp_norm, error) ||
            weight(m, st, i, "mlp.gate_proj", m->mlp, hidden, &l->gate_proj, error) ||
            weight(m, st, i, "mlp.up_proj", m->mlp, hidden, &l->up_proj, error) ||
            weight(m, st, i, "mlp.down_proj", hidden, m->mlp, &l->down_proj, error))
            return -1;

        /* kv_b_proj holds, head by head, W_UK [nope, 512] and then W_UV [v_dim, 512]. */
        if (weight(m, st, i, "self_attn.kv_b_proj", heads * (m->nope + m->v_dim), LATENT, &kv_b,
                   error)) {
            free(kv_b);
            return -1;
        }
        l->w_uk = (float *)malloc(uk * (size_t)heads * sizeof(float));
        l->w_uv = (float *)malloc(uv * (size_t)heads * sizeof(float));
        for (int h = 0; h < heads && l->w_uk && l->w_uv; h++) {
            memcpy(l->w_uk + uk * (size_t)h, kv_b + (uk + uv) * (size_t)h, uk * sizeof(float));
            memcpy(l->w_uv + uv * (size_t)h, kv_b + (uk + uv) * (size_t)h + uk, uv * sizeof(float));
        }
        free(kv_b);
        if (!l->w_uk || !l->w_uv) return refuse(error, "%s: layer %d: out of memory", st->path, i);
    }
    return 0;
}

/* cos and sin of position / theta^(2i / ROPE). */
static int rope_tables(model *m, char *error)
{
    size_t n = (size_t)m->max_context * (ROPE / 2);
    m->rope_cos = (float *)malloc(n * sizeof(float));
    m->rope_sin = (float *)malloc(n * sizeof(float));
    if (!m->rope_cos || !m->rope_sin) return refuse(error, "rope tables: out of memory");
    for (int i = 0; i < ROPE / 2; i++) {
        double frequency = pow(m->rope_theta, -2.0 * i / ROPE);
        for (int t = 0; t < m->max_context; t++) {
            m->rope_cos[t * (ROPE / 2) + i] = (float)cos(t * frequency);
            m->rope_sin[t * (ROPE / 2) + i] = (float)sin(t * frequency);
        }
    }
    return 0;
}

int model_load(model *m, const char *dir, char *error)
{
    char path[1024];
    safetensors st;
    int failed;

    memset(m, 0, sizeof *m);
    snprintf(path, sizeof path, "%s/config.json", dir);
    if (config_load(m, path, error)) return -1;
    m->softmax_scale = (float)(1.0 / sqrt((double)(m->nope + ROPE)));

    snprintf(path, sizeof path, "%s/model.safetensors", dir);
    failed =
        safetensors_open(&st, path, error) || weights_load(m, &st, error) || rope_tables(m, error);
    safetensors_close(&st);
    if (failed) model_free(m);
    return failed ? -1 : 0;
}

void model_free(model *m)
{
    for (int i = 0; i < m->layers; i++) {
        layer_weights *l = &m->layer[i];
        float *all[] = {l->attention_norm, l->q_proj,  l->kv_a_proj, l->latent_norm,
                        l->w_uk,           l->w_uv,    l->o_proj,    l->mlp_norm,
                        l->gate_proj,      l->up_proj, l->down_proj};
        for (size_t k = 0; k < sizeof all / sizeof all[0]; k++) free(all[k]);
    }
    free(m->embedding);
    free(m->final_norm);
    free(m->rope_cos);
    free(m->rope_sin);
    memset(m, 0, sizeof *m);
}

/* ---------------------------------------------------------------------------------------------
   Pages */

void shuffled_block_table(int32_t *table, int requests, int width)
{
    uint64_t state = 1;
    for (int i = 0; i < requests * width; i++) { /* Fisher-Yates, from the inside out */
        int j;
        state = state * 6364136223846793005u + 1442695040888963407u;
        j = (int)((state >> 33) % (uint64_t)(i + 1));
        table[i] = i;
        table[i] = table[j];
        table[j] = i;
    }
}
