#!/usr/bin/env bash
# check_header.sh - what a single header promises beside its function: that it compiles alone, in
# every language and order, that several copies link, that nothing leaks, that its papers agree.
#
# Every check is a function of a file, so that it can also be given a copy with a seeded fault, which
# it must refuse: a check that cannot fail proves nothing.  Ends with `N passed, N failed`.
set -u
cd "$(dirname "$0")/.."
export LC_ALL=C
CC=${CC:-cc} CXX=${CXX:-c++} NVCC=${NVCC:-nvcc} CUDA_HOME=${CUDA_HOME:-/usr/local/cuda}
cuda="-isystem $CUDA_HOME/include"
root=$(pwd)
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
passed=0 failed=0 skipped=0 have_cuda=0 have_nvcc=0
echo '#include <cuda_runtime_api.h>' | "$CC" $cuda -E - >/dev/null 2>&1 && have_cuda=1
"$NVCC" --version >/dev/null 2>&1 && have_nvcc=1

# report STATUS NAME
report() {
    if [ "$1" = 0 ]; then
        passed=$((passed + 1))
        echo "ok   $2"
    else
        failed=$((failed + 1))
        echo "FAIL $2"
        head -n 15 "$tmp/out" | sed 's/^/     /'
    fi
}

# good NAME FUNCTION ARGUMENTS...: must return 0
good() {
    local name=$1
    shift
    "$@" >"$tmp/out" 2>&1
    report $? "$name"
}

# bad NAME FUNCTION ARGUMENTS...: must not
bad() {
    local name=$1
    shift
    case " $* " in
    *' /nonexistent '*)
        echo 'the fault could not be seeded' >"$tmp/out"
        report 1 "refuses $name"
        return
        ;;
    esac
    ! "$@" >"$tmp/out" 2>&1
    report $? "refuses $name"
}

skip() {
    skipped=$((skipped + 1))
    echo "skip $1: $2"
}

# seed FILE SED-EXPRESSION: prints the name of a copy with a fault in it
seed() {
    local copy
    copy=$(mktemp -d "$tmp/seed.XXXX")/$(basename "$1")
    sed "$2" "$1" >"$copy"
    if cmp -s "$1" "$copy"; then echo /nonexistent; else echo "$copy"; fi
}

# Code only: comments gone, directives kept.
code_of() { "$CC" -fpreprocessed -dD -E -P -x c++ "$1" 2>/dev/null; }

# words PREFIX FILE: identifiers that begin with PREFIX
words() { grep -oE "[A-Za-z0-9_]+" "$2" | grep -E "^$1[A-Za-z0-9_]+$" | sort -u; }

# ------------------------------------------------------------------------------------------------
# 1. Declarations, and the body of snapmla_ref.h, in every language with every warning, as the first
#    and only include of a file
# ------------------------------------------------------------------------------------------------
all_c='c99 c11 c17'
all_cxx='c++11 c++14 c++17 c++20'
compilers=
for c in gcc clang; do command -v $c >/dev/null && compilers="$compilers $c"; done

# in_every FILE "STANDARDS" COMPILER WARNINGS...: compiles "$tmp/unit.c"
in_every() {
    local file=$1 standards=$2 compiler=$3 std
    shift 3
    [ -f "$file" ] || return 1
    for std in $standards; do
        local language=c more=-Wstrict-prototypes
        case $std in *++*) language=c++ more= ;; esac
        $compiler -x $language -std=$std -Wall -Wextra -Wpedantic -Wshadow -Wundef -Werror $more "$@" \
            $cuda "$tmp/unit.c" || { echo "$compiler -std=$std"; return 1; }
    done
}

declarations() { # FILE "STANDARDS" COMPILER
    echo "#include \"$(readlink -f "$1")\"" >"$tmp/unit.c"
    in_every "$@" -Wconversion -fsyntax-only
}

implementation_c() { # FILE "STANDARDS" COMPILER
    printf '#define SNAPMLA_REF_IMPLEMENTATION\n#include "%s"\n' "$(readlink -f "$1")" >"$tmp/unit.c"
    in_every "$@" -O1 -c -o "$tmp/unit.o"
}

