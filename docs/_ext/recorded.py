"""Pages made from what is recorded: the home page, the hardware tables, the API reference.

Also the guard of the whole book: a build with results older than the kernel that they measured
warns (and so fails in CI), unless the page says what has changed, and a results file that cannot be
read stops the build.
"""

import importlib
import json
import re
from html import escape, unescape
from pathlib import Path
from textwrap import fill
from typing import NamedTuple

from chapters import CHAPTERS, PACE, PARTS, bars_in_type, reading_order, reading_time
from docutils import nodes
from docutils.statemachine import StringList
from sphinx import addnodes
from sphinx.errors import ExtensionError
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective, SphinxRole

logger = logging.getLogger(__name__)
NOT_RECORDED = "Not recorded yet: no GPU has run this book."


def records():
    """Every recorded result, the primary GPU's first; a file that is corrupt stops the build."""
    from kernelbook.lab import results

    try:
        return results.recorded()
    except results.ResultsError as error:
        raise ExtensionError(str(error)) from error


def is_stale(app, record):
    """Whether the code that a record measured has changed, the chapter's own kernels included."""
    from kernelbook.lab import results

    return results.is_stale(record, gallery(app) / f"{record['chapter']}.py")


def is_primary(record):
    """Whether a record is of the GPU whose numbers the text reads."""
    from kernelbook.lab import results

    return results.is_primary(record)


def state(app, record):
    """Whether a record was made with the code at hand; only the primary's has to be."""
    if not is_stale(app, record):
        return "current"
    return "out of date" if is_primary(record) else "older kernel"


def primaries():
    """The records whose numbers the text of the chapters reads."""
    return [record for record in records() if is_primary(record)]


def gallery(app):
    """The folder of the chapters' scripts."""
    return Path(app.srcdir).parent / "gallery"


def awaited():
    """The chapters whose records are known to be out of date, each with what has changed since."""
    from kernelbook.lab import results

    return results.awaited()


def warn_if_stale(app, env):
    """Warn about each result of the primary GPU whose kernel has changed since it was measured.

    Not about those that are known to be out of date; but about one that is held to be and is not.
    """
    stale = {record["chapter"] for record in primaries() if is_stale(app, record)}
    for chapter in awaited().keys() - stale:
        logger.warning(
            "results/awaited.json says that %s is out of date, which it is not: take it off.",
            chapter,
            type="kernelbook",
            subtype="awaited",
        )
    for record in primaries():
        if record["chapter"] in stale - awaited().keys():
            logger.warning(
                "results/%s/%s.json is out of date: the kernel has changed since it was measured. "
                "Run `make html` on this GPU to measure it again.",
                record["provenance"]["slug"],
                record["chapter"],
                type="kernelbook",
                subtype="stale",
            )


# -- building blocks ------------------------------------------------------------------------------


def paragraph(*parts, classes=()):
    """A paragraph of strings and inline nodes."""
    node = nodes.paragraph(classes=list(classes))
    node += [nodes.Text(part) if isinstance(part, str) else part for part in parts]
    return node


def link(docname, target, text):
    """A link from the page `docname` to the page `target`."""
    reference = addnodes.pending_xref(
        "",
        nodes.inline("", text),
        refdomain="std",
        reftype="doc",
        reftarget=f"/{target}",
        refexplicit=True,
        refwarn=True,
        refdoc=docname,
    )
    return reference


def raw_json(record):
    """A link from a top-level page to the recorded file."""
    address = f"_results/{record['provenance']['slug']}/{record['chapter']}.json"
    return nodes.raw("", f'<a href="{address}">{record["chapter"]}.json</a>', format="html")


def table(headers, rows, caption=""):
    """A table of strings and inline nodes."""
    group = nodes.tgroup(cols=len(headers))
    group += [nodes.colspec(colwidth=1) for _ in headers]

    def row(cells):
        entries = (nodes.entry("", paragraph(cell)) for cell in cells)
        return nodes.row("", *entries)

    group += nodes.thead("", row(headers))
    group += nodes.tbody("", *map(row, rows))
    title = [nodes.title("", caption)] if caption else []
    return nodes.table("", *title, group)


# -- the chapter list -----------------------------------------------------------------------------


def chapter_scripts(app):
    scripts = gallery(app).glob("[!_]*.py")
    return sorted(scripts, key=reading_order)


