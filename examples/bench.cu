/* bench.cu - how fast snapmla is, decode and the calls around it, beside what the GPU could do.
   Every case is checked against the CPU reference first, and a wrong answer gets no speed.

       nvcc -O3 -std=c++17 -gencode arch=compute_90a,code=sm_90a examples/bench.cu -o bench
       ./bench                                          the headline preset, about half a minute
       ./bench --preset latency,mtp --csv speed.csv     others, each within a minute
       ./bench --preset headline --check examples/charts/targets.csv
       ./bench --heads 16,64,128 --kv 4K,16K,128K --batch 32

   Presets, in lists as well; `all` is all of them, about two minutes.
       headline     16 to 128 heads, 512 requests of 1K to 8 of 128K tokens: 0.5M to 1M in all; then
                    64 requests of 16K in the precise mode, unless --mode is given
       latency      one request and four; the plan for many batch sizes; what a launch costs
       mtp          several query tokens: M = 256 and 512 with 128 heads, s_q 2 to 8 with 16
       small        short requests, batches that leave SMs idle, and 126 requests of 1K with two of
                    64K among them, beside 128 equal requests with as many tokens in all
       flaggems     640, 8192 and 33280 tokens, 1 to 128 requests, beside an H800's times of BF16
                    FlashMLA and of SnapMLA's own kernel, where they are known
       sustained    600 launches back to back without rest, 64 requests of 16K: what the power
                    limit leaves
       dataflow     bandwidth of quantize_q, append, fetch, copy_pages, import, 1 to 512K tokens;
                    bench_dataflow.h says how
   Or a grid of lists; K and M mean 1024 and 1024 * 1024.
       --heads --s-q --batch --kv           lists; defaults 16,64,128; 1; 64; 16K
   With all of them but dataflow:
       --page --mode --path                 lists; defaults 64; `default`; `auto`
                                            Modes: default, precise
       --split-tokens N     cut every request at multiples of N instead of balancing
       --causal 0|1         default: 1 where s_q > 1
       --varlen             lengths from a normal distribution round kv, deviation kv / 2
       --q bf16|planes      queries as BF16, which decode quantises (default), or quantised before
       --iters N            20 to 150 timed launches, default 30
       --pool-gb X          size of the cache pool, default 12
   With dataflow:
       --tokens             list of powers of two up to 512K; default 512K,64K,512,32,1
   With all:
       --warm               no 200 ms of rest before each measurement
       --seed N             default: from the clock; printed
       --csv [FILE]         CSV to FILE beside the table, or to standard output in its place
       --json FILE          the same as JSON
       --check FILE         hold the rows to targets: see examples/charts/targets.csv
       --note TEXT          goes into the first line of all outputs, e.g. the commit

   How decode is measured.  Keys are N(0,1), written by snapmla_append(); queries are N(0,1) and
   softmax_scale is 576^-0.5, so that logits have deviation 1.  A case takes its pages from a pool
   far larger than the L2 cache, in random order, and goes on to the next pages at every launch, so
   that no page is still in L2 when its turn comes again.  Time is the median of event intervals
   round one call, after 6 warm-ups.  A kernel that waits goes first, so that the launches are
   queued before the first of them runs; an empty kernel measured in that way is printed and is not
   subtracted.  Before each measurement the GPU rests for 200 ms, since the power limit would lower
   its clocks in a long run; `--warm` and `sustained` leave this out.  The ceilings are taken in the
   same way in the same run; bench_util.h says of what.

   Columns: M = s_q * heads, query rows a request; `decode` and `plan`: microseconds a call (plan
   is once a step, for all layers); `b2b`: a call in a row of 200 without events between;
   TF = 2 * M * 1088 * tokens / time; TB/s of 644 bytes a token; `ceiling`: the least time that the
   read ceiling (m: 644 bytes a token) or the FP8 tensor cores (t: 2 * M * 1152 flop a token, RoPE
   counted double since it is BF16) would take, whichever is more, by the time of decode; `/BF16`:
   the time in which the read ceiling would deliver 1152 bytes a token, by the time of decode: any
   kernel over a BF16 cache is slower by this factor at least; `error`: relative rms against the
   reference over sampled rows of a request, the worst of up to four requests.  A precise row ends
   with its time by that of the default mode, where the same shape was timed in that before, a row
   with two long requests with its time by that of the equal ones.  Columns of dataflow: GB/s of all
   bytes of rows, planes and records, read and written; `copy`: that rate by the one of a copy of 576
   MB, the faster of cudaMemcpyAsync() and a copy kernel; `same`: the time that a copy kernel takes
   for as many bytes by the call's own.

   Expected output: three lines on the device and its ceilings, then a row a case.
   Exit code: 0 = all right, 1 = a wrong answer, a failed call or a row below a required target,
   2 = wrong arguments or no GPU. */
#define SNAPMLA_IMPLEMENTATION
#include "../snapmla.cuh"
#define SNAPMLA_REF_IMPLEMENTATION
#include "../snapmla_ref.h"

#include "bench_util.h"
#include "bench_dataflow.h"

#include <limits.h>
#include <stdarg.h>
#include <unistd.h>

/* ================================================================================================
   constants and types
   ============================================================================================== */
enum { BF16_BYTES = 2 * DIM }; /* 1152, what a cached token costs in BF16 */
enum { MAX_LIST = 16, MAX_SHAPES = 4096, MAX_TARGETS = 64 };
enum { LONG_REQUESTS = 2 };
enum { B2B_CALLS = 200, SUSTAINED_CALLS = 600 };
enum { CHECK_REQUESTS = 4, CHECK_ROWS = 16 }; /* sampled, and query rows of each, at most */
enum { CHECK_TOKENS = 1 << 19 };              /* rows * tokens that a check costs, 0.2 to 1 s */

/* What design and tests allow at logit deviation 1 and values of mean 0: P is rounded to e4m3. */
static const double kMaxError = 3.2e-2, kMaxLseError = 2e-3;
static const double kMaxPreciseError = 3e-3, kMaxPreciseLseError = 1e-3; /* not in this mode */

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

