/* test_tiny_mla.c - the example program examples/tiny_mla on the CPU, against its CARD.md.

   The program's sources are included, so that tests reach what is static in them.  Compile with
   -O3: the tests run a model.  Run from the root of the tree, or give -DTINY_MLA_DIR='"folder"'. */
#define TINY_MLA_NO_MAIN
#include "../examples/tiny_mla/tiny_mla.c"

#include "../examples/tiny_mla/model.c"

#include "../examples/tiny_mla/backend_cpu.c"

#include <stdarg.h>
#include <setjmp.h>
#include <cmocka.h>

#include "test_util.h"

#ifndef TINY_MLA_DIR
#define TINY_MLA_DIR "examples/tiny_mla"
#endif

typedef struct fixture {
    model model;
    backend backend;
    char *excerpt;
    size_t excerpt_bytes;
} fixture;

static int setup(void **state)
{
    static fixture f;
    char error[ERROR_CHARS] = "";
    if (model_load(&f.model, TINY_MLA_DIR, error) || cpu_backend(&f.backend, &f.model) ||
        !(f.excerpt = read_file(TINY_MLA_DIR "/excerpt.txt", &f.excerpt_bytes, error))) {
        print_error("%s\n", error);
        return -1;
    }
    *state = &f;
    return 0;
}

static int teardown(void **state)
{
    fixture *f = (fixture *)*state;
    if (f) {
        f->backend.free(&f->backend);
        model_free(&f->model);
        free(f->excerpt);
    }
    return 0;
}

/* ================================================================================================
   The model against CARD.md
   ============================================================================================== */
static void test_model(void **state)
{
    const fixture *f = (const fixture *)*state;
    TU_CHECK_INT(f->model.parameters, 4329728);
    TU_CHECK_INT(f->model.layers, 4);
    TU_CHECK_INT(f->excerpt_bytes, 245760);
    TU_CHECK_NEAR(f->model.softmax_scale, 0.10206207, 1e-8);
}

static void test_card_log_probabilities(void **state)
{
    const fixture *f = (const fixture *)*state;
    for (int p = 0; p < CARD_PROMPTS; p++) {
        double logp[VOCAB], nll;
        int best[CARD_TOP];
        TU_CHECK_INT(read_prompt(&f->backend, CACHE_FP32, card[p].prompt, logp, &nll), 0);
        top_tokens(logp, CARD_TOP, best);
        for (int i = 0; i < CARD_TOP; i++) {
            TU_CHECK_INT(best[i], (unsigned char)card[p].token[i]);
            TU_CHECK_NEAR(logp[best[i]], card[p].logp[i], 2e-3);
        }
        TU_CHECK_NEAR(nll, card[p].nll, 2e-3);
    }
}

/* Rounded formats can only be like the card's: a sum in another order moves them. */
static void test_card_rounded_formats(void **state)
{
    const fixture *f = (const fixture *)*state;
    for (int p = 0; p < CARD_PROMPTS; p++) {
        double logp[VOCAB], nll;
        TU_CHECK_INT(read_prompt(&f->backend, CACHE_SNAP, card[p].prompt, logp, &nll), 0);
        TU_CHECK_NEAR(logp[(unsigned char)card[p].token[0]], card[p].snap, 5e-2);
        TU_CHECK_NEAR(nll, card[p].nll, 1);
        if (card[p].bf16 != 0) {
            TU_CHECK_INT(read_prompt(&f->backend, CACHE_BF16, card[p].prompt, logp, &nll), 0);
            TU_CHECK_NEAR(logp[(unsigned char)card[p].token[0]], card[p].bf16, 5e-3);
            TU_CHECK_NEAR(nll, card[p].nll, 0.1);
        }
    }
}

/* What layer 0 caches for byte 0 and for the first byte of the first prompt. */
static const struct {
    double latent[4], absmax;
    double rope[4]; /* dims 0, 1, 32, 33 in the card's order: first results, then second ones */
} card_layer0[2] = {
    {{-0.242796, 0.762994, -0.717834, 0.707776},
     1.867452,
     {-0.138719, -0.315563, 0.133465, 0.237876}},
    {{-0.177418, 0.560224, -0.428906, 0.381648},
     1.387386,
     {-3.793849, -0.698853, -3.472025, 2.014332}},
};
static const int rope_dims[4] = {0, 2, 1, 3}; /* the same where pairs stay in place */

