/* test_gpu.c - the GPU tests: first the harness itself, which needs no GPU, then the data flow,
   then decode, its edges and its accuracy on every path that this GPU has.

   Where there is no usable GPU the cases skip and say why.  SNAPMLA_TEST_QUICK=1 leaves out what
   takes long, for the sanitizer.  With words as arguments only tests whose names contain one of them
   run, word by word; a word that is in no name is an error. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <cmocka.h>

#include "test_util.h"
#include "gpu_util.h"

int run_data_tests(void);
int run_flow_tests(void);
int run_decode_tests(void);
int run_edge_tests(void);
int run_graph_tests(void);
int run_accuracy_tests(void);
int run_precise_tests(void);
int run_precise_accuracy_tests(void);
int run_hard_tests(void);
int run_precise_hard_tests(void);
int run_contain_tests(void);
int run_precise_contain_tests(void);

/* ================================================================================================
   The harness finds what it is meant to find
   ============================================================================================== */
static problem *small_problem(void)
{
    static const int32_t lens[] = {100, 0, 7};
    spec s;
    memset(&s, 0, sizeof s);
    s.seed = 42;
    s.batch = 3;
    s.s_q = 2;
    s.heads = 5;
    s.page_size = 16;
    s.lens = lens;
    s.share = 1;
    s.extra_width = 2;
    s.strided = 1;
    return problem_new(&s);
}

/* What a perfect kernel would give. */
static result perfect(const problem *p)
{
    const size_t rows = (size_t)p->s.batch * p->s.s_q * p->s.heads;
    result r = {p->s.batch, p->s.s_q, p->s.heads, NULL, NULL};
    r.out = (uint16_t *)tu_alloc(rows * kLatent * 2, 0);
    r.lse = (float *)tu_alloc(rows * 4, 0);
    snapmla_ref_decode_desc d;
    memset(&d, 0, sizeof d);
    d.batch = p->s.batch;
    d.s_q = p->s.s_q;
    d.heads = p->s.heads;
    d.seq_lens = p->lens;
    d.cache = p->cache;
    d.block_table = p->table;
    d.block_table_stride = p->table_stride;
    d.block_table_width = p->width;
    d.softmax_scale = p->s.softmax_scale;
    d.q = p->q;
    d.q_batch_stride = p->q_batch_stride;
    d.q_token_stride = p->q_token_stride;
    d.q_head_stride = p->q_head_stride;
    d.out = r.out;
    d.lse = r.lse;
    assert_int_equal(snapmla_ref_decode(&d), 0);
    return r;
}

static void test_harness_accepts_and_refuses(void **state)
{
    (void)state;
    const bounds limit = {2.5e-3, 5e-3, 1e-3, 1e-5, 0};
    problem *p = small_problem();
    result good = perfect(p);
    verdict v = compare(p, &good, SNAPMLA_REF_EXACT, 0);
    TU_CHECK(verdict_fault(&v, &limit) == NULL, "%s: rms %g", verdict_fault(&v, &limit), v.rms);
    TU_CHECK_INT(v.rows, 3 * 2 * 5);
    for (int fault = 0; fault < 10; fault++) {
        result bad = perfect(p);
        uint16_t *row = bad.out + 3 * kLatent; /* request 0 */
        const int empty = 12;                  /* a row of request 1, which has no keys */
        switch (fault) {
        case 0: row[5] = 0x7fc0; break;                         /* NaN */
        case 1: row[511] = 0x7f80; break;                       /* Inf */
        case 2: memset(row, 0, 2 * kLatent); break;             /* a row of zeros */
        case 3: memcpy(row, row + kLatent, 2 * kLatent); break; /* another row's values */
        case 4:
            row[7] ^= 0x8000;
            row[8] ^= 0x8000;
            row[9] ^= 0x8000;
            break; /* signs */
        case 5: bad.lse[3] += 1e-3f; break;
        case 6: bad.lse[3] = NAN; break;
        case 7: bad.out[empty * kLatent + 100] = 1; break; /* not 0 */
        case 8: bad.lse[empty] = 0; break;                 /* not -inf */
        default:                                           /* half a percent on everything */
            for (int i = 0; i < 10 * kLatent; i++)
                bad.out[i] = tu_bf16(1.005 * tu_from_bf16(bad.out[i]));
        }
        v = compare(p, &bad, SNAPMLA_REF_EXACT, 0);
        TU_CHECK(verdict_fault(&v, &limit) != NULL, "fault %d was not seen", fault);
        result_free(&bad);
    }

    /* a finite number where the reference has NaN */
    uint16_t nan_row[kDims];
    memset(nan_row, 0, sizeof nan_row);
    nan_row[3] = 0x7fc0;
    token_write(p, page_of(p, 2, 3), offset_of(p, 3), nan_row, nan_row + kLatent);
    v = compare(p, &good, SNAPMLA_REF_EXACT, 0);
    TU_CHECK(v.wrong_nan > 0, "missing NaN was not seen");
    result with_nan = perfect(p);
    v = compare(p, &with_nan, SNAPMLA_REF_EXACT, 0);
    TU_CHECK(verdict_fault(&v, &limit) == NULL, "%s", verdict_fault(&v, &limit));
    result_free(&with_nan);
    result_free(&good);
    problem_free(p);
}

