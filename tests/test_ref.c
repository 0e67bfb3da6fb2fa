/* test_ref.c - snapmla_ref.h against hand-computed numbers, brute force and a second, slow
   implementation of everything it does.  Needs no GPU; ends within a minute on one core.

   cc -std=c99 -O2 -ffp-contract=off -I. tests/test_ref.c -o test_ref -lcmocka -lm
   "test_ref -t" also prints the error table of the emulated kernels. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>

#include <cmocka.h>

#include <float.h>
#include <stdio.h>

/* The library's memory goes through here, so that a test can count it and take it away. */
static void *counted_malloc(size_t bytes);
static void counted_free(void *pointer);
#define SNAPMLA_REF_MALLOC(bytes) counted_malloc(bytes)
#define SNAPMLA_REF_FREE(pointer) counted_free(pointer)

#include "../snapmla_ref.h" /* declarations first, as a user's header would */
#define SNAPMLA_REF_IMPLEMENTATION
#include "../snapmla_ref.h"
#include "../snapmla_ref.h"

#include "test_util.h"

static int live_blocks, calls_to_malloc, refuse_memory, print_table;

static void *counted_malloc(size_t bytes)
{
    calls_to_malloc++;
    if (refuse_memory) return NULL;
    live_blocks++;
    return malloc(bytes);
}

static void counted_free(void *pointer)
{
    live_blocks--;
    free(pointer);
}

static uint32_t bits_of(float x)
{
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return u;
}

static float from_bits(uint32_t u)
{
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}

/* ================================================================================================
   Conversions
   ============================================================================================== */

/* The value of an e4m3 code from the format's definition: bias 7, subnormals at 2^-6, no Inf. */
static double e4m3_value(int code)
{
    const int exponent = (code >> 3) & 15, fraction = code & 7;
    const double magnitude =
        exponent ? ldexp(1 + fraction / 8.0, exponent - 7) : ldexp(fraction / 8.0, -6);
    return code & 0x80 ? -magnitude : magnitude;
}

/* The nearest code by search over all of them, ties to the even code, saturating. */
static int e4m3_nearest(double x)
{
    const double magnitude = fabs(x);
    int best = 0;
    if (x != x) return 0x7f;
    for (int code = 1; code <= 0x7e; code++) {
        const double near = fabs(magnitude - e4m3_value(best));
        const double now = fabs(magnitude - e4m3_value(code));
        if (magnitude == INFINITY || now < near || (now == near && code % 2 == 0)) best = code;
    }
    return best | (signbit(x) ? 0x80 : 0);
}

static void check_e4m3(float x)
{
    const int got = snapmla_ref_e4m3_from_float(x), wanted = e4m3_nearest((double)x);
    TU_CHECK(got == wanted, "%.9g (0x%08x) gives 0x%02x, wanted 0x%02x", (double)x, bits_of(x), got,
             wanted);
}

static void e4m3_codes(void **state)
{
    (void)state;
    for (int code = 0; code < 256; code++) {
        const float value = snapmla_ref_e4m3_to_float((uint8_t)code);
        if ((code & 0x7f) == 0x7f) {
            TU_CHECK_INT(bits_of(value), 0x7fc00000);
            TU_CHECK_INT(snapmla_ref_e4m3_from_float(value), 0x7f);
            continue;
        }
        TU_CHECK_INT(bits_of(value), bits_of((float)e4m3_value(code))); /* bits: -0 counts */
        TU_CHECK_INT(snapmla_ref_e4m3_from_float(value), code);
    }
    TU_CHECK_NEAR(snapmla_ref_e4m3_to_float(0x7e), 448, 0);
    TU_CHECK_NEAR(snapmla_ref_e4m3_to_float(0x01), 0.001953125, 0);
}

static void e4m3_ties_and_their_neighbours(void **state)
{
    (void)state;
    for (int code = 0; code < 0x7e; code++) {
        const float low = (float)e4m3_value(code), high = (float)e4m3_value(code + 1);
        const float tie = (low + high) / 2; /* exact: both have 4 bits */
        const int even = code % 2 ? code + 1 : code;
        TU_CHECK_INT(snapmla_ref_e4m3_from_float(tie), even);
        TU_CHECK_INT(snapmla_ref_e4m3_from_float(-tie), even | 0x80);
        TU_CHECK_INT(snapmla_ref_e4m3_from_float(nextafterf(tie, 0)), code);
        TU_CHECK_INT(snapmla_ref_e4m3_from_float(nextafterf(tie, 1e9f)), code + 1);
        TU_CHECK_INT(snapmla_ref_e4m3_from_float(nextafterf(-tie, 0)), code | 0x80);
        TU_CHECK_INT(snapmla_ref_e4m3_from_float(nextafterf(-tie, -1e9f)), (code + 1) | 0x80);
        check_e4m3(nextafterf(low, high));
        check_e4m3(nextafterf(high, low));
    }
}

static void e4m3_special_values(void **state)
{
    (void)state;
    const float saturated[] = {448.0f, 448.1f, 463.9f,  464.0f,  464.1f,
                               480.0f, 1e30f,  FLT_MAX, INFINITY};
    const uint32_t nans[] = {0x7fc00000u, 0xffc00000u, 0x7f800001u, 0xff800001u, 0x7fffffffu};
    const float nothing[] = {0, FLT_MIN, 1e-40f, 1e-45f, 0.0009765625f};
    for (size_t i = 0; i < sizeof saturated / sizeof *saturated; i++) {
        TU_CHECK_INT(snapmla_ref_e4m3_from_float(saturated[i]), 0x7e);
        TU_CHECK_INT(snapmla_ref_e4m3_from_float(-saturated[i]), 0xfe);
    }
    for (size_t i = 0; i < sizeof nans / sizeof *nans; i++) {
        TU_CHECK_INT(snapmla_ref_e4m3_from_float(from_bits(nans[i])), 0x7f);
    }
    for (size_t i = 0; i < sizeof nothing / sizeof *nothing;
         i++) { /* 2^-10 is a tie and goes to 0 */
        TU_CHECK_INT(snapmla_ref_e4m3_from_float(nothing[i]), 0x00);
        TU_CHECK_INT(snapmla_ref_e4m3_from_float(-nothing[i]), 0x80);
    }
    TU_CHECK_INT(snapmla_ref_e4m3_from_float(nextafterf(0.0009765625f, 1)), 0x01);
}

static void e4m3_against_search(void **state)
{
    (void)state;
    tu_rng rng = tu_seed(1);
    const uint32_t low_halves[] = {0, 1, 0x7fff, 0x8000, 0x8001, 0xffff};
    for (uint32_t high = 0; high < 0x10000; high += 3) {
        check_e4m3(from_bits(high << 16 | low_halves[high % 6]));
    }
    for (int i = 0; i < 50000; i++) { /* where the format lives: 2^-12 to 2^10 */
        const uint32_t u = (115u << 23) + tu_below(&rng, 22u << 23);
        check_e4m3(from_bits(u | (tu_below(&rng, 2) << 31)));
    }
}

/* The value of an f16 code without its sign: bias 15, subnormals at 2^-14. */
static double f16_value(int code)
{
    const int exponent = code >> 10, fraction = code & 1023;
    return exponent ? ldexp(1 + fraction / 1024.0, exponent - 15) : ldexp(fraction / 1024.0, -14);
}

/* The nearest f16 by bisection, ties to the even code, saturating. */
static double f16_nearest(double x)
{
    const double magnitude = fabs(x);
    int low = 0, high = 0x7bff;
    if (x != x) return x;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (f16_value(middle) <= magnitude)
            low = middle;
        else
            high = middle;
    }
    const double below = magnitude - f16_value(low), above = f16_value(high) - magnitude;
    return copysign(f16_value(below < above || (below == above && low % 2 == 0) ? low : high), x);
}

static void check_f16(float x)
{
    const float got = smlar_f16(x), wanted = (float)f16_nearest((double)x);
    TU_CHECK(bits_of(got) == bits_of(wanted), "%.9g (0x%08x) gives %.9g, wanted %.9g", (double)x,
             bits_of(x), (double)got, (double)wanted);
}

static void f16_codes_ties_and_the_rest(void **state)
{
    (void)state;
    tu_rng rng = tu_seed(18);
    for (int sign = -1; sign <= 1; sign += 2) {
        for (int code = 0; code < 0x7bff; code++) {
            const float low = (float)f16_value(code), high = (float)f16_value(code + 1);
            const float tie = low + (high - low) / 2;
            check_f16((float)sign * low);
            check_f16((float)sign * tie);
            check_f16((float)sign * nextafterf(tie, 0));
            check_f16((float)sign * nextafterf(tie, 1e6f));
        }
        check_f16((float)sign * 65504);
        TU_CHECK_NEAR(smlar_f16((float)sign * 65520), sign * 65504.0, 0);
        TU_CHECK_NEAR(smlar_f16((float)sign * 3e38f), sign * 65504.0, 0);
        TU_CHECK_NEAR(smlar_f16((float)sign * INFINITY), sign * 65504.0, 0);
    }
    TU_CHECK(isnan(smlar_f16((float)NAN)), "NaN is lost");
    for (int i = 0; i < 300000; i++) {
        const float x = from_bits((uint32_t)tu_u64(&rng));
        if (fabsf(x) <= 65504) check_f16(x);
    }
}

static void bf16_all_codes(void **state)
{
    (void)state;
    for (uint32_t code = 0; code < 0x10000; code++) {
        const float value = snapmla_ref_bf16_to_float((uint16_t)code);
        const int is_nan = (code & 0x7fff) > 0x7f80;
        TU_CHECK_INT(bits_of(value), code << 16);
        TU_CHECK_INT(snapmla_ref_bf16_from_float(value), is_nan ? 0x7fc0 : code);
    }
}

static void bf16_ties_and_their_neighbours(void **state)
{
    (void)state;
    for (uint32_t code = 0; code < 0x7f80; code++) { /* the last tie is FLT_MAX's side of Inf */
        const uint32_t tie = code << 16 | 0x8000u;
        const uint32_t even = code % 2 ? code + 1 : code;
        for (uint32_t sign = 0; sign < 2; sign++) {
            const uint32_t s = sign << 31, s16 = sign << 15;
            TU_CHECK_INT(snapmla_ref_bf16_from_float(from_bits(s | tie)), s16 | even);
            TU_CHECK_INT(snapmla_ref_bf16_from_float(from_bits(s | (tie - 1))), s16 | code);
            TU_CHECK_INT(snapmla_ref_bf16_from_float(from_bits(s | (tie + 1))), s16 | (code + 1));
        }
    }
    TU_CHECK_INT(snapmla_ref_bf16_from_float(FLT_MAX), 0x7f80);
    TU_CHECK_INT(snapmla_ref_bf16_from_float(from_bits(0x7f800001u)), 0x7fc0);
    TU_CHECK_INT(snapmla_ref_bf16_from_float(from_bits(0xffffffffu)), 0x7fc0);
}

/* EXACT results go from double to bf16: once rounded, not twice. */
static void bf16_from_double_rounds_once(void **state)
{
    (void)state;
    const double tie = 1 + ldexp(1, -8); /* halfway between bf16 1 and 1 + 2^-7 */
    TU_CHECK_INT(smlar_bf16_from_double(tie), 0x3f80);
    TU_CHECK_INT(smlar_bf16_from_double(tie + ldexp(1, -40)), 0x3f81); /* float drops the 2^-40 */
    TU_CHECK_INT(smlar_bf16_from_double(tie - ldexp(1, -40)), 0x3f80);
    TU_CHECK_INT(smlar_bf16_from_double(3 * ldexp(1, -8) + 1 - ldexp(1, -40)), 0x3f81);
    TU_CHECK_INT(smlar_bf16_from_double(3 * ldexp(1, -8) + 1), 0x3f82);
    TU_CHECK_INT(smlar_bf16_from_double(-tie - ldexp(1, -40)), 0xbf81);
    TU_CHECK_INT(smlar_bf16_from_double(1e300), 0x7f80);
    TU_CHECK_INT(smlar_bf16_from_double(-INFINITY), 0xff80);
    TU_CHECK_INT(smlar_bf16_from_double((double)NAN), 0x7fc0);
    TU_CHECK_INT(smlar_bf16_from_double(-0.0), 0x8000);
}

/* ================================================================================================
   Quantisation
   ============================================================================================== */
enum { DIM = 32, ROPE = 16 };

static void quantize_known_rows(void **state)
{
    (void)state;
    uint16_t latent[DIM] = {0}, rope[ROPE] = {0}, rope_out[ROPE];
    uint8_t content[DIM];
    float scale;
    latent[3] = tu_bf16(-896); /* amax 896: scale 2 */
    latent[4] = tu_bf16(2);
    latent[5] = tu_bf16(72); /* 36: halfway between 36 and ... exact in e4m3 */
    latent[6] = tu_bf16(68); /* 34: a tie of 32 and 36, 32 is even */
    rope[0] = tu_bf16(3);
    snapmla_ref_quantize(latent, DIM, rope, ROPE, content, &scale, rope_out);
    TU_CHECK_NEAR(scale, 2, 0);
    TU_CHECK_INT(content[3], 0xfe);
    TU_CHECK_INT(content[4], 0x38);
    TU_CHECK_NEAR(snapmla_ref_e4m3_to_float(content[5]), 36, 0);
    TU_CHECK_NEAR(snapmla_ref_e4m3_to_float(content[6]), 32, 0);
    TU_CHECK_INT(content[0], 0);
    TU_CHECK_NEAR(tu_from_bf16(rope_out[0]), 1.5, 0);

    /* all zeros: the floor of the scale, and a rope that becomes huge but stays a number */
    memset(latent, 0, sizeof latent);
    latent[1] = 0x8000;
    snapmla_ref_quantize(latent, DIM, rope, ROPE, content, &scale, rope_out);
    TU_CHECK_INT(bits_of(scale), bits_of(1e-26f / 448.0f));
    TU_CHECK_INT(content[0], 0x00);
    TU_CHECK_INT(content[1], 0x80);
    TU_CHECK_INT(rope_out[0], snapmla_ref_bf16_from_float(3.0f / (1e-26f / 448.0f)));

    /* below the floor: bf16 subnormals */
    latent[2] = 0x0001;
    snapmla_ref_quantize(latent, DIM, rope, ROPE, content, &scale, rope_out);
    TU_CHECK_INT(bits_of(scale), bits_of(1e-26f / 448.0f));
    TU_CHECK_INT(content[2], 0x00); /* 9e-41 / 2e-29 */

    /* the largest finite bf16 */
    latent[2] = 0xff7f;
    rope[1] = 0x7f7f;
    snapmla_ref_quantize(latent, DIM, rope, ROPE, content, &scale, rope_out);
    TU_CHECK_INT(bits_of(scale), bits_of(snapmla_ref_bf16_to_float(0x7f7f) / 448.0f));
    TU_CHECK_INT(content[2], 0xfe);
    TU_CHECK_NEAR(tu_from_bf16(rope_out[1]), 448, 0);

    /* NaN and Inf in the rope of a finite latent: the formula */
    rope[2] = 0xff80;
    rope[3] = 0xffff;
    snapmla_ref_quantize(latent, DIM, rope, ROPE, content, &scale, rope_out);
    TU_CHECK(scale == scale && content[2] == 0xfe, "scale %g", (double)scale);
    TU_CHECK_INT(rope_out[2], 0xff80);
    TU_CHECK_INT(rope_out[3], 0x7fc0);
}

static void quantize_nan_and_inf(void **state)
{
    (void)state;
    const uint16_t specials[] = {0x7fc0, 0xffc0, 0x7f81, 0xffff, 0x7f80, 0xff80};
    for (size_t i = 0; i < sizeof specials / sizeof *specials; i++) {
        for (int at = 0; at < DIM; at += DIM - 1) {
            uint16_t latent[DIM], rope[ROPE] = {0}, rope_out[ROPE];
            uint8_t content[DIM];
            float scale;
            for (int d = 0; d < DIM; d++) latent[d] = tu_bf16(d);
            latent[at] = specials[i];
            snapmla_ref_quantize(latent, DIM, rope, ROPE, content, &scale, rope_out);
            TU_CHECK_INT(bits_of(scale), 0x7fc00000);
            for (int d = 0; d < DIM; d++) TU_CHECK_INT(content[d], 0x7f);
            for (int d = 0; d < ROPE; d++) TU_CHECK_INT(rope_out[d], 0x7fc0);
            snapmla_ref_quantize(latent, DIM, NULL, 0, content, &scale, NULL);
            TU_CHECK_INT(bits_of(scale), 0x7fc00000);
        }
    }
}

static void quantize_random_rows(void **state)
{
    (void)state;
    tu_rng rng = tu_seed(2);
    for (int row = 0; row < 400; row++) {
        uint16_t latent[DIM], rope[ROPE], rope_out[ROPE];
        uint8_t content[DIM];
        float scale, amax = 0, wanted;
        const double size = ldexp(1, (int)tu_below(&rng, 200) - 100);
        tu_fill_bf16(&rng, latent, DIM, 0, size);
        tu_fill_bf16(&rng, rope, ROPE, 0, size * 10);
        snapmla_ref_quantize(latent, DIM, rope, ROPE, content, &scale, rope_out);
        for (int d = 0; d < DIM; d++) amax = fmaxf(amax, fabsf((float)tu_from_bf16(latent[d])));
        wanted = fmaxf(amax, 1e-26f) / 448.0f;
        TU_CHECK_INT(bits_of(scale), bits_of(wanted));
        for (int d = 0; d < DIM; d++) {
            TU_CHECK_INT(content[d],
                         e4m3_nearest((double)((float)tu_from_bf16(latent[d]) / wanted)));
        }
        for (int d = 0; d < ROPE; d++) {
            TU_CHECK_INT(rope_out[d], tu_bf16((double)((float)tu_from_bf16(rope[d]) / wanted)));
        }
    }
}

/* ================================================================================================
   A world: a cache full of keys in scattered pages, queries, and a desc that is ready to run
   ============================================================================================== */
typedef struct world {
    snapmla_ref_decode_desc d;
    int32_t dim, lens[8];
    int64_t rows, slots;
    uint16_t *key, *q, *out;
    int32_t *table;
    float *lse;
    double *out64, *lse64;
} world;

/* Allocates everything; every cache byte and every output is NaN. */
static world bare_world(int batch, int s_q, int heads, int latent, int rope, int page_size,
                        int max_len)
{
    world w;
    snapmla_ref_cache *c = &w.d.cache;
    const int width = (max_len + page_size - 1) / page_size;
    memset(&w, 0, sizeof w);
    w.dim = latent + (rope > 0 ? rope : 0);
    w.rows = (int64_t)batch * s_q * heads;
    w.d.batch = batch;
    w.d.s_q = s_q;
    w.d.heads = heads;
    w.d.softmax_scale = (float)(1 / sqrt((double)w.dim));
    c->latent_dim = latent;
    c->rope_dim = rope;
    c->page_size = page_size;
    c->pages = (int64_t)batch * width + 1;
    w.slots = c->pages * page_size;
    c->content = (uint8_t *)tu_alloc((size_t)(w.slots * latent), 0xff);
    c->scale = (float *)tu_alloc((size_t)w.slots * sizeof(float), 0xff);
    c->rope = (uint16_t *)tu_alloc((size_t)(w.slots * (w.dim - latent)) * 2, 0xff);
    w.key = (uint16_t *)tu_alloc((size_t)(w.slots * w.dim) * 2, 0xff);
    w.table = (int32_t *)tu_alloc((size_t)(batch * width) * sizeof(int32_t), 0);
    w.q = (uint16_t *)tu_alloc((size_t)(w.rows * w.dim) * 2, 0);
    w.out = (uint16_t *)tu_alloc((size_t)(w.rows * latent) * 2, 0xff);
    w.out64 = (double *)tu_alloc((size_t)(w.rows * latent) * sizeof(double), 0xff);
    w.lse = (float *)tu_alloc((size_t)w.rows * sizeof(float), 0xff);
    w.lse64 = (double *)tu_alloc((size_t)w.rows * sizeof(double), 0xff);
    w.d.key = w.key;
    w.d.block_table = w.table;
    w.d.block_table_width = width;
    w.d.q = w.q;
    w.d.out = w.out;
    w.d.out64 = w.out64;
    w.d.lse = w.lse;
    w.d.lse64 = w.lse64;
    return w;
}

