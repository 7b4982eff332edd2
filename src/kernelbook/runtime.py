"""Where kernels run: on a GPU, or in Triton's interpreter when there is none.

Importing this module decides, once for the process. It has to happen before any
``@triton.jit`` is met, because Triton reads ``TRITON_INTERPRET`` at that moment;
``kernelbook/__init__.py`` therefore imports it first.
"""

import dataclasses
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from threading import RLock

import numpy
import torch
from packaging.version import Version

_TRUE = ("1", "true", "yes", "on", "y")  # as Triton reads its settings


def _choose_interpreter() -> bool:
    """Return True when kernels must be interpreted, and prepare Triton for it."""
    asked_for = os.environ.get("TRITON_INTERPRET", "").lower() in _TRUE
    if not asked_for and _gpu_is_there():
        return False
    if "triton.language" in sys.modules and not asked_for:
        raise ImportError(
            "triton was imported before kernelbook, and this machine has no GPU. Triton's "
            "interpreter can only be chosen first: import kernelbook before triton, or set "
            "TRITON_INTERPRET=1 in the environment."
        )
    os.environ["TRITON_INTERPRET"] = "1"
    reason = "TRITON_INTERPRET is set" if asked_for else "no GPU was found"
    print(
        f"kernelbook: {reason}, so kernels run in Triton's interpreter: right, but slow.",
        file=sys.stderr,
    )
    return True


def _gpu_is_there() -> bool:
    """Return whether PyTorch finds a GPU, asked of the driver's library for management: CUDA itself
    would be initialized by the question, and of no use in a process that is forked later."""
    name = "PYTORCH_NVML_BASED_CUDA_CHECK"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        return torch.cuda.is_available()
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


# A product and a sum are one instruction on a GPU. That is the default of every Triton up to 3.9,
# which warns whoever does not ask for it, because 3.10 will have another.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

INTERPRETED = _choose_interpreter()
"""True when kernels run in Triton's interpreter, on the CPU."""

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
"""Where a chapter puts its tensors."""

import triton  # noqa: E402  (only now may Triton be imported)

_OLD_TRITON = Version(triton.__version__) < Version("3.7")
if INTERPRETED and _OLD_TRITON and Version(numpy.__version__) >= Version("2.4"):
    warnings.warn(
        f"Triton {triton.__version__} cannot interpret loops with NumPy {numpy.__version__}. "
        "Use Triton 3.7 or newer, or NumPy older than 2.4.",
        stacklevel=2,
    )


def _spare_the_interpreter() -> None:
    """Spare Triton's interpreter what takes most of its time and has no effect.

    All of it is Triton's own, and another version may do without it.
    """
    from triton.runtime import interpreter

    # -- overflow: products and sums of integers are computed again in int64 and compared with the
    # range, for an assertion that is only looked at under debug
    builder = getattr(interpreter, "interpreter_builder", None)
    options = getattr(builder, "options", None)
    if getattr(options, "sanitize_overflow", False) and not options.debug:
        builder.options = dataclasses.replace(options, sanitize_overflow=False)

    # -- dtypes: a table of all of them is made to look one up
    np_dtype_of = getattr(interpreter, "_get_np_dtype", None)
    found = {}

    def look_up(dtype):
        name = dtype.scalar.name
        if name not in found:
            found[name] = np_dtype_of(dtype)
        return found[name]

    if np_dtype_of is not None:
        interpreter._get_np_dtype = look_up

    # -- builtins: whenever a kernel calls a function, all members of triton.language are looked
    # through to replace those that compile, which are replaced since the launch began
    replace = getattr(interpreter, "_patch_lang", None)
    scope = getattr(interpreter, "_LangPatchScope", None)
    language = triton.language

    @cache
    def used_by(fn):
        spaces = (language, language.core)
        return [s for s in spaces if any(value is s for value in fn.__globals__.values())]

    def compiles(namespace, name):
        return language.core.is_builtin(getattr(namespace, name))

    def replace_once(fn):
        spaces = used_by(fn)
        if any(compiles(s, "arange") for s in spaces) or compiles(language.tensor, "__add__"):
            return replace(fn)
        return scope()

    if replace is not None and scope is not None:
        interpreter._patch_lang = replace_once


def _keep_booleans() -> None:
    """Mend the interpreter of Triton 3.9, where a boolean spread over a block becomes int32.

    A mask made of a block and a scalar, (cols < n_cols) & (row < n_rows), is refused then.
    """
    from triton.runtime import interpreter

    builder = getattr(interpreter, "InterpreterBuilder", None)
    splat = getattr(builder, "create_splat", None)

    def create_splat(self, shape, scalar):
        block = splat(self, shape, scalar)
        if scalar.data.dtype == bool:
            block.data = block.data.astype(bool)
        return block

    if splat is not None:
        builder.create_splat = create_splat


if INTERPRETED:
    _spare_the_interpreter()
    _keep_booleans()


