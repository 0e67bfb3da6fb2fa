/* fuzz_host.c - the host side of snapmla.cuh on any descs.  Needs no GPU and hides one if it is there:
   what passes the checks ends in SNAPMLA_ERROR_CUDA at the first question to the device.

   Each input takes a good desc and overwrites some of its words.  Whatever comes out, every call must
   return a code of the list, twice the same, and write its outputs only when it says OK. */
#define _POSIX_C_SOURCE 200809L

#include "fuzz.h"
#include "snapmla.cuh"

static int is_listed(snapmla_result r)
{
    switch ((int)r) {
#define CASE(name, value, text) case value:
        SNAPMLA_RESULT_LIST(CASE)
#undef CASE
        return strcmp(snapmla_result_string(r), "not a snapmla result") != 0;
    default: return 0;
    }
}

/* What is left of a good call without a GPU. */
static int is_device(snapmla_result r)
{
    return r == SNAPMLA_ERROR_CUDA || r == SNAPMLA_ERROR_DEVICE;
}

static void check_call(snapmla_result first, snapmla_result second, int nothing_to_do)
{
    FUZZ_CHECK(is_listed(first) && first == second);
    FUZZ_CHECK(first != SNAPMLA_OK || nothing_to_do);
}

/* n-th made-up device buffer, 4 GiB apart */
enum { kBuffers = 64 };
static void *at(uintptr_t n) { return (void *)(n << 32); }

/* Overwrite words of a desc.  Made-up buffers become others, NULL or misaligned ones; the rest becomes
   any number. */
static void mutate(void *desc, size_t size)
{
    unsigned char *bytes = (unsigned char *)desc;
    for (unsigned n = (unsigned)fuzz_bytes(1) % 8; n > 0; n--) {
        const size_t word = (size_t)fuzz_bytes(1) % (size / 4);
        const size_t whole = word & ~(size_t)1; /* where a pointer would be */
        const int long_word = word == whole && 4 * word + 8 <= size && fuzz_one_in(2);
        uint64_t x = 0;
        memcpy(&x, bytes + 4 * whole, 4 * whole + 8 <= size ? 8 : 4);
        if (x >> 32 != 0 && x >> 32 < kBuffers && x << 32 == 0) {
            const unsigned kind = (unsigned)fuzz_bytes(1) % 4;
            if (kind == 0) x = 0;
            else if (kind == 1) x = (uint64_t)(1 + fuzz_bytes(1) % 63) << 32;
            else x += (uint64_t)1 << fuzz_bytes(1) % 8;
            memcpy(bytes + 4 * whole, &x, 8);
            continue;
        }
        memcpy(&x, bytes + 4 * word, long_word ? 8 : 4);
        switch (fuzz_bytes(1) % 8) {
        case 0: x = 0; break;
        case 1: x = (uint64_t)fuzz_absurd(); break;
        case 2: x += 1; break;
        case 3: x = 0 - x; break;
        case 4: x = (uint64_t)1 << fuzz_bytes(1) % 63; break;
        case 5: x += 16; break;
        case 6: x = fuzz_bytes(8); break;
        default: x = (uint64_t)fuzz_number(200);
        }
        memcpy(bytes + 4 * word, &x, long_word ? 8 : 4);
    }
}

/* An address that a buffer can have: one at the very end of memory is no pointer to add to. */
static void *possible(const void *p) { return (void *)((uintptr_t)p & (UINTPTR_MAX >> 1)); }

static snapmla_step good_step(void)
{
    snapmla_step s;
    memset(&s, 0, sizeof s);
    s.batch = 1 + (int32_t)fuzz_bytes(1);
    s.s_q = 1 + (int32_t)fuzz_bytes(1) % 4;
    s.heads = 1 + (int32_t)fuzz_bytes(1);
    s.sm_count = fuzz_one_in(8) ? 0 : 132;
    s.path = fuzz_one_in(2) ? SNAPMLA_PATH_SM90 : SNAPMLA_PATH_GENERAL;
    if (fuzz_one_in(3)) {
        s.max_seq_len = 1 + (int32_t)fuzz_bytes(2);
        s.split_tokens = 128 * (int32_t)(fuzz_bytes(1) % 16);
    }
    s.seq_lens = (const int32_t *)at(1);
    s.plan = at(2);
    s.plan_bytes = (size_t)1 << 40;
    return s;
}

static snapmla_cache good_cache(void)
{
    snapmla_cache c;
    memset(&c, 0, sizeof c);
    c.page_size = fuzz_one_in(2) ? 0 : 1 << fuzz_bytes(1) % 11;
    c.content = at(3);
    c.scale = (float *)at(4);
    c.rope = at(5);
    c.pages = fuzz_number(1000);
    return c;
}

static int empty_step(const snapmla_step *s)
{
    return s->batch == 0 || s->s_q == 0 || s->heads == 0;
}

