/* test_gpu_data.c - quantize_q, append, fetch and merge on the GPU against the reference: bit for
   bit, for every kind of number, layout and stride, and nothing else touched. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <cmocka.h>

#include "test_util.h"
#include "gpu_util.h"
#include "gpu_rows.h"

int run_data_tests(void);

/* ================================================================================================
   quantize_q
   ============================================================================================== */
static void check_quantize(uint64_t seed, int64_t tokens, int heads, int64_t head_gap,
                           int64_t token_gap)
{
    const int64_t rows = tokens * heads, head_stride = kDims + head_gap;
    const int64_t token_stride = heads * head_stride + token_gap;
    tu_rng rng = tu_seed(seed);
    uint16_t *dense = (uint16_t *)tu_alloc((size_t)rows * kDims * 2, 0);
    uint16_t *q = (uint16_t *)tu_alloc((size_t)(tokens * token_stride) * 2, 0xff);
    fill_rows(&rng, dense, rows, kDims);
    for (int64_t r = 0; r < rows; r++) {
        memcpy(q + r / heads * token_stride + r % heads * head_stride, dense + r * kDims,
               2 * kDims);
    }
    gpu_mem d_q = gpu_new_from(q, (size_t)(tokens * token_stride) * 2, 16);
    gpu_mem content = gpu_new((size_t)rows * kLatent, 16, 0xee);
    gpu_mem scale = gpu_new((size_t)rows * 4, 4, 0xee),
            rope = gpu_new((size_t)rows * kRope * 2, 16, 0xee);
    snapmla_quantize_q_desc d;
    memset(&d, 0, sizeof d);
    d.tokens = tokens;
    d.heads = heads;
    d.q = d_q.at;
    if (head_gap || token_gap) {
        d.q_head_stride = head_stride;
        d.q_token_stride = token_stride;
    }
    d.q_content = content.at;
    d.q_scale = (float *)(void *)scale.at;
    d.q_rope = rope.at;
    OK(snapmla_quantize_q(&d));
    CUDA(cudaDeviceSynchronize());
    uint8_t *got_content = (uint8_t *)tu_alloc(content.bytes, 0);
    uint32_t *got_scale = (uint32_t *)tu_alloc(scale.bytes, 0);
    uint16_t *got_rope = (uint16_t *)tu_alloc(rope.bytes, 0);
    gpu_get(&content, got_content);
    gpu_get(&scale, got_scale);
    gpu_get(&rope, got_rope);
    for (int64_t r = 0; r < rows; r++) {
        const uint16_t *row = dense + r * kDims;
        uint8_t want_content[kLatent];
        uint16_t want_rope[kRope];
        float f;
        uint32_t want_scale;
        snapmla_ref_quantize(row, kLatent, row + kLatent, kRope, want_content, &f, want_rope);
        memcpy(&want_scale, &f, 4);
        if (got_scale[r] != want_scale ||
            memcmp(got_content + r * kLatent, want_content, kLatent) ||
            memcmp(got_rope + r * kRope, want_rope, 2 * kRope)) {
            print_error("seed %llu, %lld x %d, row %lld (kind %d)\n", (unsigned long long)seed,
                        (long long)tokens, heads, (long long)r, (int)(r % kKinds));
        }
        TU_CHECK_INT(got_scale[r], want_scale);
        TU_CHECK_BYTES(got_content + r * kLatent, want_content, kLatent);
        TU_CHECK_BYTES(got_rope + r * kRope, want_rope, 2 * kRope);
    }
    free(dense);
    free(q);
    free(got_content);
    free(got_scale);
    free(got_rope);
    gpu_delete(&d_q);
    gpu_delete(&content);
    gpu_delete(&scale);
    gpu_delete(&rope);
}

static void test_quantize_q(void **state)
{
    (void)state;
    gpu_need();
    check_quantize(1, 1, 1, 0, 0);
    check_quantize(2, 1, kKinds * 3, 0, 0);
    check_quantize(3, 37, 17, 0, 0);
    check_quantize(4, 37, 17, 8, 0);
    check_quantize(5, 5, 128, 64, 24);
    check_quantize(6, 129, 3, 0, 40);
    check_quantize(7, 1000, 1, 0, 0);
}

