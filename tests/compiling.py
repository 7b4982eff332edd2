"""Compile what the operators would launch, for GPUs that are not there.

    python tests/compiling.py --check                every case for every GPU, against compiled.json
    python tests/compiling.py --record               write what is new or better to compiled.json
    python tests/compiling.py --gpu sm_86 --only "attention bfloat16 128"     as lines of JSON

The host code of the operators runs as it is, on tensors of the CPU, and believes that it meets a
certain GPU: its capability, its multiprocessors, its shared memory. Triton compiles each kernel for
that GPU, with the assembler that it brings, and nothing is launched. Results are never looked at.

What is said of each kernel is read from the binary: registers, the bytes to which registers spill,
shared memory and, on Blackwell, columns of tensor memory; and from PTX, how
many bits its loads from global memory have.

What is private to Triton and torch is in this file: a driver that names the GPU instead of finding
it, and JITFunction.run, which is made to compile without a launch.
"""

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

HERE = Path(__file__).resolve().parent
KIB, MIB = 2**10, 2**20


@dataclass(frozen=True)
class Gpu:
    """What host code and compiler ask of a GPU. Shared memory is what one program may have."""

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    l2_cache: int
    shared_memory: int
    warp_size: int = 32
    backend: str = "cuda"
    arch: int | str = 0


def _nvidia(name, major, minor, multiprocessors, l2_mib, shared_kib):
    arch = 10 * major + minor
    return Gpu(name, (major, minor), multiprocessors, l2_mib * MIB, shared_kib * KIB, arch=arch)


GPUS = {
    "sm_75": _nvidia("Tesla T4", 7, 5, 40, 4, 64),
    "sm_80": _nvidia("NVIDIA A100", 8, 0, 108, 40, 163),
    "sm_86": _nvidia("NVIDIA GeForce RTX 3090", 8, 6, 82, 6, 99),
    "sm_89": _nvidia("NVIDIA GeForce RTX 4090", 8, 9, 128, 72, 99),
    "sm_90": _nvidia("NVIDIA H200", 9, 0, 132, 60, 227),
    "sm_100": _nvidia("NVIDIA B200", 10, 0, 148, 126, 227),
    "sm_120": _nvidia("NVIDIA GeForce RTX 5090", 12, 0, 170, 96, 99),
    "gfx942": Gpu(
        "AMD Instinct MI300X", (9, 4), 304, 4 * MIB, 64 * KIB, 64, backend="hip", arch="gfx942"
    ),
}
"""One GPU for each architecture that Triton compiles for and readers own."""

TUNED = (
    "attention_fwd_kernel",
    "attention_decode_kernel",
    "dkdv_kernel",
    "dq_kernel",
    "attention_fp8_fwd_kernel",
    *(f"attention_varlen_{name}_kernel" for name in ("fwd", "dkdv", "dq")),
)
"""Kernels that a row of attention's tables describes; it is chosen right before the launch."""

TENSOR_MEMORY = 512
"""Columns of tensor memory that a program may have on sm_100."""


# -- a GPU that is not there


class _Driver:
    """What Triton asks of a driver before it compiles."""

    def __init__(self, gpu: Gpu):
        self.gpu = gpu

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget(self.gpu.backend, self.gpu.arch, self.gpu.warp_size)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_active_torch_device(self):
        import torch

        return torch.device("cpu")

    def map_python_to_cpp_type(self, kind):
        return kind

    @staticmethod
    def is_active():
        return True