class Chapters(SphinxDirective):
    """One card a chapter, with its question and what it takes to read.

    On the home page a card also shows the chapter's idea, and its speed beside what a reader would
    call in PyTorch; on the chapters' own page, the bars of its versions and what it reaches.
    """

    def run(self):
        self.env.note_reread()
        self.home = self.env.docname != "chapters"
        stems = [script.stem for script in chapter_scripts(self.env.app)]
        if not stems:
            return [paragraph("No chapter has been written yet.")]
        parts = {}
        for stem in stems:
            title = PARTS.get(stem, list(parts)[-1] if parts else "Chapters")
            parts.setdefault(title, []).append(stem)
        content = nodes.container(classes=["kb-cards"])
        content += paragraph(self.legend(stems), classes=[] if self.home else ["kb-small"])
        for title, members in parts.items():
            cards = "".join(map(self.card, members))
            grid = f":::::{{grid}} 1 1 2 2\n:gutter: 3\n\n{cards}:::::"
            level = f":heading-level: {3 if self.home else 2}"
            lines = f"```{{rubric}} {title}\n{level}\n```\n\n{grid}".split("\n")
            self.state.nested_parse(StringList(lines, source="cards"), self.content_offset, content)
        if not self.home:
            content += self.toctree([(None, f"chapters/{stem}") for stem in stems])
        return [content]

    def card(self, stem):
        if stem not in CHAPTERS:
            raise ExtensionError(f"gallery/{stem}.py: docs/_ext/chapters.py has no facts of it.")
        found = next((record for record in primary() if record["chapter"] == stem), None)
        (uri, alt), said = self.picture(stem, found), "Not recorded yet."
        if found:
            said = versus(found) if self.home else reached(found)
            if state(self.env.app, found) != "current":
                said = f"{said.rstrip('.')}. Out of date."
        shown = f":img-top: {uri}\n:img-alt: {alt}\n" if uri else ""
        return (
            f"::::{{grid-item-card}} {{doc}}`/chapters/{stem}`\n"
            f":class-card: kb-card\n:shadow: none\n{shown}\n{CHAPTERS[stem].question}\n\n{said}\n\n"
            f":::{{card-footer}}\n{{facts}}`{stem}`\n:::\n::::\n"
        )

    def picture(self, stem, record):
        """The address of a card's picture, and what it shows in words."""
        if not self.home:
            return thumbnail(self.env.srcdir, record) if record else ("", "")
        path = Path(self.env.srcdir, "figures", f"home-{stem.replace('_', '-')}.svg")
        if not path.exists():
            return "", ""
        title = re.search("<title>(.*?)</title>", path.read_text(encoding="utf-8"))[1]
        return f"/figures/{path.name}", f"{title}."

    def legend(self, stems):
        """What the cards say and how long it all takes; how that is counted, on one page."""
        hours = round(sum(reading_time(self.env, stem) for stem in stems) / 60)
        if self.home:
            gpus = list(dict.fromkeys(found["provenance"]["gpu"] for found in primary()))
            return (
                f"All chapters together take about {hours} hours to read. The blue number on a "
                f"card is the speed of the chapter’s kernel, divided by that of what stands behind "
                f"the number, from the worst to the best of the inputs that the chapter times on "
                f"{gpus[0] if gpus else 'no GPU yet'}: above 1, ours is faster."
            )
        *others, last = (f"{pace} {kind}" for kind, pace in PACE.items())
        return (
            f"A picture shows a chapter’s versions on one input, in percent of a limit that was "
            f"measured beside them or in microseconds, {measured_on(primary())}. The line below "
            f"the question says what the chapter reaches, over its inputs or on the largest. All "
            f"chapters together take about {hours} hours to read, at {', '.join(others)} or {last} "
            f"a minute."
        )

    def toctree(self, entries):
        """A hidden table of contents, so that the chapters stand in the navigation."""
        toctree = addnodes.toctree(
            parent=self.env.docname,
            entries=entries,
            includefiles=[name for _, name in entries],
            maxdepth=1,
            caption=None,
            glob=False,
            hidden=True,
            includehidden=False,
            numbered=0,
            titlesonly=True,
        )
        return nodes.compound("", toctree, classes=["toctree-wrapper"])


