"""
Warps with roles
================

In a Triton kernel every warp does the same work: it loads, multiplies, stores. On a Hopper GPU the
loads and the matmuls run in units of their own, and a warp mostly waits for one or the other. *What
does a kernel gain if some warps only load and the others only multiply, and what can go wrong
between them?*

A plain matmul gains nothing: the best loop without roles (third bar) is just as fast. But the
warps that multiply now spend most of each step waiting, and in that time attention could compute
its softmax. So we build roles on a matmul, the simplest kernel that shows how they work, find out
why they gain nothing there, and take them to attention in the next chapter.

You will learn

- what Hopper does without its threads: the copy engine (:term:`TMA`) moves tiles, and
  :term:`wgmma` multiplies them;
- how roles agree on whose turn it is, with an :term:`mbarrier` and its parity;
- how to write a complete matmul with roles, and how a larger one compares with a loop without
  roles and with :term:`cuBLAS`;
- what a deadlock and a race look like, and how to find their cause.

The kernels are written in :term:`Gluon`, the language below Triton's, in which we say what each
warp does and where each number lies. They need a Hopper GPU (H100, H200), because no other has
``wgmma``, and Triton's :term:`interpreter` does not know Gluon. Elsewhere this page shows a
recorded run, and only the models in Python run anew.
"""

# sphinx_gallery_thumbnail_number = 1
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
# need it. We multiply two square matrices, ``c = a @ b``, in bfloat16. One :term:`program` computes
# a tile of 128 × 256 numbers of ``c``. Each step of its loop takes 64 columns of ``a`` and 64 rows
# of ``b``.

BLOCK_M, BLOCK_N, BLOCK_K = 128, 256, 64

step_flops = 2 * BLOCK_M * BLOCK_N * BLOCK_K
step_bytes = 2 * BLOCK_K * (BLOCK_M + BLOCK_N)
step_cycles = step_flops / 4096  # what the tensor cores of an SM do per cycle

# %%

# Reading
lab.read(
    f"A step does {step_flops / 1e6:.1f} MFLOP, which keep the tensor cores of an SM busy for "
    f"{step_cycles:,.0f} cycles. In these cycles the {step_bytes / 1024:.0f} KiB of the next step "
    "must arrive, or the tensor cores wait."
)

# %%
# A loop that loads, waits and multiplies leaves the tensor cores idle during every load. One that
# loads ahead is better, but its warps must stop between matmuls to ask for tiles. With roles no
# warp does two things:
#
# - **The loader**, one :term:`warp`, asks the copy engine for tiles.
# - **A consumer**, a :term:`warpgroup` of four warps, issues matmuls and holds the sums. It takes
#   four, because each of the SM's four tensor cores works with the registers of one of them.
#
# Between them are *slots* of shared memory, like trays on a belt between two workers. Each slot has
# two *barriers*: at each one side waits (orange, dashed) until the other has arrived (blue). At
# ``full`` the loader arrives when it announces the bytes, and the copy engine completes the phase
# when they have been written.


# Drawing
def drawn_roles(axes):
    box = {"facecolor": "#eaf2fb", "edgecolor": "#59636e"}
    store = {"facecolor": "#fff4e5", "edgecolor": "#59636e"}
    unit = {"facecolor": "#f6f8fa", "edgecolor": "#59636e"}

    grey, orange, blue = "#59636e", lab.colour("PyTorch"), lab.colour("Kernel Book")

    def words(x, y, text, colour="#1f2328", size=10):
        lines = text.split("\n")  # each is centred by itself, in whatever font
        for i, line in enumerate(lines):
            at = y + 0.46 * ((len(lines) - 1) / 2 - i)
            look = {"ha": "center", "va": "center", "fontsize": size}
            axes.text(x, at, line, color=colour, **look)

    def rectangle(x, y, width, height, text, style, size=11):
        axes.add_patch(Rectangle((x, y), width, height, **style))
        words(x + width / 2, y + height / 2, text, size=size)

    def arrow(start, end, text, at, colour=grey, line="-"):
        look = {"arrowstyle": "->", "color": colour, "linestyle": line}
        axes.annotate("", xy=end, xytext=start, arrowprops=look)
        words(*at, text, colour)

    rectangle(0, 6, 2.6, 1.4, "loader\n1 warp", box)
    axes.add_patch(Rectangle((7.52, 6.12), 2.6, 1.4, **box))
    rectangle(7.4, 6, 2.6, 1.4, "2 consumers\n4 warps each", box)
    rectangle(0, 2.6, 2.6, 1.4, "copy engine\n(TMA)", unit)
    rectangle(7.4, 2.6, 2.6, 1.4, "tensor cores", unit)
    rectangle(0, 0, 10, 1, "global memory: a, b", store)
    for slot in range(3):
        left = 3.8 + 0.82 * slot
        rectangle(left, 6.5, 0.78, 0.6, "empty", unit, 10)
        rectangle(left, 4.9, 0.78, 0.6, "full", unit, 10)
        rectangle(left, 2.6, 0.78, 1.4, f"slot\n{slot}", store)
    words(5.0, 7.4, "barriers")
    arrow((2.65, 6.8), (3.75, 6.8), "waits", (3.2, 7.08), orange, "--")
    arrow((7.35, 6.8), (6.28, 6.8), "arrives", (6.83, 7.08), blue)
    arrow((7.35, 6.1), (6.28, 5.3), "waits", (7.05, 5.38), orange, "--")
    arrow((2.65, 3.9), (3.75, 5.0), "bytes written", (4.34, 4.42), blue)
    arrow((1.3, 5.95), (1.3, 4.05), "names\na tile", (1.92, 5.35))
    arrow((8.8, 5.95), (8.8, 4.05), "issue\nwgmma", (9.5, 5))
    arrow((2.65, 3.1), (3.75, 3.1), "writes", (3.2, 3.36))
    arrow((6.28, 3.1), (7.35, 3.1), "reads", (6.83, 3.36))
    arrow((1.3, 1), (1.3, 2.55), "reads", (1.8, 1.75))
    axes.set(xlim=(-0.1, 10.2), ylim=(-0.1, 7.7))
    axes.axis("off")