/* Many ordinary rows, where a shortcut for the division would show: 512 quotients a row, of which
   some per million lie next to a tie, and rows of nothing but ties. */
typedef struct many_rows {
    uint16_t *q;
    const uint8_t *content;
    const float *scale;
    const uint16_t *rope;
    unsigned char *wrong;
} many_rows;

static void make_row(void *context, int64_t r)
{
    uint16_t *row = ((const many_rows *)context)->q + r * kDims;
    tu_rng rng = tu_seed(800000u + (uint64_t)r);
    const int power = (int)tu_below(&rng, 80) - 40;
    const double std = ldexp(1 + tu_uniform(&rng), power);
    for (int d = 0; d < kDims; d++) {
        double x = std * (double)fast_gauss(&rng);
        if (r % 4 == 0 && d < kLatent) { /* odd multiples of half a step of e4m3, scale 2^power */
            const int odd = 17 + 2 * (int)tu_below(&rng, 8);
            x = ldexp(odd, (int)tu_below(&rng, 18) - 14 + power);
            if (tu_below(&rng, 2)) x = -x;
        }
        row[d] = tu_bf16(x);
        if (r % 8 == 0) row[d] = (uint16_t)(row[d] + tu_below(&rng, 3) - 1);
    }
    if (r % 4 == 0) row[tu_below(&rng, kLatent)] = tu_bf16(ldexp(448, power));
}

static void check_row(void *context, int64_t r)
{
    const many_rows *m = (const many_rows *)context;
    const uint16_t *row = m->q + r * kDims;
    uint8_t content[kLatent];
    uint16_t rope[kRope];
    float scale;
    snapmla_ref_quantize(row, kLatent, row + kLatent, kRope, content, &scale, rope);
    m->wrong[r] = memcmp(content, m->content + r * kLatent, kLatent) != 0 ||
                  memcmp(&scale, m->scale + r, 4) != 0 ||
                  memcmp(rope, m->rope + r * kRope, 2 * kRope) != 0;
}

static void test_quantize_many_rows(void **state)
{
    (void)state;
    gpu_need();
    const int64_t rows = gpu_quick() ? 2000 : 200000;
    many_rows m;
    memset(&m, 0, sizeof m);
    m.q = (uint16_t *)tu_alloc((size_t)rows * kDims * 2, 0);
    m.wrong = (unsigned char *)tu_alloc((size_t)rows, 0);
    parallel_for(rows, make_row, &m);
    gpu_mem q = gpu_new_from(m.q, (size_t)rows * kDims * 2, 16);
    gpu_mem content = gpu_new((size_t)rows * kLatent, 16, 0xee);
    gpu_mem scale = gpu_new((size_t)rows * 4, 4, 0xee);
    gpu_mem rope = gpu_new((size_t)rows * kRope * 2, 16, 0xee);
    snapmla_quantize_q_desc d;
    memset(&d, 0, sizeof d);
    d.tokens = rows;
    d.heads = 1;
    d.q = q.at;
    d.q_content = content.at;
    d.q_scale = (float *)(void *)scale.at;
    d.q_rope = rope.at;
    OK(snapmla_quantize_q(&d));
    CUDA(cudaDeviceSynchronize());
    uint8_t *got_content = (uint8_t *)tu_alloc(content.bytes, 0);
    float *got_scale = (float *)tu_alloc(scale.bytes, 0);
    uint16_t *got_rope = (uint16_t *)tu_alloc(rope.bytes, 0);
    gpu_get(&content, got_content);
    gpu_get(&scale, got_scale);
    gpu_get(&rope, got_rope);
    m.content = got_content;
    m.scale = got_scale;
    m.rope = got_rope;
    parallel_for(rows, check_row, &m);
    int64_t wrong = 0, first = -1;
    for (int64_t r = 0; r < rows; r++) {
        if (m.wrong[r] && first < 0) first = r;
        wrong += m.wrong[r];
    }
    TU_CHECK(wrong == 0, "%lld of %lld rows differ from the reference, the first is row %lld",
             (long long)wrong, (long long)rows, (long long)first);
    free(m.q);
    free(m.wrong);
    free(got_content);
    free(got_scale);
    free(got_rope);
    gpu_delete(&q);
    gpu_delete(&content);
    gpu_delete(&scale);
    gpu_delete(&rope);
}

