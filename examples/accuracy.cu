/* accuracy.cu - how far from exact attention decode is, and what each part of its design is there
   for: errors over lengths, splits and distributions, beside two other ways to use FP8.

       nvcc -O3 -std=c++17 -gencode arch=compute_90a,code=sm_90a -Xcompiler -fopenmp \
            examples/accuracy.cu -o accuracy
       cc -x c -O3 -std=c99 -DNO_GPU -fopenmp examples/accuracy.cu -o accuracy -lm    without CUDA
       ./accuracy                               GPU: to 1M tokens, minutes; else to 4K
       ./accuracy --to 16K --csv errors.csv     other lengths: 1, 64, 1K, 4K, 16K, 64K, 128K, 1M
       ./accuracy --emulate-to 128K             how far `one acc` goes; default 64K, a minute
       ./accuracy sink flat                     some of the distributions
       ./accuracy --csv FILE --note TEXT        TEXT goes into its first line, e.g. the commit

   Without a GPU, or compiled with NO_GPU, decode is the emulation of snapmla_ref.h: the same
   recurrence with the same roundings, on the arithmetic of Hopper's tensor cores; in the precise
   mode with sums in f32.

   Columns, relative rms over eight heads, and the bias = mean signed error / mean magnitude:
     against fp64 attention over the same quantised tensors: what a kernel costs
       decode     snapmla, its bias, and the largest absolute error of lse
       precise    the same in the precise mode, against fp64 attention over the BF16 queries and the
                  quantised keys, since that mode does not round queries to FP8
       one acc    the emulation with all products of V in one FP8 accumulator, 13 fraction bits,
                  truncated: what a kernel does that leaves the output in the tensor core
     against fp64 attention over the BF16 queries and keys: what FP8 costs
       all        snapmla, kernel and format (its CSV has this of the precise mode, too)
       format     the format alone: latent FP8 with a scale a token, RoPE BF16
       1 scale    one scale for all tokens instead, and one for all heads
       rope8      a scale a token, from latent and RoPE, and RoPE in FP8, too
       both       one scale for all of latent and RoPE, all in FP8

   Distributions; where not said otherwise q, latent and RoPE are N(0,1), softmax_scale is 576^-0.5:
       normal     as said
     average    logits from RoPE alone: the output averages out, so that relative errors are large
       mean       latents of mean 0.5
       peaked     the same, q of deviation 4
       onehot     q along one key, which gets nearly all the weight
       sink       latents of mean 0.5; token 5 (0 if there are fewer) weighs as much as all others
       flat       latents of mean 0.5, q = 0: all weights are equal
       rope       heavy-tailed RoPE, up to 1000; the query's is small, so that logits stay moderate
       spread     magnitudes of latents from 1 down to 1e-4, and RoPE favours the small ones

   Expected output: a row for each distribution, length and number of splits; on a GPU for each path
   it has.  Exit code: 0 = all of decode within bounds (3.2e-2; lse 2e-2, or of large logits 2e-3,
   the emulation, which sums all 512 dims in one accumulator, 1e-2; the precise mode 3e-3; lse 2e-3
   or 1e-4, on Hopper, whose FP8 tensor cores truncate, 2e-2 or 1e-3), 1 = not, or a call failed,
   2 = wrong arguments. */
#if !defined(NO_GPU)
#define SNAPMLA_IMPLEMENTATION
#include "../snapmla.cuh"
#endif
#define SNAPMLA_REF_IMPLEMENTATION
#include "../snapmla_ref.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { LATENT = 512, ROPE = 64, DIM = LATENT + ROPE, PAGE = 64, HEADS = 8 };
enum { MANY = 16 };        /* splits, in rows of several */
enum { PIECE = 8192 };     /* tokens that a thread of fp64() takes: a multiple of PAGE */
enum { NORMALS = 1 << 16 };

#if defined(_OPENMP)
#define PARALLEL(what) _Pragma(what)
#else
#define PARALLEL(what)
#endif

static const int32_t kLengths[] = {1, 64, 1024, 4096, 16384, 65536, 131072, 1048576};

enum { NORMAL, AVERAGE, MEAN, PEAKED, ONEHOT, SINK, FLAT, HEAVY_ROPE, SPREAD, DISTRIBUTIONS };
static const char *const kName[DISTRIBUTIONS] = {"normal", "average", "mean", "peaked", "onehot",
                                                 "sink",   "flat",    "rope", "spread"};