lab.sketch(
    "Who does what in a program with roles",
    "Boxes: a loader of one warp names tiles to the copy engine, which moves them from global "
    "memory into three slots of shared memory. Two consumers of four warps each issue matmuls to "
    "the tensor cores, which read the slots. Each slot has two barriers: at empty the loader waits "
    "and the consumers arrive, at full the consumers wait until all bytes have been written.",
    drawn_roles,
)

# %%
# .. admonition:: Key idea
#    :class: kb-key
#
#    A role waits only for what it needs itself: the loader for an empty slot, a consumer for a full
#    one.
#
# We build this picture from its parts: the copy engine, the barriers, the ring of slots.
#
# A tile by the copy engine
# -------------------------
#
# One thread can load a whole tile, because the copy engine needs no address for each number: the
# thread names a tile by its first row and column. This kernel copies a tensor by way of
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
    tma_load(x_desc, [row, 0], loaded, tile)
    mbarrier.wait(loaded, 0)
    # -- store: the same way back
    tma_store(y_desc, [row, 0], tile)
    tma.store_wait(0)


# %%
# - **Descriptors.** ``x_desc`` and ``y_desc`` are :term:`descriptors <descriptor>`, which the host
#   writes before the launch. Each describes a tensor in global memory as a table of tiles. A tile
#   has the shape ``block_shape`` and takes ``block_type.nbytes`` bytes, and ``layout`` says where
#   its numbers lie in shared memory.
# - **Shared memory.** ``allocate_shared_memory`` reserves room for a tile, and for a barrier at
#   which threads wait. ``mbarrier.init`` sets how many arrivals it counts, here one.
# - **Load.** ``mbarrier.expect`` is this arrival, and announces how many bytes will come. All
#   threads of the program reach this line, but Gluon lets one of them execute it, and likewise
#   ``tma_load``; so the count is one. ``tma_load`` asks for the tile and returns at once.
#   ``mbarrier.wait`` holds the threads until the bytes have come; the next section explains its 0.
# - **Store.** ``tma_store`` asks the engine to copy the tile to ``y``. ``store_wait(0)`` holds the
#   threads until the engine has read every tile that it is to store.
#
# ``tma_load`` and ``tma_store`` are the book's names; all others in this kernel are Gluon's.
#
# A barrier and its phases
# ------------------------
#
# The copy waits once, but a loop waits at the same barrier again and again. That works because a
# barrier starts anew by itself. It counts in *phases*: a phase ends when the expected number of
# threads has arrived **and** the expected number of bytes has been written. Then the next phase
# begins, with the count that ``init`` has set.
#
# A waiter must therefore say which phase it waits for. It has one bit for that, the *parity*:
# phases are numbered 0, 1, 2, …, and ``mbarrier.wait(barrier, parity)`` lets a thread pass when the
# last phase that has ended has this parity. As a model in Python, with arrivals but no bytes:


class Barrier:
    def __init__(self, count):
        self.count = self.missing = count
        self.phase = 0  # the phase that has not ended yet

    def arrive(self):
        self.missing -= 1
        if self.missing == 0:
            self.missing, self.phase = self.count, self.phase + 1

    def lets_pass(self, parity):
        return (self.phase - 1) % 2 == parity % 2


# %%
# A new barrier is in phase 0. Parity 0 blocks, because phase 0 has not ended. Parity 1 passes at
# once, as if a phase −1 had ended before.


