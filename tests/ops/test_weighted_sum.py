"""The weighted sum against float64 truth, for every shape of block, stride and dtype."""

import pytest
import torch
from conftest import DEVICE, DTYPES
from conftest import assert_close as assert_within

from kernelbook import reference, weighted_sum
from kernelbook.ops import weighted_sum as operator

# One row, one column, lengths around powers of two, many short rows and few long ones.
SHAPES = [(1, 1), (5, 1), (9000, 3), (1, 127), (3, 128), (300, 64), (2, 8193), (1, 40001)]

FLOAT32_FACTOR = 8
"""Sums in float32 may err by eight times PyTorch's error: they err by a few units that depend on
their order, and PyTorch's order may be lucky."""


def assert_close(ours, truth, torch_result):
    factors = {"factor": FLOAT32_FACTOR} if ours.dtype == torch.float32 else {}
    assert_within(ours, truth, torch_result, **factors)


def draw(*shape, dtype=torch.float32):
    """Numbers with a mean, because a sum that cancels has no digit to compare."""
    return (torch.randn(shape, device=DEVICE) + 1).to(dtype)


def in_torch(x, weight, dy):
    """PyTorch's result and gradients, in float32 and rounded once where dtypes differ."""
    leaves = [
        (t if x.dtype == weight.dtype else t.float()).detach().requires_grad_() for t in (x, weight)
    ]
    y = (leaves[0] * leaves[1]).sum(-1)
    dx, dw = torch.autograd.grad(y, leaves, dy.to(y.dtype))
    return y.to(dy.dtype), dx.to(x.dtype), dw.to(weight.dtype)


