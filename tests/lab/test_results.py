"""Results files: a record is whole and agrees with itself, or it is refused by file and field."""

import copy
import json
import random
import re

import pytest
from records import record

from kernelbook.lab import results, schema

FILE = "test-gpu/tried.json"


def test_a_record_survives_being_written(module, root):
    path = results.save(record())
    assert path == root / FILE
    assert results.read(path) == record()
    assert [p.name for p in root.rglob("*.*")] == ["tried.json"]


def test_what_is_written_can_be_compared_by_people(module, root):
    odd = record(tables={"t": {"columns": ["a  b, [c  d]", "ü"], "rows": [["[ ]  {", None]]}})
    text = results.save(odd).read_text(encoding="utf-8")
    assert results.read(root / FILE) == odd
    assert '"ours": [\n     [1.0, 2.0, 3.0],\n' in text


@pytest.mark.parametrize(
    "value", [float("nan"), (1, 2), b"x", object()], ids=lambda value: type(value).__name__
)
def test_a_record_that_would_be_refused_leaves_the_old_one(module, root, value):
    path = results.save(record())
    with pytest.raises(results.ResultsError, match="the record of tried: field"):
        results.save(record(tables={"memory": {"columns": ["a"], "rows": [[value]]}}))
    assert results.read(path) == record()
    assert [p.name for p in root.rglob("*.*")] == ["tried.json"]


# -- what is refused


def refused(path, text):
    """Write a file and return the message with which it is refused."""
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(results.ResultsError) as caught:
        results.recorded()
    assert str(path) in str(caught.value)
    return str(caught.value)


