/* test_gpu_contain.c - what lies beside a request's keys: slots past its length that hold anything,
   tokens whose scale is no number, pages that 32 bits do not reach.  A row that must not see it keeps its
   bits.  All run for the path in gpu_path and the mode in gpu_mode. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <cmocka.h>

#include "test_util.h"
#include "gpu_util.h"

int run_contain_tests(void);
int run_precise_contain_tests(void);

#define COUNT(array) ((int)(sizeof(array) / sizeof(array)[0]))

/* Shapes with every size of a row tile, causal or not, in one split or in several. */
typedef struct shape {
    int heads, s_q, causal, page_size;
    int32_t split_tokens;
} shape;

static spec spec_of(uint64_t seed, int batch, const int32_t *lens, const shape *f)
{
    spec s;
    memset(&s, 0, sizeof s);
    s.seed = seed;
    s.batch = batch;
    s.s_q = f->s_q;
    s.heads = f->heads;
    s.causal = f->causal;
    s.page_size = f->page_size;
    s.lens = lens;
    if (f->split_tokens > 0) s.split_tokens = f->split_tokens, s.max_seq_len = 1024;
    return s;
}

static void check_same_row(const result *a, const result *b, int64_t row)
{
    TU_CHECK(memcmp(a->out + row * kLatent, b->out + row * kLatent, 2 * kLatent) == 0 &&
                 memcmp(a->lse + row, b->lse + row, 4) == 0,
             "row %d: lse %.9g and %.9g", (int)row, (double)a->lse[row], (double)b->lse[row]);
}

/* ================================================================================================
   Slots past a length, and pages that no request needs
   ============================================================================================== */
enum { TAIL_ZEROS, TAIL_NAN_CONTENT, TAIL_NAN_ROPE, TAIL_HUGE, TAIL_INFINITE, TAIL_NAN, kTails };

/* Where content, scale or rope alone is no number, nothing that looks at another of them sees it. */
static void put_tail(const problem *p, int64_t page, int o, int kind)
{
    static const float scale[kTails] = {0, 0.01f, 0.01f, 3e38f, INFINITY, NAN};
    static const uint8_t content[kTails] = {0, 0x7f, 0x7e, 0x7e, 0x38, 0x7f};
    static const uint16_t rope[kTails][2] = {{0, 0},           {0x3f80, 0xbf80}, {0x7fc0, 0xff80},
                                             {0x7f7f, 0xff7f}, {0, 0},           {0xffc0, 0x7f80}};
    uint8_t *to = token_content(p, page, o);
    for (int i = 0; i < kLatent; i++)
        to[i] = (uint8_t)(content[kind] | (kind != TAIL_ZEROS && i & 1 ? 0x80 : 0));
    for (int i = 0; i < kRope; i++) token_rope(p, page, o)[i] = rope[kind][i & 1];
    *token_scale(p, page, o) = kind == TAIL_INFINITE && o & 1 ? -INFINITY : scale[kind];
}

/* 1 for every slot that holds a key of some request. */
static unsigned char *find_keys(const problem *p)
{
    unsigned char *key = (unsigned char *)tu_alloc((size_t)p->cache.pages * p->s.page_size, 0);
    for (int b = 0; b < p->s.batch; b++) {
        for (int32_t t = 0; t < p->lens[b]; t++)
            key[page_of(p, b, t) * p->s.page_size + offset_of(p, t)] = 1;
    }
    return key;
}

/* Table entries behind those that a request needs name a page that holds no key. */
static void lead_table_astray(problem *p, const unsigned char *key)
{
    int64_t empty = 0;
    while (tu_first_other(key + empty * p->s.page_size, 0, (size_t)p->s.page_size) != (size_t)-1) empty++;
    assert_true(empty < p->cache.pages);
    for (int b = 0; b < p->s.batch; b++) {
        for (int32_t k = (p->lens[b] + p->s.page_size - 1) / p->s.page_size; k < p->width; k++)
            p->table[b * p->table_stride + k] = (int32_t)empty;
    }
    gpu_put(&p->d_table, p->table);
}

