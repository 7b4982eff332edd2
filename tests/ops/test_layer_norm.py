"""Layer norm against float64 truth, by property, and at every length where a rule changes."""

import pytest
import torch
import torch.nn.functional as F
from conftest import DEVICE, DTYPES
from conftest import assert_close as assert_within

from kernelbook import reference, runtime
from kernelbook.ops.layer_norm import backward as backwards
from kernelbook.ops.layer_norm import forward as forwards
from kernelbook.ops.layer_norm import layer_norm, operator, tuned
from kernelbook.ops.rows import exchange

ALL_DTYPES = DTYPES
if runtime.INTERPRETED:  # where kernels see bfloat16 as float32
    DTYPES = DTYPES[:2]

# One row, one column, lengths around powers of two and around each block, more than 64 KB a row.
SHAPES = [(1, 1), (5, 1), (3, 2), (1, 127), (3, 128), (9, 129), (33, 1000), (2, 2048), (3, 8193)]
WIDE = [(2, 16384), (3, 32768), (2, 32770), (1, 40001), (2, 65536), (3, 262144), (1, 600_000)]
if runtime.INTERPRETED:  # minutes, otherwise; small blocks stand in for long rows further down
    WIDE = [(1, 16384)]


REDUCTIONS = ("partial", "lock")

FLOAT32_FACTOR, SUMS_FACTOR = 4, 8
"""In float32 y and dx may err by four times PyTorch's error instead of two: the hardware's
reciprocal square root errs by two units. dw and db may err by eight times: a sum over hundreds of
rows errs by a few units that depend on its order, and PyTorch's order may be lucky."""


def assert_close(ours, truth, torch_result, factor=FLOAT32_FACTOR):
    factors = {"factor": factor} if ours.dtype == torch.float32 else {}
    assert_within(ours, truth, torch_result, **factors)


def draw(*shape, dtype=torch.float32):
    return (2 * torch.randn(shape, device=DEVICE) + 0.5).to(dtype)


def in_torch(x, n_dims, weight, bias, eps, dy):
    """PyTorch's result and gradients, in float32 and rounded once where dtypes differ."""
    given = [t for t in (x, weight, bias) if t is not None]
    one_dtype = all(t.dtype == x.dtype for t in (*given, dy))
    leaves = [
        None if t is None else (t if one_dtype else t.float()).detach().requires_grad_()
        for t in (x, weight, bias)
    ]
    y = F.layer_norm(leaves[0], x.shape[x.ndim - n_dims :], *leaves[1:], eps)
    grads = torch.autograd.grad(y, [t for t in leaves if t is not None], dy.to(y.dtype))
    return [y.to(dy.dtype), *(g.to(t.dtype) for g, t in zip(grads, given, strict=True))]


def check(x, n_dims=1, weight=None, bias=None, eps=1e-5, dy=None):
    """Compare forward and backward with the truth, and with PyTorch's error in the same dtype."""
    given = [t.detach().requires_grad_() for t in (x, weight, bias) if t is not None]
    left = iter(given)
    x, weight, bias = (None if t is None else next(left) for t in (x, weight, bias))
    dy = torch.randn(x.shape, device=DEVICE).to(x.dtype) if dy is None else dy
    out_dtype = None if dy.dtype == x.dtype else dy.dtype
    y = layer_norm(x, x.shape[x.ndim - n_dims :], weight, bias, eps, out_dtype=out_dtype)
    grads = torch.autograd.grad(y, given, dy)
    assert y.shape == x.shape
    assert y.is_contiguous()
    assert [y.dtype, *(g.dtype for g in grads)] == [dy.dtype, *(t.dtype for t in given)]
    dx, dw, db = reference.layer_norm_backward(x, dy, n_dims, weight, eps)
    truth = [reference.layer_norm(x, n_dims, weight, bias, eps), dx]
    truth += [] if weight is None else [dw]
    truth += [] if bias is None else [db]
    theirs = in_torch(x, n_dims, weight, bias, eps, dy)
    factors = (FLOAT32_FACTOR, FLOAT32_FACTOR, SUMS_FACTOR, SUMS_FACTOR)
    for ours, true, their, factor in zip((y, *grads), truth, theirs, factors, strict=False):
        if true.abs().max() > 0:
            assert_close(ours, true, their, factor)
        else:  # a row of one element
            assert ours.abs().max() == 0


def parameters(n_cols, dtype=torch.float32):
    return draw(n_cols, dtype=dtype), draw(n_cols, dtype=dtype)


