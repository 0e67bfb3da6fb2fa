/* test_plan.cu - the planner's promises, on the CPU, over millions of random sets of lengths.

   The functions that snapmla_plan_kernel is made of run on the host, too.  plan_twin() puts them
   together one request after the other, and check_plan() holds the result to what decode and combine
   rely on: every token of every item in exactly one split, no split empty, every partial result in a
   slot of its own inside the workspace, every cut item in the list that combine goes by, no part much
   longer than its share.  On a GPU, the kernel must write the same bytes as the twin.

   SNAPMLA_TEST_SETS=N changes the number of random sets. */
#define SNAPMLA_IMPLEMENTATION
#include "snapmla.cuh"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

extern "C" {
#include <cmocka.h>
}

#include "test_util.h"

enum { kMostBatch = 20000, kMostGroups = 8, kMostItems = kMostBatch * kMostGroups };
enum { kMostSlots = 1 << 20 };

/* All that a plan is made of and leads to. */
typedef struct plan {
    smla_policy policy;
    int group, tile_rows;
    int64_t slots; /* of the workspace */
    int32_t lens[kMostBatch];
    smla_rule rule;
    smla_part part[smla_kMaxParts];
    int64_t split_begin[kMostBatch + 1];
} plan;

/* What check_plan() found on its way. */
typedef struct summary {
    int64_t longest, total; /* blocks and overheads of the longest part, of all together */
    int parts;              /* that are not empty */
    int64_t splits, partials, cut_items;
} summary;

/* ================================================================================================
   The twin of snapmla_plan_kernel: the same functions, in the simplest order
   ============================================================================================== */
static int64_t g_line[kMostBatch + 1];
static smla_cut g_cuts[smla_kMaxParts + 1];

static void plan_twin(plan *p)
{
    const smla_policy *policy = &p->policy;
    smla_work work = {0, 0, 1};
    p->split_begin[0] = 0;
    for (int64_t b = 0; b < policy->batch; b++) {
        const int32_t blocks = smla_item_blocks(*policy, p->lens[b]);
        smla_add_work(*policy, blocks, &work);
        p->split_begin[b + 1] = p->split_begin[b] + smla_splits_of(*policy, blocks);
    }
    int32_t each = 0;
    uint32_t score = UINT32_MAX;
    if (policy->split_blocks == 0 && policy->batch * policy->groups <= policy->parts) {
        for (int lane = 31; lane >= 0; lane--) {
            int32_t size = 0;
            const uint32_t y = smla_even_candidate<int64_t>(*policy, work, lane, &size);
            if (y <= score) score = y, each = size;
        }
    }
    p->rule = smla_decide<int64_t>(*policy, work, each, score);
    if (smla_is_small(*policy, work)) { /* the kernel takes 32 bits then */
        const smla_rule same = smla_decide<uint32_t>(*policy, work, each, score);
        int32_t size = 0, small = 0;
        const int lane = (int)(work.blocks % 32);
        const uint32_t y = smla_even_candidate<int64_t>(*policy, work, lane, &size);
        const uint32_t z = smla_even_candidate<uint32_t>(*policy, work, lane, &small);
        TU_CHECK(memcmp(&same, &p->rule, sizeof same) == 0 && y == z && size == small,
                 "32 and 64 bits disagree");
    }
    int32_t used = p->rule.used;
    if (p->rule.deal != smla_kWhole) {
        g_line[0] = 0;
        for (int64_t b = 0; b < policy->batch; b++)
            g_line[b + 1] = g_line[b]
                          + smla_item_length(*policy, p->rule,
                                             smla_item_blocks(*policy, p->lens[b]));
        if (p->rule.deal == smla_kEven) used = (int32_t)(g_line[policy->batch] * policy->groups);
    }
    int64_t b = 0; /* borders come in order, and so do requests */
    for (int i = 0; i <= policy->parts; i++) {
        if (smla_plain_cut(*policy, p->rule, i, used, &g_cuts[i])) continue;
        const int64_t position = smla_border(p->rule, i);
        while (g_line[b + 1] * policy->groups <= position) b++;
        g_cuts[i] = smla_cut_at(*policy, p->rule, b, g_line[b], g_line[b + 1] - g_line[b], position);
    }
    for (int i = 0; i < policy->parts; i++)
        p->part[i] = smla_part_between(*policy, p->rule, g_cuts, i);
}

