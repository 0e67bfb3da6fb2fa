/* bench_util.h - what bench.cu measures with: helpers, time, and the ceilings of the GPU.
   Include after snapmla.cuh.

   The ceilings, all of the same run:
       read    a kernel of 16-byte loads over random 32 KB pieces of a large buffer
       copy    cudaMemcpyAsync() on the device, bytes read and written
       fp8     dense wgmma m64n256k32 of e4m3 out of shared memory, two warpgroups an SM, on N(0,1)
               data: what the FP8 tensor cores give while nothing else goes on; checked against
               the products in double.  Compute capability 9.0 and code for sm_90a only, else 0 */
#ifndef BENCH_UTIL_H
#define BENCH_UTIL_H

#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { LATENT = 512, ROPE = 64, DIM = LATENT + ROPE };
enum { TOKEN_BYTES = LATENT + 4 + 2 * ROPE }; /* 644, what a cached token costs */
enum { CHUNK = 32768 };                   /* bytes of a piece that the read ceiling reads */
enum { WARM_UPS = 6, MAX_ITERS = 150 };   /* 150: a stream still takes them without waiting */

typedef void (*work)(void *context); /* queues one call on the default stream */

/* How to take a time.  row = 0: the median of `iters` launches, an event before and after each.
   Else the mean of `row` launches without anything between them. */
typedef struct method {
    int iters, row, rested;
} method;

typedef struct timing {
    double median_us, min_us; /* the mean, twice, of a row */
    int queued; /* 0: the CPU was too slow, so that the time holds launch latency */
} timing;

typedef struct ceilings {
    double read, copy; /* bytes/s */
    double fp8;        /* flop/s; 0 = not measured */
    double empty_us;   /* an empty kernel, for the eye: it is not subtracted */
} ceilings;

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

