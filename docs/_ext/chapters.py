"""Chapters: the facts of each, what Sphinx-Gallery is told, and how its pages become the book's.

Sphinx-Gallery runs each script of ``gallery/`` and writes one page of reStructuredText. This
module saves the figures it shows, and then works on the document tree of the page: every SVG gets
a dark twin, solutions and bookkeeping are folded, and the downloads stand at the top and the end.
"""

import re
import sys
from html import escape
from pathlib import Path
from typing import NamedTuple

from bs4 import BeautifulSoup
from docutils import nodes
from sphinx import addnodes
from sphinx.errors import ExtensionError
from sphinx.util import logging
from sphinx.util.docutils import SphinxRole

logger = logging.getLogger(__name__)
GENERATED = "GENERATED FROM PYTHON SOURCE LINES"
FOLDED = {
    "# Reading": "Code for this paragraph",
    "# Drawing": "Code for this figure",
    "# Closing": "Code for the record",
    "# Measuring": "How this was measured",
    "# Whole": "The kernel whole",
}
"""What a cell folds under that begins so; "# Whole: name" says which kernel is whole."""

ONLY_OUTPUT = "# Folded: "
"""A cell that begins so, and a label, folds what it shows, and shows no code of its own."""

KEPT = ("# Reading", "# Closing", "# Whole", ONLY_OUTPUT)
"""What a cell begins with that keeps a fold of its own."""

BOOKKEEPING = {
    r"\blab\.start\(": "What this page imports",
    r"\blab\.check\(": "How this was checked",
    r"\blab\.(bench|measure|facts|host_times)\(": "How this was measured",
    r"\blab\.(plot|ladder)\(": "How this was drawn",
    r"\blab\.table\(": "How this table was made",
}
"""What any other cell folds under that does this and holds no kernel."""

PLAIN = (["n"], ["p"], ["w"])
"""Pygments' classes of the tokens that have no colour of their own in the book's two styles."""

BOOKS = {*FOLDED.values(), *BOOKKEEPING.values()} - {FOLDED["# Whole"], "What this page imports"}
"""The folds of how results were made, which a page shows when its reader asks for them."""

MISTAKES = "What breaks it"
"""The section whose code is what it is about."""
PACE = {"words": 130, "lines of code": 15, "lines of mathematics": 2, "figures": 2}
"""How much of each is read in a minute, by readers who follow every step: with it the chapters take
as long as two such readings of them took. Non-fiction is read at 238 words a minute (Brysbaert,
2019), and what one learns by heart at 138 (Carver, 1992); a line of code counts as nine words."""


PROSE = (nodes.paragraph, nodes.title, nodes.caption)
"""The nodes whose words are counted; those of tables hold paragraphs."""


class Facts(NamedTuple):
    """What a chapter's card and the line under its title say.

    ``needs`` are the chapters to read before. ``bars`` are the card's picture: a label for each
    provider of the recorded ``sweep`` at the point that ``where`` names. With ``column`` they are
    times: of each row of the recorded table ``sweep``, its microseconds in this column.
    """

    question: str
    difficulty: str
    needs: tuple[str, ...]
    sweep: str
    where: dict
    bars: dict[str, str]
    column: str = ""


