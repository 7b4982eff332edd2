"""The tile map on the page of attention: its rule is the package's, and a keyboard is enough."""

import contextlib
import random
import re
from collections import Counter

import pytest
import test_site
import tilemap
import torch
import triton
import triton.language as tl

from kernelbook import runtime
from kernelbook.ops.attention import scope
from kernelbook.ops.attention.tiled import key_tiles

PAGE = "chapters/attention_forward.html"
address, browser, visit = test_site.address, test_site.browser, test_site.visit


@pytest.fixture
def page(visit, address):
    """The chapter, without its mathematics, which no tile waits for."""
    page = visit().page
    page.route("**/mathjax/**", lambda route: route.abort())
    page.goto(address + PAGE, wait_until="domcontentloaded")
    return page


@pytest.fixture
def script(browser):
    """A page with nothing but the script."""
    with contextlib.closing(browser.new_context()) as context:
        page = context.new_page()
        page.add_script_tag(path=test_site.SITE / "_static" / "tilemap.js")
        yield page


def sizes(seqlen_q, seqlen_k, block_m, block_n, is_causal, window=None):
    return {
        "seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "block_m": block_m, "block_n": block_n,
        "is_causal": is_causal, "window": window,
    }  # fmt: skip


def boundaries():
    """Lengths at and beside the ends of tiles, a single query, a single key, and both masks."""
    for seqlen_q in (1, 31, 32, 33, 64):
        for seqlen_k in (1, 15, 16, 17, 80):
            for is_causal in (False, True):
                yield sizes(seqlen_q, seqlen_k, 32, 16, is_causal)


def drawn(count, windows=False):
    draw = random.Random(20)
    for _ in range(count):
        lengths = draw.randint(1, 300), draw.randint(1, 300)
        blocks = draw.choice((7, 16, 32, 64, 128)), draw.choice((7, 16, 32, 64, 128))
        window = draw.choice((None, 0, 1, 15, 16, 17, draw.randint(0, 300))) if windows else None
        yield sizes(*lengths, *blocks, draw.random() < 0.7, window)


MAPS = "all => all.map(sizes => tileMap(sizes).map(row => row.map(tile => tile.%s)))"


# -- the rule --------------------------------------------------------------------------------------


