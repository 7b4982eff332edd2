"""
Attention across GPUs
=====================

To learn from a text of a million tokens, a model must keep more than one GPU holds. *How do several
GPUs share one attention, and how much of their speed is left when they do?*

You will learn

- how GPUs pass keys and values round a ring, and merge what they compute by one number per query;
- which order of the tokens gives every GPU the same work under a causal mask;
- how fast the connection between GPUs must be, and what that means for 8, 64 and 1,024 of them.

The speeds are those of a recorded run, unless two NVIDIA GPUs or more are at hand. Without them two
processes of the CPU run the same checks in Triton's :term:`interpreter`.
"""

# sphinx_gallery_thumbnail_number = 1
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

lab.start("attention_across_gpus", "kernelbook.ops.ring", on_ranks=True)
ranks = lab.ranks_at_work()
BEGAN = time.perf_counter()
HEADS, HEAD_DIM, DTYPE = 16, 128, torch.bfloat16
# A test rehearses the measurements on the CPU, with lengths and sizes that it can bear.
TINY = "KERNELBOOK_REHEARSAL" in os.environ
SHRINK = 1024 if TINY else 1
if TINY:
    HEADS, HEAD_DIM = 4, 16

# %%
# What one GPU would need
# -----------------------
#
# The memory of one GPU is too small for a long text, because a layer keeps ``q``, ``k``, ``v``
# and ``out`` of each token for the backward pass. With 16 heads of 128 numbers in bfloat16, each of
# the four takes 4 KiB per token.

# Folded: What attention keeps, by length
KEPT, DURING, LAYERS = 4, 4, 32
per_token = 16 * 128 * 2
rows = [
    {
        "tokens": tokens,
        "kept for one layer, GiB": KEPT * tokens * per_token / 2**30,
        f"kept for {LAYERS} layers, GiB": LAYERS * KEPT * tokens * per_token / 2**30,
        "gradients of one layer, GiB": DURING * tokens * per_token / 2**30,
    }
    for tokens in (65536, 262144, 1048576)
]
lab.table(rows, "What attention keeps, on paper")

# %%

# Reading
million = LAYERS * KEPT * 1048576 * per_token / 2**30
lab.read(
    f"At a million tokens, {LAYERS} layers keep {million:.0f} GiB for attention alone. An H200 has "
    "141 GB, which must also hold the weights. A model that computes layers again in the backward "
    "pass keeps less, at the price of time."
)

# %%
# So several GPUs share the sequence. A process with its GPU is a :term:`rank`, and the number of
# ranks is the *world*.
#
# The ring
# --------
#
# A query must meet all keys, but it can meet them part by part: :doc:`decoding
# </chapters/attention_in_models>` attended to parts of the keys and merged the outputs by their
# :term:`logsumexp`. A rank does the same with one part after another. Let ``out`` and ``lse``
# belong to the keys met so far, and ``part`` and ``lse_part`` to the next part of the keys. Then
#
# .. math::
#
#    \begin{aligned}
#    w &= \frac{e^{lse_{part}}}{e^{lse} + e^{lse_{part}}} = \mathrm{sigmoid}(lse_{part} - lse) \\
#    out &\leftarrow (1 - w)\, out + w\, part \\
#    lse &\leftarrow \log\left(e^{lse} + e^{lse_{part}}\right)
#    \end{aligned}
#
# If the exponentials of a query's scores add up to 3 so far and to 1 over the next part, then
# :math:`w = 1/4`: the new output is three quarters of ``out`` and one quarter of ``part``. In
# PyTorch these are three lines of ``ring.merge``, which change ``out`` and ``lse`` in place:
#
# .. literalinclude:: /../src/kernelbook/ops/ring.py
#    :language: python
#    :pyobject: merge
#    :start-at: w = torch
#    :dedent:
#
# The sigmoid is zero by itself for a query that sees no key of the next part. If the query has met
# no key so far either, :math:`-\infty` minus :math:`-\infty` is NaN, which ``masked_fill_``
# replaces by zero.
#
# .. admonition:: Key idea
#    :class: kb-key
#
#    The ranks stand in a ring. Queries stay where they are. In each step a rank computes with the
#    keys and values that it has, while it sends them on to the next rank.
#
# .. animation:: ring_of_ranks
#
# After as many steps as there are ranks, each query has met each key. This is *ring attention* (Liu
# and others, in the references).
#
# If one process plays all ranks in turn, the ring without a mask fits into a few lines.
# ``travelling[rank]`` are the keys and values that a rank has at the moment, ``found[rank]`` is its
# output so far with its lse, and ``reference.attention`` is the formula in PyTorch, which returns
# both. Three ranks find the output of the whole:


def ring_in_turn(parts):
    """Attention of the q, k and v of each rank, computed step by step: the outputs."""
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
        # each rank passes on to the next, and the last to the first
        travelling = [travelling[-1], *travelling[:-1]]
    return [out for out, _ in found]


q, k, v = torch.randn(3, 1, 2, 12, 16, dtype=torch.float64)
parts = list(zip(*(x.chunk(3, dim=2) for x in (q, k, v)), strict=True))
out = torch.cat(ring_in_turn(parts), dim=2)
whole, _ = reference.attention(q, k, v)
torch.testing.assert_close(out.double(), whole, rtol=1e-5, atol=1e-6)

