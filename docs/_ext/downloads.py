"""What the built site carries beside its pages: downloads, recorded results, MathJax, type."""

import base64
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from pathlib import Path

import notebooks
import plaintext
from chapters import is_chapter
from sphinx.util import logging
from support import tested_with

logger = logging.getLogger(__name__)

README = """\
Kernel Book
===========
Every chapter as a script and as a notebook, the package that they use, and the
measurements that they draw when there is no GPU.

    python3 -m venv venv
    . venv/bin/activate
    pip install {wheel}
    python {chapter}.py

This needs Linux and Python 3.11 or newer. pip brings torch and triton with it: some
gigabytes if torch comes with CUDA. Without a GPU the kernels run in Triton's
interpreter, and figures show recorded results. With one, each chapter writes what it
measured to kernel-book-results/.

{tested}

Code: MIT licence (LICENSE). Text and figures: CC BY 4.0 (LICENSE-text). Recorded results:
CC0 1.0 (LICENSE-results). Nothing in this archive was made by others; what the site ships of
others (MathJax, the theme and its fonts) is listed at the foot of its page "References".
"""


def wheel_name(root):
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return f"{project['name']}-{project['version']}-py3-none-any.whl"


def build_wheel(root, target):
    """Build the package's wheel into the folder `target`, without a network."""
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel"]
    command += ["--directory", str(target)]
    result = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    if result.returncode:
        raise RuntimeError(f"the wheel could not be built:\n{result.stdout}{result.stderr}")
    return target / wheel_name(root)


def write_zip(path, files):
    """Write `files`, a mapping of name to file, under one folder of a zip archive."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, file in files.items():
            archive.write(file, f"kernel-book/{name}")


def write_downloads(app, root):
    """Write downloads/: each chapter twice, everything as a zip, and the text as one file."""
    target = Path(app.outdir, "downloads")
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    stems = [Path(name).name for name in sorted(app.env.found_docs) if is_chapter(name)]
    files = {}
    for stem in stems:
        script = Path(app.srcdir, "chapters", f"{stem}.py")
        files[script.name] = Path(shutil.copy(script, target))
        files[f"{stem}.ipynb"] = target / f"{stem}.ipynb"
        notebooks.write(app.env, f"chapters/{stem}", target / f"{stem}.ipynb", wheel_name(root))
    results = root / "results"
    files |= {p.relative_to(root).as_posix(): p for p in sorted(results.rglob("*.json"))}
    files |= {p.name: p for p in sorted(root.glob("LICENSE*"))}
    with tempfile.TemporaryDirectory() as scratch:
        wheel = build_wheel(root, Path(scratch))
        files[wheel.name] = wheel
        files["README.txt"] = Path(scratch, "README.txt")
        files["README.txt"].write_text(
            README.format(
                wheel=wheel.name,
                chapter=stems[0] if stems else "chapter",
                tested="\n".join(f"{stem}: {tested_with(app, stem)}" for stem in stems),
            ),
            encoding="utf-8",
        )
        write_zip(target / "kernel-book.zip", files)
    plaintext.write(app, target / "kernel-book.txt")


def copy_results(app, root):
    """Copy the recorded results beside the pages that link to them."""
    target = Path(app.outdir, "_results")
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(root / "results", target, ignore=shutil.ignore_patterns("*.md"))


def copy_mathjax(app):
    """Copy the part of MathJax that the book uses: TeX in, HTML out, and its fonts."""
    [source] = importlib.util.find_spec("sphinx-mathjax-offline").submodule_search_locations
    source, target = Path(source, "static", "mathjax"), Path(app.outdir, "_static", "mathjax")
    for part in ("tex-chtml.js", "output/chtml/fonts/woff-v2"):
        (target / part).parent.mkdir(parents=True, exist_ok=True)
        if (source / part).is_dir():
            shutil.copytree(source / part, target / part, dirs_exist_ok=True)
        else:
            shutil.copy(source / part, target / part)


def set_type(app):
    """Put the page's sans-serif into every SVG: a picture cannot use the fonts of its page."""
    font = Path(app.confdir, "docs", "_static", "fonts", "figures.woff2").read_bytes()
    source = f"data:font/woff2;base64,{base64.b64encode(font).decode()}"
    style = (
        f"<style>@font-face{{font-family:kb;font-weight:400 700;src:url({source})}}"
        "text,text *{font-family:kb,system-ui,sans-serif!important}</style>"
    )
    for path in Path(app.outdir, "_images").glob("*.svg"):
        svg = path.read_text(encoding="utf-8")
        if "font-family:kb" not in svg:
            opened = svg.index(">", svg.index("<svg")) + 1
            path.write_text(svg[:opened] + style + svg[opened:], encoding="utf-8")


def on_build_finished(app, exception):
    if exception is None and app.builder.format == "html":
        root = Path(app.confdir)
        set_type(app)
        copy_mathjax(app)
        copy_results(app, root)
        logger.info("writing downloads")
        write_downloads(app, root)


def setup(app):
    app.connect("build-finished", on_build_finished)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
