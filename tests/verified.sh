#!/usr/bin/env bash
# verified.sh OK LOG... - the record of the last complete run of the GPU tests, tests/verified.txt.
#
# When the logs come from a GPU, OK is 1 and every case that began passed, the record is written anew:
# device, driver, CUDA runtime, date, cases, sha256 of the header and of the GPU tests.  Without a GPU
# it is printed, and whether it is CURRENT or STALE for the files that are here now.
set -eu
export LC_ALL=C
cd "$(dirname "$0")/.."
record=${SNAPMLA_VERIFIED:-tests/verified.txt}
ok=$1
shift

sums() {
    sha256sum snapmla.cuh snapmla_ref.h tests/impl.cu tests/gpu_*.[ch] tests/test_gpu*.c \
        tests/test_util.h
}
said() { sed -n "s/^gpu: $1: //p" "$log" | head -n 1; }
log=$1
[ -f "$log" ] || { echo "verified: no $log"; exit 0; }

if [ -n "$(said device)" ]; then
    ran=$(cat "$@" | grep -c "^\[ RUN      \]" || true)
    passed=$(cat "$@" | grep -c "^\[       OK \]" || true)
    if [ "$ok" != 1 ] || [ "$ran" != "$passed" ] || grep -q '^\[  SKIPPED \]\|^\[  FAILED  \]' "$@"; then
        echo "verified: not every GPU case passed on $(said device): $record stays as it was"
        exit 0
    fi
    {
        echo 'The last machine where every GPU test passed and none was skipped, written by `make test`.'
        echo "device   $(said device)"
        echo "driver   $(said driver)"
        echo "runtime  $(said runtime)"
        echo "date     $(date -u +%Y-%m-%d)"
        echo "cases    $passed"
        sums | sed 's/^/sha256   /'
    } >"$record"
    echo "verified: wrote $record"
elif [ ! -f "$record" ]; then
    echo "verified: no GPU here, and no record of a GPU run in $record"
else
    state=CURRENT
    sed -n 's/^sha256   //p' "$record" >build/verified.sums
    sums | cmp -s - build/verified.sums || state=STALE
    echo "verified: no GPU here; the last complete GPU run is $state for this tree:"
    sed -n '2,/^cases/s/^/    /p' "$record"
fi
