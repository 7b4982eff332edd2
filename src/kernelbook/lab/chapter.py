"""One run of a chapter: what it measures or replays, and the record that it leaves."""

import os
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from unittest import mock

import matplotlib
import matplotlib.pyplot as plt
import torch
from triton.runtime.jit import JITFunction

from kernelbook import runtime
from kernelbook.lab import display, ranks, results
from kernelbook.lab.display import NOT_RECORDED, Shown, note, show, table
from kernelbook.lab.fingerprint import fingerprint, script_fingerprint
from kernelbook.lab.schema import SCHEMA
from kernelbook.ops.launch import forget


class Chapter:
    """The state of the chapter that is running.

    ``live`` tells whether it measures. ``record`` collects what is measured; ``past`` is the
    record of an earlier run, to replay when this one does not measure; ``others`` are the records
    of other GPUs, shown beside. ``sweeps`` are those that were measured. ``steps`` are the
    providers that the chapter made itself, in the order in which they came to be drawn. ``script``
    is its file; a notebook has none. ``world`` is how many ranks measure, where several do.
    """

    def __init__(
        self,
        name: str,
        modules: list[str],
        script: Path | None,
        on_ranks: bool = False,
        measures: bool = True,
    ):
        self.name = name
        self.modules = modules
        self.script = script
        self.world, self.on_gpus = ranks.at_hand() if on_ranks else (1, not runtime.INTERPRETED)
        self.live = is_live() and measures and (self.on_gpus or runtime.INTERPRETED)
        self.record = {"checks": {}, "sweeps": {}, "tables": {}, "kernels": []}
        self.past = None if self.live else results.find(name)
        if self.live:  # what could not be saved must not be measured first
            results.writable_root().mkdir(parents=True, exist_ok=True)
        own = self.provenance() if self.live else self.past and self.past["provenance"]
        self.others = results.others(name, own["slug"]) if own else []
        self.sweeps: list = []
        self.steps: list[str] = []
        self.ranks: ranks.Ranks | None = None

    def provenance(self) -> dict:
        """Return where a result measured now comes from."""
        made = results.provenance()
        return results.on_ranks(made, self.world) if self.world > 1 else made

    def here(self) -> str:
        """Say where kernels run."""
        if self.world == 1:
            return "on the GPU" if self.on_gpus else "in Triton's interpreter"
        if self.on_gpus:
            return f"on {self.world} GPUs"
        return f"on {self.world} ranks of the CPU, in Triton's interpreter"


_running: Chapter | None = None


def is_live() -> bool:
    """Tell whether chapters measure: KERNELBOOK_MODE decides, or else whether there is a GPU."""
    mode = os.environ.get("KERNELBOOK_MODE", "")
    if mode not in ("", "live", "replay"):
        raise ValueError(f"KERNELBOOK_MODE must be live or replay, got {mode!r}.")
    if mode == "live" and runtime.INTERPRETED:
        raise RuntimeError("KERNELBOOK_MODE=live needs a GPU, and kernels are interpreted here.")
    return not runtime.INTERPRETED and mode != "replay"


def start(
    name: str, *modules: str, on_ranks: bool = False, here: bool = True, measures: bool = True
) -> Shown:
    """Open a chapter, and say where it runs and where its numbers come from.

    ``modules`` are those whose kernels it measures: ``kernelbook.ops.<name>`` unless given. What
    they import of ``kernelbook.ops`` counts as well, and so do the kernels of the script that
    calls this. ``on_ranks`` says that it measures several GPUs together, by :func:`ranks_at_work`:
    it is live where there are two, and its record names how many. ``here=False`` says that its
    kernels cannot run on this machine, not even to be checked, and ``measures=False`` that what it
    measures cannot, because it needs more memory, for example. Either way the chapter replays, so
    that a book can be built on a GPU that is not equal to all of its chapters.
    """
    global _running
    script = Path(sys._getframe(1).f_code.co_filename).resolve()  # the site sets no __file__
    modules = list(modules) or [f"kernelbook.ops.{name}"]
    if _running and _running.ranks:  # of a chapter that did not come to its end
        _running.ranks.stop()
    script = script if script.is_file() else None
    _running = Chapter(name, modules, script, on_ranks, here and measures)
    display.absences.clear()
    torch.manual_seed(0)  # so that a script prints what the page shows
    if _running.live:
        return note(f"This page was run on {describe(_running.provenance())}.")
    where = _running.here()
    if _running.past is None:
        now = f"Checks run {where}." if here else "The kernels of this chapter cannot run here."
        needs = "two GPUs" if on_ranks else "a GPU"
        return note(f"{now} No speed has been recorded yet: that needs {needs}.")
    text = f"This page replays a run recorded on {describe(_running.past['provenance'])}. " + (
        f"Its checks were run again, {where}."
        if here
        else "The kernels of this chapter cannot run here."
    )
    if marked := mark(_running.past):
        why = results.awaited().get(name, "")
        return note(" ".join(filter(None, (marked, why, text))), stale=True)
    return note(text)


