/* 04_mla_layer.cu - one MLA attention layer of DeepSeek-V3's shape at decode: cuBLAS projects, and
   snapmla does everything between.  Checks itself against a plain fp64 layer, then shows where the
   time goes at 16K tokens a request, and the same with a BF16 cache.

       nvcc -O3 -std=c++17 -arch=sm_90a examples/04_mla_layer.cu -lcublas -o mla_layer

   Another GPU takes its own number: 80, 86, 89, 100, 120.  ./mla_layer --check leaves the times out.
   The layer, for one new token x of every request:

       qkv     = W_A x                          hidden 7168 -> 1536 of q, 512 of latent, 64 of rope
       q       = W_QB RMSNorm(qkv[:1536])       128 heads of 128 nope + 64 rope
       cache  += RMSNorm(latent), RoPE(rope)    snapmla_append: the raw projection goes in
       qa      = W_UK q_nope                    per head, 128 -> 512 ("absorbed")
       planes  = qa, RoPE(q_rope)               snapmla_quantize_q: two tensors go in
       o       = attention(planes, cache)       snapmla_plan, snapmla_decode
       y       = W_O (W_UV o)                   per head 512 -> 128, then 128 * 128 -> 7168

   The plan belongs to the step, not to the layer: a model makes it once for all its layers.  The BF16
   column is a straightforward attention, two cuBLAS products and a softmax between, over rows that
   snapmla_fetch() has read back; `fetch` is not part of it.

   Expected output (times differ from GPU to GPU):

       layer of 8 heads, 3 requests, 40 steps: error 4e-02 (tolerance 8e-02), BF16 cache 3e-02
       a table of microseconds and shares for batch 1, 32 and 128
       OK

   Exit code: 0 = OK, 1 = wrong or failed, 2 = no GPU that can run it (the reason is printed). */
#define SNAPMLA_IMPLEMENTATION
#include "../snapmla.cuh"

#include <cublas_v2.h>
#include <cuda_bf16.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef __nv_bfloat16 bf16;

enum { NOPE = 128, V = 128, LATENT = 512, ROPE = 64, ROW = LATENT + ROPE, QHEAD = NOPE + ROPE };
enum { PAGE = 64, REPEATS = 15 };

static const double kTolerance = 8e-2; /* e4m3 keys, values, queries and weights, each some 2e-2 */

static void require(int ok, const char *what, const char *why)
{
    if (ok) return;
    fflush(stdout);
    fprintf(stderr, "mla_layer: %s: %s\n", what, why);
    exit(1);
}
#define LIB(call) do { snapmla_result r_ = (call); \
    require(r_ == SNAPMLA_OK, #call, snapmla_result_string(r_)); } while (0)
#define CUDA(call) do { cudaError_t e_ = (call); \
    require(e_ == cudaSuccess, #call, cudaGetErrorString(e_)); } while (0)
#define BLAS(call) do { cublasStatus_t s_ = (call); \
    require(s_ == CUBLAS_STATUS_SUCCESS, #call, cublasGetStatusString(s_)); } while (0)

/* Device memory full of NaN: what is not written shows. */
static void *device(size_t bytes)
{
    void *p = NULL;
    CUDA(cudaMalloc(&p, bytes));
    CUDA(cudaMemset(p, 0xff, bytes));
    return p;
}

/* ================================================================================================
   kernels that are not snapmla's
   ============================================================================================== */

/* N(0, 1) * deviation + mean, from the seed and the index alone. */
static __global__ void fill_kernel(bf16 *x, size_t n, float mean, float deviation, uint64_t seed)
{
    const size_t stride = (size_t)gridDim.x * blockDim.x;
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += stride) {
        uint64_t z = (seed << 40) + i + 0x9e3779b97f4a7c15u; /* the finaliser of splitmix64 */
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
        z ^= z >> 31;
        const float u = ((float)(uint32_t)z + 1) * 0x1p-32f, v = (float)(uint32_t)(z >> 32) * 0x1p-32f;
        x[i] = __float2bfloat16_rn(mean + deviation * sqrtf(-2 * logf(u)) * cospif(2 * v));
    }
}

/* One block a row. */
static __global__ void rms_norm_kernel(bf16 *y, const bf16 *x, int x_stride, const bf16 *weight, int n)
{
    __shared__ float part[256];
    float sum = 0;
    x += (size_t)blockIdx.x * x_stride;
    y += (size_t)blockIdx.x * n;
    for (int i = threadIdx.x; i < n; i += 256) sum += __bfloat162float(x[i]) * __bfloat162float(x[i]);
    part[threadIdx.x] = sum;
    for (int half = 128; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) part[threadIdx.x] += part[threadIdx.x + half];
    }
    __syncthreads();
    const float r = rsqrtf(part[0] / n + 1e-6f);
    for (int i = threadIdx.x; i < n; i += 256)
        y[i] = __float2bfloat16_rn(__bfloat162float(x[i]) * r * __bfloat162float(weight[i]));
}

/* For the BF16 cache only: the rope parts of all heads, out of q.  snapmla_quantize_q() rotates too. */
static __global__ void rotate_kernel(bf16 *y, const bf16 *q, int heads, const int64_t *positions,
                                     const float *table)
{
    const int request = blockIdx.x / heads, head = blockIdx.x % heads, i = threadIdx.x;
    const bf16 *x = q + ((size_t)request * heads + head) * QHEAD + NOPE;
    const float c = table[positions[request] * ROPE + i];
    const float s = table[positions[request] * ROPE + ROPE / 2 + i];
    const float a = __bfloat162float(x[2 * i]), b = __bfloat162float(x[2 * i + 1]);
    y[(size_t)blockIdx.x * ROPE + 2 * i] = __float2bfloat16_rn(a * c - b * s);
    y[(size_t)blockIdx.x * ROPE + 2 * i + 1] = __float2bfloat16_rn(b * c + a * s);
}

/* One block a row of n scores. */
static __global__ void softmax_kernel(bf16 *y, const float *x, int n)
{
    __shared__ float part[256];
    float top = -INFINITY, sum = 0;
    x += (size_t)blockIdx.x * n;
    y += (size_t)blockIdx.x * n;
    for (int i = threadIdx.x; i < n; i += 256) top = fmaxf(top, x[i]);
    part[threadIdx.x] = top;
    for (int half = 128; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half)
            part[threadIdx.x] = fmaxf(part[threadIdx.x], part[threadIdx.x + half]);
    }
    __syncthreads();
    top = part[0];
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += 256) sum += __expf(x[i] - top);
    part[threadIdx.x] = sum;
    for (int half = 128; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) part[threadIdx.x] += part[threadIdx.x + half];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += 256)
        y[i] = __float2bfloat16_rn(__expf(x[i] - top) / part[0]);
}

