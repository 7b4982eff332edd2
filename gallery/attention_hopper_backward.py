"""
Backward in one sweep
=====================

The backward pass of plain Triton computes every weight of attention twice, once in each of its two
sweeps, because no program can keep the gradients of its keys *and* those of all queries. *What does
it take to compute each weight once, and can the gradients still be the same bits in every run?*

You will learn

- how programs add to the same sums in a fixed order, and why none of them waits for ever;
- why the additions get a :term:`warp` of their own, which does nothing but wait and add;
- how much of the promised speed one sweep delivers, and what holds back the rest.

The fast kernels are written in :term:`Gluon` and need a Hopper GPU (H100, H200); without one, the
page shows a recorded run. :doc:`/chapters/warps_with_roles` explains rings, barriers and the copy
engine.
"""

# sphinx_gallery_thumbnail_number = 6
import time
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from matplotlib.patches import Rectangle

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
# Seven matmuls, or five
# ----------------------
#
# For a tile of queries and one of keys, the backward pass needs five matmuls, as
# :doc:`/chapters/attention_backward` derives: :math:`S` and :math:`dP`, which give the weights
# :math:`P` and :math:`dS = P \circ (dP - \mathrm{delta})`, and then the tile's terms of
# :math:`dV`, :math:`dK` and :math:`dQ`. **Two sweeps** compute :math:`S` and :math:`dP` twice and
# need seven. One sweep needs five, which at the same speed would make it :math:`7/5 = 1.4` times as
# fast. How much of that can we get?
#
# **The price is a shared sum.** A program owns a tile of keys and keeps their :math:`dK` and
# :math:`dV`. But it meets all queries, and of each query's :math:`dQ` it computes only one term,
# its *part*. All programs add their parts to sums in memory, and the order of the additions decides
# the last bits, just as ``(0.1 + 0.2) + 0.3`` is not ``0.1 + (0.2 + 0.3)`` in Python. To give the
# same bits in every run, the programs therefore take turns. Here three of them add to the tiles of
# queries C, B and A:

# Drawing
assert (0.1 + 0.2) + 0.3 != 0.1 + (0.2 + 0.3)


def write_at(axes, at, text, size=11, color="#1f2328"):
    """Write lines around a point, each by itself, so that a browser centres each."""
    lines = text.split("\n")
    for number, line in enumerate(lines):
        up = 1.25 * size * ((len(lines) - 1) / 2 - number)
        axes.annotate(
            line, at, (0, up), textcoords="offset points", ha="center", va="center",
            fontsize=size, color=color,
        )  # fmt: skip


def turns(axes):
    edge, fills = "#59636e", ("#eaf2fb", "#fff4e5", "#f6f8fa")
    for owner in range(3):
        axes.text(-0.15, -owner, f"program {owner}", ha="right", va="center")
        for number, letter in enumerate("CBA"):
            left = 1.3 * (owner + number)
            box = Rectangle(
                (left, -owner - 0.3), 0.9, 0.6, facecolor=fills[number], edgecolor=edge
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
    "A staircase of three rows. Program 0 adds to the tiles C, B and A, one after the other. "
    "Program 1 adds to each of them one step after program 0, and program 2 one step after "
    "program 1. Arrows lead from each tile to the same tile of the next program.",
    turns,
    height=2.2,
)

# %%
# In every run, each tile of queries gets the part of program 0 first and that of program 2 last.
# Yet all programs work at the same time, on different tiles. They begin with C, the *last* tile of
# queries, because under a causal mask only the last queries see all keys.
#
# A program waits for its turn
# ----------------------------
#
# How does a program know that its turn has come? Here is a small kernel in plain Triton, for one
# head without a mask. Each of its programs owns 64 keys, and in step ``i`` it meets a tile of 64
# queries. ``lse`` comes from the forward pass, and ``delta``, the row sums of ``dO`` times ``O``,
# is computed beforehand. Each row of ``s`` belongs to a key, and each column to a query:
#
# .. literalinclude:: /../src/kernelbook/small/attention_hopper_backward.py
#    :pyobject: sweep_in_turn_kernel
#    :start-at: s = tl.dot
#    :end-before: # -- wait
#    :dedent:
#
# ``dk`` is multiplied by the scale once, after the loop. To add its part, the program needs a sign
# from the one before it. So each program has a *counter* in memory, which starts at 0 and says how
# many steps that program has added:
#
# .. literalinclude:: /../src/kernelbook/small/attention_hopper_backward.py
#    :pyobject: sweep_in_turn_kernel
#    :start-at: # -- wait
#    :end-before: tl.store(dk_ptr
#    :dedent:
#
# - ``atomic_add`` of 0 *reads* a counter. With ``"acquire"``, all loads below see what the other
#   program stored before it wrote.
# - ``atomic_xchg`` *writes* a counter. With ``"release"``, all stores above come before it.
# - A single thread performs each atomic. The first ``debug_barrier`` holds the other threads back
#   until it has read, and the second holds it back until they have stored.
#
# But does every wait end?


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

# Folded: The small kernel whole, the same sweep in PyTorch, and both against float64
lab.together(
    lab.listing(
        {"The small kernel": sweep_in_turn_kernel, "How it is launched": sweep_in_turn}
    ),
    lab.read(
        "On an H200 it passed its test outside this record. It was not timed. The same sweep in "
        "PyTorch, `one_sweep`, is under “How this was measured”."
    ),
    lab.check("The small kernel", of_small_kernel()),
    lab.check("The sweep in PyTorch", cases_in_pytorch(), stand_in="on the CPU"),
)

# %%
# Why nobody waits for ever
# -------------------------
#
# A program that waits keeps its :term:`SM <SM>`, so a launch could stand still: all SMs might be
# taken by programs that wait for one that has not started. One assumption rules this out:
# **programs start in the order of their ids.** Program ids ascend with the keys of a head, so
#
# 1. a program waits for only one other, that of the keys before, whose id is smaller;
# 2. by the assumption, that one has started;
# 3. take, of the programs that have started and not finished, the one of the smallest id. The one
#    before it has also started, so it must have finished. Nothing holds our program up: it
#    finishes, and then the same holds for the next.
#
# So, under this assumption, the launch ends. No manual promises it. On a GPU that broke it, a
# launch could hang, but never give other bits, because no program adds before its turn. The cure
# would be to let each program draw its number from an atomic counter when it starts.

# %%
# What the order costs
# --------------------
#
# Waits that end still cost time. How much depends on which programs run together, so let us
# simulate four heads of eight tiles of keys on eight SMs. In each tick a program does one step,
# provided that the program of the keys before has done it earlier. A row is an SM, a colour is a
# head, and grey is waiting. *Full* attention has no mask; under a causal mask later keys have fewer
# steps.


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


# %%


# Drawing
def at_work(ticks):
    """The share of ticks in which an SM works."""
    worked = sum(bool(cell and cell[2]) for tick in ticks for cell in tick)
    return worked / (len(ticks) * len(ticks[0]))


SHOWN = {
    "full, one head at once": simulate(8, 4, 8, False),
    "causal, one head at once": simulate(8, 4, 8, True),
    "causal, four heads at once": simulate(8, 4, 8, True, at_once=4),
}


