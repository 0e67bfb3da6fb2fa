#!/usr/bin/env bash
# tiny_mla_bad_input.sh PROGRAM - broken model folders given to the program examples/tiny_mla: each
# must end with exit code 1 and exactly one line on stderr that names the file and the field, never
# with a crash.  Ends with a line `N passed, N failed`.
set -u
program=$(realpath "$1")
cd "$(dirname "$0")/../examples/tiny_mla" || exit 1
good=$PWD
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
passed=0 failed=0

verdict() { # verdict NAME 0|1 [DETAIL]
    if [ "$2" = 0 ]; then
        passed=$((passed + 1))
        echo "ok   $1"
    else
        failed=$((failed + 1))
        echo "FAIL $1: ${3:-}"
    fi
}

# A fresh copy of the model to break; the big file is linked until a case replaces it.
fresh() {
    rm -rf "$work/m"
    mkdir "$work/m"
    cp "$good/config.json" "$work/m/"
    ln -s "$good/model.safetensors" "$good/excerpt.txt" "$work/m/"
}

run() {
    "$program" --cpu --model "$work/m" --tokens 0 --bytes 0 >"$work/out" 2>"$work/err"
    code=$?
}

# reject NAME FILE FIELD: exit code 1, one line, and in it the file and the field
reject() {
    run
    if [ $code = 1 ] && [ "$(wc -l <"$work/err")" = 1 ] && grep -q -F "m/$2: " "$work/err" &&
        grep -q -F -- "$3" "$work/err"; then
        verdict "$1" 0
    else
        verdict "$1" 1 "exit code $code, stderr: $(head -c 300 "$work/err")"
    fi
}

# --- the whole folder is fine -------------------------------------------------------------------
fresh
run
verdict 'an intact folder is accepted' $code "$(head -c 300 "$work/err")"

# --- missing files ------------------------------------------------------------------------------
for file in config.json model.safetensors excerpt.txt; do
    fresh
    rm "$work/m/$file"
    reject "$file is missing" "$file" 'No such file'
    mkdir "$work/m/$file"
    reject "$file is a folder" "$file" 'Is a directory'
done

# --- config.json --------------------------------------------------------------------------------
config() { # config FIELD SED-EXPRESSION
    fresh
    sed "$2" "$good/config.json" >"$work/m/config.json"
    reject "config.json: $2" config.json "$1"
}
config kv_lora_rank 's/"kv_lora_rank": 512/"kv_lora_rank": 256/'
config kv_lora_rank '/kv_lora_rank/d'
config qk_rope_head_dim 's/"qk_rope_head_dim": 64/"qk_rope_head_dim": 128/'
config hidden_size 's/"hidden_size": 256/"hidden_size": 1e3/'
config num_hidden_layers 's/"num_hidden_layers": 4/"num_hidden_layers": 1000000/'
config num_attention_heads 's/"num_attention_heads": 8/"num_attention_heads": -8/'
config q_lora_rank 's/"q_lora_rank": null/"q_lora_rank": 1536/'
config first_k_dense_replace 's/"first_k_dense_replace": 4/"first_k_dense_replace": 3/'
config rope_type 's/"rope_type": "default"/"rope_type": "yarn"/'
config rope_parameters '/"rope_parameters": {/,/}/c "rope_parameters": 7,'
config rope_parameters '/"rope_parameters": {/,/}/s/"rope_theta": 10000.0/"rope_theta": 500000.0/'
config torch_dtype 's/"torch_dtype": "bfloat16"/"torch_dtype": "float8_e4m3fn"/'
config num_key_value_heads 's/"num_key_value_heads": 8/"num_key_value_heads": 1/'
config qk_head_dim 's/"qk_head_dim": 96/"qk_head_dim": 97/'
config tie_word_embeddings 's/"tie_word_embeddings": true/"tie_word_embeddings": false/'
config JSON '$d'
config JSON 's/^{/[/'
fresh
: >"$work/m/config.json"
reject 'config.json is empty' config.json JSON
head -c 100000 /dev/zero >"$work/m/config.json"
reject 'config.json is zeros' config.json JSON
head -c 100000 /dev/zero | tr '\0' '{' >"$work/m/config.json"
reject 'config.json is braces' config.json JSON