/* ================================================================================================
   The checker.  It knows formats, not rules; returns NULL or what is wrong.
   ============================================================================================== */
static uint8_t g_slot_used[kMostSlots];
static int64_t g_item_slots[kMostSlots]; /* slots in the order in which the walk met them */
static uint8_t g_listed[kMostItems];

static smla_decode_params params_of(const plan *p)
{
    smla_decode_params d;
    memset(&d, 0, sizeof d);
    d.policy = p->policy;
    d.seq_lens = p->lens;
    d.len_limit = p->policy.max_seq_len;
    d.part = p->part;
    d.split_begin = p->split_begin;
    d.group = p->group;
    d.tile_rows = p->tile_rows;
    return d;
}

/* The list that combine uses for an item must hold the slots [first, last) met by the walk. */
static const char *check_list(const smla_decode_params *d, int64_t index, int64_t item,
                              int64_t first, int64_t last)
{
    const smla_split_list list = smla_find_splits(*d, index);
    if (list.item != item) return "a list names another item";
    if (list.count != last - first) return "a list is longer or shorter than the item's splits";
    for (int32_t i = 0; i < list.count; i++)
        if (smla_slot_of(list, i) != g_item_slots[first + i]) return "a list names another slot";
    return NULL;
}

static const char *check_plan(const plan *p, summary *sum)
{
    const smla_decode_params d = params_of(p);
    const smla_policy *policy = &p->policy;
    const int64_t items = policy->batch * policy->groups;
    int64_t item = 0, slot_count = 0, item_first = 0, begin_part = 0;
    int32_t token = 0; /* the next one that has no split yet */
    const char *fault = NULL;
    memset(sum, 0, sizeof *sum);
    memset(g_listed, 0, (size_t)items);

    for (int i = 0; i < policy->parts && !fault; i++) {
        int64_t cost = 0, steps = 0;
        for (smla_cursor c = smla_walk_first(d, i); !smla_walk_ended(d, i, c) && !fault;
             smla_walk_on(d, i, c)) {
            if (++steps > items + (1 << 26)) fault = "the walk does not end";
            if (c.item != item || c.begin != token) {
                fault = "a token in two splits or in none";
                break;
            }
            const smla_split s = smla_walk_split(d, i, 0, c);
            const int32_t len = smla_max(0, smla_min(p->lens[item / policy->groups],
                                                     policy->max_seq_len));
            if (s.request != item / policy->groups || s.len != len
                || s.tile != item % policy->groups * p->group)
                fault = "a split of another request";
            if (s.begin != token || s.end > len || (len > 0 && s.end <= s.begin))
                fault = "an empty split, or one behind the end";
            if (s.begin % smla_kBlock != 0 || (s.end % smla_kBlock != 0 && s.end != len))
                fault = "a split that ends inside a block";
            if (policy->split_blocks > 0 && len > 0
                && s.end != smla_min((int64_t)len, (int64_t)s.begin
                                                       + policy->split_blocks * smla_kBlock))
                fault = "not a split of split_tokens";
            const bool whole = s.begin == 0 && s.end >= len;
            if (whole != (s.slot < 0)) fault = "a whole item with a slot, or a cut one without";
            if (fault) break;
            if (s.begin == 0) item_first = slot_count, begin_part = i;
            if (!whole) {
                if (s.slot >= p->slots || s.slot >= kMostSlots) fault = "a slot behind the workspace";
                else if (g_slot_used[s.slot]) fault = "a slot used twice";
                else {
                    g_slot_used[s.slot] = 1;
                    g_item_slots[slot_count++] = s.slot;
                }
            }
            if (fault) break;
            cost += len == 0 ? 1
                             : smla_kOverheadBlocks + smla_ceil_div(s.end - s.begin, smla_kBlock);
            sum->splits++;
            token = s.end;
            if (s.end >= len) {
                if (!whole) {
                    const int64_t index = policy->split_blocks > 0 ? item : begin_part;
                    fault = check_list(&d, index, item, item_first, slot_count);
                    g_listed[item] = 1;
                    sum->cut_items++;
                }
                item++;
                token = 0;
            }
        }
        sum->parts += cost > 0;
        sum->total += cost;
        sum->longest = smla_max(sum->longest, cost);
    }
    if (!fault && (item != items || token != 0)) fault = "tokens at the end are in no split";
    /* and no list of anything else */
    const int64_t lists = policy->split_blocks > 0 ? items : policy->parts;
    for (int64_t i = 0; i < lists && !fault; i++) {
        const smla_split_list list = smla_find_splits(d, i);
        if (list.count > 1 && !g_listed[list.item]) fault = "a list of an item that is not cut";
        if (list.count > 1) g_listed[list.item] = 0;
    }
    sum->partials = slot_count;
    for (int64_t i = 0; i < slot_count; i++) g_slot_used[g_item_slots[i]] = 0;
    return fault;
}