for c in $compilers; do
    for h in snapmla.cuh snapmla_ref.h; do
        if [ $h = snapmla.cuh ] && [ $have_cuda = 0 ]; then
            skip "$h: declarations, $c" 'no CUDA headers'
            continue
        fi
        good "$h: declarations, $c, C99 to C17" declarations $h "$all_c" $c
        good "$h: declarations, $c, C++11 to C++20" declarations $h "$all_cxx" $c
    done
    good "snapmla_ref.h: body, $c, C99 to C++20" implementation_c snapmla_ref.h "$all_c $all_cxx" $c
done

r=snapmla_ref.h
c=${compilers##* }
first='s/^#include <stddef.h>/&\n'
bad 'a narrowing conversion in the declarations' declarations \
    "$(seed $r "${first}static inline int smlar_f(long long x) { return x; }/")" c99 "$c"
bad 'declarations that are C but not C++11' declarations \
    "$(seed $r "${first}struct s { int x; }; static struct s a = {.x = 1};/")" c++11 "$c"
bad 'declarations that need another include first' declarations \
    "$(seed $r "/^#include <stdint.h>/d; ${first}extern uint8_t smlar_x;/")" c99 "$c"
bad 'a type that C99 does not have' declarations \
    "$(seed snapmla.cuh 's/^SNAPMLA_API int snapmla_version(void);/&\nSNAPMLA_API bool snapmla_b(void);/')" \
    c99 "$c"
shadow='int f(int x);\nint f(int x) { { int x = 1; (void)x; } return x; }'
bad 'a body that shadows a name' implementation_c \
    "$(seed $r "\$a #ifdef SNAPMLA_REF_IMPLEMENTATION\n$shadow\n#endif")" c99 "$c"

# ------------------------------------------------------------------------------------------------
# 3, 4, 7, 10. What the preprocessor shows: hostile macros, orders, renaming, leaks
# ------------------------------------------------------------------------------------------------
# nvcc's macros are set by hand.  System headers come first and clean.
as_nvcc='-D__CUDACC__ -D__CUDACC_VER_MAJOR__=13 -D__CUDACC_VER_MINOR__=0 -D__CUDA_ARCH__=900
         -D__CUDA_ARCH_FEAT_SM90_ALL'
with_body='#define SNAPMLA_IMPLEMENTATION
#define SNAPMLA_REF_IMPLEMENTATION'

system_includes() { sed -n 's/^ *# *include *<\(.*\)>.*/#include <\1>/p' "$1" | sort -u; }

# expand FILE ["LINES BEFORE" ["LINES AFTER"]]: the preprocessed text of the implementation alone
expand() {
    local file
    file=$(readlink -f "$1") || return 1
    {
        system_includes "$file"
        printf '%s\n%s\n#include "%s"\n%s\n' "${2-}" "$with_body" "$file" "${3-}"
    } >"$tmp/expand.cc"
    "$CXX" -std=c++17 -E $as_nvcc $cuda "$tmp/expand.cc" 2>"$tmp/expand.err" |
        awk -v ours="\"$file\"" \
            '/^# [0-9]+ "/ { on = index($0, ours) > 0; next } on && NF { $1 = $1; print }'
    ! grep 'error' "$tmp/expand.err"
}

# expand into FILE, which must not be next to empty
expand_to() {
    local out=$1
    shift
    expand "$@" >"$out" || { tail -n 3 "$out"; return 1; }
    [ "$(wc -l <"$out")" -gt 30 ] || { echo 'nothing was expanded'; return 1; }
}

survives_macros() {
    local poison='' name
    for name in I small B0 near far min max Status Success None Bool OUT IN CONST ERROR; do
        poison="$poison#define $name POISON_$name
"
    done
    expand_to "$tmp/poisoned" "$1" "$poison" && ! grep -n POISON_ "$tmp/poisoned"
}

same_in_any_order() {
    local file plain
    file=$(readlink -f "$1") || return 1
    plain="#include \"$file\""
    expand_to "$tmp/once" "$file" || return 1
    same() { # ORDER "BEFORE" "AFTER"
        expand_to "$tmp/order" "$file" "$2" "$3" || { echo "$1"; return 1; }
        diff "$tmp/once" "$tmp/order" || { echo "$1"; return 1; }
    }
    same 'plain, implementation' "$plain" '' &&
        same 'plain, plain, implementation' "$plain
$plain" '' &&
        same 'implementation, plain' '' "$plain" &&
        same 'implementation, implementation' '' "$with_body
$plain" &&
        same 'plain, implementation, plain' "$plain" "$plain"
}

same_when_renamed() {
    mkdir -p "$tmp/elsewhere"
    cp "$1" "$tmp/elsewhere/renamed.hh"
    expand_to "$tmp/once" "$1" && expand_to "$tmp/order" "$tmp/elsewhere/renamed.hh" &&
        diff "$tmp/once" "$tmp/order"
}

macros_stay_private() {
    local file
    file=$(readlink -f "$1") || return 1
    system_includes "$file" >"$tmp/before.cc"
    {
        cat "$tmp/before.cc"
        printf '%s\n#include "%s"\n' "$with_body" "$file"
    } >"$tmp/after.cc"
    for when in before after; do
        "$CXX" -std=c++17 -E -dM $as_nvcc $cuda "$tmp/$when.cc" 2>/dev/null | sort >"$tmp/$when"
    done
    comm -13 "$tmp/before" "$tmp/after" | sed 's/^#define //' >"$tmp/new"
    [ -s "$tmp/new" ] || { echo 'no macro at all'; return 1; }
    ! grep -v '^SNAPMLA_' "$tmp/new" && [ -z "$(comm -23 "$tmp/before" "$tmp/after")" ]
}

for h in snapmla.cuh snapmla_ref.h; do
    if [ $h = snapmla.cuh ] && [ $have_cuda = 0 ]; then
        skip "$h: macros and orders" 'no CUDA headers'
        continue
    fi
    good "$h: hostile macros before it touch nothing" survives_macros $h
    good "$h: any order and number of inclusions" same_in_any_order $h
    good "$h: renamed and moved" same_when_renamed $h
    good "$h: macros left behind start with SNAPMLA_" macros_stay_private $h
done
bad 'an identifier called small' survives_macros "$(seed $r "${first}extern int small;/")"
bad 'a body without a guard' same_in_any_order \
    "$(seed $r 's/ *&& *!defined(SNAPMLA_REF_IMPLEMENTATION_INCLUDED)//')"
bad 'a body that includes itself by name' same_when_renamed \
    "$(seed $r 's/^#define SNAPMLA_REF_IMPLEMENTATION_INCLUDED.*/&\n#include "snapmla_ref.h"/')"
bad 'a macro without prefix' macros_stay_private "$(seed $r "${first}#define SWAP 1/")"
bad 'a private macro left behind' macros_stay_private "$(seed $r "${first}#define SMLAR_LEFT 1/")"

# ------------------------------------------------------------------------------------------------
# 11. No output, exit, allocation, device switch or hidden synchronisation
# ------------------------------------------------------------------------------------------------
forbidden_calls='printf|fprintf|sprintf|snprintf|puts|putchar|perror|exit|_Exit|abort|system|getenv
    |rand|srand|time|cudaDeviceSynchronize|cudaStreamSynchronize|cudaEventSynchronize|cudaSetDevice
    |cudaDeviceReset|cudaMalloc[A-Za-z0-9]*|cudaFree[A-Za-z0-9]*|cudaHostAlloc|cudaHostRegister
    |cudaMemcpy|cudaMemset|cudaGetLastError'
forbidden_words='throw|try|catch|new|delete|typeid|dynamic_cast'

calls_nothing_forbidden() { # FILE [MORE]
    local calls
    calls=$(echo "$forbidden_calls${2:+|$2}" | tr -d ' \n')
    code_of "$1" >"$tmp/code"
    [ "$(wc -l <"$tmp/code")" -gt 20 ] || { echo 'no code'; return 1; }
    # allowed: taking back an error of our own, when there was none before
    ! grep -v 'before == cudaSuccess) (void)cudaGetLastError();' "$tmp/code" |
        grep -nE "\<($calls) *\(|\<($forbidden_words)\>"
}
good 'snapmla.cuh: no forbidden call' calls_nothing_forbidden snapmla.cuh 'malloc|calloc|realloc|free'
good 'snapmla_ref.h: no forbidden call' calls_nothing_forbidden snapmla_ref.h
for call in 'printf("x")' 'exit(1)' 'cudaMalloc(\&p, 1)' 'cudaDeviceSynchronize()' \
    'cudaGetLastError()' 'throw 1' 'cudaSetDevice(0)'; do
    bad "a call of ${call%%(*}" calls_nothing_forbidden "$(seed snapmla.cuh "\$a void f() { $call; }")"
done

# ------------------------------------------------------------------------------------------------
# 12. Names: what the manual mentions exists, and what exists is mentioned
# ------------------------------------------------------------------------------------------------
manual_of() { awk '{ print } /\*\// { exit }' "$1"; } # the first comment of the file

names_agree() { # FILE FUNCTION-PREFIX
    local wrong=0 name
    manual_of "$1" >"$tmp/manual"
    [ "$(wc -l <"$tmp/manual")" -gt 20 ] || { echo 'the first comment is no manual'; return 1; }
    code_of "$1" >"$tmp/code"
    sed -n '/_API/p' "$tmp/code" | grep -oE "\<$2[a-z0-9_]+ *\(" | tr -d ' (' | sort -u >"$tmp/api"
    # options: what the code asks for with #if and does not use as a guard
    grep -E '^ *# *(if|elif|ifdef|ifndef)' "$tmp/code" >"$tmp/conditions"
    words SNAPMLA_ "$tmp/conditions" | grep -v '_INCLUDED$' >>"$tmp/api"
    [ "$(wc -l <"$tmp/api")" -gt 5 ] || { echo 'no API'; return 1; }
    while read -r name; do
        grep -q "\<$name\>" "$tmp/manual" || { echo "$name is not in the manual"; wrong=1; }
    done <"$tmp/api"
    for name in $(words "$2" "$tmp/manual") $(words SNAPMLA_ "$tmp/manual"); do
        case $name in snapmla_ref | *_) continue ;; esac # the other header; a prefix like SNAPMLA_NO_
        grep -q "\<$name\>" "$tmp/code" || { echo "the manual's $name does not exist"; wrong=1; }
    done
    return $wrong
}
good 'snapmla.cuh: manual and code name the same things' names_agree snapmla.cuh snapmla_
good 'snapmla_ref.h: manual and code name the same things' names_agree snapmla_ref.h snapmla_ref_
bad 'a function that the manual omits' names_agree \
    "$(seed snapmla.cuh 's/^SNAPMLA_API int snapmla_version(void);/&\nSNAPMLA_API int snapmla_x1(void);/')" \
    snapmla_
