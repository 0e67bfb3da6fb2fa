/* test_gpu_decode.c - plan and decode on the GPU: values over a wide grid of shapes, and the edge
   cases that the manual promises, one by one.  All run for the path in gpu_path. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <cmocka.h>

#include "test_util.h"
#include "gpu_util.h"

int run_decode_tests(void);
int run_edge_tests(void);
int run_precise_tests(void);

#define COUNT(array) ((int)(sizeof(array) / sizeof(array)[0]))

static spec basic(uint64_t seed, int batch, int s_q, int heads, int32_t max_len)
{
    spec s;
    memset(&s, 0, sizeof s);
    s.seed = seed;
    s.batch = batch;
    s.s_q = s_q;
    s.heads = heads;
    s.max_len = max_len;
    s.extra_width = 3;
    s.spare_pages = 2;
    return s;
}

/* ================================================================================================
   Values
   ============================================================================================== */

/* Two keys whose logits differ by ln 2 weigh 2/3 and 1/3.  All numbers are exact in e4m3 with scale
   1, which the 448 in dim 1 makes the scale of keys and the 448 in dim 0 that of the query. */
static void test_hand_computed(void **state)
{
    (void)state;
    gpu_need();
    static const int32_t lens[] = {2, 1, 4};
    spec s = basic(1, 3, 1, 2, 0);
    s.lens = lens;
    s.page_size = 16;
    s.softmax_scale = (float)log(2.0);
    problem *p = problem_new(&s);
    for (int b = 0; b < 3; b++) {
        for (int32_t t = 0; t < lens[b]; t++) {
            uint16_t k[kDims];
            memset(k, 0, sizeof k);
            k[1] = tu_bf16(448);
            k[2] = tu_bf16(b == 0 && t == 0 ? 1 : 0); /* logit ln 2 and 0 */
            k[3] = tu_bf16(t == 0 ? 12 : -24);
            k[511] = tu_bf16(t == 0 ? -3 : 6);
            k[kLatent + 63] = tu_bf16(1); /* the same for all: no change in out */
            token_write(p, page_of(p, b, t), offset_of(p, t), k, k + kLatent);
        }
        for (int h = 0; h < 2; h++) {
            uint16_t *q = q_row(p, b, 0, h);
            memset(q, 0, 2 * kDims);
            q[0] = tu_bf16(448);
            q[2] = tu_bf16(1);
            q[kLatent + 63] = tu_bf16(h); /* adds h * ln 2 to every logit */
        }
    }
    problem_upload(p);
    result r = run(p);
    static const double third[3] = {0, -24.0 / 3 + 24.0 / 3, -15};
    for (int h = 0; h < 2; h++) {
        const double shift = h * log(2.0);
        TU_CHECK_NEAR(r.lse[h], log(3.0) + shift, 1e-6);
        TU_CHECK_NEAR(r.lse[2 + h], shift, 1e-6);
        TU_CHECK_NEAR(r.lse[4 + h], log(4.0) + shift, 1e-6);
        const uint16_t *out[3] = {r.out + h * kLatent, r.out + (2 + h) * kLatent,
                                  r.out + (4 + h) * kLatent};
        for (int b = 0; b < 3; b++) {
            TU_CHECK_INT(out[b][1], tu_bf16(448));
            TU_CHECK_INT(out[b][0] & 0x7fff, 0);
            TU_CHECK_INT(out[b][100] & 0x7fff, 0);
        }
        TU_CHECK_NEAR(tu_from_bf16(out[0][2]), 2.0 / 3, 2.0 / 3 / 256);
        TU_CHECK_NEAR(tu_from_bf16(out[0][3]), (2 * 12.0 - 24.0) / 3, 1e-5);
        TU_CHECK_NEAR(tu_from_bf16(out[1][3]), 12, 0);
        TU_CHECK_NEAR(tu_from_bf16(out[1][511]), -3, 0);
        TU_CHECK_NEAR(tu_from_bf16(out[2][3]), third[2], 0);
        TU_CHECK_NEAR(tu_from_bf16(out[2][511]), (-3 + 3 * 6) / 4.0, 1e-7);
    }
    result_free(&r);
    problem_free(p);
}

static void test_every_length(void **state)
{
    (void)state;
    gpu_need();
    static const int pages[] = {1, 16, 64, 128};
    enum { kMost = 300 };
    int32_t lens[kMost];
    for (int i = 0; i < kMost; i++) lens[i] = i + 1;
    for (int i = 0; i < COUNT(pages); i++) {
        spec s = basic(10 + (uint64_t)i, kMost, 1 + i % 2, 3, 0);
        s.lens = lens;
        s.page_size = pages[i];
        s.causal = i & 1;
        CHECK_SPEC(&s, 4e8);
    }
}

static void test_every_head_count(void **state)
{
    (void)state;
    gpu_need();
    for (int heads = 1; heads <= 130; heads += gpu_quick() ? 13 : 1) {
        spec s = basic(20 + (uint64_t)heads, 3, 1, heads, 200);
        s.strided = heads % 3 == 0;
        CHECK_SPEC(&s, 3e7);
    }
    static const int more[] = {192, 256, 500, 1024};
    for (int i = 0; i < COUNT(more); i++) {
        spec s = basic(180 + (uint64_t)i, 2, 1, more[i], 150);
        CHECK_SPEC(&s, 3e7);
    }
}

static void test_query_tokens(void **state)
{
    (void)state;
    gpu_need();
    static const int heads[] = {1, 3, 16, 17, 64, 128};
    for (int s_q = 1; s_q <= 8; s_q += gpu_quick() ? 3 : 1) {
        for (int h = 0; h < COUNT(heads); h++) {
            for (int causal = 0; causal <= 1; causal++) {
                /* shorter than s_q, around blocks and pages, longer */
                const int32_t lens[] = {1, s_q - 1, s_q, s_q + 1, 63 + s_q, 64, 130, 700};
                spec s = basic(200 + (uint64_t)(s_q * 100 + h * 2 + causal), COUNT(lens), s_q,
                               heads[h], 0);
                s.lens = lens;
                s.causal = causal;
                s.share = 1;
                CHECK_SPEC(&s, 3e7);
            }
        }
    }
    spec s = basic(299, 2, 33, 5, 400);
    s.causal = 1;
    CHECK_SPEC(&s, 1e8);
}

static void test_page_sizes(void **state)
{
    (void)state;
    gpu_need();
    for (int page = 1; page <= 1024; page *= 2) {
        for (int how = LAYOUT_DENSE; how <= LAYOUT_PADDED; how++) {
            const int32_t lens[] = {page, page + 1, page - 1, 3 * page, 2 * page + 7, 1, 1500, 0};
            spec s = basic(400 + (uint64_t)(page * 3 + how), COUNT(lens), 1 + how, 16, 0);
            s.lens = lens;
            s.page_size = page;
            s.layout = (layout)how;
            s.share = how != LAYOUT_DENSE;
            s.causal = how == LAYOUT_RECORD;
            CHECK_SPEC(&s, 6e7);
        }
    }
}

/* Every form of input and output at once and alone. */
static void test_forms(void **state)
{
    (void)state;
    gpu_need();
    for (int bits = 0; bits < 64; bits += gpu_quick() ? 9 : 1) {
        spec s = basic(4000 + (uint64_t)bits, 4, 2, 16 + bits % 3, 500);
        s.strided = bits & 1;
        s.q_planes = bits >> 1 & 1;
        s.no_lse = bits >> 2 & 1;
        s.share = bits >> 3 & 1;
        s.causal = bits >> 4 & 1;
        s.layout = bits >> 5 & 1 ? LAYOUT_RECORD : LAYOUT_DENSE;
        CHECK_SPEC(&s, 1e7);
    }
}