CHAPTERS = {
    "first_kernel": Facts(
        "How do you write a GPU kernel that reads each number once, and another for its gradient?",
        "introductory",
        (),
        "forward",
        {"rows": 65536},
        {
            "PyTorch": "two PyTorch operations",
            "x @ w": "PyTorch, x @ w",
            "one row a program": "your first kernel",
        },
    ),
    "measuring": Facts(
        "Time one kernel in the five usual ways and you get five times: which of them measures the "
        "kernel, and what makes the same kernel several times as slow?",
        "introductory",
        ("first_kernel",),
        "One call, timed in five ways",
        {"rows": 64, "columns": 1024},
        {
            "clock": "clock around the call",
            "clock and wait": "clock, and wait for the GPU",
            "events": "two events on the GPU",
            "events after a pause": "events after a pause",
            "events, pause and flush": "events, pause, flushed cache",
        },
        "small, µs",
    ),
    "dropout": Facts(
        "Can the backward pass of dropout zero the same elements again without a stored mask?",
        "introductory",
        ("first_kernel",),
        "forward",
        {"dtype": "float16"},
        {
            "simple_dropout": "four PyTorch operations",
            "PyTorch": "PyTorch's dropout",
            "stored mask": "kernel with a stored mask",
            "Kernel Book": "kernel with a seed",
        },
    ),
    "softmax": Facts(
        "Softmax needs the maximum and the sum of a row before it can write anything: must it read "
        "the row three times?",
        "intermediate",
        ("measuring",),
        "ladder",
        {"columns": 65536},
        {
            "simple_softmax": "five PyTorch operations",
            "three_pass": "one kernel, three reads",
            "online": "one kernel, two reads",
            "Kernel Book": "one kernel, one read",
        },
    ),
    "layer_norm": Facts(
        "Layer norm needs a row's mean for its variance, and both for its output: how can a kernel "
        "read the row once and still get the variance right to the last digits?",
        "intermediate",
        ("softmax",),
        "ladder",
        {"columns": 32768},
        {
            "simple_layer_norm": "seven PyTorch operations",
            "PyTorch": "PyTorch's layer_norm",
            "loop": "loop: three reads",
            "one program": "whole row: one read",
            "Kernel Book": "packed row: one read",
        },
    ),
    "layer_norm_backward": Facts(
        "How do hundreds of programs add to the gradient of one weight without a race, and "
        "without waiting for each other?",
        "intermediate",
        ("layer_norm",),
        "race",
        {"columns": 1024},
        {
            "simple_backward": "PyTorch's operations",
            "lock per tile": "64 locks, every tile",
            "partial sums per tile": "partial sums, every tile",
            "lock per program": "64 locks, once",
            "partial sums": "partial sums, once",
        },
    ),
    "attention_forward": Facts(
        "Attention compares every query with every key: must the table of scores ever exist in "
        "memory?",
        "advanced",
        ("softmax",),
        "ladder",
        {"mask": "causal"},
        {
            "PyTorch": "standard attention in PyTorch",
            "first kernel": "first kernel",
            "in stages": "kernel in stages",
        },
    ),
    "attention_fast": Facts(
        "Which changes bring attention closer to the speed of a matmul, and what is each of them "
        "worth?",
        "advanced",
        ("attention_forward",),
        "ladder",
        {"mask": "causal"},
        {
            "in stages": "before the six changes",
            "two-step maximum": "after four changes",
            "heavy first": "after all six",
        },
    ),
    "attention_backward": Facts(
        "How do you compute the gradient through a matrix of weights that was never stored?",
        "advanced",
        ("attention_fast",),
        "ladder",
        {"mask": "causal"},
        {
            "standard attention": "formula in PyTorch, with the matrix",
            "torch.compile": "the formula, compiled",
            "all tiles": "two sweeps, all tiles",
            "Kernel Book": "two sweeps, causal tiles",
        },
    ),
    "attention_in_models": Facts(
        "A window, a batch of texts of all lengths, a single query: what does attention cost if a "
        "kernel computes only what they need?",
        "advanced",
        ("attention_fast",),
        "decoding",
        {"seqlen_k": 131072},
        {
            "one part": "one program per head",
            "SDPA cuDNN": "PyTorch, cuDNN",
            "Kernel Book": "keys split over programs",
        },
    ),
    "attention_fp8": Facts(
        "What does attention gain in eight bits, what does it lose, and how does a kernel keep the "
        "loss small?",
        "advanced",
        ("attention_fast",),
        "fp8",
        {"mask": "full", "head_dim": 128, "seqlen": 16384},
        {
            "Kernel Book bf16": "16 bits, for Hopper",
            "V in FP8": "V alone in 8 bits",
            "all in FP8": "Q, K and V in 8 bits",
        },
    ),
    "warps_with_roles": Facts(
        "What does a kernel gain if some warps only load and the others only multiply, and what "
        "can go wrong between them?",
        "advanced",
        ("attention_fast",),
        "ladder",
        {"n": 8192},
        {
            "one buffer": "load, wait, multiply",
            "ring": "loads ahead, no roles",
            "one in flight": "one matmul in flight",
            "roles": "a loader, two consumers",
        },
    ),
    "attention_hopper": Facts(
        "Which loop keeps the matmul units of a Hopper GPU at work, and what is each change to it "
        "worth?",
        "advanced",
        ("attention_fast", "warps_with_roles"),
        "ladder",
        {"mask": "full"},
        {
            "plain Triton": "plain Triton",
            "two roles": "two roles",
            "scores ahead": "scores ahead",
            "Kernel Book": "the package's kernel",
        },
    ),
    "attention_hopper_backward": Facts(
        "What does it take to compute each weight once in the backward pass of attention, and can "
        "the gradients still be the same bits in every run?",
        "advanced",
        ("attention_backward", "attention_hopper"),
        "ladder",
        {"mask": "full"},
        {
            "two sweeps": "two sweeps",
            "one sweep with roles": "one sweep with roles",
            "Kernel Book": "Kernel Book",
        },
    ),
    "attention_across_gpus": Facts(
        "How do several GPUs share one attention, and how much of their speed is left when they "
        "do?",
        "advanced",
        ("attention_backward", "attention_in_models"),
        "ranks",
        {"mask": "causal", "seqlen": 65536},
        {
            "contiguous": "contiguous",
            "zig-zag": "zig-zag",
            "all to all": "all to all",
            "Kernel Book": "zig-zag, transfers hidden",
        },
    ),
    "transformer": Facts(
        "Where does the time of a training step go, where does its memory go, and how much of "
        "either do the book's operators save?",
        "intermediate",
        ("measuring", "attention_backward"),
        "layer",
        {"context": 1024},
        {
            "PyTorch": "the formula, eager",
            "torch.compile": "the formula, compiled",
            "SDPA, compiled": "PyTorch's SDPA, compiled",
            "Kernel Book": "the book's, compiled",
        },
    ),
}
CHAPTERS = {
    stem: facts
    for stem, facts in CHAPTERS.items()
    if Path(__file__).parents[2].joinpath("gallery", f"{stem}.py").is_file()
}
"""The chapters in the order in which they are read, but for drafts.

A draft is a chapter that no GPU has recorded. Its script begins with an underscore, so that neither
the gallery nor a test takes it for a chapter.
"""