static void test_card_layer0(void **state)
{
    const fixture *f = (const fixture *)*state;
    session *s = f->backend.open(&f->backend, CACHE_FP32, NULL, 1, 100);
    session *q = f->backend.open(&f->backend, CACHE_SNAP, NULL, 1, 100);
    float logits[VOCAB];
    assert_non_null(s);
    assert_non_null(q);
    for (int t = 0; t < 2; t++) {
        const uint8_t token = t ? (uint8_t)card[0].prompt[0] : 0;
        TU_CHECK_INT(f->backend.step(s, &token, logits), 0);
        TU_CHECK_INT(f->backend.step(q, &token, logits), 0);
    }
    for (int t = 0; t < 2; t++) {
        const int64_t slot = (int64_t)s->block_table[0] * PAGE + t;
        const float *row = (const float *)s->rows[0] + slot * ROW;
        const snapmla_ref_cache *c = &q->snap[0];
        const double scale = c->scale[slot];
        float absmax = 0;
        note_absmax(&absmax, row, LATENT);
        TU_CHECK_NEAR(absmax, card_layer0[t].absmax, 1e-5);
        /* the projection is rounded to BF16 before the norm, the latent before its scale is taken */
        TU_CHECK_NEAR(scale * 448, card_layer0[t].absmax, card_layer0[t].absmax * (2 / 256.0));
        for (int i = 0; i < 4; i++) {
            const double latent = card_layer0[t].latent[i], rope = card_layer0[t].rope[i];
            const double latent8 = snapmla_ref_e4m3_to_float(c->content[slot * LATENT + i]);
            const double rope16 = bf16_value(c->rope[slot * ROPE + rope_dims[i]]);
            const double other = card_layer0[t].rope[i ^ 2],
                         pair = sqrt(rope * rope + other * other);
            TU_CHECK_NEAR(row[i], latent, 1e-5);
            TU_CHECK_NEAR(row[LATENT + rope_dims[i]], rope, 2e-5);
            /* half a unit of e4m3 is 1/16 of a number at most, half a unit of BF16 1/256 */
            TU_CHECK_NEAR(latent8 * scale, latent, fabs(latent) * (1 / 16.0 + 2 / 256.0));
            TU_CHECK_NEAR(rope16 * scale, rope, pair / 256 + fabs(rope) * (2 / 256.0));
        }
    }
    f->backend.close(s);
    f->backend.close(q);
}

/* 1326.5894 nats for the first 1024 bytes: 16 pages of one request. */
static void test_card_window(void **state)
{
    const fixture *f = (const fixture *)*state;
    double bits;
    TU_CHECK_INT(score(&f->backend, CACHE_FP32, NULL, NULL, (const uint8_t *)f->excerpt, 1024, 1024,
                       0, &bits),
                 0);
    TU_CHECK_NEAR(bits * 1024 * log(2), 1326.5894, 2e-3);
}

static void test_card_greedy(void **state)
{
    const fixture *f = (const fixture *)*state;
    static const char *const continued[] = {"ll the people who are all the people who are ",
                                            " a new section of the community and the community "};
    for (int p = 0; p < 2; p++) {
        uint8_t text[64];
        const int n = (int)strlen(continued[p]);
        const uint8_t *prompt = (const uint8_t *)card[p].prompt;
        TU_CHECK_INT(generate(&f->backend, CACHE_FP32, prompt, (int)strlen(card[p].prompt), n, 0,
                              40, 1, text),
                     0);
        TU_CHECK_BYTES(text, continued[p], (size_t)n);
    }
}

/* ================================================================================================
   Formats, batches, windows
   ============================================================================================== */
