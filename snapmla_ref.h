/* snapmla_ref.h - v0.1.0 - the CPU reference of snapmla.cuh, MIT licence at the end of the file

   FP8 attention decoding for Multi-head Latent Attention (MLA) in plain C99: the SnapMLA cache
   format, its data flow and its attention, on host pointers, without CUDA.  It is what the GPU
   results of snapmla.cuh are held to, and it is fast enough to run a small model.

   DO THIS in exactly one C or C++ file, and include the header alone wherever else it is used:
       #define SNAPMLA_REF_IMPLEMENTATION
       #include "snapmla_ref.h"
   cc -O3 main.c -lm          needs a C99 or C++11 compiler and nothing but the C library

   CONTENTS   tags to search for: >>config >>types >>api | >>impl >>fp8 >>front >>mma >>cache >>tile
              >>exact >>emulated >>decode >>merge >>cleanup

   FUNCTIONS  snapmla_ref_quantize  snapmla_ref_rms_norm  snapmla_ref_rotate  snapmla_ref_quantize_q
              snapmla_ref_append  snapmla_ref_fetch  snapmla_ref_copy_pages  snapmla_ref_import
              snapmla_ref_decode  snapmla_ref_merge; conversions
              snapmla_ref_e4m3_from_float  snapmla_ref_e4m3_to_float
              snapmla_ref_bf16_from_float  snapmla_ref_bf16_to_float; contracts stand at >>api

   FORMATS    L = latent_dim (512), R = rope_dim (64), P = page_size (64)
       cache      content  e4m3 [pages, P, L]     a token = 644 bytes in three planes, each with
                  scale    f32  [pages, P]        a page stride of its own; token `offset` of page
                  rope     bf16 [pages, P, R]     `page` is slot page * P + offset
       key        bf16 row: latent (normed) first, rope (rotated) last; V is the latent
       query      bf16 row: the absorbed L dims first, rope last; or the three planes of a key
       quantised  scale = max(amax|latent|, 1e-26) / 448, content = e4m3(latent / scale),
                  rope = bf16(rope / scale), so that content and rope products share one factor.
                  NaN or Inf in the latent makes the whole row NaN.

   FIDELITIES of snapmla_ref_decode()
       EXACT      fp64 attention over the quantised q and cache: what quantised attention means
       BF16       fp64 attention over the unquantised q and keys: what the format costs
       EMULATED   the kernels' recurrence below, rounding by rounding in f32: what rounding P, the
                  accumulators and the splits cost.  Sums run in the order of tokens and dims;
                  the GPU's do not, so kernels agree closely with it and not to the bit.

   MODE       SNAPMLA_REF_MODE_PRECISE leaves the rounding of a bf16 q to e4m3 out of EXACT: fp64
              attention over the unquantised q and the quantised cache.  In EMULATED such a q has
              q_s = 2^(floor(log2 max(amax|latent|, 1e-26)) - 8), f16(latent / q_s) and
              bf16(rope / q_s), which is the row itself but for extremes; and f_t / S' becomes f16 in
              place of e4m3.  Quantised planes of q stay what they are.  BF16 has no mode.

   RECURRENCE of EMULATED, per row and block of 64 tokens (absolute multiples of 64), all f32
       x_t = (sum q8 k8 + sum qr kr) * ((softmax_scale * log2 e) * q_s * k_s[t])
       m'  = max(m, max x_t),  alpha = 2^(m - m'),  e_t = 2^(x_t - m'),  f_t = e_t * k_s[t]
       S'  = max f_t / 448,    p8_t = e4m3(f_t / S'): the largest weight is 448 exactly
       w_t = p8_t >= 2^-6 ? p8_t * S' / k_s[t] : e_t: the weight as it was rounded; a token that is
             rounded to next to nothing keeps its mass.  Precise: f16 in place of e4m3, so 2^-14
       l   = l * alpha + sum e_t,   lq = lq * alpha + sum w_t
       acc = acc * alpha + S' * sum p8_t V8_t, the sum in a fresh accumulator
     A split ends with (m, l, lq, acc).  Splits merge in ascending order: M = max m, each weighs
     2^(m - M); out = bf16(acc / lq), lse = M ln 2 + ln l.
     A block whose S' would be subnormal, max f_t < 448 * 2^-126 = 5.3e-36, counts in l and lq only.
     fp8_tensor_core = 1: content products of QK, and PV, by the arithmetic of
     snapmla_ref_mma_e4m3(), 32 dims or tokens a step; rope products of QK, after the content, by
     that of snapmla_ref_mma_bf16(), 16 dims a step.
     one_accumulator = 1: acc is kept in units of S' = max(alpha * S, max f_t / 448), is rescaled by
     alpha * S / S', and the products of all blocks of a split run into it.

   EDGES
       Query i sees the keys below (causal ? len - s_q + 1 + i : len), where len = min(seq_lens[b],
       max_seq_len, block_table_width * P).  A row without keys gets out 0 and lse -inf.  Table
       entries past ceil(len / P) are not read; a negative entry before that skips its tokens.
       A key with a scale that is NaN or Inf makes those rows NaN that see it, and no other (BF16: a
       key with NaN or Inf in its latent).  NaN content beside a finite scale, which no quantised key
       has, does so here; on a GPU it may reach all rows of its request.  Logits of -inf weigh 0.
       fetch multiplies in f32, then rounds to bf16.  RMSNorm and RoPE on the way in follow the orders
       of operations at snapmla_ref_rms_norm() and snapmla_ref_rotate(), which the kernels keep.
       merge skips parts with lse -inf.

   CHECKS AND LIMITS
       -1 means: an argument out of its documented range, a stride smaller than a row, a missing
       pointer, a slot or a table entry past the cache, no memory.  Then nothing was written.  Sizes
       and overlap of buffers are the caller's.  No tokens, rows, batch, s_q or heads: 0, no effect.
       latent_dim: a multiple of 32 to 65536; rope_dim: a multiple of 16 to 65536; any page_size.
       Scratch: a tile of dequantised keys, and query rows in chunks of about 64 MB (EMULATED keeps
       a state per split and 4 rows, which is more than that beyond some 4000 splits).
       Needs IEEE float and double: no -ffast-math.  -ffp-contract=fast moves the last bits of
       decode; conversions and quantisation are exact everywhere.
       Re-entrant, no state.  With OpenMP (-fopenmp) rows run in parallel, with the same bits.

   OPTIONS
       everywhere the same   SNAPMLA_REF_API (default extern), SNAPMLA_REF_STATIC (static inline)
       implementation only   SNAPMLA_REF_MALLOC(bytes), SNAPMLA_REF_FREE(pointer): both or neither
*/
#ifndef SNAPMLA_REF_H_INCLUDED
#define SNAPMLA_REF_H_INCLUDED

/* >>config */
#include <stddef.h>
#include <stdint.h>

#ifndef SNAPMLA_REF_API
#ifdef SNAPMLA_REF_STATIC
#define SNAPMLA_REF_API static inline
#else
#define SNAPMLA_REF_API extern
#endif
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* >>types      The descs mean what their twins in snapmla.cuh mean, with host pointers.  bf16 is
   uint16_t, e4m3 is uint8_t.  Zero is the default of every optional field. */
typedef struct snapmla_ref_cache {
    uint8_t *content;            /* e4m3 [pages, page_size, latent_dim] */
    float *scale;                /* f32 [pages, page_size] */
    uint16_t *rope;              /* bf16 [pages, page_size, rope_dim] / scale; may be NULL without
                                    rope */
    int64_t content_page_stride; /* elements, 0 = dense */
    int64_t scale_page_stride;
    int64_t rope_page_stride;
    int64_t pages;
    int32_t page_size;           /* 0 = 64; any positive number here */
    int32_t latent_dim;          /* 0 = 512; any multiple of 32 here */
    int32_t rope_dim;            /* 0 = 64, negative = none; any multiple of 16 here */
} snapmla_ref_cache;

typedef enum snapmla_ref_fidelity {
    SNAPMLA_REF_EXACT = 0,    /* fp64 attention over the quantised q and cache */
    SNAPMLA_REF_BF16 = 1,     /* fp64 attention over the unquantised q and `key` */
    SNAPMLA_REF_EMULATED = 2  /* the kernels' recurrence, rounding by rounding */
} snapmla_ref_fidelity;

typedef enum snapmla_ref_mode {
    SNAPMLA_REF_MODE_DEFAULT = 0, /* P and Q rounded once to e4m3 */
    SNAPMLA_REF_MODE_PRECISE = 1  /* neither: see MODE in the manual; not with fp8_tensor_core */
} snapmla_ref_mode;

typedef struct snapmla_ref_decode_desc {
    snapmla_ref_fidelity fidelity;
    int32_t batch, s_q, heads;
    const int32_t *seq_lens;
    snapmla_ref_cache cache;      /* EXACT, EMULATED; for BF16 only its dims, page_size and pages
                                     count */
    const uint16_t *key;          /* BF16: bf16 [pages, page_size, latent_dim + rope_dim] */
    const int32_t *block_table;
    int64_t block_table_stride;
    int32_t block_table_width;
    int32_t causal;
    float softmax_scale;
    const uint16_t *q;            /* bf16, strided; or NULL and the planes (EXACT, EMULATED) */
    int64_t q_batch_stride, q_token_stride, q_head_stride;
    const uint8_t *q_content;
    const float *q_scale;
    const uint16_t *q_rope;
    uint16_t *out;                /* bf16 [batch, s_q, heads, latent_dim], strided; may be NULL */
    int64_t out_batch_stride, out_token_stride, out_head_stride;
    double *out64;                /* the same before the rounding to bf16, dense; may be NULL */
    float *lse;                   /* f32 [batch, s_q, heads], may be NULL */
    int64_t lse_batch_stride, lse_token_stride;
    double *lse64;                /* the same in double, dense; may be NULL */
    /* EMULATED only */
    int32_t block_tokens;         /* tokens that share a P scale and a partial sum: a multiple of 32
                                     to 1024; 0 = 64 */
    int32_t split_tokens;         /* a multiple of block_tokens, at whose multiples every request is
                                     cut; 0 = one split */
    int32_t fp8_tensor_core;      /* 1: the Hopper FP8 tensor core's arithmetic (13 fraction bits,
                                     truncation) in QK and PV; 0: exact products, f32 sums */
    int32_t one_accumulator;      /* 1: PV runs through one accumulator for the whole split, as
                                     peers do; for comparison only */
    /* all fidelities */
    int32_t max_seq_len;          /* longer requests are cut to it; 0 = no limit but the table */
    snapmla_ref_mode mode;        /* EXACT, EMULATED */
} snapmla_ref_decode_desc;

typedef enum snapmla_ref_rope_layout {
    SNAPMLA_REF_ROPE_INTERLEAVED = 0, /* pair i is dims 2i and 2i + 1 */
    SNAPMLA_REF_ROPE_HALF_SPLIT = 1   /* pair i is dims i and i + rope_dim / 2 */
} snapmla_ref_rope_layout;

typedef struct snapmla_ref_rotation {
    const int64_t *positions;     /* [tokens], not negative; NULL = no rotation */
    const float *cosines;         /* [positions, rope_dim / 2] */
    const float *sines;           /* NULL = right behind each row of cosines */
    int64_t table_stride;         /* 0 = rope_dim when sines is NULL, else rope_dim / 2 */
    snapmla_ref_rope_layout layout;
} snapmla_ref_rotation;

typedef enum snapmla_ref_number {
    SNAPMLA_REF_NUMBER_BF16 = 0,
    SNAPMLA_REF_NUMBER_F32 = 1
} snapmla_ref_number;

typedef struct snapmla_ref_norm {
    const void *weight;           /* [latent_dim]; NULL = no norm */
    snapmla_ref_number weight_type;
    float eps;                    /* 0 = 1e-6 */
} snapmla_ref_norm;

typedef struct snapmla_ref_quantize_q_desc {
    int64_t tokens;
    int32_t heads;
    int32_t latent_dim, rope_dim; /* as in snapmla_ref_cache */
    const uint16_t *q;            /* bf16 [tokens, heads, latent_dim + rope_dim], strided */
    int64_t q_token_stride, q_head_stride;
    uint8_t *q_content;
    float *q_scale;
    uint16_t *q_rope;
    const uint16_t *rope;         /* NULL = right behind each latent, else q is [.., latent_dim] */
    int64_t rope_token_stride, rope_head_stride;
    snapmla_ref_rotation rotation;
} snapmla_ref_quantize_q_desc;

typedef struct snapmla_ref_append_desc {
    snapmla_ref_cache cache;
    int64_t tokens;
    const uint16_t *latent;
    int64_t latent_stride;        /* 0 = latent_dim + rope_dim when rope is NULL, else latent_dim */
    const uint16_t *rope;         /* NULL = right behind each latent row */
    int64_t rope_stride;
    const int64_t *slots;         /* negative = skip */
    snapmla_ref_norm norm;
    snapmla_ref_rotation rotation;
} snapmla_ref_append_desc;

