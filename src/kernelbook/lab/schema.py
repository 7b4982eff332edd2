"""What a results file may hold: every field, its kind and its range.

A record that contradicts itself is refused, because a page would show it as the truth.
"""

import ast
import json
import math
import operator
import re
from collections.abc import Callable, Collection, Mapping
from datetime import datetime

SCHEMA = 2
"""The version of what is described here; a file of another is measured again."""

LIMIT = 0.1
"""No tolerance of a check is above this. A part of zeros has error 1, and 64 keys that are lost
among 4,096 have error 1/8, because n of N random terms are about sqrt(n / N) of their sum."""

UNITS = {"GB/s": 1e9, "TFLOP/s": 1e12}
LARGEST = 2**63
"""No number of a record is as large: it would be a mistake, and no float holds it exactly."""


class Refused(ValueError):
    """A value does not belong in a record; the message names the field."""


Rule = Callable[[object, str], None]
"""A rule takes a value and the name of its field, and raises :class:`Refused`."""


def parse(text: str) -> dict:
    """Return the record that a text holds, or raise :class:`Refused`."""
    try:
        found = json.loads(text, object_pairs_hook=_once)  # NaN passes here, and no rule
    except Refused:
        raise
    except RecursionError:
        raise Refused("not readable as JSON (nested too deeply)") from None
    except ValueError as error:
        raise Refused(f"not readable as JSON ({error})") from None
    validate(found)
    return found


def _once(pairs: list[tuple]) -> dict:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise Refused(f"field {twice!r} occurs twice in one object")
    return found


def validate(found: object) -> None:
    """Raise :class:`Refused` unless this is a whole record that agrees with itself."""
    if not isinstance(found, dict) or found.get("schema") != SCHEMA:
        raise Refused(f"not a results file of schema {SCHEMA}")
    _RECORD(found, "")


# -- rules of values ------------------------------------------------------------------------------


def _refuse(field: str, value: object, must: str) -> None:
    text = repr(value)
    came = text if len(text) <= 60 else f"{text[:60]}…"
    raise Refused(f"field {field} must be {must}, got {came}")


def _text(value: object, field: str) -> None:
    if not isinstance(value, str) or not value.strip():
        _refuse(field, value, "a text")


def _matches(pattern: str, must: str) -> Rule:
    def rule(value: object, field: str) -> None:
        if not isinstance(value, str) or not re.fullmatch(pattern, value):
            _refuse(field, value, must)

    return rule


def _one_of(choices) -> Rule:
    def rule(value: object, field: str) -> None:
        if not isinstance(value, str) or value not in choices:
            _refuse(field, value, f"one of {', '.join(choices)}")

    return rule


def _is_number(value: object) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and abs(value) < LARGEST  # NaN and infinity are not less


def _number(least: float, *, above: bool = False, whole: bool = False) -> Rule:
    """Allow finite numbers from ``least`` on, or above it."""
    kind = "a whole number" if whole else "a number"

    def rule(value: object, field: str) -> None:
        good = _is_number(value) and (value > least if above else value >= least)
        if not good or (whole and not isinstance(value, int)):
            _refuse(field, value, f"{kind} {'above' if above else 'of at least'} {least}")

    return rule


def _true(value: object, field: str) -> None:
    if value is not True:
        _refuse(field, value, "true")


def _date(value: object, field: str) -> None:
    try:
        datetime.strptime(value, "%Y-%m-%dT%H:%M:%SZ")
    except (TypeError, ValueError):
        _refuse(field, value, "a UTC date such as 2026-01-02T03:04:05Z")


def _cell(value: object, field: str) -> None:
    """Allow what a table shows: a text, a finite number, true, false or nothing."""
    if not (value is None or isinstance(value, str | bool) or _is_number(value)):
        _refuse(field, value, "a text, a finite number, true, false or null")


def _coordinate(value: object, field: str) -> None:
    if not (_is_number(value) or (isinstance(value, str) and value)):
        _refuse(field, value, "a text or a finite number")


def _quantiles(value: object, field: str) -> None:
    """Allow nothing, or the 20th, 50th and 80th percentile of some milliseconds."""
    if isinstance(value, list) and not value:
        return
    _list(_number(0, above=True))(value, field)
    if len(value) != 3 or sorted(value) != value:
        _refuse(field, value, "three numbers that do not fall")


