"""Fingerprints: every change of what is timed makes a record out of date, and nothing else does."""

import textwrap
from functools import partial
from types import SimpleNamespace

import matplotlib.pyplot as plt
import pytest
from records import POINTS, SWEEP, record

from kernelbook import lab
from kernelbook.lab import fingerprint as fingerprints
from kernelbook.lab import results

# -- modules


def test_comments_docstrings_and_layout_do_not_make_results_stale(module, root):
    before = record()
    module(
        '''
        """A module."""

        CONSTANT_FREE = ...
        '''
    )
    assert results.is_stale(before)
    module(
        '''
        """A module."""


        def kernel(
            x,  # a number
        ):
            """Add one."""
            return (x + 1)
        '''
    )
    assert not results.is_stale(before)


def test_an_edited_kernel_makes_results_stale(module, root, monkeypatch):
    monkeypatch.setenv("KERNELBOOK_MODE", "replay")
    before = record()
    module("def kernel(x):\n    return x + 2\n")
    assert results.is_stale(before)
    results.save(before)
    assert "OUT OF DATE" in lab.start("tried", "measured_module").plain
    sweep = lab.bench("forward", POINTS, None, **SWEEP)
    assert sweep.mark
    assert "OUT OF DATE" in lab.measure("memory", None).plain
    lab.plot(sweep, "Speed")
    assert "OUT OF DATE" in plt.gcf().get_label()


def test_a_module_that_has_gone_makes_results_stale(module, root):
    assert results.is_stale(record() | {"modules": ["no_such_module"]})
    assert results.is_stale(record() | {"modules": ["kernelbook.ops.no_such_module"]})