# Widths that are fine alone and do not fit the tensors
fresh
sed 's/\("intermediate_size"\): 512/\1: 1024/' "$good/config.json" >"$work/m/config.json"
reject 'tensors narrower than config.json says' model.safetensors 'mlp.gate_proj.weight: shape'
fresh
sed 's/\(num_hidden_layers\|first_k_dense_replace\)": 4/\1": 5/' "$good/config.json" \
    >"$work/m/config.json"
reject 'a layer less than config.json says' model.safetensors 'model.layers.4.'

# --- model.safetensors --------------------------------------------------------------------------
size=$(wc -c <"$good/model.safetensors")
header=$(od -A n -t u8 -N 8 "$good/model.safetensors" | tr -d ' ')
data=$((8 + header))
for length in 0 5 8 9 1000 $((data - 1)) $data $((data + 1)) 4000000 $((size - 1)); do
    fresh
    rm "$work/m/model.safetensors"
    head -c "$length" "$good/model.safetensors" >"$work/m/model.safetensors"
    if [ "$length" -lt $data ]; then field=header; else field=data; fi
    reject "model.safetensors cut to $length bytes" model.safetensors $field
done
fresh
rm "$work/m/model.safetensors"
cp "$good/model.safetensors" "$work/m/"
printf x >>"$work/m/model.safetensors"
reject 'model.safetensors is a byte too long' model.safetensors data

patched() { # patched NAME OFFSET PRINTF-BYTES FIELD
    fresh
    rm "$work/m/model.safetensors"
    cp "$good/model.safetensors" "$work/m/"
    printf "$3" | dd of="$work/m/model.safetensors" bs=1 seek="$2" conv=notrunc 2>/dev/null
    reject "model.safetensors: $1" model.safetensors "$4"
}
patched 'header length of 2^64 - 1' 0 '\377\377\377\377\377\377\377\377' header
patched 'header length of 0' 0 '\0\0\0\0\0\0\0\0' header
patched 'header length a byte short' 0 "\\$(printf %o $((header % 256 - 1)))" data
patched 'a NaN in the embedding' $((data + 1000)) '\300\177' 'embed_tokens.weight: element 500'
offset=$(grep -a -b -o -F '"dtype":"BF16"' "$good/model.safetensors" | head -n 1 | cut -d: -f1)
patched 'dtype F16' $((offset + 8)) '"F16" ' 'dtype'
patched 'dtype F32' $((offset + 8)) '"F32" ' 'data_offsets'
patched 'a control character in a name' $((offset - 5)) '\001' header

# --- random damage: exit code 0 or 1, one line at most, no crash --------------------------------
RANDOM=1
broken=0
for round in $(seq 40); do
    fresh
    if [ $((round % 4)) = 0 ]; then
        file=config.json bytes=$(wc -c <"$good/config.json")
    else
        file=model.safetensors bytes=$((data + 64))
    fi
    rm -f "$work/m/$file"
    cp "$good/$file" "$work/m/"
    for _ in 1 2 3; do
        at=$(((RANDOM * 32768 + RANDOM) % bytes))
        printf "\\$(printf %o $((RANDOM % 256)))" |
            dd of="$work/m/$file" bs=1 seek=$at conv=notrunc 2>/dev/null
    done
    run
    if [ $code -gt 1 ] || [ "$(wc -l <"$work/err")" != $code ]; then
        verdict "random damage $round of $file" 1 "exit code $code: $(head -c 300 "$work/err")"
        broken=$((broken + 1))
    fi
done
verdict '40 files with random damage' $((broken > 0)) "$broken of 40"

# --- arguments ----------------------------------------------------------------------------------
argument() {
    "$program" "$@" >"$work/out" 2>"$work/err"
    code=$?
    [ $code = 1 ] && [ "$(wc -l <"$work/err")" = 1 ] && grep -q -F -- "$1" "$work/err"
    verdict "arguments: $*" $? "exit code $code, stderr: $(head -c 300 "$work/err")"
}
argument --tokens many
argument --temp nan
argument --context
argument --frobnicate
"$program" --help >"$work/out" 2>"$work/err" && grep -q -F -- '--full' "$work/out"
verdict '--help' $?

echo "$passed passed, $failed failed"
[ $failed = 0 ]
