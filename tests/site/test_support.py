"""What the book says of GPUs: what was measured and tested there, compiled only, or refused."""

import json
from types import SimpleNamespace

import pytest
import support
from records import record

from kernelbook.lab import results
from kernelbook.lab.fingerprint import fingerprint

FITS = {"kernels": 2, "shared": 1024}
NO_GRADIENT = {"refused": "ValueError: the gradient of attention needs more than there is"}
NO_FP8 = {"refused": "ValueError: An old GPU has no FP8 products"}


@pytest.fixture
def app(root, module, tmp_path):
    """A book whose tests ran on one GPU, and whose kernels were compiled for another."""
    results.save(record())
    run = {"failed": 0, "passed": 7, "skipped": 1, "module": "measured_module"}
    run |= {"torch": "2.13.0", "python": "3.12.3"}
    run["fingerprint"] = fingerprint(["measured_module"])
    tested = {"3.6.0": {"dropout": run}, "3.9.0": {"dropout": run, "softmax": run | {"failed": 2}}}
    cases = {"softmax float32 8": FITS, "attention float32 64": FITS, "fp8 float8 64": NO_FP8}
    cases["attention float32 256"] = NO_GRADIENT
    cases["attention in Gluon float16 64 full"] = FITS
    cases["attention in Gluon float16 64 causal"] = {"kernels": 0}
    cases["attention backward in Gluon bfloat16 64 full"] = FITS
    compiled = {"sm_1": {"gpu": "An old GPU", "triton": "3.7.1", "cases": cases}}
    folder = tmp_path / "tests"
    folder.mkdir()
    (folder / "tested.json").write_text(json.dumps({"Test GPU": tested}))
    (folder / "compiled.json").write_text(json.dumps(compiled))
    return SimpleNamespace(confdir=tmp_path, srcdir=tmp_path / "docs")


def test_a_cell_says_what_is_known(app):
    cells = support.words(app)
    assert cells["Test GPU", "3.7.1"] == {"tried": ["measured"]}
    assert cells["Test GPU", "3.9.0"] == {"dropout": ["tested"], "softmax": ["2 tests fail"]}
    assert cells["An old GPU", "3.7.1"] == {
        "softmax": ["compiled"],
        "attention_forward": ["compiled"],
        "attention_fast": ["compiled"],
        "attention_backward": ["compiled in part"],
        "attention_fp8": ["refused"],
        "attention_hopper": ["compiled"],
        "attention_hopper_backward": ["compiled"],
    }


def test_a_row_counts_what_is_well_and_names_what_is_not(app):
    assert support.summary(app) == [
        ("Test\xa0GPU", "3.6.0", "", "1", ""),
        ("Test\xa0GPU", "3.7.1", "1", "", ""),
        ("Test\xa0GPU", "3.9.0", "", "1; 2 tests fail: softmax", ""),
        (
            *("An\xa0old\xa0GPU", "3.7.1", "", ""),
            "5; in part: attention backward; refused: attention fp8",
        ),
    ]
    assert support.counted("measured, older code", ["tried"]) == "1, older code"


def test_versions_stand_beside(app):
    found = support.versions(app)
    assert found == {("Test GPU", v): {"2.13.0, 3.12.3"} for v in ("3.6.0", "3.7.1", "3.9.0")}


def test_older_code_is_not_passed_for_tested(app, module):
    module("def kernel(x):\n    return x + 2\n")
    cells = support.words(app)
    assert cells["Test GPU", "3.7.1"]["tried"] == ["measured, older code"]
    assert cells["Test GPU", "3.6.0"]["dropout"] == ["tested, older code"]
    assert support.tested_with(app, "dropout").startswith("Not run on any GPU since")


def test_a_chapter_says_with_what_it_was_tested(app):
    where = "Kernels checked on Test GPU with triton"
    assert support.tested_with(app, "dropout") == f"{where} 3.6.0 and 3.9.0."
    assert support.tested_with(app, "tried") == f"{where} 3.7.1."
    assert "3.9.0" not in support.tested_with(app, "softmax")  # two of its tests fail
    assert support.tested_with(app, "softmax").endswith("Compiled for 1 other GPU.")
    assert "Compiled" not in support.tested_with(app, "attention_fp8")


def test_a_case_that_no_chapter_knows_is_an_error(app):
    path = app.confdir / "tests" / "compiled.json"
    path.write_text(path.read_text().replace("softmax float32 8", "sofmtax float32 8"))
    with pytest.raises(ValueError, match="empty"):
        support.words(app)
