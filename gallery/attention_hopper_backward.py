"""
Backward in one sweep
=====================

In plain Triton, the backward pass computes every attention weight twice, once in each of two
sweeps, because no program can hold the gradients of its keys *and* those of all queries. *What does
it take to compute each weight once, and can the gradients still be the same bits in every run?*

You will learn

- how programs add to the same sums in a fixed order, and why none of them waits forever;
- why the additions get their own :term:`warp`;
- how much of the promised speedup one sweep delivers, and where the cycles of a step go.

In the bars above, “two sweeps” is plain Triton; the others are the first and the last step of this
chapter, written in :term:`Gluon` for Hopper GPUs (H100, H200). Read
:doc:`/chapters/warps_with_roles` first, for rings and barriers.
"""

# sphinx_gallery_thumbnail_number = 8
import time
from dataclasses import replace
from functools import partial
from itertools import groupby

import torch
import torch.nn.functional as F
from matplotlib.patches import Rectangle
from matplotlib.ticker import MultipleLocator

from kernelbook import attention, lab, reference, runtime
from kernelbook.lab.attention_bench import (
    BACKWARD,
    draw,
    flash,
    matmul,
    points,
    sdpa,
    timed,
)
from kernelbook.ops.attention import backward as plain
from kernelbook.ops.attention.forward import attention_forward
from kernelbook.ops.attention.tiles import LOG2E, place
from kernelbook.ops.hopper import backward as hopper
from kernelbook.ops.hopper import backward_choice as choice
from kernelbook.ops.hopper.backward import (
    ROWS,
    announce,
    keep_seen,
    position_of,
    tma_add,
)
from kernelbook.ops.hopper.forward import exp2
from kernelbook.ops.hopper.parts import named_barrier, tma_load, tma_store
from kernelbook.small.attention_hopper_backward import (
    sweep_in_turn,
    sweep_in_turn_kernel,
)

nan = float("nan")


lab.start(
    "attention_hopper_backward",
    "kernelbook.ops.attention",
    "kernelbook.ops.hopper.backward",
)

# %%
# Five matmuls instead of seven
# -----------------------------
#
# For a tile of queries and one of keys, the backward pass needs five matmuls, as
# :doc:`/chapters/attention_backward` derives. Two of them compute :math:`S` and :math:`dP`, and
# from these come the weights :math:`P` and :math:`dS = P \circ (dP - \mathrm{delta})`. The other
# three multiply :math:`P` and :math:`dS` into the tile's terms of :math:`dV`, :math:`dK` and
# :math:`dQ`. These terms have to be summed in two directions:

# Drawing
SHADES = {"A": "#f6f8fa", "B": "#fff4e5", "C": "#eaf2fb"}  # of tiles of queries


def write_at(axes, at, text, size=11, color="#1f2328"):
    """Write lines around a point, each by itself, so that a browser centres each."""
    lines = text.split("\n")
    for number, line in enumerate(lines):
        up = 1.25 * size * ((len(lines) - 1) / 2 - number)
        axes.annotate(
            line, at, (0, up), textcoords="offset points", ha="center", va="center",
            fontsize=size, color=color,
        )  # fmt: skip


def two_directions(axes):
    edge = "#59636e"
    arrow = {"arrowstyle": "->", "color": edge}
    for column, (letter, fill) in enumerate(SHADES.items()):
        left = 1.3 * column
        for owner in range(3):
            box = Rectangle((left, -owner), 1.3, 1, facecolor=fill, edgecolor=edge)
            axes.add_patch(box)
            write_at(axes, (left + 0.65, -owner + 0.5), "P, dS", 10)
        write_at(axes, (left + 0.65, 1.3), letter)
        axes.annotate("", xy=(left + 0.65, -2.75), xytext=(left + 0.65, -2.1), arrowprops=arrow)
        box = Rectangle((left + 0.1, -3.55), 1.1, 0.75, facecolor=fill, edgecolor=edge)
        axes.add_patch(box)
        write_at(axes, (left + 0.65, -3.17), f"dQ of {letter}", 10)
    write_at(axes, (1.95, 1.9), "queries", 11, edge)
    for owner in range(3):
        middle = -owner + 0.5
        axes.text(-0.2, middle, f"keys of program {owner}", ha="right", va="center")
        axes.annotate("", xy=(4.7, middle), xytext=(4.0, middle), arrowprops=arrow)
        box = Rectangle((4.75, middle - 0.32), 1.4, 0.64, facecolor="#ffffff", edgecolor=edge)
        axes.add_patch(box)
        write_at(axes, (5.45, middle), "dK, dV", 10)
    write_at(axes, (5.45, 1.6), "one program\nadds", 10, edge)
    axes.text(-0.2, -3.17, "all programs add", ha="right", va="center", fontsize=10, color=edge)
    axes.set(xlim=(-2.9, 6.3), ylim=(-3.65, 2.2))
    axes.axis("off")


lab.sketch(
    "Along a row, one program adds; down a column, all do",
    "A grid of three rows, the keys of programs 0 to 2, and three columns, the tiles of queries A, "
    "B and C. Each square holds P and dS. Each row adds up to dK and dV of one program, and each "
    "column to dQ of a tile of queries, to which all three programs add.",
    two_directions,
    height=3.1,
)

# %%
# **Two sweeps** go through the grid twice, by rows and by columns, so that every sum belongs to one
# program. But both compute :math:`S` and :math:`dP`, which makes seven matmuls. One sweep needs
# only five, so at the same speed per matmul it would be :math:`7/5 = 1.4` times as fast.

# %%

# Reading
dq_mib = 4096 * 128 * 4 / 2**20
lab.read(
    "**The price is a shared sum.** A program takes one row and keeps its `dK` and `dV` in "
    "registers. But it visits all queries, whose `dQ` does not fit: at length 4,096 and head_dim "
    f"128 that is {dq_mib:.0f} MiB in float32, and an SM has 256 KiB of registers. So all programs "
    "add their terms of `dQ`, their “parts”, to sums in memory."
)

# %%
# **The order of the additions decides the last bits,** just as ``(0.1 + 0.2) + 0.3`` is not
# ``0.1 + (0.2 + 0.3)`` in Python. For the same bits in every run, our programs take turns:

# Drawing
assert (0.1 + 0.2) + 0.3 != 0.1 + (0.2 + 0.3)


def turns(axes):
    edge = "#59636e"
    for owner in range(3):
        axes.text(-0.15, -owner, f"program {owner}", ha="right", va="center")
        for number, letter in enumerate("CBA"):
            left = 1.3 * (owner + number)
            box = Rectangle(
                (left, -owner - 0.3), 0.9, 0.6, facecolor=SHADES[letter], edgecolor=edge
            )
            axes.add_patch(box)
            axes.text(left + 0.45, -owner, letter, ha="center", va="center")
            if owner < 2:
                arrow = {"arrowstyle": "->", "color": edge}
                begin, end = (left + 0.9, -owner - 0.3), (left + 1.3, -owner - 0.7)
                axes.annotate("", xy=end, xytext=begin, arrowprops=arrow)
    axes.text(3.05, -2.75, "time →", ha="center", va="center", color=edge)
    axes.set(xlim=(-1.6, 6.3), ylim=(-3, 0.4))
    axes.axis("off")


lab.sketch(
    "Each tile of queries goes from program to program",
    "A staircase. Program 0 adds to the tiles C, B and A in turn. Program 1 adds to each of them "
    "one step later, and program 2 one step after that.",
    turns,
    height=2.2,
)

# %%
# In every run, each tile of queries receives the part of program 0 first and that of program 2
# last, yet all programs work at the same time. They begin with C, the *last* tile of queries,
# because under a causal mask all programs visit the last queries, but only some visit the first.
#
# How a program waits for its turn
# --------------------------------
#
# A small kernel in plain Triton, for one head without a mask, shows how a program learns that its
# turn has come. Each program owns 64 keys, and in step ``i`` it loads a tile of 64 queries.
#
# As before, ``lse`` is the :term:`logsumexp` of each query's scores, and ``delta`` the row sums of
# ``dO`` times ``O``. As in the picture, rows of ``s`` are keys, and columns are queries:
#
# .. literalinclude:: /../src/kernelbook/small/attention_hopper_backward.py
#    :pyobject: sweep_in_turn_kernel
#    :start-at: s = tl.dot
#    :end-before: # -- wait
#    :dedent:
#
# Each program has a *counter* in memory, which starts at 0 and counts the steps that it has added.
# Its turn in step ``i`` has come when its *predecessor*, the program of the preceding keys, has
# counted to ``i + 1``:
#
# .. literalinclude:: /../src/kernelbook/small/attention_hopper_backward.py
#    :pyobject: sweep_in_turn_kernel
#    :start-at: # -- wait
#    :end-before: tl.store(dk_ptr
#    :dedent:
#
# - ``atomic_xchg`` *writes* the program's own counter. With ``"release"``, all earlier stores take
#   effect before the counter changes.
# - ``atomic_add`` of 0 *reads* the predecessor's counter. With ``"acquire"``, all later loads see
#   the sums that the predecessor had stored by then.
# - A single thread performs each atomic, so ``debug_barrier`` is needed twice: no thread may load
#   sums before the counter is read, nor may the counter be written before all threads have stored.


# Measuring
KEYS, QUERIES, HEAD_DIM, KIB = 128, 64, 128, 1024


