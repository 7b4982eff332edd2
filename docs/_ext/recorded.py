"""Pages made from what is recorded: the chapter list, the hardware tables, the API reference.

Also the guard of the whole book: a build with results older than the kernel that they measured
warns (and so fails in CI), and a results file that cannot be read stops the build.
"""

import ast
import importlib
import json
import re
from pathlib import Path

from chapters import reading_order
from docutils import nodes
from docutils.statemachine import StringList
from sphinx import addnodes
from sphinx.errors import ExtensionError
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

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

    return record["provenance"]["slug"] == results.PRIMARY


def state(app, record):
    """Whether a record was made with the code at hand; only the primary's has to be."""
    if not is_stale(app, record):
        return "current"
    return "out of date" if is_primary(record) else "older kernel"


def gallery(app):
    """The folder of the chapters' scripts."""
    return Path(app.srcdir).parent / "gallery"


def warn_if_stale(app, env):
    """Warn about each result of the primary GPU whose kernel has changed since it was measured."""
    for record in records():
        if is_primary(record) and is_stale(app, record):
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


def table(headers, rows):
    """A table of strings and inline nodes."""
    group = nodes.tgroup(cols=len(headers))
    group += [nodes.colspec(colwidth=1) for _ in headers]

    def row(cells):
        entries = (nodes.entry("", paragraph(cell)) for cell in cells)
        return nodes.row("", *entries)

    group += nodes.thead("", row(headers))
    group += nodes.tbody("", *map(row, rows))
    return nodes.table("", group)


# -- the chapter list -----------------------------------------------------------------------------


def chapter_scripts(app):
    scripts = gallery(app).glob("[!_]*.py")
    return sorted(scripts, key=reading_order)


class Chapters(SphinxDirective):
    """One card a chapter: its figure, its question, and what it reaches on the primary GPU."""

    def run(self):
        self.env.note_reread()
        cards = nodes.container(classes=["kb-cards"])
        entries = []
        for script in chapter_scripts(self.env.app):
            cards += self.card(script)
            entries.append((None, f"chapters/{script.stem}"))
        content = [cards] if entries else [paragraph("No chapter has been written yet.")]
        if self.env.docname == "chapters" and entries:
            content.append(self.toctree(entries))
        return content

    def card(self, script):
        from sphinx_gallery.gen_rst import extract_intro_and_title  # what has it is in the site

        text = ast.get_docstring(ast.parse(script.read_text(encoding="utf-8")))
        intro, title = extract_intro_and_title(script, text)
        card = nodes.container(classes=["kb-card"])
        thumbnail = f"chapters/images/thumb/sphx_glr_{script.stem}_thumb.svg"
        if Path(self.env.srcdir, thumbnail).exists():
            alt = f"A figure from the chapter {title}"
            card += nodes.image(uri=f"/{thumbnail}", alt=alt, classes=["kb-thumb"])
        target = f"chapters/{script.stem}"
        card += paragraph(link(self.env.docname, target, title), classes=["kb-card-title"])
        card += paragraph(intro)
        runs = [r for r in records() if r["chapter"] == script.stem]
        if runs:
            run = runs[0]  # the primary's, where there is one
            made, found = run["provenance"], state(self.env.app, run)
            remark = "" if found == "current" else f" ({found})"
            where = f" Measured on {made['gpu']}, {made['date'][:10]}{remark}."
            reach = (nodes.strong("", run["reaches"].rstrip(".") + "."), where)
        else:
            reach = ("Not recorded yet.",)
        card += paragraph(*reach, classes=["kb-reaches"])
        return card

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


# -- the hardware page ----------------------------------------------------------------------------


def run_rows(app, docname):
    from kernelbook.lab import results

    headers = ("Chapter", "GPU", "Date", "Driver", "CUDA", "torch", "triton", "Commit", "State")
    rows = []
    for record in records():
        made = record["provenance"]
        rows.append(
            (
                link(docname, f"chapters/{record['chapter']}", record["chapter"]),
                made["gpu"],
                made["date"][:10],
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
    """A table of what was recorded: runs, files, devices, kernels or the host's time."""

    required_arguments = 1
    TABLES = {
        "runs": run_rows,
        "files": file_rows,
        "devices": device_rows,
        "kernels": kernel_rows,
        "host": host_rows,
    }

    def run(self):
        self.env.note_reread()
        headers, rows = self.TABLES[self.arguments[0]](self.env.app, self.env.docname)
        return [table(headers, rows) if rows else paragraph(NOT_RECORDED)]


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
    """Let Sphinx write a source page for each module of an operator that has several."""
    import kernelbook

    folder = Path(kernelbook.__file__).parent
    shown = env.__dict__.setdefault("_viewcode_modules", {})
    for path in sorted(folder.glob("ops/**/*.py")):
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
    app.add_directive("chapters", Chapters)
    app.add_directive("recorded", Recorded)
    app.add_directive("functions", Functions)
    app.connect("env-updated", warn_if_stale)
    return {"parallel_read_safe": False, "parallel_write_safe": True}
