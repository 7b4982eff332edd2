"""What runs where: by GPU, Triton and chapter, from records, tests and compiled kernels.

Records are those of ``results/``. What tests found on a GPU is kept in ``tests/tested.json``, and
what Triton made of all kernels for GPUs that are not there in ``tests/compiled.json``.
"""

import json
import re
from collections import defaultdict
from pathlib import Path

from chapters import reading_order
from docutils import nodes
from recorded import chapter_scripts, is_stale, link, paragraph, records, table
from sphinx.util.docutils import SphinxDirective

OPERATORS = {
    "weighted sum": ("first_kernel",),
    "dropout": ("dropout",),
    "softmax": ("softmax",),
    "layer norm": ("layer_norm", "layer_norm_backward"),
    "attention": ("attention_forward", "attention_fast", "attention_backward"),
    "attention in Gluon": ("attention_hopper",),
    "attention backward in Gluon": ("attention_hopper_backward",),
    "decoding": ("attention_in_models",),
    "varlen": ("attention_in_models",),
    "fp8": ("attention_fp8",),
}
"""The chapters of a compiled case, by how its name begins; the longest beginning counts."""
FORWARD_ONLY = ("layer_norm", "attention_forward", "attention_fast")

REASONS = ("refused", "fails")
COLUMNS = {
    "Measured": r"measured",
    "Tested": r"tested|\d+ tests fail",
    "Compiled": r"compiled|refused|fails",
}
"""The columns of the table of GPUs, by how the words begin that it counts there."""


def read(app, name):
    """What `tests/<name>.json` holds, or nothing where the site is built without the tests."""
    path = Path(app.confdir, "tests", f"{name}.json")
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def tested(app):
    """Yield (gpu, triton, chapter, what the tests found, whether the code has changed since)."""
    from kernelbook.lab.fingerprint import fingerprint

    for gpu, versions in read(app, "tested").items():
        for triton, found in versions.items():
            for chapter, run in found.items():
                stale = fingerprint([run["module"]]) != run["fingerprint"]
                yield gpu, triton, chapter, run, stale


def compiled(app):
    """Yield (gpu, triton, chapter, name of the case, what became of it)."""
    architectures = read(app, "compiled")
    for name in sorted(architectures, key=newest_first):
        found = architectures[name]
        for case, outcome in found["cases"].items():
            if outcome.get("kernels") == 0:  # the package takes another kernel on this GPU
                continue
            start = max((start for start in OPERATORS if case.startswith(start)), key=len)
            for chapter in OPERATORS[start]:
                yield found["gpu"], found["triton"], chapter, case, outcome


def newest_first(architecture):
    """Sort key: sm_120 before sm_90, and other makers' after them."""
    maker, _, number = architecture.partition("_")
    return (maker != "sm", -int(number or 0))


def concerns(chapter, reason):
    """Whether a reason that ends a case is one of this chapter: a gradient's is not forward's."""
    return chapter not in FORWARD_ONLY or "gradient" not in reason


def reason_of(found, chapter):
    """(outcome, reason) where a case has no kernel for this chapter, or None."""
    outcomes = ((outcome, found[outcome]) for outcome in REASONS if outcome in found)
    return next((pair for pair in outcomes if concerns(chapter, pair[1])), None)


def words(app):
    """What is known, in a word or two, by (gpu, triton) and chapter."""
    cells = defaultdict(lambda: defaultdict(list))
    for record in records():
        made = record["provenance"]
        word = "measured, older code" if is_stale(app, record) else "measured"
        cells[made["gpu"], made["triton"]][record["chapter"]].append(word)
    for gpu, triton, chapter, run, stale in tested(app):
        word = f"{run['failed']} tests fail" if run["failed"] else "tested"
        cells[gpu, triton][chapter].append(f"{word}, older code" if stale else word)
    outcomes = defaultdict(list)
    for gpu, triton, chapter, _, found in compiled(app):
        outcomes[gpu, triton, chapter].append(reason_of(found, chapter))
    for (gpu, triton, chapter), reasons in outcomes.items():
        word = "compiled"
        if all(reasons):
            word = reasons[0][0]
        elif any(reasons):
            word = "compiled in part"
        cells[gpu, triton][chapter].append(word)
    return cells


def summary(app):
    """A row for each GPU and Triton: of how many chapters what is known, and where something ends.

    What is as it should be is counted, and what is not is named.
    """
    cells = words(app)
    rows = []
    for gpu, triton in in_order(cells):
        found = defaultdict(list)
        for chapter in sorted(cells[gpu, triton], key=reading_order):
            for word in cells[gpu, triton][chapter]:
                found[word].append(chapter.replace("_", " "))
        columns = (
            "; ".join(counted(word, found[word]) for word in found if re.match(begins, word))
            for begins in COLUMNS.values()
        )
        rows.append((short(gpu), triton, *columns))
    return rows