/* Queries quantised by snapmla_quantize_q are the same queries. */
static void test_planes_give_the_same_bits(void **state)
{
    (void)state;
    gpu_need();
    for (int heads = 1; heads <= 128; heads = heads * 2 + 5) {
        spec s = basic(4100 + (uint64_t)heads, 3, 2, heads, 900);
        problem *p = problem_new(&s);
        result a = run(p);
        p->s.q_planes = 1;
        problem_upload(p);
        result b = run(p);
        CHECK_SAME_BITS(&a, &b);
        result_free(&a);
        result_free(&b);
        problem_free(p);
    }
}

/* The public grid of FlashMLA's dense decoding tests with one latent head: its shapes, its small
   values, NaN in unused pages and tails, absurd unused table entries; held to the bounds of our
   format. */
static void test_flashmla_grid(void **state)
{
    (void)state;
    gpu_need();
    static const int batches[] = {1, 2, 6, 64}, tokens[] = {1, 2, 4}, keys[] = {20, 140, 4096};
    static const int heads[] = {1, 3, 9, 63, 64, 126, 128};
    uint64_t seed = 5000;
    for (int b = 0; b < COUNT(batches) - (gpu_quick() ? 1 : 0); b++) {
        for (int k = 0; k < COUNT(keys); k++) {
            for (int varlen = 0; varlen <= 1; varlen++) {
                int32_t lens[64];
                tu_rng rng = tu_seed(++seed);
                for (int i = 0; i < batches[b]; i++) {
                    const double len = keys[k] * (1 + (varlen ? 0.5 * tu_gauss(&rng) : 0));
                    lens[i] = len < 4 ? 4 : (int32_t)len;
                }
                spec s = basic(seed, batches[b], 1, 1, 0);
                s.lens = lens;
                s.extra_width = 4;
                s.key_std = s.rope_std = s.q_std = 0.1;
                s.clamp = 1;
                problem *p = problem_new(&s);
                for (int t = 0; t < COUNT(tokens); t += gpu_quick() ? 2 : 1) {
                    for (int h = 0; h < COUNT(heads); h++) {
                        for (int causal = 0; causal <= 1; causal++) {
                            problem_requery(p, ++seed, tokens[t], heads[h], causal);
                            result r = run(p);
                            CHECK_REFERENCE(p, &r, 8e6);
                            result_free(&r);
                        }
                    }
                }
                problem_check_inputs(p);
                problem_free(p);
            }
        }
    }
}

/* Its corner case: half of the lengths are 0. */
static void test_flashmla_corner(void **state)
{
    (void)state;
    gpu_need();
    int32_t lens[128];
    tu_rng rng = tu_seed(5999);
    for (int i = 0; i < 128; i++) {
        const double len = 4096 * (1 + 0.5 * tu_gauss(&rng));
        lens[i] = tu_below(&rng, 2) ? 0 : len < 2 ? 2 : (int32_t)len;
    }
    for (int causal = 0; causal <= 1; causal++) {
        spec s = basic(6000, 128, 2, 128, 0);
        s.lens = lens;
        s.causal = causal;
        s.key_std = s.rope_std = s.q_std = 0.1;
        s.clamp = 1;
        CHECK_SPEC(&s, 1e8);
    }
}

/* 0 to 100K tokens in one batch, pages shared. */
static void test_mixed_lengths(void **state)
{
    (void)state;
    gpu_need();
    static const int32_t lens[] = {0, 100000, 1, 64, 5000, 0, 65, 33000, 128, 77777, 2, 1023};
    for (int causal = 0; causal <= 1; causal++) {
        spec s = basic(6100, COUNT(lens), 2, 16, 0);
        s.lens = lens;
        s.share = 1;
        s.causal = causal;
        CHECK_SPEC(&s, 1.5e9);
    }
}

static void test_logits_of_any_size(void **state)
{
    (void)state;
    gpu_need();
    const int general = gpu_path == SNAPMLA_PATH_GENERAL;
    /* q = 0: all logits equal, out is the mean of V, lse is ln(len) */
    static const int32_t lens[] = {1, 2, 64, 1000, 30000};
    spec s = basic(6200, COUNT(lens), 1, 5, 0);
    s.lens = lens;
    problem *p = problem_new(&s);
    memset(p->q, 0, 2 * p->q_elements);
    problem_upload(p);
    result r = run(p);
    CHECK_REFERENCE(p, &r, 1e9);
    for (int b = 0; b < COUNT(lens); b++) {
        for (int h = 0; h < 5; h++) {
            TU_CHECK_NEAR(r.lse[b * 5 + h], log(lens[b]), general ? 2e-6 : 1e-3);
        }
    }
    result_free(&r);
    problem_free(p);

    /* up to 1e5 and beyond: no NaN, lse relative to its size */
    for (int power = 2; power <= 5; power++) {
        spec x = basic(6210 + (uint64_t)power, 4, 2, 17, 3000);
        x.causal = 1;
        x.q_std = pow(10.0, power);
        problem *y = problem_new(&x);
        result out = run(y);
        verdict v = compare(y, &out, SNAPMLA_REF_EXACT, 1e8);
        /* the FP8 tensor core's sums are good to 1e-4 of such logits: close maxima may swap */
        const bounds exact = {1e-2, 7e-2, 1, 0, 1e-5}, loose = {2, 2, 2, 0, 2e-3};
        const bounds limit = general ? exact : loose;
        CHECK_VERDICT(y, &v, &limit);
        result_free(&out);
        problem_free(y);
    }
}

/* A key whose latent is zero has the smallest scale there is, so that its rope, divided by it, makes
   logits more than 100 binades above its weight on V: sums of weights must not overflow. */
static void test_zero_latent_far_above(void **state)
{
    (void)state;
    gpu_need();
    static const int32_t lens[] = {192, 151, 700};
    spec s = basic(6300, COUNT(lens), 1, 17, 0);
    s.lens = lens;
    s.softmax_scale = 0.0721688f;
    problem *p = problem_new(&s);
    for (int b = 0; b < COUNT(lens); b++) {
        for (int32_t t = 0; t < lens[b]; t++) {
            uint16_t k[kDims];
            memset(k, 0, sizeof k);
            if (t != 100) k[1] = tu_bf16(1);
            for (int d = kLatent; d < kDims; d++) k[d] = tu_bf16(t == 100 ? 5.25 : t == 150 ? 5.3125 : 0);
            token_write(p, page_of(p, b, t), offset_of(p, t), k, k + kLatent);
        }
        for (int h = 0; h < 17; h++) {
            uint16_t *q = q_row(p, b, 0, h);
            memset(q, 0, kDims * 2);
            q[0] = tu_bf16(1);
            for (int d = kLatent; d < kDims; d++) q[d] = tu_bf16(4);
        }
    }
    problem_upload(p);
    result r = run(p);
    verdict v = compare(p, &r, SNAPMLA_REF_EXACT, 1e9);
    const bounds limit = {1e-2, 7e-2, 1, 0, 2e-4};
    CHECK_VERDICT(p, &v, &limit);
    result_free(&r);
    problem_free(p);
}

int run_decode_tests(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_hand_computed),
        cmocka_unit_test(test_every_length),
        cmocka_unit_test(test_every_head_count),
        cmocka_unit_test(test_query_tokens),
        cmocka_unit_test(test_page_sizes),
        cmocka_unit_test(test_forms),
        cmocka_unit_test(test_planes_give_the_same_bits),
        cmocka_unit_test(test_flashmla_grid),
        cmocka_unit_test(test_flashmla_corner),
        cmocka_unit_test(test_mixed_lengths),
        cmocka_unit_test(test_logits_of_any_size),
        cmocka_unit_test(test_zero_latent_far_above),
    };
    return cmocka_run_group_tests_name("decode", tests, NULL, NULL);
}

/* ================================================================================================
   Edges
   ============================================================================================== */

