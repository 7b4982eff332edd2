"""What a chapter shows: pieces of kernels, prose, tables and figures."""

import dataclasses
import itertools
import json
import sys
from xml.etree import ElementTree

import matplotlib.pyplot as plt
import pytest
from matplotlib.colors import same_color
from records import POINTS, SWEEP

from kernelbook import lab
from kernelbook.lab import display, figures


def test_source_shows_the_piece_under_its_heading():
    from kernelbook.ops.dropout import _dropped, seeded_dropout_kernel

    piece = lab.source(_dropped, "draw")
    assert "randint4x" in piece.plain
    assert "tl.where" not in piece.plain
    assert piece.plain.splitlines()[1].startswith("# -- draw:")
    both = lab.source(_dropped, "draw", "decide").plain
    assert both.startswith(piece.plain)
    assert "tl.where" in both
    parameters = lab.source(seeded_dropout_kernel, "def").plain
    assert parameters.splitlines()[1].startswith("def seeded_dropout_kernel(")
    assert "x_ptr" in parameters
    assert "# --" not in parameters
    whole = lab.source(seeded_dropout_kernel)
    assert "@triton.jit" in whole.plain
    assert "highlight" in whole.html
    assert whole.markdown.count("```") == 2
    with pytest.raises(ValueError, match="0 pieces named 'paint'"):
        lab.source(seeded_dropout_kernel, "paint")


def test_a_listing_says_what_each_source_is_for():
    from kernelbook.ops.dropout import masked_dropout_kernel, seeded_dropout_kernel

    both = {"1. The mask < stored": masked_dropout_kernel, "2. Seeded": seeded_dropout_kernel}
    shown = lab.listing(both)
    assert shown.html.count('class="kb-source"') == shown.markdown.count("```python") == 2
    assert "<p>1. The mask &lt; stored.</p>" in shown.html
    first, second = (shown.plain.index(f"def {kernel.fn.__name__}") for kernel in both.values())
    assert shown.plain.index("1. The mask < stored.") < first < shown.plain.index("2.") < second


def test_the_source_of_a_chapters_own_function_names_no_file():
    assert lab.source(test_prose_is_escaped).plain.startswith("def test_prose_is_escaped")


def test_results_are_shown_together_in_their_order():
    first, second = lab.read("first"), lab.read("second")
    both = lab.together(first, None, second)
    assert both.html == first.html + second.html
    assert both.plain == "first\n\nsecond"


def test_prose_is_escaped():
    assert "<code>a &lt; b</code>" in lab.read("where `a < b`, **always**").html
    assert "<strong>always</strong>" in lab.read("where `a < b`, **always**").html
    assert "&lt;script&gt;" in lab.table([{"<script>": 1}], "x").html


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("PyTorch's, and the ranks' own", "PyTorch’s, and the ranks’ own"),
        ('a "stale" number', "a “stale” number"),
        ("backend='triton'", "backend='triton'"),
        ("`x's` is the kernel's", "<code>x&#x27;s</code> is the kernel’s"),
        ("95 % of 4.8 TB/s", "95\xa0% of 4.8\xa0TB/s"),
        ("3 ms, 12 GiB, 768 TFLOP/s", "3\xa0ms, 12\xa0GiB, 768\xa0TFLOP/s"),
        ("3 mean 4 warps", "3 mean 4 warps"),
    ],
)
def test_computed_text_is_set_as_prose_is(written, shown):
    made = lab.read(written)
    assert f"<p>{shown}</p>" in made._repr_html_()
    assert made.plain == written
    cell = lab.table([{"x": written}], "x")
    assert "’" not in cell.plain
    if "`" not in written:
        assert f"<td>{shown}</td>" in cell._repr_html_().replace(' class="kb-word"', "")