TEXTS = {
    "truncated": (lambda text: text[: len(text) // 2], "not readable as JSON"),
    "empty": (lambda text: "", "not readable as JSON"),
    "a list": (lambda text: "[1, 2]", "not a results file"),
    "of another schema": (lambda text: text.replace('"schema": 2', '"schema": 1'), "schema 2"),
    "of another chapter": (lambda text: text.replace('"tried"', '"x"'), "for test-gpu/x"),
    "of another GPU": (
        lambda text: text.replace("Test GPU", "B").replace("test-gpu", "b"),
        "for b/",
    ),
    "with NaN": (lambda text: text.replace("2.5", "NaN"), "milliseconds['ours'][1]"),
    "with infinity": (lambda text: text.replace("2.5", "-Infinity"), "milliseconds['ours'][1]"),
    "with 1e999": (lambda text: text.replace("2.5", "1e999"), r"milliseconds['ours'][1]"),
    "with a huge number": (lambda text: text.replace("132", "9" * 5000), "not readable as JSON"),
    "with a large number": (lambda text: text.replace("132", "9" * 400), "provenance.sm_count"),
    "nested deeply": (lambda text: "[" * 10**5, "nested too deeply"),
    "nested in a field": (
        lambda text: text.replace('"half of a copy"', "[" * 10**5 + "]" * 10**5),
        "nested too deeply",
    ),
    "with a field twice": (
        lambda text: text.replace('"reaches"', '"reaches": "all", "reaches"'),
        "'reaches' occurs twice",
    ),
    "not UTF-8": (lambda text: b"\xff" + text.encode(), "not readable as UTF-8"),
}


@pytest.mark.parametrize(("spoil", "message"), TEXTS.values(), ids=TEXTS)
def test_a_spoilt_file_is_refused_by_name(module, root, spoil, message):
    path = results.save(record())
    text = path.read_text()
    assert spoil(text) != text
    assert message in refused(path, spoil(text))


def fields(value, path=()):
    """Every field of a record: the path of keys to it."""
    if path:
        yield path
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from fields(value[key], (*path, key))


def parent(found, path):
    for key in path[:-1]:
        found = found[key]
    return found


def put(value):
    def change(found, path):
        parent(found, path)[path[-1]] = value

    return change


def delete(found, path):
    del parent(found, path)[path[-1]]


def add(found, path):
    inside = parent(found, path)
    if isinstance(inside, dict):
        inside["an extra field"] = 1
    else:
        inside.append({"an extra": "entry"})


CHANGES = {
    "deleted": delete,
    "null": put(None),
    "true": put(True),
    "a word": put("a word"),
    "a number below 0": put(-1.5),
    "0": put(0),
    "NaN": put(float("nan")),
    "infinity": put(float("inf")),
    "10**400": put(10**400),
    "an empty text": put(""),
    "an empty list": put([]),
    "an empty object": put({}),
    "with a neighbour": add,
}


def refusal(path):
    """Return the message with which a file is refused, or None."""
    try:
        results.read(path)
    except results.ResultsError as error:
        return str(error)
    return None


HARMLESS = {
    "deleted": r"kernels\.0|provenance\.clocks\.\w+|(sweeps|tables)\.\w+"
    r"|.*\.(rows|host_included)\.0",
    "an empty list": r"kernels|.*\.(rows|host_included)|.*milliseconds\.peer\.1",
    "an empty object": r"provenance\.clocks|sweeps|tables",
    "a word": r"reaches|checks.*\.(case|direction)|kernels.*\.(case|kernel)|.*skipped\.peer"
    r"|provenance\.(commit|cuda|driver|python|torch|triton)|tables.*",
    "null": r"tables.*rows\.0\.\d",
    "true": r"tables.*rows\.0\.\d",
    "0": r"tables.*rows\.0\.\d|checks.*error",
    "a number below 0": r"tables.*rows\.0\.\d",
    "an empty text": r"tables.*rows\.0\.\d",
}
"""What leaves a record that another run could have made, so that no rule can tell: other words
where words are free, any cell in a table, no error, fewer sweeps, tables, kernels and readable
clocks, and one more point at which a provider that has a reason is absent."""


def test_every_spoilt_field_is_refused_or_harmless(module, root):
    good = record()
    path = results.save(good)
    refusals = 0
    for where in fields(good):
        for kind, change in CHANGES.items():
            spoilt = copy.deepcopy(good)
            change(spoilt, where)
            if spoilt == good:
                continue
            path.write_text(json.dumps(spoilt))
            dotted = ".".join(map(str, where))
            message = refusal(path)
            if message is None:
                assert re.fullmatch(HARMLESS[kind], dotted), f"{kind} {dotted} was accepted"
                continue
            refusals += 1
            assert message.startswith(f"{path}: ")
            names = [key for key in where if isinstance(key, str)]
            named = any(name in message for name in names) or "an extra" in message
            assert named or "written for" in message, f"{kind} {dotted}: {message}"
    assert refusals > 1000


MISMATCHED = {
    "a check that failed": ("checks.sum.0.ok", False, "checks['sum'][0].ok"),
    "an error over its tolerance": ("checks.sum.0.error", 0.01, "checks['sum'][0].error"),
    "a tolerance of 0": ("checks.sum.0.tolerance", 0, "checks['sum'][0].tolerance"),
    "a tolerance that zeros would pass": ("checks.sum.0.tolerance", 1.0, "at most 0.1"),
    "no check": ("checks", {}, "field checks"),
    "a check of nothing": ("checks.sum", [], "checks['sum']"),
    "quantiles that fall": ("sweeps.forward.milliseconds.ours.0", [2.0, 1.0, 3.0], "do not fall"),
    "two quantiles": ("sweeps.forward.milliseconds.ours.0", [1.0, 2.0], "three numbers"),
    "no time at all": ("sweeps.forward.milliseconds.ours.0", [0, 1.0, 2.0], "above 0"),
    "too few points": ("sweeps.forward.milliseconds.ours", [[1.0, 1.0, 1.0]], "of 2 points"),
    "a limit that is absent": ("sweeps.forward.milliseconds.copy.0", [], "it is the limit"),
    "an unknown limit": ("sweeps.forward.limit", "light", "forward'].limit"),
    "absent without a reason": ("sweeps.forward.skipped", {}, "whole, or skipped"),
    "a reason without absence": (
        "sweeps.forward.skipped",
        {"peer": "no", "ours": "no"},
        "as skipped says",
    ),
    "a reason for nobody": (
        "sweeps.forward.skipped",
        {"peer": "no", "x": "no"},
        "skipped: the name",
    ),
    "a slow host of nobody": ("sweeps.forward.host_included", ["x"], "host_included: the name"),
    "a provider twice": ("sweeps.forward.providers", ["copy", "copy"], "without repetitions"),
    "a provider more": ("sweeps.forward.providers", ["copy", "ours", "peer", "x"], "milliseconds"),
    "an unknown unit": ("sweeps.forward.unit", "miles", "one of GB/s"),
    "an unknown axis": ("sweeps.forward.axis", "miles", "points[0]['miles']"),
    "an axis of words": ("sweeps.forward.axis", "dtype", "points[0]['dtype']"),
    "the same point twice": (
        "sweeps.forward.points.1",
        {"elements": 1000, "dtype": "float16", "itemsize": 2},
        "without repetitions",
    ),
    "points of other names": ("sweeps.forward.points.1", {"elements": 1}, "points[1]"),
    "a formula of other names": ("sweeps.forward.work", "2 * miles", "forward'].work: 'miles'"),
    "a formula of nothing": ("sweeps.forward.work", "0 * elements", "must be positive"),
    "a formula below 0": ("sweeps.forward.limit_work", "-elements", "forward'].limit_work"),
    "a formula that divides by 0": ("sweeps.forward.work", "elements / 0", "ZeroDivisionError"),
    "a formula without an end": ("sweeps.forward.work", "2 * (", "SyntaxError"),
    "a formula that overflows": (
        "sweeps.forward.work",
        "elements" + " * elements" * 200,
        "Overflow",
    ),
    "a formula of depth": ("sweeps.forward.work", "(" * 5000 + "1" + ")" * 5000, "no formula"),
    "a formula of minuses": ("sweeps.forward.work", "-" * 10**5 + "elements", "no formula"),
    "a formula that acts": ("sweeps.forward.work", "__import__('os').getpid()", "forward'].work"),
    "a formula of words": ("sweeps.forward.work", "dtype * 2", "forward'].work"),
    "a power": ("sweeps.forward.work", "9 ** 9 ** 9", "forward'].work"),
    "a short row": ("tables.memory.rows.0", ["ours"], "rows[0]"),
    "a table in a cell": ("tables.memory.rows.0.1", [1], "rows[0][1]"),
    "a column twice": ("tables.memory.columns", ["a", "a"], "without repetitions"),
    "another slug": ("provenance.gpu", "Another GPU", "provenance.slug"),
    "a date in words": ("provenance.date", "yesterday", "provenance.date"),
    "a month too many": ("provenance.date", "2026-13-02T03:04:05Z", "provenance.date"),
    "a path for a name": ("chapter", "../tried", "field chapter"),
    "no hexadecimal": ("fingerprint", "x" * 64, "fingerprint"),
    "a module that is none": ("modules.0", "not a module", "modules[0]"),
    "a kernel without registers": ("kernels.0.registers", 0, "kernels[0].registers"),
    "half a register": ("kernels.0.registers", 1.5, "kernels[0].registers"),
    "a nameless sweep": ("sweeps", {" ": {}}, "sweeps: the name"),
}


@pytest.mark.parametrize(("where", "value", "message"), MISMATCHED.values(), ids=MISMATCHED)
def test_what_contradicts_itself_is_refused(module, root, where, value, message):
    spoilt = copy.deepcopy(record())
    path = [int(key) if key.isdigit() else key for key in where.split(".")]
    put(value)(spoilt, path)
    assert message in refused(root / FILE, json.dumps(spoilt))
    with pytest.raises(results.ResultsError, match="It was not written"):
        results.save(spoilt)


PUBLISHED = sorted((results._CHECKOUT / "results").glob("*/*.json"))


@pytest.mark.parametrize("published", PUBLISHED, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_published_record_is_read_and_no_spoilt_field_of_it_escapes(published, tmp_path):
    text = published.read_text(encoding="utf-8")
    if json.loads(text)["schema"] != schema.SCHEMA:
        with pytest.raises(results.ResultsError, match="not a results file of schema"):
            results.read(published)
        return
    good = results.read(published)
    path = tmp_path / published.parent.name / published.name
    path.parent.mkdir()
    for where in random.Random(0).sample(list(fields(good)), 100):
        kind = random.Random(str(where)).choice(list(CHANGES))
        spoilt = copy.deepcopy(good)
        CHANGES[kind](spoilt, where)
        path.write_text(json.dumps(spoilt))
        message = refusal(path)
        assert message is None or message.startswith(f"{path}: ")


def test_formulas_are_arithmetic():
    point = {"rows": 3, "columns": 4.5, "dtype": "float16"}
    assert schema.evaluate("2 * (rows + columns) / 3 - 1 // 1", point) == 4
    assert schema.evaluate("-(-rows)", point) == 3


# -- where results lie


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ("no/such/folder", "names no/such/folder, and there is no such folder"),
        ("~no-such-user-here/results", "KERNELBOOK_RESULTS is '~no-such-user-here/results'"),
        ("", "must name a folder, got ''"),
    ],
)
def test_a_folder_that_is_not_there_says_so(root, monkeypatch, named, message):
    monkeypatch.setenv("KERNELBOOK_RESULTS", named)
    with pytest.raises(results.ResultsError, match=message):
        results.recorded()


def test_a_file_is_no_folder(root, monkeypatch):
    (root / "file").touch()
    monkeypatch.setenv("KERNELBOOK_RESULTS", str(root / "file"))
    with pytest.raises(results.ResultsError, match="must name a folder"):
        results.recorded()


def test_a_tilde_is_the_home_folder(module, root, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("KERNELBOOK_RESULTS", "~/mine")
    assert results.save(record()) == tmp_path / "mine" / FILE  # writing makes the folder
    assert [found["chapter"] for found in results.recorded()] == ["tried"]
