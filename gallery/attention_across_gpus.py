"""
Attention across GPUs
=====================

A model that trains on a million-token text must keep more data than one GPU can hold. When several
GPUs share it, each query must still reach every key. Ideally, two GPUs are twice as fast as one,
which is called linear scaling. *How do several GPUs share one attention, and how much of their
speed is left when they do?*

You will learn

- how GPUs pass keys and values round a ring and merge their results with one number per query;
- how to lay out the tokens so that every GPU has the same work under a causal mask;
- how fast the connection between GPUs must be, and what follows for 8, 64 and 1,024 of them.

Without two or more NVIDIA GPUs, this page replays the speeds of a recorded run, and two CPU
processes run the same checks in Triton's :term:`interpreter`.
"""

# sphinx_gallery_thumbnail_number = 2
import json
import os
import re
import resource
import statistics
import tempfile
import time
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from unittest import mock

import numpy
import torch
import torch.distributed as dist
import torch.nn.functional as F

from kernelbook import attention, lab, reference, runtime
from kernelbook.ops import ring

opening = lab.start("attention_across_gpus", "kernelbook.ops.ring", on_ranks=True)
ranks = lab.ranks_at_work()
BEGAN = time.perf_counter()
HEADS, HEAD_DIM, DTYPE = 16, 128, torch.bfloat16
# A test rehearses the measurements on the CPU, with lengths and sizes that it can bear.
TINY = "KERNELBOOK_REHEARSAL" in os.environ
SHRINK = 1024 if TINY else 1
if TINY:
    HEADS, HEAD_DIM = 4, 16
opening

# %%
# The ring
# --------

# %%

# Reading
KEPT, LAYERS, H200_GIB = 4, 32, 140
per_token = 16 * 128 * 2
million = LAYERS * KEPT * 1048576 * per_token / 2**30
both_passes_flops = 7 * 16 * 128 * 1048576**2  # of a layer, with a causal mask
minutes = LAYERS * both_passes_flops / 600e12 / 60
lab.read(
    "Why is one GPU not enough for a million tokens? For the backward pass, attention keeps `q`, "
    "`k`, `v` and `out`. With 16 heads of 128 numbers in bfloat16, these take "
    f"{KEPT * per_token // 1024} KiB per token and layer, or {million:.0f} GiB over {LAYERS} "
    f"layers, and an H200 has {H200_GIB}. Recomputing them would save memory but cost time, and "
    f"even without it one GPU at 600 TFLOP/s would spend {minutes:.0f} minutes of every training "
    "step on this attention."
)

# %%
# The GPUs therefore share the sequence. A process and its GPU form a :term:`rank`, and the number
# of ranks is the *world size*, :math:`W`.
#
# Every query must meet all keys, but it can meet them one part at a time, because we can merge the
# outputs over different parts by their :term:`logsumexp`, as in
# :doc:`decoding </chapters/attention_in_models>`. Let ``out`` and ``lse`` cover the keys met so
# far, and ``part`` and ``lse_part`` the next part of the keys. Then
#
# .. math::
#
#    \begin{aligned}
#    w &= \frac{e^{lse_{part}}}{e^{lse} + e^{lse_{part}}} = \mathrm{sigmoid}(lse_{part} - lse) \\
#    out &\leftarrow (1 - w)\, out + w\, part \\
#    lse &\leftarrow \log\left(e^{lse} + e^{lse_{part}}\right)
#    \end{aligned}
#
# Suppose the exponentials of a query's scores add up to 3 so far and to 1 over the next part. Then
# :math:`w = 1/4`, and the new output is three quarters ``out`` and one quarter ``part``.

# %%

# Folded: ring.merge, which does this in place
lab.listing(
    {
        "The merge. The sigmoid is 0 for a query that sees no key of the next part. If the query "
        "has met no key so far either, −∞ minus −∞ is NaN, which masked_fill_ replaces with 0": (
            ring.merge
        )
    }
)

# %%
# .. admonition:: Key idea
#    :class: kb-key
#
#    The ranks form a ring, and queries stay where they are. In each step, a rank computes with the
#    keys and values that it holds while it sends them on to the next rank.
#
# .. animation:: ring_of_ranks
#
# After as many steps as there are ranks, every query has met every key. This is *ring attention*,
# by Liu, Zaharia and Abbeel.
#
# Let one process first play all ranks in turn, without a mask. ``found[rank]`` holds a rank's
# output and lse so far, both from ``reference.attention``, the formula in PyTorch:


def ring_in_turn(parts):
    """Return the output of each rank, computed step by step from every rank's q, k and v."""
    queries = [q for q, _, _ in parts]
    travelling = [(k, v) for _, k, v in parts]
    found = [None] * len(parts)
    for step in range(len(parts)):
        for rank, q in enumerate(queries):
            part, lse_part = reference.attention(q, *travelling[rank])
            if step == 0:
                found[rank] = part.float(), lse_part.float()
            else:
                ring.merge(*found[rank], part, lse_part.float())
        # each rank passes its keys and values to the next, and the last to the first
        travelling = [travelling[-1], *travelling[:-1]]
    return [out for out, _ in found]


# %%

# Reading
q, k, v = torch.randn(3, 1, 2, 12, 16, dtype=torch.float64)
parts = list(zip(*(x.chunk(3, dim=2) for x in (q, k, v)), strict=True))
out = torch.cat(ring_in_turn(parts), dim=2)
whole, _ = reference.attention(q, k, v)
torch.testing.assert_close(out.double(), whole, rtol=1e-5, atol=1e-6)
lab.read(
    "Three ranks reproduce the output of the whole sequence to within "
    f"{(out - whole).abs().max().item():.0e}, with sums in float32. All that the ring asks of a "
    "forward kernel is that it also returns the lse."
)

# %%
# The layout of the tokens
# ------------------------
#
# Under a causal mask, token :math:`t`, counted from 0, sees
# :math:`t + 1` keys, so a late token is more work than an early one. Let four ranks share eight
# tokens, first in order and then with one token from either end:

layouts = {
    "contiguous": [(0, 1), (2, 3), (4, 5), (6, 7)],
    "zig-zag": [(0, 7), (1, 6), (2, 5), (3, 4)],
}
for layout, held in layouts.items():
    scores = [sum(token + 1 for token in tokens) for tokens in held]
    print(f"{layout}: the ranks compute {scores} scores")

# %%
# .. admonition:: Key idea
#    :class: kb-key
#
#    The *zig-zag* layout cuts the sequence into twice as many pieces as there are ranks and gives
#    each rank one piece from either end: of :math:`W` ranks, rank :math:`r` holds pieces
#    :math:`r` and :math:`2W - 1 - r`.
#
# The Llama 3 report describes this layout. In the next figure, each row is a piece of queries and
# each column a piece of keys. The cells of rank 1 show the step in which it computes them:

# %%

# Drawing
WORLD_DRAWN, PART = 4, 64


def scores_of(rank, step, layout):
    """The share of a part's scores that a rank computes in a step."""
    work = ring._work(rank, (rank - step) % WORLD_DRAWN, True, layout, PART)
    if work is None:
        return 0.0
    rows, keys, causal = work
    n_rows, n_keys = (len(range(PART)[part]) for part in (rows, keys))
    return (n_rows * (n_rows + 1) / 2 if causal else n_rows * n_keys) / PART**2


def look_of(step):
    return {"color": lab.colour("Kernel Book"), "alpha": 1 - 0.25 * step}


def number_step(axes, x, y, step, fontsize=11):
    ink = "#ffffff" if step < 2 else "#1f2328"
    look = {"ha": "center", "va": "center", "fontsize": fontsize, "color": ink}
    axes.text(x, y, str(step + 1), **look)


def pieces_of(axes, layout, shown=1):
    """Which piece of queries meets which of keys; for one rank, also in which step."""
    pieces = range(2 * WORLD_DRAWN)
    holder = [
        piece // 2
        if layout == "contiguous"
        else min(piece, 2 * WORLD_DRAWN - 1 - piece)
        for piece in pieces
    ]
    for row in pieces:
        for column in range(row + 1):
            step = (holder[row] - holder[column]) % WORLD_DRAWN
            corners = [(column, row), (column, row + 1), (column + 1, row + 1)]
            corners += [(column + 1, row)] if row > column else []
            mine = holder[row] == shown
            look = look_of(step) if mine else {"color": "#eaf2fb"}
            axes.fill(*zip(*corners, strict=True), linewidth=0, **look)
            centre = 1 / 2 if row > column else 0.3  # of a cell, or of half a cell
            if mine:
                number_step(axes, column + centre, row + 1 - centre, step, 9.5)
    axes.set(xlim=(0, len(pieces)), ylim=(len(pieces), 0), aspect="equal")
    axes.set_xticks([piece + 0.5 for piece in pieces], holder)
    axes.set_yticks([piece + 0.5 for piece in pieces], holder)
    axes.set(xlabel="keys of rank", ylabel="queries of rank")
    for label, rank in zip(axes.get_yticklabels(), holder, strict=True):
        label.set_fontweight("bold" if rank == shown else "normal")
    axes.grid(visible=False)
    axes.tick_params(length=0)
    axes.set_title(layout.replace("zigzag", "zig-zag"), fontsize=11, loc="left")


def both_masks(*panels):
    for axes, layout in zip(panels, ("contiguous", "zigzag"), strict=True):
        pieces_of(axes, layout)


quarters = {  # of a part with a part: the cells that rank 1 computes in each step
    layout: [round(4 * scores_of(1, step, layout)) for step in range(WORLD_DRAWN)]
    for layout in ring.LAYOUTS
}
assert quarters == {"contiguous": [2, 4, 0, 0], "zigzag": [2, 2, 2, 2]}
lab.sketch(
    "What rank 1 computes, by step",
    "Two triangles of 8 by 8 pieces, with the two rows of rank 1 in darker colours. Contiguous: "
    "two neighbouring rows, with two cells of step 1, four of step 2 and none of steps 3 and 4. "
    "Zig-zag: a short row and a long one, with two cells of each step.",
    both_masks,
    panels=2,
    height=3.3,
)

# %%
# Count the cells of rank 1, a triangle as half a cell. With contiguous parts, it computes two in
# step 1, four in step 2 and none afterwards. **With zig-zag, it computes two of four cells in every
# step**, whichever keys it holds:
#
# - In step 1, with its own keys, the mask leaves half of the scores.
# - In step 2, with keys from a lower rank, all its queries see the early piece and none the late.
# - In steps 3 and 4, with keys from higher ranks, only its late queries see any, but these see both
#   pieces.
#
# Below are all four ranks. Each step ends (dotted line) with its slowest rank, because ranks wait
# for their neighbours' keys:

# %%


# Drawing
def steps_of(axes, layout):
    """A row for each rank, with a bar for each step that begins when the slowest is done."""
    begin = 0.0
    for step in range(WORLD_DRAWN):
        shares = [scores_of(rank, step, layout) for rank in range(WORLD_DRAWN)]
        for rank, share in enumerate(shares):
            axes.barh(rank, share, left=begin, height=0.6, **look_of(step))
            if share:
                number_step(axes, begin + share / 2, rank, step)
        begin += max(shares)
        axes.axvline(begin, color="#59636e", linestyle=":", linewidth=1)
    axes.set_yticks(range(WORLD_DRAWN), [f"rank {r}" for r in range(WORLD_DRAWN)])
    axes.invert_yaxis()
    axes.grid(visible=False)
    axes.tick_params(axis="y", length=0)
    axes.set_xlim(0, 3.6)
    axes.set_xlabel("units of time")
    axes.set_xticks(range(4))
    axes.set_title(layout.replace("zigzag", "zig-zag"), fontsize=11, loc="left")


def both_layouts(first, second):
    steps_of(first, "contiguous")
    steps_of(second, "zigzag")