def pretend(gpu: Gpu) -> list[dict]:
    """Make kernelbook believe in a GPU. Return the list to which compiled kernels will be added."""
    os.environ.pop("TRITON_INTERPRET", None)
    sys.path[:0] = [str(HERE.parent / "src")]
    import torch

    torch.cuda.is_available = lambda: True
    torch.version.hip = "6.4" if gpu.backend == "hip" else None
    from kernelbook import runtime
    from kernelbook.ops import checks

    torch.cuda.is_available = lambda: False
    torch.cuda.get_device_name = lambda device=None: gpu.name
    torch.cuda.current_device = lambda: 0
    runtime.DEVICE = torch.device("cpu")
    runtime.launching_on = lambda tensor: contextlib.nullcontext()
    runtime.capability = lambda device: gpu.capability
    properties = SimpleNamespace(
        multi_processor_count=gpu.multiprocessors,
        warp_size=gpu.warp_size,
        L2_cache_size=gpu.l2_cache,
    )
    if gpu.backend == "cuda":  # PyTorch for AMD does not say it
        properties.shared_memory_per_block_optin = gpu.shared_memory
    runtime._properties = lambda device: properties
    checks.same_device = lambda **tensors: None

    from triton.runtime import driver, jit

    from kernelbook.ops.attention import tuned

    driver.set_active(_Driver(gpu))
    compiled, launch, seen = [], jit.JITFunction.run, set()
    choose, chosen = tuned.config, []

    def config(*args):
        chosen[:] = [choose(*args)]
        return chosen[0]

    tuned.config = config

    def run(self, *args, grid, warmup, **kwargs):
        name = self.fn.__module__.removeprefix("kernelbook.ops.") + "." + self.fn.__name__
        try:
            kernel = launch(self, *args, grid=grid, warmup=True, **kwargs)
        except Exception as error:
            compiled.append({"kernel": name, "error": _reason(error)})
        else:
            if kernel.hash not in seen:
                seen.add(kernel.hash)
                compiled.append({"kernel": name, **facts(kernel)})
                if self.fn.__name__ in TUNED:
                    compiled[-1]["row"] = chosen[0].shared

    jit.JITFunction.run = run
    return compiled


def _reason(error: BaseException) -> str:
    """Return the first line of an error, and of what it came from."""
    lines = []
    while error is not None:
        text = str(error).strip().splitlines()
        lines.append(f"{type(error).__name__}: {text[-1] if text else ''}"[:300])
        error = error.__cause__
    return " <- ".join(lines)


# -- what came of it


def facts(kernel) -> dict:
    """Return what a compiled kernel needs, and how wide its loads are."""
    metadata = kernel.metadata
    found = {"warps": metadata.num_warps, "shared": metadata.shared}
    if "amdgcn" in kernel.asm:
        assembly = kernel.asm["amdgcn"]
        for name, field, bytes_each in (
            ("registers", "vgpr_count", 1),
            ("spilled", "vgpr_spill_count", 4),
        ):
            found[name] = bytes_each * int(re.findall(rf"\.{field}:\s+(\d+)", assembly)[-1])
        return found
    if tensor_memory := getattr(metadata, "tmem_size", None):
        found["tensor_memory"] = tensor_memory
    return found | _resources(kernel.asm["cubin"]) | _loads(kernel.asm["ptx"])


