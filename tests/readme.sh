#!/usr/bin/env bash
# readme.sh - README.md and the header's manual against the files they speak of: tables and charts
# against the CSV files, names against the header, links against the tree, the manual's example
# against a compiler.  A check that is seeded with a mistake has to find it.
# Ends with a line `N passed, N failed, N skipped`.
set -u
export LC_ALL=C
cd "$(dirname "$0")/.."
CC=${CC:-cc} CUDA_HOME=${CUDA_HOME:-/usr/local/cuda}
charts=examples/charts
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
passed=0 failed=0 skipped=0

good() { # NAME COMMAND...
    local name=$1
    shift
    if "$@" >"$tmp/out" 2>&1; then
        passed=$((passed + 1)) && echo "ok      $name"
    else
        failed=$((failed + 1)) && echo "FAILED  $name" && tail -n 20 "$tmp/out"
    fi
}
bad() { good "$1 is found" refuses "${@:2}"; }
refuses() { ! "$@"; }
skip() { skipped=$((skipped + 1)) && echo "skipped $1: $2"; }

# --- tables and charts ----------------------------------------------------------------------------
tables() { tests/readme_tables.sh "$@"; }

seeded_charts() { # FILE SED-SCRIPT: a copy of examples/charts with one change that is one
    rm -rf "$tmp/charts" && cp -r $charts "$tmp/charts"
    sed "$2" "$charts/$1" >"$tmp/charts/$1"
    ! cmp -s "$charts/$1" "$tmp/charts/$1" || { echo "$1: nothing changed" >&2 && return 1; }
}

good 'README: tables are what the CSV files say' tables
sed '/begin speed/,/end speed/s/^\(| 16 | 1 | 512 | 1K | \)[0-9.]*/\199.9/' README.md >"$tmp/README.md"
good 'README with another time in it' refuses cmp -s README.md "$tmp/README.md"
bad 'a time that is not the CSV file'\''s' tables "$tmp/README.md"
sed '/^<!-- end accuracy -->/d' README.md >"$tmp/README.md"
bad 'a table without end' tables "$tmp/README.md"
good 'another error in accuracy.csv' seeded_charts accuracy.csv '/,mean,1024,1,/s/,[0-9.]*e/,9.99e/'
bad 'an error that README does not show' tables README.md "$tmp/charts"
good 'another error of the precise mode' seeded_charts accuracy.csv \
    '/^bf16 q,precise [a-z0-9]*,mean,1024,1,/s/,[0-9.]*e/,9.99e/'
bad 'an error of the precise mode that README does not show' tables README.md "$tmp/charts"
good 'another time in speed.csv' seeded_charts speed.csv \
    '/^headline,128,1,128,64,16384/s/rested,[0-9.]*/rested,999/'
bad 'a time that README does not show' tables README.md "$tmp/charts"
good 'another bandwidth in speed.csv' seeded_charts speed.csv \
    '/^dataflow,.*,fetch by slots,/s/,0\.[0-9]*,\([0-9.]*\)$/,0.5555,\1/'
bad 'a bandwidth that README does not show' tables README.md "$tmp/charts"

chart_is_current() { # KIND CSV SVG
    build/chart "$1" "$2" "$tmp/chart.svg" && cmp "$tmp/chart.svg" "$3"
}
well_formed() {
    python3 -c 'import sys, xml.dom.minidom
for name in sys.argv[1:]: xml.dom.minidom.parse(name)' "$@"
}
good 'chart builds' "${MAKE:-make}" --no-print-directory build/chart
good 'speed.svg is drawn from speed.csv' chart_is_current speed $charts/speed.csv $charts/speed.svg
good 'error.svg is drawn from accuracy.csv' chart_is_current error $charts/accuracy.csv $charts/error.svg
seeded_charts speed.csv '/^headline,128,/s/,[0-9.]*\(,[0-9.]*,\(memory\|tensor\),\)/,9.99\1/'
bad 'a chart of other numbers' chart_is_current speed "$tmp/charts/speed.csv" $charts/speed.svg
bad 'a CSV file without rows' build/chart speed /dev/null "$tmp/chart.svg"
bad 'a distribution that was not measured' \
    build/chart error $charts/accuracy.csv "$tmp/chart.svg" nothing
if python3 --version >/dev/null 2>&1; then
    good 'charts are well-formed' well_formed $charts/speed.svg $charts/error.svg
    sed '$d' $charts/speed.svg >"$tmp/cut.svg"
    bad 'a chart that is cut off' well_formed "$tmp/cut.svg"
else
    skip 'charts are well-formed' 'no python3'
fi
dark_mode() { grep -q 'prefers-color-scheme:dark' $charts/speed.svg $charts/error.svg; }
good 'charts have colours for dark mode' dark_mode

precise_row() { # CSV: to which a row of the precise mode is added
    cp $charts/speed.csv "$1"
    awk -F, 'BEGIN { OFS = FS } /^preset,/ { for (i = 1; i <= NF; i++) at[$i] = i }
        /^headline,128,1,128,64,16384,/ {
            $at["mode"] = "precise"; $at["tflops"] = 999; $at["default_ratio"] = 1.5; print }' \
        $charts/speed.csv >>"$1"
    ! cmp -s $charts/speed.csv "$1"
}
good 'a row of the precise mode' precise_row "$tmp/precise.csv"
rm -rf "$tmp/charts" && cp -r $charts "$tmp/charts" && cp "$tmp/precise.csv" "$tmp/charts/speed.csv"
bad 'a time of the precise mode that README does not show' tables README.md "$tmp/charts"
good 'speed.svg without the precise mode' chart_is_current speed "$tmp/precise.csv" $charts/speed.svg

