/* bench_dataflow.cu - bandwidth of the kernels around attention: quantize_q, append, fetch, copies of
   pages and imports.  Every case is held to the CPU reference first; a wrong answer gets no speed.

       nvcc -O3 -std=c++17 -arch=sm_90a examples/bench_dataflow.cu -o bench_dataflow
       ./bench_dataflow                    about ten seconds
       ./bench_dataflow 65536 1,512        other sizes, in tokens: powers of two up to 524288
       ./bench_dataflow --csv FILE         the rows to FILE as well

   How it measures.  Rows of N(0,1), RoPE tables of 65536 positions, which lie at random or, where not
   said otherwise of an append, are those of requests of 4096 tokens; slots and pages in random order of
   a pool of a million tokens, and every launch takes the next part of it, so that little of what a
   launch needs is still in L2.  Launches queue behind a kernel that waits; time is that of 20 (small
   sizes: 200) launches by one pair of events, the best of 5 rounds.  An empty kernel is timed alike.
   GB/s counts every byte of rows, planes and records once, read and written.  The ceiling is the
   faster of cudaMemcpyAsync() and a copy kernel of 16-byte accesses, over 1 GiB, read + written.

   Expected output: two lines on the device and the ceiling, then a row for each call and size.
   Exit code: 0 = all right, 1 = a wrong answer or a failed call, 2 = wrong arguments or no GPU. */
#define SNAPMLA_IMPLEMENTATION
#include "../snapmla.cuh"
#define SNAPMLA_REF_IMPLEMENTATION
#include "../snapmla_ref.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { LATENT = 512, ROPE = 64, DIM = LATENT + ROPE, RECORD = 656, TOKEN = 644, PAGE = 64 };
enum { POOL = 1 << 20, MOST = POOL / 2, POSITIONS = 1 << 16, HEADS = 128, SAMPLES = 96 };
enum { TABLE = 16 }; /* pages of a request */
enum { PROMPT = 4096 }; /* tokens of a request that is appended at once */

