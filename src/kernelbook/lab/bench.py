"""Benchmarks: providers timed in turn beside the machine's own limit, or replayed."""

import importlib
import math
import re
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy
import pandas
import torch
import triton

from kernelbook.lab import chapter, display, results
from kernelbook.lab.fingerprint import function_fingerprint
from kernelbook.lab.schema import UNITS, evaluate

ROUNDS = 6
"""Turns that each provider gets at each point, so that a drift of clocks meets all alike."""

REPEAT_MS, MOST_REPEATS = 40, 60
"""Milliseconds of measurement in each turn, and how many repetitions are enough."""

PAUSE, LONGEST_PAUSE = 10**6, 2**5 * 10**6
"""Clock cycles, about half a millisecond, that the GPU waits before each run, so that the host has
queued all of it: a kernel's time is then the GPU's, and not that of a busy host. Where the host
takes longer, the pause is doubled, up to 16 milliseconds."""


@dataclass(frozen=True)
class Absent:
    """A provider that cannot be timed here, and why."""

    reason: str


def peer(module: str, use: Callable) -> Callable | Absent:
    """Return ``use(module)``, or say that the library is absent or refuses the input.

    A refusal comes from the library's own code. A mistake in ours, a name that does not exist or
    a call with wrong arguments, is raised, because it would leave the library out for ever.
    """
    library = module.partition(".")[0]
    try:
        run = use(importlib.import_module(module))
        run()
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            return Absent(f"{library} cannot be imported: {_in_short(error)}")
        missing = "is not installed" if error.name == library else f"has no module {error.name}"
        return Absent(f"{library} {missing}")
    except Exception as error:  # what a library raises when it refuses is its own choice
        _refuse_lost_gpu(module, error)
        if not _is_refusal(error, library, use):
            raise RuntimeError(
                f"the book's own call of {module} failed ({_in_short(error)}): it is mistaken, or "
                f"written for another version of {library}."
            ) from error
        return Absent(f"{library} refuses some inputs: {_in_short(error)}")
    return run


def tried(run: Callable, name: str = "a version of this page") -> Callable | Absent:
    """Return a run, or why it fails here: for the version of a page, which one kind of GPU or one
    Triton may refuse, and which must not take the rest of the page with it.

    A run after which the GPU runs nothing any more is raised, with its ``name``.
    """
    try:
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    except Exception as error:  # what refuses may be the compiler, the assembler or the driver
        _refuse_lost_gpu(name, error)
        return Absent(f"it does not run here: {_in_short(error)}")
    return run


def _refuse_lost_gpu(name: str, error: Exception) -> None:
    """Raise if the GPU runs nothing any more after an error, as after an illegal instruction.

    All that follows would fail as well, and say that it was its own fault.
    """
    if not torch.cuda.is_available():
        return
    try:
        torch.cuda.synchronize()
    except Exception as lost:
        raise RuntimeError(
            f"{name} broke the GPU's state, so that nothing runs in this process any more "
            f"({_in_short(lost)}): mend its kernel, or leave it out."
        ) from error


def attempt(name: str, experiment: Callable[[], list[dict]] | Absent) -> chapter.Table:
    """Measure as :func:`kernelbook.lab.measure` does, or record why it cannot be done.

    A check that fails is raised all the same: it would be no reason, but a fault.
    """

    def reasoned() -> list[dict]:
        if isinstance(experiment, Absent):
            return [{chapter.WHY_NOT: experiment.reason}]
        try:
            return experiment()
        except AssertionError:
            raise
        except Exception as error:  # as above
            _refuse_lost_gpu(name, error)
            return [{chapter.WHY_NOT: _in_short(error)}]

    return chapter.measure(name, reasoned)


def _is_refusal(error: Exception, library: str, use: Callable) -> bool:
    """Tell whether an exception comes from the library, and not from the function that calls it.

    The innermost frame that is either's decides. Compiled functions have no frame; PyTorch's raise
    RuntimeError, which Python itself does not raise for a mistake in our own line.
    """
    ours = getattr(use, "__module__", None)
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        name = frame.f_globals.get("__name__", "")
        if name == ours or name.partition(".")[0] == __name__.partition(".")[0]:
            return isinstance(error, RuntimeError)
        if name.partition(".")[0] == library:
            return True
    return True  # it was raised while the library was imported


def _in_short(error: Exception) -> str:
    """Return an exception as one short line, without the folders of this machine."""
    first = next(iter(str(error).strip().splitlines()), "")
    first = re.sub(r"(?<![\w.])(/[^\s/:'\"]+)+/(?=[^\s/])", "", first)
    text = f"{type(error).__name__}: {first}" if first else type(error).__name__
    return text if len(text) <= 90 else f"{text[:89]}…"