typedef enum preset {
    PRESET_GRID, PRESET_HEADLINE, PRESET_LATENCY, PRESET_MTP, PRESET_SMALL, PRESET_FLAGGEMS,
    PRESET_SUSTAINED, PRESET_DATAFLOW, PRESET_ALL
} preset;

static const name_value kPresets[] = {
    {"grid", PRESET_GRID},         {"headline", PRESET_HEADLINE}, {"latency", PRESET_LATENCY},
    {"mtp", PRESET_MTP},           {"small", PRESET_SMALL},       {"flaggems", PRESET_FLAGGEMS},
    {"sustained", PRESET_SUSTAINED}, {"dataflow", PRESET_DATAFLOW}, {"all", PRESET_ALL},
    {NULL, 0},
};

typedef struct shape {
    int heads, s_q, batch, kv;
    preset from;
    int precise; /* in that mode alone, whatever --mode says */
    int long_kv; /* of LONG_REQUESTS of the batch; 0: all have kv tokens */
} shape;

/* Microseconds of kernels on an H800, as others measured them: those of
   examples/charts/peers_h800.csv, which names the source. */
typedef struct h800 {
    int heads, batch, kv;
    double bf16, snapmla;
} h800;

static const h800 kH800[] = {
    {128, 1, 640, 13.9, 23.4}, {128, 2, 640, 14.0, 23.1}, {128, 4, 640, 15.8, 24.2},
    {128, 8, 640, 17.5, 24.3}, {128, 16, 640, 22.1, 27.1}, {128, 32, 640, 36.1, 36.1},
    {128, 64, 640, 34.5, 31.8}, {128, 128, 640, 65.3, 56.5}, {64, 1, 8192, 27.8, 37.9},
    {64, 2, 8192, 26.9, 39.2}, {64, 4, 8192, 31.1, 41.5}, {64, 8, 8192, 50.8, 45.3},
    {64, 16, 8192, 79.1, 57.5}, {64, 32, 8192, 129.3, 86.9},
};

/* What rows of such shapes have to reach: at least or at most so much in the column `metric`. */
typedef struct target {
    char level[16], metric[24], what[96];
    double from[4], to[4]; /* of m, kv, batch and all tokens */
    double at_least, at_most; /* NaN: not asked */
    int met, missed;
} target;

/* A time for others to be compared with. */
typedef struct known_time {
    shape size;
    int page, path, mode;
    double us;
} known_time;

typedef struct options {
    int cases;
    shape shapes[MAX_SHAPES];
    int_list page, mode, path;
    int split_tokens, causal, varlen, q_planes, mode_given;
    method how;
    double pool_gb;
    unsigned long long seed;
    const char *csv_name, *json_name, *note;
    FILE *table, *csv, *json;
    int records; /* written to csv and json so far */
    int done, cases_in_all; /* of the line that shows progress */
    int dataflow;
    int_list tokens; /* of dataflow */
    int known_times;
    known_time known_time[MAX_SHAPES];
    int targets;
    target target[MAX_TARGETS];
    char command[1024];
} options;

/* Columns of the CSV and keys of the JSON.  Rows of decode leave those of dataflow empty, and the
   other way round. */
static const char *const kColumns[] = {
    "preset", "heads", "s_q", "m", "batch", "kv", "tokens", "page", "path", "mode", "causal",
    "split_tokens", "clocks", "decode_us", "decode_min_us", "b2b_us", "plan_us", "tflops",
    "tb_per_s", "bound", "ceiling_share", "bf16_ratio", "default_ratio", "read_gb_per_s",
    "copy_gb_per_s", "fp8_tflops", "h800_bf16_us", "h800_snapmla_us", "rms", "lse_error",
    "rows_checked", "long_requests", "long_kv", "balanced_ratio", "call", "call_us", "gb_per_s",
    "copy_share", "same_copy_share",
};
enum { COLUMNS = sizeof kColumns / sizeof kColumns[0] };

/* One row of the CSV: a cell a column. */
typedef struct record {
    struct {
        char text[48]; /* empty: none */
        int quoted;
    } cell[COLUMNS];
} record;

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

typedef struct accuracy {
    double rms, lse; /* the worst of the sampled requests and rows */
    int rows, bad;   /* bad is counted beside the maxima, where NaN would hide */
    long long not_finite;
    int ok;
} accuracy;

/* ================================================================================================
   helpers
   ============================================================================================== */
static const char *name_of(const name_value *names, int value)
{
    for (; names->name != NULL; names++)
        if (names->value == value) return names->name;
    return "?";
}

/* ================================================================================================
   kernels
   ============================================================================================== */
static __global__ void bench_count_up(int64_t *x, int64_t first, int64_t n)
{
    int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
    if (i < n) x[i] = first + i;
}

static __global__ void bench_page_order(int32_t *order, uint32_t pages, uint32_t key)
{
    uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < pages) order[i] = order[pages + i] = (int32_t)permute(i, pages, key);
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
   the calls that are timed
   ============================================================================================== */
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

