/* 03_cuda_graph.cu - a decoding step captured once and replayed 1000 times, while the requests grow
   token by token over page borders; sampled steps are held to the CPU reference.

       nvcc -O3 -std=c++17 -gencode arch=compute_90a,code=sm_90a examples/03_cuda_graph.cu -o graph

   Another GPU takes its own number: 80, 86, 89, 100, 120.  Expected output; times and errors differ:

       captured: 5 nodes
       step    1: lengths   1    2   64   65  301 3001: out error 1.5e-02 (3.2e-02), lse 5e-07 (2e-03)
       step   64: lengths  64   65  127  128  364 3064: out error 1.6e-02 (3.2e-02), lse 6e-07 (2e-03)
       ...
       step 1000: lengths 1000 1001 1063 1064 1300 4000: out error 1.6e-02 (3.2e-02), lse 6e-07 (2e-03)
       1000 steps, 21.3 us each
       OK

   What makes it work: every kernel reads lengths, slots, keys and queries from device memory when it
   runs, at addresses that stay; sizes of plan and workspace do not depend on lengths; nothing waits for
   the host.  The captured table width bounds how far the requests can grow.

   Exit code: 0 = OK, 1 = wrong or failed, 2 = no GPU that can run it (the reason is printed). */
#define SNAPMLA_IMPLEMENTATION
#include "../snapmla.cuh"
#define SNAPMLA_REF_IMPLEMENTATION
#include "../snapmla_ref.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BATCH = 6, HEADS = 16, LATENT = 512, ROPE = 64, DIM = LATENT + ROPE };
enum { PAGE = 64, WIDTH = 64, PAGES = BATCH * WIDTH, TOKENS = PAGES * PAGE };
enum { STEPS = 1000, POOL = 4096, ROWS = BATCH * HEADS };

static const int32_t kStart[BATCH] = {0, 1, 63, 64, 300, 3000}; /* tokens cached before step 1 */
static const int kSampled[] = {1, 2, 64, 65, 128, 500, 999, 1000};

/* Keys and queries of all steps come out of a pool of random rows. */
static uint16_t pool[2 * POOL * DIM];
static uint16_t q[ROWS * DIM], out[ROWS * LATENT], latent[TOKENS * DIM];
static float lse[ROWS], ref_lse[ROWS];
static double ref_out[ROWS * LATENT];
static int32_t table[PAGES];
static int64_t slots[TOKENS];

/* The reference keeps a cache of its own, so that its quantisation is compared as well. */
static uint8_t ref_content[TOKENS * LATENT];
static float ref_scale[TOKENS];
static uint16_t ref_rope[TOKENS * ROPE];