@dataclass
class Sweep:
    """What a benchmark measured: providers over points, with the formula of the work done.

    ``points`` are dicts of what varies; ``providers`` are in the order in which they are shown;
    ``milliseconds[provider][i]`` holds the 20th, 50th and
    80th percentile of the times at point i, or nothing where the provider was absent, which
    ``skipped`` explains. ``host_included`` names the providers that the host feeds more slowly than
    the GPU runs them: their times include the host's. ``mark`` says that the code has changed
    since, and ``elsewhere`` holds the sweeps of this name that other GPUs recorded.
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
    host_included: list[str]
    provenance: dict | None = None
    replayed: bool = False
    mark: str = ""
    elsewhere: list["Sweep"] = field(default_factory=list, repr=False)
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

    @property
    def rows(self) -> list[dict]:
        """What was measured, as the rows of a table: for figures that are drawn by hand."""
        return self.frame.to_dict("records")

    def at(self, **where) -> pandas.DataFrame:
        """Return the rows where every named column has the given value, or one of a tuple."""
        frame = self.frame
        for column, value in where.items():
            values = value if isinstance(value, tuple) else (value,)
            frame = frame[frame[column].isin([plain(value) for value in values])]
        return frame

    def _one(self, column: str, provider: str, where: dict) -> float:
        values = self.at(provider=provider, **where)[column].unique()
        if len(values) > 1:
            raise ValueError(f"{len(values)} points of {self.name} fit {where}: name one.")
        if len(values):
            return float(values[0])
        if self.provenance is None or self.mark:
            display.absences.append(display.NOT_RECORDED)
        elif provider in self.skipped:
            display.absences.append(f"Absent: {self.skipped[provider]}.")
        else:
            raise ValueError(f"no point of {self.name} fits {provider} at {where}.")
        return float("nan")

    def share(self, provider: str, **where) -> float:
        """Return the provider's speed as a fraction of the limit's, at one point."""
        return self._one("share", provider, where)

    def best_peer(self, *among: str, **where) -> tuple[str, float]:
        """Return the fastest provider beside the book and the limit, with its share, at one point.

        ``among`` names those that count, where the book has more than one. Where none was timed it
        is "none", with NaN.
        """
        others = among or [p for p in self.providers if p not in (self.limit, "Kernel Book")]
        found = {name: self.share(name, **where) for name in others}
        found = {name: share for name, share in found.items() if not math.isnan(share)}
        return max(found.items(), key=lambda item: item[1], default=("none", math.nan))

    def ahead_of(self, own: str, *among: str, **where) -> list[tuple[str, float]]:
        """Return which of the providers are faster than one at a point, with their speeds in the
        sweep's unit, the fastest first."""
        ours = self.rate(own, **where)
        found = [(name, self.rate(name, **where)) for name in among]
        return sorted((pair for pair in found if pair[1] > ours), key=lambda pair: -pair[1])

    def summary(self, **where) -> str:
        """Return a sentence: which shares of the limit the book's kernel reaches along the axis."""
        ours = {
            at: self.share("Kernel Book", **where, **{self.axis: at}) for at in self._along(where)
        }
        slowest, fastest = min(ours, key=ours.get), max(ours, key=ours.get)
        least, most = 100 * ours[slowest], 100 * ours[fastest]
        inputs = f"In {', '.join(map(str, where.values()))}"
        if most - least < 2:
            return f"{inputs} the kernel reaches {least:.0f} to {most:.0f} % of a {self.limit}."
        name, peer = self.best_peer(**where, **{self.axis: slowest})
        return (
            f"{inputs} the kernel reaches {least:.0f} % to {most:.0f} % of a {self.limit}. It is "
            f"slowest at {slowest:,} {self.axis}, where the fastest library, {name}, reaches "
            f"{100 * peer:.0f} %."
        )

    def losses(self, *wheres: dict) -> list[dict]:
        """Return a row for each point where the fastest library is ahead by more than 1 %."""
        rows = []
        for where in wheres:
            for at in self._along(where):
                ours = self.share("Kernel Book", **where, **{self.axis: at})
                name, peer = self.best_peer(**where, **{self.axis: at})
                if peer > 1.01 * ours:
                    row = where | {self.axis: at, "library": name}
                    rows.append(row | {"its %": round(100 * peer), "our %": round(100 * ours)})
        return rows

    def losses_in_words(self, *wheres: dict) -> str:
        """Return what a table of :meth:`losses` lists, and how many other GPUs would list."""
        gpu = self.provenance["gpu"] if self.provenance else "this GPU"
        said = (
            f"The table lists every point of both figures on {gpu} at which a library is ahead by "
            "more than 1 %."
            if self.losses(*wheres)
            else f"On {gpu} no library is ahead of ours by more than 1 %."
        )
        for other in self.elsewhere:
            older = ", with an older kernel," if other.mark else ""
            gaps = [row["its %"] - row["our %"] for row in other.losses(*wheres)]
            said += f" On {other.provenance['gpu']}{older} there "
            said += "is one such point" if len(gaps) == 1 else f"are {len(gaps)} such points"
            if gaps:
                said += f", by {'up to ' if len(gaps) > 1 else ''}{max(gaps)} percentage points"
            said += "."
        return said

    def _along(self, where: dict) -> list:
        """Return the values of the axis at the points that fit, in their order."""
        return [point[self.axis] for point in self.points if where.items() <= point.items()]

    def rate(self, provider: str, **where) -> float:
        """Return the provider's speed in the sweep's unit, at one point."""
        return self._one("rate", provider, where)

    def milliseconds_at(self, provider: str, **where) -> float:
        """Return the provider's median time at one point."""
        return self._one("ms", provider, where)

    def beside_the_book(self) -> dict | None:
        """Return a row that compares this GPU with the book's primary, at the last point of both.

        None where the book's own kernel was not timed on both.
        """
        for book in self.elsewhere:
            if book.provenance["slug"] != results.PRIMARY:
                continue
            for point in reversed([point for point in self.points if point in book.points]):
                shares = [s.at(provider="Kernel Book", **point)["share"] for s in (self, book)]
                if any(share.empty for share in shares):
                    continue
                here, there = (round(100 * share.iloc[0]) for share in shares)
                there = f"{there}, older kernel" if book.mark else there
                words = {key: value for key, value in point.items() if isinstance(value, str)}
                at = [f"{self.axis} {point[self.axis]:,}", *(f"{k} {v}" for k, v in words.items())]
                return {
                    "sweep": self.name,
                    "at": ", ".join(at),
                    "limit": self.limit,
                    "here, %": here,
                    f"{book.provenance['gpu']}, %": there,
                }
        return None


