"""A chapter: what it replays or measures, the record that it leaves, and when that is stale."""

import pytest
import torch
from records import POINTS, PROVENANCE, SWEEP, record
from test_check import case

from kernelbook import lab, runtime
from kernelbook.lab import chapter, results

# -- replayed


def test_replay_says_what_is_recorded_and_measures_nothing(replayed, root):
    assert "Test GPU" in replayed.plain
    assert "2026-01-02" in replayed.plain
    sweep = lab.bench("forward", POINTS, lambda **_: pytest.fail("measured"), **SWEEP)
    assert sweep.replayed
    assert not sweep.mark
    assert sweep.share("ours", elements=1000) == 0.5
    assert sweep.rate("copy", elements=2000, dtype=torch.float16) == pytest.approx(4e-3)
    assert sweep.milliseconds_at("peer", elements=1000) != sweep.milliseconds_at(
        "peer", elements=2000
    )
    memory = lab.measure("memory", lambda: pytest.fail("measured"))
    assert memory.rows == [{"operator": "ours", "bytes": 8}]
    before = (root / "test-gpu" / "tried.json").read_text()
    said = lab.finish("all of a copy").plain
    assert said.startswith("Replayed from the run recorded on Test GPU on 2026-01-02")
    assert (root / "test-gpu" / "tried.json").read_text() == before


def test_the_limit_may_do_other_work(replayed, module, root):
    changed = record()
    changed["sweeps"]["forward"] |= {"work": "3 * elements * itemsize"}
    results.save(changed)
    lab.start("tried", "measured_module")
    sweep = lab.bench(
        "forward",
        POINTS,
        None,
        limit="copy",
        work="3 * elements * itemsize",
        limit_work="2 * elements * itemsize",
    )
    assert not sweep.mark
    assert sweep.share("copy", elements=1000) == 1
    assert sweep.share("ours", elements=1000) == pytest.approx(0.75)  # 3 in 2 ms, against 2 in 1


def test_other_points_than_recorded_are_out_of_date(replayed):
    assert lab.bench("forward", POINTS[:1], None, **SWEEP).mark


def test_what_was_never_recorded_says_so(replayed):
    sweep = lab.bench("backward", POINTS, None, **SWEEP)
    assert sweep.frame.empty
    assert "Not recorded yet" in lab.plot(sweep, "Backward").plain
    assert "Not recorded yet" in lab.ladder(sweep, "Steps", [], by="dtype", where={}).plain
    missing = lab.measure("speed of light", None)
    assert "Not recorded yet" in missing.plain
    assert "Not recorded yet" in lab.draw(missing, "Light", pytest.fail, pytest.fail).plain


def test_a_point_must_be_named_in_full(replayed):
    sweep = lab.bench("forward", POINTS, None, **SWEEP)
    with pytest.raises(ValueError, match="2 points"):
        sweep.share("ours")


def test_a_lab_without_a_chapter_says_what_to_call(root):
    with pytest.raises(RuntimeError, match=r"call lab\.start first"):
        lab.measure("memory", None)


def test_modes(monkeypatch):
    monkeypatch.setenv("KERNELBOOK_MODE", "sometimes")
    with pytest.raises(ValueError, match="must be live or replay"):
        chapter.is_live()
    monkeypatch.setenv("KERNELBOOK_MODE", "replay")
    assert not chapter.is_live()
    monkeypatch.setenv("KERNELBOOK_MODE", "live")
    monkeypatch.setattr(runtime, "INTERPRETED", True)
    with pytest.raises(RuntimeError, match="needs a GPU"):
        chapter.is_live()


# -- live


def timed(elements, dtype):
    assert dtype is torch.float16
    return {
        "copy": lambda: 0.001 * elements,
        "ours": lambda: 0.002 * elements,
        "peer": lab.Absent("peer is not installed")
        if elements < 2000
        else lambda: 0.004 * elements,
    }


def test_a_live_chapter_leaves_a_whole_record(live, root):
    truth = torch.tensor([1.0, 2.0]).double()
    lab.check("sum", [case(truth.float(), truth)])
    sweep = lab.bench("forward", POINTS, timed, **SWEEP)
    assert not sweep.replayed
    assert sweep.share("ours", elements=1000) == 0.5
    lab.measure("memory", lambda: [{"operator": "ours", "bytes": 8}])
    lab.finish("half of a copy")
    written = results.read(root / "test-gpu" / "tried.json")
    assert written["sweeps"]["forward"]["milliseconds"]["peer"] == [[], [8.0, 8.0, 8.0]]
    assert written["sweeps"]["forward"]["skipped"] == {"peer": "peer is not installed"}
    assert written["sweeps"]["forward"]["providers"] == ["copy", "ours", "peer"]
    assert written["tables"] == record()["tables"]
    assert written["checks"]["sum"][0]["ok"]
    assert written["provenance"] == PROVENANCE
    assert not results.is_stale(written)