# Drawing
def drawn_phases(axes):
    barrier, ends = Barrier(1), (1.0, 2.5, 3.5, 5.0)
    edges = (0.0, *ends)
    for number, (begin, end) in enumerate(zip(edges, ends, strict=False)):
        for parity in (0, 1):
            passes = barrier.lets_pass(parity)
            axes.barh(
                1 - parity, end - begin, left=begin, height=0.62, edgecolor="#59636e",
                color="#eaf2fb" if passes else "#fff4e5",
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
        axes.axvline(end, color="#59636e", linestyle="--", linewidth=1)
    axes.set_yticks([1, 0], ["parity 0", "parity 1"])
    axes.set(
        xticks=[], xlabel="time; at each dashed line the phase flips", ylim=(-0.5, 1.8)
    )
    axes.grid(False)


lab.sketch(
    "Which waiter a barrier lets pass, by parity",
    "Two bars over four phases. In phase 0 parity 0 blocks and parity 1 passes; in phase 1 parity "
    "0 passes and parity 1 blocks; and so on in turn.",
    drawn_phases,
    height=2.4,
)

# %%
# .. admonition:: Key idea
#    :class: kb-key
#
#    One bit cannot tell phase 2 from phase 0. A role that asks for phase 2 while phase 1 still
#    runs passes at once, because phase 0 has the same parity. One that asks a phase too late waits,
#    perhaps for ever. Nothing reports either.
#
# A ring of slots
# ---------------
#
# With one slot, loader and consumer would take turns. In a *ring* of several the loader runs ahead:
# tile ``i`` goes to slot ``i % SLOTS``. At the slot's ``full`` the consumer waits until the tile is
# there, and at ``empty`` the loader waits until the tile before has been read.


# Drawing
def drawn_ring(axes):
    copy, multiply_one, tiles = 1.6, 2.0, 5
    come, read, asked = {}, {}, 0.0  # when tile i is there, when it has been read
    shades = {"waits": "#d1d9e0", "comes": "#fff4e5", "reads": "#eaf2fb"}
    shades["lies"] = "#ffffff"

    def bar(lane, begin, end, text, shade):
        if end > begin:
            look = {"color": shades[shade], "edgecolor": "#59636e", "height": 0.66}
            axes.barh(lane, end - begin, left=begin, **look)
            middle = (begin + end) / 2
            axes.text(middle, lane, text, ha="center", va="center", fontsize=10)

    for i in range(tiles):
        slot, before = i % 2, read.get(i - 1, 0.0)
        empty = max(
            asked, read.get(i - 2, 0.0)
        )  # the loader asks for one tile after another
        bar(0, asked, empty, f"at empty[{slot}]", "waits")
        asked, come[i] = empty, empty + copy
        bar(1 + slot, asked, come[i], f"{i} comes", "comes")
        begin = max(come[i], before)
        bar(3, before, begin, f"at full[{slot}]", "waits")
        read[i] = begin + multiply_one
        bar(1 + slot, come[i], begin, "1 is there" if i == 1 else "", "lies")
        bar(1 + slot, begin, read[i], f"{i} is read", "reads")
        bar(3, begin, read[i], f"matmul {i}", "reads")
    axes.set_yticks(range(4), ["loader", "slot 0", "slot 1", "consumer"])
    axes.invert_yaxis()
    axes.set(xticks=[], xlabel="time, not to scale; grey: waits")
    axes.set_xlim(-0.03, read[tiles - 1] + 0.03)  # or the edges of bars are cut
    axes.grid(False)


lab.sketch(
    "Two slots, five tiles: who waits at which barrier",
    "Four lanes over time: the loader, two slots, the consumer. Tiles 0 and 1 come at once. The "
    "loader waits at empty[0] until tile 0 has been read, while tile 1 is already there; so the "
    "consumer waits once, for tile 0, and then multiplies without a pause.",
    drawn_ring,
    height=2.6,
)

# %%
# Tile 2 needs slot 0 again, so the loader waits until tile 0 has been read. The consumer waits only
# once, because every later tile comes during a matmul.
#
# **Which parity?** Tile ``i`` is use number ``i // SLOTS`` of its slot: 0, 1, 2, … Each use ends
# the phase of this number at ``full``, when the tile has come, and at ``empty``, when it has been
# read. So the consumer asks ``full`` for the parity of ``i // SLOTS``. The loader waits for the use
# *before*, so it asks ``empty`` for the other parity. With two slots:

in_two_slots = [
    {"tile": i, "slot": i % 2, "use of the slot": i // 2}
    | {
        "consumer asks full for": (i // 2) & 1,
        "loader asks empty for": ((i // 2) & 1) ^ 1,
    }
    for i in range(5)
]
lab.table(in_two_slots, "Which parity each role asks for, by tile")

# %%
# In the first round no use came before, so the loader asks a new barrier for parity 1 and passes.
#
# Here are both roles as Python generators, which we can run without a GPU. Each ``yield`` names a
# barrier and the parity for which the role waits. The last argument of each function is there to
# plant a mistake.


def loader(full, empty, n, slots, first_parity=1):
    for i in range(n):
        slot, parity = i % slots, (i // slots) & 1
        yield "empty", slot, empty[slot], parity ^ first_parity
        full[slot].arrive()  # the copy engine does, when the tile has arrived


def consumer(full, empty, n, slots, releases=True):
    for i in range(n):
        slot, parity = i % slots, (i // slots) & 1
        yield "full", slot, full[slot], parity
        if releases:
            empty[slot].arrive()


# %%


# Measuring
def play(n, slots, first_parity=1, releases=True, consumers=1, expected=1):
    """Let the roles run as far as they come: what each did last, and None where it ended."""
    full = [Barrier(1) for _ in range(slots)]
    empty = [Barrier(expected) for _ in range(slots)]
    roles = {"loader": loader(full, empty, n, slots, first_parity)}
    for name in ("consumer", "the other")[:consumers]:
        roles[name] = consumer(full, empty, n, slots, releases)
    waiting = {name: next(role) for name, role in roles.items()}
    moved = True
    while moved:
        moved = False
        for name, role in roles.items():
            if waiting[name] and waiting[name][2].lets_pass(waiting[name][3]):
                waiting[name], moved = next(role, None), True
    return waiting


rows = []
for what, options in {
    "none, as above": {},
    "loader begins with parity 0": {"first_parity": 0},
    "consumer never releases": {"releases": False},
    "none, two consumers, empty counts 2": {"consumers": 2, "expected": 2},
    "two consumers, empty counts 1": {"consumers": 2},
}.items():
    ended = play(6, 2, **options)
    rows.append({"mistake": what})
    for name in ("loader", "consumer"):
        at = ended[name]
        rows[-1][name] = "ends" if at is None else f"waits for {at[0]}[{at[1]}]"
stuck = "waits for empty[0]"
assert [row["loader"] for row in rows] == ["ends", stuck, stuck, "ends", stuck]
lab.table(rows, "Six tiles, two slots, in the model")

# %%
# All three mistakes hang in the model: each role waits for the other, a deadlock. In the last, two
# consumers arrive where ``empty`` counts one, so each tile ends two of its phases. In this run both
# arrive before the loader looks. The parity has then flipped twice, so the loader waits for a phase
# that is already over. Had it looked between the two arrivals, it would have overwritten a tile
# that the other consumer still reads. So one mistake can show as a deadlock or as a race.
#
# The smallest matmul with roles
# ------------------------------
#
# In a kernel each generator becomes a ``@gluon.jit`` function that some warps run. Here is a
# complete matmul with one loader and one consumer, tiles of 64 × 64 numbers (``TILE``) and three
# slots (``SLOTS``).
#
# Both roles get the slots ``a_s`` and ``b_s`` in shared memory, of which ``index(slot)`` is one,
# and the barriers ``full`` and ``empty`` of each slot. The program's tile of ``c`` begins at
# ``row`` and ``column``, and takes ``steps`` steps.
#
# **The loader** waits until a slot is empty, announces the bytes of two tiles, and asks for a tile
# of ``a`` and a tile of ``b``. ``expect`` and the copies stand where the model's loader arrives.

lab.source(small.loader)

# %%
# **The consumer** waits for a full slot, multiplies, and gives the slot back:

lab.source(small.consumer, "def")

# %%
# - **Matmul.** ``warpgroup_mma`` adds ``a @ b`` of this slot to ``c``. Called like this it returns
#   when the tensor cores are done, so the slot may be given back.
# - **Arrival.** ``mbarrier.arrive`` counts the role once, after all of its threads have come.
# - **Layout.** The hardware prescribes which thread holds which sum, and ``layout`` says so: the
#   four warps stand one below the other (``[4, 1]``), each with 16 rows of the tile.
#
# .. dropdown:: More: the numbers of the layout, and two matmuls in a row
#
#    ``[3, 0]`` is Hopper's version of the matmul instruction. ``[16, TILE, 16]`` is what one
#    instruction does for a warp: 16 rows of 64 sums, over 16 columns of ``a``. In the figure of the
#    next fold, thread 5 is orange, and the number after the colon is its register.
#
#    The first operand of ``wgmma`` may lie in registers, in exactly the layout of the sums; the
#    second always lies in shared memory. So ``relu(a b)`` is an operand of ``relu(a b) v`` where it
#    lies, and ``assert_trivial`` in ``chain_kernel`` makes the compiler fail if a number would have
#    to move to another thread.


# Drawing
def holder(row, column):
    """The thread of a warp that holds an accumulator, and which of its registers."""
    thread = row % 8 * 4 + column % 8 // 2
    register = column // 8 * 4 + row // 8 * 2 + column % 2
    return thread, register


# %%


# Folded: Which thread holds which accumulator
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
    "A grid of 16 × 16 numbers. Four neighbouring threads share a row, and each holds pairs of "
    "neighbouring columns; thread 5 holds registers 0 to 7 at rows 1 and 9, columns 2, 3, 10, 11.",
    drawn_accumulators,
    height=4.6,
)

# %%
# After the last step, the consumer sends its tile of ``c`` to the copy engine by way of shared
# memory, ``c_s``:

lab.source(small.consumer, "store")

# %%
# Threads and engine reach shared memory by different paths (:term:`proxies <proxy>`), so the engine
# may not see what a thread has written until the thread executes ``fence_async_shared``.
#
# **The kernel** reserves the slots and gives each two barriers:

lab.source(small.matmul_kernel, "def", "shared memory")

# %%
# Then ``warp_specialize`` starts the roles. The first in the list, the consumer, runs in the four
# warps that the launch asks for (``num_warps=4``). Every other role gets extra warps: ``[1]`` says
# how many, and ``[24]`` how many registers each of their threads gets.

lab.source(small.matmul_kernel, "roles")

# %%
# **The launch** describes the three matrices, in a layout that copy engine and tensor cores share,
# and starts one program per tile of ``c``.

lab.source(small.matmul)

# %%


# Reading
def tried_here():
    """What is known of the small matmul: that it is right, where a GPU can run it."""
    if not HOPPER:
        return "The package's test compares this matmul with float64, and has passed on an H200."
    left, right = torch.randn(2, 640, 640, device=runtime.DEVICE, dtype=torch.bfloat16)
    exact = left.double() @ right.double()
    off = (small.matmul(left, right) - exact).abs().max() / exact.abs().max()
    assert off < 2**-7, "the smallest matmul is wrong"
    return f"On this GPU the product differs from float64 by {off:.1e} of its largest number."


lab.read(tried_here())

# %%
# .. dropdown:: The file whole
#
#    .. literalinclude:: /../src/kernelbook/small/warps_with_roles.py


# Whole: three small kernels for experiments
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


# %%


# Measuring
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


# %%

# Folded: Instructions of some kernels, with and without the fence
instructions = lab.measure("Instructions of the kernels", emitted)
instructions

# %%

# Folded: Is the fence needed?
of = {row["kernel"]: row for row in instructions.rows}
nan = float("nan")


def count(kernel, column):
    return of[kernel][column] if of else nan


written, left_out = (count(name, "fences") for name in ("double", "double, no fence"))
wrong = count("double, no fence", "wrong numbers")
lab.read(
    "In `double_kernel` one role doubles a tile, and another asks the engine to store it. "
    + (
        "Triton inserts the fence where it sees both sides in one kernel. We write it all the "
        "same, because a compiler may see less in another kernel, and what happens without the "
        "fence, the manual does not say."
        if left_out >= written
        else "Triton does not insert the fence for us. "
        + (
            "No number was wrong without it in our runs, but the manual promises nothing then."
            if wrong == 0
            else f"Without it {wrong:,.0f} numbers were wrong."
        )
    )
)

# %%
# Four rungs to a fast matmul
# ---------------------------
#
# What do roles add to a matmul that is already fast without them? We climb four rungs: three
# without roles, one with them. All use tiles of 128 × 256 sums.
#
# **Rungs 1 and 2: one buffer, then a ring, without roles.** All eight warps load and multiply.
# ``STAGES`` is the number of slots: 1, then 3. The warps wait for each matmul, and ask for the next
# tiles when it has ended. While they ask, the tensor cores are idle.
#
# **Rung 3: one in flight, without roles.** The warps need not wait, because ``wgmma`` is
# asynchronous, too:
#
# .. literalinclude:: warps_with_roles.py
#    :language: python
#    :pyobject: chain_kernel
#    :lines: 17-18
#    :dedent:
#
# With ``is_async=True`` the first call returns at once. ``warpgroup_mma_wait(n)`` waits until at
# most ``n`` matmuls are unfinished (0 here). It takes the sums as ``deps`` and hands them back,
# because nothing may read them before. With ``n = 1`` the tensor cores already have the next matmul
# while the warps ask for tiles:


# Drawing
def drawn_flight(axes):
    long, ask, end = 3.0, 1.0, 12.0
    shades = {"waits": "#f6f8fa", "asks": "#fff4e5", "works": "#eaf2fb"}

    def bar(lane, begin, until, text, shade):
        until = min(until, end)
        look = {"color": shades[shade], "edgecolor": "#59636e", "height": 0.66}
        axes.barh(lane, until - begin, left=begin, **look)
        middle = (begin + until) / 2
        axes.text(middle, lane, text, ha="center", va="center", fontsize=10)

    for lane, in_flight in ((0, 0), (2, 1)):
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
                bar(lane, issued, now, f"wait for {i - in_flight}", "waits")
            if now < end:
                bar(lane, now, now + ask, "ask", "asks")
            now += ask
    names = ("warps, ring", "tensor cores", "warps, one in flight", "tensor cores")
    axes.set_yticks(range(4), names)
    axes.invert_yaxis()
    axes.set(xticks=[], xlabel="time, not to scale", xlim=(0, end))
    axes.grid(False)


lab.sketch(
    "What the tensor cores do while the warps ask for tiles",
    "Two pairs of lanes over time. In the ring the warps wait for a matmul, then ask for tiles, "
    "and the tensor cores are idle meanwhile. With one matmul in flight the tensor cores go "
    "from one matmul to the next while the warps ask.",
    drawn_flight,
    height=2.8,
)

# %%
# One loop serves all three rungs: ``IN_FLIGHT`` is 1 here, and 0 in the rungs before. ``acc`` holds
# the sums. The matmul of step ``ended`` is the last that has ended, so its slot gets the tiles of
# step ``after``. ``fetch`` announces and asks for these tiles, but only if ``some`` is true: a
# matmul must have ended (``ended >= 0``), and the step must exist (``after < steps``). With three
# slots and one matmul in flight, step 5 refills the slot of step 4 with the tiles of step 7.
#
# .. literalinclude:: warps_with_roles.py
#    :language: python
#    :pyobject: loop_kernel
#    :lines: 22-23,25,27-28,30-34
#    :dedent:
#
# The loop has no ``empty`` barrier, because the warps that read a slot refill it themselves, after
# ``warpgroup_mma_wait``. The eight warps are two warpgroups, and each waits for its own half of the
# matmul only; so before a copy Triton inserts a barrier of all eight warps (``bar.sync``).


# Whole: the loop of rungs 1 to 3
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
    # -- begin: fill the ring
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
        ended = i - IN_FLIGHT
        after = ended + STAGES
        some = (ended >= 0) & (after < steps)
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
# **Rung 4: roles.** The loader is that of the smallest matmul. But there are two consumers, because
# the 128 × 256 sums would be 256 :term:`registers <register>` for each thread of one, and a thread
# has at most 255. Two things are new:
#
# - **Two consumers release a slot.** It is empty when both have read it, so its barrier counts two:
#   ``mbarrier.init(empty.index(s), count=2)``.
# - **Registers change hands.** All threads are launched with the same number of registers, although
#   a loader needs hardly any. Here it is 168: the SM's 65,536 registers over three warpgroups,
#   because the loader's one warp counts as a group of four. The instruction ``setmaxnreg`` changes
#   a warpgroup's number: by the last argument of ``warp_specialize``, ``[240, 24]``, consumer 1
#   gets 240 and the loader 24, and 240 are left for consumer 0.
#
# .. dropdown:: More: the arithmetic of 168 and 240
#
#    Three groups of four warps are 384 threads, and 65,536 / 384 is 170, which is rounded down to a
#    multiple of 8. Consumer 0 has no entry in the list, and gets 3 × 168 − 240 − 24 = 240.
#
# Consumer ``ME``, 0 or 1, multiplies its 64 rows of the tile of ``a`` (``mine``), and has one
# matmul in flight. So a step releases the slot of the step *before*, and step 0 none
# (``pred=i > 0``):
#
# .. literalinclude:: warps_with_roles.py
#    :language: python
#    :pyobject: multiply_role
#    :lines: 7-10,12,14-16,18-19
#    :dedent:


# Whole: roles_kernel and its roles
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


# %%
# .. dropdown:: More: consumers that take turns
#
#    Two consumers that start together may stay together: both multiply, and then both compute while
#    the tensor cores are idle. With a :term:`named barrier` each can wait for its turn and then
#    give it to the other, which is called *ping-pong*. Our ladder does without; whether it pays in
#    attention, the next chapter measures.


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


# Folded: A picture of two consumers, free and in turns
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


lab.draw(
    alternated,
    "When each consumer has its turn",
    lambda rows: (
        f"Bars over cycles: free, {100 * overlap(rows, 'free'):.0f} % of consumer 0's work "
        f"overlaps with consumer 1's; in turns {100 * overlap(rows, 'in turns'):.0f} %."
    ),
    drawn_turns,
)

# %%

# Folded: Do two barriers keep them apart?
free, taken = (
    100 * overlap(alternated.rows, run) if alternated.rows else nan
    for run in ("free", "in turns")
)
lab.read(
    "Two pauses stand for the work. Left alone, consumer 1 works during "
    f"{free:.0f} % of consumer 0's work, and in turns during {taken:.0f} %."
    + (
        " So the two barriers, 9 and 10, keep them apart. Before its loop, consumer 1 arrives at "
        "the barrier of consumer 0, or both would wait for ever."
        if taken < 10 < free
        else ""
    )
)

# %%
# **Triton's** ``tl.dot``, for comparison: the compiler makes the ring and the waits, without roles.


# Whole: dot_kernel
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


# %%

# Reading
checks = lab.check(
    "The kernels", cases(), here=HOPPER, title="The kernels against float64"
)
lab.read(checks.plain.splitlines()[0])

# %%

# Folded: The checks, by dtype and kernel
checks

# %%


# Measuring
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


# %%

# Folded: Registers and shared memory of the rungs
needed = lab.measure("What the rungs need", resources)
needed

# %%

# Folded: Does any rung spill, and what does setmaxnreg ask for?
spills = sum(row["spills"] for row in needed.rows) if needed.rows else nan
asked = "".join(row["setmaxnreg"] for row in needed.rows if row["rung"] == "roles")
lab.read(
    f"{f'{spills:.0f}' if spills else 'No'} value{'s' * (spills > 1)} "
    f"spill{'s' * (spills <= 1)} from the registers of any rung."
    + (
        " Consumers have 240 registers and the loader 24. Before and after the roles, Triton gives "
        "the default partition 256 and the two other warpgroups 120 each. Of 256 a thread can name "
        "255; `setmaxnreg` takes multiples of 8."
        if asked == "24, 120, 240, 256"
        else ""
    )
)

# %%
# What each rung gains
# --------------------
#
# The dashed line is ``torch.matmul``, which calls cuBLAS.


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

lab.ladder(
    climbed, "A matmul of n × n, by n and rung", NAMES, by="n", where={}, lit="roles"
)

# %%

# Reading
speed = {
    name: climbed.rate(name, n=8192) if climbed.rows else nan
    for name in (*NAMES, "matmul")
}
against = 100 * speed["roles"] / speed["matmul"]
of_cublas = {name: 100 * speed[name] / speed["matmul"] for name in NAMES}


SCATTER = 0.02  # speeds that are nearer than this we call equal


def beside_the_loop():
    """How much slower roles are than the loop with one matmul in flight, over the sizes."""
    slower = [
        100 * (1 - climbed.rate("roles", n=n) / climbed.rate("one in flight", n=n))
        if climbed.rows
        else nan
        for n in (2048, 4096, 8192)
    ]
    least, most = min(slower), max(slower)
    if most < 0:
        return "Roles are faster than one matmul in flight at every size."
    if least < 0:
        return (
            "Between roles and one matmul in flight the sizes disagree: roles are from "
            f"{-least:.1f} % faster to {most:.1f} % slower."
        )
    return (
        f"**Roles gain nothing: they measure {least:.1f} to {most:.1f} % slower than one matmul in "
        "flight.** "
        + (
            "Two timings of the same kernel can differ about as much (exercise 2), so whether "
            "roles lose a little, these runs cannot say. "
            if most < 100 * 1.5 * SCATTER
            else ""
        )
        + "The consumers no longer ask for tiles. Why does that not help?"
    )


def at_size(name, n):
    return climbed.rate(name, n=n) if climbed.rows else nan


sizes = (2048, 4096, 8192)
by_ring = all(
    at_size("ring", n) - at_size("one buffer", n)
    > at_size("one in flight", n) - at_size("ring", n)
    > 0
    for n in sizes
)
like_dot = all(
    abs(at_size("tl.dot", n) / at_size("one in flight", n) - 1) < SCATTER for n in sizes
)
lab.read(
    f"At size 8,192 cuBLAS reaches {speed['matmul']:.0f} TFLOP/s. "
    + (
        "At every size, the ring brings the larger part of the gain, and one matmul in flight the "
        "rest. "
        if by_ring
        else ""
    )
    + (
        "`tl.dot` is as fast as that loop."
        if like_dot
        else f"`tl.dot` reaches {of_cublas['tl.dot']:.0f} % of cuBLAS at size 8,192."
    )
)

# %%

# Reading
lab.read(beside_the_loop())

# %%
# Why roles gain nothing here
# ---------------------------
#
# To see who waits for whom, one program of a matmul of size 4,096 notes the clock before and after
# each wait. The ring waits for the matmul that it has just issued (blue), so its tensor cores are
# idle in the rest of the step. The other kernels wait for the matmul *before*, while one runs.


# Measuring
trace = lab.measure("Clocks of sixteen steps, in cycles", traced)

# %%


# Drawing
def in_lanes(rows):
    return list(dict.fromkeys((row["kernel"], row["lane"]) for row in rows))


SHADES = {
    "waits at a barrier": "#d1d9e0",
    "waits for a matmul": lab.colour("Kernel Book"),
    "asks for tiles": lab.colour("PyTorch"),
}


def parts_of(row):
    """What a role does in a step, as (what, begin, end)."""
    work = "asks for tiles" if row["lane"] == "loader" else "waits for a matmul"
    return (
        ("waits at a barrier", row["waits"], row["works"]),
        (work, row["works"], row["ends"]),
        ("asks for tiles", row["ends"], row["asked"]),
    )


def spent(rows, kernel, lane):
    """The cycles of a step that a lane spends with each of SHADES, and all of them, in the mean.

    The first steps fill the ring, and the loader is the last to be in step. An even number follows,
    because those of the ring alternate.
    """
    skip = 5 if lane == "loader" else 3
    own = [r for r in rows if (r["kernel"], r["lane"]) == (kernel, lane)][skip:]
    *own, after = own  # each step lasts until the next begins
    parts = dict.fromkeys(SHADES, 0)
    for row in own:
        for label, begin, end in parts_of(row):
            parts[label] += (end - begin) / len(own)
    return parts, (after["waits"] - own[0]["waits"]) / len(own)


def said(rows):
    found = []
    for kernel, lane in in_lanes(rows):
        parts, step = spent(rows, kernel, lane)
        spans = (f"{label} for {n:,.0f}" for label, n in parts.items() if n)
        found.append(
            f"{kernel}, {lane}: {step:,.0f} cycles a step, of which it {', '.join(spans)}"
        )
    return f"Bars of cycles. {'; '.join(found)}."


def name_lanes(axes, rows, rest=None):
    lanes = in_lanes(rows)
    for label, shade in SHADES.items():
        axes.barh([0], [0], color=shade, label=label)
    if rest:
        axes.barh([0], [0], fill=False, edgecolor="#59636e", label=rest)
    axes.set_yticks(range(len(lanes)), [f"{kernel}: {lane}" for kernel, lane in lanes])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)


def drawn_step(axes, rows):
    for at, (kernel, lane) in enumerate(in_lanes(rows)):
        parts, step = spent(rows, kernel, lane)
        left = 0
        for label, width in parts.items():
            axes.barh(at, width, 0.66, left, color=SHADES[label])
            left += width
        axes.barh(at, step, 0.66, fill=False, edgecolor="#59636e", linewidth=0.8)
        axes.text(step + 25, at, f"{step:,.0f}", va="center", fontsize=10)
    name_lanes(axes, rows, "all else")
    axes.set(xlim=(0, 1750), xlabel="cycles of a step")


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


lab.draw(trace, "A step, without and with roles: what the warps do", said, drawn_step)

# %%

# Folded: The sixteen steps on a timeline
lab.draw(trace, "Sixteen steps, without and with roles", said, drawn_trace)

# %%

# Reading
of_step, cycles = {}, {}
for lane in in_lanes(trace.rows) if trace.rows else ():
    of_step[lane], cycles[lane] = spent(trace.rows, *lane)


def share(lane, *labels):
    """The percentage of its time that a lane spends with some of SHADES."""
    if lane not in of_step:
        return nan
    return 100 * sum(of_step[lane][label] for label in labels) / cycles[lane]


ROLES = [("roles", lane) for lane in ("loader", "consumer 0", "consumer 1")]
LOOP = ("one in flight", "all warps")
BOTH = ("waits at a barrier", "waits for a matmul")
bare, ahead = (cycles.get(lane, nan) for lane in (("ring", "all warps"), LOOP))
of_pair = sorted(cycles.get(lane, nan) for lane in ROLES[1:])
in_roles = sum(of_pair) / 2
waits = sorted({f"{share(lane, *BOTH):.0f}" for lane in ROLES[1:]})
lab.read(
    f"Tensor cores that never wait need {step_cycles:,.0f} cycles for a step. "
    + (
        "With one matmul in flight a step takes hardly more, with roles or without: the tensor "
        "cores work while the loop's warps ask for tiles, so there is no time to win. The waits at "
        "a barrier cost nothing either, because the matmul before still runs. "
        if max(ahead, in_roles) < 1.02 * step_cycles
        else (
            f"With one matmul in flight a step takes {ahead:,.0f}, so its tensor cores hardly ever "
            "wait, and roles have no idle time to fill. With roles it takes "
            f"{of_pair[0]:,.0f} to {of_pair[1]:,.0f}. Each is the mean of about a dozen steps, and "
            "the two consumers, which share every slot, already differ by "
            f"{100 * (of_pair[1] / of_pair[0] - 1):.0f} %, so differences of this size say little."
        )
        if ahead < 1.02 * step_cycles
        else "All take longer, so the tensor cores still wait for a part of each step."
    )
)

# %%

# Reading
lab.read(
    f"**But each consumer waits for {' to '.join(waits)} % of the time**, "
    f"and the loop's warps wait for {share(LOOP, *BOTH):.0f} %, because they ask "
    "for tiles, too. So roles free the consumers' time, not the tensor cores'. A plain matmul has "
    "nothing to do in that time; attention has its softmax, though how much of it fits there, the "
    "next chapter measures."
)

# %%

# Folded: More: the time to ask, and the two consumers
slower = bare / in_roles
longer = (
    climbed.rate("roles", n=4096) / climbed.rate("ring", n=4096)
    if climbed.rows
    else nan
)
asks = {
    lane: of_step[lane]["asks for tiles"] if lane in of_step else nan
    for lane in (LOOP, ROLES[0])
}


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
    return max(map(abs, apart["works"])) < 60 < min(apart["ends"])


lab.read(
    f"Asking takes the loop's warps {asks[LOOP]:.0f} cycles and the loader "
    f"{asks[ROLES[0]]:.0f}, for the same tiles."
    + (
        " Both consumers pass the barrier of a tile at about the same time, but the matmuls of "
        "consumer 1 end first, so it waits longer at the barrier and less for its matmul."
        if trace.rows and passed_together()
        else ""
    )
)

# %%

# Folded: More: the ring's step and the ring's time
lab.read(
    f"The ring's step is {slower:.2f} times as long as one with roles, but its matmul takes only "
    f"{longer:.2f} times the time. "
    + (
        "We suspect a higher clock, because its tensor cores rest in part of each step; the clock "
        "was not recorded, and the stamps may have a part in it."
        if slower > longer + 0.05
        else "So the two agree."
    )
)

# %%
# What breaks it
# --------------
#
# Consumers gain time, at the price of two barriers per slot that must be exactly right. If they are
# not, a role may wait for ever. So each mistake runs in a process that is killed if it has not
# ended after two seconds, and its roles write into memory of the host how far they are.
#
# The kernel, ``sum_kernel``, has a loader, two slots, and a consumer that adds up six tiles. Tile
# ``i`` is full of :math:`10^i`, so that each digit of the sum, from the right, counts how often a
# tile was added: it should be 111111. One mistake is a loader that begins with parity 0. The other
# four are in the loop of the consumer, each under its name, where ``pause`` stands for 5,000 ns of
# more work:
#
# .. literalinclude:: warps_with_roles.py
#    :language: python
#    :pyobject: add_tiles
#    :lines: 10-13,15-20
#    :dedent:

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
broken

# %%

# Reading
outcome = {row["mistake"]: row["sum"] for row in broken.rows}
hung = [name for name, result in outcome.items() if result.startswith("none")]
wrong = [
    name for name, result in outcome.items() if name not in hung and result != "111111"
]
lucky = [name for name in outcome if name not in (*hung, *wrong, "none")]


def listed(names):
    return "; ".join(f"“{name}”" for name in names) or "none"


early = outcome.get("releases before it reads", "")


def added(times):
    """The tiles that were added so often, by the digits of the sum: "0 and 1"."""
    tiles = [str(i) for i, digit in enumerate(reversed(early)) if digit == times]
    return " and ".join(filter(None, [", ".join(tiles[:-1]), *tiles[-1:]])) or "none"


at_consumer = {row["mistake"]: row["consumer"] for row in broken.rows}
lab.read(
    f"{nan} mistakes"
    if not outcome
    else f"**Deadlocks.** {len(hung)} of the {len(outcome) - 1} mistakes hang. "
    + (
        "The first two stop where the model stopped. "
        if set(list(MISTAKES)[1:3]) <= set(hung)
        else ""
    )
    + (
        "“always waits for parity 0” adds tiles 0 and 1 and hangs at tile 2, because that tile "
        "came during the pause, and the phase that it ended has parity 1."
        if at_consumer.get("always waits for parity 0") == "tile 2: waits for full[0]"
        else ""
    )
)

# %%

# Reading
lab.read(
    f"**A race.** A wrong sum comes from {listed(wrong)}"
    + (
        f". Read from the right, {early} counts that tiles {added('0')} were never added, and "
        f"tiles {added('2')} twice. The loader took the release at its word, and put the next tile "
        "into a slot that was still to be read."
        if wrong == ["releases before it reads"] and re.fullmatch("[012]{6}", early)
        else "."
    )
)

# %%

# Reading
lab.read(
    "**Luck.** The sum is right in spite of "
    + (
        f"{listed(lucky)}: each read comes after a pause, in which the tile can arrive. So a right "
        "result does not prove the waits."
        if lucky == ["does not wait for the tile"]
        else f"{listed(lucky)}."
    )
)

# %%
# How to find such a mistake:
#
# - **It hangs.** Let every role write a number before and after each wait, into memory that the
#   host can read.
# - **It is wrong, or right by luck.** Make each role slow in turn, with a pause.
# - **It breaks in a later round.** Test with more than twice as many tiles as slots, because the
#   parity of the first round comes back only in the third.
#
# In short
# --------
#
# A loader names tiles to the copy engine, consumers issue matmuls, and two barriers per slot keep
# them apart.

# %%

# Reading
alike = max(abs(against - 100), abs(of_cublas["one in flight"] - 100)) < 100 * SCATTER
lab.read(
    f"A matmul of size 8,192 is as fast as cuBLAS, to within {100 * SCATTER:.0f} %, with roles and "
    "without: one matmul in flight is enough."
    if alike
    else f"A matmul of size 8,192 reaches {against:.0f} % of the speed of cuBLAS with roles, and "
    f"{of_cublas['one in flight']:.0f} % with one matmul in flight and no roles."
)

# %%
# Roles can pay where a loop has something to compute between its matmuls, as in
# :doc:`/chapters/attention_hopper`.
#
# Exercises
# ---------
#
# **1. Does it hang?** A consumer releases the slot of tile ``i - 1`` after it has waited for tile
# ``i``, as the consumers of our ladder do. For which numbers of slots does the ring work? Use the
# model.

# %%


# Solution: does it hang?
def late_consumer(full, empty, n, slots):
    for i in range(n):
        yield "full", i % slots, full[i % slots], (i // slots) & 1
        if i > 0:
            empty[(i - 1) % slots].arrive()


def hangs(slots, n=12):
    full, empty = ([Barrier(1) for _ in range(slots)] for _ in range(2))
    roles = [loader(full, empty, n, slots), late_consumer(full, empty, n, slots)]
    at = [next(role) for role in roles]
    while any(w and w[2].lets_pass(w[3]) for w in at):
        for i, role in enumerate(roles):
            if at[i] and at[i][2].lets_pass(at[i][3]):
                at[i] = next(role, None)
    return any(at)


found = {slots: hangs(slots) for slots in (1, 2, 3, 4)}
assert found == {1: True, 2: False, 3: False, 4: False}
lab.read(
    "It hangs with one slot, because the consumer would release the only slot after the next tile, "
    "which cannot come. With two it works, but the loader can run ahead by one tile only."
)

# %%
# **2. How deep must the ring be?** Measure the matmul with roles with two slots instead of three.
# Why can it not have four with these tiles, if a program can have 227 KiB of shared memory? (The
# tile of ``c`` lies there, too, until it is stored.)

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
deep

# %%

# Solution: what two slots cost, and why not four
shallow, again = (row["TFLOP/s"] for row in deep.rows) if deep.rows else (nan, nan)
lab.read(
    f"With two slots the matmul reaches {100 * shallow / again:.0f} % of its speed with three. "
    + (
        "The matmul in flight and the one before it fill both slots, so a tile has one step to "
        "come in, and with three slots it has two. "
        if shallow < 0.95 * again
        else ""
    )
    + f"Four slots of {step_bytes / 1024:.0f} KiB and the tile of `c` would take {kib:.0f} KiB, "
    "more than a program can have. The kernel with three slots is that of the ladder, and the two "
    f"timings are {100 * abs(again / speed['roles'] - 1):.1f} % apart, which tells how far a small "
    "difference in the ladder can be trusted."
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
    f"A matmul with a loader and two consumers reaches {against:.0f} % of the speed of cuBLAS at "
    "size 8,192"
)
