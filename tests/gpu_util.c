/* gpu_util.c - see gpu_util.h. */
#define _POSIX_C_SOURCE 200809L
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <cmocka.h>
#include <pthread.h>
#include <unistd.h>

#include "test_util.h"
#define SNAPMLA_REF_IMPLEMENTATION
#include "gpu_util.h"

snapmla_path gpu_path = SNAPMLA_PATH_GENERAL;
snapmla_mode gpu_mode = SNAPMLA_MODE_DEFAULT;

/* ================================================================================================
   The machine
   ============================================================================================== */
static int device_state; /* 0 = not looked, 1 = there, -1 = not */
static char device_reason[160];

int gpu_present(void)
{
    if (device_state == 0) {
        int count = 0;
        const cudaError_t error = cudaGetDeviceCount(&count);
        snapmla_result result = SNAPMLA_ERROR_CUDA;
        if (error == cudaSuccess && count > 0) result = snapmla_device_supported(0, NULL);
        device_state = result == SNAPMLA_OK ? 1 : -1;
        snprintf(device_reason, sizeof device_reason, "no usable GPU (%s)",
                 error != cudaSuccess ? cudaGetErrorString(error) : snapmla_result_string(result));
        (void)cudaGetLastError();
    }
    return device_state == 1;
}

int gpu_cases;

void gpu_need(void)
{
    gpu_cases++;
    if (!gpu_present()) {
        print_message("skipped: %s\n", device_reason);
        skip();
    }
}

static int attribute(enum cudaDeviceAttr what)
{
    int value = 0;
    CUDA(cudaDeviceGetAttribute(&value, what, 0));
    return value;
}

int gpu_sm_count(void) { return attribute(cudaDevAttrMultiProcessorCount); }

int gpu_major(void) { return attribute(cudaDevAttrComputeCapabilityMajor); }

size_t gpu_free_bytes(void)
{
    size_t free_bytes = 0, total = 0;
    CUDA(cudaMemGetInfo(&free_bytes, &total));
    return free_bytes;
}

int gpu_quick(void) { return getenv("SNAPMLA_TEST_QUICK") != NULL; }

const char *gpu_path_name(snapmla_path path)
{
    return path == SNAPMLA_PATH_AUTO ? "auto" : path == SNAPMLA_PATH_GENERAL ? "general" : "sm90";
}

/* The version of the driver itself is a line of a file of its kernel module, where there is one. */
static void driver_version(char *text, size_t size)
{
    FILE *file = fopen("/proc/driver/nvidia/version", "r");
    char line[256];
    int cuda = 0;
    CUDA(cudaDriverGetVersion(&cuda));
    snprintf(text, size, "for CUDA %d.%d", cuda / 1000, cuda % 1000 / 10);
    if (!file) return;
    if (fgets(line, sizeof line, file)) {
        for (char *word = strtok(line, " \t\n"); word; word = strtok(NULL, " \t\n")) {
            if (word[0] >= '0' && word[0] <= '9' && strchr(word, '.')) {
                snprintf(text, size, "%s, for CUDA %d.%d", word, cuda / 1000, cuda % 1000 / 10);
                break;
            }
        }
    }
    fclose(file);
}

void gpu_describe(void)
{
    struct cudaDeviceProp device;
    char driver[300];
    int runtime = 0;
    if (!gpu_present()) return;
    CUDA(cudaGetDeviceProperties(&device, 0));
    CUDA(cudaRuntimeGetVersion(&runtime));
    driver_version(driver, sizeof driver);
    print_message("gpu: device: %s, compute capability %d.%d, %d SMs\n", device.name, device.major,
                  device.minor, device.multiProcessorCount);
    print_message("gpu: driver: %s\n", driver);
    print_message("gpu: runtime: CUDA %d.%d\n", runtime / 1000, runtime % 1000 / 10);
}

void gpu_cuda(const char *file, int line, const char *call, cudaError_t error)
{
    if (error != cudaSuccess) {
        print_error("%s:%d: %s: %s\n", file, line, call, cudaGetErrorString(error));
        fail();
    }
}

void gpu_result(const char *file, int line, const char *call, snapmla_result got,
                snapmla_result wanted)
{
    if (got != wanted) {
        print_error("%s:%d: %s gave %d (%s), wanted %d (%s)\n", file, line, call, (int)got,
                    snapmla_result_string(got), (int)wanted, snapmla_result_string(wanted));
        fail();
    }
}

/* ---- threads ---- */

typedef struct work {
    void (*run)(void *, int64_t);
    void *context;
    int64_t n, next, chunk;
    pthread_mutex_t lock;
} work;

static void *worker(void *arg)
{
    work *w = (work *)arg;
    for (;;) {
        pthread_mutex_lock(&w->lock);
        const int64_t first = w->next;
        w->next += w->chunk;
        pthread_mutex_unlock(&w->lock);
        if (first >= w->n) return NULL;
        const int64_t end = first + w->chunk < w->n ? first + w->chunk : w->n;
        for (int64_t i = first; i < end; i++) w->run(w->context, i);
    }
}

void parallel_for(int64_t n, void (*run)(void *, int64_t), void *context)
{
    enum { kMost = 64 };
    pthread_t threads[kMost];
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    if (cores > kMost) cores = kMost;
    if (cores > n) cores = (long)n;
    work w = {run, context, n, 0, 1, PTHREAD_MUTEX_INITIALIZER};
    if (n > 4096) w.chunk = 64;
    int started = 0;
    for (long i = 1; i < cores; i++) {
        if (pthread_create(&threads[started], NULL, worker, &w) == 0) started++;
    }
    worker(&w);
    for (int i = 0; i < started; i++) pthread_join(threads[i], NULL);
}