static void free_world(world *w)
{
    free(w->d.cache.content);
    free(w->d.cache.scale);
    free(w->d.cache.rope);
    free(w->key);
    free(w->table);
    free(w->q);
    free(w->out);
    free(w->out64);
    free(w->lse);
    free(w->lse64);
}

/* Slot of token t of request b. */
static int64_t slot_of(const world *w, int b, int64_t t)
{
    const int32_t size = w->d.cache.page_size;
    return (int64_t)w->table[b * w->d.block_table_width + t / size] * size + t % size;
}

static void append_slots(world *w, const int64_t *slots, int64_t tokens, const uint16_t *key)
{
    snapmla_ref_append_desc a;
    memset(&a, 0, sizeof a);
    a.cache = w->d.cache;
    a.tokens = tokens;
    a.latent = key;
    a.slots = slots;
    TU_CHECK_INT(snapmla_ref_append(&a), 0);
}

/* Random keys N(mean, 1), each token scaled by 2^N(0, spread), in pages in random order; queries
   N(0, q_std).  The last page stays unused. */
static world random_world(uint64_t seed, int batch, int s_q, int heads, int latent, int rope,
                          int page_size, int max_len, double mean, double q_std, double spread)
{
    world w = bare_world(batch, s_q, heads, latent, rope, page_size, max_len);
    tu_rng rng = tu_seed(seed);
    tu_permutation(&rng, w.table, batch * w.d.block_table_width, 0);
    tu_fill_bf16(&rng, w.q, w.rows * w.dim, 0, q_std);
    for (int b = 0; b < batch; b++) {
        w.lens[b] = max_len;
        for (int64_t t = 0; t < max_len; t++) {
            const int64_t slot = slot_of(&w, b, t);
            const double size = exp2(spread * tu_gauss(&rng));
            tu_fill_bf16(&rng, w.key + slot * w.dim, w.dim, mean * size, size);
            append_slots(&w, &slot, 1, w.key + slot * w.dim);
        }
    }
    return w;
}

/* Runs on the world's own lengths. */
static void decode(world *w)
{
    w->d.seq_lens = w->lens;
    TU_CHECK_INT(snapmla_ref_decode(&w->d), 0);
    TU_CHECK_INT(live_blocks, 0);
}

static void poison_outputs(world *w)
{
    memset(w->out, 0xff, (size_t)(w->rows * w->d.cache.latent_dim) * 2);
    memset(w->out64, 0xff, (size_t)(w->rows * w->d.cache.latent_dim) * sizeof(double));
    memset(w->lse, 0xff, (size_t)w->rows * sizeof(float));
    memset(w->lse64, 0xff, (size_t)w->rows * sizeof(double));
}

/* Two worlds of the same shape hold the same results, bit for bit. */
static void check_same_bits(const world *a, const world *b)
{
    const size_t cells = (size_t)(a->rows * a->d.cache.latent_dim);
    TU_CHECK_BYTES(a->out, b->out, cells * 2);
    TU_CHECK_BYTES(a->out64, b->out64, cells * sizeof(double));
    TU_CHECK_BYTES(a->lse, b->lse, (size_t)a->rows * sizeof(float));
    TU_CHECK_BYTES(a->lse64, b->lse64, (size_t)a->rows * sizeof(double));
}

/* The keys query token i of request b sees. */
static int64_t keys_seen(const world *w, int b, int i)
{
    const int64_t len = w->lens[b] > 0 ? w->lens[b] : 0;
    const int64_t seen = w->d.causal ? len - w->d.s_q + 1 + i : len;
    return seen < 0 ? 0 : seen;
}

/* Attention from its definition, in double, over what the desc's fidelity looks at. */
static void naive(const world *w, double *out, double *lse)
{
    const int latent = w->d.cache.latent_dim, rope = w->dim - latent;
    const int bf16 = w->d.fidelity == SNAPMLA_REF_BF16;
    const int64_t longest = (int64_t)w->d.block_table_width * w->d.cache.page_size;
    double *logit = (double *)tu_alloc((size_t)longest * sizeof(double), 0);
    double *q = (double *)tu_alloc((size_t)w->dim * sizeof(double), 0);
    uint8_t *content = (uint8_t *)tu_alloc((size_t)latent, 0);
    uint16_t *q_rope = (uint16_t *)tu_alloc((size_t)rope * 2, 0);
    for (int64_t row = 0; row < w->rows; row++) {
        const int b = (int)(row / (w->d.s_q * w->d.heads));
        const int64_t n = keys_seen(w, b, (int)(row / w->d.heads % w->d.s_q));
        const uint16_t *source = w->q + row * w->dim;
        double top = -INFINITY, sum = 0;
        float q_scale = 1;
        for (int d = 0; d < w->dim; d++) q[d] = tu_from_bf16(source[d]);
        if (!bf16 && w->d.mode != SNAPMLA_REF_MODE_PRECISE) {
            snapmla_ref_quantize(source, latent, source + latent, rope, content, &q_scale, q_rope);
            for (int d = 0; d < latent; d++) q[d] = e4m3_value(content[d]) * (double)q_scale;
            for (int d = 0; d < rope; d++)
                q[latent + d] = tu_from_bf16(q_rope[d]) * (double)q_scale;
        }
        for (int d = 0; d < latent; d++) out[row * latent + d] = 0;
        for (int pass = 0; pass < 2; pass++) {
            for (int64_t t = 0; t < n; t++) {
                const int32_t page =
                    w->table[b * w->d.block_table_width + t / w->d.cache.page_size];
                const int64_t slot = page < 0 ? 0 : slot_of(w, b, t);
                const double scale = bf16 ? 1 : (double)w->d.cache.scale[slot];
                if (page < 0) continue;
                if (!pass) {
                    double s = 0;
                    for (int d = 0; d < w->dim; d++) {
                        const double k =
                            bf16         ? tu_from_bf16(w->key[slot * w->dim + d])
                            : d < latent ? e4m3_value(w->d.cache.content[slot * latent + d])
                                         : tu_from_bf16(w->d.cache.rope[slot * rope + d - latent]);
                        s += q[d] * k * scale;
                    }
                    logit[t] = s * (double)w->d.softmax_scale;
                    if (logit[t] > top) top = logit[t];
                    continue;
                }
                logit[t] = exp(logit[t] - top);
                sum += logit[t];
                for (int d = 0; d < latent; d++) {
                    const double v =
                        bf16 ? tu_from_bf16(w->key[slot * w->dim + d])
                             : e4m3_value(w->d.cache.content[slot * latent + d]) * scale;
                    out[row * latent + d] += logit[t] * v;
                }
            }
        }
        for (int d = 0; d < latent && sum > 0; d++) out[row * latent + d] /= sum;
        lse[row] = sum > 0 ? top + log(sum) : -INFINITY;
    }
    free(logit);
    free(q);
    free(content);
    free(q_rope);
}

/* ================================================================================================
   Append and fetch
   ============================================================================================== */

static void append_writes_its_slots_and_nothing_else(void **state)
{
    (void)state;
    const int sizes[] = {1, 2, 16, 64, 1024};
    tu_rng rng = tu_seed(3);
    for (int i = 0; i < 5; i++) {
        world w = bare_world(1, 1, 1, DIM, ROPE, sizes[i], 3 * sizes[i]);
        const int64_t slots[4] = {w.slots - 1, -1, sizes[i], -123456789012};
        uint16_t latent[4 * 40], rope[4 * 20];
        snapmla_ref_append_desc a;
        tu_fill_bf16(&rng, latent, 4 * 40, 0, 1);
        tu_fill_bf16(&rng, rope, 4 * 20, 0, 1);
        memset(&a, 0, sizeof a);
        a.cache = w.d.cache;
        a.tokens = 4;
        a.latent = latent;
        a.latent_stride = 40;
        a.rope = rope;
        a.rope_stride = 20;
        a.slots = slots;
        TU_CHECK_INT(snapmla_ref_append(&a), 0);
        for (int64_t slot = 0; slot < w.slots; slot++) {
            const int token = slot == slots[0] ? 0 : slot == slots[2] ? 2 : -1;
            uint8_t content[DIM];
            uint16_t rope_out[ROPE];
            float scale;
            memset(content, 0xff, sizeof content);
            memset(rope_out, 0xff, sizeof rope_out);
            memset(&scale, 0xff, sizeof scale);
            if (token >= 0) {
                snapmla_ref_quantize(latent + token * 40, DIM, rope + token * 20, ROPE, content,
                                     &scale, rope_out);
            }
            TU_CHECK_BYTES(w.d.cache.content + slot * DIM, content, DIM);
            TU_CHECK_BYTES(w.d.cache.scale + slot, &scale, 4);
            TU_CHECK_BYTES(w.d.cache.rope + slot * ROPE, rope_out, 2 * ROPE);
        }
        free_world(&w);
    }
}

/* The three planes inside one record per page, with gaps. */
static void append_into_records(void **state)
{
    (void)state;
    enum { PAGE = 16, PAGES = 5, RECORD = 2048 };
    world w = random_world(4, 1, 1, 2, DIM, ROPE, PAGE, PAGE * PAGES, 0.5, 1, 0);
    world r = random_world(4, 1, 1, 2, DIM, ROPE, PAGE, PAGE * PAGES, 0.5, 1, 0);
    unsigned char *record = (unsigned char *)tu_guard_alloc((PAGES + 1) * RECORD, 0xff);
    snapmla_ref_cache c = r.d.cache;
    c.content = record;
    c.content_page_stride = RECORD;
    c.scale = (float *)(void *)(record + PAGE * DIM + 64);
    c.scale_page_stride = RECORD / 4;
    c.rope = (uint16_t *)(void *)(record + PAGE * DIM + 64 + PAGE * 4 + 32);
    c.rope_page_stride = RECORD / 2;
    free(r.d.cache.content);
    free(r.d.cache.scale);
    free(r.d.cache.rope);
    r.d.cache = c;
    for (int64_t t = 0; t < PAGE * PAGES; t++) {
        const int64_t slot = slot_of(&r, 0, t);
        append_slots(&r, &slot, 1, r.key + slot * r.dim);
    }
    for (int f = 0; f < 3; f++) {
        w.d.fidelity = r.d.fidelity = (snapmla_ref_fidelity)f;
        decode(&w);
        decode(&r);
        check_same_bits(&w, &r);
    }
    TU_CHECK(tu_guard_intact(record, (PAGES + 1) * RECORD), "records overrun");
    for (int page = 0; page < PAGES; page++) { /* the gap behind content */
        TU_CHECK_FILLED(record + page * RECORD + PAGE * DIM, 0xff, 64);
    }
    tu_guard_free(record);
    r.d.cache.content = NULL;
    r.d.cache.scale = NULL;
    r.d.cache.rope = NULL;
    free_world(&r);
    free_world(&w);
}

static void fetch_dequantises(void **state)
{
    (void)state;
    tu_rng rng = tu_seed(5);
    world w = random_world(5, 1, 1, 1, 64, 16, 4, 40, 0, 1, 3);
    const int64_t slots[4] = {slot_of(&w, 0, 7), -1, slot_of(&w, 0, 39), slot_of(&w, 0, 7)};
    uint16_t rows[4 * 90], ropes[4 * 30];
    snapmla_ref_fetch_desc f;
    memset(&f, 0, sizeof f);
    f.cache = w.d.cache;
    f.tokens = 4;
    f.slots = slots;
    for (int separate = 0; separate < 2; separate++) {
        memset(rows, 0xee, sizeof rows);
        memset(ropes, 0xee, sizeof ropes);
        f.latent = rows;
        f.latent_stride = 90;
        f.rope = separate ? ropes : NULL;
        f.rope_stride = separate ? 30 : 0;
        TU_CHECK_INT(snapmla_ref_fetch(&f), 0);
        for (int i = 0; i < 4; i++) {
            for (int d = 0; d < 64; d++) {
                const float v = slots[i] < 0
                                    ? 0
                                    : (float)e4m3_value(w.d.cache.content[slots[i] * 64 + d]) *
                                          w.d.cache.scale[slots[i]];
                TU_CHECK_INT(rows[i * 90 + d], tu_bf16((double)v));
            }
            for (int d = 0; d < 16; d++) {
                const float v = slots[i] < 0
                                    ? 0
                                    : (float)tu_from_bf16(w.d.cache.rope[slots[i] * 16 + d]) *
                                          w.d.cache.scale[slots[i]];
                TU_CHECK_INT(separate ? ropes[i * 30 + d] : rows[i * 90 + 64 + d],
                             tu_bf16((double)v));
            }
            TU_CHECK_FILLED(rows + i * 90 + (separate ? 64 : 80), 0xee, separate ? 52 : 20);
            if (separate) TU_CHECK_FILLED(ropes + i * 30 + 16, 0xee, 28);
        }
    }
    /* what fetch gives is near what was appended: half a step of 3 fraction bits, and bf16's */
    for (int d = 0; d < 64; d++) {
        const double original = tu_from_bf16(w.key[slots[0] * 80 + d]);
        const double floor_of_grid = (double)w.d.cache.scale[slots[0]] * 0.001;
        TU_CHECK_NEAR(tu_from_bf16(rows[d]), original,
                      fabs(original) * (1 / 16.0 + 0.004) + floor_of_grid);
    }
    /* a NaN token comes back as NaN, an all-zero one as zeros */
    for (int d = 0; d < 80; d++) rows[d] = d == 70 ? 0x7fc0 : 0;
    append_slots(&w, slots, 1, rows);
    f.tokens = 1;
    f.rope = NULL;
    TU_CHECK_INT(snapmla_ref_fetch(&f), 0);
    for (int d = 0; d < 64; d++) TU_CHECK_INT(rows[d], 0);
    TU_CHECK_INT(rows[70], 0x7fc0);
    rows[5] = 0x7f80;
    append_slots(&w, slots, 1, rows);
    TU_CHECK_INT(snapmla_ref_fetch(&f), 0);
    TU_CHECK_INT(tu_count_nan_bf16(rows, 80), 80);
    (void)rng;
    free_world(&w);
}

static void append_and_fetch_without_rope(void **state)
{
    (void)state;
    world w = bare_world(1, 1, 1, DIM, -1, 2, 4);
    uint16_t row[DIM], back[DIM + 8];
    const int64_t slot = 3;
    snapmla_ref_fetch_desc f;
    for (int d = 0; d < DIM; d++) row[d] = tu_bf16(d * 14); /* 434 at most */
    row[0] = tu_bf16(-448);
    free(w.d.cache.rope);
    w.d.cache.rope = NULL;
    append_slots(&w, &slot, 1, row);
    memset(&f, 0, sizeof f);
    f.cache = w.d.cache;
    f.tokens = 1;
    f.slots = &slot;
    f.latent = back;
    memset(back, 0xee, sizeof back);
    TU_CHECK_INT(snapmla_ref_fetch(&f), 0);
    for (int d = 0; d < DIM; d++) {
        TU_CHECK_NEAR(tu_from_bf16(back[d]), e4m3_value(e4m3_nearest(tu_from_bf16(row[d]))), 0);
    }
    TU_CHECK_FILLED(back + DIM, 0xee, 16);
    free_world(&w);
}

/* ================================================================================================
   Attention by hand
   ============================================================================================== */

/* Two tokens, one head.  With tau = 2 ln 3:
       q:   content (1, 0, ...) * q_s = 1/2, rope (2, 0, ...)
       k0:  content (1, 2, 0, ...), scale 1, rope (1, 0, ...)      s0 = 1*1 + 2*1   = 3
       k1:  content (0, 4, 0, ...), scale 2, rope (1/2, 0, ...)    s1 = 1*0 + 2*1/2 = 1
   logits tau * q_s * k_s * s: tau * 3/2 and tau: ln 3 apart, so the weights are 3/4 and 1/4.
   V0 = (1, 2), V1 = (0, 8): out = (3/4, 3/2 + 2) = (0.75, 3.5); lse = 2 ln 3 + ln(3 + 1) = ln 36.
   EMULATED: e = (1, 1/3), f = (1, 2/3), S' = 1/448, p8 = (448, 298.67 -> 288 on a grid of 32),
   w = (1, 288/448/2 = 9/28), lq = 37/28, out = (1, 2 + 4 * 288/448 = 32/7) / lq = (28, 128) / 37 */
static void two_tokens_by_hand(void **state)
{
    (void)state;
    const double tau = 2 * log(3.0);
    for (int f = 0; f < 5; f++) {
        world w = bare_world(1, 1, 1, DIM, ROPE, 2, 2);
        snapmla_ref_cache *c = &w.d.cache;
        uint8_t q_content[DIM] = {0x38};
        uint16_t q_rope[ROPE] = {tu_bf16(2)};
        const float q_scale = 0.5f;
        w.lens[0] = 2;
        w.d.softmax_scale = (float)tau;
        memset(c->content, 0, (size_t)(w.slots * DIM));
        memset(c->rope, 0, (size_t)(w.slots * ROPE) * 2);
        memset(w.key, 0, (size_t)(w.slots * w.dim) * 2);
        c->content[0] = 0x38;
        c->content[1] = 0x40;
        c->scale[0] = 1;
        c->rope[0] = tu_bf16(1);
        c->content[DIM + 1] = 0x48;
        c->scale[1] = 2;
        c->rope[ROPE] = tu_bf16(0.5);
        w.key[0] = tu_bf16(1); /* the same unquantised */
        w.key[1] = tu_bf16(2);
        w.key[DIM] = tu_bf16(1);
        w.key[w.dim + 1] = tu_bf16(8);
        w.key[w.dim + DIM] = tu_bf16(1);
        w.q[0] = tu_bf16(0.5);
        w.q[DIM] = tu_bf16(1);
        w.d.fidelity = (snapmla_ref_fidelity)(f < 2 ? f : 2);
        w.d.fp8_tensor_core = f == 3;
        w.d.one_accumulator = f == 4;
        if (f != 1) {
            w.d.q = NULL;
            w.d.q_content = q_content;
            w.d.q_scale = &q_scale;
            w.d.q_rope = q_rope;
        }
        decode(&w);
        if (f < 2) {
            TU_CHECK_NEAR(w.out64[0], 0.75, 1e-7); /* tau is a float */
            TU_CHECK_NEAR(w.out64[1], 3.5, 1e-6);
        } else {
            TU_CHECK_NEAR(w.out64[0], 28.0 / 37, f == 3 ? 2e-4 : 1e-6);
            TU_CHECK_NEAR(w.out64[1], 128.0 / 37, f == 3 ? 1e-3 : 1e-6);
        }
        TU_CHECK_NEAR(w.lse64[0], log(36.0), 1e-6);
        TU_CHECK_NEAR(w.lse[0], log(36.0), 1e-6);
        for (int d = 2; d < DIM; d++) TU_CHECK_NEAR(w.out64[d], 0, 0);
        for (int d = 0; d < DIM; d++) TU_CHECK_INT(w.out[d], tu_bf16(w.out64[d]));
        free_world(&w);
    }
}

static void equal_logits_give_the_mean(void **state)
{
    (void)state;
    world w = random_world(6, 1, 1, 1, 64, 16, 64, 200, 0.5, 0, 0);
    for (int f = 0; f < 3; f++) {
        double mean[64] = {0};
        w.d.fidelity = (snapmla_ref_fidelity)f;
        decode(&w);
        for (int64_t t = 0; t < 200; t++) {
            const int64_t slot = slot_of(&w, 0, t);
            for (int d = 0; d < 64; d++) {
                mean[d] += (f == 1 ? tu_from_bf16(w.key[slot * 80 + d])
                                   : e4m3_value(w.d.cache.content[slot * 64 + d]) *
                                         (double)w.d.cache.scale[slot]) /
                           200;
            }
        }
        TU_CHECK_LE(tu_compare(w.out64, 0, mean, 0, 1, 64).rms, f == 2 ? 5e-3 : 1e-14);
        TU_CHECK_NEAR(w.lse64[0], log(200.0), f == 2 ? 1e-6 : 1e-14);
    }
    free_world(&w);
}

