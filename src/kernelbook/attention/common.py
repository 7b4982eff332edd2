"""What the kernels share: tensor descriptors, who sees what, configurations, the device."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from kernelbook import runtime

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)

ALIGNMENT = 16
"""Bytes: what the copy engine asks of a tensor's address and of every stride but the last."""


@dataclass(frozen=True)
class Config:
    """How a kernel is cut into tiles and compiled."""

    block_m: int
    """Queries in a tile."""
    block_n: int
    """Keys in a tile."""
    num_warps: int
    num_stages: int
    """Tiles on their way or in use at a time."""
    maxnreg: int | None = None
    """The most registers that a thread may have, so that so many programs run at once."""
    described_rows: bool = True
    """Whether backward reads statistics by descriptors, or by pointers."""


@triton.jit
def _load_tile(desc, batch, head, start):
    """Read rows of one head as a matrix; rows and columns beyond the tensor read as zeros."""
    tile = desc.load([batch, head, start, 0])
    return tl.reshape(tile, (tile.shape[2], tile.shape[3]))


@triton.jit
def _place(n_tiles, n_heads, heads_at_once):
    """Return (tile, head) of this program. Tiles ascend, and some heads at a time take turns."""
    first_head = tl.program_id(0) // (n_tiles * heads_at_once) * heads_at_once
    turn = tl.program_id(0) % (n_tiles * heads_at_once)
    taking_turns = tl.minimum(n_heads - first_head, heads_at_once)
    return turn // taking_turns, first_head + turn % taking_turns


@triton.jit
def _visible(start_m, seqlen_q, seqlen_k, IS_CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return how many keys each query of a tile sees, all of them see, and some of them."""
    n_visible = tl.full((BLOCK_M,), 0, tl.int32) + seqlen_k
    seen_by_all, seen_by_some = seqlen_k, seqlen_k
    if IS_CAUSAL:
        shift = seqlen_k - seqlen_q
        n_visible = tl.minimum(start_m + tl.arange(0, BLOCK_M) + 1 + shift, seqlen_k)
        seen_by_all = tl.maximum(tl.minimum(start_m + 1 + shift, seqlen_k), 0)
        seen_by_some = tl.maximum(tl.minimum(start_m + BLOCK_M + shift, seqlen_k), 0)
    return n_visible, seen_by_all, seen_by_some


@triton.jit
def _finite(m):
    """Zero in the place of -inf: exp(x - m) of a row that sees nothing is then 0, not NaN."""
    return tl.where(m == float("-inf"), 0.0, m)


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


def _fit(x: torch.Tensor) -> torch.Tensor:
    """Return x, or where no descriptor can be made of it a copy of which one can."""
    if fits(x):
        return x
    row = -(-x.shape[-1] * x.itemsize // ALIGNMENT) * ALIGNMENT // x.itemsize
    copy = torch.empty((*x.shape[:-1], row), dtype=x.dtype, device=x.device)[..., : x.shape[-1]]
    return copy.copy_(x)


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


def shared_memory(device: torch.device) -> int:
    """Return the shared memory, in bytes, that one program may use."""
    if runtime.INTERPRETED:
        return 2**62
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


def l2_cache(device: torch.device) -> int:
    """Return the size of the L2 cache in bytes."""
    if runtime.INTERPRETED:
        return 2**20
    return torch.cuda.get_device_properties(device).L2_cache_size


def capability(device: torch.device) -> int:
    """Return the major number of the device's compute capability: 9 is Hopper."""
    return 0 if runtime.INTERPRETED else torch.cuda.get_device_capability(device)[0]


def largest_that_fits(configs, bytes_of, device: torch.device, what: str) -> Config:
    """Return the first configuration whose shared memory the device has."""
    available = shared_memory(device)
    for config in configs:
        if bytes_of(config) <= available:
            return config
    raise ValueError(
        f"{what} needs {bytes_of(config):,} bytes of shared memory at least, and {device} has "
        f"{available:,}: pass a smaller head_dim or a 16-bit dtype."
    )
