/* backend_cpu.c - the tiny MLA model in plain C, one token per request and step.

   Attention over the SnapMLA cache goes through snapmla_ref.h, the reference that follows the GPU
   kernels rounding by rounding.  The other cache formats are here, in f32 arithmetic with only the
   roundings that the format has. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SNAPMLA_REF_IMPLEMENTATION
#include "../../snapmla_ref.h"
#include "tiny_mla.h"

/* ---------------------------------------------------------------------------------------------
   Weights, turned to [in, out]: the inner loop of linear() then runs along memory in both the
   weights and the result, which compilers vectorise without being allowed to reorder sums */

typedef struct cpu_layer {
    float *q_proj, *kv_a_proj, *o_proj, *gate_proj, *up_proj, *down_proj;
    float *w_uv; /* [heads, LATENT, v_dim]; w_uk is [heads, nope, LATENT] already */
} cpu_layer;

typedef struct cpu_weights {
    const model *model;
    float *embedding; /* [hidden, VOCAB] */
    cpu_layer layer[MAX_LAYERS];
} cpu_weights;

/* ---------------------------------------------------------------------------------------------
   A session */

struct session {
    const cpu_weights *weights;
    cache_format format;
    int requests, context;
    int length;           /* tokens that every request holds */
    int table_width;      /* pages that a request can hold */
    int padded_context;   /* table_width * PAGE */
    int32_t *block_table; /* [requests, table_width] */
    int32_t *seq_lens;    /* [requests] */
    int64_t *slots;       /* [requests]: where this step's keys go */
    int64_t *positions;   /* [requests]: and their positions */
    calibration scales;   /* naive: absmax / 448 */
    float e4m3_value[256];
    calibration seen; /* bf16: absmax of request 0 */

    /* The cache of a layer: rows [slot, ROW] of f32, bf16 or e4m3, or the three SnapMLA planes. */
    unsigned char *rows[MAX_LAYERS];
    snapmla_ref_cache snap[MAX_LAYERS];

    /* One step's values, all [requests, ...] */
    float *x, *normed; /* [hidden] */
    float *q;          /* [heads, nope + ROPE] */
    float *kv;         /* [ROW] as projected */
    float *key;        /* [ROW] as cached, before the format's rounding */
    float *query;      /* [heads, ROW] */
    float *attended;   /* [heads, LATENT] */
    float *v;          /* [heads, v_dim] */
    float *gate, *up;  /* [mlp] */
    uint16_t *key_bf16, *query_bf16, *attended_bf16;
    float *scores; /* [heads, padded_context], of one request */
    float *page;   /* [PAGE, ROW]: a page of the cache as floats */

    void *blocks[64]; /* every allocation above */
    int block_count, out_of_memory;
};

static void *take(session *s, size_t count, size_t item)
{
    void *p = calloc(count ? count : 1, item);
    if (!p) s->out_of_memory = 1;
    s->blocks[s->block_count++] = p;
    return p;
}

static void cpu_close(session *s)
{
    if (!s) return;
    for (int i = 0; i < s->block_count; i++) free(s->blocks[i]);
    free(s);
}