bad 'an option that the manual omits' names_agree \
    "$(seed snapmla.cuh "${first}#ifdef SNAPMLA_X1\n#endif/")" snapmla_
bad 'a name in the manual that does not exist' names_agree \
    "$(seed snapmla.cuh '3s/^/snapmla_gone() /')" snapmla_

# Every result code is provoked by a test: it is an argument of EXPECT or of a BAD_ macro.
codes_are_tested() { # HEADER TEST-FILES...
    local header=$1 name missing=0 list
    shift
    list=$(code_of "$header" | sed -n '/define SNAPMLA_RESULT_LIST/,/[^\\]$/p' |
        grep -oE 'X\(SNAPMLA_[A-Z0-9_]+' | cut -c3-)
    [ "$(echo "$list" | wc -w)" -gt 20 ] || { echo 'no list of results'; return 1; }
    for file in "$@"; do code_of "$file"; done | grep -E '(EXPECT|BAD_[A-Z_]+)\(' >"$tmp/provoked"
    for name in $list; do
        grep -q "\<$name\>" "$tmp/provoked" || { echo "$name is not in $*"; missing=1; }
    done
    return $missing
}
tests='tests/test_api.c tests/test_wrong_arch.c'
good 'every result code is provoked by a test' codes_are_tested snapmla.cuh $tests
bad 'a result code without a test' codes_are_tested \
    "$(seed snapmla.cuh 's/X(SNAPMLA_OK, 0, "ok") */& X(SNAPMLA_ERROR_X1, -99, "x") /')" $tests