# %%
# Who holds which tokens
# ----------------------
#
# Under a causal mask the layout of the tokens decides who must work, because late tokens see more
# keys than early ones: token :math:`t`, counted from 0, sees :math:`t + 1` keys. Let four ranks
# share eight tokens, first in order and then with one token from either end:

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
#    The *zig-zag* layout cuts the sequence into twice as many pieces as there are ranks, and gives
#    each rank one from either end: of :math:`W` ranks, rank :math:`r` holds the pieces :math:`r`
#    and :math:`2W - 1 - r`.
#
# The Llama 3 report describes this layout, and *striped attention* an earlier one that deals out
# single tokens.
#
# With zig-zag, the work is equal in every step, too. This matters because a rank cannot go on
# before its neighbour has sent the next keys. The figure numbers the steps; a dotted line ends
# each:

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
    axes.set_xlabel("time")
    axes.set_xticks([])
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
# Why is every step of zig-zag the same work? ``ring._work`` decides which of its queries a ``rank``
# computes with which keys of the rank ``source``, and whether under the mask:
#
# .. literalinclude:: /../src/kernelbook/ops/ring.py
#    :language: python
#    :pyobject: _work
#    :start-at: all_of_it, half
#    :dedent:
#
# The first half of a rank's tokens is its early piece, and the second half its late one. Of a lower
# rank's keys, all queries see the early piece and none the late one. Of a higher rank's keys, the
# late queries see all and the early queries none. Either way half of the scores remain, as in a
# rank's own part under the mask. Rows of the next figure are pieces of queries, columns pieces of
# keys, and the numbers are steps:

# %%

# Drawing


def pieces_of(axes, layout):
    """Which piece of queries meets which of keys, and in which step."""
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
            axes.fill(*zip(*corners, strict=True), linewidth=0, **look_of(step))
            left = 0.5 if row > column else 0.32
            number_step(axes, column + left, row + 1.02 - left, step, 7)
    axes.set(xlim=(0, len(pieces)), ylim=(len(pieces), 0), aspect="equal")
    axes.set_xticks([piece + 0.5 for piece in pieces], holder)
    axes.set_yticks([piece + 0.5 for piece in pieces], [f"rank {r}" for r in holder])
    axes.set_xlabel("keys of rank")
    axes.grid(visible=False)
    axes.tick_params(length=0)
    axes.set_title(layout.replace("zigzag", "zig-zag"), fontsize=11, loc="left")


def both_masks(*panels):
    for axes, layout in zip(panels, ("contiguous", "zigzag"), strict=True):
        pieces_of(axes, layout)


lab.sketch(
    "Which queries meet which keys, by step",
    "Two triangles of 8 by 8 pieces. Contiguous: the pieces of rank 0 have one shade, those of "
    "rank 3 four, and most of the area. Zig-zag: each rank has a short row and a long one, of the "
    "same area together, and in each step half of the scores of its pieces.",
    both_masks,
    panels=2,
    height=3.0,
)

# %%
# Let one unit of time compute the scores of all queries of one rank with all keys of another.
# Zig-zag takes half a unit per step, :math:`W / 2` in all. Contiguous parts take half a unit for
# the first step, and a whole one for each other because the last rank needs it, :math:`W - 1/2` in
# all.
# **So by this count zig-zag is 1.5 times as fast with two ranks, and nearly twice as fast with
# many.**
#
# The loop of a rank
# ------------------
#
# A rank sends and computes at once, because NCCL, NVIDIA's library for communication, transfers on
# a :term:`stream` of its own. ``ring._pass_on(sent, group, into)`` begins to send the tensors
# ``sent`` to the next rank, and to receive those of the rank before in the tensors ``into``. It
# returns at once, with what to wait for:
#
# .. literalinclude:: /../src/kernelbook/ops/ring.py
#    :language: python
#    :pyobject: _pass_on
#    :start-at: rank, world
#    :dedent:
#
# This is ``ring_in_turn`` as one rank runs it, under a causal mask and with zig-zag. ``kv`` are the
# keys and values that the rank has, and ``following`` is the memory for the next. ``attention`` is
# the kernel of the earlier chapters:


def ring_of_rank(rank, world, q, k, v):
    """Attention of this rank's queries with the keys of all ranks."""
    kv = [k, v]
    for step in range(world):
        following, works = [torch.empty_like(x) for x in kv], []
        if step < world - 1:
            works = ring._pass_on(kv, dist.group.WORLD, following)
        source = (rank - step) % world
        rows, keys, causal = ring._work(rank, source, True, "zigzag", q.shape[2])
        met = [x[:, :, keys] for x in kv]
        part, lse_part = attention(
            q[:, :, rows], *met, is_causal=causal, return_lse=True
        )
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

# Folded: The same on real ranks, beside the package and float64
generator = torch.Generator().manual_seed(1)
drawn = torch.randn(3, 1, 2, 16 * ranks.world, HEAD_DIM, generator=generator).to(DTYPE)
truth, _ = reference.attention(*drawn.double(), True)
errors = [
    (out.double() - truth).abs().max().item()
    for out in ranks.run(whole_by_ring, *drawn)[0]
]
assert max(errors) < 0.05
print(f"largest error: ours {errors[0]:.1e}, the package {errors[1]:.1e}")

