/* fuzz_ref.c - the functions of snapmla_ref.h on any descs.

   For each input this program decides by its own arithmetic, in 128 bits, whether the desc is legal,
   and how long every array must be.  A legal desc gets arrays of exactly that length and must be
   accepted; an illegal one must be refused.  Legal descs whose arrays cannot be had are left out. */
#include <math.h>

#define SNAPMLA_REF_IMPLEMENTATION
#include "snapmla_ref.h"

#include "fuzz.h"

enum { kFew = 16 }; /* tokens, requests, ... of a call that is carried out */

static const wide most64 = INT64_MAX;

/* 0 becomes the default; true if the stride can be used. */
static int stride_ok(int64_t *stride, wide dense, wide row)
{
    if (*stride == 0 && dense > most64) return 0;
    if (*stride == 0) *stride = (int64_t)dense;
    return *stride >= row;
}

static wide greater(wide a, wide b) { return a > b ? a : b; }

/* a * b of numbers that are not negative; what cannot be had anyway is cut, or 128 bits overflow, too */
static wide times(wide a, wide b)
{
    const wide most = (wide)1 << 80;
    if (a == 0 || b == 0) return 0;
    return a > most / b ? most : a * b;
}

/* Elements up to the end of the last row. */
static wide rows_end(wide rows, wide stride, wide row)
{
    return rows > 0 ? times(rows - 1, stride) + row : 0;
}

static int present(void) { return !fuzz_one_in(40); }

/* NULL, or something that must not be read. */
#define MAYBE(field) ((field) = present() ? (void *)nowhere : NULL)
static _Alignas(16) char nowhere[16];

/* ---- caches ---- */
static int32_t latent_dim(void)
{
    return fuzz_one_in(20) ? fuzz_int(200) : 32 * (int32_t)(fuzz_bytes(1) % 4);
}

static int32_t rope_dim(void)
{
    return fuzz_one_in(20) ? fuzz_int(90) : 16 * ((int32_t)(fuzz_bytes(1) % 5) - 1);
}

static snapmla_ref_cache any_cache(void)
{
    snapmla_ref_cache c;
    memset(&c, 0, sizeof c);
    c.pages = fuzz_number(6);
    c.page_size = fuzz_int(10);
    c.latent_dim = latent_dim();
    c.rope_dim = rope_dim();
    if (fuzz_one_in(4)) c.content_page_stride = fuzz_multiple(250, 8);
    if (fuzz_one_in(4)) c.scale_page_stride = fuzz_number(20);
    if (fuzz_one_in(4)) c.rope_page_stride = fuzz_multiple(250, 4);
    MAYBE(c.content);
    MAYBE(c.scale);
    MAYBE(c.rope);
    return c;
}

static int cache_ok(snapmla_ref_cache *c, int planes)
{
    const snapmla_ref_cache had = *c;
    if (!c->latent_dim) c->latent_dim = 512;
    if (c->latent_dim < 1 || c->latent_dim > 65536 || c->latent_dim % 32) return 0;
    if (!c->rope_dim) c->rope_dim = 64;
    if (c->rope_dim < 0) c->rope_dim = 0;
    if (c->rope_dim > 65536 || c->rope_dim % 16) return 0;
    if (!c->page_size) c->page_size = 64;
    if (c->page_size < 1 || c->pages < 0) return 0;
    if ((wide)c->pages * c->page_size * (c->latent_dim + c->rope_dim) > most64) return 0;
    if (!planes) return 1;
    if (c->pages && (!had.content || !had.scale || (c->rope_dim && !had.rope))) return 0;
    const wide p = c->page_size;
    return stride_ok(&c->content_page_stride, p * c->latent_dim, p * c->latent_dim) &&
           stride_ok(&c->scale_page_stride, p, p) &&
           stride_ok(&c->rope_page_stride, p * c->rope_dim, p * c->rope_dim) &&
           (wide)c->pages * c->content_page_stride <= most64 &&
           (wide)c->pages * c->scale_page_stride <= most64 &&
           (wide)c->pages * c->rope_page_stride <= most64;
}