# What bench prints beside its rows of `flaggems` is the table of README.
h800_agree() { # BENCH
    sed -n 's/^\([0-9]*\),1,\([0-9]*\),\([0-9]*\),\([0-9.]*\),\([0-9.]*\)$/{\1, \2, \3, \4, \5}/p' \
        $charts/peers_h800.csv >"$tmp/csv"
    sed -n '/ kH800\[\] = {/,/^};/p' "$1" | grep -oE '\{[0-9., ]+\}' >"$tmp/bench"
    [ "$(wc -l <"$tmp/csv")" -ge 9 ] && diff "$tmp/csv" "$tmp/bench"
}
good 'bench.cu: times of an H800 as in peers_h800.csv' h800_agree examples/bench.cu
sed 's/{128, 1, 640, 13\.9/{128, 1, 640, 14.9/' examples/bench.cu >"$tmp/bench.cu"
bad 'another time of an H800' h800_agree "$tmp/bench.cu"

# Targets: a level, ranges, one metric that bench writes, a number to hold it to.
targets_make_sense() { # TARGETS
    awk -F, 'NR == FNR { if (!/^#/ && !n) for (n = 1; n <= NF; n++) column[$n] = 1; next }
        /^#/ { next }
        /^level,/ { names = NF == 13; next }
        { rows++
          if (NF != 13 || $1 !~ /^(required|target)$/ || !($10 in column) ||
              ($11 == "") == ($12 == "")) {
              print FILENAME ": " $0; wrong = 1 } }
        END { exit wrong || !names || rows < 10 }' $charts/speed.csv "$1"
}
good 'targets.csv: levels, metrics, numbers' targets_make_sense $charts/targets.csv
sed 's/tflops/tflop/' $charts/targets.csv >"$tmp/targets.csv"
bad 'a metric that bench does not write' targets_make_sense "$tmp/targets.csv"

# --- names and links ------------------------------------------------------------------------------
names_exist() { # README
    local name missing=0
    for name in $(grep -oE '\<(SNAPMLA|snapmla)_[A-Za-z0-9_]+\>' "$1" | sort -u); do
        case $name in snapmla_ref) continue ;; esac # the file
        grep -q "\<$name\>" snapmla.cuh || { echo "$name is not in snapmla.cuh" && missing=1; }
    done
    return $missing
}
links_exist() { # README
    local link missing=0
    for link in $(grep -oE '\]\([^)]*\)' "$1" | sed 's/^](//; s/)$//; s/#.*//' | sort -u); do
        case $link in http*) continue ;; esac
        [ -e "$link" ] || { echo "$link does not exist" && missing=1; }
    done
    return $missing
}
good 'README: names are the header'\''s' names_exist README.md
echo '`SNAPMLA_ERROR_GONE`' >"$tmp/README.md"
bad 'a name that does not exist' names_exist "$tmp/README.md"
good 'README: links lead somewhere' links_exist README.md
echo '[x](examples/gone.cu)' >"$tmp/README.md"
bad 'a link that leads nowhere' links_exist "$tmp/README.md"

# --- the manual's example, and its two lines ------------------------------------------------------
# `for each layer:` and the descs that a step has ready are all that is added.
manual_example() { # HEADER
    {
        echo '#include "snapmla.cuh"'
        echo 'void decoding_step(int layers, int batch, const int32_t *seq_lens, void *plan,'
        echo '                   size_t plan_bytes, cudaStream_t stream, snapmla_append_desc append,'
        echo '                   snapmla_decode_desc decode)'
        echo '{'
        awk '/^   EXAMPLE / { on = 1; next } /^   NEEDS / { exit } on' "$1" |
            sed 's/for each layer:/for (int i = 0; i < layers; i++) {/'
        echo '}}'
    } >"$tmp/example.c"
    grep -q snapmla_decode "$tmp/example.c" || { echo 'no example' && return 1; }
    "$CC" -std=c99 -Wall -Wextra -Werror -I. -isystem "$CUDA_HOME/include" -fsyntax-only \
        "$tmp/example.c" || { cat "$tmp/example.c" && return 1; }
}
manual_two_lines() { # HEADER MACRO: DO THIS, word for word
    awk '/^   DO THIS/ { on = 1 } on && /^ *#/ { sub(/^ */, ""); print; if (++n == 2) exit }' "$1" \
        >"$tmp/two.c"
    echo 'int main(void) { return 0; }' >>"$tmp/two.c"
    grep -q "define $2" "$tmp/two.c" && "$CC" -std=c99 -I. -o "$tmp/two" "$tmp/two.c" -lm && "$tmp/two"
}
if [ -f "$CUDA_HOME/include/cuda_runtime_api.h" ]; then
    good 'snapmla.cuh: the manual'\''s example compiles' manual_example snapmla.cuh
    sed 's/^ *step.batch = batch;/&  step.gone = 1;/' snapmla.cuh >"$tmp/bad.cuh"
    bad 'an example that does not compile' manual_example "$tmp/bad.cuh"
else
    skip 'snapmla.cuh: the manual'\''s example' 'no CUDA headers'
fi
good 'snapmla_ref.h: the manual'\''s two lines work' \
    manual_two_lines snapmla_ref.h SNAPMLA_REF_IMPLEMENTATION

summary="$passed passed, $failed failed"
if [ $skipped != 0 ]; then summary="$summary, $skipped skipped"; fi
echo "$summary"
[ $failed = 0 ]