# %%
# The package's loop, in a fold below, also reuses the memory of parts that were sent, and keeps the
# lse of *all* keys for the backward pass. With two ranks its sums have 16 bits, because a single
# addition is rounded once either way; with more they have 32, because roundings would pile up.
#
# The backward pass
# -----------------
#
# The backward pass computes the weights again, as :math:`p_{ij} = e^{s_{ij} - lse_i}`.
#
# .. admonition:: Key idea
#    :class: kb-key
#
#    With the lse of all keys, the weights of each part are already those of the whole, so the
#    gradients of the parts are terms of a sum, and nothing has to be merged.
#
# In PyTorch, these are the terms of one part, by the steps of :doc:`/chapters/attention_backward`.
# ``out`` and ``lse`` are of all keys:


def terms_of_part(q, k, v, out, lse, do):
    """What a part of the keys adds to dq, and its dk and dv."""
    scale = q.shape[-1] ** -0.5
    p = torch.exp(scale * q @ k.mT - lse[..., None])
    delta = (do * out).sum(-1, keepdim=True)
    ds = scale * p * (do @ v.mT - delta)
    return ds @ k, ds.mT @ q, p.mT @ do


# %%
# The terms of ``dq`` belong to the rank's own queries, and stay. Those of ``dk`` and ``dv`` belong
# to keys of another rank, so their sums travel with these keys. Each rank adds its terms as they
# pass, and a last transfer brings them home:


def ring_backward_in_turn(parts, outs, lses, dos):
    """The gradients of q, k and v of each rank."""
    dqs = [torch.zeros_like(q) for q, _, _ in parts]
    moving = [(k, v, torch.zeros_like(k), torch.zeros_like(v)) for _, k, v in parts]
    for _ in parts:
        for rank, (q, _, _) in enumerate(parts):
            k, v, dk, dv = moving[rank]
            terms = terms_of_part(q, k, v, outs[rank], lses[rank], dos[rank])
            for total, term in zip((dqs[rank], dk, dv), terms, strict=True):
                total += term
        moving = [moving[-1], *moving[:-1]]  # after all steps each is home
    return [(dq, dk, dv) for dq, (_, _, dk, dv) in zip(dqs, moving, strict=True)]


# %%

# Measuring
wholes = [x.clone().requires_grad_() for x in (q, k, v)]
out_of_all = F.scaled_dot_product_attention(*wholes)
d_out = torch.randn_like(out_of_all)
expected = torch.autograd.grad(out_of_all, wholes, d_out)
_, lse_of_all = reference.attention(q, k, v)
by_rank = [x.chunk(3, 2) for x in (out_of_all.detach(), lse_of_all, d_out)]
gradients = zip(*ring_backward_in_turn(parts, *by_rank), strict=True)
for pieces, gradient in zip(gradients, expected, strict=True):
    torch.testing.assert_close(torch.cat(pieces, 2), gradient)

# %%

# Folded: The package's loop, forward and backward, and the exchange of all to all
lab.listing(
    {
        "The forward pass of a rank": ring._Ring.forward,
        "The backward pass of a rank": ring._Ring.backward,
        "The exchange of all to all, which the next section explains": ring._exchange,
    }
)

# %%
# All to all
# ----------
#
# There is a second way, known from DeepSpeed Ulysses. Attention computes each head on its own.
# Before the call, each rank has all heads of some tokens. After one exchange, it has all tokens of
# some heads, and computes ordinary attention. A second exchange restores the first state.

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
    height=2.9,
)

# %%
# The number of ranks must divide the number of heads, also of those for keys, and nothing is
# computed during the exchanges.
#
# In a training script
# --------------------
#
# ``torchrun --nproc-per-node=2 train.py`` starts a script once per GPU. Each rank takes its part of
# what the model reads, and calls ``ring_attention`` or ``all_to_all_attention`` with the queries,
# keys and values of its own tokens:
#
# .. code-block:: python
#
#    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
#    torch.distributed.init_process_group("nccl")
#    # each of shape (batch, seqlen)
#    tokens, labels, positions = (
#        kernelbook.shard_sequence(x, dim=1, layout="zigzag")
#        for x in (tokens, labels, positions)
#    )
#    ...  # in the model, for q, k and v of shape (batch, heads, seqlen / world, head_dim):
#    out = kernelbook.ring_attention(q, k, v, is_causal=True, layout="zigzag")
#
# Shift the labels before you cut. All layers but attention work on single tokens and need no
# change. The gradients of the weights are added up over the ranks, as in data parallelism.
#
# Is it right?
# ------------
#
# Outputs and gradients of both ways are compared with float64 on two ranks; three and four run only
# in the tests of the package. Where one device rounds a sum to 16 bits once, two parts round three
# times, each term and then the sum. So we allow four times the error of PyTorch's attention on one
# device, or four times half an :term:`ulp` where that is more.

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


lab.check("Attention across ranks", cases())