def with_spaces(text):
    """A text whose percent signs stand as they do everywhere in the book."""
    return re.sub(r"(?<=\d) ?%", "\N{NO-BREAK SPACE}%", text)


def reached(record):
    """What a chapter reaches, in the words of its record."""
    said = with_spaces(record["reaches"]).rstrip(".")
    return f"{said}." if said[0].isupper() else f"Reached: {said}."


# -- what the cards of the home page compare -------------------------------------------------------


class Rival(NamedTuple):
    """What a chapter's kernel is compared with on its card: what a reader would otherwise call.

    ``theirs`` are providers of the recorded ``sweep``, of which the fastest at each point counts;
    ``name`` is what the card calls them.
    """

    name: str
    sweep: str
    theirs: tuple[str, ...]
    ours: str = "Kernel Book"


_SDPA = ("SDPA flash", "SDPA cuDNN")
RIVALS = {
    "first_kernel": Rival("`x @ w`", "forward", ("x @ w",)),
    "dropout": Rival("`F.dropout`", "forward", ("PyTorch",)),
    "softmax": Rival("`torch.softmax`", "forward", ("PyTorch",)),
    "layer_norm": Rival("`F.layer_norm`", "forward", ("PyTorch",)),
    "layer_norm_backward": Rival("`F.layer_norm`, backward", "backward", ("PyTorch",)),
    "attention_forward": Rival(
        "attention written out in PyTorch", "ladder", ("PyTorch",), "in stages"
    ),
    "attention_fast": Rival("PyTorch’s fastest SDPA", "forward", _SDPA),
    "attention_backward": Rival("PyTorch’s fastest SDPA, backward", "backward", _SDPA),
    "attention_in_models": Rival(
        "PyTorch’s FlexAttention, with a window", "windows", ("FlexAttention",)
    ),
    "attention_fp8": Rival("PyTorch’s SDPA in 16 bits", "fp8", ("SDPA cuDNN",), "all in FP8"),
    "warps_with_roles": Rival("`torch.matmul` (cuBLAS)", "ladder", ("matmul",), "roles"),
    "attention_hopper": Rival("FlashAttention", "forward", ("FlashAttention",)),
    "attention_hopper_backward": Rival("FlashAttention, backward", "backward", ("FlashAttention",)),
    "attention_across_gpus": Rival(
        "PyTorch’s own `context_parallel`", "context parallelism", ("cuDNN CP",)
    ),
    "transformer": Rival("a compiled layer with PyTorch’s SDPA", "layer", ("SDPA, compiled",)),
}


def versus(record):
    """How many times as fast a chapter's kernel is as its rival, as a line of a card."""
    stem = record["chapter"]
    if CHAPTERS[stem].column:  # of one kernel, timed in several ways
        times = [number for _, number in bars_of(record)[0]]
        ratio = max(times) / min(times)
        return f"[{as_ratio(ratio)} times]{{.kb-times}} between the shortest and the longest timing"
    rival = RIVALS[stem]
    ratios = ratios_to(rival, record)
    many = " to ".join(dict.fromkeys((as_ratio(min(ratios)), as_ratio(max(ratios)))))
    return f"[{many} times]{{.kb-times}} the speed of {rival.name}"


def ratios_to(rival, record):
    """At each point, how many times as fast ours is as the fastest of a rival's providers."""
    medians = record["sweeps"][rival.sweep]["milliseconds"]
    timed = zip(medians[rival.ours], *(medians[name] for name in rival.theirs), strict=True)
    return [
        min(times[1] for times in theirs if times) / ours[1]
        for ours, *theirs in timed
        if ours and any(theirs)
    ]


def as_ratio(number):
    """A ratio to two digits: 0.92, 1.4, 12."""
    digits = 2 if number < 0.995 else 1 if number < 9.95 else 0
    return f"{number:.{digits}f}"


HERO = {
    "five PyTorch operations": ("ladder", "simple_softmax"),
    "torch.softmax": ("forward", "PyTorch"),
    "one kernel, three reads": ("ladder", "three_pass"),
    "one kernel, two reads": ("ladder", "online"),
    "one kernel, one read": ("ladder", "Kernel Book"),
}
"""The bars of the home page: the sweep and the provider of each, in the chapter on softmax."""


