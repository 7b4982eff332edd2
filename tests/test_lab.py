"""The laboratory: a failing check fails the build, and a record is trusted or not read at all."""

import json
import sys
import textwrap

import matplotlib.pyplot as plt
import pytest
import torch

from kernelbook import lab, runtime
from kernelbook.lab import chapter, display, figures, results
from kernelbook.lab.check import error, tolerance

PROVENANCE = {
    "gpu": "Test GPU",
    "slug": "test-gpu",
    "driver": "1.2",
    "torch": "2.13.0",
    "triton": "3.7.1",
    "commit": "0123456789",
    "date": "2026-01-02T03:04:05Z",
}


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module to fingerprint; call it with the source to rewrite it."""
    path = tmp_path / "measured_module.py"
    monkeypatch.syspath_prepend(tmp_path)

    def write(source):
        path.write_text(textwrap.dedent(source))
        return "measured_module"

    write("def kernel(x):\n    return x + 1\n")
    return write


@pytest.fixture
def root(tmp_path, monkeypatch):
    """An empty folder of results."""
    folder = tmp_path / "results"
    monkeypatch.setenv("KERNELBOOK_RESULTS", str(folder))
    monkeypatch.setattr(results, "_PACKAGE", tmp_path / "no package")
    monkeypatch.setattr(chapter, "_running", None)
    yield folder
    plt.close("all")


def record(**changes):
    sweep = {
        "axis": "elements",
        "unit": "GB/s",
        "work": "2 * elements * itemsize",
        "limit": "copy",
        "limit_work": "2 * elements * itemsize",
        "points": [
            {"elements": 1000, "dtype": "float16", "itemsize": 2},
            {"elements": 2000, "dtype": "float16", "itemsize": 2},
        ],
        "providers": ["copy", "ours", "peer"],
        "milliseconds": {
            "copy": [[0.9, 1.0, 1.1], [1.8, 2.0, 2.2]],
            "ours": [[1.0, 2.0, 3.0], [2.0, 2.5, 3.0]],
            "peer": [[], [4.0, 4.0, 4.0]],
        },
        "skipped": {"peer": "peer refuses: ValueError"},
    }
    return {
        "schema": results.SCHEMA,
        "chapter": "tried",
        "checks": {"sum": [{"error": 0.5, "tolerance": 1.0}]},
        "fingerprint": results.fingerprint(["measured_module"]),
        "kernels": [],
        "modules": ["measured_module"],
        "provenance": PROVENANCE,
        "reaches": "half of a copy",
        "sweeps": {"forward": sweep},
        "tables": {"memory": {"columns": ["operator", "bytes"], "rows": [["ours", 8]]}},
    } | changes


POINTS = [{"elements": n, "dtype": torch.float16} for n in (1000, 2000)]
SWEEP = {"limit": "copy", "work": "2 * elements * itemsize"}


# -- check


def case(ours, truth, in_torch=None):
    truth = torch.as_tensor(truth, dtype=torch.float64)
    in_torch = truth.to(ours.dtype) if in_torch is None else in_torch
    return lab.Case("3", "forward", ours=ours, torch=in_torch, truth=truth)


def test_a_right_result_passes_and_is_shown():
    truth = torch.tensor([1.0, -2.0, 3.0]).double() / 3
    shown = lab.check("thirds", [case(truth.half(), truth)])
    assert "pass" in shown.plain
    assert "kb-ok" in shown.html


@pytest.mark.parametrize(
    "wrong",
    [[0.0, 0.0, 0.0], [1.0, -2.0, 3.1], [1.0, -2.0, float("nan")], [1.0, float("inf"), 3.0]],
    ids=["zeros", "one element off", "NaN", "infinity"],
)
def test_a_wrong_result_raises(wrong):
    with pytest.raises(lab.CheckFailed, match="1 of 1 rows failed"):
        lab.check("wrong", [case(torch.tensor(wrong), [1.0, -2.0, 3.0])])


def test_a_check_of_nothing_raises():
    with pytest.raises(lab.CheckFailed, match="no case was checked"):
        lab.check("nothing", [])


def test_a_truth_that_zeros_would_pass_is_refused():
    with pytest.raises(ValueError, match="a result of zeros would pass"):
        lab.check("zeros", [case(torch.zeros(3), [0.0, 0.0, 0.0])])


def test_infinities_and_nans_that_belong_there_pass():
    values = [1.0, float("inf"), float("-inf"), float("nan")]
    assert error(torch.tensor(values), torch.tensor(values).double()) == 0


def test_the_error_is_a_fraction_of_the_largest_truth():
    assert error(torch.tensor([1.0, 4.0]), torch.tensor([2.0, 4.0]).double()) == 0.25
    assert error(torch.zeros(2), torch.tensor([2.0, 4.0]).double()) == 1


def test_no_tolerance_lets_zeros_pass():
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        assert tolerance(0.0, dtype) < 0.01
    assert tolerance(1e-3, torch.float16) == 2e-3
    for no_yardstick in (0.3, 1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="no yardstick"):
            tolerance(no_yardstick, torch.float16)


# -- results


def test_a_record_survives_being_written(module, root):
    path = results.save(record())
    assert path == root / "test-gpu" / "tried.json"
    assert results.read(path) == record()
    assert [p.name for p in root.rglob("*.*")] == ["tried.json"]


def test_a_record_that_json_cannot_hold_leaves_the_old_one(module, root):
    path = results.save(record())
    with pytest.raises(ValueError, match="not JSON compliant"):
        results.save(record(reaches=float("nan")))
    with pytest.raises(results.ResultsError, match="does not survive"):
        results.save(record(tables={"memory": [(1, 2)]}))
    assert results.read(path) == record()
    assert [p.name for p in root.rglob("*.*")] == ["tried.json"]


SPOILED = {
    "truncated": (lambda text: text[: len(text) // 2], "not readable as JSON"),
    "empty": (lambda text: "", "not readable as JSON"),
    "a list": (lambda text: "[1, 2]", "not a results file"),
    "of another schema": (lambda text: text.replace('"schema": 1', '"schema": 0'), "schema"),
    "of another GPU": (lambda text: text.replace("test-gpu", "other"), "written for other/tried"),
    "of another chapter": (lambda text: text.replace('"tried"', '"x"'), "written for test-gpu/x"),
    "without sweeps": (lambda text: text.replace('"sweeps"', '"swept"'), "'sweeps' is missing"),
}


@pytest.mark.parametrize(("spoil", "message"), SPOILED.values(), ids=SPOILED)
def test_a_spoiled_file_is_refused_by_name(module, root, spoil, message):
    path = results.save(record())
    path.write_text(spoil(path.read_text()))
    with pytest.raises(results.ResultsError, match=message) as caught:
        results.recorded()
    assert str(path) in str(caught.value)


def test_a_sweep_short_of_times_is_refused(module, root):
    spoiled = record()
    spoiled["sweeps"]["forward"]["milliseconds"]["ours"].pop()
    results.save(spoiled)
    with pytest.raises(results.ResultsError, match="lacks times of ours"):
        results.recorded()


def test_the_gpu_at_hand_wins_then_the_newest(module, root, monkeypatch):
    old = PROVENANCE | {"slug": "old-gpu", "gpu": "Old GPU", "date": "2020-01-01T00:00:00Z"}
    results.save(record())
    results.save(record(provenance=old))
    monkeypatch.setattr(runtime, "environment", dict)
    assert results.find("tried")["provenance"]["slug"] == "test-gpu"
    monkeypatch.setattr(runtime, "environment", lambda: {"gpu": "Old GPU"})
    assert results.find("tried")["provenance"]["slug"] == "old-gpu"
    assert results.find("another") is None


# -- fingerprint


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
    assert sweep.stale
    assert "OUT OF DATE" in lab.measure("memory", None).plain
    lab.plot(sweep, "Speed")
    assert "OUT OF DATE" in plt.gcf().get_label()


def test_a_module_that_has_gone_makes_results_stale(module, root):
    assert results.is_stale(record(modules=["no_such_module"]))


# -- a chapter, replayed


@pytest.fixture
def replayed(module, root, monkeypatch):
    monkeypatch.setenv("KERNELBOOK_MODE", "replay")
    results.save(record())
    return lab.start("tried", "measured_module")


def test_replay_says_what_is_recorded_and_measures_nothing(replayed, root):
    assert "Test GPU" in replayed.plain
    assert "2026-01-02" in replayed.plain
    sweep = lab.bench("forward", POINTS, lambda **_: pytest.fail("measured"), **SWEEP)
    assert sweep.replayed
    assert not sweep.stale
    assert sweep.share("ours", elements=1000) == 0.5
    assert sweep.rate("copy", elements=2000, dtype=torch.float16) == pytest.approx(4e-3)
    assert sweep.milliseconds_at("peer", elements=1000) != sweep.milliseconds_at(
        "peer", elements=2000
    )
    memory = lab.measure("memory", lambda: pytest.fail("measured"))
    assert memory.rows == [{"operator": "ours", "bytes": 8}]
    before = (root / "test-gpu" / "tried.json").read_text()
    assert "Nothing was measured" in lab.finish("all of a copy").plain
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
    assert not sweep.stale
    assert sweep.share("copy", elements=1000) == 1
    assert sweep.share("ours", elements=1000) == pytest.approx(0.75)  # 3 in 2 ms, against 2 in 1


def test_other_points_than_recorded_are_out_of_date(replayed):
    assert lab.bench("forward", POINTS[:1], None, **SWEEP).stale


def test_what_was_never_recorded_says_so(replayed):
    sweep = lab.bench("backward", POINTS, None, **SWEEP)
    assert sweep.frame.empty
    assert "Not recorded yet" in lab.plot(sweep, "Backward").plain
    assert "Not recorded yet" in lab.ladder(sweep, "Steps", [], by="dtype", where={}).plain
    missing = lab.measure("speed of light", None)
    assert "Not recorded yet" in missing.plain
    with lab.canvas(missing, "Light", "A line.") as axes:
        axes.plot([1], [1])
    assert "Not recorded yet" in axes.figure.get_label()


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


# -- a chapter, live: the clock and the GPU are stood in for, the rest is real


@pytest.fixture
def live(module, root, monkeypatch):
    monkeypatch.delenv("KERNELBOOK_MODE", raising=False)
    monkeypatch.setattr(runtime, "INTERPRETED", False)
    monkeypatch.setattr(results, "provenance", lambda: PROVENANCE)
    monkeypatch.setattr(
        sys.modules["kernelbook.lab.bench"], "_time", lambda run: [run(), run(), run()]
    )
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    lab.start("tried", "measured_module")


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


def test_a_failed_check_leaves_no_record(live, root):
    with pytest.raises(lab.CheckFailed):
        lab.check("sum", [case(torch.zeros(2), [1.0, 2.0])])
    with pytest.raises(RuntimeError, match="checked nothing"):
        lab.finish("half of a copy")
    assert not root.exists()


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


def test_absent_peers_are_named():
    assert lab.peer("no_such_library.ops", None) == lab.Absent("no_such_library is not installed")
    refusing = lab.peer("json", lambda json: lambda: json.loads("{"))
    assert refusing == lab.Absent("json refuses some inputs (JSONDecodeError)")
    assert lab.peer("json", lambda json: lambda: json.loads("1"))() == 1


# -- what is shown


def test_source_shows_the_piece_under_its_heading():
    from kernelbook.dropout import _seeded_dropout_kernel

    piece = lab.source(_seeded_dropout_kernel, "draw")
    assert "randint4x" in piece.plain
    assert "tl.store" not in piece.plain
    assert piece.plain.splitlines()[1].startswith("# -- draw:")
    whole = lab.source(_seeded_dropout_kernel)
    assert "@triton.jit" in whole.plain
    assert "highlight" in whole.html
    assert whole.markdown.count("```") == 2
    with pytest.raises(ValueError, match="0 pieces named 'paint'"):
        lab.source(_seeded_dropout_kernel, "paint")


def test_prose_is_escaped():
    assert "<code>a &lt; b</code>" in lab.read("where `a < b`, **always**").html
    assert "<strong>always</strong>" in lab.read("where `a < b`, **always**").html
    assert "&lt;script&gt;" in lab.table([{"<script>": 1}], "x").html


def test_a_script_run_by_itself_prints(capsys):
    lab.read("Some   prose.")
    assert capsys.readouterr().out == "Some prose.\n\n"


def test_the_link_to_the_record_is_for_the_site_alone(monkeypatch):
    link = ("the record", "_results/x.json")
    assert "href" not in lab.note("See", link=link).html
    monkeypatch.setitem(sys.modules, "sphinx_gallery", json)
    assert 'href="../_results/x.json"' in display.note("See", link=link).html


def test_figures_say_where_they_come_from_in_both_themes(replayed):
    sweep = lab.bench("forward", POINTS, None, **SWEEP)
    lab.plot(sweep, "Speed")
    figure = plt.gcf()
    assert figure.get_label().startswith("Speed. Lines over elements, GB/s")
    assert figure.results == "_results/test-gpu/tried.json"
    light = figures.to_svg(figure)
    dark = figures.to_dark(light)
    for text in ("Test GPU", "driver 1.2", "torch 2.13.0", "triton 3.7.1", "0123456", "2026-01-02"):
        assert text in light
    assert "peer refuses: ValueError" in light
    assert figures.colour("copy") in light
    assert figures.colour("copy") not in dark
    lab.plot(sweep, "Speed")
    assert light == figures.to_svg(plt.gcf())
    lab.ladder(sweep, "Steps", ["ours"], by="dtype", where={"elements": 1000})
    assert "ours in float16 50" in plt.gcf().get_label()


def test_the_legend_leaves_the_title_alone(replayed):
    lab.plot(lab.bench("forward", POINTS, None, **SWEEP), "A title that is long enough to be hit")
    figure = plt.gcf()
    figure.canvas.draw()
    title = figure._suptitle.get_window_extent()
    assert not title.overlaps(figure.axes[0].get_legend().get_window_extent())


def test_providers_keep_their_colour(replayed):
    names = ["Kernel Book", "PyTorch", "first step", "second step", "third step"]
    colours = [lab.colour(name) for name in names]
    assert len(set(colours)) == len(names)
    assert [lab.colour(name) for name in names] == colours


def test_a_number_that_was_never_recorded_is_said_and_not_printed():
    shown = lab.read(f"It reaches {float('nan'):.0f} % of a copy, and a banana.")
    assert "Not recorded yet" in shown.plain
    assert "%" not in shown.plain
    assert "banana" in lab.read("A banana, 7 %.").plain


@pytest.mark.usefixtures("gpu")
def test_the_compiler_reports_on_every_kernel(live, monkeypatch):
    from kernelbook import seeded_dropout

    x = torch.ones(4096, device="cuda")
    rows = lab.facts("compiler", {"float32": lambda: seeded_dropout(x, 0.5, 1)}).rows
    assert [row["kernel"] for row in rows] == ["_seeded_dropout_kernel"]
    assert rows[0]["registers"] > 0
    assert rows[0]["spills"] == 0
