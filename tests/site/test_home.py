"""The home page: its numbers are those of the records, and each chapter has a card and a path."""

import html
import json
import re
from pathlib import Path

import pytest
from chapters import CHAPTERS, PACE, minutes
from recorded import HERO, OPERATORS, RIVALS, as_ratio, best, draw_bars, is_unbeaten, with_spaces

ROOT = Path(__file__).parents[2]
SITE = ROOT / "build" / "html"
STEMS = sorted(path.stem for path in (ROOT / "gallery").glob("[!_]*.py"))
RECORDS = {
    path.stem: json.loads(path.read_text(encoding="utf-8"))
    for world in ("", "2x-", "4x-", "8x-")  # the most GPUs come last, and count
    for path in (ROOT / "results" / f"{world}nvidia-h200").glob("*.json")
}
WORK = {"copy": lambda point: 2 * size(point), "matmul": lambda point: 2 * 8192**3}


def size(point):
    """The bytes of one input of a row operator, or of keys and values in decoding."""
    if "seqlen_k" in point:
        keys = point["batch"] * point["heads_k"] * point["seqlen_k"]
        return 2 * keys * point["head_dim"] * point["itemsize"]
    elements = point.get("elements") or point["rows"] * point["columns"]
    return elements * point["itemsize"]


def work(chapter, name, point):
    """The bytes or FLOPs of an operator, counted here a second time."""
    if chapter == "transformer":
        tokens, width = point["batch"] * point["context"], point["width"]
        weights = 4 * width**2 + 2 * width * point["ff"]
        return 6 * tokens * weights + 7 * tokens * point["context"] * width  # causal attention
    if chapter == "warps_with_roles":
        return 2 * point["n"] ** 3
    if chapter == "first_kernel":
        return (2 if name == "backward" else 1) * size(point)
    if name == "decoding":
        return size(point)
    if "attention" not in chapter:
        return (3 if name in ("backward", "race") and chapter != "dropout" else 2) * size(point)
    forward = 4 * point["batch"] * point["heads"] * point["seqlen"] ** 2 * point["head_dim"]
    part = 1 if point["mask"] == "full" else 0.5
    return forward * part * (2.5 if chapter.endswith("backward") else 1)


def percent(chapter, name, provider, where):
    """A provider's share of the limit, from its recorded median."""
    sweep = RECORDS[chapter]["sweeps"][name]
    if provider == sweep["limit"]:
        return 100
    [(number, point)] = [
        (number, point)
        for number, point in enumerate(sweep["points"])
        if where.items() <= point.items()
    ]
    medians = sweep["milliseconds"]
    work_of_limit = WORK.get(sweep["limit"])
    if sweep["limit"] == "ideal":  # the same work, on as many GPUs without a loss
        return round(100 * medians["ideal"][number][1] / medians[provider][number][1])
    if (chapter, name) == ("first_kernel", "forward"):
        work_of_limit = size  # half of x is copied
    ours = work(chapter, name, point) / medians[provider][number][1]
    limit = work_of_limit(point) / medians[sweep["limit"]][number][1]
    return round(100 * ours / limit)


def text_of(page):
    """The words of some HTML."""
    return " ".join(html.unescape(re.sub("<[^>]*>", " ", page)).split())


def page_of(path):
    return (SITE / path).read_text(encoding="utf-8").split("<main", 1)[1]


def cards_of(path):
    """The HTML of each card, by the chapter to which its title leads."""
    cards = re.split(r'<div class="[^"]*\bkb-card\b', page_of(path))[1:]
    return {re.search(r'href="(?:[^"]*/)?(\w+)\.html"', card)[1]: card for card in cards}


def test_every_chapter_has_its_facts():
    assert sorted(CHAPTERS) == STEMS
    for number, (stem, facts) in enumerate(CHAPTERS.items()):
        assert set(facts.needs) <= set(list(CHAPTERS)[:number]), f"{stem} comes before its needs"
        assert facts.question.endswith("?")


@pytest.mark.parametrize("path", ["index.html", "chapters.html"])
@pytest.mark.parametrize("stem", STEMS)
def test_a_card_says_what_a_reader_must_know(stem, path):
    card, facts = cards_of(path)[stem], CHAPTERS[stem]
    said = text_of(card).replace("’", "'")
    assert facts.question in said
    assert re.search(rf"\b\d+ min · {facts.difficulty} · builds on ", text_of(card))
    for need in facts.needs:
        assert f"{need}.html" in card.split("builds on ")[1]
    if stem not in RECORDS:
        assert "Not recorded yet." in said