class Bars(SphinxDirective):
    """Softmax in several ways, each with its speed; nothing where none was recorded."""

    def run(self):
        self.env.note_reread()
        record = next((found for found in primary() if found["chapter"] == "softmax"), None)
        if record is None:
            return []
        where = CHAPTERS["softmax"].where | {"dtype": "bfloat16"}
        shares = {name: percents([sweep(record, name)], where) for name in ("ladder", "forward")}
        bars = [(label, shares[name][provider]) for label, (name, provider) in HERO.items()]
        shown = pictured_input(record)
        caption = f"{shown[0].upper()}{shown[1:]}, {record['provenance']['gpu']}."
        if library := best(shares["forward"], LIBRARIES):
            caption += f" The fastest library, {library[1]}, reaches {library[0]}."
        return [bars_in_type(bars, escape(caption), 100)]


# -- what the home page says in numbers ------------------------------------------------------------

LIMITS = {
    "copy": "a copy",
    "matmul": "a matmul by cuBLAS in bfloat16",
    "ideal": "linear scaling",
}
PYTORCH = ("PyTorch", "x @ w", "SDPA flash", "SDPA cuDNN")
COMPILED = ("torch.compile",)
LIBRARIES = ("Liger", "quack", "FlexAttention", "FlashAttention")
OURS = "Kernel Book"


class Operator(NamedTuple):
    """A row of the table of operators: where its shares are recorded, and of which point.

    Where a provider is in several of the ``sweeps``, the last one counts. ``also`` names what
    was timed elsewhere, as (chapter, sweep), which counts least.
    """

    name: str
    chapter: str
    sweeps: tuple[str, ...]
    where: dict
    ours: str = OURS
    also: tuple[tuple[str, str], ...] = ()


_ROW = {"columns": 4096, "dtype": "bfloat16"}
_FULL, _CAUSAL = ({"seqlen": 4096, "head_dim": 128, "mask": mask} for mask in ("full", "causal"))
_STANDARD = (("attention_forward", "ladder"), ("attention_fast", "forward"))
_PLAIN = (("attention_backward", "ladder"), ("attention_backward", "backward"))
OPERATORS = (
    Operator("Weighted sum", "first_kernel", ("forward",), {"rows": 65536}),
    Operator("Weighted sum, backward", "first_kernel", ("backward",), {"rows": 65536}),
    Operator("Dropout", "dropout", ("forward",), {"dtype": "bfloat16"}),
    Operator("Dropout, backward", "dropout", ("backward",), {"dtype": "bfloat16"}),
    Operator("Softmax", "softmax", ("forward",), _ROW),
    Operator("Softmax, backward", "softmax", ("backward",), _ROW),
    Operator("Layer norm", "layer_norm", ("forward",), _ROW),
    Operator("Layer norm, backward", "layer_norm_backward", ("backward",), _ROW),
    Operator("Attention", "attention_hopper", ("forward",), _FULL, also=_STANDARD),
    Operator("Attention, causal", "attention_hopper", ("forward",), _CAUSAL, also=_STANDARD),
    Operator("Attention, backward", "attention_hopper_backward", ("backward",), _FULL, also=_PLAIN),
    Operator(
        "Attention, causal, backward",
        "attention_hopper_backward",
        ("backward",),
        _CAUSAL,
        also=_PLAIN,
    ),
    Operator("Attention in FP8", "attention_fp8", ("fp8",), _FULL, "all in FP8"),
    Operator("Attention in FP8, causal", "attention_fp8", ("fp8",), _CAUSAL, "all in FP8"),
)


def primary():
    """The records of the GPU whose numbers the text reads."""
    return [record for record in records() if is_primary(record)]


def measured_on(found):
    """On which GPU and when some records were made; those of several GPUs together are left out."""
    if not found:
        return "on no GPU yet"
    found = [r for r in found if r["provenance"]["gpu"] == found[0]["provenance"]["gpu"]]
    dates = sorted({record["provenance"]["date"][:10] for record in found})
    return (
        f"on {found[0]['provenance']['gpu']}, {' to '.join(dict.fromkeys((dates[0], dates[-1])))}"
    )


def sweep(record, name):
    """A recorded sweep, which knows the share of the limit that each provider reaches."""
    from kernelbook.lab.bench import Sweep

    found = {key: value for key, value in record["sweeps"][name].items() if key != "providers_code"}
    return Sweep(name, **found, provenance=record["provenance"])


