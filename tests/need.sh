#!/bin/sh
# need.sh cc|cmocka ... - make sure that these are there: install the Debian or Ubuntu package when
# one is missing, and say so.  Where that is impossible, one line names the package; exit code 1.
status=0

have() {
    case $1 in
    cc) command -v "${CC:-cc}" >/dev/null && echo '#include <math.h>' | "${CC:-cc}" -E - >/dev/null 2>&1 ;;
    cmocka) printf '#include <stdarg.h>\n#include <stddef.h>\n#include <setjmp.h>\n#include <stdint.h>
#include <cmocka.h>\nint main(void) { return 0; }\n' |
        "${CC:-cc}" -x c - -o /dev/null -lcmocka 2>/dev/null ;;
    esac
}

for what in "$@"; do
    have "$what" && continue
    case $what in
    cc) package='gcc g++ libc6-dev' ;;
    cmocka) package=libcmocka-dev ;;
    esac
    as_root=
    if [ "$(id -u)" != 0 ]; then
        as_root='sudo -n'
        if [ -t 0 ]; then as_root=sudo; fi
    fi
    if command -v apt-get >/dev/null && { [ -z "$as_root" ] || $as_root true 2>/dev/null; }; then
        echo "need: $what is missing: installing $package with apt-get"
        (export DEBIAN_FRONTEND=noninteractive
         $as_root apt-get update -qq && $as_root apt-get install -y -qq $package) >/dev/null 2>&1
    fi
    if ! have "$what"; then
        echo "need: $what is missing and could not be installed: please install the package $package"
        status=1
    fi
done
exit $status
