"""The chapter on measuring: its roofline holds every operator, and a missing tool is said."""

import ast
import csv
import os
import re
import subprocess
import sys
from html import unescape
from pathlib import Path

import numpy
import pytest

from kernelbook.lab import results
from kernelbook.lab.schema import evaluate

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "gallery" / "measuring.py"
PAGE = ROOT / "build" / "html" / "chapters" / "measuring.html"


def parts(*names):
    """Some functions and tables of the chapter's script, by name."""
    space = {"csv": csv, "os": os, "re": re, "subprocess": subprocess, "sys": sys}
    space |= {"evaluate": evaluate, "numpy": numpy, "results": results}
    for node in ast.parse(SCRIPT.read_text(encoding="utf-8")).body:
        bound = [target.id for target in getattr(node, "targets", ()) if hasattr(target, "id")]
        if {getattr(node, "name", None), *bound} & set(names):
            exec(ast.unparse(node), space)
    return [space[name] for name in names]


OPERATORS, _, recorded_points = parts("OPERATORS", "SIZES", "recorded_points")
RECORDS = [
    record
    for record in results.recorded()
    if record["provenance"]["slug"] == results.PRIMARY
    and record["chapter"] != "transformer"  # a model, of the operators of other chapters
]
POINTS = list(recorded_points(RECORDS[0]["provenance"]["gpu"]))


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record["chapter"])
def test_every_recorded_operator_is_on_the_roofline(record):
    placed = {
        (sweep, provider)
        for chapter, sweep, provider, _ in OPERATORS.values()
        if record["chapter"].startswith(chapter)
    }
    operators = {
        (sweep, provider)
        for sweep in record["sweeps"].keys() & {"forward", "backward", "fp8"}
        for provider in {"Kernel Book", "all in FP8"} & set(record["sweeps"][sweep]["providers"])
    }
    assert operators <= placed


def test_each_operator_stands_where_its_formulas_say():
    found = {}
    for name, intensity, speed in POINTS:
        found.setdefault(name, set()).add(intensity)
        assert speed > 0
    assert found["dropout"] == {1 / 4}  # one multiplication, two bytes read and two written
    assert found["softmax"] == {5 / 4}
    assert found["softmax, back"] == {4 / 6}
    lengths = {1024, 4096, 16384}
    assert found["attention"] == {n / 2 * part for n in lengths for part in (0.5, 1)}


def test_the_page_shows_every_point():
    alts = re.findall(r'<img alt="([^"]*)"', PAGE.read_text(encoding="utf-8"))
    [roofline] = {unescape(alt) for alt in alts if "and the roofline" in alt}
    for name in {name for name, *_ in POINTS}:
        assert re.search(rf"{re.escape(name)} at [\d,. to]+ FLOPs per byte reaches \d", roofline)


NCU = """#!/bin/sh
echo '==PROF== Connected to process 7'
echo '"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"'
echo '"0","row_fwd_kernel","dram__bytes_read.sum","byte","268,435,456"'
echo '"1","online_fwd_kernel","dram__bytes_read.sum","byte","268,435,464"'
echo '"1","online_fwd_kernel","dram__bytes_write.sum","byte","268,435,464"'
"""
ANOTHER = """#!/bin/sh
echo '"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"'
echo '"0","row_fwd_kernel","dram__bytes_read.sum","byte","268,435,456"'
"""
REFUSED = "#!/bin/sh\necho '==ERROR== ERR_NVGPUCTRPERM - no permission'\nexit 1\n"


@pytest.mark.parametrize(
    ("tool", "row"),
    [
        (None, ("absent", 0, 0, "", "ncu is not installed")),
        (REFUSED, ("absent", 0, 0, "", "ncu: ERR_NVGPUCTRPERM - no permission")),
        (ANOTHER, ("absent", 0, 0, "", "ncu did not name both kernels")),
        (NCU, ("read from HBM", 2**28, 2**28 + 8, "byte", "dram__bytes_read.sum")),
    ],
    ids=["absent", "refused", "one kernel of two", "present"],
)
def test_counters_are_read_or_their_absence_is_said(tool, row, monkeypatch, tmp_path):
    *_, counters = parts("COUNTERS", "KERNELS", "PROFILED", "ncu", "counters")
    if tool:
        (tmp_path / "ncu").write_text(tool)
        (tmp_path / "ncu").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert [tuple(found.values()) for found in counters()] == [row]