_HEX = _matches("[0-9a-f]{64}", "64 hexadecimal digits")
_DTYPE = _matches(r"[a-z]+\d+\w*", "the name of a dtype")
_MODULE = _matches(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", "the name of a module")
_NAME = _matches(r"[A-Za-z0-9][\w.-]*", "a file's name")


# -- rules of containers --------------------------------------------------------------------------


def _or_null(rule: Rule) -> Rule:
    return lambda value, field: None if value is None else rule(value, field)


def _list(rule: Rule, *, least: int = 0, unique: bool = False) -> Rule:
    def check(value: object, field: str) -> None:
        if not isinstance(value, list) or len(value) < least:
            _refuse(field, value, f"a list of at least {least}" if least else "a list")
        for index, item in enumerate(value):
            rule(item, f"{field}[{index}]")
        if unique and any(item in value[:index] for index, item in enumerate(value)):
            _refuse(field, value, "a list without repetitions")

    return check


def _each(rule: Rule, *, least: int = 0) -> Rule:
    """Allow an object of any names whose values obey the rule."""

    def check(value: object, field: str) -> None:
        if not isinstance(value, dict) or len(value) < least:
            _refuse(field, value, f"an object with at least {least}" if least else "an object")
        for name, item in value.items():
            _text(name, f"{field}: the name")
            rule(item, f"{field}[{name!r}]")

    return check


def _object(
    fields: Mapping[str, Rule],
    also: Callable = lambda value, field: None,
    optional: Collection[str] = (),
) -> Rule:
    """Allow an object of exactly these fields, which obey their rules and, together, ``also``."""

    def check(value: object, field: str) -> None:
        if not isinstance(value, dict):
            _refuse(field, value, "an object")
        inside = f"{field}." if field else ""
        for name in fields:
            if name not in value and name not in optional:
                raise Refused(f"field {inside}{name} is missing")
        for name in value:
            if name not in fields:
                raise Refused(f"field {inside}{name} does not belong there")
            fields[name](value[name], f"{inside}{name}")
        also(value, field)

    return check


# -- what belongs together ------------------------------------------------------------------------


def _passed(row: dict, field: str) -> None:
    if row["tolerance"] > LIMIT:
        _refuse(f"{field}.tolerance", row["tolerance"], f"at most {LIMIT}")
    if row["error"] > row["tolerance"]:
        _refuse(f"{field}.error", row["error"], f"within the tolerance of {row['tolerance']}")


def _names_its_slug(provenance: dict, field: str) -> None:
    if provenance["slug"] != slug(provenance["gpu"]):
        _refuse(f"{field}.slug", provenance["slug"], f"{slug(provenance['gpu'])!r}, of its GPU")
    ranks = [provenance.get(name) for name in _OF_RANKS]
    if any(ranks) and not all(ranks):
        _refuse(f"{field}.{_OF_RANKS[0]}", ranks[0], f"beside {_OF_RANKS[1]}, or neither")
    named = re.match(r"(\d+)x ", provenance["gpu"])
    if (int(named[1]) if named else 1) != provenance.get("world", 1):
        count = f"the GPUs that {provenance['gpu']!r} counts"
        _refuse(f"{field}.world", provenance.get("world"), count)


def _agrees(sweep: dict, field: str) -> None:
    """Refuse a sweep whose points, providers, times and formulas do not fit together."""
    points, providers, times = sweep["points"], sweep["providers"], sweep["milliseconds"]
    for index, point in enumerate(points):
        here = f"{field}.points[{index}]"
        if point.keys() != points[0].keys():
            _refuse(here, sorted(point), f"an object of {', '.join(sorted(points[0]))}")
        _POSITIVE(point.get(sweep["axis"]), f"{here}[{sweep['axis']!r}]")
        for name, value in point.items():
            if isinstance(value, str) != isinstance(points[0][name], str):
                _refuse(f"{here}[{name!r}]", value, f"as in the first point: {points[0][name]!r}")
            if name == "dtype":
                _DTYPE(value, f"{here}['dtype']")
        for name in ("work", "limit_work"):
            try:
                evaluate(sweep[name], point)
            except ValueError as error:
                raise Refused(f"field {field}.{name}: {error}") from None
    if times.keys() != set(providers):
        _refuse(f"{field}.milliseconds", sorted(times), f"of {', '.join(sorted(providers))}")
    if sweep["limit"] not in providers:
        _refuse(f"{field}.limit", sweep["limit"], f"one of {', '.join(providers)}")
    for provider, of_points in times.items():
        here = f"{field}.milliseconds[{provider!r}]"
        if len(of_points) != len(points):
            _refuse(here, of_points, f"of {len(points)} points")
        if provider == sweep["limit"] and not all(of_points):
            _refuse(here, of_points, "measured at every point, because it is the limit")
        if (provider in sweep["skipped"]) == all(of_points):
            absent = "absent somewhere, as skipped says" if all(of_points) else "whole, or skipped"
            _refuse(here, of_points, absent)
    for name in ("skipped", "host_included"):
        for provider in sweep[name]:
            _one_of(providers)(provider, f"{field}.{name}: the name")


def _is_rectangular(table: dict, field: str) -> None:
    for index, row in enumerate(table["rows"]):
        if len(row) != len(table["columns"]):
            _refuse(f"{field}.rows[{index}]", row, f"of {len(table['columns'])} columns")


_COUNT, _NATURAL, _POSITIVE = _number(1, whole=True), _number(0, whole=True), _number(0, above=True)
_CLOCKS = dict.fromkeys(("max_sm_mhz", "max_memory_mhz"), _COUNT)  # where they can be read
_PROVENANCE = dict.fromkeys(("commit", "cuda", "driver", "gpu", "python"), _text)
_PROVENANCE |= dict.fromkeys(("torch", "triton"), _text)
_PROVENANCE |= {"date": _date, "slug": _NAME, "clocks": _object(_CLOCKS, optional=_CLOCKS)}
_PROVENANCE |= {"sm_count": _COUNT, "memory_gib": _POSITIVE, "l2_mib": _POSITIVE}
_OF_RANKS = "world", "interconnect"  # where several GPUs worked together, one for each rank
_PROVENANCE |= {"world": _number(2, whole=True), "interconnect": _text}
_CHECK = {"case": _text, "direction": _text, "dtype": _DTYPE, "ok": _true}
_CHECK |= {"error": _number(0), "torch_error": _number(0), "tolerance": _POSITIVE}
_SWEEP = dict.fromkeys(("axis", "work", "limit", "limit_work"), _text) | {
    "unit": _one_of(UNITS),
    "points": _list(_each(_coordinate, least=1), least=1, unique=True),
    "providers": _list(_text, least=1, unique=True),
    "milliseconds": _each(_list(_quantiles)),
    "skipped": _each(_text),
    "host_included": _list(_text, unique=True),
    "providers_code": _or_null(_HEX),
}
_TABLE = {"columns": _list(_text, unique=True), "rows": _list(_list(_cell))}
_KERNEL = {"case": _text, "kernel": _text, "registers": _COUNT, "warps": _COUNT}
_KERNEL |= dict.fromkeys(("shared_bytes", "shuffles", "spills"), _NATURAL)
_RECORD = _object(
    {
        "schema": _COUNT,
        "chapter": _NAME,
        "checks": _each(_list(_object(_CHECK, _passed), least=1), least=1),
        "fingerprint": _HEX,
        "kernels": _list(_object(_KERNEL)),
        "modules": _list(_MODULE, least=1, unique=True),
        "provenance": _object(_PROVENANCE, _names_its_slug, optional=_OF_RANKS),
        "reaches": _text,
        "script": _or_null(_HEX),
        "sweeps": _each(_object(_SWEEP, _agrees)),
        "tables": _each(_object(_TABLE, _is_rectangular)),
    }
)


def slug(gpu: str) -> str:
    """Return the name of a GPU's results folder: ``NVIDIA H200`` becomes ``nvidia-h200``."""
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")


# -- formulas -------------------------------------------------------------------------------------

_OPERATIONS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}


def evaluate(work: str, point: Mapping) -> float:
    """Evaluate the formula of the work, in the names of the point: ``2 * elements * itemsize``.

    It is arithmetic alone, and its result a positive number: anything else is a ``ValueError``.
    """

    def value(node: ast.expr) -> float:
        if isinstance(node, ast.Constant) and _is_number(node.value):
            return node.value
        if isinstance(node, ast.Name) and _is_number(point.get(node.id)):
            return point[node.id]
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
            return _OPERATIONS[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -value(node.operand)
        part = ast.unparse(node)
        raise ValueError(
            f"{part!r} must be a number, a sum, product or quotient, or a number of the point "
            f"({', '.join(name for name in point if _is_number(point[name]))})"
        )

    try:
        result = float(value(ast.parse(work, mode="eval").body))
    except (SyntaxError, ArithmeticError, RecursionError, MemoryError) as error:
        raise ValueError(f"{work[:60]!r} is no formula ({type(error).__name__})") from None
    if not (result > 0 and math.isfinite(result)):
        raise ValueError(f"{work!r} is {result:g}, and must be positive")
    return result
