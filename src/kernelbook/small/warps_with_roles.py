"""The smallest matmul with roles: a loader of one warp, a consumer of four, three slots of tiles.

In Gluon, for Hopper GPUs, of bfloat16 matrices whose sizes TILE divides.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernelbook.ops.hopper.parts import tma_load, tma_store

TILE = gl.constexpr(64)
SLOTS = gl.constexpr(3)


@gluon.jit
def loader(a_desc, b_desc, a_s, b_s, full, empty, row, column, steps):
    for i in range(steps):
        slot, parity = i % SLOTS, (i // SLOTS) & 1
        mbarrier.wait(empty.index(slot), parity ^ 1)
        mbarrier.expect(full.index(slot), 2 * a_desc.block_type.nbytes)
        tma_load(a_desc, [row, i * TILE], full.index(slot), a_s.index(slot))
        tma_load(b_desc, [i * TILE, column], full.index(slot), b_s.index(slot))


@gluon.jit
def consumer(c_desc, a_s, b_s, c_s, full, empty, row, column, steps):
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    c = gl.zeros([TILE, TILE], gl.float32, layout)
    for i in range(steps):
        slot, parity = i % SLOTS, (i // SLOTS) & 1
        mbarrier.wait(full.index(slot), parity)
        c = warpgroup_mma(a_s.index(slot), b_s.index(slot), c)
        mbarrier.arrive(empty.index(slot))
    # -- store: the sums, by way of shared memory
    c_s.store(c.to(gl.bfloat16))
    fence_async_shared()
    tma_store(c_desc, [row, column], c_s)
    tma.store_wait(0)


@gluon.jit
def matmul_kernel(a_desc, b_desc, c_desc, steps):
    # -- shared memory: the slots, two barriers for each, and a tile of c
    a_s = gl.allocate_shared_memory(gl.bfloat16, [SLOTS, TILE, TILE], a_desc.layout)
    b_s = gl.allocate_shared_memory(gl.bfloat16, [SLOTS, TILE, TILE], b_desc.layout)
    c_s = gl.allocate_shared_memory(gl.bfloat16, [TILE, TILE], c_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=1)
    # -- roles: the first in the four warps of the launch, the second in one more
    row, column = gl.program_id(0) * TILE, gl.program_id(1) * TILE
    sums = (c_desc, a_s, b_s, c_s, full, empty, row, column, steps)
    loads = (a_desc, b_desc, a_s, b_s, full, empty, row, column, steps)
    gl.warp_specialize([(consumer, sums), (loader, loads)], [1], [24])


def matmul(a, b):
    """Return a @ b. The sizes of both are multiples of TILE."""
    c = torch.empty(a.shape[0], b.shape[1], device=a.device, dtype=a.dtype)
    tile = [TILE.value, TILE.value]
    layout = gl.NVMMASharedLayout.get_default_for(tile, gl.bfloat16)
    descs = [TensorDescriptor.from_tensor(x, tile, layout) for x in (a, b, c)]
    grid = (a.shape[0] // TILE.value, b.shape[1] // TILE.value)
    steps = a.shape[1] // TILE.value
    matmul_kernel[grid](*descs, steps, num_warps=4)
    return c