/* ---- numbers ---- */

enum { kQuantiles = 1 << 15 };
static float quantiles[kQuantiles];
static pthread_once_t quantiles_once = PTHREAD_ONCE_INIT;

/* x with Phi(x) = (i + 0.5) / n, by Newton steps from the middle outwards */
static void make_quantiles(void)
{
    double x = 0;
    for (int i = kQuantiles / 2; i < kQuantiles; i++) {
        const double p = (i + 0.5) / kQuantiles;
        for (int k = 0; k < 4; k++) {
            x -= (0.5 * erfc(-x / sqrt(2.0)) - p) / (exp(-0.5 * x * x) / sqrt(6.283185307179586));
        }
        quantiles[i] = (float)x;
        quantiles[kQuantiles - 1 - i] = (float)-x;
    }
}

float fast_gauss(tu_rng *rng)
{
    pthread_once(&quantiles_once, make_quantiles);
    return quantiles[tu_u64(rng) >> 49];
}

static void fill_gauss(tu_rng *rng, uint16_t *row, int n, double mean, double std, double clamp)
{
    pthread_once(&quantiles_once, make_quantiles);
    for (int i = 0; i < n; i += 4) {
        uint64_t bits = tu_u64(rng);
        for (int k = i; k < i + 4 && k < n; k++, bits >>= 16) {
            double x = mean + std * (double)quantiles[bits & (kQuantiles - 1)];
            if (clamp > 0) x = x > clamp ? clamp : x < -clamp ? -clamp : x;
            row[k] = tu_bf16(x);
        }
    }
}

/* ================================================================================================
   Device memory
   ============================================================================================== */
enum { kGuard = 1024, kGuardByte = 0xa5 };

gpu_mem gpu_new(size_t bytes, size_t shift, int fill)
{
    gpu_mem mem;
    void *base = NULL;
    CUDA(cudaMalloc(&base, bytes + shift + 2 * kGuard));
    mem.base = base;
    mem.at = (unsigned char *)base + kGuard + shift;
    mem.bytes = bytes;
    CUDA(cudaMemset(base, kGuardByte, kGuard + shift));
    CUDA(cudaMemset(mem.at + bytes, kGuardByte, kGuard));
    gpu_fill(&mem, fill);
    return mem;
}

gpu_mem gpu_new_from(const void *host, size_t bytes, size_t shift)
{
    gpu_mem mem = gpu_new(bytes, shift, 0);
    gpu_put(&mem, host);
    return mem;
}

void gpu_put(const gpu_mem *mem, const void *host)
{
    if (mem->bytes) CUDA(cudaMemcpy(mem->at, host, mem->bytes, cudaMemcpyHostToDevice));
}

void gpu_get(const gpu_mem *mem, void *host)
{
    if (mem->bytes) CUDA(cudaMemcpy(host, mem->at, mem->bytes, cudaMemcpyDeviceToHost));
}

void gpu_fill(const gpu_mem *mem, int fill)
{
    if (mem->bytes && fill != kUnfilled) CUDA(cudaMemset(mem->at, fill, mem->bytes));
}

void gpu_delete(gpu_mem *mem)
{
    unsigned char guard[2][kGuard];
    if (!mem->base) return;
    CUDA(cudaMemcpy(guard[0], mem->at - kGuard, kGuard, cudaMemcpyDeviceToHost));
    CUDA(cudaMemcpy(guard[1], mem->at + mem->bytes, kGuard, cudaMemcpyDeviceToHost));
    CUDA(cudaFree(mem->base));
    mem->base = NULL;
    TU_CHECK_FILLED(guard[0], kGuardByte, kGuard);
    TU_CHECK_FILLED(guard[1], kGuardByte, kGuard);
}

/* ================================================================================================
   Problems
   ============================================================================================== */
static double or_one(double x) { return x == 0 ? 1 : x; }

static size_t round_up(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }

uint8_t *token_content(const problem *p, int64_t page, int offset)
{
    return p->cache.content + page * p->cache.content_page_stride + (int64_t)offset * kLatent;
}

float *token_scale(const problem *p, int64_t page, int offset)
{
    return p->cache.scale + page * p->cache.scale_page_stride + offset;
}

uint16_t *token_rope(const problem *p, int64_t page, int offset)
{
    return p->cache.rope + page * p->cache.rope_page_stride + (int64_t)offset * kRope;
}

void token_write(const problem *p, int64_t page, int offset, const uint16_t *latent,
                 const uint16_t *rope)
{
    snapmla_ref_quantize(latent, kLatent, rope, kRope, token_content(p, page, offset),
                         token_scale(p, page, offset), token_rope(p, page, offset));
}

int64_t page_of(const problem *p, int b, int32_t t)
{
    return p->table[b * p->table_stride + t / p->s.page_size];
}

int offset_of(const problem *p, int32_t t) { return t % p->s.page_size; }

uint16_t *q_row(const problem *p, int b, int i, int h)
{
    return p->q + b * p->q_batch_stride + i * p->q_token_stride + h * p->q_head_stride;
}

static int32_t pages_needed(const problem *p, int32_t len)
{
    return len <= 0 ? 0 : (int32_t)(((int64_t)len + p->s.page_size - 1) / p->s.page_size);
}

/* Any value but a page id: what table entries hold that must not be read. */
static int32_t absurd_entry(tu_rng *rng)
{
    static const int32_t values[] = {-1, INT32_MAX, 2147480000, INT32_MIN, 1 << 20, -64};
    return values[tu_below(rng, sizeof values / sizeof values[0])];
}