/* Every row is 0 and -inf. */
static void check_empty(const result *r)
{
    const size_t rows = (size_t)r->batch * r->s_q * r->heads;
    TU_CHECK_FILLED(r->out, 0, rows * kLatent * 2);
    for (size_t i = 0; i < rows; i++)
        TU_CHECK(r->lse[i] == -INFINITY, "row %d: %g", (int)i, (double)r->lse[i]);
}

/* Lengths <= 0 read no table entry: all entries would fault. */
static void test_no_keys(void **state)
{
    (void)state;
    gpu_need();
    static const int32_t lens[] = {0, -1, -64, INT32_MIN, 0, 0, -1000000, 0};
    for (int form = 0; form < 6; form++) {
        spec s = basic(7000 + (uint64_t)form, COUNT(lens), 1 + form % 3, 20, 0);
        int32_t none[COUNT(lens)] = {0};
        s.lens = none;
        s.causal = form & 1;
        s.spare_pages = form < 3 ? 2 : 0;      /* zero pages, null planes */
        s.extra_width = form % 3 == 2 ? 0 : 7; /* width 0, null table */
        if (form == 1 || form == 4) s.max_seq_len = 1024, s.split_tokens = 256;
        problem *p = problem_new(&s);
        view v = view_all(p);
        v.lens = lens;
        result r = run_view(p, &v);
        check_empty(&r);
        result_free(&r);

        /* lengths that nothing backs: no pages or no table means no keys */
        if (s.spare_pages == 0 || s.extra_width == 0) {
            static const int32_t absurd[COUNT(lens)] = {1, 64, 65, 1000, INT32_MAX, 5, 0, 128};
            v.lens = absurd;
            r = run_view(p, &v);
            check_empty(&r);
            result_free(&r);
        }
        problem_free(p);
    }
}

static void test_rows_without_keys_among_others(void **state)
{
    (void)state;
    gpu_need();
    static const int32_t lens[] = {0, 300, -5, 1, 0, 0, 64, 2, 0, 3, 1000, 0};
    for (int form = 0; form < 4; form++) {
        spec s = basic(7100 + (uint64_t)form, COUNT(lens), 4, 16, 0);
        s.lens = lens;
        s.causal = form & 1;
        if (form & 2) s.max_seq_len = 1024, s.split_tokens = 128;
        CHECK_SPEC(&s, 1e9);
    }
}

/* A row sees nothing of a split although other rows of its tile do. */
static void test_causal_at_split_ends(void **state)
{
    (void)state;
    gpu_need();
    static const int32_t lens[] = {128, 129, 130, 131, 257, 384, 385, 64, 65};
    for (int heads = 1; heads <= 64; heads *= 4) {
        spec s = basic(7150 + (uint64_t)heads, COUNT(lens), 4, heads, 0);
        s.lens = lens;
        s.causal = 1;
        s.max_seq_len = 512;
        s.split_tokens = 128;
        CHECK_SPEC(&s, 1e9);
    }
}

static void test_negative_entries_are_skipped(void **state)
{
    (void)state;
    gpu_need();
    static const int32_t lens[] = {500, 64, 640, 1, 1000};
    static const int pages[] = {1, 16, 64};
    for (int i = 0; i < COUNT(pages); i++) {
        spec s = basic(7200 + (uint64_t)i, COUNT(lens), 2, 16, 0);
        s.lens = lens;
        s.page_size = pages[i];
        s.causal = i & 1;
        problem *p = problem_new(&s);
        tu_rng rng = tu_seed(7200);
        for (int b = 0; b < 3; b++) {
            const int n = (lens[b] + pages[i] - 1) / pages[i];
            for (int k = 0; k < n; k++) {
                if (tu_below(&rng, 3) == 0)
                    p->table[b * p->table_stride + k] = k & 1 ? -1 : INT32_MIN;
            }
        }
        /* one request with nothing but holes */
        for (int k = 0; k * pages[i] < lens[3]; k++) p->table[3 * p->table_stride + k] = -1;
        problem_upload(p);
        result r = run(p);
        CHECK_REFERENCE(p, &r, 1e9);
        result_free(&r);
        problem_free(p);
    }
}

/* seq_lens beyond max_seq_len or beyond the table are cut. */
static void test_lengths_are_cut(void **state)
{
    (void)state;
    gpu_need();
    static const int32_t lens[] = {1000, 300, 299, 301, 0, 64};
    for (int causal = 0; causal <= 1; causal++) {
        spec s = basic(7300, COUNT(lens), 2, 16, 0);
        s.lens = lens;
        s.max_seq_len = 300;
        s.causal = causal;
        CHECK_SPEC(&s, 1e9);

        /* a table of 4 pages holds 256 tokens */
        int32_t held[COUNT(lens)];
        for (int b = 0; b < COUNT(lens); b++) held[b] = lens[b] < 256 ? lens[b] : 256;
        s.lens = held;
        s.extra_width = 0;
        s.max_seq_len = 0;
        problem *p = problem_new(&s);
        view v = view_all(p);
        v.lens = lens;
        result r = run_view(p, &v);
        CHECK_REFERENCE(p, &r, 1e9);
        result_free(&r);
        problem_free(p);
    }
}

/* OK without a launch, and nothing is written. */
static void test_nothing_to_do(void **state)
{
    (void)state;
    gpu_need();
    spec s = basic(7400, 2, 2, 16, 100);
    problem *p = problem_new(&s);
    const view v = view_all(p);
    for (int what = 0; what < 3; what++) {
        stage st = stage_new(p, &v);
        if (what == 0) st.desc.step.batch = 0;
        if (what == 1) st.desc.step.s_q = 0;
        if (what == 2) st.desc.step.heads = 0;
        OK(snapmla_plan(&st.desc.step));
        OK(snapmla_decode(&st.desc));
        result r = stage_read(&st);
        TU_CHECK_FILLED(r.out, 0xff, (size_t)2 * 2 * 16 * kLatent * 2);
        TU_CHECK_FILLED(r.lse, 0xff, (size_t)2 * 2 * 16 * 4);
        result_free(&r);
        stage_free(&st);
    }
    problem_free(p);
}

/* An error writes and launches nothing, and leaves no CUDA error behind. */
static void test_errors_write_nothing(void **state)
{
    (void)state;
    gpu_need();
    spec s = basic(7450, 2, 2, 16, 300);
    problem *p = problem_new(&s);
    const view v = view_all(p);
    stage st = stage_new(p, &v);
    OK(snapmla_plan(&st.desc.step));
    snapmla_decode_desc bad[6];
    for (int i = 0; i < 6; i++) bad[i] = st.desc;
    bad[0].softmax_scale = -1;
    bad[1].workspace_bytes = 0;
    bad[2].q_scale = (const float *)bad[2].q;
    bad[3].step.plan_bytes = 8;
    bad[4].causal = 3;
    bad[5].cache.pages = -1;
    static const snapmla_result wanted[6] = {
        SNAPMLA_ERROR_SOFTMAX_SCALE, SNAPMLA_ERROR_WORKSPACE_BYTES, SNAPMLA_ERROR_Q_TWICE,
        SNAPMLA_ERROR_PLAN_BYTES,    SNAPMLA_ERROR_CAUSAL,          SNAPMLA_ERROR_PAGES};
    for (int i = 0; i < 6; i++) {
        EXPECT(snapmla_decode(&bad[i]), wanted[i]);
        TU_CHECK_INT(cudaPeekAtLastError(), cudaSuccess);
    }
    result r = stage_read(&st);
    TU_CHECK_FILLED(r.out, 0xff, (size_t)2 * 2 * 16 * kLatent * 2);
    result_free(&r);
    stage_free(&st);
    problem_free(p);
}