def backward(x, weight, dy, reduction="partial", **options):
    """dx, dw and db with a chosen reduction, and no autograd between."""
    kernel_dtype = runtime.kernel_dtype(x.dtype)
    x, dy = x.to(kernel_dtype), dy.to(kernel_dtype)
    with runtime.launching_on(x):
        _, mean, rstd = forwards._forward(x, weight, None, 1e-5)
        return backwards._backward(
            x, weight, mean, rstd, dy, torch.float32, torch.float32, True, reduction, **options
        )


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("n_cols", [1000, 1280, 5120, 8192, 12_288, 16_384, 16_386])
def test_what_of_dy_lies_along_x_is_taken_out(n_cols, dtype):
    """Of a random dy that is next to nothing, and the rounding to 16 bits hides an error of it."""
    x = draw(2, n_cols, dtype=dtype)
    dy = (x + draw(2, n_cols) / 16).to(dtype)
    check(x, 1, 1 + draw(n_cols).to(dtype) / 8, dy=dy)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_layer_norm_is_the_truth(shape, dtype):
    # Of two elements, xhat is 1 and -1 whatever x is: without a large eps, dx is next to nothing.
    eps = 1.0 if shape[1] == 2 else 1e-5
    check(draw(*shape, dtype=dtype), 1, *parameters(shape[1], dtype), eps)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", WIDE)
def test_wide_rows_are_the_truth(shape, dtype):
    check(draw(*shape, dtype=dtype), 1, *parameters(shape[1], dtype))


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_too_long_for_parts(dtype):
    n_cols = tuned.MAX_PARTS * tuned.MAX_PART_COLS + 1
    check(draw(2, n_cols, dtype=dtype), 1, *parameters(n_cols, dtype))