/* Page ids for all requests, and how many tokens of each page are in use. */
static int32_t *make_table(problem *p, tu_rng *rng)
{
    int64_t used = 0, next = 0;
    p->width = 0;
    for (int b = 0; b < p->s.batch; b++) {
        const int32_t n = pages_needed(p, p->lens[b]);
        used += n;
        if (n > p->width) p->width = n;
    }
    p->width += p->s.extra_width;
    p->table_stride = p->width + (p->s.strided ? 5 : 0);
    p->cache.pages = used + p->s.spare_pages;
    int32_t *ids = (int32_t *)tu_alloc((size_t)p->cache.pages * sizeof *ids, 0);
    int32_t *filled = (int32_t *)tu_alloc((size_t)p->cache.pages * sizeof *filled, 0);
    tu_permutation(rng, ids, (int32_t)p->cache.pages, 0);
    p->table = (int32_t *)tu_alloc((size_t)(p->s.batch * p->table_stride) * sizeof *p->table, 0);
    for (int64_t i = 0; i < p->s.batch * p->table_stride; i++) p->table[i] = absurd_entry(rng);
    for (int b = 0; b < p->s.batch; b++) {
        const int32_t n = pages_needed(p, p->lens[b]);
        const int32_t other = b > 0 ? (int32_t)tu_below(rng, (uint32_t)b) : 0;
        const int32_t theirs = p->s.share && b > 0 ? pages_needed(p, p->lens[other]) : 0;
        for (int32_t k = 0; k < n; k++) {
            const int32_t left = p->lens[b] - k * p->s.page_size;
            const int32_t tokens = left < p->s.page_size ? left : p->s.page_size;
            int32_t id;
            if (k < theirs && tu_below(rng, 4) != 0)
                id = p->table[other * p->table_stride + k];
            else
                id = ids[next++];
            p->table[b * p->table_stride + k] = id;
            if (filled[id] < tokens) filled[id] = tokens;
        }
    }
    free(ids);
    return filled;
}

/* Where the planes lie; offsets are aligned to what the API asks for and to no more. */
static void make_layout(problem *p)
{
    const size_t page = (size_t)p->s.page_size, pages = (size_t)p->cache.pages;
    const size_t scale_align = page >= 4 ? 16 : 4 * page;
    size_t content = page * kLatent, scale = page * 4, rope = page * kRope * 2;
    if (p->s.layout == LAYOUT_RECORD) {
        const size_t record = round_up(content + scale, 16) + rope;
        p->content_at = 0;
        p->scale_at = content;
        p->rope_at = round_up(content + scale, 16);
        p->cache_size = pages * record;
        content = scale = rope = record;
    } else {
        if (p->s.layout == LAYOUT_PADDED) content += 48, scale += 3 * scale_align, rope += 16;
        p->content_at = 0;
        p->scale_at = round_up(pages * content, 16) + 64 + scale_align;
        p->rope_at = round_up(p->scale_at + pages * scale, 16) + 80;
        p->cache_size = p->rope_at + pages * rope;
    }
    if (pages == 0) p->cache_size = 16;
    p->cache.page_size = p->s.page_size;
    p->cache.content_page_stride = (int64_t)content;
    p->cache.scale_page_stride = (int64_t)scale / 4;
    p->cache.rope_page_stride = (int64_t)rope / 2;
    p->cache_bytes = (unsigned char *)tu_alloc(p->cache_size, 0);
    for (size_t i = 0; i < p->cache_size; i++) p->cache_bytes[i] = i & 1 ? 0x7f : 0xff;
    p->cache.content = p->cache_bytes + p->content_at;
    p->cache.scale = (float *)(void *)(p->cache_bytes + p->scale_at);
    p->cache.rope = (uint16_t *)(void *)(p->cache_bytes + p->rope_at);
}

typedef struct fill_pages {
    const problem *p;
    const int32_t *filled;
} fill_pages;

static void fill_page(void *context, int64_t page)
{
    const fill_pages *f = (const fill_pages *)context;
    const spec *s = &f->p->s;
    static const float bad_scale[4] = {NAN, INFINITY, -INFINITY, NAN};
    static const uint16_t bad_rope[4] = {0x7fc0, 0x7f80, 0xff80, 0xffc0};
    tu_rng rng = tu_seed(s->seed * 1000003u + (uint64_t)page);
    uint16_t row[kDims];
    for (int o = 0; o < s->page_size; o++) {
        if (o < f->filled[page]) {
            fill_gauss(&rng, row, kLatent, s->key_mean, or_one(s->key_std), s->clamp);
            fill_gauss(&rng, row + kLatent, kRope, 0, or_one(s->rope_std), s->clamp);
            token_write(f->p, page, o, row, row + kLatent);
        } else {
            tu_poison_e4m3(token_content(f->p, page, o), kLatent);
            *token_scale(f->p, page, o) = bad_scale[tu_below(&rng, 4)];
            for (int d = 0; d < kRope; d++) token_rope(f->p, page, o)[d] = bad_rope[(o + d) & 3];
        }
    }
}

static void fill_q(void *context, int64_t row)
{
    problem *p = (problem *)context;
    const spec *s = &p->s;
    const int64_t rows = (int64_t)s->s_q * s->heads, b = row / rows, r = row % rows;
    uint16_t *q = q_row(p, (int)b, (int)(r / s->heads), (int)(r % s->heads));
    tu_rng rng = tu_seed(s->seed * 7919u + 13u * (uint64_t)row + 1);
    fill_gauss(&rng, q, kDims, 0, or_one(s->q_std), s->clamp);
    snapmla_ref_quantize(q, kLatent, q + kLatent, kRope, p->q_content + row * kLatent,
                         p->q_scale + row, p->q_rope + row * kRope);
}