def running() -> Chapter:
    """Return the chapter that is running."""
    if _running is None:
        raise RuntimeError("no chapter is running: call lab.start first.")
    return _running


def ranks_at_work() -> ranks.Ranks:
    """Return the ranks of the chapter that is running, which it asked for in :func:`start`.

    They start when they are first asked to run something, and end with the chapter.
    """
    chapter = running()
    if chapter.world == 1:
        raise RuntimeError(f"{chapter.name} has no ranks: pass on_ranks=True to lab.start.")
    if chapter.ranks is None:
        chapter.ranks = ranks.Ranks(chapter.world, gpus=chapter.on_gpus)
    return chapter.ranks


def mark(record: dict, changed: bool = False) -> str:
    """Return how the numbers of a record are marked: not at all, while the code is what it was.

    ``changed`` says that it is not. Only the record that the text reads stops a build by it.
    """
    if not (changed or results.is_stale(record, running().script)):
        return ""
    return OUT_OF_DATE if record is running().past else OLDER_KERNEL


OUT_OF_DATE = "OUT OF DATE: the code has changed since."
OLDER_KERNEL = "Measured with an older kernel."


def describe(provenance: dict) -> str:
    """Return the provenance in one phrase."""
    return (
        f"{provenance['gpu']} (driver {provenance['driver']}, torch {provenance['torch']}, "
        f"triton {provenance['triton']}, commit {results.short_commit(provenance['commit'])}, "
        f"{provenance['date'][:10]})"
    )


def keep(kind: str, name: str, value) -> None:
    """Keep what was measured for the record, when a chapter is running live."""
    if _running is not None and _running.live:
        if name in _running.record[kind]:
            raise ValueError(f"{kind} named {name!r} exist already in this chapter.")
        _running.record[kind][name] = value


def checked(name: str, rows: list[dict] | None = None, stand_in: str = "") -> dict[str, list[dict]]:
    """Return the rows of a check by where it ran: on the recorded GPU, if it was not here, first.

    ``rows`` are those of this run, or None where it could not run here. ``stand_in`` says where
    they ran, if that was not Triton's interpreter.
    """
    on_gpus = not runtime.INTERPRETED and (_running is None or _running.on_gpus)
    if rows is not None and on_gpus:
        made = _running.provenance() if _running else results.provenance()
        return {f"on {made['gpu']}": rows}
    past = _running.past if _running else None
    recorded = past and past["checks"].get(name)
    on_gpu = {f"on {past['provenance']['gpu']}": recorded} if recorded else {}
    return on_gpu if rows is None else on_gpu | {stand_in or "in Triton's interpreter": rows}


WHY_NOT = "not measured, because"
"""The only column of a table that says why it holds nothing."""


