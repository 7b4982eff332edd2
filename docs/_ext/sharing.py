"""What a page carries beyond itself: what a shared link shows, where to report, how to cite.

Two environment variables name what the repository cannot know. KERNELBOOK_URL is the address of
the published site; without it there is no sitemap and no picture for a shared link, because both
need whole addresses. KERNELBOOK_REPOSITORY is the address of the repository on GitHub; without it
there is no link "Report this page".
"""

import base64
import functools
import os
import re
from html import escape
from pathlib import Path
from urllib.parse import quote, urlencode
from xml.sax.saxutils import escape as escape_xml

import yaml
from chapters import is_chapter
from docutils import nodes
from recorded import records
from sphinx.util.docutils import SphinxDirective

CARD = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1200 630">
  <rect width="1200" height="630" fill="#ffffff"/>
  <rect width="1200" height="14" fill="#0b5cad"/>
  <g font-family="DejaVu Sans" fill="#1f2328">
    <text x="60" y="84" font-size="26" fill="#545d68">{site}</text>
    <text x="60" y="146" font-size="48" font-weight="bold">{title}</text>
  </g>
  <image x="60" y="180" width="1080" height="420" href="data:image/svg+xml;base64,{picture}"/>
</svg>
"""


def citation(confdir):
    """What CITATION.cff says."""
    return yaml.safe_load(Path(confdir, "CITATION.cff").read_text(encoding="utf-8"))


# -- what a shared link shows ---------------------------------------------------------------------


def description(app, doctree):
    """The first paragraph of a page; a page without one is described as the book is."""
    paragraphs = doctree.findall(nodes.paragraph) if doctree else ()
    paragraph = next((p for p in paragraphs if "kb-path" not in p["classes"]), None)
    text = paragraph.astext() if paragraph else citation(app.confdir)["abstract"]
    return " ".join(text.split())


def picture(app, pagename, doctree):
    """The SVG for a page: a chapter's thumbnail, or the first figure, or the favicon."""
    thumbnail = f"chapters/images/thumb/sphx_glr_{Path(pagename).name}_thumb.svg"
    if is_chapter(pagename) and Path(app.srcdir, thumbnail).exists():
        return Path(app.srcdir, thumbnail)
    sources = {name: source for source, name in app.builder.images.items()}
    for image in doctree.findall(nodes.image):
        source = sources.get(Path(image["uri"]).name, "")
        if source.endswith(".svg"):
            return Path(app.srcdir, source)
    return Path(app.confdir, app.config.html_favicon)


def write_card(app, pagename, title, svg):
    """Write the picture of a page as PNG, which every service can show; return its address."""
    import matplotlib
    import resvg_py

    card = CARD.format(
        site=escape_xml(app.config.project),
        title=escape_xml(title),
        picture=base64.b64encode(svg.read_bytes()).decode("ascii"),
    )
    png = resvg_py.svg_to_bytes(
        svg_string=card,
        width=1200,
        dpi=96,  # the figures have their sizes in points
        skip_system_fonts=True,
        font_dirs=[str(Path(matplotlib.get_data_path(), "fonts", "ttf"))],
        font_family="DejaVu Sans",
        sans_serif_family="DejaVu Sans",
    )
    path = Path(app.outdir, "_images", "shared", pagename.replace("/", "-") + ".png")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(png)
    return app.config.html_baseurl + path.relative_to(app.outdir).as_posix()


def tags(app, pagename, title, doctree):
    """The metadata of a page, by name; addresses only where that of the site is known."""
    found = {
        "description": (about := description(app, doctree)),
        "og:type": "website",
        "og:site_name": app.config.project,
        "og:title": title,
        "og:description": about,
    }
    if app.config.html_baseurl:
        found["og:url"] = app.config.html_baseurl + app.builder.get_target_uri(pagename)
        if doctree:
            found["og:image"] = write_card(app, pagename, title, picture(app, pagename, doctree))
            found |= {"og:image:width": "1200", "og:image:height": "630"}
            found["og:image:alt"] = f"{app.config.project}: {title}"
            found["twitter:card"] = "summary_large_image"
    return found


# -- whom to tell of an error ---------------------------------------------------------------------


@functools.cache
def commit():
    """The commit that the site is built from."""
    from kernelbook.lab import results

    return results.short_commit(results.provenance()["commit"])


def report(app, pagename, title):
    """The address of a new issue that names page, commit and GPU; or nothing."""
    from kernelbook.lab import results

    repository = os.environ.get("KERNELBOOK_REPOSITORY", "").rstrip("/")
    if not repository:
        return ""
    page = app.config.html_baseurl + app.builder.get_target_uri(pagename)
    lines = [f"Page: {page}", f"Built from commit: {commit()}"]
    for record in records():
        made = record["provenance"]
        if pagename == f"chapters/{record['chapter']}":
            where = f"{made['gpu']} at commit {results.short_commit(made['commit'])}"
            lines.append(f"Measured on: {where}, {made['date'][:10]}")
    lines += ["", "What is wrong, and what you expected:", ""]
    fields = {"title": f"{title}: ", "body": "\n".join(lines)}
    return f"{repository}/issues/new?{urlencode(fields, quote_via=quote)}"


# -- what Sphinx calls ----------------------------------------------------------------------------


def on_page(app, pagename, templatename, context, doctree):
    title = re.sub(r"<[^>]*>", "", context.get("title", app.config.project))
    if pagename in app.env.titles:
        title = app.env.titles[pagename].astext()
    metatags = [context.get("metatags", "")]
    for name, value in tags(app, pagename, title, doctree).items():
        kind = "property" if name.startswith("og:") else "name"
        metatags.append(f'<meta {kind}="{name}" content="{escape(value)}">')
    context["metatags"] = "\n".join(metatags)
    context["report"] = report(app, pagename, title)


def write_maps(app, exception):
    """Write robots.txt, and sitemap.xml where the address of the site is known."""
    if exception or app.builder.format != "html":
        return
    base = app.config.html_baseurl
    robots = "User-agent: *\nAllow: /\n"
    if base:
        robots += f"Sitemap: {base}sitemap.xml\n"
        pages = sorted(app.env.found_docs)
        links = "".join(
            f"  <url><loc>{escape_xml(base + app.builder.get_target_uri(page))}</loc></url>\n"
            for page in pages
        )
        Path(app.outdir, "sitemap.xml").write_text(
            '<?xml version="1.0" encoding="utf-8"?>\n'
            f'<urlset xmlns="http://www.sitemaps.org/schemas/sitemap/0.9">\n{links}</urlset>\n',
            encoding="utf-8",
        )
    Path(app.outdir, "robots.txt").write_text(robots, encoding="utf-8")


class Citation(SphinxDirective):
    """The BibTeX entry of the book, made from CITATION.cff."""

    def run(self):
        self.env.note_dependency(str(Path(self.env.app.confdir, "CITATION.cff")))
        about = citation(self.env.app.confdir)
        fields = {
            "author": " and ".join(f"{{{author['name']}}}" for author in about["authors"]),
            "title": f"{{{about['title']}}}",
            "year": about["date-released"][:4],
            "note": f"Version {about['version']}",
        }
        if base := self.config.html_baseurl:
            fields["url"] = base
        body = "".join(f"  {name} = {{{value}}},\n" for name, value in fields.items())
        entry = f"@misc{{kernelbook,\n{body}}}"
        return [nodes.literal_block(entry, entry, language="bibtex")]


def setup(app):
    app.connect("html-page-context", on_page)
    app.connect("build-finished", write_maps)
    app.add_directive("citation", Citation)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