/* ================================================================================================
   append
   ============================================================================================== */
typedef struct keys {
    int64_t tokens;
    int64_t latent_stride, rope_stride; /* rope_stride 0: behind the latent */
    size_t latent_bytes, rope_bytes, shift;
    uint16_t *latent, *rope;
} keys;

/* `shift`: bytes behind a 16-byte boundary, 2 and up */
static keys make_keys(uint64_t seed, int64_t tokens, int two, int64_t gap, size_t shift)
{
    tu_rng rng = tu_seed(seed);
    keys k;
    memset(&k, 0, sizeof k);
    k.tokens = tokens;
    k.shift = shift;
    uint16_t *rows = (uint16_t *)tu_alloc((size_t)tokens * kDims * 2, 0);
    fill_rows(&rng, rows, tokens, kDims);
    k.latent_stride = (two ? kLatent : kDims) + gap;
    k.rope_stride = two ? kRope + gap : 0;
    k.latent_bytes = (size_t)(tokens * k.latent_stride) * 2;
    k.rope_bytes = (size_t)(tokens * k.rope_stride) * 2;
    k.latent = (uint16_t *)tu_alloc(k.latent_bytes, 0xff);
    k.rope = (uint16_t *)tu_alloc(k.rope_bytes, 0xff);
    for (int64_t t = 0; t < tokens; t++) {
        const uint16_t *row = rows + t * kDims;
        memcpy(k.latent + t * k.latent_stride, row, 2 * (two ? kLatent : kDims));
        if (two) memcpy(k.rope + t * k.rope_stride, row + kLatent, 2 * kRope);
    }
    free(rows);
    return k;
}

static void check_append(uint64_t seed, int page_size, layout how, int two, int64_t gap,
                         size_t shift, int64_t tokens)
{
    const int pages = (int)((tokens + page_size - 1) / page_size) + 3;
    const spec s = cache_spec(seed, page_size, pages, how);
    problem *p = problem_new(&s);
    keys k = make_keys(seed, tokens, two, gap, shift);
    int64_t *slots = make_slots(seed, tokens, (int64_t)pages * page_size);
    gpu_mem latent = gpu_new_from(k.latent, k.latent_bytes, k.shift);
    gpu_mem rope = gpu_new_from(k.rope, k.rope_bytes, k.shift + 2);
    gpu_mem d_slots = gpu_new_from(slots, (size_t)tokens * 8, 8);

    snapmla_append_desc d;
    memset(&d, 0, sizeof d);
    d.cache = device_cache(p);
    d.tokens = tokens;
    d.latent = latent.at;
    d.latent_stride = gap ? k.latent_stride : 0;
    d.rope = two ? rope.at : NULL;
    d.rope_stride = gap ? k.rope_stride : 0;
    d.slots = (const int64_t *)(const void *)d_slots.at;
    OK(snapmla_append(&d));
    CUDA(cudaDeviceSynchronize());

    snapmla_ref_append_desc ref;
    memset(&ref, 0, sizeof ref);
    ref.cache = p->cache;
    ref.tokens = tokens;
    ref.latent = k.latent;
    ref.latent_stride = k.latent_stride;
    ref.rope = two ? k.rope : NULL;
    ref.rope_stride = k.rope_stride;
    ref.slots = slots;
    assert_int_equal(snapmla_ref_append(&ref), 0);

    /* the whole cache, gaps and unused pages included */
    unsigned char *got = (unsigned char *)tu_alloc(p->cache_size, 0);
    gpu_get(&p->d_cache, got);
    if (memcmp(got, p->cache_bytes, p->cache_size) != 0) {
        print_error("seed %llu, page %d, layout %d, two pointers %d, gap %d, shift %d\n",
                    (unsigned long long)seed, page_size, (int)how, two, (int)gap, (int)shift);
    }
    TU_CHECK_BYTES(got, p->cache_bytes, p->cache_size);
    free(got);
    free(k.latent);
    free(k.rope);
    free(slots);
    gpu_delete(&latent);
    gpu_delete(&rope);
    gpu_delete(&d_slots);
    problem_free(p);
}