def test_a_figure_is_set_as_prose_is():
    figure, axes = plt.subplots()
    axes.set_title("PyTorch's, 3 ms")
    svg = figures.to_svg(figure)
    assert ">PyTorch’s, 3\xa0ms<" in svg
    assert "'Segoe UI'" in svg  # a font's name is no prose
    assert ElementTree.fromstring(svg).tag.endswith("svg")
    plt.close(figure)


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
    message = {"peer": "peer_library refuses some inputs: RuntimeError: n exceeds…"}
    lab.plot(dataclasses.replace(sweep, skipped=message), "Speed")
    assert "absent: peer, which refuses some inputs" in plt.gcf().texts[-1].get_text()
    assert figures.colour("copy") in light
    assert figures.colour("copy") not in dark
    lab.plot(sweep, "Speed")
    assert light == figures.to_svg(plt.gcf())
    lab.ladder(sweep, "Steps", ["ours"], by="dtype", where={"elements": 1000})
    assert "ours in float16 50" in plt.gcf().get_label()
    names = {"ours": "one read"}
    where = {"elements": (1000,)}
    lab.ladder(sweep, "Steps", ["ours"], by="elements", where=where, names=names, lit="ours")
    axes = plt.gcf().axes[0]
    assert "one read in elements = 1,000 50" in plt.gcf().get_label()
    assert [label.get_text() for label in axes.get_yticklabels()] == ["one read"]
    assert same_color(axes.patches[0].get_facecolor(), figures.colour("Kernel Book"))


def test_a_sketch_is_described_and_names_no_gpu():
    lab.sketch("Two panels", "A point in each.", lambda *all: [a.plot(1, 1) for a in all], panels=2)
    figure = plt.gcf()
    assert figure.get_label() == "Two panels. A point in each."
    assert len(figure.axes) == 2
    assert "GPU" not in figures.to_svg(figure)


def test_each_line_bears_its_name_and_no_two_names_meet(replayed):
    sweep = lab.bench("forward", POINTS, None, **SWEEP)
    lab.plot(sweep, "A title that is long enough to be hit")
    figure = plt.gcf()
    figure.canvas.draw()
    axes = figure.axes[0]
    names = [text.get_text() for text in axes.texts]
    assert sorted(names) == sorted({row["provider"] for row in sweep.rows})
    lab.plot(sweep, "Renamed", names={"peer": "theirs"})
    assert "theirs" in [text.get_text() for text in plt.gcf().axes[0].texts]
    assert "theirs" in plt.gcf().get_label()
    boxes = [text.get_window_extent() for text in [figure._suptitle, *axes.texts]]
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))


def test_names_that_would_meet_move_apart_and_the_others_stay():
    places = figures._apart([0.1, 0.5, 0.51, 0.9], 0.1)
    assert places == pytest.approx([0.1, 0.455, 0.555, 0.9])
    places = figures._apart([0.5, 0.5, 0.62], 0.1)  # the pair moves into the third
    assert places == pytest.approx([0.44, 0.54, 0.64])


def test_the_best_peer_is_neither_the_book_nor_the_limit(replayed):
    sweep = lab.bench("forward", POINTS, None, **SWEEP)
    assert sweep.best_peer(elements=1000) == ("ours", 0.5)  # where the peer is absent
    assert sweep.best_peer(elements=2000) == ("ours", pytest.approx(0.8))
    assert sweep.best_peer("peer", elements=2000) == ("peer", pytest.approx(0.5))
    assert sweep.best_peer("peer", elements=1000)[0] == "none"


def test_who_is_ahead_at_a_point_is_listed_from_the_fastest(replayed):
    sweep = lab.bench("forward", POINTS, None, **SWEEP)
    ahead = sweep.ahead_of("peer", "ours", "copy", "peer", elements=2000)
    assert [name for name, _ in ahead] == ["copy", "ours"]
    assert ahead[1][1] == sweep.rate("ours", elements=2000)
    assert sweep.ahead_of("copy", "ours", "peer", elements=1000) == []


