/* test_gpu_hard.c - what is seldom but happens: a thousand repeats, threads, streams of every kind,
   memory from a pool, one giant among thousands of empty requests, many query tokens, scales at the
   ends of their range, and that a NaN changes no bit of a row that does not see it. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <cmocka.h>
#include <pthread.h>

#include "test_util.h"
#include "gpu_util.h"

int run_hard_tests(void);
int run_precise_hard_tests(void);

#define COUNT(array) ((int)(sizeof(array) / sizeof(array)[0]))

static spec plain(uint64_t seed, int batch, int s_q, int heads, const int32_t *lens)
{
    spec s;
    memset(&s, 0, sizeof s);
    s.seed = seed;
    s.batch = batch;
    s.s_q = s_q;
    s.heads = heads;
    s.lens = lens;
    s.extra_width = 2;
    s.spare_pages = 1;
    return s;
}

static void check_same_row(const result *a, const result *b, int64_t row)
{
    TU_CHECK(memcmp(a->out + row * kLatent, b->out + row * kLatent, 2 * kLatent) == 0 &&
                 memcmp(a->lse + row, b->lse + row, 4) == 0,
             "row %d: lse %.9g and %.9g", (int)row, (double)a->lse[row], (double)b->lse[row]);
}

/* Plan and decode a thousand times; outputs and lse, compared as they lie in memory. */
static void test_a_thousand_repeats(void **state)
{
    (void)state;
    gpu_need();
    static const int32_t few[] = {1, 0, 65, 300}, many[] = {9000, 130, 31000, 64};
    const int repeats = gpu_quick() ? 50 : 1000;
    for (int form = 0; form < 3; form++) {
        spec s = plain(9000 + (uint64_t)form, 4, 1 + (form == 2), form == 1 ? 64 : 16,
                       form == 0 ? few : many);
        if (form == 2) s.max_seq_len = 31000, s.split_tokens = 1024;
        problem *p = problem_new(&s);
        const view v = view_all(p);
        stage st = stage_new(p, &v);
        unsigned char *got = (unsigned char *)tu_alloc(st.out.bytes, 0);
        unsigned char *first = (unsigned char *)tu_alloc(st.out.bytes, 0);
        float *lse = (float *)tu_alloc(st.lse.bytes, 0), *first_lse = (float *)tu_alloc(st.lse.bytes, 0);
        for (int i = 0; i < repeats; i++) {
            if (i % 10 == 0) stage_poison(&st, i % 20 ? 0x7f : 0xff);
            OK(snapmla_plan(&st.desc.step));
            OK(snapmla_decode(&st.desc));
            CUDA(cudaDeviceSynchronize());
            gpu_get(&st.out, i ? got : first);
            gpu_get(&st.lse, i ? lse : first_lse);
            if (i == 0) continue;
            TU_CHECK(memcmp(got, first, st.out.bytes) == 0 && memcmp(lse, first_lse, st.lse.bytes) == 0,
                     "form %d: repeat %d gives other bits", form, i);
        }
        result r = stage_read(&st);
        CHECK_REFERENCE(p, &r, 3e8);
        result_free(&r);
        free(got);
        free(first);
        free(lse);
        free(first_lse);
        stage_free(&st);
        problem_free(p);
    }
}

/* ---- long splits ---- */

/* Requests of `lens` tokens over a few pages that come again and again in random order: long ones cost
   little to make, and their blocks come fast, from L2. */
static problem *loop_problem(const spec *from, const int32_t *lens)
{
    spec s = *from;
    int32_t *full = (int32_t *)tu_alloc((size_t)s.batch * 4, 0), longest = 0;
    for (int b = 0; b < s.batch; b++) {
        full[b] = b < 24 ? 64 : 0;
        if (lens[b] > longest) longest = lens[b];
    }
    s.lens = full;
    s.spare_pages = 0;
    s.extra_width = (longest + 63) / 64;
    problem *p = problem_new(&s);
    tu_rng rng = tu_seed(s.seed + 1);
    memcpy(p->lens, lens, (size_t)s.batch * 4);
    for (int b = 0; b < s.batch; b++) {
        for (int32_t k = 0; k < (lens[b] + 63) / 64; k++)
            p->table[b * p->table_stride + k] = (int32_t)tu_below(&rng, (uint32_t)p->cache.pages);
    }
    problem_upload(p);
    free(full);
    return p;
}