static void test_tails_hold_anything(void **state)
{
    (void)state;
    gpu_need();
    static const int32_t lens[] = {1, 63, 64, 65, 127, 0, 128, 129, 191, 257};
    static const shape forms[] = {{1, 1, 0, 64, 0},    {16, 1, 0, 64, 128}, {17, 1, 0, 128, 0},
                                  {32, 1, 0, 64, 128}, {33, 1, 0, 256, 0},  {64, 1, 0, 64, 128},
                                  {128, 1, 0, 64, 0},  {16, 2, 1, 64, 128}, {5, 3, 1, 64, 0},
                                  {64, 2, 1, 64, 0},   {128, 1, 0, 1024, 128}, {20, 1, 0, 16, 0},
                                  {20, 1, 0, 1, 128}};
    for (int i = 0; i < COUNT(forms); i++) {
        spec s = spec_of(9900 + (uint64_t)i, COUNT(lens), lens, &forms[i]);
        s.spare_pages = 1;
        s.extra_width = 2;
        problem *p = problem_new(&s);
        unsigned char *key = find_keys(p);
        result clean = {0, 0, 0, NULL, NULL};
        lead_table_astray(p, key);
        for (int kind = 0; kind < kTails; kind++) {
            for (int64_t k = 0; k < p->cache.pages * p->s.page_size; k++)
                if (!key[k]) put_tail(p, k / p->s.page_size, (int)(k % p->s.page_size), kind);
            gpu_put(&p->d_cache, p->cache_bytes);
            result r = run(p);
            if (kind == TAIL_ZEROS) {
                CHECK_REFERENCE(p, &r, 2e7);
                clean = r;
                continue;
            }
            const int64_t rows = (int64_t)COUNT(lens) * s.s_q * s.heads;
            if (memcmp(r.out, clean.out, (size_t)rows * kLatent * 2) ||
                memcmp(r.lse, clean.lse, (size_t)rows * 4))
                print_error("heads %d, s_q %d, page %d, split %d, tail of kind %d\n", s.heads, s.s_q,
                            s.page_size, s.split_tokens, kind);
            CHECK_SAME_BITS(&r, &clean);
            result_free(&r);
        }
        problem_check_inputs(p);
        free(key);
        result_free(&clean);
        problem_free(p);
    }
}

/* ================================================================================================
   Tokens whose scale is no number
   ============================================================================================== */

/* The special tokens of a request, -1: none.  The scores that they would have, had they a scale, are of
   either sign or 0, by content or by rope or by both. */
enum { kPatterns = 4, kBad = 3, kSpecial = kBad * kPatterns, kSpecials = kSpecial + 6 };
static const float bad_scales[kBad] = {INFINITY, -INFINITY, NAN};

typedef struct special {
    int32_t len, at[2];
} special;

static special special_of(int b)
{
    special s = {70 + 29 * b, {-1, -1}};
    if (b < kSpecial) { /* anywhere; the last; the last but one */
        s.at[0] = b % 3 == 0 ? b * 53 % s.len : s.len - b % 3;
    } else if (b == kSpecial) { /* two that could make up for each other */
        s.at[0] = 64, s.at[1] = 65;
    } else if (b == kSpecial + 1) {
        s.len = 1, s.at[0] = 0;
    } else { /* nothing special */
        static const int32_t plain[] = {1, 64, 65, 300};
        s.len = plain[b - kSpecial - 2];
    }
    return s;
}

static void put_special(const problem *p, int b, int32_t t, float scale)
{
    const int64_t page = page_of(p, b, t);
    const int o = offset_of(p, t), pattern = b % kPatterns;
    memset(token_content(p, page, o), pattern & 1 ? 0 : 0x38, kLatent);
    for (int i = 0; i < kRope; i++) token_rope(p, page, o)[i] = pattern & 2 ? 0 : 0x3f80;
    *token_scale(p, page, o) = scale;
}

