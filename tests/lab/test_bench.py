"""Benchmarks: what is absent says why, a mistake of ours is raised, and the clock is the GPU's."""

import sys
from types import SimpleNamespace

import matplotlib.pyplot as plt
import pytest
import torch
from records import POINTS, SWEEP

from kernelbook import lab

bench = sys.modules["kernelbook.lab.bench"]  # kernelbook.lab.bench is the function


# -- libraries


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A library that refuses, asserts, calls back and fails to load a part of itself."""
    folder = tmp_path / "their_library"
    folder.mkdir()
    (folder / "__init__.py").write_text(
        "def refuse(x):\n"
        "    raise ValueError('only multiples of 8, got ' + str(x) + '\\nand more')\n"
        "def stumble(x):\n"
        "    return x.no_such_name\n"
        "def compiled(x):\n"
        "    return next(iter([]))\n"
        "def call(function):\n"
        "    return function()\n"
    )
    (folder / "broken.py").write_text("import no_such_dependency\n")
    (folder / "unfit.py").write_text("raise OSError('/home/me/lib/x.so: no driver for GB/s')\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield "their_library"
    for name in [name for name in sys.modules if name.startswith("their_library")]:
        del sys.modules[name]


def test_a_library_that_runs_is_returned(library):
    assert lab.peer("json", lambda json: lambda: json.loads("1"))() == 1


@pytest.mark.parametrize(
    ("module", "use", "reason"),
    [
        ("no_such_library.ops", None, "no_such_library is not installed"),
        ("their_library.ops", None, "their_library has no module their_library.ops"),
        (
            "their_library.broken",
            None,
            "their_library cannot be imported: ModuleNotFoundError: No module named "
            "'no_such_dependency'",
        ),
        (
            "their_library.unfit",
            lambda ops: None,
            "their_library refuses some inputs: OSError: x.so: no driver for GB/s",
        ),
        (
            "their_library",
            lambda ops: lambda: ops.refuse(7),
            "their_library refuses some inputs: ValueError: only multiples of 8, got 7",
        ),
        (
            "their_library",
            lambda ops: lambda: ops.stumble(7),
            "their_library refuses some inputs: AttributeError: 'int' object has no attribute "
            "'no_such_name'",
        ),
        (
            "torch.nn.functional",  # its functions are compiled, and leave no frame
            lambda ops: lambda: ops.linear(torch.ones(2, 3), torch.ones(2, 2)),
            "torch refuses some inputs: RuntimeError: mat1 and mat2 shapes cannot be multiplied",
        ),
    ],
)
def test_absent_libraries_say_why(library, module, use, reason):
    found = lab.peer(module, use)
    assert isinstance(found, lab.Absent)
    assert found.reason.startswith(reason)


MISTAKES = {
    "a name of theirs": (lambda ops: lambda: ops.refusal(7), "AttributeError: .*'refusal'"),
    "a name of theirs, at once": (lambda ops: ops.refuze, "AttributeError: .*'refuze'"),
    "a name of ours": (lambda ops: lambda: ops.refuse(sevn), "NameError: .*'sevn'"),  # noqa: F821
    "arguments": (lambda ops: lambda: ops.refuse(), "TypeError: .*missing 1 required"),
    "what they call": (lambda ops: lambda: ops.call(lambda: sevn), "NameError"),  # noqa: F821
    "nothing to run": (lambda ops: None, "TypeError: 'NoneType' object is not callable"),
}


@pytest.mark.parametrize(("use", "message"), MISTAKES.values(), ids=MISTAKES)
def test_our_own_mistake_is_raised(library, use, message):
    with pytest.raises(RuntimeError, match=f"the book's own call of their_library.*{message}"):
        lab.peer(library, use)


# -- providers


def test_a_provider_must_not_come_or_go_without_a_word(live):
    def providers(elements, dtype):
        return {"copy": lambda: 1.0} | ({"ours": lambda: 1.0} if elements > 1000 else {})

    with pytest.raises(ValueError, match=r"ours is not a provider of every point \(see point 1\)"):
        lab.bench("forward", POINTS, providers, **SWEEP)


def test_the_limit_must_be_there(live):
    for runs in ({"ours": lambda: 1.0}, {"copy": lab.Absent("no"), "ours": lambda: 1.0}):
        with pytest.raises(ValueError, match="the limit 'copy' must be timed at every point"):
            lab.bench("forward", POINTS, lambda runs=runs, **_: runs, **SWEEP)


@pytest.mark.parametrize("formula", ["2 * miles", "elements - elements", "elements ** 2"])
def test_a_formula_that_fails_costs_no_measurement(live, formula):
    for work in ({"work": formula}, {"limit_work": formula}):
        with pytest.raises(ValueError, match=r"must be|positive"):
            lab.bench("forward", POINTS, lambda **_: pytest.fail("timed"), **SWEEP | work)


# -- the clock: a machine whose host and GPU have clocks of their own


class Machine:
    """A GPU that runs what is queued, in order, and a host that needs time to queue a run."""

    CYCLES = 2e6  # a millisecond

    def __init__(self, host_ms, gpu_ms):
        self.host_ms, self.gpu_ms = host_ms, gpu_ms
        self.now = self.free = 0.0  # the host's clock, and when the GPU has done all that is queued
        self.pauses = []

    def Event(self, enable_timing):
        return Moment(self)

    def queue(self, milliseconds):
        self.free = max(self.free, self.now) + milliseconds

    def _sleep(self, cycles):
        self.pauses.append(cycles)
        self.queue(cycles / self.CYCLES)

    def synchronize(self):
        self.now = max(self.now, self.free)

    def run(self):
        self.queue(self.gpu_ms / 2)
        self.now += self.host_ms
        self.queue(self.gpu_ms / 2)


class Moment:
    def __init__(self, machine):
        self.machine = machine

    def record(self):
        self.machine.queue(0.0)
        self.at = self.machine.free

    def query(self):
        return self.at <= self.machine.now

    def elapsed_time(self, end):
        return end.at - self.at


@pytest.fixture
def machine(monkeypatch):
    def make(**times):
        made = Machine(**times)
        monkeypatch.setattr(bench.torch, "cuda", made)
        driver = SimpleNamespace(
            get_empty_cache_for_benchmark=lambda: None, clear_cache=lambda cache: made.queue(0.01)
        )
        monkeypatch.setattr(
            bench.triton, "runtime", SimpleNamespace(driver=SimpleNamespace(active=driver))
        )
        return made

    return make


def test_a_run_that_is_queued_in_time_is_measured_as_it_is(machine):
    at_hand = machine(host_ms=0.1, gpu_ms=2.0)
    times, queued = bench._time(at_hand.run)
    assert queued
    assert times == pytest.approx([2.0] * len(times))
    assert set(at_hand.pauses) == {bench.PAUSE}


def test_the_pause_grows_until_the_host_is_done(machine):
    at_hand = machine(host_ms=3.0, gpu_ms=0.2)
    times, queued = bench._time(at_hand.run)
    assert queued
    assert times == pytest.approx([0.2] * len(times))  # 3 and more, had the GPU waited for the host
    assert set(at_hand.pauses) == {bench.PAUSE * 2**i for i in range(4)}


def test_a_host_that_is_never_done_is_said(machine):
    at_hand = machine(host_ms=100.0, gpu_ms=0.2)
    times, queued = bench._time(at_hand.run)
    assert not queued
    assert min(times) > 90
    assert max(at_hand.pauses) == bench.LONGEST_PAUSE
    assert at_hand.pauses[-1] == bench.PAUSE


def test_an_experiment_times_the_gpu_alone_and_not_its_first_run(machine):
    at_hand, order = machine(host_ms=0.2, gpu_ms=1.5), []

    def run():
        order.append("run")
        at_hand.run()

    def before():
        order.append("before")
        at_hand.queue(5.0)

    times = lab.event_times(run, repeats=3, before=before)
    assert times == pytest.approx([1.5] * 3)  # neither the host's time nor what comes before
    assert order == ["before", "run"] * 4
    assert lab.event_times(at_hand.run, repeats=1) == pytest.approx([1.5])


def test_a_slow_host_is_recorded_and_shown(live, monkeypatch):
    monkeypatch.setattr(bench, "_time", lambda run: ([run()] * 3, run() < 2))
    found = lab.bench(
        "forward", POINTS, lambda **_: {"copy": lambda: 1.0, "ours": lambda: 2.0}, **SWEEP
    )
    assert found.host_included == ["ours"]
    lab.plot(found, "Speed")
    texts = [text.get_text() for text in plt.gcf().texts]
    assert any("the host's time included: ours" in text for text in texts)
