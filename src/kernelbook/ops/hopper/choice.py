"""Which kernel computes the forward pass of attention: plain Triton, or Gluon, below it.

Both compute the same. Where the Gluon kernel runs at all, :func:`unsupported` says; where it is the
faster one, ``CHOICES`` does; :func:`forward_choice` says which kernel runs, and why not the other.
Nothing here imports Gluon, so that it costs only those who run it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial

import torch
import triton

from kernelbook import runtime
from kernelbook.ops import checks
from kernelbook.ops.attention import scope, tiles
from kernelbook.ops.launch import planned

BACKENDS = ("auto", "triton", "gluon")
"""What a caller may ask for: what is faster, or one of the two."""


# -- how the Gluon kernel is cut


@dataclass(frozen=True, eq=False)  # two are the same if they are one: that is quickly seen
class Config:
    """How the kernel is cut into tiles and roles."""

    consumers: int
    """Warpgroups that compute, each 64 queries."""
    block_n: int
    """Keys in a tile."""
    stages: int
    """Tiles of keys, and as many of values, on their way or in use at a time."""
    take_turns: bool
    """Whether one consumer issues matmuls while another makes weights, by named barriers."""
    persistent: bool = True
    """Whether each SM has one program, that computes tile after tile, or each tile its own."""
    paired: bool = True
    """Whether a persistent program takes a long tile and a short one in turn, where a mask makes
    tiles differ. Otherwise it takes each tile that is as many tiles after its last as there are
    programs, and some programs get much longer tiles than others."""


REGISTERS = {2: (240, 24), 3: (160, 32)}
"""Registers of a thread of a consumer, and of the loader, by the number of consumers. An SM has
65,536, and a program starts with equal shares for 4 * (consumers + 1) warps."""

CONFIGS = {64: Config(3, 128, 2, True), 128: Config(2, 128, 2, True)}
"""The configuration for each head_dim, where no other was measured to be faster."""

TWO = Config(2, 128, 4, True)
"""For head_dim 64, fewer queries in a tile: of use where a tile of them sees few keys."""

ONE_TILE = replace(CONFIGS[128], take_turns=False, persistent=False)
"""For head_dim 128, programs that compute a tile each."""


# -- which kernel is the fastest

CHOICES = {
    (64, "full"): ((8192, CONFIGS[64]), (math.inf, replace(CONFIGS[64], take_turns=False))),
    (64, "causal"): ((1024, TWO), (math.inf, None)),
    (64, "window"): ((2048, TWO), (math.inf, None)),
    (128, "full"): ((math.inf, CONFIGS[128]),),
    (128, "causal"): ((8192, CONFIGS[128]), (math.inf, ONE_TILE)),
    (128, "window"): ((math.inf, CONFIGS[128]),),
}
"""What was fastest, by head_dim and mask: from the shortest on, up to how many keys that a query
may see, and which configuration, or None for the kernel of ``attention.forward``.

Measured on an H200 in bfloat16, with 16,384 tokens of 2,048 columns in all. The chapter on Hopper
records both kernels at 1,024, 4,096 and 16,384 keys, and that on attention in models a window of
1,024 at head_dim 128. Beside them these decided, in TFLOP/s, plain Triton first: at head_dim 64,
401 and 380 for causal at 2,048 keys, and 287 and 343 for a window of 1,024 among 16,384. The limits
between measured lengths are interpolated."""


VARLEN = {
    (64, "full"): ((math.inf, None),),
    (64, "causal"): ((math.inf, None),),
    (64, "window"): ((math.inf, TWO),),
    (128, "full"): ((math.inf, CONFIGS[128]),),
    (128, "causal"): ((1024, None), (math.inf, CONFIGS[128])),
    (128, "window"): ((math.inf, CONFIGS[128]),),
}
"""The same for packed sequences, up to how many keys that a sequence has in the mean, because the
host knows no more of them. None is the kernel of ``attention.varlen``.

