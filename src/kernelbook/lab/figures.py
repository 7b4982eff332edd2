"""Figures: one look for the whole book, in light and in dark."""

import io
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from textwrap import fill

import matplotlib.pyplot as plt
import pandas
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from kernelbook.lab import results
from kernelbook.lab.bench import Sweep
from kernelbook.lab.chapter import Table, running
from kernelbook.lab.display import NOT_RECORDED, Shown, beside, table, typeset

# Each colour is given as it is drawn on white and as it is drawn on the dark page.
TEXT, MUTED, GRID = "#1f2328", "#59636e", "#d1d9e0"
_INK = {TEXT: "#e6edf3", MUTED: "#a3aeba", GRID: "#3d444d"}
_OURS = "#0b63ce"
_PROVIDERS = {
    "copy": ("#6e7781", "#9aa5b1"),
    "matmul": ("#6e7781", "#9aa5b1"),
    "ideal": ("#6e7781", "#9aa5b1"),
    "Kernel Book": (_OURS, "#6cb6ff"),
    "all in FP8": (_OURS, "#6cb6ff"),  # ours, where "Kernel Book" has 16 bits
    "PyTorch": ("#bc4c00", "#ffa05c"),
    "torch.compile": ("#8a6100", "#e3b341"),
    "Liger": ("#1a7f37", "#5ad17b"),
    "quack": ("#8250df", "#c9a2ff"),
    "SDPA flash": ("#0e7490", "#56d4e8"),
    "SDPA cuDNN": ("#bf3989", "#ff8bcf"),
    "FlexAttention": ("#7d4e24", "#d9ab7c"),
    "FlashAttention": ("#a40e26", "#ff8a8a"),
    "FlashAttention, deterministic": ("#cf5a5a", "#ffbdb5"),
}
_STEPS = [  # what a chapter makes on the way to its best: each keeps one of these
    ("#5b8fc9", "#5f97d6"),
    ("#3f8a99", "#58b0c0"),
    ("#7a78c4", "#a3a0ee"),
    ("#9a5fb5", "#cf9ae8"),
    ("#b0617d", "#e6a1bb"),
]
_FILLS = {"#eaf2fb": "#14283d", "#f6f8fa": "#1c2129", "#fff4e5": "#3a2a12", "#ffffff": "#161b22"}
_DARK = _INK | dict(_PROVIDERS.values()) | dict(_STEPS) | _FILLS
_MARKERS = "osD^vPX*hp"
_FONTS = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Liberation Sans', Arial, sans-serif"
_MADE = "made"  # the group of an SVG that says with what its numbers were made
_ON_A_PHONE = (
    f'<style type="text/css">@media (max-width: 420px) {{ #{_MADE} text {{ '
    "font-size: 10px !important } }</style>"
)
_STYLE = {
    "axes.axisbelow": True,
    "axes.edgecolor": GRID,
    "axes.grid": True,
    "axes.labelcolor": MUTED,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.figsize": (5.4, 3.6),
    "font.family": "sans-serif",
    "font.size": 11,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "text.color": TEXT,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": TEXT,
    "ytick.labelcolor": TEXT,
}


def colour(provider: str) -> str:
    """Return the colour of a provider: a library's is the same throughout the book, a step's is
    the same throughout its chapter."""
    if provider in _PROVIDERS:
        return _PROVIDERS[provider][0]
    steps = running().steps
    if provider not in steps:
        steps.append(provider)
    return _STEPS[steps.index(provider) % len(_STEPS)][0]


def to_svg(figure: Figure) -> str:
    """Return a figure as SVG whose text is text, in the reader's own font.

    The small print is larger where the whole figure is small.
    """
    buffer = io.StringIO()
    with plt.rc_context(_STYLE | {"svg.hashsalt": "kernelbook"}):
        figure.savefig(
            buffer,
            format="svg",
            transparent=True,
            bbox_inches="tight",
            pad_inches=0.02,  # on a phone every pixel of a figure's width is one of its labels'
            metadata={"Date": None},
        )
    svg = re.sub(r"'DejaVu Sans'[^;\"]*sans-serif", _FONTS, buffer.getvalue())
    return typeset(svg.replace("<defs>", f"<defs>\n  {_ON_A_PHONE}", 1))