/* `c` is resolved; the planes go into *to. */
static void cache_new(const snapmla_ref_cache *c, snapmla_ref_cache *to)
{
    const wide p = c->page_size;
    if (c->pages == 0) return;
    to->content = (uint8_t *)fuzz_new(rows_end(c->pages, c->content_page_stride, p * c->latent_dim));
    to->scale = (float *)fuzz_new(4 * rows_end(c->pages, c->scale_page_stride, p));
    to->rope = (uint16_t *)fuzz_new(2 * rows_end(c->pages, c->rope_page_stride, p * c->rope_dim));
}

/* ---- arrays of numbers; n <= kFew ---- */
static int64_t *numbers64(int64_t n, int below)
{
    int64_t *x = (int64_t *)fuzz_new(8 * (wide)n);
    for (int64_t i = 0; x && i < n; i++) x[i] = fuzz_one_in(16) ? -1 : fuzz_number(below);
    return x;
}

static int32_t *numbers32(int64_t n, int below)
{
    int32_t *x = (int32_t *)fuzz_new(4 * (wide)n);
    for (int64_t i = 0; x && i < n; i++) x[i] = fuzz_one_in(16) ? -1 : fuzz_int(below);
    return x;
}

static int all_below(const int64_t *x, int64_t n, wide end)
{
    for (int64_t i = 0; i < n; i++)
        if (x[i] >= end) return 0;
    return 1;
}

/* ---- rotation and norm ---- */
static snapmla_ref_rotation any_rotation(int64_t tokens)
{
    snapmla_ref_rotation r;
    memset(&r, 0, sizeof r);
    if (fuzz_one_in(2)) return r;
    r.positions = present() ? numbers64(tokens, 5) : NULL;
    MAYBE(*(void **)(void *)&r.cosines);
    if (fuzz_one_in(2)) r.sines = (const float *)(void *)nowhere;
    if (fuzz_one_in(3)) r.table_stride = fuzz_number(100);
    r.layout = (snapmla_ref_rope_layout)(fuzz_bytes(1) % 16 == 15 ? 2 : fuzz_bytes(1) % 2);
    return r;
}

static int rotation_ok(snapmla_ref_rotation *r, int64_t tokens, int32_t rope)
{
    if (!r->positions && !r->cosines) return 1;
    if (!r->positions || !r->cosines) return 0;
    if ((int)r->layout != 0 && (int)r->layout != 1) return 0;
    if (!stride_ok(&r->table_stride, r->sines ? rope / 2 : rope, r->sines ? rope / 2 : rope)) return 0;
    for (int64_t i = 0; i < tokens; i++)
        if (r->positions[i] < 0) return 0;
    return 1;
}

static void rotation_new(const snapmla_ref_rotation *r, snapmla_ref_rotation *to, int64_t tokens,
                         int32_t rope)
{
    wide last = 0;
    if (!r->positions) return;
    for (int64_t i = 0; i < tokens; i++) last = greater(last, r->positions[i]);
    to->cosines = (const float *)fuzz_new(4 * (times(last, r->table_stride) + (r->sines ? rope / 2 : rope)));
    if (r->sines) to->sines = (const float *)fuzz_new(4 * (times(last, r->table_stride) + rope / 2));
}

static void check(int got, int legal) { FUZZ_CHECK(got == (legal ? 0 : -1)); }

/* A legal desc is carried out only if its arrays could be had. */
#define CHECK_CALL(call, legal)                                     \
    do {                                                            \
        if (!(legal) || fuzz_taken <= kFuzzMost) check(call, legal); \
    } while (0)

/* ---- rows of append and fetch ---- */
static int rows_ok(snapmla_ref_cache *c, int64_t tokens, const void *latent, int64_t *latent_stride,
                   const void *rope, int64_t *rope_stride)
{
    if (!cache_ok(c, 1) || tokens < 0) return 0;
    if (tokens == 0) return 1;
    const wide row = c->latent_dim + (rope ? 0 : c->rope_dim);
    return latent && stride_ok(latent_stride, row, row) &&
           (!rope || stride_ok(rope_stride, c->rope_dim, c->rope_dim));
}

