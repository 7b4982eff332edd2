"""Checks: a result beside float64 truth, part by part, with PyTorch's own error next to it.

The largest element of a tensor is the yardstick of its own neighbourhood only. After thousands of
keys an output of attention is a tenth of what it is after a few, and a block of keys that is lost
there disappears beside the large numbers elsewhere. So a tensor is judged in parts, each of which
has a unit of its own: see :func:`judge`.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from html import escape

import torch

from kernelbook.lab import chapter
from kernelbook.lab.display import NOT_RECORDED, Shown, show, table, tabulated
from kernelbook.lab.schema import LIMIT

FACTOR = 2
"""How many times PyTorch's own error a result may have. Two results that are each rounded once,
at different moments, differ from the truth by up to twice as much as either."""

ROWS, COLUMNS = 64, 1024
"""A part is at most so large. Attention computes tiles of 64 rows or a multiple; a shorter part
would be judged by few numbers, whose largest may be near zero by chance."""

TYPICAL = 0.95
"""PyTorch's typical error is this quantile of its errors in the parts: a yardstick that neither one
lucky part nor one where it fails decides."""

CANCELLED = 8
"""What cancellation leaves, in eps of float32. Two orders of adding up 64 products, of which a
library for CPUs chooses one, differed by 4 where the truth is 0."""


class CheckFailed(AssertionError):
    """A result is further from the truth than its tolerance allows."""


@dataclass
class Case:
    """One row of a check.

    ``ours`` and ``torch`` are two results in ``dtype``; ``truth`` is float64. ``what`` names the
    input (a shape, say), ``direction`` the pass: forward or backward. ``factor`` says how many
    times PyTorch's own error is allowed; a chapter that needs more than FACTOR says why. ``rows``
    is how many neighbouring rows are judged together: 1 where each row has a scale of its own.
    """

    what: str
    direction: str
    ours: torch.Tensor
    torch: torch.Tensor
    truth: torch.Tensor
    factor: float = FACTOR
    rows: int = ROWS

    def row(self) -> dict:
        """Return the row as it is recorded: the part that comes nearest to its tolerance."""
        worst = judge(self.ours, self.torch, self.truth, self.factor, self.rows)
        return {
            "case": self.what,
            "direction": self.direction,
            "dtype": str(self.ours.dtype).removeprefix("torch."),
            "error": worst.error,
            "torch_error": worst.torch_error,
            "tolerance": worst.tolerance,
            "ok": worst.ok,
        }


@dataclass
class Judgement:
    """The part of a result that comes nearest to its tolerance, or is furthest over it.

    ``torch_error`` is PyTorch's in the same part, or its typical one where it was luckier there or
    failed altogether.
    """

    error: float
    torch_error: float
    tolerance: float

    @property
    def ok(self) -> bool:
        return self.error <= self.tolerance


def judge(
    ours: torch.Tensor,
    in_torch: torch.Tensor,
    truth: torch.Tensor,
    factor: float = FACTOR,
    rows: int = ROWS,
) -> Judgement:
    """Judge each part of a result by its own yardstick, and return the worst.

    A part is a block of rows, ``rows`` along the last but one dimension, at each index of the
    dimensions before it, so that it never crosses heads; rows longer than COLUMNS are cut as well.

    Its error is the largest |ours - truth| in it, in units of its largest |truth|. Some parts are
    zero, or what cancellation leaves of larger terms: the gradient of a query that sees one key is
    0. Kernels add in float32, so there the terms leave float32's rounding behind. Therefore a unit
    is never less than the typical part's (the median over the tensor) times some of float32's eps
    over the result's eps. Nor is it less than the smallest normal number of the dtype, below which
    the spacing of numbers no longer shrinks.

    The tolerance is ``factor`` times PyTorch's own error in the part. PyTorch may be lucky in one
    part, so that its typical error over all parts counts where it is larger, and so does half a
    unit in the last place, because no result that is rounded can promise less. The tolerance stays
    at LIMIT where PyTorch fails by more. Where its typical error leads there: :class:`ValueError`.
    """
    error = _errors(ours, truth, rows)
    own = _errors(in_torch.to(ours.dtype), truth, rows)
    typical = torch.quantile(own, TYPICAL, interpolation="nearest").item()
    least = tolerance(typical, ours.dtype, factor)
    bound = (factor * own).clamp(least, LIMIT)
    worst = (error / bound).argmax()
    in_part = own[worst].item() if own[worst].isfinite() else typical
    return Judgement(error[worst].item(), max(in_part, typical), bound[worst].item())


def error(result: torch.Tensor, truth: torch.Tensor, rows: int = ROWS) -> float:
    """Return the error of the worst part, in units of the part: see :func:`judge`.

    A part of zeros has error 1, above every tolerance. A NaN or an infinity where the truth has
    none, or the reverse, is an error without bound.
    """
    return _errors(result, truth, rows).max().item()


def _errors(result: torch.Tensor, truth: torch.Tensor, rows: int) -> torch.Tensor:
    """Return the error of each part of a result, in units of the part."""
    if truth.dtype != torch.float64:
        raise TypeError(f"truth must be float64, got {truth.dtype}.")
    if result.shape != truth.shape:
        raise ValueError(f"result has shape {tuple(result.shape)}, truth {tuple(truth.shape)}.")
    limits = torch.finfo(result.dtype)
    result = result.detach().double()
    finite = truth.isfinite()
    scale = _largest(torch.where(finite, truth, 0.0).abs(), rows)
    if not scale.any():
        raise ValueError("the truth is zero everywhere: a result of zeros would pass.")
    typical = scale[scale > 0].median()
    rounding = min(1.0, CANCELLED * torch.finfo(torch.float32).eps / limits.eps)
    unit = scale.clamp(min=max(rounding * typical.item(), limits.tiny))
    same = (result == truth) | (result.isnan() & truth.isnan())
    comparable = finite & result.isfinite()
    apart = torch.where(comparable, (result - truth).abs(), torch.inf)
    return _largest(torch.where(same, 0.0, apart), rows) / unit


def _largest(x: torch.Tensor, rows: int) -> torch.Tensor:
    """Return the largest number of each part, of numbers that are not negative."""
    if x.numel() == 0:
        return x.new_zeros(1)
    x = x.reshape((1,) * (2 - x.ndim) + x.shape)
    height, width = x.shape[-2:]
    columns = min(width, COLUMNS)
    x = torch.nn.functional.pad(x, (0, -width % columns, 0, -height % rows))
    return x.unflatten(-1, (-1, columns)).unflatten(-3, (-1, rows)).amax((-1, -3)).flatten()


def tolerance(torch_error: float, dtype: torch.dtype, factor: float = FACTOR) -> float:
    """Return the bound on an error: ``factor`` times PyTorch's own, or times half a unit in the
    last place, whichever is larger.

    :class:`ValueError` where it reaches LIMIT, because it would let wrong results pass.
    """
    bound = factor * max(torch_error, torch.finfo(dtype).eps / 2)
    if not bound < LIMIT:
        raise ValueError(
            f"{factor} times PyTorch's own error of {torch_error:.2g} is no yardstick: it must be "
            f"less than {LIMIT}. Choose an input on which PyTorch does better, or a smaller factor."
        )
    return bound


def check(
    name: str,
    cases: Iterable[Case],
    *,
    here: bool = True,
    theirs: str = "PyTorch's",
    title: str = "",
    stand_in: str = "",
) -> Shown:
    """Compare each case with float64 truth, part by part.

    Return one line that says how many passed, where, and how near the worst came to its tolerance;
    the row of each dtype that came nearest; and, folded, all rows. What the recorded run found on
    its GPU stands before what Triton's interpreter finds here. ``here=False`` says that the kernels
    cannot run on this machine: then no case is looked at, and the recorded rows stand alone.
    ``theirs`` names the column of the other error, where that is not PyTorch's, and ``title`` what
    was checked, where that is not the name under which it is recorded. ``stand_in`` says what the
    cases are of, or where they ran, if no kernel of this machine computed them.

    Raises:
        CheckFailed: one row is over its tolerance, or there is none. Nothing is recorded then.
    """
    title = title or name
    if not here:
        runs = chapter.checked(name)
        if not runs:
            return table([], f"{title}. {NOT_RECORDED}")
        return show(_summary(title, runs, theirs))
    rows = [case.row() for case in cases]
    if not rows:
        raise CheckFailed(f"{name}: no case was checked.")
    if failed := [row for row in rows if not row["ok"]]:
        _, plain = tabulated(
            _columns(failed, theirs), f"{name}: error of the worst part against float64"
        )
        raise CheckFailed(f"{len(failed)} of {len(rows)} rows failed.\n{plain}")
    chapter.keep("checks", name, rows)
    return show(_summary(title, chapter.checked(name, rows, stand_in), theirs))


def _summary(name: str, runs: dict[str, list[dict]], theirs: str) -> Shown:
    """Return a check in short, with all rows folded. ``runs`` maps where it ran to its rows."""
    line = f"{name}: " + "; ".join(_passed(where, rows) for where, rows in runs.items()) + "."
    first = next(iter(runs.values()))
    nearest = list({row["dtype"]: row for row in sorted(first, key=_nearness)}.values())
    nearest.sort(key=first.index)
    what = "of each dtype, the check nearest to its tolerance"
    what = what if len(first) > len(nearest) else "every row"
    html, plain = tabulated(_columns(nearest, theirs), f"{name}: {what}")
    folded = "".join(
        tabulated(
            _columns(rows, theirs), f"{name}, {where}: error of the worst part against float64"
        )[0]
        for where, rows in runs.items()
    )
    html = (
        f'<div class="kb-check"><p>{escape(line)}</p>{html}'
        f'<details class="kb-code"><summary>All rows</summary>{folded}</details></div>'
    )
    return Shown(html, f"{line}\n{plain}")


def _passed(where: str, rows: list[dict]) -> str:
    checks = {1: "the check", 2: "both checks"}.get(len(rows), f"all {len(rows)} checks")
    worst = max(map(_nearness, rows))
    return f"{checks} passed {where}, the worst at {worst:.2f} of its tolerance"


def _nearness(row: dict) -> float:
    return row["error"] / row["tolerance"]


def _columns(rows: list[dict], theirs: str) -> list[dict]:
    """Return the rows of a check as a reader sees them."""
    return [
        {
            "input": row["case"],
            "dtype": row["dtype"],
            "direction": row["direction"],
            "error": f"{row['error']:.1e}",
            theirs: f"{row['torch_error']:.1e}",
            "tolerance": f"{row['tolerance']:.1e}",
            "verdict": row["ok"],
        }
        for row in rows
    ]