/* Decodes again and again on a poisoned workspace: always the same bits. */
static void check_repeats(problem *p, int repeats, const result *want)
{
    const view v = view_all(p);
    stage st = stage_new(p, &v);
    for (int i = 0; i < repeats; i++) {
        stage_poison(&st, i & 1 ? 0x7f : 0xff);
        OK(snapmla_plan(&st.desc.step));
        OK(snapmla_decode(&st.desc));
        result r = stage_read(&st);
        CHECK_SAME_BITS(&r, want);
        result_free(&r);
    }
    stage_free(&st);
}

/* Some 300 blocks in one split, on every SM and on few, for every size of a row tile: stages, logits and
   weights that are handed on too early, and table entries that are read too late, show in the bits. */
static void test_long_splits(void **state)
{
    (void)state;
    gpu_need();
    static const int heads[] = {16, 32, 64, 128};
    int32_t lens[150];
    for (int form = 0; form < 2 * COUNT(heads); form++) {
        const int few = form & 1, batch = few ? 5 : 150;
        for (int b = 0; b < batch; b++) lens[b] = (few ? 20000 : 12000) + 37 * b;
        spec s = plain(9010 + (uint64_t)form, batch, 1, heads[form / 2], lens);
        s.max_seq_len = s.split_tokens = 20480;
        problem *p = loop_problem(&s, lens);
        result r = run(p);
        CHECK_REFERENCE(p, &r, 1e8);
        check_repeats(p, gpu_quick() ? 6 : 60, &r);
        result_free(&r);
        problem_free(p);
    }
}

/* Heads whose logits fall: the odd ones, the odd ones of some groups of 8 and the even ones of others, or
   whole groups of 8 or of 16, which are the rows of a warp in the precise mode and in the other. */
static int falls(int h, int groups)
{
    return (groups == 0 ? h : groups == 1 ? h ^ h >> 3 ^ h >> 4 : groups == 2 ? h >> 3 : h >> 4) & 1;
}

/* Keys of each block, or of every third, 2^70 times as heavy as all before: every sum made so far is
   rescaled to next to nothing, again and again.  For other heads they fall the same way: for some of the
   rows of a warp, in the same places of each warp or not, or for all while those of its neighbour rise. */
