"""What lets people use, cite, share and report the book, and a build that shows no half a site."""

import email
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from urllib.parse import parse_qs, urlsplit
from xml.etree import ElementTree

import pytest
import yaml
from bs4 import BeautifulSoup
from records import PROVENANCE, record

ROOT = Path(__file__).parents[2]
SITE = ROOT / "build" / "html"
PAGES = sorted(p for p in SITE.rglob("*.html") if "_static" not in p.parts)
CHAPTERS = sorted(p.stem for p in (ROOT / "gallery").glob("[!_]*.py"))
LICENCES = {"LICENSE": "MIT License", "LICENSE-text": "CC-BY-4.0", "LICENSE-results": "CC0-1.0"}
ADDRESS, REPOSITORY = "https://example.org/book/", "https://github.com/example/book"


def parsed(path):
    return BeautifulSoup(path.read_text(encoding="utf-8"), "html.parser")


def metadata(page):
    """The content of each meta element of a page, by name."""
    found = page.find_all("meta", content=True)
    return {m.get("property") or m.get("name"): m["content"] for m in found}


# -- licences and citation ------------------------------------------------------------------------


def test_wheel_and_zip_carry_the_licences():
    with zipfile.ZipFile(SITE / "downloads" / "kernel-book.zip") as book:
        [wheel] = [name for name in book.namelist() if name.endswith(".whl")]
        for name, words in LICENCES.items():
            assert words in book.read(f"kernel-book/{name}").decode()
        assert all(name in book.read("kernel-book/README.txt").decode() for name in LICENCES)
        with book.open(wheel) as file, zipfile.ZipFile(file) as package:
            [about] = [n for n in package.namelist() if n.endswith(".dist-info/METADATA")]
            said = email.message_from_bytes(package.read(about))
            carried = {Path(n).name for n in package.namelist() if "/licenses/" in n}
    assert said["License-Expression"] == "MIT AND CC-BY-4.0 AND CC0-1.0"
    assert set(said.get_all("License-File")) == carried == set(LICENCES)


def test_every_page_names_the_licences():
    for path in PAGES:
        footer = path.read_text(encoding="utf-8").rpartition("<footer")[2]
        links = re.findall(r'<a rel="license" href="https://[^"]+">([^<]+)</a>', footer)
        assert links == ["MIT", "CC BY 4.0", "CC0 1.0"], path


