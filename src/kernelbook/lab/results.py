"""Recorded results: one JSON file a chapter and GPU, written whole or not at all."""

import json
import os
import re
import subprocess
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

from kernelbook import runtime
from kernelbook.lab import schema
from kernelbook.lab.fingerprint import fingerprint, script_fingerprint
from kernelbook.lab.schema import slug

PRIMARY = "nvidia-h200"
"""The folder of the book's primary GPU: the text of the chapters reads its numbers.

A chapter that measures several GPUs together has its records in 2x-nvidia-h200 and the like; its
text reads that of the most GPUs."""

_PACKAGE = Path(__file__).resolve().parents[1]
_SHIPPED = _PACKAGE / "_results"
_CHECKOUT = _PACKAGE.parents[1]


class ResultsError(RuntimeError):
    """A results file cannot be trusted; the message names it."""


def is_stale(record: dict, script: Path | None = None) -> bool:
    """Tell whether the code that a record measured has changed since.

    ``script`` is the chapter's, whose own kernels count as well. A notebook has none: what was
    measured there is compared without it, and so is what is shown there.
    """
    try:
        if fingerprint(record["modules"]) != record["fingerprint"]:
            return True
    except ModuleNotFoundError:
        return True
    own = script_fingerprint(script)
    return own is not None and record["script"] not in (None, own)


AWAITED = "awaited.json"
"""The file beside the records that names the chapters whose records are known to be out of date,
and says what has changed since: ``{chapter: reason}``."""


def awaited() -> dict[str, str]:
    """Return the chapters whose records wait for a GPU, each with what has changed since.

    A wrong result must be mended at once, and not every GPU is always at hand. The pages of these
    chapters say that they are out of date, and why; the record of any other stops the build.
    """
    for root in (writable_root(), _SHIPPED):
        path = root / AWAITED
        if path.is_file():
            return json.loads(path.read_text(encoding="utf-8"))
    return {}


def writable_root() -> Path:
    """Return where results are written: the checkout's results/, or a folder of this one.

    KERNELBOOK_RESULTS names another.
    """
    if "KERNELBOOK_RESULTS" in os.environ:
        return _named_root(os.environ["KERNELBOOK_RESULTS"])
    return _CHECKOUT / "results" if _in_checkout() else Path.cwd() / "kernel-book-results"


def _named_root(name: str) -> Path:
    """Return the folder that KERNELBOOK_RESULTS names, in which ~ is the home folder."""
    try:
        folder = Path(name).expanduser()
    except RuntimeError as error:
        raise ResultsError(f"KERNELBOOK_RESULTS is {name!r}: {error}") from None
    if not name.strip() or (folder.exists() and not folder.is_dir()):
        raise ResultsError(f"KERNELBOOK_RESULTS must name a folder, got {name!r}.")
    return folder


def _in_checkout() -> bool:
    """Tell whether this package lies in a checkout of the book, and is not installed."""
    return (_CHECKOUT / "pyproject.toml").is_file() and (_CHECKOUT / "gallery").is_dir()


def recorded() -> list[dict]:
    """Return every record, sorted by GPU, the book's primary first, and by chapter.

    Records of several of the primary stand behind those of one, the most GPUs first.
    """
    return [read(path) for path in _files("*")]


def find(chapter: str) -> dict | None:
    """Return the chapter's record for the GPU at hand, or the primary's, or the newest, or None."""
    here = slug(runtime.environment().get("gpu", ""))

    def preference(record: dict) -> tuple:
        made = record["provenance"]
        of_book = of_primary(made["slug"])
        return made["slug"] == here, of_book, made.get("world", 1) if of_book else 0, made["date"]

    return max(map(read, _files(chapter)), key=preference, default=None)


def others(chapter: str, gpu: str) -> list[dict]:
    """Return the chapter's records but that of one GPU, whose slug is given; the primary's first.

    That one is not read, because a run that replaces it need not understand it.
    """
    return [read(path) for path in _files(chapter) if path.parent.name != gpu]


def _files(chapter: str) -> list[Path]:
    """Return the files of a chapter's records, sorted by GPU, the book's primary first: see
    :func:`recorded`.

    They lie where results are written and, in an installed package, beside its code; the former
    win.
    """
    own = writable_root()
    if "KERNELBOOK_RESULTS" in os.environ and not own.is_dir():
        raise ResultsError(f"KERNELBOOK_RESULTS names {own}, and there is no such folder.")
    found = {
        (path.parent.name, path.stem): path
        for root in (_SHIPPED, own)
        for path in root.glob(f"*/{chapter}.json")
    }

    def order(key: tuple[str, str]) -> tuple:
        folder = key[0]
        several = folder != PRIMARY and of_primary(folder)
        world = int(folder.partition("x-")[0]) if several else 1
        return not of_primary(folder), several, -world, key

    return [found[key] for key in sorted(found, key=order)]