/* No part takes longer than an equal share of all work, a resumed split and what cutting and merging
   would cost; fixed splits: and one split. */
static int64_t longest_allowed(const plan *p)
{
    const smla_policy *policy = &p->policy;
    int64_t total = 0;
    for (int64_t b = 0; b < policy->batch; b++) {
        const int32_t blocks = smla_item_blocks(*policy, p->lens[b]);
        total += blocks == 0 ? 1
                             : blocks + (int64_t)smla_splits_of(*policy, blocks)
                                            * smla_kOverheadBlocks;
    }
    const int64_t share = smla_ceil_div(total * policy->groups, policy->parts);
    if (policy->split_blocks > 0) return share + policy->split_blocks + smla_kOverheadBlocks;
    const int64_t partials = (int64_t)2 * policy->parts * policy->part_rows;
    return share + 2 * smla_kOverheadBlocks + 1 + partials / smla_kMergeRows + 1;
}

/* ================================================================================================
   Random sets
   ============================================================================================== */
static plan g_plan;

static int64_t below(tu_rng *rng, int64_t n) { return (int64_t)(tu_u64(rng) % (uint64_t)n); }

static void random_lens(tu_rng *rng, plan *p)
{
    const int kind = (int)below(rng, 10);
    const int32_t most = (int32_t)1 << below(rng, 21), same = (int32_t)below(rng, most + 1);
    for (int64_t b = 0; b < p->policy.batch; b++) {
        int32_t len = 0;
        switch (kind) {
        case 0: len = same; break;                                  /* all the same */
        case 1: len = (int32_t)below(rng, most + 1); break;         /* even */
        case 2: len = (int32_t)1 << below(rng, 21); break;          /* every magnitude */
        case 3: len = (int32_t)below(rng, (int64_t)1 << below(rng, 21)); break;
        case 4: len = b % 61 == 7 ? 1 << 17 : 1 + (int32_t)below(rng, 1500); break; /* few long */
        case 5: len = (int32_t)(64 * below(rng, 40) + below(rng, 3) - 1); break;    /* borders */
        case 6: len = below(rng, 4) ? 0 : (int32_t)below(rng, most + 1); break;     /* idle slots */
        case 7: len = same + (int32_t)below(rng, 1 + same / 16); break;             /* nearly same */
        case 8: len = below(rng, 50) ? 1 : INT32_MAX - (int32_t)below(rng, 100); break;
        default: len = below(rng, 3) ? (int32_t)below(rng, 200) : INT32_MIN; break;
        }
        p->lens[b] = len;
    }
}

