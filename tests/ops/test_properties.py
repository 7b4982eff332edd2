"""Every operator against float64 truth, on whatever Hypothesis draws.

Each property takes a case of :mod:`strategies`, whose numbers are huge or tiny, far from zero,
partly infinite, and lie in memory in every way that PyTorch knows. A finding becomes an example.

**What may differ.** Every element has a bound of its own, made of the truth and of the roundings
that an operator cannot avoid. It reads what is stored, so that neither a shift nor a magnitude of x
is an excuse by itself:

    computing in float32   FEW units in the last place of each term that is added
    rounding the result    half a unit in the last place of the dtype, or of its smallest number
    what is kept           y of softmax, out of attention and its weights are rounded to the dtype
                           before they are used again, and so PyTorch does
    the mean               of layer norm is a float32: x - mean errs by MEAN units of the mean
    the means of parts     of a row, where layer norm merges them, are float32 too: the mean and the
                           variance err by what is derived at ``off_by_parts``

A bound of that kind is zero where the truth is and small where the truth is small, so that no row
hides behind a larger one. Second gradients of composed functions have too many roundings to count:
those are compared with PyTorch's own error in the same dtype.
"""

import sys
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings

from kernelbook import (
    attention,
    attention_varlen,
    dropout,
    layer_norm,
    masked_dropout,
    quantize,
    reference,
    runtime,
    seeded_dropout,
    softmax,
    weighted_sum,
)
from kernelbook.ops import weighted_sum as weighted_sum_module
from kernelbook.ops.attention import decoding
from kernelbook.ops.launch import forget
from kernelbook.ops.layer_norm import tuned as layer_norm_tuned
from kernelbook.ops.softmax import tuned as softmax_tuned

sys.path.insert(0, str(Path(__file__).parents[1]))
import strategies as draw
from strategies import (
    Attention,
    AttentionVarlen,
    Composed,
    Dropout,
    LayerNorm,
    Numbers,
    Quantize,
    Softmax,
    WeightedSum,
)
from test_weighted_sum import SMALL

dropout_module = sys.modules["kernelbook.ops.dropout"]  # the function has the name of its module

EPS = torch.finfo(torch.float32).eps

FEW = 16
"""Units in the last place of float32 that a sum may lose, over all its terms, and an exponential, a
division and the products around it. A tree of a million terms loses 20 half units at worst."""

MEAN = 0.5
"""Units in the last place of the mean that x - mean may lose: what rounding it once costs."""


def mixed(seed: int, shape, dtype: torch.dtype, mean: float = 1.0) -> torch.Tensor:
    """Draw normal numbers around a mean: without one, a sum that loses a part hardly changes.

    They are others than those of :class:`Numbers` with the same seed.
    """
    generator = torch.Generator(runtime.DEVICE).manual_seed(2**31 + seed)
    draw = {"dtype": torch.float64, "device": runtime.DEVICE, "generator": generator}
    return (torch.randn(tuple(shape), **draw) + mean).to(dtype)


