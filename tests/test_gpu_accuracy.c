/* test_gpu_accuracy.c - the error bounds of the manual against fp64 attention over the same
   quantised tensors (in the precise mode: with q unquantised), from 1 token to 1,048,576, in one split
   and in the default policy. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <cmocka.h>

#include "test_util.h"
#include "gpu_util.h"

int run_accuracy_tests(void);
int run_precise_accuracy_tests(void);

#define COUNT(array) ((int)(sizeof(array) / sizeof(array)[0]))

enum { kRows = 4 }; /* heads of each kind */
enum kind { FLAT, ROPE_ONLY, PEAKED, ONE_HOT, kKinds };
static const char *const kind_name[kKinds] = {"q std 1", "rope only", "q std 4", "one-hot"};

/* Kind 0 is as made.  Kind 1 has nearly all of its logits (deviation 1) from the rope, which V
   knows nothing of: with V of mean 0 the output averages out.  Kind 2 is four times as large as
   kind 0, kind 3 points at one key, which gets nearly all the weight. */
static void make_kinds(problem *p)
{
    tu_rng rng = tu_seed(p->s.seed + 17);
    for (int b = 0; b < p->s.batch; b++) {
        for (int h = kRows; h < kKinds * kRows; h++) {
            uint16_t *q = q_row(p, b, 0, h);
            const int32_t t = (int32_t)tu_below(&rng, (uint32_t)p->lens[b]);
            const uint8_t *content = token_content(p, page_of(p, b, t), offset_of(p, t));
            const uint16_t *rope = token_rope(p, page_of(p, b, t), offset_of(p, t));
            const double scale = *token_scale(p, page_of(p, b, t), offset_of(p, t));
            for (int d = 0; d < kDims; d++) {
                const double was = tu_from_bf16(q[d]);
                const double key = d < kLatent ? (double)snapmla_ref_e4m3_to_float(content[d])
                                               : tu_from_bf16(rope[d - kLatent]);
                const double rope_only = (d < kLatent ? 0.001 : 3) * was;
                q[d] = tu_bf16(h / kRows == ROPE_ONLY ? rope_only
                               : h / kRows == PEAKED  ? 4 * was
                                                      : 2 * scale * key);
            }
        }
    }
    problem_upload(p);
}

/* What is asked of `kind` at this length; 0 = nothing. */
static bounds limit_of(enum kind kind, double v_mean, int32_t len)
{
    const int std_1 = kind == FLAT || kind == ROPE_ONLY;
    bounds limit = {3.2e-2, 7e-2, 1, std_1 ? 2e-3 : 2e-2, 1e-4};
    if (gpu_mode == SNAPMLA_MODE_PRECISE) {
        /* logits of FP8 tensor cores are off by what those truncate, on both sides of 1e-4 */
        const int fp8 = gpu_path == SNAPMLA_PATH_SM90;
        const double lse = std_1 ? (fp8 ? 1e-3 : 1e-4) : fp8 ? 1e-2 : 1e-3;
        const bounds precise = {3e-3, 6e-3, len < 1024 ? 1 : 5e-4, lse, fp8 ? 1e-3 : 1e-5};
        limit = precise;
        if (kind == ONE_HOT) limit.rms = 2.5e-3;
        if (std_1 && len >= 1024) limit.bias = 3e-4;
        return limit;
    }
    if (std_1 && v_mean != 0 && len >= 1024) limit.rms = 4.5e-3, limit.bias = 5e-4;
    if (std_1 && v_mean != 0 && len >= 16384) limit.rms = 2.5e-3;
    if (kind == PEAKED) limit.rms = v_mean != 0 ? 1e-2 : 1.8e-2;
    if (kind == PEAKED && v_mean != 0 && len >= 1024) limit.bias = 1e-3;
    if (kind == ONE_HOT) limit.rms = 2.5e-3, limit.row_rms = 5e-3;
    /* logits of 50 to 60 whose products have one sign: relative, as for all large logits */
    if (kind == ONE_HOT && gpu_path != SNAPMLA_PATH_GENERAL) limit.lse_rel = 2e-3;
    return limit;
}

/* The reference's work on all lengths and kinds, in parallel, the longest first. */
typedef struct length_job {
    const problem *p;
    const result *r;
    int n;               /* lengths */
    verdict *exact;      /* [n * kKinds] */
    verdict *cost_of_p;  /* the same for the kinds up to ROPE_ONLY, or NULL */
} length_job;