static void test_append(void **state)
{
    (void)state;
    gpu_need();
    uint64_t seed = 100;
    for (int page = 1; page <= 1024; page *= 2) {
        for (int how = LAYOUT_DENSE; how <= LAYOUT_PADDED; how++) {
            check_append(seed++, page, (layout)how, how & 1, how == LAYOUT_PADDED ? 8 : 0, 16, 180);
        }
    }
    /* rows that are only 2-byte aligned, odd strides, both forms of keys */
    for (int two = 0; two <= 1; two++) {
        check_append(seed++, 64, LAYOUT_DENSE, two, 1, 2, 100);
        check_append(seed++, 64, LAYOUT_RECORD, two, 0, 6, 100);
        check_append(seed++, 16, LAYOUT_PADDED, two, 7, 16, 100);
        check_append(seed++, 64, LAYOUT_DENSE, two, 0, 16, 1);
        check_append(seed++, 64, LAYOUT_DENSE, two, 0, 16, 3000);
    }
}

/* ================================================================================================
   fetch
   ============================================================================================== */

static void check_fetch(uint64_t seed, int page_size, layout how, int two, int64_t gap,
                        size_t shift, int64_t tokens)
{
    const int pages = (int)((tokens + page_size - 1) / page_size) + 3;
    const spec s = cache_spec(seed, page_size, pages, how);
    problem *p = problem_new(&s);
    randomise_cache(p, seed);
    int64_t *slots = make_slots(seed, tokens, (int64_t)pages * page_size);
    keys want = make_keys(seed, tokens, two, gap, shift);
    memset(want.latent, 0xee, want.latent_bytes);
    memset(want.rope, 0xee, want.rope_bytes);
    gpu_mem latent = gpu_new(want.latent_bytes, shift, 0xee);
    gpu_mem rope = gpu_new(want.rope_bytes, shift + 2, 0xee);
    gpu_mem d_slots = gpu_new_from(slots, (size_t)tokens * 8, 8);

    snapmla_fetch_desc d;
    memset(&d, 0, sizeof d);
    d.cache = device_cache(p);
    d.tokens = tokens;
    d.slots = (const int64_t *)(const void *)d_slots.at;
    d.latent = latent.at;
    d.latent_stride = gap ? want.latent_stride : 0;
    d.rope = two ? rope.at : NULL;
    d.rope_stride = gap ? want.rope_stride : 0;
    OK(snapmla_fetch(&d));
    CUDA(cudaDeviceSynchronize());

    snapmla_ref_fetch_desc ref;
    memset(&ref, 0, sizeof ref);
    ref.cache = p->cache;
    ref.tokens = tokens;
    ref.slots = slots;
    ref.latent = want.latent;
    ref.latent_stride = want.latent_stride;
    ref.rope = two ? want.rope : NULL;
    ref.rope_stride = want.rope_stride;
    assert_int_equal(snapmla_ref_fetch(&ref), 0);

    uint16_t *got_latent = (uint16_t *)tu_alloc(latent.bytes, 0);
    uint16_t *got_rope = (uint16_t *)tu_alloc(rope.bytes, 0);
    gpu_get(&latent, got_latent);
    gpu_get(&rope, got_rope);
    if (memcmp(got_latent, want.latent, latent.bytes) || memcmp(got_rope, want.rope, rope.bytes)) {
        print_error("seed %llu, page %d, layout %d, two pointers %d, gap %d, shift %d\n",
                    (unsigned long long)seed, page_size, (int)how, two, (int)gap, (int)shift);
    }
    TU_CHECK_BYTES(got_latent, want.latent, latent.bytes);
    TU_CHECK_BYTES(got_rope, want.rope, rope.bytes);
    problem_check_inputs(p);
    free(got_latent);
    free(got_rope);
    free(want.latent);
    free(want.rope);
    free(slots);
    gpu_delete(&latent);
    gpu_delete(&rope);
    gpu_delete(&d_slots);
    problem_free(p);
}