static void test_formats(void **state)
{
    const fixture *f = (const fixture *)*state;
    const uint8_t *text = (const uint8_t *)f->excerpt;
    double bits[CACHE_FORMATS];
    calibration seen;
    memset(&seen, 0, sizeof seen);
    for (int format = CACHE_FP32; format < CACHE_FORMATS; format++) {
        TU_CHECK_INT(score(&f->backend, (cache_format)format, &seen,
                           format == CACHE_BF16 ? &seen : NULL, text, 960, 96, 0, &bits[format]),
                     0);
    }
    for (int i = 0; i < f->model.layers;
         i++) { /* CARD's statistics, of longer windows, are larger */
        TU_CHECK(seen.key_absmax[i] > 5 && seen.key_absmax[i] < 14, "%g", seen.key_absmax[i]);
        TU_CHECK(seen.query_absmax[i] > 5 && seen.query_absmax[i] < 16, "%g", seen.query_absmax[i]);
    }
    TU_CHECK_LE(bits[CACHE_FP32], 2.5);
    TU_CHECK_NEAR(bits[CACHE_BF16] / bits[CACHE_FP32], 1, 5e-4);
    TU_CHECK_NEAR(bits[CACHE_SNAP] / bits[CACHE_FP32], 1, 3e-3);
    TU_CHECK_NEAR(bits[CACHE_NAIVE] / bits[CACHE_FP32], 1, 3e-2);
    TU_CHECK(bits[CACHE_NAIVE] != bits[CACHE_BF16] && bits[CACHE_SNAP] != bits[CACHE_BF16] &&
                 bits[CACHE_BF16] != bits[CACHE_FP32],
             "two formats give the same bits per byte");
}

/* A window's result does not depend on the windows that are scored beside it, nor on threads. */
static void test_batches_and_threads(void **state)
{
    const fixture *f = (const fixture *)*state;
    const uint8_t *text = (const uint8_t *)f->excerpt;
    static const cache_format tried[] = {CACHE_BF16, CACHE_SNAP};
    for (int i = 0; i < 2; i++) {
        double together, apart, first, last;
        backend b = f->backend;
        TU_CHECK_INT(score(&b, tried[i], NULL, NULL, text, 180, 70, 0, &together), 0);
        b.threads = 2;
        b.max_requests = 1;
        TU_CHECK_INT(score(&b, tried[i], NULL, NULL, text, 180, 70, 0, &apart), 0);
        TU_CHECK(together == apart, "%.17g and %.17g", together, apart);
        /* 180 bytes are two windows of 70 and a short one of 40 */
        TU_CHECK_INT(score(&b, tried[i], NULL, NULL, text, 140, 70, 0, &first), 0);
        TU_CHECK_INT(score(&b, tried[i], NULL, NULL, text + 140, 40, 70, 0, &last), 0);
        TU_CHECK_NEAR(together, (first * 140 + last * 40) / 180, 1e-12);
    }
}

static void test_full_context_ends(void **state)
{
    const fixture *f = (const fixture *)*state;
    session *s = f->backend.open(&f->backend, CACHE_SNAP, NULL, 1, 2);
    const uint8_t token = 'a';
    float logits[VOCAB];
    assert_non_null(s);
    TU_CHECK_INT(f->backend.step(s, &token, logits), 0);
    TU_CHECK_INT(f->backend.step(s, &token, logits), 0);
    TU_CHECK_INT(f->backend.step(s, &token, logits), -1);
    f->backend.close(s);
}

static void test_block_table(void **state)
{
    int32_t table[60];
    int seen[60] = {0}, moved = 0;
    (void)state;
    shuffled_block_table(table, 6, 10);
    for (int i = 0; i < 60; i++) {
        TU_CHECK(table[i] >= 0 && table[i] < 60, "page %d", table[i]);
        TU_CHECK_INT(seen[table[i]]++, 0);
        moved += table[i] != i;
    }
    TU_CHECK(moved > 40, "only %d pages moved", moved);
}

/* ================================================================================================
   Sampling
   ============================================================================================== */
