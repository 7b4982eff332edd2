"""A tensor of any shape as a matrix with one row for each softmax or normalisation."""

import torch

from kernelbook import runtime


def as_rows(x: torch.Tensor, n_cols: int) -> torch.Tensor:
    """View, or where it must be copy, a tensor as a matrix whose rows are contiguous."""
    x = runtime.readable(x)
    if x.ndim != 2 or x.shape[1] != n_cols:
        x = x.reshape(-1, n_cols)
    return x if x.stride(1) == 1 else x.contiguous()


def empty_result(x: torch.Tensor, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Allocate a result of the shape of x with ``dim`` contiguous."""
    if dim == -1 or x.ndim == 0 or dim == x.ndim - 1:
        return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
    return torch.empty_permuted(x.shape, _last(x, dim), dtype=dtype, device=x.device)


def empty_rows(x: torch.Tensor, n_cols: int, dim: int = -1) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate a result of the shape of x with ``dim`` contiguous. Return it and its rows.

    The result itself is no view, because autograd refuses to let a view that an operator returns
    be changed in place.
    """
    dtype = runtime.kernel_dtype(x.dtype)
    result = empty_result(x, dim, dtype)
    if dim == -1 or x.ndim == 0 or dim == x.ndim - 1:
        if x.ndim == 2 and x.shape[1] == n_cols:
            return result, result
        return result, result.view(-1, n_cols)
    return result, result.permute(_last(x, dim)).view(-1, n_cols)


def _last(x: torch.Tensor, dim: int) -> list[int]:
    """Return the order of dimensions that puts one last."""
    return [*(d for d in range(x.ndim) if d != dim % x.ndim), dim % x.ndim]


def rounded(result: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a result in the dtype of its input; the interpreter's kernels may have had another."""
    return result.to(dtype) if runtime.INTERPRETED else result