static void random_policy(tu_rng *rng, plan *p, int fixed, int most_batch)
{
    static const int parts[] = {1, 2, 3, 16, 33, 44, 66, 108, 132, 132, 264};
    static const int rows[] = {16, 32, 64};
    smla_policy *policy = &p->policy;
    memset(policy, 0, sizeof *policy);
    policy->parts = below(rng, 4) ? parts[below(rng, 11)] : 1 + (int)below(rng, smla_kMaxParts);
    if (below(rng, 4)) policy->parts = smla_min(policy->parts, 264);
    const int size = (int)below(rng, 16); /* large batches take longer: fewer of them */
    policy->batch = 1 + below(rng, size == 0 ? most_batch : size < 4 ? 200 : 24);
    policy->groups = below(rng, 3) ? 1 : 1 + below(rng, kMostGroups);
    policy->max_seq_len = INT_MAX - smla_kBlock;
    if (fixed || below(rng, 8) == 0) policy->max_seq_len = 1 + (int)below(rng, 1 << below(rng, 21));
    p->group = 1 + (int)below(rng, 4);
    p->tile_rows = rows[below(rng, 3)];
    policy->part_rows = p->group * p->tile_rows;
    p->slots = 2 * policy->parts;
    if (fixed) {
        policy->split_blocks = 2 << below(rng, 8);
        /* as smla_plan_geometry() counts them; keep the tables of this test large enough */
        int64_t most;
        while ((most = smla_ceil_div(policy->max_seq_len, policy->split_blocks * smla_kBlock)) > 2000)
            policy->split_blocks *= 2;
        while (policy->batch * policy->groups * most > kMostSlots) policy->batch /= 2;
        p->slots = policy->batch * policy->groups * most;
    }
}

static void describe(const plan *p, int64_t set)
{
    print_error("set %lld: batch %lld, groups %lld, parts %d, rows %d, split_blocks %d, deal %d:",
                (long long)set, (long long)p->policy.batch, (long long)p->policy.groups,
                p->policy.parts, p->policy.part_rows, p->policy.split_blocks, (int)p->rule.deal);
    for (int b = 0; b < p->policy.batch && b < 12; b++) print_error(" %d", p->lens[b]);
    print_error("\n");
}

static int64_t sets_wanted(int64_t otherwise)
{
    const char *text = getenv("SNAPMLA_TEST_SETS");
    return text ? atoll(text) : otherwise;
}

static void run_sets(uint64_t seed, int64_t sets, int fixed)
{
    tu_rng rng = tu_seed(seed);
    int64_t dealt[3] = {0, 0, 0}, cut = 0;
    double worst = 0;
    for (int64_t set = 0; set < sets; set++) {
        random_policy(&rng, &g_plan, fixed, 1000);
        random_lens(&rng, &g_plan);
        plan_twin(&g_plan);
        summary sum;
        const char *fault = check_plan(&g_plan, &sum);
        const int64_t allowed = longest_allowed(&g_plan);
        if (fault || !(sum.longest <= allowed)) {
            describe(&g_plan, set);
            TU_CHECK(fault == NULL, "%s", fault);
            TU_CHECK(sum.longest <= allowed, "longest part %lld, allowed %lld",
                     (long long)sum.longest, (long long)allowed);
        }
        dealt[g_plan.rule.deal]++;
        cut += sum.cut_items > 0;
        worst = fmax(worst, (double)sum.longest / (double)allowed);
    }
    print_message("%lld sets: dealt whole %lld, even %lld, by line %lld; with cuts %lld; longest part "
                  "%.2f of what is allowed\n",
                  (long long)sets, (long long)dealt[0], (long long)dealt[1], (long long)dealt[2],
                  (long long)cut, worst);
    TU_CHECK(cut > sets / 20, "hardly any cuts");
    if (!fixed && sets >= 1000)
        for (int i = 0; i < 3; i++) TU_CHECK(dealt[i] > sets / 100, "deal %d hardly ever taken", i);
}

static void test_balanced(void **state)
{
    (void)state;
    run_sets(1, sets_wanted(1700000), 0);
}

static void test_fixed_splits(void **state)
{
    (void)state;
    run_sets(2, sets_wanted(500000), 1);
}

/* ================================================================================================
   Edges, all policies
   ============================================================================================== */
static void check_edge(const char *name, int64_t batch, int parts, int split_tokens,
                       int32_t (*len)(int64_t b))
{
    plan *p = &g_plan;
    for (int groups = 1; groups <= 3; groups += 2) {
        memset(&p->policy, 0, sizeof p->policy);
        p->policy.batch = batch;
        p->policy.groups = groups;
        p->policy.parts = parts;
        p->policy.max_seq_len = split_tokens ? 1 << 20 : INT_MAX - smla_kBlock;
        p->policy.split_blocks = split_tokens / smla_kBlock;
        p->policy.part_rows = 64;
        p->group = 1;
        p->tile_rows = 64;
        p->slots = split_tokens ? batch * groups * smla_ceil_div(1 << 20, split_tokens) : 2 * parts;
        for (int64_t b = 0; b < batch; b++) p->lens[b] = len(b);
        plan_twin(p);
        summary sum;
        const char *fault = check_plan(p, &sum);
        TU_CHECK(fault == NULL, "%s, %d parts, %d groups: %s", name, parts, groups, fault);
        TU_CHECK(sum.longest <= longest_allowed(p), "%s, %d parts: longest %lld", name, parts,
                 (long long)sum.longest);
    }
}