static void test_sampling(void **state)
{
    float logits[VOCAB];
    double logp[VOCAB], sum = 0;
    int best[VOCAB], count[VOCAB] = {0};
    uint64_t seed = 1;
    (void)state;
    for (int i = 0; i < VOCAB; i++) logits[i] = -20;
    logits[7] = 2, logits[200] = 3, logits[9] = 1;
    TU_CHECK_INT(log_softmax(logits, logp), 0);
    for (int i = 0; i < VOCAB; i++) sum += exp(logp[i]);
    TU_CHECK_NEAR(sum, 1, 1e-12);
    TU_CHECK_NEAR(logp[200] - logp[7], 1, 1e-12);

    top_tokens(logp, VOCAB, best);
    TU_CHECK(best[0] == 200 && best[1] == 7 && best[2] == 9, "%d %d %d", best[0], best[1], best[2]);
    for (int i = 0; i < VOCAB; i++) count[best[i]]++;
    for (int i = 0; i < VOCAB; i++) TU_CHECK_INT(count[i], 1);

    TU_CHECK_INT(pick(logp, 0, 40, &seed), 200);
    TU_CHECK_INT(pick(logp, 1, 1, &seed), 200);
    memset(count, 0, sizeof count);
    for (int i = 0; i < 20000; i++) count[pick(logp, 0.5, 2, &seed)]++;
    TU_CHECK_INT(count[200] + count[7], 20000); /* top-k 2 leaves nothing else */
    TU_CHECK_NEAR(count[200] / 20000.0, 1 / (1 + exp(-2)), 0.01);

    logits[3] = NAN;
    TU_CHECK_INT(log_softmax(logits, logp), -1);
    logits[3] = INFINITY;
    TU_CHECK_INT(log_softmax(logits, logp), -1);
}

static void test_sampling_is_repeatable(void **state)
{
    const fixture *f = (const fixture *)*state;
    uint8_t text[3][24];
    for (int i = 0; i < 3; i++) {
        TU_CHECK_INT(generate(&f->backend, CACHE_SNAP, (const uint8_t *)"Anne", 4, 24, 0.7, 40,
                              i < 2 ? 5 : 6, text[i]),
                     0);
    }
    TU_CHECK_BYTES(text[0], text[1], 24);
    TU_CHECK(memcmp(text[0], text[2], 24), "two seeds write the same text");
}

/* ================================================================================================
   Broken files: every one must give -1 and a line that names the file and the field
   ============================================================================================== */
static char folder[64];

static void write_file(const char *path, const void *bytes, size_t n)
{
    FILE *file = fopen(path, "wb");
    TU_CHECK(file != NULL && fwrite(bytes, 1, n, file) == n, "cannot write %s", path);
    fclose(file);
}

static void check_message(const char *error, const char *path, const char *field)
{
    TU_CHECK(strstr(error, path) == error, "\"%s\" does not begin with %s", error, path);
    TU_CHECK(strstr(error, field) != NULL, "\"%s\" does not name %s", error, field);
    TU_CHECK(!strchr(error, '\n'), "\"%s\" is more than a line", error);
}

static int make_folder(void **state)
{
    (void)state;
    snprintf(folder, sizeof folder, "/tmp/test_tiny_mla.XXXXXX");
    return mkdtemp(folder) ? 0 : -1;
}

static int remove_folder(void **state)
{
    static const char *const names[] = {"config.json", "model.safetensors"};
    char path[128];
    (void)state;
    for (int i = 0; i < 2; i++) {
        snprintf(path, sizeof path, "%s/%s", folder, names[i]);
        remove(path);
    }
    return rmdir(folder);
}

