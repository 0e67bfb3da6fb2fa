/* test_gpu_flow.c - what stands before, after and beside attention on the GPU against the reference,
   bit for bit: norm and rotation on the way into queries and cache, ranges of requests read back,
   pages copied, other caches imported.  Whole caches are compared, so that nothing else may change. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <cmocka.h>

#include "test_util.h"
#include "gpu_util.h"
#include "gpu_rows.h"

int run_flow_tests(void);

/* ================================================================================================
   Tables of the rotation and weights of the norm
   ============================================================================================== */
enum { kHalf = kRope / 2, kPositions = 300 };

typedef struct turns {
    int split;      /* cosines and sines in two tables */
    int64_t stride; /* of a row of either */
    float *cosines; /* host; all of it when not split */
    float *sines;
    size_t bytes; /* of one table */
    int64_t *positions;
    int64_t tokens;
    gpu_mem d_cosines, d_sines, d_positions;
    int layout;
} turns;

static float any_f32(tu_rng *rng)
{
    const uint32_t bits = (uint32_t)tu_u64(rng);
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

/* Angles of a rope of 10000; every seventh row of the tables holds any bits at all. */
static turns turns_new(uint64_t seed, int64_t tokens, int split, int64_t gap, int layout)
{
    tu_rng rng = tu_seed(seed + 17);
    turns t;
    memset(&t, 0, sizeof t);
    t.split = split;
    t.layout = layout;
    t.tokens = tokens;
    t.stride = (split ? kHalf : kRope) + gap;
    t.bytes = (size_t)(kPositions * t.stride) * 4;
    t.cosines = (float *)tu_alloc(t.bytes, 0xff);
    t.sines = (float *)tu_alloc(t.bytes, 0xff);
    for (int p = 0; p < kPositions; p++) {
        for (int i = 0; i < kHalf; i++) {
            const double angle = p * pow(10000.0, -i / (double)kHalf);
            float c = (float)cos(angle), s = (float)sin(angle);
            if (p % 7 == 6) c = any_f32(&rng), s = any_f32(&rng);
            t.cosines[p * t.stride + i] = c;
            if (split)
                t.sines[p * t.stride + i] = s;
            else
                t.cosines[p * t.stride + kHalf + i] = s;
        }
    }
    t.positions = (int64_t *)tu_alloc((size_t)tokens * 8, 0);
    for (int64_t i = 0; i < tokens; i++) t.positions[i] = tu_below(&rng, kPositions);
    t.d_cosines = gpu_new_from(t.cosines, t.bytes, 4);
    t.d_sines = gpu_new_from(t.sines, t.bytes, 4);
    t.d_positions = gpu_new_from(t.positions, (size_t)tokens * 8, 8);
    return t;
}

static snapmla_rotation turns_device(const turns *t)
{
    snapmla_rotation r;
    memset(&r, 0, sizeof r);
    r.positions = (const int64_t *)(const void *)t->d_positions.at;
    r.cosines = (const float *)(const void *)t->d_cosines.at;
    if (t->split) r.sines = (const float *)(const void *)t->d_sines.at;
    if (t->stride != (t->split ? kHalf : kRope)) r.table_stride = t->stride;
    r.layout = t->layout ? SNAPMLA_ROPE_HALF_SPLIT : SNAPMLA_ROPE_INTERLEAVED;
    return r;
}

static snapmla_ref_rotation turns_host(const turns *t)
{
    snapmla_ref_rotation r;
    memset(&r, 0, sizeof r);
    r.positions = t->positions;
    r.cosines = t->cosines;
    if (t->split) r.sines = t->sines;
    r.table_stride = t->stride;
    r.layout = t->layout ? SNAPMLA_REF_ROPE_HALF_SPLIT : SNAPMLA_REF_ROPE_INTERLEAVED;
    return r;
}

static void turns_free(turns *t)
{
    free(t->cosines);
    free(t->sines);
    free(t->positions);
    gpu_delete(&t->d_cosines);
    gpu_delete(&t->d_sines);
    gpu_delete(&t->d_positions);
}

/* Weights near 1; `wild`: with zeros, negative ones, and at last NaN and Inf. */
static void fill_weights(tu_rng *rng, float *w, int wild)
{
    for (int i = 0; i < kLatent; i++) w[i] = (float)(1 + 0.3 * tu_gauss(rng));
    if (!wild) return;
    for (int i = 0; i < 16; i++) w[tu_below(rng, kLatent)] = (float)(tu_gauss(rng) * 1e3);
    w[tu_below(rng, kLatent)] = 0.0f;
    w[tu_below(rng, kLatent)] = -0.0f;
    w[tu_below(rng, kLatent)] = 1e-40f;
    if (wild > 1) w[tu_below(rng, kLatent)] = NAN;
    if (wild > 2) w[tu_below(rng, kLatent)] = INFINITY;
}

/* ================================================================================================
   quantize_q with rotation, and with the rope part in a tensor of its own
   ============================================================================================== */
typedef struct quantize_case {
    int64_t tokens;
    int heads, two, rotate, split, layout;
    int64_t gap, table_gap;
} quantize_case;

static void check_quantize_rotated(uint64_t seed, const quantize_case *c)
{
    const int64_t rows = c->tokens * c->heads;
    const int64_t q_head = (c->two ? kLatent : kDims) + c->gap, rope_head = kRope + c->gap;
    const int64_t q_token = c->heads * q_head + 2 * c->gap;
    const int64_t rope_token = c->heads * rope_head + 3 * c->gap;
    tu_rng rng = tu_seed(seed);
    uint16_t *dense = (uint16_t *)tu_alloc((size_t)rows * kDims * 2, 0);
    uint16_t *q = (uint16_t *)tu_alloc((size_t)(c->tokens * q_token) * 2, 0xff);
    uint16_t *rope = (uint16_t *)tu_alloc((size_t)(c->tokens * rope_token) * 2, 0xff);
    fill_rows(&rng, dense, rows, kDims);
    for (int64_t r = 0; r < rows; r++) {
        const int64_t t = r / c->heads, h = r % c->heads;
        memcpy(q + t * q_token + h * q_head, dense + r * kDims, 2 * (c->two ? kLatent : kDims));
        memcpy(rope + t * rope_token + h * rope_head, dense + r * kDims + kLatent, 2 * kRope);
    }
    turns t = turns_new(seed, c->tokens, c->split, c->table_gap, c->layout);
    gpu_mem d_q = gpu_new_from(q, (size_t)(c->tokens * q_token) * 2, 16);
    gpu_mem d_rope = gpu_new_from(rope, (size_t)(c->tokens * rope_token) * 2, 16);
    gpu_mem content = gpu_new((size_t)rows * kLatent, 16, 0xee);
    gpu_mem scale = gpu_new((size_t)rows * 4, 4, 0xee);
    gpu_mem out = gpu_new((size_t)rows * kRope * 2, 16, 0xee);

    snapmla_quantize_q_desc d;
    memset(&d, 0, sizeof d);
    d.tokens = c->tokens;
    d.heads = c->heads;
    d.q = d_q.at;
    if (c->two) d.rope = d_rope.at;
    if (c->gap) {
        d.q_head_stride = q_head;
        d.q_token_stride = q_token;
        d.rope_head_stride = rope_head;
        d.rope_token_stride = rope_token;
    }
    d.q_content = content.at;
    d.q_scale = (float *)(void *)scale.at;
    d.q_rope = out.at;
    if (c->rotate) d.rotation = turns_device(&t);
    OK(snapmla_quantize_q(&d));
    CUDA(cudaDeviceSynchronize());

    uint8_t *want_content = (uint8_t *)tu_alloc(content.bytes, 0);
    float *want_scale = (float *)tu_alloc(scale.bytes, 0);
    uint16_t *want_rope = (uint16_t *)tu_alloc(out.bytes, 0);
    void *got = tu_alloc(content.bytes, 0);
    snapmla_ref_quantize_q_desc ref;
    memset(&ref, 0, sizeof ref);
    ref.tokens = c->tokens;
    ref.heads = c->heads;
    ref.q = q;
    ref.q_head_stride = q_head;
    ref.q_token_stride = q_token;
    if (c->two) ref.rope = rope;
    ref.rope_head_stride = rope_head;
    ref.rope_token_stride = rope_token;
    ref.q_content = want_content;
    ref.q_scale = want_scale;
    ref.q_rope = want_rope;
    if (c->rotate) ref.rotation = turns_host(&t);
    assert_int_equal(snapmla_ref_quantize_q(&ref), 0);

    print_message("quantize_q %d x %d, two %d, rotate %d, split %d, layout %d, gaps %d %d\n",
                  (int)c->tokens, c->heads, c->two, c->rotate, c->split, c->layout, (int)c->gap,
                  (int)c->table_gap);
    gpu_get(&content, got);
    TU_CHECK_BYTES(got, want_content, content.bytes);
    gpu_get(&scale, got);
    TU_CHECK_BYTES(got, want_scale, scale.bytes);
    gpu_get(&out, got);
    TU_CHECK_BYTES(got, want_rope, out.bytes);
    free(dense);
    free(q);
    free(rope);
    free(want_content);
    free(want_scale);
    free(want_rope);
    free(got);
    turns_free(&t);
    gpu_delete(&d_q);
    gpu_delete(&d_rope);
    gpu_delete(&content);
    gpu_delete(&scale);
    gpu_delete(&out);
}

static void test_quantize_q_rotated(void **state)
{
    (void)state;
    gpu_need();
    static const quantize_case cases[] = {
        {1, 1, 0, 1, 0, 0, 0, 0},    {300, 3, 0, 1, 0, 0, 0, 0},  {300, 3, 0, 1, 0, 1, 0, 0},
        {129, 5, 1, 1, 1, 0, 0, 0},  {129, 5, 1, 1, 1, 1, 0, 0},  {40, 16, 1, 0, 0, 0, 0, 0},
        {40, 16, 1, 0, 0, 0, 8, 0},  {40, 128, 1, 1, 0, 0, 8, 3}, {33, 17, 0, 1, 1, 1, 16, 1},
        {1000, 1, 1, 1, 0, 1, 0, 5},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        check_quantize_rotated(2000 + i, &cases[i]);
}

/* ================================================================================================
   append with norm and rotation
   ============================================================================================== */
typedef struct append_case {
    int page_size;
    layout how;
    int norm; /* 0 none, 1 bf16 weights, 2 f32 */
    int wild; /* weights */
    float eps;
    int rotate, split, layout;
    int two;
    int64_t gap;
    size_t shift; /* bytes behind a 16-byte boundary, 2 and up */
    int64_t tokens;
} append_case;

static void check_append_raw(uint64_t seed, const append_case *c)
{
    const int pages = (int)((c->tokens + c->page_size - 1) / c->page_size) + 3;
    const spec s = cache_spec(seed, c->page_size, pages, c->how);
    problem *p = problem_new(&s);
    tu_rng rng = tu_seed(seed);
    const int64_t latent_stride = (c->two ? kLatent : kDims) + c->gap, rope_stride = kRope + c->gap;
    const size_t latent_bytes = (size_t)(c->tokens * latent_stride) * 2;
    const size_t rope_bytes = (size_t)(c->tokens * rope_stride) * 2;
    uint16_t *latent = (uint16_t *)tu_alloc(latent_bytes, 0xff);
    uint16_t *rope = (uint16_t *)tu_alloc(rope_bytes, 0xff);
    uint16_t row[kDims];
    for (int64_t t = 0; t < c->tokens; t++) {
        hard_row(&rng, (int)(t % kKinds), row);
        if (t % 3 == 1) tu_fill_bf16(&rng, row, kDims, 0.1, 1); /* what a model has */
        memcpy(latent + t * latent_stride, row, 2 * (c->two ? kLatent : kDims));
        memcpy(rope + t * rope_stride, row + kLatent, 2 * kRope);
    }
    float w[kLatent];
    uint16_t w_bf16[kLatent];
    fill_weights(&rng, w, c->wild);
    for (int i = 0; i < kLatent; i++) w_bf16[i] = tu_bf16(w[i]);
    int64_t *slots = make_slots(seed, c->tokens, (int64_t)pages * c->page_size);
    turns t = turns_new(seed, c->tokens, c->split, c->gap, c->layout);
    gpu_mem d_latent = gpu_new_from(latent, latent_bytes, c->shift);
    gpu_mem d_rope = gpu_new_from(rope, rope_bytes, c->shift == 16 ? 4 : c->shift);
    gpu_mem d_slots = gpu_new_from(slots, (size_t)c->tokens * 8, 8);
    gpu_mem d_w = gpu_new_from(w, sizeof w, 16), d_w_bf16 = gpu_new_from(w_bf16, sizeof w_bf16, 16);

    snapmla_append_desc d;
    memset(&d, 0, sizeof d);
    d.cache = device_cache(p);
    d.tokens = c->tokens;
    d.latent = d_latent.at;
    d.rope = c->two ? d_rope.at : NULL;
    if (c->gap) {
        d.latent_stride = latent_stride;
        d.rope_stride = rope_stride;
    }
    d.slots = (const int64_t *)(const void *)d_slots.at;
    if (c->norm) d.norm.weight = c->norm == 2 ? d_w.at : d_w_bf16.at;
    d.norm.weight_type = c->norm == 2 ? SNAPMLA_NUMBER_F32 : SNAPMLA_NUMBER_BF16;
    d.norm.eps = c->eps;
    if (c->rotate) d.rotation = turns_device(&t);
    OK(snapmla_append(&d));
    CUDA(cudaDeviceSynchronize());

    snapmla_ref_append_desc ref;
    memset(&ref, 0, sizeof ref);
    ref.cache = p->cache;
    ref.tokens = c->tokens;
    ref.latent = latent;
    ref.latent_stride = latent_stride;
    ref.rope = c->two ? rope : NULL;
    ref.rope_stride = rope_stride;
    ref.slots = slots;
    if (c->norm) ref.norm.weight = c->norm == 2 ? (const void *)w : (const void *)w_bf16;
    ref.norm.weight_type = c->norm == 2 ? SNAPMLA_REF_NUMBER_F32 : SNAPMLA_REF_NUMBER_BF16;
    ref.norm.eps = c->eps;
    if (c->rotate) ref.rotation = turns_host(&t);
    assert_int_equal(snapmla_ref_append(&ref), 0);

    print_message(
        "append: page %d, layout %d, norm %d (wild %d, eps %g), rotate %d (split %d, layout "
        "%d), two %d, gap %d, shift %d, %d tokens\n",
        c->page_size, (int)c->how, c->norm, c->wild, (double)c->eps, c->rotate, c->split, c->layout,
        c->two, (int)c->gap, (int)c->shift, (int)c->tokens);
    unsigned char *got = (unsigned char *)tu_alloc(p->cache_size, 0);
    gpu_get(&p->d_cache, got);
    TU_CHECK_BYTES(got, p->cache_bytes, p->cache_size);
    free(got);
    free(latent);
    free(rope);
    free(slots);
    turns_free(&t);
    gpu_delete(&d_latent);
    gpu_delete(&d_rope);
    gpu_delete(&d_slots);
    gpu_delete(&d_w);
    gpu_delete(&d_w_bf16);
    problem_free(p);
}

static void test_append_norm_and_rotation(void **state)
{
    (void)state;
    gpu_need();
    static const append_case cases[] = {
        {64, LAYOUT_DENSE, 1, 0, 0, 0, 0, 0, 0, 0, 16, 200},
        {64, LAYOUT_DENSE, 2, 0, 0, 0, 0, 0, 0, 0, 16, 200},
        {64, LAYOUT_DENSE, 0, 0, 0, 1, 0, 0, 0, 0, 16, 200},
        {64, LAYOUT_DENSE, 0, 0, 0, 1, 1, 1, 1, 0, 16, 200},
        {64, LAYOUT_RECORD, 1, 1, 1e-5f, 1, 0, 0, 1, 0, 16, 300},
        {16, LAYOUT_PADDED, 2, 1, 1e-6f, 1, 1, 1, 0, 8, 16, 300},
        {128, LAYOUT_DENSE, 1, 2, 1e-6f, 1, 0, 1, 1, 0, 16, 100},
        {128, LAYOUT_DENSE, 2, 3, 1e-6f, 1, 0, 1, 0, 0, 16, 100},
        {64, LAYOUT_DENSE, 1, 0, 1e-30f, 1, 0, 0, 0, 0, 16, 300},
        {64, LAYOUT_DENSE, 2, 0, 1e-44f, 1, 0, 0, 1, 0, 16, 300},
        {64, LAYOUT_DENSE, 2, 0, 3e38f, 1, 0, 0, 1, 0, 16, 100},
        {64, LAYOUT_DENSE, 1, 0, 0, 1, 0, 0, 0, 1, 2, 150}, /* only 2-byte aligned */
        {64, LAYOUT_DENSE, 2, 0, 0, 1, 1, 1, 1, 7, 6, 150},
        {1, LAYOUT_DENSE, 2, 0, 0, 1, 0, 0, 1, 0, 16, 150},
        {1024, LAYOUT_RECORD, 1, 0, 0, 1, 0, 1, 0, 0, 16, 150},
        {64, LAYOUT_DENSE, 1, 0, 0, 1, 0, 0, 0, 0, 16, 1},
        {64, LAYOUT_DENSE, 1, 0, 0, 1, 0, 0, 1, 0, 16, 3000},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        check_append_raw(2100 + i, &cases[i]);
}

/* Many rows as a model has them, where another order of the sum would show. */
typedef struct norm_rows {
    snapmla_ref_append_desc ref;
    unsigned char *wrong;
    const uint8_t *content;
    const float *scale;
    const uint16_t *rope;
} norm_rows;

static void check_norm_row(void *context, int64_t i)
{
    const norm_rows *n = (const norm_rows *)context;
    uint16_t latent[kLatent], rope[kRope], want_rope[kRope];
    uint8_t content[kLatent];
    float scale;
    const uint16_t *row = n->ref.latent + i * kDims;
    const float *table = n->ref.rotation.cosines + n->ref.rotation.positions[i] * kRope;
    snapmla_ref_rms_norm(row, kLatent, &n->ref.norm, latent);
    snapmla_ref_rotate(row + kLatent, kRope, table, table + kHalf, n->ref.rotation.layout, rope);
    snapmla_ref_quantize(latent, kLatent, rope, kRope, content, &scale, want_rope);
    n->wrong[i] = memcmp(content, n->content + i * kLatent, kLatent) != 0 ||
                  memcmp(&scale, n->scale + i, 4) != 0 ||
                  memcmp(want_rope, n->rope + i * kRope, 2 * kRope) != 0;
}

static void test_append_many_raw_rows(void **state)
{
    (void)state;
    gpu_need();
    const int64_t rows = gpu_quick() ? 2000 : 100000, pages = (rows + 63) / 64, slots = 64 * pages;
    norm_rows n;
    memset(&n, 0, sizeof n);
    uint16_t *latent = (uint16_t *)tu_alloc((size_t)rows * kDims * 2, 0);
    int64_t *order = (int64_t *)tu_alloc((size_t)rows * 8, 0);
    float w[kLatent];
    tu_rng rng = tu_seed(31);
    for (int64_t r = 0; r < rows; r++) {
        const float std = (float)ldexp(1 + tu_uniform(&rng), (int)tu_below(&rng, 24) - 12);
        for (int i = 0; i < kDims; i++)
            latent[r * kDims + i] = snapmla_ref_bf16_from_float(std * fast_gauss(&rng));
        order[r] = r;
    }
    fill_weights(&rng, w, 0);
    turns t = turns_new(32, rows, 0, 0, 0);
    gpu_mem d_latent = gpu_new_from(latent, (size_t)rows * kDims * 2, 16);
    gpu_mem d_slots = gpu_new_from(order, (size_t)rows * 8, 8), d_w = gpu_new_from(w, sizeof w, 16);
    gpu_mem content = gpu_new((size_t)slots * kLatent, 16, 0xee);
    gpu_mem scale = gpu_new((size_t)slots * 4, 16, 0xee);
    gpu_mem rope = gpu_new((size_t)slots * kRope * 2, 16, 0xee);
    snapmla_append_desc d;
    memset(&d, 0, sizeof d);
    d.cache.content = content.at;
    d.cache.scale = (float *)(void *)scale.at;
    d.cache.rope = rope.at;
    d.cache.pages = pages;
    d.tokens = rows;
    d.latent = d_latent.at;
    d.slots = (const int64_t *)(const void *)d_slots.at;
    d.norm.weight = d_w.at;
    d.norm.weight_type = SNAPMLA_NUMBER_F32;
    d.rotation = turns_device(&t);
    OK(snapmla_append(&d));
    CUDA(cudaDeviceSynchronize());
    n.content = (const uint8_t *)tu_alloc(content.bytes, 0);
    n.scale = (const float *)tu_alloc(scale.bytes, 0);
    n.rope = (const uint16_t *)tu_alloc(rope.bytes, 0);
    gpu_get(&content, (void *)(uintptr_t)n.content);
    gpu_get(&scale, (void *)(uintptr_t)n.scale);
    gpu_get(&rope, (void *)(uintptr_t)n.rope);
    n.ref.latent = latent;
    n.ref.norm.weight = w;
    n.ref.norm.weight_type = SNAPMLA_REF_NUMBER_F32;
    n.ref.rotation = turns_host(&t);
    n.wrong = (unsigned char *)tu_alloc((size_t)rows, 0);
    parallel_for(rows, check_norm_row, &n);
    int64_t wrong = 0, first = -1;
    for (int64_t r = 0; r < rows; r++) {
        if (n.wrong[r] && first < 0) first = r;
        wrong += n.wrong[r];
    }
    TU_CHECK(wrong == 0, "%lld of %lld rows differ from the reference, the first is row %lld",
             (long long)wrong, (long long)rows, (long long)first);
    free(latent);
    free(order);
    free(n.wrong);
    free((void *)(uintptr_t)n.content);
    free((void *)(uintptr_t)n.scale);
    free((void *)(uintptr_t)n.rope);
    turns_free(&t);
    gpu_delete(&d_latent);
    gpu_delete(&d_slots);
    gpu_delete(&d_w);
    gpu_delete(&content);
    gpu_delete(&scale);
    gpu_delete(&rope);
}

/* ================================================================================================
   fetch by ranges
   ============================================================================================== */
static void check_fetch_ranges(uint64_t seed, int page_size, layout how, int batch, int max_rows,
                               int two, int64_t gap, size_t shift, int with_first)
{
    const int pages = 40, width = 9, table_stride = width + 2;
    const spec s = cache_spec(seed, page_size, pages, how);
    problem *p = problem_new(&s);
    randomise_cache(p, seed);
    tu_rng rng = tu_seed(seed + 3);
    int32_t *table = (int32_t *)tu_alloc((size_t)(batch * table_stride) * 4, 0x7f);
    int32_t *starts = (int32_t *)tu_alloc((size_t)(batch + 1) * 4, 0);
    int32_t *first = (int32_t *)tu_alloc((size_t)(batch + 1) * 4, 0);
    starts[0] = (int32_t)tu_below(&rng, 3); /* rows in front of it are nobody's */
    for (int b = 0; b < batch; b++) {
        for (int i = 0; i < width; i++) {
            table[b * table_stride + i] = (int32_t)tu_below(&rng, pages);
            if (tu_below(&rng, 10) == 0)
                table[b * table_stride + i] = -1 - (int32_t)tu_below(&rng, 9);
        }
        const int rows = tu_below(&rng, 3) ? (int)tu_below(&rng, (uint32_t)max_rows + 1) : 0;
        starts[b + 1] = starts[b] + rows;
        first[b] = (int32_t)tu_below(&rng, (uint32_t)(width * page_size));
        if (tu_below(&rng, 12) == 0) first[b] = -2;                    /* before the request */
        if (tu_below(&rng, 12) == 0) first[b] = width * page_size - 1; /* and past its table */
        if (tu_below(&rng, 20) == 0) first[b] = INT32_MAX;
    }
    const int64_t tokens = starts[batch] + 5; /* the last rows are nobody's */
    const int64_t latent_stride = (two ? kLatent : kDims) + gap, rope_stride = kRope + gap;
    const size_t latent_bytes = (size_t)(tokens * latent_stride) * 2;
    const size_t rope_bytes = (size_t)(tokens * rope_stride) * 2;
    uint16_t *want_latent = (uint16_t *)tu_alloc(latent_bytes, 0xee);
    uint16_t *want_rope = (uint16_t *)tu_alloc(rope_bytes, 0xee);
    void *got = tu_alloc(latent_bytes, 0);
    gpu_mem latent = gpu_new(latent_bytes, shift, 0xee), rope = gpu_new(rope_bytes, shift, 0xee);
    gpu_mem d_table = gpu_new_from(table, (size_t)(batch * table_stride) * 4, 4);
    gpu_mem d_starts = gpu_new_from(starts, (size_t)(batch + 1) * 4, 4);
    gpu_mem d_first = gpu_new_from(first, (size_t)(batch + 1) * 4, 4);

    snapmla_fetch_desc d;
    memset(&d, 0, sizeof d);
    d.cache = device_cache(p);
    d.tokens = tokens;
    d.latent = latent.at;
    d.rope = two ? rope.at : NULL;
    if (gap) {
        d.latent_stride = latent_stride;
        d.rope_stride = rope_stride;
    }
    d.block_table = (const int32_t *)(const void *)d_table.at;
    d.block_table_stride = table_stride;
    d.block_table_width = width;
    d.batch = batch;
    d.row_starts = (const int32_t *)(const void *)d_starts.at;
    d.first = with_first ? (const int32_t *)(const void *)d_first.at : NULL;
    OK(snapmla_fetch(&d));
    CUDA(cudaDeviceSynchronize());

    snapmla_ref_fetch_desc ref;
    memset(&ref, 0, sizeof ref);
    ref.cache = p->cache;
    ref.tokens = tokens;
    ref.latent = want_latent;
    ref.latent_stride = latent_stride;
    ref.rope = two ? want_rope : NULL;
    ref.rope_stride = rope_stride;
    ref.block_table = table;
    ref.block_table_stride = table_stride;
    ref.block_table_width = width;
    ref.batch = batch;
    ref.row_starts = starts;
    ref.first = with_first ? first : NULL;
    assert_int_equal(snapmla_ref_fetch(&ref), 0);

    print_message("fetch ranges: page %d, layout %d, batch %d, %d rows, two %d, gap %d, shift %d\n",
                  page_size, (int)how, batch, (int)tokens, two, (int)gap, (int)shift);
    gpu_get(&latent, got);
    TU_CHECK_BYTES(got, want_latent, latent_bytes);
    gpu_get(&rope, got);
    TU_CHECK_BYTES(got, want_rope, rope_bytes);
    problem_check_inputs(p);
    free(table);
    free(starts);
    free(first);
    free(want_latent);
    free(want_rope);
    free(got);
    gpu_delete(&latent);
    gpu_delete(&rope);
    gpu_delete(&d_table);
    gpu_delete(&d_starts);
    gpu_delete(&d_first);
    problem_free(p);
}

static void test_fetch_ranges(void **state)
{
    (void)state;
    gpu_need();
    static const int batches[] = {0, 1, 2, 31, 32, 33, 64, 65, 1000, 1024, 1025, 3000};
    uint64_t seed = 2200;
    for (size_t i = 0; i < sizeof batches / sizeof batches[0]; i++) {
        const int b = batches[i];
        check_fetch_ranges(seed++, 64, LAYOUT_DENSE, b, b > 100 ? 3 : 60, (int)i & 1, 0, 16, 1);
    }
    for (int page = 1; page <= 1024; page *= 4)
        check_fetch_ranges(seed++, page, LAYOUT_RECORD, 7, 40, 1, 8, 16, page & 4);
    check_fetch_ranges(seed++, 16, LAYOUT_PADDED, 20, 20, 0, 1, 2, 1);
    check_fetch_ranges(seed++, 16, LAYOUT_PADDED, 20, 20, 1, 7, 6, 0);
}

/* More blocks than a grid's second dimension could have, out of a small cache. */
static void test_fetch_many_rows(void **state)
{
    (void)state;
    gpu_need();
    const int64_t tokens = gpu_quick() ? 5000 : 600000;
    const spec s = cache_spec(5, 64, 4, LAYOUT_DENSE);
    problem *p = problem_new(&s);
    randomise_cache(p, 5);
    int64_t *slots = (int64_t *)tu_alloc((size_t)tokens * 8, 0);
    tu_rng rng = tu_seed(6);
    for (int64_t t = 0; t < tokens; t++) slots[t] = (int64_t)tu_below(&rng, 260) - 4;
    gpu_mem d_slots = gpu_new_from(slots, (size_t)tokens * 8, 8);
    gpu_mem rows = gpu_new((size_t)tokens * kDims * 2, 16, 0xee);
    snapmla_fetch_desc d;
    memset(&d, 0, sizeof d);
    d.cache = device_cache(p);
    d.tokens = tokens;
    d.latent = rows.at;
    d.slots = (const int64_t *)(const void *)d_slots.at;
    OK(snapmla_fetch(&d));
    CUDA(cudaDeviceSynchronize());
    static uint16_t want[260][kDims]; /* by slot + 4 */
    int64_t all[260];
    for (int i = 0; i < 260; i++) all[i] = i - 4;
    snapmla_ref_fetch_desc ref;
    memset(&ref, 0, sizeof ref);
    ref.cache = p->cache;
    ref.tokens = 260;
    ref.latent = want[0];
    ref.slots = all;
    assert_int_equal(snapmla_ref_fetch(&ref), 0);
    uint16_t *got = (uint16_t *)tu_alloc(rows.bytes, 0);
    gpu_get(&rows, got);
    int64_t wrong = -1;
    for (int64_t t = tokens - 1; t >= 0; t--)
        if (memcmp(got + t * kDims, want[slots[t] + 4], 2 * kDims)) wrong = t;
    TU_CHECK(wrong == -1, "row %lld of %lld", (long long)wrong, (long long)tokens);
    free(got);
    free(slots);
    gpu_delete(&d_slots);
    gpu_delete(&rows);
    problem_free(p);
}

/* ================================================================================================
   copies of pages
   ============================================================================================== */
enum { kMostLayers = 170 };

static void check_copy(uint64_t seed, int page_size, layout from_layout, layout to_layout,
                       int layers, int count, int within)
{
    static problem *from[kMostLayers], *to[kMostLayers];
    static snapmla_cache d_from[kMostLayers], d_to[kMostLayers];
    static snapmla_ref_cache h_from[kMostLayers], h_to[kMostLayers];
    const int from_pages = within ? 2 * count + 3 : count + 3, to_pages = 2 * count + 3;
    tu_rng rng = tu_seed(seed);
    for (int l = 0; l < layers; l++) {
        const spec a = cache_spec(seed + 2 * (uint64_t)l, page_size, from_pages, from_layout);
        const spec b = cache_spec(seed + 2 * (uint64_t)l + 1, page_size, to_pages, to_layout);
        from[l] = problem_new(&a);
        to[l] = within ? from[l] : problem_new(&b);
        randomise_cache(from[l], seed + (uint64_t)l);
        d_from[l] = device_cache(from[l]);
        d_to[l] = device_cache(to[l]);
        h_from[l] = from[l]->cache;
        h_to[l] = to[l]->cache;
    }
    /* no page twice as a destination; within one cache sources are the even pages */
    int32_t *pairs = (int32_t *)tu_alloc((size_t)count * 8, 0);
    int32_t *order = (int32_t *)tu_alloc((size_t)count * 4, 0);
    tu_permutation(&rng, order, count, 0);
    for (int i = 0; i < count; i++) {
        pairs[2 * i] = (int32_t)tu_below(&rng, (uint32_t)count) * (within ? 2 : 1);
        pairs[2 * i + 1] = 2 * order[i] + 1;
        if (tu_below(&rng, 9) == 0)
            pairs[2 * i + tu_below(&rng, 2)] = -1 - (int32_t)tu_below(&rng, 99);
    }
    gpu_mem d_pairs = gpu_new_from(pairs, (size_t)count * 8, 8);
    snapmla_copy_pages_desc d;
    memset(&d, 0, sizeof d);
    d.layers = layers;
    d.source = d_from;
    d.destination = d_to;
    d.count = count;
    d.pairs = (const int32_t *)(const void *)d_pairs.at;
    OK(snapmla_copy_pages(&d));
    CUDA(cudaDeviceSynchronize());
    snapmla_ref_copy_pages_desc ref;
    memset(&ref, 0, sizeof ref);
    ref.layers = layers;
    ref.source = h_from;
    ref.destination = h_to;
    ref.count = count;
    ref.pairs = pairs;
    assert_int_equal(snapmla_ref_copy_pages(&ref), 0);
    print_message("copy: page %d, layouts %d to %d, %d layers, %d pages, within %d\n", page_size,
                  (int)from_layout, (int)to_layout, layers, count, within);
    for (int l = 0; l < layers; l++) {
        unsigned char *got = (unsigned char *)tu_alloc(to[l]->cache_size, 0);
        gpu_get(&to[l]->d_cache, got);
        TU_CHECK_BYTES(got, to[l]->cache_bytes, to[l]->cache_size);
        free(got);
        if (!within) {
            problem_check_inputs(from[l]);
            problem_free(from[l]);
        }
        problem_free(to[l]);
    }
    free(pairs);
    free(order);
    gpu_delete(&d_pairs);
}

static void test_copy_pages(void **state)
{
    (void)state;
    gpu_need();
    uint64_t seed = 3000;
    for (int page = 1; page <= 1024; page *= 2) {
        check_copy(seed++, page, LAYOUT_DENSE, LAYOUT_RECORD, 2, page > 64 ? 3 : 9, 0);
        check_copy(seed++, page, LAYOUT_PADDED, LAYOUT_DENSE, 1, page > 64 ? 3 : 9, 0);
        check_copy(seed++, page, LAYOUT_RECORD, LAYOUT_RECORD, 3, 4, 1);
    }
    check_copy(seed++, 64, LAYOUT_DENSE, LAYOUT_DENSE, 1, 1, 0);
    check_copy(seed++, 16, LAYOUT_DENSE, LAYOUT_DENSE, 61, 20, 0);
    check_copy(seed++, 4, LAYOUT_DENSE, LAYOUT_PADDED, 80, 3, 0);
    check_copy(seed++, 4, LAYOUT_DENSE, LAYOUT_RECORD, 81, 3, 0); /* more than one launch holds */
    check_copy(seed++, 4, LAYOUT_RECORD, LAYOUT_DENSE, 170, 3, 1);
    check_copy(seed++, 1, LAYOUT_DENSE, LAYOUT_DENSE, 1, 3000, 0);
}

/* ================================================================================================
   imports
   ============================================================================================== */
typedef struct import_case {
    int records, page_size, source_page;
    layout how;
    int64_t row_gap, page_gap; /* in units of the source: bf16 elements or bytes */
    size_t shift;
    int slots, source_slots; /* given, or NULL */
    int64_t tokens;
} import_case;

/* Any codes; scales of every size, some NaN, Inf or 0, now and then wild ropes. */
static void fill_record(tu_rng *rng, uint8_t *record)
{
    const int kind = (int)tu_below(rng, 8);
    const int power = (int)tu_below(rng, 200) - 100;
    uint16_t rope[kRope];
    float scale[4];
    for (int i = 0; i < kLatent; i++) {
        record[i] = (uint8_t)tu_u64(rng);
        if (kind < 6 && (record[i] & 0x7f) == 0x7f) record[i] = 0x7e;
    }
    for (int i = 0; i < 4; i++) scale[i] = (float)ldexp(1 + tu_uniform(rng), power);
    if (kind == 0) scale[tu_below(rng, 4)] = 0;
    if (kind == 1) scale[tu_below(rng, 4)] = any_f32(rng);
    if (kind == 2) scale[tu_below(rng, 4)] = NAN;
    if (kind == 3) memset(record, 0, kLatent);
    for (int i = 0; i < kRope; i++)
        rope[i] = kind < 5 ? tu_bf16(ldexp(tu_gauss(rng), power)) : any_bf16(rng);
    memcpy(record + kLatent, scale, 16);
    memcpy(record + kLatent + 16, rope, 2 * kRope);
}

static void check_import(uint64_t seed, const import_case *c)
{
    const int source_page = c->source_page ? c->source_page : c->page_size;
    const int pages = (int)((c->tokens + c->page_size - 1) / c->page_size) + 3;
    const int64_t source_pages = (c->tokens + source_page - 1) / source_page + 2;
    const int64_t unit = c->records ? 1 : 2, row = (c->records ? 656 : kDims) + c->row_gap;
    const int64_t page = source_page * row + c->page_gap;
    const size_t bytes = (size_t)(source_pages * page * unit);
    const spec s = cache_spec(seed, c->page_size, pages, c->how);
    problem *p = problem_new(&s);
    tu_rng rng = tu_seed(seed);
    uint8_t *source = (uint8_t *)tu_alloc(bytes, 0xff);
    for (int64_t i = 0; i < source_pages * source_page; i++) {
        uint8_t *at = source + (i / source_page * page + i % source_page * row) * unit;
        uint16_t key[kDims];
        if (c->records) {
            fill_record(&rng, at);
        } else {
            hard_row(&rng, (int)(i % kKinds), key);
            memcpy(at, key, sizeof key);
        }
    }
    const int64_t own = (int64_t)pages * c->page_size, theirs = source_pages * source_page;
    /* without slots the source's are used, so they must lie in both */
    const int64_t least = own < theirs ? own : theirs;
    int64_t *slots = make_slots(seed, c->tokens, own);
    int64_t *source_slots = make_slots(seed + 1, c->tokens, c->slots ? theirs : least);
    gpu_mem d_source = gpu_new_from(source, bytes, c->shift);
    gpu_mem d_slots = gpu_new_from(slots, (size_t)c->tokens * 8, 8);
    gpu_mem d_source_slots = gpu_new_from(source_slots, (size_t)c->tokens * 8, 8);

    snapmla_import_desc d;
    memset(&d, 0, sizeof d);
    d.cache = device_cache(p);
    d.format = c->records ? SNAPMLA_SOURCE_RECORD_656 : SNAPMLA_SOURCE_BF16;
    d.source_page_size = c->source_page;
    d.source = d_source.at;
    d.source_row_stride = c->row_gap ? row : 0;
    d.source_page_stride = c->page_gap ? page : 0;
    d.tokens = c->tokens;
    if (c->slots) d.slots = (const int64_t *)(const void *)d_slots.at;
    if (c->source_slots) d.source_slots = (const int64_t *)(const void *)d_source_slots.at;
    OK(snapmla_import(&d));
    CUDA(cudaDeviceSynchronize());
    snapmla_ref_import_desc ref;
    memset(&ref, 0, sizeof ref);
    ref.cache = p->cache;
    ref.format = c->records ? SNAPMLA_REF_SOURCE_RECORD_656 : SNAPMLA_REF_SOURCE_BF16;
    ref.source_page_size = source_page;
    ref.source = source;
    ref.source_row_stride = row;
    ref.source_page_stride = page;
    ref.tokens = c->tokens;
    ref.slots = c->slots ? slots : NULL;
    ref.source_slots = c->source_slots ? source_slots : NULL;
    assert_int_equal(snapmla_ref_import(&ref), 0);
    print_message(
        "import: records %d, page %d of %d, layout %d, gaps %d %d, shift %d, slots %d %d\n",
        c->records, c->page_size, source_page, (int)c->how, (int)c->row_gap, (int)c->page_gap,
        (int)c->shift, c->slots, c->source_slots);
    unsigned char *got = (unsigned char *)tu_alloc(p->cache_size, 0);
    gpu_get(&p->d_cache, got);
    TU_CHECK_BYTES(got, p->cache_bytes, p->cache_size);
    free(got);
    free(source);
    free(slots);
    free(source_slots);
    gpu_delete(&d_source);
    gpu_delete(&d_slots);
    gpu_delete(&d_source_slots);
    problem_free(p);
}

static void test_import(void **state)
{
    (void)state;
    gpu_need();
    static const import_case cases[] = {
        {0, 64, 0, LAYOUT_DENSE, 0, 0, 16, 0, 0, 300},
        {1, 64, 0, LAYOUT_DENSE, 0, 0, 16, 0, 0, 300},
        {0, 64, 0, LAYOUT_DENSE, 0, 0, 16, 1, 1, 300},
        {1, 64, 0, LAYOUT_DENSE, 0, 0, 16, 1, 1, 300},
        {0, 64, 16, LAYOUT_RECORD, 8, 16, 16, 1, 1, 300},
        {1, 64, 16, LAYOUT_RECORD, 16, 32, 16, 1, 1, 300},
        {0, 16, 64, LAYOUT_PADDED, 0, 8, 16, 0, 1, 300},
        {1, 16, 64, LAYOUT_PADDED, 0, 16, 16, 0, 1, 300},
        {0, 1, 1, LAYOUT_DENSE, 0, 0, 16, 1, 0, 200},
        {1, 1, 1, LAYOUT_DENSE, 0, 0, 16, 1, 0, 200},
        {0, 64, 1024, LAYOUT_DENSE, 1, 3, 2, 1, 1, 200},
        {1, 64, 1024, LAYOUT_DENSE, 4, 8, 4, 1, 1, 200},
        {0, 1024, 2, LAYOUT_DENSE, 0, 0, 6, 0, 1, 100},
        {1, 1024, 2, LAYOUT_DENSE, 0, 0, 8, 0, 1, 100},
        {0, 64, 0, LAYOUT_DENSE, 0, 0, 16, 1, 1, 1},
        {1, 64, 0, LAYOUT_DENSE, 0, 0, 16, 1, 1, 5000},
        {0, 64, 0, LAYOUT_DENSE, 0, 0, 16, 1, 1, 5000},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) check_import(4000 + i, &cases[i]);
}

/* ================================================================================================
   Far away: pages more than 4 GiB apart
   ============================================================================================== */
static void test_far_pages(void **state)
{
    (void)state;
    gpu_need();
    enum { kPages = 4, kPage = 64, kTokens = kPage };
    const int64_t stride =
        ((int64_t)3 << 30) / 2; /* content 1.5 GiB a page; the third is past 4 GiB */
    const size_t bytes = (size_t)(stride * (kPages - 1)) + kPage * kLatent;
    if (gpu_quick() || gpu_free_bytes() < bytes + ((size_t)1 << 30)) {
        print_message("skipped: not enough memory, or a quick run\n");
        skip();
    }
    static uint16_t keys[kTokens][kDims], got[kTokens][kDims], want[kTokens][kDims];
    static uint8_t content[kPages][kPage * kLatent];
    static float scale[kPages][kPage];
    static uint16_t rope[kPages][kPage * kRope];
    tu_rng rng = tu_seed(8);
    int64_t slots[kTokens];
    for (int t = 0; t < kTokens; t++) {
        tu_fill_bf16(&rng, keys[t], kDims, 0, 1);
        slots[t] = 3 * kPage + t;
    }
    const int32_t pairs[2] = {3, 2}, table[1] = {2}, starts[2] = {0, kTokens};
    gpu_mem d_content = gpu_new(bytes, 16, 0), d_scale = gpu_new(sizeof scale, 16, 0xff);
    gpu_mem d_rope = gpu_new(sizeof rope, 16, 0xff), d_keys = gpu_new_from(keys, sizeof keys, 16);
    gpu_mem d_slots = gpu_new_from(slots, sizeof slots, 8), d_pairs = gpu_new_from(pairs, 8, 8);
    gpu_mem d_table = gpu_new_from(table, 4, 4), d_starts = gpu_new_from(starts, 8, 4);
    gpu_mem d_got = gpu_new(sizeof got, 16, 0xee);
    snapmla_cache cache;
    memset(&cache, 0, sizeof cache);
    cache.content = d_content.at;
    cache.scale = (float *)(void *)d_scale.at;
    cache.rope = d_rope.at;
    cache.content_page_stride = stride;
    cache.pages = kPages;
    snapmla_import_desc i;
    memset(&i, 0, sizeof i);
    i.cache = cache;
    i.source = d_keys.at;
    i.tokens = kTokens;
    i.slots = (const int64_t *)(const void *)d_slots.at;
    OK(snapmla_import(&i));
    snapmla_copy_pages_desc c;
    memset(&c, 0, sizeof c);
    c.layers = 1;
    c.source = c.destination = &cache;
    c.count = 1;
    c.pairs = (const int32_t *)(const void *)d_pairs.at;
    OK(snapmla_copy_pages(&c));
    snapmla_fetch_desc f;
    memset(&f, 0, sizeof f);
    f.cache = cache;
    f.tokens = kTokens;
    f.latent = d_got.at;
    f.block_table = (const int32_t *)(const void *)d_table.at;
    f.block_table_width = 1;
    f.batch = 1;
    f.row_starts = (const int32_t *)(const void *)d_starts.at;
    OK(snapmla_fetch(&f));
    CUDA(cudaDeviceSynchronize());

    snapmla_ref_append_desc a;
    memset(&a, 0, sizeof a);
    a.cache.content = content[0];
    a.cache.scale = scale[0];
    a.cache.rope = rope[0];
    a.cache.pages = kPages;
    a.tokens = kTokens;
    a.latent = keys[0];
    a.slots = slots;
    assert_int_equal(snapmla_ref_append(&a), 0);
    snapmla_ref_fetch_desc r;
    memset(&r, 0, sizeof r);
    r.cache = a.cache;
    r.tokens = kTokens;
    r.slots = slots;
    r.latent = want[0];
    assert_int_equal(snapmla_ref_fetch(&r), 0);
    gpu_get(&d_got, got);
    TU_CHECK_BYTES(got, want, sizeof got);
    uint8_t *far = (uint8_t *)tu_alloc(kPage * kLatent, 0);
    CUDA(cudaMemcpy(far, d_content.at + 3 * stride, kPage * kLatent, cudaMemcpyDeviceToHost));
    TU_CHECK_BYTES(far, content[3], kPage * kLatent);
    free(far);
    gpu_delete(&d_content);
    gpu_delete(&d_scale);
    gpu_delete(&d_rope);
    gpu_delete(&d_keys);
    gpu_delete(&d_slots);
    gpu_delete(&d_pairs);
    gpu_delete(&d_table);
    gpu_delete(&d_starts);
    gpu_delete(&d_got);
}

/* ================================================================================================
   Graphs and errors
   ============================================================================================== */

/* Every data-flow call can be captured, and what is replayed follows the device memory. */
static void test_flow_in_a_graph(void **state)
{
    (void)state;
    gpu_need();
    enum { kTokens = 70 };
    const spec s = cache_spec(9, 16, 12, LAYOUT_DENSE);
    problem *p = problem_new(&s);
    static uint16_t keys[kTokens][kDims], got[kTokens][kDims], want[kTokens][kDims];
    int64_t slots[kTokens];
    int32_t pairs[10];
    tu_rng rng = tu_seed(10);
    for (int t = 0; t < kTokens; t++) slots[t] = -1;
    for (int i = 0; i < 10; i++) pairs[i] = -1;
    gpu_mem d_keys = gpu_new_from(keys, sizeof keys, 16),
            d_slots = gpu_new_from(slots, sizeof slots, 8);
    gpu_mem d_pairs = gpu_new_from(pairs, sizeof pairs, 8), d_got = gpu_new(sizeof got, 16, 0xee);
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    CUDA(cudaStreamCreate(&stream));
    snapmla_cache cache = device_cache(p);
    snapmla_import_desc i;
    memset(&i, 0, sizeof i);
    i.cache = cache;
    i.source = d_keys.at;
    i.tokens = kTokens;
    i.slots = (const int64_t *)(const void *)d_slots.at;
    i.stream = stream;
    snapmla_copy_pages_desc c;
    memset(&c, 0, sizeof c);
    c.layers = 1;
    c.source = c.destination = &cache;
    c.count = 5;
    c.pairs = (const int32_t *)(const void *)d_pairs.at;
    c.stream = stream;
    snapmla_fetch_desc f;
    memset(&f, 0, sizeof f);
    f.cache = cache;
    f.tokens = kTokens;
    f.slots = i.slots;
    f.latent = d_got.at;
    f.stream = stream;
    CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    OK(snapmla_import(&i));
    OK(snapmla_copy_pages(&c));
    OK(snapmla_fetch(&f));
    CUDA(cudaStreamEndCapture(stream, &graph));
    CUDA(cudaGraphInstantiate(&exec, graph, 0));

    for (int t = 0; t < kTokens; t++) {
        tu_fill_bf16(&rng, keys[t], kDims, 0, 1);
        slots[t] = t;
    }
    for (int n = 0; n < 5; n++) pairs[2 * n] = n, pairs[2 * n + 1] = n + 6;
    gpu_put(&d_keys, keys);
    gpu_put(&d_slots, slots);
    gpu_put(&d_pairs, pairs);
    CUDA(cudaGraphLaunch(exec, stream));
    CUDA(cudaStreamSynchronize(stream));
    snapmla_ref_import_desc ri;
    memset(&ri, 0, sizeof ri);
    ri.cache = p->cache;
    ri.source = keys;
    ri.tokens = kTokens;
    ri.slots = slots;
    assert_int_equal(snapmla_ref_import(&ri), 0);
    snapmla_ref_copy_pages_desc rc;
    memset(&rc, 0, sizeof rc);
    rc.layers = 1;
    rc.source = rc.destination = &p->cache;
    rc.count = 5;
    rc.pairs = pairs;
    assert_int_equal(snapmla_ref_copy_pages(&rc), 0);
    snapmla_ref_fetch_desc rf;
    memset(&rf, 0, sizeof rf);
    rf.cache = p->cache;
    rf.tokens = kTokens;
    rf.slots = slots;
    rf.latent = want[0];
    assert_int_equal(snapmla_ref_fetch(&rf), 0);
    gpu_get(&d_got, got);
    TU_CHECK_BYTES(got, want, sizeof got);
    unsigned char *image = (unsigned char *)tu_alloc(p->cache_size, 0);
    gpu_get(&p->d_cache, image);
    TU_CHECK_BYTES(image, p->cache_bytes, p->cache_size);
    free(image);
    CUDA(cudaGraphExecDestroy(exec));
    CUDA(cudaGraphDestroy(graph));
    CUDA(cudaStreamDestroy(stream));
    gpu_delete(&d_keys);
    gpu_delete(&d_slots);
    gpu_delete(&d_pairs);
    gpu_delete(&d_got);
    problem_free(p);
}

/* A call that is refused leaves outputs and the pending CUDA error alone. */
static void test_refused_calls_write_nothing(void **state)
{
    (void)state;
    gpu_need();
    const spec s = cache_spec(11, 64, 3, LAYOUT_DENSE);
    problem *p = problem_new(&s);
    gpu_mem rows = gpu_new(4 * kDims * 2, 16, 0xee);
    (void)cudaGetLastError();
    (void)cudaSetDevice(-1); /* the caller's own error */
    const cudaError_t pending = cudaPeekAtLastError();
    snapmla_import_desc i;
    memset(&i, 0, sizeof i);
    i.cache = device_cache(p);
    i.source = rows.at + 1;
    i.tokens = 4;
    EXPECT(snapmla_import(&i), SNAPMLA_ERROR_SOURCE_ALIGN);
    snapmla_append_desc a;
    memset(&a, 0, sizeof a);
    a.cache = i.cache;
    a.tokens = 4;
    a.latent = rows.at;
    a.slots = (const int64_t *)(const void *)rows.at;
    a.norm.eps = -1;
    EXPECT(snapmla_append(&a), SNAPMLA_ERROR_NORM_EPS);
    assert_int_equal(cudaPeekAtLastError(), pending);
    assert_int_not_equal(pending, cudaSuccess);
    (void)cudaGetLastError();
    CUDA(cudaDeviceSynchronize());
    problem_check_inputs(p);
    gpu_delete(&rows);
    problem_free(p);
}

int run_flow_tests(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_quantize_q_rotated),
        cmocka_unit_test(test_append_norm_and_rotation),
        cmocka_unit_test(test_append_many_raw_rows),
        cmocka_unit_test(test_fetch_ranges),
        cmocka_unit_test(test_fetch_many_rows),
        cmocka_unit_test(test_copy_pages),
        cmocka_unit_test(test_import),
        cmocka_unit_test(test_far_pages),
        cmocka_unit_test(test_flow_in_a_graph),
        cmocka_unit_test(test_refused_calls_write_nothing),
    };
    return cmocka_run_group_tests_name("flow", tests, NULL, NULL);
}