static void do_append(void)
{
    snapmla_ref_append_desc d, x;
    memset(&d, 0, sizeof d);
    d.cache = any_cache();
    d.tokens = fuzz_number(8);
    const int64_t n = d.tokens >= 0 && d.tokens <= kFew ? d.tokens : 0;
    MAYBE(*(void **)(void *)&d.latent);
    if (fuzz_one_in(3)) d.rope = (const uint16_t *)(void *)nowhere;
    if (fuzz_one_in(4)) d.latent_stride = fuzz_number(200);
    if (fuzz_one_in(4)) d.rope_stride = fuzz_number(100);
    d.slots = present() ? numbers64(n, 40) : NULL;
    d.rotation = any_rotation(n);
    if (fuzz_one_in(2)) {
        const uint32_t eps = (uint32_t)fuzz_bytes(4);
        d.norm.weight = nowhere;
        d.norm.weight_type = (snapmla_ref_number)(fuzz_bytes(1) % 16 == 15 ? 7 : fuzz_bytes(1) % 2);
        if (fuzz_one_in(3)) memcpy(&d.norm.eps, &eps, 4);
    }
    x = d;
    int legal = rows_ok(&x.cache, x.tokens, x.latent, &x.latent_stride, x.rope, &x.rope_stride);
    if (legal && d.tokens > 0) {
        const snapmla_ref_norm *m = &d.norm;
        if (d.tokens > n) return;
        legal = d.slots && all_below(d.slots, n, (wide)x.cache.pages * x.cache.page_size) &&
                rotation_ok(&x.rotation, n, x.cache.rope_dim) &&
                (!m->weight || (((int)m->weight_type == 0 || (int)m->weight_type == 1) &&
                                m->eps >= 0 && isfinite(m->eps)));
    }
    if (legal && d.tokens > 0) {
        const wide row = x.cache.latent_dim + (d.rope ? 0 : x.cache.rope_dim);
        cache_new(&x.cache, &d.cache);
        rotation_new(&x.rotation, &d.rotation, n, x.cache.rope_dim);
        d.latent = (const uint16_t *)fuzz_new(2 * rows_end(n, x.latent_stride, row));
        if (d.rope)
            d.rope = (const uint16_t *)fuzz_new(2 * rows_end(n, x.rope_stride, x.cache.rope_dim));
        if (d.norm.weight)
            d.norm.weight = fuzz_new((wide)x.cache.latent_dim * (d.norm.weight_type ? 4 : 2));
    }
    CHECK_CALL(snapmla_ref_append(&d), legal);
}