static void test_logits_rise_block_by_block(void **state)
{
    (void)state;
    gpu_need();
    enum { kBatch = 6, kLong = 10 }; /* so many long forms; in the others, all rows of a request count */
    static const struct {
        int heads, groups;
    } forms[] = {{7, 0},   {7, 0},   {16, 0}, {16, 0}, {32, 0},  {32, 0}, {64, 0}, {64, 0},
                 {128, 0}, {128, 0}, {16, 1}, {32, 1}, {40, 1},  {64, 1}, {128, 1}, {16, 2},
                 {32, 2},  {40, 2},  {64, 2}, {128, 2}, {32, 3}, {40, 3}, {64, 3}, {128, 3}};
    for (int form = 0; form < COUNT(forms); form++) {
        const int every = form & 1 ? 3 : 1, is_long = form < kLong, blocks = is_long ? 100 : 40;
        int32_t lens[kBatch] = {64 * blocks}, first[kBatch] = {64 * blocks};
        for (int b = 1; b < kBatch; b++) lens[b] = 64 * blocks - 71 * b;
        spec s = plain((is_long ? 9030 : 9400) + (uint64_t)form, kBatch, 1, forms[form].heads, first);
        s.extra_width = 0;
        if (!is_long || form % 4 < 2) s.max_seq_len = s.split_tokens = 64 * blocks;
        problem *p = problem_new(&s);
        for (int32_t t = 0; t < 64 * blocks; t++) {
            const double logit = 48.5 * (t / 64 / every);
            const int64_t page = page_of(p, 0, t);
            token_rope(p, page, offset_of(p, t))[0] = tu_bf16(logit / *token_scale(p, page, offset_of(p, t)));
        }
        memcpy(p->lens, lens, sizeof lens);
        for (int b = 0; b < kBatch; b++) { /* all of the same pages */
            if (b > 0) memcpy(p->table + b * p->table_stride, p->table, (size_t)p->width * 4);
            for (int h = 0; h < s.heads; h++)
                q_row(p, b, 0, h)[kLatent] = tu_bf16(falls(h, forms[form].groups) ? -24 : 24);
        }
        problem_upload(p);
        result r = run(p);
        const verdict v = is_long ? compare(p, &r, SNAPMLA_REF_EXACT, 3e8)
                                  : compare_part(p, &r, SNAPMLA_REF_EXACT, form % kBatch, 0, s.heads);
        const bounds limit = {5e-2, 1e-1, 1, 2e-2, 2e-3};
        CHECK_VERDICT(p, &v, &limit);
        check_repeats(p, gpu_quick() || !is_long ? 3 : 30, &r);
        result_free(&r);
        problem_free(p);
    }
}

/* More splits than combine weighs at once: two rounds and three. */
static void test_more_splits_than_a_round(void **state)
{
    (void)state;
    gpu_need();
    static const int32_t lens[] = {300 * 128 + 5, 600 * 128, 257 * 128, 256 * 128, 2 * 128, 0};
    for (int form = 0; form < 2; form++) {
        spec s = plain(9050 + (uint64_t)form, COUNT(lens), 1, form ? 40 : 4, lens);
        s.max_seq_len = 600 * 128;
        s.split_tokens = 128;
        problem *p = loop_problem(&s, lens);
        result r = run(p);
        CHECK_REFERENCE(p, &r, 3e8);
        check_repeats(p, 2, &r);
        result_free(&r);
        problem_free(p);
    }
}

/* ---- other batches, other zeros ---- */

static void reverse_requests(problem *p)
{
    for (int b = 0; b < p->s.batch / 2; b++) {
        const int other = p->s.batch - 1 - b;
        const int32_t len = p->lens[b];
        p->lens[b] = p->lens[other];
        p->lens[other] = len;
        for (int64_t k = 0; k < p->table_stride; k++) {
            const int32_t page = p->table[b * p->table_stride + k];
            p->table[b * p->table_stride + k] = p->table[other * p->table_stride + k];
            p->table[other * p->table_stride + k] = page;
        }
        for (int64_t i = 0; i < p->q_batch_stride; i++) {
            const uint16_t x = p->q[b * p->q_batch_stride + i];
            p->q[b * p->q_batch_stride + i] = p->q[other * p->q_batch_stride + i];
            p->q[other * p->q_batch_stride + i] = x;
        }
    }
    problem_upload(p);
}