static void sizes_and_plan(void)
{
    enum { kUntouched = 77 };
    snapmla_step s = good_step();
    size_t plan = kUntouched, workspace = kUntouched;
    mutate(&s, sizeof s);
    const snapmla_result a = snapmla_plan_bytes(&s, &plan);
    const snapmla_result b = snapmla_decode_workspace(&s, &workspace);
    FUZZ_CHECK(is_listed(a) && a == b);
    if (a != SNAPMLA_OK) {
        FUZZ_CHECK(plan == kUntouched && workspace == kUntouched);
        check_call(snapmla_plan(&s), a, 0);
        return;
    }
    FUZZ_CHECK((plan == 0) == empty_step(&s) && workspace <= (size_t)1 << 54);
    check_call(snapmla_plan(&s), snapmla_plan(&s), empty_step(&s));
    s.seq_lens = (const int32_t *)at(1);
    s.plan = at(2);
    s.plan_bytes = plan;
    FUZZ_CHECK(empty_step(&s) || is_device(snapmla_plan(&s)));
    s.plan_bytes = plan - 1;
    FUZZ_CHECK(empty_step(&s) || snapmla_plan(&s) == SNAPMLA_ERROR_PLAN_BYTES);
}

static void decode(void)
{
    snapmla_decode_desc d, resolved, again, untouched;
    memset(&d, 0, sizeof d);
    d.step = good_step();
    d.cache = good_cache();
    d.step.page_size = d.cache.page_size;
    d.block_table = (const int32_t *)at(6);
    d.block_table_width = fuzz_int(100);
    d.softmax_scale = 0.1352f;
    d.causal = (int32_t)fuzz_bytes(1) & 1;
    if (fuzz_one_in(2)) {
        d.q = at(7);
    } else {
        d.q_content = at(11);
        d.q_scale = (const float *)at(12);
        d.q_rope = at(13);
    }
    d.out = at(8);
    d.lse = (float *)at(9);
    d.workspace = at(10);
    d.workspace_bytes = (size_t)1 << 40;
    mutate(&d, sizeof d);
    d.workspace = possible(d.workspace);
    memset(&resolved, 0xa5, sizeof resolved);
    memset(&untouched, 0xa5, sizeof untouched);
    const snapmla_result r = snapmla_resolve(&d, &resolved), decoded = snapmla_decode(&d);
    check_call(decoded, snapmla_decode(&d), empty_step(&d.step));
    FUZZ_CHECK(is_listed(r));
    if (r != SNAPMLA_OK) {
        FUZZ_CHECK(!memcmp(&resolved, &untouched, sizeof resolved));
        FUZZ_CHECK(decoded == r || is_device(r));
        return;
    }
    FUZZ_CHECK(decoded == SNAPMLA_OK || is_device(decoded));
    FUZZ_CHECK(snapmla_resolve(&resolved, &again) == SNAPMLA_OK);
    FUZZ_CHECK(!memcmp(&resolved, &again, sizeof again)); /* padding was copied, too */
    if (empty_step(&d.step)) return;

    /* what was accepted: no stride is smaller than a row, and the sizes are kept */
    size_t bytes;
    FUZZ_CHECK(snapmla_plan_bytes(&d.step, &bytes) == SNAPMLA_OK && d.step.plan_bytes >= bytes);
    FUZZ_CHECK(snapmla_decode_workspace(&d.step, &bytes) == SNAPMLA_OK && d.workspace_bytes >= bytes);
    FUZZ_CHECK(resolved.q_head_stride >= 576 && resolved.q_token_stride >= 576);
    FUZZ_CHECK(resolved.q_batch_stride >= 576 && resolved.out_batch_stride >= 512);
    FUZZ_CHECK(resolved.out_head_stride >= 512 && resolved.out_token_stride >= 512);
    FUZZ_CHECK(resolved.lse_batch_stride >= d.step.heads);
    FUZZ_CHECK((wide)d.step.batch * d.step.s_q * d.step.heads <= (wide)1 << 30);
    FUZZ_CHECK(resolved.block_table_stride >= resolved.block_table_width);
}

static snapmla_rotation good_rotation(void)
{
    snapmla_rotation r;
    memset(&r, 0, sizeof r);
    if (fuzz_one_in(2)) return r;
    r.positions = (const int64_t *)at(22);
    r.cosines = (const float *)at(23);
    if (fuzz_one_in(2)) r.sines = (const float *)at(24);
    return r;
}

