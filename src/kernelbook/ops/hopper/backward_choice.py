"""Which kernels compute the backward pass of attention: plain Triton, or Gluon, below it.

Plain Triton takes two sweeps, and the kernel in Gluon one.

As :mod:`kernelbook.ops.hopper.choice` is for the forward pass. Nothing here imports Gluon.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from kernelbook.ops.attention import scope, tiles
from kernelbook.ops.hopper import choice
from kernelbook.ops.hopper.choice import Choice, decided, unsupported
from kernelbook.ops.launch import planned

# -- how the Gluon kernel is cut


@dataclass(frozen=True, eq=False)  # two are the same if they are one: that is quickly seen
class Config:
    """How the kernel is cut."""

    block_m: int
    """Queries in a tile: 64, or with head_dim 64 also 128."""
    q_stages: int
    """Tiles of queries on their way or in use at a time."""
    do_stages: int
    """Tiles of gradients of out, likewise."""
    ordered: bool = True
    """Whether parts of dq are added in a fixed order even if nobody asks for the same bits. To wait
    for a turn costs time, but the first part is then written, and the sums need no zeros."""
    heads: int = 1
    """In a fixed order under a causal mask, between how many times as many heads tiles alternate as
    fill the GPU. With more, programs of one head start further apart, and wait less for each
    other's turn: at head_dim 128 and 16,384 keys 518 TFLOP/s with 1 and 532 with 4."""
    late: bool = False
    """Whether lse and delta are read only when the matmul is waited for that they are subtracted
    from. To read them before hides the time, and holds registers, which lack at head_dim 64: late
    ones gave 484 TFLOP/s there and early ones 442, full at 16,384 keys. At 128 it is the same."""


CONFIGS = {64: Config(128, 2, 2, heads=8, late=True), 128: Config(64, 2, 2, heads=4)}
"""The configuration for each head_dim, where no other was measured to be faster."""

FREE = {head_dim: replace(config, ordered=False) for head_dim, config in CONFIGS.items()}
"""The same, but parts of dq are added as they come, if the caller allows it."""

SHORT = replace(CONFIGS[128], heads=2)
"""For few keys under a causal mask: a head has fewer tiles, so that more heads alternate anyway."""


# -- which kernel is the fastest

CHOICES = {
    (64, "full", True): ((math.inf, CONFIGS[64]),),
    (64, "full", False): ((8192, CONFIGS[64]), (math.inf, FREE[64])),
    (64, "causal", True): ((8192, None), (math.inf, CONFIGS[64])),
    (64, "causal", False): ((2048, None), (math.inf, FREE[64])),
    (64, "window", True): ((math.inf, CONFIGS[64]),),
    (64, "window", False): ((math.inf, CONFIGS[64]),),
    (128, "full", True): ((math.inf, CONFIGS[128]),),
    (128, "full", False): ((8192, CONFIGS[128]), (math.inf, FREE[128])),
    (128, "causal", True): ((2048, SHORT), (math.inf, CONFIGS[128])),
    (128, "causal", False): ((2048, SHORT), (math.inf, CONFIGS[128])),
    (128, "window", True): ((math.inf, CONFIGS[128]),),
    (128, "window", False): ((math.inf, CONFIGS[128]),),
}
"""What was fastest, by head_dim, mask and whether gradients must be the same bits in every run:
from the shortest on, up to how many keys that a query may see, and which configuration, or None for
the kernels of ``attention.backward``.

Measured on an H200 in bfloat16, with 16,384 tokens of 2,048 columns in all, at 1,024, 4,096 and
16,384 keys. The chapter on one sweep backward records both kernels there, in a fixed order and as
parts come, and the one on attention in models records windows at head_dim 128. What differs by less
than its spread stays plain Triton, or in a fixed order. The limits between measured lengths are
interpolated."""


VARLEN = {
    (64, "full"): ((math.inf, CONFIGS[64]),),
    (64, "causal"): ((math.inf, CONFIGS[64]),),
    (64, "window"): ((math.inf, None),),
    (128, "full"): ((math.inf, CONFIGS[128]),),
    (128, "causal"): ((math.inf, CONFIGS[128]),),
    (128, "window"): ((math.inf, CONFIGS[128]),),
}
"""The same for packed sequences, as ``choice.VARLEN`` has it; None is for the kernels of
``attention.varlen_backward``. Parts of dq are always added in a fixed order.

Measured as those, plain Triton first, in ms: at head_dim 64, 11.8 and 10.1 full, 6.95
and 6.49 causal, 2.45 and 2.51 with the window; at head_dim 128, 10.6 and 8.24, 5.70 and 4.83, 2.09
and 1.87. The chapter on attention in models records head_dim 128 with a causal mask."""


def choose(head_dim: int, mask: str, deterministic: bool, keys: int) -> Config | None:
    """Return the fastest configuration, or None where that is ``attention.backward``."""
    return choice.up_to(keys, CHOICES[head_dim, mask, deterministic])


@planned
def backward_choice(
    capability: tuple[int, int],
    dtype: torch.dtype,
    q_shape: tuple[int, ...],
    k_shape: tuple[int, ...],
    is_causal: bool = False,
    window: scope.Window | None = None,
    deterministic: bool = True,
    backend: str = "auto",
) -> Choice:
    """Return which kernels compute all three gradients, and why not the other.

    It looks at no tensor and no device, so that it can be asked about GPUs that are not there:

    >>> backward_choice((8, 0), torch.bfloat16, (4, 16, 4096, 128), (4, 16, 4096, 128)).reason
    'compute capability 8.0 is not 9.0, which is Hopper'

    Args:
        capability: the GPU's compute capability, as :func:`kernelbook.runtime.capability` has it.
        dtype: of q, k and v.
        q_shape: (batch, heads, seqlen_q, head_dim), no size of which is 0.
        k_shape: (batch, heads of keys, seqlen_k, head_dim), the same.
        is_causal: as in :func:`kernelbook.attention`, and so ``window``, ``deterministic`` and
            ``backend``.
        window: (left, right), or None.
        deterministic: whether gradients must be the same bits in every run.
        backend: "auto", "triton" or "gluon".

    Raises:
        ValueError: ``backend`` is "gluon", and that kernel cannot run.
    """
    head_dim = q_shape[3]
    why_not = unsupported(capability, dtype, head_dim) or _attention_in_gluon()[1]
    return decided(
        backend, why_not, CONFIGS.get(head_dim),
        lambda mask, keys: choose(head_dim, mask, deterministic, keys),
        q_shape[2], k_shape[2], is_causal, window,
    )  # fmt: skip


# -- where the Gluon kernel runs


def supported(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, do: torch.Tensor) -> str | None:
    """Return why ``hopper.backward.attention_backward`` cannot take these operands as they lie, or
    None where it can."""
    reason = choice.supported(q, k, v)
    if reason is None and not tiles.fits(do):
        return "the address or a stride of do is not a multiple of 16 bytes"
    return reason


@choice.loaded
def _attention_in_gluon() -> Callable:
    from kernelbook.ops.hopper.backward import attention_backward

    return attention_backward


def attention_in_gluon() -> Callable:
    """Return the host function of the Gluon kernel."""
    return _attention_in_gluon()[0]
