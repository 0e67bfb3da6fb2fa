#!/usr/bin/env bash
# mutate.sh - seeded faults: each is put into a copy of a header, alone, and the tests must fail.
#
#     tests/mutate.sh check               every fault fits the header, exactly once
#     tests/mutate.sh list
#     tests/mutate.sh cpu [NAME...]       build and run what tests without a GPU must find
#     tests/mutate.sh build [NAME...]     build the others for $ARCH into build/mutants
#     tests/mutate.sh run DIR [JOBS [NAME...]]   where there is a GPU: run those in DIR, JOBS at a time
#
# A mutant is killed when a test fails or crashes, or when there is no end: $TIMEOUT seconds (25) on top
# of three times what the header as it is takes.  The last lines count by kind, and name the survivors:
# each asks for a test, or is no fault.
# On the GPU, each mutant meets the test first that should find it, then, if that does not, all of the
# quick tests; with WHOLE=no it has then survived.  Verdicts are printed as they come.
# Each mutant of `build` is a shared library of the header, so that they share one test program; the
# CUDA runtime goes with it.
set -u
cd "$(dirname "$0")/.."
CC=${CC:-cc} CXX=${CXX:-c++} ARCH=${ARCH:-sm_90a} TIMEOUT=${TIMEOUT:-25}
NVCC=${NVCC:-$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)}
CUDA_HOME=${CUDA_HOME:-/usr/local/cuda}
out=build/mutants
names=() ; declare -A kind_of where_of from_of to_of first_of

# KIND WHERE NAME FROM TO, where FROM must occur once.  WHERE: the program that should find it.
mutant() {
    names+=("$3")
    kind_of[$3]=$1 where_of[$3]=$2 from_of[$3]=$4 to_of[$3]=$5
}

# ------------------------------------------------------------------------------------------------
# The faults
# ------------------------------------------------------------------------------------------------
# --- planner: tests/test_plan.cu ---
p() { mutant plan test_plan "$@"; }
p tail_block_forgotten 'return len / smla_kBlock + (len % smla_kBlock != 0);' 'return len / smla_kBlock;'
p splits_rounded_down '(uint32_t)(blocks + policy.split_blocks - 1) /' '(uint32_t)(blocks) /'
p empty_request_costs_nothing 'work->blocks += smla_max(1, blocks);' 'work->blocks += blocks;'
p longest_forgotten 'smla_max(work->longest, (int64_t)blocks)' '(int64_t)blocks'
p border_without_overhead 'return smla_kOverheadBlocks + part * rule.stretch' 'return part * rule.stretch'
p border_without_rest ' + smla_div(part * rule.rest, rule.used);' ';'
p snap_to_wrong_item 'if (left <= rule.snap) ++cut.item;' 'if (left <= rule.snap) cut.token = 0;'
p cut_token_off 'cut.token = (int32_t)(done * smla_kBlock);' \
    'cut.token = (int32_t)((done + 1) * smla_kBlock);'
p part_takes_next_item 'part.last = b.item - 1;' 'part.last = b.item;'
p sharers_one_short 'part.splits = lo - i + 1;' 'part.splits = lo - i;'
p even_splits_too_short 'smla_div_up<Int>(blocks - items, spare)' 'smla_div_as<Int>(blocks - items, spare)'
p whole_items_lost 'const int64_t each = smla_div_up<Int>(items, parts);' \
    'const int64_t each = smla_div_as<Int>(items, parts);'
p sums_in_32_bits '+ policy.parts < INT_MAX;' '+ policy.parts < INT64_MAX;'
p walk_one_split_too_far 'if (next < splits * split_tokens &&' 'if (next <= splits * split_tokens &&'
p slot_shared_by_two ': 2 * (int64_t)index + (c.begin == 0);' ': 2 * (int64_t)index;'
p tile_group_slots_mixed 'before * p.policy.groups + tile_group * splits + i;' \
    'before * p.policy.groups + i;'
