"""The built site, opened in Chromium with every other host blocked.

Chromium is Debian's package ``chromium``. Where it is missing these tests are skipped by name,
except in CI, where they fail.
"""

import contextlib
import functools
import http.server
import os
import re
import shutil
import threading
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

import pytest
from chapters import width_to_read

from kernelbook.lab import display

SITE = Path(__file__).parents[2] / "build" / "html"
FILES = (p.relative_to(SITE).as_posix() for p in SITE.rglob("*.html"))
PAGES = sorted(path for path in FILES if not path.startswith("_static/"))
CHAPTERS = [path for path in PAGES if path.startswith("chapters/")]
SOURCES = [path for path in PAGES if path.startswith("_modules/kernelbook/")]
OPENED = [path for path in PAGES if path not in SOURCES[2:]]
"""Of the pages of source code, which differ in nothing but the code, two are opened."""
PROSE = """() => {  // what a reader sees of the page's text, outside code
    const walker = document.createTreeWalker(document.querySelector("main"), NodeFilter.SHOW_TEXT);
    let text = "";
    while (walker.nextNode())
        if (!walker.currentNode.parentElement.closest("pre, code, script, mjx-container"))
            text += walker.currentNode.data;
    return text;
}"""
ONE_TOKEN_OF_A_KIND = """() => {  // of code, because a rule of colours looks at every element
    const seen = new Set();
    for (const body of document.querySelectorAll("main tbody"))
        [...body.rows].slice(6).forEach(row => row.remove());  // alike, as formulas are
    [...document.querySelectorAll("mjx-container")].slice(6).forEach(formula => formula.remove());
    for (const code of document.querySelectorAll("pre")) {
        const kind = code.closest("div[class]").className;
        for (const token of [...code.querySelectorAll("span")].reverse()) {
            const key = [kind, token.className, token.closest("a") !== null].join();
            if (seen.has(key)) token.replaceWith(...token.childNodes);
            seen.add(key);
        }
        code.normalize();
    }
}"""
CHROMIUM_FLAGS = [
    "--no-sandbox",
    "--headless=new",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",  # every other host is blocked
]


class _Handler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