static void make_queries(problem *p)
{
    const spec *s = &p->s;
    const int64_t gap = s->strided ? 8 : 0, rows = (int64_t)s->batch * s->s_q * s->heads;
    p->q_head_stride = kDims + gap;
    p->q_token_stride = s->heads * p->q_head_stride + 3 * gap;
    p->q_batch_stride = s->s_q * p->q_token_stride + 2 * gap;
    p->q_elements = (size_t)(s->batch * p->q_batch_stride);
    p->out_head_stride = kLatent + gap;
    p->out_token_stride = s->heads * p->out_head_stride + 5 * gap;
    p->out_batch_stride = s->s_q * p->out_token_stride + gap;
    p->out_elements = (size_t)(s->batch * p->out_batch_stride);
    p->lse_token_stride = s->heads + (s->strided ? 3 : 0);
    p->lse_batch_stride = s->s_q * p->lse_token_stride + (s->strided ? 1 : 0);
    p->lse_elements = (size_t)(s->batch * p->lse_batch_stride);
    p->q = (uint16_t *)tu_alloc(2 * p->q_elements, 0xff); /* gaps are NaN */
    p->q_content = (uint8_t *)tu_alloc((size_t)rows * kLatent, 0);
    p->q_scale = (float *)tu_alloc((size_t)rows * sizeof(float), 0);
    p->q_rope = (uint16_t *)tu_alloc((size_t)rows * kRope * 2, 0);
    parallel_for(rows, fill_q, p);
}

static void upload_queries(problem *p)
{
    const size_t rows = (size_t)p->s.batch * p->s.s_q * p->s.heads;
    gpu_delete(&p->d_q);
    gpu_delete(&p->d_q_content);
    gpu_delete(&p->d_q_scale);
    gpu_delete(&p->d_q_rope);
    if (p->s.q_planes) {
        p->d_q_content = gpu_new_from(p->q_content, rows * kLatent, 16);
        p->d_q_scale = gpu_new_from(p->q_scale, rows * 4, 4);
        p->d_q_rope = gpu_new_from(p->q_rope, rows * kRope * 2, 48);
    } else {
        p->d_q = gpu_new_from(p->q, p->q_elements * 2, 16);
    }
}

void problem_upload(problem *p)
{
    gpu_delete(&p->d_cache);
    gpu_delete(&p->d_table);
    gpu_delete(&p->d_lens);
    /* a scale plane that is aligned to min(16, 4 * page_size) and no more keeps its offset */
    p->d_cache = gpu_new_from(p->cache_bytes, p->cache_size, 16);
    p->d_table = gpu_new_from(p->table, (size_t)(p->s.batch * p->table_stride) * 4, 4);
    p->d_lens = gpu_new_from(p->lens, (size_t)p->s.batch * 4, 4);
    upload_queries(p);
}

problem *problem_new(const spec *s)
{
    problem *p = (problem *)tu_alloc(sizeof *p, 0);
    tu_rng rng = tu_seed(s->seed);
    p->s = *s;
    if (p->s.page_size == 0) p->s.page_size = 64;
    if (p->s.softmax_scale == 0) p->s.softmax_scale = 1.0f / 24;
    p->lens = (int32_t *)tu_alloc((size_t)s->batch * sizeof *p->lens, 0);
    for (int b = 0; b < s->batch; b++) {
        p->lens[b] = s->lens ? s->lens[b] : (int32_t)tu_below(&rng, (uint32_t)s->max_len + 1);
    }
    p->s.lens = NULL;
    fill_pages f = {p, make_table(p, &rng)};
    make_layout(p);
    parallel_for(p->cache.pages, fill_page, &f);
    free((void *)f.filled);
    make_queries(p);
    if (gpu_present()) problem_upload(p);
    return p;
}

static void free_queries(problem *p)
{
    free(p->q);
    free(p->q_content);
    free(p->q_scale);
    free(p->q_rope);
}

void problem_requery(problem *p, uint64_t seed, int s_q, int heads, int causal)
{
    free_queries(p);
    p->s.seed = seed;
    p->s.s_q = s_q;
    p->s.heads = heads;
    p->s.causal = causal;
    make_queries(p);
    if (gpu_present()) upload_queries(p);
}

static void check_unchanged(const gpu_mem *mem, const void *host)
{
    unsigned char *copy = (unsigned char *)tu_alloc(mem->bytes, 0);
    gpu_get(mem, copy);
    TU_CHECK(memcmp(copy, host, mem->bytes) == 0, "an input of %llu bytes was written at byte %llu",
             (unsigned long long)mem->bytes,
             (unsigned long long)tu_first_difference(copy, host, mem->bytes));
    free(copy);
}

void problem_check_inputs(problem *p)
{
    check_unchanged(&p->d_cache, p->cache_bytes);
    check_unchanged(&p->d_table, p->table);
    check_unchanged(&p->d_lens, p->lens);
    if (p->s.q_planes) {
        check_unchanged(&p->d_q_content, p->q_content);
        check_unchanged(&p->d_q_scale, p->q_scale);
        check_unchanged(&p->d_q_rope, p->q_rope);
    } else {
        check_unchanged(&p->d_q, p->q);
    }
}

void problem_free(problem *p)
{
    gpu_delete(&p->d_cache);
    gpu_delete(&p->d_table);
    gpu_delete(&p->d_lens);
    gpu_delete(&p->d_q);
    gpu_delete(&p->d_q_content);
    gpu_delete(&p->d_q_scale);
    gpu_delete(&p->d_q_rope);
    free_queries(p);
    free(p->lens);
    free(p->table);
    free(p->cache_bytes);
    free(p);
}