static void do_fetch(void)
{
    snapmla_ref_fetch_desc d, x;
    memset(&d, 0, sizeof d);
    d.cache = any_cache();
    d.tokens = fuzz_number(12);
    const int64_t n = d.tokens >= 0 && d.tokens <= kFew ? d.tokens : 0;
    const int ranges = fuzz_one_in(2);
    MAYBE(d.latent);
    if (fuzz_one_in(3)) d.rope = (uint16_t *)(void *)nowhere;
    if (fuzz_one_in(4)) d.latent_stride = fuzz_number(200);
    if (fuzz_one_in(4)) d.rope_stride = fuzz_number(100);
    if (ranges != fuzz_one_in(30)) {
        d.block_table_width = fuzz_int(5);
        d.batch = fuzz_int(4);
        if (fuzz_one_in(4)) d.block_table_stride = fuzz_number(7);
        if (present()) d.block_table = (const int32_t *)(void *)nowhere;
    }
    if (!ranges) d.slots = numbers64(n, 40);
    x = d;
    int legal = rows_ok(&x.cache, x.tokens, x.latent, &x.latent_stride, x.rope, &x.rope_stride);
    wide rows = d.tokens;
    if (legal && d.tokens > 0 && d.slots) {
        if (d.tokens > n) return;
        legal = !d.block_table && all_below(d.slots, n, (wide)x.cache.pages * x.cache.page_size);
    } else if (legal && d.tokens > 0) {
        legal = d.block_table && d.batch >= 0 && d.block_table_width >= 0 &&
                stride_ok(&x.block_table_stride, d.block_table_width, d.block_table_width);
        if (d.batch > kFew || d.block_table_width > kFew || x.block_table_stride > kFew) return;
        if (present() && d.batch >= 0) {
            int32_t *starts = numbers32(d.batch + 1, 3);
            for (int32_t b = 1; b <= d.batch; b++) {
                if (starts[b - 1] < 0 || starts[b - 1] > 1000) return; /* long loops, nothing else */
                if (!fuzz_one_in(30)) starts[b] = (starts[b] & 3) + starts[b - 1];
            }
            if (starts[d.batch] > 1000) return;
            d.row_starts = starts;
        }
        if (fuzz_one_in(2) && d.batch >= 0) d.first = numbers32(d.batch, 30);
        legal = legal && d.row_starts;
        if (legal) {
            const wide entries = rows_end(d.batch, x.block_table_stride, d.block_table_width);
            int32_t *table = numbers32((int64_t)entries, 6);
            d.block_table = table;
            rows = d.row_starts[d.batch];
            legal = d.row_starts[0] >= 0 && rows <= d.tokens;
            for (int32_t b = 0; legal && b < d.batch; b++) {
                legal = d.row_starts[b] <= d.row_starts[b + 1];
                for (int32_t i = 0; legal && i < d.row_starts[b + 1] - d.row_starts[b]; i++) {
                    const int64_t position = (d.first ? (int64_t)d.first[b] : 0) + i;
                    if (position < 0 || position / x.cache.page_size >= d.block_table_width) continue;
                    legal = table[b * x.block_table_stride + position / x.cache.page_size] <
                            x.cache.pages;
                }
            }
        }
    }
    if (legal && d.tokens > 0) {
        const wide row = x.cache.latent_dim + (d.rope ? 0 : x.cache.rope_dim);
        cache_new(&x.cache, &d.cache);
        d.latent = (uint16_t *)fuzz_new(2 * rows_end(rows, x.latent_stride, row));
        if (d.rope) d.rope = (uint16_t *)fuzz_new(2 * rows_end(rows, x.rope_stride, x.cache.rope_dim));
    }
    CHECK_CALL(snapmla_ref_fetch(&d), legal);
}

static void do_copy_pages(void)
{
    enum { kLayers = 3 };
    snapmla_ref_cache from[kLayers], to[kLayers], x[2];
    snapmla_ref_copy_pages_desc d;
    memset(&d, 0, sizeof d);
    d.layers = fuzz_int(kLayers + 1);
    d.count = fuzz_number(5);
    if (d.layers > kLayers || d.count > kFew) return;
    d.source = present() ? from : NULL;
    d.destination = present() ? to : NULL;
    d.pairs = present() ? numbers32(2 * (d.count > 0 ? d.count : 0), 6) : NULL;
    int legal = d.layers >= 0 && d.count >= 0;
    const int empty = d.layers == 0 || d.count == 0;
    from[0] = any_cache();
    for (int l = 0; l < kLayers; l++) {
        from[l] = l && !fuzz_one_in(20) ? from[0] : l ? any_cache() : from[0];
        to[l] = fuzz_one_in(20) ? any_cache() : from[l];
        if (fuzz_one_in(4)) to[l].pages = fuzz_number(8);
        if (fuzz_one_in(4)) to[l].content_page_stride = fuzz_multiple(255, 16);
    }
    if (!empty) legal = legal && d.source && d.destination && d.pairs;
    for (int32_t l = 0; legal && !empty && l < d.layers; l++) {
        x[0] = from[l];
        x[1] = to[l];
        legal = cache_ok(&x[0], 1) && cache_ok(&x[1], 1) && x[0].page_size == x[1].page_size &&
                x[0].latent_dim == x[1].latent_dim && x[0].rope_dim == x[1].rope_dim;
        for (int64_t i = 0; legal && i < d.count; i++)
            legal = d.pairs[2 * i] < x[0].pages && d.pairs[2 * i + 1] < x[1].pages;
        if (!legal) break;
        cache_new(&x[0], &from[l]);
        cache_new(&x[1], &to[l]);
    }
    CHECK_CALL(snapmla_ref_copy_pages(&d), legal);
}