static void put_specials(problem *p, int bad)
{
    for (int b = 0; b < kSpecials; b++) {
        const special s = special_of(b);
        for (int i = 0; i < 2; i++) {
            if (s.at[i] < 0) continue;
            put_special(p, b, s.at[i], bad ? bad_scales[(b / kPatterns + i) % kBad] : 0.125f);
        }
    }
    gpu_put(&p->d_cache, p->cache_bytes);
}

static void test_scales_that_are_no_numbers(void **state)
{
    (void)state;
    gpu_need();
    static const shape forms[] = {{3, 1, 0, 64, 0},   {4, 3, 1, 64, 0},   {8, 4, 1, 64, 128},
                                  {20, 1, 0, 64, 128}, {16, 4, 1, 64, 0},  {64, 1, 0, 64, 0},
                                  {128, 1, 0, 64, 128}, {128, 2, 1, 64, 0}, {9, 2, 1, 16, 0}};
    int32_t lens[kSpecials];
    for (int b = 0; b < kSpecials; b++) lens[b] = special_of(b).len;
    for (int i = 0; i < COUNT(forms); i++) {
        const spec s = spec_of(9950 + (uint64_t)i, kSpecials, lens, &forms[i]);
        problem *p = problem_new(&s);
        for (int64_t r = 0; r < (int64_t)kSpecials * s.s_q * s.heads; r++) {
            const int h = (int)(r % s.heads); /* all 1, all -1, all 0, as made */
            uint16_t *q = q_row(p, (int)(r / s.heads / s.s_q), (int)(r / s.heads % s.s_q), h);
            for (int d = 0; d < kDims && h % 4 < 3; d++)
                q[d] = h % 4 == 0 ? 0x3f80 : h % 4 == 1 ? 0xbf80 : 0;
        }
        problem_upload(p);
        put_specials(p, 0);
        result clean = run(p);
        put_specials(p, 1);
        result r = run(p);
        const verdict v = compare(p, &r, SNAPMLA_REF_EXACT, 0);
        const bounds limit = {5e-2, 8e-2, 1, 2e-2, 5e-3};
        CHECK_VERDICT(p, &v, &limit);
        int64_t hit = 0;
        for (int64_t k = 0; k < (int64_t)kSpecials * s.s_q * s.heads; k++) {
            const int b = (int)(k / s.heads / s.s_q), token = (int)(k / s.heads % s.s_q);
            const special x = special_of(b);
            const int32_t seen = s.causal ? x.len - s.s_q + 1 + token : x.len;
            if ((x.at[0] < 0 || x.at[0] >= seen) && (x.at[1] < 0 || x.at[1] >= seen)) {
                check_same_row(&r, &clean, k);
                continue;
            }
            hit++;
            TU_CHECK(isnan(r.lse[k]), "request %d, token %d, head %d: lse is %g", b, token,
                     (int)(k % s.heads), (double)r.lse[k]);
            TU_CHECK_INT(tu_count_nan_bf16(r.out + k * kLatent, kLatent), kLatent);
        }
        TU_CHECK(hit > 0 && tu_count_nan_f32(clean.lse, (int64_t)kSpecials * s.s_q * s.heads) == 0,
                 "%d rows", (int)hit);
        result_free(&clean);
        result_free(&r);
        problem_free(p);
    }
}

/* ================================================================================================
   Pages past 2, 4 and 8 GiB
   ============================================================================================== */

/* Five pages of a small problem, scattered over one piece of memory: with gaps, a record of all planes
   every 2.25 GiB, or without, among 147457 pages.  An offset that is cut to 32 bits, in bytes or in
   elements, of content or rope, lands inside of the memory, before or behind, where all is NaN. */
enum { kFarPages = 5, kFarPage = 64 };
static const int64_t far_stride = (int64_t)9 << 28, far_front = (int64_t)7 << 29;

typedef struct far_cache {
    snapmla_cache cache;
    int64_t id[kFarPages]; /* of the problem's pages */
} far_cache;

