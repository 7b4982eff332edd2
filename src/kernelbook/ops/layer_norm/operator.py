"""Layer norm as PyTorch's autograd sees it, and the public function."""

from collections.abc import Sequence
from math import prod

import torch

from kernelbook import runtime
from kernelbook.ops import checks
from kernelbook.ops.layer_norm.backward import _backward
from kernelbook.ops.layer_norm.forward import _forward
from kernelbook.ops.rows.matrix import as_rows, empty_rows, rounded


def _as_parameter(parameter: torch.Tensor | None) -> torch.Tensor | None:
    """Flatten a weight or bias."""
    if parameter is None:
        return None
    parameter = runtime.readable(parameter)
    if parameter.ndim != 1:
        parameter = parameter.reshape(-1)
    return parameter.contiguous()


def _like(gradient: torch.Tensor | None, parameter: torch.Tensor | None) -> torch.Tensor | None:
    """Give the gradient of a parameter its shape and dtype."""
    return None if gradient is None else rounded(gradient, parameter.dtype).view(parameter.shape)


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, shape, eps):
        n_cols = prod(shape)
        y, rows = empty_rows(x, n_cols)
        mean, rstd = None, None
        if x.numel():
            with runtime.launching_on(x):
                _, mean, rstd = _forward(
                    as_rows(x, n_cols), _as_parameter(weight), _as_parameter(bias), eps,
                    keep_statistics=any(ctx.needs_input_grad), y=rows,
                )  # fmt: skip
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        ctx.shape, ctx.eps = shape, eps
        return rounded(y, x.dtype)

    @staticmethod
    def backward(ctx, dy):
        x, weight, bias, mean, rstd = ctx.saved_tensors
        needs_dx, needs_dw, needs_db = ctx.needs_input_grad[:3]
        if torch.is_grad_enabled() or not x.numel():
            return *_backward_in_torch(ctx, x, weight, bias, dy), None, None
        n_cols = prod(ctx.shape)
        dx, rows = empty_rows(x, n_cols) if needs_dx else (None, None)
        with runtime.launching_on(x):
            _, dw, db = _backward(
                as_rows(x, n_cols),
                _as_parameter(weight),
                mean,
                rstd,
                as_rows(dy, n_cols),
                runtime.kernel_dtype(weight.dtype) if needs_dw else None,
                runtime.kernel_dtype(bias.dtype) if needs_db else None,
                needs_dx,
                dx=rows,
            )
        dx = rounded(dx, x.dtype) if needs_dx else None
        return dx, _like(dw, weight), _like(db, bias), None, None


def _backward_in_torch(ctx, x, weight, bias, dy):
    """The gradients by PyTorch: of no rows, or when their own gradients are wanted as well.

    They are written as a formula of x, weight and dy, through which the second gradient flows. To
    ask autograd for the gradient of y instead would count a weight that is made from x twice, and
    would call the hooks that sit on x. This is rare, so it is in float64, where nothing overflows.
    """
    needs_dx, needs_dw, needs_db = ctx.needs_input_grad[:3]
    dims = tuple(range(-len(ctx.shape), 0))
    x64, dy64 = x.double(), dy.double()
    deviation = x64 - x64.mean(dims, keepdim=True)
    rstd = ((deviation * deviation).mean(dims, keepdim=True) + ctx.eps).rsqrt()
    xhat = deviation * rstd
    dx = dw = db = None
    if needs_dx:
        wdy = dy64 if weight is None else dy64 * weight.double()
        c1, c2 = (wdy * xhat).mean(dims, keepdim=True), wdy.mean(dims, keepdim=True)
        dx = ((wdy - xhat * c1 - c2) * rstd).to(x.dtype)
    if needs_dw:
        dw = (dy64 * xhat).sum_to_size(ctx.shape).to(weight.dtype)
    if needs_db:
        db = dy64.sum_to_size(ctx.shape).to(bias.dtype)
    return dx, dw, db


def _check_parameter(name: str, parameter: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Raise unless a weight or bias is a tensor that the kernels take."""
    checks.tensor(name, parameter)
    if tuple(parameter.shape) != shape:
        raise ValueError(
            f"{name} must have the normalized shape, {shape}, got {tuple(parameter.shape)}: pass "
            f"{name}.view({shape}), if it has as many elements."
        )


def _check_shape(x: torch.Tensor, normalized_shape: int | Sequence[int]) -> tuple[int, ...]:
    """Return the normalized shape as a tuple, or raise unless x ends with it."""
    if not isinstance(normalized_shape, Sequence):
        shape = (checks.integer("normalized_shape", normalized_shape),)
    else:
        shape = tuple(checks.integer("each size in normalized_shape", s) for s in normalized_shape)
    if not shape or min(shape) < 1:
        raise ValueError(
            f"normalized_shape must hold sizes of at least 1, got {shape}: pass the sizes of the "
            "last dimensions of x."
        )
    if tuple(x.shape[-len(shape) :]) != shape:
        raise ValueError(
            f"x must end with the dimensions of normalized_shape, {shape}, but has shape "
            f"{tuple(x.shape)}: pass the sizes of its last dimensions."
        )
    return shape


@checks.also_named(input="x")
def layer_norm(
    x: torch.Tensor,
    normalized_shape: int | Sequence[int],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> torch.Tensor:
    """Layer normalisation, as :func:`torch.nn.functional.layer_norm` computes it.

    y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias over the last dimensions of x, those of
    ``normalized_shape``; var is the mean of squared deviations (divided by N, not N - 1).

    Mean, variance and every sum are computed in float32. The gradients of two runs are equal bit
    by bit, and one that is not needed is not computed.

    Args:
        x: the input, of any shape and stride, float32, float16 or bfloat16. A copy is made unless
            the last dimensions are contiguous and the others can be viewed as one.
        normalized_shape: the sizes of the last dimensions of ``x``, at least 1 each; an int stands
            for one dimension.
        weight: the scale of each normalised element, of shape ``normalized_shape`` and float32,
            float16 or bfloat16, whatever the dtype of ``x``; or None for 1.
        bias: what is added in the end, likewise; or None for 0.
        eps: a number of at least 0, added to the variance.

    Returns:
        y, contiguous, of the shape and dtype of ``x``. Gradients of any order flow to ``x``,
        ``weight`` and ``bias``, each in its own dtype.

    Raises:
        TypeError: ``x`` or a parameter is no tensor or of another dtype, ``normalized_shape`` is
            neither an int nor a sequence of ints, or ``eps`` is no number.
        ValueError: a size is below 1, ``x`` does not end with ``normalized_shape``, a parameter has
            another shape, ``eps`` is negative, or a tensor is not where kernels run.

    Source: Ba, Kiros, Hinton, "Layer normalization", arXiv:1607.06450, 2016, section 3.
    """
    checks.tensor("x", x)
    shape = _check_shape(x, normalized_shape)
    eps = checks.number("eps", eps)
    if not 0 <= eps < float("inf"):
        raise ValueError(f"eps must be at least 0 and finite, got {eps}: pass 1e-5, for example.")
    parameters = {"weight": weight, "bias": bias}
    for name, parameter in parameters.items():
        if parameter is not None:
            _check_parameter(name, parameter, shape)
    checks.same_device(x=x, **parameters)
    return _LayerNorm.apply(x, weight, bias, shape, eps)