@pytest.mark.parametrize("stem", RECORDS)
def test_a_card_of_the_chapters_shows_what_was_recorded(stem):
    card, facts = cards_of("chapters.html")[stem], CHAPTERS[stem]
    said = text_of(card).replace("’", "'")
    assert " ".join(with_spaces(RECORDS[stem]["reaches"]).split()) in said
    for where in facts.where.values():
        number = f"{where:,}" if isinstance(where, int) else where.replace("full", "no mask")
        assert re.search(rf'alt="Bars, [^"]* for [^":]*\b{number}\b', card)
    for provider, label in facts.bars.items():
        share = recorded_share(stem, provider)
        assert f"{label} {share}" in html.unescape(re.search('alt="([^"]*)"', card)[1])


def recorded_share(stem, provider):
    """The number of a bar of a chapter: a percentage, or microseconds."""
    facts = CHAPTERS[stem]
    if not facts.column:
        return percent(stem, facts.sweep, provider, facts.where)
    table = RECORDS[stem]["tables"][facts.sweep]
    [row] = [row for row in table["rows"] if row[0] == provider]
    return row[table["columns"].index(facts.column)]


@pytest.mark.parametrize("stem", RECORDS)
def test_a_card_of_the_home_page_compares_what_was_recorded(stem):
    card, facts = cards_of("index.html")[stem], CHAPTERS[stem]
    [shown] = re.findall('<span class="kb-times">(.*?)</span>', card)
    if facts.column:
        times = [recorded_share(stem, provider) for provider in facts.bars]
        assert text_of(shown) == f"{as_ratio(max(times) / min(times))} times"
        return
    rival, ratios = RIVALS[stem], []
    medians = RECORDS[stem]["sweeps"][rival.sweep]["milliseconds"]
    for number, ours in enumerate(medians[rival.ours]):
        theirs = [medians[name][number][1] for name in rival.theirs if medians[name][number]]
        ratios += [min(theirs) / ours[1]] if ours and theirs else []
    bounds = dict.fromkeys(as_ratio(ratio) for ratio in (min(ratios), max(ratios)))
    assert text_of(shown) == f"{' to '.join(bounds)} times"
    assert (
        text_of(card.split("kb-times")[1])
        .split(" the speed of ")[1]
        .startswith(rival.name.split("`")[0])
    )


def test_a_ratio_has_two_digits():
    found = [as_ratio(number) for number in (0.919, 0.994, 0.996, 1.04, 9.94, 9.96, 11.7)]
    assert found == ["0.92", "0.99", "1.0", "1.0", "9.9", "10", "12"]


def test_the_bars_of_the_home_page_are_recorded():
    [drawn] = re.findall('(?s)<figure class="kb-bars".*?</figure>', page_of("index.html"))
    where = CHAPTERS["softmax"].where | {"dtype": "bfloat16"}
    for bar, (label, (sweep, provider)) in zip(
        re.findall("(?s)<li>.*?</li>", drawn), HERO.items(), strict=True
    ):
        assert text_of(bar) == f"{label} {percent('softmax', sweep, provider, where)}"
    for library, share in re.findall(r"library, (\w+), reaches (\d+)", drawn):
        assert int(share) == percent("softmax", "forward", library, where)


def test_the_kernel_of_the_home_page_is_the_package_s():
    page = page_of("index.html")
    [code] = re.findall("(?s)<pre>(.*?)</pre>", page)
    source = (ROOT / "src/kernelbook/ops/softmax/forward.py").read_text(encoding="utf-8")
    body = source.split("def row_fwd_kernel(")[1].split("\n\n\n")[0]
    lines = html.unescape(re.sub("<[^>]*>", "", code)).strip().splitlines()
    assert len(lines) == 6
    assert [line.strip() for line in body.splitlines()][-6:] == lines
    section = page.split("What a kernel looks like<")[1].split("<pre>")[0]
    named = re.findall('<span class="pre">([^<]*)</span>', section)
    assert len(named) > 4
    assert all(re.search(rf"\b{name}\b", "\n".join(lines)) for name in named)


