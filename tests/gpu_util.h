/* gpu_util.h - what the GPU tests share: guarded device memory, random paged problems, a run of
   plan + decode over poisoned buffers, and the comparison with the CPU reference.

   Include after cmocka.h and test_util.h.  Everything that must not be read is NaN or absurd, all
   that is written lies between guard zones, and every comparison fails on NaN. */
#ifndef SNAPMLA_GPU_UTIL_H
#define SNAPMLA_GPU_UTIL_H

#include "snapmla.cuh"
#include "snapmla_ref.h"

enum { kLatent = 512, kRope = 64, kDims = kLatent + kRope };

/* ================================================================================================
   The machine
   ============================================================================================== */

/* Skips the running test, with the reason, where there is no usable GPU.  Every GPU test begins with it. */
void gpu_need(void);
extern int gpu_cases; /* that have begun */
int gpu_present(void);
void gpu_describe(void); /* the lines that verified.sh reads */
int gpu_sm_count(void);
int gpu_major(void);
size_t gpu_free_bytes(void);
int gpu_quick(void); /* SNAPMLA_TEST_QUICK is set: leave out what takes long, for the sanitizer */

/* The path under test; all problems use it. */
extern snapmla_path gpu_path;
const char *gpu_path_name(snapmla_path path);

/* The mode under test; all problems and their references use it. */
extern snapmla_mode gpu_mode;
/* A test under a name of its own for the precise mode. */
#define PRECISE_TEST(test) {"precise_" #test, test, NULL, NULL, NULL}

/* A failed call prints its text and fails the test. */
void gpu_cuda(const char *file, int line, const char *call, cudaError_t error);
void gpu_result(const char *file, int line, const char *call, snapmla_result got,
                snapmla_result wanted);
#define CUDA(call) gpu_cuda(__FILE__, __LINE__, #call, (call))
#define OK(call) gpu_result(__FILE__, __LINE__, #call, (call), SNAPMLA_OK)
#define EXPECT(call, wanted) gpu_result(__FILE__, __LINE__, #call, (call), (wanted))

/* run(context, i) for i < n, on all CPU cores; it must not touch cmocka */
void parallel_for(int64_t n, void (*run)(void *context, int64_t i), void *context);

/* Normal deviates out of a table: fast enough for a million tokens. */
float fast_gauss(tu_rng *rng);

/* ================================================================================================
   Device memory with a guard zone on both sides
   ============================================================================================== */
typedef struct gpu_mem {
    unsigned char *at; /* device */
    size_t bytes;
    void *base;
} gpu_mem;

/* `bytes` filled with `fill`, `shift` bytes behind a 256-byte boundary.  kUnfilled leaves them as they
   are. */
enum { kUnfilled = -1 };
gpu_mem gpu_new(size_t bytes, size_t shift, int fill);
gpu_mem gpu_new_from(const void *host, size_t bytes, size_t shift);
void gpu_put(const gpu_mem *mem, const void *host);
void gpu_get(const gpu_mem *mem, void *host);
void gpu_fill(const gpu_mem *mem, int fill);
void gpu_delete(gpu_mem *mem); /* checks the guard zones; fails the test when they were written */

/* ================================================================================================
   A paged problem: cache, table, queries
   ============================================================================================== */
typedef enum layout {
    LAYOUT_DENSE,  /* three planes, one after the other */
    LAYOUT_RECORD, /* one record per page: content, scale, rope */
    LAYOUT_PADDED  /* three planes with gaps between pages */
} layout;

typedef struct spec {
    uint64_t seed;
    int batch, s_q, heads;
    int page_size; /* 0 = 64 */
    int causal;
    const int32_t *lens; /* [batch]; NULL: random in [0, max_len] */
    int32_t max_len;
    layout layout;
    int share;                                 /* requests share pages of earlier ones */
    int spare_pages;                           /* poisoned, in no table row */
    int extra_width;                           /* absurd entries behind the longest row */
    double key_mean, key_std, rope_std, q_std; /* 0 = 0, 1, 1, 1 */
    double clamp;                              /* 0 = none: all values within +-clamp */
    float softmax_scale;                       /* 0 = 576^-0.5 */
    int q_planes;                              /* give decode quantised queries */
    int strided; /* gaps between the rows of q, out, lse and the table */
    int no_lse;
    int32_t max_seq_len, split_tokens;
} spec;

typedef struct problem {
    spec s;
    int32_t *lens;
    int32_t *table;
    int32_t width;
    int64_t table_stride;
    unsigned char *cache_bytes; /* host image of the cache, all planes */
    size_t cache_size;
    size_t content_at, scale_at, rope_at; /* offsets of the planes */
    snapmla_ref_cache cache;              /* host pointers into cache_bytes */
    uint16_t *q;
    size_t q_elements;
    int64_t q_batch_stride, q_token_stride, q_head_stride;
    int64_t out_batch_stride, out_token_stride, out_head_stride, lse_batch_stride, lse_token_stride;
    size_t out_elements, lse_elements;
    uint8_t *q_content; /* q quantised, dense */
    float *q_scale;
    uint16_t *q_rope;
    gpu_mem d_cache, d_table, d_lens, d_q, d_q_content, d_q_scale, d_q_rope;
} problem;