Measured on an H100 in bfloat16, with 32 sequences of 128 to 4,096 tokens and 2,048 columns, plain
Triton first, in ms: at head_dim 64, 3.79 and 3.85 full, 2.15 and 2.28 causal, 0.98 and 0.74 with a
window of 257 keys; at head_dim 128, 3.06 and 2.76 full, 1.66 and 1.53 causal, 0.70 and 0.53 with
that window. The chapter on attention in models records the causal ones at head_dim 128. There, 128
sequences of 512 tokens took 0.40 and 0.41, and 256 of 256 tokens 0.45 and 0.50; with the full mask
Gluon gained at 64 and 256 tokens as well, 1.09 and 0.91, 0.52 and 0.42."""

VARLEN_DEFAULTS = {64: TWO, 128: CONFIGS[128]}
"""The configuration for who asks for Gluon where plain Triton is faster."""


def mask_of(left: int | None, right: int | None) -> str:
    """Return how a mask is called in ``CHOICES``: one bound alone, as a causal mask has, cuts a
    triangle."""
    if scope.uneven(left, right):
        return "causal"
    return "full" if left is None else "window"


def choose(head_dim: int, mask: str, keys: int) -> Config | None:
    """Return the fastest configuration, or None where the kernel of ``attention.forward`` is it."""
    return up_to(keys, CHOICES[head_dim, mask])


def up_to(keys: int, rows: tuple[tuple[float, object], ...]) -> object:
    """Return what the first row says that holds for so many keys."""
    return next(config for most, config in rows if keys <= most)


@dataclass(frozen=True)
class Choice:
    """Which kernel runs, and why not the other."""

    backend: str
    """Which one runs, "triton" or "gluon"."""
    config: object
    """How the Gluon kernel is cut, where it runs."""
    reason: str
    """Why it is this one: what was measured, or what the other cannot do."""


@planned
def forward_choice(
    capability: tuple[int, int],
    dtype: torch.dtype,
    q_shape: tuple[int, ...],
    k_shape: tuple[int, ...],
    is_causal: bool = False,
    window: scope.Window | None = None,
    backend: str = "auto",
) -> Choice:
    """Return which kernel computes a forward pass that is not decoding, and why not the other.

    It looks at no tensor and no device, so that it can be asked about GPUs that are not there:

    >>> forward_choice((8, 0), torch.bfloat16, (4, 16, 4096, 128), (4, 16, 4096, 128)).reason
    'compute capability 8.0 is not 9.0, which is Hopper'

    Args:
        capability: the GPU's compute capability, as :func:`kernelbook.runtime.capability` has it.
        dtype: of q, k and v.
        q_shape: (batch, heads, seqlen_q, head_dim), no size of which is 0.
        k_shape: (batch, heads of keys, seqlen_k, head_dim), the same.
        is_causal: as in :func:`kernelbook.attention`, and so ``window`` and ``backend``.
        window: (left, right), or None.
        backend: "auto", "triton" or "gluon".

    Raises:
        ValueError: ``backend`` is "gluon", and that kernel cannot run.
    """
    head_dim = q_shape[3]
    why_not = unsupported(capability, dtype, head_dim) or _attention_in_gluon()[1]
    return decided(
        backend, why_not, CONFIGS.get(head_dim), partial(choose, head_dim),
        q_shape[2], k_shape[2], is_causal, window,
    )  # fmt: skip


def decided(
    backend: str,
    why_not: str | None,
    default: object,
    choose: Callable[[str, int], object],
    seqlen_q: int,
    seqlen_k: int,
    is_causal: bool,
    window: scope.Window | None,
    unmeasured: tuple[str, ...] = (),
) -> Choice:
    """Return which kernel runs: what the caller asks for, what can run, what was faster.

    ``why_not`` says why the Gluon kernel cannot run, or is None; ``choose`` maps a mask and the
    number of keys that a query may see to the faster configuration, or to None for plain Triton;
    ``default`` is the configuration for who asks for Gluon where that is slower; ``unmeasured`` are
    the masks with which neither was measured.
    """
    if backend == "triton":
        return Choice("triton", None, "backend is 'triton'")
    if why_not:
        if backend == "gluon":
            refuse(why_not)
        return Choice("triton", None, why_not)
    bounds = scope.bounds(is_causal, window, seqlen_q, seqlen_k)
    mask, keys = mask_of(*bounds), min(seqlen_k, scope.most_seen(*bounds))
    config = choose(mask, keys)
    if backend == "gluon":
        return Choice("gluon", config or default, "backend is 'gluon'")
    if mask in unmeasured:
        reason = f"not measured with such a mask: {mask}"
    else:
        reason = f"measured to be faster for {keys:,} keys, {mask}"
    return Choice("gluon" if config else "triton", config, reason)


# -- where the Gluon kernel runs


def unsupported(capability: tuple[int, int], dtype: torch.dtype, head_dim: int) -> str | None:
    """Return why the Gluon kernel cannot compute this on such a GPU, or None where it can."""
    if capability == (0, 0):
        return "kernels run in Triton's interpreter, and the kernel is for Hopper GPUs"
    if torch.version.hip:  # where capabilities mean other GPUs
        return "the GPU is AMD's, and the kernel is for Hopper"
    if capability != (9, 0):
        major, minor = capability
        return f"compute capability {major}.{minor} is not 9.0, which is Hopper"
    if [int(part) for part in triton.__version__.split(".")[:2]] < [3, 6]:
        return f"Triton {triton.__version__} is older than 3.6"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"the dtype is {checks.spell(dtype)}, and not float16 or bfloat16"
    if not any(head_dim == known for known in CONFIGS):
        return f"head_dim is {head_dim}, and not 64 or 128"
    return None


def supported(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str | None:
    """Return why ``hopper.forward.attention_forward`` cannot take these operands as they lie, or
    None where it can."""
    if reason := unsupported(runtime.capability(q.device), q.dtype, q.shape[3]):
        return reason
    for name, x in {"q": q, "k": k, "v": v}.items():
        if x.numel() == 0:
            return f"{name} is empty"
        if not tiles.fits(x):
            return f"the address or a stride of {name} is not a multiple of 16 bytes"
    return None


def refuse(reason: str) -> None:
    """Raise because a caller asked for Gluon where it cannot run."""
    raise ValueError(f"backend must be 'auto' or 'triton' for this call, got 'gluon': {reason}.")


def loaded(load: Callable[[], Callable]) -> Callable[[], tuple[Callable | None, str | None]]:
    """Return what finds the host function that ``load`` imports, once, or why this Triton has not
    what its module imports: (function, None) or (None, why)."""

    @cache
    def find():
        try:
            return load(), None
        except (ImportError, AttributeError) as error:
            return None, f"Triton {triton.__version__} lacks a part of Gluon: {error}"

    return find


@planned
def varlen_choice(
    capability: tuple[int, int],
    dtype: torch.dtype,
    head_dim: int,
    bounds: scope.Window,
    keys: float,
    backend: str = "auto",
    backward: bool = False,
) -> Choice:
    """Return which kernels compute packed sequences, and why not the other.

    As :func:`forward_choice`, and for the backward pass as ``backward_choice``. ``bounds`` are
    those of the longest sequence, and ``keys`` how many a sequence has in the mean.
    """
    from kernelbook.ops.hopper import backward_choice

    if backend == "triton":
        return Choice("triton", None, "backend is 'triton'")
    if why_not := unsupported(capability, dtype, head_dim) or varlen_in_gluon()[1]:
        if backend == "gluon":
            refuse(why_not)
        return Choice("triton", None, why_not)
    mask = mask_of(*bounds)
    table, defaults = VARLEN, VARLEN_DEFAULTS
    if backward:
        table, defaults = backward_choice.VARLEN, backward_choice.CONFIGS
    config = up_to(keys, table[head_dim, mask])
    if backend == "gluon":
        return Choice("gluon", config or defaults[head_dim], "backend is 'gluon'")
    reason = f"measured to be faster for packed sequences of {keys:,.0f} keys in the mean, {mask}"
    return Choice("gluon" if config else "triton", config, reason)


@loaded
def varlen_in_gluon() -> object:
    """Return the module of the kernels for packed sequences."""
    from kernelbook.ops.hopper import varlen

    return varlen


@loaded
def _attention_in_gluon() -> Callable:
    from kernelbook.ops.hopper.forward import attention_forward

    return attention_forward


def attention_in_gluon() -> Callable:
    """Return the host function of the Gluon kernel."""
    return _attention_in_gluon()[0]