/* How to quantise a row: the product's way is {0, 0}. */
typedef struct format {
    int one_scale; /* for all rows, instead of one for each */
    int fp8_rope;  /* which the scale then covers as well */
} format;

/* One row set: keys of one request and HEADS queries, as BF16 and in planes. */
typedef struct planes {
    int64_t rows;
    uint8_t *content;
    float *scale;
    uint16_t *rope;
} planes;

typedef struct problem {
    int32_t tokens;
    float softmax_scale;
    uint16_t *q, *key; /* bf16 [HEADS, DIM], [tokens rounded up to whole pages, DIM] */
    int32_t *table;    /* 0, 1, 2, ... */
} problem;

typedef struct attention {
    double out[HEADS * LATENT], lse[HEADS];
} attention;

typedef struct error {
    double rms, bias, lse, lse_of_logit; /* the last one relative */
} error;

/* What a row is held to: one of the two for lse. */
typedef struct bounds {
    double rms, lse, lse_of_logit;
} bounds;

/* ================================================================================================
   helpers
   ============================================================================================== */
static void require(int ok, const char *what, const char *why)
{
    if (ok) return;
    fflush(stdout);
    fprintf(stderr, "accuracy: %s: %s\n", what, why);
    exit(1);
}

static void *allocate(size_t bytes)
{
    void *p = calloc(bytes ? bytes : 1, 1);
    require(p != NULL, "malloc", "out of memory");
    return p;
}

