"""One run of a chapter: what it measures or replays, and the record that it leaves."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import matplotlib
import matplotlib.pyplot as plt
import torch
from triton.runtime.jit import JITFunction

from kernelbook import runtime
from kernelbook.lab import display, results
from kernelbook.lab.display import NOT_RECORDED, Shown, note, table
from kernelbook.lab.fingerprint import fingerprint, script_fingerprint
from kernelbook.lab.schema import SCHEMA


class Chapter:
    """The state of the chapter that is running.

    ``live`` tells whether it measures. ``record`` collects what is measured; ``past`` is the
    record of an earlier run, to replay when this one does not measure. ``steps`` are the providers
    that the chapter made itself, in the order in which they came to be drawn. ``script`` is its
    file; a notebook has none.
    """

    def __init__(self, name: str, modules: list[str], script: Path | None):
        self.name = name
        self.modules = modules
        self.script = script
        self.live = is_live()
        self.record = {"checks": {}, "sweeps": {}, "tables": {}, "kernels": []}
        self.past = None if self.live else results.find(name)
        self.steps: list[str] = []


_running: Chapter | None = None


def is_live() -> bool:
    """Tell whether chapters measure: KERNELBOOK_MODE decides, or else whether there is a GPU."""
    mode = os.environ.get("KERNELBOOK_MODE", "")
    if mode not in ("", "live", "replay"):
        raise ValueError(f"KERNELBOOK_MODE must be live or replay, got {mode!r}.")
    if mode == "live" and runtime.INTERPRETED:
        raise RuntimeError("KERNELBOOK_MODE=live needs a GPU, and kernels are interpreted here.")
    return not runtime.INTERPRETED and mode != "replay"


def start(name: str, *modules: str) -> Shown:
    """Open a chapter, and say where it runs and where its numbers come from.

    ``modules`` are those whose kernels it measures: ``kernelbook.ops.<name>`` unless given. What
    they import of ``kernelbook.ops`` counts as well, and so do the kernels of the script that
    calls this.
    """
    global _running
    script = Path(sys._getframe(1).f_code.co_filename).resolve()  # the site sets no __file__
    modules = list(modules) or [f"kernelbook.ops.{name}"]
    _running = Chapter(name, modules, script if script.is_file() else None)
    display.absences.clear()
    torch.manual_seed(0)  # so that a script prints what the page shows
    if _running.live:
        return note(f"This page was run on {describe(results.provenance())}.")
    where = "in Triton's interpreter" if runtime.INTERPRETED else "on the GPU"
    if _running.past is None:
        return note(f"Checks run {where}. No speed has been recorded yet: that needs a GPU.")
    text = (
        f"Checks were run {where}. Speed was recorded on {describe(_running.past['provenance'])}."
    )
    if is_stale():
        return note(f"OUT OF DATE: the kernels have changed since. {text}", stale=True)
    return note(text)


def running() -> Chapter:
    """Return the chapter that is running."""
    if _running is None:
        raise RuntimeError("no chapter is running: call lab.start first.")
    return _running


def is_stale() -> bool:
    """Tell whether the code has changed since the record that is replayed was made."""
    past = running().past
    return past is not None and results.is_stale(past, _running.script)


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


def recall(kind: str, name: str):
    """Return what an earlier run recorded, or None where it recorded nothing."""
    past = running().past
    return past[kind].get(name) if past else None


def where_checked(name: str) -> str:
    """Say where a check ran, and what the recorded run of the same check found."""
    if not runtime.INTERPRETED:
        return "Run on the GPU."
    rows = recall("checks", name) if _running else None
    if not rows:
        return "Run in Triton's interpreter."
    worst = max(row["error"] / row["tolerance"] for row in rows)
    gpu = _running.past["provenance"]["gpu"]
    passed = "the row" if len(rows) == 1 else f"all {len(rows)} rows"
    return (
        f"Run in Triton's interpreter. On {gpu} {passed} passed, "
        f"the worst at {worst:.2f} of its tolerance."
    )


def measure(name: str, experiment: Callable[[], list[dict]]) -> Shown:
    """Run an experiment that needs a GPU and return its rows, or the rows recorded.

    The table has an attribute ``rows``, empty where nothing was recorded.
    """
    return _table(name, experiment)


def facts(name: str, launches: dict[str, Callable]) -> Shown:
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

    with mock.patch.object(JITFunction, "run", spy):
        launch()
    return compiled


def _table(name: str, experiment: Callable[[], list[dict]]) -> Shown:
    chapter = running()
    stale = False
    if chapter.live:
        rows, provenance = experiment(), results.provenance()
        columns = list(rows[0]) if rows else []
        values = [[row[column] for column in columns] for row in rows]
        keep("tables", name, {"columns": columns, "rows": values})
        where = f"Measured on {provenance['gpu']}."
    else:
        past = recall("tables", name)
        if past is None:
            display.absences.append(NOT_RECORDED)
            past = {"columns": [], "rows": []}
        rows = [dict(zip(past["columns"], row, strict=True)) for row in past["rows"]]
        provenance = chapter.past["provenance"] if rows else None
        where = f"Recorded on {describe(provenance)}." if rows else NOT_RECORDED
        if rows and is_stale():
            stale, where = True, f"OUT OF DATE: the kernels have changed since. {where}"
    shown = table(rows, f"{name}. {where}")
    shown.rows, shown.provenance = rows, provenance
    shown.replayed, shown.stale = not chapter.live, stale
    return shown


def finish(reaches: str) -> Shown:
    """Close the chapter and, when it ran live, write its record.

    ``reaches`` says in one phrase what the chapter's best kernel attains; the landing page shows
    it. A chapter that stopped before this line leaves no record.
    """
    global _running
    chapter, _running = running(), None
    if matplotlib.get_backend().lower() in matplotlib.backends.backend_registry.list_builtin(
        matplotlib.backends.BackendFilter.INTERACTIVE
    ):
        plt.show()
    if not chapter.live:
        past = chapter.past
        if past is None:
            return note(f"Nothing was measured. {NOT_RECORDED}")
        return _closing("Nothing was measured here. The recorded numbers:", past, chapter.name)
    if not chapter.record["checks"]:
        raise RuntimeError(f"{chapter.name} checked nothing: its speed is not recorded.")
    record = chapter.record | {
        "schema": SCHEMA,
        "chapter": chapter.name,
        "modules": chapter.modules,
        "fingerprint": fingerprint(chapter.modules),
        "script": script_fingerprint(chapter.script),
        "provenance": results.provenance(),
        "reaches": reaches,
    }
    results.save(record)
    return _closing("Every number of this chapter:", record, chapter.name)


def _closing(text: str, record: dict, chapter: str) -> Shown:
    """Return the last line of a chapter; in the site it links the record."""
    slug = record["provenance"]["slug"]
    return note(text, link=(f"{slug}/{chapter}.json", f"_results/{slug}/{chapter}.json"))
