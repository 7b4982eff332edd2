"""Ask of racecheck what it sees of an exchange between two roles of warps, on a Hopper GPU.

    python tests/racecheck.py none      launch a race of two roles
    python tests/racecheck.py mbarrier  the same exchange in order: so is "named barrier"

Racecheck watches what threads read and write between barriers that all of them pass. In Gluon's
kernels, warps have roles, and wait for each other at mbarriers and at barriers of some warps. On an
H200 compute-sanitizer 2025.3 did not see the race below, and took the exchange that an mbarrier
orders for one. So memcheck.py asks first, and as long as racecheck is wrong of roles, it leaves out
the kernels that have them. For these, tests compare the bits of many launches beside other work.
"""

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve()

# Whether racecheck has to see a race, by what orders the two roles
CONTROLS = {"none": True, "mbarrier": False, "named barrier": False}
RACE = 9  # the exit status asked for, where one is seen


def sees_roles(tool: str) -> bool:
    """Whether racecheck sees the race of two roles, and none where they wait for each other."""
    right = True
    for order, is_race in CONTROLS.items():
        options = ["--tool", "racecheck", "--error-exitcode", str(RACE)]
        command = [tool, *options, sys.executable, str(HERE), order]
        status = subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode
        if status not in (0, RACE):
            raise RuntimeError(f"under racecheck this ended with {status}: {' '.join(command)}")
        print(f"racecheck: two roles, in order by {order}: it sees {'a' if status else 'no'} race.")
        right &= (status == RACE) == is_race
    return right


# -- a race of two roles, and the same exchange in order

if __name__ == "__main__":
    [order] = sys.argv[1:]
    if order not in CONTROLS:
        sys.exit(f"racecheck: {order!r} is none of {', '.join(CONTROLS)}.")
    sys.path.insert(0, str(HERE.parents[1] / "src"))

    import torch
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import mbarrier

    from kernelbook.ops.hopper.parts import named_barrier

    SIZE = gl.constexpr(512)

    @gluon.jit
    def write_role(x_ptr, tile, full, ORDER: gl.constexpr):
        at = gl.arange(0, SIZE, gl.BlockedLayout([4], [32], [4], [0]))
        tile.store(gl.load(x_ptr + at))
        if ORDER == "mbarrier":
            mbarrier.arrive(full)
        if ORDER == "named barrier":
            named_barrier("sync", 9, 256)

    @gluon.jit
    def read_role(y_ptr, tile, full, ORDER: gl.constexpr):
        layout: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
        if ORDER == "mbarrier":
            mbarrier.wait(full, 0)
        if ORDER == "named barrier":
            named_barrier("sync", 9, 256)
        gl.store(y_ptr + gl.arange(0, SIZE, layout), tile.load(layout))

    @gluon.jit
    def exchange_kernel(x_ptr, y_ptr, ORDER: gl.constexpr):
        shared: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        tile = gl.allocate_shared_memory(gl.float32, [SIZE], shared)
        full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(full, count=1)
        gl.warp_specialize(
            [
                (write_role, (x_ptr, tile, full, ORDER)),
                (read_role, (y_ptr, tile, full, ORDER)),
            ],
            [4],
            [24],
        )

    x = torch.randn(SIZE.value, device="cuda")
    y = torch.zeros_like(x)
    exchange_kernel[(1,)](x, y, order, num_warps=4)
    if order != "none" and not torch.equal(x, y):
        sys.exit(f"racecheck: what is read is not what was written, in order by {order}.")
