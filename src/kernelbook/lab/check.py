"""Checks: a result beside float64 truth, with PyTorch's own error next to it."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from kernelbook.lab import chapter
from kernelbook.lab.display import Shown, table

FACTOR = 2
"""How many times PyTorch's own error a result may have. Two results that are each rounded once,
at different moments, differ from the truth by up to twice as much as either."""


class CheckFailed(AssertionError):
    """A result is further from the truth than its tolerance allows."""


@dataclass
class Case:
    """One row of a check.

    ``ours`` and ``torch`` are two results in ``dtype``; ``truth`` is float64. ``what`` names the
    input (a shape, say), ``direction`` the pass: forward or backward. ``factor`` says how many
    times PyTorch's own error is allowed; a chapter that needs more than FACTOR says why.
    """

    what: str
    direction: str
    ours: torch.Tensor
    torch: torch.Tensor
    truth: torch.Tensor
    factor: float = FACTOR

    def row(self) -> dict:
        """Return the row as it is recorded."""
        dtype = self.ours.dtype
        torch_error = error(self.torch, self.truth)
        measured = error(self.ours, self.truth)
        bound = tolerance(torch_error, dtype, self.factor)
        return {
            "case": self.what,
            "pass": self.direction,
            "dtype": str(dtype).removeprefix("torch."),
            "error": measured,
            "torch_error": torch_error,
            "tolerance": bound,
            "ok": measured <= bound,
        }


def error(result: torch.Tensor, truth: torch.Tensor) -> float:
    """Return the largest |result - truth| as a fraction of the largest |truth|.

    A result of zeros has error 1, above every tolerance. A NaN or an infinity where the truth has
    none, or the reverse, is an error without bound.
    """
    if truth.dtype != torch.float64:
        raise TypeError(f"truth must be float64, got {truth.dtype}.")
    if result.shape != truth.shape:
        raise ValueError(f"result has shape {tuple(result.shape)}, truth {tuple(truth.shape)}.")
    result = result.detach().double()
    finite = truth.isfinite()
    scale = truth[finite].abs().max().item() if finite.any() else 0.0
    if scale == 0.0:
        raise ValueError("the truth is zero everywhere: a result of zeros would pass.")
    same = (result == truth) | (result.isnan() & truth.isnan())
    if not (same | (finite & result.isfinite())).all():
        return float("inf")
    return torch.where(same, 0.0, (result - truth).abs()).max().item() / scale


def tolerance(torch_error: float, dtype: torch.dtype, factor: float = FACTOR) -> float:
    """Return the bound on the error: ``factor`` times PyTorch's own, or times half a unit in the
    last place, whichever is larger. No result that is rounded to ``dtype`` can promise less.

    A bound that a result of zeros, whose error is 1, comes near to is no bound:
    :class:`ValueError`.
    """
    bound = factor * max(torch_error, torch.finfo(dtype).eps / 2)
    if not bound < 0.5:
        raise ValueError(f"PyTorch's own error is {torch_error:.2g}: it is no yardstick here.")
    return bound


def check(name: str, cases: Iterable[Case]) -> Shown:
    """Compare each case with float64 truth and return the table.

    Raises:
        CheckFailed: one row is over its tolerance, or there is none. Nothing is recorded then.
    """
    rows = [case.row() for case in cases]
    if not rows:
        raise CheckFailed(f"{name}: no case was checked.")
    shown = table(
        [
            {
                "input": row["case"],
                "dtype": row["dtype"],
                "pass": row["pass"],
                "error": f"{row['error']:.1e}",
                "PyTorch's": f"{row['torch_error']:.1e}",
                "tolerance": f"{row['tolerance']:.1e}",
                "verdict": row["ok"],
            }
            for row in rows
        ],
        f"{name}: error against float64. {chapter.where_checked(name)}",
    )
    failed = sum(not row["ok"] for row in rows)
    if failed:
        raise CheckFailed(f"{failed} of {len(rows)} rows failed.\n{shown.plain}")
    chapter.keep("checks", name, rows)
    return shown
