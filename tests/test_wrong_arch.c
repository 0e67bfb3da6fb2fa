/* test_wrong_arch.c - a build without code for the GPU at hand says so: the implementation linked
   here has machine code for compute capability 8.x alone and no PTX. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <cmocka.h>

#include "snapmla.cuh"
#include "test_util.h"

#define EXPECT(call, wanted) TU_CHECK_INT(call, wanted)
#define CUDA(call) TU_CHECK_INT(call, cudaSuccess)

static unsigned char *device_bytes(size_t bytes)
{
    void *p = NULL;
    CUDA(cudaMalloc(&p, bytes));
    CUDA(cudaMemset(p, 0, bytes));
    return (unsigned char *)p;
}

static void test_no_code_for_this_gpu(void **state)
{
    (void)state;
    int count = 0, major = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) {
        print_message("skipped: no usable GPU\n");
        skip();
    }
    CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
    if (major == 8) {
        print_message("skipped: this GPU runs code for compute capability 8.0\n");
        skip();
    }
    enum { kBytes = 1 << 20 };
    unsigned char *memory = device_bytes(64 * (size_t)kBytes), *out = device_bytes(kBytes);
    CUDA(cudaMemset(out, 0xee, kBytes));
    snapmla_path path = SNAPMLA_PATH_AUTO;
    EXPECT(snapmla_device_supported(0, &path), SNAPMLA_ERROR_DEVICE);
    TU_CHECK_INT(path, SNAPMLA_PATH_AUTO);

    snapmla_decode_desc d;
    memset(&d, 0, sizeof d);
    d.step.batch = 1;
    d.step.s_q = 1;
    d.step.heads = 16;
    d.step.seq_lens = (const int32_t *)(const void *)memory;
    d.step.plan = memory + kBytes;
    d.step.plan_bytes = kBytes;
    d.cache.content = memory + 2 * kBytes;
    d.cache.scale = (float *)(void *)(memory + 4 * kBytes);
    d.cache.rope = memory + 5 * kBytes;
    d.cache.pages = 1;
    d.block_table = (const int32_t *)(const void *)memory;
    d.block_table_width = 1;
    d.softmax_scale = 1;
    d.q = memory + 6 * kBytes;
    d.out = out;
    d.workspace = memory + 8 * kBytes;
    d.workspace_bytes = 56 * (size_t)kBytes;
    for (int i = 0; i < 2; i++) {
        d.step.path = i ? SNAPMLA_PATH_GENERAL : SNAPMLA_PATH_AUTO;
        EXPECT(snapmla_plan(&d.step), SNAPMLA_ERROR_DEVICE);
        EXPECT(snapmla_decode(&d), SNAPMLA_ERROR_DEVICE);
    }
    snapmla_append_desc a;
    memset(&a, 0, sizeof a);
    a.cache = d.cache;
    a.tokens = 1;
    a.latent = d.q;
    a.slots = (const int64_t *)(const void *)memory;
    EXPECT(snapmla_append(&a), SNAPMLA_ERROR_DEVICE);
    snapmla_quantize_q_desc q;
    memset(&q, 0, sizeof q);
    q.tokens = 1;
    q.heads = 1;
    q.q = d.q;
    q.q_content = out;
    q.q_scale = (float *)(void *)out;
    q.q_rope = out;
    EXPECT(snapmla_quantize_q(&q), SNAPMLA_ERROR_DEVICE);

    /* nothing ran, nothing was written, no CUDA error is left behind */
    TU_CHECK_INT(cudaPeekAtLastError(), cudaSuccess);
    CUDA(cudaDeviceSynchronize());
    unsigned char *copy = (unsigned char *)tu_alloc(kBytes, 0);
    CUDA(cudaMemcpy(copy, out, kBytes, cudaMemcpyDeviceToHost));
    TU_CHECK_FILLED(copy, 0xee, kBytes);
    free(copy);
    CUDA(cudaFree(memory));
    CUDA(cudaFree(out));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_no_code_for_this_gpu),
    };
    return cmocka_run_group_tests_name("wrong arch", tests, NULL, NULL);
}
