"""Write a chapter's notebook from the document tree of its page.

Sphinx has already parsed the prose, so nothing of reStructuredText is left to convert: each node
has one Markdown form here. A cell holds the outputs that the page shows, so that a viewer that runs
nothing shows a whole chapter.
"""

import base64
import re
from pathlib import Path

import nbformat
from chapters import fold_label
from docutils import nodes
from sphinx import addnodes

SKIPPED = (
    nodes.comment,
    nodes.raw,
    nodes.target,
    nodes.substitution_definition,
    nodes.system_message,
    addnodes.toctree,
    addnodes.index,
)
INTRODUCTION = """\
*A chapter of Kernel Book. The package that it needs comes with it: unpack `kernel-book.zip`, open \
a terminal in its folder, and in a virtual environment run `pip install {wheel}`. Without a GPU \
the kernels run in Triton's interpreter, and figures are drawn from the recorded measurements. \
The outputs below are those of the page: run the notebook to make your own.*"""


def write(env, docname, path, wheel):
    """Write the notebook of one chapter to `path`; `wheel` is the file that it needs."""
    notebook = nbformat.v4.new_notebook(cells=_Writer(env).notebook(env.get_doctree(docname)))
    notebook.cells.insert(1, nbformat.v4.new_markdown_cell(INTRODUCTION.format(wheel=wheel)))
    notebook.cells.insert(2, _code_cell("%matplotlib inline"))
    for number, cell in enumerate(notebook.cells):
        cell.id = f"{Path(docname).name}-{number}"
    notebook.metadata.kernelspec = {
        "name": "python3",
        "display_name": "Python 3",
        "language": "python",
    }
    nbformat.validate(notebook)
    nbformat.write(notebook, path)


def _code_cell(source, hidden=False):
    cell = nbformat.v4.new_code_cell(source)
    if hidden:
        cell.metadata["jupyter"] = {"source_hidden": True}
    return cell


def _cell(node):
    """The number of the cell that code or an output belongs to."""
    return node.get("cell") if isinstance(node, nodes.Element) else None


def hang(text, indent):
    """Indent every line of a list item but its first."""
    return re.sub(r"\n(?=[^\n])", "\n" + indent, text)


