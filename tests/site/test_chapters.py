"""The chapters: what a reader downloads runs by itself, and what must stop a build stops it."""

import ast
import json
import os
import pickle
import re
import subprocess
import sys
import zipfile
from html import unescape
from pathlib import Path

import nbclient
import nbformat
import pytest
from records import PROVENANCE, record
from sphinx_gallery.py_source_parser import split_code_and_text_blocks

ROOT = Path(__file__).parents[2]
DOWNLOADS = ROOT / "build" / "html" / "downloads"
CHAPTERS = sorted(p.stem for p in (ROOT / "gallery").glob("[!_]*.py"))
NOTEBOOKS = ["softmax"]
"""Those that are run: each notebook has the code of its script, and every script is run."""

LEFTOVERS = {
    "directive": r"(?m)^\s*\.\. [\w-]+::",
    "comment or target": r"(?m)^\s*\.\. ",
    "role": r":[a-z:]+:`",
    "literal block mark": r"(?m)::\s*$",
    "link": r"`_+(\W|$)",
    "double backquotes": r"(?<!`)``(?!`)",
    "heading underline": r"(?m)^([=\-~^\"])\1{3,}$",
    "HTML": r"(?i)</?(div|span|p|img|table|details|br|h\d)\b",
}


# -- what is written ------------------------------------------------------------------------------

SHOWN = {"table", "read", "check", "source", "listing", "rows"}
"""Functions of the lab whose result a page shows only where it is the last of its cell."""


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_nothing_that_a_cell_shows_is_lost(chapter):
    """The site shows the last value of a cell alone, while a script prints all that it shows."""
    _, blocks = split_code_and_text_blocks(str(ROOT / "gallery" / f"{chapter}.py"))
    lost = [
        f"line {block.lineno + call.lineno - 1}: {ast.unparse(call)[:60]}"
        for block in blocks
        if block.type == "code"
        for call in ast.parse(block.content).body[:-1]
        if isinstance(call, ast.Expr) and isinstance(call.value, ast.Call)
        if re.match(rf"lab\.({'|'.join(SHOWN)})\(", ast.unparse(call))
    ]
    assert not lost


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_every_fold_with_a_title_holds_something(chapter):
    """What measures is hidden in a fold, which is empty unless its cell ends in what it shows."""
    _, blocks = split_code_and_text_blocks(str(ROOT / "gallery" / f"{chapter}.py"))
    cells = [b for b in blocks if b.type == "code" and b.content.lstrip().startswith("# Folded:")]
    empty = [
        f"line {cell.lineno}"
        for cell in cells
        if not isinstance(ast.parse(cell.content).body[-1], ast.Expr)
        if not re.search(r"lab\.(plot|draw|sketch|ladder)\(|print\(|talking_kernel", cell.content)
    ]
    assert not empty


# -- what is downloaded ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def book(tmp_path_factory):
    """kernel-book.zip, unpacked as a reader would."""
    folder = tmp_path_factory.mktemp("download")
    with zipfile.ZipFile(DOWNLOADS / "kernel-book.zip") as archive:
        archive.extractall(folder)
    return folder / "kernel-book"


@pytest.fixture(scope="module")
def environment(book, tmp_path_factory):
    """Environment variables under which the only kernelbook is the shipped wheel."""
    installed = tmp_path_factory.mktemp("installed")
    [wheel] = book.glob("*.whl")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--target", installed, wheel], check=True)
    variables = {k: v for k, v in os.environ.items() if not k.startswith("KERNELBOOK")}
    variables |= {"PYTHONPATH": str(installed), "KERNELBOOK_MODE": "replay", "MPLBACKEND": "agg"}
    where = "import kernelbook; print(kernelbook.__file__)"
    found = subprocess.run(
        [sys.executable, "-c", where],
        env=variables,
        cwd=installed.parent,
        capture_output=True,
        text=True,
        check=True,
    )
    assert Path(found.stdout.splitlines()[-1]).is_relative_to(installed)
    return variables