/* With fixed splits, requests keep their bits in the reverse order, and where others are padding. */
static void test_requests_keep_their_bits(void **state)
{
    (void)state;
    gpu_need();
    static const int32_t lens[] = {3000, 1, 640, 129, 5000, 64, 2000, 1025};
    static const int shapes[][2] = {{1, 16}, {1, 64}, {3, 7}, {2, 128}, {1, 32}}; /* s_q, heads */
    enum { kBatch = COUNT(lens) };
    for (int form = 0; form < COUNT(shapes); form++) {
        spec s = plain(9060 + (uint64_t)form, kBatch, shapes[form][0], shapes[form][1], lens);
        s.causal = s.s_q > 1;
        s.max_seq_len = 5000;
        s.split_tokens = 256 << form % 3;
        problem *p = problem_new(&s);
        const int64_t rows = (int64_t)s.s_q * s.heads;
        result r = run(p);
        for (int odd = 0; odd <= 1; odd++) {
            int32_t padded[kBatch];
            for (int b = 0; b < kBatch; b++) padded[b] = b % 2 == odd ? lens[b] : b % 4 < 2 ? 0 : -5;
            view v = view_all(p);
            v.lens = padded;
            result half = run_view(p, &v);
            for (int64_t k = 0; k < kBatch * rows; k++)
                if (k / rows % 2 == odd) check_same_row(&half, &r, k);
            result_free(&half);
        }
        reverse_requests(p);
        result back = run(p);
        CHECK_REFERENCE(p, &back, 5e7);
        for (int64_t k = 0; k < kBatch * rows; k++) {
            const int64_t to = (kBatch - 1 - k / rows) * rows + k % rows;
            TU_CHECK(memcmp(back.out + to * kLatent, r.out + k * kLatent, 2 * kLatent) == 0 &&
                         memcmp(back.lse + to, r.lse + k, 4) == 0,
                     "row %d, reversed %d: lse %.9g and %.9g", (int)k, (int)to, (double)r.lse[k],
                     (double)back.lse[to]);
        }
        result_free(&r);
        result_free(&back);
        problem_free(p);
    }
}

/* Zeros of q, content and rope change their sign: the same lse, and outputs that are equal as numbers. */
static void test_zeros_of_either_sign(void **state)
{
    (void)state;
    gpu_need();
    static const int32_t lens[] = {700, 1, 64, 2000};
    static const int heads[] = {16, 32, 64, 128};
    for (int form = 0; form < COUNT(heads); form++) {
        spec s = plain(9070 + (uint64_t)form, COUNT(lens), 1, heads[form], lens);
        problem *p = problem_new(&s);
        const int64_t tokens = p->cache.pages * p->s.page_size, rows = (int64_t)s.batch * s.heads;
        result r[2];
        for (int minus = 0; minus <= 1; minus++) {
            for (int64_t t = 0; t < tokens; t++) {
                uint8_t *content = token_content(p, t / 64, (int)(t % 64));
                uint16_t *rope = token_rope(p, t / 64, (int)(t % 64));
                for (int d = 0; d < kLatent; d++)
                    if (d % 3 == 0 || t % 5 == 0) content[d] = minus ? 0x80 : 0;
                for (int d = t & 1; d < kRope; d += 2) rope[d] = minus ? 0x8000 : 0;
            }
            for (int64_t k = 0; k < rows * kDims; k++) {
                uint16_t *q = q_row(p, (int)(k / kDims / s.heads), 0, (int)(k / kDims % s.heads));
                if (k % 4 == 0 || k / kDims % 5 == 0) q[k % kDims] = minus ? 0x8000 : 0;
            }
            problem_upload(p);
            r[minus] = run(p);
        }
        TU_CHECK_INT(memcmp(r[0].lse, r[1].lse, (size_t)rows * 4), 0);
        for (int64_t k = 0; k < rows * kLatent; k++)
            TU_CHECK(tu_from_bf16(r[0].out[k]) == tu_from_bf16(r[1].out[k]), "row %d, dim %d: %g and %g",
                     (int)(k / kLatent), (int)(k % kLatent), tu_from_bf16(r[0].out[k]),
                     tu_from_bf16(r[1].out[k]));
        result_free(&r[0]);
        result_free(&r[1]);
        problem_free(p);
    }
}

/* ---- a NaN changes no bit elsewhere ---- */

/* Request 1 gets a token with NaN, or with an infinite scale, as its last: rows of others, and with
   causal the query tokens before it, keep their bits. */
