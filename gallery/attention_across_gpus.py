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
    f"For a million tokens a model of {LAYERS} layers keeps {million:.0f} GiB, and an H200 has 141 "
    "GB, for its weights, too."
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
# PyTorch these are three lines of ``ring.merge``, which change ``out`` and ``lse`` in place.
# ``masked_fill_`` makes :math:`w` zero for a query that sees no key of the next part:
#
# .. literalinclude:: /../src/kernelbook/ops/ring.py
#    :language: python
#    :pyobject: merge
#    :start-at: w = torch
#    :dedent:
#
# .. admonition:: Key idea
#    :class: kb-key
#
#    The ranks stand in a ring. Queries stay where they are. In each step a rank computes with the
#    keys and values that it has, while it sends them on to the next rank.
#
# .. animation:: ring_of_ranks
#
# After as many steps as there are ranks, each query has met each key. If one process plays all
# ranks in turn, the whole ring without a mask fits into a few lines. ``travelling[rank]`` are the
# keys and values that a rank has at the moment, ``found[rank]`` is its output so far with its lse,
# and ``reference.attention`` is the formula in PyTorch, which returns both. Three ranks find the
# output of the whole:


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
parts = list(zip(*(x.chunk(3, 2) for x in (q, k, v)), strict=True))  # of three ranks
out = torch.cat(ring_in_turn(parts), 2)
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
# The work is equal in every step, too, which matters because the ranks wait for each other: the
# next keys come from a neighbour. The figure numbers the steps; a dotted line ends each:

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
# Let one unit of time compute the scores of all queries of one rank with all keys of another.
# Zig-zag takes half a unit for each step, or :math:`W / 2`. Contiguous parts take half a unit for
# the first step and a whole one for each of the others, or :math:`W - 1/2`. **So by this count
# zig-zag is 1.5 times as fast with two ranks, and nearly twice as fast with many.**

# %%

# Folded: Which queries meet which keys, by step: a row is a piece of queries


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

# Folded: _work of the package says which queries and keys meet, and whether under the mask
lab.source(ring._work)

# %%
# The loop of a rank
# ------------------
#
# A rank sends and computes at once, because the transfer runs on a :term:`stream` of its own. NCCL,
# NVIDIA's library for communication, provides that. ``_pass_on`` begins to send tensors to the next
# rank and to receive those of the rank before, and returns at once with what to wait for.

# %%

# Folded: _pass_on in PyTorch
lab.source(ring._pass_on)

# %%
# The forward pass of the package is ``ring_in_turn`` as one rank sees it. Each step first begins to
# pass ``kv`` on, into the memory ``following``. ``_like`` makes empty tensors of the same shapes,
# unless a part that was sent and used is ``spare``:

lab.source(ring._Ring.forward, "def", "send")

# %%
# Beside the transfer the rank computes what ``_work`` returns: which of its queries (``rows``) meet
# which of the ``keys``, and whether under the mask (``causal``). ``operator.run`` is the forward
# kernel of the earlier chapters. Its options are no window (``None`` twice), the scale, the same
# bits in every run (``True``), and any backend. The step ends with a wait for the transfer:

lab.source(ring._Ring.forward, "attend")

# %%
# Sums are float32 with more than two ranks (``_dtype_of_sums``), and ``save_for_backward``
# keeps the lse of *all* keys.
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
# to keys of another rank, so these sums travel with their keys, each rank adds its terms as they
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

# Folded: The same gradients by autograd, in float64
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

# Folded: The backward pass of the package, and the exchange of all to all
lab.listing(
    {
        "The backward pass of a rank": ring._Ring.backward,
        "The exchange of all to all": ring._exchange,
    }
)

# %%
# All to all
# ----------
#
# All to all uses that heads are independent. The ranks exchange parts of
# the sequence for heads, each rank computes the whole sequence of a few heads as a single GPU
# would, and they exchange back. The number of ranks must divide the number of heads, also of those
# for keys, and nothing is computed while they exchange.
#
# Every rank calls ``ring_attention``, or ``all_to_all_attention``, with its own part of the
# sequence:
#
# .. code-block:: python
#
#    torch.distributed.init_process_group("nccl")
#    q, k, v = (kernelbook.shard_sequence(x, 2, layout="zigzag") for x in (q, k, v))
#    out = kernelbook.ring_attention(q, k, v, is_causal=True, layout="zigzag")
#
# Is it right?
# ------------
#
# Outputs and gradients of both ways are compared with float64. The recorded run has two ranks.
# Three and four, whose sums are float32, run only in the tests of the package. The error may be up
# to four times that of PyTorch's attention on one device, or four times half an :term:`ulp` where
# that is more. We allow four and not two, because each part's result is rounded before it is
# merged, and the merged one again.

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
# *All to all* stands beside them. Forward and backward run together, under a causal mask, with 16
# heads of 128 in bfloat16. A time is the median of three rounds, each as long as its slowest rank.

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
lab.ladder(
    speed,
    f"The versions, at {length:,} tokens",
    RUNGS,
    by="mask",
    where={"seqlen": length},
)

