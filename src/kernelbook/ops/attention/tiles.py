"""What the kernels share: tiles of tensors in memory, where each belongs, and who sees what."""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)

LOWEST = tl.constexpr(-3.4028234663852886e38)
"""The lowest number of float32, from which a maximum starts: -inf - LOWEST is still -inf, where
-inf - (-inf) would be NaN for a query that has met nothing but -inf so far."""

ALIGNMENT = 16
"""Bytes: what the copy engine asks of a tensor's address and of every stride but the last."""


@triton.jit
def load_tile(desc, batch, head, start):
    """Read rows of one head as a matrix; rows and columns beyond the tensor read as zeros."""
    tile = desc.load([batch, head, start, 0])
    return tl.reshape(tile, (tile.shape[2], tile.shape[3]))


@triton.jit
def place(n_tiles, n_heads, heads_at_once):
    """Return (tile, head) of this program. Tiles ascend, and some heads at a time take turns."""
    first_head = tl.program_id(0) // (n_tiles * heads_at_once) * heads_at_once
    turn = tl.program_id(0) % (n_tiles * heads_at_once)
    taking_turns = tl.minimum(n_heads - first_head, heads_at_once)
    return turn // taking_turns, first_head + turn % taking_turns


@triton.jit
def visible(start_m, seqlen_q, seqlen_k, IS_CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return how many keys each query of a tile sees, all of them see, and some of them."""
    n_visible = tl.full((BLOCK_M,), 0, tl.int32) + seqlen_k
    seen_by_all, seen_by_some = seqlen_k, seqlen_k
    if IS_CAUSAL:
        shift = seqlen_k - seqlen_q
        n_visible = tl.minimum(start_m + tl.arange(0, BLOCK_M) + 1 + shift, seqlen_k)
        seen_by_all = tl.maximum(tl.minimum(start_m + 1 + shift, seqlen_k), 0)
        seen_by_some = tl.maximum(tl.minimum(start_m + BLOCK_M + shift, seqlen_k), 0)
    return n_visible, seen_by_all, seen_by_some


def head_block(head_dim: int) -> int:
    """Return the columns of a tile: a power of two, as blocks must be, that holds head_dim."""
    return triton.next_power_of_2(head_dim)


def fits(x: torch.Tensor) -> bool:
    """Whether a descriptor can be made of x as it lies in memory."""
    strides = [stride for stride, size in zip(x.stride()[:-1], x.shape, strict=False) if size > 1]
    return (
        x.stride(-1) == 1
        and x.data_ptr() % ALIGNMENT == 0
        and all(stride * x.itemsize % ALIGNMENT == 0 for stride in strides)
    )


def fit(x: torch.Tensor) -> torch.Tensor:
    """Return x, or where no descriptor can be made of it a copy of which one can."""
    if fits(x):
        return x
    return empty_fit(x).copy_(x)


def empty_fit(x: torch.Tensor) -> torch.Tensor:
    """Allocate a tensor like x: contiguous, but for the padding that a descriptor may ask for."""
    row = triton.cdiv(x.shape[-1] * x.itemsize, ALIGNMENT) * ALIGNMENT // x.itemsize
    shape = (*x.shape[:-1], row)
    return torch.empty(shape, dtype=x.dtype, device=x.device)[..., : x.shape[-1]]


def describe(x: torch.Tensor, rows: int, columns: int | None = None) -> TensorDescriptor:
    """Describe (batch, heads, seqlen, head_dim) so that a tile is ``rows`` rows of one head.

    A tile has ``columns`` columns, by default a power of two that holds head_dim.

    The descriptor keeps the four dimensions apart. Flattened to (batch * heads * seqlen, head_dim)
    it would be simpler, and the last tile of a head would read the first rows of the next.
    """
    strides = [
        stride if size > 1 else ALIGNMENT // x.itemsize  # any will do, if it is aligned
        for stride, size in zip(x.stride()[:-1], x.shape, strict=False)
    ]
    columns = columns or head_block(x.shape[-1])
    return TensorDescriptor(x, list(x.shape), [*strides, 1], [1, 1, rows, columns])