def rounding(truth: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What storing a number in a dtype may change: half a unit in the last place.

    The hardware's exponential gives zero for what float32 holds with fewer bits.
    """
    info = torch.finfo(dtype)
    smallest = info.smallest_normal * info.eps if dtype == torch.float16 else info.smallest_normal
    return (truth.abs() * (info.eps / 2) + smallest).nan_to_num(posinf=0.0)


def assert_within(what: str, ours: torch.Tensor, truth: torch.Tensor, bound: torch.Tensor) -> None:
    """Assert |ours - truth| <= bound and the rounding, element by element.

    NaN and infinities are where the truth has them, or where it is too large for the dtype.
    """
    assert ours.shape == truth.shape, f"{what} has shape {tuple(ours.shape)}"
    assert ours.device == truth.device
    dtype, ours = ours.dtype, ours.detach().double()
    bound = (bound + rounding(truth, dtype)).expand(truth.shape)
    wrong = ~((ours - truth).abs() <= bound)
    wrong &= (ours != truth) & ~(ours.isnan() & truth.isnan())
    wrong &= ~(ours.isinf() & (truth.abs() + bound > torch.finfo(dtype).max) & (ours * truth > 0))
    if wrong.any():
        excess = ((ours - truth).abs() / bound).nan_to_num(nan=torch.inf)
        worst = torch.where(wrong, excess, -1.0).argmax()
        at = tuple(int(i) for i in torch.unravel_index(worst, truth.shape))
        raise AssertionError(
            f"{what} is wrong in {int(wrong.sum())} of {wrong.numel()} places: at {at} it is "
            f"{ours[at]:.9g}, the truth {truth[at]:.9g}, and the bound on the error {bound[at]:.3g}"
        )


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def noise(terms: torch.Tensor, errors: torch.Tensor, dim: int, keepdim: bool = True):
    """What a sum over ``dim`` loses when each term is rounded by itself.

    Roundings of equal terms are equal, and those of different ones independent: then the sum of
    their squares counts, and six times its root is as good as never.
    """
    together = (errors / terms.abs().clamp(min=1e-300)).amax(dim, keepdim=True).clamp(max=1.0)
    together = together * terms.sum(dim, keepdim=True).abs()
    apart = 6 * errors.square().sum(dim, keepdim=True).sqrt()
    return together + apart if keepdim else (together + apart).squeeze(dim)


@contextmanager
def changed(module, constants: dict):
    """Give constants of a module other values for a while."""
    before = {name: getattr(module, name) for name in constants}
    try:
        for name, value in constants.items():
            setattr(module, name, value)
        forget()
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)
        forget()


SOFTMAX_PATHS = {
    "as it is": {},
    "packed": {"TILE_COLS": 31},
    "split": {"TILE_COLS": 31, "WIDE_BYTES": 127, "PART_COLS": (32, 32)},
}
LAYER_NORM_PATHS = {"as it is": {}}
LAYER_NORM_PATHS["packed"] = {"TILE_COLS": 31, "BWD_ROW_COLS": 31, "BWD_PACKED_COLS": 256}
LAYER_NORM_PATHS["split"] = LAYER_NORM_PATHS["packed"] | {
    "TILE_BYTES": 127,
    "PACKED_COLS": 0,
    "FORWARD_PARTS": {
        (size, 2**31): layer_norm_tuned.Part(cols=32, rows=2, registers=None) for size in (2, 4)
    },
    "BWD_PACKED_COLS": 0,
    "BWD_PART_COLS": {2: 32, 4: 32},
}
LAYER_NORM_PATHS["loop"] = LAYER_NORM_PATHS["split"] | {
    "MAX_PARTS": 0,
    "LOOP_COLS": 32,
    "COLUMN_COLS": 32,
}
ATTENTION_PATHS = {
    "as it is": {},
    "decoding": {"FEWEST_KEYS": 1, "FEWEST_TILES": 1, "KEYS_PER_QUERY": 1},
}
WEIGHTED_SUM_PATHS = {"as it is": {}, "small": SMALL}


def on_path(case):
    """Open the case's way through the dispatch to its short rows."""
    if isinstance(case, Softmax) or (isinstance(case, Composed) and case.how in TWICE["softmax"]):
        return changed(softmax_tuned, SOFTMAX_PATHS[case.path])
    if isinstance(case, WeightedSum) or (
        isinstance(case, Composed) and case.how in TWICE["weighted_sum"]
    ):
        return changed(weighted_sum_module, WEIGHTED_SUM_PATHS[case.path])
    if isinstance(case, Attention):
        return changed(decoding, ATTENTION_PATHS[case.path])
    return changed(layer_norm_tuned, LAYER_NORM_PATHS[case.path])


# -- the weighted sum


def check_weighted_sum(case: WeightedSum) -> None:
    x, weight = (
        n.make().detach().requires_grad_(need)
        for n, need in zip((case.x, case.weight), case.needs, strict=True)
    )
    before = [t.detach().clone() for t in (x, weight)]
    with on_path(case):
        y = weighted_sum(x, weight)
        dy = case.dy.make().to(y.dtype) if case.dy else mixed(1, y.shape, y.dtype)
        wanted = [t for t in (x, weight) if t.requires_grad]
        grads = iter(torch.autograd.grad(y, wanted, dy) if wanted else ())
    assert all(same_bits(t.detach(), b) for t, b in zip((x, weight), before, strict=True))
    assert y.dtype == torch.promote_types(x.dtype, weight.dtype)

    terms = (x.detach().double() * weight.detach().double()).abs().sum(-1)
    bound = EPS * FEW * terms.nan_to_num(posinf=0.0)
    assert_within("y", y, reference.weighted_sum(x, weight), bound)
    true_dx, true_dw = reference.weighted_sum_backward(x, weight, dy)
    if case.needs[0]:
        assert_within("dx", next(grads), true_dx, EPS * 2 * true_dx.abs().nan_to_num(posinf=0.0))
    if case.needs[1]:
        terms = (dy.double().unsqueeze(-1) * x.detach().double()).abs()
        bound = EPS * FEW * terms.reshape(y.numel(), len(weight)).sum(0).nan_to_num(posinf=0.0)
        assert_within("dw", next(grads), true_dw, bound)


# -- softmax


def check_softmax(case: Softmax) -> None:
    x = case.x.make(dim=case.dim).detach().requires_grad_()
    before = x.detach().clone()
    dy = case.dy.make(dim=case.dim) if case.dy else mixed(1, x.shape, x.dtype)
    dim = case.dim
    with on_path(case):
        y = softmax(x, dim, algorithm=case.algorithm)
        (dx,) = torch.autograd.grad(y, x, dy, retain_graph=True)
        (dx_once_more,) = torch.autograd.grad(y, x, dy, create_graph=True)
    assert same_bits(x.detach(), before), "x was changed"
    assert y.dtype == dx.dtype == dx_once_more.dtype == x.dtype

    # An exponent x - max errs by its own last place, and so does what is made of it.
    true = reference.softmax(x, dim)
    if not x.numel():
        assert y.shape == dx.shape == dx_once_more.shape == x.shape
        return
    stored = x.detach().double()
    below = (stored.amax(dim, keepdim=True) - stored).nan_to_num(nan=0.0, posinf=0.0)
    assert_within("y", y, true, true * EPS * (FEW + 4 * below))

    dy = dy.double()
    error = rounding(true, x.dtype) + true * EPS * FEW
    terms = true * dy
    total = terms.sum(dim, keepdim=True)
    lost = noise(terms, error * dy.abs(), dim)
    lost = lost + EPS * FEW * terms.abs().sum(dim, keepdim=True)
    bound = error * (dy - total).abs() + true * lost + EPS * FEW * true * (dy.abs() + total.abs())
    true_dx = reference.softmax_backward(x, dy, dim)
    assert_within("dx", dx, true_dx, bound)
    assert_within("dx under create_graph", dx_once_more, true_dx, bound)
    assert_as_precise(dx_once_more, dx, true_dx)


def assert_as_precise(under_graph, plain, truth) -> None:
    """Assert that 16 bits are not what a gradient is computed in because it will be differentiated.

    Then its errors are larger on the average, though each is within its bound.
    """
    finite = truth.isfinite() & plain.isfinite()
    if plain.dtype == torch.float32 or finite.sum() < 200:
        return  # of fewer numbers, the mean of their errors is chance
    ours, theirs = ((dx.double() - truth)[finite].norm() for dx in (under_graph, plain))
    assert ours <= 1.15 * theirs, f"under create_graph dx errs by {ours:.3g}, else by {theirs:.3g}"


# -- layer norm


def check_layer_norm(case: LayerNorm) -> None:
    n_dims, eps = case.n_dims, case.eps
    drawn = (case.x.make(n_dims), *(n and n.make() for n in (case.weight, case.bias)))
    x, weight, bias = (
        t if t is None else t.detach().requires_grad_(need)
        for t, need in zip(drawn, case.needs, strict=True)
    )
    given = [t for t in (x, weight, bias) if t is not None]
    before = [t.detach().clone() for t in given]
    dy = case.dy.make(n_dims) if case.dy else mixed(1, x.shape, x.dtype)
    shape = x.shape[x.ndim - n_dims :]
    with on_path(case):
        part_cols = columns_of_a_part(x, n_dims)
        out_dtype = None if dy.dtype == x.dtype else dy.dtype
        y = layer_norm(x, shape, weight, bias, eps, out_dtype=out_dtype)
        wanted = [t for t in given if t.requires_grad]
        grads = torch.autograd.grad(y, wanted, dy, retain_graph=True) if wanted else ()
        again = torch.autograd.grad(y, wanted, dy, create_graph=True) if wanted else ()
    assert all(same_bits(t.detach(), b) for t, b in zip(given, before, strict=True))
    dtypes = [t.dtype for t in wanted]
    assert [g.dtype for g in grads] == [g.dtype for g in again] == dtypes
    assert y.dtype == dy.dtype

    if not x.numel():
        assert y.shape == x.shape
        assert not any(g.any() for g in (*grads, *again))
        return
    last = tuple(range(-n_dims, 0))
    w = torch.ones((), dtype=torch.float64, device=x.device) if weight is None else weight.double()
    w = w.detach()
    stored = x.detach().double()
    largest = stored.amax(last, keepdim=True)
    constant = (largest == stored.amin(last, keepdim=True)) & largest.isfinite()
    true = reference.layer_norm(x, n_dims, weight, bias, eps)
    mean = stored.mean(last, keepdim=True)
    deviation = torch.where(constant, 0.0, stored - mean)
    rstd = (deviation.square().mean(last, keepdim=True) + eps).rsqrt()
    xhat = deviation * rstd
    # Where float32 cannot tell the mean from its neighbours, as measured by the spread, no digit of
    # xhat is certain; a row of equal numbers must be zero nonetheless.
    by_parts = off_by_parts(stored, mean, n_dims, part_cols)
    mean_by_parts, variance_by_parts = (torch.where(constant, 0.0, by) for by in by_parts)
    off = (MEAN * EPS * mean.abs() + mean_by_parts) * rstd
    off = torch.where(constant, EPS * off, torch.where(off > 0.1, torch.inf, off))
    off = off + EPS * FEW * (deviation.abs().mean(last, keepdim=True) * rstd)
    rstd_off = off.square() + 0.5 * variance_by_parts * rstd.square() + EPS * FEW
    xhat_off = off + xhat.abs() * rstd_off
    offset = torch.zeros_like(w) if bias is None else bias.detach().double()
    true = torch.where(constant, offset, true)  # float64 has its own rounding to hide
    bound = w.abs() * xhat_off + EPS * 4 * (offset.abs() + (w * xhat).abs())
    assert_within("y", y, true, torch.where(constant, 0.0, bound))

    dy = dy.double()
    wdy = w * dy
    c1 = (xhat * wdy).mean(last, keepdim=True)
    c2 = wdy.mean(last, keepdim=True)
    c1_off = (wdy.abs() * (xhat_off + EPS * FEW * xhat.abs())).mean(last, keepdim=True)
    c2_off = EPS * FEW * wdy.abs().mean(last, keepdim=True)
    inner_off = xhat_off * c1.abs() + (xhat.abs() + xhat_off) * c1_off + c2_off
    inner_off = inner_off + EPS * 4 * (wdy.abs() + (xhat * c1).abs() + c2.abs())
    true_dx = (wdy - c2 - xhat * c1) * rstd
    truth = {"dx": (true_dx, rstd * inner_off + true_dx.abs() * rstd_off)}
    dw_off = dy.abs() * (xhat_off + EPS * FEW * xhat.abs())
    if weight is not None:
        truth["dw"] = over_rows(dy * xhat, n_dims), over_rows(dw_off, n_dims)
    if bias is not None:
        truth["db"] = over_rows(dy, n_dims), EPS * FEW * over_rows(dy.abs(), n_dims)
    truth = {
        name: pair for (name, pair), t in zip(truth.items(), given, strict=True) if t.requires_grad
    }
    for suffix, found in (("", grads), (" under create_graph", again)):
        for ours, (name, (true, bound)) in zip(found, truth.items(), strict=True):
            bound = torch.where(bound.isnan() & ~true.isnan(), torch.inf, bound)
            assert_within(name + suffix, ours, true, bound)


def columns_of_a_part(x: torch.Tensor, n_dims: int) -> int | None:
    """Return the columns of the parts whose moments layer norm merges; None if it may have none."""
    n_cols = x.shape[x.ndim - n_dims :].numel()
    if n_cols > layer_norm_tuned.MAX_PARTS * layer_norm_tuned.MAX_PART_COLS:
        return None
    if n_cols * x.itemsize <= layer_norm_tuned.TILE_BYTES:
        return None
    part = layer_norm_tuned.forward_part(n_cols, x.itemsize)
    return layer_norm_tuned.split(n_cols, part.cols)[1]


def off_by_parts(stored: torch.Tensor, mean: torch.Tensor, n_dims: int, part_cols: int | None):
    """What the mean and the variance of a row err by because the means of its parts are rounded.

    Part i has n_i of the N numbers, a mean m_i, which is rounded by e_i, at most MEAN units of it,
    and a sum of squared deviations from m_i that is as exact as any sum. From the rounded means

        mean      =  sum of n_i (m_i + e_i) / N
                  =  the mean + e,   e = sum of n_i e_i / N

        variance  =  sum of (m2_i + n_i (m_i + e_i - mean - e)**2) / N
                  =  the variance + sum of n_i (2 (m_i - mean) e_i + (e_i - e)**2) / N

    where e is gone from the middle term, because the n_i (m_i - mean) add up to 0. That term is of
    first order: the variance of a whole row about a rounded mean has none, for the same reason.
    """
    if part_cols is None:
        return torch.zeros_like(mean), torch.zeros_like(mean)
    means, counts = [], []
    for part in stored.flatten(-n_dims).split(part_cols, -1):
        means.append(part.mean(-1))
        counts.append(part.shape[-1])
    means = torch.stack(means, -1).reshape(*mean.shape[:-n_dims], *[1] * (n_dims - 1), -1)
    share = torch.tensor(counts, device=mean.device).double() / sum(counts)
    rounded_by = MEAN * EPS * means.abs()
    first_order = 2 * (share * (means - mean).abs() * rounded_by).sum(-1, keepdim=True)
    second_order = (share * rounded_by.square()).sum(-1, keepdim=True)
    return (share * rounded_by).sum(-1, keepdim=True), first_order + second_order


def over_rows(x: torch.Tensor, n_dims: int) -> torch.Tensor:
    """Sum over all dimensions but the last, of which there may be none."""
    return x.sum(tuple(range(x.ndim - n_dims))) if x.ndim > n_dims else x


# -- functions of functions


def _weight_of(x):
    return x.mean(tuple(range(x.ndim - 1))) + 1


TWICE = {
    "weighted_sum": {  # of positive terms, which do not cancel, and whose sum float16 holds
        "weighted sum of squares": lambda op, x: op(x * x, _weight_of(x * x) / x.shape[-1] ** 0.5),
        "its root": lambda op, x: op(x * x + 1, _weight_of(x * x) / x.shape[-1] ** 0.5).sqrt(),
    },
    "softmax": {
        "softmax": lambda op, x: op(x, -1),
        "softmax of softmax": lambda op, x: op(8 * op(x, -1), 0),
        "softmax times x": lambda op, x: op(x, -1) * x,
        "softmax of sin": lambda op, x: op(3 * x.sin(), -1),
    },
    "layer_norm": {
        "layer norm": lambda op, x: op(x, x.shape[-1:]),
        "weight from x": lambda op, x: op(x, x.shape[-1:], _weight_of(x)),
        "bias from x": lambda op, x: op(x, x.shape[-1:], None, _weight_of(x)),
        "both from x": lambda op, x: op(x, x.shape[-1:], _weight_of(x), _weight_of(x).sin()),
        "layer norm of layer norm": lambda op, x: op(op(x, x.shape[-1:]).sin(), x.shape[-2:]),
    },
}


def layer_norm_in_torch(x, shape, weight=None, bias=None):
    """PyTorch's, with a weight: without one, but with a bias, it has no second gradient."""
    weight = torch.ones(shape, dtype=x.dtype, device=x.device) if weight is None else weight
    return F.layer_norm(x, shape, weight, bias)


OPERATORS = {
    "weighted_sum": (weighted_sum, lambda x, weight: (x * weight).sum(-1)),
    "softmax": (softmax, torch.softmax),
    "layer_norm": (layer_norm, layer_norm_in_torch),
}


def derivatives(function, leaf, hooked):
    """The value, the gradient and the second gradient of a function, and what hooks on x saw."""
    seen = []

    def fresh():
        x = leaf.detach().requires_grad_()
        if not hooked:
            return x, x
        between = x * 1
        between.retain_grad()
        between.register_hook(lambda dx: seen.append(dx.detach()) or None)
        return x, between

    start, x = fresh()
    y = function(x)
    weights = mixed(1, y.shape, y.dtype, mean=0.0)
    (dx,) = torch.autograd.grad(y, start, weights, create_graph=True)
    (ddx,) = torch.autograd.grad((dx * mixed(2, x.shape, x.dtype, mean=0.0)).sum(), start)
    start, x = fresh()
    function(x).backward(weights)
    kept = [x.grad.detach()] if hooked else []
    return [y.detach(), dx.detach(), ddx, start.grad.detach(), *kept, *seen]


def check_composed(case: Composed) -> None:
    operator = next(name for name, functions in TWICE.items() if case.how in functions)
    ours, theirs = OPERATORS[operator]
    compose = TWICE[operator][case.how]
    x = case.x.make()
    with on_path(case):
        got = derivatives(lambda x: compose(ours, x), x, case.hooked)
    truth = derivatives(lambda x: compose(theirs, x), x.double(), case.hooked)
    in_torch = derivatives(lambda x: compose(theirs, x), x, case.hooked)
    assert len(got) == len(truth), "a hook on x was not called as often as PyTorch calls it"
    for index, (result, true, their) in enumerate(zip(got, truth, in_torch, strict=True)):
        what = ("y", "dx", "ddx", "dx of backward", "what a hook saw")[min(index, 4)]
        assert result.dtype == x.dtype
        # A line has the largest element near it as its unit. A gradient in which all cancels is
        # judged by the tensor's, less the digits that float32 has more.
        unit = true.abs().amax(-1, keepdim=True)
        unit = torch.maximum(unit, true.abs().amax() * 2**-6)
        error = (their.double() - true).abs() / unit
        error = torch.where(error.isfinite(), error, 0.0).amax()  # PyTorch overflows in float16
        assert_within(what, result, true, TWICE_FACTOR * unit * torch.clamp(
            error, min=torch.finfo(x.dtype).eps))  # fmt: skip


TWICE_FACTOR = 8
"""A second gradient may err by eight times PyTorch's own error, in units of the row: between dx and
ddx stand a dozen roundings in either, in another order."""


# -- attention


def check_attention(case: Attention) -> None:
    operands = [n.make().detach().requires_grad_(need)
                for n, need in zip((case.q, case.k, case.v), case.needs, strict=True)]  # fmt: skip
    q, k, v = operands
    before = [t.detach().clone() for t in operands]
    options = {"is_causal": case.is_causal, "scale": case.scale, "window": case.window}
    options |= {"enable_gqa": True, "return_lse": True, "deterministic": case.deterministic}
    options["backend"] = case.backend
    with on_path(case):
        out, lse = attention(q, k, v, **options)
    do = mixed(case.seed, out.shape, out.dtype)
    dlse = mixed(case.seed + 1, lse.shape, lse.dtype)
    wanted = [t for t, need in zip(operands, case.needs, strict=True) if need]
    grads = iter(torch.autograd.grad((out, lse), wanted, (do, dlse)) if wanted else ())
    grads = [next(grads) if need else None for need in case.needs]
    assert all(same_bits(t.detach(), b) for t, b in zip(operands, before, strict=True))
    assert out.dtype == q.dtype
    assert lse.dtype == torch.float32
    for (name, (true, bound)), ours in zip(attention_truth(case, q, k, v, do, dlse).items(),
                                           (out, lse, *grads), strict=True):  # fmt: skip
        if ours is not None:
            assert_within(name, ours, true, bound)


def attention_truth(case, q, k, v, do, dlse):
    """Results of attention in float64, each with what its roundings may change, element by element.

    s = scale q k^T, p = softmax(s), dp = do v^T, ds = p (dp - delta + dlse).
    """
    dtype, scale = q.dtype, q.shape[-1] ** -0.5 if case.scale is None else case.scale
    group = q.shape[1] // k.shape[1]
    half = torch.finfo(dtype).eps / 2 if dtype != torch.float32 else 0.0
    q, k, v, do, dlse = (t.detach().double() for t in (q, k, v, do, dlse))
    rule = case.is_causal, case.scale
    true_out, true_lse = reference.attention(q, k, v, *rule, window=case.window)
    true_grads = [torch.zeros_like(t) for t in (q, k, v)]
    if q.numel() and k.numel():
        true_grads = reference.attention_backward(q, k, v, do, *rule, dlse, case.window)

    k, v = (t.repeat_interleave(group, dim=1) for t in (k, v))
    s = scale * q @ k.mT
    hidden, shift = torch.zeros_like(s, dtype=torch.bool), k.shape[2] - q.shape[2]
    left, right = case.window or (None, None)
    if case.is_causal:
        hidden |= torch.ones_like(hidden).triu(1 + shift)
    if left is not None:
        hidden |= torch.ones_like(hidden).tril(shift - left - 1)
    if right is not None:
        hidden |= torch.ones_like(hidden).triu(shift + right + 1)
    p = (s - true_lse.clamp(min=-1e300).unsqueeze(-1)).exp().masked_fill(hidden, 0.0)

    # A score errs by the last places of its products; its exponential errs by as much relatively,
    # and the weights of a row by twice the worst of them. In 16 bits each weight is rounded, beside
    # a largest one of about 1; float16 has no numbers below 2**-24, and float32 few below 2**-126.
    s_off = EPS * FEW * (scale * q.abs() @ k.mT.abs() + s.abs() + 1)
    keyless = s.new_zeros((*s.shape[:-1], 1))
    row_off = s_off.masked_fill(hidden, 0.0).amax(-1, keepdim=True) if s.shape[-1] else keyless
    largest = p.amax(-1, keepdim=True) if s.shape[-1] else keyless
    p_off = 2 * torch.expm1(2 * row_off.clamp(max=300)).clamp(max=1e3)
    lost = torch.finfo(torch.float32).smallest_normal
    tiny = (2.0**-24 if dtype == torch.float16 else lost) * ~hidden
    p_round = half * p + tiny * largest
    weighted = p @ v.abs()
    out_off = p_off * weighted + half * true_out.abs() + EPS * FEW * weighted
    out_off = out_off + 6 * (p_round.square() @ v.square()).sqrt()
    lse_off = row_off.squeeze(-1) + EPS * FEW * (1 + true_lse.abs().nan_to_num(posinf=0.0))
    truth = {"out": (true_out, out_off), "lse": (true_lse, lse_off)}

    dp = do @ v.mT
    delta = (do * true_out).sum(-1, keepdim=True)
    inner = dp - delta + dlse.unsqueeze(-1)
    size = dp.abs() + delta.abs() + dlse.abs().unsqueeze(-1)
    out_round = half * true_out.abs() + out_off + rounding(true_out, dtype)
    inner_off = EPS * FEW * (do.abs() @ v.abs().mT + (do * true_out).abs().sum(-1, keepdim=True))
    inner_off = inner_off + (do.abs() * out_round).sum(-1, keepdim=True) + EPS * FEW * size
    ds = p * inner
    ds_off = p * inner_off + p_off * p * inner.abs() + lost * size
    ds_round = half * ds.abs() + tiny
    dq_off = ds_off @ k.abs() + 6 * (ds_round.square() @ k.square()).sqrt()
    dq_off = dq_off + half * (ds @ k).abs() + EPS * FEW * ds.abs() @ k.abs()
    dk_off = ds_off.mT @ q.abs() + 6 * (ds_round.square().mT @ q.square()).sqrt()
    dk_off = dk_off + half * (ds.mT @ q).abs() + EPS * FEW * ds.abs().mT @ q.abs()
    dv_off = (p_off * p).mT @ do.abs() + 6 * (p_round.square().mT @ do.square()).sqrt()
    dv_off = dv_off + half * (p.mT @ do).abs() + EPS * FEW * p.mT @ do.abs()
    bounds = (scale * dq_off, scale * dk_off, dv_off)
    for name, true, bound in zip(("dq", "dk", "dv"), true_grads, bounds, strict=True):
        if name != "dq":  # query heads of a group share keys
            bound = bound.unflatten(1, (-1, group)).sum(2)
        truth[name] = true, bound
    return truth


def check_attention_varlen(case: AttentionVarlen) -> None:
    """Each sequence is attention by itself."""
    operands = [n.make().detach().requires_grad_(need)
                for n, need in zip((case.q, case.k, case.v), case.needs, strict=True)]  # fmt: skip
    before = [t.detach().clone() for t in operands]
    lengths = case.lengths_q, case.lengths_k
    options = {"dtype": torch.int32, "device": runtime.DEVICE}
    cu = [torch.tensor([0, *accumulate(n)], **options) for n in lengths]
    longest = [max(n, default=0) + case.longer for n in lengths]
    options = {"is_causal": case.is_causal, "window": case.window, "scale": case.scale}
    out, lse = attention_varlen(
        *operands, *cu, *longest, **options, enable_gqa=True, return_lse=True
    )
    do = mixed(case.seed, out.shape, out.dtype)
    dlse = mixed(case.seed + 1, lse.shape, lse.dtype)
    wanted = [t for t in operands if t.requires_grad]
    grads = iter(torch.autograd.grad((out, lse), wanted, (do, dlse)) if wanted else ())
    grads = [next(grads) if need else None for need in case.needs]
    assert all(same_bits(t.detach(), b) for t, b in zip(operands, before, strict=True))
    assert (out.dtype, lse.dtype) == (operands[0].dtype, torch.float32)

    def part(x, b, of):
        """A sequence as attention has it: (1, heads, seqlen, head_dim), or without the last."""
        if x is None:
            return None
        rows = slice(sum(lengths[of][:b]), sum(lengths[of][: b + 1]))
        return (x[:, rows] if x.ndim == 2 else x[rows].transpose(0, 1)).unsqueeze(0)

    kinds = (0, 1, 1)
    for b in range(len(case.lengths_q)):
        q, k, v = (part(x, b, of) for x, of in zip(operands, kinds, strict=True))
        found = [part(out, b, 0), part(lse, b, 0)]
        found += [part(dx, b, of) for dx, of in zip(grads, kinds, strict=True)]
        truth = attention_truth(case, q, k, v, part(do, b, 0), part(dlse, b, 0))
        for (name, (true, bound)), ours in zip(truth.items(), found, strict=True):
            if ours is not None:
                assert_within(f"{name} of sequence {b}", ours, true, bound)


# -- dropout


def check_dropout(case: Dropout) -> None:
    x = case.x.make().detach().requires_grad_()
    before = x.detach().clone()
    index = torch.arange(x.numel(), device=x.device).view(x.shape)
    keep = reference.keep_mask(index, case.p, case.seed, 7)
    seed = case.seed
    if case.in_tensor:
        seed = torch.tensor(seed, device=x.device)
    true = reference.masked_dropout(x.detach(), keep, case.p)
    slack = EPS * 2 * true.abs().nan_to_num(posinf=0.0)
    seeded, masked = seeded_dropout(x, case.p, seed), masked_dropout(x, keep, case.p)
    for y in (seeded, masked):
        assert y.dtype == x.dtype
        assert_within("y", y, true, slack)
    # One mask for forward, for its gradient, and for the gradient of that.
    dy = mixed(1, x.shape, x.dtype).requires_grad_()
    for y in (seeded, masked):
        (dx,) = torch.autograd.grad(y, x, dy, create_graph=True)
        (ddy,) = torch.autograd.grad(dx, dy, torch.ones_like(dx))
        for what, ours, of in (("dx", dx, dy.detach()), ("ddy", ddy, torch.ones_like(dx))):
            true = reference.masked_dropout(of, keep, case.p)
            assert_within(what, ours, true, EPS * 2 * true.abs())
    assert same_bits(x.detach(), before), "x was changed"


def check_dropout_by_generator(case: Dropout) -> None:
    """dropout draws its seed from torch's generator, and backward has the mask of forward."""
    x = case.x.make().detach()
    x = torch.where(x.isfinite() & (x != 0), x, 1.0).requires_grad_()
    results = []
    for _ in range(2):
        torch.manual_seed(case.seed % 2**63)
        results.append(dropout(x, case.p))
    assert same_bits(*results)
    assert dropout(x, case.p, training=False) is x
    y = results[0]
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    kept = dx != 0
    true = reference.masked_dropout(x.detach(), kept, case.p)
    assert_within("y", y, true, EPS * 2 * true.abs())
    assert_within("dx", dx, reference.masked_dropout(torch.ones_like(x), kept, case.p), 0 * true)
    # The number that is kept is binomial: eight times its deviation is as good as never.
    deviation = (x.numel() * case.p * (1 - case.p)) ** 0.5
    assert abs(int(kept.sum()) - x.numel() * (1 - case.p)) <= 8 * deviation + 1


# -- quantize

BITS = {"float8_e4m3fn": (3, -6), "float8_e5m2": (2, -14)}
"""Bits after the leading one, and the exponent of the smallest number that has them all."""


def check_quantize(case: Quantize) -> None:
    x = case.x.make()
    before = x.clone()
    dtype = getattr(torch, case.dtype)
    stored, descale = quantize(x, dtype, per=case.per, contiguous=case.contiguous)
    assert same_bits(x, before), "x was changed"
    assert stored.shape == x.shape
    assert stored.dtype == dtype
    assert descale.dtype == torch.float32
    assert descale.shape == (x.shape[:2] if case.per == "head" else ())
    if not x.numel():
        return
    x, factor = x.double(), descale.double().view(*descale.shape, *[1] * (4 - descale.ndim))
    dims = (2, 3) if case.per == "head" else (0, 1, 2, 3)
    finite = x.isfinite().all(3, keepdim=True).all(2, keepdim=True)
    finite = finite if case.per == "head" else finite.all()
    largest = x.abs().amax(dims, keepdim=True)
    result = stored.double() * factor
    assert (result.isnan() | finite).all(), "a NaN or an infinity is lost"
    assert ((stored.double() == 0) & (factor == 1) | (largest != 0)).all()
    # Rounded to so many bits, or to a multiple of the smallest number; and the division in float32.
    bits, exponent = BITS[case.dtype]
    bound = torch.maximum(x.abs() * 2.0 ** -(bits + 1), factor * 2.0 ** (exponent - bits - 1))
    assert (((result - x).abs() <= bound * (1 + 8 * EPS)) | ~finite).all()
    reached = (stored.double().abs().amax(dims, keepdim=True) == torch.finfo(dtype).max) | ~finite
    assert (reached | (largest == 0)).all(), "the largest number of the dtype is not used"


# -- subsets of gradients, and users that change the result in place


def check_in_place(case: LayerNorm | Softmax | Dropout) -> None:
    """A result changed in place gives, bit by bit, what it gives changed into a new tensor.

    Autograd may refuse, where it refuses the same change to PyTorch's own result.
    """
    changes = ((torch.relu_, torch.relu), (lambda y: y.mul_(2), lambda y: y * 2))
    for change_in_place, change in changes:
        ours, theirs, x = in_place_functions(case)
        truth = gradient_of(change, ours, x)
        try:
            found = gradient_of(change_in_place, ours, x)
        except RuntimeError:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                gradient_of(change_in_place, theirs, x)
        else:
            assert all(map(same_bits, found, truth))


def gradient_of(change, function, x):
    x = x.detach().requires_grad_()
    y = change(function(x))
    (dx,) = torch.autograd.grad(y, x, mixed(1, y.shape, y.dtype))
    return y.detach(), dx


def in_place_functions(case):
    """Return an operator, the one that PyTorch has in its place, and x."""
    if isinstance(case, Softmax):
        x = case.x.make(dim=case.dim)
        return (lambda x: softmax(x, case.dim)), (lambda x: torch.softmax(x, case.dim)), x
    if isinstance(case, Dropout):
        x = case.x.make()
        return (lambda x: seeded_dropout(x, case.p, case.seed)), (lambda x: F.dropout(x)), x
    x = case.x.make(case.n_dims)
    shape = x.shape[x.ndim - case.n_dims :]
    return (lambda x: layer_norm(x, shape)), (lambda x: F.layer_norm(x, shape)), x


# -- the tests. In CI they are the same every time; tests/fuzz.py draws the others.

settings.register_profile(
    "ci",
    derandomize=True,
    max_examples=15,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
settings.load_profile("ci")

PROPERTIES = {
    "weighted_sum": (draw.weighted_sum(), check_weighted_sum),
    "weighted_sum_composed": (
        draw.composed("weighted_sum", tuple(TWICE["weighted_sum"])),
        check_composed,
    ),
    "softmax": (draw.softmax(), check_softmax),
    "softmax_composed": (draw.composed("softmax", tuple(TWICE["softmax"])), check_composed),
    "layer_norm": (draw.layer_norm(), check_layer_norm),
    "layer_norm_composed": (
        draw.composed("layer_norm", tuple(TWICE["layer_norm"])),
        check_composed,
    ),
    "attention": (draw.attention(), check_attention),
    "attention_varlen": (draw.attention_varlen(), check_attention_varlen),
    "seeded_and_masked_dropout": (draw.dropout(), check_dropout),
    "dropout": (draw.dropout(), check_dropout_by_generator),
    "quantize": (draw.quantize(), check_quantize),
    "in_place": (draw.softmax() | draw.layer_norm() | draw.dropout(), check_in_place),
}
"""What is drawn for each property, and the property."""


@given(PROPERTIES["weighted_sum"][0])
def test_weighted_sum(case):
    check_weighted_sum(case)


@given(PROPERTIES["weighted_sum_composed"][0])
def test_functions_of_weighted_sum(case):
    check_composed(case)


@given(PROPERTIES["softmax"][0])
def test_softmax(case):
    check_softmax(case)


@given(PROPERTIES["softmax_composed"][0])
def test_functions_of_softmax(case):
    check_composed(case)


@given(PROPERTIES["layer_norm"][0])
def test_layer_norm(case):
    check_layer_norm(case)


@given(PROPERTIES["layer_norm_composed"][0])
def test_functions_of_layer_norm(case):
    check_composed(case)


@given(PROPERTIES["attention"][0])
def test_attention(case):
    check_attention(case)


@given(PROPERTIES["attention_varlen"][0])
def test_attention_varlen(case):
    check_attention_varlen(case)


@given(PROPERTIES["seeded_and_masked_dropout"][0])
def test_seeded_and_masked_dropout(case):
    check_dropout(case)


@given(PROPERTIES["dropout"][0])
def test_dropout(case):
    check_dropout_by_generator(case)


@given(PROPERTIES["quantize"][0])
def test_quantize(case):
    check_quantize(case)


@given(PROPERTIES["in_place"][0])
def test_results_may_be_changed_in_place(case):
    check_in_place(case)


# -- what was found once: seeds and sizes as they failed, or the smallest that do

INF, NAN = torch.inf, torch.nan
FOUND = {
    "no columns": ("softmax", Softmax(Numbers((2, 3, 0)))),
    "nothing": ("softmax", Softmax(Numbers((0,)), 0)),
    "no columns, and rows after them": ("softmax", Softmax(Numbers((2, 0, 3)), 1)),
    "a scalar": ("softmax", Softmax(Numbers(()))),
    "far below zero, in parts": ("softmax", Softmax(Numbers((3, 90), shift=-200.0), path="split")),
    "far below zero, in parts, float16": (
        "softmax",
        Softmax(Numbers((3, 90), "float16", shift=-100.0), path="split"),
    ),
    "far below zero, in parts, bfloat16": (
        "softmax",
        Softmax(Numbers((3, 90), "bfloat16", shift=-200.0), path="split"),
    ),
    "a part of nothing but -inf": (
        "softmax",
        Softmax(Numbers((2, 128), shift=-150.0, marks=((0, 32, 64, -INF),)), path="split"),
    ),
    "a first part of nothing but -inf": (
        "softmax",
        Softmax(Numbers((2, 128), shift=-150.0, marks=((1, 0, 32, -INF),)), path="split"),
    ),
    "a row of NaN": ("softmax", Softmax(Numbers((1,), marks=((0, 0, 1, NAN),)), 0)),
    "a pending negation": ("softmax", Softmax(Numbers((3, 7), layout="negative"))),
    "create_graph in float16": ("softmax", Softmax(Numbers((4, 256), "float16"))),
    "create_graph in bfloat16": ("softmax", Softmax(Numbers((4, 256), "bfloat16"))),
    "equal numbers": ("layer_norm", LayerNorm(Numbers((1, 1000), magnitude=0.0, shift=1000.1))),
    "equal numbers, in parts": (
        "layer_norm",
        LayerNorm(Numbers((3, 300), magnitude=0.0, shift=1000.1), path="split"),
    ),
    "one number, and dw under create_graph": (
        "layer_norm",
        LayerNorm(Numbers((1,)), weight=Numbers((1,))),
    ),
    "far from zero": ("layer_norm", LayerNorm(Numbers((16, 300), shift=1000.0))),
    "a few units apart, far from zero, in parts": (
        "layer_norm",
        LayerNorm(
            Numbers((127,), magnitude=0.001, shift=1000.0, seed=70),
            dy=Numbers((127,), magnitude=0.001, shift=1.0),
            path="split",
        ),
    ),
    "far from zero, in parts": (
        "layer_norm",
        LayerNorm(Numbers((5, 300), shift=1000.0), path="split"),
    ),
    "parts whose means are a few units apart": (
        "layer_norm",
        LayerNorm(
            Numbers((4, 129), magnitude=0.001, shift=-100.0, seed=3044),
            weight=Numbers((129,), seed=262178),
            dy=Numbers((4, 129), shift=1.0, seed=131073),
            path="split",
        ),
    ),
    "far from zero, in a loop": (
        "layer_norm",
        LayerNorm(Numbers((16, 300), shift=1000.0), path="loop"),
    ),
    "a mean that an fma rounds twice": (
        "layer_norm",
        LayerNorm(
            Numbers((1, 1, 2, 255), "float16", magnitude=0.001, shift=-1.0),
            dy=Numbers((1, 1, 2, 255), "float16", shift=1.0, seed=131072),
        ),
    ),
    "a variance too large": ("layer_norm", LayerNorm(Numbers((2, 100), magnitude=1e20))),
    "a variance too large, bfloat16": (
        "layer_norm",
        LayerNorm(Numbers((2, 100), "bfloat16", magnitude=1e20), path="packed"),
    ),
    "a variance too large, in parts": (
        "layer_norm",
        LayerNorm(Numbers((2, 100), magnitude=1e20), path="split"),
    ),
    "a variance too large, in a loop": (
        "layer_norm",
        LayerNorm(Numbers((2, 100), magnitude=1e20), path="loop"),
    ),
    "a few units apart, in parts": (
        "layer_norm",
        LayerNorm(Numbers((1, 5, 100), magnitude=1e-6, shift=1.0, seed=1), path="split"),
    ),
    "large equal numbers": ("layer_norm", LayerNorm(Numbers((2, 127), magnitude=0.0, shift=1e8))),
    "equal numbers too large to square": (
        "layer_norm",
        LayerNorm(Numbers((2, 127), magnitude=0.0, shift=1.0001e30)),
    ),
    "equal numbers too large to square, in parts": (
        "layer_norm",
        LayerNorm(Numbers((2, 127), magnitude=0.0, shift=1.0001e30), path="split"),
    ),
    "equal numbers too large to square, in a loop": (
        "layer_norm",
        LayerNorm(Numbers((2, 127), magnitude=0.0, shift=1.0001e30), path="loop"),
    ),
    "some variances too large, of many short rows": (
        "layer_norm",
        LayerNorm(
            Numbers((20, 7), "bfloat16", marks=((3, 1, 4, 1e25), (4, 0, 2, NAN), (19, 0, 1, -3e20)))
        ),
    ),
    "parameters with a pending negation": (
        "layer_norm",
        LayerNorm(Numbers((3, 7)), 1, *[Numbers((7,), layout="negative")] * 2),
    ),
    "a weight made of x": ("layer_norm_composed", Composed("weight from x", Numbers((5, 20)))),
    "a bias made of x": ("layer_norm_composed", Composed("bias from x", Numbers((5, 20)))),
    "a hook on x": ("layer_norm_composed", Composed("layer norm", Numbers((5, 20)), hooked=True)),
    "relu_ of three dimensions": ("in_place", LayerNorm(Numbers((2, 3, 20)))),
    "relu_ of rows that are not last": ("in_place", Softmax(Numbers((2, 20, 3)), 1)),
    "dropout of a pending negation": (
        "seeded_and_masked_dropout",
        Dropout(Numbers((9,), layout="negative")),
    ),
    "attention of pending negations": (
        "attention",
        Attention(*[Numbers((1, 2, 5, 16), layout="negative")] * 3),
    ),
    "no keys": ("attention", Attention(Numbers((1, 2, 3, 16)), *[Numbers((1, 2, 0, 16))] * 2)),
    "weights that float32 holds in few bits": (
        "attention",
        Attention(
            Numbers((2, 2, 1, 16), magnitude=1000.0),
            Numbers((2, 2, 31, 16), magnitude=0.01),
            Numbers((2, 2, 31, 16), magnitude=1000.0),
            scale=1.0,
        ),
    ),
}


@pytest.mark.parametrize(("name", "case"), FOUND.values(), ids=FOUND)
def test_what_was_found_once(name, case):
    PROPERTIES[name][1](case)


# -- what random numbers hide: sums of numbers that 16 bits cannot hold, and what lies beside

DTYPES_16 = (torch.float16, torch.bfloat16)
LARGEST_WHOLE = {torch.float16: 2048, torch.bfloat16: 256}
"""From here on every second whole number is missing: adding 1 changes nothing."""

EVERY_PATH = [
    *(("softmax", path) for path in SOFTMAX_PATHS),
    *(("layer_norm", path) for path in LAYER_NORM_PATHS),
    *(("weighted_sum", path) for path in WEIGHTED_SUM_PATHS),
]
ON_PATH = {"softmax": Softmax, "layer_norm": LayerNorm, "weighted_sum": WeightedSum}


def one_large(shape, dim, dtype):
    """Ones, but for a first one along ``dim`` after which 16 bits do not count further."""
    x = torch.ones(shape, dtype=dtype, device=runtime.DEVICE)
    x.select(dim, 0).fill_(LARGEST_WHOLE[dtype])
    return x


@pytest.mark.parametrize("dtype", DTYPES_16, ids=["float16", "bfloat16"])
@pytest.mark.parametrize("path", WEIGHTED_SUM_PATHS)
def test_weighted_sums_are_not_added_in_sixteen_bits(path, dtype):
    """Each result is a large number and some ones, exact in float32, and rounded once."""
    with changed(weighted_sum_module, WEIGHTED_SUM_PATHS[path]):
        x = one_large((7, 135), 1, dtype).requires_grad_()
        w, dy = (torch.ones(n, dtype=dtype, device=x.device).requires_grad_() for n in (135, 7))
        y = weighted_sum(x, w)
        (dx,) = torch.autograd.grad(y, x, dy, create_graph=True)
        of_dy, of_w = torch.autograd.grad(dx, (dy, w), one_large((7, 135), 1, dtype))
        whole = LARGEST_WHOLE[dtype]
        assert torch.equal(y, torch.full_like(y, whole + 134))
        assert torch.equal(of_dy, torch.full_like(y, whole + 134))
        assert torch.equal(of_w, one_large(135, 0, dtype) * 7)


@pytest.mark.parametrize("dtype", DTYPES_16, ids=["float16", "bfloat16"])
@pytest.mark.parametrize("path", WEIGHTED_SUM_PATHS)
@pytest.mark.parametrize("few", [False, True], ids=["many programs", "one program"])
def test_gradients_of_weights_are_not_added_in_sixteen_bits(few, path, dtype):
    """Programs that add up their sums, and one that adds up all rows in its loop."""
    one = {"multiprocessors": lambda device: 1} if few else {}
    programs = {"BWD_PROGRAMS": (1, 1)} if few else {}
    with (
        changed(runtime, one),
        changed(weighted_sum_module, WEIGHTED_SUM_PATHS[path] | programs),
    ):
        x = one_large((135, 7), 0, dtype).requires_grad_()
        w, dy = (torch.ones(n, dtype=dtype, device=x.device).requires_grad_() for n in (7, 135))
        (dw,) = torch.autograd.grad(weighted_sum(x, w), w, dy, create_graph=True)
        of_dy, of_x = torch.autograd.grad(dw, (dy, x), torch.ones_like(w))
    assert torch.equal(dw, torch.full_like(w, LARGEST_WHOLE[dtype] + 134))
    assert torch.equal(of_dy, x.detach()[:, 0] * 7)
    assert torch.equal(of_x, torch.ones_like(x))


@pytest.mark.parametrize("dtype", DTYPES_16, ids=["float16", "bfloat16"])
@pytest.mark.parametrize("large", ["through dx", "through dw"])
def test_the_second_gradient_of_dy_is_rounded_once(large, dtype):
    """It is 2049 + 1 in float16: 2050 is there, and 2049 is not."""
    ones, first = (torch.zeros(5, 20, dtype=dtype, device=runtime.DEVICE) for _ in range(2))
    ones += 1
    first[:, 0] = 1
    both = first * LARGEST_WHOLE[dtype]
    both[:, 1] = 1
    x, ddx, ddw = (ones, both, first[0]) if large == "through dx" else (both, first, ones[0])
    x, w, dy = (t.clone().requires_grad_() for t in (x, ones[0], ones[:, 0]))
    grads = torch.autograd.grad(weighted_sum(x, w), (x, w), dy, create_graph=True)
    (of_dy,) = torch.autograd.grad(grads, dy, (ddx, ddw))
    assert torch.equal(of_dy, torch.full_like(dy, LARGEST_WHOLE[dtype] + 2))


@pytest.mark.parametrize("dtype", DTYPES_16, ids=["float16", "bfloat16"])
@pytest.mark.parametrize("path", SOFTMAX_PATHS)
@pytest.mark.parametrize("algorithm", ["auto", "three_pass", "online", "online_2d"])
def test_softmax_takes_off_a_mean_that_sixteen_bits_cannot_hold(algorithm, path, dtype):
    """Of equal numbers y is 1 / 128, exactly, and dx = (dy - mean of dy) / 128.

    The mean is 1 + 1 / 4096, so that rounded to 16 bits it takes all of it from an element of 1.
    """
    x = torch.zeros(9, 128, dtype=dtype, device=runtime.DEVICE).requires_grad_()
    dy = torch.ones_like(x)
    dy[:, 5] += 1 / 32
    with changed(softmax_tuned, SOFTMAX_PATHS[path]):
        (dx,) = torch.autograd.grad(softmax(x, -1, algorithm=algorithm), x, dy)
    true = reference.softmax_backward(x, dy, -1)
    assert_within("dx", dx, true, true.abs() * 2**-8)  # a few units of the float32 mean


@pytest.mark.parametrize("dtype", DTYPES_16, ids=["float16", "bfloat16"])
@pytest.mark.parametrize(("name", "path"), EVERY_PATH)
def test_second_gradients_are_computed_in_float32(name, path, dtype):
    """What autograd keeps is exact here: x, or a softmax of equal numbers. So only results round.

    Every intermediate number may lose a few units of float32, in units of the largest result. The
    gradient of softmax's own y is rounded on its way to x, as in PyTorch: there dy's alone counts.
    """
    x, line = Numbers((9, 128), shift=1.0), Numbers((128,), shift=1.0, seed=1)
    case = {
        "softmax": Softmax(x, path=path),
        "layer_norm": LayerNorm(x, weight=line, path=path),
        "weighted_sum": WeightedSum(x, line, path),
    }[name]
    call = {
        "softmax": lambda op, x, w: op(x, -1),
        "layer_norm": lambda op, x, w: op(x, (128,), w),
        "weighted_sum": lambda op, x, w: op(x, w),
    }[name]
    x = torch.zeros_like(x.make()) if name == "softmax" else x.make()
    dy = mixed(5, x.shape[:1] if name == "weighted_sum" else x.shape, dtype)
    leaves = x.to(dtype), line.make().to(dtype), dy

    def second(op, *leaves):
        x, w, dy = (t.detach().requires_grad_() for t in leaves)
        wanted = [x] if name == "softmax" else [x, w]
        first = torch.autograd.grad(call(op, x, w), wanted, dy, create_graph=True)
        through = [mixed(6 + i, g.shape, dtype).to(g.dtype) for i, g in enumerate(first)]
        return torch.autograd.grad(first, [dy] if name == "softmax" else [x, w, dy], through)

    ours, theirs = OPERATORS[name]
    with on_path(case):
        found = second(ours, *leaves)
    truth = second(theirs, *(t.double() for t in leaves))
    for i, (result, true) in enumerate(zip(found, truth, strict=True)):
        assert result.dtype == dtype
        assert true.any()
        assert_within(f"result {i}", result, true, 4 * FEW * EPS * true.abs().amax())


@pytest.mark.parametrize("dtype", DTYPES_16, ids=["float16", "bfloat16"])
@pytest.mark.parametrize("n_rows", [5, 70])
@pytest.mark.parametrize(("name", "path"), EVERY_PATH)
def test_every_path_in_sixteen_bits(name, path, n_rows, dtype):
    """Rows beyond a program's first, a last program that is not full, a row that is not either."""
    kind = str(dtype).removeprefix("torch.")
    x, line = Numbers((n_rows, 100), kind, shift=1.0, seed=7), Numbers((100,), kind, seed=8)
    if name == "softmax":
        for algorithm in ("auto", "three_pass", "online", "online_2d"):
            check_softmax(Softmax(x, algorithm=algorithm, path=path))
    elif name == "layer_norm":
        check_layer_norm(LayerNorm(x, 1, line, line, path=path))
    else:
        check_weighted_sum(WeightedSum(x, line, path))


@pytest.mark.parametrize("n_elements", [1, 1023, 1024, 1025, 2047])
def test_dropout_writes_nothing_behind_its_last_element(n_elements):
    memory = torch.tensor([[3.0], [7.0]], device=runtime.DEVICE).repeat(1, 4096)
    x, y = memory[:, :n_elements]
    keep = torch.ones(4096, dtype=torch.bool, device=x.device)
    seeded, masked = dropout_module.seeded_dropout_kernel, dropout_module.masked_dropout_kernel
    with runtime.launching_on(x):
        dropout_module._plan(seeded, n_elements, 0, 1.0, N_ROUNDS=7)(x, y, 5)
        assert (y == 3).all()  # kept, all of it
        assert (memory[1, n_elements:] == 7).all()
        y.zero_()
        dropout_module._plan(masked, n_elements, 1.0)(x, y, keep)
    assert (y == 3).all()
    assert (memory[1, n_elements:] == 7).all()


def test_p_is_honoured_to_the_nearest_multiple():
    numbers = reference.philox(3, torch.arange(4, device=runtime.DEVICE), 7).flatten()
    x = torch.ones(numbers.numel(), device=runtime.DEVICE)
    for number in numbers:
        kept = seeded_dropout(x, (number.item() + 0.6) / 2**32, seed=3) != 0
        assert torch.equal(kept, numbers > number)


def test_dropout_draws_seeds_of_64_bits(monkeypatch):
    """Of 64 seeds, each bit is the same in all with a probability of 2**-63, and two are equal with
    one of 2**-53."""
    seeds = []
    monkeypatch.setattr(
        dropout_module, "_SEEDED", lambda x, p, _, seed: seeds.append(seed.item()) or x
    )
    for _ in range(64):
        dropout(torch.ones(1, device=runtime.DEVICE))
    assert len(set(seeds)) == 64
    for bit in range(64):
        assert len({seed >> bit & 1 for seed in seeds}) == 2, f"bit {bit} is never drawn"


def test_a_seed_of_2_to_the_63():
    x = torch.ones(100, device=runtime.DEVICE)
    keep = reference.keep_mask(torch.arange(100, device=x.device), 0.5, 2**63, 7)
    assert torch.equal(seeded_dropout(x, 0.5, 2**63) != 0, keep)