def test_citation_is_valid_and_agrees_with_the_page_and_the_package():
    about = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert about["cff-version"] == "1.2.0"
    assert about["type"] == "software"
    assert about["message"]
    assert all(author["name"] for author in about["authors"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", about["date-released"])
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert about["version"] == project["version"]
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"## {about['version']}, {about['date-released']}\n" in changes
    entry = parsed(SITE / "references.html").select_one(".highlight-bibtex").get_text()
    fields = dict(re.findall(r"(\w+) = \{(.*)\},\n", entry))
    assert entry.startswith("@misc{kernelbook,")
    assert fields["author"] == "{" + about["authors"][0]["name"] + "}"
    assert fields["title"] == "{" + about["title"] + "}"
    assert fields["year"] == about["date-released"][:4]
    assert fields["note"] == f"Version {about['version']}"


# -- sharing --------------------------------------------------------------------------------------


def test_every_page_has_a_title_and_a_description_for_its_link():
    for path in PAGES:
        head = path.read_text(encoding="utf-8").partition("</head>")[0]
        found = metadata(BeautifulSoup(head, "html.parser"))
        assert found["og:title"], path
        assert found["og:description"] == found["description"], path
        assert len(found["description"]) > 20, path
    assert (SITE / "sitemap.xml").exists() == bool(os.environ.get("KERNELBOOK_URL"))
    assert (SITE / "robots.txt").exists()


@pytest.mark.parametrize("stem", CHAPTERS)
def test_a_chapter_is_described_by_its_first_paragraph(stem):
    page = parsed(SITE / "chapters" / f"{stem}.html")
    first = page.select_one("article section > p:not(.kb-path)").get_text()
    found = metadata(page)
    assert found["og:description"] == " ".join(first.split())
    assert page.find("h1").get_text().startswith(found["og:title"])


def test_a_published_site_has_pictures_a_sitemap_and_reports(tmp_path):
    """A small book, built as a site whose address and repository are known."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "gallery").mkdir()
    (tmp_path / "gallery" / "README.md").write_text("# Chapters\n")
    (tmp_path / "gallery" / "trial.py").write_text('"""\nA & B\n=====\n\nOne *idea*.\n"""\n')
    (tmp_path / "docs" / "index.rst").write_text(
        "Book\n====\n\nAbout.\n\n.. toctree::\n\n   chapters/trial\n"
    )
    (tmp_path / "results" / "nvidia-h200").mkdir(parents=True)
    made = PROVENANCE | {"gpu": "NVIDIA H200", "slug": "nvidia-h200"}
    measured = record(["kernelbook.ops.dropout"], chapter="trial", provenance=made)
    (tmp_path / "results" / "nvidia-h200" / "trial.json").write_text(json.dumps(measured))
    site = tmp_path / "site"
    variables = {
        "KERNELBOOK_URL": ADDRESS.rstrip("/"),
        "KERNELBOOK_REPOSITORY": REPOSITORY,
        "KERNELBOOK_RESULTS": str(tmp_path / "results"),
        "KERNELBOOK_COMMIT": "abc1234",
        "KERNELBOOK_MODE": "replay",
    }
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", "-W", "-b", "html", "-c", ROOT, tmp_path / "docs", site],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr

    page = parsed(site / "chapters" / "trial.html")
    found = metadata(page)
    assert found["og:title"] == "A & B"
    assert found["og:description"] == "One idea."
    assert found["og:url"] == f"{ADDRESS}chapters/trial.html"
    assert page.select_one("link[rel=canonical]")["href"] == found["og:url"]
    assert found["og:image"].startswith(ADDRESS)
    png = (site / found["og:image"].removeprefix(ADDRESS)).read_bytes()
    assert png.startswith(b"\x89PNG")
    assert struct.unpack(">II", png[16:24]) == (1200, 630)

    tree = ElementTree.parse(site / "sitemap.xml")
    listed = {location.text for location in tree.findall(".//{*}loc")}
    assert listed == {f"{ADDRESS}index.html", f"{ADDRESS}chapters/trial.html"}
    assert f"Sitemap: {ADDRESS}sitemap.xml\n" in (site / "robots.txt").read_text()

    report = urlsplit(page.select_one(".kb-report")["href"])
    assert report.geturl().startswith(f"{REPOSITORY}/issues/new?")
    fields = parse_qs(report.query)
    assert fields["title"] == ["A & B: "]
    [body] = fields["body"]
    assert f"Page: {ADDRESS}chapters/trial.html\n" in body
    assert "commit: abc1234\n" in body
    assert "Measured on: NVIDIA H200 at commit " in body


# -- the book as one file -------------------------------------------------------------------------


def test_text_holds_every_chapter_with_formulas_code_and_results():
    text = (SITE / "downloads" / "kernel-book.txt").read_text(encoding="utf-8")
    for stem in CHAPTERS:
        page = parsed(SITE / "chapters" / f"{stem}.html")
        assert f"\n# {page.find('h1').get_text().removesuffix('#')}\n" in text
        shown = page.select(".sphx-glr-script-out pre") + page.select(".kb-source pre")
        for code in shown:
            if not code.find_parent(class_="kb-gpu"):
                assert code.get_text().strip("\n") in text
    assert "$$\n" in text
    assert "\n| --- |" in text
    prose = re.sub(r"(?s)```.*?```|`[^`]*`", "", text)
    assert not re.search(r"</?(div|span|p|table|details|img)\b", prose)
    assert 'href="downloads/kernel-book.txt"' in (SITE / "start.html").read_text(encoding="utf-8")


# -- a build beside the site ----------------------------------------------------------------------


def test_a_failed_build_keeps_the_old_site_and_a_good_one_replaces_it(tmp_path):
    shutil.copy(ROOT / "Makefile", tmp_path)
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\nfor site; do :; done\nmkdir -p "$site"\n$BUILD\n')
    python.chmod(0o755)
    old = tmp_path / "build" / "html"
    old.mkdir(parents=True)
    (old / "old.html").touch()
    variables = {k: v for k, v in os.environ.items() if not k.startswith("MAKE")}

    def make(build):
        command = ["make", "html", "VENV=", f"PYTHON={python}"]
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env=variables | {"BUILD": build},
            capture_output=True,
            check=False,
        )
        return done.returncode

    assert make("exit 1") != 0
    assert [file.name for file in old.iterdir()] == ["old.html"]
    assert not (tmp_path / "build" / ".built").exists()
    assert make("touch build/html.new/new.html") == 0
    assert [file.name for file in old.iterdir()] == ["new.html"]
    assert sorted(p.name for p in (tmp_path / "build").iterdir()) == [".built", "html"]