static void test_fetch(void **state)
{
    (void)state;
    gpu_need();
    uint64_t seed = 300;
    for (int page = 1; page <= 1024; page *= 2) {
        for (int how = LAYOUT_DENSE; how <= LAYOUT_PADDED; how++) {
            check_fetch(seed++, page, (layout)how, how & 1, how == LAYOUT_PADDED ? 8 : 0, 16, 180);
        }
    }
    for (int two = 0; two <= 1; two++) {
        check_fetch(seed++, 64, LAYOUT_DENSE, two, 1, 2, 100);
        check_fetch(seed++, 64, LAYOUT_RECORD, two, 0, 6, 100);
        check_fetch(seed++, 16, LAYOUT_PADDED, two, 7, 16, 100);
        check_fetch(seed++, 64, LAYOUT_DENSE, two, 0, 16, 1);
        check_fetch(seed++, 64, LAYOUT_DENSE, two, 0, 16, 3000);
    }
}

/* An all-zero token comes back as zeros, not as 0/0. */
static void test_zero_token_round_trip(void **state)
{
    (void)state;
    gpu_need();
    const spec s = cache_spec(1, 64, 1, LAYOUT_DENSE);
    problem *p = problem_new(&s);
    const int64_t slot = 17;
    uint16_t row[kDims];
    memset(row, 0, sizeof row);
    gpu_mem in = gpu_new_from(row, sizeof row, 16), out = gpu_new(sizeof row, 16, 0xff);
    gpu_mem slots = gpu_new_from(&slot, 8, 8);
    snapmla_append_desc a;
    memset(&a, 0, sizeof a);
    a.cache = device_cache(p);
    a.tokens = 1;
    a.latent = in.at;
    a.slots = (const int64_t *)(const void *)slots.at;
    OK(snapmla_append(&a));
    snapmla_fetch_desc f;
    memset(&f, 0, sizeof f);
    f.cache = a.cache;
    f.tokens = 1;
    f.latent = out.at;
    f.slots = a.slots;
    OK(snapmla_fetch(&f));
    CUDA(cudaDeviceSynchronize());
    gpu_get(&out, row);
    TU_CHECK_FILLED(row, 0, sizeof row);
    gpu_delete(&in);
    gpu_delete(&out);
    gpu_delete(&slots);
    problem_free(p);
}

/* ================================================================================================
   merge
   ============================================================================================== */
typedef struct merge_case {
    int parts, dim;
    int64_t rows, out_gap, lse_gap;
    int in_place, no_lse;
} merge_case;

/* Sums of exponentials differ in the last bits: out within one bf16 step, lse within a few f32
   ones; NaN, Inf and zero rows exactly. */