static session *cpu_open(const backend *b, cache_format format, const calibration *c, int requests,
                         int context)
{
    static const size_t item[CACHE_FORMATS] = {4, 2, 0, 1};
    const cpu_weights *weights = (const cpu_weights *)b->state;
    const model *m = weights->model;
    const size_t n = (size_t)requests, heads = (size_t)m->heads;
    session *s = (session *)calloc(1, sizeof *s);
    size_t pages, tokens;
    if (!s) return NULL;

    s->weights = weights;
    s->format = format;
    s->requests = requests;
    s->context = context;
    s->table_width = (context + PAGE - 1) / PAGE;
    s->padded_context = s->table_width * PAGE;
    pages = n * (size_t)s->table_width;
    tokens = pages * PAGE;
    for (int i = 0; i < 256; i++) s->e4m3_value[i] = snapmla_ref_e4m3_to_float((uint8_t)i);
    for (int i = 0; i < m->layers && format == CACHE_NAIVE; i++) {
        s->scales.key_absmax[i] = c->key_absmax[i] / 448;
        s->scales.query_absmax[i] = c->query_absmax[i] / 448;
    }

    s->block_table = (int32_t *)take(s, pages, sizeof(int32_t));
    s->seq_lens = (int32_t *)take(s, n, sizeof(int32_t));
    s->slots = (int64_t *)take(s, n, sizeof(int64_t));
    s->positions = (int64_t *)take(s, n, sizeof(int64_t));
    s->x = (float *)take(s, n * (size_t)m->hidden, sizeof(float));
    s->normed = (float *)take(s, n * (size_t)m->hidden, sizeof(float));
    s->q = (float *)take(s, n * heads * (size_t)(m->nope + ROPE), sizeof(float));
    s->kv = (float *)take(s, n * ROW, sizeof(float));
    s->key = (float *)take(s, n * ROW, sizeof(float));
    s->query = (float *)take(s, n * heads * ROW, sizeof(float));
    s->attended = (float *)take(s, n * heads * LATENT, sizeof(float));
    s->v = (float *)take(s, n * heads * (size_t)m->v_dim, sizeof(float));
    s->gate = (float *)take(s, n * (size_t)m->mlp, sizeof(float));
    s->up = (float *)take(s, n * (size_t)m->mlp, sizeof(float));
    s->key_bf16 = (uint16_t *)take(s, n * ROW, sizeof(uint16_t));
    s->query_bf16 = (uint16_t *)take(s, n * heads * ROW, sizeof(uint16_t));
    s->attended_bf16 = (uint16_t *)take(s, n * heads * LATENT, sizeof(uint16_t));
    s->scores = (float *)take(s, heads * (size_t)s->padded_context, sizeof(float));
    s->page = (float *)take(s, PAGE * ROW, sizeof(float));

    if (format == CACHE_SNAP) {
        size_t layers = (size_t)m->layers;
        uint8_t *content = (uint8_t *)take(s, layers * tokens, LATENT);
        float *scale = (float *)take(s, layers * tokens, sizeof(float));
        uint16_t *rope = (uint16_t *)take(s, layers * tokens, ROPE * sizeof(uint16_t));
        for (size_t i = 0; i < layers && !s->out_of_memory; i++) {
            s->snap[i].content = content + i * tokens * LATENT;
            s->snap[i].scale = scale + i * tokens;
            s->snap[i].rope = rope + i * tokens * ROPE;
            s->snap[i].pages = (int64_t)pages;
            s->snap[i].page_size = PAGE;
        }
    } else {
        size_t bytes = tokens * ROW * item[format];
        unsigned char *rows = (unsigned char *)take(s, (size_t)m->layers, bytes);
        for (size_t i = 0; i < (size_t)m->layers && rows; i++) s->rows[i] = rows + i * bytes;
    }
    if (s->out_of_memory) {
        cpu_close(s);
        return NULL;
    }
    shuffled_block_table(s->block_table, requests, s->table_width);
    return s;
}

/* ---------------------------------------------------------------------------------------------
   Arithmetic of a layer */

/* y[b][o] (+)= sum_i x[b][i] * w[i][o].  Eight inputs at a time: their rows of w stay in the first
   cache while all of the batch uses them.  `in` is a multiple of 8. */
static void linear(float *y, int y_row, const float *x, int x_row, const float *w, int w_row,
                   int batch, int in, int out, int add)
{
    for (int b = 0; b < batch && !add; b++)
        memset(y + (ptrdiff_t)b * y_row, 0, (size_t)out * sizeof(float));
    for (int i = 0; i < in; i += 8) {
        const float *w0 = w + (ptrdiff_t)i * w_row, *w1 = w0 + w_row, *w2 = w1 + w_row;
        const float *w3 = w2 + w_row, *w4 = w3 + w_row, *w5 = w4 + w_row, *w6 = w5 + w_row;
        const float *w7 = w6 + w_row;
        for (int b = 0; b < batch; b++) {
            const float *a = x + (ptrdiff_t)b * x_row + i;
            const float a0 = a[0], a1 = a[1], a2 = a[2], a3 = a[3];
            const float a4 = a[4], a5 = a[5], a6 = a[6], a7 = a[7];
            float *restrict row = y + (ptrdiff_t)b * y_row;
            for (int o = 0; o < out; o++)
                row[o] += (a0 * w0[o] + a1 * w1[o]) + (a2 * w2[o] + a3 * w3[o]) +
                          ((a4 * w4[o] + a5 * w5[o]) + (a6 * w6[o] + a7 * w7[o]));
        }
    }
}