ORDER = tuple(CHAPTERS)

PARTS = {
    "first_kernel": "Begin",
    "dropout": "Element by element, row by row",
    "attention_forward": "Attention",
    "warps_with_roles": "Hopper and several GPUs",
    "transformer": "All of it in a model",
}
"""The titles of the parts of the book, by the first chapter of each."""


# -- what Sphinx-Gallery calls while it runs the scripts ------------------------------------------


def reading_order(filename):
    """Sort key: the chapters of ORDER first, any others after them by name."""
    stem = Path(filename).stem
    return (ORDER.index(stem) if stem in ORDER else len(ORDER), stem)


def reset(gallery_conf, filename, when):
    """Start each chapter from the same state: seeds, compiled code, cached GPU memory."""
    torch = sys.modules.get("torch")
    if torch is None:
        return
    torch.manual_seed(0)
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def save_figures(block, block_vars, gallery_conf):
    """Save the open matplotlib figures as SVG; the label of a figure is its alt text."""
    import matplotlib.pyplot as plt

    from kernelbook.lab import display, figures

    rst, own = [], None
    for number in plt.get_fignums():
        figure = plt.figure(number)
        alt = " ".join(figure.get_label().split())
        if not alt:
            raise ExtensionError(
                f"{block_vars['src_file']}, line {block.lineno}: a figure has no alt text; "
                "describe it with figure.set_label(...)"
            )
        if variant := getattr(figure, "variant", ""):  # uncounted: thumbnails go by number
            path = own.with_stem(f"{own.stem}_{variant}")
        else:
            path = own = Path(next(block_vars["image_path_iterator"])).with_suffix(".svg")
        path.write_text(figures.to_svg(figure), encoding="utf-8")
        uri = path.relative_to(gallery_conf["src_dir"]).as_posix()
        shown = f".. image:: /{uri}\n   :alt: {alt}\n   :class: kb-figure\n"
        if address := getattr(figure, "results", None):
            count = int(own.stem.rpartition("_")[2])
            anchor = "-".join(filter(None, ("figure", str(count), variant)))
            links = f'<a href="../{address}">Raw data of this figure</a>'
            links += f' · <a href="#{anchor}">Link to it</a>'
            shown = (
                f'.. raw:: html\n\n   <span id="{anchor}"></span>\n\n{shown}\n'
                f'.. raw:: html\n\n   <p class="kb-raw">{links}</p>\n'
            )
        if gpu := getattr(figure, "gpu", None):
            read = getattr(figure, "read", None)
            opening, closing = display.of_gpu(gpu, "|", read).split("|")
            shown = f".. raw:: html\n\n   {opening}\n\n{shown}\n.. raw:: html\n\n   {closing}\n"
        rst.append(shown)
    plt.close("all")
    return "\n".join(rst)


