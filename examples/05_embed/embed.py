r"""embed.py - snapmla inside a foreign code base: a shared library made of the header, called by ctypes.

    nvcc -O3 -std=c++17 -arch=sm_90a -Xcompiler -fPIC -shared -x cu -DSNAPMLA_IMPLEMENTATION \
        snapmla.cuh -o libsnapmla.so
    python3 examples/05_embed/embed.py ./libsnapmla.so

Another GPU takes its own number: 80, 86, 89, 100, 120.  Everything that the library takes is a device
pointer: data_ptr() of tensors where torch is installed, plain cudaMalloc() where it is not.  100 keys
that are all alike are cached, so that attention must return their latent, as rounded to e4m3.
Expected output (or `memory from cudaMalloc`):

    snapmla 100, memory from torch: the largest error is 0.8 of what e4m3 explains
    OK

Exit code: 0 = OK, 1 = wrong or failed, 2 = no GPU that can run it (the reason is printed)."""
import ctypes
import math
import struct
import sys

KINDS = dict(p=ctypes.c_void_p, q=ctypes.c_int64, i=ctypes.c_int32, f=ctypes.c_float, z=ctypes.c_size_t)


def c_struct(*groups):
    """A struct of pointers (p), i64 (q), i32 (i), f32 (f), size_t (z) and other structs."""
    fields = [(name, KINDS.get(kind, kind)) for kind, names in groups for name in names.split()]
    return type("c_struct", (ctypes.Structure,), {"_fields_": fields})


# The structs of snapmla.cuh, field by field; what is not set is 0, the default.
Cache = c_struct(("p", "content scale rope"), ("q", "content_stride scale_stride rope_stride pages"),
                 ("i", "page_size latent_dim rope_dim"))
Rotation = c_struct(("p", "positions cosines sines"), ("q", "table_stride"), ("i", "layout"))
Norm = c_struct(("p", "weight"), ("i", "weight_type"), ("f", "eps"))
Append = c_struct((Cache, "cache"), ("q", "tokens"), ("p", "latent"), ("q", "latent_stride"), ("p", "rope"),
                  ("q", "rope_stride"), ("p", "slots stream"), (Norm, "norm"), (Rotation, "rotation"))
Step = c_struct(("i", "batch s_q heads latent_dim rope_dim page_size max_seq_len split_tokens"),
                ("i", "sm_count mode path"),
                ("p", "seq_lens plan"), ("z", "plan_bytes"), ("p", "stream"))
Decode = c_struct((Step, "step"), (Cache, "cache"), ("p", "block_table"), ("q", "table_stride"),
                  ("i", "table_width causal"), ("f", "softmax_scale"), ("p", "q"),
                  ("q", "q_batch_stride q_token_stride q_head_stride"), ("p", "q_content q_scale q_rope out"),
                  ("q", "out_batch_stride out_token_stride out_head_stride"), ("p", "lse"),
                  ("q", "lse_batch_stride lse_token_stride"), ("p", "workspace"), ("z", "workspace_bytes"))

if sys.argv[1:] == ["--sizes"]:  # what tests/check_header.sh compares with the header
    print(*map(ctypes.sizeof, (Cache, Append, Step, Decode)))
    sys.exit(0)

snapmla = ctypes.CDLL(sys.argv[1] if len(sys.argv) > 1 else "build/libsnapmla.so")
snapmla.snapmla_result_string.restype = ctypes.c_char_p


def call(function, *arguments):
    result = getattr(snapmla, function)(*map(ctypes.byref, arguments))
    if result != 0:
        sys.exit(f"{function}: {snapmla.snapmla_result_string(result).decode()}")


usable = snapmla.snapmla_device_supported(0, None)
if usable != 0:
    print("no usable GPU:", snapmla.snapmla_result_string(usable).decode())
    sys.exit(2)

