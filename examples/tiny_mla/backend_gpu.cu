/* backend_gpu.cu - the tiny MLA model on the GPU, one token per request and step.

   Attention over the SnapMLA cache is snapmla.cuh: look at attend_snap() and at the call of
   snapmla_plan() in gpu_step() for how an engine uses it.  Everything else (projections, norms,
   rope, attention over the formats that are compared) is done by small, plain kernels in f32. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#define SNAPMLA_IMPLEMENTATION
#include "../../snapmla.cuh"
#include "tiny_mla.h"

/* ---------------------------------------------------------------------------------------------
   Kernels: projections, norms, rope.  Arrays are [requests, ...]; y_row and x_row are the distances
   from request to request, in elements. */

static int blocks_for(int64_t n, int threads) { return (int)((n + threads - 1) / threads); }

/* x[b] = embedding[tokens[b]]; also where request b's new key goes, and how many keys it has. */
static __global__ void begin_kernel(float *x, int32_t *seq_lens, int64_t *slots, int64_t *positions,
                                    const float *embedding, const uint8_t *tokens,
                                    const int32_t *block_table, int table_width, int hidden,
                                    int position)
{
    int b = blockIdx.x;
    for (int i = threadIdx.x; i < hidden; i += blockDim.x)
        x[b * hidden + i] = embedding[tokens[b] * hidden + i];
    if (threadIdx.x == 0) {
        int64_t page = block_table[b * table_width + position / PAGE];
        slots[b] = page * PAGE + position % PAGE;
        positions[b] = position;
        seq_lens[b] = position + 1;
    }
}

static __global__ void rmsnorm_kernel(float *y, int y_row, const float *x, int x_row,
                                      const float *gain, int n, float eps)
{
    __shared__ float part[256];
    float sum = 0, scale;
    x += (int64_t)blockIdx.x * x_row;
    y += (int64_t)blockIdx.x * y_row;
    for (int i = threadIdx.x; i < n; i += 256) sum += x[i] * x[i];
    part[threadIdx.x] = sum;
    for (int half = 128; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) part[threadIdx.x] += part[threadIdx.x + half];
    }
    __syncthreads();
    scale = 1.0f / sqrtf(part[0] / n + eps);
    for (int i = threadIdx.x; i < n; i += 256) y[i] = x[i] * scale * gain[i];
}

/* y[b][g][o] (+)= sum_i x[b][g][i] * w[g][o][i], for groups g: the heads, or one group for all.
   A block makes 32 outputs for 32 requests of one group, from tiles of 32 inputs. */
static __global__ void linear_kernel(float *y, int y_row, int y_group, const float *x, int x_row,
                                     int x_group, const float *w, int requests, int in, int out,
                                     int add)
{
    __shared__ float xs[32][33], ws[32][33];
    const int o0 = blockIdx.x * 32, b0 = blockIdx.y * 32, g = blockIdx.z;
    float sum[4] = {0, 0, 0, 0};

    x += (int64_t)g * x_group;
    y += (int64_t)g * y_group;
    w += (int64_t)g * out * in;
    for (int i0 = 0; i0 < in; i0 += 32) {
        int i = i0 + threadIdx.x;
        for (int r = threadIdx.y; r < 32; r += 8) {
            xs[r][threadIdx.x] = b0 + r < requests && i < in ? x[(int64_t)(b0 + r) * x_row + i] : 0;
            ws[r][threadIdx.x] = o0 + r < out && i < in ? w[(int64_t)(o0 + r) * in + i] : 0;
        }
        __syncthreads();
        for (int k = 0; k < 32; k++)
            for (int j = 0; j < 4; j++) sum[j] += xs[threadIdx.y + 8 * j][k] * ws[threadIdx.x][k];
        __syncthreads();
    }
    for (int j = 0; j < 4; j++) {
        int b = b0 + threadIdx.y + 8 * j, o = o0 + threadIdx.x;
        if (b < requests && o < out) {
            float *to = y + (int64_t)b * y_row + o;
            *to = add ? *to + sum[j] : sum[j];
        }
    }
}