static void do_import(void)
{
    snapmla_ref_import_desc d, x;
    memset(&d, 0, sizeof d);
    d.cache = any_cache();
    d.format = (snapmla_ref_source_format)(fuzz_bytes(1) % 16 == 15 ? 2 : fuzz_bytes(1) % 2);
    if ((int)d.format == 1 && !fuzz_one_in(8)) d.cache.latent_dim = d.cache.rope_dim = 0;
    d.source_page_size = fuzz_int(9);
    d.tokens = fuzz_number(8);
    const int64_t n = d.tokens >= 0 && d.tokens <= kFew ? d.tokens : 0;
    MAYBE(*(void **)(void *)&d.source);
    if (fuzz_one_in(4)) d.source_row_stride = fuzz_multiple(240, 4);
    if (fuzz_one_in(4)) d.source_page_stride = fuzz_multiple(240, 32);
    if (fuzz_one_in(2)) d.source_slots = numbers64(n, 30);
    if (fuzz_one_in(2)) d.slots = numbers64(n, 30);
    x = d;
    int legal = cache_ok(&x.cache, 1) && d.tokens >= 0 && ((int)d.format == 0 || (int)d.format == 1);
    if (legal && d.tokens > 0) {
        const int records = (int)d.format == 1;
        const wide unit = records ? 656 : x.cache.latent_dim + x.cache.rope_dim;
        const wide end = (wide)x.cache.pages * x.cache.page_size;
        const int64_t *slots = d.slots ? d.slots : d.source_slots;
        if (!x.source_page_size) x.source_page_size = x.cache.page_size;
        const wide page = x.source_page_size;
        legal = (!records || (x.cache.latent_dim == 512 && x.cache.rope_dim == 64)) && page >= 1 &&
                d.source && stride_ok(&x.source_row_stride, unit, unit) &&
                stride_ok(&x.source_page_stride, page * x.source_row_stride,
                          (page - 1) * x.source_row_stride + unit);
        if (legal && d.tokens > n && (slots || d.tokens <= end)) return;
        legal = legal && (slots ? all_below(slots, n, end) : d.tokens <= end);
        if (legal) {
            wide last = 0;
            for (int64_t i = 0; i < n; i++) {
                const wide from = d.source_slots ? d.source_slots[i] : i;
                if (from < 0 || (slots && slots[i] < 0)) continue;
                last = greater(last, times(from / page, x.source_page_stride) +
                                         times(from % page, x.source_row_stride) + unit);
            }
            cache_new(&x.cache, &d.cache);
            d.source = fuzz_new(last * (records ? 1 : 2));
        }
    }
    CHECK_CALL(snapmla_ref_import(&d), legal);
}