spans = {
    layout: sum(
        max(scores_of(rank, step, layout) for rank in range(WORLD_DRAWN))
        for step in range(WORLD_DRAWN)
    )
    for layout in ring.LAYOUTS
}
assert [round(spans[layout], 1) for layout in ring.LAYOUTS] == [3.5, 2.0]
lab.sketch(
    "Four ranks under a causal mask",
    f"Bars for the work of four ranks, with the numbers of its four steps. Contiguous: rank 0 "
    f"works in one step and rank 3 in all four, which takes {spans['contiguous']:.1f} units. "
    f"Zig-zag: all ranks work equally in all steps, which takes {spans['zigzag']:.1f}.",
    both_layouts,
    panels=2,
    height=2.6,
)

# %%
# **By a count of the scores, zig-zag is 1.5 times as fast with two ranks and nearly twice as fast
# with many.** One unit is the time that all queries of one rank take with all keys of another. Of
# :math:`W` ranks, zig-zag takes half a unit per step, or :math:`W / 2` in all. Contiguous parts
# take half a unit for the first step and a whole one for every other, or :math:`W - 1/2` in all.
#
# The loop on one rank
# --------------------
#
# NCCL, NVIDIA's communication library, runs transfers on a :term:`stream` of their own.
# ``ring._pass_on(sent, group, into)`` starts sending ``sent`` to the next rank and receiving
# ``into`` from the previous one, and returns handles immediately. Calling ``wait`` on a handle
# makes the kernels' stream wait, but not the host. **To hide a transfer, start it before the kernel
# and wait for it after the merge.**
#
# Here is ``ring_in_turn`` as one rank runs it, with a causal mask and zig-zag. In each step, ``kv``
# holds the keys and values of the rank ``source``, and ``following`` is the memory for the next
# ones. On Hopper GPUs, ``attention`` runs the kernel of :doc:`/chapters/attention_hopper`:


def ring_of_rank(rank, world, q, k, v):
    """Attention of this rank's queries with the keys of all ranks."""
    kv, half = [k, v], q.shape[2] // 2
    for step in range(world):
        following = [torch.empty_like(x) for x in kv]
        works = []
        if step < world - 1:
            works = ring._pass_on(kv, dist.group.WORLD, following)
        source = (rank - step) % world
        rows = keys = slice(None)
        if source < rank:
            keys = slice(half)  # only its early piece
        elif source > rank:
            rows = slice(half, None)  # only our late queries
        met = [q[:, :, rows], *(x[:, :, keys] for x in kv)]
        part, lse_part = attention(*met, is_causal=source == rank, return_lse=True)
        if step == 0:
            out, lse = part.float(), lse_part
        else:
            ring.merge(out[:, :, rows], lse[:, :, rows], part, lse_part)
        for work in works:
            work.wait()
        kv = following
    return out.to(q.dtype), lse


# %%


# Measuring
def whole_by_ring(rank, world, q, k, v):
    """The output of the whole sequence by ``ring_of_rank``, and by the package."""
    parts = [
        ring.shard_sequence(x.to(runtime.DEVICE), 2, layout="zigzag") for x in (q, k, v)
    ]
    out, _ = ring_of_rank(rank, world, *parts)
    package = ring.ring_attention(*parts, is_causal=True, layout="zigzag")
    return [ring.unshard_sequence(x, 2, layout="zigzag").cpu() for x in (out, package)]


# %%

# Reading
generator = torch.Generator().manual_seed(1)
drawn = torch.randn(3, 1, 2, 16 * ranks.world, HEAD_DIM, generator=generator).to(DTYPE)
truth, _ = reference.attention(*drawn.double(), True)
errors = [
    (out.double() - truth).abs().max().item()
    for out in ranks.run(whole_by_ring, *drawn)[0]
]
on_one = F.scaled_dot_product_attention(*drawn, is_causal=True)
error_of_one = (on_one.double() - truth).abs().max().item()
assert max(errors) < 0.05
lab.read(
    f"On {ranks.world} ranks, this loop comes within {errors[0]:.4f} of float64, and PyTorch's "
    f"attention on one device within {error_of_one:.4f}."
)

# %%

# Folded: _pass_on, the transfer
lab.listing({"How a transfer begins": ring._pass_on})

# %%
# The backward pass
# -----------------
#
# Must gradients be merged as well? The backward pass recomputes the weights as
# :math:`p_{ij} = e^{s_{ij} - lse_i}`.
#
# .. admonition:: Key idea
#    :class: kb-key
#
#    Given the lse over all keys, the weights of each part are already those of the whole sequence,
#    so the parts' gradients are terms of a sum, and nothing has to be merged.
#
# Here are the terms of one part, by the steps of :doc:`/chapters/attention_backward`, with ``out``
# and ``lse`` over all keys:


def terms_of_part(q, k, v, out, lse, do):
    """Return what one part of the keys adds to dq, dk and dv."""
    scale = q.shape[-1] ** -0.5
    p = torch.exp(scale * q @ k.mT - lse[..., None])
    delta = (do * out).sum(-1, keepdim=True)
    ds = scale * p * (do @ v.mT - delta)
    return ds @ k, ds.mT @ q, p.mT @ do


# %%
# The terms of ``dq`` belong to the rank's own queries and stay with them. The sums of ``dk`` and
# ``dv`` travel with their keys, each rank adds its terms as they pass, and a last transfer brings
# them home:


def ring_backward_in_turn(parts, outs, lses, dos):
    """Return the gradients of each rank's q, k and v."""
    dqs = [torch.zeros_like(q) for q, _, _ in parts]
    moving = [(k, v, torch.zeros_like(k), torch.zeros_like(v)) for _, k, v in parts]
    for _ in parts:
        for rank, (q, _, _) in enumerate(parts):
            k, v, dk, dv = moving[rank]
            terms = terms_of_part(q, k, v, outs[rank], lses[rank], dos[rank])
            for total, term in zip((dqs[rank], dk, dv), terms, strict=True):
                total += term
        moving = [moving[-1], *moving[:-1]]  # home after the last step
    return [(dq, dk, dv) for dq, (_, _, dk, dv) in zip(dqs, moving, strict=True)]


# %%

# Reading
wholes = [x.clone().requires_grad_() for x in (q, k, v)]
out_of_all = F.scaled_dot_product_attention(*wholes)
d_out = torch.randn_like(out_of_all)
expected = torch.autograd.grad(out_of_all, wholes, d_out)
_, lse_of_all = reference.attention(q, k, v)
by_rank = [x.chunk(3, 2) for x in (out_of_all.detach(), lse_of_all, d_out)]
gradients = [
    torch.cat(pieces, 2)
    for pieces in zip(*ring_backward_in_turn(parts, *by_rank), strict=True)
]
for found, gradient in zip(gradients, expected, strict=True):
    torch.testing.assert_close(found, gradient)
wrong = max(
    (found - gradient).abs().max().item()
    for found, gradient in zip(gradients, expected, strict=True)
)
lab.read(
    f"Three ranks reproduce the gradients of the whole sequence to within {wrong:.0e} in float64. "
    "A backward kernel needs no change for the ring, if it takes `out` and `lse` as arguments."
)

# %%

# Folded: The package's loop, forward and backward, and the precision of its sums
lab.together(
    lab.read(
        "With two ranks, where there is only one addition, the package adds outputs and gradients "
        "in 16 bits; with more it uses 32, since the rounding errors of many additions would "
        "accumulate."
    ),
    lab.listing(
        {
            "What a rank computes with the keys of the rank source: which queries, which keys, and "
            "whether the mask applies": ring._work,
            "The forward pass of a rank": ring._Ring.forward,
            "The backward pass of a rank. Its terms for its own keys also travel round the ring, "
            "which costs one transfer but keeps the loop simple": ring._Ring.backward,
        }
    ),
)

# %%
# All to all
# ----------
#
# Attention computes each head independently, so the ranks can split
# the heads, as in DeepSpeed Ulysses. One exchange turns all heads of some tokens into all tokens of
# some heads, each rank computes ordinary attention on these, and a second exchange undoes the
# first.

# %%


# Drawing
def held_by(axes, title, holder):
    """A grid of tokens and heads; each cell has the number of the rank that holds it."""
    for row in range(WORLD_DRAWN):
        for column in range(WORLD_DRAWN):
            rank = holder(row, column)
            axes.fill(
                [column, column + 0.96, column + 0.96, column],
                [row, row, row + 0.96, row + 0.96],
                linewidth=0,
                **look_of(rank),
            )
            ink = "#ffffff" if rank < 2 else "#1f2328"
            look = {"ha": "center", "va": "center", "fontsize": 10, "color": ink}
            axes.text(column + 0.48, row + 0.5, str(rank), **look)
    axes.set(xlim=(-0.1, WORLD_DRAWN), ylim=(WORLD_DRAWN, -0.1), aspect="equal")
    axes.set(xticks=[], yticks=[], xlabel="heads", ylabel="tokens")
    axes.set_title(title, fontsize=11, loc="left")


def both_states(before, after):
    held_by(before, "before: all heads", lambda row, column: row)
    held_by(after, "after: all tokens", lambda row, column: column)


lab.sketch(
    "Which rank holds what, before and after the exchange",
    "Two grids with a row for each quarter of the tokens and a column for each quarter of the "
    "heads. Before the exchange each of four ranks holds a row, and after it a column.",
    both_states,
    panels=2,
    height=3.3,
)

# %%

# Folded: The exchange in code, and the bytes that each method sends
lab.together(
    lab.read(
        "In the forward pass, all to all sends (W − 1) / W of a rank's `q`, `k`, `v` and `out`. "
        "The ring sends keys and values in each of W − 1 steps. With H query heads and Hₖ key "
        "heads, these are W · Hₖ / (H + Hₖ) times as many bytes, or W / 9 times with one key head "
        "for eight query heads."
    ),
    lab.source(ring._exchange),
)

# %%
# **With many ranks, all to all sends fewer bytes.** In the forward pass, the ring sends
# :math:`W / 2` times as many, and less with grouped heads. But all to all does not compute while it
# sends, and the number of ranks must divide the numbers of query heads and of key heads, because
# each rank gets whole heads.

# %%
# Is it right?
# ------------
#
# We compare the outputs and gradients of both methods with float64.

# Measuring
METHODS = {
    "ring": ring.ring_attention,
    "all to all": ring.all_to_all_attention,
}


def spread(rank, world, method, layout, whole, is_causal):
    """out, dq, dk and dv of the whole sequence, as the ranks compute them; from rank 0."""
    whole = [x.to(runtime.DEVICE) for x in whole]
    *parts, do = (ring.shard_sequence(x, 2, layout=layout) for x in whole)
    parts = [x.clone().requires_grad_() for x in parts]
    out = METHODS[method](*parts, is_causal=is_causal, layout=layout)
    out.backward(do)
    own = (out, *(x.grad for x in parts))
    found = [ring.unshard_sequence(x, 2, layout=layout).cpu() for x in own]
    return found if rank == 0 else None


WAYS = (
    ("ring", "zigzag", True),
    ("ring", "contiguous", True),
    ("ring", "contiguous", False),
    ("all to all", "zigzag", True),
)


def cases():
    length = 2048 * ranks.world if ranks.gpus else 24 * ranks.world
    dim = 128 if ranks.gpus else 16
    for method, layout, is_causal in WAYS:
        drawn = torch.randn(
            4, 1, 4, length, dim, generator=torch.Generator().manual_seed(3)
        )
        whole = [x.clone() for x in drawn.to(DTYPE)]
        ours = ranks.run(spread, method, layout, whole, is_causal)[0]
        q, k, v, do = (x.to(runtime.DEVICE) for x in whole)
        truths = (
            reference.attention(q, k, v, is_causal)[0],
            *reference.attention_backward(q, k, v, do, is_causal),
        )
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = F.scaled_dot_product_attention(*leaves, is_causal=is_causal)
        theirs = (out.detach(), *torch.autograd.grad(out, leaves, do))
        mask = "causal" if is_causal else "full"
        what = f"{method}, {layout}, {length} × {dim}, {mask}, {ranks.world} ranks"
        names = ("out", "dq", "dk", "dv")
        for name, *row in zip(names, ours, theirs, truths, strict=True):
            yield lab.Case(what, name, *(x.detach().cpu() for x in row), 4)