/* Rotate the pairs (2i, 2i + 1) of each group's ROPE numbers; each stays where it was. */
static __global__ void rope_kernel(float *y, int y_row, int y_group, const float *x, int x_row,
                                   int x_group, const float *cosines, const float *sines)
{
    int i = threadIdx.x, g = blockIdx.y;
    float a, b;
    x += (int64_t)blockIdx.x * x_row + (int64_t)g * x_group;
    y += (int64_t)blockIdx.x * y_row + (int64_t)g * y_group;
    a = x[2 * i];
    b = x[2 * i + 1];
    y[2 * i] = a * cosines[i] - b * sines[i];
    y[2 * i + 1] = b * cosines[i] + a * sines[i];
}

static __global__ void silu_kernel(float *gate, const float *up, int64_t n)
{
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) gate[i] = gate[i] / (1 + expf(-gate[i])) * up[i];
}

/* bits = bf16(x), and x becomes what the bits say. */
static __global__ void to_bf16_kernel(__nv_bfloat16 *bits, float *x, int64_t n)
{
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) {
        bits[i] = __float2bfloat16_rn(x[i]);
        x[i] = __bfloat162float(bits[i]);
    }
}

static __global__ void from_bf16_kernel(float *x, const __nv_bfloat16 *bits, int64_t n)
{
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] = __bfloat162float(bits[i]);
}

/* *absmax = largest magnitude so far.  Floats that are not negative are ordered like their bits. */
static __global__ void absmax_kernel(float *absmax, const float *x, int n)
{
    for (int i = threadIdx.x; i < n; i += blockDim.x)
        atomicMax((int *)absmax, __float_as_int(fabsf(x[i])));
}

/* ---------------------------------------------------------------------------------------------
   Kernels: attention over a cache of plain rows (fp32, bf16, naive), in three passes.  `scale` is
   the naive format's; the others ignore it. */

static __device__ float e4m3_round(float x)
{
    return (float)__nv_fp8_e4m3(x); /* to nearest even, saturating */
}

static __device__ float load_number(const void *rows, int64_t at, cache_format format, float scale)
{
    if (format == CACHE_FP32) return ((const float *)rows)[at];
    if (format == CACHE_BF16) return __bfloat162float(((const __nv_bfloat16 *)rows)[at]);
    return (float)((const __nv_fp8_e4m3 *)rows)[at] * scale;
}

static __global__ void store_keys_kernel(void *rows, const float *keys, const int64_t *slots,
                                         cache_format format, float scale)
{
    const float *key = keys + (int64_t)blockIdx.x * ROW;
    const int64_t first = slots[blockIdx.x] * ROW;
    for (int d = threadIdx.x; d < ROW; d += blockDim.x)
        if (format == CACHE_FP32)
            ((float *)rows)[first + d] = key[d];
        else if (format == CACHE_BF16)
            ((__nv_bfloat16 *)rows)[first + d] = __float2bfloat16_rn(key[d]);
        else
            ((__nv_fp8_e4m3 *)rows)[first + d] = __nv_fp8_e4m3(key[d] / scale);
}

/* The naive format rounds queries too, with one scale for the layer. */
static __global__ void naive_query_kernel(float *query, int64_t n, float scale)
{
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) query[i] = e4m3_round(query[i] / scale) * scale;
}

/* Scores of the 64 tokens of a page (x) with 8 heads (y). */
static __global__ void scores_kernel(float *scores, int scores_row, const float *query, int heads,
                                     float softmax_scale, const void *rows,
                                     const int32_t *block_table, int table_width, int n,
                                     cache_format format, float scale)
{
    __shared__ float k[PAGE][65], q[8][64];
    const int b = blockIdx.y, h = blockIdx.z * 8 + threadIdx.y, t0 = blockIdx.x * PAGE;
    const int64_t page = block_table[b * table_width + blockIdx.x];
    float sum = 0;

    for (int d0 = 0; d0 < ROW; d0 += 64) {
        for (int r = threadIdx.y; r < PAGE; r += 8)
            k[r][threadIdx.x] =
                t0 + r < n
                    ? load_number(rows, (page * PAGE + r) * ROW + d0 + threadIdx.x, format, scale)
                    : 0;
        q[threadIdx.y][threadIdx.x] =
            h < heads ? query[((int64_t)b * heads + h) * ROW + d0 + threadIdx.x] : 0;
        __syncthreads();
        for (int d = 0; d < 64; d++) sum += q[threadIdx.y][d] * k[threadIdx.x][d];
        __syncthreads();
    }
    if (h < heads && t0 + (int)threadIdx.x < n)
        scores[((int64_t)b * heads + h) * scores_row + t0 + threadIdx.x] = sum * softmax_scale;
}