# %%
# How fast is it?
# ---------------
#
# The yardstick is *linear scaling*, in the figures the *ideal*: the time that one GPU takes alone
# with the same kernels, divided by the number of GPUs. At 100 % sharing loses nothing. Two changes
# lead from the obvious version to the package's:
#
# 1. *contiguous*: each rank holds one piece, sends it, waits, computes;
# 2. *zig-zag*: the same with two pieces, one from either end;
# 3. *Kernel Book*: keys and gradients travel while the rank computes.
#
# *All to all* stands beside them. Both passes run under a causal mask, with 16 heads of 128 in
# bfloat16. A point is the median of three rounds, each as long as its slowest rank, and a shaded
# band shows their spread.

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

# Drawing
# In this order, because the first and the third colour are much like the blue of Kernel Book.
for reserved in ("-", "zig-zag", "--", "all to all", "contiguous", "---", "cuDNN CP"):
    lab.colour(reserved)
RUNGS = ["contiguous", "zig-zag", "Kernel Book", "all to all"]
of_record = speed.provenance or {}
WORLD = of_record.get("world", ranks.world)
length = (65536 if WORLD == 2 else 131072) // SHRINK
lab.plot(speed, "Share of linear scaling, forward and backward", share=True)

# %%

# Reading
nan = float("nan")


def percent(name, n):
    """The share of linear scaling that a version reaches at a length, in percent."""
    return 100 * speed.share(name, seqlen=n)


share = {name: speed.share(name, seqlen=length) for name in RUNGS}
by_layout = share["zig-zag"] / share["contiguous"]
by_hiding = share["Kernel Book"] / share["zig-zag"]
promised = 2 - 1 / WORLD  # W - 1/2 units against W/2
lab.read(
    ("**The layout gains most.** " if by_layout > by_hiding else "")
    + f"At {length:,} tokens, zig-zag is {by_layout:.2f} times as fast as contiguous parts, where "
    f"counting scores promised {promised:.2f}. Hiding the transfers comes on top, and the {WORLD} "
    f"GPUs reach {100 * share['Kernel Book']:.0f} % of linear scaling."
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
first, last = LENGTHS[0], LENGTHS[-1]
lost = all(percent(name, first) < percent(name, last) for name in RUNGS)
exchanged = max(
    abs(100 * (speed.milliseconds_at("all to all", seqlen=n) / took - 1))
    for n in LENGTHS
    for took in [speed.milliseconds_at("zig-zag", seqlen=n)]
)
at_shortest = speed.at(provider="Kernel Book", seqlen=first)[["ms", "p80"]].mean()
# Of three rounds p80 lies 0.6 of the way from the median to the slowest.
slowest_round = at_shortest["ms"] + (at_shortest["p80"] - at_shortest["ms"]) / 0.6
doubtful = slowest_round > speed.milliseconds_at("zig-zag", seqlen=first)
gained = percent("Kernel Book", last) - percent("zig-zag", last)
sweeps_differ = abs(
    percent("Kernel Book", PEER_LENGTHS[-1])
    - 100 * beside.share("Kernel Book", seqlen=PEER_LENGTHS[-1])
)
lab.read(
    ("**Short sequences lose in every version.** " if lost else "")
    + f"At {first:,} tokens ours reaches {percent('Kernel Book', first):.0f} % of linear scaling, "
    f"and zig-zag, which waits for its transfers, {percent('zig-zag', first):.0f} %. "
    + (
        "But one of our three rounds there was no faster than zig-zag. "
        if doubtful
        else ""
    )
    + f"At {last:,} tokens hiding is worth {gained:.1f} points"
    + (
        f", less than the {sweeps_differ:.1f} by which two sweeps of ours differ. "
        if gained < sweeps_differ
        else ". "
    )
    + "All to all "
    + (
        f"takes as long as zig-zag that waits, within {numpy.ceil(exchanged):.0f} %."
        if exchanged < 2
        else f"takes up to {exchanged:.0f} % more or less than zig-zag that waits."
    )
)

# %%
# PyTorch's own ring, ``context_parallel``, is still experimental and has the order of our zig-zag.
# We run it around cuDNN's attention, and time it only if its output agrees with ours.

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
    """Percents by length, in words; less than 1 % is no difference."""
    return " and ".join(
        f"as long{' as ours' * first} at {n:,}{' tokens' * first}"
        if abs(more) < 1
        else f"{abs(more):.0f} % {'longer' if more > 0 else 'shorter'}{' than ours' * first} "
        f"at {n:,}{' tokens' * first}"
        for first, (n, more) in zip(
            (True, *[False] * len(found)), found.items(), strict=False
        )
    )


def beside_ours(name, found):
    """How long PyTorch's ring takes, as a paragraph."""
    return (
        f"**PyTorch's ring** takes {compared(found)}. How much of this is "
        f"{name.removesuffix(' CP')}'s kernel we did not measure."
    )


lab.read(
    " ".join(beside_ours(name, found) for name, found in timed_peers.items() if found)
    if any(timed_peers.values())
    else "PyTorch's context parallelism did not run here; the figure names the reason."
)

# %%

# Folded: Both rings, in percent of linear scaling
lab.plot(beside, "Beside PyTorch's context parallelism", share=True)

# %%
# The schedule, measured
# ----------------------
#
# A profiler shows how much of the transfers hides. The figure shows one call on rank 0 with 16,384
# tokens per rank, a length that the sweep above does not have; a thin line ends the forward pass.
# There are four transfers: keys and values once in either pass, their gradients, and the complete
# gradients on their way home. A transfer's bar includes the wait for the other rank.

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


def draw_schedule(axes, rows):
    places = []
    for number, version in enumerate(VERSIONS_TRACED):
        top = 2.7 * number
        title = {
            "waited for": "transfers waited for",
            "behind": "transfers behind the computation",
        }
        axes.text(0, top - 0.5, title[version], fontsize=10, color="#59636e")
        for place, lane in zip((top, top + 1), ("compute", "transfer"), strict=True):
            bars = [
                (start, end - start) for start, end in lane_rows(rows, version, lane)
            ]
            provider = "Kernel Book" if lane == "compute" else "PyTorch"
            axes.broken_barh(bars, (place - 0.35, 0.7), color=lab.colour(provider))
            places.append(place)
        for start, _ in lane_rows(rows, version, "forward ends"):
            ends = [start, start], [top - 0.4, top + 1.4]
            axes.plot(*ends, color="#59636e", linewidth=1)
    axes.set_yticks(places, ["computing", "transfers"] * len(VERSIONS_TRACED))
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
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
        f"Transfers {version}: {lasts(rows, version):.1f} milliseconds, of which computing "
        f"{busy(rows, version, 'compute'):.1f} and transferring "
        f"{busy(rows, version, 'transfer'):.1f}."
        for version in VERSIONS_TRACED
    )


