/* test_gpu_graph.c - captured steps that replay over other lengths, tables and queries, and steps
   that share plan and workspace without a wait between them: what one kernel writes, the next one
   must not read early.  All run for the path in gpu_path; `test_gpu graph` runs these alone. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <cmocka.h>

#include "test_util.h"
#include "gpu_util.h"

int run_graph_tests(void);

#define COUNT(array) ((int)(sizeof(array) / sizeof(array)[0]))

enum { kLayers = 5 };

static spec graph_spec(uint64_t seed, int batch, int s_q, int heads, const int32_t *most)
{
    spec s;
    memset(&s, 0, sizeof s);
    s.seed = seed;
    s.batch = batch;
    s.s_q = s_q;
    s.heads = heads;
    s.lens = most;
    s.share = 1;
    s.causal = s_q > 1;
    return s;
}

typedef struct captured {
    cudaStream_t stream;
    cudaGraphExec_t exec;
    size_t nodes;
    gpu_mem scratch;
} captured;

/* Plan once, then decode for each stage; before every other one a copy, since the node before a
   decode need not be a kernel. */
static captured capture(stage *const *layers, int n)
{
    captured c;
    cudaGraph_t graph;
    memset(&c, 0, sizeof c);
    c.scratch = gpu_new(512, 0, 0);
    CUDA(cudaStreamCreateWithFlags(&c.stream, cudaStreamNonBlocking));
    CUDA(cudaStreamBeginCapture(c.stream, cudaStreamCaptureModeGlobal));
    for (int i = 0; i < n; i++) {
        layers[i]->desc.step.stream = c.stream;
        if (i == 0) OK(snapmla_plan(&layers[i]->desc.step));
        if (i % 2)
            CUDA(cudaMemcpyAsync(c.scratch.at, c.scratch.at + 256, 256, cudaMemcpyDeviceToDevice,
                                 c.stream));
        OK(snapmla_decode(&layers[i]->desc));
    }
    CUDA(cudaStreamEndCapture(c.stream, &graph));
    CUDA(cudaGraphGetNodes(graph, NULL, &c.nodes));
    CUDA(cudaGraphInstantiateWithFlags(&c.exec, graph, 0));
    CUDA(cudaGraphDestroy(graph));
    return c;
}

static void uncapture(captured *c)
{
    CUDA(cudaGraphExecDestroy(c->exec));
    CUDA(cudaStreamDestroy(c->stream));
    gpu_delete(&c->scratch);
}

/* Lengths of replay i: all kinds up to the width of the table, which the first request can fill. */
static void replay_lens(tu_rng *rng, int i, int batch, const int32_t *most, int32_t *lens)
{
    for (int b = 0; b < batch; b++) {
        const int32_t any = (int32_t)tu_below(rng, (uint32_t)most[b] + 1);
        switch (i % 7) {
        case 0: lens[b] = most[b]; break;
        case 1: lens[b] = 0; break;
        case 2: lens[b] = b == 0 ? most[b] : 0; break;
        case 3: lens[b] = any < 1000 ? any : 1000; break;
        case 4: lens[b] = any / 64 * 64 + (any > 64); break;
        case 5: lens[b] = b % 2 ? -7 : any; break;
        default: lens[b] = any; break;
        }
    }
}

/* Between replays all that may change does: lengths, table rows (requests swap their pages), queries.
   Each replay must give the bits of an ordinary run, and the values of the reference. */
