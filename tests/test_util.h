/* test_util.h - what all tests share: random numbers, guarded buffers, error measures, checks.

   C99, static inline, no state of its own.  Include after cmocka.h (stdarg.h, stddef.h, setjmp.h,
   stdint.h, cmocka.h).  Everything is deterministic: the same seed gives the same numbers on every
   machine.  All comparisons are written so that a NaN fails. */
#ifndef SNAPMLA_TEST_UTIL_H
#define SNAPMLA_TEST_UTIL_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* ================================================================================================
   Checks.  They print file, line, expression and values, then fail the running test.
   ============================================================================================== */

/* TU_CHECK(count == 3, "count %d", count) */
#define TU_CHECK(condition, ...)                                                                   \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            print_error("%s:%d: not true: %s: ", __FILE__, __LINE__, #condition);                  \
            print_error(__VA_ARGS__);                                                              \
            print_error("\n");                                                                     \
            fail();                                                                                \
        }                                                                                          \
    } while (0)

/* TU_CHECK_LE(error.rms, 2e-3) */
#define TU_CHECK_LE(value, bound)                                                                  \
    do {                                                                                           \
        const double tu_value = (double)(value), tu_bound = (double)(bound);                       \
        if (!(tu_value <= tu_bound)) {                                                             \
            print_error("%s:%d: not true: %s <= %s: %.9g <= %.9g\n", __FILE__, __LINE__, #value,   \
                        #bound, tu_value, tu_bound);                                               \
            fail();                                                                                \
        }                                                                                          \
    } while (0)

/* |value - wanted| <= tolerance; equal infinities pass. */
#define TU_CHECK_NEAR(value, wanted, tolerance)                                                    \
    do {                                                                                           \
        const double tu_value = (double)(value), tu_wanted = (double)(wanted);                     \
        const double tu_tolerance = (double)(tolerance);                                           \
        if (!(fabs(tu_value - tu_wanted) <= tu_tolerance) && !(tu_value == tu_wanted)) {           \
            print_error("%s:%d: %s is %.17g, wanted %s = %.17g, tolerance %.3g\n", __FILE__,       \
                        __LINE__, #value, tu_value, #wanted, tu_wanted, tu_tolerance);             \
            fail();                                                                                \
        }                                                                                          \
    } while (0)

/* Integers of any type, compared as int64_t. */
#define TU_CHECK_INT(value, wanted)                                                                \
    do {                                                                                           \
        const int64_t tu_value = (int64_t)(value), tu_wanted = (int64_t)(wanted);                  \
        if (!(tu_value == tu_wanted)) {                                                            \
            print_error("%s:%d: %s is %lld (0x%llx), wanted %s = %lld (0x%llx)\n", __FILE__,       \
                        __LINE__, #value, (long long)tu_value, (unsigned long long)tu_value,       \
                        #wanted, (long long)tu_wanted, (unsigned long long)tu_wanted);             \
            fail();                                                                                \
        }                                                                                          \
    } while (0)

/* Same bytes; names the first that differs. */
#define TU_CHECK_BYTES(got, wanted, bytes)                                                         \
    do {                                                                                           \
        const size_t tu_at = tu_first_difference((got), (wanted), (bytes));                        \
        if (tu_at != (size_t)-1) {                                                                 \
            print_error("%s:%d: %s and %s differ at byte %llu: 0x%02x, wanted 0x%02x\n", __FILE__, \
                        __LINE__, #got, #wanted, (unsigned long long)tu_at,                        \
                        ((const unsigned char *)(got))[tu_at],                                     \
                        ((const unsigned char *)(wanted))[tu_at]);                                 \
            fail();                                                                                \
        }                                                                                          \
    } while (0)

/* Every byte still holds the value. */
#define TU_CHECK_FILLED(buffer, byte, bytes)                                                       \
    do {                                                                                           \
        const size_t tu_at = tu_first_other((buffer), (byte), (bytes));                            \
        if (tu_at != (size_t)-1) {                                                                 \
            print_error("%s:%d: %s was written at byte %llu: 0x%02x\n", __FILE__, __LINE__,        \
                        #buffer, (unsigned long long)tu_at,                                        \
                        ((const unsigned char *)(buffer))[tu_at]);                                 \
            fail();                                                                                \
        }                                                                                          \
    } while (0)

/* Offset of the first byte that differs, (size_t)-1 if none does. */
static inline size_t tu_first_difference(const void *a, const void *b, size_t bytes) {
    const unsigned char *x = (const unsigned char *)a, *y = (const unsigned char *)b;
    for (size_t i = 0; i < bytes; i++) {
        if (x[i] != y[i]) return i;
    }
    return (size_t)-1;
}

/* Offset of the first byte that is not `byte`, (size_t)-1 if there is none. */
static inline size_t tu_first_other(const void *buffer, int byte, size_t bytes) {
    const unsigned char *x = (const unsigned char *)buffer;
    for (size_t i = 0; i < bytes; i++) {
        if (x[i] != (unsigned char)byte) return i;
    }
    return (size_t)-1;
}

/* ================================================================================================
   Random numbers: splitmix64, Box-Muller.
   ============================================================================================== */
typedef struct tu_rng {
    uint64_t state;
} tu_rng;

static inline tu_rng tu_seed(uint64_t seed) {
    tu_rng rng = {seed * UINT64_C(0x9e3779b97f4a7c15) + 1};
    return rng;
}

static inline uint64_t tu_u64(tu_rng *rng) {
    uint64_t z = (rng->state += UINT64_C(0x9e3779b97f4a7c15));
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}

/* 0 .. n-1 */
static inline uint32_t tu_below(tu_rng *rng, uint32_t n) {
    return (uint32_t)(((tu_u64(rng) >> 32) * n) >> 32);
}

/* [0, 1) */
static inline double tu_uniform(tu_rng *rng) {
    return (double)(tu_u64(rng) >> 11) * (1.0 / 9007199254740992.0);
}

/* mean 0, standard deviation 1 */
static inline double tu_gauss(tu_rng *rng) {
    const double u = 1.0 - tu_uniform(rng), v = tu_uniform(rng);
    return sqrt(-2.0 * log(u)) * cos(6.283185307179586 * v);
}

/* ================================================================================================
   Buffers.
   ============================================================================================== */

/* malloc that fails the test instead of returning NULL, filled with `byte`. */
static inline void *tu_alloc(size_t bytes, int byte) {
    void *p = malloc(bytes ? bytes : 1);
    if (!p) fail_msg("out of memory: %llu bytes", (unsigned long long)bytes);
    memset(p, byte, bytes ? bytes : 1);
    return p;
}

/* tu_alloc with a canary of TU_GUARD bytes on both sides; aligned as malloc aligns.  Free with
   tu_guard_free. */
enum { TU_GUARD = 256, TU_CANARY = 0xa5 };

static inline void *tu_guard_alloc(size_t bytes, int byte) {
    unsigned char *p = (unsigned char *)tu_alloc(bytes + 2 * TU_GUARD, TU_CANARY);
    memset(p + TU_GUARD, byte, bytes);
    return p + TU_GUARD;
}

/* 1 if both canaries are untouched */
static inline int tu_guard_intact(const void *buffer, size_t bytes) {
    const unsigned char *p = (const unsigned char *)buffer;
    return tu_first_other(p - TU_GUARD, TU_CANARY, TU_GUARD) == (size_t)-1 &&
           tu_first_other(p + bytes, TU_CANARY, TU_GUARD) == (size_t)-1;
}

static inline void tu_guard_free(void *buffer) {
    if (buffer) free((unsigned char *)buffer - TU_GUARD);
}

/* bf16, round to nearest even, by integer arithmetic; not the library's routine on purpose. */
static inline uint16_t tu_bf16(double x) {
    const float f = (float)x;
    uint32_t u;
    memcpy(&u, &f, sizeof u);
    if ((u & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;
    return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

static inline double tu_from_bf16(uint16_t bits) {
    const uint32_t u = (uint32_t)bits << 16;
    float f;
    memcpy(&f, &u, sizeof f);
    return f;
}

static inline void tu_fill_bf16(tu_rng *rng, uint16_t *p, int64_t n, double mean,
                                double deviation) {
    for (int64_t i = 0; i < n; i++) p[i] = tu_bf16(mean + deviation * tu_gauss(rng));
}

static inline void tu_fill_f32(tu_rng *rng, float *p, int64_t n, double mean, double deviation) {
    for (int64_t i = 0; i < n; i++) p[i] = (float)(mean + deviation * tu_gauss(rng));
}

/* Random bytes that are no e4m3 NaN. */
static inline void tu_fill_e4m3(tu_rng *rng, uint8_t *p, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        do p[i] = (uint8_t)tu_below(rng, 256);
        while ((p[i] & 0x7f) == 0x7f);
    }
}

/* NaN in every element: what memory that must not be read, or must be overwritten, holds. */
static inline void tu_poison_e4m3(uint8_t *p, int64_t n) {
    for (int64_t i = 0; i < n; i++) p[i] = (i & 1) ? 0x7f : 0xff;
}

static inline void tu_poison_bf16(uint16_t *p, int64_t n) {
    for (int64_t i = 0; i < n; i++) p[i] = (i & 1) ? 0x7fc0 : 0xffc0;
}

static inline void tu_poison_f32(float *p, int64_t n) {
    const uint32_t nan_bits = 0x7fc00000u;
    for (int64_t i = 0; i < n; i++) memcpy(p + i, &nan_bits, sizeof nan_bits);
}

/* first, first + 1, ... in random order: page ids of a scattered cache. */
static inline void tu_permutation(tu_rng *rng, int32_t *p, int32_t n, int32_t first) {
    for (int32_t i = 0; i < n; i++) p[i] = first + i;
    for (int32_t i = n - 1; i > 0; i--) {
        const int32_t j = (int32_t)tu_below(rng, (uint32_t)i + 1);
        const int32_t t = p[i];
        p[i] = p[j];
        p[j] = t;
    }
}

/* ================================================================================================
   Error measures.  A NaN or Inf anywhere makes the measures NaN or Inf, so every bound fails.
   ============================================================================================== */
typedef struct tu_error {
    double rms;     /* sqrt(sum (got - ref)^2 / sum ref^2); 0 when both sums are 0 */
    double bias;    /* sum (got - ref) / sum |ref| */
    double shrink;  /* sum (got - ref) sign(ref) / sum |ref|: a bias towards or away from zero */
    double cosine;  /* 1 - 2 sum got ref / sum (got^2 + ref^2) */
    double worst;   /* greatest |got - ref| */
    int64_t at_row; /* where it is */
    int64_t at_col;
    /* running sums */
    double sum_e2, sum_r2, sum_e, sum_es, sum_abs, sum_gr, sum_g2;
} tu_error;

static inline double tu_ratio(double a, double b) {
    return a == 0 ? 0 : a / b;
}

static inline void tu_error_add(tu_error *err, double got, double ref, int64_t row, int64_t col) {
    const double e = got - ref, magnitude = fabs(e);
    err->sum_e2 += e * e;
    err->sum_r2 += ref * ref;
    err->sum_e += e;
    err->sum_es += ref < 0 ? -e : e;
    err->sum_abs += fabs(ref);
    err->sum_gr += got * ref;
    err->sum_g2 += got * got;
    if (!(err->worst != err->worst) && !(magnitude <= err->worst)) { /* the first NaN stays */
        err->worst = magnitude;
        err->at_row = row;
        err->at_col = col;
    }
}

static inline void tu_error_finish(tu_error *err) {
    err->rms = sqrt(tu_ratio(err->sum_e2, err->sum_r2));
    err->bias = tu_ratio(err->sum_e, err->sum_abs);
    err->shrink = tu_ratio(err->sum_es, err->sum_abs);
    err->cosine = 1 - (err->sum_g2 + err->sum_r2 == 0
                           ? 1
                           : 2 * err->sum_gr / (err->sum_g2 + err->sum_r2));
}

/* rows x cols; strides in elements, 0 = cols */
static inline tu_error tu_compare(const double *got, int64_t got_stride, const double *ref,
                                  int64_t ref_stride, int64_t rows, int64_t cols) {
    tu_error err;
    memset(&err, 0, sizeof err);
    if (!got_stride) got_stride = cols;
    if (!ref_stride) ref_stride = cols;
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t c = 0; c < cols; c++) {
            tu_error_add(&err, got[r * got_stride + c], ref[r * ref_stride + c], r, c);
        }
    }
    tu_error_finish(&err);
    return err;
}

static inline tu_error tu_compare_bf16(const uint16_t *got, int64_t got_stride, const double *ref,
                                       int64_t ref_stride, int64_t rows, int64_t cols) {
    tu_error err;
    memset(&err, 0, sizeof err);
    if (!got_stride) got_stride = cols;
    if (!ref_stride) ref_stride = cols;
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t c = 0; c < cols; c++) {
            const double g = tu_from_bf16(got[r * got_stride + c]);
            tu_error_add(&err, g, ref[r * ref_stride + c], r, c);
        }
    }
    tu_error_finish(&err);
    return err;
}

/* lse rows: greatest absolute and relative difference.  -inf equals -inf only. */
typedef struct tu_lse_error {
    double absolute;
    double relative;
    int64_t at_row; /* of the greatest absolute difference */
} tu_lse_error;

static inline tu_lse_error tu_compare_lse(const float *got, const double *ref, int64_t rows) {
    tu_lse_error err = {0, 0, 0};
    for (int64_t r = 0; r < rows; r++) {
        const double g = got[r];
        double a = fabs(g - ref[r]), rel;
        if (g == ref[r]) a = 0; /* equal infinities */
        rel = a == 0 ? 0 : a / fabs(ref[r]);
        if (rel != rel) rel = a; /* inf / inf */
        if (!(err.absolute != err.absolute) && !(a <= err.absolute)) {
            err.absolute = a;
            err.at_row = r;
        }
        if (!(err.relative != err.relative) && !(rel <= err.relative)) err.relative = rel;
    }
    return err;
}

/* How many of n values are NaN. */
static inline int64_t tu_count_nan_bf16(const uint16_t *p, int64_t n) {
    int64_t count = 0;
    for (int64_t i = 0; i < n; i++) count += (p[i] & 0x7fff) > 0x7f80;
    return count;
}

static inline int64_t tu_count_nan_f32(const float *p, int64_t n) {
    int64_t count = 0;
    for (int64_t i = 0; i < n; i++) count += p[i] != p[i];
    return count;
}

#endif