# -- the path from chapter to chapter --------------------------------------------------------------


def chapters_first(app, env, docnames):
    """Let Sphinx read the chapters before the pages that say how long they take."""
    docnames.sort(key=lambda name: (not is_chapter(name), name))


def note_amount(env, doctree):
    """Keep how much of a chapter is read as it opens, if nothing is folded yet."""
    folded, unseen = set(), set()
    for code, outputs in cells(doctree):
        source = code.astext().strip()
        if source.startswith(("# Solution:", ONLY_OUTPUT)):
            folded.update(part for node in (code, *outputs) for part in node.findall())
        elif fold_label(code):
            folded.add(code)
        if source.startswith((ONLY_OUTPUT, "lab.source(")):
            unseen.add(code)
    for box in doctree.findall(nodes.container):
        if box.get("design_component") == "dropdown" and not box["opened"]:
            folded.update(box.findall())
    parts = [part for part in doctree.findall(nodes.Element) if part not in unseen]
    amount = amount_of([part for part in parts if part not in folded])
    env.metadata[env.docname]["amount"] = amount


def amount_of(parts):
    """How much there is to read in some nodes, by the kinds of PACE; of several GPUs, on one.

    All that a reader meets counts: the words of prose, headings, tables and captions, and the lines
    of every listing, of what it printed, and of sources. The rows of a table that fold do not,
    because nobody reads them all.
    """
    html = "".join(part.astext() for part in parts if isinstance(part, nodes.raw))
    made = BeautifulSoup(html, "html.parser")
    variants = made.select(".kb-gpu")
    for variant in variants:
        if variant["data-gpu"] != variants[0]["data-gpu"]:
            variant.decompose()
    code = [part.get_text() for part in made.select("pre")]
    code += [part.astext() for part in parts if isinstance(part, nodes.literal_block)]
    text = [part.astext() for part in parts if isinstance(part, PROSE)]
    shown = made.select(".kb-read, .kb-caption, .kb-check > p, table:not(details *)")
    text += [part.get_text(" ") for part in shown]
    mathematics = [part.astext() for part in parts if isinstance(part, nodes.math_block)]
    pictures = [part for part in parts if "only-light" in part.get("classes", ())]
    return {
        "words": sum(len(part.split()) for part in text),
        "lines of code": sum(bool(line.strip()) for part in code for line in part.split("\n")),
        "lines of mathematics": sum(1 + part.count(r"\\") for part in mathematics),
        "figures": sum(not re.search(r"_\d{3}_", part["uri"]) for part in pictures),
    }


def minutes(amount):
    """How long a chapter takes, in steps of five minutes."""
    return 5 * max(1, round(sum(amount[kind] / pace for kind, pace in PACE.items()) / 5))


def chapter_link(env, stem):
    """A link to a chapter, which shows its title."""
    return addnodes.pending_xref(
        "",
        nodes.inline(),
        refdomain="std",
        reftype="doc",
        reftarget=f"/chapters/{stem}",
        refexplicit=False,
        refwarn=True,
        refdoc=env.docname,
    )


def reading_time(env, stem):
    """The minutes that a chapter takes as it opens."""
    return minutes(env.metadata[f"chapters/{stem}"]["amount"])


def facts_of(env, stem):
    """Reading time, difficulty and what comes before: a list of text and links."""
    facts = CHAPTERS[stem]
    line = [nodes.Text(f"{reading_time(env, stem)} min · {facts.difficulty} · builds on ")]
    for number, need in enumerate(facts.needs):
        line += [nodes.Text(", ")] * (number > 0) + [chapter_link(env, need)]
    return line if facts.needs else [*line, nodes.Text("PyTorch alone")]


class FactsRole(SphinxRole):
    """The facts of a chapter, in a line."""

    def run(self):
        return facts_of(self.env, self.text), []


def add_path(env, doctree, stem):
    """Say under the title how long a chapter takes, how hard it is, what comes before and after."""
    line = nodes.paragraph("", "", *facts_of(env, stem), classes=["kb-path"])
    if after := ORDER[ORDER.index(stem) + 1 :]:
        line += [nodes.Text(" · next chapter: "), chapter_link(env, after[0])]
    section = next(doctree.findall(nodes.section))
    section.insert(section.first_child_matching_class(nodes.title) + 1, line)


