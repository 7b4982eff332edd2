"""Ranks: what each returns, how a function of a script travels, and what becomes of failures."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from kernelbook import lab, runtime
from kernelbook.lab import chapter, ranks, results, schema

PATIENCE = 5.0


@pytest.fixture(scope="module")
def two():
    at_work = ranks.Ranks(2, gpus=False, patience=PATIENCE)
    yield at_work
    at_work.stop()


def total(rank, world, x):
    """The sum over ranks of x times the rank plus one."""
    x = x * (rank + 1)
    dist.all_reduce(x)
    return rank, world, x, os.getpid()


def test_ranks_work_together_and_stay(two):
    first = two.run(total, torch.tensor([1.0, 2.0]))
    assert [(rank, world) for rank, world, *_ in first] == [(0, 2), (1, 2)]
    assert all(torch.equal(x, torch.tensor([3.0, 6.0])) for *_, x, _ in first)
    again = two.run(total, torch.tensor([1.0]))
    assert [pid for *_, pid in again] == [pid for *_, pid in first]


def only_one_raises(rank, world):
    if rank == 1:
        raise ValueError("q must be good")
    return "well"


def test_a_rank_that_raises_is_named_and_the_next_experiment_starts_anew(two):
    with pytest.raises(lab.RanksFailed, match=r"(?s)rank 1 of 2: ValueError: q must be good") as e:
        two.run(only_one_raises)
    assert "rank 0" not in str(e.value)
    assert two.run(total, torch.ones(1))[0][2] == 3


def one_dies(rank, world):
    if rank == 1:
        print("last words", flush=True)
        os._exit(7)
    dist.barrier()


def test_a_rank_that_dies_is_an_error_on_the_others_and_ends_nothing_else(two):
    begin = time.perf_counter()
    first, second = two.ask(one_dies)
    assert time.perf_counter() - begin < 60
    assert "died with exit code 7" in second.error
    assert "last words" in second.error
    assert "Error" in first.error


def one_sleeps(rank, world):
    if rank == 1:
        time.sleep(600)
    return rank


def test_a_rank_that_hangs_is_ended_and_named(two):
    two.run(total, torch.ones(1))  # their start, on a busy machine, may take as long as the limit
    first, second = two.ask(one_sleeps, limit=20.0)
    assert first.value == 0
    assert "did not answer within 20 seconds" in second.error
    assert not two._processes


SCRIPT = """
import math
from functools import partial
import torch
from kernelbook.lab.ranks import Ranks

FACTOR = 3
unused = open(__file__)  # would not travel

def helper(x):
    return [partial(math.pow, FACTOR)(x) for _ in range(1)][0]

def experiment(rank, world, power):
    return helper(power) + rank

found = Ranks(2, gpus=False).run(experiment, 2)
assert found == [9.0, 10.0], found
print("done")
"""


def test_a_function_of_a_script_travels_with_what_it_uses(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    path = os.pathsep.join([str(Path(ranks.__file__).parents[2])])
    done = subprocess.run(
        [sys.executable, script],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.stdout == "done\n", done.stderr


# -- a chapter on ranks


MADE = {"gpu": "NVIDIA H200", "slug": "nvidia-h200"}


@pytest.fixture
def several(module, root, monkeypatch):
    """A chapter that measures on ranks: they are of the CPU, and the GPU's name is stood in for."""
    from records import PROVENANCE

    monkeypatch.delenv("KERNELBOOK_MODE", raising=False)
    monkeypatch.setattr(chapter, "is_live", lambda: True)
    monkeypatch.setattr(runtime, "INTERPRETED", True)
    monkeypatch.setattr(results, "provenance", lambda: PROVENANCE | MADE)
    monkeypatch.setattr(results, "interconnect", lambda: "GPU0 NV18")
    return lab.start("tried", "measured_module", on_ranks=True)


POINTS = [{"seqlen": 8, "dtype": torch.float32}]
SWEEP = {"limit": "ideal", "work": "2 * seqlen * itemsize"}


def answer(provided):
    assert provided == {"ideal": "one", "ours": "ring"}
    return {"ideal": [1.0, 1.0, 1.0], "ours": [1.0, 2.0, 3.0]}


def providers(seqlen, dtype):
    return {"ideal": "one", "ours": "ring", "peer": lab.Absent("not here")}


