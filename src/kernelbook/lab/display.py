"""What a chapter shows, in a page, in a notebook and in a terminal."""

import builtins
import inspect
import math
import re
import sys
from html import escape

import pandas
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

from kernelbook.lab import results

NOT_RECORDED = "Not recorded yet: this needs a GPU."

absences: list[str] = []
"""Why numbers of the running chapter are missing, as far as it has asked for them."""


def in_site() -> bool:
    """Tell whether the site is being built."""
    return "sphinx_gallery" in sys.modules


def in_notebook() -> bool:
    """Tell whether this is a notebook, or another IPython."""
    return hasattr(builtins, "__IPYTHON__")


_UNITS = r"%|×|(?:[mµn]?s|min|h|[kKMGT]?i?B|bytes?|bits?|[kMGTP]?FLOPs?|[kMG]?Hz|W)\b"
_AS_TYPED = ("code", "pre", "script", "style")


def typeset(html: str) -> str:
    """Return HTML with the apostrophes and quotation marks of print, and numbers that keep their
    units beside them; code, and an argument such as ``backend='triton'``, stays as it is typed."""
    parts, depth = re.split(r"(<[^>]*>)", html), 0
    for place, part in enumerate(parts):
        if place % 2:  # a tag, a comment or a declaration
            tag = re.match(r"<(/?)(\w+)", part)
            if tag and tag[2] in _AS_TYPED:
                depth += -1 if tag[1] else 1
        elif not depth:
            parts[place] = _typeset(part)
    return "".join(parts)


def _typeset(text: str) -> str:
    text = text.replace("&#x27;", "'").replace("&quot;", '"')
    if not re.search(r"""[=([]['"]""", text):
        text = re.sub(r"(?<=\w)'(?=\w)|(?<=s)'(?=[\s.,;:)]|$)", "’", text)
        text = re.sub(r'"([^"]*)"', r"“\1”", text)
    return re.sub(rf"(?<=\d) (?={_UNITS})", "\N{NO-BREAK SPACE}", text)


class Shown:
    """Something with a rich form for pages and notebooks and a plain one for terminals."""

    def __init__(self, html: str, plain: str):
        self.html = html
        self.plain = plain

    def _repr_html_(self) -> str:
        return typeset(self.html)

    def __repr__(self) -> str:
        return self.plain


class Markdown(Shown):
    """Something that a notebook shows best from Markdown, in its own theme."""

    def __init__(self, html: str, plain: str, markdown: str):
        super().__init__(html, plain)
        self.markdown = markdown

    def _ipython_display_(self) -> None:
        from IPython.display import display

        display({"text/markdown": self.markdown, "text/plain": self.plain}, raw=True)


def show(shown: Shown) -> Shown:
    """Return what is shown; print it first where a script has no other way to show it."""
    if not in_notebook() and not in_site():
        print(shown.plain, end="\n\n")
    return shown


def beside(elsewhere: list) -> list:
    """Return which results of other GPUs are shown beside the own.

    A page shows all, behind a switch; a notebook the primary's; a script none.
    """
    if in_site():
        return elsewhere
    of_primary = [one for one in elsewhere if results.of_primary(one.provenance["slug"])]
    return of_primary[:1] if in_notebook() else []


def of_gpu(gpu: str, html: str, read: str | None = None) -> str:
    """Wrap what one GPU measured: of such neighbours, the page's switch shows one.

    ``read`` is the GPU whose numbers the text reads, where that is another one: a line says so.
    """
    said = f'<p class="kb-read-gpu">The text speaks of {escape(read)}.</p>' if read else ""
    return f'<div class="kb-gpu" data-gpu="{escape(gpu)}">{said}{html}</div>'


def note(text: str, *, stale: bool = False, link: tuple[str, str] | None = None) -> Shown:
    """Return one line about where this ran.

    ``link`` is (text, address within the site): an anchor in a page, and its text elsewhere.
    """
    classes = "kb-run kb-stale" if stale else "kb-run"
    html = escape(text)
    if link:
        name = escape(link[0])
        html += f' <a href="../{link[1]}">{name}</a>' if in_site() else f" {name}"
        text += f" {link[0]}"
    return show(Shown(f'<div class="{classes}">{html}</div>', text))


def table(rows: list[dict], caption: str) -> Shown:
    """Return a table with one column for each key of its rows; booleans become verdicts."""
    return show(Shown(*shortened(rows, caption)))


LONG = 12
"""Rows of a table that a page shows before the others fold."""


def shortened(rows: list[dict], caption: str) -> tuple[str, str]:
    """Return a table as HTML, of which a page shows the first rows, and as plain text, whole."""
    html, plain = tabulated(rows, caption)
    if len(rows) <= LONG:
        return html, plain
    first, _ = tabulated(rows[:LONG], caption)
    others, _ = tabulated(rows[LONG:], f"{caption} (continued)")
    fold = f"<summary>{len(rows) - LONG} more rows</summary>{others}"
    return f'{first}<details class="kb-code">{fold}</details>', plain


def tabulated(rows: list[dict], caption: str) -> tuple[str, str]:
    """Return a table as HTML and as plain text."""
    columns = list(rows[0]) if rows else []
    numbers = {name for name in columns if all(_is_number(row.get(name, "—")) for row in rows)}
    head = "".join(
        f'<th scope="col"{_kind(column in numbers)}>{escape(column)}</th>' for column in columns
    )
    body = "".join(
        "<tr>"
        + "".join(_cell(row.get(column, ""), column in numbers) for column in columns)
        + "</tr>"
        for row in rows
    )
    html = (
        f'<div class="kb-table" role="region" tabindex="0" aria-label="{escape(caption)}">'
        f"<table><caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead>"
        f"<tbody>{body}</tbody></table></div>"
    )
    plain = pandas.DataFrame([{name: _verdict(x) for name, x in row.items()} for row in rows])
    return html, f"{caption}\n{plain.to_string(index=False)}"


