"""The small matmul with roles, against float64: on a Hopper GPU, or else in a model of one.

No interpreter runs Gluon. So elsewhere a compiler translates the kernel for Hopper, and its Python
runs line by line, each role in a thread, with barriers, copies and matmuls that this file models.
"""

import ast
import inspect
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kernelbook import runtime
from kernelbook.lab.check import judge

pytest.importorskip("triton.experimental.gluon")
from kernelbook.small import warps_with_roles

ROOT = Path(__file__).parents[2]
HOPPER = not runtime.INTERPRETED and runtime.capability(runtime.DEVICE) == (9, 0)
DEVICE = runtime.DEVICE if HOPPER else "cpu"
SIZES = [(64, 64, 64), (64, 64, 128), (128, 192, 192), (192, 64, 640)]
"""Rows, columns and the length of sums: fewer steps than slots, as many, and more than thrice."""


# -- a model of what Hopper and Gluon do ----------------------------------------------------------


class Constant(int):
    """A number that a kernel knows when it is compiled."""

    value = property(int)


class Barrier:
    """What an mbarrier counts. A wait that takes three seconds is one for ever."""

    def __init__(self):
        self.changed = threading.Condition()
        self.ended, self.bytes = -1, 0

    def init(self, count):
        self.count = self.missing = count

    def come(self, arrivals=0, announced=0):
        with self.changed:
            self.missing -= arrivals
            self.bytes += announced
            if self.missing == 0 and self.bytes == 0:
                self.missing, self.ended = self.count, self.ended + 1
            self.changed.notify_all()

    def wait(self, parity):
        with self.changed:
            passed = self.changed.wait_for(lambda: self.ended % 2 == parity % 2, timeout=3)
        if not passed:
            raise TimeoutError("a role waits for ever")


class Shared:
    """A block of shared memory. What threads store, the copy engine sees after a fence."""

    def __init__(self, block):
        self.block, self.stored = block, []

    def index(self, i):
        return Shared(self.block[i])

    def store(self, block):
        self.stored.append(block)


class Descriptor:
    """A matrix in global memory, as a table of tiles."""

    def __init__(self, x, block_shape, layout):
        self.x, self.block_shape, self.layout = x, block_shape, layout
        self.block_type = SimpleNamespace(nbytes=x[:1, :1].nbytes * torch.Size(block_shape).numel())

    def tile(self, at):
        rows, columns = (slice(i, i + n) for i, n in zip(at, self.block_shape, strict=True))
        return self.x[rows, columns]


class Kernel:
    """A function of a kernel. A grid launches it, program by program."""

    def __init__(self, fn, machine):
        self.fn, self.machine = fn, machine

    def __call__(self, *args):
        return self.fn(*args)

    def __getitem__(self, grid):
        def launch(*args, num_warps):
            for row in range(grid[0]):
                for column in range(grid[1]):
                    self.machine.program = (row, column)
                    self.fn(*args)

        return launch