/* The finaliser of splitmix64: 64 well-mixed bits of any counter. */
static uint64_t mix64(uint64_t x)
{
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

static float g_normal[NORMALS]; /* a sample of N(0,1), to draw from */

static void make_normals(void)
{
    for (uint64_t i = 0; i < NORMALS; i++) {
        const double u = ((double)(mix64(2 * i) >> 11) + 1) * 0x1p-53;
        const double v = (double)(mix64(2 * i + 1) >> 11) * 0x1p-53;
        g_normal[i] = (float)(sqrt(-2 * log(u)) * cos(6.283185307179586 * v));
    }
}

/* x[i] = mean + deviation * N(0,1), a function of `seed` alone; n is a multiple of 4. */
static void fill_normal(float *x, int n, uint64_t seed, float mean, float deviation)
{
    for (int i = 0; i < n; i += 4) {
        const uint64_t bits = mix64(seed * 1024 + (uint64_t)i);
        for (int k = 0; k < 4; k++)
            x[i + k] = mean + deviation * g_normal[bits >> 16 * k & (NORMALS - 1)];
    }
}

static double uniform(uint64_t seed)
{
    return (double)(mix64(seed) >> 11) * 0x1p-53;
}

static void to_bf16(uint16_t *to, const float *from)
{
    for (int d = 0; d < DIM; d++) to[d] = snapmla_ref_bf16_from_float(from[d]);
}

/* ================================================================================================
   the distributions
   ============================================================================================== */
enum { SINK_AT = 5, SINK_DIM = 0 };

static void make_key(int kind, int32_t tokens, int32_t t, uint16_t *key)
{
    const uint64_t seed = ((uint64_t)kind << 40) + 2 * (uint64_t)t;
    const float mean = kind == MEAN || kind == SINK || kind == FLAT ? 0.5f : 0.0f;
    float x[DIM];
    fill_normal(x, LATENT, seed, mean, 1);
    fill_normal(x + LATENT, ROPE, seed + 1, 0, 1);
    if (kind == SINK) x[SINK_DIM] = t == (tokens > SINK_AT ? SINK_AT : 0) ? 8.0f : 0.0f;
    if (kind == HEAVY_ROPE) {
        for (int d = 0; d < ROPE; d++) {
            const double u = uniform(~(seed * ROPE + (uint64_t)d));
            x[LATENT + d] = (float)copysign(pow(10, 3 * u * u * u), x[LATENT + d]);
        }
    }
    if (kind == SPREAD) {
        const double small = uniform(~seed); /* 0: magnitude 1, 1: magnitude 1e-4 */
        for (int d = 0; d < LATENT; d++) x[d] *= (float)pow(10, -4 * small);
        x[LATENT] = (float)(8 * small);
    }
    to_bf16(key, x);
}

static void make_query(int kind, const problem *p, int head, uint16_t *q)
{
    const uint64_t seed = ((uint64_t)(kind + 100) << 40) + 2 * (uint64_t)head;
    const float per_logit = 1 / p->softmax_scale;
    float x[DIM];
    fill_normal(x, DIM, seed, 0, kind == PEAKED ? 4.0f : kind == FLAT ? 0.0f : 1.0f);
    if (kind == ONEHOT) {
        const int64_t t = (int64_t)(mix64(seed) % (uint64_t)p->tokens);
        for (int d = 0; d < DIM; d++) x[d] = 2 * snapmla_ref_bf16_to_float(p->key[t * DIM + d]);
    }
    if (kind == SINK) { /* the tail's logits have deviation 0.5, its mean weight is e^(0.5^2 / 2) */
        for (int d = 0; d < DIM; d++) x[d] *= 0.5f;
        x[SINK_DIM] = (float)((log((double)p->tokens) + 0.125) * per_logit / 8);
    }
    if (kind == AVERAGE)
        for (int d = 0; d < DIM; d++) x[d] *= d < LATENT ? 0.001f : 3.0f;
    if (kind == HEAVY_ROPE) fill_normal(x + LATENT, ROPE, seed + 1, 0, 0.03f);
    if (kind == SPREAD) x[LATENT] = 12 * per_logit / 8; /* up to e^12 for the small ones */
    to_bf16(q, x);
}

static int64_t pages_of(int32_t tokens)
{
    return ((int64_t)tokens + PAGE - 1) / PAGE;
}

static problem make_problem(int kind, int32_t tokens)
{
    problem p;
    p.tokens = tokens;
    p.softmax_scale = 1 / sqrtf(DIM);
    p.q = (uint16_t *)allocate(HEADS * DIM * 2);
    p.key = (uint16_t *)allocate((size_t)pages_of(tokens) * PAGE * DIM * 2);
    p.table = (int32_t *)allocate((size_t)pages_of(tokens) * sizeof(int32_t));
    for (int32_t i = 0; i < (int32_t)pages_of(tokens); i++) p.table[i] = i;
    PARALLEL("omp parallel for schedule(static)")
    for (int32_t t = 0; t < tokens; t++) make_key(kind, tokens, t, p.key + (int64_t)t * DIM);
    for (int h = 0; h < HEADS; h++) make_query(kind, &p, h, p.q + h * DIM);
    return p;
}

/* ================================================================================================
   quantisation
   ============================================================================================== */
static double amax(const uint16_t *row, int n)
{
    double most = 0;
    for (int d = 0; d < n; d++) most = fmax(most, fabs((double)snapmla_ref_bf16_to_float(row[d])));
    return most;
}

/* One row with a given scale; an FP8 RoPE part is held as BF16, which e4m3 fits into. */
static void quantize_with(float scale, const uint16_t *row, format f, uint8_t *content,
                          uint16_t *rope)
{
    for (int d = 0; d < LATENT; d++)
        content[d] = snapmla_ref_e4m3_from_float(snapmla_ref_bf16_to_float(row[d]) / scale);
    for (int d = 0; d < ROPE; d++) {
        float x = snapmla_ref_bf16_to_float(row[LATENT + d]) / scale;
        if (f.fp8_rope) x = snapmla_ref_e4m3_to_float(snapmla_ref_e4m3_from_float(x));
        rope[d] = snapmla_ref_bf16_from_float(x);
    }
}

/* Rows past `rows` of the last page stay zero. */
static planes quantize(const uint16_t *x, int64_t rows, format f)
{
    const int64_t room = (rows + PAGE - 1) / PAGE * PAGE;
    const int covered = f.fp8_rope ? DIM : LATENT;
    planes p;
    double most = 1e-26;
    p.rows = rows;
    p.content = (uint8_t *)allocate((size_t)room * LATENT);
    p.scale = (float *)allocate((size_t)room * sizeof(float));
    p.rope = (uint16_t *)allocate((size_t)room * ROPE * 2);
    if (f.one_scale) {
        PARALLEL("omp parallel for schedule(static) reduction(max : most)")
        for (int64_t r = 0; r < rows; r++) most = fmax(most, amax(x + r * DIM, covered));
    }
    PARALLEL("omp parallel for schedule(static)")
    for (int64_t r = 0; r < rows; r++) {
        const uint16_t *row = x + r * DIM;
        uint8_t *content = p.content + r * LATENT;
        uint16_t *rope = p.rope + r * ROPE;
        if (!f.one_scale && !f.fp8_rope) { /* the library's own */
            snapmla_ref_quantize(row, LATENT, row + LATENT, ROPE, content, &p.scale[r], rope);
        } else {
            p.scale[r] = (float)((f.one_scale ? most : fmax(amax(row, covered), 1e-26)) / 448);
            quantize_with(p.scale[r], row, f, content, rope);
        }
    }
    return p;
}

static void free_planes(planes *p)
{
    free(p->content);
    free(p->scale);
    free(p->rope);
}

/* ================================================================================================
   attention on the CPU
   ============================================================================================== */
/* queries == NULL: over the BF16 ones, which takes the precise mode where keys are quantised.
   keys == NULL: over the BF16 tensors. */
static snapmla_ref_decode_desc ref_desc(const problem *p, const planes *queries, const planes *keys)
{
    snapmla_ref_decode_desc d;
    memset(&d, 0, sizeof d);
    d.fidelity = keys ? SNAPMLA_REF_EXACT : SNAPMLA_REF_BF16;
    d.batch = d.s_q = 1;
    d.heads = HEADS;
    d.seq_lens = &p->tokens;
    d.cache.pages = pages_of(p->tokens);
    d.block_table = p->table;
    d.block_table_width = (int32_t)d.cache.pages;
    d.softmax_scale = p->softmax_scale;
    if (keys) {
        d.cache.content = keys->content;
        d.cache.scale = keys->scale;
        d.cache.rope = keys->rope;
    } else {
        d.key = p->key;
    }
    if (queries) {
        d.q_content = queries->content;
        d.q_scale = queries->scale;
        d.q_rope = queries->rope;
    } else {
        d.mode = keys ? SNAPMLA_REF_MODE_PRECISE : SNAPMLA_REF_MODE_DEFAULT;
        d.q = p->q;
    }
    return d;
}

/* Attention in double: pieces of the tokens in parallel, then merged. */
static void fp64(const problem *p, const planes *queries, const planes *keys, attention *result)
{
    const int pieces = (p->tokens + PIECE - 1) / PIECE;
    attention *part = (attention *)allocate((size_t)pieces * sizeof *part);
    int failed = 0;
    PARALLEL("omp parallel for schedule(dynamic) reduction(+ : failed)")
    for (int i = 0; i < pieces; i++) {
        const int64_t first = (int64_t)i * PIECE;
        const int32_t n = p->tokens - first < PIECE ? (int32_t)(p->tokens - first) : PIECE;
        snapmla_ref_decode_desc d = ref_desc(p, queries, keys);
        d.seq_lens = &n;
        d.cache.pages = d.block_table_width = (int32_t)pages_of(n);
        if (keys) {
            d.cache.content += first * LATENT;
            d.cache.scale += first;
            d.cache.rope += first * ROPE;
        } else {
            d.key += first * DIM;
        }
        d.out64 = part[i].out;
        d.lse64 = part[i].lse;
        failed += snapmla_ref_decode(&d) != 0;
    }
    require(failed == 0, "snapmla_ref_decode", "refused");

    memset(result, 0, sizeof *result);
    for (int h = 0; h < HEADS; h++) {
        double most = -HUGE_VAL, sum = 0;
        for (int i = 0; i < pieces; i++) most = fmax(most, part[i].lse[h]);
        for (int i = 0; i < pieces; i++) sum += exp(part[i].lse[h] - most);
        for (int i = 0; i < pieces; i++)
            for (int d = 0; d < LATENT; d++)
                result->out[h * LATENT + d] +=
                    exp(part[i].lse[h] - most) / sum * part[i].out[h * LATENT + d];
        result->lse[h] = most + log(sum);
    }
    free(part);
}

/* 0: one split */
static int32_t tokens_of_split(int32_t tokens, int splits)
{
    return splits > 1 ? (tokens / splits + 127) / 128 * 128 : 0;
}

static void from_bf16(attention *a, const uint16_t *out, const float *lse)
{
    for (int i = 0; i < HEADS * LATENT; i++) a->out[i] = (double)snapmla_ref_bf16_to_float(out[i]);
    for (int h = 0; h < HEADS; h++) a->lse[h] = (double)lse[h];
}

/* Decode as on Hopper, rounding by rounding; queries == NULL: in the precise mode. */
static void emulate(const problem *p, const planes *queries, const planes *keys, int splits,
                    int one_accumulator, attention *result)
{
    snapmla_ref_decode_desc d = ref_desc(p, queries, keys);
    uint16_t out[HEADS * LATENT];
    float lse[HEADS];
    d.fidelity = SNAPMLA_REF_EMULATED;
    d.fp8_tensor_core = queries != NULL;
    d.one_accumulator = one_accumulator;
    d.split_tokens = tokens_of_split(p->tokens, splits);
    d.out = out;
    d.lse = lse;
    require(snapmla_ref_decode(&d) == 0, "snapmla_ref_decode", "refused");
    from_bf16(result, out, lse);
}

static error compare(const attention *a, const attention *reference)
{
    error e = {0, 0, 0, 0};
    double squares = 0, norm = 0, signed_sum = 0, magnitude = 0;
    for (int i = 0; i < HEADS * LATENT; i++) {
        const double r = reference->out[i], x = a->out[i] - r;
        squares += x * x;
        norm += r * r;
        signed_sum += r < 0 ? -x : x; /* towards zero is negative */
        magnitude += fabs(r);
    }
    e.rms = sqrt(squares / norm);
    e.bias = signed_sum / magnitude;
    for (int h = 0; h < HEADS; h++) {
        const double x = fabs(a->lse[h] - reference->lse[h]);
        if (!(x <= e.lse)) e.lse = x; /* NaN stays */
        if (!(x / fabs(reference->lse[h]) <= e.lse_of_logit))
            e.lse_of_logit = x / fabs(reference->lse[h]);
    }
    return e;
}

/* ================================================================================================
   decode on the GPU, or in its place the emulation
   ============================================================================================== */
typedef struct decoder {
    const char *name;
    int gpu, path;
} decoder;

typedef struct device_keys {
    void *content, *scale, *rope, *table;
} device_keys;

#if !defined(NO_GPU)
#define LIB(call)                                                                                  \
    do {                                                                                           \
        snapmla_result result_ = (call);                                                           \
        require(result_ == SNAPMLA_OK, #call, snapmla_result_string(result_));                     \
    } while (0)
#define CUDA(call)                                                                                 \
    do {                                                                                           \
        cudaError_t error_ = (call);                                                               \
        require(error_ == cudaSuccess, #call, cudaGetErrorString(error_));                         \
    } while (0)

/* Device memory with a copy of `host`, or full of NaN. */
static void *device(const void *host, size_t bytes)
{
    void *p = NULL;
    CUDA(cudaMalloc(&p, bytes));
    if (host) CUDA(cudaMemcpy(p, host, bytes, cudaMemcpyHostToDevice));
    else CUDA(cudaMemset(p, 0xff, bytes));
    return p;
}

static device_keys to_device(const problem *p, const planes *keys)
{
    const size_t pages = (size_t)pages_of(p->tokens), slots = pages * PAGE;
    device_keys k;
    k.content = device(keys->content, slots * LATENT);
    k.scale = device(keys->scale, slots * sizeof(float));
    k.rope = device(keys->rope, slots * ROPE * 2);
    k.table = device(p->table, pages * sizeof(int32_t));
    return k;
}

static void free_device(const device_keys *k)
{
    CUDA(cudaFree(k->content));
    CUDA(cudaFree(k->scale));
    CUDA(cudaFree(k->rope));
    CUDA(cudaFree(k->table));
}

/* queries == NULL: the precise mode. */
static void decode_gpu(const problem *p, const planes *queries, const device_keys *keys, int path,
                       int splits, attention *result)
{
    uint16_t out[HEADS * LATENT];
    float lse[HEADS];
    snapmla_decode_desc d = {};
    d.step.batch = d.step.s_q = 1;
    d.step.heads = HEADS;
    d.step.path = (snapmla_path)path;
    d.step.mode = queries ? SNAPMLA_MODE_DEFAULT : SNAPMLA_MODE_PRECISE;
    if (splits > 0) {
        d.step.max_seq_len = (p->tokens + 127) / 128 * 128;
        d.step.split_tokens = splits > 1 ? tokens_of_split(p->tokens, splits) : d.step.max_seq_len;
    }
    d.step.seq_lens = (int32_t *)device(&p->tokens, sizeof p->tokens);
    LIB(snapmla_plan_bytes(&d.step, &d.step.plan_bytes));
    d.step.plan = device(NULL, d.step.plan_bytes);
    d.cache.content = keys->content;
    d.cache.scale = (float *)keys->scale;
    d.cache.rope = keys->rope;
    d.cache.pages = pages_of(p->tokens);
    d.block_table_width = (int32_t)d.cache.pages;
    d.block_table = (int32_t *)keys->table;
    d.softmax_scale = p->softmax_scale;
    if (queries) {
        d.q_content = device(queries->content, HEADS * LATENT);
        d.q_scale = (float *)device(queries->scale, sizeof(float) * HEADS);
        d.q_rope = device(queries->rope, HEADS * ROPE * 2);
    } else {
        d.q = device(p->q, HEADS * DIM * 2);
    }
    d.out = device(NULL, sizeof out);
    d.lse = (float *)device(NULL, sizeof lse);
    LIB(snapmla_decode_workspace(&d.step, &d.workspace_bytes));
    d.workspace = device(NULL, d.workspace_bytes);

    LIB(snapmla_plan(&d.step));
    LIB(snapmla_decode(&d));
    CUDA(cudaMemcpy(out, d.out, sizeof out, cudaMemcpyDeviceToHost));
    CUDA(cudaMemcpy(lse, d.lse, sizeof lse, cudaMemcpyDeviceToHost));
    from_bf16(result, out, lse);
    const void *memory[] = {d.step.seq_lens, d.step.plan, d.q,   d.q_content, d.q_scale,
                            d.q_rope,        d.out,       d.lse, d.workspace};
    for (size_t i = 0; i < sizeof memory / sizeof memory[0]; i++)
        CUDA(cudaFree((void *)(uintptr_t)memory[i]));
}

/* The paths of this GPU, the best one first; without a GPU the emulation. */
static int find_decoders(decoder *list, char *device_name, size_t size)
{
    int device = 0, n = 0;
    snapmla_path best = SNAPMLA_PATH_AUTO;
    cudaDeviceProp prop;
    if (cudaGetDevice(&device) != cudaSuccess
        || snapmla_device_supported(device, &best) != SNAPMLA_OK)
        return 0;
    CUDA(cudaGetDeviceProperties(&prop, device));
    snprintf(device_name, size, "%s; CUDA %d.%d; snapmla %d.%d.%d", prop.name, CUDART_VERSION / 1000,
             CUDART_VERSION % 1000 / 10, SNAPMLA_VERSION_MAJOR, SNAPMLA_VERSION_MINOR,
             SNAPMLA_VERSION_PATCH);
    if (best == SNAPMLA_PATH_SM90) {
        const decoder sm90 = {"sm90", 1, SNAPMLA_PATH_SM90};
        list[n++] = sm90;
    }
    const decoder general = {"general", 1, SNAPMLA_PATH_GENERAL};
    list[n++] = general;
    return n;
}
#else
static int find_decoders(decoder *list, char *device_name, size_t size)
{
    (void)list, (void)device_name, (void)size;
    return 0;
}

/* There is no decoder that would call these. */
static device_keys to_device(const problem *p, const planes *keys)
{
    const device_keys none = {NULL, NULL, NULL, NULL};
    (void)p, (void)keys;
    return none;
}

static void free_device(const device_keys *k)
{
    (void)k;
}

static void decode_gpu(const problem *p, const planes *queries, const device_keys *keys, int path,
                       int splits, attention *result)
{
    (void)p, (void)queries, (void)keys, (void)path, (void)splits, (void)result;
}
#endif

/* ================================================================================================
   the report
   ============================================================================================== */
typedef struct options {
    int chosen[DISTRIBUTIONS];
    int32_t to, emulate_to;
    FILE *csv;
    int decoders;
    decoder decoder[2];
} options;

/* One number of the table, where there is one. */
static void cell(int have, double x)
{
    if (have) printf(" %8.1e", x);
    else printf(" %8s", "-");
}

static void csv_row(const options *o, const char *against, const char *what, int kind,
                    int32_t tokens, int splits, error e)
{
    if (o->csv == NULL) return;
    fprintf(o->csv, "%s,%s,%s,%d,%d,%.4e,%.4e,%.4e\n", against, what, kName[kind], (int)tokens,
            splits, e.rms, e.bias, e.lse);
    fflush(o->csv);
}

/* One number with its bias and error of lse. */
static void print_error(error e)
{
    printf(" %8.1e %+8.0e %8.0e |", e.rms, e.bias, e.lse);
}

static int in_bounds(const decoder *by, int precise, error e)
{
    static const bounds rounded = {3.2e-2, 2e-2, 2e-3}, emulated = {3.2e-2, 2e-2, 1e-2};
    static const bounds exact_sums = {3e-3, 2e-3, 1e-4}, hopper = {3e-3, 2e-2, 1e-3};
    const bounds *most = precise ? &exact_sums : by->gpu ? &rounded : &emulated;
    if (precise && strcmp(by->name, "sm90") == 0) most = &hopper;
    return e.rms <= most->rms && (e.lse <= most->lse || e.lse_of_logit <= most->lse_of_logit);
}

enum { OWN, ONE_ACCUMULATOR, PRECISE, WAYS }; /* of emulating */

/* What all rows of one distribution and length are made of. */
typedef struct material {
    int kind;
    problem p;
    planes queries, keys;
    device_keys on_device;                     /* the keys, where decode runs on a GPU */
    attention over_bf16, exact, exact_precise; /* in double */
    error of_format[4];
    attention emulation[2][WAYS]; /* of one split and of MANY */
} material;

static const int kSplits[3] = {1, MANY, 0}; /* 0: as the library likes it */

static int too_short_for(int splits, int32_t tokens)
{
    return splits == MANY && tokens < MANY * 128;
}

/* Without the emulations that no row needs. */
static void prepare(const options *o, int kind, int32_t tokens, int emulated, material *m)
{
    static const format formats[4] = {{0, 0}, {1, 0}, {0, 1}, {1, 1}};
    static const char *const format_name[4] = {"format", "one scale", "fp8 rope", "both"};
    const int on_gpu = o->decoder[0].gpu;
    m->kind = kind;
    m->p = make_problem(kind, tokens);
    fp64(&m->p, NULL, NULL, &m->over_bf16);
    for (int i = 3; i >= 0; i--) { /* the library's own last, which stays */
        m->queries = quantize(m->p.q, HEADS, formats[i]);
        m->keys = quantize(m->p.key, tokens, formats[i]);
        fp64(&m->p, &m->queries, &m->keys, &m->exact);
        m->of_format[i] = compare(&m->exact, &m->over_bf16);
        csv_row(o, "bf16", format_name[i], kind, tokens, 1, m->of_format[i]);
        if (i > 0) {
            free_planes(&m->queries);
            free_planes(&m->keys);
        }
    }
    fp64(&m->p, NULL, &m->keys, &m->exact_precise);
    if (on_gpu) m->on_device = to_device(&m->p, &m->keys);

    /* In one split and in several, snapmla's way where there is no GPU, and in one accumulator. */
    PARALLEL("omp parallel for schedule(dynamic)")
    for (int i = 0; i < 2 * WAYS; i++) {
        const int way = i % WAYS, splits = kSplits[i / WAYS];
        if (too_short_for(splits, tokens)) continue;
        if (way == ONE_ACCUMULATOR ? emulated : !on_gpu)
            emulate(&m->p, way == PRECISE ? NULL : &m->queries, &m->keys, splits,
                    way == ONE_ACCUMULATOR, &m->emulation[i / WAYS][way]);
    }
}

/* What one decoder makes of it in both modes, in kSplits[round]; 1 if within bounds. */
static int report_row(const options *o, const material *m, const decoder *by, int round,
                      const error *single)
{
    static const char *const name[2] = {"", "precise "};
    const int splits = kSplits[round];
    attention got;
    error of_cache[2], all[2]; /* default and precise */
    char count[16] = "auto", what[32];
    int ok = 1;
    for (int precise = 0; precise < 2; precise++) {
        if (by->gpu)
            decode_gpu(&m->p, precise ? NULL : &m->queries, &m->on_device, by->path, splits, &got);
        else
            got = m->emulation[round][precise ? PRECISE : OWN];
        of_cache[precise] = compare(&got, precise ? &m->exact_precise : &m->exact);
        all[precise] = compare(&got, &m->over_bf16);
        ok = in_bounds(by, precise, of_cache[precise]) && ok;
        snprintf(what, sizeof what, "%s%s", name[precise], by->name);
        csv_row(o, precise ? "bf16 q" : "quantised", what, m->kind, m->p.tokens, splits,
                of_cache[precise]);
        csv_row(o, "bf16", what, m->kind, m->p.tokens, splits, all[precise]);
    }
    if (splits > 0) snprintf(count, sizeof count, "%d", splits);
    printf("%-8s %7d %6s %-9s", kName[m->kind], (int)m->p.tokens, count, by->name);
    print_error(of_cache[0]);
    print_error(of_cache[1]);
    cell(single != NULL, single ? single->rms : 0);
    cell(single != NULL, single ? single->bias : 0);
    printf(" |");
    cell(1, all[0].rms);
    for (int k = 0; k < 4; k++) cell(1, m->of_format[k].rms);
    printf("%s\n", ok ? "" : "  OUT OF BOUNDS");
    fflush(stdout);
    return ok;
}

/* All rows of one distribution and length; returns the number of those out of bounds. */
static int report(const options *o, int kind, int32_t tokens)
{
    static material m;
    const int emulated = tokens <= o->emulate_to || !o->decoder[0].gpu;
    int wrong = 0;
    prepare(o, kind, tokens, emulated, &m);
    for (int round = 0; round < 3; round++) {
        const int splits = kSplits[round], have_single = emulated && splits > 0;
        error single;
        if (too_short_for(splits, tokens) || (splits == 0 && !o->decoder[0].gpu)) continue;
        if (have_single) {
            single = compare(&m.emulation[round][ONE_ACCUMULATOR], &m.exact);
            csv_row(o, "quantised", "one accumulator", kind, tokens, splits, single);
        }
        for (int i = 0; i < o->decoders; i++)
            wrong += !report_row(o, &m, &o->decoder[i], round, have_single ? &single : NULL);
    }
    if (o->decoder[0].gpu) free_device(&m.on_device);
    free_planes(&m.queries);
    free_planes(&m.keys);
    free(m.p.q);
    free(m.p.key);
    free(m.p.table);
    return wrong;
}

static void usage(const char *what)
{
    fprintf(stderr, "accuracy: %s: not understood; see the top of examples/accuracy.cu\n", what);
    exit(2);
}

static int32_t parse_length(const char *text)
{
    char *end = NULL;
    double n = text ? (double)strtol(text, &end, 10) : 0;
    if (text && (*end == 'K' || *end == 'k')) n *= 1024, end++;
    else if (text && (*end == 'M' || *end == 'm')) n *= 1048576, end++;
    if (!text || *end != 0 || !(n >= 1 && n <= 1048576)) usage(text ? text : "a length is missing");
    return (int32_t)n;
}

int main(int argc, char **argv)
{
    const decoder emulation = {"emulated", 0, 0};
    char device_name[512] = "no GPU: decode is the emulation of snapmla_ref.h", date[32];
    char command[512] = "";
    const char *csv_name = NULL, *note = "";
    options o;
    time_t now = time(NULL);
    int some = 0, wrong = 0;
    memset(&o, 0, sizeof o);
    o.decoders = find_decoders(o.decoder, device_name, sizeof device_name);
    o.to = o.decoders ? 1048576 : 4096;
    o.emulate_to = 65536;
    for (int i = 0; i < argc; i++) {
        const size_t used = strlen(command);
        snprintf(command + used, sizeof command - used, "%s%s", i ? " " : "", argv[i]);
    }
    for (int i = 1; i < argc; i++) {
        int kind = 0;
        if (strcmp(argv[i], "--to") == 0) o.to = parse_length(argv[++i]);
        else if (strcmp(argv[i], "--emulate-to") == 0) o.emulate_to = parse_length(argv[++i]);
        else if (strcmp(argv[i], "--csv") == 0 && i + 1 < argc) csv_name = argv[++i];
        else if (strcmp(argv[i], "--note") == 0 && i + 1 < argc) note = argv[++i];
        else {
            while (kind < DISTRIBUTIONS && strcmp(argv[i], kName[kind]) != 0) kind++;
            if (kind == DISTRIBUTIONS) usage(argv[i]);
            o.chosen[kind] = some = 1;
        }
    }
    if (o.decoders == 0) o.decoder[o.decoders++] = emulation;
    if (csv_name && (o.csv = fopen(csv_name, "w")) == NULL) usage(csv_name);

    make_normals();
    strftime(date, sizeof date, "%Y-%m-%d", gmtime(&now));
    printf("# %s; %s\n", device_name, date);
    printf("%-8s %7s %6s %-9s %8s %8s %8s | %8s %8s %8s | %8s %8s | %8s %8s %8s %8s %8s\n", "",
           "tokens", "splits", "decode by", "decode", "bias", "lse", "precise", "bias", "lse",
           "one acc", "bias", "all", "format", "1 scale", "rope8", "both");
    if (o.csv)
        fprintf(o.csv, "# %s; %s%s%s; relative rms of %d heads\n# %s\n"
                       "against,what,distribution,tokens,splits,rms,bias,lse\n",
                device_name, note, note[0] ? "; " : "", date, HEADS, command);
    for (int kind = 0; kind < DISTRIBUTIONS; kind++)
        for (size_t i = 0; i < sizeof kLengths / sizeof kLengths[0]; i++)
            if (kLengths[i] <= o.to && (o.chosen[kind] || !some))
                wrong += report(&o, kind, kLengths[i]);
    if (o.csv) fclose(o.csv);
    if (wrong) fprintf(stderr, "accuracy: %d rows out of bounds\n", wrong);
    return wrong ? 1 : 0;
}