/* The caller's pending CUDA error is neither swallowed nor replaced, and no error is set. */
static void test_pending_cuda_error(void **state)
{
    (void)state;
    gpu_need();
    spec s = basic(7460, 3, 2, 16, 3000);
    problem *p = problem_new(&s);
    const view v = view_all(p);
    result clean = run(p);
    TU_CHECK_INT(cudaPeekAtLastError(), cudaSuccess);
    stage st = stage_new(p, &v);
    void *none = NULL;
    assert_int_equal(cudaMalloc(&none, (size_t)1 << 62), cudaErrorMemoryAllocation);
    const snapmla_result plan = snapmla_plan(&st.desc.step), decode = snapmla_decode(&st.desc);
    snapmla_path path;
    size_t bytes;
    snapmla_decode_desc resolved;
    const snapmla_result others[] = {
        snapmla_device_supported(0, &path), snapmla_plan_bytes(&st.desc.step, &bytes),
        snapmla_decode_workspace(&st.desc.step, &bytes), snapmla_resolve(&st.desc, &resolved)};
    const snapmla_result missing = snapmla_device_supported(1000, &path);
    const cudaError_t after = cudaGetLastError();
    TU_CHECK_INT(plan, SNAPMLA_OK);
    TU_CHECK_INT(decode, SNAPMLA_OK);
    for (int i = 0; i < COUNT(others); i++) TU_CHECK_INT(others[i], SNAPMLA_OK);
    TU_CHECK_INT(missing, SNAPMLA_ERROR_CUDA);
    TU_CHECK_INT(after, cudaErrorMemoryAllocation);
    result r = stage_read(&st);
    CHECK_SAME_BITS(&r, &clean);
    TU_CHECK_INT(snapmla_device_supported(1000, &path), SNAPMLA_ERROR_CUDA);
    TU_CHECK_INT(cudaPeekAtLastError(), cudaSuccess);
    result_free(&r);
    result_free(&clean);
    stage_free(&st);
    problem_free(p);
}

static void test_big_batches(void **state)
{
    (void)state;
    gpu_need();
    static const int batches[] = {4096, 20000, 70000};
    for (int i = 0; i < COUNT(batches); i++) {
        spec s = basic(7500 + (uint64_t)i, batches[i], 1, 1 + i % 2, 5);
        s.page_size = i == 1 ? 1 : 2;
        s.extra_width = 1;
        s.causal = 1;
        CHECK_SPEC(&s, 1e9);
    }
    spec s = basic(7510, 4096, 2, 3, 40);
    s.max_seq_len = 128;
    s.split_tokens = 128;
    CHECK_SPEC(&s, 3e8);
}

/* heads * s_q beyond 65535 */
static void test_many_rows(void **state)
{
    (void)state;
    gpu_need();
    static const int32_t few[] = {5, 2};
    spec s = basic(7600, 2, 600, 128, 0);
    s.lens = few;
    CHECK_SPEC(&s, 2e9);
    s = basic(7601, 1, 70000, 1, 0);
    s.lens = few;
    CHECK_SPEC(&s, 2e9);
    s = basic(7602, 1, 3, 30000, 0);
    s.lens = few;
    s.causal = 1;
    CHECK_SPEC(&s, 2e9);
}

/* One buffer beyond 100 GiB where the GPU has it, pages scattered over all of it, ids beyond 2^17.
   */
static void test_big_cache(void **state)
{
    (void)state;
    gpu_need();
    enum { kPages = 40, kPage = 64 };
    static const int32_t lens[] = {kPage * 20 - 3, kPage * 20};
    spec s = basic(7700, 2, 2, 16, 0);
    s.lens = lens;
    s.spare_pages = 0;
    s.extra_width = 0;
    s.layout = LAYOUT_RECORD;
    problem *p = problem_new(&s);
    const size_t record = p->cache_size / kPages;
    size_t bytes = (size_t)105 << 30;
    while (bytes > (size_t)3 << 30 && (gpu_quick() || bytes + ((size_t)1 << 30) > gpu_free_bytes()))
        bytes /= 2;
    const int64_t pages = (int64_t)(bytes / record);
    void *big = NULL;
    CUDA(cudaMalloc(&big, (size_t)pages * record));
    print_message("  %.1f GiB, %lld pages\n", (double)bytes / (1 << 30), (long long)pages);

    int64_t id[kPages];
    tu_rng rng = tu_seed(7701);
    for (int k = 0; k < kPages;
         k++) { /* distinct, spread over the whole, the last page among them */
        id[k] = (pages - 1) - k * ((pages - 1) / (kPages - 1)) - (k ? tu_below(&rng, 100) : 0);
        if (id[k] < 0) id[k] = 0;
        CUDA(cudaMemcpy((char *)big + (size_t)id[k] * record, p->cache_bytes + k * record, record,
                        cudaMemcpyHostToDevice));
    }
    const int32_t entries = 2 * p->width;
    int32_t *table = (int32_t *)tu_alloc((size_t)entries * 4, 0);
    for (int i = 0; i < entries; i++) table[i] = (int32_t)id[p->table[i]];
    gpu_mem d_table = gpu_new_from(table, (size_t)entries * 4, 4);

    const view v = view_all(p);
    stage st = stage_new(p, &v);
    st.desc.cache.content = (char *)big + p->content_at;
    st.desc.cache.scale = (float *)(void *)((char *)big + p->scale_at);
    st.desc.cache.rope = (char *)big + p->rope_at;
    st.desc.cache.pages = pages;
    st.desc.block_table = (const int32_t *)(const void *)d_table.at;
    st.desc.block_table_stride = 0;
    OK(snapmla_plan(&st.desc.step));
    OK(snapmla_decode(&st.desc));
    result r = stage_read(&st);
    CHECK_REFERENCE(p, &r, 1e9);

    /* append to and fetch from the same places: one token a page, the last page's last slot first
       */
    enum { kTokens = 20 };
    uint16_t keys[kTokens * kDims], back[kTokens * kDims], want[kTokens * kDims];
    int64_t slots[kTokens], ref_slots[kTokens];
    tu_fill_bf16(&rng, keys, kTokens * kDims, 0, 1);
    for (int t = 0; t < kTokens; t++) {
        slots[t] = id[2 * t] * kPage + kPage - 1 - t;
        ref_slots[t] = 2 * t * kPage + kPage - 1 - t;
    }
    gpu_mem d_keys = gpu_new_from(keys, sizeof keys, 16), d_back = gpu_new(sizeof back, 16, 0xff);
    gpu_mem d_slots = gpu_new_from(slots, sizeof slots, 8);
    snapmla_append_desc a;
    memset(&a, 0, sizeof a);
    a.cache = st.desc.cache;
    a.tokens = kTokens;
    a.latent = d_keys.at;
    a.slots = (const int64_t *)(const void *)d_slots.at;
    OK(snapmla_append(&a));
    snapmla_fetch_desc f;
    memset(&f, 0, sizeof f);
    f.cache = st.desc.cache;
    f.tokens = kTokens;
    f.latent = d_back.at;
    f.slots = a.slots;
    OK(snapmla_fetch(&f));
    CUDA(cudaDeviceSynchronize());
    gpu_get(&d_back, back);
    snapmla_ref_append_desc ra;
    memset(&ra, 0, sizeof ra);
    ra.cache = p->cache;
    ra.tokens = kTokens;
    ra.latent = keys;
    ra.slots = ref_slots;
    assert_int_equal(snapmla_ref_append(&ra), 0);
    snapmla_ref_fetch_desc rf;
    memset(&rf, 0, sizeof rf);
    rf.cache = p->cache;
    rf.tokens = kTokens;
    rf.latent = want;
    rf.slots = ref_slots;
    assert_int_equal(snapmla_ref_fetch(&rf), 0);
    TU_CHECK_BYTES(back, want, sizeof back);
    unsigned char *page = (unsigned char *)tu_alloc(record, 0);
    for (int k = 0; k < kPages; k++) {
        CUDA(
            cudaMemcpy(page, (char *)big + (size_t)id[k] * record, record, cudaMemcpyDeviceToHost));
        TU_CHECK_BYTES(page, p->cache_bytes + k * record, record);
    }
    free(page);
    free(table);
    result_free(&r);
    gpu_delete(&d_keys);
    gpu_delete(&d_back);
    gpu_delete(&d_slots);
    gpu_delete(&d_table);
    stage_free(&st);
    CUDA(cudaFree(big));
    problem_free(p);
}