def one_sweep(q, k, v, do, is_causal=False, block_m=32, block_n=64):
    """(dq, dk, dv), by a loop over tiles of keys and one over tiles of queries."""
    n_q, n_k, scale = q.shape[2], k.shape[2], q.shape[3] ** -0.5
    seen = torch.ones(n_q, n_k, dtype=torch.bool, device=q.device)
    seen = seen.tril(n_k - n_q) if is_causal else seen
    # -- what the forward pass has left
    s = (q @ k.mT * scale).masked_fill(~seen, -torch.inf)
    lse = s.logsumexp(-1)
    delta = (do * (s.softmax(-1) @ v)).sum(-1)

    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    for tile in range(-(-n_k // block_n)):
        keys = slice(tile * block_n, (tile + 1) * block_n)
        for start in reversed(range(0, n_q, block_m)):
            queries = slice(start, start + block_m)
            if not seen[queries, keys].any():
                continue
            tile_q, tile_do = q[:, :, queries], do[:, :, queries]
            # -- in registers: keys are rows
            s = k[:, :, keys] @ tile_q.mT * scale
            p = (s - lse[:, :, None, queries]).exp()
            p = p.masked_fill(~seen[queries, keys].T, 0.0)
            dp = v[:, :, keys] @ tile_do.mT
            ds = p * (dp - delta[:, :, None, queries])
            dv[:, :, keys] += p @ tile_do
            dk[:, :, keys] += ds @ tile_q * scale
            # -- in memory: to these queries other tiles of keys add as well
            dq[:, :, queries] += ds.mT @ k[:, :, keys] * scale
    return dq, dk, dv


def drawn(sizes, dtype):
    """Random q, k, v and do of (batch, heads, heads of keys, queries, keys, head_dim)."""
    batch, heads, heads_k, n_q, n_k, head_dim = sizes
    q, k, v = draw(batch, heads, n_q, head_dim, dtype, heads_k=heads_k, seqlen_k=n_k)
    return q, k, v, torch.randn_like(q)


def by_pytorch(q, k, v, do, is_causal, window=None):
    """PyTorch's gradients in the dtype of q, with the mask that the book's truth has."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    n_q, n_k, group = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
    at = torch.arange(n_q, device=q.device)[:, None] + n_k - n_q
    j = torch.arange(n_k, device=q.device)
    mask = (j <= at) if is_causal else torch.ones_like(j <= at)
    if window is not None:
        mask = mask & (j >= at - window[0]) & (j <= at + window[1])
    keys, values = (x.repeat_interleave(group, 1) for x in leaves[1:])
    out = F.scaled_dot_product_attention(leaves[0], keys, values, attn_mask=mask)
    return torch.autograd.grad(out, leaves, do)


def three_cases(what, ours, q, k, v, do, is_causal, window=None, factor=4):
    scale = q.shape[3] ** -0.5
    truth = reference.attention_backward(q, k, v, do, is_causal, scale, None, window)
    theirs = by_pytorch(q, k, v, do, is_causal, window)
    for name, *results in zip(("dq", "dk", "dv"), ours, theirs, truth, strict=True):
        yield lab.Case(what, name, *results, factor=factor)


def cases_in_pytorch():
    for sizes in (
        (1, 2, 2, 100, 100, 64),
        (1, 2, 2, 65, 127, 128),
        (2, 1, 1, 1, 300, 64),
    ):
        for is_causal in (False, True):
            inputs = drawn(sizes, torch.float32)
            ours = one_sweep(*inputs, is_causal)
            what = f"{sizes}{', causal' * is_causal}"
            yield from three_cases(what, ours, *inputs, is_causal, factor=8)


def of_small_kernel():
    generator = torch.Generator(runtime.DEVICE).manual_seed(1)
    made = {"device": runtime.DEVICE, "dtype": torch.float16, "generator": generator}
    one_head = torch.randn(4, 1, 1, 256, 64, **made).unbind()
    leaves = [x.clone().requires_grad_() for x in one_head[:3]]
    out = F.scaled_dot_product_attention(*leaves)
    theirs = torch.autograd.grad(out, leaves, one_head[3])
    ours = [x[None, None] for x in sweep_in_turn(*(x[0, 0] for x in one_head))]
    truth = reference.attention_backward(*one_head)
    for name, *results in zip(("dq", "dk", "dv"), ours, theirs, truth, strict=True):
        yield lab.Case("256 queries and keys, head_dim 64", name, *results)


# %%

# Folded: The whole small kernel, the same sweep in PyTorch, and both against float64
lab.together(
    lab.listing(
        {"The small kernel": sweep_in_turn_kernel, "How it is launched": sweep_in_turn}
    ),
    lab.read(
        "The small kernel was checked, but not timed. The same sweep in PyTorch, `one_sweep`, is "
        "under “How this was measured”."
    ),
    lab.check("The small kernel", of_small_kernel()),
    lab.check("The sweep in PyTorch", cases_in_pytorch(), stand_in="on the CPU"),
)

# %%
# Why no program waits forever
# ----------------------------
#
# A waiting program keeps its :term:`SM <SM>`, so all SMs could fill up with programs that wait for
# one that has not started. One assumption rules this out: **programs start in the order of their
# ids.** Program ids ascend with the keys of a head, so:
#
# 1. A program waits only for its predecessor, whose id is smaller.
# 2. By the assumption, this predecessor has already started.
# 3. Of the programs that have started but not finished, take the one with the smallest id. Its
#    predecessor, if it has one, has also started, so it must have finished. Nothing holds our
#    program up: it finishes, and the argument applies to the next.
#
# The launch therefore ends.
#
# **No manual promises the assumption,** yet the package relies on it, and every launch checked or
# timed below has ended. On a GPU that started programs in another order, a launch could hang, but
# never give other bits, because no program adds before its turn.
#
# **The direction matters.** If ids *descend* with the keys, and a head has more tiles than the GPU
# has SMs, the running programs wait for one that cannot start. In the picture four SMs begin a head
# of eight tiles, and an arrow points from each program to the one that it waits for:


# Drawing
def simulate(n_tiles, n_heads, n_sms, is_causal, at_once=1, backwards=False):
    """What each SM does in each tick: (head, tile, whether it worked); None if all stand still."""
    waiting = [
        (first + i % at_once, i // at_once)
        for first in range(0, n_heads, at_once)
        for i in range(n_tiles * at_once)
    ]
    if backwards:
        waiting = [(head, n_tiles - 1 - tile) for head, tile in waiting]
    done = dict.fromkeys(waiting, 0)
    on_sm, ticks = [None] * n_sms, []
    while waiting or any(on_sm):
        for sm in range(n_sms):
            if on_sm[sm] is None and waiting:
                on_sm[sm] = waiting.pop(0)
        may = {
            (head, tile)
            for head, tile in filter(None, on_sm)
            if tile == 0 or done[head, tile - 1] > done[head, tile]
        }
        if not may:
            return None
        ticks.append([p and (*p, p in may) for p in on_sm])
        for head, tile in may:
            done[head, tile] += 1
        for sm, program in enumerate(on_sm):
            steps_of = n_tiles - program[1] if program and is_causal else n_tiles
            if program and done[program] == steps_of:
                on_sm[sm] = None
    return ticks


machine_and_heads = {"n_tiles": 8, "n_heads": 3, "n_sms": 4, "is_causal": False}
assert simulate(**machine_and_heads)  # ids ascend with the keys: the launch ends
assert not simulate(**machine_and_heads, backwards=True)  # ids descend: it stands still


def chains(axes):
    edge, n_tiles, n_sms = "#59636e", machine_and_heads["n_tiles"], machine_and_heads["n_sms"]
    arrow = {"arrowstyle": "->", "color": edge}
    for row, (how, tiles) in enumerate(
        {
            "ids ascend": range(n_sms - 1, -1, -1),
            "ids descend": range(n_tiles - 1, n_tiles - n_sms - 2, -1),
        }.items()
    ):
        y = -1.7 * row
        axes.text(-0.2, y, how, ha="right", va="center")
        for at, tile in enumerate(tiles):
            left, runs, on_sm = 1.9 * at, tile == 0, at < n_sms
            fill = "#eaf2fb" if runs else "#f6f8fa" if on_sm else "#ffffff"
            line = {"edgecolor": edge, "linestyle": "-" if on_sm else "--"}
            axes.add_patch(Rectangle((left, y - 0.6), 1.4, 1.2, facecolor=fill, **line))
            what = "runs" if runs else "waits" if on_sm else "no SM"
            write_at(axes, (left + 0.7, y), f"tile {tile}\n{what}", 10)
            if at:
                begin, end = (left - 0.48, y), (left - 0.02, y)
                axes.annotate("", xy=end, xytext=begin, arrowprops=arrow)
    axes.set(xlim=(-1.9, 1.9 * n_sms + 1.5), ylim=(-2.4, 0.7))
    axes.axis("off")


lab.sketch(
    "Who waits for whom: four SMs, eight tiles of keys",
    "If ids ascend, tiles 0 to 3 have the SMs, and tile 0 runs. If ids descend, tiles 7 to 4 have "
    "them: each waits for the next lower tile, and tile 3 has no SM.",
    chains,
    height=1.7,
)

# %%
# With descending ids none of the four can ever add, so none makes room for tile 3. In a simulation
# the first launch ends, and the second stands still.
#
# What the order costs
# --------------------
#
# The cost of the waits depends on which programs run together, so we simulate four heads of eight
# tiles of keys on eight SMs. In each tick a program does one step if its predecessor has done it.
# *Full* attention has no mask; under a causal mask, later keys have fewer steps, because fewer
# queries see them. Each row is an SM, each colour a head, and grey means waiting:

# %%


# Drawing
SHOWN = {
    "full, all tiles of a head at once": simulate(8, 4, 8, False),
    "causal, all tiles of a head at once": simulate(8, 4, 8, True),
    "causal, two tiles of each head at once": simulate(8, 4, 8, True, at_once=4),
}
# head and tile of the first SM, in each tick
ON_FIRST = [cell[:2] for cell, *_ in [*SHOWN.values()][-1]]
assert list(dict.fromkeys(ON_FIRST)) == [(0, 0), (0, 2), (0, 4), (0, 6)]


def least(ticks):
    """The ticks that would do if no SM ever waited or stood idle."""
    worked = sum(bool(cell and cell[2]) for tick in ticks for cell in tick)
    return -(-worked // len(ticks[0]))


def schedules(axes):
    inks = ("Kernel Book", "PyTorch", "Liger", "SDPA flash")
    rows, room = 8, 3  # SMs, and what the title of the next takes
    for block, (name, ticks) in enumerate(SHOWN.items()):
        top = block * (rows + room)
        for sm in range(rows):
            at = 0
            for cell, same in groupby(tick[sm] for tick in ticks):
                wide = len(list(same))
                if cell:
                    head, _, worked = cell
                    ink = lab.colour(inks[head]) if worked else lab.colour("matmul")
                    look = {"color": ink, "alpha": 0.85 if worked else 0.25}
                    axes.barh(top + sm, wide, 0.8, at, align="edge", **look)
                at += wide
        axes.vlines(
            range(1, len(ticks)), top - 0.1, top + rows, color="#ffffff", linewidth=0.7
        )
        title = f"{name}: {len(ticks)} ticks ({least(ticks)} if no SM idled)"
        axes.text(0, top - 0.8, title, fontsize=11)
        axes.text(-0.7, top + rows / 2, "SMs", rotation=90, ha="right", va="center")
    most = max(map(len, SHOWN.values()))
    axes.text(
        len(ticks) + 0.4, top + 0.6, "← tiles 0, 2, 4, 6 of head 0", va="center",
        fontsize=10, color="#59636e",
    )  # fmt: skip
    bottom = len(SHOWN) * (rows + room) - room
    axes.set(xlim=(0, most), ylim=(bottom, -2), yticks=[], xlabel="ticks")
    axes.grid(visible=False)
    axes.spines["left"].set_visible(False)


lab.sketch(
    "Four heads of eight tiles of keys on eight SMs",
    "Three schedules. In full attention each SM but the first waits once, at the beginning. With a "
    "causal mask the SMs wait again for every head, each a step longer than the one before. With "
    "two tiles of each head at once there is little waiting.",
    schedules,
    height=5.6,
)

# %%

# Reading
full_of = [simulate(8, n_heads, 8, False) for n_heads in (1, 4, 16, 64)]
(once,) = {len(ticks) - least(ticks) for ticks in full_of}  # the same for all
lab.read(
    f"**In full attention the order costs {once} ticks only once; under a causal mask, every head "
    "pays.** Without a mask, the programs of a head start and end one step apart, and the next "
    "head takes up their rhythm. With one, all programs of a head end together, so those of the "
    "next start together and wait anew."
)

# %%
# Running two tiles of each head at once wins most of that time back: only two programs of a head
# then start together, and the second waits one tick, whereas the last of eight waits seven. Within
# a head ids still ascend, as the proof demands.

# %%
# Why one warp only waits and adds
# --------------------------------
#
# On Hopper, the :term:`copy engine <TMA>` can also add a tile to what is in memory. *Without* an
# order, a program asks it to add the part, and goes on. In a *fixed* order the program waits twice:
# for its turn, and then until the sums are in memory, before it writes its counter. In the small
# kernel, all warps stand still meanwhile.
#
# A second program on the SM could compute in that time, but at head_dim 128, two programs of 128
# keys each do not fit.

# Measuring
held = {  # rows, columns, bytes of a number, where
    "dK and dV, float32": (2 * KEYS, HEAD_DIM, 4, "registers"),
    "S and dP, float32": (2 * KEYS, QUERIES, 4, "registers"),
    "P and dS in 16 bits": (2 * KEYS, QUERIES, 2, "registers"),
    "K and V": (2 * KEYS, HEAD_DIM, 2, "shared memory"),
    "Q and dO, two of each": (4 * QUERIES, HEAD_DIM, 2, "shared memory"),
    "dS of two steps, to be exchanged": (2 * KEYS, QUERIES, 2, "shared memory"),
    "a part of dQ, float32, to be added": (QUERIES, HEAD_DIM, 4, "shared memory"),
}
rows, room = [], {"registers": 0, "shared memory": 0}
for what, (n_rows, columns, size, where) in held.items():
    kib = n_rows * columns * size // KIB
    room[where] += kib
    rows.append(
        {"KiB, at head_dim 128": what} | dict.fromkeys(room, "") | {where: str(kib)}
    )
assert room == {"registers": 224, "shared memory": 192}

capacity = {"registers": 256, "shared memory": 227}  # KiB of an SM
assert all(2 * kib > capacity[where] for where, kib in room.items())  # no second fits
for what, kib in (("in all", room), ("an SM has", capacity)):
    rows.append({"KiB, at head_dim 128": what} | {at: str(x) for at, x in kib.items()})
held_table = lab.table(
    rows, "What a program of the fast kernel holds, before it computes the part of dQ"
)
operands = [
    ("Sᵀ = K Qᵀ", "shared memory"),
    ("dPᵀ = V dOᵀ", "shared memory"),
    ("dV += Pᵀ dO", "registers"),
    ("dK += dSᵀ Q", "registers"),
    ("part of dQ = dS K", "shared memory"),
]
operands = [(one.replace(" ", "\u00a0"), where) for one, where in operands]

# %%
# .. admonition:: Key idea
#    :class: kb-key
#
#    Give the additions their own warp. It waits for the turn and for the sums, while the warps that
#    compute carry on.
#
# A program now has three roles, which meet only at barriers and in shared memory:
#
# - a *loader* warp fills rings with queries and with the gradients ``dO``;
# - two *consumers*, each a :term:`warpgroup` with 64 of the 128 keys, do the computing;
# - an *adder* warp waits for its turn and has the copy engine add the part.


# Drawing
def machine(axes):
    edge = "#59636e"
    computes, adds, store, far = "#eaf2fb", "#fff4e5", "#ffffff", "#f6f8fa"
    for x, y, width, height, fill, text in (
        (0, 7.4, 1.8, 1.4, far, "loader\n1 warp"),
        (3.1, 7.4, 3.7, 1.4, computes, "consumers 0 and 1\n4 warps each"),
        (8.2, 7.4, 1.8, 1.4, adds, "adder\n1 warp"),
        (0.9, 4.7, 1.9, 1.2, store, "rings of\nQ and dO"),
        (3.6, 4.7, 1.6, 1.2, store, "dS of\nboth"),
        (5.9, 4.7, 1.9, 1.2, store, "part of\ndQ"),
        (0, 2.5, 2.8, 0.9, far, "copy engine"),
        (5.9, 2.5, 2.8, 0.9, far, "copy engine"),
        (0.9, 0, 1.9, 0.9, far, "Q, dO"),
        (5.9, 0, 1.9, 0.9, far, "sums of dQ"),
        (8.4, 0, 1.7, 0.9, far, "counters"),
    ):
        axes.add_patch(Rectangle((x, y), width, height, facecolor=fill, edgecolor=edge))
        write_at(axes, (x + width / 2, y + height / 2), text)
    for start, end, ends, text, at in (
        ((3.05, 8.1), (1.85, 8.1), "->", "empty", (2.45, 8.45)),
        ((6.85, 8.4), (8.15, 8.4), "->", "full", (7.5, 8.7)),
        ((8.15, 7.8), (6.85, 7.8), "->", "empty", (7.5, 7.45)),
        ((0.4, 7.35), (0.4, 3.45), "->", "asks", (0.0, 6.6)),
        ((1.85, 0.95), (1.85, 2.45), "->", "loads", (2.45, 1.7)),
        ((1.85, 3.45), (1.85, 4.65), "->", "", (0, 0)),
        ((2.2, 5.95), (3.3, 7.35), "->", "full", (2.35, 6.8)),
        ((4.4, 7.35), (4.4, 5.95), "<->", "exchange", (5.25, 6.65)),
        ((6.5, 7.35), (6.5, 5.95), "->", "write", (7.05, 6.65)),
        ((8.4, 7.35), (8.4, 3.45), "->", "asks", (8.85, 5.4)),
        ((6.85, 4.65), (6.85, 3.45), "->", "", (0, 0)),
        ((6.85, 2.45), (6.85, 0.95), "->", "adds", (6.35, 1.7)),
        ((9.4, 0.95), (9.4, 7.35), "->", "read:\nmy turn?", (8.75, 1.65)),
        ((9.8, 7.35), (9.8, 0.95), "->", "write:\ndone", (10.3, 4.3)),
    ):
        arrow = {"arrowstyle": ends, "color": edge}
        axes.annotate("", xy=end, xytext=start, arrowprops=arrow)
        if text:
            write_at(axes, at, text, 10, edge)
    axes.set(xlim=(-0.4, 10.8), ylim=(-0.1, 8.9))
    axes.axis("off")


lab.sketch(
    "Three roles, and below them shared memory, copy engine and memory",
    "A loader of one warp has the copy engine load Q and dO into rings in shared memory. Two "
    "consumers of four warps each read the rings, exchange dS, and write the part of dQ to shared "
    "memory. An adder of one warp has the copy engine add the part to the sums, reads from one "
    "counter whether it is its turn, and writes to another what is done.",
    machine,
    height=4.4,
)

# %%

# Folded: Why no second program fits, and from where the matmuls read
lab.together(
    held_table,
    lab.table(
        [{"matmul": one, "left operand from": where} for one, where in operands],
        "Five matmuls; the right operand of each is in shared memory",
    ),
)

# %%
# One step, wait by wait
# ----------------------
#
# The matmul units should run all the time, although the five matmuls of a step depend on one
# another's results. A consumer therefore only *issues* a matmul, and then turns to work that does
# not need the result. It waits eight times: for the loader (1, 2), for its own matmuls (3, 4, 6,
# 8), for the other consumer (5) and for the adder (7):
#
# .. image:: /figures/attention-backward-step.svg
#    :alt: One step of consumer 0, and its eight waits. It waits for Q (1) and issues S, for dO (2)
#          and issues dP, for S (3) and makes P, for dP (4) and makes dS. It issues dV, stores dS,
#          meets consumer 1 (5), and issues the part and dK. It waits for the part and dV (6), then
#          for the buffer (7), and stores its part while dK runs. At last it waits for dK (8).
#
# **Why rows are keys.** A Hopper matmul reads its *right* operand from shared memory, but its
# *left* one may also be in registers. With the *transposed* scores :math:`K Q^\top`, and
# :math:`V dO^\top`, the weights :math:`P^\top` and :math:`dS^\top` are left operands of the matmuls
# for :math:`dV` and :math:`dK`, so they can stay in the registers where they were computed. Only
# the part of :math:`dQ` needs :math:`dS` the other way round, and a matmul can transpose only what
# it reads from shared memory, so dS is stored there.
#
# **Waits 1 to 3: make P while dP runs.** In step ``i`` of the fast kernel, a consumer combines the
# queries ``q`` and their gradients ``do`` with its own 64 keys ``k`` and values ``v``:
#
# .. code-block:: python
#
#    slot, parity = i % STAGES, (i // STAGES) & 1
#    q, do = q_s.index(slot), do_s.index(slot)
#    mbarrier.wait(q_full.index(slot), parity)  # wait 1
#    s = warpgroup_mma(k, q.permute([1, 0]), none, use_acc=False, is_async=True)
#    mbarrier.wait(do_full.index(slot), parity)  # wait 2
#    dp = warpgroup_mma(v, do.permute([1, 0]), none, use_acc=False, is_async=True)
#    s = warpgroup_mma_wait(1, deps=[s])  # wait 3
#    lse = lse_s.index(slot).load(query)  # log2(e) times the logsumexp
#    p = exp2(s * scale_log2 - lse[None, :])
#    weights = gl.convert_layout(p.to(dtype), operand, assert_trivial=True)
#    delta = delta_s.index(slot).load(query)
#
# ``warpgroup_mma_wait(1)`` waits until at most one matmul is in flight: S is finished, and dP still
# runs while ``exp2`` computes the weights.
#
# .. dropdown:: Names in the code, and what parity is
#
#    - Names ending in ``_s`` are buffers in shared memory; a ring has ``STAGES`` = 2 slots.
#    - ``ds`` is the :math:`dS^\top` of the formulas; ``ds_t``, further down, is :math:`dS`.
#    - ``parity`` is the number of a barrier's phase modulo 2, since a barrier can only tell an even
#      phase from an odd one: it is 0 at the first use of a slot and 1 at the second.
#      ``(i & 1) ^ 1``, at wait 7, lets the first wait pass at once, because the buffer starts out
#      empty.
#    - ``none`` takes the place of an accumulator, because S and dP start afresh in each step.
#    - ``exp2`` computes powers of 2, so ``scale_log2`` and ``lse`` include a factor
#      :math:`\log_2 e`. A causal mask would set weights to 0 at this point.
#    - ``query`` is the layout of one number per query, not the offsets of queries as in the small
#      kernel; ``operand`` is the layout of a left operand. With ``assert_trivial``, no number may
#      move to another thread.
#    - ``position_of`` and ``announce``, in the code of the adder, are two small functions in
#      :term:`PTX`; a fold there shows them.
#
# **Waits 4 and 5: exchange dS while dV runs.** The two consumers meet at a :term:`named barrier`:
#
# .. code-block:: python
#
#    dp = warpgroup_mma_wait(0, deps=[dp])  # wait 4
#    ds = (p * (dp - delta[None, :])).to(dtype)
#    dv = warpgroup_mma(weights, do, dv, is_async=True)
#    ds_s.index(2 * (i % 2) + ME).store(ds)  # ME is the number of the consumer, 0 or 1
#    fence_async_shared()
#    named_barrier("sync", 9, 256)  # wait 5, at barrier 9, for 256 threads
#
# ``fence_async_shared`` lets matmuls see what threads have stored. ``ds_s`` has tiles for two
# steps, so that a consumer can store the next dS while the other still reads the current one.
#
# **Wait 6: compute the part of dQ.** If each consumer computed the part of its own 64 keys, every
# step would have two parts to add. Instead, each computes half of the columns, for the keys of
# both. The keys and the dS of consumer 0 are ``half = 0``, those of consumer 1 ``half = 1``:


# Drawing
def halves_of_the_part(axes):
    edge = "#59636e"
    fills = ("#eaf2fb", "#fff4e5")  # of consumer 0, and of consumer 1
    boxes = [
        (2.2 * half, 1.1, 2.2, 2.2, "#f6f8fa", f"half = {half}") for half in (0, 1)
    ]
    for me in (0, 1):
        boxes += [
            (5.4 + 2.2 * me, 2.2 * (1 - half), 2.2, 2.2, fills[me], f"half = {half}")
            for half in (0, 1)
        ]
        boxes.append((10.8 + 2.2 * me, 1.1, 2.2, 2.2, fills[me], f"ME = {me}"))
    for left, low, width, height, fill, text in boxes:
        box = Rectangle((left, low), width, height, facecolor=fill, edgecolor=edge)
        axes.add_patch(box)
        write_at(axes, (left + width / 2, low + height / 2), text, 10)
    for at, text in (
        ((4.9, 2.2), "×"),
        ((10.3, 2.2), "="),
        ((2.2, 5.3), "dS: 64 queries,\n128 keys"),
        ((7.6, 5.3), "K: 128 keys,\n128 columns"),
        ((13.0, 5.3), "part: 64 queries,\n128 columns"),
    ):
        write_at(axes, at, text)
    axes.set(xlim=(-0.1, 15.4), ylim=(-0.1, 6.1))
    axes.axis("off")


lab.sketch(
    "Wait 6: the colour shows which consumer computes",
    "dS times K is the part of dQ. Each consumer reads all of dS, and of K only the columns that "
    "it computes of the part, consumer 0 the left and consumer 1 the right ones.",
    halves_of_the_part,
    height=2.4,
)

# %%
# .. code-block:: python
#
#    for half in gl.static_range(2):
#        ds_t = ds_s.index(2 * (i % 2) + half).permute([1, 0])
#        columns = k_s.index(half).slice(ME * 64, 64, dim=1)
#        part = warpgroup_mma(ds_t, columns, part, use_acc=half > 0, is_async=True)
#    ds_operand = gl.convert_layout(ds, operand, assert_trivial=True)
#    dk = warpgroup_mma(ds_operand, q, dk, is_async=True)
#    part, dv = warpgroup_mma_wait(1, deps=[part, dv])  # wait 6
#    mbarrier.arrive(do_empty.index(slot))
#
# Wait 6 leaves only dK in flight. Since dV has finished, the loader may refill the slot of dO.
#
# **Waits 7 and 8: hand the part over while dK runs.** Once the copy engine has read the previous
# part (7), the consumer stores its half of the new one. The step ends when dK is finished (8):
#
# .. code-block:: python
#
#    mbarrier.wait(part_empty.index(ME), (i & 1) ^ 1)  # wait 7
#    parts.index(ME).store(part)
#    fence_async_shared()
#    mbarrier.arrive(part_full.index(ME))
#    dk = warpgroup_mma_wait(0, deps=[dk])  # wait 8
#    mbarrier.arrive(q_empty.index(slot))
#
# .. dropdown:: Why one meeting per step suffices
#
#    A consumer that stores dS in step :math:`t` has met the other one in step :math:`t - 1`. By
#    then, the other had finished the matmuls of step :math:`t - 2`, which read the same tile of
#    ``ds_s``.

# %%
# How the adder keeps the order
# -----------------------------
#
# The proof still holds with roles, because only the *adder* waits for another program. Every other
# wait is for something earlier in the same program, so it ends.
#
# **The adder reports twice.** The consumers can have their buffer back as soon as the copy engine
# has *read* the part, but the next program has to wait until the engine has *completed* the
# addition:


# Drawing
def one_addition(axes):
    edge = "#59636e"
    adds, computes, other = "#fff4e5", "#eaf2fb", "#f6f8fa"
    for left, low, width, fill, text in (
        (-2.4, 0, 1.9, other, "previous\nprogram"),
        (-2.4, 2, 1.9, adds, "adder\nits turn?"),
        (0, 4, 9.9, computes, "consumers"),
        (0, 2, 1.7, adds, "adder\ntma_add"),
        (3.0, 2, 2.1, adds, "adder\nstore_wait"),
        (6.6, 2, 2.1, adds, "adder\nannounce"),
        (1.1, 0, 2.6, other, "engine reads\nthe part"),
        (3.7, 0, 3.4, other, "engine adds it\nto the sums"),
        (7.7, 0, 2.2, other, "next\nprogram"),
    ):
        height = 0.7 if text == "consumers" else 1.1
        box = Rectangle((left, low), width, height, facecolor=fill, edgecolor=edge)
        axes.add_patch(box)
        write_at(axes, (left + width / 2, low + height / 2), text, 10.5)
    for begin, end, text, at in (
        ((-1.9, 1.1), (-1.9, 1.95), "counter", (-1.75, 1.55)),
        ((-0.5, 2.55), (-0.05, 2.55), "", (0, 0)),
        ((0.8, 4), (0.8, 3.15), "part_full", (1.0, 3.55)),
        ((1.4, 2), (1.4, 1.15), "asks", (0.3, 1.55)),
        ((3.7, 1.1), (3.7, 1.95), "", (0, 0)),
        ((4.1, 3.1), (4.1, 3.95), "part_empty", (4.3, 3.55)),
        ((7.0, 1.1), (7.0, 1.95), "", (0, 0)),
        ((8.3, 2), (8.3, 1.15), "counter", (8.45, 1.55)),
    ):
        arrow = {"arrowstyle": "->", "color": edge}
        axes.annotate("", xy=end, xytext=begin, arrowprops=arrow)
        axes.text(*at, text, ha="left", va="center", fontsize=10.5, color=edge)
    for x, text in ((3.6, "has read"), (6.85, "completed")):
        axes.text(x, 1.55, text, ha="right", va="center", fontsize=10.5, color=edge)
    axes.text(3.75, -0.5, "time →, not to scale", ha="center", va="center", color=edge)
    axes.set(xlim=(-2.5, 10), ylim=(-0.8, 4.8))
    axes.axis("off")


lab.sketch(
    "One addition: what the adder reports, and when",
    "The previous program's counter tells the adder that it is its turn. The consumers report that "
    "the part is full, and the adder asks the copy engine to add it. When the engine has read the "
    "part, the adder gives the buffer back. When the addition is complete, which is later, it "
    "tells the next program through its own counter.",
    one_addition,
    height=2.9,
)

# %%
# .. code-block:: python
#
#    position = 0  # how far the predecessor is known to be
#    for i in range(steps):
#        row = row_of_head + (n_tiles - 1 - i) * BLOCK_M
#        if start_n > 0:  # these keys are not the first of a head
#            while position < i + 1:
#                position = position_of(counter_ptr - 1)  # the predecessor's counter
#        for half in gl.static_range(2):
#            mbarrier.wait(part_full.index(half), i & 1)
#        for half in gl.static_range(2):
#            tma_add(sums_desc, [row, half * 64], parts.index(half))
#        tma.store_wait(0)
#        for half in gl.static_range(2):
#            mbarrier.arrive(part_empty.index(half))
#        announce(counter_ptr, i + 1)
#
# ``tma.store_wait(0)`` waits for the reading alone, and ``announce`` for the additions, before it
# writes the counter. This takes four instructions of PTX, because Triton's atomics order what
# threads store, but not what the copy engine adds.
#
# After the sweep, a small kernel multiplies the float32 sums by the scale and writes :math:`dQ` in
# 16 bits; all timings include it.
#
# .. dropdown:: The four instructions, and those of the reader
#
#    .. literalinclude:: /../src/kernelbook/ops/hopper/backward.py
#       :pyobject: announce
#
#    ``$1`` is the address of the counter, ``$2`` is ``position``, and ``$0`` is a result that
#    Triton requires.
#
#    1. ``cp.async.bulk.wait_group 0`` waits until the engine has *completed* the additions.
#    2. ``fence.proxy.async.global`` orders what the engine did before what the thread does next.
#    3. ``bar.warp.sync`` holds back the other lanes of the warp, because only the lane that issued
#       the additions has waited for them.
#    4. ``st.release.gpu`` writes the counter.
#
#    The reader does the same in reverse:
#
#    .. literalinclude:: /../src/kernelbook/ops/hopper/backward.py
#       :pyobject: position_of
#
#    ``ld.acquire.gpu`` is the counterpart of the release. ``redux.sync.min`` gives all 32 lanes the
#    smallest count that any of them read, and the fence orders what they saw before the additions
#    that this program's engine performs next.

# Whole: each change of the ladder below is a switch
import triton
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

BLOCK_M = gl.constexpr(64)  # queries in a tile
STAGES = gl.constexpr(2)  # tiles of queries, and as many of gradients
COLUMNS = gl.constexpr(128)  # head_dim
EVENTS = gl.constexpr(6)


@gluon.jit
def _stamp(trace_ptr, traced, role, i, event, TRACE: gl.constexpr):
    """Note the cycle of the SM at which a role of the traced program came to an event."""
    if TRACE:
        now = gl.inline_asm_elementwise(
            "mov.u32 $0, %clock;", "=r,r", [gl.to_tensor(0)], dtype=gl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip
        mine = gl.program_id(0) == traced[0]
        gl.store(trace_ptr + (role * traced[1] + i) * EVENTS + event, now, mask=mine)


@gluon.jit
def _loader(descs, buffers, barriers, walk):
    q_desc, k_desc, v_desc, do_desc, stats_desc = descs
    q_s, do_s, lse_s, delta_s, k_s, v_s, _, _ = buffers
    kv_full, q_full, q_empty, do_full, do_empty, _, _ = barriers
    start_n, row_of_head, n_tiles, steps, all_rows = walk
    mbarrier.expect(
        kv_full, 2 * k_desc.block_type.nbytes + 2 * v_desc.block_type.nbytes
    )
    for half in gl.static_range(2):
        row = row_of_head + start_n + half * ROWS
        tma_load(k_desc, [row, 0], kv_full, k_s.index(half))
        tma_load(v_desc, [row, 0], kv_full, v_s.index(half))
    nbytes: gl.constexpr = q_desc.block_type.nbytes + stats_desc.block_type.nbytes
    for i in range(steps):
        slot, parity = i % STAGES, (i // STAGES) & 1
        row = row_of_head + (n_tiles - 1 - i) * BLOCK_M
        mbarrier.wait(q_empty.index(slot), parity ^ 1)
        mbarrier.expect(q_full.index(slot), nbytes)
        tma_load(q_desc, [row, 0], q_full.index(slot), q_s.index(slot))
        tma_load(stats_desc, [row], q_full.index(slot), lse_s.index(slot))
        mbarrier.wait(do_empty.index(slot), parity ^ 1)
        mbarrier.expect(do_full.index(slot), nbytes)
        tma_load(do_desc, [row, 0], do_full.index(slot), do_s.index(slot))
        tma_load(stats_desc, [all_rows + row], do_full.index(slot), delta_s.index(slot))


@gluon.jit
def _adder(
    adding, trace_ptr, traced,
    IN_ORDER: gl.constexpr, TRACE: gl.constexpr,
):  # fmt: skip
    sums_desc, counter_ptr, buffers, barriers, walk = adding
    parts = buffers[7]
    part_full, part_empty = barriers[5], barriers[6]
    start_n, row_of_head, n_tiles, steps, _ = walk
    position = 0  # how far the program of the keys before is known to be
    for i in range(steps):
        row = row_of_head + (n_tiles - 1 - i) * BLOCK_M
        _stamp(trace_ptr, traced, 2, i, 0, TRACE)
        # -- wait: in a fixed order for the program of the keys before
        if IN_ORDER:  # noqa: SIM102 (only the second is asked on the GPU)
            if start_n > 0:
                while position < i + 1:
                    position = position_of(counter_ptr - 1)
        _stamp(trace_ptr, traced, 2, i, 1, TRACE)
        for half in gl.static_range(2):
            mbarrier.wait(part_full.index(half), i & 1)
        _stamp(trace_ptr, traced, 2, i, 2, TRACE)
        # -- add: what both consumers have handed over
        for half in gl.static_range(2):
            tma_add(sums_desc, [row, half * (COLUMNS // 2)], parts.index(half))
        # -- go on: the consumers, and the program of the next keys
        tma.store_wait(0)
        for half in gl.static_range(2):
            mbarrier.arrive(part_empty.index(half))
        if IN_ORDER:
            announce(counter_ptr, i + 1)
        _stamp(trace_ptr, traced, 2, i, 3, TRACE)


@gluon.jit
def _consumer(
    computing, trace_ptr, traced,
    ME: gl.constexpr, IS_CAUSAL: gl.constexpr, OVERLAP: gl.constexpr,
    HALVES: gl.constexpr, ADDER: gl.constexpr, TRACE: gl.constexpr,
):  # fmt: skip
    dk_desc, dv_desc, sums_desc, buffers, barriers, walk, sm_scale = computing
    q_s, do_s, lse_s, delta_s, k_s, v_s, ds_s, parts = buffers
    kv_full, q_full, q_empty, do_full, do_empty, part_full, part_empty = barriers
    start_n, row_of_head, n_tiles, steps, _ = walk
    PART: gl.constexpr = COLUMNS // 2 if HALVES else COLUMNS
    score_layout: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, 1], [16, BLOCK_M, 16]
    )
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, 1], [16, COLUMNS, 16]
    )
    part_layout: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, 1], [16, PART, 16]
    )
    key: gl.constexpr = gl.SliceLayout(1, score_layout)
    query: gl.constexpr = gl.SliceLayout(0, score_layout)
    operand: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 2)
    dtype: gl.constexpr = dk_desc.dtype
    scale_log2 = sm_scale * LOG2E
    own_n = start_n + ME * ROWS
    k, v = k_s.index(ME), v_s.index(ME)
    none = gl.zeros([ROWS, BLOCK_M], gl.float32, score_layout)
    part = gl.zeros([BLOCK_M, PART], gl.float32, part_layout)
    dk = gl.zeros([ROWS, COLUMNS], gl.float32, acc_layout)
    dv = gl.zeros([ROWS, COLUMNS], gl.float32, acc_layout)
    mbarrier.wait(kv_full, 0)

    for i in range(steps):
        slot, parity = i % STAGES, (i // STAGES) & 1
        start_m = (n_tiles - 1 - i) * BLOCK_M
        q, do = q_s.index(slot), do_s.index(slot)
        # -- issue: the scores, and behind them dP
        _stamp(trace_ptr, traced, ME, i, 0, TRACE)
        mbarrier.wait(q_full.index(slot), parity)
        s = warpgroup_mma(k, q.permute([1, 0]), none, use_acc=False, is_async=True)
        if OVERLAP:
            mbarrier.wait(do_full.index(slot), parity)
            dp = warpgroup_mma(
                v, do.permute([1, 0]), none, use_acc=False, is_async=True
            )
            s = warpgroup_mma_wait(1, deps=[s])
        else:
            s = warpgroup_mma_wait(0, deps=[s])
        _stamp(trace_ptr, traced, ME, i, 1, TRACE)
        # -- weigh: while dP is computed
        lse = lse_s.index(slot).load(query)
        p = exp2(s * scale_log2 - lse[None, :])
        if IS_CAUSAL:  # noqa: SIM102 (only the second is asked on the GPU)
            if start_m < own_n + ROWS - 1:
                keys = own_n + gl.arange(0, ROWS, key)
                p = keep_seen(p, keys - start_m, keys, False)
        if not OVERLAP:
            mbarrier.wait(do_full.index(slot), parity)
            dp = warpgroup_mma(
                v, do.permute([1, 0]), none, use_acc=False, is_async=True
            )
        weights = gl.convert_layout(p.to(dtype), operand, assert_trivial=True)
        delta = delta_s.index(slot).load(query)
        dp = warpgroup_mma_wait(0, deps=[dp])
        ds = (p * (dp - delta[None, :])).to(dtype)
        _stamp(trace_ptr, traced, ME, i, 2, TRACE)
        # -- hand dS over: while dv is computed
        dv = warpgroup_mma(weights, do, dv, is_async=True)
        if not OVERLAP:
            dv = warpgroup_mma_wait(0, deps=[dv])
        ds_s.index(2 * (i % 2) + ME).store(ds)
        fence_async_shared()
        if HALVES:
            named_barrier("sync", 9, 256)  # both consumers
        else:
            named_barrier("sync", 10 + ME, 128)  # the warps of this one
        _stamp(trace_ptr, traced, ME, i, 3, TRACE)
        # -- part of dq: half of the columns, of the keys of both
        if HALVES:
            for half in gl.static_range(2):
                ds_t = ds_s.index(2 * (i % 2) + half).permute([1, 0])
                columns = k_s.index(half).slice(ME * PART, PART, dim=1)
                part = warpgroup_mma(
                    ds_t, columns, part, use_acc=half > 0, is_async=True
                )
        else:  # all columns, of its own keys
            ds_t = ds_s.index(2 * (i % 2) + ME).permute([1, 0])
            part = warpgroup_mma(ds_t, k, part, use_acc=False, is_async=True)
        if not OVERLAP:
            part = warpgroup_mma_wait(0, deps=[part])
        # -- hand the part over: while dk is computed
        ds_operand = gl.convert_layout(ds, operand, assert_trivial=True)
        dk = warpgroup_mma(ds_operand, q, dk, is_async=True)
        if OVERLAP:
            part, dv = warpgroup_mma_wait(1, deps=[part, dv])
        else:
            dk = warpgroup_mma_wait(0, deps=[dk])
        mbarrier.arrive(do_empty.index(slot))
        _stamp(trace_ptr, traced, ME, i, 4, TRACE)
        if ADDER:
            mbarrier.wait(part_empty.index(ME), (i & 1) ^ 1)
        else:
            tma.store_wait(0)
        parts.index(ME).store(part)
        fence_async_shared()
        if ADDER:
            mbarrier.arrive(part_full.index(ME))
        else:
            column = ME * PART if HALVES else 0
            tma_add(sums_desc, [row_of_head + start_m, column], parts.index(ME))
        _stamp(trace_ptr, traced, ME, i, 5, TRACE)
        dk = warpgroup_mma_wait(0, deps=[dk])
        mbarrier.arrive(q_empty.index(slot))

    # -- write: dk and dv, where keys and values were
    named_barrier("sync", 9, 256)
    k.store((dk * sm_scale).to(dtype))
    v.store(dv.to(dtype))
    fence_async_shared()
    tma_store(dk_desc, [row_of_head + own_n, 0], k)
    tma_store(dv_desc, [row_of_head + own_n, 0], v)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["seqlen", "heads", "heads_at_once", "pid", "n_traced"])
def _one_sweep_kernel(
    q_desc, k_desc, v_desc, do_desc, stats_desc, dk_desc, dv_desc, sums_desc,
    counter_ptr, trace_ptr, heads, seqlen, sm_scale, heads_at_once, pid, n_traced,
    IS_CAUSAL: gl.constexpr, OVERLAP: gl.constexpr, HALVES: gl.constexpr,
    ADDER: gl.constexpr, IN_ORDER: gl.constexpr, TRACE: gl.constexpr,
):  # fmt: skip
    # -- place: these keys of a head, and the queries that see them
    tile, head = place(seqlen // 128, heads, heads_at_once)
    start_n = tile * 128
    n_tiles = seqlen // BLOCK_M
    steps = n_tiles
    if IS_CAUSAL:
        steps = n_tiles - start_n // BLOCK_M
    counter_ptr += head * (seqlen // 128) + tile

    # -- share
    dtype: gl.constexpr = q_desc.dtype
    PART: gl.constexpr = COLUMNS // 2 if HALVES else COLUMNS
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    tile_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(
        [64, COLUMNS], dtype
    )
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(
        [ROWS, BLOCK_M], dtype
    )
    part_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(
        [BLOCK_M, PART], gl.float32
    )
    row_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(
        [BLOCK_M], gl.float32
    )
    ring: gl.constexpr = [STAGES, BLOCK_M, COLUMNS]
    q_s = gl.allocate_shared_memory(dtype, ring, tile_layout)
    do_s = gl.allocate_shared_memory(dtype, ring, tile_layout)
    lse_s = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], row_layout)
    delta_s = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], row_layout)
    k_s = gl.allocate_shared_memory(dtype, [2, ROWS, COLUMNS], tile_layout)
    v_s = gl.allocate_shared_memory(dtype, [2, ROWS, COLUMNS], tile_layout)
    ds_s = gl.allocate_shared_memory(dtype, [4, ROWS, BLOCK_M], ds_layout)
    parts = gl.allocate_shared_memory(gl.float32, [2, BLOCK_M, PART], part_layout)
    kv_full = gl.allocate_shared_memory(gl.int64, [1], bar)
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    q_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    do_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    do_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    part_full = gl.allocate_shared_memory(gl.int64, [2, 1], bar)
    part_empty = gl.allocate_shared_memory(gl.int64, [2, 1], bar)
    mbarrier.init(kv_full, count=1)
    for b in gl.static_range(STAGES):
        mbarrier.init(q_full.index(b), count=1)
        mbarrier.init(q_empty.index(b), count=2)
        mbarrier.init(do_full.index(b), count=1)
        mbarrier.init(do_empty.index(b), count=2)
    for b in gl.static_range(2):
        mbarrier.init(part_full.index(b), count=1)
        mbarrier.init(part_empty.index(b), count=1)

    # -- roles: two consumers, a loader, and perhaps an adder
    buffers = (q_s, do_s, lse_s, delta_s, k_s, v_s, ds_s, parts)
    barriers = (kv_full, q_full, q_empty, do_full, do_empty, part_full, part_empty)
    walk = (start_n, head * seqlen, n_tiles, steps, heads * seqlen)
    traced = (pid, n_traced)
    descs = (q_desc, k_desc, v_desc, do_desc, stats_desc)
    ME_0: gl.constexpr = 0
    ME_1: gl.constexpr = 1
    computing = (dk_desc, dv_desc, sums_desc, buffers, barriers, walk, sm_scale)
    if ADDER:
        adding = (sums_desc, counter_ptr, buffers, barriers, walk)
        gl.warp_specialize(
            [
                (
                    _consumer,
                    (
                        computing, trace_ptr, traced, ME_0,
                        IS_CAUSAL, OVERLAP, HALVES, ADDER, TRACE,
                    ),
                ),
                (
                    _consumer,
                    (
                        computing, trace_ptr, traced, ME_1,
                        IS_CAUSAL, OVERLAP, HALVES, ADDER, TRACE,
                    ),
                ),
                (_loader, (descs, buffers, barriers, walk)),
                (_adder, (adding, trace_ptr, traced, IN_ORDER, TRACE)),
            ],
            [4, 1, 1],
            [240, 24, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (
                    _consumer,
                    (
                        computing, trace_ptr, traced, ME_0,
                        IS_CAUSAL, OVERLAP, HALVES, ADDER, TRACE,
                    ),
                ),
                (
                    _consumer,
                    (
                        computing, trace_ptr, traced, ME_1,
                        IS_CAUSAL, OVERLAP, HALVES, ADDER, TRACE,
                    ),
                ),
                (_loader, (descs, buffers, barriers, walk)),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip


# %%

# Measuring
LADDER = {
    "one sweep with roles": {
        "OVERLAP": False, "HALVES": False, "ADDER": False, "IN_ORDER": False,
    },
    "half the columns": {"HALVES": True},
    "overlap": {"OVERLAP": True},
    "an adder": {"ADDER": True},
    "a fixed order": {"IN_ORDER": True},
    "heads apart": {"heads": 4},
}  # fmt: skip

VERSIONS, so_far = {}, {}
for name, change in LADDER.items():
    VERSIONS[name] = so_far = so_far | change
HOPPER = runtime.capability(runtime.DEVICE) == (9, 0)
NEEDS_HOPPER = lab.Absent("it needs a GPU of compute capability 9.0, which is Hopper")


def described(x, rows, columns, kind=gl.bfloat16):
    """A descriptor of all heads, one below the other, in tiles of so many rows."""
    layout = gl.NVMMASharedLayout.get_default_for([rows, columns], kind)
    return TensorDescriptor.from_tensor(
        x.view(-1, x.shape[-1]), [rows, columns], layout
    )


def described_rows(stats):
    layout = gl.NVMMASharedLayout.get_default_for([BLOCK_M.value], gl.float32)
    return TensorDescriptor.from_tensor(stats.view(-1), [BLOCK_M.value], layout)


def heads_at_once(q, k, is_causal, in_order, heads=1):
    """Between how many heads tiles alternate."""
    config = replace(choice.CONFIGS[128], heads=heads)
    right = 0 if is_causal else None
    return hopper._heads_at_once(
        config, q.device, q.itemsize, q.shape, k.shape, None, right, in_order
    )


def run(q, k, v, out, lse, do, is_causal, trace=None, traced=0, heads=1, **options):
    batch, n_heads, seqlen, head_dim = q.shape
    all_heads, scale = batch * n_heads, head_dim**-0.5
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    stats = plain.statistics(out, lse, do, None)
    sums = torch.zeros(q.shape, device=q.device, dtype=torch.float32)
    programs = all_heads * seqlen // 128
    counter = torch.zeros(programs, device=q.device, dtype=torch.int32)
    at_once = heads_at_once(q, k, is_causal, options["IN_ORDER"], heads)
    tiles = [described(x, 64, 128) for x in (q, k, v, do, dk, dv)]
    part = described(sums, 64, 64 if options["HALVES"] else 128, gl.float32)
    _one_sweep_kernel[(programs,)](
        *tiles[:4], described_rows(stats), *tiles[4:], part, counter,
        counter if trace is None else trace, all_heads, seqlen, scale, at_once, traced,
        seqlen // BLOCK_M.value, IS_CAUSAL=is_causal, TRACE=trace is not None,
        num_warps=4, **options,
    )  # fmt: skip
    hopper._scale_launch(dq.device, dq.dtype, dq.shape, seqlen, dq.stride(), scale)(
        sums, dq
    )
    return dq, dk, dv


def forward_of(q, k, v, is_causal, window=None):
    """out and lse, which the backward pass is given."""
    return attention_forward(q, k, v, is_causal, q.shape[3] ** -0.5, window)


def in_plain_triton(inputs, is_causal, deterministic):
    """The whole backward pass in plain Triton: two sweeps if deterministic, otherwise one."""
    q, k, v, do = inputs
    out, lse = forward_of(q, k, v, is_causal)
    scale = q.shape[3] ** -0.5
    return partial(
        plain.attention_backward, q, k, v, out, lse, do, is_causal, scale, deterministic
    )


def in_gluon(inputs, is_causal, deterministic, window=None, config=None):
    """The whole backward pass by the package's Gluon kernel."""
    q, k, v, do = inputs
    out, lse = forward_of(q, k, v, is_causal, window)
    return partial(
        hopper.attention_backward, q, k, v, out, lse, do, is_causal, q.shape[3] ** -0.5,
        deterministic, None, window, config=config,
    )  # fmt: skip


def ladder_providers(seqlen, batch, heads, head_dim, mask, causal, dtype):
    is_causal = mask == "causal"
    inputs = drawn((batch, heads, heads, seqlen, seqlen, head_dim), dtype)
    q, k, v, do = inputs
    out, lse = forward_of(q, k, v, is_causal)
    ours = {
        name: partial(run, q, k, v, out, lse, do, is_causal, **options)
        for name, options in VERSIONS.items()
    }
    ours["Kernel Book"] = in_gluon(inputs, is_causal, True)
    ours = {
        name: lab.tried(version, name) if HOPPER else NEEDS_HOPPER
        for name, version in ours.items()
    }
    two_and_one = {
        "two sweeps": in_plain_triton(inputs, is_causal, True),
        "one sweep, plain Triton": in_plain_triton(inputs, is_causal, False),
    }
    return {"matmul": matmul()} | two_and_one | ours


steps = lab.bench("ladder", points([4096], (128,)), ladder_providers, **BACKWARD)
running = [name for name in VERSIONS if name not in steps.skipped]


def worst_of_each():
    """One row for each version, of which all cases have to pass."""
    found = []
    for name in running:
        rows = []
        for is_causal in (False, True):
            for length in (128, 384, 1152):
                q, k, v, do = drawn((1, 8, 8, length, length, 128), torch.bfloat16)
                out, lse = forward_of(q, k, v, is_causal)
                ours = run(q, k, v, out, lse, do, is_causal, **VERSIONS[name])
                what = f"{name}, {length}{', causal' * is_causal}"
                cases = three_cases(what, ours, q, k, v, do, is_causal)
                rows += [case.row() for case in cases]
        if failed := [row for row in rows if not row["ok"]]:
            raise lab.CheckFailed(f"{len(failed)} of {len(rows)} failed: {failed[0]}")
        worst = max(rows, key=lambda row: row["error"] / row["tolerance"])
        row = {"version": name, "cases": len(rows), "error": worst["error"]}
        row |= {"PyTorch's": worst["torch_error"], "tolerance": worst["tolerance"]}
        found.append(row)
    return found


# %%
# How the gradients were checked
# ------------------------------
#
# The checks ran the package's version of this kernel, which takes any length. On Hopper, in 16
# bits, it is the backward pass of ``attention(q, k, v)`` for most shapes.

# Measuring
dtype = torch.float16 if runtime.INTERPRETED else torch.bfloat16
q, k, v, do = drawn((1, 2, 2, 128, 128, 128), dtype)


def gradients(**options):
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    attention(*leaves, is_causal=True, **options).backward(do)
    return [x.grad for x in leaves]


by_default = gradients()  # backend="auto"
in_two_sweeps = gradients(backend="triton")  # plain Triton, on any GPU
in_any_order = gradients(deterministic=False)  # bits of dq may differ between runs

# %%


# Measuring
def chosen(head_dim, mask, seqlen, deterministic):
    """What the package runs on a Hopper GPU, for 16,384 tokens of 2,048 columns."""
    shape = (16384 // seqlen, 2048 // head_dim, seqlen, head_dim)
    window = (1023, 0) if mask == "window" else None
    config = choice.backward_choice(
        (9, 0), torch.bfloat16, shape, shape, mask == "causal", window, deterministic
    ).config
    if config is None:
        return "two sweeps"
    return "in order" if deterministic or config.ordered else "no order"


LENGTHS = [1024, 4096, 16384]
rows = []
for head_dim in (128, 64):
    for mask in ("full", "causal", "window"):
        for deterministic in (True, False):
            row = {"head_dim": head_dim, "mask": mask}
            row["deterministic"] = str(deterministic)
            row |= {f"{n:,}": chosen(head_dim, mask, n, deterministic) for n in LENGTHS}
            rows.append(row)


# Measuring
MASKS = {"full": (False, None), "causal": (True, None), "window": (False, (70, 40))}
FREE = {hd: replace(config, ordered=False) for hd, config in choice.CONFIGS.items()}


def every_case():
    for head_dim in (64, 128):
        for mask, (is_causal, window) in MASKS.items():
            for n_q, n_k in ((1, 127), (65, 193), (777, 1001)):
                if HOPPER:
                    yield from cases_of_kernel(head_dim, mask, n_q, n_k)
                elif n_q < 777 and window is None:
                    inputs = drawn((2, 2, 2, n_q, n_k, head_dim), torch.float32)
                    ours = one_sweep(*inputs, is_causal)
                    what = f"{n_q} × {n_k}, {head_dim}, {mask}, the sweep in PyTorch"
                    yield from three_cases(what, ours, *inputs, is_causal, factor=8)


def cases_of_kernel(head_dim, mask, n_q, n_k):
    is_causal, window = MASKS[mask]
    for deterministic in (True, False)[: 1 + (mask == "causal")]:
        sizes = (2, 6, 2 if deterministic else 6, n_q, n_k, head_dim)
        inputs = drawn(sizes, torch.bfloat16)
        config = choice.CONFIGS[head_dim] if deterministic else FREE[head_dim]
        ours = in_gluon(inputs, is_causal, deterministic, window, config)()
        what = f"{sizes}, {mask}{', no order' * (not deterministic)}"
        yield from three_cases(what, ours, *inputs, is_causal, window)


# %%

# Measuring
right = lab.check(
    "The package's kernel", every_case(), stand_in="with PyTorch's sweep in its place"
)

# %%


# Measuring
LAUNCHES = 1000


def repeated():
    rows = []
    inputs = drawn((2, 8, 8, 1536, 1536, 128), torch.bfloat16)
    other, a = torch.cuda.Stream(), torch.randn(2048, 2048, device=runtime.DEVICE)
    for order, config in (("fixed", choice.CONFIGS[128]), ("as they come", FREE[128])):
        for is_causal in (False, True):
            in_order = order == "fixed"
            launch = in_gluon(inputs, is_causal, in_order, None, config)
            first, differ = launch(), torch.zeros(3, device=runtime.DEVICE)
            for number in range(LAUNCHES):
                if number % 8 == 0:
                    with torch.cuda.stream(other):
                        a @ a
                again = launch()
                pairs = zip(first, again, strict=True)
                differ += torch.stack([(x != y).any() for x, y in pairs])
            row = {"order": order, "mask": "causal" if is_causal else "full"}
            row |= {"launches": LAUNCHES}
            dq, dk, dv = differ.int().tolist()
            if dk + dv + in_order * dq:
                raise lab.CheckFailed(f"Other bits in {dq}, {dk}, {dv} launches: {row}")
            row |= {"dq differs": dq, "dk differs": dk, "dv differs": dv}
            rows.append(row)
    return rows


again = lab.attempt(
    "One input, again and again, beside other work",
    repeated if HOPPER else NEEDS_HOPPER,
)


def soak(at_most=10_000, seconds=25):
    generator = torch.Generator().manual_seed(0)
    begin, shapes, most, worst, number = time.time(), set(), 0, 0.0, 0
    while number < at_most and time.time() - begin < seconds:
        # odd, so that few kernels are compiled; all else is drawn
        n_q, n_k = (2 * torch.randint(1, 900, (2,), generator=generator) + 1).tolist()
        head_dim, is_causal = (64, 128)[number % 2], bool(number // 2 % 2)
        inputs = drawn((2, 6, 2, n_q, n_k, head_dim), torch.bfloat16)
        config = choice.CONFIGS[head_dim]
        ours = in_gluon(inputs, is_causal, True, config=config)()
        shapes.add((n_q, n_k, head_dim, is_causal))
        most = max(most, n_q, n_k)
        if number % 10 == 0:
            theirs = in_plain_triton(inputs, is_causal, True)()
            for x, y in zip(ours, theirs, strict=True):
                off = (x.float() - y.float()).norm() / y.float().norm().clamp_min(1)
                worst = max(worst, off.item())
        number += 1
    torch.cuda.synchronize()
    if not worst < 0.01:
        raise lab.CheckFailed(f"{worst:.3f} from plain Triton in the soak test.")
    row = {"launches": number, "shapes": len(shapes), "longest": most}
    return [row | {"finished": number, "seconds": round(time.time() - begin, 1)}]


soaked = lab.attempt("Launches of random shapes", soak if HOPPER else NEEDS_HOPPER)

# %%

# Reading
found = {(row["order"], row["mask"]): row for row in again.rows}
of_free = [
    found.get(("as they come", mask), {}).get("dq differs", nan)
    for mask in ("full", "causal")
]
if not again.rows:
    steps.rate("an adder", mask="full")  # says why numbers are missing
launched = again.rows[0]["launches"] if again.rows else nan
in_fixed = [row["launches"] for row in again.rows if row["order"] == "fixed"]
ended = soaked.rows[0]["finished"] if soaked.rows else nan
said = right.plain.split("\n")[0].partition(": ")[2].split(";")[0].rstrip(".")
lab.read(
    f"**In a fixed order, no bit differed** in {sum(in_fixed) if in_fixed else nan:,.0f} launches "
    "of one input. Without an order, "
    + (
        "`dq` differed in every launch"
        if set(of_free) == {launched}
        else f"`dq` differed in {of_free[0]:,.0f} launches without a mask and in "
        f"{of_free[1]:,.0f} with a causal one"
    )
    + "; `dk` and `dv` never did, because only one program adds to each."
)

# %%

# Reading
lab.read(
    "**The gradients are right:** against float64, over odd lengths, grouped heads, causal masks "
    f"and windows, {said}."
)

# %%

# Folded: Which kernel runs when, and every check
lab.together(
    lab.table(rows, "What attention(...).backward runs on a Hopper GPU, by length"),
    lab.read(
        "Two sweeps also run on other GPUs, and where not all three gradients are requested. "
        '`backend="triton"` asks for two sweeps; `backend="gluon"` insists on Gluon, and raises an '
        "error where that cannot run. Plain Triton's single sweep runs only with "
        '`deterministic=False` together with `backend="triton"`, because it is slower than two '
        "sweeps."
    ),
    lab.read(
        "The kernel is in `src/kernelbook/ops/hopper/backward.py`. It was run under Triton 3.6 and "
        "3.9; under 3.7 and 3.8 it compiles but was not run."
    ),
    lab.check(
        "The public call",
        [
            case
            for what, found in (
                ("by default", by_default),
                ("backend='triton'", in_two_sweeps),
                ("deterministic=False", in_any_order),
            )
            for case in three_cases(what, found, q, k, v, do, True)
        ],
    ),
    right,
    again,
    soaked,
    lab.read(
        "**The same bits.** One input was launched again and again, with and without a mask, and "
        "every launch was compared with the first. Other work ran beside it, so that programs "
        "would start at different times."
    ),
    lab.read(
        f"**Every launch ended.** All {ended:,.0f} launches of random shapes in a fixed order "
        "ended. Every tenth was compared with plain Triton, and all agreed."
    ),
    lab.read(
        "**Races.** In runs that no record holds, NVIDIA's compute-sanitizer found no access out "
        "of bounds in these kernels. Its search for races cannot judge warps with roles: it missed "
        "a race between two roles that we had planted, and reported one where an mbarrier orders "
        "the exchange."
    ),
)

# %%
# What each change is worth
# -------------------------
#
# The *ladder* begins with “one sweep with roles”, in which the consumers themselves ask for the
# additions. Each *rung* adds what stands under its name, and next to its bar is the gain over the
# rung above; ±0 is less than 2 %.
#
# :doc:`/chapters/attention_backward` explains the top two kernels, and why one sweep loses there.
# Two sweeps, too, are credited with only five matmuls, so a longer bar means a shorter time.

# Measuring
SCATTER = 0.02  # of one kernel that the page times twice: the section on speed has it
NO_DIFFERENCE = "makes no difference"


def verdict(change):
    """What a change of the speed is called, if it is more than scatter."""
    if change != change:
        return f"{nan}"
    if abs(change) < SCATTER:
        return NO_DIFFERENCE
    return f"is {100 * abs(change):.0f} % {'faster' if change > 0 else 'slower'}"


def gain(name, mask, before):
    return steps.rate(name, mask=mask) / steps.rate(before, mask=mask) - 1


def before(name):
    """The rung before."""
    names = ["two sweeps", *LADDER]
    return names[names.index(name) - 1]


def told(name, than=None):
    """How much faster a rung is than the one before, or than another, in words."""
    causal, full = (
        verdict(gain(name, mask, than or before(name))) for mask in ("causal", "full")
    )
    if causal == full:
        return f"{full}, with or without a mask"
    if causal.startswith("is "):
        full = full.removeprefix("is ")
    return f"{causal} under a causal mask and {full} in full attention"


# Measuring
TIMES = (1, 2, 4, 8)


def heads_providers(seqlen, batch, heads, head_dim, mask, causal, dtype):
    inputs = drawn((batch, heads, heads, seqlen, seqlen, head_dim), dtype)
    ours = {}
    for times in TIMES:
        config = replace(choice.CONFIGS[head_dim], heads=times)
        launch = in_gluon(inputs, mask == "causal", True, config=config)
        name = f"heads × {times}"
        ours[name] = lab.tried(launch, name) if HOPPER else NEEDS_HOPPER
    return {"matmul": matmul()} | ours


by_heads = lab.bench(
    "heads",
    [p for p in points([4096, 16384], (128,)) if p["mask"] == "causal"],
    heads_providers,
    **BACKWARD,
)

# %%


# Measuring
POINTS = ("begins", "scores", "dS", "met", "matmuls", "handed over")
OF_ADDER = ("asks", "its turn", "has parts", "added")
N_TRACED = 4096 // 128  # tiles of keys of a head


def traced_run(inputs, is_causal, options, pid=None):
    """The stamps of a program, (roles, steps, events): in the middle of a head, or one named."""
    q, k, v, do = inputs
    out, lse = forward_of(q, k, v, is_causal)
    n_heads = q.shape[0] * q.shape[1]
    at_once = heads_at_once(
        q, k, is_causal, options["IN_ORDER"], options.get("heads", 1)
    )
    if pid is None:  # of a head that starts later
        later = at_once if 2 * at_once <= n_heads else 0
        pid = later * N_TRACED + N_TRACED // 2 * at_once
    tile = tile_of(pid, n_heads, at_once)
    n_steps = 4096 // BLOCK_M.value
    trace = torch.zeros(3, n_steps, EVENTS.value, device=q.device, dtype=torch.int32)
    for _ in range(3):
        run(q, k, v, out, lse, do, is_causal, trace, pid, **options)
    n_steps -= is_causal * tile * 128 // BLOCK_M.value
    return trace[:, :n_steps].tolist()


def tile_of(pid, n_heads, at_once):
    """The tile of keys of a program, as ``place`` counts."""
    first = pid // (N_TRACED * at_once) * at_once
    return pid % (N_TRACED * at_once) // min(n_heads - first, at_once)


def apart(a, b):
    """Cycles from one stamp to another: the counter has 32 bits, and may have begun anew."""
    return (b - a + 2**31) % 2**32 - 2**31


def waits():
    rows = []
    inputs = drawn((4, 16, 16, 4096, 4096, 128), torch.bfloat16)
    pids = range(17, 64 * N_TRACED, 61)  # some of all tiles, from first to last
    for is_causal, heads in ((False, 1), (True, 1), (True, 4)):
        options = VERSIONS["a fixed order"] | {"heads": heads}
        whole, waited, handed = 0, 0, 0
        for pid in pids:
            consumer, _, adder = traced_run(inputs, is_causal, options, pid)
            whole += apart(consumer[0][0], consumer[-1][5])
            waited += sum(apart(step[0], step[1]) for step in adder)
            handed += sum(apart(step[4], step[5]) for step in consumer)
        row = {"mask": "causal" if is_causal else "full", "heads": f"× {heads}"}
        row |= {"cycles of a program": round(whole / len(pids))}
        row |= {"adder waits, %": round(100 * waited / whole, 1)}
        rows.append(row | {"consumer hands over, %": round(100 * handed / whole, 1)})
    return rows


waited = lab.attempt(
    "How long the adder waits for its turn, length 4,096, mean of programs from all tiles",
    waits if HOPPER else NEEDS_HOPPER,
)


def of_waits(column, heads, mask="causal"):
    rows = [r for r in waited.rows if (r["mask"], r["heads"]) == (mask, f"× {heads}")]
    return rows[0].get(column, nan) if rows else nan


# Measuring
TRACED = ["half the columns", "a fixed order"]
SPAN = range(24, 32)  # steps, from the middle of 64


def stamps():
    rows = []
    inputs = drawn((4, 16, 16, 4096, 4096, 128), torch.bfloat16)
    for version in TRACED:
        options = VERSIONS[version]
        found = traced_run(inputs, False, options)
        start = found[0][SPAN[0]][0]
        for role, who in enumerate(("consumer 0", "consumer 1", "adder")):
            if who == "adder" and not options["ADDER"]:
                continue
            names = OF_ADDER if who == "adder" else POINTS
            for i in SPAN:
                at = [apart(start, stamp) for stamp in found[role][i]]
                row = {"version": version, "role": who, "step": i}
                row |= dict.fromkeys((*POINTS, *OF_ADDER))
                rows.append(row | dict(zip(names, at, strict=False)))
    return rows


traced = lab.attempt(
    "Stamps of one program, in cycles of its SM", stamps if HOPPER else NEEDS_HOPPER
)


def mean_steps(stamps_of):
    """Of two rungs, where the cycles of a step go: the mean over programs from all tiles."""
    rows = []
    inputs = drawn((4, 16, 16, 4096, 4096, 128), torch.bfloat16)
    # cycles of the one matmul that is under way after wait 3 or 6
    in_flight = 2 * QUERIES * KEYS * HEAD_DIM // 4096
    names = ("a step", "pause at dS", "pause at the part", "hands over", "turn", "adds")
    for rung in ("an adder", "a fixed order"):
        sums, n_steps = dict.fromkeys(names, 0), 0
        for pid in range(17, 64 * N_TRACED, 61):  # as above
            one, other, adder = stamps_of(inputs, False, VERSIONS[rung], pid)
            for i in range(len(one) - 1):
                begin = one[i][0]
                both = [[apart(begin, x) for x in role[i]] for role in (one, other)]
                after = min(apart(begin, role[i + 1][0]) for role in (one, other))
                at_ds = min(x[2] for x in both) - max(x[1] for x in both) - in_flight
                at_part = after - max(x[4] for x in both) - in_flight
                sums["a step"] += apart(begin, one[i + 1][0])
                sums["pause at dS"] += max(at_ds, 0)
                sums["pause at the part"] += max(at_part, 0)
                sums["hands over"] += both[0][5] - both[0][4]
                sums["turn"] += apart(adder[i][0], adder[i][1])
                sums["adds"] += apart(adder[i][1], adder[i][3])
                n_steps += 1
        means = {name: round(cycles / n_steps) for name, cycles in sums.items()}
        rows.append({"rung": rung, "steps": n_steps} | means)
    return rows


of_all = lab.attempt(
    "Where the cycles of a step go, full, mean of programs from all tiles",
    partial(mean_steps, traced_run) if HOPPER else NEEDS_HOPPER,
)


# %%


# Drawing
APART = {  # for comparison: what is drawn, and what it is
    "two sweeps": ("two sweeps", "plain Triton"),
    "one sweep, plain Triton": ("one sweep, no order", "plain Triton"),
}
WHAT_IS_NEW = {
    "one sweep with roles": "Gluon; consumers ask for additions",
    "half the columns": "one part per step, not two",
    "overlap": "matmuls issued ahead, as above",
    "an adder": "a warp adds, in no fixed order",
    "a fixed order": "turns; all tiles of a head at once",
    "heads apart": "causal: 8 tiles of each head at once",
    "Kernel Book": "any length; sums need no zeroing",
}
PLACES = dict(zip((*APART, *WHAT_IS_NEW), (0, 1, *range(3, 10)), strict=True))
PLACES = {rung: at - 0.5 * (at > 1) for rung, at in PLACES.items()}  # with a gap
MASKS_OF_BARS = ("full", "causal")


def shares_of(rows):
    return {(row["provider"], row["mask"]): 100 * row["share"] for row in rows}


def over_the_rung_above(shares, rung, mask):
    """The gain over the rung above, as it stands behind a bar; the first has none."""
    names = list(WHAT_IS_NEW)
    if rung not in names[1:]:
        return ""
    other = names[names.index(rung) - 1]
    change = shares[rung, mask] / shares.get((other, mask), nan) - 1
    if verdict(change) in (f"{nan}", NO_DIFFERENCE):
        return "" if change != change else "±0"
    return f"{'+' if change > 0 else '−'}{100 * abs(change):.0f} %"


def rungs(axes, rows):
    axes.figure.set_size_inches(5.4, 6.6)
    shares, muted = shares_of(rows), "#59636e"
    strong, weak = {"alpha": 1.0}, {"alpha": 0.5}
    blank = {"color": "#ffffff", "zorder": 0.9}  # behind the pale bars
    for rung, at in PLACES.items():
        name, what = APART.get(rung) or (rung, WHAT_IS_NEW[rung])
        for text, up, look in (
            (name, 1, {"fontsize": 11}),
            (what, -1, {"fontsize": 10, "color": muted}),
        ):
            axes.annotate(
                text, (0, at), (-6, 6.5 * up), textcoords="offset points", ha="right",
                va="center", **look,
            )  # fmt: skip
        ink = lab.colour("Kernel Book" if rung == "Kernel Book" else "matmul")
        for mask, y, look in zip(
            MASKS_OF_BARS, (at - 0.2, at + 0.2), (strong, weak), strict=True
        ):
            if (rung, mask) not in shares:
                axes.text(1, y, "absent", va="center", fontsize=10, color=muted)
                continue
            share = shares[rung, mask]
            axes.barh(y, share, 0.38, **blank)
            axes.barh(y, share, 0.38, color=ink, **look)
            gained = over_the_rung_above(shares, rung, mask)
            axes.text(share + 1, y, f"{share:.0f}", va="center", fontsize=10)
            axes.text(share + 9, y, gained, va="center", fontsize=10, color=muted)
    for mask, look in zip(MASKS_OF_BARS, (strong, weak), strict=True):
        axes.barh(0, 0, color=lab.colour("matmul"), label=mask, **look)
    axes.axvline(100, color=muted, linestyle="--", linewidth=1)
    axes.set(xlim=(0, 102), yticks=[], xlabel="% of the speed of cuBLAS's matmul")
    axes.grid(axis="x", visible=True)
    axes.invert_yaxis()


def rungs_in_words(rows):
    shares = shares_of(rows)
    found = [
        f"{(APART.get(rung) or (rung,))[0]} in {mask} {shares[rung, mask]:.0f}"
        for rung in PLACES
        for mask in MASKS_OF_BARS
        if (rung, mask) in shares
    ]
    return f"Pairs of bars, % of the speed of a matmul: {', '.join(found)}."


lab.draw(
    steps,
    "One sweep, rung by rung: head_dim 128, length 4,096, 64 heads",
    rungs_in_words,
    rungs,
)

# %%

# Reading
cost = [gain("heads apart", mask, "an adder") for mask in ("full", "causal")]
as_simulated = (
    verdict(gain("a fixed order", "full", "an adder")) == NO_DIFFERENCE
    and gain("a fixed order", "causal", "an adder") < -SCATTER
    and gain("heads apart", "causal", "a fixed order") > SCATTER
)
# the sizes of this run, on the 132 SMs of an H200
in_order_of_size = {n: len(simulate(32, 64, 132, True, at_once=n)) for n in (4, 16)}
at_least = least(simulate(32, 64, 132, True, at_once=16))
longer = in_order_of_size[4] / at_least - 1
on_the_rung = (
    "On the rung “a fixed order” all tiles of a head run at once, as in the middle panel of the "
    "simulation, because the 4 · 32 tiles of four heads fit on the 132 SMs. Under a causal mask, "
    "“heads apart” runs tiles of 16 heads at once, as in the lowest panel, and the rungs without "
    "an order run tiles of about as many. "
)
lab.read(
    "**On the ladder, the order costs time only under a causal mask, and only while all tiles of a "
    "head run at once.** “Heads apart” runs tiles of many heads at once, as the rungs without an "
    "order do, and is as fast as “an adder”."
    if as_simulated and min(cost) >= -SCATTER
    else "Compared with “an adder”, “a fixed order” "
    f"{verdict(gain('a fixed order', 'full', 'an adder'))} in full attention and "
    f"{verdict(gain('a fixed order', 'causal', 'an adder'))} under a causal mask. There, compared "
    "with “a fixed order”, “heads apart” "
    f"{verdict(gain('heads apart', 'causal', 'a fixed order'))}."
)

# %%

# Reading
most = all(
    gain("half the columns", mask, before("half the columns"))
    == max(gain(rung, mask, before(rung)) for rung in [*LADDER][1:])
    for mask in ("full", "causal")
)
overlap_pays = all(
    gain("overlap", mask, before("overlap")) > SCATTER for mask in ("full", "causal")
)
lab.read(
    "“Half the columns” "
    + ("brings the largest gain" if most else told("half the columns"))
    + ", with one part per step instead of two, and so half as many bytes to add. “Overlap” "
    + (
        "pays because a consumer no longer waits for each matmul right after issuing it. "
        if overlap_pays
        else f"{told('overlap')}. "
    )
    + f"“An adder” {told('an adder')}; it is there for the next rung, where it waits for turns in "
    "place of the consumers."
)

# %%


# Measuring
def of_heads(times, seqlen, than=1):
    """How so many times as many heads as fill the GPU compare with another number of them."""
    one, other = (
        by_heads.rate(f"heads × {number}", seqlen=seqlen) for number in (times, than)
    )
    return verdict(one / other - 1)


more = by_heads.rate("heads × 8", seqlen=16384) / by_heads.rate(
    "heads × 4", seqlen=16384
)

# %%


# Measuring
def in_time(is_causal, late):
    """The package's kernel at head_dim 64, and whether it reads the statistics late."""
    inputs = drawn((1, 32, 32, 16384, 16384, 64), torch.bfloat16)
    config = replace(choice.CONFIGS[64], late=late)
    return in_gluon(inputs, is_causal, True, config=config)


def late_providers(seqlen, batch, heads, head_dim, mask, causal, dtype):
    ours = {"early": NEEDS_HOPPER, "Kernel Book": NEEDS_HOPPER}
    if HOPPER:
        ours = {
            name: lab.tried(in_time(mask == "causal", late), name)
            for name, late in (("early", False), ("Kernel Book", True))
        }
    return {"matmul": matmul()} | ours


by_reading = lab.bench("late", points([16384], (64,)), late_providers, **BACKWARD)


def spilled():
    rows = []
    for mask in ("full", "causal"):
        for late in (False, True):
            made = dict(lab.compiled_by(in_time(mask == "causal", late)))
            kernel = made["attention_hopper_bwd_kernel"]
            row = {"mask": mask, "statistics": "read late" if late else "read early"}
            rows.append(row | {"spills": kernel.n_spills})
    return rows


spills = lab.attempt(
    "Spilled registers at head_dim 64, tiles of 128 queries",
    spilled if HOPPER else NEEDS_HOPPER,
)


def spills_of(mask, when):
    rows = [r for r in spills.rows if (r["mask"], r["statistics"]) == (mask, when)]
    return rows[0]["spills"] if rows else nan


def change(mask):
    old, new = (by_reading.rate(name, mask=mask) for name in ("early", "Kernel Book"))
    return verdict(new / old - 1)


# %%

# Folded: How long adders wait, more heads, head_dim 64, and every rung against float64
lab.together(
    waited,
    lab.table(
        [
            {"length": f"{seqlen:,}"}
            | {
                f"× {times}": f"{by_heads.rate(f'heads × {times}', seqlen=seqlen):.0f}"
                for times in TIMES
            }
            for seqlen in (4096, 16384)
            if by_heads.rows
        ],
        "TFLOP/s of the package's kernel, causal, by how many times as many heads alternate",
    ),
    lab.read(
        "**Which heads run together.** "
        + on_the_rung
        + "In full attention the adder waits for its turn "
        f"{of_waits('adder waits, %', 1, 'full'):.0f} % of the time on average, and there “a fixed "
        f"order” {verdict(gain('a fixed order', 'full', 'an adder'))} compared with “an adder”."
    ),
    lab.read(
        "**The simulation** of this run has its 64 heads, of which 4 alternate, and 132 SMs, but "
        "no adder, so a simulated program does nothing while it waits. "
        + (
            "It gets the pattern right, but not the size. It predicts that a causal sweep takes "
            f"{100 * longer:.0f} % longer than without waits, whereas the measured loss is "
            f"{-100 * gain('a fixed order', 'causal', 'an adder'):.0f} %."
            if as_simulated
            else ""
        )
    ),
    lab.read(
        "**The last rung** saves the zeroing of the sums, because in a fixed order the first "
        "program of a head can store its parts rather than add them. It also takes any length."
    ),
    lab.read(
        "**Plain Triton's single sweep** is not a rung, because its tiles and operands also differ "
        "from those of the first."
    ),
    lab.read(
        "**More heads.** The package takes ×\u00a04 for both lengths"
        + (", and so misses some speed at 16,384" if more > 1 + SCATTER else "")
        + f". Compared with it, ×\u00a08 {of_heads(8, 16384, than=4)} there, and at 4,096 it "
        f"{of_heads(8, 4096, than=4)}. Without an order, as many heads alternate as have operands "
        "that fit in half of L2."
    ),
    lab.read(
        "**One more rung, at head_dim 64.** Here a tile has 128 queries and the registers are full "
        "again, so the package reads `lse` and `delta` after the matmul rather than during it. "
        f"At length 16,384, reading them late {change('full')} without a mask and "
        f"{change('causal')} with a causal one, where the number of spilled registers goes from "
        f"{spills_of('causal', 'read early'):.0f} to {spills_of('causal', 'read late'):.0f}."
    ),
    lab.attempt(
        "The worst gradient of each version, bfloat16, lengths 128 to 1,152, against float64",
        worst_of_each if HOPPER else NEEDS_HOPPER,
    ),
)
# %%
# Where the cycles of a step go
# -----------------------------

# %%


# Measuring
STORED = gl.constexpr(2048)  # numbers of 4 bytes that a consumer stores at once: 8 KiB


@gluon.jit
def _store_beside(
    other_s, number, ME: gl.constexpr, UNIT: gl.constexpr, STORES: gl.constexpr
):
    """One of the stores of a consumer, if it has so many."""
    if UNIT < STORES:
        line: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
        numbers = gl.arange(0, STORED, line) + number
        other_s.index(ME * STORES + UNIT).store(numbers)


@gluon.jit
def _matmuls(
    tiles, steps, trace_ptr,
    ME: gl.constexpr, SCORES: gl.constexpr, LEFT_IN_REGISTERS: gl.constexpr,
    GRADIENTS: gl.constexpr, PARTS: gl.constexpr, STORES: gl.constexpr,
):  # fmt: skip
    q, do, k_s, v_s, ds_s, other_s = tiles
    score_layout: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, 1], [16, BLOCK_M, 16]
    )
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, 1], [16, COLUMNS, 16]
    )
    weights_layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 2)
    keys_layout: gl.constexpr = gl.DotOperandLayout(0, score_layout, 2)
    dtype: gl.constexpr = q.dtype
    k, v = k_s.index(ME), v_s.index(ME)
    # sums that nobody reads: scores, dP and the part of dq go to the same
    s = gl.zeros([ROWS, BLOCK_M], gl.float32, score_layout)
    dk = gl.zeros([ROWS, COLUMNS], gl.float32, acc_layout)
    dv = gl.zeros([ROWS, COLUMNS], gl.float32, acc_layout)
    if GRADIENTS:
        weights = ds_s.index(ME).load(weights_layout)
    if LEFT_IN_REGISTERS:
        keys = k.load(keys_layout)
    named_barrier("sync", 9, 256)  # both consumers
    _stamp(trace_ptr, (0, 1), ME, 0, 0, True)

    for _ in range(steps):
        # -- issue: matmuls, and stores while they run
        if SCORES:
            if LEFT_IN_REGISTERS:
                s = warpgroup_mma(keys, q.permute([1, 0]), s, is_async=True)
            else:
                s = warpgroup_mma(k, q.permute([1, 0]), s, is_async=True)
        _store_beside(other_s, steps, ME, 0, STORES)
        if SCORES:
            if LEFT_IN_REGISTERS:
                s = warpgroup_mma(keys, do.permute([1, 0]), s, is_async=True)
            else:
                s = warpgroup_mma(v, do.permute([1, 0]), s, is_async=True)
        _store_beside(other_s, steps, ME, 1, STORES)
        if GRADIENTS:
            dv = warpgroup_mma(weights, do, dv, is_async=True)
        _store_beside(other_s, steps, ME, 2, STORES)
        for half in gl.static_range(2):
            if PARTS:
                ds_t = ds_s.index(half).permute([1, 0])
                columns = k_s.index(half).slice(ME * 64, 64, dim=1)
                s = warpgroup_mma(ds_t, columns, s, is_async=True)
            _store_beside(other_s, steps, ME, 3 + half, STORES)
        if GRADIENTS:
            dk = warpgroup_mma(weights, q, dk, is_async=True)
        for unit in gl.static_range(5, 7):
            _store_beside(other_s, steps, ME, unit, STORES)
        # -- wait: for all but the last matmul
        s, dv, dk = warpgroup_mma_wait(1, deps=[s, dv, dk])

    s, dv, dk = warpgroup_mma_wait(0, deps=[s, dv, dk])
    _stamp(trace_ptr, (0, 1), ME, 0, 1, True)
    # -- write: so that the compiler keeps the matmuls
    named_barrier("sync", 9, 256)
    ds_s.index(ME).store(s.to(dtype))
    k.store((dk + dv).to(dtype))


