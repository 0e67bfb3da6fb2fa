/* main.c - a plain C99 program that decodes through snapmla: a prompt, then a few steps of one
   token each.  The kernels are in snapmla.cu, the only file that nvcc has to see; this one needs
   the declarations and the CUDA runtime's C interface.  In this folder:

       nvcc -O3 -std=c++17 -gencode arch=compute_90a,code=sm_90a -c snapmla.cu -o snapmla.o
       gcc -O2 -std=c99 -Wall -Wextra -I/usr/local/cuda/include -c main.c -o main.o
       nvcc main.o snapmla.o -lm -o from_c

   Expected output; the errors differ a little from path to path:

       step 1, 2 requests of 121 tokens: relative rms error 2.4e-02, tolerance 3.2e-02
       ...
       step 8, 2 requests of 128 tokens: relative rms error 2.1e-02, tolerance 3.2e-02
       OK

   Exit code: 0 = OK, 1 = wrong or failed, 2 = no GPU that can run it (the reason is printed). */
#include "../../snapmla.cuh"
#define SNAPMLA_REF_IMPLEMENTATION
#include "../../snapmla_ref.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { BATCH = 2, HEADS = 8, LATENT = 512, ROPE = 64, DIM = LATENT + ROPE };
enum { PAGE = 64, WIDTH = 2, PAGES = BATCH * WIDTH, SLOTS = PAGES * PAGE };
enum { PROMPT = 120, STEPS = 8, Q = BATCH * HEADS * DIM, OUT = BATCH * HEADS * LATENT };

static const int32_t table[PAGES] = {2, 0, 3, 1}; /* request 0: pages 2, 0; request 1: 3, 1 */
static snapmla_append_desc append = {0};
static snapmla_step step = {0};
static snapmla_decode_desc decode = {0};

/* The same on the host, for the check. */
static uint8_t ref_content[SLOTS * LATENT];
static float ref_scale[SLOTS];
static uint16_t ref_rope[SLOTS * ROPE], q[Q], out[OUT], keys[BATCH * PROMPT * DIM];
static int64_t slots[BATCH * PROMPT];
static double expected[OUT];
static snapmla_ref_append_desc ref_append = {0};
static snapmla_ref_decode_desc ref_decode = {0};

static void require(int ok, const char *what, const char *why)
{
    if (!ok) {
        fprintf(stderr, "%s: %s\n", what, why);
        exit(1);
    }
}

static void lib(snapmla_result result, const char *what)
{
    require(result == SNAPMLA_OK, what, snapmla_result_string(result));
}

static void cuda(cudaError_t error, const char *what)
{
    require(error == cudaSuccess, what, cudaGetErrorString(error));
}

/* Device memory full of NaN: nothing here relies on zeros. */
static void *device(size_t bytes)
{
    void *p = NULL;
    cuda(cudaMalloc(&p, bytes), "cudaMalloc");
    cuda(cudaMemset(p, 0xff, bytes), "cudaMemset");
    return p;
}