/* Tuned paths ask for pages of 64 tokens and more; smaller ones take what AUTO gives them. */
static snapmla_path path_of(const problem *p)
{
    const int every_page = gpu_path == SNAPMLA_PATH_GENERAL || p->s.page_size >= 64;
    return every_page ? gpu_path : SNAPMLA_PATH_AUTO;
}

snapmla_decode_desc problem_desc(const problem *p)
{
    const spec *s = &p->s;
    snapmla_decode_desc d;
    memset(&d, 0, sizeof d);
    d.step.batch = s->batch;
    d.step.s_q = s->s_q;
    d.step.heads = s->heads;
    d.step.page_size = s->page_size;
    d.step.max_seq_len = s->max_seq_len;
    d.step.split_tokens = s->split_tokens;
    d.step.mode = gpu_mode;
    d.step.path = path_of(p);
    d.step.seq_lens = (const int32_t *)(const void *)p->d_lens.at;
    d.cache.pages = p->cache.pages;
    d.cache.page_size = s->page_size;
    if (p->cache.pages > 0) {
        d.cache.content = p->d_cache.at + p->content_at;
        d.cache.scale = (float *)(void *)(p->d_cache.at + p->scale_at);
        d.cache.rope = p->d_cache.at + p->rope_at;
    }
    if (s->layout != LAYOUT_DENSE) { /* dense strides are the default */
        d.cache.content_page_stride = p->cache.content_page_stride;
        d.cache.scale_page_stride = p->cache.scale_page_stride;
        d.cache.rope_page_stride = p->cache.rope_page_stride;
    }
    d.block_table = p->width ? (const int32_t *)(const void *)p->d_table.at : NULL;
    d.block_table_width = p->width;
    d.block_table_stride = p->table_stride;
    d.causal = s->causal;
    d.softmax_scale = s->softmax_scale;
    if (s->q_planes) {
        d.q_content = p->d_q_content.at;
        d.q_scale = (const float *)(const void *)p->d_q_scale.at;
        d.q_rope = p->d_q_rope.at;
    } else {
        d.q = p->d_q.at;
        d.q_batch_stride = p->q_batch_stride;
        d.q_token_stride = p->q_token_stride;
        d.q_head_stride = p->q_head_stride;
    }
    d.out_batch_stride = p->out_batch_stride;
    d.out_token_stride = p->out_token_stride;
    d.out_head_stride = p->out_head_stride;
    d.lse_batch_stride = p->lse_batch_stride;
    d.lse_token_stride = p->lse_token_stride;
    return d;
}

/* ================================================================================================
   Runs
   ============================================================================================== */
view view_all(const problem *p)
{
    view v = {0, p->s.batch, 0, p->s.s_q, 0, p->s.heads, NULL, p->s.causal};
    return v;
}

stage stage_new(problem *p, const view *v)
{
    stage s;
    size_t plan_bytes = 0, workspace_bytes = 0;
    memset(&s, 0, sizeof s);
    s.p = p;
    s.v = *v;
    s.desc = problem_desc(p);
    s.desc.step.batch = v->nb;
    s.desc.step.s_q = v->ni;
    s.desc.step.heads = v->nh;
    s.desc.causal = v->causal;
    s.lens = gpu_new_from(v->lens ? v->lens : p->lens + v->b0, (size_t)v->nb * 4, 4);
    s.desc.step.seq_lens = (const int32_t *)(const void *)s.lens.at;
    if (s.desc.block_table) s.desc.block_table += v->b0 * p->table_stride;
    if (s.desc.q) {
        s.desc.q = (const uint16_t *)s.desc.q + v->b0 * p->q_batch_stride +
                   v->i0 * p->q_token_stride + v->h0 * p->q_head_stride;
    } else if (v->nb != p->s.batch || v->ni != p->s.s_q || v->nh != p->s.heads) {
        fail_msg("quantised queries have no strides to take a part of them");
    }
    OK(snapmla_plan_bytes(&s.desc.step, &plan_bytes));
    OK(snapmla_decode_workspace(&s.desc.step, &workspace_bytes));
    const int fill = getenv("SNAPMLA_TEST_UNFILLED") ? kUnfilled : 0xff;
    s.plan = gpu_new(plan_bytes, 16, fill);
    s.workspace = gpu_new(workspace_bytes, 48, fill);
    s.out = gpu_new(p->out_elements * 2, 16, 0xff);
    s.lse = gpu_new(p->lse_elements * 4, 4, 0xff);
    s.desc.step.plan = s.plan.at;
    s.desc.step.plan_bytes = plan_bytes;
    s.desc.workspace = s.workspace.at;
    s.desc.workspace_bytes = workspace_bytes;
    s.desc.out = s.out.at;
    s.desc.lse = p->s.no_lse ? NULL : (float *)(void *)s.lse.at;
    return s;
}

void stage_poison(stage *s, int fill)
{
    gpu_fill(&s->plan, fill);
    gpu_fill(&s->workspace, fill);
    gpu_fill(&s->out, 0xff);
    gpu_fill(&s->lse, 0xff);
}