static void require(int ok, const char *what, const char *why)
{
    if (ok) return;
    fflush(stdout);
    fprintf(stderr, "bench_dataflow: %s: %s\n", what, why);
    exit(1);
}
#define LIB(call) do { snapmla_result r_ = (call); \
    require(r_ == SNAPMLA_OK, #call, snapmla_result_string(r_)); } while (0)
#define CUDA(call) do { cudaError_t e_ = (call); \
    require(e_ == cudaSuccess, #call, cudaGetErrorString(e_)); } while (0)

/* The pool: what calls read and write, a million tokens of each. */
static uint16_t *g_rows, *g_out;  /* [POOL, DIM] */
static uint8_t *g_records;        /* [POOL, RECORD] */
static snapmla_cache g_from, g_to;
static float *g_angles, *g_weight; /* [POSITIONS, ROPE], [LATENT] */
static int64_t *g_slots, *g_positions; /* [POOL] */
static int64_t *g_prompts; /* [POOL]: positions of one request of PROMPT tokens after another */
static int32_t *g_pairs, *g_table, *g_starts, *g_many; /* see make_pool() */
static uint8_t *g_q_content;
static float *g_q_scale;
static uint16_t *g_q_rope;

/* ================================================================================================
   kernels
   ============================================================================================== */
static __host__ __device__ uint64_t mix64(uint64_t z)
{
    z += 0x9e3779b97f4a7c15u; /* the finaliser of splitmix64 */
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static __device__ float normal(uint64_t i)
{
    const uint64_t z = mix64(i);
    const float u = ((float)(uint32_t)z + 1) * 0x1p-32f, v = (float)(uint32_t)(z >> 32) * 0x1p-32f;
    return sqrtf(-2 * logf(u)) * cospif(2 * v);
}

static __device__ uint16_t bf16_bits(float x)
{
    const uint32_t u = __float_as_uint(x);
    return (uint16_t)((u + 0x7fffu + (u >> 16 & 1u)) >> 16);
}

static __global__ void fill_rows(uint16_t *x, size_t n)
{
    const size_t stride = (size_t)gridDim.x * blockDim.x;
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += stride)
        x[i] = bf16_bits(normal(i));
}

/* Any codes but NaN, scales near 1 / 100, rope of N(0,1). */
static __global__ void fill_records(uint8_t *records, int64_t n)
{
    const int64_t r = blockIdx.x;
    uint8_t *record = records + r * RECORD;
    float *scales = (float *)(record + LATENT);
    uint16_t *rope = (uint16_t *)(record + LATENT + 16);
    if (r >= n) return;
    for (int i = threadIdx.x; i < LATENT; i += blockDim.x) {
        const uint8_t code = (uint8_t)mix64((uint64_t)(r * LATENT + i));
        record[i] = (code & 0x7f) == 0x7f ? 0 : code;
    }
    const uint64_t seed = (uint64_t)r * ROPE + threadIdx.x;
    if (threadIdx.x < 4) scales[threadIdx.x] = 0.01f * (1 + 0.1f * normal(seed + ((uint64_t)1 << 40)));
    if (threadIdx.x < ROPE) rope[threadIdx.x] = bf16_bits(normal(seed));
}

static __global__ void copy_kernel(uint4 *to, const uint4 *from, size_t n)
{
    const size_t first = blockIdx.x * (size_t)1024 + threadIdx.x;
    uint4 v[4];
    for (int i = 0; i < 4; i++) if (first + i * 256 < n) v[i] = from[first + i * 256];
    for (int i = 0; i < 4; i++) if (first + i * 256 < n) to[first + i * 256] = v[i];
}

static __global__ void wait_kernel(uint64_t ns)
{
    uint64_t start, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    do asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    while (now - start < ns);
}

static __global__ void empty_kernel(void)
{
}

/* ================================================================================================
   the pool
   ============================================================================================== */
static void *device(size_t bytes)
{
    void *p = NULL;
    CUDA(cudaMalloc(&p, bytes));
    CUDA(cudaMemset(p, 0xff, bytes));
    return p;
}

static void *device_copy(const void *host, size_t bytes)
{
    void *p = device(bytes);
    CUDA(cudaMemcpy(p, host, bytes, cudaMemcpyHostToDevice));
    return p;
}

static void *host_alloc(size_t bytes)
{
    void *p = malloc(bytes);
    require(p != NULL, "malloc", "out of memory");
    return p;
}

static snapmla_cache new_cache(void)
{
    snapmla_cache c = {};
    c.content = device((size_t)POOL * LATENT);
    c.scale = (float *)device((size_t)POOL * 4);
    c.rope = device((size_t)POOL * ROPE * 2);
    c.pages = POOL / PAGE;
    return c;
}

static void make_pool(void)
{
    enum { PAGES = POOL / PAGE };
    int32_t *order = (int32_t *)host_alloc(PAGES * 4), *pairs = (int32_t *)host_alloc(PAGES * 8);
    int64_t *slots = (int64_t *)host_alloc((size_t)POOL * 8), *at = (int64_t *)host_alloc((size_t)POOL * 8);
    float *angles = (float *)host_alloc((size_t)POSITIONS * ROPE * 4), weight[LATENT];
    int32_t *starts = (int32_t *)host_alloc((size_t)(POOL + 1) * 4);
    g_rows = (uint16_t *)device((size_t)POOL * DIM * 2);
    g_out = (uint16_t *)device((size_t)POOL * DIM * 2);
    g_records = (uint8_t *)device((size_t)POOL * RECORD);
    g_from = new_cache();
    g_to = new_cache();
    g_q_content = (uint8_t *)device((size_t)POOL * LATENT);
    g_q_scale = (float *)device((size_t)POOL * 4);
    g_q_rope = (uint16_t *)device((size_t)POOL * ROPE * 2);
    for (int i = 0; i < PAGES; i++) order[i] = i;
    for (int i = PAGES - 1; i > 0; i--) {
        const int j = (int)(mix64((uint64_t)i) % (uint64_t)(i + 1)), t = order[i];
        order[i] = order[j];
        order[j] = t;
    }
    for (int i = 0; i < POOL; i++) {
        slots[i] = (int64_t)order[i / PAGE] * PAGE + i % PAGE;
        at[i] = (int64_t)(mix64((uint64_t)i + 77) % POSITIONS);
    }
    for (int i = 0; i < PAGES; i++) { /* from a random page to another random page */
        pairs[2 * i] = order[i];
        pairs[2 * i + 1] = order[(i + PAGES / 3) % PAGES];
    }
    for (int p = 0; p < POSITIONS; p++)
        for (int i = 0; i < ROPE / 2; i++) {
            angles[p * ROPE + i] = (float)cos(p * pow(10000, -2.0 * i / ROPE));
            angles[p * ROPE + ROPE / 2 + i] = (float)sin(p * pow(10000, -2.0 * i / ROPE));
        }
    for (int i = 0; i < LATENT; i++) weight[i] = 1 + 0.25f * (float)((i * 37) % 11 - 5) / 5;
    g_slots = (int64_t *)device_copy(slots, (size_t)POOL * 8);
    g_positions = (int64_t *)device_copy(at, (size_t)POOL * 8);
    g_pairs = (int32_t *)device_copy(pairs, PAGES * 8);
    g_table = (int32_t *)device_copy(order, PAGES * 4); /* [PAGES / TABLE, TABLE] */
    for (int i = 0; i < POOL; i++) at[i] = i % PROMPT;
    g_prompts = (int64_t *)device_copy(at, (size_t)POOL * 8);
    g_angles = (float *)device_copy(angles, (size_t)POSITIONS * ROPE * 4);
    g_weight = (float *)device_copy(weight, sizeof weight);
    for (int i = 0; i <= POOL; i++) starts[i] = i; /* one row a request ... */
    g_starts = (int32_t *)device_copy(starts, (size_t)(POOL + 1) * 4);
    for (int i = 0; i <= PAGES / TABLE; i++) starts[i] = i * TABLE * PAGE; /* ... or all its pages */
    g_many = (int32_t *)device_copy(starts, (size_t)(PAGES / TABLE + 1) * 4);
    fill_rows<<<4096, 256>>>(g_rows, (size_t)POOL * DIM);
    fill_records<<<POOL, 128>>>(g_records, POOL);
    CUDA(cudaDeviceSynchronize());
    free(order);
    free(pairs);
    free(slots);
    free(at);
    free(angles);
    free(starts);
}

/* ================================================================================================
   the calls: n tokens from number `first` of the pool on
   ============================================================================================== */
typedef void (*call)(int64_t first, int64_t n);

static void quantize(int64_t first, int64_t n, int rotate)
{
    snapmla_quantize_q_desc d = {};
    d.heads = n % HEADS == 0 ? HEADS : 1; /* n rows in all */
    d.tokens = n / d.heads;
    d.q = g_rows + first * DIM;
    d.q_content = g_q_content + first * LATENT;
    d.q_scale = g_q_scale + first;
    d.q_rope = g_q_rope + first * ROPE;
    if (rotate) {
        d.rotation.positions = g_positions + first;
        d.rotation.cosines = g_angles;
    }
    LIB(snapmla_quantize_q(&d));
}

static void quantize_plain(int64_t first, int64_t n) { quantize(first, n, 0); }
static void quantize_rotated(int64_t first, int64_t n) { quantize(first, n, 1); }

static snapmla_append_desc append_desc(int64_t first, int64_t n)
{
    snapmla_append_desc d = {};
    d.cache = g_to;
    d.tokens = n;
    d.latent = g_rows + first * DIM;
    d.slots = g_slots + first;
    return d;
}

static void append_plain(int64_t first, int64_t n)
{
    const snapmla_append_desc d = append_desc(first, n);
    LIB(snapmla_append(&d));
}

static void append_front(int64_t first, int64_t n, const int64_t *positions)
{
    snapmla_append_desc d = append_desc(first, n);
    d.norm.weight = g_weight;
    d.norm.weight_type = SNAPMLA_NUMBER_F32;
    d.rotation.positions = positions + first;
    d.rotation.cosines = g_angles;
    LIB(snapmla_append(&d));
}

/* Prompts, and tokens at random positions, whose angles are 256 more bytes to read for each. */
static void append_raw(int64_t first, int64_t n) { append_front(first, n, g_prompts); }
static void append_anywhere(int64_t first, int64_t n) { append_front(first, n, g_positions); }

static void fetch_slots(int64_t first, int64_t n)
{
    snapmla_fetch_desc d = {};
    d.cache = g_from;
    d.tokens = n;
    d.slots = g_slots + first;
    d.latent = g_out + first * DIM;
    LIB(snapmla_fetch(&d));
}

/* Requests of 1024 tokens, or, of few tokens, one token of as many requests: then not the tokens of
   fetch_slots(), but the first of each request. */
static void fetch_ranges(int64_t first, int64_t n)
{
    const int64_t each = n >= TABLE * PAGE ? TABLE * PAGE : 1, requests = POOL / (TABLE * PAGE);
    const int64_t request = each == 1 ? first % (requests - n + 1) : first / each;
    snapmla_fetch_desc d = {};
    d.cache = g_from;
    d.tokens = n;
    d.latent = g_out + first * DIM;
    d.block_table = g_table + request * TABLE;
    d.block_table_width = TABLE;
    d.batch = (int32_t)(n / each);
    d.row_starts = each == 1 ? g_starts : g_many;
    LIB(snapmla_fetch(&d));
}

static void copy_pages(int64_t first, int64_t n)
{
    snapmla_copy_pages_desc d = {};
    d.layers = 1;
    d.source = &g_from;
    d.destination = &g_to;
    d.count = n / PAGE;
    d.pairs = g_pairs + first / PAGE * 2;
    LIB(snapmla_copy_pages(&d));
}

static void import_from(const void *source, snapmla_source_format format, int64_t first, int64_t n)
{
    snapmla_import_desc d = {};
    d.cache = g_to;
    d.format = format;
    d.source = source;
    d.tokens = n;
    d.slots = g_slots + first;
    d.source_slots = g_slots + POOL - first - n; /* another random order */
    LIB(snapmla_import(&d));
}

static void import_bf16(int64_t first, int64_t n) { import_from(g_rows, SNAPMLA_SOURCE_BF16, first, n); }
static void import_records(int64_t first, int64_t n)
{
    import_from(g_records, SNAPMLA_SOURCE_RECORD_656, first, n);
}

/* ================================================================================================
   checks: a token of the call's result against the reference
   ============================================================================================== */
typedef struct token {
    uint8_t content[LATENT];
    float scale;
    uint16_t rope[ROPE];
} token;

static void get(void *to, const void *from, size_t bytes)
{
    CUDA(cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToHost));
}

static int64_t get_i64(const int64_t *from)
{
    int64_t x;
    get(&x, from, sizeof x);
    return x;
}

static token get_token(const snapmla_cache *c, int64_t slot)
{
    token t;
    get(t.content, (const uint8_t *)c->content + slot * LATENT, sizeof t.content);
    get(&t.scale, c->scale + slot, sizeof t.scale);
    get(t.rope, (const uint16_t *)c->rope + slot * ROPE, sizeof t.rope);
    return t;
}

static int same(const token *a, const token *b)
{
    return memcmp(a->content, b->content, sizeof a->content) == 0
        && memcmp(&a->scale, &b->scale, sizeof a->scale) == 0
        && memcmp(a->rope, b->rope, sizeof a->rope) == 0;
}

static snapmla_ref_cache one_token(token *t)
{
    snapmla_ref_cache c = {};
    c.content = t->content;
    c.scale = &t->scale;
    c.rope = t->rope;
    c.pages = c.page_size = 1;
    return c;
}

static void norm_and_rotate(uint16_t *row, int64_t position, int norm)
{
    float angles[ROPE], weight[LATENT];
    get(angles, g_angles + position * ROPE, sizeof angles);
    get(weight, g_weight, sizeof weight);
    snapmla_ref_norm n = {};
    n.weight = weight;
    n.weight_type = SNAPMLA_REF_NUMBER_F32;
    if (norm) snapmla_ref_rms_norm(row, LATENT, &n, row);
    snapmla_ref_rotate(row + LATENT, ROPE, angles, angles + ROPE / 2, SNAPMLA_REF_ROPE_INTERLEAVED,
                       row + LATENT);
}

/* Token number i of a call of n tokens from `first` on. */
static int token_is_right(call run, int64_t first, int64_t n, int64_t i)
{
    uint16_t row[DIM], got_row[DIM];
    uint8_t record[RECORD];
    token want, got;
    memset(&want, 0, sizeof want);
    const int64_t index = first + i;
    if (run == copy_pages) {
        int32_t pair[2];
        get(pair, g_pairs + index / PAGE * 2, sizeof pair);
        want = get_token(&g_from, (int64_t)pair[0] * PAGE + i % PAGE);
        got = get_token(&g_to, (int64_t)pair[1] * PAGE + i % PAGE);
        return same(&want, &got);
    }
    if (run == fetch_slots || run == fetch_ranges) {
        int64_t slot = get_i64(g_slots + index), zero = 0;
        if (run == fetch_ranges && n < TABLE * PAGE) {
            int32_t page;
            get(&page, g_table + (first % (POOL / (TABLE * PAGE) - n + 1) + i) * TABLE, sizeof page);
            slot = (int64_t)page * PAGE;
        }
        snapmla_ref_fetch_desc f = {};
        want = get_token(&g_from, slot);
        f.cache = one_token(&want);
        f.tokens = 1;
        f.slots = &zero;
        f.latent = row;
        require(snapmla_ref_fetch(&f) == 0, "snapmla_ref_fetch", "refused");
        get(got_row, g_out + index * DIM, sizeof got_row);
        return memcmp(row, got_row, sizeof row) == 0;
    }
    if (run == import_bf16 || run == import_records) {
        const int64_t from = get_i64(g_slots + POOL - first - n + i);
        snapmla_ref_import_desc d = {};
        get(row, g_rows + from * DIM, sizeof row);
        get(record, g_records + from * RECORD, sizeof record);
        d.cache = one_token(&want);
        d.format = run == import_bf16 ? SNAPMLA_REF_SOURCE_BF16 : SNAPMLA_REF_SOURCE_RECORD_656;
        d.source = run == import_bf16 ? (const void *)row : (const void *)record;
        d.tokens = 1;
        require(snapmla_ref_import(&d) == 0, "snapmla_ref_import", "refused");
        got = get_token(&g_to, get_i64(g_slots + index));
        return same(&want, &got);
    }
    get(row, g_rows + index * DIM, sizeof row);
    if (run == quantize_rotated)
        norm_and_rotate(row, get_i64(g_positions + first + i / (n % HEADS == 0 ? HEADS : 1)), 0);
    if (run == append_raw) norm_and_rotate(row, get_i64(g_prompts + index), 1);
    if (run == append_anywhere) norm_and_rotate(row, get_i64(g_positions + index), 1);
    snapmla_ref_quantize(row, LATENT, row + LATENT, ROPE, want.content, &want.scale, want.rope);
    if (run == append_plain || run == append_raw || run == append_anywhere) {
        got = get_token(&g_to, get_i64(g_slots + index));
    } else {
        get(got.content, g_q_content + index * LATENT, sizeof got.content);
        get(&got.scale, g_q_scale + index, sizeof got.scale);
        get(got.rope, g_q_rope + index * ROPE, sizeof got.rope);
    }
    return same(&want, &got);
}

static void poison_results(void)
{
    CUDA(cudaMemset(g_to.content, 0xff, (size_t)POOL * LATENT));
    CUDA(cudaMemset(g_to.scale, 0xff, (size_t)POOL * 4));
    CUDA(cudaMemset(g_to.rope, 0xff, (size_t)POOL * ROPE * 2));
    CUDA(cudaMemset(g_q_content, 0xff, (size_t)POOL * LATENT));
    CUDA(cudaMemset(g_q_scale, 0xff, (size_t)POOL * 4));
    CUDA(cudaMemset(g_q_rope, 0xff, (size_t)POOL * ROPE * 2));
    CUDA(cudaMemset(g_out, 0xff, (size_t)POOL * DIM * 2));
}

/* The first, the last and random tokens; -1 or the number of a wrong one. */
static int64_t first_wrong(call run, int64_t n)
{
    const int64_t first = n % POOL; /* the second part of the pool */
    poison_results();
    run(first, n);
    CUDA(cudaDeviceSynchronize());
    for (int s = 0; s < SAMPLES; s++) {
        int64_t i = s < 8 ? s : s < 16 ? n - 1 - (s - 8) : (int64_t)(mix64((uint64_t)s) % (uint64_t)n);
        if (i < 0 || i >= n) continue;
        if (!token_is_right(run, first, n, i)) return i;
    }
    return -1;
}

/* ================================================================================================
   times
   ============================================================================================== */
static void nothing(int64_t first, int64_t n)
{
    (void)first, (void)n;
    empty_kernel<<<1, 1>>>();
}

static void copy_by_kernel(int64_t first, int64_t n) /* n tokens of 1152 bytes */
{
    const size_t units = (size_t)n * DIM * 2 / 16;
    copy_kernel<<<(unsigned)((units + 1023) / 1024), 256>>>((uint4 *)(g_out + first * DIM),
                                                            (const uint4 *)(g_rows + first * DIM), units);
}

static void copy_by_runtime(int64_t first, int64_t n)
{
    CUDA(cudaMemcpyAsync(g_out + first * DIM, g_rows + first * DIM, (size_t)n * DIM * 2,
                         cudaMemcpyDeviceToDevice));
}

/* Microseconds a call; < 0: the CPU was too slow to queue the launches in time. */
static double microseconds(call run, int64_t n)
{
    const int launches = n >= 65536 ? 20 : 200;
    const int64_t parts = POOL / n;
    cudaEvent_t start, end, released;
    double best = 1e30;
    int64_t turn = 0;
    CUDA(cudaEventCreate(&start));
    CUDA(cudaEventCreate(&end));
    CUDA(cudaEventCreate(&released));
    int queued = 0;
    for (int round = 0; round < 6; round++) { /* the first warms up */
        float ms;
        wait_kernel<<<1, 1>>>(8000000);
        CUDA(cudaEventRecord(released));
        CUDA(cudaEventRecord(start));
        for (int i = 0; i < launches; i++) run(turn++ % parts * n, n);
        CUDA(cudaEventRecord(end));
        queued = cudaEventQuery(released) == cudaErrorNotReady;
        (void)cudaGetLastError(); /* "not ready" is the wanted answer and no error */
        CUDA(cudaEventSynchronize(end));
        CUDA(cudaEventElapsedTime(&ms, start, end));
        if (round > 0 && queued && 1000.0 * ms / launches < best) best = 1000.0 * ms / launches;
    }
    CUDA(cudaEventDestroy(start));
    CUDA(cudaEventDestroy(end));
    CUDA(cudaEventDestroy(released));
    return best < 1e30 ? best : -1;
}

typedef struct flow {
    const char *name;
    call run;
    int bytes; /* a token, read and written */
    int least; /* tokens */
} flow;

static const flow kFlows[] = {
    {"quantize_q", quantize_plain, DIM * 2 + TOKEN, 1},
    {"quantize_q + rope", quantize_rotated, DIM * 2 + TOKEN, 1},
    {"append", append_plain, DIM * 2 + TOKEN, 1},
    {"append + norm + rope", append_raw, DIM * 2 + TOKEN, 1},
    {"  at random positions", append_anywhere, DIM * 2 + TOKEN, 1},
    {"fetch by slots", fetch_slots, DIM * 2 + TOKEN, 1},
    {"fetch by ranges", fetch_ranges, DIM * 2 + TOKEN, 1},
    {"copy_pages", copy_pages, 2 * TOKEN, PAGE},
    {"import bf16", import_bf16, DIM * 2 + TOKEN, 1},
    {"import 656-byte records", import_records, RECORD + TOKEN, 1},
};

int main(int argc, char **argv)
{
    static const int kSizes[] = {MOST, 65536, 512, 32, 1};
    int sizes[16], count = 0, wrong = 0;
    FILE *csv = NULL;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--csv") == 0) {
            if (i + 1 == argc || csv != NULL || (csv = fopen(argv[++i], "w")) == NULL) {
                fprintf(stderr, "bench_dataflow: --csv takes a file that can be written\n");
                return 2;
            }
            continue;
        }
        for (char *c = argv[i]; *c; c += *c == ',') {
            const long n = strtol(c, &c, 10);
            if (n < 1 || n > MOST || (n & (n - 1)) != 0 || count == 16 || (*c != 0 && *c != ',')) {
                fprintf(stderr, "bench_dataflow: sizes are powers of two up to %d\n", MOST);
                return 2;
            }
            sizes[count++] = (int)n;
        }
    }
    if (count == 0) {
        count = sizeof kSizes / sizeof kSizes[0];
        memcpy(sizes, kSizes, sizeof kSizes);
    }
    const snapmla_result usable = snapmla_device_supported(0, NULL);
    if (usable != SNAPMLA_OK) {
        fprintf(stderr, "bench_dataflow: no usable GPU: %s\n", snapmla_result_string(usable));
        return 2;
    }
    cudaDeviceProp prop;
    CUDA(cudaGetDeviceProperties(&prop, 0));
    make_pool();
    import_bf16(0, MOST); /* a full source for fetches and copies */
    import_bf16(MOST, MOST);
    const snapmla_cache filled = g_to;
    g_to = g_from;
    g_from = filled;
    CUDA(cudaDeviceSynchronize());

    const double bytes = 2.0 * MOST * DIM * 2;
    const double by_kernel = bytes / microseconds(copy_by_kernel, MOST) * 1e-3;
    const double by_runtime = bytes / microseconds(copy_by_runtime, MOST) * 1e-3;
    const double ceiling = by_kernel > by_runtime ? by_kernel : by_runtime;
    printf("# %s, snapmla %d.%d.%d\n", prop.name, SNAPMLA_VERSION_MAJOR, SNAPMLA_VERSION_MINOR,
           SNAPMLA_VERSION_PATCH);
    printf("# copy of %d MB: kernel %.0f, cudaMemcpyAsync %.0f GB/s read + written; empty kernel %.2f us\n",
           MOST * DIM * 2 >> 20, by_kernel, by_runtime, microseconds(nothing, 512));
    if (csv != NULL) {
        char date[32];
        const time_t now = time(NULL);
        strftime(date, sizeof date, "%Y-%m-%d", gmtime(&now));
        fprintf(csv, "# %s; CUDA %d.%d; snapmla %d.%d.%d; %s\n# copy %.0f GB/s read + written\n"
                     "call,tokens,us,gb_per_s,copy_share\n",
                prop.name, CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10, SNAPMLA_VERSION_MAJOR,
                SNAPMLA_VERSION_MINOR, SNAPMLA_VERSION_PATCH, date, ceiling);
    }
    printf("%-24s %8s %9s %7s %8s %14s\n", "call", "tokens", "us", "GB/s", "ceiling", "copy, same MB");
    for (size_t f = 0; f < sizeof kFlows / sizeof kFlows[0]; f++)
        for (int s = 0; s < count; s++) {
            const int64_t n = sizes[s] < kFlows[f].least ? kFlows[f].least : sizes[s];
            if (s > 0 && sizes[s] < n && sizes[s - 1] <= n) continue; /* had that */
            const int64_t bad = first_wrong(kFlows[f].run, n);
            if (bad >= 0) {
                printf("%-24s %8lld WRONG: token %lld\n", kFlows[f].name, (long long)n, (long long)bad);
                wrong++;
                continue;
            }
            const double us = microseconds(kFlows[f].run, n);
            const double rate = (double)n * kFlows[f].bytes / us * 1e-3;
            /* a copy kernel of as many bytes, for sizes where starting it counts */
            int64_t like = n * kFlows[f].bytes / (2 * DIM * 2);
            if (like < 1) like = 1;
            const double copy_us = microseconds(copy_by_kernel, like);
            printf("%-24s %8lld %9.2f %7.0f %7.0f%% %11.2f us%s\n", kFlows[f].name, (long long)n, us, rate,
                   100 * rate / ceiling, copy_us, us < 0 ? "  (launches did not queue)" : "");
            fflush(stdout);
            if (csv != NULL && us > 0)
                fprintf(csv, "%s,%lld,%.3f,%.1f,%.4f\n", kFlows[f].name + strspn(kFlows[f].name, " "),
                        (long long)n, us, rate, rate / ceiling);
        }
    CUDA(cudaDeviceSynchronize());
    if (csv != NULL) fclose(csv);
    if (wrong) fprintf(stderr, "bench_dataflow: %d wrong\n", wrong);
    return wrong ? 1 : 0;
}