/* One of the two in the middle of the batch, the other at its end, where every check looks. */
static int is_long(const shape *s, int b)
{
    return b == s->batch / 3 || b == s->batch - 1;
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
        if (s->long_kv && is_long(s, b)) r.lens[b] = s->long_kv;
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

/* --note may hold any characters. */
static void json_string(FILE *f, const char *before, const char *name, const char *text)
{
    fprintf(f, "%s\"%s\": \"", before, name);
    for (const char *c = text; *c; c++) {
        if ((unsigned char)*c < ' ') fprintf(f, "\\u%04x", *c);
        else fprintf(f, "%s%c", *c == '"' || *c == '\\' ? "\\" : "", *c);
    }
    fputc('"', f);
}

/* The device, how it is measured and its ceilings: lines of the table, comments in the CSV. */
static void report_header(const options *o, const pool *p, const ceilings *top)
{
    int device = 0, sms = 0, l2 = 0, clock = 0, memory_clock = 0, driver = 0, runtime = 0;
    char release[80], date[32], first[512], second[256], third[256], fp8[32] = "-";
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
    if (top->fp8 > 0) snprintf(fp8, sizeof fp8, "%.0f", top->fp8 * 1e-12);

    snprintf(first, sizeof first, "%s; CUDA %d.%d, driver for %d.%d%s; snapmla %d.%d.%d%s%s; %s",
             prop.name, runtime / 1000, runtime % 1000 / 10, driver / 1000, driver % 1000 / 10,
             release, SNAPMLA_VERSION_MAJOR, SNAPMLA_VERSION_MINOR, SNAPMLA_VERSION_PATCH,
             o->note && o->note[0] ? ", " : "", o->note ? o->note : "", date);
    snprintf(second, sizeof second,
             "%d SMs, L2 %d MB, up to %d MHz, memory %d MHz; %s, median of %d, q %s, pool %.1f GB, "
             "seed %llu",
             sms, l2 >> 20, clock / 1000, memory_clock / 1000, o->how.rested ? "rested" : "warm",
             o->how.iters, o->q_planes ? "planes" : "bf16",
             (double)p->tokens * TOKEN_BYTES * 1e-9, o->seed);
    snprintf(third, sizeof third,
             "ceilings: read %.0f GB/s, copy %.0f GB/s, FP8 tensor cores %s TF; empty kernel %.1f "
             "us",
             top->read * 1e-9, top->copy * 1e-9, fp8, top->empty_us);
    FILE *files[] = {o->table, o->csv};
    for (int i = 0; i < 2; i++)
        if (files[i] != NULL)
            fprintf(files[i], "# %s\n# %s; %s\n# %s\n", first, second, o->command, third);
    if (o->table != NULL && o->cases > 0)
        fprintf(o->table, "%5s %3s %5s %5s %7s %4s %-8s %-8s %9s %7s %6s %6s %6s %8s %6s  %s\n",
                "heads", "s_q", "M", "batch", "kv", "page", "path", "mode", "decode us", "b2b",
                "plan", "TF", "TB/s", "ceiling", "/BF16", "error");
    if (o->json != NULL) {
        json_string(o->json, "{", "device", first);
        json_string(o->json, ",\n ", "method", second);
        json_string(o->json, ",\n ", "command", o->command);
        json_string(o->json, ",\n ", "ceilings", third);
        fprintf(o->json, ",\n \"rows\": [");
    }
}

static int column_of(const char *name)
{
    int i = 0;
    while (i < COLUMNS && strcmp(kColumns[i], name) != 0) i++;
    return i;
}

static void put(record *r, int quoted, const char *name, const char *format, ...)
{
    const int i = column_of(name);
    va_list args;
    require(i < COLUMNS, name, "no such column");
    r->cell[i].quoted = quoted;
    va_start(args, format);
    vsnprintf(r->cell[i].text, sizeof r->cell[i].text, format, args);
    va_end(args);
}

/* A number, or nothing where there is none. */
static void put_number(record *r, const char *name, const char *format, double x)
{
    if (x > 0) put(r, 0, name, format, x);
}

static void write_record(options *o, const record *r)
{
    for (int i = 0; i < COLUMNS && o->csv != NULL && o->records == 0; i++)
        fprintf(o->csv, "%s%s", kColumns[i], i + 1 < COLUMNS ? "," : "\n");
    for (int i = 0; i < COLUMNS && o->csv != NULL; i++)
        fprintf(o->csv, "%s%s", r->cell[i].text, i + 1 < COLUMNS ? "," : "\n");
    if (o->csv != NULL) fflush(o->csv);
    if (o->json != NULL) {
        fprintf(o->json, "%s\n  {", o->records ? "," : "");
        for (int i = 0; i < COLUMNS; i++) {
            const char *quote = r->cell[i].quoted ? "\"" : "", *text = r->cell[i].text;
            fprintf(o->json, "%s\"%s\": %s%s%s", i ? ", " : "", kColumns[i], quote,
                    text[0] ? text : "null", quote);
        }
        fprintf(o->json, "}");
    }
    o->records++;
}

/* What a row has in a column, which must be there. */
static const char *text_of(const record *r, const char *name)
{
    const int i = column_of(name);
    require(i < COLUMNS, name, "no such column");
    return r->cell[i].text;
}

/* NaN where it has nothing. */
static double value_of(const record *r, const char *name)
{
    return text_of(r, name)[0] ? atof(text_of(r, name)) : NAN;
}

/* A target is for rows that have its metric and lie within its bounds; where there are none, a row
   needs not have what is bounded.  Rows of the precise mode are held to `default_ratio` alone. */
static int is_for(const target *t, const record *r)
{
    static const char *const names[4] = {"m", "kv", "batch", "tokens"};
    const int precise = strcmp(text_of(r, "mode"), "precise") == 0;
    if (text_of(r, t->metric)[0] == 0) return 0;
    if (precise != (strcmp(t->metric, "default_ratio") == 0)) return 0;
    for (int k = 0; k < 4; k++) {
        const double x = value_of(r, names[k]);
        if (t->from[k] <= 0 && t->to[k] == HUGE_VAL) continue;
        if (!(x >= t->from[k] && x <= t->to[k])) return 0;
    }
    return 1;
}

/* Holds a row to the targets that are for it, and says on the table where it falls short. */
static void check_targets(options *o, const record *r)
{
    for (int i = 0; i < o->targets; i++) {
        target *t = &o->target[i];
        if (!is_for(t, r)) continue;
        const double x = value_of(r, t->metric);
        const int ok = (isnan(t->at_least) || x >= t->at_least)
                    && (isnan(t->at_most) || x <= t->at_most);
        t->met += ok;
        t->missed += !ok;
        if (!ok && o->table != NULL)
            fprintf(o->table, "      short of %s: %s %.4g (%s %g)\n", t->level, t->metric, x,
                    isnan(t->at_least) ? "at most" : "at least",
                    isnan(t->at_least) ? t->at_most : t->at_least);
    }
}

static void remember_time(options *o, const run *r, double us)
{
    if (r->size.from == PRESET_SUSTAINED || o->known_times == MAX_SHAPES) return;
    const known_time t = {r->size, r->page, r->d.step.path, r->d.step.mode, us};
    o->known_time[o->known_times++] = t;
}

/* The time of a run with other lengths or in another mode; 0: not measured. */
static double known_us(const options *o, const run *r, int kv, int long_kv, int mode)
{
    for (int i = o->known_times - 1; i >= 0; i--) {
        const known_time *t = &o->known_time[i];
        if (t->size.heads == r->size.heads && t->size.s_q == r->size.s_q
            && t->size.batch == r->size.batch && t->size.kv == kv && t->size.long_kv == long_kv
            && t->page == r->page && t->path == r->d.step.path && t->mode == mode)
            return t->us;
    }
    return 0;
}

/* What the ceilings and others' kernels say about a time. */
typedef struct comparison {
    double tf, tb, floor_us, of_ceiling, of_bf16, h800_bf16, h800_snapmla;
    double of_default;  /* by the time of the default mode; 0 = none to compare with */
    double of_balanced; /* by the time of equal requests with as many tokens; 0 = likewise */
    char bound; /* m = memory, t = tensor cores */
} comparison;

static comparison compare(const options *o, const run *r, double us, const ceilings *top)
{
    const shape *s = &r->size;
    const double m = (double)s->s_q * s->heads, tokens = (double)r->tokens;
    comparison c = {};
    c.tf = 2 * m * (2 * LATENT + ROPE) * tokens / us * 1e-6;
    c.tb = tokens * TOKEN_BYTES / us * 1e-6;
    c.floor_us = tokens * TOKEN_BYTES / top->read * 1e6;
    c.bound = 'm';
    if (top->fp8 > 0) {
        const double tensor_us = 2 * m * (2 * LATENT + 2 * ROPE) * tokens / top->fp8 * 1e6;
        if (tensor_us > c.floor_us) c.floor_us = tensor_us, c.bound = 't';
    }
    c.of_ceiling = c.floor_us / us;
    c.of_bf16 = tokens * BF16_BYTES / top->read * 1e6 / us;
    for (size_t i = 0; i < sizeof kH800 / sizeof kH800[0] && s->from == PRESET_FLAGGEMS; i++)
        if (kH800[i].heads == s->heads && kH800[i].batch == s->batch && kH800[i].kv == s->kv)
            c.h800_bf16 = kH800[i].bf16, c.h800_snapmla = kH800[i].snapmla;
    const int mode = r->d.step.mode, equal_kv = (int)(r->tokens / s->batch);
    const double default_us = known_us(o, r, s->kv, s->long_kv, SNAPMLA_MODE_DEFAULT);
    const double equal_us = known_us(o, r, equal_kv, 0, mode);
    if (mode == SNAPMLA_MODE_PRECISE && default_us > 0) c.of_default = us / default_us;
    if (s->long_kv && equal_us > 0) c.of_balanced = us / equal_us;
    return c;
}

/* Microseconds of one case; 0 where not measured. */
typedef struct times {
    timing decode, plan;
    double b2b_us;
    const char *how; /* rested, warm or sustained */
} times;

static void report_run(options *o, const run *r, const accuracy *a, const times *t,
                       const ceilings *top)
{
    const shape *s = &r->size;
    snapmla_decode_desc resolved;
    LIB(snapmla_resolve(&r->d, &resolved));
    const char *path = name_of(kPaths, resolved.step.path), *mode = name_of(kModes, r->d.step.mode);
    const int m = s->s_q * s->heads;
    const comparison c = compare(o, r, t->decode.median_us, top);
    const int precise = r->d.step.mode == SNAPMLA_MODE_PRECISE;

    if (o->table != NULL) {
        fprintf(o->table, "%5d %3d %5d %5d %7d %4d %-8s %-8s ", s->heads, s->s_q, m, s->batch,
                s->kv, r->page, path, mode);
        if (a->ok) {
            char b2b[16] = "-", h800[64] = "", by_default[32] = "", by_equal[80] = "";
            if (t->b2b_us > 0) snprintf(b2b, sizeof b2b, "%.1f", t->b2b_us);
            if (c.h800_bf16 > 0)
                snprintf(h800, sizeof h800, "  H800: BF16 %.1f, SnapMLA %.1f us", c.h800_bf16,
                         c.h800_snapmla);
            if (c.of_default > 0)
                snprintf(by_default, sizeof by_default, "  default x %.2f", c.of_default);
            if (s->long_kv)
                snprintf(by_equal, sizeof by_equal, "  %d of them have %d: equal ones x %.2f",
                         LONG_REQUESTS, s->long_kv, c.of_balanced);
            fprintf(o->table, "%9.1f %7s %6.1f %6.0f %6.3f %5.0f%% %c %5.2fx  %.1e%s%s%s%s\n",
                    t->decode.median_us, b2b, t->plan.median_us, c.tf, c.tb, 100 * c.of_ceiling,
                    c.bound, c.of_bf16, a->rms, by_default, by_equal, h800,
                    t->decode.queued && t->plan.queued ? "" : "  (launches did not queue)");
        } else {
            fprintf(o->table,
                    "WRONG: rms %.2e (limit %.1e), lse %.2e (%.1e), %lld numbers not finite\n",
                    a->rms, precise ? kMaxPreciseError : kMaxError, a->lse,
                    precise ? kMaxPreciseLseError : kMaxLseError, a->not_finite);
        }
    }
    if (a->ok) {
        remember_time(o, r, t->decode.median_us);
        record row = {};
        put(&row, 1, "preset", "%s", name_of(kPresets, s->from));
        put(&row, 0, "heads", "%d", s->heads);
        put(&row, 0, "s_q", "%d", s->s_q);
        put(&row, 0, "m", "%d", m);
        put(&row, 0, "batch", "%d", s->batch);
        put(&row, 0, "kv", "%d", s->kv);
        put(&row, 0, "tokens", "%lld", (long long)r->tokens);
        put(&row, 0, "page", "%d", r->page);
        put(&row, 1, "path", "%s", path);
        put(&row, 1, "mode", "%s", mode);
        put(&row, 0, "causal", "%d", r->causal);
        put(&row, 0, "split_tokens", "%d", o->split_tokens);
        put(&row, 1, "clocks", "%s", t->how);
        put(&row, 0, "decode_us", "%.3f", t->decode.median_us);
        put(&row, 0, "decode_min_us", "%.3f", t->decode.min_us);
        put_number(&row, "b2b_us", "%.3f", t->b2b_us);
        put(&row, 0, "plan_us", "%.3f", t->plan.median_us);
        put(&row, 0, "tflops", "%.2f", c.tf);
        put(&row, 0, "tb_per_s", "%.4f", c.tb);
        put(&row, 1, "bound", "%s", c.bound == 't' ? "tensor" : "memory");
        put(&row, 0, "ceiling_share", "%.4f", c.of_ceiling);
        put(&row, 0, "bf16_ratio", "%.4f", c.of_bf16);
        put_number(&row, "default_ratio", "%.4f", c.of_default);
        put(&row, 0, "read_gb_per_s", "%.1f", top->read * 1e-9);
        put(&row, 0, "copy_gb_per_s", "%.1f", top->copy * 1e-9);
        put_number(&row, "fp8_tflops", "%.1f", top->fp8 * 1e-12);
        put_number(&row, "h800_bf16_us", "%.1f", c.h800_bf16);
        put_number(&row, "h800_snapmla_us", "%.1f", c.h800_snapmla);
        put(&row, 0, "rms", "%.3e", a->rms);
        put(&row, 0, "lse_error", "%.3e", a->lse);
        put(&row, 0, "rows_checked", "%d", a->rows);
        put_number(&row, "long_requests", "%.0f", s->long_kv ? LONG_REQUESTS : 0);
        put_number(&row, "long_kv", "%.0f", s->long_kv);
        put_number(&row, "balanced_ratio", "%.4f", c.of_balanced);
        write_record(o, &row);
        if (strcmp(t->how, "rested") == 0) check_targets(o, &row); /* they are for full clocks */
    }
    if (o->table != NULL) fflush(o->table);
}

/* 1 when every required target was reached by the rows that it is for, and there were some. */
static int targets_reached(const options *o)
{
    int met = 0, missed = 0, rows = 0;
    if (o->targets == 0) return 1;
    for (int i = 0; i < o->targets; i++) {
        const target *t = &o->target[i];
        const int required = strcmp(t->level, "required") == 0;
        if (o->table != NULL)
            fprintf(o->table, "%-9s %-64s %s %d of %d rows\n", t->level, t->what,
                    t->met + t->missed == 0 ? "not measured:" : t->missed ? "MISSED:" : "met:",
                    t->met, t->met + t->missed);
        rows += t->met + t->missed;
        met += required ? t->met : 0;
        missed += required ? t->missed : 0;
    }
    fprintf(stderr, "bench: required targets: %d met, %d missed\n", met, missed);
    return missed == 0 && rows > 0;
}

/* A line on a terminal that the next output takes back. */
static void progress(options *o, const char *format, ...)
{
    va_list args;
    o->done++;
    if (!isatty(2)) return;
    fprintf(stderr, "\r[%d/%d] ", o->done, o->cases_in_all);
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
    fflush(stderr);
}

static void progress_ends(void)
{
    if (isatty(2)) fprintf(stderr, "\r%70s\r", "");
}

/* 1 when the answer was right. */
static int bench_case(options *o, const pool *p, const shape *s, int page, int mode, int path,
                      const ceilings *top)
{
    run r = start_run(o, p, s, page, mode, path);
    times t = {};
    method how = o->how;
    accuracy a = check_run(&r, p);
    t.how = how.rested ? "rested" : "warm";
    if (a.ok) {
        t.plan = measure(call_plan, &r, &how);
        poison_results(&r);
        if (s->from == PRESET_SUSTAINED) {
            how.rested = 0;
            how.row = SUSTAINED_CALLS;
            t.how = "sustained";
        }
        t.decode = measure(call_decode, &r, &how);
        a.not_finite = count_not_finite(&r); /* the launches that were timed did work, too */
        a.ok = a.not_finite == 0;
        how.row = B2B_CALLS;
        if (s->from == PRESET_LATENCY || s->from == PRESET_FLAGGEMS)
            t.b2b_us = measure(call_decode, &r, &how).median_us;
    }
    progress_ends();
    report_run(o, &r, &a, &t, top);
    end_run(&r);
    return a.ok;
}

/* ================================================================================================
   the rest of the latency preset
   ============================================================================================== */

/* One block of tokens: what a launch costs.  1 when the answer was right. */
static int block_row(const options *o, const pool *p, int heads, int max_seq_len)
{
    const shape s = {heads, 1, 1, 64, PRESET_LATENCY, 0, 0};
    method row = o->how;
    run r = start_run(o, p, &s, 64, SNAPMLA_MODE_DEFAULT, o->path.v[0]);
    r.d.step.max_seq_len = max_seq_len; /* 0: not told to the library */
    row.row = B2B_CALLS;
    accuracy a = check_run(&r, p);
    if (a.ok)
        fprintf(o->table, "%5d %9.2f %9.2f  %s\n", heads,
                measure(call_decode, &r, &o->how).median_us,
                measure(call_decode, &r, &row).median_us,
                max_seq_len ? "max_seq_len 64: no combine is launched"
                            : "the combine finds nothing to do");
    else
        fprintf(o->table, "WRONG: rms %.2e, lse %.2e, %lld numbers not finite\n", a.rms, a.lse,
                a.not_finite);
    fflush(o->table);
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
        us[mixed] = measure(call_plan, &r, &o->how).median_us;
    }
    fprintf(o->table, "%5d %6d %9.2f %9.2f\n", heads, batch, us[0], us[1]);
    fflush(o->table);
    CUDA(cudaFree(r.d_lens));
    CUDA(cudaFree(step.plan));
    free(lens);
}

