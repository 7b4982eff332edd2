"""The laboratory of the book: what a chapter uses to check, measure and show its kernels."""

from kernelbook.lab.bench import Absent, Sweep, attempt, bench, event_times, peer, tried
from kernelbook.lab.chapter import (
    compiled_by,
    facts,
    finish,
    host_times,
    measure,
    ranks_at_work,
    start,
)
from kernelbook.lab.check import Case, CheckFailed, check
from kernelbook.lab.display import listing, note, read, source, table, together
from kernelbook.lab.figures import colour, draw, ladder, plot, sketch
from kernelbook.lab.ranks import Ranks, RanksFailed
from kernelbook.lab.results import ResultsError

__all__ = [
    "Absent",
    "Case",
    "CheckFailed",
    "Ranks",
    "RanksFailed",
    "ResultsError",
    "Sweep",
    "attempt",
    "bench",
    "check",
    "colour",
    "compiled_by",
    "draw",
    "event_times",
    "facts",
    "finish",
    "host_times",
    "ladder",
    "listing",
    "measure",
    "note",
    "peer",
    "plot",
    "ranks_at_work",
    "read",
    "sketch",
    "source",
    "start",
    "table",
    "together",
    "tried",
]