static void test_graph_everything_changes(void **state)
{
    (void)state;
    gpu_need();
    enum { kBatch = 5 };
    static const int32_t most[kBatch] = {131072, 9000, 9000, 640, 100};
    for (int form = 0; form < 4; form++) {
        spec s = graph_spec(9100 + (uint64_t)form, kBatch, 1 + form % 2, form < 2 ? 16 : 128, most);
        if (form == 3) s.max_seq_len = 131072, s.split_tokens = 4096;
        problem *p = problem_new(&s);
        view v = view_all(p);
        int32_t lens[kBatch] = {1000, 1000, 1000, 600, 100};
        v.lens = lens;
        stage st = stage_new(p, &v), *layers[1] = {&st};
        captured c = capture(layers, 1);
        TU_CHECK(c.nodes == 2 || c.nodes == 3, "%d nodes", (int)c.nodes);
        tu_rng rng = tu_seed(9150 + (uint64_t)form);
        for (int i = 0; i < (gpu_quick() ? 7 : 21); i++) {
            replay_lens(&rng, i, kBatch, most, lens);
            for (int64_t k = 0; k < p->table_stride; k++) { /* rows 1 and 2 swap pages */
                const int32_t page = p->table[p->table_stride + k];
                p->table[p->table_stride + k] = p->table[2 * p->table_stride + k];
                p->table[2 * p->table_stride + k] = page;
            }
            tu_fill_bf16(&rng, p->q, (int64_t)p->q_elements, 0, 1);
            gpu_put(&p->d_table, p->table);
            gpu_put(&p->d_q, p->q);
            gpu_put(&st.lens, lens);
            stage_poison(&st, 0xff);
            CUDA(cudaDeviceSynchronize());
            CUDA(cudaGraphLaunch(c.exec, c.stream));
            result r = stage_read(&st), direct = run_view(p, &v);
            CHECK_SAME_BITS(&r, &direct);
            memcpy(p->lens, lens, sizeof lens); /* the comparison goes by these */
            if (i % 3 == 0) CHECK_REFERENCE(p, &r, 3e7);
            result_free(&r);
            result_free(&direct);
        }
        uncapture(&c);
        stage_free(&st);
        problem_free(p);
    }
}

/* Layers with queries and outputs of their own share one plan and one workspace, back to back: a
   combine that read early would merge sums of the layer before, and a decode that wrote early would
   spoil those of the layer before. */
static void test_graph_layers_share_a_workspace(void **state)
{
    (void)state;
    gpu_need();
    enum { kBatch = 3 };
    static const int32_t most[kBatch] = {40000, 3000, 700};
    static const int heads[] = {16, 64, 128};
    for (int form = 0; form < COUNT(heads); form++) {
        const int h = heads[form];
        spec s = graph_spec(9200 + (uint64_t)form, kBatch, 1, kLayers * h, most);
        problem *p = problem_new(&s);
        view v[kLayers];
        stage st[kLayers], *layers[kLayers];
        result want[kLayers];
        for (int i = 0; i < kLayers; i++) {
            v[i] = view_all(p);
            v[i].h0 = i * h;
            v[i].nh = h;
            want[i] = run_view(p, &v[i]);
            st[i] = stage_new(p, &v[i]);
            st[i].desc.step.plan = st[0].desc.step.plan;
            st[i].desc.workspace = st[0].desc.workspace;
            layers[i] = &st[i];
        }
        captured c = capture(layers, kLayers);
        for (int round = 0; round < (gpu_quick() ? 4 : 60); round++) {
            for (int i = 0; i < kLayers; i++) stage_poison(&st[i], 0xff);
            CUDA(cudaDeviceSynchronize());
            if (round % 2) {
                CUDA(cudaGraphLaunch(c.exec, c.stream));
                CUDA(cudaGraphLaunch(c.exec, c.stream));
            } else {
                for (int i = 0; i < 2 * kLayers; i++) {
                    if (i % kLayers == 0) OK(snapmla_plan(&st[0].desc.step));
                    OK(snapmla_decode(&st[i % kLayers].desc));
                }
            }
            for (int i = 0; i < kLayers; i++) {
                result r = stage_read(&st[i]);
                CHECK_SAME_BITS(&r, &want[i]);
                result_free(&r);
            }
        }
        uncapture(&c);
        for (int i = 0; i < kLayers; i++) {
            result_free(&want[i]);
            stage_free(&st[i]);
        }
        problem_free(p);
    }
}

/* Steps of other lengths in turn, on one plan and one workspace, nothing waited for: a plan must not
   be overwritten while the combine of the step before still goes by it. */
