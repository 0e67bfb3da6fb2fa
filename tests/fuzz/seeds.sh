#!/usr/bin/env bash
# seeds.sh DIR - inputs for fuzz_tiny_mla to begin with: this repository's config.json, a small
# safetensors file, and a whole model of one layer, 16 wide.
set -eu
mkdir -p "$1"
model=$(dirname "$0")/../../examples/tiny_mla

byte() { printf "\\x$(printf %02x "$1")"; }
{ byte 0; cat "$model/config.json"; } >"$1/config"
{ byte 0; tr -d '\n' <"$model/config.json"; } >"$1/config_in_a_line"

header='{"b":{"dtype":"BF16","shape":[2],"data_offsets":[4,8]}, "__metadata__":{"format":"pt"},
"a":{"dtype":"BF16","shape":[1,2],"data_offsets":[0,4]}}'
{ byte 1; byte ${#header}; printf '\0\0\0\0\0\0\0%s\1\2\3\4\5\6\7\10' "$header"; } >"$1/two_tensors"

at=0 text=
tensor() { # NAME COLUMNS [ROWS]
    local shape=$2 end=$((at + 2 * $2 * ${3:-1}))
    [ $# = 2 ] || shape="$3,$2"
    text="$text${text:+,}\"model.$1.weight\":{\"dtype\":\"BF16\",\"shape\":[$shape],"
    text="$text\"data_offsets\":[$at,$end]}"
    at=$end
}
tensor embed_tokens 16 256
tensor norm 16
tensor layers.0.input_layernorm 16
tensor layers.0.self_attn.q_proj 16 80
tensor layers.0.self_attn.kv_a_proj_with_mqa 16 576
tensor layers.0.self_attn.kv_a_layernorm 512
tensor layers.0.self_attn.o_proj 16 16
tensor layers.0.post_attention_layernorm 16
tensor layers.0.mlp.gate_proj 16 16
tensor layers.0.mlp.up_proj 16 16
tensor layers.0.mlp.down_proj 16 16
tensor layers.0.self_attn.kv_b_proj 512 32
numbers() { byte $((at / 2 / 256)); byte $((at / 2 % 256)); byte 1; }
{ byte 2; numbers; printf '{%s}' "$text"; } >"$1/model"
config=$(sed 's/"num_hidden_layers": 4/"num_hidden_layers": 1/
    s/"num_attention_heads": 8/"num_attention_heads": 1/
    s/"hidden_size": 256/"hidden_size": 16/; s/"intermediate_size": [0-9]*/"intermediate_size": 16/
    s/"\(qk_nope\|v\)_head_dim": [0-9]*/"\1_head_dim": 16/' "$model/config.json")
{ byte 3; byte $((${#config} / 256)); byte $((${#config} % 256)); printf %s "$config"; numbers
  printf '{%s}' "$text"; } >"$1/config_and_model"
