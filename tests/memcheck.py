"""Call every operator once on every path, with memory that ends where each tensor ends.

    python tests/memcheck.py              run the kernels where kernels run
    python tests/memcheck.py --sanitize   on a GPU, under compute-sanitizer: memcheck and racecheck

A kernel that reads one element past the end of a parameter gives right results, because what it
reads there is masked later, and no test of results can see it. Here it is seen:

    on a GPU            PyTorch's cache of memory is off, so that every tensor is an allocation of
                        its own, of exactly its size, and memcheck knows where that ends
    in the interpreter  a page that may not be read follows every tensor, and the process dies

Races in shared memory are looked for where a GPU is, but in kernels whose warps have roles only if
racecheck understands them: see racecheck.py.

Sizes are awkward: no power of two divides them. Every kernel of the package has to have run, or
this fails and names those that have not.
"""

import os

os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # before torch is imported

import argparse
import ctypes
import faulthandler
import importlib
import mmap
import pkgutil
import shutil
import subprocess
import sys
from contextlib import contextmanager
from itertools import accumulate, product
from pathlib import Path

import racecheck
import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE / "ops"), str(HERE.parent / "src")]

from test_properties import LAYER_NORM_PATHS, SOFTMAX_PATHS, WEIGHTED_SUM_PATHS, changed  # noqa: E402

from kernelbook import (  # noqa: E402
    Quantized,
    attention,
    attention_varlen,
    dropout,
    layer_norm,
    masked_dropout,
    ops,
    quantize,
    runtime,
    seeded_dropout,
    softmax,
    weighted_sum,
)
from kernelbook.ops import dropout as dropouts  # noqa: E402
from kernelbook.ops import weighted_sum as weighted_sums  # noqa: E402
from kernelbook.ops.attention import decoding  # noqa: E402
from kernelbook.ops.hopper.backward_choice import FREE  # noqa: E402
from kernelbook.ops.layer_norm import backward as layer_norm_backward  # noqa: E402
from kernelbook.ops.layer_norm import tuned as layer_norm_tuned  # noqa: E402
from kernelbook.ops.softmax import tuned as softmax_tuned  # noqa: E402

ON_HOPPER = runtime.capability(runtime.DEVICE) == (9, 0)
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ROWS = 3

# -- weighted sums: (path, dtype, rows, columns)

WEIGHTED_SUM = (
    [("small", F32, 3, 1), ("small", F16, 1, 333), ("small", F32, 101, 7), ("small", F16, 33, 101)]
    if runtime.INTERPRETED
    else [
        ("as it is", d, *n) for d in (BF16, F32) for n in ((3001, 1), (3, 9_999_999), (777, 1001))
    ]
)

# -- rows: (path, dtype, columns). The interpreter opens the paths to short rows.

SOFTMAX = (
    [("as it is", F16, 7), ("as it is", F32, 101), ("packed", F16, 98), ("split", F32, 101)]
    if runtime.INTERPRETED
    else [("as it is", BF16, n) for n in (7, 1001, 8190, 8194, 20001, 50257, 131073)]
    + [("as it is", F32, n) for n in (7, 1001, 10001, 20001, 50257)]
)
LAYER_NORM = (
    [("as it is", F16, 7), ("as it is", F32, 101), ("packed", F16, 98), ("packed", F16, 256)]
    + [("split", F32, 101), ("split", F16, 97), ("loop", F32, 101)]
    if runtime.INTERPRETED
    else [("as it is", BF16, n) for n in (7, 1001, 8190, 10002, 16384, 20002, 50257, 65534)]
    + [("as it is", F32, n) for n in (7, 1001, 10001, 50257, 524289)]
)

# -- attention: (dtype, query heads, seqlen_q, seqlen_k, head_dim)

ATTENTION = (
    [(F32, 2, 33, 45, 24), (F16, 4, 35, 7, 16)]
    if runtime.INTERPRETED
    else [(BF16, 2, 131, 257, 64), (F16, 4, 131, 257, 128), (BF16, 2, 67, 35, 40)]
    + [(F32, 2, 67, 131, 40), (BF16, 2, 67, 131, 256)]
)

DECODING = (
    [(F32, 4, 3, 101, 24), (F16, 2, 1, 99, 16)]
    if runtime.INTERPRETED
    else [(BF16, 2, 1, 8191, 128), (F16, 8, 3, 2049, 40), (F32, 2, 5, 4099, 64)]
)

VARLEN = [  # lengths of queries and of keys; the last sequence ends where the memory does
    ((33, 0, 1, 35), (45, 3, 0, 7)),
    ((131, 67, 3), (131, 67, 3)),
]


# -- memory