p two_splits_not_merged 'if (count < 2) return 0;' 'if (count < 3) return 0;'
p combine_reads_wrong_slot 'return 2 * (int64_t)(list.part + i) + (i == 0);' \
    'return 2 * (int64_t)(list.part + i);'
p group_of_item_ignored 'const int64_t tile_group = c.item - s.request * p.policy.groups;' \
    'const int64_t tile_group = 0;'

# --- host checks and sizes: tests/test_api.c ---
h() { mutant host test_api "$@"; }
h rows_limit_doubled 'rows * s.batch <= most,' 'rows * s.batch <= 2 * most,'
h page_size_any 'page_size <= 1024 && (page_size & (page_size - 1)) == 0,
               SNAPMLA_ERROR_PAGE_SIZE' 'page_size <= 1024, SNAPMLA_ERROR_PAGE_SIZE'
h split_tokens_of_64 's.split_tokens % 128 == 0' 's.split_tokens % 64 == 0'
h scale_align_4 'const size_t scale_align = (size_t)smla_min(16, 4 * c.page_size);' \
    'const size_t scale_align = 4;'
h one_query_plane_will_do 'd.q_content != NULL && d.q_scale != NULL && d.q_rope != NULL;' \
    'd.q_content != NULL || d.q_scale != NULL || d.q_rope != NULL;'
h batch_stride_unchecked 'd.q_token_stride >= dims && d.q_batch_stride >= dims' 'd.q_token_stride >= dims'
h softmax_scale_zero 'd.softmax_scale > 0.0f' 'd.softmax_scale >= 0.0f'
h exact_workspace_refused 'd.workspace_bytes >= smla_workspace_size' \
    'd.workspace_bytes > smla_workspace_size'
h exact_plan_refused 's.plan_bytes >= smla_plan_size' 's.plan_bytes > smla_plan_size'
h workspace_without_stats '(smla_kLatent * sizeof(float) + sizeof(float4))' '(smla_kLatent * sizeof(float))'
h dense_stride_overflows 'return stride > INT64_MAX / count ? INT64_MAX : stride * count;' \
    'return (int64_t)((uint64_t)stride * (uint64_t)count);'
h token_count_overflows '    SMLA_CHECK(d.tokens <= INT64_MAX / d.heads, SNAPMLA_ERROR_TOKENS);
' ''
h import_page_stride_short 'page_stride >= (page_size - 1) * row_stride + row' 'page_stride >= row'
h second_layer_unchecked 'for (int32_t l = 1; l < count; ++l) {' 'for (int32_t l = 2; l < count; ++l) {'
h slots_and_table_both 'desc->slots == NULL || desc->block_table == NULL,' 'true,'
h split_sums_one_short '(size_t)g.policy.batch + 1 : 0;' '(size_t)g.policy.batch : 0;'

# --- the reference: tests/test_ref.c ---
r() { mutant reference test_ref "$@"; }
r ref_e4m3_ties_up '(significand + ((1u << (shift - 1u)) - 1u) + odd) >> shift' \
    '(significand + (1u << (shift - 1u))) >> shift'
r ref_bf16_ties_up '(u + 0x7fffu + ((u >> 16) & 1u)) >> 16' '(u + 0x8000u) >> 16'
r ref_floor_gone 's = (s > 1e-26f ? s : 1e-26f) / 448.0f;' 's = s / 448.0f;'
r ref_mask_off_by_one 'visible += 1 + r / job->d.heads' 'visible += r / job->d.heads'
r ref_rescale_missing 'state->l[r] = state->l[r] * *alpha + sum;' 'state->l[r] = state->l[r] + sum;'
r ref_flushed_not_counted 'rounded >= least ? rounded * unit / job->scale[t] : x[t];' \
    'rounded * unit / job->scale[t];'
