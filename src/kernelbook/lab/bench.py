"""Benchmarks: providers timed in turn beside the machine's own limit, or replayed."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy
import pandas
import torch
import triton

from kernelbook.lab import chapter, results

ROUNDS = 6
"""Turns that each provider gets at each point, so that a drift of clocks meets all alike."""

REPEAT_MS, MOST_REPEATS = 40, 60
"""Milliseconds of measurement in each turn, and how many repetitions are enough."""

PAUSE = 10**6
"""Clock cycles, about half a millisecond, that the GPU waits before each run, so that the host has
queued all of it: a kernel's time is then the GPU's, and not that of a busy host."""

UNITS = {"GB/s": 1e9, "TFLOP/s": 1e12}


@dataclass(frozen=True)
class Absent:
    """A provider that cannot be timed here, and why."""

    reason: str


def peer(module: str, use: Callable) -> Callable | Absent:
    """Return ``use(module)``, or say that the library is absent or refuses the input."""
    try:
        imported = importlib.import_module(module)
    except ImportError:
        return Absent(f"{module.partition('.')[0]} is not installed")
    try:
        run = use(imported)
        run()
    except Exception as error:  # what a library raises when it refuses is its own choice
        return Absent(f"{module.partition('.')[0]} refuses some inputs ({type(error).__name__})")
    return run


@dataclass
class Sweep:
    """What a benchmark measured: providers over points, with the formula of the work done.

    ``points`` are dicts of what varies; ``providers`` are in the order in which they are shown;
    ``milliseconds[provider][i]`` holds the 20th, 50th and
    80th percentile of the times at point i, or nothing where the provider was absent.
    """

    name: str
    axis: str
    unit: str
    work: str
    limit: str
    limit_work: str
    points: list[dict]
    providers: list[str]
    milliseconds: dict[str, list[list[float]]]
    skipped: dict[str, str]
    provenance: dict | None = None
    replayed: bool = False
    stale: bool = False
    frame: pandas.DataFrame = field(init=False, repr=False)

    def __post_init__(self):
        rows = []
        for provider in self.providers:
            times = self.milliseconds[provider]
            limits = self.milliseconds[self.limit]
            for point, limit, quantiles in zip(self.points, limits, times, strict=True):
                if not quantiles:
                    continue
                low, median, high = quantiles
                work = self.limit_work if provider == self.limit else self.work
                rate = self._rate(work, point, median)
                share = rate / self._rate(self.limit_work, point, limit[1])
                values = (provider, low, median, high, rate, share)
                rows.append(point | dict(zip(_MEASURED, values, strict=True)))
        columns = [*self.points[0], *_MEASURED]
        self.frame = pandas.DataFrame(rows, columns=columns)

    def _rate(self, work: str, point: dict, milliseconds: float) -> float:
        return evaluate(work, point) / UNITS[self.unit] / milliseconds * 1e3

    def at(self, **where) -> pandas.DataFrame:
        """Return the rows where every named column has the given value."""
        frame = self.frame
        for column, value in where.items():
            frame = frame[frame[column] == plain(value)]
        return frame

    def _one(self, column: str, provider: str, where: dict) -> float:
        values = self.at(provider=provider, **where)[column].unique()
        if len(values) > 1:
            raise ValueError(f"{len(values)} points of {self.name} fit {where}: name one.")
        return float(values[0]) if len(values) else float("nan")

    def share(self, provider: str, **where) -> float:
        """Return the provider's speed as a fraction of the limit's, at one point."""
        return self._one("share", provider, where)

    def rate(self, provider: str, **where) -> float:
        """Return the provider's speed in the sweep's unit, at one point."""
        return self._one("rate", provider, where)

    def milliseconds_at(self, provider: str, **where) -> float:
        """Return the provider's median time at one point."""
        return self._one("ms", provider, where)


_MEASURED = ("provider", "p20", "ms", "p80", "rate", "share")


def plain(value):
    """Return what stands for a value in a record: the name of a dtype, or the value itself."""
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value


def evaluate(work: str, point: Mapping) -> float:
    """Evaluate the formula of the work, in the names of the point: ``2 * elements * itemsize``."""
    return eval(work, {"__builtins__": {}}, dict(point))