typedef struct snapmla_ref_fetch_desc {
    snapmla_ref_cache cache;
    int64_t tokens;
    const int64_t *slots;         /* negative = a row of zeros; NULL = block_table */
    uint16_t *latent;
    int64_t latent_stride;
    uint16_t *rope;
    int64_t rope_stride;
    const int32_t *block_table;   /* request b's positions from first[b] on go to the rows from
                                     row_starts[b] to row_starts[b + 1] - 1 */
    int64_t block_table_stride;
    int32_t block_table_width;
    int32_t batch;
    const int32_t *row_starts;    /* [batch + 1] */
    const int32_t *first;         /* [batch]; NULL = all 0 */
} snapmla_ref_fetch_desc;

typedef struct snapmla_ref_copy_pages_desc {
    int32_t layers;
    const snapmla_ref_cache *source, *destination; /* [layers] */
    int64_t count;
    const int32_t *pairs;         /* [count, 2]: source page, destination page; negative = skip */
} snapmla_ref_copy_pages_desc;

typedef enum snapmla_ref_source_format {
    SNAPMLA_REF_SOURCE_BF16 = 0,      /* rows of bf16: latent, rope */
    SNAPMLA_REF_SOURCE_RECORD_656 = 1 /* 512 e4m3, four f32 scales, 64 bf16 of unscaled rope */
} snapmla_ref_source_format;

typedef struct snapmla_ref_import_desc {
    snapmla_ref_cache cache;
    snapmla_ref_source_format format;
    int32_t source_page_size;     /* 0 = the cache's */
    const void *source;
    int64_t source_row_stride;    /* bf16: elements; records: bytes; 0 = dense */
    int64_t source_page_stride;
    int64_t tokens;
    const int64_t *source_slots;  /* negative = skip; NULL = 0, 1, 2, ... */
    const int64_t *slots;         /* negative = skip; NULL = source_slots */
} snapmla_ref_import_desc;

typedef struct snapmla_ref_merge_desc {
    int32_t parts;
    int32_t dim;                  /* 0 = 512 */
    int64_t rows;
    const uint16_t *part_out;
    const float *part_lse;
    int64_t part_out_stride, part_lse_stride;
    uint16_t *out;
    float *lse;
} snapmla_ref_merge_desc;

/* >>api */
/* Conversions, exact for every input, round to nearest even.  e4m3 saturates at +-448 (Inf too);
   every NaN becomes 0x7f / 0x7fc0. */
SNAPMLA_REF_API uint8_t snapmla_ref_e4m3_from_float(float x);
SNAPMLA_REF_API float snapmla_ref_e4m3_to_float(uint8_t code);
SNAPMLA_REF_API uint16_t snapmla_ref_bf16_from_float(float x);
SNAPMLA_REF_API float snapmla_ref_bf16_to_float(uint16_t bits);

/* One row (a key, or a query head): bf16 [latent_dim], bf16 [rope_dim] -> content, *scale, rope.
   scale = max(amax|latent|, 1e-26) / 448, content = e4m3(latent / scale) and
   rope = bf16(rope / scale).  NaN or Inf in the latent: scale = NaN (0x7fc00000), content all 0x7f,
   rope all 0x7fc0. */
SNAPMLA_REF_API void snapmla_ref_quantize(const uint16_t *latent, int32_t latent_dim,
                                          const uint16_t *rope, int32_t rope_dim,
                                          uint8_t *content, float *scale, uint16_t *rope_out);

/* y = bf16((x * r) * weight) with r = 1 / sqrt(sum / dim + eps), all in f32, every operation rounded.
   The sum of squares: runs of 8 dims by fma in ascending order, from 0; then of n sums number
   ceil(n / 2) + i is added to number i, until one is left.  Where it is Inf or NaN, y is NaN.
   dim is a multiple of 8 up to 65536; y may be x. */
SNAPMLA_REF_API void snapmla_ref_rms_norm(const uint16_t *x, int32_t dim,
                                          const snapmla_ref_norm *norm, uint16_t *y);

/* y = x with pair i, (a, b), turned by its angle: bf16(fma(a, cosines[i], -(b * sines[i]))) and
   bf16(fma(b, cosines[i], a * sines[i])) in f32, the products b * sin and a * sin rounded.  y may be
   x. */
SNAPMLA_REF_API void snapmla_ref_rotate(const uint16_t *x, int32_t rope_dim, const float *cosines,
                                        const float *sines, snapmla_ref_rope_layout layout,
                                        uint16_t *y);

/* One step of Hopper's tensor core on one FP32 accumulator c, bit for bit, by integer arithmetic.
   e4m3: c + 32 products, all truncated towards zero to a multiple of 2^(e - 13), where e is the
   greatest exponent of c and of the products (sum of the operands' exponents, not normalised; a
   product of 0 has none); summed exactly; the sum truncated to 13 fraction bits.  bf16: c + 16
   products with multiples of 2^(e - 25), the sum rounded towards zero to f32.  NaN and Inf: c plus
   the products in plain f32. */
SNAPMLA_REF_API float snapmla_ref_mma_e4m3(float c, const uint8_t *a, const uint8_t *b);
SNAPMLA_REF_API float snapmla_ref_mma_bf16(float c, const uint16_t *a, const uint16_t *b);

/* 0, or -1 when the desc is unusable or memory runs out; then nothing is written. */
SNAPMLA_REF_API int snapmla_ref_quantize_q(const snapmla_ref_quantize_q_desc *desc);
SNAPMLA_REF_API int snapmla_ref_append(const snapmla_ref_append_desc *desc);
SNAPMLA_REF_API int snapmla_ref_fetch(const snapmla_ref_fetch_desc *desc);
SNAPMLA_REF_API int snapmla_ref_copy_pages(const snapmla_ref_copy_pages_desc *desc);
SNAPMLA_REF_API int snapmla_ref_import(const snapmla_ref_import_desc *desc);
SNAPMLA_REF_API int snapmla_ref_decode(const snapmla_ref_decode_desc *desc);
SNAPMLA_REF_API int snapmla_ref_merge(const snapmla_ref_merge_desc *desc);

#ifdef __cplusplus
}
#endif
#endif /* SNAPMLA_REF_H_INCLUDED */

#if defined(SNAPMLA_REF_IMPLEMENTATION) && !defined(SNAPMLA_REF_IMPLEMENTATION_INCLUDED)
#define SNAPMLA_REF_IMPLEMENTATION_INCLUDED

/* ================================================================================================
   >>impl
   ============================================================================================== */
#ifdef __FAST_MATH__
#error "snapmla_ref.h needs IEEE arithmetic: NaN and Inf carry meaning; build without -ffast-math"
#endif
#if defined(SNAPMLA_REF_MALLOC) != defined(SNAPMLA_REF_FREE)
#error "define both of SNAPMLA_REF_MALLOC and SNAPMLA_REF_FREE, or neither"
#endif

#include <math.h>
#include <string.h>

#ifdef SNAPMLA_REF_MALLOC
#define SMLAR_MALLOC(bytes) SNAPMLA_REF_MALLOC(bytes)
#define SMLAR_FREE(pointer) SNAPMLA_REF_FREE(pointer)
#else
#include <stdlib.h>
#define SMLAR_MALLOC(bytes) malloc(bytes)
#define SMLAR_FREE(pointer) free(pointer)
#endif

#if !defined(__cplusplus)
#define SMLAR_RESTRICT restrict
#elif defined(__GNUC__) || defined(_MSC_VER)
#define SMLAR_RESTRICT __restrict
#else
#define SMLAR_RESTRICT
#endif

#define SMLAR_FLT_MIN 1.17549435e-38f
#define SMLAR_LOG2E 1.44269504088896340736f
#define SMLAR_LN2 0.69314718055994530942f

enum {
    SMLAR_ROWS = 4,         /* query rows that run together: a register tile is 4 rows ... */
    SMLAR_LANES = 8,        /* ... by 8 tokens (scores) or 8 dims (values) */
    SMLAR_CELLS = 32,       /* cells of that tile */
    SMLAR_EXACT_BLOCK = 32, /* tokens of a tile in double */
    SMLAR_MAX_BLOCK = 1024,
    SMLAR_MAX_DIM = 65536,
    SMLAR_CHUNK_BYTES = 1 << 26
};

static uint32_t smlar_bits(float x) {
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return u;
}

static float smlar_float(uint32_t u) {
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}

/* Neither NaN nor Inf. */
static int smlar_finite(float x) {
    return (smlar_bits(x) & 0x7fffffffu) < 0x7f800000u;
}

static float smlar_nan(void) {
    return smlar_float(0x7fc00000u);
}

/* ================================================================================================
   >>fp8        conversions and the quantisation of a row
   ============================================================================================== */

SNAPMLA_REF_API uint8_t snapmla_ref_e4m3_from_float(float x) {
    const uint32_t u = smlar_bits(x), sign = (u >> 24) & 0x80u, magnitude = u & 0x7fffffffu;
    const uint32_t exponent = magnitude >> 23, significand = (magnitude & 0x7fffffu) | 0x800000u;
    /* 4 of 24 bits stay; below 2^-6 (biased exponent 121) one less for every binade, so nothing of
       what is small, the subnormals of f32 with their missing hidden bit included. */
    const uint32_t low = exponent < 121u ? 121u - exponent : 0u;
    const uint32_t shift = low < 11u ? 20u + low : 31u;
    const uint32_t odd = (significand >> shift) & 1u;
    const uint32_t rounded = (significand + ((1u << (shift - 1u)) - 1u) + odd) >> shift;
    if (magnitude > 0x7f800000u) return 0x7f;
    if (magnitude >= 0x43e00000u) return (uint8_t)(sign | 0x7eu); /* 448 and up, Inf */
    return (uint8_t)(sign | (rounded + ((exponent + low - 121u) << 3))); /* a carry is welcome */
}

SNAPMLA_REF_API float snapmla_ref_e4m3_to_float(uint8_t code) {
    const uint32_t sign = (uint32_t)(code & 0x80) << 24, magnitude = code & 0x7fu;
    if (magnitude == 0x7f) return smlar_nan();
    if (magnitude < 8) return (sign ? -1.0f : 1.0f) * (float)magnitude * (1.0f / 512.0f);
    return smlar_float(sign | ((magnitude << 20) + ((127u - 7u) << 23)));
}