def _verdict(value):
    """Return what a terminal shows of a cell: 1.0 is a number, and only True a verdict."""
    return {True: "pass", False: "FAIL"}[value] if isinstance(value, bool) else value


def _cell(value, number: bool) -> str:
    if isinstance(value, bool):
        return '<td class="kb-ok">pass</td>' if value else '<td class="kb-bad">FAIL</td>'
    if isinstance(value, int | float) and math.isfinite(value):
        precision = ",.0f" if value == int(value) or abs(value) >= 1000 else ",.3g"
        return f"<td{_kind(number)}>{value:{precision}}</td>"
    text = str(value)
    if number:
        return f"<td{_kind(number)}>{escape(text)}</td>"
    word = "" if " " in text or len(text) > 12 else ' class="kb-word"'  # 1e-07 breaks at no hyphen
    return f"<td{word}>{escape(text)}</td>"


NUMBER = re.compile(r"[-+\N{MINUS SIGN}]?\d[\d,]*(\.\d+)?(e[-+]?\d+)?(\s?%)?|—|-|")
"""A number that was formatted already, or a word for none."""


def _is_number(value) -> bool:
    """Whether a cell may stand in a column of numbers, which end at the right."""
    if isinstance(value, bool):
        return False
    return isinstance(value, int | float) or NUMBER.fullmatch(str(value)) is not None


def _kind(number: bool) -> str:
    """Return the class of a cell in a column of numbers."""
    return ' class="kb-number"' if number else ""


def read(text: str) -> Markdown:
    """Return a paragraph of prose whose numbers were computed; ``code`` and **bold** work.

    A number that was never recorded is NaN; the paragraph then says so instead. A NaN where
    nothing is missing is a mistake: :class:`ValueError`.
    """
    text = " ".join(text.split())
    if re.search(r"\bnan\b", text):
        if not absences:
            raise ValueError(f"a number is NaN, although every number was recorded: {text!r}")
        text = f"A paragraph that reads the figure. {absences[-1]}"
    html = re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))
    html = re.sub(r"\*\*([^*]+)\*\*", r"<strong>\1</strong>", html)
    return show(Markdown(f'<div class="kb-read"><p>{html}</p></div>', text, text))


def source(thing, *pieces: str) -> Markdown:
    """Return the source of a function or kernel, or the pieces of it under some headings.

    A heading is a comment ``# -- name: what happens``; its piece ends at the next heading. The
    piece "def" is what stands before the first heading: the parameters.
    """
    return show(_sourced(thing, *pieces))


def together(*shown: Shown | None) -> Shown:
    """Return several results as one, because a page shows the last value of a cell alone."""
    parts = [one for one in shown if one is not None]
    return Shown("".join(one.html for one in parts), "\n\n".join(one.plain for one in parts))


def listing(parts: dict[str, object]) -> Markdown:
    """Return the sources of several functions and kernels, each below what it is for."""
    found = [(f"{what}.", _sourced(thing)) for what, thing in parts.items()]
    return show(
        Markdown(
            "".join(f"<p>{escape(what)}</p>{shown.html}" for what, shown in found),
            "\n\n".join(f"{what}\n{shown.plain}" for what, shown in found),
            "\n\n".join(f"{what}\n\n{shown.markdown}" for what, shown in found),
        )
    )


FOR_TOOLS = re.compile(r"# (fmt: skip|noqa)")
"""How a comment begins that no listing of a page shows."""


def for_readers(code: str) -> str:
    """Return code without the comments that only a formatter or linter reads."""
    return re.sub(f"  {FOR_TOOLS.pattern}.*", "", code)


def _sourced(thing, *pieces: str) -> Markdown:
    function = getattr(thing, "fn", thing)  # a kernel keeps its Python function there
    lines, first = inspect.getsourcelines(function)
    heads = [i for i, line in enumerate(lines) if line.strip().startswith("# -- ")]
    shown = []
    for piece in pieces:
        opens = "def " if piece == "def" else f"# -- {piece}:"
        starts = [i for i, line in enumerate(lines) if line.strip().startswith(opens)]
        if len(starts) != 1:
            raise ValueError(f"{function.__name__} has {len(starts)} pieces named {piece!r}.")
        end = min((i for i in heads if i > starts[0]), default=len(lines))
        shown += range(starts[0], end)
    if pieces:
        lines, first = [lines[i] for i in shown], first + shown[0]
    code = for_readers(inspect.cleandoc("\n" + "".join(lines)))
    name = inspect.getmodule(function).__name__.replace(".", "/")
    html = highlight(code, PythonLexer(), HtmlFormatter(wrapcode=True))
    if not name.startswith("kernelbook/"):  # it is the chapter's own
        return Markdown(f'<div class="kb-source">{html}</div>', code, f"```python\n{code}\n```")
    where = f"src/{name}.py, line {first}"
    caption = f'<a href="../_modules/{name}.html">{where}</a>' if in_site() else where
    return Markdown(
        f'<div class="kb-source"><div class="kb-caption">{caption}</div>{html}</div>',
        f"{where}\n{code}",
        f"{where}\n\n```python\n{code}\n```",
    )