/* Headers over 8 bytes of data, wrong in one way each. */
static const struct {
    const char *header, *field;
} broken_headers[] = {
    {"", "header"},
    {"[]", "header"},
    {"{", "header"},
    {"{}", "no tensors"},
    {"{\"__metadata__\":{\"format\":\"pt\"}}", "no tensors"},
    {"{\"a\":{\"dtype\":\"BF16\",\"shape\":[4],\"data_offsets\":[0,8]}} x", "header"},
    {"{\"a\":{\"dtype\":\"BF16\",\"shape\":[4],\"data_offsets\":[0,8],}}", "header"},
    {"{\"a\":{\"dtype\":\"BF16\",\"shape\":[04],\"data_offsets\":[0,8]}}", "header"},
    {"{\"a\":{\"dtype\":\"BF16\\x\",\"shape\":[4],\"data_offsets\":[0,8]}}", "header"},
    {"{\"a\":[[[[[[[[[[[[[[[[[[[[]]]]]]]]]]]]]]]]]]]]}", "header"},
    {"{\"a\":7}", "a: dtype"},
    {"{\"a\":{\"shape\":[4],\"data_offsets\":[0,8]}}", "a: dtype"},
    {"{\"a\":{\"dtype\":\"BF17\",\"shape\":[4],\"data_offsets\":[0,8]}}", "a: dtype"},
    {"{\"a\":{\"dtype\":16,\"shape\":[4],\"data_offsets\":[0,8]}}", "a: dtype"},
    {"{\"a\":{\"dtype\":\"BF16BF16BF16BF16BF16\",\"shape\":[4],\"data_offsets\":[0,8]}}",
     "a: dtype"},
    {"{\"a\":{\"dtype\":\"BF16\",\"dtype\":\"F32\",\"shape\":[4],\"data_offsets\":[0,8]}}",
     "a: dtype"},
    {"{\"a\":{\"dtype\":\"BF16\",\"data_offsets\":[0,8]}}", "a: shape"},
    {"{\"a\":{\"dtype\":\"BF16\",\"shape\":4,\"data_offsets\":[0,8]}}", "a: shape"},
    {"{\"a\":{\"dtype\":\"BF16\",\"shape\":[-4],\"data_offsets\":[0,8]}}", "a: shape"},
    {"{\"a\":{\"dtype\":\"BF16\",\"shape\":[4.0],\"data_offsets\":[0,8]}}", "a: shape"},
    {"{\"a\":{\"dtype\":\"BF16\",\"shape\":[\"4\"],\"data_offsets\":[0,8]}}", "a: shape"},
    {"{\"a\":{\"dtype\":\"BF16\",\"shape\":[4294967296,4294967296],\"data_offsets\":[0,8]}}",
     "a: shape"},
    {"{\"a\":{\"dtype\":\"BF16\",\"shape\":[99999999999999999999999],\"data_offsets\":[0,8]}}",
     "a: shape"},
    {"{\"a\":{\"dtype\":\"BF16\",\"shape\":[1,1,1,1,1,1,1,1,4],\"data_offsets\":[0,8]}}",
     "a: shape"},
    {"{\"a\":{\"dtype\":\"BF16\",\"shape\":[4]}}", "a: data_offsets"},
    {"{\"a\":{\"dtype\":\"BF16\",\"shape\":[4],\"data_offsets\":[0]}}", "a: data_offsets"},
    {"{\"a\":{\"dtype\":\"BF16\",\"shape\":[4],\"data_offsets\":[0,8,8]}}", "a: data_offsets"},
    {"{\"a\":{\"dtype\":\"BF16\",\"shape\":[4],\"data_offsets\":[8,0]}}", "a: data_offsets"},
    {"{\"a\":{\"dtype\":\"BF16\",\"shape\":[4],\"data_offsets\":[0,6]}}", "a: data_offsets"},
    {"{\"a\":{\"dtype\":\"BF16\",\"shape\":[4],\"data_offsets\":[2,10]}}", "a: data_offsets"},
    {"{\"a\":{\"dtype\":\"BF16\",\"shape\":[3],\"data_offsets\":[2,8]}}", "a: data_offsets"},
    {"{\"a\":{\"dtype\":\"BF16\",\"shape\":[3],\"data_offsets\":[0,6]}}", "data: 8 bytes"},
    {"{\"a\":{\"dtype\":\"BF16\",\"shape\":[3],\"data_offsets\":[0,6]},"
     "\"b\":{\"dtype\":\"BF16\",\"shape\":[3],\"data_offsets\":[2,8]}}",
     "b: data_offsets"},
};

static void test_broken_headers(void **state)
{
    char path[128], bytes[1024], error[ERROR_CHARS];
    (void)state;
    snprintf(path, sizeof path, "%s/model.safetensors", folder);
    for (size_t i = 0; i < sizeof broken_headers / sizeof broken_headers[0]; i++) {
        const size_t n = strlen(broken_headers[i].header);
        safetensors st;
        memset(bytes, 0, sizeof bytes);
        bytes[0] = (char)(n & 255);
        bytes[1] = (char)(n >> 8);
        memcpy(bytes + 8, broken_headers[i].header, n);
        write_file(path, bytes, 8 + n + 8);
        if (safetensors_open(&st, path, error) != -1)
            fail_msg("accepted: %s", broken_headers[i].header);
        safetensors_close(&st);
        check_message(error, path, broken_headers[i].field);
    }
}