@pytest.fixture(params=["tile", "packed", "split", "loop"])
def _path(request, monkeypatch):
    """Run whole rows, packed ones, rows split in parts of 256, and rows in loops, on short rows."""
    if request.param != "tile":
        for name in ("TILE_COLS", "TILE_BYTES", "BWD_ROW_COLS"):
            monkeypatch.setattr(tuned, name, 0)
        monkeypatch.setattr(tuned, "split", lambda n, _: (-(-n // 256), 256))
    lengths = {"PACKED_COLS": 32768, "BWD_PACKED_COLS": 256} if request.param == "packed" else {}
    for name in ("PACKED_COLS", "BWD_PACKED_COLS"):
        monkeypatch.setattr(tuned, name, lengths.get(name, 0))
    if request.param == "loop":
        monkeypatch.setattr(tuned, "MAX_PARTS", 0)
        for name in ("LOOP_COLS", "COLUMN_COLS"):
            monkeypatch.setattr(tuned, name, 256)


@pytest.mark.usefixtures("_path")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n_cols", [3, 255, 256, 1000])
def test_every_path(n_cols, dtype):
    check(draw(11, n_cols, dtype=dtype), 1, *parameters(n_cols, dtype), eps=0.1)


@pytest.mark.parametrize("polls", [0, 1])
def test_a_part_whose_neighbours_do_not_come_computes_their_share(monkeypatch, polls):
    monkeypatch.setattr(exchange, "MAX_POLLS", polls)
    for name in ("TILE_BYTES", "BWD_ROW_COLS"):
        monkeypatch.setattr(tuned, name, 0)
    monkeypatch.setattr(tuned, "split", lambda n, _: (-(-n // 256), 256))
    check(draw(5, 1000), 1, *parameters(1000))


PARAMETERS = {
    "neither": (None, None),
    "weight alone": (torch.float32, None),
    "bias alone": (None, torch.float32),
    "float32": (torch.float32, torch.float32),
    "float16": (torch.float16, torch.float16),
    "two dtypes": (torch.bfloat16, torch.float32),
}


@pytest.mark.usefixtures("_path")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dtypes", PARAMETERS.values(), ids=PARAMETERS)
def test_parameters_may_be_absent_or_of_another_dtype(dtypes, dtype):
    weight, bias = (None if d is None else draw(300, dtype=d) for d in dtypes)
    check(draw(7, 300, dtype=dtype), 1, weight, bias)


@pytest.mark.usefixtures("_path")
@pytest.mark.parametrize("out_dtype", ALL_DTYPES)
@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize("n_cols", [255, 256])
def test_the_result_may_have_a_dtype_of_its_own(n_cols, dtype, out_dtype):
    dy = draw(11, n_cols, dtype=out_dtype)
    check(draw(11, n_cols, dtype=dtype), 1, *parameters(n_cols), dy=dy)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("out_dtype", ALL_DTYPES)
@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize("shape", [(3, 128), (9, 129), (33, 1000), (2, 2048), (3, 8193), *WIDE])
def test_the_result_of_any_length_may_have_a_dtype_of_its_own(shape, dtype, out_dtype):
    dy = draw(*shape, dtype=out_dtype)
    check(draw(*shape, dtype=dtype), 1, *parameters(shape[-1]), dy=dy)


def test_a_result_in_16_bits_is_what_autocast_makes_of_it():
    """Rounded once, from float32, and so is its gradient."""
    x, weight, bias = draw(7, 1000), *parameters(1000)
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    dy = draw(7, 1000, dtype=torch.bfloat16)
    with torch.autocast(torch.device(DEVICE).type, torch.bfloat16):
        ours = layer_norm(x, 1000, weight, bias, out_dtype=torch.bfloat16)
        in_float32 = layer_norm(x, 1000, weight, bias).to(torch.bfloat16)
    assert ours.dtype == torch.bfloat16
    assert torch.equal(ours, in_float32)
    grads, expected = (torch.autograd.grad(y, leaves, dy) for y in (ours, in_float32))
    for gradient, true in zip(grads, expected, strict=True):
        torch.testing.assert_close(gradient, true)


def test_parameters_of_any_stride():
    check(draw(7, 300), 1, draw(300, 2)[:, 0], draw(1).expand(300))
    check(draw(7, 6, 50), 2, draw(50, 6).t(), draw(6, 50))


LAYOUTS = {
    "one dimension": lambda: (draw(333), 1),
    "two dimensions of two": lambda: (draw(9, 20), 2),
    "two dimensions of four": lambda: (draw(2, 3, 4, 65), 2),
    "one of three": lambda: (draw(3, 50, 7), 1),
    "transposed": lambda: (draw(65, 40).t(), 1),
    "every second column": lambda: (draw(20, 90)[:, ::2], 1),
    "a slice of rows": lambda: (draw(20, 90)[:, 1:80], 1),
    "expanded rows": lambda: (draw(1, 77).expand(9, 77), 1),
    "expanded columns": lambda: (draw(9, 7, 1).expand(9, 7, 11), 2),
    "permuted": lambda: (draw(4, 5, 6, 7).permute(3, 1, 0, 2), 2),
}


@pytest.mark.parametrize("make", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_any_shape_and_stride(make, dtype):
    x, n_dims = make()
    shape = x.shape[x.ndim - n_dims :]
    check(x.to(dtype), n_dims, draw(*shape, dtype=dtype), draw(*shape, dtype=dtype))


def test_normalized_shape_may_be_an_int_or_a_sequence():
    x = draw(4, 6, 50)
    assert torch.equal(layer_norm(x, 50), layer_norm(x, (50,)))
    assert torch.equal(layer_norm(x, [6, 50]), layer_norm(x, x.shape[1:]))


def test_an_offset_that_no_pair_can_begin_at():
    x = draw(3 * 16386 + 1, dtype=torch.float16)[1:].view(3, 16386)
    check(x, 1, *parameters(16386, torch.float16))


@pytest.mark.usefixtures("_path")
def test_a_gradient_of_stride_zero():
    check(draw(6, 300), 1, *parameters(300), dy=draw(1).expand(6, 300))
    check(draw(6, 300), 1, *parameters(300), dy=draw(300).expand(6, 300))


@pytest.mark.parametrize("shape", [(0, 5), (2, 0, 5)])
def test_zero_rows(shape):
    x = torch.ones(shape, device=DEVICE, requires_grad=True)
    weight, bias = (t.requires_grad_() for t in parameters(5))
    y = layer_norm(x, 5, weight, bias)
    y.sum().backward()
    assert y.shape == x.grad.shape == shape
    assert (weight.grad == 0).all()
    assert (bias.grad == 0).all()


@pytest.mark.usefixtures("_path")
@pytest.mark.parametrize(
    "needs", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0), (1, 0, 1), (0, 1, 1)]
)
def test_a_gradient_that_is_not_needed_is_not_computed(monkeypatch, needs):
    computed = []
    original = operator._backward

    def spy(*args, **kwargs):
        computed.extend(original(*args, **kwargs))
        return tuple(computed)

    monkeypatch.setattr(operator, "_backward", spy)
    tensors = (draw(7, 300), *parameters(300))
    for tensor, need in zip(tensors, needs, strict=True):
        tensor.requires_grad_(bool(need))
    dy = draw(7, 300)
    layer_norm(tensors[0], 300, *tensors[1:]).backward(dy)
    truth = reference.layer_norm_backward(tensors[0], dy, 1, tensors[1])
    assert [gradient is not None for gradient in computed] == [bool(need) for need in needs]
    for tensor, true in zip(tensors, truth, strict=True):
        if tensor.requires_grad:
            assert_within(tensor.grad, true, true.float(), factor=8)
        else:
            assert tensor.grad is None


@pytest.mark.parametrize("dtypes", PARAMETERS.values(), ids=PARAMETERS)
def test_gradients_of_gradients_are_the_truth(dtypes):
    weight, bias = (None if d is None else draw(20, dtype=d) for d in dtypes)
    given = [t for t in (draw(5, 20), weight, bias) if t is not None]
    v = torch.randn(5, 20, device=DEVICE)

    def second(function, dtype=None):
        leaves = [t.to(dtype or t.dtype).detach().requires_grad_() for t in given]
        left = iter(leaves)
        x, w, b = (None if t is None else next(left) for t in (given[0], weight, bias))
        (dx,) = torch.autograd.grad((function(x, (20,), w, b) ** 3).sum(), x, create_graph=True)
        return torch.autograd.grad((dx * v).sum(), leaves)

    truths, theirs = second(F.layer_norm, torch.float64), second(F.layer_norm, torch.float32)
    for ours, truth, their in zip(second(layer_norm), truths, theirs, strict=True):
        assert_within(ours, truth, their.to(ours.dtype), factor=8)


def second_of(operator, weight_of, bias_of, x, hook=None):
    """The gradient of the squared gradient, where weight and bias are made from x."""
    x = x.detach().requires_grad_()
    inner = x * 1.5
    inner.retain_grad()
    if hook is not None:
        inner.register_hook(hook)
    y = operator(inner, (x.shape[-1],), weight_of(inner), bias_of(inner))
    (dx,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
    return dx, torch.autograd.grad((dx**2).sum(), x)[0]


def composed(x, shape, weight, bias):
    """Layer norm as a formula, because PyTorch's own cannot be differentiated twice with a bias
    and no weight."""
    deviation = x - x.mean(-1, keepdim=True)
    y = deviation * ((deviation**2).mean(-1, keepdim=True) + 1e-5).rsqrt()
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


FROM_X = {
    "weight": (lambda x: x.sum(0), lambda x: None),
    "bias": (lambda x: None, lambda x: x.mean(0)),
    "both": (lambda x: x.sum(0), lambda x: x.sin().sum(0)),
    "neither": (lambda x: None, lambda x: None),
}


@pytest.mark.parametrize(("weight_of", "bias_of"), FROM_X.values(), ids=FROM_X)
def test_weight_and_bias_may_come_from_x(weight_of, bias_of):
    """With create_graph=True, the way from x through them must count once, and hooks too."""
    x, calls = draw(5, 20), []
    ours = second_of(layer_norm, weight_of, bias_of, x, calls.append)
    truths = second_of(composed, weight_of, bias_of, x.double())
    theirs = second_of(composed, weight_of, bias_of, x)
    assert len(calls) == 2  # once for each gradient
    for result, truth, their in zip(ours, truths, theirs, strict=True):
        assert_within(result, truth.detach(), their, factor=8)


def test_the_result_may_be_changed_in_place():
    for shape in [(3, 50), (2, 3, 50), (50,)]:
        x = draw(*shape).requires_grad_()
        (dx,) = torch.autograd.grad(torch.relu_(layer_norm(x, 50)).sum(), x)
        (expected,) = torch.autograd.grad(torch.relu(layer_norm(x, 50)).sum(), x)
        assert torch.equal(dx, expected)


@pytest.mark.parametrize("shape", [(40,), (1, 40), (1, 1, 40), (2, 40)])
def test_gradients_of_one_result_are_those_of_several_calls(shape):
    """All of them read the statistics of one x, those of one row with a stride of 0."""
    leaves = [t.requires_grad_() for t in (draw(*shape) + 5, *parameters(40))]
    dys = torch.randn(5, *shape, device=DEVICE)

    def gradients(y):
        return torch.vmap(lambda dy: torch.autograd.grad(y, leaves, dy, retain_graph=True))(dys)

    x, weight, bias = leaves
    truths = (reference.layer_norm_backward(x, dy, 1, weight) for dy in dys)
    theirs = gradients(F.layer_norm(x, (40,), weight, bias))
    ours = gradients(layer_norm(x, 40, weight, bias))
    for result, truth, their in zip(ours, zip(*truths, strict=True), theirs, strict=True):
        assert_close(result, torch.stack(truth), their, SUMS_FACTOR)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("in_dims", [(0, 0, 0), (0, None, None)])
def test_a_batch_of_calls_of_large_numbers_is_the_truth(in_dims, dtype):
    """Of such x and dy the product overflows, and of xhat and dy it does not."""
    x, dy = (size * torch.randn(3, 4, 300, device=DEVICE).to(dtype) for size in (1e35, 1e5))
    leaves = [t.requires_grad_() for t in (x, draw(3, 300), draw(3, 300))]
    given = [t if d == 0 else t[0] for t, d in zip(leaves, in_dims, strict=True)]
    y = torch.vmap(lambda x, w, b: layer_norm(x, 300, w, b), in_dims)(*given)
    grads = torch.autograd.grad(y, given, dy)
    calls = zip(x, dy, given[1].expand(3, 300), strict=True)
    truths = [reference.layer_norm_backward(x, dy, 1, weight) for x, dy, weight in calls]
    for gradient, d, parts in zip(grads, in_dims, zip(*truths, strict=True), strict=True):
        truth = torch.stack(parts) if d == 0 else sum(parts)
        assert_close(gradient, truth, truth.to(gradient.dtype), SUMS_FACTOR)


def test_a_pending_negation_is_seen():
    complex_numbers = torch.randn(4, 7, 50, dtype=torch.complex64).to(DEVICE)
    x, w, b, dy = complex_numbers.conj().imag.unbind()
    w, b = w[0], b[0]
    assert x.is_neg()
    assert w.is_neg()
    check(x, 1, w, b, dy=dy)


# -- statistics


def test_statistics_are_float32_and_those_of_the_row():
    x = draw(9, 1000, dtype=torch.float16)
    with runtime.launching_on(x):
        _, mean, rstd = forwards._forward(x, None, None, 1e-5)
    truth = x.double()
    assert mean.dtype == rstd.dtype == torch.float32
    assert_within(mean, truth.mean(1), truth.mean(1).float(), factor=8)
    exact = (truth.var(1, correction=0) + 1e-5).rsqrt()
    assert_within(rstd, exact, exact.float(), factor=8)


@pytest.mark.usefixtures("_path")
@pytest.mark.parametrize("mean", [1e2, 1e4])
def test_a_large_mean_beside_a_small_variance(mean):
    """E[x²] - E[x]² would have no digit left at a mean of 10,000."""
    x = torch.randn(5, 1000, device=DEVICE) + mean
    check(x, 1, *parameters(1000))


def test_partial_sums_are_float32_for_float16_input(monkeypatch):
    """2,048 + 1 is 2,048 in float16: sums kept in 16 bits stop growing there."""
    n_rows = 5000
    x = draw(n_rows, 16, dtype=torch.float16)
    dy = torch.ones_like(x)
    monkeypatch.setattr(runtime, "multiprocessors", lambda _: 1)
    _, _, db = backward(x, None, dy)
    assert (db == n_rows).all()


@pytest.mark.usefixtures("_path")
def test_nans_and_infinities_stay_in_their_rows():
    x = draw(6, 700)
    x[1, 5] = float("nan")
    x[3, 699] = float("inf")
    y, expected = layer_norm(x, 700), F.layer_norm(x, (700,))
    assert torch.equal(y.isnan(), expected.isnan())
    assert torch.isfinite(y[[0, 2, 4, 5]]).all()


@pytest.mark.usefixtures("_path")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [3.0, 1000.1, -0.3, 1e-3])
@pytest.mark.parametrize("n_cols", [300, 1000])
def test_constant_rows_are_zero(n_cols, value, dtype):
    """Their variance is 0, and eps keeps 1 / sqrt(0) away; a sum of equal numbers is rounded."""
    x = torch.full((4, n_cols), value, device=DEVICE).to(dtype)
    bias = draw(n_cols)
    assert (layer_norm(x, n_cols) == 0).all()
    assert torch.equal(layer_norm(x, n_cols, None, bias), bias.to(dtype).expand(4, n_cols))


LIMITS = [33, 768, 1025, 1280, 1793, 2049, 6144, 8191, 8192, 8193, 12_289, 16_383, 16_384, 16_385]
"""Lengths beside those at which a rule of tuned.py changes; odd ones are never packed."""

CONSTANTS = [1000.3, 65_504.0, -0.3337]
"""Numbers whose last bits are set in float16: a sum of many of them needs more bits than 24."""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n_cols", LIMITS)
def test_constant_rows_are_zero_at_every_length_where_a_rule_changes(n_cols, dtype):
    x = torch.tensor(CONSTANTS, device=DEVICE).to(dtype)[:, None].repeat(1, n_cols)
    bias = draw(n_cols, dtype=dtype)
    assert (layer_norm(x, n_cols) == 0).all()
    assert torch.equal(layer_norm(x, n_cols, None, bias), bias.expand_as(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n_cols", [8193, 9000, 16_383])
def test_constant_rows_that_are_looped_over_are_zero(n_cols, dtype):
    x = torch.tensor(CONSTANTS, device=DEVICE).to(dtype)[:, None].repeat(1, n_cols)
    with runtime.launching_on(x):
        y, mean, _ = forwards._forward(x, None, None, 1e-5, looping=True)
    assert torch.equal(mean, x[:, 0].float())
    assert (y == 0).all()


def test_constant_rows_that_begin_at_an_odd_offset_are_zero():
    """Such rows are not packed either: they are whole up to 16,384 numbers, and then split."""
    for n_cols in (8194, 16_384, 16_386):
        values = torch.tensor(CONSTANTS, device=DEVICE).half().repeat_interleave(n_cols)
        x = torch.cat([values[:1], values])[1:].view(len(CONSTANTS), n_cols)
        assert (layer_norm(x, n_cols) == 0).all()


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("n_cols", [8191, 8192, 8193, 16_383, 16_384, 16_385])
def test_a_large_mean_of_16_bits_at_every_length_where_a_rule_changes(n_cols, dtype):
    """What the mean loses would be as much as the deviation of a row of which one number differs.

    PyTorch on the CPU has no right digit here, so the yardstick is the truth rounded once.
    """
    x = torch.full((3, n_cols), 65_000.0, device=DEVICE).to(dtype)
    x[0, -1] -= 512
    x[1, n_cols // 2] -= 1024
    x[2] = (512 * torch.randn(n_cols, device=DEVICE) + 50_000).to(dtype)
    truth = reference.layer_norm(x, 1)
    assert_close(layer_norm(x, n_cols), truth, truth.to(dtype))


@pytest.mark.usefixtures("_path")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [1000.3, 1e30, 1e37, 3e38])
@pytest.mark.parametrize("n_cols", [300, 1100])
def test_the_gradients_of_equal_numbers_do_not_depend_on_how_large_they_are(n_cols, value, dtype):
    """Past the end of a row x is 0, so that its distance from the mean times rstd is infinite."""
    (weight, bias), dy = parameters(n_cols, dtype), draw(4, n_cols, dtype=dtype)
    gradients = []
    for filled in (1.0, value):
        x = torch.full((4, n_cols), filled, device=DEVICE).to(dtype)
        leaves = [t.detach().requires_grad_() for t in (x, weight, bias)]
        y = layer_norm(leaves[0], n_cols, *leaves[1:])
        gradients.append(torch.autograd.grad(y, leaves, dy))
    assert all(map(torch.equal, *gradients))
    assert gradients[1][0].abs().max() > 0
    assert (gradients[1][1] == 0).all()


@pytest.mark.usefixtures("_path")
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nans_and_infinities_show_in_the_gradient_of_their_row_alone(value):
    for where in ("x", "dy"):
        x, dy, weight = draw(4, 300), draw(4, 300), draw(300)
        {"x": x, "dy": dy}[where][2, 7] = value
        x.requires_grad_()
        (dx,) = torch.autograd.grad(layer_norm(x, 300, weight), x, dy)
        assert not torch.isfinite(dx[2]).any()
        assert torch.isfinite(dx[[0, 1, 3]]).all()


@pytest.mark.usefixtures("_path")
@pytest.mark.parametrize("n_cols", [257, 1000])
def test_a_mean_of_a_million_beside_a_deviation_of_one(n_cols):
    """Neighbours are 1/16 apart there, and a mean is rounded to one of them, and so was that of a
    part: together by ``rounded``, which the variance of many numbers hardly feels. All else is
    exact as near 0."""
    rounded = 1.01 / 16
    x = torch.randn(5, n_cols, device=DEVICE) + 1e6
    with runtime.launching_on(x):
        y, mean, rstd = forwards._forward(x, None, None, 1e-5)
    deviation = x.double() - mean.double()[:, None]
    exact = (x.double().var(1, correction=0) + 1e-5).rsqrt()
    assert (deviation.mean(1).abs() <= rounded).all()
    assert ((rstd / exact - 1).abs() <= rounded**2 + 2 * rounded / n_cols**0.5).all()
    assert torch.allclose(y.double(), deviation * rstd.double()[:, None], rtol=2**-22, atol=0)


LONG = [1000, 8191, 8193, 16_383, 20_000, 32_768, 50_258, 65_536, 65_537, 200_000, 600_000]


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n_cols", LONG)
def test_long_constant_rows_are_zero(n_cols, dtype):
    x = torch.full((3, n_cols), 1000.1, device=DEVICE).to(dtype)
    assert (layer_norm(x, n_cols) == 0).all()


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n_cols", LONG)
def test_long_rows_whose_squares_overflow(n_cols, dtype):
    x = (1e30 * torch.randn(3, n_cols, device=DEVICE)).to(dtype)
    x[1], x[2] = x[1] * 1e-30, 1e30
    truth = reference.layer_norm(x[:2], 1)
    assert_close(layer_norm(x, n_cols)[:2], truth, truth.to(dtype))
    assert (layer_norm(x, n_cols)[2] == 0).all()


@pytest.mark.usefixtures("_path")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("magnitude", [1e19, 1e25, 1e35, 3e37])
def test_squares_that_overflow_do_not_make_a_row_zero(magnitude, dtype):
    """PyTorch's own result is 0 or NaN here, so the yardstick is the truth rounded once."""
    x = (magnitude * (torch.randn(5, 700, device=DEVICE) + 3)).to(dtype)
    x[1] = torch.randn(700, device=DEVICE).to(dtype)  # an ordinary row among them
    weight = draw(700)
    y, truth = layer_norm(x, 700, weight), reference.layer_norm(x, 1, weight)
    for row in range(5):
        assert_close(y[row], truth[row], truth[row].to(dtype))


@pytest.mark.parametrize("seed", range(3))
def test_a_thousand_equal_squares_that_overflow_round_as_few_do(seed):
    """Sums of equal numbers round the same way each time, so that what is lost adds up."""
    torch.manual_seed(seed)
    x = (1e20 * torch.randn(4, device=DEVICE)).repeat_interleave(32_000)[None]
    with runtime.launching_on(x):
        _, _, rstd = forwards._forward(x, None, None, 1e-5, looping=True)
    truth = x.double().var(1, correction=0).rsqrt()
    assert ((rstd - truth).abs() <= 8 * 2**-24 * truth).all()  # the mean, a root, a division, sums


# -- properties


@pytest.mark.usefixtures("_path")
def test_properties():
    x = draw(7, 1000).requires_grad_()
    y = layer_norm(x, 1000, eps=1e-12)
    zero, one = torch.zeros(7, device=DEVICE), torch.ones(7, device=DEVICE)
    # A mean of 1000 terms around 1, each rounded to 2**-24.
    assert torch.allclose(y.mean(1), zero, atol=1e-6, rtol=0)
    assert torch.allclose(y.var(1, correction=0), one, atol=4e-6, rtol=0)
    # Adding 64 rounds x to 2**-18, and the rows have a deviation of 2.
    assert torch.allclose(layer_norm(x + 64.0, 1000, eps=1e-12), y, atol=2**-17, rtol=2**-17)
    assert torch.allclose(layer_norm(x * 4.0, 1000, eps=1e-12), y, atol=1e-6, rtol=1e-6)
    order = torch.randperm(1000, device=DEVICE)
    assert torch.allclose(layer_norm(x[:, order], 1000, eps=1e-12), y[:, order], atol=2e-6)
    # Neither a shift nor a scale of a row changes its result: dx has no part along either.
    (dx,) = torch.autograd.grad(y, x, torch.randn_like(y))
    size = dx.abs().sum(1)
    assert (dx.sum(1).abs() <= 1e-5 * size).all()
    assert ((dx * y.detach()).sum(1).abs() <= 1e-5 * size).all()


def test_the_truth_of_the_gradients_is_that_of_autograd():
    x, weight, bias = (t.double().requires_grad_() for t in (draw(4, 3, 5), draw(3, 5), draw(3, 5)))
    dy = torch.randn_like(x)
    y = F.layer_norm(x, (3, 5), weight, bias)
    expected = torch.autograd.grad(y, (x, weight, bias), dy)
    torch.testing.assert_close(reference.layer_norm(x, 2, weight, bias), y.detach())
    for ours, true in zip(reference.layer_norm_backward(x, dy, 2, weight), expected, strict=True):
        torch.testing.assert_close(ours, true)


def test_the_input_is_left_alone():
    tensors = (draw(5, 300), *parameters(300))
    before = [tensor.clone() for tensor in tensors]
    layer_norm(tensors[0], 300, *tensors[1:])
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))


# -- the two reductions


@pytest.mark.usefixtures("_path")
def test_a_gradient_that_may_come_changes_nothing():
    """Without one, mean and rstd are not stored."""
    x, weight, bias = draw(11, 300, dtype=torch.float16), draw(300), draw(300)
    y = layer_norm(x, 300, weight, bias)
    assert torch.equal(layer_norm(x.requires_grad_(), 300, weight, bias), y)


@pytest.mark.usefixtures("_path")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_both_reductions_are_the_truth(monkeypatch, reduction, dtype):
    monkeypatch.setattr(tuned, "LOCK_BUFFERS", 2)
    x, dy = draw(41, 256, dtype=dtype), draw(41, 256, dtype=dtype)
    weight = draw(256)
    _, dw, db = backward(x, weight, dy, reduction)
    _, true_dw, true_db = reference.layer_norm_backward(x, dy, 1, weight)
    _, _, their_dw, their_db = in_torch(x.float(), 1, weight, draw(256), 1e-5, dy)
    assert_close(dw, true_dw, their_dw, SUMS_FACTOR)
    assert_close(db, true_db, their_db, SUMS_FACTOR)


@pytest.mark.usefixtures("_path")
@pytest.mark.parametrize("n_cols", [256, 500])
def test_two_runs_of_backward_are_equal_bit_by_bit(n_cols):
    x, dy = draw(300, n_cols, dtype=torch.float16), draw(300, n_cols, dtype=torch.float16)
    if runtime.INTERPRETED:
        x, dy = x[:30], dy[:30]
    weight = draw(n_cols)
    first, second = backward(x, weight, dy), backward(x, weight, dy)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("n_programs", [1, 3, 50])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_any_number_of_programs(reduction, n_programs):
    x, dy, weight = draw(23, 100), draw(23, 100), draw(100)
    _, dw, db = backward(x, weight, dy, reduction, n_programs=n_programs)
    _, true_dw, true_db = reference.layer_norm_backward(x, dy, 1, weight)
    assert_within(dw, true_dw, true_dw.float(), factor=8)
    assert_within(db, true_db, true_db.float(), factor=8)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("n_cols", "dtype"),
    [(512, DTYPES[0]), (4096, DTYPES[0]), (16384, DTYPES[0]), (16384, DTYPES[1])],
)
def test_the_lock_loses_nothing_in_a_thousand_runs(monkeypatch, n_cols, dtype):
    """Sums of small integers are exact in any order: one lost addition would show."""
    monkeypatch.setattr(tuned, "LOCK_BUFFERS", 4)
    x = draw(4096, n_cols, dtype=dtype)
    dy = torch.randint(-8, 9, (4096, n_cols), device=DEVICE).to(dtype)
    expected = dy.float().sum(0)
    for _ in range(1000):
        _, _, db = backward(x, None, dy, "lock", n_programs=1024)
        assert torch.equal(db, expected)


# -- errors

ONES = torch.ones(3, 4, device=DEVICE)
ERRORS = {
    "x is a list": (lambda: layer_norm([1.0], 1), TypeError, "x must be a torch.Tensor"),
    "x is integer": (
        lambda: layer_norm(ONES.int(), 4),
        TypeError,
        "float16 or bfloat16, got int32",
    ),
    "shape is a float": (lambda: layer_norm(ONES, 4.0), TypeError, "normalized_shape must be an"),
    "shape holds a float": (lambda: layer_norm(ONES, (3, 4.0)), TypeError, r"got 4.0 \(float\)"),
    "shape is empty": (lambda: layer_norm(ONES, ()), ValueError, r"at least 1, got \(\)"),
    "a size of zero": (lambda: layer_norm(ONES[:, :0], 0), ValueError, r"at least 1, got \(0,\)"),
    "a negative size": (lambda: layer_norm(ONES, -4), ValueError, r"at least 1, got \(-4,\)"),
    "another size": (
        lambda: layer_norm(ONES, 3),
        ValueError,
        r"x must end with .*\(3,\), but has shape \(3, 4\): pass the sizes of its last",
    ),
    "too many sizes": (lambda: layer_norm(ONES, (2, 3, 4)), ValueError, "x must end with"),
    "a scalar": (lambda: layer_norm(ONES[0, 0], 1), ValueError, "x must end with"),
    "weight is a list": (lambda: layer_norm(ONES, 4, [1.0]), TypeError, "weight must be a torch"),
    "weight is double": (
        lambda: layer_norm(ONES, 4, ONES[0].double()),
        TypeError,
        r"weight must be float32.*got float64: pass weight.to\(torch.float32\)",
    ),
    "weight has another shape": (
        lambda: layer_norm(ONES, 4, ONES),
        ValueError,
        r"weight must have the normalized shape, \(4,\), got \(3, 4\)",
    ),
    "bias has another shape": (
        lambda: layer_norm(ONES, (3, 4), ONES, ONES[0]),
        ValueError,
        r"bias must have the normalized shape, \(3, 4\), got \(4,\)",
    ),
    "eps is text": (lambda: layer_norm(ONES, 4, eps="0"), TypeError, "eps must be a number"),
    "eps is negative": (
        lambda: layer_norm(ONES, 4, eps=-1.0),
        ValueError,
        "eps must lie in .*, got -1",
    ),
    "eps is too large": (lambda: layer_norm(ONES, 4, eps=1e300), ValueError, "got 1e.300"),
    "out_dtype is double": (
        lambda: layer_norm(ONES, 4, out_dtype=torch.float64),
        TypeError,
        "out_dtype must be float32, float16 or bfloat16, or None, got torch.float64",
    ),
    "out_dtype is text": (
        lambda: layer_norm(ONES, 4, out_dtype="half"),
        TypeError,
        r"or None, got 'half' \(str\): pass torch.bfloat16",
    ),
    "eps is NaN": (lambda: layer_norm(ONES, 4, eps=float("nan")), ValueError, "got nan"),
}


@pytest.mark.parametrize(("call", "kind", "message"), ERRORS.values(), ids=ERRORS)
def test_errors_say_what_came_and_what_to_pass(monkeypatch, call, kind, message):
    monkeypatch.setattr(operator, "_forward", lambda *_, **__: pytest.fail("a kernel was launched"))
    with pytest.raises(kind, match=message):
        call()


@pytest.mark.usefixtures("gpu")
def test_a_tensor_on_the_cpu_is_refused_where_kernels_run_on_a_gpu():
    with pytest.raises(ValueError, match=r"x is on cpu.*pass x\.cuda\(\)"):
        layer_norm(torch.ones(3, 4), 4)
    with pytest.raises(ValueError, match=r"weight is on cpu.*pass weight\.cuda\(\)"):
        layer_norm(ONES, 4, torch.ones(4))


# -- what only a GPU can show


@pytest.mark.usefixtures("gpu")
def test_more_than_2_to_the_31_elements():
    x = draw(2**19 + 3, 4096, dtype=torch.float16).requires_grad_()
    weight, bias = (t.requires_grad_() for t in parameters(4096, torch.float16))
    dy = torch.randn_like(x)
    y = layer_norm(x, 4096, weight, bias)
    dx, _, db = torch.autograd.grad(y, (x, weight, bias), dy)
    for rows in (slice(0, 3), slice(2**19 - 3, None)):
        args = (x.detach()[rows], 1, weight, bias, 1e-5, dy[rows])
        their_y, their_dx, *_ = in_torch(*args)
        assert_close(y[rows], reference.layer_norm(*args[:4]), their_y)
        assert_close(
            dx[rows], reference.layer_norm_backward(args[0], dy[rows], 1, weight)[0], their_dx
        )
    exact = sum(piece.double().sum(0) for piece in dy.split(2**16))
    assert_close(db, exact, exact.half())


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("n_cols", [4096, 16384, 65536])
def test_results_agree_in_every_run(n_cols):
    """A race between programs would show as a difference between runs."""
    x, dy = (draw(300, n_cols, dtype=torch.bfloat16) for _ in range(2))
    weight = draw(n_cols)
    first, first_y = backward(x, weight, dy), layer_norm(x, n_cols, weight)
    for _ in range(1000):
        assert torch.equal(layer_norm(x, n_cols, weight), first_y)
        assert all(map(torch.equal, backward(x, weight, dy), first))