/* Sixteen partial sums, so that the loop is a vector loop.  n is a multiple of 16. */
static float dot(const float *a, const float *b, int n)
{
    float part[16] = {0}, sum = 0;
    for (int i = 0; i < n; i += 16)
        for (int j = 0; j < 16; j++) part[j] += a[i + j] * b[i + j];
    for (int j = 0; j < 16; j++) sum += part[j];
    return sum;
}

static void rmsnorm(float *y, const float *x, const float *gain, int n, double eps)
{
    double squares = 0;
    float scale;
    for (int i = 0; i < n; i++) squares += (double)x[i] * x[i];
    scale = (float)(1.0 / sqrt(squares / n + eps));
    for (int i = 0; i < n; i++) y[i] = x[i] * scale * gain[i];
}

/* Rotate the pairs (2i, 2i + 1) of x; each stays where it was. */
static void rotate(float *y, const float *x, const model *m, int position)
{
    const float *c = m->rope_cos + (size_t)position * (ROPE / 2);
    const float *s = m->rope_sin + (size_t)position * (ROPE / 2);
    for (int i = 0; i < ROPE / 2; i++) {
        y[2 * i] = x[2 * i] * c[i] - x[2 * i + 1] * s[i];
        y[2 * i + 1] = x[2 * i + 1] * c[i] + x[2 * i] * s[i];
    }
}

/* ---------------------------------------------------------------------------------------------
   Attention over a cache of plain rows: fp32, bf16, naive */

static float bf16_value(uint16_t bits)
{
    uint32_t word = (uint32_t)bits << 16;
    float x;
    memcpy(&x, &word, sizeof x);
    return x;
}

static float e4m3_round(float x)
{
    return snapmla_ref_e4m3_to_float(snapmla_ref_e4m3_from_float(x));
}

static void store_keys(session *s, int layer)
{
    for (int b = 0; b < s->requests; b++) {
        const float *key = s->key + b * ROW;
        size_t first = (size_t)s->slots[b] * ROW;
        for (size_t d = 0; d < ROW; d++)
            if (s->format == CACHE_FP32)
                ((float *)s->rows[layer])[first + d] = key[d];
            else if (s->format == CACHE_BF16)
                ((uint16_t *)s->rows[layer])[first + d] = snapmla_ref_bf16_from_float(key[d]);
            else
                s->rows[layer][first + d] =
                    snapmla_ref_e4m3_from_float(key[d] / s->scales.key_absmax[layer]);
    }
}

/* The first `width` numbers of the first n tokens of a page, as floats in s->page. */
static void load_page(session *s, int layer, int page, int n, int width)
{
    const float scale = s->scales.key_absmax[layer];
    for (int t = 0; t < n; t++) {
        size_t first = ((size_t)page * PAGE + (size_t)t) * ROW;
        float *restrict to = s->page + t * ROW;
        if (s->format == CACHE_FP32) {
            memcpy(to, (const float *)s->rows[layer] + first, (size_t)width * sizeof(float));
        } else if (s->format == CACHE_BF16) {
            const uint16_t *from = (const uint16_t *)s->rows[layer] + first;
            for (int d = 0; d < width; d++) to[d] = bf16_value(from[d]);
        } else {
            const unsigned char *from = s->rows[layer] + first;
            for (int d = 0; d < width; d++) to[d] = s->e4m3_value[from[d]] * scale;
        }
    }
}

/* Softmax of n scores up to its denominator, which is returned.  Each weight is rounded as the
   format's second product takes it; the sum is of the exact ones. */
static float soften(float *scores, int n, cache_format format)
{
    float top = scores[0], sum = 0;
    for (int t = 1; t < n; t++) top = scores[t] > top ? scores[t] : top;
    for (int t = 0; t < n; t++) {
        float e = expf(scores[t] - top);
        sum += e;
        if (format == CACHE_BF16)
            e = bf16_value(snapmla_ref_bf16_from_float(e));
        else if (format == CACHE_NAIVE)
            e = e4m3_round(e);
        scores[t] = e;
    }
    return sum;
}