static int32_t len_zero(int64_t b) { return b % 2 ? 0 : -5; }
static int32_t len_one(int64_t b) { return b >= 0; }
static int32_t len_million(int64_t b) { return b >= 0 ? 1 << 20 : 0; }
static int32_t len_one_million(int64_t b) { return b == 1234 ? 1 << 20 : 0; }
static int32_t len_last(int64_t b) { return b == 4095 ? 1 << 20 : 0; }
static int32_t len_mixed(int64_t b) { return (int32_t)(b * 7919 % 5000); }

static void test_edges(void **state)
{
    (void)state;
    static const int parts[] = {1, 2, 33, 66, 132, 264, smla_kMaxParts};
    for (int i = 0; i < (int)(sizeof parts / sizeof parts[0]); i++) {
        for (int fixed = 0; fixed < 2; fixed++) {
            check_edge("zeros", 4096, parts[i], fixed * 4096, len_zero);
            check_edge("one zero", 1, parts[i], fixed * 4096, len_zero);
            check_edge("one token", 1, parts[i], fixed * 4096, len_one);
            check_edge("1M", 1, parts[i], fixed * 4096, len_million);
            check_edge("1M each", 100, parts[i], fixed * 8192, len_million);
            check_edge("1M among zeros", 4096, parts[i], fixed * 32768, len_one_million);
            check_edge("1M at the end", 4096, parts[i], fixed * 32768, len_last);
            check_edge("20000 mixed", 20000, parts[i], fixed * 131072, len_mixed);
            check_edge("20000 of one", 20000, parts[i], fixed * 131072, len_one);
        }
    }
}

/* ================================================================================================
   The checker refuses plans that are wrong
   ============================================================================================== */
static void make_good(int fixed)
{
    plan *p = &g_plan;
    memset(&p->policy, 0, sizeof p->policy);
    p->policy.batch = 9;
    p->policy.groups = 2;
    p->policy.parts = 12;
    p->policy.max_seq_len = 1 << 20;
    p->policy.split_blocks = fixed ? 8 : 0;
    p->policy.part_rows = 16;
    p->group = 1;
    p->tile_rows = 16;
    p->slots = fixed ? 9 * 2 * 2048 : 24;
    for (int b = 0; b < 9; b++) p->lens[b] = b == 4 ? 0 : 700 * (b + 1) + b;
    plan_twin(p);
}

static void refuses(const char *what)
{
    summary sum;
    const char *fault = check_plan(&g_plan, &sum);
    TU_CHECK(fault != NULL, "%s was not seen", what);
}