def percents(sweeps, where):
    """The percentage of the limit that each provider reaches at one point, whole as it is shown."""
    found = {}
    for rows in (sweep.at(**where) for sweep in sweeps):
        shares = zip(rows["provider"], rows["share"], strict=True)
        found |= {provider: round(100 * share) for provider, share in shares}
    return found


def best(found, providers):
    """(percent, provider) of the fastest of some providers, or None where none was timed."""
    return max(((found[name], name) for name in providers if name in found), default=None)


def is_unbeaten(found, ours):
    return found[ours] >= best(found, (ours, *PYTORCH, *COMPILED, *LIBRARIES))[0]


def size_of(point):
    """The size of the input at a point of a sweep, as people write it."""
    if "elements" in point:
        return f"{point['elements']:,} elements"
    names = ("batch", "heads", "seqlen", "head_dim") if "heads" in point else ("rows", "columns")
    return " × ".join(f"{point[name]:,}" for name in names)


def sweeps_of(operator, by_chapter):
    """The sweeps of a row of the table; the last is the one whose points it counts."""
    own = ((operator.chapter, name) for name in operator.sweeps)
    places = [(stem, name) for stem, name in (*operator.also, *own) if stem in by_chapter]
    return [sweep(by_chapter[stem], name) for stem, name in places]


def unbeaten_points(sweeps):
    """At how many points of the last sweep nothing else that was timed is faster than ours."""
    return sum(is_unbeaten(percents(sweeps, point), OURS) for point in sweeps[-1].points)


def operator_rows(app, docname):
    compiled = "torch.\N{ZERO WIDTH SPACE}compile"  # two lines on a phone, or its end is cut off
    headers = ("Operator", OURS, "PyTorch", "Fastest library", compiled, "Unbeaten", "Input")
    rows, by_chapter = [], {record["chapter"]: record for record in primary()}
    for operator in OPERATORS:
        if operator.chapter not in by_chapter:
            continue
        sweeps = sweeps_of(operator, by_chapter)
        points = sweeps[-1].points
        [point] = [p for p in points if operator.where.items() <= p.items()]
        found = percents(sweeps, point)
        groups = [best(found, names) for names in ([operator.ours], PYTORCH, LIBRARIES, COMPILED)]
        alike = operator.ours == OURS  # the peers of FP8 were timed in 16 bits
        fastest = max(percent for percent, _ in filter(None, groups)) if alike else None
        unbeaten = unbeaten_points(sweeps) if alike else 0
        rows.append(
            (
                link(docname, f"chapters/{operator.chapter}", operator.name),
                *(operator_cell(group, fastest, alike, operator.also) for group in groups),
                f"{unbeaten} of {len(points)}{without(sweeps)}" if alike else "no FP8 rival timed",
                size_of(point),
            )
        )
    return headers, rows


def without(sweeps):
    """Which libraries were timed at no point of the sweeps, because they were not installed."""
    absent = dict.fromkeys(
        name
        for sweep in sweeps
        for name in sweep.skipped
        if name in LIBRARIES and not any(sweep.milliseconds.get(name, ()))
    )
    return f", {' and '.join(absent)} absent" if absent else ""


def operator_cell(group, fastest, alike, also=()):
    """A percentage and, where the column does not say it, whose it is; the fastest is marked.

    So is what is credited with more work than it does: see the page on †.
    """
    if group is None:
        return "not timed"
    percent, provider = group
    if provider not in (OURS, "PyTorch", *COMPILED, "all in FP8"):
        name = provider.removeprefix("SDPA ")
        text = f"{percent} ({name if alike else f'{name}, bf16'})"
    else:
        text = f"{percent} †" if provider in COMPILED and also == _PLAIN else str(percent)
    return nodes.strong("", f"★ {text}") if percent == fastest else text


def operator_caption():
    return f"Speed in percent of the limit, {measured_on(primary())}"


def compared():
    """The sweeps of the table of operators that hold a peer in our dtype, each once."""
    by_chapter = {record["chapter"]: record for record in primary()}
    rows = {
        (operator.chapter, operator.sweeps): sweeps_of(operator, by_chapter)
        for operator in OPERATORS
        if operator.chapter in by_chapter and operator.ours == OURS
    }
    return rows.values()


def count_unbeaten(env):
    """Inputs of the table of operators on which nothing else that was timed is faster."""
    return sum(map(unbeaten_points, compared()))