/* ---- NaN and Inf in the inputs stay in the rows that see them ---- */

static void put_nan_token(const problem *p, int b, int32_t t)
{
    uint16_t row[kDims];
    memset(row, 0, sizeof row);
    row[t % kLatent] = t & 1 ? 0x7fc0 : 0x7f80;
    token_write(p, page_of(p, b, t), offset_of(p, t), row, row + kLatent);
}

static void test_nan_keys(void **state)
{
    (void)state;
    gpu_need();
    static const int32_t lens[] = {200, 200, 130, 64, 1, 3000};
    for (int form = 0; form < 8; form++) {
        spec s = basic(7800 + (uint64_t)form, COUNT(lens), 4, 16 + form, 0);
        s.lens = lens;
        s.causal = form & 1;
        if (form & 2) s.max_seq_len = 4096, s.split_tokens = 512;
        problem *p = problem_new(&s);
        /* request 0: its last token but one: with causal, only the last two query tokens see it.
           request 1: the first; request 3: all; request 5: one in the middle */
        put_nan_token(p, 0, 198);
        put_nan_token(p, 1, 0);
        for (int32_t t = 0; t < 64; t++) put_nan_token(p, 3, t);
        put_nan_token(p, 5, 1500);
        if (form & 4) { /* NaN in the rope alone, and a scale that no writer makes */
            token_rope(p, page_of(p, 2, 129), offset_of(p, 129))[5] = 0x7fc0;
            token_rope(p, page_of(p, 4, 0), 0)[63] = 0x7fc0;
            memset(token_content(p, page_of(p, 0, 198), offset_of(p, 198)), 0x38, kLatent);
            memset(token_rope(p, page_of(p, 0, 198), offset_of(p, 198)), 0, 2 * kRope);
            *token_scale(p, page_of(p, 0, 198), offset_of(p, 198)) = INFINITY;
        }
        problem_upload(p);
        result r = run(p);
        CHECK_REFERENCE(p, &r, 1e9);
        const int64_t rows = (int64_t)s.s_q * s.heads;
        TU_CHECK_INT(tu_count_nan_f32(r.lse, rows), s.causal ? 2 * s.heads : rows);
        TU_CHECK_INT(tu_count_nan_f32(r.lse + rows, rows), rows);
        TU_CHECK_INT(tu_count_nan_bf16(r.out + 3 * rows * kLatent, rows * kLatent), rows * kLatent);
        TU_CHECK_INT(tu_count_nan_f32(r.lse + 5 * rows, rows), rows);
        result_free(&r);
        problem_free(p);
    }
}

static void test_nan_queries(void **state)
{
    (void)state;
    gpu_need();
    static const int32_t lens[] = {200, 0, 1, 3000};
    for (int form = 0; form < 4; form++) {
        spec s = basic(7900 + (uint64_t)form, COUNT(lens), 2, 20, 0);
        s.lens = lens;
        s.causal = form & 1;
        problem *p = problem_new(&s);
        for (int b = 0; b < COUNT(lens); b++) {
            q_row(p, b, 0, 3)[7] = 0x7fc0;
            q_row(p, b, 1, 4)[511] = 0xff80;
            q_row(p, b, 1, 19)[512 + 63] = 0x7fc0;
            q_row(p, b, 0, 16)[512] = 0xffff;
        }
        for (int64_t r = 0; r < (int64_t)COUNT(lens) * 40; r++) {
            const uint16_t *q = q_row(p, (int)(r / 40), (int)(r / 20 % 2), (int)(r % 20));
            snapmla_ref_quantize(q, kLatent, q + kLatent, kRope, p->q_content + r * kLatent,
                                 p->q_scale + r, p->q_rope + r * kRope);
        }
        p->s.q_planes = form >> 1;
        problem_upload(p);
        result r = run(p);
        CHECK_REFERENCE(p, &r, 1e9);
        TU_CHECK_INT(tu_count_nan_f32(r.lse, 40), 4);
        TU_CHECK_INT(tu_count_nan_f32(r.lse + 40, 40), 0); /* no key: 0 and -inf all the same */
        TU_CHECK_INT(tu_count_nan_f32(r.lse + 120, 40), 4);
        result_free(&r);
        problem_free(p);
    }
}

/* ---- the same call gives the same bits ---- */

static void test_deterministic(void **state)
{
    (void)state;
    gpu_need();
    static const int32_t lens[] = {5000, 1, 0, 640, 20000, 333};
    static const int fills[] = {0xff, 0x00, 0x7f, 0x3c};
    for (int form = 0; form < 4; form++) {
        spec s = basic(8000 + (uint64_t)form, COUNT(lens), 1 + form, form == 3 ? 128 : 16, 0);
        s.lens = lens;
        s.causal = 1;
        if (form == 2) s.max_seq_len = 20000, s.split_tokens = 1024;
        problem *p = problem_new(&s);
        const view v = view_all(p);
        result first = run(p);
        stage st = stage_new(p, &v);
        for (int i = 0; i < (gpu_quick() ? 4 : 50); i++) {
            stage_poison(&st, fills[i % COUNT(fills)]);
            OK(snapmla_plan(&st.desc.step));
            OK(snapmla_decode(&st.desc));
            if (i % 7 == 3) OK(snapmla_decode(&st.desc)); /* a plan serves many layers */
            result r = stage_read(&st);
            CHECK_SAME_BITS(&r, &first);
            result_free(&r);
        }
        stage_free(&st);
        result_free(&first);
        problem_free(p);
    }
}

/* Rows of the view's result against the same rows of the whole's. */
static void check_rows(const problem *p, const result *whole, const view *v, const result *part)
{
    for (int b = 0; b < v->nb; b++) {
        for (int i = 0; i < v->ni; i++) {
            for (int h = 0; h < v->nh; h++) {
                const int64_t a =
                    ((int64_t)(v->b0 + b) * p->s.s_q + v->i0 + i) * p->s.heads + v->h0 + h;
                const int64_t c = ((int64_t)b * v->ni + i) * v->nh + h;
                TU_CHECK(memcmp(whole->out + a * kLatent, part->out + c * kLatent, 2 * kLatent) ==
                                 0 &&
                             memcmp(whole->lse + a, part->lse + c, 4) == 0,
                         "request %d of length %d, token %d of %d, head %d: lse %.9g and %.9g",
                         v->b0 + b, p->lens[v->b0 + b], v->i0 + i, p->s.s_q, v->h0 + h,
                         (double)whole->lse[a], (double)part->lse[c]);
            }
        }
    }
}