static void attend_rows(session *s, int layer)
{
    const model *m = s->weights->model;
    const int heads = m->heads, n = s->length, padded = s->padded_context;

    if (s->format == CACHE_NAIVE) { /* queries have one scale as well */
        float scale = s->scales.query_absmax[layer];
        for (size_t i = 0; i < (size_t)s->requests * (size_t)heads * ROW; i++)
            s->query[i] = e4m3_round(s->query[i] / scale) * scale;
    }
    for (int b = 0; b < s->requests; b++) {
        const int32_t *pages = s->block_table + b * s->table_width;
        const float *query = s->query + (size_t)b * (size_t)heads * ROW;
        float *attended = s->attended + (size_t)b * (size_t)heads * LATENT;
        float denominator[128];

        for (int first = 0; first < n; first += PAGE) {
            int count = n - first < PAGE ? n - first : PAGE;
            load_page(s, layer, pages[first / PAGE], count, ROW);
            for (int h = 0; h < heads; h++)
                for (int t = 0; t < count; t++)
                    s->scores[h * padded + first + t] =
                        m->softmax_scale * dot(query + h * ROW, s->page + t * ROW, ROW);
        }
        for (int h = 0; h < heads; h++) {
            denominator[h] = soften(s->scores + h * padded, n, s->format);
            for (int t = n; t < padded && t < n + 8; t++)
                s->scores[h * padded + t] = 0; /* linear() takes eight tokens at a time */
        }
        for (int first = 0; first < n; first += PAGE) {
            int count = n - first < PAGE ? n - first : PAGE;
            load_page(s, layer, pages[first / PAGE], count, LATENT);
            linear(attended, LATENT, s->scores + first, padded, s->page, ROW, heads,
                   (count + 7) / 8 * 8, LATENT, first > 0);
        }
        for (int h = 0; h < heads; h++)
            for (int d = 0; d < LATENT; d++) {
                float o = attended[h * LATENT + d] / denominator[h];
                attended[h * LATENT + d] =
                    s->format == CACHE_FP32 ? o : bf16_value(snapmla_ref_bf16_from_float(o));
            }
    }
}

/* ---------------------------------------------------------------------------------------------
   Attention over the SnapMLA cache */

static int attend_snap(session *s, int layer)
{
    const model *m = s->weights->model;
    snapmla_ref_append_desc append;
    snapmla_ref_decode_desc decode;

    memset(&append, 0, sizeof append);
    append.cache = s->snap[layer];
    append.tokens = s->requests;
    append.latent = s->key_bf16; /* as projected; rope lies right behind each latent */
    append.slots = s->slots;
    append.norm.weight = m->layer[layer].latent_norm;
    append.norm.weight_type = SNAPMLA_REF_NUMBER_F32;
    append.norm.eps = (float)m->norm_eps;
    append.rotation.positions = s->positions;
    append.rotation.cosines = m->rope_cos;
    append.rotation.sines = m->rope_sin;
    append.rotation.layout = SNAPMLA_REF_ROPE_INTERLEAVED;
    if (snapmla_ref_append(&append)) return -1;

    memset(&decode, 0, sizeof decode);
    decode.fidelity = SNAPMLA_REF_EMULATED;
    decode.batch = s->requests;
    decode.s_q = 1;
    decode.heads = m->heads;
    decode.seq_lens = s->seq_lens;
    decode.cache = s->snap[layer];
    decode.block_table = s->block_table;
    decode.block_table_width = s->table_width;
    decode.softmax_scale = m->softmax_scale;
    decode.q = s->query_bf16;
    decode.out = s->attended_bf16;
    if (snapmla_ref_decode(&decode)) return -1;
    for (size_t i = 0; i < (size_t)s->requests * (size_t)m->heads * LATENT; i++)
        s->attended[i] = bf16_value(s->attended_bf16[i]);
    return 0;
}

/* ---------------------------------------------------------------------------------------------
   A step */

static void to_bf16(uint16_t *bits, float *x, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        bits[i] = snapmla_ref_bf16_from_float(x[i]);
        x[i] = bf16_value(bits[i]);
    }
}

