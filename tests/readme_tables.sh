#!/usr/bin/env bash
# readme_tables.sh [--write] [README [CHARTS]] - the tables of measured numbers in README.md come from
# the CSV files of examples/charts.  Between `<!-- begin NAME -->` and `<!-- end NAME -->` stands what
# the function table_NAME below prints.
#
# Without --write: a line for every table that is not what it should be, and exit code 1.
# With it: they are written into README, and the charts are drawn anew, e.g. after `make figures`.
set -eu
export LC_ALL=C
cd "$(dirname "$0")/.."
write=0
if [ "${1:-}" = --write ]; then write=1 && shift; fi
readme=${1:-README.md} charts=${2:-examples/charts}
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT

# What every awk program starts with: cells by name, `has` where a row has something in a column.
# The first file may be another table, of peers, which is kept by shape.
awk_common='
    BEGIN { FS = "," }
    function length_text(n) {
        return n >= 1048576 ? n / 1048576 "M" : n >= 1024 ? sprintf("%.4gK", n / 1024) : n
    }
    function shape() { return at["heads"] "/" at["s_q"] "/" at["batch"] "/" at["kv"] }
    function us(x) { return x == "" ? "" : sprintf(x < 100 ? "%.1f" : "%.0f", x) }
    FNR == 1 { named = 0; file++ }
    /^# dataflow: / { flow_note = substr($0, 13); next }
    /^#/ { if (file == 1 + peers) note[++notes] = substr($0, 3); next }
    !named { named = 1; split("", name); for (i = 1; i <= NF; i++) name[i] = $i; next }
    { split("", at); for (i = 1; i <= NF; i++) at[name[i]] = $i }
    peers && file == 1 { fp8[shape()] = at["fp8_us"]; bf16[shape()] = at["bf16_us"]; next }'

# Rows of speed.csv that the tables look at: full clocks, pages of 64, as the library chooses, in the
# default mode, requests of one length.
awk_rested='
    at["clocks"] == "rested" && at["page"] == 64 && at["split_tokens"] == 0 && at["path"] == "sm90" &&
    at["mode"] == "default" && at["long_kv"] == "" {
        rested = 1
    }'

table_speed() {
    awk -v peers=1 "$awk_common"'
        { rested = 0 }'"$awk_rested"'
        at["preset"] == "headline" && at["mode"] == "precise" && at["clocks"] == "rested" &&
        at["batch"] == 64 && at["kv"] == 16384 && at["default_ratio"] != "" {
            cost = cost sprintf("%s%d: %.2f", cost == "" ? "" : ", ", at["heads"], at["default_ratio"])
        }
        at["balanced_ratio"] != "" && at["mode"] == "default" && at["clocks"] == "rested" {
            two_long = two_long sprintf("%s%d: %.2f", two_long == "" ? "" : ", ", at["heads"],
                                        at["balanced_ratio"])
        }
        !rested { if (at["clocks"] == "sustained")
                      slow = slow sprintf("%s%d%s: %.0f", slow == "" ? "" : ", ", at["heads"],
                                          at["s_q"] > 1 ? " x " at["s_q"] : "", at["tflops"])
                  next }
        at["plan_us"] != "" && at["batch"] <= 512 {
            if (plans == 0 || at["plan_us"] < least) least = at["plan_us"]
            if (at["plan_us"] > most) most = at["plan_us"]
            plans++
        }
        at["preset"] == "headline" && at["heads"] != 32 && at["kv"] ~ /^(1024|16384|65536)$/ ||
        at["preset"] == "latency" && at["heads"] != 64 && at["batch"] == 1 ||
        at["preset"] == "mtp" && at["heads"] == 128 && at["kv"] == 16384 {
            line[++lines] = sprintf("| %d | %d | %d | %s | %s |", at["heads"], at["s_q"],
                at["batch"], length_text(at["kv"]), us(at["decode_us"]))
            line[lines] = line[lines] sprintf(" %.0f | %.2f | %.0f%% %s | %.2f | %s | %s |",
                at["tflops"], at["tb_per_s"], 100 * at["ceiling_share"],
                at["bound"] == "tensor" ? "tensor" : "read", at["bf16_ratio"],
                us(fp8[shape()]), us(bf16[shape()]))
        }
        END {
            if (lines < 10) { print "speed.csv has too few rows" > "/dev/stderr"; exit 1 }
            printf "| heads | query tokens | requests | tokens each | µs | TF | TB/s |"
            print " of the ceiling | BF16 floor | FP8 peer µs | BF16 peer µs |"
            print "|---|---|---|---|---|---|---|---|---|---|---|"
            for (i = 1; i <= lines; i++) print line[i]
            print ""
            for (i = 1; i <= notes; i++) print note[i] (i < notes ? ";" : ".")
            if (cost != "") {
                print "The precise mode, 64 requests of 16K tokens, its time by that of the default mode, by"
                print "heads: " cost "."
            }
            if (plans) printf "The plan: %.1f to %.1f µs.\n", least, most
            if (two_long != "")
                print "Two requests of 64K among 126 of 1K, by the time of 128 equal ones, by heads: " \
                    two_long "."
            if (slow != "")
                print "Back to back without rest, 64 requests of 16K tokens, TF by heads: " slow "."
        }' "$charts/peers_h200.csv" "$charts/speed.csv"
}