/* The same header without a mistake is accepted: the list above fails for its mistakes. */
static void test_small_header(void **state)
{
    static const char header[] =
        "{\"b\":{\"dtype\":\"BF16\",\"shape\":[2],\"data_offsets\":[4,8]} , "
        "\"a\":{\"dtype\":\"BF16\",\"shape\":[1,2],\"data_offsets\":[0,4]}}";
    static const unsigned char data[8] = {0x80, 0x3f, 0x00, 0xc0, 0x80, 0x7f, 0x00, 0x40};
    unsigned char bytes[256] = {sizeof header - 1};
    char path[128], error[ERROR_CHARS];
    float *a = NULL, *b = NULL;
    safetensors st;
    (void)state;
    snprintf(path, sizeof path, "%s/model.safetensors", folder);
    memcpy(bytes + 8, header, sizeof header - 1);
    memcpy(bytes + 8 + sizeof header - 1, data, 8);
    write_file(path, bytes, 8 + sizeof header - 1 + 8);
    TU_CHECK_INT(safetensors_open(&st, path, error), 0);
    TU_CHECK_INT(safetensors_load(&st, "a", 1, 2, &a, error), 0);
    TU_CHECK(a[0] == 1 && a[1] == -2, "%g %g", a[0], a[1]);
    TU_CHECK_INT(safetensors_load(&st, "b", 0, 2, &b, error), -1);
    check_message(error, path, "b: element 0 is not finite");
    free(a);
    free(b);
    TU_CHECK_INT(safetensors_load(&st, "c", 0, 2, &b, error), -1);
    check_message(error, path, "c: missing");
    TU_CHECK_INT(safetensors_load(&st, "a", 2, 1, &b, error), -1);
    check_message(error, path, "a: shape");
    TU_CHECK_INT(safetensors_load(&st, "a", 0, 2, &b, error), -1);
    check_message(error, path, "a: shape");
    safetensors_close(&st);
}

/* Load the folder with one file replaced by a copy in which `from` (once, same length or shorter
   text) became `to`. */
static void check_replaced(const char *name, const char *from, const char *to, const char *field)
{
    static const char *const names[] = {"config.json", "model.safetensors"};
    char path[128], original[256], error[ERROR_CHARS] = "";
    model m;
    for (int i = 0; i < 2; i++) {
        size_t size;
        char *bytes;
        snprintf(original, sizeof original, "%s/%s", TINY_MLA_DIR, names[i]);
        snprintf(path, sizeof path, "%s/%s", folder, names[i]);
        bytes = read_file(original, &size, error);
        assert_non_null(bytes);
        if (!strcmp(names[i], name)) {
            const size_t n = strlen(from);
            char *at = bytes;
            while (at < bytes + size - n && memcmp(at, from, n)) at++;
            TU_CHECK(at < bytes + size - n && strlen(to) <= n, "%s", from);
            memset(at, ' ', n);
            memcpy(at, to, strlen(to));
        }
        write_file(path, bytes, size);
        free(bytes);
    }
    if (model_load(&m, folder, error) != -1) fail_msg("accepted: %s for %s", to, from);
    snprintf(path, sizeof path, "%s/%s", folder, name);
    check_message(error, path, field);
}