# -- what is done to each page after Sphinx has read it -------------------------------------------


def is_chapter(docname):
    return docname.startswith("chapters/")


def dark_twin(srcdir, uri):
    """Write the dark version of an SVG under docs/_dark and return its address."""
    from kernelbook.lab import figures

    source = Path(srcdir, uri.lstrip("/"))
    twin = Path(srcdir, "_dark", uri.lstrip("/"))
    twin.parent.mkdir(parents=True, exist_ok=True)
    twin.write_text(figures.to_dark(source.read_text(encoding="utf-8")), encoding="utf-8")
    return "/" + twin.relative_to(srcdir).as_posix()


def add_dark_twins(app, doctree):
    """Give every SVG image a twin for the dark theme; the theme shows one of the two."""
    for image in list(doctree.findall(nodes.image)):
        uri = image["uri"]
        if not uri.endswith(".svg") or {"only-light", "only-dark"} & set(image["classes"]):
            continue
        if not uri.startswith("/"):
            uri = "/" + (Path(app.env.docname).parent / uri).as_posix()
        twin = image.deepcopy()
        twin["uri"] = dark_twin(app.srcdir, uri)
        image["classes"].append("only-light")
        twin["classes"].append("only-dark")
        if isinstance(image.parent, nodes.figure):  # the theme hides what follows a hidden image
            image.parent.replace(image, nodes.container("", image.deepcopy(), twin))
        else:
            image.parent.insert(image.parent.index(image) + 1, twin)


def tidy(doctree):
    """Remove Sphinx-Gallery's download note and footer, and the line breaks after output."""
    for node in list(doctree.findall(nodes.Element)):
        if {"sphx-glr-download-link-note", "sphx-glr-footer"} & set(node.get("classes", ())):
            node.parent.remove(node)
    for raw in doctree.findall(nodes.raw):
        html = raw.astext().rstrip().removesuffix("<br />").rstrip().removesuffix("<br />")
        raw.children = [nodes.Text(html)]


def cells(doctree):
    """Yield (code, outputs) for each cell of a chapter, as nodes of the document tree."""
    for comment in list(doctree.findall(nodes.comment)):
        if not comment.astext().startswith(GENERATED):
            continue
        body = []
        siblings = comment.parent.children
        for node in siblings[siblings.index(comment) + 1 :]:
            if isinstance(node, (nodes.comment, nodes.section, nodes.target)):
                break
            body.append(node)
        if body and isinstance(body[0], nodes.literal_block) and body[0]["language"] == "Python":
            yield body[0], body[1:]


def html(text):
    return nodes.raw("", text, format="html")


def in_print(text):
    """Words as HTML with the apostrophes and quotation marks that prose has."""
    from kernelbook.lab.display import typeset

    return typeset(escape(text))


def wrap(first, last, opening, closing):
    """Put HTML before the node `first` and after its later sibling `last`."""
    parent = first.parent
    parent.insert(parent.index(last) + 1, html(closing))
    parent.insert(parent.index(first), html(opening))


def fold_label(code):
    """Under what the code of a cell folds, while its output stays; or None.

    What folds is bookkeeping: it lists cases and providers, measures, draws, writes a paragraph.
    """
    source = code.astext().strip()
    first = source.split("\n", 1)[0]
    if first.startswith(ONLY_OUTPUT):
        return first.removeprefix(ONLY_OUTPUT)
    if label := FOLDED.get(first):
        return label
    if first.startswith("# Whole: "):
        return f"{FOLDED['# Whole']}: {first.removeprefix('# Whole: ')}"
    kernel = re.search(r"@(triton|gluon)\.jit", source)
    if kernel or source.startswith("# Solution:") or within(code, MISTAKES):
        return None
    return next((label for does, label in BOOKKEEPING.items() if re.search(does, source)), None)


def within(node, title):
    """Whether a node stands in a section of this title."""
    while node := node.parent:
        if isinstance(node, nodes.section) and node.next_node(nodes.title).astext() == title:
            return True
    return False


def touch(first, last):
    """Whether a page shows nothing between two nodes, of which the second comes later."""
    siblings = first.parent.children
    return last.parent is first.parent and all(
        isinstance(node, nodes.comment)
        for node in siblings[siblings.index(first) + 1 : siblings.index(last)]
    )