static void test_fixed_splits_make_rows_independent(void **state)
{
    (void)state;
    gpu_need();
    static const int32_t lens[] = {1000, 129, 4096, 0, 128, 2500, 2};
    static const int32_t splits[] = {128, 256, 1024, 4096};
    enum { kTokens = 4, kHeads = 24 };
    for (int form = 0; form < 2 * COUNT(splits); form++) {
        spec s = basic(8100 + (uint64_t)form, COUNT(lens), kTokens, kHeads, 0);
        s.lens = lens;
        s.causal = form & 1;
        s.max_seq_len = 4096;
        s.split_tokens = splits[form / 2];
        problem *p = problem_new(&s);
        result whole = run(p);
        CHECK_REFERENCE(p, &whole, 1e8);
        for (int b = 0; b < COUNT(lens); b++) { /* each request alone */
            view v = view_all(p);
            v.b0 = b;
            v.nb = 1;
            result r = run_view(p, &v);
            check_rows(p, &whole, &v, &r);
            result_free(&r);
        }
        static const int heads[][2] = {{0, 1}, {5, 1}, {0, 16}, {7, 17}, {23, 1}};
        for (int k = 0; k < COUNT(heads); k++) { /* some heads alone */
            view v = view_all(p);
            v.h0 = heads[k][0];
            v.nh = heads[k][1];
            result r = run_view(p, &v);
            check_rows(p, &whole, &v, &r);
            result_free(&r);
        }
        for (int i = 0; i < kTokens; i++) { /* each query token alone, on the keys it sees */
            int32_t seen[COUNT(lens)];
            for (int b = 0; b < COUNT(lens); b++)
                seen[b] = s.causal ? lens[b] - kTokens + 1 + i : lens[b];
            view v = view_all(p);
            v.i0 = i;
            v.ni = 1;
            v.lens = seen;
            result r = run_view(p, &v);
            check_rows(p, &whole, &v, &r);
            result_free(&r);
        }
        /* another limit, another number of SMs */
        p->s.max_seq_len = 100000;
        result r = run(p);
        CHECK_SAME_BITS(&r, &whole);
        result_free(&r);
        const view v = view_all(p);
        stage st = stage_new(p, &v);
        st.desc.step.sm_count = 3;
        OK(snapmla_plan(&st.desc.step));
        OK(snapmla_decode(&st.desc));
        r = stage_read(&st);
        CHECK_SAME_BITS(&r, &whole);
        result_free(&r);
        stage_free(&st);
        result_free(&whole);
        problem_free(p);
    }
}

/* Query tokens of one causal call whose own calls have different numbers of splits: each must give the
   bits of its own call.  The lengths stand around the borders of what combine does otherwise: one split,
   one run, other numbers of half warps, one round.  In the last form a request's last key is NaN, which
   only the last query token sees. */
static void test_tokens_straddle_splits(void **state)
{
    (void)state;
    gpu_need();
    static const int borders[] = {1, 2, 8, 16, 24, 32, 64, 96, 128, 256}; /* splits */
    static const struct {
        int s_q, heads, split_tokens;
    } forms[] = {{4, 16, 128}, {8, 16, 128}, {5, 40, 128}, {6, 3, 256}, {8, 16, 128}};
    for (int form = 0; form < COUNT(forms); form++) {
        const int s_q = forms[form].s_q, nan = form == COUNT(forms) - 1;
        const int count = COUNT(borders) - (forms[form].split_tokens > 128);
        int32_t lens[COUNT(borders)], seen[COUNT(borders)];
        for (int b = 0; b < count; b++) /* 1 to s_q - 1 tokens see the split behind the border */
            lens[b] = borders[b] * forms[form].split_tokens + 1 + b % (s_q - 1);
        spec s = basic(8150 + (uint64_t)form, count, s_q, forms[form].heads, 0);
        s.lens = lens;
        s.causal = 1;
        s.max_seq_len = lens[count - 1];
        s.split_tokens = forms[form].split_tokens;
        problem *p = problem_new(&s);
        for (int b = 0; nan && b < count; b++)
            put_nan_token(p, b, lens[b] - 1);
        if (nan) problem_upload(p);
        result whole = run(p);
        if (!nan) CHECK_REFERENCE(p, &whole, 1e8);
        for (int i = 0; i < s_q; i++) {
            for (int b = 0; b < count; b++) seen[b] = lens[b] - s_q + 1 + i;
            view v = view_all(p);
            v.i0 = i;
            v.ni = 1;
            v.lens = seen;
            result r = run_view(p, &v);
            if (nan && i == s_q - 1) {
                const int64_t rows = (int64_t)count * s.heads;
                TU_CHECK_INT(tu_count_nan_f32(r.lse, rows), rows);
            } else {
                check_rows(p, &whole, &v, &r);
                TU_CHECK_INT(tu_count_nan_f32(r.lse, (int64_t)count * s.heads), 0);
            }
            result_free(&r);
        }
        result_free(&whole);
        problem_free(p);
    }
}

/* However the work is cut, the values are the same but for rounding. */
static void test_policies_agree(void **state)
{
    (void)state;
    gpu_need();
    static const int32_t lens[] = {12000, 1, 700, 0, 64, 3000};
    static const int32_t splits[] = {128, 512, 4096, 16384};
    static const int sms[] = {1, 2, 7, 60, 132, 500};
    spec s = basic(8200, COUNT(lens), 2, 40, 0);
    s.lens = lens;
    s.causal = 1;
    problem *p = problem_new(&s);
    result base = run(p);
    CHECK_REFERENCE(p, &base, 1e9);
    for (int k = 0; k < COUNT(splits) + COUNT(sms); k++) {
        const view v = view_all(p);
        const int fixed = k < COUNT(splits);
        p->s.max_seq_len = fixed ? 12000 : 0;
        p->s.split_tokens = fixed ? splits[k] : 0;
        result r;
        if (fixed) {
            r = run(p);
        } else {
            size_t plan = 0, workspace = 0;
            stage st = stage_new(p, &v);
            snapmla_decode_desc d = st.desc;
            d.step.sm_count = sms[k - COUNT(splits)];
            OK(snapmla_plan_bytes(&d.step, &plan));
            OK(snapmla_decode_workspace(&d.step, &workspace));
            gpu_delete(&st.plan);
            gpu_delete(&st.workspace);
            st.plan = gpu_new(plan, 16, 0xff);
            st.workspace = gpu_new(workspace, 16, 0xff);
            d.step.plan = st.plan.at;
            d.step.plan_bytes = plan;
            d.workspace = st.workspace.at;
            d.workspace_bytes = workspace;
            st.desc = d;
            OK(snapmla_plan(&st.desc.step));
            OK(snapmla_decode(&st.desc));
            r = stage_read(&st);
            stage_free(&st);
        }
        CHECK_REFERENCE(p, &r, 3e7);
        const int64_t rows = (int64_t)s.batch * s.s_q * s.heads;
        for (int64_t i = 0; i < rows; i++) TU_CHECK_NEAR(r.lse[i], base.lse[i], 1e-4);
        tu_error err;
        memset(&err, 0, sizeof err);
        for (int64_t i = 0; i < rows * kLatent; i++) {
            tu_error_add(&err, tu_from_bf16(r.out[i]), tu_from_bf16(base.out[i]), i / kLatent,
                         i % kLatent);
        }
        tu_error_finish(&err);
        TU_CHECK_LE(err.rms, gpu_path == SNAPMLA_PATH_GENERAL ? 3e-3 : 4e-2);
        result_free(&r);
    }
    result_free(&base);
    problem_free(p);
}

/* ---- plans ---- */

/* A graph of plan + decode captured at one set of lengths serves all others that the table holds.
   */