/* What rounding P to e4m3 alone costs: the emulation, whose sums are f32, has that rounding and no
   other.  The general path rounds in the same places and is held to the emulation itself. */
static verdict judge_cost_of_p(const problem *p, const result *r, int b, int h0)
{
    if (gpu_path == SNAPMLA_PATH_GENERAL)
        return compare_part(p, r, SNAPMLA_REF_EMULATED, b, h0, kRows);
    const size_t rows = (size_t)r->batch * r->s_q * r->heads;
    result emulated = *r;
    emulated.out = (uint16_t *)tu_alloc(rows * kLatent * 2, 0);
    emulated.lse = (float *)tu_alloc(rows * 4, 0);
    reference_part(p, &emulated, SNAPMLA_REF_EMULATED, b, h0, kRows);
    const verdict v = compare_part(p, &emulated, SNAPMLA_REF_EXACT, b, h0, kRows);
    result_free(&emulated);
    return v;
}

static void judge_length(void *context, int64_t i)
{
    const length_job *job = (const length_job *)context;
    const int b = job->n - 1 - (int)(i / kKinds), kind = (int)(i % kKinds);
    job->exact[b * kKinds + kind] =
        compare_part(job->p, job->r, SNAPMLA_REF_EXACT, b, kind * kRows, kRows);
    if (job->cost_of_p && kind <= ROPE_ONLY)
        job->cost_of_p[b * kKinds + kind] = judge_cost_of_p(job->p, job->r, b, kind * kRows);
}

/* V of mean 0: no more than 2e-3 above what rounding P alone costs. */
static void check_cost_of_p(const problem *p, const verdict *cost, double rms)
{
    const bounds near_emulated = {2.6e-3, 5e-3, 1e-3, 1e-4, 1e-5};
    if (gpu_path == SNAPMLA_PATH_GENERAL) CHECK_VERDICT(p, cost, &near_emulated);
    else TU_CHECK_LE(rms, cost->rms + 2e-3);
}

static void check_lengths(double v_mean, int one_split)
{
    static const int32_t all[] = {1, 17, 64, 1024, 16384, 131072, 1048576};
    const int n = COUNT(all) - (gpu_quick() ? 2 : 0);
    spec s;
    memset(&s, 0, sizeof s);
    s.seed = v_mean != 0 ? 9000 : 9100;
    s.batch = n;
    s.s_q = 1;
    s.heads = kKinds * kRows;
    s.lens = all;
    s.share = 1;
    s.key_mean = v_mean;
    if (one_split) s.max_seq_len = s.split_tokens = 1048576;
    problem *p = problem_new(&s);
    make_kinds(p);
    result r = run(p);
    length_job job = {p, &r, n, NULL, NULL};
    job.exact = (verdict *)tu_alloc((size_t)(n * kKinds) * sizeof *job.exact, 0);
    if (v_mean == 0)
        job.cost_of_p = (verdict *)tu_alloc((size_t)(n * kKinds) * sizeof *job.cost_of_p, 0);
    parallel_for((int64_t)n * kKinds, judge_length, &job);
    for (int b = 0; b < n; b++) {
        for (int kind = 0; kind < kKinds; kind++) {
            const bounds limit = limit_of((enum kind)kind, v_mean, all[b]);
            const verdict v = job.exact[b * kKinds + kind];
            print_message("  len %7d, V mean %.1f, %s: rms %.2e (<= %.1e), bias %+.1e, lse %.1e\n",
                          (int)all[b], v_mean, kind_name[kind], v.rms, limit.rms, v.bias,
                          v.lse_abs);
            CHECK_VERDICT(p, &v, &limit);
            if (kind <= ROPE_ONLY && v_mean == 0)
                check_cost_of_p(p, &job.cost_of_p[b * kKinds + kind], v.rms);
        }
    }
    free(job.exact);
    free(job.cost_of_p);
    result_free(&r);
    problem_free(p);
}

static void test_v_mean_0_one_split(void **state)
{
    (void)state;
    gpu_need();
    check_lengths(0, 1);
}

static void test_v_mean_0_default_policy(void **state)
{
    (void)state;
    gpu_need();
    check_lengths(0, 0);
}

static void test_v_mean_half_one_split(void **state)
{
    (void)state;
    gpu_need();
    check_lengths(0.5, 1);
}

static void test_v_mean_half_default_policy(void **state)
{
    (void)state;
    gpu_need();
    check_lengths(0.5, 0);
}