/* For the inputs, which a real program makes on the device; hence the const that is cast away. */
static void upload(const void *to, const void *from, size_t bytes)
{
    cuda(cudaMemcpy((void *)(uintptr_t)to, from, bytes, cudaMemcpyHostToDevice), "upload");
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

/* Everything whose size depends on the shape alone is allocated once, before the first step. */
static void set_up(void)
{
    append.cache.content = device(SLOTS * LATENT);
    append.cache.scale = device(SLOTS * sizeof(float));
    append.cache.rope = device(SLOTS * ROPE * 2);
    append.cache.pages = PAGES;
    append.latent = device(sizeof keys); /* rope right behind each latent row */
    append.slots = device(sizeof slots);

    step.batch = BATCH;
    step.s_q = 1;
    step.heads = HEADS;
    step.seq_lens = device(BATCH * sizeof(int32_t));
    lib(snapmla_plan_bytes(&step, &step.plan_bytes), "snapmla_plan_bytes");
    step.plan = device(step.plan_bytes);

    decode.step = step;
    decode.cache = append.cache;
    decode.block_table = device(sizeof table);
    decode.block_table_width = WIDTH;
    decode.softmax_scale = 1 / sqrtf(DIM);
    decode.q = device(sizeof q);
    decode.out = device(sizeof out);
    lib(snapmla_decode_workspace(&step, &decode.workspace_bytes), "snapmla_decode_workspace");
    decode.workspace = device(decode.workspace_bytes);
    upload(decode.block_table, table, sizeof table);

    ref_append.cache.content = ref_content;
    ref_append.cache.scale = ref_scale;
    ref_append.cache.rope = ref_rope;
    ref_append.cache.pages = PAGES;
    ref_append.latent = keys;
    ref_append.slots = slots;
    ref_decode.fidelity = SNAPMLA_REF_EXACT;
    ref_decode.batch = BATCH;
    ref_decode.s_q = 1;
    ref_decode.heads = HEADS;
    ref_decode.cache = ref_append.cache;
    ref_decode.block_table = table;
    ref_decode.block_table_width = WIDTH;
    ref_decode.softmax_scale = decode.softmax_scale;
    ref_decode.q = q;
    ref_decode.out64 = expected;
}

/* Append random keys as tokens [first, first + count) of every request. */
static void append_tokens(int first, int count)
{
    int64_t n = 0;
    for (int b = 0; b < BATCH; b++)
        for (int t = first; t < first + count; t++)
            slots[n++] = (int64_t)table[b * WIDTH + t / PAGE] * PAGE + t % PAGE;
    fill(keys, (size_t)n * DIM);
    upload(append.latent, keys, (size_t)n * DIM * sizeof keys[0]);
    upload(append.slots, slots, (size_t)n * sizeof slots[0]);
    append.tokens = ref_append.tokens = n;
    lib(snapmla_append(&append), "snapmla_append");
    require(snapmla_ref_append(&ref_append) == 0, "snapmla_ref_append", "refused");
}

/* Relative rms error of out against the reference in double. */
static double error_of(const int32_t *lens)
{
    double error = 0, norm = 0;
    ref_decode.seq_lens = lens;
    require(snapmla_ref_decode(&ref_decode) == 0, "snapmla_ref_decode", "refused");
    for (int i = 0; i < OUT; i++) {
        double e = snapmla_ref_bf16_to_float(out[i]) - expected[i];
        error += e * e;
        norm += expected[i] * expected[i];
    }
    return sqrt(error / norm);
}

int main(void)
{
    snapmla_result usable = snapmla_device_supported(0, NULL);
    if (usable != SNAPMLA_OK) {
        printf("no usable GPU: %s\n", snapmla_result_string(usable));
        return 2;
    }

    int ok = 1;
    set_up();
    append_tokens(0, PROMPT);
    for (int s = 1; s <= STEPS; s++) {
        const int32_t lens[BATCH] = {PROMPT + s, PROMPT + s}; /* the new token included */
        append_tokens(PROMPT + s - 1, 1);
        fill(q, Q);
        upload(decode.q, q, sizeof q);
        upload(step.seq_lens, lens, sizeof lens);
        lib(snapmla_plan(&step), "snapmla_plan"); /* once a step; every layer's decode shares it */
        lib(snapmla_decode(&decode), "snapmla_decode");
        cuda(cudaMemcpy(out, decode.out, sizeof out, cudaMemcpyDeviceToHost), "download");

        double rms = error_of(lens);
        if (!(rms <= 3.2e-2)) ok = 0;
        printf("step %d, %d requests of %d tokens: relative rms error %.1e, tolerance 3.2e-02\n", s,
               BATCH, lens[0], rms);
    }
    printf("%s\n", ok ? "OK" : "WRONG");
    return ok ? 0 : 1;
}