static void test_graph_replay(void **state)
{
    (void)state;
    gpu_need();
    enum { kBatch = 4 };
    static const int32_t most[kBatch] = {200000, 70000, 3000, 1000};
    static const int32_t replays[][kBatch] = {
        {1000, 1000, 1000, 0}, {200000, 70000, 3000, 1000}, {0, 0, 0, 0},    {1, 64, 65, 128},
        {-1, 200, 0, 999},     {900, 900, 900, 0},          {0, 0, 0, 1000}, {150000, 1, 2999, 64}};
    for (int form = 0; form < 3; form++) {
        spec s = basic(8300 + (uint64_t)form, kBatch, 1 + form % 2, form == 2 ? 128 : 16, 0);
        s.lens = most;
        s.share = 1;
        s.causal = 1;
        if (form == 1) s.max_seq_len = 200000, s.split_tokens = 2048;
        problem *p = problem_new(&s);
        view v = view_all(p);
        v.lens = replays[0];
        stage st = stage_new(p, &v);
        cudaStream_t stream;
        cudaGraph_t graph;
        cudaGraphExec_t exec;
        CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
        st.desc.step.stream = stream;
        CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
        OK(snapmla_plan(&st.desc.step));
        OK(snapmla_decode(&st.desc));
        OK(snapmla_decode(&st.desc));
        CUDA(cudaStreamEndCapture(stream, &graph));
        CUDA(cudaGraphInstantiateWithFlags(&exec, graph, 0));
        for (int i = 0; i < COUNT(replays) * (gpu_quick() ? 1 : 2); i++) {
            const int32_t *lens = replays[i % COUNT(replays)];
            gpu_put(&st.lens, lens);
            stage_poison(&st, 0xff);
            CUDA(cudaDeviceSynchronize());
            CUDA(cudaGraphLaunch(exec, stream));
            result r = stage_read(&st);
            v.lens = lens;
            result direct = run_view(p, &v);
            CHECK_SAME_BITS(&r, &direct);
            if (lens[0] == most[0]) CHECK_REFERENCE(p, &r, 6e8);
            result_free(&r);
            result_free(&direct);
        }
        CUDA(cudaGraphExecDestroy(exec));
        CUDA(cudaGraphDestroy(graph));
        CUDA(cudaStreamDestroy(stream));
        stage_free(&st);
        problem_free(p);
    }
}

/* A plan of other lengths: ends, and touches only what the lengths and the table allow (every other
   table entry would fault).  The values may be wrong; with a new plan they are right again. */
static void test_stale_plan(void **state)
{
    (void)state;
    gpu_need();
    enum { kBatch = 5 };
    static const int32_t lens[][kBatch] = {{3000, 10, 0, 500, 64},  {0, 0, 0, 0, 0},
                                           {1, 1, 1, 1, 1},         {3000, 3000, 3000, 3000, 3000},
                                           {0, 3000, 0, 0, 1},      {-1, INT32_MIN, -64, 5, -1},
                                           {64, 128, 192, 256, 320}};
    for (int form = 0; form < 4; form++) {
        spec s = basic(8400 + (uint64_t)form, kBatch, 2, form & 1 ? 70 : 16, 0);
        s.lens = lens[3];
        s.causal = 1;
        if (form & 2) s.max_seq_len = 3000, s.split_tokens = 256;
        problem *p = problem_new(&s);
        for (int a = 0; a < COUNT(lens); a++) {
            for (int b = 0; b < COUNT(lens); b++) {
                view v = view_all(p);
                v.lens = lens[a];
                stage st = stage_new(p, &v);
                OK(snapmla_plan(&st.desc.step));
                /* entries that lengths b do not need become absurd */
                int32_t *table = (int32_t *)tu_alloc((size_t)(kBatch * p->table_stride) * 4, 0);
                memcpy(table, p->table, (size_t)(kBatch * p->table_stride) * 4);
                for (int r = 0; r < kBatch; r++) {
                    const int32_t n = lens[b][r] <= 0 ? 0 : (lens[b][r] + 63) / 64;
                    for (int64_t k = n; k < p->width; k++)
                        table[r * p->table_stride + k] = 2147480000;
                }
                gpu_put(&p->d_table, table);
                gpu_put(&st.lens, lens[b]);
                OK(snapmla_decode(&st.desc));
                result r = stage_read(&st);
                result_free(&r);

                stage_poison(&st, 0xff);
                OK(snapmla_plan(&st.desc.step));
                OK(snapmla_decode(&st.desc));
                r = stage_read(&st);
                gpu_put(&p->d_table, p->table);
                v.lens = lens[b];
                result direct = run_view(p, &v);
                CHECK_SAME_BITS(&r, &direct);
                result_free(&r);
                result_free(&direct);
                stage_free(&st);
                free(table);
            }
        }
        problem_free(p);
    }
}

/* Two steps in flight on two streams share nothing. */
static void test_two_streams(void **state)
{
    (void)state;
    gpu_need();
    problem *p[2];
    result want[2];
    stage st[2];
    cudaStream_t stream[2];
    for (int i = 0; i < 2; i++) {
        spec s = basic(8500 + (uint64_t)i, 6, 1 + i, 32, 6000);
        p[i] = problem_new(&s);
        want[i] = run(p[i]);
        const view v = view_all(p[i]);
        st[i] = stage_new(p[i], &v);
        CUDA(cudaStreamCreateWithFlags(&stream[i], cudaStreamNonBlocking));
        st[i].desc.step.stream = stream[i];
    }
    CUDA(cudaDeviceSynchronize());
    for (int k = 0; k < 40; k++) {
        for (int i = 0; i < 2; i++) {
            OK(snapmla_plan(&st[i].desc.step));
            OK(snapmla_decode(&st[i].desc));
        }
    }
    for (int i = 0; i < 2; i++) {
        result r = stage_read(&st[i]);
        CHECK_SAME_BITS(&r, &want[i]);
        result_free(&r);
        result_free(&want[i]);
        stage_free(&st[i]);
        CUDA(cudaStreamDestroy(stream[i]));
        problem_free(p[i]);
    }
}

/* sm_count 0 is the device's; path 0 is what the device supports. */
static void test_defaults_of_the_device(void **state)
{
    (void)state;
    gpu_need();
    spec s = basic(8600, 2, 1, 16, 500);
    problem *p = problem_new(&s);
    const view v = view_all(p);
    stage st = stage_new(p, &v);
    snapmla_decode_desc r;
    snapmla_path best = SNAPMLA_PATH_AUTO;
    OK(snapmla_device_supported(0, &best));
    assert_int_not_equal(best, SNAPMLA_PATH_AUTO);
    st.desc.step.path = SNAPMLA_PATH_AUTO;
    size_t bytes = 0;
    OK(snapmla_plan_bytes(&st.desc.step, &bytes));
    TU_CHECK(bytes > 0, "plan of no bytes");
    st.desc.step.path = gpu_path;
    OK(snapmla_resolve(&st.desc, &r));
    TU_CHECK_INT(r.step.sm_count, gpu_sm_count());
    TU_CHECK_INT(r.step.path, gpu_path);
    stage_free(&st);
    problem_free(p);
}

/* ================================================================================================
   The precise mode: what is its own, and the tests above whose outcome it could change
   ============================================================================================== */

/* It is finer than the default mode by far, and of the default mode's planes it sees the rounding. */
static void test_precise_beside_default(void **state)
{
    (void)state;
    gpu_need();
    static const int heads[] = {16, 24, 40, 100}; /* one tile of 16 rows, and several */
    for (int i = 0; i < COUNT(heads); i++) {
        spec s = basic(8700, 3, 1, heads[i], 3000); /* the same lengths */
        problem *p = problem_new(&s);
        const bounds fine = {2.5e-3, 4e-3, 1, gpu_path == SNAPMLA_PATH_GENERAL ? 1e-4 : 1e-3, 0};
        result precise = run(p);
        verdict v = compare(p, &precise, SNAPMLA_REF_EXACT, 2e8);
        CHECK_VERDICT(p, &v, &fine);
        p->s.q_planes = 1;
        problem_upload(p);
        result planes = run(p);
        v = compare(p, &planes, SNAPMLA_REF_EXACT, 2e8); /* against the planes */
        CHECK_VERDICT(p, &v, &fine);
        p->s.q_planes = 0;
        v = compare(p, &planes, SNAPMLA_REF_EXACT, 2e8); /* against the BF16 queries */
        TU_CHECK_LE(5e-3, v.rms);
        problem_upload(p);
        gpu_mode = SNAPMLA_MODE_DEFAULT;
        result rounded = run(p);
        gpu_mode = SNAPMLA_MODE_PRECISE;
        v = compare(p, &rounded, SNAPMLA_REF_EXACT, 2e8);
        TU_CHECK_LE(5e-3, v.rms);
        result_free(&precise);
        result_free(&planes);
        result_free(&rounded);
        problem_free(p);
    }
}