@pytest.mark.parametrize("stem", STEMS)
def test_a_chapter_says_the_same_under_its_title(stem):
    [line] = re.findall(
        r'(?s)</h1>\s*<p class="kb-path">(.*?)</p>', page_of(f"chapters/{stem}.html")
    )
    [on_card] = re.findall(r"\d+ min · .*", text_of(cards_of("index.html")[stem]))
    assert text_of(line).startswith(re.split(" · builds", on_card)[0])
    before, _, after = line.partition(" · next chapter: ")
    order = list(CHAPTERS)
    following = order[order.index(stem) + 1 :][:1]
    assert re.findall(r'href="(\w+)\.html"', before) == list(CHAPTERS[stem].needs)
    assert re.findall(r'href="(\w+)\.html"', after) == following


def test_reading_starts_at_the_first_chapter():
    [button] = re.findall(r'<a [^>]*sd-btn[^>]*href="([^"]*)"', page_of("index.html"))
    assert button == f"chapters/{next(iter(CHAPTERS))}.html"


def test_the_claims_are_counted():
    counts = re.findall(r'<span class="kb-count">(?:<span[^>]*>)?([\d,]+)<', page_of("index.html"))
    checked, timed, unbeaten, compared = (int(count.replace(",", "")) for count in counts)
    assert checked == sum(len(rows) for r in RECORDS.values() for rows in r["checks"].values())
    peers = {"PyTorch", "x @ w", "SDPA flash", "SDPA cuDNN", "torch.compile"}
    peers |= {"Liger", "quack", "FlexAttention", "FlashAttention"}
    assert timed == sum(
        bool(times)
        for record in RECORDS.values()
        for sweep in record["sweeps"].values()
        for peer in peers & sweep["milliseconds"].keys()
        for times in sweep["milliseconds"][peer]
    )
    [table] = re.findall("(?s)<table.*?</table>", page_of("index.html"))
    counted = re.findall(r"<p>(\d+) of (\d+)\b", table)
    rows = [o for o in OPERATORS if o.ours == "Kernel Book"]
    once = {(o.chapter, o.sweeps): of for o, of in zip(rows, counted, strict=True)}
    assert [unbeaten, compared] == [sum(map(int, of)) for of in zip(*once.values(), strict=True)]


@pytest.mark.parametrize("row", range(len(OPERATORS)))
def test_the_table_of_operators_is_recorded(row):
    operator = OPERATORS[row]
    [table] = re.findall("(?s)<table.*?</table>", page_of("index.html"))
    made = RECORDS[operator.chapter]["provenance"]
    assert made["gpu"] in table.split("<thead")[0]
    assert made["date"][:10] in table.split("<thead")[0]
    cells = re.findall("(?s)<td>(.*?)</td>", re.findall("(?s)<tr.*?</tr>", table)[row + 1])
    assert f"chapters/{operator.chapter}.html" in cells[0]
    assert text_of(cells[0]) == operator.name
    shown = [text_of(cell) for cell in cells[1:5]]
    main = operator.sweeps[-1]
    ours = percent(operator.chapter, main, operator.ours, operator.where)
    assert shown[0].removeprefix("★ ") == str(ours)
    numbers = [int(re.search(r"\d+", cell)[0]) for cell in shown if cell != "not timed"]
    fastest = [cell.startswith("★") for cell in shown if cell != "not timed"]
    alike = operator.ours == "Kernel Book"
    assert fastest == [alike and number == max(numbers) for number in numbers]
    for cell in shown[1:]:
        if named := re.search(r"(\d+) \(([^,)]+)", cell):
            provider = {"cuDNN": "SDPA cuDNN", "flash": "SDPA flash"}.get(named[2], named[2])
            assert int(named[1]) == percent(operator.chapter, main, provider, operator.where)


def test_level_is_unbeaten_and_slower_is_not():
    found = {"Kernel Book": 97, "quack": 97, "PyTorch": 31}
    assert best(found, ("PyTorch", "quack", "Liger")) == (97, "quack")
    assert best(found, ("Liger",)) is None
    assert is_unbeaten(found, "Kernel Book")
    assert not is_unbeaten(found | {"Liger": 98}, "Kernel Book")


def test_bars_are_as_long_as_their_percentages():
    widths = re.findall(
        r'<rect [^>]*width="(\d+)"', draw_bars([("a & b", 50), ("c", 100)], "it", "1 & 2")
    )
    assert int(widths[0]) * 2 == int(widths[1])


def test_reading_time_follows_the_pace():
    assert minutes({kind: 10 * pace for kind, pace in PACE.items()}) == 10 * len(PACE)
    assert minutes(dict.fromkeys(PACE, 0)) == 5
