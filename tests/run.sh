#!/usr/bin/env bash
# `make test`: build and run everything that this machine can, print a line per program and, last, a
# line `N passed, N failed, N skipped` alone.  Exit code 1 when something failed.
#
# Only the names of programs given as arguments run, if there are any: tests/run.sh test_api test_gpu
# Logs are in build/log/.
set -u
cd "$(dirname "$0")/.."
make="${MAKE:-make} --no-print-directory"
export CC=${CC:-cc} CXX=${CXX:-c++} NVCC=${NVCC:-nvcc}
ARCHS=${ARCHS:-sm_80 sm_90a}
only=" $* "
passed=0 failed=0 skipped=0
mkdir -p build/log

wanted() { [ "$only" = "  " ] || [[ $only == *" $1 "* ]]; }

# line NAME PASSED FAILED SKIPPED SECONDS [REMARK]
line() {
    passed=$((passed + $2)) failed=$((failed + $3)) skipped=$((skipped + $4))
    printf '%-22s %4d passed, %2d failed, %3d skipped %7.1f s  %s\n' "$1" "$2" "$3" "$4" "$5" "${6:-}"
}

left_out() { printf '%-22s left out: %s\n' "$1" "$2"; }

now() { date +%s.%N; }
since() { awk -v a="$1" -v b="$(now)" 'BEGIN { print b - a }'; }

# A step that either works or not, counted as one test: step NAME COMMAND...
step() {
    local name=$1 start log=build/log/$1.txt
    shift
    wanted "$name" || return 0
    start=$(now)
    if "$@" >"$log" 2>&1; then
        line "$name" 1 0 0 "$(since "$start")"
    else
        line "$name" 0 1 0 "$(since "$start")" "see $log"
        tail -n 40 "$log"
        return 1
    fi
}

# A cmocka program, build/NAME: what did not end with OK or SKIPPED failed, and so did a program that
# died or ran nothing.  Without libcmocka-dev it can still run if it was built elsewhere and carried
# here.
cmocka_program() { # NAME
    local name=$1 start log=build/log/$1.txt rc ran ok skip bad why
    wanted "$name" || return 0
    if [ $have_cmocka = 0 ] && ! $make -q "build/$name" >/dev/null 2>&1; then
        left_out "$name" 'package libcmocka-dev is missing'
        return 1
    fi
    if ! $make "build/$name" >"$log" 2>&1; then
        line "$name" 0 1 0 0 "does not build, see $log"
        tail -n 40 "$log"
        return 1
    fi
    start=$(now)
    "build/$name" >"$log" 2>&1
    rc=$?
    ran=$(grep -c '^\[ RUN      \]' "$log")
    ok=$(grep -c '^\[       OK \]' "$log")
    skip=$(sed -n 's/^\[  SKIPPED \] \([0-9]*\) test(s).*/\1/p' "$log" |
        awk '{ n += $1 } END { print n + 0 }')
    why=$(sed -n 's/^skipped: //p' "$log" | sort -u | head -n 1)
    bad=$((ran - ok - skip))
    if [ $bad = 0 ] && { [ $rc != 0 ] || [ "$ran" = 0 ]; }; then bad=1; fi
    line "$name" "$ok" $bad "$skip" "$(since "$start")" "$why"
    if [ $bad != 0 ]; then
        echo "--- $name: exit code $rc, from $log:"
        grep -v '^\[ RUN \|^\[       OK \]\|^\[  SKIPPED ' "$log" | tail -n 60
        return 1
    fi
}

# A script that ends with `N passed, N failed`: script NAME COMMAND...
script() {
    local name=$1 start log=build/log/$1.txt rc last
    shift
    wanted "$name" || return 0
    start=$(now)
    "$@" >"$log" 2>&1
    rc=$?
    last=$(tail -n 1 "$log")
    if [[ $last =~ ^([0-9]+)\ passed,\ ([0-9]+)\ failed(,\ ([0-9]+)\ skipped)?$ ]]; then
        local good=${BASH_REMATCH[1]} bad=${BASH_REMATCH[2]} skip=${BASH_REMATCH[4]:-0}
        if [ "$bad" = 0 ] && [ $rc != 0 ]; then bad=1; fi
        line "$name" "$good" "$bad" "$skip" "$(since "$start")"
    else
        local bad=1
        line "$name" 0 1 0 "$(since "$start")" "ended early, see $log"
    fi
    if [ "$bad" != 0 ]; then grep -v '^ok ' "$log" | tail -n 60; return 1; fi
}