_MEASURED = ("provider", "p20", "ms", "p80", "rate", "share")


def plain(value):
    """Return what stands for a value in a record: the name of a dtype, or the value itself."""
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value


def bench(
    name: str,
    points: list[dict],
    providers: Callable[..., dict[str, Callable | Absent]],
    *,
    limit: str,
    work: str,
    limit_work: str | None = None,
    unit: str = "GB/s",
    timer: Callable | None = None,
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
        timer: what times the providers of a point, where they do not run in this process: it takes
            what ``providers`` returned, without those that are absent, and returns three quantiles
            of the milliseconds of each, or :class:`Absent`.

    Every run meets an L2 cache without its inputs and, after a pause, a queue that holds all of the
    run: what the host takes to launch it is not measured. A provider that a point lacks must be
    :class:`Absent` there, because a page says why something is missing.
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
    for point in points:  # a formula that fails must not cost a measurement
        for formula in (work, description["limit_work"]):
            evaluate(formula, point)
    asked = description | {"points": points}
    code = function_fingerprint(providers)
    if not here.live:
        return _replay(name, asked, code)
    milliseconds: dict[str, list] = {}
    skipped: dict[str, str] = {}
    host_included: list[str] = []
    for index, point in enumerate(points):
        arguments = {key: value for key, value in point.items() if key != "itemsize"}
        if "dtype" in arguments:
            arguments["dtype"] = getattr(torch, arguments["dtype"])
        runs = providers(**arguments)
        for provider, run in runs.items():
            if index == 0:
                milliseconds[provider] = []
            if isinstance(run, Absent):
                skipped[provider] = run.reason
        present = {k: run for k, run in runs.items() if not isinstance(run, Absent)}
        _refuse_gaps(name, index, milliseconds, runs, limit)
        times, slowed = _time_in_turn(present) if timer is None else (timer(present), ())
        for provider in [name for name, found in times.items() if isinstance(found, Absent)]:
            skipped[provider] = times.pop(provider).reason
        host_included += [provider for provider in slowed if provider not in host_included]
        for provider in milliseconds:
            milliseconds[provider] = [*milliseconds[provider], times.get(provider, [])]
        del runs
        torch.compiler.reset()  # or torch.compile would answer a new size with a general kernel
        torch.cuda.empty_cache()
    measured = asked | {
        "providers": list(milliseconds),
        "milliseconds": milliseconds,
        "skipped": skipped,
        "host_included": host_included,
    }
    chapter.keep("sweeps", name, measured | {"providers_code": code})
    elsewhere = _elsewhere(name, asked, code)
    sweep = Sweep(name, **measured, provenance=here.provenance(), elsewhere=elsewhere)
    here.sweeps.append(sweep)
    return sweep


def _refuse_gaps(name: str, index: int, milliseconds: dict, runs: dict, limit: str) -> None:
    """Raise where a provider comes or goes without a word, or the limit is absent."""
    changed = sorted(milliseconds.keys() ^ runs.keys())
    if changed:
        raise ValueError(
            f"{name}: {', '.join(changed)} is not a provider of every point (see point {index}): "
            "return lab.Absent, with the reason, where it cannot be timed."
        )
    if isinstance(runs.get(limit, Absent("")), Absent):
        raise ValueError(f"{name}: the limit {limit!r} must be timed at every point.")


def _time_in_turn(runs: dict[str, Callable]) -> tuple[dict[str, list[float]], set[str]]:
    """Return p20, p50 and p80 of the milliseconds of each run, and those that the host slowed.

    The order of every round is drawn anew. A run that draws much power leaves low clocks to the
    next, so nobody should always follow the same one.
    """
    for run in runs.values():
        run()  # compile, and choose algorithms, before anything is timed
    times = {provider: [] for provider in runs}
    slowed = set()
    draw = numpy.random.default_rng(0)
    for _ in range(ROUNDS):
        for provider in draw.permutation(list(runs)):
            sample, queued = _time(runs[provider])
            times[provider] += sample
            if not queued:
                slowed.add(str(provider))
    quantiles = {
        provider: [round(value, 6) for value in numpy.quantile(sample, (0.2, 0.5, 0.8)).tolist()]
        for provider, sample in times.items()
    }
    return quantiles, slowed


def _time(run: Callable) -> tuple[list[float], bool]:
    """Return the milliseconds of some runs, each with a cold L2 cache, and whether they are the
    GPU's alone.

    After the host has queued a run, the GPU must still be pausing before it. Where it has begun,
    the run may have waited for the host, and is made again after a pause twice as long. A run that
    waits for the GPU itself, or fills the queue, is never queued in time.
    """
    driver = triton.runtime.driver.active
    cache = driver.get_empty_cache_for_benchmark()

    pause, queued = PAUSE, True

    def once():
        driver.clear_cache(cache)
        torch.cuda._sleep(pause)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        return start, end

    def one():
        nonlocal pause, queued
        start, end = once()
        while queued and start.query():
            queued = pause < LONGEST_PAUSE
            pause = 2 * pause if queued else PAUSE
            start, end = once()
        return start, end

    def elapsed(events):
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in events]

    estimate = min(elapsed([one() for _ in range(5)]))
    times = elapsed([one() for _ in range(max(5, min(MOST_REPEATS, int(REPEAT_MS / estimate))))])
    return times, queued