def kernel_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which a tensor is handed to a kernel: its own, on a GPU.

    The interpreter cuts float32 off where it should round to bfloat16, and multiplies bfloat16
    matrices wrongly; some of its 8-bit numbers are not PyTorch's. There, kernels see float32, and
    PyTorch rounds what they return.
    """
    return torch.float32 if INTERPRETED and dtype in _NOT_INTERPRETED else dtype


_NOT_INTERPRETED = (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)


def readable(x: torch.Tensor) -> torch.Tensor:
    """Return x as a kernel may read it: with no negation pending, and in :func:`kernel_dtype`.

    PyTorch negates some views, such as the imaginary part of a conjugate, only when it reads them.
    """
    if x.is_neg():
        x = x.resolve_neg()
    return x.to(kernel_dtype(x.dtype)) if INTERPRETED else x


@contextmanager
def _interpreting() -> Iterator[None]:
    """One launch at a time, because the interpreter keeps the program that it runs in globals.

    It computes in NumPy, which would warn about every NaN that belongs there.
    """
    with _INTERPRETER, numpy.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


_INTERPRETER = RLock()
if INTERPRETED and hasattr(os, "register_at_fork"):  # not in the middle of another thread's launch
    os.register_at_fork(
        before=_INTERPRETER.acquire,
        after_in_parent=_INTERPRETER.release,
        after_in_child=_INTERPRETER.release,
    )


def launching_on(tensor: torch.Tensor) -> AbstractContextManager:
    """Return a context in which Triton launches on the device of ``tensor``."""
    if INTERPRETED:
        return _interpreting()
    if _one_device() or tensor.device.index == torch.cuda.current_device():
        return _AS_IT_IS  # switching costs microseconds, as long as a small kernel runs
    return torch.cuda.device(tensor.device)


_AS_IT_IS = nullcontext()


@cache
def _one_device() -> bool:
    return torch.cuda.device_count() == 1


# -- arithmetic of the host: what triton has for kernels costs the host two microseconds a call


def cdiv(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """Return the least power of two that is at least n, for n of at least 1."""
    return 1 << (n - 1).bit_length()


# -- the device, as the configurations of kernels ask for it. The interpreter has none of this: the
# values that stand for it there let small tests meet several programs and tiles.


def multiprocessors(device: torch.device) -> int:
    """Return how many streaming multiprocessors the device has."""
    return 2 if INTERPRETED else _properties(device).multi_processor_count


def warp_size(device: torch.device) -> int:
    """Return how many threads a warp has: 32, and 64 on some GPUs of AMD."""
    return 32 if INTERPRETED else _properties(device).warp_size


def shared_memory(device: torch.device) -> int:
    """Return the shared memory, in bytes, that one program may use.

    PyTorch for AMD does not say how much that is. Each of these GPUs has 64 KB at least.
    """
    if INTERPRETED:
        return 2**62
    return getattr(_properties(device), "shared_memory_per_block_optin", 64 * 1024)


def l2_cache(device: torch.device) -> int:
    """Return the size of the L2 cache in bytes."""
    return 2**20 if INTERPRETED else _properties(device).L2_cache_size


def register_limit(registers: int | None) -> dict[str, int]:
    """Return the option of a launch that limits the registers of a thread, where there is one."""
    return {} if registers is None or torch.version.hip else {"maxnreg": registers}


def early_start(device: torch.device) -> bool:
    """Return whether a kernel may be started while the one before it still runs, and wait for it
    itself: programmatic dependent launch, from Hopper on."""
    return torch.version.hip is None and capability(device) >= (9, 0)


def capability(device: torch.device) -> tuple[int, int]:
    """Return the device's compute capability: (9, 0) is Hopper, and (0, 0) the interpreter."""
    if INTERPRETED:
        return 0, 0
    if torch.compiler.is_compiling():  # it knows this function, and takes no answer from a cache
        return torch.cuda.get_device_capability(device)
    return _capability(device)


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    properties = _properties(device)
    return properties.major, properties.minor


@cache
def _properties(device: torch.device):
    return torch.cuda.get_device_properties(device)


def environment() -> dict:
    """Return what a result must say about where it came from.

    GPU name, multiprocessors, memory (GiB), L2 (MiB), driver, CUDA, clocks (MHz), and the
    versions of torch, triton and python. Without a GPU the fields of the GPU are absent.
    """
    found = {
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": ".".join(map(str, sys.version_info[:3])),
    }
    if INTERPRETED:
        return found
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    found |= {
        "gpu": properties.name,
        "sm_count": properties.multi_processor_count,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "l2_mib": round(properties.L2_cache_size / 2**20, 1),
        "cuda": torch.version.cuda,
    }
    return found | _driver_and_clocks(f"GPU-{properties.uuid}")


def _driver_and_clocks(gpu: str) -> dict:
    """Read the driver version and the highest clocks of a GPU from nvidia-smi, if it answers."""
    query = "driver_version,clocks.max.sm,clocks.max.memory"
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits", f"--id={gpu}"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
        driver, sm_mhz, memory_mhz = (field.strip() for field in answer.stdout.split(","))
    except (OSError, subprocess.SubprocessError, ValueError):
        return {"driver": "unknown", "clocks": {}}
    clocks = {"max_sm_mhz": sm_mhz, "max_memory_mhz": memory_mhz}
    return {
        "driver": driver,
        "clocks": {name: int(value) for name, value in clocks.items() if value.isdigit()},
    }