/* Holds the stream, so that what follows is queued behind it. */
static __global__ void wait_kernel(uint64_t ns)
{
    uint64_t start, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    do asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    while (now - start < ns);
}

/* ================================================================================================
   yarn: the angles of RoPE, stretched for long contexts, and the factor on the logits that goes with
   them (DeepSeek-V3: theta 10000, factor 40 of 4096 tokens, beta 32 and 1, mscale 1)
   ============================================================================================== */
static float softmax_scale(void)
{
    const double mscale = 0.1 * log(40.0) + 1;
    return (float)(mscale * mscale / sqrt((double)QHEAD));
}

/* The pair whose angle makes `turns` turns within the 4096 tokens of training. */
static double pair_of(double turns)
{
    return ROPE * log(4096 / (turns * 6.283185307179586)) / (2 * log(10000.0));
}

/* [positions, ROPE]: cosines, then sines. */
static void fill_angles(float *table, int positions)
{
    const double low = floor(pair_of(32)), high = ceil(pair_of(1));
    for (int i = 0; i < ROPE / 2; i++) {
        const double frequency = pow(10000.0, -2.0 * i / ROPE);
        double ramp = (i - low) / (high - low); /* 0: keep the frequency, 1: divide it by 40 */
        ramp = ramp < 0 ? 0 : ramp > 1 ? 1 : ramp;
        const double stretched = frequency * (1 - ramp) + frequency / 40 * ramp;
        for (int p = 0; p < positions; p++) {
            table[p * ROPE + i] = (float)cos(p * stretched);
            table[p * ROPE + ROPE / 2 + i] = (float)sin(p * stretched);
        }
    }
}

/* ================================================================================================
   the layer
   ============================================================================================== */
typedef struct layer {
    int hidden, q_lora, heads;
    bf16 *w_a;     /* [q_lora + ROW, hidden] */
    bf16 *q_norm;  /* [q_lora] */
    bf16 *kv_norm; /* [LATENT] */
    bf16 *w_qb;    /* [heads * QHEAD, q_lora] */
    bf16 *w_uk;    /* [heads, NOPE, LATENT] */
    bf16 *w_uv;    /* [heads, V, LATENT] */
    bf16 *w_o;     /* [hidden, heads * V] */
    float *angles; /* [positions, ROPE] */
} layer;

/* The parts of a step that are timed. */
enum { PART_A, PART_NORM, PART_QB, PART_APPEND, PART_UK, PART_QUANTIZE, PART_PLAN, PART_DECODE, PART_UV,
       PART_O, PARTS };
static const char *const kParts[PARTS] = {
    "W_A (cuBLAS)", "norm of q", "W_QB (cuBLAS)", "snapmla_append", "W_UK (cuBLAS)",
    "snapmla_quantize_q", "snapmla_plan", "snapmla_decode", "W_UV (cuBLAS)", "W_O (cuBLAS)",
};
/* ... and of attention over a BF16 cache, in the place of quantize, plan and decode */
enum { BF16_ROTATE, BF16_SCORES, BF16_SOFTMAX, BF16_VALUES, BF16_PARTS };