result stage_read(stage *s)
{
    const problem *p = s->p;
    const view *v = &s->v;
    const size_t rows = (size_t)v->nb * v->ni * v->nh;
    result r = {v->nb, v->ni, v->nh, NULL, NULL};
    CUDA(cudaDeviceSynchronize());
    uint16_t *out = (uint16_t *)tu_alloc(s->out.bytes, 0);
    float *lse = (float *)tu_alloc(s->lse.bytes, 0);
    gpu_get(&s->out, out);
    gpu_get(&s->lse, lse);
    r.out = (uint16_t *)tu_alloc(rows * kLatent * 2, 0);
    r.lse = (float *)tu_alloc(rows * 4, 0);
    size_t row = 0;
    for (int b = 0; b < v->nb; b++) {
        for (int i = 0; i < v->ni; i++) {
            for (int h = 0; h < v->nh; h++, row++) {
                uint16_t *from = out + b * p->out_batch_stride + i * p->out_token_stride +
                                 h * p->out_head_stride;
                float *sum = lse + b * p->lse_batch_stride + i * p->lse_token_stride + h;
                memcpy(r.out + row * kLatent, from, 2 * kLatent);
                memset(from, 0xff, 2 * kLatent);
                r.lse[row] = *sum;
                memset(sum, 0xff, sizeof *sum);
            }
        }
    }
    /* nothing but the rows was written */
    TU_CHECK_FILLED(out, 0xff, s->out.bytes);
    TU_CHECK_FILLED(lse, 0xff, s->lse.bytes);
    free(out);
    free(lse);
    return r;
}

void stage_free(stage *s)
{
    gpu_delete(&s->plan);
    gpu_delete(&s->workspace);
    gpu_delete(&s->out);
    gpu_delete(&s->lse);
    gpu_delete(&s->lens);
}

result run_view(problem *p, const view *v)
{
    stage s = stage_new(p, v);
    OK(snapmla_plan(&s.desc.step));
    OK(snapmla_decode(&s.desc));
    result r = stage_read(&s);
    stage_free(&s);
    return r;
}

result run(problem *p)
{
    const view v = view_all(p);
    return run_view(p, &v);
}

void result_free(result *r)
{
    free(r->out);
    free(r->lse);
    r->out = NULL;
    r->lse = NULL;
}

void check_same_bits(const char *file, int line, const result *a, const result *b)
{
    const int64_t rows = (int64_t)a->batch * a->s_q * a->heads;
    TU_CHECK(a->batch == b->batch && a->s_q == b->s_q && a->heads == b->heads, "shapes differ");
    for (int64_t r = 0; r < rows; r++) {
        const size_t at =
            tu_first_difference(a->out + r * kLatent, b->out + r * kLatent, 2 * kLatent);
        if (at == (size_t)-1 && memcmp(a->lse + r, b->lse + r, 4) == 0) continue;
        const int64_t d = at == (size_t)-1 ? 0 : (int64_t)at / 2;
        print_error(
            "%s:%d: bits differ: request %d, token %d, head %d, dim %d: %g and %g, lse %.9g "
            "and %.9g\n",
            file, line, (int)(r / (a->s_q * a->heads)), (int)(r / a->heads % a->s_q),
            (int)(r % a->heads), (int)d, tu_from_bf16(a->out[r * kLatent + d]),
            tu_from_bf16(b->out[r * kLatent + d]), (double)a->lse[r], (double)b->lse[r]);
        fail();
    }
}

/* ================================================================================================
   Reference
   ============================================================================================== */

/* Heads [h0, h0 + nh) of one request, all query tokens: one call of the reference. */
typedef struct unit {
    int b, h0, nh;
    int failed;
    double *out, *lse;
} unit;

typedef struct reference_job {
    const problem *p;
    snapmla_ref_fidelity fidelity;
    unit *units;
} reference_job;

/* The unit's rows of the quantised queries, dense: content, scale, rope, in memory that *q_scale
   begins. */
static int gather_planes(const problem *p, const unit *u, snapmla_ref_decode_desc *d)
{
    const int64_t rows = (int64_t)p->s.s_q * u->nh;
    float *scale = (float *)malloc((size_t)rows * (4 + kLatent + 2 * kRope) + 1);
    uint16_t *rope = (uint16_t *)(void *)(scale + rows);
    uint8_t *content = (uint8_t *)(void *)(rope + rows * kRope);
    if (!scale) return 0;
    for (int64_t r = 0; r < rows; r++) {
        const int64_t i = r / u->nh, h = u->h0 + r % u->nh;
        const int64_t from = ((int64_t)u->b * p->s.s_q + i) * p->s.heads + h;
        scale[r] = p->q_scale[from];
        memcpy(rope + r * kRope, p->q_rope + from * kRope, 2 * kRope);
        memcpy(content + r * kLatent, p->q_content + from * kLatent, kLatent);
    }
    d->q = NULL;
    d->q_token_stride = d->q_head_stride = d->q_batch_stride = 0;
    d->q_content = content;
    d->q_scale = scale;
    d->q_rope = rope;
    return 1;
}

static void run_unit(void *context, int64_t index)
{
    const reference_job *job = (const reference_job *)context;
    const problem *p = job->p;
    unit *u = job->units + index;
    const int64_t rows = (int64_t)p->s.s_q * u->nh;
    int32_t len = p->lens[u->b];
    snapmla_ref_decode_desc d;
    if (p->s.max_seq_len > 0 && len > p->s.max_seq_len) len = p->s.max_seq_len;
    memset(&d, 0, sizeof d);
    d.fidelity = job->fidelity;
    d.mode = gpu_mode == SNAPMLA_MODE_PRECISE ? SNAPMLA_REF_MODE_PRECISE : SNAPMLA_REF_MODE_DEFAULT;
    d.batch = 1;
    d.s_q = p->s.s_q;
    d.heads = u->nh;
    d.seq_lens = &len;
    d.cache = p->cache;
    d.block_table = p->table + u->b * p->table_stride;
    d.block_table_width = p->width;
    d.causal = p->s.causal;
    d.softmax_scale = p->s.softmax_scale;
    d.q = q_row(p, u->b, 0, u->h0);
    d.q_token_stride = p->q_token_stride;
    d.q_head_stride = p->q_head_stride;
    d.q_batch_stride = p->q_batch_stride;
    u->out = (double *)malloc((size_t)rows * kLatent * sizeof(double) + 1);
    u->lse = (double *)malloc((size_t)rows * sizeof(double) + 1);
    d.out64 = u->out;
    d.lse64 = u->lse;
    u->failed = !u->out || !u->lse || (p->s.q_planes && !gather_planes(p, u, &d));
    u->failed = u->failed || snapmla_ref_decode(&d) != 0;
    free((void *)(uintptr_t)d.q_scale);
}

