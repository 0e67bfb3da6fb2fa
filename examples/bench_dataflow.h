/* bench_dataflow.h - what bench.cu measures of the kernels around attention: quantize_q, append,
   fetch, copies of pages and imports; their check and their times.  Include after bench_util.h.

   Rows of N(0,1), RoPE tables of 65536 positions, which are those of requests of 4096 tokens or,
   of quantize_q and where that is said of an append, lie at random; slots and pages in random order
   of a pool of a million tokens, and every launch takes the next part of it, so that little of what
   a launch needs is still in L2.  Launches queue behind a kernel that waits; time is that of 20
   (small sizes: 200) launches by one pair of events, the best of 5 rounds after one that warms up.

   Every call is held to the CPU reference, bit for bit, before its launches are timed and after. */
#ifndef BENCH_DATAFLOW_H
#define BENCH_DATAFLOW_H

enum { RECORD = 656, PAGE = 64, HEADS = 128 };
enum { POOL = 1 << 20, MOST = POOL / 2, POSITIONS = 1 << 16, SAMPLES = 96 };
enum { TABLE = 16 };    /* pages of a request */
enum { PROMPT = 4096 }; /* tokens of a request that is appended at once */

/* What calls read and write, a million tokens of each. */
typedef struct flow_pool {
    uint16_t *rows, *out;     /* [POOL, DIM] */
    uint8_t *records;         /* [POOL, RECORD] */
    snapmla_cache from, to;
    float *angles, *weight;   /* [POSITIONS, ROPE], [LATENT] */
    int64_t *slots;           /* [POOL] */
    int64_t *positions;       /* [POOL]: at random */
    int64_t *prompts;         /* [POOL]: of one request of PROMPT tokens after another */
    int32_t *pairs, *table;   /* [POOL / PAGE, 2]; [POOL / PAGE / TABLE, TABLE] */
    int32_t *starts, *many;   /* one row a request, or all tokens of its pages */
    uint8_t *q_content;
    float *q_scale;
    uint16_t *q_rope;
} flow_pool;

static flow_pool g_flow;

/* ================================================================================================
   kernels
   ============================================================================================== */
/* Any codes but NaN, scales near 1 / 100, the RoPE part of `rows`.  A block a record. */
static __global__ void flow_fill_records(uint8_t *records, const uint16_t *rows)
{
    const uint64_t r = blockIdx.x;
    uint8_t *record = records + r * RECORD;
    float *scales = (float *)(record + LATENT);
    uint16_t *rope = (uint16_t *)(record + LATENT + 16);
    for (int i = threadIdx.x; i < LATENT; i += blockDim.x) {
        const uint8_t code = (uint8_t)mix64(r * LATENT + i);
        record[i] = (code & 0x7f) == 0x7f ? 0 : code;
    }
    if (threadIdx.x < 4)
        scales[threadIdx.x] = 0.01f + 1e-5f * (float)(mix64(~(4 * r + threadIdx.x)) % 100);
    if (threadIdx.x < ROPE) rope[threadIdx.x] = rows[r * DIM + LATENT + threadIdx.x];
}

static __global__ void flow_copy_kernel(uint4 *to, const uint4 *from, size_t n)
{
    const size_t first = blockIdx.x * (size_t)1024 + threadIdx.x;
    uint4 v[4];
    for (int i = 0; i < 4; i++) if (first + i * 256 < n) v[i] = from[first + i * 256];
    for (int i = 0; i < 4; i++) if (first + i * 256 < n) to[first + i * 256] = v[i];
}

/* ================================================================================================
   the pool
   ============================================================================================== */
static void *flow_upload(const void *host, size_t bytes)
{
    void *p = device_alloc(bytes);
    CUDA(cudaMemcpy(p, host, bytes, cudaMemcpyHostToDevice));
    return p;
}

static snapmla_cache flow_new_cache(void)
{
    snapmla_cache c = {};
    c.content = device_alloc((size_t)POOL * LATENT);
    c.scale = (float *)device_alloc((size_t)POOL * 4);
    c.rope = device_alloc((size_t)POOL * ROPE * 2);
    c.pages = POOL / PAGE;
    return c;
}