def to_dark(svg: str) -> str:
    """Return the dark form of an SVG that is drawn in this module's light colours."""
    light = re.compile("|".join(_DARK), re.IGNORECASE)
    return light.sub(lambda match: _DARK[match[0].lower()], svg)


def draw(measured: Sweep | Table, title: str, alt: Callable, how: Callable) -> Shown | None:
    """Draw by hand what was measured, on every GPU whose figure is shown: see :func:`plot`.

    ``how(axes, rows)`` draws the rows of the table; ``alt(rows)`` describes the figure to those who
    do not see it.
    """

    def one(measured: Sweep | Table) -> Figure:
        with _canvas() as axes:
            how(axes, measured.rows)
        return _finish(axes.figure, measured, title, alt(measured.rows))

    if not measured.rows:
        return table([], f"{title}. {getattr(measured, 'why_not', NOT_RECORDED)}")
    return _draw(one, measured, [other for other in beside(measured.elsewhere) if other.rows])


def sketch(title: str, alt: str, how: Callable, panels: int = 1, height: float = 3.6) -> None:
    """Draw by hand what the page computes, which is the same on every GPU: see :func:`draw`.

    ``how(*axes)`` draws in panels that stand side by side; ``alt`` describes the figure.
    """
    with plt.rc_context(_STYLE):
        figure, axes = plt.subplots(
            1, panels, squeeze=False, layout="constrained", figsize=(5.4, height)
        )
        how(*axes[0])
        figure.suptitle(title, x=0.01, ha="left", fontsize=12.5, fontweight="bold")
    figure.set_label(f"{title}. {alt}")


def percent_of(sweep: Sweep) -> str:
    """Return what an axis says that has percentages of a sweep's limit."""
    if sweep.limit == "ideal":  # which is a speed itself
        return "% of linear scaling"
    return f"% of the speed of a {sweep.limit}"


def plot(
    sweep: Sweep,
    title: str,
    *,
    share: bool = False,
    log: bool = True,
    where: dict | None = None,
    names: dict[str, str] | None = None,
) -> Shown | None:
    """Draw one line a provider over the sweep's axis, at the points that ``where`` names.

    The height is the rate in the sweep's unit or, with ``share``, the percentage of the limit.
    ``names`` says what a line is called, where that is not the provider's recorded name. Bands
    reach from the 20th to the 80th percentile. The open figure's label is its alt text. What
    was never recorded is said, and not drawn. In a page the figures of other GPUs follow, behind a
    switch; in a notebook that of the book's primary.
    """
    where, names = where or {}, names or {}

    def one(sweep: Sweep) -> Figure:
        rows = sweep.at(**where)
        column, unit = ("share", percent_of(sweep)) if share else ("rate", sweep.unit)
        factor = 100 if share else 1
        last = rows[rows[sweep.axis] == rows[sweep.axis].max()]
        found = [
            f"{names.get(r.provider, r.provider)} {factor * getattr(r, column):,.0f}"
            for r in last.itertuples()
        ]
        places = sorted(set(rows[sweep.axis]))
        axis = {"seqlen": "tokens"}.get(sweep.axis, sweep.axis)
        at = f"at {places[-1]:,} {axis}"
        with _canvas() as axes:
            for number, (provider, line) in enumerate(rows.groupby("provider", sort=False)):
                x, y = line[sweep.axis], factor * line[column]
                look = {"color": colour(provider), "marker": _MARKERS[number % len(_MARKERS)]}
                style = {"linestyle": "--", "marker": ""} if provider == sweep.limit else {}
                bold = {"linewidth": 2.6} if provider == "Kernel Book" else {"linewidth": 1.5}
                label = names.get(provider, provider)
                axes.plot(x, y, label=label, markersize=4.5, **bold, **(look | style))
                band = (y * line["ms"] / line["p80"], y * line["ms"] / line["p20"])
                axes.fill_between(x, *band, color=colour(provider), alpha=0.15, linewidth=0)
            if log:
                axes.set_xscale("log", base=2)
                axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: in_words(value)))
                if len(places) <= 5 and places[-1] <= 2**16:  # there is room for whole numbers
                    axes.set_xticks(places, [f"{place:,}" for place in places])
            # room for the highest mark, also where all lines lie close together
            axes.set_ylim(0, max(axes.get_ylim()[1], 1.04 * axes.dataLim.y1))
            axes.set(xlabel=axis, ylabel=unit)
            _name_lines(axes)
        alt = f"Lines over {axis}, {unit}; {at}: {', '.join(found)}."
        return _finish(axes.figure, sweep, title, alt)

    if sweep.at(**where).empty:
        return table([], f"{title}. {NOT_RECORDED}")
    return _draw(one, sweep, [s for s in beside(sweep.elsewhere) if not s.at(**where).empty])