static far_cache far_records(const problem *p, char *first)
{
    far_cache f = {problem_desc(p).cache, {0, 1, 2, 3, 4}};
    f.cache.content = first + p->content_at;
    f.cache.scale = (float *)(void *)(first + p->scale_at);
    f.cache.rope = first + p->rope_at;
    f.cache.content_page_stride = far_stride;
    f.cache.scale_page_stride = far_stride / 4;
    f.cache.rope_page_stride = far_stride / 2;
    return f;
}

static far_cache far_dense(const problem *p, char *first)
{
    /* page 65536 begins at 2 GiB of content, 131072 at 4 GiB */
    far_cache f = {problem_desc(p).cache, {65536, 131072, 0, 98303, 147456}};
    f.cache.pages = 147457;
    const int64_t content = f.cache.pages * kFarPage * kLatent, rope = f.cache.pages * kFarPage * kRope * 2;
    f.cache.content = first;
    f.cache.rope = first + content;
    f.cache.scale = (float *)(void *)(first + content + rope);
    f.cache.content_page_stride = f.cache.scale_page_stride = f.cache.rope_page_stride = 0;
    return f;
}

/* Page k of the problem, from host to device or back, into the problem's cache or into `to`. */
static void move_far_page(const problem *p, const far_cache *f, int k, int put)
{
    const int64_t id = f->id[k], strides[3] = {f->cache.content_page_stride, f->cache.scale_page_stride * 4,
                                               f->cache.rope_page_stride * 2};
    const int64_t bytes[3] = {kFarPage * kLatent, kFarPage * 4, kFarPage * kRope * 2};
    char *planes[3] = {(char *)f->cache.content, (char *)(void *)f->cache.scale, (char *)f->cache.rope};
    void *host[3] = {token_content(p, k, 0), token_scale(p, k, 0), token_rope(p, k, 0)};
    for (int i = 0; i < 3; i++) {
        char *device = planes[i] + id * (strides[i] ? strides[i] : bytes[i]);
        if (put) {
            CUDA(cudaMemcpy(device, host[i], (size_t)bytes[i], cudaMemcpyHostToDevice));
        } else {
            unsigned char *got = (unsigned char *)tu_alloc((size_t)bytes[i], 0);
            CUDA(cudaMemcpy(got, device, (size_t)bytes[i], cudaMemcpyDeviceToHost));
            if (memcmp(got, host[i], (size_t)bytes[i])) print_error("page %d, plane %d\n", (int)id, i);
            TU_CHECK_BYTES(got, (unsigned char *)host[i], (size_t)bytes[i]);
            free(got);
        }
    }
}

static void check_far_decode(problem *p, const far_cache *f, const gpu_mem *d_table)
{
    static const int heads[] = {7, 16, 32, 64, 128};
    for (int i = 0; i < COUNT(heads); i++) {
        problem_requery(p, 9980 + (uint64_t)i, 1 + i % 2, heads[i], i % 2);
        result want = run(p);
        const view v = view_all(p);
        stage st = stage_new(p, &v);
        st.desc.cache = f->cache;
        st.desc.block_table = (const int32_t *)(const void *)d_table->at;
        st.desc.block_table_stride = 0;
        OK(snapmla_plan(&st.desc.step));
        OK(snapmla_decode(&st.desc));
        result r = stage_read(&st);
        CHECK_SAME_BITS(&r, &want);
        result_free(&r);
        result_free(&want);
        stage_free(&st);
    }
}