static void flow_make_pool(void)
{
    enum { PAGES = POOL / PAGE };
    int32_t *order = (int32_t *)host_alloc(PAGES * 4), *pairs = (int32_t *)host_alloc(PAGES * 8);
    int64_t *slots = (int64_t *)host_alloc((size_t)POOL * 8);
    int64_t *at = (int64_t *)host_alloc((size_t)POOL * 8);
    float *angles = (float *)host_alloc((size_t)POSITIONS * ROPE * 4), weight[LATENT];
    int32_t *starts = (int32_t *)host_alloc((size_t)(POOL + 1) * 4);
    g_flow.rows = (uint16_t *)device_alloc((size_t)POOL * DIM * 2);
    g_flow.out = (uint16_t *)device_alloc((size_t)POOL * DIM * 2);
    g_flow.records = (uint8_t *)device_alloc((size_t)POOL * RECORD);
    g_flow.from = flow_new_cache();
    g_flow.to = flow_new_cache();
    g_flow.q_content = (uint8_t *)device_alloc((size_t)POOL * LATENT);
    g_flow.q_scale = (float *)device_alloc((size_t)POOL * 4);
    g_flow.q_rope = (uint16_t *)device_alloc((size_t)POOL * ROPE * 2);
    for (int i = 0; i < PAGES; i++) order[i] = i;
    for (int i = PAGES - 1; i > 0; i--) {
        const int j = (int)(mix64((uint64_t)i) % (uint64_t)(i + 1)), t = order[i];
        order[i] = order[j];
        order[j] = t;
    }
    for (int i = 0; i < POOL; i++) {
        slots[i] = (int64_t)order[i / PAGE] * PAGE + i % PAGE;
        at[i] = (int64_t)(mix64((uint64_t)i + 77) % POSITIONS);
    }
    for (int i = 0; i < PAGES; i++) { /* from a random page to another random page */
        pairs[2 * i] = order[i];
        pairs[2 * i + 1] = order[(i + PAGES / 3) % PAGES];
    }
    for (int p = 0; p < POSITIONS; p++)
        for (int i = 0; i < ROPE / 2; i++) {
            angles[p * ROPE + i] = (float)cos(p * pow(10000, -2.0 * i / ROPE));
            angles[p * ROPE + ROPE / 2 + i] = (float)sin(p * pow(10000, -2.0 * i / ROPE));
        }
    for (int i = 0; i < LATENT; i++) weight[i] = 1 + 0.25f * (float)((i * 37) % 11 - 5) / 5;
    g_flow.slots = (int64_t *)flow_upload(slots, (size_t)POOL * 8);
    g_flow.positions = (int64_t *)flow_upload(at, (size_t)POOL * 8);
    g_flow.pairs = (int32_t *)flow_upload(pairs, PAGES * 8);
    g_flow.table = (int32_t *)flow_upload(order, PAGES * 4); /* [PAGES / TABLE, TABLE] */
    for (int i = 0; i < POOL; i++) at[i] = i % PROMPT;
    g_flow.prompts = (int64_t *)flow_upload(at, (size_t)POOL * 8);
    g_flow.angles = (float *)flow_upload(angles, (size_t)POSITIONS * ROPE * 4);
    g_flow.weight = (float *)flow_upload(weight, sizeof weight);
    for (int i = 0; i <= POOL; i++) starts[i] = i; /* one row a request ... */
    g_flow.starts = (int32_t *)flow_upload(starts, (size_t)(POOL + 1) * 4);
    for (int i = 0; i <= PAGES / TABLE; i++) starts[i] = i * TABLE * PAGE; /* ... or its pages */
    g_flow.many = (int32_t *)flow_upload(starts, (size_t)(PAGES / TABLE + 1) * 4);
    bench_fill_normal<<<(size_t)POOL * DIM / 512, 256>>>((__nv_bfloat162 *)g_flow.rows,
                                                         (size_t)POOL * DIM, random64());
    flow_fill_records<<<POOL, 128>>>(g_flow.records, g_flow.rows);
    CUDA(cudaGetLastError());
    CUDA(cudaDeviceSynchronize());
    free(order);
    free(pairs);
    free(slots);
    free(at);
    free(angles);
    free(starts);
}

/* ================================================================================================
   the calls: n tokens from number `first` of the pool on
   ============================================================================================== */
typedef void (*flow_call)(int64_t first, int64_t n);

static void flow_quantize(int64_t first, int64_t n, int rotate)
{
    snapmla_quantize_q_desc d = {};
    d.heads = n % HEADS == 0 ? HEADS : 1; /* n rows in all */
    d.tokens = n / d.heads;
    d.q = g_flow.rows + first * DIM;
    d.q_content = g_flow.q_content + first * LATENT;
    d.q_scale = g_flow.q_scale + first;
    d.q_rope = g_flow.q_rope + first * ROPE;
    if (rotate) {
        d.rotation.positions = g_flow.positions + first;
        d.rotation.cosines = g_flow.angles;
    }
    LIB(snapmla_quantize_q(&d));
}