/* Returns the number of wrong answers. */
static int bench_fixed_cost(const options *o, const pool *p)
{
    int wrong = 0;
    if (o->table == NULL) return 0;
    fprintf(o->table, "# one request of one block of tokens\n%5s %9s %9s\n", "heads", "decode us",
            "b2b");
    for (int heads = 16; heads <= 128; heads *= 8)
        for (int told = 1; told >= 0; told--) wrong += !block_row(o, p, heads, told ? 64 : 0);
    fprintf(o->table,
            "# snapmla_plan, us: requests of 4096 tokens, and of mixed lengths up to 128K\n"
            "%5s %6s %9s %9s\n", "heads", "batch", "same", "mixed");
    for (int batch = 1; batch <= 4096; batch *= 4) plan_row(o, batch, 16);
    for (int batch = 1; batch <= 4096; batch *= 64) plan_row(o, batch, 128);
    return wrong;
}

/* ================================================================================================
   the dataflow preset
   ============================================================================================== */
static int flow_sizes(const options *o, const flow *f, int64_t *sizes)
{
    int count = 0;
    for (int i = 0; i < o->tokens.n; i++) {
        const int64_t n = o->tokens.v[i] < f->least ? f->least : o->tokens.v[i];
        int known = 0;
        for (int k = 0; k < count; k++) known |= sizes[k] == n;
        if (!known) sizes[count++] = n;
    }
    return count;
}