class Machine:
    """An SM: it runs roles in threads, and copies when it likes."""

    def __init__(self, delay=0.001):
        self.delay, self.program, self.blocks = delay, None, []

    def allocate(self, dtype, shape, layout):
        if dtype is None:
            return SimpleNamespace(index=[Barrier() for _ in range(shape[0])].__getitem__)
        self.blocks.append(Shared(torch.full(shape, torch.nan, dtype=dtype)))
        return self.blocks[-1]

    def load(self, desc, at, barrier, tile):
        def copy():
            tile.block.copy_(desc.tile(at))
            barrier.come(announced=-desc.block_type.nbytes)

        threading.Timer(self.delay, copy).start()

    def fence(self):
        for shared in self.blocks:
            while shared.stored:
                shared.block.copy_(shared.stored.pop(0))

    def run(self, roles, warps, registers):
        failures = []

        def play(role, args):
            try:
                role(*args)
            except Exception as error:
                failures.append(error)

        threads = [threading.Thread(target=play, args=role) for role in roles]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]

    def names(self):
        """What the module imports."""
        gl = SimpleNamespace(
            constexpr=Constant, bfloat16=torch.bfloat16, float32=torch.float32, int64=None,
            program_id=lambda axis: self.program[axis], static_range=range,
            allocate_shared_memory=self.allocate, warp_specialize=self.run,
            zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
            NVMMADistributedLayout=lambda *numbers: None,
            NVMMASharedLayout=SimpleNamespace(get_default_for=lambda block, dtype: None),
        )  # fmt: skip
        mbarrier = SimpleNamespace(
            MBarrierLayout=lambda: None,
            init=lambda barrier, count: barrier.init(count),
            wait=lambda barrier, parity: barrier.wait(parity),
            arrive=lambda barrier: barrier.come(arrivals=1),
            expect=lambda barrier, nbytes: barrier.come(arrivals=1, announced=nbytes),
        )
        return {
            "torch": torch, "gl": gl, "mbarrier": mbarrier,
            "gluon": SimpleNamespace(jit=lambda fn: Kernel(fn, self)),
            "TensorDescriptor": SimpleNamespace(from_tensor=Descriptor),
            "tma": SimpleNamespace(store_wait=lambda pending: None),
            "tma_load": self.load,
            "tma_store": lambda desc, at, tile: desc.tile(at).copy_(tile.block),
            "fence_async_shared": self.fence,
            "warpgroup_mma": lambda a, b, c: c + a.block.float() @ b.block.float(),
        }  # fmt: skip


def modelled(change=None, **options):
    """The module's matmul in the model, with one of its lines changed."""
    code = inspect.getsource(warps_with_roles)
    if change:
        assert code.count(change[0]) == 1
        code = code.replace(*change)
    body = [n for n in ast.parse(code).body if not isinstance(n, (ast.Import, ast.ImportFrom))]
    names = Machine(**options).names()
    exec(compile(ast.Module(body, []), "in the model", "exec"), names)
    return names["matmul"]


# -- the matmul -----------------------------------------------------------------------------------


def inputs(m, n, k):
    torch.manual_seed(m + n + k)
    a = torch.randn(m, k, device=DEVICE, dtype=torch.bfloat16)
    return a, torch.randn(k, n, device=DEVICE, dtype=torch.bfloat16)


@pytest.mark.parametrize(("m", "n", "k"), SIZES)
def test_the_product_is_right(m, n, k):
    a, b = inputs(m, n, k)
    matmul = warps_with_roles.matmul if HOPPER else modelled()
    truth = a.double() @ b.double()
    assert judge(matmul(a, b), a @ b, truth).ok
    assert not judge(torch.zeros_like(a @ b), a @ b, truth).ok


@pytest.mark.parametrize(
    "change",
    [
        ("parity ^ 1)", "parity)"),
        ("        mbarrier.arrive(empty.index(slot))\n", ""),
        ("wait(full.index(slot), parity)", "wait(full.index(slot), 0)"),
        ("expect(full.index(slot), 2 * ", "expect(full.index(slot), 3 * "),
        ("        mbarrier.wait(full.index(slot), parity)\n", ""),
        ("    fence_async_shared()\n", ""),
        ("b_s.index(slot), c)", "b_s.index(0), c)"),
    ],
)
def test_the_model_finds_a_mistake(change):
    """A role waits for ever, or the product is wrong."""
    a, b = (x.cpu() for x in inputs(64, 64, 640))
    try:
        found = modelled(change, delay=0.05)(a, b)
    except TimeoutError:
        return
    assert not judge(found, a @ b, a.double() @ b.double()).ok


COMPILE = """
import sys
sys.path.insert(0, sys.argv[1])
import compiling
gpu = compiling.GPUS["sm_90"]
compiled = compiling.pretend(gpu)
import torch
from kernelbook.small.warps_with_roles import matmul
x = torch.empty(512, 512, dtype=torch.bfloat16)
matmul(x, x)
[found] = compiled
assert "error" not in found and found["spilled"] == 0 and found["engine"], found
assert found["shared"] <= gpu.shared_memory, found
"""


def test_it_compiles_for_hopper_without_a_spill(tmp_path):
    pytest.importorskip("triton.backends.nvidia")
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, str(ROOT / "tests")],
        env={"PATH": "/usr/bin:/bin", "TRITON_CACHE_DIR": str(tmp_path), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