static void flow_quantize_plain(int64_t first, int64_t n) { flow_quantize(first, n, 0); }
static void flow_quantize_rotated(int64_t first, int64_t n) { flow_quantize(first, n, 1); }

static snapmla_append_desc flow_append_desc(int64_t first, int64_t n)
{
    snapmla_append_desc d = {};
    d.cache = g_flow.to;
    d.tokens = n;
    d.latent = g_flow.rows + first * DIM;
    d.slots = g_flow.slots + first;
    return d;
}

static void flow_append_plain(int64_t first, int64_t n)
{
    const snapmla_append_desc d = flow_append_desc(first, n);
    LIB(snapmla_append(&d));
}

static void flow_append_front(int64_t first, int64_t n, const int64_t *positions)
{
    snapmla_append_desc d = flow_append_desc(first, n);
    d.norm.weight = g_flow.weight;
    d.norm.weight_type = SNAPMLA_NUMBER_F32;
    d.rotation.positions = positions + first;
    d.rotation.cosines = g_flow.angles;
    LIB(snapmla_append(&d));
}

/* Prompts, and tokens at random positions, whose angles are 256 more bytes to read for each. */
static void flow_append_raw(int64_t first, int64_t n)
{
    flow_append_front(first, n, g_flow.prompts);
}

static void flow_append_anywhere(int64_t first, int64_t n)
{
    flow_append_front(first, n, g_flow.positions);
}

static void flow_fetch_slots(int64_t first, int64_t n)
{
    snapmla_fetch_desc d = {};
    d.cache = g_flow.from;
    d.tokens = n;
    d.slots = g_flow.slots + first;
    d.latent = g_flow.out + first * DIM;
    LIB(snapmla_fetch(&d));
}

/* Requests of 1024 tokens, or, of few tokens, one token of as many requests: then not the tokens of
   flow_fetch_slots(), but the first of each request. */
static void flow_fetch_ranges(int64_t first, int64_t n)
{
    const int64_t each = n >= TABLE * PAGE ? TABLE * PAGE : 1, requests = POOL / (TABLE * PAGE);
    const int64_t request = each == 1 ? first % (requests - n + 1) : first / each;
    snapmla_fetch_desc d = {};
    d.cache = g_flow.from;
    d.tokens = n;
    d.latent = g_flow.out + first * DIM;
    d.block_table = g_flow.table + request * TABLE;
    d.block_table_width = TABLE;
    d.batch = (int32_t)(n / each);
    d.row_starts = each == 1 ? g_flow.starts : g_flow.many;
    LIB(snapmla_fetch(&d));
}

static void flow_copy_pages(int64_t first, int64_t n)
{
    snapmla_copy_pages_desc d = {};
    d.layers = 1;
    d.source = &g_flow.from;
    d.destination = &g_flow.to;
    d.count = n / PAGE;
    d.pairs = g_flow.pairs + first / PAGE * 2;
    LIB(snapmla_copy_pages(&d));
}

static void flow_import_from(const void *source, snapmla_source_format format, int64_t first,
                             int64_t n)
{
    snapmla_import_desc d = {};
    d.cache = g_flow.to;
    d.format = format;
    d.source = source;
    d.tokens = n;
    d.slots = g_flow.slots + first;
    d.source_slots = g_flow.slots + POOL - first - n; /* another random order */
    LIB(snapmla_import(&d));
}

static void flow_import_bf16(int64_t first, int64_t n)
{
    flow_import_from(g_flow.rows, SNAPMLA_SOURCE_BF16, first, n);
}

static void flow_import_records(int64_t first, int64_t n)
{
    flow_import_from(g_flow.records, SNAPMLA_SOURCE_RECORD_656, first, n);
}

/* ================================================================================================
   checks: a token of the call's result against the reference
   ============================================================================================== */
typedef struct flow_token {
    uint8_t content[LATENT];
    float scale;
    uint16_t rope[ROPE];
} flow_token;

static void flow_get(void *to, const void *from, size_t bytes)
{
    CUDA(cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToHost));
}

static int64_t flow_get_i64(const int64_t *from)
{
    int64_t x;
    flow_get(&x, from, sizeof x);
    return x;
}