def guarded(values: torch.Tensor) -> torch.Tensor:
    """Copy a tensor of the CPU to where a page begins that may not be read when it ends."""
    if values.device.type != "cpu" or not values.numel():
        return values
    span = 1 + sum((n - 1) * step for n, step in zip(values.shape, values.stride(), strict=True))
    n_bytes = span * values.itemsize
    pages = -(-n_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, pages + mmap.PAGESIZE)
    after = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + pages
    if ctypes.CDLL(None).mprotect(ctypes.c_void_p(after), mmap.PAGESIZE, 0):
        raise OSError("a page after a tensor could not be protected")
    flat = torch.frombuffer(memory, dtype=values.dtype, count=span, offset=pages - n_bytes)
    copy = torch.empty(0, dtype=values.dtype)
    copy.set_(flat.untyped_storage(), 0, values.shape, values.stride())
    return copy.copy_(values)


def draw(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Draw numbers that want a gradient, in an allocation that ends where they do."""
    values = torch.randn(shape, device=runtime.DEVICE).to(dtype)
    return guarded(values).requires_grad_()


@contextmanager
def guarding():
    """Give what the operators allocate a page after it as well."""
    names = ("empty", "empty_like", "empty_permuted", "zeros", "full")
    before = {name: getattr(torch, name) for name in names}

    def wrapped(allocate):
        return lambda *args, **kwargs: guarded(allocate(*args, **kwargs))

    with changed(torch, {name: wrapped(allocate) for name, allocate in before.items()}):
        yield


# -- the operators


def differentiate(what: str, results, inputs, dtypes=()) -> None:
    """Run backward with a gradient whose memory ends where it ends, and wait for the GPU."""
    results = results if isinstance(results, tuple) else (results,)
    grads = [draw(*y.shape, dtype=y.dtype).detach() for y in results]
    found = torch.autograd.grad(results, [x for x in inputs if x is not None], grads)
    if not all(t.isfinite().all() for t in (*results, *found)):
        raise AssertionError(f"{what} has a result that is not finite")
    if not runtime.INTERPRETED:
        torch.cuda.synchronize()
    print(what, flush=True)


def run_weighted_sum() -> None:
    for path, dtype, rows, n in WEIGHTED_SUM:
        with changed(weighted_sums, WEIGHTED_SUM_PATHS[path]):
            w = draw(n, dtype=dtype)
            for x in (draw(rows, n, dtype=dtype), draw(n, rows, dtype=dtype).t()):
                y = weighted_sum(x, w)
                differentiate(f"weighted sum, {rows} by {n}, {path}", y, [x, w])


def run_softmax() -> None:
    for path, dtype, n in SOFTMAX:
        with changed(softmax_tuned, SOFTMAX_PATHS[path]):
            x = draw(ROWS, n, dtype=dtype)
            differentiate(f"softmax, {n} columns, {path}", softmax(x), [x])
    for algorithm in ("three_pass", "online", "online_2d"):
        x = draw(ROWS + 2, 101 if runtime.INTERPRETED else 10001, dtype=F32)
        differentiate(f"softmax, {algorithm}", softmax(x, algorithm=algorithm), [x])


def run_layer_norm() -> None:
    for path, dtype, n in LAYER_NORM:
        with changed(layer_norm_tuned, LAYER_NORM_PATHS[path]):
            x, w, b = draw(ROWS, n, dtype=dtype), draw(n, dtype=dtype), draw(n, dtype=dtype)
            for weight, bias in ((w, b), (None, b), (w, None), (None, None)):
                what = f"layer norm, {n} columns, {path}, {weight is w} {bias is b}"
                differentiate(what, layer_norm(x, n, weight, bias), [x, weight, bias])
            statistics = draw(ROWS, dtype=F32).detach(), draw(ROWS, dtype=F32).detach()
            rows = (t.detach() for t in (x, draw(ROWS, n, dtype=dtype)))
            x, dy = (runtime.readable(t) for t in rows)
            layer_norm_backward._backward(x, None, *statistics, dy, F32, F32, reduction="lock")
            print(f"layer norm, {n} columns, {path}, under a lock", flush=True)


def run_dropout() -> None:
    for dtype, n in ((F32, 1023), (F16, 2051)):
        x, keep = draw(n, dtype=dtype), guarded(torch.rand(n, device=runtime.DEVICE) > 0.5)
        differentiate(f"masked dropout, {n}", masked_dropout(x, keep, 0.5), [x])
        differentiate(f"seeded dropout, {n}", seeded_dropout(x, 0.5, 7), [x])
        differentiate(f"dropout, {n}", dropout(x), [x])
        dropouts._rand_dropout(x.detach(), 0.5, 7)


def run_attention() -> None:
    for dtype, heads, seqlen_q, seqlen_k, head_dim in ATTENTION:
        for is_causal in (False, True):
            for deterministic in (False, True):
                q = draw(1, heads, seqlen_q, head_dim, dtype=dtype)
                k, v = (draw(1, 2, seqlen_k, head_dim, dtype=dtype) for _ in range(2))
                results = attention(
                    q, k, v, is_causal=is_causal, enable_gqa=True, deterministic=deterministic,
                    return_lse=not is_causal, backend="triton",
                )  # fmt: skip
                what = f"attention, {seqlen_q} by {seqlen_k}, head_dim {head_dim}"
                what += f", {is_causal=}, {deterministic=}"
                differentiate(what, results, [q, k, v])
        for window in ((10, 0), (None, 7), (33, 40)):
            q = draw(1, heads, seqlen_q, head_dim, dtype=dtype)
            k, v = (draw(1, 2, seqlen_k, head_dim, dtype=dtype) for _ in range(2))
            for deterministic in (False, True):
                options = {"enable_gqa": True, "deterministic": deterministic, "backend": "triton"}
                results = attention(q, k, v, window=window, **options)
                what = f"attention, {seqlen_q} by {seqlen_k}, head_dim {head_dim}"
                differentiate(f"{what}, {window=}, {deterministic=}", results, [q, k, v])


def run_attention_in_gluon() -> None:
    for dtype, heads, seqlen_q, seqlen_k, head_dim in ATTENTION:
        if not ON_HOPPER or dtype == F32 or head_dim not in (64, 128):
            continue
        for batch, window in product((1, 70), (None, (None, 0), (10, 0), (33, 40))):
            q = draw(batch, heads, seqlen_q, head_dim, dtype=dtype)
            k, v = (draw(batch, 2, seqlen_k, head_dim, dtype=dtype) for _ in range(2))
            options = {"window": window, "enable_gqa": True, "backend": "gluon"}
            what = f"attention in Gluon, {batch=}, {seqlen_q} by {seqlen_k}, {head_dim=}, {window=}"
            differentiate(what, attention(q, k, v, **options, return_lse=True), [q, k, v])


def run_attention_backward_in_gluon() -> None:
    if not ON_HOPPER:
        return
    from kernelbook.ops.hopper import backward

    for dtype, heads, seqlen_q, seqlen_k, head_dim in ATTENTION:
        if dtype == F32 or head_dim not in (64, 128):
            continue
        configs = backward.CONFIGS[head_dim], FREE[head_dim]
        for config, window in product(configs, (None, (None, 0), (33, 40))):
            q, do = (draw(2, heads, seqlen_q, head_dim, dtype=dtype).detach() for _ in range(2))
            k, v = (draw(2, 2, seqlen_k, head_dim, dtype=dtype).detach() for _ in range(2))
            out, lse = attention(q, k, v, window=window, enable_gqa=True, return_lse=True)
            backward.attention_backward(
                q, k, v, out, lse, do, False, 0.1, False, lse, window, config=config
            )


def run_attention_decoding() -> None:
    with changed(decoding, {"FEWEST_KEYS": 1, "FEWEST_TILES": 1} if runtime.INTERPRETED else {}):
        for dtype, heads, seqlen_q, seqlen_k, head_dim in DECODING:
            for is_causal in (False, True):
                q = draw(1, heads, seqlen_q, head_dim, dtype=dtype)
                k, v = (draw(1, 2, seqlen_k, head_dim, dtype=dtype) for _ in range(2))
                results = attention(q, k, v, is_causal=is_causal, enable_gqa=True, return_lse=True)
                what = f"decoding, {seqlen_q} by {seqlen_k}, head_dim {head_dim}, {is_causal=}"
                differentiate(what, results, [q, k, v])


def run_attention_fp8() -> None:
    for dtype, heads, seqlen_q, seqlen_k, head_dim in ATTENTION:
        if dtype == F32:
            continue
        q = draw(1, heads, seqlen_q, head_dim, dtype=dtype).detach()
        k, v = (draw(1, 2, seqlen_k, head_dim, dtype=dtype).detach() for _ in range(2))
        q8, k8, v8 = (Quantized(*map(guarded, quantize(x))) for x in (q, k, v))
        plain = {"enable_gqa": True, "backend": "triton"}
        for is_causal in (False, True):
            attention(q, k, v8, is_causal=is_causal, **plain)
            attention(q8, k8, v8, is_causal=is_causal, **plain)
        v8 = Quantized(*map(guarded, quantize(v, E5M2, per="tensor", contiguous="seqlen")))
        attention(q, k, v8, window=(33, 7), **plain)
        attention(q, k, v8, **plain)
        if ON_HOPPER and head_dim in (64, 128):
            for of_v, window in product((k8, v8), (None, (None, 0), (33, 40))):
                options = {"window": window, "enable_gqa": True, "backend": "gluon"}
                attention(q8, k8, of_v, **options)
        print(f"attention in FP8, {seqlen_q} by {seqlen_k}, head_dim {head_dim}", flush=True)


def run_attention_varlen() -> None:
    sizes = [*VARLEN, ((257, 1, 131), (131, 35, 257))] if not runtime.INTERPRETED else VARLEN
    for dtype, heads, *_, head_dim in ATTENTION:
        for lengths in sizes:
            q = draw(sum(lengths[0]), heads, head_dim, dtype=dtype)
            k, v = (draw(sum(lengths[1]), 2, head_dim, dtype=dtype) for _ in range(2))
            starts = [torch.tensor([0, *accumulate(n)], dtype=torch.int32) for n in lengths]
            cu = [guarded(x.to(runtime.DEVICE)) for x in starts]
            longest = [max(n) for n in lengths]
            for window in (None, (None, 0), (33, 7)):
                results = attention_varlen(q, k, v, *cu, *longest, window=window, enable_gqa=True)
                what = f"packed attention, {lengths}, head_dim {head_dim}, {window=}"
                differentiate(what, results, [q, k, v])
            wrong = guarded(torch.tensor([-9, 10**9, 5, 10**9], device=runtime.DEVICE).int())
            out = attention_varlen(q, k, v, wrong, wrong, 1000, 1000, enable_gqa=True)
            torch.autograd.grad(out, (q, k, v), torch.ones_like(out))


# -- what has run


def kernels() -> dict:
    """Return every kernel of the operators that this GPU has, by its module and name."""
    found = {}
    for module in pkgutil.walk_packages(ops.__path__, f"{ops.__name__}."):
        if "hopper" in module.name and not ON_HOPPER:
            continue
        for name, kernel in vars(importlib.import_module(module.name)).items():
            if name.endswith("_kernel") and kernel.fn.__module__ == module.name:
                found[f"{module.name}.{name}"] = kernel
    return found


def count(all_kernels: dict) -> dict[str, int]:
    """Count how often each kernel is launched from now on."""
    counts = dict.fromkeys(all_kernels, 0)
    for name, kernel in all_kernels.items():

        def run(*args, name=name, run=kernel.run, **kwargs):
            counts[name] += 1
            return run(*args, **kwargs)

        kernel.run = run
    return counts


def run_all() -> None:
    faulthandler.enable()  # so that the interpreter names the kernel that read too far
    torch.manual_seed(20)
    counts = count(kernels())
    with guarding():
        for run in (
            run_weighted_sum,
            run_softmax,
            run_layer_norm,
            run_dropout,
            run_attention,
            run_attention_in_gluon,
            run_attention_backward_in_gluon,
            run_attention_decoding,
            run_attention_fp8,
            run_attention_varlen,
        ):
            run()
    idle = [name for name, times in counts.items() if not times]
    if idle:
        sys.exit(f"memcheck: no size here meets {', '.join(idle)}: add one that does.")
    print(f"memcheck: {sum(counts.values())} launches of {len(counts)} kernels.")


# -- compute-sanitizer


def sanitize() -> int:
    """Run this file under compute-sanitizer, or say why not. Return what failed."""
    tool = shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path=f"{os.environ.get('CUDA_HOME', '/usr/local/cuda')}/bin"
    )
    if runtime.INTERPRETED or tool is None:
        why = "no GPU was found" if runtime.INTERPRETED else "compute-sanitizer was not found"
        print(f"memcheck: {why}, so kernels run without compute-sanitizer.", file=sys.stderr)
        if os.environ.get("MEMCHECK_REQUIRED"):
            print("memcheck: MEMCHECK_REQUIRED is set, so this is a failure.", file=sys.stderr)
            return 1
        return subprocess.run([sys.executable, __file__], check=False).returncode
    runs = [(["memcheck", "--padding", "512"], []), (["racecheck"], [])]
    if ON_HOPPER and not racecheck.sees_roles(tool):
        print("memcheck: racecheck is wrong of roles, so it leaves out kernels that have them.")
        runs[-1][1].append("--without-roles")
    for check, options in runs:
        command = [tool, "--tool", *check, "--error-exitcode", "9", sys.executable, __file__]
        print("memcheck:", *command, *options, flush=True)
        if code := subprocess.run([*command, *options], check=False).returncode:
            return code
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sanitize", action="store_true", help="under compute-sanitizer")
    parser.add_argument("--without-roles", action="store_true", help="no kernel in Gluon")
    options = parser.parse_args()
    if options.sanitize:
        return sanitize()
    global ON_HOPPER
    ON_HOPPER &= not options.without_roles
    run_all()
    return 0


if __name__ == "__main__":
    sys.exit(main())