# Every C or CUDA snippet of the README compiles as it stands, or is text of an example.
snippets_work() { # README
    local snippet example found
    rm -f "$tmp"/snippet.*
    awk -v to="$tmp/snippet." '
        /^```/ { on = !on && $0 ~ /^```(c|cuda|cpp)$/; if (on) n++; next }
        on { print > (to n ".c") }' "$1"
    [ -f "$tmp/snippet.1.c" ] || { echo 'no snippet'; return 1; }
    for snippet in "$tmp"/snippet.*; do
        found=0
        if grep -q '#include' "$snippet" && ! grep -q '_IMPLEMENTATION' "$snippet"; then
            "$CC" -std=c99 -Wall -Wextra -Werror -I. $cuda -fsyntax-only "$snippet" && found=1
        fi
        for example in examples/*.cu examples/*/*.c examples/*/*.cu; do # in order, perhaps with gaps
            sed 's/^[ \t]*//; s/[ \t]*$//; s,"\(\.\./\)*,",' "$example" >"$tmp/example"
            sed 's/^[ \t]*//; s/[ \t]*$//; s,"\(\.\./\)*,",; /^$/d' "$snippet" |
                awk 'NR == FNR { want[++n] = $0; next } $0 == want[i + 1] { i++ } END { exit i != n }' \
                    - "$tmp/example" && found=1
        done
        [ $found = 1 ] || { echo 'does not compile and is in no example:'; cat "$snippet"; return 1; }
    done
}
if [ $have_cuda = 1 ]; then
    good 'README: snippets compile, or are text of the examples' snippets_work README.md
    printf '```c\n#include "snapmla.cuh"\nint f(void) { return snapmla_gone(1); }\n```\n' >"$tmp/bad.md"
    bad 'a README snippet that does not compile' snippets_work "$tmp/bad.md"
    printf '```c\nsnapmla_plan(&gone);\n```\n' >"$tmp/bad.md"
    bad 'a README snippet that is text of no example' snippets_work "$tmp/bad.md"