def counted(word, chapters):
    """What went well as a number of chapters, "8, older code"; what did not by name."""
    kind, _, age = word.partition(", ")
    if kind in ("measured", "tested", "compiled"):
        return f"{len(chapters)}, {age}" if age else str(len(chapters))
    return f"{word.removeprefix('compiled ')}: {', '.join(chapters)}"


def in_order(cells):
    """The (gpu, triton) of some cells, a GPU's together, in the order in which GPUs came."""
    gpus = list(dict.fromkeys(gpu for gpu, _ in cells))
    return sorted(cells, key=lambda cell: (gpus.index(cell[0]), cell[1]))


def versions(app):
    """The versions of torch and Python with which something ran, by (gpu, triton)."""
    found = defaultdict(set)
    for record in records():
        made = record["provenance"]
        found[made["gpu"], made["triton"]].add(torch_and_python(made))
    for gpu, triton, _, run, _ in tested(app):
        found[gpu, triton].add(torch_and_python(run))
    return found


def torch_and_python(origin):
    """The two versions, without what PyTorch was built for."""
    return f"{origin['torch'].partition('+')[0]}, {origin['python']}"


def tested_with(app, chapter):
    """One sentence: on what a chapter's kernels were tested, and for how many GPUs compiled."""
    where = defaultdict(set)
    for gpu, triton, name, run, stale in tested(app):
        if name == chapter and not stale and not run["failed"]:
            where[gpu].add(triton)
    for record in records():
        if record["chapter"] == chapter and not is_stale(app, record):
            where[record["provenance"]["gpu"]].add(record["provenance"]["triton"])
    ran = "; ".join(
        f"{gpu} with triton {' and '.join(sorted(where[gpu]))}" for gpu in sorted(where)
    )
    text = f"Kernels checked on {ran}." if ran else "Not run on any GPU since its code changed."
    found = ((gpu, what) for gpu, _, name, _, what in compiled(app) if name == chapter)
    others = {gpu for gpu, what in found if not reason_of(what, chapter)} - where.keys()
    if others:
        text += f" Compiled for {len(others)} other GPU{'s' if len(others) > 1 else ''}."
    return text


class Support(SphinxDirective):
    """What runs where, by GPU or by chapter as well, or the reasons why something does not."""

    required_arguments = 1

    def run(self):
        self.env.note_reread()
        shown = {"summary": self.summary, "table": self.table, "reasons": self.reasons}
        return shown[self.arguments[0]]()

    def summary(self):
        if rows := summary(self.env.app):
            number = len(chapter_scripts(self.env.app))
            return [table(["GPU", "Triton", *COLUMNS], rows, f"How many of the {number} chapters")]
        return [paragraph("Nothing was run or compiled yet.")]

    def table(self):
        app, cells = self.env.app, words(self.env.app)
        chapters = [path.stem for path in sorted(chapter_scripts(app), key=reading_order)]
        titles = (link(self.env.docname, f"chapters/{c}", c.replace("_", " ")) for c in chapters)
        beside = versions(app)
        rows = [
            (
                *(short(gpu), triton, ", ".join(sorted(beside[gpu, triton]))),
                *("; ".join(cells[gpu, triton][c]) for c in chapters),
            )
            for gpu, triton in in_order(cells)
        ]
        if not rows:
            return [paragraph("Nothing was run or compiled yet.")]
        return [table(["GPU", "Triton", "torch, Python", *titles], rows)]

    def reasons(self):
        found = defaultdict(lambda: defaultdict(list))
        for gpu, _, chapter, case, outcome in compiled(self.env.app):
            found[gpu, chapter][reason_of(outcome, chapter)].append(case)
        listing = nodes.bullet_list()
        for (gpu, chapter), reasons in found.items():
            for reason, cases in reasons.items():
                if reason is None:
                    continue
                which = "everything" if len(reasons) == 1 else ", ".join(cases)
                what = f"{short(gpu)}, {chapter.replace('_', ' ')}, {which}: "
                sentence = reason[1].partition(": ")[2] or reason[1]
                listing += nodes.list_item("", paragraph(what, nodes.literal("", sentence)))
        return [listing] if listing.children else [paragraph("Nothing is refused.")]


def short(gpu):
    """A GPU's name without its maker's, as people say it; its spaces do not break."""
    gpu = re.sub(r"^(\d+)x NVIDIA ", r"\1 × ", gpu)
    for word in ("NVIDIA ", "AMD ", "GeForce ", "Instinct ", "Tesla ", "Triton's "):
        gpu = gpu.removeprefix(word)
    return gpu.replace(" ", "\N{NO-BREAK SPACE}")


def setup(app):
    app.add_directive("support", Support)
    return {"parallel_read_safe": False, "parallel_write_safe": True}