/* 1 when the answer was right. */
static int bench_flow(options *o, const flow *f, int64_t n, double copy)
{
    progress(o, "%s, %lld tokens ", f->name, (long long)n);
    const flow_row row = flow_measure(f, n, &o->how);
    const double rate = (double)n * f->bytes / (row.us * 1e-6);
    const int queued = row.us > 0 && row.like_us > 0;
    progress_ends();
    if (o->table != NULL) {
        fprintf(o->table, "%-29s %7lld ", f->name, (long long)n);
        if (row.wrong >= 0)
            fprintf(o->table, "WRONG: token %lld\n", (long long)row.wrong);
        else if (!queued)
            fprintf(o->table, "        - (launches did not queue)\n");
        else
            fprintf(o->table, "%9.2f %7.0f %5.0f%% %5.0f%%\n", row.us, rate * 1e-9,
                    100 * rate / copy, 100 * row.like_us / row.us);
        fflush(o->table);
    }
    if (row.wrong >= 0) return 0;
    if (!queued) return 1; /* not wrong, but there is no time to tell */

    record r = {};
    put(&r, 1, "preset", "%s", name_of(kPresets, PRESET_DATAFLOW));
    put(&r, 0, "tokens", "%lld", (long long)n);
    put(&r, 0, "page", "%d", PAGE);
    put(&r, 1, "clocks", "%s", o->how.rested ? "rested" : "warm");
    put(&r, 0, "copy_gb_per_s", "%.1f", copy * 1e-9);
    put(&r, 1, "call", "%s", f->name);
    put(&r, 0, "call_us", "%.3f", row.us);
    put(&r, 0, "gb_per_s", "%.1f", rate * 1e-9);
    put(&r, 0, "copy_share", "%.4f", rate / copy);
    put(&r, 0, "same_copy_share", "%.4f", row.like_us / row.us);
    write_record(o, &r);
    if (o->how.rested) check_targets(o, &r);
    return 1;
}