def _resources(cubin: bytes) -> dict:
    """Return registers and bytes of stack, as the binary states them."""
    from triton.backends.nvidia import compiler

    tool = Path(compiler.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", said).groups()
    return {"registers": int(registers), "spilled": int(stack)}


def _loads(ptx: str) -> dict:
    """Return how many loads from global memory have how many bits, and what copies for them."""
    found = {}
    widths = Counter(
        int(vector or 1) * int(bits)
        for vector, bits in re.findall(r"ld\.global[\w.:]*?(?:\.v(\d))?\.[bu](\d+)\b", ptx)
    )
    if widths:
        found["loads"] = {str(width): widths[width] for width in sorted(widths)}
    if copies := Counter(re.findall(r"cp\.async\.c[ag]\.shared\.global.*?, (0x\w+|\d+)", ptx)):
        found["copies"] = {str(8 * int(size, 0)): n for size, n in sorted(copies.items())}
    if "cp.async.bulk.tensor" in ptx:
        found["engine"] = True
    return found


# -- the cases: what the public functions launch


def cases() -> dict:
    """Return, by name, functions that call an operator as a user would, each with its sizes."""
    import torch

    import kernelbook

    f32, f16, bf16 = torch.float32, torch.float16, torch.bfloat16
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2

    def spell(dtype):
        return str(dtype).removeprefix("torch.").removesuffix("fn")

    def differentiate(y, *inputs):
        torch.autograd.grad(y, inputs, torch.empty_like(y))

    def new(*shape, dtype, grad=True):
        return torch.empty(shape, dtype=dtype).requires_grad_(grad and dtype.itemsize > 1)

    def dropout(dtype):
        for n in (2**16, 1001):
            x = new(n, dtype=dtype)
            differentiate(kernelbook.seeded_dropout(x, 0.25, 17), x)
            differentiate(kernelbook.masked_dropout(x, torch.empty(n, dtype=torch.bool), 0.25), x)
        kernelbook.ops.dropout._rand_dropout(x.detach(), 0.25, 17)

    def weighted_sum(dtype, n, transposed=False):
        x = new(n, 4096, dtype=dtype).t() if transposed else new(4096, n, dtype=dtype)
        w = new(n, dtype=dtype)
        differentiate(kernelbook.weighted_sum(x, w), x, w)

    def softmax(dtype, n, algorithm="auto"):
        x = new(64, n, dtype=dtype)
        differentiate(kernelbook.softmax(x, algorithm=algorithm), x)

    def layer_norm(dtype, n, parameters=None, out_dtype=None):
        x = new(256, n, dtype=dtype)
        w, b = (new(n, dtype=parameters or dtype) for _ in range(2))
        differentiate(kernelbook.layer_norm(x, n, w, b, out_dtype=out_dtype), x, w, b)

    def attention(dtype, head_dim, is_causal, seqlen=1024, group=1, window=None):
        for deterministic in (True, False):
            q = new(1, 2 * group, seqlen, head_dim, dtype=dtype)
            k, v = (new(1, 2, seqlen, head_dim, dtype=dtype) for _ in range(2))
            options = {"deterministic": deterministic, "enable_gqa": group > 1, "window": window}
            options |= {"is_causal": is_causal, "backend": "triton"}
            differentiate(kernelbook.attention(q, k, v, **options), q, k, v)

    def in_gluon(dtype, head_dim, is_causal, window=None):
        if kernelbook.runtime.capability(None) != (9, 0):
            return  # other GPUs run what the cases before have compiled
        options = {"is_causal": is_causal, "window": window, "backend": "gluon"}
        for seqlen in (1000, 4096):  # the shorter one with a tile for each SM, and no pairs
            heads = 8 if seqlen < 4096 else 64
            q, k, v = (new(1, heads, seqlen, head_dim, dtype=dtype, grad=False) for _ in range(3))
            kernelbook.attention(q, k, v, **options)

    def backward_in_gluon(dtype, head_dim, is_causal, window=None):
        if kernelbook.runtime.capability(None) != (9, 0):
            return
        from kernelbook.ops.hopper.backward import attention_backward
        from kernelbook.ops.hopper.backward_choice import CONFIGS, FREE

        q, k, v, out, do = (new(1, 8, 1000, head_dim, dtype=dtype, grad=False) for _ in range(5))
        operands = q, k, v, out, torch.empty(1, 8, 1000), do, is_causal, 0.1
        for configs in (CONFIGS, FREE):
            attention_backward(*operands, False, None, window, config=configs[head_dim])

    def decoding(dtype, head_dim, is_causal):
        for seqlen_q, group, seqlen_k in ((1, 8, 2**15), (65, 1, 9001)):
            q = new(1, group, seqlen_q, head_dim, dtype=dtype, grad=False)
            k, v = (new(1, 1, seqlen_k, head_dim, dtype=dtype, grad=False) for _ in range(2))
            options = {"is_causal": is_causal, "enable_gqa": True, "backend": "triton"}
            kernelbook.attention(q, k, v, **options)

    def varlen(dtype, head_dim, window=None, group=1):
        q = new(1001, 2 * group, head_dim, dtype=dtype)
        k, v = (new(1001, 2, head_dim, dtype=dtype) for _ in range(2))
        cu = torch.tensor([0, 700, 1001], dtype=torch.int32)
        options = {"window": window, "enable_gqa": group > 1, "backend": "triton"}
        out = kernelbook.attention_varlen(q, k, v, cu, cu, 700, 700, **options)
        differentiate(out, q, k, v)

    def varlen_in_gluon(head_dim, window):
        if kernelbook.runtime.capability(None) != (9, 0):
            return
        q, k, v = (new(1001, 4, head_dim, dtype=bf16) for _ in range(3))
        cu = torch.tensor([0, 700, 1001], dtype=torch.int32)
        options = {"window": window, "backend": "gluon"}
        out = kernelbook.attention_varlen(q, k, v, cu, cu, 700, 700, **options)
        differentiate(out, q, k, v)

    def fp8(dtype, v_dtype, head_dim, is_causal, in_place=True, window=None):
        q, k = (new(1, 2, 1024, head_dim, dtype=dtype, grad=False) for _ in range(2))
        v = new(1, 2, head_dim, 1024, dtype=v_dtype).mT if in_place else new(
            1, 2, 1024, head_dim, dtype=v_dtype
        )  # fmt: skip
        one = torch.ones(1, 2)
        descales = {"q_descale": one, "k_descale": one} if dtype.itemsize == 1 else {}
        options = {"is_causal": is_causal, "window": window, "backend": "triton"}
        kernelbook.attention(q, k, v, **options, v_descale=one, **descales)

    def fp8_in_gluon(dtype, head_dim, is_causal, window=None):
        if kernelbook.runtime.capability(None) != (9, 0):
            return
        options = {"is_causal": is_causal, "window": window, "backend": "gluon"}
        for seqlen in (1000, 4096):  # as in_gluon
            heads = 8 if seqlen < 4096 else 64
            q, k = (new(1, heads, seqlen, head_dim, dtype=dtype) for _ in range(2))
            v = new(1, heads, head_dim, -(-seqlen // 16) * 16, dtype=dtype)[..., :seqlen].mT
            one = torch.ones(1, heads)
            descales = {"q_descale": one, "k_descale": one, "v_descale": one}
            kernelbook.attention(q, k, v, **options, **descales)

    def quantize(x_dtype, dtype, contiguous, seqlen=1024, head_dim=128):
        x = new(2, 4, seqlen, head_dim, dtype=x_dtype, grad=False)
        kernelbook.quantize(x, dtype, contiguous=contiguous)

    found = {}

    def add(name, function, *args):
        found[name] = lambda: function(*args)

    for dtype in (f32, bf16, f16):
        add(f"dropout {spell(dtype)}", dropout, dtype)
    for dtype in (f32, bf16):
        for n in (1, 64, 100, 1001, 1024, 32768):
            add(f"weighted sum {spell(dtype)} {n}", weighted_sum, dtype, n)
        add(f"weighted sum {spell(dtype)} 1024 transposed", weighted_sum, dtype, 1024, True)
        for n in (1000, 1001, 1024, 8192, 8200, 16384, 32768, 65536, 131072):
            add(f"softmax {spell(dtype)} {n}", softmax, dtype, n)
            add(f"layer norm {spell(dtype)} {n}", layer_norm, dtype, n)
        for algorithm in ("three_pass", "online", "online_2d"):
            add(f"softmax {spell(dtype)} 8192 {algorithm}", softmax, dtype, 8192, algorithm)
        add(f"layer norm {spell(dtype)} 600000", layer_norm, dtype, 600_000)
    add("layer norm bfloat16 8192 float32 parameters", layer_norm, bf16, 8192, f32)
    for n in (1280, 3072, 5120, 12284, 12288):
        add(f"layer norm bfloat16 {n}", layer_norm, bf16, n)
    for n in (1280, 8192, 32768):
        add(f"layer norm float32 {n} to bfloat16", layer_norm, f32, n, f32, bf16)
    add("layer norm bfloat16 16384 to float32", layer_norm, bf16, 16384, f32, f32)
    for dtype, head_dims in ((bf16, (32, 64, 80, 128, 256)), (f32, (16, 64, 80, 128, 256))):
        for head_dim in head_dims:
            for mask in ("causal", "full"):
                name = f"attention {spell(dtype)} {head_dim} {mask}"
                add(name, attention, dtype, head_dim, mask == "causal")
    add("attention float16 128 causal", attention, f16, 128, True)
    add("attention bfloat16 128 full 1001", attention, bf16, 128, False, 1001)
    add("attention bfloat16 128 causal gqa", attention, bf16, 128, True, 1024, 4)
    for dtype, head_dims in ((bf16, (64, 128, 256)), (f32, (64, 128, 256))):
        for head_dim in head_dims:
            add(f"decoding {spell(dtype)} {head_dim} causal", decoding, dtype, head_dim, True)
    add("decoding float16 128 full", decoding, f16, 128, False)
    for dtype, head_dim in ((bf16, 64), (bf16, 128), (bf16, 256), (f32, 64)):
        name = f"attention {spell(dtype)} {head_dim} window"
        add(name, attention, dtype, head_dim, False, 1024, 1, (200, 100))
    for dtype, head_dim in ((bf16, 64), (bf16, 128), (f16, 128)):
        for mask in ("causal", "full"):
            name = f"attention in Gluon {spell(dtype)} {head_dim} {mask}"
            add(name, in_gluon, dtype, head_dim, mask == "causal")
        name = f"attention in Gluon {spell(dtype)} {head_dim} window"
        add(name, in_gluon, dtype, head_dim, False, (200, 100))
    for head_dim in (64, 128):
        for mask in ("causal", "full"):
            name = f"attention backward in Gluon bfloat16 {head_dim} {mask}"
            add(name, backward_in_gluon, bf16, head_dim, mask == "causal")
    add("attention bfloat16 128 causal window", attention, bf16, 128, True, 1024, 1, (200, None))
    windows = {"full": None, "causal": (None, 0), "window": (300, 0)}
    for dtype, head_dims in ((bf16, (32, 64, 80, 128, 256)), (f32, (64, 128, 256))):
        for head_dim in head_dims:
            for mask in ("full", "causal"):
                name = f"varlen {spell(dtype)} {head_dim} {mask}"
                add(name, varlen, dtype, head_dim, windows[mask])
    add("varlen bfloat16 128 window", varlen, bf16, 128, windows["window"])
    for head_dim in (64, 128):
        for mask, window in windows.items():
            add(f"varlen in Gluon bfloat16 {head_dim} {mask}", varlen_in_gluon, head_dim, window)
    add("varlen bfloat16 128 causal gqa", varlen, bf16, 128, windows["causal"], 4)
    for head_dim in (64, 80, 128, 256):
        for dtype in (e4m3, bf16):
            name = f"fp8 {spell(dtype)} {head_dim} causal"
            add(name, fp8, dtype, e4m3, head_dim, True)
    add("fp8 float8_e4m3 128 full", fp8, e4m3, e4m3, 128, False)
    add("fp8 float8_e5m2 128 causal", fp8, e5m2, e5m2, 128, True)
    add("fp8 float8_e4m3 128 window", fp8, e4m3, e4m3, 128, False, True, (200, 100))
    add("fp8 bfloat16 64 causal window", fp8, bf16, e4m3, 64, True, True, (200, None))
    add("fp8 float8_e4m3 128 causal, v transposed", fp8, e4m3, e4m3, 128, True, False)
    for head_dim in (64, 128):
        for mask in ("full", "causal", "window"):
            name = f"fp8 in Gluon float8_e4m3 {head_dim} {mask}"
            window = (200, 100) if mask == "window" else None
            add(name, fp8_in_gluon, e4m3, head_dim, mask == "causal", window)
    for contiguous in ("head_dim", "seqlen"):
        for x_dtype in (bf16, f32):
            for dtype in (e4m3, e5m2):
                name = f"fp8 quantize {spell(x_dtype)} to {spell(dtype)}, {contiguous}"
                add(name, quantize, x_dtype, dtype, contiguous)
        name = f"fp8 quantize bfloat16 to float8_e4m3, {contiguous}, 1001 by 80"
        add(name, quantize, bf16, e4m3, contiguous, 1001, 80)
    return found


# -- one after the other


def compile_cases(gpu: str, only: str = "", seconds: int = 300) -> Iterator[dict]:
    """Yield what became of each kernel: a case runs in a child, because LLVM may end its process.

    A record names the gpu, the case and the kernel, and holds what :func:`facts` says or an error.
    Of a case without kernels it names the gpu and the case.
    """
    compiled = pretend(GPUS[gpu])
    for name, call in cases().items():
        if only not in name:
            continue
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            os.close(reader)
            signal.alarm(seconds)
            with contextlib.redirect_stdout(sys.stderr):
                try:
                    call()
                except Exception as error:
                    compiled.append({"kernel": "host", "error": _reason(error)})
            with open(writer, "w") as pipe:
                json.dump(compiled, pipe)
                pipe.flush()
            os._exit(0)
        os.close(writer)
        with open(reader) as pipe:
            said = pipe.read()
        _, status = os.waitpid(child, 0)
        records = json.loads(said) if said else []
        if status:
            records.append({"kernel": "the compiler", "error": f"its process ended with {status}"})
        for record in records or [{}]:  # empty where PyTorch computes it, and no kernel
            yield {"gpu": gpu, "case": name, **record}


# -- against what is recorded


FILE = HERE / "compiled.json"
"""By GPU and case: what the kernels need at most, and by kernel the bytes that spill and how many
loads have fewer than 128 bits; or why there is none. It only gets better."""

FAULTS = {
    "spilled": "spills {now:,} bytes, and {before:,} are recorded",
    "narrow": "has {now} loads of fewer than 128 bits, and {before} are recorded",
}


def recorded() -> dict:
    """Return what the file holds."""
    return json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}


def summary(records: list[dict]) -> dict:
    """Return what the file keeps of the kernels of one case."""
    found = {"kernels": len(records)}
    for record in records:
        if "error" in record:
            return {"refused" if record["kernel"] == "host" else "fails": record["error"]}
        for need in ("shared", "tensor_memory"):
            if record.get(need):
                found[need] = max(record[need], found.get(need, 0))
        if record["shared"] > record.get("row", record["shared"]):
            found["beyond"] = f"{record['kernel']} needs {record['shared']:,} bytes, its row says "
            found["beyond"] += f"{record['row']:,}"
        narrow = sum(n for bits, n in record.get("loads", {}).items() if int(bits) < 128)
        for fault, amount in (("spilled", record["spilled"]), ("narrow", narrow)):
            if amount:
                kernels = found.setdefault(fault, {})
                kernels[record["kernel"]] = max(amount, kernels.get(record["kernel"], 0))
    return found


def complaints(gpu: Gpu, now: dict, before: dict | None, same_compiler: bool = True) -> list[str]:
    """Return what of a case does not fit the GPU, and what was better before.

    ``before`` is None where nothing was. Another compiler spills other values, so that only what
    fits is judged.
    """
    for outcome in ("fails", "refused"):
        if outcome in now:
            same = before is not None and before.get(outcome) == now[outcome]
            return [] if same or (before is None and outcome == "refused") else [now[outcome]]
    limits = {"shared": gpu.shared_memory, "tensor_memory": TENSOR_MEMORY}
    wrong = [
        f"needs {now[need]:,} of {most:,} of {need.replace('_', ' ')}"
        for need, most in limits.items()
        if now.get(need, 0) > most
    ]
    if not same_compiler:
        return wrong
    if "beyond" in now:
        wrong.append(now["beyond"])
    if before is None:
        return wrong
    for fault, words in FAULTS.items():
        past = before.get(fault, {})
        wrong += [
            f"{kernel} {words.format(now=amount, before=past.get(kernel, 0))}"
            for kernel, amount in now.get(fault, {}).items()
            if amount > past.get(kernel, 0)
        ]
    return wrong


def compare(gpu: str, only: str = "") -> tuple[list[str], dict]:
    """Compile for a GPU, in a process of its own. Return what is wrong, and what to record."""
    import triton

    command = [sys.executable, __file__, "--gpu", gpu, "--only", only]
    said = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    cases: dict[str, list[dict]] = {}
    for line in said.splitlines():
        record = json.loads(line)
        cases.setdefault(record["case"], []).extend([record] if "kernel" in record else [])
    past = recorded().get(gpu, {"cases": {}})
    same_compiler = past.get("triton") in (None, triton.__version__)
    wrong, kept = [], dict(past["cases"]) if only else {}
    for name, records in cases.items():
        now, before = summary(records), past["cases"].get(name)
        found = complaints(GPUS[gpu], now, before, same_compiler)
        wrong += [f"{gpu}, {name}: {what}" for what in found]
        kept[name] = before if found and before else now
    return wrong, {"gpu": GPUS[gpu].name, "triton": triton.__version__, "cases": kept}


def compare_all(gpus: list[str], only: str, record: bool) -> int:
    """Compare GPUs, as many at a time as there are cores. Return how many things are wrong."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = dict(zip(gpus, pool.map(lambda gpu: compare(gpu, only), gpus), strict=True))
    wrong = [line for lines, _ in found.values() for line in lines]
    known = recorded()
    for gpu, (_, kept) in found.items():
        unknown = kept["cases"].keys() ^ known.get(gpu, {"cases": {}})["cases"].keys()
        if unknown and not record:
            wrong.append(f"{gpu}: not as recorded, so record them: {', '.join(sorted(unknown))}")
    if record:
        known |= {gpu: kept for gpu, (_, kept) in found.items()}
        FILE.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    print(*wrong, f"{len(wrong)} complaints about {', '.join(gpus)}.", sep="\n")
    return len(wrong)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpu", choices=GPUS, help="one GPU, and not all of them")
    parser.add_argument("--only", default="", help="what the name of a case contains")
    parser.add_argument("--check", action="store_true", help="against compiled.json")
    parser.add_argument("--record", action="store_true", help="to compiled.json")
    options = parser.parse_args()
    if options.check or options.record:
        gpus = [options.gpu] if options.gpu else list(GPUS)
        return min(1, compare_all(gpus, options.only, options.record))
    if not options.gpu:
        parser.error("name a --gpu, or --check or --record all of them")
    for record in compile_cases(options.gpu, options.only):
        print(json.dumps(record), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