@contextlib.contextmanager
def _served(folder):
    """Serve a folder on loopback; the value is its address."""
    handler = functools.partial(_Handler, directory=folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def address():
    """The address of the built site."""
    assert PAGES, "build/html has no pages: run `make html` first"
    with _served(SITE) as address:
        yield address


@pytest.fixture(scope="module")
def browser():
    """Debian's Chromium, driven by Playwright."""
    executable = shutil.which("chromium")
    if executable is None:
        if os.environ.get("CI"):
            pytest.fail("Chromium is missing: install the Debian package chromium")
        pytest.skip("Chromium is missing: install the Debian package chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=CHROMIUM_FLAGS)
        yield browser
        browser.close()


class _Visit:
    """One page in its own browser context, and everything that went wrong while it loaded."""

    def __init__(self, browser, address, width, theme):
        self.address, self.problems = address, []
        self.context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=theme, reduced_motion="reduce"
        )
        self.page = self.context.new_page()
        self.page.on("console", self._note_console)
        self.page.on("pageerror", lambda error: self.problems.append(f"script error: {error}"))
        self.page.on("requestfailed", lambda r: self.problems.append(f"failed: {r.url}"))
        self.page.on("response", self._note_response)

    def _note_console(self, message):
        if message.type in ("error", "warning"):
            self.problems.append(f"console: {message.text}")

    def _note_response(self, response):
        if response.status >= 400:
            self.problems.append(f"status {response.status}: {response.url}")

    def open(self, path):
        self.page.goto(self.address + path)
        self.page.evaluate("() => window.MathJax?.startup?.promise")
        return self.page


@pytest.fixture
def visit(browser, address):
    """A function that starts a visit of a given width and theme."""
    visits = []

    def start(width=1280, theme="light"):
        visits.append(_Visit(browser, address, width, theme))
        return visits[-1]

    yield start
    for visit in visits:
        visit.context.close()


@pytest.mark.parametrize("path", OPENED)
def test_page(visit, path):
    """Loads cleanly from its own host, fits a phone, is accessible, and shows its mathematics.

    Then the reader's system turns dark, and the page with it: figures and colours change.
    """
    from axe_playwright_python.sync_playwright import Axe

    phone = visit(width=375)
    page = phone.open(path)
    overflow = page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
    assert overflow <= 0, f"the page scrolls sideways by {overflow} px on a phone"
    cut = page.locator(".prev-next-area a, .sd-card").evaluate_all(
        "all => all.filter(x => x.scrollHeight > x.clientHeight + 1).map(x => x.innerText)"
    )
    assert cut == [], "a card is cut off on a phone"
    assert not re.search(r"\\[(\[a-z]", page.evaluate(PROSE)), "raw TeX is visible"
    assert page.locator("mjx-merror").count() == 0, "MathJax could not read a formula"
    if page.locator("details").count():
        page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
        page.wait_for_timeout(400)  # the theme waits as long before it looks at what scrolls
    page.evaluate(ONE_TOKEN_OF_A_KIND)
    options = {"preload": False, "resultTypes": ["violations"]}
    for theme in ("light", "dark"):
        if theme == "dark":  # which changes nothing but colours
            options["runOnly"] = ["color-contrast", "link-in-text-block"]
        page.emulate_media(color_scheme=theme)
        page.wait_for_function(f"document.documentElement.dataset.theme === '{theme}'")
        shown = "[...document.images].filter(i => i.checkVisibility())"
        page.wait_for_function(f"{shown}.every(i => i.complete)")
        assert page.evaluate(f"{shown}.filter(i => !i.naturalWidth).map(i => i.src)") == []
        wanted = page.locator(f"img.only-{theme}:not([hidden] *)")  # other GPUs' are hidden
        assert page.evaluate(f"{shown}.length") == wanted.count()
        found = Axe().run(page, options=options).response["violations"]
        assert [
            f"{theme}: {v['id']} ({v['impact']}): {node['html'][:160]} {node['failureSummary']}"
            for v in found
            for node in v["nodes"]
        ] == []
    assert phone.problems == []


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_page_opens_in_the_theme_of_the_system(visit, theme):
    start = visit(theme=theme)
    page = start.open((CHAPTERS or ["index.html"])[0])
    assert page.evaluate("document.documentElement.dataset.theme") == theme
    assert start.problems == []


def test_theme_switch(visit):
    """The theme's own button turns the page dark, and the figures with it."""
    page = visit(theme="light").open((CHAPTERS or ["index.html"])[0])
    sources = "images => images.filter(i => i.checkVisibility()).map(i => i.src)"
    before = page.locator("main img").evaluate_all(sources)
    page.locator(".theme-switch-button:visible").click()
    page.locator(".theme-change-button[data-mode=dark]:visible").click()
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    after = page.locator("main img").evaluate_all(sources)
    assert len(before) == len(after)
    assert not set(before) & set(after)


def test_search_finds_a_term(visit):
    desktop = visit()
    page = desktop.open("search.html?q=Philox")
    page.wait_for_selector("#search-results li a")
    links = page.locator("#search-results li a").evaluate_all("links => links.map(a => a.href)")
    assert any("glossary.html" in link for link in links)
    assert desktop.problems == []


def test_solutions_are_folded_and_readings_are_prose(visit):
    if not CHAPTERS:
        pytest.skip("no chapter has been written yet")
    page = visit().open(CHAPTERS[0])
    solutions = page.locator("details.kb-solution")
    assert solutions.count() > 0
    assert page.locator("details.kb-solution[open]").count() == 0
    assert not solutions.first.locator(".highlight").first.is_visible()
    assert page.locator("div.kb-read").first.is_visible()


@pytest.mark.parametrize("path", CHAPTERS)
def test_a_page_folds_what_keeps_the_books_and_shows_mistakes(path, visit):
    """Only the section on mistakes may show code that makes a table, and it shows mistakes."""
    page = visit().open(path)
    cells = page.locator("main div.highlight-Python").evaluate_all(
        "all => all.map(cell => [cell.textContent, cell.checkVisibility(), "
        "cell.closest('section#what-breaks-it') !== null])"
    )
    assert cells
    books = r"\blab\.(start|check|bench|measure|facts|host_times|plot|table)\("
    for text, visible, about_mistakes in cells:
        if re.search(books, text) and "@triton.jit" not in text:
            assert about_mistakes or not visible, text
    mistakes = [visible for text, visible, about in cells if about and "lab.read(" not in text]
    pieces = page.locator("section#what-breaks-it div.highlight-python")  # of a listing above
    assert any(mistakes) or not mistakes or pieces.filter(visible=True).count()
    rows = page.locator("main table:visible").evaluate_all("all => all.map(t => t.rows.length)")
    assert max(rows, default=0) <= 1 + display.LONG  # the head, and what a long table shows
    clipped = page.locator("main pre:visible").evaluate_all(
        "all => all.filter(p => p.scrollWidth > p.clientWidth + 1).map(p => p.textContent)"
    )
    assert clipped == [], "code is cut off on a desktop"
    assert page.locator("details.kb-code[open]").count() == 0
    page.locator("button.kb-made").first.click()
    first = page.locator("details.kb-book:not(.kb-wrote)").filter(visible=True).first
    first.locator("summary").first.click()
    assert first.locator(".highlight").first.is_visible()


@pytest.mark.parametrize("path", CHAPTERS)
def test_code_and_folds_of_a_page_end_where_they_should(path, visit):
    """All code in sight has one width, and a line of closed folds keeps to the column."""
    page = visit().open(path)
    page.wait_for_function(
        "document.querySelector('.bd-article').style.getPropertyValue('--kb-code')"
    )
    code = page.locator("main :not(.sphx-glr-script-out) > .highlight > pre:not(details *)")
    ends = code.evaluate_all(
        "all => all.filter(p => p.checkVisibility() && !p.closest('.sphx-glr-script-out'))"
        ".map(p => Math.round(p.getBoundingClientRect().right))"
    )
    assert ends
    assert max(ends) - min(ends) <= 1
    edge = page.locator(".kb-learn").evaluate("box => box.getBoundingClientRect().right")
    past = page.locator("main section > .kb-folds summary, main section > details > summary")
    assert [fold.inner_text() for fold in past.all() if right_of(fold) > edge + 1] == []


def right_of(element):
    box = element.bounding_box()
    return box["x"] + box["width"] if box else 0


def test_a_figure_enlarges_on_a_phone(visit):
    page = visit(width=390).open(CHAPTERS[0])
    figure = page.locator("img.kb-figure:visible").first
    for opener in (page.locator("button.kb-enlarge:visible").first, figure):
        opener.click()
        large = page.locator("dialog.kb-large img")
        assert large.bounding_box()["width"] > 1.5 * figure.bounding_box()["width"]
        page.keyboard.press("Escape")
        assert page.locator("dialog.kb-large").count() == 0
    assert visit().open(CHAPTERS[0]).locator("button.kb-enlarge").count() == 0


def test_how_results_were_made_shows_when_asked_for(visit):
    """Two buttons, at the top and below the table of contents, say the same on every page."""
    visitor = visit()
    page = visitor.open(CHAPTERS[0])
    books, buttons = page.locator("details.kb-book"), page.locator("button.kb-made")
    assert books.count()
    assert books.filter(visible=True).count() == 0
    assert buttons.count() == 2
    buttons.last.focus()
    page.keyboard.press("Enter")
    assert books.filter(visible=True).count()
    assert {button.get_attribute("aria-pressed") for button in buttons.all()} == {"true"}
    visitor.open(CHAPTERS[1])
    assert page.locator("details.kb-book").filter(visible=True).count()
    page.locator("button.kb-made").first.click()
    assert page.locator("details.kb-book").filter(visible=True).count() == 0


def test_the_code_of_a_paragraph_opens_from_its_end(visit):
    page = visit().open(CHAPTERS[0])
    page.locator("button.kb-made").first.click()
    written = page.locator(".kb-written").first
    sign = written.get_by_text("Code for this paragraph").locator("..")
    ends = written.locator(".kb-read p").evaluate("p => [...p.getClientRects()].at(-1).bottom")
    box = sign.evaluate("s => s.getBoundingClientRect().toJSON()")
    assert box["top"] < ends < box["bottom"] + box["height"], "the sign has left its paragraph"
    assert min(box["width"], box["height"]) >= 24, "a finger misses the sign"
    sign.focus()
    page.keyboard.press("Enter")
    assert written.locator(".highlight").is_visible()


@pytest.mark.parametrize("path", [p for p in CHAPTERS if re.search("fp8|dropout|roles", p)])
def test_the_labels_of_a_figure_are_legible_on_a_phone(path, visit):
    """What is wider than the phone scrolls in its box, also by keyboard, and says so."""
    page = visit(width=390).open(path)
    figures = page.locator("img.kb-figure.only-light:visible")
    for figure in figures.all():
        address = SITE / unquote(figure.get_attribute("src")).removeprefix("../")
        width = figure.bounding_box()["width"]
        assert 0.94 * width_to_read(address.read_text(encoding="utf-8")) < width
        if width > 414:  # up to 24 pixels are blank margin
            box = figure.locator("..")
            assert {"kb-pan", "kb-wide"} <= set(box.get_attribute("class").split())
            assert box.get_attribute("tabindex") == "0"
    assert figures.count()


BROKEN_NAMES = """pre => [...pre.querySelectorAll(".kb-line")].flatMap(line => {
    const walker = document.createTreeWalker(line, NodeFilter.SHOW_TEXT);
    const range = document.createRange();
    const broken = [];
    for (let first = true; walker.nextNode(); ) {
        for (const word of walker.currentNode.data.matchAll(/\\w+/g)) {
            range.setStart(walker.currentNode, word.index);
            range.setEnd(walker.currentNode, word.index + word[0].length);
            const boxes = range.getClientRects();
            const below = boxes[0].top - line.getBoundingClientRect().top > boxes[0].height;
            if (boxes.length > 1 || (first && below)) broken.push([word[0], line.innerText]);
            first = false;
        }
    }
    return broken;
})"""
"""Names of a listing that are broken, and first words that stand below an empty line."""


@pytest.mark.parametrize("stem", ["attention_backward", "transformer"])  # one numbers its lines
def test_code_on_a_phone_breaks_between_names(stem, visit):
    path = f"chapters/{stem}.html"
    if path not in CHAPTERS:
        pytest.skip(f"{path} was not built")
    wide = visit().open(path).locator("main div.highlight pre")
    phone = visit(width=390).open(path).locator("main div.highlight pre")
    texts = "all => all.map(pre => pre.textContent)"
    assert phone.evaluate_all(texts) == wide.evaluate_all(texts)
    shown = [pre for pre in phone.all() if pre.is_visible()]
    assert any(pre.locator(".kb-line").count() for pre in shown)
    assert [name for pre in shown for name in pre.evaluate(BROKEN_NAMES)] == []
    copied = """all => all.filter(pre => pre.checkVisibility()).slice(0, 5).map(pre => {
        getSelection().selectAllChildren(pre);
        return String(getSelection());
    })"""
    assert phone.evaluate_all(copied) == wide.evaluate_all(copied)


@pytest.mark.parametrize("path", CHAPTERS[:1] + [p for p in CHAPTERS if "fp8" in p])
def test_code_in_a_fold_keeps_to_the_column(path, visit):
    page = visit().open(path)
    code = page.locator("main details div.highlight pre")
    texts = "all => all.map(pre => pre.textContent)"
    before = code.evaluate_all(texts)
    page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    page.wait_for_selector("main details .kb-line")
    edge = page.locator(".kb-learn").evaluate("box => box.getBoundingClientRect().right")
    ends = code.evaluate_all(
        "all => all.filter(pre => pre.checkVisibility())"
        ".map(pre => [pre.getBoundingClientRect().right, pre.textContent])"
    )
    assert ends
    assert [text for right, text in ends if right > edge + 1] == []
    assert code.evaluate_all(texts) == before
    shown = [pre for pre in code.all() if pre.is_visible()]
    assert [name for pre in shown for name in pre.evaluate(BROKEN_NAMES)] == []
    narrower = page.locator("main :not(details *) > div.highlight pre .kb-line")
    assert narrower.count() == 0


def test_a_table_that_is_too_wide_says_so(visit):
    for width, said in ((390, True), (1280, False)):
        page = visit(width=width).open("index.html")
        box = page.locator(".pst-scrollable-table-container").first
        assert ("kb-wide" in box.get_attribute("class")) is said


def test_the_sidebar_marks_the_section_in_view(visit):
    """However the reader comes there: downwards, upwards, by a jump, or to the end of the page."""
    page = visit().open(CHAPTERS[0])
    links = page.locator("#pst-page-toc-nav a")
    hashes = links.evaluate_all("all => all.map(a => a.hash)")
    assert len(hashes) > 5
    marked = page.locator("#pst-page-toc-nav a.active[aria-current=true]")
    middle = """hash => {  // of what stands between a heading and the next
        const all = [...document.querySelectorAll("#pst-page-toc-nav a")].map(a => a.hash);
        const top = h => document.querySelector(h).getBoundingClientRect().top + scrollY;
        const next = all[all.indexOf(hash) + 1];
        scrollTo({ top: (top(hash) + top(next)) / 2 - 0.3 * innerHeight, behavior: "instant" });
    }"""
    steps = [*hashes[:-1], *hashes[-3::-1], hashes[-3], hashes[1]]
    for hash_ in steps:
        page.evaluate(middle, hash_)
        page.wait_for_timeout(100)
        assert marked.evaluate_all("all => all.map(a => a.hash)") == [hash_]
    page.evaluate("scrollTo({ top: document.body.scrollHeight, behavior: 'instant' })")
    page.wait_for_timeout(100)
    assert marked.evaluate_all("all => all.map(a => a.hash)") == hashes[-1:]


# -- the switch between GPUs, on a page of its own -------------------------------------------------


def _several_gpus():
    """A page with four groups of figures; those of the second GPU are taller."""
    groups = [("H200", "H100"), ("H200", "H100"), ("H200", "L40"), ("H200", "H100")]
    body = ""
    for number, gpus in enumerate(groups):
        for gpu in gpus:
            height = 900 if gpu == "H100" else 300
            figure = f'<p style="height:{height}px">{gpu}, figure {number}</p>'
            body += display.of_gpu(gpu, figure)
        body += "<p>Prose.</p>" if number != 1 else ""  # the second and third are neighbours
    return (
        '<!doctype html><html lang="en"><title>Trial</title><meta name="viewport" '
        'content="width=device-width"><link rel="stylesheet" href="book.css">'
        f'<script src="book.js"></script><main>{body}</main></html>'
    )


@pytest.fixture(scope="module")
def several_gpus(tmp_path_factory):
    """The address of a folder with that page, twice."""
    folder = tmp_path_factory.mktemp("several")
    for file in ("book.css", "book.js"):
        shutil.copy(SITE.parents[1] / "docs" / "_static" / file, folder)
    for name in ("one.html", "two.html"):
        (folder / name).write_text(_several_gpus(), encoding="utf-8")
    (folder / "favicon.ico").touch()
    with _served(folder) as address:
        yield address


def _shown_gpus(page):
    return page.locator(".kb-gpu:visible").evaluate_all("all => all.map(v => v.dataset.gpu)")


def _pressed(page):
    return page.locator(".kb-gpus button[aria-pressed=true]").all_inner_texts()


@pytest.mark.parametrize("anchoring", ["auto", "none"])  # some browsers keep the place themselves
def test_one_button_switches_every_figure_and_the_page_stays(browser, several_gpus, anchoring):
    with contextlib.closing(_Visit(browser, several_gpus, 390, "light").context) as context:
        page = context.pages[0]
        page.goto(several_gpus + "one.html")
        page.add_style_tag(content=f"html {{ overflow-anchor: {anchoring} }}")
        assert _shown_gpus(page) == _pressed(page) == ["H200"] * 4
        last = page.get_by_role("group", name="GPU").last.get_by_role("button", name="H100")
        last.focus()
        before = last.bounding_box()["y"]
        page.keyboard.press("Enter")
        page.wait_for_timeout(100)
        assert _shown_gpus(page) == _pressed(page) == ["H100", "H100", "H200", "H100"]
        assert last.bounding_box()["y"] == pytest.approx(before, abs=1)
        assert page.evaluate("scrollY") > 1000  # two taller figures above it
        assert last.evaluate("button => button === document.activeElement")
        assert page.evaluate("document.documentElement.scrollWidth - window.innerWidth") <= 0
        page.goto(several_gpus + "two.html")
        assert _shown_gpus(page) == _pressed(page) == ["H100", "H100", "H200", "H100"]
        page.emulate_media(media="print")
        assert _shown_gpus(page) == ["H100", "H100", "H200", "H100"]
        assert page.locator(".kb-gpus:visible").count() == 0


def test_without_javascript_every_gpu_is_shown_under_its_name(browser, several_gpus):
    with contextlib.closing(browser.new_context(java_script_enabled=False)) as context:
        page = context.new_page()
        page.goto(several_gpus + "one.html")
        variants = page.locator(".kb-gpu:visible")
        assert variants.count() == 8
        names = "all => all.map(v => getComputedStyle(v, '::before').content)"
        assert variants.evaluate_all(names)[:2] == ['"H200"', '"H100"']


class _Links(HTMLParser):
    """The links, images and anchors of a page."""

    def __init__(self, html):
        super().__init__()
        self.links, self.images, self.anchors = [], [], set()
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.anchors |= {attrs[key] for key in ("id", "name") if attrs.get(key)}
        if tag == "img":
            self.images.append(attrs)
        for key in ("href", "src") if attrs.get("rel") != "canonical" else ():
            if tag in ("a", "img", "link", "script", "source") and attrs.get(key):
                self.links.append((tag, attrs[key]))


@functools.cache
def _parsed(path):
    return _Links((SITE / path).read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", PAGES)
def test_links_and_images(path):
    """Every link within the book resolves, nothing is loaded from elsewhere, images have alt."""
    page, problems = _parsed(path), []
    for tag, link in page.links:
        parts = urlsplit(link)
        if parts.scheme in ("http", "https"):
            if tag != "a":
                problems.append(f"loads {link}")
            continue
        if parts.scheme:
            continue
        target = unquote(urlsplit(urljoin(path, link)).path) or path
        target = path if not parts.path else target
        if not (SITE / target).is_file():
            problems.append(f"{link} leads nowhere")
        elif parts.fragment and target.endswith(".html") and tag == "a":
            anchor = unquote(parts.fragment)
            if anchor not in _parsed(target).anchors:
                problems.append(f"{link}: no such place")
    for image in page.images:
        alt = (image.get("alt") or "").strip()
        stem = Path(urlsplit(image.get("src", "")).path).stem
        if len(alt) < 10 or alt in (image.get("src"), stem) or re.search(r"\.(svg|png)$", alt):
            problems.append(f"{image.get('src')} has no real alt text: {alt!r}")
    assert problems == []


@pytest.mark.parametrize("path", CHAPTERS)
def test_weight(path):
    """A chapter weighs less than 600 kB without its figures, so that a slow line shows it soon."""
    assert (SITE / path).stat().st_size < 600_000


def test_every_figure_has_a_dark_twin():
    for path in PAGES:
        images = _parsed(path).images
        light = [i["alt"] for i in images if "only-light" in i.get("class", "")]
        dark = [i["alt"] for i in images if "only-dark" in i.get("class", "")]
        assert light == dark
        assert len(light) + len(dark) == len(images)


def test_recorded_results_are_linked_files():
    """Each recorded result is in the site as it is in the repository."""
    root = SITE.parents[1] / "results"
    for file in root.rglob("*.json"):
        assert (SITE / "_results" / file.relative_to(root)).read_bytes() == file.read_bytes()
