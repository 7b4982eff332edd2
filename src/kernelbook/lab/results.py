"""Recorded results: one JSON file a chapter and GPU, written whole or not at all."""

import ast
import hashlib
import importlib.util
import json
import os
import re
import subprocess
from datetime import UTC, datetime
from pathlib import Path

from kernelbook import runtime

SCHEMA = 1
_REQUIRED = {
    "chapter": str,
    "checks": dict,
    "fingerprint": str,
    "kernels": list,
    "modules": list,
    "provenance": dict,
    "reaches": str,
    "sweeps": dict,
    "tables": dict,
}
_PACKAGE = Path(__file__).resolve().parents[1]
_CHECKOUT = _PACKAGE.parents[1]


class ResultsError(RuntimeError):
    """A results file cannot be trusted; the message names it."""


def fingerprint(modules: list[str]) -> str:
    """Return a digest of what the modules compute.

    It reads syntax trees, so that comments, docstrings and layout do not count and every change
    of code does. It does not import the modules, and it is the same in every Python from 3.11.
    """
    digest = hashlib.sha256()
    for name in modules:
        found = importlib.util.find_spec(name)
        if found is None:
            raise ModuleNotFoundError(f"no module named {name}")
        folders = found.submodule_search_locations
        files = sorted(Path(folders[0]).rglob("*.py")) if folders else [Path(found.origin)]
        for file in files:
            tree = ast.parse(file.read_text(encoding="utf-8"))
            digest.update(f"{file.name} {_canonical(tree)}".encode())
    return digest.hexdigest()


def _canonical(node) -> str:
    """Write a syntax tree as text, without docstrings and what differs between Pythons."""
    if isinstance(node, ast.AST):
        fields = []
        for name, value in ast.iter_fields(node):
            if name == "body" and isinstance(value, list):
                value = [item for item in value if not _is_bare_string(item)]
            if value not in (None, []) and name not in ("kind", "type_comment"):
                fields.append(f"{name}={_canonical(value)}")
        return f"{type(node).__name__}({','.join(fields)})"
    if isinstance(node, list):
        return f"[{','.join(map(_canonical, node))}]"
    return repr(node)


def _is_bare_string(node: ast.AST) -> bool:
    """Tell whether a statement is a string alone: a docstring, or one behind a constant."""
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def is_stale(record: dict) -> bool:
    """Tell whether the code that a record measured has changed since."""
    try:
        return fingerprint(record["modules"]) != record["fingerprint"]
    except ModuleNotFoundError:
        return True


def slug(gpu: str) -> str:
    """Return the name of a GPU's results folder: ``NVIDIA H200`` becomes ``nvidia-h200``."""
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")


def writable_root() -> Path:
    """Return where results are written: the checkout's results/, or a folder of this one.

    KERNELBOOK_RESULTS names another.
    """
    if "KERNELBOOK_RESULTS" in os.environ:
        return Path(os.environ["KERNELBOOK_RESULTS"])
    return _CHECKOUT / "results" if _in_checkout() else Path.cwd() / "kernel-book-results"


def _in_checkout() -> bool:
    """Tell whether this package lies in a checkout of the book, and is not installed."""
    return (_CHECKOUT / "pyproject.toml").is_file() and (_CHECKOUT / "gallery").is_dir()


def recorded() -> list[dict]:
    """Return every record that can be read, sorted by GPU and chapter.

    Records lie where results are written and, in an installed package, beside its code; the
    former win.
    """
    found = {}
    for root in (_PACKAGE / "_results", writable_root()):
        for path in sorted(root.glob("*/*.json")):
            found[path.parent.name, path.stem] = read(path)
    return [found[key] for key in sorted(found)]


def find(chapter: str) -> dict | None:
    """Return the chapter's record for the GPU at hand, or else the newest, or None."""
    records = [record for record in recorded() if record["chapter"] == chapter]
    here = slug(runtime.environment().get("gpu", ""))
    records.sort(key=lambda record: record["provenance"]["date"])
    records.sort(key=lambda record: record["provenance"]["slug"] == here)
    return records[-1] if records else None


def read(path: Path) -> dict:
    """Read and validate a results file; raise :class:`ResultsError` where it is not one."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ResultsError(f"{path}: not readable as JSON ({error}). {_REMEDY}") from error
    if not isinstance(record, dict) or record.get("schema") != SCHEMA:
        raise ResultsError(f"{path}: not a results file of schema {SCHEMA}. {_REMEDY}")
    for name, kind in _REQUIRED.items():
        if not isinstance(record.get(name), kind):
            raise ResultsError(
                f"{path}: field {name!r} is missing or no {kind.__name__}. {_REMEDY}"
            )
    written_for = record["provenance"].get("slug"), record["chapter"]
    if written_for != (path.parent.name, path.stem):
        raise ResultsError(f"{path}: written for {'/'.join(map(str, written_for))}. {_REMEDY}")
    for name, sweep in record["sweeps"].items():
        for provider, times in sweep["milliseconds"].items():
            if len(times) != len(sweep["points"]):
                raise ResultsError(f"{path}: sweep {name!r} lacks times of {provider}. {_REMEDY}")
    return record


_REMEDY = "Restore it from git, or delete it and measure the chapter again on a GPU."


def save(record: dict) -> Path:
    """Write a record in one step, so that no reader ever meets half of it."""
    path = writable_root() / record["provenance"]["slug"] / f"{record['chapter']}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(record, indent=1, sort_keys=True, allow_nan=False)
    innermost_list = re.compile(r"\[([^\[\]{}]*)\]")
    text = innermost_list.sub(lambda match: f"[{' '.join(match[1].split())}]", text)
    scratch = path.with_suffix(".json.partial")
    scratch.write_text(text + "\n", encoding="utf-8")
    read_back = json.loads(scratch.read_text(encoding="utf-8"))
    if read_back != record:
        scratch.unlink()
        raise ResultsError(f"{path}: the record does not survive being written as JSON.")
    os.replace(scratch, path)
    return path


def short_commit(commit: str) -> str:
    """Return the first characters of a commit, and whether its code had been edited."""
    name, _, edited = commit.partition("-")
    return f"{name[:7]} ({edited})" if edited else name[:7]


def provenance() -> dict:
    """Return where a result measured now comes from: the machine, the software, the commit."""
    found = runtime.environment()
    return found | {
        "slug": slug(found["gpu"]),
        "commit": _commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }


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