/* Scores become weights, rounded as the format's second product takes them; the denominator is the
   sum of the exact ones.  A block does one head of one request. */
static __global__ void soften_kernel(float *scores, int scores_row, float *denominators, int n,
                                     cache_format format)
{
    __shared__ float part[256];
    float top = -INFINITY, sum = 0;

    scores += (int64_t)blockIdx.x * scores_row;
    for (int t = threadIdx.x; t < n; t += 256) top = fmaxf(top, scores[t]);
    part[threadIdx.x] = top;
    for (int half = 128; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half)
            part[threadIdx.x] = fmaxf(part[threadIdx.x], part[threadIdx.x + half]);
    }
    __syncthreads();
    top = part[0];
    __syncthreads();
    for (int t = threadIdx.x; t < n; t += 256) {
        float e = expf(scores[t] - top);
        sum += e;
        if (format == CACHE_BF16)
            e = __bfloat162float(__float2bfloat16_rn(e));
        else if (format == CACHE_NAIVE)
            e = e4m3_round(e);
        scores[t] = e;
    }
    part[threadIdx.x] = sum;
    for (int half = 128; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) part[threadIdx.x] += part[threadIdx.x + half];
    }
    if (threadIdx.x == 0) denominators[blockIdx.x] = part[0];
}

/* 64 latent numbers (x) of the outputs of 8 heads (y). */
static __global__ void values_kernel(float *attended, const float *weights, int weights_row,
                                     const float *denominators, int heads, const void *rows,
                                     const int32_t *block_table, int table_width, int n,
                                     cache_format format, float scale)
{
    const int b = blockIdx.y, h = blockIdx.z * 8 + threadIdx.y, d = blockIdx.x * 64 + threadIdx.x;
    const int64_t row = (int64_t)b * heads + h;
    const float *w = weights + row * weights_row;
    float sum = 0;

    if (h >= heads) return;
    for (int t0 = 0; t0 < n; t0 += PAGE) {
        const int64_t first = (int64_t)block_table[b * table_width + t0 / PAGE] * PAGE * ROW + d;
        const int count = n - t0 < PAGE ? n - t0 : PAGE;
#pragma unroll 8
        for (int t = 0; t < count; t++)
            sum += w[t0 + t] * load_number(rows, first + (int64_t)t * ROW, format, scale);
    }
    sum /= denominators[row];
    if (format != CACHE_FP32) sum = __bfloat162float(__float2bfloat16_rn(sum));
    attended[row * LATENT + d] = sum;
}

/* ---------------------------------------------------------------------------------------------
   Device memory */

enum { MAX_ALLOCATIONS = 12 * MAX_LAYERS + 64 };

typedef struct arena {
    void *blocks[MAX_ALLOCATIONS];
    int count, failed;
} arena;

static void *take(arena *a, int64_t bytes)
{
    void *p = NULL;
    if (cudaMalloc(&p, bytes > 0 ? (size_t)bytes : 1) != cudaSuccess) {
        a->failed = 1;
        return NULL;
    }
    a->blocks[a->count++] = p;
    return p;
}

static float *take_floats(arena *a, int64_t n)
{
    return (float *)take(a, n * (int64_t)sizeof(float));
}