static void note_absmax(float *absmax, const float *x, int n)
{
    for (int i = 0; i < n; i++) *absmax = fabsf(x[i]) > *absmax ? fabsf(x[i]) : *absmax;
}

static int attention(session *s, int index)
{
    const model *m = s->weights->model;
    const layer_weights *l = &m->layer[index];
    const cpu_layer *w = &s->weights->layer[index];
    const int n = s->requests, heads = m->heads, hidden = m->hidden, q_head = m->nope + ROPE;
    const int position = s->length - 1;

    for (int b = 0; b < n; b++)
        rmsnorm(s->normed + b * hidden, s->x + b * hidden, l->attention_norm, hidden, m->norm_eps);
    linear(s->q, heads * q_head, s->normed, hidden, w->q_proj, heads * q_head, n, hidden,
           heads * q_head, 0);
    linear(s->kv, ROW, s->normed, hidden, w->kv_a_proj, ROW, n, hidden, ROW, 0);

    /* The key row: the normed latent and the rotated rope part.  The SnapMLA cache does both itself
       when it takes the row. */
    for (int b = 0; b < n && s->format != CACHE_SNAP; b++) {
        rmsnorm(s->key + b * ROW, s->kv + b * ROW, l->latent_norm, LATENT, m->norm_eps);
        rotate(s->key + b * ROW + LATENT, s->kv + b * ROW + LATENT, m, position);
    }
    /* The query rows: W_UK takes the nope part into the latent space. */
    for (int h = 0; h < heads; h++) {
        linear(s->query + h * ROW, heads * ROW, s->q + h * q_head, heads * q_head,
               l->w_uk + (size_t)h * (size_t)m->nope * LATENT, LATENT, n, m->nope, LATENT, 0);
        for (int b = 0; b < n; b++)
            rotate(s->query + (b * heads + h) * ROW + LATENT,
                   s->q + (b * heads + h) * q_head + m->nope, m, position);
    }
    if (s->format != CACHE_FP32) {
        to_bf16(s->key_bf16, s->format == CACHE_SNAP ? s->kv : s->key, (size_t)n * ROW);
        to_bf16(s->query_bf16, s->query, (size_t)n * (size_t)heads * ROW);
    }
    if (s->format == CACHE_BF16) {
        note_absmax(&s->seen.key_absmax[index], s->key, ROW);
        note_absmax(&s->seen.query_absmax[index], s->query, heads * ROW);
    }

    if (s->format == CACHE_SNAP) {
        if (attend_snap(s, index)) return -1;
    } else {
        store_keys(s, index);
        attend_rows(s, index);
    }

    /* W_UV takes each head's output out of the latent space. */
    for (int h = 0; h < heads; h++)
        linear(s->v + h * m->v_dim, heads * m->v_dim, s->attended + h * LATENT, heads * LATENT,
               w->w_uv + (size_t)h * LATENT * (size_t)m->v_dim, m->v_dim, n, LATENT, m->v_dim, 0);
    linear(s->x, hidden, s->v, heads * m->v_dim, w->o_proj, hidden, n, heads * m->v_dim, hidden, 1);
    return 0;
}

static void feed_forward(session *s, int index)
{
    const model *m = s->weights->model;
    const cpu_layer *w = &s->weights->layer[index];
    const int n = s->requests, hidden = m->hidden, mlp = m->mlp;

    for (int b = 0; b < n; b++)
        rmsnorm(s->normed + b * hidden, s->x + b * hidden, m->layer[index].mlp_norm, hidden,
                m->norm_eps);
    linear(s->gate, mlp, s->normed, hidden, w->gate_proj, mlp, n, hidden, mlp, 0);
    linear(s->up, mlp, s->normed, hidden, w->up_proj, mlp, n, hidden, mlp, 0);
    for (int i = 0; i < n * mlp; i++) s->gate[i] = s->gate[i] / (1 + expf(-s->gate[i])) * s->up[i];
    linear(s->x, hidden, s->gate, mlp, w->down_proj, hidden, n, mlp, hidden, 1);
}

