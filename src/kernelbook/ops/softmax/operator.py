"""Softmax as PyTorch's autograd sees it, and the public function."""

import torch

from kernelbook import runtime
from kernelbook.ops import checks
from kernelbook.ops.rows.matrix import as_rows, empty_rows, rounded
from kernelbook.ops.softmax import tuned
from kernelbook.ops.softmax.backward import _backward
from kernelbook.ops.softmax.forward import _forward

ALGORITHMS = ("auto", "row", "three_pass", "online", "online_2d")


def _rows_along(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Return a tensor that is not empty as a matrix with ``dim`` along its rows."""
    inner = x if x.ndim == 0 or dim in (-1, x.ndim - 1) else x.movedim(dim, -1)
    return as_rows(inner, _columns(x, dim))


def _columns(x: torch.Tensor, dim: int) -> int:
    """Return how many numbers a row has; a tensor without dimensions is a row of one."""
    return x.shape[dim] if x.ndim else 1


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dim, algorithm):
        if x.numel():
            y, rows = empty_rows(x, _columns(x, dim), dim)
            with runtime.launching_on(x):
                _forward(_rows_along(x, dim), rows, algorithm)
            y = rounded(y, x.dtype)
        else:
            y = torch.empty_like(x)
        ctx.save_for_backward(y)
        ctx.dim, ctx.algorithm = dim, algorithm
        return y

    @staticmethod
    def backward(ctx, dy):
        (y,) = ctx.saved_tensors
        if torch.is_grad_enabled() or not y.numel():
            return _backward_in_torch(y, dy, ctx.dim), None, None
        dx, rows = empty_rows(y, _columns(y, ctx.dim), ctx.dim)
        with runtime.launching_on(y):
            _backward(_rows_along(y, ctx.dim), _rows_along(dy, ctx.dim), rows, ctx.algorithm)
        return rounded(dx, y.dtype), None, None


def _backward_in_torch(y, dy, dim):
    """The gradient by PyTorch, in float32: of nothing, or when its own gradient is wanted too."""
    y32, dy32 = y.float(), dy.float()
    return (y32 * (dy32 - (y32 * dy32).sum(dim, keepdim=True))).to(y.dtype)


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
    if algorithm == "auto":
        algorithm = "row" if n_cols <= tuned.ROW_COLS else "online"
    return _Softmax.apply(x, dim, algorithm)