class Table(Shown):
    """What an experiment found on one GPU.

    ``rows`` are empty where nothing was recorded, or nothing but why, which is ``why_not``.
    ``mark`` says that the code has changed since, and ``elsewhere`` holds the tables of this name
    that other GPUs recorded. The caption names the GPU alone: driver, versions and commit stand at
    the top of the page and under its figures.
    """

    def __init__(
        self,
        name: str,
        rows: list[dict],
        provenance: dict | None,
        *,
        replayed: bool = True,
        mark: str = "",
        elsewhere: Iterable["Table"] = (),
    ):
        self.rows, self.provenance = rows, provenance
        self.replayed, self.mark = replayed, mark
        self.elsewhere = list(elsewhere)
        if provenance is None:
            where = NOT_RECORDED
        elif replayed:
            where = f"{mark} Recorded on {provenance['gpu']}.".strip()
        else:
            where = f"Measured on {provenance['gpu']}."
        html, plain = display.shortened(rows, f"{name}. {where}")
        if others := display.beside(self.elsewhere):
            own = provenance["gpu"]
            html = display.of_gpu(own, html) + "".join(
                display.of_gpu(other.provenance["gpu"], other.html, own) for other in others
            )
        if self.elsewhere:
            also = (f"{other.provenance['slug']}/{running().name}.json" for other in self.elsewhere)
            plain += f"\nAlso recorded: {', '.join(also)}"
        super().__init__(html, plain)
        self.why_not = NOT_RECORDED
        if rows and WHY_NOT in rows[0]:
            self.rows, self.why_not = [], f"Not measured: {rows[0][WHY_NOT]}."
            display.absences.append(self.why_not)


def measure(name: str, experiment: Callable[[], list[dict]]) -> Table:
    """Run an experiment that needs a GPU and return its rows, or the rows recorded.

    The table has an attribute ``rows``, empty where nothing was recorded.
    """
    return _table(name, experiment)


HOST = "What a call costs the host"
"""The table in which a chapter says so, and the page on hardware for all of them."""

HOST_TURNS, HOST_CALLS = 60, 20
"""Turns of each provider, and the calls in a turn, of which the fastest counts: what slows a host
down has nothing to do with the call."""


def host_times(providers: dict[str, Callable], *inputs: torch.Tensor) -> Table:
    """Measure the microseconds after which a call returns, with its kernels only queued.

    ``providers`` take the inputs and return one tensor. The inputs should be so small that the GPU
    is done sooner than the host. Each provider is called without gradients, and with forward and
    backward.
    """

    def experiment() -> list[dict]:
        leaves = [x.detach().clone().requires_grad_() for x in inputs]
        rows = []
        for passes in ("forward", "forward and backward"):
            fastest = dict.fromkeys(providers, float("inf"))
            runs = {}
            for name, provider in providers.items():
                dy = torch.ones_like(provider(*inputs))
                runs[name] = partial(provider, *inputs)
                if passes != "forward":
                    runs[name] = partial(_forward_and_backward, provider, leaves, dy)
            for _ in range(HOST_TURNS):
                for name, run in runs.items():
                    torch.cuda.synchronize()
                    begin = time.perf_counter()
                    for _ in range(HOST_CALLS):
                        run()
                    took = (time.perf_counter() - begin) / HOST_CALLS
                    fastest[name] = min(fastest[name], took)
            rows.append(
                {"pass": passes}
                | {f"{name} (µs)": round(1e6 * took, 1) for name, took in fastest.items()}
            )
        return rows

    return _table(HOST, experiment)


def _forward_and_backward(provider: Callable, leaves: list, dy: torch.Tensor) -> tuple:
    return torch.autograd.grad(provider(*leaves), leaves, dy)


def facts(name: str, launches: dict[str, Callable]) -> Table:
    """Return what the compiler made of every kernel that the launches run.

    ``launches`` maps the name of a case to a function that launches kernels. Registers are per
    thread, spills the registers that went to memory, shared memory in bytes per program; shuffles
    are instructions that pass a value between the threads of a warp.
    """

    def experiment() -> list[dict]:
        rows = []
        for case, launch in launches.items():
            for kernel, compiled in compiled_by(launch):
                row = {
                    "case": case,
                    "kernel": kernel,
                    "registers": compiled.n_regs,
                    "shared_bytes": compiled.metadata.shared,
                    "shuffles": compiled.asm["ptx"].count("shfl.sync"),
                    "spills": compiled.n_spills,
                    "warps": compiled.metadata.num_warps,
                }
                if row not in rows:
                    rows.append(row)
        running().record["kernels"] += rows
        return rows

    return _table(name, experiment)