def join_folds(doctree):
    """Join a cell that folds and shows nothing to the next that folds: one result, one fold.

    Where none follows, it joins the one before it that has the same label, because both would stand
    behind the output of that.
    """
    found = list(cells(doctree))
    for place in range(len(found) - 1):
        (code, outputs), (after, shown) = found[place : place + 2]
        source = re.sub(r"^# (Measuring|Drawing)\n", "", after.astext().strip())
        if not fold_label(code) or not fold_label(after) or source.startswith(KEPT):
            continue
        if outputs and (
            shown
            or code.astext().strip().startswith(KEPT)
            or fold_label(code) != fold_label(after)
            or is_within_next(found, place + 1)
        ):
            continue
        if touch(outputs[-1] if outputs else code, after):
            gone, stays = (after, code) if outputs else (code, after)
            stays.rawsource = f"{code.astext().strip()}\n\n\n{source}"
            stays.clear()
            stays += nodes.Text(stays.rawsource)
            gone.parent.remove(gone)
            found[place + 1] = (stays, outputs or shown)


def is_within_next(found, place):
    """Whether a cell that folds and shows nothing stands in the fold of the next cell's output."""
    if place + 1 == len(found):
        return False
    (code, outputs), (after, shown) = found[place : place + 2]
    return bool(
        not outputs
        and shown
        and fold_label(code)
        and not code.astext().strip().startswith(KEPT)
        and after.astext().strip().startswith(ONLY_OUTPUT)
        and touch(code, after)
    )


def fold(doctree):
    """Fold solutions whole, and the code (only) of cells that keep the books.

    Of a cell that only shows a kernel's source, the page shows the source and not the call; under
    ONLY_OUTPUT it folds the source, and with it the code that stands before it. Code moves behind
    its output there, so each output is told which cell it belongs to.
    """
    found = list(cells(doctree))
    within_next = [is_within_next(found, place) for place in range(len(found))]
    for number, (code, outputs) in enumerate(found):
        for node in (code, *outputs):
            node["cell"] = number
        source = code.astext().strip()
        first, last = source.split("\n", 1)[0], outputs[-1] if outputs else code
        if re.fullmatch(r"lab\.source\(.*\)", source):
            wrap(code, code, "<div hidden>", "</div>")
        elif first.startswith("# Solution:"):
            label = in_print(first.removeprefix("# "))
            opening = f'<details class="kb-solution"><summary>{label}</summary>'
            wrap(code, last, opening, "</details>")
        elif label := fold_label(code):
            opening = opening_of(label, first)
            if first.startswith(ONLY_OUTPUT):
                begin, end = code, last
                if number and within_next[number - 1]:
                    made = found[number - 1][0]
                    begin, end = outputs[0], code
                    move_behind(code, last)
                    move_behind(made, last)
                    wrap(made, made, opening_of(fold_label(made)), "</details>")
                wrap(begin, end, opening, "</details>")
                wrap(code, code, "<div hidden>", "</div>")
            elif first == "# Reading" and outputs:
                fold_into_paragraph(code, outputs, label)
            elif not within_next[number]:
                if outputs:
                    move_behind(code, last)
                wrap(code, code, opening, "</details>")


def opening_of(label, first=""):
    """The opening tag of a fold, and its label; ``first`` is the first line of its cell."""
    kind = "kb-code kb-book" if label in BOOKS and not first.startswith(ONLY_OUTPUT) else "kb-code"
    return f'<details class="{kind}"><summary>{in_print(label)}</summary>'


def fold_into_paragraph(code, outputs, label):
    """Let the code that wrote a paragraph open from a sign at its end: rows break the text."""
    move_behind(code, outputs[-1])
    opening = f'<details class="kb-code kb-book kb-wrote"><summary><span>{label}</span></summary>'
    wrap(code, code, opening, "</details></div>")
    code.parent.insert(code.parent.index(outputs[0]), html('<div class="kb-written">'))


def move_behind(code, last):
    """Move the code of a cell behind the last node of an output."""
    if code is not last:
        parent = code.parent
        parent.remove(code)
        parent.insert(parent.index(last) + 1, code)


def download_bar(stem, name):
    """Links to the chapter as script and notebook, and to the whole book."""
    links = "".join(
        f'<a href="../downloads/{file}" download>{label}</a>'
        for file, label in (
            (f"{stem}.py", "Python script"),
            (f"{stem}.ipynb", "Jupyter notebook"),
            ("kernel-book.zip", "Everything, with the package (zip)"),
        )
    )
    how = '<a class="kb-how" href="../start.html#run-one-chapter">How to run it</a>'
    return html(f'<nav class="kb-downloads" aria-label="{name}">{links}{how}</nav>')