/* A rope dim that all keys share adds a constant to all logits: out stays, lse moves by it. */
static void shifted_logits_change_lse_only(void **state)
{
    (void)state;
    world a = random_world(7, 1, 1, 2, 64, 16, 64, 300, 0.5, 1, 0);
    world b = random_world(7, 1, 1, 2, 64, 16, 64, 300, 0.5, 1, 0);
    for (int64_t t = 0; t < 300; t++) {
        const int64_t slot = slot_of(&a, 0, t);
        a.key[slot * 80 + 64] = b.key[slot * 80 + 64] = tu_bf16(1);
        append_slots(&a, &slot, 1, a.key + slot * 80);
        append_slots(&b, &slot, 1, b.key + slot * 80);
    }
    for (int h = 0; h < 2; h++) {
        a.q[h * 80 + 64] = 0;
        b.q[h * 80 + 64] = tu_bf16(64 * (h + 1));
    }
    a.d.fidelity = b.d.fidelity = SNAPMLA_REF_BF16;
    decode(&a);
    decode(&b);
    TU_CHECK_LE(tu_compare(b.out64, 0, a.out64, 0, 2, 64).rms, 1e-12);
    for (int h = 0; h < 2; h++) {
        TU_CHECK_NEAR(b.lse64[h] - a.lse64[h], 64 * (h + 1) * (double)a.d.softmax_scale, 1e-12);
    }
    free_world(&a);
    free_world(&b);
}

static void one_hot_row_returns_its_value(void **state)
{
    (void)state;
    world w = random_world(8, 1, 1, 3, 64, 16, 16, 500, 0, 1, 0);
    const int at[3] = {0, 77, 499};
    for (int h = 0; h < 3; h++) { /* a query along one key, 60 times as long */
        const uint16_t *key = w.key + slot_of(&w, 0, at[h]) * 80;
        for (int d = 0; d < 80; d++) w.q[h * 80 + d] = tu_bf16(60 * tu_from_bf16(key[d]));
    }
    for (int f = 0; f < 3; f++) {
        w.d.fidelity = (snapmla_ref_fidelity)f;
        decode(&w);
        for (int h = 0; h < 3; h++) {
            const int64_t slot = slot_of(&w, 0, at[h]);
            for (int d = 0; d < 64; d++) {
                const double v = f == 1 ? tu_from_bf16(w.key[slot * 80 + d])
                                        : e4m3_value(w.d.cache.content[slot * 64 + d]) *
                                              (double)w.d.cache.scale[slot];
                TU_CHECK_NEAR(w.out64[h * 64 + d], v, 1e-6);
            }
        }
    }
    free_world(&w);
}

/* ================================================================================================
   EXACT and BF16 against the definition
   ============================================================================================== */

static void exact_matches_the_definition(void **state)
{
    (void)state;
    const struct {
        int batch, s_q, heads, latent, rope, page, len, causal;
    } shapes[] = {{1, 1, 1, 512, 64, 64, 1, 0},    {2, 1, 3, 512, 64, 64, 130, 0},
                  {1, 3, 5, 512, 64, 1, 70, 1},    {2, 2, 2, 512, -1, 16, 65, 1},
                  {1, 1, 7, 256, 64, 2, 129, 0},   {3, 4, 2, 256, 32, 1024, 64, 1},
                  {1, 1, 128, 32, 16, 64, 40, 0},  {1, 2, 9, 96, 48, 7, 100, 1},
                  {1, 300, 1, 32, 16, 128, 290, 1}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        world w =
            random_world(100 + i, shapes[i].batch, shapes[i].s_q, shapes[i].heads, shapes[i].latent,
                         shapes[i].rope, shapes[i].page, shapes[i].len, 0.2, 2, 1);
        const int64_t cells = w.rows * shapes[i].latent;
        double *out = (double *)tu_alloc((size_t)cells * sizeof(double), 0);
        double *lse = (double *)tu_alloc((size_t)w.rows * sizeof(double), 0);
        w.d.causal = shapes[i].causal;
        for (int b = 0; b < shapes[i].batch; b++) w.lens[b] -= 17 * b;
        for (int f = 0; f < 3; f++) {
            w.d.fidelity = f == 1 ? SNAPMLA_REF_BF16 : SNAPMLA_REF_EXACT;
            w.d.mode = f == 2 ? SNAPMLA_REF_MODE_PRECISE : SNAPMLA_REF_MODE_DEFAULT;
            poison_outputs(&w);
            decode(&w);
            naive(&w, out, lse);
            TU_CHECK_LE(tu_compare(w.out64, 0, out, 0, w.rows, shapes[i].latent).rms, 1e-12);
            for (int64_t r = 0; r < w.rows; r++) TU_CHECK_NEAR(w.lse64[r], lse[r], 1e-11);
            for (int64_t r = 0; r < w.rows; r++)
                TU_CHECK_INT(bits_of(w.lse[r]), bits_of((float)w.lse64[r]));
            for (int64_t k = 0; k < cells; k++)
                TU_CHECK_INT(w.out[k], smlar_bf16_from_double(w.out64[k]));
        }
        free(out);
        free(lse);
        free_world(&w);
    }
}

/* EXACT, BF16, EMULATED, four variants of EMULATED, of which the last is precise, precise EXACT */
static void select_mode(world *w, int mode)
{
    w->d.fidelity = mode == 7 ? SNAPMLA_REF_EXACT : (snapmla_ref_fidelity)(mode < 2 ? mode : 2);
    w->d.fp8_tensor_core = mode == 3 || mode == 5;
    w->d.one_accumulator = mode == 4 || mode == 5;
    w->d.mode = mode >= 6 ? SNAPMLA_REF_MODE_PRECISE : SNAPMLA_REF_MODE_DEFAULT;
}
enum { MODES = 8 };

/* ================================================================================================
   EMULATED against a second implementation of its recurrence: one row, one cell at a time, straight
   from the formulas, the tensor core through the public one-accumulator functions
   ============================================================================================== */
typedef struct slow_state {
    float m, l, lq, unit, acc[512];
} slow_state;

static float slow_score(const world *w, const uint8_t *qc, const uint16_t *qr, const float *q16,
                        int64_t slot)
{
    const int latent = w->d.cache.latent_dim, rope = w->dim - latent;
    const uint8_t *kc = w->d.cache.content + slot * latent;
    const uint16_t *kr = w->d.cache.rope + slot * rope;
    float s = 0;
    if (w->d.fp8_tensor_core) {
        for (int d = 0; d < latent; d += 32) s = snapmla_ref_mma_e4m3(s, qc + d, kc + d);
        for (int d = 0; d < rope; d += 16) s = snapmla_ref_mma_bf16(s, qr + d, kr + d);
        return s;
    }
    for (int d = 0; d < latent; d++) {
        const int precise = w->d.mode == SNAPMLA_REF_MODE_PRECISE;
        const float q = precise ? q16[d] : snapmla_ref_e4m3_to_float(qc[d]);
        s += q * snapmla_ref_e4m3_to_float(kc[d]);
    }
    for (int d = 0; d < rope; d++) s += (float)(tu_from_bf16(qr[d]) * tu_from_bf16(kr[d]));
    return s;
}

/* One block of tokens, already reduced to those that count. */
static void slow_block(const world *w, slow_state *s, const float *x, const int64_t *slot,
                       int64_t first, int block, const int64_t *token, int n)
{
    const int latent = w->d.cache.latent_dim;
    const int precise = w->d.mode == SNAPMLA_REF_MODE_PRECISE;
    uint8_t p8[1024] = {0};
    float p16[1024] = {0};
    float e[1024], top = 0, before = s->m, alpha, unit, inverse, sum = 0, rounded_sum = 0;
    int64_t slot_at[1024];
    for (int t = 0; t < block; t++) slot_at[t] = -1;
    for (int i = 0; i < n; i++) s->m = fmaxf(s->m, x[i]);
    if (s->m == -INFINITY) return;
    for (int i = 0; i < n; i++) {
        e[i] = exp2f(x[i] - s->m);
        sum += e[i];
        top = fmaxf(top, e[i] * w->d.cache.scale[slot[i]]);
    }
    alpha = exp2f(before - s->m);
    unit = top / 448.0f;
    inverse = 448.0f / top;
    if (w->d.one_accumulator && alpha * s->unit >= unit) {
        unit = alpha * s->unit;
        inverse = 1.0f / unit;
    }
    if (unit < FLT_MIN) unit = inverse = 0;
    for (int i = 0; i < n; i++) {
        const float scale = w->d.cache.scale[slot[i]];
        const uint8_t code = snapmla_ref_e4m3_from_float(e[i] * scale * inverse);
        const float half = (float)f16_nearest((double)(e[i] * scale * inverse));
        if (precise)
            rounded_sum += half >= 0x1p-14f ? half * unit / scale : e[i];
        else
            rounded_sum += code >= 8 ? snapmla_ref_e4m3_to_float(code) * unit / scale : e[i];
        p8[token[i] - first] = code;
        p16[token[i] - first] = half;
        slot_at[token[i] - first] = slot[i];
    }
    s->l = s->l * alpha + sum;
    s->lq = s->lq * alpha + rounded_sum;
    for (int d = 0; d < latent; d++) {
        float c = 0;
        if (w->d.one_accumulator) c = unit > 0 ? s->acc[d] * (alpha * s->unit / unit) : 0;
        if (w->d.fp8_tensor_core) {
            const int64_t last = token[n - 1] - first;
            for (int t = 0; t <= last; t += 32) {
                uint8_t v[32];
                for (int k = 0; k < 32; k++) {
                    v[k] = slot_at[t + k] < 0 ? 0 : w->d.cache.content[slot_at[t + k] * latent + d];
                }
                c = snapmla_ref_mma_e4m3(c, v, p8 + t);
            }
        } else {
            for (int t = 0; t < block; t++) {
                if (slot_at[t] < 0) continue;
                c += (precise ? p16[t] : snapmla_ref_e4m3_to_float(p8[t])) *
                     snapmla_ref_e4m3_to_float(w->d.cache.content[slot_at[t] * latent + d]);
            }
        }
        s->acc[d] = w->d.one_accumulator ? c : s->acc[d] * alpha + unit * c;
    }
    s->unit = unit;
}

static void slow_emulated(const world *w, float *out, float *lse)
{
    const int latent = w->d.cache.latent_dim, rope = w->dim - latent;
    const int block = w->d.block_tokens ? w->d.block_tokens : 64;
    const int64_t cut = w->d.split_tokens ? w->d.split_tokens : INT32_MAX;
    for (int64_t row = 0; row < w->rows; row++) {
        const int b = (int)(row / (w->d.s_q * w->d.heads));
        const int64_t n = keys_seen(w, b, (int)(row / w->d.heads % w->d.s_q));
        const uint16_t *q = w->q + row * w->dim;
        uint8_t qc[512];
        uint16_t qr[512];
        float q16[512];
        float q_scale, factor, m = -INFINITY, l = 0, lq = 0;
        slow_state *split = (slow_state *)tu_alloc((size_t)(n / cut + 1) * sizeof *split, 0);
        snapmla_ref_quantize(q, latent, q + latent, rope, qc, &q_scale, qr);
        if (w->d.mode == SNAPMLA_REF_MODE_PRECISE) {
            double amax = 0, power;
            for (int d = 0; d < latent; d++) amax = fmax(amax, fabs(tu_from_bf16(q[d])));
            power = exp2(floor(log2(amax)) - 8);
            for (int d = 0; d < latent; d++) q16[d] = (float)f16_nearest(tu_from_bf16(q[d]) / power);
            for (int d = 0; d < rope; d++) qr[d] = tu_bf16(tu_from_bf16(q[latent + d]) / power);
            q_scale = (float)power;
        }
        factor = w->d.softmax_scale * 1.44269504088896340736f * q_scale;
        for (int64_t i = 0; i <= n / cut; i++) {
            split[i].m = -INFINITY;
            for (int64_t first = i * cut; first < n && first < (i + 1) * cut; first += block) {
                int64_t slot[1024], token[1024];
                float x[1024];
                int count = 0;
                for (int64_t t = first; t < n && t < first + block; t++) {
                    if (w->table[b * w->d.block_table_width + t / w->d.cache.page_size] < 0)
                        continue;
                    slot[count] = slot_of(w, b, t);
                    token[count] = t;
                    x[count] = slow_score(w, qc, qr, q16, slot[count]) *
                               (factor * w->d.cache.scale[slot[count]]);
                    count++;
                }
                if (count) slow_block(w, &split[i], x, slot, first, block, token, count);
            }
            m = fmaxf(m, split[i].m);
        }
        for (int d = 0; d < latent; d++) out[row * latent + d] = 0;
        for (int64_t i = 0; i <= n / cut; i++) {
            const float weight = exp2f(split[i].m - m);
            if (split[i].m == -INFINITY) continue;
            l += split[i].l * weight;
            lq += split[i].lq * weight;
            for (int d = 0; d < latent; d++) {
                out[row * latent + d] +=
                    (w->d.one_accumulator ? weight * split[i].unit : weight) * split[i].acc[d];
            }
        }
        for (int d = 0; d < latent && l > 0; d++) out[row * latent + d] /= lq;
        lse[row] = l > 0 ? m * 0.69314718055994530942f + logf(l) : -INFINITY;
        free(split);
    }
}

static void check_against_slow(world *w)
{
    const int latent = w->d.cache.latent_dim;
    float *out = (float *)tu_alloc((size_t)(w->rows * latent) * sizeof(float), 0);
    float *lse = (float *)tu_alloc((size_t)w->rows * sizeof(float), 0);
    poison_outputs(w);
    decode(w);
    slow_emulated(w, out, lse);
    for (int64_t i = 0; i < w->rows * latent; i++) {
        const float got = (float)w->out64[i];
        TU_CHECK(got == out[i] && w->out64[i] == (double)got, "row %d dim %d: %.9g, wanted %.9g",
                 (int)(i / latent), (int)(i % latent), w->out64[i], (double)out[i]);
        TU_CHECK_INT(w->out[i], snapmla_ref_bf16_from_float(out[i]));
    }
    for (int64_t r = 0; r < w->rows; r++) TU_CHECK_INT(bits_of(w->lse[r]), bits_of(lse[r]));
    free(out);
    free(lse);
}

static void emulated_matches_the_slow_recurrence(void **state)
{
    (void)state;
    const struct {
        int s_q, heads, latent, rope, page, len, causal, block, split, hole;
        double q_std, spread;
    } shapes[] = {{1, 1, 512, 64, 64, 1, 0, 0, 0, 0, 1, 0},
                  {1, 2, 512, 64, 64, 64, 0, 0, 0, 0, 1, 0},
                  {1, 5, 512, 64, 64, 333, 0, 0, 0, 0, 1, 0.3},
                  {1, 3, 512, 64, 1, 200, 0, 0, 64, 1, 4, 0},
                  {4, 2, 96, 32, 16, 300, 1, 128, 128, 1, 3, 3},
                  {9, 1, 32, 16, 16, 7, 1, 32, 32, 0, 1, 0},
                  {2, 3, 256, -1, 16, 257, 1, 64, 128, 1, 1, 20},
                  {1, 4, 32, 16, 256, 2000, 0, 1024, 1024, 0, 30, 5},
                  {3, 3, 64, 64, 4, 500, 1, 96, 192, 1, 100, 1}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        world w = random_world(200 + i, 2, shapes[i].s_q, shapes[i].heads, shapes[i].latent,
                               shapes[i].rope, shapes[i].page, shapes[i].len, 0.3, shapes[i].q_std,
                               shapes[i].spread);
        w.lens[1] -= shapes[i].len / 3;
        w.d.fidelity = SNAPMLA_REF_EMULATED;
        w.d.causal = shapes[i].causal;
        w.d.block_tokens = shapes[i].block;
        w.d.split_tokens = shapes[i].split;
        if (shapes[i].hole) {
            for (int k = 1; k < w.d.block_table_width; k += 3) w.table[k] = -1 - k;
        }
        for (int mode = 2; mode < 7; mode++) {
            select_mode(&w, mode);
            check_against_slow(&w);
        }
        free_world(&w);
    }
}

/* ================================================================================================
   Masks, lengths, tables
   ============================================================================================== */

static void rows_without_keys(void **state)
{
    (void)state;
    world w = random_world(20, 4, 3, 2, 64, 16, 16, 32, 0, 1, 0);
    w.d.causal = 1;
    w.lens[0] = 0;
    w.lens[1] = -5;
    w.lens[2] = 2; /* fewer than s_q: token 0 sees nothing */
    w.lens[3] = 32;
    w.table[0] = w.table[2] = INT32_MAX; /* lengths of 0: not read */
    w.q[0] = 0x7fc0;                     /* a NaN query without keys is no NaN either */
    for (int mode = 0; mode < MODES; mode++) {
        select_mode(&w, mode);
        poison_outputs(&w);
        decode(&w);
        for (int r = 0; r < 24; r++) {
            const int empty = r < 12 || r == 12 || r == 13;
            TU_CHECK((w.lse[r] == -INFINITY) == empty, "row %d lse %g", r, (double)w.lse[r]);
            TU_CHECK((w.lse64[r] == -INFINITY) == empty, "row %d lse64 %g", r, w.lse64[r]);
            for (int d = 0; d < 64; d++) {
                TU_CHECK(!empty || (w.out[r * 64 + d] == 0 && w.out64[r * 64 + d] == 0), "row %d",
                         r);
                TU_CHECK(w.out64[r * 64 + d] == w.out64[r * 64 + d], "NaN in row %d", r);
            }
        }
    }
    free_world(&w);
}

static void empty_cache_and_table(void **state)
{
    (void)state;
    world w = bare_world(2, 1, 2, DIM, ROPE, 64, 64);
    for (int mode = 0; mode < MODES; mode++) {
        snapmla_ref_decode_desc d;
        select_mode(&w, mode);
        d = w.d;
        d.seq_lens = w.lens;
        w.lens[0] = 100; /* no pages, no keys, whatever the length says */
        w.lens[1] = 0;
        d.cache.content = NULL;
        d.cache.scale = NULL;
        d.cache.rope = NULL;
        d.key = NULL;
        d.cache.pages = 0;
        poison_outputs(&w);
        TU_CHECK_INT(snapmla_ref_decode(&d), 0);
        for (int r = 0; r < 4; r++) TU_CHECK(w.lse[r] == -INFINITY, "lse %g", (double)w.lse[r]);
        for (int i = 0; i < 4 * DIM; i++) TU_CHECK_INT(w.out[i], 0);
        d.block_table = NULL; /* and without a table */
        d.block_table_width = 0;
        d.cache = w.d.cache;
        d.key = w.key;
        poison_outputs(&w);
        TU_CHECK_INT(snapmla_ref_decode(&d), 0);
        for (int r = 0; r < 4; r++) TU_CHECK(w.lse64[r] == -INFINITY, "lse %g", w.lse64[r]);
    }
    free_world(&w);
}

/* Causal s_q = k is k calls with s_q = 1 on growing lengths, to the bit. */
static void causal_is_growing_lengths(void **state)
{
    (void)state;
    enum { S_Q = 5, HEADS = 3 };
    world w = random_world(21, 1, S_Q, HEADS, 64, 16, 16, 140, 0.1, 2, 1);
    w.d.causal = 1;
    for (int mode = 0; mode < MODES; mode++) {
        for (int len = 1; len <= 140; len += 13) {
            select_mode(&w, mode);
            w.d.split_tokens = 128;
            w.lens[0] = len;
            poison_outputs(&w);
            decode(&w);
            for (int i = 0; i < S_Q; i++) {
                world one = bare_world(1, 1, HEADS, 64, 16, 16, 140);
                snapmla_ref_decode_desc d = w.d;
                const int32_t shorter = len - S_Q + 1 + i;
                d.s_q = 1;
                d.seq_lens = &shorter;
                d.q = w.q + i * HEADS * w.dim;
                d.out = one.out;
                d.out64 = one.out64;
                d.lse = one.lse;
                d.lse64 = one.lse64;
                TU_CHECK_INT(snapmla_ref_decode(&d), 0);
                TU_CHECK_BYTES(w.out64 + i * HEADS * 64, one.out64, HEADS * 64 * sizeof(double));
                TU_CHECK_BYTES(w.lse64 + i * HEADS, one.lse64, HEADS * sizeof(double));
                TU_CHECK_BYTES(w.out + i * HEADS * 64, one.out, HEADS * 64 * 2);
                free_world(&one);
            }
        }
    }
    free_world(&w);
}