static void do_quantize(void)
{
    snapmla_ref_quantize_q_desc d, x;
    snapmla_ref_cache dims;
    memset(&d, 0, sizeof d);
    memset(&dims, 0, sizeof dims);
    d.tokens = fuzz_number(8);
    d.heads = fuzz_int(5);
    d.latent_dim = dims.latent_dim = latent_dim();
    d.rope_dim = dims.rope_dim = rope_dim();
    const int64_t n = d.tokens >= 0 && d.tokens <= kFew ? d.tokens : 0;
    MAYBE(*(void **)(void *)&d.q);
    MAYBE(d.q_content);
    MAYBE(d.q_scale);
    MAYBE(d.q_rope);
    if (fuzz_one_in(3)) d.rope = (const uint16_t *)(void *)nowhere;
    if (fuzz_one_in(4)) d.q_head_stride = fuzz_number(200);
    if (fuzz_one_in(4)) d.q_token_stride = fuzz_multiple(240, 3);
    if (fuzz_one_in(4)) d.rope_head_stride = fuzz_number(100);
    if (fuzz_one_in(4)) d.rope_token_stride = fuzz_multiple(240, 2);
    d.rotation = any_rotation(n);
    x = d;
    int legal = cache_ok(&dims, 0) && d.tokens >= 0 && d.heads >= 0;
    if (legal && d.tokens > 0 && d.heads > 0) {
        const wide latent = dims.latent_dim, rope = dims.rope_dim, row = latent + (d.rope ? 0 : rope);
        legal = d.q && d.q_content && d.q_scale && (d.q_rope || !rope) &&
                stride_ok(&x.q_head_stride, row, row) &&
                stride_ok(&x.q_token_stride, (wide)d.heads * x.q_head_stride, row) &&
                (!d.rope || (stride_ok(&x.rope_head_stride, rope, rope) &&
                             stride_ok(&x.rope_token_stride, (wide)d.heads * x.rope_head_stride, rope)));
        legal = legal && (wide)d.tokens * d.heads <= most64;
        if (d.tokens > n && (legal || d.rotation.positions)) return; /* it reads all positions first */
        legal = legal && rotation_ok(&x.rotation, n, dims.rope_dim);
        if (legal) {
            const wide rows = (wide)n * d.heads;
            d.q = (const uint16_t *)fuzz_new(
                2 * rows_end(n, x.q_token_stride, rows_end(d.heads, x.q_head_stride, row)));
            if (d.rope)
                d.rope = (const uint16_t *)fuzz_new(2 * rows_end(n, x.rope_token_stride,
                                                    rows_end(d.heads, x.rope_head_stride, rope)));
            d.q_content = (uint8_t *)fuzz_new(rows * latent);
            d.q_scale = (float *)fuzz_new(4 * rows);
            d.q_rope = (uint16_t *)fuzz_new(2 * rows * rope);
            rotation_new(&x.rotation, &d.rotation, n, dims.rope_dim);
        }
    }
    CHECK_CALL(snapmla_ref_quantize_q(&d), legal);
}

static void do_merge(void)
{
    snapmla_ref_merge_desc d, x;
    memset(&d, 0, sizeof d);
    d.parts = fuzz_int(5);
    d.dim = fuzz_int(70);
    d.rows = fuzz_number(6);
    MAYBE(*(void **)(void *)&d.part_out);
    MAYBE(*(void **)(void *)&d.part_lse);
    MAYBE(d.out);
    MAYBE(d.lse);
    if (fuzz_one_in(4)) d.part_out_stride = fuzz_multiple(200, 2);
    if (fuzz_one_in(4)) d.part_lse_stride = fuzz_number(8);
    x = d;
    if (!x.dim) x.dim = 512;
    int legal = d.parts >= 0 && x.dim > 0 && d.rows >= 0;
    if (legal && d.rows > 0) {
        const wide all = (wide)d.rows * x.dim;
        legal = d.parts > 0 && d.part_out && d.part_lse && d.out && all <= most64 &&
                stride_ok(&x.part_out_stride, all, all) && stride_ok(&x.part_lse_stride, d.rows, d.rows);
        if (legal) {
            d.part_out = (const uint16_t *)fuzz_new(2 * rows_end(d.parts, x.part_out_stride, all));
            d.part_lse = (const float *)fuzz_new(4 * rows_end(d.parts, x.part_lse_stride, d.rows));
            d.out = (uint16_t *)fuzz_new(2 * all);
            if (d.lse) d.lse = (float *)fuzz_new(4 * (wide)d.rows);
        }
    }
    CHECK_CALL(snapmla_ref_merge(&d), legal);
}

static int32_t emulated(snapmla_ref_decode_desc *d)
{
    if (!fuzz_one_in(3)) d->block_tokens = 32 * (int32_t)(fuzz_bytes(1) % 4);
    if (fuzz_one_in(20)) d->block_tokens = 8 * (int32_t)fuzz_bytes(1);
    const int32_t block = d->block_tokens > 0 && d->block_tokens <= 1024 ? d->block_tokens : 64;
    if (fuzz_one_in(2)) d->split_tokens = fuzz_one_in(20) ? fuzz_int(250) : block * (1 + fuzz_one_in(2));
    d->fp8_tensor_core = fuzz_one_in(3) + fuzz_one_in(60);
    d->one_accumulator = fuzz_one_in(3) + fuzz_one_in(60);
    return block;
}