try:
    import torch

    if not torch.cuda.is_available():
        raise ImportError("torch without CUDA")
    source, tensors = "torch", {}

    def device(data):
        tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8).cuda()
        tensors[tensor.data_ptr()] = tensor
        return tensor.data_ptr()

    def host(pointer):
        torch.cuda.synchronize()
        return tensors[pointer].cpu().numpy().tobytes()
except ImportError:
    source, sizes, cuda = "cudaMalloc", {}, None
    for name in ("libcudart.so", "libcudart.so.13", "libcudart.so.12", "/usr/local/cuda/lib64/libcudart.so"):
        try:
            cuda = cuda or ctypes.CDLL(name)
        except OSError:
            pass
    if cuda is None:
        sys.exit("neither torch nor libcudart.so is installed")

    def copy(to, data, size, direction):
        if cuda.cudaMemcpy(to, data, ctypes.c_size_t(size), direction) != 0:
            sys.exit("cudaMemcpy failed")

    def device(data):
        pointer = ctypes.c_void_p()
        if cuda.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(len(data))) != 0:
            sys.exit("cudaMalloc failed")
        copy(pointer, bytes(data), len(data), 1)
        sizes[pointer.value] = len(data)
        return pointer.value

    def host(pointer):
        data = ctypes.create_string_buffer(sizes[pointer])
        copy(data, ctypes.c_void_p(pointer), len(data), 2)
        return data.raw


def bf16(numbers):  # cut off, not rounded: the numbers below are exact anyway, or need not be
    return b"".join(struct.pack("<f", x)[2:] for x in numbers)


def floats(data):
    return [struct.unpack("<f", b"\0\0" + data[i:i + 2])[0] for i in range(0, len(data), 2)]


TOKENS, HEADS, PAGES = 100, 16, 3
latent = floats(bf16(0.25 + math.sin(d) for d in range(512)))
key = bf16(latent + [math.cos(d) for d in range(64)])
nan = b"\xff"  # what is not written shows

append = Append(tokens=TOKENS, latent=device(key * TOKENS))
append.slots = device(struct.pack(f"<{TOKENS}q", *range(64, 64 + TOKENS)))  # pages 1 and 2
append.cache = Cache(content=device(nan * PAGES * 64 * 512), scale=device(nan * PAGES * 64 * 4),
                     rope=device(nan * PAGES * 64 * 128), pages=PAGES)
call("snapmla_append", append)

step = Step(batch=1, s_q=1, heads=HEADS, seq_lens=device(struct.pack("<i", TOKENS)))
plan_bytes, workspace_bytes = ctypes.c_size_t(), ctypes.c_size_t()
call("snapmla_plan_bytes", step, plan_bytes)
call("snapmla_decode_workspace", step, workspace_bytes)
step.plan, step.plan_bytes = device(nan * plan_bytes.value), plan_bytes.value
call("snapmla_plan", step)

decode = Decode(step=step, cache=append.cache, block_table=device(struct.pack("<2i", 1, 2)), table_width=2,
                softmax_scale=576 ** -0.5, q=device(bf16(math.sin(i) for i in range(HEADS * 576))),
                out=device(nan * HEADS * 512 * 2), workspace=device(nan * workspace_bytes.value),
                workspace_bytes=workspace_bytes.value)
call("snapmla_decode", decode)

out = floats(host(decode.out))
tiny = max(map(abs, latent)) / 448 / 512  # steps of e4m3 below its normal numbers
bounds = [abs(x) * (1 / 16 + 1 / 128) + tiny for x in latent]
ratios = [abs(o - latent[i % 512]) / bounds[i % 512] for i, o in enumerate(out)]
worst = max(ratios)
ok = len(out) == HEADS * 512 and all(r <= 1 for r in ratios)  # NaN fails
print(f"snapmla {snapmla.snapmla_version()}, memory from {source}: "
      f"the largest error is {worst:.1f} of what e4m3 explains")
print("OK" if ok else "WRONG")
sys.exit(0 if ok else 1)