# %%

# Reading
nan = float("nan")
share = {name: speed.share(name, seqlen=length) for name in RUNGS}
won = share["zig-zag"] / share["contiguous"]
promised = 2 - 1 / WORLD  # W - 1/2 units against W/2
lab.read(
    f"**Zig-zag gains most.** It is {won:.2f} times as fast as contiguous parts, where counting "
    f"scores promised {promised:.2f}. With transfers behind the computation, the {WORLD} GPUs "
    f"reach {100 * share['Kernel Book']:.0f} % of linear scaling."
)

# %%

# Drawing
lab.plot(speed, "Share of linear scaling, forward and backward", share=True)

# %%


# Reading
def longer(name, n):
    """How many percent longer than the ring a version takes at a length."""
    ours = speed.milliseconds_at("Kernel Book", seqlen=n)
    return 100 * (speed.milliseconds_at(name, seqlen=n) / ours - 1)


exchanged = max(
    abs(100 * (speed.milliseconds_at("all to all", seqlen=n) / took - 1))
    for n in LENGTHS
    for took in [speed.milliseconds_at("zig-zag", seqlen=n)]
)
at_shortest = speed.at(provider="Kernel Book", seqlen=LENGTHS[0])[["ms", "p80"]].mean()
# Of three rounds p80 lies 0.6 of the way from the median to the slowest.
slowest_round = at_shortest["ms"] + (at_shortest["p80"] - at_shortest["ms"]) / 0.6
doubtful = slowest_round > speed.milliseconds_at("zig-zag", seqlen=LENGTHS[0])
lab.read(
    "**Short sequences lose in every version:** at "
    f"{LENGTHS[0]:,} tokens ours reaches {100 * speed.share('Kernel Book', seqlen=LENGTHS[0]):.0f} "
    f"% of linear scaling. What hiding transfers gains shrinks as well, from "
    f"{longer('zig-zag', LENGTHS[0]):.0f} % to {longer('zig-zag', LENGTHS[-1]):.0f} % at the "
    "longest, because the scores grow with the square of the length and what is transferred with "
    "the length itself. "
    + (
        "The gain at the shortest is uncertain, because one of our three rounds there took longer "
        "than the median of zig-zag. "
        if doubtful
        else ""
    )
    + "All to all "
    + (
        f"takes as long as zig-zag that waits, within {numpy.ceil(exchanged):.0f} %."
        if exchanged < 2
        else f"takes up to {exchanged:.0f} % more or less than zig-zag that waits."
    )
)

# %%
# The schedule, measured
# ----------------------
#
# A profiler shows how much of the transfers hides. The figure is one call on rank 0, with 16,384
# tokens per rank; a thin line ends the forward pass. There are four transfers: keys and values in
# either pass, their gradients, and the complete gradients on their way home. Their bars contain the
# wait for the other rank, too.

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
    f"Of the {before - after:.1f} ms that hiding saves, {moved:.1f} are transfers that have moved "
    "beside kernels. The rest are gaps in which rank 0 neither computed nor transferred, less the "
    f"{100 * (worked / undisturbed - 1):.0f} % that computing takes longer beside transfers. "
    "Transfers still run alone at the two ends: before the first kernel has started, and when the "
    "complete gradients travel home."
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
# In the backward pass, a step does 2.5 times the FLOPs, and with more than two ranks it sends three
# times the bytes, because gradients in 32 bits travel, too. So the 2 becomes
# :math:`2 \cdot 3 / 2.5 = 2.4`. We measure :math:`B` by passing tensors round the ring, and
# :math:`S` by single steps. The lengths are orders of magnitude, because small parts compute and
# travel more slowly:

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

# Folded: What passing a tensor takes
sent

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

bandwidth = max((row["GB/s"] for row in sent.rows), default=nan) * 1e9


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