# --- what is there ------------------------------------------------------------------------------
tests/need.sh cc || { echo '0 passed, 1 failed'; exit 1; }
have_cmocka=1 have_nvcc=1
tests/need.sh cmocka || have_cmocka=0
"$NVCC" --version >/dev/null 2>&1 || have_nvcc=0

have_checked=1
echo 'int main(void) { return 0; }' | "$CC" -fsanitize=address -fsanitize=undefined -x c - \
    -o build/log/checked 2>/dev/null && build/log/checked || have_checked=0
rm -f build/log/checked

# --- the CPU half -------------------------------------------------------------------------------
cmocka_program test_ref
cmocka_program test_tiny_mla
if [ $have_checked = 1 ]; then # AddressSanitizer and UBSan; `make fuzz` runs the fuzz programs for long
    SNAPMLA_TEST_QUICK=1 cmocka_program test_ref_checked
    step fuzz_ref sh -c "$make build/fuzz_ref && build/fuzz_ref 50000"
    step fuzz_tiny_mla sh -c "$make build/fuzz_tiny_mla && tests/fuzz/seeds.sh build/fuzz_seeds &&
        build/fuzz_tiny_mla 50000 build/fuzz_seeds/*"
else
    left_out 'test_ref_checked, fuzz_*' "$CC has no AddressSanitizer or no UBSan"
fi
if wanted tiny_mla_bad_input && step tiny_mla_cpu $make build/tiny_mla_cpu; then
    script tiny_mla_bad_input tests/tiny_mla_bad_input.sh build/tiny_mla_cpu
fi
step accuracy_cpu sh -c "$make build/accuracy_cpu && build/accuracy_cpu --to 1K"
script readme tests/readme.sh

# --- the CUDA half ------------------------------------------------------------------------------
if [ $have_nvcc = 0 ]; then
    left_out 'CUDA header, tests and examples' \
        'no nvcc: package cuda-toolkit (12.8 or newer) of https://developer.nvidia.com/cuda-downloads'
    script check_header tests/check_header.sh
else
    for arch in $ARCHS; do step "header_$arch" $make "build/arch/impl_$arch.o"; done
    step examples_all_archs $make examples_all_archs
    step tiny_mla $make build/tiny_mla
    cmocka_program test_plan
    cmocka_program test_api
    [ $have_checked = 0 ] || step fuzz_host sh -c "$make build/fuzz_host && build/fuzz_host 500000"
    cmocka_program test_wrong_arch
    gpu_ok=1
    cmocka_program test_gpu || gpu_ok=0
    cmocka_program test_gpu_ptx80 || gpu_ok=0
    if wanted test_gpu && wanted test_gpu_ptx80; then
        tests/verified.sh $gpu_ok build/log/test_gpu.txt build/log/test_gpu_ptx80.txt
    fi
    if grep -qs '^gpu: device:' build/log/test_gpu.txt; then # the examples check themselves
        step run_01_minimal sh -c "$make build/01_minimal && build/01_minimal"
        step run_02_from_c sh -c "$make build/02_from_c && build/02_from_c"
        step run_03_cuda_graph sh -c "$make build/03_cuda_graph && build/03_cuda_graph"
        step run_tiny_mla build/tiny_mla --check
        [ ! -f "${CUDA_HOME:-/usr/local/cuda}/include/cublas_v2.h" ] ||
            step run_04_mla_layer sh -c "$make build/04_mla_layer && build/04_mla_layer --check"
        ! python3 --version >/dev/null 2>&1 || step run_05_embed sh -c \
            "$make build/libsnapmla.so && python3 examples/05_embed/embed.py build/libsnapmla.so"
    fi
    script check_header tests/check_header.sh
fi

if [ $skipped = 0 ]; then
    echo "$passed passed, $failed failed"
else
    echo "$passed passed, $failed failed, $skipped skipped"
fi
[ $failed = 0 ]