table_slower() {
    awk -v peers=1 "$awk_common"'
        { rested = 0 }'"$awk_rested"'
        !rested || !(shape() in fp8) || shape() in seen { next }
        {
            seen[shape()] = 1
            shapes++
            if (at["decode_us"] + 0 > fp8[shape()] + 0 || at["decode_us"] + 0 > bf16[shape()] + 0)
                line[++lines] = sprintf("| %d | %d | %d | %s | %s | %s | %s |", at["heads"], at["s_q"],
                    at["batch"], length_text(at["kv"]), us(at["decode_us"]), us(fp8[shape()]),
                    us(bf16[shape()]))
        }
        END {
            if (shapes == 0) { print "no shape was measured on both sides" > "/dev/stderr"; exit 1 }
            printf "Of %d shapes measured on both sides, snapmla is slower than one of the peers in",
                shapes
            printf " %s%s\n", lines ? lines : "none", lines ? ":" : "."
            if (lines) {
                printf "\n| heads | query tokens | requests | tokens each | snapmla µs |"
                print " FP8 peer µs | BF16 peer µs |\n|---|---|---|---|---|---|---|"
            }
            for (i = 1; i <= lines; i++) print line[i]
        }' "$charts/peers_h200.csv" "$charts/speed.csv"
}

table_h800() {
    awk -v peers=0 "$awk_common"'
        file == 1 { if (at["preset"] == "flaggems") ours[shape()] = at["decode_us"]; next }
        { line[++lines] = sprintf("| %d | %d | %s | %s | %s | %s |", at["heads"], at["batch"],
              length_text(at["kv"]), us(at["bf16_us"]), us(at["snapmla_us"]), us(ours[shape()])) }
        END {
            if (lines == 0) exit 1
            printf "| heads | requests | tokens each | H800: BF16 FlashMLA µs |"
            print " H800: SnapMLA µs | H200: snapmla µs |"
            print "|---|---|---|---|---|---|"
            for (i = 1; i <= lines; i++) print line[i]
        }' "$charts/speed.csv" "$charts/peers_h800.csv"
}

# decode in one split against fp64 over the same quantised tensors; of the precise mode, against fp64 over
# BF16 queries and quantised keys, the worst of all lengths.  Lengths that nothing has are left out.
table_accuracy() {
    awk -v peers=0 "$awk_common"'
        at["splits"] != 1 { next }
        at["against"] == "bf16 q" && sub(/^precise /, "", at["what"]) {
            key = at["distribution"] " | " at["what"]
            if (!(key in worst) || at["rms"] + 0 > worst[key]) worst[key] = at["rms"] + 0
        }
        at["against"] == "quantised" && at["what"] ~ /^(sm90|general|emulated)$/ {
            key = at["distribution"] " | " at["what"]
            if (!(key in seen)) { seen[key] = 1; order[++keys] = key }
            rms[key, at["tokens"]] = at["rms"]
            measured[at["tokens"]] = 1
        }
        END {
            all = split("1 64 1024 16384 65536 131072 1048576", candidate, " ")
            for (i = 1; i <= all; i++) if (candidate[i] in measured) lengths[++n] = candidate[i]
            printf "| rows | decode by |"
            for (i = 1; i <= n; i++) printf " %s |", length_text(lengths[i] + 0)
            printf " precise, the worst |\n|---|---|---|"
            for (i = 1; i <= n; i++) printf "---|"
            print ""
            for (k = 1; k <= keys; k++) {
                key = order[k]
                printf "| %s |", key
                for (i = 1; i <= n; i++)
                    printf " %s |", (key, lengths[i]) in rms ? sprintf("%.1e", rms[key, lengths[i]]) : ""
                printf " %s |\n", key in worst ? sprintf("%.1e", worst[key]) : ""
            }
            print ""
            for (i = 1; i <= notes; i++) print note[i] (i < notes ? ";" : ".")
            exit keys < 3
        }' "$charts/accuracy.csv"
}