def ladder(
    sweep: Sweep,
    title: str,
    rungs: list[str],
    *,
    by: str,
    where: dict,
    names: dict[str, str] | None = None,
    lit: str = "Kernel Book",
) -> Shown | None:
    """Draw a bar a rung, as a percentage of the limit, in one group for each value of ``by``.

    The first rung is at the top, and ``lit`` has the book's colour. The dashed line is the limit.
    ``names`` and other GPUs: see :func:`plot`.
    """
    names = names or {}

    of_limit = percent_of(sweep)

    def rows_of(sweep: Sweep) -> pandas.DataFrame:
        rows = sweep.at(**where)
        return rows[rows["provider"].isin(rungs)]

    def one(sweep: Sweep) -> Figure:
        rows = rows_of(sweep)
        groups = list(rows[by].unique())
        with plt.rc_context(_STYLE):
            height = 1.1 + 0.34 * len(rungs) * len(groups)
            figure, panels = plt.subplots(
                len(groups), sharex=True, squeeze=False, layout="constrained", figsize=(5.4, height)
            )
            for axes, group in zip(panels[:, 0], groups, strict=True):
                present = set(rows[rows[by] == group]["provider"])
                for place, rung in enumerate(rungs):
                    if rung not in present:
                        axes.text(1, place, "absent", va="center", fontsize=10, color=MUTED)
                        continue
                    value = 100 * sweep.share(rung, **{**where, by: group})
                    ink = colour("Kernel Book" if rung == lit else sweep.limit)
                    axes.barh(place, value, color=ink, height=0.72)
                    bold = {"fontweight": "bold", "color": ink} if rung == lit else {}
                    axes.annotate(  # in a column, beyond the limit's line and the longest bar
                        f"{value:.0f}", (1, place), xycoords=("axes fraction", "data"), ha="right",
                        va="center", fontsize=10, **bold,
                    )  # fmt: skip
                axes.axvline(100, color=MUTED, linestyle="--", linewidth=1)
                axes.set_yticks(range(len(rungs)), [names.get(rung, rung) for rung in rungs])
                axes.invert_yaxis()
                axes.tick_params(axis="y", length=0)
                axes.grid(axis="y", visible=False)
                axes.set_title(_group(by, group), loc="left", fontsize=11, color=MUTED)
            panels[-1, 0].set_xlabel(of_limit)
            longest = max(bar.get_width() for axes in panels[:, 0] for bar in axes.patches)
            axes.set_xlim(0, 1.14 * max(100, longest))
        found = [
            f"{names.get(r.provider, r.provider)} in {_group(by, r[by])} {100 * r.share:.0f}"
            for _, r in rows.iterrows()
        ]
        alt = f"Bars, {of_limit}: {', '.join(found)}."
        return _finish(figure, sweep, title, alt)

    if rows_of(sweep).empty:
        return table([], f"{title}. {NOT_RECORDED}")
    return _draw(one, sweep, [s for s in beside(sweep.elsewhere) if not rows_of(s).empty])


def _group(by: str, value: object) -> str:
    """Return what a group of bars is called: a name as it stands, a number by what it counts."""
    return value if isinstance(value, str) else f"{by} = {value:,}"


def _draw(one: Callable, own: Sweep | Table, others: list) -> None:
    """Draw the own figure and those of other GPUs, which the page's switch tells apart."""
    figures = [one(measured) for measured in (own, *others)]
    if others:
        for figure, measured in zip(figures, (own, *others), strict=True):
            figure.gpu = measured.provenance["gpu"]
            if measured is not own:  # and the text reads the own
                figure.variant, figure.read = measured.provenance["slug"], own.provenance["gpu"]