static void test_graph_plans_in_turn(void **state)
{
    (void)state;
    gpu_need();
    enum { kBatch = 4 };
    static const int32_t most[kBatch] = {30000, 5000, 5000, 64};
    static const int32_t lens[3][kBatch] = {
        {30000, 1, 0, 64}, {100, 5000, 4999, 0}, {2000, 2000, 2000, 20}};
    for (int form = 0; form < 3; form++) {
        spec s = graph_spec(9300 + (uint64_t)form, kBatch, 1, form == 0 ? 16 : 128, most);
        if (form == 2) s.max_seq_len = 30000, s.split_tokens = 512;
        problem *p = problem_new(&s);
        view v[3];
        stage st[3];
        result want[3];
        cudaStream_t stream;
        CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
        for (int i = 0; i < 3; i++) {
            v[i] = view_all(p);
            v[i].lens = lens[i];
            want[i] = run_view(p, &v[i]);
            st[i] = stage_new(p, &v[i]);
            st[i].desc.step.plan = st[0].desc.step.plan;
            st[i].desc.workspace = st[0].desc.workspace;
            st[i].desc.step.stream = stream;
        }
        for (int round = 0; round < (gpu_quick() ? 4 : 60); round++) {
            for (int i = 0; i < 3; i++) stage_poison(&st[i], 0xff);
            CUDA(cudaDeviceSynchronize());
            for (int i = 0; i < 9; i++) {
                OK(snapmla_plan(&st[i % 3].desc.step));
                OK(snapmla_decode(&st[i % 3].desc));
            }
            for (int i = 0; i < 3; i++) {
                result r = stage_read(&st[i]);
                CHECK_SAME_BITS(&r, &want[i]);
                result_free(&r);
            }
        }
        for (int i = 0; i < 3; i++) {
            result_free(&want[i]);
            stage_free(&st[i]);
        }
        CUDA(cudaStreamDestroy(stream));
        problem_free(p);
    }
}

/* All ways of dealing work out, cut and not, against the reference: many splits of few rows, few of
   many, requests that end exactly at a part's border. */
static void test_graph_ways_of_dealing(void **state)
{
    (void)state;
    gpu_need();
    static const struct {
        int batch, heads, s_q;
        int32_t len;
    } cases[] = {{1, 16, 1, 4096},   {1, 16, 1, 131072}, {1, 64, 1, 32768}, {1, 128, 1, 4096},
                 {1, 128, 2, 20000}, {4, 16, 1, 4096},   {7, 3, 1, 1000},   {16, 128, 1, 640},
                 {70, 128, 1, 640},  {133, 16, 1, 300},  {40, 64, 1, 2500}};
    int32_t lens[200];
    for (int i = 0; i < COUNT(cases); i++) {
        if (gpu_quick() && i % 4) continue;
        for (int mixed = 0; mixed < 2; mixed++) {
            tu_rng rng = tu_seed(9400 + (uint64_t)i);
            for (int b = 0; b < cases[i].batch; b++)
                lens[b] = mixed ? (int32_t)tu_below(&rng, (uint32_t)cases[i].len + 1) : cases[i].len;
            spec s = graph_spec(9450 + (uint64_t)(2 * i + mixed), cases[i].batch, cases[i].s_q,
                                cases[i].heads, lens);
            problem *p = problem_new(&s);
            result r = run(p), again = run(p);
            CHECK_REFERENCE(p, &r, 1e8);
            CHECK_SAME_BITS(&r, &again);
            result_free(&r);
            result_free(&again);
            problem_free(p);
        }
    }
}

int run_graph_tests(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_graph_everything_changes),
        cmocka_unit_test(test_graph_layers_share_a_workspace),
        cmocka_unit_test(test_graph_plans_in_turn),
        cmocka_unit_test(test_graph_ways_of_dealing),
    };
    return cmocka_run_group_tests_name("graphs", tests, NULL, NULL);
}