/* A row's bits depend on nothing but the row: not on the batch, its place in it, or other rows. */
static void rows_are_independent(void **state)
{
    (void)state;
    world w = random_world(22, 3, 1, 7, 64, 16, 16, 150, 0.1, 1, 1);
    w.lens[0] = 150;
    w.lens[1] = 64;
    w.lens[2] = 99;
    for (int mode = 0; mode < MODES; mode++) {
        select_mode(&w, mode);
        decode(&w);
        for (int64_t row = 0; row < w.rows; row++) {
            world one = bare_world(1, 1, 1, 64, 16, 16, 150);
            snapmla_ref_decode_desc d = w.d;
            const int b = (int)row / 7;
            d.batch = 1;
            d.heads = 1;
            d.seq_lens = &w.lens[b];
            d.block_table = w.table + b * w.d.block_table_width;
            d.q = w.q + row * w.dim;
            d.out = NULL;
            d.out64 = one.out64;
            d.lse = one.lse;
            d.lse64 = NULL;
            TU_CHECK_INT(snapmla_ref_decode(&d), 0);
            TU_CHECK_BYTES(w.out64 + row * 64, one.out64, 64 * sizeof(double));
            TU_CHECK_BYTES(w.lse + row, one.lse, sizeof(float));
            free_world(&one);
        }
    }
    free_world(&w);
}

/* Garbage where nothing may be read: past len in the last page, past the last page in the table. */
static void nothing_past_the_end_is_read(void **state)
{
    (void)state;
    world a = random_world(23, 1, 1, 2, 64, 16, 64, 256, 0, 1, 0);
    world b = random_world(23, 1, 1, 2, 64, 16, 64, 256, 0, 1, 0);
    const int32_t bad_entries[] = {-1, INT32_MAX, 2147480000, INT32_MIN};
    for (int mode = 0; mode < MODES; mode++) {
        select_mode(&a, mode);
        select_mode(&b, mode);
        for (int len = 1; len <= 192; len = len < 62 ? len + 61 : len + 1 + 30 * (len % 64 == 1)) {
            a.lens[0] = b.lens[0] = len;
            for (int64_t t = len; t < 256; t++) { /* NaN, Inf and worse in b */
                const int64_t slot = (int64_t)a.table[t / 64] * 64 + t % 64;
                tu_poison_e4m3(b.d.cache.content + slot * 64, 64);
                tu_poison_bf16(b.d.cache.rope + slot * 16, 16);
                tu_poison_bf16(b.key + slot * b.dim, b.dim);
                const float scales[] = {NAN, INFINITY, 0.01f, 3e38f}; /* finite ones hide nothing */
                b.d.cache.scale[slot] = scales[t % 4];
            }
            for (int i = (len + 63) / 64; i < 4; i++) b.table[i] = bad_entries[i];
            decode(&a);
            decode(&b);
            check_same_bits(&a, &b);
            free_world(&b);
            b = random_world(23, 1, 1, 2, 64, 16, 64, 256, 0, 1, 0);
            select_mode(&b, mode);
        }
    }
    free_world(&a);
    free_world(&b);
}

/* A negative entry takes its tokens away; with page size 1 that is sparse attention. */
static void negative_entries_are_holes(void **state)
{
    (void)state;
    world w = random_world(24, 1, 2, 2, 64, 16, 1, 90, 0.2, 1, 1);
    const int64_t cells = w.rows * 64;
    double *out = (double *)tu_alloc((size_t)cells * sizeof(double), 0);
    double *lse = (double *)tu_alloc((size_t)w.rows * sizeof(double), 0);
    w.d.causal = 1;
    for (int step = 2; step <= 90; step += 11) {
        for (int i = step - 1; i < 90; i += step) w.table[i] = -1;
        for (int f = 0; f < 2; f++) {
            w.d.fidelity = (snapmla_ref_fidelity)f;
            decode(&w);
            naive(&w, out, lse);
            TU_CHECK_LE(tu_compare(w.out64, 0, out, 0, w.rows, 64).rms, 1e-12);
            for (int64_t r = 0; r < w.rows; r++) TU_CHECK_NEAR(w.lse64[r], lse[r], 1e-11);
        }
    }
    for (int i = 0; i < 90; i++) w.table[i] = INT32_MIN;
    for (int mode = 0; mode < MODES; mode++) { /* nothing left */
        select_mode(&w, mode);
        poison_outputs(&w);
        decode(&w);
        for (int64_t i = 0; i < cells; i++) TU_CHECK_NEAR(w.out64[i], 0, 0);
        for (int64_t r = 0; r < w.rows; r++) TU_CHECK_NEAR(w.lse64[r], -INFINITY, 0);
    }
    free(out);
    free(lse);
    free_world(&w);
}

static void lengths_are_cut(void **state)
{
    (void)state;
    world a = random_world(25, 2, 1, 1, 64, 16, 16, 160, 0, 1, 0);
    world b = random_world(25, 2, 1, 1, 64, 16, 16, 160, 0, 1, 0);
    for (int mode = 0; mode < MODES; mode++) {
        select_mode(&a, mode);
        select_mode(&b, mode);
        a.lens[0] = INT32_MAX; /* by the table */
        a.lens[1] = 12;
        b.lens[0] = 160;
        b.lens[1] = 12;
        decode(&a);
        decode(&b);
        check_same_bits(&a, &b);
        a.lens[0] = 150; /* by max_seq_len */
        a.d.max_seq_len = b.lens[0] = 33;
        decode(&a);
        decode(&b);
        check_same_bits(&a, &b);
        a.d.max_seq_len = 0;
        a.d.block_table_width = 3; /* by a narrower table with the wide one's stride */
        a.d.block_table_stride = 10;
        b.lens[0] = 48;
        decode(&a);
        decode(&b);
        check_same_bits(&a, &b);
        a.d.block_table_width = 10;
        a.d.block_table_stride = 0;
    }
    free_world(&a);
    free_world(&b);
}

/* The same tokens in pages of every size give the same bits. */
static void page_size_does_not_matter(void **state)
{
    (void)state;
    enum { LEN = 1100, WIDE = 32 + 16 };
    tu_rng rng = tu_seed(26);
    uint16_t *keys = (uint16_t *)tu_alloc(LEN * WIDE * 2, 0);
    uint16_t q[2 * WIDE];
    world first = bare_world(1, 1, 2, 32, 16, 64, LEN);
    tu_fill_bf16(&rng, keys, LEN * WIDE, 0, 1);
    tu_fill_bf16(&rng, q, 2 * WIDE, 0, 3);
    for (int size = 1; size <= 1024; size *= 2) {
        world w = bare_world(1, 1, 2, 32, 16, size, LEN);
        memcpy(w.q, q, sizeof q);
        w.lens[0] = LEN;
        tu_permutation(&rng, w.table, w.d.block_table_width, 1);
        for (int64_t t = 0; t < LEN; t++) {
            const int64_t slot = slot_of(&w, 0, t);
            memcpy(w.key + slot * WIDE, keys + t * WIDE, WIDE * 2);
            append_slots(&w, &slot, 1, keys + t * WIDE);
        }
        for (int mode = 0; mode < MODES; mode++) {
            select_mode(&w, mode);
            decode(&w);
            if (mode != SNAPMLA_REF_EMULATED) continue;
            if (size == 1) {
                memcpy(first.out64, w.out64, 2 * 32 * sizeof(double));
                memcpy(first.lse64, w.lse64, 2 * sizeof(double));
            }
            TU_CHECK_BYTES(w.out64, first.out64, 2 * 32 * sizeof(double));
            TU_CHECK_BYTES(w.lse64, first.lse64, 2 * sizeof(double));
        }
        free_world(&w);
    }
    free_world(&first);
    free(keys);
}

static void strides_of_q_and_out(void **state)
{
    (void)state;
    enum {
        B = 2,
        S = 3,
        H = 2,
        L = 32,
        D = 48,
        QH = 50,
        QT = 110,
        QB = 400,
        OH = 40,
        OT = 90,
        OB = 300
    };
    world w = random_world(27, B, S, H, L, 16, 16, 50, 0, 1, 0);
    uint16_t *q = (uint16_t *)tu_guard_alloc(B * QB * 2, 0xff);
    uint16_t *out = (uint16_t *)tu_guard_alloc(B * OB * 2, 0xee);
    float *lse = (float *)tu_guard_alloc(B * 20 * sizeof(float), 0xee);
    for (int mode = 0; mode < MODES; mode++) {
        snapmla_ref_decode_desc d;
        select_mode(&w, mode);
        decode(&w);
        d = w.d;
        d.q = q;
        d.q_head_stride = QH;
        d.q_token_stride = QT;
        d.q_batch_stride = QB;
        d.out = out;
        d.out_head_stride = OH;
        d.out_token_stride = OT;
        d.out_batch_stride = OB;
        d.lse = lse;
        d.lse_token_stride = 5;
        d.lse_batch_stride = 20;
        for (int r = 0; r < B * S * H; r++) {
            memcpy(q + r / (S * H) * QB + r / H % S * QT + r % H * QH, w.q + r * D, D * 2);
        }
        memset(out, 0xee, B * OB * 2);
        memset(lse, 0xee, B * 20 * sizeof(float));
        TU_CHECK_INT(snapmla_ref_decode(&d), 0);
        for (int i = 0; i < B * OB; i++) {
            const int b = i / OB, s = i % OB / OT, h = i % OB % OT / OH, k = i % OB % OT % OH;
            const int inside = s < S && h < H && k < L;
            TU_CHECK_INT(out[i], inside ? w.out[((b * S + s) * H + h) * L + k] : 0xeeee);
        }
        for (int i = 0; i < B * 20; i++) {
            const int inside = i % 20 / 5 < S && i % 5 < H;
            const float wanted = inside ? w.lse[(i / 20 * S + i % 20 / 5) * H + i % 5] : 0;
            TU_CHECK(inside ? lse[i] == wanted : bits_of(lse[i]) == 0xeeeeeeeeu, "lse %d: %g", i,
                     (double)lse[i]);
        }
    }
    TU_CHECK(tu_guard_intact(out, B * OB * 2) && tu_guard_intact(lse, B * 20 * sizeof(float)),
             "overrun");
    tu_guard_free(q);
    tu_guard_free(out);
    tu_guard_free(lse);
    free_world(&w);
}

/* q as bf16 and q as planes are the same. */
static void quantised_queries_are_the_same(void **state)
{
    (void)state;
    world a = random_world(28, 1, 2, 3, 64, 16, 16, 100, 0, 1, 0);
    world b = random_world(28, 1, 2, 3, 64, 16, 16, 100, 0, 1, 0);
    uint8_t content[6 * 64];
    uint16_t rope[6 * 16];
    float scale[6];
    for (int r = 0; r < 6; r++) {
        snapmla_ref_quantize(a.q + r * 80, 64, a.q + r * 80 + 64, 16, content + r * 64, scale + r,
                             rope + r * 16);
    }
    b.d.q = NULL;
    b.d.q_content = content;
    b.d.q_scale = scale;
    b.d.q_rope = rope;
    for (int mode = 0; mode < MODES; mode++) {
        if (mode == SNAPMLA_REF_BF16) continue;
        select_mode(&a, mode == 7 ? SNAPMLA_REF_EXACT : mode);
        select_mode(&b, mode);
        decode(&a);
        decode(&b);
        if (mode == 6) /* they are coarser than the precise q, which they come from */
            TU_CHECK_LE(1e-3, tu_compare(b.out64, 0, a.out64, 0, a.rows, 64).rms);
        else /* and the truth to be precise about */
            check_same_bits(&a, &b);
    }
    free_world(&a);
    free_world(&b);
}

/* ================================================================================================
   NaN, Inf and extremes
   ============================================================================================== */

/* A bad token at len - 2 of a causal call: query tokens before it must not notice. */
static void nan_tokens_stay_contained(void **state)
{
    (void)state;
    enum { LEN = 75, S_Q = 4, HEADS = 3, KINDS = 13 };
    for (int kind = 0; kind < KINDS; kind++) {
        for (int mode = 0; mode < MODES; mode++) {
            if (mode == SNAPMLA_REF_BF16 && kind > 3) continue; /* no planes there */
            world clean = random_world(30, 1, S_Q, HEADS, 64, 16, 16, LEN, 0, 1, 0);
            world bad = random_world(30, 1, S_Q, HEADS, 64, 16, 16, LEN, 0, 1, 0);
            const int64_t slot = slot_of(&bad, 0, LEN - 2);
            uint16_t *key = bad.key + slot * 80;
            select_mode(&clean, mode);
            select_mode(&bad, mode);
            clean.d.causal = bad.d.causal = 1;
            if (kind == 0) key[63] = 0x7fc0;
            if (kind == 1) key[0] = 0xff80;
            if (kind == 2) key[79] = 0xffc0; /* rope NaN */
            if (kind == 3) key[5] = 0x7f80;
            if (kind < 4) append_slots(&bad, &slot, 1, key);
            if (kind == 4) bad.d.cache.scale[slot] = (float)NAN;
            if (kind == 5) bad.d.cache.scale[slot] = -INFINITY;
            if (kind == 6) bad.d.cache.content[slot * 64 + 1] = 0xff;
            if (kind >= 7) bad.d.cache.scale[slot] = kind % 2 ? INFINITY : -INFINITY;
            if (kind >= 9) memset(bad.d.cache.content + slot * 64, 0, 64);
            if (kind >= 11) memset(bad.d.cache.rope + slot * 16, 0, 32);
            decode(&clean);
            decode(&bad);
            for (int r = 0; r < S_Q * HEADS; r++) {
                const int sees = r / HEADS >= 2; /* query i sees keys below LEN - 3 + i */
                if (sees) {
                    TU_CHECK_INT(tu_count_nan_bf16(bad.out + r * 64, 64), 64);
                    for (int d = 0; d < 64; d++) TU_CHECK_INT(bad.out[r * 64 + d], 0x7fc0);
                    TU_CHECK(bad.lse[r] != bad.lse[r], "kind %d mode %d row %d", kind, mode, r);
                } else {
                    TU_CHECK_BYTES(bad.out64 + r * 64, clean.out64 + r * 64, 64 * sizeof(double));
                    TU_CHECK_BYTES(bad.lse + r, clean.lse + r, sizeof(float));
                }
            }
            free_world(&clean);
            free_world(&bad);
        }
    }
}

/* Also when the bad token is alone in its split or block, first, last or everywhere. */
static void nan_survives_splits(void **state)
{
    (void)state;
    const int at[] = {0, 63, 64, 130, 199};
    for (int i = 0; i < 6; i++) {
        for (int mode = 0; mode < MODES; mode++) {
            world w = random_world(31, 1, 1, 2, 64, 16, 1, 200, 0, 1, 0);
            select_mode(&w, mode);
            w.d.split_tokens = 64;
            for (int t = 0; t < 200; t++) {
                const int64_t slot = slot_of(&w, 0, t);
                if (i < 5 && t != at[i]) {
                    if (i == 3 && t >= 128 && t < 192)
                        w.table[t] = -1; /* nothing else in its split */
                    continue;
                }
                w.key[slot * 80] = 0x7fc0;
                append_slots(&w, &slot, 1, w.key + slot * 80);
            }
            decode(&w);
            TU_CHECK_INT(tu_count_nan_bf16(w.out, 2 * 64), 2 * 64);
            TU_CHECK_INT(tu_count_nan_f32(w.lse, 2), 2);
            free_world(&w);
        }
    }
}

static void nan_queries_stay_contained(void **state)
{
    (void)state;
    for (int mode = 0; mode < MODES; mode++) {
        for (int kind = 0; kind < 4; kind++) {
            world clean = random_world(32, 1, 1, 6, 64, 16, 16, 70, 0, 1, 0);
            world bad = random_world(32, 1, 1, 6, 64, 16, 16, 70, 0, 1, 0);
            select_mode(&clean, mode);
            select_mode(&bad, mode);
            bad.q[2 * 80 + (kind == 3 ? 70 : 7)] = kind == 1 ? 0x7f80 : kind == 2 ? 0xff80 : 0xffc1;
            decode(&clean);
            decode(&bad);
            for (int r = 0; r < 6; r++) {
                if (r == 2) {
                    TU_CHECK_INT(tu_count_nan_bf16(bad.out + r * 64, 64), 64);
                    TU_CHECK(bad.lse[r] != bad.lse[r], "mode %d kind %d", mode, kind);
                } else {
                    TU_CHECK_BYTES(bad.out64 + r * 64, clean.out64 + r * 64, 64 * sizeof(double));
                }
            }
            free_world(&clean);
            free_world(&bad);
        }
    }
}

static void extreme_logits(void **state)
{
    (void)state;
    const double sizes[] = {1e4, 1e5};
    for (int i = 0; i < 2; i++) {
        world w = random_world(33, 1, 1, 8, 512, 64, 64, 1000, 0, sizes[i] / 3, 0);
        world x = random_world(33, 1, 1, 8, 512, 64, 64, 1000, 0, sizes[i] / 3, 0);
        for (int mode = 2; mode < MODES; mode++) {
            tu_lse_error lse;
            select_mode(&w, mode);
            x.d.mode = w.d.mode;
            decode(&w);
            decode(&x);
            TU_CHECK_INT(tu_count_nan_bf16(w.out, 8 * 512), 0);
            lse = tu_compare_lse(w.lse, x.lse64, 8);
            TU_CHECK_LE(lse.relative, 2e-3);
            TU_CHECK(fabs(x.lse64[0]) > sizes[i] / 2, "logits only reach %g", x.lse64[0]);
        }
        free_world(&w);
        free_world(&x);
    }
}

/* ================================================================================================
   Scales that differ between tokens
   ============================================================================================== */

/* 63 tokens of almost no value beside one: they round to 0 in P and must keep their mass. */
static void tiny_tokens_keep_their_mass(void **state)
{
    (void)state;
    const double sizes[] = {1e-3, 1e-6, 1e-20, 0};
    for (int i = 0; i < 4; i++) {
        for (int mode = 2; mode < MODES; mode++) {
            world w = random_world(40, 1, 1, 1, 64, 16, 64, 192, 0, 0, 0);
            world x = random_world(40, 1, 1, 1, 64, 16, 64, 192, 0, 0, 0);
            for (int t = 0; t < 192; t++) {
                const int64_t slot = slot_of(&w, 0, t);
                const double size = t == 70 ? 1 : sizes[i];
                for (int d = 0; d < 80; d++) {
                    w.key[slot * 80 + d] = tu_bf16(size * tu_from_bf16(w.key[slot * 80 + d]));
                }
                append_slots(&w, &slot, 1, w.key + slot * 80);
                append_slots(&x, &slot, 1, w.key + slot * 80);
            }
            select_mode(&w, mode);
            x.d.mode = w.d.mode;
            decode(&w);
            decode(&x);
            TU_CHECK_LE(tu_compare(w.out64, 0, x.out64, 0, 1, 64).rms, 5e-3);
            TU_CHECK_NEAR(w.lse[0], log(192.0), 1e-5);
            /* and the size is right: the mean of one value and 191 near zeros */
            for (int d = 0; d < 64; d++) {
                const double one = tu_from_bf16(w.key[slot_of(&w, 0, 70) * 80 + d]) / 192;
                TU_CHECK_NEAR(w.out64[d], one, fabs(one) * 0.07 + sizes[i] * 0.4 + 1e-7);
            }
            free_world(&w);
            free_world(&x);
        }
    }
}

static void only_zero_tokens(void **state)
{
    (void)state;
    world w = bare_world(1, 1, 2, 64, 16, 64, 100);
    uint16_t zero[80] = {0};
    tu_rng rng = tu_seed(41);
    w.lens[0] = 100;
    w.table[1] = 1;
    tu_fill_bf16(&rng, w.q, 2 * 80, 0, 1);
    memset(w.key, 0, (size_t)(w.slots * w.dim) * 2);
    for (int64_t t = 0; t < 100; t++) append_slots(&w, &t, 1, zero);
    for (int mode = 0; mode < MODES; mode++) {
        select_mode(&w, mode);
        decode(&w);
        for (int i = 0; i < 2 * 64; i++) TU_CHECK_NEAR(w.out64[i], 0, 0);
        for (int r = 0; r < 2; r++) TU_CHECK_NEAR(w.lse[r], log(100.0), 1e-5);
    }
    free_world(&w);
}

/* Scales over many binades, in one block: bounded by the largest, not by each of them. */
static void wide_spread_of_scales(void **state)
{
    (void)state;
    world w = random_world(42, 1, 1, 8, 512, 64, 64, 2048, 0.5, 1, 2);
    world x = random_world(42, 1, 1, 8, 512, 64, 64, 2048, 0.5, 1, 2);
    w.d.softmax_scale = x.d.softmax_scale = 0.004f;
    for (int mode = 2; mode < MODES; mode++) {
        tu_error err;
        if (mode == 4 || mode == 5) continue;
        select_mode(&w, mode);
        x.d.mode = w.d.mode;
        decode(&w);
        decode(&x);
        err = tu_compare_bf16(w.out, 0, x.out64, 0, 8, 512);
        TU_CHECK_LE(err.rms, mode < 6 ? 2e-2 : 2.5e-3);
        TU_CHECK_LE(fabs(err.bias), mode < 6 ? 2e-3 : 3e-4);
        TU_CHECK_LE(tu_compare_lse(w.lse, x.lse64, 8).absolute, mode < 6 ? 2e-2 : 1e-3);
    }
    free_world(&w);
    free_world(&x);
}