lab.draw(schedule, "One call on rank 0", told, draw_schedule)

# %%

# Reading
before, after = (lasts(schedule.rows, version) for version in VERSIONS_TRACED)


def not_hidden(rows, version):
    """The milliseconds in which this rank only transfers."""
    beside_work = (
        max(0.0, min(end, until) - max(start, since))
        for start, end in lane_rows(rows, version, "transfer")
        for since, until in lane_rows(rows, version, "compute")
    )
    return busy(rows, version, "transfer") - sum(beside_work)


moved = not_hidden(schedule.rows, "waited for") - not_hidden(schedule.rows, "behind")
worked, undisturbed = (
    busy(schedule.rows, version, "compute") if schedule.rows else nan
    for version in ("behind", "waited for")
)
lab.read(
    f"Hiding saves {before - after:.1f} ms of this call, of which {moved:.1f} are transfers that "
    "have moved beside kernels. The rest are gaps around transfers, in which rank 0 neither "
    "computed nor transferred. Against that, computing takes "
    f"{100 * (worked / undisturbed - 1):.0f} % longer beside transfers. Transfers still run alone "
    "before the first kernel, and when the complete gradients travel home."
    if schedule.rows or schedule.provenance is None
    else "The profiler saw no kernel on this machine."
)

# %%
# What the connection must carry
# ------------------------------
#
# A transfer is hidden if it takes no longer than the computation beside it. Let a rank hold
# :math:`n` tokens, with :math:`H` heads of :math:`D` numbers for queries and :math:`H_k` heads for
# keys and values. Let it compute :math:`S` FLOPs per second, and let :math:`B` bytes per second
# reach the next rank. With zig-zag, a step computes :math:`n^2 / 2` scores per head of :math:`4 D`
# FLOPs each, while keys and values of 16 bits travel:
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
#    The size of the heads cancels, and the number of ranks does not occur. What counts are the
#    tokens *per rank*, because the scores grow with the square of their number and the bytes only
#    with the number itself.
#
# In the backward pass, a step does 2.5 times the FLOPs. With more than two ranks it sends three
# times the bytes, because gradients in 32 bits travel, too. So the 2 becomes
# :math:`2 \cdot 3 / 2.5 = 2.4`, with the :math:`S` of the backward pass. We measure :math:`B` by
# passing tensors round the ring, and :math:`S` by single steps.

# Measuring
MEBIBYTES = (0.25, 1, 4, 16, 64, 256) if not TINY else (0.25, 1)
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

# Measuring


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

# Folded: What a step takes
steps

# %%

# Folded: What passing a tensor takes
sent

# %%


# Reading
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


links = re.search(r"NV(\d+)", of_record.get("interconnect", ""))
per_link = 25 if re.search("V100|A100|H100|H200", of_record.get("gpu", "")) else None
joined = "NVLink" if links else "the connection"
lab.read(
    (
        f"NVLink, NVIDIA's connection between the GPUs of a host, joins our {WORLD} GPUs. "
        if links
        else ""
    )
    + (
        f"On paper it carries {per_link * int(links[1])} GB/s in either direction, and we measured "
        if links and per_link
        else "We measured "
    )
    + f"{bandwidth / 1e9:.0f}{' GB/s' * (not (links and per_link))}. With the speeds of our "
    "largest step, the formula hides a transfer from "
    f"{round(hidden_from('forward', bandwidth), -2):,.0f} tokens per rank in the forward pass, and "
    f"from {round(hidden_from('backward', bandwidth), -2):,.0f} in the backward pass. Between "
    f"hosts, a network card of 400 Gb/s carries {NETWORK / 1e9:.0f} GB/s. There the backward pass "
    f"needs {round(hidden_from('backward', NETWORK), -3):,.0f} tokens per rank, or "
    f"{64 * hidden_from('backward', NETWORK) / 1e6:.1f} million for 64 GPUs."
)