static void test_broken_config(void **state)
{
    static const struct {
        const char *from, *to, *field;
    } cases[] = {
        {"{", " ", "JSON"},
        {"}", " ", "JSON"},
        {"\"deepseek_v3\"", "\"llama\"", "model_type"},
        {"\"hidden_size\": 256", "\"hidden_size\": 255", "hidden_size"},
        {"\"hidden_size\": 256", "\"hidden_size\": -16", "hidden_size"},
        {"\"hidden_size\": 256", "\"hidden_size\": 9e9", "hidden_size"},
        {"\"hidden_size\": 256", "\"hidden_siza\": 256", "hidden_size"},
        {"\"vocab_size\": 256", "\"vocab_size\": 128", "vocab_size"},
        {"\"kv_lora_rank\": 512", "\"kv_lora_rank\": 256", "kv_lora_rank"},
        {"\"qk_rope_head_dim\": 64", "\"qk_rope_head_dim\": 32", "qk_rope_head_dim"},
        {"\"num_hidden_layers\": 4", "\"num_hidden_layers\": 0", "num_hidden_layers"},
        {"\"num_attention_heads\": 8", "\"num_attention_heads\":\"\"", "num_attention_heads"},
        {"\"q_lora_rank\": null", "\"q_lora_rank\": 16", "q_lora_rank"},
        {"\"first_k_dense_replace\": 4", "\"first_k_dense_replace\": 1", "first_k_dense_replace"},
        {"\"rms_norm_eps\": 1e-06", "\"rms_norm_eps\": true", "rms_norm_eps"},
        {"\"rope_theta\": 10000.0", "\"rope_theta\": 0", "rope_theta"},
        {"\"hidden_act\": \"silu\"", "\"hidden_act\": \"relu\"", "hidden_act"},
        {"\"tie_word_embeddings\": true", "\"tie_word_embeddings\":false", "tie_word_embeddings"},
        {"\"rope_interleave\": true", "\"rope_interleave\":false", "rope_interleave"},
        {"\"rope_type\": \"default\"", "\"rope_type\": \"yarn\"", "rope_type"},
        {"\"initializer_range\"", "\"hidden_size\"", "hidden_size"}, /* given twice */
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        check_replaced("config.json", cases[i].from, cases[i].to, cases[i].field);
}

static void test_broken_model(void **state)
{
    (void)state;
    /* widths that config.json and the tensors do not agree on are the tensors' fault by name */
    check_replaced("model.safetensors", "model.layers.3.mlp.up_proj", "model.layers.3.mlp.up_prox",
                   "model.layers.3.mlp.up_proj.weight: missing");
    check_replaced("model.safetensors", "\"shape\":[768,256]", "\"shape\":[256,768]",
                   "model.layers.0.self_attn.q_proj.weight: shape");
    check_replaced("model.safetensors", "\"dtype\":\"BF16\"", "\"dtype\":\"F16\"",
                   "model.embed_tokens.weight: dtype");
    check_replaced("model.safetensors", "\"data_offsets\":[0,131072]",
                   "\"data_offsets\":[0,131070]", "model.embed_tokens.weight: data_offsets");
}

static void test_truncated_model(void **state)
{
    static const size_t lengths[] = {0, 1, 7, 8, 9, 100, 4599, 4600, 4601, 1000000, 8664055};
    char path[128], error[ERROR_CHARS];
    size_t size;
    char *bytes = read_file(TINY_MLA_DIR "/model.safetensors", &size, error);
    (void)state;
    assert_non_null(bytes);
    TU_CHECK_INT(size, 8664056);
    snprintf(path, sizeof path, "%s/model.safetensors", folder);
    for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++) {
        safetensors st;
        write_file(path, bytes, lengths[i]);
        TU_CHECK_INT(safetensors_open(&st, path, error), -1);
        safetensors_close(&st);
        check_message(error, path, lengths[i] < 4600 ? "header" : "data");
    }
    free(bytes);
}

/* Wrong options end the program with 1 before it does anything. */
static void test_options(void **state)
{
    static const char *const wrong[][2] = {
        {"--tokens", "many"}, {"--tokens", "-1"}, {"--temp", "nan"}, {"--top-k", "0"},
        {"--bytes", "1e99"},  {"--context", "1"}, {"--seed", ""},    {"--model", NULL},
        {"--nonsense", "1"},  {"--prompt", NULL}, {"--tokens", NULL}};
    (void)state;
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        char *argv[] = {(char *)"tiny_mla", (char *)wrong[i][0], (char *)wrong[i][1], NULL};
        options o;
        memset(&o, 0, sizeof o);
        TU_CHECK_INT(parse_options(&o, wrong[i][1] ? 3 : 2, argv), -1);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_model),
        cmocka_unit_test(test_card_log_probabilities),
        cmocka_unit_test(test_card_rounded_formats),
        cmocka_unit_test(test_card_layer0),
        cmocka_unit_test(test_card_window),
        cmocka_unit_test(test_card_greedy),
        cmocka_unit_test(test_formats),
        cmocka_unit_test(test_batches_and_threads),
        cmocka_unit_test(test_full_context_ends),
        cmocka_unit_test(test_block_table),
        cmocka_unit_test(test_sampling),
        cmocka_unit_test(test_sampling_is_repeatable),
        cmocka_unit_test_setup_teardown(test_broken_headers, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(test_small_header, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(test_broken_config, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(test_broken_model, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(test_truncated_model, make_folder, remove_folder),
        cmocka_unit_test(test_options),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