problem *problem_new(const spec *s);
void problem_requery(problem *p, uint64_t seed, int s_q, int heads,
                     int causal);      /* the same cache */
void problem_upload(problem *p);       /* after host arrays were changed */
void problem_check_inputs(problem *p); /* the device copies are what was uploaded */
void problem_free(problem *p);

/* host pointers to one token of the cache */
uint8_t *token_content(const problem *p, int64_t page, int offset);
float *token_scale(const problem *p, int64_t page, int offset);
uint16_t *token_rope(const problem *p, int64_t page, int offset);
/* quantise a BF16 row into it */
void token_write(const problem *p, int64_t page, int offset, const uint16_t *latent,
                 const uint16_t *rope);
/* where token t of request b lies */
int64_t page_of(const problem *p, int b, int32_t t);
int offset_of(const problem *p, int32_t t);
uint16_t *q_row(const problem *p, int b, int i, int h);

/* The desc of the whole problem, but for plan, workspace and outputs. */
snapmla_decode_desc problem_desc(const problem *p);

/* ================================================================================================
   Runs
   ============================================================================================== */

/* Dense host results: out [batch, s_q, heads, 512], lse [batch, s_q, heads]. */
typedef struct result {
    int batch, s_q, heads;
    uint16_t *out;
    float *lse;
} result;

/* Part of a problem: requests [b0, b0 + nb), query tokens [i0, i0 + ni), heads [h0, h0 + nh). */
typedef struct view {
    int b0, nb, i0, ni, h0, nh;
    const int32_t *lens; /* [nb] instead of the problem's; NULL = those */
    int causal;
} view;
view view_all(const problem *p);

/* Plan and decode with everything but the inputs poisoned; checks guards and gaps.  With
   SNAPMLA_TEST_UNFILLED set, new plans and workspaces are left as they are: a fill counts as written for
   compute-sanitizer's initcheck. */
result run(problem *p);
result run_view(problem *p, const view *v);

/* The same, in pieces: a stage that can be planned, launched and read separately. */
typedef struct stage {
    snapmla_decode_desc desc;
    gpu_mem plan, workspace, out, lse, lens;
    const problem *p;
    view v;
} stage;
stage stage_new(problem *p, const view *v);
void stage_poison(stage *s, int fill); /* plan, workspace and outputs */
result stage_read(stage *s);           /* waits; checks the gaps of the outputs */
void stage_free(stage *s);             /* checks the guards */

void result_free(result *r);
/* Bit for bit; prints the first row that differs. */
void check_same_bits(const char *file, int line, const result *a, const result *b);
#define CHECK_SAME_BITS(a, b) check_same_bits(__FILE__, __LINE__, (a), (b))

/* ================================================================================================
   Comparison with the reference
   ============================================================================================== */
typedef struct bounds {
    double rms;     /* over all compared rows */
    double row_rms; /* of any row */
    double bias;
    double lse_abs;
    double lse_rel; /* either of the two is enough */
} bounds;

typedef struct verdict {
    double rms, bias, lse_abs, lse_rel, row_rms;
    int64_t rows;
    int64_t wrong_nan; /* elements where only one of the two is NaN or Inf, or empty rows not 0 */
    int worst_b, worst_i, worst_h, worst_d;
    double worst_got, worst_ref;
} verdict;

/* Up to `budget` multiply-adds of reference work (0: 2e7), on rows chosen by the problem's seed. */
verdict compare(const problem *p, const result *r, snapmla_ref_fidelity fidelity, double budget);
/* Rows of heads [h0, h0 + nh) of request b only, all query tokens. */
verdict compare_part(const problem *p, const result *r, snapmla_ref_fidelity fidelity, int b,
                     int h0, int nh);
/* Put the reference's own results for those rows into r. */
void reference_part(const problem *p, result *r, snapmla_ref_fidelity fidelity, int b, int h0,
                    int nh);
/* What is wrong with v: 0 = nothing, or a text. */
const char *verdict_fault(const verdict *v, const bounds *limit);
void check_verdict(const char *file, int line, const problem *p, const verdict *v,
                   const bounds *limit);
#define CHECK_VERDICT(p, v, limit) check_verdict(__FILE__, __LINE__, (p), (v), (limit))

/* The general bounds of one e4m3 rounding of P, or those of the precise mode, for V of mean 0 and
   logits of any spread up to q_std 4; and, where the path's recurrence is the emulated one, agreement
   with that. */
void check_against_reference(const char *file, int line, problem *p, const result *r,
                             double budget);
#define CHECK_REFERENCE(p, r, budget) \
    check_against_reference(__FILE__, __LINE__, (p), (r), (budget))

/* problem_new, run, CHECK_REFERENCE, problem_check_inputs, problem_free */
void check_spec(const char *file, int line, const spec *s, double budget);
#define CHECK_SPEC(s, budget) check_spec(__FILE__, __LINE__, (s), (budget))

#endif