def test_a_sweep_says_where_it_is_slow_and_who_is_ahead(replayed):
    sweep = lab.bench("forward", POINTS, None, **SWEEP)
    times = sweep.milliseconds
    times = {"copy": times["copy"], "Kernel Book": times["ours"], "peer": [[], [1.5, 2.0, 2.5]]}
    sweep = dataclasses.replace(sweep, providers=list(times), milliseconds=times)
    in_float16 = {"dtype": "float16"}
    assert "In float16 the kernel reaches 50 % to 80 % of a copy" in sweep.summary(**in_float16)
    assert "slowest at 1,000 elements" in sweep.summary(**in_float16)
    [loss] = sweep.losses(in_float16)
    assert loss["elements"] == 2000
    assert loss["library"] == "peer"
    assert loss["its %"] == pytest.approx(loss["our %"] + 20)
    other = dataclasses.replace(sweep, provenance={"gpu": "Another"})
    behind = dataclasses.replace(sweep, provenance={"gpu": "This"}, elsewhere=[other])
    said = behind.losses_in_words(in_float16)
    assert said.startswith("The table lists every point of both figures on This at which")
    assert said.endswith("On Another there is one such point, by 20 percentage points.")
    times["peer"] = [[], [2.48] * 3]  # ahead by 1 % and no more
    sweep = dataclasses.replace(sweep, milliseconds=times)
    assert sweep.losses(in_float16) == []
    assert sweep.losses_in_words(in_float16).startswith("On ")


def test_providers_keep_their_colour(replayed):
    names = ["Kernel Book", "PyTorch", "first step", "second step", "third step"]
    colours = [lab.colour(name) for name in names]
    assert len(set(colours)) == len(names)
    assert [lab.colour(name) for name in names] == colours


# -- numbers that are missing


def test_a_number_that_was_never_recorded_is_said_and_not_printed(replayed):
    missing = lab.bench("backward", POINTS, None, **SWEEP)
    share = missing.share("ours", elements=1000)
    shown = lab.read(f"It reaches {share:.0f} % of a copy, and a banana.")
    assert "Not recorded yet" in shown.plain
    assert "%" not in shown.plain
    assert "banana" in lab.read("A banana, 7 %.").plain


def test_a_table_that_was_never_recorded_is_said(replayed):
    assert lab.measure("speed of light", None).rows == []
    assert "Not recorded yet" in lab.read(f"{float('nan')} m/s").plain


def test_a_number_that_is_absent_says_why(replayed):
    sweep = lab.bench("forward", POINTS, None, **SWEEP)
    shown = lab.read(f"A peer reaches {sweep.share('peer', elements=1000):.0f} %.")
    assert "Absent: peer refuses: ValueError." in shown.plain
    assert "recorded" not in shown.plain


def test_a_nan_where_every_number_was_recorded_is_our_mistake(replayed):
    sweep = lab.bench("forward", POINTS, None, **SWEEP)
    assert sweep.share("ours", elements=1000) == 0.5
    with pytest.raises(ValueError, match="NaN, although every number was recorded"):
        lab.read(f"It reaches {float('nan'):.0f} %.")


def test_a_provider_that_does_not_exist_is_our_mistake(replayed):
    sweep = lab.bench("forward", POINTS, None, **SWEEP)
    for provider, elements in (("hours", 1000), ("ours", 3000)):
        with pytest.raises(ValueError, match=f"no point of forward fits {provider}"):
            sweep.share(provider, elements=elements)


def test_a_chapter_forgets_what_the_one_before_it_missed(replayed):
    lab.measure("speed of light", None)
    lab.start("tried", "measured_module")
    with pytest.raises(ValueError, match="NaN"):
        lab.read("nan %")


def test_a_one_in_a_table_is_a_number_and_no_verdict():
    shown = lab.table([{"peak": 1.0, "verdict": True}, {"peak": 0.0, "verdict": False}], "Peaks")
    assert [line.split() for line in shown.plain.splitlines()[2:]] == [
        ["1.0", "pass"],
        ["0.0", "FAIL"],
    ]
    assert shown.html.count("pass") == 1


def test_numbers_end_at_the_right_although_they_were_formatted():
    rows = [
        {"what": "a", "speed": "1,024", "share": "—"},
        {"what": "b", "speed": "7", "share": "9 %"},
    ]
    html, _ = display.tabulated(rows, "Speeds")
    assert html.count('<th scope="col" class="kb-number">') == 2
    assert html.count('<td class="kb-number">') == 4
    rows[1]["speed"] = "7 programs"
    html, _ = display.tabulated(rows, "Speeds")
    assert html.count('<th scope="col" class="kb-number">') == 1