/* ================================================================================================
   The tensor core
   ============================================================================================== */

/* c + one product a * b, the other 31 being 0 */
static float mma_one(float c, float a, float b)
{
    uint8_t x[32] = {0}, y[32] = {0};
    x[17] = snapmla_ref_e4m3_from_float(a);
    y[17] = snapmla_ref_e4m3_from_float(b);
    return snapmla_ref_mma_e4m3(c, x, y);
}

static void fp8_tensor_core_facts(void **state)
{
    (void)state;
    /* C = 256 plus 256 * 2^-k * m: all of m up to k = 11, 1 fraction bit at 12, none at 13 */
    for (int quarter = 4; quarter < 8; quarter++) {
        const float m = (float)quarter / 4;
        for (int k = 3; k < 16; k++) {
            const float half = ldexpf(1, 4 - k / 2), rest = ldexpf(1, 4 - (k - k / 2));
            const double kept = k <= 11   ? (double)m
                                : k == 12 ? floor((double)m * 2) / 2
                                : k == 13 ? 1.0
                                          : 0.0;
            for (int sign = -1; sign <= 1; sign += 2) { /* sign and magnitude: both signs alike */
                const float got = mma_one((float)sign * 256, m * half, (float)sign * rest);
                TU_CHECK_NEAR(got, sign * (256 + ldexp(256, -k) * kept), 0);
            }
        }
    }
    /* an accumulator that only passes through is cut to 13 fraction bits as well */
    TU_CHECK_NEAR(mma_one(15 + ldexpf(1, -11), 0, 1), 15, 0);
    TU_CHECK_NEAR(mma_one(-15 - ldexpf(1, -11), 0, 1), -15, 0);
    TU_CHECK_NEAR(mma_one(15 + ldexpf(1, -10), 0, 1), 15 + ldexp(1, -10), 0);
    TU_CHECK_NEAR(mma_one(ldexpf(1, -100), 0, 0), ldexp(1, -100), 0);
    TU_CHECK_INT(bits_of(mma_one(0, 1, 0)), 0);
    TU_CHECK_NEAR(mma_one(1e30f, 448, 448), (double)from_bits(bits_of(1e30f) & ~0x3ffu), 0);
    TU_CHECK_NEAR(mma_one(0, 448, -448), -200704, 0);
    TU_CHECK_NEAR(mma_one(0, 0.001953125f, 0.001953125f), ldexp(1, -18), 0); /* subnormals */
    TU_CHECK(mma_one(0, (float)NAN, 1) != mma_one(0, (float)NAN, 1), "NaN lost");
    TU_CHECK(mma_one((float)NAN, 1, 1) != 0 && mma_one(INFINITY, 1, 1) == INFINITY, "Inf lost");
    {
        /* the exponent of 1.75 * 1.75 is that of its factors, 0: an accumulator of 2^-13 survives
           beside it, and shows when the rest cancels */
        uint8_t a[32] = {0}, b[32] = {0};
        a[0] = a[31] = snapmla_ref_e4m3_from_float(1.75f);
        b[0] = snapmla_ref_e4m3_from_float(1.75f);
        b[31] = snapmla_ref_e4m3_from_float(-1.5f);
        TU_CHECK_NEAR(snapmla_ref_mma_e4m3(ldexpf(1, -13), a, b), 0.4375 + ldexp(1, -13), 0);
        TU_CHECK_NEAR(snapmla_ref_mma_e4m3(ldexpf(1, -14), a, b), 0.4375, 0);
    }
    {
        /* 32 products, each below the unit: each is lost, whatever their sum */
        uint8_t a[32], b[32];
        memset(a, snapmla_ref_e4m3_from_float(0.0625f), 32);
        memset(b, snapmla_ref_e4m3_from_float(0.0625f), 32); /* 2^-8; the unit beside 64 is 2^-7 */
        TU_CHECK_NEAR(snapmla_ref_mma_e4m3(64, a, b), 64, 0);
        TU_CHECK_NEAR(snapmla_ref_mma_e4m3(31, a, b), 31.125, 0);
    }
}

static void fp8_tensor_core_has_no_order(void **state)
{
    (void)state;
    tu_rng rng = tu_seed(50);
    for (int i = 0; i < 2000; i++) {
        uint8_t a[32], b[32], a2[32], b2[32];
        int32_t order[32];
        const float c = (float)(tu_gauss(&rng) * ldexp(1, (int)tu_below(&rng, 30) - 10));
        double exact = (double)c, largest = fabs(exact);
        float one, two;
        tu_fill_e4m3(&rng, a, 32);
        tu_fill_e4m3(&rng, b, 32);
        tu_permutation(&rng, order, 32, 0);
        for (int k = 0; k < 32; k++) {
            a2[k] = b[order[k]]; /* and a, b change places */
            b2[k] = a[order[k]];
            exact += e4m3_value(a[k]) * e4m3_value(b[k]);
            largest = fmax(largest, fabs(e4m3_value(a[k]) * e4m3_value(b[k])));
        }
        one = snapmla_ref_mma_e4m3(c, a, b);
        two = snapmla_ref_mma_e4m3(c, a2, b2);
        TU_CHECK_INT(bits_of(one), bits_of(two));
        TU_CHECK_INT(bits_of(one) & 0x3ff, 0); /* 13 fraction bits */
        TU_CHECK_LE(fabs((double)one - exact),
                    33 * largest * ldexp(1, -13) + fabs(exact) * ldexp(1, -13));
    }
}

static void bf16_tensor_core_facts(void **state)
{
    (void)state;
    uint16_t a[16] = {0}, b[16] = {0};
    a[0] = b[0] = tu_bf16(ldexp(1, -12));
    TU_CHECK_NEAR(snapmla_ref_mma_bf16(1, a, b), 1, 0); /* 1 + 2^-24, towards zero */
    TU_CHECK_NEAR(snapmla_ref_mma_bf16(1 + FLT_EPSILON, a, b), 1 + (double)FLT_EPSILON, 0);
    b[0] = tu_bf16(-ldexp(1, -12));
    TU_CHECK_NEAR(snapmla_ref_mma_bf16(1, a, b), 1 - ldexp(1, -24), 0); /* has a bit there */
    TU_CHECK_NEAR(snapmla_ref_mma_bf16(-1, a, b), -1, 0);
    b[0] = tu_bf16(ldexp(1, -12));
    a[9] = b[9] = tu_bf16(ldexp(1, -12));
    TU_CHECK_NEAR(snapmla_ref_mma_bf16(1, a, b), 1 + ldexp(1, -23), 0); /* two of them add up */
    for (int k = 0; k < 16; k++) a[k] = b[k] = tu_bf16(ldexp(1, -13));
    TU_CHECK_NEAR(snapmla_ref_mma_bf16(1, a, b), 1, 0); /* 2^-26 each: below the 25 bits */
    TU_CHECK_NEAR(snapmla_ref_mma_bf16(0, a, b), ldexp(1, -22), 0);
    for (int k = 0; k < 16; k++) a[k] = b[k] = tu_bf16(1e-30); /* products below f32 */
    TU_CHECK_NEAR(snapmla_ref_mma_bf16(0, a, b), 0, 0);
    TU_CHECK_NEAR(snapmla_ref_mma_bf16(1e-40f, a, b), (double)1e-40f, 0);
    a[3] = 0x7f80;
    TU_CHECK_NEAR(snapmla_ref_mma_bf16(0, a, b), INFINITY, 0);
    b[3] = 0;
    TU_CHECK(snapmla_ref_mma_bf16(0, a, b) != snapmla_ref_mma_bf16(0, a, b), "Inf * 0");
    {
        tu_rng rng = tu_seed(51);
        for (int i = 0; i < 2000; i++) {
            const float c = (float)tu_gauss(&rng);
            double exact = (double)c;
            tu_fill_bf16(&rng, a, 16, 0, ldexp(1, (int)tu_below(&rng, 8) - 4));
            tu_fill_bf16(&rng, b, 16, 0, 1);
            for (int k = 0; k < 16; k++) exact += tu_from_bf16(a[k]) * tu_from_bf16(b[k]);
            TU_CHECK_LE(fabs((double)snapmla_ref_mma_bf16(c, a, b) - exact),
                        fabs(exact) * ldexp(1, -23) + 17 * 64 * ldexp(1, -25));
        }
    }
}

/* The measured growth of the accumulation error on an H200: P ~ U(0, 1], V ~ N(mean, 1), both in
   e4m3, over K tokens; one accumulator, or a fresh one every 64 tokens that is added in FP32. */
static void fp8_error_growth_as_measured(void **state)
{
    (void)state;
    const struct {
        int tokens;
        double mean, one, one_bias, fresh, fresh_bias;
    } measured[] = {{1024, 0, 5.0e-4, -8.9e-5, 6.8e-5, -3.3e-5},
                    {1024, 0.5, 3.7e-3, -3.6e-3, 5.2e-5, -5.0e-5},
                    {4096, 0, 1.3e-3, -1.8e-4, 6.7e-5, -3.3e-5},
                    {4096, 0.5, 2.3e-2, -2.3e-2, 5.0e-5, -5.0e-5},
                    {16384, 0, 3.0e-3, -5.7e-4, 6.3e-5, -3.3e-5},
                    {16384, 0.5, 1.1e-1, -1.1e-1, 5.0e-5, -5.0e-5}};
    for (size_t i = 0; i < sizeof measured / sizeof *measured; i++) {
        tu_rng rng = tu_seed(60 + i);
        tu_error one, fresh;
        memset(&one, 0, sizeof one);
        memset(&fresh, 0, sizeof fresh);
        for (int cell = 0; cell < 512; cell++) {
            float c = 0, part = 0, master = 0;
            double exact = 0;
            for (int t = 0; t < measured[i].tokens; t += 32) {
                uint8_t p[32], v[32];
                for (int k = 0; k < 32; k++) {
                    p[k] = snapmla_ref_e4m3_from_float((float)(1 - tu_uniform(&rng)));
                    v[k] = snapmla_ref_e4m3_from_float((float)(measured[i].mean + tu_gauss(&rng)));
                    exact +=
                        (double)(snapmla_ref_e4m3_to_float(p[k]) * snapmla_ref_e4m3_to_float(v[k]));
                }
                c = snapmla_ref_mma_e4m3(c, v, p);
                part = snapmla_ref_mma_e4m3(t % 64 ? part : 0, v, p);
                if (t % 64) master += part;
            }
            tu_error_add(&one, (double)c, exact, 0, cell);
            tu_error_add(&fresh, (double)master, exact, 0, cell);
        }
        tu_error_finish(&one);
        tu_error_finish(&fresh);
        if (print_table) {
            print_message("K %6d V mean %.1f: one accumulator %.2e (%.1e), fresh %.2e (%.1e)\n",
                          measured[i].tokens, measured[i].mean, one.rms, one.shrink, fresh.rms,
                          fresh.shrink);
        }
        TU_CHECK_NEAR(one.rms / measured[i].one, 1, 0.25);
        TU_CHECK_NEAR(fresh.rms / measured[i].fresh, 1, 0.25);
        TU_CHECK_NEAR(one.shrink, measured[i].one_bias, 0.25 * fabs(measured[i].one_bias) + 2e-4);
        TU_CHECK_NEAR(fresh.shrink, measured[i].fresh_bias, 2e-5);
    }
}

/* ================================================================================================
   Errors of the emulated kernels against EXACT: the bounds that the project promises
   ============================================================================================== */

/* Like random_world, but fast enough for a million tokens: codes drawn from a table, at most
   UNIQUE_PAGES pages, which then repeat.  Logits have deviation q_std.  With mean 0 they come
   from the rope part, so that weights and values have nothing in common and the output averages out
   (else q tilts the mean of V, which is the same latent, and the output stays large). */
static world long_world(uint64_t seed, int heads, int len, double mean, double q_std)
{
    enum { TABLE = 65536, UNIQUE_PAGES = 2048, L = 512, R = 64 };
    const int pages = (len + 63) / 64;
    world w = bare_world(1, 1, heads, L, R, 64, len < UNIQUE_PAGES * 64 ? len : UNIQUE_PAGES * 64);
    uint8_t *codes = (uint8_t *)tu_alloc(TABLE, 0);
    uint16_t *ropes = (uint16_t *)tu_alloc(TABLE * 2, 0);
    tu_rng rng = tu_seed(seed);
    const double scale = (3.3 + mean) / 448; /* of 512 N(mean, 1) values about the largest is 448 */
    const int unique = pages < UNIQUE_PAGES ? pages : UNIQUE_PAGES;
    for (int i = 0; i < TABLE; i++) {
        codes[i] = snapmla_ref_e4m3_from_float((float)((mean + tu_gauss(&rng)) / scale));
        ropes[i] = tu_bf16(tu_gauss(&rng) / scale);
    }
    for (int64_t slot = 0; slot < w.slots; slot++) {
        for (int d = 0; d < L; d += 4) {
            const uint64_t u = tu_u64(&rng);
            for (int k = 0; k < 4; k++)
                w.d.cache.content[slot * L + d + k] = codes[u >> (16 * k) & 0xffff];
        }
        for (int d = 0; d < R; d += 4) {
            const uint64_t u = tu_u64(&rng);
            for (int k = 0; k < 4; k++)
                w.d.cache.rope[slot * R + d + k] = ropes[u >> (16 * k) & 0xffff];
        }
        w.d.cache.scale[slot] = (float)(scale * exp2(0.15 * tu_gauss(&rng)));
    }
    free(codes);
    free(ropes);
    free(w.table);
    w.table = (int32_t *)tu_alloc((size_t)pages * sizeof(int32_t), 0);
    for (int i = 0; i < pages; i += unique) {
        tu_permutation(&rng, w.table + i, pages - i < unique ? pages - i : unique, 0);
    }
    w.d.block_table = w.table;
    w.d.block_table_width = pages;
    w.lens[0] = len;
    tu_fill_bf16(&rng, w.q, w.rows * w.dim, 0, q_std);
    for (int64_t r = 0; r < w.rows && mean == 0; r++) {
        tu_fill_bf16(&rng, w.q + r * w.dim, L, 0, 0.05 * q_std);
        tu_fill_bf16(&rng, w.q + r * w.dim + L, R, 0, 3 * q_std);
    }
    return w;
}

#ifdef __SANITIZE_ADDRESS__
enum { LONGEST = 4096 }; /* ten times slower there, and nothing new to find */
#else
enum { LONGEST = 1048576 };
#endif

typedef struct measured_error {
    tu_error out;
    tu_lse_error lse;
} measured_error;

/* EMULATED in one split (or as d says) against the EXACT result `exact`. */
static measured_error measure(world *w, const double *exact, const double *exact_lse)
{
    measured_error m;
    w->d.fidelity = SNAPMLA_REF_EMULATED;
    poison_outputs(w);
    decode(w);
    m.out = tu_compare_bf16(w->out, 0, exact, 0, w->rows, w->d.cache.latent_dim);
    m.lse = tu_compare_lse(w->lse, exact_lse, w->rows);
    return m;
}

static double *take_exact(world *w, double **lse)
{
    const size_t bytes = (size_t)(w->rows * w->d.cache.latent_dim) * sizeof(double);
    double *exact = (double *)tu_alloc(bytes, 0);
    *lse = (double *)tu_alloc((size_t)w->rows * sizeof(double), 0);
    w->d.fidelity = SNAPMLA_REF_EXACT;
    decode(w);
    memcpy(exact, w->out64, bytes);
    memcpy(*lse, w->lse64, (size_t)w->rows * sizeof(double));
    return exact;
}

static void show(const char *what, int len, const char *how, const measured_error *m)
{
    if (!print_table) return;
    print_message("%-24s %8d %-13s rms %.2e bias %+.1e cosine %.1e lse %.1e\n", what, len, how,
                  m->out.rms, m->out.bias, m->out.cosine, m->lse.absolute);
}

/* The precise mode, in one split, against its own EXACT, which knows q unrounded; and the default mode
   against the same, so that the bounds are seen to ask for something. */
static void check_precise(world *w, const char *what, int len, double rms, double lse_absolute)
{
    double *lse, *exact;
    measured_error precise, rounded;
    w->d.fp8_tensor_core = w->d.block_tokens = w->d.split_tokens = 0;
    w->d.mode = SNAPMLA_REF_MODE_PRECISE;
    exact = take_exact(w, &lse);
    precise = measure(w, exact, lse);
    show(what, len, "precise", &precise);
    TU_CHECK_LE(precise.out.rms, rms);
    TU_CHECK_LE(fabs(precise.out.bias), len < 64 ? 1e-3 : 3e-4); /* one key: the same in all rows */
    TU_CHECK_LE(precise.lse.absolute, lse_absolute);
    w->d.mode = SNAPMLA_REF_MODE_DEFAULT;
    if (len <= 20000) {
        rounded = measure(w, exact, lse);
        show(what, len, "default", &rounded);
        TU_CHECK_LE(precise.out.rms, rounded.out.rms + 1e-4);
        if (strstr(what, "V mean 0.0, q std 1") && len >= 64) TU_CHECK_LE(1e-2, rounded.out.rms);
    }
    free(exact);
    free(lse);
}

static void error_bounds_by_length(void **state)
{
    (void)state;
    const int lens[] = {1, 64, 300, 1024, 4096, 16384, 131072, 1048576};
    const char *const how[] = {"one split", "tensor core", "blocks of 128", "splits"};
    for (int kind = 0; kind < 4; kind++) {
        const double mean = kind & 1 ? 0.5 : 0, q_std = kind & 2 ? 4 : 1;
        for (int i = 0; i < (q_std > 1 ? 7 : 8); i++) {
            const int len = lens[i], heads = len > 50000 ? 4 : 16;
            if (len > LONGEST) break;
            world w = long_world(70 + (uint64_t)(kind * 10 + i), heads, len, mean, q_std);
            double *lse, *exact = take_exact(&w, &lse);
            char what[64];
            snprintf(what, sizeof what, "V mean %.1f, q std %.0f", mean, q_std);
            for (int mode = 0; mode < 4; mode++) { /* one split; tensor core; 128 tokens; splits */
                measured_error m;
                if (mode == 1 && len > 20000) continue; /* slow */
                if (mode == 2 && len > 20000) continue;
                if (mode == 3 && len > 200000) continue;
                w.d.fp8_tensor_core = mode == 1;
                w.d.block_tokens = mode == 2 ? 128 : 0;
                w.d.split_tokens = mode == 3 ? (len > 5000 ? 1024 : 128) : 0;
                m = measure(&w, exact, lse);
                show(what, len, how[mode], &m);
                if (kind == 0) TU_CHECK_LE(m.out.rms, 3.2e-2);
                if (kind == 1 && len >= 1024) TU_CHECK_LE(m.out.rms, 4.5e-3);
                if (kind == 1 && len >= 16384) TU_CHECK_LE(m.out.rms, 2.5e-3);
                if (kind == 1 && len >= 1024) TU_CHECK_LE(fabs(m.out.bias), 5e-4);
                if (kind == 2) TU_CHECK_LE(m.out.rms, 1.8e-2);
                if (kind == 3) TU_CHECK_LE(m.out.rms, 1e-2);
                if (kind >= 2) TU_CHECK_LE(fabs(m.out.bias), 1e-3);
                TU_CHECK_LE(m.lse.absolute, kind < 2 ? 2e-3 : 2e-2);
            }
            if (len < 200000 || kind == 1)
                check_precise(&w, what, len, 2.5e-3, kind < 2 ? 1e-4 : 1e-3);
            free(exact);
            free(lse);
            free_world(&w);
        }
    }
}