else
    skip 'README: snippets' 'no CUDA headers'
fi

# The structs that examples/05_embed declares for ctypes are the header's.
ctypes_agree() { # HEADER
    local types='snapmla_cache snapmla_append_desc snapmla_step snapmla_decode_desc' t
    {
        printf '#include <stdio.h>\n#include "%s"\nint main(void) {\n' "$(readlink -f "$1")"
        for t in $types; do echo "printf(\"%d \", (int)sizeof($t));"; done
        echo 'return 0; }'
    } >"$tmp/sizes.c"
    "$CC" -std=c99 $cuda -o "$tmp/sizes" "$tmp/sizes.c" || return 1
    echo "header: $("$tmp/sizes"), embed.py: $(python3 examples/05_embed/embed.py --sizes)"
    [ "$("$tmp/sizes" | xargs)" = "$(python3 examples/05_embed/embed.py --sizes)" ]
}
if [ $have_cuda = 1 ] && python3 --version >/dev/null 2>&1; then
    good 'examples/05_embed: structs as in the header' ctypes_agree snapmla.cuh
    bad 'a field that embed.py does not know' ctypes_agree \
        "$(seed snapmla.cuh 's/^    int32_t causal; .*/&\n    int64_t x1;/')"
else
    skip 'examples/05_embed: structs' 'no CUDA headers or no python3'
fi

# ------------------------------------------------------------------------------------------------
# 14. One version: top line, macros, newest HISTORY entry, README
# ------------------------------------------------------------------------------------------------
versions_agree() { # HEADER README
    local top macros history readme number='[0-9]+\.[0-9]+\.[0-9]+'
    top=$(head -n 1 "$1" | grep -oE "$number" | head -n 1)
    history=$(manual_of "$1" | sed -n '/HISTORY/,$p' | grep -oE "$number" | head -n 1)
    macros=$(sed -n 's/^#define SNAPMLA_VERSION_\(MAJOR\|MINOR\|PATCH\) *\([0-9]*\)$/\2/p' "$1" |
        paste -sd.)
    readme=$(grep -oE "\<v?$number\>" "$2" | head -n 1 | tr -d v)
    echo "top line '$top', macros '$macros', HISTORY '$history', $2 '$readme'"
    [ -n "$top" ] && [ "$top" = "$macros" ] && [ "$top" = "$history" ] && [ "$top" = "$readme" ]
}
good 'one version in top line, macros, HISTORY and README' versions_agree snapmla.cuh README.md
bad 'another version in the macros' versions_agree \
    "$(seed snapmla.cuh 's/^\(#define SNAPMLA_VERSION_MINOR\).*/\1 77/')" README.md