static void quantize(void)
{
    snapmla_quantize_q_desc d;
    memset(&d, 0, sizeof d);
    d.tokens = fuzz_number(100);
    d.heads = fuzz_int(129);
    d.q = at(7);
    d.q_content = at(11);
    d.q_scale = (float *)at(12);
    d.q_rope = at(13);
    if (fuzz_one_in(2)) d.rope = at(21);
    d.rotation = good_rotation();
    mutate(&d, sizeof d);
    d.q = possible(d.q);
    d.rotation.cosines = (const float *)possible(d.rotation.cosines);
    check_call(snapmla_quantize_q(&d), snapmla_quantize_q(&d), d.tokens == 0 || d.heads == 0);
}

static void append(void)
{
    snapmla_append_desc d;
    memset(&d, 0, sizeof d);
    d.cache = good_cache();
    d.tokens = fuzz_number(100);
    d.latent = at(14);
    if (fuzz_one_in(2)) d.rope = at(21);
    d.slots = (const int64_t *)at(15);
    d.rotation = good_rotation();
    if (fuzz_one_in(2)) d.norm.weight = at(25);
    mutate(&d, sizeof d);
    d.latent = possible(d.latent);
    d.rotation.cosines = (const float *)possible(d.rotation.cosines);
    check_call(snapmla_append(&d), snapmla_append(&d), d.tokens == 0);
}

static void fetch(void)
{
    snapmla_fetch_desc d;
    memset(&d, 0, sizeof d);
    d.cache = good_cache();
    d.tokens = fuzz_number(100);
    d.latent = at(14);
    if (fuzz_one_in(2)) d.rope = at(21);
    if (fuzz_one_in(2)) {
        d.slots = (const int64_t *)at(15);
    } else {
        d.block_table = (const int32_t *)at(6);
        d.block_table_width = fuzz_int(100);
        d.batch = fuzz_int(100);
        d.row_starts = (const int32_t *)at(26);
    }
    mutate(&d, sizeof d);
    d.latent = possible(d.latent);
    check_call(snapmla_fetch(&d), snapmla_fetch(&d), d.tokens == 0);
}

static void copy_pages(void)
{
    enum { kLayers = 100 }; /* more than one launch takes */
    static snapmla_cache from[kLayers], to[kLayers];
    snapmla_copy_pages_desc d;
    memset(&d, 0, sizeof d);
    from[0] = to[0] = good_cache();
    for (int i = 1; i < kLayers; i++) from[i] = to[i] = from[0];
    d.layers = 1 + (int32_t)fuzz_bytes(1) % kLayers;
    d.count = fuzz_number(50);
    d.pairs = (const int32_t *)at(27);
    mutate(&d, sizeof d);
    mutate(&from[fuzz_bytes(1) % kLayers], sizeof from[0]);
    mutate(&to[fuzz_bytes(1) % kLayers], sizeof to[0]);
    if (d.layers > kLayers) d.layers = kLayers; /* the arrays are on the host, and trusted */
    d.source = fuzz_one_in(32) ? NULL : from;
    d.destination = fuzz_one_in(32) ? NULL : to;
    check_call(snapmla_copy_pages(&d), snapmla_copy_pages(&d), d.layers == 0 || d.count == 0);
}

static void import(void)
{
    snapmla_import_desc d;
    memset(&d, 0, sizeof d);
    d.cache = good_cache();
    d.format = fuzz_one_in(2) ? SNAPMLA_SOURCE_RECORD_656 : SNAPMLA_SOURCE_BF16;
    d.source_page_size = fuzz_one_in(2) ? 0 : 1 << fuzz_bytes(1) % 11;
    d.source = at(28);
    d.tokens = fuzz_number(100);
    if (fuzz_one_in(2)) d.source_slots = (const int64_t *)at(29);
    if (fuzz_one_in(2)) d.slots = (const int64_t *)at(15);
    mutate(&d, sizeof d);
    check_call(snapmla_import(&d), snapmla_import(&d), d.tokens == 0);
}

static void merge(void)
{
    snapmla_merge_desc d;
    memset(&d, 0, sizeof d);
    d.parts = 1 + (int32_t)fuzz_bytes(1);
    d.dim = 8 * (int32_t)fuzz_bytes(1);
    d.rows = fuzz_number(100);
    d.part_out = at(16);
    d.part_lse = (const float *)at(17);
    d.out = at(8);
    d.lse = (float *)at(9);
    mutate(&d, sizeof d);
    check_call(snapmla_merge(&d), snapmla_merge(&d), d.rows == 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static void (*const calls[])(void) = {sizes_and_plan, decode, decode, quantize, append,
                                          fetch, copy_pages, import, merge};
    static int hidden;
    if (!hidden) {
        hidden = 1;
        setenv("CUDA_VISIBLE_DEVICES", "", 1);
        FUZZ_CHECK(snapmla_device_supported(0, NULL) == SNAPMLA_ERROR_CUDA);
    }
    fuzz_begin(data, size);
    calls[fuzz_bytes(1) % (sizeof calls / sizeof calls[0])]();
    fuzz_finish();
    return 0;
}