/* Appends and imports 20 tokens each, copies a page, and reads all back in both ways. */
static void check_far_flow(problem *p, const far_cache *f, const gpu_mem *d_table)
{
    enum { kTokens = 40, kHalf = kTokens / 2, kAll = kFarPages * kFarPage };
    static uint16_t keys[kTokens][kDims], got[kAll][kDims], want[kAll][kDims];
    int64_t near[kTokens], at[kTokens], all_near[kAll], all[kAll];
    tu_rng rng = tu_seed(9990);
    for (int t = 0; t < kTokens; t++) { /* the last slot of every page, and others */
        const int k = t % kFarPages, o = kFarPage - 1 - t / kFarPages * 3;
        tu_fill_bf16(&rng, keys[t], kDims, 0, 1);
        near[t] = k * kFarPage + o;
        at[t] = f->id[k] * kFarPage + o;
    }
    for (int n = 0; n < kAll; n++) {
        all_near[n] = n;
        all[n] = f->id[n / kFarPage] * kFarPage + n % kFarPage;
    }
    const int32_t pairs[2] = {(int32_t)f->id[4], (int32_t)f->id[1]}, near_pair[2] = {4, 1};
    gpu_mem d_keys = gpu_new_from(keys, sizeof keys, 16), d_at = gpu_new_from(at, sizeof at, 8);
    gpu_mem d_all = gpu_new_from(all, sizeof all, 8), d_pairs = gpu_new_from(pairs, 8, 8);
    gpu_mem d_got = gpu_new(sizeof got, 16, 0xee);
    snapmla_append_desc a;
    memset(&a, 0, sizeof a);
    a.cache = f->cache;
    a.tokens = kHalf - 1;
    a.latent = d_keys.at;
    a.slots = (const int64_t *)(const void *)d_at.at;
    OK(snapmla_append(&a));
    float weight[kLatent]; /* the norm is another kernel */
    tu_fill_f32(&rng, weight, kLatent, 1, 0.1);
    gpu_mem d_weight = gpu_new_from(weight, sizeof weight, 16);
    a.tokens = 1;
    a.latent = d_keys.at + (kHalf - 1) * sizeof keys[0];
    a.slots += kHalf - 1;
    a.norm.weight = d_weight.at;
    a.norm.weight_type = SNAPMLA_NUMBER_F32;
    OK(snapmla_append(&a));
    snapmla_import_desc i;
    memset(&i, 0, sizeof i);
    i.cache = f->cache;
    i.tokens = kHalf;
    i.source = d_keys.at + kHalf * sizeof keys[0];
    i.slots = (const int64_t *)(const void *)d_at.at + kHalf;
    OK(snapmla_import(&i));
    snapmla_copy_pages_desc c;
    memset(&c, 0, sizeof c);
    c.layers = 1;
    c.source = c.destination = &f->cache;
    c.count = 1;
    c.pairs = (const int32_t *)(const void *)d_pairs.at;
    OK(snapmla_copy_pages(&c));

    snapmla_ref_append_desc ra;
    memset(&ra, 0, sizeof ra);
    ra.cache = p->cache;
    for (int t = 0; t < kTokens; t++) { /* imports of BF16 are appends */
        ra.tokens = 1;
        ra.latent = keys[t];
        ra.slots = near + t;
        ra.norm.weight = t == kHalf - 1 ? weight : NULL;
        ra.norm.weight_type = SNAPMLA_REF_NUMBER_F32;
        assert_int_equal(snapmla_ref_append(&ra), 0);
    }
    snapmla_ref_copy_pages_desc rc;
    memset(&rc, 0, sizeof rc);
    rc.layers = 1;
    rc.source = rc.destination = &p->cache;
    rc.count = 1;
    rc.pairs = near_pair;
    assert_int_equal(snapmla_ref_copy_pages(&rc), 0);
    CUDA(cudaDeviceSynchronize());
    for (int k = 0; k < kFarPages; k++) move_far_page(p, f, k, 0);

    snapmla_ref_fetch_desc rf;
    memset(&rf, 0, sizeof rf);
    rf.cache = p->cache;
    rf.tokens = kAll;
    rf.slots = all_near;
    rf.latent = want[0];
    assert_int_equal(snapmla_ref_fetch(&rf), 0);
    snapmla_fetch_desc d;
    memset(&d, 0, sizeof d);
    d.cache = f->cache;
    d.tokens = kAll;
    d.latent = d_got.at;
    d.slots = (const int64_t *)(const void *)d_all.at;
    OK(snapmla_fetch(&d));
    CUDA(cudaDeviceSynchronize());
    gpu_get(&d_got, got);
    TU_CHECK_BYTES((unsigned char *)got, (unsigned char *)want, sizeof got);

    const int32_t starts[3] = {0, p->lens[0], p->lens[0] + p->lens[1]};
    gpu_mem d_starts = gpu_new_from(starts, sizeof starts, 4);
    gpu_fill(&d_got, 0xee);
    d.tokens = starts[2];
    d.slots = NULL;
    d.block_table = (const int32_t *)(const void *)d_table->at;
    d.block_table_width = p->width;
    d.batch = 2;
    d.row_starts = (const int32_t *)(const void *)d_starts.at;
    OK(snapmla_fetch(&d));
    CUDA(cudaDeviceSynchronize());
    gpu_get(&d_got, got);
    for (int b = 0; b < 2; b++) {
        for (int32_t t = 0; t < p->lens[b]; t++) {
            TU_CHECK_BYTES((unsigned char *)got[starts[b] + t],
                           (unsigned char *)want[page_of(p, b, t) * kFarPage + offset_of(p, t)],
                           sizeof got[0]);
        }
    }
    gpu_delete(&d_keys);
    gpu_delete(&d_at);
    gpu_delete(&d_all);
    gpu_delete(&d_pairs);
    gpu_delete(&d_got);
    gpu_delete(&d_weight);
    gpu_delete(&d_starts);
}