/* ---- attention sink: one key of the first block far above a long tail ---- */

enum { kSinkLen = 131072, kSinkAt = 5 };

typedef struct sink_job {
    const problem *p;
} sink_job;

static void sink_page(void *context, int64_t k)
{
    const problem *p = ((const sink_job *)context)->p;
    tu_rng rng = tu_seed(9200u + (uint64_t)k);
    uint16_t row[kDims];
    for (int32_t t = (int32_t)k * 64; t < (int32_t)(k + 1) * 64; t++) {
        for (int d = 0; d < kDims; d++) {
            row[d] = tu_bf16((d < kLatent ? 0.5 : 0) + (double)fast_gauss(&rng));
        }
        row[0] = tu_bf16(t == kSinkAt ? 8 : 0); /* only the sink answers to dim 0 */
        token_write(p, page_of(p, 0, t), offset_of(p, t), row, row + kLatent);
    }
}

static void check_sink(int one_split)
{
    static const int32_t lens[1] = {kSinkLen};
    spec s;
    memset(&s, 0, sizeof s);
    s.seed = 9300;
    s.batch = 1;
    s.s_q = 1;
    s.heads = 4 * kRows;
    s.lens = lens;
    if (one_split) s.max_seq_len = s.split_tokens = kSinkLen;
    problem *p = problem_new(&s);
    sink_job job = {p};
    parallel_for(kSinkLen / 64, sink_page, &job);
    for (int h = 0; h < 4 * kRows; h++) {
        uint16_t *q = q_row(p, 0, 0, h);
        /* sink as heavy as the tail together, or 2^20 times as heavy as one tail key; the tail
           entirely flat, or with some spread */
        const double logit = h / kRows % 2 ? 20 * log(2.0) : log(kSinkLen);
        const double spread = h / kRows < 2 ? 0 : 0.5;
        for (int d = 0; d < kDims; d++) q[d] = tu_bf16(spread * tu_from_bf16(q[d]));
        q[0] = tu_bf16((logit + spread * spread / 2) * 24 / 8);
    }
    problem_upload(p);
    result r = run(p);
    for (int kind = 0; kind < 4; kind++) {
        /* FP8 tensor cores lose what is 2^-13 of the sink's one large product: as at q std 4.  The bias
           is mostly that of BF16: with a flat tail the rows are alike, and their outputs few numbers */
        const double lse = gpu_path == SNAPMLA_PATH_GENERAL ? 2e-3 : 2e-2;
        const bounds rounded = {5e-3, 1e-2, 1e-3, lse, 0}, precise = {3e-3, 5e-3, 1e-3, lse, 0};
        const bounds limit = gpu_mode == SNAPMLA_MODE_PRECISE ? precise : rounded;
        verdict v = compare_part(p, &r, SNAPMLA_REF_EXACT, 0, kind * kRows, kRows);
        print_message("  sink, %s, tail %s: rms %.2e (<= %.1e), bias %+.1e, lse %.1e\n",
                      kind % 2 ? "2^20 : 1" : "half the mass", kind < 2 ? "flat" : "spread", v.rms,
                      limit.rms, v.bias, v.lse_abs);
        CHECK_VERDICT(p, &v, &limit);
    }
    result_free(&r);
    problem_free(p);
}

static void test_sink_one_split(void **state)
{
    (void)state;
    gpu_need();
    check_sink(1);
}

static void test_sink_default_policy(void **state)
{
    (void)state;
    gpu_need();
    check_sink(0);
}

int run_accuracy_tests(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_v_mean_0_one_split),
        cmocka_unit_test(test_v_mean_0_default_policy),
        cmocka_unit_test(test_v_mean_half_one_split),
        cmocka_unit_test(test_v_mean_half_default_policy),
        cmocka_unit_test(test_sink_one_split),
        cmocka_unit_test(test_sink_default_policy),
    };
    return cmocka_run_group_tests_name("accuracy", tests, NULL, NULL);
}

int run_precise_accuracy_tests(void)
{
    const struct CMUnitTest tests[] = {
        PRECISE_TEST(test_v_mean_0_one_split),
        PRECISE_TEST(test_v_mean_half_one_split),
        PRECISE_TEST(test_v_mean_half_default_policy),
        PRECISE_TEST(test_sink_one_split),
        PRECISE_TEST(test_sink_default_policy),
    };
    return cmocka_run_group_tests_name("accuracy, precise mode", tests, NULL, NULL);
}
