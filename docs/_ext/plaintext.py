"""The whole book as one text file, made from its pages: prose, TeX, code and what the code printed.

The pages are what a reader sees, results and all, so they are what is written down. The form is
Markdown. Of figures the file has the descriptions, and of several GPUs the book's primary.
"""

import re
from pathlib import Path
from textwrap import fill, indent

from bs4 import BeautifulSoup, NavigableString, Tag

WIDTH = 100
UNSEEN = "[hidden], svg, .only-dark, .headerlink, .viewcode-link, .eqno, nav, .kb-raw, .kb-tested a"
BLOCKS = {
    *("article", "blockquote", "dd", "details", "div", "dl", "dt", "figcaption", "figure"),
    *("h1", "h2", "h3", "h4", "li", "ol", "p", "pre", "section", "summary", "table", "ul"),
}
MARKS = {"em": "*", "i": "*", "strong": "**", "b": "**"}


def write(app, path):
    """Write every page of the book, in the order in which they are read."""
    parts = []
    for name in app.env.collect_relations():
        page = Path(app.builder.get_outfilename(name)).read_text(encoding="utf-8")
        parts.append(text_of(page))
    path.write_text("\n\n\n".join(parts) + "\n", encoding="utf-8")


def text_of(page):
    """One page as Markdown."""
    article = BeautifulSoup(page, "html.parser").find("article")
    for unseen in article.select(UNSEEN):
        unseen.decompose()
    variants = article.select(".kb-gpu")
    for variant in variants:
        if variant["data-gpu"] != variants[0]["data-gpu"]:
            variant.decompose()
    return "\n\n".join(blocks(article))


def blocks(parent):
    """The paragraphs, lists, tables and blocks of code of an element."""
    found, line = [], ""
    for child in [*parent.children, None]:
        if child is None or (isinstance(child, Tag) and child.name in BLOCKS):
            if words := " ".join(line.split()):
                found.append(fill(words, WIDTH, break_long_words=False, break_on_hyphens=False))
            line = ""
            found += block(child) if child else []
        else:
            line += inline(child)
    return found


def block(element):
    """One element as a list of blocks."""
    classes = element.get("class", ())
    if element.name in ("h1", "h2", "h3", "h4"):
        return [f"{'#' * int(element.name[1])} {' '.join(inline(element).split())}"]
    if element.name == "pre":
        return [code(element)]
    if "math" in classes:
        tex = re.sub(r"^\\\[|\\\]$", "", element.get_text().strip())
        wrapped = r"(?s)\\begin{split}(\\begin{aligned}.*\\end{aligned})\\end{split}"  # by Sphinx
        tex = re.sub(wrapped, r"\1", tex.strip())
        return [f"$$\n{tex}\n$$"]
    if element.name in ("ul", "ol"):
        return [items(element)]
    if element.name == "table":
        return [table(element)]
    if element.name == "summary":
        return [f"**{' '.join(inline(element).split())}**"]
    if element.name == "dt":
        mark = "`" if "sig" in classes else "**"
        return [f"{mark}{' '.join(element.get_text().split())}{mark}"]
    if element.name == "dd":
        return [indent("\n\n".join(blocks(element)), "    ")]
    return blocks(element)


def code(element):
    """A block of code, or what code printed."""
    around = " ".join(" ".join(parent.get("class", ())) for parent in element.parents)
    known = re.search(r"\bhighlight-(\w+)|\b(kb-source)\b", around)
    language = "python" if known and known[2] else known[1].lower() if known else ""
    language = "" if language in ("none", "default") else language
    return f"```{language}\n{element.get_text().strip(chr(10))}\n```"


def items(element):
    """A list; its items may hold anything."""
    found = []
    for number, item in enumerate(element.find_all("li", recursive=False), 1):
        mark = f"{number}. " if element.name == "ol" else "- "
        found.append(mark + indent("\n\n".join(blocks(item)), " " * len(mark)).lstrip())
    return "\n".join(found)


def table(element):
    """A table, its first row as the heading."""
    rows = [
        [" ".join(inline(cell).split()).replace("|", r"\|") for cell in row.find_all(["th", "td"])]
        for row in element.find_all("tr")
    ]
    rows.insert(1, ["---"] * len(rows[0]))
    lines = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    return f"{caption.get_text()}\n\n{lines}" if (caption := element.find("caption")) else lines


def inline(node):
    """Text with its marks; of links only those to other sites."""
    if isinstance(node, NavigableString):
        return str(node) if type(node) is NavigableString else ""
    if node.name == "img":
        return f" [Figure: {node['alt']}] "
    if node.name == "br":
        return " "
    if "math" in node.get("class", ()):
        return re.sub(r"^\\\(|\\\)$", "$", node.get_text())
    if node.name == "code":
        return f"`{node.get_text()}`"
    inner = "".join(map(inline, node.children))
    if node.name == "a" and node.get("href", "").startswith("http"):
        return f"[{inner}]({node['href']})"
    mark = MARKS.get(node.name, "") if inner.strip() else ""
    return f"{mark}{inner}{mark}"