class _Writer:
    def __init__(self, env):
        self.env = env
        self.cells = []
        self.pending = []  # Markdown blocks of the cell being filled
        self.depth = 0

    def notebook(self, doctree):
        self.walk(doctree)
        self.flush()
        return self.cells

    def flush(self):
        if self.pending:
            self.cells.append(nbformat.v4.new_markdown_cell("\n\n".join(self.pending)))
            self.pending = []

    def walk(self, parent):
        """Turn sections and cells into notebook cells."""
        for node in parent.children:
            if isinstance(node, nodes.section):
                self.flush()
                self.depth += 1
                self.walk(node)
                self.depth -= 1
            elif isinstance(node, nodes.literal_block) and node.get("language") == "Python":
                self.flush()
                solution = node.astext().startswith("# Solution:")
                cell = _code_cell(node.astext(), solution or bool(fold_label(node)))
                shown = (other for other in parent.children if _cell(other) == _cell(node))
                cell.outputs = list(filter(None, map(self.output, shown)))
                self.cells.append(cell)
            elif _cell(node) is not None:
                pass  # an output, which stands in its cell
            elif markdown := self.block(node):
                self.pending.append(markdown)

    def output(self, node):
        """What a run of the cell would show, or None for its code and what belongs to a page."""
        if isinstance(node, nodes.literal_block) and node.get("language") != "Python":
            return nbformat.v4.new_output("stream", text=node.astext() + "\n")
        if isinstance(node, nodes.image) and "only-dark" not in node["classes"]:
            svg = Path(self.env.srcdir, node["uri"].lstrip("/")).read_text(encoding="utf-8")
            data = {"image/svg+xml": svg, "text/plain": node.get("alt", "")}
            return nbformat.v4.new_output("display_data", data=data)
        if isinstance(node, nodes.raw) and "output_html" in node.astext():
            shown = re.sub(r'<a [^>]*href="\.\./[^>]*>(.*?)</a>', r"\1", node.astext(), flags=re.S)
            return nbformat.v4.new_output("display_data", data={"text/html": shown})
        return None

    # -- blocks ------------------------------------------------------------------------------------

    def blocks(self, parent):
        return "\n\n".join(filter(None, map(self.block, parent.children)))

    def block(self, node):
        classes = node.get("classes", ()) if isinstance(node, nodes.Element) else ()
        if isinstance(node, SKIPPED) or "only-dark" in classes:
            return ""
        for kind, convert in self.BLOCKS.items():
            if isinstance(node, kind):
                return convert(self, node)
        if isinstance(node, nodes.TextElement):
            return self.text(node)
        return self.blocks(node)

    def title(self, node):
        return "#" * max(self.depth, 1) + " " + self.text(node)

    def rubric(self, node):
        return "**" + self.text(node) + "**"

    def code(self, node):
        language, text = node.get("language", ""), node.astext()
        if node.get("linenos"):  # prose refers to these lines by their numbers
            lines = enumerate(text.split("\n"), 1)
            text = "\n".join(f"{number:>2}  {line}".rstrip() for number, line in lines)
        return f"```{'' if language in ('none', 'default') else language}\n{text}\n```"

    def display_math(self, node):
        tex = re.sub(r"\n\s*\n", r" \\\\\n", node.astext().strip())
        if (r"\\" in tex or "&" in tex) and not tex.startswith(r"\begin"):
            tex = rf"\begin{{aligned}}{tex}\end{{aligned}}"
        return f"$$\n{tex}\n$$"

    def items(self, node):
        numbered = isinstance(node, nodes.enumerated_list)
        entries = []
        for number, item in enumerate(node.children, node.get("start", 1)):
            mark = f"{number}. " if numbered else "- "
            entries.append(mark + hang(self.blocks(item), " " * len(mark)))
        return "\n".join(entries)

    def definitions(self, node):
        entries = []
        for item in node.children:
            term, body = item.children[0], item.children[-1]
            entries.append(f"- **{self.text(term)}:** " + hang(self.blocks(body), "  "))
        return "\n".join(entries)

    def quote(self, node):
        heading = ""
        if isinstance(node, nodes.Admonition) and not isinstance(node, nodes.admonition):
            heading = f"**{node.tagname.capitalize()}.** "
        return "> " + (heading + self.blocks(node)).replace("\n", "\n> ")

    def picture(self, node):
        path = Path(self.env.srcdir, node["uri"].lstrip("/"))
        kind = {".svg": "svg+xml", ".png": "png"}[path.suffix]
        data = base64.b64encode(path.read_bytes()).decode("ascii")
        return f"![{node.get('alt', '')}](data:image/{kind};base64,{data})"

    def table(self, node):
        rows = [
            [self.blocks(entry).replace("\n", " ").replace("|", r"\|") for entry in row.children]
            for row in node.findall(nodes.row)
        ]
        rows.insert(1, ["---"] * len(rows[0]))
        return "\n".join("| " + " | ".join(row) + " |" for row in rows)

    def footnote(self, node):
        label = node.children[0].astext()
        body = " ".join(filter(None, map(self.block, node.children[1:])))
        return f"[{label}] {body}"

    BLOCKS = {
        nodes.title: title,
        nodes.rubric: rubric,
        nodes.literal_block: code,
        nodes.math_block: display_math,
        nodes.bullet_list: items,
        nodes.enumerated_list: items,
        nodes.definition_list: definitions,
        nodes.block_quote: quote,
        nodes.Admonition: quote,
        nodes.topic: quote,
        nodes.image: picture,
        nodes.table: table,
        nodes.footnote: footnote,
        nodes.citation: footnote,
        nodes.transition: lambda self, node: "---",
    }

    # -- inside a paragraph ------------------------------------------------------------------------

    def text(self, parent):
        return "".join(map(self.inline, parent.children)).strip().replace("\n", " ")

    def inline(self, node):
        if isinstance(node, nodes.Text):
            return re.sub(r"([*`$])", r"\\\1", node.astext()).replace("<", "&lt;")
        if isinstance(node, SKIPPED):
            return ""
        if isinstance(node, nodes.math):
            return f"${node.astext()}$"
        if isinstance(node, nodes.literal):
            return f"`{node.astext()}`"
        if isinstance(node, nodes.image):
            return self.picture(node)
        if isinstance(node, addnodes.pending_xref):
            return self.cross_reference(node)
        inner = "".join(map(self.inline, node.children))
        if isinstance(node, nodes.emphasis):
            return f"*{inner}*"
        if isinstance(node, nodes.strong):
            return f"**{inner}**"
        if isinstance(node, nodes.reference) and node.get("refuri"):
            return f"[{inner}]({node['refuri']})"
        if isinstance(node, (nodes.footnote_reference, nodes.citation_reference)):
            return f"[{inner}]"
        return inner

    def cross_reference(self, node):
        """The words of a link within the book; a notebook stands alone, so it links nowhere."""
        target = node["reftarget"]
        if not node.get("refexplicit"):
            labels = self.env.domains.standard_domain.labels
            if node["reftype"] == "ref" and target in labels:
                return labels[target][2]
            if node["reftype"] == "doc" and target.lstrip("/") in self.env.titles:
                return self.env.titles[target.lstrip("/")].astext()
        return "".join(map(self.inline, node.children))
