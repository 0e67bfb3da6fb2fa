/* bench.cu - how fast snapmla decodes.  Every case is checked against the CPU reference first, and
   a wrong answer gets no speed.

       nvcc -O3 -std=c++17 -gencode arch=compute_90a,code=sm_90a examples/bench.cu -o bench
       ./bench                                          a headline set, about ten seconds
       ./bench --heads 16,64,128 --kv 4K,16K,128K --batch 32
       ./bench --latency                                small batches, plan, fixed cost: a minute

   Lists make a grid; K and M mean 1024 and 1024 * 1024.
       --heads --s-q --batch --kv --page    lists; defaults 16,64,128; 1; 64; 16K; 64
       --mode --path                        lists of names; defaults `default`; `auto`.
                                            Modes: default, precise (general path only)
       --split-tokens N     cut every request at multiples of N instead of balancing
       --causal 0|1         default: 1 where s_q > 1
       --varlen             lengths from a normal distribution round kv, deviation kv / 2
       --q bf16|planes      queries as BF16, which decode quantises (default), or quantised before
       --iters N            20 to 150 timed launches, default 30
       --latency            one request and small batches instead of the grid, the plan for many
                            batch sizes, and where the fixed cost goes
       --warm               no 200 ms of rest before each measurement
       --pool-gb X          size of the cache pool, default 12
       --seed N             default: from the clock; printed
       --csv [FILE]         CSV to FILE beside the table, or to standard output in its place

   How it measures.  Keys are N(0,1), written by snapmla_append(); queries are N(0,1) and
   softmax_scale is 576^-0.5, so that logits have deviation 1.  A case takes its pages from a pool
   far larger than the L2 cache, in random order, and goes on to the next pages at every launch, so
   that no page is still in L2 when its turn comes again.  Time is the median of event intervals
   round one call, after 6 warm-ups.  A kernel that waits goes first, so that the launches are
   queued before the first of them runs; an empty kernel measured in that way is printed and is not
   subtracted.  The read ceiling is a kernel of 16-byte loads over random 32 KB pieces of the pool,
   in the same run.  Before each measurement the GPU rests for 200 ms, since the power limit would
   lower its clocks in a long run; --warm leaves this out.

   Columns: M = s_q * heads, query rows a request; `decode` and `plan`: microseconds a call (plan
   is once a step, for all layers); TF = 2 * M * 1088 * tokens / time; TB/s of 644 bytes a token;
   `read` = that by the ceiling; `error`: relative rms against the reference over sampled rows of
   a request, the worst of up to four requests.

   Expected output: two lines on the device and the ceiling, then a row a case.
   Exit code: 0 = all right, 1 = a wrong answer or a failed call, 2 = wrong arguments or no GPU. */
#define SNAPMLA_IMPLEMENTATION
#include "../snapmla.cuh"
#define SNAPMLA_REF_IMPLEMENTATION
#include "../snapmla_ref.h"

#include <cuda_bf16.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* ================================================================================================
   constants and types
   ============================================================================================== */
enum { LATENT = 512, ROPE = 64, DIM = LATENT + ROPE };
enum { TOKEN_BYTES = LATENT + 4 + 2 * ROPE }; /* 644, what a cached token costs */
enum { CHUNK = 32768 };                       /* bytes of a piece that the read ceiling reads */
enum { WARM_UPS = 6, MAX_ITERS = 150 };       /* 150: a stream still takes them without waiting */
enum { MAX_LIST = 16, MAX_SHAPES = 4096 };
enum { CHECK_REQUESTS = 4, CHECK_ROWS = 16 }; /* sampled, and query rows of each, at most */
enum { CHECK_TOKENS = 1 << 20 };              /* rows * tokens that a check costs, about 0.5 s */

/* What design and tests allow at logit deviation 1 and values of mean 0: P is rounded to e4m3. */
static const double kMaxError = 3.2e-2, kMaxLseError = 2e-3;
static const double kMaxPreciseError = 3e-3, kMaxPreciseLseError = 1e-3; /* it is not in that mode */

typedef struct name_value {
    const char *name;
    int value;
} name_value;

static const name_value kModes[] = {
    {"default", SNAPMLA_MODE_DEFAULT}, {"precise", SNAPMLA_MODE_PRECISE}, {NULL, 0}};
static const name_value kPaths[] = {
    {"auto", SNAPMLA_PATH_AUTO},
    {"general", SNAPMLA_PATH_GENERAL},
    {"sm90", SNAPMLA_PATH_SM90},
    {NULL, 0},
};

typedef struct int_list {
    int n;
    int v[MAX_LIST];
} int_list;

typedef struct shape {
    int heads, s_q, batch, kv;
} shape;

/* What `./bench` runs: throughput of a large batch, then latency of one request. */
static const shape kHeadline[] = {
    {16, 1, 64, 16384}, {64, 1, 64, 16384}, {128, 1, 64, 16384},
    {16, 1, 1, 4096},   {16, 1, 1, 32768},  {16, 1, 1, 131072},
    {128, 1, 1, 4096},  {128, 1, 1, 32768}, {128, 1, 1, 131072},
};

typedef struct options {
    int cases;
    shape shapes[MAX_SHAPES];
    int_list page, mode, path;
    int split_tokens, causal, varlen, q_planes, iters, rested, latency;
    double pool_gb;
    unsigned long long seed;
    const char *csv_name;
    FILE *table, *csv;
    char command[1024];
} options;

/* All of the cache, shared by all cases; a case sees it in pages of its own size. */
typedef struct pool {
    uint8_t *content;
    float *scale;
    uint16_t *rope;
    int64_t tokens; /* a multiple of 1024, the largest page */
} pool;

/* One case: what the timed calls need, on the device, and its lengths on the host. */
typedef struct run {
    shape size;
    int page, causal, width;
    int64_t tokens;          /* of all requests */
    int64_t need, turn;      /* pages a launch takes, launches so far */
    int32_t *lens, *d_lens;
    int32_t *order;          /* device, [2 * pages]: a random order of all pages, twice in a row */
    uint16_t *q, *out;       /* device */
    snapmla_decode_desc d;
} run;

typedef struct timing {
    double median_us, min_us;
    int queued; /* 0: the CPU was too slow, so that the time holds launch latency */
} timing;

typedef struct accuracy {
    double rms, lse; /* the worst of the sampled requests and rows */
    int rows, bad;   /* bad is counted beside the maxima, where NaN would hide */
    long long not_finite;
    int ok;
} accuracy;