def of_primary(folder: str) -> bool:
    """Tell whether a folder holds results of the book's primary GPU, or of several of them."""
    return re.fullmatch(rf"(\d+x-)?{re.escape(PRIMARY)}", folder) is not None


def is_primary(record: dict) -> bool:
    """Tell whether the text of the record's chapter reads its numbers: no other record is preferred
    on a machine without a GPU."""
    own = record["provenance"]["slug"]
    first = next((path.parent.name for path in _files(record["chapter"])), own)
    return of_primary(own) and first == own


def read(path: Path) -> dict:
    """Read and validate a results file; raise :class:`ResultsError` where it is not one."""
    try:
        record = schema.parse(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ResultsError(f"{path}: not readable as UTF-8 ({error.reason}). {_REMEDY}") from error
    except (OSError, schema.Refused) as error:
        raise ResultsError(f"{path}: {error}. {_REMEDY}") from error
    written_for = f"{record['provenance']['slug']}/{record['chapter']}"
    if written_for != f"{path.parent.name}/{path.stem}":
        raise ResultsError(f"{path}: written for {written_for}. {_REMEDY}")
    return record


_REMEDY = "Restore it from git, or delete it and measure the chapter again on a GPU."


def save(record: dict) -> Path:
    """Write a record in one step, so that no reader ever meets half of it.

    A record that :func:`read` would refuse is not written.
    """
    try:
        schema.validate(record)
    except schema.Refused as error:
        name = record.get("chapter") if isinstance(record, dict) else None
        raise ResultsError(f"the record of {name}: {error}. It was not written.") from error
    path = writable_root() / record["provenance"]["slug"] / f"{record['chapter']}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".json.partial")
    scratch.write_text(_written(record) + "\n", encoding="utf-8")
    os.replace(scratch, path)
    return path


def _written(value: object, margin: str = "\n") -> str:
    """Write JSON for people to compare: sorted keys, and a list of plain values on one line."""
    deeper = f"{margin} "
    if isinstance(value, dict) and value:
        keys = (f"{_written(key)}: {_written(value[key], deeper)}" for key in sorted(value))
        return f"{{{deeper}{f',{deeper}'.join(keys)}{margin}}}"
    if isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
        items = (_written(item, deeper) for item in value)
        return f"[{deeper}{f',{deeper}'.join(items)}{margin}]"
    return json.dumps(value, allow_nan=False)


def short_commit(commit: str) -> str:
    """Return the first characters of a commit, and whether its code had been edited."""
    name, _, edited = commit.partition("-")
    return f"{name[:7]} ({edited})" if edited else name[:7]


def provenance() -> dict:
    """Return where a result measured now comes from: the machine, the software, the commit."""
    found = runtime.environment()
    return found | {
        "slug": slug(found.get("gpu", "")),
        "commit": _commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }


def on_ranks(made: dict, world: int) -> dict:
    """Return the provenance of a result that several GPUs made together, one for each rank."""
    gpu = f"{world}x {made['gpu']}"
    return made | {"gpu": gpu, "slug": slug(gpu), "world": world, "interconnect": interconnect()}


@cache
def interconnect() -> str:
    """Return how the GPUs of this machine are connected, as ``nvidia-smi topo -m`` prints it.

    That is its matrix, without the legend that follows it; "unknown" where it does not answer.
    """
    command = ["nvidia-smi", "topo", "-m"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    plain = re.sub(r"\x1b\[[0-9;]*m", "", answer.stdout).partition("Legend:")[0]
    return "\n".join(line.rstrip() for line in plain.splitlines() if line.strip()) or "unknown"


def _commit() -> str:
    """Return the commit of the checkout, marked where its code has been edited.

    KERNELBOOK_COMMIT names it where the checkout has come without its history.
    """
    if "KERNELBOOK_COMMIT" in os.environ:
        return os.environ["KERNELBOOK_COMMIT"]
    if not _in_checkout():
        return "unknown"
    git = ["git", "-C", str(_CHECKOUT)]
    try:
        commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, check=True)
        status = [*git, "status", "--porcelain", "--", "src", "gallery"]
        edited = subprocess.run(status, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit.stdout.decode().strip() + ("-edited" if edited.stdout else "")
