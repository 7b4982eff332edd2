"""Several GPUs: whose numbers come first, what stands beside them, and how that is marked."""

import copy
import sys

import matplotlib.pyplot as plt
import pytest
import torch
from records import POINTS, PROVENANCE, SWEEP, record
from test_check import case

from kernelbook import lab, runtime
from kernelbook.lab import display, results


def made_on(gpu, slower=1, date="2026-01-02T03:04:05Z", **changes):
    """A record of the chapter `tried` on a GPU, with times that are so many times as long."""
    made = PROVENANCE | {"gpu": gpu, "slug": results.slug(gpu), "date": date}
    found = copy.deepcopy(record(provenance=made, **changes))
    sweep = found["sweeps"]["forward"]
    sweep["providers"].append("Kernel Book")
    sweep["milliseconds"]["Kernel Book"] = [[1.0, 1.25, 1.5], [2.0, 2.5 * slower, 9.0]]
    return found


@pytest.fixture
def gpus(module, root, monkeypatch):
    """Records of the book's primary and of two other GPUs; the chapter is replayed."""
    monkeypatch.setenv("KERNELBOOK_MODE", "replay")
    monkeypatch.setattr(results, "PRIMARY", "the-primary")
    results.save(made_on("The Primary"))
    results.save(made_on("Another GPU", 2, date="2026-05-05T05:05:05Z"))
    results.save(made_on("Zero GPU", 3))
    return lab.start("tried", "measured_module")


@pytest.fixture
def site(monkeypatch):
    monkeypatch.setitem(sys.modules, "sphinx_gallery", sys)


@pytest.fixture
def notebook(monkeypatch):
    monkeypatch.setattr(display, "in_notebook", lambda: True)


def speed():
    return lab.bench("forward", POINTS, None, **SWEEP)


def drawn():
    """The GPUs of the open figures."""
    return [getattr(plt.figure(number), "gpu", None) for number in plt.get_fignums()]


# -- whose numbers come first


def test_the_gpu_at_hand_wins_then_the_primary_then_the_newest(gpus, root, monkeypatch):
    assert results.find("tried")["provenance"]["gpu"] == "The Primary"
    monkeypatch.setattr(runtime, "environment", lambda: {"gpu": "Zero GPU"})
    assert results.find("tried")["provenance"]["gpu"] == "Zero GPU"
    (root / "the-primary" / "tried.json").unlink()
    monkeypatch.setattr(runtime, "environment", dict)
    assert results.find("tried")["provenance"]["gpu"] == "Another GPU"
    assert results.find("another") is None


def test_the_primary_stands_first_among_the_others(gpus, root):
    def slugs(records):
        return [found["provenance"]["slug"] for found in records]

    assert slugs(results.recorded()) == ["the-primary", "another-gpu", "zero-gpu"]
    assert slugs(results.others("tried", "another-gpu")) == ["the-primary", "zero-gpu"]
    assert slugs(results.others("tried", "the-primary")) == ["another-gpu", "zero-gpu"]
    (root / "zero-gpu" / "tried.json").write_text("{}")  # such as a run replaces
    assert slugs(results.others("tried", "zero-gpu")) == ["the-primary", "another-gpu"]


# -- what stands beside


def test_sweeps_and_tables_of_other_gpus_stand_beside(gpus):
    sweep, memory = speed(), lab.measure("memory", None)
    where = {"provider": "Kernel Book", "elements": 2000}
    for shown in (sweep, memory):
        assert shown.provenance["gpu"] == "The Primary"
        gpus = [other.provenance["gpu"] for other in shown.elsewhere]
        assert gpus == ["Another GPU", "Zero GPU"]
    assert [s.at(**where)["ms"].item() for s in (sweep, *sweep.elsewhere)] == [2.5, 5.0, 7.5]
    assert sweep.share("Kernel Book", elements=2000) == pytest.approx(0.8)
    assert memory.elsewhere[0].rows == [{"operator": "ours", "bytes": 8}]


def test_what_another_gpu_lacks_is_not_beside(gpus, root):
    results.save(made_on("Another GPU") | {"sweeps": {}, "tables": {}})
    lab.start("tried", "measured_module")
    for shown in (speed(), lab.measure("memory", None)):
        assert [other.provenance["gpu"] for other in shown.elsewhere] == ["Zero GPU"]


def curve(axes, rows):
    axes.plot([0, 1], [0, rows[0]["bytes"]])


def test_a_page_shows_every_gpu(gpus, site):
    sweep, memory = speed(), lab.measure("memory", None)
    order = ["The Primary", "Another GPU", "Zero GPU"]
    lab.plot(sweep, "Speed")
    lab.ladder(sweep, "Steps", ["ours", "peer"], by="dtype", where={"elements": 1000})
    lab.draw(memory, "Memory", lambda rows: f"{rows[0]['bytes']} bytes.", curve)
    assert drawn() == order * 3
    labels = [plt.figure(number).get_label() for number in plt.get_fignums()]
    assert len(set(labels)) == 9
    for label, gpu in zip(labels, order * 3, strict=True):
        assert gpu in label
    files = [plt.figure(number).results for number in plt.get_fignums()]
    assert files[1] == "_results/another-gpu/tried.json"
    parts = memory.html.split('<div class="kb-gpu" data-gpu="')
    assert [part.split('"')[0] for part in parts[1:]] == order
    for part, gpu in zip(parts[1:], order, strict=True):
        assert f"Recorded on {gpu}" in part
        assert ("The text speaks of The Primary." in part) == (gpu != order[0])
    read = [getattr(plt.figure(number), "read", None) for number in plt.get_fignums()]
    assert read == [None, order[0], order[0]] * 3