@pytest.mark.parametrize("cannot", [{"here": False}, {"measures": False}])
def test_a_chapter_replays_on_a_gpu_that_is_not_equal_to_it(live, root, cannot, monkeypatch):
    results.save(record())
    monkeypatch.setattr(runtime, "environment", lambda: {"gpu": "A smaller GPU"})
    said = lab.start("tried", "measured_module", **cannot).plain
    assert "replays a run recorded on Test GPU" in said
    assert ("cannot run here" in said) == ("here" in cannot)
    assert lab.measure("memory", lambda: pytest.fail("measured")).rows


def test_a_failed_check_leaves_no_record(live, root):
    with pytest.raises(lab.CheckFailed):
        lab.check("sum", [case(torch.zeros(2), [1.0, 2.0])])
    with pytest.raises(RuntimeError, match="checked nothing"):
        lab.finish("half of a copy")
    assert not list(root.iterdir())


def test_a_run_that_stops_early_leaves_the_old_record(live, root, module):
    results.save(record())
    before = (root / "test-gpu" / "tried.json").read_text()
    with pytest.raises(ZeroDivisionError):
        lab.bench("forward", POINTS, lambda **_: {"copy": lambda: 1 / 0}, **SWEEP)
    assert (root / "test-gpu" / "tried.json").read_text() == before


def test_one_name_is_used_once(live):
    lab.measure("memory", list)
    with pytest.raises(ValueError, match="named 'memory' exist already"):
        lab.measure("memory", list)


@pytest.mark.usefixtures("gpu")
def test_the_compiler_reports_on_every_kernel(live, monkeypatch):
    from kernelbook import seeded_dropout

    x = torch.ones(4096, device="cuda")
    rows = lab.facts("compiler", {"float32": lambda: seeded_dropout(x, 0.5, 1)}).rows
    assert [row["kernel"] for row in rows] == ["seeded_dropout_kernel"]
    assert rows[0]["registers"] > 0
    assert rows[0]["spills"] == 0


# -- what one kind of GPU may refuse


def fail():
    raise ValueError("no such instruction\nat /home/me/kernel.py")


def test_an_experiment_that_fails_leaves_its_reason_and_no_rows(live, root):
    truth = torch.tensor([1.0, 2.0]).double()
    lab.check("sum", [case(truth.float(), truth)])
    here = lab.attempt("memory", fail)
    needs = lab.attempt("stamps", lab.Absent("it needs a Hopper GPU"))
    fine = lab.attempt("times", lambda: [{"n": 1}])
    assert (here.rows, needs.rows, fine.rows) == ([], [], [{"n": 1}])
    assert "not measured, because" in here.plain
    assert "ValueError: no such instruction" in here.plain
    drawn = lab.draw(needs, "Stamps", pytest.fail, pytest.fail)
    assert "Stamps. Not measured: it needs a Hopper GPU." in drawn.plain
    assert "Not measured: it needs a Hopper GPU." in lab.read(f"It takes {float('nan')}.").plain
    lab.finish("half of a copy")
    tables = results.read(root / "test-gpu" / "tried.json")["tables"]
    assert tables["stamps"]["rows"] == [["it needs a Hopper GPU"]]


def test_a_recorded_reason_is_replayed_as_one(replayed, root):
    found = record()
    found["tables"]["memory"] = {"columns": [chapter.WHY_NOT], "rows": [["it needs a Hopper GPU"]]}
    results.save(found)
    lab.start("tried", "measured_module")
    table = lab.attempt("memory", None)
    assert table.rows == []
    assert "it needs a Hopper GPU" in table.plain


def test_a_check_that_fails_is_no_reason(live):
    def wrong():
        raise lab.CheckFailed("3 of 1,000 launches differ.")

    with pytest.raises(lab.CheckFailed):
        lab.attempt("soak", wrong)


def test_a_version_that_does_not_run_is_absent_and_says_why(live):
    absent = lab.tried(fail)
    assert absent == lab.Absent("it does not run here: ValueError: no such instruction")
    assert lab.tried(dict) is dict


def illegal():
    raise RuntimeError("CUDA error: an illegal instruction was encountered")


def test_what_breaks_the_gpu_is_named_and_not_absent(live, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert isinstance(lab.tried(fail), lab.Absent)  # the GPU is as it was
    monkeypatch.setattr(torch.cuda, "synchronize", illegal)
    for use in (
        lambda: lab.tried(dict, "json"),  # which the GPU reports when it is waited for
        lambda: lab.attempt("json", illegal),
        lambda: lab.peer("json", lambda json: illegal),
    ):
        with pytest.raises(RuntimeError, match="json broke the GPU's state"):
            use()