# the FP8 peer against fp64 over its own inputs
table_peererror() {
    awk -v peers=0 "$awk_common"'
        { line[++lines] = sprintf("| %s | %s | %s | %s | %s |", at["distribution"],
              length_text(at["tokens"]), at["one_split"], at["sixteen_splits"], at["scheduled"]) }
        END {
            print "| rows | tokens | one split | 16 splits | its scheduler, 128 requests |"
            print "|---|---|---|---|---|"
            for (i = 1; i <= lines; i++) print line[i]
            exit lines < 2
        }' "$charts/peers_error.csv"
}

# what the parts of the design are there for, at the longest length that has everything
table_design() {
    awk -v peers=0 "$awk_common"'
        at["against"] == "quantised" && at["splits"] == 1 && at["what"] == "one accumulator" {
            if (at["tokens"] + 0 > tokens + 0) tokens = at["tokens"]
        }
        { what = at["against"] "/" at["what"] "/" at["splits"]
          rms[what, at["distribution"], at["tokens"]] = at["rms"]
          kind = at["distribution"]
          if (!(kind in seen)) { seen[kind] = 1; order[++kinds] = kind } }
        function cell(what, kind) {
            return (what, kind, tokens) in rms ? sprintf(" %.1e |", rms[what, kind, tokens]) : " |"
        }
        END {
            if (tokens == 0) exit 1
            printf "At %s tokens:\n\n", length_text(tokens + 0)
            printf "| rows | snapmla | one FP8 accumulator | the same in 16 splits |"
            print " the cache format | one scale for all tokens | RoPE in FP8 | both |"
            print "|---|---|---|---|---|---|---|---|"
            for (k = 1; k <= kinds; k++) {
                kind = order[k]
                ours = "quantised/emulated/1"
                if (("quantised/sm90/1", kind, tokens) in rms) ours = "quantised/sm90/1"
                print "| " kind " |" cell(ours, kind) cell("quantised/one accumulator/1", kind) \
                    cell("quantised/one accumulator/16", kind) cell("bf16/format/1", kind) \
                    cell("bf16/one scale/1", kind) cell("bf16/fp8 rope/1", kind) cell("bf16/both/1", kind)
            }
        }' "$charts/accuracy.csv"
}

table_dataflow() {
    awk -v peers=0 "$awk_common"'
        at["preset"] != "dataflow" { next }
        {
            if (!(at["call"] in known)) { known[at["call"]] = 1; order[++calls] = at["call"] }
            share[at["call"], at["tokens"]] = at["copy_share"]
            time[at["call"], at["tokens"]] = at["call_us"]
        }
        function percent(call, tokens) {
            return share[call, tokens] == "" ? "" : sprintf("%.0f%%", 100 * share[call, tokens])
        }
        END {
            print "| call | 512K tokens | 64K | 512 |\n|---|---|---|---|"
            for (k = 1; k <= calls; k++) {
                c = order[k]
                printf "| %s | %s | %s | %s |\n", c, percent(c, 524288), percent(c, 65536),
                    time[c, 512] == "" ? "" : sprintf("%.1f µs", time[c, 512])
            }
            print ""
            print "Device and date: those of the first table; " flow_note "."
            exit calls < 5
        }' "$charts/speed.csv"
}

wrong=0
cp "$readme" "$tmp/new"
tables=$(sed -n 's/^<!-- begin \([a-z0-9]*\) -->$/\1/p' "$readme")
[ "$(echo "$tables" | wc -w)" -ge 6 ] || { echo "$readme: fewer than six tables"; exit 1; }
for name in $tables; do
    "table_$name" >"$tmp/table" || { echo "$name: no table"; exit 1; }
    awk -v name="$name" -v table="$tmp/table" '
        $0 == "<!-- end " name " -->" { inside = 0; ended = 1 }
        !inside { print }
        $0 == "<!-- begin " name " -->" {
            inside = 1
            while ((getline line < table) > 0) print line
        }
        END { exit !ended }' "$tmp/new" >"$tmp/next" || { echo "$name: begins and does not end"; exit 1; }
    if ! diff "$tmp/new" "$tmp/next" >"$tmp/diff"; then
        [ $write = 1 ] || { echo "$name: not what $charts says:"; cat "$tmp/diff"; }
        wrong=$((wrong + 1))
    fi
    mv "$tmp/next" "$tmp/new"
done
if [ $write = 1 ]; then
    cp "$tmp/new" "$readme"
    "${MAKE:-make}" --no-print-directory build/chart
    build/chart speed "$charts/speed.csv" "$charts/speed.svg"
    build/chart error "$charts/accuracy.csv" "$charts/error.svg"
    echo "$wrong tables changed"
    exit 0
fi
[ $wrong = 0 ]