def add_opening(app, doctree, stem):
    """Open a chapter with its question, its bars and what the reader will learn.

    What follows in small type is how to run it: the downloads and, in a fold, where this page ran,
    with what it was tested, and its imports. The fold is open if the results are out of date.
    """
    from support import tested_with  # which needs this module

    section = next(doctree.findall(nodes.section))
    lead = section.first_child_matching_class(nodes.paragraph)
    section[lead]["classes"].append("kb-lead")
    if (bars := opening_bars(stem)) is not None:
        section.insert(lead + 1, bars)
    learn = section.first_child_matching_class(nodes.bullet_list)
    if learn is not None:
        wrap(section[learn - 1], section[learn], '<div class="kb-learn">', "</div>")
    yours = '<a href="../hardware.html#what-runs-on-your-gpu">And yours?</a>'
    tested = html(f'<p class="kb-tested">{escape(tested_with(app, stem))} {yours}</p>')
    first = section.first_child_matching_class(nodes.comment)  # of the first cell
    last = section.first_child_matching_class(nodes.section) or len(section)
    start = learn + 3 if learn is not None else first
    if first is None or not start <= first < last:
        start = first = last = last if first is None else first
    is_stale = any("kb-stale" in node.astext() for node in section[first:last])
    about = f'<details class="kb-about"{" open" * is_stale}><summary>About this run</summary>'
    section.insert(last, html("</details></div>"))
    section.insert(first, [html(about), tested])
    section.insert(start, [html('<div class="kb-setup">'), download_bar(stem, "Downloads")])
    section.append(download_bar(stem, "Downloads, at the end"))


def opening_bars(stem):
    """The bars of a chapter's card, in the page's own type; None where nothing was recorded."""
    from recorded import bars_of, pictured_input, primary  # which needs this module

    record = next((found for found in primary() if found["chapter"] == stem), None)
    if record is None or stem not in CHAPTERS:
        return None
    bars, limit = bars_of(record)
    gpu = escape(record["provenance"]["gpu"])
    shown = escape(pictured_input(record))
    unit = f"100 is the speed of {limit}" if limit else "The numbers are microseconds"
    caption = f"{shown[0].upper()}{shown[1:]}, {gpu}. {unit}."
    return bars_in_type(bars, caption, 100 if limit else 0)


def bars_in_type(bars, caption, least):
    """Bars in a page's own type, on tracks as long as the limit, ``least``, where there is one.

    A full line is the longest number, or the limit.
    """
    scale = max(least, *(number for _, number in bars))
    rows = "".join(
        f'<li><span>{in_print(label)}</span> <i style="--share:{number / scale:.3f}"></i>'
        f"<b>{number}</b></li>"
        for label, number in bars
    )
    return html(
        f'<figure class="kb-bars" style="--limit:{least / scale:.3f}"><ul>{rows}</ul>'
        f"<figcaption>{caption}</figcaption></figure>"
    )


def warn_if_out_of_date(doctree, docname):
    """Warn when a page shows numbers that its code no longer makes, so that CI fails.

    Not where the page says what has changed since: see :func:`kernelbook.lab.results.awaited`.
    """
    from kernelbook.lab import results

    if Path(docname).name in results.awaited():
        return
    shown = [raw.astext() for raw in doctree.findall(nodes.raw)]
    shown += [image.get("alt", "") for image in doctree.findall(nodes.image)]
    if any("OUT OF DATE" in text for text in shown):
        logger.warning(
            "shows recorded numbers that are out of date: run `make html` on a GPU",
            location=docname,
            type="kernelbook",
            subtype="stale",
        )


def on_doctree_read(app, doctree):
    add_dark_twins(app, doctree)
    if is_chapter(app.env.docname):
        warn_if_out_of_date(doctree, app.env.docname)
        tidy(doctree)
        note_amount(app.env, doctree)
        join_folds(doctree)
        fold(doctree)
        stem = Path(app.env.docname).name
        add_opening(app, doctree, stem)
        if stem in CHAPTERS:
            add_path(app.env, doctree, stem)