bad 'another version in the top line' versions_agree "$(seed snapmla.cuh '1s/[0-9]\./77./')" README.md
bad 'another version in HISTORY' versions_agree \
    "$(seed snapmla.cuh 's/^\( *HISTORY *[0-9]*\.\)[0-9]*/\177/')" README.md
bad 'another version in README' versions_agree snapmla.cuh \
    "$(seed README.md 's/\([0-9]\.[0-9]\.\)[0-9]/\177/')"

# ------------------------------------------------------------------------------------------------
# House rules that a script can see: width, tabs, words that have no place in what ships
# ------------------------------------------------------------------------------------------------
tidy() {
    awk 'length($0) > 110 { print FILENAME ":" FNR ": " length($0) " columns"; bad = 1 }
         /\t/ || / $/ { print FILENAME ":" FNR ": tab, or blank at the end"; bad = 1 }
         /(^|[^A-Za-z])(TO[D]O|FI[X]ME|XX[X]|HA[C]K)([^A-Za-z]|$)|# *if 0([^-9]|$)/ {
             print FILENAME ":" FNR ": " $0; bad = 1 }
         END { exit bad || NR == 0 }' "$@"
}
good 'headers, tests and examples are tidy' tidy snapmla.cuh snapmla_ref.h tests/*.* tests/fuzz/*.* .ci/run \
    $(ls examples/*.cu examples/*.[ch] examples/*/*.c examples/*/*.h examples/*/*.cu examples/*/*.py)
bad 'a note of unfinished work' tidy "$(seed $r '$a /* TO''DO: more */')"
bad 'a tab' tidy "$(seed $r '$s/$/\t;/')"
bad 'a blank at the end of a line' tidy "$(seed $r '$a /* blank */ ')"
bad 'code that is switched off' tidy "$(seed $r '$a #if'' 0')"
bad 'a long line' tidy "$(seed $r "\$a /* $(printf '%0120d' 0) */")"

# ------------------------------------------------------------------------------------------------
# 2, 5, 6, 8, 9. What only nvcc can show.  The Makefile's objects are the C++17 builds, one for each
#    architecture with spills as errors, and one fat build for each example.
# ------------------------------------------------------------------------------------------------
warn='-Werror all-warnings -Xcompiler -Wall,-Wextra'
ptx='-gencode arch=compute_80,code=compute_80'

# Objects of a unit that includes the header.  PTX is enough: the Makefile's objects are the machine code.
cxx20() { # UNIT
    "$NVCC" -std=c++20 $warn --threads 0 $ptx -gencode arch=compute_90a,code=compute_90a -I"$root" -c \
        -o "$tmp/cxx20.o" "$1"
}

clang_as_host() { # UNIT
    local std
    for std in c++17 c++20; do
        "$NVCC" -ccbin clang -std=$std $warn $ptx -I"$root" -c -o "$tmp/clang.o" "$1" ||
            { echo "$std"; return 1; }
    done
}

refuses_old_standards() { # UNIT: with a message of ours, not one of the compiler's
    ! "$NVCC" -std=c++14 $ptx -I"$root" -c -o "$tmp/old.o" "$1" 2>"$tmp/old" &&
        grep '#error.*snapmla.cuh: ' "$tmp/old"
}

# seed_unit SED-EXPRESSION [UNIT]: a copy of the header with a fault in it, and beside it a unit that
# includes it: tests/impl.cu, or the given one.  Prints the unit's name.
seed_unit() {
    local header unit=${2:-tests/impl.cu}
    header=$(seed snapmla.cuh "$1")
    [ "$header" != /nonexistent ] || { echo /nonexistent; return; }
    cp "$unit" "$(dirname "$header")" && echo "$(dirname "$header")/$(basename "$unit")"
}

no_spills() {
    "$NVCC" -arch=sm_80 $warn -Xptxas -warn-spills,-warn-lmem-usage -c -o "$tmp/spill.o" "$1"
}
makefile_uses_no_spills() { # MAKEFILE
    "${MAKE:-make}" -f "$1" -n -B build/arch/impl_sm_80.o |
        grep -e '-Werror all-warnings.*-warn-spills,-warn-lmem-usage'
}