def event_times(
    run: Callable, *, repeats: int = 20, before: Callable = lambda: None
) -> list[float]:
    """Return the milliseconds of some runs, each by two events of the GPU.

    Before each run the GPU pauses, so that the host can queue all of it, and then does what
    ``before`` queues. Caches stay as that leaves them. A first run, in which the kernel may be
    compiled, does not count. For experiments of a page; figures come from :func:`bench`.
    """
    times = []
    for _ in range(1 + repeats):
        torch.cuda._sleep(PAUSE)
        before()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return times[1:]


def _replay(name: str, asked: dict, code: str | None) -> Sweep:
    """Return the recorded sweep, or one without rows where none is recorded."""
    past = chapter.running().past
    if past is None or name not in past["sweeps"]:
        limit = asked["limit"]
        times = {limit: [[]] * len(asked["points"])}
        nothing = {"milliseconds": times, "skipped": {}, "host_included": []}
        display.absences.append(display.NOT_RECORDED)
        return Sweep(name, **asked, providers=[limit], **nothing)
    sweep = _recorded(past, name, asked, code)
    sweep.elsewhere = _elsewhere(name, asked, code)
    return sweep


def _elsewhere(name: str, asked: dict, code: str | None) -> list[Sweep]:
    """Return the sweeps of this name that other GPUs recorded."""
    others = chapter.running().others
    return [_recorded(record, name, asked, code) for record in others if name in record["sweeps"]]


def _recorded(record: dict, name: str, asked: dict, code: str | None) -> Sweep:
    """Return the sweep of a record, marked where other things or other code were measured."""
    measured = dict(record["sweeps"][name])
    recorded_code = measured.pop("providers_code")
    changed = any(measured[key] != asked[key] for key in asked)
    changed = changed or (code != recorded_code and None not in (code, recorded_code))
    mark = chapter.mark(record, changed)
    return Sweep(name, **measured, provenance=record["provenance"], replayed=True, mark=mark)