/* One row into the verdict's sums. */
static void add_row(verdict *v, tu_error *sum, const problem *p, const result *r, const unit *u,
                    int i, int h)
{
    const int64_t got_row = ((int64_t)u->b * p->s.s_q + i) * p->s.heads + u->h0 + h;
    const int64_t ref_row = (int64_t)i * u->nh + h;
    const uint16_t *got = r->out + got_row * kLatent;
    const double *ref = u->out + ref_row * kLatent, ref_lse = u->lse[ref_row];
    const double got_lse = p->s.no_lse ? ref_lse : (double)r->lse[got_row];
    const int empty = ref_lse == -INFINITY;
    int64_t wrong = 0;
    int worst_d = 0;
    double e2 = 0, r2 = 0, worst = -1;
    for (int d = 0; d < kLatent; d++) {
        const double g = tu_from_bf16(got[d]), e = fabs(g - ref[d]);
        if (empty)
            wrong += got[d] != 0;
        else if (!isfinite(ref[d]))
            wrong += !(isnan(ref[d]) ? isnan(g) : g == ref[d]);
        else
            wrong += !isfinite(g);
        if (!isfinite(ref[d]) || !isfinite(g)) {
            if (wrong && worst < INFINITY) worst = INFINITY, worst_d = d;
            continue;
        }
        tu_error_add(sum, g, ref[d], got_row, d);
        e2 += e * e;
        r2 += ref[d] * ref[d];
        if (e > worst) worst = e, worst_d = d;
    }
    wrong += isnan(ref_lse)   ? !isnan(got_lse)
             : isinf(ref_lse) ? got_lse != ref_lse
                              : !isfinite(got_lse);
    const double rms = sqrt(tu_ratio(e2, r2));
    if (wrong || (v->wrong_nan == 0 && !(rms <= v->row_rms))) {
        if (v->wrong_nan == 0) { /* the first wrong row stays */
            v->worst_b = u->b;
            v->worst_i = i;
            v->worst_h = u->h0 + h;
            v->worst_d = worst_d;
            v->worst_got = tu_from_bf16(got[worst_d]);
            v->worst_ref = ref[worst_d];
        }
    }
    if (!(rms <= v->row_rms)) v->row_rms = rms;
    v->wrong_nan += wrong;
    v->rows++;
    if (isfinite(ref_lse) && isfinite(got_lse)) {
        const double e = fabs(got_lse - ref_lse);
        if (!(e <= v->lse_abs)) v->lse_abs = e;
        if (!(e <= v->lse_rel * fabs(ref_lse))) v->lse_rel = e / fabs(ref_lse);
    }
}

static verdict judge(const problem *p, const result *r, snapmla_ref_fidelity fidelity, unit *units,
                     int64_t n)
{
    verdict v;
    tu_error sum;
    reference_job job = {p, fidelity, units};
    int failed = 0;
    memset(&v, 0, sizeof v);
    memset(&sum, 0, sizeof sum);
    parallel_for(n, run_unit, &job);
    for (int64_t k = 0; k < n; k++) {
        const unit *u = units + k;
        failed |= u->failed;
        for (int i = 0; i < p->s.s_q && !failed; i++) {
            for (int h = 0; h < u->nh; h++) add_row(&v, &sum, p, r, u, i, h);
        }
        free(u->out);
        free(u->lse);
    }
    if (failed) fail_msg("the reference failed");
    tu_error_finish(&sum);
    v.rms = sum.rms;
    v.bias = sum.bias;
    return v;
}

static double work_of(const problem *p, int b, int nh)
{
    const int32_t len = p->lens[b] > 0 ? p->lens[b] : 0;
    return ((double)len * (kDims + kLatent) + kDims + kLatent) * p->s.s_q * nh;
}

enum { kTile = 4 }; /* query rows that the reference handles at the cost of one */

static unit unit_of(const problem *p, int b, int h0, int nh)
{
    unit u;
    memset(&u, 0, sizeof u);
    u.b = b;
    u.h0 = h0;
    u.nh = h0 + nh <= p->s.heads ? nh : p->s.heads - h0;
    return u;
}

verdict compare(const problem *p, const result *r, snapmla_ref_fidelity fidelity, double budget)
{
    if (budget == 0) budget = 2e7;
    double total = 0;
    for (int b = 0; b < p->s.batch; b++) total += work_of(p, b, p->s.heads);
    /* pieces that fill the cores, of whole register tiles of the reference */
    const int whole = total <= budget, pieces = p->s.batch >= 16 ? 1 : 16 / p->s.batch;
    int step = whole ? (p->s.heads + pieces - 1) / pieces : kTile;
    step = (step + kTile - 1) / kTile * kTile;
    const int64_t per_request = (p->s.heads + step - 1) / step, all = per_request * p->s.batch;
    unit *units = (unit *)tu_alloc((size_t)all * sizeof *units, 0);
    int64_t n = 0;
    if (whole) {
        for (int b = 0; b < p->s.batch; b++) {
            for (int h = 0; h < p->s.heads; h += step) units[n++] = unit_of(p, b, h, step);
        }
    } else {
        tu_rng rng = tu_seed(p->s.seed + 99);
        double spent = 0;
        for (int64_t tries = 0; n < all && tries < 4 * all && (n == 0 || spent < budget); tries++) {
            const int b = (int)tu_below(&rng, (uint32_t)p->s.batch);
            const unit u = unit_of(p, b, (int)tu_below(&rng, (uint32_t)per_request) * step, step);
            const double cost = work_of(p, b, u.nh);
            if (n > 0 && spent + cost > 1.5 * budget) continue;
            spent += cost;
            units[n++] = u;
        }
    }
    const verdict v = judge(p, r, fidelity, units, n);
    free(units);
    return v;
}

