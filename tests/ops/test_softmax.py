"""Softmax against float64 truth, by property, and at every length where a rule changes."""

import pytest
import torch
from conftest import DEVICE, DTYPES
from conftest import assert_close as assert_within

from kernelbook import reference, runtime, softmax
from kernelbook.ops.rows import exchange
from kernelbook.ops.softmax import operator, tuned

NAMED = [name for name in operator.ALGORITHMS if name != "auto"]

# One row, one column, lengths around powers of two and around each block, more than 64 KB a row.
SHAPES = [(1, 1), (5, 1), (3, 2), (1, 127), (3, 128), (9, 129), (33, 1000), (2, 2048), (3, 8193)]
WIDE = [(2, 16384), (3, 32768), (2, 32770), (1, 40001), (2, 65536)]
if runtime.INTERPRETED:  # minutes, otherwise; small blocks stand in for long rows further down
    WIDE = [(1, 16384), (1, 32770)]


FLOAT32_FACTOR = 4
"""Float32 results may err by four times PyTorch's error instead of two. PyTorch divides by the sum
and we multiply by its reciprocal, one rounding more, and the hardware's exp2 errs by two units."""


def assert_close(ours, truth, torch_result):
    factors = {"factor": FLOAT32_FACTOR} if ours.dtype == torch.float32 else {}
    assert_within(ours, truth, torch_result, **factors)


def draw(*shape, dtype=torch.float32):
    return (4 * torch.randn(shape, device=DEVICE)).to(dtype)


def check(x, dim=-1, algorithm="auto"):
    """Compare forward and backward with the truth, and with PyTorch's error in the same dtype."""
    x = x.detach().requires_grad_()
    dy = torch.randn(x.shape, device=DEVICE).to(x.dtype)
    y = softmax(x, dim, algorithm=algorithm)
    (dx,) = torch.autograd.grad(y, x, dy)
    assert y.shape == x.shape
    assert y.dtype == dx.dtype == x.dtype
    truth = reference.softmax(x, dim)
    torch_y = torch.softmax(x, dim)
    assert_close(y, truth, torch_y)
    if x.shape[dim] > 1:  # the gradient of a row of one element is zero
        (torch_dx,) = torch.autograd.grad(torch_y, x, dy)
        assert_close(dx, reference.softmax_backward(x, dy, dim), torch_dx)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("algorithm", operator.ALGORITHMS)
def test_softmax_is_the_truth(shape, dtype, algorithm):
    # A short row that one element dominates has next to no gradient, and PyTorch's is but rounding.
    spread = 1 if shape[1] < 8 else 4
    check(draw(*shape, dtype=dtype) * (spread / 4), algorithm=algorithm)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", WIDE)
@pytest.mark.parametrize("algorithm", operator.ALGORITHMS)
def test_wide_rows_are_the_truth(shape, dtype, algorithm):
    check(draw(*shape, dtype=dtype), algorithm=algorithm)


@pytest.mark.parametrize("n_cols", [131072, 1_000_000])
@pytest.mark.parametrize("algorithm", ["auto", "online"])
def test_very_wide_rows(n_cols, algorithm):
    if runtime.INTERPRETED and algorithm == "auto":
        pytest.skip("needs a GPU: interpreted, the parts of such a row take minutes")
    check(draw(2, n_cols, dtype=torch.float16), algorithm=algorithm)


def test_auto_takes_what_row_cannot(monkeypatch):
    monkeypatch.setattr(tuned, "ROW_COLS", 100)
    check(draw(3, 101))
    with pytest.raises(ValueError, match="takes at most 100 columns, got 101: pass 'online'"):
        softmax(draw(3, 101), algorithm="row")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n_cols", [33, 100, 128, 255])
def test_small_blocks_meet_every_path(monkeypatch, n_cols, dtype):
    """Tile, packed row and split row, at lengths that fill their blocks and that do not."""
    wide = 128 * runtime.kernel_dtype(dtype).itemsize
    for name, value in {"TILE_COLS": 32, "WIDE_BYTES": wide, "PART_COLS": (32, 32)}.items():
        monkeypatch.setattr(tuned, name, value)
    check(draw(6, n_cols, dtype=dtype), algorithm="row")


@pytest.mark.parametrize("polls", [0, 1])
def test_a_part_whose_neighbours_do_not_come_reads_the_row(monkeypatch, polls):
    monkeypatch.setattr(exchange, "MAX_POLLS", polls)
    monkeypatch.setattr(tuned, "WIDE_BYTES", 128)
    monkeypatch.setattr(tuned, "PART_COLS", (256, 256))
    check(draw(5, 1000), algorithm="row")