typedef struct step {
    const layer *l;
    int batch, width; /* requests, pages of each */
    cublasHandle_t blas;
    cudaStream_t stream;
    bf16 *x, *qkv, *qa, *q, *absorbed, *attended, *v, *y;
    int64_t *slots, *positions;  /* of the new tokens */
    int32_t *lens, *block_table; /* with the new tokens */
    snapmla_append_desc append;
    snapmla_quantize_q_desc quantize;
    snapmla_decode_desc decode;
    /* the same with a BF16 cache */
    int kv;
    bf16 *rows, *rope, *weights; /* [batch, kv, ROW], [batch, heads, ROPE], [batch, heads, kv] */
    float *scores;
    int32_t *starts;
} step;

static bf16 *weights(size_t n, float mean, float deviation, uint64_t seed)
{
    bf16 *x = (bf16 *)device(n * sizeof(bf16));
    fill_kernel<<<1024, 256>>>(x, n, mean, deviation, seed);
    CUDA(cudaGetLastError());
    return x;
}

/* Random weights that keep deviations of q, of the latent and of the logits near 1. */
static layer new_layer(int hidden, int q_lora, int heads, int positions)
{
    layer l = {};
    l.hidden = hidden;
    l.q_lora = q_lora;
    l.heads = heads;
    const size_t h = (size_t)heads;
    l.w_a = weights((size_t)(q_lora + ROW) * hidden, 0, 1 / sqrtf((float)hidden), 1);
    l.q_norm = weights((size_t)q_lora, 1, 0.1f, 2);
    l.kv_norm = weights(LATENT, 1, 0.1f, 3);
    l.w_qb = weights(h * QHEAD * q_lora, 0, 1 / sqrtf((float)q_lora), 4);
    l.w_uk = weights(h * NOPE * LATENT, 0, 0.03f, 5);
    l.w_uv = weights(h * V * LATENT, 0, 1 / sqrtf((float)LATENT), 6);
    l.w_o = weights(h * V * hidden, 0, 1 / sqrtf((float)(heads * V)), 7);
    float *table = (float *)malloc((size_t)positions * ROPE * sizeof(float));
    require(table != NULL, "malloc", "out of memory");
    fill_angles(table, positions);
    l.angles = (float *)device((size_t)positions * ROPE * sizeof(float));
    CUDA(cudaMemcpy(l.angles, table, (size_t)positions * ROPE * sizeof(float), cudaMemcpyHostToDevice));
    free(table);
    return l;
}

static void free_layer(layer *l)
{
    void *all[] = {l->w_a, l->q_norm, l->kv_norm, l->w_qb, l->w_uk, l->w_uv, l->w_o, l->angles};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) CUDA(cudaFree(all[i]));
}

static step new_step(const layer *l, int batch, int capacity, cublasHandle_t blas, cudaStream_t stream)
{
    step s = {};
    s.l = l;
    s.batch = batch;
    s.width = (capacity + PAGE - 1) / PAGE;
    s.blas = blas;
    s.stream = stream;
    const size_t n = (size_t)batch, h = (size_t)l->heads;
    const int pages = batch * s.width;
    s.x = (bf16 *)device(n * l->hidden * 2);
    s.qkv = (bf16 *)device(n * (l->q_lora + ROW) * 2);
    s.qa = (bf16 *)device(n * l->q_lora * 2);
    s.q = (bf16 *)device(n * h * QHEAD * 2);
    s.absorbed = (bf16 *)device(n * h * LATENT * 2);
    s.attended = (bf16 *)device(n * h * LATENT * 2);
    s.v = (bf16 *)device(n * h * V * 2);
    s.y = (bf16 *)device(n * l->hidden * 2);
    s.slots = (int64_t *)device(n * 8);
    s.positions = (int64_t *)device(n * 8);
    s.lens = (int32_t *)device(n * 4);
    s.block_table = (int32_t *)device((size_t)pages * 4);
    int32_t *table = (int32_t *)malloc((size_t)pages * 4);
    require(table != NULL, "malloc", "out of memory");
    for (int i = 0; i < pages; i++) table[i] = (int32_t)((i * 7919ll + 13) % pages); /* scattered */
    if (pages % 7919 == 0) for (int i = 0; i < pages; i++) table[i] = i;
    CUDA(cudaMemcpy(s.block_table, table, (size_t)pages * 4, cudaMemcpyHostToDevice));
    free(table);

    snapmla_append_desc *a = &s.append;
    a->cache.content = device((size_t)pages * PAGE * LATENT);
    a->cache.scale = (float *)device((size_t)pages * PAGE * 4);
    a->cache.rope = device((size_t)pages * PAGE * ROPE * 2);
    a->cache.pages = pages;
    a->tokens = batch;
    a->latent = s.qkv + l->q_lora; /* latent and rope as projected, behind the q part of a row */
    a->latent_stride = l->q_lora + ROW;
    a->slots = s.slots;
    a->norm.weight = l->kv_norm;
    a->rotation.positions = s.positions;
    a->rotation.cosines = l->angles;
    a->stream = stream;

    snapmla_quantize_q_desc *q = &s.quantize;
    q->tokens = batch;
    q->heads = l->heads;
    q->q = s.absorbed;
    q->rope = s.q + NOPE; /* the rope part of each head, as projected */
    q->rope_head_stride = QHEAD;
    q->q_content = device(n * h * LATENT);
    q->q_scale = (float *)device(n * h * 4);
    q->q_rope = device(n * h * ROPE * 2);
    q->rotation = a->rotation;
    q->stream = stream;

    snapmla_decode_desc *d = &s.decode;
    d->step.batch = batch;
    d->step.s_q = 1;
    d->step.heads = l->heads;
    d->step.seq_lens = s.lens;
    d->step.stream = stream;
    LIB(snapmla_plan_bytes(&d->step, &d->step.plan_bytes));
    LIB(snapmla_decode_workspace(&d->step, &d->workspace_bytes));
    d->step.plan = device(d->step.plan_bytes);
    d->workspace = device(d->workspace_bytes);
    d->cache = a->cache;
    d->block_table = s.block_table;
    d->block_table_width = s.width;
    d->softmax_scale = softmax_scale();
    d->q_content = q->q_content;
    d->q_scale = q->q_scale;
    d->q_rope = q->q_rope;
    d->out = s.attended;
    return s;
}

