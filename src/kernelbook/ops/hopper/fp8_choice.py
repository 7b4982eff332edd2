"""Which kernel computes attention in FP8: plain Triton, or Gluon, below it.

As :mod:`kernelbook.ops.hopper.choice` is for operands of 16 bits. Nothing here imports Gluon.
"""

import math
from collections.abc import Callable
from functools import partial

import torch

from kernelbook.ops import checks
from kernelbook.ops.attention import scope
from kernelbook.ops.attention.fp8 import DTYPES
from kernelbook.ops.hopper import choice
from kernelbook.ops.hopper.choice import Choice, Config, decided
from kernelbook.ops.launch import planned

CONFIGS = {64: Config(2, 128, 4, True), 128: Config(2, 128, 4, True)}
"""The configuration for each head_dim, where no other was measured to be faster."""


# -- which kernel is the fastest

CHOICES = {
    (64, "full"): ((math.inf, None),),
    (64, "causal"): ((math.inf, None),),
    (64, "window"): ((math.inf, None),),
    (128, "full"): ((math.inf, None),),
    (128, "causal"): ((2048, CONFIGS[128]), (math.inf, None)),
    (128, "window"): ((math.inf, None),),
}
"""What was fastest, by head_dim and mask: from the shortest on, up to how many keys that a query
may see, and which configuration, or None for the kernel of ``attention.fp8``.

Measured on an H200 with q, k and v in float8_e4m3fn, and 16,384 tokens of 2,048 columns in all. The
chapter on FP8 records both kernels at 1,024, 4,096 and 16,384 keys: this one leads by more than the
spread for 1,024 keys of a causal mask at head_dim 128 alone. Windows were not measured. The limit
between measured lengths is interpolated."""


def choose(head_dim: int, mask: str, keys: int) -> Config | None:
    """Return the fastest configuration, or None where the kernel of ``attention.fp8`` is it."""
    return choice.up_to(keys, CHOICES[head_dim, mask])


@planned
def fp8_choice(
    capability: tuple[int, int],
    q_dtype: torch.dtype,
    v_dtype: torch.dtype,
    q_shape: tuple[int, ...],
    k_shape: tuple[int, ...],
    is_causal: bool = False,
    window: scope.Window | None = None,
    backend: str = "auto",
) -> Choice:
    """Return which kernel computes attention with operands in FP8, and why not the other.

    It looks at no tensor and no device, so that it can be asked about GPUs that are not there:

    >>> e4m3 = torch.float8_e4m3fn
    >>> fp8_choice((8, 9), e4m3, e4m3, (4, 16, 4096, 128), (4, 16, 4096, 128)).reason
    'compute capability 8.9 is not 9.0, which is Hopper'

    Args:
        capability: the GPU's compute capability, as :func:`kernelbook.runtime.capability` has it.
        q_dtype: of q and k.
        v_dtype: of v.
        q_shape: (batch, heads, seqlen_q, head_dim), no size of which is 0.
        k_shape: (batch, heads of keys, seqlen_k, head_dim), the same.
        is_causal: as in :func:`kernelbook.attention`, and so ``window`` and ``backend``.
        window: (left, right), or None.
        backend: "auto", "triton" or "gluon".

    Raises:
        ValueError: ``backend`` is "gluon", and that kernel cannot run.
    """
    head_dim = q_shape[3]
    why_not = unsupported(capability, q_dtype, v_dtype, head_dim) or _attention_in_gluon()[1]
    return decided(
        backend, why_not, CONFIGS.get(head_dim), partial(choose, head_dim),
        q_shape[2], k_shape[2], is_causal, window, unmeasured=("window",),
    )  # fmt: skip


# -- where the Gluon kernel runs


def unsupported(
    capability: tuple[int, int], q_dtype: torch.dtype, v_dtype: torch.dtype, head_dim: int
) -> str | None:
    """Return why the Gluon kernel cannot compute this on such a GPU, or None where it can."""
    for name, dtype in (("q", q_dtype), ("v", v_dtype)):
        if dtype not in DTYPES:
            return f"{name} is {checks.spell(dtype)}, and the kernel multiplies 8 bits by 8 bits"
    return choice.unsupported(capability, torch.bfloat16, head_dim)


@choice.loaded
def _attention_in_gluon() -> Callable:
    from kernelbook.ops.hopper.fp8 import attention_fp8_forward

    return attention_fp8_forward


def attention_in_gluon() -> Callable:
    """Return the host function of the Gluon kernel."""
    return _attention_in_gluon()[0]
