"""
Warps with roles
================

In the Triton kernels so far, every warp does the same work: it loads, multiplies and stores. On a
Hopper GPU, dedicated units carry out the loads and the matmuls, and a warp spends most of its time
waiting for one or the other. *What does a kernel gain if some warps only load and the others only
multiply, and what can go wrong between them?*

FlashAttention-3 is built on such roles, so one might expect them to speed up a matmul, too. Ours
gains nothing from them, because the best loop without roles (third bar) already keeps the tensor
cores busy from one step to the next. Triton's ``tl.dot`` matches that loop.

In attention, one group of warps can compute a softmax while the tensor cores multiply for another.
The next chapter measures whether this pays. Here we make a matmul fast without roles, add them, and
break them on purpose.

You will learn

- how the copy engine (:term:`TMA`) moves tiles, and :term:`wgmma` multiplies them, without
  occupying threads;
- how an :term:`mbarrier` and its parity make warps wait for a copy, and roles for each other;
- how to write a complete matmul with roles, and one nearly as fast as :term:`cuBLAS`;
- how to recognise a deadlock or a race, and find its cause.

The kernels are written in :term:`Gluon`, the language beneath Triton, in which we say what each
warp does and where each value lies. They need a Hopper GPU (H100, H200). On any other machine you
see a recorded run, because Triton's :term:`interpreter` does not support Gluon; only the Python
models run afresh.
"""

# sphinx_gallery_thumbnail_number = 4
import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from matplotlib.patches import Rectangle

from kernelbook import lab, runtime  # before Triton: it says where kernels run

# isort: split
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor as PlainDescriptor

from kernelbook.ops.hopper.parts import (
    clock,
    named_barrier,
    pause,
    tma_load,
    tma_store,
)
from kernelbook.small import warps_with_roles as small

HOPPER = not runtime.INTERPRETED and runtime.capability(runtime.DEVICE) == (9, 0)
lab.start("warps_with_roles", "kernelbook.ops.hopper.parts", here=HOPPER)

# %%
# The problem
# -----------
#
# Tensor cores (:term:`matrix units <matrix unit>`) stay busy only if each tile arrives before they
# need it. Our example multiplies two square matrices, ``c = a @ b``, in bfloat16. One
# :term:`program` computes a 128 × 256 tile of ``c``, and each step of its loop takes 64 columns of
# ``a`` and 64 rows of ``b``:


# Drawing
BLOCK_M, BLOCK_N, BLOCK_K = 128, 256, 64


def drawn_tiles(axes):
    high, wide = BLOCK_M / BLOCK_K, BLOCK_N / BLOCK_K  # in units of a step
    steps, now, gap = 4, 2, 0.35
    top = high + gap + steps

    def word(x, y, text, ink="#1f2328", align="center"):
        look = {"ha": align, "va": "center", "fontsize": 10, "color": ink}
        axes.text(x, y, text, **look)

    def box(x, y, width, height, fill):
        look = {"facecolor": fill, "edgecolor": "#59636e"}
        axes.add_patch(Rectangle((x, y), width, height, **look))

    for step in range(steps):
        fill = "#eaf2fb" if step < now else "#fff4e5" if step == now else "#ffffff"
        left, low = step - steps - gap, top - 1 - step
        box(left, 0, 1, high, fill)
        box(0, low, wide, 1, fill)
        word(left + 0.5, high / 2, f"{step}")
        word(wide / 2, low + 0.5, f"{step}")
    box(0, 0, wide, high, "#f6f8fa")
    word(wide / 2, high / 2 + 0.3, "tile of c")
    word(wide / 2, high / 2 - 0.3, f"{BLOCK_M} × {BLOCK_N}")
    word(-gap - steps / 2, high + 0.4, f"{BLOCK_M} rows of a", "#59636e")
    word(-gap - steps / 2, -0.4, f"{BLOCK_K} columns per step", "#59636e")
    word(wide / 2, top + 0.4, f"{BLOCK_N} columns of b", "#59636e")
    word(wide + 0.2, top - now - 0.5, f"{BLOCK_K} rows per step", "#59636e", "left")
    for line, text in enumerate(("blue: read", "orange: this step", "white: to come")):
        word(-gap - steps, top - 0.5 - 0.6 * line, text, "#59636e", "left")
    axes.set(xlim=(-steps - gap - 1.5, wide + 4.6), aspect="equal")
    axes.set_ylim(-0.7, top + 0.7)
    axes.axis("off")


lab.sketch(
    "One step of a program",
    f"A tile of c, left of it the {BLOCK_M} rows of a and above it the {BLOCK_N} columns of b that "
    f"it needs, cut into steps of {BLOCK_K}. One step takes one piece of each.",
    drawn_tiles,
    height=3.1,
)

# %%

# Reading
step_flops = 2 * BLOCK_M * BLOCK_N * BLOCK_K
step_bytes = 2 * BLOCK_K * (BLOCK_M + BLOCK_N)
flops_per_cycle = 4096  # of the tensor cores of an SM
step_cycles = step_flops / flops_per_cycle
H200 = {"SMs": 132, "GHz": 1.98, "TB/s": 4.8}  # its highest clock, and the speed of its memory
needed = step_bytes / step_cycles * H200["SMs"] * H200["GHz"] / 1000  # TB/s
assert needed > 2 * H200["TB/s"]
lab.read(
    f"The tensor cores of a Hopper SM execute at most {flops_per_cycle:,} FLOP per cycle in "
    f"bfloat16, so the {step_flops / 1e6:.1f} MFLOP of a step keep them busy for "
    f"{step_cycles:,.0f} cycles. No step can be shorter. The {step_bytes / 1024:.0f} KiB of the "
    "next step must arrive in that time, or the tensor cores wait. At its highest clock, the "
    f"{H200['SMs']} SMs of an H200 would need {needed:.1f} TB/s, but its memory delivers at most "
    f"{H200['TB/s']}, so programs that run at the same time must share tiles through the L2 cache."
)

# %%
# The bars at the top of the page form a ladder of four rungs. On every rung the copy engine loads
# the tiles and the warps wait for it at a barrier, so we begin with these two.
#
# A copy engine that loads tiles
# ------------------------------
#
# A single thread can load a whole tile, because the copy engine does not need an address for each
# element: the thread names a tile by its first row and column. This kernel copies a tensor through
# :term:`shared memory`, one tile per program:


@gluon.jit
def copy_kernel(x_desc, y_desc):
    # -- shared memory: one tile, and one barrier of eight bytes (int64)
    tile = gl.allocate_shared_memory(x_desc.dtype, x_desc.block_shape, x_desc.layout)
    loaded = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(loaded, count=1)
    # -- load: name the tile, and wait until its bytes are there
    row = gl.program_id(0) * x_desc.block_shape[0]
    mbarrier.expect(loaded, x_desc.block_type.nbytes)
    tma_load(x_desc, [row, 0], loaded, tile)  # tma.async_copy_global_to_shared
    mbarrier.wait(loaded, 0)
    # -- store: the same way back
    tma_store(y_desc, [row, 0], tile)  # tma.async_copy_shared_to_global
    tma.store_wait(0)


# %%
# - **Descriptors.** ``x_desc`` and ``y_desc`` are :term:`descriptors <descriptor>`, which the host
#   writes before the launch. Each says where a tensor lies in global memory, what shape it and its
#   tiles have (``block_shape``), and how a tile is laid out in shared memory (``layout``).
# - **Shared memory.** ``allocate_shared_memory`` reserves room for a tile and for a barrier.
#   ``mbarrier.init`` sets how many arrivals the barrier expects, here one.
# - **Load.** ``mbarrier.expect`` makes this arrival and announces how many bytes will follow.
#   ``tma_load`` asks for the tile and returns at once. Gluon has one thread execute both.
#   ``mbarrier.wait`` holds all threads until the bytes have arrived; the next section explains its
#   argument 0.
# - **Store.** ``tma_store`` asks the engine to copy the tile to ``y``. ``store_wait(0)`` holds the
#   threads until no store is still reading shared memory; ``y`` itself is complete when the kernel
#   ends. (``tma_load`` and ``tma_store`` are our names, because Gluon's, in the comments, differ
#   between versions.)
#
# A barrier that counts in phases
# -------------------------------
#
# The copy kernel waits once, but a loop waits at the same barrier again and again. It can, because
# a barrier counts in *phases*. A phase ends when the expected number of threads has arrived **and**
# the expected number of bytes has been written; the next one then begins by itself, with the count
# that ``init`` has set.
#
# A thread must therefore say which phase it is waiting for, using a single bit, the *parity*.
# Phases are numbered 0, 1, 2, …, and ``mbarrier.wait(barrier, parity)`` lets a thread pass when the
# last phase to end has this parity. Here is a model in Python, with arrivals but no bytes:


class Barrier:
    def __init__(self, count):
        self.count = self.missing = count
        self.phase = 0  # the phase in progress

    def arrive(self):
        self.missing -= 1
        if self.missing == 0:
            self.missing, self.phase = self.count, self.phase + 1

    def lets_pass(self, parity):
        return (self.phase - 1) % 2 == parity % 2


# %%
# At a new barrier, parity 0 blocks because phase 0 has not ended, whereas parity 1 passes at once,
# as if a phase −1 had already ended.


# Drawing
def drawn_phases(axes):
    barrier, ends = Barrier(1), (1.0, 2.5, 3.5, 5.0)
    edges = (0.0, *ends)
    for number, (begin, end) in enumerate(zip(edges, ends, strict=False)):
        for parity in (0, 1):
            passes = barrier.lets_pass(parity)
            axes.barh(
                1 - parity, end - begin, left=begin, height=0.62, edgecolor="#59636e",
                color="#ffffff" if passes else "#d1d9e0",
            )  # fmt: skip
            word = "passes" if passes else "blocks"
            axes.text(
                (begin + end) / 2,
                1 - parity,
                word,
                ha="center",
                va="center",
                fontsize=10,
            )
        axes.text((begin + end) / 2, 1.48, f"phase {number}", ha="center", fontsize=10)
        barrier.arrive()
    for end in ends[:-1]:
        axes.axvline(end, color="#1f2328", linestyle="--", linewidth=1.4, zorder=3)
    axes.set_yticks([1, 0], ["parity 0", "parity 1"])
    axes.set(
        xticks=[], xlabel="time; at each dashed line a phase ends", ylim=(-0.5, 1.8)
    )
    axes.grid(False)


lab.sketch(
    "When a barrier lets a thread pass, by parity",
    "In phases 0 and 2, parity 0 blocks and parity 1 passes; in phases 1 and 3, the reverse.",
    drawn_phases,
    height=2.4,
)

# %%
# .. admonition:: Key idea
#    :class: kb-key
#
#    One bit cannot tell phase 2 from phase 0. A thread that asks for phase 2 while phase 1 is still
#    running passes at once, because phase 0 had the same parity. A thread that asks for phase 1
#    after phase 2 has ended waits for phase 3, which may never end. Nothing reports either mistake.

# Measuring
GLUON_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float32: gl.float32}


def describe(x, *block):
    layout = gl.NVMMASharedLayout.get_default_for(list(block), GLUON_DTYPES[x.dtype])
    return TensorDescriptor.from_tensor(x, list(block), layout)


@gluon.jit
def note_progress(log_ptr, value):
    gl.store(log_ptr, value, cache_modifier=".wt")  # through all caches, to the host