# %%
# Small parts compute and travel more slowly than that, so we compare measured times, too. The last
# column is arithmetic:

# %%

parts_timed = [row["tokens of a part"] for row in steps.rows]
lab.table(
    [
        {
            "tokens per rank": f"{n:,}",
            "a forward step, ms": f"{row['step, forward, ms']:.2f}",
            f"its transfer over {joined}, ms": f"{measured_transfer(n):.2f}",
            "over a network card, ms": f"{on_paper(n):.2f}",
        }
        for n, row in zip(parts_timed, steps.rows, strict=True)
    ],
    "A forward step and the transfer beside it",
)

# %%

# Reading
step_of = {row["tokens of a part"]: row["step, forward, ms"] for row in steps.rows}
always = all(measured_transfer(n) < took for n, took in step_of.items())
too_long = [f"{n:,}" for n, took in step_of.items() if on_paper(n) > took]
lab.read(
    (
        f"**Over {joined} a transfer of the forward pass is shorter than its step at every size.** "
        if always
        else f"Over {joined} not every transfer of the forward pass is shorter than its step. "
    )
    + (
        f"Over a network card the transfer takes longer than the step at {' and '.join(too_long)} "
        f"tokens; the formula hides it from {round(hidden_from('forward', NETWORK), -2):,.0f}."
        if too_long
        else "Over a network card it would be shorter, too."
    )
    if step_of
    else f"Steps and transfers: {nan}."
)

# %%
# Why short sequences lose
# ------------------------
#
# Besides the transfers there are two suspects: the *kernels*, which are less efficient on short
# parts and must merge, and the *host*, which launches them after the ranks have agreed on the call.
# We time the kernels one at a time, with their launch, and the host by a call of 128 tokens per
# rank.

# Measuring
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

of_part = LENGTHS[0] // WORLD
without_merge = WORLD * sum(
    measured_step(of_part, f"own, {which}") for which in ("forward", "backward")
)
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
suspects = [
    ("linear scaling", ideal_ms),
    ("the ring", ring_ms),
    (f"{WORLD} masked parts of {of_part:,} tokens, one at a time", without_merge),
    ("the same, one of them unmasked and merged", by_kernels)
    if WORLD == 2
    else ("the kernels of the ring, one at a time", by_kernels),
    ("the host of one GPU, in a short call", alone_cost),
    ("the host of the ring, in a short call", ring_cost),
]
lab.table(
    [{"time of": name, "ms": f"{ms:.1f}"} for name, ms in suspects]
    if steps.rows
    else [],
    f"Where the time goes at {LENGTHS[0]:,} tokens",
)

# %%

# Reading
halfway = ideal_ms + 0.5 * (ring_ms - ideal_ms)
lab.read(
    (
        "**Either the kernels or the host is slow enough to explain the loss alone.** In the ring "
        "the two overlap, so these times do not tell them apart. "
        if min(by_kernels, ring_cost) > halfway
        else "No one of the two is slow enough to explain the loss alone. "
    )
    + (
        "Of what the kernels lose, most is lost on short parts before anything is merged."
        if without_merge - ideal_ms > by_kernels - without_merge
        else "Of what the kernels lose, most goes into merges and sums."
    )
    + (f" {nan}" if numpy.isnan(by_kernels + ring_cost) else "")
)

# %%
# Memory
# ------
#
# Sharing divides what a model keeps by the number of GPUs, but not the peak of a single layer. We
# note the most that a GPU held in both passes over 131,072 tokens, alone and together.

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
gib = {row["GPUs"]: row["GiB per GPU"] for row in memory.rows}
most = max(gib, default=1)
together = gib.get(most, nan)


def tensors(held, size):
    """How many tensors of a part, such as q, some GiB are."""
    return held * 2**30 / (MEMORY_LENGTH / size * per_token)


# %%

# Folded: The memory of each GPU, in tensors and for a model
kept = LAYERS * KEPT * MEMORY_LENGTH * per_token / 2**30
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
    "The memory of each GPU",
)

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
shorter = "half" if most == 2 else f"1/{most}"
lab.read(
    f"**The peak of a layer falls by {100 * (1 - together / gib.get(1, nan)):.0f} %, what a "
    f"model keeps by {100 * (1 - 1 / most):.0f} %.** A rank's tensors are {shorter} as long, but "
    "at the peak it holds more of them, because parts and gradients that travel come on top."
    + "".join(
        f" Both passes over {row['tokens']:,} tokens take the {row['GPUs']} GPUs "
        f"{row['seconds']:.1f} s, and {row['GiB per GPU']:.0f} GiB of memory each."
        for row in long.rows
    )
)

# %%
# Eight, 64 and 1,024 GPUs
# ------------------------
#
# For more GPUs than our two we simulate a ring from the pieces that we measured. A step takes as
# long as the longest of three: its scores, the transfer beside them, and the host's time to launch
# it. The last gradients, which nothing hides, come on top.