/* ================================================================================================
   helpers
   ============================================================================================== */
static void require(int ok, const char *what, const char *why)
{
    if (!ok) {
        fflush(stdout);
        fprintf(stderr, "bench: %s: %s\n", what, why);
        exit(1);
    }
}

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

static void *host_alloc(size_t bytes)
{
    void *p = malloc(bytes ? bytes : 1);
    require(p != NULL, "malloc", "out of memory");
    return p;
}

/* Device memory full of NaN: a result that is not written shows. */
static void *device_alloc(size_t bytes)
{
    void *p = NULL;
    CUDA(cudaMalloc(&p, bytes ? bytes : 1));
    CUDA(cudaMemset(p, 0xff, bytes ? bytes : 1));
    return p;
}

static uint64_t g_random;

/* The finaliser of the splitmix64 generator: 64 well-mixed bits of any counter. */
static __host__ __device__ uint64_t mix64(uint64_t x)
{
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

static uint64_t random64(void)
{
    return mix64(++g_random);
}

static int random_below(int n)
{
    return (int)(random64() % (uint64_t)n);
}

static double random_normal(void)
{
    double u = ((double)(random64() >> 11) + 1) * 0x1p-53, v = (double)(random64() >> 11) * 0x1p-53;
    return sqrt(-2 * log(u)) * cos(6.283185307179586 * v);
}

static const char *name_of(const name_value *names, int value)
{
    for (; names->name != NULL; names++)
        if (names->value == value) return names->name;
    return "?";
}

/* ================================================================================================
   kernels
   ============================================================================================== */

/* BF16 numbers, N(0,1), n of them (even), a function of the seed and the index alone. */
static __global__ void bench_fill_normal(__nv_bfloat162 *x, size_t n, uint64_t seed)
{
    size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
    if (2 * i >= n) return;
    uint64_t bits = mix64(seed + i);
    float u = ((float)(uint32_t)bits + 1.0f) * 0x1p-32f; /* (0, 1] */
    float v = (float)(uint32_t)(bits >> 32) * 0x1p-32f;
    float radius = sqrtf(-2.0f * logf(u)), s, c;
    sincospif(2.0f * v, &s, &c);
    x[i] = __floats2bfloat162_rn(radius * c, radius * s);
}

static __global__ void bench_count_up(int64_t *x, int64_t first, int64_t n)
{
    int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
    if (i < n) x[i] = first + i;
}

/* Where i goes in a random order of 0 .. n-1: four Feistel rounds permute the smallest range of an
   even number of bits that holds n, and the walk goes on until it is back below n. */
static __device__ uint32_t permute(uint32_t i, uint32_t n, uint32_t key)
{
    uint32_t half = 1;
    while ((1ull << (2 * half)) < n) half++;
    const uint32_t mask = (1u << half) - 1;
    do {
        uint32_t left = i >> half, right = i & mask;
        for (uint32_t round = 0; round < 4; round++) {
            uint32_t h = (right ^ key) + round * 0x9e3779b9u;
            h = (h ^ (h >> 16)) * 0x85ebca6bu;
            h = (h ^ (h >> 13)) * 0xc2b2ae35u;
            h ^= h >> 16;
            uint32_t next = left ^ (h & mask);
            left = right;
            right = next;
        }
        i = left << half | right;
    } while (i >= n);
    return i;
}

static __global__ void bench_page_order(int32_t *order, uint32_t pages, uint32_t key)
{
    uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < pages) order[i] = order[pages + i] = (int32_t)permute(i, pages, key);
}