/* ================================================================================================
   kernels that fill, wait and read
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

/* The same as e4m3 of 64 times the numbers, so that few saturate. */
static __global__ void bench_fill_e4m3(__nv_fp8_e4m3 *x, size_t n, uint64_t seed)
{
    size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
    if (i >= n) return;
    uint64_t bits = mix64(seed + i);
    float u = ((float)(uint32_t)bits + 1.0f) * 0x1p-32f;
    float v = (float)(uint32_t)(bits >> 32) * 0x1p-32f;
    x[i] = __nv_fp8_e4m3(64 * sqrtf(-2.0f * logf(u)) * cospif(2.0f * v));
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

/* ================================================================================================
   time
   ============================================================================================== */
static int by_value(const void *a, const void *b)
{
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

/* Lets the clocks recover, then holds the stream for so long that what follows is queued. */
static void rest_and_wait(const method *how, uint64_t wait_ns)
{
    CUDA(cudaDeviceSynchronize());
    if (how->rested) {
        struct timespec rest = {0, 200000000};
        nanosleep(&rest, NULL);
    }
    bench_wait<<<1, 1>>>(wait_ns);
}

/* From one event to the other over a row of calls, by their number. */
static timing measure_row(work call, void *context, const method *how)
{
    static cudaEvent_t start, end;
    float ms = 0;
    if (start == NULL) {
        CUDA(cudaEventCreate(&start));
        CUDA(cudaEventCreate(&end));
    }
    rest_and_wait(how, 1000000 + 20000 * (uint64_t)(how->row < 200 ? how->row : 200));
    for (int i = 0; i < WARM_UPS; i++) call(context);
    CUDA(cudaEventRecord(start));
    for (int i = 0; i < how->row; i++) call(context);
    CUDA(cudaEventRecord(end));
    CUDA(cudaDeviceSynchronize());
    CUDA(cudaEventElapsedTime(&ms, start, end));
    const timing t = {ms * 1000.0 / how->row, ms * 1000.0 / how->row, 1};
    return t;
}

static timing measure(work call, void *context, const method *how)
{
    static cudaEvent_t start[MAX_ITERS], end[MAX_ITERS], released;
    if (how->row > 0) return measure_row(call, context, how);
    if (released == NULL) {
        CUDA(cudaEventCreate(&released));
        for (int i = 0; i < MAX_ITERS; i++) {
            CUDA(cudaEventCreate(&start[i]));
            CUDA(cudaEventCreate(&end[i]));
        }
    }

    timing t = {};
    uint64_t wait_ns = 1000000 + 50000 * (uint64_t)(WARM_UPS + how->iters);
    for (int attempt = 0; attempt < 4 && !t.queued; attempt++, wait_ns *= 4) {
        rest_and_wait(how, wait_ns);
        CUDA(cudaEventRecord(released));
        for (int i = 0; i < WARM_UPS; i++) call(context);
        for (int i = 0; i < how->iters; i++) {
            CUDA(cudaEventRecord(start[i]));
            call(context);
            CUDA(cudaEventRecord(end[i]));
        }
        t.queued = cudaEventQuery(released) == cudaErrorNotReady;
        (void)cudaGetLastError(); /* "not ready" is the wanted answer and no error */
        CUDA(cudaDeviceSynchronize());
    }

    float us[MAX_ITERS];
    for (int i = 0; i < how->iters; i++) {
        CUDA(cudaEventElapsedTime(&us[i], start[i], end[i]));
        us[i] *= 1000;
    }
    qsort(us, (size_t)how->iters, sizeof us[0], by_value);
    t.min_us = us[0];
    t.median_us = (us[(how->iters - 1) / 2] + us[how->iters / 2]) / 2;
    return t;
}

static void call_empty(void *context)
{
    (void)context;
    bench_empty<<<1, 1>>>();
    CUDA(cudaGetLastError());
}

/* ================================================================================================
   the memory's ceilings
   ============================================================================================== */
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

/* Bytes a second of reading more than 4 GB, or all of a smaller buffer. */
static double read_ceiling(const void *data, size_t bytes, const method *how)
{
    read_work r = {};
    r.data = (const uint4 *)data;
    r.chunks = (uint32_t)(bytes / CHUNK);
    r.count = r.chunks < (1u << 17) ? r.chunks : 1u << 17; /* 2^17 pieces are 4.3 GB */
    r.key = (uint32_t)random64();
    r.sink = (uint32_t *)device_alloc(sizeof(uint32_t));
    timing t = measure(call_read, &r, how);
    CUDA(cudaFree(r.sink));
    return (double)r.count * CHUNK / (t.median_us * 1e-6);
}

typedef struct copy_work {
    const void *from;
    void *to;
    size_t bytes;
} copy_work;

static void call_copy(void *context)
{
    const copy_work *c = (const copy_work *)context;
    CUDA(cudaMemcpyAsync(c->to, c->from, c->bytes, cudaMemcpyDeviceToDevice, 0));
}

/* Bytes a second, read and written, of copying 1 GB, or half of a smaller buffer's size. */
static double copy_ceiling(const void *data, size_t bytes, const method *how)
{
    copy_work c = {data, NULL, bytes / 2 < ((size_t)1 << 30) ? bytes / 2 : (size_t)1 << 30};
    CUDA(cudaMalloc(&c.to, c.bytes));
    timing t = measure(call_copy, &c, how);
    CUDA(cudaFree(c.to));
    return 2.0 * (double)c.bytes / (t.median_us * 1e-6);
}

/* ================================================================================================
   the FP8 tensor cores' ceiling: each of two warpgroups multiplies 64 rows of its own with the 256
   that both share, 512 deep, again and again
   ============================================================================================== */
enum { FP8_M = 64, FP8_N = 256, FP8_K = 512, FP8_GROUPS = 2, FP8_LOOPS = 128 };
enum { FP8_ROWS = FP8_GROUPS * FP8_M };
enum { FP8_SMEM = (FP8_ROWS + FP8_N) * FP8_K + 1024 }; /* 1024: to align it */

#define BENCH_ACC8(d, i) "+f"((d)[i]), "+f"((d)[i + 1]), "+f"((d)[i + 2]), "+f"((d)[i + 3]),    \
    "+f"((d)[i + 4]), "+f"((d)[i + 5]), "+f"((d)[i + 6]), "+f"((d)[i + 7])
#define BENCH_ACC32(d, i)                                                                       \
    BENCH_ACC8(d, i), BENCH_ACC8(d, i + 8), BENCH_ACC8(d, i + 16), BENCH_ACC8(d, i + 24)

/* wgmma.mma_async.sync.aligned.m64n256k32.f32.e4m3.e4m3: d += a b, both in shared memory; PTX ISA
   "wgmma.mma_async", 8.0. */
static __device__ __forceinline__ void bench_wgmma(float (&d)[128], uint64_t a, uint64_t b)
{
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    asm volatile("wgmma.mma_async.sync.aligned.m64n256k32.f32.e4m3.e4m3 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, "
                 "%8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, "
                 "%24, %25, %26, %27, %28, %29, %30, %31, "
                 "%32, %33, %34, %35, %36, %37, %38, %39, "
                 "%40, %41, %42, %43, %44, %45, %46, %47, "
                 "%48, %49, %50, %51, %52, %53, %54, %55, "
                 "%56, %57, %58, %59, %60, %61, %62, %63, "
                 "%64, %65, %66, %67, %68, %69, %70, %71, "
                 "%72, %73, %74, %75, %76, %77, %78, %79, "
                 "%80, %81, %82, %83, %84, %85, %86, %87, "
                 "%88, %89, %90, %91, %92, %93, %94, %95, "
                 "%96, %97, %98, %99, %100, %101, %102, %103, "
                 "%104, %105, %106, %107, %108, %109, %110, %111, "
                 "%112, %113, %114, %115, %116, %117, %118, %119, "
                 "%120, %121, %122, %123, %124, %125, %126, %127}, "
                 "%128, %129, 1, 1, 1;"
                 : BENCH_ACC32(d, 0), BENCH_ACC32(d, 32), BENCH_ACC32(d, 64), BENCH_ACC32(d, 96)
                 : "l"(a), "l"(b));
#else
    (void)d, (void)a, (void)b;
#endif
}

#undef BENCH_ACC8
#undef BENCH_ACC32

/* [rows, 512] bytes to four blocks of [rows, 128], whose 16-byte pieces are swizzled as wgmma's
   128-byte mode wants it; PTX ISA "Shared Memory Matrix Layout". */
static __device__ void bench_to_tile(uint8_t *tile, const uint8_t *from, int rows)
{
    for (int i = threadIdx.x; i < rows * (FP8_K / 16); i += blockDim.x) {
        const int row = i / (FP8_K / 16), piece = i % (FP8_K / 16);
        const int at = piece / 8 * rows * 128 + row * 128 + ((piece % 8 ^ row % 8) << 4);
        *(uint4 *)(tile + at) = *(const uint4 *)(from + row * FP8_K + piece * 16);
    }
}

/* A K-major operand: address, 1024 bytes from 8 rows to the next 8, swizzle of 128 bytes. */
static __device__ uint64_t bench_descriptor(const uint8_t *tile)
{
    const uint32_t addr = (uint32_t)__cvta_generic_to_shared(tile);
    return (uint64_t)((addr & 0x3ffffu) >> 4) | (uint64_t)1 << 16 | (uint64_t)(1024 >> 4) << 32
         | (uint64_t)1 << 62;
}

/* out, [128, 256] = loops * a b; not written where wgmma is not compiled in. */
static __global__ void __launch_bounds__(FP8_GROUPS * 128, 1)
    bench_fp8(const uint8_t *a, const uint8_t *b, int loops, float *out)
{
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ uint8_t bench_smem[];
    uint8_t *tile = bench_smem + (-(uint32_t)__cvta_generic_to_shared(bench_smem) & 1023u);
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0); /* uniform */
    float d[128] = {};
    for (int g = 0; g < FP8_GROUPS; g++)
        bench_to_tile(tile + g * FP8_M * FP8_K, a + g * FP8_M * FP8_K, FP8_M);
    bench_to_tile(tile + FP8_ROWS * FP8_K, b, FP8_N);
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();

    const uint64_t da = bench_descriptor(tile + group * FP8_M * FP8_K);
    const uint64_t db = bench_descriptor(tile + FP8_ROWS * FP8_K);
    for (int loop = 0; loop < loops; loop++) {
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int k = 0; k < FP8_K / 32; k++) /* 32 bytes on in a block, or one block on */
            bench_wgmma(d, da + k % 4 * 2 + k / 4 * (FP8_M * 128 >> 4),
                        db + k % 4 * 2 + k / 4 * (FP8_N * 128 >> 4));
        asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;"
                     ::: "memory");
    }

    if (blockIdx.x != 0) return;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 128; i++) {
        const int row = warp * 16 + lane / 4 + (i & 2) * 4;
        const int column = i / 4 * 8 + lane % 4 * 2 + i % 2;
        out[row * FP8_N + column] = d[i];
    }