static float *upload(arena *a, const float *from, int64_t n)
{
    float *to = take_floats(a, n);
    if (to &&
        cudaMemcpy(to, from, (size_t)n * sizeof(float), cudaMemcpyHostToDevice) != cudaSuccess)
        a->failed = 1;
    return to;
}

static void release(arena *a)
{
    for (int i = 0; i < a->count; i++) cudaFree(a->blocks[i]);
    a->count = 0;
}

typedef struct gpu_model {
    const model *host;
    model device; /* the same widths, pointers on the device; w_uk is [heads, LATENT, nope] */
    arena memory;
} gpu_model;

/* ---------------------------------------------------------------------------------------------
   A session */

struct session {
    const model *host, *device;
    cache_format format;
    int requests, context;
    int length;         /* tokens that every request holds */
    int table_width;    /* pages that a request can hold */
    int padded_context; /* table_width * PAGE */
    calibration scales; /* naive: absmax / 448 */
    float *seen;        /* bf16: [layers, 2], absmax of request 0's keys and queries */

    int32_t *block_table, *seq_lens; /* [requests, table_width], [requests] */
    int64_t *slots;                  /* [requests]: where this step's keys go */
    int64_t *positions;              /* [requests]: and their positions */
    uint8_t *tokens;                 /* [requests] */

    /* The cache of a layer: rows [slot, ROW] of f32, bf16 or e4m3, or the three SnapMLA planes. */
    void *rows[MAX_LAYERS];
    snapmla_cache snap[MAX_LAYERS];
    snapmla_step step; /* snap: what all layers of a step share */
    void *workspace;
    size_t workspace_bytes;

    /* One step's values, [requests, ...] */
    float *x, *normed, *q, *kv, *key, *query, *attended, *v, *gate, *up, *logits;
    float *scores, *denominators; /* [heads, padded_context], [heads] */
    __nv_bfloat16 *key_bf16, *query_bf16, *attended_bf16;
    arena memory;
};

static void gpu_close(session *s)
{
    if (!s) return;
    release(&s->memory);
    free(s);
}

static int complain(const char *what, const char *why)
{
    fprintf(stderr, "tiny_mla: %s: %s\n", what, why);
    return -1;
}

/* The sizes of the plan and of the workspace depend on the step's shape only. */
static snapmla_result prepare_step(session *s)
{
    snapmla_step *step = &s->step;
    snapmla_result result;

    step->batch = s->requests;
    step->s_q = 1;
    step->heads = s->host->heads;
    step->page_size = PAGE;
    step->max_seq_len = s->context;
    step->seq_lens = s->seq_lens;
    if ((result = snapmla_plan_bytes(step, &step->plan_bytes)) != SNAPMLA_OK ||
        (result = snapmla_decode_workspace(step, &s->workspace_bytes)) != SNAPMLA_OK)
        return result;
    step->plan = take(&s->memory, (int64_t)step->plan_bytes);
    s->workspace = take(&s->memory, (int64_t)s->workspace_bytes);
    return SNAPMLA_OK;
}

