/* test_api.c - what the host side of snapmla.cuh checks and computes; needs no GPU.

   Every code of SNAPMLA_RESULT_LIST is provoked by one wrong field in an otherwise good desc,
   through every function that looks at that field.  Pointers are made up: a call that returns an
   error must not touch them, and none of these descs gets further than the checks. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <cmocka.h>

#include "snapmla.cuh"
#include "test_util.h"

/* ================================================================================================
   Good descs, and which codes were seen
   ============================================================================================== */
enum { kSms = 132 };
#define COUNT(array) ((int)(sizeof(array) / sizeof(array)[0]))

typedef struct known_result {
    snapmla_result result;
    const char *name;
    const char *text;
} known_result;

static const known_result results[] = {
#define ROW(name, value, text) {name, #name, text},
    SNAPMLA_RESULT_LIST(ROW)
#undef ROW
};
enum { kResults = sizeof results / sizeof results[0] };
static int provoked[kResults];

static const char *name_of(snapmla_result result)
{
    for (int i = 0; i < kResults; i++) {
        if (results[i].result == result) return results[i].name;
    }
    return "a code that is not in the list";
}

static void expect(const char *file, int line, const char *call, snapmla_result got,
                   snapmla_result wanted)
{
    if (got != wanted) {
        print_error("%s:%d: %s gave %s, wanted %s\n", file, line, call, name_of(got),
                    name_of(wanted));
        fail();
    }
    for (int i = 0; i < kResults; i++) provoked[i] |= results[i].result == got;
}
#define EXPECT(call, wanted) expect(__FILE__, __LINE__, #call, (call), (wanted))

/* n-th made-up device buffer, 4 GiB apart */
static void *at(uintptr_t n) { return (void *)(n << 32); }

static snapmla_step good_step(void)
{
    snapmla_step step;
    memset(&step, 0, sizeof step);
    step.batch = 3;
    step.s_q = 2;
    step.heads = 16;
    step.sm_count = kSms;
    step.path = SNAPMLA_PATH_GENERAL;
    step.seq_lens = (const int32_t *)at(1);
    step.plan = at(2);
    step.plan_bytes = (size_t)1 << 30;
    return step;
}

static snapmla_cache good_cache(void)
{
    snapmla_cache cache;
    memset(&cache, 0, sizeof cache);
    cache.content = at(3);
    cache.scale = (float *)at(4);
    cache.rope = at(5);
    cache.pages = 100;
    return cache;
}

static snapmla_decode_desc good_decode(void)
{
    snapmla_decode_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.step = good_step();
    desc.cache = good_cache();
    desc.block_table = (const int32_t *)at(6);
    desc.block_table_width = 10;
    desc.softmax_scale = 0.1352f;
    desc.q = at(7);
    desc.out = at(8);
    desc.lse = (float *)at(9);
    desc.workspace = at(10);
    desc.workspace_bytes = (size_t)1 << 32;
    return desc;
}

static snapmla_decode_desc good_decode_planes(void)
{
    snapmla_decode_desc desc = good_decode();
    desc.q = NULL;
    desc.q_content = at(11);
    desc.q_scale = (const float *)at(12);
    desc.q_rope = at(13);
    return desc;
}

static snapmla_quantize_q_desc good_quantize(void)
{
    snapmla_quantize_q_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.tokens = 5;
    desc.heads = 16;
    desc.q = at(7);
    desc.q_content = at(11);
    desc.q_scale = (float *)at(12);
    desc.q_rope = at(13);
    return desc;
}

static snapmla_append_desc good_append(void)
{
    snapmla_append_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.cache = good_cache();
    desc.tokens = 5;
    desc.latent = at(14);
    desc.slots = (const int64_t *)at(15);
    return desc;
}

static snapmla_fetch_desc good_fetch(void)
{
    snapmla_fetch_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.cache = good_cache();
    desc.tokens = 5;
    desc.latent = at(14);
    desc.slots = (const int64_t *)at(15);
    return desc;
}

static snapmla_quantize_q_desc good_quantize_rotated(void)
{
    snapmla_quantize_q_desc desc = good_quantize();
    desc.rope = at(21);
    desc.rotation.positions = (const int64_t *)at(22);
    desc.rotation.cosines = (const float *)at(23);
    return desc;
}

static snapmla_append_desc good_append_raw(void)
{
    snapmla_append_desc desc = good_append();
    desc.norm.weight = at(24);
    desc.rotation.positions = (const int64_t *)at(22);
    desc.rotation.cosines = (const float *)at(23);
    return desc;
}

static snapmla_fetch_desc good_fetch_ranges(void)
{
    snapmla_fetch_desc desc = good_fetch();
    desc.slots = NULL;
    desc.block_table = (const int32_t *)at(6);
    desc.block_table_width = 10;
    desc.batch = 3;
    desc.row_starts = (const int32_t *)at(25);
    return desc;
}

enum { kLayers = 3 };

/* The caches of a copy: arrays that a test may change. */
static snapmla_cache copy_from[kLayers], copy_to[kLayers];

static snapmla_copy_pages_desc good_copy_pages(void)
{
    snapmla_copy_pages_desc desc;
    memset(&desc, 0, sizeof desc);
    for (int l = 0; l < kLayers; l++) {
        copy_from[l] = copy_to[l] = good_cache();
        copy_from[l].content = at(30 + (uintptr_t)l);
        copy_to[l].content = at(40 + (uintptr_t)l);
    }
    desc.layers = kLayers;
    desc.source = copy_from;
    desc.destination = copy_to;
    desc.count = 7;
    desc.pairs = (const int32_t *)at(26);
    return desc;
}

static snapmla_import_desc good_import(void)
{
    snapmla_import_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.cache = good_cache();
    desc.source = at(27);
    desc.tokens = 5;
    return desc;
}

static snapmla_import_desc good_import_records(void)
{
    snapmla_import_desc desc = good_import();
    desc.format = SNAPMLA_SOURCE_RECORD_656;
    return desc;
}

static snapmla_merge_desc good_merge(void)
{
    snapmla_merge_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.parts = 2;
    desc.rows = 6;
    desc.part_out = at(16);
    desc.part_lse = (const float *)at(17);
    desc.out = at(8);
    desc.lse = (float *)at(9);
    return desc;
}

static void plus(const void **pointer, int bytes) { *pointer = (const char *)*pointer + bytes; }
#define SHIFT(field, bytes) plus((const void **)(void *)&(field), (bytes))

/* One wrong thing in a good desc; `d` is the desc. */
#define BAD_STEP(wanted, ...)                                 \
    do {                                                      \
        snapmla_step d = good_step();                         \
        size_t bytes = 12345;                                 \
        __VA_ARGS__;                                          \
        EXPECT(snapmla_plan_bytes(&d, &bytes), wanted);       \
        EXPECT(snapmla_decode_workspace(&d, &bytes), wanted); \
        EXPECT(snapmla_plan(&d), wanted);                     \
        TU_CHECK_INT(bytes, 12345);                           \
    } while (0)

#define BAD_DECODE_OF(make, wanted, ...)                        \
    do {                                                        \
        snapmla_decode_desc d = make(), resolved, untouched;    \
        memset(&resolved, 0xa5, sizeof resolved);               \
        memset(&untouched, 0xa5, sizeof untouched);             \
        __VA_ARGS__;                                            \
        EXPECT(snapmla_resolve(&d, &resolved), wanted);         \
        TU_CHECK_BYTES(&resolved, &untouched, sizeof resolved); \
        EXPECT(snapmla_decode(&d), wanted);                     \
    } while (0)
#define BAD_DECODE(wanted, ...) BAD_DECODE_OF(good_decode, wanted, __VA_ARGS__)
#define BAD_PLANES(wanted, ...) BAD_DECODE_OF(good_decode_planes, wanted, __VA_ARGS__)

