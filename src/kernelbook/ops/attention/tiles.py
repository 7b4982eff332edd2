"""What the kernels share: tiles of tensors in memory, and where each belongs."""

import math

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from kernelbook import runtime
from kernelbook.ops.launch import Launch, planned

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)

PRECISION = tl.constexpr("ieee" if torch.version.hip else "tf32x3")
"""How float32 matrices are multiplied: as three TF32 matmuls on tensor cores, or on AMD, where
Triton has no such mode, without tensor cores."""

LOWEST = tl.constexpr(-3.4028234663852886e38)
"""The lowest number of float32, from which a maximum starts: -inf - LOWEST is still -inf, where
-inf - (-inf) would be NaN for a query that has met nothing but -inf so far."""

ALIGNMENT = tl.constexpr(16)
"""Bytes: what the copy engine asks of a tensor's address and of every stride but the last."""

PACKED_END = tl.constexpr(2**30)
"""The row at which a descriptor of packed sequences ends: see :func:`describe`."""

_ALIGNED = ALIGNMENT.value


@triton.jit
def head_of(x, batch, head, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """One head of what :func:`describe` describes, as :func:`load_tile` takes it, in such tiles.

    It is a descriptor, and where the head lies in it; or the address of the head, and its shape.
    """
    if isinstance(x, tl.core.tensor_descriptor_base):
        return x, batch, head
    else:
        ptr, n_rows, n_columns, step_batch, step_head, step_row = x
        UNIT: tl.constexpr = ALIGNMENT // (ptr.dtype.element_ty.primitive_bitwidth // 8)
        start = tl.cast(batch, tl.int64) * step_batch + tl.cast(head, tl.int64) * step_head
        rows = tl.arange(0, ROWS)[:, None]
        columns = tl.arange(0, COLUMNS)[None, :]
        return ptr + start * UNIT, step_row * UNIT, rows, columns, n_rows, n_columns


@triton.jit
def head_of_sequence(x, head, first_row, length, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """One head of one of the packed sequences that :func:`describe` describes, as a tensor alone.

    Its rows count from 0 to ``length``. Those beyond belong to the next sequence, and read as
    zeros: a masked weight of 0 would not remove a NaN.
    """
    if isinstance(x, tl.core.tensor_descriptor_base):
        return x, first_row + length, head, PACKED_END - length
    else:
        ptr, stride, rows, columns, _, n_columns = head_of(x, 0, head, ROWS, COLUMNS)
        ptr += tl.cast(first_row, tl.int64) * stride
        return ptr, stride, rows, columns, length, n_columns


@triton.jit
def inside(of_head, row, column):
    """Addresses of a tile, and which of them are there: for a head without a descriptor."""
    ptr, stride, rows, columns, n_rows, n_columns = of_head
    there = (rows < n_rows - row) & (columns < n_columns - column)
    return ptr + (tl.cast(row, tl.int64) * stride + column) + (rows * stride + columns), there


@triton.jit
def coordinates(of_head, row, column):
    """Where a tile lies, for a head with a descriptor: of a tensor, or of packed sequences."""
    if len(of_head) == 3:
        return [of_head[1], of_head[2], row, column]
    else:
        _, end, head, start = of_head
        return [PACKED_END, end, head, start + row, column]


@triton.jit
def load_tile(of_head, row, column=0):
    """Read rows of one head as a matrix; rows and columns beyond the tensor read as zeros."""
    if isinstance(of_head[0], tl.core.tensor_descriptor_base):
        tile = of_head[0].load(coordinates(of_head, row, column))
        return tl.reshape(tile, (tile.shape[-2], tile.shape[-1]))
    else:
        ptrs, there = inside(of_head, row, column)
        return tl.load(ptrs, mask=there, other=0.0)


@triton.jit
def store_tile(of_head, row, tile):
    """Write rows of one head, in its dtype; what lies beyond the tensor is left out."""
    if isinstance(of_head[0], tl.core.tensor_descriptor_base):
        desc = of_head[0]
        desc.store(coordinates(of_head, row, 0), tl.reshape(tile.to(desc.dtype), desc.block_shape))
    else:
        ptrs, there = inside(of_head, row, 0)
        tl.store(ptrs, tile, mask=there)


@triton.jit
def place(n_tiles, n_heads, heads_at_once):
    """Return (tile, head) of this program. Tiles ascend, and alternate between heads."""
    first_head = tl.program_id(0) // (n_tiles * heads_at_once) * heads_at_once
    turn = tl.program_id(0) % (n_tiles * heads_at_once)
    taking_turns = tl.minimum(n_heads - first_head, heads_at_once)
    return turn // taking_turns, first_head + turn % taking_turns


def head_block(head_dim: int) -> int:
    """Return the columns of a tile: a power of two, as blocks must be, that holds head_dim."""
    return runtime.next_power_of_2(head_dim)


def fits(x: torch.Tensor) -> bool:
    """Whether a descriptor can be made of x as it lies in memory."""
    return x.data_ptr() % _ALIGNED == 0 and _strides_fit(x.shape, x.stride(), x.itemsize)


@planned
def _strides_fit(shape: torch.Size, strides: tuple[int, ...], itemsize: int) -> bool:
    pairs = zip(strides[:-1], shape, strict=False)
    matter = (stride for stride, size in pairs if size > 1)
    return strides[-1] == 1 and all(stride * itemsize % _ALIGNED == 0 for stride in matter)


def fit(x: torch.Tensor) -> torch.Tensor:
    """Return x, or where no descriptor can be made of it a copy of which one can."""
    if fits(x):
        return x
    return empty_like(x).copy_(x)


def prepare(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Return tensors as kernels can read them, copied where they do not lie as descriptors ask."""
    if runtime.INTERPRETED:
        return [fit(runtime.readable(x)) for x in tensors]
    addresses, negated, lie = 0, False, []
    for x in tensors:
        addresses |= x.data_ptr()
        negated |= x.is_neg()
        lie += x.dtype, x.shape, x.stride()
    if addresses % _ALIGNED == 0 and not negated and _all_strides_fit(*lie):
        return tensors
    return [fit(runtime.readable(x)) for x in tensors]


@planned
def _all_strides_fit(*lie) -> bool:
    each = zip(lie[::3], lie[1::3], lie[2::3], strict=True)
    return all(_strides_fit(shape, strides, dtype.itemsize) for dtype, shape, strides in each)


def aligned(x: torch.Tensor | None) -> torch.Tensor | None:
    """Return statistics, or their gradient, contiguous and at an aligned address."""
    if x is None:
        return None
    x = x.contiguous()
    return x if x.data_ptr() % _ALIGNED == 0 else x.clone()


def empty_like(x: torch.Tensor) -> torch.Tensor:
    """Allocate a tensor like x, and of its layout, of which a descriptor can be made.

    Dimensions follow each other in memory as those of x do, without gaps but for the padding that a
    descriptor may ask for; where the last of x is not the innermost, the result is contiguous.
    """
    if x.shape[-1] * x.itemsize % _ALIGNED:
        order = sorted(range(x.ndim - 1), key=lambda i: -x.stride(i))
        ordered = empty_fit(x.permute(*order, x.ndim - 1))
        return ordered.permute(*(order.index(i) for i in range(x.ndim - 1)), x.ndim - 1)
    return empty_dense_like(x)


def empty_dense_like(x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Allocate a tensor like x, and of its layout, without any gap: see :func:`empty_like`."""
    if x.stride(-1) == 1:
        like = torch.empty_like(x, dtype=dtype)
        if like.stride(-1) == 1:
            return like
    return torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device)


def empty_fit(x: torch.Tensor) -> torch.Tensor:
    """Allocate a tensor like x: contiguous, but for the padding that a descriptor may ask for."""
    unit = ALIGNMENT.value // x.itemsize
    row = runtime.cdiv(x.shape[-1], unit) * unit
    shape = (*x.shape[:-1], row)
    return torch.empty(shape, dtype=x.dtype, device=x.device)[..., : x.shape[-1]]


def describe(
    x: torch.Tensor,
    rows: int,
    columns: int | None = None,
    described: bool = True,
    packed: bool = False,
) -> TensorDescriptor | tuple:
    """Describe (batch, heads, seqlen, head_dim) so that a tile is ``rows`` rows of one head.

    A tile has ``columns`` columns, by default a power of two that holds head_dim.

    A matmul that reads shared memory takes its tiles from a descriptor, by way of a copy engine.
    Where matmuls read registers, or there is no such engine, ``described`` is false, and the
    kernel gets address, shape and strides instead: Triton would make addresses of a descriptor, and
    not know that the last dimension is contiguous.

    The descriptor keeps the four dimensions apart. Flattened to (batch * heads * seqlen, head_dim)
    it would be simpler, and the last tile of a head would read the first rows of the next.

    With ``packed``, x is (1, heads, total, head_dim), and its rows are sequences of lengths that
    the host does not know. The copy engine compares each coordinate with the size of its dimension,
    and knows no other end. So the rows get a size of their own, E = ``PACKED_END``, row i of a
    sequence the coordinate E - length + i, and rows from ``length`` on lie outside. Two dimensions
    correct the address, which is first + i rows away:

        (first + length) * step + (E - length + i) * step + E * (2**34 - step)

    because E * 2**34 is 2**64, where addresses start again from 0.
    """
    rest = all_but_the_address(x.dtype, x.shape, x.stride(), rows, columns, described, packed)
    return describe_by(rest, x)


def describe_by(
    rest: dict[str, object] | tuple | None, x: torch.Tensor
) -> TensorDescriptor | tuple | torch.Tensor:
    """Describe x, of which all but the address was said by :func:`all_but_the_address`, or return
    it where nothing was said."""
    if rest is None:
        return x
    return (x, *rest) if type(rest) is tuple else descriptor(x, rest, TensorDescriptor)


@planned
def all_but_the_address(
    dtype: torch.dtype,
    shape: torch.Size,
    strides: tuple[int, ...],
    rows: int,
    columns: int | None = None,
    described: bool = True,
    packed: bool = False,
) -> dict[str, object] | tuple:
    """Return what :func:`describe` says of every tensor of this kind, wherever it lies."""
    if described:
        block = 1, 1, rows, columns or head_block(shape[3])
        return rest_of_tiles(dtype, shape, strides, (1, *block) if packed else block, packed)
    unit = _ALIGNED // dtype.itemsize
    strides = _aligned_strides(shape, strides, unit)
    return shape[2], tl.constexpr(shape[3]), *(stride // unit for stride in strides)


def descriptor(x: torch.Tensor, rest: dict[str, object], kind: type) -> object:
    """Return a descriptor of x of this kind, of which a plan remembers all but the address."""
    made = object.__new__(kind)
    made.__dict__ = {**rest, "base": x}
    return made


def describe_tiles(
    x: torch.Tensor, block: tuple[int, ...], packed: bool = False
) -> TensorDescriptor:
    """Describe a tensor in tiles of this shape, whose address is aligned.

    All but the address is the same in each call, and was checked in the first.
    """
    rest = rest_of_tiles(x.dtype, x.shape, x.stride(), block, packed)
    return descriptor(x, rest, TensorDescriptor)


@planned
def rest_of_tiles(
    dtype: torch.dtype,
    shape: torch.Size,
    strides: tuple[int, ...],
    block: tuple[int, ...],
    packed: bool = False,
) -> dict[str, object]:
    """Return what :func:`describe_tiles` says of every tensor of this kind, wherever it lies."""
    strides = _aligned_strides(shape, strides, _ALIGNED // dtype.itemsize)
    if packed:
        end, (_, heads, total, columns), (_, step_head, step) = PACKED_END.value, shape, strides
        shape = end + 1, total + 1, heads, end, columns
        strides = 2**34 - step, step, step_head, step
    at_zero = torch.empty(0, dtype=dtype)
    return vars(TensorDescriptor(at_zero, list(shape), [*strides, 1], list(block)))


def steps_of(
    shape: torch.Size, strides: tuple[int, ...], itemsize: int
) -> tuple[tuple[int, ...], int]:
    """Return the strides but the last as multiples of a unit, and the unit, up to 16 bytes: by it
    the compiler knows how far addresses are aligned, whatever head_dim is."""
    strides = [stride if size > 1 else 0 for stride, size in zip(strides[:-1], shape, strict=False)]
    unit = math.gcd(_ALIGNED // itemsize, *strides)
    return tuple(stride // unit for stride in strides), unit


def _aligned_strides(shape: torch.Size, strides: tuple[int, ...], unit: int) -> list[int]:
    """Return all strides but the last; where a size is 1 any will do, if it is aligned."""
    pairs = zip(strides[:-1], shape, strict=False)
    return [stride if size > 1 else unit for stride, size in pairs]


class KnownLaunch(Launch):
    """A launch of whose tensors a plan knows all but the addresses, and that these are aligned.

    So it need not look at them: the plan knows the device, each dtype, shape and stride, and which
    of them are None.
    """

    run = None

    def __call__(self, *tensors: object) -> None:
        if self.run is not None:
            self.run(*tensors, *self.rest)
            return
        super().__call__(*tensors)
        self.run = next(iter(self.compiled.values()), None)
