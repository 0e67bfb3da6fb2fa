/* tiny_mla.h - what the parts of the tiny MLA example share: the model, the cache formats, and the
   interface that the CPU and the GPU implement.

   Multi-head latent attention (MLA) caches no keys and values.  It caches, for each token, one
   latent vector c of 512 numbers and one rotated key k_rope of 64 that all heads share.  The
   matrices that would turn c into the keys and values of head h are applied to the other side of
   each product instead ("absorbed"), so that attention runs on the cache as it is:

       query of head h     qa = W_UK[h]^T q_nope        [512]      and q_rope, rotated     [64]
       score of token t    scale * (qa . c[t] + q_rope . k_rope[t])
       weights             p = softmax(scores)
       output of head h    o = sum_t p[t] c[t]          [512]      then  v = W_UV[h] o     [32]

   A query row and a key row are therefore alike: 512 latent numbers, then 64 rope numbers.  The
   cache formats that this example compares differ only in how they keep the 576 numbers of a key:

       fp32      4 bytes each                                                       2304 B
       bf16      2 bytes each                                                       1152 B
       snap      latent in e4m3 with a scale per token, rope in bf16                 644 B
       naive     everything in e4m3 with one calibrated scale for the layer          576 B
*/
#ifndef TINY_MLA_H
#define TINY_MLA_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum {
    LATENT = 512, /* the widths that the SnapMLA format is made for */
    ROPE = 64,
    ROW = LATENT + ROPE,
    VOCAB = 256, /* a token is a byte; byte 0 begins every sequence */
    PAGE = 64,   /* tokens in a page of the cache */
    MAX_LAYERS = 64,
    ERROR_CHARS = 1024
};

/* ---------------------------------------------------------------------------------------------
   The model: matrices are f32, row-major [out, in], as in the file unless noted */

typedef struct layer_weights {
    float *attention_norm; /* [hidden] */
    float *q_proj;         /* [heads * (nope + ROPE), hidden]: head by head, nope then rope */
    float *kv_a_proj;      /* [ROW, hidden]: latent, then rope */
    float *latent_norm;    /* [LATENT] */
    float *w_uk;           /* [heads, nope, LATENT], from kv_b_proj */
    float *w_uv;           /* [heads, v_dim, LATENT], from kv_b_proj */
    float *o_proj;         /* [hidden, heads * v_dim] */
    float *mlp_norm;       /* [hidden] */
    float *gate_proj;      /* [mlp, hidden] */
    float *up_proj;        /* [mlp, hidden] */
    float *down_proj;      /* [hidden, mlp] */
} layer_weights;

typedef struct model {
    int hidden, mlp, layers, heads, nope, v_dim;
    int max_context;
    double norm_eps, rope_theta;
    float softmax_scale; /* (nope + ROPE)^-0.5 */
    float *embedding;    /* [VOCAB, hidden], the output matrix as well */
    float *final_norm;   /* [hidden] */
    layer_weights layer[MAX_LAYERS];
    float *rope_cos; /* [max_context, ROPE / 2] */
    float *rope_sin;
    int64_t parameters;
} model;

/* Read DIR/config.json and DIR/model.safetensors.  0, or -1 with one line in error[ERROR_CHARS]
   that names the file and the field. */
int model_load(model *m, const char *dir, char *error);
void model_free(model *m);

/* A whole file as bytes, with a 0 behind them; NULL with a line in error. */
char *read_file(const char *path, size_t *size, char *error);

/* ---------------------------------------------------------------------------------------------
   The cache formats */

typedef enum cache_format {
    CACHE_FP32,
    CACHE_BF16,
    CACHE_SNAP,
    CACHE_NAIVE,
    CACHE_FORMATS
} cache_format;

/* Largest magnitudes seen in each layer; the naive format takes its scales from them. */
typedef struct calibration {
    float key_absmax[MAX_LAYERS];
    float query_absmax[MAX_LAYERS];
} calibration;

/* Which page of the cache holds which tokens: table[request * width + t / PAGE], a random
   permutation as in a server that has been running for a while. */
void shuffled_block_table(int32_t *table, int requests, int width);

/* ---------------------------------------------------------------------------------------------
   A backend runs sessions.  A session is a batch of requests that decode in step, one token each,
   with a paged cache of one format in every layer. */

typedef struct session session;

typedef struct backend {
    char label[160];  /* what runs, for people */
    int threads;      /* sessions that run well at the same time, one thread each */
    int max_requests; /* a good upper limit for the batch of a session */
    int score_bytes;  /* what can be scored, and in windows of what size, in about a minute */
    int score_context;
    void *state;

    /* `context` is the most tokens that a request will hold.  `c` is read by CACHE_NAIVE only.
       NULL when memory runs out. */
    session *(*open)(const struct backend *b, cache_format format, const calibration *c,
                     int requests, int context);
    /* Feed tokens[requests] and write logits[requests][VOCAB] for what follows.  0, or -1 when the
       device failed or the context is full. */
    int (*step)(session *s, const uint8_t *tokens, float *logits);
    /* What request 0 of a CACHE_BF16 session has shown so far. */
    int (*calibrate)(session *s, calibration *c);
    void (*close)(session *s);
    void (*free)(struct backend *b);
} backend;

/* 0, or -1 when memory runs out. */
int cpu_backend(backend *b, const model *m);

/* NULL, or one line saying why no GPU is used.  Only in builds with TINY_MLA_GPU. */
const char *gpu_backend(backend *b, const model *m);

#ifdef __cplusplus
}
#endif
#endif