def test_tiles_are_those_of_the_package(script):
    cases = [*boundaries(), *drawn(250, windows=True)]
    for case, rows in zip(cases, script.evaluate(MAPS % "state", cases), strict=True):
        lengths = case["seqlen_q"], case["seqlen_k"]
        starts = range(0, lengths[0], case["block_m"])
        for start_m, row in zip(starts, rows, strict=True):
            expected = ["never"] * triton.cdiv(lengths[1], case["block_n"])
            tiles = case["block_m"], case["block_n"], case["is_causal"], (case["window"], None)
            for start_n, _, masked in key_tiles(start_m, *lengths, *tiles):
                expected[start_n // case["block_n"]] = "cut" if masked else "whole"
            assert row == expected, (case, start_m)


@triton.jit
def _stages_kernel(
    stages_ptr, seqlen_q, seqlen_k, left, right, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    start_m = tl.program_id(0) * BLOCK_M
    first, whole, cut, end = scope.key_stages(
        start_m, start_m + BLOCK_M - 1, seqlen_q, seqlen_k, left, right, HAS_LEFT, HAS_RIGHT,
        BLOCK_N,
    )  # fmt: skip
    stages_ptr += 4 * tl.program_id(0)
    tl.store(stages_ptr, first)
    tl.store(stages_ptr + 1, whole)
    tl.store(stages_ptr + 2, cut)
    tl.store(stages_ptr + 3, end)


def test_stages_are_those_of_the_kernel(script):
    """Tiles that all queries see whole are in stage 1, those beside them in stage 2."""
    cases = [*boundaries(), *drawn(60, windows=True)]
    for case, rows in zip(cases, script.evaluate(MAPS % "stage", cases), strict=True):
        found = torch.zeros(len(rows), 4, dtype=torch.int32, device=runtime.DEVICE)
        lengths = case["seqlen_q"], case["seqlen_k"]
        left, right = scope.bounds(case["is_causal"], (case["window"], None), *lengths)
        with runtime.launching_on(found):
            _stages_kernel[(len(rows),)](
                found, *lengths, left or 0, right or 0, left is not None, right is not None,
                case["block_m"], case["block_n"],
            )  # fmt: skip
        for row, (first, whole, cut, end) in zip(rows, found.tolist(), strict=True):
            starts = range(0, case["seqlen_k"], case["block_n"])
            met = [first <= n < max(end, whole) for n in starts]
            stages = [1 if whole <= n < cut else 2 for n in starts]
            assert row == [
                stage if meets else 0 for meets, stage in zip(met, stages, strict=True)
            ], case


def test_windows_and_counts_agree_with_the_mask_itself(script):
    cases = [*boundaries(), *drawn(120, windows=True)]
    both = "all => all.map(s => [tileMap(s), countTiles(s, tileMap(s))])"
    for case, (rows, counts) in zip(cases, script.evaluate(both, cases), strict=True):
        i = torch.arange(case["seqlen_q"]).unsqueeze(1) + case["seqlen_k"] - case["seqlen_q"]
        j = torch.arange(case["seqlen_k"])
        seen = (j <= i) if case["is_causal"] else torch.ones(len(i), len(j), dtype=torch.bool)
        if case["window"] is not None:
            seen &= j >= i - case["window"]
        expected = Counter(seen=seen.sum().item(), blind=(~seen.any(1)).sum().item())
        for tile in (tile for row in rows for tile in row):
            part = seen[tile["start_m"] : tile["end_m"], tile["start_n"] : tile["end_n"]]
            state = "whole" if part.all() else "cut" if part.any() else "never"
            assert tile["state"] == state, (case, tile)
            expected[state] += 1
            if part.any():
                expected["existing"] += part.numel()
                expected["computed"] += case["block_m"] * case["block_n"]
            if part.all() and tile["stage"] == 2:
                expected["overhanging"] += 1
        assert counts == {name: expected[name] for name in counts}, case


# -- the page --------------------------------------------------------------------------------------


def shown(page):
    """The states of the tiles on the page, row by row as one list."""
    tiles = page.locator(".kb-map-tiles :is(.kb-map-whole, .kb-map-cut, .kb-map-never)")
    return tiles.evaluate_all("all => all.map(tile => tile.className.replace('kb-map-', ''))")


def count(page, state):
    return page.locator(f".kb-map [data-count={state}]").inner_text()


def field(page, label):
    """The control with this label; that of a tile's size ends with the name of its constant."""
    return page.locator(".kb-map").get_by_label(re.compile(rf"^{label}( *BLOCK_[MN])?$"))


def test_without_javascript_the_first_map_stands_with_its_counts(browser, address, page):
    with contextlib.closing(browser.new_context(java_script_enabled=False)) as context:
        still = context.new_page()
        still.goto(address + PAGE)
        assert shown(still) == shown(page) == [state for row in tilemap.states() for state in row]
        for state in ("whole", "cut", "never"):
            assert count(still, state) == count(page, state) == str(shown(page).count(state))
        assert still.locator(".kb-map :is(input, select, button):visible").count() == 0


def test_only_its_own_page_loads_the_script():
    loading = [p for p in test_site.PAGES if "tilemap.js" in (test_site.SITE / p).read_text()]
    assert loading == [PAGE]


def test_keys_change_the_map_and_what_is_said(page):
    summary = page.get_by_role("status").filter(has_text="tiles are computed")
    assert "20 of 32 tiles" in summary.inner_text()
    field(page, "Keys").focus()
    page.keyboard.press("Control+A")
    page.keyboard.type("256")
    page.wait_for_function("e => e.innerText.includes('52 of 64')", arg=summary.element_handle())
    assert Counter(shown(page)) == {"whole": 44, "cut": 8, "never": 12}
    assert [count(page, state) for state in ("whole", "cut", "never")] == ["44", "8", "12"]

    slider = field(page, "Keys, slider")
    assert slider.input_value() == "256"
    slider.press("ArrowRight")
    assert field(page, "Keys").input_value() == "257"
    assert len(shown(page)) == 4 * 17

    field(page, "Queries in a tile").press("ArrowDown")
    assert len(shown(page)) == 2 * 17
    page.get_by_role("radio", name="causal").press("ArrowLeft")
    assert Counter(shown(page)) == {"whole": 34}
    assert "2 beyond the last key" in page.locator("[data-where=whole]").inner_text()


def test_a_suggestion_begins_anew_and_says_who_sees_nothing(page):
    field(page, "Keys to the left").fill("7")
    field(page, "Keys in a tile").select_option("64")
    page.get_by_role("button", name="More queries than keys").press("Enter")
    assert field(page, "Keys to the left").input_value() == ""
    assert len(shown(page)) == 7 * 3
    page.get_by_text("160 queries see no key at all.").wait_for()


def test_arrow_keys_step_through_the_tiles(page):
    """The map is one stop of the tab key, and each tile says its queries, keys and state."""
    grid = page.get_by_role("grid", name="Tiles of 128 queries and 128 keys")
    assert grid.locator("[tabindex='0']").count() == 1
    grid.locator("[tabindex='0']").focus()
    for key in ("ArrowDown", "ArrowRight", "ArrowUp", "ArrowUp", "End", "ArrowRight", "Home"):
        page.keyboard.press(key)
    first = "Queries 0 to 31, keys 0 to 15: cut. Computed in the second stage, masked."
    assert page.evaluate("document.activeElement.ariaLabel") == first
    page.keyboard.press("ArrowDown")
    text = "Queries 32 to 63, keys 0 to 15: whole. Computed in the first stage, without a mask."
    assert page.locator(".kb-map-tile").inner_text() == text
    assert grid.locator("[tabindex='0']").count() == 1
    grid.get_by_role("gridcell").nth(7).hover()
    assert "keys 112 to 127: never computed" in page.locator(".kb-map-tile").inner_text()


def test_a_map_has_at_most_64_by_64_tiles(page):
    for name in ("Queries in a tile", "Keys in a tile"):
        field(page, name).select_option("16")
    for name in ("Queries", "Keys"):
        field(page, name).fill("5000")
    page.get_by_text("Drawn with 1024: numbers here go from 1 to 1024.").wait_for()
    assert len(shown(page)) == 64 * 64
    page.keyboard.press("Tab")
    assert field(page, "Keys").input_value() == "1024"
    field(page, "Keys").fill("")  # while a number is typed, the last one stands
    assert len(shown(page)) == 64 * 64


def test_a_window_leaves_out_what_the_package_leaves_out(page):
    field(page, "Keys to the left").fill("7")
    expected = []
    for start_m in range(0, tilemap.SEQLEN_Q, tilemap.BLOCK_M):
        row = dict.fromkeys(range(0, tilemap.SEQLEN_K, tilemap.BLOCK_N), "never")
        lengths, blocks = (tilemap.SEQLEN_Q, tilemap.SEQLEN_K), (tilemap.BLOCK_M, tilemap.BLOCK_N)
        for start_n, _, masked in key_tiles(start_m, *lengths, *blocks, True, (7, None)):
            row[start_n] = "cut" if masked else "whole"
        expected += row.values()
    assert shown(page) == expected