def test_a_script_draws_its_own_and_names_the_others(gpus, capsys):
    lab.plot(speed(), "Speed")
    assert drawn() == [None]
    capsys.readouterr()
    lab.measure("memory", None)
    printed = capsys.readouterr().out
    assert printed.count("Recorded on") == 1
    assert "Also recorded: another-gpu/tried.json, zero-gpu/tried.json\n" in printed


def test_a_notebook_shows_the_primary_beside_its_own_gpu(gpus, notebook, monkeypatch):
    lab.plot(speed(), "Speed")
    assert drawn() == [None]  # the primary is its own
    plt.close("all")
    monkeypatch.setattr(runtime, "environment", lambda: {"gpu": "Zero GPU"})
    lab.start("tried", "measured_module")
    lab.plot(speed(), "Speed")
    assert drawn() == ["Zero GPU", "The Primary"]
    assert "Another GPU" not in lab.measure("memory", None).html


def test_one_gpu_alone_needs_no_switch(replayed, site):
    lab.plot(speed(), "Speed")
    assert drawn() == [None]
    assert "kb-gpu" not in lab.measure("memory", None).html


def test_a_step_that_another_gpu_lacks_is_absent_there(gpus, site):
    lab.ladder(speed(), "Steps", ["ours", "peer"], by="dtype", where={"elements": 1000})
    texts = [text.get_text() for text in plt.figure(plt.get_fignums()[1]).axes[0].texts]
    assert texts == ["50", "absent"]
    assert display.absences == []  # the text's own numbers are all there


# -- how it is marked


def test_an_older_kernel_elsewhere_is_marked_and_stops_nothing(gpus, root, site):
    results.save(made_on("Zero GPU", fingerprint="0" * 64))
    changed = made_on("Another GPU")
    changed["sweeps"]["forward"]["work"] = "3 * elements * itemsize"
    results.save(changed)
    first = lab.start("tried", "measured_module")
    sweep, memory = speed(), lab.measure("memory", None)
    lab.plot(sweep, "Speed")
    labels = [plt.figure(number).get_label() for number in plt.get_fignums()]
    older = "Measured with an older kernel."
    assert not sweep.mark
    assert [other.mark for other in sweep.elsewhere] == [older, older]
    assert [other.mark for other in memory.elsewhere] == ["", older]
    assert [older in label for label in labels] == [False, True, True]
    assert memory.html.count(older) == 2  # the caption, and the name of its region
    assert "OUT OF DATE" not in "".join([first.html, memory.html, *labels])


def test_an_edited_kernel_stops_at_the_primary_alone(gpus, module, site):
    module("def kernel(x):\n    return x + 2\n")
    first = lab.start("tried", "measured_module")
    lab.plot(speed(), "Speed")
    labels = [plt.figure(number).get_label() for number in plt.get_fignums()]
    memory = lab.measure("memory", None)
    for text in (first.plain, memory.plain, labels[0]):
        assert "OUT OF DATE" in text
    assert ["OUT OF DATE" in label for label in labels] == [True, False, False]
    assert all("older kernel" in label for label in labels[1:])
    assert "OUT OF DATE" not in memory.elsewhere[0].html


# -- your GPU beside the book's


def timed(elements, dtype):
    return {"copy": lambda: 1e-3 * elements, "Kernel Book": lambda: 2e-3 * elements}


def run_live():
    lab.start("tried", "measured_module")
    truth = torch.tensor([1.0, 2.0]).double()
    lab.check("sum", [case(truth.float(), truth)])
    sweep = lab.bench("forward", POINTS, timed, **SWEEP)
    lab.bench("not the book's", POINTS, lambda **_: {"copy": lambda: 1.0}, **SWEEP)
    memory = lab.measure("memory", lambda: [{"operator": "ours", "bytes": 16}])
    return sweep, memory, lab.finish("half of a copy")


def test_a_live_run_is_compared_with_the_primary(gpus, live, root):
    sweep, memory, closing = run_live()
    assert [other.provenance["gpu"] for other in sweep.elsewhere][0] == "The Primary"
    assert memory.rows == [{"operator": "ours", "bytes": 16}]
    assert len(memory.elsewhere) == 3
    heads, row = closing.plain.splitlines()[1:3]
    assert heads.split("  ")[-1].strip() == "The Primary, %"
    assert "elements 2,000, dtype float16" in row
    assert row.split()[-2:] == ["50", "80"]
    assert closing.plain.count("forward") == 1
    assert "not the book's " not in closing.plain
    assert str(root.resolve() / "test-gpu" / "tried.json") in closing.plain
    assert closing.plain.endswith("see the page Add your GPU")


def test_the_comparison_is_at_a_point_of_both_and_marked(gpus, live):
    book = made_on("The Primary", fingerprint="0" * 64)
    book["sweeps"]["forward"]["points"][1]["elements"] = 4000
    results.save(book)
    _, _, closing = run_live()
    assert "elements 1,000, dtype float16" in closing.plain
    assert "80, older kernel" in closing.plain


def test_the_primary_itself_is_not_compared(gpus, live, monkeypatch):
    monkeypatch.setattr(results, "PRIMARY", "test-gpu")
    _, _, closing = run_live()
    assert "beside the book's" not in closing.plain
    assert "Add your GPU" not in closing.plain


def test_a_page_links_the_record_and_how_to_add_it(gpus, live, site):
    _, _, closing = run_live()
    assert '<a href="../_results/test-gpu/tried.json">test-gpu/tried.json</a>' in closing.html
    assert '<a href="../contribute.html">Add your GPU</a>' in closing.html


def test_a_live_run_makes_its_folder_before_it_measures(live, root, monkeypatch):
    monkeypatch.setenv("KERNELBOOK_RESULTS", str(root / "new"))
    lab.start("tried", "measured_module")
    assert (root / "new").is_dir()