# The API and nothing else is external; data is writable only where nvcc itself puts it.
symbols_are_the_api() {
    local of_nvcc='fatbin|fatDeviceText|__cudaFat|__device_stub__|__nv|__module_id|^\.L|__cudaRT'
    [ -f "$1" ] || { echo "no $1"; return 1; }
    nm --defined-only --extern-only "$1" | awk '$2 ~ /[TDBRGVWu]/ { print $3 }' |
        grep -vE '^_ZN4dim3C[12]E|^DW.ref.__gxx_personality' | sort >"$tmp/symbols"
    diff "$tmp/symbols" tests/api_symbols.txt || return 1
    ! nm --defined-only "$1" | awk '$2 ~ /[dDbB]/ { print $3 }' | grep -vE "$of_nvcc"
}

# Units in one program: the extern copy, two static copies, a C++ user.
link_all() { # EXTERN-OBJECT UNIT1 UNIT2 FLAGS...
    local object=$1 unit1=$2 unit2=$3 n
    shift 3
    [ -f "$object" ] || { echo "no $object"; return 1; }
    "$NVCC" -std=c++17 $warn -I"$root" "$@" -c -o "$tmp/static1.o" "$unit1" || return 1
    "$NVCC" -std=c++17 $warn -I"$root" "$@" -c -o "$tmp/static2.o" "$unit2" || return 1
    for n in 1 2; do
        if nm "$tmp/static$n.o" | grep ' T snapmla_'; then return 1; fi # the static copy exports
    done
    "$NVCC" "$@" -o "$tmp/all" "$object" "$tmp/static1.o" "$tmp/static2.o" "$tmp/user.o" && "$tmp/all"
}

# A shared library made of the header itself, everything hidden but the API, by SNAPMLA_API.
shared_library() { # HEADER
    "$NVCC" -std=c++17 $warn $ptx -Xcompiler -fPIC,-fvisibility=hidden -shared -x cu \
        -DSNAPMLA_IMPLEMENTATION '-DSNAPMLA_API=extern __attribute__((visibility("default")))' \
        -o "$tmp/libsnapmla.so" "$1" || return 1
    nm -D --defined-only "$tmp/libsnapmla.so" | awk '{ print $3 }' | grep -v '^_ZN4dim3C' |
        sort >"$tmp/symbols"
    diff "$tmp/symbols" tests/api_symbols.txt || return 1
    sed '/version_of_static/d' "$tmp/user.cpp" >"$tmp/so_user.cpp"
    "$CXX" -std=c++11 -I. $cuda -o "$tmp/so_user" "$tmp/so_user.cpp" -L"$tmp" -lsnapmla \
        -Wl,-rpath,"$tmp" && "$tmp/so_user"
}

if [ $have_nvcc = 0 ]; then
    skip 'implementation, links and symbols' 'no nvcc'
else
    for n in 1 2; do
        cat >"$tmp/static$n.cu" <<END
#define SNAPMLA_STATIC
#define SNAPMLA_IMPLEMENTATION
#include "snapmla.cuh"
extern "C" int version_of_static$n(void);
extern "C" int version_of_static$n(void) { return snapmla_version(); }
END
        # small ones, to show what the links refuse
        cat >"$tmp/small$n.cu" <<END
#include "snapmla.cuh"
extern "C" int version_of_static$n(void);
extern "C" int version_of_static$n(void) { return SNAPMLA_VERSION; }
END
        { cat "$tmp/small$n.cu"; echo '__device__ int counter;'; } >"$tmp/variable$n.cu"
        { cat "$tmp/small$n.cu"; echo '__global__ void kernel() {}'; } >"$tmp/kernel$n.cu"
    done
    cat >"$tmp/user.cpp" <<'END'
#include "snapmla.cuh"
extern "C" int version_of_static1(void);
extern "C" int version_of_static2(void);
int main() {
    if (snapmla_decode(nullptr) != SNAPMLA_ERROR_NULL_DESC) return 1;
    if (version_of_static1() != SNAPMLA_VERSION) return 2;
    if (version_of_static2() != SNAPMLA_VERSION) return 2;
    return snapmla_version() == SNAPMLA_VERSION ? 0 : 3;
}
END
    cat >"$tmp/spill.cu" <<'END'