def count_compared(env):
    """Inputs of the table of operators, of which both masks are in one sweep."""
    return sum(len(sweeps[-1].points) for sweeps in compared())


def count_checked(env):
    """Results that were compared with float64 on the primary GPU."""
    return sum(len(rows) for record in primary() for rows in record["checks"].values())


def count_timed(env):
    """Times of PyTorch, torch.compile and libraries that stand in the records of the primary."""
    return sum(
        len(times) > 0
        for record in primary()
        for found in record["sweeps"].values()
        for peer in (*PYTORCH, *COMPILED, *LIBRARIES)
        for times in found["milliseconds"].get(peer, ())
    )


class Count(SphinxRole):
    """A number that is counted when the book is built."""

    COUNTS = {
        "checked": count_checked,
        "timed": count_timed,
        "unbeaten": count_unbeaten,
        "compared": count_compared,
    }

    def run(self):
        self.env.note_reread()
        count = self.COUNTS[self.text](self.env)
        return [nodes.inline("", f"{count:,}", classes=["kb-count"])], []


# -- the pictures of the cards --------------------------------------------------------------------


def pictured_input(record):
    """The input whose speeds a chapter's picture shows."""
    facts = CHAPTERS[record["chapter"]]
    points = [facts.where] if facts.column else record["sweeps"][facts.sweep]["points"]
    [point] = [p for p in points if facts.where.items() <= p.items()]
    if "elements" in point:
        size = [f"{point['elements']:,} elements"]
    elif "columns" in point:
        size = [f"{point['rows']:,} rows of {point['columns']:,} columns"]
    elif "seqlen_k" in point:
        size = [f"one query, {point['seqlen_k']:,} keys"]
    elif "n" in point:
        size = [f"two matrices of {point['n']:,} × {point['n']:,}"]
    elif "context" in point:
        size = [f"a layer of width {point['width']:,}", f"context {point['context']:,}"]
    else:
        size = [f"length {point['seqlen']:,}", f"head_dim {point['head_dim']}"]
        size += [{"full": "no mask", "causal": "causal mask"}[point["mask"]]]
    dtype = None if "all in FP8" in facts.bars else point.get("dtype")  # there the bars say it
    return ", ".join([*size, *filter(None, [dtype])])


def bars_of(record):
    """The bars of a chapter: a label and a percentage of the limit for each, and the limit.

    Times have no limit, which is empty then.
    """
    facts = CHAPTERS[record["chapter"]]
    if facts.column:
        recorded = record["tables"][facts.sweep]
        number = recorded["columns"].index(facts.column)
        found, limit = {row[0]: row[number] for row in recorded["rows"]}, ""
    else:
        measured = sweep(record, facts.sweep)
        found, limit = percents([measured], facts.where), LIMITS[measured.limit]
    if missing := facts.bars.keys() - found.keys():
        raise ExtensionError(
            f"docs/_ext/chapters.py: {record['chapter']} has no {', '.join(sorted(missing))} in "
            f"its {facts.sweep!r} at {facts.where}."
        )
    return [(label, found[provider]) for provider, label in facts.bars.items()], limit


def thumbnail(srcdir, record):
    """Draw a chapter's bars; return the address of the picture, and what it shows in words."""
    (bars, limit), shown = bars_of(record), pictured_input(record)
    path = Path(srcdir, "chapters", "images", f"{record['chapter']}_card.svg")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(draw_bars(bars, limit, shown), encoding="utf-8")
    spoken = ", ".join(f"{label} {number}" for label, number in bars)
    unit = f"% of the speed of {limit}" if limit else "microseconds"
    alt = f"Bars, {unit}, for {shown}: {spoken}."
    return f"/{path.relative_to(srcdir).as_posix()}", alt


