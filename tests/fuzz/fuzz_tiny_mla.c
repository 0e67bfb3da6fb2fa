/* fuzz_tiny_mla.c - the readers of examples/tiny_mla on any bytes: config.json, the safetensors file,
   and both together.  A refusal must be one line of text; what is accepted must be usable.

   Input: one byte that says which; for both together two bytes of length, that much config.json, and
   the header of the safetensors file, behind which zeros follow: as many as two more bytes say. */
#define _POSIX_C_SOURCE 200809L
#include <stdio.h>

#include "fuzz.h"

/* model.c opens its two files through this. */
static const uint8_t *config_bytes, *model_bytes;
static size_t config_size, model_size;

static FILE *open_memory(const char *path)
{
    const int config = strstr(path, "config.json") != NULL;
    const size_t size = config ? config_size : model_size;
    static char nothing[1];
    FILE *file = size ? fmemopen((void *)(config ? config_bytes : model_bytes), size, "rb")
                      : fmemopen(nothing, 1, "rb");
    if (file && !size) fgetc(file);
    return file;
}

#define fopen(path, mode) open_memory(path)
#include "../../examples/tiny_mla/model.c"
#undef fopen

static const char good_config[] =
    "{\"model_type\": \"deepseek_v3\", \"vocab_size\": 256, \"kv_lora_rank\": 512,"
    "\"qk_rope_head_dim\": 64, \"hidden_size\": 16, \"intermediate_size\": 16,"
    "\"num_hidden_layers\": 1, \"num_attention_heads\": 1, \"qk_nope_head_dim\": 16,"
    "\"v_head_dim\": 16, \"max_position_embeddings\": 64, \"rms_norm_eps\": 1e-6,"
    "\"rope_theta\": 10000, \"first_k_dense_replace\": 1, \"hidden_act\": \"silu\","
    "\"tie_word_embeddings\": true}";

static void check_line(const char *error)
{
    const size_t n = strlen(error);
    FUZZ_CHECK(n > 0 && n < ERROR_CHARS);
    for (size_t i = 0; i < n; i++) FUZZ_CHECK((unsigned char)error[i] >= 0x20);
}

/* Every tensor of an accepted file lies inside its data, and none overlap. */
static void check_tensors(const safetensors *st)
{
    uint64_t sum = 0;
    for (int i = 0; i < st->count; i++) {
        const tensor *t = &st->tensors[i];
        FUZZ_CHECK(t->from <= t->to && t->to <= st->data_bytes && t->rank <= TENSOR_MAX_RANK);
        FUZZ_CHECK(t->name.at <= t->name.end);
        for (uint64_t k = t->from; k < t->to; k += t->to - t->from) sum += st->data[k];
        sum += t->to - t->from ? st->data[t->to - 1] : 0;
    }
    FUZZ_CHECK(sum < (uint64_t)st->count * 512 + 1);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static unsigned char file[1 << 17];
    char error[ERROR_CHARS] = "";
    model m;
    fuzz_begin(data, size);
    const unsigned kind = (unsigned)fuzz_bytes(1) % 4;
    memset(&m, 0, sizeof m);
    if (kind == 0) {
        config_bytes = fuzz_at;
        config_size = (size_t)(fuzz_end - fuzz_at);
        if (config_load(&m, "config.json", error)) check_line(error);
        else FUZZ_CHECK(m.hidden >= 16 && m.layers >= 1 && m.layers <= MAX_LAYERS && m.heads >= 1);
        return 0;
    }
    if (kind == 1) {
        safetensors st;
        float *x = NULL;
        model_bytes = fuzz_at;
        model_size = (size_t)(fuzz_end - fuzz_at);
        if (safetensors_open(&st, "model.safetensors", error)) {
            check_line(error);
        } else {
            check_tensors(&st);
            if (safetensors_load(&st, "a", 1, 2, &x, error)) check_line(error);
        }
        free(x);
        safetensors_close(&st);
        return 0;
    }
    /* The whole folder; half of the time with a config.json that is good. */
    size_t n = 0;
    config_bytes = (const uint8_t *)good_config;
    config_size = sizeof good_config - 1;
    if (kind == 3) {
        n = (size_t)fuzz_bytes(2);
        if (n > (size_t)(fuzz_end - fuzz_at)) n = (size_t)(fuzz_end - fuzz_at);
        config_bytes = fuzz_at;
        config_size = n;
        fuzz_at += n;
    }
    const size_t zeros = (size_t)fuzz_bytes(2) * 2;
    const uint8_t first = (uint8_t)fuzz_bytes(1);
    n = (size_t)(fuzz_end - fuzz_at);
    if (n + zeros + 8 > sizeof file) return 0;
    memset(file, 0, 8 + n + zeros);
    for (int i = 0; i < 8; i++) file[i] = (unsigned char)((uint64_t)n >> 8 * i);
    if (n) memcpy(file + 8, fuzz_at, n);
    if (zeros) file[8 + n + (first * 2) % zeros + 1] = first; /* perhaps not finite */
    model_bytes = file;
    model_size = 8 + n + zeros;
    if (model_load(&m, "", error)) {
        check_line(error);
    } else {
        FUZZ_CHECK(m.layer[0].w_uk != NULL && m.rope_cos != NULL);
        model_free(&m);
    }
    return 0;
}
