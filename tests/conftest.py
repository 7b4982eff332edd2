"""What the tests share: seeds, poisoned memory, and the one way to compare with the truth."""

import atexit
import os
import shutil
import sys
import tempfile
import textwrap

# Workers share the cores. torch reads this when it is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# What torch.compile kept of an earlier run calls operators by the arguments that they had then.
if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="inductor")
    atexit.register(shutil.rmtree, os.environ["TORCHINDUCTOR_CACHE_DIR"], ignore_errors=True)

import matplotlib.pyplot as plt
import pytest
import strategies
import tested
import torch
from records import PROVENANCE, record

from kernelbook import lab, runtime
from kernelbook.lab import chapter, results
from kernelbook.lab.check import FACTOR, ROWS, judge
from kernelbook.ops import launch

DEVICE = runtime.DEVICE
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def pytest_addoption(parser):
    parser.addoption("--record-tested", action="store_true", help="add the outcome to tested.json")


def pytest_configure(config):
    if config.getoption("--record-tested") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(tested.Recorder())


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(20)


@pytest.fixture
def monkeypatch(monkeypatch):
    """pytest's own; whatever it changes, launches are planned anew."""
    change = monkeypatch.setattr

    def change_and_forget(*args, **kwargs):
        change(*args, **kwargs)
        launch.forget()

    monkeypatch.setattr = change_and_forget
    yield monkeypatch
    launch.forget()


@pytest.fixture(autouse=True)
def _poisoned_memory(monkeypatch):
    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, strategies.poison(getattr(torch, name)))


@pytest.fixture
def interpreted():
    """Skip, by name, a test that pretends a GPU: there, kernels would run on it."""
    if not runtime.INTERPRETED:
        pytest.skip("needs the interpreter")


@pytest.fixture
def gpu():
    """Skip, by name, a test that the interpreter cannot stand in for."""
    if runtime.INTERPRETED:
        pytest.skip("needs a GPU")


# -- the laboratory -------------------------------------------------------------------------------


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module to fingerprint; call it with the source to rewrite it."""
    path = tmp_path / "measured_module.py"
    monkeypatch.syspath_prepend(tmp_path)

    def write(source):
        path.write_text(textwrap.dedent(source))
        return "measured_module"

    write("def kernel(x):\n    return x + 1\n")
    return write


@pytest.fixture
def root(tmp_path, monkeypatch):
    """An empty folder of results."""
    folder = tmp_path / "results"
    folder.mkdir()
    monkeypatch.setenv("KERNELBOOK_RESULTS", str(folder))
    monkeypatch.setattr(results, "_SHIPPED", tmp_path / "no package")
    monkeypatch.setattr(chapter, "_running", None)
    yield folder
    plt.close("all")


@pytest.fixture
def replayed(module, root, monkeypatch):
    """A chapter that replays the small record; the value is the line it begins with."""
    monkeypatch.setenv("KERNELBOOK_MODE", "replay")
    results.save(record())
    return lab.start("tried", "measured_module")


@pytest.fixture
def live(module, root, monkeypatch):
    """A chapter that measures: the clock and the GPU are stood in for, the rest is real."""
    monkeypatch.delenv("KERNELBOOK_MODE", raising=False)
    monkeypatch.setattr(runtime, "INTERPRETED", False)
    monkeypatch.setattr(results, "provenance", lambda: PROVENANCE)
    bench = sys.modules["kernelbook.lab.bench"]  # kernelbook.lab.bench is the function
    monkeypatch.setattr(bench, "_time", lambda run: ([run(), run(), run()], True))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    lab.start("tried", "measured_module")


# -- the truth ------------------------------------------------------------------------------------


def assert_close(ours, truth, torch_result, factor=FACTOR, rows=ROWS):
    """Assert that each part of ours is within the book's tolerance: see lab.check.judge.

    ``rows=1`` judges each row by itself: rows of a softmax or a layer norm differ in scale.
    """
    worst = judge(ours, torch_result, truth, factor, rows)
    assert worst.ok, f"error {worst.error:.3g} is over {worst.tolerance:.3g}"


@pytest.fixture(autouse=True)
def _outside_the_site(request, monkeypatch):
    """The lab's tests build no site, though one of the site may have run in this process before."""
    if request.path.parent.name == "lab":
        monkeypatch.delitem(sys.modules, "sphinx_gallery", raising=False)