static void test_checker_refuses(void **state)
{
    (void)state;
    plan *p = &g_plan;
    summary sum;
    for (int fixed = 0; fixed < 2; fixed++) {
        make_good(fixed);
        const char *fault = check_plan(p, &sum);
        TU_CHECK(fault == NULL, "%s", fault);
        TU_CHECK(sum.cut_items > 3, "%lld cut items", (long long)sum.cut_items);

        int cut = 0; /* a part that begins inside an item */
        while (p->part[cut].begin == 0) cut++;
        p->part[cut].begin += smla_kBlock;
        refuses("a part that begins a block late");
        p->part[cut].begin -= smla_kBlock;
        p->part[cut - 1].end += smla_kBlock;
        refuses("a part that ends a block late");
        p->part[cut - 1].end -= smla_kBlock;
        const smla_part last = p->part[p->policy.parts - 1];
        p->part[p->policy.parts - 1].last = last.first - 1;
        refuses("a part that is lost");
        p->part[p->policy.parts - 1] = last;
        p->slots = 3;
        refuses("a workspace that is too small");

        make_good(fixed);
        if (fixed) {
            p->split_begin[3]++;
            refuses("a wrong sum of splits");
        } else {
            int begins = 0;
            while (p->part[begins].splits == 0) begins++;
            p->part[begins].splits++;
            refuses("a list that is too long");
            p->part[begins].splits -= 2;
            refuses("a list that is too short");
            p->part[begins].splits++;
            int none = 0;
            while (p->part[none].splits != 0 || p->part[none].begin == 0) none++;
            p->part[none].splits = 2;
            refuses("a list too many");
        }
        /* a twin that is wrong: lengths other than those it was made for */
        make_good(fixed);
        p->lens[2] += smla_kBlock * (fixed ? 8 : 1);
        const char *longer = check_plan(p, &sum);
        p->lens[2] -= smla_kBlock * (fixed ? 8 : 1);
        p->lens[8] = 64;
        const char *shorter = check_plan(p, &sum);
        TU_CHECK(longer != NULL || shorter != NULL, "a plan of other lengths was not seen");
    }

    /* all work in one part is legal but long: the bound sees it */
    make_good(0);
    const int64_t allowed = longest_allowed(p);
    p->policy.parts = 1;
    plan_twin(p);
    TU_CHECK(check_plan(p, &sum) == NULL, "one part");
    TU_CHECK(sum.longest > allowed, "%lld <= %lld", (long long)sum.longest, (long long)allowed);
}

/* ================================================================================================
   Combine: its tasks hold every slice of every row, its runs every split, and their sums find room
   ============================================================================================== */
static void test_combine_tasks(void **state)
{
    (void)state;
    for (int32_t count = 0; count <= 3000; count++) {
        const int many = count > smla_kFewSplits, log_halves = smla_combine_log_halves(count);
        const int at_once = many ? smla_kHalfWarps >> log_halves : smla_kCombineWarps;
        if (many) {
            const int32_t n = smla_min(count, (int32_t)smla_kSplitsAtOnce), runs = smla_combine_runs(count);
            TU_CHECK(runs * smla_kRunSplits >= n && (runs - 1) * smla_kRunSplits < n,
                     "%d splits: %d runs", count, runs);
            TU_CHECK(runs * at_once <= smla_kRunsAtOnce, "%d splits: room for the sums", count);
            TU_CHECK(runs <= 2 << log_halves, "%d splits: at most two runs a half warp", count);
        }
        for (int32_t rows = 1; rows <= 512; rows += 1 + rows / 20) {
            const int64_t tasks = smla_combine_tasks(count, rows);
            const int64_t slices = rows * (int64_t)(many ? smla_kManySlices : smla_kFewSlices);
            if (count < 2) TU_CHECK_INT(tasks, 0);
            else
                TU_CHECK(tasks * at_once >= slices && (tasks - 1) * at_once < slices,
                         "%d splits, %d rows: %lld tasks", count, rows, (long long)tasks);
        }
    }
}

/* ================================================================================================
   How well the work is dealt: named cases on 132 SMs, Hopper's shapes
   ============================================================================================== */
typedef struct named {
    const char *name;
    int batch, heads, kv;
    int longs, long_kv; /* so many requests of another length, spread */
    double most;        /* (longest part + merge) / ideal may be this */
} named;

/* Blocks and overheads of the longest part, and merging, over what an equal share of all blocks and
   one overhead would take. */
static double deal_named(const named *n, summary *sum, double *ideal)
{
    plan *p = &g_plan;
    snapmla_step step = {};
    smla_geometry g = {};
    step.batch = n->batch;
    step.s_q = 1;
    step.heads = n->heads;
    step.sm_count = 132;
    step.path = SNAPMLA_PATH_SM90;
    step = smla_resolve_step(step);
    TU_CHECK(smla_plan_geometry(step, &g) == SNAPMLA_OK, "%s", n->name);
    p->policy = g.policy;
    p->group = g.group;
    p->tile_rows = g.tile_rows;
    p->slots = g.slots;
    int64_t blocks = 0;
    for (int b = 0; b < n->batch; b++) {
        const int is_long = n->longs > 0 && b % (n->batch / n->longs) == n->batch / n->longs / 2;
        p->lens[b] = is_long ? n->long_kv : n->kv;
        blocks += smla_item_blocks(p->policy, p->lens[b]);
    }
    plan_twin(p);
    const char *fault = check_plan(p, sum);
    TU_CHECK(fault == NULL, "%s: %s", n->name, fault);
    *ideal = (double)blocks * (double)p->policy.groups / p->policy.parts + smla_kOverheadBlocks;
    const double merge = sum->partials == 0 ? 0
                                            : 1 + (double)sum->partials * p->policy.part_rows
                                                      / smla_kMergeRows;
    return ((double)sum->longest + merge) / *ideal;
}