@gluon.jit
def _matmuls_kernel(
    trace_ptr, steps,
    SCORES: gl.constexpr, LEFT_IN_REGISTERS: gl.constexpr,
    GRADIENTS: gl.constexpr, PARTS: gl.constexpr, STORES: gl.constexpr,
):  # fmt: skip
    """The matmuls of two consumers, on whatever the tiles in shared memory hold."""
    dtype: gl.constexpr = gl.bfloat16
    tile_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(
        [64, COLUMNS], dtype
    )
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(
        [ROWS, BLOCK_M], dtype
    )
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q = gl.allocate_shared_memory(dtype, [BLOCK_M, COLUMNS], tile_layout)
    do = gl.allocate_shared_memory(dtype, [BLOCK_M, COLUMNS], tile_layout)
    k_s = gl.allocate_shared_memory(dtype, [2, ROWS, COLUMNS], tile_layout)
    v_s = gl.allocate_shared_memory(dtype, [2, ROWS, COLUMNS], tile_layout)
    ds_s = gl.allocate_shared_memory(dtype, [2, ROWS, BLOCK_M], ds_layout)
    ROOM: gl.constexpr = 2 * STORES if STORES > 0 else 1
    other_s = gl.allocate_shared_memory(gl.int32, [ROOM, STORED], line)
    tiles = (q, do, k_s, v_s, ds_s, other_s)
    ME_0: gl.constexpr = 0
    ME_1: gl.constexpr = 1
    gl.warp_specialize(
        [
            (
                _matmuls,
                (
                    tiles, steps, trace_ptr, ME_0,
                    SCORES, LEFT_IN_REGISTERS, GRADIENTS, PARTS, STORES,
                ),
            ),
            (
                _matmuls,
                (
                    tiles, steps, trace_ptr, ME_1,
                    SCORES, LEFT_IN_REGISTERS, GRADIENTS, PARTS, STORES,
                ),
            ),
        ],
        [4],
        [240],
    )  # fmt: skip