@contextmanager
def _canvas() -> Iterator[Axes]:
    """Open axes in the book's look, and give them a legend in the end."""
    with plt.rc_context(_STYLE):
        figure, axes = plt.subplots(layout="constrained")
        axes.grid(axis="x", visible=False)
        yield axes
        _, labels = axes.get_legend_handles_labels()
        if labels:
            place = {"loc": "lower left", "bbox_to_anchor": (-0.02, 1.0), "borderaxespad": 0.2}
            columns = 3 if max(map(len, labels)) <= 16 else 2  # or it is wider than the axes
            axes.legend(**place, ncols=columns, fontsize=10, columnspacing=1.2)


def _name_lines(axes: Axes) -> None:
    """Write each line's name at its right end, in its colour; names that would meet move apart."""
    lines = axes.get_lines()
    axes.figure.canvas.draw()  # or the axes have no size yet
    height = 1.4 * 10 / 72 * axes.figure.dpi / axes.bbox.height  # of a name, in axes' heights
    low, high = axes.get_ylim()
    lines = sorted(lines, key=lambda line: line.get_ydata()[-1])
    wanted = [(line.get_ydata()[-1] - low) / (high - low) for line in lines]
    for place, line in zip(_apart(wanted, height), lines, strict=True):
        name = line.get_label()
        axes.annotate(
            name,
            (1.02, place),
            xycoords="axes fraction",
            color=MUTED if line.get_linestyle() == "--" else line.get_color(),
            fontsize=10,
            fontweight="bold" if name == "Kernel Book" else "normal",
            va="center",
        )
        line.set_label("_named")  # and so it has no place in a legend


def _apart(wanted: list[float], distance: float) -> list[float]:
    """Return places as near as can be to the wanted ones, in their order, each so far from the
    next: neighbours that would meet are centred, as a block, on the mean of what they want."""
    blocks: list[list[float]] = []
    for place in wanted:
        blocks.append([place])
        while len(blocks) > 1 and _bottom(blocks[-1], distance) < (
            _bottom(blocks[-2], distance) + len(blocks[-2]) * distance
        ):
            blocks[-2:] = [blocks[-2] + blocks[-1]]
    return [
        _bottom(block, distance) + number * distance
        for block in blocks
        for number in range(len(block))
    ]


def _bottom(block: list[float], distance: float) -> float:
    return sum(block) / len(block) - distance * (len(block) - 1) / 2


def _finish(figure: Figure, measured: Sweep | Table, title: str, alt: str) -> Figure:
    """Add the title, where the numbers come from and the alt text."""
    source = measured.provenance
    state = "recorded" if measured.replayed else "measured"
    skipped = getattr(measured, "skipped", {})
    remarks = [
        f"{words}: {', '.join(named)}"
        for words, named in (
            ("absent", [_why_absent(*absent) for absent in skipped.items()]),
            ("the host's time included", getattr(measured, "host_included", ())),
        )
        if named
    ]
    if measured.mark:
        remarks = [measured.mark, *remarks]
    with plt.rc_context(_STYLE):
        figure.suptitle(title, x=0.01, ha="left", fontsize=12.5, fontweight="bold")
        figure.text(
            0.01,
            -0.02,
            f"{source['gpu']}, driver {source['driver']}, torch {source['torch']},\n"
            f"triton {source['triton']}, commit {results.short_commit(source['commit'])}, "
            f"{state} {source['date'][:10]}"
            + "".join(f"\n{fill(remark, 70)}" for remark in remarks),  # or the figure would shrink
            fontsize=9,
            gid=_MADE,
            color=colour("PyTorch") if measured.mark else MUTED,
            va="top",
        )
    figure.set_label(f"{title}. {alt} {source['gpu']}, {state}. {measured.mark}".strip())
    figure.results = f"_results/{source['slug']}/{running().name}.json"  # the page links it
    return figure


def _why_absent(provider: str, reason: str) -> str:
    """Return why a provider is absent; a library's own message stays in the raw data."""
    refuses = " refuses some inputs"
    return f"{provider}, which{refuses}" if f"{refuses}: " in reason else reason


def in_words(count: float) -> str:
    """Return a power of two as people write it: 16Ki, 4Mi; other numbers with separators."""
    for size, letter in ((2**30, "Gi"), (2**20, "Mi"), (2**10, "Ki")):
        if count >= size and count % size == 0:
            return f"{count / size:,.0f}{letter}"
    return f"{count:,.0f}"