static flow_token flow_get_token(const snapmla_cache *c, int64_t slot)
{
    flow_token t;
    flow_get(t.content, (const uint8_t *)c->content + slot * LATENT, sizeof t.content);
    flow_get(&t.scale, c->scale + slot, sizeof t.scale);
    flow_get(t.rope, (const uint16_t *)c->rope + slot * ROPE, sizeof t.rope);
    return t;
}

static int flow_same(const flow_token *a, const flow_token *b)
{
    return memcmp(a->content, b->content, sizeof a->content) == 0
        && memcmp(&a->scale, &b->scale, sizeof a->scale) == 0
        && memcmp(a->rope, b->rope, sizeof a->rope) == 0;
}

static snapmla_ref_cache flow_one_token(flow_token *t)
{
    snapmla_ref_cache c = {};
    c.content = t->content;
    c.scale = &t->scale;
    c.rope = t->rope;
    c.pages = c.page_size = 1;
    return c;
}

static void flow_norm_and_rotate(uint16_t *row, int64_t position, int norm)
{
    float angles[ROPE], weight[LATENT];
    flow_get(angles, g_flow.angles + position * ROPE, sizeof angles);
    flow_get(weight, g_flow.weight, sizeof weight);
    snapmla_ref_norm n = {};
    n.weight = weight;
    n.weight_type = SNAPMLA_REF_NUMBER_F32;
    if (norm) snapmla_ref_rms_norm(row, LATENT, &n, row);
    snapmla_ref_rotate(row + LATENT, ROPE, angles, angles + ROPE / 2, SNAPMLA_REF_ROPE_INTERLEAVED,
                       row + LATENT);
}

/* Token number i of a call of n tokens from `first` on. */
static int flow_token_is_right(flow_call run, int64_t first, int64_t n, int64_t i)
{
    uint16_t row[DIM], got_row[DIM];
    uint8_t record[RECORD];
    flow_token want, got;
    memset(&want, 0, sizeof want);
    const int64_t index = first + i;
    if (run == flow_copy_pages) {
        int32_t pair[2];
        flow_get(pair, g_flow.pairs + index / PAGE * 2, sizeof pair);
        want = flow_get_token(&g_flow.from, (int64_t)pair[0] * PAGE + i % PAGE);
        got = flow_get_token(&g_flow.to, (int64_t)pair[1] * PAGE + i % PAGE);
        return flow_same(&want, &got);
    }
    if (run == flow_fetch_slots || run == flow_fetch_ranges) {
        int64_t slot = flow_get_i64(g_flow.slots + index), zero = 0;
        if (run == flow_fetch_ranges && n < TABLE * PAGE) {
            int32_t page;
            const int64_t request = first % (POOL / (TABLE * PAGE) - n + 1) + i;
            flow_get(&page, g_flow.table + request * TABLE, sizeof page);
            slot = (int64_t)page * PAGE;
        }
        snapmla_ref_fetch_desc f = {};
        want = flow_get_token(&g_flow.from, slot);
        f.cache = flow_one_token(&want);
        f.tokens = 1;
        f.slots = &zero;
        f.latent = row;
        require(snapmla_ref_fetch(&f) == 0, "snapmla_ref_fetch", "refused");
        flow_get(got_row, g_flow.out + index * DIM, sizeof got_row);
        return memcmp(row, got_row, sizeof row) == 0;
    }
    if (run == flow_import_bf16 || run == flow_import_records) {
        const int64_t from = flow_get_i64(g_flow.slots + POOL - first - n + i);
        snapmla_ref_import_desc d = {};
        flow_get(row, g_flow.rows + from * DIM, sizeof row);
        flow_get(record, g_flow.records + from * RECORD, sizeof record);
        d.cache = flow_one_token(&want);
        const int bf16 = run == flow_import_bf16;
        d.format = bf16 ? SNAPMLA_REF_SOURCE_BF16 : SNAPMLA_REF_SOURCE_RECORD_656;
        d.source = bf16 ? (const void *)row : (const void *)record;
        d.tokens = 1;
        require(snapmla_ref_import(&d) == 0, "snapmla_ref_import", "refused");
        got = flow_get_token(&g_flow.to, flow_get_i64(g_flow.slots + index));
        return flow_same(&want, &got);
    }
    flow_get(row, g_flow.rows + index * DIM, sizeof row);
    if (run == flow_quantize_rotated) { /* the heads of a token have one position */
        const int64_t of_token = first + i / (n % HEADS == 0 ? HEADS : 1);
        flow_norm_and_rotate(row, flow_get_i64(g_flow.positions + of_token), 0);
    }
    if (run == flow_append_raw) flow_norm_and_rotate(row, flow_get_i64(g_flow.prompts + index), 1);
    if (run == flow_append_anywhere)
        flow_norm_and_rotate(row, flow_get_i64(g_flow.positions + index), 1);
    snapmla_ref_quantize(row, LATENT, row + LATENT, ROPE, want.content, &want.scale, want.rope);
    if (run == flow_append_plain || run == flow_append_raw || run == flow_append_anywhere) {
        got = flow_get_token(&g_flow.to, flow_get_i64(g_flow.slots + index));
    } else {
        flow_get(got.content, g_flow.q_content + index * LATENT, sizeof got.content);
        flow_get(&got.scale, g_flow.q_scale + index, sizeof got.scale);
        flow_get(got.rope, g_flow.q_rope + index * ROPE, sizeof got.rope);
    }
    return flow_same(&want, &got);
}