static session *gpu_open(const backend *b, cache_format format, const calibration *c, int requests,
                         int context)
{
    static const int item[CACHE_FORMATS] = {4, 2, 0, 1};
    const gpu_model *gpu = (const gpu_model *)b->state;
    const model *m = gpu->host;
    const int64_t n = requests, heads = m->heads;
    session *s = (session *)calloc(1, sizeof *s);
    arena *a;
    int64_t pages, tokens;
    int32_t *table;
    if (!s) return NULL;

    s->host = m;
    s->device = &gpu->device;
    s->format = format;
    s->requests = requests;
    s->context = context;
    s->table_width = blocks_for(context, PAGE);
    s->padded_context = s->table_width * PAGE;
    pages = n * s->table_width;
    tokens = pages * PAGE;
    for (int i = 0; i < m->layers && format == CACHE_NAIVE; i++) {
        s->scales.key_absmax[i] = c->key_absmax[i] / 448;
        s->scales.query_absmax[i] = c->query_absmax[i] / 448;
    }

    a = &s->memory;
    s->block_table = (int32_t *)take(a, pages * 4);
    s->seq_lens = (int32_t *)take(a, n * 4);
    s->slots = (int64_t *)take(a, n * 8);
    s->positions = (int64_t *)take(a, n * 8);
    s->tokens = (uint8_t *)take(a, n);
    s->seen = take_floats(a, 2 * m->layers);
    s->x = take_floats(a, n * m->hidden);
    s->normed = take_floats(a, n * m->hidden);
    s->q = take_floats(a, n * heads * (m->nope + ROPE));
    s->kv = take_floats(a, n * ROW);
    s->key = take_floats(a, n * ROW);
    s->query = take_floats(a, n * heads * ROW);
    s->attended = take_floats(a, n * heads * LATENT);
    s->v = take_floats(a, n * heads * m->v_dim);
    s->gate = take_floats(a, n * m->mlp);
    s->up = take_floats(a, n * m->mlp);
    s->logits = take_floats(a, n * VOCAB);
    s->scores = take_floats(a, n * heads * s->padded_context);
    s->denominators = take_floats(a, n * heads);
    s->key_bf16 = (__nv_bfloat16 *)take(a, n * ROW * 2);
    s->query_bf16 = (__nv_bfloat16 *)take(a, n * heads * ROW * 2);
    s->attended_bf16 = (__nv_bfloat16 *)take(a, n * heads * LATENT * 2);
    for (int i = 0; i < m->layers; i++) {
        if (format == CACHE_SNAP) {
            s->snap[i].content = take(a, tokens * LATENT);
            s->snap[i].scale = (float *)take(a, tokens * 4);
            s->snap[i].rope = take(a, tokens * ROPE * 2);
            s->snap[i].pages = pages;
            s->snap[i].page_size = PAGE;
        } else {
            s->rows[i] = take(a, tokens * ROW * item[format]);
        }
    }
    if (format == CACHE_SNAP && !a->failed) {
        snapmla_result result = prepare_step(s);
        if (result != SNAPMLA_OK) a->failed = complain("snapmla", snapmla_result_string(result));
    }

    table = (int32_t *)malloc((size_t)pages * 4);
    if (table && !a->failed) {
        shuffled_block_table(table, requests, s->table_width);
        if (cudaMemcpy(s->block_table, table, (size_t)pages * 4, cudaMemcpyHostToDevice) ||
            cudaMemset(s->seen, 0, 2 * (size_t)m->layers * sizeof(float)))
            a->failed = 1;
    }
    if (!table || a->failed) {
        gpu_close(s);
        s = NULL;
    }
    free(table);
    return s;
}

/* ---------------------------------------------------------------------------------------------
   A step */

/* A matrix for all of a request's row. */
static void linear(float *y, const float *x, const float *w, int requests, int in, int out, int add)
{
    dim3 grid(blocks_for(out, 32), blocks_for(requests, 32), 1), block(32, 8);
    linear_kernel<<<grid, block>>>(y, out, 0, x, in, 0, w, requests, in, out, add);
}

/* A matrix per head; head h of a request begins h * x_head behind the request's x. */
static void linear_heads(float *y, int y_head, const float *x, int x_head, const float *w,
                         int requests, int heads, int in, int out)
{
    dim3 grid(blocks_for(out, 32), blocks_for(requests, 32), heads), block(32, 8);
    linear_kernel<<<grid, block>>>(y, heads * y_head, y_head, x, heads * x_head, x_head, w,
                                   requests, in, out, 0);
}

static void rmsnorm(float *y, int y_row, const float *x, int x_row, const float *gain, int requests,
                    int n, double eps)
{
    rmsnorm_kernel<<<requests, 256>>>(y, y_row, x, x_row, gain, n, (float)eps);
}

static void to_bf16(__nv_bfloat16 *bits, float *x, int64_t n)
{
    to_bf16_kernel<<<blocks_for(n, 256), 256>>>(bits, x, n);
}