/* Holds the stream, so that what follows is queued behind it. */
static __global__ void bench_wait(uint64_t ns)
{
    uint64_t start, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    do {
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (now - start < ns);
}

static __global__ void bench_empty(void)
{
}

/* One chunk a block, 16 bytes a load, 8 loads in flight a thread. */
static __global__ void __launch_bounds__(256)
    bench_read(const uint4 *data, uint32_t chunks, uint32_t first, uint32_t key, uint32_t *sink)
{
    const uint32_t i = (first + blockIdx.x) % chunks;
    const uint4 *p = data + (size_t)permute(i, chunks, key) * (CHUNK / 16) + threadIdx.x;
    uint4 v[CHUNK / 16 / 256];
    uint32_t x = 0;
#pragma unroll
    for (int k = 0; k < CHUNK / 16 / 256; k++) v[k] = __ldcs(p + k * 256);
#pragma unroll
    for (int k = 0; k < CHUNK / 16 / 256; k++) x ^= v[k].x ^ v[k].y ^ v[k].z ^ v[k].w;
    if (x == 0x5eed5eed) *sink = x; /* keeps the loads */
}

/* The first n tokens of a request, one warp a token, into dense planes for the reference. */
static __global__ void bench_gather(pool from, const int32_t *pages, int page, int n,
                                    uint8_t *content, float *scale, uint16_t *rope)
{
    const int lane = threadIdx.x % 32, t = (int)((blockIdx.x * blockDim.x + threadIdx.x) / 32);
    if (t >= n) return;
    const int64_t slot = (int64_t)pages[t / page] * page + t % page;
    ((uint4 *)content)[(int64_t)t * (LATENT / 16) + lane] =
        ((const uint4 *)from.content)[slot * (LATENT / 16) + lane];
    ((uint32_t *)rope)[(int64_t)t * (ROPE / 2) + lane] =
        ((const uint32_t *)from.rope)[slot * (ROPE / 2) + lane];
    if (lane == 0) scale[t] = from.scale[slot];
}

static __global__ void bench_count_not_finite(const uint16_t *out, size_t n, const float *lse,
                                              size_t rows, unsigned long long *count)
{
    const size_t stride = gridDim.x * (size_t)blockDim.x;
    const size_t first = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
    unsigned long long bad = 0;
    for (size_t i = first; i < n; i += stride) bad += (out[i] & 0x7f80) == 0x7f80;
    for (size_t i = first; i < rows; i += stride) bad += !isfinite(lse[i]);
    if (bad) atomicAdd(count, bad);
}

/* ================================================================================================
   measuring
   ============================================================================================== */
typedef void (*work)(void *context); /* queues one call on the default stream */

static int by_value(const void *a, const void *b)
{
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

static timing measure(work call, void *context, const options *o)
{
    static cudaEvent_t start[MAX_ITERS], end[MAX_ITERS], released;
    if (released == NULL) {
        CUDA(cudaEventCreate(&released));
        for (int i = 0; i < MAX_ITERS; i++) {
            CUDA(cudaEventCreate(&start[i]));
            CUDA(cudaEventCreate(&end[i]));
        }
    }

    timing t = {};
    uint64_t wait_ns = 1000000 + 50000 * (uint64_t)(WARM_UPS + o->iters);
    for (int attempt = 0; attempt < 4 && !t.queued; attempt++, wait_ns *= 4) {
        CUDA(cudaDeviceSynchronize());
        if (o->rested) {
            struct timespec rest = {0, 200000000};
            nanosleep(&rest, NULL);
        }
        bench_wait<<<1, 1>>>(wait_ns);
        CUDA(cudaEventRecord(released));
        for (int i = 0; i < WARM_UPS; i++) call(context);
        for (int i = 0; i < o->iters; i++) {
            CUDA(cudaEventRecord(start[i]));
            call(context);
            CUDA(cudaEventRecord(end[i]));
        }
        t.queued = cudaEventQuery(released) == cudaErrorNotReady;
        (void)cudaGetLastError(); /* "not ready" is the wanted answer and no error */
        CUDA(cudaDeviceSynchronize());
    }

    float us[MAX_ITERS];
    for (int i = 0; i < o->iters; i++) {
        CUDA(cudaEventElapsedTime(&us[i], start[i], end[i]));
        us[i] *= 1000;
    }
    qsort(us, (size_t)o->iters, sizeof us[0], by_value);
    t.min_us = us[0];
    t.median_us = (us[(o->iters - 1) / 2] + us[o->iters / 2]) / 2;
    return t;
}

static void call_empty(void *context)
{
    (void)context;
    bench_empty<<<1, 1>>>();
    CUDA(cudaGetLastError());
}

typedef struct read_work {
    const uint4 *data;
    uint32_t chunks, count, first, key;
    uint32_t *sink;
} read_work;

static void call_read(void *context)
{
    read_work *r = (read_work *)context;
    bench_read<<<r->count, 256>>>(r->data, r->chunks, r->first, r->key, r->sink);
    CUDA(cudaGetLastError());
    r->first = (uint32_t)(((uint64_t)r->first + r->count) % r->chunks);
}

static void call_plan(void *context)
{
    LIB(snapmla_plan(&((run *)context)->d.step));
}

/* Decode with the next pages of the order. */
static void call_decode(void *context)
{
    run *r = (run *)context;
    snapmla_decode_desc d = r->d;
    d.block_table = r->order + r->turn++ * r->need % (d.cache.pages);
    LIB(snapmla_decode(&d));
}

/* Bytes per second of reading more than 4 GB, or the whole content plane of a small pool. */
static double read_ceiling(const pool *p, const options *o)
{
    read_work r = {};
    r.data = (const uint4 *)p->content;
    r.chunks = (uint32_t)(p->tokens * LATENT / CHUNK);
    r.count = r.chunks < (1u << 17) ? r.chunks : 1u << 17; /* 2^17 pieces are 4.3 GB */
    r.key = (uint32_t)random64();
    r.sink = (uint32_t *)device_alloc(sizeof(uint32_t));
    timing t = measure(call_read, &r, o);
    CUDA(cudaFree(r.sink));
    return (double)r.count * CHUNK / (t.median_us * 1e-6);
}

/* ================================================================================================
   the pool: random keys, quantised and written by the library
   ============================================================================================== */
static pool make_pool(const options *o)
{
    const int64_t at_a_time = 1 << 17;
    size_t available = 0, total = 0;
    int device = 0, l2 = 0;
    CUDA(cudaMemGetInfo(&available, &total));
    CUDA(cudaGetDevice(&device));
    CUDA(cudaDeviceGetAttribute(&l2, cudaDevAttrL2CacheSize, device));
    double bytes = fmin(o->pool_gb * 1e9, 0.6 * (double)available);
    require(bytes >= 4.0 * l2, "pool", "below four times the L2 cache, times would be too good");

    pool p = {};
    p.tokens = (int64_t)(bytes / TOKEN_BYTES) / 1024 * 1024;
    CUDA(cudaMalloc(&p.content, (size_t)p.tokens * LATENT));
    CUDA(cudaMalloc(&p.scale, (size_t)p.tokens * sizeof(float)));
    CUDA(cudaMalloc(&p.rope, (size_t)p.tokens * ROPE * 2));

    void *keys = device_alloc((size_t)at_a_time * DIM * 2);
    int64_t *slots = (int64_t *)device_alloc((size_t)at_a_time * sizeof(int64_t));
    snapmla_append_desc a = {};
    a.cache.content = p.content;
    a.cache.scale = p.scale;
    a.cache.rope = p.rope;
    a.cache.pages = p.tokens / 64;
    a.latent = keys;
    a.slots = slots;
    for (int64_t first = 0; first < p.tokens; first += at_a_time) {
        a.tokens = p.tokens - first < at_a_time ? p.tokens - first : at_a_time;
        size_t n = (size_t)a.tokens * DIM;
        bench_fill_normal<<<(unsigned)(n / 512), 256>>>((__nv_bfloat162 *)keys, n, random64());
        bench_count_up<<<(unsigned)(at_a_time / 256), 256>>>(slots, first, a.tokens);
        CUDA(cudaGetLastError());
        LIB(snapmla_append(&a));
    }
    CUDA(cudaDeviceSynchronize());
    CUDA(cudaFree(keys));
    CUDA(cudaFree(slots));
    return p;
}

/* ================================================================================================
   one case: make it ready, check it, take it down
   ============================================================================================== */
static int32_t random_length(const shape *s)
{
    double len = s->kv + 0.5 * s->kv * random_normal();
    return (int32_t)fmax(s->s_q, fmin(len, 2.0 * s->kv));
}

/* Queries quantised once, before anything is timed. */
static void quantize_q(snapmla_decode_desc *d, const shape *s, const uint16_t *q)
{
    const size_t rows = (size_t)s->batch * s->s_q * s->heads;
    snapmla_quantize_q_desc z = {};
    z.tokens = (int64_t)s->batch * s->s_q;
    z.heads = s->heads;
    z.q = q;
    d->q_content = z.q_content = device_alloc(rows * LATENT);
    d->q_scale = z.q_scale = (float *)device_alloc(rows * sizeof(float));
    d->q_rope = z.q_rope = device_alloc(rows * ROPE * 2);
    LIB(snapmla_quantize_q(&z));
}

static run start_run(const options *o, const pool *p, const shape *s, int page, int mode, int path)
{
    run r = {};
    r.size = *s;
    r.page = page;
    r.causal = o->causal < 0 ? s->s_q > 1 : o->causal;

    int max_len = 0;
    r.lens = (int32_t *)host_alloc((size_t)s->batch * sizeof(int32_t));
    for (int b = 0; b < s->batch; b++) {
        r.lens[b] = o->varlen ? random_length(s) : s->kv;
        r.tokens += r.lens[b];
        if (r.lens[b] > max_len) max_len = r.lens[b];
    }
    r.width = (max_len + page - 1) / page;
    r.need = (int64_t)s->batch * r.width;
    const int64_t pages = p->tokens / page;
    require(r.need <= pages, "pool", "too small for this batch and kv; raise --pool-gb");

    r.d_lens = (int32_t *)device_alloc((size_t)s->batch * sizeof(int32_t));
    CUDA(cudaMemcpy(r.d_lens, r.lens, (size_t)s->batch * sizeof(int32_t), cudaMemcpyHostToDevice));
    CUDA(cudaMalloc(&r.order, (size_t)(2 * pages) * sizeof(int32_t)));
    bench_page_order<<<(unsigned)((pages + 255) / 256), 256>>>(r.order, (uint32_t)pages,
                                                               (uint32_t)random64());
    const size_t rows = (size_t)s->batch * s->s_q * s->heads, n = rows * DIM;
    r.q = (uint16_t *)device_alloc(n * 2);
    bench_fill_normal<<<(unsigned)((n / 2 + 255) / 256), 256>>>((__nv_bfloat162 *)r.q, n,
                                                                random64());
    CUDA(cudaGetLastError());

    snapmla_step *step = &r.d.step;
    step->batch = s->batch;
    step->s_q = s->s_q;
    step->heads = s->heads;
    step->page_size = page;
    step->split_tokens = o->split_tokens;
    step->max_seq_len = o->split_tokens ? max_len : 0;
    step->mode = (snapmla_mode)mode;
    step->path = (snapmla_path)path;
    step->seq_lens = r.d_lens;
    LIB(snapmla_plan_bytes(step, &step->plan_bytes));
    step->plan = device_alloc(step->plan_bytes);

    snapmla_decode_desc *d = &r.d;
    d->cache.content = p->content;
    d->cache.scale = p->scale;
    d->cache.rope = p->rope;
    d->cache.pages = pages;
    d->cache.page_size = page;
    d->block_table = r.order;
    d->block_table_width = r.width;
    d->causal = r.causal;
    d->softmax_scale = 1 / sqrtf(DIM);
    if (o->q_planes)
        quantize_q(d, s, r.q);
    else
        d->q = r.q;
    d->out = r.out = (uint16_t *)device_alloc(rows * LATENT * 2);
    d->lse = (float *)device_alloc(rows * sizeof(float));
    LIB(snapmla_decode_workspace(step, &d->workspace_bytes));
    d->workspace = device_alloc(d->workspace_bytes);
    return r;
}

static void end_run(run *r)
{
    void *memory[] = {r->d_lens,
                      r->order,
                      r->q,
                      r->out,
                      r->d.lse,
                      r->d.step.plan,
                      r->d.workspace,
                      (void *)(uintptr_t)r->d.q_content,
                      (void *)(uintptr_t)r->d.q_scale,
                      (void *)(uintptr_t)r->d.q_rope};
    for (size_t i = 0; i < sizeof memory / sizeof memory[0]; i++) CUDA(cudaFree(memory[i]));
    free(r->lens);
}

static size_t rows_of(const run *r)
{
    return (size_t)r->size.batch * r->size.s_q * r->size.heads;
}

/* Every result is NaN until a kernel writes it. */
static void poison_results(run *r)
{
    CUDA(cudaMemset(r->out, 0xff, rows_of(r) * LATENT * 2));
    CUDA(cudaMemset(r->d.lse, 0xff, rows_of(r) * sizeof(float)));
}

static long long count_not_finite(const run *r)
{
    unsigned long long count = 0, *d_count = (unsigned long long *)device_alloc(sizeof count);
    CUDA(cudaMemset(d_count, 0, sizeof count));
    bench_count_not_finite<<<1024, 256>>>(r->out, rows_of(r) * LATENT, r->d.lse, rows_of(r),
                                          d_count);
    CUDA(cudaGetLastError());
    CUDA(cudaMemcpy(&count, d_count, sizeof count, cudaMemcpyDeviceToHost));
    CUDA(cudaFree(d_count));
    return (long long)count;
}

/* ================================================================================================
   the check
   ============================================================================================== */
/* Some heads of query token i of request b, whose pages the order holds from `first_page` on,
   against the reference in double. */
static void check_rows(const run *r, const pool *p, int64_t first_page, int b, int i, int heads,
                       accuracy *a)
{
    const shape *s = &r->size;
    const int n = r->causal ? r->lens[b] - s->s_q + 1 + i : r->lens[b];
    const int pages = (n + 63) / 64;
    const int stride = s->heads / heads, first_head = random_below(s->heads);
    const size_t slots = (size_t)pages * 64;

    /* The request's tokens, gathered by their page table into a small dense cache. */
    pool d = {}, h = {};
    d.content = (uint8_t *)device_alloc(slots * LATENT);
    d.scale = (float *)device_alloc(slots * sizeof(float));
    d.rope = (uint16_t *)device_alloc(slots * ROPE * 2);
    h.content = (uint8_t *)host_alloc(slots * LATENT);
    h.scale = (float *)host_alloc(slots * sizeof(float));
    h.rope = (uint16_t *)host_alloc(slots * ROPE * 2);
    const int32_t *row = r->order + first_page + (int64_t)b * r->width;
    bench_gather<<<(unsigned)((n + 7) / 8), 256>>>(*p, row, r->page, n, d.content, d.scale, d.rope);
    CUDA(cudaGetLastError());
    CUDA(cudaMemcpy(h.content, d.content, slots * LATENT, cudaMemcpyDeviceToHost));
    CUDA(cudaMemcpy(h.scale, d.scale, slots * sizeof(float), cudaMemcpyDeviceToHost));
    CUDA(cudaMemcpy(h.rope, d.rope, slots * ROPE * 2, cudaMemcpyDeviceToHost));

    uint16_t *q = (uint16_t *)host_alloc((size_t)heads * DIM * 2);
    uint16_t *out = (uint16_t *)host_alloc((size_t)heads * LATENT * 2);
    double *ref_out = (double *)host_alloc((size_t)heads * LATENT * sizeof(double));
    float *lse = (float *)host_alloc((size_t)heads * sizeof(float));
    double *ref_lse = (double *)host_alloc((size_t)heads * sizeof(double));
    int32_t *table = (int32_t *)host_alloc((size_t)pages * sizeof(int32_t));
    for (int k = 0; k < pages; k++) table[k] = k;
    for (int k = 0; k < heads; k++) {
        const int head = (first_head + k * stride) % s->heads;
        const size_t at = ((size_t)b * s->s_q + i) * s->heads + head;
        const uint16_t *q_row = r->q + at * DIM, *out_row = r->out + at * LATENT;
        CUDA(cudaMemcpy(q + k * DIM, q_row, DIM * 2, cudaMemcpyDeviceToHost));
        CUDA(cudaMemcpy(out + k * LATENT, out_row, LATENT * 2, cudaMemcpyDeviceToHost));
        CUDA(cudaMemcpy(lse + k, r->d.lse + at, sizeof(float), cudaMemcpyDeviceToHost));
    }

    snapmla_ref_decode_desc ref = {};
    const int precise = r->d.step.mode == SNAPMLA_MODE_PRECISE;
    ref.fidelity = SNAPMLA_REF_EXACT;
    /* queries that were quantised before are the truth themselves */
    ref.mode = precise && r->d.q != NULL ? SNAPMLA_REF_MODE_PRECISE : SNAPMLA_REF_MODE_DEFAULT;
    ref.batch = 1;
    ref.s_q = 1;
    ref.heads = heads;
    ref.seq_lens = &n;
    ref.cache.content = h.content;
    ref.cache.scale = h.scale;
    ref.cache.rope = h.rope;
    ref.cache.pages = pages;
    ref.block_table = table;
    ref.block_table_width = pages;
    ref.softmax_scale = r->d.softmax_scale;
    ref.q = q;
    ref.out64 = ref_out;
    ref.lse64 = ref_lse;
    require(snapmla_ref_decode(&ref) == 0, "snapmla_ref_decode", "refused");

    double error = 0, norm = 0;
    for (int k = 0; k < heads * LATENT; k++) {
        double e = snapmla_ref_bf16_to_float(out[k]) - ref_out[k];
        error += e * e;
        norm += ref_out[k] * ref_out[k];
    }
    const double rms = sqrt(error / norm);
    a->bad += !(rms <= (precise ? kMaxPreciseError : kMaxError));
    a->rms = fmax(a->rms, rms);
    for (int k = 0; k < heads; k++) {
        double e = fabs(lse[k] - ref_lse[k]);
        a->bad += !(e <= (precise ? kMaxPreciseLseError : kMaxLseError));
        a->lse = fmax(a->lse, e);
    }
    a->rows += heads;

    free(table), free(ref_lse), free(lse), free(ref_out), free(out), free(q);
    free(h.rope), free(h.scale), free(h.content);
    CUDA(cudaFree(d.rope));
    CUDA(cudaFree(d.scale));
    CUDA(cudaFree(d.content));
}

/* Decode once and compare some rows of the last request and of random ones; every other row must
   at least have been written with finite numbers. */
static accuracy check_run(run *r, const pool *p)
{
    const shape *s = &r->size;
    const int64_t first_page = r->turn * r->need % r->d.cache.pages;
    const int requests = s->batch < CHECK_REQUESTS ? s->batch : CHECK_REQUESTS;
    accuracy a = {};

    poison_results(r);
    call_plan(r);
    call_decode(r);
    CUDA(cudaDeviceSynchronize());
    for (int k = 0; k < requests; k++) {
        const int b = k == 0 ? s->batch - 1 : random_below(s->batch);
        int heads = CHECK_TOKENS / requests / r->lens[b];
        heads = heads > CHECK_ROWS ? CHECK_ROWS : heads;
        heads = heads > s->heads ? s->heads : heads < 1 ? 1 : heads;
        check_rows(r, p, first_page, b, random_below(s->s_q), heads, &a);
    }

    a.not_finite = count_not_finite(r);
    a.ok = a.rows > 0 && a.bad == 0 && a.not_finite == 0;
    return a;
}

/* ================================================================================================
   report
   ============================================================================================== */

/* Release of the kernel driver, where the system tells; else an empty string. */
static void driver_release(char *text, size_t size)
{
    char line[256] = "", word[64] = "";
    FILE *f = fopen("/proc/driver/nvidia/version", "r");
    text[0] = 0;
    if (f == NULL) return;
    if (fgets(line, sizeof line, f) != NULL) {
        for (const char *c = line; sscanf(c, "%63s", word) == 1; c = strstr(c, word) + strlen(word))
            if (strspn(word, "0123456789.") == strlen(word)) {
                snprintf(text, size, " (%s)", word);
                break;
            }
    }
    fclose(f);
}

/* The device and how it is measured: two lines on the table, comments in the CSV. */
static void report_header(const options *o, const pool *p, double ceiling, double empty_us)
{
    int device = 0, sms = 0, l2 = 0, clock = 0, memory_clock = 0, driver = 0, runtime = 0;
    char release[80], date[32];
    cudaDeviceProp prop;
    time_t now = time(NULL);
    CUDA(cudaGetDevice(&device));
    CUDA(cudaGetDeviceProperties(&prop, device));
    CUDA(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device));
    CUDA(cudaDeviceGetAttribute(&l2, cudaDevAttrL2CacheSize, device));
    CUDA(cudaDeviceGetAttribute(&clock, cudaDevAttrClockRate, device));
    CUDA(cudaDeviceGetAttribute(&memory_clock, cudaDevAttrMemoryClockRate, device));
    CUDA(cudaDriverGetVersion(&driver));
    CUDA(cudaRuntimeGetVersion(&runtime));
    driver_release(release, sizeof release);
    strftime(date, sizeof date, "%Y-%m-%d", gmtime(&now));

    FILE *files[] = {o->table, o->csv};
    for (int i = 0; i < 2; i++) {
        if (files[i] == NULL) continue;
        fprintf(files[i],
                "# %s, %d SMs, L2 %d MB, up to %d MHz, memory %d MHz; CUDA %d.%d, driver for "
                "%d.%d%s; snapmla %d.%d.%d; %s; %s\n",
                prop.name, sms, l2 >> 20, clock / 1000, memory_clock / 1000, runtime / 1000,
                runtime % 1000 / 10, driver / 1000, driver % 1000 / 10, release,
                SNAPMLA_VERSION_MAJOR, SNAPMLA_VERSION_MINOR, SNAPMLA_VERSION_PATCH, date,
                o->command);
        fprintf(files[i],
                "# read ceiling %.0f GB/s, empty kernel %.1f us; %s, median of %d, q %s, pool "
                "%.1f GB, seed %llu\n",
                ceiling * 1e-9, empty_us, o->rested ? "rested" : "warm", o->iters,
                o->q_planes ? "planes" : "bf16", (double)p->tokens * TOKEN_BYTES * 1e-9, o->seed);
    }
    if (o->table != NULL)
        fprintf(o->table, "%5s %3s %5s %5s %7s %4s %-8s %-8s %9s %6s %6s %6s %5s  %s\n", "heads",
                "s_q", "M", "batch", "kv", "page", "path", "mode", "decode us", "plan", "TF",
                "TB/s", "read", "error");
    if (o->csv != NULL)
        fprintf(o->csv, "heads,s_q,m,batch,kv,tokens,page,path,mode,causal,split_tokens,"
                        "decode_us,decode_min_us,plan_us,tflops,tb_per_s,read_share,rms,lse_error,"
                        "rows_checked\n");
}

static void report_run(const options *o, const run *r, const accuracy *a, const timing *decode,
                       const timing *plan, double ceiling)
{
    const shape *s = &r->size;
    snapmla_decode_desc resolved;
    LIB(snapmla_resolve(&r->d, &resolved));
    const char *path = name_of(kPaths, resolved.step.path), *mode = name_of(kModes, r->d.step.mode);
    const double seconds = decode->median_us * 1e-6, m = (double)s->s_q * s->heads;
    const double tf = 2 * m * (2 * LATENT + ROPE) * (double)r->tokens / seconds * 1e-12;
    const double bytes_per_s = (double)r->tokens * TOKEN_BYTES / seconds;

    if (o->table != NULL) {
        fprintf(o->table, "%5d %3d %5.0f %5d %7d %4d %-8s %-8s ", s->heads, s->s_q, m, s->batch,
                s->kv, r->page, path, mode);
        if (a->ok)
            fprintf(o->table, "%9.1f %6.1f %6.0f %6.3f %4.0f%%  %.1e%s\n", decode->median_us,
                    plan->median_us, tf, bytes_per_s * 1e-12, 100 * bytes_per_s / ceiling, a->rms,
                    decode->queued && plan->queued ? "" : "  (launches did not queue)");
        else
            fprintf(o->table,
                    "WRONG: rms %.2e (limit %.1e), lse %.2e (%.1e), %lld numbers not finite\n",
                    a->rms, kMaxError, a->lse, kMaxLseError, a->not_finite);
        fflush(o->table);
    }
    if (o->csv != NULL && a->ok) {
        fprintf(o->csv,
                "%d,%d,%.0f,%d,%d,%lld,%d,%s,%s,%d,%d,%.3f,%.3f,%.3f,%.2f,%.4f,%.4f,%.3e,%.3e,%d\n",
                s->heads, s->s_q, m, s->batch, s->kv, (long long)r->tokens, r->page, path, mode,
                r->causal, o->split_tokens, decode->median_us, decode->min_us, plan->median_us, tf,
                bytes_per_s * 1e-12, bytes_per_s / ceiling, a->rms, a->lse, a->rows);
        fflush(o->csv);
    }
}

/* 1 when the answer was right. */
static int bench_case(const options *o, const pool *p, const shape *s, int page, int mode, int path,
                      double ceiling)
{
    run r = start_run(o, p, s, page, mode, path);
    timing decode = {}, plan = {};
    accuracy a = check_run(&r, p);
    if (a.ok) {
        plan = measure(call_plan, &r, o);
        poison_results(&r);
        decode = measure(call_decode, &r, o);
        a.not_finite = count_not_finite(&r); /* the launches that were timed did work, too */
        a.ok = a.not_finite == 0;
    }
    report_run(o, &r, &a, &decode, &plan, ceiling);
    end_run(&r);
    return a.ok;
}

/* ================================================================================================
   --latency: one request and small batches; `b2b` is the time a call takes in a row of them, without
   events between, `plan` once a step
   ============================================================================================== */
typedef struct latency_case {
    int heads, batch, kv;
    double first, second; /* microseconds to hold it against: see the head of each table */
} latency_case;

/* From one event to the other over a row of calls, by their number. */
static double measure_row(work call, void *context, const options *o)
{
    enum { CALLS = 200 };
    static cudaEvent_t start, end;
    float ms = 0;
    if (start == NULL) {
        CUDA(cudaEventCreate(&start));
        CUDA(cudaEventCreate(&end));
    }
    CUDA(cudaDeviceSynchronize());
    if (o->rested) {
        struct timespec rest = {0, 200000000};
        nanosleep(&rest, NULL);
    }
    bench_wait<<<1, 1>>>(1000000 + 20000 * (uint64_t)CALLS);
    for (int i = 0; i < WARM_UPS; i++) call(context);
    CUDA(cudaEventRecord(start));
    for (int i = 0; i < CALLS; i++) call(context);
    CUDA(cudaEventRecord(end));
    CUDA(cudaDeviceSynchronize());
    CUDA(cudaEventElapsedTime(&ms, start, end));
    return ms * 1000 / CALLS;
}

/* max_seq_len = 0: not told to the library.  1 when the answer was right. */
static int latency_row(const options *o, const pool *p, const latency_case *c, int max_seq_len,
                       const char *remark)
{
    const shape s = {c->heads, 1, c->batch, c->kv};
    run r = start_run(o, p, &s, 64, SNAPMLA_MODE_DEFAULT, o->path.v[0]);
    if (max_seq_len > 0) r.d.step.max_seq_len = max_seq_len;
    accuracy a = check_run(&r, p);
    printf("%6d %6d %7d ", c->heads, c->batch, c->kv);
    if (a.ok) {
        const timing plan = measure(call_plan, &r, o), decode = measure(call_decode, &r, o);
        const double row = measure_row(call_decode, &r, o);
        printf("%9.2f %9.2f %9.2f %9.2f ", decode.median_us, decode.min_us, row, plan.median_us);
        if (c->first > 0) printf("%8.1f ", c->first);
        if (c->second > 0) printf("%8.1f ", c->second);
        printf(" %s%s\n", remark, decode.queued && plan.queued ? "" : " (launches did not queue)");
    } else {
        printf("WRONG: rms %.2e, lse %.2e, %lld numbers not finite\n", a.rms, a.lse, a.not_finite);
    }
    fflush(stdout);
    end_run(&r);
    return a.ok;
}

static void plan_row(const options *o, int batch, int heads)
{
    snapmla_step step = {};
    run r = {};
    double us[2];
    int32_t *lens = (int32_t *)host_alloc((size_t)batch * sizeof(int32_t));
    step.batch = batch;
    step.s_q = 1;
    step.heads = heads;
    step.path = (snapmla_path)o->path.v[0];
    LIB(snapmla_plan_bytes(&step, &step.plan_bytes));
    step.plan = device_alloc(step.plan_bytes);
    r.d_lens = (int32_t *)device_alloc((size_t)batch * sizeof(int32_t));
    step.seq_lens = r.d_lens;
    r.d.step = step;
    for (int mixed = 0; mixed < 2; mixed++) {
        for (int b = 0; b < batch; b++) lens[b] = mixed ? 1 + random_below(1 << (b % 18)) : 4096;
        CUDA(cudaMemcpy(r.d_lens, lens, (size_t)batch * sizeof(int32_t), cudaMemcpyHostToDevice));
        us[mixed] = measure(call_plan, &r, o).median_us;
    }
    printf("%6d %6d %9.2f %9.2f\n", heads, batch, us[0], us[1]);
    fflush(stdout);
    CUDA(cudaFree(r.d_lens));
    CUDA(cudaFree(step.plan));
    free(lens);
}

/* Returns the number of wrong answers. */
static int bench_latency(const options *o, const pool *p, double empty_us)
{
    static const latency_case targets[] = {
        {16, 1, 4096, 9, 0},   {16, 1, 32768, 13, 0},  {16, 1, 131072, 30, 0},
        {64, 1, 4096, 9, 0},   {64, 1, 32768, 14, 0},  {64, 1, 131072, 32, 0},
        {128, 1, 4096, 10, 0}, {128, 1, 32768, 17, 0}, {128, 1, 131072, 42, 0},
        {16, 4, 4096, 10, 0}};
    static const latency_case matrix[] = {
        {128, 1, 640, 13.9, 23.4},  {128, 2, 640, 0, 0},         {128, 4, 640, 0, 0},
        {128, 8, 640, 0, 0},        {128, 16, 640, 22.1, 27.1},  {128, 32, 640, 0, 0},
        {128, 64, 640, 34.5, 31.8}, {128, 128, 640, 65.3, 56.5}, {64, 1, 8192, 27.8, 37.9},
        {64, 2, 8192, 0, 0},        {64, 4, 8192, 31.1, 41.5},   {64, 8, 8192, 50.8, 45.3},
        {64, 16, 8192, 79.1, 57.5}, {64, 32, 8192, 129.3, 86.9}, {64, 64, 8192, 0, 0},
        {64, 128, 8192, 0, 0},      {64, 1, 33280, 0, 0},        {64, 2, 33280, 0, 0},
        {64, 4, 33280, 0, 0},       {64, 8, 33280, 0, 0},        {64, 16, 33280, 0, 0},
        {64, 32, 33280, 0, 0},      {64, 64, 33280, 0, 0},       {64, 128, 33280, 0, 0}};
    static const char *head = " heads  batch      kv    decode       min       b2b      plan";
    const latency_case block = {16, 1, 64, 0, 0}, wide = {128, 1, 64, 0, 0};
    int wrong = 0;

    printf("# microseconds; an empty kernel reads %.2f, %.2f in a row\n", empty_us,
           measure_row(call_empty, NULL, o));
    printf("# where the fixed cost goes: one block of tokens\n%s\n", head);
    wrong += !latency_row(o, p, &block, 64, "max_seq_len 64: no combine is launched");
    wrong += !latency_row(o, p, &block, 0, "the combine finds nothing to do");
    wrong += !latency_row(o, p, &wide, 64, "max_seq_len 64: no combine is launched");
    wrong += !latency_row(o, p, &wide, 0, "the combine finds nothing to do");
    printf("# one request, and four; last column: the target\n%s\n", head);
    for (int i = 0; i < (int)(sizeof targets / sizeof targets[0]); i++)
        wrong += !latency_row(o, p, &targets[i], 0, "");
    printf("# small to middling batches; last columns: BF16 and SnapMLA kernels on an H800, where "
           "known\n%s\n", head);
    for (int i = 0; i < (int)(sizeof matrix / sizeof matrix[0]); i++)
        wrong += !latency_row(o, p, &matrix[i], 0, "");
    printf("# snapmla_plan: all requests of 4096 tokens, and of mixed lengths up to 128K\n"
           " heads  batch      same     mixed\n");
    for (int batch = 1; batch <= 4096; batch *= 2) plan_row(o, batch, 16);
    for (int batch = 1; batch <= 4096; batch *= 8) plan_row(o, batch, 128);
    return wrong;
}

/* ================================================================================================
   arguments
   ============================================================================================== */
static void usage(const char *flag, const char *why)
{
    fprintf(stderr, "bench: %s: %s; the top of examples/bench.cu lists the flags\n", flag, why);
    exit(2);
}

static int_list parse_ints(const char *flag, const char *text, int least)
{
    int_list list = {};
    for (const char *c = text; *c;) {
        char *end = NULL;
        double v = (double)strtoll(c, &end, 10);
        if (end == c) usage(flag, "a number is missing");
        if (*end == 'K' || *end == 'k') v *= 1024, end++;
        else if (*end == 'M' || *end == 'm') v *= 1048576, end++;
        if (!(v >= least && v <= INT_MAX)) usage(flag, "out of range");
        if (*end != ',' && *end != 0) usage(flag, "not a list of numbers");
        if (list.n == MAX_LIST) usage(flag, "too many values");
        list.v[list.n++] = (int)v;
        c = *end == ',' ? end + 1 : end;
    }
    if (list.n == 0) usage(flag, "a value is missing");
    return list;
}

static int parse_int(const char *flag, const char *text, int least)
{
    int_list list = parse_ints(flag, text, least);
    if (list.n != 1) usage(flag, "takes one number");
    return list.v[0];
}

static int_list parse_names(const char *flag, const char *text, const name_value *names)
{
    int_list list = {};
    for (const char *c = text; *c;) {
        const size_t length = strcspn(c, ",");
        const name_value *n = names;
        while (n->name != NULL && (strlen(n->name) != length || strncmp(n->name, c, length) != 0))
            n++;
        if (n->name == NULL) usage(flag, "unknown name");
        if (list.n == MAX_LIST) usage(flag, "too many values");
        list.v[list.n++] = n->value;
        c += length + (c[length] == ',');
    }
    if (list.n == 0) usage(flag, "a value is missing");
    return list;
}

static int_list one(int value)
{
    int_list list = {1, {value}};
    return list;
}

static void add_grid(options *o, const int_list *heads, const int_list *s_q, const int_list *batch,
                     const int_list *kv)
{
    for (int k = 0; k < kv->n; k++)
        for (int b = 0; b < batch->n; b++)
            for (int s = 0; s < s_q->n; s++)
                for (int h = 0; h < heads->n; h++) {
                    shape x = {heads->v[h], s_q->v[s], batch->v[b], kv->v[k]};
                    if (x.kv < x.s_q) usage("--kv", "smaller than --s-q");
                    if (o->cases == MAX_SHAPES) usage("grid", "too many cases");
                    o->shapes[o->cases++] = x;
                }
}

static void parse(options *o, int argc, char **argv)
{
    int_list heads = {3, {16, 64, 128}}, s_q = one(1), batch = one(64), kv = one(16384);
    int grid = 0;
    o->page = one(64);
    o->mode = one(SNAPMLA_MODE_DEFAULT);
    o->path = one(SNAPMLA_PATH_AUTO);
    o->causal = -1;
    o->iters = 30;
    o->rested = 1;
    o->pool_gb = 12;
    o->seed = mix64((uint64_t)time(NULL)) % 1000000;
    o->table = stdout;
    for (int i = 0; i < argc; i++) {
        const size_t used = strlen(o->command);
        snprintf(o->command + used, sizeof o->command - used, "%s%s", i ? " " : "", argv[i]);
    }

    for (int i = 1; i < argc; i++) {
        const char *flag = argv[i];
        const char *value = i + 1 < argc && strncmp(argv[i + 1], "--", 2) != 0 ? argv[i + 1] : NULL;
        if (strcmp(flag, "--warm") == 0) {
            o->rested = 0;
            continue;
        }
        if (strcmp(flag, "--latency") == 0) {
            o->latency = 1;
            continue;
        }
        if (strcmp(flag, "--varlen") == 0) {
            o->varlen = 1;
            continue;
        }
        if (strcmp(flag, "--csv") == 0) {
            o->csv_name = value;
            o->csv = value == NULL ? stdout : NULL;
            o->table = value == NULL ? NULL : stdout;
            i += value != NULL;
            continue;
        }
        if (value == NULL) usage(flag, "unknown, or its value is missing");
        i++;
        if (strcmp(flag, "--heads") == 0) heads = parse_ints(flag, value, 1), grid = 1;
        else if (strcmp(flag, "--s-q") == 0) s_q = parse_ints(flag, value, 1), grid = 1;
        else if (strcmp(flag, "--batch") == 0) batch = parse_ints(flag, value, 1), grid = 1;
        else if (strcmp(flag, "--kv") == 0) kv = parse_ints(flag, value, 1), grid = 1;
        else if (strcmp(flag, "--page") == 0) o->page = parse_ints(flag, value, 1);
        else if (strcmp(flag, "--mode") == 0) o->mode = parse_names(flag, value, kModes);
        else if (strcmp(flag, "--path") == 0) o->path = parse_names(flag, value, kPaths);
        else if (strcmp(flag, "--split-tokens") == 0) o->split_tokens = parse_int(flag, value, 0);
        else if (strcmp(flag, "--causal") == 0) o->causal = parse_int(flag, value, 0);
        else if (strcmp(flag, "--iters") == 0) o->iters = parse_int(flag, value, 20);
        else if (strcmp(flag, "--seed") == 0) o->seed = strtoull(value, NULL, 0);
        else if (strcmp(flag, "--pool-gb") == 0) o->pool_gb = atof(value);
        else if (strcmp(flag, "--q") == 0 && strcmp(value, "planes") == 0) o->q_planes = 1;
        else if (strcmp(flag, "--q") == 0 && strcmp(value, "bf16") == 0) o->q_planes = 0;
        else usage(flag, "unknown flag or value");
    }
    if (o->iters > MAX_ITERS) usage("--iters", "above 150");
    if (o->causal > 1) usage("--causal", "is 0 or 1");
    if (!(o->pool_gb > 0)) usage("--pool-gb", "is not positive");
    for (int i = 0; i < o->page.n; i++)
        if (o->page.v[i] > 1024 || (o->page.v[i] & (o->page.v[i] - 1)) != 0)
            usage("--page", "not a power of two up to 1024");
    if (grid) {
        add_grid(o, &heads, &s_q, &batch, &kv);
    } else {
        o->cases = (int)(sizeof kHeadline / sizeof kHeadline[0]);
        memcpy(o->shapes, kHeadline, sizeof kHeadline);
    }
}

int main(int argc, char **argv)
{
    static options o;
    parse(&o, argc, argv);
    g_random = mix64(o.seed);

    int device = 0;
    snapmla_result usable = SNAPMLA_ERROR_CUDA;
    if (cudaGetDevice(&device) == cudaSuccess) usable = snapmla_device_supported(device, NULL);
    if (usable != SNAPMLA_OK) {
        fprintf(stderr, "bench: no usable GPU: %s\n", snapmla_result_string(usable));
        return 2;
    }
    if (o.csv_name != NULL && (o.csv = fopen(o.csv_name, "w")) == NULL)
        usage(o.csv_name, "cannot be written");

    pool p = make_pool(&o);
    timing empty = measure(call_empty, NULL, &o);
    double ceiling = read_ceiling(&p, &o);
    report_header(&o, &p, ceiling, empty.median_us);

    int wrong = o.latency ? bench_latency(&o, &p, empty.median_us) : 0;
    for (int i = 0; i < o.cases && !o.latency; i++)
        for (int page = 0; page < o.page.n; page++)
            for (int mode = 0; mode < o.mode.n; mode++)
                for (int path = 0; path < o.path.n; path++)
                    wrong += !bench_case(&o, &p, &o.shapes[i], o.page.v[page], o.mode.v[mode],
                                         o.path.v[path], ceiling);
    if (wrong) fprintf(stderr, "bench: %d wrong\n", wrong);
    if (o.csv != NULL && o.csv != stdout) fclose(o.csv);
    CUDA(cudaFree(p.content));
    CUDA(cudaFree(p.scale));
    CUDA(cudaFree(p.rope));
    return wrong ? 1 : 0;
}