#define BAD_OF(make, kind, function, wanted, ...) \
    do {                                          \
        snapmla_##kind##_desc d = make();         \
        __VA_ARGS__;                              \
        EXPECT(snapmla_##function(&d), wanted);   \
    } while (0)
#define BAD(kind, function, wanted, ...) BAD_OF(good_##kind, kind, function, wanted, __VA_ARGS__)
#define BAD_QUANTIZE(wanted, ...) BAD(quantize, quantize_q, wanted, __VA_ARGS__)
#define BAD_APPEND(wanted, ...) BAD(append, append, wanted, __VA_ARGS__)
#define BAD_FETCH(wanted, ...) BAD(fetch, fetch, wanted, __VA_ARGS__)
#define BAD_MERGE(wanted, ...) BAD(merge, merge, wanted, __VA_ARGS__)
#define BAD_COPY(wanted, ...) BAD(copy_pages, copy_pages, wanted, __VA_ARGS__)
#define BAD_IMPORT(wanted, ...) BAD(import, import, wanted, __VA_ARGS__)
#define BAD_ROTATED(wanted, ...) \
    BAD_OF(good_quantize_rotated, quantize, quantize_q, wanted, __VA_ARGS__)
#define BAD_RAW(wanted, ...) BAD_OF(good_append_raw, append, append, wanted, __VA_ARGS__)
#define BAD_RANGES(wanted, ...) BAD_OF(good_fetch_ranges, fetch, fetch, wanted, __VA_ARGS__)
#define BAD_RECORDS(wanted, ...) BAD_OF(good_import_records, import, import, wanted, __VA_ARGS__)

/* A wrong rotation, in both descs that have one. */
#define BAD_ROTATION(wanted, ...)                                            \
    do {                                                                     \
        BAD_ROTATED(wanted, snapmla_rotation *r = &d.rotation; __VA_ARGS__); \
        BAD_RAW(wanted, snapmla_rotation *r = &d.rotation; __VA_ARGS__);     \
    } while (0)

/* A wrong cache, in every desc that has one. */
#define BAD_CACHE(wanted, ...)                                         \
    do {                                                               \
        BAD_DECODE(wanted, snapmla_cache *c = &d.cache; __VA_ARGS__);  \
        BAD_APPEND(wanted, snapmla_cache *c = &d.cache; __VA_ARGS__);  \
        BAD_FETCH(wanted, snapmla_cache *c = &d.cache; __VA_ARGS__);   \
        BAD_IMPORT(wanted, snapmla_cache *c = &d.cache; __VA_ARGS__);  \
        BAD_COPY(wanted, snapmla_cache *c = copy_from; __VA_ARGS__);   \
        BAD_COPY(wanted, snapmla_cache *c = copy_to + 2; __VA_ARGS__); \
    } while (0)

typedef snapmla_quantize_q_desc snapmla_quantize_desc; /* the name that BAD() makes */

/* ================================================================================================
   Good calls
   ============================================================================================== */
static void test_version_and_texts(void **state)
{
    (void)state;
    assert_int_equal(snapmla_version(), SNAPMLA_VERSION);
    for (int i = 0; i < kResults; i++) {
        assert_string_equal(snapmla_result_string(results[i].result), results[i].text);
        for (int j = 0; j < i; j++) {
            assert_int_not_equal(results[i].result, results[j].result);
            assert_string_not_equal(results[i].text, results[j].text);
        }
        TU_CHECK(i == 0 || results[i].result == results[i - 1].result - 1, "%s", results[i].name);
    }
    assert_non_null(snapmla_result_string((snapmla_result)-12345));
    assert_non_null(snapmla_result_string((snapmla_result)7));
}

static void test_resolve_fills_defaults(void **state)
{
    (void)state;
    snapmla_decode_desc desc = good_decode(), r;
    desc.cache.page_size = desc.step.page_size = 16;
    EXPECT(snapmla_resolve(&desc, &r), SNAPMLA_OK);
    TU_CHECK_INT(r.step.latent_dim, 512);
    TU_CHECK_INT(r.step.rope_dim, 64);
    TU_CHECK_INT(r.step.page_size, 16);
    TU_CHECK_INT(r.step.sm_count, kSms);
    TU_CHECK_INT(r.step.path, SNAPMLA_PATH_GENERAL);
    TU_CHECK_INT(r.cache.latent_dim, 512);
    TU_CHECK_INT(r.cache.rope_dim, 64);
    TU_CHECK_INT(r.cache.content_page_stride, 16 * 512);
    TU_CHECK_INT(r.cache.scale_page_stride, 16);
    TU_CHECK_INT(r.cache.rope_page_stride, 16 * 64);
    TU_CHECK_INT(r.block_table_stride, 10);
    TU_CHECK_INT(r.q_head_stride, 576);
    TU_CHECK_INT(r.q_token_stride, 16 * 576);
    TU_CHECK_INT(r.q_batch_stride, 2 * 16 * 576);
    TU_CHECK_INT(r.out_head_stride, 512);
    TU_CHECK_INT(r.out_token_stride, 16 * 512);
    TU_CHECK_INT(r.out_batch_stride, 2 * 16 * 512);
    TU_CHECK_INT(r.lse_token_stride, 16);
    TU_CHECK_INT(r.lse_batch_stride, 2 * 16);
    TU_CHECK(r.q == desc.q && r.out == desc.out && r.lse == desc.lse, "pointers");
    TU_CHECK(r.softmax_scale == desc.softmax_scale, "scale %g", (double)r.softmax_scale);

    /* what is resolved resolves to itself */
    snapmla_decode_desc again;
    memset(&again, 0, sizeof again);
    EXPECT(snapmla_resolve(&r, &again), SNAPMLA_OK);
    TU_CHECK_INT(again.q_batch_stride, r.q_batch_stride);
    TU_CHECK_INT(again.cache.content_page_stride, r.cache.content_page_stride);
    TU_CHECK_INT(again.step.page_size, 16);

    /* in place */
    EXPECT(snapmla_resolve(&desc, &desc), SNAPMLA_OK);
    TU_CHECK_INT(desc.q_token_stride, 16 * 576);

    /* given strides stay; defaults of the outer ones follow the inner ones */
    desc = good_decode();
    desc.q_head_stride = 600;
    desc.out_token_stride = 16 * 512 + 8;
    EXPECT(snapmla_resolve(&desc, &r), SNAPMLA_OK);
    TU_CHECK_INT(r.q_head_stride, 600);
    TU_CHECK_INT(r.out_token_stride, 16 * 512 + 8);
    TU_CHECK(r.q_token_stride >= 16 * 600 - 24, "%lld", (long long)r.q_token_stride);
    TU_CHECK(r.q_batch_stride >= 2 * r.q_token_stride - 24, "%lld", (long long)r.q_batch_stride);
    TU_CHECK(r.out_batch_stride >= 2 * r.out_token_stride - 8, "%lld",
             (long long)r.out_batch_stride);
}

/* Unusual but legal. */
static void test_legal_descs(void **state)
{
    (void)state;
    snapmla_decode_desc r;
#define LEGAL(...)                                   \
    do {                                             \
        snapmla_decode_desc d = good_decode();       \
        __VA_ARGS__;                                 \
        EXPECT(snapmla_resolve(&d, &r), SNAPMLA_OK); \
    } while (0)
    LEGAL((void)0);
    LEGAL(d = good_decode_planes());
    LEGAL(d.lse = NULL);
    LEGAL(d.cache.pages = 0, d.cache.content = NULL, d.cache.scale = NULL, d.cache.rope = NULL);
    LEGAL(d.block_table = NULL, d.block_table_width = 0);
    LEGAL(d.block_table_stride = 1 << 20);
    LEGAL(d.step.latent_dim = 512, d.cache.rope_dim = 64);
    LEGAL(d.step.page_size = 64);
    LEGAL(d.cache.pages = INT64_MAX / (1 << 20));
    LEGAL(d.cache.content_page_stride = 64 * 644, d.cache.scale_page_stride = 64 * 161,
          d.cache.rope_page_stride = 64 * 322);
    LEGAL(d.causal = 1);
    LEGAL(d.step.max_seq_len = INT32_MAX);
    LEGAL(d.step.max_seq_len = 4096, d.step.split_tokens = 128);
    LEGAL(d.step.sm_count = 1);
    LEGAL(d.softmax_scale = 1e-30f);
    for (int page = 1; page <= 1024; page *= 2) {
        LEGAL(d.step.page_size = d.cache.page_size = page);
        if (page < 4)
            LEGAL(d.step.page_size = d.cache.page_size = page, SHIFT(d.cache.scale, 4 * page));
    }
#undef LEGAL
}

/* Sizes and dense strides that would overflow are refused, not wrapped. */
static void test_overflow_is_refused(void **state)
{
    (void)state;
    size_t bytes = 77;
    snapmla_decode_desc r, d = good_decode();
    snapmla_step step = good_step(); /* its workspace is 2^64 + 269,046,272 bytes */
    step.batch = 33296531;
    step.s_q = step.heads = 1;
    step.max_seq_len = 16776102 * 128;
    step.split_tokens = 128;
    EXPECT(snapmla_decode_workspace(&step, &bytes), SNAPMLA_ERROR_SPLIT_TOKENS);
    EXPECT(snapmla_plan_bytes(&step, &bytes), SNAPMLA_ERROR_SPLIT_TOKENS);
    TU_CHECK_INT(bytes, 77);
    step.batch = 1; /* the largest request, in its smallest splits */
    EXPECT(snapmla_decode_workspace(&step, &bytes), SNAPMLA_OK);
    TU_CHECK_INT(bytes, (size_t)16776102 * 16 * (512 * 4 + 16));

    d.step.heads = 4;
    d.q_head_stride = ((int64_t)1 << 62) + 576; /* times 4 wraps to 2304, a legal stride */
    EXPECT(snapmla_resolve(&d, &r), SNAPMLA_ERROR_Q_ALIGN);
    d = good_decode();
    d.out_head_stride = ((int64_t)1 << 62) + 512;
    EXPECT(snapmla_resolve(&d, &r), SNAPMLA_ERROR_OUT_ALIGN);
    d = good_decode();
    d.q_head_stride = INT64_MIN + 8;
    EXPECT(snapmla_resolve(&d, &r), SNAPMLA_ERROR_Q_STRIDE);
    snapmla_quantize_q_desc q = good_quantize();
    q.heads = 4;
    q.q_head_stride = ((int64_t)1 << 62) + 576;
    EXPECT(snapmla_quantize_q(&q), SNAPMLA_ERROR_Q_ALIGN);
}

/* Nothing to do is OK, whatever the other fields hold, without a device. */
static void test_nothing_to_do(void **state)
{
    (void)state;
    snapmla_step step = good_step();
    step.batch = 0;
    EXPECT(snapmla_plan(&step), SNAPMLA_OK);
    snapmla_decode_desc desc = good_decode();
    desc.step.batch = 0;
    EXPECT(snapmla_decode(&desc), SNAPMLA_OK);
    desc = good_decode();
    desc.step.s_q = 0;
    EXPECT(snapmla_decode(&desc), SNAPMLA_OK);
    EXPECT(snapmla_plan(&desc.step), SNAPMLA_OK);
    desc = good_decode();
    desc.step.heads = 0;
    EXPECT(snapmla_decode(&desc), SNAPMLA_OK);
    EXPECT(snapmla_plan(&desc.step), SNAPMLA_OK);
    BAD_QUANTIZE(SNAPMLA_OK, d.tokens = 0);
    BAD_QUANTIZE(SNAPMLA_OK, d.heads = 0);
    BAD_APPEND(SNAPMLA_OK, d.tokens = 0);
    BAD_FETCH(SNAPMLA_OK, d.tokens = 0);
    BAD_COPY(SNAPMLA_OK, d.layers = 0);
    BAD_COPY(SNAPMLA_OK, d.count = 0);
    BAD_COPY(SNAPMLA_OK, d.layers = 0, d.source = NULL, d.destination = NULL, d.pairs = NULL);
    BAD_IMPORT(SNAPMLA_OK, d.tokens = 0);
    BAD_IMPORT(SNAPMLA_OK, d.tokens = 0, d.source = NULL);
    BAD_MERGE(SNAPMLA_OK, d.rows = 0);
    BAD_MERGE(SNAPMLA_OK, d.rows = 0, d.parts = 0);
}

/* ================================================================================================
   Every error code
   ============================================================================================== */
static void test_null_desc(void **state)
{
    (void)state;
    size_t bytes = 12345;
    snapmla_step step = good_step();
    snapmla_decode_desc desc = good_decode();
    EXPECT(snapmla_plan_bytes(NULL, &bytes), SNAPMLA_ERROR_NULL_DESC);
    EXPECT(snapmla_plan_bytes(&step, NULL), SNAPMLA_ERROR_NULL_DESC);
    EXPECT(snapmla_decode_workspace(NULL, &bytes), SNAPMLA_ERROR_NULL_DESC);
    EXPECT(snapmla_decode_workspace(&step, NULL), SNAPMLA_ERROR_NULL_DESC);
    EXPECT(snapmla_plan(NULL), SNAPMLA_ERROR_NULL_DESC);
    EXPECT(snapmla_decode(NULL), SNAPMLA_ERROR_NULL_DESC);
    EXPECT(snapmla_resolve(NULL, &desc), SNAPMLA_ERROR_NULL_DESC);
    EXPECT(snapmla_resolve(&desc, NULL), SNAPMLA_ERROR_NULL_DESC);
    EXPECT(snapmla_quantize_q(NULL), SNAPMLA_ERROR_NULL_DESC);
    EXPECT(snapmla_append(NULL), SNAPMLA_ERROR_NULL_DESC);
    EXPECT(snapmla_fetch(NULL), SNAPMLA_ERROR_NULL_DESC);
    EXPECT(snapmla_merge(NULL), SNAPMLA_ERROR_NULL_DESC);
    EXPECT(snapmla_copy_pages(NULL), SNAPMLA_ERROR_NULL_DESC);
    EXPECT(snapmla_import(NULL), SNAPMLA_ERROR_NULL_DESC);
    TU_CHECK_INT(bytes, 12345);
}

static void test_no_such_device(void **state)
{
    (void)state;
    snapmla_path path = SNAPMLA_PATH_FORCE_INT;
    EXPECT(snapmla_device_supported(-1, &path), SNAPMLA_ERROR_CUDA);
    EXPECT(snapmla_device_supported(1000000, &path), SNAPMLA_ERROR_CUDA);
    EXPECT(snapmla_device_supported(1000000, NULL), SNAPMLA_ERROR_CUDA);
    TU_CHECK_INT(path, SNAPMLA_PATH_FORCE_INT);
}

static void test_shape(void **state)
{
    (void)state;
    snapmla_step most = good_step(); /* 2^30 rows in all, and not one more */
    size_t bytes = 0;
    most.batch = 2;
    most.s_q = 1;
    most.heads = 1 << 29;
    EXPECT(snapmla_plan_bytes(&most, &bytes), SNAPMLA_OK);
    BAD_STEP(SNAPMLA_ERROR_HEADS, d.batch = 2, d.s_q = 1, d.heads = (1 << 29) + 1);
    BAD_STEP(SNAPMLA_ERROR_HEADS, d.batch = 1, d.s_q = 3, d.heads = 357913942);
    BAD_STEP(SNAPMLA_ERROR_BATCH, d.batch = -1);
    BAD_STEP(SNAPMLA_ERROR_BATCH, d.batch = INT32_MIN);
    BAD_STEP(SNAPMLA_ERROR_S_Q, d.s_q = -1);
    BAD_STEP(SNAPMLA_ERROR_HEADS, d.heads = -1);
    BAD_STEP(SNAPMLA_ERROR_HEADS, d.batch = d.s_q = d.heads = INT32_MAX);
    BAD_DECODE(SNAPMLA_ERROR_BATCH, d.step.batch = -1);
    BAD_DECODE(SNAPMLA_ERROR_S_Q, d.step.s_q = -1);
    BAD_DECODE(SNAPMLA_ERROR_HEADS, d.step.heads = -1);
    BAD_DECODE(SNAPMLA_ERROR_HEADS, d.step.batch = d.step.s_q = d.step.heads = INT32_MAX);
    BAD_QUANTIZE(SNAPMLA_ERROR_HEADS, d.heads = -1);
    BAD_QUANTIZE(SNAPMLA_ERROR_TOKENS, d.tokens = -1);
    BAD_QUANTIZE(SNAPMLA_ERROR_TOKENS, d.tokens = INT64_MAX);
    BAD_QUANTIZE(SNAPMLA_ERROR_TOKENS, d.tokens = ((int64_t)1 << 60) + 1); /* times 16 wraps to 16 */
    BAD_APPEND(SNAPMLA_ERROR_TOKENS, d.tokens = INT64_MAX);
    BAD_APPEND(SNAPMLA_ERROR_TOKENS, d.tokens = -1);
    BAD_FETCH(SNAPMLA_ERROR_TOKENS, d.tokens = INT64_MIN);
    BAD_FETCH(SNAPMLA_ERROR_BATCH, d.batch = -1);
    BAD_COPY(SNAPMLA_ERROR_TOKENS, d.count = -1);
    BAD_COPY(SNAPMLA_ERROR_TOKENS, d.count = INT64_MAX / 2);
    BAD_COPY(SNAPMLA_ERROR_LAYERS, d.layers = -1);
    BAD_IMPORT(SNAPMLA_ERROR_TOKENS, d.tokens = -1);
    BAD_IMPORT(SNAPMLA_ERROR_TOKENS, d.tokens = 6401); /* in order, and the cache has 6400 slots */
    BAD_MERGE(SNAPMLA_ERROR_TOKENS, d.rows = -1);
    BAD_MERGE(SNAPMLA_ERROR_TOKENS, d.rows = ((int64_t)1 << 55) + 1); /* times 512 wraps to 512 */
}

static void test_format(void **state)
{
    (void)state;
    static const int32_t pages[] = {-1, 3, 48, 63, 65, 1000, 2048, INT32_MAX, INT32_MIN};
    static const int32_t dims[] = {-1, 1, 500, 576, 1024, INT32_MAX};
    for (int i = 0; i < (int)(sizeof pages / sizeof pages[0]); i++) {
        BAD_STEP(SNAPMLA_ERROR_PAGE_SIZE, d.page_size = pages[i]);
        BAD_CACHE(SNAPMLA_ERROR_PAGE_SIZE, c->page_size = pages[i]);
    }
    for (int i = 0; i < (int)(sizeof dims / sizeof dims[0]); i++) {
        BAD_STEP(SNAPMLA_ERROR_LATENT_DIM, d.latent_dim = dims[i]);
        BAD_CACHE(SNAPMLA_ERROR_LATENT_DIM, c->latent_dim = dims[i]);
        BAD_QUANTIZE(SNAPMLA_ERROR_LATENT_DIM, d.latent_dim = dims[i]);
    }
    static const int32_t ropes[] = {-2, 1, 48, 63, 128, INT32_MAX};
    for (int i = 0; i < (int)(sizeof ropes / sizeof ropes[0]); i++) {
        BAD_STEP(SNAPMLA_ERROR_ROPE_DIM, d.rope_dim = ropes[i]);
        BAD_CACHE(SNAPMLA_ERROR_ROPE_DIM, c->rope_dim = ropes[i]);
        BAD_QUANTIZE(SNAPMLA_ERROR_ROPE_DIM, d.rope_dim = ropes[i]);
    }
    BAD_CACHE(SNAPMLA_ERROR_PAGES, c->pages = -1);
    BAD_DECODE(SNAPMLA_ERROR_STEP_CACHE, d.cache.page_size = 32);
    BAD_DECODE(SNAPMLA_ERROR_STEP_CACHE, d.step.page_size = 128);
}

static void test_policy(void **state)
{
    (void)state;
    BAD_STEP(SNAPMLA_ERROR_MAX_SEQ_LEN, d.max_seq_len = -1);
    BAD_STEP(SNAPMLA_ERROR_MAX_SEQ_LEN, d.split_tokens = 128);
    static const int32_t splits[] = {-128, -1, 1, 64, 127, 192, 4095, INT32_MAX};
    for (int i = 0; i < (int)(sizeof splits / sizeof splits[0]); i++) {
        BAD_STEP(SNAPMLA_ERROR_SPLIT_TOKENS, d.max_seq_len = 4096, d.split_tokens = splits[i]);
        BAD_DECODE(SNAPMLA_ERROR_SPLIT_TOKENS, d.step.max_seq_len = 4096,
                   d.step.split_tokens = splits[i]);
    }
    BAD_STEP(SNAPMLA_ERROR_MODE, d.mode = (snapmla_mode)99);
    BAD_STEP(SNAPMLA_ERROR_MODE, d.mode = (snapmla_mode)-1);
    BAD_STEP(SNAPMLA_ERROR_MODE, d.mode = (snapmla_mode)(SNAPMLA_MODE_PRECISE + 1));
    BAD_STEP(SNAPMLA_ERROR_PATH, d.path = (snapmla_path)99);
    BAD_STEP(SNAPMLA_ERROR_PATH, d.path = (snapmla_path)-1);
    BAD_STEP(SNAPMLA_ERROR_SM_COUNT, d.sm_count = -1);
    BAD_DECODE(SNAPMLA_ERROR_MAX_SEQ_LEN, d.step.max_seq_len = -1);
    BAD_DECODE(SNAPMLA_ERROR_MODE, d.step.mode = (snapmla_mode)99);
    BAD_DECODE(SNAPMLA_ERROR_PATH, d.step.path = (snapmla_path)99);
    BAD_DECODE(SNAPMLA_ERROR_SM_COUNT, d.step.sm_count = -1);
}

/* What snapmla_plan_bytes() and snapmla_decode_workspace() need not look at. */
#define BAD_PLAN(wanted, ...)                                     \
    do {                                                          \
        snapmla_step d = good_step();                             \
        size_t bytes = 0;                                         \
        __VA_ARGS__;                                              \
        EXPECT(snapmla_plan(&d), wanted);                         \
        EXPECT(snapmla_plan_bytes(&d, &bytes), SNAPMLA_OK);       \
        EXPECT(snapmla_decode_workspace(&d, &bytes), SNAPMLA_OK); \
    } while (0)

static void test_plan_buffer(void **state)
{
    (void)state;
    snapmla_step step = good_step();
    size_t needed = 0;
    EXPECT(snapmla_plan_bytes(&step, &needed), SNAPMLA_OK);
    TU_CHECK(needed > 0, "plan of %llu bytes", (unsigned long long)needed);
    BAD_PLAN(SNAPMLA_ERROR_NULL_SEQ_LENS, d.seq_lens = NULL);
    BAD_PLAN(SNAPMLA_ERROR_NULL_PLAN, d.plan = NULL);
    BAD_PLAN(SNAPMLA_ERROR_TABLE_ALIGN, SHIFT(d.seq_lens, 2));
    for (int shift = 1; shift < 16; shift++) {
        BAD_PLAN(SNAPMLA_ERROR_PLAN_ALIGN, SHIFT(d.plan, shift));
    }
    BAD_PLAN(SNAPMLA_ERROR_PLAN_BYTES, d.plan_bytes = needed - 1);
    BAD_PLAN(SNAPMLA_ERROR_PLAN_BYTES, d.plan_bytes = 0);
    BAD_DECODE(SNAPMLA_ERROR_NULL_SEQ_LENS, d.step.seq_lens = NULL);
    BAD_DECODE(SNAPMLA_ERROR_NULL_PLAN, d.step.plan = NULL);
    BAD_DECODE(SNAPMLA_ERROR_PLAN_ALIGN, SHIFT(d.step.plan, 8));
    BAD_DECODE(SNAPMLA_ERROR_PLAN_BYTES, d.step.plan_bytes = needed - 1);
}

static void test_cache_planes(void **state)
{
    (void)state;
    BAD_CACHE(SNAPMLA_ERROR_NULL_CONTENT, c->content = NULL);
    BAD_CACHE(SNAPMLA_ERROR_NULL_SCALE, c->scale = NULL);
    BAD_CACHE(SNAPMLA_ERROR_NULL_ROPE, c->rope = NULL);
    for (int shift = 1; shift < 16; shift++) {
        BAD_CACHE(SNAPMLA_ERROR_CONTENT_ALIGN, SHIFT(c->content, shift));
        BAD_CACHE(SNAPMLA_ERROR_SCALE_ALIGN, SHIFT(c->scale, shift));
        BAD_CACHE(SNAPMLA_ERROR_ROPE_ALIGN, SHIFT(c->rope, shift));
    }
    BAD_APPEND(SNAPMLA_ERROR_SCALE_ALIGN, d.cache.page_size = 1, SHIFT(d.cache.scale, 2));
    BAD_APPEND(SNAPMLA_ERROR_SCALE_ALIGN, d.cache.page_size = 2, SHIFT(d.cache.scale, 4));
    BAD_CACHE(SNAPMLA_ERROR_CONTENT_ALIGN, c->content_page_stride = 64 * 512 + 8);
    BAD_CACHE(SNAPMLA_ERROR_SCALE_ALIGN, c->scale_page_stride = 64 + 2);
    BAD_CACHE(SNAPMLA_ERROR_ROPE_ALIGN, c->rope_page_stride = 64 * 64 + 4);
    BAD_CACHE(SNAPMLA_ERROR_CONTENT_STRIDE, c->content_page_stride = 63 * 512);
    BAD_CACHE(SNAPMLA_ERROR_CONTENT_STRIDE, c->content_page_stride = -64 * 512);
    BAD_CACHE(SNAPMLA_ERROR_SCALE_STRIDE, c->scale_page_stride = 60);
    BAD_CACHE(SNAPMLA_ERROR_SCALE_STRIDE, c->scale_page_stride = -64);
    BAD_CACHE(SNAPMLA_ERROR_ROPE_STRIDE, c->rope_page_stride = 63 * 64);
    BAD_CACHE(SNAPMLA_ERROR_ROPE_STRIDE, c->rope_page_stride = -64 * 64);
}

static void test_decode_inputs(void **state)
{
    (void)state;
    BAD_DECODE(SNAPMLA_ERROR_TABLE_WIDTH, d.block_table_width = -1);
    BAD_DECODE(SNAPMLA_ERROR_NULL_BLOCK_TABLE, d.block_table = NULL);
    BAD_DECODE(SNAPMLA_ERROR_TABLE_STRIDE, d.block_table_stride = 9);
    BAD_DECODE(SNAPMLA_ERROR_TABLE_STRIDE, d.block_table_stride = -10);
    BAD_DECODE(SNAPMLA_ERROR_CAUSAL, d.causal = 2);
    BAD_DECODE(SNAPMLA_ERROR_CAUSAL, d.causal = -1);
    BAD_DECODE(SNAPMLA_ERROR_SOFTMAX_SCALE, d.softmax_scale = 0.0f);
    BAD_DECODE(SNAPMLA_ERROR_SOFTMAX_SCALE, d.softmax_scale = -1.0f);
    BAD_DECODE(SNAPMLA_ERROR_SOFTMAX_SCALE, d.softmax_scale = NAN);
    BAD_DECODE(SNAPMLA_ERROR_SOFTMAX_SCALE, d.softmax_scale = INFINITY);

    BAD_DECODE(SNAPMLA_ERROR_NULL_Q, d.q = NULL);
    BAD_PLANES(SNAPMLA_ERROR_NULL_Q, d.q_content = NULL);
    BAD_PLANES(SNAPMLA_ERROR_NULL_Q, d.q_scale = NULL);
    BAD_PLANES(SNAPMLA_ERROR_NULL_Q, d.q_rope = NULL);
    BAD_PLANES(SNAPMLA_ERROR_Q_TWICE, d.q = at(7));
    BAD_DECODE(SNAPMLA_ERROR_Q_TWICE, d.q_scale = (const float *)at(12));
    BAD_DECODE(SNAPMLA_ERROR_Q_ALIGN, SHIFT(d.q, 8));
    BAD_DECODE(SNAPMLA_ERROR_Q_ALIGN, SHIFT(d.q, 2));
    BAD_DECODE(SNAPMLA_ERROR_Q_ALIGN, d.q_head_stride = 580);
    BAD_DECODE(SNAPMLA_ERROR_Q_ALIGN, d.q_token_stride = 16 * 576 + 4);
    BAD_DECODE(SNAPMLA_ERROR_Q_ALIGN, d.q_batch_stride = 2 * 16 * 576 + 1);
    BAD_PLANES(SNAPMLA_ERROR_Q_ALIGN, SHIFT(d.q_content, 8));
    BAD_PLANES(SNAPMLA_ERROR_Q_ALIGN, SHIFT(d.q_scale, 2));
    BAD_PLANES(SNAPMLA_ERROR_Q_ALIGN, SHIFT(d.q_rope, 8));
    BAD_DECODE(SNAPMLA_ERROR_Q_STRIDE, d.q_head_stride = 568);
    BAD_DECODE(SNAPMLA_ERROR_Q_STRIDE, d.q_head_stride = -576);
    BAD_DECODE(SNAPMLA_ERROR_Q_STRIDE, d.q_token_stride = -16 * 576);
    BAD_DECODE(SNAPMLA_ERROR_Q_STRIDE, d.q_batch_stride = -2 * 16 * 576);
}

static void test_decode_outputs(void **state)
{
    (void)state;
    snapmla_step step = good_step();
    size_t needed = 0;
    EXPECT(snapmla_decode_workspace(&step, &needed), SNAPMLA_OK);
    BAD_DECODE(SNAPMLA_ERROR_NULL_OUT, d.out = NULL);
    BAD_DECODE(SNAPMLA_ERROR_OUT_ALIGN, SHIFT(d.out, 8));
    BAD_DECODE(SNAPMLA_ERROR_OUT_ALIGN, d.out_head_stride = 516);
    BAD_DECODE(SNAPMLA_ERROR_OUT_ALIGN, d.out_token_stride = 16 * 512 + 4);
    BAD_DECODE(SNAPMLA_ERROR_OUT_ALIGN, d.out_batch_stride = 2 * 16 * 512 + 1);
    BAD_DECODE(SNAPMLA_ERROR_OUT_STRIDE, d.out_head_stride = 504);
    BAD_DECODE(SNAPMLA_ERROR_OUT_STRIDE, d.out_head_stride = -512);
    BAD_DECODE(SNAPMLA_ERROR_OUT_STRIDE, d.out_token_stride = -16 * 512);
    BAD_DECODE(SNAPMLA_ERROR_OUT_STRIDE, d.out_batch_stride = -2 * 16 * 512);
    BAD_DECODE(SNAPMLA_ERROR_LSE_STRIDE, d.lse_token_stride = 15);
    BAD_DECODE(SNAPMLA_ERROR_LSE_STRIDE, d.lse_token_stride = -16);
    BAD_DECODE(SNAPMLA_ERROR_LSE_STRIDE, d.lse_batch_stride = -32);
    BAD_DECODE(SNAPMLA_ERROR_LSE_ALIGN, d.lse = (float *)at(20), SHIFT(d.lse, 2));
    BAD_DECODE(SNAPMLA_ERROR_TABLE_ALIGN, SHIFT(d.block_table, 2));
    BAD_DECODE(SNAPMLA_ERROR_TABLE_ALIGN, SHIFT(d.step.seq_lens, 1));
    TU_CHECK(needed > 0, "workspace of %llu bytes", (unsigned long long)needed);
    BAD_DECODE(SNAPMLA_ERROR_NULL_WORKSPACE, d.workspace = NULL);
    BAD_DECODE(SNAPMLA_ERROR_WORKSPACE_ALIGN, SHIFT(d.workspace, 4));
    BAD_DECODE(SNAPMLA_ERROR_WORKSPACE_BYTES, d.workspace_bytes = needed - 1);
    BAD_DECODE(SNAPMLA_ERROR_WORKSPACE_BYTES, d.workspace_bytes = 0);
}

static void test_quantize_buffers(void **state)
{
    (void)state;
    BAD_QUANTIZE(SNAPMLA_ERROR_NULL_Q, d.q = NULL);
    BAD_QUANTIZE(SNAPMLA_ERROR_NULL_Q, d.q_content = NULL);
    BAD_QUANTIZE(SNAPMLA_ERROR_NULL_Q, d.q_scale = NULL);
    BAD_QUANTIZE(SNAPMLA_ERROR_NULL_Q, d.q_rope = NULL);
    BAD_QUANTIZE(SNAPMLA_ERROR_Q_ALIGN, SHIFT(d.q, 8));
    BAD_QUANTIZE(SNAPMLA_ERROR_Q_ALIGN, d.q_head_stride = 580);
    BAD_QUANTIZE(SNAPMLA_ERROR_Q_ALIGN, d.q_token_stride = 16 * 576 + 4);
    BAD_QUANTIZE(SNAPMLA_ERROR_Q_ALIGN, SHIFT(d.q_content, 8));
    BAD_QUANTIZE(SNAPMLA_ERROR_Q_ALIGN, SHIFT(d.q_scale, 2));
    BAD_QUANTIZE(SNAPMLA_ERROR_Q_ALIGN, SHIFT(d.q_rope, 8));
    BAD_QUANTIZE(SNAPMLA_ERROR_Q_STRIDE, d.q_head_stride = 568);
    BAD_QUANTIZE(SNAPMLA_ERROR_Q_STRIDE, d.q_token_stride = -16 * 576);
}

static void test_key_buffers(void **state)
{
    (void)state;
    BAD_APPEND(SNAPMLA_ERROR_NULL_LATENT, d.latent = NULL);
    BAD_APPEND(SNAPMLA_ERROR_KEY_ALIGN, SHIFT(d.latent, 1));
    BAD_APPEND(SNAPMLA_ERROR_KEY_ALIGN, d.rope = at(18), SHIFT(d.rope, 1));
    BAD_APPEND(SNAPMLA_ERROR_KEY_STRIDE, d.latent_stride = 575);
    BAD_APPEND(SNAPMLA_ERROR_KEY_STRIDE, d.latent_stride = -576);
    BAD_APPEND(SNAPMLA_ERROR_KEY_STRIDE, d.rope = at(18), d.latent_stride = 511);
    BAD_APPEND(SNAPMLA_ERROR_KEY_STRIDE, d.rope = at(18), d.rope_stride = 63);
    BAD_APPEND(SNAPMLA_ERROR_KEY_STRIDE, d.rope = at(18), d.rope_stride = -64);
    BAD_APPEND(SNAPMLA_ERROR_NULL_SLOTS, d.slots = NULL);
    BAD_FETCH(SNAPMLA_ERROR_NULL_LATENT, d.latent = NULL);
    BAD_FETCH(SNAPMLA_ERROR_KEY_ALIGN, SHIFT(d.latent, 1));
    BAD_FETCH(SNAPMLA_ERROR_KEY_ALIGN, d.rope = at(18), SHIFT(d.rope, 1));
    BAD_FETCH(SNAPMLA_ERROR_KEY_STRIDE, d.latent_stride = 575);
    BAD_FETCH(SNAPMLA_ERROR_KEY_STRIDE, d.rope = at(18), d.rope_stride = 63);
    BAD_FETCH(SNAPMLA_ERROR_NULL_SLOTS, d.slots = NULL);
}

static void test_rotation_and_norm(void **state)
{
    (void)state;
    BAD_ROTATION(SNAPMLA_ERROR_NULL_POSITIONS, r->positions = NULL);
    BAD_ROTATION(SNAPMLA_ERROR_NULL_COSINES, r->cosines = NULL);
    BAD_ROTATION(SNAPMLA_ERROR_ROTATION_ALIGN, SHIFT(r->positions, 4));
    BAD_ROTATION(SNAPMLA_ERROR_ROTATION_ALIGN, SHIFT(r->cosines, 2));
    BAD_ROTATION(SNAPMLA_ERROR_ROTATION_ALIGN, r->sines = (const float *)at(28),
                 SHIFT(r->sines, 1));
    BAD_ROTATION(SNAPMLA_ERROR_ROTATION_STRIDE, r->table_stride = 63);
    BAD_ROTATION(SNAPMLA_ERROR_ROTATION_STRIDE, r->table_stride = -64);
    BAD_ROTATION(SNAPMLA_ERROR_ROTATION_STRIDE, r->sines = (const float *)at(28),
                 r->table_stride = 31);
    BAD_ROTATION(SNAPMLA_ERROR_ROTATION_LAYOUT, r->layout = (snapmla_rope_layout)2);
    BAD_ROTATION(SNAPMLA_ERROR_ROTATION_LAYOUT, r->layout = (snapmla_rope_layout)-1);
    BAD_RAW(SNAPMLA_ERROR_NORM_TYPE, d.norm.weight_type = (snapmla_number)2);
    for (int shift = 1; shift < 16; shift++) {
        BAD_RAW(SNAPMLA_ERROR_NORM_ALIGN, SHIFT(d.norm.weight, shift));
    }
    BAD_RAW(SNAPMLA_ERROR_NORM_EPS, d.norm.eps = -1e-6f);
    BAD_RAW(SNAPMLA_ERROR_NORM_EPS, d.norm.eps = NAN);
    BAD_RAW(SNAPMLA_ERROR_NORM_EPS, d.norm.eps = INFINITY);
    BAD_ROTATED(SNAPMLA_ERROR_Q_ALIGN, SHIFT(d.rope, 8));
    BAD_ROTATED(SNAPMLA_ERROR_Q_ALIGN, d.rope_head_stride = 68);
    BAD_ROTATED(SNAPMLA_ERROR_Q_ALIGN, d.rope_token_stride = 16 * 64 + 4);
    BAD_ROTATED(SNAPMLA_ERROR_Q_STRIDE, d.rope_head_stride = 56);
    BAD_ROTATED(SNAPMLA_ERROR_Q_STRIDE, d.rope_token_stride = -1024);
    BAD_ROTATED(SNAPMLA_ERROR_Q_STRIDE, d.q_head_stride = 504);
}

static void test_fetch_ranges(void **state)
{
    (void)state;
    BAD_RANGES(SNAPMLA_ERROR_TABLE_WIDTH, d.block_table_width = -1);
    BAD_RANGES(SNAPMLA_ERROR_TABLE_STRIDE, d.block_table_stride = 9);
    BAD_RANGES(SNAPMLA_ERROR_NULL_SLOTS, d.block_table = NULL);
    BAD_RANGES(SNAPMLA_ERROR_SLOTS_TWICE, d.slots = (const int64_t *)at(15));
    BAD_RANGES(SNAPMLA_ERROR_NULL_ROW_STARTS, d.row_starts = NULL);
    BAD_RANGES(SNAPMLA_ERROR_TABLE_ALIGN, SHIFT(d.block_table, 2));
    BAD_RANGES(SNAPMLA_ERROR_TABLE_ALIGN, SHIFT(d.row_starts, 1));
    BAD_RANGES(SNAPMLA_ERROR_TABLE_ALIGN, d.first = (const int32_t *)at(29), SHIFT(d.first, 2));
    BAD_FETCH(SNAPMLA_ERROR_TABLE_ALIGN, SHIFT(d.slots, 4));
    BAD_APPEND(SNAPMLA_ERROR_TABLE_ALIGN, SHIFT(d.slots, 4));
}

static void test_copy_buffers(void **state)
{
    (void)state;
    BAD_COPY(SNAPMLA_ERROR_NULL_SOURCE, d.source = NULL);
    BAD_COPY(SNAPMLA_ERROR_NULL_SOURCE, d.destination = NULL);
    BAD_COPY(SNAPMLA_ERROR_LAYERS_DIFFER, copy_from[1].page_size = 32);
    BAD_COPY(SNAPMLA_ERROR_LAYERS_DIFFER, copy_to[2].pages = 99);
    BAD_COPY(SNAPMLA_ERROR_LAYERS_DIFFER, copy_to[1].content_page_stride = 64 * 512 + 16);
    BAD_COPY(SNAPMLA_ERROR_LAYERS_DIFFER, copy_from[2].scale_page_stride = 68);
    BAD_COPY(SNAPMLA_ERROR_LAYERS_DIFFER, copy_from[1].rope_page_stride = 64 * 64 + 8);
    BAD_COPY(SNAPMLA_ERROR_COPY_FORMAT, d.layers = 1, copy_to[0].page_size = 32);
    BAD_COPY(SNAPMLA_ERROR_NULL_PAIRS, d.pairs = NULL);
    BAD_COPY(SNAPMLA_ERROR_TABLE_ALIGN, SHIFT(d.pairs, 4));
}

static void test_import_buffers(void **state)
{
    (void)state;
    BAD_IMPORT(SNAPMLA_ERROR_NULL_SOURCE, d.source = NULL);
    BAD_IMPORT(SNAPMLA_ERROR_SOURCE_FORMAT, d.format = (snapmla_source_format)2);
    BAD_IMPORT(SNAPMLA_ERROR_SOURCE_FORMAT, d.format = (snapmla_source_format)-1);
    static const int32_t pages[] = {-1, 3, 63, 2048, INT32_MAX, INT32_MIN};
    for (int i = 0; i < (int)(sizeof pages / sizeof pages[0]); i++) {
        BAD_IMPORT(SNAPMLA_ERROR_SOURCE_PAGE_SIZE, d.source_page_size = pages[i]);
    }
    BAD_IMPORT(SNAPMLA_ERROR_SOURCE_ALIGN, SHIFT(d.source, 1));
    BAD_RECORDS(SNAPMLA_ERROR_SOURCE_ALIGN, SHIFT(d.source, 2));
    BAD_RECORDS(SNAPMLA_ERROR_SOURCE_ALIGN, d.source_row_stride = 658);
    BAD_RECORDS(SNAPMLA_ERROR_SOURCE_ALIGN, d.source_page_stride = 656 * 64 + 2);
    BAD_IMPORT(SNAPMLA_ERROR_SOURCE_STRIDE, d.source_row_stride = 575);
    BAD_IMPORT(SNAPMLA_ERROR_SOURCE_STRIDE, d.source_row_stride = -576);
    BAD_IMPORT(SNAPMLA_ERROR_SOURCE_STRIDE, d.source_row_stride = INT64_MAX);
    BAD_IMPORT(SNAPMLA_ERROR_SOURCE_STRIDE, d.source_page_stride = 576 * 64 - 1);
    BAD_RECORDS(SNAPMLA_ERROR_SOURCE_STRIDE, d.source_row_stride = 652);
    BAD_RECORDS(SNAPMLA_ERROR_SOURCE_STRIDE, d.source_page_stride = INT64_MAX - 3);
    BAD_IMPORT(SNAPMLA_ERROR_TABLE_ALIGN, d.slots = (const int64_t *)at(15), SHIFT(d.slots, 4));
    BAD_IMPORT(SNAPMLA_ERROR_TABLE_ALIGN, d.source_slots = (const int64_t *)at(15),
               SHIFT(d.source_slots, 1));
}

static void test_merge_buffers(void **state)
{
    (void)state;
    BAD_MERGE(SNAPMLA_ERROR_PARTS, d.parts = -1);
    BAD_MERGE(SNAPMLA_ERROR_LSE_ALIGN, SHIFT(d.part_lse, 2));
    BAD_MERGE(SNAPMLA_ERROR_LSE_ALIGN, d.lse = (float *)at(21), SHIFT(d.lse, 1));
    BAD_MERGE(SNAPMLA_ERROR_PARTS, d.parts = 0);
    BAD_MERGE(SNAPMLA_ERROR_LATENT_DIM, d.dim = 12);
    BAD_MERGE(SNAPMLA_ERROR_LATENT_DIM, d.dim = -8);
    BAD_MERGE(SNAPMLA_ERROR_NULL_OUT, d.out = NULL);
    BAD_MERGE(SNAPMLA_ERROR_NULL_OUT, d.part_out = NULL);
    BAD_MERGE(SNAPMLA_ERROR_OUT_ALIGN, SHIFT(d.out, 8));
    BAD_MERGE(SNAPMLA_ERROR_OUT_ALIGN, SHIFT(d.part_out, 2));
    BAD_MERGE(SNAPMLA_ERROR_OUT_ALIGN, d.part_out_stride = 6 * 512 + 4);
    BAD_MERGE(SNAPMLA_ERROR_NULL_LSE, d.part_lse = NULL);
    BAD_MERGE(SNAPMLA_ERROR_PART_STRIDE, d.part_out_stride = 6 * 512 - 8);
    BAD_MERGE(SNAPMLA_ERROR_PART_STRIDE, d.part_out_stride = -6 * 512);
    BAD_MERGE(SNAPMLA_ERROR_PART_STRIDE, d.part_lse_stride = 5);
    BAD_MERGE(SNAPMLA_ERROR_PART_STRIDE, d.part_lse_stride = -6);
}

/* Of two wrong things the one that comes first in the list is named. */
static void test_order_of_checks(void **state)
{
    (void)state;
    BAD_STEP(SNAPMLA_ERROR_BATCH, d.batch = d.s_q = d.heads = -1);
    BAD_STEP(SNAPMLA_ERROR_S_Q, d.s_q = -1, d.page_size = 3);
    BAD_STEP(SNAPMLA_ERROR_LATENT_DIM, d.latent_dim = 1, d.rope_dim = 1, d.page_size = 3);
    BAD_STEP(SNAPMLA_ERROR_PAGE_SIZE, d.page_size = 3, d.max_seq_len = -1);
    BAD_STEP(SNAPMLA_ERROR_MAX_SEQ_LEN, d.max_seq_len = -1, d.split_tokens = 5);
    BAD_STEP(SNAPMLA_ERROR_MODE, d.mode = (snapmla_mode)9, d.path = (snapmla_path)9);
    BAD_STEP(SNAPMLA_ERROR_PATH, d.mode = SNAPMLA_MODE_PRECISE, d.path = (snapmla_path)9);
    BAD_PLAN(SNAPMLA_ERROR_NULL_SEQ_LENS, d.seq_lens = NULL, d.plan = NULL);
    BAD_DECODE(SNAPMLA_ERROR_NULL_PLAN, d.step.plan = NULL, d.cache.content = NULL);
    BAD_DECODE(SNAPMLA_ERROR_STEP_CACHE, d.cache.page_size = 32, d.cache.content = NULL);
    BAD_DECODE(SNAPMLA_ERROR_NULL_CONTENT, d.cache.content = NULL, d.cache.scale = NULL);
    BAD_DECODE(SNAPMLA_ERROR_NULL_BLOCK_TABLE, d.block_table = NULL, d.q = NULL);
    BAD_DECODE(SNAPMLA_ERROR_CAUSAL, d.causal = 7, d.softmax_scale = 0);
    BAD_DECODE(SNAPMLA_ERROR_NULL_Q, d.q = NULL, d.out = NULL, d.workspace = NULL);
    BAD_DECODE(SNAPMLA_ERROR_NULL_OUT, d.out = NULL, d.workspace = NULL);
    BAD_QUANTIZE(SNAPMLA_ERROR_HEADS, d.heads = -1, d.tokens = -1);
    BAD_APPEND(SNAPMLA_ERROR_TOKENS, d.tokens = -1, d.cache.page_size = 3, d.latent = NULL);
    BAD_APPEND(SNAPMLA_ERROR_NULL_SCALE, d.cache.scale = NULL, d.slots = NULL);
    BAD_MERGE(SNAPMLA_ERROR_TOKENS, d.rows = -1, d.parts = -1);
    BAD_RAW(SNAPMLA_ERROR_NULL_COSINES, d.rotation.cosines = NULL, d.norm.eps = -1);
    BAD_RANGES(SNAPMLA_ERROR_TABLE_WIDTH, d.block_table_width = -1, d.latent = NULL);
    BAD_COPY(SNAPMLA_ERROR_LAYERS_DIFFER, copy_from[1].pages = 1, d.pairs = NULL);
    BAD_IMPORT(SNAPMLA_ERROR_SOURCE_FORMAT, d.format = (snapmla_source_format)7,
               SHIFT(d.source, 1));
}

/* ================================================================================================
   Sizes
   ============================================================================================== */

/* What the size queries say is accepted, to the byte, and one byte less is not. */
static void test_exact_sizes(void **state)
{
    (void)state;
    for (int form = 0; form < 4; form++) {
        snapmla_decode_desc d = good_decode(), resolved;
        if (form & 1) d.step.max_seq_len = 5000, d.step.split_tokens = 256;
        if (form & 2) d.step.batch = 300, d.step.heads = 128;
        EXPECT(snapmla_plan_bytes(&d.step, &d.step.plan_bytes), SNAPMLA_OK);
        EXPECT(snapmla_decode_workspace(&d.step, &d.workspace_bytes), SNAPMLA_OK);
        EXPECT(snapmla_resolve(&d, &resolved), SNAPMLA_OK);
        d.workspace_bytes--;
        EXPECT(snapmla_resolve(&d, &resolved), SNAPMLA_ERROR_WORKSPACE_BYTES);
        d.workspace_bytes++;
        d.step.plan_bytes--;
        EXPECT(snapmla_resolve(&d, &resolved), SNAPMLA_ERROR_PLAN_BYTES);
    }
    /* with split_tokens fixed a plan also holds 64-bit sums, one more than there are requests */
    for (int32_t batch = 1; batch < 10; batch++) {
        snapmla_step step = good_step();
        size_t balanced = 0, fixed = 0;
        step.batch = batch;
        EXPECT(snapmla_plan_bytes(&step, &balanced), SNAPMLA_OK);
        step.max_seq_len = 1000;
        step.split_tokens = 128;
        EXPECT(snapmla_plan_bytes(&step, &fixed), SNAPMLA_OK);
        TU_CHECK(fixed >= balanced + 8 * ((size_t)batch + 1), "batch %d: %d and %d bytes", batch,
                 (int)balanced, (int)fixed);
    }
}

/* At most 2 * (SMs * rows of a tile * 512 floats + a few KB), whatever the batch, in the default policy. */
static void test_workspace_bound(void **state)
{
    (void)state;
    static const int32_t batches[] = {1, 2, 3, 7, 64, 131, 132, 133, 512, 4096, 20000, 70000};
    static const int32_t heads[] = {1, 3, 8, 16, 17, 64, 65, 128, 200};
    static const int32_t tokens[] = {1, 2, 3, 5, 8};
    static const snapmla_path paths[] = {SNAPMLA_PATH_GENERAL, SNAPMLA_PATH_SM90};
    static const snapmla_mode modes[] = {SNAPMLA_MODE_DEFAULT, SNAPMLA_MODE_PRECISE};
    const int shapes = COUNT(batches) * COUNT(heads) * COUNT(tokens);
    for (int k = 0; k < 4 * shapes; k++) {
        snapmla_step step = good_step();
        size_t bytes = 0, plan = 0;
        step.path = paths[k / shapes / 2];
        step.mode = modes[k / shapes % 2];
        step.batch = batches[k % COUNT(batches)];
        step.heads = heads[k / COUNT(batches) % COUNT(heads)];
        step.s_q = tokens[k / COUNT(batches) / COUNT(heads) % COUNT(tokens)];
        const int wide = step.path == SNAPMLA_PATH_SM90 && step.mode == SNAPMLA_MODE_DEFAULT;
        const size_t tile = wide ? 64 : 32;
        const size_t bound = 2 * ((size_t)kSms * tile * 512 * 4 + 16 * 1024) + 2 * (size_t)kSms * tile * 16;
        EXPECT(snapmla_decode_workspace(&step, &bytes), SNAPMLA_OK);
        EXPECT(snapmla_plan_bytes(&step, &plan), SNAPMLA_OK);
        TU_CHECK(bytes > 0 && bytes <= bound, "path %d, mode %d, batch %d, heads %d, s_q %d: %llu > %llu",
                 (int)step.path, (int)step.mode, step.batch, step.heads, step.s_q,
                 (unsigned long long)bytes, (unsigned long long)bound);
        /* a plan is a short record per request and per SM, never per token */
        TU_CHECK(plan > 0 && plan <= 64 * ((size_t)step.batch + 16 * kSms) + 4096,
                 "batch %d: plan of %llu bytes", step.batch, (unsigned long long)plan);
    }
    /* by hand: 128 rows are 2 tiles of 64 and 66 parts for 132 SMs, or 8 of 16 in groups of 4 and 33 parts;
       a part may leave 2 partial results of a group, of 512 floats and 4 more a row */
    snapmla_step step = good_step();
    size_t bytes = 0;
    step.path = SNAPMLA_PATH_SM90;
    step.s_q = 1;
    step.heads = 128;
    EXPECT(snapmla_decode_workspace(&step, &bytes), SNAPMLA_OK);
    TU_CHECK_INT(bytes, 34873344); /* 2 * 66 * 128 * (2048 + 16) */
    step.mode = SNAPMLA_MODE_PRECISE;
    EXPECT(snapmla_decode_workspace(&step, &bytes), SNAPMLA_OK);
    TU_CHECK_INT(bytes, 8718336); /* 2 * 33 * 64 * (2048 + 16) */
}

/* max_seq_len and page size do not matter in the default policy; more SMs never need less. */
static void test_sizes_depend_on_documented_fields(void **state)
{
    (void)state;
    snapmla_step step = good_step();
    size_t base = 0, bytes = 0, plan = 0, other = 0;
    EXPECT(snapmla_decode_workspace(&step, &base), SNAPMLA_OK);
    EXPECT(snapmla_plan_bytes(&step, &plan), SNAPMLA_OK);
    step.seq_lens = NULL;
    step.plan = NULL;
    step.plan_bytes = 0;
    EXPECT(snapmla_decode_workspace(&step, &bytes), SNAPMLA_OK);
    TU_CHECK_INT(bytes, base);
    EXPECT(snapmla_plan_bytes(&step, &other), SNAPMLA_OK);
    TU_CHECK_INT(other, plan);
    size_t before = 0;
    for (int sms = 1; sms <= 264; sms++) {
        step.sm_count = sms;
        EXPECT(snapmla_decode_workspace(&step, &bytes), SNAPMLA_OK);
        TU_CHECK(bytes >= before, "%d SMs: %llu < %llu", sms, (unsigned long long)bytes,
                 (unsigned long long)before);
        before = bytes;
    }

    /* the fixed policy: one partial result per split of every row, so it grows with max_seq_len and
       shrinks with split_tokens */
    step = good_step();
    step.max_seq_len = 8192;
    step.split_tokens = 1024;
    EXPECT(snapmla_decode_workspace(&step, &base), SNAPMLA_OK);
    step.split_tokens = 512;
    EXPECT(snapmla_decode_workspace(&step, &bytes), SNAPMLA_OK);
    TU_CHECK(bytes >= base, "%llu", (unsigned long long)bytes);
    step.split_tokens = 1024;
    step.max_seq_len = 16384;
    EXPECT(snapmla_decode_workspace(&step, &bytes), SNAPMLA_OK);
    TU_CHECK(bytes >= base, "%llu", (unsigned long long)bytes);
    const size_t rows = (size_t)step.batch * step.s_q * step.heads;
    TU_CHECK(bytes >= rows * 16 * 512 * 2, "%llu bytes hold no 16 partial rows each",
             (unsigned long long)bytes);

    /* zero-sized steps need no memory worth speaking of, and are no error */
    step = good_step();
    step.batch = 0;
    EXPECT(snapmla_decode_workspace(&step, &bytes), SNAPMLA_OK);
    EXPECT(snapmla_plan_bytes(&step, &plan), SNAPMLA_OK);
}

/* Must come last: every code was returned by some call above, but those that only a GPU can give:
   SNAPMLA_ERROR_DEVICE is provoked in test_wrong_arch.c. */
static void test_every_code_was_provoked(void **state)
{
    (void)state;
    for (int i = 0; i < kResults; i++) {
        if (results[i].result == SNAPMLA_ERROR_DEVICE) continue;
        TU_CHECK(provoked[i], "%s", results[i].name);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_version_and_texts),
        cmocka_unit_test(test_resolve_fills_defaults),
        cmocka_unit_test(test_legal_descs),
        cmocka_unit_test(test_nothing_to_do),
        cmocka_unit_test(test_null_desc),
        cmocka_unit_test(test_no_such_device),
        cmocka_unit_test(test_shape),
        cmocka_unit_test(test_format),
        cmocka_unit_test(test_policy),
        cmocka_unit_test(test_plan_buffer),
        cmocka_unit_test(test_cache_planes),
        cmocka_unit_test(test_decode_inputs),
        cmocka_unit_test(test_decode_outputs),
        cmocka_unit_test(test_quantize_buffers),
        cmocka_unit_test(test_key_buffers),
        cmocka_unit_test(test_rotation_and_norm),
        cmocka_unit_test(test_fetch_ranges),
        cmocka_unit_test(test_copy_buffers),
        cmocka_unit_test(test_import_buffers),
        cmocka_unit_test(test_merge_buffers),
        cmocka_unit_test(test_order_of_checks),
        cmocka_unit_test(test_overflow_is_refused),
        cmocka_unit_test(test_exact_sizes),
        cmocka_unit_test(test_workspace_bound),
        cmocka_unit_test(test_sizes_depend_on_documented_fields),
        cmocka_unit_test(test_every_code_was_provoked),
    };
    return cmocka_run_group_tests_name("api", tests, NULL, NULL);
}