static void require(int ok, const char *what, const char *why)
{
    if (!ok) {
        fprintf(stderr, "%s: %s\n", what, why);
        exit(1);
    }
}
#define LIB(call) do { snapmla_result r_ = (call); \
    require(r_ == SNAPMLA_OK, #call, snapmla_result_string(r_)); } while (0)
#define CUDA(call) do { cudaError_t e_ = (call); \
    require(e_ == cudaSuccess, #call, cudaGetErrorString(e_)); } while (0)

/* Device memory with a copy of host in it, or, to show that nothing relies on zeros, with NaN. */
static void *device(const void *host, size_t bytes)
{
    void *p = NULL;
    CUDA(cudaMalloc(&p, bytes));
    CUDA(host ? cudaMemcpy(p, host, bytes, cudaMemcpyHostToDevice) : cudaMemset(p, 0xff, bytes));
    return p;
}

/* BF16 numbers of mean 0 and variance 1: four uniform ones added up. */
static void fill(uint16_t *x, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        float sum = 0;
        for (int k = 0; k < 4; k++) sum += (float)rand() / (float)RAND_MAX - 0.5f;
        x[i] = snapmla_ref_bf16_from_float(sum * 1.7320508f);
    }
}

static __host__ __device__ int key_row(int b, int t) { return (b * 977 + t * 31) % POOL; }
static __host__ __device__ int q_row(int b, int h, int t)
{
    return POOL + (b * 61 + h * 7 + t * 13) % POOL;
}
static __host__ __device__ int64_t slot_of(const int32_t *pages, int t)
{
    return (int64_t)pages[t / PAGE] * PAGE + t % PAGE;
}

/* What a model does before attention, one block a request: the next token's key and queries, its
   slot, and a length that counts it. */
static __global__ void next_token(const uint16_t *rows, const int32_t *pages, int32_t *lens,
                                  int64_t *slot, uint16_t *key, uint16_t *queries)
{
    const int b = blockIdx.x, t = lens[b];
    for (int i = threadIdx.x; i < DIM; i += blockDim.x) {
        key[b * DIM + i] = rows[key_row(b, t) * DIM + i];
        for (int h = 0; h < HEADS; h++)
            queries[(b * HEADS + h) * DIM + i] = rows[q_row(b, h, t) * DIM + i];
    }
    __syncthreads(); /* all have read the length */
    if (threadIdx.x == 0) {
        slot[b] = slot_of(pages + b * WIDTH, t);
        lens[b] = t + 1;
    }
}

/* Tokens [from[b], to[b]) of each request into the reference's cache; keys and slots stay in `latent`
   and `slots`, and their number is returned. */
static int64_t ref_append(const snapmla_ref_cache *cache, const int32_t *from, const int32_t *to)
{
    snapmla_ref_append_desc a = {};
    for (int b = 0; b < BATCH; b++)
        for (int t = from[b]; t < to[b]; t++, a.tokens++) {
            memcpy(latent + a.tokens * DIM, pool + key_row(b, t) * DIM, DIM * 2);
            slots[a.tokens] = slot_of(table + b * WIDTH, t);
        }
    a.cache = *cache, a.latent = latent, a.slots = slots;
    require(snapmla_ref_append(&a) == 0, "snapmla_ref_append", "refused");
    return a.tokens;
}

/* The step's results against the reference; 0 if they are right. */
static int check(int step, const int32_t *lens, const snapmla_ref_cache *cache, float scale)
{
    snapmla_ref_decode_desc d = {};
    for (int b = 0; b < BATCH; b++)
        for (int h = 0; h < HEADS; h++)
            memcpy(q + (b * HEADS + h) * DIM, pool + q_row(b, h, lens[b] - 1) * DIM, DIM * 2);
    d.fidelity = SNAPMLA_REF_EXACT, d.batch = BATCH, d.s_q = 1, d.heads = HEADS;
    d.seq_lens = lens, d.cache = *cache, d.block_table = table, d.block_table_width = WIDTH;
    d.softmax_scale = scale, d.q = q, d.out64 = ref_out, d.lse = ref_lse;
    require(snapmla_ref_decode(&d) == 0, "snapmla_ref_decode", "refused");

    int bad = 0; /* counted beside the maxima, where NaN would hide */
    double worst = 0, lse_error = 0;
    for (int b = 0; b < BATCH; b++) {
        double error = 0, norm = 0;
        for (int i = b * HEADS * LATENT; i < (b + 1) * HEADS * LATENT; i++) {
            double e = snapmla_ref_bf16_to_float(out[i]) - ref_out[i];
            error += e * e, norm += ref_out[i] * ref_out[i];
        }
        double rms = sqrt(error / norm); /* relative */
        bad += !(rms <= 3.2e-2), worst = fmax(worst, rms);
    }
    for (int i = 0; i < ROWS; i++) {
        double e = fabs(lse[i] - ref_lse[i]);
        bad += !(e <= 2e-3), lse_error = fmax(lse_error, e);
    }
    printf("step %4d: lengths", step);
    for (int b = 0; b < BATCH; b++) printf(" %4d", lens[b]);
    printf(": out error %.1e (3.2e-02), lse %.0e (2e-03)%s\n", worst, lse_error, bad ? " WRONG" : "");
    return bad;
}

int main(void)
{
    snapmla_result usable = snapmla_device_supported(0, NULL);
    if (usable != SNAPMLA_OK) {
        printf("no usable GPU: %s\n", snapmla_result_string(usable));
        return 2;
    }
    fill(pool, sizeof pool / sizeof pool[0]);
    for (int i = 0; i < PAGES; i++) table[i] = (i * 7 + 3) % PAGES; /* scattered */
    snapmla_ref_cache ref = {};
    ref.content = ref_content, ref.scale = ref_scale, ref.rope = ref_rope, ref.pages = PAGES;
    const int32_t none[BATCH] = {};
    const int64_t before = ref_append(&ref, none, kStart);

    /* The prompts, as one append outside the graph. */
    snapmla_append_desc append = {};
    append.cache.content = device(NULL, TOKENS * LATENT);
    append.cache.scale = (float *)device(NULL, TOKENS * sizeof(float));
    append.cache.rope = device(NULL, TOKENS * ROPE * 2);
    append.cache.pages = PAGES;
    append.tokens = before;
    append.latent = device(latent, sizeof latent); /* rope right behind each latent row */
    append.slots = (const int64_t *)device(slots, sizeof slots);
    LIB(snapmla_append(&append));
    CUDA(cudaDeviceSynchronize());

    /* The step: addresses and sizes, none of which depends on a length. */
    cudaStream_t stream;
    CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    const uint16_t *d_pool = (const uint16_t *)device(pool, sizeof pool);
    const int32_t *d_table = (const int32_t *)device(table, sizeof table);
    int32_t *d_lens = (int32_t *)device(kStart, sizeof kStart);
    uint16_t *d_q = (uint16_t *)device(NULL, sizeof q);
    append.tokens = BATCH, append.stream = stream;

    snapmla_decode_desc d = {};
    d.step.batch = BATCH, d.step.s_q = 1, d.step.heads = HEADS, d.step.stream = stream;
    d.step.seq_lens = d_lens;
    LIB(snapmla_plan_bytes(&d.step, &d.step.plan_bytes));
    LIB(snapmla_decode_workspace(&d.step, &d.workspace_bytes));
    d.step.plan = device(NULL, d.step.plan_bytes);
    d.workspace = device(NULL, d.workspace_bytes);
    d.cache = append.cache, d.block_table = d_table, d.block_table_width = WIDTH;
    d.softmax_scale = 1 / sqrtf(DIM);
    d.q = d_q, d.out = device(NULL, sizeof out), d.lse = (float *)device(NULL, sizeof lse);

    cudaGraph_t graph;
    cudaGraphExec_t exec;
    size_t nodes = 0;
    CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    next_token<<<BATCH, 192, 0, stream>>>(d_pool, d_table, d_lens, (int64_t *)append.slots,
                                          (uint16_t *)append.latent, d_q);
    LIB(snapmla_plan(&d.step)); /* once a step; here come the layers, of which there is one: */
    LIB(snapmla_append(&append));
    LIB(snapmla_decode(&d));
    CUDA(cudaStreamEndCapture(stream, &graph));
    CUDA(cudaGraphGetNodes(graph, NULL, &nodes));
    CUDA(cudaGraphInstantiateWithFlags(&exec, graph, 0));
    printf("captured: %d nodes\n", (int)nodes);

    int bad = 0, checked = 0;
    int32_t done[BATCH], lens[BATCH];
    for (int b = 0; b < BATCH; b++) done[b] = kStart[b];
    for (int step = 1; step <= STEPS; step++) {
        CUDA(cudaGraphLaunch(exec, stream));
        if (step != kSampled[checked]) continue;
        CUDA(cudaMemcpyAsync(out, d.out, sizeof out, cudaMemcpyDeviceToHost, stream));
        CUDA(cudaMemcpyAsync(lse, d.lse, sizeof lse, cudaMemcpyDeviceToHost, stream));
        CUDA(cudaStreamSynchronize(stream));
        for (int b = 0; b < BATCH; b++) lens[b] = kStart[b] + step;
        (void)ref_append(&ref, done, lens);
        bad += check(step, lens, &ref, d.softmax_scale);
        memcpy(done, lens, sizeof done);
        checked++;
    }

    /* The same thousand steps once more, without a stop, for their time. */
    cudaEvent_t start, end;
    float ms = 0;
    CUDA(cudaMemcpy(d_lens, kStart, sizeof kStart, cudaMemcpyHostToDevice));
    CUDA(cudaEventCreate(&start));
    CUDA(cudaEventCreate(&end));
    CUDA(cudaEventRecord(start, stream));
    for (int step = 0; step < STEPS; step++) CUDA(cudaGraphLaunch(exec, stream));
    CUDA(cudaEventRecord(end, stream));
    CUDA(cudaEventSynchronize(end));
    CUDA(cudaEventElapsedTime(&ms, start, end));
    printf("%d steps, %.1f us each\n", STEPS, ms * 1000 / STEPS);
    puts(bad ? "WRONG" : "OK");
    return bad ? 1 : 0;
}