__global__ void k(float *p, int n)
{
    float a[64];
    for (int i = 0; i < 64; i++) a[i] = p[i];
    for (int i = 0; i < n; i++) a[(i * 7) & 63] += a[i & 63];
    p[0] = a[n & 63];
}
END
    echo '__global__ void k(float *p, int n) { p[n] = 1; }' >"$tmp/no_spill.cu"
    { echo 'int leaked; __global__ void k() {}'; cat tests/impl.cu; } >"$tmp/leak.cu"
    "$CXX" -std=c++11 -Wall -Wextra -Werror -I. $cuda -c -o "$tmp/user.o" "$tmp/user.cpp"

    unit=tests/impl.cu
    old_text='s/^#define SNAPMLA_IMPLEMENTATION_INCLUDED$/&\nstatic const char *smla_t = u8"";/'
    good 'implementation: C++20' cxx20 $unit
    bad 'a body that is C++17 but not C++20' cxx20 "$(seed_unit "$old_text")"
    if command -v clang >/dev/null; then
        good 'implementation: clang as host compiler, C++17 and C++20' clang_as_host $unit
        same='static inline int smla_x(int x) { x = x; return x; }'
        bad 'a body that only gcc takes without a warning' clang_as_host \
            "$(seed_unit "s/^#define SNAPMLA_IMPLEMENTATION_INCLUDED\$/&\n$same/")"
    else
        skip 'implementation: clang as host compiler' 'no clang'
    fi
    good 'implementation: C++14 is refused with a message of ours' refuses_old_standards $unit
    bad 'a body that leaves C++14 to the compiler' refuses_old_standards \
        "$(seed_unit 's/^#elif __cplusplus < 201703L/#elif 0/')"
    good 'implementation: the Makefile makes spills an error' makefile_uses_no_spills Makefile
    bad 'a Makefile that lets kernels spill' makefile_uses_no_spills "$(seed Makefile 's/-warn-spills,//')"
    good 'a kernel without spills' no_spills "$tmp/no_spill.cu"
    bad 'a kernel with an array in local memory' no_spills "$tmp/spill.cu"
    good 'symbols: the API alone is external, no writable data' symbols_are_the_api build/impl.o
    good 'symbols: a leaking unit compiles' "$NVCC" -std=c++17 $ptx -I. -c -o "$tmp/leak.o" "$tmp/leak.cu"
    bad 'a global variable and an external kernel' symbols_are_the_api "$tmp/leak.o"
    ${MAKE:-make} --no-print-directory build/impl_ptx80.o >/dev/null
    s1=$tmp/static1.cu s2=$tmp/static2.cu rdc='-rdc=true -arch=sm_80 -Xptxas -O0'
    good 'links: extern copy, two static copies and C++ user' link_all build/impl_ptx80.o $s1 $s2 $ptx
    bad 'a static copy that exports' link_all build/impl_ptx80.o $s1 \
        "$(seed_unit 's/^#define SNAPMLA_API static inline/#define SNAPMLA_API/' $s2)" $ptx
    bad 'an external kernel in two units' link_all build/impl_ptx80.o "$tmp/kernel1.cu" \
        "$tmp/kernel2.cu" $ptx
    good '-rdc=true: the extern copy' "$NVCC" -std=c++17 $warn -I. $rdc -c -o "$tmp/rdc.o" $unit
    good '-rdc=true: the same links' link_all "$tmp/rdc.o" $s1 $s2 $rdc
    good '-rdc=true: small units link' link_all "$tmp/rdc.o" "$tmp/small1.cu" "$tmp/small2.cu" $rdc
    bad 'a device variable in two units, -rdc=true' link_all "$tmp/rdc.o" "$tmp/variable1.cu" \
        "$tmp/variable2.cu" $rdc
    good 'links: a shared library of the header alone, the rest hidden' shared_library snapmla.cuh
    bad 'a header that does not ask SNAPMLA_API' shared_library \
        "$(seed snapmla.cuh 's/^#ifndef SNAPMLA_API$/#undef SNAPMLA_API\n&/')"
fi

summary="$passed passed, $failed failed"
if [ $skipped != 0 ]; then summary="$summary, $skipped skipped"; fi
echo "$summary"
[ $failed = 0 ]