@gluon.jit
def load_tiles(
    x_desc, ring, full, empty, n, log_ptr, STAGES: gl.constexpr, FIRST: gl.constexpr
):
    for i in range(n):
        slot, parity = i % STAGES, (i // STAGES) & 1
        note_progress(log_ptr, 2 * i + 1)
        mbarrier.wait(empty.index(slot), parity ^ FIRST)
        note_progress(log_ptr, 2 * i + 2)
        mbarrier.expect(full.index(slot), x_desc.block_type.nbytes)
        row = i * x_desc.block_shape[0]
        tma_load(x_desc, [row, 0], full.index(slot), ring.index(slot))


@gluon.jit
def add_tiles(
    out_ptr, ring, full, empty, n, log_ptr, STAGES: gl.constexpr, MISTAKE: gl.constexpr
):
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    total = gl.zeros([32, 32], gl.float32, layout)
    for i in range(n):
        slot, parity = i % STAGES, (i // STAGES) & 1
        note_progress(log_ptr + 1, 2 * i + 1)
        if MISTAKE == "always waits for parity 0":
            mbarrier.wait(full.index(slot), 0)
        elif MISTAKE != "does not wait for the tile":
            mbarrier.wait(full.index(slot), parity)
        note_progress(log_ptr + 1, 2 * i + 2)
        if MISTAKE == "releases before it reads":
            mbarrier.arrive(empty.index(slot))
        pause(5000)
        total += ring.index(slot).load(layout)
        if MISTAKE != "never releases" and MISTAKE != "releases before it reads":
            mbarrier.arrive(empty.index(slot))
    rows = gl.arange(0, 32, gl.SliceLayout(1, layout))
    columns = gl.arange(0, 32, gl.SliceLayout(0, layout))
    gl.store(out_ptr + rows[:, None] * 32 + columns[None, :], total)


@gluon.jit
def sum_kernel(
    x_desc, out_ptr, n, log_ptr,
    STAGES: gl.constexpr, FIRST: gl.constexpr, MISTAKE: gl.constexpr,
):  # fmt: skip
    ring = gl.allocate_shared_memory(gl.float32, [STAGES, 32, 32], x_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=1)
    gl.warp_specialize(
        [
            (add_tiles, (out_ptr, ring, full, empty, n, log_ptr, STAGES, MISTAKE)),
            (load_tiles, (x_desc, ring, full, empty, n, log_ptr, STAGES, FIRST)),
        ],
        [1],
        [24],
    )


@gluon.jit
def chain_kernel(a_desc, b_desc, v_desc, c_desc):
    # -- load: three tiles, and one barrier for all of them
    a_s = gl.allocate_shared_memory(a_desc.dtype, a_desc.block_shape, a_desc.layout)
    b_s = gl.allocate_shared_memory(b_desc.dtype, b_desc.block_shape, b_desc.layout)
    v_s = gl.allocate_shared_memory(v_desc.dtype, v_desc.block_shape, v_desc.layout)
    loaded = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(loaded, count=1)
    mbarrier.expect(loaded, 3 * a_desc.block_type.nbytes)
    tma_load(a_desc, [0, 0], loaded, a_s)
    tma_load(b_desc, [0, 0], loaded, b_s)
    tma_load(v_desc, [0, 0], loaded, v_s)
    mbarrier.wait(loaded, 0)
    # -- multiply: both operands in shared memory
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    zeros = gl.zeros([64, 64], gl.float32, layout)
    s = warpgroup_mma(a_s, b_s, zeros, is_async=True)
    s = warpgroup_mma_wait(0, deps=[s])
    # -- multiply again: the first operand where it lies, in registers
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    p = gl.maximum(s, 0.0).to(a_desc.dtype)
    p = gl.convert_layout(p, operand, assert_trivial=True)
    c = warpgroup_mma(p, v_s, zeros, is_async=True)
    c = warpgroup_mma_wait(0, deps=[c])
    # -- store
    a_s.store(c.to(a_desc.dtype))
    fence_async_shared()
    tma_store(c_desc, [0, 0], a_s)
    tma.store_wait(0)


@gluon.jit
def double_role(tile, loaded, doubled, FENCE: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    mbarrier.wait(loaded, 0)
    tile.store(2 * tile.load(layout))
    if FENCE:
        fence_async_shared()
    mbarrier.arrive(doubled)


@gluon.jit
def copy_role(x_desc, y_desc, tile, loaded, doubled):
    row = gl.program_id(0) * x_desc.block_shape[0]
    mbarrier.expect(loaded, x_desc.block_type.nbytes)
    tma_load(x_desc, [row, 0], loaded, tile)
    mbarrier.wait(doubled, 0)
    tma_store(y_desc, [row, 0], tile)
    tma.store_wait(0)


@gluon.jit
def double_kernel(x_desc, y_desc, FENCE: gl.constexpr):
    tile = gl.allocate_shared_memory(x_desc.dtype, x_desc.block_shape, x_desc.layout)
    loaded = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    doubled = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(loaded, count=1)
    mbarrier.init(doubled, count=1)
    gl.warp_specialize(
        [
            (double_role, (tile, loaded, doubled, FENCE)),
            (copy_role, (x_desc, y_desc, tile, loaded, doubled)),
        ],
        [1],
        [24],
    )


def through_shared(kernel, x, **options):
    y = torch.empty_like(x)
    kernel[(x.shape[0] // 32,)](describe(x, 32, 32), describe(y, 32, 32), **options)
    return y


def add_up(x, log, first=1, mistake=""):
    out = torch.zeros(32, 32, device=x.device)
    sum_kernel[(1,)](
        describe(x, 32, 32), out, x.shape[0] // 32, log,
        STAGES=2, FIRST=first, MISTAKE=mistake, num_warps=4,
    )  # fmt: skip
    return out


def chain(a, b, v):
    c = torch.empty_like(a)
    chain_kernel[(1,)](*(describe(x, 64, 64) for x in (a, b, v, c)))
    return c


def emitted():
    x = torch.randn(2**17, 32, device=runtime.DEVICE)
    a, b, v = torch.randn(3, 64, 64, device=runtime.DEVICE, dtype=torch.bfloat16)
    log = torch.zeros(2, device=runtime.DEVICE, dtype=torch.int32)
    launches = {
        "copy": lambda: through_shared(copy_kernel, x),
        "sum": lambda: add_up(tiles_of_powers(), log),
        "chain": lambda: chain(a, b, v),
        "double": lambda: through_shared(double_kernel, x, FENCE=True),
        "double, no fence": lambda: through_shared(double_kernel, x, FENCE=False),
    }
    rows = []
    for name, launch in launches.items():
        [(_, compiled)] = lab.compiled_by(launch)
        ptx = compiled.asm["ptx"]
        wrong = "-"
        if name.startswith("double"):
            wrong = sum(int((launch() != 2 * x).sum()) for _ in range(20))
        rows.append(
            {
                "kernel": name,
                "copies by TMA": ptx.count("cp.async.bulk.tensor"),
                "wgmma": ptx.count("wgmma.mma_async"),
                "fences": ptx.count("fence.proxy.async"),
                "shuffles": ptx.count("shfl.sync"),
                "wrong numbers": wrong,
            }
        )
    return rows


def tiles_of_powers(n=6):
    """Tile i is full of 10 to the power i: a digit of a sum counts how often the tile came."""
    powers = 10.0 ** torch.arange(n, device=runtime.DEVICE)
    return powers.repeat_interleave(32)[:, None].expand(-1, 32).float().contiguous()


@gluon.jit
def work_in_turns(log_ptr, n, ME: gl.constexpr, TURNS: gl.constexpr):
    for i in range(n):
        if TURNS:
            named_barrier("sync", 9 + ME, 256)
            pause(20)  # or the clock may be read before the barrier has opened
        begin = clock()
        pause(1000)  # stands for the matmuls
        gl.store(log_ptr + (ME * n + i) * 2, begin)
        gl.store(log_ptr + (ME * n + i) * 2 + 1, clock())
        if TURNS:
            named_barrier("arrive", 10 - ME, 256)
        pause(1000)  # stands for the exponentials


@gluon.jit
def follows(log_ptr, n, TURNS: gl.constexpr):
    if TURNS:
        named_barrier("arrive", 9, 256)  # the first turn is the other's
    work_in_turns(log_ptr, n, 1, TURNS)


@gluon.jit
def begins(log_ptr, n, TURNS: gl.constexpr):
    work_in_turns(log_ptr, n, 0, TURNS)
    if TURNS:
        named_barrier("sync", 9, 256)  # the last arrival of the other


@gluon.jit
def turns_kernel(log_ptr, n, TURNS: gl.constexpr):
    gl.warp_specialize(
        [(begins, (log_ptr, n, TURNS)), (follows, (log_ptr, n, TURNS))],
        [4],
        [24],
    )


def turns():
    rows = []
    for name, taken in (("free", False), ("in turns", True)):
        for _ in range(2):  # the first is slow: its code is not in a cache yet
            log = torch.zeros(2, 6, 2, device=runtime.DEVICE, dtype=torch.int64)
            turns_kernel[(1,)](log, 6, taken, num_warps=4)
        stamps = (log - log.min()).tolist()
        for me, spans in enumerate(stamps):
            for number, (begin, end) in enumerate(spans):
                rows.append(
                    {"run": name, "consumer": me, "number": number}
                    | {"begins, cycles": begin, "ends, cycles": end}
                )
    return rows


# %%
# Three rungs without roles
# -------------------------
#
# To judge roles fairly, we first make a matmul fast without them. All eight warps of its kernel run
# the same loop.
#
# Shared memory holds a *ring* of slots, each with room for the two tiles of a step,
# ``a_s.index(slot)`` and ``b_s.index(slot)``. With ``STAGES`` slots, step ``i`` uses slot
# ``i % STAGES``. Each slot has a barrier, ``full.index(slot)``, at which the warps wait until its
# tiles have been written.
#
# **Rung 1: load, wait, multiply.** There is only one slot. The next tiles cannot be loaded until
# the matmul has read this slot, and until they arrive the tensor cores are idle.
#
# **Rung 2: loads ahead.** With three slots, the tiles of the next two steps arrive during a matmul.
# But the warps ask for more tiles only after the matmul, and while they ask, the tensor cores are
# idle.
#
# **Rung 3: one matmul in flight.** The warps need not wait for a matmul, because ``wgmma``, like
# the copy, only starts the work: with ``is_async=True``, ``warpgroup_mma`` returns at once. A later
# ``warpgroup_mma_wait(n)`` waits until at most ``n`` matmuls are unfinished. With ``n`` equal to 1,
# the tensor cores already have the next matmul while the warps ask for tiles:


# Drawing
def drawn_flight(axes):
    load, long, ask, end = 2.7, 3.0, 1.0, 12.0
    shades = {"waits": "#d1d9e0", "works": "#eaf2fb", "asks": lab.colour("PyTorch")}

    def bar(lane, begin, until, text, shade):
        until = min(until, end)
        look = {"color": shades[shade], "edgecolor": "#59636e", "height": 0.66}
        axes.barh(lane, until - begin, left=begin, **look)
        middle = (begin + until) / 2
        ink = "#ffffff" if shade == "asks" else "#1f2328"
        look = {"ha": "center", "va": "center", "fontsize": 9 if "\n" in text else 10}
        axes.text(middle, lane, text, color=ink, linespacing=1.0, **look)

    now = 0.0
    for i in range(3):  # rung 1: nothing overlaps
        bar(0, now, now + long, f"wait for\nmatmul {i}", "waits")
        bar(1, now, now + long, f"matmul {i}", "works")
        bar(0, now + long, now + long + ask, "ask", "asks")
        now += long + ask
        if now < end:
            text = f"wait for\ntiles {i + 1}" if now + load < end else ""  # cut: no room
            bar(0, now, now + load, text, "waits")
        now += load
        if now > end:
            break
    for lane, in_flight in ((2.3, 0), (4.6, 1)):
        now = issued = free = 0.0
        ends = []  # when each matmul has ended
        for i in range(5):
            begin = max(now, free)  # of matmul i, after the one before
            free = begin + long
            ends.append(free)
            if begin < end:
                bar(lane + 1, begin, free, f"matmul {i}", "works")
            if i < in_flight:  # the first is issued, and nothing waited for
                continue
            issued, now = now, ends[i - in_flight]
            if issued < min(now, end):
                bar(lane, issued, now, f"wait for\nmatmul {i - in_flight}", "waits")
            if now < end:
                bar(lane, now, now + ask, "ask", "asks")
            now += ask
    names = [f"rung {n}: warps" for n in (1, 2, 3)]
    axes.set_yticks([0, 2.3, 4.6, 1, 3.3, 5.6], [*names, *["tensor cores"] * 3])
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.set(xticks=[], xlabel="time, not to scale", xlim=(0, end))
    axes.grid(False)


lab.sketch(
    "When the tensor cores are idle, rung by rung",
    "Lanes over time. In rung 1 the tensor cores are idle while the warps ask for tiles and wait "
    "for them; in rung 2 only while they ask; in rung 3 they go from one matmul to the next.",
    drawn_flight,
    height=4.0,
)

# %%
# All three rungs share this loop. The tiles of the first ``STAGES`` steps were asked for before it:
#
# .. literalinclude:: warps_with_roles.py
#    :language: python
#    :pyobject: loop_kernel
#    :lines: 23-24,26,28-29,32-35
#    :dedent:
#
# - **Matmul.** ``IN_FLIGHT`` is 1 in rung 3 and otherwise 0. The wait takes the accumulators as
#   ``deps`` and hands them back, so that the compiler lets nothing read them earlier.
# - **Refill.** Our ``fetch`` announces the tiles of step ``after`` and asks for them, unless there
#   is no such step (``some`` is false). In rung 3, for example, step 5 refills the slot of step 4
#   with the tiles of step 7.
#
# One barrier per slot is enough, because the warps that read a slot also refill it: Triton makes
# all eight meet before one thread asks.


# Whole: the loop of rungs 1 to 3
@gluon.jit
def stamp(log_ptr, role, step, which, TRACED: gl.constexpr):
    # store the SM's clock, if this launch is traced
    if TRACED:
        at = log_ptr + (role * TRACED + step) * 4 + which
        gl.store(at, clock(), mask=(gl.program_id(0) == 0) & (step < TRACED))


@gluon.jit
def tile_of(n_m, n_n, GROUP: gl.constexpr):
    # groups of rows of tiles: programs that run together share tiles in L2
    program = gl.program_id(0)
    first = program // (GROUP * n_n) * GROUP
    height = gl.minimum(n_m - first, GROUP)
    in_group = program % (GROUP * n_n)
    return first + in_group % height, in_group // height


@gluon.jit
def fetch(a_desc, b_desc, a_s, b_s, full, row, column, i, slot, pred):
    # announce the bytes of both tiles of step i, and ask for them
    here = full.index(slot)
    mbarrier.expect(
        here, a_desc.block_type.nbytes + b_desc.block_type.nbytes, pred=pred
    )
    k = i * a_desc.block_shape[1]
    tma_load(a_desc, [row, k], here, a_s.index(slot), pred=pred)
    tma_load(b_desc, [k, column], here, b_s.index(slot), pred=pred)


@gluon.jit
def loop_kernel(
    a_desc, b_desc, c_desc, n_m, n_n, steps, log_ptr,
    STAGES: gl.constexpr, IN_FLIGHT: gl.constexpr, TRACED: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = a_desc.dtype
    BLOCK_M: gl.constexpr = a_desc.block_shape[0]
    BLOCK_N: gl.constexpr = b_desc.block_shape[1]
    BLOCK_K: gl.constexpr = a_desc.block_shape[1]
    a_s = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, BLOCK_K], a_desc.layout)
    b_s = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_K, BLOCK_N], b_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
    tile_m, tile_n = tile_of(n_m, n_n, 8)
    row, column = tile_m * BLOCK_M, tile_n * BLOCK_N
    # -- begin: fill the ring. Each of the two warpgroups waits for its own half of a matmul only,
    # so before a copy Triton inserts a barrier of all eight warps (bar.sync)
    for s in gl.static_range(STAGES):
        fetch(a_desc, b_desc, a_s, b_s, full, row, column, s, s, s < steps)
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, BLOCK_N, 16])
    acc = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, layout)
    for i in range(steps):
        slot = i % STAGES
        stamp(log_ptr, 0, i, 0, TRACED)
        mbarrier.wait(full.index(slot), (i // STAGES) & 1)
        stamp(log_ptr, 0, i, 1, TRACED)
        acc = warpgroup_mma(a_s.index(slot), b_s.index(slot), acc, is_async=True)
        acc = warpgroup_mma_wait(IN_FLIGHT, deps=[acc])
        stamp(log_ptr, 0, i, 2, TRACED)
        # -- refill: the slot whose matmul has ended
        ended = i - IN_FLIGHT  # the last matmul that has ended
        after = ended + STAGES  # the step whose tiles take its slot
        some = (ended >= 0) & (after < steps)  # both exist
        fetch(a_desc, b_desc, a_s, b_s, full, row, column, after, after % STAGES, some)
        stamp(log_ptr, 0, i, 3, TRACED)
    acc = warpgroup_mma_wait(0, deps=[acc])
    # -- store
    c_s = gl.allocate_shared_memory(dtype, [BLOCK_M, BLOCK_N], c_desc.layout)
    c_s.store(acc.to(dtype))
    fence_async_shared()
    tma_store(c_desc, [row, column], c_s)
    tma.store_wait(0)


# %%
# A ring with two barriers per slot
# ---------------------------------
#
# In rung 3 the warps that multiply still ask for tiles. With roles, no warp does both:
#
# - **The loader**, a single :term:`warp`, asks the copy engine for tiles.
# - **A consumer**, a :term:`warpgroup` of four warps, issues matmuls and holds the accumulators. It
#   takes four, because each of the SM's four tensor cores works with the registers of one of
#   them.
#
# The loader refills slots that it does not read, so the consumers must tell it when they have read
# them. Each slot therefore has a second barrier, ``empty``, at which the loader waits for them. At
# ``full``, the consumers wait for the tiles, as before.


# Drawing
def drawn_roles(axes):
    box = {"facecolor": "#eaf2fb", "edgecolor": "#59636e"}
    store = {"facecolor": "#ffffff", "edgecolor": "#59636e"}
    unit = {"facecolor": "#f6f8fa", "edgecolor": "#59636e"}

    def words(x, y, text, size=10):
        lines = text.split("\n")  # each is centred by itself, in whatever font
        for i, line in enumerate(lines):
            at = y + 0.46 * ((len(lines) - 1) / 2 - i)
            look = {"ha": "center", "va": "center", "fontsize": size}
            axes.text(x, at, line, color="#1f2328", **look)

    def rectangle(x, y, width, height, text, style, size=11):
        axes.add_patch(Rectangle((x, y), width, height, **style))
        words(x + width / 2, y + height / 2, text, size=size)

    def arrow(start, end, text, at, line="-"):
        look = {"arrowstyle": "->", "color": "#59636e", "linestyle": line}
        axes.annotate("", xy=end, xytext=start, arrowprops=look)
        words(*at, text)

    rectangle(0, 6, 2.5, 1.4, "loader\n1 warp", box)
    axes.add_patch(Rectangle((8.12, 6.12), 2.5, 1.4, **box))
    rectangle(8, 6, 2.5, 1.4, "2 consumers\n4 warps each", box)
    rectangle(0, 2.6, 2.5, 1.4, "copy engine\n(TMA)", unit)
    rectangle(8, 2.6, 2.5, 1.4, "tensor cores", unit)
    rectangle(0, 0, 10.5, 1, "global memory: a, b", store)
    for slot in range(3):
        left = 3.72 + 1.02 * slot
        rectangle(left, 6.5, 0.98, 0.6, "empty", unit, 10)
        rectangle(left, 4.9, 0.98, 0.6, "full", unit, 10)
        rectangle(left, 2.6, 0.98, 1.4, f"slot\n{slot}", store)
    words(5.23, 7.4, "barriers")
    arrow((2.55, 6.8), (3.67, 6.8), "waits", (3.1, 7.08), "--")
    arrow((2.55, 6.1), (3.67, 5.3), "announces", (3.86, 5.98))
    arrow((2.55, 3.95), (3.67, 4.95), "bytes written", (4.42, 4.42))
    arrow((7.95, 6.8), (6.83, 6.8), "arrives", (7.4, 7.08))
    arrow((7.95, 6.1), (6.83, 5.3), "waits", (7.6, 5.38), "--")
    arrow((1.25, 5.95), (1.25, 4.05), "names\na tile", (0.55, 5))
    arrow((9.25, 5.95), (9.25, 4.05), "issue\nwgmma", (9.97, 5))
    arrow((2.55, 3.1), (3.67, 3.1), "writes", (3.1, 3.36))
    arrow((6.83, 3.1), (7.95, 3.1), "reads", (7.4, 3.36))
    arrow((1.25, 1), (1.25, 2.55), "reads", (1.8, 1.75))
    axes.set(xlim=(-0.1, 10.7), ylim=(-0.1, 7.7))
    axes.axis("off")


lab.sketch(
    "Who does what in a program with roles",
    "A loader names tiles to the copy engine, which writes them into slots of shared memory. Two "
    "consumers issue matmuls to the tensor cores, which read the slots. At each slot's barrier "
    "empty the loader waits and the consumers arrive; at full the loader announces bytes, the copy "
    "engine reports them as written, and the consumers wait.",
    drawn_roles,
)

# %%
# Tile ``i`` (in our matmuls, the two tiles of step ``i``) goes to slot ``i % SLOTS``. Two slots,
# one consumer and five tiles show who waits, and when:


# Drawing
def drawn_ring(axes):
    ask, copy, multiply_one, tiles = 0.25, 1.8, 2.4, 5
    come, read, now = {}, {}, 0.0  # when tile i is there, when it has been read
    shades = {"waits": "#d1d9e0", "comes": "#fff4e5", "reads": "#eaf2fb"}
    shades |= {"lies": "#ffffff", "asks": lab.colour("PyTorch")}

    def bar(lane, begin, end, text, shade):
        if end > begin:
            look = {"color": shades[shade], "edgecolor": "#59636e", "height": 0.72}
            axes.barh(lane, end - begin, left=begin, **look)
            middle, size = (begin + end) / 2, 9 if "\n" in text else 10
            axes.text(middle, lane, text, ha="center", va="center", fontsize=size)

    for i in range(tiles):
        slot, before, parity = i % 2, read.get(i - 1, 0.0), (i // 2) & 1
        empty = max(now, read.get(i - 2, 0.0))  # one tile after another
        bar(0, now, empty, f"empty[{slot}]\nparity {parity ^ 1}", "waits")
        bar(0, empty, empty + ask, "", "asks")
        now = empty + ask
        come[i] = now + copy
        bar(1 + slot, now, come[i], f"load {i}", "comes")
        begin = max(come[i], before)
        bar(3, before, begin, f"full[{slot}]\nparity {parity}", "waits")
        read[i] = begin + multiply_one
        bar(1 + slot, come[i], begin, "1 ready" if i == 1 else "", "lies")
        bar(1 + slot, begin, read[i], f"read {i}", "reads")
        bar(3, begin, read[i], f"matmul {i}", "reads")
    axes.set_yticks(range(4), ["loader", "slot 0", "slot 1", "consumer"])
    axes.invert_yaxis()
    axes.set(
        xticks=[],
        xlabel="time, not to scale; grey: waits, dark orange: asks, white: ready",
    )
    axes.set_xlim(-0.03, read[tiles - 1] + 0.03)  # or the edges of bars are cut
    axes.grid(False)


lab.sketch(
    "Two slots, five tiles: who waits for what",
    "Lanes over time. The loader asks for tiles 0 and 1 at once, and for each later tile waits "
    "until its slot has been read: for tile 2 at empty[0], parity 0, for tile 4 at empty[0], "
    "parity 1. The consumer waits once, for tile 0, at full[0], parity 0.",
    drawn_ring,
    height=3.3,
)

# %%
# Tile 2 needs slot 0 again, so the loader waits until tile 0 has been read. The consumer waits only
# once, because every later tile arrives during a matmul.
#
# **Which parity?** Tile ``i`` is use number ``i // SLOTS`` of its slot, and each use ends the phase
# of the same number at both barriers.
#
# - The consumer waits until the tile of *this* use has arrived, so it asks ``full`` for the parity
#   of the use.
# - The loader waits until the tile of the use *before* has been read, so it asks ``empty`` for the
#   other parity. In use 0, a new barrier lets it pass.

# %%
lab.table(
    [
        {"use": use, "tiles": ", ".join(str(i) for i in range(5) if i // 2 == use)}
        | {"consumer, at full": f"parity {use & 1}"}
        | {"loader, at empty": f"parity {use & 1 ^ 1}"}
        for use in range(3)
    ],
    "What each role asks for, with two slots",
)

# %%
# One bit is enough, because no role can get two phases ahead: a slot is never refilled before it
# has been read, nor read again before it has been refilled.
#
# Written as Python generators, both roles run without a GPU. Each ``yield`` names a barrier and the
# parity for which the role waits, and a scheduler resumes the role when the barrier lets it pass.
# Both run to their end.


def loader(full, empty, n, slots):
    for i in range(n):
        slot, parity = i % slots, (i // slots) & 1
        yield "empty", slot, empty[slot], parity ^ 1
        full[slot].arrive()  # on the GPU, the tile's arrival does this


def consumer(full, empty, n, slots):
    for i in range(n):
        slot, parity = i % slots, (i // slots) & 1
        yield "full", slot, full[slot], parity
        empty[slot].arrive()


# %%


# Measuring
def play(n, slots, loads=loader, consumers=(consumer,), expected=1):
    """Run the roles until none can go on. Return where each then waits, or None if it ended."""
    full = [Barrier(1) for _ in range(slots)]
    empty = [Barrier(expected) for _ in range(slots)]
    roles = [role(full, empty, n, slots) for role in (loads, *consumers)]
    waiting = [next(role) for role in roles]
    moved = True
    while moved:
        moved = False
        for number, role in enumerate(roles):
            at = waiting[number]
            if at and at[2].lets_pass(at[3]):
                waiting[number], moved = next(role, None), True
    return [at and f"{at[0]}[{at[1]}]" for at in waiting]


def loader_from_parity_0(full, empty, n, slots):
    for i in range(n):
        slot, parity = i % slots, (i // slots) & 1
        yield "empty", slot, empty[slot], parity
        full[slot].arrive()


def consumer_that_keeps(full, empty, n, slots):
    for i in range(n):
        slot, parity = i % slots, (i // slots) & 1
        yield "full", slot, full[slot], parity


in_the_model = {
    "the loader begins with parity 0": play(6, 2, loads=loader_from_parity_0),
    "never releases": play(6, 2, consumers=(consumer_that_keeps,)),
}
assert play(6, 2) == [None, None]
assert set(map(tuple, in_the_model.values())) == {("empty[0]", "full[0]")}
assert play(6, 2, consumers=(consumer, consumer), expected=2) == [None] * 3
assert all(play(6, 2, consumers=(consumer, consumer), expected=1))  # all wait for ever

# %%

# Folded: The scheduler, play
lab.source(play)

# %%
# The smallest matmul with roles
# ------------------------------
#
# In a kernel, each generator becomes a ``@gluon.jit`` function that some of the warps run. Here is
# a complete matmul, with tiles of 64 × 64 and three slots.
#
# **The loader** waits until a slot is empty, announces the bytes of two tiles, and asks for a tile
# of ``a`` and one of ``b``:
#
# .. literalinclude:: /../src/kernelbook/small/warps_with_roles.py
#    :language: python
#    :start-at: TILE =
#    :end-at: b_s.index(slot))
#
# **The consumer** waits for a full slot, multiplies, and releases the slot:
#
# .. literalinclude:: /../src/kernelbook/small/warps_with_roles.py
#    :language: python
#    :pyobject: consumer
#
# - **Matmul.** ``warpgroup_mma`` adds ``a @ b`` of this slot to ``c``. Without ``is_async`` it
#   returns only when the tensor cores are done, so the next line may release the slot.
# - **Arrival.** ``mbarrier.arrive`` counts the role once, after all its threads have reached it.
# - **Layout.** The hardware prescribes which thread holds which accumulator, and ``layout``
#   describes this: the four warps are stacked vertically (``[4, 1]``), each with 16 rows of the
#   tile.
# - **Store.** Threads and the copy engine reach shared memory by different paths
#   (:term:`proxies <proxy>`), so the engine may not see the values in ``c_s`` until the threads
#   that wrote them execute ``fence_async_shared``.

# %%


# Folded: The layout: its numbers, and which thread holds which accumulator
nan = float("nan")
instructions = lab.measure("Instructions of the kernels", emitted)
of = {row["kernel"]: row for row in instructions.rows}


def count(kernel, column):
    return of[kernel][column] if of else nan


def holder(row, column):
    """The thread of a warp that holds an accumulator, and which of its registers."""
    thread = row % 8 * 4 + column % 8 // 2
    register = column // 8 * 4 + row // 8 * 2 + column % 2
    return thread, register


def drawn_accumulators(axes):
    for row in range(16):
        for column in range(16):
            thread, register = holder(row, column)
            fill = "#eaf2fb" if thread // 4 % 2 == 0 else "#ffffff"
            fill = "#fff4e5" if thread == 5 else fill
            box = {"facecolor": fill, "edgecolor": "#d1d9e0"}
            axes.add_patch(Rectangle((column, row), 1, 1, **box))
            text = f"{thread}" if thread != 5 else f"5:{register}"
            axes.text(
                column + 0.5, row + 0.5, text, ha="center", va="center", fontsize=7
            )
    axes.set(xlim=(0, 16), ylim=(16, 0), xlabel="column", ylabel="row", aspect="equal")
    axes.set(xticks=range(0, 17, 8), yticks=range(0, 17, 8))
    axes.grid(False)


lab.sketch(
    "The thread that holds each accumulator",
    "A grid of 16 × 16 numbers. Four neighbouring threads share a row; thread 5 holds rows 1 and "
    "9, columns 2, 3, 10 and 11.",
    drawn_accumulators,
    height=4.6,
)
lab.together(
    lab.read(
        "`[3, 0]` is Hopper's version of the matmul instruction. `[16, TILE, 16]` is a warp's "
        "share of one instruction: 16 rows of 64 accumulators, over 16 columns of `a`. In the "
        "figure, thread 5 is orange, and the number after the colon is its register."
    ),
    lab.read(
        "The first operand of `wgmma` may lie in registers, in exactly the layout of the "
        "accumulators; the second always lies in shared memory. The matmul `relu(a b) v` can "
        "therefore read `relu(a b)` where it lies. In this kernel, `assert_trivial` makes the "
        "compiler fail if a value would have to move to another thread"
        + (
            ", and the compiled code has no shuffles, the instructions that move one:"
            if count("chain", "shuffles") == 0
            else ":"
        )
    ),
    lab.source(chain_kernel),
)

# %%
# **The kernel** allocates the slots and their barriers, and starts the roles:
#
# .. literalinclude:: /../src/kernelbook/small/warps_with_roles.py
#    :language: python
#    :pyobject: matmul_kernel
#
# Every role but the first gets extra warps. In the last line, ``[1]`` says how many, and ``[24]``
# says how many registers each of their threads gets.
#
# **The launch** writes the descriptors and starts one program per tile of ``c``:
#
# .. literalinclude:: /../src/kernelbook/small/warps_with_roles.py
#    :language: python
#    :pyobject: matmul

# %%


# Reading
def tried_here():
    """What is known of the small matmul: that it is right, where a GPU can run it."""
    if not HOPPER:
        return (
            "This matmul has passed the package's test against float64 on an H200. It is meant to "
            "be read; the next section makes it fast."
        )
    left, right = torch.randn(2, 640, 640, device=runtime.DEVICE, dtype=torch.bfloat16)
    exact = left.double() @ right.double()
    off = (small.matmul(left, right) - exact).abs().max() / exact.abs().max()
    assert off < 2**-7, "the smallest matmul is wrong"
    return f"On this GPU, no value differs from float64 by more than {off:.1e} of the largest."


lab.read(tried_here())

# %%

# Folded: Whether the fence is needed
written, left_out = (count(name, "fences") for name in ("double", "double, no fence"))
wrong = count("double, no fence", "wrong numbers")
lab.together(
    lab.read(
        "In `double_kernel`, one role doubles a tile and another asks the engine to store it. "
        + (
            "Triton inserts the fence where it sees both sides in one kernel. We write it all the "
            "same, because a compiler may see less in another kernel, and the manual does not say "
            "what happens without the fence."
            if left_out >= written
            else "Triton does not insert the fence for us. "
            + (
                "In 20 launches without it no number was wrong, but the manual does not promise "
                "that."
                if wrong == 0
                else f"In 20 launches without it, {wrong:,.0f} numbers were wrong."
            )
        )
    ),
    lab.table(
        [
            {"kernel": name}
            | {
                "fences in its code": row["fences"],
                "wrong numbers": row["wrong numbers"],
            }
            for name, row in of.items()
            if name.startswith("double")
        ],
        "The kernel with and without the fence"
        + (
            f". Recorded on {instructions.provenance['gpu']}."
            if of
            else f". {instructions.why_not}"
        ),
    ),
    lab.source(double_role),
    lab.source(double_kernel),
)

# %%
# Rung 4: a loader and two consumers
# ----------------------------------
#
# Rung 4 keeps the tiles of the rungs before it. It needs two consumers, because each thread of a
# single one would hold 256 accumulators, and a thread has at most 255 :term:`registers <register>`.
# Two things are new.
#
# **Two consumers release a slot.** It is empty when both have read it, so its barrier counts two:
# ``mbarrier.init(empty.index(s), count=2)``. With a count of one, the first arrival would already
# end the phase, and the loader might refill a slot that the other consumer is still reading. If
# both arrive before the loader looks, two phases have ended and the parity is the old one: in our
# model all three roles then wait for ever.
#
# **Registers change hands.** The loader needs hardly any, so it gives most of its share to the
# consumers:


# Drawing
def drawn_registers(axes):
    share = 65536 // (3 * 128) // 8 * 8  # of a thread, in steps of 8
    sums = 64 * BLOCK_N // 128  # accumulators of a consumer's thread
    roles = {"consumer 0": 240, "consumer 1": 240, "loader": 24}
    assert sum(roles.values()) == 3 * share
    ink = {"ha": "center", "va": "center", "color": "#1f2328"}
    for lane, counts in enumerate(([share] * 3, roles.values())):
        left = 0
        for name, count in zip(roles, counts, strict=True):
            fill = "#fff4e5" if name == "loader" else "#ffffff"
            look = {"edgecolor": "#59636e", "height": 0.56}
            axes.barh(lane, count, left=left, color=fill, **look)
            used = 0
            if name != "loader":
                used = sums
                axes.barh(lane, sums, left=left, color="#eaf2fb", **look)
                axes.text(left + sums / 2, lane, f"{sums} accumulators", fontsize=8.5, **ink)
            rest = left + (used + count) / 2
            if used:
                axes.text(rest, lane, f"{count - used}", fontsize=9, **ink)
            narrow = count < 100  # its name ends with it
            look = ink | {"ha": "right" if narrow else "left", "fontsize": 10}
            at = left + count if narrow else left + 2
            axes.text(at, lane - 0.46, f"{name}: {count}", **look)
            left += count
    axes.set_yticks([0, 1], ["equal shares", "with roles"])
    axes.tick_params(axis="y", length=0)
    axes.set(xticks=[], xlabel="registers per thread", xlim=(0, 3 * share))
    axes.set_ylim(1.4, -0.75)
    axes.grid(False)


lab.sketch(
    "Who holds the registers of the SM",
    "Two rows of bars. In equal shares each warpgroup has 168 registers per thread; with roles, "
    "the consumers have 240 each and the loader 24. A consumer's accumulators take 128.",
    drawn_registers,
    height=2.3,
)

# %%
# Only whole :term:`warpgroups <warpgroup>` can give and take registers, so the loader's single warp
# counts as four here.
#
# In the launch of the roles, ``[4, 1]`` and ``[240, 24]`` name the warps and registers of the added
# roles, consumer 1 and the loader. Consumer 0 gets the rest:
#
# .. code-block:: python
#
#    gl.warp_specialize(
#        [(multiply_role, (..., 0, ...)), (multiply_role, (..., 1, ...)), (load_role, ...)],
#        [4, 1],
#        [240, 24],
#    )
#
# The loader works as before. Consumer ``ME`` (0 or 1) multiplies its 64 rows of the tile of ``a``
# (``mine``) and keeps one matmul in flight. Each step but the first (``pred=i > 0``) therefore
# releases the slot of the step *before*:
#
# .. literalinclude:: warps_with_roles.py
#    :language: python
#    :pyobject: multiply_role
#    :lines: 9-10,12,14-16,18
#    :dedent:
#
# After the loop, each consumer stores its own 64 rows:
#
# .. literalinclude:: warps_with_roles.py
#    :language: python
#    :pyobject: multiply_role
#    :lines: 19-23
#    :dedent:


# Whole: roles_kernel and its roles, and the kernel with tl.dot
@gluon.jit
def load_role(work, log_ptr, STAGES: gl.constexpr, TRACED: gl.constexpr):
    a_desc, b_desc, a_s, b_s, full, empty, row, column, steps = work
    for i in range(steps):
        slot = i % STAGES
        stamp(log_ptr, 0, i, 0, TRACED)
        mbarrier.wait(empty.index(slot), ((i // STAGES) & 1) ^ 1)
        stamp(log_ptr, 0, i, 1, TRACED)
        fetch(a_desc, b_desc, a_s, b_s, full, row, column, i, slot, True)
        stamp(log_ptr, 0, i, 2, TRACED)


@gluon.jit
def multiply_role(
    work, log_ptr, ME: gl.constexpr, STAGES: gl.constexpr, TRACED: gl.constexpr
):
    c_desc, a_s, b_s, c_s, full, empty, row, column, steps = work
    BLOCK_N: gl.constexpr = c_desc.block_shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    acc = gl.zeros([64, BLOCK_N], gl.float32, layout)
    for i in range(steps):
        slot = i % STAGES
        stamp(log_ptr, 1 + ME, i, 0, TRACED)
        mbarrier.wait(full.index(slot), (i // STAGES) & 1)
        stamp(log_ptr, 1 + ME, i, 1, TRACED)
        mine = a_s.index(slot).slice(64 * ME, 64)
        acc = warpgroup_mma(mine, b_s.index(slot), acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=[acc])
        stamp(log_ptr, 1 + ME, i, 2, TRACED)
        mbarrier.arrive(empty.index((i + STAGES - 1) % STAGES), pred=i > 0)
    acc = warpgroup_mma_wait(0, deps=[acc])
    c_s.index(ME).store(acc.to(c_desc.dtype))
    fence_async_shared()
    tma_store(c_desc, [row + 64 * ME, column], c_s.index(ME))
    tma.store_wait(0)


@gluon.jit
def roles_kernel(
    a_desc, b_desc, c_desc, n_m, n_n, steps, log_ptr,
    STAGES: gl.constexpr, TRACED: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = a_desc.dtype
    BLOCK_M: gl.constexpr = a_desc.block_shape[0]
    BLOCK_N: gl.constexpr = b_desc.block_shape[1]
    BLOCK_K: gl.constexpr = a_desc.block_shape[1]
    a_s = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, BLOCK_K], a_desc.layout)
    b_s = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_K, BLOCK_N], b_desc.layout)
    c_s = gl.allocate_shared_memory(dtype, [2, 64, BLOCK_N], c_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=2)
    tile_m, tile_n = tile_of(n_m, n_n, 8)
    row, column = tile_m * BLOCK_M, tile_n * BLOCK_N
    loads = (a_desc, b_desc, a_s, b_s, full, empty, row, column, steps)
    sums = (c_desc, a_s, b_s, c_s, full, empty, row, column, steps)
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    gl.warp_specialize(
        [
            (multiply_role, (sums, log_ptr, FIRST, STAGES, TRACED)),
            (multiply_role, (sums, log_ptr, SECOND, STAGES, TRACED)),
            (load_role, (loads, log_ptr, STAGES, TRACED)),
        ],
        [4, 1],
        [240, 24],
    )


@triton.jit
def dot_kernel(
    a_desc, b_desc, c_desc, n_m, n_n, steps,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    first = program // (8 * n_n) * 8
    height = tl.minimum(n_m - first, 8)
    row = (first + program % (8 * n_n) % height) * BLOCK_M
    column = program % (8 * n_n) // height * BLOCK_N
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for i in range(steps):
        k = i * BLOCK_K
        acc = tl.dot(a_desc.load([row, k]), b_desc.load([k, column]), acc)
    c_desc.store([row, column], acc.to(c_desc.dtype))


# %%

# Measuring
TILES = {"a": (BLOCK_M, BLOCK_K), "b": (BLOCK_K, BLOCK_N), "c": (BLOCK_M, BLOCK_N)}
RUNGS = {
    "one buffer": {"kernel": loop_kernel, "STAGES": 1, "IN_FLIGHT": 0, "num_warps": 8},
    "ring": {"kernel": loop_kernel, "STAGES": 3, "IN_FLIGHT": 0, "num_warps": 8},
    "one in flight": {
        "kernel": loop_kernel,
        "STAGES": 3,
        "IN_FLIGHT": 1,
        "num_warps": 8,
    },
    "roles": {"kernel": roles_kernel, "STAGES": 3, "num_warps": 4},
}
TRACE = 16  # steps


def multiply(a, b, kernel, log=None, **options):
    c = torch.empty(a.shape[0], b.shape[1], device=a.device, dtype=a.dtype)
    n_m, n_n = a.shape[0] // BLOCK_M, b.shape[1] // BLOCK_N
    of_c = (64, BLOCK_N) if kernel is roles_kernel else TILES["c"]
    descs = (describe(a, *TILES["a"]), describe(b, *TILES["b"]), describe(c, *of_c))
    traced = 0 if log is None else TRACE
    log = c if log is None else log
    grid = (n_m * n_n,)
    steps = a.shape[1] // BLOCK_K
    kernel[grid](*descs, n_m, n_n, steps, log, TRACED=traced, **options)
    return c


def dot(a, b):
    c = torch.empty(a.shape[0], b.shape[1], device=a.device, dtype=a.dtype)
    n_m, n_n = a.shape[0] // BLOCK_M, b.shape[1] // BLOCK_N
    descs = [
        PlainDescriptor.from_tensor(x, list(TILES[name]))
        for name, x in zip("abc", (a, b, c), strict=True)
    ]
    blocks, steps = (BLOCK_M, BLOCK_N, BLOCK_K), a.shape[1] // BLOCK_K
    dot_kernel[(n_m * n_n,)](
        *descs, n_m, n_n, steps, *blocks, num_warps=8, num_stages=3
    )
    return c


def cases():
    x = torch.randn(4096, 32, device=runtime.DEVICE)
    yield lab.Case("copy", "forward", through_shared(copy_kernel, x), x, x.double())
    doubled = through_shared(double_kernel, x, FENCE=True)
    yield lab.Case("double", "forward", doubled, 2 * x, 2 * x.double())
    log = torch.zeros(2, device=runtime.DEVICE, dtype=torch.int32)
    tiles = tiles_of_powers()
    truth = tiles.double().view(6, 32, 32).sum(0)
    added = tiles.view(6, 32, 32).sum(0)
    yield lab.Case("sum of six tiles", "forward", add_up(tiles, log), added, truth)
    a, b, v = torch.randn(3, 64, 64, device=runtime.DEVICE, dtype=torch.bfloat16)
    truth = (a.double() @ b.double()).relu() @ v.double()
    yield lab.Case("chain", "forward", chain(a, b, v), (a @ b).relu() @ v, truth)
    for m, n, k in ((128, 256, 128), (256, 512, 640), (1280, 768, 1088)):
        a = torch.randn(m, k, device=runtime.DEVICE, dtype=torch.bfloat16)
        b = torch.randn(k, n, device=runtime.DEVICE, dtype=torch.bfloat16)
        truth, what = a.double() @ b.double(), f"{m} × {k} by {k} × {n}"
        for name, options in RUNGS.items():
            ours = multiply(a, b, **options)
            yield lab.Case(f"{name}, {what}", "forward", ours, a @ b, truth)
        yield lab.Case(f"tl.dot, {what}", "forward", dot(a, b), a @ b, truth)


def resources():
    a = torch.randn(1024, 1024, device=runtime.DEVICE, dtype=torch.bfloat16)
    rows = []
    for name, options in RUNGS.items():
        [(_, compiled)] = lab.compiled_by(lambda: multiply(a, a, **options))  # noqa: B023
        asked = re.findall(r"setmaxnreg\S+\s+(\d+)", compiled.asm["ptx"])
        rows.append(
            {
                "rung": name,
                "registers": compiled.n_regs,
                "spills": compiled.n_spills,
                "shared memory, KiB": round(compiled.metadata.shared / 1024, 1),
                "setmaxnreg": ", ".join(map(str, sorted({int(n) for n in asked})))
                or "none",
            }
        )
    return rows


checks = lab.check(
    "The kernels", cases(), here=HOPPER, title="The kernels against float64"
)
needed = lab.measure("What the rungs need", resources)

# %%

# Reading
passed = re.search(
    r"(\d+) checks passed (.+), the worst at (.+)\.", checks.plain.splitlines()[0]
)
lab.read(
    f"All {passed[1]} checks against float64 passed {passed[2]}, the worst at {passed[3]}."
    if passed
    else checks.plain.splitlines()[0]
)

# %%

# Folded: The checks, and the registers and shared memory of the rungs
spills = sum(row["spills"] for row in needed.rows) if needed.rows else nan
asked = "".join(row["setmaxnreg"] for row in needed.rows if row["rung"] == "roles")
lab.together(
    checks,
    needed,
    lab.read(
        (
            f"The rungs spill {spills:.0f} value{'s' * (spills > 1)}."
            if spills
            else "No rung spills a value."
        )
        + (
            " The instruction that moves registers is `setmaxnreg`. Besides the 240 and 24 of the "
            "roles, Triton uses it before and after them: 256 for the warps of the launch, which "
            "become consumer 0, and 120 for each of the two other warpgroups."
            if asked == "24, 120, 240, 256"
            else ""
        )
    ),
)

# %%
# What each rung gains
# --------------------
#
# We compare the four rungs with ``torch.matmul``, which calls cuBLAS, and with Triton's ``tl.dot``,
# for which the compiler builds a ring without roles.


# Measuring
def traced():
    a, b = torch.randn(2, 4096, 4096, device=runtime.DEVICE, dtype=torch.bfloat16)
    lanes = {
        "ring": ["all warps"],
        "one in flight": ["all warps"],
        "roles": ["loader", "consumer 0", "consumer 1"],
    }
    rows = []
    for name, who in lanes.items():
        for _ in range(3):  # the last counts: code and descriptors are in caches then
            log = torch.zeros(3, TRACE, 4, device=a.device, dtype=torch.int64)
            multiply(a, b, log=log, **RUNGS[name])
        begin = log[log > 0].min()
        for lane, steps in zip(who, (log - begin).tolist(), strict=False):
            for step, (waits, works, ends, asked) in enumerate(steps):
                rows.append(
                    {"kernel": name, "lane": lane, "step": step, "waits": waits}
                    | {"works": works, "ends": ends, "asked": max(asked, ends)}
                )
    return rows


def rungs(n):
    a, b = torch.randn(2, n, n, device=runtime.DEVICE, dtype=torch.bfloat16)
    runs = {
        name: (lambda options=options: multiply(a, b, **options))
        for name, options in RUNGS.items()
    }
    return {"matmul": lambda: a @ b} | runs | {"tl.dot": lambda: dot(a, b)}


climbed = lab.bench(
    "ladder",
    [{"n": n} for n in (2048, 4096, 8192)],
    rungs,
    limit="matmul",
    work="2 * n * n * n",
    unit="TFLOP/s",
)
NAMES = [*RUNGS, "tl.dot"]

# %%

# Reading
SIZES = (2048, 4096, 8192)
sizes_of = (
    {n: climbed.rate("matmul", n=n) for n in SIZES}
    if climbed.rows
    else dict.fromkeys(SIZES, nan)
)


def at_size(name, n):
    return climbed.rate(name, n=n) if climbed.rows else nan


def of_cublas(name, n):
    """A speed at one size, in percent of cuBLAS."""
    return 100 * at_size(name, n) / sizes_of[n]


def beside_the_loop():
    """How much slower roles are than the loop with one matmul in flight, over the sizes."""
    slower = [
        100 * (1 - at_size("roles", n) / at_size("one in flight", n)) for n in SIZES
    ]
    least, most = min(slower), max(slower)
    if most < 0:
        return "Rung 4 is faster than rung 3 at every size:"
    if least < 0:
        return (
            f"Between sizes, rung 4 varies from {-least:.1f} % faster to {most:.1f} % slower than "
            "rung 3:"
        )
    of_loop = [of_cublas("one in flight", n) for n in SIZES]
    return (
        f"**The loader does not pay.** Rung 3, without roles, reaches {min(of_loop):.0f} to "
        f"{max(of_loop):.0f} % of the speed of cuBLAS. Rung 4 is {least:.1f} to {most:.1f} % "
        "slower than rung 3:"
    )


lab.read(beside_the_loop())

# %%


# Drawing
LABELS = {
    "one buffer": "1: load, wait, multiply",
    "ring": "2: loads ahead, no roles",
    "one in flight": "3: one matmul in flight",
    "roles": "4: a loader, two consumers",
    "tl.dot": "Triton's tl.dot",
}


def drawn_gains(axes, rows):
    of_limit = {row["n"]: row["ms"] for row in rows if row["provider"] == "matmul"}
    for row in rows:
        if row["provider"] not in LABELS:
            continue
        n = row["n"]
        place = SIZES.index(n)
        at = list(LABELS).index(row["provider"]) + 0.29 * (place - 1)
        middle, low, high = (
            100 * of_limit[n] / row[column] for column in ("ms", "p80", "p20")
        )
        axes.errorbar(
            [middle], [at], xerr=[[middle - low], [high - middle]], fmt="o",
            markersize=3.5, capsize=2, color=lab.colour("Kernel Book"),
        )  # fmt: skip
        look = {"va": "center", "fontsize": 9, "color": "#1f2328"}
        axes.text(low - 1, at, f"{middle:.1f}", ha="right", **look)
        if row["provider"] == "one buffer":  # the sizes, named once
            axes.text(high + 1.5, at, f"{'' if place else 'n = '}{n:,}", **look)
    axes.axvline(100, color="#59636e", linestyle="--", linewidth=1, zorder=0)
    axes.set_yticks(range(len(LABELS)), list(LABELS.values()))
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.grid(visible=False)
    axes.set(
        xlim=(36, 104),
        xlabel="% of the speed of cuBLAS\nwhiskers: middle 60 % of timings",
    )


def said_of_gains(rows):
    ranges = []
    for name, label in LABELS.items():
        own = [100 * row["share"] for row in rows if row["provider"] == name]
        if own:
            ranges.append(f"{label}, {min(own):.0f} to {max(own):.0f}")
    return f"In % of the speed of cuBLAS: {'; '.join(ranges)}."


lab.draw(climbed, "An n × n matmul, rung by rung", said_of_gains, drawn_gains)

# %%

# Reading
SCATTER = 0.02  # a smaller difference gets no explanation
by_ring = all(
    at_size("ring", n) - at_size("one buffer", n)
    > at_size("one in flight", n) - at_size("ring", n)
    > 0
    for n in SIZES
)
like_dot = all(
    abs(at_size("tl.dot", n) / at_size("one in flight", n) - 1) < SCATTER for n in SIZES
)
below_loop = all(at_size("roles", n) < at_size("one in flight", n) for n in SIZES)
assert not climbed.rows or (below_loop and like_dot)  # as the introduction says
sm_count = climbed.provenance["sm_count"] if climbed.rows else nan


def rounds_of(n):
    """How many programs an SM runs one after another, if it gets the most of them."""
    return -(-((n // BLOCK_M) * (n // BLOCK_N)) // sm_count)


def lost_per_program():
    """The microseconds that roles lose with each program of an SM, by size, if much alike."""
    if not climbed.rows:
        return []
    lost = [
        1e3
        * (
            climbed.at(provider="roles", n=n).iloc[0]["ms"]
            - climbed.at(provider="one in flight", n=n).iloc[0]["ms"]
        )
        / rounds_of(n)
        for n in SIZES
    ]
    return lost if 0 < max(lost) < 2 * min(lost) else []


lost = lost_per_program()
dot_apart = max(
    abs(at_size("tl.dot", n) / at_size("one in flight", n) - 1) for n in SIZES
)
lab.together(
    lab.read(
        "Most of the gain comes from loading ahead, and the rest from the matmul in flight. (At "
        f"size {SIZES[-1]:,}, cuBLAS reaches {sizes_of[SIZES[-1]]:.0f} TFLOP/s.)"
    )
    if by_ring
    else None,
    lab.read(
        f"`tl.dot` differs from rung 3 by at most {100 * dot_apart:.1f} %, so a plain matmul needs "
        "neither roles nor Gluon."
        if like_dot
        else f"`tl.dot` reaches {of_cublas('tl.dot', 8192):.0f} % of cuBLAS at size 8,192."
    ),
    lab.read(
        "Rung 4 loses "
        f"{min(lost):.1f} to {max(lost):.1f} µs with each program, whether the program takes "
        f"{SIZES[0] // BLOCK_K} steps or {SIZES[-1] // BLOCK_K}. It may therefore lose them at a "
        "program's start or end; nothing here isolates the cause."
        if lost
        else "We do not know why rung 4 is slightly slower."
    )
    if below_loop
    else None,
)

# %%


# Folded: Whether rung 4's loss is real, and how it was divided
def spread_of(name, n):
    """The 20th and 80th percentile of a kernel's milliseconds."""
    row = climbed.at(provider=name, n=n).iloc[0]
    return row["p20"], row["p80"]


apart = climbed.rows and all(
    spread_of("one in flight", n)[1] < spread_of("roles", n)[0] for n in SIZES
)
lab.together(
    lab.read(
        "The loss is hardly noise: at no size do the whiskers of rungs 3 and 4 overlap."
        if apart
        else "The loss may be noise: at some sizes the whiskers of rungs 3 and 4 overlap."
    ),
    lab.read(
        "An SM runs its programs one after another: at the three sizes, up to "
        f"{', '.join(f'{rounds_of(n):.0f}' for n in SIZES[:-1])} and {rounds_of(SIZES[-1]):.0f}. "
        "We divide the time that rung 4 takes longer by this number."
    )
    if lost
    else None,
)

# %%
# Why roles gain nothing here
# ---------------------------
#
# The loader spares the consumers from asking for tiles, but this saves time only if the tensor
# cores are idle meanwhile. To see whether they are, one program of a matmul of size 4,096 reads a
# clock before and after each wait.


# Measuring
trace = lab.measure("Clocks of sixteen steps, in cycles", traced)


def paced(launches, mark, rounds=20):
    """Time and cycles of each launch, from one to the other of two short kernels that note the
    clock of an SM. Two marks with nothing between them are taken off."""
    flush = torch.empty(2**28, device=runtime.DEVICE, dtype=torch.int8)
    log = torch.zeros(2, 2, 6, 2, device=runtime.DEVICE, dtype=torch.int64)
    launches = {"nothing": lambda: None} | launches
    spans = {name: [] for name in launches}
    for launch in launches.values():
        launch()  # compile
    mark(log[0])
    order = list(launches)
    for turn in range(rounds):  # every kernel in turn, each time beginning with another
        first = turn % len(order)
        for name in order[first:] + order[:first]:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flush.zero_()  # L2 holds none of the inputs
            torch.cuda._sleep(2 * 10**6)  # until the host has queued the rest
            begin.record()
            mark(log[0])
            launches[name]()
            end.record()
            mark(log[1])
            torch.cuda.synchronize()
            clocks = (log[1, 0, 0, 0] - log[0, 0, 0, 0]).item()
            spans[name].append((1e3 * begin.elapsed_time(end), clocks))
    median = {
        name: [sorted(values)[rounds // 2] for values in zip(*pairs, strict=True)]
        for name, pairs in spans.items()
    }
    rows = []
    for name in order[1:]:
        microseconds, clocks = (
            value - none
            for value, none in zip(median[name], median["nothing"], strict=True)
        )
        megahertz = clocks / microseconds
        if not 500 < megahertz < 2500:
            raise RuntimeError(f"the two marks of {name} do not fit: {median}")
        rows.append(
            {"kernel": name, "µs": round(microseconds, 1)}
            | {
                "cycles, thousands": round(clocks / 1e3, 1),
                "clock, MHz": round(megahertz),
            }
        )
    return rows


whole = lab.attempt(
    "Whole matmuls: time, cycles of an SM, and its clock",
    lambda: [
        {"n": n} | row
        for n in (4096, 8192)
        for row in paced(
            rungs(n), lambda log: turns_kernel[(1,)](log, 6, False, num_warps=4)
        )
    ],
)

# %%


# Reading
def in_lanes(rows):
    return list(dict.fromkeys((row["kernel"], row["lane"]) for row in rows))


SHADES = {
    "waits at a barrier": "#d1d9e0",
    "waits for a matmul": lab.colour("Kernel Book"),
    "asks for tiles": lab.colour("PyTorch"),
}
RUNG = {"ring": "rung 2", "one in flight": "rung 3", "roles": "rung 4"}


def parts_of(row):
    """What a role does in a step, as (what, begin, end)."""
    work = "asks for tiles" if row["lane"] == "loader" else "waits for a matmul"
    return (
        ("waits at a barrier", row["waits"], row["works"]),
        (work, row["works"], row["ends"]),
        ("asks for tiles", row["ends"], row["asked"]),
    )


def median_of(numbers):
    low, high = (
        sorted(numbers)[(len(numbers) - 1) // 2],
        sorted(numbers)[len(numbers) // 2],
    )
    return (low + high) / 2


def full_steps(rows, kernel, lane):
    """The steps of a lane from the fifth on, and how long each is: until the next begins.

    Their number is even, because those of the ring alternate.
    """
    own = [r for r in rows if (r["kernel"], r["lane"]) == (kernel, lane)][5:]
    pairs = zip(own[:-1], own[1:], strict=True)
    return own[:-1], [after["waits"] - row["waits"] for row, after in pairs]


def spent(rows, kernel, lane):
    """The cycles of a step that a lane spends with each of SHADES, and all of them: medians."""
    own, lengths = full_steps(rows, kernel, lane)
    parts = {
        shade: median_of(
            [sum(b - a for what, a, b in parts_of(row) if what == shade) for row in own]
        )
        for shade in SHADES
    }
    return parts, median_of(lengths)


of_step, cycles = {}, {}
for lane in in_lanes(trace.rows) if trace.rows else ():
    of_step[lane], cycles[lane] = spent(trace.rows, *lane)


def part(lane, *labels):
    """The cycles of its step that a lane spends with some of SHADES."""
    return sum(of_step[lane][label] for label in labels) if lane in of_step else nan


def share(lane, *labels):
    """The percentage of its step that a lane spends with some of SHADES."""
    return 100 * part(lane, *labels) / cycles.get(lane, nan)


RING, LOOP = ("ring", "all warps"), ("one in flight", "all warps")
ROLES = [("roles", lane) for lane in ("loader", "consumer 0", "consumer 1")]
BOTH = ("waits at a barrier", "waits for a matmul")
bare, ahead = (cycles.get(lane, nan) for lane in (RING, LOOP))
own_matmul = part(RING, "waits for a matmul")
in_roles = max(cycles.get(lane, nan) for lane in ROLES)
least_step = max(ahead, in_roles) < 1.01 * step_cycles
lengths = {
    lane: full_steps(trace.rows, *lane)[1] if trace.rows else [] for lane in ROLES[1:]
}
late = [n for found in lengths.values() for n in found if n > 1.5 * step_cycles]
lab.read(
    f"From rung 3 on, the tensor cores are not idle: with roles or without, a step takes "
    f"{round(ahead):,} cycles, which is the time of its matmul (dashed)."
    + (" In these steps, rung 4 loses nothing." if below_loop and not late else "")
    if least_step and round(ahead) == round(in_roles)
    else f"In rung 3 a step takes {ahead:,.0f} cycles, and with roles up to {in_roles:,.0f}; the "
    f"minimum is {step_cycles:,.0f}."
)

# %%


# Drawing
BARS = {
    "rung 2: all warps": [RING],
    "rung 3: all warps": [LOOP],
    "rung 4: consumers": ROLES[1:],
    "rung 4: loader": ROLES[:1],
}


def bars_of(rows):
    """What a bar stands for: its name, the cycles of each of SHADES, and those of the step."""
    for name, lanes in BARS.items():
        found = [spent(rows, *lane) for lane in lanes]
        parts = {what: sum(own[what] for own, _ in found) / len(lanes) for what in SHADES}
        yield name, parts, sum(step for _, step in found) / len(lanes)


LOOKS = {  # in this order a bar of rung 2 begins with its matmul
    "waits for a matmul": ("#eaf2fb", "wait for", "matmul", "#1f2328"),
    "asks for tiles": (lab.colour("PyTorch"), "", "ask", "#ffffff"),
    "waits at a barrier": ("#d1d9e0", "wait at", "barrier", "#1f2328"),
}


def drawn_step(axes, rows):
    for at, (_, parts, step) in enumerate(bars_of(rows)):
        left = 0
        for what, (fill, before, word, ink) in LOOKS.items():
            width = parts[what]
            axes.barh(at, width, 0.66, left, color=fill)
            look = {"ha": "center", "va": "center", "fontsize": 9, "color": ink}
            if width > 170:
                gap = " " if width > 400 else "\n"
                text = f"{before}{gap}{word}" if before and width > 250 else word
                axes.text(left + width / 2, at, text, **look)
            left += width
        axes.barh(at, step, 0.66, fill=False, edgecolor="#59636e", linewidth=0.8)
        if step > 1.02 * step_cycles:
            look = {"arrowstyle": "<->", "color": "#59636e", "shrinkA": 0, "shrinkB": 0}
            ends = ((step_cycles, at - 0.5), (step, at - 0.5))
            axes.annotate("", *ends, arrowprops=look)
            look = {"va": "center", "fontsize": 10, "color": "#1f2328"}
            axes.text(step_cycles + 20, at - 0.76, "tensor cores idle", **look)
        axes.text(step + 25, at, f"{step:,.0f}", va="center", fontsize=10)
    axes.axvline(step_cycles, color="#1f2328", linestyle="--", linewidth=1.2)
    axes.set_yticks(range(len(BARS)), list(BARS))
    axes.set_ylim(len(BARS) - 0.5, -1)
    axes.grid(visible=False)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set(
        xlim=(0, 1650),
        xlabel="cycles of a step, medians of ten steps\n"
        f"dashed: its matmul, {step_cycles:,.0f}; white: the rest",
    )


def said_of_step(rows):
    found = (
        f"{name}: {step:,.0f} cycles, of which "
        f"{parts['waits for a matmul']:,.0f} waiting for a matmul, "
        f"{parts['waits at a barrier']:,.0f} at a barrier and {parts['asks for tiles']:,.0f} "
        "asking for tiles"
        for name, parts, step in bars_of(rows)
    )
    return f"Bars of cycles. {'; '.join(found)}."


lab.draw(
    trace,
    "What the warps do in a step, without and with roles",
    said_of_step,
    drawn_step,
)

# %%

# Reading
counted = {(row["n"], row["kernel"]): row for row in whole.rows}
slower = bare / ahead
longer = at_size("one in flight", 4096) / at_size("ring", 4096)


def measured(name, column, n=4096):
    return counted[n, name][column] if counted else nan


def busy(name, n):
    """For how much of a whole matmul's cycles the tensor cores are busy, in percent."""
    at_best = 2 * n**3 / flops_per_cycle / sm_count / 1e3  # thousand cycles
    return 100 * at_best / measured(name, "cycles, thousands", n)


in_loop = measured("one in flight", "cycles, thousands")
in_cycles = measured("ring", "cycles, thousands") / in_loop
faster = measured("ring", "clock, MHz") / measured("one in flight", "clock, MHz")
rounds = rounds_of(4096) if climbed.rows else nan
noted, noted_of_loop = (rounds * (4096 // BLOCK_K) * n / 1e3 for n in (bare, ahead))
expected = (noted + in_loop - noted_of_loop) / in_loop  # starts and ends are the loop's
more = 1e3 * in_loop * (in_cycles - 1) / (rounds * (4096 // BLOCK_K))  # cycles per step
exaggerated = expected > in_cycles + SCATTER
lab.together(
    lab.read(
        (
            f"In rung 2 the tensor cores are idle for {bare - ahead:,.0f} cycles, while the warps "
            "ask for tiles and pass the barrier of the next tile. "
            if abs(own_matmul / step_cycles - 1) < 0.02
            else f"A step of rung 2 takes {bare:,.0f} cycles. "
        )
        + (
            "Reading the clock may lengthen this time, because whole matmuls that do not read it "
            f"lose only about {more:,.0f} cycles per step to rung 3."
            if exaggerated
            else f"Its step is {slower:.2f} times as long as rung 3's, but its whole matmul takes "
            f"only {longer:.2f} times as long. This run does not show why."
        )
    ),
    lab.read(
        "In rungs 3 and 4, neither asking for tiles nor waiting at a barrier costs anything, "
        "because the next matmul is already running. The loader has nothing left to save."
        if least_step
        else "In rung 3 the warps ask while the next matmul is running, for "
        f"{share(LOOP, 'asks for tiles'):.0f} % of the step; in rung 4 the loader asks."
    ),
    lab.read(
        "**Before you give a kernel a loader,** keep one matmul in flight, and see whether the "
        "tensor cores are still idle."
    )
    if least_step
    else None,
    lab.read(
        "**Can a matmul be faster still?** In the steps above the tensor cores never pause, but "
        f"over the whole matmul of size {SIZES[-1]:,} rung 3 keeps them busy for "
        f"{busy('one in flight', SIZES[-1]):.0f} % of the cycles (cuBLAS: "
        f"{busy('matmul', SIZES[-1]):.0f} %). The rest may go to the starts and ends of programs. "
        "Nor did the clock run at its highest: it was "
        f"{measured('one in flight', 'clock, MHz', SIZES[-1]):,} of "
        f"{climbed.provenance['clocks']['max_sm_mhz']:,} MHz."
    )
    if counted and least_step
    else None,
)

# %%
# **Where roles may pay.** Each of our programs computes one tile. In a :term:`persistent` kernel, a
# program computes several, and the loader could already load for the next tile of ``c`` while the
# consumers store this one.
#
# The next chapter tests another loop, which computes between its matmuls. In rung 3 all eight warps
# meet in every step, so in attention they would reach the softmax at about the same time. Two
# consumers need not meet: one can compute its softmax while the tensor cores multiply for the
# other. Will they do so by themselves?

# %%


# Folded: Every part of a step, the steps on a timeline, and whole matmuls in cycles
def said_of_parts(rows):
    found = []
    for kernel, lane in in_lanes(rows):
        parts, _ = spent(rows, kernel, lane)
        numbers = ", ".join(f"{n:,.0f}" for n in parts.values())
        found.append(f"{RUNG[kernel]}, {lane}: {numbers}")
    return (
        "Cycles of a step at a barrier, waiting for a matmul, and asking. "
        f"{'; '.join(found)}."
    )


def said_of_trace(rows):
    ends = {}
    for row in rows:
        ends[row["kernel"]] = max(ends.get(row["kernel"], 0), row["asked"])
    found = (f"{RUNG[name]} after {end / 1000:.0f}" for name, end in ends.items())
    return f"Timelines. Step 15 ends, in thousand cycles: {', '.join(found)}."


def name_lanes(axes, rows, rest=None):
    lanes = in_lanes(rows)
    for label, shade in SHADES.items():
        axes.barh([0], [0], color=shade, label=label)
    if rest:
        axes.barh([0], [0], fill=False, edgecolor="#59636e", label=rest)
    axes.set_yticks(
        range(len(lanes)), [f"{RUNG[kernel]}: {lane}" for kernel, lane in lanes]
    )
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)


def drawn_parts(axes, rows):
    axes.axvline(step_cycles, color="#59636e", linestyle="--", linewidth=1.2, zorder=0)
    for at, (kernel, lane) in enumerate(in_lanes(rows)):
        parts, step = spent(rows, kernel, lane)
        left = 0
        for label, width in parts.items():
            axes.barh(at, width, 0.66, left, color=SHADES[label])
            left += width
        axes.barh(at, step, 0.66, fill=False, edgecolor="#59636e", linewidth=0.8)
        axes.text(step + 25, at, f"{step:,.0f}", va="center", fontsize=10)
    name_lanes(axes, rows, "everything else")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set(
        xlim=(0, 1700),
        xlabel=f"cycles per step; dashed: the minimum, {step_cycles:,.0f}",
    )


def drawn_trace(axes, rows):
    lanes = in_lanes(rows)
    for row in rows:
        at = lanes.index((row["kernel"], row["lane"]))
        for label, begin, end in parts_of(row):
            look = {"color": SHADES[label], "edgecolor": "#59636e", "height": 0.66}
            look["linewidth"] = 0.3 * label.startswith("waits at")
            axes.barh(at, (end - begin) / 1000, left=begin / 1000, **look)
    name_lanes(axes, rows)
    axes.set(xlabel="thousand cycles of the SM")


asks = {lane: part(lane, "asks for tiles") for lane in (LOOP, ROLES[0])}


least_waits = min(share(lane, *BOTH) for lane in ROLES[1:]) // 1


def passed_together():
    """Whether both consumers pass the barrier of a tile at once, but one's matmul ends first."""
    pair = [
        [row for row in trace.rows if (row["kernel"], row["lane"]) == lane][5:]
        for lane in ROLES[1:]
    ]
    apart = {
        column: [one[column] - other[column] for one, other in zip(*pair, strict=True)]
        for column in ("works", "ends")
    }
    return max(map(abs, apart["works"])) < 60 < median_of(apart["ends"])


by_clock = in_cycles > longer and faster > 1.02
lab.together(
    lab.draw(trace, "Every part of a step, by role", said_of_parts, drawn_parts),
    lab.read(
        f"We trace the first {TRACE} of the program's {4096 // BLOCK_K} steps. The medians cover "
        f"steps 5 to {TRACE - 2}, when the ring has filled. Where a bar of the visible figure "
        "stands for both consumers, it shows their mean."
    ),
    lab.read(
        f"In rung 2 the tensor cores are idle for {100 * (1 - step_cycles / bare):.0f} % of a "
        "traced step."
    )
    if abs(own_matmul / step_cycles - 1) < 0.02
    else None,
    lab.read(
        f"A consumer waits, at a barrier or for a matmul, for {least_waits:.0f} % of a step or "
        f"more, and the warps of rung 3 for {share(LOOP, *BOTH):.0f} %. To ask for the same tiles, "
        f"the warps of rung 3 need {asks[LOOP]:.0f} cycles and the loader {asks[ROLES[0]]:.0f}."
    ),
    lab.read(
        "Both consumers pass the barrier of a tile at about the same time, but the matmuls of "
        "consumer 1 end first: it waits longer at the next barrier and less for its matmul."
    )
    if trace.rows and passed_together()
    else None,
    lab.read(
        (
            "In one of the ten steps of rung 4 a tile arrived late, and the step took "
            f"{min(late):,.0f} and {max(late):,.0f} cycles in the two consumers; the medians leave "
            "it out. "
            if len(late) == 2
            else ""
        )
        + (
            "Reading the clock does not lengthen a step of rungs 3 and 4, because their median is "
            "already the minimum."
            if least_step
            else ""
        )
    )
    if len(late) == 2 or least_step
    else None,
    lab.draw(
        trace, "Sixteen steps, without and with roles", said_of_trace, drawn_trace
    ),
    lab.read(
        "Do not compare where rungs 3 and 4 begin. Each timeline starts at its first stamp, and by "
        "then rungs 2 and 3 have already asked for their first tiles, but rung 4 has not."
    ),
    whole,
    lab.read(
        f"At size 4,096 rung 2's whole matmul takes {in_cycles:.2f} times the cycles of rung 3's"
        + (
            f", but only {longer:.2f} times the time, because its clock was "
            f"{100 * (faster - 1):.0f} % faster."
            if by_clock
            else f", and {longer:.2f} times the time."
        )
    )
    if counted
    else None,
    lab.read(
        f"An SM runs {rounds:.0f} rounds of programs with {4096 // BLOCK_K} steps each. Divided "
        "among these steps, the whole matmuls of rungs 2 and 3 differ by "
        f"{more:,.0f} cycles per step. By the trace they should differ by {bare - ahead:,.0f}, and "
        f"rung 2 should take {expected:.2f} times the cycles of rung 3, if the starts and ends of "
        "its programs take as long as rung 3's."
    )
    if counted and exaggerated
    else None,
    lab.read(
        f"At {flops_per_cycle:,} FLOP per cycle, the tensor cores are busy for "
        f"{busy('one in flight', 4096):.0f} % of the cycles of rung 3's whole matmul at size "
        f"4,096, and for {busy('matmul', 4096):.0f} % of those of cuBLAS."
    )
    if counted
    else None,
)

# %%


# Measuring
alternated = lab.measure("Two consumers, free and in turns", turns)


def overlap(rows, run):
    """The share of consumer 0's work during which consumer 1 works, too."""
    of_run = [row for row in rows if row["run"] == run]
    first, second = (
        [
            (r["begins, cycles"], r["ends, cycles"])
            for r in of_run
            if r["consumer"] == me
        ]
        for me in (0, 1)
    )
    both = sum(max(0, min(b, d) - max(a, c)) for a, b in first for c, d in second)
    return both / sum(b - a for a, b in first)


# %%


# Folded: Looking ahead: two consumers that take turns
def drawn_turns(axes, rows):
    lanes = [("free", 0), ("free", 1), ("in turns", 0), ("in turns", 1)]
    for r in rows:
        axes.barh(
            lanes.index((r["run"], r["consumer"])),
            (r["ends, cycles"] - r["begins, cycles"]) / 1000,
            left=r["begins, cycles"] / 1000, height=0.6, edgecolor="#ffffff",
            color=lab.colour(f"consumer {r['consumer']}"),
        )  # fmt: skip
    axes.set_yticks(range(4), [f"{run}: consumer {me}" for run, me in lanes])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set(xlabel="thousand cycles")


free, taken = (
    100 * overlap(alternated.rows, run) if alternated.rows else nan
    for run in ("free", "in turns")
)
apart_anyway = bool(alternated.rows) and free < 10
lab.together(
    lab.read(
        "Two consumers may fall into step: both multiply, and then both compute while the tensor "
        "cores are idle. With named barriers, each waits for its turn and then hands it to the "
        "other, which is called ping-pong. Our ladder does not use it."
    ),
    None
    if apart_anyway
    else lab.draw(
        alternated,
        "When each consumer has its turn",
        lambda rows: (
            f"{100 * overlap(rows, 'free'):.0f} % of consumer 0's bars overlap with consumer 1's "
            f"without barriers, {100 * overlap(rows, 'in turns'):.0f} % in turns."
        ),
        drawn_turns,
    ),
    lab.read(
        "In the code, one pause stands for the matmuls and another for the rest. The two barriers "
        "are 9 and 10. Before its loop, consumer 1 arrives at the barrier of consumer 0, or both "
        "would wait for ever. "
        + (
            "In this run the consumers did not fall into step even without barriers, so it cannot "
            "show what the turns gain, and we draw no figure."
            if apart_anyway
            else "The bars of the figure are the matmuls. Left alone, consumer 1 multiplies during "
            f"{free:.0f} % of consumer 0's matmuls, and in turns during {taken:.0f} %."
        )
    ),
    lab.source(work_in_turns),
)

# %%
# What breaks it
# --------------
#
# The price of roles is two barriers per slot that must be exactly right. To see what a mistake
# does, we let a loader pass six tiles through two slots to a consumer, which adds them up. In the
# consumer's loop, ``pause`` stands for other work:
#
# .. code-block:: python
#
#    mbarrier.wait(full.index(slot), parity)     # line 1
#    pause(5000)                                 # line 2
#    total += ring.index(slot).load(layout)      # line 3
#    mbarrier.arrive(empty.index(slot))          # line 4
#
# Every element of tile ``i`` is :math:`10^i`, so the digits of the sum, from the right, count how
# often tiles 0, 1, 2, … were added. Where a kernel hangs, the table shows the barrier at which each
# role was stuck.

# Measuring
MISTAKES = {
    "none": (1, ""),
    "the loader begins with parity 0": (0, ""),
    "never releases": (1, "never releases"),
    "releases before it reads": (1, "releases before it reads"),
    "does not wait for the tile": (1, "does not wait for the tile"),
    "always waits for parity 0": (1, "always waits for parity 0"),
}
IMPORTS = """
import json, os, sys, time
import torch
from kernelbook import runtime
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from kernelbook.ops.hopper.parts import pause, tma_load
GLUON_DTYPES = {torch.float32: gl.float32}
"""
WATCH = """
log = torch.zeros(2, dtype=torch.int32, pin_memory=True)  # which the GPU and the host can see
out = add_up(tiles_of_powers(), log, int(sys.argv[1]), sys.argv[2])
done = torch.cuda.Event()
done.record()
end = time.perf_counter() + 2
while not done.query() and time.perf_counter() < end:
    time.sleep(0.01)
ended = done.query()
sums = out.unique().tolist() if ended else []
print(json.dumps({"ended": ended, "log": log.tolist(), "sums": sums}), flush=True)
os._exit(0)  # without waiting for the kernel
"""


def script():
    """The kernel and what launches it, as a program of its own."""
    parts = (
        note_progress,
        load_tiles,
        add_tiles,
        sum_kernel,
        describe,
        tiles_of_powers,
        add_up,
    )
    sources = [inspect.getsource(getattr(part, "fn", part)) for part in parts]
    return "\n\n".join([IMPORTS, *sources, WATCH])


def watched(process):
    """What a process has printed. One that does not end is killed."""
    try:
        printed, errors = process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        process.kill()
        printed, errors = process.communicate(timeout=30)
    found = [line for line in printed.splitlines() if line.startswith("{")]
    if not found:
        raise RuntimeError(f"a process printed nothing: {errors[-2000:]}")
    return json.loads(found[-1])


def where(value, barrier):
    if value == 0:
        return "has not begun"
    tile, past = (value - 1) // 2, value % 2 == 0
    return (
        f"tile {tile}: past {barrier}"
        if past
        else f"tile {tile}: waits for {barrier}[{tile % 2}]"
    )


def provoked():
    path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "mistakes.py")
        file.write_text(script(), encoding="utf-8")
        processes = {
            name: subprocess.Popen(
                [sys.executable, file, *map(str, arguments)],
                env=os.environ | path,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for name, arguments in MISTAKES.items()
        }
        try:
            found = {name: watched(process) for name, process in processes.items()}
        finally:
            for process in processes.values():
                process.kill()
    assert found["none"]["sums"] == [111111.0], "the kernel without a mistake is wrong"
    rows = []
    for name, run in found.items():
        sums = run["sums"]
        result = "none: killed" if not run["ended"] else f"{sums[0]:.7g}"
        if len(sums) > 1:
            result = f"{len(sums)} different, first {result}"
        loads, adds = run["log"]
        rows.append(
            {"mistake": name, "sum": result}
            | {"loader": "ended" if run["ended"] else where(loads, "empty")}
            | {"consumer": "ended" if run["ended"] else where(adds, "full")}
        )
    return rows


# %%

# Measuring
broken = lab.measure("Six tiles, two slots, and one mistake at a time", provoked)
CHANGES = {
    "none": "none",
    "the loader begins with parity 0": "the loader begins with parity 0",
    "never releases": "line 4 left out",
    "always waits for parity 0": "line 1 with parity 0",
    "releases before it reads": "line 4 before line 2",
    "does not wait for the tile": "line 1 left out",
}
outcome = {row["mistake"]: row for row in broken.rows}
lab.table(
    [
        {"mistake": words}
        | {
            column: outcome[name][column]
            .replace(": waits for", ", at")
            .replace("none: killed", "hangs")
            for column in ("sum", "loader", "consumer")
        }
        for name, words in CHANGES.items()
        if name in outcome
    ],
    "Six tiles, two slots, and one mistake at a time"
    + (
        f". Recorded on {broken.provenance['gpu']}."
        if broken.rows
        else f". {broken.why_not}"
    ),
)

# %%


# Folded: The kernel with its mistakes, and how they were run
def as_in_the_model():
    """Whether the kernel stops at the barriers at which the model stops."""
    return all(
        name in outcome and outcome[name][role].endswith(f"waits for {barrier}")
        for name, barriers in in_the_model.items()
        for role, barrier in zip(("loader", "consumer"), barriers, strict=True)
    )


lab.together(
    lab.read(
        "Each mistake runs in its own process, which is stopped if its kernel hangs for two "
        "seconds. The roles write their progress into the host's memory. The pause is about 5,000 "
        "ns."
        + (
            " With a wrong first parity, or without line 4, the kernel and the Python model stop "
            "at the same barriers."
            if as_in_the_model()
            else ""
        )
    ),
    lab.source(load_tiles),
    lab.source(add_tiles),
    lab.source(sum_kernel),
)

# %%

# Reading
sums = {name: row["sum"] for name, row in outcome.items()}
hung = [name for name, result in sums.items() if result.startswith("none")]
wrong = [
    name for name, result in sums.items() if name not in hung and result != "111111"
]
lucky = [name for name in sums if name not in (*hung, *wrong, "none")]


def spelled(number):
    return ("none", "one", "two", "three", "four", "five")[number]


def listed(names):
    return "; ".join(f"“{CHANGES[name]}”" for name in names) or "none"


at_consumer = {name: row["consumer"] for name, row in outcome.items()}
lab.together(
    lab.read(
        f"{nan} mistakes"
        if not outcome
        else f"**Deadlocks.** {spelled(len(hung)).capitalize()} of the {spelled(len(outcome) - 1)} "
        "mistakes hang. "
        + (
            "In the first two, each role waits for the other: the loader for a slot to be "
            "released, and the consumer for a tile to arrive."
            if as_in_the_model()
            else ""
        )
    ),
    lab.read(
        "With parity 0 in line 1, the consumer hangs at tile 2 although this tile is there. Its "
        "arrival, while the consumer paused over tile 1, ended phase 1 of `full[0]`. The consumer "
        "still asks for parity 0, so only tile 4 would let it pass, and tile 4 cannot come before "
        "tile 2 has been released."
    )
    if at_consumer.get("always waits for parity 0") == "tile 2: waits for full[0]"
    else None,
)

# %%

# Reading
early = sums.get("releases before it reads", "")


def added(times):
    """The tiles that were added so often, by the digits of the sum: "0 and 1"."""
    tiles = [str(i) for i, digit in enumerate(reversed(early)) if digit == times]
    return " and ".join(filter(None, [", ".join(tiles[:-1]), *tiles[-1:]])) or "none"


lab.read(
    "**A race.** With line 4 before line 2 the sum is wrong, because the loader refills slots that "
    "have been released but not yet read. "
    + (
        "When the consumer reads a slot, the tile of its next use is already there. The first two "
        "tiles are therefore never added, and the last two, which nothing replaces, twice."
        if early == "221100"
        else f"From the right, {early} says that tiles {added('0')} were never added and tiles "
        f"{added('2')} were added twice."
    )
    if wrong == ["releases before it reads"] and re.fullmatch("[012]{6}", early)
    else f"**A race.** A wrong sum comes from {listed(wrong)}."
)

# %%

# Reading
lab.read(
    "**Luck.** Without line 1 the sum is still right, because each tile happened to arrive before "
    "it was read. A correct result does not prove the waits correct."
    if lucky == ["does not wait for the tile"]
    else f"**Luck.** The sum is right despite these mistakes: {listed(lucky)}."
)

# %%
# How you find such a mistake depends on the symptom:
#
# - **It hangs.** Run the kernel in a process of its own, which you can kill. Let every role write
#   its progress into pinned host memory, which can be read while the kernel hangs. The tile and
#   barrier at which each role is stuck point to the mistake.
# - **It is wrong, or right by luck.** Slow each role down in turn with a pause, so that another
#   gets ahead; here only the consumer was slow.
# - **It breaks in a later use of a slot.** Test with more than twice as many tiles as slots,
#   because the parity of use 0 returns only in use 2.
#
# In short
# --------
#
# - A loader asks the copy engine for tiles, consumers issue matmuls, and two barriers per slot keep
#   them in step.
# - A wait names a phase by its parity alone. With a mistake it may never end, which is a deadlock,
#   or end too early, which is a race.
# - Roles do not help our matmul, because one matmul in flight already keeps the tensor cores busy.
#   They may help a loop that computes between its matmuls, as in attention.

# %%

# Reading
reached = sorted(
    f"{of_cublas(name, n):.0f}".rjust(3)
    for name in ("one in flight", "roles")
    for n in SIZES
)
lab.read(
    "With roles or without, one matmul in flight reaches "
    f"{reached[0].strip()} to {reached[-1].strip()} % of the speed of cuBLAS."
)

# %%
# Exercises
# ---------
#
# **1. Does it hang?** A consumer releases the slot of tile ``i - 1`` only after it has waited for
# tile ``i``, as the consumers of rung 4 do. With how many slots does the ring work? Use the model.

# %%


# Solution: does it hang?
def late_consumer(full, empty, n, slots):
    for i in range(n):
        yield "full", i % slots, full[i % slots], (i // slots) & 1
        if i > 0:
            empty[(i - 1) % slots].arrive()


found = {
    slots: any(play(12, slots, consumers=(late_consumer,))) for slots in (1, 2, 3, 4)
}
assert found == {1: True, 2: False, 3: False, 4: False}
lab.read(
    "It hangs with one slot: the consumer would release that slot only after the next tile has "
    "arrived, but the next tile needs the slot. With two it works, but the loader can run only one "
    "tile ahead."
)

# %%
# **2. How deep must the ring be?** Measure rung 4 with two slots instead of three. Why can it not
# have four, given that a program can use 227 KiB of shared memory? (This memory also holds the tile
# of ``c``.)

# %%


# Solution: how deep must the ring be?
def depths():
    a, b = torch.randn(2, 8192, 8192, device=runtime.DEVICE, dtype=torch.bfloat16)
    rows = []
    for stages in (2, 3):
        run = lambda: multiply(a, b, **RUNGS["roles"] | {"STAGES": stages})  # noqa: B023, E731
        took = sorted(lab.event_times(run))[10]
        rows.append({"slots": stages, "TFLOP/s": round(2 * 8192**3 / took / 1e9)})
    return rows


kib = (
    4 * step_bytes / 1024 + 2 * BLOCK_M * BLOCK_N / 1024
)  # four slots, and the tile of c
assert kib == 256
deep = lab.measure("The matmul with roles, by slots", depths)
shallow, again = (row["TFLOP/s"] for row in deep.rows) if deep.rows else (nan, nan)
lab.together(
    deep,
    lab.read(
        f"With two slots the matmul reaches {100 * shallow / again:.0f} % of its speed with three. "
        + (
            "A slot is refilled when its matmul has ended, so with two slots a tile has one step "
            "to arrive; with three it has two. "
            if shallow < 0.95 * again
            else ""
        )
        + f"Four slots of {step_bytes / 1024:.0f} KiB and the tile of `c` would take {kib:.0f} "
        "KiB, more than a program can use."
    ),
    lab.read(
        "With three slots this is rung 4, timed without emptying the cache first; its speed "
        f"differs by {100 * abs(again / at_size('roles', 8192) - 1):.1f} % from that of the ladder."
    ),
)

# %%
# References
# ----------
#
# - NVIDIA. *Parallel thread execution ISA*: ``mbarrier``, ``cp.async.bulk.tensor``, ``wgmma``,
#   ``setmaxnreg``, ``bar``, and the chapter on proxies.
# - Triton. *Gluon tutorials*: TMA, wgmma, and warp specialisation.
# - Bauer, Cook, Khailany. *CudaDMA: optimizing GPU memory bandwidth via warp specialization.* SC
#   2011.
# - Shah, Bikshandi, Zhang, Thakkar, Ramani, Dao. *FlashAttention-3: fast and accurate attention
#   with asynchrony and low-precision.* NeurIPS 2024.

# %%

# Closing
lab.finish(
    f"A matmul with a loader and two consumers reaches {of_cublas('roles', 8192):.0f} % of the "
    "speed of cuBLAS at size 8,192"
)