def draw_bars(bars, limit, shown):
    """An SVG of a bar for each (label, percent), the last one the book's, and a line at the limit.

    Without a limit the bars are microseconds. Under them stands ``shown``, the input. The colours
    are those of the figures, so that it has a dark twin as they have.
    """
    from kernelbook.lab import figures

    width, top = 360, 30
    height = max(190, top + 38 * len(bars))
    step, number = (height - top) / len(bars), len(bars)
    most = max(100 if limit else 0, *(length for _, length in bars))
    scale = (width - 44) / most  # the numbers stand beside
    end = round(100 * scale)
    drawn = f'<text x="0" y="{height + 20}" fill="{figures.MUTED}">{escape(shown)}</text>'
    if not limit:
        drawn += f'<text x="0" y="16" fill="{figures.MUTED}">microseconds: shorter is faster</text>'
    if limit:
        drawn += (
            f'<path d="M{end} 22V{height}" stroke="{figures.MUTED}" stroke-dasharray="4 4"/>'
            f'<text x="{end}" y="16" text-anchor="end" fill="{figures.MUTED}">'
            f"{limit} = 100 %</text>"
        )
    for place, (label, length) in enumerate(bars, 1):
        y = round(top + step * (place - 1))
        colour = figures.colour(OURS if place == number else "copy")
        drawn += (
            f'<text x="0" y="{y + 13}" fill="{figures.TEXT}">{escape(label)}</text>'
            f'<rect x="0" y="{y + 19}" width="{length * scale:.0f}" height="13" rx="2" '
            f'fill="{colour}"/><text x="{width}" y="{y + 31}" text-anchor="end" '
            f'font-weight="600" fill="{figures.TEXT}">{length}</text>'
        )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height + 26}" '
        f'font-family="system-ui, sans-serif" font-size="15">{drawn}</svg>\n'
    )


# -- the hardware page ----------------------------------------------------------------------------


def run_rows(app, docname):
    from kernelbook.lab import results

    headers = ("Chapter", "GPU", "Date", "Driver", "CUDA", "torch", "triton", "Commit", "State")
    found = records()
    gpus = list(dict.fromkeys(record["provenance"]["gpu"] for record in found))
    found.sort(key=lambda r: (gpus.index(r["provenance"]["gpu"]), reading_order(r["chapter"])))
    rows = []
    for record in found:
        made = record["provenance"]
        name = record["chapter"].replace("_", " ")
        rows.append(
            (
                link(docname, f"chapters/{record['chapter']}", name),
                made["gpu"],
                made["date"][:10].replace("-", "\N{NON-BREAKING HYPHEN}"),
                *(made[key] for key in ("driver", "cuda", "torch", "triton")),
                results.short_commit(made["commit"]),
                state(app, record),
            )
        )
    return headers, rows


def file_rows(app, docname):
    return ("GPU", "Raw results"), [(r["provenance"]["gpu"], raw_json(r)) for r in records()]


def device_rows(app, docname):
    headers = ("GPU", "SMs", "Memory (GiB)", "L2 (MiB)", "SM clock (MHz)", "Memory clock (MHz)")
    devices = {}
    for record in records():
        made = record["provenance"]
        clocks = made["clocks"]
        facts = (made["sm_count"], made["memory_gib"], made["l2_mib"])
        facts += (clocks.get("max_sm_mhz"), clocks.get("max_memory_mhz"))
        devices[made["gpu"]] = ["not readable" if fact is None else str(fact) for fact in facts]
    return headers, [(gpu, *facts) for gpu, facts in devices.items()]


def kernel_rows(app, docname):
    headers = ("Kernel", "Case", "GPU", "Registers", "Spills", "Shared memory (bytes)", "Warps")
    rows = []
    for record in records():
        for kernel in record["kernels"]:
            facts = (kernel[key] for key in ("registers", "spills", "shared_bytes", "warps"))
            name = nodes.literal("", kernel["kernel"])
            rows.append((name, kernel["case"], record["provenance"]["gpu"], *map(str, facts)))
    return headers, rows


def host_rows(app, docname):
    from kernelbook.lab.chapter import HOST

    headers = ("GPU", "Chapter", "Pass", "Kernel Book (µs)", "PyTorch (µs)", "Ratio")
    found = [(r["provenance"]["gpu"], r["chapter"], r["tables"].get(HOST)) for r in records()]
    gpus = list(dict.fromkeys(gpu for gpu, *_ in found))
    rows = []
    for gpu, chapter, times in sorted(found, key=lambda f: (gpus.index(f[0]), reading_order(f[1]))):
        for passes, ours, theirs in times["rows"] if times else ():
            where = link(docname, f"chapters/{chapter}", chapter.replace("_", " "))
            rows.append(
                (gpu, where, passes, f"{ours:.0f}", f"{theirs:.0f}", f"{ours / theirs:.1f}")
            )
    return headers, rows