static void test_nan_changes_no_other_bit(void **state)
{
    (void)state;
    gpu_need();
    static const int32_t lens[] = {700, 5000, 64, 1, 5000};
    enum { kTokens = 4, kHeads = 12 };
    for (int form = 0; form < 8; form++) {
        spec s = plain(9100 + (uint64_t)form, COUNT(lens), kTokens, kHeads, lens);
        s.causal = form & 1;
        if (form & 2) s.max_seq_len = 8192, s.split_tokens = 1024;
        problem *p = problem_new(&s);
        result clean = run(p);
        CHECK_REFERENCE(p, &clean, 1e8);
        const int64_t page = page_of(p, 1, lens[1] - 1);
        const int at = offset_of(p, lens[1] - 1);
        uint16_t row[kDims];
        memset(row, 0, sizeof row);
        row[100] = 0x7fc0;
        token_write(p, page, at, row, row + kLatent);
        if (form & 4) {
            memset(token_content(p, page, at), 0x38, kLatent);
            memset(token_rope(p, page, at), 0, 2 * kRope);
            *token_scale(p, page, at) = INFINITY;
        }
        problem_upload(p);
        result r = run(p);
        for (int64_t k = 0; k < (int64_t)COUNT(lens) * kTokens * kHeads; k++) {
            const int b = (int)(k / (kTokens * kHeads)), i = (int)(k / kHeads % kTokens);
            if (b != 1 || (s.causal && i < kTokens - 1)) {
                check_same_row(&r, &clean, k);
            } else {
                TU_CHECK(isnan(r.lse[k]), "lse of row %d is %g", (int)k, (double)r.lse[k]);
                TU_CHECK_INT(tu_count_nan_bf16(r.out + k * kLatent, kLatent), kLatent);
            }
        }
        result_free(&clean);
        result_free(&r);
        problem_free(p);
    }
}

/* ---- shapes ---- */

static void test_giant_among_empty_requests(void **state)
{
    (void)state;
    gpu_need();
    enum { kBatch = 4096 };
    static int32_t lens[kBatch];
    memset(lens, 0, sizeof lens);
    for (int form = 0; form < 2; form++) {
        lens[2345] = gpu_quick() ? 30000 : form ? 1 << 18 : 1 << 20;
        spec s = plain(9200 + (uint64_t)form, kBatch, 1, 4, lens);
        s.page_size = 1024;
        if (form) s.max_seq_len = 1 << 18, s.split_tokens = 1 << 16;
        problem *p = problem_new(&s);
        result r = run(p);
        const verdict v = compare_part(p, &r, SNAPMLA_REF_EXACT, 2345, 0, 4);
        const bounds limit = {4.5e-2, 7e-2, 1, 2e-3, 2e-3};
        CHECK_VERDICT(p, &v, &limit);
        for (int64_t k = 0; k < kBatch * 4; k++) {
            if (k / 4 == 2345) continue;
            TU_CHECK(r.lse[k] == -INFINITY, "lse of row %d is %g", (int)k, (double)r.lse[k]);
            TU_CHECK(r.out[k * kLatent] == 0 &&
                         memcmp(r.out + k * kLatent, r.out + k * kLatent + 1, 2 * (kLatent - 1)) == 0,
                     "row %d is not zero", (int)k);
        }
        result_free(&r);
        problem_free(p);
    }
}

/* s_q up to 1024 with few heads: prompts that are decoded. */
static void test_many_query_tokens(void **state)
{
    (void)state;
    gpu_need();
    static const int32_t lens[] = {1100, 64, 700, 0};
    static const int shapes[][2] = {{257, 3}, {1023, 2}, {1024, 1}}; /* query tokens, heads */
    for (int i = 0; i < COUNT(shapes); i++) {
        spec s = plain(9300 + (uint64_t)i, COUNT(lens), shapes[i][0], shapes[i][1], lens);
        s.causal = 1;
        if (i == 1 && gpu_quick()) continue;
        CHECK_SPEC(&s, 1e9);
    }
}

/* ---- scales ---- */