/* What rounding P costs by itself: everything else in double. */
static void only_the_rounding_of_p(void **state)
{
    (void)state;
    enum { LEN = 4096, HEADS = 4, L = 512 };
    for (int kind = 0; kind < 2; kind++) {
        world w = long_world(80, HEADS, LEN, 0, kind ? 4 : 1);
        double *lse, *exact = take_exact(&w, &lse);
        double *out = (double *)tu_alloc(HEADS * L * sizeof(double), 0);
        double *x = (double *)tu_alloc(LEN * sizeof(double), 0);
        tu_error alone;
        measured_error m;
        for (int h = 0; h < HEADS; h++) {
            uint8_t qc[L];
            uint16_t qr[64];
            float q_scale;
            double sum = 0;
            snapmla_ref_quantize(w.q + h * 576, L, w.q + h * 576 + L, 64, qc, &q_scale, qr);
            for (int first = 0; first < LEN; first += 64) {
                double top = 0, f[64];
                for (int t = 0; t < 64; t++) {
                    const int64_t slot = slot_of(&w, 0, first + t);
                    double s = 0;
                    for (int d = 0; d < L; d++) {
                        s += (double)(snapmla_ref_e4m3_to_float(qc[d]) *
                                      snapmla_ref_e4m3_to_float(w.d.cache.content[slot * L + d]));
                    }
                    for (int d = 0; d < 64; d++) {
                        s += tu_from_bf16(qr[d]) * tu_from_bf16(w.d.cache.rope[slot * 64 + d]);
                    }
                    s *=
                        (double)w.d.softmax_scale * (double)q_scale * (double)w.d.cache.scale[slot];
                    f[t] = exp(s - lse[h]) * (double)w.d.cache.scale[slot];
                    top = fmax(top, f[t]);
                }
                for (int t = 0; t < 64; t++) {
                    const int64_t slot = slot_of(&w, 0, first + t);
                    const int code = e4m3_nearest(f[t] * (448 / top));
                    const double p = e4m3_value(code) * top / 448;
                    sum += code < 8 ? f[t] / (double)w.d.cache.scale[slot]
                                    : p / (double)w.d.cache.scale[slot];
                    for (int d = 0; d < L; d++) {
                        out[h * L + d] +=
                            p * (double)snapmla_ref_e4m3_to_float(w.d.cache.content[slot * L + d]);
                    }
                }
            }
            for (int d = 0; d < L; d++) out[h * L + d] /= sum;
        }
        alone = tu_compare(out, 0, exact, 0, HEADS, L);
        for (int tensor_core = 0; tensor_core < 2; tensor_core++) {
            w.d.fp8_tensor_core = tensor_core;
            m = measure(&w, exact, lse);
            if (print_table) {
                print_message("q std %d, %d tokens: rounding of P alone %.2e, emulated %.2e%s\n",
                              kind ? 4 : 1, LEN, alone.rms, m.out.rms,
                              tensor_core ? " (tensor core)" : "");
            }
            TU_CHECK_LE(m.out.rms, alone.rms + 2e-3);
        }
        free(exact);
        free(lse);
        free(out);
        free(x);
        free_world(&w);
    }
}

static void error_bounds_of_peaked_rows(void **state)
{
    (void)state;
    const int lens[] = {500, 16384, 131072};
    for (int i = 0; i < 3 && lens[i] <= LONGEST; i++) {
        world w = long_world(90, 6, lens[i], 0, 0);
        double *lse, *exact;
        measured_error m;
        for (int h = 0; h < 6; h++) { /* along a key, so that it gets nearly all of the weight */
            const int64_t slot = slot_of(&w, 0, (lens[i] - 1) * h / 5);
            for (int d = 0; d < 512; d++) {
                w.q[h * 576 + d] = tu_bf16(e4m3_value(w.d.cache.content[slot * 512 + d]) *
                                           (double)w.d.cache.scale[slot] * 1.5);
            }
        }
        exact = take_exact(&w, &lse);
        for (int mode = 0; mode < 2; mode++) {
            if (mode && lens[i] > 20000) continue;
            w.d.fp8_tensor_core = mode;
            m = measure(&w, exact, lse);
            show("one-hot", lens[i], mode ? "tensor core" : "one split", &m);
            TU_CHECK_LE(m.out.rms, 2.5e-3);
            if (mode) { /* products of one sign: 16 truncated steps in one accumulator shrink q.k */
                TU_CHECK_LE(m.lse.relative, 1e-2);
            } else {
                TU_CHECK_LE(m.lse.absolute, 2e-2);
            }
        }
        check_precise(&w, "one-hot", lens[i], 2.5e-3, 1e-3);
        free(exact);
        free(lse);
        free_world(&w);
    }
}

/* A sink: token 5 of the first block has half the mass, or 2^20 times that of every other. */
static void error_bounds_with_a_sink(void **state)
{
    (void)state;
    enum { LEN = LONGEST < 131072 ? LONGEST : 131072, L = 512, R = 64 };
    for (int kind = 0; kind < 2; kind++) {
        world w = long_world(95, 4, LEN, 0, 0);
        const double lead = kind ? 20 * log(2.0) : log(LEN - 1.0);
        const int64_t sink = slot_of(&w, 0, 5);
        double *lse, *exact;
        measured_error m;
        for (int64_t slot = 0; slot < w.slots; slot++) {
            memset(w.d.cache.rope + slot * R, 0, R * 2);
            if (slot == sink) w.d.cache.rope[slot * R] = tu_bf16(1 / (double)w.d.cache.scale[slot]);
        }
        for (int h = 0; h < 4; h++) {
            w.q[h * 576] = tu_bf16(0.01 * (h + 1)); /* nearly flat */
            w.q[h * 576 + L] = tu_bf16(lead / (double)w.d.softmax_scale);
        }
        exact = take_exact(&w, &lse);
        m = measure(&w, exact, lse);
        show(kind ? "sink, 2^20 of the rest" : "sink, half the mass", LEN, "one split", &m);
        TU_CHECK_LE(m.out.rms, 5e-3);
        TU_CHECK_LE(m.lse.absolute, 2e-3);
        check_precise(&w, kind ? "sink, 2^20 of the rest" : "sink, half the mass", LEN, 2.5e-3,
                      1e-3);
        free(exact);
        free(lse);
        free_world(&w);
    }
}

/* The number of splits moves the result by the rounding of the merge and no more. */
static void splits_agree(void **state)
{
    (void)state;
    world w = long_world(97, 8, 20000, 0.3, 2);
    const size_t bytes = (size_t)(w.rows * 512) * sizeof(double);
    double *one = (double *)tu_alloc(bytes, 0);
    float lse[8];
    w.d.fidelity = SNAPMLA_REF_EMULATED;
    decode(&w);
    memcpy(one, w.out64, bytes);
    memcpy(lse, w.lse, sizeof lse);
    for (int split = 64; split <= 32768; split *= 2) {
        w.d.split_tokens = split;
        decode(&w);
        TU_CHECK_LE(tu_compare(w.out64, 0, one, 0, w.rows, 512).rms,
                    6e-3); /* other maxima: P rounds anew */
        for (int h = 0; h < 8; h++) TU_CHECK_NEAR(w.lse[h], lse[h], 2e-5);
        if (split > 20000) TU_CHECK_BYTES(w.out64, one, bytes); /* one split is one split */
    }
    free(one);
    free_world(&w);
}

/* One FP8 accumulator over a long split loses what a fresh one per block keeps. */
static void one_accumulator_is_worse(void **state)
{
    (void)state;
    world w = long_world(98, 4, 16384, 0.5, 1);
    double *lse, *exact = take_exact(&w, &lse);
    measured_error fresh, one;
    w.d.fp8_tensor_core = 1;
    fresh = measure(&w, exact, lse);
    w.d.one_accumulator = 1;
    one = measure(&w, exact, lse);
    show("fresh accumulators", 16384, "tensor core", &fresh);
    show("one accumulator", 16384, "tensor core", &one);
    TU_CHECK_LE(fresh.out.rms, 2.5e-3);
    TU_CHECK(one.out.rms > 0.05 && one.out.bias < -0.05, "rms %g bias %g", one.out.rms,
             one.out.bias);
    w.d.fp8_tensor_core = 0; /* in f32 it does no harm */
    one = measure(&w, exact, lse);
    show("one accumulator", 16384, "f32", &one);
    TU_CHECK_LE(one.out.rms, 3e-3);
    free(exact);
    free(lse);
    free_world(&w);
}

/* ================================================================================================
   Merge
   ============================================================================================== */

static void merge_identities(void **state)
{
    (void)state;
    enum { ROWS = 7, WIDTH = 24 };
    tu_rng rng = tu_seed(110);
    uint16_t part[3 * ROWS * WIDTH], out[ROWS * WIDTH];
    float part_lse[3 * ROWS], lse[ROWS];
    snapmla_ref_merge_desc m;
    memset(&m, 0, sizeof m);
    m.dim = WIDTH;
    m.rows = ROWS;
    m.part_out = part;
    m.part_lse = part_lse;
    m.out = out;
    m.lse = lse;
    tu_fill_bf16(&rng, part, 3 * ROWS * WIDTH, 0, 1);
    for (int i = 0; i < 3 * ROWS; i++) part_lse[i] = (float)(3 * tu_gauss(&rng));

    m.parts = 1; /* one part is itself */
    TU_CHECK_INT(snapmla_ref_merge(&m), 0);
    TU_CHECK_BYTES(out, part, sizeof out);
    TU_CHECK_BYTES(lse, part_lse, sizeof lse);

    m.parts = 3; /* against the formula */
    TU_CHECK_INT(snapmla_ref_merge(&m), 0);
    for (int r = 0; r < ROWS; r++) {
        double sum = 0;
        for (int n = 0; n < 3; n++) sum += exp((double)part_lse[n * ROWS + r]);
        TU_CHECK_NEAR(lse[r], log(sum), 1e-6);
        for (int k = 0; k < WIDTH; k++) {
            double value = 0;
            for (int n = 0; n < 3; n++) {
                value += exp((double)part_lse[n * ROWS + r]) / sum *
                         tu_from_bf16(part[(n * ROWS + r) * WIDTH + k]);
            }
            TU_CHECK_NEAR(tu_from_bf16(out[r * WIDTH + k]), value,
                          fabs(value) * ldexp(1, -8) + 1e-12);
        }
    }
    { /* in place */
        uint16_t wanted[ROWS * WIDTH];
        float wanted_lse[ROWS];
        memcpy(wanted, out, sizeof wanted);
        memcpy(wanted_lse, lse, sizeof wanted_lse);
        m.out = part;
        m.lse = part_lse;
        TU_CHECK_INT(snapmla_ref_merge(&m), 0);
        TU_CHECK_BYTES(part, wanted, sizeof wanted);
        TU_CHECK_BYTES(part_lse, wanted_lse, sizeof wanted_lse);
        m.out = out;
        m.lse = NULL; /* not wanted */
        memset(lse, 0xee, sizeof lse);
        TU_CHECK_INT(snapmla_ref_merge(&m), 0);
        TU_CHECK_FILLED(lse, 0xee, sizeof lse);
    }
    TU_CHECK_INT(live_blocks, 0);
}

static void merge_special_parts(void **state)
{
    (void)state;
    uint16_t part[3 * 8], out[8];
    float part_lse[3], lse;
    snapmla_ref_merge_desc m;
    memset(&m, 0, sizeof m);
    m.parts = 3;
    m.dim = 8;
    m.rows = 1;
    m.part_out = part;
    m.part_lse = part_lse;
    m.out = out;
    m.lse = &lse;
    for (int i = 0; i < 24; i++) part[i] = tu_bf16(i / 8 + 1);
    part_lse[0] = -INFINITY; /* skipped, even with garbage in it */
    part_lse[1] = 2;
    part_lse[2] = 2;
    tu_poison_bf16(part, 8);
    TU_CHECK_INT(snapmla_ref_merge(&m), 0);
    for (int k = 0; k < 8; k++) TU_CHECK_NEAR(tu_from_bf16(out[k]), 2.5, 0);
    TU_CHECK_NEAR(lse, 2 + log(2.0), 1e-6);

    part_lse[1] = -1e30f; /* weighs nothing, but is there */
    TU_CHECK_INT(snapmla_ref_merge(&m), 0);
    for (int k = 0; k < 8; k++) TU_CHECK_NEAR(tu_from_bf16(out[k]), 3, 0);
    part_lse[1] = 1e5f;
    part_lse[2] = 1e5f;
    TU_CHECK_INT(snapmla_ref_merge(&m), 0);
    for (int k = 0; k < 8; k++) TU_CHECK_NEAR(tu_from_bf16(out[k]), 2.5, 0);

    part_lse[1] = (float)NAN; /* NaN propagates, from lse and from out */
    TU_CHECK_INT(snapmla_ref_merge(&m), 0);
    for (int k = 0; k < 8; k++) TU_CHECK_INT(out[k], 0x7fc0);
    TU_CHECK(lse != lse, "lse %g", (double)lse);
    part_lse[1] = 0;
    part_lse[2] = 0;
    part[8 + 3] = 0xffc0;
    TU_CHECK_INT(snapmla_ref_merge(&m), 0);
    TU_CHECK_INT(tu_count_nan_bf16(out, 8), 1);
    TU_CHECK_INT(out[3], 0x7fc0);

    part_lse[1] = part_lse[2] = -INFINITY;
    TU_CHECK_INT(snapmla_ref_merge(&m), 0);
    for (int k = 0; k < 8; k++) TU_CHECK_INT(out[k], 0);
    TU_CHECK(lse == -INFINITY, "lse %g", (double)lse);
}

/* Attention over two halves of the keys, merged, is attention over all of them. */
static void merged_halves_are_the_whole(void **state)
{
    (void)state;
    enum { LEN = 320, HEADS = 5, L = 64 };
    world w = random_world(111, 1, 1, HEADS, L, 16, 16, LEN, 0.3, 2, 0);
    uint16_t part[3 * HEADS * L], out[HEADS * L];
    float part_lse[3 * HEADS], lse[HEADS];
    snapmla_ref_merge_desc m;
    memset(&m, 0, sizeof m);
    m.parts = 3;
    m.dim = L;
    m.rows = HEADS;
    m.part_out = part;
    m.part_lse = part_lse;
    m.out = out;
    m.lse = lse;
    for (int f = 0; f < 3; f++) {
        double *whole;
        w.d.fidelity = (snapmla_ref_fidelity)f;
        for (int n = 0; n < 3; n++) { /* pages 0..9, 10..19, and none */
            snapmla_ref_decode_desc d = w.d;
            const int32_t len = n < 2 ? LEN / 2 : 0;
            d.seq_lens = &len;
            d.block_table = w.table + n * 10;
            d.block_table_width = n < 2 ? 10 : 0;
            d.out = part + n * HEADS * L;
            d.lse = part_lse + n * HEADS;
            TU_CHECK_INT(snapmla_ref_decode(&d), 0);
        }
        TU_CHECK_INT(snapmla_ref_merge(&m), 0);
        decode(&w);
        whole = w.out64;
        TU_CHECK_LE(tu_compare_bf16(out, 0, whole, 0, HEADS, L).rms, f == 2 ? 2e-2 : 3.5e-3);
        for (int h = 0; h < HEADS; h++) TU_CHECK_NEAR(lse[h], w.lse64[h], 2e-5);
    }
    free_world(&w);
}

/* ================================================================================================
   Arguments, memory, size
   ============================================================================================== */