/* Queries that e4m3 holds: a scale of the row and content of up to 240, 128 or more in one dim, as BF16
   and as planes.  Their scale is the one that the precise mode takes for the BF16 ones, whose content it
   holds in one e4m3: nothing is left for a second. */
static void put_exact_queries(problem *p)
{
    tu_rng rng = tu_seed(p->s.seed + 7);
    const int64_t rows = (int64_t)p->s.batch * p->s.heads;
    for (int64_t k = 0; k < rows; k++) {
        const int power = -8 + (int)(k % 3), most = (int)tu_below(&rng, kLatent);
        uint16_t *q = q_row(p, (int)(k / p->s.heads), 0, (int)(k % p->s.heads));
        p->q_scale[k] = (float)ldexp(1, power);
        for (int d = 0; d < kLatent; d++) {
            const uint32_t magnitude = d == most ? 0x70 + tu_below(&rng, 8) : tu_below(&rng, 0x78);
            const uint8_t code = (uint8_t)(magnitude | tu_below(&rng, 2) << 7);
            p->q_content[k * kLatent + d] = code;
            q[d] = tu_bf16(ldexp(snapmla_ref_e4m3_to_float(code), power));
        }
        for (int d = 0; d < kRope; d++)
            p->q_rope[k * kRope + d] = tu_bf16(ldexp(tu_from_bf16(q[kLatent + d]), -power));
    }
}

static result run_on_two_sms(problem *p)
{
    const view v = view_all(p);
    stage st = stage_new(p, &v);
    st.desc.step.sm_count = 2;
    OK(snapmla_plan(&st.desc.step));
    OK(snapmla_decode(&st.desc));
    result r = stage_read(&st);
    stage_free(&st);
    return r;
}

/* Planes whose values BF16 queries have, too, in several splits of a CTA: the same bits.  Before them, any
   queries on every SM leave in shared memory what e4m3 cannot hold of them. */
static void test_precise_planes_of_exact_queries(void **state)
{
    (void)state;
    gpu_need();
    static const int heads[] = {16, 20, 40, 128};
    static const int32_t lens[] = {700, 64, 1, 1300, 0, 129, 500, 65, 1000};
    for (int i = 0; i < COUNT(heads); i++) {
        spec s = basic(8750 + (uint64_t)i, COUNT(lens), 1, heads[i], 0);
        s.lens = lens;
        problem *p = problem_new(&s);
        result other = run(p);
        put_exact_queries(p);
        p->s.q_planes = 1;
        problem_upload(p);
        result planes = run_on_two_sms(p);
        CHECK_REFERENCE(p, &planes, 5e7);
        p->s.q_planes = 0;
        problem_upload(p);
        result r = run_on_two_sms(p);
        CHECK_SAME_BITS(&r, &planes);
        result_free(&other);
        result_free(&planes);
        result_free(&r);
        problem_free(p);
    }
}

/* Queries from the smallest to the largest BF16 numbers, some dims 2^-30 of the others. */
static void test_queries_of_any_size(void **state)
{
    (void)state;
    gpu_need();
    static const int powers[] = {-126, -100, -60, -20, 0, 20, 60, 110};
    for (int i = 0; i < COUNT(powers); i++) {
        spec s = basic(8720 + (uint64_t)i, 2, 2, 9, 700);
        s.softmax_scale = (float)ldexp(1.0 / 24, powers[i] > 0 ? -powers[i] : 0);
        problem *p = problem_new(&s);
        for (int b = 0; b < s.batch; b++) {
            for (int h = 0; h < s.s_q * s.heads; h++) {
                uint16_t *q = q_row(p, b, h / s.heads, h % s.heads);
                for (int d = 0; d < kDims; d++)
                    q[d] = tu_bf16(ldexp(tu_from_bf16(q[d]), powers[i] - (d % 7 ? 0 : 30)));
            }
        }
        problem_upload(p);
        result r = run(p);
        CHECK_REFERENCE(p, &r, 1e8);
        result_free(&r);
        problem_free(p);
    }
}

/* Logits so large that adding log2 k_s to them is off by binades, and with it the block scale: at 1e8
   weights pass the end of f16, where they saturate, with all of lq alike. */
static void test_absurd_logits(void **state)
{
    (void)state;
    gpu_need();
    for (int power = 7; power <= (gpu_path == SNAPMLA_PATH_GENERAL ? 12 : 8); power++) {
        spec s = basic(8730 + (uint64_t)power, 3, 1, 17, 2000);
        s.q_std = pow(10.0, power);
        s.key_std = 0.37; /* k_s near 2^-8.5, which becomes 2^-16 beside 2^27 */
        problem *p = problem_new(&s);
        result r = run(p);
        const verdict v = compare(p, &r, SNAPMLA_REF_EXACT, 1e8);
        const double lse = gpu_path == SNAPMLA_PATH_GENERAL ? 1e-5 : 1e-3;
        const bounds loose = {2, 2, 2, 0, lse}; /* close maxima may swap */
        CHECK_VERDICT(p, &v, &loose);
        const int64_t rows = (int64_t)s.batch * s.heads;
        TU_CHECK_INT(tu_count_nan_bf16(r.out, rows * kLatent), 0);
        TU_CHECK_INT(tu_count_nan_f32(r.lse, rows), 0);
        result_free(&r);
        problem_free(p);
    }
}

int run_precise_tests(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_precise_beside_default),
        cmocka_unit_test(test_precise_planes_of_exact_queries),
        PRECISE_TEST(test_queries_of_any_size),
        PRECISE_TEST(test_absurd_logits),
        PRECISE_TEST(test_hand_computed),
        PRECISE_TEST(test_every_length),
        PRECISE_TEST(test_query_tokens),
        PRECISE_TEST(test_page_sizes),
        PRECISE_TEST(test_forms),
        PRECISE_TEST(test_mixed_lengths),
        PRECISE_TEST(test_logits_of_any_size),
        PRECISE_TEST(test_zero_latent_far_above),
        PRECISE_TEST(test_no_keys),
        PRECISE_TEST(test_rows_without_keys_among_others),
        PRECISE_TEST(test_causal_at_split_ends),
        PRECISE_TEST(test_negative_entries_are_skipped),
        PRECISE_TEST(test_nan_keys),
        PRECISE_TEST(test_nan_queries),
        PRECISE_TEST(test_deterministic),
        PRECISE_TEST(test_fixed_splits_make_rows_independent),
        PRECISE_TEST(test_tokens_straddle_splits),
        PRECISE_TEST(test_policies_agree),
        PRECISE_TEST(test_graph_replay),
    };
    return cmocka_run_group_tests_name("precise mode", tests, NULL, NULL);
}

int run_edge_tests(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_no_keys),
        cmocka_unit_test(test_rows_without_keys_among_others),
        cmocka_unit_test(test_causal_at_split_ends),
        cmocka_unit_test(test_negative_entries_are_skipped),
        cmocka_unit_test(test_lengths_are_cut),
        cmocka_unit_test(test_nothing_to_do),
        cmocka_unit_test(test_errors_write_nothing),
        cmocka_unit_test(test_pending_cuda_error),
        cmocka_unit_test(test_big_batches),
        cmocka_unit_test(test_many_rows),
        cmocka_unit_test(test_big_cache),
        cmocka_unit_test(test_nan_keys),
        cmocka_unit_test(test_nan_queries),
        cmocka_unit_test(test_deterministic),
        cmocka_unit_test(test_fixed_splits_make_rows_independent),
        cmocka_unit_test(test_tokens_straddle_splits),
        cmocka_unit_test(test_policies_agree),
        cmocka_unit_test(test_graph_replay),
        cmocka_unit_test(test_stale_plan),
        cmocka_unit_test(test_two_streams),
        cmocka_unit_test(test_defaults_of_the_device),
    };
    return cmocka_run_group_tests_name("edges", tests, NULL, NULL);
}
