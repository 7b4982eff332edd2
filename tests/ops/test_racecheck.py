"""What is left of a report of racecheck when Triton's dispatch of roles is left out."""

import sys

import pytest
import racecheck

KERNEL = """
@gluon.jit
def role(x):
    x.store(1)

@gluon.jit
def other_kernel(x):
    x.store(1)

@gluon.jit(
    do_not_specialize=["x"]
)
def roles_kernel(
    x,
    TWO: gl.constexpr,
):
    x.store(0)
    if TWO:
        gl.warp_specialize(
            [(role, (x,)), (role, (x,))],
            [4],
            [24],
        )
"""
START = "========= COMPUTE-SANITIZER"
BYTE = """\
========= Error: Race reported between Read access at roles_kernel+0x230 in kernels.py:13
=========     and Write access at roles_kernel+0xf050 in kernels.py:13 [10 hazards]
=========     and Write access at roles_kernel+0x15950 in kernels.py:19 [7 hazards]
========="""
TOOL = f"""\
#!{sys.executable}
import os, sys
log = sys.argv[sys.argv.index("--log-file") + 1]
with open(log.replace("%p", str(os.getpid())), "w") as file:
    file.write(REPORTS[sys.argv[-1]])
sys.exit(sys.argv[-1] == "fails")
"""
IN_A_ROLE = """\
========= Error: Race reported between Write access at roles_kernel+0x2a0 in kernels.py:4
=========     and Read access at roles_kernel+0x8b0 in kernels.py:4 [128 hazards]
========="""
SOON = BYTE.replace("kernels.py:19", "kernels.py:17")


@pytest.fixture
def lines(tmp_path):
    """The lines of the dispatch in a file of three functions."""
    path = tmp_path / "kernels.py"
    path.write_text(KERNEL)
    return racecheck.dispatch(path)


def report(*blocks, errors=None, displayed=None):
    errors = len(blocks) if errors is None else errors
    shown = errors if displayed is None else displayed
    end = f"========= RACECHECK SUMMARY: {shown} hazards displayed ({errors} errors, 0 warnings)"
    return "\n".join((START, *blocks, end, ""))


def test_the_dispatch_is_a_kernels_def_and_the_statements_around_its_roles(lines):
    assert lines == {("roles_kernel", "kernels.py", line) for line in (13, 18, 19)}


def test_a_race_is_left_out_only_if_all_its_accesses_are_the_dispatch(lines):
    assert racecheck.races(report(), lines) == []
    assert racecheck.races(report(BYTE, BYTE), lines) == []
    [left] = racecheck.races(report(BYTE, IN_A_ROLE, BYTE), lines)
    assert left.splitlines() == IN_A_ROLE.splitlines()[:-1]
    assert len(racecheck.races(report(BYTE, SOON, IN_A_ROLE), lines)) == 2


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("kernels.py:13 [", "kernels.py:14 ["),  # another line
        (" in kernels.py:19", ""),  # none
        ("Write access at roles_kernel", "Write access at other_kernel"),
        ("in kernels.py:19", "in other.py:19"),
        (BYTE.split("\n", 1)[1], "========="),  # no second access
    ],
)
def test_what_is_not_known_as_the_dispatch_is_a_race(lines, before, after):
    changed = BYTE.replace(before, after)
    assert changed != BYTE
    assert len(racecheck.races(report(changed), lines)) == 1


def test_reports_of_several_processes_are_one(lines):
    both = report(BYTE) + f"{START}\n" + report(IN_A_ROLE, BYTE)
    assert len(racecheck.races(both, lines)) == 1


@pytest.mark.parametrize(
    "text",
    [
        "",
        START,
        f"{START}\n{BYTE}\n",
        report(BYTE, errors=107),
        report(BYTE, errors=107, displayed=1),
        report(BYTE, "========= Internal Sanitizer Error: out of memory\n=========", errors=1),
    ],
    ids=["empty", "no run", "cut off", "fewer shown", "limited", "an error of another kind"],
)
def test_a_report_that_is_not_whole_is_refused(lines, text):
    with pytest.raises(ValueError, match="not whole"):
        racecheck.races(text, lines)


def test_each_kernel_with_roles_has_a_dispatch():
    found = {
        kernel
        for path in racecheck.HOPPER.glob("*.py")
        for kernel, _, _ in racecheck.dispatch(path)
    }
    assert found == {f"attention_hopper_{name}_kernel" for name in ("fwd", "fp8_fwd", "bwd")}
    assert {kernel for kernel, _, _ in racecheck.dispatch(racecheck.HERE)} == {"exchange_kernel"}


def stand_in(path, **reports):
    """Write a tool that runs nothing, and reports what is given for the command's last word."""
    path.write_text(TOOL.replace("REPORTS", repr(reports)))
    path.chmod(0o755)
    return str(path)


def test_a_run_gives_the_races_of_its_report_or_fails(tmp_path):
    tool = stand_in(
        tmp_path / "tool", clean=report(), race=report(IN_A_ROLE), fails=report(), cut=""
    )
    assert racecheck.run(tool, "x.py", "clean") == []
    assert racecheck.run(tool, "x.py", "race") == [IN_A_ROLE.rsplit("\n", 1)[0]]
    with pytest.raises(RuntimeError, match="ended with 1"):
        racecheck.run(tool, "x.py", "fails")
    with pytest.raises(ValueError, match="not whole"):
        racecheck.run(tool, "x.py", "cut")


def test_a_race_that_is_not_seen_and_one_that_is_none_are_wrong(tmp_path):
    race, clean = report(IN_A_ROLE), report()
    names = dict(zip(racecheck.CONTROLS, (race, clean, clean), strict=True))
    assert racecheck.controls(stand_in(tmp_path / "right", **names)) == []
    names = dict(zip(racecheck.CONTROLS, (clean, clean, race), strict=True))
    wrong = racecheck.controls(stand_in(tmp_path / "wrong", **names))
    assert ["does not see" in wrong[0], "sees a race" in wrong[1], len(wrong)] == [True, True, 3]
