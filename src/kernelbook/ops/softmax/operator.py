"""Softmax as PyTorch's autograd sees it, and the public function."""

import torch

from kernelbook import runtime
from kernelbook.ops import checks, library, visible
from kernelbook.ops.rows.matrix import as_rows, empty_result, empty_rows, rounded
from kernelbook.ops.softmax import tuned
from kernelbook.ops.softmax.backward import _backward, row_bwd_kernel
from kernelbook.ops.softmax.forward import _forward, row_fwd_kernel

ALGORITHMS = ("auto", "row", "three_pass", "online", "online_2d")


def _rows_along(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Return a tensor that is not empty as a matrix with ``dim`` along its rows."""
    inner = x if x.ndim == 0 or dim in (-1, x.ndim - 1) else x.movedim(dim, -1)
    return as_rows(inner, _columns(x, dim))


def _columns(x: torch.Tensor, dim: int) -> int:
    """Return how many numbers a row has; a tensor without dimensions is a row of one."""
    return x.shape[dim] if x.ndim else 1


def _run(x: torch.Tensor, dim: int, algorithm: str) -> torch.Tensor:
    """Return softmax along a dimension."""
    if not x.numel():
        return empty_result(x, dim, x.dtype)
    y, rows = empty_rows(x, _columns(x, dim), dim)
    with runtime.launching_on(x):
        _forward(_rows_along(x, dim), rows, _chosen(algorithm, rows))
    return rounded(y, x.dtype)


def _run_backward(y: torch.Tensor, dy: torch.Tensor, dim: int, algorithm: str) -> torch.Tensor:
    """Return the gradient of x."""
    if not y.numel():
        return empty_result(y, dim, y.dtype)
    dx, rows = empty_rows(y, _columns(y, dim), dim)
    with runtime.launching_on(y):
        # The row of all calls of a vmap has a stride of 0, and a hook may unpack y with any.
        y_rows = _rows_along(y, dim).contiguous()
        _backward(y_rows, _rows_along(dy, dim), rows, _chosen(algorithm, rows))
    return rounded(dx, y.dtype)


def _chosen(algorithm: str, rows: torch.Tensor) -> str:
    """Return which algorithm "auto" is. Here, because while a graph is made, a length may be one
    that nobody knows yet."""
    if algorithm != "auto":
        return algorithm
    return "row" if rows.shape[1] <= tuned.ROW_COLS else "online"


def _setup_context(ctx, inputs, output):
    _, ctx.dim, ctx.algorithm = inputs
    ctx.save_for_backward(output)


def _gradient(ctx, dy):
    (y,) = ctx.saved_tensors
    return _SOFTMAX_BACKWARD(y, dy, ctx.dim, ctx.algorithm), None, None


def _setup_second_context(ctx, inputs, output):
    y, dy, ctx.dim, _ = inputs
    ctx.save_for_backward(y, dy)


def _second_gradient(ctx, ddx):
    """The gradients of dx = y * (dy - sum(y * dy)), by PyTorch, in float32."""
    y, dy = (t.float() for t in ctx.saved_tensors)
    g = ddx.float()
    total, of_g = ((y * t).sum(ctx.dim, keepdim=True) for t in (dy, g))
    of_y, of_dy = g * (dy - total) - dy * of_g, y * (g - of_g)
    return *(t.to(ddx.dtype) for t in (of_y, of_dy)), None, None


def _fake(x, dim, algorithm):
    return empty_result(x, dim, x.dtype)


def _fake_backward(y, dy, dim, algorithm):
    return empty_result(y, dim, y.dtype)


def _batch(info, in_dims, x, dim, algorithm):
    x = library.batched(info, in_dims[0], x)
    rows = x.unsqueeze(-1) if x.ndim == 1 else x
    return _SOFTMAX.op(rows, _in_batch(dim), algorithm).view_as(x), 0


def _batch_backward(info, in_dims, y, dy, dim, algorithm):
    y, dy = (library.batched(info, d, t) for d, t in zip(in_dims, (y, dy), strict=False))
    rows = (t.unsqueeze(-1) if t.ndim == 1 else t for t in (y, dy))
    return _SOFTMAX_BACKWARD.op(*rows, _in_batch(dim), algorithm).view_as(y), 0


def _in_batch(dim: int) -> int:
    """Return which dimension it is when a batch comes first."""
    return dim if dim < 0 else dim + 1


def _is_by_rows(x, dim, algorithm):
    """Whether a program has whole rows, as they are."""
    by_rows = algorithm in ("auto", "row")
    return bool(x.numel()) and by_rows and _columns(x, dim) <= tuned.TILE_COLS


def _backward_is_by_rows(y, dy, dim, algorithm):
    return _is_by_rows(y, dim, algorithm)


_SOFTMAX = library.Operator(
    "softmax",
    _run,
    fake=_fake,
    batch=_batch,
    setup_context=_setup_context,
    backward=_gradient,
)
_SOFTMAX_BACKWARD = library.Operator(
    "softmax_backward",
    _run_backward,
    fake=_fake_backward,
    batch=_batch_backward,
    setup_context=_setup_second_context,
    backward=_second_gradient,
)
visible.show(_SOFTMAX, row_fwd_kernel, row_bwd_kernel, where=_is_by_rows)
visible.show(_SOFTMAX_BACKWARD, row_bwd_kernel, where=_backward_is_by_rows)


@checks.also_named(input="x")
def softmax(x: torch.Tensor, dim: int = -1, *, algorithm: str = "auto") -> torch.Tensor:
    """Softmax over one dimension, as :func:`torch.softmax` computes it.

    y = exp(x - max(x)) / sum(exp(x - max(x))) along ``dim``. A row that is -inf throughout gives
    NaN, as in PyTorch, and so does one that holds NaN or +inf.

    Args:
        x: the input, of any shape and stride, float32, float16 or bfloat16. A copy is made unless
            ``dim`` is contiguous and the other dimensions can be viewed as one.
        dim: the dimension that sums to 1, from -x.ndim to x.ndim - 1.
        algorithm: how a row is read. ``"row"`` once, up to 1,048,576 columns; ``"three_pass"``
            three times; ``"online"`` twice, a row a program; ``"online_2d"`` twice, four rows a
            program. ``"auto"`` takes ``"row"``, which was measured fastest wherever it applies,
            and else ``"online"``.

    Returns:
        y, of the shape and dtype of ``x``, with ``dim`` contiguous in memory. Gradients of any
        order flow to ``x``.

    Raises:
        TypeError: ``x`` is no dense tensor or of another dtype, or ``dim`` is no integer.
        ValueError: ``dim`` is out of range, ``algorithm`` is unknown or cannot take so many
            columns, or ``x`` is not where kernels run.

    Source: Milakov and Gimelshein, arXiv:1805.02867, 2018, for the online algorithms.
    """
    checks.tensor("x", x)
    dim = checks.integer("dim", dim)
    ndim = max(x.ndim, 1)
    if not -ndim <= dim < ndim:
        raise ValueError(
            f"dim must lie in [{-ndim}, {ndim - 1}] for x of shape {tuple(x.shape)}, got {dim}: "
            "pass -1 for the last dimension."
        )
    checks.choice("algorithm", algorithm, ALGORITHMS)
    n_cols = _columns(x, dim)
    if algorithm == "row" and n_cols > tuned.ROW_COLS:
        raise ValueError(
            f"algorithm 'row' takes at most {tuned.ROW_COLS:,} columns, got {n_cols:,}: pass "
            "'online', 'online_2d', 'three_pass' or 'auto'."
        )
    checks.same_device(x=x)
    x = library.autocast(x, lambda nothing: torch.softmax(nothing, -1))
    return _SOFTMAX(x, dim, algorithm)