static int cpu_step(session *s, const uint8_t *tokens, float *logits)
{
    const model *m = s->weights->model;
    const int n = s->requests, hidden = m->hidden;
    const int position = s->length;

    if (position == s->context) return -1;
    s->length++;
    for (int b = 0; b < n; b++) {
        int page = s->block_table[b * s->table_width + position / PAGE];
        s->slots[b] = (int64_t)page * PAGE + position % PAGE;
        s->positions[b] = position;
        s->seq_lens[b] = s->length;
        memcpy(s->x + b * hidden, m->embedding + tokens[b] * hidden,
               (size_t)hidden * sizeof(float));
    }
    for (int i = 0; i < m->layers; i++) {
        if (attention(s, i)) return -1;
        feed_forward(s, i);
    }
    for (int b = 0; b < n; b++)
        rmsnorm(s->normed + b * hidden, s->x + b * hidden, m->final_norm, hidden, m->norm_eps);
    linear(logits, VOCAB, s->normed, hidden, s->weights->embedding, VOCAB, n, hidden, VOCAB, 0);
    return 0;
}

static int cpu_calibrate(session *s, calibration *c)
{
    *c = s->seen;
    return 0;
}

/* ---------------------------------------------------------------------------------------------
   The backend */

static float *transposed(const float *w, int out, int in, int *out_of_memory)
{
    float *t = (float *)malloc((size_t)in * (size_t)out * sizeof(float));
    *out_of_memory |= !t;
    for (int o = 0; o < out && t; o++)
        for (int i = 0; i < in; i++)
            t[(size_t)i * (size_t)out + (size_t)o] = w[(size_t)o * (size_t)in + (size_t)i];
    return t;
}

static void cpu_free(backend *b)
{
    cpu_weights *w = (cpu_weights *)b->state;
    for (int i = 0; w && i < MAX_LAYERS; i++) {
        cpu_layer *l = &w->layer[i];
        float *all[] = {l->q_proj,  l->kv_a_proj, l->o_proj, l->gate_proj,
                        l->up_proj, l->down_proj, l->w_uv};
        for (size_t k = 0; k < sizeof all / sizeof all[0]; k++) free(all[k]);
    }
    if (w) free(w->embedding);
    free(w);
    memset(b, 0, sizeof *b);
}

int cpu_backend(backend *b, const model *m)
{
    cpu_weights *w = (cpu_weights *)calloc(1, sizeof *w);
    int failed = 0;

    memset(b, 0, sizeof *b);
    b->state = w;
    if (!w) return -1;
    w->model = m;
    w->embedding = transposed(m->embedding, VOCAB, m->hidden, &failed);
    for (int i = 0; i < m->layers; i++) {
        const layer_weights *from = &m->layer[i];
        cpu_layer *to = &w->layer[i];
        size_t head = (size_t)m->v_dim * LATENT;
        to->q_proj = transposed(from->q_proj, m->heads * (m->nope + ROPE), m->hidden, &failed);
        to->kv_a_proj = transposed(from->kv_a_proj, ROW, m->hidden, &failed);
        to->o_proj = transposed(from->o_proj, m->hidden, m->heads * m->v_dim, &failed);
        to->gate_proj = transposed(from->gate_proj, m->mlp, m->hidden, &failed);
        to->up_proj = transposed(from->up_proj, m->mlp, m->hidden, &failed);
        to->down_proj = transposed(from->down_proj, m->hidden, m->mlp, &failed);
        to->w_uv = (float *)malloc((size_t)m->heads * head * sizeof(float));
        failed |= !to->w_uv;
        for (size_t h = 0; h < (size_t)m->heads && to->w_uv; h++)
            for (size_t d = 0; d < (size_t)m->v_dim; d++)
                for (size_t r = 0; r < LATENT; r++)
                    to->w_uv[h * head + r * (size_t)m->v_dim + d] =
                        from->w_uv[h * head + d * LATENT + r];
    }
    if (failed) {
        cpu_free(b);
        return -1;
    }
    snprintf(b->label, sizeof b->label, "CPU reference (snapmla_ref.h)");
    b->threads = 1;
    b->max_requests = 16;
    b->score_bytes = 16384;
    b->score_context = 256;
    b->open = cpu_open;
    b->step = cpu_step;
    b->calibrate = cpu_calibrate;
    b->close = cpu_close;
    b->free = cpu_free;
    return 0;
}