largest = steps.rows[-1]["tokens of a part"] if steps.rows else nan
at_largest = measured_step(largest, "step, forward") if steps.rows else nan
FORWARD_FLOPS = 2 * HEADS * HEAD_DIM
flops = FORWARD_FLOPS * largest**2 / (at_largest / 1e3)
crossing = {"forward": 2 * flops / bandwidth, "backward": 2.4 * flops / bandwidth}
hidden_from = [round(tokens, -2) for tokens in crossing.values()]
connection = [
    ("bytes per second to the next rank, B", f"{bandwidth / 1e9:.0f} GB/s"),
    ("FLOPs per second of a forward step, S", f"{flops / 1e12:.0f} TFLOP/s"),
    ("forward: hidden from", f"{hidden_from[0]:,.0f} tokens per rank"),
    (
        "backward, more than two ranks: hidden from",
        f"{hidden_from[1]:,.0f} tokens per rank",
    ),
]
lab.table(
    [{"quantity": name, "value": x} for name, x in connection] if steps.rows else [],
    "From which length on a transfer is hidden",
)

# %%
# **Short sequences lose by more than transfers.** Their *kernels* are less efficient, and each step
# but the first merges; the *host* has to launch them. We time kernels one at a time, and the host
# by a call of 128 tokens per rank.

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

# Folded: What a call costs
costs