/* Keys so large or so small that their scales end near where f32 does, and queries that make up for it. */
static void test_scales_of_any_size(void **state)
{
    (void)state;
    gpu_need();
    static const int32_t lens[] = {900, 64, 1, 2000};
    static const struct {
        double key, q, softmax_factor;
        int general_only; /* the Hopper path takes values below 2^-40 * 448 for 0 */
    } cases[] = {{1e24, 1e-24, 1, 0}, {1e30, 1e-24, 1e-6, 0}, {1e-8, 1e8, 1, 0}, {1e-22, 1e22, 1, 1}};
    for (int i = 0; i < COUNT(cases); i++) {
        if (cases[i].general_only && gpu_path != SNAPMLA_PATH_GENERAL) continue;
        spec s = plain(9400 + (uint64_t)i, COUNT(lens), 2, 17, lens);
        s.causal = 1;
        s.key_std = s.rope_std = cases[i].key;
        s.q_std = cases[i].q;
        s.softmax_scale = (float)(cases[i].softmax_factor / 24);
        problem *p = problem_new(&s);
        result r = run(p);
        const verdict v = compare(p, &r, SNAPMLA_REF_EXACT, 1e9);
        const bounds limit = {3.2e-2, 7e-2, INFINITY, 2e-3, 2e-3};
        CHECK_VERDICT(p, &v, &limit);
        result_free(&r);
        problem_free(p);
    }
}

/* Tokens among normal ones whose scale is subnormal, zero of either sign, or the least that a writer
   makes, with content that is not zero: they count with a logit of about 0 and a value of about 0. */
static void test_subnormal_scales(void **state)
{
    (void)state;
    gpu_need();
    static const int32_t lens[] = {300, 64, 5000, 3};
    static const float scales[] = {1e-40f, 0.0f, 1.4e-45f, 2.3e-29f, 1.17549435e-38f};
    static const int heads[] = {12, 20, 40, 128}; /* every size of a row tile */
    for (int form = 0; form < 2 * COUNT(heads); form++) {
        spec s = plain(9500 + (uint64_t)form, COUNT(lens), 1, heads[form / 2], lens);
        if (form & 1) s.max_seq_len = 5000, s.split_tokens = 512;
        problem *p = problem_new(&s);
        int n = 0;
        for (int b = 0; b < COUNT(lens); b++) {
            for (int32_t t = 1; t < lens[b]; t += 1 + t % 7, n++) {
                *token_scale(p, page_of(p, b, t), offset_of(p, t)) = scales[n % COUNT(scales)];
                memset(token_rope(p, page_of(p, b, t), offset_of(p, t)), 0, 2 * kRope);
            }
        }
        problem_upload(p);
        result r = run(p);
        const verdict v = compare(p, &r, SNAPMLA_REF_EXACT, 2e8);
        const bounds limit = {3.2e-2, 7e-2, 1, 2e-3, 2e-3};
        CHECK_VERDICT(p, &v, &limit);
        result_free(&r);
        problem_free(p);
    }
}

/* ---- streams, threads, memory ---- */

enum { kWorkers = 4, kSteps = 50 };

typedef struct worker {
    stage st;
    problem *p;
    result want;
    pthread_t thread;
    snapmla_result worst;
    cudaError_t error;
} worker;

static void *run_worker(void *arg)
{
    worker *w = (worker *)arg;
    for (int i = 0; i < kSteps; i++) {
        snapmla_decode_desc resolved;
        const snapmla_result got[] = {snapmla_plan(&w->st.desc.step), snapmla_decode(&w->st.desc),
                                      snapmla_resolve(&w->st.desc, &resolved)};
        for (int k = 0; k < COUNT(got); k++)
            if (got[k] != SNAPMLA_OK) w->worst = got[k];
    }
    w->error = cudaStreamSynchronize(w->st.desc.step.stream);
    return NULL;
}

/* Host threads, each with a stream, a plan and a workspace of its own, at the same time.  One of them
   uses its thread's default stream, one the legacy one. */