PACKAGE = {
    "kernelbook/ops/__init__.py": "",
    "kernelbook/ops/checks.py": "import torch\n",
    "kernelbook/ops/alone.py": "from kernelbook.ops import checks\n",
    "kernelbook/ops/room/__init__.py": "from kernelbook.ops.room.operator import room\n",
    "kernelbook/ops/room/operator.py": (
        "from . import forward\nfrom .tuned import BLOCK\nroom = 1\n"
    ),
    "kernelbook/ops/room/forward.py": (
        "import kernelbook.ops.shared.sums\nfrom kernelbook import runtime\n"
    ),
    "kernelbook/ops/room/tuned.py": "BLOCK = 1\n",
    "kernelbook/ops/room/other.py": "",
    "kernelbook/ops/shared/__init__.py": "",
    "kernelbook/ops/shared/sums.py": "def add():\n    from ..checks import flag\n",
    "kernelbook/ops/user.py": "from kernelbook.ops.room import room\n",
    "kernelbook/runtime.py": "",
}


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A small package in the place of the real one."""
    for name, text in PACKAGE.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(fingerprints, "_PACKAGE", tmp_path / "kernelbook")
    return tmp_path


SUMS = {"shared.sums", "checks"}
ROOM = {"room", "room.operator", "room.forward", "room.tuned"} | SUMS


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("alone", {"alone", "checks"}),
        ("room.forward", {"room.forward"} | SUMS),
        ("room.operator", ROOM - {"room"}),
        ("room", ROOM | {"room.other"}),
        ("user", ROOM | {"user"}),
    ],
)
def test_imports_are_followed(package, name, found):
    measured = fingerprints.measured([f"kernelbook.ops.{name}"])
    assert set(measured) == {f"kernelbook.ops.{one}" for one in found}


def test_an_edit_of_what_is_imported_counts_and_of_the_rest_does_not(package):
    before = fingerprints.fingerprint(["kernelbook.ops.user"])
    for name in ("runtime.py", "ops/room/other.py", "ops/alone.py"):
        (package / "kernelbook" / name).write_text("edited = 1\n")
    assert fingerprints.fingerprint(["kernelbook.ops.user"]) == before
    (package / "kernelbook/ops/shared/sums.py").write_text("edited = 1\n")
    assert fingerprints.fingerprint(["kernelbook.ops.user"]) != before


def test_two_files_of_one_name_do_not_stand_for_each_other(package):
    room = package / "kernelbook/ops/room"
    one, other = (room / "tuned.py"), (package / "kernelbook/ops/shared/sums.py")
    before = fingerprints.fingerprint(["kernelbook.ops.room"])
    texts = one.read_text(), other.read_text()
    one.write_text(texts[1])
    other.write_text(texts[0])
    assert fingerprints.fingerprint(["kernelbook.ops.room"]) != before


def test_the_operators_of_the_book_are_measured_with_what_they_share():
    for name in ("dropout", "softmax", "layer_norm", "attention"):
        assert "kernelbook.ops.checks" in fingerprints.measured([f"kernelbook.ops.{name}"])
    rooms = fingerprints.measured(["kernelbook.ops.softmax"])
    assert {"kernelbook.ops.softmax.operator", "kernelbook.ops.rows.exchange"} <= rooms.keys()


# -- the script

SCRIPT = '''
import triton

from kernelbook import lab

BLOCK = 128
UNUSED = 1
lab.start("tried")


@triton.autotune([], key=[])
@triton.jit
def kernel(x):
    helper(x, BLOCK)


@triton.jit(noinline=True)
def helper(x, n):
    pass


def launch(x):
    """Launch it."""
    kernel[(1,)](x)


VERSIONS = {"ours": launch}


def providers(n):
    x = prepare(n)
    return {name: lambda: run(x) for name, run in VERSIONS.items()}


def prepare(n):
    return n


if lab:

    def apart(x):
        return x


def prose(rows):
    UNUSED = rows
    return UNUSED


sweep = lab.bench("forward", [], providers)
lab.read(prose(sweep))
'''


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"

    def edited(*edit):
        text = SCRIPT.replace(*edit) if edit else SCRIPT
        assert not edit or text != SCRIPT
        path.write_text(text)
        return fingerprints.script_fingerprint(path)

    return edited


@pytest.mark.parametrize(
    "edit",
    [
        ("helper(x, BLOCK)", "helper(x, 2 * BLOCK)"),
        ("    pass", "    return x"),
        ("kernel[(1,)](x)", "kernel[(2,)](x)"),
        ("BLOCK = 128", "BLOCK = 64"),
        ('"ours": launch', '"theirs": launch'),
        ("x = prepare(n)", "x = prepare(2 * n)"),
        ("    return n\n", "    return n + 1\n"),
        ("noinline=True", "noinline=False"),
    ],
)
def test_an_edit_of_what_the_script_times_counts(script, edit):
    assert script(*edit) != script()


@pytest.mark.parametrize(
    "edit",
    [
        ("UNUSED = 1", "UNUSED = 2"),
        ("Launch it.", "It is launched."),
        ("return UNUSED", "return -UNUSED"),
        ('"forward"', '"backward"'),
        ("def apart(x):\n        return x", "def apart(x):\n        return 2 * x"),
        ("import triton\n", "import triton  # the compiler\n"),
    ],
)
def test_an_edit_of_the_rest_of_the_script_does_not(script, edit):
    assert script(*edit) == script()


def test_a_script_is_compared_where_there_are_two(script, module, root, tmp_path):
    own, path = script(), tmp_path / "script.py"
    assert not results.is_stale(record(script=own), path)
    assert results.is_stale(record(script="0" * 64), path)
    assert not results.is_stale(record(script=None), path)  # measured in a notebook
    assert not results.is_stale(record(script="0" * 64), None)  # shown in one
    assert not results.is_stale(record(script="0" * 64), tmp_path / "no such file.py")


def test_a_chapter_finds_its_script(module, root, tmp_path, monkeypatch):
    monkeypatch.setenv("KERNELBOOK_MODE", "replay")
    text = textwrap.dedent(
        """
        import triton
        from kernelbook import lab

        @triton.jit
        def kernel(x):
            pass

        line = lab.start("tried", "measured_module")
        """
    )
    path = tmp_path / "tried.py"
    path.write_text(text)
    results.save(record(script=fingerprints.script_fingerprint(path)))
    for name, edited, stale in (
        (path, text, False),
        (path, text.replace("pass", "return x"), True),
        ("/tmp/ipykernel_1/2.py", text.replace("pass", "return x"), False),
    ):
        path.write_text(edited)
        script = {}
        exec(compile(edited, name, "exec"), script)
        assert ("OUT OF DATE" in script["line"].plain) is stale


# -- providers


def helped(n):
    return unhelped(n)


def unhelped(n):
    return n


def test_the_code_of_a_function_is_that_of_what_it_uses():
    digest = fingerprints.function_fingerprint
    assert digest(helped) == digest(partial(helped, 1))
    assert digest(helped) != digest(unhelped)
    before = digest(helped)
    one = helped.__globals__["unhelped"]
    try:
        helped.__globals__["unhelped"] = lambda n: n + 1
        assert digest(helped) != before
    finally:
        helped.__globals__["unhelped"] = one
    assert digest(helped) == before


def test_a_function_without_source_cannot_be_compared():
    space = {}
    exec("def providers():\n    pass", space)
    for nothing in (space["providers"], len, None, SimpleNamespace()):
        assert fingerprints.function_fingerprint(nothing) is None


def test_other_providers_than_recorded_are_out_of_date(replayed):
    recorded = record()
    for digest, stale in (
        (None, False),
        (fingerprints.function_fingerprint(helped), False),
        (fingerprints.function_fingerprint(unhelped), True),
    ):
        recorded["sweeps"]["forward"]["providers_code"] = digest
        results.save(recorded)
        lab.start("tried", "measured_module")
        assert bool(lab.bench("forward", POINTS, helped, **SWEEP).mark) is stale
        assert not lab.bench("forward", POINTS, None, **SWEEP).mark