def check(x, weight=None, dy=None):
    """Compare forward and backward with the truth, and with PyTorch's error in the same dtype."""
    weight = draw(x.shape[-1], dtype=x.dtype) if weight is None else weight
    x, weight = (t.detach().requires_grad_() for t in (x, weight))
    y = weighted_sum(x, weight)
    assert y.is_contiguous()
    assert y.dtype == (x.detach()[..., :0] * weight.detach()[:0]).dtype
    dy = draw(*y.shape, dtype=y.dtype) if dy is None else dy
    dx, dw = torch.autograd.grad(y, (x, weight), dy)
    assert (dx.dtype, dw.dtype) == (x.dtype, weight.dtype)
    truth = reference.weighted_sum(x, weight), *reference.weighted_sum_backward(x, weight, dy)
    for ours, true, theirs in zip((y, dx, dw), truth, in_torch(x, weight, dy), strict=True):
        assert_close(ours, true, theirs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_weighted_sum_is_the_truth(shape, dtype):
    check(draw(*shape, dtype=dtype))


@pytest.mark.parametrize("other", [torch.float32, torch.bfloat16])
def test_x_and_weight_of_two_dtypes(other):
    check(draw(70, 50, dtype=torch.float16), draw(50, dtype=other))
    check(draw(70, 50, dtype=other), draw(50, dtype=torch.float16))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n_cols", [1, 2, 4, 8, 16, 32, 64, 65, 12, 100])
@pytest.mark.parametrize("n_rows", [1, 3, 31, 33, 1025])
def test_short_rows_around_their_blocks(n_rows, n_cols, dtype):
    check(*(draw(*shape, dtype=dtype).abs() for shape in ((n_rows, n_cols), (n_cols,), (n_rows,))))


@pytest.mark.parametrize("n_cols", [4096, 4097, 8200])
@pytest.mark.parametrize("dtype", DTYPES)
def test_long_rows_in_one_block_and_in_several(n_cols, dtype):
    check(draw(5, n_cols, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n_cols", "stride"), [(100, 102), (100, 101), (12, 16), (8, 9), (64, 66)])
def test_rows_whose_length_and_stride_have_other_divisors(n_cols, stride, dtype):
    x = draw(41, stride, dtype=dtype)
    check(x[:, :n_cols])
    check(x[:, stride - n_cols :])  # not aligned as the whole is


LAYOUTS = {
    "one row": lambda: draw(333),
    "four dimensions": lambda: draw(2, 3, 4, 65),
    "transposed": lambda: draw(300, 140).t(),
    "every second column": lambda: draw(20, 90)[:, ::2],
    "every second row": lambda: draw(40, 90)[::2],
    "a slice of rows": lambda: draw(20, 90)[:, 1:80],
    "expanded rows": lambda: draw(1, 77).expand(9, 77),
    "expanded columns": lambda: draw(9, 1).expand(9, 77),
    "permuted": lambda: draw(4, 5, 6, 7).permute(3, 1, 0, 2),
    "not aligned": lambda: draw(3 * 130 + 1)[1:].view(3, 130),
    "a pending negation": lambda: torch.randn(7, 50, dtype=torch.complex64).to(DEVICE).conj().imag,
}


@pytest.mark.parametrize("make", LAYOUTS.values(), ids=LAYOUTS)
def test_any_stride(make):
    x = make()
    check(x)
    check(draw(6, x.shape[-1]), weight=x.reshape(-1, x.shape[-1])[0])


def test_a_matrix_of_any_strides_is_not_copied(monkeypatch):
    x = draw(64, 48).t()[:, ::2]
    seen = []
    monkeypatch.setattr(operator, "_forward", lambda x, *_: seen.append(x))
    weighted_sum(x, draw(x.shape[-1]))
    assert seen[0].data_ptr() == x.data_ptr()
    assert seen[0].stride() == x.stride()


def test_gradients_of_stride_zero():
    x, w = draw(6, 100).requires_grad_(), draw(100).requires_grad_()
    dx, dw = torch.autograd.grad(weighted_sum(x, w).sum(), (x, w))
    assert torch.equal(dx, w.expand(6, 100))
    assert_close(dw, x.double().sum(0), x.sum(0))


@pytest.mark.parametrize("shape", [(0,), (0, 5), (5, 0), (2, 0, 3), (2, 3, 0)])
def test_empty_tensors(shape):
    x = torch.ones(shape, device=DEVICE, requires_grad=True)
    w = torch.ones(shape[-1], device=DEVICE, requires_grad=True)
    y = weighted_sum(x, w)
    y.sum().backward()
    assert y.shape == shape[:-1]
    assert x.grad.shape == shape
    assert not y.any()
    assert not w.grad.any()


@pytest.mark.parametrize("needs", [(True, False), (False, True)])
def test_a_gradient_that_is_not_needed_is_not_computed(monkeypatch, needs):
    x, w = draw(30, 40).requires_grad_(needs[0]), draw(40).requires_grad_(needs[1])
    given = []
    backward = operator._backward
    monkeypatch.setattr(
        operator, "_backward", lambda *args: (given.append(args[3:]), backward(*args))[1]
    )
    y = weighted_sum(x, w)
    (gradient,) = torch.autograd.grad(y, [t for t in (x, w) if t.requires_grad], torch.ones_like(y))
    assert [t is not None for t in given[0]] == list(needs)
    truth = reference.weighted_sum_backward(x, w, torch.ones_like(y))[needs[1]]
    assert_close(gradient, truth, truth.float())


@pytest.mark.parametrize("wanted", [0, 1])
@pytest.mark.parametrize("shape", [(40,), (5, 40), (2, 3, 40)])
def test_what_the_wanted_gradient_is_not_made_of_is_not_kept(shape, wanted):
    """dx needs no x and dw no weight, which may change before backward, as with PyTorch."""
    leaves, dy, kept = [draw(*shape), draw(40)], draw(*shape[:-1]), []
    leaves[wanted].requires_grad_()
    given = [leaf * 1 for leaf in leaves]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        y = weighted_sum(*given)
    assert [t.shape for t in kept] == [leaves[1 - wanted].shape]
    given[wanted].zero_()
    (gradient,) = torch.autograd.grad(y, leaves[wanted], dy)
    truth = reference.weighted_sum_backward(*leaves, dy)[wanted]
    assert_close(gradient, truth, truth.float())


SMALL = {
    "FWD_TILE": 64,
    "BWD_TILE": 128,
    "SHORT_BYTES": 512,
    "BWD_LONG": 64,
    "SQUARE": 16,
    "SUM_ROWS": 2,
}
"""Sizes of blocks with which small matrices take every path."""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 3000), (3, 500), (70, 320), (2000, 3), (40, 40)])
def test_small_blocks_meet_every_path(monkeypatch, shape, dtype):
    """Rows in parts, sums in parts, and several iterations of each loop."""
    for name, value in SMALL.items():
        monkeypatch.setattr(operator, name, value)
    check(draw(*shape, dtype=dtype))
    check(draw(*reversed(shape), dtype=dtype).t())


def test_two_runs_agree_bit_by_bit():
    x, w = draw(500, 300).requires_grad_(), draw(300).requires_grad_()

    def run():
        y = weighted_sum(x, w)
        return y, *torch.autograd.grad(y.square().sum(), (x, w))

    for first, second in zip(run(), run(), strict=True):
        assert torch.equal(first, second)


# -- derivatives


def derivatives(function, x, weight):
    """The value, the gradients, and the gradients of their squares."""
    x, weight = (t.detach().requires_grad_() for t in (x, weight))
    y = function(x, weight)
    first = torch.autograd.grad(y.square().sum(), (x, weight), create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in first), (x, weight))
    return y, *first, *second