static void attend_rows(session *s, int index)
{
    const int heads = s->host->heads, n = s->length, requests = s->requests;
    const float scale = s->scales.key_absmax[index];
    const int64_t queries = (int64_t)requests * heads * ROW;
    dim3 block(64, 8), pages(blocks_for(n, PAGE), requests, blocks_for(heads, 8));
    dim3 parts(LATENT / 64, requests, blocks_for(heads, 8));

    store_keys_kernel<<<requests, 192>>>(s->rows[index], s->key, s->slots, s->format, scale);
    if (s->format == CACHE_NAIVE)
        naive_query_kernel<<<blocks_for(queries, 256), 256>>>(s->query, queries,
                                                              s->scales.query_absmax[index]);
    scores_kernel<<<pages, block>>>(s->scores, s->padded_context, s->query, heads,
                                    s->host->softmax_scale, s->rows[index], s->block_table,
                                    s->table_width, n, s->format, scale);
    soften_kernel<<<requests * heads, 256>>>(s->scores, s->padded_context, s->denominators, n,
                                             s->format);
    values_kernel<<<parts, block>>>(s->attended, s->scores, s->padded_context, s->denominators,
                                    heads, s->rows[index], s->block_table, s->table_width, n,
                                    s->format, scale);
}

/* The SnapMLA way: norm, rotate, quantise and write the new keys, then attend to all of them. */
static int attend_snap(session *s, int index)
{
    const int64_t outputs = (int64_t)s->requests * s->host->heads * LATENT;
    snapmla_append_desc append = {};
    snapmla_decode_desc decode = {};
    snapmla_result result;

    append.cache = s->snap[index];
    append.tokens = s->requests;
    append.latent = s->key_bf16; /* as projected; rope lies right behind each latent */
    append.slots = s->slots;
    append.norm.weight = s->device->layer[index].latent_norm;
    append.norm.weight_type = SNAPMLA_NUMBER_F32;
    append.norm.eps = (float)s->host->norm_eps;
    append.rotation.positions = s->positions;
    append.rotation.cosines = s->device->rope_cos;
    append.rotation.sines = s->device->rope_sin;
    append.rotation.layout = SNAPMLA_ROPE_INTERLEAVED;

    decode.step = s->step;
    decode.cache = s->snap[index];
    decode.block_table = s->block_table;
    decode.block_table_width = s->table_width;
    decode.softmax_scale = s->host->softmax_scale;
    decode.q = s->query_bf16;
    decode.out = s->attended_bf16;
    decode.workspace = s->workspace;
    decode.workspace_bytes = s->workspace_bytes;

    if ((result = snapmla_append(&append)) != SNAPMLA_OK ||
        (result = snapmla_decode(&decode)) != SNAPMLA_OK)
        return complain("snapmla", snapmla_result_string(result));
    from_bf16_kernel<<<blocks_for(outputs, 256), 256>>>(s->attended, s->attended_bf16, outputs);
    return 0;
}