class Recorded(SphinxDirective):
    """A table of what was recorded: operators, runs, files, devices, kernels or the host's time."""

    required_arguments = 1
    TABLES = {
        "operators": operator_rows,
        "runs": run_rows,
        "files": file_rows,
        "devices": device_rows,
        "kernels": kernel_rows,
        "host": host_rows,
    }

    def run(self):
        self.env.note_reread()
        headers, rows = self.TABLES[self.arguments[0]](self.env.app, self.env.docname)
        if not rows:
            return [paragraph(NOT_RECORDED)]
        if self.arguments[0] != "operators":
            return [table(headers, rows)]
        shown = table(headers, rows, operator_caption())
        shown["classes"].append("kb-operators")
        return [shown]


# -- what a chapter prints ------------------------------------------------------------------------

PRINTED = (r"\[0\.0, 2\.0, [^\]]*\]", r"\w+: all \d+ checks passed [^<]*")
"""Lines of the first chapter that show a reader, who has just run it, that it works."""


class Printed(SphinxDirective):
    """A few lines of what the first chapter printed when the book was built."""

    def run(self):
        self.env.note_reread()
        path = Path(self.env.srcdir, "chapters", f"{next(iter(CHAPTERS))}.rst")
        text = unescape(path.read_text(encoding="utf-8")) if path.exists() else ""
        found = [match[0] for line in PRINTED if (match := re.search(line, text))]
        lines = "\n...\n".join(fill(line, 80, subsequent_indent="    ") for line in found)
        block = nodes.literal_block(lines, lines, language="none", classes=["no-copy"])
        return [block] if found else []


# -- the API reference ----------------------------------------------------------------------------


class Functions(SphinxDirective):
    """Document each public function of a module, with links to the chapters that use it."""

    required_arguments = 1

    def run(self):
        self.env.note_reread()
        module = self.arguments[0]
        lines = [f".. currentmodule:: {module}", ""]
        for name in importlib.import_module(module).__all__:
            if not callable(getattr(importlib.import_module(module), name)):
                continue
            lines += [f".. autofunction:: {name}", ""]
            if users := self.chapters_using(f"{module}.{name}"):
                links = ", ".join(f":doc:`{title} </chapters/{stem}>`" for stem, title in users)
                lines += ["   .. container:: kb-used-in", "", f"      Used in: {links}", ""]
        container = nodes.container(classes=["kb-functions"])
        self.state.nested_parse(StringList(lines, source=module), self.content_offset, container)
        return container.children

    def chapters_using(self, name):
        """(stem, title) of each chapter that uses a function, as Sphinx-Gallery found them."""
        path = Path(self.env.srcdir, "api", "backreferences_all.json")
        uses = json.loads(path.read_text(encoding="utf-8")).get(name, []) if path.exists() else []
        return sorted({(Path(use[0]).stem, use[4]) for use in uses})


# -- source pages: of every module that a chapter shows, not only of those in the reference --------


def show_sources(app, env):
    """Let Sphinx write a source page for each module whose code a chapter may show."""
    import kernelbook

    folder = Path(kernelbook.__file__).parent
    shown = env.__dict__.setdefault("_viewcode_modules", {})
    folders = ("ops/**/*.py", "lab/*.py", "small/*.py")
    for path in sorted(path for within in folders for path in folder.glob(within)):
        name = ".".join(("kernelbook", *path.relative_to(folder).with_suffix("").parts))
        if path.stem != "__init__" and not shown.get(name):
            shown[name] = path.read_text(encoding="utf-8"), {}, {}, name


def flatten_source_index(app, pagename, templatename, context, doctree):
    """Sphinx nests a list of modules directly in a list, which HTML does not allow."""
    if pagename == "_modules/index":
        heading, _, modules = context["body"].partition("<ul>")
        context["body"] = f"{heading}<ul>{re.sub('</?ul>', '', modules)}</ul>"


def setup(app):
    app.connect("env-updated", show_sources)
    app.connect("html-page-context", flatten_source_index)
    app.add_role("count", Count())
    app.add_directive("chapters", Chapters)
    app.add_directive("bars", Bars)
    app.add_directive("recorded", Recorded)
    app.add_directive("printed", Printed)
    app.add_directive("functions", Functions)
    app.connect("env-updated", warn_if_stale)
    return {"parallel_read_safe": False, "parallel_write_safe": True}