def lighten(app, doctree, docname):
    """Write names, punctuation and spaces of code without a span each, and a string with one.

    Sphinx-Gallery gives every token a span, and a string three. Names, punctuation and spaces have
    the colour of the block in both themes, and their spans were a third of the bytes of a chapter.
    A name within a link keeps its span, because a link has a colour of its own. What only a
    formatter or linter reads is left out.
    """
    from kernelbook.lab import display

    for token in list(doctree.findall(nodes.inline)):
        if display.FOR_TOOLS.match(token.astext()):
            token.parent.remove(token)
        elif token["classes"] in PLAIN and not isinstance(token.parent, nodes.reference):
            token.parent.replace(token, nodes.Text(token.astext()))
    for token in list(doctree.findall(nodes.inline)):
        before = token.previous_sibling()
        if (
            token.parent.tagname == "code_links_block"  # of Sphinx-Gallery
            and isinstance(before, nodes.inline)
            and before["classes"] == token["classes"]
            and all(isinstance(part, nodes.Text) for part in (*before, *token))
        ):
            whole = nodes.inline(classes=token["classes"])
            whole += nodes.Text(before.astext() + token.astext())
            token.parent.remove(before)
            token.parent.replace(token, whole)
    for block in doctree.findall(nodes.literal_block):
        if block.rawsource == block.astext() and display.FOR_TOOLS.search(block.rawsource):
            block.rawsource = display.for_readers(block.rawsource)
            block.clear()
            block += nodes.Text(block.rawsource)


def keep_punctuation(app, doctree, docname):
    """Let no line begin with the comma after a formula: MathJax makes a box, which may break."""
    for formula in list(doctree.findall(nodes.math)):
        after = formula.next_node(descend=False, siblings=True)
        if not isinstance(after, nodes.Text) or not (mark := re.match(r"[.,;:)?]+", after)):
            continue
        whole = nodes.inline(classes=["kb-nowrap"])
        formula.parent.replace(after, nodes.Text(after[mark.end() :]))
        formula.parent.replace(formula, whole)
        whole += [formula, nodes.Text(mark.group())]


LEGIBLE, NARROW = 10, 384
"""The smallest letters of a figure on a phone, and how wide figures stand there, in pixels."""


def width_to_read(svg):
    """How wide a figure must be for its smallest label to be legible, in pixels.

    What it was made with does not count, because it is larger where the figure is small.
    """
    svg = re.sub('(?s)<g id="made">.*?</g>', "", svg)
    [width] = re.findall(r'viewBox="\S+ \S+ (\S+)', svg)
    sizes = re.findall(r"<text[^>]*font(?:-size)?: (?:\w+ )?([\d.]+)px", svg)
    return round(LEGIBLE * float(width) / min(map(float, sizes), default=LEGIBLE))


def let_figures_pan(app, doctree, docname):
    """Let a figure whose labels a phone would show too small scroll sideways there, in a box."""
    for image in list(doctree.findall(nodes.image)):
        if not {"kb-figure", "only-light"} <= set(image["classes"]):
            continue
        svg = Path(app.srcdir, image["uri"].lstrip("/")).read_text(encoding="utf-8")
        if (width := width_to_read(svg)) > 1.05 * NARROW:
            about = 'role="group" aria-label="A figure that scrolls sideways"'
            opening = f'<div class="kb-pan" {about} style="--legible: {width}px">'
            wrap(image, image.next_node(descend=False, siblings=True), opening, "</div>")


def add_questions(app, pagename, templatename, context, doctree):
    """Tell the links to the pages before and after which question a chapter there answers."""
    relations = app.env.collect_relations().get(pagename, [None, None, None])
    for name, page in zip(("question_before", "question_after"), relations[1:], strict=True):
        facts = CHAPTERS.get(Path(page or "").name) if is_chapter(page or "") else None
        context[name] = in_print(facts.question) if facts else ""


def setup(app):
    app.add_role("facts", FactsRole())
    app.connect("env-before-read-docs", chapters_first)
    app.connect("html-page-context", add_questions)
    # Before Sphinx collects the images of a page (priority 500).
    app.connect("doctree-read", on_doctree_read, priority=400)
    app.connect("doctree-resolved", lighten)
    app.connect("doctree-resolved", keep_punctuation)
    app.connect("doctree-resolved", let_figures_pan)
    # Raise env_version with what note_amount keeps: pages that are not read again lack it.
    return {"env_version": 4, "parallel_read_safe": False, "parallel_write_safe": True}