/* Returns the number of wrong answers. */
static int bench_dataflow(options *o)
{
    int64_t sizes[MAX_LIST];
    int wrong = 0;
    flow_start();
    const flow_ceiling copy = flow_copy_ceiling(&o->how);
    FILE *files[] = {o->table, o->csv};
    for (int i = 0; i < 2; i++)
        if (files[i] != NULL)
            fprintf(files[i],
                    "# dataflow: copy of %d MB by a kernel %.0f, by cudaMemcpyAsync() %.0f GB/s, "
                    "read + written\n",
                    MOST * DIM * 2 >> 20, copy.kernel * 1e-9, copy.runtime * 1e-9);
    if (o->table != NULL)
        fprintf(o->table, "%-29s %7s %9s %7s %6s %6s\n", "call", "tokens", "us", "GB/s", "copy",
                "same");
    for (size_t i = 0; i < sizeof kFlows / sizeof kFlows[0]; i++) {
        const int count = flow_sizes(o, &kFlows[i], sizes);
        for (int k = 0; k < count; k++)
            wrong += !bench_flow(o, &kFlows[i], sizes[k], fmax(copy.kernel, copy.runtime));
    }
    flow_end();
    return wrong;
}

static int flow_cases(const options *o)
{
    int64_t sizes[MAX_LIST];
    int cases = 0;
    for (size_t i = 0; i < sizeof kFlows / sizeof kFlows[0] && o->dataflow; i++)
        cases += flow_sizes(o, &kFlows[i], sizes);
    return cases;
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

static void add_case(options *o, preset from, int heads, int s_q, int batch, int kv)
{
    const shape s = {heads, s_q, batch, kv, from, 0, 0};
    if (kv < s_q) usage("--kv", "smaller than --s-q");
    if (o->cases == MAX_SHAPES) usage("grid", "too many cases");
    o->shapes[o->cases++] = s;
}

static void add_grid(options *o, const int_list *heads, const int_list *s_q, const int_list *batch,
                     const int_list *kv)
{
    for (int k = 0; k < kv->n; k++)
        for (int b = 0; b < batch->n; b++)
            for (int s = 0; s < s_q->n; s++)
                for (int h = 0; h < heads->n; h++)
                    add_case(o, PRESET_GRID, heads->v[h], s_q->v[s], batch->v[b], kv->v[k]);
}

/* What the top of this file says of each preset. */
static void add_preset(options *o, int which)
{
    static const int long_kv[6] = {1024, 4096, 16384, 32768, 65536, 131072};
    static const int long_batch[6] = {512, 128, 64, 32, 16, 8}; /* 0.5M or 1M tokens */
    const preset p = (preset)which;
    switch (p) {
    case PRESET_HEADLINE:
        for (int i = 0; i < 6; i++)
            for (int heads = 16; heads <= 128; heads *= 2)
                add_case(o, p, heads, 1, long_batch[i], long_kv[i]);
        for (int i = 0; i < 3 && !o->mode_given; i++) {
            static const int heads[3] = {16, 32, 128};
            add_case(o, p, heads[i], 1, 64, 16384);
            o->shapes[o->cases - 1].precise = 1;
        }
        break;
    case PRESET_LATENCY:
        for (int heads = 16; heads <= 128; heads = heads == 16 ? 64 : 2 * heads) {
            for (int kv = 4096; kv <= 131072; kv = kv == 4096 ? 32768 : 4 * kv)
                add_case(o, p, heads, 1, 1, kv);
            add_case(o, p, heads, 1, 4, 4096);
        }
        break;
    case PRESET_MTP:
        for (int i = 0; i < 6; i++)
            for (int s_q = 2; s_q <= 4 && i != 1 && i != 3; s_q += 2)
                add_case(o, p, 128, s_q, long_batch[i], long_kv[i]);
        for (int s_q = 2; s_q <= 8; s_q++) add_case(o, p, 16, s_q, 64, 16384);
        break;
    case PRESET_SMALL:
        for (int heads = 16; heads <= 128; heads *= 2) add_case(o, p, heads, 1, 512, 1024);
        for (int heads = 16; heads <= 128; heads = heads == 16 ? 64 : 2 * heads) {
            add_case(o, p, heads, 1, 1024, 256);
            add_case(o, p, heads, 1, 64, 1024);
            add_case(o, p, heads, 1, 64, 4096);
            add_case(o, p, heads, 1, 4, 32768);
        }
        for (int heads = 16; heads <= 128; heads *= 8) { /* 126 * 1024 + 2 * 65536 = 128 * 2032 */
            add_case(o, p, heads, 1, 128, 2032);
            add_case(o, p, heads, 1, 128, 1024);
            o->shapes[o->cases - 1].long_kv = 65536;
        }
        break;
    case PRESET_FLAGGEMS:
        for (int batch = 1; batch <= 128; batch *= 2) add_case(o, p, 128, 1, batch, 640);
        for (int batch = 1; batch <= 128; batch *= 2) add_case(o, p, 64, 1, batch, 8192);
        for (int batch = 1; batch <= 128; batch *= 2) add_case(o, p, 64, 1, batch, 33280);
        break;
    case PRESET_SUSTAINED:
        for (int heads = 16; heads <= 128; heads = heads == 16 ? 64 : 2 * heads)
            add_case(o, p, heads, 1, 64, 16384);
        add_case(o, p, 128, 2, 64, 16384);
        break;
    case PRESET_ALL:
        for (int i = PRESET_HEADLINE; i < PRESET_ALL; i++) add_preset(o, i);
        break;
    case PRESET_DATAFLOW: o->dataflow = 1; break;
    case PRESET_GRID: usage("--preset grid", "is made by --heads, --s-q, --batch, --kv"); break;
    }
}

/* A line: level,m_from,m_to,kv_from,kv_to,batch_from,batch_to,tokens_from,tokens_to,metric,
   at_least,at_most,what.  Empty = no bound.  `#` and the line of names are passed over. */
static void read_targets(options *o, const char *name)
{
    char line[512], cell[13][96];
    FILE *f = fopen(name, "r");
    if (f == NULL) usage(name, "cannot be read");
    while (fgets(line, sizeof line, f) != NULL) {
        int n = 0;
        line[strcspn(line, "\r\n")] = 0;
        if (line[0] == '#' || line[0] == 0 || strncmp(line, "level,", 6) == 0) continue;
        for (const char *c = line; c != NULL && n < 13; n++) {
            const size_t length = n == 12 ? strlen(c) : strcspn(c, ",");
            if (length >= sizeof cell[0]) usage(name, "a cell is too long");
            memcpy(cell[n], c, length);
            cell[n][length] = 0;
            c = c[length] == ',' ? c + length + 1 : NULL;
        }
        if (n != 13) usage(name, "a line has not 13 cells");
        if (column_of(cell[9]) == COLUMNS) usage(cell[9], "is no column that a target can hold");
        if (o->targets == MAX_TARGETS) usage(name, "too many targets");
        target *t = &o->target[o->targets++];
        snprintf(t->level, sizeof t->level, "%.15s", cell[0]);
        snprintf(t->metric, sizeof t->metric, "%.23s", cell[9]);
        snprintf(t->what, sizeof t->what, "%.95s", cell[12]);
        for (int k = 0; k < 4; k++) {
            t->from[k] = cell[1 + 2 * k][0] ? atof(cell[1 + 2 * k]) : 0;
            t->to[k] = cell[2 + 2 * k][0] ? atof(cell[2 + 2 * k]) : HUGE_VAL;
        }
        t->at_least = cell[10][0] ? atof(cell[10]) : NAN;
        t->at_most = cell[11][0] ? atof(cell[11]) : NAN;
        if (isnan(t->at_least) && isnan(t->at_most)) usage(name, "a target asks for nothing");
        if (strcmp(t->level, "required") != 0 && strcmp(t->level, "target") != 0)
            usage(name, "a level is neither `required` nor `target`");
    }
    fclose(f);
    if (o->targets == 0) usage(name, "holds no targets");
}

static void parse(options *o, int argc, char **argv)
{
    int_list heads = {3, {16, 64, 128}}, s_q = one(1), batch = one(64), kv = one(16384);
    int_list presets = {};
    const int_list sizes = {5, {MOST, 65536, 512, 32, 1}};
    int grid = 0, tokens_given = 0;
    o->tokens = sizes;
    o->page = one(64);
    o->mode = one(SNAPMLA_MODE_DEFAULT);
    o->path = one(SNAPMLA_PATH_AUTO);
    o->causal = -1;
    o->how.iters = 30;
    o->how.rested = 1;
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
            o->how.rested = 0;
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
        else if (strcmp(flag, "--preset") == 0) presets = parse_names(flag, value, kPresets);
        else if (strcmp(flag, "--tokens") == 0)
            o->tokens = parse_ints(flag, value, 1), tokens_given = 1;
        else if (strcmp(flag, "--json") == 0) o->json_name = value;
        else if (strcmp(flag, "--check") == 0) read_targets(o, value);
        else if (strcmp(flag, "--note") == 0) o->note = value;
        else if (strcmp(flag, "--page") == 0) o->page = parse_ints(flag, value, 1);
        else if (strcmp(flag, "--mode") == 0)
            o->mode = parse_names(flag, value, kModes), o->mode_given = 1;
        else if (strcmp(flag, "--path") == 0) o->path = parse_names(flag, value, kPaths);
        else if (strcmp(flag, "--split-tokens") == 0) o->split_tokens = parse_int(flag, value, 0);
        else if (strcmp(flag, "--causal") == 0) o->causal = parse_int(flag, value, 0);
        else if (strcmp(flag, "--iters") == 0) o->how.iters = parse_int(flag, value, 20);
        else if (strcmp(flag, "--seed") == 0) o->seed = strtoull(value, NULL, 0);
        else if (strcmp(flag, "--pool-gb") == 0) o->pool_gb = atof(value);
        else if (strcmp(flag, "--q") == 0 && strcmp(value, "planes") == 0) o->q_planes = 1;
        else if (strcmp(flag, "--q") == 0 && strcmp(value, "bf16") == 0) o->q_planes = 0;
        else usage(flag, "unknown flag or value");
    }
    if (o->how.iters > MAX_ITERS) usage("--iters", "above 150");
    if (o->causal > 1) usage("--causal", "is 0 or 1");
    if (!(o->pool_gb > 0)) usage("--pool-gb", "is not positive");
    for (int i = 0; i < o->page.n; i++)
        if (o->page.v[i] > 1024 || (o->page.v[i] & (o->page.v[i] - 1)) != 0)
            usage("--page", "not a power of two up to 1024");
    for (int i = 0; i < o->tokens.n; i++)
        if (o->tokens.v[i] > MOST || (o->tokens.v[i] & (o->tokens.v[i] - 1)) != 0)
            usage("--tokens", "not a power of two up to 512K");
    if (grid && presets.n > 0) usage("--preset", "does not go with --heads, --s-q, --batch, --kv");
    for (int i = 0; i < presets.n; i++) add_preset(o, presets.v[i]);
    if (grid) add_grid(o, &heads, &s_q, &batch, &kv);
    else if (presets.n == 0) add_preset(o, PRESET_HEADLINE);
    if (tokens_given && !o->dataflow) usage("--tokens", "is for --preset dataflow");
    if (o->mode_given && o->cases == 0) usage("--mode", "is not for --preset dataflow");
}