def compiled_by(launch: Callable) -> list[tuple]:
    """Return (name, compiled kernel) for each kernel that ``launch`` runs."""
    compiled = []
    run = JITFunction.run

    def spy(kernel, *args, **kwargs):
        compiled.append((kernel.fn.__name__, run(kernel, *args, **kwargs)))
        return compiled[-1][1]

    forget()  # a launch that is remembered does not ask the compiler
    with mock.patch.object(JITFunction, "run", spy):
        launch()
    return compiled


def _table(name: str, experiment: Callable[[], list[dict]]) -> Table:
    chapter = running()
    elsewhere = (_recorded(other, name) for other in chapter.others if name in other["tables"])
    if chapter.live:
        rows = experiment()
        columns = list(rows[0]) if rows else []
        values = [[row[column] for column in columns] for row in rows]
        keep("tables", name, {"columns": columns, "rows": values})
        shown = Table(name, rows, chapter.provenance(), replayed=False, elsewhere=elsewhere)
    elif chapter.past and name in chapter.past["tables"]:
        shown = _recorded(chapter.past, name, elsewhere)
    else:
        display.absences.append(NOT_RECORDED)
        shown = Table(name, [], None)
    return show(shown)


def _recorded(record: dict, name: str, elsewhere: Iterable[Table] = ()) -> Table:
    """Return the table that a record holds under a name."""
    columns, values = record["tables"][name]["columns"], record["tables"][name]["rows"]
    rows = [dict(zip(columns, row, strict=True)) for row in values]
    return Table(name, rows, record["provenance"], mark=mark(record), elsewhere=elsewhere)


def finish(reaches: str) -> Shown:
    """Close the chapter and, when it ran live, write its record.

    ``reaches`` says in one phrase what the chapter's best kernel attains; the landing page shows
    it. A chapter that stopped before this line leaves no record. On another GPU than the book's
    primary, the two are compared.
    """
    global _running
    chapter, _running = running(), None
    if chapter.ranks:
        chapter.ranks.stop()
    if matplotlib.get_backend().lower() in matplotlib.backends.backend_registry.list_builtin(
        matplotlib.backends.BackendFilter.INTERACTIVE
    ):
        plt.show()
    if not chapter.live:
        past = chapter.past
        if past is None:
            return note(f"Nothing was measured. {NOT_RECORDED}")
        link = _address(past, chapter.name)
        where = past["provenance"]
        said = f"Replayed from the run recorded on {where['gpu']} on {where['date'][:10]}:"
        return note(said, link=link)
    if not chapter.record["checks"]:
        raise RuntimeError(f"{chapter.name} checked nothing: its speed is not recorded.")
    record = chapter.record | {
        "schema": SCHEMA,
        "chapter": chapter.name,
        "modules": chapter.modules,
        "fingerprint": fingerprint(chapter.modules),
        "script": script_fingerprint(chapter.script),
        "provenance": chapter.provenance(),
        "reaches": reaches,
    }
    path = results.save(record).resolve()
    label, address = _address(record, chapter.name)
    link = (label if display.in_site() else str(path), address)
    if results.of_primary(record["provenance"]["slug"]):
        return note("Every number of this chapter:", link=link)
    rows = [row for sweep in chapter.sweeps if (row := sweep.beside_the_book())]
    what = "the speed of Kernel Book as a percentage of each GPU's own limit"
    closing = [
        *([table(rows, f"Your GPU beside the book's: {what}.")] if rows else []),
        note("Every number of this chapter:", link=link),
        note("To add them to the book, see the page", link=("Add your GPU", "contribute.html")),
    ]
    html, plain = zip(*((shown.html, shown.plain) for shown in closing), strict=True)
    return Shown("".join(html), "\n\n".join(plain))


def _address(record: dict, chapter: str) -> tuple[str, str]:
    """Return the name of a record and its address within the site."""
    name = f"{record['provenance']['slug']}/{chapter}.json"
    return name, f"_results/{name}"