r ref_lse_base_2 'return l != l ? l : m * SMLAR_LN2 + logf(l);' 'return l != l ? l : m + logf(l);'
r ref_merge_reads_empty_part 'weight[n] = weight[n] == -HUGE_VAL ? -1 : exp(weight[n] - m);' \
    'weight[n] = exp(weight[n] - m);'
r ref_page_gap_ignored 'c->content + page * c->content_page_stride' \
    'c->content + page * c->page_size * c->latent_dim'
r ref_infinite_scale_is_a_number '        *scale = *at.scale;
        if (!smlar_finite(*scale)) kind = SMLAR_BAD;' '        *scale = *at.scale;
        if (*scale != *scale) kind = SMLAR_BAD;'
r ref_skipped_slot_written '        if (d.slots[i] < 0) continue;
        if (d.norm.weight)' '        if (d.norm.weight)'

# --- data flow: on the GPU ---
d() { mutant dataflow test_gpu "$@"; }
d amax_misses_a_word 'for (int i = 1; i < 8; ++i) most = smla_max_nan' \
    'for (int i = 1; i < 7; ++i) most = smla_max_nan'
d large_rows_stay_small '        y.scale = smla_mul_rn(scale, smla_kGrow);
        y.content[0]' '        y.scale = scale;
        y.content[0]'
d zero_row_without_floor 'smla_max(smla_bf16_to_f32(amax), smla_kAmaxFloor);' 'smla_bf16_to_f32(amax);'
d page_gap_ignored 'if ((content_gap | scale_gap | rope_gap) != 0) {' \
    'if ((content_gap | rope_gap) > (1 << 30)) {'
d offset_in_32_bits 't.content = planes.content + page * planes.content_stride + offset * smla_kLatent;' \
    't.content = planes.content + (int32_t)(page * planes.content_stride + offset * smla_kLatent);'
d rope_offset_in_32_bits 't.rope = planes.rope + page * planes.rope_stride + offset * smla_kRope;' \
    't.rope = planes.rope + (int32_t)(page * planes.rope_stride + offset * smla_kRope);'
d skipped_slot_written '    if (slot < 0) return;
    const smla_token to' '    const smla_token to'
d rotation_backwards 'if ((threadIdx.x & 8) == 0) b = smla_minus(b);' \
    'if ((threadIdx.x & 8) != 0) b = smla_minus(b);'
d norm_without_eps 'smla_add_rn(smla_mul_rn(sum, 1.0f / smla_kLatent), eps)' \
    'smla_mul_rn(sum, 1.0f / smla_kLatent)'
d fetch_ignores_first '(p.first != nullptr ? p.first[request] : 0) + (row - start)' '(row - start)'
d copy_loses_scales 'if (lane < tokens) to.scale[lane] = scale;' 'if (lane < 1) to.scale[lane] = scale;'
d record_scale_swapped 'to->scale[k] = scales[2 * k];' 'to->scale[k] = scales[2 - 2 * k];'
d last_token_of_odd_count_lost 'if (slot >= 0) smla_store_half<false>' \
    'if (slot >= 0 && token + 1 < p.tokens) smla_store_half<false>'

# --- what both decode kernels share, the general kernel ---
g() { mutant general test_gpu "$@"; }
g mask_off_by_one 'return p.causal ? len - p.s_q + 1 + row / p.heads : len;' \
    'return p.causal ? len - p.s_q + row / p.heads : len;'
g mask_by_head 'return p.causal ? len - p.s_q + 1 + row / p.heads : len;' \
    'return p.causal ? len - p.s_q + 1 + row % p.s_q : len;'
g table_width_ignored '    p.len_limit = (int32_t)smla_min(smla_min(held, (int64_t)g.policy.max_seq_len),' \
    '    p.len_limit = (int32_t)smla_min(smla_max(held, (int64_t)g.policy.max_seq_len),'
g tail_one_too_long '    const smla_split s = smla_split_at(p, cursor);
    if (s.tile >= p.tiles) return;' '    smla_split s = smla_split_at(p, cursor);
    s.end += s.end > s.begin && s.end == s.len;
    if (s.tile >= p.tiles) return;'