static void test_host_threads(void **state)
{
    (void)state;
    gpu_need();
    static worker w[kWorkers];
    memset(w, 0, sizeof w);
    for (int i = 0; i < kWorkers; i++) {
        spec s = plain(9600 + (uint64_t)i, 5, 1 + i % 2, 16 << i % 3, NULL);
        s.max_len = 8000;
        if (i == 2) s.max_seq_len = 8000, s.split_tokens = 512;
        w[i].p = problem_new(&s);
        const view v = view_all(w[i].p);
        w[i].want = run(w[i].p);
        w[i].st = stage_new(w[i].p, &v);
        cudaStream_t stream = i == 0 ? cudaStreamPerThread : cudaStreamLegacy;
        if (i > 1) CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
        w[i].st.desc.step.stream = stream;
    }
    CUDA(cudaDeviceSynchronize());
    for (int i = 0; i < kWorkers; i++)
        assert_int_equal(pthread_create(&w[i].thread, NULL, run_worker, &w[i]), 0);
    for (int i = 0; i < kWorkers; i++) assert_int_equal(pthread_join(w[i].thread, NULL), 0);
    for (int i = 0; i < kWorkers; i++) {
        TU_CHECK_INT(w[i].worst, SNAPMLA_OK);
        TU_CHECK_INT(w[i].error, cudaSuccess);
        result r = stage_read(&w[i].st);
        CHECK_SAME_BITS(&r, &w[i].want);
        result_free(&r);
        result_free(&w[i].want);
        if (i > 1) CUDA(cudaStreamDestroy(w[i].st.desc.step.stream));
        stage_free(&w[i].st);
        problem_free(w[i].p);
    }
}

/* Plan, workspace and output from the stream's pool, given back before anything has run: the next
   round gets the same memory, and what it writes must come behind what this round reads. */
static void test_stream_ordered_memory(void **state)
{
    (void)state;
    gpu_need();
    enum { kRounds = 20 };
    static const int32_t lens[] = {20000, 100, 0, 3000};
    spec s = plain(9700, COUNT(lens), 2, 32, lens);
    problem *p = problem_new(&s);
    result want = run(p);
    const view v = view_all(p);
    stage st = stage_new(p, &v);
    const size_t out_bytes = st.out.bytes, lse_bytes = st.lse.bytes;
    unsigned char *outs = NULL, *lses = NULL;
    cudaStream_t stream;
    CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CUDA(cudaMallocHost((void **)&outs, kRounds * out_bytes));
    CUDA(cudaMallocHost((void **)&lses, kRounds * lse_bytes));
    CUDA(cudaDeviceSynchronize());
    for (int i = 0; i < kRounds; i++) {
        snapmla_decode_desc d = st.desc;
        void *plan, *workspace, *out, *lse;
        d.step.stream = stream;
        CUDA(cudaMallocAsync(&plan, d.step.plan_bytes, stream));
        CUDA(cudaMallocAsync(&workspace, d.workspace_bytes, stream));
        CUDA(cudaMallocAsync(&out, out_bytes, stream));
        CUDA(cudaMallocAsync(&lse, lse_bytes, stream));
        CUDA(cudaMemsetAsync(plan, 0xff, d.step.plan_bytes, stream));
        CUDA(cudaMemsetAsync(workspace, 0xff, d.workspace_bytes, stream));
        CUDA(cudaMemsetAsync(out, 0xff, out_bytes, stream));
        CUDA(cudaMemsetAsync(lse, 0xff, lse_bytes, stream));
        d.step.plan = plan;
        d.workspace = workspace;
        d.out = out;
        d.lse = (float *)lse;
        OK(snapmla_plan(&d.step));
        OK(snapmla_decode(&d));
        CUDA(cudaMemcpyAsync(outs + i * out_bytes, out, out_bytes, cudaMemcpyDeviceToHost, stream));
        CUDA(cudaMemcpyAsync(lses + i * lse_bytes, lse, lse_bytes, cudaMemcpyDeviceToHost, stream));
        CUDA(cudaFreeAsync(plan, stream));
        CUDA(cudaFreeAsync(workspace, stream));
        CUDA(cudaFreeAsync(out, stream));
        CUDA(cudaFreeAsync(lse, stream));
    }
    CUDA(cudaStreamSynchronize(stream));
    for (int i = 0; i < kRounds; i++) {
        gpu_put(&st.out, outs + i * out_bytes);
        gpu_put(&st.lse, lses + i * lse_bytes);
        result r = stage_read(&st);
        CHECK_SAME_BITS(&r, &want);
        result_free(&r);
    }
    CUDA(cudaFreeHost(outs));
    CUDA(cudaFreeHost(lses));
    CUDA(cudaStreamDestroy(stream));
    result_free(&want);
    stage_free(&st);
    problem_free(p);
}