# %%

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
suspects = [
    ("linear scaling", ideal_ms),
    ("the ring", ring_ms),
    ("the kernels of the ring, one at a time", by_kernels),
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
either = min(by_kernels, ring_cost) > ideal_ms + 0.5 * (ring_ms - ideal_ms)
lab.read(
    "**Either the kernels or the host is slow enough to explain the loss alone**, so these times, "
    "which overlap in the ring, do not tell them apart."
    if either
    else "No one of the two is slow enough to explain the loss alone."
)

# %%
# Memory
# ------
#
# Memory is why the GPUs share a sequence. Sharing divides what a model keeps by the number of GPUs,
# but not the peak of a single layer. One GPU and then all together compute 131,072 tokens, and each
# notes the most that its allocator held.

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

# Folded: The most memory that a GPU needed, as recorded
memory

# %%

gib = {row["GPUs"]: row["GiB per GPU"] for row in memory.rows}
most = max(gib, default=1)
together = gib.get(most, nan)


def tensors(held, size):
    """How many tensors of a part, such as q, some GiB are."""
    return held * 2**30 / (MEMORY_LENGTH / size * per_token)


kept = LAYERS * KEPT * MEMORY_LENGTH * per_token / 2**30
lab.table(
    [
        {
            "GPUs": size,
            "peak of a layer, GiB": f"{peak:.1f}",
            "the same in tensors like the rank's q": f"{tensors(peak, size):.0f}",
            f"kept for {LAYERS} layers, on paper, GiB": f"{kept / size:.0f}",
        }
        for size, peak in gib.items()
    ],
    "The memory of each GPU",
)

# %%

# Reading
lab.read(
    f"**The peak of a layer falls by {100 * (1 - together / gib.get(1, nan)):.0f} %, and what a "
    f"model keeps by {100 * (1 - 1 / most):.0f}.** A rank's tensors are 1/{most} as long, but at "
    "the peak it holds more of them, because parts and gradients that travel come on top."
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


# %%

# Folded: The long sequence, as recorded
long = lab.measure("A long sequence, forward and backward", long_rows)
long

# %%
# Beside PyTorch
# --------------
#
# PyTorch has a ring of its own, still experimental: ``context_parallel``, in the order of our
# zig-zag. We run it around cuDNN's attention, and time it only if its output is that of our ring.

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

# Folded: Both rings, in percent of linear scaling
lab.plot(beside, "Beside PyTorch's context parallelism", share=True)

# %%

# Folded: Two sweeps differ
shares_of_ours = [
    sweep.share("Kernel Book", seqlen=PEER_LENGTHS[-1]) for sweep in (beside, speed)
]
lab.read(
    f"Ours reaches {100 * shares_of_ours[0]:.0f} % of linear scaling at the longer length here, "
    f"and {100 * shares_of_ours[1]:.0f} % in “How fast is it?”: two sweeps of three rounds differ "
    "by that much."
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
    """Percents by length, in words; less than 1 % is no difference."""
    return " and ".join(
        f"as long at {n:,}"
        if abs(more) < 1
        else f"{abs(more):.0f} % {'longer' if more > 0 else 'shorter'} at {n:,}"
        for n, more in found.items()
    )


def beside_ours(name, found):
    """How long PyTorch's ring takes, as a paragraph."""
    return (
        f"PyTorch's ring around {name.removesuffix(' CP')} takes {compared(found)} tokens than "
        "ours. How much of this its kernel takes we cannot say, because we did not time it alone."
    )


lab.read(
    " ".join(beside_ours(name, found) for name, found in timed_peers.items() if found)
    if any(timed_peers.values())
    else "PyTorch's context parallelism did not run here; the figure names the reason."
)

# %%
# Eight, 64 and 1,024 GPUs
# ------------------------
#
# For more GPUs than our two we simulate a ring from the pieces that we measured. A step takes as
# long as the longest of three: its scores, the transfer beside them, and the host's time to launch
# it. The last gradients, which nothing hides, are added.


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
predicted = []
for seqlen in LENGTHS:
    real = speed.milliseconds_at("Kernel Book", seqlen=seqlen)
    told_by = simulated(WORLD, seqlen, bandwidth)[0]
    predicted.append((seqlen, told_by, real))
off_by = {n: 100 * (told_by / real - 1) for n, told_by, real in predicted}
lab.read(
    "At the lengths that were measured, the simulation is off by "
    + ", ".join(
        f"{off:+.0f}".replace("-", "−").replace("+0", "0").replace("−0", "0")
        for off in off_by.values()
    )
    + " %, from the shortest to the longest."
)

# %%
# For eight GPUs of one host we assume the connection that we measured, and for more a network card
# of 400 Gb/s each, because the slowest link of the ring counts.

# Measuring
NETWORK = 50e9


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
def curves(axes, rows):
    lengths = [2**power for power in range(16, 27)]
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
    return f"Three lines that rise with the number of tokens; at 8Mi tokens: {found}."


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
        (2**power for power in range(16, 27) if linear(world, 2**power) >= GOOD),
        default=0,
    )
    for world in CLUSTERS
}


def short(tokens):
    """A power of two as the axis of the figure has it."""
    return f"{tokens >> 20}Mi" if tokens >= 2**20 else f"{tokens >> 10}Ki"


lab.read(
    "**A ring is for long parts, so at a given length for few ranks.** "
    f"To keep {GOOD} % of linear scaling, "
    + " and ".join(
        f"{world:,} GPUs need about {short(from_tokens[world])} tokens"
        for world in (min(CLUSTERS), max(CLUSTERS))
        if from_tokens[world]
    )
    + " by the simulation, whose errors we know for two ranks only. Larger clusters share heads "
    "within a host, and pass parts round a ring of hosts (USP, in the references)."
)

# %%
# What breaks it
# --------------
#
# A mistake on one rank usually hangs the others, because they wait for a message that never comes.
# So the ranks first agree on what they are about to compute, and wait no longer than their process
# group allows.
#
# **A wrong layout.** What ranks cannot see is a sequence in another order than ``layout`` says. A
# contiguous part passed as zig-zag has the right shape and raises no error, but the result is
# wrong. ``ranks.run`` calls a function on every rank and returns what each returns:

# %%


# Measuring
def passed_as(rank, world, q, k, v, layout):
    """Contiguous parts, passed as a layout; the whole output."""
    parts = [ring.shard_sequence(x, 2) for x in (q, k, v)]
    out = ring.ring_attention(
        *(x.to(runtime.DEVICE) for x in parts), is_causal=True, layout=layout
    )
    return ring.unshard_sequence(out, 2).cpu()


# %%

q, k, v = torch.randn(3, 1, 2, 8 * ranks.world, HEAD_DIM).to(DTYPE).unbind()
truth, _ = reference.attention(q, k, v, True)
for layout in ring.LAYOUTS:
    out = ranks.run(passed_as, q, k, v, layout)[0]
    error = (out - truth).abs().max().item()
    print(f"contiguous parts passed as {layout}: error {error:.1e}")

# %%
# **A wrong shape, a late rank, a dead one.** These the ranks do see. The last rank passes a longer
# part; or comes later than the others wait; or ends without a word:
#
# .. literalinclude:: attention_across_gpus.py
#    :language: python
#    :pyobject: dies
#    :lines: 3-7
#    :dedent:

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
    last = ranks.world - 1
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
lab.table(in_short(here), f"Mistakes of the last of {ranks.world} ranks, run here")

# %%

# Folded: The same on the recorded GPUs
lab.measure("Mistakes of the last rank", lambda: here)

# %%

# Reading
longest = max(row["seconds"] for row in here if row["seconds"] != "—")
silent = [row["mistake"] for row in here if "returns" in row["what it says"]]
lab.read(
    f"No rank hangs: the longest waits {longest:.1f} s, with a time-out of {LATE:.0f}. A dead rank "
    "is noticed sooner; we suspect that its closed connection gives it away."
    + (
        f" One returns as if nothing had happened: {', '.join(silent)}."
        if silent
        else ""
    )
)

# %%
# In short
# --------
#
# Outputs over parts of the keys can be merged by one number per query, so queries stay and keys
# travel round a ring. Under a causal mask, a piece from either end gives every rank the same work,
# which gains most. How much of the speed is left depends on the tokens per rank, so a ring suits
# long parts.
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