static void check_merge(uint64_t seed, const merge_case *c)
{
    const int64_t out_stride = c->rows * c->dim + c->out_gap, lse_stride = c->rows + c->lse_gap;
    const size_t out_bytes = (size_t)(c->parts * out_stride) * 2;
    const size_t lse_bytes = (size_t)(c->parts * lse_stride) * 4;
    const size_t row_bytes = (size_t)(c->rows * c->dim) * 2;
    tu_rng rng = tu_seed(seed);
    uint16_t *part_out = (uint16_t *)tu_alloc(out_bytes, 0xff);
    float *part_lse = (float *)tu_alloc(lse_bytes, 0xff);
    for (int n = 0; n < c->parts; n++) {
        for (int64_t r = 0; r < c->rows; r++) {
            uint16_t *out = part_out + n * out_stride + r * c->dim;
            float *lse = part_lse + n * lse_stride + r;
            const int kind = (int)(r % 8);
            *lse = (float)(20 * tu_gauss(&rng));
            if (kind == 1) *lse = (float)tu_gauss(&rng);
            if (kind == 2) *lse += 1e5f; /* only the difference counts */
            if (kind == 3 || (kind == 4 && tu_below(&rng, 2))) *lse = -INFINITY;
            if (kind == 5 && n == 0) *lse = NAN;
            for (int i = 0; i < c->dim; i++) out[i] = tu_bf16(1 + tu_gauss(&rng));
            /* a part without keys: what its out holds does not count */
            if (*lse == -INFINITY) tu_poison_bf16(out, c->dim);
            if (kind == 6 && n == c->parts - 1) tu_poison_bf16(out, c->dim);
        }
    }
    gpu_mem d_part_out = gpu_new_from(part_out, out_bytes, 16);
    gpu_mem d_part_lse = gpu_new_from(part_lse, lse_bytes, 4);
    gpu_mem d_out = gpu_new(row_bytes, 16, 0xff), d_lse = gpu_new((size_t)c->rows * 4, 4, 0xff);
    snapmla_merge_desc d;
    memset(&d, 0, sizeof d);
    d.parts = c->parts;
    d.dim = c->dim == kLatent ? 0 : c->dim;
    d.rows = c->rows;
    d.part_out = d_part_out.at;
    d.part_lse = (const float *)(const void *)d_part_lse.at;
    d.part_out_stride = c->out_gap ? out_stride : 0;
    d.part_lse_stride = c->lse_gap ? lse_stride : 0;
    d.out = c->in_place ? d_part_out.at : d_out.at;
    d.lse = c->no_lse ? NULL : (float *)(void *)(c->in_place ? d_part_lse.at : d_lse.at);
    OK(snapmla_merge(&d));
    CUDA(cudaDeviceSynchronize());

    uint16_t *want_out = (uint16_t *)tu_alloc(row_bytes, 0),
             *got_out = (uint16_t *)tu_alloc(out_bytes, 0);
    float *want_lse = (float *)tu_alloc((size_t)c->rows * 4, 0),
          *got_lse = (float *)tu_alloc(lse_bytes, 0);
    snapmla_ref_merge_desc ref;
    memset(&ref, 0, sizeof ref);
    ref.parts = c->parts;
    ref.dim = c->dim;
    ref.rows = c->rows;
    ref.part_out = part_out;
    ref.part_lse = part_lse;
    ref.part_out_stride = out_stride;
    ref.part_lse_stride = lse_stride;
    ref.out = want_out;
    ref.lse = want_lse;
    assert_int_equal(snapmla_ref_merge(&ref), 0);
    gpu_get(c->in_place ? &d_part_out : &d_out, got_out);
    gpu_get(c->in_place ? &d_part_lse : &d_lse, got_lse);

    for (int64_t r = 0; r < c->rows; r++) {
        const int kind = (int)(r % 8);
        for (int i = 0; i < c->dim; i++) {
            const double g = tu_from_bf16(got_out[r * c->dim + i]),
                         w = tu_from_bf16(want_out[r * c->dim + i]);
            TU_CHECK(isnan(w) ? isnan(g) : fabs(g - w) <= fabs(w) / 128 + 1e-6,
                     "seed %llu, row %lld (kind %d), dim %d: %g, expected %g",
                     (unsigned long long)seed, (long long)r, kind, i, g, w);
            if (kind == 3) TU_CHECK_INT(got_out[r * c->dim + i], 0);
            if (kind == 5) TU_CHECK(isnan(g), "row %lld: a NaN lse was lost", (long long)r);
        }
        if (c->no_lse) continue;
        const double g = got_lse[r], w = want_lse[r];
        TU_CHECK(isnan(w) ? isnan(g) : g == w || fabs(g - w) <= 1e-6 * (1 + fabs(w)),
                 "seed %llu, row %lld (kind %d): lse %.9g, expected %.9g", (unsigned long long)seed,
                 (long long)r, kind, g, w);
        if (kind == 3) TU_CHECK(g == -INFINITY, "row %lld: lse %g", (long long)r, g);
    }
    if (c->in_place) { /* the other parts are as they were */
        const size_t first = row_bytes, first_lse = (size_t)c->rows * 4;
        TU_CHECK(out_bytes == first || memcmp((char *)got_out + first, (char *)part_out + first,
                                              out_bytes - first) == 0,
                 "part_out was written");
        TU_CHECK(c->no_lse || lse_bytes == first_lse ||
                     memcmp((char *)got_lse + first_lse, (char *)part_lse + first_lse,
                            lse_bytes - first_lse) == 0,
                 "part_lse was written");
    }
    free(part_out);
    free(part_lse);
    free(want_out);
    free(want_lse);
    free(got_out);
    free(got_lse);
    gpu_delete(&d_part_out);
    gpu_delete(&d_part_lse);
    gpu_delete(&d_out);
    gpu_delete(&d_lse);
}