static void test_past_4_gib(void **state)
{
    (void)state;
    gpu_need();
    static const int32_t lens[] = {3 * kFarPage - 3, 2 * kFarPage};
    for (int dense = 0; dense <= 1; dense++) {
        spec s;
        memset(&s, 0, sizeof s);
        s.seed = 9970 + (uint64_t)dense;
        s.batch = COUNT(lens);
        s.s_q = s.heads = 1;
        s.lens = lens;
        s.layout = LAYOUT_RECORD;
        problem *p = problem_new(&s);
        const size_t record = p->cache_size / kFarPages;
        const size_t bytes = (size_t)(far_front + (kFarPages - 1) * far_stride) + record;
        if (gpu_free_bytes() < bytes + ((size_t)1 << 30)) {
            problem_free(p);
            print_message("skipped: less than %d GiB of GPU memory are free\n", (int)(bytes >> 30) + 2);
            skip();
        }
        gpu_mem arena = gpu_new(bytes, 0, 0xff); /* a fill takes some milliseconds */
        char *first = (char *)arena.at + far_front;
        const far_cache f = dense ? far_dense(p, first) : far_records(p, first);
        for (int k = 0; k < kFarPages; k++) move_far_page(p, &f, k, 1);
        int32_t table[2 * kFarPages];
        const int32_t entries = 2 * p->width;
        assert_true(entries <= COUNT(table) && p->table_stride == p->width);
        for (int32_t n = 0; n < entries; n++) {
            const int32_t k = p->table[n];
            table[n] = k >= 0 && k < kFarPages ? (int32_t)f.id[k] : -1;
        }
        gpu_mem d_table = gpu_new_from(table, (size_t)entries * 4, 4);
        check_far_decode(p, &f, &d_table);
        check_far_flow(p, &f, &d_table);
        gpu_delete(&d_table);
        gpu_delete(&arena);
        problem_free(p);
    }
}

int run_contain_tests(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_tails_hold_anything),
        cmocka_unit_test(test_scales_that_are_no_numbers),
        cmocka_unit_test(test_past_4_gib),
    };
    return cmocka_run_group_tests_name("containment", tests, NULL, NULL);
}

int run_precise_contain_tests(void)
{
    const struct CMUnitTest tests[] = {
        PRECISE_TEST(test_tails_hold_anything),
        PRECISE_TEST(test_scales_that_are_no_numbers),
    };
    return cmocka_run_group_tests_name("containment, precise mode", tests, NULL, NULL);
}