static void do_decode(void)
{
    snapmla_ref_decode_desc d, x;
    memset(&d, 0, sizeof d);
    const int kind = (int)(fuzz_bytes(1) % 32);
    d.fidelity = (snapmla_ref_fidelity)(kind == 31 ? 3 : kind % 3);
    d.batch = fuzz_int(4);
    d.s_q = fuzz_int(3);
    d.heads = fuzz_int(7);
    d.cache = any_cache();
    d.causal = (int32_t)fuzz_bytes(1) % 2 + fuzz_one_in(40);
    d.block_table_width = fuzz_int(20);
    if (fuzz_one_in(4)) d.block_table_stride = fuzz_number(24);
    if (fuzz_one_in(4)) d.max_seq_len = fuzz_int(100);
    const uint32_t bits = (uint32_t)fuzz_bytes(4);
    d.softmax_scale = 0.05f;
    if (fuzz_one_in(8)) memcpy(&d.softmax_scale, &bits, 4);
    if (fuzz_one_in(2)) (void)emulated(&d);
    if (present()) d.seq_lens = (const int32_t *)(void *)nowhere;
    if (present()) d.block_table = (const int32_t *)(void *)nowhere;
    if (present()) d.key = (const uint16_t *)(void *)nowhere;
    if (fuzz_one_in(2) == fuzz_one_in(40)) {
        d.q = (const uint16_t *)(void *)nowhere;
    } else {
        MAYBE(*(void **)(void *)&d.q_content);
        MAYBE(*(void **)(void *)&d.q_scale);
        MAYBE(*(void **)(void *)&d.q_rope);
    }
    if (!fuzz_one_in(4)) MAYBE(d.out);
    if (!fuzz_one_in(4)) MAYBE(d.out64);
    if (!fuzz_one_in(4)) MAYBE(d.lse);
    if (!fuzz_one_in(4)) MAYBE(d.lse64);
    if (fuzz_one_in(8)) d.q_head_stride = fuzz_number(200);
    if (fuzz_one_in(8)) d.q_token_stride = fuzz_multiple(240, 4);
    if (fuzz_one_in(8)) d.q_batch_stride = fuzz_multiple(240, 9);
    if (fuzz_one_in(8)) d.out_head_stride = fuzz_number(200);
    if (fuzz_one_in(8)) d.out_token_stride = fuzz_multiple(240, 4);
    if (fuzz_one_in(8)) d.out_batch_stride = fuzz_multiple(240, 9);
    if (fuzz_one_in(8)) d.lse_token_stride = fuzz_number(9);
    if (fuzz_one_in(8)) d.lse_batch_stride = fuzz_number(40);

    x = d;
    const int bf16 = (int)d.fidelity == SNAPMLA_REF_BF16;
    const int emulate = (int)d.fidelity == SNAPMLA_REF_EMULATED;
    const wide rows = (wide)d.s_q * d.heads;
    int legal = (int)d.fidelity <= 2 && d.batch >= 0 && d.s_q >= 0 && d.heads >= 0 &&
                cache_ok(&x.cache, !bf16);
    const wide latent = x.cache.latent_dim, rope = x.cache.rope_dim, dims = latent + rope;
    const wide page = x.cache.page_size;
    legal = legal && rows * d.batch * dims <= most64 / 8 && d.max_seq_len >= 0 &&
            d.block_table_width >= 0 && (d.causal == 0 || d.causal == 1) && d.softmax_scale > 0 &&
            isfinite(d.softmax_scale);
    if (legal && emulate) {
        if (!x.block_tokens) x.block_tokens = 64;
        legal = x.block_tokens > 0 && x.block_tokens <= 1024 && x.block_tokens % 32 == 0 &&
                d.split_tokens >= 0 && d.split_tokens % x.block_tokens == 0 &&
                (d.fp8_tensor_core | 1) == 1 && (d.one_accumulator | 1) == 1;
    }
    if (!legal || d.batch == 0 || rows == 0) {
        check(snapmla_ref_decode(&d), legal);
        return;
    }
    legal = d.seq_lens && (d.block_table || !d.block_table_width) &&
            stride_ok(&x.block_table_stride, d.block_table_width, d.block_table_width) &&
            (!bf16 || !x.cache.pages || d.key) && (d.out || d.out64 || d.lse || d.lse64) &&
            stride_ok(&x.q_head_stride, dims, dims) &&
            stride_ok(&x.q_token_stride, (wide)d.heads * x.q_head_stride, dims) &&
            stride_ok(&x.q_batch_stride, (wide)d.s_q * x.q_token_stride, dims) &&
            stride_ok(&x.out_head_stride, latent, latent) &&
            stride_ok(&x.out_token_stride, (wide)d.heads * x.out_head_stride, latent) &&
            stride_ok(&x.out_batch_stride, (wide)d.s_q * x.out_token_stride, latent) &&
            stride_ok(&x.lse_token_stride, d.heads, d.heads) &&
            stride_ok(&x.lse_batch_stride, (wide)d.s_q * x.lse_token_stride, d.heads);
    if (d.q) legal = legal && !d.q_content && !d.q_scale && !d.q_rope;
    else legal = legal && !bf16 && d.q_content && d.q_scale && (d.q_rope || !rope);
    if (!legal) {
        check(snapmla_ref_decode(&d), 0);
        return;
    }
    if (d.batch > kFew || d.block_table_width > 64 || rows > 64) return;
    const wide entries = rows_end(d.batch, x.block_table_stride, d.block_table_width);
    if (entries > kFuzzMost) return;
    int32_t *lens = numbers32(d.batch, 60);
    int32_t *table = numbers32((int64_t)entries,
                               (int)(x.cache.pages > 0 && x.cache.pages < 9 ? x.cache.pages : 6));
    if (fuzz_taken > kFuzzMost) return;
    d.seq_lens = lens;
    d.block_table = table;
    wide work = 0;
    for (int32_t b = 0; b < d.batch; b++) {
        const wide room = x.cache.pages ? d.block_table_width * page : 0;
        wide len = lens[b] < room ? lens[b] : room;
        if (d.max_seq_len && len > d.max_seq_len) len = d.max_seq_len;
        work += greater(len, 0) * rows * dims;
        for (wide i = 0; i * page < len; i++)
            if (table[b * x.block_table_stride + i] >= x.cache.pages) legal = 0;
    }
    if (work > 50000) return; /* nothing new in longer ones */
    cache_new(&x.cache, &d.cache);
    if (bf16) d.key = (const uint16_t *)fuzz_new(2 * (wide)x.cache.pages * page * dims);
    const wide all = d.batch * rows;
    if (d.q) {
        d.q = (const uint16_t *)fuzz_new(
            2 * rows_end(d.batch, x.q_batch_stride,
                         rows_end(d.s_q, x.q_token_stride, rows_end(d.heads, x.q_head_stride, dims))));
    } else {
        d.q_content = (const uint8_t *)fuzz_new(all * latent);
        d.q_scale = (const float *)fuzz_new(4 * all);
        d.q_rope = (const uint16_t *)fuzz_new(2 * all * rope);
    }
    if (d.out)
        d.out = (uint16_t *)fuzz_new(
            2 * rows_end(d.batch, x.out_batch_stride,
                         rows_end(d.s_q, x.out_token_stride,
                                  rows_end(d.heads, x.out_head_stride, latent))));
    if (d.out64) d.out64 = (double *)fuzz_new(8 * all * latent);
    if (d.lse)
        d.lse = (float *)fuzz_new(4 * rows_end(d.batch, x.lse_batch_stride,
                                               rows_end(d.s_q, x.lse_token_stride, d.heads)));
    if (d.lse64) d.lse64 = (double *)fuzz_new(8 * all);
    if (fuzz_taken <= kFuzzMost) check(snapmla_ref_decode(&d), legal);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static void (*const calls[])(void) = {do_append, do_fetch,  do_copy_pages, do_import,
                                          do_quantize, do_merge, do_decode,    do_decode};
    fuzz_begin(data, size);
    calls[fuzz_bytes(1) % 8]();
    fuzz_finish();
    return 0;
}