def bench(
    name: str,
    points: list[dict],
    providers: Callable[..., dict[str, Callable | Absent]],
    *,
    limit: str,
    work: str,
    limit_work: str | None = None,
    unit: str = "GB/s",
) -> Sweep:
    """Time providers at every point, in turn, or return what an earlier run recorded.

    Args:
        name: what is measured; the name under which it is recorded.
        points: what varies, one dict a point. The first key is the axis. A ``dtype`` adds its
            ``itemsize``, in bytes.
        providers: called with a point's values; returns a function without arguments for each
            provider, or :class:`Absent`. All are timed on the same inputs.
        limit: the provider that stands for the machine's limit.
        work: the formula of the bytes or FLOPs, in the names of a point.
        limit_work: that of the limit, where it does other work.
        unit: ``GB/s`` or ``TFLOP/s``.

    Every run meets an L2 cache without its inputs and, after a pause, a queue that holds all of the
    run: what the host takes to launch it is not measured.
    """
    here = chapter.running()
    points = [
        {key: plain(value) for key, value in point.items()}
        | ({"itemsize": point["dtype"].itemsize} if "dtype" in point else {})
        for point in points
    ]
    description = {
        "axis": next(iter(points[0])),
        "unit": unit,
        "work": work,
        "limit": limit,
        "limit_work": limit_work or work,
    }
    if not here.live:
        return _replay(name, points, description)
    milliseconds: dict[str, list] = {}
    skipped: dict[str, str] = {}
    for index, point in enumerate(points):
        arguments = {key: value for key, value in point.items() if key != "itemsize"}
        if "dtype" in arguments:
            arguments["dtype"] = getattr(torch, arguments["dtype"])
        runs = providers(**arguments)
        for provider, run in runs.items():
            milliseconds.setdefault(provider, [[]] * index)
            if isinstance(run, Absent):
                skipped[provider] = run.reason
        times = _time_in_turn({k: run for k, run in runs.items() if not isinstance(run, Absent)})
        for provider in milliseconds:
            milliseconds[provider] = [*milliseconds[provider], times.get(provider, [])]
        del runs
        torch.compiler.reset()  # or torch.compile would answer a new size with a general kernel
        torch.cuda.empty_cache()
    measured = description | {
        "points": points,
        "providers": list(milliseconds),
        "milliseconds": milliseconds,
        "skipped": skipped,
    }
    chapter.keep("sweeps", name, measured)
    return Sweep(name, **measured, provenance=results.provenance())


def _time_in_turn(runs: dict[str, Callable]) -> dict[str, list[float]]:
    """Return p20, p50 and p80 of the milliseconds of each run.

    The order of every round is drawn anew. A run that draws much power leaves low clocks to the
    next, so nobody should always follow the same one.
    """
    for run in runs.values():
        run()  # compile, and choose algorithms, before anything is timed
    times = {provider: [] for provider in runs}
    draw = numpy.random.default_rng(0)
    for _ in range(ROUNDS):
        for provider in draw.permutation(list(runs)):
            times[provider] += _time(runs[provider])
    return {
        provider: [round(value, 6) for value in numpy.quantile(sample, (0.2, 0.5, 0.8)).tolist()]
        for provider, sample in times.items()
    }


def _time(run: Callable) -> list[float]:
    """Return the milliseconds that the GPU takes for some runs, each with a cold L2 cache."""
    driver = triton.runtime.driver.active
    cache = driver.get_empty_cache_for_benchmark()

    def one():
        driver.clear_cache(cache)
        torch.cuda._sleep(PAUSE)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        return start, end

    def elapsed(events):
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in events]

    estimate = min(elapsed([one() for _ in range(5)]))
    return elapsed([one() for _ in range(max(5, min(MOST_REPEATS, int(REPEAT_MS / estimate))))])


def _replay(name: str, points: list[dict], description: dict) -> Sweep:
    """Return the recorded sweep, or one without rows where none is recorded."""
    measured = chapter.recall("sweeps", name)
    if measured is None:
        limit = description["limit"]
        nothing = {"milliseconds": {limit: [[]] * len(points)}, "skipped": {}}
        return Sweep(name, **description, points=points, providers=[limit], **nothing)
    past = chapter.running().past
    asked, recorded = description | {"points": points}, {k: measured.get(k) for k in description}
    stale = results.is_stale(past) or asked != recorded | {"points": measured["points"]}
    shown = measured | description  # the formulas that are evaluated are the script's own
    return Sweep(name, **shown, provenance=past["provenance"], replayed=True, stale=stale)