# Measuring
def simulated(world, tokens, bandwidth):
    """Milliseconds of a call of the ring with zig-zag, both passes, and what bounds its steps."""
    part = tokens / world
    kv = 2 * part * HEADS * HEAD_DIM * 2 / bandwidth * 1e3  # 16 bits
    # Sums of gradients: 32 bits with more than two ranks, until they are complete.
    gradients = kv * (2 if world > 2 else 1)
    launch = (ring_cost - alone_cost) / (2 * WORLD)  # of a step, in each of two passes
    total, bounds = 0.0, []
    for which, travels in (("forward", kv), ("backward", kv + gradients)):
        own, step = (
            measured_step(part, f"{kind}, {which}") for kind in ("own", "step")
        )
        beside = {"computing": step, "transfers": travels, "the host": launch}
        total += max(own, travels) + (world - 1) * max(beside.values())
        bounds.append(max(beside, key=beside.get))
    return total + kv, bounds  # the complete gradients have 16 bits


# %%

# Reading
off_by = {}
for seqlen in LENGTHS:
    real = speed.milliseconds_at("Kernel Book", seqlen=seqlen)
    off_by[seqlen] = 100 * (simulated(WORLD, seqlen, bandwidth)[0] / real - 1)


def off(percents):
    """How wrong a predicted time is, in words."""
    if abs(percents) < 0.5:
        return "right"
    return f"{abs(percents):.0f} % too {'long' if percents > 0 else 'short'}"


worst = max(off_by, key=lambda n: abs(off_by[n]))
lab.read(
    f"For our {WORLD} GPUs the simulated time is {off(off_by[worst])} at {worst:,} tokens, and "
    "nearer at the other lengths."
    if not any(map(numpy.isnan, off_by.values()))
    else f"The simulation is off by {nan}."
)

# %%
# Eight GPUs share a host and have the connection that we measured. More have a network card of
# 400 Gb/s each, because the slowest link of the ring counts. Thin lines stand where the formula
# begins to hide all transfers over the network.


# Measuring
def alone(tokens):
    """Milliseconds of one GPU for the whole sequence."""
    return measured_step(tokens, "own, forward") + measured_step(
        tokens, "own, backward"
    )


CLUSTERS = {8: bandwidth, 64: NETWORK, 1024: NETWORK}


def linear(world, tokens):
    """The share of linear scaling that is predicted, in percent."""
    return 100 * alone(tokens) / world / simulated(world, tokens, CLUSTERS[world])[0]


# %%


# Drawing
lengths = [2 ** (quarter / 4) for quarter in range(64, 105)]


def curves(axes, rows):
    for world, link in CLUSTERS.items():
        if link == NETWORK:
            knee = world * hidden_from("backward", link)
            axes.axvline(knee, color="#afb8c1", linewidth=0.8)
    for world, style in zip(CLUSTERS, ("-", "--", ":"), strict=True):
        look = {"color": lab.colour("Kernel Book"), "linestyle": style}
        shares = [linear(world, tokens) for tokens in lengths]
        axes.plot(lengths, shares, label=f"{world:,} GPUs", **look)
    axes.set_xscale("log", base=2)
    axes.set_xticks([2**17, 2**20, 2**23, 2**26], ["128Ki", "1Mi", "8Mi", "64Mi"])
    axes.set_ylim(0, 105)
    axes.set(xlabel="tokens", ylabel="% of linear scaling, simulated")


def in_words_of(rows):
    found = ", ".join(
        f"{linear(world, 2**23):.0f} % with {world:,} GPUs" for world in CLUSTERS
    )
    return (
        "Three lines that rise with the number of tokens and then stay flat; at 8Mi tokens: "
        f"{found}. Thin lines stand near where the dashed and the dotted one become flat."
    )


lab.draw(steps, "The ring with more GPUs, simulated", in_words_of, curves)

# %%

# Folded: The simulation in numbers
rows = []
for world, link in CLUSTERS.items():
    for tokens in (131072, 1048576, 8388608):
        took, bounds = simulated(world, tokens, link)
        rows.append(
            {
                "GPUs": world,
                "tokens": tokens,
                "tokens per GPU": tokens // world,
                "ms": f"{took:,.0f}",
                "% of linear": f"{linear(world, tokens):.0f}",
                "bound, forward": bounds[0],
                "bound, backward": bounds[1],
            }
        )
lab.table(rows if steps.rows else [], "The ring with more GPUs, simulated")

# %%

# Reading
GOOD = 80
from_tokens = {
    world: min(
        (tokens for tokens in lengths if linear(world, tokens) >= GOOD),
        default=0,
    )
    for world in CLUSTERS
}


def short(tokens):
    """A length as the axis of the figure has it."""
    return f"{tokens / 2**20:.0f}Mi" if tokens >= 2**20 else f"{tokens / 2**10:.0f}Ki"


end = largest * max(CLUSTERS)
flat = linear(max(CLUSTERS), end)
slower = measured_step(largest, "step, forward") / measured_step(
    largest, "own, forward"
)
lab.read(
    "**Each limit shapes a part of the curves.** At the left it is the host's time per step, "
    "probably too much, because we charge all of it to the steps although ranks agree once per "
    "call. On the slopes of the dashed and the dotted curve it is the transfers. "
    f"At the right the curves end near {flat:.0f} %, because a forward step, which merges, takes "
    f"{100 * (slower - 1):.0f} % longer than as many scores of a rank's own part."
)