static void test_named_cases(void **state)
{
    (void)state;
    static const char *deals[] = {"whole", "even", "line"};
    static const named cases[] = {
        {"1 x 4K, M 16", 1, 16, 4096, 0, 0, 2.1},
        {"1 x 4K, M 64", 1, 64, 4096, 0, 0, 3.0},
        {"1 x 4K, M 128", 1, 128, 4096, 0, 0, 4.0},
        {"1 x 32K, M 16", 1, 16, 32768, 0, 0, 1.6},
        {"1 x 32K, M 64", 1, 64, 32768, 0, 0, 2.6},
        {"1 x 32K, M 128", 1, 128, 32768, 0, 0, 2.0},
        {"1 x 128K, M 16", 1, 16, 131072, 0, 0, 1.3},
        {"1 x 128K, M 64", 1, 64, 131072, 0, 0, 1.7},
        {"1 x 128K, M 128", 1, 128, 131072, 0, 0, 1.4},
        {"4 x 4K, M 16", 4, 16, 4096, 0, 0, 2.0},
        {"2 of 128K, 126 of 1K, M 16", 128, 16, 1024, 2, 131072, 1.25},
        {"2 of 128K, 126 of 1K, M 128", 128, 128, 1024, 2, 131072, 1.4},
        {"2 of 1M, 126 of 8K, M 64", 128, 64, 8192, 2, 1 << 20, 1.15},
        {"512 x 1K, M 128", 512, 128, 1024, 0, 0, 1.2},
        {"512 x 1K, M 16", 512, 16, 1024, 0, 0, 1.2},
        {"128 x 4K, M 128", 128, 128, 4096, 0, 0, 1.1},
        {"64 x 16K, M 128", 64, 128, 16384, 0, 0, 1.1},
        {"32 x 32K, M 128", 32, 128, 32768, 0, 0, 1.1},
        {"8 x 128K, M 128", 8, 128, 131072, 0, 0, 1.1},
        {"64 x 16K, M 16", 64, 16, 16384, 0, 0, 1.1},
        {"1M among 4095 idle, M 16", 4096, 16, 0, 1, 1 << 20, 1.4},
    };
    print_message("%-28s %5s %5s %7s %8s %8s %7s %7s\n", "case", "deal", "parts", "splits",
                  "partials", "longest", "ideal", "ratio");
    for (int i = 0; i < (int)(sizeof cases / sizeof cases[0]); i++) {
        summary sum;
        double ideal, ratio = deal_named(&cases[i], &sum, &ideal);
        print_message("%-28s %5s %5d %7lld %8lld %8lld %7.1f %7.2f\n", cases[i].name,
                      deals[g_plan.rule.deal], sum.parts, (long long)sum.splits,
                      (long long)sum.partials, (long long)sum.longest, ideal, ratio);
        TU_CHECK_LE(ratio, cases[i].most);
    }
    static const int shapes[3][2] = {{640, 128}, {8192, 64}, {33280, 64}};
    for (int s = 0; s < 3; s++) {
        for (int batch = 1; batch <= 128; batch *= 2) {
            char name[64];
            snprintf(name, sizeof name, "%d x %d, M %d", batch, shapes[s][0], shapes[s][1]);
            const named n = {name, batch, shapes[s][1], shapes[s][0], 0, 0, 0};
            summary sum;
            double ideal, ratio = deal_named(&n, &sum, &ideal);
            print_message("%-28s %5s %5d %7lld %8lld %8lld %7.1f %7.2f\n", name,
                          deals[g_plan.rule.deal], sum.parts, (long long)sum.splits,
                          (long long)sum.partials, (long long)sum.longest, ideal, ratio);
            TU_CHECK_LE(ratio, ideal < 20 ? 4.0 : 2.0);
        }
    }
}