static void free_step(step *s)
{
    void *all[] = {s->x, s->qkv, s->qa, s->q, s->absorbed, s->attended, s->v, s->y, s->slots,
                   s->positions, s->lens, s->block_table, s->append.cache.content,
                   s->append.cache.scale, s->append.cache.rope, s->quantize.q_content,
                   s->quantize.q_scale, s->quantize.q_rope, s->decode.step.plan, s->decode.workspace,
                   s->rows, s->rope, s->weights, s->scores, s->starts};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) CUDA(cudaFree(all[i]));
}

/* Every request is at the same position: the new token's slot, position and length. */
static void set_position(step *s, const int32_t *host_table, int position)
{
    const size_t n = (size_t)s->batch;
    int64_t *at = (int64_t *)malloc(n * 16);
    int32_t *lens = (int32_t *)malloc(n * 4);
    require(at != NULL && lens != NULL, "malloc", "out of memory");
    for (size_t b = 0; b < n; b++) {
        at[b] = (int64_t)host_table[b * s->width + position / PAGE] * PAGE + position % PAGE;
        at[n + b] = position;
        lens[b] = position + 1;
    }
    CUDA(cudaMemcpy(s->slots, at, n * 8, cudaMemcpyHostToDevice));
    CUDA(cudaMemcpy(s->positions, at + n, n * 8, cudaMemcpyHostToDevice));
    CUDA(cudaMemcpy(s->lens, lens, n * 4, cudaMemcpyHostToDevice));
    free(at);
    free(lens);
}

/* ---- products.  Row-major y[b][o] = sum_i x[b][i] w[o][i]; cuBLAS counts columns first. ---- */
static void product(const step *s, bf16 *y, const bf16 *x, const bf16 *w, int in, int out)
{
    const float one = 1, zero = 0;
    BLAS(cublasGemmEx(s->blas, CUBLAS_OP_T, CUBLAS_OP_N, out, s->batch, in, &one, w, CUDA_R_16BF, in, x,
                      CUDA_R_16BF, in, &zero, y, CUDA_R_16BF, out, CUBLAS_COMPUTE_32F,
                      CUBLAS_GEMM_DEFAULT));
}