@gluon.jit
def _adding_kernel(trace_ptr, sums_desc, counter_ptr, steps, n_tiles):
    """Nothing but additions: a program adds parts of dQ, and announces each, for nobody."""
    layout: gl.constexpr = sums_desc.layout
    parts = gl.allocate_shared_memory(gl.float32, [2, BLOCK_M, COLUMNS // 2], layout)
    _stamp(trace_ptr, (0, 1), 0, 0, 0, True)
    for i in range(steps):
        row = (gl.program_id(0) + i) % n_tiles * BLOCK_M
        for half in gl.static_range(2):
            tma_add(sums_desc, [row, half * (COLUMNS // 2)], parts.index(half))
        tma.store_wait(0)
        announce(counter_ptr + gl.program_id(0), i + 1)
    _stamp(trace_ptr, (0, 1), 0, 0, 1, True)


# %%


# Measuring
OPERAND = 64 * HEAD_DIM * 2 / KIB  # each is 64 by 128 numbers of 16 bits
BESIDE = [  # KiB of a step
    KEYS * QUERIES * 2 / KIB,  # dS, written
    2 * QUERIES * HEAD_DIM * 4 / KIB,  # the part of dQ, written and read
    2 * QUERIES * HEAD_DIM * 2 / KIB,  # Q and dO, written
]
PER_STORE = 2 * STORED.value * 4 / KIB  # of both consumers
assert sum(BESIDE) == 7 * PER_STORE

TRIED = {  # matmuls and operands from shared memory of a consumer; stores; what it runs
    "S, dP": (2, 4, 0, "SCORES"),
    "S, dP, and stores": (2, 4, 3, "SCORES"),
    "S, dP, left in registers": (2, 2, 0, "SCORES LEFT_IN_REGISTERS"),
    "S, dP, left in registers, and stores": (2, 2, 3, "SCORES LEFT_IN_REGISTERS"),
    "dv, dk, left in registers": (2, 2, 0, "GRADIENTS"),
    "dq": (1, 2, 0, "PARTS"),
    "all five": (5, 8, 0, "SCORES GRADIENTS PARTS"),
    "all five, and what a step moves": (5, 8, 7, "SCORES GRADIENTS PARTS"),
}
SWITCHES = ("SCORES", "LEFT_IN_REGISTERS", "GRADIENTS", "PARTS")


def counted(what):
    """Cycles of a step: of the matmul units, and of shared memory."""
    n_matmuls, n_operands, stores, _ = TRIED[what]
    operations = n_matmuls * 2 * QUERIES * KEYS * HEAD_DIM / 4096
    return operations, (2 * n_operands * OPERAND + stores * PER_STORE) * KIB / 128


assert counted("all five, and what a step moves") == (2560, 2944)


def cycles_of(launch, n_steps, consumers=2):
    """Cycles of a step: the median of seven launches, which a warm-up precedes."""
    found = []
    for _ in range(8):
        trace = torch.zeros(2, EVENTS.value, device=runtime.DEVICE, dtype=torch.int32)
        launch(trace, n_steps)
        stamped = trace.tolist()[:consumers]
        found.append(max(apart(begin, end) for begin, end, *_ in stamped) / n_steps)
    return sorted(found[1:])[3]


def limits():
    rows, n_sms = [], runtime.multiprocessors(runtime.DEVICE)
    for what, (_, _, stores, on) in TRIED.items():
        switches = {name: name in on.split() for name in SWITCHES}
        launch = partial(
            _matmuls_kernel[(n_sms,)], STORES=stores, num_warps=4, **switches
        )
        operations, moved = counted(what)
        row = {"what": what, "operations": operations, "shared memory": moved}
        rows.append(row | {"measured": round(cycles_of(launch, 1000))})
    # -- additions to 8 MiB of sums, by one program and by one on each SM
    n_tiles = 256
    sums = torch.zeros(n_tiles * QUERIES, HEAD_DIM, device=runtime.DEVICE)
    desc = described(sums, QUERIES, HEAD_DIM // 2, gl.float32)
    counters = torch.zeros(n_sms, device=runtime.DEVICE, dtype=torch.int32)
    for what, programs in (("one SM adds a part", 1), ("all SMs add parts", n_sms)):

        def launch(trace, n_steps, programs=programs):
            _adding_kernel[(programs,)](
                trace, desc, counters, n_steps, n_tiles, num_warps=1
            )

        row = {"what": what, "operations": None, "shared memory": None}
        rows.append(row | {"measured": round(cycles_of(launch, 200, consumers=1))})
    return rows


by_part = lab.attempt(
    "Cycles of a step: counted for the matmul units and for shared memory, and measured",
    limits if HOPPER else NEEDS_HOPPER,
)


def cycles(what):
    found = [row["measured"] for row in by_part.rows if row.get("what") == what]
    return found[0] if found else nan


whole_step = "all five, and what a step moves"
moved_kib = {
    "operands, read by the matmuls of both consumers": 2
    * TRIED[whole_step][1]
    * OPERAND,
    "Q and dO, written": BESIDE[2],
    "dS, written": BESIDE[0],
}
moved_kib["without the sum"] = sum(moved_kib.values())
moved_kib["the part of dQ, written and read"] = BESIDE[1]
moved_kib["in all"] = moved_kib["without the sum"] + BESIDE[1]
assert moved_kib["in all"] * KIB / 128 == counted(whole_step)[1]
moved_table = lab.table(
    [
        {"what": what, "KiB": f"{kib:.0f}", "cycles": f"{kib * KIB / 128:,.0f}"}
        for what, kib in moved_kib.items()
    ],
    "What a step moves through shared memory, counted",
)

# %%

# Drawing
in_order = next((row for row in of_all.rows if row["rung"] == "a fixed order"), None)
any_order = next((row for row in of_all.rows if row["rung"] == "an adder"), None)
mean_step = (
    in_order["a step"]
    if in_order
    else of_waits("cycles of a program", 1, "full") / (4096 // QUERIES)
)
BARS = {  # cycles of a step, and how they are drawn
    "matmul units, counted": (counted("all five")[0], "counted"),
    "five matmuls alone": (cycles("all five"), "tried"),
    "shared memory, counted": (counted(whole_step)[1], "counted"),
    "matmuls and stores alone": (cycles(whole_step), "tried"),
    "additions alone": (cycles("all SMs add parts"), "tried"),
    "a step, in a fixed order": (mean_step, "step"),
}


STEP_PIECES = {}  # cycles of the last bar, and how they are drawn
if in_order:
    pauses_of_it = in_order["pause at dS"] + in_order["pause at the part"]
    STEP_PIECES = {
        "five matmuls": (BARS["matmul units, counted"][0], "Kernel Book", 1.0),
        "rest": (mean_step - BARS["matmul units, counted"][0] - pauses_of_it, "Kernel Book", 0.5),
        "pauses": (pauses_of_it, "PyTorch", 1.0),
    }


def bars_in_words(_):
    told_of = ". ".join(
        f"{what}: {found:,.0f} cycles" for what, (found, _) in BARS.items()
    )
    pieces = ", ".join(f"{what} {n:,.0f}" for what, (n, *_) in STEP_PIECES.items())
    return f"{told_of}{', of which ' * bool(pieces)}{pieces}."


def bars_of_a_step(axes, _):
    looks = {
        "counted": {"color": lab.colour("matmul"), "alpha": 0.35},
        "tried": {"color": lab.colour("matmul")},
        "step": {"color": lab.colour("Kernel Book")},
    }
    for at, (found, look) in enumerate(BARS.values()):
        axes.text(found + 40, at, f"{found:,.0f}", va="center", fontsize=10)
        if look != "step" or not STEP_PIECES:
            axes.barh(at, found, 0.66, **looks[look])
            continue
        begin = 0
        for what, (piece, ink, strength) in STEP_PIECES.items():
            axes.barh(at, piece, 0.66, begin, color="#ffffff", zorder=0.9)  # behind the pale
            axes.barh(at, piece, 0.66, begin, color=lab.colour(ink), alpha=strength)
            write_at(axes, (begin + piece / 2, at + 0.83), f"{what}\n{piece:,.0f}", 10)
            begin += piece
    axes.set_yticks(range(len(BARS)), BARS)
    axes.set(xlim=(0, 1.15 * mean_step), xlabel="cycles of a step")
    axes.set_ylim(-0.6, len(BARS) + 0.4)
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
    axes.grid(axis="y", visible=False)
    axes.invert_yaxis()


# %%

# Reading
faster, when_causal = (
    1 + gain("Kernel Book", mask, "two sweeps") for mask in ("full", "causal")
)
ideal, bound = counted(whole_step)  # cycles of the matmul units, and of shared memory
without_sum = moved_kib["without the sum"] * KIB / 128
assert without_sum < ideal < bound
needed = cycles(whole_step)
lab.read(
    "Five matmuls instead of seven promise a factor of 1.4, but **on the ladder one sweep is only "
    f"{faster:.2f} times as fast as two in full attention, and {when_causal:.2f} times under a "
    "causal mask.** What holds it back?"
)

# %%

# Reading
lab.read(
    "The picture shows a typical step in full attention, as a running program recorded it. Boxes "
    "have the numbers of the waits; wait 8 is the gap after box 7. Only the top row is inferred: "
    f"by count, one matmul of both consumers takes {counted('dq')[0]:.0f} cycles, and a pause "
    "begins when the last matmul issued has had that long:"
)

# %%


# Drawing
PIECES = {  # from one point to another, the waits, what is done, and the fill
    "consumers": [
        ("begins", "scores", "1–3", "wait for S", "#eaf2fb"),
        ("scores", "dS", "4", "make P, dS", "#eaf2fb"),
        ("dS", "met", "5", "meet", "#eaf2fb"),
        ("met", "matmuls", "6", "part", "#eaf2fb"),
        ("matmuls", "handed over", "7", "hand over", "#eaf2fb"),
    ],
    "adder": [
        ("asks", "has parts", "", "wait", "#f6f8fa"),
        ("has parts", "added", "", "add", "#fff4e5"),
    ],
}
PER_LETTER = 68  # cycles that a letter takes in the figure
ROLE_OF = {"consumer 0": "consumers", "consumer 1": "consumers", "adder": "adder"}
ROLES = tuple(ROLE_OF)
UNDER_WAY = counted("dq")[0]  # cycles of one matmul of both consumers


def rows_of(rows, role="consumer 0", version=TRACED[1]):
    return [r for r in rows if (r["version"], r["role"]) == (version, role)]


def in_step(rows):
    """What both consumers stamped, step by step."""
    both = zip(rows_of(rows), rows_of(rows, "consumer 1"), strict=True)
    return list(both)


def pauses(rows):
    """Of each step but the last, when the matmul units have no work: at dS, and at the part."""
    found, stamped = [], in_step(rows)
    for both, after in zip(stamped, stamped[1:], strict=False):
        at_ds = max(one["scores"] for one in both), min(one["dS"] for one in both)
        at_part = (
            max(one["matmuls"] for one in both),
            min(one["begins"] for one in after),
        )
        found.append(
            [(min(a + UNDER_WAY, b), b) for a, b in (at_ds, at_part) if b == b]
        )
    return found


def step_drawn(rows):
    """Which step is drawn: the one whose pauses are nearest the means of all."""
    means = (
        [in_order[x] for x in ("pause at dS", "pause at the part")] if in_order else []
    )

    def off_by(at):
        return sum(
            abs(one - mean)
            for one, mean in zip(paused(rows, slice(at, at + 1)), means, strict=False)
        )

    # the adder's first stamp comes too late, so not the first step
    return min(range(1, max(len(pauses(rows)), 2)), key=off_by)


def drawn_from(rows):
    """When the step drawn begins, and when the next one does."""
    stamped, at = in_step(rows), step_drawn(rows)
    return (min(one["begins"] for one in both) for both in stamped[at : at + 2])


def timelines(axes, rows):
    since, until = drawn_from(rows)
    whole = 1.1 * (until - since)  # with the beginning of the next step
    edge, ink = "#59636e", lab.colour("PyTorch")
    axes.barh(0, whole, 0.7, color="#ffffff", zorder=0.9)  # behind the pale bar
    axes.barh(0, whole, 0.7, color=lab.colour("matmul"), alpha=0.35)
    both_pauses = pauses(rows)[step_drawn(rows)]
    write_at(axes, ((both_pauses[0][0] - since) / 2, 0), "matmuls in flight", 10)
    for (begin, end), what in zip(
        both_pauses, ("until dS is made", "until the next S"), strict=False
    ):
        axes.barh(0, end - begin, 0.7, begin - since, color=ink)
        middle = min((begin + end) / 2 - since, whole - 650)
        told_above = f"pause: {end - begin:,.0f} cycles,\n{what}"
        write_at(axes, (middle, -0.85), told_above, 10, ink)
    for at, role in enumerate(ROLES, 1):
        for row in rows_of(rows, role):
            for a, b, number, text, fill in PIECES[ROLE_OF[role]]:
                begin, end = max(row[a] - since, 0), min(row[b] - since, whole)
                if end - begin < 60:  # what only begins at the edge is left out
                    continue
                look = {"color": fill, "edgecolor": edge, "linewidth": 0.8}
                axes.barh(at, end - begin, 0.7, begin, **look)
                if row[b] - since > whole:  # of the next step
                    number, text = "", "next" if number else text
                lines = [number, text if end - begin > PER_LETTER * len(text) else ""]
                label = "\n".join(line for line in lines if line)
                write_at(axes, ((begin + end) / 2, at), label, 9.5)
    axes.set(xlim=(0, whole), ylim=(len(ROLES) + 0.5, -1.3))
    axes.set_xlabel("cycles of the SM")
    axes.xaxis.set_major_locator(MultipleLocator(1000))
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
    axes.set_yticks(range(len(ROLES) + 1), ["matmul units", *ROLES])
    axes.grid(axis="x", visible=True)


def cycles_a_step(rows, version=TRACED[1]):
    """Cycles from one step to the next of a consumer, over the span that was traced."""
    own = rows_of(rows, version=version)
    return (own[-1]["begins"] - own[0]["begins"]) / (len(own) - 1) if own else nan


def spent(rows, a, b, role="consumer 0", version=TRACED[1]):
    """Cycles of a step that a role spends between two points."""
    own = rows_of(rows, role, version)
    return sum(r[b] - r[a] for r in own) / len(own) if own else nan


def paused(rows, of):
    """How long the matmul units pause, in some steps: at dS, and at the part."""
    found = pauses(rows)[of]
    return [
        sum(of_step[which][1] - of_step[which][0] for of_step in found) / len(found)
        if found
        else nan
        for which in (0, 1)
    ]


def in_words(rows):
    at = step_drawn(rows)
    at_ds, at_part = paused(rows, slice(at, at + 1))
    return (
        "Timelines of the matmul units, two consumers and an adder. The units have no work for "
        f"{at_ds:,.0f} cycles while both consumers make dS, and for {at_part:,.0f} while both hand "
        "their part over. The adder waits for its turn and adds."
    )


a_step, step_alone = (cycles_a_step(traced.rows, name) for name in reversed(TRACED))


def share_of_step(a, b, role="consumer 0"):
    """The share of a step of the program drawn that a role spends between two points."""
    return 100 * spent(traced.rows, a, b, role) / a_step


def over_tiles(column):
    """The same share, as the mean of programs from all tiles."""
    return f"{of_waits(column, 1, 'full'):.0f} %"


if not traced.rows:
    steps.rate("an adder", mask="full")  # says why numbers are missing


turn = share_of_step("asks", "its turn", "adder")
handing = share_of_step("matmuls", "handed over")
lab.draw(
    traced,
    "One step in a fixed order, and its two pauses",
    in_words,
    timelines,
)

# %%

# Measuring
BUDGET = {  # cycles of a step, and of its two pauses
    name: (row["a step"], row["pause at dS"], row["pause at the part"])
    for name, row in (("a fixed order", in_order), ("no order", any_order))
    if row
}


n_steps_in_all = in_order["steps"] if in_order else 0


def left_of(whole, at_ds, at_part):
    return whole - ideal - at_ds - at_part


if in_order:  # two pauses, and matmuls that take longer than counted, as was said above
    assert min(*BUDGET["a fixed order"][1:], left_of(*BUDGET["a fixed order"])) > 0


def budget_rows():
    rows = {
        "five matmuls, counted": [ideal for _ in BUDGET],
        "pause until dS is made (4)": [at_ds for _, at_ds, _ in BUDGET.values()],
        "pause until the next S (7, 8)": [at_part for *_, at_part in BUDGET.values()],
        "the rest, beyond the count": [left_of(*one) for one in BUDGET.values()],
        "a step": [whole for whole, *_ in BUDGET.values()],
    }
    return [
        {f"cycles, mean of {n_steps_in_all:,} steps": what}
        | {name: f"{x:,.0f}" for name, x in zip(BUDGET, found, strict=True)}
        for what, found in rows.items()
    ]


# %%

# Reading
adders = rows_of(traced.rows, "adder")
free = [  # whether the part of the step before is out of the buffer when both come to wait 7
    before["added"] <= min(one["matmuls"] for one in both)
    for before, both in zip(adders, in_step(traced.rows)[1:], strict=False)
]
late = [  # whether it was still there when the second of both came
    before["added"] > max(one["matmuls"] for one in both)
    for before, both in zip(adders, in_step(traced.rows)[1:], strict=False)
]
at = step_drawn(traced.rows) if traced.rows else 0
on_time = bool(free) and free[at - 1]  # its list begins at the second step
outlasts = bool(free) and all(
    one["handed over"] - one["matmuls"] > UNDER_WAY for one in in_step(traced.rows)[at]
)
handed_in, handed_any = (
    row["hands over"] if row else nan for row in (in_order, any_order)
)
lost = 100 * (1 - any_order["a step"] / in_order["a step"]) if BUDGET else nan
# if both always handed over together, the mean pause would be at least what dK does not cover
staggered = BUDGET and any_order["pause at the part"] < min(
    in_order["pause at the part"] / 4, (handed_any - UNDER_WAY) / 2
)
after_order = any_order["pause at the part"] if any_order else nan
lab.read(
    "**The matmul units pause twice: while both consumers make dS, and while both hand their part "
    f"over.** Handing over takes {handed_in:.0f} cycles on average, wait 7 included, but the dK "
    f"that runs meanwhile lasts only {UNDER_WAY:.0f} by count."
)

# %%
# The pauses are not all. In the mean step, the last bar below, a *rest* is left, so between the
# pauses matmuls take longer than counted. The reason may be shared memory, which by count a step
# keeps busy for longer than the matmul units; without the part of dQ it would not. Each dark bar is
# a kernel that does only what its label says:

# Drawing
lab.draw(
    by_part,
    "Cycles of a step at head_dim 128, full",
    bars_in_words,
    bars_of_a_step,
)

# %%

# Reading
rest = left_of(*BUDGET["a fixed order"]) if BUDGET else nan
lab.read(
    f"**Matmuls and stores alone take {needed - ideal:,.0f} cycles more than the matmuls by "
    f"count,** and the rest is {rest:,.0f}. The additions by the copy engines of all SMs "
    + (
        "fit into a step, so they alone do not hold it up."
        if cycles("all SMs add parts") < mean_step
        else "take longer than a step."
    )
)

# %%

# Reading
lab.read(
    "So count shared memory too, not only matmuls, and ask which matmuls run while a result is "
    "handed over. How much of the gap to 1.4 each finding explains is open, because two sweeps "
    "were not traced."
)

# %%

# Folded: The count of shared memory, row by row, and its test
off = 100 * max(needed / bound - 1, cycles("all five") / ideal - 1)
lab.together(
    lab.read(
        "**The count.** Five matmuls are 5 · 2 · 64 · 128 · 128 operations, of which the matmul "
        "units of an SM do 4,096 per cycle. Shared memory moves 128 bytes per cycle. From it, the "
        "matmuls of each consumer read eight operands of 64 × 128 numbers: two each for S, dP and "
        "the part, and one each for dV and dK."
    ),
    moved_table,
    lab.read(
        f"**The test.** The count is right to within {off:.0f} % for two kernels. One does nothing "
        "but the five matmuls. The other also stores as many bytes as a step moves besides its "
        "operands."
    ),
    by_part,
)

# %%

# Folded: What is not known, what giving up the order changes, and what was tried
same_time = verdict(gain("a fixed order", "full", "an adder")) == NO_DIFFERENCE
fewer = f"takes {abs(lost):.0f} % {'fewer' if lost > 0 else 'more'} cycles"
steps_drawn = [
    after["begins"] - row["begins"]
    for row, after in zip(rows_of(traced.rows), rows_of(traced.rows)[1:], strict=False)
]
lab.together(
    lab.read(
        f"**The gap to 1.4.** In full attention, one sweep is {faster:.2f} times as fast as two, "
        f"so each of its matmuls takes 1.4 / {faster:.2f} = {7 / 5 / faster:.2f} times as long as "
        "a matmul of two sweeps. The shared sum may be the reason, because two sweeps keep every "
        "gradient in registers, whereas the part of dQ passes through shared memory. But the two "
        "versions also differ in language and roles, and nothing here times the sum alone."
    ),
    lab.table(budget_rows() if BUDGET else [], "Cycles of a step in full attention"),
    lab.read(
        "**The table** has averages over programs from all tiles; “no order” is the rung “an "
        "adder”. If a matmul takes longer than its count, the pause behind it is shorter than "
        "stated, and the rest longer by as much."
    ),
    lab.read(
        "**Without the order, the second pause "
        + ("almost disappears,** " if staggered else f"takes {after_order:.0f} cycles,** ")
        + f"although handing over still takes {handed_any:.0f} cycles. "
        + (
            "The consumers must therefore often hand over at different times, one while the "
            "other's matmuls run."
            if staggered
            else ""
        )
    ),
    lab.read(
        f"**Yet giving up the order gains no time.** A traced step then {fewer}, but on the ladder "
        "“an adder” is no faster, and we do not know why. A GPU may lower its clock under load, so "
        "fewer cycles need not mean less time; the clock was not recorded."
        if lost > 0 and same_time
        else f"**A traced step then {fewer}.**"
    ),
    lab.read(
        "**Tried without a gain,** in runs that no record holds: issuing dV before dS, which could "
        "fill the first pause; issuing the scores and dP of the next step ahead; letting the adder "
        "ask early; and making the weights before the wait for dP."
    ),
    lab.read(
        "**Not measured:** a fixed order without an adder, so what the adder saves there is not "
        "known; the two changes of the last rung, each alone; a second buffer for parts; and "
        "programs that draw their ids from an atomic counter, which would not need the assumption "
        "about the order of starts."
    ),
    lab.table(
        [
            {"what": "cycles of a step"}
            | {"its mean": f"{a_step:,.0f}", "mean over tiles": f"{mean_step:,.0f}"},
            {"what": "a consumer hands its part over, wait 7 included"}
            | {"its mean": f"{handing:.0f} %"}
            | {"mean over tiles": over_tiles("consumer hands over, %")},
            {"what": "the adder waits for its turn"}
            | {"its mean": f"{turn:.0f} %"}
            | {"mean over tiles": over_tiles("adder waits, %")},
        ]
        if traced.rows
        else [],
        "The program drawn, as the mean of all its traced steps, and the mean over programs from "
        "all tiles",
    ),
    of_all,
    lab.read(
        "**The step drawn** is the recorded one whose pauses are nearest to the averages. **Its "
        "first row:** after wait 3 of both consumers, only dP is in flight, "
        f"and after wait 6 only dK, for {UNDER_WAY:.0f} cycles each. "
        + (
            "Wait 7 is not long in the program drawn, because the adder had always finished the "
            "previous part by the time the consumers reached it."
            if free and all(free)
            else f"In {sum(late)} of {len(late)} steps of the program drawn, the adder had not "
            "finished the previous part when the consumers reached wait 7. "
            if any(late)
            else ""
        )
        + (
            "In the step drawn it had, so there nobody waits for the adder: handing over alone "
            "outlasts dK."
            if on_time and outlasts and any(late)
            else ""
        )
    ),
    lab.read(
        "**An addition** takes "
        f"{spent(traced.rows, 'has parts', 'added', 'adder'):,.0f} cycles in this program, "
        f"averaged over all traced steps, and {cycles('all SMs add parts'):,.0f} in the test in "
        "which all SMs add without a pause."
    ),
    lab.read(
        "**Limits of the trace.** We did not measure what the stamps cost. The longest of the "
        f"{len(steps_drawn)} steps of this program takes {max(steps_drawn, default=nan):,.0f} "
        "cycles. A single program does not rank the rungs: a step of "
        f"“{TRACED[0]}”, the slower rung, takes {step_alone:,.0f}."
    ),
    lab.read(
        f"**Two percentages.** A step of {mean_step:,.0f} cycles uses the matmul units at "
        f"{100 * ideal / mean_step:.0f} % of their peak. On the ladder, “a fixed order” reaches "
        f"{100 * steps.share('a fixed order', mask='full'):.0f} %, but there 100 % is the speed of "
        "cuBLAS's matmul, and not the peak."
    ),
)

# %%
# How the libraries compare
# -------------------------

# Measuring
PEERS = ("SDPA cuDNN", "FlashAttention")
FIXED = "FlashAttention, deterministic"
FIXED_MODE = "FA4, fixed"


def providers(seqlen, batch, heads, head_dim, mask, causal, dtype):
    is_causal = mask == "causal"
    *qkv, do = drawn((batch, heads, heads, seqlen, seqlen, head_dim), dtype)
    leaves = tuple(x.detach().requires_grad_() for x in qkv)
    ours = partial(attention, is_causal=is_causal)
    in_order, no_order = NEEDS_HOPPER, NEEDS_HOPPER
    if HOPPER:
        inputs, config = (*qkv, do), choice.CONFIGS[head_dim]
        in_order = lab.tried(timed(partial(ours, backend="gluon"), leaves, do))
        no_order = lab.tried(
            in_gluon(inputs, is_causal, False, None, replace(config, ordered=False))
        )
    return {
        "matmul": matmul(),
        "SDPA cuDNN": sdpa("CUDNN_ATTENTION", leaves, do, is_causal=is_causal),
        "FlashAttention": flash(leaves, do, causal=is_causal),
        FIXED: flash(leaves, do, causal=is_causal, deterministic=True),
        "two sweeps": timed(partial(ours, backend="triton"), leaves, do),
        "one sweep, no order": no_order,
        "one sweep, in order": in_order,
        "Kernel Book": timed(ours, leaves, do),
    }


speed = lab.bench("backward", points(LENGTHS), providers, **BACKWARD)
at_points = []
for point in points(LENGTHS, (128, 64)):
    where = {key: point[key] for key in ("head_dim", "mask", "seqlen")}
    library, _ = speed.best_peer(*PEERS, FIXED, **where)
    row = {"head_dim": point["head_dim"], "mask": point["mask"]}
    row["length"] = point["seqlen"]
    columns = {
        "two sweeps": "two sweeps",
        "no order": "one sweep, no order",
        "in order": "one sweep, in order",
        "by default": "Kernel Book",
        FIXED_MODE: FIXED,
    }
    row |= {column: speed.rate(name, **where) for column, name in columns.items()}
    row |= {"library": library}
    row["its speed"] = nan if library == "none" else speed.rate(library, **where)
    at_points.append(row)


def with_fewer_lines(sweep):
    """A sweep without our two kernels of one sweep, which the table below has."""
    left_out = ("one sweep, no order", "one sweep, in order")
    kept = [name for name in sweep.providers if name not in left_out]
    others = [with_fewer_lines(other) for other in sweep.elsewhere]
    return replace(sweep, providers=kept, elsewhere=others)


lines = with_fewer_lines(speed)

# %%


# Measuring
def shares_at(*head_dims):
    rows = [row for row in at_points if row["head_dim"] in head_dims]
    found = [100 * row["by default"] / row["its speed"] for row in rows]
    return f"{min(found):.0f} to {max(found):.0f} %"


def counts(one, other):
    """Whether one speed is above another by more than scatter."""
    return one > (1 + SCATTER) * other


slower = [row for row in at_points if counts(row["two sweeps"], row["in order"])]
# how far one kernel differs that the page times twice
twice = [
    row["by default"]
    / row[chosen(row["head_dim"], row["mask"], row["length"], deterministic=True)]
    for row in at_points
]
again_at = {"head_dim": 128, "mask": "causal", "seqlen": 16384}
between = (
    by_heads.rate("heads × 4", seqlen=16384)
    / speed.rate("one sweep, in order", **again_at)
    - 1
)
close = sum(abs(ratio - 1) < SCATTER for ratio in twice)
absent = [name for name in (*PEERS, FIXED) if name in speed.skipped]
behind = [row for row in at_points if counts(row["its speed"], row["by default"])]
over_theirs = [row for row in at_points if counts(row["by default"], row[FIXED_MODE])]
below_theirs = [row for row in at_points if counts(row[FIXED_MODE], row["by default"])]
everywhere = "all" if len(behind) == len(at_points) else f"{len(behind)} of"
PAIRS = {
    "one sweep in order, against two sweeps": ("in order", "two sweeps"),
    "one sweep without an order, against in order": ("no order", "in order"),
    "the package, against FlashAttention, deterministic": ("by default", FIXED_MODE),
    "the package, against the fastest library": ("by default", "its speed"),
}
verdicts = []
for what, (ours, theirs) in PAIRS.items():
    timed_both = [
        row
        for row in at_points
        if row[ours] == row[ours] and row[theirs] == row[theirs]
    ]
    won, lost_at = (
        sum(counts(row[one], row[other]) for row in timed_both)
        for one, other in ((ours, theirs), (theirs, ours))
    )
    verdicts.append(
        {"what": what, "faster": won, "slower": lost_at}
        | {"no difference": len(timed_both) - won - lost_at}
    )


def named(rows):
    """The points of some rows, in words."""
    lengths, masks = {}, {}
    for row in rows:
        lengths.setdefault((row["head_dim"], row["mask"]), []).append(row["length"])
    for (head_dim, mask), of_these in lengths.items():
        masks.setdefault((head_dim, *of_these), []).append(mask)
    found = [
        f"head_dim {head_dim}, length {' and '.join(f'{n:,}' for n in of_these)}, "
        + ("with and without a mask" if len(of_masks) == 2 else of_masks[0])
        for (head_dim, *of_these), of_masks in masks.items()
    ]
    return "; ".join(found) if 0 < len(rows) < 4 else ""


def at_most(rows, one, other):
    """Where the first speed is the smallest share of the second, in words."""
    if not rows:
        return ""
    worst = min(rows, key=lambda row: row[one] / row[other])
    share = 100 * worst[one] / worst[other]
    return f", where the package has at least {share:.0f} % of its speed ({named([worst])})"


def at_one(number):
    return "one" if number == 1 else f"{number}"


def points_in_words(number):
    return "1 point" if number == 1 else f"{number} points"


def points_of(rows):
    return points_in_words(len(rows)) + (f" ({named(rows)})" if named(rows) else "")


def over_two(mask):
    """How many times as fast one sweep is as two, at the shape of the ladder."""
    (row,) = (
        row
        for row in at_points
        if (row["head_dim"], row["mask"], row["length"]) == (128, mask, 4096)
    )
    return row["in order"] / row["two sweeps"]


without = [row["no order"] / row["in order"] - 1 for row in at_points]
dearest = at_points[max(range(len(without)), key=without.__getitem__)]
dropped = [
    row
    for row in at_points
    if chosen(row["head_dim"], row["mask"], row["length"], deterministic=False)
    == "no order"
]
won_by_it = [row for row in dropped if counts(row["no order"], row["by default"])]
lost_by_it = [row for row in dropped if counts(row["by default"], row["no order"])]


# %%

# Reading
fastest_is = [row["library"] for row in at_points]
by_mode = {
    FIXED_MODE: "its deterministic mode",
    FIXED: "its deterministic mode",
}
always_flash = set(fastest_is) <= {"FlashAttention", *by_mode}
lab.read(
    (
        "**A library is faster at every point.** "
        if everywhere == "all"
        else f"**A library is faster at {everywhere} {len(at_points)} points.** "
    )
    + "The dashed line below is the fastest library of each row"
    + (
        ", always FlashAttention 4, which keeps an order only in its deterministic mode."
        if always_flash
        else ". Of FlashAttention 4, only the deterministic mode keeps an order."
    )
    if speed.rows
    else f"{nan}"
)

# %%


# Drawing
SEEN = {  # how each is drawn, the smaller above the larger
    "one sweep, in order": {"marker": "o", "s": 64, "zorder": 3},
    FIXED: {"marker": "D", "s": 34, "zorder": 3},
    "two sweeps": {
        "marker": "v",
        "s": 46,
        "zorder": 4,
        "edgecolors": "#ffffff",
        "lw": 0.6,
    },
}


def ink_of(name):
    return lab.colour("Kernel Book" if name == "one sweep, in order" else name)


def of_the_fastest(rows):
    """The share of the fastest library that each has, by point."""
    found = {}
    for row in rows:
        at = row["head_dim"], row["mask"], row["seqlen"]
        found.setdefault(at, {})[row["provider"]] = row["rate"]
    kept = {}
    for point in points(LENGTHS, (128, 64)):
        at = point["head_dim"], point["mask"], point["seqlen"]
        rates = found.get(at, {})
        best = max((rates.get(name, 0) for name in (*PEERS, FIXED)), default=0)
        if best:
            kept[at] = {n: 100 * rates[n] / best for n in SEEN if n in rates}
    return kept


def against_in_words(rows):
    told_at = [
        f"head_dim {head_dim}, {mask}, {seqlen:,}: "
        + ", ".join(f"{name} {share:.0f}" for name, share in has.items())
        for (head_dim, mask, seqlen), has in of_the_fastest(rows).items()
    ]
    return "Marks in rows, % of the fastest library. " + "; ".join(told_at) + "."


def against_the_fastest(axes, rows):
    axes.figure.set_size_inches(5.4, 5.0)
    heads, muted = {}, "#59636e"
    ys, labels = [], []
    for at, has in of_the_fastest(rows).items():
        if at[:2] not in heads:  # a line of its own names the group
            heads[at[:2]] = (ys[-1] + 2 if ys else 0) - (0 if ys else 1)
            ys.append(heads[at[:2]] + 1)
        else:
            ys.append(ys[-1] + 1)
        labels.append(f"{at[2]:,}")
        for name, look in SEEN.items():
            if name in has:
                axes.scatter(has[name], ys[-1], color=ink_of(name), **look)
    for (head_dim, mask), y in heads.items():
        axes.annotate(
            f"head_dim {head_dim}, {mask}", (0, y), (-4, 0), xycoords=("axes fraction", "data"),
            textcoords="offset points", ha="right", va="center", fontsize=10.5, color=muted,
        )  # fmt: skip
    for name, look in SEEN.items():
        axes.scatter([], [], color=ink_of(name), label=name, **look)
    axes.axvline(100, color=muted, linestyle="--", linewidth=1)
    axes.set_yticks(ys, labels)
    least_shown = min(60, axes.get_xlim()[0])
    axes.set(xlim=(least_shown, 102), ylim=(max(ys, default=1) + 0.7, -1.6))
    axes.set_xlabel(
        f"% of the speed of the fastest library; begins at {least_shown:.0f}"
    )
    axes.grid(axis="both", visible=True)


lab.draw(
    speed,
    "Backward of 16,384 tokens, by length",
    against_in_words,
    against_the_fastest,
)

# %%

# Reading
by_order = verdicts[1]
two_chosen = [
    row
    for row in at_points
    if chosen(row["head_dim"], row["mask"], row["length"], deterministic=True)
    == "two sweeps"
]
more_chosen = len(two_chosen) - len(slower)
best = max(row["in order"] / row["two sweeps"] for row in at_points)
worst = min(row["in order"] / row["two sweeps"] for row in at_points)
lab.read(
    f"**One sweep is up to {100 * (best - 1):.0f} % faster than two,** and "
    + (
        f"{100 * (1 - worst):.0f} % slower at {at_one(verdicts[0]['slower'])} point"
        + (f" ({named(slower)})" if named(slower) else "")
        if len(slower) == 1
        else f"slower at {verdicts[0]['slower']} points"
    )
    + (
        ". There"
        + (f", and at {at_one(more_chosen)} more" if more_chosen else "")
        + ", the package runs two sweeps. "
        if slower and all(row in two_chosen for row in slower)
        else ". "
    )
    + f"With its choice of kernels, the package reaches {shares_at(128, 64)} of the speed of "
    "the fastest library."
    if speed.rows
    else f"{nan}"
)

# %%

# Reading
lab.read(
    (
        f"Giving up the order does not pay: it slows one sweep down at {by_order['slower']} of "
        f"{len(at_points)} points and speeds it up at {by_order['faster']}."
        if by_order["slower"] > by_order["faster"]
        else f"Giving up the order speeds up {points_in_words(by_order['faster'])} and slows "
        f"down {by_order['slower']}."
    )
    if speed.rows
    else f"{nan}"
)

# %%


# Measuring
def around():
    q, k, v, do = drawn((16, 16, 16, 1024, 1024, 128), torch.bfloat16)
    out, lse = forward_of(q, k, v, False)
    sums, dq = torch.zeros(q.shape, device=q.device), torch.empty_like(q)
    convert = hopper._scale_launch(
        dq.device, dq.dtype, dq.shape, q.shape[2], dq.stride(), 0.1
    )
    parts = {
        "delta, before": lambda: plain.statistics(out, lse, do, None),
        "conversion, behind": lambda: convert(sums, dq),
    }
    return [
        {"what": what, "ms": triton.testing.do_bench(part, return_mode="median")}
        for what, part in parts.items()
    ]


beside = lab.attempt("Around the sweep", around if HOPPER else NEEDS_HOPPER)

# %%


# Folded: All points in TFLOP/s, and why 2 % is no difference
in_all = sum(row["ms"] for row in beside.rows) if beside.rows else nan
behind_at_64 = [
    100 * row["in order"] / row["its speed"]
    for row in at_points
    if (row["head_dim"], row["mask"]) == (64, "causal")
]


def share_around(seqlen):
    where = {"head_dim": 128, "mask": "full", "seqlen": seqlen}
    return 100 * in_all / speed.milliseconds_at("one sweep, in order", **where)


lab.plot(lines, "head_dim 128, full", where={"head_dim": 128, "mask": "full"})
lab.plot(lines, "head_dim 128, causal", where={"head_dim": 128, "mask": "causal"})
lab.plot(lines, "head_dim 64, full", where={"head_dim": 64, "mask": "full"})
lab.plot(lines, "head_dim 64, causal", where={"head_dim": 64, "mask": "causal"})
lab.together(
    lab.table(
        verdicts if speed.rows else [],
        f"At how many of {len(at_points)} points one is faster by {100 * SCATTER:.0f} % or more",
    ),
    lab.table(
        [
            {
                key: f"{x:.0f}"
                if isinstance(x, float)
                else FIXED_MODE
                if x == FIXED
                else x
                for key, x in row.items()
            }
            for row in at_points
            if speed.rows
        ],
        "TFLOP/s of our sweeps, of FlashAttention's deterministic mode, and of the fastest library",
    ),
    lab.read(
        f"**Giving up the order** gains at most {100 * max(without):.0f} %, at "
        f"{named([dearest])}, and loses up to {-100 * min(without):.0f} % elsewhere. One reason "
        "may be that without an order, the sums have to be set to zero first."
        if speed.rows
        else f"{nan}"
    ),
    lab.read(
        f"**`deterministic=False`** gives up the order at only {points_in_words(len(dropped))}. "
        f"Without it, the kernel is faster at {len(won_by_it) or 'none'} of them and slower at "
        f"{len(lost_by_it) or 'none'}."
        if speed.rows
        else f"{nan}"
    ),
    lab.read(
        "**The fastest library** of a row is "
        + ", ".join(
            f"{by_mode.get(name, name)} in {fastest_is.count(name)}"
            for name in sorted(set(fastest_is), key=fastest_is.count, reverse=True)
        )
        + f" of {len(at_points)} rows"
        + ("" if "SDPA cuDNN" in fastest_is else "; cuDNN is never the fastest")
        + f". Kernel Book reaches {shares_at(128)} of its speed at head_dim 128, and "
        f"{shares_at(64)} at head_dim 64."
        if speed.rows
        else f"{nan}"
    ),
    lab.read(
        "**FlashAttention's deterministic mode** is faster than the package at "
        f"{points_of(below_theirs)}{at_most(below_theirs, 'by default', FIXED_MODE)}, and slower "
        f"at {points_of(over_theirs)}. "
        + (f"Absent from this run: {', '.join(absent)}." if absent else "")
        if speed.rows
        else f"{nan}"
    ),
    lab.read(
        f"**Why less than {100 * SCATTER:.0f} % is no difference.** We time the default under two "
        f"names, and at {close} of {len(twice)} points the two times agree more closely than that."
        if speed.rows
        else f"{nan}"
    ),
    lab.read(
        "**Compare only within one figure.** The same kernel differs by "
        f"{100 * abs(between):.0f} % between two figures, at head_dim 128, length 16,384, causal. "
        "At the ladder's full shape, one sweep is "
        f"{over_two('full'):.2f} times as fast as two here, and {faster:.2f} times on the ladder."
        if speed.rows
        else f"{nan}"
    ),
    lab.read(
        f"**Head_dim 64, causal.** One sweep in order reaches {min(behind_at_64):.0f} to "
        f"{max(behind_at_64):.0f} % of the fastest library's speed. Two things may hold it back. A "
        "matmul for a query and a key is half as long as at head_dim 128, while P and dS take as "
        "much work. And tiles of 128 by 128 compute more pairs at the diagonal that nobody needs. "
        "We did not measure what each costs."
    ),
    lab.read(
        "**Around the sweep.** A kernel before the sweep computes `delta`, and one after it "
        "converts `dQ` to 16 bits. At head_dim 128 without a mask, the two take "
        f"{share_around(1024):.0f} % of the time at length 1,024 and {share_around(16384):.1f} % "
        "at 16,384."
    ),
)

# %%
# What breaks it
# --------------
#
# **Trusting zeros to stay zeros.** Beyond the last key, the copy engine fills a tile with zeros. A
# key that does not exist therefore has the score 0 and the weight :math:`e^{0 - \mathrm{lse}}`,
# which is later multiplied by zeros.
#
# But if all real scores of a query are so negative that its lse is below about −88.7, this weight
# is infinite in float32, and infinity times zero is not a number. The package's kernel
# therefore masks it:
#
# .. code-block:: python
#
#    weight = exp(0 - lse)  # wrong: at lse -100 it adds nan to dq
#    weight = where(key < seqlen_k, exp(0 - lse), 0)  # right: it adds 0


# Measuring
def added_unmasked(lse):
    weight = (0.0 - lse).exp()  # of a key that is not there
    return weight * 0.0  # dS, infinite like the weight, times the key's zeros


def added_masked(lse):
    weight = (0.0 - lse).exp()
    return torch.where(torch.tensor(False), weight, 0.0) * 0.0  # as the kernel has it


rows, of_queries = [], torch.tensor([-5.0, -50.0, -100.0])
for name, added in (
    ("wrong: not masked", added_unmasked),
    ("right: masked", added_masked),
):
    row = {"keys beyond the last": name}
    rows.append(
        row
        | {
            f"lse −{-x:.0f}": f"adds {y:.0f}"
            for x, y in zip(of_queries, added(of_queries), strict=True)
        }
    )
assert [row["lse −100"] for row in rows] == ["adds nan", "adds 0"]

# %%

# Folded: Masked and not, with the numbers of both
lab.together(
    lab.listing({"Wrong": added_unmasked, "Right": added_masked}),
    lab.table(rows, "What a key beyond the last adds to dq"),
)

# %%
# In short
# --------
#
# **The same bits** come from taking turns, and all waits end if programs start in the order of
# their ids.

# %%

# Reading
lab.read(
    (
        "**The order costs no time on the ladder,**"
        if min(cost) >= -SCATTER
        else f"**The order costs up to {-100 * min(cost):.0f} % on the ladder,**"
    )
    + " provided that tiles of many heads run at once under a causal mask."
)

# %%

# Reading
counted_points = f"{verdicts[0]['faster']} of {len(at_points)} points"
most = 2 * verdicts[0]["faster"] > len(at_points)
best = max(row["in order"] / row["two sweeps"] for row in at_points)
lab.read(
    f"**One sweep is faster than two at {'most points' if most else counted_points},**"
    + (" but by less than 7/5" if best < 7 / 5 else "")
    + (
        f", and slower at {at_one(verdicts[0]['slower'])}"
        if verdicts[0]["slower"]
        else ""
    )
    + ". The fastest library is ahead at "
    + (
        "every point."
        if everywhere == "all"
        else f"{everywhere} {len(at_points)} points."
    )
    if speed.rows
    else f"{nan}"
)

# %%
# Exercise
# --------
#
# **Does it fit?** At head_dim 128, could a program take tiles of 128 queries? What about 80 or 96,
# if Gluon allowed them? Count the shared memory (227 KiB) and the registers (240 for each of a
# consumer's 128 threads). Before it computes the part, a consumer holds dK, dV, S, dP, and P and dS
# in 16 bits.

# %%

# Solution: does it fit
rows = []
for queries in (64, 80, 96, 128):
    shared = 2 * KEYS * 128 * 2 + 4 * queries * 128 * 2 + 2 * KEYS * queries * 2
    shared = (shared + queries * 128 * 4) / KIB
    # dK and dV, S and dP, and P and dS in 16 bits, of which a register holds two
    registers = (2 * 64 * 128 + 2 * 64 * queries + 64 * queries) / 128
    row = {
        "queries": queries,
        "shared memory, KiB": shared,
        "registers": int(registers),
    }
    rows.append(row | {"fits": "yes" if shared < 227 and registers < 240 else "no"})
assert [row["fits"] for row in rows] == ["yes", "no", "no", "no"]
lab.table(rows, "Tiles of queries at head_dim 128")

# %%
# References
# ----------
#
# - Shah, Bikshandi, Zhang, Thakkar, Ramani, Dao. *FlashAttention-3: fast and accurate attention
#   with asynchrony and low-precision.* NeurIPS 2024.
# - Zadouri, Hoehnerbach, Shah, Liu, Thakkar, Dao. *FlashAttention-4: algorithm and kernel
#   pipelining co-design for asymmetric hardware scaling.* arXiv:2603.05451, 2026.
# - NVIDIA. *Parallel thread execution*, ``cp.reduce.async.bulk.tensor`` and ``fence``.

# %%

# Closing
of_library = [
    r["by default"] / r["its speed"] for r in at_points if r["library"] != "none"
]
of_matmul = [
    speed.share("Kernel Book", head_dim=128, mask=mask, seqlen=16384)
    for mask in ("full", "causal")
]
reached, limit = (
    (of_library, "the fastest library") if of_library else (of_matmul, "a matmul")
)
lab.finish(
    f"{min(reached):.0%} to {max(reached):.0%} of the speed of {limit}, backward, the same bits "
    "in every run"
)