/* The desc must be refused and nothing may be written. */
#define REFUSED(change)                                            \
    do {                                                           \
        snapmla_ref_decode_desc d = good;                          \
        change;                                                    \
        TU_CHECK(snapmla_ref_decode(&d) == -1, "%s", #change);     \
        TU_CHECK_FILLED(w.out, 0xff, (size_t)(w.rows * 64) * 2);   \
        TU_CHECK_FILLED(w.out64, 0xff, (size_t)(w.rows * 64) * 8); \
        TU_CHECK_FILLED(w.lse, 0xff, (size_t)w.rows * 4);          \
        TU_CHECK_FILLED(w.lse64, 0xff, (size_t)w.rows * 8);        \
    } while (0)
#define ACCEPTED(change)                                      \
    do {                                                      \
        snapmla_ref_decode_desc d = good;                     \
        change;                                               \
        TU_CHECK(snapmla_ref_decode(&d) == 0, "%s", #change); \
    } while (0)

static void decode_refuses_bad_arguments(void **state)
{
    (void)state;
    world w = random_world(120, 2, 2, 3, 64, 16, 16, 64, 0, 1, 0);
    snapmla_ref_decode_desc good;
    uint8_t codes[12 * 64] = {0};
    uint16_t ropes[12 * 16] = {0};
    float scales[12] = {0};
    w.d.seq_lens = w.lens;
    for (int f = 0; f < 3; f++) {
        good = w.d;
        good.fidelity = (snapmla_ref_fidelity)f;
        poison_outputs(&w);
        TU_CHECK_INT(snapmla_ref_decode(NULL), -1);
        REFUSED(d.fidelity = (snapmla_ref_fidelity)3);
        REFUSED(d.mode = (snapmla_ref_mode)2);
        REFUSED(d.mode = (snapmla_ref_mode)-1);
        REFUSED(d.batch = -1);
        REFUSED(d.s_q = -1);
        REFUSED(d.heads = -1);
        REFUSED(d.batch = d.s_q = d.heads = INT32_MAX);
        REFUSED(d.seq_lens = NULL);
        REFUSED(d.cache.latent_dim = 40);
        REFUSED(d.cache.latent_dim = -64);
        REFUSED(d.cache.latent_dim = 65536 + 32);
        REFUSED(d.cache.rope_dim = 8);
        REFUSED(d.cache.rope_dim = 65536 + 16);
        REFUSED(d.cache.page_size = -1);
        REFUSED(d.cache.pages = -1);
        REFUSED(d.cache.pages = INT64_MAX);
        REFUSED(d.cache.pages = 1); /* then the table points past it */
        REFUSED(d.block_table = NULL);
        REFUSED(d.block_table_width = -1);
        REFUSED(d.block_table_stride = 3);
        REFUSED(d.block_table_stride = -4);
        REFUSED(d.causal = 2);
        REFUSED(d.causal = -1);
        REFUSED(d.softmax_scale = 0);
        REFUSED(d.softmax_scale = -1);
        REFUSED(d.softmax_scale = (float)NAN);
        REFUSED(d.softmax_scale = INFINITY);
        REFUSED(d.max_seq_len = -1);
        REFUSED(d.q = NULL);
        REFUSED(d.q_content = codes);
        REFUSED(d.q_scale = scales);
        REFUSED(d.q_rope = ropes);
        REFUSED(d.q_head_stride = 79);
        REFUSED(d.q_token_stride = -80);
        REFUSED(d.q_batch_stride = 1);
        REFUSED(d.q_head_stride = INT64_MAX);
        REFUSED(d.out_head_stride = 63);
        REFUSED(d.out_token_stride = -64);
        REFUSED(d.out_batch_stride = 63);
        REFUSED(d.out_head_stride = INT64_MAX / 2);
        REFUSED(d.lse_token_stride = 2);
        REFUSED(d.lse_batch_stride = -1);
        REFUSED(d.lse_token_stride = INT64_MAX);
        REFUSED((d.out = NULL, d.out64 = NULL, d.lse = NULL, d.lse64 = NULL));
        w.table[5] = (int32_t)good.cache.pages;
        REFUSED((void)0);
        w.table[5] = 4;
        refuse_memory = 1;
        REFUSED((void)0);
        refuse_memory = 0;
        if (f == SNAPMLA_REF_BF16) {
            REFUSED(d.key = NULL);
            REFUSED((d.q = NULL, d.q_content = codes, d.q_scale = scales, d.q_rope = ropes));
            ACCEPTED((d.cache.content = NULL, d.cache.scale = NULL, d.cache.rope = NULL));
        } else {
            REFUSED(d.cache.content = NULL);
            REFUSED(d.cache.scale = NULL);
            REFUSED(d.cache.rope = NULL);
            REFUSED(d.cache.content_page_stride = 16 * 64 - 1);
            REFUSED(d.cache.scale_page_stride = 15);
            REFUSED(d.cache.rope_page_stride = -16 * 16);
            REFUSED(d.cache.content_page_stride = INT64_MAX / 2);
            REFUSED((d.q = NULL, d.q_content = codes, d.q_scale = scales));
            REFUSED((d.q = NULL, d.q_content = codes, d.q_rope = ropes));
            REFUSED((d.q = NULL, d.q_scale = scales, d.q_rope = ropes));
            ACCEPTED(d.key = NULL);
            poison_outputs(&w);
        }
        if (f == SNAPMLA_REF_EMULATED) {
            REFUSED(d.block_tokens = -64);
            REFUSED(d.block_tokens = 48);
            REFUSED(d.block_tokens = 1056);
            REFUSED(d.split_tokens = -64);
            REFUSED(d.split_tokens = 96);
            REFUSED(d.fp8_tensor_core = 2);
            REFUSED((d.mode = SNAPMLA_REF_MODE_PRECISE, d.fp8_tensor_core = 1));
            REFUSED(d.one_accumulator = -1);
        } else {
            ACCEPTED((d.block_tokens = -1, d.split_tokens = 7, d.fp8_tensor_core = 5));
        }
        ACCEPTED((d.batch = 0, d.seq_lens = NULL, d.q = NULL, d.block_table = NULL));
        ACCEPTED((d.s_q = 0, d.q = NULL));
        ACCEPTED((d.heads = 0, d.q = NULL));
        ACCEPTED((d.out = NULL, d.out64 = NULL, d.lse = NULL));
        ACCEPTED((d.lse = NULL, d.lse64 = NULL));
        TU_CHECK_INT(live_blocks, 0);
    }
    free_world(&w);
}

static void append_and_fetch_refuse_bad_arguments(void **state)
{
    (void)state;
    enum { TOKENS = 3 };
    world w = bare_world(1, 1, 1, DIM, ROPE, 4, 8);
    uint16_t latent[TOKENS * 64], rope[TOKENS * 32];
    const int64_t slots[TOKENS] = {0, -1, 7}, past[TOKENS] = {0, 12, 7};
    snapmla_ref_append_desc append, a;
    snapmla_ref_fetch_desc fetch, f;
    memset(latent, 0xff, sizeof latent);
    memset(rope, 0xff, sizeof rope);
    memset(&append, 0, sizeof append);
    append.cache = w.d.cache;
    append.tokens = TOKENS;
    append.latent = latent;
    append.rope = rope;
    append.slots = slots;
    memset(&fetch, 0, sizeof fetch);
    fetch.cache = w.d.cache;
    fetch.tokens = TOKENS;
    fetch.latent = latent;
    fetch.rope = rope;
    fetch.slots = slots;
#define BOTH_REFUSE(change_a, change_f)                                   \
    do {                                                                  \
        a = append;                                                       \
        f = fetch;                                                        \
        change_a;                                                         \
        change_f;                                                         \
        TU_CHECK(snapmla_ref_append(&a) == -1, "%s", #change_a);          \
        TU_CHECK(snapmla_ref_fetch(&f) == -1, "%s", #change_f);           \
        TU_CHECK_FILLED(w.d.cache.content, 0xff, (size_t)w.slots *DIM);   \
        TU_CHECK_FILLED(w.d.cache.scale, 0xff, (size_t)w.slots * 4);      \
        TU_CHECK_FILLED(w.d.cache.rope, 0xff, (size_t)w.slots *ROPE * 2); \
        TU_CHECK_FILLED(latent, 0xff, sizeof latent);                     \
        TU_CHECK_FILLED(rope, 0xff, sizeof rope);                         \
    } while (0)
    TU_CHECK_INT(snapmla_ref_append(NULL), -1);
    TU_CHECK_INT(snapmla_ref_fetch(NULL), -1);
    BOTH_REFUSE(a.tokens = -1, f.tokens = -1);
    BOTH_REFUSE(a.slots = NULL, f.slots = NULL);
    BOTH_REFUSE(a.slots = past, f.slots = past);
    BOTH_REFUSE(a.latent = NULL, f.latent = NULL);
    BOTH_REFUSE(a.latent_stride = DIM - 1, f.latent_stride = -DIM);
    BOTH_REFUSE(a.rope_stride = ROPE - 1, f.rope_stride = ROPE - 1);
    BOTH_REFUSE((a.rope = NULL, a.latent_stride = DIM), (f.rope = NULL, f.latent_stride = DIM));
    BOTH_REFUSE(a.cache.latent_dim = 33, f.cache.latent_dim = 33);
    BOTH_REFUSE(a.cache.rope_dim = 17, f.cache.rope_dim = 17);
    BOTH_REFUSE(a.cache.page_size = -4, f.cache.page_size = -4);
    BOTH_REFUSE(a.cache.pages = -1, f.cache.pages = -1);
    BOTH_REFUSE(a.cache.pages = 1, f.cache.pages = 1);
    BOTH_REFUSE(a.cache.content = NULL, f.cache.content = NULL);
    BOTH_REFUSE(a.cache.scale = NULL, f.cache.scale = NULL);
    BOTH_REFUSE(a.cache.rope = NULL, f.cache.rope = NULL);
    BOTH_REFUSE(a.cache.content_page_stride = 1, f.cache.content_page_stride = 1);
    BOTH_REFUSE(a.cache.scale_page_stride = 3, f.cache.scale_page_stride = 3);
    BOTH_REFUSE(a.cache.rope_page_stride = 4 * ROPE - 1, f.cache.rope_page_stride = -1);
#undef BOTH_REFUSE
    a = append;
    f = fetch;
    a.tokens = f.tokens = 0; /* nothing to do */
    a.latent = NULL;
    f.latent = NULL;
    a.slots = f.slots = NULL;
    TU_CHECK_INT(snapmla_ref_append(&a), 0);
    TU_CHECK_INT(snapmla_ref_fetch(&f), 0);
    free_world(&w);
}

static void merge_refuses_bad_arguments(void **state)
{
    (void)state;
    uint16_t part[2 * 3 * 8] = {0}, out[3 * 8];
    float part_lse[2 * 3] = {0}, lse[3];
    snapmla_ref_merge_desc good, m;
    memset(out, 0xff, sizeof out);
    memset(lse, 0xff, sizeof lse);
    memset(&good, 0, sizeof good);
    good.parts = 2;
    good.dim = 8;
    good.rows = 3;
    good.part_out = part;
    good.part_lse = part_lse;
    good.out = out;
    good.lse = lse;
#define MERGE_REFUSES(change)                                 \
    do {                                                      \
        m = good;                                             \
        change;                                               \
        TU_CHECK(snapmla_ref_merge(&m) == -1, "%s", #change); \
        TU_CHECK_FILLED(out, 0xff, sizeof out);               \
        TU_CHECK_FILLED(lse, 0xff, sizeof lse);               \
    } while (0)
    TU_CHECK_INT(snapmla_ref_merge(NULL), -1);
    MERGE_REFUSES(m.parts = 0);
    MERGE_REFUSES(m.parts = -1);
    MERGE_REFUSES(m.dim = -8);
    MERGE_REFUSES(m.rows = -1);
    MERGE_REFUSES(m.rows = INT64_MAX / 4);
    MERGE_REFUSES(m.part_out = NULL);
    MERGE_REFUSES(m.part_lse = NULL);
    MERGE_REFUSES(m.out = NULL);
    MERGE_REFUSES(m.part_out_stride = 23);
    MERGE_REFUSES(m.part_lse_stride = 2);
    refuse_memory = 1;
    MERGE_REFUSES((void)0);
    refuse_memory = 0;
#undef MERGE_REFUSES
    memset(&m, 0, sizeof m); /* no rows: nothing to do */
    TU_CHECK_INT(snapmla_ref_merge(&m), 0);
    TU_CHECK_INT(snapmla_ref_merge(&good), 0);
    TU_CHECK(calls_to_malloc > 0, "SNAPMLA_REF_MALLOC is not used");
}

/* Rows are worked through in chunks when they are many; the seams must not show. */
static void many_rows(void **state)
{
    (void)state;
    enum { HEADS = 2100, S_Q = 16, LEN = 40 };
    world w = random_world(130, 1, S_Q, HEADS, 256, -1, 16, LEN, 0, 1, 0);
    const int rows[] = {0, 1, 4095, 4096, 8191, 17001, 33599};
    double *lse = (double *)tu_alloc((size_t)w.rows * sizeof(double), 0);
    w.d.causal = 1;
    for (int f = 0; f < 3; f += 2) {
        w.d.fidelity = (snapmla_ref_fidelity)f;
        w.d.split_tokens = 64;
        decode(&w);
        for (int64_t r = 0; r < w.rows; r++) TU_CHECK(w.lse[r] == w.lse[r], "row %d", (int)r);
        for (int i = 0; i < 7; i++) {
            snapmla_ref_decode_desc d = w.d;
            double out[256], one_lse;
            const int32_t len = LEN - S_Q + 1 + rows[i] / HEADS;
            d.s_q = d.heads = 1;
            d.seq_lens = &len;
            d.q = w.q + (int64_t)rows[i] * 256;
            d.out = NULL;
            d.lse = NULL;
            d.out64 = out;
            d.lse64 = &one_lse;
            TU_CHECK_INT(snapmla_ref_decode(&d), 0);
            TU_CHECK_BYTES(w.out64 + (int64_t)rows[i] * 256, out, sizeof out);
            TU_CHECK_BYTES(w.lse64 + rows[i], &one_lse, sizeof one_lse);
        }
    }
    free(lse);
    free_world(&w);
}

/* Pages beyond 2^32 elements.  The planes are reserved, not touched, except for three pages. */
static void offsets_beyond_32_bits(void **state)
{
    (void)state;
#if defined(__SANITIZE_ADDRESS__) || SIZE_MAX <= 0xffffffffu
    skip();
#else
    const int64_t stride = INT64_C(3) << 30; /* 3 Gi elements from page to page */
    world a = random_world(140, 1, 1, 2, 64, 16, 16, 48, 0, 1, 0);
    uint8_t *content = (uint8_t *)malloc((size_t)(3 * stride));
    uint16_t *rope = (uint16_t *)malloc((size_t)(3 * stride) * 2);
    if (!content || !rope) {
        free(content);
        free(rope);
        free_world(&a);
        print_message("no address space for 27 GB of reserved planes\n");
        skip();
    } else {
        world b = random_world(140, 1, 1, 2, 64, 16, 16, 48, 0, 1, 0);
        uint8_t *old_content = b.d.cache.content;
        uint16_t *old_rope = b.d.cache.rope;
        b.d.cache.content = content;
        b.d.cache.rope = rope;
        b.d.cache.content_page_stride = b.d.cache.rope_page_stride = stride;
        b.d.cache.pages = 3;
        for (int64_t t = 0; t < 48; t++) {
            const int64_t slot = slot_of(&b, 0, t);
            append_slots(&b, &slot, 1, b.key + slot * b.dim);
        }
        for (int page = 0; page < 3; page++) { /* they are where they belong, not somewhere else */
            TU_CHECK_BYTES(content + page * stride, a.d.cache.content + page * 16 * 64, 16 * 64);
            TU_CHECK_BYTES(rope + page * stride, a.d.cache.rope + page * 16 * 16, 16 * 16 * 2);
        }
        for (int mode = 0; mode < MODES; mode++) {
            select_mode(&a, mode);
            select_mode(&b, mode);
            decode(&a);
            decode(&b);
            check_same_bits(&a, &b);
        }
        b.d.cache.content = old_content;
        b.d.cache.rope = old_rope;
        free(content);
        free(rope);
        free_world(&b);
        free_world(&a);
    }
#endif
}

/* ================================================================================================
   The division of the kernels
   ============================================================================================== */

/* The greatest f32 that is not above 1 / divisor. */
static float reciprocal_towards_zero(float divisor)
{
    const float r = 1.0f / divisor;
    return fmaf(-divisor, r, 1.0f) < 0 ? from_bits(bits_of(r) - 1) : r;
}

/* snapmla.cuh divides by a scale by multiplying with two parts of its reciprocal.  For every largest
   magnitude that a row can have and every bf16 number this gives the scale, the e4m3 code and the
   bf16 that division gives.  Mantissas repeat from binade to binade, so that most rows of the sweep
   take only a few binades; -t sweeps all. */
static void kernels_divide_exactly(void **state)
{
    (void)state;
    const float most448 = reciprocal_towards_zero(448.0f);
    const float rest448 = fmaf(-448.0f, most448, 1.0f) * most448;
    TU_CHECK_INT(bits_of(most448), 0x3b124924); /* 0x1.249248p-9 */
    TU_CHECK_INT(bits_of(rest448), 0x2f124924);
    for (uint32_t amax = 0; amax < 0x7f80; amax++) {
        const int exponent = (int)(amax >> 7) - 127;
        const int edge = exponent == -87 || exponent == -86 || exponent == 99 || exponent == 100;
        if (!print_table && !edge && exponent % 32 != 0 && amax % 397 != 0) continue;
        const int large = exponent >= 100;
        const float shrink = large ? from_bits((127 - 64) << 23) : 1.0f;
        const float magnitude = from_bits(amax << 16);
        const float least = magnitude > 1e-26f ? magnitude : 1e-26f;
        const float scale = least / 448.0f, m = least * shrink;
        TU_CHECK_INT(bits_of(fmaf(m, most448, m * rest448)), bits_of(scale * shrink));
        const float most = reciprocal_towards_zero(scale * shrink);
        const float rest = fmaf(-scale * shrink, most, 1.0f) * most;
        TU_CHECK(rest >= 0 && bits_of(rest) != 0x80000000u, "amax %04x: rest %g", amax,
                 (double)rest);
        for (uint32_t bits = 0; bits <= 0xffff; bits++) {
            const float x = from_bits(bits << 16), quotient = x / scale;
            if ((bits & 0x7fff) <= amax) {
                const float s = x * shrink, y = fmaf(s, most, s * rest);
                if (bits_of(y) != bits_of(quotient)) {
                    TU_CHECK_INT(snapmla_ref_e4m3_from_float(y),
                                 snapmla_ref_e4m3_from_float(quotient));
                }
            }
            const float y = fmaf(x, most, x * rest);
            if (large || !(fabsf(y) >= 1e-30f) || bits_of(y) == bits_of(quotient)) {
                /* a zero is taken as it comes */
                if (!large && x == 0) TU_CHECK_INT(bits_of(y), bits_of(quotient));
                continue;
            }
            TU_CHECK_INT(snapmla_ref_bf16_from_float(y), snapmla_ref_bf16_from_float(quotient));
        }
    }
}

/* ================================================================================================
   Norm and rotation
   ============================================================================================== */

/* Sum i of n after halving: that of 2n plus its partner. */
static float halved_sum(const float *runs, int i, int n, int all)
{
    if (n == all) return runs[i];
    return halved_sum(runs, i, 2 * n, all) + halved_sum(runs, i + n, 2 * n, all);
}

static void norm_against_recursion_and_double(void **state)
{
    (void)state;
    tu_rng rng = tu_seed(61);
    for (int round = 0; round < 400; round++) {
        const int dim = round % 5 == 4 ? 64 : 512;
        uint16_t x[512], y[512], w_bf16[512];
        float w[512], runs[64], sum, r;
        double squares = 0;
        const double std = ldexp(1, (int)tu_below(&rng, 40) - 20);
        snapmla_ref_norm norm;
        memset(&norm, 0, sizeof norm);
        norm.eps = round % 3 ? 1e-5f : 0; /* 0: 1e-6 */
        tu_fill_bf16(&rng, x, dim, 0.3 * std, std);
        for (int d = 0; d < dim; d++) {
            w[d] = (float)(1 + 0.2 * tu_gauss(&rng));
            w_bf16[d] = tu_bf16(w[d]);
            if (round % 2) w[d] = (float)tu_from_bf16(w_bf16[d]);
            squares += tu_from_bf16(x[d]) * tu_from_bf16(x[d]);
        }
        norm.weight = round % 2 ? (const void *)w_bf16 : (const void *)w;
        norm.weight_type = round % 2 ? SNAPMLA_REF_NUMBER_BF16 : SNAPMLA_REF_NUMBER_F32;
        snapmla_ref_rms_norm(x, dim, &norm, y);
        for (int run = 0; run < dim / 8; run++) {
            runs[run] = 0;
            for (int d = 8 * run; d < 8 * run + 8; d++) {
                const float v = (float)tu_from_bf16(x[d]);
                runs[run] = fmaf(v, v, runs[run]);
            }
        }
        sum = halved_sum(runs, 0, 1, dim / 8);
        r = 1.0f / sqrtf(sum / (float)dim + (norm.eps == 0 ? 1e-6f : norm.eps));
        for (int d = 0; d < dim; d++) {
            const double eps = norm.eps == 0 ? 1e-6 : norm.eps;
            const double exact = tu_from_bf16(x[d]) / sqrt(squares / dim + eps) * w[d];
            TU_CHECK_INT(y[d], tu_bf16((float)tu_from_bf16(x[d]) * r * w[d]));
            TU_CHECK_NEAR(tu_from_bf16(y[d]), exact, fabs(exact) * (1.0 / 256 + 1e-5));
        }
    }
}

static void norm_of_special_rows(void **state)
{
    (void)state;
    uint16_t x[512], y[512], w[512];
    snapmla_ref_norm norm;
    memset(&norm, 0, sizeof norm);
    norm.weight = w;
    for (int d = 0; d < 512; d++) w[d] = 0x3f80;
    memset(x, 0, sizeof x);
    x[7] = 0x8000;
    snapmla_ref_rms_norm(x, 512, &norm, y);
    TU_CHECK_BYTES(y, x, sizeof x); /* zeros stay, with their sign */
    for (int kind = 0; kind < 4; kind++) {
        static const uint16_t bad[] = {0x7fc0, 0xffff, 0x7f80,
                                       0x7f00}; /* the last overflows squared */
        for (int d = 0; d < 512; d++) x[d] = 0x3f80;
        x[100] = bad[kind];
        snapmla_ref_rms_norm(x, 512, &norm, y);
        for (int d = 0; d < 512; d++) TU_CHECK_INT(y[d], 0x7fc0);
    }
    for (int d = 0; d < 512; d++) x[d] = (d & 1) ? 0xbf80 : 0x3f80; /* +-1: nothing changes */
    snapmla_ref_rms_norm(x, 512, &norm, x);
    for (int d = 0; d < 512; d++) TU_CHECK_INT(x[d], (d & 1) ? 0xbf80 : 0x3f80);
}

static void rotation_turns_pairs(void **state)
{
    (void)state;
    tu_rng rng = tu_seed(62);
    for (int round = 0; round < 200; round++) {
        uint16_t x[64], split[64], y[64], z[64];
        float cosines[32], sines[32];
        tu_fill_bf16(&rng, x, 64, 0, 3);
        for (int i = 0; i < 32; i++) {
            const double angle = 100 * tu_uniform(&rng);
            cosines[i] = (float)cos(angle);
            sines[i] = (float)sin(angle);
            split[i] = x[2 * i];
            split[32 + i] = x[2 * i + 1];
        }
        snapmla_ref_rotate(x, 64, cosines, sines, SNAPMLA_REF_ROPE_INTERLEAVED, y);
        snapmla_ref_rotate(split, 64, cosines, sines, SNAPMLA_REF_ROPE_HALF_SPLIT, z);
        for (int i = 0; i < 32; i++) {
            const double a = tu_from_bf16(x[2 * i]), b = tu_from_bf16(x[2 * i + 1]);
            const double c = a * cosines[i] - b * sines[i], d = b * cosines[i] + a * sines[i];
            TU_CHECK_INT(y[2 * i], z[i]); /* the same numbers in both layouts */
            TU_CHECK_INT(y[2 * i + 1], z[32 + i]);
            TU_CHECK_NEAR(tu_from_bf16(y[2 * i]), c, fabs(c) / 256 + 1e-6);
            TU_CHECK_NEAR(tu_from_bf16(y[2 * i + 1]), d, fabs(d) / 256 + 1e-6);
        }
        snapmla_ref_rotate(x, 64, cosines, sines, SNAPMLA_REF_ROPE_INTERLEAVED, x); /* in place */
        TU_CHECK_BYTES(x, y, sizeof x);
    }
}

/* ================================================================================================
   The calls around them: each equals the plain call on rows prepared by hand
   ============================================================================================== */
enum { FLOW_TOKENS = 23, FLOW_PAGE = 8, FLOW_PAGES = 5, FLOW_POSITIONS = 50 };

typedef struct small_cache {
    uint8_t content[FLOW_PAGES * FLOW_PAGE * 512];
    float scale[FLOW_PAGES * FLOW_PAGE];
    uint16_t rope[FLOW_PAGES * FLOW_PAGE * 64];
} small_cache;

static snapmla_ref_cache small_planes(small_cache *c)
{
    snapmla_ref_cache planes;
    memset(&planes, 0, sizeof planes);
    planes.content = c->content;
    planes.scale = c->scale;
    planes.rope = c->rope;
    planes.pages = FLOW_PAGES;
    planes.page_size = FLOW_PAGE;
    return planes;
}

static void fill_cache(tu_rng *rng, small_cache *c)
{
    tu_fill_e4m3(rng, c->content, (int64_t)sizeof c->content);
    tu_fill_f32(rng, c->scale, FLOW_PAGES * FLOW_PAGE, 1, 0.1);
    tu_fill_bf16(rng, c->rope, (int64_t)(sizeof c->rope / 2), 0, 1);
}

static void append_and_quantize_with_norm_and_rotation(void **state)
{
    (void)state;
    static small_cache got, want;
    static uint16_t rows[FLOW_TOKENS][576 + 8], plain[FLOW_TOKENS][576];
    static uint8_t content[FLOW_TOKENS][512], one_content[512];
    static float table[FLOW_POSITIONS][64 + 2], scale[FLOW_TOKENS], one_scale;
    static uint16_t rope[FLOW_TOKENS][64], one_rope[64];
    int64_t slots[FLOW_TOKENS], positions[FLOW_TOKENS];
    uint16_t weight[512];
    tu_rng rng = tu_seed(63);
    for (int round = 0; round < 8; round++) {
        const int layout = round & 1, two = round >> 1 & 1, norm = round >> 2 & 1;
        snapmla_ref_append_desc a;
        snapmla_ref_quantize_q_desc q;
        tu_fill_f32(&rng, table[0], (int64_t)(sizeof table / 4), 0, 1);
        tu_fill_bf16(&rng, weight, 512, 1, 0.2);
        memset(&a, 0, sizeof a);
        a.cache = small_planes(&got);
        a.tokens = FLOW_TOKENS;
        a.latent = rows[0];
        a.latent_stride = 576 + 8;
        if (two) a.rope = rows[0] + 512, a.rope_stride = 576 + 8;
        a.slots = slots;
        if (norm) a.norm.weight = weight;
        a.rotation.positions = positions;
        a.rotation.cosines = table[0];
        if (two) a.rotation.sines = table[0] + 32;
        a.rotation.table_stride = 64 + 2;
        a.rotation.layout = (snapmla_ref_rope_layout)layout;
        for (int t = 0; t < FLOW_TOKENS; t++) {
            tu_fill_bf16(&rng, rows[t], 576, 0, 2);
            positions[t] = tu_below(&rng, FLOW_POSITIONS);
            slots[t] = t % 7 == 3 ? -1 : FLOW_PAGES * FLOW_PAGE - 1 - t;
            memcpy(plain[t], rows[t], sizeof plain[t]);
            if (norm) snapmla_ref_rms_norm(plain[t], 512, &a.norm, plain[t]);
            snapmla_ref_rotate(plain[t] + 512, 64, table[positions[t]], table[positions[t]] + 32,
                               a.rotation.layout, plain[t] + 512);
        }
        memset(&got, 0xee, sizeof got);
        memset(&want, 0xee, sizeof want);
        TU_CHECK_INT(snapmla_ref_append(&a), 0);
        a.cache = small_planes(&want);
        a.latent = plain[0];
        a.latent_stride = 0;
        a.rope = NULL;
        memset(&a.norm, 0, sizeof a.norm);
        memset(&a.rotation, 0, sizeof a.rotation);
        TU_CHECK_INT(snapmla_ref_append(&a), 0);
        TU_CHECK_BYTES(&got, &want, sizeof got);

        /* the same rows as queries of 1 token x 23 heads, or 23 x 1 */
        memset(&q, 0, sizeof q);
        q.tokens = two ? 1 : FLOW_TOKENS;
        q.heads = two ? FLOW_TOKENS : 1;
        q.q = rows[0];
        q.q_head_stride = 576 + 8;
        if (two) q.rope = rows[0] + 512, q.rope_head_stride = 576 + 8;
        q.q_content = content[0];
        q.q_scale = scale;
        q.q_rope = rope[0];
        q.rotation.positions = positions;
        q.rotation.cosines = table[0];
        q.rotation.table_stride = 64 + 2;
        q.rotation.layout = (snapmla_ref_rope_layout)layout;
        TU_CHECK_INT(snapmla_ref_quantize_q(&q), 0);
        for (int t = 0; t < FLOW_TOKENS; t++) {
            const float *angles = table[positions[two ? 0 : t]];
            snapmla_ref_rotate(rows[t] + 512, 64, angles, angles + 32, q.rotation.layout,
                               plain[t] + 512);
            snapmla_ref_quantize(rows[t], 512, plain[t] + 512, 64, one_content, &one_scale,
                                 one_rope);
            TU_CHECK_BYTES(content[t], one_content, 512);
            TU_CHECK_INT(bits_of(scale[t]), bits_of(one_scale));
            TU_CHECK_BYTES(rope[t], one_rope, sizeof one_rope);
        }
    }
}

static void fetch_by_ranges_is_fetch_by_slots(void **state)
{
    (void)state;
    static small_cache cache;
    static uint16_t got[30][576], want[30][576];
    /* request 0: positions 6..12; 1: none; 2: a hole, then past the table; 3: before the start */
    const int32_t table[4][4] = {{4, 1, 99, 99}, {99, 99, 99, 99}, {-1, 3, 99, 99}, {0, 2, 99, 99}};
    const int32_t starts[5] = {2, 9, 9, 19, 22}, first[4] = {6, 0, 7, -2};
    int64_t slots[30];
    snapmla_ref_fetch_desc f;
    tu_rng rng = tu_seed(64);
    fill_cache(&rng, &cache);
    memset(got, 0xee, sizeof got);
    memset(want, 0xee, sizeof want);
    memset(&f, 0, sizeof f);
    f.cache = small_planes(&cache);
    f.tokens = 30;
    f.latent = got[0];
    f.block_table = table[0];
    f.block_table_width = 2;
    f.block_table_stride = 4;
    f.batch = 4;
    f.row_starts = starts;
    f.first = first;
    TU_CHECK_INT(snapmla_ref_fetch(&f), 0);
    for (int i = 0; i < 7; i++) slots[i] = i < 2 ? 4 * 8 + 6 + i : 1 * 8 + i - 2;
    for (int i = 7; i < 17; i++) slots[i] = i == 7 || i == 16 ? -1 : 3 * 8 + i - 8;
    for (int i = 17; i < 20; i++) slots[i] = i == 19 ? 0 : -1;
    f.block_table = NULL;
    f.slots = slots;
    f.latent = want[2]; /* row 0 and 1, and those past 22, are nobody's */
    f.tokens = 20;
    TU_CHECK_INT(snapmla_ref_fetch(&f), 0);
    TU_CHECK_BYTES(got, want, sizeof got);
}

static void pages_are_copied(void **state)
{
    (void)state;
    static small_cache from[2], to[2], want[2];
    snapmla_ref_cache source[2], destination[2];
    const int32_t pairs[] = {0, 4, 3, 1, -1, 2, 2, -7, 3, 0};
    snapmla_ref_copy_pages_desc c;
    tu_rng rng = tu_seed(65);
    for (int l = 0; l < 2; l++) {
        fill_cache(&rng, &from[l]);
        fill_cache(&rng, &to[l]);
        want[l] = to[l];
        source[l] = small_planes(&from[l]);
        destination[l] = small_planes(&to[l]);
        for (int i = 0; i < 5; i++) {
            const int a = pairs[2 * i], b = pairs[2 * i + 1];
            if (a < 0 || b < 0) continue;
            memcpy(want[l].content + b * 8 * 512, from[l].content + a * 8 * 512, 8 * 512);
            memcpy(want[l].scale + b * 8, from[l].scale + a * 8, 8 * 4);
            memcpy(want[l].rope + b * 8 * 64, from[l].rope + a * 8 * 64, 8 * 64 * 2);
        }
    }
    memset(&c, 0, sizeof c);
    c.layers = 2;
    c.source = source;
    c.destination = destination;
    c.count = 5;
    c.pairs = pairs;
    TU_CHECK_INT(snapmla_ref_copy_pages(&c), 0);
    TU_CHECK_BYTES(to, want, sizeof to);
}

static void imports_are_appends(void **state)
{
    (void)state;
    static small_cache got, want;
    static uint16_t rows[FLOW_TOKENS + 9][576], keys[FLOW_TOKENS][576];
    static uint8_t records[FLOW_TOKENS + 9][656];
    int64_t slots[FLOW_TOKENS], source_slots[FLOW_TOKENS];
    tu_rng rng = tu_seed(66);
    for (int format = 0; format < 2; format++) {
        snapmla_ref_import_desc i;
        snapmla_ref_append_desc a;
        for (int t = 0; t < FLOW_TOKENS + 9; t++) {
            float scale[4];
            tu_fill_bf16(&rng, rows[t], 576, 0, 1);
            if (format == 0) continue;
            tu_fill_e4m3(&rng, records[t], 512);
            tu_fill_f32(&rng, scale, 4, 0.01, 0.003);
            memcpy(records[t] + 512, scale, 16);
            memcpy(records[t] + 528, rows[t] + 512, 128);
            for (int d = 0; d < 512; d++) {
                const double v = snapmla_ref_e4m3_to_float(records[t][d]);
                rows[t][d] = tu_bf16((float)(v * scale[d / 128]));
            }
        }
        for (int t = 0; t < FLOW_TOKENS; t++) {
            slots[t] = t % 5 == 2 ? -1 : t + 9;
            source_slots[t] = t % 7 == 5 ? -1 : FLOW_TOKENS + 8 - t;
            memcpy(keys[t], rows[FLOW_TOKENS + 8 - t], sizeof keys[t]);
        }
        memset(&got, 0xee, sizeof got);
        memset(&want, 0xee, sizeof want);
        memset(&i, 0, sizeof i);
        i.cache = small_planes(&got);
        i.format = (snapmla_ref_source_format)format;
        i.source = format ? (const void *)records : (const void *)rows;
        i.source_page_size = 4;
        i.tokens = FLOW_TOKENS;
        i.slots = slots;
        i.source_slots = source_slots;
        TU_CHECK_INT(snapmla_ref_import(&i), 0);
        for (int t = 0; t < FLOW_TOKENS; t++)
            if (source_slots[t] < 0) slots[t] = -1;
        memset(&a, 0, sizeof a);
        a.cache = small_planes(&want);
        a.tokens = FLOW_TOKENS;
        a.latent = keys[0];
        a.slots = slots;
        TU_CHECK_INT(snapmla_ref_append(&a), 0);
        TU_CHECK_BYTES(&got, &want, sizeof got);

        /* without slots: all tokens in order */
        i.slots = i.source_slots = NULL;
        i.source_page_size = 0;
        a.latent = rows[0];
        for (int t = 0; t < FLOW_TOKENS; t++) slots[t] = t;
        TU_CHECK_INT(snapmla_ref_import(&i), 0);
        TU_CHECK_INT(snapmla_ref_append(&a), 0);
        TU_CHECK_BYTES(&got, &want, sizeof got);
    }
}

static void data_flow_refuses_bad_arguments(void **state)
{
    (void)state;
    static small_cache cache, before;
    static uint16_t rows[4][576];
    static uint8_t content[4][512];
    static float scale[4], table[8][64];
    static uint16_t rope[4][64], weight[512];
    int64_t slots[4] = {0, 1, 2, 3}, positions[4] = {0, 1, 2, 3};
    int32_t block_table[2] = {0, 1}, starts[2] = {0, 4}, pairs[2] = {0, 1};
    snapmla_ref_cache planes = small_planes(&cache), other = planes;
    snapmla_ref_append_desc append;
    snapmla_ref_quantize_q_desc quantize_q;
    snapmla_ref_fetch_desc fetch;
    snapmla_ref_copy_pages_desc copy_pages;
    snapmla_ref_import_desc import;
    memset(&cache, 0xee, sizeof cache);
    before = cache;
    other.page_size = 4;
    memset(&append, 0, sizeof append);
    append.cache = planes;
    append.tokens = 4;
    append.latent = rows[0];
    append.slots = slots;
    append.norm.weight = weight;
    append.rotation.positions = positions;
    append.rotation.cosines = table[0];
    memset(&quantize_q, 0, sizeof quantize_q);
    quantize_q.tokens = 2;
    quantize_q.heads = 2;
    quantize_q.q = rows[0];
    quantize_q.q_content = content[0];
    quantize_q.q_scale = scale;
    quantize_q.q_rope = rope[0];
    quantize_q.rotation = append.rotation;
    memset(&fetch, 0, sizeof fetch);
    fetch.cache = planes;
    fetch.tokens = 4;
    fetch.latent = rows[0];
    fetch.block_table = block_table;
    fetch.block_table_width = 2;
    fetch.batch = 1;
    fetch.row_starts = starts;
    memset(&copy_pages, 0, sizeof copy_pages);
    copy_pages.layers = 1;
    copy_pages.source = copy_pages.destination = &planes;
    copy_pages.count = 1;
    copy_pages.pairs = pairs;
    memset(&import, 0, sizeof import);
    import.cache = planes;
    import.source = rows;
    import.tokens = 4;
#define SPOILED(kind, ...)                                                     \
    do {                                                                       \
        snapmla_ref_##kind##_desc d = kind;                                    \
        __VA_ARGS__;                                                           \
        TU_CHECK(snapmla_ref_##kind(&d) == -1, "%s: %s", #kind, #__VA_ARGS__); \
    } while (0)
    SPOILED(append, d.rotation.positions = NULL);
    SPOILED(append, d.rotation.cosines = NULL);
    SPOILED(append, d.rotation.table_stride = 63);
    SPOILED(append, d.rotation.layout = (snapmla_ref_rope_layout)2);
    SPOILED(append, positions[3] = -1);
    positions[3] = 3;
    SPOILED(append, d.norm.weight_type = (snapmla_ref_number)2);
    SPOILED(append, d.norm.eps = -1);
    SPOILED(append, d.norm.eps = NAN);
    SPOILED(append, d.norm.eps = INFINITY);
    refuse_memory = 1;
    SPOILED(append, (void)0);
    refuse_memory = 0;
    SPOILED(fetch, d.row_starts = NULL);
    SPOILED(fetch, d.block_table = NULL);
    SPOILED(fetch, d.slots = slots);
    SPOILED(fetch, d.batch = -1);
    SPOILED(fetch, d.block_table_width = -1);
    SPOILED(fetch, d.block_table_stride = 1);
    SPOILED(fetch, d.tokens = 3);
    SPOILED(fetch, block_table[0] = FLOW_PAGES);
    block_table[0] = 0;
    SPOILED(import, d.source = NULL);
    SPOILED(import, d.format = (snapmla_ref_source_format)2);
    SPOILED(import, d.source_page_size = -1);
    SPOILED(import, d.source_row_stride = 575);
    SPOILED(import, d.source_page_stride = 576 * FLOW_PAGE - 1);
    SPOILED(import, d.source_row_stride = INT64_MAX / 2, d.source_page_size = 8);
    SPOILED(import, d.tokens = FLOW_PAGES * FLOW_PAGE + 1);
    SPOILED(import, slots[0] = FLOW_PAGES * FLOW_PAGE, d.slots = slots);
    slots[0] = 0;
    SPOILED(copy_pages, d.source = NULL);
    SPOILED(copy_pages, d.destination = NULL);
    SPOILED(copy_pages, d.pairs = NULL);
    SPOILED(copy_pages, d.layers = -1);
    SPOILED(copy_pages, d.count = -1);
    SPOILED(copy_pages, d.source = &other);
    SPOILED(copy_pages, pairs[1] = FLOW_PAGES);
    pairs[1] = 1;
    SPOILED(quantize_q, d.q = NULL);
    SPOILED(quantize_q, d.q_scale = NULL);
    SPOILED(quantize_q, d.heads = -1);
    SPOILED(quantize_q, d.tokens = -1);
    SPOILED(quantize_q, d.latent_dim = 33);
    SPOILED(quantize_q, d.q_head_stride = 575);
    SPOILED(quantize_q, d.rope = rope[0], d.rope_head_stride = 63);
    SPOILED(quantize_q, d.rotation.cosines = NULL);
    SPOILED(quantize_q, d.tokens = INT64_MAX / 2, d.heads = 3);
#undef SPOILED
    TU_CHECK_BYTES(&cache, &before, sizeof cache);
    TU_CHECK_INT(snapmla_ref_append(&append), 0); /* what was spoiled was good */
    TU_CHECK_INT(snapmla_ref_fetch(&fetch), 0);
    TU_CHECK_INT(snapmla_ref_quantize_q(&quantize_q), 0);
    TU_CHECK_INT(snapmla_ref_copy_pages(&copy_pages), 0);
    TU_CHECK_INT(snapmla_ref_import(&import), 0);
    TU_CHECK_INT(live_blocks, 0);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(e4m3_codes),
        cmocka_unit_test(e4m3_ties_and_their_neighbours),
        cmocka_unit_test(e4m3_special_values),
        cmocka_unit_test(e4m3_against_search),
        cmocka_unit_test(f16_codes_ties_and_the_rest),
        cmocka_unit_test(bf16_all_codes),
        cmocka_unit_test(bf16_ties_and_their_neighbours),
        cmocka_unit_test(bf16_from_double_rounds_once),
        cmocka_unit_test(quantize_known_rows),
        cmocka_unit_test(quantize_nan_and_inf),
        cmocka_unit_test(quantize_random_rows),
        cmocka_unit_test(append_writes_its_slots_and_nothing_else),
        cmocka_unit_test(append_into_records),
        cmocka_unit_test(fetch_dequantises),
        cmocka_unit_test(append_and_fetch_without_rope),
        cmocka_unit_test(two_tokens_by_hand),
        cmocka_unit_test(equal_logits_give_the_mean),
        cmocka_unit_test(shifted_logits_change_lse_only),
        cmocka_unit_test(one_hot_row_returns_its_value),
        cmocka_unit_test(exact_matches_the_definition),
        cmocka_unit_test(emulated_matches_the_slow_recurrence),
        cmocka_unit_test(rows_without_keys),
        cmocka_unit_test(empty_cache_and_table),
        cmocka_unit_test(causal_is_growing_lengths),
        cmocka_unit_test(rows_are_independent),
        cmocka_unit_test(nothing_past_the_end_is_read),
        cmocka_unit_test(negative_entries_are_holes),
        cmocka_unit_test(lengths_are_cut),
        cmocka_unit_test(page_size_does_not_matter),
        cmocka_unit_test(strides_of_q_and_out),
        cmocka_unit_test(quantised_queries_are_the_same),
        cmocka_unit_test(nan_tokens_stay_contained),
        cmocka_unit_test(nan_survives_splits),
        cmocka_unit_test(nan_queries_stay_contained),
        cmocka_unit_test(extreme_logits),
        cmocka_unit_test(tiny_tokens_keep_their_mass),
        cmocka_unit_test(only_zero_tokens),
        cmocka_unit_test(wide_spread_of_scales),
        cmocka_unit_test(fp8_tensor_core_facts),
        cmocka_unit_test(fp8_tensor_core_has_no_order),
        cmocka_unit_test(bf16_tensor_core_facts),
        cmocka_unit_test(fp8_error_growth_as_measured),
        cmocka_unit_test(error_bounds_by_length),
        cmocka_unit_test(only_the_rounding_of_p),
        cmocka_unit_test(error_bounds_of_peaked_rows),
        cmocka_unit_test(error_bounds_with_a_sink),
        cmocka_unit_test(splits_agree),
        cmocka_unit_test(one_accumulator_is_worse),
        cmocka_unit_test(merge_identities),
        cmocka_unit_test(merge_special_parts),
        cmocka_unit_test(merged_halves_are_the_whole),
        cmocka_unit_test(decode_refuses_bad_arguments),
        cmocka_unit_test(append_and_fetch_refuse_bad_arguments),
        cmocka_unit_test(merge_refuses_bad_arguments),
        cmocka_unit_test(many_rows),
        cmocka_unit_test(offsets_beyond_32_bits),
        cmocka_unit_test(kernels_divide_exactly),
        cmocka_unit_test(norm_against_recursion_and_double),
        cmocka_unit_test(norm_of_special_rows),
        cmocka_unit_test(rotation_turns_pairs),
        cmocka_unit_test(append_and_quantize_with_norm_and_rotation),
        cmocka_unit_test(fetch_by_ranges_is_fetch_by_slots),
        cmocka_unit_test(pages_are_copied),
        cmocka_unit_test(imports_are_appends),
        cmocka_unit_test(data_flow_refuses_bad_arguments),
    };
    /* statistics over many rows: what they run, others run as well */
    if (getenv("SNAPMLA_TEST_QUICK")) cmocka_set_skip_filter("error_bounds*");
    print_table = argc > 1 && strcmp(argv[1], "-t") == 0;
    return cmocka_run_group_tests_name("reference", tests, NULL, NULL);
}