def test_a_record_of_ranks_says_how_many_and_how_they_are_connected(several, root):
    from test_check import case

    assert "2x NVIDIA H200" in several.plain
    truth = torch.tensor([1.0, 2.0]).double()
    lab.check("sum", [case(truth.float(), truth)])
    sweep = lab.bench("forward", POINTS, providers, timer=answer, **SWEEP)
    assert sweep.share("ours", seqlen=8) == 0.5
    table = lab.measure("memory", lambda: [{"rank": 0, "bytes": 8}])
    assert table.provenance["gpu"] == "2x NVIDIA H200"
    lab.finish("half of it")
    written = results.read(root / "2x-nvidia-h200" / "tried.json")
    made = written["provenance"]
    assert (made["world"], made["interconnect"]) == (2, "GPU0 NV18")
    assert written["sweeps"]["forward"]["skipped"] == {"peer": "not here"}
    assert results.is_primary(written)


@pytest.mark.parametrize(
    "change",
    [{"world": 3}, {"world": None}, {"interconnect": None}, {"gpu": "NVIDIA H200"}],
    ids=["another count", "no count", "no interconnect", "one GPU"],
)
def test_a_record_of_ranks_that_contradicts_itself_is_refused(several, root, change):
    test_a_record_of_ranks_says_how_many_and_how_they_are_connected(several, root)
    record = results.read(root / "2x-nvidia-h200" / "tried.json")
    made = record["provenance"] | change
    made["slug"] = results.slug(made["gpu"])
    record["provenance"] = {key: value for key, value in made.items() if value is not None}
    with pytest.raises(schema.Refused, match="world|interconnect"):
        schema.validate(record)


def test_the_most_gpus_come_first(several, root, monkeypatch):
    test_a_record_of_ranks_says_how_many_and_how_they_are_connected(several, root)
    two = results.read(root / "2x-nvidia-h200" / "tried.json")
    gpu = {"gpu": "16x NVIDIA H200", "slug": "16x-nvidia-h200", "world": 16}
    results.save(two | {"provenance": two["provenance"] | gpu})
    other = {"gpu": "32x Another", "slug": "32x-another", "world": 32}
    results.save(two | {"provenance": two["provenance"] | other})
    found = [record["provenance"]["world"] for record in results.recorded()]
    assert found == [16, 2, 32]
    assert [results.is_primary(record) for record in results.recorded()] == [True, False, False]
    assert results.find("tried")["provenance"]["world"] == 16
    monkeypatch.setattr(chapter, "is_live", lambda: False)
    said = lab.start("tried", "measured_module", on_ranks=True)
    assert "on 2 ranks of the CPU" in said.plain
    assert "recorded on 16x NVIDIA H200" in said.plain


def test_one_gpu_is_not_live(module, root, monkeypatch):
    monkeypatch.setattr(runtime, "INTERPRETED", False)
    monkeypatch.setattr(runtime, "environment", dict)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(chapter, "is_live", lambda: True)
    said = lab.start("tried", "measured_module", on_ranks=True)
    assert "No speed has been recorded yet: that needs two GPUs" in said.plain
    assert not chapter.running().live
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 6)
    assert ranks.at_hand() == (4, True)


def test_a_chapter_without_ranks_says_how_to_get_them(replayed):
    with pytest.raises(RuntimeError, match="pass on_ranks=True"):
        lab.ranks_at_work()


# -- the chapter that measures several GPUs


REHEARSAL = """
import runpy, sys
from kernelbook.lab import chapter, results

made = results.provenance
stood_in = {"gpu": "NVIDIA H200", "slug": "nvidia-h200", "sm_count": 132, "memory_gib": 139.8}
stood_in |= {"l2_mib": 60.0, "cuda": "13.0", "driver": "1.2", "clocks": {}}
results.provenance = lambda: made() | stood_in
results.interconnect = lambda: "GPU0 GPU1 NV18"
chapter.is_live = lambda: True
runpy.run_path(sys.argv[1], run_name="__main__")
"""


def test_the_chapter_across_gpus_can_measure_and_leaves_a_record(tmp_path):
    """Its measurements run here with two ranks of the CPU, for a mistake would cost GPUs' time."""
    root = Path(__file__).parents[2]
    environment = {"KERNELBOOK_REHEARSAL": "1", "KERNELBOOK_RESULTS": str(tmp_path)}
    environment |= {"PYTHONPATH": str(root / "src"), "MPLBACKEND": "agg"}
    done = subprocess.run(
        [sys.executable, "-c", REHEARSAL, root / "gallery" / "attention_across_gpus.py"],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    record = schema.parse((tmp_path / "2x-nvidia-h200/attention_across_gpus.json").read_text())
    assert record["sweeps"].keys() == {"ranks", "context parallelism"}
    failures = record["tables"]["Mistakes of the last rank"]
    said = [dict(zip(failures["columns"], row, strict=True)) for row in failures["rows"]]
    assert len(said) == 6
    assert not [row for row in said if "returns" in row["what it says"]]
    assert all("rank 1" in row["what it says"] for row in said if row["mistake"] == "another shape")