def test_zip_holds_the_whole_book(book):
    files = {p.relative_to(book).as_posix() for p in book.rglob("*") if p.is_file()}
    wheels = {name for name in files if name.endswith(".whl")}
    results = {p.relative_to(ROOT).as_posix() for p in (ROOT / "results").rglob("*.json")}
    chapters = {f"{stem}.{kind}" for stem in CHAPTERS for kind in ("py", "ipynb")}
    assert len(wheels) == 1
    licences = {"LICENSE", "LICENSE-text", "LICENSE-results"}
    assert files == wheels | results | chapters | licences | {"README.txt"}
    assert wheels.pop() in (book / "README.txt").read_text(encoding="utf-8")


def test_wheel_holds_the_package_and_the_results(book):
    [wheel] = book.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    source = ROOT / "src"
    assert {p.relative_to(source).as_posix() for p in source.rglob("*.py")} <= names
    for file in (ROOT / "results").rglob("*.json"):
        assert f"kernelbook/_results/{file.relative_to(ROOT / 'results').as_posix()}" in names
    assert not [name for name in names if name.endswith(".pyc")]


@pytest.mark.parametrize("stem", CHAPTERS)
def test_script_runs_with_the_wheel_alone(stem, book, environment, tmp_path):
    script = (book / f"{stem}.py").read_bytes()
    (tmp_path / f"{stem}.py").write_bytes(script)
    done = subprocess.run(
        [sys.executable, f"{stem}.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert done.stdout.strip()


@pytest.mark.parametrize("stem", CHAPTERS)
def test_a_notebook_has_the_code_of_its_script(stem, book):
    notebook = nbformat.read(book / f"{stem}.ipynb", as_version=4)
    cells = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    _docstring, *script = ast.parse((book / f"{stem}.py").read_text(encoding="utf-8")).body
    code = ast.parse(re.sub(r"(?m)^%.*$", "", "\n".join(cells))).body  # without Jupyter's own
    assert [ast.unparse(line) for line in code] == [ast.unparse(line) for line in script]


@pytest.mark.filterwarnings("ignore")  # Jupyter's own
@pytest.mark.parametrize("stem", NOTEBOOKS)
def test_notebook_runs_with_the_wheel_alone(stem, book, environment, tmp_path):
    notebook = nbformat.read(book / f"{stem}.ipynb", as_version=4)
    where = {"metadata": {"path": str(tmp_path)}}
    client = nbclient.NotebookClient(notebook, timeout=280, kernel_name="python3", resources=where)
    client.execute(env=environment)
    shown = [o for c in notebook.cells for o in c.get("outputs", ()) if o.output_type != "stream"]
    assert shown


@pytest.mark.parametrize("stem", CHAPTERS)
def test_notebook_is_clean(stem, book):
    notebook = nbformat.read(book / f"{stem}.ipynb", as_version=4)
    nbformat.validate(notebook)
    assert_no_markup_left(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert "sphinx_gallery_" not in cell.source
            solution = cell.source.startswith("# Solution:")
            assert not solution or cell.metadata["jupyter"]["source_hidden"]


@pytest.mark.parametrize("stem", CHAPTERS)
def test_a_notebook_holds_the_outputs_of_its_page(stem, book):
    """The same figures, tables and printed lines, in their order, and no link out of the file."""
    page = (ROOT / f"build/html/chapters/{stem}.html").read_text(encoding="utf-8")
    notebook = nbformat.read(book / f"{stem}.ipynb", as_version=4)
    outputs = [o for c in notebook.cells if c.cell_type == "code" for o in c.outputs]
    data = [output.data for output in outputs if output.output_type == "display_data"]
    figures = [shown["text/plain"] for shown in data if "image/svg+xml" in shown]
    on_page = re.findall(r'<img alt="([^"]*)" class="[^"]*kb-figure[^"]*only-light', page)
    assert figures == [unescape(alt) for alt in on_page]
    assert len(figures) > 2
    tables = [shown["text/html"] for shown in data if "text/html" in shown]
    assert "".join(tables).count("<table>") == page.count("<table>") > 2
    assert not any('href="../' in table for table in tables)


def assert_no_markup_left(notebook):
    """No prose of the notebook holds reStructuredText or HTML."""
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            prose = re.sub(r"(?s)```.*?```|\(data:[^)]*\)", "", cell.source)
            for kind, pattern in LEFTOVERS.items():
                assert not re.search(pattern, prose), f"{kind} left in: {prose}"


@pytest.mark.parametrize("stem", ["attention_hopper", "warps_with_roles"])
def test_listings_of_rungs_hold_no_stamps(stem):
    """They choose their lines by number, which an edit of the kernel would shift."""
    page = (ROOT / "build" / "html" / "chapters" / f"{stem}.html").read_text("utf-8")
    listings = re.findall(r'(?s)<div class="highlight-python .*?</pre>', page)
    pieces = [listing for listing in listings if "def" not in listing]
    assert sum("warpgroup_mma_wait" in piece for piece in pieces) == 3
    assert not any(re.search("stamp|note_progress|clock", piece) for piece in pieces)


# -- what stops a build ---------------------------------------------------------------------------

PROSE = '''r"""
Trial
=====

Does :math:`a + b`, survive, and :func:`kernelbook.dropout`, and ``code``?
"""
print("first cell")  # fmt: skip

# %%
# A section
# ---------
#
# .. math::
#    :label: sum
#
#    a &= b \\\\
#    c &= d
#
# .. tip:: A `link <https://example.org>`_ in **bold**, and :doc:`/index`.
#
# .. list-table::
#    :header-rows: 1
#
#    * - name
#      - value
#    * - x|y
#      - 1
#
# 1. One
#
#    - nested
# 2. Two
#
# .. code-block:: python
#
#    1 + 1
#
# .. code-block:: python
#    :linenos:
#
#    2 + 2
#    3 + 3
#
# .. code-block:: python
#
#    4 + 4  # fmt: skip
#
# .. dropdown:: For a second reading
#
#    These words are folded.

# Solution: add
print("solved")

# %%

# Reading
from kernelbook import lab

lab.read("Two is **more** than one.")

# %%

# Folded: The function whole
lab.source(lab.note)
'''
FOLDS = '''"""
Trial
=====
"""
from kernelbook import lab

# %%

# Measuring
one = 1

# %%

# Folded: The book's number
lab.table([{"one": one}], "One")

# %%

# Measuring
lab.table([{"two": 2}], "Two")

# %%

# Measuring
three = 3

# %%
# Prose.

lab.table([{"three": three}], "Three")
'''
SEVERAL_GPUS = '''"""
Trial
=====
"""
import torch

from kernelbook import lab

lab.start("trial", "kernelbook.ops.dropout")

# %%

# Drawing
points = [{"elements": n, "dtype": torch.float16} for n in (1000, 2000)]
speed = lab.bench("forward", points, None, limit="copy", work="2 * elements * itemsize")
lab.plot(speed, "Speed")
lab.plot(speed, "Share", share=True)

# %%
# A table.

lab.measure("memory", None)
'''
FAILING = '''"""
Trial
=====
"""
import torch

from kernelbook import lab

lab.start("dropout")
one = torch.ones(4, dtype=torch.float64)
lab.check("wrong", [lab.Case("(4,)", "forward", 2 * one.float(), one.float(), one)])
'''


@pytest.fixture
def build(tmp_path):
    """A function that builds a book of one chapter with the real configuration."""

    def run(chapter, record=None, other=None, builder="dummy", awaited=None):
        for folder in ("docs", "gallery", "results/nvidia-h200", "results/a-gpu"):
            (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / "docs/index.rst").write_text(
            "Trial book\n==========\n\n.. toctree::\n\n   chapters/trial\n"
        )
        (tmp_path / "gallery/README.md").write_text("# Chapters\n")
        (tmp_path / "gallery/trial.py").write_text(chapter)
        for slug, text in (("nvidia-h200", record), ("a-gpu", other)):
            if text is not None:
                (tmp_path / f"results/{slug}/trial.json").write_text(text)
        if awaited:
            (tmp_path / "results/awaited.json").write_text(json.dumps(awaited))
        command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-b", builder]
        variables = {"KERNELBOOK_RESULTS": str(tmp_path / "results"), "KERNELBOOK_MODE": "replay"}
        return subprocess.run(
            [*command, "-c", ROOT, tmp_path / "docs", tmp_path / "out"],
            cwd=tmp_path,
            env=os.environ | variables,
            capture_output=True,
            text=True,
            check=False,
        )

    return run


def record_of(gpu="NVIDIA H200", **changes):
    """A results file for the chapter `trial`, measured at the code at hand unless changed."""
    provenance = PROVENANCE | {"gpu": gpu, "slug": gpu.lower().replace(" ", "-")}
    about = {"chapter": "trial", "provenance": provenance}
    return json.dumps(record(["kernelbook.ops.dropout"], **about | changes))


def test_build_and_notebook_of_a_good_chapter(build, tmp_path):
    done = build(PROSE, record_of(), builder="html")
    assert done.returncode == 0, done.stdout + done.stderr
    notebook = nbformat.read(tmp_path / "out/downloads/trial.ipynb", as_version=4)
    assert_no_markup_left(notebook)
    prose = "\n".join(c.source for c in notebook.cells if c.cell_type == "markdown")
    for words in (
        "# Trial",
        "Does $a + b$, survive, and `kernelbook.dropout()`, and `code`?",
        "## A section",
        r"\begin{aligned}",
        "[link](https://example.org) in **bold**, and Trial book",
        "| name | value |\n| --- | --- |\n| x\\|y | 1 |",
        "1. One\n\n   - nested\n2. Two",
        "```python\n1 + 1\n```",
        "```python\n 1  2 + 2\n 2  3 + 3\n```",
    ):
        assert words in prose
    hidden = [c.source for c in notebook.cells if "jupyter" in c.metadata]
    firsts = ["# Solution: add", "# Reading", "# Folded: The function whole"]
    assert [source.split("\n")[0] for source in hidden] == firsts
    page = (tmp_path / "out/chapters/trial.html").read_text(encoding="utf-8")
    assert "first cell" in page
    assert re.search(r'<span class="kb-nowrap"><span [^>]*>[^<]*a \+ b[^<]*</span>,</span>', page)
    assert "fmt: skip" not in page
    assert '<details class="kb-solution"><summary>Solution: add</summary>' in page
    assert page.index('<div class="kb-read">') < page.index('<details class="kb-code">')
    assert '<details class="kb-code"><summary>The function whole</summary><div hidden>' in page
    metadata = pickle.loads((tmp_path / "out/.doctrees/environment.pickle").read_bytes()).metadata
    about = metadata["chapters/trial"]
    listings = ["1 + 1", "2 + 2", "3 + 3", "4 + 4"]
    assert about["amount"]["lines of code"] == len(["print", "first cell", *listings])


def test_only_what_is_not_folded_takes_time_to_read(build, tmp_path):
    """More words in a fold change no count, and more words in sight change it by their number."""
    short, long = "These words are folded.", "These words are folded, and so are five more."
    counted = []
    seen = PROSE.replace("Does :math:", "Tell me: does :math:")
    for chapter in (PROSE, PROSE.replace(short, long), seen):
        done = build(chapter, record_of())
        assert done.returncode == 0, done.stdout + done.stderr
        environment = (tmp_path / "out/.doctrees/environment.pickle").read_bytes()
        counted.append(pickle.loads(environment).metadata["chapters/trial"]["amount"])
    assert counted[0] == counted[1]
    assert counted[2] == counted[0] | {"words": counted[0]["words"] + 2}


def test_folds_of_one_result_are_one_fold(build, tmp_path):
    """What measured stands in the fold of its result, or with the fold of its label before it."""
    done = build(FOLDS, record_of(), builder="html")
    assert done.returncode == 0, done.stdout + done.stderr
    page = (tmp_path / "out/chapters/trial.html").read_text(encoding="utf-8")
    titles = re.findall("<summary>(.*?)</summary>", page)
    assert titles == [
        "About this run",
        "The book’s number",
        *["How this was measured"] * 2,
        "How this table was made",
    ]
    first, second, third = page.split("<summary>")[2:5]
    assert "<caption>One</caption>" in first
    assert "</details>" not in first
    assert "</details>" in second.split("<div hidden>")[0]
    assert "<caption>Two</caption>" in second.split("<summary>")[0]
    assert "three = 3" in re.sub("<[^>]*>", "", third)
    notebook = nbformat.read(tmp_path / "out/downloads/trial.ipynb", as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    code = "\n".join(cell.source for cell in cells)
    places = [code.index(part) for part in ("one = 1", '"One"', '"Two"', "three = 3", '"Three"')]
    assert places == sorted(places)
    shown = ["".join(str(out) for out in cell.outputs) for cell in cells]
    for cell, out in zip(cells, shown, strict=True):
        for number in ("One", "Two", "Three"):
            assert (f'"{number}"' in cell.source) == (f"<caption>{number}<" in out)


def test_failing_check_stops_the_build(build):
    done = build(FAILING)
    assert done.returncode != 0
    assert "CheckFailed" in done.stdout + done.stderr


@pytest.mark.parametrize("where", ["fingerprint", "script"])
def test_edited_kernel_stops_the_build(where, build):
    done = build(PROSE, record_of(**{where: "0" * 64}))
    assert done.returncode != 0
    assert "nvidia-h200/trial.json is out of date" in done.stderr


def test_a_page_that_waits_for_a_gpu_says_what_has_changed(build, tmp_path):
    old, why = record_of(fingerprint="0" * 64), "Rows of one number were wrong."
    done = build(SEVERAL_GPUS, old, awaited={"trial": why}, builder="html")
    assert done.returncode == 0, done.stdout + done.stderr
    page = (tmp_path / "out/chapters/trial.html").read_text(encoding="utf-8")
    assert f"OUT OF DATE: the code has changed since. {why}" in page


def test_a_page_that_waits_for_nothing_stops_the_build(build):
    done = build(PROSE, record_of(), awaited={"trial": "Nothing has changed."})
    assert done.returncode != 0
    assert "says that trial is out of date, which it is not" in done.stderr


def test_figures_and_tables_of_another_gpu_stand_behind_a_switch(build, tmp_path):
    other = record_of("A GPU", fingerprint="0" * 64)  # an older kernel, which stops nothing there
    done = build(SEVERAL_GPUS, record_of(), other, builder="html")
    assert done.returncode == 0, done.stdout + done.stderr
    page = (tmp_path / "out/chapters/trial.html").read_text(encoding="utf-8")
    before, *variants = page.split('<div class="kb-gpu" data-gpu="')
    gpus = [variant.split('"')[0] for variant in variants]
    assert gpus == ["NVIDIA H200", "A GPU"] * 3  # two figures and a table
    for number, variant in enumerate(variants[:4]):
        inside = variant.split("</div>")[0]
        slug = ["nvidia-h200", "a-gpu"][number % 2]
        assert inside.count("<img") == 2  # one for each theme
        assert f'href="../_results/{slug}/trial.json">Raw data of this figure' in inside
    code = "<summary>Code for this figure</summary>"
    assert code not in before
    assert variants[3].index("</div>") < variants[3].index(code)
    assert ["older kernel" in variant for variant in variants] == [False, True] * 3
    said = "The text speaks of NVIDIA H200."
    assert [said in variant for variant in variants] == [False, True] * 3
    assert "OUT OF DATE" not in page
    images = sorted(path.name for path in (tmp_path / "docs/chapters/images").glob("*.svg"))
    numbered = [
        f"sphx_glr_trial_00{number}{end}.svg" for number in (1, 2) for end in ("", "_a-gpu")
    ]
    assert images == numbered  # thumbnails are chosen by number


def test_a_page_whose_text_reads_old_numbers_stops_the_build(build):
    done = build(SEVERAL_GPUS, record_of(fingerprint="0" * 64), record_of("A GPU"))
    assert done.returncode != 0
    assert "trial.rst: WARNING: shows recorded numbers that are out of date" in done.stderr
    assert "a-gpu/trial.json" not in done.stderr


def test_truncated_results_stop_the_build(build):
    done = build(PROSE, record_of()[:-20])
    assert done.returncode != 0
    assert "nvidia-h200/trial.json" in done.stderr