static void flow_poison(void)
{
    CUDA(cudaMemset(g_flow.to.content, 0xff, (size_t)POOL * LATENT));
    CUDA(cudaMemset(g_flow.to.scale, 0xff, (size_t)POOL * 4));
    CUDA(cudaMemset(g_flow.to.rope, 0xff, (size_t)POOL * ROPE * 2));
    CUDA(cudaMemset(g_flow.q_content, 0xff, (size_t)POOL * LATENT));
    CUDA(cudaMemset(g_flow.q_scale, 0xff, (size_t)POOL * 4));
    CUDA(cudaMemset(g_flow.q_rope, 0xff, (size_t)POOL * ROPE * 2));
    CUDA(cudaMemset(g_flow.out, 0xff, (size_t)POOL * DIM * 2));
}

/* The first, the last and random tokens of what a call wrote; -1 or the number of a wrong one. */
static int64_t flow_first_wrong(flow_call run, int64_t first, int64_t n)
{
    for (int s = 0; s < SAMPLES; s++) {
        const int64_t random = (int64_t)(mix64((uint64_t)s) % (uint64_t)n);
        const int64_t i = s < 8 ? s : s < 16 ? n - 1 - (s - 8) : random;
        if (i < 0 || i >= n) continue;
        if (!flow_token_is_right(run, first, n, i)) return i;
    }
    return -1;
}

/* ================================================================================================
   times
   ============================================================================================== */
static void flow_copy_by_kernel(int64_t first, int64_t n) /* n tokens of 1152 bytes */
{
    const size_t units = (size_t)n * DIM * 2 / 16;
    uint4 *to = (uint4 *)(g_flow.out + first * DIM);
    flow_copy_kernel<<<(unsigned)((units + 1023) / 1024), 256>>>(
        to, (const uint4 *)(g_flow.rows + first * DIM), units);
    CUDA(cudaGetLastError());
}

static void flow_copy_by_runtime(int64_t first, int64_t n)
{
    CUDA(cudaMemcpyAsync(g_flow.out + first * DIM, g_flow.rows + first * DIM, (size_t)n * DIM * 2,
                         cudaMemcpyDeviceToDevice));
}

/* Microseconds a call, and the first token of the last one; < 0: the CPU was too slow to queue the
   launches in time. */
static double flow_us(flow_call run, int64_t n, const method *how, int64_t *last)
{
    const int launches = n >= 65536 ? 20 : 200;
    const int64_t parts = POOL / n;
    method before = *how; /* of the first round alone */
    cudaEvent_t start, end, released;
    double best = HUGE_VAL;
    int64_t turn = 0;
    CUDA(cudaEventCreate(&start));
    CUDA(cudaEventCreate(&end));
    CUDA(cudaEventCreate(&released));
    for (int round = 0; round < 6; round++, before.rested = 0) { /* the first warms up */
        float ms;
        rest_and_wait(&before, 8000000);
        CUDA(cudaEventRecord(released));
        CUDA(cudaEventRecord(start));
        for (int i = 0; i < launches; i++) run(turn++ % parts * n, n);
        CUDA(cudaEventRecord(end));
        const int queued = cudaEventQuery(released) == cudaErrorNotReady;
        (void)cudaGetLastError(); /* "not ready" is the wanted answer and no error */
        CUDA(cudaEventSynchronize(end));
        CUDA(cudaEventElapsedTime(&ms, start, end));
        if (round > 0 && queued) best = fmin(best, 1000.0 * ms / launches);
    }
    CUDA(cudaEventDestroy(start));
    CUDA(cudaEventDestroy(end));
    CUDA(cudaEventDestroy(released));
    *last = (turn - 1) % parts * n;
    return best < HUGE_VAL ? best : -1;
}

