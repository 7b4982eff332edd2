"""What property tests draw: one set of strategies for all operators.

A case is a small frozen dataclass that says in words what it holds. Its numbers come from a seed,
not one by one, so that a case of a million elements is drawn as fast as one of ten, and its repr is
Python that makes the same case again: an ``@example`` is the repr of what once failed.
"""

from dataclasses import dataclass, fields, replace
from math import inf, nan, prod

import torch
from hypothesis import assume
from hypothesis import strategies as st

from kernelbook import runtime
from kernelbook.ops.hopper.choice import unsupported

LARGE = not runtime.INTERPRETED
"""Whether sizes are those of a GPU; the interpreter needs milliseconds for each program."""

DTYPES = ("float32", "float16", "bfloat16")

BLOCK = 4096 if LARGE else 32
"""A part of a split row, as the dispatch of a GPU and the small one of the tests have it."""

LENGTHS = (
    [1, 2, 127, 128, 129, 1000, 1024, 2048, 4096, 4097, 8191, 8192, 8193, 16384, 16386, 32767]
    + [32768, 32770, 50257, 65535, 65536, 65537, 128256, 131072, 131073, 151936, 200000, 262144]
    + [524288, 524289]
    if LARGE
    else [1, 2, 3, 7, 16, 31, 32, 33, 63, 64, 65, 96, 100, 127, 128, 129, 255, 256, 257, 300]
)
"""Lengths of rows: around every boundary of the dispatch, and vocabularies. On a GPU each length
may compile a kernel, so that a short list has more examples in a minute."""

ELEMENTS = 2**24 if LARGE else 2400
"""The most elements of an example."""


class Described:
    """A repr that leaves out what has its default, and that Python reads."""

    def __repr__(self) -> str:
        said = (
            f"{field.name}={getattr(self, field.name)!r}"
            for field in fields(self)
            if getattr(self, field.name) != field.default
        )
        return f"{type(self).__name__}({', '.join(said)})"


def poison(allocate):
    """Fill what torch allocates without a value with NaN, so that an unwritten output shows."""

    def poisoned(*args, **kwargs):
        tensor = allocate(*args, **kwargs)
        if tensor.is_floating_point() and not tensor.requires_grad:
            tensor.fill_(nan)
        return tensor

    return poisoned


# -- numbers, and how they lie in memory


@dataclass(frozen=True, repr=False)
class Numbers(Described):
    """A tensor: normal numbers times ``magnitude`` plus ``shift``, some of them overwritten.

    A mark ``(row, start, stop, number)`` writes a number to a range of one line of the tensor, a
    line being what is normalised together.
    """

    shape: tuple[int, ...]
    dtype: str = "float32"
    layout: str = "contiguous"
    magnitude: float = 1.0
    shift: float = 0.0
    marks: tuple[tuple[int, int, int, float], ...] = ()
    seed: int = 0

    def make(self, n_dims: int = 1, dim: int = -1) -> torch.Tensor:
        """Make the tensor. A line covers the last ``n_dims`` dimensions, or ``dim`` alone."""
        dtype = getattr(torch, self.dtype)
        generator = torch.Generator(runtime.DEVICE).manual_seed(self.seed)
        draw = {"dtype": torch.float64, "device": runtime.DEVICE, "generator": generator}
        largest = torch.finfo(dtype).max
        values = torch.randn(self.shape, **draw).mul_(self.magnitude).add_(self.shift)
        values = values.clamp_(-largest, largest)
        if self.marks and values.numel():
            moved = values.movedim(dim, -1) if values.ndim else values.view(1)
            lines = moved.reshape(-1, prod(moved.shape[-n_dims:]))
            for row, start, stop, number in self.marks:
                lines[row % len(lines), start:stop] = number
            values = lines.view(moved.shape).movedim(-1, dim).reshape(values.shape)
        return LAYOUTS[self.layout](values.to(dtype))