def least(ticks):
    """The ticks that would do if no SM ever waited."""
    worked = sum(bool(cell and cell[2]) for tick in ticks for cell in tick)
    return -(-worked // len(ticks[0]))


def schedules(axes):
    inks = ("Kernel Book", "PyTorch", "Liger", "SDPA flash")
    rows, room = 8, 3  # SMs, and what the title of the next takes
    for block, (name, ticks) in enumerate(SHOWN.items()):
        top = block * (rows + room)
        for at, tick in enumerate(ticks):
            for sm, cell in enumerate(tick):
                if cell:
                    head, _, worked = cell
                    ink = lab.colour(inks[head]) if worked else lab.colour("matmul")
                    shade = 0.85 if worked else 0.25
                    axes.barh(
                        top + sm, 1, 0.8, at, align="edge", color=ink, alpha=shade
                    )
        title = f"{name}: {len(ticks)} ticks, of at least {least(ticks)}"
        axes.text(0, top - 0.8, title, fontsize=11)
        axes.text(-0.7, top + rows / 2, "SMs", rotation=90, ha="right", va="center")
    most = max(map(len, SHOWN.values()))
    bottom = len(SHOWN) * (rows + room) - room
    axes.set(xlim=(0, most), ylim=(bottom, -2), yticks=[], xlabel="ticks")
    axes.grid(visible=False)
    axes.spines["left"].set_visible(False)


lab.sketch(
    "Four heads of eight tiles of keys on eight SMs",
    "Three schedules, one above the other. Each row is an SM, each colour a head, and grey is "
    "waiting. In full attention each SM but the first waits once, in the beginning. With a causal "
    "mask all programs of a head end together, and those of the next head wait again, each a step "
    "longer than the one before. With four heads at once there is less grey, and all is done in "
    "fewer ticks.",
    schedules,
    height=5.6,
)

# %%

# Reading
full_of = [simulate(8, n_heads, 8, False) for n_heads in (1, 4, 16, 64)]
(once,) = {len(ticks) - least(ticks) for ticks in full_of}  # the same for all
lab.read(
    f"**In full attention the order is nearly free:** it costs {once} ticks once, whatever the "
    "number of heads. The programs of the first head start a step apart, so they also end a step "
    "apart, and the next head starts in the same rhythm."
)

# %%
# **Under a causal mask every head pays again,** because all its programs end together, and those of
# the next head start together.
#
# **Heads apart win most of it back.** At the bottom, neighbouring programs belong to different
# heads, so the program that one waits for started earlier or at the same moment, and the wait is
# one tick at most. Within a head ids still ascend, as the proof demands.

# %%
# Why the order needs somebody who waits
# --------------------------------------
#
# Could a program compute while it waits? *Without* an order nobody waits: a program asks the copy
# engine to add its part, and goes on. In a *fixed* order an addition has two waits: one before it,
# for the turn, and one after it, until the sums are in memory, because only then may the counter
# say so. During both, all warps of the small kernel stand still. A second program on the same SM
# could compute, but a program of the fast kernel, which owns 128 keys, leaves no room for one:

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
for what, kib in (("in all", room), ("an SM has", capacity)):
    rows.append({"KiB, at head_dim 128": what} | {at: str(x) for at, x in kib.items()})
lab.table(
    rows, "What a program of the fast kernel holds, before it computes the part of dQ"
)

# %%
# .. admonition:: Key idea
#    :class: kb-key
#
#    Give the additions a warp of their own. That warp waits for the turn and for the sums, while
#    the warps that compute go on.
#
# A program then has three roles, which meet only at barriers and in shared memory:
#
# - a *loader* warp fills rings of queries and of the gradients ``dO``;
# - two *consumers* compute; each is a :term:`warpgroup` and owns 64 of the 128 keys;
# - an *adder* warp waits for its turn, and has the copy engine add the part to the sums.


# Drawing
def machine(axes):
    edge = "#59636e"
    role, store, far = "#eaf2fb", "#fff4e5", "#f6f8fa"
    for x, y, width, height, fill, text in (
        (0, 6, 1.8, 1.4, role, "loader\n1 warp"),
        (3.1, 6, 3.7, 1.4, role, "consumers 0 and 1\n4 warps each"),
        (8.2, 6, 1.8, 1.4, role, "adder\n1 warp"),
        (0, 3, 2.3, 1.4, store, "rings of\nQ and dO"),
        (3.1, 3, 2.1, 1.4, store, "dS of both"),
        (5.8, 3, 2.1, 1.4, store, "part of dQ"),
        (0, 0, 2.3, 1, far, "Q, dO"),
        (5.8, 0, 2.1, 1, far, "sums of dQ"),
        (8.3, 0, 1.7, 1, far, "counters"),
    ):
        axes.add_patch(Rectangle((x, y), width, height, facecolor=fill, edgecolor=edge))
        write_at(axes, (x + width / 2, y + height / 2), text)
    for start, end, ends, text, at in (
        ((3.05, 6.7), (1.85, 6.7), "->", "empty", (2.45, 7.05)),
        ((6.85, 7.0), (8.15, 7.0), "->", "full", (7.5, 7.3)),
        ((8.15, 6.4), (6.85, 6.4), "->", "empty", (7.5, 6.05)),
        ((0.7, 5.95), (0.7, 4.45), "->", "asks", (0.25, 5.2)),
        ((1.15, 1.05), (1.15, 2.95), "->", "copy engine\nloads", (2.2, 2.0)),
        ((2.0, 4.45), (3.3, 5.95), "->", "full", (2.35, 5.3)),
        ((4.0, 5.95), (4.0, 4.45), "<->", "write,\nmeet, read", (4.85, 5.2)),
        ((6.3, 5.95), (6.3, 4.45), "->", "write", (6.75, 5.2)),
        ((8.7, 5.95), (7.5, 4.45), "->", "asks", (8.5, 4.9)),
        ((6.85, 2.95), (6.85, 1.05), "->", "copy engine\nadds", (5.8, 2.0)),
        ((9.5, 5.95), (9.5, 1.05), "<->", "whose\nturn?", (8.9, 2.6)),
    ):
        arrow = {"arrowstyle": ends, "color": edge}
        axes.annotate("", xy=end, xytext=start, arrowprops=arrow)
        write_at(axes, at, text, 10, edge)
    axes.set(xlim=(-0.1, 10.1), ylim=(-0.1, 7.5))
    axes.axis("off")


lab.sketch(
    "Roles, shared memory (middle) and memory (below)",
    "Boxes. A loader of one warp asks the copy engine to fill rings of Q and dO in shared memory. "
    "Two consumers of four warps each wait until a slot is full, tell the loader when it is empty, "
    "hand dS to each other through shared memory, and write the part of dQ there. They tell an "
    "adder of one warp that it is full, and the adder tells them when it is empty. The adder asks "
    "the copy engine to add the part to the sums of dQ in memory, and reads and writes counters "
    "that say whose turn it is.",
    machine,
    height=3.8,
)

# %%
# Which tiles go through shared memory
# ------------------------------------
#
# Which tiles of a step have to go through shared memory? A matmul of Hopper takes its *right*
# operand from there and its *left* one from there or from registers. Its result is in registers,
# distributed over the threads exactly as a left operand has to be. So we compute the *transposed*
# scores :math:`K Q^\top`, and :math:`V dO^\top`. Then :math:`P^\top` and :math:`dS^\top` can serve
# as left operands where they are.

operands = [
    ("Sᵀ = K Qᵀ", "shared memory", "registers: Pᵀ"),
    ("dPᵀ = V dOᵀ", "shared memory", "registers: dSᵀ"),
    ("dV += Pᵀ dO", "registers", "registers, stays"),
    ("dK += dSᵀ Q", "registers", "registers, stays"),
    ("part of dQ = dS K", "shared memory", "registers, leaves"),
]
operands = [(one.replace(" ", "\u00a0"), *others) for one, *others in operands]
columns = ("matmul", "left operand from", "result")
lab.table(
    [dict(zip(columns, row, strict=True)) for row in operands],
    "Five matmuls; the right operand is in shared memory",
)

# %%
# **Of what a step computes, only dS must go to shared memory as an operand.** Registers hold
# :math:`dS^\top`, but the part of :math:`dQ` needs :math:`dS` on the left, and a matmul can
# transpose only what it reads from shared memory. There, the other consumer can read dS, too.

# %%
# One step, wait by wait
# ----------------------
#
# In a step every matmul needs what the one before has made. How can a consumer compute while they
# run? It *issues* a matmul, and then does work that does not need the result. It waits eight times:
# for the loader (1, 2), for its own matmuls (3, 4, 6, 8), for the other consumer (5) and for the
# adder (7).
#
# .. image:: /figures/attention-backward-step.svg
#    :alt: One step of consumer 0, and its eight waits. Four lanes, in which time runs down: adder,
#          loader and consumer 1, consumer 0, its matmuls. Consumer 0 waits for Q and lse of the
#          loader (1) and issues S, waits for dO and delta (2) and issues dP, waits for S (3) and
#          makes P while dP runs, waits for dP (4) and makes dS, issues dV and stores dS, meets
#          consumer 1 (5) while dV runs, issues the part and dK, waits for the part and dV (6) and
#          frees the slot of dO, waits until the adder has had the buffer read (7), stores its part
#          for the adder while dK runs, waits for dK (8), and frees the slot of Q. The adder adds
#          the part of the step before until after wait 7, and then waits for its turn.
#
# From here on the code is that of the fast kernel, in Gluon and for head_dim 128. Names in ``_s``
# are buffers in shared memory, and ``STAGES`` = 2 is how many slots a ring has.
#
# **Waits 1 to 3: make P, while dP runs.** In step ``i`` a consumer meets the queries ``q`` and
# their gradients ``do``, each in a slot of its ring. Its own 64 keys and values are ``k`` and
# ``v``. In the code ``s``, ``p``, ``dp`` and ``ds`` are the transposed tiles, with a row for each
# key: ``ds`` is the :math:`dS^\top` of the formulas, and ``ds_t``, further down, is :math:`dS`.
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
#    lse = lse_s.index(slot).load(query)
#    p = exp2(s * scale_log2 - lse[None, :])
#    weights = gl.convert_layout(p.to(dtype), operand, assert_trivial=True)
#    delta = delta_s.index(slot).load(query)
#
# - ``warpgroup_mma`` only issues a matmul. ``warpgroup_mma_wait(1)`` waits until at most one is
#   under way: S is there, and dP still runs while ``exp2`` makes the weights.
# - ``none`` stands where a matmul has an accumulator, because S and dP begin anew in each step.
# - ``exp2`` computes powers of 2, so ``scale_log2`` and ``lse`` hold a factor :math:`\log_2 e`. A
#   causal mask would set weights to 0 here.
# - ``query`` is the layout of one number per query, ``operand`` that of a left operand. With
#   ``assert_trivial``, no number may move to another thread.
#
# **Waits 4 and 5: exchange dS, while dV runs.** The consumer stores dS while dV runs, and then
# meets the other at a :term:`named barrier`:
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
# ``fence_async_shared`` lets matmuls see what threads have stored. Now both consumers can read the
# dS of all 128 keys. ``ds_s`` has tiles for two steps, so that a consumer can store the next dS
# while the other still reads this one.
#
# **Wait 6: compute the part of dQ.** A consumer could compute the part of its own 64 keys, but then
# every step would have two parts to add. Instead each consumer computes half of the columns, for
# the keys of both. ``half`` says whose keys and dS it reads:


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
    "Wait 6: which consumer computes which half",
    "Three matrices. dS has 64 queries and 128 keys, of which each consumer wrote 64. K has 128 "
    "keys and 128 columns, in two times two blocks: half names its rows, and a consumer reads the "
    "two blocks of its own columns. Their product is the part of dQ, of which consumer 0 computes "
    "the left columns, and consumer 1 the right ones.",
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
# The left operand of dK is ``ds``, still in registers. Wait 6 leaves only dK under way. As dV has
# ended, the loader may fill the slot of dO again.
#
# **Waits 7 and 8: hand the part over, while dK runs.** As soon as the adder's buffer is empty (7),
# the consumer stores its half of the part. The step ends when dK is there (8):
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
#    A consumer that stores dS in step :math:`t` has met the other in step :math:`t - 1`, and by
#    then the other had finished the matmuls of step :math:`t - 2`, which read the same tile of
#    ``ds_s``.

# %%
# How the adder keeps the order
# -----------------------------
#
# Only the *adder* waits for another program, in the order of the small kernel, so the proof that
# nobody waits for ever still holds. What must the adder say, and when? The consumers can have their
# buffer back as soon as the copy engine has *read* the part. The next program has to wait until the
# engine has *completed* the addition:


# Drawing
def one_addition(axes):
    edge = "#59636e"
    adds, engine, other = "#fff4e5", "#eaf2fb", "#f6f8fa"
    for left, low, width, fill, text in (
        (0, 4, 9.9, other, "consumers"),
        (0, 2, 1.7, adds, "adder\ntma_add"),
        (3.0, 2, 2.1, adds, "adder\nstore_wait"),
        (6.6, 2, 2.1, adds, "adder\nannounce"),
        (1.1, 0, 2.6, engine, "engine reads\nthe part"),
        (3.7, 0, 3.4, engine, "engine adds it\nto the sums"),
        (7.7, 0, 2.2, other, "next\nprogram"),
    ):
        height = 0.7 if text == "consumers" else 1.1
        box = Rectangle((left, low), width, height, facecolor=fill, edgecolor=edge)
        axes.add_patch(box)
        write_at(axes, (left + width / 2, low + height / 2), text, 10.5)
    for begin, end, text, at in (
        ((0.8, 4), (0.8, 3.15), "part_full", (1.0, 3.55)),
        ((1.4, 2), (1.4, 1.15), "asks", (1.55, 1.55)),
        ((3.7, 1.1), (3.7, 1.95), "has read", (3.85, 1.55)),
        ((4.1, 3.1), (4.1, 3.95), "part_empty", (4.3, 3.55)),
        ((7.0, 1.1), (7.0, 1.95), "", (0, 0)),
        ((8.3, 2), (8.3, 1.15), "counter", (8.45, 1.55)),
    ):
        arrow = {"arrowstyle": "->", "color": edge}
        axes.annotate("", xy=end, xytext=begin, arrowprops=arrow)
        axes.text(*at, text, ha="left", va="center", fontsize=10.5, color=edge)
    axes.text(
        6.85, 1.55, "completed", ha="right", va="center", fontsize=10.5, color=edge
    )
    axes.text(4.95, -0.5, "time →, not to scale", ha="center", va="center", color=edge)
    axes.set(xlim=(-0.1, 10), ylim=(-0.8, 4.8))
    axes.axis("off")


lab.sketch(
    "One addition, and what the adder says when",
    "Time runs to the right. Consumers say that the part is full, and the adder asks the copy "
    "engine to add it. When the engine has read the part, the adder says to the consumers that it "
    "is empty. When the engine has completed the addition to the sums, which is later, the adder "
    "announces it to the next program by the counter.",
    one_addition,
    height=2.9,
)

# %%
# In code, the adder waits for the program of the keys before, unless its own keys are the first of
# a head (``start_n`` = 0), and then for both halves of the part. ``row`` is where the queries of
# step ``i`` lie in the sums.
#
# .. code-block:: python
#
#    position = 0  # how many steps the program of the keys before is known to have done
#    for i in range(steps):
#        row = row_of_head + (n_tiles - 1 - i) * BLOCK_M
#        if start_n > 0:
#            while position < i + 1:
#                position = position_of(counter_ptr - 1)
#        for half in gl.static_range(2):
#            mbarrier.wait(part_full.index(half), i & 1)
#        for half in gl.static_range(2):
#            tma_add(sums_desc, [row, half * 64], parts.index(half))
#        tma.store_wait(0)
#        for half in gl.static_range(2):
#            mbarrier.arrive(part_empty.index(half))
#        announce(counter_ptr, i + 1)
#
# ``tma_add`` asks the copy engine to add half a part to the sums, and ``tma.store_wait(0)`` waits
# until the engine has *read* both. The counter must promise more, and Triton's atomics order only
# what threads store, while here the engine adds. So ``announce`` waits until the engine has
# *completed* the additions and then writes the counter, in four instructions of :term:`PTX`.
#
# .. dropdown:: The four instructions, and those of the reader
#
#    .. literalinclude:: /../src/kernelbook/ops/hopper/backward.py
#       :pyobject: announce
#
#    ``$1`` is the address of the counter, ``$2`` is ``position``, and ``$0`` a result that Triton
#    demands.
#
#    1. ``cp.async.bulk.wait_group 0`` waits until the engine has *completed* the additions.
#    2. ``fence.proxy.async.global`` puts what the engine did before what the thread does next.
#    3. ``bar.warp.sync`` holds back the other lanes of the warp, because only the lane that asked
#       for the additions has waited for them.
#    4. ``st.release.gpu`` writes the counter.
#
#    The reader does the same backwards:
#
#    .. literalinclude:: /../src/kernelbook/ops/hopper/backward.py
#       :pyobject: position_of
#
#    ``ld.acquire.gpu`` is the other end of the release. ``redux.sync.min`` gives all 32 lanes the
#    smallest count that one of them read, and the fence puts what they saw before the additions
#    that this program's engine makes next.

# Whole: each change a switch, and how the ladder was measured
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
# The same bits in every run
# --------------------------
#
# On Hopper, in 16 bits, the package's version of this kernel is the backward pass of ``attention(q,
# k, v)`` for most shapes.

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

# Reading
right = lab.check(
    "The package's kernel", every_case(), stand_in="with PyTorch's sweep in its place"
)
said = right.plain.split("\n")[0].partition(": ")[2].split(";")[0].rstrip(".")
lab.read(
    "**It is right.** Over odd lengths, grouped heads, causal masks and windows, with a fixed "
    "order and without one, its bfloat16 gradients were compared with a float64 reference: "
    f"{said}."
)

# %%

# Folded: Which kernel runs when, and every check
lab.together(
    lab.table(rows, "What attention(...).backward runs on a Hopper GPU, by length"),
    lab.read(
        "Two sweeps also run on other GPUs, and where not all three gradients are asked for. "
        '`backend="triton"` asks for two sweeps. `backend="gluon"` insists on Gluon, and raises an '
        "error where that cannot run. Plain Triton's single sweep runs only with "
        '`deterministic=False` together with `backend="triton"`, because it is slower than two '
        "sweeps. The kernel was run under Triton 3.6 and 3.9; under 3.7 and 3.8 it compiles, "
        "but was not run."
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
)

# %%
# **Are they the same bits?** One input is launched again and again while other work keeps the GPU
# busy, so that programs start at different times. The table counts the launches in which a bit
# differs from the first.


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
again

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
ended = soaked.rows[0] if soaked.rows else {}
lab.read(
    "**In a fixed order no bit differs.** Without an order "
    + (
        "`dq` differs in every launch"
        if set(of_free) == {launched}
        else f"`dq` differs in {of_free[0]:,.0f} launches without a mask and in {of_free[1]:,.0f} "
        "with a causal one"
    )
    + "; `dk` and `dv` do not, because only one program adds to them. "
    f"And {ended.get('finished', nan):,.0f} launches of random shapes in a fixed order all ended."
)

# %%
# .. dropdown:: The package's kernel whole, and what compute-sanitizer says
#
#    .. literalinclude:: /../src/kernelbook/ops/hopper/backward.py
#       :pyobject: position_of
#
#    .. literalinclude:: /../src/kernelbook/ops/hopper/backward.py
#       :pyobject: load
#
#    .. literalinclude:: /../src/kernelbook/ops/hopper/backward.py
#       :pyobject: add
#
#    .. literalinclude:: /../src/kernelbook/ops/hopper/backward.py
#       :pyobject: consume
#
#    .. literalinclude:: /../src/kernelbook/ops/hopper/backward.py
#       :pyobject: attention_hopper_bwd_kernel
#
#    Every tenth launch of the random shapes was compared with plain Triton, and agreed.
#
#    NVIDIA's compute-sanitizer found no access out of bounds in these kernels, but its search for
#    races cannot judge warps with roles: it missed a race of two roles that we had planted, and
#    took an exchange that an mbarrier orders for one.

# %%
# What each change is worth
# -------------------------
#
# Does one sweep pay? The two upper bars are for comparison. The ladder begins at “one sweep with
# roles”, where the consumers themselves ask the copy engine to add, and then adds one change after
# the other. With “a fixed order” tiles of 4 heads alternate, whose 4 · 32 tiles nearly fill the 132
# SMs. Under a causal mask “heads apart” has 16 heads, about as many as the rungs without an order.
# “Kernel Book” is the package's kernel. All are credited with five matmuls, even two sweeps, so a
# longer bar is a shorter time.

# Measuring
SCATTER = 0.02  # of one kernel that the page times twice: the section on speed has it
NO_DIFFERENCE = "makes no difference"


def verdict(change):
    """What a change of the speed is called, if it is more than scatter."""
    if change != change:
        return f"{nan}"
    if abs(change) < SCATTER:
        return NO_DIFFERENCE
    return f"{'gains' if change > 0 else 'loses'} {100 * abs(change):.0f} %"


def gain(name, mask, before):
    return steps.rate(name, mask=mask) / steps.rate(before, mask=mask) - 1


def before(name):
    """The rung before."""
    names = ["two sweeps", *LADDER]
    return names[names.index(name) - 1]


def told(name, than=None):
    """What a rung gains over the one before, or over another, in words."""
    causal, full = (
        verdict(gain(name, mask, than or before(name))) for mask in ("causal", "full")
    )
    if causal == full:
        return f"{full} with and without a mask"
    for verb in ("gains ", "loses "):
        if causal.startswith(verb):
            full = full.removeprefix(verb)
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


# %%


# Drawing
ANY_ORDER = {"one sweep, plain Triton": "plain Triton, no order"}


def with_its_order(sweep):
    """A sweep whose one sweep in plain Triton says in which order it adds."""
    names = {name: ANY_ORDER.get(name, name) for name in sweep.milliseconds}
    return replace(
        sweep,
        providers=[names.get(name, name) for name in sweep.providers],
        milliseconds={names[name]: ms for name, ms in sweep.milliseconds.items()},
        elsewhere=[with_its_order(other) for other in sweep.elsewhere],
    )


lab.ladder(
    with_its_order(steps),
    "From two sweeps to one in a fixed order, head_dim 128",
    ["two sweeps", *ANY_ORDER.values(), *LADDER, "Kernel Book"],
    by="mask",
    where={"seqlen": 4096},
)

# %%

# Measuring
WHAT_IS_NEW = {
    "one sweep with roles": ("two sweeps", "roles, against two sweeps"),
    "half the columns": ("one sweep with roles", "one part a step, not two"),
    "overlap": ("half the columns", "matmuls ahead, as in the code above"),
    "an adder": ("overlap", "a warp adds, without an order"),
    "a fixed order": ("an adder", "the adder waits for its turn"),
    "heads apart": ("a fixed order", "tiles of more heads alternate"),
    "Kernel Book": ("heads apart", "any length; first part written"),
}
lab.table(
    [
        {"rung": rung, "what is new": what_is_new}
        | {
            column: verdict(gain(rung, mask, other))
            .replace(NO_DIFFERENCE, "±0")
            .replace("gains ", "+")
            .replace("loses ", "−")
            for column, mask in (("full", "full"), ("causal", "causal"))
        }
        for rung, (other, what_is_new) in WHAT_IS_NEW.items()
        if steps.rows
    ],
    f"Gain over the rung before; ±0 is less than {100 * SCATTER:.0f} %",
)

# %%

# Reading
in_triton, with_roles = (
    [gain(name, mask, "two sweeps") for mask in ("full", "causal")]
    for name in ("one sweep, plain Triton", "one sweep with roles")
)
lab.read(
    (
        "**One sweep catches up with two** on the first rung, while in plain Triton it reaches "
        f"only {100 * steps.share('one sweep, plain Triton', mask='full'):.0f} % of a matmul's "
        "speed in full attention. These two single sweeps differ in language, tiles and "
        "operands, too. "
        if max(in_triton) < -SCATTER < min(with_roles)
        else f"One sweep with roles {told('one sweep with roles')} over two sweeps. "
    )
    + (
        f"An adder by itself {NO_DIFFERENCE}: it has no turn to wait for yet."
        if told("an adder").startswith(NO_DIFFERENCE)
        else f"An adder by itself {told('an adder')}."
    )
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
lab.read(
    (
        "**The simulation is right about the pattern, not the size.** For this run it foretells a "
        f"causal sweep {100 * longer:.0f} % longer than without waits, but a real program goes on "
        "computing while its adder waits. "
        if as_simulated
        else ""
    )
    + f"In full attention the order {verdict(gain('a fixed order', 'full', 'an adder'))}. Under a "
    f"causal mask it {verdict(gain('a fixed order', 'causal', 'an adder'))}, and with heads apart "
    f"it {verdict(gain('heads apart', 'causal', 'a fixed order'))}. "
    + (
        "**So here the same bits cost nothing in the end:** “heads apart” is as fast as “an "
        "adder”, which has no order."
        if min(cost) >= -SCATTER
        else f"With heads apart the order still {verdict(min(cost))}. "
    )
)

# %%


# Measuring
def of_waits(column, heads, mask="causal"):
    rows = [r for r in waited.rows if (r["mask"], r["heads"]) == (mask, f"× {heads}")]
    return rows[0].get(column, nan) if rows else nan


def of_heads(times, seqlen, than=1):
    """What so many times as many heads as fill the GPU gain over another number of them."""
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
        "**The simulation** of this run has its 64 heads, of which 4 alternate, and 132 SMs. A "
        "simulated program does nothing while it waits."
    ),
    lab.read(
        f"**More heads.** At 16,384, ×\u00a04 {of_heads(4, 16384)} against ×\u00a01, and ×\u00a08 "
        f"{of_heads(8, 16384, than=4)} against ×\u00a04; at 4,096 ×\u00a08 "
        f"{of_heads(8, 4096, than=4)}. The package takes ×\u00a04 for both"
        + (", and so misses some speed at 16,384. " if more > 1 + SCATTER else ". ")
        + "Without an order, as many heads alternate as half of L2 holds the operands of."
    ),
    lab.read(
        "**One more rung, at head_dim 64.** A tile there has 128 queries, and registers are full "
        "again, so the package reads `lse` and `delta` after the matmul and not during it. "
        f"At length 16,384, reading them late {change('full')} without a mask and "
        f"{change('causal')} with a causal one. There, spilled registers go from "
        f"{spills_of('causal', 'read early'):.0f} to {spills_of('causal', 'read late'):.0f}."
    ),
    lab.attempt(
        "The worst gradient of each version, bfloat16, lengths 128 to 1,152, against float64",
        worst_of_each if HOPPER else NEEDS_HOPPER,
    ),
)
# %%
# What keeps one sweep from 1.4
# -----------------------------
#
# One sweep would be 1.4 times as fast as two if each of its matmuls took as long. So let us credit
# two sweeps with the seven matmuls that they really compute.

# Measuring
MATMULS = {"two sweeps": 7, "Kernel Book": 5}
of_its_own = {
    name: 100 * steps.share(name, mask="full") * n / 5 for name, n in MATMULS.items()
}

# %%

# Reading
faster, when_causal = (
    1 + gain("Kernel Book", mask, "two sweeps") for mask in ("full", "causal")
)
dearer = of_its_own["two sweeps"] / of_its_own["Kernel Book"]
lab.read(
    "**In full attention of length 4,096, two sweeps run their seven matmuls at "
    f"{of_its_own['two sweeps']:.0f} % of a matmul's speed, and one sweep its five at "
    f"{of_its_own['Kernel Book']:.0f} %.** So each matmul takes {dearer:.2f} times as long in one "
    f"sweep, and one sweep is 1.4 / {dearer:.2f} = {faster:.2f} times as fast. Under a causal "
    f"mask it is {when_causal:.2f} times as fast. The suspect is the shared sum, because two "
    "sweeps keep every gradient in registers."
)

# %%
# Let us count what a step needs at head_dim 128:
#
# - **Matmul units.** Five matmuls are :math:`5 \cdot 2 \cdot 64 \cdot 128 \cdot 128` operations, of
#   which an SM does 4,096 per cycle: 2,560 cycles.
# - **Shared memory** delivers or takes 128 bytes per cycle. The matmuls of each consumer read eight
#   operands of 64 × 128 numbers from it: two each for S, dP and the part, and one each for dV and
#   dK. The table adds what else a step moves.

# Whole: nothing but matmuls and stores, and how it was measured
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
lab.table(
    [
        {"what": what, "KiB": f"{kib:.0f}", "cycles": f"{kib * KIB / 128:,.0f}"}
        for what, kib in moved_kib.items()
    ],
    "What a step moves through shared memory, counted",
)

# %%

# Reading
ideal, bound = counted(whole_step)  # cycles of the matmul units, and of shared memory
without_sum = moved_kib["without the sum"] * KIB / 128
assert without_sum < ideal < bound
lab.read(
    "**The sum makes shared memory slower than the matmul units.** With it, a step "
    f"takes at least {bound:,.0f} cycles and not {ideal:,.0f}."
)

# %%

# Drawing
mean_step = of_waits("cycles of a program", 1, "full") / (4096 // QUERIES)
BARS = {  # cycles of a step, and how they are drawn
    "matmul units, counted": (counted("all five")[0], "counted"),
    "five matmuls alone": (cycles("all five"), "tried"),
    "shared memory, counted": (counted(whole_step)[1], "counted"),
    "matmuls and stores alone": (cycles(whole_step), "tried"),
    "additions alone": (cycles("all SMs add parts"), "tried"),
    "a step, in a fixed order": (mean_step, "step"),
}


def bars_in_words(_):
    return ". ".join(
        f"{what}: {found:,.0f} cycles" for what, (found, _) in BARS.items()
    )


def bars_of_a_step(axes, _):
    looks = {
        "counted": {"color": lab.colour("matmul"), "alpha": 0.35},
        "tried": {"color": lab.colour("matmul")},
        "step": {"color": lab.colour("Kernel Book")},
    }
    for at, (found, look) in enumerate(BARS.values()):
        axes.barh(at, found, 0.66, **looks[look])
        axes.text(found + 40, at, f"{found:,.0f}", va="center", fontsize=10)
    axes.set_yticks(range(len(BARS)), BARS)
    axes.set(xlim=(0, 1.15 * mean_step), xlabel="cycles of a step")
    axes.grid(axis="y", visible=False)
    axes.invert_yaxis()


# %%

# Reading
needed = cycles(whole_step)
off = 100 * max(needed / bound - 1, cycles("all five") / ideal - 1)
lab.read(
    f"**The count is right** to {off:.0f} %. A kernel of nothing but the five matmuls takes "
    f"{cycles('all five'):,.0f} cycles for each step, and {needed:,.0f} if it also stores as many "
    "bytes as a step moves besides its operands. In the sweep itself, on the rung “a fixed order”, "
    f"a step takes {mean_step:,.0f} cycles, in which the matmul units reach "
    f"{100 * ideal / mean_step:.0f} % of their peak. Where do the other cycles go?"
)

# %%

# Folded: All experiments with matmuls and additions
lab.draw(
    by_part,
    "Cycles of a step at head_dim 128, full",
    bars_in_words,
    bars_of_a_step,
)
by_part

# %%
# Who waits for whom
# ------------------
#
# Consumers and adder write down the cycle counter of their SM (a *stamp*) as they go. The figure
# shows two steps of one program on the rung “a fixed order”. A box holds a wait and the work beside
# it: “1–3” ends when S is there, “4” makes P, waits for dP and makes dS, “5” is the exchange, “6”
# ends when the part is computed, and “7” waits for the buffer and stores the part. The gap behind
# 7 is wait 8. The first row is counted: after wait 3 of both consumers only dP is under
# way, and after wait 6 only dK, each for 512 cycles. Then the matmul units have nothing to do until
# a consumer issues the next matmul.


# Drawing
PIECES = {  # from one point to another, what is written there, and the fill
    "consumers": [
        ("begins", "scores", "1–3", "#eaf2fb"),
        ("scores", "dS", "4", "#eaf2fb"),
        ("dS", "met", "5", "#eaf2fb"),
        ("met", "matmuls", "6", "#eaf2fb"),
        ("matmuls", "handed over", "7", "#eaf2fb"),
    ],
    "adder": [
        ("asks", "its turn", "turn", "#f6f8fa"),
        ("its turn", "added", "adds", "#fff4e5"),
    ],
}
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


def drawn_from(rows):
    """When the steps drawn begin and end: the adder's first comes too late, so not the first."""
    stamped = in_step(rows)
    return (min(one["begins"] for one in stamped[at]) for at in (1, 3))


def timelines(axes, rows):
    since, until = drawn_from(rows)
    edge, ink = "#59636e", lab.colour("PyTorch")
    at_work = {"color": lab.colour("matmul"), "alpha": 0.35}
    axes.barh(0, until - since, 0.7, label="may have work", **at_work)
    axes.barh(0, 0, color=ink, label="have no work, by count")
    for begin, end in sum(pauses(rows)[1:3], []):
        axes.barh(0, end - begin, 0.7, begin - since, color=ink)
    for at, role in enumerate(ROLES, 1):
        for row in rows_of(rows, role):
            for a, b, text, fill in PIECES[ROLE_OF[role]]:
                begin, end = max(row[a], since) - since, min(row[b], until) - since
                if end > begin:
                    look = {"color": fill, "edgecolor": edge, "linewidth": 0.8}
                    axes.barh(at, end - begin, 0.7, begin, **look)
                if end - begin > 200:
                    middle = {"ha": "center", "va": "center", "fontsize": 10}
                    axes.text((begin + end) / 2, at, text, **middle)
    axes.set(xlim=(0, until - since), xlabel="cycles of the SM")
    axes.set_yticks(range(len(ROLES) + 1), ["matmul units", *ROLES])
    axes.invert_yaxis()
    axes.grid(axis="x", visible=True)


def cycles_a_step(rows, version=TRACED[1]):
    """Cycles from one step to the next of a consumer, over the span that was traced."""
    own = rows_of(rows, version=version)
    return (own[-1]["begins"] - own[0]["begins"]) / (len(own) - 1) if own else nan


def spent(rows, a, b, role="consumer 0", version=TRACED[1]):
    """Cycles of a step that a role spends between two points."""
    own = rows_of(rows, role, version)
    return sum(r[b] - r[a] for r in own) / len(own) if own else nan


def paused(rows):
    """How long the matmul units have no work, in a step of those drawn: at dS, and at the part."""
    found = pauses(rows)[1:3]
    return [
        sum(of_step[which][1] - of_step[which][0] for of_step in found) / len(found)
        if found
        else nan
        for which in (0, 1)
    ]


def in_words(rows):
    at_ds, at_part = paused(rows)
    return (
        "Timelines of the matmul units, two consumers and an adder. In each step the units have no "
        f"work for {at_ds:,.0f} cycles while both consumers make dS, and for {at_part:,.0f} while "
        "both hand their part over. The adder waits for its turn and adds, without a gap."
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
at_ds, at_part = paused(traced.rows)
since, until = drawn_from(traced.rows) if traced.rows else (nan, nan)
lab.draw(traced, "Two steps of one program, in a fixed order", in_words, timelines)

# %%

# Reading
lags = [abs(one["dS"] - other["dS"]) for one, other in in_step(traced.rows)]
lag = sum(lags) / len(lags) if lags else nan
lab.read(
    f"**Twice in each step the matmul units run out of work:** for {at_ds:,.0f} cycles while both "
    f"consumers make dS (4), and for {at_part:,.0f} while both hand the part over (7). Both make "
    f"dS at the same time, within {lag:.0f} cycles, because they meet in every step to exchange it "
    f"(5). These steps are examples: those of this program take {a_step:,.0f} cycles on "
    f"average, and those of all tiles {mean_step:,.0f}."
)

# %%

# Reading
handed_over = of_waits("consumer hands over, %", 1, "full") / 100 * mean_step
to_store = BESIDE[1] / 2 * KIB / 128
asked = zip(in_step(traced.rows), rows_of(traced.rows, "adder"), strict=True)
ready = [max(one["handed over"] for one in both) <= row["asks"] for both, row in asked]
no_order = verdict(gain("a fixed order", "full", "an adder")) == NO_DIFFERENCE
lab.read(
    "**At wait 7 the consumers wait for the adder.** Storing a part keeps shared memory busy for "
    f"{to_store:.0f} cycles, but handing it over takes {handed_over:,.0f} on average over all "
    "tiles, because the buffer still holds the part before. "
    + (
        "The adder has no time to spare: every part of the figure was ready before the adder even "
        "asked for its turn. So a second buffer should not help. "
        if all(ready)
        else ""
    )
    + "The addition itself is slow: in a test where all SMs do nothing but add, one part takes "
    f"{cycles('all SMs add parts'):,.0f} cycles. "
    + (
        "An adder without an order, which waits for no turn, is still no faster on the ladder; "
        "why, we did not trace."
        if no_order
        else ""
    )
)

# %%

# Reading
lab.read(
    "**So one sweep pays for its shared sum twice:** the consumers meet to compute the part, and "
    f"wait to have it added. The two pauses are {at_ds + at_part:,.0f} of the "
    f"{(until - since) / 2 - ideal:,.0f} cycles that a step of the figure takes beyond its "
    "matmuls."
)

# %%

# Folded: What one traced program does not tell
steps_drawn = [
    after["begins"] - row["begins"]
    for row, after in zip(rows_of(traced.rows), rows_of(traced.rows)[1:], strict=False)
]
lab.together(
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
        "The program drawn, as a mean of all its steps traced, and the mean over programs from "
        "all tiles",
    ),
    lab.read(
        "In the figure “adds” begins with two barriers at which the part is ready; to check them, "
        f"and to stamp, takes {spent(traced.rows, 'its turn', 'has parts', 'adder'):,.0f} cycles. "
        f"An addition takes {spent(traced.rows, 'has parts', 'added', 'adder'):,.0f} cycles there, "
        f"between the {cycles('one SM adds a part'):,.0f} of one SM alone and the "
        f"{cycles('all SMs add parts'):,.0f} of all SMs without a pause. Stores and copies can "
        "delay a matmul, and then a pause is shorter than counted. Of the "
        f"{len(steps_drawn)} steps behind the mean of this program, one takes "
        f"{max(steps_drawn, default=nan):,.0f} cycles. What the stamps cost was not measured. "
        "Nor does one program rank rungs: a step of "
        f"“{TRACED[0]}”, which is the slower rung, takes {step_alone:,.0f}. A fixed order without "
        "an adder, in which consumers wait for their turn themselves, was not timed."
    ),
    lab.read(
        "**Two peaks.** On the ladder “a fixed order” has "
        f"{100 * steps.share('a fixed order', mask='full'):.0f} % and not "
        f"{100 * ideal / mean_step:.0f} %, because there 100 % is the matmul of cuBLAS, which "
        "itself stays below the peak of the matmul units."
    ),
)

# %%
# Against the libraries
# ---------------------
#
# We compare with cuDNN, through PyTorch's SDPA, and with FlashAttention 4, which adds without an
# order, except in its deterministic mode.

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
def shares_at(head_dim):
    rows = [row for row in at_points if row["head_dim"] == head_dim]
    found = [100 * row["by default"] / row["its speed"] for row in rows]
    return f"{min(found):.0f} to {max(found):.0f} %"


def counts(one, other):
    """Whether one speed is above another by more than scatter."""
    return one > (1 + SCATTER) * other


ahead = [row for row in at_points if counts(row["in order"], row["two sweeps"])]
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
    "the default, against FlashAttention, deterministic": ("by default", FIXED_MODE),
    "the default, against the fastest library": ("by default", "its speed"),
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
    found = [f"{r['head_dim']}, {r['mask']}, {r['length']:,}" for r in rows]
    return f"head_dim {' and '.join(found)}" if 0 < len(found) < 4 else ""


def at_most(rows, one, other):
    """Where the first speed is the smallest share of the second, in words."""
    if not rows:
        return ""
    worst = min(rows, key=lambda row: row[one] / row[other])
    share = 100 * worst[one] / worst[other]
    return f", where the default has at least {share:.0f} % of its speed ({named([worst])})"


def points_of(rows):
    points_in_all = "1 point" if len(rows) == 1 else f"{len(rows)} points"
    return points_in_all + (f" ({named(rows)})" if named(rows) else "")


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
of_two_sweeps = [
    f"{head_dim}, {mask}, {seqlen:,}"
    for head_dim in (128, 64)
    for mask in ("full", "causal")
    for seqlen in LENGTHS
    if chosen(head_dim, mask, seqlen, deterministic=True) == "two sweeps"
]
fastest_is = [row["library"] for row in at_points]
by_mode = {
    FIXED_MODE: "its deterministic mode",
    FIXED: "its deterministic mode",
}
lab.read(
    "“Kernel Book” is the package's default: one sweep in order, except at head_dim "
    f"{' and '.join(of_two_sweeps)}, where it is two. The dashed line, 100 %, "
    "is the fastest library of each row: "
    + ", ".join(
        f"{by_mode.get(name, name)} in {fastest_is.count(name)}"
        for name in sorted(set(fastest_is), key=fastest_is.count, reverse=True)
    )
    + f" of {len(at_points)} rows."
    if speed.rows
    else f"{nan}"
)

# %%


# Drawing
SEEN = {  # how each is drawn
    "two sweeps": {"marker": "v", "s": 34},
    FIXED: {"marker": "D", "s": 34},
    "Kernel Book": {"marker": "o", "s": 64, "zorder": 3},
}


def of_the_fastest(rows):
    """The share of the fastest library that each has, by point."""
    found = {}
    for row in rows:
        at = f"{row['head_dim']}, {row['mask']}, {row['seqlen']:,}"
        found.setdefault(at, {})[row["provider"]] = row["rate"]
    kept = {}
    for point in points(LENGTHS, (128, 64)):
        at = f"{point['head_dim']}, {point['mask']}, {point['seqlen']:,}"
        rates = found.get(at, {})
        best = max((rates.get(name, 0) for name in (*PEERS, FIXED)), default=0)
        if best:
            kept[at] = {n: 100 * rates[n] / best for n in SEEN if n in rates}
    return kept


def against_in_words(rows):
    told_at = [
        f"{at}: " + ", ".join(f"{name} {share:.0f}" for name, share in has.items())
        for at, has in of_the_fastest(rows).items()
    ]
    return "Marks in rows, % of the fastest library. " + "; ".join(told_at) + "."


def against_the_fastest(axes, rows):
    drawn_at = of_the_fastest(rows)
    for name, look in SEEN.items():
        own = [(has[name], y) for y, has in enumerate(drawn_at.values()) if name in has]
        xs, ys = zip(*own, strict=True) if own else ((), ())
        axes.scatter(xs, ys, color=lab.colour(name), label=name, **look)
    axes.axvline(100, color="#59636e", linestyle="--", linewidth=1)
    axes.set_yticks(range(len(drawn_at)), drawn_at)
    axes.set(xlabel="% of the speed of the fastest library")
    axes.set_xlim(min(60, axes.get_xlim()[0]), 102)
    axes.grid(axis="both", visible=True)
    axes.invert_yaxis()


lab.draw(
    speed,
    "Backward of 16,384 tokens: head_dim, mask, length",
    against_in_words,
    against_the_fastest,
)

# %%

# Reading
lab.read(
    f"**A library is faster at {everywhere} {len(at_points)} points:** Kernel Book has "
    f"{shares_at(128)} of its speed at head_dim 128, and {shares_at(64)} at head_dim 64."
    if speed.rows
    else f"{nan}"
)

# %%

# Reading
lab.read(
    "**Giving up the order seldom pays in this package.** It makes the sweep faster at "
    f"{verdicts[1]['faster']} of {len(at_points)} points and slower at {verdicts[1]['slower']}; "
    "the fold below has two possible reasons."
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


# Folded: All points in TFLOP/s, why 2 % is no difference, and what was tried without a gain
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
        f"At how many of {len(at_points)} points one is faster, by {100 * SCATTER:.0f} % or more",
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
        "TFLOP/s of our ways, of FlashAttention's deterministic mode, and of the fastest library",
    ),
    lab.read(
        f"**Against two sweeps,** one sweep in order is slower at {points_of(slower)}."
        if speed.rows
        else f"{nan}"
    ),
    lab.read(
        "**Without an order.** `deterministic=False` gives the order up only at "
        f"{len(dropped)} points, where it gains at {len(won_by_it)} and loses at "
        f"{len(lost_by_it)}. The order costs most at {named([dearest])}. Elsewhere the kernel "
        f"without an order is slower by up to {-100 * min(without):.0f} %. One reason is probably "
        "that only a fixed order knows which part comes first, and writes it; without an order the "
        "sums have to be set to zero before. The two also alternate different numbers of heads, "
        "and neither reason was timed by itself."
        if speed.rows
        else f"{nan}"
    ),
    lab.read(
        "**At which points** (head_dim, mask, length). FlashAttention's deterministic mode is "
        f"faster than the default at {points_of(below_theirs)}"
        f"{at_most(below_theirs, 'by default', FIXED_MODE)}, and slower at "
        f"{points_of(over_theirs)}. **Why less than {100 * SCATTER:.0f} % is no "
        "difference.** The default is timed under two names, and at "
        f"{close} of {len(twice)} points the two times are nearer than that. The same kernel in "
        f"two figures is up to {100 * abs(between):.0f} % apart, so we compare only within one. "
        + (f"Absent from this run: {', '.join(absent)}." if absent else "")
        if speed.rows
        else f"{nan}"
    ),
    lab.read(
        f"**Head_dim 64, causal.** One sweep in order has {min(behind_at_64):.0f} to "
        f"{max(behind_at_64):.0f} % of the fastest library's speed. There a matmul for a query and "
        "a key is half as long as at head_dim 128, while P and dS are as much work. Tiles of 128 "
        "by 128 also compute more pairs at the diagonal that nobody needs. What each of these "
        "costs was not measured."
    ),
    lab.read(
        "**Around the sweep.** A kernel before the sweep computes `delta`, and one after it "
        "converts `dQ` to 16 bits. At head_dim 128 without a mask they take "
        f"{share_around(1024):.0f} % of the time at length 1,024 and {share_around(16384):.1f} % "
        "at 16,384."
    ),
    lab.read(
        "**Tried without a gain,** in runs that no record holds: scores and dP of the next step "
        "issued ahead, an adder that asks early, and weights made before the wait for dP."
    ),
)

# %%
# What breaks it
# --------------
#
# **Starting from the wrong end.** If program ids descend with the keys, and a head has more tiles
# of keys than there are SMs, the programs that run wait for one that cannot start:

machine_and_heads = {"n_tiles": 8, "n_heads": 3, "n_sms": 4, "is_causal": False}
assert simulate(**machine_and_heads)  # ids ascend with the keys: the launch ends
assert not simulate(**machine_and_heads, backwards=True)  # ids descend: it stands still

# %%
# **Trusting that zeros stay zeros.** Beyond the last key, the copy engine fills a tile with zeros.
# So a key that is not there has the score 0 and the weight :math:`e^{0 - \mathrm{lse}}`, which is
# multiplied by zeros. But if lse is below about −88.7, the weight overflows to infinity in float32,
# and infinity times zero is not a number:

lse = torch.tensor([-5.0, -50.0, -100.0])  # of three queries
weight = (0.0 - lse).exp()  # of a key that is not there
not_masked = weight * 0.0  # dS, infinite like the weight, times the key's zeros
masked = torch.where(torch.tensor(False), weight, 0.0) * 0.0  # as the kernel has it

# %%

# Measuring
rows = []
for name, part in {"wrong: not masked": not_masked, "right: masked": masked}.items():
    row = {"keys that are not there": name}
    rows.append(
        row | {f"lse {x:.0f}": f"adds {y:.0f}" for x, y in zip(lse, part, strict=True)}
    )
assert [row["lse -100"] for row in rows] == ["adds nan", "adds 0"]
lab.table(rows, "What a key that is not there adds to dq")

# %%
# In short
# --------
#
# - **The same bits** come from taking turns: a program adds to the shared sum when the counter of
#   the one before says so. All waits end, if programs start in the order of their ids.
# - **The order is nearly free** where a warp of its own waits, and neighbouring programs belong to
#   different heads.

# %%

# Reading
lab.read(
    f"**One sweep is faster than two at {verdicts[0]['faster']} of {len(at_points)} points,** but "
    "by less than 7/5. Its shared sum needs more of shared memory, an addition, and a meeting of "
    "the consumers in every step; these explain part of the gap, and not all of it. The fastest "
    f"library is ahead at {everywhere} {len(at_points)} points."
    if speed.rows
    else f"{nan}"
)

# %%
# Exercise
# --------
#
# **Does it fit?** At head_dim 128, could a program take tiles of 128 queries? Or of 80 or 96, if
# Gluon allowed them? Count shared memory (227 KiB), and the registers of what a consumer holds, P
# and dS in 16 bits included, of the 240 that each of its 128 threads has.

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