/* Everything in a problem that must not be read is NaN or absurd. */
static void test_harness_poisons(void **state)
{
    (void)state;
    problem *p = small_problem();
    int64_t nan_scales = 0, good_scales = 0;
    for (int64_t page = 0; page < p->cache.pages; page++) {
        for (int o = 0; o < p->s.page_size; o++) {
            const float scale = *token_scale(p, page, o);
            const uint8_t *content = token_content(p, page, o);
            if (isfinite(scale)) {
                good_scales++;
                continue;
            }
            nan_scales++;
            for (int i = 0; i < kLatent; i++) TU_CHECK_INT(content[i] & 0x7f, 0x7f);
        }
    }
    TU_CHECK(good_scales >= 100 && good_scales <= 107, "%d tokens", (int)good_scales);
    TU_CHECK(nan_scales > 0, "no poisoned slot");
    for (int b = 0; b < 3; b++) {
        for (int k = 0; k < p->table_stride; k++) {
            const int32_t id = p->table[b * p->table_stride + k];
            const int needed = k * p->s.page_size < p->lens[b];
            TU_CHECK(needed == (id >= 0 && id < p->cache.pages), "request %d, entry %d: %d", b, k,
                     id);
        }
    }
    problem_free(p);
}

static void count_one(void *context, int64_t i) { ((unsigned char *)context)[i]++; }

static void test_harness_threads(void **state)
{
    (void)state;
    static unsigned char seen[10000];
    parallel_for(10000, count_one, seen);
    TU_CHECK_FILLED(seen, 1, 10000);
    tu_rng rng = tu_seed(3);
    double sum = 0, squares = 0;
    for (int i = 0; i < 100000; i++) {
        const double x = fast_gauss(&rng);
        sum += x;
        squares += x * x;
    }
    TU_CHECK_NEAR(sum / 100000, 0, 0.02);
    TU_CHECK_NEAR(squares / 100000, 1, 0.02);
}

static int run_harness_tests(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_harness_accepts_and_refuses),
        cmocka_unit_test(test_harness_poisons),
        cmocka_unit_test(test_harness_threads),
    };
    return cmocka_run_group_tests_name("harness", tests, NULL, NULL);
}

/* Guard zones and gaps that are written are seen: on the GPU only. */
static void test_guards(void **state)
{
    (void)state;
    gpu_need();
    unsigned char zone[1024];
    gpu_mem mem = gpu_new(100, 16, 0);
    CUDA(cudaMemcpy(zone, mem.at + 100, sizeof zone, cudaMemcpyDeviceToHost));
    TU_CHECK_FILLED(zone, 0xa5, sizeof zone);
    CUDA(cudaMemset(mem.at + 100, 1, 1));
    CUDA(cudaMemcpy(zone, mem.at + 100, sizeof zone, cudaMemcpyDeviceToHost));
    TU_CHECK_INT(tu_first_other(zone, 0xa5, sizeof zone), 0);
    CUDA(cudaMemset(mem.at + 100, 0xa5, 1));
    gpu_delete(&mem);
}

static int run_guard_tests(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_guards),
    };
    return cmocka_run_group_tests_name("guards", tests, NULL, NULL);
}

static int run_all(void)
{
    gpu_mode = SNAPMLA_MODE_DEFAULT; /* the run before left another */
    int failed = run_harness_tests();
    failed += run_guard_tests();
    failed += run_data_tests();
    failed += run_flow_tests();
    snapmla_path paths[2] = {SNAPMLA_PATH_GENERAL, SNAPMLA_PATH_GENERAL};
    if (gpu_present()) (void)snapmla_device_supported(0, &paths[1]);
    gpu_mode = SNAPMLA_MODE_DEFAULT;
    for (int i = 0; i < (paths[1] == paths[0] ? 1 : 2); i++) {
        gpu_path = paths[i];
        print_message("path: %s\n", gpu_path_name(gpu_path));
        failed += run_decode_tests();
        failed += run_edge_tests();
        failed += run_graph_tests();
        failed += run_accuracy_tests();
        failed += run_hard_tests();
        failed += run_contain_tests();
    }
    gpu_mode = SNAPMLA_MODE_PRECISE;
    for (int i = 0; i < (paths[1] == paths[0] ? 1 : 2); i++) {
        gpu_path = paths[i];
        print_message("path: %s, precise mode\n", gpu_path_name(gpu_path));
        failed += run_precise_tests();
        failed += run_precise_accuracy_tests();
        failed += run_precise_hard_tests();
        failed += run_precise_contain_tests();
    }
    return failed;
}

int main(int argc, char **argv)
{
    int failed = 0;
    setvbuf(stdout, NULL, _IOLBF, 0);
    gpu_describe();
    if (argc == 1) return run_all() != 0;
    for (int i = 1; i < argc; i++) {
        const int before = gpu_cases;
        char pattern[200];
        snprintf(pattern, sizeof pattern, "*%s*", argv[i]);
        cmocka_set_test_filter(pattern);
        failed += run_all();
        if (gpu_cases > before) continue;
        print_error("no GPU test has '%s' in its name\n", argv[i]);
        failed++;
    }
    return failed != 0;
}