static FILE *open_output(const char *name)
{
    FILE *f = fopen(name, "w");
    if (f == NULL) usage(name, "cannot be written");
    return f;
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
    if (o.csv_name != NULL) o.csv = open_output(o.csv_name);
    if (o.json_name != NULL) o.json = open_output(o.json_name);

    pool p = make_pool(&o);
    const method sustained = {0, SUSTAINED_CALLS, 0};
    ceilings rested = measure_ceilings(p.content, (size_t)p.tokens * LATENT, &o.how), tired = {};
    report_header(&o, &p, &rested);

    const int_list precise = one(SNAPMLA_MODE_PRECISE);
    int wrong = 0, fixed_cost = 0;
    o.cases_in_all = flow_cases(&o);
    for (int i = 0; i < o.cases; i++)
        o.cases_in_all += o.page.n * (o.shapes[i].precise ? 1 : o.mode.n) * o.path.n;
    for (int i = 0; i < o.cases; i++) {
        const shape *s = &o.shapes[i];
        const int_list *modes = s->precise ? &precise : &o.mode;
        const ceilings *top = &rested;
        if (s->from == PRESET_SUSTAINED) { /* its ceilings are what the power limit leaves, too */
            if (!(tired.read > 0)) {
                tired = measure_ceilings(p.content, (size_t)p.tokens * LATENT, &sustained);
                if (o.table != NULL)
                    fprintf(o.table, "# sustained: read %.0f GB/s, copy %.0f GB/s, FP8 %.0f TF\n",
                            tired.read * 1e-9, tired.copy * 1e-9, tired.fp8 * 1e-12);
            }
            top = &tired;
        }
        for (int page = 0; page < o.page.n; page++)
            for (int mode = 0; mode < modes->n; mode++)
                for (int path = 0; path < o.path.n; path++) {
                    progress(&o, "%d heads, %d x %d tokens ", s->heads, s->batch, s->kv);
                    wrong += !bench_case(&o, &p, s, o.page.v[page], modes->v[mode], o.path.v[path],
                                         top);
                }
        fixed_cost |= s->from == PRESET_LATENCY;
    }
    if (fixed_cost) wrong += bench_fixed_cost(&o, &p);
    CUDA(cudaFree(p.content));
    CUDA(cudaFree(p.scale));
    CUDA(cudaFree(p.rope));
    if (o.dataflow) wrong += bench_dataflow(&o);
    if (wrong) fprintf(stderr, "bench: %d wrong\n", wrong);
    const int reached = targets_reached(&o);
    if (o.csv != NULL && o.csv != stdout) fclose(o.csv);
    if (o.json != NULL) {
        fprintf(o.json, "\n ]}\n");
        fclose(o.json);
    }
    return wrong || !reached ? 1 : 0;
}
