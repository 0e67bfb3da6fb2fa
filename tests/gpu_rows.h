/* gpu_rows.h - rows that are hard to quantise, caches without requests, and slots: what the tests of
   the data flow share.  Include after gpu_util.h. */
#ifndef SNAPMLA_GPU_ROWS_H
#define SNAPMLA_GPU_ROWS_H

enum { kKinds = 20 };

static inline uint16_t any_bf16(tu_rng *rng) { return (uint16_t)tu_u64(rng); }

static inline uint16_t finite_bf16(tu_rng *rng)
{
    uint16_t bits;
    do bits = any_bf16(rng);
    while ((bits & 0x7f80) == 0x7f80);
    return bits;
}

/* One row of 576: latent, rope.  `kind` picks what is special about it. */
static inline void hard_row(tu_rng *rng, int kind, uint16_t *row)
{
    const double std = ldexp(1.0, (int)tu_below(rng, 240) - 120);
    for (int i = 0; i < kDims; i++) row[i] = tu_bf16(std * tu_gauss(rng));
    const int d = (int)tu_below(rng, kLatent), r = kLatent + (int)tu_below(rng, kRope);
    switch (kind) {
    case 1: memset(row, 0, 2 * kDims); break;
    case 2:
        for (int i = 0; i < kDims; i++) row[i] = 0x8000;
        break;
    case 3:
        for (int i = 0; i < kDims; i++) row[i] = (uint16_t)(tu_below(rng, 128) | (i & 1) << 15);
        break;
    case 4:
        for (int i = 0; i < kDims; i++) row[i] = finite_bf16(rng);
        break;
    case 5:
        for (int i = 0; i < kDims; i++) row[i] = any_bf16(rng);
        break;
    case 6: row[d] = 0x7fc0; break;
    case 7: row[d] = 0xffff; break;
    case 8: row[d] = 0x7f80; break;
    case 9: row[d] = 0xff80; break;
    case 10: row[r] = 0x7fc1; break;
    case 11: row[r] = 0x7f80; break;
    case 12: row[r] = 0xff80; break;
    case 13: row[d] = 0x7f7f; break;             /* the largest finite number: the others vanish */
    case 14: memset(row, 0, 2 * kLatent); break; /* rope over the smallest scale: Inf */
    case 15: memset(row, 0, 2 * kLatent), row[d] = 1; break; /* the smallest number there is */
    case 16: row[0] = 0x7fc0; break;
    case 17: row[kLatent - 1] = 0xff80; break;
    case 18: /* every step between two e4m3 numbers: 448 fixes the scale at 1 */
        for (int i = 0; i < kDims; i++) row[i] = tu_bf16((int)tu_below(rng, 897) - 448);
        row[d] = tu_bf16(448);
        break;
    case 19: /* ties and near ties in the subnormals of e4m3 */
        for (int i = 0; i < kDims; i++) row[i] = tu_bf16(((int)tu_below(rng, 129) - 64) / 2048.0);
        row[d] = tu_bf16(-448);
        break;
    default: break;
    }
}

/* Magnitudes of all finite bf16 numbers, 511 to a row, below an amax of every exponent. */
static inline void sweep_row(tu_rng *rng, int64_t index, uint16_t *row)
{
    const uint16_t top = (uint16_t)(0x0080 + (index * 0x80 + tu_below(rng, 0x80)) % 0x7f00);
    row[0] = top;
    for (int i = 1; i < kDims; i++) {
        const uint16_t bits = (uint16_t)(index * 511 + i) & 0x7fff;
        row[i] =
            (uint16_t)((i < kLatent && bits > top ? bits % top : bits) | (tu_below(rng, 2) << 15));
    }
}

static inline void fill_rows(tu_rng *rng, uint16_t *rows, int64_t n, int64_t stride)
{
    for (int64_t i = 0; i < n; i++) {
        if (i % 3 == 2)
            sweep_row(rng, i / 3, rows + i * stride);
        else
            hard_row(rng, (int)(i % kKinds), rows + i * stride);
    }
}

/* Distinct slots in random order, about one in eight negative. */
static inline int64_t *make_slots(uint64_t seed, int64_t tokens, int64_t slots)
{
    tu_rng rng = tu_seed(seed + 5);
    int32_t *order = (int32_t *)tu_alloc((size_t)slots * 4, 0);
    int64_t *at = (int64_t *)tu_alloc((size_t)tokens * 8, 0);
    tu_permutation(&rng, order, (int32_t)slots, 0);
    for (int64_t t = 0; t < tokens; t++) {
        at[t] = order[t];
        if (tu_below(&rng, 8) == 0) at[t] = tu_below(&rng, 2) ? -1 : INT64_MIN + t;
    }
    free(order);
    return at;
}

static inline spec cache_spec(uint64_t seed, int page_size, int pages, layout how)
{
    spec s;
    memset(&s, 0, sizeof s);
    s.seed = seed;
    s.page_size = page_size;
    s.spare_pages = pages;
    s.layout = how;
    return s;
}

static inline snapmla_cache device_cache(const problem *p) { return problem_desc(p).cache; }

/* Any bytes in all planes: every code, scales of every size, NaN and Inf, any rope. */
static inline void randomise_cache(problem *p, uint64_t seed)
{
    tu_rng rng = tu_seed(seed);
    for (int64_t page = 0; page < p->cache.pages; page++) {
        for (int o = 0; o < p->s.page_size; o++) {
            uint8_t *content = token_content(p, page, o);
            uint16_t *rope = token_rope(p, page, o);
            const int kind = (int)tu_below(&rng, 8);
            for (int i = 0; i < kLatent; i++) content[i] = (uint8_t)tu_u64(&rng);
            for (int i = 0; i < kRope; i++) rope[i] = kind < 4 ? finite_bf16(&rng) : any_bf16(&rng);
            uint32_t bits = (uint32_t)tu_u64(&rng) & 0x7fffffffu;
            if (kind == 0) bits = 0;
            if (kind == 1) bits = 0x7fc00000u;
            if (kind == 2) bits = 0x7f800000u;
            memcpy(token_scale(p, page, o), &bits, 4);
        }
    }
    problem_upload(p);
}

#endif