/* The current device is another one than the stream's: an error, and nothing is broken by it. */
static void test_other_current_device(void **state)
{
    (void)state;
    gpu_need();
    static const int32_t lens[] = {5000, 3};
    spec s = plain(9800, COUNT(lens), 1, 16, lens);
    problem *p = problem_new(&s);
    result want = run(p);
    const view v = view_all(p);
    stage st = stage_new(p, &v);
    cudaStream_t stream;
    CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    st.desc.step.stream = stream;
    CUDA(cudaSetDevice(1));
    const snapmla_result plan = snapmla_plan(&st.desc.step), decode = snapmla_decode(&st.desc);
    const cudaError_t pending = cudaPeekAtLastError();
    CUDA(cudaSetDevice(0));
    TU_CHECK_INT(plan, SNAPMLA_ERROR_CUDA);
    TU_CHECK_INT(decode, SNAPMLA_ERROR_CUDA);
    TU_CHECK_INT(pending, cudaSuccess);
    CUDA(cudaDeviceSynchronize());
    OK(snapmla_plan(&st.desc.step));
    OK(snapmla_decode(&st.desc));
    result r = stage_read(&st);
    CHECK_SAME_BITS(&r, &want);
    result_free(&r);
    result_free(&want);
    CUDA(cudaStreamDestroy(stream));
    stage_free(&st);
    problem_free(p);
}

int run_precise_hard_tests(void)
{
    const struct CMUnitTest tests[] = {
        PRECISE_TEST(test_long_splits),
        PRECISE_TEST(test_logits_rise_block_by_block),
        PRECISE_TEST(test_more_splits_than_a_round),
        PRECISE_TEST(test_requests_keep_their_bits),
        PRECISE_TEST(test_zeros_of_either_sign),
        PRECISE_TEST(test_nan_changes_no_other_bit),
    };
    return cmocka_run_group_tests_name("hard, precise mode", tests, NULL, NULL);
}

int run_hard_tests(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_thousand_repeats),
        cmocka_unit_test(test_long_splits),
        cmocka_unit_test(test_logits_rise_block_by_block),
        cmocka_unit_test(test_more_splits_than_a_round),
        cmocka_unit_test(test_requests_keep_their_bits),
        cmocka_unit_test(test_zeros_of_either_sign),
        cmocka_unit_test(test_nan_changes_no_other_bit),
        cmocka_unit_test(test_giant_among_empty_requests),
        cmocka_unit_test(test_many_query_tokens),
        cmocka_unit_test(test_scales_of_any_size),
        cmocka_unit_test(test_subnormal_scales),
        cmocka_unit_test(test_host_threads),
        cmocka_unit_test(test_stream_ordered_memory),
    };
    const struct CMUnitTest with_two[] = {
        cmocka_unit_test(test_other_current_device),
    };
    int devices = 0, failed = cmocka_run_group_tests_name("hard", tests, NULL, NULL);
    if (gpu_present()) CUDA(cudaGetDeviceCount(&devices));
    if (devices > 1) failed += cmocka_run_group_tests_name("two devices", with_two, NULL, NULL);
    else print_message("not run without a second GPU: test_other_current_device\n");
    return failed;
}