# %%

# Reading
lab.read(
    "**A ring is for long parts, so at a given length for few ranks.** "
    f"To keep {GOOD} % of linear scaling, "
    + " and ".join(
        f"{world:,} GPUs need about {short(from_tokens[world])} tokens"
        for world in (min(CLUSTERS), max(CLUSTERS))
        if from_tokens[world]
    )
    + ", by a simulation that we could compare with two ranks only. Larger clusters can combine "
    "both ways: heads within a host, and a ring of hosts (USP, in the references)."
)

# %%
# What breaks it
# --------------
#
# A mistake on one rank usually hangs the others, because they wait for a message that never comes.
# So our ranks first agree on what they are about to compute, and wait no longer than their process
# group allows.
#
# **A wrong layout.** What ranks cannot see is a sequence in another order than ``layout`` says. A
# contiguous part passed as zig-zag has the right shape and raises no error, but the result is
# wrong. ``ranks.run`` calls a function on every rank and returns what each returns:


def passed_as(rank, world, q, k, v, layout):
    """Contiguous parts, passed as a layout; the whole output."""
    parts = [ring.shard_sequence(x, 2).to(runtime.DEVICE) for x in (q, k, v)]
    out = ring.ring_attention(*parts, is_causal=True, layout=layout)
    return ring.unshard_sequence(out, 2).cpu()


q, k, v = torch.randn(3, 1, 2, 8 * ranks.world, HEAD_DIM).to(DTYPE).unbind()
truth, _ = reference.attention(q, k, v, True)
for layout in ring.LAYOUTS:
    out = ranks.run(passed_as, q, k, v, layout)[0]
    error = (out - truth).abs().max().item()
    print(f"contiguous parts passed as {layout}: error {error:.1e}")

# %%
# **A wrong shape, a late rank, a dead one.** These the ranks do see. The last rank passes a longer
# part, or comes later than the others wait, or ends without a word:

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
            "rank 0: error after, s": of[0]["seconds"],
            f"rank {last}: error after, s": of[last]["seconds"],
            "what rank 0 is told": re.split(r"[:,] (?!q|rank)", of[0]["what it says"])[
                0
            ],
        }
        for mistake, of in found.items()
    ]


here = failures()
mistakes = lab.measure("Mistakes of the last rank", lambda: here)
shown = mistakes.rows or here
lab.table(in_short(shown), "What the ranks say of a mistake of the last of them")

# %%

# Folded: Every message in full, as recorded
mistakes

# %%

# Reading
longest = max(row["seconds"] for row in shown if row["seconds"] != "—")
silent = {row["mistake"] for row in (*shown, *here) if "returns" in row["what it says"]}
lab.read(
    f"No rank hangs: the longest waits {longest:.1f} s, with a time-out of {LATE:.0f}. A late rank "
    "is told as soon as it calls. A dead rank is noticed before the time-out, probably by its "
    "closed connection."
    + (
        f" Some return as if nothing had happened: {', '.join(sorted(silent))}."
        if silent
        else ""
    )
)

# %%
# In short
# --------
#
# Outputs over parts of the keys can be merged by one number per query, so queries stay and keys
# travel round a ring. Under a causal mask, a piece from either end gives every rank the same work.
# How well transfers hide depends on the tokens per rank, so a ring suits long parts.
#
# Exercises
# ---------
#
# **1. Grouped heads.** A model has 64 heads for queries and 8 for keys, and each rank a part of
# 2,048 tokens. By the formula, which bandwidth hides the transfers of the forward pass at
# 600 TFLOP/s? Can 16 ranks use all to all instead?

# %%

# Solution: grouped heads
part, speed_of_one = 2048, 600e12
needed = 2 * (8 / 64) * speed_of_one / part
assert abs(part - 2 * (8 / 64) * speed_of_one / needed) < 1e-6
print(f"{needed / 1e9:.0f} GB/s. No: 16 ranks cannot share 8 heads of keys evenly.")

# %%
# **2. Why do the gradients travel in 32 bits?** Add 64 numbers near 1 in bfloat16, one after
# another, as 64 ranks would add their terms, and once in float32.

# %%

# Solution: why do the gradients travel in 32 bits?
terms = 1 + 0.1 * torch.randn(64, generator=torch.Generator().manual_seed(0))
short, exact = torch.zeros((), dtype=torch.bfloat16), terms.double().sum()
for term in terms:
    short += term.bfloat16()
errors = [
    (x.double() - exact).abs().item() / exact.item() for x in (short, terms.sum())
]
assert errors[0] > 100 * errors[1]
print(f"relative error: {errors[0]:.1e} in bfloat16, {errors[1]:.1e} in float32")

# %%
# References
# ----------
#
# - Liu, Zaharia, Abbeel. *Ring attention with blockwise transformers for near-infinite context.*
#   arXiv:2310.01889, 2023.
# - Brandon et al. *Striped attention: faster ring attention for causal transformers.*
#   arXiv:2311.09431, 2023.
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
