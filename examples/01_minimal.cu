/* 01_minimal.cu - append keys to a paged cache, plan, decode, and hold the result to the CPU
   reference.

       nvcc -O3 -std=c++17 -gencode arch=compute_90a,code=sm_90a examples/01_minimal.cu -o minimal

   Another GPU takes its own number: 80, 86, 89, 100, 120.  Expected output; the errors differ a
   little from path to path:

       1000 tokens: out error 1.6e-02 (tolerance 3.2e-02), lse error 5e-07 (2e-03)
         64 tokens: out error 1.9e-02 (tolerance 3.2e-02), lse error 5e-07 (2e-03)
          1 tokens: out error 1.5e-03 (tolerance 3.2e-02), lse error 1e-07 (2e-03)
       OK

   Exit code: 0 = OK, 1 = wrong or failed, 2 = no GPU that can run it (the reason is printed). */
#define SNAPMLA_IMPLEMENTATION
#include "../snapmla.cuh"
#define SNAPMLA_REF_IMPLEMENTATION
#include "../snapmla_ref.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { BATCH = 3, HEADS = 16, LATENT = 512, ROPE = 64, DIM = LATENT + ROPE };
enum { PAGE = 64, WIDTH = 16, PAGES = BATCH * WIDTH, MAX_TOKENS = PAGES * PAGE };

static uint16_t keys[MAX_TOKENS * DIM], q[BATCH * HEADS * DIM], out[BATCH * HEADS * LATENT];
static float lse[BATCH * HEADS], ref_lse[BATCH * HEADS];
static double ref_out[BATCH * HEADS * LATENT];

/* The reference keeps a cache of its own, so that its quantisation is compared as well. */
static uint8_t ref_content[MAX_TOKENS * LATENT];
static float ref_scale[MAX_TOKENS];
static uint16_t ref_rope[MAX_TOKENS * ROPE];

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

int main(void)
{
    snapmla_result usable = snapmla_device_supported(0, NULL);
    if (usable != SNAPMLA_OK) {
        printf("no usable GPU: %s\n", snapmla_result_string(usable));
        return 2;
    }

    /* Three requests, their pages scattered over the cache, and a slot for every token. */
    int32_t lens[BATCH] = {1000, 64, 1}, table[PAGES];
    static int64_t slots[MAX_TOKENS];
    int64_t tokens = 0;
    for (int i = 0; i < PAGES; i++) table[i] = (i * 7 + 3) % PAGES;
    for (int b = 0; b < BATCH; b++)
        for (int t = 0; t < lens[b]; t++)
            slots[tokens++] = (int64_t)table[b * WIDTH + t / PAGE] * PAGE + t % PAGE;
    fill(keys, tokens * DIM);
    fill(q, sizeof q / sizeof q[0]);

    snapmla_append_desc append = {};
    append.cache.content = device(NULL, MAX_TOKENS * LATENT);
    append.cache.scale = (float *)device(NULL, MAX_TOKENS * sizeof(float));
    append.cache.rope = device(NULL, MAX_TOKENS * ROPE * 2);
    append.cache.pages = PAGES;
    append.tokens = tokens;
    append.latent = device(keys, tokens * DIM * 2); /* rope right behind each latent row */
    append.slots = (const int64_t *)device(slots, tokens * sizeof slots[0]);
    LIB(snapmla_append(&append));

    snapmla_step step = {};
    step.batch = BATCH, step.s_q = 1, step.heads = HEADS;
    step.seq_lens = (const int32_t *)device(lens, sizeof lens);
    LIB(snapmla_plan_bytes(&step, &step.plan_bytes));
    step.plan = device(NULL, step.plan_bytes);
    LIB(snapmla_plan(&step)); /* once a step; all layers share it */

    snapmla_decode_desc d = {};
    d.step = step, d.cache = append.cache;
    d.block_table = (const int32_t *)device(table, sizeof table), d.block_table_width = WIDTH;
    d.softmax_scale = 1 / sqrtf(DIM);
    d.q = device(q, sizeof q), d.out = device(NULL, sizeof out);
    d.lse = (float *)device(NULL, sizeof lse);
    LIB(snapmla_decode_workspace(&step, &d.workspace_bytes));
    d.workspace = device(NULL, d.workspace_bytes);
    LIB(snapmla_decode(&d));
    CUDA(cudaMemcpy(out, d.out, sizeof out, cudaMemcpyDeviceToHost));
    CUDA(cudaMemcpy(lse, d.lse, sizeof lse, cudaMemcpyDeviceToHost));

    /* The same on the CPU, in double. */
    snapmla_ref_append_desc ra = {};
    ra.cache.content = ref_content, ra.cache.scale = ref_scale, ra.cache.rope = ref_rope;
    ra.cache.pages = PAGES, ra.tokens = tokens, ra.latent = keys, ra.slots = slots;
    require(snapmla_ref_append(&ra) == 0, "snapmla_ref_append", "refused");
    snapmla_ref_decode_desc rd = {};
    rd.fidelity = SNAPMLA_REF_EXACT, rd.batch = BATCH, rd.s_q = 1, rd.heads = HEADS;
    rd.seq_lens = lens, rd.cache = ra.cache, rd.block_table = table, rd.block_table_width = WIDTH;
    rd.softmax_scale = d.softmax_scale, rd.q = q, rd.out64 = ref_out, rd.lse = ref_lse;
    require(snapmla_ref_decode(&rd) == 0, "snapmla_ref_decode", "refused");

    int bad = 0; /* counted beside the maximum, where NaN would hide */
    for (int b = 0; b < BATCH; b++) {
        double error = 0, norm = 0, lse_error = 0;
        for (int i = b * HEADS * LATENT; i < (b + 1) * HEADS * LATENT; i++) {
            double e = snapmla_ref_bf16_to_float(out[i]) - ref_out[i];
            error += e * e, norm += ref_out[i] * ref_out[i];
        }
        for (int i = b * HEADS; i < (b + 1) * HEADS; i++) {
            double e = fabs(lse[i] - ref_lse[i]);
            bad += !(e <= 2e-3), lse_error = fmax(lse_error, e);
        }
        double rms = sqrt(error / norm); /* relative */
        bad += !(rms <= 3.2e-2);
        printf("%4d tokens: out error %.1e (tolerance 3.2e-02), lse error %.0e (2e-03)\n", lens[b],
               rms, lse_error);
    }
    puts(bad ? "WRONG" : "OK");
    return bad ? 1 : 0;
}