static int attention(session *s, int index)
{
    const model *m = s->host;
    const layer_weights *w = &s->device->layer[index];
    const int n = s->requests, heads = m->heads, q_head = m->nope + ROPE;
    const float *cosines = s->device->rope_cos + (int64_t)(s->length - 1) * (ROPE / 2);
    const float *sines = s->device->rope_sin + (int64_t)(s->length - 1) * (ROPE / 2);
    dim3 all_heads(n, heads);

    rmsnorm(s->normed, m->hidden, s->x, m->hidden, w->attention_norm, n, m->hidden, m->norm_eps);
    linear(s->q, s->normed, w->q_proj, n, m->hidden, heads * q_head, 0);
    linear(s->kv, s->normed, w->kv_a_proj, n, m->hidden, ROW, 0);

    /* The key row: the normed latent and the rotated rope part.  The SnapMLA cache does both itself
       when it takes the row. */
    if (s->format != CACHE_SNAP) {
        rmsnorm(s->key, ROW, s->kv, ROW, w->latent_norm, n, LATENT, m->norm_eps);
        rope_kernel<<<n, ROPE / 2>>>(s->key + LATENT, ROW, 0, s->kv + LATENT, ROW, 0, cosines,
                                     sines);
    }

    /* The query rows: W_UK takes the nope part into the latent space. */
    linear_heads(s->query, ROW, s->q, q_head, w->w_uk, n, heads, m->nope, LATENT);
    rope_kernel<<<all_heads, ROPE / 2>>>(s->query + LATENT, heads * ROW, ROW, s->q + m->nope,
                                         heads * q_head, q_head, cosines, sines);
    if (s->format != CACHE_FP32) {
        to_bf16(s->key_bf16, s->format == CACHE_SNAP ? s->kv : s->key, (int64_t)n * ROW);
        to_bf16(s->query_bf16, s->query, (int64_t)n * heads * ROW);
    }
    if (s->format == CACHE_BF16) {
        absmax_kernel<<<1, 256>>>(s->seen + 2 * index, s->key, ROW);
        absmax_kernel<<<1, 256>>>(s->seen + 2 * index + 1, s->query, heads * ROW);
    }

    if (s->format != CACHE_SNAP)
        attend_rows(s, index);
    else if (attend_snap(s, index))
        return -1;

    /* W_UV takes each head's output out of the latent space. */
    linear_heads(s->v, m->v_dim, s->attended, LATENT, w->w_uv, n, heads, LATENT, m->v_dim);
    linear(s->x, s->v, w->o_proj, n, heads * m->v_dim, m->hidden, 1);
    return 0;
}

static void feed_forward(session *s, int index)
{
    const model *m = s->host;
    const layer_weights *w = &s->device->layer[index];
    const int n = s->requests;
    const int64_t gates = (int64_t)n * m->mlp;

    rmsnorm(s->normed, m->hidden, s->x, m->hidden, w->mlp_norm, n, m->hidden, m->norm_eps);
    linear(s->gate, s->normed, w->gate_proj, n, m->hidden, m->mlp, 0);
    linear(s->up, s->normed, w->up_proj, n, m->hidden, m->mlp, 0);
    silu_kernel<<<blocks_for(gates, 256), 256>>>(s->gate, s->up, gates);
    linear(s->x, s->gate, w->down_proj, n, m->mlp, m->hidden, 1);
}

static int gpu_step(session *s, const uint8_t *tokens, float *logits)
{
    const model *m = s->host;
    const int n = s->requests;
    cudaError_t error;

    if (s->length == s->context) return -1;
    error = cudaMemcpyAsync(s->tokens, tokens, (size_t)n, cudaMemcpyHostToDevice, 0);
    if (error != cudaSuccess) return complain("CUDA", cudaGetErrorString(error));
    begin_kernel<<<n, 128>>>(s->x, s->seq_lens, s->slots, s->positions, s->device->embedding,
                             s->tokens, s->block_table, s->table_width, m->hidden, s->length);
    s->length++;
    if (s->format == CACHE_SNAP) { /* once a step: all layers have the same lengths */
        snapmla_result result = snapmla_plan(&s->step);
        if (result != SNAPMLA_OK) return complain("snapmla", snapmla_result_string(result));
    }
    for (int i = 0; i < m->layers; i++) {
        if (attention(s, i)) return -1;
        feed_forward(s, i);
    }
    rmsnorm(s->normed, m->hidden, s->x, m->hidden, s->device->final_norm, n, m->hidden,
            m->norm_eps);
    linear(s->logits, s->normed, s->device->embedding, n, m->hidden, VOCAB, 0);
    error = cudaGetLastError();
    if (error == cudaSuccess)
        error = cudaMemcpy(logits, s->logits, (size_t)n * VOCAB * sizeof(float),
                           cudaMemcpyDeviceToHost);
    return error == cudaSuccess ? 0 : complain("CUDA", cudaGetErrorString(error));
}

static int gpu_calibrate(session *s, calibration *c)
{
    float seen[2 * MAX_LAYERS];
    if (cudaMemcpy(seen, s->seen, 2 * (size_t)s->host->layers * sizeof(float),
                   cudaMemcpyDeviceToHost) != cudaSuccess)
        return -1;
    for (int i = 0; i < s->host->layers; i++) {
        c->key_absmax[i] = seen[2 * i];
        c->query_absmax[i] = seen[2 * i + 1];
    }
    return 0;
}