def _between(values: torch.Tensor, dim: int, step: int, start: int, stop: int) -> torch.Tensor:
    """Lie among NaN: every ``step``-th place of ``dim``, after ``start`` and before ``stop`` more.

    An operator that reads beside the tensor meets them.
    """
    shape = list(values.shape)
    shape[dim] = start + step * shape[dim] + stop
    around = torch.full(shape, nan, dtype=values.dtype, device=values.device)
    place = [slice(None)] * values.ndim
    place[dim] = slice(start, start + step * values.shape[dim], step)
    around[tuple(place)] = values
    return around[tuple(place)]


def _offset(values: torch.Tensor) -> torch.Tensor:
    """Begin one element into the memory, so that no two elements share an aligned word."""
    flat = torch.full((values.numel() + 1,), nan, dtype=values.dtype, device=values.device)
    flat[1:] = values.reshape(-1)
    return flat[1:].view(values.shape)


def _transposed(values: torch.Tensor) -> torch.Tensor:
    order = tuple(reversed(range(values.ndim)))
    return values.permute(order).contiguous().permute(order)


def _negative(values: torch.Tensor) -> torch.Tensor:
    """Leave the negation to whoever reads: PyTorch sets a bit for it, as .conj().imag does."""
    return torch._neg_view(-values)


def _imaginary(values: torch.Tensor) -> torch.Tensor:
    """The same, with real parts between: PyTorch has no complex numbers of 16 bits to rely on."""
    if values.dtype != torch.float32:
        return _negative(values)
    return torch.complex(torch.full_like(values, nan), -values).conj().imag


LAYOUTS = {
    "contiguous": lambda x: x.contiguous(),
    "offset": _offset,
    "transposed": _transposed,
    "sliced": lambda x: _between(x, -1, 1, 1, 2) if x.ndim else x,
    "every second column": lambda x: _between(x, -1, 2, 0, 0) if x.ndim else x,
    "every second row": lambda x: _between(x, 0, 2, 1, 0) if x.ndim else x,
    "expanded rows": lambda x: x[:1].expand(x.shape) if x.ndim > 1 and x.numel() else x,
    "expanded columns": lambda x: x[..., :1].expand(x.shape) if x.ndim and x.numel() else x,
    "negative": _negative,
    "imaginary": _imaginary,
}

MAGNITUDES = (1.0, 1e-6, 1e-3, 30.0, 1e3, 1e6)
SHIFTS = (0.0, 1.0, -1.0, 10.0, -100.0, -200.0, 1000.0, -1000.0)
SEEDS = st.integers(0, 2**16)
SUBSETS = st.just((True, True, True)) | st.tuples(st.booleans(), st.booleans(), st.booleans())