@pytest.mark.parametrize("dtype", DTYPES)
def test_second_derivatives_are_the_truth(dtype):
    x, w = draw(30, 20, dtype=dtype) / 8, draw(20, dtype=dtype) / 8

    def in_torch(x, weight):
        return (x * weight).sum(-1)

    truth = derivatives(in_torch, x.double(), w.double())
    theirs = derivatives(in_torch, x, w)
    for ours, true, their in zip(derivatives(weighted_sum, x, w), truth, theirs, strict=True):
        assert_close(ours, true.detach(), their)


@pytest.mark.parametrize("needs", [(True, False), (False, True)])
def test_second_derivatives_through_one_gradient(needs):
    x, w = draw(5, 8).requires_grad_(needs[0]), draw(8).requires_grad_(needs[1])
    leaf = x if needs[0] else w
    dy = draw(5).requires_grad_()
    (first,) = torch.autograd.grad(weighted_sum(x, w), leaf, dy, create_graph=True)
    (of_dy,) = torch.autograd.grad(first.sum(), dy)
    truth = w.sum().expand(5) if needs[0] else x.sum(-1)
    torch.testing.assert_close(of_dy, truth.detach())


def test_it_is_linear_in_x():
    x, other, w = draw(7, 90), draw(7, 90), draw(90)
    both = weighted_sum(x + 2 * other, w)
    torch.testing.assert_close(both, weighted_sum(x, w) + 2 * weighted_sum(other, w))


# -- autocast


@pytest.mark.parametrize("dtypes", [(torch.float32,) * 2, (torch.bfloat16,) * 2,
                                    (torch.bfloat16, torch.float32)])  # fmt: skip
def test_autocast_is_pytorchs(dtypes):
    x, w = draw(4, 30, dtype=dtypes[0]), draw(30, dtype=dtypes[1])
    with torch.autocast(torch.device(DEVICE).type, torch.bfloat16):
        y, theirs = weighted_sum(x, w), (x * w).sum(-1)
    assert y.dtype == theirs.dtype
    torch.testing.assert_close(y, theirs, rtol=2e-2, atol=2e-2)


# -- errors

ERRORS = {
    "x is a list": (lambda x, w: weighted_sum([1.0], w), TypeError, "x must be a torch.Tensor"),
    "x is integer": (lambda x, w: weighted_sum(x.int(), w), TypeError, "float16 or bfloat16"),
    "x is float64": (lambda x, w: weighted_sum(x.double(), w), TypeError, "got float64"),
    "weight is None": (lambda x, w: weighted_sum(x, None), TypeError, "weight must be a torch"),
    "x is a scalar": (lambda x, w: weighted_sum(x[0, 0], w), ValueError, r"pass x\.view\(1\)"),
    "weight is too long": (
        lambda x, w: weighted_sum(x[:, 1:], w),
        ValueError,
        r"weight must have shape \(3,\), that of a row of x, got \(4,\)",
    ),
    "weight is a matrix": (lambda x, w: weighted_sum(x, x), ValueError, r"got \(3, 4\)"),
}


@pytest.mark.parametrize(("call", "kind", "message"), ERRORS.values(), ids=ERRORS)
def test_errors_say_what_came_and_what_to_pass(monkeypatch, call, kind, message):
    monkeypatch.setattr(operator, "_forward", lambda *_: pytest.fail("a kernel was launched"))
    with pytest.raises(kind, match=message):
        call(torch.ones(3, 4, device=DEVICE), torch.ones(4, device=DEVICE))


# -- what only a GPU can show


@pytest.mark.usefixtures("gpu")
def test_a_tensor_on_the_cpu_is_refused_where_kernels_run_on_a_gpu():
    with pytest.raises(ValueError, match=r"x is on cpu.*pass x\.cuda\(\)"):
        weighted_sum(torch.ones(3, 4), torch.ones(4))


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("shape", [(2**19 + 3, 4096), (3, 2**30), (2**31 + 5, 1)])
def test_more_than_2_to_the_31_elements(shape):
    x = torch.ones(shape, device=DEVICE, dtype=torch.float16)
    x[-1, -1] = 2
    w = torch.full((shape[1],), 1 / shape[1], device=DEVICE, dtype=torch.float32)
    w[-1] = 1
    x.requires_grad_()
    y = weighted_sum(x, w)
    expected = torch.full_like(y, (shape[1] - 1) / shape[1] + 1)
    expected[-1] += 1
    torch.testing.assert_close(y, expected)
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert torch.equal(dx[-1], w.half())
    assert torch.equal(dx[0], w.half())


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2**16, 4096), (64, 2**20), (2**22, 64), (4096, 1001)])
def test_large_matrices(shape, dtype):
    for x in (draw(*shape, dtype=dtype), draw(*reversed(shape), dtype=dtype).t()):
        # Sums of so many terms must stay below 65,504, where float16 ends.
        dy, weight = (draw(n, dtype=dtype) / n**0.5 for n in shape)
        check(x, weight, dy)
