"""What the tests of each chapter's operator found, by GPU and by version of Triton.

    python -m pytest tests/ops --record-tested

adds what that run found to ``tested.json``, which the book's table of GPUs is made from. It is kept
with the fingerprint of the code that was tested, so that later code does not pass for tested.
Triton's interpreter counts as a GPU here.
"""

import json
from collections import Counter
from pathlib import Path

from kernelbook.lab import fingerprint, results

FILE = Path(__file__).with_suffix(".json")
CHAPTERS = {
    "first_kernel": ("test_weighted_sum", "kernelbook.ops.weighted_sum"),
    "dropout": ("test_dropout", "kernelbook.ops.dropout"),
    "softmax": ("test_softmax", "kernelbook.ops.softmax"),
    "layer_norm": ("test_layer_norm", "kernelbook.ops.layer_norm"),
    "layer_norm_backward": ("test_layer_norm", "kernelbook.ops.layer_norm"),
    "attention_forward": ("test_attention", "kernelbook.ops.attention"),
    "attention_fast": ("test_attention", "kernelbook.ops.attention"),
    "attention_backward": ("test_attention_backward", "kernelbook.ops.attention"),
    "attention_in_models": ("test_attention_varlen", "kernelbook.ops.attention"),
    "attention_fp8": ("test_attention_fp8", "kernelbook.ops.attention"),
    "attention_hopper": ("test_hopper", "kernelbook.ops.hopper.forward"),
    "attention_hopper_backward": ("test_hopper_backward", "kernelbook.ops.hopper.backward"),
    "attention_across_gpus": ("test_ring", "kernelbook.ops.ring"),
}
"""For each chapter the file of its tests, and the module that they test."""

INTERPRETER = "Triton's interpreter"


def add(outcomes: Counter, file: Path = FILE) -> None:
    """Add a run to the file. ``outcomes`` counts (file of tests, outcome)."""
    origin = {"gpu": INTERPRETER} | results.provenance()
    run = {key: origin[key] for key in ("commit", "date", "python", "torch")}
    found = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    chapters = found.setdefault(origin["gpu"], {}).setdefault(origin["triton"], {})
    for chapter, (tests, module) in CHAPTERS.items():
        counts = {kind: outcomes[tests, kind] for kind in ("passed", "failed", "skipped")}
        if counts["passed"] + counts["failed"]:
            code = {"module": module, "fingerprint": fingerprint.fingerprint([module])}
            chapters[chapter] = run | counts | code
    file.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", encoding="utf-8")


class Recorder:
    """The part of pytest that counts; with xdist it is in the process that hears all workers."""

    def __init__(self):
        self.outcomes = Counter()

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[Path(report.location[0]).stem, report.outcome] += 1

    def pytest_sessionfinish(self):
        add(self.outcomes)