LAYOUTS = {
    "first of two": lambda: (draw(70, 33), 0),
    "middle of three": lambda: (draw(3, 50, 7), 1),
    "negative": lambda: (draw(3, 50, 7), -2),
    "one dimension": lambda: (draw(333), 0),
    "four dimensions": lambda: (draw(2, 3, 4, 65), 3),
    "transposed": lambda: (draw(65, 40).t(), 1),
    "every second column": lambda: (draw(20, 90)[:, ::2], 1),
    "a slice of rows": lambda: (draw(20, 90)[:, 1:80], 1),
    "expanded rows": lambda: (draw(1, 77).expand(9, 77), -1),
    "permuted": lambda: (draw(4, 5, 6, 7).permute(3, 1, 0, 2), 2),
}


@pytest.mark.parametrize("make", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_any_dimension_and_stride(make, dtype):
    x, dim = make()
    check(x.to(dtype), dim)


def test_an_offset_that_no_pair_can_begin_at():
    x = draw(3 * 16386 + 1, dtype=torch.float16)[1:].view(3, 16386)
    check(x)


def test_a_gradient_of_stride_zero():
    x = draw(6, 100).requires_grad_()
    dy = draw(1).expand(6, 100)
    (dx,) = torch.autograd.grad(softmax(x), x, dy)
    assert dx.abs().max() < 1e-5 * dy.abs().max()  # constant along a row: no slope


@pytest.mark.parametrize("algorithm", operator.ALGORITHMS)
@pytest.mark.parametrize(
    ("shape", "dim"), [((0, 5), 1), ((5, 0), 1), ((5, 0), 0), ((2, 0, 3), 0), ((2, 0, 3), 1),
                       ((2, 3, 0), 2), ((2, 3, 0), 1), ((0,), 0)]
)  # fmt: skip
def test_empty_tensors(shape, dim, algorithm):
    x = torch.ones(shape, device=DEVICE, requires_grad=True)
    y = softmax(x, dim, algorithm=algorithm)
    y.sum().backward()
    assert y.shape == x.grad.shape == shape


def test_a_scalar_is_one():
    x = torch.tensor(3.0, device=DEVICE, requires_grad=True)
    y = softmax(x)
    y.backward()
    assert (y.item(), x.grad.item()) == (1.0, 0.0)


# -- what is not finite


@pytest.fixture(params=[128, 65536], ids=["split", "tile"])
def _path(request, monkeypatch):
    """Run the row algorithm once in tiles and once in parts of 256 columns."""
    monkeypatch.setattr(tuned, "WIDE_BYTES", request.param)
    monkeypatch.setattr(tuned, "PART_COLS", (256, 256))


@pytest.mark.usefixtures("_path")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("algorithm", NAMED)
def test_infinities_and_nans_are_those_of_pytorch(algorithm, dtype):
    x = draw(8, 1000, dtype=dtype)
    x[0] = -float("inf")  # no finite element: NaN
    x[1, :700] = -float("inf")  # whole blocks of -inf before the first number
    x[2, 300:] = -float("inf")
    x[3, 5] = float("inf")  # NaN
    x[4, 999] = float("nan")  # NaN
    x[5, 1:] = -float("inf")  # one element has it all
    y, expected = softmax(x, algorithm=algorithm), torch.softmax(x.double(), -1)
    assert torch.equal(y.isnan(), expected.isnan())
    finite = ~expected.isnan().any(-1)
    assert_close(y[finite], expected[finite], torch.softmax(x, -1)[finite])
    assert (y[1, :700] == 0).all()
    assert y[5, 0] == 1


@pytest.mark.usefixtures("_path")
@pytest.mark.parametrize("algorithm", NAMED)
def test_large_numbers_do_not_overflow(algorithm):
    largest = torch.finfo(torch.float32).max
    x = torch.tensor([[largest, largest, 0.0, -largest] * 50], device=DEVICE)
    assert_close(softmax(x, algorithm=algorithm), reference.softmax(x, -1), torch.softmax(x, -1))


VOCABULARIES = [50257, 128256, 151936] if not runtime.INTERPRETED else [1000]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shift", [-200, -100, 100, 1000])
@pytest.mark.parametrize("n_cols", VOCABULARIES)
def test_rows_far_from_zero_that_several_programs_share(monkeypatch, n_cols, shift, dtype):
    """A part that is absent, or holds nothing but -inf, must not count as a maximum of 0."""
    if runtime.INTERPRETED:
        monkeypatch.setattr(tuned, "WIDE_BYTES", 128)
        monkeypatch.setattr(tuned, "PART_COLS", (256, 256))
    part = tuned.split(n_cols, dtype.itemsize, "forward")[1]
    x = (torch.randn(4, n_cols, device=DEVICE) + shift).to(dtype)
    x[1, :part] = x[2, part : 2 * part] = x[3, n_cols // part * part :] = -torch.inf
    check(x, algorithm="row")


# -- properties


@pytest.mark.usefixtures("_path")
@pytest.mark.parametrize("algorithm", NAMED)
def test_properties(algorithm):
    x = draw(7, 1000).requires_grad_()
    y = softmax(x, algorithm=algorithm)
    # A sum of 1000 rounded terms around 1e-3 errs by a few units in the last place of 1.
    assert torch.allclose(y.sum(-1), torch.ones(7, device=DEVICE), atol=1e-6, rtol=0)
    shifted = softmax(x + 64.0, algorithm=algorithm)
    # Adding 64 rounds x to 2**-17, and softmax hands on such a change at most once.
    assert torch.allclose(shifted, y, atol=2**-17, rtol=2**-16)
    order = torch.randperm(1000, device=DEVICE)
    assert torch.allclose(softmax(x[:, order], algorithm=algorithm), y[:, order], rtol=1e-5)
    (dx,) = torch.autograd.grad(y, x, torch.randn_like(y))
    # The gradient has no part along (1, ..., 1): the shift that changes nothing.
    assert (dx.sum(-1).abs() <= 1e-5 * dx.abs().sum(-1)).all()


def test_second_derivatives_are_the_truth():
    x = draw(3, 40).requires_grad_()
    weight = torch.randn(3, 40, device=DEVICE)

    def second(function, x, weight):
        x = x.detach().requires_grad_()
        (dx,) = torch.autograd.grad((function(x) * weight).sum(), x, create_graph=True)
        return torch.autograd.grad((dx**2).sum(), x)[0]

    truth = second(lambda x: torch.softmax(x, -1), x.double(), weight.double())
    theirs = second(lambda x: torch.softmax(x, -1), x, weight)
    assert_close(second(softmax, x, weight), truth, theirs)


def test_the_input_is_left_alone():
    x = draw(5, 300)
    before = x.clone()
    softmax(x)
    assert torch.equal(x, before)


def test_gradients_of_gradients_in_16_bits_are_computed_in_float32():
    x = draw(3, 40, dtype=torch.bfloat16)
    weight = torch.randn(3, 40, device=DEVICE).bfloat16()

    def first(function, x, weight):
        x = x.detach().requires_grad_()
        return torch.autograd.grad(function(x), x, weight, create_graph=True)[0]

    truth = first(lambda x: torch.softmax(x, -1), x.double(), weight.double()).detach()
    theirs = first(lambda x: torch.softmax(x, -1), x, weight)
    assert_close(first(softmax, x, weight), truth, theirs)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_the_result_is_no_view_and_may_be_changed_in_place(dim):
    x = draw(3, 5, 7)
    assert torch.equal(torch.relu_(softmax(x, dim)), softmax(x, dim))
    leaf = draw(3, 5, 7).requires_grad_()
    y = softmax(leaf, dim)
    y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()  # as PyTorch's: y is what backward reads


@pytest.mark.parametrize("shape", [(40,), (1, 40), (1, 1, 40), (2, 40)])
def test_gradients_of_one_result_are_those_of_several_calls(shape):
    """All of them read the one y, whose row then has a stride of 0."""
    x, dys = draw(*shape).requires_grad_(), torch.randn(5, *shape, device=DEVICE)

    def gradients(y):
        return torch.vmap(lambda dy: torch.autograd.grad(y, x, dy, retain_graph=True)[0])(dys)

    truth = torch.stack([reference.softmax_backward(x, dy, -1) for dy in dys])
    assert_close(gradients(softmax(x)), truth, gradients(torch.softmax(x, -1)))


def test_a_hook_may_unpack_the_result_with_other_strides():
    """As one does that keeps it in a part of a larger buffer."""
    x, dy = draw(6, 40).requires_grad_(), draw(6, 40)

    def pack(y):
        buffer = torch.full((6, 50), torch.nan, device=DEVICE)
        buffer[:, :40] = y
        return buffer

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda buffer: buffer[:, :40]):
        y = softmax(x)
    (dx,) = torch.autograd.grad(y, x, dy)
    (expected,) = torch.autograd.grad(softmax(x), x, dy)
    assert torch.equal(dx, expected)
    assert dx.any()


def test_a_pending_negation_is_seen():
    x, dy = (torch.randn(7, 50, dtype=torch.complex64).to(DEVICE).conj().imag for _ in range(2))
    assert x.is_neg()
    check(x)
    leaf = x.resolve_neg().detach().requires_grad_()
    (dx,) = torch.autograd.grad(softmax(leaf), leaf, dy)
    (expected,) = torch.autograd.grad(softmax(leaf), leaf, dy.resolve_neg())
    assert torch.equal(dx, expected)


# -- errors

ERRORS = {
    "x is a list": (lambda x: softmax([1.0]), TypeError, "x must be a torch.Tensor"),
    "x is integer": (lambda x: softmax(x.int()), TypeError, "float32, float16 or bfloat16"),
    "dim is too large": (lambda x: softmax(x, 2), ValueError, r"dim must lie in \[-2, 1\]"),
    "dim is too small": (lambda x: softmax(x, -3), ValueError, "got -3"),
    "dim of a scalar": (lambda x: softmax(x[0, 0], 1), ValueError, r"\[-1, 0\]"),
    "dim is a float": (lambda x: softmax(x, 1.0), TypeError, "dim must be an int, got 1.0"),
    "dim is a bool": (lambda x: softmax(x, True), TypeError, "dim must be an int, got True"),
    "algorithm is unknown": (
        lambda x: softmax(x, algorithm="fast"),
        ValueError,
        "algorithm must be one of 'auto', 'row', .*, 'online_2d', got 'fast'",
    ),
    "row cannot take it": (
        lambda x: softmax(x[:1, :1].expand(1, 2**20 + 1), algorithm="row"),
        ValueError,
        "takes at most 1,048,576 columns, got 1,048,577: pass 'online'",
    ),
}


@pytest.mark.parametrize(("call", "kind", "message"), ERRORS.values(), ids=ERRORS)
def test_errors_say_what_came_and_what_to_pass(monkeypatch, call, kind, message):
    monkeypatch.setattr(operator, "_forward", lambda *_: pytest.fail("a kernel was launched"))
    with pytest.raises(kind, match=message):
        call(torch.ones(3, 4, device=DEVICE))


@pytest.mark.usefixtures("gpu")
def test_a_tensor_on_the_cpu_is_refused_where_kernels_run_on_a_gpu():
    with pytest.raises(ValueError, match=r"x is on cpu.*pass x\.cuda\(\)"):
        softmax(torch.ones(3, 4))


# -- what only a GPU can show


@pytest.mark.usefixtures("gpu")
def test_more_than_2_to_the_31_elements():
    x = draw(2**19 + 3, 4096, dtype=torch.float16)
    y = softmax(x)
    for rows in (slice(0, 3), slice(2**19 - 3, None)):
        assert_close(y[rows], reference.softmax(x[rows], -1), torch.softmax(x[rows], -1))


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("n_cols", [65536, 131072])
def test_parts_that_wait_for_each_other_agree_in_every_run(n_cols):
    """A race between the parts of a row would show as a difference between runs."""
    x = draw(300, n_cols, dtype=torch.bfloat16)
    first = softmax(x)
    for _ in range(1000):
        assert torch.equal(softmax(x), first)


@pytest.mark.usefixtures("gpu")
def test_parts_wait_in_the_presence_of_other_work():
    """Rows are right while another stream keeps the GPU busy."""
    x = draw(500, 131072, dtype=torch.bfloat16)
    expected = softmax(x)
    other = torch.cuda.Stream()
    a = torch.randn(4096, 4096, device=DEVICE)
    with torch.cuda.stream(other):
        for _ in range(50):
            a = a @ a / 64
    for _ in range(50):
        assert torch.equal(softmax(x), expected)


def test_interpreted_parts_give_up_at_once():
    assert (exchange.MAX_POLLS == 1) == runtime.INTERPRETED


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("n_cols", [8194, 10_000, 12_288, 14_000, 24_576, 28_674])
def test_packed_rows_in_pieces_are_right_whatever_a_piece_holds(n_cols, dtype):
    """A piece of nothing but -inf, the maximum in the last piece, which is the shortest, and a row
    so far below zero that one padding zero would be its maximum."""
    x = draw(5, n_cols, dtype=dtype)
    x[1, n_cols // 3 :] = float("-inf")
    x[2] += 300
    x[3, -1] = x[3].max() + 1
    x[4] -= 300
    for row in x:  # each judged by itself
        check(row[None])