typedef struct flow {
    const char *name;
    flow_call run;
    int bytes; /* a token: rows, planes and records, read and written */
    int least; /* tokens */
} flow;

static const flow kFlows[] = {
    {"quantize_q", flow_quantize_plain, DIM * 2 + TOKEN_BYTES, 1},
    {"quantize_q + rope", flow_quantize_rotated, DIM * 2 + TOKEN_BYTES, 1},
    {"append", flow_append_plain, DIM * 2 + TOKEN_BYTES, 1},
    {"append + norm + rope", flow_append_raw, DIM * 2 + TOKEN_BYTES, 1},
    {"append + norm + rope (random)", flow_append_anywhere, DIM * 2 + TOKEN_BYTES, 1},
    {"fetch by slots", flow_fetch_slots, DIM * 2 + TOKEN_BYTES, 1},
    {"fetch by ranges", flow_fetch_ranges, DIM * 2 + TOKEN_BYTES, 1},
    {"copy_pages", flow_copy_pages, 2 * TOKEN_BYTES, PAGE},
    {"import bf16", flow_import_bf16, DIM * 2 + TOKEN_BYTES, 1},
    {"import 656-byte records", flow_import_records, RECORD + TOKEN_BYTES, 1},
};

/* A source for fetches and copies, a pool's content of quantised rows. */
static void flow_start(void)
{
    flow_make_pool();
    flow_import_bf16(0, MOST);
    flow_import_bf16(MOST, MOST);
    const snapmla_cache filled = g_flow.to;
    g_flow.to = g_flow.from;
    g_flow.from = filled;
    CUDA(cudaDeviceSynchronize());
}

static void flow_end(void)
{
    void *memory[] = {g_flow.rows,       g_flow.out,        g_flow.records,
                      g_flow.from.content, g_flow.from.scale, g_flow.from.rope,
                      g_flow.to.content, g_flow.to.scale,   g_flow.to.rope,
                      g_flow.angles,     g_flow.weight,     g_flow.slots,
                      g_flow.positions,  g_flow.prompts,    g_flow.pairs,
                      g_flow.table,      g_flow.starts,     g_flow.many,
                      g_flow.q_content,  g_flow.q_scale,    g_flow.q_rope};
    for (size_t i = 0; i < sizeof memory / sizeof memory[0]; i++) CUDA(cudaFree(memory[i]));
}

/* What a copy does, in bytes/s read and written, timed as the calls are: cudaMemcpyAsync(), and a
   kernel of 16-byte accesses. */
typedef struct flow_ceiling {
    double runtime, kernel;
} flow_ceiling;

static flow_ceiling flow_copy_ceiling(const method *how)
{
    const double bytes = 2.0 * MOST * DIM * 2;
    int64_t last;
    flow_ceiling c = {};
    c.kernel = bytes / (flow_us(flow_copy_by_kernel, MOST, how, &last) * 1e-6);
    c.runtime = bytes / (flow_us(flow_copy_by_runtime, MOST, how, &last) * 1e-6);
    require(c.kernel > 0 && c.runtime > 0, "copy", "launches did not queue");
    return c;
}

/* Of one call and size. */
typedef struct flow_row {
    double us;      /* < 0: launches did not queue */
    double like_us; /* a copy by kernel of as many bytes, for sizes where starting it counts */
    int64_t wrong;  /* token, or -1 */
} flow_row;

static flow_row flow_measure(const flow *f, int64_t n, const method *how)
{
    const int64_t like = n * f->bytes / (2 * DIM * 2), first = n % POOL; /* the second part */
    flow_row row = {};
    int64_t last;
    flow_poison();
    f->run(first, n);
    CUDA(cudaDeviceSynchronize());
    row.wrong = flow_first_wrong(f->run, first, n);
    if (row.wrong >= 0) return row;
    flow_poison();
    row.us = flow_us(f->run, n, how, &last);
    row.wrong = flow_first_wrong(f->run, last, n);
    row.like_us = flow_us(flow_copy_by_kernel, like < 1 ? 1 : like, how, &last);
    return row;
}

#endif /* BENCH_DATAFLOW_H */