SNAPMLA_REF_API uint16_t snapmla_ref_bf16_from_float(float x) {
    const uint32_t u = smlar_bits(x);
    if ((u & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;
    return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16); /* may carry up to Inf */
}

SNAPMLA_REF_API float snapmla_ref_bf16_to_float(uint16_t bits) {
    return smlar_float((uint32_t)bits << 16);
}

/* The f16 nearest to x, as a float; 65504 at most. */
static float smlar_f16(float x) {
    const float magnitude = fabsf(x);
    int exponent;
    float step;
    if (!smlar_finite(x)) return x != x ? x : copysignf(65504.0f, x);
    (void)frexpf(magnitude, &exponent);
    step = ldexpf(1.0f, (exponent < -13 ? -13 : exponent) - 11);
    step = rintf(magnitude / step) * step; /* powers of two: exact but for rintf */
    return copysignf(step < 65504.0f ? step : 65504.0f, x);
}

/* Double to bf16 with one rounding.  The detour over float errs only where it lands on a tie. */
static uint16_t smlar_bf16_from_double(double x) {
    const float f = (float)x;
    const uint32_t u = smlar_bits(f);
    if ((u & 0xffffu) == 0x8000u && smlar_finite(f) && (double)f != x) {
        return snapmla_ref_bf16_from_float(smlar_float(fabs((double)f) < fabs(x) ? u + 1 : u - 1));
    }
    return snapmla_ref_bf16_from_float(f);
}

SNAPMLA_REF_API void snapmla_ref_quantize(const uint16_t *latent, int32_t latent_dim,
                                          const uint16_t *rope, int32_t rope_dim, uint8_t *content,
                                          float *scale, uint16_t *rope_out) {
    uint32_t amax = 0; /* of bf16 bits without sign: ordered like the values, Inf and NaN on top */
    float s;
    for (int32_t d = 0; d < latent_dim; d++) {
        const uint32_t magnitude = latent[d] & 0x7fffu;
        if (magnitude > amax) amax = magnitude;
    }
    if (amax >= 0x7f80) {
        *scale = smlar_nan();
        for (int32_t d = 0; d < latent_dim; d++) content[d] = 0x7f;
        for (int32_t d = 0; d < rope_dim; d++) rope_out[d] = 0x7fc0;
        return;
    }
    s = snapmla_ref_bf16_to_float((uint16_t)amax);
    s = (s > 1e-26f ? s : 1e-26f) / 448.0f;
    *scale = s;
    for (int32_t d = 0; d < latent_dim; d++) {
        content[d] = snapmla_ref_e4m3_from_float(snapmla_ref_bf16_to_float(latent[d]) / s);
    }
    for (int32_t d = 0; d < rope_dim; d++) {
        rope_out[d] = snapmla_ref_bf16_from_float(snapmla_ref_bf16_to_float(rope[d]) / s);
    }
}

/* ================================================================================================
   >>front      what may come before quantisation: RMSNorm of a latent, RoPE of a rope part
   ============================================================================================== */

SNAPMLA_REF_API void snapmla_ref_rms_norm(const uint16_t *x, int32_t dim,
                                          const snapmla_ref_norm *norm, uint16_t *y) {
    const uint16_t *weight_bf16 = (const uint16_t *)norm->weight;
    const float *weight_f32 = (const float *)norm->weight;
    const float eps = norm->eps == 0 ? 1e-6f : norm->eps;
    float sum[SMLAR_MAX_DIM / 8] = {0}, r;
    for (int32_t run = 0; run < dim / 8; run++) {
        for (int32_t d = 8 * run; d < 8 * run + 8; d++) {
            const float v = snapmla_ref_bf16_to_float(x[d]);
            sum[run] = fmaf(v, v, sum[run]);
        }
    }
    for (int32_t n = dim / 8, half; n > 1; n = half) {
        half = (n + 1) / 2;
        for (int32_t i = half; i < n; i++) sum[i - half] += sum[i];
    }
    r = smlar_finite(sum[0]) ? 1.0f / sqrtf(sum[0] / (float)dim + eps) : smlar_nan();
    for (int32_t d = 0; d < dim; d++) {
        const float w = norm->weight_type == SNAPMLA_REF_NUMBER_F32
                            ? weight_f32[d]
                            : snapmla_ref_bf16_to_float(weight_bf16[d]);
        y[d] = snapmla_ref_bf16_from_float(snapmla_ref_bf16_to_float(x[d]) * r * w);
    }
}

SNAPMLA_REF_API void snapmla_ref_rotate(const uint16_t *x, int32_t rope_dim, const float *cosines,
                                        const float *sines, snapmla_ref_rope_layout layout,
                                        uint16_t *y) {
    const int32_t half = rope_dim / 2;
    for (int32_t i = 0; i < half; i++) {
        const int32_t first = layout == SNAPMLA_REF_ROPE_HALF_SPLIT ? i : 2 * i;
        const int32_t second = layout == SNAPMLA_REF_ROPE_HALF_SPLIT ? i + half : 2 * i + 1;
        const float a = snapmla_ref_bf16_to_float(x[first]);
        const float b = snapmla_ref_bf16_to_float(x[second]);
        /* fmaf() by name, so that no compiler chooses which product is the rounded one */
        y[first] = snapmla_ref_bf16_from_float(fmaf(a, cosines[i], -(b * sines[i])));
        y[second] = snapmla_ref_bf16_from_float(fmaf(b, cosines[i], a * sines[i]));
    }
}

/* The rotation's tables for token i, or NULL where there is no rotation. */
static const float *smlar_cosines(const snapmla_ref_rotation *r, int64_t i) {
    return r->positions ? r->cosines + r->positions[i] * r->table_stride : NULL;
}

static const float *smlar_sines(const snapmla_ref_rotation *r, int64_t i, int32_t rope_dim) {
    if (!r->positions) return NULL;
    return r->sines ? r->sines + r->positions[i] * r->table_stride
                    : smlar_cosines(r, i) + rope_dim / 2;
}

/* Fill in the default stride; -1 if the rotation is unusable. */
static int smlar_rotation(snapmla_ref_rotation *r, int64_t tokens, int32_t rope_dim) {
    const int64_t row = r->sines ? rope_dim / 2 : rope_dim;
    if (!r->positions != !r->cosines) return -1;
    if (!r->positions) return 0;
    if (r->layout != SNAPMLA_REF_ROPE_INTERLEAVED && r->layout != SNAPMLA_REF_ROPE_HALF_SPLIT) {
        return -1;
    }
    if (!r->table_stride) r->table_stride = row;
    if (r->table_stride < row) return -1;
    for (int64_t i = 0; i < tokens; i++) {
        if (r->positions[i] < 0) return -1;
    }
    return 0;
}

static int smlar_norm(const snapmla_ref_norm *n) {
    if (!n->weight) return 0;
    if (n->weight_type != SNAPMLA_REF_NUMBER_BF16 && n->weight_type != SNAPMLA_REF_NUMBER_F32) {
        return -1;
    }
    return n->eps >= 0 && smlar_finite(n->eps) ? 0 : -1;
}

/* ================================================================================================
   >>mma        inner products: the tensor core one accumulator at a time, and 4 x 8 tiles

   A tile multiplies a[k][4] (rows) with b[k][8] (tokens or dims) into c[4][8]; both operands lie in
   the order in which they are read, so that the compiler keeps c in registers and vectorises.
   Every cell sums in order of k, whatever its neighbours hold.
   ============================================================================================== */

/* n * 2^exponent, truncated to `bits` significant bits */
static double smlar_truncated(int64_t n, int bits, int exponent) {
    uint64_t magnitude = n < 0 ? (uint64_t)-n : (uint64_t)n, high = magnitude;
    int drop = 0;
    for (; high >> bits; high >>= 1) drop++;
    magnitude = magnitude >> drop << drop;
    return ldexp(n < 0 ? -(double)magnitude : (double)magnitude, exponent);
}

/* The float next to x on the side of zero, or x itself. */
static float smlar_toward_zero(double x) {
    const float f = (float)x;
    return fabs((double)f) > fabs(x) ? smlar_float(smlar_bits(f) - 1) : f;
}

/* magnitude * 2^left with its sign, bits below the unit cut off; 0 * 2^anything is 0 */
static int64_t smlar_align(int64_t magnitude, int left, int negative) {
    int64_t n = 0;
    if (magnitude && left > -63) n = left >= 0 ? magnitude << left : magnitude >> -left;
    return negative ? -n : n;
}

/* A finite float as significand (23 fraction bits) and exponent, which is -126 for subnormals. */
static int64_t smlar_significand(float x, int *exponent) {
    const uint32_t u = smlar_bits(x) & 0x7fffffffu, field = u >> 23;
    *exponent = field ? (int)field - 127 : -126;
    return field ? (int64_t)((u & 0x7fffffu) | 0x800000u) : (int64_t)u;
}

SNAPMLA_REF_API float snapmla_ref_mma_e4m3(float c, const uint8_t *a, const uint8_t *b) {
    int product[32], exponent[32], top = -1000, c_exponent;
    const int64_t c_significand = smlar_significand(c, &c_exponent);
    int64_t sum;
    int special = !smlar_finite(c);
    for (int k = 0; k < 32; k++) special |= (a[k] & 0x7f) == 0x7f || (b[k] & 0x7f) == 0x7f;
    if (special) {
        for (int k = 0; k < 32; k++) {
            c += snapmla_ref_e4m3_to_float(a[k]) * snapmla_ref_e4m3_to_float(b[k]);
        }
        return c;
    }
    if (c_significand) top = c_exponent;
    for (int k = 0; k < 32; k++) {
        const int a_field = (a[k] >> 3) & 15, b_field = (b[k] >> 3) & 15;
        product[k] = ((a[k] & 7) + (a_field ? 8 : 0)) * ((b[k] & 7) + (b_field ? 8 : 0));
        exponent[k] = (a_field ? a_field : 1) - 7 + (b_field ? b_field : 1) - 7;
        if (product[k] && exponent[k] > top) top = exponent[k];
    }
    /* the unit is 2^(top - 13); products have 6 fraction bits, the accumulator 23 */
    sum = smlar_align(c_significand, c_exponent - top + 13 - 23, smlar_bits(c) >> 31 != 0);
    for (int k = 0; k < 32; k++) {
        const int negative = ((a[k] ^ b[k]) & 0x80) != 0;
        sum += smlar_align(product[k], exponent[k] - top + 13 - 6, negative);
    }
    return (float)smlar_truncated(sum, 14, top - 13);
}

SNAPMLA_REF_API float snapmla_ref_mma_bf16(float c, const uint16_t *a, const uint16_t *b) {
    int64_t product[16], sum;
    int exponent[16], top = -1000, c_exponent;
    const int64_t c_significand = smlar_significand(c, &c_exponent);
    int special = !smlar_finite(c);
    for (int k = 0; k < 16; k++) special |= (a[k] & 0x7f80) == 0x7f80 || (b[k] & 0x7f80) == 0x7f80;
    if (special) {
        for (int k = 0; k < 16; k++) {
            c += snapmla_ref_bf16_to_float(a[k]) * snapmla_ref_bf16_to_float(b[k]);
        }
        return c;
    }
    if (c_significand) top = c_exponent;
    for (int k = 0; k < 16; k++) {
        const int a_field = (a[k] >> 7) & 255, b_field = (b[k] >> 7) & 255;
        product[k] = ((a[k] & 127) + (a_field ? 128 : 0)) * ((b[k] & 127) + (b_field ? 128 : 0));
        exponent[k] = (a_field ? a_field : 1) - 127 + (b_field ? b_field : 1) - 127;
        if (product[k] && exponent[k] > top) top = exponent[k];
    }
    /* the unit is 2^(top - 25); products have 14 fraction bits, the accumulator 23 */
    sum = smlar_align(c_significand, c_exponent - top + 25 - 23, smlar_bits(c) >> 31 != 0);
    for (int k = 0; k < 16; k++) {
        const int negative = ((a[k] ^ b[k]) & 0x8000) != 0;
        sum += smlar_align(product[k], exponent[k] - top + 25 - 14, negative);
    }
    return smlar_toward_zero(ldexp((double)sum, top - 25));
}

static void smlar_tile_f32(const float *SMLAR_RESTRICT a, const float *SMLAR_RESTRICT b, int64_t n,
                           float *SMLAR_RESTRICT c) {
    float sum[SMLAR_CELLS];
    for (int i = 0; i < SMLAR_CELLS; i++) sum[i] = c[i];
    for (int64_t k = 0; k < n; k++, a += SMLAR_ROWS, b += SMLAR_LANES) {
        for (int r = 0; r < SMLAR_ROWS; r++) {
            for (int j = 0; j < SMLAR_LANES; j++) sum[r * SMLAR_LANES + j] += a[r] * b[j];
        }
    }
    for (int i = 0; i < SMLAR_CELLS; i++) c[i] = sum[i];
}

static void smlar_tile_f64(const double *SMLAR_RESTRICT a, const double *SMLAR_RESTRICT b,
                           int64_t n, double *SMLAR_RESTRICT c) {
    double sum[SMLAR_CELLS];
    for (int i = 0; i < SMLAR_CELLS; i++) sum[i] = c[i];
    for (int64_t k = 0; k < n; k++, a += SMLAR_ROWS, b += SMLAR_LANES) {
        for (int r = 0; r < SMLAR_ROWS; r++) {
            for (int j = 0; j < SMLAR_LANES; j++) sum[r * SMLAR_LANES + j] += a[r] * b[j];
        }
    }
    for (int i = 0; i < SMLAR_CELLS; i++) c[i] = sum[i];
}

/* 2^exponent of an e4m3 value as the tensor core sees it: -6 for subnormals; 0 of a 0. */
static float smlar_top_e4m3(float x) {
    const float top = smlar_float(smlar_bits(x) & 0x7f800000u);
    return x == 0 ? 0.0f : top > 0.015625f ? top : 0.015625f;
}

/* The same of a finite bf16 or f32 value. */
static double smlar_top_f32(float x) {
    int exponent;
    return smlar_significand(x, &exponent) ? ldexp(1.0, exponent) : 0.0;
}

/* snapmla_ref_mma_e4m3() for the 4 x 8 cells, n / 32 steps.  The operands come with the powers of
   two of their exponents.  Scaling by a power of two and truncation to int is the alignment. */
static void smlar_tile_e4m3(const float *SMLAR_RESTRICT a, const float *SMLAR_RESTRICT a_top,
                            const float *SMLAR_RESTRICT b, const float *SMLAR_RESTRICT b_top,
                            int64_t n, float *SMLAR_RESTRICT c) {
    for (int64_t k0 = 0; k0 < n; k0 += 32) {
        for (int r = 0; r < SMLAR_ROWS; r++) {
            const float *ar = a + k0 * SMLAR_ROWS + r, *ar_top = a_top + k0 * SMLAR_ROWS + r;
            const float *bk = b + k0 * SMLAR_LANES, *bk_top = b_top + k0 * SMLAR_LANES;
            float top[SMLAR_LANES], unit[SMLAR_LANES];
            int32_t sum[SMLAR_LANES];
            for (int j = 0; j < SMLAR_LANES; j++) top[j] = 0;
            for (int k = 0; k < 32; k++) {
                for (int j = 0; j < SMLAR_LANES; j++) {
                    const float t = ar_top[k * SMLAR_ROWS] * bk_top[k * SMLAR_LANES + j];
                    top[j] = t > top[j] ? t : top[j];
                }
            }
            for (int j = 0; j < SMLAR_LANES; j++) {
                const float old = c[r * SMLAR_LANES + j];
                const float old_top = smlar_float(smlar_bits(old) & 0x7f800000u);
                if (top[j] > 0) {
                    top[j] = old_top > top[j] ? old_top : top[j];
                    unit[j] = 8192.0f / top[j];
                    sum[j] = (int32_t)(old * unit[j]);
                } else { /* nothing to add: the accumulator alone is cut to 13 fraction bits */
                    unit[j] = 0;
                    sum[j] = 0;
                }
            }
            for (int k = 0; k < 32; k++) {
                for (int j = 0; j < SMLAR_LANES; j++) {
                    sum[j] += (int32_t)(ar[k * SMLAR_ROWS] * bk[k * SMLAR_LANES + j] * unit[j]);
                }
            }
            for (int j = 0; j < SMLAR_LANES; j++) {
                const float whole = top[j] > 0 ? (float)sum[j] : c[r * SMLAR_LANES + j];
                const float cut = smlar_float(smlar_bits(whole) & ~0x3ffu); /* 23 - 13 bits */
                c[r * SMLAR_LANES + j] = top[j] > 0 ? cut * (top[j] * (1.0f / 8192.0f)) : cut;
            }
        }
    }
}

/* snapmla_ref_mma_bf16() for the 4 x 8 cells, n / 16 steps; no NaN or Inf in the operands. */
static void smlar_tile_bf16(const double *SMLAR_RESTRICT a, const double *SMLAR_RESTRICT a_top,
                            const double *SMLAR_RESTRICT b, const double *SMLAR_RESTRICT b_top,
                            int64_t n, float *SMLAR_RESTRICT c) {
    for (int64_t k0 = 0; k0 < n; k0 += 16) {
        for (int r = 0; r < SMLAR_ROWS; r++) {
            const double *ar = a + k0 * SMLAR_ROWS + r, *ar_top = a_top + k0 * SMLAR_ROWS + r;
            const double *bk = b + k0 * SMLAR_LANES, *bk_top = b_top + k0 * SMLAR_LANES;
            double top[SMLAR_LANES], unit[SMLAR_LANES], sum[SMLAR_LANES];
            for (int j = 0; j < SMLAR_LANES; j++) top[j] = 0;
            for (int k = 0; k < 16; k++) {
                for (int j = 0; j < SMLAR_LANES; j++) {
                    const double t = ar_top[k * SMLAR_ROWS] * bk_top[k * SMLAR_LANES + j];
                    top[j] = t > top[j] ? t : top[j];
                }
            }
            for (int j = 0; j < SMLAR_LANES; j++) {
                const float old = c[r * SMLAR_LANES + j];
                const double old_top = smlar_top_f32(old);
                top[j] = old_top > top[j] ? old_top : top[j];
                unit[j] = top[j] > 0 ? 33554432.0 / top[j] : 0;
                sum[j] = (double)(int32_t)((double)old * unit[j]);
            }
            for (int k = 0; k < 16; k++) {
                for (int j = 0; j < SMLAR_LANES; j++) {
                    const double x = ar[k * SMLAR_ROWS] * bk[k * SMLAR_LANES + j] * unit[j];
                    sum[j] += (double)(int32_t)x;
                }
            }
            for (int j = 0; j < SMLAR_LANES; j++) {
                c[r * SMLAR_LANES + j] = smlar_toward_zero(sum[j] * (top[j] * (1.0 / 33554432.0)));
            }
        }
    }
}

/* ================================================================================================
   >>cache      defaults and checks of a cache, append, fetch, copies, imports
   ============================================================================================== */

/* a * b <= limit for numbers that are not negative */
static int smlar_fits(int64_t a, int64_t b, int64_t limit) {
    return b == 0 || a <= limit / b;
}

/* count * stride, or -1, which is no stride, when it does not fit */
static int64_t smlar_dense(int64_t count, int64_t stride) {
    return smlar_fits(count, stride, INT64_MAX) ? count * stride : -1;
}

/* A stride: 0 becomes `dense`; -1 if it is smaller than a row. */
static int smlar_stride(int64_t *stride, int64_t dense, int64_t row) {
    if (*stride == 0) *stride = dense;
    return *stride < row ? -1 : 0;
}

/* Fill in the defaults of *c (rope_dim 0 then means none).  `planes`: they are needed as well. */
static int smlar_cache(snapmla_ref_cache *c, int planes) {
    if (!c->latent_dim) c->latent_dim = 512;
    if (c->latent_dim < 0 || c->latent_dim % 32 || c->latent_dim > SMLAR_MAX_DIM) return -1;
    c->rope_dim = c->rope_dim < 0 ? 0 : c->rope_dim ? c->rope_dim : 64;
    if (c->rope_dim % 16 || c->rope_dim > SMLAR_MAX_DIM) return -1;
    if (!c->page_size) c->page_size = 64;
    if (c->page_size < 0 || c->pages < 0) return -1;
    if (!smlar_fits(c->pages, (int64_t)c->page_size * (c->latent_dim + c->rope_dim), INT64_MAX)) {
        return -1;
    }
    if (!planes) return 0;
    if (c->pages && (!c->content || !c->scale || (!c->rope && c->rope_dim))) return -1;
    {
        const int64_t p = c->page_size;
        if (smlar_stride(&c->content_page_stride, p * c->latent_dim, p * c->latent_dim) ||
            smlar_stride(&c->scale_page_stride, p, p) ||
            smlar_stride(&c->rope_page_stride, p * c->rope_dim, p * c->rope_dim)) {
            return -1;
        }
    }
    return smlar_fits(c->pages, c->content_page_stride, INT64_MAX) &&
                   smlar_fits(c->pages, c->scale_page_stride, INT64_MAX) &&
                   smlar_fits(c->pages, c->rope_page_stride, INT64_MAX)
               ? 0
               : -1;
}

/* Where a token lies. */
typedef struct smlar_place {
    uint8_t *content;
    float *scale;
    uint16_t *rope;
} smlar_place;

static smlar_place smlar_find(const snapmla_ref_cache *c, int64_t page, int64_t offset) {
    smlar_place at;
    at.content = c->content + page * c->content_page_stride + offset * c->latent_dim;
    at.scale = c->scale + page * c->scale_page_stride + offset;
    at.rope = c->rope_dim ? c->rope + page * c->rope_page_stride + offset * c->rope_dim : NULL;
    return at;
}

/* What append and fetch have in common: rows of keys.  Strides are filled in. */
static int smlar_rows(snapmla_ref_cache *cache, int64_t tokens, const void *latent,
                      int64_t *latent_stride, const void *rope, int64_t *rope_stride) {
    int64_t row;
    if (smlar_cache(cache, 1) || tokens < 0) return -1;
    if (!tokens) return 0;
    row = cache->latent_dim + (rope ? 0 : cache->rope_dim);
    if (!latent || smlar_stride(latent_stride, row, row)) return -1;
    return rope ? smlar_stride(rope_stride, cache->rope_dim, cache->rope_dim) : 0;
}

/* Every slot lies below the end. */
static int smlar_slots(const int64_t *slots, int64_t tokens, int64_t end) {
    for (int64_t i = 0; i < tokens; i++) {
        if (slots[i] >= end) return -1;
    }
    return 0;
}

/* Memory for one bf16 row: latent, rope. */
static uint16_t *smlar_row(const snapmla_ref_cache *dims) {
    return (uint16_t *)SMLAR_MALLOC((size_t)(dims->latent_dim + dims->rope_dim) * sizeof(uint16_t));
}

SNAPMLA_REF_API int snapmla_ref_quantize_q(const snapmla_ref_quantize_q_desc *desc) {
    snapmla_ref_quantize_q_desc d;
    snapmla_ref_cache dims; /* only to check the dims as a cache's are */
    int64_t row;
    uint16_t *rope;
    if (!desc) return -1;
    d = *desc;
    memset(&dims, 0, sizeof dims);
    dims.latent_dim = d.latent_dim;
    dims.rope_dim = d.rope_dim;
    if (smlar_cache(&dims, 0) || d.tokens < 0 || d.heads < 0) return -1;
    if (!d.tokens || !d.heads) return 0;
    if (!d.q || !d.q_content || !d.q_scale || (!d.q_rope && dims.rope_dim)) return -1;
    if (!smlar_fits(d.tokens, d.heads, INT64_MAX)) return -1;
    row = dims.latent_dim + (d.rope ? 0 : dims.rope_dim);
    if (smlar_stride(&d.q_head_stride, row, row) ||
        smlar_stride(&d.q_token_stride, smlar_dense(d.heads, d.q_head_stride), row) ||
        smlar_rotation(&d.rotation, d.tokens, dims.rope_dim)) {
        return -1;
    }
    if (d.rope && (smlar_stride(&d.rope_head_stride, dims.rope_dim, dims.rope_dim) ||
                   smlar_stride(&d.rope_token_stride, smlar_dense(d.heads, d.rope_head_stride),
                                dims.rope_dim))) {
        return -1;
    }
    rope = smlar_row(&dims);
    if (!rope) return -1;
    for (int64_t i = 0; i < d.tokens * d.heads; i++) {
        const int64_t token = i / d.heads, head = i % d.heads;
        const uint16_t *latent = d.q + token * d.q_token_stride + head * d.q_head_stride;
        const uint16_t *from = latent + dims.latent_dim;
        if (d.rope) from = d.rope + token * d.rope_token_stride + head * d.rope_head_stride;
        if (d.rotation.positions) {
            snapmla_ref_rotate(from, dims.rope_dim, smlar_cosines(&d.rotation, token),
                               smlar_sines(&d.rotation, token, dims.rope_dim), d.rotation.layout,
                               rope);
            from = rope;
        }
        snapmla_ref_quantize(latent, dims.latent_dim, from, dims.rope_dim,
                             d.q_content + i * dims.latent_dim, d.q_scale + i,
                             dims.rope_dim ? d.q_rope + i * dims.rope_dim : NULL);
    }
    SMLAR_FREE(rope);
    return 0;
}

SNAPMLA_REF_API int snapmla_ref_append(const snapmla_ref_append_desc *desc) {
    snapmla_ref_append_desc d;
    uint16_t *normed, *rotated;
    if (!desc) return -1;
    d = *desc;
    if (smlar_rows(&d.cache, d.tokens, d.latent, &d.latent_stride, d.rope, &d.rope_stride)) {
        return -1;
    }
    if (!d.tokens) return 0;
    if (!d.slots || smlar_slots(d.slots, d.tokens, d.cache.pages * d.cache.page_size) ||
        smlar_norm(&d.norm) || smlar_rotation(&d.rotation, d.tokens, d.cache.rope_dim)) {
        return -1;
    }
    normed = smlar_row(&d.cache);
    if (!normed) return -1;
    rotated = normed + d.cache.latent_dim;
    for (int64_t i = 0; i < d.tokens; i++) {
        const uint16_t *latent = d.latent + i * d.latent_stride;
        const uint16_t *rope = d.rope ? d.rope + i * d.rope_stride : latent + d.cache.latent_dim;
        smlar_place to;
        if (d.slots[i] < 0) continue;
        if (d.norm.weight) {
            snapmla_ref_rms_norm(latent, d.cache.latent_dim, &d.norm, normed);
            latent = normed;
        }
        if (d.rotation.positions) {
            snapmla_ref_rotate(rope, d.cache.rope_dim, smlar_cosines(&d.rotation, i),
                               smlar_sines(&d.rotation, i, d.cache.rope_dim), d.rotation.layout,
                               rotated);
            rope = rotated;
        }
        to = smlar_find(&d.cache, d.slots[i] / d.cache.page_size, d.slots[i] % d.cache.page_size);
        snapmla_ref_quantize(latent, d.cache.latent_dim, rope, d.cache.rope_dim, to.content,
                             to.scale, to.rope);
    }
    SMLAR_FREE(normed);
    return 0;
}

/* The slot of a request's position, -1 where there is none, -2 past the cache. */
static int64_t smlar_slot_of(const snapmla_ref_fetch_desc *d, int32_t request, int64_t position) {
    const int64_t size = d->cache.page_size;
    int32_t page;
    if (position < 0 || position >= d->block_table_width * size) return -1;
    page = d->block_table[request * d->block_table_stride + position / size];
    if (page >= d->cache.pages) return -2;
    return page < 0 ? -1 : page * size + position % size;
}

static void smlar_fetch_row(const snapmla_ref_fetch_desc *d, int64_t row, int64_t slot) {
    const snapmla_ref_cache *c = &d->cache;
    uint16_t *latent = d->latent + row * d->latent_stride;
    uint16_t *rope = d->rope ? d->rope + row * d->rope_stride : latent + c->latent_dim;
    smlar_place from;
    if (slot < 0) {
        memset(latent, 0, (size_t)c->latent_dim * sizeof *latent);
        if (c->rope_dim) memset(rope, 0, (size_t)c->rope_dim * sizeof *rope);
        return;
    }
    from = smlar_find(c, slot / c->page_size, slot % c->page_size);
    for (int32_t k = 0; k < c->latent_dim; k++) {
        latent[k] = snapmla_ref_bf16_from_float(snapmla_ref_e4m3_to_float(from.content[k]) *
                                                *from.scale);
    }
    for (int32_t k = 0; k < c->rope_dim; k++) {
        rope[k] = snapmla_ref_bf16_from_float(snapmla_ref_bf16_to_float(from.rope[k]) *
                                              *from.scale);
    }
}

/* Rows of requests by their block table. */
static int smlar_fetch_ranges(snapmla_ref_fetch_desc *d) {
    if (!d->block_table || !d->row_starts || d->batch < 0 || d->block_table_width < 0) return -1;
    if (!d->block_table_stride) d->block_table_stride = d->block_table_width;
    if (d->block_table_stride < d->block_table_width) return -1;
    if (d->row_starts[0] < 0 || d->row_starts[d->batch] > d->tokens) return -1;
    for (int pass = 0; pass < 2; pass++) { /* look at everything before anything is written */
        for (int32_t b = 0; b < d->batch; b++) {
            const int64_t first = d->first ? d->first[b] : 0;
            const int32_t start = d->row_starts[b], end = d->row_starts[b + 1];
            if (end < start) return -1;
            for (int32_t row = start; row < end; row++) {
                const int64_t slot = smlar_slot_of(d, b, first + (row - start));
                if (slot == -2) return -1;
                if (pass) smlar_fetch_row(d, row, slot);
            }
        }
    }
    return 0;
}

SNAPMLA_REF_API int snapmla_ref_fetch(const snapmla_ref_fetch_desc *desc) {
    snapmla_ref_fetch_desc d;
    if (!desc) return -1;
    d = *desc;
    if (smlar_rows(&d.cache, d.tokens, d.latent, &d.latent_stride, d.rope, &d.rope_stride)) {
        return -1;
    }
    if (!d.tokens) return 0;
    if (!d.slots) return smlar_fetch_ranges(&d);
    if (d.block_table || smlar_slots(d.slots, d.tokens, d.cache.pages * d.cache.page_size)) {
        return -1;
    }
    for (int64_t i = 0; i < d.tokens; i++) smlar_fetch_row(&d, i, d.slots[i]);
    return 0;
}

SNAPMLA_REF_API int snapmla_ref_copy_pages(const snapmla_ref_copy_pages_desc *desc) {
    if (!desc || desc->layers < 0 || desc->count < 0) return -1;
    if (!desc->layers || !desc->count) return 0;
    if (!desc->source || !desc->destination || !desc->pairs) return -1;
    for (int pass = 0; pass < 2; pass++) {
        for (int32_t l = 0; l < desc->layers; l++) {
            snapmla_ref_cache from = desc->source[l], to = desc->destination[l];
            if (smlar_cache(&from, 1) || smlar_cache(&to, 1)) return -1;
            if (from.page_size != to.page_size || from.latent_dim != to.latent_dim ||
                from.rope_dim != to.rope_dim) {
                return -1;
            }
            for (int64_t i = 0; i < desc->count; i++) {
                const int64_t a = desc->pairs[2 * i], b = desc->pairs[2 * i + 1];
                const size_t tokens = (size_t)from.page_size;
                smlar_place source, destination;
                if (a >= from.pages || b >= to.pages) return -1;
                if (!pass || a < 0 || b < 0) continue;
                source = smlar_find(&from, a, 0);
                destination = smlar_find(&to, b, 0);
                memcpy(destination.content, source.content, tokens * (size_t)from.latent_dim);
                memcpy(destination.scale, source.scale, tokens * sizeof(float));
                if (from.rope_dim) {
                    memcpy(destination.rope, source.rope,
                           tokens * (size_t)from.rope_dim * sizeof(uint16_t));
                }
            }
        }
    }
    return 0;
}

/* A 656-byte record as a bf16 row: 512 of latent, 64 of rope. */
static void smlar_read_record(const uint8_t *record, uint16_t *row) {
    float scale[4];
    memcpy(scale, record + 512, sizeof scale);
    for (int32_t d = 0; d < 512; d++) {
        row[d] = snapmla_ref_bf16_from_float(snapmla_ref_e4m3_to_float(record[d]) * scale[d / 128]);
    }
    memcpy(row + 512, record + 528, 64 * sizeof *row);
}

SNAPMLA_REF_API int snapmla_ref_import(const snapmla_ref_import_desc *desc) {
    snapmla_ref_import_desc d;
    int64_t dims, end, unit;
    uint16_t *row;
    if (!desc) return -1;
    d = *desc;
    if (smlar_cache(&d.cache, 1) || d.tokens < 0) return -1;
    if (d.format != SNAPMLA_REF_SOURCE_BF16 && d.format != SNAPMLA_REF_SOURCE_RECORD_656) return -1;
    if (!d.tokens) return 0;
    dims = d.cache.latent_dim + d.cache.rope_dim;
    if (d.format == SNAPMLA_REF_SOURCE_RECORD_656 &&
        (d.cache.latent_dim != 512 || d.cache.rope_dim != 64)) {
        return -1;
    }
    if (!d.source_page_size) d.source_page_size = d.cache.page_size;
    if (d.source_page_size < 0 || !d.source) return -1;
    unit = d.format == SNAPMLA_REF_SOURCE_BF16 ? dims : 656;
    if (smlar_stride(&d.source_row_stride, unit, unit)) return -1;
    end = smlar_dense(d.source_page_size - 1, d.source_row_stride); /* the last row of a page */
    if (end < 0 || end > INT64_MAX - unit ||
        smlar_stride(&d.source_page_stride, smlar_dense(d.source_page_size, d.source_row_stride),
                     end + unit)) {
        return -1;
    }
    if (!d.slots) d.slots = d.source_slots;
    end = d.cache.pages * d.cache.page_size;
    if (d.slots ? smlar_slots(d.slots, d.tokens, end) : d.tokens > end) return -1;
    row = smlar_row(&d.cache);
    if (!row) return -1;
    for (int64_t i = 0; i < d.tokens; i++) {
        const int64_t from = d.source_slots ? d.source_slots[i] : i;
        const int64_t slot = d.slots ? d.slots[i] : i;
        smlar_place to;
        int64_t at;
        if (from < 0 || slot < 0) continue;
        at = from / d.source_page_size * d.source_page_stride +
             from % d.source_page_size * d.source_row_stride;
        if (d.format == SNAPMLA_REF_SOURCE_BF16) {
            memcpy(row, (const uint16_t *)d.source + at, (size_t)dims * sizeof *row);
        } else {
            smlar_read_record((const uint8_t *)d.source + at, row);
        }
        to = smlar_find(&d.cache, slot / d.cache.page_size, slot % d.cache.page_size);
        snapmla_ref_quantize(row, d.cache.latent_dim, row + d.cache.latent_dim, d.cache.rope_dim,
                             to.content, to.scale, to.rope);
    }
    SMLAR_FREE(row);
    return 0;
}

/* ================================================================================================
   >>tile       a block of keys and a chunk of query rows, dequantised once into tile order
   ============================================================================================== */

/* What a token of the block is. */
enum {
    SMLAR_HOLE, /* nothing: past the end or without a page */
    SMLAR_KEY,  /* an ordinary key */
    SMLAR_WILD, /* its rope holds NaN or Inf: the tensor core's integers cannot take it */
    SMLAR_BAD   /* NaN for every row that sees it; held as zeros, so that other rows stay clean */
};

/* Four query rows. */
typedef struct smlar_group {
    int64_t visible[SMLAR_ROWS]; /* keys that the row sees; 0 of the last group's padding */
    float scale[SMLAR_ROWS];     /* q_s; NaN of a bad row */
    int kind[SMLAR_ROWS];        /* as of tokens; HOLE is padding */
} smlar_group;

/* The state of four rows between blocks, beside acc [latent / 8][4][8]. */
typedef struct smlar_state {
    float m[SMLAR_ROWS], l[SMLAR_ROWS], lq[SMLAR_ROWS];
    float unit[SMLAR_ROWS]; /* S of one_accumulator */
} smlar_state;

typedef struct smlar_state64 {
    double m[SMLAR_ROWS], l[SMLAR_ROWS];
} smlar_state64;

/* A decode call with all defaults filled in, and its scratch. */
typedef struct smlar_job {
    snapmla_ref_decode_desc d;
    int64_t latent, rope, dim; /* dims of V, of the rope part, of a key */
    int64_t rows;              /* s_q * heads */
    int64_t block;             /* tokens of a tile */
    int64_t groups;            /* groups of a chunk */
    int64_t splits;            /* greatest number of splits of a request */
    int wide;                  /* double (EXACT, BF16) or float (EMULATED) */
    float e4m3[256];
    /* one panel of keys, or one query row, in plain order */
    float *plain;       /* [8][dim] */
    uint8_t *q_content; /* [latent] */
    uint16_t *q_rope;   /* [rope] */
    /* the block of keys; the wide ones in double, the others in float */
    uint8_t *kind;                   /* [block] */
    float *scale;                    /* [block] */
    float *key, *value;              /* [block / 8][dim][8], [latent / 8][block][8] */
    double *key64, *value64;         /* the same */
    float *key_top, *value_top;      /* fp8_tensor_core: powers of two, key_top of content only */
    double *key_rope, *key_rope_top; /* [block / 8][rope][8] */
    /* the chunk of query rows */
    smlar_group *group; /* [groups] */
    float *q;           /* [groups][dim][4] */
    double *q64;
    float *q_top;                  /* [groups][latent][4] */
    double *q_rope64, *q_rope_top; /* [groups][rope][4] */
    smlar_state *state;            /* [splits][groups] */
    smlar_state64 *state64;        /* [groups] */
    float *acc;                    /* [splits][groups][latent / 8][4][8] */
    double *acc64;                 /* [groups][latent / 8][4][8] */
} smlar_job;

/* Read token t of a request into `row`, undone from its storage format but not scaled. */
static int smlar_load_key(const smlar_job *job, const int32_t *table, int64_t t, float *row,
                          float *scale) {
    const snapmla_ref_cache *c = &job->d.cache;
    const int64_t page = table[t / c->page_size], offset = t % c->page_size;
    int kind = SMLAR_KEY;
    if (page < 0) return SMLAR_HOLE;
    if (job->d.fidelity == SNAPMLA_REF_BF16) {
        const uint16_t *key = job->d.key + (page * c->page_size + offset) * job->dim;
        for (int64_t d = 0; d < job->dim; d++) row[d] = snapmla_ref_bf16_to_float(key[d]);
        for (int64_t d = 0; d < job->latent; d++) {
            if ((key[d] & 0x7f80) == 0x7f80) kind = SMLAR_BAD;
        }
        *scale = 1;
    } else {
        const smlar_place at = smlar_find(c, page, offset);
        for (int64_t d = 0; d < job->latent; d++) {
            row[d] = job->e4m3[at.content[d]];
            if ((at.content[d] & 0x7f) == 0x7f) kind = SMLAR_BAD;
        }
        for (int64_t d = 0; d < job->rope; d++) {
            row[job->latent + d] = snapmla_ref_bf16_to_float(at.rope[d]);
            if (kind == SMLAR_KEY && (at.rope[d] & 0x7f80) == 0x7f80) kind = SMLAR_WILD;
        }
        *scale = *at.scale;
        if (!smlar_finite(*scale)) kind = SMLAR_BAD;
    }
    if (kind == SMLAR_BAD) memset(row, 0, (size_t)job->dim * sizeof *row);
    return kind;
}

/* One panel of 8 tokens from plain order into tile order, in float. */
static void smlar_pack(const smlar_job *job, int64_t panel) {
    const int64_t dim = job->dim, step = job->block * SMLAR_LANES;
    const float *SMLAR_RESTRICT plain = job->plain;
    float *SMLAR_RESTRICT key = job->key + panel * SMLAR_LANES * dim;
    float *SMLAR_RESTRICT value = job->value + panel * SMLAR_LANES * SMLAR_LANES;
    for (int64_t d = 0; d < dim; d++) {
        for (int j = 0; j < SMLAR_LANES; j++) key[d * SMLAR_LANES + j] = plain[j * dim + d];
    }
    for (int64_t d = 0; d < job->latent / SMLAR_LANES; d++) {
        for (int t = 0; t < SMLAR_LANES; t++) {
            for (int j = 0; j < SMLAR_LANES; j++) {
                value[d * step + t * SMLAR_LANES + j] = plain[t * dim + d * SMLAR_LANES + j];
            }
        }
    }
}

/* The same in double.  V gets its scale here, which EMULATED leaves to the weights. */
static void smlar_pack64(const smlar_job *job, int64_t panel) {
    const int64_t dim = job->dim, step = job->block * SMLAR_LANES;
    const float *SMLAR_RESTRICT plain = job->plain;
    const float *SMLAR_RESTRICT scale = job->scale + panel * SMLAR_LANES;
    double *SMLAR_RESTRICT key = job->key64 + panel * SMLAR_LANES * dim;
    double *SMLAR_RESTRICT value = job->value64 + panel * SMLAR_LANES * SMLAR_LANES;
    for (int64_t d = 0; d < dim; d++) {
        for (int j = 0; j < SMLAR_LANES; j++) key[d * SMLAR_LANES + j] = (double)plain[j * dim + d];
    }
    for (int64_t d = 0; d < job->latent / SMLAR_LANES; d++) {
        for (int t = 0; t < SMLAR_LANES; t++) {
            for (int j = 0; j < SMLAR_LANES; j++) {
                value[d * step + t * SMLAR_LANES + j] =
                    (double)plain[t * dim + d * SMLAR_LANES + j] * (double)scale[t];
            }
        }
    }
}

/* What fp8_tensor_core needs beside the values: exponents, and the rope part in double. */
static void smlar_pack_tensor_core(const smlar_job *job, int64_t panel) {
    const int64_t dim = job->dim, latent = job->latent, rope = job->rope;
    for (int64_t d = 0; d < latent; d++) {
        for (int j = 0; j < SMLAR_LANES; j++) {
            const float top = smlar_top_e4m3(job->plain[j * dim + d]);
            job->key_top[(panel * latent + d) * SMLAR_LANES + j] = top;
            job->value_top[(d / SMLAR_LANES * job->block + panel * SMLAR_LANES + j) * SMLAR_LANES +
                           d % SMLAR_LANES] = top;
        }
    }
    for (int64_t d = 0; d < rope; d++) {
        for (int j = 0; j < SMLAR_LANES; j++) {
            const float x = job->plain[j * dim + latent + d];
            const int64_t at = (panel * rope + d) * SMLAR_LANES + j;
            job->key_rope[at] = smlar_finite(x) ? (double)x : 0;
            job->key_rope_top[at] = smlar_finite(x) ? smlar_top_f32(x) : 0;
        }
    }
}

/* `tokens` tokens of a request from `first` on; the rest of the last 32 become holes. */
static void smlar_load_block(const smlar_job *job, const int32_t *table, int64_t first,
                             int64_t tokens) {
    for (int64_t panel = 0; panel * SMLAR_LANES < (tokens + 31) / 32 * 32; panel++) {
        for (int j = 0; j < SMLAR_LANES; j++) {
            const int64_t t = panel * SMLAR_LANES + j;
            float *row = job->plain + j * job->dim;
            int kind = SMLAR_HOLE;
            job->scale[t] = 0;
            if (t < tokens) kind = smlar_load_key(job, table, first + t, row, &job->scale[t]);
            if (kind == SMLAR_HOLE) memset(row, 0, (size_t)job->dim * sizeof *row);
            if (kind == SMLAR_BAD) job->scale[t] = 0;
            job->kind[t] = (uint8_t)kind;
        }
        if (job->wide) {
            smlar_pack64(job, panel);
        } else {
            smlar_pack(job, panel);
        }
        if (job->key_top) smlar_pack_tensor_core(job, panel);
    }
}

/* A bf16 query row of the precise mode; EXACT takes it as it is. */
static int smlar_precise_query(const smlar_job *job, const uint16_t *q, float *row, float *scale) {
    float amax = 1e-26f, inverse;
    int kind = SMLAR_KEY, exponent;
    for (int64_t k = 0; k < job->dim; k++) {
        row[k] = snapmla_ref_bf16_to_float(q[k]);
        if (k < job->latent && fabsf(row[k]) > amax) amax = fabsf(row[k]);
        if ((q[k] & 0x7f80) != 0x7f80) continue;
        if (k < job->latent) kind = SMLAR_BAD;
        if (kind == SMLAR_KEY) kind = SMLAR_WILD;
    }
    *scale = 1;
    if (kind == SMLAR_BAD) *scale = smlar_nan();
    if (kind == SMLAR_BAD || job->wide) return kind;
    (void)frexpf(amax, &exponent); /* 2^(exponent - 1) <= amax */
    *scale = ldexpf(1.0f, exponent - 9);
    inverse = ldexpf(1.0f, 9 - exponent);
    for (int64_t k = 0; k < job->latent; k++) row[k] = smlar_f16(row[k] * inverse);
    for (int64_t k = job->latent; k < job->dim; k++) {
        row[k] = snapmla_ref_bf16_to_float(snapmla_ref_bf16_from_float(row[k] * inverse));
    }
    return kind;
}

/* Query row r of request b, undone from its format; returns its kind. */
static int smlar_load_query(const smlar_job *job, int64_t b, int64_t r, float *row, float *scale) {
    const snapmla_ref_decode_desc *d = &job->d;
    const uint8_t *content = job->q_content;
    const uint16_t *rope = job->q_rope;
    int kind = SMLAR_KEY;
    if (d->q) {
        const uint16_t *q = d->q + b * d->q_batch_stride + r / d->heads * d->q_token_stride +
                            r % d->heads * d->q_head_stride;
        if (d->fidelity == SNAPMLA_REF_BF16) {
            for (int64_t k = 0; k < job->dim; k++) row[k] = snapmla_ref_bf16_to_float(q[k]);
            for (int64_t k = 0; k < job->latent; k++) {
                if ((q[k] & 0x7f80) == 0x7f80) kind = SMLAR_BAD;
            }
            *scale = kind == SMLAR_BAD ? smlar_nan() : 1;
            return kind;
        }
        if (d->mode == SNAPMLA_REF_MODE_PRECISE) return smlar_precise_query(job, q, row, scale);
        snapmla_ref_quantize(q, (int32_t)job->latent, q + job->latent, (int32_t)job->rope,
                             job->q_content, scale, job->q_rope);
    } else {
        const int64_t at = b * job->rows + r;
        content = d->q_content + at * job->latent;
        rope = job->rope ? d->q_rope + at * job->rope : NULL;
        *scale = d->q_scale[at];
    }
    if (!smlar_finite(*scale)) kind = SMLAR_BAD;
    for (int64_t k = 0; k < job->latent; k++) {
        row[k] = job->e4m3[content[k]];
        if ((content[k] & 0x7f) == 0x7f) kind = SMLAR_BAD;
    }
    for (int64_t k = 0; k < job->rope; k++) {
        row[job->latent + k] = snapmla_ref_bf16_to_float(rope[k]);
        if (kind == SMLAR_KEY && (rope[k] & 0x7f80) == 0x7f80) kind = SMLAR_WILD;
    }
    if (kind == SMLAR_BAD) *scale = smlar_nan();
    return kind;
}

/* Rows first_row .. of request b into the chunk's groups. */
static void smlar_load_queries(const smlar_job *job, int64_t b, int64_t len, int64_t first_row,
                               int64_t groups) {
    const int64_t latent = job->latent, dim = job->dim;
    for (int64_t g = 0; g < groups; g++) {
        smlar_group *group = &job->group[g];
        for (int i = 0; i < SMLAR_ROWS; i++) {
            const int64_t r = first_row + g * SMLAR_ROWS + i;
            group->visible[i] = 0;
            group->scale[i] = 0;
            group->kind[i] = SMLAR_HOLE;
            if (r < job->rows) {
                int64_t visible = len;
                if (job->d.causal) visible += 1 + r / job->d.heads - job->d.s_q;
                group->visible[i] = visible > 0 ? visible : 0;
                group->kind[i] = smlar_load_query(job, b, r, job->plain, &group->scale[i]);
            }
            if (group->kind[i] == SMLAR_HOLE || group->kind[i] == SMLAR_BAD) {
                memset(job->plain, 0, (size_t)dim * sizeof *job->plain);
            }
            for (int64_t k = 0; k < dim; k++) {
                const int64_t at = (g * dim + k) * SMLAR_ROWS + i;
                if (job->wide) {
                    job->q64[at] = (double)job->plain[k];
                } else {
                    job->q[at] = job->plain[k];
                }
            }
            if (!job->q_top) continue;
            for (int64_t k = 0; k < latent; k++) {
                job->q_top[(g * latent + k) * SMLAR_ROWS + i] = smlar_top_e4m3(job->plain[k]);
            }
            for (int64_t k = 0; k < job->rope; k++) {
                const float x = job->plain[latent + k];
                const int64_t at = (g * job->rope + k) * SMLAR_ROWS + i;
                job->q_rope64[at] = smlar_finite(x) ? (double)x : 0;
                job->q_rope_top[at] = smlar_finite(x) ? smlar_top_f32(x) : 0;
            }
        }
    }
}

/* How many tokens of the block at `first` each row of a group sees; returns the most. */
static int64_t smlar_seen(const smlar_group *group, int64_t first, int64_t tokens,
                          int64_t seen[SMLAR_ROWS]) {
    int64_t most = 0;
    for (int r = 0; r < SMLAR_ROWS; r++) {
        const int64_t n = group->visible[r] - first;
        seen[r] = n < 0 ? 0 : n < tokens ? n : tokens;
        if (seen[r] > most) most = seen[r];
    }
    return most;
}

/* ================================================================================================
   >>exact      online softmax in double
   ============================================================================================== */

static void smlar_exact_block(const smlar_job *job, int64_t g, int64_t first, int64_t tokens) {
    const smlar_group *group = &job->group[g];
    smlar_state64 *state = &job->state64[g];
    const double *q = job->q64 + g * job->dim * SMLAR_ROWS;
    double *acc = job->acc64 + g * job->latent * SMLAR_ROWS;
    double x[SMLAR_ROWS][SMLAR_EXACT_BLOCK], e[SMLAR_EXACT_BLOCK * SMLAR_ROWS];
    double alpha[SMLAR_ROWS];
    int64_t seen[SMLAR_ROWS];
    const int64_t most = smlar_seen(group, first, tokens, seen);
    int moved = 0;
    if (!most) return;
    for (int64_t t = 0; t < most; t += SMLAR_LANES) {
        double c[SMLAR_CELLS] = {0};
        smlar_tile_f64(q, job->key64 + t * job->dim, job->dim, c);
        for (int r = 0; r < SMLAR_ROWS; r++) {
            for (int j = 0; j < SMLAR_LANES; j++) x[r][t + j] = c[r * SMLAR_LANES + j];
        }
    }
    memset(e, 0, sizeof e);
    for (int r = 0; r < SMLAR_ROWS; r++) {
        const double factor = (double)job->d.softmax_scale * (double)group->scale[r];
        double m = state->m[r], sum = 0;
        int bad = 0; /* m cannot show a NaN: no comparison sees it */
        alpha[r] = 1;
        for (int64_t t = 0; t < seen[r]; t++) {
            if (job->kind[t] == SMLAR_HOLE) {
                x[r][t] = -HUGE_VAL;
            } else if (job->kind[t] == SMLAR_BAD) {
                x[r][t] = (double)smlar_nan();
            } else {
                x[r][t] *= factor * (double)job->scale[t];
            }
            if (x[r][t] > m) m = x[r][t];
            if (x[r][t] != x[r][t]) bad = 1;
        }
        if (m == -HUGE_VAL && !bad) continue;
        for (int64_t t = 0; t < seen[r]; t++) {
            const double weight = exp(x[r][t] - m);
            sum += weight;
            if (weight == weight) e[t * SMLAR_ROWS + r] = weight;
        }
        if (m > state->m[r]) {
            alpha[r] = exp(state->m[r] - m);
            moved = 1;
        }
        state->l[r] = state->l[r] * alpha[r] + sum;
        state->m[r] = m;
    }
    for (int64_t d = 0; d < job->latent; d += SMLAR_LANES, acc += SMLAR_CELLS) {
        for (int r = 0; moved && r < SMLAR_ROWS; r++) {
            for (int j = 0; j < SMLAR_LANES; j++) acc[r * SMLAR_LANES + j] *= alpha[r];
        }
        smlar_tile_f64(e, job->value64 + d * job->block, most, acc);
    }
}

/* ================================================================================================
   >>emulated   the kernels' recurrence; the manual on top states it
   ============================================================================================== */

/* x[r][t] = q8 k8 + qr kr of the first `tokens` tokens */
static void smlar_scores(const smlar_job *job, int64_t g, int64_t tokens,
                         float x[SMLAR_ROWS][SMLAR_MAX_BLOCK]) {
    const int64_t latent = job->latent, rope = job->rope, dim = job->dim;
    const float *q = job->q + g * dim * SMLAR_ROWS;
    for (int64_t t = 0; t < tokens; t += SMLAR_LANES) {
        const float *key = job->key + t * dim;
        float c[SMLAR_CELLS] = {0};
        if (!job->key_top) {
            smlar_tile_f32(q, key, dim, c);
        } else {
            smlar_tile_e4m3(q, job->q_top + g * latent * SMLAR_ROWS, key, job->key_top + t * latent,
                            latent, c);
            smlar_tile_bf16(job->q_rope64 + g * rope * SMLAR_ROWS,
                            job->q_rope_top + g * rope * SMLAR_ROWS, job->key_rope + t * rope,
                            job->key_rope_top + t * rope, rope, c);
        }
        for (int r = 0; r < SMLAR_ROWS; r++) {
            for (int j = 0; j < SMLAR_LANES; j++) {
                const int wild = job->key_top && (job->kind[t + j] == SMLAR_WILD ||
                                                  job->group[g].kind[r] == SMLAR_WILD);
                float s = c[r * SMLAR_LANES + j];
                if (wild) {
                    s = 0;
                    for (int64_t d = 0; d < dim; d++) {
                        s += q[d * SMLAR_ROWS + r] * key[d * SMLAR_LANES + j];
                    }
                }
                x[r][t + j] = s;
            }
        }
    }
}

/* The softmax of one row over `seen` tokens: raw scores x[t] to rounded weights p[t][4], the factor
   alpha on what was before and the factor gain on the block's sum.  0: nothing to accumulate. */
static int smlar_weigh(const smlar_job *job, const smlar_group *group, smlar_state *state, int r,
                       int64_t seen, float *x, float *p, float *alpha, float *gain) {
    const float factor = job->d.softmax_scale * SMLAR_LOG2E * group->scale[r];
    const int precise = job->d.mode == SNAPMLA_REF_MODE_PRECISE;
    const float least = precise ? 1.0f / 16384 : 1.0f / 64; /* the least normal number */
    float m = state->m[r], sum = 0, sum_rounded = 0, top = 0, unit, inverse;
    int bad = 0;
    for (int64_t t = 0; t < seen; t++) {
        if (job->kind[t] == SMLAR_HOLE) {
            x[t] = -INFINITY;
            continue;
        }
        x[t] *= factor * job->scale[t];
        if (x[t] > m) m = x[t];
        if (x[t] != x[t] || job->kind[t] == SMLAR_BAD) bad = 1;
    }
    if (bad || m == INFINITY) { /* for good: nothing that follows turns a NaN back */
        state->l[r] = state->lq[r] = smlar_nan();
        return 0;
    }
    if (m == -INFINITY) return 0;
    for (int64_t t = 0; t < seen; t++) {
        float f;
        x[t] = exp2f(x[t] - m);
        sum += x[t];
        f = x[t] * job->scale[t];
        if (f > top) top = f;
    }
    *alpha = exp2f(state->m[r] - m);
    unit = top / 448.0f;
    inverse = 448.0f / top;
    if (job->d.one_accumulator) {
        const float before = *alpha * state->unit[r];
        if (before >= unit) {
            unit = before;
            inverse = 1.0f / before;
        }
    }
    if (!(unit >= SMLAR_FLT_MIN)) unit = inverse = 0; /* too small for a scale: no values */
    *gain = unit;
    for (int64_t t = 0; t < seen; t++) {
        const float scaled = x[t] * job->scale[t] * inverse;
        const float rounded =
            precise ? smlar_f16(scaled) : job->e4m3[snapmla_ref_e4m3_from_float(scaled)];
        p[t * SMLAR_ROWS + r] = rounded;
        sum_rounded += rounded >= least ? rounded * unit / job->scale[t] : x[t];
    }
    state->l[r] = state->l[r] * *alpha + sum;
    state->lq[r] = state->lq[r] * *alpha + sum_rounded;
    state->m[r] = m;
    if (job->d.one_accumulator) { /* acc is in units of S */
        *alpha = unit > 0 ? *alpha * state->unit[r] / unit : 0;
        state->unit[r] = unit;
    }
    return 1;
}

static void smlar_emulate_block(const smlar_job *job, int64_t split, int64_t g, int64_t first,
                                int64_t tokens) {
    smlar_state *state = &job->state[split * job->groups + g];
    float *acc = job->acc + (split * job->groups + g) * job->latent * SMLAR_ROWS;
    float x[SMLAR_ROWS][SMLAR_MAX_BLOCK];
    float p[SMLAR_MAX_BLOCK * SMLAR_ROWS], p_top[SMLAR_MAX_BLOCK * SMLAR_ROWS];
    float alpha[SMLAR_ROWS], gain[SMLAR_ROWS];
    int64_t seen[SMLAR_ROWS];
    const int64_t most = smlar_seen(&job->group[g], first, tokens, seen);
    const int64_t padded = job->key_top ? (most + 31) / 32 * 32 : most;
    int active[SMLAR_ROWS], any = 0;
    if (!most) return;
    smlar_scores(job, g, most, x);
    memset(p, 0, (size_t)(padded * SMLAR_ROWS) * sizeof *p);
    for (int r = 0; r < SMLAR_ROWS; r++) {
        alpha[r] = gain[r] = 0;
        active[r] = seen[r] && smlar_weigh(job, &job->group[g], state, r, seen[r], x[r], p,
                                           &alpha[r], &gain[r]);
        any |= active[r];
    }
    if (!any) return;
    if (job->key_top) {
        for (int64_t i = 0; i < padded * SMLAR_ROWS; i++) p_top[i] = smlar_top_e4m3(p[i]);
    }
    for (int64_t d = 0; d < job->latent; d += SMLAR_LANES, acc += SMLAR_CELLS) {
        const float *value = job->value + d * job->block;
        float c[SMLAR_CELLS] = {0};
        if (job->d.one_accumulator) {
            for (int i = 0; i < SMLAR_CELLS; i++) c[i] = acc[i] * alpha[i / SMLAR_LANES];
        }
        if (job->key_top) {
            smlar_tile_e4m3(p, p_top, value, job->value_top + d * job->block, padded, c);
        } else {
            smlar_tile_f32(p, value, padded, c);
        }
        for (int r = 0; r < SMLAR_ROWS; r++) {
            if (!active[r]) continue;
            for (int j = 0; j < SMLAR_LANES; j++) {
                float *to = &acc[r * SMLAR_LANES + j];
                const float part = c[r * SMLAR_LANES + j];
                *to = job->d.one_accumulator ? part : *to * alpha[r] + gain[r] * part;
            }
        }
    }
}

/* Merge the splits of one row of a group into out [latent]; returns lse. */
static float smlar_merge_splits(const smlar_job *job, int64_t splits, int64_t g, int r,
                                float *out) {
    float m = -INFINITY, l = 0, lq = 0;
    memset(out, 0, (size_t)job->latent * sizeof *out);
    for (int64_t i = 0; i < splits; i++) {
        const smlar_state *state = &job->state[i * job->groups + g];
        if (state->l[r] != state->l[r]) m = INFINITY; /* a NaN: the weights become NaN or 0 * NaN */
        if (state->m[r] > m) m = state->m[r];
    }
    for (int64_t i = 0; i < splits; i++) {
        const smlar_state *state = &job->state[i * job->groups + g];
        const float *acc =
            job->acc + (i * job->groups + g) * job->latent * SMLAR_ROWS + r * SMLAR_LANES;
        float weight;
        if (state->l[r] == 0) continue;
        weight = exp2f(state->m[r] - m);
        l += state->l[r] * weight;
        lq += state->lq[r] * weight;
        if (job->d.one_accumulator) weight *= state->unit[r];
        for (int64_t d = 0; d < job->latent; d++) {
            out[d] += weight * acc[d / SMLAR_LANES * SMLAR_CELLS + d % SMLAR_LANES];
        }
    }
    if (l == 0) return -INFINITY;
    for (int64_t d = 0; d < job->latent; d++) out[d] /= lq;
    return l != l ? l : m * SMLAR_LN2 + logf(l);
}

/* ================================================================================================
   >>decode     checks, scratch, the loops over requests, chunks of rows, splits and blocks
   ============================================================================================== */

/* Keys of request b. */
static int64_t smlar_length(const smlar_job *job, int64_t b) {
    const snapmla_ref_decode_desc *d = &job->d;
    const int64_t room = d->cache.pages ? (int64_t)d->block_table_width * d->cache.page_size : 0;
    int64_t len = d->seq_lens[b];
    if (d->max_seq_len && len > d->max_seq_len) len = d->max_seq_len;
    if (len > room) len = room;
    return len > 0 ? len : 0;
}

/* Everything that can be checked without looking at lengths, tables and planes. */
static int smlar_check(smlar_job *job) {
    snapmla_ref_decode_desc *d = &job->d;
    const int bf16 = d->fidelity == SNAPMLA_REF_BF16;
    if (!bf16 && d->fidelity != SNAPMLA_REF_EXACT && d->fidelity != SNAPMLA_REF_EMULATED) return -1;
    if (d->mode != SNAPMLA_REF_MODE_DEFAULT && d->mode != SNAPMLA_REF_MODE_PRECISE) return -1;
    if (d->batch < 0 || d->s_q < 0 || d->heads < 0) return -1;
    if (smlar_cache(&d->cache, !bf16)) return -1;
    job->latent = d->cache.latent_dim;
    job->rope = d->cache.rope_dim;
    job->dim = job->latent + job->rope;
    job->rows = (int64_t)d->s_q * d->heads;
    if (!smlar_fits(job->rows, (int64_t)d->batch * job->dim, INT64_MAX / 8)) return -1;
    if (d->max_seq_len < 0 || d->block_table_width < 0) return -1;
    if (d->causal != 0 && d->causal != 1) return -1;
    if (!(d->softmax_scale > 0) || !smlar_finite(d->softmax_scale)) return -1;
    if (d->fidelity == SNAPMLA_REF_EMULATED) {
        if (!d->block_tokens) d->block_tokens = 64;
        if (d->block_tokens < 0 || d->block_tokens > SMLAR_MAX_BLOCK) return -1;
        if (d->block_tokens % 32) return -1;
        if (d->split_tokens < 0 || d->split_tokens % d->block_tokens) return -1;
        if (d->fp8_tensor_core != 0 && d->fp8_tensor_core != 1) return -1;
        if (d->one_accumulator != 0 && d->one_accumulator != 1) return -1;
        if (d->fp8_tensor_core && d->mode == SNAPMLA_REF_MODE_PRECISE) return -1;
    }
    if (!d->batch || !job->rows) return 0;
    if (!d->seq_lens || (d->block_table_width && !d->block_table)) return -1;
    if (smlar_stride(&d->block_table_stride, d->block_table_width, d->block_table_width)) return -1;
    if (bf16 && d->cache.pages && !d->key) return -1;
    if (d->q ? d->q_content || d->q_scale || d->q_rope
             : bf16 || !d->q_content || !d->q_scale || (job->rope && !d->q_rope)) {
        return -1;
    }
    if (smlar_stride(&d->q_head_stride, job->dim, job->dim) ||
        smlar_stride(&d->q_token_stride, smlar_dense(d->heads, d->q_head_stride), job->dim) ||
        smlar_stride(&d->q_batch_stride, smlar_dense(d->s_q, d->q_token_stride), job->dim)) {
        return -1;
    }
    if (!d->out && !d->out64 && !d->lse && !d->lse64) return -1;
    if (smlar_stride(&d->out_head_stride, job->latent, job->latent) ||
        smlar_stride(&d->out_token_stride, smlar_dense(d->heads, d->out_head_stride),
                     job->latent) ||
        smlar_stride(&d->out_batch_stride, smlar_dense(d->s_q, d->out_token_stride), job->latent) ||
        smlar_stride(&d->lse_token_stride, d->heads, d->heads) ||
        smlar_stride(&d->lse_batch_stride, smlar_dense(d->s_q, d->lse_token_stride), d->heads)) {
        return -1;
    }
    return 0;
}

/* Every table entry that will be read must be a page; and how many splits there can be. */
static int smlar_check_table(smlar_job *job) {
    const snapmla_ref_decode_desc *d = &job->d;
    job->splits = 1;
    for (int64_t b = 0; b < d->batch; b++) {
        const int64_t len = smlar_length(job, b);
        const int64_t entries = (len + d->cache.page_size - 1) / d->cache.page_size;
        for (int64_t i = 0; i < entries; i++) {
            if (d->block_table[b * d->block_table_stride + i] >= d->cache.pages) return -1;
        }
        if (d->fidelity == SNAPMLA_REF_EMULATED && d->split_tokens) {
            const int64_t splits = (len + d->split_tokens - 1) / d->split_tokens;
            if (splits > job->splits) job->splits = splits;
        }
    }
    return 0;
}

/* Cut `count` elements of `size` bytes out of the scratch; NULL base only measures. */
static void *smlar_take(unsigned char *base, uint64_t *used, int64_t count, size_t size) {
    unsigned char *at = base ? base + *used : NULL;
    *used += ((uint64_t)count * size + 63) / 64 * 64;
    return at;
}

static uint64_t smlar_layout(smlar_job *job, unsigned char *base) {
    const int64_t latent = job->latent, rope = job->rope, dim = job->dim;
    const int64_t block = job->block, groups = job->groups, rows = groups * SMLAR_ROWS;
    uint64_t used = 0;
#define SMLAR_TAKE(type, count) (type *)smlar_take(base, &used, (count), sizeof(type))
    job->plain = SMLAR_TAKE(float, SMLAR_LANES * dim);
    job->q_content = SMLAR_TAKE(uint8_t, latent);
    job->q_rope = SMLAR_TAKE(uint16_t, rope);
    job->kind = SMLAR_TAKE(uint8_t, block);
    job->scale = SMLAR_TAKE(float, block);
    job->group = SMLAR_TAKE(smlar_group, groups);
    if (job->wide) {
        job->key64 = SMLAR_TAKE(double, block * dim);
        job->value64 = SMLAR_TAKE(double, block * latent);
        job->q64 = SMLAR_TAKE(double, rows * dim);
        job->state64 = SMLAR_TAKE(smlar_state64, groups);
        job->acc64 = SMLAR_TAKE(double, rows * latent);
    } else {
        job->key = SMLAR_TAKE(float, block * dim);
        job->value = SMLAR_TAKE(float, block * latent);
        job->q = SMLAR_TAKE(float, rows * dim);
        job->state = SMLAR_TAKE(smlar_state, job->splits * groups);
        job->acc = SMLAR_TAKE(float, job->splits * rows * latent);
        if (job->d.fp8_tensor_core) {
            job->key_top = SMLAR_TAKE(float, block * latent);
            job->value_top = SMLAR_TAKE(float, block * latent);
            job->key_rope = SMLAR_TAKE(double, block * rope);
            job->key_rope_top = SMLAR_TAKE(double, block * rope);
            job->q_top = SMLAR_TAKE(float, rows * latent);
            job->q_rope64 = SMLAR_TAKE(double, rows * rope);
            job->q_rope_top = SMLAR_TAKE(double, rows * rope);
        }
    }
#undef SMLAR_TAKE
    return used;
}

/* Write one finished row [latent], given as double or as float. */
static void smlar_store(const smlar_job *job, int64_t b, int64_t r, const double *wide,
                        const float *narrow, double lse) {
    const snapmla_ref_decode_desc *d = &job->d;
    const int64_t i = r / d->heads, h = r % d->heads, dense = b * job->rows + r;
    if (d->out) {
        uint16_t *out =
            d->out + b * d->out_batch_stride + i * d->out_token_stride + h * d->out_head_stride;
        for (int64_t k = 0; k < job->latent; k++) {
            out[k] = smlar_bf16_from_double(wide ? wide[k] : (double)narrow[k]);
        }
    }
    if (d->out64) {
        double *out = d->out64 + dense * job->latent;
        for (int64_t k = 0; k < job->latent; k++) out[k] = wide ? wide[k] : (double)narrow[k];
    }
    if (d->lse) d->lse[b * d->lse_batch_stride + i * d->lse_token_stride + h] = (float)lse;
    if (d->lse64) d->lse64[dense] = lse;
}

/* Start all states of a chunk. */
static void smlar_clear(const smlar_job *job, int64_t splits, int64_t groups) {
    if (job->wide) {
        memset(job->acc64, 0, (size_t)(groups * SMLAR_ROWS * job->latent) * sizeof *job->acc64);
        for (int64_t g = 0; g < groups; g++) {
            for (int r = 0; r < SMLAR_ROWS; r++) {
                job->state64[g].m[r] = -HUGE_VAL;
                job->state64[g].l[r] = 0;
            }
        }
        return;
    }
    for (int64_t i = 0; i < splits; i++) {
        memset(job->acc + i * job->groups * SMLAR_ROWS * job->latent, 0,
               (size_t)(groups * SMLAR_ROWS * job->latent) * sizeof *job->acc);
        for (int64_t g = 0; g < groups; g++) {
            smlar_state *state = &job->state[i * job->groups + g];
            memset(state, 0, sizeof *state);
            for (int r = 0; r < SMLAR_ROWS; r++) state->m[r] = -INFINITY;
        }
    }
}

/* Turn the states of a chunk into output rows. */
static void smlar_finish(const smlar_job *job, int64_t b, int64_t first_row, int64_t splits,
                         int64_t groups) {
    for (int64_t g = 0; g < groups; g++) {
        for (int i = 0; i < SMLAR_ROWS && first_row + g * SMLAR_ROWS + i < job->rows; i++) {
            const int64_t row = first_row + g * SMLAR_ROWS + i;
            if (job->wide) { /* key64 is free by now */
                const smlar_state64 *state = &job->state64[g];
                const double *acc = job->acc64 + g * SMLAR_ROWS * job->latent;
                for (int64_t d = 0; d < job->latent; d++) {
                    const double a =
                        acc[d / SMLAR_LANES * SMLAR_CELLS + i * SMLAR_LANES + d % SMLAR_LANES];
                    job->key64[d] = state->l[i] == 0 ? 0 : a / state->l[i];
                }
                smlar_store(job, b, row, job->key64, NULL,
                            state->l[i] == 0 ? -HUGE_VAL : state->m[i] + log(state->l[i]));
            } else {
                const float lse = smlar_merge_splits(job, splits, g, i, job->plain);
                smlar_store(job, b, row, NULL, job->plain, (double)lse);
            }
        }
    }
}

/* One chunk of query rows of request b against all its keys. */
static void smlar_chunk(const smlar_job *job, int64_t b, int64_t first_row, int64_t groups) {
    const snapmla_ref_decode_desc *d = &job->d;
    const int32_t *table = d->block_table_width ? d->block_table + b * d->block_table_stride : NULL;
    const int64_t len = smlar_length(job, b);
    const int64_t split_tokens = !job->wide && d->split_tokens ? d->split_tokens : len + 1;
    const int64_t splits = len / split_tokens + (len % split_tokens != 0);
    int64_t seen = 0;
    smlar_load_queries(job, b, len, first_row, groups);
    smlar_clear(job, splits, groups);
    for (int64_t g = 0; g < groups; g++) {
        for (int r = 0; r < SMLAR_ROWS; r++) {
            if (job->group[g].visible[r] > seen) seen = job->group[g].visible[r];
        }
    }
    for (int64_t first = 0; first < seen; first += job->block) {
        const int64_t tokens = seen - first < job->block ? seen - first : job->block;
        const int64_t split = first / split_tokens;
        smlar_load_block(job, table, first, tokens);
#ifdef _OPENMP
#pragma omp parallel for schedule(static) if (groups >= 8)
#endif
        for (int64_t g = 0; g < groups; g++) {
            if (job->wide) {
                smlar_exact_block(job, g, first, tokens);
            } else {
                smlar_emulate_block(job, split, g, first, tokens);
            }
        }
    }
    smlar_finish(job, b, first_row, splits, groups);
}

SNAPMLA_REF_API int snapmla_ref_decode(const snapmla_ref_decode_desc *desc) {
    smlar_job job;
    unsigned char *scratch;
    uint64_t bytes;
    if (!desc) return -1;
    memset(&job, 0, sizeof job);
    job.d = *desc;
    if (smlar_check(&job)) return -1;
    if (!job.d.batch || !job.rows) return 0;
    if (smlar_check_table(&job)) return -1;
    job.wide = job.d.fidelity != SNAPMLA_REF_EMULATED;
    job.block = job.wide ? (int64_t)SMLAR_EXACT_BLOCK : job.d.block_tokens;
    for (int i = 0; i < 256; i++) job.e4m3[i] = snapmla_ref_e4m3_to_float((uint8_t)i);

    /* as many rows at once as the scratch allows, at least one group */
    job.groups = SMLAR_CHUNK_BYTES / (SMLAR_ROWS * 8 * (job.dim + job.latent * (job.splits + 1)));
    if (job.groups > (job.rows + SMLAR_ROWS - 1) / SMLAR_ROWS) {
        job.groups = (job.rows + SMLAR_ROWS - 1) / SMLAR_ROWS;
    }
    if (job.groups < 1) job.groups = 1;
    bytes = smlar_layout(&job, NULL);
    if (bytes > SIZE_MAX / 2) return -1;
    scratch = (unsigned char *)SMLAR_MALLOC((size_t)bytes);
    if (!scratch) return -1;
    smlar_layout(&job, scratch);

    for (int64_t b = 0; b < job.d.batch; b++) {
        for (int64_t row = 0; row < job.rows; row += job.groups * SMLAR_ROWS) {
            const int64_t left = (job.rows - row + SMLAR_ROWS - 1) / SMLAR_ROWS;
            smlar_chunk(&job, b, row, left < job.groups ? left : job.groups);
        }
    }
    SMLAR_FREE(scratch);
    return 0;
}

/* ================================================================================================
   >>merge
   ============================================================================================== */

SNAPMLA_REF_API int snapmla_ref_merge(const snapmla_ref_merge_desc *desc) {
    snapmla_ref_merge_desc d;
    double *weight;
    if (!desc) return -1;
    d = *desc;
    if (!d.dim) d.dim = 512;
    if (d.parts < 0 || d.dim < 0 || d.rows < 0) return -1;
    if (!d.rows) return 0;
    if (!d.parts || !d.part_out || !d.part_lse || !d.out) return -1;
    if (!smlar_fits(d.rows, d.dim, INT64_MAX) ||
        smlar_stride(&d.part_out_stride, d.rows * d.dim, d.rows * d.dim) ||
        smlar_stride(&d.part_lse_stride, d.rows, d.rows)) {
        return -1;
    }
    if ((uint64_t)d.parts > SIZE_MAX / sizeof *weight) return -1;
    weight = (double *)SMLAR_MALLOC((size_t)d.parts * sizeof *weight);
    if (!weight) return -1;
    for (int64_t row = 0; row < d.rows; row++) {
        const uint16_t *in = d.part_out + row * d.dim;
        double m = -HUGE_VAL, sum = 0;
        for (int64_t n = 0; n < d.parts; n++) {
            weight[n] = (double)d.part_lse[n * d.part_lse_stride + row];
            if (weight[n] > m) m = weight[n];
        }
        for (int64_t n = 0; n < d.parts; n++) {
            /* a part without a key is marked -1, whatever its row holds; a NaN spoils the sum */
            weight[n] = weight[n] == -HUGE_VAL ? -1 : exp(weight[n] - m);
            if (!(weight[n] < 0)) sum += weight[n];
        }
        for (int64_t k = 0; k < d.dim; k++) { /* all parts are read before out, which may be one */
            double value = 0;
            for (int64_t n = 0; n < d.parts; n++) {
                const float part = snapmla_ref_bf16_to_float(in[n * d.part_out_stride + k]);
                if (!(weight[n] < 0)) value += weight[n] * (double)part;
            }
            d.out[row * d.dim + k] = smlar_bf16_from_double(sum == 0 ? 0 : value / sum);
        }
        if (d.lse) d.lse[row] = (float)(sum == 0 ? -HUGE_VAL : m + log(sum));
    }
    SMLAR_FREE(weight);
    return 0;
}

/* ================================================================================================
   >>cleanup
   ============================================================================================== */
#undef SMLAR_MALLOC
#undef SMLAR_FREE
#undef SMLAR_RESTRICT
#undef SMLAR_FLT_MIN
#undef SMLAR_LOG2E
#undef SMLAR_LN2

#endif /* SNAPMLA_REF_IMPLEMENTATION */

/* ------------------------------------------------------------------------------------------------
   MIT License

   Copyright (c) 2026 The snapmla authors

   Permission is hereby granted, free of charge, to any person obtaining a copy of this software and
   associated documentation files (the "Software"), to deal in the Software without restriction,
   including without limitation the rights to use, copy, modify, merge, publish, distribute,
   sublicense, and/or sell copies of the Software, and to permit persons to whom the Software is
   furnished to do so, subject to the following conditions:

   The above copyright notice and this permission notice shall be included in all copies or
   substantial portions of the Software.

   THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT
   NOT LIMITED TO THE WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND
   NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS OR COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM,
   DAMAGES OR OTHER LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR OTHERWISE, ARISING FROM,
   OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE SOFTWARE.
   ---------------------------------------------------------------------------------------------- */