/* `count` products C = factor * op(A) B + beta * C, as cuBLAS sees them; B and C are not turned. */
static void products(const step *s, cublasOperation_t op, int m, int n, int k, float factor,
                     const bf16 *a, int lda, int64_t a_step, const bf16 *b, int ldb, int64_t b_step,
                     float beta, void *c, cudaDataType type, int ldc, int64_t c_step, int count)
{
    BLAS(cublasGemmStridedBatchedEx(s->blas, op, CUBLAS_OP_N, m, n, k, &factor, a, CUDA_R_16BF, lda,
                                    a_step, b, CUDA_R_16BF, ldb, b_step, &beta, c, type, ldc, c_step,
                                    count, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
}

static void run_part(const step *s, int part)
{
    const layer *l = s->l;
    const int heads = l->heads;
    switch (part) {
    case PART_A: product(s, s->qkv, s->x, l->w_a, l->hidden, l->q_lora + ROW); break;
    case PART_NORM:
        rms_norm_kernel<<<s->batch, 256, 0, s->stream>>>(s->qa, s->qkv, l->q_lora + ROW, l->q_norm,
                                                         l->q_lora);
        break;
    case PART_QB: product(s, s->q, s->qa, l->w_qb, l->q_lora, heads * QHEAD); break;
    case PART_APPEND: LIB(snapmla_append(&s->append)); break;
    case PART_UK: /* a head at a time: [batch, 128] of q times [128, 512] */
        products(s, CUBLAS_OP_N, LATENT, s->batch, NOPE, 1, l->w_uk, LATENT, (int64_t)NOPE * LATENT,
                 s->q, heads * QHEAD, QHEAD, 0, s->absorbed, CUDA_R_16BF, heads * LATENT, LATENT, heads);
        break;
    case PART_QUANTIZE: LIB(snapmla_quantize_q(&s->quantize)); break;
    case PART_PLAN: LIB(snapmla_plan(&s->decode.step)); break;
    case PART_DECODE: LIB(snapmla_decode(&s->decode)); break;
    case PART_UV: /* a head at a time: [batch, 512] times [512, 128] */
        products(s, CUBLAS_OP_T, V, s->batch, LATENT, 1, l->w_uv, LATENT, (int64_t)V * LATENT,
                 s->attended, heads * LATENT, LATENT, 0, s->v, CUDA_R_16BF, heads * V, V, heads);
        break;
    case PART_O: product(s, s->y, s->v, l->w_o, heads * V, l->hidden); break;
    }
}

/* ---- the BF16 cache ---- */
static void start_bf16(step *s, int kv)
{
    const size_t n = (size_t)s->batch, h = (size_t)s->l->heads;
    s->kv = kv;
    s->rows = (bf16 *)device(n * kv * ROW * 2);
    s->rope = (bf16 *)device(n * h * ROPE * 2);
    s->scores = (float *)device(n * h * kv * 4);
    s->weights = (bf16 *)device(n * h * kv * 2);
    s->starts = (int32_t *)device((n + 1) * 4);
    int32_t *starts = (int32_t *)malloc((n + 1) * 4);
    require(starts != NULL, "malloc", "out of memory");
    for (size_t b = 0; b <= n; b++) starts[b] = (int32_t)b * kv;
    CUDA(cudaMemcpy(s->starts, starts, (n + 1) * 4, cudaMemcpyHostToDevice));
    free(starts);
}

static void fetch_rows(const step *s)
{
    snapmla_fetch_desc f = {};
    f.cache = s->decode.cache;
    f.tokens = (int64_t)s->batch * s->kv;
    f.latent = s->rows;
    f.block_table = s->block_table;
    f.block_table_width = s->width;
    f.batch = s->batch;
    f.row_starts = s->starts;
    f.stream = s->stream;
    LIB(snapmla_fetch(&f));
}

static void run_bf16_part(const step *s, int part)
{
    const int heads = s->l->heads, kv = s->kv;
    const int64_t keys = (int64_t)kv * ROW, table = (int64_t)heads * kv;
    const float scale = s->decode.softmax_scale;
    switch (part) {
    case BF16_ROTATE:
        rotate_kernel<<<s->batch * heads, ROPE / 2, 0, s->stream>>>(s->rope, s->q, heads, s->positions,
                                                                    s->l->angles);
        break;
    case BF16_SCORES: /* latent, then rope on top */
        products(s, CUBLAS_OP_T, kv, heads, LATENT, scale, s->rows, ROW, keys, s->absorbed, LATENT,
                 (int64_t)heads * LATENT, 0, s->scores, CUDA_R_32F, kv, table, s->batch);
        products(s, CUBLAS_OP_T, kv, heads, ROPE, scale, s->rows + LATENT, ROW, keys, s->rope, ROPE,
                 (int64_t)heads * ROPE, 1, s->scores, CUDA_R_32F, kv, table, s->batch);
        break;
    case BF16_SOFTMAX:
        softmax_kernel<<<s->batch * heads, 256, 0, s->stream>>>(s->weights, s->scores, kv);
        break;
    case BF16_VALUES:
        products(s, CUBLAS_OP_N, LATENT, heads, kv, 1, s->rows, ROW, keys, s->weights, kv, table, 0,
                 s->attended, CUDA_R_16BF, LATENT, (int64_t)heads * LATENT, s->batch);
        break;
    }
}

/* ================================================================================================
   the check: a plain layer in double, which holds keys and values of every head without a cache
   ============================================================================================== */
static float *host_copy(const bf16 *x, size_t n)
{
    uint16_t *bits = (uint16_t *)malloc(n * 2);
    float *y = (float *)malloc(n * 4);
    require(bits != NULL && y != NULL, "malloc", "out of memory");
    CUDA(cudaMemcpy(bits, x, n * 2, cudaMemcpyDeviceToHost));
    for (size_t i = 0; i < n; i++) {
        const uint32_t u = (uint32_t)bits[i] << 16;
        memcpy(&y[i], &u, 4);
    }
    free(bits);
    return y;
}

static void plain_product(double *y, const double *x, const float *w, int in, int out)
{
    for (int o = 0; o < out; o++) {
        y[o] = 0;
        for (int i = 0; i < in; i++) y[o] += x[i] * w[(size_t)o * in + i];
    }
}

static void plain_norm(double *x, const float *weight, int n)
{
    double sum = 0;
    for (int i = 0; i < n; i++) sum += x[i] * x[i];
    for (int i = 0; i < n; i++) x[i] *= weight[i] / sqrt(sum / n + 1e-6);
}

static void plain_rotate(double *x, const float *angles)
{
    for (int i = 0; i < ROPE / 2; i++) {
        const double a = x[2 * i], b = x[2 * i + 1], c = angles[i], s = angles[ROPE / 2 + i];
        x[2 * i] = a * c - b * s;
        x[2 * i + 1] = b * c + a * s;
    }
}

enum { CHECK_HIDDEN = 256, CHECK_LORA = 192, CHECK_HEADS = 8, CHECK_BATCH = 3, CHECK_STEPS = 40 };

typedef struct plain_weights {
    float *w_a, *q_norm, *kv_norm, *w_qb, *w_uk, *w_uv, *w_o, angles[CHECK_STEPS * ROPE];
} plain_weights;

/* y = the layer's output for the last of `steps` hidden states of one request. */
static void plain_layer(double *y, const plain_weights *w, const float *const *x, int request)
{
    static double keys[CHECK_STEPS][ROW], q[CHECK_HEADS * QHEAD], qkv[CHECK_LORA + ROW];
    static double v[CHECK_HEADS * V], hidden[CHECK_HIDDEN];
    for (int t = 0; t < CHECK_STEPS; t++) {
        for (int i = 0; i < CHECK_HIDDEN; i++) hidden[i] = x[t][request * CHECK_HIDDEN + i];
        plain_product(qkv, hidden, w->w_a, CHECK_HIDDEN, CHECK_LORA + ROW);
        plain_norm(qkv + CHECK_LORA, w->kv_norm, LATENT);
        plain_rotate(qkv + CHECK_LORA + LATENT, w->angles + t * ROPE);
        memcpy(keys[t], qkv + CHECK_LORA, sizeof keys[t]);
    }
    plain_norm(qkv, w->q_norm, CHECK_LORA);
    plain_product(q, qkv, w->w_qb, CHECK_LORA, CHECK_HEADS * QHEAD);
    for (int h = 0; h < CHECK_HEADS; h++) {
        double p[CHECK_STEPS], sum = 0;
        double *head = q + h * QHEAD;
        plain_rotate(head + NOPE, w->angles + (CHECK_STEPS - 1) * ROPE);
        for (int d = 0; d < V; d++) v[h * V + d] = 0;
        for (int t = 0; t < CHECK_STEPS; t++) { /* k_nope = W_UK latent, as the model defines it */
            double score = 0;
            for (int n = 0; n < NOPE; n++) {
                const float *row = w->w_uk + ((size_t)h * NOPE + n) * LATENT;
                double k = 0;
                for (int i = 0; i < LATENT; i++) k += row[i] * keys[t][i];
                score += head[n] * k;
            }
            for (int i = 0; i < ROPE; i++) score += head[NOPE + i] * keys[t][LATENT + i];
            sum += p[t] = exp(softmax_scale() * score);
        }
        for (int t = 0; t < CHECK_STEPS; t++)
            for (int d = 0; d < V; d++) {
                const float *row = w->w_uv + ((size_t)h * V + d) * LATENT;
                double value = 0;
                for (int i = 0; i < LATENT; i++) value += row[i] * keys[t][i];
                v[h * V + d] += p[t] / sum * value;
            }
    }
    plain_product(y, v, w->w_o, CHECK_HEADS * V, CHECK_HIDDEN);
}

/* Relative rms; NaN if anything is. */
static double error_of(const step *s, const double *want)
{
    const size_t n = (size_t)s->batch * s->l->hidden;
    float *got = host_copy(s->y, n);
    double e = 0, r = 0;
    for (size_t i = 0; i < n; i++) {
        e += (got[i] - want[i]) * (got[i] - want[i]);
        r += want[i] * want[i];
    }
    free(got);
    return sqrt(e / r);
}

static int check(cublasHandle_t blas, cudaStream_t stream)
{
    static double want[CHECK_BATCH * CHECK_HIDDEN];
    layer l = new_layer(CHECK_HIDDEN, CHECK_LORA, CHECK_HEADS, CHECK_STEPS);
    step s = new_step(&l, CHECK_BATCH, CHECK_STEPS, blas, stream);
    float *x[CHECK_STEPS];
    int32_t table[CHECK_BATCH];
    CUDA(cudaMemcpy(table, s.block_table, sizeof table, cudaMemcpyDeviceToHost));
    for (int t = 0; t < CHECK_STEPS; t++) { /* decode from an empty cache */
        fill_kernel<<<1, 256>>>(s.x, (size_t)CHECK_BATCH * CHECK_HIDDEN, 0, 1, 100 + (uint64_t)t);
        set_position(&s, table, t);
        CUDA(cudaDeviceSynchronize());
        for (int part = 0; part < PARTS; part++) run_part(&s, part);
        CUDA(cudaGetLastError());
        CUDA(cudaStreamSynchronize(stream));
        x[t] = host_copy(s.x, (size_t)CHECK_BATCH * CHECK_HIDDEN);
    }
    plain_weights w;
    w.w_a = host_copy(l.w_a, (size_t)(CHECK_LORA + ROW) * CHECK_HIDDEN);
    w.q_norm = host_copy(l.q_norm, CHECK_LORA);
    w.kv_norm = host_copy(l.kv_norm, LATENT);
    w.w_qb = host_copy(l.w_qb, (size_t)CHECK_HEADS * QHEAD * CHECK_LORA);
    w.w_uk = host_copy(l.w_uk, (size_t)CHECK_HEADS * NOPE * LATENT);
    w.w_uv = host_copy(l.w_uv, (size_t)CHECK_HEADS * V * LATENT);
    w.w_o = host_copy(l.w_o, (size_t)CHECK_HEADS * V * CHECK_HIDDEN);
    CUDA(cudaMemcpy(w.angles, l.angles, sizeof w.angles, cudaMemcpyDeviceToHost));
    for (int b = 0; b < CHECK_BATCH; b++) plain_layer(want + b * CHECK_HIDDEN, &w, x, b);
    const double error = error_of(&s, want);

    start_bf16(&s, CHECK_STEPS); /* the same once more with the rows read back */
    CUDA(cudaMemset(s.attended, 0xff, (size_t)CHECK_BATCH * CHECK_HEADS * LATENT * 2));
    CUDA(cudaDeviceSynchronize());
    fetch_rows(&s);
    for (int part = 0; part < BF16_PARTS; part++) run_bf16_part(&s, part);
    run_part(&s, PART_UV);
    run_part(&s, PART_O);
    CUDA(cudaGetLastError());
    CUDA(cudaStreamSynchronize(stream));
    const double bf16_error = error_of(&s, want);
    printf("layer of %d heads, %d requests, %d steps: error %.0e (tolerance %.0e), BF16 cache %.0e\n",
           CHECK_HEADS, CHECK_BATCH, CHECK_STEPS, error, kTolerance, bf16_error);

    float *all[] = {w.w_a, w.q_norm, w.kv_norm, w.w_qb, w.w_uk, w.w_uv, w.w_o};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) free(all[i]);
    for (int t = 0; t < CHECK_STEPS; t++) free(x[t]);
    free_step(&s);
    free_layer(&l);
    return error <= kTolerance && bf16_error <= kTolerance;
}

/* ================================================================================================
   times
   ============================================================================================== */
static int by_value(const void *a, const void *b)
{
    const float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

/* Median microseconds of each part, all parts running in turn behind each other. */
static void time_parts(const step *s, void (*run)(const step *, int), int parts, double *us)
{
    enum { MOST = 16 };
    static cudaEvent_t at[REPEATS][MOST + 1];
    for (int r = 0; r < REPEATS; r++)
        for (int i = 0; i <= parts; i++)
            if (at[r][i] == NULL) CUDA(cudaEventCreate(&at[r][i]));
    for (int i = 0; i < parts; i++) run(s, i); /* cuBLAS chooses its kernels */
    CUDA(cudaStreamSynchronize(s->stream));
    wait_kernel<<<1, 1, 0, s->stream>>>(20000000);
    for (int r = 0; r < REPEATS; r++) {
        CUDA(cudaEventRecord(at[r][0], s->stream));
        for (int i = 0; i < parts; i++) {
            run(s, i);
            CUDA(cudaEventRecord(at[r][i + 1], s->stream));
        }
    }
    CUDA(cudaGetLastError());
    CUDA(cudaStreamSynchronize(s->stream));
    for (int i = 0; i < parts; i++) {
        float each[REPEATS];
        for (int r = 0; r < REPEATS; r++) CUDA(cudaEventElapsedTime(&each[r], at[r][i], at[r][i + 1]));
        qsort(each, REPEATS, sizeof each[0], by_value);
        us[i] = 1000.0 * each[REPEATS / 2];
    }
}

static void run_fetch(const step *s, int part)
{
    (void)part;
    fetch_rows(s);
}

/* Keys of N(0, 1) in all slots. */
static void fill_cache(const step *s)
{
    const int64_t chunk = 1 << 16, slots = s->append.cache.pages * PAGE;
    bf16 *rows = (bf16 *)device((size_t)chunk * ROW * 2);
    snapmla_import_desc i = {};
    i.source = rows;
    for (int64_t first = 0; first < slots; first += chunk) {
        const int64_t n = slots - first < chunk ? slots - first : chunk;
        fill_kernel<<<1024, 256>>>(rows, (size_t)n * ROW, 0, 1, 1000 + (uint64_t)(first / chunk));
        i.cache = s->append.cache;
        i.cache.content = (char *)i.cache.content + first * LATENT; /* a cache that begins there */
        i.cache.scale += first;
        i.cache.rope = (char *)i.cache.rope + first * ROPE * 2;
        i.cache.pages = n / PAGE;
        i.tokens = n;
        LIB(snapmla_import(&i));
    }
    CUDA(cudaDeviceSynchronize());
    CUDA(cudaFree(rows));
}

static void show_times(cublasHandle_t blas, cudaStream_t stream)
{
    enum { KV = 16384, BATCHES = 3 };
    static const int batches[BATCHES] = {1, 32, 128};
    double us[BATCHES][PARTS], bf16_us[BATCHES][BF16_PARTS], fetch_us[BATCHES];
    double total[BATCHES] = {}, bf16_total[BATCHES] = {}, bf16_attention[BATCHES] = {};
    layer l = new_layer(7168, 1536, 128, KV);
    for (int n = 0; n < BATCHES; n++) {
        step s = new_step(&l, batches[n], KV, blas, stream);
        const size_t pages = (size_t)batches[n] * s.width;
        int32_t *table = (int32_t *)malloc(pages * 4);
        require(table != NULL, "malloc", "out of memory");
        CUDA(cudaMemcpy(table, s.block_table, pages * 4, cudaMemcpyDeviceToHost));
        fill_cache(&s);
        fill_kernel<<<64, 256>>>(s.x, (size_t)batches[n] * l.hidden, 0, 1, 99);
        set_position(&s, table, KV - 1);
        free(table);
        start_bf16(&s, KV);
        CUDA(cudaDeviceSynchronize());
        time_parts(&s, run_part, PARTS, us[n]);
        time_parts(&s, run_fetch, 1, &fetch_us[n]);
        time_parts(&s, run_bf16_part, BF16_PARTS, bf16_us[n]);
        free_step(&s);
        for (int i = 0; i < PARTS; i++) total[n] += i == PART_PLAN ? 0 : us[n][i];
        for (int i = 0; i < BF16_PARTS; i++) bf16_attention[n] += bf16_us[n][i];
        bf16_total[n] = total[n] - us[n][PART_QUANTIZE] - us[n][PART_DECODE] + bf16_attention[n];
    }
    free_layer(&l);

    printf("\nmicroseconds (share of the layer) at %d tokens a request\n%-26s", KV, "batch");
    for (int n = 0; n < BATCHES; n++) printf("%18d", batches[n]);
    for (int i = 0; i < PARTS; i++) {
        if (i == PART_PLAN) continue;
        printf("\n%-26s", kParts[i]);
        for (int n = 0; n < BATCHES; n++) printf("%10.1f (%4.1f%%)", us[n][i], 100 * us[n][i] / total[n]);
    }
    printf("\n%-26s", "layer, SnapMLA cache");
    for (int n = 0; n < BATCHES; n++) printf("%10.1f        ", total[n]);
    printf("\n%-26s", "plan, once for all layers");
    for (int n = 0; n < BATCHES; n++) printf("%10.1f        ", us[n][PART_PLAN]);
    printf("\n%-26s", "attention, BF16 cache");
    for (int n = 0; n < BATCHES; n++)
        printf("%10.1f (%4.1f%%)", bf16_attention[n], 100 * bf16_attention[n] / bf16_total[n]);
    printf("\n%-26s", "layer, BF16 cache");
    for (int n = 0; n < BATCHES; n++) printf("%10.1f        ", bf16_total[n]);
    printf("\n%-26s", "snapmla_fetch of it all");
    for (int n = 0; n < BATCHES; n++) printf("%10.1f        ", fetch_us[n]);
    printf("\n\n");
}

int main(int argc, char **argv)
{
    const snapmla_result usable = snapmla_device_supported(0, NULL);
    if (usable != SNAPMLA_OK) {
        printf("no usable GPU: %s\n", snapmla_result_string(usable));
        return 2;
    }
    cublasHandle_t blas;
    cudaStream_t stream;
    BLAS(cublasCreate(&blas));
    CUDA(cudaStreamCreate(&stream));
    BLAS(cublasSetStream(blas, stream));
    const int ok = check(blas, stream);
    if (ok && !(argc > 1 && strcmp(argv[1], "--check") == 0)) show_times(blas, stream);
    puts(ok ? "OK" : "WRONG");
    return ok ? 0 : 1;
}