g hole_is_read 'const bool live = token < end && page >= 0;' 'const bool live = token < end;'
g rescale_missing 'y.alpha = smla_ex2(m - shift);' 'y.alpha = m == smla_neg_inf() ? 0.0f : 1.0f;'
g scales_swapped 'make_float4(step.alpha, step.block_scale, step.m, 0.0f);' \
    'make_float4(step.block_scale, step.alpha, step.m, 0.0f);'
g flushed_mass_lost '(v.x >= least ? rounded_x : e.x)' '(rounded_x)'
g barrier_before_weights '        __syncthreads();
        if (kRopes == 1 && i + 1 < blocks)' '        if (kRopes == 1 && i + 1 < blocks)'
g copies_not_awaited '        smla_cp_async_wait_all();
        __syncthreads(); /* block i' '        __syncthreads(); /* block i'
g nan_value_stays '            *reinterpret_cast<uint4 *>(sm.content[stage] + t * smla_kLatent + 16 * i) =
                make_uint4(0, 0, 0, 0);' '            (void)i;'
g infinite_scale_stays '        sm.scale[stage][t] = __uint_as_float(smla_kNanF32);
' ''
g partial_rows_overlap '    const int64_t partial = (s.slot * p.group + s.tile % p.group) * kRows;
    __syncthreads();' '    const int64_t partial = (s.slot * p.group) * kRows;
    __syncthreads();'
g masked_weight_times_nan 'smla_general_round(precise, e.x == 0.0f ? 0.0f : e.x * k_s.x * step.inverse,' \
    'smla_general_round(precise, e.x * k_s.x * step.inverse,'

# --- the Hopper kernel ---
w() { mutant hopper test_gpu "$@"; }
w hopper_mask_off_by_one 'const bool seen = token < smla_min(info.valid, limit[h]);' \
    'const bool seen = token <= smla_min(info.valid, limit[h]);'
w hopper_few_mask_off_by_one 'const bool seen = token < smla_min(info.valid, sm.limit[row] - token0);' \
    'const bool seen = token <= smla_min(info.valid, sm.limit[row] - token0);'
w hopper_mask_too_late '> seen_by_all;' '> seen_by_all + smla_kBlock;'
w hopper_tail_not_cut 'page < 0 ? 0 : smla_min(s.end - token, (int)smla_kBlock);' \
    'page < 0 ? 0 : (int)smla_kBlock;'
w hopper_rescale_missing 'rows.l[h] *= alpha;' ''
w hopper_masters_not_rescaled '    if (moved == 0) return;
    SMLA_UNROLL' '    if (moved <= ~0u) return;
    SMLA_UNROLL'
w hopper_nan_value_stays 'if (clear_even | clear_odd) smla_hopper_clear_v' \
    'if ((clear_even | clear_odd) == 1) smla_hopper_clear_v'
w hopper_scale_swapped 'to[tile_row & 1] = (uint16_t)rounded;' 'to[tile_row & 1] = (uint16_t)(rounded >> 16);'
w hopper_flushed_mass_lost '    if (!normal) smla_hopper_flushed(sm, t, k, scale, x);' '    (void)normal;'
w hopper_inverse_out_of_order '+ (lane & 3) * 4 + (lane & 4) / 2;' '+ (lane & 3) * 4 + (lane & 4);'
w hopper_stage_freed_early 'smla_mbarrier_init(smla_smem_addr(&sm.empty[i]), 8 + kSumWarps);' \
    'smla_mbarrier_init(smla_smem_addr(&sm.empty[i]), 1 + kSumWarps);'
w hopper_page_table_stale '        if ((i & 31) == 0) {
            pages.page = pages.next_page;' '        if ((i & 63) == 0) {
            pages.page = pages.next_page;'
w hopper_logits_overwritten \
    '    smla_mbarrier_wait(smla_smem_addr(&sm.logits_empty[buffer]), to.parity() ^ 1);
' ''
w hopper_sums_read_early '    smla_bar_sync(smla_kBarSums, 128);
    if ((t & 31) == 0) smla_mbarrier_arrive' '    if ((t & 31) == 0) smla_mbarrier_arrive'
w hopper_rest_of_p_lost \
    'smla_wgmma_k32_e4m3(part[u % kParts], a[u % kParts][1], weight + kRest + 2, 1);' ''
w hopper_rest_of_q_lost 'smla_hopper_store_q(sm, p, r + smla_kPreciseRows, lo);' \
    'smla_hopper_store_q(sm, p, r + smla_kPreciseRows, {});'
w hopper_nan_query_hidden 'make_uint2(y.content[i].x | nan, y.content[i].y | nan);' \
    'make_uint2(y.content[i].x, y.content[i].y);'

# --- combine, merge, launches ---
c() { mutant combine test_gpu "$@"; }
c combine_without_weights 'return smla_ex2(stat.x - (top == smla_neg_inf() ? 0.0f : top));' \
    'return 1.0f;'
c combine_loses_last_split \
    'if (from + k < end) smla_combine_add(&acc, v[k], sm.weight[from + k - first]);' \
    'if (from + k + 1 < end) smla_combine_add(&acc, v[k], sm.weight[from + k - first]);'
c combine_second_run_lost 'run < runs; run += halves) {' 'run < runs && run == half; run += halves) {'
c combine_rounds_not_joined 'first > 0 ? sums[run * next] : smla_combine_nothing();' \
    'smla_combine_nothing();'
c combine_order_by_count 'smla_combine_add(&acc, sums[run * next], 1.0f);' \
    'smla_combine_add(&acc, sums[(run + runs / 2) % runs * next], 1.0f);'
c combine_wrong_denominator 'lq = lq * alpha + (weight < 0.0f ? 0.0f : stat.z * weight);' \
    'lq = lq * alpha + (weight < 0.0f ? 0.0f : stat.y * weight);'
c combine_starts_early '    smla_griddepcontrol_wait(); /* here, where' '    /* here, where'
c merge_base_2 'const float w = smla_ex2((lse - shift) * smla_kLog2e) * inverse;' \
    'const float w = smla_ex2(lse - shift) * inverse;'
c merge_reads_empty_part 'if (lse == smla_neg_inf()) continue;' 'if (lse != lse) continue;'
c pending_error_swallowed 'if (before == cudaSuccess) (void)cudaGetLastError();' '(void)cudaGetLastError();'

# The test that should find a fault on the GPU: TEST NAME...
first() {
    local test=$1 name
    shift
    for name in "$@"; do first_of[$name]=$test; done
}
first test_quantize_q amax_misses_a_word large_rows_stay_small zero_row_without_floor
first test_append page_gap_ignored skipped_slot_written
first test_append_norm_and_rotation rotation_backwards norm_without_eps last_token_of_odd_count_lost
first test_fetch_ranges fetch_ignores_first
first test_copy_pages copy_loses_scales
first test_import record_scale_swapped
first test_past_4_gib offset_in_32_bits rope_offset_in_32_bits
first test_hand_computed scales_swapped
first test_every_length copies_not_awaited
first test_lengths_are_cut table_width_ignored
first test_negative_entries_are_skipped hole_is_read
first test_causal_at_split_ends mask_off_by_one mask_by_head partial_rows_overlap \
    hopper_mask_off_by_one hopper_few_mask_off_by_one hopper_mask_too_late hopper_scale_swapped \
    combine_without_weights
first test_tails_hold_anything tail_one_too_long hopper_tail_not_cut
first test_nan_changes_no_other_bit nan_value_stays masked_weight_times_nan hopper_nan_value_stays
first test_scales_that_are_no_numbers infinite_scale_stays
first test_logits_rise_block_by_block rescale_missing hopper_rescale_missing hopper_masters_not_rescaled \
    hopper_logits_overwritten
first test_long_splits barrier_before_weights hopper_stage_freed_early hopper_page_table_stale \
    hopper_sums_read_early
first test_subnormal_scales flushed_mass_lost hopper_flushed_mass_lost hopper_inverse_out_of_order
first test_precise_beside_default hopper_rest_of_p_lost hopper_rest_of_q_lost
first precise_test_nan_queries hopper_nan_query_hidden
first test_more_splits_than_a_round combine_rounds_not_joined
first test_tokens_straddle_splits combine_loses_last_split combine_second_run_lost \
    combine_order_by_count combine_wrong_denominator combine_starts_early
first test_merge merge_base_2 merge_reads_empty_part
first test_pending_cuda_error pending_error_swallowed

# ------------------------------------------------------------------------------------------------
# The work
# ------------------------------------------------------------------------------------------------
header_of() { if [ "${kind_of[$1]}" = reference ]; then echo snapmla_ref.h; else echo snapmla.cuh; fi; }

# seed NAME [dry]: build/mutants/NAME/<header> with the fault, or a message
seed() {
    local header to=/dev/null
    header=$(header_of "$1")
    if [ -z "${2-}" ]; then mkdir -p "$out/$1" && to=$out/$1/$header; fi
    FROM=${from_of[$1]} TO=${to_of[$1]} LC_ALL=C awk -v name="$1" -v header="$header" '
        BEGIN { RS = "\001" } # the file is one record
        { text = $0 }
        END {
            from = ENVIRON["FROM"]
            at = index(text, from)
            rest = substr(text, at + length(from))
            if (at == 0 || index(rest, from) > 0) {
                wrong = at == 0 ? "does not hold" : "holds more than once"
                print name ": " header " " wrong ": " from >"/dev/stderr"
                exit 1
            }
            printf "%s%s%s", substr(text, 1, at - 1), ENVIRON["TO"], rest
        }' "$header" >"$to"
}

killed=() survived=() broken=()
verdict() { # NAME killed|survived|broken REMARK
    eval "$2+=('$1')"
    printf '%-9s %-10s %-32s %s\n' "$2" "${kind_of[$1]}" "$1" "$3"
}

summary() {
    local kind name k s
    for kind in plan host reference dataflow general hopper combine; do
        k=0 s=0
        for name in ${killed[@]+"${killed[@]}"}; do [ "${kind_of[$name]}" != $kind ] || k=$((k + 1)); done
        for name in ${survived[@]+"${survived[@]}"}; do [ "${kind_of[$name]}" != $kind ] || s=$((s + 1)); done
        [ $((k + s)) = 0 ] || printf '%-10s %3d killed, %d survived\n' $kind $k $s
    done
    [ ${#survived[@]} = 0 ] || echo "survivors: ${survived[*]}"
    [ ${#broken[@]} = 0 ] || echo "did not build: ${broken[*]}"
    [ $((${#survived[@]} + ${#broken[@]})) = 0 ]
}

# The first failed test of a log.
first_failed() { sed -n 's/^\[  FAILED  \] *\([a-z0-9_A-Z]*\)$/\1/p' "$1" | head -n 1; }

running() { sed -n 's/^\[ RUN      \] //p' "$1" | tail -n 1; }

judge() { # NAME EXIT-CODE LOG
    local test
    test=$(first_failed "$3")
    if [ "$2" = 0 ] && [ -z "$test" ]; then verdict "$1" survived ''
    elif [ -n "$test" ]; then verdict "$1" killed "$test"
    elif [ "$2" = 124 ] || [ "$2" = 137 ]; then verdict "$1" killed "no end, in $(running "$3")"
    else verdict "$1" killed "exit code $2, in $(running "$3")"; fi
}

build_cpu() { # NAME: build/mutants/NAME/program
    local dir=$out/$1
    local flags="-std=c++17 -O1 -gencode arch=compute_80,code=compute_80 -I$dir -I. -Itests"
    local libs="-lcmocka -L$CUDA_HOME/lib64 -lcudart_static -ldl -lrt -lpthread -lm"
    case ${where_of[$1]} in
    test_plan) $NVCC $flags -c -o $dir/o.o tests/test_plan.cu && $CXX -o $dir/program $dir/o.o $libs ;;
    test_api) $NVCC $flags -c -o $dir/o.o tests/impl.cu &&
        $CC -std=c99 -O1 -isystem "$CUDA_HOME/include" -I$dir -I. -Itests -c -o $dir/api.o \
            tests/test_api.c && $CXX -o $dir/program $dir/api.o $dir/o.o $libs ;;
    test_ref) mkdir -p $dir/tests && cp tests/test_ref.c tests/test_util.h $dir/tests && # it includes ../
        $CC -std=c99 -O1 -o $dir/program $dir/tests/test_ref.c $libs ;;
    esac
}

chosen() { # PATTERN-OF-WHERE NAMES...
    local pattern=$1 name
    shift
    for name in "${names[@]}"; do
        [[ ${where_of[$name]} =~ $pattern ]] || continue
        if [ $# = 0 ] || [[ " $* " == *" $name "* ]]; then echo "$name"; fi
    done
}

case ${1-} in
check)
    bad=0
    for name in "${names[@]}"; do
        seed "$name" dry || bad=1
        [ "${where_of[$name]}" = test_gpu ] || continue
        test=${first_of[$name]-}
        grep -qE "cmocka_unit_test\\(.*${test:-none}|PRECISE_TEST\\(${test#precise_}\\)" tests/test_gpu*.c ||
            { echo "$name: no test is named that should find it: $test" >&2; bad=1; }
    done
    echo "${#names[@]} faults"
    exit $bad
    ;;
list)
    for name in "${names[@]}"; do
        printf '%-10s %-10s %s\n' "${kind_of[$name]}" "${where_of[$name]}" "$name"
    done
    ;;
cpu)
    shift
    for name in $(chosen '^test_(plan|api|ref)$' "$@"); do
        seed "$name" || { broken+=("$name"); continue; }
        log=$out/$name/log.txt
        if ! build_cpu "$name" >"$log" 2>&1; then
            verdict "$name" broken "see $log"
            continue
        fi
        SNAPMLA_TEST_QUICK=1 timeout $((4 * TIMEOUT)) "$out/$name/program" >"$log" 2>&1
        judge "$name" $? "$log"
        rm -f "$out/$name/program" "$out/$name"/*.o
    done
    summary
    ;;
build)
    shift
    mkdir -p $out
    library="$NVCC -std=c++17 -O3 -gencode arch=compute_${ARCH#sm_},code=$ARCH -Xfatbin -compress-all
        -cudart none -Xcompiler -fPIC -shared -x cu"
    make=${MAKE:-make}
    objects=build/gpu_util.o
    for file in tests/test_gpu*.c; do file=${file#tests/}; objects="$objects build/${file%.c}.o"; done
    $make --no-print-directory $objects build/libcmocka.so.0 >/dev/null || exit 1
    echo '#define SNAPMLA_IMPLEMENTATION
#include "snapmla.cuh"' >$out/impl.cu
    mkdir -p $out/unchanged
    $library -I. -o $out/unchanged/libmutant.so $out/impl.cu && strip $out/unchanged/libmutant.so &&
        $CXX -o $out/test_gpu $objects -L$out/unchanged -lmutant -lcmocka -L"$CUDA_HOME/lib64" -lcudart \
            -lpthread -lm -Wl,-rpath,'$ORIGIN' &&
        cp -L build/libcmocka.so.0 "$(echo "$CUDA_HOME"/lib64/libcudart.so.[0-9][0-9])" $out/ &&
        strip $out/test_gpu || exit 1
    for name in $(chosen '^test_gpu$' "$@"); do
        seed "$name" || { broken+=("$name"); continue; }
        if $library -I$out/$name -o $out/$name/libmutant.so $out/impl.cu >$out/$name/log.txt 2>&1; then
            strip $out/$name/libmutant.so
            rm $out/$name/snapmla.cuh $out/$name/log.txt
            echo "built $name"
        else
            verdict "$name" broken "see $out/$name/log.txt"
        fi
    done
    du -sh $out
    [ ${#broken[@]} = 0 ]
    ;;
run)
    dir=${2:?the folder of mutants} jobs=${3:-6} work=$(mktemp -d)
    shift $(($# < 3 ? $# : 3))
    trap 'rm -rf "$work"' EXIT
    run_one() { # NAME LOG SECONDS [TEST]: up to the first failed test; the exit code in $rc, its $seconds
        local start
        start=$(date +%s)
        LD_LIBRARY_PATH=$dir/$1 SNAPMLA_TEST_QUICK=1 timeout -k 2 "$3" "$dir/test_gpu" ${4-} 2>&1 |
            awk '{ print; fflush() } /^\[  FAILED  \]/ { exit }' >"$2"
        rc=${PIPESTATUS[0]} seconds=$(($(date +%s) - start + 1))
    }
    # unchanged SECONDS [TEST]: the header as it is must pass.  Its seconds go to a file.
    unchanged() {
        local log=$work/unchanged-${2-all}.txt cases
        run_one unchanged "$log" "$1" ${2-}
        cases=$(grep -c '^\[       OK \]' "$log")
        if [ $rc != 0 ] || [ "$cases" = 0 ] || ! grep -q '^gpu: device:' "$log"; then
            tail -n 20 "$log"
            echo "the unchanged header must pass ${2-the quick tests}, on a GPU"
            return 1
        fi
        echo "unchanged: ${2-the quick tests}: $cases cases passed in $seconds s"
        echo $seconds >"$log.seconds"
    }
    # one_mutant NAME [TEST]: its verdict to a file; a survivor of one test is only noted
    one_mutant() {
        local least
        least=$(cat "$work/unchanged-${2-all}.txt.seconds")
        run_one "$1" "$work/$1.txt" $((TIMEOUT + 3 * least)) ${2-}
        if [ -n "${2-}" ] && [ $rc = 0 ] && [ "${WHOLE-}" != no ]; then
            echo "survived $2: $1"
            echo "$1" >>"$work/left"
        else
            judge "$1" $rc "$work/$1.txt" >"$work/$1.verdict"
            cat "$work/$1.verdict"
        fi
    }
    free_job() { while [ "$(jobs -rp | wc -l)" -ge "$jobs" ]; do wait -n; done; }
    list= tests=
    for name in $(chosen '^test_gpu$' "$@"); do
        [ -f "$dir/$name/libmutant.so" ] || continue
        list="$list $name"
        [[ " $tests " == *" ${first_of[$name]} "* ]] || tests="$tests ${first_of[$name]}"
    done
    # side by side, as the mutants, so that a timeout below means something
    for test in $tests; do
        free_job
        { unchanged $((8 * TIMEOUT)) "$test" || touch "$work/failed"; } &
    done
    wait
    [ ! -f "$work/failed" ] || exit 1
    for name in $list; do
        free_job
        one_mutant "$name" "${first_of[$name]}" &
    done
    wait
    left=$(cat "$work/left" 2>/dev/null)
    if [ -n "$left" ]; then
        unchanged $((12 * TIMEOUT)) || exit 1
        for name in $left; do
            free_job
            one_mutant "$name" &
        done
        wait
    fi
    for name in $list; do
        read -r word rest <"$work/$name.verdict"
        eval "$word+=('$name')"
    done
    summary
    ;;
*)
    sed -n '2,/^set/p' "$0" | grep '^#' | cut -c3-
    exit 2
    ;;
esac