#else
    (void)a, (void)b, (void)loops, (void)out;
#endif
}

typedef struct fp8_work {
    uint8_t *a, *b;
    float *out;
    int blocks, loops;
} fp8_work;

static void call_fp8(void *context)
{
    const fp8_work *f = (const fp8_work *)context;
    bench_fp8<<<f->blocks, FP8_GROUPS * 128, FP8_SMEM>>>(f->a, f->b, f->loops, f->out);
    CUDA(cudaGetLastError());
}

/* 1: as it should be, 0: not written at all.  Anything else ends the program. */
static int fp8_is_right(const uint8_t *d_a, const uint8_t *d_b, const float *d_out)
{
    const size_t a_bytes = FP8_ROWS * FP8_K, b_bytes = FP8_N * FP8_K;
    const size_t out_bytes = FP8_ROWS * FP8_N * sizeof(float);
    __nv_fp8_e4m3 *a = (__nv_fp8_e4m3 *)host_alloc(a_bytes);
    __nv_fp8_e4m3 *b = (__nv_fp8_e4m3 *)host_alloc(b_bytes);
    float *out = (float *)host_alloc(out_bytes);
    double error = 0, norm = 0;
    CUDA(cudaMemcpy(a, d_a, a_bytes, cudaMemcpyDeviceToHost));
    CUDA(cudaMemcpy(b, d_b, b_bytes, cudaMemcpyDeviceToHost));
    CUDA(cudaMemcpy(out, d_out, out_bytes, cudaMemcpyDeviceToHost));
    const int written = !(out[0] != out[0]);
    for (int i = 0; i < FP8_ROWS * FP8_N && written; i += 7) {
        double sum = 0;
        for (int k = 0; k < FP8_K; k++)
            sum += (double)(float)a[i / FP8_N * FP8_K + k] * (float)b[i % FP8_N * FP8_K + k];
        error += (out[i] - sum) * (out[i] - sum);
        norm += sum * sum;
    }
    /* the tensor core keeps 13 fraction bits of a sum: about 4e-4 */
    require(!written || sqrt(error / norm) <= 5e-3, "fp8 ceiling", "a wrong product");
    free(out), free(b), free(a);
    return written;
}

