"""Rounding to 8 bits with a descale, in two reads of x and one write.

    descale = max(abs(x)) / max(dtype),   stored = round(x / descale),   x is about stored * descale

The descale has to be known before the first element can be rounded, so two kernels read x:

    amax    each program takes the maximum of a tile and gives it to its descale by an atomic
            maximum, on the bits of the absolute value: as integers these are ordered as the numbers
            are, with infinity and then NaN above all, and the order of the programs does not matter
    round   each program divides a tile and writes it, in either layout. It takes the tiles in the
            opposite order, because the L2 cache still holds what the first kernel read last, and
            would lose it before it came to it in the same order

Without instructions that convert to 8 bits, on a GPU older than compute capability 8.9, PyTorch
computes the same numbers in several passes.

Source of the formats: Micikevicius et al., "FP8 formats for deep learning", arXiv:2209.05433, 2022.
The division by a reciprocal and one correction: Markstein, "Computation of elementary functions on
the IBM RISC System/6000 processor", IBM Journal of Research and Development 34, 1990.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernelbook import runtime
from kernelbook.ops import checks, library
from kernelbook.ops.attention.fp8 import DTYPES
from kernelbook.ops.attention.tiles import ALIGNMENT
from kernelbook.ops.launch import Launch, planned

TILE = 512 if runtime.INTERPRETED else 8192
"""Elements of a tile: 32 for each thread, of which a register holds two before they are widened, so
that all loads of a tile are under way at once and several programs fit on an SM. Both kernels take
55.6 us for 2^25 numbers in bfloat16 on an H200; with half as many 62.0, and with twice 64.2."""

MOST_COLS = 16 if runtime.INTERPRETED else 256
"""Columns of a tile at most."""

LINE = 128
"""Bytes that the GPU's caches move at once: keys of a tile whose result has keys contiguous."""

WARP_ELEMENTS = 1024
"""Elements of a tile for each of its warps."""

INTERPRETED = tl.constexpr(runtime.INTERPRETED)

ROW = ALIGNMENT
"""Elements of which the rows of a result hold a multiple: elements of 8 bits are a byte each."""

TINY_DESCALE, LIFT = tl.constexpr(2.0**-80), tl.constexpr(2.0**64)
"""Below the first, x and descale are multiplied by the second before they are divided, so that what
the division computes on the way is a normal number."""


class Quantized(NamedTuple):
    """A tensor in 8 bits and what turns it into values: value = stored * descale.

    :func:`quantize` returns it, and :func:`attention` takes it in the place of q, k or v. It is a
    pair, so that ``stored, descale = quantize(x)`` works as well.

    Args:
        stored: (batch, heads, seqlen, head_dim), ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        descale: float32, one element, or (batch, heads) for one a head; ``None`` means 1.
    """

    stored: torch.Tensor
    descale: torch.Tensor | None


# -- kernels --------------------------------------------------------------------------------------