static void test_merge(void **state)
{
    (void)state;
    gpu_need();
    static const merge_case cases[] = {
        {1, 512, 8, 0, 0, 0, 0},   {2, 512, 100, 0, 0, 0, 0}, {2, 512, 100, 0, 0, 1, 0},
        {3, 512, 33, 64, 5, 0, 0}, {3, 512, 33, 64, 5, 1, 0}, {8, 512, 513, 0, 0, 0, 0},
        {9, 8, 64, 0, 0, 0, 0},    {2, 64, 40, 8, 1, 0, 1},   {4, 576, 24, 0, 0, 0, 0},
        {5, 1000, 16, 0, 0, 1, 0}, {64, 512, 16, 0, 0, 0, 0}, {2, 512, 70000, 0, 0, 0, 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) check_merge(500 + i, &cases[i]);
}

/* Parts of one problem, decoded apart, merge to the whole: keys of the first requests' pages are
   cut at a page and both halves decoded as requests of their own. */
static void test_merge_of_decoded_parts(void **state)
{
    (void)state;
    gpu_need();
    enum { kWhole = 1000, kCut = 448 };
    static const int32_t lens[1] = {kWhole};
    spec s;
    memset(&s, 0, sizeof s);
    s.seed = 77;
    s.batch = 1;
    s.s_q = 2;
    s.heads = 20;
    s.lens = lens;
    s.key_mean = 0.5;
    problem *p = problem_new(&s);
    result whole = run(p);

    const int64_t rows = (int64_t)s.s_q * s.heads;
    gpu_mem part_out = gpu_new((size_t)rows * kLatent * 2 * 2, 16, 0xff);
    gpu_mem part_lse = gpu_new((size_t)rows * 4 * 2, 4, 0xff);
    for (int n = 0; n < 2; n++) {
        const int32_t len = n ? kWhole - kCut : kCut;
        view v = view_all(p);
        v.lens = &len;
        stage st = stage_new(p, &v);
        st.desc.block_table += n ? kCut / 64 : 0;
        st.desc.block_table_width -= n ? kCut / 64 : 0;
        OK(snapmla_plan(&st.desc.step));
        OK(snapmla_decode(&st.desc));
        result r = stage_read(&st);
        CUDA(cudaMemcpy(part_out.at + n * rows * kLatent * 2, r.out, (size_t)rows * kLatent * 2,
                        cudaMemcpyHostToDevice));
        CUDA(cudaMemcpy(part_lse.at + n * rows * 4, r.lse, (size_t)rows * 4,
                        cudaMemcpyHostToDevice));
        result_free(&r);
        stage_free(&st);
    }
    gpu_mem out = gpu_new((size_t)rows * kLatent * 2, 16, 0xff),
            lse = gpu_new((size_t)rows * 4, 4, 0xff);
    snapmla_merge_desc d;
    memset(&d, 0, sizeof d);
    d.parts = 2;
    d.rows = rows;
    d.part_out = part_out.at;
    d.part_lse = (const float *)(const void *)part_lse.at;
    d.out = out.at;
    d.lse = (float *)(void *)lse.at;
    OK(snapmla_merge(&d));
    CUDA(cudaDeviceSynchronize());
    result merged = {1, s.s_q, s.heads, (uint16_t *)tu_alloc(out.bytes, 0),
                     (float *)tu_alloc(lse.bytes, 0)};
    gpu_get(&out, merged.out);
    gpu_get(&lse, merged.lse);
    verdict v = compare(p, &merged, SNAPMLA_REF_EXACT, 1e9);
    const bounds limit = {6e-3, 1e-2, 5e-4, 2e-3, 0};
    CHECK_VERDICT(p, &v, &limit);
    for (int64_t r = 0; r < rows; r++) TU_CHECK_NEAR(merged.lse[r], whole.lse[r], 1e-4);
    result_free(&merged);
    result_free(&whole);
    gpu_delete(&part_out);
    gpu_delete(&part_lse);
    gpu_delete(&out);
    gpu_delete(&lse);
    problem_free(p);
}

int run_data_tests(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_quantize_q),
        cmocka_unit_test(test_quantize_many_rows),
        cmocka_unit_test(test_append),
        cmocka_unit_test(test_fetch),
        cmocka_unit_test(test_zero_token_round_trip),
        cmocka_unit_test(test_merge),
        cmocka_unit_test(test_merge_of_decoded_parts),
    };
    return cmocka_run_group_tests_name("data flow", tests, NULL, NULL);
}