/* Flop a second, or 0 where this GPU or build has no wgmma. */
static double fp8_ceiling(const method *how)
{
    fp8_work f = {};
    timing t = {};
    int device = 0, major = 0, minor = 0, smem = 0, right = 0;
    CUDA(cudaGetDevice(&device));
    CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    CUDA(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
    CUDA(cudaDeviceGetAttribute(&f.blocks, cudaDevAttrMultiProcessorCount, device));
    CUDA(cudaDeviceGetAttribute(&smem, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
    if (major != 9 || minor != 0 || smem < FP8_SMEM) return 0;

    CUDA(cudaFuncSetAttribute(bench_fp8, cudaFuncAttributeMaxDynamicSharedMemorySize, FP8_SMEM));
    f.a = (uint8_t *)device_alloc(FP8_ROWS * FP8_K);
    f.b = (uint8_t *)device_alloc(FP8_N * FP8_K);
    f.out = (float *)device_alloc(FP8_ROWS * FP8_N * sizeof(float));
    f.loops = 1;
    bench_fill_e4m3<<<FP8_ROWS * FP8_K / 256, 256>>>((__nv_fp8_e4m3 *)f.a, FP8_ROWS * FP8_K,
                                                     random64());
    bench_fill_e4m3<<<FP8_N * FP8_K / 256, 256>>>((__nv_fp8_e4m3 *)f.b, FP8_N * FP8_K, random64());
    CUDA(cudaGetLastError());
    call_fp8(&f);
    right = fp8_is_right(f.a, f.b, f.out);
    if (right) {
        f.loops = FP8_LOOPS;
        t = measure(call_fp8, &f, how);
    }
    CUDA(cudaFree(f.out));
    CUDA(cudaFree(f.b));
    CUDA(cudaFree(f.a));
    if (!right) return 0;
    return 2.0 * f.blocks * FP8_ROWS * FP8_N * FP8_K * FP8_LOOPS / (t.median_us * 1e-6);
}

static ceilings measure_ceilings(const void *data, size_t bytes, const method *how)
{
    ceilings c = {};
    c.read = read_ceiling(data, bytes, how);
    c.copy = copy_ceiling(data, bytes, how);
    c.fp8 = fp8_ceiling(how);
    c.empty_us = measure(call_empty, NULL, how).median_us;
    return c;
}

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

#endif /* BENCH_UTIL_H */
