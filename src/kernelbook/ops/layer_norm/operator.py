"""Layer norm as PyTorch's autograd sees it, and the public function."""

from collections.abc import Sequence
from math import prod

import torch
import torch.nn.functional as F

from kernelbook import runtime
from kernelbook.ops import checks, library, visible
from kernelbook.ops.layer_norm import tuned
from kernelbook.ops.layer_norm.backward import _backward, pieces_bwd_kernel, row_bwd_kernel
from kernelbook.ops.layer_norm.forward import _forward, pieces_fwd_kernel, row_fwd_kernel
from kernelbook.ops.layer_norm.sums import buffer_sum_kernel
from kernelbook.ops.rows.matrix import as_rows, empty_result, rounded


def _as_parameter(parameter: torch.Tensor | None) -> torch.Tensor | None:
    """Flatten a weight or bias."""
    if parameter is None:
        return None
    parameter = runtime.readable(parameter)
    if parameter.ndim != 1:
        parameter = parameter.reshape(-1)
    return parameter.contiguous()


def _nothing(x: torch.Tensor) -> torch.Tensor:
    """Return what stands for a gradient that is not needed."""
    return torch.empty(0, dtype=x.dtype, device=x.device)


def _run(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    shape: Sequence[int],
    eps: float,
    keep: bool,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return y in a dtype, and mean and rstd of each row, which are empty unless they are kept."""
    n_cols = prod(shape)
    y = empty_result(x, -1, runtime.kernel_dtype(dtype))
    statistics = _empty_statistics(x, n_cols, keep)
    if x.numel():
        with runtime.launching_on(x):
            _forward(
                as_rows(x, n_cols), _as_parameter(weight), _as_parameter(bias), eps,
                keep_statistics=keep, y=y, statistics=statistics,
            )  # fmt: skip
    return rounded(y, dtype), *statistics


def _empty_statistics(x: torch.Tensor, n_cols: int, keep: bool) -> list[torch.Tensor]:
    """Allocate mean and rstd, each a tensor: compiled code can hand no kernel a view to fill."""
    rows = x.numel() // n_cols if keep else 0
    return [torch.empty(rows, dtype=torch.float32, device=x.device) for _ in range(2)]


def _run_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    shape: Sequence[int],
    needed: Sequence[bool],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return dx, dw and db; what is not needed is empty."""
    if not x.numel():
        results = _fake_backward(dy, x, weight, bias, mean, rstd, shape, needed)
        return tuple(result.zero_() for result in results)
    n_cols = prod(shape)
    needs_dx, needs_dw, needs_db = needed
    dx = empty_result(x, -1, runtime.kernel_dtype(x.dtype)) if needs_dx else None
    with runtime.launching_on(x):
        _, dw, db = _backward(
            as_rows(x, n_cols),
            _as_parameter(weight),
            mean.contiguous(),  # that of a row that all calls of a vmap share has a stride of 0
            rstd.contiguous(),
            as_rows(dy, n_cols),
            runtime.kernel_dtype(weight.dtype) if needs_dw else None,
            runtime.kernel_dtype(bias.dtype) if needs_db else None,
            needs_dx,
            dx=dx,
        )
    return _result(dx, x, x), _result(dw, weight, x), _result(db, bias, x)


def _result(
    gradient: torch.Tensor | None, of: torch.Tensor | None, x: torch.Tensor
) -> torch.Tensor:
    """Return a gradient as the operator does. A view costs the host a microsecond, and most would
    change nothing."""
    if gradient is None:
        return _nothing(x)
    gradient = rounded(gradient, of.dtype)
    return gradient if gradient.shape == of.shape else gradient.view(of.shape)


def _setup_context(ctx, inputs, output):
    x, weight, bias, ctx.shape, ctx.eps, ctx.kept, _ = inputs
    _, *statistics = output
    ctx.save_for_backward(x, weight, bias, *statistics)
    ctx.mark_non_differentiable(*statistics)
    ctx.set_materialize_grads(False)


def gradient(ctx, dy, *_):
    """Return the gradients of x, weight and bias."""
    x, weight, bias, mean, rstd = ctx.saved_tensors
    needed = ctx.needs_input_grad[:3]
    if dy is None:
        return (None,) * 7
    if torch.is_grad_enabled():
        grads = _backward_in_torch(ctx, x, weight, bias, dy)
    else:
        if not ctx.kept:  # nobody foresaw a gradient: vmap hides it, and a graph
            _, mean, rstd = _LAYER_NORM(x, None, None, ctx.shape, ctx.eps, True, x.dtype)
        grads = _LAYER_NORM_BACKWARD(dy, x, weight, bias, mean, rstd, ctx.shape, list(needed))
    return *(dx if n else None for dx, n in zip(grads, needed, strict=True)), *(None,) * 4


def _backward_in_torch(ctx, x, weight, bias, dy):
    """The gradients by PyTorch, when their own gradients are wanted as well.

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


def _fake(x, weight, bias, shape, eps, keep, dtype):
    return empty_result(x, -1, dtype), *_empty_statistics(x, prod(shape), keep)


def _fake_backward(dy, x, weight, bias, mean, rstd, shape, needed):
    return tuple(
        torch.empty(of.shape, dtype=of.dtype, device=of.device) if n else _nothing(x)
        for of, n in zip((x, weight, bias), needed, strict=True)
    )


def _batch(info, in_dims, x, weight, bias, shape, eps, keep, dtype):
    """A batch of rows is more rows. With a weight or bias for each, they come afterwards."""
    x = library.batched(info, in_dims[0], x)
    shared = all(d is None for d in in_dims[1:3])
    if shared:
        y, *statistics = _LAYER_NORM.op(x, weight, bias, shape, eps, keep, dtype)
    else:
        y, *statistics = _LAYER_NORM.op(x, None, None, shape, eps, keep, torch.float32)
        weight, bias = _beside(info, in_dims, x, shape, weight, bias)
        y = y if weight is None else y * weight
        y = (y if bias is None else y + bias).to(dtype)
    return (y, *(s.view(info.batch_size, -1) for s in statistics)), (0, 0, 0)


def _beside(info, in_dims, x, shape, *parameters):
    """Return a weight and a bias in float32, shaped to meet x, whose first dimension is a batch."""
    found = []
    for d, parameter in zip(in_dims[1:3], parameters, strict=True):
        if parameter is not None:
            parameter = library.batched(info, d, parameter).float()
            ones = [1] * (x.ndim - 1 - len(shape))
            parameter = parameter.reshape(info.batch_size, *ones, *shape)
        found.append(parameter)
    return found


def _batch_backward(info, in_dims, dy, x, weight, bias, mean, rstd, shape, needed):
    """dx is that of more rows. dw and db are sums over the rows of each call, by PyTorch."""
    dy, x = (library.batched(info, d, t) for d, t in zip(in_dims, (dy, x), strict=False))
    statistics = [
        library.batched(info, d, s).flatten()
        for d, s in zip(in_dims[4:6], (mean, rstd), strict=True)
    ]
    wide, _ = _beside(info, in_dims[1:], x, shape, weight, None)
    wdy = dy.float() if wide is None else dy.float() * wide
    nothing = [False, False]
    dx = dw = db = None
    if needed[0]:
        dx, *_ = _LAYER_NORM_BACKWARD.op(
            wdy, x.float(), None, None, *statistics, shape, [True, *nothing]
        )
        dx = dx.to(x.dtype)
    rows = tuple(range(1, x.ndim - len(shape)))
    if needed[1]:
        ones = [1] * len(shape)
        mean, rstd = (t.view(*x.shape[: x.ndim - len(shape)], *ones) for t in statistics)
        dw = (x.float() - mean) * rstd * dy.float()  # in this order nothing overflows
        dw = (dw.sum(rows) if rows else dw).to(weight.dtype)
    if needed[2]:
        db = (dy.float().sum(rows) if rows else dy).to(bias.dtype)
    grads = (_nothing(x) if dx is None else dx for dx in (dx, dw, db))
    return tuple(grads), tuple(0 if n else None for n in needed)


def _is_by_rows(x, weight, bias, shape, eps, keep, dtype):
    """Whether a program has whole rows, as they are."""
    longest = min(tuned.TILE_COLS, tuned.TILE_BYTES // x.itemsize)
    return bool(x.numel()) and prod(shape) <= longest


def _backward_is_by_rows(dy, x, weight, bias, mean, rstd, shape, needed):
    _, *of_parameters = needed  # the kernel that sums both hands out two tensors, or none
    return bool(x.numel()) and prod(shape) <= tuned.BWD_ROW_COLS and len(set(of_parameters)) == 1


_LAYER_NORM = library.Operator(
    "layer_norm",
    _run,
    fake=_fake,
    batch=_batch,
    setup_context=_setup_context,
    backward=gradient,
)
_LAYER_NORM_BACKWARD = library.Operator(
    "layer_norm_backward",
    _run_backward,
    fake=_fake_backward,
    batch=_batch_backward,
    **library.no_gradient("the gradient of layer_norm was to be differentiated"),
)
_BACKWARD_KERNELS = row_bwd_kernel, pieces_bwd_kernel, buffer_sum_kernel
visible.show(_LAYER_NORM, row_fwd_kernel, pieces_fwd_kernel, *_BACKWARD_KERNELS, where=_is_by_rows)
visible.show(_LAYER_NORM_BACKWARD, *_BACKWARD_KERNELS, where=_backward_is_by_rows)


def _check_parameter(name: str, parameter: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Raise unless a weight or bias is a tensor that the kernels take."""
    checks.tensor(name, parameter)
    if parameter.shape != shape:
        raise ValueError(
            f"{name} must have the normalized shape, {shape}, got {tuple(parameter.shape)}: pass "
            f"{name}.view({shape}), if it has as many elements."
        )


def _check_shape(x: torch.Tensor, normalized_shape: int | Sequence[int]) -> tuple[int, ...]:
    """Return the normalized shape as a tuple, or raise unless x ends with it."""
    kind = type(normalized_shape)
    if kind is int or not (kind is tuple or isinstance(normalized_shape, Sequence)):
        shape = (checks.integer("normalized_shape", normalized_shape),)
    else:
        shape = tuple(checks.integer("each size in normalized_shape", s) for s in normalized_shape)
    if shape and min(shape) > 0 and x.shape[-len(shape) :] == shape:
        return shape
    if not shape or min(shape) < 1:
        raise ValueError(
            f"normalized_shape must hold sizes of at least 1, got {shape}: pass the sizes of the "
            "last dimensions of x."
        )
    raise ValueError(
        f"x must end with the dimensions of normalized_shape, {shape}, but has shape "
        f"{tuple(x.shape)}: pass the sizes of its last dimensions."
    )


@checks.also_named(input="x")
def layer_norm(
    x: torch.Tensor,
    normalized_shape: int | Sequence[int],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *,
    out_dtype: torch.dtype | None = None,
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
        eps: a number from 0 to 3.4e38, added to the variance in float32.
        out_dtype: the dtype of y, float32, float16 or bfloat16; or None for that of PyTorch's
            function, which is the dtype of ``x``, and float32 under autocast on a GPU. Where a
            matmul in bfloat16 follows, y in bfloat16 is what autocast would have made of it, and
            neither y nor its gradient is written in float32 first.

    Returns:
        y, contiguous, of the shape of ``x`` and the dtype ``out_dtype``. Gradients of any order
        flow to ``x``, ``weight`` and ``bias``, each in its own dtype.

    Raises:
        TypeError: ``x`` or a parameter is no tensor or of another dtype, ``normalized_shape`` is
            neither an int nor a sequence of ints, ``eps`` is no number, or ``out_dtype`` is none of
            these dtypes.
        ValueError: a size is below 1, ``x`` does not end with ``normalized_shape``, a parameter has
            another shape, ``eps`` is out of range, or a tensor is not where kernels run.

    Source: Ba, Kiros, Hinton, "Layer normalization", arXiv:1607.06450, 2016, section 3.
    """
    checks.tensor("x", x)
    shape = _check_shape(x, normalized_shape)
    eps = checks.number("eps", eps)
    if not 0 <= eps <= torch.finfo(torch.float32).max:
        raise ValueError(
            f"eps must lie in [0, {torch.finfo(torch.float32).max:.3g}], got {eps}: pass 1e-5, for "
            "example."
        )
    if weight is not None:
        _check_parameter("weight", weight, shape)
    if bias is not None:
        _check_parameter("bias", bias, shape)
    checks.same_device(x=x, weight=weight, bias=bias)
    if out_dtype is None:
        x = library.autocast(x, lambda nothing: F.layer_norm(nothing.view(0, 1), (1,)))
        out_dtype = x.dtype
    elif out_dtype not in checks.FLOATS:
        raise TypeError(
            f"out_dtype must be {checks.either(checks.FLOATS)}, or None, got "
            f"{checks.described(out_dtype)}: pass torch.bfloat16, for example."
        )
    keep = torch.is_grad_enabled() and (
        x.requires_grad
        or (weight is not None and weight.requires_grad)
        or (bias is not None and bias.requires_grad)
    )
    return _LAYER_NORM(x, weight, bias, list(shape), eps, keep, out_dtype)[0]