@st.composite
def numbers(
    draw, shape, length, magnitudes=MAGNITUDES, shifts=SHIFTS, marked=(), dtypes=DTYPES, nth=0
):
    """Draw a tensor of a shape, with lines of ``length``, of which some hold a ``marked`` number.

    A shift is absolute, or a multiple of the magnitude. Marks begin and end where a part does, so
    that all of a part may be -inf; a single element anywhere may be NaN. The ``nth`` tensor of a
    case has seeds of its own, also when they are shrunk: what x rounds is then not what dy adds up.
    """
    magnitude = draw(st.sampled_from(magnitudes))
    shift = draw(st.sampled_from(shifts)) * draw(st.sampled_from((1.0, magnitude)))
    marks = ()
    if marked and length and draw(st.integers(0, 2)) == 2:  # a NaN hides what else is wrong
        edges = sorted({*range(0, length, max(BLOCK, -(-length // 8))), length})
        place = st.tuples(st.sampled_from(edges), st.sampled_from(edges)).map(sorted)
        point = st.integers(0, length - 1).map(lambda i: (i, i + 1))
        mark = st.tuples(st.integers(0, 3), st.one_of(place, point), st.sampled_from(marked))
        marks = tuple(
            (row, a, b, n) for row, (a, b), n in draw(st.lists(mark, min_size=1, max_size=3))
        )
    return Numbers(
        shape,
        draw(st.sampled_from(dtypes)),
        draw(st.sampled_from(list(LAYOUTS))),
        magnitude,
        shift,
        marks,
        draw(SEEDS) + nth * 2**17,
    )


@st.composite
def leading(draw, length, max_dims=3):
    """Draw the sizes before a line: none, 0 and 1 among them, and not too many elements in all."""
    many = (1, 2, 3, 5, 300, 4099, 0) if LARGE else (1, 2, 3, 5, 7, 0)
    sizes, room = [], max(1, ELEMENTS // max(1, length))
    for _ in range(draw(st.integers(0, max_dims))):
        size = draw(st.sampled_from([size for size in many if size <= max(1, room)]))
        room //= max(1, size)
        sizes.append(size)
    return tuple(sizes)


# -- one case for each operator

PATHS = {
    "weighted_sum": ("as it is", "small"),
    "softmax": ("as it is", "packed", "split"),
    "layer_norm": ("as it is", "packed", "split", "loop"),
}
"""Ways through the dispatch that small constants open to short rows. On a GPU rows are long enough
as it is."""


def path(operator: str):
    return st.just("as it is") if LARGE else st.sampled_from(PATHS[operator])


@dataclass(frozen=True, repr=False)
class WeightedSum(Described):
    x: Numbers
    weight: Numbers
    path: str = "as it is"
    dy: Numbers | None = None
    """The gradient of y; None stands for normal numbers around 1."""
    needs: tuple[bool, bool] = (True, True)
    """Which of x and weight want a gradient."""


@st.composite
def weighted_sum(draw):
    length = draw(st.sampled_from((0, *LENGTHS)))
    before = draw(leading(length))
    x = draw(numbers((*before, length), length, marked=(-inf, nan, inf)))
    weight = draw(numbers((length,), length, nth=1))
    dy = draw(numbers(before, before[-1] if before else 1, (1.0, 1e-3, 1e3), (1.0, 0.0), nth=2))
    return WeightedSum(x, weight, draw(path("weighted_sum")), dy, draw(SUBSETS)[:2])


@dataclass(frozen=True, repr=False)
class Softmax(Described):
    x: Numbers
    dim: int = -1
    algorithm: str = "auto"
    path: str = "as it is"
    dy: Numbers | None = None
    """The gradient of y; None stands for normal numbers around 1."""


@st.composite
def softmax(draw):
    length = draw(st.sampled_from((0, *LENGTHS)))
    before = draw(leading(length))
    dim = draw(st.integers(0, len(before)))
    shape = (*before[:dim], length, *before[dim:])
    x = draw(numbers(shape, length, marked=(-inf, -inf, -inf, nan, inf)))
    dy = draw(numbers(shape, length, (1.0, 1e-3, 1e3), (1.0, 0.0), dtypes=(x.dtype,), nth=1))
    algorithm = draw(st.sampled_from(("auto", "auto", "three_pass", "online", "online_2d")))
    dim = draw(st.sampled_from((dim, dim - len(shape))))
    return Softmax(x, dim, algorithm, draw(path("softmax")), dy)


@dataclass(frozen=True, repr=False)
class LayerNorm(Described):
    x: Numbers
    n_dims: int = 1
    weight: Numbers | None = None
    bias: Numbers | None = None
    eps: float = 1e-5
    path: str = "as it is"
    dy: Numbers | None = None
    """The gradient of y, and y's dtype; None stands for normal numbers around 1, of x's dtype."""
    needs: tuple[bool, bool, bool] = (True, True, True)
    """Which of x, weight and bias want a gradient."""


@st.composite
def layer_norm(draw):
    length = draw(st.sampled_from(LENGTHS))
    before = draw(leading(length))
    divisors = [1, *(size for size in (2, 3, 4, 16) if length % size == 0)]
    first = draw(st.sampled_from(divisors))
    shape = draw(st.sampled_from(((length,), (first, length // first))))
    magnitudes, marked = (*MAGNITUDES, 1e20), (-inf, nan, nan)
    x = draw(numbers((*before, *shape), length, magnitudes, marked=marked))
    dtypes = (x.dtype, *DTYPES)  # of y as well
    dy = draw(numbers(x.shape, length, (1.0, 1e-3, 1e3), (1.0, 0.0), dtypes=dtypes, nth=1))
    eps = draw(st.sampled_from((1e-5, 1e-12, 0.5)))
    weights, biases = (numbers(shape, length, (1.0, 1e-3), (0.0, 1.0), nth=n) for n in (2, 3))
    weight, bias = draw(weights | weights | st.none()), draw(biases | biases | st.none())
    needs = draw(SUBSETS)
    return LayerNorm(x, len(shape), weight, bias, eps, draw(path("layer_norm")), dy, needs)


@dataclass(frozen=True, repr=False)
class Composed(Described):
    """A function made of an operator and others, to be differentiated twice."""

    how: str
    x: Numbers
    path: str = "as it is"
    hooked: bool = False
    """Whether x is the result of something, with a hook and a gradient that is kept."""


@st.composite
def composed(draw, operator: str, how: tuple[str, ...]):
    lengths = [length for length in LENGTHS if 3 <= length <= 200000]
    length = draw(st.sampled_from(lengths))
    rows = draw(st.sampled_from((1, 2, 5)))
    before = draw(st.sampled_from(((rows,), (rows, 1), (1, 2, rows))))
    # Where the numbers are near each other or one leads by far, gradients cancel to nothing and
    # PyTorch's own digits are lost: second gradients are compared where they have some.
    x = draw(numbers((*before, length), length, (1.0, 0.3), (0.0, 1.0, -1.0)))
    x = replace(x, layout=x.layout if x.layout != "expanded columns" else "contiguous")
    return Composed(draw(st.sampled_from(how)), x, draw(path(operator)), draw(st.booleans()))


@dataclass(frozen=True, repr=False)
class Attention(Described):
    q: Numbers
    k: Numbers
    v: Numbers
    is_causal: bool = False
    window: tuple[int | None, int | None] | None = None
    scale: float | None = None
    deterministic: bool = True
    needs: tuple[bool, bool, bool] = (True, True, True)
    seed: int = 0
    """Of the gradients of out and lse."""
    path: str = "as it is"
    """Whether small constants let programs share the keys of few queries, as in decoding."""
    backend: str = "auto"


@st.composite
def attention(draw):
    if LARGE:
        lengths = (0, 1, 2, 63, 64, 65, 127, 128, 129, 255, 256, 257, 384, 1000)
        head_dims = (16, 40, 64, 80, 128, 256)
    else:
        lengths = (0, 1, 2, 31, 32, 33, 63, 64, 65, 70)
        head_dims = (16, 24, 32)
    seqlen_q, seqlen_k = draw(st.sampled_from(lengths)), draw(st.sampled_from(lengths))
    batch, heads_k, group = (draw(st.integers(1, 2)) for _ in range(3))
    head_dim = draw(st.sampled_from(head_dims))
    dtype = (draw(st.sampled_from(DTYPES)),)
    size_q = (batch, heads_k * group, seqlen_q, head_dim)
    size_k = (batch, heads_k, seqlen_k, head_dim)
    magnitudes, shifts = (1.0, 1e-6, 1e-2, 10.0, 1e3), (0.0, 1.0, -1.0, 10.0)
    q = draw(numbers(size_q, head_dim, magnitudes, shifts, dtypes=dtype))
    k = draw(numbers(size_k, head_dim, magnitudes, shifts, dtypes=dtype, nth=1))
    # Scores stay below 2**27: attention says what it promises of larger ones.
    reach_q, reach_k = (2 * x.magnitude + abs(x.shift) for x in (q, k))
    assume(head_dim * reach_q * reach_k < 2**27)
    v = draw(numbers(size_k, head_dim, (1.0, 1e-3, 1e3), (0.0, 1.0), dtypes=dtype, nth=2))
    capability, kind = runtime.capability(runtime.DEVICE), getattr(torch, dtype[0])
    in_gluon = seqlen_q and seqlen_k and not unsupported(capability, kind, head_dim)
    return Attention(
        q,
        k,
        v,
        draw(st.booleans()),
        draw(st.none() | st.tuples(*[st.none() | st.sampled_from((*lengths, 10**6))] * 2)),
        draw(st.sampled_from((None, 1.0, 1e-3))),
        draw(st.booleans()),
        draw(SUBSETS),
        draw(SEEDS),
        draw(st.sampled_from(("as it is", "decoding"))),
        draw(st.sampled_from(("auto", "triton", "gluon") if in_gluon else ("auto",))),
    )


@dataclass(frozen=True, repr=False)
class AttentionVarlen(Described):
    """Attention of packed sequences of these lengths."""

    q: Numbers
    k: Numbers
    v: Numbers
    lengths_q: tuple[int, ...]
    lengths_k: tuple[int, ...]
    is_causal: bool = False
    window: tuple[int | None, int | None] | None = None
    scale: float | None = None
    longer: int = 0
    """What the maxima say beyond the longest sequence."""
    needs: tuple[bool, bool, bool] = (True, True, True)
    seed: int = 0
    """Of the gradients of out and lse."""


@st.composite
def attention_varlen(draw):
    if LARGE:
        lengths, head_dims = (0, 1, 2, 63, 64, 65, 127, 128, 129, 257, 384), (16, 40, 64, 128, 256)
    else:
        lengths, head_dims = (0, 1, 2, 31, 32, 33, 64, 65), (16, 24)
    pairs = st.tuples(st.sampled_from(lengths), st.sampled_from(lengths))
    drawn = draw(st.lists(pairs, max_size=3))
    lengths_q, lengths_k = (tuple(pair[i] for pair in drawn) for i in (0, 1))
    heads_k, group = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    head_dim = draw(st.sampled_from(head_dims))
    dtype = (draw(st.sampled_from(DTYPES)),)
    size_q = (sum(lengths_q), heads_k * group, head_dim)
    size_k = (sum(lengths_k), heads_k, head_dim)
    q = draw(numbers(size_q, head_dim, (1.0, 1e-2, 10.0), (1.0, 0.0), dtypes=dtype))
    k = draw(numbers(size_k, head_dim, (1.0, 1e-2, 10.0), (1.0, 0.0), dtypes=dtype, nth=1))
    v = draw(numbers(size_k, head_dim, (1.0, 1e-3, 1e3), (0.0, 1.0), dtypes=dtype, nth=2))
    bound = st.none() | st.sampled_from((0, 1, 5, 33, 1000))
    return AttentionVarlen(
        q,
        k,
        v,
        lengths_q,
        lengths_k,
        draw(st.booleans()),
        draw(st.none() | st.tuples(bound, bound)),
        draw(st.sampled_from((None, 1.0))),
        draw(st.sampled_from((0, 1, 50))),
        draw(SUBSETS),
        draw(SEEDS),
    )


@dataclass(frozen=True, repr=False)
class Dropout(Described):
    x: Numbers
    p: float = 0.5
    seed: int = 0
    in_tensor: bool = False
    """Whether the seed comes in a tensor."""


@st.composite
def dropout(draw):
    length = draw(st.sampled_from((0, *LENGTHS, 1023, 1025)))
    before = draw(leading(length))
    x = draw(numbers((*before, length), length, marked=(nan, inf, -inf)))
    p = draw(st.sampled_from((0.5, 0.0, 0.1, 0.9, 1e-9, 1 - 2**-33)))
    seed = draw(st.integers(-(2**63), 2**64 - 1))
    return Dropout(x, p, seed, draw(st.booleans()) and seed < 2**63)


@dataclass(frozen=True, repr=False)
class Quantize(Described):
    x: Numbers
    dtype: str = "float8_e4m3fn"
    per: str = "head"
    contiguous: str = "head_dim"


@st.composite
def quantize(draw):
    shape = tuple(draw(st.sampled_from(sizes)) for sizes in ((0, 1, 2), (1, 3), (0, 1, 17, 33)))
    head_dim = draw(st.sampled_from((1, 16, 24, 128)))
    marked = (0.0, nan, inf)
    return Quantize(
        draw(numbers((*shape, head_dim), head_dim, (*MAGNITUDES, 1e-30, 1e30), marked=marked)),
        draw(st.sampled_from(("float8_e4m3fn", "float8_e5m2"))),
        draw(st.sampled_from(("head", "tensor"))),
        draw(st.sampled_from(("head_dim", "seqlen"))),
    )