@triton.jit
def place_of_tile(number, seqlen, head_dim, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return the (batch, head), the keys and the columns of a tile, and which of them exist."""
    tiles_across = tl.cdiv(head_dim, BLOCK_D)
    tiles = tl.cdiv(seqlen, BLOCK_N) * tiles_across
    tile = number % tiles
    keys = (tile // tiles_across).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
    cols = (tile % tiles_across).to(tl.int64) * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    return (number // tiles).to(tl.int64), keys, cols, (keys < seqlen) & (cols < head_dim)


@triton.jit
def divide(x, descale):
    """Return x / descale in float32, rounded correctly, where x / descale is no overflow.

    With the reciprocal, rounded correctly, x * reciprocal is off by two units in the last place at
    most. What is left of x, which a fused multiply-add computes exactly, corrects it. That takes
    three instructions for an element, where a division takes more than ten. The interpreter has no
    fused multiply-add, and divides.
    """
    if INTERPRETED:
        return x / descale
    else:
        lift = tl.where(descale < TINY_DESCALE, LIFT, 1.0)
        divisor = descale * lift
        reciprocal = tl.div_rn(tl.full((), 1.0, tl.float32), divisor)
        # A finite x by infinity is 0, and infinity by infinity NaN, as both are times 0.
        divisor = tl.where(descale == float("inf"), 0.0, divisor)
        x = x * lift
        quotient = x * reciprocal
        too_much = tl.fma(quotient, divisor, -x)
        # Triton's -x is 0 - x, which loses the sign of a zero: of x / inf here.
        return tl.fma(too_much, reciprocal * -1.0, quotient)


@triton.jit
def amax_kernel(
    x_ptr,  # (batch, heads, seqlen, head_dim)
    amax_ptr,  # bits of the largest absolute value, int32, (batch * heads) or 1; 0 at first
    stride_xb,
    stride_xh,
    stride_xn,
    stride_xd,
    heads,
    seqlen,
    head_dim,
    PER_HEAD: tl.constexpr,  # whether each head has a descale
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    # -- load: a tile
    batch_head, keys, cols, exist = place_of_tile(
        tl.program_id(0), seqlen, head_dim, BLOCK_N, BLOCK_D
    )
    x_ptrs = x_ptr + batch_head // heads * stride_xb + batch_head % heads * stride_xh
    x = tl.load(x_ptrs + keys * stride_xn + cols * stride_xd, mask=exist, other=0.0)

    # -- reduce: without the sign, the bits of float32 are integers in the order of the numbers
    bits = x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    largest = tl.max(tl.max(bits, axis=1), axis=0)
    tl.atomic_max(amax_ptr + (batch_head if PER_HEAD else 0), largest, sem="relaxed")


@triton.jit
def round_kernel(
    x_ptr,  # (batch, heads, seqlen, head_dim)
    y_ptr,  # what is stored, of the shape of x; heads lie one after the other, and rows are padded
    amax_ptr,  # bits of the largest absolute value, int32, (batch * heads) or 1
    descale_ptr,  # output, float32, of the shape of amax
    stride_xb,
    stride_xh,
    stride_xn,
    stride_xd,
    stride_yh,
    stride_yn,  # one of these two is 1
    stride_yd,
    heads,
    seqlen,
    head_dim,
    LARGEST: tl.constexpr,  # number of the dtype of y
    PER_HEAD: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    # -- load: a tile, the last first, because L2 holds what was read last
    number = tl.num_programs(0) - 1 - tl.program_id(0)
    batch_head, keys, cols, exist = place_of_tile(number, seqlen, head_dim, BLOCK_N, BLOCK_D)
    x_ptrs = x_ptr + batch_head // heads * stride_xb + batch_head % heads * stride_xh
    x_ptrs += keys * stride_xn + cols * stride_xd
    x = tl.load(x_ptrs, mask=exist, other=0.0, eviction_policy="evict_first").to(tl.float32)

    # -- scale: a descale of 1 where all is zero
    shared = batch_head if PER_HEAD else 0
    amax = tl.load(amax_ptr + shared).to(tl.float32, bitcast=True)
    descale = tl.div_rn(amax, tl.full((), LARGEST, tl.float32))
    descale = tl.where(descale == 0.0, 1.0, descale)
    tl.store(descale_ptr + shared, descale)  # the same number by every program that shares it

    # -- round: a quotient is above the largest number by a rounding error at most
    y = tl.clamp(divide(x, descale), -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    y_ptrs = y_ptr + batch_head * stride_yh + keys * stride_yn + cols * stride_yd
    # -- write: rows end with their padding, because a mask may cut a store of 16 bytes nowhere else
    if stride_yn == 1:
        stored = (keys < tl.cdiv(seqlen, ROW) * ROW) & (cols < head_dim)
    else:
        stored = (keys < seqlen) & (cols < tl.cdiv(head_dim, ROW) * ROW)
    tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=stored)


# -- launches -------------------------------------------------------------------------------------


@planned
def _launches(
    shape: torch.Size,
    strides: tuple[int, ...],
    y_strides: tuple[int, ...],
    dtype: torch.dtype,
    per_head: bool,
) -> tuple[Launch, Launch]:
    """Return the launches of both kernels."""
    batch, heads, seqlen, head_dim = shape
    cols = min(runtime.next_power_of_2(head_dim), MOST_COLS)
    if y_strides[2] == 1:  # keys are contiguous: a whole line of them
        cols = min(cols, TILE // LINE)
    rows = min(runtime.next_power_of_2(seqlen), TILE // cols)
    grid = (batch * heads * runtime.cdiv(seqlen, rows) * runtime.cdiv(head_dim, cols),)
    options = {"PER_HEAD": per_head, "BLOCK_N": rows, "BLOCK_D": cols}
    options["num_warps"] = max(1, min(8, rows * cols // WARP_ELEMENTS))
    sizes = heads, seqlen, head_dim
    largest = torch.finfo(dtype).max
    return (
        Launch(amax_kernel, grid, *strides, *sizes, **options),
        Launch(round_kernel, grid, *strides, *y_strides[1:], *sizes, LARGEST=largest, **options),
    )


def _by_kernels(
    x: torch.Tensor, stored: torch.Tensor, descale: torch.Tensor, dtype: torch.dtype
) -> None:
    """Write stored and descale of a tensor that is not empty."""
    # I/O: read x twice + write stored
    amax = torch.zeros(descale.shape, dtype=torch.int32, device=x.device)
    find, round_ = _launches(x.shape, x.stride(), stored.stride(), dtype, descale.ndim > 0)
    find(x, amax)
    round_(x, stored, amax, descale)


def _by_pytorch(
    x: torch.Tensor, stored: torch.Tensor, descale: torch.Tensor, dtype: torch.dtype
) -> None:
    """Write the same numbers without a kernel."""
    x = x.float()
    largest = torch.finfo(dtype).max
    amax = x.abs().amax((2, 3) if descale.ndim else (0, 1, 2, 3), keepdim=True)
    # PyTorch divides by a number as a product with its reciprocal, and by a tensor exactly.
    found = amax / torch.full_like(amax, largest)
    found = found.masked_fill(found == 0, 1.0)
    stored.copy_((x / found).clamp_(-largest, largest))
    descale.copy_(found.view(descale.shape))


# -- what PyTorch sees ----------------------------------------------------------------------------


def _quantized_like(x, dtype, per_head, seqlen_contiguous):
    """Return (stored, descale) without their numbers."""
    inner = x.mT if seqlen_contiguous else x
    padded = runtime.cdiv(inner.shape[-1], ROW.value) * ROW.value
    stored = torch.empty((*inner.shape[:-1], padded), dtype=dtype, device=x.device)
    stored = stored[..., : inner.shape[-1]]
    descale = torch.empty(x.shape[:2] if per_head else (), dtype=torch.float32, device=x.device)
    return stored.mT if seqlen_contiguous else stored, descale


def _quantize(
    x: torch.Tensor, dtype: torch.dtype, per_head: bool, seqlen_contiguous: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (stored, descale)."""
    stored, descale = _quantized_like(x, dtype, per_head, seqlen_contiguous)
    if not x.numel():
        return stored, descale.fill_(1.0)
    if not runtime.INTERPRETED and runtime.capability(x.device) < (8, 9):
        _by_pytorch(x, stored, descale, dtype)
        return stored, descale
    with runtime.launching_on(x):
        if not runtime.INTERPRETED:
            _by_kernels(runtime.readable(x), stored, descale, dtype)
        else:  # whose 8-bit numbers are not PyTorch's: kernels write float32, PyTorch rounds
            wide, _ = _quantized_like(x, torch.float32, per_head, seqlen_contiguous)
            _by_kernels(runtime.readable(x), wide, descale, dtype)
            stored.copy_(wide)
    return stored, descale


def _batch_quantize(info, in_dims, x, dtype, per_head, seqlen_contiguous):
    """Heads know nothing of each other, so that more calls are a larger batch of them."""
    x = library.batched(info, in_dims[0], x)
    if per_head:
        results = _QUANTIZE.op(x.flatten(0, 1), dtype, per_head, seqlen_contiguous)
        return tuple(y.unflatten(0, x.shape[:2]) for y in results), (0, 0)
    calls = (_QUANTIZE.op(call, dtype, per_head, seqlen_contiguous) for call in x.unbind())
    stored, descale = zip(*calls, strict=True)
    return (torch.stack(stored), torch.stack(descale)), (0, 0)


_QUANTIZE = library.Operator(
    "quantize",
    _quantize,
    fake=_quantized_like,
    batch=_batch_quantize,
    **library.no_gradient("what quantize returns has no gradient."),
)


def quantize(
    x: torch.Tensor,
    dtype: torch.dtype = torch.float8_e4m3fn,
    *,
    per: str = "head",
    contiguous: str = "head_dim",
) -> Quantized:
    """Round a tensor to 8 bits, so that x is about stored * descale.

    descale = max(abs(x)) / max(dtype), over a head or over the tensor: the largest element becomes
    the largest number of ``dtype``. Nothing is rounded to infinity or NaN. A NaN or an infinity
    makes all that shares its descale NaN; where all is zero, descale is 1.

    It reads x twice, where it lies, and writes the result once. On a GPU below compute capability
    8.9, PyTorch computes it, and needs memory for x in float32.

    Args:
        x: (batch, heads, seqlen, head_dim), float32, float16 or bfloat16, of any stride.
        dtype: ``torch.float8_e4m3fn``, 3 bits after the leading one and up to 448, or
            ``torch.float8_e5m2``, 2 bits and up to 57344.
        per: what shares a descale: "head", each (batch, head) for itself, or "tensor", all.
        contiguous: the dimension whose elements are neighbours in memory, "head_dim" or "seqlen".
            :func:`attention` wants "head_dim" of q and k and "seqlen" of v. Rows are padded to
            multiples of 16 bytes.

    Returns:
        :class:`Quantized`, a pair of stored, which has the shape of ``x``, and descale, float32,
        (batch, heads), or () for "tensor". Neither is differentiable. ``attention`` takes the pair
        in the place of q, k or v.

    Raises:
        TypeError: ``x`` is not a floating-point tensor, or ``dtype`` is not one of the two.
        ValueError: ``x`` does not have four dimensions or is not where kernels run, or another
            choice is not one of the two.

    Source: Micikevicius et al., FP8 formats for deep learning, 2022, arXiv:2209.05433.
    """
    checks.tensor("x", x)
    if dtype not in DTYPES:
        raise TypeError(f"dtype must be {checks.either(DTYPES)} of torch, got {dtype}.")
    if x.ndim != 4:
        raise ValueError(
            f"x must be (batch, heads, seqlen, head_dim), got shape {tuple(x.shape)}: add the "
            "dimensions that are missing by unsqueeze."
        )
    checks.choice("per", per, ("head", "tensor"))
    checks.choice("contiguous", contiguous, ("head_dim", "seqlen"))
    checks.same_device(x=x)
    return Quantized(*_QUANTIZE(x.detach(), dtype, per == "head", contiguous == "seqlen"))


def parts(name: str, x: object, descale: torch.Tensor | None) -> tuple:
    """Return (stored, descale) of an operand, which may be both in one."""
    if not isinstance(x, Quantized):
        return x, descale
    if descale is not None:
        raise ValueError(
            f"{name} is Quantized and brings its descale, got {name}_descale as well: leave "
            f"{name}_descale out, or pass {name}.stored."
        )
    return x