verdict compare_part(const problem *p, const result *r, snapmla_ref_fidelity fidelity, int b,
                     int h0, int nh)
{
    const int n = (nh + kTile - 1) / kTile;
    unit *units = (unit *)tu_alloc((size_t)n * sizeof *units, 0);
    for (int k = 0; k < n; k++) {
        const int left = nh - k * kTile;
        units[k] = unit_of(p, b, h0 + k * kTile, left < kTile ? left : kTile);
    }
    const verdict v = judge(p, r, fidelity, units, n);
    free(units);
    return v;
}

void reference_part(const problem *p, result *r, snapmla_ref_fidelity fidelity, int b, int h0,
                    int nh)
{
    unit u = unit_of(p, b, h0, nh);
    reference_job job = {p, fidelity, &u};
    run_unit(&job, 0);
    if (u.failed) fail_msg("the reference failed");
    for (int i = 0; i < p->s.s_q; i++) {
        for (int h = 0; h < u.nh; h++) {
            const int64_t to = ((int64_t)b * p->s.s_q + i) * p->s.heads + h0 + h;
            const int64_t from = (int64_t)i * u.nh + h;
            for (int d = 0; d < kLatent; d++)
                r->out[to * kLatent + d] = tu_bf16(u.out[from * kLatent + d]);
            r->lse[to] = (float)u.lse[from];
        }
    }
    free(u.out);
    free(u.lse);
}

const char *verdict_fault(const verdict *v, const bounds *limit)
{
    if (v->rows == 0) return "no row was compared";
    if (v->wrong_nan != 0) return "NaN, Inf or zero rows are not where they should be";
    if (!(v->rms <= limit->rms)) return "rms error";
    if (!(v->row_rms <= limit->row_rms)) return "rms error of a row";
    if (!(fabs(v->bias) <= limit->bias)) return "bias";
    if (!(v->lse_abs <= limit->lse_abs) && !(v->lse_rel <= limit->lse_rel)) return "lse";
    return NULL;
}

void check_verdict(const char *file, int line, const problem *p, const verdict *v,
                   const bounds *limit)
{
    const spec *s = &p->s;
    const char *fault = verdict_fault(v, limit);
    if (!fault) return;
    print_error("%s:%d: %s (path %s, mode %d)\n", file, line, fault, gpu_path_name(gpu_path),
                (int)gpu_mode);
    print_error(
        "  shape: batch %d, s_q %d, heads %d, page %d, causal %d, width %d, layout %d, share "
        "%d, planes %d, strided %d, max_seq_len %d, split %d, seed %llu\n",
        s->batch, s->s_q, s->heads, s->page_size, s->causal, p->width, (int)s->layout, s->share,
        s->q_planes, s->strided, s->max_seq_len, s->split_tokens, (unsigned long long)s->seed);
    print_error("  %lld rows: rms %.3g (limit %.3g), worst row %.3g (%.3g), bias %.3g (%.3g), lse "
                "abs %.3g (%.3g), rel %.3g (%.3g), %lld misplaced NaN, Inf or 0\n",
                (long long)v->rows, v->rms, limit->rms, v->row_rms, limit->row_rms, v->bias,
                limit->bias, v->lse_abs, limit->lse_abs, v->lse_rel, limit->lse_rel,
                (long long)v->wrong_nan);
    print_error(
        "  worst: request %d of length %d, token %d, head %d, dim %d: %.9g, expected %.9g\n",
        v->worst_b, p->lens[v->worst_b], v->worst_i, v->worst_h, v->worst_d, v->worst_got,
        v->worst_ref);
    fail();
}

void check_against_reference(const char *file, int line, problem *p, const result *r, double budget)
{
    /* A few rows may be above the average of e4m3's rounding error; no row can be above its worst
       case, half a step of the smallest mantissa. */
    verdict v = compare(p, r, SNAPMLA_REF_EXACT, budget);
    const double q_std = or_one(p->s.q_std);
    const bounds rounded = {v.rows >= 32 ? 3.2e-2 : 4.5e-2, 7e-2, 1, q_std > 1 ? 2e-2 : 2e-3, 2e-3};
    const int is_precise = gpu_mode == SNAPMLA_MODE_PRECISE, fp8 = gpu_path == SNAPMLA_PATH_SM90;
    const bounds precise = {3e-3, fp8 ? 6e-3 : 4e-3, 1, q_std > 1 ? (fp8 ? 1e-2 : 2e-3) : 1e-3,
                            fp8 ? 1e-3 : 1e-4};
    check_verdict(file, line, p, &v, is_precise ? &precise : &rounded);
    if (gpu_path != SNAPMLA_PATH_GENERAL) return;
    /* bf16 rounding, and now and then a weight that falls to the other side of a tie, in e4m3 */
    v = compare(p, r, SNAPMLA_REF_EMULATED, budget);
    const bounds emulated = {2.5e-3, is_precise ? 4e-3 : 5e-2, 1, 1e-4, 1e-5};
    check_verdict(file, line, p, &v, &emulated);
}

void check_spec(const char *file, int line, const spec *s, double budget)
{
    problem *p = problem_new(s);
    result r = run(p);
    check_against_reference(file, line, p, &r, budget);
    problem_check_inputs(p);
    result_free(&r);
    problem_free(p);
}
