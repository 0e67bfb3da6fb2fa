/* snapmla.cuh - v0.1.0 - FP8 MLA decode attention in one header - MIT licence

   Multi-head latent attention (DeepSeek V2/V3/R1, Kimi-K2, LongCat-Flash, GLM) over a SnapMLA cache:
   the latent in FP8 E4M3 with one f32 scale a token, the rope key in BF16, 644 bytes a token instead
   of 1152.  CUDA kernels behind a C API; no torch, no CUTLASS, no build system.

   DO THIS in exactly one .cu file of your program:

       #define SNAPMLA_IMPLEMENTATION
       #include "snapmla.cuh"

   and compile it for your GPU:

       nvcc -O3 -std=c++17 -gencode arch=compute_90a,code=sm_90a -c that_file.cu

   Every other file, C99 or C++11 and newer, includes snapmla.cuh without the define.

   EXAMPLE     examples/01_minimal.cu is a whole program; the calls of a decoding step are

       snapmla_step step = {0};          // once a step: what all layers share
       step.batch = batch;  step.s_q = 1;  step.heads = 128;
       step.seq_lens = seq_lens;         // device, i32 [batch], the new tokens included
       step.plan = plan;  step.plan_bytes = plan_bytes;  step.stream = stream;
       snapmla_plan(&step);

       for each layer:
           snapmla_append(&append);      // quantise the new keys into their cache slots
           decode.step = step;           // plus cache, block_table, q, out, softmax_scale, workspace
           snapmla_decode(&decode);

   NEEDS       a GPU of compute capability 8.0 or newer, CUDA 12.8 or newer, -std=c++17 for the
               implementation.  Nothing to link but the CUDA runtime that nvcc links anyway.
   DOES        append (with RMSNorm and RoPE, if asked), quantise queries (with RoPE), plan, split-KV
               decode (paged, causal, several query tokens), merge partial results, read tokens back,
               copy pages, import other caches.  Any number of heads, any mix of lengths.
   DOES NOT    prefill, backward, project (W_UK, W_UV stay with you), allocate, print, synchronise,
               set the device, keep state, check what lies in device memory.

   TABLE OF CONTENTS   search for the tag
       >>config >>version >>result >>types >>api                              declarations
       >>impl >>util >>ptx >>convert >>quantise >>dataflow >>plan >>decode
       >>general >>hopper >>combine >>merge >>host >>public >>cleanup         implementation

   FUNCTIONS   contracts stand at >>api
       snapmla_version  snapmla_result_string  snapmla_device_supported  snapmla_resolve
       snapmla_quantize_q  snapmla_append  snapmla_fetch  snapmla_copy_pages  snapmla_import
                                                                                  data flow
       snapmla_plan_bytes  snapmla_plan  snapmla_decode_workspace  snapmla_decode  attention
       snapmla_merge                                                              several GPUs

   CONCEPTS
       latent      c = RMSNorm(W_DKV h), 512 wide: the keys' content and, the same numbers, the values
       rope        RoPE(W_KR h), 64 wide, one for all heads
       query       absorbed: (q_nope W_UK, RoPE(q_rope)), latent dims first: 576 numbers a head
       page        page_size tokens; a request's pages are listed in its row of the block table
       slot        page * page_size + offset, 64 bits
       row         one query head of one query token of a request; row = query token * heads + head
       split       a run of a request's tokens that one CTA works on; splits are merged at the end
       lse         natural log of the sum of exp(softmax_scale * q.k) over the keys a row sees

   CACHE FORMAT        three planes a layer
       content     e4m3 [pages, page_size, 512]      = round(latent / scale)
       scale       f32  [pages, page_size]           = max(amax|latent|, 1e-26) / 448
       rope        bf16 [pages, page_size, 64]       = round(rope / scale)
       Each plane has its own page stride, so that three tensors work, and so does one record a page,
       e.g. for page_size 64: content at 0, scale at 32768, rope at 33024 of 41216 bytes, with strides
       of 41216, 10304 and 20608 elements.  The same bytes as SnapMLA's own caches.
       Queries have the same format, a scale per token and head.  A NaN or Inf in a latent makes the
       whole token NaN: scale 0x7fc00000, content 0x7f, rope 0x7fc0.
       Both rope and content are divided by one scale, so one factor serves both products (SnapMLA,
       arXiv 2602.10718, eq. 6).  If the latents of a query and a key are both all zero while both
       ropes are not, that factor underflows and their logit is NaN.

   DATA FLOW           one launch each, at the speed of memory, bit for bit what snapmla_ref.h gives
       kv_a_proj's output   -> snapmla_append, with norm and rotation: one call from projection to cache
       absorbed q and rope  -> snapmla_quantize_q, from one tensor or two, rotating the rope part;
                               or leave q as BF16 and already rotated, and decode quantises it
       prefill over a cached prefix     <- snapmla_fetch, by slots or by requests' position ranges
       a prefix that is about to differ, defragmentation, another worker: snapmla_copy_pages
       a BF16 or FlashMLA FP8 cache     -> snapmla_import
       Rows of keys that are not aligned to 16 bytes go in pieces of 2 or 4 bytes: slower, as correct.
       RoPE turns pairs in place, in the layout that the caller names.  Norm and rotation are rounded
       to BF16, so a fused call gives the bytes of the same call on prepared rows; their order of
       operations is written down at snapmla_norm and snapmla_rotation.  A token whose sum of squares
       is Inf becomes NaN as a whole, where other norms would quietly make it zeros.  On compute
       capability 9.0 and newer a launch overlaps the end of the kernel before it in the stream, and
       waits for that end before it reads or writes.  append reads a position for skipped tokens, too.

   OPTIONS
       the same in every file      SNAPMLA_API      your own linkage, e.g. a visibility attribute
       implementation file only    SNAPMLA_IMPLEMENTATION
                                   SNAPMLA_STATIC   the API is static: for that one .cu file alone

   ERRORS      Every function that can fail returns a snapmla_result; SNAPMLA_RESULT_LIST has all
               codes and texts.  What the host can see is checked, argument by argument, before
               anything is written or launched.  Tables, lengths and slots in device memory are
               trusted: page ids below cache.pages, slots inside the cache.  A CUDA error that you had
               pending stays pending, and none is left behind by this library.

   MEMORY, STREAMS, GRAPHS, THREADS
       All memory is yours: ask snapmla_plan_bytes() and snapmla_decode_workspace().  One workspace
       serves all layers of a stream; concurrent streams need one each, and a plan each.
       With split_tokens = 0 the workspace does not grow with the batch (9 to 35 MB on 132 SMs).
       Everything is asynchronous on the desc's stream and re-entrant.  A captured graph of plan and
       decodes may be replayed with other lengths, tables, queries and cache contents at the same
       addresses, up to the lengths that the captured table width and max_seq_len allow.
       The current device must be the stream's.

   NUMERICS    Per row and block of 64 tokens (SnapMLA's scheme, with two changes of ours):
           x  = softmax_scale * log2(e) * q_s * k_s * (q8.k8 + qr.kr)         f32; rope in bf16
           m' = max(m, max x);  e = 2^(x - m');  f = e * k_s
           S' = max f / 448;  p8 = e4m3(f / S')                 the largest weight is 448 exactly
           acc = acc * 2^(m - m') + S' * (p8 V8)                the product in a fresh accumulator
           l   = l * 2^(m - m') + sum e;   lse = m ln2 + ln l
           lq  the same sum over the weights as rounded (p8 S' / k_s); out = acc / lq
       A fresh accumulator for every block keeps long contexts right: the running output never sits in
       a tensor core.  On the general path the products run as FP16, exact, with f32 sums.  On the
       Hopper path they run as FP8, whose tensor core keeps 13 fraction bits of a sum: QK takes four
       accumulators of 128 dims each, added in f32.  There S' is rounded to bf16 before acc and lq use
       it, and m follows the largest x + log2 k_s, only where that has grown by 60 binades.
       Dividing by the rounded weights takes their common error out; where e4m3 has flushed a weight
       (a token whose k_s is tiny beside its neighbours') the exact one is taken.
       SNAPMLA_MODE_PRECISE leaves no rounding but the cache's own that counts.  A BF16 q gets a power of
       two for q_s, and its rope stays the bf16 that it is.  On the general path its latent becomes f16,
       which changes nothing above 2^-25 of its largest, and p8 the f16 of f / S', 11 bits down to 2^-22
       of the block's largest.  On the Hopper path both become sums of two e4m3, the second of what the
       first leaves: q to 2^-17 of its largest, 8 bits of P down to 2^-10 of its unit; S' is not
       rounded, lq is l, and QK takes eight accumulators of 64 dims.  A block of one dominant token still
       returns it exactly.  Quantised planes of q are taken as they are, and only P is precise.
       Results do not depend on anything but the inputs and the cut into splits, and repeat bit for
       bit.  With split_tokens fixed, a row's bits depend on its own request only, and s_q query tokens
       give the bits of s_q calls with one.
       Measured errors: README.md and tests/.  The reference is snapmla_ref.h.

   HOW IT WORKS
       snapmla_plan     one block: sums over the lengths, then equal stretches of work, "parts", one for
                        each group of CTAs; a request is cut between parts where that saves more time
                        than merging its splits takes
       decode kernel    a CTA walks over its part, split by split; whole requests are written as BF16,
                        cut ones as f32 partial sums
           >>general    cache --cp.async--> two stages --e4m3 to f16--> mma.sync scores
                        --> base-2 softmax, P to e4m3 (precise: f16) --> mma.sync values --> f32 sums
           >>hopper     load warp --TMA--> four stages --> softmax warpgroup: wgmma scores, P to e4m3
                        --> two values warpgroups: V turned in registers, wgmma, f32 sums; with few
                        rows two warpgroups share softmax, scores and weights
       combine          merges the splits of cut requests, always in the same order
       On the Hopper path decode and combine start while the kernel before them in the stream ends, and
       wait for that end before they read what it wrote.

   PATHS       SNAPMLA_PATH_SM90 runs on compute capability 9.0 when code for sm_90a was compiled in and
               page_size is 64 or more; SNAPMLA_PATH_GENERAL runs everywhere.  Both hold the same bounds
               but do not give the same bits.

   LIMITS      latent 512 and rope 64 only; batch * s_q * heads up to 2^30.  On the Hopper path logits up
               to about 1e8: beyond, f32 misses a block's scale by many binades, and rows become 0.

   HISTORY     0.1.0   first version

   Licence (MIT) at the end of the file.
*/
#ifndef SNAPMLA_CUH_INCLUDED
#define SNAPMLA_CUH_INCLUDED

/* ================================================================================================
   >>config     what may be set before the include (see OPTIONS in the manual)
   ============================================================================================== */
#include <stddef.h>
#include <stdint.h>

#include <cuda_runtime_api.h>

#ifndef SNAPMLA_API
#ifdef SNAPMLA_STATIC
#define SNAPMLA_API static inline
#else
#define SNAPMLA_API extern
#endif
#endif

/* ================================================================================================
   >>version
   ============================================================================================== */
#define SNAPMLA_VERSION_MAJOR 0
#define SNAPMLA_VERSION_MINOR 1
#define SNAPMLA_VERSION_PATCH 0
#define SNAPMLA_VERSION \
    (SNAPMLA_VERSION_MAJOR * 10000 + SNAPMLA_VERSION_MINOR * 100 + SNAPMLA_VERSION_PATCH)

#ifdef __cplusplus
extern "C" {
#endif

/* ================================================================================================
   >>result     one list owns every code, its number and its text

   0 is success, every failed check has a code of its own, and nothing is written or launched when a
   check of the arguments fails.  Of several mistakes, which one is told is not promised.
   ============================================================================================== */
#define SNAPMLA_RESULT_LIST(X)                                                                     \
    X(SNAPMLA_OK, 0, "ok")                                                                         \
    X(SNAPMLA_ERROR_NULL_DESC, -1, "a desc or an output pointer of the call itself is NULL")       \
    X(SNAPMLA_ERROR_CUDA, -2, "a CUDA call failed, or there is no CUDA device")                    \
    X(SNAPMLA_ERROR_DEVICE, -3, "the path does not run on this device, or is not compiled in")     \
    X(SNAPMLA_ERROR_BATCH, -4, "batch is negative")                                                \
    X(SNAPMLA_ERROR_S_Q, -5, "s_q is negative")                                                    \
    X(SNAPMLA_ERROR_HEADS, -6, "heads is negative, or batch, s_q and heads overflow together")     \
    X(SNAPMLA_ERROR_TOKENS, -7, "tokens, rows or count is negative, or too large")                 \
    X(SNAPMLA_ERROR_LATENT_DIM, -8, "latent_dim is not supported")                                 \
    X(SNAPMLA_ERROR_ROPE_DIM, -9, "rope_dim is not supported with this latent_dim")                \
    X(SNAPMLA_ERROR_PAGE_SIZE, -10, "page_size is not a power of two from 1 to 1024")              \
    X(SNAPMLA_ERROR_PAGES, -11, "pages is negative")                                               \
    X(SNAPMLA_ERROR_MAX_SEQ_LEN, -12, "max_seq_len is negative, or 0 with split_tokens")           \
    X(SNAPMLA_ERROR_SPLIT_TOKENS, -13, "split_tokens is negative, no multiple of 128, or too small") \
    X(SNAPMLA_ERROR_MODE, -14, "mode is not one of snapmla_mode")                                  \
    X(SNAPMLA_ERROR_PATH, -15, "path is not one of snapmla_path, or not for this page_size")        \
    X(SNAPMLA_ERROR_SM_COUNT, -16, "sm_count is negative")                                         \
    X(SNAPMLA_ERROR_NULL_SEQ_LENS, -17, "seq_lens is NULL")                                        \
    X(SNAPMLA_ERROR_NULL_PLAN, -18, "plan is NULL")                                                \
    X(SNAPMLA_ERROR_PLAN_ALIGN, -19, "plan is not 16-byte aligned")                                \
    X(SNAPMLA_ERROR_PLAN_BYTES, -20, "plan_bytes is smaller than snapmla_plan_bytes() says")       \
    X(SNAPMLA_ERROR_STEP_CACHE, -21, "step and cache disagree on latent_dim, rope_dim, page_size") \
    X(SNAPMLA_ERROR_NULL_CONTENT, -22, "content is NULL although the cache has pages")             \
    X(SNAPMLA_ERROR_NULL_SCALE, -23, "scale is NULL although the cache has pages")                 \
    X(SNAPMLA_ERROR_NULL_ROPE, -24, "rope is NULL although the cache has pages and a rope part")   \
    X(SNAPMLA_ERROR_CONTENT_ALIGN, -25, "content or its page stride is not 16-byte aligned")       \
    X(SNAPMLA_ERROR_SCALE_ALIGN, -26, "scale or its page stride is misaligned: min(16, 4*page_size)") \
    X(SNAPMLA_ERROR_ROPE_ALIGN, -27, "rope or its page stride is not 16-byte aligned")             \
    X(SNAPMLA_ERROR_CONTENT_STRIDE, -28, "content_page_stride is smaller than a page")             \
    X(SNAPMLA_ERROR_SCALE_STRIDE, -29, "scale_page_stride is smaller than a page")                 \
    X(SNAPMLA_ERROR_ROPE_STRIDE, -30, "rope_page_stride is smaller than a page")                   \
    X(SNAPMLA_ERROR_TABLE_WIDTH, -31, "block_table_width is negative")                             \
    X(SNAPMLA_ERROR_NULL_BLOCK_TABLE, -32, "block_table is NULL although its width is not 0")      \
    X(SNAPMLA_ERROR_TABLE_STRIDE, -33, "block_table_stride is smaller than its width")             \
    X(SNAPMLA_ERROR_CAUSAL, -34, "causal is neither 0 nor 1")                                      \
    X(SNAPMLA_ERROR_SOFTMAX_SCALE, -35, "softmax_scale is 0, negative, NaN or infinite")           \
    X(SNAPMLA_ERROR_NULL_Q, -36, "neither q nor all of its quantised planes are given")            \
    X(SNAPMLA_ERROR_Q_TWICE, -37, "both q and quantised planes are given")                         \
    X(SNAPMLA_ERROR_Q_ALIGN, -38, "q, a q plane or a q stride is not aligned as documented")       \
    X(SNAPMLA_ERROR_Q_STRIDE, -39, "a stride of q is negative or smaller than a row")              \
    X(SNAPMLA_ERROR_NULL_OUT, -40, "out is NULL")                                                  \
    X(SNAPMLA_ERROR_OUT_ALIGN, -41, "out or one of its strides is not 16-byte aligned")            \
    X(SNAPMLA_ERROR_OUT_STRIDE, -42, "a stride of out is negative or smaller than a row")          \
    X(SNAPMLA_ERROR_NULL_LSE, -43, "lse is NULL where it is needed")                               \
    X(SNAPMLA_ERROR_LSE_STRIDE, -44, "a stride of lse is negative or smaller than a row")          \
    X(SNAPMLA_ERROR_NULL_WORKSPACE, -45, "workspace is NULL")                                      \
    X(SNAPMLA_ERROR_WORKSPACE_ALIGN, -46, "workspace is not 16-byte aligned")                      \
    X(SNAPMLA_ERROR_WORKSPACE_BYTES, -47, "workspace_bytes is below snapmla_decode_workspace()")       \
    X(SNAPMLA_ERROR_NULL_LATENT, -48, "latent is NULL")                                            \
    X(SNAPMLA_ERROR_KEY_ALIGN, -49, "a latent or rope row is not 2-byte aligned")                  \
    X(SNAPMLA_ERROR_KEY_STRIDE, -50, "latent_stride or rope_stride is smaller than a row")         \
    X(SNAPMLA_ERROR_NULL_SLOTS, -51, "slots is NULL")                                              \
    X(SNAPMLA_ERROR_PARTS, -52, "parts is negative, or 0 with rows to write")                      \
    X(SNAPMLA_ERROR_PART_STRIDE, -53, "a part stride is smaller than a part")                      \
    X(SNAPMLA_ERROR_NULL_POSITIONS, -54, "rotation.cosines without rotation.positions")            \
    X(SNAPMLA_ERROR_NULL_COSINES, -55, "rotation.positions without rotation.cosines")              \
    X(SNAPMLA_ERROR_ROTATION_ALIGN, -56, "rotation.positions, cosines or sines is misaligned")     \
    X(SNAPMLA_ERROR_ROTATION_STRIDE, -57, "rotation.table_stride is smaller than a row")           \
    X(SNAPMLA_ERROR_ROTATION_LAYOUT, -58, "rotation.layout is not one of snapmla_rope_layout")     \
    X(SNAPMLA_ERROR_NORM_TYPE, -59, "norm.weight_type is not one of snapmla_number")               \
    X(SNAPMLA_ERROR_NORM_ALIGN, -60, "norm.weight is not 16-byte aligned")                         \
    X(SNAPMLA_ERROR_NORM_EPS, -61, "norm.eps is negative, NaN or infinite")                        \
    X(SNAPMLA_ERROR_SLOTS_TWICE, -62, "both slots and block_table are given")                      \
    X(SNAPMLA_ERROR_NULL_ROW_STARTS, -63, "row_starts is NULL although block_table is given")      \
    X(SNAPMLA_ERROR_LAYERS, -64, "layers is negative")                                             \
    X(SNAPMLA_ERROR_NULL_SOURCE, -65, "source or destination is NULL")                             \
    X(SNAPMLA_ERROR_LAYERS_DIFFER, -66, "the layers of source or destination differ in more than pointers") \
    X(SNAPMLA_ERROR_COPY_FORMAT, -67, "source and destination differ in page_size or dims")        \
    X(SNAPMLA_ERROR_NULL_PAIRS, -68, "pairs is NULL")                                              \
    X(SNAPMLA_ERROR_SOURCE_FORMAT, -69, "format is not one of snapmla_source_format")              \
    X(SNAPMLA_ERROR_SOURCE_PAGE_SIZE, -70, "source_page_size is not a power of two from 1 to 1024") \
    X(SNAPMLA_ERROR_SOURCE_ALIGN, -71, "source or a source stride is not aligned as documented")   \
    X(SNAPMLA_ERROR_SOURCE_STRIDE, -72, "a source stride is smaller than a row or page, or too large") \
    X(SNAPMLA_ERROR_TABLE_ALIGN, -73, "pairs, slots, seq_lens or another table is misaligned")        \
    X(SNAPMLA_ERROR_LSE_ALIGN, -74, "lse or part_lse is not 4-byte aligned")

typedef enum snapmla_result {
#define SNAPMLA_RESULT_ENUM(name, value, text) name = value,
    SNAPMLA_RESULT_LIST(SNAPMLA_RESULT_ENUM)
#undef SNAPMLA_RESULT_ENUM
    SNAPMLA_RESULT_FORCE_INT = 0x7fffffff
} snapmla_result;

/* ================================================================================================
   >>types      zero is the default of every optional field; strides count elements, 0 = dense
   ============================================================================================== */

/* Which kernels run.  AUTO takes the fastest that the device and the shape allow. */
typedef enum snapmla_path {
    SNAPMLA_PATH_AUTO = 0,
    SNAPMLA_PATH_GENERAL = 1, /* mma.sync, compute capability 8.0 and newer, every shape */
    SNAPMLA_PATH_SM90 = 2,    /* FP8 wgmma and TMA: code for sm_90a, pages of 64 tokens and more */
    SNAPMLA_PATH_FORCE_INT = 0x7fffffff
} snapmla_path;

/* Which roundings there are beside the cache's own: see NUMERICS in the manual. */
typedef enum snapmla_mode {
    SNAPMLA_MODE_DEFAULT = 0, /* P and Q rounded once to e4m3, as in the SnapMLA paper */
    SNAPMLA_MODE_PRECISE = 1, /* P and a BF16 q with twice the bits of e4m3 or more */
    SNAPMLA_MODE_FORCE_INT = 0x7fffffff
} snapmla_mode;

enum { SNAPMLA_NO_ROPE = -1 }; /* rope_dim of a model whose keys have no rope part */

/* The cache of one layer: three planes, paged.  Token `offset` of page `page` is slot
   page * page_size + offset.  Layouts: see CACHE FORMAT in the manual.  When pages is 0 the
   planes may be NULL. */
typedef struct snapmla_cache {
    void *content;               /* e4m3 [pages, page_size, latent_dim], 16-byte aligned */
    float *scale;                /* f32 [pages, page_size], aligned to min(16, 4 * page_size) */
    void *rope;                  /* bf16 [pages, page_size, rope_dim] / scale, 16-byte aligned */
    int64_t content_page_stride; /* elements from page to page, 0 = page_size * latent_dim */
    int64_t scale_page_stride;   /* elements, 0 = page_size */
    int64_t rope_page_stride;    /* elements, 0 = page_size * rope_dim */
    int64_t pages;               /* pages in each plane; every page id is below it */
    int32_t page_size;           /* tokens a page, a power of two from 1 to 1024, 0 = 64 */
    int32_t latent_dim;          /* 0 = 512; the only width so far */
    int32_t rope_dim;            /* 0 = 64; the only width so far */
} snapmla_cache;

/* What all layers of one decoding step share.  snapmla_plan() takes it once a step, and
   snapmla_decode() takes the same values again in desc.step. */
typedef struct snapmla_step {
    int32_t batch;           /* requests; 0 = nothing to do */
    int32_t s_q;             /* query tokens a request; 0 = nothing to do */
    int32_t heads;           /* query heads, all on one latent; 0 = nothing to do */
    int32_t latent_dim;      /* as in snapmla_cache */
    int32_t rope_dim;        /* as in snapmla_cache */
    int32_t page_size;       /* as in snapmla_cache */
    int32_t max_seq_len;     /* longer requests are cut to it; 0 = no limit but the block table */
    int32_t split_tokens;    /* 0 = balance over the SMs; else a multiple of 128: every request is
                                cut at its multiples, which makes a row's bits independent of the
                                batch (needs max_seq_len, which sizes the workspace) */
    int32_t sm_count;        /* SMs to spread over; 0 = all SMs of the current device */
    snapmla_mode mode;       /* 0 = SNAPMLA_MODE_DEFAULT */
    snapmla_path path;       /* 0 = the best one for the device, shape and mode */
    const int32_t *seq_lens; /* device, i32 [batch]: cached tokens of each request, <= 0 = none */
    void *plan;              /* device, 16-byte aligned; written by snapmla_plan() */
    size_t plan_bytes;       /* at least what snapmla_plan_bytes() says */
    cudaStream_t stream;     /* where the step runs; 0 = the default stream */
} snapmla_step;

/* One layer's attention. */
typedef struct snapmla_decode_desc {
    snapmla_step step;          /* the step that snapmla_plan() was given */
    snapmla_cache cache;        /* read only */
    const int32_t *block_table; /* device, i32 [batch, block_table_width]: page ids.  Only the first
                                   ceil(len / page_size) of a row are read; a negative id among
                                   these skips its page's tokens.  NULL with width 0 */
    int64_t block_table_stride; /* elements from row to row, 0 = block_table_width */
    int32_t block_table_width;  /* pages in a row; lengths beyond width * page_size are cut */
    int32_t causal;             /* 1: query i of s_q sees keys below len - s_q + 1 + i; 0: all */
    float softmax_scale;        /* factor on q.k, always given, > 0: the model's (nope + rope)^-0.5
                                   times its yarn factor, if any */
    const void *q;              /* device, bf16 [batch, s_q, heads, latent_dim + rope_dim], 16-byte
                                   aligned rows; or NULL and the three planes below */
    int64_t q_batch_stride;     /* elements, multiples of 8; 0 = dense */
    int64_t q_token_stride;
    int64_t q_head_stride;
    const void *q_content;      /* device, e4m3 [batch, s_q, heads, latent_dim], 16-byte aligned */
    const float *q_scale;       /* device, f32 [batch, s_q, heads] */
    const void *q_rope;         /* device, bf16 [batch, s_q, heads, rope_dim] / q_scale, 16-byte
                                   aligned */
    void *out;                  /* device, bf16 [batch, s_q, heads, latent_dim], rows 16-byte aligned */
    int64_t out_batch_stride;   /* elements, multiples of 8; 0 = dense */
    int64_t out_token_stride;
    int64_t out_head_stride;
    float *lse;                 /* device, f32 [batch, s_q, heads], natural log; NULL = not wanted */
    int64_t lse_batch_stride;   /* elements; 0 = dense */
    int64_t lse_token_stride;
    void *workspace;            /* device, 16-byte aligned scratch; nothing in it outlives the call */
    size_t workspace_bytes;     /* at least what snapmla_decode_workspace() says */
} snapmla_decode_desc;

/* Which dims of a rope part form pair i, the pair that turns by the i-th angle.  A rotated pair stays
   where it was, so queries and keys must come in the same layout. */
typedef enum snapmla_rope_layout {
    SNAPMLA_ROPE_INTERLEAVED = 0, /* 2i and 2i + 1: DeepSeek's checkpoints */
    SNAPMLA_ROPE_HALF_SPLIT = 1,  /* i and i + rope_dim / 2: NeoX, Llama */
    SNAPMLA_ROPE_FORCE_INT = 0x7fffffff
} snapmla_rope_layout;

/* RoPE on the way in: (a, b) of pair i becomes (a cos - b sin, b cos + a sin), rounded to bf16.  To
   the bit, in f32: fma(a, cos, -(b * sin)) and fma(b, cos, a * sin), each product rounded. */
typedef struct snapmla_rotation {
    const int64_t *positions; /* device, i64 [tokens], each inside the tables; NULL = no rotation */
    const float *cosines;     /* device, f32 [positions, rope_dim / 2] */
    const float *sines;       /* device, f32, the same shape; NULL = right behind each row of cosines */
    int64_t table_stride;     /* elements from position to position, 0 = rope_dim when sines is NULL,
                                 else rope_dim / 2 */
    snapmla_rope_layout layout;
} snapmla_rotation;

typedef enum snapmla_number {
    SNAPMLA_NUMBER_BF16 = 0,
    SNAPMLA_NUMBER_F32 = 1,
    SNAPMLA_NUMBER_FORCE_INT = 0x7fffffff
} snapmla_number;

/* RMSNorm of a latent on the way in: bf16(x * r * weight), r = 1 / sqrt(mean of squares + eps).  To the
   bit, in f32: runs of 8 dims are summed by fma in ascending order, from 0; then the upper half of
   the n sums is added to the lower half, n / 2 + i to i, until one is left.
   r = 1 / sqrt(sum / latent_dim + eps), every operation rounded; (x * r) * weight.  A sum that is
   Inf or NaN makes the whole token NaN. */
typedef struct snapmla_norm {
    const void *weight;         /* device, [latent_dim], 16-byte aligned; NULL = no norm */
    snapmla_number weight_type; /* of the weight: bf16 or f32 */
    float eps;                  /* 0 = 1e-6 */
} snapmla_norm;

/* Quantise queries to the three planes that snapmla_decode() takes. */
typedef struct snapmla_quantize_q_desc {
    int64_t tokens;         /* query tokens, batch * s_q; 0 = nothing to do */
    int32_t heads;
    int32_t latent_dim;     /* as in snapmla_cache */
    int32_t rope_dim;       /* as in snapmla_cache */
    const void *q;          /* device, bf16 [tokens, heads, latent_dim + rope_dim], 16-byte rows */
    int64_t q_token_stride; /* elements, multiples of 8; 0 = dense */
    int64_t q_head_stride;
    void *q_content;        /* device, e4m3 [tokens, heads, latent_dim], 16-byte aligned */
    float *q_scale;         /* device, f32 [tokens, heads] */
    void *q_rope;           /* device, bf16 [tokens, heads, rope_dim], 16-byte aligned */
    cudaStream_t stream;
    const void *rope;          /* device, bf16 [tokens, heads, rope_dim], 16-byte rows; NULL = right
                                  behind each latent, else q is bf16 [tokens, heads, latent_dim] */
    int64_t rope_token_stride; /* elements, multiples of 8; 0 = dense; ignored when rope is NULL */
    int64_t rope_head_stride;
    snapmla_rotation rotation; /* all zero: the rope part is rotated already */
} snapmla_quantize_q_desc;

/* Quantise keys and write them into cache slots. */
typedef struct snapmla_append_desc {
    snapmla_cache cache;
    int64_t tokens;        /* 0 = nothing to do */
    const void *latent;    /* device, bf16 [tokens, latent_dim], normed */
    int64_t latent_stride; /* elements, 0 = latent_dim + rope_dim when rope is NULL, else latent_dim */
    const void *rope;      /* device, bf16 [tokens, rope_dim], rotated; NULL = right behind each
                              latent row */
    int64_t rope_stride;   /* elements, 0 = rope_dim; ignored when rope is NULL */
    const int64_t *slots;  /* device, i64 [tokens]: page * page_size + offset; negative = skip.  No
                              slot may appear twice in one call */
    cudaStream_t stream;
    snapmla_norm norm;         /* all zero: the latent is normed already */
    snapmla_rotation rotation; /* all zero: the rope part is rotated already */
} snapmla_append_desc;

/* Read cached tokens back as BF16: latent = content * scale, rope = rope * scale. */
typedef struct snapmla_fetch_desc {
    snapmla_cache cache;   /* read only */
    int64_t tokens;        /* 0 = nothing to do */
    const int64_t *slots;  /* device, i64 [tokens]; negative = a row of zeros; NULL = block_table */
    void *latent;          /* device, bf16 [tokens, latent_dim], 2-byte aligned */
    int64_t latent_stride; /* elements, 0 = latent_dim + rope_dim when rope is NULL, else latent_dim */
    void *rope;            /* device, bf16 [tokens, rope_dim]; NULL = right behind each latent row */
    int64_t rope_stride;   /* elements, 0 = rope_dim; ignored when rope is NULL */
    cudaStream_t stream;
    /* The other way to name tokens: request b's positions first[b], first[b] + 1, ... go to rows
       row_starts[b] .. row_starts[b + 1] - 1.  A negative page id, or a position that is negative or
       past the table, gives a row of zeros; rows past row_starts[batch] are left alone. */
    const int32_t *block_table; /* device, i32 [batch, block_table_width] */
    int64_t block_table_stride; /* elements, 0 = block_table_width */
    int32_t block_table_width;
    int32_t batch;
    const int32_t *row_starts; /* device, i32 [batch + 1], ascending; tokens = the last, or more */
    const int32_t *first;      /* device, i32 [batch]; NULL = all 0 */
} snapmla_fetch_desc;

/* Copy pages, all three planes as they are, from caches to caches or within one, for many layers. */
typedef struct snapmla_copy_pages_desc {
    int32_t layers;                   /* 0 = nothing to do.  One launch for every 80 of them */
    const snapmla_cache *source;      /* host, [layers]: read; they differ in pointers only */
    const snapmla_cache *destination; /* host, [layers]: written; the same, and the source's
                                         page_size and dims; strides and pages may be others */
    int64_t count;                    /* pairs; 0 = nothing to do */
    const int32_t *pairs;             /* device, i32 [count, 2]: source page, destination page, 8-byte
                                         aligned; a negative id in either skips the pair.  No page
                                         may be written twice, or written and read, in one call */
    cudaStream_t stream;
} snapmla_copy_pages_desc;

typedef enum snapmla_source_format {
    SNAPMLA_SOURCE_BF16 = 0,        /* bf16 [576]: latent, rope; normed and rotated */
    SNAPMLA_SOURCE_RECORD_656 = 1,  /* FlashMLA's FP8 cache: 512 e4m3, four f32 scales of 128 dims each,
                                       64 bf16 of unscaled rope */
    SNAPMLA_SOURCE_FORCE_INT = 0x7fffffff
} snapmla_source_format;

/* Convert tokens of another paged cache.  A record's latent is bf16(e4m3 * its f32 scale); from there
   on the token is quantised as snapmla_append() does. */
typedef struct snapmla_import_desc {
    snapmla_cache cache; /* written */
    snapmla_source_format format;
    int32_t source_page_size;    /* tokens a page, a power of two from 1 to 1024, 0 = the cache's */
    const void *source;          /* device, [pages, source_page_size] rows; bf16: 2-byte aligned, records:
                                    4-byte; fast where rows are 16-byte aligned */
    int64_t source_row_stride;   /* bf16: elements, 0 = 576; records: bytes, 0 = 656, a multiple of 4 */
    int64_t source_page_stride;  /* in the same unit, 0 = dense */
    int64_t tokens;              /* 0 = nothing to do */
    const int64_t *source_slots; /* device, i64 [tokens]: source page * source_page_size + offset;
                                    negative = skip; NULL = 0, 1, 2, ... */
    const int64_t *slots;        /* device, i64 [tokens]: where to; negative = skip; NULL = the same as
                                    source_slots.  No slot may appear twice in one call */
    cudaStream_t stream;
} snapmla_import_desc;

/* Merge attention over disjoint sets of keys, e.g. of several GPUs. */
typedef struct snapmla_merge_desc {
    int32_t parts;           /* n >= 1 */
    int32_t dim;             /* width of a row of out, a multiple of 8; 0 = 512 */
    int64_t rows;            /* batch * s_q * heads; 0 = nothing to do */
    const void *part_out;    /* device, bf16 [parts, rows, dim], 16-byte aligned */
    const float *part_lse;   /* device, f32 [parts, rows]; -inf = no key in this part */
    int64_t part_out_stride; /* elements from part to part, a multiple of 8, 0 = rows * dim */
    int64_t part_lse_stride; /* elements, 0 = rows */
    void *out;               /* device, bf16 [rows, dim], 16-byte aligned; may be part_out itself */
    float *lse;              /* device, f32 [rows]; NULL = not wanted; may be part_lse itself */
    cudaStream_t stream;
} snapmla_merge_desc;

/* ================================================================================================
   >>api        in the order of use.  All launches are asynchronous on the desc's stream, may be
                captured into a CUDA graph, allocate nothing and keep no state.
   ============================================================================================== */

/* SNAPMLA_VERSION of the implementation that was linked. */
SNAPMLA_API int snapmla_version(void);

/* One line of English for a result; never NULL. */
SNAPMLA_API const char *snapmla_result_string(snapmla_result result);

/* SNAPMLA_OK if the CUDA device has a usable path, SNAPMLA_ERROR_DEVICE if it has none or no code for
   it was compiled in (which only the current device can tell), SNAPMLA_ERROR_CUDA if there is none.
   *path (may be NULL) receives the path that SNAPMLA_PATH_AUTO takes for pages of 64 tokens; for a
   device that is not the current one, SNAPMLA_PATH_GENERAL. */
SNAPMLA_API snapmla_result snapmla_device_supported(int device, snapmla_path *path);

/* Check *desc as snapmla_decode() does, but for the device, and write it to *resolved with every
   default filled in (strides, page_size, dims, sm_count, path).  Launches nothing. */
SNAPMLA_API snapmla_result snapmla_resolve(const snapmla_decode_desc *desc,
                                           snapmla_decode_desc *resolved);

/* Quantise queries: scale = max(amax|latent|, 1e-26) / 448, content = e4m3(latent / scale),
   rope = bf16(rope / scale), each rounded to nearest even.  A head whose latent holds NaN or Inf
   becomes all NaN.  With rotation, the rope part is rotated first.  The same bits as
   snapmla_ref_quantize_q(). */
SNAPMLA_API snapmla_result snapmla_quantize_q(const snapmla_quantize_q_desc *desc);

/* Quantise keys by the same rule and write them to their slots; touches nothing else.  With norm and
   rotation the raw rows of the kv_a projection may come in: the norm's and the rotation's results
   are rounded to bf16, and from there on it is the row of a plain call.  The same bits as
   snapmla_ref_append(). */
SNAPMLA_API snapmla_result snapmla_append(const snapmla_append_desc *desc);

/* Gather tokens back to BF16, by slots or by ranges of requests. */
SNAPMLA_API snapmla_result snapmla_fetch(const snapmla_fetch_desc *desc);

/* Copy pages byte for byte: sharing a prefix before it is written to, defragmentation, another
   worker's cache. */
SNAPMLA_API snapmla_result snapmla_copy_pages(const snapmla_copy_pages_desc *desc);

/* Quantise tokens of a cache in another format into this one. */
SNAPMLA_API snapmla_result snapmla_import(const snapmla_import_desc *desc);

/* Bytes that step->plan needs for this batch, s_q, heads, format, policy, mode, path and sm_count.
   seq_lens, plan and stream are not looked at. */
SNAPMLA_API snapmla_result snapmla_plan_bytes(const snapmla_step *step, size_t *bytes);

/* Cut all requests into splits and deal them to the SMs, on the device, from step->seq_lens as they
   are when the stream gets there.  Once a step, for all layers. */
SNAPMLA_API snapmla_result snapmla_plan(const snapmla_step *step);

/* Bytes of workspace that snapmla_decode() needs for this step. */
SNAPMLA_API snapmla_result snapmla_decode_workspace(const snapmla_step *step, size_t *bytes);

/* Attention of one layer: out = softmax(softmax_scale * q.k) V over the first seq_lens[b] tokens of
   each request, V = the dequantised latent; lse = natural log of the sum of exp.  A row without any
   key gets zeros and -inf.  A plan made from other lengths never reads out of bounds and ends, but
   the values are then wrong. */
SNAPMLA_API snapmla_result snapmla_decode(const snapmla_decode_desc *desc);

/* out = sum_n exp(lse_n - lse) out_n, lse = log sum_n exp(lse_n). */
SNAPMLA_API snapmla_result snapmla_merge(const snapmla_merge_desc *desc);

#ifdef __cplusplus
}
#endif
#endif /* SNAPMLA_CUH_INCLUDED */

/* ================================================================================================
   >>impl       everything below is compiled in the one .cu file that defines SNAPMLA_IMPLEMENTATION.
                Low to high: util, ptx, convert, quantise, data flow, planner, decode, combine,
                merge, host checks, public functions.  smla_ and SMLA_ names are private.
   ============================================================================================== */
#if defined(SNAPMLA_IMPLEMENTATION) && !defined(SNAPMLA_IMPLEMENTATION_INCLUDED)
#define SNAPMLA_IMPLEMENTATION_INCLUDED

#ifndef __CUDACC__
#error "snapmla.cuh: compile the file that defines SNAPMLA_IMPLEMENTATION with nvcc (a .cu file)"
#elif !defined(__CUDACC_VER_MAJOR__) || __CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__ < 1208
#error "snapmla.cuh: the implementation needs CUDA 12.8 or newer"
#elif __cplusplus < 201703L
#error "snapmla.cuh: the implementation needs -std=c++17 or newer"
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
#error "snapmla.cuh: the implementation needs compute capability 8.0 or newer, e.g. -arch=sm_90a"
#endif

#include <limits.h>

#include <cuda.h> /* types of tensor maps; nothing of libcuda is linked */
#include <cuda_runtime.h>

/* ================================================================================================
   >>util
   ============================================================================================== */
#define SMLA_DEV [[maybe_unused]] static __device__ __forceinline__
#define SMLA_HD [[maybe_unused]] static __host__ __device__ __forceinline__
#define SMLA_CONST [[maybe_unused]] static constexpr
#define SMLA_UNROLL _Pragma("unroll")

SMLA_CONST int smla_kLatent = 512; /* latent dims: K content and V */
SMLA_CONST int smla_kRope = 64; /* rope dims, K only */
SMLA_CONST int smla_kLongest = INT_MAX - 1024; /* tokens: the next blocks' still fit an int */
SMLA_CONST int smla_kBlock = 64; /* tokens that share one P scale and one partial accumulator */
SMLA_CONST int smla_kAlign = 16; /* bytes: the unit of all loads */
/* "up to the request's length, whatever it is by then" */
SMLA_CONST int smla_kToEnd = INT_MAX;
SMLA_CONST int smla_kMaxParts = 1024; /* parts a plan can have: one block plans them all */
/* row tiles of a request that run side by side on the same pages */
SMLA_CONST int smla_kMaxGroup = 8;
/* the same on the Hopper path: 132 SMs are a multiple of 1, 2, 3, 4 */
SMLA_CONST int smla_kHopperGroup = 4;
SMLA_CONST int smla_kHopperPage = 64; /* least page size of the Hopper path */
/* what starting and ending a split costs, in blocks of tokens */
SMLA_CONST int smla_kOverheadBlocks = 2;
/* rows of partial results that are written, read and merged in the time of a block: 4 KB each at
   4 to 5 TB/s in about 1 us */
SMLA_CONST int smla_kMergeRows = 1024;

SMLA_CONST float smla_kLog2e = 1.4426950408889634f;
SMLA_CONST float smla_kLn2 = 0.6931471805599453f;
SMLA_CONST float smla_kE4m3Max = 448.0f;
SMLA_CONST float smla_kE4m3MinNormal = 0x1p-6f;
SMLA_CONST float smla_kF16MinNormal = 0x1p-14f;
SMLA_CONST uint32_t smla_kF16x2Max = 0x7bff7bffu; /* 65504 twice */
SMLA_CONST float smla_kAmaxFloor = 1e-26f;
SMLA_CONST uint32_t smla_kLeastExponent = 127 - 87; /* of the same, biased */
SMLA_CONST float smla_k448thMost = 0x1.249248p-9f; /* 1 / 448, rounded towards zero, and the rest */
SMLA_CONST float smla_k448thRest = 0x1.249248p-33f;
SMLA_CONST float smla_kShrink = 0x1p-64f;
SMLA_CONST float smla_kGrow = 0x1p64f;
SMLA_CONST uint32_t smla_kNanF32 = 0x7fc00000u;
SMLA_CONST uint32_t smla_kNanBf16 = 0x7fc0u;
SMLA_CONST uint32_t smla_kNanE4m3 = 0x7fu;

template <typename T> SMLA_HD T smla_min(T a, T b) { return a < b ? a : b; }
template <typename T> SMLA_HD T smla_max(T a, T b) { return a > b ? a : b; }
SMLA_HD int64_t smla_ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

SMLA_DEV float smla_neg_inf() { return __uint_as_float(0xff800000u); }
SMLA_DEV bool smla_is_finite(float x) { return (__float_as_uint(x) & 0x7fffffffu) < 0x7f800000u; }

/* ================================================================================================
   >>ptx        one wrapper per instruction, named after it, operands in PTX order
   ============================================================================================== */
SMLA_DEV uint32_t smla_smem_addr(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }

/* cp.async.cg.shared.global [dst], [src], 16, src_bytes;   PTX ISA "cp.async", 7.0.
   Bytes past src_bytes are filled with zeros; with 0 the source is not read. */
SMLA_DEV void smla_cp_async_16(uint32_t dst, const void *src, uint32_t src_bytes)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :: "r"(dst), "l"(src), "r"(src_bytes) : "memory");
}

/* cp.async.ca.shared.global [dst], [src], 4, src_bytes; */
SMLA_DEV void smla_cp_async_4(uint32_t dst, const void *src, uint32_t src_bytes)
{
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;"
                 :: "r"(dst), "l"(src), "r"(src_bytes) : "memory");
}

/* cp.async.wait_all; */
SMLA_DEV void smla_cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

/* ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16; PTX ISA "ldmatrix", 6.5. */
SMLA_DEV void smla_ldmatrix_x4_trans(uint32_t (&d)[4], uint32_t addr)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3]) : "r"(addr) : "memory");
}

/* mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32; PTX ISA "mma", 7.0.  d += a b. */
SMLA_DEV void smla_mma_f16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 */
SMLA_DEV void smla_mma_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* griddepcontrol.launch_dependents;   PTX ISA "griddepcontrol", 7.8, sm_90.
   Once all CTAs have said this or ended, the next kernel may start, if it was launched to overlap this
   one: its CTAs take the place of those that end.  Nothing written is promised to be visible. */
SMLA_DEV void smla_launch_dependents()
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/* griddepcontrol.wait;   until the kernel before this one has ended and its writes are visible; at
   once, if this one was not launched to overlap it. */
SMLA_DEV void smla_griddepcontrol_wait()
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

SMLA_DEV float smla_ex2(float x) /* 2^x; -inf gives 0 */
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

SMLA_DEV float smla_lg2(float x) /* log2 x; 0 gives -inf */
{
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* IEEE division and product whatever -use_fast_math says: quantisation must give the same bits
   in every build. */
SMLA_DEV float smla_div_rn(float a, float b)
{
    float y;
    asm("div.rn.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
}

SMLA_DEV float smla_mul_rn(float a, float b)
{
    float y;
    asm("mul.rn.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
}

SMLA_DEV float smla_add_rn(float a, float b)
{
    float y;
    asm("add.rn.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
}

SMLA_DEV float smla_fma_rn(float a, float b, float c) /* a * b + c, rounded once */
{
    float y;
    asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(y) : "f"(a), "f"(b), "f"(c));
    return y;
}

SMLA_DEV float smla_sqrt_rn(float x)
{
    float y;
    asm("sqrt.rn.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

SMLA_DEV float smla_rcp_rz(float x) /* 1 / x, rounded towards zero */
{
    float y;
    asm("rcp.rz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

SMLA_DEV float smla_rcp_rn(float x) /* 1 / x */
{
    float y;
    asm("rcp.rn.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* min.NaN.f16x2: the smaller of each pair of f16; NaN if one of them is.  PTX ISA "min", 7.0 */
SMLA_DEV uint32_t smla_min_nan_f16x2(uint32_t a, uint32_t b)
{
    uint32_t y;
    asm("min.NaN.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
}

/* max.NaN.bf16x2: the greater of each pair of bf16; NaN if one of them is. */
SMLA_DEV uint32_t smla_max_nan_bf16x2(uint32_t a, uint32_t b)
{
    uint32_t y;
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
}

/* The same of magnitudes; the signs of the result mean nothing. */
SMLA_DEV uint32_t smla_max_abs_bf16x2(uint32_t a, uint32_t b)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 860
    uint32_t y; /* max.NaN.xorsign.abs.bf16x2;  PTX ISA "max", 7.2 */
    asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
#else
    return smla_max_nan_bf16x2(a & 0x7fff7fffu, b & 0x7fff7fffu);
#endif
}

/* ================================================================================================
   >>convert    e4m3 and bf16, exact for every input.  Below compute capability 8.9 there is no e4m3
                instruction, so integer arithmetic does the same there.
   ============================================================================================== */
SMLA_DEV float smla_bf16_to_f32(uint32_t bits) { return __uint_as_float(bits << 16); }

/* Round to nearest even; every NaN becomes 0x7fc0. */
SMLA_DEV uint32_t smla_bf16_from_f32(float x)
{
    const uint32_t u = __float_as_uint(x);
    if ((u & 0x7fffffffu) > 0x7f800000u) return smla_kNanBf16;
    return (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
}

SMLA_DEV uint32_t smla_bf16x2_from_f32(float lo, float hi)
{
    return smla_bf16_from_f32(lo) | smla_bf16_from_f32(hi) << 16;
}

/* Round to nearest even, saturate to +-448, NaN to 0x7f: what the instruction below does. */
SMLA_DEV uint32_t smla_e4m3_from_f32_soft(float x)
{
    const uint32_t u = __float_as_uint(x), sign = u >> 24 & 0x80u, a = u & 0x7fffffffu;
    if (a > 0x7f800000u) return smla_kNanE4m3;
    if (a >= 0x43e00000u) return sign | 0x7eu; /* >= 448 */
    if (a >= 0x3c800000u)                      /* >= 2^-6: keep 3 mantissa bits, rebias 127 to 7 */
        return sign | (((a + 0x7ffffu + (a >> 20 & 1u)) >> 20) - (120u << 3));
    /* Subnormal: adding 2^14 leaves the multiple of 2^-9, rounded, in the low mantissa bits. */
    return sign | (__float_as_uint(__fadd_rn(__uint_as_float(a), 16384.0f)) & 0xfu);
}

/* Two codes, lo in the low byte. */
SMLA_DEV uint32_t smla_e4m3x2_from_f32(float lo, float hi)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    uint16_t y; /* cvt.rn.satfinite.e4m3x2.f32 d, hi, lo;  PTX ISA "cvt", 7.8 (8.1 on sm_89) */
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(y) : "f"(hi), "f"(lo));
    return y;
#else
    return smla_e4m3_from_f32_soft(lo) | smla_e4m3_from_f32_soft(hi) << 8;
#endif
}

/* Two codes in the low 16 bits of x to f16x2.  An e4m3 code moved 7 bits up is an f16 of 2^-8 times
   its value, subnormals included; only NaN needs help. */
SMLA_DEV uint32_t smla_f16x2_from_e4m3x2_soft(uint32_t x)
{
    const uint32_t h = __byte_perm(x, 0, 0x1404); /* each code in the high byte of a half */
    const uint32_t magnitude = (h & 0x7f007f00u) >> 1;
    const uint32_t nan = ((magnitude + 0x00800080u) & 0x40004000u) >> 14;
    uint32_t y;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(y) : "r"(magnitude), "r"(0x5c005c00u)); /* 256, 256 */
    return y | (h & 0x80008000u) | nan * 0x7fffu;
}

SMLA_DEV uint32_t smla_f16x2_from_e4m3x2(uint32_t x)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    uint32_t y; /* cvt.rn.f16x2.e4m3x2 */
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(y) : "h"((uint16_t)x));
    return y;
#else
    return smla_f16x2_from_e4m3x2_soft(x);
#endif
}

SMLA_DEV float2 smla_f32x2_from_f16x2(uint32_t x)
{
    float2 y;
    asm("{\n.reg .f16 lo, hi;\nmov.b32 {lo, hi}, %2;\n"
        "cvt.f32.f16 %0, lo;\ncvt.f32.f16 %1, hi;\n}" : "=f"(y.x), "=f"(y.y) : "r"(x));
    return y;
}

/* Round to nearest even; too large becomes Inf. */
SMLA_DEV uint32_t smla_f16x2_from_f32(float lo, float hi)
{
    uint32_t y; /* cvt.rn.f16x2.f32 d, hi, lo;  PTX ISA "cvt", 7.0 */
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(hi), "f"(lo));
    return y;
}

SMLA_DEV uint32_t smla_bf16x2_any_nan(float lo, float hi)
{
    uint32_t y; /* cvt.rn.bf16x2.f32 d, hi, lo;  PTX ISA "cvt", 7.0 */
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(hi), "f"(lo));
    return y;
}

/* The same as smla_bf16x2_from_f32() by the instruction, whose NaN is 0x7fff: as signed integers, all
   other positive numbers and Inf are smaller than 0x7fc0. */
SMLA_DEV uint32_t smla_bf16x2_rn(float lo, float hi)
{
    return __vmins2(smla_bf16x2_any_nan(lo, hi), smla_kNanBf16 | smla_kNanBf16 << 16);
}

/* ================================================================================================
   >>quantise   one warp quantises one row, a key or a query head: SnapMLA paper, (i)
                lane holds latent dims 8*lane .. +7 and 256 + 8*lane .. +7, rope dims 2*lane, +1
   ============================================================================================== */
struct smla_row {
    uint4 latent[2]; /* bf16 x 8 each */
    uint32_t rope;   /* bf16 x 2 */
};

struct smla_quantised_row {
    uint2 content[2]; /* e4m3 x 8 each */
    uint32_t rope;    /* bf16 x 2 */
    float scale;
};

/* Two bf16, or eight, from an address that is only 2-byte aligned. */
SMLA_DEV uint32_t smla_load_bf16x2(const uint16_t *p) { return p[0] | (uint32_t)p[1] << 16; }

SMLA_DEV uint4 smla_load_bf16x8(const uint16_t *p)
{
    return make_uint4(smla_load_bf16x2(p), smla_load_bf16x2(p + 2), smla_load_bf16x2(p + 4),
                      smla_load_bf16x2(p + 6));
}

/* `vector`: the latent is 16-byte aligned and the rope part 4-byte aligned. */
SMLA_DEV smla_row smla_load_row(const uint16_t *latent, const uint16_t *rope, bool vector)
{
    const int lane = threadIdx.x & 31;
    smla_row row;
    latent += 8 * lane;
    rope += 2 * lane;
    if (vector) {
        row.latent[0] = *reinterpret_cast<const uint4 *>(latent);
        row.latent[1] = *reinterpret_cast<const uint4 *>(latent + 256);
        row.rope = *reinterpret_cast<const uint32_t *>(rope);
    } else {
        row.latent[0] = smla_load_bf16x8(latent);
        row.latent[1] = smla_load_bf16x8(latent + 256);
        row.rope = smla_load_bf16x2(rope);
    }
    return row;
}

/* The two bf16 of a word as f32. */
SMLA_DEV float smla_bf16_lo(uint32_t pair) { return __uint_as_float(pair << 16); }
SMLA_DEV float smla_bf16_hi(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }

/* The greatest magnitude in the word pairs of a row, as bf16 bits: finite numbers order like
   integers, Inf is above them, and any NaN makes it NaN. */
SMLA_DEV uint32_t smla_amax_bits(const smla_row &row)
{
    const uint32_t w[8] = {row.latent[0].x, row.latent[0].y, row.latent[0].z, row.latent[0].w,
                           row.latent[1].x, row.latent[1].y, row.latent[1].z, row.latent[1].w};
    uint32_t most = w[0] & 0x7fff7fffu;
    SMLA_UNROLL
    for (int i = 1; i < 8; ++i) most = smla_max_nan_bf16x2(most, w[i] & 0x7fff7fffu);
    return __reduce_max_sync(~0u, smla_max(most & 0xffffu, most >> 16));
}

/* 1 / divisor as the sum of two f32: the greatest one that is not above it, and the rest, which is
   then not negative, so that a product with it keeps the sign of a zero.  smla_quotient() gives the
   bits of IEEE division x / divisor in two instructions for every bf16 x and every scale that a row
   can have, as long as the quotient is normal with 2^-24 of it normal too, and neither side is Inf or
   NaN.  The reciprocal of a scale below 2^91 has these.  tests/test_ref.c goes through all cases. */
struct smla_reciprocal {
    float most, rest;
};

SMLA_DEV smla_reciprocal smla_invert(float divisor)
{
    smla_reciprocal r;
    r.most = smla_rcp_rz(divisor);
    r.rest = smla_mul_rn(smla_fma_rn(-divisor, r.most, 1.0f), r.most);
    return r;
}

SMLA_DEV float smla_quotient(float x, const smla_reciprocal &r)
{
    return smla_fma_rn(x, r.most, smla_mul_rn(x, r.rest));
}

/* content = x / scale, where |x| <= amax: what is too small for smla_quotient() is 0 in e4m3. */
template <bool kLarge>
SMLA_DEV uint2 smla_quantise_8(uint4 v, const smla_reciprocal &r)
{
    const uint32_t w[4] = {v.x, v.y, v.z, v.w};
    uint32_t code[4];
    SMLA_UNROLL
    for (int i = 0; i < 4; ++i) {
        float lo = smla_bf16_lo(w[i]), hi = smla_bf16_hi(w[i]);
        if (kLarge) {
            lo = smla_mul_rn(lo, smla_kShrink);
            hi = smla_mul_rn(hi, smla_kShrink);
        }
        code[i] = smla_e4m3x2_from_f32(smla_quotient(lo, r), smla_quotient(hi, r));
    }
    return make_uint2(code[0] | code[1] << 16, code[2] | code[3] << 16);
}

/* rope = x / scale, where x may be anything. */
SMLA_DEV float smla_scaled_rope(float x, float scale, const smla_reciprocal &r, bool large)
{
    const float y = smla_quotient(x, r);
    const bool exact = !large && fabsf(y) >= 1e-30f; /* false if y is NaN */
    const bool zero = __float_as_uint(x) << 1 == 0; /* where a build flushes subnormals, too */
    return exact || zero ? y : smla_div_rn(x, scale);
}

/* Where 1 / scale is too small to have a rest, latent and scale are multiplied by 2^-64: from an amax
   of 2^100 on. */
SMLA_CONST uint32_t smla_kLargeBits = (127u + 100u) << 7;

SMLA_DEV float smla_row_scale(uint32_t amax, bool large)
{
    float magnitude = smla_max(smla_bf16_to_f32(amax), smla_kAmaxFloor);
    if (large) magnitude = smla_mul_rn(magnitude, smla_kShrink);
    return smla_quotient(magnitude, {smla_k448thMost, smla_k448thRest});
}

SMLA_DEV smla_quantised_row smla_quantise_row(const smla_row &row)
{
    smla_quantised_row y;
    const uint32_t amax = smla_amax_bits(row);
    if (amax >= 0x7f80u) { /* NaN or Inf somewhere: the whole row says so */
        y.content[0] = y.content[1] = make_uint2(0x7f7f7f7fu, 0x7f7f7f7fu);
        y.rope = smla_kNanBf16 | smla_kNanBf16 << 16;
        y.scale = __uint_as_float(smla_kNanF32);
        return y;
    }
    const bool large = amax >= smla_kLargeBits; /* the same in the whole warp */
    const float scale = smla_row_scale(amax, large);
    const smla_reciprocal r = smla_invert(scale);
    if (large) {
        y.scale = smla_mul_rn(scale, smla_kGrow);
        y.content[0] = smla_quantise_8<true>(row.latent[0], r);
        y.content[1] = smla_quantise_8<true>(row.latent[1], r);
    } else {
        y.scale = scale;
        y.content[0] = smla_quantise_8<false>(row.latent[0], r);
        y.content[1] = smla_quantise_8<false>(row.latent[1], r);
    }
    y.rope = smla_bf16x2_rn(smla_scaled_rope(smla_bf16_lo(row.rope), y.scale, r, large),
                            smla_scaled_rope(smla_bf16_hi(row.rope), y.scale, r, large));
    return y;
}

SMLA_DEV void smla_store_row(const smla_quantised_row &row, uint8_t *content, float *scale,
                             uint16_t *rope)
{
    const int lane = threadIdx.x & 31;
    *reinterpret_cast<uint2 *>(content + 8 * lane) = row.content[0];
    *reinterpret_cast<uint2 *>(content + 256 + 8 * lane) = row.content[1];
    *reinterpret_cast<uint32_t *>(rope + 2 * lane) = row.rope;
    if (lane == 0) *scale = row.scale;
}

/* ---- the same by half a warp, so that what is done once a row serves two ----
   lane, of 16, holds 32 latent dims and rope dims 4*lane .. +3 */
struct smla_half_row {
    uint32_t latent[16]; /* bf16 x 2 each */
    uint2 rope;          /* bf16 x 4 */
};

struct smla_quantised_half {
    uint32_t content[8]; /* e4m3 x 4 each */
    uint2 rope;
    float scale;
};

/* All lanes of the warp take part. */
SMLA_DEV uint32_t smla_half_amax_bits(const smla_half_row &row)
{
    uint32_t most = row.latent[0];
    SMLA_UNROLL
    for (int i = 1; i < 16; ++i) most = smla_max_abs_bf16x2(most, row.latent[i]);
    most &= 0x7fff7fffu;
    most = smla_max(most & 0xffffu, most >> 16);
    SMLA_UNROLL
    for (int mask = 8; mask > 0; mask /= 2)
        most = smla_max(most, (uint32_t)__shfl_xor_sync(~0u, most, mask));
    return most;
}

SMLA_DEV smla_quantised_half smla_quantise_half(smla_half_row row)
{
    smla_quantised_half y;
    const uint32_t amax = smla_half_amax_bits(row);
    const bool large = amax >= smla_kLargeBits;
    const float scale = smla_row_scale(amax, large);
    const smla_reciprocal r = smla_invert(scale);
    y.scale = scale;
    if (large) { /* a power of two: what it rounds is 0 in e4m3 */
        y.scale = smla_mul_rn(scale, smla_kGrow);
        SMLA_UNROLL
        for (int i = 0; i < 16; ++i)
            row.latent[i] = smla_bf16x2_rn(smla_mul_rn(smla_bf16_lo(row.latent[i]), smla_kShrink),
                                           smla_mul_rn(smla_bf16_hi(row.latent[i]), smla_kShrink));
    }
    SMLA_UNROLL
    for (int i = 0; i < 4; ++i) {
        const uint32_t *w = row.latent + 4 * i;
        const uint2 code = smla_quantise_8<false>(make_uint4(w[0], w[1], w[2], w[3]), r);
        y.content[2 * i] = code.x;
        y.content[2 * i + 1] = code.y;
    }
    const float x[4] = {smla_bf16_lo(row.rope.x), smla_bf16_hi(row.rope.x),
                        smla_bf16_lo(row.rope.y), smla_bf16_hi(row.rope.y)};
    float rope[4];
    bool exact = !large; /* see smla_scaled_rope() */
    SMLA_UNROLL
    for (int i = 0; i < 4; ++i) {
        rope[i] = smla_quotient(x[i], r);
        exact &= fabsf(rope[i]) >= 1e-30f || __float_as_uint(x[i]) << 1 == 0;
    }
    if (!exact)
        SMLA_UNROLL
        for (int i = 0; i < 4; ++i) rope[i] = smla_div_rn(x[i], y.scale);
    y.rope = make_uint2(smla_bf16x2_rn(rope[0], rope[1]), smla_bf16x2_rn(rope[2], rope[3]));
    if (amax >= 0x7f80u) { /* NaN or Inf somewhere: the whole row says so */
        SMLA_UNROLL
        for (int i = 0; i < 8; ++i) y.content[i] = 0x7f7f7f7fu;
        y.rope.x = y.rope.y = smla_kNanBf16 | smla_kNanBf16 << 16;
        y.scale = __uint_as_float(smla_kNanF32);
    }
    return y;
}

/* ================================================================================================
   >>dataflow   quantise q, append, fetch, copies, imports: a warp or half a warp a row, or a warp for
                4 tokens of a page, without a loop; 64-bit rows
   ============================================================================================== */
SMLA_CONST int smla_kRowThreads = 256;
SMLA_CONST int smla_kRowsPerBlock = smla_kRowThreads / 32;
SMLA_CONST int smla_kHalfThreads = 16 * smla_kRowsPerBlock; /* where half a warp takes a row */
/* Blocks of half-warp kernels that fit an SM, which bounds the registers of each.  On Hopper, rows on
   their way count for more than values kept from one use to the next, up to these (measured). */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1100
SMLA_CONST int smla_kRawBlocks = 12, smla_kImportBlocks = 16;
#else
SMLA_CONST int smla_kRawBlocks = 4, smla_kImportBlocks = 4;
#endif

/* Before anything else: what the kernel before this one wrote is there, and CTAs of the next may come
   as soon as there is room for them. */
SMLA_DEV void smla_begin()
{
    smla_griddepcontrol_wait();
    smla_launch_dependents();
}

SMLA_DEV int64_t smla_warp_row()
{
    return (int64_t)blockIdx.x * smla_kRowsPerBlock + (threadIdx.x >> 5);
}

SMLA_DEV int64_t smla_half_warp_row()
{
    return (int64_t)blockIdx.x * smla_kRowsPerBlock + (threadIdx.x >> 4);
}

SMLA_DEV int64_t smla_first_of_warp(int64_t half_warp_row) { return half_warp_row & ~(int64_t)1; }

/* A cache with its defaults filled in, as kernels take it. */
struct smla_planes {
    uint8_t *content;
    float *scale;
    uint16_t *rope;
    int64_t content_stride, scale_stride, rope_stride;
    int page_shift;
};

struct smla_token {
    uint8_t *content;
    float *scale;
    uint16_t *rope;
};

SMLA_DEV smla_token smla_locate(const smla_planes &planes, int64_t page, int64_t offset)
{
    smla_token t;
    t.content = planes.content + page * planes.content_stride + offset * smla_kLatent;
    t.scale = planes.scale + page * planes.scale_stride + offset;
    t.rope = planes.rope + page * planes.rope_stride + offset * smla_kRope;
    return t;
}

/* Where pages follow each other without gaps, the page itself does not matter. */
SMLA_DEV smla_token smla_locate_slot(const smla_planes &planes, int64_t slot)
{
    const int64_t content_gap = planes.content_stride - ((int64_t)smla_kLatent << planes.page_shift);
    const int64_t scale_gap = planes.scale_stride - ((int64_t)1 << planes.page_shift);
    const int64_t rope_gap = planes.rope_stride - ((int64_t)smla_kRope << planes.page_shift);
    smla_token t = smla_locate(planes, 0, slot);
    if ((content_gap | scale_gap | rope_gap) != 0) {
        const int64_t page = slot >> planes.page_shift;
        t.content += page * content_gap;
        t.scale += page * scale_gap;
        t.rope += page * rope_gap;
    }
    return t;
}

/* latent[k]: dims 128 * k + 8 * lane .. +7 of 16 lanes. */
SMLA_DEV void smla_load_half_row(const uint16_t *latent, const uint16_t *rope, bool vector,
                                 uint4 (&to)[4], uint2 *rope_to)
{
    const int lane = threadIdx.x & 15;
    latent += 8 * lane;
    rope += 4 * lane;
    if (vector) {
        SMLA_UNROLL
        for (int k = 0; k < 4; ++k) to[k] = *reinterpret_cast<const uint4 *>(latent + 128 * k);
        const uint32_t *words = reinterpret_cast<const uint32_t *>(rope);
        *rope_to = make_uint2(words[0], words[1]);
    } else {
        SMLA_UNROLL
        for (int k = 0; k < 4; ++k) to[k] = smla_load_bf16x8(latent + 128 * k);
        *rope_to = make_uint2(smla_load_bf16x2(rope), smla_load_bf16x2(rope + 2));
    }
}

/* A lane's latent dims from 4 x 8 to one list. */
SMLA_DEV void smla_list_words(const uint4 (&latent)[4], uint32_t (&to)[16])
{
    SMLA_UNROLL
    for (int k = 0; k < 4; ++k) {
        to[4 * k] = latent[k].x;
        to[4 * k + 1] = latent[k].y;
        to[4 * k + 2] = latent[k].z;
        to[4 * k + 3] = latent[k].w;
    }
}

/* A lane's content: dims 128 * k + 8 * lane .. +7 in words 2 * k and 2 * k + 1, or, kWide, dims
   256 * k + 16 * lane .. +15 in words 4 * k .. +3. */
template <bool kWide>
SMLA_DEV void smla_store_half(const smla_quantised_half &row, const smla_token &to)
{
    const int lane = threadIdx.x & 15;
    const uint32_t *c = row.content;
    if (kWide) {
        SMLA_UNROLL
        for (int k = 0; k < 2; ++k)
            *reinterpret_cast<uint4 *>(to.content + 256 * k + 16 * lane) =
                make_uint4(c[4 * k], c[4 * k + 1], c[4 * k + 2], c[4 * k + 3]);
    } else {
        SMLA_UNROLL
        for (int k = 0; k < 4; ++k)
            *reinterpret_cast<uint2 *>(to.content + 128 * k + 8 * lane) =
                make_uint2(c[2 * k], c[2 * k + 1]);
    }
    *reinterpret_cast<uint2 *>(to.rope + 4 * lane) = row.rope;
    if (lane == 0) *to.scale = row.scale;
}

/* ---- what may come before quantisation; to the bit as >>types says ---- */
struct smla_rotation {
    const int64_t *positions; /* nullptr: no rotation */
    const float *cosines, *sines;
    int64_t stride;
    bool half_split;
};

/* cos and sin of the angles of a lane's two dims; where these are one pair, only .x is used. */
struct smla_turn {
    float2 cosine, sine;
};

SMLA_DEV smla_turn smla_load_turn(const smla_rotation &r, int64_t token)
{
    smla_turn t = {};
    if (r.positions == nullptr) return t;
    const int lane = threadIdx.x & 31, pair = r.half_split ? 2 * (lane & 15) : lane;
    const int64_t at = r.positions[token] * r.stride + pair;
    t.cosine.x = r.cosines[at];
    t.sine.x = r.sines[at];
    if (r.half_split) {
        t.cosine.y = r.cosines[at + 1];
        t.sine.y = r.sines[at + 1];
    }
    return t;
}

/* -x, subnormal or not, whatever -use_fast_math says. */
SMLA_DEV float smla_minus(float x) { return __uint_as_float(__float_as_uint(x) ^ 0x80000000u); }

/* A lane holds dims 2 * lane and 2 * lane + 1. */
SMLA_DEV uint32_t smla_rotate(uint32_t rope, const smla_turn &t, bool half_split)
{
    const float a = smla_bf16_lo(rope), b = smla_bf16_hi(rope);
    if (!half_split)
        return smla_bf16x2_rn(smla_fma_rn(a, t.cosine.x, smla_minus(smla_mul_rn(b, t.sine.x))),
                              smla_fma_rn(b, t.cosine.x, smla_mul_rn(a, t.sine.x)));
    const uint32_t other = __shfl_xor_sync(~0u, rope, 16); /* the other halves of both pairs */
    float c = smla_mul_rn(smla_bf16_lo(other), t.sine.x);
    float d = smla_mul_rn(smla_bf16_hi(other), t.sine.y);
    if ((threadIdx.x & 16) == 0) c = smla_minus(c), d = smla_minus(d);
    return smla_bf16x2_rn(smla_fma_rn(a, t.cosine.x, c), smla_fma_rn(b, t.cosine.y, d));
}

struct smla_norm_params {
    const void *weight; /* nullptr: no norm */
    float eps;
    bool f32; /* the weight is f32, not bf16 */
};

/* The weights of the block's rows as f32, for lane l of half a warp: dims 128 * k + 8 * l + 4 * h .. +3
   in [k][h][l], where 16 lanes read 16 places in a row. */
typedef float4 smla_weights[4][2][16];

SMLA_DEV void smla_load_weights(const smla_norm_params &n, smla_weights &weights)
{
    const int i = threadIdx.x; /* of 128, dims 4 * i .. +3 */
    if (i >= smla_kLatent / 4) return;
    float4 w;
    if (n.f32) {
        w = reinterpret_cast<const float4 *>(n.weight)[i];
    } else {
        const uint2 v = reinterpret_cast<const uint2 *>(n.weight)[i];
        w = make_float4(smla_bf16_lo(v.x), smla_bf16_hi(v.x), smla_bf16_lo(v.y), smla_bf16_hi(v.y));
    }
    weights[i / 32][i % 2][i % 32 / 2] = w;
}

SMLA_DEV uint32_t smla_norm_2(uint32_t x, float r, float w0, float w1)
{
    return smla_bf16x2_any_nan(smla_mul_rn(smla_mul_rn(smla_bf16_lo(x), r), w0),
                               smla_mul_rn(smla_mul_rn(smla_bf16_hi(x), r), w1));
}

/* x: latent dims 128 * k + 8 * l .. +7 of lane l, of 16, in words 4 * k .. +3.  A NaN may come out as
   any NaN.  All lanes of the warp take part. */
SMLA_DEV void smla_norm(uint32_t (&x)[16], const smla_weights &weights, float eps)
{
    float run[4];
    SMLA_UNROLL
    for (int k = 0; k < 4; ++k) {
        run[k] = 0.0f;
        SMLA_UNROLL
        for (int i = 4 * k; i < 4 * k + 4; ++i) {
            run[k] = smla_fma_rn(smla_bf16_lo(x[i]), smla_bf16_lo(x[i]), run[k]);
            run[k] = smla_fma_rn(smla_bf16_hi(x[i]), smla_bf16_hi(x[i]), run[k]);
        }
    }
    /* runs 16 and 32 further on lie in the same lane, so two steps of the tree are its own */
    float sum = smla_add_rn(smla_add_rn(run[0], run[2]), smla_add_rn(run[1], run[3]));
    SMLA_UNROLL
    for (int mask = 8; mask > 0; mask /= 2)
        sum = smla_add_rn(sum, __shfl_xor_sync(~0u, sum, mask));
    /* Unpacked once more below: to keep 32 values until then takes registers that are better used for
       more warps.  The compiler does not know that. */
    SMLA_UNROLL
    for (int i = 0; i < 16; ++i) asm volatile("" : "+r"(x[i]));
    float r = smla_rcp_rn(smla_sqrt_rn(smla_add_rn(smla_mul_rn(sum, 1.0f / smla_kLatent), eps)));
    if (!smla_is_finite(sum)) r = __uint_as_float(smla_kNanF32);
    SMLA_UNROLL
    for (int k = 0; k < 8; ++k) {
        const float4 w = weights[k / 2][k % 2][threadIdx.x & 15];
        x[2 * k] = smla_norm_2(x[2 * k], r, w.x, w.y);
        x[2 * k + 1] = smla_norm_2(x[2 * k + 1], r, w.z, w.w);
    }
}

struct smla_quantize_q_params {
    const uint16_t *q, *rope_in;
    int64_t token_stride, head_stride, rope_token_stride, rope_head_stride, rows;
    uint8_t *content;
    float *scale;
    uint16_t *rope;
    smla_rotation rotation;
    int heads;
};

/* row / heads; 64-bit division takes five times as long as 32-bit division. */
SMLA_DEV int64_t smla_divide(int64_t row, int64_t by)
{
    if ((row | by) >> 32 == 0) return (uint32_t)row / (uint32_t)by;
    return row / by;
}

static __global__ void __launch_bounds__(smla_kRowThreads)
snapmla_quantize_q_kernel(const __grid_constant__ smla_quantize_q_params p)
{
    smla_begin();
    const int64_t row = smla_warp_row();
    if (row >= p.rows) return;
    const int64_t token = smla_divide(row, p.heads), head = row - token * p.heads;
    const smla_turn turn = smla_load_turn(p.rotation, token);
    smla_row q = smla_load_row(p.q + token * p.token_stride + head * p.head_stride,
                               p.rope_in + token * p.rope_token_stride + head * p.rope_head_stride,
                               true);
    if (p.rotation.positions != nullptr) q.rope = smla_rotate(q.rope, turn, p.rotation.half_split);
    smla_store_row(smla_quantise_row(q), p.content + row * smla_kLatent, p.scale + row,
                   p.rope + row * smla_kRope);
}

struct smla_append_params {
    smla_planes planes;
    const uint16_t *latent, *rope;
    int64_t latent_stride, rope_stride, tokens;
    const int64_t *slots;
    smla_norm_params norm;
    smla_rotation rotation;
    bool vector; /* latent rows are 16-byte aligned, rope rows 4-byte */
};

/* A row is loaded before its slot is known: one trip to memory instead of two, and few rows are
   skipped. */
static __global__ void __launch_bounds__(smla_kRowThreads)
snapmla_append_kernel(const __grid_constant__ smla_append_params p)
{
    smla_begin();
    const int64_t token = smla_warp_row();
    if (token >= p.tokens) return;
    const int64_t slot = p.slots[token];
    const smla_row row = smla_load_row(p.latent + token * p.latent_stride,
                                       p.rope + token * p.rope_stride, p.vector);
    if (slot < 0) return;
    const smla_token to = smla_locate_slot(p.planes, slot);
    smla_store_row(smla_quantise_row(row), to.content, to.scale, to.rope);
}

/* cos and sin of the angles of a lane's four rope dims, of 16 lanes; where these are two pairs, the
   first two are used. */
struct smla_half_turn {
    float cosine[4], sine[4];
};

SMLA_DEV smla_half_turn smla_load_half_turn(const smla_rotation &r, int64_t position)
{
    const int pair = r.half_split ? 4 * (threadIdx.x & 7) : 2 * (threadIdx.x & 15);
    const float *cosines = r.cosines + position * r.stride + pair;
    const float *sines = r.sines + position * r.stride + pair;
    smla_half_turn t = {};
    SMLA_UNROLL
    for (int i = 0; i < 4; ++i)
        if (i < 2 || r.half_split) {
            t.cosine[i] = cosines[i];
            t.sine[i] = sines[i];
        }
    return t;
}

/* All lanes of the warp take part. */
SMLA_DEV uint2 smla_rotate_half(uint2 rope, const smla_half_turn &t, bool half_split)
{
    if (!half_split) {
        const smla_turn first = {{t.cosine[0], 0.0f}, {t.sine[0], 0.0f}};
        const smla_turn second = {{t.cosine[1], 0.0f}, {t.sine[1], 0.0f}};
        return make_uint2(smla_rotate(rope.x, first, false), smla_rotate(rope.y, second, false));
    }
    const uint32_t x = __shfl_xor_sync(~0u, rope.x, 8), y = __shfl_xor_sync(~0u, rope.y, 8);
    const float own[4] = {smla_bf16_lo(rope.x), smla_bf16_hi(rope.x), smla_bf16_lo(rope.y),
                          smla_bf16_hi(rope.y)};
    const float other[4] = {smla_bf16_lo(x), smla_bf16_hi(x), smla_bf16_lo(y), smla_bf16_hi(y)};
    float turned[4];
    SMLA_UNROLL
    for (int i = 0; i < 4; ++i) {
        float b = smla_mul_rn(other[i], t.sine[i]);
        if ((threadIdx.x & 8) == 0) b = smla_minus(b);
        turned[i] = smla_fma_rn(own[i], t.cosine[i], b);
    }
    return make_uint2(smla_bf16x2_rn(turned[0], turned[1]), smla_bf16x2_rn(turned[2], turned[3]));
}

/* Norm and rotation first, either or both. */
static __global__ void __launch_bounds__(smla_kHalfThreads, smla_kRawBlocks)
snapmla_append_raw_kernel(const __grid_constant__ smla_append_params p)
{
    __shared__ smla_weights weights;
    smla_begin();
    const bool norm = p.norm.weight != nullptr, rotate = p.rotation.positions != nullptr;
    const int64_t token = smla_half_warp_row();
    int64_t slot = -1, position = -1;
    smla_half_row row = {};
    smla_half_turn turn = {};
    if (token < p.tokens) {
        slot = p.slots[token];
        if (rotate) position = p.rotation.positions[token];
        uint4 latent[4];
        smla_load_half_row(p.latent + token * p.latent_stride, p.rope + token * p.rope_stride,
                           p.vector, latent, &row.rope);
        smla_list_words(latent, row.latent);
    }
    if (norm) {
        smla_load_weights(p.norm, weights);
        __syncthreads();
    }
    if (smla_first_of_warp(token) >= p.tokens) return;
    if (rotate && token < p.tokens) turn = smla_load_half_turn(p.rotation, position);
    if (norm) smla_norm(row.latent, weights, p.norm.eps);
    if (rotate) row.rope = smla_rotate_half(row.rope, turn, p.rotation.half_split);
    const smla_quantised_half y = smla_quantise_half(row);
    if (slot >= 0) smla_store_half<false>(y, smla_locate_slot(p.planes, slot));
}

/* ---- fetch ---- */
struct smla_fetch_params {
    smla_planes planes;
    const int64_t *slots; /* nullptr: by block table */
    const int32_t *block_table, *row_starts, *first;
    int64_t table_stride, table_tokens; /* tokens that a row of the table has pages for */
    uint16_t *latent, *rope;
    int64_t latent_stride, rope_stride, tokens;
    int batch;
    bool vector; /* latent rows are 16-byte aligned, rope rows 4-byte */
};

/* Four codes to two f16x2; the halves of a register need no shift. */
SMLA_DEV uint2 smla_f16x4_from_e4m3x4(uint32_t code)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    uint2 y;
    asm("{\n.reg .b16 lo, hi;\nmov.b32 {lo, hi}, %2;\n"
        "cvt.rn.f16x2.e4m3x2 %0, lo;\ncvt.rn.f16x2.e4m3x2 %1, hi;\n}"
        : "=r"(y.x), "=r"(y.y) : "r"(code));
    return y;
#else
    return make_uint2(smla_f16x2_from_e4m3x2(code), smla_f16x2_from_e4m3x2(code >> 16));
#endif
}

/* kAnyNan: a NaN may be any NaN, for what is quantised again. */
template <bool kAnyNan> SMLA_DEV uint2 smla_dequantise_4(uint32_t code, float scale)
{
    const uint2 pair = smla_f16x4_from_e4m3x4(code);
    const float2 a = smla_f32x2_from_f16x2(pair.x), b = smla_f32x2_from_f16x2(pair.y);
    const float v[4] = {smla_mul_rn(a.x, scale), smla_mul_rn(a.y, scale), smla_mul_rn(b.x, scale),
                        smla_mul_rn(b.y, scale)};
    return kAnyNan ? make_uint2(smla_bf16x2_any_nan(v[0], v[1]), smla_bf16x2_any_nan(v[2], v[3]))
                   : make_uint2(smla_bf16x2_rn(v[0], v[1]), smla_bf16x2_rn(v[2], v[3]));
}

SMLA_DEV uint4 smla_dequantise_8(uint2 code, float scale)
{
    const uint2 a = smla_dequantise_4<false>(code.x, scale);
    const uint2 b = smla_dequantise_4<false>(code.y, scale);
    return make_uint4(a.x, a.y, b.x, b.y);
}

SMLA_DEV void smla_store_bf16x8(uint16_t *p, uint4 v, bool vector)
{
    if (vector) {
        *reinterpret_cast<uint4 *>(p) = v;
        return;
    }
    const uint32_t w[4] = {v.x, v.y, v.z, v.w};
    SMLA_UNROLL
    for (int i = 0; i < 4; ++i) {
        p[2 * i] = (uint16_t)w[i];
        p[2 * i + 1] = (uint16_t)(w[i] >> 16);
    }
}

/* The last request whose rows begin at or before `row`: the warp looks at 32 places at once. */
SMLA_DEV int smla_find_request(const int32_t *row_starts, int batch, int64_t row)
{
    const int lane = threadIdx.x & 31;
    int low = 0, n = batch; /* it is one of low .. low + n - 1 */
    while (n > 1) {
        const int step = (n - 1) / 32 + 1, at = lane < (n - 1) / step + 1 ? lane * step : n;
        const uint32_t before = __ballot_sync(~0u, at < n && row_starts[low + at] <= row);
        const int skip = smla_max(__popc(before) - 1, 0) * step;
        low += skip;
        n = smla_min(step, n - skip);
    }
    return low;
}

/* Which slot a row comes from: negative = none, the row is zeros.  False: the row is nobody's.  `request`
   is the one of this row or of the row before it. */
SMLA_DEV bool smla_fetch_slot(const smla_fetch_params &p, int64_t row, int request, int64_t *slot)
{
    if (p.slots != nullptr) {
        *slot = p.slots[row];
        return true;
    }
    int64_t start = p.row_starts[request], end = p.row_starts[request + 1];
    while (row >= end && request + 1 < p.batch) {
        start = end;
        end = p.row_starts[++request + 1];
    }
    if (row < start || row >= end) return false;
    const int64_t position = (p.first != nullptr ? p.first[request] : 0) + (row - start);
    *slot = -1;
    if (position >= 0 && position < p.table_tokens) {
        const int64_t page = position >> p.planes.page_shift;
        const int64_t id = p.block_table[request * p.table_stride + page];
        if (id >= 0) *slot = (id << p.planes.page_shift) + position - (page << p.planes.page_shift);
    }
    return true;
}

SMLA_DEV uint32_t smla_scale_rope(uint32_t rope, float scale)
{
    return smla_bf16x2_rn(smla_mul_rn(smla_bf16_lo(rope), scale),
                          smla_mul_rn(smla_bf16_hi(rope), scale));
}

SMLA_DEV void smla_store_bf16x2(uint16_t *p, uint32_t v, bool vector)
{
    if (vector) {
        *reinterpret_cast<uint32_t *>(p) = v;
    } else {
        p[0] = (uint16_t)v;
        p[1] = (uint16_t)(v >> 16);
    }
}

static __global__ void __launch_bounds__(smla_kHalfThreads)
snapmla_fetch_kernel(const __grid_constant__ smla_fetch_params p)
{
    smla_begin();
    const int lane = threadIdx.x & 15;
    const int64_t row = smla_half_warp_row(), first = smla_first_of_warp(row);
    if (first >= p.tokens || (p.slots == nullptr && p.batch == 0)) return;
    const int request = p.slots == nullptr ? smla_find_request(p.row_starts, p.batch, first) : 0;
    int64_t slot = 0;
    if (row >= p.tokens || !smla_fetch_slot(p, row, request, &slot)) return;
    uint2 content[4] = {}, rope = {};
    float scale = 0.0f;
    if (slot >= 0) {
        const smla_token from = smla_locate_slot(p.planes, slot);
        SMLA_UNROLL
        for (int k = 0; k < 4; ++k)
            content[k] = *reinterpret_cast<const uint2 *>(from.content + 128 * k + 8 * lane);
        rope = *reinterpret_cast<const uint2 *>(from.rope + 4 * lane);
        scale = *from.scale;
    }
    uint16_t *latent = p.latent + row * p.latent_stride + 8 * lane;
    uint16_t *to = p.rope + row * p.rope_stride + 4 * lane;
    SMLA_UNROLL
    for (int k = 0; k < 4; ++k)
        smla_store_bf16x8(latent + 128 * k, smla_dequantise_8(content[k], scale), p.vector);
    smla_store_bf16x2(to, smla_scale_rope(rope.x, scale), p.vector);
    smla_store_bf16x2(to + 2, smla_scale_rope(rope.y, scale), p.vector);
}

/* ---- copies of pages ---- */
SMLA_CONST int smla_kCopyLayers = 80; /* of one launch: what 4 KB of kernel parameters hold */
SMLA_CONST int smla_kCopyTokens = 4;  /* of one page that a warp copies, all loads before the stores */

SMLA_CONST int smla_kCopyRope = (8 * smla_kCopyTokens + 31) / 32; /* 16-byte units of a lane */

struct smla_plane_pointers {
    uint8_t *content;
    float *scale;
    uint16_t *rope;
};

struct smla_copy_params {
    smla_plane_pointers from[smla_kCopyLayers], to[smla_kCopyLayers];
    smla_planes from_strides, to_strides; /* their pointers are not used */
    const int2 *pairs;
    int64_t count, pieces; /* pieces of all layers */
    int piece_shift;       /* log2 of the pieces of a page */
};
static_assert(sizeof(smla_copy_params) <= 4096, "kernel parameters of every driver end at 4 KB");

SMLA_DEV smla_token smla_locate_in(smla_planes planes, const smla_plane_pointers &layer,
                                   int64_t page, int64_t offset)
{
    planes.content = layer.content;
    planes.scale = layer.scale;
    planes.rope = layer.rope;
    return smla_locate(planes, page, offset);
}

static __global__ void __launch_bounds__(smla_kRowThreads)
snapmla_copy_pages_kernel(const __grid_constant__ smla_copy_params p)
{
    smla_begin();
    const int64_t piece = smla_warp_row();
    if (piece >= p.pieces) return;
    const int64_t page = piece >> p.piece_shift; /* of all layers' pairs */
    const int64_t layer = smla_divide(page, p.count);
    const int2 pair = p.pairs[page - layer * p.count];
    if (pair.x < 0 || pair.y < 0) return;
    const int64_t offset = (piece - (page << p.piece_shift)) * smla_kCopyTokens;
    const smla_token from = smla_locate_in(p.from_strides, p.from[layer], pair.x, offset);
    const smla_token to = smla_locate_in(p.to_strides, p.to[layer], pair.y, offset);
    const int tokens = smla_min(smla_kCopyTokens, 1 << p.from_strides.page_shift);
    const int lane = threadIdx.x & 31;
    uint4 content[smla_kCopyTokens], rope[smla_kCopyRope];
    float scale = 0.0f;
    const uint4 *content_from = reinterpret_cast<const uint4 *>(from.content) + lane;
    const uint4 *rope_from = reinterpret_cast<const uint4 *>(from.rope) + lane;
    SMLA_UNROLL
    for (int i = 0; i < smla_kCopyTokens; ++i)
        if (i < tokens) content[i] = content_from[32 * i];
    SMLA_UNROLL
    for (int i = 0; i < smla_kCopyRope; ++i)
        if (lane + 32 * i < 8 * tokens) rope[i] = rope_from[32 * i];
    if (lane < tokens) scale = from.scale[lane];
    uint4 *content_to = reinterpret_cast<uint4 *>(to.content) + lane;
    uint4 *rope_to = reinterpret_cast<uint4 *>(to.rope) + lane;
    SMLA_UNROLL
    for (int i = 0; i < smla_kCopyTokens; ++i)
        if (i < tokens) content_to[32 * i] = content[i];
    SMLA_UNROLL
    for (int i = 0; i < smla_kCopyRope; ++i)
        if (lane + 32 * i < 8 * tokens) rope_to[32 * i] = rope[i];
    if (lane < tokens) to.scale[lane] = scale;
}

/* ---- imports ---- */
SMLA_CONST int smla_kRecordBytes = 656; /* 512 e4m3, four f32 scales, 64 bf16 */

struct smla_import_params {
    smla_planes planes;
    const uint8_t *source;
    int64_t row_bytes, page_gap, tokens; /* page_gap: bytes from the end of a page to the next */
    const int64_t *source_slots, *slots; /* nullptr: 0, 1, 2, ... */
    int source_shift;                    /* log2 of the source's page size */
    bool vector; /* rows are 16-byte aligned; else records 4-byte, bf16 2-byte */
};

/* What a lane, of 16, holds of a record: dims 256 * k + 16 * lane .. +15, all of one scale. */
struct smla_record {
    uint32_t code[8];
    float scale[2];
    uint2 rope;
};

SMLA_DEV void smla_load_record(const uint8_t *record, bool vector, smla_record *to)
{
    const int lane = threadIdx.x & 15;
    const float *scales = reinterpret_cast<const float *>(record + smla_kLatent) + (lane >> 3);
    const uint32_t *rope = reinterpret_cast<const uint32_t *>(record + smla_kLatent + 16) + 2 * lane;
    SMLA_UNROLL
    for (int k = 0; k < 2; ++k) {
        const uint8_t *from = record + 256 * k + 16 * lane;
        const uint32_t *w = reinterpret_cast<const uint32_t *>(from);
        const uint4 v = vector ? *reinterpret_cast<const uint4 *>(from)
                               : make_uint4(w[0], w[1], w[2], w[3]);
        to->code[4 * k] = v.x;
        to->code[4 * k + 1] = v.y;
        to->code[4 * k + 2] = v.z;
        to->code[4 * k + 3] = v.w;
        to->scale[k] = scales[2 * k];
    }
    to->rope = vector ? *reinterpret_cast<const uint2 *>(rope) : make_uint2(rope[0], rope[1]);
}

SMLA_DEV smla_half_row smla_row_of_record(const smla_record &record)
{
    smla_half_row row;
    SMLA_UNROLL
    for (int i = 0; i < 8; ++i) {
        const uint2 v = smla_dequantise_4<true>(record.code[i], record.scale[i / 4]);
        row.latent[2 * i] = v.x;
        row.latent[2 * i + 1] = v.y;
    }
    row.rope = record.rope;
    return row;
}

template <bool kRecords>
static __global__ void __launch_bounds__(smla_kHalfThreads, smla_kImportBlocks)
snapmla_import_kernel(const __grid_constant__ smla_import_params p)
{
    smla_begin();
    const int64_t token = smla_half_warp_row();
    if (smla_first_of_warp(token) >= p.tokens) return;
    int64_t from = -1, slot = -1;
    if (token < p.tokens) {
        from = p.source_slots != nullptr ? p.source_slots[token] : token;
        slot = p.slots != nullptr ? p.slots[token] : from;
    }
    smla_record record = {};
    smla_half_row row = {};
    const bool wanted = from >= 0 && slot >= 0;
    if (wanted) {
        const uint8_t *source = p.source + from * p.row_bytes
                              + (from >> p.source_shift) * p.page_gap;
        if (kRecords) {
            smla_load_record(source, p.vector, &record);
        } else {
            const uint16_t *key = reinterpret_cast<const uint16_t *>(source);
            uint4 latent[4];
            smla_load_half_row(key, key + smla_kLatent, p.vector, latent, &row.rope);
            smla_list_words(latent, row.latent);
        }
    }
    const smla_quantised_half y = smla_quantise_half(kRecords ? smla_row_of_record(record) : row);
    if (wanted) smla_store_half<kRecords>(y, smla_locate_slot(p.planes, slot));
}

/* ================================================================================================
   >>plan       which CTA works on which tokens of which request

   The rows of a request (query tokens x heads) are cut into tiles; `group` tiles run side by side on
   as many CTAs, a *part*, so that they meet in L2 on the same pages.  A request with more tiles than
   that appears `groups` times in the list of work: item i of the list is request i / groups, tile
   group i % groups.  A part works on a stretch of the list, and where a stretch begins or ends inside
   an item, on a block border, the item is *cut*: its parts leave partial results to be merged.

   Times are counted in blocks, the time that a CTA takes for a block of 64 tokens.  A split costs
   smla_kOverheadBlocks on top of its blocks, and a cut costs the writing, reading and merging of the
   partial results: a block for each smla_kMergeRows rows of them, and one for the merge as such.
   Three ways to deal the list out are open, and smla_decide() takes the quickest by that count:
     WHOLE  the same number of whole items for every part; nothing is cut
     EVEN   every item in splits of at most so many blocks, each split a part of its own
     LINE   items laid end to end on a line, each as long as it costs, and the line cut into equal
            stretches; a border near an item's own border moves there
   With split_tokens fixed by the caller it is always LINE, on borders of splits.

   All of it is integer arithmetic in functions that run on the CPU as well, where tests/test_plan.cu
   holds them to the promises: every token in one split, no split empty, no part much longer than its
   share.
   ============================================================================================== */
struct smla_policy {
    int64_t batch, groups; /* batch * groups items, at most 2^30 */
    int parts;
    int max_seq_len;
    int split_blocks; /* 0 = balanced; else every item is cut at multiples of this */
    int part_rows;    /* rows that the tiles of a part hold */
};

struct alignas(16) smla_part { /* items first .. last, empty if first > last */
    int64_t first, last;
    int32_t begin;  /* token at which the first item begins */
    int32_t end;    /* token at which the last item ends, or smla_kToEnd */
    int32_t splits; /* balanced: if the last item begins here and is cut, the number of parts, from
                       this one on, that share it, none of them empty; else 0 */
    int32_t pad;
};

/* The request of an item; there is mostly one group. */
SMLA_HD int64_t smla_request_of(const smla_policy &policy, int64_t item)
{
    return policy.groups == 1 ? item : (int64_t)((uint32_t)item / (uint32_t)policy.groups);
}

struct smla_cut { /* a border in the list of work: token `token` of item `item` */
    int32_t item, token;
    int32_t sharers; /* EVEN, at the begin of an item: the number of its parts */
};

struct smla_work { /* sums over the requests */
    int64_t blocks;  /* of tokens; an empty request counts as one, since zeros must be written */
    int64_t charges; /* overheads in the length of the line */
    int64_t longest; /* blocks of the longest request, at least 1 */
};

enum smla_deal { smla_kWhole, smla_kEven, smla_kLine };

struct smla_rule {
    smla_deal deal;
    int32_t used;          /* parts that get work; EVEN: known when the splits are counted */
    int32_t each;          /* WHOLE: items of a part; EVEN: blocks of a split */
    int32_t snap;          /* LINE: a split of so few blocks goes to the part beside */
    int64_t stretch, rest; /* LINE: a part's share of the line and what is left over of all */
};

SMLA_HD int32_t smla_item_blocks(const smla_policy &policy, int32_t seq_len)
{
    const int32_t len = smla_max(0, smla_min(seq_len, policy.max_seq_len));
    return len / smla_kBlock + (len % smla_kBlock != 0);
}

/* Splits of one item under the fixed policy. */
SMLA_HD int32_t smla_splits_of(const smla_policy &policy, int32_t blocks)
{
    if (policy.split_blocks == 0 || blocks == 0) return 1;
    return (int32_t)((uint32_t)(blocks + policy.split_blocks - 1) / (uint32_t)policy.split_blocks);
}

SMLA_HD int32_t smla_charges_of(const smla_policy &policy, int32_t blocks)
{
    return blocks == 0 ? 0 : smla_splits_of(policy, blocks);
}

SMLA_HD void smla_add_work(const smla_policy &policy, int32_t blocks, smla_work *work)
{
    work->blocks += smla_max(1, blocks);
    work->charges += smla_charges_of(policy, blocks);
    work->longest = smla_max(work->longest, (int64_t)blocks);
}

/* 64-bit operands whose quotients are nearly always those of 32-bit ones. */
SMLA_HD int64_t smla_div(int64_t a, int64_t b)
{
    if (((a | b) >> 32) == 0) return (int64_t)((uint32_t)a / (uint32_t)b);
    return a / b;
}

/* The same where all operands are known to fit Int = uint32_t, or not: int64_t. */
template <typename Int> SMLA_HD int64_t smla_div_as(int64_t a, int64_t b)
{
    return (int64_t)((Int)a / (Int)b);
}

template <typename Int> SMLA_HD int64_t smla_div_up(int64_t a, int64_t b)
{
    return smla_div_as<Int>(a + b - 1, b);
}

/* Everything that smla_even_candidate() and smla_decide() divide fits 32 bits. */
SMLA_HD bool smla_is_small(const smla_policy &policy, const smla_work &work)
{
    return (work.blocks + (work.charges + 1) * smla_kOverheadBlocks) * policy.groups
               + policy.parts < INT_MAX;
}

/* A time in units of a block / smla_kMergeRows. */
SMLA_HD int64_t smla_score(const smla_policy &policy, int64_t blocks, int64_t partials)
{
    const int64_t merge = partials == 0 ? 0 : partials * policy.part_rows + smla_kMergeRows;
    return blocks * smla_kMergeRows + merge;
}

/* Candidate `lane` of 32 for EVEN: blocks of a split, and its score, UINT32_MAX if it is none.  The
   first half tries 1, 2, 3 .. splits of the longest request, the other half the shortest splits that
   surely suffice and longer ones, which need fewer merges. */
template <typename Int>
SMLA_HD uint32_t smla_even_candidate(const smla_policy &policy, const smla_work &work, int lane,
                                     int32_t *each)
{
    const int64_t items = policy.batch * policy.groups, blocks = work.blocks * policy.groups;
    *each = (int32_t)work.longest;
    if (items > policy.parts) return UINT32_MAX;
    /* x blocks make at most (x + each - 1) / each splits */
    const int64_t spare = policy.parts - items;
    int64_t surely = work.longest;
    if (spare > 0) surely = smla_max((int64_t)1, smla_div_up<Int>(blocks - items, spare));
    const int64_t most = smla_div_as<Int>(policy.parts, items); /* splits of one item, if all were as long */
    int64_t size = smla_min(surely, smla_div_up<Int>(work.longest, most)) + (lane - 16);
    if (lane < 16) {
        size = smla_div_up<Int>(work.longest, lane + 1);
        if (lane >= most && size < surely) return UINT32_MAX;
    }
    size = smla_min(size, work.longest);
    *each = (int32_t)size;
    const int64_t splits = smla_min(smla_div_as<Int>(blocks, size) + items,
                                    smla_div_up<Int>(work.longest, size) * items);
    const int64_t partials = size == work.longest ? 0 : smla_min(splits, (int64_t)policy.parts);
    return (uint32_t)smla_min(smla_score(policy, size + smla_kOverheadBlocks, partials),
                              (int64_t)UINT32_MAX);
}

/* How the list is dealt out; even_* are those of the best candidate. */
template <typename Int>
SMLA_HD smla_rule smla_decide(const smla_policy &policy, const smla_work &work, int32_t even_each,
                              uint32_t even_score)
{
    const int64_t items = policy.batch * policy.groups, parts = policy.parts;
    /* The first overhead on the line belongs to every part, see smla_border(). */
    const int64_t line = smla_max(
        (int64_t)1, (work.blocks + work.charges * smla_kOverheadBlocks) * policy.groups
                        - smla_kOverheadBlocks);
    int64_t used = smla_min(parts, line);
    int64_t stretch = smla_div_up<Int>(line, used);
    used = smla_div_up<Int>(line, stretch); /* as many as the longest stretch, rounded up, asks for */
    smla_rule rule = {smla_kLine, (int32_t)used, 0, 0, 0, 0};
    rule.stretch = smla_div_as<Int>(line, used);
    rule.rest = line - rule.stretch * used;
    if (policy.split_blocks > 0) return rule;

    rule.snap = stretch >= 4 ? 1 : 0;
    const int64_t cuts = used - 1;
    int64_t best = smla_score(policy, stretch + smla_kOverheadBlocks,
                              cuts + smla_min(items, cuts));
    const int64_t snapped = smla_score(policy, stretch + smla_kOverheadBlocks + work.longest, 0);
    if (snapped < best) { /* borders go to the nearest item */
        rule.snap = INT_MAX;
        best = snapped;
    }
    if (items > parts) {
        const int64_t each = smla_div_up<Int>(items, parts);
        if (smla_score(policy, each * (work.longest + smla_kOverheadBlocks), 0) <= best)
            rule = {smla_kWhole, (int32_t)smla_div_up<Int>(items, each), (int32_t)each, 0, 0, 0};
    } else if (even_score < UINT32_MAX && even_score <= best) {
        rule = {smla_kEven, 0, even_each, 0, 0, 0};
    }
    return rule;
}

/* What an item takes on the line: EVEN counts in splits, LINE in blocks and overheads. */
SMLA_HD int64_t smla_item_length(const smla_policy &policy, const smla_rule &rule, int32_t blocks)
{
    if (rule.deal == smla_kEven) /* both below 2^26 */
        return smla_max((int64_t)1, smla_div_up<uint32_t>(blocks, rule.each));
    return smla_max(1, blocks) + (int64_t)smla_charges_of(policy, blocks) * smla_kOverheadBlocks;
}

/* Where part `part` > 0 begins on the line.  A part that begins inside an item pays an overhead that
   the line does not hold: so all of them get it, the first one out of the line's beginning. */
SMLA_HD int64_t smla_border(const smla_rule &rule, int part)
{
    if (rule.deal == smla_kEven) return part;
    return smla_kOverheadBlocks + part * rule.stretch + smla_div(part * rule.rest, rule.used);
}

/* The border at `position` on the line, in the items of request `request`: each of them is `length`
   long, and the first one begins at groups * begin. */
SMLA_HD smla_cut smla_cut_at(const smla_policy &policy, const smla_rule &rule, int64_t request,
                             int64_t begin, int64_t length, int64_t position)
{
    int64_t inside = position - begin * policy.groups, item = request * policy.groups;
    if (policy.groups > 1) {
        const int64_t before = smla_div(inside, length);
        item += before;
        inside -= before * length;
    }
    smla_cut cut = {(int32_t)item, 0, 0};
    if (rule.deal == smla_kEven) {
        cut.token = (int32_t)(inside * rule.each * smla_kBlock);
        cut.sharers = (int32_t)length;
    } else if (policy.split_blocks > 0) {
        const int64_t split = smla_div(inside, policy.split_blocks + smla_kOverheadBlocks);
        cut.token = (int32_t)(split * policy.split_blocks * smla_kBlock);
    } else {
        const int64_t done = inside - smla_kOverheadBlocks, left = length - inside;
        if (done <= rule.snap && (left > rule.snap || done <= left)) return cut;
        if (left <= rule.snap) ++cut.item;
        else cut.token = (int32_t)(done * smla_kBlock);
    }
    return cut;
}

/* Borders that need no place on the line; returns false for the others. */
SMLA_HD bool smla_plain_cut(const smla_policy &policy, const smla_rule &rule, int part, int32_t used,
                            smla_cut *cut)
{
    const int32_t items = (int32_t)(policy.batch * policy.groups);
    *cut = {0, 0, 0};
    if (part >= used) *cut = {items, 0, 0};
    else if (rule.deal == smla_kWhole) cut->item = part * rule.each;
    else return part == 0 && rule.deal == smla_kLine;
    return true;
}

/* Part i of those between the cuts. */
SMLA_HD smla_part smla_part_between(const smla_policy &policy, const smla_rule &rule,
                                    const smla_cut *cuts, int i)
{
    const smla_cut a = cuts[i], b = cuts[i + 1];
    smla_part part = {a.item, b.item, a.token, b.token, 0, 0};
    if (b.token == 0) {
        part.last = b.item - 1;
        part.end = smla_kToEnd;
    }
    if (a.item == b.item && a.token == b.token) part.last = part.first - 1;
    const bool begins_here = part.first < part.last || part.begin == 0;
    if (part.last < part.first || part.end == smla_kToEnd || !begins_here) return part;
    if (rule.deal == smla_kEven) {
        part.splits = a.sharers;
        return part;
    }
    int lo = i + 1, hi = policy.parts - 1; /* the part in which the cut item ends */
    while (lo < hi) {
        const int middle = (lo + hi) / 2;
        if (cuts[middle + 1].item > part.last) hi = middle;
        else lo = middle + 1;
    }
    part.splits = lo - i + 1;
    return part;
}

struct smla_plan_params {
    smla_policy policy;
    const int32_t *seq_lens;
    smla_part *part;      /* [parts] */
    int64_t *split_begin; /* [batch + 1], fixed policy only: splits of all requests before b */
    int32_t run;          /* requests a thread takes */
};

SMLA_CONST int smla_kPlanThreads = 1024; /* at most; no more than there are requests or parts */

/* Sum of numbers from 0 to 2^48, the same in all lanes. */
SMLA_DEV int64_t smla_warp_sum(int64_t x)
{
    const uint32_t lo = __reduce_add_sync(~0u, (uint32_t)x & 0xffffffu);
    const uint32_t hi = __reduce_add_sync(~0u, (uint32_t)(x >> 24));
    return ((int64_t)hi << 24) + lo;
}

SMLA_DEV int64_t smla_warp_scan(int64_t x) /* inclusive */
{
    SMLA_UNROLL
    for (int d = 1; d < 32; d *= 2) {
        const int64_t y = __shfl_up_sync(~0u, x, d);
        if ((threadIdx.x & 31) >= d) x += y;
    }
    return x;
}

/* The threads that share the requests among them: the block, or, where a warp's lanes suffice, every
   warp for itself, which saves waiting for others. */
struct smla_team {
    bool warp;
    int rank, size;
};

SMLA_DEV void smla_sync(const smla_team &team)
{
    if (team.warp) __syncwarp();
    else __syncthreads();
}

/* Exclusive prefix sum over the team; every thread also gets the total. */
SMLA_DEV int64_t smla_team_scan(const smla_team &team, int64_t x, int64_t (&warp_total)[32],
                                int64_t *total)
{
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    const int64_t sum = smla_warp_scan(x);
    *total = __shfl_sync(~0u, sum, 31);
    if (team.warp) return sum - x;
    if (lane == 31) warp_total[warp] = sum;
    __syncthreads();
    const int64_t totals = smla_warp_scan(lane < warps ? warp_total[lane] : 0);
    *total = __shfl_sync(~0u, totals, 31);
    const int64_t before = __shfl_sync(~0u, totals, (warp + 31) & 31);
    return (warp == 0 ? 0 : before) + sum - x;
}

SMLA_DEV smla_work smla_warp_work(const smla_work &w)
{
    return {smla_warp_sum(w.blocks), smla_warp_sum(w.charges),
            (int64_t)__reduce_max_sync(~0u, (uint32_t)w.longest)};
}

SMLA_DEV smla_work smla_team_work(const smla_team &team, const smla_work &mine,
                                  smla_work (&warp_work)[32])
{
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    const smla_work w = smla_warp_work(mine);
    if (team.warp) return w;
    if (lane == 0) warp_work[warp] = w;
    __syncthreads();
    return smla_warp_work(lane < warps ? warp_work[lane] : smla_work{0, 0, 0});
}

/* The best rule, the same in all threads; a warp's lanes try the candidates for EVEN. */
template <typename Int>
SMLA_DEV smla_rule smla_best_rule(const smla_policy &policy, const smla_work &work)
{
    int32_t each = 0;
    uint32_t score = UINT32_MAX;
    if (policy.split_blocks == 0 && policy.batch * policy.groups <= policy.parts) {
        const uint32_t mine = smla_even_candidate<Int>(policy, work, threadIdx.x & 31, &each);
        score = __reduce_min_sync(~0u, mine);
        each = __shfl_sync(~0u, each, __ffs(__ballot_sync(~0u, mine == score)) - 1);
    }
    return smla_decide<Int>(policy, work, each, score);
}

/* The request at `place`, in the lengths of one item each; line[t] is where the run of thread t begins.
   Returns the request's begin and length, too. */
SMLA_DEV int64_t smla_request_at(const smla_plan_params &p, const smla_team &team,
                                 const smla_rule &rule, const int64_t *line, int64_t place,
                                 int64_t *begin, int64_t *length)
{
    /* the last run that begins at or before; empty ones come last */
    int lo = 0, hi = p.run == 1 ? (int)p.policy.batch - 1 : team.size - 1;
    while (lo < hi) {
        const int middle = (lo + hi + 1) / 2;
        if (line[middle] <= place) lo = middle;
        else hi = middle - 1;
    }
    int64_t request = (int64_t)lo * p.run, at = line[lo];
    *length = line[lo + 1] - at;
    if (p.run > 1) {
        for (;; ++request) {
            const int32_t blocks = smla_item_blocks(p.policy, __ldg(&p.seq_lens[request]));
            *length = smla_item_length(p.policy, rule, blocks);
            if (request + 1 == p.policy.batch || at + *length > place) break;
            at += *length;
        }
    }
    *begin = at;
    return request;
}

static __global__ void __launch_bounds__(smla_kPlanThreads, 1)
snapmla_plan_kernel(const __grid_constant__ smla_plan_params p)
{
    __shared__ smla_work warp_work[32];
    __shared__ int64_t line_total[32], split_total[32];
    __shared__ int64_t lines[smla_kPlanThreads + 32]; /* one, or one for each warp */
    __shared__ smla_cut cuts[smla_kMaxParts + 1];
    smla_launch_dependents(); /* decode sets itself up meanwhile and waits for the end of this */
    const smla_policy &policy = p.policy;
    const smla_team team = policy.batch <= 32 ? smla_team{true, (int)threadIdx.x & 31, 32}
                                              : smla_team{false, (int)threadIdx.x, (int)blockDim.x};
    int64_t *line = lines + (team.warp ? (threadIdx.x >> 5) * 33 : 0);
    const int t = team.rank;
    const int64_t from = smla_min((int64_t)t * p.run, policy.batch);
    const int64_t to = smla_min(from + p.run, policy.batch);

    /* 1. How much work is there, and how is it dealt out? */
    smla_work work = {0, 0, 1};
    int64_t splits = 0;
    int32_t blocks = 0; /* of the last request of the run, which is mostly the only one */
#pragma unroll 4
    for (int64_t b = from; b < to; ++b) {
        blocks = smla_item_blocks(policy, __ldg(&p.seq_lens[b]));
        smla_add_work(policy, blocks, &work);
        splits += smla_splits_of(policy, blocks);
    }
    work = smla_team_work(team, work, warp_work);
    const smla_rule rule = smla_is_small(policy, work) ? smla_best_rule<uint32_t>(policy, work)
                                                       : smla_best_rule<int64_t>(policy, work);

    /* 2. The line, and the borders on it. */
    int32_t used = rule.used;
    if (rule.deal != smla_kWhole) {
        int64_t length = 0, total;
        if (p.run == 1) length = from < to ? smla_item_length(policy, rule, blocks) : 0;
        else
            for (int64_t b = from; b < to; ++b)
                length += smla_item_length(policy, rule,
                                           smla_item_blocks(policy, __ldg(&p.seq_lens[b])));
        line[t] = smla_team_scan(team, length, line_total, &total);
        if (t == 0) line[team.size] = total;
        if (rule.deal == smla_kEven) used = (int32_t)(total * policy.groups);
        smla_sync(team);
    }
    for (int i = threadIdx.x; i <= policy.parts; i += blockDim.x) {
        smla_cut cut;
        if (!smla_plain_cut(policy, rule, i, used, &cut)) {
            const int64_t position = smla_border(rule, i);
            int64_t begin, length;
            const int64_t request = smla_request_at(
                p, team, rule, line,
                policy.groups == 1 ? position : smla_div(position, policy.groups), &begin, &length);
            cut = smla_cut_at(policy, rule, request, begin, length, position);
        }
        cuts[i] = cut;
    }
    __syncthreads();

    /* 3. The parts. */
    for (int i = threadIdx.x; i < policy.parts; i += blockDim.x)
        p.part[i] = smla_part_between(policy, rule, cuts, i);
    if (policy.split_blocks == 0) return;
    int64_t total_splits, before = smla_team_scan(team, splits, split_total, &total_splits);
    if (team.warp && threadIdx.x >= 32) return; /* all warps know, the first one writes */
    for (int64_t b = from; b < to; ++b) {
        p.split_begin[b] = before;
        before += smla_splits_of(policy, smla_item_blocks(policy, __ldg(&p.seq_lens[b])));
    }
    if (t == 0) p.split_begin[policy.batch] = total_splits;
}

/* ================================================================================================
   >>decode     what all decode kernels share: parameters, the walk over a part, the end of a split
   ============================================================================================== */
struct smla_decode_params {
    smla_planes planes;
    const int32_t *block_table;
    int64_t table_stride;
    const int32_t *seq_lens;
    int32_t len_limit; /* min of max_seq_len and what the table holds */
    int32_t s_q, heads, rows; /* rows = s_q * heads, row = query token * heads + head */
    int32_t causal;
    int32_t precise;   /* SNAPMLA_MODE_PRECISE */
    float scale_log2e; /* softmax_scale * log2(e): logits are kept in base 2 */
    const uint16_t *q; /* bf16, or NULL and the planes */
    int64_t q_batch_stride, q_token_stride, q_head_stride;
    const uint8_t *q_content;
    const float *q_scale;
    const uint16_t *q_rope;
    uint16_t *out;
    int64_t out_batch_stride, out_token_stride, out_head_stride;
    float *lse;
    int64_t lse_batch_stride, lse_token_stride;
    smla_policy policy;
    const smla_part *part;
    const int64_t *split_begin;
    int32_t group, tiles, tile_rows;
    float *partial_acc;   /* [slots, group, tile_rows, 512]: sums of weight * V */
    float4 *partial_stat; /* [slots, group, tile_rows]: m, l, lq, unused */
};

/* One split of one row tile: the unit of work of a CTA. */
struct smla_split {
    int64_t request;
    int32_t tile;
    int32_t begin, end; /* tokens; begin is a multiple of 64, end too or the request's length */
    int32_t len;        /* the request's length */
    int64_t slot;       /* where the partial result goes; -1: straight to the output */
};

/* State of a row after a split: weights are 2^(logit - m) */
struct smla_row_stat {
    float m;  /* running maximum of the logits, base 2; -inf if no key was seen */
    float l;  /* sum of the weights: lse */
    float lq; /* sum of the weights as rounded for PV: the output's denominator */
};

SMLA_HD int32_t smla_clip_len(const smla_decode_params &p, int32_t seq_len)
{
    return smla_max(0, smla_min(seq_len, p.len_limit));
}

/* Keys that row `row` of a request of `len` tokens sees: those below the result. */
SMLA_DEV int32_t smla_row_limit(const smla_decode_params &p, int32_t row, int32_t len)
{
    if (row >= p.rows) return 0;
    return p.causal ? len - p.s_q + 1 + row / p.heads : len;
}

/* Where a CTA stands in its part: an item, and the token at which the split begins.  Everything else
   about the split is derived again where it is needed, because registers are dear in between. */
struct smla_cursor {
    int64_t item;
    int32_t begin;
};

/* The walk of member `member` of part `index`, for the CPU as well. */
SMLA_HD smla_cursor smla_walk_first(const smla_decode_params &p, int32_t index)
{
    const smla_part part = p.part[index];
    return {part.first, part.begin};
}

SMLA_HD bool smla_walk_ended(const smla_decode_params &p, int32_t index, const smla_cursor &c)
{
    return c.item > p.part[index].last;
}

/* For a caller that holds the part, and the length of the cursor's request as it was read. */
SMLA_HD smla_split smla_split_of_part(const smla_decode_params &p, const smla_part &part,
                                      int32_t index, int32_t member, const smla_cursor &c,
                                      int32_t seq_len)
{
    const int32_t split_tokens = p.policy.split_blocks * smla_kBlock;
    const int32_t stop = c.item == part.last ? part.end : smla_kToEnd;
    smla_split s;
    s.request = smla_request_of(p.policy, c.item);
    const int64_t tile_group = c.item - s.request * p.policy.groups;
    s.tile = (int32_t)(tile_group * p.group + member);
    s.len = smla_clip_len(p, seq_len);
    s.begin = c.begin;
    if (split_tokens == 0) { /* balanced: what the part holds of the item is one split */
        const bool whole = c.begin == 0 && stop == smla_kToEnd;
        s.end = smla_min(stop, s.len);
        s.slot = whole ? -1 : 2 * (int64_t)index + (c.begin == 0);
        return s;
    }
    const int64_t before = p.split_begin[s.request];
    const int64_t splits = p.split_begin[s.request + 1] - before, i = c.begin / split_tokens;
    s.end = i == splits - 1 ? s.len : smla_min(c.begin + split_tokens, s.len);
    s.slot = splits == 1 ? -1 : before * p.policy.groups + tile_group * splits + i;
    return s;
}

SMLA_HD smla_split smla_walk_split(const smla_decode_params &p, int32_t index, int32_t member,
                                   const smla_cursor &c)
{
    return smla_split_of_part(p, p.part[index], index, member, c,
                              p.seq_lens[smla_request_of(p.policy, c.item)]);
}

SMLA_HD void smla_walk_on(const smla_decode_params &p, int32_t index, smla_cursor &c)
{
    const int64_t split_tokens = (int64_t)p.policy.split_blocks * smla_kBlock;
    if (split_tokens > 0) {
        const smla_part part = p.part[index];
        const int64_t request = smla_request_of(p.policy, c.item), next = c.begin + split_tokens;
        const int64_t splits = p.split_begin[request + 1] - p.split_begin[request];
        if (next < splits * split_tokens && (c.item != part.last || next < part.end)) {
            c.begin = (int32_t)next;
            return;
        }
    }
    ++c.item;
    c.begin = 0;
}

/* The same for the CTA that asks: for (c = first; !at_end; advance) split_at. */
SMLA_DEV int32_t smla_part_index(const smla_decode_params &p)
{
    return (int32_t)(p.group == 1 ? blockIdx.x : blockIdx.x / p.group);
}

SMLA_DEV int32_t smla_part_member(const smla_decode_params &p)
{
    return (int32_t)blockIdx.x - smla_part_index(p) * p.group;
}

SMLA_DEV smla_cursor smla_first_split(const smla_decode_params &p)
{
    return smla_walk_first(p, smla_part_index(p));
}

SMLA_DEV bool smla_at_end(const smla_decode_params &p, const smla_cursor &c)
{
    return smla_walk_ended(p, smla_part_index(p), c);
}

SMLA_DEV smla_split smla_split_at(const smla_decode_params &p, const smla_cursor &c)
{
    return smla_walk_split(p, smla_part_index(p), smla_part_member(p), c);
}

SMLA_DEV void smla_advance(const smla_decode_params &p, smla_cursor &c)
{
    smla_walk_on(p, smla_part_index(p), c);
}

SMLA_DEV uint16_t *smla_out_row(const smla_decode_params &p, int64_t request, int32_t row)
{
    const int32_t token = row / p.heads, head = row - token * p.heads;
    return p.out + request * p.out_batch_stride + token * p.out_token_stride
         + head * p.out_head_stride;
}

SMLA_DEV void smla_store_lse(const smla_decode_params &p, int64_t request, int32_t row,
                             const smla_row_stat &stat)
{
    if (p.lse == nullptr) return;
    const int32_t token = row / p.heads, head = row - token * p.heads;
    p.lse[request * p.lse_batch_stride + token * p.lse_token_stride + head] =
        stat.l == 0.0f ? smla_neg_inf() : stat.m * smla_kLn2 + __logf(stat.l);
}

/* What the sums of a row are multiplied with to give its output; 0 for a row without keys. */
SMLA_DEV float smla_out_factor(const smla_row_stat &stat)
{
    return stat.l == 0.0f ? 0.0f : smla_div_rn(1.0f, stat.lq);
}

SMLA_DEV uint2 smla_bf16x4(float4 v, float factor)
{
    return make_uint2(smla_bf16x2_from_f32(v.x * factor, v.y * factor),
                      smla_bf16x2_from_f32(v.z * factor, v.w * factor));
}

SMLA_DEV const uint16_t *smla_q_row(const smla_decode_params &p, int64_t request, int32_t row)
{
    const int32_t token = row / p.heads, head = row - token * p.heads;
    return p.q + request * p.q_batch_stride + token * p.q_token_stride + head * p.q_head_stride;
}

/* Row `row` of the request as the kernels' prologue needs it: quantised here or taken as it is. */
SMLA_DEV smla_quantised_row smla_load_q_row(const smla_decode_params &p, int64_t request,
                                            int32_t row)
{
    const int lane = threadIdx.x & 31;
    if (p.q != nullptr) {
        const uint16_t *q = smla_q_row(p, request, row);
        return smla_quantise_row(smla_load_row(q, q + smla_kLatent, true));
    }
    const int64_t index = request * p.rows + row;
    smla_quantised_row y;
    const uint8_t *content = p.q_content + index * smla_kLatent;
    y.content[0] = *reinterpret_cast<const uint2 *>(content + 8 * lane);
    y.content[1] = *reinterpret_cast<const uint2 *>(content + 256 + 8 * lane);
    y.rope = *reinterpret_cast<const uint32_t *>(p.q_rope + index * smla_kRope + 2 * lane);
    y.scale = p.q_scale[index];
    if (!smla_is_finite(y.scale)) y.scale = __uint_as_float(smla_kNanF32);
    return y;
}

/* ================================================================================================
   >>general    the decode kernel for every GPU since compute capability 8.0, on mma.sync

   A CTA of 8 warps holds a tile of 16 * kTiles rows and walks over blocks of 64 tokens:
     load     cp.async of the next block into the other of two stages
     scores   warp = one m16 row tile x 8 * kTiles tokens; e4m3 becomes f16 on the way to the tensor
              core, which makes every product and, to f32, every sum exact; rope in bf16
     softmax  running maximum, block scale, P rounded to e4m3 and kept as the f16 of equal value, or,
              in the precise mode, rounded to f16
     values   warp = 64 latent dims x all rows; V turned by ldmatrix.trans; a fresh accumulator per
              block, added to the f32 master with the block's scale

   FP16 MMA serves all GPUs, those with an FP8 MMA too: mma.sync on FP8 sums with 14 bits there, and
   at the row counts of decoding this path is bound by memory.

   Fragments permute k, alike in both operands: thread (g, q) = (lane / 4, lane % 4) of an MMA feeds
   k = 2q, 2q+1, 2q+8, 2q+9 from four consecutive dims (scores) or tokens (values).
   A 16-byte chunk c of row r lies at chunk c ^ smla_swizzle(r), so that 16-byte reads of (2 rows x 4
   chunks) and ldmatrix reads of the tokens below are free of bank conflicts.
   ============================================================================================== */
SMLA_CONST int smla_kGeneralThreads = 256;
SMLA_CONST int smla_kPPitch = 160; /* bytes of a row of P: 128 + padding */

/* threadIdx.x, read anew in every step of a block: what it implies for addresses would otherwise be
   kept in registers over the whole loop, more than there are. */
SMLA_DEV int smla_tid()
{
    int tid;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(tid));
    return tid;
}

SMLA_DEV int smla_swizzle(int row) { return (row & 1) << 2 | (row >> 2 & 3); }

/* kRopes: stages of the rope part; 2, or 1 to fit into the 99 KB of consumer GPUs, where a block's
   rope part is loaded when the scores of the block before are done. */
template <int kTiles, int kRopes> struct smla_general_smem {
    static constexpr int kRows = 16 * kTiles;
    static constexpr int kTokenGroups = 8 / kTiles;
    uint8_t content[2][smla_kBlock * smla_kLatent];
    uint8_t rope[kRopes][smla_kBlock * smla_kRope * 2];
    uint8_t q_content[kRows * smla_kLatent * 2]; /* f16 */
    uint8_t q_rope[kRows * smla_kRope * 2];
    uint8_t weight[kRows * smla_kPPitch]; /* P: f16, in the default mode values of e4m3 */
    float scale[2][smla_kBlock];          /* k_s */
    int32_t token[2][smla_kBlock];        /* token index; INT_MAX for one that does not count */
    float2 top[kRows][kTokenGroups];      /* maxima of logit, logit + log2 k_s */
    float2 sum[kRows][8];                 /* sums of weight, rounded weight over 8 tokens each */
    float4 step[kRows];                   /* alpha, S', m', unused; at the end: out factor */
    float row_factor[kRows];              /* softmax_scale * log2e * q_s */
    int32_t limit[kRows];                 /* the row sees the tokens below */
    smla_row_stat stat[kRows];            /* of the split so far; row threadIdx.x's own */
};
static_assert(sizeof(smla_general_smem<1, 1>) <= 99 * 1024, "runs on every GPU");

/* Where this thread's token of a block lies; bytes = 0 for one that does not count, which is filled
   with zeros. */
struct smla_general_source {
    smla_token from;
    uint32_t bytes;
};

SMLA_DEV smla_general_source smla_general_find(const smla_decode_params &p, int32_t token,
                                               int32_t end, int32_t page)
{
    const bool live = token < end && page >= 0;
    const int32_t offset = token & ((1 << p.planes.page_shift) - 1);
    return {live ? smla_locate(p.planes, page, offset) : smla_locate(p.planes, 0, 0),
            live ? 16u : 0u};
}

/* This thread's share of a stage: a quarter of token threadIdx.x / 4. */
template <int kTiles, int kRopes>
SMLA_DEV void smla_general_load_rope(smla_general_smem<kTiles, kRopes> &sm,
                                     const smla_decode_params &p, int stage, int32_t token,
                                     int32_t end, int32_t page)
{
    const int t = threadIdx.x >> 2, quarter = threadIdx.x & 3;
    const smla_general_source s = smla_general_find(p, token, end, page);
    const uint32_t rope = smla_smem_addr(sm.rope[stage % kRopes] + t * smla_kRope * 2);
    SMLA_UNROLL
    for (int i = 0; i < 2; ++i) {
        const int c = 4 * i + quarter;
        smla_cp_async_16(rope + 16 * (c ^ smla_swizzle(t)), s.from.rope + 8 * c, s.bytes);
    }
}

/* The same of all but the rope part. */
template <int kTiles, int kRopes>
SMLA_DEV void smla_general_load(smla_general_smem<kTiles, kRopes> &sm, const smla_decode_params &p,
                                int stage, int32_t token, int32_t end, int32_t page)
{
    const int t = threadIdx.x >> 2, quarter = threadIdx.x & 3;
    const smla_general_source s = smla_general_find(p, token, end, page);
    const uint32_t content = smla_smem_addr(sm.content[stage] + t * smla_kLatent);
    SMLA_UNROLL
    for (int i = 0; i < 8; ++i) {
        const int c = 4 * i + quarter;
        smla_cp_async_16(content + 16 * (c ^ smla_swizzle(t)), s.from.content + 16 * c, s.bytes);
    }
    if (quarter == 0) {
        smla_cp_async_4(smla_smem_addr(&sm.scale[stage][t]), s.from.scale, s.bytes / 4);
        sm.token[stage][t] = s.bytes > 0 ? token : smla_kToEnd;
    }
}

/* The page that holds this thread's token of a block, -1 if there is none. */
SMLA_DEV int32_t smla_general_page(const smla_decode_params &p, const smla_split &s, int32_t token)
{
    if (token >= s.end) return -1;
    return p.block_table[s.request * p.table_stride + (token >> p.planes.page_shift)];
}

/* A row of Q as it lies in shared memory. */
struct smla_general_row {
    uint4 content[2]; /* f16 x 8 each */
    uint32_t rope;    /* bf16 x 2 */
    float scale;
};

SMLA_DEV uint4 smla_f16x8_from_e4m3x8(uint2 v)
{
    return make_uint4(smla_f16x2_from_e4m3x2(v.x & 0xffffu), smla_f16x2_from_e4m3x2(v.x >> 16),
                      smla_f16x2_from_e4m3x2(v.y & 0xffffu), smla_f16x2_from_e4m3x2(v.y >> 16));
}

SMLA_DEV uint4 smla_f16x8_from_bf16x8(uint4 v, float factor)
{
    const uint32_t w[4] = {v.x, v.y, v.z, v.w};
    uint32_t y[4];
    SMLA_UNROLL
    for (int i = 0; i < 4; ++i)
        y[i] = smla_f16x2_from_f32(smla_mul_rn(smla_bf16_lo(w[i]), factor),
                                   smla_mul_rn(smla_bf16_hi(w[i]), factor));
    return make_uint4(y[0], y[1], y[2], y[3]);
}

/* The precise mode's Q: the scale is a power of two that leaves 2^8 to 2^9 for the largest latent dim,
   so that f16 and bf16 hold the row as it is, but for latent dims below 2^-25 of the largest. */
SMLA_DEV smla_general_row smla_general_precise_row(const smla_row &row)
{
    smla_general_row y;
    const uint32_t amax = smla_amax_bits(row);
    const uint32_t exponent = smla_max(amax >> 7, smla_kLeastExponent);
    const float inverse = __uint_as_float((127u + 127u + 8u - exponent) << 23);
    y.content[0] = smla_f16x8_from_bf16x8(row.latent[0], inverse);
    y.content[1] = smla_f16x8_from_bf16x8(row.latent[1], inverse);
    y.rope = smla_bf16x2_rn(smla_mul_rn(smla_bf16_lo(row.rope), inverse),
                            smla_mul_rn(smla_bf16_hi(row.rope), inverse));
    y.scale = __uint_as_float(amax >= 0x7f80u ? smla_kNanF32 : (exponent - 8u) << 23);
    return y;
}

SMLA_DEV smla_general_row smla_general_q_row(const smla_decode_params &p, int64_t request,
                                             int32_t row)
{
    if (p.precise && p.q != nullptr) {
        const uint16_t *q = smla_q_row(p, request, row);
        return smla_general_precise_row(smla_load_row(q, q + smla_kLatent, true));
    }
    const smla_quantised_row y = smla_load_q_row(p, request, row);
    return {{smla_f16x8_from_e4m3x8(y.content[0]), smla_f16x8_from_e4m3x8(y.content[1])},
            y.rope, y.scale};
}

/* Eight latent dims, 8 * index and on, of row r of Q.  They fill a chunk, and the chunks of even and
   odd index change places so that the reads below are free of bank conflicts. */
template <int kTiles, int kRopes>
SMLA_DEV void smla_general_put_q(smla_general_smem<kTiles, kRopes> &sm, int r, int index, uint4 dims)
{
    const int c = (index & ~7) + 4 * (index & 1) + (index >> 1 & 3);
    uint8_t *row = sm.q_content + r * smla_kLatent * 2;
    *reinterpret_cast<uint4 *>(row + 16 * (c ^ smla_swizzle(r))) = dims;
}

template <int kTiles, int kRopes>
SMLA_DEV void smla_general_load_q(smla_general_smem<kTiles, kRopes> &sm, const smla_decode_params &p,
                                  const smla_split &s)
{
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    for (int r = warp; r < 16 * kTiles; r += 8) {
        const int32_t row = s.tile * 16 * kTiles + r;
        smla_general_row y = {};
        if (row < p.rows) y = smla_general_q_row(p, s.request, row);
        SMLA_UNROLL
        for (int i = 0; i < 2; ++i) smla_general_put_q(sm, r, 32 * i + lane, y.content[i]);
        *reinterpret_cast<uint32_t *>(sm.q_rope + r * smla_kRope * 2
                                      + 16 * (lane / 4 ^ smla_swizzle(r)) + 4 * (lane & 3)) = y.rope;
        if (lane == 0) {
            sm.row_factor[r] = p.scale_log2e * y.scale;
            sm.limit[r] = smla_row_limit(p, row, s.len);
            sm.stat[r] = {smla_neg_inf(), 0.0f, 0.0f};
        }
    }
}

SMLA_DEV uint4 smla_chunk(const uint8_t *rows, int pitch, int row, int chunk)
{
    return *reinterpret_cast<const uint4 *>(rows + row * pitch + 16 * (chunk ^ smla_swizzle(row)));
}

/* Dims 64 * j .. + 63 of a row tile of Q as the A operands of four k steps. */
template <int kTiles, int kRopes>
SMLA_DEV void smla_general_get_q(const smla_general_smem<kTiles, kRopes> &sm, int tid, int row_tile,
                                 int j, uint32_t (&a)[4][4])
{
    const int g = (tid & 31) >> 2, q = tid & 3;
    SMLA_UNROLL
    for (int half = 0; half < 2; ++half) { /* rows g and g + 8 */
        const int row = 16 * row_tile + g + 8 * half;
        const uint4 lo = smla_chunk(sm.q_content, smla_kLatent * 2, row, 8 * j + q);
        const uint4 hi = smla_chunk(sm.q_content, smla_kLatent * 2, row, 8 * j + 4 + q);
        const uint32_t w[8] = {lo.x, lo.y, lo.z, lo.w, hi.x, hi.y, hi.z, hi.w};
        SMLA_UNROLL
        for (int i = 0; i < 4; ++i) {
            a[i][half] = w[2 * i];
            a[i][half + 2] = w[2 * i + 1];
        }
    }
}

/* Raw scores of this warp: s[n] = rows (16 * row_tile + g, + 8) x tokens (8 * (token_tile + n) + 2q,
   + 1).  Even and odd k steps run in two chains to halve the latency. */
template <int kTiles, int kRopes>
SMLA_DEV void smla_general_scores(const smla_general_smem<kTiles, kRopes> &sm, int stage, int row_tile,
                                  int token_tile, float (&s)[kTiles][4])
{
    const int tid = smla_tid();
    const int g = (tid & 31) >> 2, q = tid & 3;
    float chain[2][kTiles][4] = {};
#pragma unroll 1
    for (int j = 0; j < smla_kLatent / 64; ++j) {
        uint32_t a[4][4];
        smla_general_get_q(sm, tid, row_tile, j, a);
        SMLA_UNROLL
        for (int n = 0; n < kTiles; ++n) {
            const uint4 b = smla_chunk(sm.content[stage], smla_kLatent, 8 * (token_tile + n) + g,
                                       4 * j + q);
            const uint32_t w[4] = {b.x, b.y, b.z, b.w};
            SMLA_UNROLL
            for (int i = 0; i < 4; ++i)
                smla_mma_f16(chain[i & 1][n], a[i], smla_f16x2_from_e4m3x2(w[i] & 0xffffu),
                             smla_f16x2_from_e4m3x2(w[i] >> 16));
        }
    }
    SMLA_UNROLL
    for (int j = 0; j < smla_kRope / 32; ++j) {
        const uint4 a0 = smla_chunk(sm.q_rope, smla_kRope * 2, 16 * row_tile + g, 4 * j + q);
        const uint4 a1 = smla_chunk(sm.q_rope, smla_kRope * 2, 16 * row_tile + g + 8, 4 * j + q);
        const uint32_t even[4] = {a0.x, a1.x, a0.y, a1.y}, odd[4] = {a0.z, a1.z, a0.w, a1.w};
        SMLA_UNROLL
        for (int n = 0; n < kTiles; ++n) {
            const uint4 b = smla_chunk(sm.rope[stage % kRopes], smla_kRope * 2,
                                       8 * (token_tile + n) + g, 4 * j + q);
            smla_mma_bf16(chain[0][n], even, b.x, b.y);
            smla_mma_bf16(chain[1][n], odd, b.z, b.w);
        }
    }
    SMLA_UNROLL
    for (int n = 0; n < kTiles; ++n) {
        SMLA_UNROLL
        for (int i = 0; i < 4; ++i) s[n][i] = chain[0][n][i] + chain[1][n][i];
    }
}

/* Scores to base-2 logits, -inf where the row does not see the token; the row maxima of this warp's
   tokens go to shared memory. */
template <int kTiles, int kRopes>
SMLA_DEV void smla_general_logits(smla_general_smem<kTiles, kRopes> &sm, int stage, int row_tile,
                                  int token_tile, float (&s)[kTiles][4])
{
    const int tid = smla_tid();
    const int g = (tid & 31) >> 2, q = tid & 3;
    const int32_t limit[2] = {sm.limit[16 * row_tile + g], sm.limit[16 * row_tile + g + 8]};
    float2 top[2] = {make_float2(smla_neg_inf(), smla_neg_inf()),
                     make_float2(smla_neg_inf(), smla_neg_inf())};
    SMLA_UNROLL
    for (int n = 0; n < kTiles; ++n) {
        SMLA_UNROLL
        for (int i = 0; i < 4; ++i) {
            const int t = 8 * (token_tile + n) + 2 * q + (i & 1), half = i >> 1;
            const float k_s = sm.scale[stage][t];
            const float x = s[n][i] * (sm.row_factor[16 * row_tile + g + 8 * half] * k_s);
            s[n][i] = sm.token[stage][t] < limit[half] ? x : smla_neg_inf();
            top[half].x = fmaxf(top[half].x, s[n][i]);
            top[half].y = fmaxf(top[half].y, s[n][i] + smla_lg2(k_s));
        }
    }
    SMLA_UNROLL
    for (int half = 0; half < 2; ++half) {
        SMLA_UNROLL
        for (int d = 1; d < 4; d *= 2) {
            top[half].x = fmaxf(top[half].x, __shfl_xor_sync(~0u, top[half].x, d));
            top[half].y = fmaxf(top[half].y, __shfl_xor_sync(~0u, top[half].y, d));
        }
        if (q == 0) sm.top[16 * row_tile + g + 8 * half][token_tile / kTiles] = top[half];
    }
}

/* What one block means for one row. */
struct smla_row_step {
    float m, alpha, block_scale, inverse; /* m', 2^(m - m'), S', 448 / F */
};

template <int kTiles, int kRopes>
SMLA_DEV smla_row_step smla_general_step(const smla_general_smem<kTiles, kRopes> &sm, int row)
{
    float2 top = sm.top[row][0];
    SMLA_UNROLL
    for (int i = 1; i < 8 / kTiles; ++i) {
        top.x = fmaxf(top.x, sm.top[row][i].x);
        top.y = fmaxf(top.y, sm.top[row][i].y);
    }
    const float m = sm.stat[row].m;
    smla_row_step y;
    y.m = fmaxf(m, top.x);
    const float shift = y.m == smla_neg_inf() ? 0.0f : y.m;
    y.alpha = smla_ex2(m - shift);
    /* The floor keeps 448 / F finite; 2^-115 is far below any weight that matters. */
    const float largest = fmaxf(smla_ex2(top.y - shift), 0x1p-115f);
    y.block_scale = largest / smla_kE4m3Max;
    y.inverse = smla_kE4m3Max / largest;
    return y;
}

/* Two weights as the f16 that multiply V.  They are 448 at most but for rounding errors, which grow
   with the logits, without end: e4m3 saturates, and f16 is made to. */
SMLA_DEV uint32_t smla_general_round(bool precise, float lo, float hi)
{
    return precise ? smla_min_nan_f16x2(smla_f16x2_from_f32(lo, hi), smla_kF16x2Max)
                   : smla_f16x2_from_e4m3x2(smla_e4m3x2_from_f32(lo, hi));
}

/* Logits to weights: P to shared memory, sums of the weights and of the rounded weights over each 8
   tokens likewise (so that the order of summation does not depend on kTiles). */
template <int kTiles, int kRopes>
SMLA_DEV void smla_general_weights(smla_general_smem<kTiles, kRopes> &sm, bool precise, int stage,
                                   int row_tile, int token_tile, const float (&s)[kTiles][4])
{
    const float least = precise ? smla_kF16MinNormal : smla_kE4m3MinNormal;
    const int tid = smla_tid();
    const int g = (tid & 31) >> 2, q = tid & 3;
    SMLA_UNROLL
    for (int half = 0; half < 2; ++half) {
        const int row = 16 * row_tile + g + 8 * half;
        const smla_row_step step = smla_general_step(sm, row);
        const float shift = step.m == smla_neg_inf() ? 0.0f : step.m;
        if (token_tile == 0 && q == 0)
            sm.step[row] = make_float4(step.alpha, step.block_scale, step.m, 0.0f);
        SMLA_UNROLL
        for (int n = 0; n < kTiles; ++n) {
            const int t = 8 * (token_tile + n) + 2 * q;
            const float2 k_s = make_float2(sm.scale[stage][t], sm.scale[stage][t + 1]);
            const float2 e = make_float2(smla_ex2(s[n][2 * half] - shift),
                                         smla_ex2(s[n][2 * half + 1] - shift));
            /* A masked token's k_s may be NaN, so its zero must not be a product. */
            const uint32_t p =
                smla_general_round(precise, e.x == 0.0f ? 0.0f : e.x * k_s.x * step.inverse,
                                   e.y == 0.0f ? 0.0f : e.y * k_s.y * step.inverse);
            *reinterpret_cast<uint32_t *>(sm.weight + row * smla_kPPitch + 2 * t) = p;
            /* The denominator takes the weight that PV takes, unless it was flushed: a token whose
               k_s is tiny beside the block's largest keeps its mass. */
            const float2 v = smla_f32x2_from_f16x2(p);
            const float rounded_x = v.x * __fdividef(step.block_scale, k_s.x);
            const float rounded_y = v.y * __fdividef(step.block_scale, k_s.y);
            float2 sum = make_float2(e.x + e.y,
                                     (v.x >= least ? rounded_x : e.x)
                                         + (v.y >= least ? rounded_y : e.y));
            SMLA_UNROLL
            for (int d = 1; d < 4; d *= 2) {
                sum.x += __shfl_xor_sync(~0u, sum.x, d);
                sum.y += __shfl_xor_sync(~0u, sum.y, d);
            }
            if (q == 0) sm.sum[row][token_tile + n] = sum;
        }
    }
}

/* The block's sums of a row, in order of tokens, into the row's state. */
template <int kTiles, int kRopes>
SMLA_DEV void smla_general_sum(smla_general_smem<kTiles, kRopes> &sm, int row)
{
    const float4 step = sm.step[row];
    float2 sum = sm.sum[row][0];
    SMLA_UNROLL
    for (int j = 1; j < 8; ++j) {
        sum.x += sm.sum[row][j].x;
        sum.y += sm.sum[row][j].y;
    }
    const smla_row_stat stat = sm.stat[row];
    sm.stat[row] = {step.z, stat.l * step.x + sum.x, stat.lq * step.x + sum.y};
}

/* P of one row tile and k step of 16 tokens as the A operand. */
template <int kTiles, int kRopes>
SMLA_DEV void smla_general_load_p(const smla_general_smem<kTiles, kRopes> &sm, int row_tile, int k,
                                  uint32_t (&a)[4])
{
    const int tid = smla_tid();
    const int g = (tid & 31) >> 2, q = tid & 3;
    const uint8_t *row = sm.weight + (16 * row_tile + g) * smla_kPPitch + 32 * k + 8 * q;
    const uint2 lo = *reinterpret_cast<const uint2 *>(row);
    const uint2 hi = *reinterpret_cast<const uint2 *>(row + 8 * smla_kPPitch);
    a[0] = lo.x;
    a[1] = hi.x;
    a[2] = lo.y;
    a[3] = hi.y;
}

/* V of 16 latent dims as two B operands, even dims and odd dims: b[k step][even, odd][2]. */
template <int kTiles, int kRopes>
SMLA_DEV void smla_general_load_v(const smla_general_smem<kTiles, kRopes> &sm, int stage, int chunk,
                                  uint32_t (&b)[4][2][2])
{
    const int lane = threadIdx.x & 31, r = lane & 7;
    const int token = 16 * (lane >> 4) + 4 * (r >> 1) + (r & 1) + (lane >> 3 & 1) * 2;
    SMLA_UNROLL
    for (int k = 0; k < 4; k += 2) {
        const int row = 16 * k + token;
        uint32_t x[4];
        smla_ldmatrix_x4_trans(x, smla_smem_addr(sm.content[stage] + row * smla_kLatent
                                                 + 16 * (chunk ^ smla_swizzle(row))));
        SMLA_UNROLL
        for (int i = 0; i < 2; ++i) {
            const uint32_t even = __byte_perm(x[2 * i], x[2 * i + 1], 0x6420);
            const uint32_t odd = __byte_perm(x[2 * i], x[2 * i + 1], 0x7531);
            b[k + i][0][0] = smla_f16x2_from_e4m3x2(even & 0xffffu);
            b[k + i][0][1] = smla_f16x2_from_e4m3x2(even >> 16);
            b[k + i][1][0] = smla_f16x2_from_e4m3x2(odd & 0xffffu);
            b[k + i][1][1] = smla_f16x2_from_e4m3x2(odd >> 16);
        }
    }
}

/* acc[row tile][16-dim chunk of this warp's 64][even, odd dims][4] */
template <int kTiles> struct smla_general_acc { float v[kTiles][4][2][4]; };

template <int kTiles, int kRopes>
SMLA_DEV void smla_general_values(const smla_general_smem<kTiles, kRopes> &sm, int stage,
                                  smla_general_acc<kTiles> &acc)
{
    const int warp = threadIdx.x >> 5, g = (threadIdx.x & 31) >> 2;
    uint32_t a[4][4]; /* one row tile: read once; more: read again for every chunk of V */
    SMLA_UNROLL
    for (int k = 0; k < 4 && kTiles == 1; ++k) smla_general_load_p(sm, 0, k, a[k]);
    SMLA_UNROLL
    for (int c = 0; c < 4; ++c) {
        __syncwarp(); /* keeps the compiler from loading all chunks at once, which would spill */
        uint32_t b[4][2][2];
        smla_general_load_v(sm, stage, 4 * warp + c, b);
        SMLA_UNROLL
        for (int r = 0; r < kTiles; ++r) {
            float part[2][4] = {};
            SMLA_UNROLL
            for (int k = 0; k < 4; ++k) {
                if (kTiles > 1) smla_general_load_p(sm, r, k, a[k]);
                smla_mma_f16(part[0], a[k], b[k][0][0], b[k][0][1]);
                smla_mma_f16(part[1], a[k], b[k][1][0], b[k][1][1]);
            }
            const float4 lo = sm.step[16 * r + g], hi = sm.step[16 * r + g + 8];
            SMLA_UNROLL
            for (int odd = 0; odd < 2; ++odd) {
                float(&v)[4] = acc.v[r][c][odd];
                SMLA_UNROLL
                for (int i = 0; i < 2; ++i) {
                    v[i] = v[i] * lo.x + part[odd][i] * lo.y;
                    v[2 + i] = v[2 + i] * hi.x + part[odd][2 + i] * hi.y;
                }
            }
        }
    }
}

/* Tokens whose scale is NaN or Inf make the rows that see them NaN through their logits (Inf becomes
   NaN here, since a negative score would make it a silent 0); their V must not reach the other rows
   as 0 * NaN. */
template <int kTiles, int kRopes>
SMLA_DEV void smla_general_clear_v(smla_general_smem<kTiles, kRopes> &sm, int stage)
{
    const int t = threadIdx.x >> 2;
    const bool bad = !smla_is_finite(sm.scale[stage][t]);
    __syncthreads();
    if (bad) {
        sm.scale[stage][t] = __uint_as_float(smla_kNanF32);
        for (int i = threadIdx.x & 3; i < smla_kLatent / 16; i += 4)
            *reinterpret_cast<uint4 *>(sm.content[stage] + t * smla_kLatent + 16 * i) =
                make_uint4(0, 0, 0, 0);
    }
    __syncthreads();
}

/* The end of a split: the output itself, or the row's partial sums. */
template <int kTiles, int kRopes>
SMLA_DEV void smla_general_store(smla_general_smem<kTiles, kRopes> &sm, const smla_decode_params &p,
                                 const smla_split &s, const smla_general_acc<kTiles> &acc)
{
    const int tid = smla_tid();
    constexpr int kRows = 16 * kTiles;
    const int warp = tid >> 5, g = (tid & 31) >> 2, q = tid & 3;
    const int32_t row0 = s.tile * kRows;
    const int64_t partial = (s.slot * p.group + s.tile % p.group) * kRows;
    __syncthreads(); /* everybody is done with sm.step */
    if (tid < kRows) {
        const int32_t row = row0 + tid;
        const smla_row_stat stat = sm.stat[tid];
        sm.step[tid].x = smla_out_factor(stat);
        if (row < p.rows && s.slot < 0) smla_store_lse(p, s.request, row, stat);
        if (row < p.rows && s.slot >= 0)
            p.partial_stat[partial + tid] = make_float4(stat.m, stat.l, stat.lq, 0.0f);
    }
    __syncthreads();
    SMLA_UNROLL
    for (int r = 0; r < kTiles; ++r) {
        SMLA_UNROLL
        for (int half = 0; half < 2; ++half) {
            const int tile_row = 16 * r + g + 8 * half;
            if (row0 + tile_row >= p.rows) continue;
            const float factor = sm.step[tile_row].x;
            uint16_t *out = s.slot < 0 ? smla_out_row(p, s.request, row0 + tile_row) : nullptr;
            float *sums = p.partial_acc + (partial + tile_row) * smla_kLatent;
            SMLA_UNROLL
            for (int c = 0; c < 4; ++c) {
                const int dim = 64 * warp + 16 * c + 4 * q, i = 2 * half;
                const float4 v = make_float4(acc.v[r][c][0][i], acc.v[r][c][1][i],
                                             acc.v[r][c][0][i + 1], acc.v[r][c][1][i + 1]);
                if (s.slot < 0) *reinterpret_cast<uint2 *>(out + dim) = smla_bf16x4(v, factor);
                else *reinterpret_cast<float4 *>(sums + dim) = v;
            }
        }
    }
}

template <int kTiles, int kRopes>
SMLA_DEV void smla_general_split(smla_general_smem<kTiles, kRopes> &sm, const smla_decode_params &p,
                                 const smla_cursor &cursor)
{
    const smla_split s = smla_split_at(p, cursor);
    if (s.tile >= p.tiles) return; /* the last tile group of a request may be smaller */
    const int warp = threadIdx.x >> 5, row_tile = warp % kTiles, token_tile = warp / kTiles * kTiles;

    const int blocks = s.end > s.begin ? (int)smla_ceil_div(s.end - s.begin, smla_kBlock) : 0;
    int32_t token = s.begin + (int32_t)(threadIdx.x >> 2); /* that this thread loads */
    int32_t page = smla_general_page(p, s, token);
    if (blocks > 0) {
        smla_general_load(sm, p, 0, token, s.end, page);
        smla_general_load_rope(sm, p, 0, token, s.end, page);
    }
    token += smla_kBlock;
    page = smla_general_page(p, s, token);
    smla_general_load_q(sm, p, s);

    smla_general_acc<kTiles> acc = {};
    for (int i = 0; i < blocks; ++i) {
        const int stage = i & 1;
        smla_cp_async_wait_all();
        __syncthreads(); /* block i has landed for all; all are done with block i - 1 */
        const int32_t next = token, next_page = page;
        if (i + 1 < blocks) {
            smla_general_load(sm, p, stage ^ 1, next, s.end, next_page);
            if (kRopes == 2) smla_general_load_rope(sm, p, stage ^ 1, next, s.end, next_page);
        }
        token += smla_kBlock;
        page = smla_general_page(p, s, token);

        if (__syncthreads_or(!smla_is_finite(sm.scale[stage][threadIdx.x >> 2])))
            smla_general_clear_v(sm, stage);
        float x[kTiles][4];
        smla_general_scores(sm, stage, row_tile, token_tile, x);
        smla_general_logits(sm, stage, row_tile, token_tile, x);
        __syncthreads();
        if (kRopes == 1 && i + 1 < blocks)
            smla_general_load_rope(sm, p, stage ^ 1, next, s.end, next_page);
        smla_general_weights(sm, p.precise, stage, row_tile, token_tile, x);
        __syncthreads();
        if (threadIdx.x < 16 * kTiles) smla_general_sum(sm, threadIdx.x);
        smla_general_values(sm, stage, acc);
    }
    smla_cp_async_wait_all();
    smla_general_store(sm, p, smla_split_at(p, cursor), acc);
    __syncthreads(); /* everybody is done with the split's shared memory */
}

template <int kTiles, int kRopes>
static __global__ void __launch_bounds__(smla_kGeneralThreads, kTiles == 1 && kRopes == 2 ? 2 : 1)
snapmla_decode_general_kernel(const __grid_constant__ smla_decode_params p)
{
    extern __shared__ __align__(128) uint8_t smla_smem[];
    auto &sm = *reinterpret_cast<smla_general_smem<kTiles, kRopes> *>(smla_smem);
    for (smla_cursor c = smla_first_split(p); !smla_at_end(p, c); smla_advance(p, c))
        smla_general_split(sm, p, c);
}

/* ================================================================================================
   >>hopper     the decode kernel for compute capability 9.0: TMA, mbarriers, FP8 wgmma

   A CTA of 4 warpgroups (WG), or 5, walks over blocks of 64 tokens with a tile of kRows = 16, 32 or 64
   query rows.  Blocks pass through a ring of 4 stages, one CTA on an SM:
     WG 0, 1  values    O^T[256 dims x rows] += V^T P^T: V^T in registers (ldmatrix.trans + prmt), P
                        from shared memory, a fresh accumulator per block, then FP32 masters
     WG 2     softmax   S[64 rows x 64 tokens] = Q K^T (FP8, then rope in BF16), the weights,
                        P rounded to e4m3; with 16 or 32 rows two warpgroups share this: WG 2 scores,
                        WG 4 weights
     WG 3     warp 0 load: TMA; warp 1 prepare: scales of a block, V rows that must be zero;
              warps 2, 3 sum: the denominator from the weights as they were rounded
   Barriers, in the order of a block's life:
     full     load -> softmax, prepare   content, scales and rope have landed
     ready    prepare -> softmax, values scales are prepared, V rows that do not count are zero
     logits   scores -> weights          with few rows: logits are in a buffer (full), or read (empty)
     weights  softmax -> values, sum     P and its scales S'
     empty    values, sum -> load        nobody needs the stage any more

   Q of the first split is loaded by all warps at once, later ones come as bf16 through the ring ahead
   of their blocks (softmax quantises them out of it), where copies wait for nobody.

   Softmax.  y = logit + log2 k_s is the logarithm of a token's weight on its FP8 content.  A block's
   largest weight of a row becomes 448, which e4m3 holds exactly (SnapMLA's scale), and the block's
   sums count with S' = 2^(largest y - log2 448 - ref), rounded to bf16 so that the rows' S' fit into
   few registers.  ref is the largest y of the row's first block and stays, unless a later one is 2^60
   times as large: f32 has room for S'.  Only then masters must be multiplied with an alpha.
   A row's state at the end of a split is (m = ref, l, lq, acc), all sums in units of 2^m:
     l   = sum of 2^(logit - m)
     lq  = sum of P / k_s where P is a normal e4m3 number, else of 2^(logit - m): what acc weighs V
           with, but for V that e4m3 flushes
     acc = sum of P * V8 * S'
   In the precise mode, in tiles of 16 rows, Q and P are sums of two e4m3, hi in rows 0 to 15 and what it
   leaves in rows 16 to 31 of the tile; S' is not rounded, and lq = l.
   ============================================================================================== */
SMLA_CONST int smla_kHopperTile = 64; /* most rows */
SMLA_CONST int smla_kFewRows = 32;    /* at most: tiles that have a warpgroup more */
SMLA_CONST int smla_kLoadWarp = 12;
SMLA_CONST int smla_kStages = 4;
/* bytes of a column block: 64 tokens x 128 bytes, swizzled */
SMLA_CONST int smla_kColumn = smla_kBlock * 128;
SMLA_CONST int smla_kStageBytes = 5 * smla_kColumn; /* 4 of content, 1 of rope */
SMLA_CONST int smla_kBlockBytes = smla_kStageBytes + smla_kBlock * 4; /* what TMA brings */

SMLA_CONST float smla_kLog2E4m3Max = 8.807354922057604f; /* log2 448 */
SMLA_CONST float smla_kScaleFloor = 0x1p-96f; /* of k_s, just below the format's own (1e-26 / 448) */
/* of log2 k_s in y: a token whose latent is zero has a logit far above its y, which ref follows, and
   2^(logit - ref) must not leave f32's range, 2^(60 + 40) a token */
SMLA_CONST float smla_kLog2ScaleFloor = -40.0f;
SMLA_CONST float smla_kFactorFloor = 1e-37f; /* of softmax_scale * log2e * q_s */
SMLA_CONST float smla_kRefSlack = 60.0f; /* binades above ref without moving it */
SMLA_CONST float smla_kFlushed = 7.5f / 512.0f; /* below: e4m3 is subnormal or 0 */

struct smla_hopper_maps {
    CUtensorMap content; /* {512, page size, pages} bytes, boxes of {128, 64, 1} */
    CUtensorMap rope;    /* {64, page size, pages} bf16, boxes of {64, 64, 1} */
};

struct smla_block_info {
    int32_t mask;      /* some row does not see some token, or a token is bad */
    int32_t valid;     /* tokens of the block that exist */
    uint32_t bad_even; /* bit i: token 2i exists and its scale is NaN or Inf */
    uint32_t bad_odd;  /* the same of token 2i + 1 */
};

/* What belongs to a stage beside its content and rope. */
struct alignas(512) smla_hopper_block {
    uint8_t weight[smla_kHopperTile * smla_kBlock]; /* P, 64-byte rows, swizzled */
    float scale[smla_kBlock];                /* k_s as loaded */
    float2 log2_k_s[smla_kBlock / 2];
    float2 k_s[smla_kBlock / 2];             /* 0 for tokens that do not exist or are bad */
    float inverse_k_s[smla_kBlock];          /* in the order of P's bytes */
    float alpha[smla_kHopperTile];
    uint32_t block_scale[4][smla_kHopperTile / 8]; /* S' of rows 8j + 2q, + 1: [q][j], two bf16 */
    smla_block_info info;
    int32_t token0;  /* the block's first token */
    int32_t valid;   /* from load to prepare */
    uint32_t moved;  /* byte w: rows 16w .. 16w+15 have an alpha other than 1 */
};

struct alignas(1024) smla_hopper_smem {
    uint8_t stage[smla_kStages][smla_kStageBytes];
    uint8_t q_content[4 * smla_kColumn];
    uint8_t q_rope[smla_kColumn];
    smla_hopper_block block[smla_kStages];
    float4 stat[2][smla_kHopperTile]; /* m, l, and the two parts of lq: too small for P, in P */
    float factor[smla_kHopperTile];   /* softmax_scale * log2e * q_s */
    float few_factor[2][smla_kFewRows]; /* of a split, for weights */
    float2 flushed[128];              /* of softmax's threads, which have no registers for it */
    int32_t limit[smla_kHopperTile];  /* keys below this are seen */
    smla_split split[2];           /* from load to all other roles */
    uint64_t full[smla_kStages], ready[smla_kStages], weights[smla_kStages], empty[smla_kStages];
    uint64_t split_full[2], split_empty[2];
    uint64_t stat_full[2]; /* softmax, sum -> values: stat of a split is written */
    uint64_t logits_full[2], logits_empty[2]; /* few rows: scores -> weights and back */
};
static_assert(sizeof(smla_hopper_smem) <= 227 * 1024, "shared memory of compute capability 9.0");

/* ---- PTX of compute capability 9.0 ---- */

/* mbarrier.init.shared::cta.b64 [bar], count;   PTX ISA "mbarrier", 7.0. */
SMLA_DEV void smla_mbarrier_init(uint32_t bar, uint32_t count)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(bar), "r"(count) : "memory");
}

SMLA_DEV void smla_mbarrier_arrive(uint32_t bar)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(bar) : "memory");
}

SMLA_DEV void smla_mbarrier_arrive_expect_tx(uint32_t bar, uint32_t bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                 :: "r"(bar), "r"(bytes) : "memory");
}

/* Waits until the phase with this parity is complete. */
SMLA_DEV void smla_mbarrier_wait(uint32_t bar, uint32_t parity)
{
    asm volatile("{\n.reg .pred done;\n"
                 "again:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra again;\n}"
                 :: "r"(bar), "r"(parity) : "memory");
}

/* cp.async.bulk.tensor.3d: a box of a tensor map, coordinates innermost first. */
SMLA_DEV void smla_tma_load_3d(uint32_t dst, const CUtensorMap *map, int32_t c0, int32_t c1,
                               int32_t c2, uint32_t bar)
{
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4, %5}], [%2];"
                 :: "r"(dst), "l"(map), "r"(bar), "r"(c0), "r"(c1), "r"(c2) : "memory");
}

/* prefetch.tensormap [map];   PTX ISA "prefetch", 8.0.  The map is cached when the first load asks for it. */
SMLA_DEV void smla_prefetch_tensormap(const CUtensorMap *map)
{
    asm volatile("prefetch.tensormap [%0];" :: "l"(map) : "memory");
}

/* cp.async.bulk.shared::cluster.global: 16-byte aligned, a multiple of 16 bytes. */
SMLA_DEV void smla_bulk_load(uint32_t dst, const void *src, uint32_t bytes, uint32_t bar)
{
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1], %2, [%3];" :: "r"(dst), "l"(src), "r"(bytes), "r"(bar) : "memory");
}

/* st.shared.u32 [addr], x; */
SMLA_DEV void smla_store_shared(uint32_t addr, uint32_t x)
{
    asm volatile("st.shared.u32 [%0], %1;" :: "r"(addr), "r"(x));
}

/* fence.proxy.async: generic writes before it are seen by wgmma and TMA after it. */
SMLA_DEV void smla_fence_async()
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/* bar.sync id, threads; */
SMLA_DEV void smla_bar_sync(int id, int threads)
{
    asm volatile("bar.sync %0, %1;" :: "r"(id), "r"(threads) : "memory");
}

/* bar.arrive id, threads; */
SMLA_DEV void smla_bar_arrive(int id, int threads)
{
    asm volatile("bar.arrive %0, %1;" :: "r"(id), "r"(threads) : "memory");
}

template <int kRegs> SMLA_DEV void smla_setmaxnreg_inc()
{
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(kRegs));
}

template <int kRegs> SMLA_DEV void smla_setmaxnreg_dec()
{
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(kRegs));
}

SMLA_DEV void smla_wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

SMLA_DEV void smla_wgmma_commit()
{
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int kPending> SMLA_DEV void smla_wgmma_wait()
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(kPending) : "memory");
}

/* cvt.rn.bf16x2.f32: two at once; a NaN becomes 0x7fff. */
SMLA_DEV uint32_t smla_cvt_bf16x2(float lo, float hi)
{
    uint32_t y;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(hi), "f"(lo));
    return y;
}

/* Keeps the compiler from moving accesses to an accumulator across wgmma's asynchrony. */
template <int kN> SMLA_DEV void smla_pin(float (&d)[kN])
{
    SMLA_UNROLL
    for (int i = 0; i < kN; ++i) asm volatile("" : "+f"(d[i]) :: "memory");
}

/* wgmma's descriptor of a K-major operand: address, 8-row pitch, swizzle; PTX ISA "matrix-descriptor".
   The next 32 bytes of k: + 2. */
SMLA_CONST int smla_kSwizzle128 = 1;
SMLA_CONST int smla_kSwizzle64 = 2;

SMLA_DEV uint64_t smla_wgmma_desc(uint32_t addr, uint32_t pitch8, uint32_t swizzle)
{
    return (uint64_t)((addr & 0x3ffffu) >> 4) | (uint64_t)1 << 16 | (uint64_t)(pitch8 >> 4) << 32
         | (uint64_t)swizzle << 62;
}

#define SMLA_ACC8(d, i) "+f"((d)[i]), "+f"((d)[i + 1]), "+f"((d)[i + 2]), "+f"((d)[i + 3]), \
    "+f"((d)[i + 4]), "+f"((d)[i + 5]), "+f"((d)[i + 6]), "+f"((d)[i + 7])
#define SMLA_ACC16(d, i) SMLA_ACC8(d, i), SMLA_ACC8(d, i + 8)
#define SMLA_ACC32(d) SMLA_ACC16(d, 0), SMLA_ACC16(d, 16)
#define SMLA_D8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define SMLA_D16 SMLA_D8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define SMLA_D32 SMLA_D16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, " \
    "%28, %29, %30, %31"

/* wgmma.mma_async.sync.aligned.m64n{kN}k32.f32.e4m3.e4m3 and k16.f32.bf16.bf16: d = a b (+ d if
   accumulate; BF16 always adds), a from shared memory or from registers; PTX ISA "wgmma.mma_async",
   8.0.  i0 to i5: the operands behind d. */
#define SMLA_WGMMA_FORMS(n, regs, d_list, acc, i0, i1, i2, i3, i4, i5) \
SMLA_DEV void smla_wgmma_k32_e4m3(float (&d)[regs], const uint32_t (&a)[4], uint64_t b, int accumulate) \
{ \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " i5 ", 0;\n" \
                 "wgmma.mma_async.sync.aligned.m64n" #n "k32.f32.e4m3.e4m3 {" d_list "}, " \
                 "{" i0 ", " i1 ", " i2 ", " i3 "}, " i4 ", p, 1, 1;\n}" \
                 : acc : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate)); \
} \
SMLA_DEV void smla_wgmma_k32_e4m3(float (&d)[regs], uint64_t a, uint64_t b, int accumulate) \
{ \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " i2 ", 0;\n" \
                 "wgmma.mma_async.sync.aligned.m64n" #n "k32.f32.e4m3.e4m3 {" d_list "}, " \
                 i0 ", " i1 ", p, 1, 1;\n}" : acc : "l"(a), "l"(b), "r"(accumulate)); \
} \
SMLA_DEV void smla_wgmma_k16_bf16(float (&d)[regs], uint64_t a, uint64_t b) \
{ \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 {" d_list "}, " \
                 i0 ", " i1 ", 1, 1, 1, 0, 0;" : acc : "l"(a), "l"(b)); \
}
SMLA_WGMMA_FORMS(64, 32, SMLA_D32, SMLA_ACC32(d), "%32", "%33", "%34", "%35", "%36", "%37")
SMLA_WGMMA_FORMS(32, 16, SMLA_D16, SMLA_ACC16(d, 0), "%16", "%17", "%18", "%19", "%20", "%21")
SMLA_WGMMA_FORMS(16, 8, SMLA_D8, SMLA_ACC8(d, 0), "%8", "%9", "%10", "%11", "%12", "%13")

/* ---- what all roles share ---- */

SMLA_DEV int32_t smla_split_blocks(const smla_split &s)
{
    return s.end > s.begin ? (int32_t)smla_ceil_div(s.end - s.begin, smla_kBlock) : 0;
}

/* The load warp walks over this CTA's splits and hands them to the others through a ring of two. */
template <typename Run> SMLA_DEV void smla_hopper_for_each_split(smla_hopper_smem &sm, Run run)
{
    for (uint32_t i = 0;; ++i) {
        const int entry = i & 1;
        smla_mbarrier_wait(smla_smem_addr(&sm.split_full[entry]), i >> 1 & 1);
        const smla_split &s = sm.split[entry];
        if (__reduce_min_sync(~0u, s.tile) < 0) break;
        run(s, i);
        __syncwarp();
        if ((threadIdx.x & 31) == 0) smla_mbarrier_arrive(smla_smem_addr(&sm.split_empty[entry]));
    }
}

/* A value that is the same in the whole warp, in a uniform register: wgmma's descriptors are made of
   it, and from other registers each of them costs two more instructions. */
SMLA_DEV int smla_uniform(int x) { return (int)__reduce_max_sync(~0u, (unsigned)x); }

/* Blocks of all splits of a CTA run through one ring; every role counts them for itself. */
struct smla_ring {
    uint32_t block;
    __device__ int stage() const { return smla_uniform(block % smla_kStages); }
    __device__ uint32_t parity() const { return block / smla_kStages & 1; }
};

SMLA_CONST int smla_kQueryRows = 32;                              /* of bf16 that fit into a stage */
SMLA_CONST int smla_kQueryBytes = (smla_kLatent + smla_kRope) * 2; /* a row */

/* Stages through which Q of split `index` of a CTA passes. */
SMLA_DEV int smla_query_stages(const smla_decode_params &p, const smla_split &s, uint32_t index)
{
    const bool through_ring = index > 0 && p.q != nullptr && s.end > s.begin;
    return through_ring ? (p.tile_rows + smla_kQueryRows - 1) / smla_kQueryRows : 0;
}

/* named barriers */
/* all: barriers are initialised, the first Q has been written */
SMLA_CONST int smla_kBarBegin = 1;
SMLA_CONST int smla_kBarQuery = 2; /* softmax: all are done with Q; it has been written */
SMLA_CONST int smla_kBarStore = 3; /* values: what the output's rows need is in stat */
SMLA_CONST int smla_kBarSums = 4;  /* weights: what the warps add to the rows' sums */

template <int kRows> struct smla_hopper_roles {
    static constexpr int kThreads = kRows == 64 ? 512 : 640;
    /* registers of a thread, by setmaxnreg; 2 * values + softmax + the rest = 512, with few rows and
       weights 480 */
    static constexpr int kValuesRegs = kRows == 64 ? 184 : kRows == 32 ? 128 : 112;
    static constexpr int kSoftmaxRegs = kRows == 64 ? 112 : 104; /* with few rows: scores */
    static constexpr int kWeightsRegs = kRows == 32 ? 80 : 88;
    static constexpr int kLoadRegs = kRows == 64 ? 32 : kRows == 32 ? 40 : 64;
    static constexpr int kStatWarps = kRows == 64 ? 4 : 1; /* of softmax that write stat */
    static constexpr int kSumWarps = kRows / 32 > 0 ? kRows / 32 : 1;
};

/* Over groups of 4 lanes: the threads of a row of wgmma's accumulator. */
SMLA_DEV float smla_row_max(float x)
{
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

SMLA_DEV float smla_row_sum(float x)
{
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

/* ---- load ---- */

/* One block into a stage: 4 column blocks of content, rope, scales. */
SMLA_DEV void smla_hopper_load_block(smla_hopper_smem &sm, const smla_decode_params &p,
                                     const smla_hopper_maps &maps, int stage, int32_t page,
                                     int32_t offset)
{
    const uint32_t bar = smla_smem_addr(&sm.full[stage]), to = smla_smem_addr(sm.stage[stage]);
    smla_mbarrier_arrive_expect_tx(bar, smla_kBlockBytes);
    SMLA_UNROLL
    for (int c = 0; c < 4; ++c)
        smla_tma_load_3d(to + c * smla_kColumn, &maps.content, 128 * c, offset, page, bar);
    smla_tma_load_3d(to + 4 * smla_kColumn, &maps.rope, 0, offset, page, bar);
    smla_bulk_load(smla_smem_addr(sm.block[stage].scale),
                   p.planes.scale + page * p.planes.scale_stride + offset, smla_kBlock * 4, bar);
}

/* The page of block `block` of a split, -1 if there is none. */
SMLA_DEV int32_t smla_hopper_page(const smla_decode_params &p, const smla_split &s, int32_t block,
                                  int32_t blocks)
{
    if (block >= blocks) return -1;
    const int32_t token = s.begin + block * smla_kBlock;
    return p.block_table[s.request * p.table_stride + (token >> p.planes.page_shift)];
}

/* Hands split i to the other roles; a negative tile says that there is none. */
SMLA_DEV void smla_hopper_announce(smla_hopper_smem &sm, uint32_t i, const smla_split &s)
{
    const int entry = i & 1;
    if ((threadIdx.x & 31) == 0) {
        smla_mbarrier_wait(smla_smem_addr(&sm.split_empty[entry]), (i >> 1 & 1) ^ 1);
        sm.split[entry] = s;
        smla_mbarrier_arrive(smla_smem_addr(&sm.split_full[entry]));
    }
    __syncwarp();
}

/* How far the load warp is with a split: `block` blocks are on their way. */
struct smla_hopper_pages {
    int32_t block;
    int32_t page, next_page; /* of the lane's block among 32, and among the 32 behind */
};

SMLA_DEV smla_hopper_pages smla_hopper_first_pages(const smla_decode_params &p, const smla_split &s)
{
    return {0, -1, smla_hopper_page(p, s, threadIdx.x & 31, smla_split_blocks(s))};
}

/* Blocks of a split up to `end`. */
SMLA_DEV void smla_hopper_load_blocks(smla_hopper_smem &sm, const smla_decode_params &p,
                                      const smla_hopper_maps &maps, const smla_split &s, int32_t end,
                                      smla_hopper_pages &pages, smla_ring &ring)
{
    const int lane = threadIdx.x & 31;
#pragma unroll 1
    for (int32_t i = pages.block; i < end; ++i, ++ring.block) {
        if ((i & 31) == 0) {
            pages.page = pages.next_page;
            pages.next_page = smla_hopper_page(p, s, i + 32 + lane, smla_split_blocks(s));
        }
        const int32_t page = __shfl_sync(~0u, pages.page, i & 31);
        const int stage = ring.stage();
        if (lane == 0) {
            const int32_t token = s.begin + i * smla_kBlock;
            smla_mbarrier_wait(smla_smem_addr(&sm.empty[stage]), ring.parity() ^ 1);
            sm.block[stage].valid = page < 0 ? 0 : smla_min(s.end - token, (int)smla_kBlock);
            if (page < 0)
                smla_mbarrier_arrive(smla_smem_addr(&sm.full[stage]));
            else
                smla_hopper_load_block(sm, p, maps, stage, page,
                                       token & ((1 << p.planes.page_shift) - 1));
        }
        __syncwarp();
    }
    pages.block = end;
}

/* Up to 32 rows of a split's Q, as they are, into a stage. */
SMLA_DEV void smla_hopper_load_query(smla_hopper_smem &sm, const smla_decode_params &p,
                                     const smla_split &s, int n, const smla_ring &ring)
{
    const int lane = threadIdx.x & 31, stage = ring.stage();
    const int32_t row = s.tile * p.tile_rows + smla_kQueryRows * n + lane;
    const int32_t end = smla_min(p.rows, (s.tile + 1) * p.tile_rows);
    const int32_t rows = smla_max(0, smla_min(end - (row - lane), (int32_t)smla_kQueryRows));
    const uint32_t bar = smla_smem_addr(&sm.full[stage]);
    smla_mbarrier_wait(smla_smem_addr(&sm.empty[stage]), ring.parity() ^ 1);
    if (lane == 0) smla_mbarrier_arrive_expect_tx(bar, rows * smla_kQueryBytes);
    __syncwarp();
    if (lane < rows)
        smla_bulk_load(smla_smem_addr(sm.stage[stage]) + lane * smla_kQueryBytes,
                       smla_q_row(p, s.request, row), smla_kQueryBytes, bar);
}

/* The cursor, or the next item where this member has no tile: that is in the last group of a request,
   so the next item is the first group of another. */
SMLA_DEV smla_cursor smla_hopper_skip(const smla_decode_params &p, const smla_cursor &c, int32_t member)
{
    if (p.policy.groups == 1) return c;
    const int64_t tile_group = c.item - smla_request_of(p.policy, c.item) * p.policy.groups;
    if (tile_group * p.group + member < p.tiles) return c;
    return {c.item + 1, 0};
}

/* This CTA's split at the cursor or behind it; a negative tile says that there is none. */
SMLA_DEV smla_split smla_hopper_split_from(const smla_decode_params &p, smla_cursor &c)
{
    c = smla_hopper_skip(p, c, smla_part_member(p));
    if (smla_at_end(p, c)) return {0, -1, 0, 0, 0, 0};
    return smla_split_at(p, c);
}

/* What the first split is found in, read at once instead of one after the other: the part and, where
   every request has a lane of the warp, all lengths. */
struct smla_hopper_work {
    smla_part part;
    int32_t index, member;
    int32_t seq_len; /* of request `lane` */
};

SMLA_DEV bool smla_hopper_few_requests(const smla_decode_params &p) { return p.policy.batch <= 32; }

SMLA_DEV smla_hopper_work smla_hopper_read_work(const smla_decode_params &p)
{
    const int lane = threadIdx.x & 31;
    smla_hopper_work work;
    work.index = smla_part_index(p);
    work.member = (int32_t)blockIdx.x - work.index * p.group;
    work.part = p.part[work.index];
    work.seq_len = smla_hopper_few_requests(p)
                 ? p.seq_lens[smla_min(lane, (int)p.policy.batch - 1)] : 0;
    return work;
}

SMLA_DEV smla_split smla_hopper_first_split(const smla_decode_params &p, const smla_hopper_work &work,
                                            smla_cursor &c)
{
    c = smla_hopper_skip(p, {work.part.first, work.part.begin}, work.member);
    if (c.item > work.part.last) return {0, -1, 0, 0, 0, 0};
    const int64_t request = smla_request_of(p.policy, c.item);
    const int32_t seq_len = smla_hopper_few_requests(p)
                          ? __shfl_sync(~0u, work.seq_len, (int)request) : p.seq_lens[request];
    return smla_split_of_part(p, work.part, work.index, work.member, c, seq_len);
}

/* The first split's first blocks are on their way already. */
SMLA_DEV void smla_hopper_load(smla_hopper_smem &sm, const smla_decode_params &p,
                               const smla_hopper_maps &maps, smla_split s, smla_cursor c,
                               smla_hopper_pages pages)
{
    smla_ring ring = {(uint32_t)pages.block};
    uint32_t splits = 0;
#pragma unroll 1
    while (s.tile >= 0) {
        smla_hopper_announce(sm, splits, s);
        const int query_stages = smla_query_stages(p, s, splits++);
#pragma unroll 1
        for (int n = 0; n < query_stages; ++n, ++ring.block) smla_hopper_load_query(sm, p, s, n, ring);
        smla_hopper_load_blocks(sm, p, maps, s, smla_split_blocks(s), pages, ring);
        smla_advance(p, c);
        s = smla_hopper_split_from(p, c);
        if (s.tile >= 0) pages = smla_hopper_first_pages(p, s);
    }
    smla_hopper_announce(sm, splits, s);
}

/* ---- prepare ---- */

/* Zeroes the V of tokens whose bit is set; QK may read them meanwhile, their scores are not used. */
SMLA_DEV void smla_hopper_clear_v(uint8_t *stage, uint32_t even, uint32_t odd)
{
    const int lane = threadIdx.x & 31;
    for (uint32_t any = even | odd; any != 0; any &= any - 1) {
        const int i = __ffs(any) - 1;
        uint8_t *chunk = stage + (lane >> 3) * smla_kColumn + 2 * i * 128 + (lane & 7) * 16;
        if (even >> i & 1) *reinterpret_cast<uint4 *>(chunk) = make_uint4(0, 0, 0, 0);
        if (odd >> i & 1) *reinterpret_cast<uint4 *>(chunk + 128) = make_uint4(0, 0, 0, 0);
    }
    smla_fence_async(); /* before TMA writes here again */
}

SMLA_DEV float smla_inverse_scale(float k_s)
{
    const float y = __fdividef(1.0f, k_s); /* P rounds to 0 where this is 0 instead of Inf */
    return smla_is_finite(y) ? y : 0.0f;
}

SMLA_DEV void smla_hopper_prepare(smla_hopper_smem &sm, const smla_decode_params &p)
{
    const int lane = threadIdx.x & 31;
    /* where tokens 2 * lane, + 1 lie in a row of P: see smla_hopper_weights */
    const int place = (lane & ~7) * 2 + (lane & 3) * 4 + (lane & 4) / 2;
    smla_ring ring = {0};
    smla_hopper_for_each_split(sm, [&](const smla_split &s, uint32_t index) {
        for (int n = smla_query_stages(p, s, index); n > 0; --n, ++ring.block) { /* nothing to do */
            const int stage = ring.stage();
            smla_mbarrier_wait(smla_smem_addr(&sm.full[stage]), ring.parity());
            __syncwarp(); /* no lane may miss the phase */
            if (lane == 0) smla_mbarrier_arrive(smla_smem_addr(&sm.ready[stage]));
        }
        const int32_t blocks = smla_split_blocks(s);
        for (int32_t i = 0; i < blocks; ++i, ++ring.block) {
            const int stage = ring.stage();
            smla_mbarrier_wait(smla_smem_addr(&sm.full[stage]), ring.parity());
            const int32_t valid = sm.block[stage].valid;
            float2 k = *reinterpret_cast<const float2 *>(&sm.block[stage].scale[2 * lane]);
            const bool exists[2] = {2 * lane < valid, 2 * lane + 1 < valid};
            const bool good[2] = {exists[0] && smla_is_finite(k.x), exists[1] && smla_is_finite(k.y)};
            k = make_float2(good[0] ? fmaxf(k.x, smla_kScaleFloor) : 0.0f,
                            good[1] ? fmaxf(k.y, smla_kScaleFloor) : 0.0f);
            sm.block[stage].k_s[lane] = k;
            sm.block[stage].log2_k_s[lane] =
                make_float2(fmaxf(smla_lg2(k.x), smla_kLog2ScaleFloor),
                            fmaxf(smla_lg2(k.y), smla_kLog2ScaleFloor));
            *reinterpret_cast<float2 *>(&sm.block[stage].inverse_k_s[place]) =
                make_float2(smla_inverse_scale(k.x), smla_inverse_scale(k.y));
            const uint32_t bad_even = __ballot_sync(~0u, exists[0] && !good[0]);
            const uint32_t bad_odd = __ballot_sync(~0u, exists[1] && !good[1]);
            const uint32_t clear_even = __ballot_sync(~0u, !good[0]);
            const uint32_t clear_odd = __ballot_sync(~0u, !good[1]);
            if (clear_even | clear_odd) smla_hopper_clear_v(sm.stage[stage], clear_even, clear_odd);
            const int32_t seen_by_all = s.len - (p.causal ? p.s_q - 1 : 0);
            const bool mask = valid < smla_kBlock || (bad_even | bad_odd) != 0
                           || s.begin + (i + 1) * smla_kBlock > seen_by_all;
            if (lane == 0) sm.block[stage].info = {mask, valid, bad_even, bad_odd};
            if (lane == 0) sm.block[stage].token0 = s.begin + i * smla_kBlock;
            __syncwarp();
            if (lane == 0) smla_mbarrier_arrive(smla_smem_addr(&sm.ready[stage]));
        }
    });
}

/* ---- sum ---- */

/* values, sum: waits until softmax is done with the stages of Q, which are not for this warp. */
SMLA_DEV void smla_hopper_pass_query(smla_hopper_smem &sm, const smla_decode_params &p,
                                     const smla_split &s, uint32_t index, smla_ring &ring)
{
    for (int n = smla_query_stages(p, s, index); n > 0; --n, ++ring.block) {
        const int stage = ring.stage();
        smla_mbarrier_wait(smla_smem_addr(&sm.weights[stage]), ring.parity());
        __syncwarp(); /* no lane may miss the phase */
        if ((threadIdx.x & 31) == 0) smla_mbarrier_arrive(smla_smem_addr(&sm.empty[stage]));
    }
}

SMLA_DEV float smla_block_scale(const smla_hopper_block &block, int row)
{
    const uint32_t word = block.block_scale[row >> 1 & 3][row >> 3];
    return __uint_as_float(row & 1 ? word & 0xffff0000u : word << 16);
}

/* Four e4m3 codes with those that are subnormal or 0 replaced by 0. */
SMLA_DEV uint32_t smla_keep_normal(uint32_t codes)
{
    const uint32_t normal = ((codes & 0x78787878u) + 0x78787878u) >> 7 & 0x01010101u;
    return codes & normal * 255u;
}

/* sum + the four weights, where they are normal numbers, times 1 / k_s */
SMLA_DEV float smla_sum_4(uint32_t codes, float4 inverse, float sum)
{
    codes = smla_keep_normal(codes);
    const float2 lo = smla_f32x2_from_f16x2(smla_f16x2_from_e4m3x2(codes & 0xffffu));
    const float2 hi = smla_f32x2_from_f16x2(smla_f16x2_from_e4m3x2(codes >> 16));
    sum = fmaf(lo.y, inverse.y, fmaf(lo.x, inverse.x, sum));
    return fmaf(hi.y, inverse.w, fmaf(hi.x, inverse.z, sum));
}

/* Adds the part of lq that P holds: lane = half of the tokens (lane % 2) of rows lane / 2 + 16i. */
template <int kRowsOfLane>
SMLA_DEV void smla_hopper_sum_block(const smla_hopper_smem &sm, int stage, int row0,
                                    float (&lq)[kRowsOfLane])
{
    const int lane = threadIdx.x & 31, r = row0 + (lane >> 1);
    const uint32_t moved = sm.block[stage].moved;
    if (moved != 0) {
        SMLA_UNROLL
        for (int i = 0; i < kRowsOfLane; ++i) {
            const int row = r + 16 * i;
            lq[i] *= moved >> (row >> 4) * 8 & 0xffu ? sm.block[stage].alpha[row] : 1.0f;
        }
    }
    float part[kRowsOfLane] = {};
#pragma unroll 1
    for (int chunk = 2 * (lane & 1), end = chunk + 2; chunk < end; ++chunk) { /* of 16 tokens */
        const float4 *inverse = reinterpret_cast<const float4 *>(&sm.block[stage].inverse_k_s[16 * chunk]);
        SMLA_UNROLL
        for (int i = 0; i < kRowsOfLane; ++i) {
            const int row = r + 16 * i;
            const uint4 v = *reinterpret_cast<const uint4 *>(
                sm.block[stage].weight + row * smla_kBlock + 16 * (chunk ^ (row >> 1 & 3)));
            part[i] = smla_sum_4(v.x, inverse[0], part[i]);
            part[i] = smla_sum_4(v.y, inverse[1], part[i]);
            part[i] = smla_sum_4(v.z, inverse[2], part[i]);
            part[i] = smla_sum_4(v.w, inverse[3], part[i]);
        }
    }
    SMLA_UNROLL
    for (int i = 0; i < kRowsOfLane; ++i)
        lq[i] = fmaf(part[i], smla_block_scale(sm.block[stage], r + 16 * i), lq[i]);
}

template <int kRows, bool kPrecise>
SMLA_DEV void smla_hopper_sum(smla_hopper_smem &sm, const smla_decode_params &p, int warp)
{
    constexpr int kRowsOfLane = kRows < 32 ? 1 : 2;
    const int lane = threadIdx.x & 31, row0 = warp * 32;
    smla_ring ring = {0};
    smla_hopper_for_each_split(sm, [&](const smla_split &s, uint32_t index) {
        smla_hopper_pass_query(sm, p, s, index, ring);
        float lq[kRowsOfLane] = {};
#pragma unroll 1
        for (const uint32_t end = ring.block + smla_split_blocks(s); ring.block != end; ++ring.block) {
            const int stage = ring.stage();
            smla_mbarrier_wait(smla_smem_addr(&sm.weights[stage]), ring.parity());
            if (!kPrecise) smla_hopper_sum_block<kRowsOfLane>(sm, stage, row0, lq);
            __syncwarp();
            if (lane == 0) smla_mbarrier_arrive(smla_smem_addr(&sm.empty[stage]));
        }
        SMLA_UNROLL
        for (int i = 0; i < kRowsOfLane; ++i) {
            const float sum = lq[i] + __shfl_xor_sync(~0u, lq[i], 1);
            if ((lane & 1) == 0) sm.stat[index & 1][row0 + 16 * i + (lane >> 1)].w = sum;
        }
        __syncwarp();
        if (lane == 0) smla_mbarrier_arrive(smla_smem_addr(&sm.stat_full[index & 1]));
    });
}

/* ---- queries ---- */

/* cvt.rn.satfinite.e4m3x2.f32, twice, packed at once: the halves must not wait in registers. */
SMLA_DEV uint32_t smla_e4m3x4_from_f32(const float (&x)[4])
{
    uint32_t y;
    asm("{\n.reg .b16 lo, hi;\ncvt.rn.satfinite.e4m3x2.f32 lo, %2, %1;\n"
                 "cvt.rn.satfinite.e4m3x2.f32 hi, %4, %3;\nmov.b32 %0, {lo, hi};\n}"
                 : "=r"(y) : "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]));
    return y;
}

/* e4m3 of what `codes` leave of x. */
SMLA_DEV uint32_t smla_e4m3x4_of_rest(const float (&x)[4], uint32_t codes)
{
    const float2 lo = smla_f32x2_from_f16x2(smla_f16x2_from_e4m3x2(codes & 0xffffu));
    const float2 hi = smla_f32x2_from_f16x2(smla_f16x2_from_e4m3x2(codes >> 16));
    const float rest[4] = {x[0] - lo.x, x[1] - lo.y, x[2] - hi.x, x[3] - hi.y};
    return smla_e4m3x4_from_f32(rest);
}

/* A row of Q: content as 4 column blocks, swizzled like TMA's. */
SMLA_DEV void smla_hopper_store_q(smla_hopper_smem &sm, const smla_decode_params &p, int r,
                                  const smla_quantised_row &y)
{
    const int lane = threadIdx.x & 31;
    const uint32_t nan = y.scale == y.scale ? 0 : 0x7f7f7f7fu; /* says so in every score */
    SMLA_UNROLL
    for (int i = 0; i < 2; ++i) { /* bytes 256 i + 8 lane .. + 7 */
        const int column = 2 * i + (lane >> 4), chunk = lane >> 1 & 7;
        *reinterpret_cast<uint2 *>(sm.q_content + column * smla_kColumn + r * 128
                                   + ((chunk ^ (r & 7)) << 4) + 8 * (lane & 1)) =
            make_uint2(y.content[i].x | nan, y.content[i].y | nan);
    }
    *reinterpret_cast<uint32_t *>(sm.q_rope + r * 128 + ((lane >> 2 ^ (r & 7)) << 4)
                                  + 4 * (lane & 3)) = y.rope;
    if (lane == 0) sm.factor[r] = p.scale_log2e * y.scale;
}

/* Row `row` of a request's bf16 Q. */
SMLA_DEV smla_row smla_hopper_raw_q(const smla_decode_params &p, int64_t request, int32_t row)
{
    const uint16_t *q = smla_q_row(p, request, row);
    return smla_load_row(q, q + smla_kLatent, true);
}

/* The precise mode's Q: the scale is a power of two that leaves 2^7 to 2^8 for the largest latent dim, and
   a bf16 of 8 bits is the sum of two e4m3 of 4 bits: exactly down to 2^-9 of the largest, and below that
   to 2^-17 of the largest. */
SMLA_DEV void smla_hopper_two_of_row(const smla_row &row, smla_quantised_row *hi, smla_quantised_row *lo)
{
    const uint32_t amax = smla_amax_bits(row);
    const uint32_t exponent = smla_max(amax >> 7, smla_kLeastExponent);
    const float inverse = __uint_as_float((127u + 127u + 7u - exponent) << 23);
    SMLA_UNROLL
    for (int i = 0; i < 2; ++i) {
        const uint32_t w[4] = {row.latent[i].x, row.latent[i].y, row.latent[i].z, row.latent[i].w};
        uint32_t codes[2][2];
        SMLA_UNROLL
        for (int j = 0; j < 2; ++j) {
            const float x[4] = {smla_mul_rn(smla_bf16_lo(w[2 * j]), inverse),
                                smla_mul_rn(smla_bf16_hi(w[2 * j]), inverse),
                                smla_mul_rn(smla_bf16_lo(w[2 * j + 1]), inverse),
                                smla_mul_rn(smla_bf16_hi(w[2 * j + 1]), inverse)};
            codes[0][j] = smla_e4m3x4_from_f32(x);
            codes[1][j] = smla_e4m3x4_of_rest(x, codes[0][j]);
        }
        hi->content[i] = make_uint2(codes[0][0], codes[0][1]);
        lo->content[i] = make_uint2(codes[1][0], codes[1][1]);
    }
    hi->rope = smla_bf16x2_rn(smla_mul_rn(smla_bf16_lo(row.rope), inverse),
                              smla_mul_rn(smla_bf16_hi(row.rope), inverse));
    lo->rope = 0;
    hi->scale = lo->scale = __uint_as_float(amax >= 0x7f80u ? smla_kNanF32 : (exponent - 7u) << 23);
}

/* A row of bf16 Q; in the precise mode what its e4m3 leaves goes to row kPreciseRows behind it. */
SMLA_CONST int smla_kPreciseRows = 16;

template <bool kPrecise>
SMLA_DEV void smla_hopper_put_q(smla_hopper_smem &sm, const smla_decode_params &p, int r,
                                const smla_row &row)
{
    if (!kPrecise) {
        smla_hopper_store_q(sm, p, r, smla_quantise_row(row));
        return;
    }
    smla_quantised_row hi, lo;
    smla_hopper_two_of_row(row, &hi, &lo);
    smla_hopper_store_q(sm, p, r, hi);
    smla_hopper_store_q(sm, p, r + smla_kPreciseRows, lo);
}

/* A row that is quantised, or all zeros. */
template <bool kPrecise>
SMLA_DEV void smla_hopper_put_q(smla_hopper_smem &sm, const smla_decode_params &p, int r,
                                const smla_quantised_row &row)
{
    smla_hopper_store_q(sm, p, r, row);
    if (kPrecise) smla_hopper_store_q(sm, p, r + smla_kPreciseRows, {});
}

/* Q of a split to shared memory by `warps` warps, three rows of bf16 ahead.  Rows that do not exist
   become 0: their scores stay finite. */
template <int kRows, bool kPrecise>
SMLA_DEV void smla_hopper_load_q(smla_hopper_smem &sm, const smla_decode_params &p,
                                 const smla_split &s, int warp, int warps)
{
    const int32_t row0 = s.tile * kRows;
    const int32_t rows = smla_min(p.rows - row0, (int32_t)kRows), last = row0 + rows - 1;
    int r = warp;
    if (p.q == nullptr) {
#pragma unroll 1
        for (; r < rows; r += warps)
            smla_hopper_put_q<kPrecise>(sm, p, r, smla_load_q_row(p, s.request, row0 + r));
    } else if (r < rows) {
        smla_row ahead[3];
        SMLA_UNROLL
        for (int i = 0; i < 3; ++i)
            ahead[i] = smla_hopper_raw_q(p, s.request, smla_min(row0 + r + i * warps, last));
#pragma unroll 1
        for (; r < rows; r += warps) {
            const smla_row raw = ahead[0];
            ahead[0] = ahead[1];
            ahead[1] = ahead[2];
            if (r + 3 * warps < rows) ahead[2] = smla_hopper_raw_q(p, s.request, row0 + r + 3 * warps);
            smla_hopper_put_q<kPrecise>(sm, p, r, raw);
        }
    }
    for (; r < kRows; r += warps) smla_hopper_put_q<kPrecise>(sm, p, r, smla_quantised_row{});
    smla_fence_async();
}

/* ---- softmax ---- */

/* Rows g and g + 8 of a warp's 16.  ref is alike in the 4 threads of a row, the sums are of a thread's
   own tokens.  What of lq is too small for P is in shared memory. */
struct smla_hopper_rows {
    float ref[2], l[2];
};

SMLA_DEV int smla_hopper_tile_row(int t) { return (t >> 5) * 16 + (t >> 2 & 7); }

SMLA_DEV smla_hopper_rows smla_hopper_begin_rows(smla_hopper_smem &sm, const smla_decode_params &p,
                                                 const smla_split &s, int t)
{
    SMLA_UNROLL
    for (int h = 0; h < 2; ++h) {
        const int r = smla_hopper_tile_row(t) + 8 * h;
        const int32_t row = s.tile * p.tile_rows + r;
        const bool real = r < p.tile_rows && row < p.rows;
        if ((t & 3) == 0) {
            sm.limit[r] = smla_row_limit(p, row, s.len);
            /* above 0 and no NaN, so that -inf stays -inf; where q_s is NaN, content is, too */
            if (!real || !(sm.factor[r] >= smla_kFactorFloor)) sm.factor[r] = smla_kFactorFloor;
        }
    }
    sm.flushed[t] = make_float2(0.0f, 0.0f);
    __syncwarp();
    return {{smla_neg_inf(), smla_neg_inf()}, {0.0f, 0.0f}};
}

/* Q K^T over 32 * kSteps of the latent dims, the part-th, into a fresh accumulator of 64 rows x 64 tokens,
   or, with few rows, K Q^T of 64 tokens x rows.  After the last part comes rope, in BF16, which must
   follow FP8 on an accumulator. */
template <int kSteps, int kRegs>
SMLA_DEV void smla_hopper_scores(const smla_hopper_smem &sm, int stage, int part, float (&d)[kRegs])
{
    const uint32_t column = part * kSteps / 4 * smla_kColumn, step = part * kSteps % 4;
    const uint64_t q = smla_wgmma_desc(smla_smem_addr(sm.q_content) + column, 1024, smla_kSwizzle128);
    const uint64_t k = smla_wgmma_desc(smla_smem_addr(sm.stage[stage]) + column, 1024,
                                       smla_kSwizzle128);
    const uint64_t a = kRegs == 32 ? q : k, b = kRegs == 32 ? k : q;
    smla_pin(d);
    smla_wgmma_fence();
    SMLA_UNROLL
    for (int i = 0; i < kSteps; ++i)
        smla_wgmma_k32_e4m3(d, a + 2 * (step + i), b + 2 * (step + i), i != 0);
    if ((part + 1) * kSteps == 16) { /* rope lies behind the content, of Q and in the stage alike */
        const uint64_t behind = smla_kColumn >> 4;
        SMLA_UNROLL
        for (int i = 0; i < 4; ++i) smla_wgmma_k16_bf16(d, a + behind + 2 * i, b + behind + 2 * i);
    }
    smla_wgmma_commit();
}

/* Waits until d is finished and adds it to x. */
SMLA_DEV void smla_hopper_add_scores(float (&d)[32], float (&x)[32])
{
    smla_wgmma_wait<0>();
    smla_pin(d);
    SMLA_UNROLL
    for (int i = 0; i < 32; ++i) x[i] += d[i];
}

/* -inf where a row does not see the token, NaN where the token's scale is NaN or Inf. */
SMLA_DEV void smla_hopper_mask(const smla_hopper_smem &sm, int stage, int t, float (&x)[32])
{
    const int q = t & 3, tile_row = smla_hopper_tile_row(t);
    const smla_block_info info = sm.block[stage].info;
    const uint32_t even = info.bad_even >> q, odd = info.bad_odd >> q;
    const int32_t token0 = sm.block[stage].token0;
    const int32_t limit[2] = {sm.limit[tile_row] - token0, sm.limit[tile_row + 8] - token0};
    SMLA_UNROLL
    for (int j = 0; j < 8; ++j) {
        SMLA_UNROLL
        for (int i = 0; i < 4; ++i) {
            const int token = 8 * j + 2 * q + (i & 1), h = i >> 1;
            const bool bad = ((i & 1) ? odd : even) >> 4 * j & 1;
            const bool seen = token < smla_min(info.valid, limit[h]);
            x[4 * j + i] = !seen ? smla_neg_inf()
                         : bad   ? __uint_as_float(smla_kNanF32) : x[4 * j + i];
        }
    }
}

/* Scores of a block to logits without the row's factor. */
SMLA_DEV void smla_hopper_weigh(const float2 (&k)[8], const float (&y)[32], float (&x)[32])
{
    SMLA_UNROLL
    for (int j = 0; j < 8; ++j) {
        SMLA_UNROLL
        for (int i = 4 * j; i < 4 * j + 4; i += 2) {
            x[i] = (x[i] + y[i]) * k[j].x;
            x[i + 1] = (x[i + 1] + y[i + 1]) * k[j].y;
        }
    }
}

/* The largest y = logit + log2 k_s of the thread's two rows in this block. */
SMLA_DEV void smla_hopper_top(const float2 (&log2_k)[8], const float (&factor)[2],
                              const float (&x)[32], float (&top)[2])
{
    float even[2] = {smla_neg_inf(), smla_neg_inf()}, odd[2] = {smla_neg_inf(), smla_neg_inf()};
    SMLA_UNROLL
    for (int j = 0; j < 8; ++j) {
        SMLA_UNROLL
        for (int h = 0; h < 2; ++h) {
            even[h] = fmaxf(even[h], fmaf(x[4 * j + 2 * h], factor[h], log2_k[j].x));
            odd[h] = fmaxf(odd[h], fmaf(x[4 * j + 2 * h + 1], factor[h], log2_k[j].y));
        }
    }
    SMLA_UNROLL
    for (int h = 0; h < 2; ++h) top[h] = smla_row_max(fmaxf(even[h], odd[h]));
}

/* The first keys of a row, or keys far above all before: ref moves to them.  Rare, uniform in a warp. */
SMLA_DEV bool smla_hopper_move(smla_hopper_smem &sm, int stage, int t, const float (&top)[2],
                               smla_hopper_rows &rows)
{
    const bool up[2] = {top[0] > rows.ref[0] + smla_kRefSlack, top[1] > rows.ref[1] + smla_kRefSlack};
    if (!__any_sync(~0u, up[0] || up[1])) return false;
    SMLA_UNROLL
    for (int h = 0; h < 2; ++h) {
        const float alpha = up[h] ? smla_ex2(rows.ref[h] - top[h]) : 1.0f;
        if (up[h]) rows.ref[h] = top[h];
        rows.l[h] *= alpha;
        (h == 0 ? sm.flushed[t].x : sm.flushed[t].y) *= alpha;
        if ((t & 3) == 0) sm.block[stage].alpha[smla_hopper_tile_row(t) + 8 * h] = alpha;
    }
    return true;
}

/* Sums over tokens are alike, bit for bit, in all tiles: 4 of 16 tokens, then the 16s in their order. */
SMLA_DEV float smla_sum_of_4(const float (&x)[4]) { return (x[0] + x[2]) + (x[1] + x[3]); }

/* Where a thread's first word of P lies. */
SMLA_DEV int smla_hopper_place(int t)
{
    const int tile_row = smla_hopper_tile_row(t);
    return tile_row * smla_kBlock + ((tile_row >> 1 & 3) << 4) + 4 * (t & 3);
}

/* Weights of this thread's tokens, rounded, to P: x becomes 2^(logit + shift), and so x k_s is a token's
   weight on its FP8 content.  Four tokens of 16 become one word: the order in which ldmatrix.trans
   delivers V.  Adds x to l; false if some weight is not a normal number of e4m3. */
SMLA_DEV bool smla_hopper_weights(const float2 (&k)[8], uint32_t to, const float (&factor)[2],
                                  const float (&shift)[2], float (&x)[32], float (&l)[2])
{
    uint32_t normal = 0x80808080u;
    SMLA_UNROLL
    for (int jj = 0; jj < 4; ++jj) {
        SMLA_UNROLL
        for (int h = 0; h < 2; ++h) {
            float w[4], e[4];
            SMLA_UNROLL
            for (int i = 0; i < 4; ++i) { /* tokens 16jj + 2q, + 1, + 8, + 9 */
                float &score = x[8 * jj + 4 * (i >> 1) + 2 * h + (i & 1)];
                e[i] = score = smla_ex2(fmaf(score, factor[h], shift[h]));
                w[i] = e[i] * (i & 1 ? k[2 * jj + (i >> 1)].y : k[2 * jj + (i >> 1)].x);
            }
            l[h] += smla_sum_of_4(e);
            const uint32_t codes = smla_e4m3x4_from_f32(w);
            smla_store_shared((to ^ jj << 4) + 8 * h * smla_kBlock, codes);
            normal &= (codes & 0x78787878u) + 0x78787878u; /* bit 7 of a byte: not 0, not subnormal */
        }
    }
    return normal == 0x80808080u;
}

/* Counts the tokens whose weight e4m3 flushes, or nearly so, unrounded in the denominator. */
SMLA_DEV void smla_hopper_flushed(smla_hopper_smem &sm, int t, const float2 (&k)[8],
                                  const float (&scale)[2], const float (&x)[32])
{
    float flushed[2] = {0.0f, 0.0f};
    SMLA_UNROLL
    for (int jj = 0; jj < 4; ++jj) {
        SMLA_UNROLL
        for (int h = 0; h < 2; ++h) {
            float part[4];
            SMLA_UNROLL
            for (int i = 0; i < 4; ++i) {
                const float e = x[8 * jj + 4 * (i >> 1) + 2 * h + (i & 1)];
                const float k_s = i & 1 ? k[2 * jj + (i >> 1)].y : k[2 * jj + (i >> 1)].x;
                part[i] = e * k_s < smla_kFlushed ? e : 0.0f;
            }
            flushed[h] += smla_sum_of_4(part);
        }
    }
    const float2 sum = sm.flushed[t];
    sm.flushed[t] = make_float2(fmaf(flushed[0], scale[0], sum.x), fmaf(flushed[1], scale[1], sum.y));
}

/* Scores of a block: x + y.  The FP8 tensor core keeps 13 fraction bits of a sum, and what it truncates
   grows with the sum: four accumulators of 128 dims, added in f32, keep logits of deviation 1 to 1.2e-4
   rms, 1.1e-3 at most. */
SMLA_DEV void smla_hopper_block_scores(const smla_hopper_smem &sm, int stage, float (&x)[32],
                                       float (&y)[32])
{
    smla_hopper_scores<4>(sm, stage, 0, x);
    smla_hopper_scores<4>(sm, stage, 1, y);
    smla_wgmma_wait<1>();
    smla_pin(x);
    smla_hopper_add_scores(y, x);
    smla_hopper_scores<4>(sm, stage, 2, y);
    smla_hopper_add_scores(y, x);
    smla_hopper_scores<4>(sm, stage, 3, y);
}

/* One block: from scores to weights in shared memory. */
SMLA_DEV void smla_hopper_softmax_block(smla_hopper_smem &sm, int stage, uint32_t parity, int t,
                                        smla_hopper_rows &rows)
{
    const int q = t & 3, tile_row = smla_hopper_tile_row(t);
    smla_hopper_block &block = sm.block[stage];
    float x[32], y[32];
    smla_mbarrier_wait(smla_smem_addr(&sm.full[stage]), parity);
    smla_hopper_block_scores(sm, stage, x, y);
    smla_mbarrier_wait(smla_smem_addr(&sm.ready[stage]), parity);
    const float factor[2] = {sm.factor[tile_row], sm.factor[tile_row + 8]};
    const int32_t mask = block.info.mask;
    float2 k[8], log2_k[8]; /* of tokens 8j + 2q, + 1 */
    SMLA_UNROLL
    for (int j = 0; j < 8; ++j) {
        k[j] = block.k_s[4 * j + q];
        log2_k[j] = block.log2_k_s[4 * j + q];
    }
    smla_wgmma_wait<0>();
    smla_pin(y);
    smla_hopper_weigh(k, y, x);
    if (mask) smla_hopper_mask(sm, stage, t, x);
    float top[2], shift[2], scale[2], l[2] = {0.0f, 0.0f};
    smla_hopper_top(log2_k, factor, x, top);
    const bool moved = smla_hopper_move(sm, stage, t, top, rows);
    SMLA_UNROLL
    for (int h = 0; h < 2; ++h) {
        const bool none = top[h] == smla_neg_inf(); /* the row sees nothing of this block */
        shift[h] = none ? 0.0f : smla_kLog2E4m3Max - top[h];
        scale[h] = none ? 0.0f : smla_ex2(top[h] - smla_kLog2E4m3Max - rows.ref[h]);
    }
    const uint32_t rounded = smla_cvt_bf16x2(scale[0], scale[1]);
    if (q == 0) { /* rows 2n, 2n + 1 share a word, row + 8 has the next */
        uint16_t *to = reinterpret_cast<uint16_t *>(
            &block.block_scale[tile_row >> 1 & 3][tile_row >> 3]);
        to[tile_row & 1] = (uint16_t)rounded;
        to[2 + (tile_row & 1)] = (uint16_t)(rounded >> 16);
    }
    if ((t & 31) == 0) reinterpret_cast<uint8_t *>(&block.moved)[t >> 5] = moved;
    uint32_t to = smla_smem_addr(block.weight) + smla_hopper_place(t);
    asm volatile("" : "+r"(to)); /* four addresses from one register, not from four */
    const bool normal = smla_hopper_weights(k, to, factor, shift, x, l);
    smla_fence_async();
    __syncwarp();
    if ((t & 31) == 0) smla_mbarrier_arrive(smla_smem_addr(&sm.weights[stage]));
    SMLA_UNROLL
    for (int h = 0; h < 2; ++h) rows.l[h] = fmaf(l[h], scale[h], rows.l[h]);
    if (!normal) smla_hopper_flushed(sm, t, k, scale, x);
}

/* Q of a split but the first, out of the ring, or from global memory if it is quantised already. */
template <int kRows, bool kPrecise>
SMLA_DEV void smla_hopper_next_q(smla_hopper_smem &sm, const smla_decode_params &p,
                                 const smla_split &s, uint32_t index, int warp, smla_ring &ring)
{
    const smla_ring begin = ring;
    const int32_t rows = smla_min(p.rows - s.tile * kRows, (int32_t)kRows);
    const int query_stages = smla_query_stages(p, s, index);
    smla_bar_sync(smla_kBarQuery, 128); /* nobody needs the last Q any more */
    if (query_stages == 0) smla_hopper_load_q<kRows, kPrecise>(sm, p, s, warp, 4);
    for (int n = 0; n < query_stages; ++n, ++ring.block) {
        const int stage = ring.stage();
        smla_mbarrier_wait(smla_smem_addr(&sm.ready[stage]), ring.parity());
#pragma unroll 1
        for (int i = warp; i < smla_min((int)smla_kQueryRows, kRows); i += 4) {
            const uint16_t *raw = reinterpret_cast<const uint16_t *>(
                sm.stage[stage] + i * smla_kQueryBytes);
            const int r = smla_kQueryRows * n + i;
            if (r >= rows) smla_hopper_put_q<kPrecise>(sm, p, r, smla_quantised_row{});
            else smla_hopper_put_q<kPrecise>(sm, p, r, smla_load_row(raw, raw + smla_kLatent, true));
        }
    }
    smla_fence_async();
    smla_bar_sync(smla_kBarQuery, 128);
    if ((threadIdx.x & 31) != 0) return;
    for (smla_ring done = begin; done.block != ring.block; ++done.block)
        smla_mbarrier_arrive(smla_smem_addr(&sm.weights[done.block % smla_kStages]));
}

/* Softmax of 64 rows. */
SMLA_DEV void smla_hopper_softmax(smla_hopper_smem &sm, const smla_decode_params &p)
{
    int t = threadIdx.x & 127;
    asm volatile("" : "+r"(t)); /* hidden, so that it is kept instead of being read again */
    const int lane = t & 31, warp = t >> 5, tile_row = smla_hopper_tile_row(t);
    smla_ring ring = {0};
    smla_hopper_for_each_split(sm, [&](const smla_split &s, uint32_t index) {
        if (index > 0 && s.end > s.begin) smla_hopper_next_q<64, false>(sm, p, s, index, warp, ring);
        smla_hopper_rows rows = smla_hopper_begin_rows(sm, p, s, t);
        const uint32_t end = ring.block + smla_split_blocks(s);
#pragma unroll 1
        for (; ring.block != end; ++ring.block)
            smla_hopper_softmax_block(sm, ring.stage(), ring.parity(), t, rows);
        SMLA_UNROLL
        for (int h = 0; h < 2; ++h) {
            const float l = smla_row_sum(rows.l[h]);
            const float flushed = smla_row_sum(h == 0 ? sm.flushed[t].x : sm.flushed[t].y);
            if ((lane & 3) != 0) continue;
            float4 &stat = sm.stat[index & 1][tile_row + 8 * h]; /* .w is sum's */
            stat.x = l == 0.0f ? smla_neg_inf() : rows.ref[h];
            stat.y = l;
            stat.z = flushed;
        }
        __syncwarp();
        if (lane == 0) smla_mbarrier_arrive(smla_smem_addr(&sm.stat_full[index & 1]));
    });
}

/* ---- softmax of 16 and 32 rows: scores and weights ----

   Scores are computed transposed, S^T[64 tokens x rows] = K Q^T: the tensor core works on no row that
   does not exist, and four warps share a block.  One warpgroup, scores, hands logits to another, weights,
   which is a block behind.  Thread (g, q) of warp w of either has the tokens 16w + g and + 8 of the block
   and the rows 8j + 2q, + 1, which are its rows n = 2j, 2j + 1.  A row's largest y comes with the logits;
   the sums of its weights go to the warps of `weights` a block later, where one thread adds up a quarter
   of a row: row n = g of its own, and of each 16 tokens 2w, + 1, + 8, + 9, as a thread of the form of 64
   rows does.  So a row's bits do not depend on the tile that it is in. */

/* Logits lie in the space of Q's rows 32 to 63, which do not exist: 4 KB of a column block are half a
   buffer.  float4 n of thread t is [t] of what is returned. */
SMLA_DEV float4 *smla_hopper_logits(smla_hopper_smem &sm, int buffer, int n)
{
    uint8_t *column = sm.q_content + (2 * buffer + (n >> 1)) * smla_kColumn + smla_kFewRows * 128;
    return reinterpret_cast<float4 *>(column) + (n & 1) * 128;
}

struct smla_hopper_tops { float of[smla_kFewRows][4]; }; /* [row][warp] */

SMLA_DEV smla_hopper_tops &smla_hopper_tops_of(smla_hopper_smem &sm, int buffer)
{
    return reinterpret_cast<smla_hopper_tops *>(sm.q_rope + smla_kFewRows * 128)[buffer];
}

/* What warp w adds to the sums l and flushed, in the space of P's rows 32 to 63 of two stages. */
struct smla_hopper_sums { float2 of[4][4][8]; }; /* [j][quarter of the tokens][row % 8] */

SMLA_DEV smla_hopper_sums &smla_hopper_sums_of(smla_hopper_smem &sm, int buffer, int w)
{
    uint8_t *rows = sm.block[2 * buffer + (w >> 1)].weight + smla_kFewRows * smla_kBlock;
    return reinterpret_cast<smla_hopper_sums *>(rows)[w & 1];
}
static_assert(2 * sizeof(smla_hopper_sums) <= smla_kFewRows * smla_kBlock, "space of P's rows 32 to 63");

/* Blocks that scores hands to weights, through two buffers. */
struct smla_handover {
    uint32_t count;
    __device__ int buffer() const { return smla_uniform(count & 1); }
    __device__ uint32_t parity() const { return count >> 1 & 1; }
};

template <int kRows> struct smla_hopper_few {
    float factor[kRows / 4], ref[kRows / 4]; /* of row n */
    float l, flushed; /* of the quarter of a row that this thread adds up */
    float scale;      /* S' of that row in the block whose sums wait */
    int waiting;      /* their buffer; -1: none */
};

/* This thread's row n = g, out of those that it has; threads with g >= kRows / 4 add up nothing. */
template <int kCount> SMLA_DEV float smla_hopper_own(const float (&x)[kCount], int g)
{
    float y = x[0];
    SMLA_UNROLL
    for (int n = 1; n < kCount; ++n) y = n == g ? x[n] : y;
    return y;
}

/* scores: what a split needs of its rows. */
template <int kRows>
SMLA_DEV void smla_hopper_begin_few(smla_hopper_smem &sm, const smla_decode_params &p,
                                    const smla_split &s, uint32_t index, int t,
                                    float (&factor)[kRows / 4])
{
    if (t < kRows) {
        const int32_t row = s.tile * kRows + t;
        sm.limit[t] = smla_row_limit(p, row, s.len);
        /* above 0 and no NaN, so that -inf stays -inf; where q_s is NaN, content is, too */
        const bool usable = row < p.rows && sm.factor[t] >= smla_kFactorFloor;
        sm.few_factor[index & 1][t] = usable ? sm.factor[t] : smla_kFactorFloor;
    }
    smla_bar_sync(smla_kBarQuery, 128);
    SMLA_UNROLL
    for (int n = 0; n < kRows / 4; ++n)
        factor[n] = sm.few_factor[index & 1][8 * (n >> 1) + 2 * (t & 3) + (n & 1)];
}

/* Scores of a block in four accumulators, as in smla_hopper_block_scores; they are under way on return,
   and smla_hopper_weigh_few adds them in its order and multiplies with k_s. */
template <int kRegs>
SMLA_DEV void smla_hopper_scores_few(const smla_hopper_smem &sm, int stage, float (&part)[4][kRegs])
{
    SMLA_UNROLL
    for (int i = 0; i < 4; ++i) smla_hopper_scores<4>(sm, stage, i, part[i]);
}

template <int kRegs>
SMLA_DEV void smla_hopper_weigh_few(float (&part)[4][kRegs], const float (&k)[2], float (&x)[kRegs])
{
    smla_wgmma_wait<0>();
    SMLA_UNROLL
    for (int i = 0; i < 4; ++i) smla_pin(part[i]);
    SMLA_UNROLL
    for (int n = 0; n < kRegs; ++n)
        x[n] = (((part[0][n] + part[1][n]) + part[2][n]) + part[3][n]) * k[n >> 1 & 1];
}

/* The same of the precise mode: eight accumulators of 64 dims, in two halves, with both rows of Q. */
SMLA_DEV void smla_hopper_scores_few(const smla_hopper_smem &sm, int stage, float (&part)[4][16],
                                     float (&x)[8])
{
    SMLA_UNROLL
    for (int half = 0; half < 2; ++half) {
        SMLA_UNROLL
        for (int i = 0; i < 4; ++i) smla_hopper_scores<2>(sm, stage, 4 * half + i, part[i]);
        if (half == 1) return; /* the second half is under way */
        smla_wgmma_wait<0>();
        SMLA_UNROLL
        for (int i = 0; i < 4; ++i) smla_pin(part[i]);
        SMLA_UNROLL
        for (int n = 0; n < 8; ++n)
            x[n] = ((part[0][n] + part[1][n]) + (part[2][n] + part[3][n]))
                 + ((part[0][n + 8] + part[1][n + 8]) + (part[2][n + 8] + part[3][n + 8]));
    }
}

SMLA_DEV void smla_hopper_weigh_few(float (&part)[4][16], const float (&k)[2], float (&x)[8])
{
    smla_wgmma_wait<0>();
    SMLA_UNROLL
    for (int i = 0; i < 4; ++i) smla_pin(part[i]);
    SMLA_UNROLL
    for (int n = 0; n < 8; ++n) {
        const float hi = (part[0][n] + part[1][n]) + (part[2][n] + part[3][n]);
        const float lo = (part[0][n + 8] + part[1][n + 8]) + (part[2][n + 8] + part[3][n + 8]);
        x[n] = (x[n] + (hi + lo)) * k[n >> 1 & 1];
    }
}

template <int kRegs>
SMLA_DEV void smla_hopper_mask_few(const smla_hopper_smem &sm, int stage, int t, float (&x)[kRegs])
{
    const smla_block_info info = sm.block[stage].info;
    const int32_t token0 = sm.block[stage].token0;
    SMLA_UNROLL
    for (int i = 0; i < kRegs; ++i) {
        const int token = 16 * (t >> 5) + (t >> 2 & 7) + 8 * (i >> 1 & 1);
        const int row = 8 * (i >> 2) + 2 * (t & 3) + (i & 1);
        const bool bad = (token & 1 ? info.bad_odd : info.bad_even) >> (token >> 1) & 1;
        const bool seen = token < smla_min(info.valid, sm.limit[row] - token0);
        x[i] = !seen ? smla_neg_inf() : bad ? __uint_as_float(smla_kNanF32) : x[i];
    }
}

/* The larger of two lanes' values: of x0 in the lane with the bit clear, of x1 in the other. */
SMLA_DEV float smla_max_across(float x0, float x1, int lane, int bit)
{
    const bool upper = (lane & bit) != 0;
    return fmaxf(upper ? x1 : x0, __shfl_xor_sync(~0u, upper ? x0 : x1, bit));
}

/* The largest y = logit + log2 k_s of the rows in this warp's tokens, each in the lanes that have the
   row's number within the tile, or with 16 rows that modulo 16. */
template <int kRows>
SMLA_DEV float smla_hopper_top_few(int lane, const float (&log2_k)[2], const float (&factor)[kRows / 4],
                                   const float (&x)[kRows / 2])
{
    float y[kRows / 8]; /* of row i = g % 2 of each 8j + 2q, after the first exchange */
    SMLA_UNROLL
    for (int j = 0; j < kRows / 8; ++j) {
        float two[2];
        SMLA_UNROLL
        for (int i = 0; i < 2; ++i)
            two[i] = fmaxf(fmaf(x[4 * j + i], factor[2 * j + i], log2_k[0]),
                           fmaf(x[4 * j + 2 + i], factor[2 * j + i], log2_k[1]));
        y[j] = smla_max_across(two[0], two[1], lane, 4);
    }
    const float first = smla_max_across(y[0], y[1], lane, 8); /* j = bit 3 of the lane, and bit 4 */
    if (kRows == 16) return fmaxf(first, __shfl_xor_sync(~0u, first, 16));
    return smla_max_across(first, smla_max_across(y[kRows / 8 - 2], y[kRows / 8 - 1], lane, 8), lane, 16);
}

/* One block, to logits without the rows' factors. */
template <int kRows, bool kPrecise>
SMLA_DEV void smla_hopper_scores_block(smla_hopper_smem &sm, int stage, uint32_t parity, int t,
                                       const float (&factor)[kRows / 4], const smla_handover &to)
{
    const int lane = t & 31, token = 16 * (t >> 5) + (lane >> 2), buffer = to.buffer();
    const smla_hopper_block &block = sm.block[stage];
    float part[4][kPrecise ? kRows : kRows / 2], x[kRows / 2];
    smla_mbarrier_wait(smla_smem_addr(&sm.full[stage]), parity);
    if constexpr (kPrecise) smla_hopper_scores_few(sm, stage, part, x);
    else smla_hopper_scores_few(sm, stage, part);
    smla_mbarrier_wait(smla_smem_addr(&sm.ready[stage]), parity);
    const float *k_s = &block.k_s[0].x, *log2_k_s = &block.log2_k_s[0].x;
    const float k[2] = {k_s[token], k_s[token + 8]};
    const float log2_k[2] = {log2_k_s[token], log2_k_s[token + 8]};
    const int32_t mask = block.info.mask;
    smla_hopper_weigh_few(part, k, x);
    if (mask) smla_hopper_mask_few(sm, stage, t, x);
    const float top = smla_hopper_top_few<kRows>(lane, log2_k, factor, x);
    smla_mbarrier_wait(smla_smem_addr(&sm.logits_empty[buffer]), to.parity() ^ 1);
    SMLA_UNROLL
    for (int n = 0; n < kRows / 8; ++n)
        smla_hopper_logits(sm, buffer, n)[t] =
            make_float4(x[4 * n], x[4 * n + 1], x[4 * n + 2], x[4 * n + 3]);
    const int row = 8 * (kRows == 32 ? lane >> 3 : lane >> 3 & 1) + 2 * (lane & 3) + (lane >> 2 & 1);
    smla_hopper_tops_of(sm, buffer).of[row][t >> 5] = top;
    __syncwarp();
    if (lane == 0) smla_mbarrier_arrive(smla_smem_addr(&sm.logits_full[buffer]));
}

template <int kRows, bool kPrecise>
SMLA_DEV void smla_hopper_few_scores(smla_hopper_smem &sm, const smla_decode_params &p)
{
    const int t = threadIdx.x & 127;
    smla_ring ring = {0};
    smla_handover to = {0};
    smla_hopper_for_each_split(sm, [&](const smla_split &s, uint32_t index) {
        if (s.end <= s.begin) return;
        if (index > 0) smla_hopper_next_q<kRows, kPrecise>(sm, p, s, index, t >> 5, ring);
        float factor[kRows / 4]; /* of row n */
        smla_hopper_begin_few<kRows>(sm, p, s, index, t, factor);
#pragma unroll 1
        for (const uint32_t end = ring.block + smla_split_blocks(s); ring.block != end; ++ring.block) {
            smla_hopper_scores_block<kRows, kPrecise>(sm, ring.stage(), ring.parity(), t, factor, to);
            ++to.count;
        }
    });
}

/* Adds the sums that all warps left behind before the last barrier. */
template <int kRows>
SMLA_DEV void smla_hopper_add_few(smla_hopper_smem &sm, int t, smla_hopper_few<kRows> &rows)
{
    const int g = t >> 2 & 7, q = t & 3;
    if (rows.waiting < 0 || g >= kRows / 4) return;
    float l = 0.0f, flushed = 0.0f;
    SMLA_UNROLL
    for (int w = 0; w < 4; ++w) {
        const float2 part = smla_hopper_sums_of(sm, rows.waiting, w).of[g >> 1][t >> 5][2 * q + (g & 1)];
        l += part.x;
        flushed += part.y;
    }
    rows.waiting = -1;
    rows.l = fmaf(l, rows.scale, rows.l);
    rows.flushed = fmaf(flushed, rows.scale, rows.flushed);
}

/* smla_hopper_move: all warps decide alike, the first one writes. */
template <int kRows>
SMLA_DEV void smla_hopper_move_few(smla_hopper_smem &sm, int stage, int t, const float (&top)[kRows / 4],
                                   smla_hopper_few<kRows> &rows)
{
    const int g = t >> 2 & 7;
    bool up = false;
    SMLA_UNROLL
    for (int n = 0; n < kRows / 4; ++n) up = up || top[n] > rows.ref[n] + smla_kRefSlack;
    up = __any_sync(~0u, up);
    if (t == 0) sm.block[stage].moved = up ? 0x0101u : 0; /* a byte for 16 rows */
    if (!up) return;
    smla_hopper_add_few(sm, t, rows);
    float alpha[kRows / 4];
    SMLA_UNROLL
    for (int n = 0; n < kRows / 4; ++n) {
        const bool moves = top[n] > rows.ref[n] + smla_kRefSlack;
        alpha[n] = moves ? smla_ex2(rows.ref[n] - top[n]) : 1.0f;
        if (moves) rows.ref[n] = top[n];
        if (t < 4) sm.block[stage].alpha[8 * (n >> 1) + 2 * t + (n & 1)] = alpha[n];
    }
    rows.l *= smla_hopper_own(alpha, g);
    rows.flushed *= smla_hopper_own(alpha, g);
}

/* Weights of the thread's tokens to P, as in smla_hopper_weights; x becomes 2^(logit + shift).  In the
   precise mode what e4m3 leaves of them goes to P's rows behind. */
template <int kRows, bool kPrecise>
SMLA_DEV void smla_hopper_weights_few(smla_hopper_block &block, int t, const float (&k)[2],
                                      const float (&factor)[kRows / 4], const float (&shift)[kRows / 4],
                                      float (&x)[kRows / 2])
{
    const int g = t >> 2 & 7, q = t & 3, odd = g & 1;
    /* 4 bytes of row 8j + 2q + odd: tokens 2 (g / 2), + 1, + 8, + 9 of the warp's 16, each byte pair from
       one of two neighbours */
    const uint32_t select = odd ? 0x3726 : 0x5140;
    uint8_t *to = block.weight + (2 * q + odd) * smla_kBlock + ((t >> 5 ^ q) << 4) + 4 * (g >> 1);
    SMLA_UNROLL
    for (int j = 0; j < kRows / 8; ++j) {
        float w[4];
        SMLA_UNROLL
        for (int i = 0; i < 4; ++i) { /* row i / 2 of two, token i % 2 of two */
            float &e = x[4 * j + 2 * (i & 1) + (i >> 1)];
            e = smla_ex2(fmaf(e, factor[2 * j + (i >> 1)], shift[2 * j + (i >> 1)]));
            w[i] = e * k[i & 1];
        }
        const uint32_t codes = smla_e4m3x4_from_f32(w);
        *reinterpret_cast<uint32_t *>(to + 8 * j * smla_kBlock) =
            __byte_perm(codes, __shfl_xor_sync(~0u, codes, 4), select);
        if (kPrecise) {
            const uint32_t rest = smla_e4m3x4_of_rest(w, codes);
            *reinterpret_cast<uint32_t *>(to + (smla_kPreciseRows + 8 * j) * smla_kBlock) =
                __byte_perm(rest, __shfl_xor_sync(~0u, rest, 4), select);
        }
    }
}

/* What a warp adds to the rows' sums: of the lanes g, g ^ 1, each takes one of two rows. */
template <int kRows>
SMLA_DEV void smla_hopper_sums_few(smla_hopper_sums &sums, int t, const float (&k)[2],
                                   const float (&x)[kRows / 2])
{
    const int g = t >> 2 & 7, q = t & 3, odd = g & 1;
    SMLA_UNROLL
    for (int j = 0; j < kRows / 8; ++j) {
        float2 part[2];
        SMLA_UNROLL
        for (int i = 0; i < 2; ++i) {
            const float e[2] = {x[4 * j + i], x[4 * j + 2 + i]};
            part[i] = make_float2(e[0] + e[1], (e[0] * k[0] < smla_kFlushed ? e[0] : 0.0f)
                                                   + (e[1] * k[1] < smla_kFlushed ? e[1] : 0.0f));
        }
        const float2 mine = odd ? part[1] : part[0], other = odd ? part[0] : part[1];
        sums.of[j][g >> 1][2 * q + odd] =
            make_float2(mine.x + __shfl_xor_sync(~0u, other.x, 4),
                        mine.y + __shfl_xor_sync(~0u, other.y, 4));
    }
}

/* One block: from logits to weights in shared memory. */
template <int kRows, bool kPrecise>
SMLA_DEV void smla_hopper_weights_block(smla_hopper_smem &sm, int stage, int t, const smla_handover &from,
                                        smla_hopper_few<kRows> &rows)
{
    const int q = t & 3, token = 16 * (t >> 5) + (t >> 2 & 7), buffer = from.buffer();
    smla_hopper_block &block = sm.block[stage];
    float x[kRows / 2], top[kRows / 4], shift[kRows / 4], scale[kRows / 4];
    smla_mbarrier_wait(smla_smem_addr(&sm.logits_full[buffer]), from.parity());
    const float *k_s = &block.k_s[0].x;
    const float k[2] = {k_s[token], k_s[token + 8]};
    const smla_hopper_tops &tops = smla_hopper_tops_of(sm, buffer);
    SMLA_UNROLL
    for (int n = 0; n < kRows / 4; ++n) {
        const float4 v = *reinterpret_cast<const float4 *>(tops.of[8 * (n >> 1) + 2 * q + (n & 1)]);
        top[n] = fmaxf(fmaxf(v.x, v.y), fmaxf(v.z, v.w));
    }
    SMLA_UNROLL
    for (int n = 0; n < kRows / 8; ++n) {
        const float4 v = smla_hopper_logits(sm, buffer, n)[t];
        x[4 * n] = v.x, x[4 * n + 1] = v.y, x[4 * n + 2] = v.z, x[4 * n + 3] = v.w;
    }
    smla_bar_sync(smla_kBarSums, 128);
    if ((t & 31) == 0) smla_mbarrier_arrive(smla_smem_addr(&sm.logits_empty[buffer]));
    smla_hopper_move_few<kRows>(sm, stage, t, top, rows);
    SMLA_UNROLL
    for (int n = 0; n < kRows / 4; ++n) {
        const bool none = top[n] == smla_neg_inf(); /* the row sees nothing of this block */
        shift[n] = none ? 0.0f : smla_kLog2E4m3Max - top[n];
        scale[n] = none ? 0.0f : smla_ex2(top[n] - smla_kLog2E4m3Max - rows.ref[n]);
    }
    smla_hopper_weights_few<kRows, kPrecise>(block, t, k, rows.factor, shift, x);
    if (t < 4) {
        SMLA_UNROLL
        for (int j = 0; j < kRows / 8; ++j) {
            if (!kPrecise) {
                block.block_scale[t][j] = smla_cvt_bf16x2(scale[2 * j], scale[2 * j + 1]);
            } else { /* not rounded, a word each */
                block.block_scale[t][2 * j] = __float_as_uint(scale[2 * j]);
                block.block_scale[t][2 * j + 1] = __float_as_uint(scale[2 * j + 1]);
            }
        }
    }
    smla_fence_async();
    __syncwarp();
    if ((t & 31) == 0) smla_mbarrier_arrive(smla_smem_addr(&sm.weights[stage]));
    smla_hopper_add_few(sm, t, rows);
    smla_hopper_sums_few<kRows>(smla_hopper_sums_of(sm, buffer, t >> 5), t, k, x);
    rows.scale = smla_hopper_own(scale, t >> 2 & 7);
    rows.waiting = buffer;
}

/* The end of a split: the quarters of a row become one.  The precise mode's denominator is l itself. */
template <int kRows, bool kPrecise>
SMLA_DEV void smla_hopper_end_few(smla_hopper_smem &sm, float4 *stat, int t, smla_hopper_few<kRows> &rows)
{
    const int g = t >> 2 & 7, q = t & 3;
    smla_bar_sync(smla_kBarSums, 128);
    smla_hopper_add_few(sm, t, rows);
    if (g < kRows / 4) {
        const int row = 8 * (g >> 1) + 2 * q + (g & 1);
        sm.flushed[(t >> 5) * smla_kFewRows + row] = make_float2(rows.l, rows.flushed);
        if (t < 32) stat[row].x = smla_hopper_own(rows.ref, g);
    }
    smla_bar_sync(smla_kBarSums, 128);
    if (t >= kRows) return;
    const float2 *part = sm.flushed + t;
    float2 sum[4];
    SMLA_UNROLL
    for (int w = 0; w < 4; ++w) sum[w] = part[w * smla_kFewRows];
    const float l = (sum[0].x + sum[1].x) + (sum[2].x + sum[3].x);
    if (l == 0.0f) stat[t].x = smla_neg_inf();
    stat[t].y = l;
    stat[t].z = kPrecise ? l : (sum[0].y + sum[1].y) + (sum[2].y + sum[3].y); /* .w is sum's */
}

template <int kRows, bool kPrecise>
SMLA_DEV void smla_hopper_few_weights(smla_hopper_smem &sm, const smla_decode_params &p)
{
    const int t = threadIdx.x & 127;
    smla_ring ring = {0};
    smla_handover from = {0};
    smla_hopper_for_each_split(sm, [&](const smla_split &s, uint32_t index) {
        ring.block += smla_query_stages(p, s, index); /* those are for scores */
        smla_hopper_few<kRows> rows;
        SMLA_UNROLL
        for (int n = 0; n < kRows / 4; ++n) rows.ref[n] = smla_neg_inf();
        rows.l = rows.flushed = rows.scale = 0.0f;
        rows.waiting = -1;
        const uint32_t end = ring.block + smla_split_blocks(s);
        if (ring.block != end) { /* scores has written the factors */
            smla_mbarrier_wait(smla_smem_addr(&sm.logits_full[from.buffer()]), from.parity());
            SMLA_UNROLL
            for (int n = 0; n < kRows / 4; ++n)
                rows.factor[n] = sm.few_factor[index & 1][8 * (n >> 1) + 2 * (t & 3) + (n & 1)];
        }
#pragma unroll 1
        for (; ring.block != end; ++ring.block) {
            smla_hopper_weights_block<kRows, kPrecise>(sm, ring.stage(), t, from, rows);
            ++from.count;
        }
        smla_hopper_end_few<kRows, kPrecise>(sm, sm.stat[index & 1], t, rows);
        __syncwarp();
        if (t == 0) smla_mbarrier_arrive(smla_smem_addr(&sm.stat_full[index & 1]));
    });
}

/* ---- values ---- */

/* [64 dims of the warpgroup][columns of wgmma's accumulator: dim pair x rows of the tile] */
template <int kRows> struct smla_hopper_acc { float v[4][kRows / 2]; };

/* V^T of 64 tokens x this warp's 16 dims of the u-th 64: wgmma's register operand, two k steps. */
SMLA_DEV void smla_hopper_load_v(uint32_t v, int u, uint32_t (&a)[2][4])
{
    SMLA_UNROLL
    for (int k = 0; k < 2; ++k)
        smla_ldmatrix_x4_trans(a[k], (v ^ (u & 1) * 64) + (u / 2) * smla_kColumn + k * 4096);
}

SMLA_DEV void smla_hopper_sort_v(uint32_t (&a)[2][4])
{
    SMLA_UNROLL
    for (int k = 0; k < 2; ++k) {
        const uint32_t x[4] = {a[k][0], a[k][1], a[k][2], a[k][3]};
        a[k][0] = __byte_perm(x[0], x[1], 0x6420);
        a[k][1] = __byte_perm(x[0], x[1], 0x7531);
        a[k][2] = __byte_perm(x[2], x[3], 0x6420);
        a[k][3] = __byte_perm(x[2], x[3], 0x7531);
    }
}

template <int kRows>
SMLA_DEV void smla_hopper_rescale(const smla_hopper_smem &sm, int stage, smla_hopper_acc<kRows> &acc)
{
    const uint32_t moved = sm.block[stage].moved;
    if (moved == 0) return;
    SMLA_UNROLL
    for (int j = 0; j < kRows / 8; ++j) {
        float2 alpha = *reinterpret_cast<const float2 *>(
            &sm.block[stage].alpha[8 * j + 2 * (threadIdx.x & 3)]);
        if ((moved >> (j / 2) * 8 & 0xffu) == 0) alpha = make_float2(1.0f, 1.0f);
        SMLA_UNROLL
        for (int u = 0; u < 4; ++u) {
            acc.v[u][4 * j] *= alpha.x;
            acc.v[u][4 * j + 1] *= alpha.y;
            acc.v[u][4 * j + 2] *= alpha.x;
            acc.v[u][4 * j + 3] *= alpha.y;
        }
    }
}

/* Partial sums of a block to the masters: acc += S' part. */
template <int kRows, bool kPrecise, int kWords>
SMLA_DEV void smla_hopper_add(const uint32_t (&scale)[kWords], const float (&part)[kRows / 2],
                              float (&acc)[kRows / 2])
{
    SMLA_UNROLL
    for (int j = 0; j < kRows / 8; ++j) { /* columns 8j + 2q, + 1: rows of the tile */
        const uint32_t *two = &scale[kPrecise ? 2 * j : j];
        const float even = __uint_as_float(kPrecise ? two[0] : two[0] << 16);
        const float odd = __uint_as_float(kPrecise ? two[1] : two[0] & 0xffff0000u);
        acc[4 * j] = fmaf(part[4 * j], even, acc[4 * j]);
        acc[4 * j + 1] = fmaf(part[4 * j + 1], odd, acc[4 * j + 1]);
        acc[4 * j + 2] = fmaf(part[4 * j + 2], even, acc[4 * j + 2]);
        acc[4 * j + 3] = fmaf(part[4 * j + 3], odd, acc[4 * j + 3]);
    }
}

/* One block, 64 dims at a time.  With few rows, two partial accumulators take turns. */
template <int kRows, bool kPrecise>
SMLA_DEV void smla_hopper_values_block(const smla_hopper_smem &sm, int stage, uint32_t parity,
                                       uint32_t v_offset, smla_hopper_acc<kRows> &acc)
{
    constexpr int kParts = kRows == 64 ? 1 : 2, kWords = kRows / (kPrecise ? 4 : 8);
    constexpr uint64_t kRest = smla_kPreciseRows * smla_kBlock >> 4; /* P's rows behind, in a descriptor */
    const uint32_t v = smla_smem_addr(sm.stage[stage]) + v_offset;
    const uint64_t weight = smla_wgmma_desc(smla_smem_addr(sm.block[stage].weight), 512,
                                            smla_kSwizzle64);
    uint32_t a[kParts][2][4], scale[kWords];
    float part[kParts][kRows / 2];
    auto multiply = [&](int u) {
        smla_hopper_sort_v(a[u % kParts]);
        smla_pin(part[u % kParts]);
        smla_wgmma_fence();
        smla_wgmma_k32_e4m3(part[u % kParts], a[u % kParts][0], weight, 0);
        smla_wgmma_k32_e4m3(part[u % kParts], a[u % kParts][1], weight + 2, 1);
        if (kPrecise) {
            smla_wgmma_k32_e4m3(part[u % kParts], a[u % kParts][0], weight + kRest, 1);
            smla_wgmma_k32_e4m3(part[u % kParts], a[u % kParts][1], weight + kRest + 2, 1);
        }
        smla_wgmma_commit();
    };
    smla_mbarrier_wait(smla_smem_addr(&sm.ready[stage]), parity);
    SMLA_UNROLL
    for (int u = 0; u < kParts; ++u) smla_hopper_load_v(v, u, a[u]);
    smla_mbarrier_wait(smla_smem_addr(&sm.weights[stage]), parity);
    multiply(0);
    SMLA_UNROLL
    for (int j = 0; j < kWords; ++j) scale[j] = sm.block[stage].block_scale[threadIdx.x & 3][j];
    smla_hopper_rescale<kRows>(sm, stage, acc);
    SMLA_UNROLL
    for (int u = 0; u < 4; ++u) {
        if (kParts == 2 && u < 3) {
            multiply(u + 1);
            smla_wgmma_wait<1>();
        } else {
            smla_wgmma_wait<0>();
        }
        smla_pin(part[u % kParts]);
        if (u + kParts < 4) smla_hopper_load_v(v, u + kParts, a[u % kParts]);
        smla_hopper_add<kRows, kPrecise>(scale, part[u % kParts], acc.v[u]);
        if (kParts == 1 && u < 3) multiply(u + 1);
    }
}

/* What a thread of `values` must know of a row at the end of a split. */
struct alignas(16) smla_hopper_out_row {
    float factor;   /* what sums are multiplied with */
    int32_t live;   /* the row exists */
    int64_t offset; /* elements from p.out */
};

/* One thread a row: lse; stat becomes an out_row. */
SMLA_DEV void smla_hopper_finish_row(float4 *out_row, const smla_decode_params &p, int64_t request,
                                     int32_t row)
{
    const smla_row_stat stat = {out_row->x, out_row->y, out_row->z + out_row->w};
    smla_hopper_out_row o = {smla_out_factor(stat), row < p.rows, 0};
    if (row < p.rows) {
        o.offset = smla_out_row(p, request, row) - p.out;
        smla_store_lse(p, request, row, stat);
    }
    *reinterpret_cast<smla_hopper_out_row *>(out_row) = o;
}

/* A split that is one of several: its sums, of all rows of the tile, to the workspace. */
template <int kRows>
SMLA_DEV void smla_hopper_store_partial(float *sums, int q, const smla_hopper_acc<kRows> &acc)
{
    sums += 2 * q * smla_kLatent;
    SMLA_UNROLL
    for (int j = 0; j < kRows / 8; ++j) {
        SMLA_UNROLL
        for (int i = 0; i < 8; ++i) { /* rows 8j + 2q, + 1; dims of the u-th 64 */
            const int odd = i >> 2, u = i & 3;
            *reinterpret_cast<float2 *>(sums + (8 * j + odd) * smla_kLatent + 64 * u) =
                make_float2(acc.v[u][4 * j + odd], acc.v[u][4 * j + odd + 2]);
        }
    }
}

/* A split that is a whole item: the output itself. */
template <int kRows>
SMLA_DEV void smla_hopper_store_out(const float4 *stats, uint16_t *out, int q,
                                    const smla_hopper_acc<kRows> &acc)
{
    SMLA_UNROLL
    for (int j = 0; j < kRows / 8; ++j) {
        SMLA_UNROLL
        for (int odd = 0; odd < 2; ++odd) {
            const smla_hopper_out_row o = *reinterpret_cast<const smla_hopper_out_row *>(
                &stats[8 * j + 2 * q + odd]);
            SMLA_UNROLL
            for (int u = 0; u < 4; ++u) {
                const uint32_t pair = smla_bf16x2_rn(acc.v[u][4 * j + odd] * o.factor,
                                                     acc.v[u][4 * j + odd + 2] * o.factor);
                if (o.live) *reinterpret_cast<uint32_t *>(out + o.offset + 64 * u) = pair;
            }
        }
    }
}

/* The end of a split. */
template <int kRows>
SMLA_DEV void smla_hopper_store(float4 *stats, const smla_decode_params &p, const smla_split &s,
                                int wg, const smla_hopper_acc<kRows> &acc)
{
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5 & 3, g = lane >> 2, q = lane & 3;
    const int dim = 256 * wg + 16 * warp + 2 * g, r = threadIdx.x;
    if (s.slot >= 0) {
        const int64_t rows = (s.slot * p.group + s.tile % p.group) * kRows;
        smla_hopper_store_partial<kRows>(p.partial_acc + rows * smla_kLatent + dim, q, acc);
        if (r < kRows)
            p.partial_stat[rows + r] =
                make_float4(stats[r].x, stats[r].y, stats[r].z + stats[r].w, 0.0f);
        return;
    }
    if (r < kRows) smla_hopper_finish_row(&stats[r], p, s.request, s.tile * kRows + r);
    smla_bar_sync(smla_kBarStore, 256);
    smla_hopper_store_out<kRows>(stats, p.out + dim, q, acc);
}

template <int kRows, bool kPrecise>
SMLA_DEV void smla_hopper_values(smla_hopper_smem &sm, const smla_decode_params &p, int wg)
{
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5 & 3;
    /* lane = token of 32, warp = 16-byte chunk of a column block, chunk + 4 for odd u */
    const uint32_t v_offset = wg * 2 * smla_kColumn + lane * 128 + ((warp ^ (lane & 7)) << 4);
    smla_ring ring = {0};
    smla_hopper_for_each_split(sm, [&](const smla_split &s, uint32_t index) {
        smla_hopper_pass_query(sm, p, s, index, ring);
        smla_hopper_acc<kRows> acc = {};
        const uint32_t end = ring.block + smla_split_blocks(s);
#pragma unroll 1
        for (; ring.block != end; ++ring.block) {
            const int stage = ring.stage();
            smla_hopper_values_block<kRows, kPrecise>(sm, stage, ring.parity(), v_offset, acc);
            __syncwarp();
            if (lane == 0) smla_mbarrier_arrive(smla_smem_addr(&sm.empty[stage]));
        }
        smla_mbarrier_wait(smla_smem_addr(&sm.stat_full[index & 1]), index >> 1 & 1);
        smla_hopper_store<kRows>(sm.stat[index & 1], p, s, wg, acc);
    });
}

template <int kRows> SMLA_DEV void smla_hopper_init_barriers(smla_hopper_smem &sm)
{
    constexpr int kStatWarps = smla_hopper_roles<kRows>::kStatWarps;
    constexpr int kSumWarps = smla_hopper_roles<kRows>::kSumWarps;
    for (int i = 0; i < smla_kStages; ++i) {
        smla_mbarrier_init(smla_smem_addr(&sm.full[i]), 1);
        smla_mbarrier_init(smla_smem_addr(&sm.ready[i]), 1);
        smla_mbarrier_init(smla_smem_addr(&sm.weights[i]), 4);
        smla_mbarrier_init(smla_smem_addr(&sm.empty[i]), 8 + kSumWarps);
        sm.block[i].moved = 0;
    }
    for (int i = 0; i < 2; ++i) {
        smla_mbarrier_init(smla_smem_addr(&sm.split_full[i]), 1);
        smla_mbarrier_init(smla_smem_addr(&sm.split_empty[i]),
                           smla_hopper_roles<kRows>::kThreads / 32 - 3 + kSumWarps); /* not load's */
        smla_mbarrier_init(smla_smem_addr(&sm.logits_full[i]), 4);
        smla_mbarrier_init(smla_smem_addr(&sm.logits_empty[i]), 4);
        smla_mbarrier_init(smla_smem_addr(&sm.stat_full[i]), kStatWarps + kSumWarps);
    }
}

template <int kRows, bool kPrecise>
static __global__ void __launch_bounds__(smla_hopper_roles<kRows>::kThreads, 1)
snapmla_decode_hopper_kernel(const __grid_constant__ smla_decode_params p,
                             const __grid_constant__ smla_hopper_maps maps)
{
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(1024) uint8_t smla_hopper_shared[];
    smla_hopper_smem &sm = *reinterpret_cast<smla_hopper_smem *>(smla_hopper_shared);
    constexpr int kThreads = smla_hopper_roles<kRows>::kThreads;
    const int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), wg = warp >> 2; /* uniform registers */
    if (threadIdx.x == 32 * smla_kLoadWarp && p.len_limit > 0) { /* else there may be no maps */
        smla_prefetch_tensormap(&maps.content);
        smla_prefetch_tensormap(&maps.rope);
    }
    smla_griddepcontrol_wait(); /* before anything of the caller's or the plan is read */
    if (threadIdx.x == 0) smla_launch_dependents(); /* combine's CTAs take the place of those that end */
    const smla_hopper_work work = smla_hopper_read_work(p);
    smla_cursor cursor = {};
    smla_split first = {};
    smla_hopper_pages pages = {0, -1, -1};
    if (__builtin_expect(warp == smla_kLoadWarp, 1)) { /* the hint saves spills */
        /* This warp must not wait for the others: the first blocks are asked for before it meets them. */
        if (threadIdx.x == 32 * smla_kLoadWarp) smla_hopper_init_barriers<kRows>(sm); /* meanwhile */
        first = smla_hopper_first_split(p, work, cursor);
        if (first.tile >= 0) pages = smla_hopper_first_pages(p, first);
        smla_fence_async();
        __syncwarp();
        smla_ring ring = {0};
        if (first.tile >= 0)
            smla_hopper_load_blocks(sm, p, maps, first,
                                    smla_min(smla_split_blocks(first), (int32_t)smla_kStages), pages, ring);
        smla_bar_arrive(smla_kBarBegin, kThreads);
    } else {
        smla_cursor c;
        const smla_split s = smla_hopper_first_split(p, work, c); /* its length is not waited for */
        if (s.tile >= 0)
            smla_hopper_load_q<kRows, kPrecise>(sm, p, s, warp - (warp > smla_kLoadWarp),
                                                kThreads / 32 - 1);
        smla_bar_sync(smla_kBarBegin, kThreads);
    }
    if (wg < 2) {
        smla_setmaxnreg_inc<smla_hopper_roles<kRows>::kValuesRegs>();
        smla_hopper_values<kRows, kPrecise>(sm, p, wg);
    } else if (wg == 2) {
        if constexpr (kRows == smla_kHopperTile) {
            smla_setmaxnreg_dec<smla_hopper_roles<kRows>::kSoftmaxRegs>();
            smla_hopper_softmax(sm, p);
        } else {
            smla_setmaxnreg_inc<smla_hopper_roles<kRows>::kSoftmaxRegs>();
            smla_hopper_few_scores<kRows, kPrecise>(sm, p);
        }
    } else if (wg == 4) {
        if constexpr (kRows != smla_kHopperTile) {
            smla_setmaxnreg_dec<smla_hopper_roles<kRows>::kWeightsRegs>();
            smla_hopper_few_weights<kRows, kPrecise>(sm, p);
        }
    } else {
        smla_setmaxnreg_dec<smla_hopper_roles<kRows>::kLoadRegs>();
        if (warp == smla_kLoadWarp) smla_hopper_load(sm, p, maps, first, cursor, pages);
        else if (warp == 13) smla_hopper_prepare(sm, p);
        else if (warp - 14 < smla_hopper_roles<kRows>::kSumWarps)
            smla_hopper_sum<kRows, kPrecise>(sm, p, warp - 14);
    }
#endif
}

/* ================================================================================================
   >>combine    merges the splits of rows

   A list of splits is cut into runs of 8, whatever its length.  The splits of a run are added in ascending
   order, then the runs' sums; 32 runs make a round, and a later round's run i goes on with the sum of
   run i.  All sums begin at -0, which changes no bit of what is added to it.  So splits without keys for
   a row, and runs and rounds of nothing else, leave no trace: a row's bits depend on the splits in which
   it sees keys, not on how many more there are for other query tokens of the call.

   Where there is one run, a warp merges 128 dims of a row and a CTA of 8 warps takes 8 such slices; where
   there are more, 4, 8 or 16 half warps merge 64 dims of a row, each up to two runs of a round: a CTA of
   16 half warps takes 4, 2 or 1 slices of a row.  That is a task; CTAs stride over all tasks, so that a
   few launched CTAs suffice whatever the plan has cut.
   ============================================================================================== */
SMLA_CONST int smla_kCombineThreads = 256;
SMLA_CONST int smla_kCombineWarps = smla_kCombineThreads / 32;
SMLA_CONST int smla_kRunSplits = 8; /* a lane loads their sums at once */
SMLA_CONST int smla_kFewSplits = smla_kRunSplits;
SMLA_CONST int smla_kFewSlices = smla_kLatent / 128; /* of a row: 4 dims a lane */
SMLA_CONST int smla_kManySlices = smla_kLatent / 64;
SMLA_CONST int smla_kHalfWarps = smla_kCombineThreads / 16;
SMLA_CONST int smla_kSplitsAtOnce = smla_kCombineThreads; /* more go in several rounds */
SMLA_CONST int smla_kRunsAtOnce = smla_kSplitsAtOnce / smla_kRunSplits;

/* Where the splits of item `item` lie: slot_of(i), i < count. */
struct smla_split_list {
    int64_t item;
    int64_t first_slot; /* fixed policy: consecutive slots */
    int32_t part;       /* balanced policy: the parts from this one on */
    int32_t count;      /* 0 or 1: nothing to merge */
};

SMLA_HD smla_split_list smla_find_splits(const smla_decode_params &p, int64_t index)
{
    if (p.policy.split_blocks > 0) { /* index = item */
        const int64_t request = smla_request_of(p.policy, index);
        const int64_t tile_group = index - request * p.policy.groups;
        const int64_t count = p.split_begin[request + 1] - p.split_begin[request];
        return {index, p.split_begin[request] * p.policy.groups + tile_group * count, -1,
                (int32_t)count};
    }
    const smla_part part = p.part[index]; /* index = the part in which the item begins */
    return {part.last, -1, (int32_t)index, part.splits};
}

SMLA_HD int64_t smla_slot_of(const smla_split_list &list, int32_t i)
{
    if (list.first_slot >= 0) return list.first_slot + i;
    return 2 * (int64_t)(list.part + i) + (i == 0);
}

/* log2 of the number of half warps for a slice of more than smla_kFewSplits splits; half warp h takes
   runs h and h + that number of a round */
SMLA_HD int smla_combine_log_halves(int32_t count) { return count <= 32 ? 2 : count <= 96 ? 3 : 4; }

SMLA_HD int32_t smla_combine_tasks(int32_t count, int32_t rows)
{
    if (count < 2) return 0;
    if (count > smla_kFewSplits)
        return rows * (smla_kManySlices << smla_combine_log_halves(count)) / smla_kHalfWarps;
    return (rows * smla_kFewSlices + smla_kCombineWarps - 1) / smla_kCombineWarps;
}

/* How many runs a round of `count` splits has. */
SMLA_HD int32_t smla_combine_runs(int32_t count)
{
    return (smla_min(count, (int32_t)smla_kSplitsAtOnce) + smla_kRunSplits - 1) / smla_kRunSplits;
}

struct smla_combine_smem {
    int32_t task_end[smla_kMaxParts]; /* balanced policy: of this part's list and all before */
    int32_t warp_tasks[smla_kCombineWarps];
    float top[smla_kCombineWarps];
    float weight[smla_kSplitsAtOnce];
    float4 acc[smla_kRunsAtOnce][16]; /* [run, slice]: fewer slices where there are more runs */
    float2 sums[smla_kCombineWarps]; /* l, lq */
};

/* Balanced policy: how many tasks there are, and up to which list. */
SMLA_DEV int64_t smla_combine_count(smla_combine_smem &sm, const smla_decode_params &p, int32_t rows)
{
    const int t = threadIdx.x, lane = t & 31, warp = t >> 5;
    int32_t total = 0;
    for (int first = 0; first < p.policy.parts; first += smla_kCombineThreads) {
        const int i = first + t;
        int32_t tasks = i < p.policy.parts ? smla_combine_tasks(p.part[i].splits, rows) : 0;
        SMLA_UNROLL
        for (int d = 1; d < 32; d *= 2) {
            const int32_t y = __shfl_up_sync(~0u, tasks, d);
            if (lane >= d) tasks += y;
        }
        if (lane == 31) sm.warp_tasks[warp] = tasks;
        __syncthreads();
        int32_t before = total;
        SMLA_UNROLL
        for (int w = 0; w < smla_kCombineWarps; ++w) {
            if (w < warp) before += sm.warp_tasks[w];
            total += sm.warp_tasks[w];
        }
        if (i < p.policy.parts) sm.task_end[i] = before + tasks;
        __syncthreads();
    }
    return total;
}

/* The list that a task belongs to; *task becomes its number in that list. */
SMLA_DEV smla_split_list smla_combine_list(const smla_combine_smem &sm, const smla_decode_params &p,
                                           int64_t item_tasks, int64_t *task)
{
    if (p.policy.split_blocks > 0) {
        const int64_t item = *task / item_tasks;
        *task -= item * item_tasks;
        return smla_find_splits(p, item);
    }
    int lo = 0, hi = p.policy.parts - 1; /* the first whose tasks end behind it */
    while (lo < hi) {
        const int middle = (lo + hi) / 2;
        if (sm.task_end[middle] > *task) hi = middle;
        else lo = middle + 1;
    }
    if (lo > 0) *task -= sm.task_end[lo - 1];
    return smla_find_splits(p, lo);
}

/* A row of the output and the rows of partial results for it: `first` of split 0 of a list, and
   next + i * step of split i > 0. */
struct smla_combine_row {
    int64_t first, next;
    int32_t step;
    int32_t request, row;
    bool live;
};

SMLA_DEV smla_combine_row smla_combine_locate(const smla_decode_params &p, const smla_split_list &list,
                                              int32_t r, int32_t rows)
{
    const int32_t slot_rows = p.group * p.tile_rows;
    const int64_t request = smla_request_of(p.policy, list.item);
    const int64_t tile_group = list.item - request * p.policy.groups;
    const int64_t row = tile_group * slot_rows + r, slot = smla_slot_of(list, 1);
    const int64_t step = smla_slot_of(list, 2) - slot;
    return {smla_slot_of(list, 0) * slot_rows + r, (slot - step) * slot_rows + r,
            (int32_t)step * slot_rows, (int32_t)request, (int32_t)row, r < rows && row < p.rows};
}

SMLA_DEV int64_t smla_combine_at(const smla_combine_row &row, int32_t i)
{
    return i == 0 ? row.first : row.next + (int64_t)i * row.step;
}

/* Sums of the run that begins with split `from`, of those below `to`, at dims [dim, dim + 4). */
SMLA_DEV void smla_combine_load(const smla_decode_params &p, const smla_combine_row &row, int32_t dim,
                                int32_t from, int32_t to, float4 (&v)[smla_kRunSplits])
{
    const float *acc = p.partial_acc + dim;
    SMLA_UNROLL
    for (int k = 0; k < smla_kRunSplits; ++k) {
        const int64_t at =
            k == 0 ? smla_combine_at(row, from) : row.next + (int64_t)(from + k) * row.step;
        if (from + k < to) v[k] = __ldcg(reinterpret_cast<const float4 *>(acc + at * smla_kLatent));
    }
}

/* m, l, lq of split i; without keys if it is not below `to`. */
SMLA_DEV float4 smla_combine_stat(const smla_decode_params &p, const smla_combine_row &row, int32_t i,
                                  int32_t to)
{
    return i < to ? __ldcg(p.partial_stat + smla_combine_at(row, i))
                  : make_float4(smla_neg_inf(), 0.0f, 0.0f, 0.0f);
}

/* A split's weight among those whose largest m is `top`; -1: no keys, its sums are not looked at. */
SMLA_DEV float smla_combine_weight(float4 stat, float top)
{
    if (stat.x == smla_neg_inf() && stat.y == 0.0f) return -1.0f;
    return smla_ex2(stat.x - (top == smla_neg_inf() ? 0.0f : top));
}

/* Where sums begin: x + -0 is x for every x, -0 too, as it is not for +0. */
SMLA_DEV float4 smla_combine_nothing(void) { return make_float4(-0.0f, -0.0f, -0.0f, -0.0f); }

SMLA_DEV void smla_combine_add(float4 *acc, float4 v, float w)
{
    if (w < 0.0f) return; /* a NaN goes on */
    *acc = make_float4(smla_fma_rn(v.x, w, acc->x), smla_fma_rn(v.y, w, acc->y),
                       smla_fma_rn(v.z, w, acc->z), smla_fma_rn(v.w, w, acc->w));
}

SMLA_DEV void smla_combine_store(const smla_decode_params &p, const smla_combine_row &row, int32_t dim,
                                 float4 acc, const smla_row_stat &stat)
{
    if (stat.l == 0.0f) acc = make_float4(0.0f, 0.0f, 0.0f, 0.0f); /* no keys: 0, not -0 */
    uint16_t *out = smla_out_row(p, row.request, row.row);
    *reinterpret_cast<uint2 *>(out + dim) = smla_bf16x4(acc, smla_out_factor(stat));
    if (dim == 0) smla_store_lse(p, row.request, row.row, stat);
}

/* A warp: one run, slice `unit`. */
SMLA_DEV void smla_combine_few(const smla_decode_params &p, const smla_split_list &list, int32_t unit,
                               int32_t rows)
{
    const int lane = threadIdx.x & 31;
    const int32_t dim = unit % smla_kFewSlices * 128 + 4 * lane;
    const smla_combine_row row = smla_combine_locate(p, list, unit / smla_kFewSlices, rows);
    if (!row.live) return;
    smla_griddepcontrol_wait();
    float4 v[smla_kRunSplits];
    smla_combine_load(p, row, dim, 0, list.count, v);
    const float4 stat = smla_combine_stat(p, row, lane, list.count);
    float m = stat.x;
    SMLA_UNROLL
    for (int d = 16; d > 0; d /= 2) m = fmaxf(m, __shfl_xor_sync(~0u, m, d));
    const float weight = smla_combine_weight(stat, m);
    float l = weight < 0.0f ? 0.0f : stat.y * weight, lq = weight < 0.0f ? 0.0f : stat.z * weight;
    float4 acc = smla_combine_nothing();
    SMLA_UNROLL
    for (int k = 0; k < smla_kRunSplits; ++k) {
        const float w = __shfl_sync(~0u, weight, k);
        if (k < list.count) smla_combine_add(&acc, v[k], w);
    }
    SMLA_UNROLL
    for (int d = 16; d > 0; d /= 2) {
        l += __shfl_xor_sync(~0u, l, d);
        lq += __shfl_xor_sync(~0u, lq, d);
    }
    smla_combine_store(p, row, dim, acc, {m, l, lq});
}

/* A CTA: any number of splits of one, two or four slices of a row. */
SMLA_DEV void smla_combine_many(smla_combine_smem &sm, const smla_decode_params &p,
                                const smla_split_list &list, int32_t task, int32_t rows)
{
    const int t = threadIdx.x, lane = t & 31, warp = t >> 5;
    const int log_halves = smla_combine_log_halves(list.count), halves = 1 << log_halves;
    const int half = t >> 4 & (halves - 1);
    const int32_t unit = (task * smla_kHalfWarps >> log_halves) + (t >> (4 + log_halves));
    const int32_t dim = unit % smla_kManySlices * 64 + 4 * (t & 15);
    const smla_combine_row row = smla_combine_locate(p, list, unit / smla_kManySlices, rows);
    if (!row.live) return; /* all threads alike */
    const int32_t runs = smla_combine_runs(list.count);
    float4 *sums = &sm.acc[t >> (4 + log_halves)][t & 15]; /* those of the other runs lie `next` apart */
    const int next = 16 * smla_kHalfWarps >> log_halves;
    float m = smla_neg_inf(), l = 0.0f, lq = 0.0f; /* of the splits that this thread has weighed */
    smla_griddepcontrol_wait(); /* here, where all that it need not wait for is done */
    for (int32_t first = 0; first < list.count; first += smla_kSplitsAtOnce) {
        const int32_t end = smla_min(first + smla_kSplitsAtOnce, list.count);
        float4 v[smla_kRunSplits];
        smla_combine_load(p, row, dim, first + half * smla_kRunSplits, end, v);
        const float4 stat = smla_combine_stat(p, row, first + t, end);
        float top = stat.x;
        SMLA_UNROLL
        for (int d = 16; d > 0; d /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
        /* All have read the tops of the round or task before, since they have met behind that. */
        if (lane == 0) sm.top[warp] = top;
        __syncthreads();
        top = m;
        SMLA_UNROLL
        for (int w = 0; w < smla_kCombineWarps; ++w) top = fmaxf(top, sm.top[w]);
        const float alpha = m == top ? 1.0f : smla_ex2(m - top), weight = smla_combine_weight(stat, top);
        m = top;
        l = l * alpha + (weight < 0.0f ? 0.0f : stat.y * weight);
        lq = lq * alpha + (weight < 0.0f ? 0.0f : stat.z * weight);
        sm.weight[t] = weight;
        __syncthreads();
        for (int32_t run = half; run < runs; run += halves) {
            const int32_t from = first + run * smla_kRunSplits;
            if (run != half) smla_combine_load(p, row, dim, from, end, v);
            float4 acc = first > 0 ? sums[run * next] : smla_combine_nothing();
            acc = make_float4(acc.x * alpha, acc.y * alpha, acc.z * alpha, acc.w * alpha);
            SMLA_UNROLL
            for (int k = 0; k < smla_kRunSplits; ++k)
                if (from + k < end) smla_combine_add(&acc, v[k], sm.weight[from + k - first]);
            sums[run * next] = acc;
        }
    }
    SMLA_UNROLL
    for (int d = 16; d > 0; d /= 2) {
        l += __shfl_xor_sync(~0u, l, d);
        lq += __shfl_xor_sync(~0u, lq, d);
    }
    if (lane == 0) sm.sums[warp] = make_float2(l, lq);
    __syncthreads();
    if (half != 0) return;
    float4 acc = smla_combine_nothing();
    for (int32_t run = 0; run < runs; ++run)
        smla_combine_add(&acc, sums[run * next], 1.0f);
    smla_row_stat all = {m, 0.0f, 0.0f};
    SMLA_UNROLL
    for (int w = 0; w < smla_kCombineWarps; ++w) {
        all.l += sm.sums[w].x;
        all.lq += sm.sums[w].y;
    }
    smla_combine_store(p, row, dim, acc, all);
}

/* rows: of an item, at most; item_tasks: fixed policy, tasks of an item with the most splits. */
static __global__ void __launch_bounds__(smla_kCombineThreads)
snapmla_combine_kernel(const __grid_constant__ smla_decode_params p, int32_t rows, int64_t item_tasks)
{
    __shared__ smla_combine_smem sm;
    smla_launch_dependents(); /* they wait for the end of this kernel, and so for that of decode */
    /* This kernel may overlap decode up to the wait, which comes last before partial results are read.
       The plan is complete by then: all CTAs of decode have passed their own wait. */
    const int64_t tasks = p.policy.split_blocks > 0 ? p.policy.batch * p.policy.groups * item_tasks
                                                    : smla_combine_count(sm, p, rows);
    int32_t task = blockIdx.x; /* each has 8 KB of the workspace or more: 32 bits are enough */
    int64_t in_list = task;
    while (task < tasks) {
        const smla_split_list list = smla_combine_list(sm, p, item_tasks, &in_list);
        if (in_list < smla_combine_tasks(list.count, rows)) {
            if (list.count > smla_kFewSplits) smla_combine_many(sm, p, list, (int32_t)in_list, rows);
            else smla_combine_few(p, list, (int32_t)in_list * smla_kCombineWarps + (threadIdx.x >> 5), rows);
        }
        in_list = task += gridDim.x;
    }
    smla_griddepcontrol_wait(); /* by every CTA: else this kernel could end before decode has */
}

/* ================================================================================================
   >>merge      one warp a row: parts of attention over disjoint keys
   ============================================================================================== */
struct smla_merge_params {
    const uint16_t *part_out;
    const float *part_lse;
    int64_t part_out_stride, part_lse_stride, rows;
    uint16_t *out;
    float *lse;
    int parts, dim;
};

static __global__ void __launch_bounds__(smla_kRowThreads)
snapmla_merge_kernel(const __grid_constant__ smla_merge_params p)
{
    smla_begin();
    const int64_t row = smla_warp_row();
    if (row >= p.rows) return;
    const int lane = threadIdx.x & 31;
    float top = smla_neg_inf(), sum = 0.0f;
    for (int n = 0; n < p.parts; ++n) top = fmaxf(top, p.part_lse[n * p.part_lse_stride + row]);
    const float shift = top == smla_neg_inf() ? 0.0f : top;
    for (int n = 0; n < p.parts; ++n)
        sum += smla_ex2((p.part_lse[n * p.part_lse_stride + row] - shift) * smla_kLog2e);
    const float inverse = sum == 0.0f ? 0.0f : smla_div_rn(1.0f, sum);
    for (int d = 8 * lane; d < p.dim; d += 8 * 32) {
        float acc[8] = {};
        for (int n = 0; n < p.parts; ++n) {
            const float lse = p.part_lse[n * p.part_lse_stride + row];
            if (lse == smla_neg_inf()) continue; /* its out may be anything */
            const float w = smla_ex2((lse - shift) * smla_kLog2e) * inverse;
            const uint4 v = *reinterpret_cast<const uint4 *>(p.part_out + n * p.part_out_stride
                                                             + row * p.dim + d);
            const uint32_t pair[4] = {v.x, v.y, v.z, v.w};
            SMLA_UNROLL
            for (int i = 0; i < 4; ++i) {
                acc[2 * i] += w * smla_bf16_to_f32(pair[i] & 0xffffu);
                acc[2 * i + 1] += w * smla_bf16_to_f32(pair[i] >> 16);
            }
        }
        *reinterpret_cast<uint4 *>(p.out + row * p.dim + d) =
            make_uint4(smla_bf16x2_from_f32(acc[0], acc[1]), smla_bf16x2_from_f32(acc[2], acc[3]),
                       smla_bf16x2_from_f32(acc[4], acc[5]), smla_bf16x2_from_f32(acc[6], acc[7]));
    }
    __syncwarp(); /* lse may be part_lse itself */
    if (lane == 0 && p.lse != nullptr) p.lse[row] = sum == 0.0f ? top : shift + __logf(sum);
}

/* ================================================================================================
   >>host       defaults, argument checks, geometry, launches
   ============================================================================================== */
#define SMLA_CHECK(condition, code)                                                                \
    do {                                                                                           \
        if (!(condition)) return code;                                                             \
    } while (0)
#define SMLA_TRY(call)                                                                             \
    do {                                                                                           \
        const snapmla_result smla_result_ = (call);                                                \
        if (smla_result_ != SNAPMLA_OK) return smla_result_;                                       \
    } while (0)

static inline bool smla_aligned(const void *p, size_t bytes) { return (uintptr_t)p % bytes == 0; }

static inline int64_t smla_default(int64_t value, int64_t when_zero)
{
    return value == 0 ? when_zero : value;
}

/* The dense stride of `count` things of `stride` elements.  What does not fit becomes INT64_MAX, which
   no check of alignment passes; what is negative is refused by its own check. */
static inline int64_t smla_dense(int64_t count, int64_t stride)
{
    if (count <= 0 || stride <= 0) return 0;
    return stride > INT64_MAX / count ? INT64_MAX : stride * count;
}

/* A CUDA call's error as a result.  The caller's own pending error is left alone, and an error that
   was not there before (`before` = cudaPeekAtLastError()) is not left behind. */
static inline snapmla_result smla_cuda(cudaError_t before, cudaError_t error)
{
    if (error == cudaSuccess) return SNAPMLA_OK;
    if (before == cudaSuccess) (void)cudaGetLastError();
    const bool no_image =
        error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction;
    return no_image ? SNAPMLA_ERROR_DEVICE : SNAPMLA_ERROR_CUDA;
}

/* An attribute of the current device. */
static inline snapmla_result smla_attribute(cudaDeviceAttr attribute, int *value)
{
    const cudaError_t before = cudaPeekAtLastError();
    int device = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(value, attribute, device);
    return smla_cuda(before, error);
}

/* Lets a kernel have more than the 48 KB of shared memory that all get, at its first launch on a
   device.  Not by cudaFuncSetAttribute(), which resets the caller's pending error. */
static inline cudaError_t smla_allow_smem(const void *kernel, size_t bytes)
{
    cudaFuncAttributes have;
    cudaKernel_t handle;
    int device = 0;
    cudaError_t error = cudaFuncGetAttributes(&have, kernel);
    if (error != cudaSuccess || have.maxDynamicSharedSizeBytes >= (int)bytes) return error;
    error = cudaGetDevice(&device);
    if (error == cudaSuccess) error = cudaGetKernel(&handle, kernel);
    if (error == cudaSuccess)
        error = cudaKernelSetAttributeForDevice(
            handle, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes, device);
    return error;
}

static inline snapmla_result smla_launch(const void *kernel, int64_t blocks, int threads,
                                         size_t smem_bytes, cudaStream_t stream, void **arguments)
{
    const cudaError_t before = cudaPeekAtLastError();
    cudaError_t error = cudaSuccess;
    if (smem_bytes > 48 * 1024) error = smla_allow_smem(kernel, smem_bytes);
    if (error == cudaSuccess)
        error = cudaLaunchKernel(kernel, dim3((unsigned)blocks), dim3((unsigned)threads), arguments,
                                 smem_bytes, stream);
    return smla_cuda(before, error);
}

/* The same for a kernel with a griddepcontrol.wait in it: its CTAs start, up to the wait, when those of
   the kernel before have all called smla_launch_dependents() or ended.  Only for code of compute
   capability 9.0 and newer: where there is no such instruction, nothing would be waited for. */
static inline snapmla_result smla_launch_overlapping(const void *kernel, int64_t blocks, int threads,
                                                     size_t smem_bytes, cudaStream_t stream,
                                                     void **arguments)
{
    const cudaError_t before = cudaPeekAtLastError();
    cudaError_t error = cudaSuccess;
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((unsigned)blocks);
    config.blockDim = dim3((unsigned)threads);
    config.dynamicSmemBytes = smem_bytes;
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = 1;
    if (smem_bytes > 48 * 1024) error = smla_allow_smem(kernel, smem_bytes);
    if (error == cudaSuccess) error = cudaLaunchKernelExC(&config, kernel, arguments);
    return smla_cuda(before, error);
}

/* ---- defaults ---- */

static inline void smla_default_dims(int32_t *latent_dim, int32_t *rope_dim)
{
    if (*latent_dim == 0) *latent_dim = smla_kLatent;
    if (*rope_dim == 0) *rope_dim = smla_kRope;
}

static inline snapmla_cache smla_resolve_cache(snapmla_cache c)
{
    if (c.page_size == 0) c.page_size = 64;
    smla_default_dims(&c.latent_dim, &c.rope_dim);
    c.content_page_stride = smla_default(c.content_page_stride, (int64_t)c.page_size * c.latent_dim);
    c.scale_page_stride = smla_default(c.scale_page_stride, c.page_size);
    c.rope_page_stride = smla_default(c.rope_page_stride, (int64_t)c.page_size * c.rope_dim);
    return c;
}

/* The current device runs the Hopper path, and the code for it was compiled in.  Where it was not, the
   kernel is an empty one, which needs hardly any registers. */
static inline bool smla_hopper_usable()
{
    const cudaError_t before = cudaPeekAtLastError();
    cudaFuncAttributes have;
    const cudaError_t error =
        cudaFuncGetAttributes(&have, (const void *)snapmla_decode_hopper_kernel<64, false>);
    return smla_cuda(before, error) == SNAPMLA_OK && have.binaryVersion == 90 && have.numRegs > 64;
}

static inline snapmla_path smla_best_path(int page_size)
{
    return page_size >= smla_kHopperPage && smla_hopper_usable() ? SNAPMLA_PATH_SM90
                                                                 : SNAPMLA_PATH_GENERAL;
}

static inline snapmla_step smla_resolve_step(snapmla_step s)
{
    if (s.page_size == 0) s.page_size = 64;
    smla_default_dims(&s.latent_dim, &s.rope_dim);
    if (s.path == SNAPMLA_PATH_AUTO) s.path = smla_best_path(s.page_size);
    return s;
}

static inline snapmla_decode_desc smla_resolve_decode(snapmla_decode_desc d)
{
    d.step = smla_resolve_step(d.step);
    d.cache = smla_resolve_cache(d.cache);
    const int64_t s_q = d.step.s_q, heads = d.step.heads, latent = d.step.latent_dim;
    const int64_t dims = latent + smla_max(0, d.step.rope_dim);
    d.block_table_stride = smla_default(d.block_table_stride, d.block_table_width);
    d.q_head_stride = smla_default(d.q_head_stride, dims);
    d.q_token_stride = smla_default(d.q_token_stride, smla_dense(heads, d.q_head_stride));
    d.q_batch_stride = smla_default(d.q_batch_stride, smla_dense(s_q, d.q_token_stride));
    d.out_head_stride = smla_default(d.out_head_stride, latent);
    d.out_token_stride = smla_default(d.out_token_stride, smla_dense(heads, d.out_head_stride));
    d.out_batch_stride = smla_default(d.out_batch_stride, smla_dense(s_q, d.out_token_stride));
    d.lse_token_stride = smla_default(d.lse_token_stride, heads);
    d.lse_batch_stride = smla_default(d.lse_batch_stride, smla_dense(s_q, d.lse_token_stride));
    return d;
}

/* ---- checks, on resolved descs, in the order of SNAPMLA_RESULT_LIST ---- */

static inline snapmla_result smla_check_format(int32_t latent_dim, int32_t rope_dim, int32_t page_size)
{
    SMLA_CHECK(latent_dim == smla_kLatent, SNAPMLA_ERROR_LATENT_DIM);
    SMLA_CHECK(rope_dim == smla_kRope, SNAPMLA_ERROR_ROPE_DIM);
    SMLA_CHECK(page_size >= 1 && page_size <= 1024 && (page_size & (page_size - 1)) == 0,
               SNAPMLA_ERROR_PAGE_SIZE);
    return SNAPMLA_OK;
}

/* The part of a step that sizes depend on. */
static inline snapmla_result smla_check_shape(const snapmla_step &s)
{
    SMLA_CHECK(s.batch >= 0, SNAPMLA_ERROR_BATCH);
    SMLA_CHECK(s.s_q >= 0, SNAPMLA_ERROR_S_Q);
    SMLA_CHECK(s.heads >= 0, SNAPMLA_ERROR_HEADS);
    const int64_t rows = (int64_t)s.s_q * s.heads, most = 1 << 30;
    SMLA_CHECK(rows <= most && rows * s.batch <= most, SNAPMLA_ERROR_HEADS);
    SMLA_TRY(smla_check_format(s.latent_dim, s.rope_dim, s.page_size));
    SMLA_CHECK(s.max_seq_len >= 0, SNAPMLA_ERROR_MAX_SEQ_LEN);
    SMLA_CHECK(s.max_seq_len > 0 || s.split_tokens <= 0, SNAPMLA_ERROR_MAX_SEQ_LEN);
    SMLA_CHECK(s.split_tokens >= 0 && s.split_tokens % 128 == 0, SNAPMLA_ERROR_SPLIT_TOKENS);
    SMLA_CHECK(s.mode == SNAPMLA_MODE_DEFAULT || s.mode == SNAPMLA_MODE_PRECISE,
               SNAPMLA_ERROR_MODE);
    SMLA_CHECK(s.path == SNAPMLA_PATH_GENERAL
                   || (s.path == SNAPMLA_PATH_SM90 && s.page_size >= smla_kHopperPage),
               SNAPMLA_ERROR_PATH);
    SMLA_CHECK(s.sm_count >= 0, SNAPMLA_ERROR_SM_COUNT);
    return SNAPMLA_OK;
}

static inline bool smla_nothing_to_do(const snapmla_step &s)
{
    return s.batch == 0 || s.s_q == 0 || s.heads == 0;
}

static inline snapmla_result smla_check_planes(const snapmla_cache &c)
{
    const bool any = c.pages > 0;
    const size_t scale_align = (size_t)smla_min(16, 4 * c.page_size);
    SMLA_CHECK(!any || c.content != NULL, SNAPMLA_ERROR_NULL_CONTENT);
    SMLA_CHECK(!any || c.scale != NULL, SNAPMLA_ERROR_NULL_SCALE);
    SMLA_CHECK(!any || c.rope != NULL, SNAPMLA_ERROR_NULL_ROPE);
    SMLA_CHECK(smla_aligned(c.content, smla_kAlign) && c.content_page_stride % 16 == 0,
               SNAPMLA_ERROR_CONTENT_ALIGN);
    SMLA_CHECK(smla_aligned(c.scale, scale_align)
                   && c.scale_page_stride % (int64_t)(scale_align / 4) == 0,
               SNAPMLA_ERROR_SCALE_ALIGN);
    SMLA_CHECK(smla_aligned(c.rope, smla_kAlign) && c.rope_page_stride % 8 == 0,
               SNAPMLA_ERROR_ROPE_ALIGN);
    SMLA_CHECK(c.content_page_stride >= (int64_t)c.page_size * c.latent_dim,
               SNAPMLA_ERROR_CONTENT_STRIDE);
    SMLA_CHECK(c.scale_page_stride >= c.page_size, SNAPMLA_ERROR_SCALE_STRIDE);
    SMLA_CHECK(c.rope_page_stride >= (int64_t)c.page_size * c.rope_dim, SNAPMLA_ERROR_ROPE_STRIDE);
    return SNAPMLA_OK;
}

static inline snapmla_result smla_check_cache(const snapmla_cache &c)
{
    SMLA_TRY(smla_check_format(c.latent_dim, c.rope_dim, c.page_size));
    SMLA_CHECK(c.pages >= 0, SNAPMLA_ERROR_PAGES);
    return smla_check_planes(c);
}

static inline snapmla_result smla_check_q(const snapmla_decode_desc &d)
{
    const bool any_plane = d.q_content != NULL || d.q_scale != NULL || d.q_rope != NULL;
    const bool planes = d.q_content != NULL && d.q_scale != NULL && d.q_rope != NULL;
    SMLA_CHECK(d.q != NULL || planes, SNAPMLA_ERROR_NULL_Q);
    SMLA_CHECK(d.q == NULL || !any_plane, SNAPMLA_ERROR_Q_TWICE);
    SMLA_CHECK(smla_aligned(d.q, smla_kAlign) && smla_aligned(d.q_content, smla_kAlign)
                   && smla_aligned(d.q_scale, 4) && smla_aligned(d.q_rope, smla_kAlign),
               SNAPMLA_ERROR_Q_ALIGN);
    SMLA_CHECK((d.q_head_stride | d.q_token_stride | d.q_batch_stride) % 8 == 0,
               SNAPMLA_ERROR_Q_ALIGN);
    const int64_t dims = d.step.latent_dim + d.step.rope_dim;
    SMLA_CHECK(d.q_head_stride >= dims && d.q_token_stride >= dims && d.q_batch_stride >= dims,
               SNAPMLA_ERROR_Q_STRIDE);
    return SNAPMLA_OK;
}

static inline snapmla_result smla_check_outputs(const snapmla_decode_desc &d)
{
    const int64_t latent = d.step.latent_dim, heads = d.step.heads;
    SMLA_CHECK(d.out != NULL, SNAPMLA_ERROR_NULL_OUT);
    SMLA_CHECK(smla_aligned(d.out, smla_kAlign)
                   && (d.out_head_stride | d.out_token_stride | d.out_batch_stride) % 8 == 0,
               SNAPMLA_ERROR_OUT_ALIGN);
    SMLA_CHECK(d.out_head_stride >= latent && d.out_token_stride >= latent
                   && d.out_batch_stride >= latent,
               SNAPMLA_ERROR_OUT_STRIDE);
    SMLA_CHECK(d.lse_token_stride >= heads && d.lse_batch_stride >= heads, SNAPMLA_ERROR_LSE_STRIDE);
    return SNAPMLA_OK;
}

/* ---- geometry: how a step lies on the machine ---- */

struct smla_geometry {
    smla_policy policy;
    int32_t tile_rows, tiles, group;
    int64_t slots; /* partial results that may be needed at once */
    int32_t rope_stages;
    snapmla_path path;
};

/* How a decode kernel lies on the device. */
struct smla_shape {
    int32_t tile_rows, max_group;
    int blocks_per_sm;
    int32_t rope_stages; /* general path */
};

static inline void smla_shape_hopper(int64_t rows, snapmla_mode mode, smla_shape *shape)
{
    shape->tile_rows = rows <= 16 || mode == SNAPMLA_MODE_PRECISE ? 16 : rows <= 32 ? 32 : 64;
    shape->max_group = smla_kHopperGroup;
    shape->blocks_per_sm = 1;
    shape->rope_stages = 0;
}

/* The general kernel: tiles of 32 rows where there are more than 16 and the shared memory for them;
   two CTAs an SM where they fit.  Without a device (sm_count given): as on compute capability 9.0. */
static inline snapmla_result smla_shape_general(const snapmla_step &s, smla_shape *shape)
{
    int most = 227 * 1024, per_sm = 228 * 1024;
    const snapmla_result a = smla_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, &most);
    const snapmla_result b = smla_attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor, &per_sm);
    if (s.sm_count == 0) {
        SMLA_TRY(a);
        SMLA_TRY(b);
    }
    shape->max_group = smla_kMaxGroup;
    shape->rope_stages = most >= (int)sizeof(smla_general_smem<2, 2>) ? 2 : 1;
    shape->tile_rows = shape->rope_stages == 2 && (int64_t)s.s_q * s.heads > 16 ? 32 : 16;
    const int block = (int)sizeof(smla_general_smem<1, 2>) + 1024; /* 1 KB is the system's */
    shape->blocks_per_sm = shape->tile_rows == 16 && per_sm >= 2 * block ? 2 : 1;
    return SNAPMLA_OK;
}

static inline snapmla_result smla_plan_geometry(const snapmla_step &s, smla_geometry *g)
{
    int sm_count = s.sm_count;
    smla_shape shape;
    const int64_t rows = (int64_t)s.s_q * s.heads;
    if (sm_count == 0) SMLA_TRY(smla_attribute(cudaDevAttrMultiProcessorCount, &sm_count));
    if (s.path == SNAPMLA_PATH_SM90) smla_shape_hopper(rows, s.mode, &shape);
    else SMLA_TRY(smla_shape_general(s, &shape));
    g->tile_rows = shape.tile_rows;
    g->rope_stages = shape.rope_stages;
    g->path = s.path;
    g->tiles = (int32_t)smla_ceil_div(rows, g->tile_rows);
    g->policy.batch = s.batch;
    g->policy.groups = smla_ceil_div(g->tiles, shape.max_group);
    g->group = (int32_t)smla_ceil_div(g->tiles, g->policy.groups);
    const int64_t blocks = (int64_t)smla_min(sm_count, 4096) * shape.blocks_per_sm;
    g->policy.parts =
        (int)smla_min(smla_max(blocks / g->group, (int64_t)1), (int64_t)smla_kMaxParts);
    g->policy.max_seq_len = s.max_seq_len == 0 ? INT_MAX - smla_kBlock : s.max_seq_len;
    g->policy.split_blocks = s.split_tokens / smla_kBlock;
    g->policy.part_rows = (int)smla_min(rows, (int64_t)g->group * g->tile_rows);
    g->slots = 2 * g->policy.parts;
    if (g->policy.split_blocks > 0)
        g->slots = s.batch * g->policy.groups * smla_ceil_div(s.max_seq_len, s.split_tokens);
    /* 2^40 rows are 2 PB of partial results; beyond, sizes would overflow */
    SMLA_CHECK(g->slots <= ((int64_t)1 << 40) / (g->group * g->tile_rows), SNAPMLA_ERROR_SPLIT_TOKENS);
    return SNAPMLA_OK;
}

/* No item can be cut: the outputs are written directly, and there is nothing to combine. */
static inline bool smla_never_cut(const smla_geometry &g)
{
    if (g.policy.split_blocks > 0)
        return smla_ceil_div(g.policy.max_seq_len, smla_kBlock) <= g.policy.split_blocks;
    return g.policy.parts == 1;
}

/* The plan's memory: parts, then, with split_tokens fixed, the prefix sums of splits. */
static inline size_t smla_plan_size(const smla_geometry &g)
{
    const size_t sums = g.policy.split_blocks > 0 ? (size_t)g.policy.batch + 1 : 0;
    const size_t bytes = g.policy.parts * sizeof(smla_part) + sums * sizeof(int64_t);
    return (bytes + smla_kAlign - 1) / smla_kAlign * smla_kAlign;
}

/* A thread for each request and part, as far as they go. */
static inline int smla_plan_threads(const smla_policy &policy)
{
    const int64_t wanted = smla_max(policy.batch, (int64_t)policy.parts + 1);
    return (int)smla_min((wanted + 31) / 32 * 32, (int64_t)smla_kPlanThreads);
}

static inline smla_plan_params smla_plan_layout(const snapmla_step &s, const smla_geometry &g)
{
    smla_plan_params p;
    p.policy = g.policy;
    p.seq_lens = s.seq_lens;
    p.part = (smla_part *)s.plan;
    p.split_begin = g.policy.split_blocks > 0 ? (int64_t *)(p.part + g.policy.parts) : NULL;
    p.run = (int32_t)smla_ceil_div(g.policy.batch, smla_plan_threads(g.policy));
    return p;
}

static inline size_t smla_partial_rows(const smla_geometry &g)
{
    return (size_t)g.slots * (size_t)g.group * (size_t)g.tile_rows;
}

static inline size_t smla_workspace_size(const smla_geometry &g)
{
    if (smla_never_cut(g)) return 0;
    return smla_partial_rows(g) * (smla_kLatent * sizeof(float) + sizeof(float4));
}

static inline snapmla_result smla_check_plan(const snapmla_step &s, const smla_geometry &g)
{
    SMLA_CHECK(s.seq_lens != NULL, SNAPMLA_ERROR_NULL_SEQ_LENS);
    SMLA_CHECK(s.plan != NULL, SNAPMLA_ERROR_NULL_PLAN);
    SMLA_CHECK(smla_aligned(s.plan, smla_kAlign), SNAPMLA_ERROR_PLAN_ALIGN);
    SMLA_CHECK(s.plan_bytes >= smla_plan_size(g), SNAPMLA_ERROR_PLAN_BYTES);
    SMLA_CHECK(smla_aligned(s.seq_lens, 4), SNAPMLA_ERROR_TABLE_ALIGN);
    return SNAPMLA_OK;
}

static inline snapmla_result smla_check_decode(const snapmla_decode_desc &d, smla_geometry *g)
{
    SMLA_TRY(smla_check_shape(d.step));
    if (smla_nothing_to_do(d.step)) return SNAPMLA_OK;
    SMLA_TRY(smla_check_format(d.cache.latent_dim, d.cache.rope_dim, d.cache.page_size));
    SMLA_CHECK(d.cache.pages >= 0, SNAPMLA_ERROR_PAGES);
    SMLA_TRY(smla_plan_geometry(d.step, g));
    SMLA_TRY(smla_check_plan(d.step, *g));
    SMLA_CHECK(d.step.latent_dim == d.cache.latent_dim && d.step.rope_dim == d.cache.rope_dim
                   && d.step.page_size == d.cache.page_size,
               SNAPMLA_ERROR_STEP_CACHE);
    SMLA_TRY(smla_check_planes(d.cache));
    SMLA_CHECK(d.block_table_width >= 0, SNAPMLA_ERROR_TABLE_WIDTH);
    SMLA_CHECK(d.block_table_width == 0 || d.block_table != NULL, SNAPMLA_ERROR_NULL_BLOCK_TABLE);
    SMLA_CHECK(d.block_table_stride >= d.block_table_width, SNAPMLA_ERROR_TABLE_STRIDE);
    SMLA_CHECK(d.causal == 0 || d.causal == 1, SNAPMLA_ERROR_CAUSAL);
    SMLA_CHECK(d.softmax_scale > 0.0f && d.softmax_scale <= 3.4e38f, SNAPMLA_ERROR_SOFTMAX_SCALE);
    SMLA_TRY(smla_check_q(d));
    SMLA_TRY(smla_check_outputs(d));
    if (smla_workspace_size(*g) > 0) {
        SMLA_CHECK(d.workspace != NULL, SNAPMLA_ERROR_NULL_WORKSPACE);
        SMLA_CHECK(smla_aligned(d.workspace, smla_kAlign), SNAPMLA_ERROR_WORKSPACE_ALIGN);
        SMLA_CHECK(d.workspace_bytes >= smla_workspace_size(*g), SNAPMLA_ERROR_WORKSPACE_BYTES);
    }
    SMLA_CHECK(smla_aligned(d.block_table, 4), SNAPMLA_ERROR_TABLE_ALIGN);
    SMLA_CHECK(smla_aligned(d.lse, 4), SNAPMLA_ERROR_LSE_ALIGN);
    return SNAPMLA_OK;
}

static inline smla_planes smla_device_planes(const snapmla_cache &c)
{
    smla_planes p;
    p.content = (uint8_t *)c.content;
    p.scale = c.scale;
    p.rope = (uint16_t *)c.rope;
    p.content_stride = c.content_page_stride;
    p.scale_stride = c.scale_page_stride;
    p.rope_stride = c.rope_page_stride;
    for (p.page_shift = 0; 1 << p.page_shift < c.page_size;) ++p.page_shift;
    return p;
}

static inline smla_decode_params smla_device_decode(const snapmla_decode_desc &d,
                                                    const smla_geometry &g)
{
    const smla_plan_params plan = smla_plan_layout(d.step, g);
    const int64_t held = d.cache.pages == 0 ? 0 : (int64_t)d.block_table_width * d.cache.page_size;
    smla_decode_params p;
    p.planes = smla_device_planes(d.cache);
    p.block_table = d.block_table;
    p.table_stride = d.block_table_stride;
    p.seq_lens = d.step.seq_lens;
    p.len_limit = (int32_t)smla_min(smla_min(held, (int64_t)g.policy.max_seq_len),
                                    (int64_t)smla_kLongest);
    p.s_q = d.step.s_q;
    p.heads = d.step.heads;
    p.rows = d.step.s_q * d.step.heads;
    p.causal = d.causal;
    p.precise = d.step.mode == SNAPMLA_MODE_PRECISE;
    p.scale_log2e = d.softmax_scale * smla_kLog2e;
    p.q = (const uint16_t *)d.q;
    p.q_batch_stride = d.q_batch_stride;
    p.q_token_stride = d.q_token_stride;
    p.q_head_stride = d.q_head_stride;
    p.q_content = (const uint8_t *)d.q_content;
    p.q_scale = d.q_scale;
    p.q_rope = (const uint16_t *)d.q_rope;
    p.out = (uint16_t *)d.out;
    p.out_batch_stride = d.out_batch_stride;
    p.out_token_stride = d.out_token_stride;
    p.out_head_stride = d.out_head_stride;
    p.lse = d.lse;
    p.lse_batch_stride = d.lse_batch_stride;
    p.lse_token_stride = d.lse_token_stride;
    p.policy = g.policy;
    p.part = plan.part;
    p.split_begin = plan.split_begin;
    p.group = g.group;
    p.tiles = g.tiles;
    p.tile_rows = g.tile_rows;
    p.partial_acc = (float *)d.workspace;
    p.partial_stat = d.workspace == NULL /* where nothing can be cut */
                   ? NULL
                   : (float4 *)(p.partial_acc + smla_partial_rows(g) * smla_kLatent);
    return p;
}

template <int kTiles, int kRopes>
static inline snapmla_result smla_launch_general(const smla_decode_params &p, cudaStream_t stream)
{
    void *arguments[] = {(void *)&p};
    return smla_launch((const void *)snapmla_decode_general_kernel<kTiles, kRopes>,
                       (int64_t)p.policy.parts * p.group, smla_kGeneralThreads,
                       sizeof(smla_general_smem<kTiles, kRopes>), stream, arguments);
}

typedef CUresult (*smla_encode_tiled)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *,
                                      const cuuint64_t *, const cuuint64_t *, const cuuint32_t *,
                                      const cuuint32_t *, CUtensorMapInterleave,
                                      CUtensorMapSwizzle, CUtensorMapL2promotion,
                                      CUtensorMapFloatOOBfill);

/* A plane of pages as a tensor of {row, page size, pages}, read in boxes of {128 bytes, 64, 1}. */
static inline bool smla_hopper_encode_map(smla_encode_tiled encode, CUtensorMap *map, void *plane,
                                          CUtensorMapDataType type, int element_bytes, int row,
                                          int page_size, int64_t pages, int64_t page_stride)
{
    const cuuint64_t dims[3] = {(cuuint64_t)row, (cuuint64_t)page_size, (cuuint64_t)pages};
    const cuuint64_t strides[2] = {(cuuint64_t)row * element_bytes,
                                   (cuuint64_t)page_stride * element_bytes};
    const cuuint32_t box[3] = {(cuuint32_t)(128 / element_bytes), smla_kBlock, 1};
    const cuuint32_t steps[3] = {1, 1, 1};
    return encode(map, type, 3, plane, dims, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                  CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

static inline snapmla_result smla_hopper_make_maps(const smla_planes &planes, int64_t pages,
                                                   smla_hopper_maps *maps)
{
    const cudaError_t before = cudaPeekAtLastError();
    void *entry = NULL;
    cudaDriverEntryPointQueryResult found;
    SMLA_TRY(smla_cuda(before, cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry,
                                                                12000, cudaEnableDefault, &found)));
    SMLA_CHECK(found == cudaDriverEntryPointSuccess, SNAPMLA_ERROR_CUDA);
    const smla_encode_tiled encode = (smla_encode_tiled)entry;
    const int page_size = 1 << planes.page_shift;
    const bool ok =
        smla_hopper_encode_map(encode, &maps->content, planes.content,
                                  CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, smla_kLatent, page_size, pages,
                                  planes.content_stride)
        && smla_hopper_encode_map(encode, &maps->rope, planes.rope,
                                  CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, smla_kRope, page_size, pages,
                                  planes.rope_stride);
    return ok ? SNAPMLA_OK : SNAPMLA_ERROR_CUDA;
}

template <int kRows, bool kPrecise>
static inline snapmla_result smla_launch_hopper_rows(const smla_decode_params &p,
                                                     const smla_hopper_maps &maps,
                                                     cudaStream_t stream)
{
    void *arguments[] = {(void *)&p, (void *)&maps};
    return smla_launch_overlapping((const void *)snapmla_decode_hopper_kernel<kRows, kPrecise>,
                                   (int64_t)p.policy.parts * p.group, smla_hopper_roles<kRows>::kThreads,
                                   sizeof(smla_hopper_smem), stream, arguments);
}

static inline snapmla_result smla_launch_hopper(const smla_decode_params &p, int64_t pages,
                                                cudaStream_t stream)
{
    smla_hopper_maps maps = {}; /* a cache without pages is never read */
    SMLA_CHECK(smla_hopper_usable(), SNAPMLA_ERROR_DEVICE);
    if (pages > 0) SMLA_TRY(smla_hopper_make_maps(p.planes, pages, &maps));
    if (p.precise) return smla_launch_hopper_rows<16, true>(p, maps, stream);
    if (p.tile_rows == 16) return smla_launch_hopper_rows<16, false>(p, maps, stream);
    if (p.tile_rows == 32) return smla_launch_hopper_rows<32, false>(p, maps, stream);
    return smla_launch_hopper_rows<64, false>(p, maps, stream);
}

static inline snapmla_result smla_launch_decode(const smla_decode_params &p, const smla_geometry &g,
                                                int64_t pages, cudaStream_t stream)
{
    if (g.path == SNAPMLA_PATH_SM90) return smla_launch_hopper(p, pages, stream);
    if (g.rope_stages == 1) return smla_launch_general<1, 1>(p, stream);
    return g.tile_rows == 16 ? smla_launch_general<1, 2>(p, stream)
                             : smla_launch_general<2, 2>(p, stream);
}

/* On the Hopper path the CTAs of this kernel start, up to its wait, while decode ends. */
static inline snapmla_result smla_launch_combine(const smla_decode_params &p, bool overlap,
                                                 cudaStream_t stream)
{
    int32_t rows = p.policy.part_rows;
    const int64_t items = p.policy.batch * p.policy.groups;
    int64_t item_tasks = 0, tasks;
    if (p.policy.split_blocks > 0) {
        const int64_t blocks = smla_ceil_div(p.policy.max_seq_len, smla_kBlock);
        const int64_t most = smla_ceil_div(blocks, p.policy.split_blocks);
        item_tasks = smla_combine_tasks((int32_t)smla_min(most, (int64_t)INT_MAX), rows);
        tasks = items * item_tasks;
    } else {
        /* few requests: the last CTAs to start would find nothing to do, and be waited for */
        tasks = smla_min((int64_t)p.policy.parts * smla_combine_tasks(smla_kFewSplits + 1, rows),
                         items * smla_combine_tasks(p.policy.parts, rows));
    }
    const int64_t blocks = smla_min(tasks, 3 * (int64_t)p.policy.parts * p.group); /* 3 fit an SM */
    void *arguments[] = {(void *)&p, &rows, &item_tasks};
    const void *kernel = (const void *)snapmla_combine_kernel;
    return overlap ? smla_launch_overlapping(kernel, blocks, smla_kCombineThreads, 0, stream, arguments)
                   : smla_launch(kernel, blocks, smla_kCombineThreads, 0, stream, arguments);
}

/* The rows of a kernel of the data flow, eight a block.  Its CTAs start, up to the wait that it begins
   with, while the kernel before it ends. */
static inline snapmla_result smla_launch_rows(const void *kernel, void *params, int64_t rows,
                                              int threads, cudaStream_t stream)
{
    void *arguments[] = {params};
    const cudaError_t before = cudaPeekAtLastError();
    cudaFuncAttributes have;
    SMLA_CHECK(rows / smla_kRowsPerBlock < INT_MAX, SNAPMLA_ERROR_TOKENS);
    SMLA_TRY(smla_cuda(before, cudaFuncGetAttributes(&have, kernel)));
    const int64_t blocks = smla_ceil_div(rows, smla_kRowsPerBlock);
    return have.ptxVersion >= 90
         ? smla_launch_overlapping(kernel, blocks, threads, 0, stream, arguments)
         : smla_launch(kernel, blocks, threads, 0, stream, arguments);
}

/* One warp a row. */
static inline snapmla_result smla_launch_warp_rows(const void *kernel, void *params, int64_t rows,
                                                   cudaStream_t stream)
{
    return smla_launch_rows(kernel, params, rows, smla_kRowThreads, stream);
}

/* Half a warp a row. */
static inline snapmla_result smla_launch_half_rows(const void *kernel, void *params, int64_t rows,
                                                   cudaStream_t stream)
{
    return smla_launch_rows(kernel, params, rows, smla_kHalfThreads, stream);
}

/* Latent and rope rows of append and fetch: two tensors, or one with the rope behind the latent. */
struct smla_rows {
    uint16_t *latent, *rope;
    int64_t latent_stride, rope_stride;
    bool vector;
};

static inline snapmla_result smla_check_rows(const void *latent, int64_t latent_stride,
                                             const void *rope, int64_t rope_stride,
                                             const snapmla_cache &c, smla_rows *y)
{
    SMLA_CHECK(latent != NULL, SNAPMLA_ERROR_NULL_LATENT);
    const bool behind = rope == NULL;
    const int64_t least = c.latent_dim + (behind ? c.rope_dim : 0);
    y->latent = (uint16_t *)latent;
    y->latent_stride = smla_default(latent_stride, least);
    y->rope = behind ? y->latent + c.latent_dim : (uint16_t *)rope;
    y->rope_stride = behind ? y->latent_stride : smla_default(rope_stride, c.rope_dim);
    y->vector = smla_aligned(latent, smla_kAlign) && y->latent_stride % 8 == 0
             && smla_aligned(y->rope, 4) && y->rope_stride % 2 == 0;
    SMLA_CHECK(smla_aligned(latent, 2) && smla_aligned(rope, 2), SNAPMLA_ERROR_KEY_ALIGN);
    SMLA_CHECK(y->latent_stride >= least && y->rope_stride >= c.rope_dim, SNAPMLA_ERROR_KEY_STRIDE);
    return SNAPMLA_OK;
}

static inline snapmla_result smla_check_rotation(const snapmla_rotation &r, int32_t rope_dim,
                                                 smla_rotation *y)
{
    const int64_t row = r.sines == NULL ? rope_dim : rope_dim / 2;
    y->positions = r.positions;
    y->cosines = r.cosines;
    y->sines = r.sines == NULL && r.cosines != NULL ? r.cosines + rope_dim / 2 : r.sines;
    y->stride = smla_default(r.table_stride, row);
    y->half_split = r.layout == SNAPMLA_ROPE_HALF_SPLIT;
    SMLA_CHECK(r.positions != NULL || r.cosines == NULL, SNAPMLA_ERROR_NULL_POSITIONS);
    SMLA_CHECK(r.positions == NULL || r.cosines != NULL, SNAPMLA_ERROR_NULL_COSINES);
    SMLA_CHECK(smla_aligned(r.positions, 8) && smla_aligned(r.cosines, 4) && smla_aligned(r.sines, 4),
               SNAPMLA_ERROR_ROTATION_ALIGN);
    SMLA_CHECK(y->stride >= row, SNAPMLA_ERROR_ROTATION_STRIDE);
    SMLA_CHECK(r.layout == SNAPMLA_ROPE_INTERLEAVED || r.layout == SNAPMLA_ROPE_HALF_SPLIT,
               SNAPMLA_ERROR_ROTATION_LAYOUT);
    return SNAPMLA_OK;
}

static inline snapmla_result smla_check_norm(const snapmla_norm &n, smla_norm_params *y)
{
    y->weight = n.weight;
    y->eps = n.eps == 0.0f ? 1e-6f : n.eps;
    y->f32 = n.weight_type == SNAPMLA_NUMBER_F32;
    SMLA_CHECK(n.weight_type == SNAPMLA_NUMBER_BF16 || n.weight_type == SNAPMLA_NUMBER_F32,
               SNAPMLA_ERROR_NORM_TYPE);
    SMLA_CHECK(smla_aligned(n.weight, smla_kAlign), SNAPMLA_ERROR_NORM_ALIGN);
    SMLA_CHECK(n.eps >= 0.0f && n.eps <= 3.402823466e38f, SNAPMLA_ERROR_NORM_EPS);
    return SNAPMLA_OK;
}

static inline int smla_log2(int32_t power_of_two)
{
    int n = 0;
    while (1 << n < power_of_two) ++n;
    return n;
}

/* Rows of fetch by ranges of requests. */
static inline snapmla_result smla_check_ranges(const snapmla_fetch_desc &d, const snapmla_cache &c,
                                               smla_fetch_params *p)
{
    p->table_stride = smla_default(d.block_table_stride, d.block_table_width);
    p->table_tokens = (int64_t)d.block_table_width * c.page_size;
    SMLA_CHECK(d.block_table_width >= 0, SNAPMLA_ERROR_TABLE_WIDTH);
    SMLA_CHECK(p->table_stride >= d.block_table_width, SNAPMLA_ERROR_TABLE_STRIDE);
    return SNAPMLA_OK;
}

/* All layers of one side of a copy: alike in everything but pointers.  *c is the first, resolved. */
static inline snapmla_result smla_check_layers(const snapmla_cache *layers, int32_t count,
                                               snapmla_cache *c)
{
    *c = smla_resolve_cache(layers[0]);
    for (int32_t l = 0; l < count; ++l) SMLA_TRY(smla_check_cache(smla_resolve_cache(layers[l])));
    for (int32_t l = 1; l < count; ++l) {
        const snapmla_cache x = smla_resolve_cache(layers[l]);
        SMLA_CHECK(x.page_size == c->page_size && x.latent_dim == c->latent_dim
                       && x.rope_dim == c->rope_dim && x.pages == c->pages
                       && x.content_page_stride == c->content_page_stride
                       && x.scale_page_stride == c->scale_page_stride
                       && x.rope_page_stride == c->rope_page_stride,
                   SNAPMLA_ERROR_LAYERS_DIFFER);
    }
    return SNAPMLA_OK;
}

static inline smla_plane_pointers smla_pointers(const snapmla_cache &c)
{
    return {(uint8_t *)c.content, c.scale, (uint16_t *)c.rope};
}

/* ================================================================================================
   >>public     the functions of >>api, in the same order
   ============================================================================================== */
#ifdef __cplusplus
extern "C" {
#endif

SNAPMLA_API int snapmla_version(void) { return SNAPMLA_VERSION; }

SNAPMLA_API const char *snapmla_result_string(snapmla_result result)
{
    switch ((int)result) {
#define SMLA_RESULT_CASE(name, value, text)                                                        \
    case value: return text;
        SNAPMLA_RESULT_LIST(SMLA_RESULT_CASE)
#undef SMLA_RESULT_CASE
    default: return "not a snapmla result";
    }
}

SNAPMLA_API snapmla_result snapmla_device_supported(int device, snapmla_path *path)
{
    const cudaError_t before = cudaPeekAtLastError();
    cudaFuncAttributes have;
    int count = 0, major = 0, current = 0;
    SMLA_TRY(smla_cuda(before, cudaGetDeviceCount(&count)));
    SMLA_CHECK(device >= 0 && device < count, SNAPMLA_ERROR_CUDA); /* asking would set an error */
    SMLA_TRY(smla_cuda(before,
                       cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device)));
    SMLA_CHECK(major >= 8, SNAPMLA_ERROR_DEVICE);
    SMLA_TRY(smla_cuda(before, cudaGetDevice(&current)));
    if (current == device) /* is there code for it? */
        SMLA_TRY(smla_cuda(before, cudaFuncGetAttributes(&have, (const void *)snapmla_plan_kernel)));
    if (path != NULL)
        *path = current == device ? smla_best_path(smla_kHopperPage)
                                  : SNAPMLA_PATH_GENERAL;
    return SNAPMLA_OK;
}

SNAPMLA_API snapmla_result snapmla_resolve(const snapmla_decode_desc *desc,
                                           snapmla_decode_desc *resolved)
{
    SMLA_CHECK(desc != NULL && resolved != NULL, SNAPMLA_ERROR_NULL_DESC);
    snapmla_decode_desc d = smla_resolve_decode(*desc);
    smla_geometry g = {};
    SMLA_TRY(smla_check_decode(d, &g));
    if (d.step.sm_count == 0)
        SMLA_TRY(smla_attribute(cudaDevAttrMultiProcessorCount, &d.step.sm_count));
    *resolved = d;
    return SNAPMLA_OK;
}

SNAPMLA_API snapmla_result snapmla_quantize_q(const snapmla_quantize_q_desc *desc)
{
    SMLA_CHECK(desc != NULL, SNAPMLA_ERROR_NULL_DESC);
    snapmla_quantize_q_desc d = *desc;
    smla_default_dims(&d.latent_dim, &d.rope_dim);
    const int64_t dims = (int64_t)d.latent_dim + (d.rope == NULL ? d.rope_dim : 0);
    d.q_head_stride = smla_default(d.q_head_stride, dims);
    d.q_token_stride = smla_default(d.q_token_stride, smla_dense(d.heads, d.q_head_stride));
    if (d.rope == NULL) {
        d.rope_head_stride = d.q_head_stride;
        d.rope_token_stride = d.q_token_stride;
    }
    d.rope_head_stride = smla_default(d.rope_head_stride, d.rope_dim);
    d.rope_token_stride = smla_default(d.rope_token_stride, smla_dense(d.heads, d.rope_head_stride));
    SMLA_CHECK(d.heads >= 0, SNAPMLA_ERROR_HEADS);
    SMLA_CHECK(d.tokens >= 0, SNAPMLA_ERROR_TOKENS);
    SMLA_TRY(smla_check_format(d.latent_dim, d.rope_dim, 64));
    if (d.tokens == 0 || d.heads == 0) return SNAPMLA_OK;
    SMLA_CHECK(d.tokens <= INT64_MAX / d.heads, SNAPMLA_ERROR_TOKENS);
    SMLA_CHECK(d.q != NULL && d.q_content != NULL && d.q_scale != NULL && d.q_rope != NULL,
               SNAPMLA_ERROR_NULL_Q);
    SMLA_CHECK(smla_aligned(d.q, smla_kAlign) && smla_aligned(d.q_content, smla_kAlign)
                   && smla_aligned(d.q_scale, 4) && smla_aligned(d.q_rope, smla_kAlign)
                   && smla_aligned(d.rope, smla_kAlign)
                   && (d.q_head_stride | d.q_token_stride | d.rope_head_stride
                       | d.rope_token_stride) % 8 == 0,
               SNAPMLA_ERROR_Q_ALIGN);
    SMLA_CHECK(d.q_head_stride >= dims && d.q_token_stride >= dims
                   && d.rope_head_stride >= d.rope_dim && d.rope_token_stride >= d.rope_dim,
               SNAPMLA_ERROR_Q_STRIDE);
    smla_quantize_q_params p;
    SMLA_TRY(smla_check_rotation(d.rotation, d.rope_dim, &p.rotation));
    p.q = (const uint16_t *)d.q;
    p.rope_in = d.rope == NULL ? p.q + d.latent_dim : (const uint16_t *)d.rope;
    p.token_stride = d.q_token_stride;
    p.head_stride = d.q_head_stride;
    p.rope_token_stride = d.rope_token_stride;
    p.rope_head_stride = d.rope_head_stride;
    p.rows = d.tokens * d.heads;
    p.content = (uint8_t *)d.q_content;
    p.scale = d.q_scale;
    p.rope = (uint16_t *)d.q_rope;
    p.heads = d.heads;
    return smla_launch_warp_rows((const void *)snapmla_quantize_q_kernel, &p, p.rows, d.stream);
}

SNAPMLA_API snapmla_result snapmla_append(const snapmla_append_desc *desc)
{
    SMLA_CHECK(desc != NULL, SNAPMLA_ERROR_NULL_DESC);
    const snapmla_cache c = smla_resolve_cache(desc->cache);
    SMLA_CHECK(desc->tokens >= 0, SNAPMLA_ERROR_TOKENS);
    SMLA_TRY(smla_check_cache(c));
    if (desc->tokens == 0) return SNAPMLA_OK;
    smla_rows rows;
    smla_append_params p;
    SMLA_TRY(smla_check_rows(desc->latent, desc->latent_stride, desc->rope, desc->rope_stride, c,
                             &rows));
    SMLA_CHECK(desc->slots != NULL, SNAPMLA_ERROR_NULL_SLOTS);
    SMLA_TRY(smla_check_rotation(desc->rotation, c.rope_dim, &p.rotation));
    SMLA_TRY(smla_check_norm(desc->norm, &p.norm));
    SMLA_CHECK(smla_aligned(desc->slots, 8), SNAPMLA_ERROR_TABLE_ALIGN);
    p.planes = smla_device_planes(c);
    p.latent = rows.latent;
    p.rope = rows.rope;
    p.latent_stride = rows.latent_stride;
    p.rope_stride = rows.rope_stride;
    p.tokens = desc->tokens;
    p.slots = desc->slots;
    p.vector = rows.vector;
    if (p.norm.weight == NULL && p.rotation.positions == NULL)
        return smla_launch_warp_rows((const void *)snapmla_append_kernel, &p, p.tokens, desc->stream);
    return smla_launch_half_rows((const void *)snapmla_append_raw_kernel, &p, p.tokens, desc->stream);
}

SNAPMLA_API snapmla_result snapmla_fetch(const snapmla_fetch_desc *desc)
{
    SMLA_CHECK(desc != NULL, SNAPMLA_ERROR_NULL_DESC);
    const snapmla_cache c = smla_resolve_cache(desc->cache);
    SMLA_CHECK(desc->batch >= 0, SNAPMLA_ERROR_BATCH);
    SMLA_CHECK(desc->tokens >= 0, SNAPMLA_ERROR_TOKENS);
    SMLA_TRY(smla_check_cache(c));
    if (desc->tokens == 0) return SNAPMLA_OK;
    smla_rows rows;
    smla_fetch_params p = {};
    SMLA_TRY(smla_check_ranges(*desc, c, &p));
    SMLA_TRY(smla_check_rows(desc->latent, desc->latent_stride, desc->rope, desc->rope_stride, c,
                             &rows));
    SMLA_CHECK(desc->slots != NULL || desc->block_table != NULL, SNAPMLA_ERROR_NULL_SLOTS);
    SMLA_CHECK(desc->slots == NULL || desc->block_table == NULL, SNAPMLA_ERROR_SLOTS_TWICE);
    SMLA_CHECK(desc->block_table == NULL || desc->row_starts != NULL, SNAPMLA_ERROR_NULL_ROW_STARTS);
    SMLA_CHECK(smla_aligned(desc->slots, 8) && smla_aligned(desc->block_table, 4)
                   && smla_aligned(desc->row_starts, 4) && smla_aligned(desc->first, 4),
               SNAPMLA_ERROR_TABLE_ALIGN);
    p.planes = smla_device_planes(c);
    p.slots = desc->slots;
    p.block_table = desc->block_table;
    p.row_starts = desc->row_starts;
    p.first = desc->first;
    p.batch = desc->batch;
    p.latent = rows.latent;
    p.rope = rows.rope;
    p.latent_stride = rows.latent_stride;
    p.rope_stride = rows.rope_stride;
    p.tokens = desc->tokens;
    p.vector = rows.vector;
    return smla_launch_half_rows((const void *)snapmla_fetch_kernel, &p, p.tokens, desc->stream);
}

SNAPMLA_API snapmla_result snapmla_copy_pages(const snapmla_copy_pages_desc *desc)
{
    SMLA_CHECK(desc != NULL, SNAPMLA_ERROR_NULL_DESC);
    const snapmla_copy_pages_desc d = *desc;
    SMLA_CHECK(d.count >= 0, SNAPMLA_ERROR_TOKENS);
    SMLA_CHECK(d.layers >= 0, SNAPMLA_ERROR_LAYERS);
    if (d.layers == 0 || d.count == 0) return SNAPMLA_OK;
    SMLA_CHECK(d.source != NULL && d.destination != NULL, SNAPMLA_ERROR_NULL_SOURCE);
    snapmla_cache from, to;
    SMLA_TRY(smla_check_layers(d.source, d.layers, &from));
    SMLA_TRY(smla_check_layers(d.destination, d.layers, &to));
    SMLA_CHECK(from.page_size == to.page_size && from.latent_dim == to.latent_dim
                   && from.rope_dim == to.rope_dim,
               SNAPMLA_ERROR_COPY_FORMAT);
    SMLA_CHECK(d.pairs != NULL, SNAPMLA_ERROR_NULL_PAIRS);
    SMLA_CHECK(smla_aligned(d.pairs, 8), SNAPMLA_ERROR_TABLE_ALIGN);
    smla_copy_params p = {};
    p.from_strides = smla_device_planes(from);
    p.to_strides = smla_device_planes(to);
    p.pairs = (const int2 *)d.pairs;
    p.count = d.count;
    p.piece_shift = smla_log2(smla_max(from.page_size / smla_kCopyTokens, 1));
    SMLA_CHECK(d.count <= INT64_MAX / (smla_kCopyLayers << p.piece_shift), SNAPMLA_ERROR_TOKENS);
    for (int32_t first = 0; first < d.layers; first += smla_kCopyLayers) {
        const int32_t layers = smla_min(smla_kCopyLayers, d.layers - first);
        for (int32_t l = 0; l < layers; ++l) {
            p.from[l] = smla_pointers(d.source[first + l]);
            p.to[l] = smla_pointers(d.destination[first + l]);
        }
        p.pieces = (d.count * layers) << p.piece_shift;
        SMLA_TRY(smla_launch_warp_rows((const void *)snapmla_copy_pages_kernel, &p, p.pieces, d.stream));
    }
    return SNAPMLA_OK;
}

SNAPMLA_API snapmla_result snapmla_import(const snapmla_import_desc *desc)
{
    SMLA_CHECK(desc != NULL, SNAPMLA_ERROR_NULL_DESC);
    const snapmla_import_desc d = *desc;
    const snapmla_cache c = smla_resolve_cache(d.cache);
    const bool records = d.format == SNAPMLA_SOURCE_RECORD_656;
    const int64_t unit = records ? 1 : 2, row = records ? smla_kRecordBytes : smla_kLatent + smla_kRope;
    const int64_t page_size = d.source_page_size == 0 ? c.page_size : d.source_page_size;
    const int64_t row_stride = smla_default(d.source_row_stride, row);
    const int64_t page_stride = smla_default(d.source_page_stride, smla_dense(page_size, row_stride));
    SMLA_CHECK(d.tokens >= 0, SNAPMLA_ERROR_TOKENS);
    SMLA_TRY(smla_check_cache(c));
    if (d.tokens == 0) return SNAPMLA_OK;
    const bool in_order = d.slots == NULL && d.source_slots == NULL;
    SMLA_CHECK(!in_order || d.tokens <= smla_dense(c.pages, c.page_size), SNAPMLA_ERROR_TOKENS);
    SMLA_CHECK(d.source != NULL, SNAPMLA_ERROR_NULL_SOURCE);
    SMLA_CHECK(records || d.format == SNAPMLA_SOURCE_BF16, SNAPMLA_ERROR_SOURCE_FORMAT);
    SMLA_CHECK(page_size >= 1 && page_size <= 1024 && (page_size & (page_size - 1)) == 0,
               SNAPMLA_ERROR_SOURCE_PAGE_SIZE);
    SMLA_CHECK(smla_aligned(d.source, records ? 4 : 2)
                   && (!records || (row_stride | page_stride) % 4 == 0),
               SNAPMLA_ERROR_SOURCE_ALIGN);
    SMLA_CHECK(row_stride >= row && row_stride <= INT64_MAX / 4096
                   && page_stride >= (page_size - 1) * row_stride + row
                   && page_stride <= INT64_MAX / 4096,
               SNAPMLA_ERROR_SOURCE_STRIDE);
    SMLA_CHECK(smla_aligned(d.source_slots, 8) && smla_aligned(d.slots, 8), SNAPMLA_ERROR_TABLE_ALIGN);
    smla_import_params p;
    p.planes = smla_device_planes(c);
    p.source = (const uint8_t *)d.source;
    p.row_bytes = row_stride * unit;
    p.page_gap = (page_stride - page_size * row_stride) * unit;
    p.tokens = d.tokens;
    p.source_slots = d.source_slots;
    p.slots = d.slots;
    p.source_shift = smla_log2((int32_t)page_size);
    p.vector = smla_aligned(d.source, smla_kAlign) && (p.row_bytes | p.page_gap) % smla_kAlign == 0;
    return smla_launch_half_rows(records ? (const void *)snapmla_import_kernel<true>
                                         : (const void *)snapmla_import_kernel<false>,
                                 &p, p.tokens, d.stream);
}

SNAPMLA_API snapmla_result snapmla_plan_bytes(const snapmla_step *step, size_t *bytes)
{
    SMLA_CHECK(step != NULL && bytes != NULL, SNAPMLA_ERROR_NULL_DESC);
    const snapmla_step s = smla_resolve_step(*step);
    smla_geometry g = {};
    SMLA_TRY(smla_check_shape(s));
    if (smla_nothing_to_do(s)) {
        *bytes = 0;
        return SNAPMLA_OK;
    }
    SMLA_TRY(smla_plan_geometry(s, &g));
    *bytes = smla_plan_size(g);
    return SNAPMLA_OK;
}

SNAPMLA_API snapmla_result snapmla_plan(const snapmla_step *step)
{
    SMLA_CHECK(step != NULL, SNAPMLA_ERROR_NULL_DESC);
    const snapmla_step s = smla_resolve_step(*step);
    smla_geometry g = {};
    SMLA_TRY(smla_check_shape(s));
    if (smla_nothing_to_do(s)) return SNAPMLA_OK;
    SMLA_TRY(smla_plan_geometry(s, &g));
    SMLA_TRY(smla_check_plan(s, g));
    smla_plan_params p = smla_plan_layout(s, g);
    void *arguments[] = {&p};
    return smla_launch((const void *)snapmla_plan_kernel, 1, smla_plan_threads(g.policy), 0, s.stream,
                       arguments);
}

SNAPMLA_API snapmla_result snapmla_decode_workspace(const snapmla_step *step, size_t *bytes)
{
    SMLA_CHECK(step != NULL && bytes != NULL, SNAPMLA_ERROR_NULL_DESC);
    const snapmla_step s = smla_resolve_step(*step);
    smla_geometry g = {};
    SMLA_TRY(smla_check_shape(s));
    if (smla_nothing_to_do(s)) {
        *bytes = 0;
        return SNAPMLA_OK;
    }
    SMLA_TRY(smla_plan_geometry(s, &g));
    *bytes = smla_workspace_size(g);
    return SNAPMLA_OK;
}

SNAPMLA_API snapmla_result snapmla_decode(const snapmla_decode_desc *desc)
{
    SMLA_CHECK(desc != NULL, SNAPMLA_ERROR_NULL_DESC);
    const snapmla_decode_desc d = smla_resolve_decode(*desc);
    smla_geometry g = {};
    SMLA_TRY(smla_check_decode(d, &g));
    if (smla_nothing_to_do(d.step)) return SNAPMLA_OK;
    const smla_decode_params p = smla_device_decode(d, g);
    SMLA_TRY(smla_launch_decode(p, g, d.cache.pages, d.step.stream));
    if (smla_never_cut(g) || g.policy.max_seq_len <= smla_kBlock) return SNAPMLA_OK;
    return smla_launch_combine(p, g.path == SNAPMLA_PATH_SM90, d.step.stream);
}

SNAPMLA_API snapmla_result snapmla_merge(const snapmla_merge_desc *desc)
{
    SMLA_CHECK(desc != NULL, SNAPMLA_ERROR_NULL_DESC);
    snapmla_merge_desc d = *desc;
    if (d.dim == 0) d.dim = smla_kLatent;
    SMLA_CHECK(d.rows >= 0, SNAPMLA_ERROR_TOKENS);
    SMLA_CHECK(d.dim > 0 && d.dim % 8 == 0, SNAPMLA_ERROR_LATENT_DIM);
    if (d.rows == 0) return SNAPMLA_OK;
    SMLA_CHECK(d.rows <= INT64_MAX / d.dim, SNAPMLA_ERROR_TOKENS);
    d.part_out_stride = smla_default(d.part_out_stride, d.rows * d.dim);
    d.part_lse_stride = smla_default(d.part_lse_stride, d.rows);
    SMLA_CHECK(d.part_out != NULL && d.out != NULL, SNAPMLA_ERROR_NULL_OUT);
    SMLA_CHECK(smla_aligned(d.part_out, smla_kAlign) && smla_aligned(d.out, smla_kAlign)
                   && d.part_out_stride % 8 == 0,
               SNAPMLA_ERROR_OUT_ALIGN);
    SMLA_CHECK(d.part_lse != NULL, SNAPMLA_ERROR_NULL_LSE);
    SMLA_CHECK(d.parts > 0, SNAPMLA_ERROR_PARTS);
    SMLA_CHECK(d.part_out_stride >= d.rows * d.dim && d.part_lse_stride >= d.rows,
               SNAPMLA_ERROR_PART_STRIDE);
    SMLA_CHECK(smla_aligned(d.part_lse, 4) && smla_aligned(d.lse, 4), SNAPMLA_ERROR_LSE_ALIGN);
    smla_merge_params p;
    p.part_out = (const uint16_t *)d.part_out;
    p.part_lse = d.part_lse;
    p.part_out_stride = d.part_out_stride;
    p.part_lse_stride = d.part_lse_stride;
    p.rows = d.rows;
    p.out = (uint16_t *)d.out;
    p.lse = d.lse;
    p.parts = d.parts;
    p.dim = d.dim;
    return smla_launch_warp_rows((const void *)snapmla_merge_kernel, &p, p.rows, d.stream);
}

#ifdef __cplusplus
}
#endif

/* ================================================================================================
   >>cleanup    nothing private outlives the header
   ============================================================================================== */
#undef SMLA_DEV
#undef SMLA_HD
#undef SMLA_CONST
#undef SMLA_UNROLL
#undef SMLA_ACC8
#undef SMLA_ACC16
#undef SMLA_ACC32
#undef SMLA_WGMMA_FORMS
#undef SMLA_D8
#undef SMLA_D16
#undef SMLA_D32
#undef SMLA_CHECK
#undef SMLA_TRY

#endif /* SNAPMLA_IMPLEMENTATION */

/*
MIT License

Copyright (c) 2026 The snapmla authors

Permission is hereby granted, free of charge, to any person obtaining a copy of this software and
associated documentation files (the "Software"), to deal in the Software without restriction,
including without limitation the rights to use, copy, modify, merge, publish, distribute, sublicense,
and/or sell copies of the Software, and to permit persons to whom the Software is furnished to do so,
subject to the following conditions:

The above copyright notice and this permission notice shall be included in all copies or substantial
portions of the Software.

THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT NOT
LIMITED TO THE WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT.
IN NO EVENT SHALL THE AUTHORS OR COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER
LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR OTHERWISE, ARISING FROM, OUT OF OR IN CONNECTION
WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE SOFTWARE.
*/