/* ================================================================================================
   The kernel writes what the twin says
   ============================================================================================== */
static void test_kernel_is_the_twin(void **state)
{
    (void)state;
    int device = 0;
    if (cudaGetDevice(&device) != cudaSuccess
        || snapmla_device_supported(device, NULL) != SNAPMLA_OK) {
        print_message("skipped: no usable GPU\n");
        (void)cudaGetLastError();
        skip();
    }
    static const int heads[] = {1, 16, 40, 64, 128, 200, 513};
    static const int sms[] = {0, 1, 7, 132, 264, 4096};
    plan *p = &g_plan;
    tu_rng rng = tu_seed(77);
    smla_part *got = (smla_part *)malloc(sizeof p->part);
    int32_t *d_lens = NULL;
    void *d_plan = NULL;
    const size_t plan_most = sizeof p->part + sizeof p->split_begin;
    assert_int_equal(cudaMalloc(&d_lens, sizeof p->lens), cudaSuccess);
    assert_int_equal(cudaMalloc(&d_plan, plan_most), cudaSuccess);
    for (int set = 0; set < 3000; set++) {
        const int fixed = set % 4 == 3;
        random_policy(&rng, p, fixed, kMostBatch);
        snapmla_step step = {};
        smla_geometry g = {};
        step.batch = (int32_t)p->policy.batch;
        step.s_q = 1 + (int)below(&rng, 3);
        step.heads = heads[below(&rng, 7)];
        step.sm_count = sms[below(&rng, 6)];
        step.path = below(&rng, 2) ? SNAPMLA_PATH_GENERAL : SNAPMLA_PATH_SM90;
        step.max_seq_len = p->policy.max_seq_len;
        step.split_tokens = p->policy.split_blocks * smla_kBlock;
        step.seq_lens = d_lens;
        step.plan = d_plan;
        random_lens(&rng, p);
        step = smla_resolve_step(step);
        assert_int_equal(smla_plan_geometry(step, &g), SNAPMLA_OK);
        assert_int_equal(snapmla_plan_bytes(&step, &step.plan_bytes), SNAPMLA_OK);
        p->policy = g.policy;
        plan_twin(p);
        cudaMemcpy(d_lens, p->lens, (size_t)step.batch * 4, cudaMemcpyHostToDevice);
        cudaMemset(d_plan, 0xff, plan_most);
        assert_int_equal(snapmla_plan(&step), SNAPMLA_OK);
        assert_int_equal(cudaMemcpy(got, d_plan, (size_t)p->policy.parts * sizeof *got,
                                    cudaMemcpyDeviceToHost),
                         cudaSuccess);
        for (int i = 0; i < p->policy.parts; i++)
            if (memcmp(&got[i], &p->part[i], sizeof *got) != 0) {
                describe(p, set);
                TU_CHECK(0, "part %d: items %lld to %lld, tokens %d to %d, %d splits; wanted "
                            "%lld to %lld, %d to %d, %d", i,
                         (long long)got[i].first, (long long)got[i].last, got[i].begin, got[i].end,
                         got[i].splits, (long long)p->part[i].first, (long long)p->part[i].last,
                         p->part[i].begin, p->part[i].end, p->part[i].splits);
            }
        if (fixed) {
            static int64_t begin[kMostBatch + 1];
            cudaMemcpy(begin, (char *)d_plan + (size_t)p->policy.parts * sizeof *got,
                       ((size_t)step.batch + 1) * 8, cudaMemcpyDeviceToHost);
            TU_CHECK_BYTES(begin, p->split_begin, ((size_t)step.batch + 1) * 8);
        }
    }
    cudaFree(d_plan);
    cudaFree(d_lens);
    free(got);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_balanced),        cmocka_unit_test(test_fixed_splits),
        cmocka_unit_test(test_edges),           cmocka_unit_test(test_checker_refuses),
        cmocka_unit_test(test_combine_tasks),   cmocka_unit_test(test_named_cases),
        cmocka_unit_test(test_kernel_is_the_twin),
    };
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests_name("plan", tests, NULL, NULL);
}