/* ---------------------------------------------------------------------------------------------
   The backend */

static void gpu_free(backend *b)
{
    gpu_model *gpu = (gpu_model *)b->state;
    if (gpu) release(&gpu->memory);
    free(gpu);
    memset(b, 0, sizeof *b);
}

/* [heads, nope, LATENT] to [heads, LATENT, nope]: linear_kernel() wants [out, in]. */
static float *upload_w_uk(arena *a, const float *w_uk, const model *m)
{
    const int64_t n = (int64_t)m->heads * m->nope * LATENT;
    float *turned = (float *)malloc((size_t)n * sizeof(float)), *device = NULL;
    for (int64_t i = 0; i < n && turned; i++) {
        int64_t r = i % LATENT, d = i / LATENT % m->nope, h = i / LATENT / m->nope;
        turned[(h * LATENT + r) * m->nope + d] = w_uk[i];
    }
    if (turned)
        device = upload(a, turned, n);
    else
        a->failed = 1;
    free(turned);
    return device;
}

const char *gpu_backend(backend *b, const model *m)
{
    gpu_model *gpu;
    arena *a;
    cudaDeviceProp properties;
    snapmla_path path;
    int count = 0, rope;

    memset(b, 0, sizeof *b);
    if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) return "no CUDA device was found";
    if (snapmla_device_supported(0, &path) != SNAPMLA_OK)
        return "snapmla has no path for CUDA device 0, or was not compiled for it";
    if (cudaSetDevice(0) != cudaSuccess || cudaGetDeviceProperties(&properties, 0) != cudaSuccess)
        return "CUDA device 0 does not answer";
    if (!(gpu = (gpu_model *)calloc(1, sizeof *gpu))) return "out of memory";

    b->state = gpu;
    gpu->host = m;
    gpu->device = *m;
    a = &gpu->memory;
    rope = m->max_context * (ROPE / 2);
    gpu->device.embedding = upload(a, m->embedding, (int64_t)VOCAB * m->hidden);
    gpu->device.final_norm = upload(a, m->final_norm, m->hidden);
    gpu->device.rope_cos = upload(a, m->rope_cos, rope);
    gpu->device.rope_sin = upload(a, m->rope_sin, rope);
    for (int i = 0; i < m->layers; i++) {
        const layer_weights *from = &m->layer[i];
        layer_weights *to = &gpu->device.layer[i];
        const int64_t hidden = m->hidden, mlp = m->mlp, heads = m->heads;
        to->attention_norm = upload(a, from->attention_norm, hidden);
        to->q_proj = upload(a, from->q_proj, heads * (m->nope + ROPE) * hidden);
        to->kv_a_proj = upload(a, from->kv_a_proj, ROW * hidden);
        to->latent_norm = upload(a, from->latent_norm, LATENT);
        to->w_uk = upload_w_uk(a, from->w_uk, m);
        to->w_uv = upload(a, from->w_uv, heads * m->v_dim * LATENT);
        to->o_proj = upload(a, from->o_proj, hidden * heads * m->v_dim);
        to->mlp_norm = upload(a, from->mlp_norm, hidden);
        to->gate_proj = upload(a, from->gate_proj, mlp * hidden);
        to->up_proj = upload(a, from->up_proj, mlp * hidden);
        to->down_proj = upload(a, from->down_proj, hidden * mlp);
    }
    if (a->failed) {
        gpu_free(b);
        return "its memory is too small, or in use";
    }
    snprintf(b->label, sizeof b->label, "%.100s, snapmla path: %s", properties.name,
             path == SNAPMLA_PATH_GENERAL ? "general" : "tuned for this GPU");
    b->threads = 1;
    b->max_requests = 128;
    b->score_bytes = 245760;
    b->score_context = 2048;
    b->open = gpu_open;
    b->step = gpu_step;
    b->calibrate = gpu_calibrate;
    b->close = gpu_close;
    b->free = gpu_free;
    return NULL;
}