checked = lab.check("Attention across ranks", cases())

# %%

# Reading
found = checked.plain.split("\n")[0].removeprefix("Attention across ranks: ")
found = found.split(";")[0].rstrip(".")
lab.read(
    f"{found[0].upper()}{found[1:]}. The package's tests also run three and four ranks, on the "
    "CPU, where a rank receives keys from both lower and higher ones."
)

# %%

# Folded: Every check of outputs and gradients, and how the tolerance is set
lab.together(
    lab.read(
        "The tolerance is four times the error of PyTorch's attention on one device, but at least "
        "two ulps, because rounding our two terms and their sum to 16 bits may alone cost one and "
        "a half."
    ),
    checked,
)

# %%
# How fast is it?
# ---------------
#
# Our yardstick is *linear scaling*: the time of one GPU alone with the same kernels, divided by the
# number of GPUs. We time both passes under a causal mask,
# with 16 heads of 128 in bfloat16; ``seqlen`` counts the tokens of all ranks.

# Measuring
ROUNDS = 1 if TINY else 3
LENGTHS = [n // SHRINK for n in (16384, 65536, 131072)][1 if TINY else 0 :]
VERSIONS = {
    "contiguous": (ring.ring_attention, "contiguous", True),
    "zig-zag": (ring.ring_attention, "zigzag", True),
    "all to all": (ring.all_to_all_attention, "contiguous", False),
    "Kernel Book": (ring.ring_attention, "zigzag", False),
}


def calls_in_a_row(seqlen):
    """How many calls a round times: short ones are many, so that the first does not count much."""
    return 1 if TINY else min(10, max(1, 196608 // seqlen))


def finished():
    if runtime.DEVICE.type == "cuda":
        torch.cuda.synchronize()


def inputs_of(seqlen, heads, head_dim, dtype):
    """q, k and v to differentiate, and the gradient of the output."""
    shape = (1, heads, seqlen, head_dim)
    q, k, v, do = (
        torch.randn(shape, device=runtime.DEVICE, dtype=dtype) for _ in range(4)
    )
    return [x.requires_grad_() for x in (q, k, v)], do


def sent_at_once(pass_on, x, group, into):
    """Send and receive, and let all later work wait for it."""
    for work in pass_on(x, group, into):
        work.wait()
    return []


def both_passes(name, world, seqlen, heads, head_dim, dtype):
    """A function that runs forward and backward of one version on this rank's part."""
    part = seqlen if name == "ideal" else seqlen // world
    leaves, do = inputs_of(part, heads, head_dim, dtype)
    if name == "ideal":
        return lambda: torch.autograd.grad(
            attention(*leaves, is_causal=True), leaves, do
        )
    method, layout, waits = VERSIONS[name]
    sender = partial(sent_at_once, ring._pass_on)

    def run():
        with mock.patch.object(ring, "_pass_on", sender) if waits else nullcontext():
            out = method(*leaves, is_causal=True, layout=layout)
            return torch.autograd.grad(out, leaves, do)

    return run


def timed(rank, world, names, *size):
    """The milliseconds of a call of each version in each round, of calls in a row."""
    runs = {name: both_passes(name, world, *size) for name in names}
    times = {name: [] for name in names}
    calls = calls_in_a_row(size[0])
    for run in runs.values():
        run()
    for _ in range(ROUNDS):
        for name, run in runs.items():
            finished()
            dist.barrier()
            begin = time.perf_counter()
            for _ in range(calls):
                run()
            finished()
            times[name].append(1e3 * (time.perf_counter() - begin) / calls)
    return times


def quantiles(found, name):
    """Three quantiles of the rounds. A round takes as long as its slowest rank; one GPU alone is
    the fastest of them, and the ideal a share of its time."""
    rounds = zip(*(of_rank[name] for of_rank in found), strict=True)
    if name == "ideal":
        sample = [min(of_round) / ranks.world for of_round in rounds]
    else:
        sample = [max(of_round) for of_round in rounds]
    return [round(float(x), 6) for x in numpy.quantile(sample, (0.2, 0.5, 0.8))]


def time_on_ranks(present):
    """Time the versions of one point; each is described by its size."""
    [size] = set(present.values())
    found = ranks.run(timed, list(present), *size)
    return {name: quantiles(found, name) for name in present}


def versions_of(seqlen, mask, heads, head_dim, dtype):
    return dict.fromkeys(("ideal", *VERSIONS), (seqlen, heads, head_dim, dtype))


POINTS = [
    {
        "seqlen": seqlen, "mask": "causal", "heads": HEADS, "head_dim": HEAD_DIM,
        "dtype": DTYPE,
    }
    for seqlen in LENGTHS
]  # fmt: skip
WORK = "14 * heads * head_dim * seqlen * seqlen / 2"
speed = lab.bench(
    "ranks",
    POINTS,
    versions_of,
    limit="ideal",
    work=WORK,
    unit="TFLOP/s",
    timer=time_on_ranks,
)

# %%

# Measuring
BACKENDS = {"cuDNN CP": "CUDNN_ATTENTION"}
PEER_LENGTHS = [n // SHRINK for n in (65536, 131072)][1 if TINY else 0 :]
PEER_LIMIT = 25.0  # seconds that a peer may take for a point
LATEST = 120.0  # seconds from the start of the chapter after which no peer begins
refusals = {}


def context_parallel_times(rank, world, backend, seqlen, heads, head_dim, dtype):
    """The milliseconds of a call of PyTorch's context parallelism in each round."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn.attention import SDPBackend, sdpa_kernel

    torch.manual_seed(7)  # the whole sequence is the same on all ranks
    shape = (1, heads, seqlen, head_dim)
    q, k, v, do = (
        torch.randn(shape, device=runtime.DEVICE, dtype=dtype) for _ in range(4)
    )
    parts = [ring.shard_sequence(x, 2, layout="zigzag") for x in (q, k, v)]
    expected = ring.ring_attention(*parts, is_causal=True, layout="zigzag")
    do = ring.shard_sequence(do, 2, layout="zigzag")
    mesh = init_device_mesh(runtime.DEVICE.type, (world,))
    times, calls = [], calls_in_a_row(seqlen)
    around = context_parallel(
        mesh, buffers=[q, k, v], buffer_seq_dims=[2, 2, 2], no_restore_buffers={q, k, v}
    )
    with around, sdpa_kernel(getattr(SDPBackend, backend)):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]

        def run():
            out = F.scaled_dot_product_attention(*leaves, is_causal=True)
            torch.autograd.grad(out, leaves, do)
            return out

        out = run()
        apart = (out - expected).float().norm() / expected.float().norm()
        if out.shape != expected.shape or not apart < 0.02:
            raise ValueError(f"the output is {apart:.2g} apart from the ring's")
        for _ in range(ROUNDS):
            finished()
            dist.barrier()
            begin = time.perf_counter()
            for _ in range(calls):
                run()
            finished()
            times.append(1e3 * (time.perf_counter() - begin) / calls)
    return {backend: times}


def time_beside(present):
    """Time our versions, and then each of PyTorch's, unless it was refused before."""
    [size] = set(present.values())
    own = [name for name in present if name not in BACKENDS]
    found = ranks.run(timed, own, *size)
    times = {name: quantiles(found, name) for name in own}
    for name, backend in BACKENDS.items():
        if time.perf_counter() - BEGAN > LATEST:
            refusals.setdefault(name, f"{name}: not run, for there was no time left")
        if name not in refusals:
            answers = ranks.ask(
                context_parallel_times, backend, *size, limit=PEER_LIMIT
            )
            errors = [
                answer.error.splitlines()[0] for answer in answers if answer.error
            ]
            if not errors:
                times[name] = quantiles([answer.value for answer in answers], backend)
                continue
            refusals[name] = f"{name}: {errors[0][:90]}"
        times[name] = lab.Absent(refusals[name])
    return times


def beside_of(seqlen, mask, heads, head_dim, dtype):
    names = ("ideal", "Kernel Book", *BACKENDS)
    return dict.fromkeys(names, (seqlen, heads, head_dim, dtype))


beside = lab.bench(
    "context parallelism",
    [
        point | {"seqlen": seqlen}
        for point, seqlen in zip(POINTS, PEER_LENGTHS, strict=False)
    ],
    beside_of,
    limit="ideal",
    work=WORK,
    unit="TFLOP/s",
    timer=time_beside,
)

# %%

# Reading
nan = float("nan")
of_record = speed.provenance or {}
WORLD = of_record.get("world", ranks.world)
length = (65536 if WORLD == 2 else 131072) // SHRINK
first, last = LENGTHS[0], LENGTHS[-1]


def percent(name, n):
    """The share of linear scaling that a version reaches at a length, in percent."""
    return 100 * speed.share(name, seqlen=n)


took = {
    name: speed.milliseconds_at(name, seqlen=length) for name in ("ideal", *VERSIONS)
}
lab.together(
    lab.read(
        f"**Our ring reaches {percent('Kernel Book', length):.0f} % of linear scaling at "
        f"{length:,} tokens.** One GPU takes {WORLD * took['ideal']:.0f} ms, so {WORLD} GPUs could "
        f"take {took['ideal']:.0f} ms, and the ring takes {took['Kernel Book']:.0f}."
    ),
    lab.read(
        "In the figure, contiguous and zig-zag wait for each transfer before they compute. The "
        "dashed line is linear scaling:"
    ),
)

# %%

# Drawing
# In this order, because the first colour is much like the blue of Kernel Book.
for reserved in ("-", "cuDNN CP", "network"):
    lab.colour(reserved)
RUNGS = ["contiguous", "zig-zag", "Kernel Book", "all to all"]
NAMES = {"Kernel Book": "zig-zag, transfers hidden"}
lab.ladder(
    speed,
    "Share of linear scaling, forward and backward",
    RUNGS,
    by="seqlen",
    where={},
    names=NAMES,
)

# %%

# Reading
share = {name: speed.share(name, seqlen=length) for name in RUNGS}
by_layout = share["zig-zag"] / share["contiguous"]
by_hiding = share["Kernel Book"] / share["zig-zag"]
promised = 2 - 1 / WORLD  # W - 1/2 units against W/2
balanced = {n: percent("zig-zag", n) / percent("contiguous", n) for n in LENGTHS}
saved_ms = took["zig-zag"] - took["Kernel Book"]
gains = {n: percent("Kernel Book", n) - percent("zig-zag", n) for n in LENGTHS}
between_sweeps = max(
    abs(percent("Kernel Book", n) - 100 * beside.share("Kernel Book", seqlen=n))
    for n in PEER_LENGTHS
)


def rounds_of(name, n):
    """The fastest and the slowest of three rounds, in milliseconds, from their quantiles."""
    p20, ms, p80 = speed.at(provider=name, seqlen=n)[["p20", "ms", "p80"]].mean()
    # Of three rounds p20 and p80 lie 0.6 of the way from the median to the ends.
    return ms - (ms - p20) / 0.6, ms + (p80 - ms) / 0.6


def apart(n):
    """The least and the most that hiding saves between a round of each version, in ms."""
    ours, waiting = (rounds_of(name, n) for name in ("Kernel Book", "zig-zag"))
    return waiting[0] - ours[1], waiting[1] - ours[0]


in_doubt = [
    n
    for n in LENGTHS
    if abs(gains[n]) <= between_sweeps or apart(n)[0] <= 0 <= apart(n)[1]
]
given_up = [n for n in LENGTHS if n not in in_doubt and gains[n] < 0]


def spread_of(name):
    """By how many ms the rounds of a version differ at the greatest length."""
    fastest_round, slowest_round = rounds_of(name, last)
    return slowest_round - fastest_round


widest = max(("zig-zag", "Kernel Book"), key=spread_of)
scattered = last in in_doubt and apart(last)[0] <= 0 <= apart(last)[1]
lost_ms = speed.milliseconds_at("Kernel Book", seqlen=first) - speed.milliseconds_at(
    "zig-zag", seqlen=first
)
lab.read(
    ("**The layout brings the larger gain.** " if by_layout > by_hiding else "")
    + f"The count of scores promised {promised:.2f} times the speed of contiguous parts, and with "
    f"zig-zag we measured {balanced[last]:.2f} times at {last:,} tokens. Hiding the transfers "
    + (
        f"brings {'less' if by_hiding < by_layout else 'more'}"
        if by_hiding > 1
        else "costs time"
    )
    + f" at {length:,} tokens"
    + (f", nothing that we can measure at {last:,}" if last in in_doubt else "")
    + (f", and at {first:,} it costs time." if first in given_up else ".")
)

# %%

# Folded: How exact are the bars?
IN_ROUNDS = {"ideal": "linear scaling"} | {x: NAMES.get(x, x) for x in RUNGS}
lab.together(
    lab.read(
        "A bar is the median of three rounds, each as long as its slowest rank. Two measurements "
        f"of our ring differ by up to {between_sweeps:.1f} points of linear scaling. At {length:,} "
        f"tokens, the median with transfers hidden is {abs(saved_ms):.0f} ms "
        f"{'shorter' if saved_ms > 0 else 'longer'} than without, and at {first:,} "
        f"tokens, it is {abs(lost_ms):.1f} ms {'longer' if lost_ms > 0 else 'shorter'}."
        + (
            f" At {last:,} tokens, rounds of "
            f"{'zig-zag' if widest == 'zig-zag' else 'our ring'} alone take "
            f"{' to '.join(f'{ms:.0f}' for ms in rounds_of(widest, last))} ms, so a gain of a few "
            "milliseconds cannot be seen."
            if scattered
            else ""
        )
    ),
    lab.table(
        [
            {"time of": name}
            | {
                f"{n:,} tokens": "–".join(f"{ms:.1f}" for ms in rounds_of(key, n))
                for n in LENGTHS
            }
            for key, name in IN_ROUNDS.items()
        ]
        if speed.provenance
        else [],
        "The fastest and the slowest round, ms",
    ),
)

# %%


# Reading
at_first = {name: speed.milliseconds_at(name, seqlen=first) for name in RUNGS}
one_gpu = WORLD * speed.milliseconds_at("ideal", seqlen=first)
none_pays = min(at_first.values()) > one_gpu
all_pay = all(WORLD * percent(name, LENGTHS[-2]) > 100 for name in RUNGS)

# %%

# Measuring
PARTS = [2**k for k in (range(9, 16, 2) if not TINY else range(3, 5))]
REPEATS = 5 if not TINY else 1


def clocked(run):
    """Milliseconds of a run, the median of some."""
    run()
    times = []
    for _ in range(REPEATS):
        finished()
        begin = time.perf_counter()
        run()
        finished()
        times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times)


def step_times(rank, world, parts, heads, head_dim, dtype):
    """For each size of a part, the milliseconds of its own scores and of a step, by pass."""
    rows = []
    for n in parts:
        (q, k, v), do = inputs_of(n, heads, head_dim, dtype)
        out, lse = (
            torch.zeros_like(q, dtype=torch.float32),
            torch.zeros_like(q[..., 0]).float(),
        )
        half = [k[:, :, : n // 2], v[:, :, : n // 2]]
        dq, dk = out.clone(), out[:, :, : n // 2].clone()
        own_out = attention(q, k, v, is_causal=True)
        step_out = attention(q, *half)

        def own_forward(q=q, k=k, v=v):
            with torch.no_grad():
                attention(q, k, v, is_causal=True)

        def step_forward(q=q, half=half, out=out, lse=lse):
            with torch.no_grad():
                ring.merge(out, lse, *attention(q, *half, return_lse=True))

        def own_backward(own_out=own_out, leaves=(q, k, v), do=do):
            torch.autograd.grad(own_out, leaves, do, retain_graph=True)

        def step_backward(step_out=step_out, leaves=(q, *half), do=do, dq=dq, dk=dk):
            found = torch.autograd.grad(step_out, leaves, do, retain_graph=True)
            for into, x in zip((dq, dk, dk), found, strict=True):
                into += x

        rows.append(
            {
                "tokens of a part": n,
                "own, forward, ms": round(clocked(own_forward), 4),
                "step, forward, ms": round(clocked(step_forward), 4),
                "own, backward, ms": round(clocked(own_backward), 4),
                "step, backward, ms": round(clocked(step_backward), 4),
            }
        )
    return rows


steps = lab.measure(
    "One step on one GPU, with its merge or its sums",
    lambda: ranks.run(step_times, PARTS, HEADS, HEAD_DIM, DTYPE)[0],
)

# %%


# Measuring
def measured_step(part, which):
    """Milliseconds of a step: between measured sizes on a line, in logarithms; beyond, squared."""
    sizes = [row["tokens of a part"] for row in steps.rows]
    times = [row[f"{which}, ms"] for row in steps.rows]
    if not sizes:
        return nan
    # A smaller part that took longer than a larger one waited for the host, which counts apart.
    times = numpy.minimum.accumulate(times[::-1])[::-1]
    if part > sizes[-1]:
        return times[-1] * (part / sizes[-1]) ** 2
    return float(
        numpy.exp(numpy.interp(numpy.log(part), numpy.log(sizes), numpy.log(times)))
    )


SHORT = 128 * ranks.world if not TINY else 4 * ranks.world


def call_costs():
    found = ranks.run(
        timed, ["ideal", "Kernel Book", "all to all"], SHORT, HEADS, HEAD_DIM, DTYPE
    )
    names = {"ideal": "one GPU", "Kernel Book": "ring", "all to all": "all to all"}
    return [
        {
            "version": named,
            "tokens": SHORT,
            "ms a call": round(max(statistics.median(r[name]) for r in found), 4),
        }
        for name, named in names.items()
    ]


costs = lab.measure("What a call costs before it computes, both passes", call_costs)

# %%

# Measuring
of_part = LENGTHS[0] // WORLD
by_kernels = sum(
    measured_step(of_part, f"own, {which}")
    + (WORLD - 1) * measured_step(of_part, f"step, {which}")
    for which in ("forward", "backward")
)
ideal_ms, ring_ms = (
    speed.milliseconds_at(name, seqlen=LENGTHS[0]) for name in ("ideal", "Kernel Book")
)
cost = {row["version"]: row["ms a call"] for row in costs.rows}
ring_cost, alone_cost = cost.get("ring", nan), cost.get("one GPU", nan)
lost = all(percent(name, first) < percent(name, last) for name in RUNGS)


def share_in_words(x):
    """A share in words if a simple fraction is near, or else in percent."""
    words = {
        1 / 4: "a quarter", 1 / 3: "a third", 1 / 2: "half", 2 / 3: "two thirds",
        3 / 4: "three quarters",
    }  # fmt: skip
    nearest = min(words, key=lambda fraction: abs(fraction - x))
    return f"about {words[nearest]}" if abs(nearest - x) < 0.04 else f"{100 * x:.0f} %"


short = costs.rows[0]["tokens"] if costs.rows else SHORT
parts_of_time = (
    f"Timed apart, the kernels take {share_in_words(by_kernels / ring_ms)} of our ring's time, "
    f"and a call on {short} tokens, which hardly computes, {share_in_words(ring_cost / ring_ms)}. "
)
why_short = parts_of_time + (
    "Neither explains it alone, and the two may overlap in the ring."
    if max(by_kernels, ring_cost) < 0.9 * ring_ms
    else "Since the two may overlap in the ring, we cannot tell which is the cause."
)

# %%

# Reading
lab.read(
    f"**At {first:,} tokens, {WORLD} GPUs are no faster than one.** No version reaches "
    f"{100 / WORLD:.0f} %, which would be the speed of one GPU. Leave such a sequence on one GPU, "
    "and give the other "
    + ("GPUs sequences of their own." if WORLD > 2 else "GPU a sequence of its own.")
    if none_pays
    else f"At {first:,} tokens, our ring reaches {percent('Kernel Book', first):.0f} % of linear "
    "scaling."
)

# %%

# Folded: What takes the time in a short sequence?
timed_alone = [
    (f"one GPU, {first:,} tokens", one_gpu),
    (f"linear scaling, {first:,} tokens", ideal_ms),
    (f"our ring, {first:,} tokens", ring_ms),
    ("the kernels of this ring, timed one at a time", by_kernels),
    (f"one GPU, {short} tokens", alone_cost),
    (f"our ring, {short} tokens", ring_cost),
]
lab.together(
    lab.table(
        [{"time of": name, "ms": f"{ms:.1f}"} for name, ms in timed_alone]
        if steps.rows
        else [],
        "Kernels and calls, both passes",
    ),
    lab.read(why_short) if lost else None,
    lab.read(
        (
            "In a call on few tokens, we did not separate the launches, the agreement of the ranks "
            "and the latency of the transfers."
        )
        + (
            f" Nor did we look into why hiding costs time at {first:,} tokens."
            if first in given_up
            else ""
        )
        + (
            f" Where {WORLD} GPUs become faster than one, between {first:,} and "
            f"{LENGTHS[-2]:,} tokens, we did not time."
            if none_pays and all_pay
            else ""
        )
    ),
)

# %%


# Reading
timed_peers = {
    name: {
        n: 100
        * (
            beside.milliseconds_at(name, seqlen=n)
            / beside.milliseconds_at("Kernel Book", seqlen=n)
            - 1
        )
        for n in PEER_LENGTHS
        if not beside.at(provider=name, seqlen=n).empty
    }
    for name in BACKENDS
    if name in beside.providers
}


def compared(found):
    """Percents, in words, by length if they disagree; less than 1 % is no difference."""
    low, high = (
        f"{x:.0f}" for x in sorted(map(abs, (min(found.values()), max(found.values()))))
    )
    if len(found) == len(PEER_LENGTHS) and (
        min(found.values()) >= 1 or max(found.values()) <= -1
    ):
        longer = "longer" if min(found.values()) > 0 else "shorter"
        return f"{low if low == high else f'{low} to {high}'} % {longer} than ours"
    return " and ".join(
        f"as long{' as ours' * first} at {n:,}{' tokens' * first}"
        if abs(more) < 1
        else f"{abs(more):.0f} % {'longer' if more > 0 else 'shorter'}{' than ours' * first} "
        f"at {n:,}{' tokens' * first}"
        for first, (n, more) in zip(
            (True, *[False] * len(found)), found.items(), strict=False
        )
    )


beside_ours = {
    n: 100
    * (
        speed.milliseconds_at("all to all", seqlen=n)
        / speed.milliseconds_at("Kernel Book", seqlen=n)
        - 1
    )
    for n in LENGTHS
}
come_close = any(timed_peers.values()) and all(
    abs(more) < 15
    for found in (beside_ours, *timed_peers.values())
    for more in found.values()
)
untimed = [n for n in LENGTHS if n not in PEER_LENGTHS]


def disjoint(one, other, n):
    """Whether all rounds of one version are faster than all of the other."""
    (low, high), (other_low, other_high) = (rounds_of(name, n) for name in (one, other))
    return high < other_low or other_high < low


slower_by = [
    more
    for n, more in beside_ours.items()
    if n in PEER_LENGTHS and more > 0 and disjoint("all to all", "Kernel Book", n)
]
is_slower = len(slower_by) == len(PEER_LENGTHS) and max(slower_by) < 15
all_slower = (
    is_slower
    and come_close
    and all(min(found.values(), default=0) >= 1 for found in timed_peers.values())
)
of_exchange = compared({n: beside_ours[n] for n in PEER_LENGTHS})
of_peers = " ".join(
    f"the experimental `context_parallel` with {name.removesuffix(' CP')}'s attention "
    f"{'' if all_slower else 'takes '}{compared(found)}."
    for name, found in timed_peers.items()
    if found
)
lab.read(
    (
        "**On the longer sequences, all to all and PyTorch's context parallelism are a little "
        "slower than our ring.** All to all takes "
        f"{of_exchange.removesuffix(' than ours')}, and {of_peers.replace(' longer than ours', '')}"
        if all_slower
        else "On the longer sequences, all to all takes "
        f"{of_exchange.replace('ours', 'our ring')}. "
        + (
            of_peers[0].upper() + of_peers[1:]
            if of_peers
            else "PyTorch's context parallelism did not run here; the figure gives the reason."
        )
    )
    + (
        " Since PyTorch's kernels differ as well, this compares packages and not methods."
        if of_peers
        else ""
    )
)

# %%

# Folded: How does PyTorch's context parallelism compare?
lab.together(
    lab.read(
        "By default, PyTorch's context parallelism gathers all keys at once instead of passing "
        "them round."
        + (
            f" We did not time it at {first:,} tokens, where our ring is weakest."
            if untimed == [first] and lost
            else ""
        )
        + (
            f" Nor can we rank all to all and our ring at {first:,} tokens, because their rounds "
            "overlap."
            if untimed == [first] and not disjoint("all to all", "Kernel Book", first)
            else ""
        )
    ),
    lab.plot(
        beside,
        "Our ring and PyTorch's context parallelism",
        share=True,
        names={
            "ideal": "linear scaling",
            "Kernel Book": "our ring",
            "cuDNN CP": "PyTorch's",
        },
    ),
)

# %%
# Does it fit?
# ------------
#
# Do ``q``, ``k``, ``v`` and ``out`` of a million tokens fit now?

# Measuring
MEMORY_LENGTH = 131072 // SHRINK


def peak_gib(run):
    """GiB at the peak of a run, with all that was there before; on the CPU, of the process."""
    if runtime.DEVICE.type != "cuda":
        run()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() / 2**30


def memory_of(rank, world, seqlen, heads, head_dim, dtype):
    """GiB at the peak of this rank: of one GPU alone, which is rank 0, and of all together."""
    found = {}
    for size in (1, world):
        dist.barrier()
        if rank < size:
            leaves, do = inputs_of(seqlen // size, heads, head_dim, dtype)
            call = partial(attention, is_causal=True)
            if size > 1:
                call = partial(ring.ring_attention, is_causal=True, layout="zigzag")

            def run(call=call, leaves=leaves, do=do):
                torch.autograd.grad(call(*leaves), leaves, do)

            found[size] = peak_gib(run)
            del leaves, do, run
    dist.barrier()
    return found


def memory_rows():
    by_rank = ranks.run(memory_of, MEMORY_LENGTH, HEADS, HEAD_DIM, DTYPE)
    return [
        {
            "GPUs": size,
            "tokens": MEMORY_LENGTH,
            "GiB per GPU": round(max(found.get(size, 0.0) for found in by_rank), 3),
        }
        for size in by_rank[0]
    ]


memory = lab.measure("The most memory that a GPU needed", memory_rows)

# %%

# Measuring
LONG = 262144 // SHRINK // (4 if TINY else 1)


def long_run(rank, world, *size):
    """The milliseconds and the peak memory of one call of the ring."""
    run = both_passes("Kernel Book", world, *size)
    finished()
    dist.barrier()
    begin = time.perf_counter()
    gib = peak_gib(run)
    return 1e3 * (time.perf_counter() - begin), gib


def long_rows():
    tokens = LONG * ranks.world
    found = ranks.run(long_run, tokens, HEADS, HEAD_DIM, DTYPE)
    took = max(ms for ms, _ in found)
    work = 7 * HEADS * HEAD_DIM * tokens**2
    return [
        {
            "tokens": tokens,
            "GPUs": ranks.world,
            "seconds": round(took / 1e3, 3),
            "TFLOP/s": round(work / took / 1e9, 1),
            "GiB per GPU": round(max(gib for _, gib in found), 2),
        }
    ]


long = lab.measure("A long sequence, forward and backward", long_rows)

# %%

# Reading
gib = {row["GPUs"]: row["GiB per GPU"] for row in memory.rows}
most = max(gib, default=1)
together = gib.get(most, nan)


def tensors(held, size):
    """How many tensors of a part, such as q, some GiB are."""
    return held * 2**30 / (MEMORY_LENGTH / size * per_token)


kept = LAYERS * KEPT * MEMORY_LENGTH * per_token / 2**30
assert million / 8 < H200_GIB / 2
lab.together(
    lab.read(
        "**On 8 GPUs they do, because each keeps only its share.** On paper, the "
        f"{million:.0f} GiB become {million / 8:.0f} GiB on each, less than half of an H200."
    ),
    lab.read(
        "While a layer computes, sharing saves less. "
        f"With {MEMORY_LENGTH:,} tokens, the measured peak of one layer is only "
        f"{100 * (1 - together / gib.get(1, nan)):.0f} % lower on each of {most} GPUs than on one."
    ),
)

# %%

# Folded: How much memory does each GPU need?
lab.together(
    lab.table(
        [
            {
                "GPUs": size,
                "peak of a layer, GiB": f"{peak:.1f}",
                "peak / size of the rank's q": f"{tensors(peak, size):.0f}",
                f"kept for {LAYERS} layers, on paper, GiB": f"{kept / size:.0f}",
            }
            for size, peak in gib.items()
        ],
        f"The memory of each GPU, {MEMORY_LENGTH:,} tokens",
    ),
    lab.read(
        "The ring also holds keys, values and gradients in transit. These take memory in one layer "
        "at a time, what is kept in all of them."
    ),
    lab.read(
        " ".join(
            f"In one call, {row['tokens']:,} tokens take {row['GPUs']} GPUs {row['seconds']:.1f} s "
            f"for both passes of one layer, and {row['GiB per GPU']:.0f} GiB of memory each."
            for row in long.rows
        )
        if long.rows
        else f"A long sequence: {nan}."
    ),
)

# %%
# One call in a profiler
# ----------------------

# %%

# Reading
profiled = 16384 // SHRINK * WORLD
lab.read(
    f"Which transfers hide? We profile both versions of zig-zag with {profiled:,} tokens in all. A "
    "transfer's bar includes the wait for the other rank."
)

# %%
# With two ranks, a call makes four transfers:
#
# 1. the keys and values, in the forward pass;
# 2. the keys and values again, in the backward pass, because no rank kept those of the other;
# 3. their gradients so far;
# 4. the complete gradients, on their way home.

# %%

# Measuring
TRACED = 16384 // SHRINK * ranks.world
VERSIONS_TRACED = {"waited for": "zig-zag", "behind": "Kernel Book"}
KINDS = ("kernel", "gpu_memcpy", "gpu_memset")


def trace_of(run):
    """What a profiler saw of one call: (name, start, end) in milliseconds."""
    on_gpu = runtime.DEVICE.type == "cuda"
    kinds = KINDS if on_gpu else ("cpu_op",)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if on_gpu:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        run()
        finished()
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "trace.json")
        profile.export_chrome_trace(path)
        with open(path, encoding="utf-8") as file:
            events = json.load(file)["traceEvents"]
    spans = [
        (event["name"], event["ts"] / 1e3, (event["ts"] + event["dur"]) / 1e3)
        for event in events
        if event.get("cat") in kinds and event.get("dur", 0) > 0
    ]
    first = min((start for _, start, _ in spans), default=0.0)
    return [(name, start - first, end - first) for name, start, end in spans]


def merged(spans, gap):
    """Spans of time, those that nearly touch made one."""
    found = []
    for start, end in sorted(spans):
        if found and start - found[-1][1] < gap:
            found[-1][1] = max(found[-1][1], end)
        else:
            found.append([start, end])
    return found


def traced(rank, world, *size):
    """Rows of what computed and what transferred on this rank, for both versions."""
    rows = []
    for version, name in VERSIONS_TRACED.items():
        run = both_passes(name, world, *size)
        run()
        run()
        finished()
        dist.barrier()
        spans = trace_of(run)
        total = max((end for *_, end in spans), default=0.0)
        lanes = {"compute": [], "transfer": []}
        for kernel, start, end in spans:
            moves = any(word in kernel.lower() for word in ("nccl", "gloo", "ptop"))
            lanes["transfer" if moves else "compute"].append((start, end))
        for lane, found in lanes.items():
            for start, end in merged(found, 0.002 * total):
                times = {"start, ms": round(start, 4), "end, ms": round(end, 4)}
                rows.append({"transfers": version, "lane": lane} | times)
        of_forward = re.compile("attention_(hopper_)?fwd")  # plain Triton, or Gluon
        forward = [end for kernel, _, end in spans if of_forward.search(kernel)]
        if forward:
            times = {
                "start, ms": round(max(forward), 4),
                "end, ms": round(max(forward), 4),
            }
            rows.append({"transfers": version, "lane": "forward ends"} | times)
    return rows


def schedule_of_rank_0():
    found = ranks.run(traced, TRACED, HEADS, HEAD_DIM, DTYPE)[0]
    return found[:400]


schedule = lab.measure("The schedule of rank 0", schedule_of_rank_0)

# %%


# Drawing
def lane_rows(rows, version, lane):
    return [
        (row["start, ms"], row["end, ms"])
        for row in rows
        if row["transfers"] == version and row["lane"] == lane
    ]


def forward_end(rows, version):
    """When the last kernel of attention in the forward pass ends."""
    return max((end for _, end in lane_rows(rows, version, "forward ends")), default=0)


def draw_schedule(axes, rows):
    places = []
    ours, moving, muted = lab.colour("Kernel Book"), lab.colour("PyTorch"), "#59636e"
    titles = {key: NAMES.get(name, name) for key, name in VERSIONS_TRACED.items()}
    longest = max(lasts(rows, version) for version in VERSIONS_TRACED)
    middle = {"ha": "center", "va": "center", "fontsize": 10}
    for number, version in enumerate(VERSIONS_TRACED):
        top, turn = 2.9 * number, forward_end(rows, version)
        axes.text(0, top - 0.55, titles[version], fontsize=10.5, color="#1f2328")
        computed = lane_rows(rows, version, "compute")
        transfers = lane_rows(rows, version, "transfer")
        # After the forward kernel come its merge, before transfer 2, and the backward pass.
        second = sorted(transfers)[1][0] if len(transfers) > 1 else turn
        for start, end, name, strength in (
            *((a, min(b, turn), "forward", 1) for a, b in computed if a < turn),
            *((max(a, turn), b, "backward", 0.5) for a, b in computed if b > turn),
        ):
            look = {"color": ours, "alpha": strength, "linewidth": 0}
            axes.broken_barh([(start, end - start)], (top - 0.35, 0.7), **look)
            if end - start > longest / 8:
                if name == "backward" and start < second:
                    name = "merge, then backward"
                ink = "#ffffff" if strength == 1 else "#1f2328"
                axes.text((start + end) / 2, top, name, color=ink, **middle)
            elif name == "backward" and end <= second + longest / 100:
                axes.text(start, top - 0.5, "merge", fontsize=9, color=muted)
            elif name == "backward" and start >= max(transfers)[1]:
                look = {"fontsize": 9, "color": muted, "ha": "right"}
                axes.text(end - longest / 80, top - 0.5, "adds dq", **look)
        bars = [(start, end - start) for start, end in transfers]
        axes.broken_barh(bars, (top + 0.65, 0.7), color=moving, linewidth=0)
        if len(transfers) == 4:
            for which, (start, end) in enumerate(sorted(transfers), 1):
                axes.text((start + end) / 2, top + 1, which, color="#ffffff", **middle)
        done = lasts(rows, version)
        axes.plot([done, done], [top - 0.45, top + 1.45], color=muted, linestyle=":")
        look = {"fontsize": 10, "color": muted, "va": "center"}
        axes.text(done + longest / 80, top + 0.5, f"{done:.1f} ms", **look)
        places += [top, top + 1]
    axes.set_yticks(places, ["computing", "transfers"] * len(VERSIONS_TRACED))
    axes.tick_params(axis="y", length=0)
    axes.set(xlim=(-longest / 50, 1.13 * longest), ylim=(max(places) + 0.6, -1.1))
    axes.grid(visible=False)
    axes.set_xlabel("milliseconds")


def busy(rows, version, lane):
    return sum(end - start for start, end in lane_rows(rows, version, lane))


def lasts(rows, version):
    return max(
        (
            end
            for lane in ("compute", "transfer")
            for _, end in lane_rows(rows, version, lane)
        ),
        default=nan,
    )


def told(rows):
    return " ".join(
        f"{NAMES.get(name, name).capitalize()}: {lasts(rows, version):.1f} milliseconds, of which "
        f"computing {busy(rows, version, 'compute'):.1f} and transferring "
        f"{busy(rows, version, 'transfer'):.1f}."
        for version, name in VERSIONS_TRACED.items()
    )


lab.draw(schedule, "One call on rank 0", told, draw_schedule)

# %%

# Reading
before, after = (lasts(schedule.rows, version) for version in VERSIONS_TRACED)
saved = 100 * (1 - after / before)
slowed = busy(schedule.rows, "behind", "compute") - busy(
    schedule.rows, "waited for", "compute"
)
begins = min(
    (at for at, _ in lane_rows(schedule.rows, "behind", "compute")), default=nan
)
behind = sorted(lane_rows(schedule.rows, "behind", "transfer"))
of_first = min(behind, default=(nan, nan))
hides = sum(end - start for start, end in behind[1:3])
scaled = hides * length / profiled
nearest, farthest = apart(length)
profiler_saw = schedule.rows or schedule.provenance is None
first_shows = begins > sum(of_first) / 2
lab.read(
    "**Transfers 2 and 3 hide behind the backward pass.** Transfer 4 does not, because almost "
    "nothing is left to compute"
    + (
        ", and neither does most of transfer 1, because the first kernel starts after it. In a "
        "longer ring, these two are a smaller share of all transfers."
        if first_shows
        else "."
    )
    if profiler_saw
    else "The profiler saw no kernel on this machine."
)

# %%

# Folded: How much time does hiding save in this call, and in a longer one?
lab.together(
    lab.read(
        (
            f"Under the profiler, hiding shortens the call by {saved:.0f} %"
            + (
                f", although the computation takes {slowed:.1f} ms longer."
                if slowed > 0.05
                else "."
            )
            if saved >= 1
            else f"Under the profiler, hiding changes the length of the call by {-saved:+.0f} %."
        )
        + (
            f" The first kernel starts {begins - of_first[0]:.1f} ms after transfer 1, at least "
            "under the profiler, which slows the host."
            if first_shows
            else ""
        )
        if profiler_saw
        else "The profiler saw no kernel on this machine."
    ),
    lab.read(
        f"At {length:,} tokens, transfers 2 and 3 carry twice the bytes. If they took twice as "
        f"long, they would account for {share_in_words(scaled / saved_ms)} of the {saved_ms:.0f} "
        "ms that hiding saves there; the rounds spread too widely to tell whether the rest is real."
    )
    if WORLD == 2 and nearest < scaled < min(saved_ms, farthest)
    else None,
)

# %%
# The bandwidth of the connection
# -------------------------------
#
# How many tokens must a rank hold so that its transfers hide? Twice as many tokens make four times
# the scores but only twice the bytes, so with enough tokens, each step outlasts its transfer.
#
# Let a rank hold :math:`n` tokens, with :math:`H` query heads of :math:`D` numbers and
# :math:`H_k` key heads. In a forward step of zig-zag it computes :math:`n^2 / 2` scores
# per head, of :math:`4 D` FLOPs each, at :math:`S` FLOPs per second, while it sends its keys and
# values, of two bytes per number, at :math:`B` bytes per second:
#
# .. math::
#
#    \begin{aligned}
#    \text{forward:} \quad & \frac{4 H D \cdot n^2 / 2}{S} \;\ge\; \frac{2 \cdot 2\, n H_k D}{B} \\
#    \Longleftrightarrow\quad & n \;\ge\; 2\, \frac{H_k}{H} \cdot \frac{S}{B}
#    \end{aligned}
#
# .. admonition:: Key idea
#    :class: kb-key
#
#    What counts is the number of tokens *per rank*, whatever the head size and number of ranks.
#
# We time single steps for :math:`S`, and pass tensors round the ring for :math:`B`; here
# :math:`H_k = H`. NVLink connects the GPUs of a machine, and a network card connects machines. The
# lines are the two sides of the formula, and to the right of a dot, the transfer hides. The crosses
# are steps that we timed, of which short ones take longer than the formula assumes:

# Measuring
MEBIBYTES = (0.25, 1, 4, 16, 64, 256) if not TINY else (0.25, 1)


def passed(rank, world, sizes):
    """The milliseconds of passing tensors of some MiB to the next rank."""
    group, found = dist.group.WORLD, []
    for mebibytes in sizes:
        x = torch.ones(int(mebibytes * 2**20), dtype=torch.uint8, device=runtime.DEVICE)
        into = torch.empty_like(x)

        def run(x=x, into=into):
            for _ in range(4):
                sent_at_once(ring._pass_on, [x], group, [into])

        dist.barrier()
        found.append(clocked(run) / 4)
    return found


def transfers():
    by_rank = ranks.run(passed, MEBIBYTES)
    slowest = [max(times) for times in zip(*by_rank, strict=True)]
    return [
        {
            "MiB": mebibytes,
            "microseconds": round(1e3 * took, 2),
            "GB/s": round(mebibytes * 2**20 / took / 1e6, 2),
        }
        for mebibytes, took in zip(MEBIBYTES, slowest, strict=True)
    ]


sent = lab.measure("Passing a tensor to the next rank, all ranks at once", transfers)

# %%


# Reading
def measured_transfer(tokens):
    """Milliseconds for keys and values of so many tokens: between measured sizes on a line."""
    if not sent.rows:
        return nan
    mebibytes = 2 * 2 * tokens * HEADS * HEAD_DIM / 2**20
    sizes = [row["MiB"] for row in sent.rows]
    times = [row["microseconds"] / 1e3 for row in sent.rows]
    return float(
        numpy.exp(
            numpy.interp(numpy.log(mebibytes), numpy.log(sizes), numpy.log(times))
        )
    )


def on_paper(tokens):
    """Milliseconds for keys and values of so many tokens through a network card."""
    return 1e3 * 2 * 2 * tokens * HEADS * HEAD_DIM / NETWORK


NETWORK = 50e9  # 400 Gb/s
bandwidth = max((row["GB/s"] for row in sent.rows), default=nan) * 1e9
largest = steps.rows[-1]["tokens of a part"] if steps.rows else nan
FORWARD_FLOPS = 2 * HEADS * HEAD_DIM
FACTORS = {"forward": 2, "backward": 2.4}
flops = {
    which: times
    * FORWARD_FLOPS
    * largest**2
    / measured_step(largest, f"step, {which}")
    * 1e3
    for which, times in (("forward", 1), ("backward", 2.5))
}


def hidden_from(which, link):
    """The tokens per rank from which on the formula hides a transfer over a link."""
    return FACTORS[which] * flops[which] / link


def about(tokens):
    """A length, rounded to two digits."""
    return float(f"{tokens:.1e}")


links = re.search(r"NV(\d+)", of_record.get("interconnect", ""))
per_link = 25 if re.search("V100|A100|H100|H200", of_record.get("gpu", "")) else None
joined = "NVLink" if links else "the connection"
speeds = {
    which: f"S = {speed_of / 1e12:.0f} TFLOP/s" for which, speed_of in flops.items()
}

# %%


# Drawing
def crossing(axes, rows):
    """Both sides of the formula, by the tokens of a rank, and the steps that were timed."""
    n = numpy.array([PARTS[0] / 1.3, PARTS[-1] * 1.3])
    ours, ink = lab.colour("Kernel Book"), "#1f2328"
    # milliseconds, of the tokens squared and of the tokens
    of_scores = 1e3 * FORWARD_FLOPS / flops["forward"]
    axes.plot(n, of_scores * n**2, color=ours, linewidth=2.2)
    look = {"fontsize": 10, "clip_on": True}
    under = {"color": ours, "ha": "left", "va": "top"} | look
    line = "computing, at the speed\nof the largest step"
    axes.text(1600, 0.85 * of_scores * 1600**2, line, **under)
    above = {"ha": "right", "va": "bottom"} | look
    for name, link, provider, where in (
        (joined, bandwidth, "PyTorch", 1500),
        ("network card", NETWORK, "network", 5000),
    ):
        hue, of_bytes = lab.colour(provider), 1e3 * 2 * 2 * HEADS * HEAD_DIM / link
        axes.plot(n, of_bytes * n, color=hue, linewidth=2.2)
        axes.text(where, 1.1 * of_bytes * where, name, color=hue, **above)
        meet = hidden_from("forward", link)
        if n[0] < meet < n[1]:
            axes.plot(meet, of_bytes * meet, color=ink, marker="o", markersize=7)
            place = 0.93 * meet, 1.15 * of_bytes * meet
            axes.text(*place, f"{about(meet):,.0f}", color=ink, **above)
    timed_steps = [(row["tokens of a part"], row["step, forward, ms"]) for row in rows]
    cross = {"color": ours, "marker": "x", "markersize": 8, "markeredgewidth": 2}
    axes.plot(*zip(*timed_steps, strict=True), linestyle="none", **cross)
    shortest, took = timed_steps[0]
    axes.text(0.93 * shortest, 1.4 * took, "steps, timed", **under | {"va": "bottom"})
    axes.set(xscale="log", yscale="log", xlim=n)
    if not TINY:
        axes.set(ylim=(0.004, 20))
    axes.set_xticks(PARTS, [f"{part:,}" for part in PARTS])
    axes.set_yticks([0.01, 0.1, 1, 10], ["0.01", "0.1", "1", "10"])
    axes.minorticks_off()
    axes.set(xlabel="tokens per rank", ylabel="milliseconds")


def of_crossing(rows):
    return (
        "Logarithmic axes. The time of computing a step rises twice as steeply with the tokens per "
        "rank as the times of its transfer, and meets that over "
        f"{joined} at {about(hidden_from('forward', bandwidth)):,.0f} tokens and that over a "
        f"network card at {about(hidden_from('forward', NETWORK)):,.0f}. Steps as timed: "
        + ", ".join(
            f"{row['step, forward, ms']:.2f} ms with {row['tokens of a part']:,} tokens"
            for row in rows
        )
        + "."
    )


lab.draw(steps, "A forward step and the transfer beside it", of_crossing, crossing)

# %%

# Reading
at_full_speed = {
    n: measured_step(largest, "step, forward") * (n / largest) ** 2 for n in PARTS
}
step_of = {row["tokens of a part"]: row["step, forward, ms"] for row in steps.rows}
shown = [n for n in step_of if at_full_speed.get(n, 0) > 0.5 * step_of[n]]
lab.together(
    lab.read(
        f"**Over a network card, parts must be at least {bandwidth / NETWORK:.0f} times as long as "
        f"over {joined}.** The line of {joined} takes the {bandwidth / 1e9:.0f} GB/s that we "
        f"measured, and that of the card the full {NETWORK / 1e9:.0f} GB/s of 400 Gb/s."
    ),
    lab.read(
        "In the backward pass, a step does 2.5 times the FLOPs, and with more than two ranks it "
        "sends three times the bytes, because gradients in 32 bits travel with the keys and "
        "values. The factor 2 becomes 2 · 3 / 2.5 = 2.4, and transfers hide from "
        f"{about(hidden_from('backward', bandwidth)):,.0f} tokens over {joined}, and from "
        f"{about(hidden_from('backward', NETWORK)):,.0f} over a network card."
    ),
)

# %%

# Folded: What each step and each transfer took
always = all(measured_transfer(n) < step_of[n] for n in shown)
too_long = [f"{n:,}" for n in shown if on_paper(n) > step_of[n]]
lab.together(
    lab.table(
        [
            {
                "connection": name,
                "B": f"{limit}{link / 1e9:.0f} GB/s",
                f"forward, {speeds['forward']}": (
                    f"{about(hidden_from('forward', link)):,.0f}"
                ),
                f"backward, {speeds['backward']}": (
                    f"{about(hidden_from('backward', link)):,.0f}"
                ),
            }
            for name, limit, link in (
                (joined, "", bandwidth),
                ("network card, 400 Gb/s", "at most ", NETWORK),
            )
        ]
        if steps.rows and sent.rows
        else [],
        "Tokens per rank from which transfers hide, by the formula, with more than two ranks",
    ),
    lab.table(
        [
            {
                "tokens per rank": f"{n:,}",
                "step, ms": f"{took:.2f}",
                "at the speed of the largest, ms": f"{at_full_speed.get(n, nan):.2f}",
                f"transfer over {joined}, ms": f"{measured_transfer(n):.2f}",
                "over a network card, at least, ms": f"{on_paper(n):.2f}",
            }
            for n, took in step_of.items()
        ],
        "A forward step and the transfer that overlaps it",
    ),
    lab.read(
        f"At {' and '.join(f'{n:,}' for n in shown)} tokens, {joined} hides "
        f"{'every transfer' if always else 'some but not all transfers'} of the forward pass. A "
        "network card at full speed hides "
        + (f"none at {' and '.join(too_long)}." if too_long else "every one too.")
    ),
    lab.read(
        (
            "The crosses of short steps lie far above the line, perhaps because launching them "
            "takes longer than their scores. "
            if len(shown) < len(step_of)
            else ""
        )
        + "The formula uses the speeds of the largest step and the largest transfer"
        + (
            f". There, {joined} carries "
            f"{share_in_words(bandwidth / 1e9 / (per_link * int(links[1])))} of the "
            f"{per_link * int(links[1])} GB/s that it promises in each direction. "
            if links and per_link
            else ". "
        )
        + f"The last column divides the bytes by the card's {NETWORK / 1e9:.0f} GB/s; a real card "
        "also has latency."
    ),
    steps,
    sent,
)

# %%
# Eight, 64 and 1,024 GPUs
# ------------------------


# Measuring
def simulated(world, tokens, bandwidth):
    """Milliseconds of a call of the ring with zig-zag, both passes, and what bounds its steps."""
    part = tokens / world
    kv = 2 * part * HEADS * HEAD_DIM * 2 / bandwidth * 1e3  # 16 bits
    # Sums of gradients: 32 bits with more than two ranks, until they are complete.
    gradients = kv * (2 if world > 2 else 1)
    fixed = (ring_cost - alone_cost) / (2 * WORLD)  # of a step, in each of two passes
    total, bounds = 0.0, []
    for which, travels in (("forward", kv), ("backward", kv + gradients)):
        own, step = (
            measured_step(part, f"{kind}, {which}") for kind in ("own", "step")
        )
        beside = {"computing": step, "transfers": travels, "fixed cost": fixed}
        total += max(own, travels) + (world - 1) * max(beside.values())
        bounds.append(max(beside, key=beside.get))
    return total + kv, bounds  # the complete gradients have 16 bits


# %%


# Measuring
def alone(tokens):
    """Milliseconds of one GPU for the whole sequence."""
    return measured_step(tokens, "own, forward") + measured_step(
        tokens, "own, backward"
    )


CLUSTERS = {8: bandwidth, 64: NETWORK, 1024: NETWORK}


def linear(world, tokens, link):
    """The share of linear scaling that is predicted, in percent."""
    return 100 * alone(tokens) / world / simulated(world, tokens, link)[0]


PER_RANK = [2 ** (eighth / 8) for eighth in range(96, 137)]  # 4Ki to 128Ki
GOOD = 80


def reaches(world, link):
    """The tokens per rank from which a simulated ring keeps GOOD percent of linear scaling."""
    shares = [linear(world, world * n, link) for n in PER_RANK]
    return 2 ** float(numpy.interp(GOOD, shares, numpy.log2(PER_RANK)))


def in_round_numbers(tokens):
    """A number of tokens, with two digits."""
    tokens = about(tokens)
    return f"{tokens / 1e6:.2g} million" if tokens >= 1e6 else f"{tokens:,.0f}"


# %%

# Reading
enough_of = {n: about(reaches(n, link)) for n, link in CLUSTERS.items() if steps.rows}
enough = enough_of.get(64, nan)
promises = {n: linear(WORLD, n, bandwidth) for n in LENGTHS}
differ = {n: promises[n] - percent("Kernel Book", n) for n in LENGTHS}
optimistic = min(differ.values()) > 0
lab.together(
    lab.read(
        f"How long must a text be to keep 64 GPUs busy, at {GOOD} % of linear scaling? "
        f"**{'At least' if optimistic else 'About'} {in_round_numbers(64 * enough)} tokens, or "
        f"{enough:,.0f} per GPU, by a simulation.**"
    ),
    lab.read(
        f"We have only {WORLD} GPUs, so we put larger rings together from measured steps and "
        "transfers. A step lasts as long as its computation, the transfer beside it or a "
        f"fixed cost, whichever is longest. Eight GPUs get the measured speed of {joined}, and "
        "larger rings the full speed of the network card:"
    ),
)

# %%


# Drawing
def curves(axes, rows):
    ours, over_network = lab.colour("Kernel Book"), lab.colour("network")
    knee = hidden_from("backward", NETWORK)
    note = {"fontsize": 9, "color": "#59636e"}
    axes.axvline(knee, color="#59636e", linewidth=0.8, linestyle=":")
    axes.text(0.96 * knee, 4, "the card hides transfers from here", ha="right", **note)
    ends = PER_RANK[0] / 1.2, PER_RANK[-1] * 1.2
    axes.axvspan(largest, ends[1], color="#59636e", alpha=0.1, linewidth=0)
    axes.text(1.06 * largest, 4, "extrapolated from\nshorter parts", **note)
    axes.axhline(GOOD, color="#59636e", linewidth=0.8, linestyle="--")
    for world, ink in ((8, ours), (64, over_network)):
        link = CLUSTERS[world]
        shares = [linear(world, world * n, link) for n in PER_RANK]
        axes.plot(PER_RANK, shares, color=ink, linewidth=2.2)
        axes.plot(reaches(world, link), GOOD, color=ink, marker="o", markersize=7)
    look = {"fontsize": 10, "color": ours, "ha": "right", "va": "bottom"}
    look["multialignment"] = "left"
    axes.text(6000, 50, f"8 GPUs,\n{joined}", **look)
    look |= {"color": over_network, "va": "top"}
    axes.text(0.96 * knee, 30, "64 or 1,024 GPUs,\nnetwork card", **look)
    points = [(n / WORLD, percent("Kernel Book", n)) for n in LENGTHS]
    cross = {"color": "#1f2328", "marker": "x", "markersize": 8, "markeredgewidth": 2}
    axes.plot(*zip(*points, strict=True), linestyle="none", zorder=5, **cross)
    for n in LENGTHS:  # what the simulation promises for the same rings
        ends_of = [percent("Kernel Book", n), promises[n]]
        gap = {"color": "#1f2328", "linestyle": ":", "linewidth": 1}
        axes.plot([n / WORLD] * 2, ends_of, zorder=3, **gap)
        hollow = cross | {"marker": "o", "markersize": 7, "markeredgewidth": 1.4}
        hollow |= {"markerfacecolor": "#ffffff", "zorder": 4}
        axes.plot(n / WORLD, promises[n], **hollow)
    note |= {"color": "#1f2328", "va": "top", "fontsize": 10}
    key = f"{WORLD} GPUs, {joined}:\n○ simulated\n× measured"
    axes.text(1.08 * largest, 78, key, **note)
    axes.set_xscale("log", base=2)
    axes.set_xticks([2**k for k in range(12, 18)], [f"{2**k:,}" for k in range(12, 18)])
    axes.set(xlim=ends, ylim=(0, 105))
    axes.set(xlabel="tokens per rank", ylabel="% of linear scaling")


def in_words_of(rows):
    return (
        "Two lines that rise with the number of tokens per rank and then stay flat, one for 8 GPUs "
        f"and one for 64 or 1,024. They reach {GOOD} % at {enough_of.get(8, nan):,.0f} and at "
        f"{enough:,.0f} tokens per rank. {WORLD} GPUs, measured and simulated: "
        + ", ".join(
            f"{percent('Kernel Book', n):.0f} and {promises[n]:.0f} % at {n // WORLD:,}"
            for n in LENGTHS
        )
        + "."
    )


lab.draw(steps, "Larger rings, simulated", in_words_of, curves)

# %%

# Reading
between_lines = max(
    abs(linear(64, 64 * n, NETWORK) - linear(1024, 1024 * n, NETWORK)) for n in PER_RANK
)
lab.read(
    "64 and 1,024 GPUs share one line, because what counts is again the tokens per rank. Sixteen "
    "times as many GPUs need a text sixteen times as long:"
    if between_lines < 2
    else f"The lines of 64 and of 1,024 GPUs lie within {between_lines:.0f} points. They need:"
)

# %%

lab.table(
    [
        {
            "GPUs": f"{world:,}",
            "connection": joined if link == bandwidth else "network card",
            "tokens per rank": f"{enough_of[world]:,.0f}",
            "tokens in all": in_round_numbers(world * enough_of[world]),
        }
        for world, link in CLUSTERS.items()
    ]
    if steps.rows
    else [],
    f"Where a simulated ring reaches {GOOD} % of linear scaling",
)

# %%

# Reading
second = LENGTHS[1] if len(LENGTHS) > 2 else last
lab.read(
    (
        "**Plan with longer parts"
        + (
            f", of {second // WORLD:,} tokens or more"
            if first / WORLD < enough < second / WORLD and differ[second] < 10
            else ""
        )
        + ", because the simulation is far too optimistic for short ones.** "
        if differ[first] > 10
        else ""
    )
    + f"For {WORLD} GPUs with {first // WORLD:,} tokens each, it promises {promises[first]:.0f} %, "
    f"and we measured {percent('Kernel Book', first):.0f} %. With {second // WORLD:,}, the two are "
    f"{abs(differ[second]):.0f} points apart."
)

# %%

# Folded: What does the simulation include, and how far is it off?
slower = sum(measured_step(largest, f"step, {which}") for which in FACTORS) / sum(
    measured_step(largest, f"own, {which}") for which in FACTORS
)
stretch = enough_of.get(8, nan) / about(hidden_from("backward", bandwidth))
flat = (
    {round(linear(n, n * largest, link)) for n, link in CLUSTERS.items()}
    if steps.rows
    else {nan}
)
hides_from = round(hidden_from("backward", bandwidth), -2)
wide_of = {}  # by how many percent one GPU's time misses what was measured
for n in PEER_LENGTHS:
    one_took = WORLD * speed.milliseconds_at("ideal", seqlen=n)
    wide_of[n] = 100 * abs(alone(n) / one_took - 1)
rows = []
for world, link in CLUSTERS.items():
    for n in (8192, 16384, 32768):
        took, bounds = simulated(world, world * n, link)
        rows.append(
            {
                "GPUs": world,
                "tokens per rank": n,
                "ms": f"{took:,.0f}",
                "% of linear": f"{linear(world, world * n, link):.0f}",
                "bound, forward": bounds[0],
                "bound, backward": bounds[1],
            }
        )
lab.together(
    lab.table(rows if steps.rows else [], "The ring with more GPUs, simulated"),
    lab.table(
        [
            {
                "tokens per rank": f"{n // WORLD:,}",
                "simulated": f"{promises[n]:.0f} %",
                "measured": f"{percent('Kernel Book', n):.0f} %",
                "points too much": f"{differ[n]:.0f}",
            }
            for n in LENGTHS
        ]
        if steps.rows
        else [],
        f"The check on {WORLD} GPUs, in percent of linear scaling",
    ),
    lab.read(
        "In the simulation, no rank is slow, and no transfer slows anything else. With parts of "
        "the same length, its time and that of linear scaling both grow in proportion to the "
        "number of ranks. "
        f"The fixed cost of a step is what a ring over {short} tokens takes longer than one GPU, "
        "divided by its steps. The last gradients add to the total, because nothing hides them."
    ),
    lab.read(
        f"Over {joined}, hiding the transfers is not enough. For {GOOD} %, eight simulated GPUs "
        f"need {stretch:.1f} times the {hides_from:,.0f} tokens per rank from which transfers "
        "hide, because a short step, timed with its launch, takes longer per score."
    ),
    lab.read(
        f"Beyond {largest:,} tokens, we let the times grow with the square of the length. For one "
        "GPU, this comes within "
        f"{numpy.ceil(max(wide_of.values())):.0f} % of the times measured at "
        f"{' and '.join(f'{n:,}' for n in wide_of)} tokens. The "
        f"lines level off near {' or '.join(map(str, sorted(flat)))} %, because a step over "
        f"another rank's keys takes {100 * (slower - 1):.0f} % longer than as many scores of a "
        "rank's own part."
    ),
)

# %%
# Larger clusters can combine both methods: heads split within a machine, and a ring of machines
# (USP, in the references).
#
# The training script
# -------------------
#
# A model needs three changes: each rank takes its part of the inputs, calls ``ring_attention``, and
# sums the gradients of the weights over the ranks. The inputs have the shape (batch, seqlen), and
# ``torchrun --nproc-per-node=2 train.py`` starts the script once per GPU:
#
# .. code-block:: python
#
#    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
#    torch.distributed.init_process_group("nccl")
#    shard = partial(kernelbook.shard_sequence, dim=1, layout="zigzag")
#    # labels[:, t] is tokens[:, t + 1]
#    tokens, labels, positions = map(shard, (tokens, labels, positions))
#    ...  # in the model, for q, k and v of shape (batch, heads, seqlen / world, head_dim):
#    out = kernelbook.ring_attention(q, k, v, is_causal=True, layout="zigzag")
#
# ``all_to_all_attention`` takes the same arguments and accepts either layout, since its exchange
# puts the tokens in order. The labels are shifted before the cut, because the label of a piece's
# last token lies in another piece. The positions are those of the whole sequence.
#
# If the loss is a sum over tokens, add the weights' gradients over the ranks. PyTorch's data
# parallelism averages them, which is right for a mean over equally many labels on every rank.
#
# What breaks it
# --------------
#
# If one rank makes a mistake, the others usually hang, because they wait for a message that
# never comes. Our ranks therefore first agree on what they are about to compute, and wait no longer
# than their process group allows.
#
# **A wrong layout gives a wrong result.** A contiguous part passed as zig-zag has the right shape,
# so only a comparison with one device reveals it. ``passed_as`` calls ``ring_attention`` with
# contiguous parts of new random inputs and a ``layout``:

# %%


# Measuring
def passed_as(rank, world, q, k, v, layout):
    """Contiguous parts, passed as a layout; the whole output."""
    parts = [ring.shard_sequence(x, 2).to(runtime.DEVICE) for x in (q, k, v)]
    out = ring.ring_attention(*parts, is_causal=True, layout=layout)
    return ring.unshard_sequence(out, 2).cpu()


q, k, v = torch.randn(3, 1, 2, 8 * ranks.world, HEAD_DIM).to(DTYPE).unbind()
truth, _ = reference.attention(q, k, v, True)

# %%

for layout in ring.LAYOUTS:
    out = ranks.run(passed_as, q, k, v, layout)[0]
    error = (out - truth).abs().max().item()
    print(f"contiguous parts passed as {layout}: error {error:.1e}")

# %%

# Measuring
LATE = 4.0  # seconds that a group has patience


def attempt(call):
    """What a call says, and after how many seconds."""
    begin = time.perf_counter()
    try:
        call()
        said = "returns"
    except (ValueError, RuntimeError) as error:
        said = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return said, round(time.perf_counter() - begin, 1)


def parts_of(length):
    shape = (3, 1, 2, length, HEAD_DIM)
    return torch.randn(shape, device=runtime.DEVICE, dtype=DTYPE).unbind()


# %%


# Measuring
def another_shape(rank, world):
    """The last rank passes a longer part."""
    q, k, v = parts_of(10 if rank == world - 1 else 8)
    return attempt(lambda: ring.ring_attention(q, k, v))


def comes_late(rank, world):
    """The last rank falls behind, for longer than the others wait."""
    q, k, v = parts_of(8)
    ring.ring_attention(q, k, v)  # which compiles the kernel
    patient = timedelta(seconds=LATE)
    group = dist.new_group(list(range(world)), timeout=patient)
    dist.barrier()
    ring.ring_attention(q, k, v, group=group)
    dist.barrier()
    if rank == world - 1:
        time.sleep(LATE + 2)
    return attempt(lambda: ring.ring_attention(q, k, v, group=group))


def dies(rank, world):
    """The last rank ends without a word."""
    q, k, v = parts_of(8)
    ring.ring_attention(q, k, v)
    if rank == world - 1:
        os._exit(9)
    return attempt(lambda: ring.ring_attention(q, k, v))


# %%


# Measuring
def failures():
    rows = []
    for mistake in (another_shape, comes_late, dies):
        for answer in ranks.ask(mistake, limit=90.0):
            said, seconds = answer.value or (answer.error.splitlines()[0], None)
            if answer.rank in (0, ranks.world - 1):
                rows.append(
                    {
                        "mistake": mistake.__name__.replace("_", " "),
                        "rank": answer.rank,
                        "seconds": "—" if seconds is None else seconds,
                        "what it says": said,
                    }
                )
    return rows


def in_short(rows):
    """One row for each mistake, with what rank 0 is told."""
    found = {}
    for row in rows:
        found.setdefault(row["mistake"], {})[row["rank"]] = row
    last = max(row["rank"] for row in rows)
    return [
        {
            "mistake": mistake,
            "rank 0: error after, s": str(of[0]["seconds"]),
            f"rank {last}: error after, s": str(of[last]["seconds"]),
            "what rank 0 is told": re.split(r"[:,] (?!q|rank)", of[0]["what it says"])[
                0
            ],
        }
        for mistake, of in found.items()
    ]


here = failures()
mistakes = lab.measure("Mistakes of the last rank", lambda: here)
shown = mistakes.rows or here

# %%

# Reading
waits = {
    mistake: max(
        row["seconds"]
        for row in shown
        if row["mistake"] == mistake and row["seconds"] != "—"
    )
    for mistake in ("another shape", "comes late", "dies")
}


def noticed(mistake):
    """When the ranks notice a mistake, in words."""
    return "at once" if waits[mistake] < 0.1 else f"after {waits[mistake]:.1f} s"


silent = {row["mistake"] for row in (*shown, *here) if "returns" in row["what it says"]}
lab.read(
    "**With a wrong shape, a late rank or a dead rank, no rank hangs.** If the last rank passes a "
    f"longer part, all ranks refuse it {noticed('another shape')}. If it dies, the others notice "
    f"{noticed('dies')}, and if it is late, they give up after the timeout that we gave them, "
    f"{waits['comes late']:.1f} s."
    + (
        f" Some calls return as if nothing had happened: {', '.join(sorted(silent))}."
        if silent
        else ""
    )
)

# %%

# Folded: What the ranks say, in short and in full
lab.together(
    lab.table(
        in_short(shown), "What the ranks report when the last one makes a mistake"
    ),
    mistakes,
)

# %%
# In short
# --------
#
# Outputs over parts of the keys can be merged with one number per query, so queries stay put while
# keys and values travel round a ring. Under a causal mask, giving each rank a piece from either end
# makes their work equal.

# %%

# Reading
times_one = {n: WORLD * percent("Kernel Book", n) / 100 for n in (length, first)}
lab.read(
    ("**A ring suits long parts.** " if lost else "")
    + f"On {WORLD} GPUs, ours is {times_one[length]:.1f} times as fast as one with "
    f"{length // WORLD:,} tokens per rank, and "
    + ("no faster" if times_one[first] < 1 else f"{times_one[first]:.1f} times as fast")
    + f" with {first // WORLD:,}. The slower the connection, the longer the parts must be."
)

# %%
# Exercises
# ---------
#
# **1. Grouped heads.** A model has 64 query heads and 8 key heads, and each rank holds a part of
# 2,048 tokens. By the formula, what bandwidth hides the transfers of the forward pass at
# 600 TFLOP/s? Can 16 ranks use all to all instead?

# %%

# Solution: grouped heads
part, speed_of_one = 2048, 600e12
needed = 2 * (8 / 64) * speed_of_one / part
flops_of_step, bytes_sent = 64 * 4 * 128 * part**2 / 2, 2 * 2 * part * 8 * 128
assert abs(flops_of_step / speed_of_one * needed / bytes_sent - 1) < 1e-9
assert 8 % 16
print(f"{needed / 1e9:.0f} GB/s. No: 16 ranks cannot share 8 key heads evenly.")

# %%
# **2. Why do the gradients travel in 32 bits?** Add 64 numbers near 1 in bfloat16, one after
# another, as 64 ranks would add their terms, and then once more in float32.

# %%

# Solution: why do the gradients travel in 32 bits?
terms = 1 + 0.1 * torch.randn(64, generator=torch.Generator().manual_seed(0))
exact, errors = terms.double().sum(), []
for dtype in (torch.bfloat16, torch.float32):
    total = torch.zeros((), dtype=dtype)
    for term in terms:
        total += term.to(dtype)
    errors.append(((total.double() - exact).abs() / exact).item())
assert errors[0] > 100 * errors[1]
print(f"relative error: {errors[0]:.1e} in bfloat16, {errors[1]:.1e} in float32")

# %%
# References
# ----------
#
# - Liu, Zaharia, Abbeel. *Ring attention with blockwise transformers for near-infinite context.*
#   arXiv:2310.01889, 2023.
# - Brandon et al. *Striped attention: faster ring attention for causal transformers.*
#   arXiv:2311.09431, 2023. An earlier layout, which deals out single tokens.
# - Llama team. *The Llama 3 herd of models.* arXiv:2407.21783, 2024.
# - Jacobs et al. *DeepSpeed Ulysses: system optimizations for enabling training of extreme long
#   sequence transformer models.* arXiv:2309.14509, 2023.
# - Fang, Zhao. *USP: a unified sequence parallelism approach for long context generative AI.*
#   arXiv:2405.07719, 2024.

# %%

# Closing
lab.finish(
    f"{100 * share['Kernel Book']:.0f} % of linear scaling on {WORLD} GPUs, forward and backward, "
    f"at {length:,} tokens"
)
