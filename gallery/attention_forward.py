"""
Attention, tile by tile
=======================

Attention compares every query with every key: double the length, and the table of scores grows
fourfold, until it no longer fits on the GPU. *Must that table ever exist in memory?*

You will learn

- how a softmax can carry a weighted sum along, so that no table of scores is needed;
- which tiles a causal mask leaves whole, which it cuts, and which it lets us skip;
- what tiles save in memory and in time, and what the usual mistakes look like when they run.
"""

# sphinx_gallery_thumbnail_number = 3
import re
import statistics
from functools import partial
from itertools import groupby
from unittest import mock

import torch
import torch.nn.functional as F

from kernelbook import lab, reference, runtime
from kernelbook.lab import results
from kernelbook.lab.attention_bench import FORWARD, balance, matmul
from kernelbook.ops.attention import attention
from kernelbook.ops.attention.tiled import key_tiles, tiled_attention, tiled_forward

lab.start("attention_forward", "kernelbook.ops.attention")

# %%
# The problem in PyTorch
# ----------------------
#
# Attention works on three kinds of vectors: queries, keys and values. The dot product of a query
# and a key, their *score*, measures how well the two match. For each query, softmax turns the
# scores into weights that sum to 1. Every key comes with a value, and the output is the weighted
# sum of the values.

# Reading
three_scores, three_values = torch.tensor([[1.0, 2, 4], [10, 20, 30]])
three_weights = torch.softmax(three_scores, -1)
lab.read(
    f"Suppose that a query scores 1, 2 and 4 against three keys. Its weights are then "
    f"{three_weights[0]:.3f}, {three_weights[1]:.3f} and {three_weights[2]:.3f}, and if the values "
    f"are the numbers 10, 20 and 30, its output is {three_weights @ three_values:.1f}."
)

# %%
# In PyTorch, *standard attention* takes a few lines:


def standard_attention(q, k, v, is_causal=False):
    scores = (q * q.shape[-1] ** -0.5) @ k.mT
    if is_causal:  # a query sees the keys up to its own position, and no later ones
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device)
        seen = seen.tril(k.shape[-2] - q.shape[-2])
        scores = scores.masked_fill_(~seen, -torch.inf)
    return torch.softmax(scores, dim=-1) @ v


# %%
# All tensors have the shape (batch, heads, length, head_dim): a model runs several attentions side
# by side, its *heads*, each on vectors of head_dim numbers. We divide the scores by the square root
# of head_dim, because dot products of longer vectors spread wider. The factor
# ``q.shape[-1] ** -0.5`` is called the *scale*. The second argument of ``tril`` is 0 as long as
# there are as many queries as keys.
#
# The scores form a table with a row for each query and a column for each key.

# %%
# What the table costs
# --------------------
#
# Why avoid this table? We count its operations, its bytes and its memory.
#
# **Operations.** One head with :math:`N` queries, :math:`N` keys and head_dim :math:`D` has
# :math:`N^2` scores, each of which takes :math:`D` multiplications and :math:`D` additions. The
# second matmul, weights times values, costs the same. Together they take :math:`4\, N^2 D`
# floating-point operations (FLOPs); the softmax is, as usual, not counted.
#
# **Bytes.** The first matmul writes the scores, softmax reads them and writes the weights, and the
# second matmul reads the weights. Unless the table fits in a cache, :math:`N^2` numbers thus make
# four trips between the chip and its memory, :term:`HBM` on a data-center GPU. The other tensors,
# of :math:`N D` numbers each, make one.


# Measuring
rows = []
for length in (1024, 4096, 16384, 65536):
    flops = 4 * length**2 * 128
    least = 4 * length * 128 * 2  # bytes
    table = 4 * length**2 * 2
    rows.append(
        {
            "length": length,
            "GFLOP": round(flops / 1e9, 2),
            "table, GiB": round(table / 2**30, 3),
            "the rest, GiB": round(least / 2**30, 4),
            "FLOPs per byte": round(flops / (table + least)),
            "without the table": round(flops / least),
        }
    )
machine = lab.measure("Peak speed of a matmul and of a copy, bfloat16", balance)

# %%

# Reading
nan = float("nan")
needed = machine.rows[0]["FLOPs per byte"] if machine.rows else nan
most = rows[-1]["FLOPs per byte"]
rate_of_table = most / needed
peak = machine.rows[0] if machine.rows else {}
gpu = machine.provenance["gpu"] if machine.rows else "GPU"
lab.read(
    f"At head_dim 128, in 16 bits, a score costs 4 × 128 operations and 4 × 2 bytes, so standard "
    f"attention does at most {most} operations per byte. While a copy moves one byte, a matmul on "
    f"the {gpu} does {needed:.0f} operations. "
    + (
        f"**Memory alone thus keeps standard attention below {most} / {needed:.0f}, or "
        f"{100 * rate_of_table:.0f} %, of the speed of a matmul.**"
        if most < needed
        else "Memory alone thus need not slow standard attention down."
    )
)

# %%

# Folded: Operations per byte: of the GPU, and of attention at each length
lab.together(
    lab.read(
        f"A matmul by cuBLAS runs at {peak.get('matmul, TFLOP/s', nan)} TFLOP/s, and a copy at "
        f"{peak.get('copy, GB/s', nan):,} GB/s. Their quotient is {needed:.0f} operations per "
        f"byte."
    ),
    lab.table(
        rows,
        "One head, head_dim 128, 16 bits. GiB moved: four trips of the table, one of the rest",
    ),
)

# %%
# **Memory.** Every version needs q, k, v and out. The figure shows what each adds to them: standard
# attention its scores and weights, and the package's kernel, which works tile by tile, almost
# nothing.

package = partial(attention, backend="triton")


def peak_memory(run, *inputs):
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    try:
        out = run(*inputs)
    except torch.cuda.OutOfMemoryError:
        return "out of memory"
    extra = torch.cuda.max_memory_allocated() - before
    return round((extra - out.numel() * out.itemsize) / 2**20, 2)


def memory_experiment():
    table = []
    for length in (2**power for power in range(10, 18)):
        size = (3, 1, 16, length, 128)
        inputs = torch.randn(size, device=runtime.DEVICE).bfloat16()
        row = {"length": length}
        row["PyTorch, MiB"] = peak_memory(standard_attention, *inputs)
        row["Kernel Book, MiB"] = peak_memory(package, *inputs)
        table.append(row)
    return table


memory = lab.measure("Peak memory beyond q, k, v and out", memory_experiment)

# %%


# Drawing
def given_mib(length):
    """What q, k, v and out of 16 heads with head_dim 128 take in 16 bits."""
    return 4 * 16 * length * 128 * 2 / 2**20


def ends(rows):
    fitting = [row for row in rows if not isinstance(row["PyTorch, MiB"], str)]
    length, taken = fitting[-1]["length"], fitting[-1]["PyTorch, MiB"]
    return (
        f"Three lines over the length. At {length:,}: scores and weights {taken / 1024:,.0f} GiB; "
        f"q, k, v and out {given_mib(length) / 1024:,.1f} GiB; tile by tile "
        f"{fitting[-1]['Kernel Book, MiB']:,.0f} MiB."
        + " Beyond it, the scores and weights are out of memory."
        * (len(fitting) < len(rows))
    )


def three_lines(axes, rows):
    found = [(r["length"], r["PyTorch, MiB"]) for r in rows]
    fitting = [(x, y) for x, y in found if not isinstance(y, str)]
    ink = {"color": lab.colour("PyTorch")}
    axes.plot(*zip(*fitting, strict=True), marker="o", **ink)
    if len(fitting) < len(found):
        (x, y), failed = fitting[-1], found[len(fitting)][0]
        axes.plot([x, failed], [y, 4 * y], linestyle=":", **ink)
        axes.plot(failed, 4 * y, marker="x", markersize=9, markeredgewidth=2, **ink)
        axes.annotate(
            "out of memory",
            (failed, 4 * y),
            xytext=(-9, 0),
            textcoords="offset points",
            ha="right",
            va="center",
            fontsize=10,
            **ink,
        )
    lengths = [r["length"] for r in rows]
    given = [given_mib(length) for length in lengths]
    axes.plot(lengths, given, marker="s", color=lab.colour("matmul"))
    tiles = [r["Kernel Book, MiB"] for r in rows]
    ours = {"color": lab.colour("Kernel Book")}
    axes.plot(lengths, tiles, marker="D", linewidth=2.6, **ours)
    below = {"xytext": (7, -15), "textcoords": "offset points", "fontsize": 11}
    above = below | {"xytext": (-9, 5), "ha": "right"}
    axes.annotate("scores and weights", fitting[-2], **above, **ink)
    axes.annotate("q, k, v and out", (lengths[3], given[3]), color="#59636e", **below)
    axes.annotate("added tile by tile", (lengths[3], tiles[3]), **below, **ours)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(
        [2**n for n in (10, 12, 14, 16)], ["1,024", "4,096", "16,384", "65,536"]
    )
    sizes = {1 / 16: "64 KiB", 1: "1 MiB", 2**4: "16 MiB", 2**8: "256 MiB"}
    sizes |= {2**12: "4 GiB", 2**16: "64 GiB"}
    axes.set_yticks(list(sizes), list(sizes.values()))
    axes.set(xlabel="length")


lab.draw(memory, "Memory by length, 16 heads", ends, three_lines)

# %%

# Reading
fits = [r for r in memory.rows if not isinstance(r["PyTorch, MiB"], str)]
fails = [r["length"] for r in memory.rows if isinstance(r["PyTorch, MiB"], str)]
last = fits[-1] if fits else {}
one_each = 16 * last.get("length", nan) * 4 / 2**20  # a float32 per query, in MiB
lab.read(
    (
        f"Standard attention runs out of memory at length {fails[0]:,}. At half that length, its "
        if fails
        else f"At length {last.get('length', nan):,}, its "
    )
    + f"scores and weights take **{last.get('PyTorch, MiB', nan) / 1024:,.0f} GiB**. There, "
    f"the package's kernel adds **{last.get('Kernel Book, MiB', nan):,.0f} MiB**"
    + (
        ": one float32 per query, kept for the backward pass."
        if last.get("Kernel Book, MiB") == one_each
        else "."
    )
)

# %%
# The idea
# --------
#
# A query does not need its whole row of scores at once, because a softmax can be computed block by
# block, as :doc:`/chapters/softmax` shows. We therefore keep a :term:`tile` of queries on the chip,
# in :term:`registers <register>` and :term:`shared memory`, and loop over the keys and values one
# tile at a time.
#
# .. admonition:: Key idea
#    :class: kb-key
#
#    Each iteration computes a small tile of scores, uses it, and discards it: the table never
#    exists.
#
# .. image:: /figures/attention-memory.svg
#    :alt: Above, standard attention has q, k, v and out in memory, and two large squares, scores
#          and weights. Below, tile by tile: memory holds q, k, v and out; the chip holds one tile
#          each of q, k, v, scores and acc, and two columns, m and l.
#
# From one iteration to the next, each query carries only the maximum ``m`` and the sum ``l`` of
# online softmax, and ``acc``, the weighted sum of the values so far.
#
# **The price.** Every tile of queries reads all keys and values of its head again. In 16 bits, a
# key and its value take :math:`4 D` bytes. A tile of :math:`M` queries does :math:`4 M D`
# operations with them, so :math:`M` per byte. The more queries a tile has, the less is read, and
# the :term:`L2` cache may serve what is read again.

# Reading
tile, l2 = 128, machine.provenance["l2_mib"] if machine.rows else nan
keys_mib = 2 * 4096 * 128 * 2 / 2**20
lab.read(
    f"Our tiles will have {tile} queries. "
    + (
        f"If every read came from HBM, that would be a limit again, at {tile} / {needed:.0f}, or "
        f"{100 * tile / needed:.0f} %, of the speed of a matmul. "
        if tile < needed
        else "HBM alone is fast enough for them. "
    )
    + f"But at length 4,096, the keys and values of a head take {keys_mib:.0f} MiB, and L2 "
    f"holds {l2:.0f}, so one tile can find there what another has just read."
)

# %%
# The mathematics
# ---------------
#
# How can ``m``, ``l`` and ``acc`` stand in for all earlier keys? In our example, let the first tile
# hold the scores 1 and 2. Then ``l`` is :math:`e^{1-2} + e^{2-2}`, with both terms relative to the
# maximum, 2. The next tile brings a score of 4, so the maximum changes, and both terms are too
# large.
#
# We need not go back to the keys. Multiplying a *sum* by :math:`e^{2-4}`, a factor called
# ``alpha``, makes all of its terms relative to 4 at once, because
# :math:`e^{s-2}\, e^{2-4} = e^{s-4}`. Then the new key adds :math:`p = e^{4-4} = 1` to ``l``, and
# ``p`` times its value, 30, to ``acc``.


# Drawing
first_two, m_two = three_scores[:2], three_scores[:2].max()
terms_two = (first_two - m_two).exp()
l_two, acc_two = terms_two.sum(), terms_two @ three_values[:2]
factor = (m_two - three_scores[2]).exp()
l_three, acc_three = l_two * factor + 1, acc_two * factor + three_values[2]
STATES = (
    (
        "first tile\nm = 2",
        terms_two.tolist(),
        l_two,
        f"acc = 10 · {terms_two[0]:.3f} + 20 · {terms_two[1]:.0f} = {acc_two:.1f}",
    ),
    (
        f"times alpha\n{factor:.3f}",
        (terms_two * factor).tolist(),
        l_two * factor,
        f"acc = {acc_two:.1f} · {factor:.3f} = {acc_two * factor:.1f}",
    ),
    (
        "second tile\nm = 4",
        [*(terms_two * factor).tolist(), 1.0],
        l_three,
        f"acc = {acc_two * factor:.1f} + 30 · 1 = {acc_three:.1f}",
    ),
)


def shrinking(axes):
    inks = [lab.colour(name) for name in ("matmul", "Kernel Book", "PyTorch")]
    for row, (_, terms, total, words) in enumerate(STATES):
        left = 0
        for number, (term, ink) in enumerate(zip(terms, inks, strict=False)):
            named = {"label": f"key {number + 1}"} if row == 2 else {}
            axes.barh(row, term, left=left, height=0.42, color=ink, **named)
            if term > 0.2:
                look = {"ha": "center", "va": "center", "color": "#ffffff"}
                middle, digits = left + term / 2, 0 if term == 1 else 3
                axes.text(middle, row, f"{term:.{digits}f}", fontsize=9, **look)
            left += term
        look = {"va": "center", "fontsize": 10}
        axes.text(left + 0.03, row, f"l = {total:.3f}", fontweight="bold", **look)
        axes.text(0, row + 0.37, words, color="#59636e", **look)
    axes.set_yticks(range(3), [name for name, *_ in STATES])
    axes.set(xlim=(0, 1.75), ylim=(2.6, -0.35), xticks=[])
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False)
    axes.spines["bottom"].set_visible(False)
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(-0.02, 1),
        ncols=3,
        handlelength=1,
        fontsize=10,
    )


lab.sketch(
    "The old terms shrink together",
    "Bars of terms that add up to l. "
    + " ".join(
        f"{' '.join(name.split())}: terms {', '.join(f'{x:.3f}' for x in terms)}; "
        f"l = {total:.3f}; {words}."
        for name, terms, total, words in STATES
    ),
    shrinking,
    height=3.0,
)

# %%

# Reading
lab.read(
    f"In the end, `acc / l` is {acc_three:.1f} / {l_three:.3f} = {acc_three / l_three:.1f}, the "
    f"output from above."
)

# %%
# **Any number of keys.** Let :math:`s_j` be the scores of one query and :math:`v_j` the values. For
# the set :math:`A` of all keys so far, the query carries a *triple*:
#
# .. math::
#
#    \begin{aligned}
#    m_A &= \max_{j \in A} s_j \\
#    l_A &= \sum_{j \in A} e^{s_j - m_A} \\
#    acc_A &= \sum_{j \in A} e^{s_j - m_A}\, v_j
#    \end{aligned}
#
# The next tile, :math:`B`, may raise the maximum. The old sums are rescaled, and the new terms
# added:
#
# .. math::
#
#    \begin{aligned}
#    m &= \max(m_A,\, \max_{j \in B} s_j) \\
#    \alpha &= e^{m_A - m}, \qquad p_j = e^{s_j - m} \\
#    l &= l_A\, \alpha + \sum_{j \in B} p_j \\
#    acc &= acc_A\, \alpha + \sum_{j \in B} p_j\, v_j
#    \end{aligned}
#
# We start with the empty set, for which :math:`m = -\infty` and both sums are 0. Each iteration
# keeps the triple correct, however we split the keys. After the last tile, the output is
# :math:`acc / l`, because the factor :math:`e^{-m}` in both sums cancels.

# %%
# .. dropdown:: The merge of any two sets
#
#    Any two disjoint sets :math:`A` and :math:`B` can be merged in the same way, each with its own
#    factor. The triple of :math:`A \cup B` has the larger of the two maxima:
#
#    .. math::
#
#       \begin{aligned}
#       m &= \max(m_A,\, m_B) \\
#       l &= l_A\, e^{m_A - m} + l_B\, e^{m_B - m} \\
#       acc &= acc_A\, e^{m_A - m} + acc_B\, e^{m_B - m}
#       \end{aligned}
#
#    The loop is the special case in which we compute the terms of :math:`B` relative to :math:`m`
#    from the start, so that only one factor remains. We verified the merge in float64: 300 keys in
#    2, 7 and 100 pieces, merged in random order, match a softmax to within :math:`10^{-13}`.

# %%


# Measuring
def triple(s, v):
    m = s.amax(-1, keepdim=True)
    p = (s - m).exp()
    return m, p.sum(-1, keepdim=True), p @ v


def merge(a, b):
    m = torch.maximum(a[0], b[0])
    x, y = (a[0] - m).exp(), (b[0] - m).exp()
    return m, a[1] * x + b[1] * y, a[2] * x + b[2] * y


s, v = 10 * torch.randn(4, 300, dtype=torch.float64), torch.randn(300, 8).double()
truth = torch.softmax(s, -1) @ v
for pieces in (2, 7, 100):
    parts = zip(s.tensor_split(pieces, 1), v.tensor_split(pieces), strict=True)
    triples = [triple(*part) for part in parts]
    while len(triples) > 1:
        i, j = sorted(torch.randperm(len(triples))[:2].tolist())
        triples.append(merge(triples.pop(j), triples.pop(i)))
    m, l_i, acc = triples[0]
    assert (acc / l_i - truth).abs().max() < 1e-13

# %%


# Measuring
def sum_after(tiles, l_i):
    m = torch.tensor(-torch.inf)
    for s in tiles:
        m_new = torch.maximum(m, s.max())
        shift = 0 if m_new == -torch.inf else m_new  # exp(-inf - -inf) would be NaN
        l_i = l_i * (m - shift).exp() + (s - shift).exp().sum()
        m = m_new
    return f"{l_i:.4f}" if tiles else f"{l_i:.0f}"


two_tiles = torch.randn(2, 4)
masked = torch.full((2, 4), -torch.inf)
rows = [
    {
        "l starts at": start,
        "sees keys": sum_after(list(two_tiles), torch.tensor(start)),
        "all keys masked": sum_after(list(masked), torch.tensor(start)),
        "meets no tile": sum_after([], torch.tensor(start)),
    }
    for start in (0.0, 1.0, 5.0)
]
assert len({(row["sees keys"], row["all keys masked"]) for row in rows}) == 1
without_tiles = ", ".join(row["meets no tile"] for row in rows)


empty = torch.empty


def poisoned(*args, **options):
    x = empty(*args, **options)
    return x.fill_(float("nan")) if x.is_floating_point() else x


poison = []
for seqlen_q, seqlen_k in ((1, 1), (33, 127), (100, 3)):
    q = torch.randn(1, 2, seqlen_q, 16, device=runtime.DEVICE)
    k, v = torch.randn(2, 1, 2, seqlen_k, 16, device=runtime.DEVICE)
    with mock.patch.object(torch, "empty", poisoned):
        out, lse = attention(q, k, v, is_causal=True, return_lse=True)
    left = (out.isnan().sum() + lse.isnan().sum()).item()
    poison.append({"lengths": f"{seqlen_q} × {seqlen_k}", "NaN": left})
    assert left == 0

# %%

# Folded: Four details: when to divide, what to hold, where l starts, uninitialised outputs
lab.together(
    lab.read(
        "**Why not divide in every iteration?** We could keep the average `acc / l`, as the first "
        "FlashAttention did. Every iteration would then have to undo the last division and divide "
        "again: `acc / l = (acc_A / l_A) · (l_A · alpha / l) + (Σ p_j · v_j) / l`. The result is "
        "the same, so FlashAttention-2 divides once."
    ),
    lab.read(
        "**Why hold queries and loop over keys?** The first FlashAttention held a tile of keys and "
        "looped over queries. Every iteration then has to read the unfinished output of its "
        "queries from memory and write it back. A tile of queries can keep its `acc` on the chip."
    ),
    lab.read(
        f"**Does l start at 0 or at 1?** FlashAttention-2 starts at 0, Triton's tutorial at 1. It "
        f"rarely matters, because the first `alpha` is exp(−∞), or 0, and multiplies the start. "
        f"Over two tiles, the starts 0, 1 and 5 all end at {rows[0]['sees keys']}. Only a query "
        f"that meets no tile keeps its start: {without_tiles}. We start at 0, the sum of no terms, "
        f"and guard the division."
    ),
    lab.read(
        f"**Outputs start as uninitialised memory,** because `torch.empty` writes nothing. That is "
        f"safe, because every query belongs to exactly one program, which writes its row. To "
        f"verify this, we filled both outputs of the package's kernel with NaN and ran it on "
        f"{', '.join(row['lengths'] for row in poison)} queries and keys, which no tile divides: "
        f"{sum(row['NaN'] for row in poison)} NaN remained."
    ),
)

# %%
# Tiles in plain PyTorch
# ----------------------
#
# Here is the loop as code, for one tile of queries, without a mask and with a scale of 1. After
# each tile of keys, it prints the state of the first query.


def one_tile_of_queries(q, k, v, block):
    m_i = torch.full((len(q),), -torch.inf)  # largest score so far
    l_i = torch.zeros(len(q))  # sum of exp(score - m_i) so far
    acc = torch.zeros(len(q), v.shape[1])  # sum of exp(score - m_i) * v so far
    for start in range(0, len(k), block):
        k_j, v_j = k[start : start + block], v[start : start + block]
        scores = q @ k_j.T
        m_new = torch.maximum(m_i, scores.amax(1))
        alpha = torch.exp(m_i - m_new)
        p = torch.exp(scores - m_new[:, None])
        l_i = l_i * alpha + p.sum(1)
        acc = acc * alpha[:, None] + p @ v_j
        m_i = m_new
        numbers = (("m", m_i), ("alpha", alpha), ("l", l_i), ("acc", acc[:, 0]))
        print(*(f"{name} {x[0]:.3f}" for name, x in numbers), sep=", ")
    return acc / l_i[:, None]


# %%
# With head_dim 1 and a query of 1, the scores are the keys themselves, so this is our example of
# three keys, in tiles of two.

three_keys = torch.tensor([[1.0], [2.0], [4.0]])
their_values = torch.tensor([[10.0], [20.0], [30.0]])
out = one_tile_of_queries(torch.ones(1, 1), three_keys, their_values, block=2)
print(f"out {out.item():.3f}")

# %%
# A kernel can follow this loop line by line.
#
# .. dropdown:: The package's version: all tiles, heads and masks
#
#    This is the same loop inside a loop over tiles of queries. ``key_tiles`` lists the tiles of
#    keys that a tile of queries needs; ``_scores`` computes the scores and puts :math:`-\infty`
#    where a query does not see a key; ``_finite(m)`` is ``m`` with 0 instead of :math:`-\infty`.
#
#    .. literalinclude:: /../src/kernelbook/ops/attention/tiled.py
#       :pyobject: tiled_forward
#
#    Without a mask, a tile of queries needs every tile of keys. With a causal mask or a window,
#    ``key_tiles`` decides which tiles it needs and which of those to mask; the section on causal
#    stages derives the rule.
#
#    .. literalinclude:: /../src/kernelbook/ops/attention/tiled.py
#       :pyobject: key_tiles

# %%
# A first kernel
# --------------
#
# To keep the tiles on the chip, we write the loop as a single kernel. In the update below, ``qk``
# is the tile of scores, and each comment gives the PyTorch expression that the line under it
# replaces. ``m_exp`` is a *guard*: for a query that has seen no key yet, it is 0 instead of
# :math:`-\infty`, because :math:`-\infty - (-\infty)` would be NaN.

import triton
import triton.language as tl


@triton.jit
def _update(acc, l_i, m_i, qk, v):
    # torch.maximum(m_i, scores.amax(1))
    m_new = tl.maximum(m_i, tl.max(qk, axis=1))
    m_exp = tl.where(m_new == float("-inf"), 0.0, m_new)
    # torch.exp(m_i - m_new)
    alpha = tl.exp2(m_i - m_exp)
    # torch.exp(scores - m_new[:, None])
    p = tl.exp2(qk - m_exp[:, None])
    # l_i * alpha + p.sum(1)
    l_i = l_i * alpha + tl.sum(p, axis=1)
    # acc * alpha[:, None] + p @ v_j
    acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
    return acc, l_i, m_new


# %%
# - **tl.dot** multiplies two tiles as matrices and adds the product to a third operand.
# - **exp2 instead of exp.** The hardware has an instruction for :math:`2^x` but none for
#   :math:`e^x`. Since :math:`e^x = 2^{x \log_2 e}`, the kernel multiplies the scores by
#   ``scale_log2``, the scale times :math:`\log_2 e = 1.4427`.
# - **p in 16 bits.** If the inputs have 16 bits, ``p.to(v.dtype)`` rounds ``p`` to match, because a
#   :term:`matrix unit` takes both operands in the same format.
# - **input_precision.** By default, ``tl.dot`` rounds float32 operands to :term:`TF32`, by up to a
#   thousandth. ``"ieee"`` avoids the rounding but keeps float32 off the matrix units; 16-bit
#   operands use them either way.
#
# **One program for each tile of queries.** A launch starts a :term:`grid` of programs, with the
# tiles of ``BLOCK_M`` queries along axis 0 and the heads along axis 1: 4,096 queries in tiles of
# 128 make 32 programs per head. Each begins by loading its queries, with the triple of the empty
# set.
#
# ``exist`` is false for rows past the last query, because the last tile may be only partly filled.
# The head's number becomes an ``int64``, because offsets in a large tensor overflow 32 bits.


@triton.jit
def _begin(q_ptr, seqlen_q, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr):
    queries = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = tl.program_id(1).to(tl.int64) * seqlen_q + queries
    offsets = rows[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
    exist = queries[:, None] < seqlen_q
    q = tl.load(q_ptr + offsets, mask=exist, other=0.0)
    m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, HEAD_DIM), tl.float32)
    return queries, offsets, exist, q, m_i, l_i, acc


# %%
# **The loop** takes all keys, ``BLOCK_N`` at a time, and masks every tile. ``n_visible`` says how
# many keys each query sees. With a causal mask, query :math:`i` sees itself and the :math:`i`
# before it, so :math:`i + 1`. (The difference of the lengths, also added there, is 0 for now.)
#
# Past the last key, ``other=0.0`` loads zeros. Otherwise the values there would be undefined, and a
# weight of 0 times a NaN is NaN.


@triton.jit
def _first_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, seqlen_q, seqlen_k, scale_log2,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
):  # fmt: skip
    # -- begin: a tile of queries, and the keys and values of its head
    queries, offsets, exist, q, m_i, l_i, acc = _begin(
        q_ptr, seqlen_q, HEAD_DIM, BLOCK_M
    )
    first = tl.program_id(1).to(tl.int64) * seqlen_k * HEAD_DIM
    k_ptr += first
    v_ptr += first
    n_visible = tl.zeros((BLOCK_M,), tl.int32) + seqlen_k
    if IS_CAUSAL:
        n_visible = tl.minimum(queries + 1 + seqlen_k - seqlen_q, seqlen_k)

    # -- loop: load a tile of keys and values, compute its scores, update the triple
    for start_n in range(0, seqlen_k, BLOCK_N):
        keys = start_n + tl.arange(0, BLOCK_N)
        at = keys[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
        k = tl.load(k_ptr + at, mask=keys[:, None] < seqlen_k, other=0.0)
        v = tl.load(v_ptr + at, mask=keys[:, None] < seqlen_k, other=0.0)
        qk = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
        qk = tl.where(keys[None, :] < n_visible[:, None], qk, float("-inf"))
        acc, l_i, m_i = _update(acc, l_i, m_i, qk, v)

    # -- end: divide once; a query that saw no key gets zeros
    out = acc / tl.where(l_i == 0, 1.0, l_i)[:, None]
    tl.store(out_ptr + offsets, out, mask=exist)


# %%
# On the host, ``run`` allocates the output and launches the grid with ``kernel[grid](...)``.

# Measuring
BLOCKS = {"BLOCK_M": 32, "BLOCK_N": 16}  # small, so that a test input has several tiles


def run(kernel, q, k, v, is_causal, **options):
    # contiguous tensors, and a head_dim that is a power of two, as tl.arange demands
    seqlen_q, head_dim = q.shape[-2:]
    out, scale_log2 = torch.empty_like(q), head_dim**-0.5 * 1.4426950408889634
    options = BLOCKS | options
    grid = (triton.cdiv(seqlen_q, options["BLOCK_M"]), q.shape[0] * q.shape[1])
    sizes = (seqlen_q, k.shape[-2], scale_log2)
    constants = {"HEAD_DIM": head_dim, "IS_CAUSAL": is_causal}
    kernel[grid](q, k, v, out, *sizes, **constants, **options)
    return out


# %%

# Folded: The host function, run
lab.source(run)


# %%
# We run it on our three keys, now with three queries and a causal mask. The device is the GPU, or
# the CPU with Triton's interpreter. Since ``tl.dot`` needs at least 16 columns, we pad with zeros.
# Each query is 4, which the scale :math:`1 / \sqrt{16}` turns into 1.

q, k, v = torch.zeros(3, 1, 1, 3, 16, device=runtime.DEVICE)
q[..., 0] = 4
k[0, 0, :, :1], v[0, 0, :, :1] = three_keys, their_values
out = run(_first_kernel, q, k, v, is_causal=True)
print(*(f"{x:.3f}" for x in out[0, 0, :, 0].tolist()))

# %%
# The last query sees all three keys and gets the 28.0 from above. The others see fewer, yet the
# kernel computed their scores for all three.

# %%
# Causal stages
# -------------
#
# With a :term:`causal mask`, a query sees only the keys up to its own position, so a kernel can
# skip many tiles. The figure shows 192 queries and keys in tiles of 32 queries by 16 keys.
#
# .. image:: /figures/attention-stages.svg
#    :alt: Six rows of 32 queries and twelve tiles of 16 keys. In row r, the first 2 r tiles are
#          whole, the next two are cut by the diagonal, and the rest is never computed. In row 1,
#          the whole tiles end at key 32, and the cut ones at key 64.
#
# A tile of scores is *whole* if every query sees every key, *beyond* if no query sees any, and
# otherwise *cut*. In each row, the whole tiles come first, so we can split the loop into two
# *stages*, mask only in the second, and stop after the cut tiles.
#
# Take row 1, queries 32 to 63. Its first query sees 33 keys and the others more, so
# ``seen_by_all`` is 33, and the first stage ends at key ``whole`` = 33 // 16 · 16 = 32. Its last
# query sees 64 keys, so the second stage ends at ``seen_by_some`` = 64.
#
# In the code, ``tl.static_range`` makes the compiler write the loop twice, for ``CUT`` 0 and 1, so
# that the first copy contains no mask.
#
# .. literalinclude:: attention_forward.py
#    :language: python
#    :pyobject: _staged_kernel
#    :start-at: # -- stages
#    :end-before: if visits_ptr is not None
#    :dedent:


# Whole: in stages
@triton.jit
def _staged_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, seqlen_q, seqlen_k, scale_log2,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    IS_CAUSAL: tl.constexpr, visits_ptr=None,
):  # fmt: skip
    # -- begin: as before
    queries, offsets, exist, q, m_i, l_i, acc = _begin(
        q_ptr, seqlen_q, HEAD_DIM, BLOCK_M
    )
    first = tl.program_id(1).to(tl.int64) * seqlen_k * HEAD_DIM
    k_ptr += first
    v_ptr += first

    # -- stages: which keys all queries of the tile see, and which only some
    n_visible = tl.zeros((BLOCK_M,), tl.int32) + seqlen_k
    seen_by_all, seen_by_some = seqlen_k, seqlen_k
    if IS_CAUSAL:
        n_visible = tl.minimum(queries + 1 + seqlen_k - seqlen_q, seqlen_k)
        seen_by_all = tl.maximum(tl.min(n_visible, axis=0), 0)
        seen_by_some = tl.max(n_visible, axis=0)
    whole = seen_by_all // BLOCK_N * BLOCK_N

    # -- loop: first over whole tiles, then over cut ones, which alone are masked
    for CUT in tl.static_range(2):
        start = whole if CUT else 0
        end = seen_by_some if CUT else whole
        for start_n in range(start, end, BLOCK_N):
            keys = start_n + tl.arange(0, BLOCK_N)
            at = keys[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
            if CUT:
                k = tl.load(k_ptr + at, mask=keys[:, None] < seqlen_k, other=0.0)
                v = tl.load(v_ptr + at, mask=keys[:, None] < seqlen_k, other=0.0)
            else:
                k, v = tl.load(k_ptr + at), tl.load(v_ptr + at)
            qk = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
            if CUT:
                qk = tl.where(keys[None, :] < n_visible[:, None], qk, float("-inf"))
            acc, l_i, m_i = _update(acc, l_i, m_i, qk, v)
            if visits_ptr is not None:
                row = tl.program_id(0) * tl.cdiv(seqlen_k, BLOCK_N)
                tl.atomic_add(visits_ptr + row + start_n // BLOCK_N, 1 + CUT)

    # -- end: as before
    tl.store(out_ptr + offsets, acc / tl.where(l_i == 0, 1.0, l_i)[:, None], mask=exist)


# %%


# Measuring
def trace(seqlen_q, seqlen_k, is_causal):
    q = torch.randn(1, 1, seqlen_q, 16, device=runtime.DEVICE)
    k, v = torch.randn(2, 1, 1, seqlen_k, 16, device=runtime.DEVICE)
    tiles = triton.cdiv(seqlen_q, 32), triton.cdiv(seqlen_k, 16)
    visits = torch.zeros(tiles, dtype=torch.int32, device=runtime.DEVICE)
    run(_staged_kernel, q, k, v, is_causal, visits_ptr=visits)
    return visits


counted = trace(192, 192, True)

# %%

# Reading
in_stage = [(counted == stage).sum().item() for stage in (1, 2)]
lab.read(
    f"A counter in the kernel confirms the figure: it finds {in_stage[0]} whole tiles, "
    f"{in_stage[1]} cut ones, and none of the {counted.numel() - sum(in_stage)} beyond."
)

# %%
# The animation runs both stages for a tile of four queries, with head_dim 2, a scale of 1 and tiles
# of four keys: three whole ones, then a cut one. Watch ``alpha``: it is 1 for a query whose maximum
# stays, and below 1 where the old sums have to shrink.
#
# .. animation:: attention_loop
#
# .. dropdown:: What STAGE & 2 and 4 - STAGE mean in Triton's tutorial
#
#    Triton's own tutorial on fused attention has the same two stages but refers to them by number.
#    Its kernel gets ``STAGE = 3`` for causal and 1 for full attention, to be read as two bits: the
#    first asks for a loop over *whole* tiles, the second for a loop over *cut* tiles. Hence
#    ``STAGE & 2`` tests whether there is a second loop.
#
#    A different number tells the inner function which keys to take: 1 means those up to the
#    diagonal, without a mask; 2 those on the diagonal, masked; and 3 all keys, without a mask.
#    ``4 - STAGE`` turns 3 into 1 and 1 into 3, because the first loop ends at the diagonal in
#    causal attention but takes all keys in full attention. ``STAGE = 3`` therefore runs one loop
#    with the number 1 and one with 2, and ``STAGE = 1`` runs a single loop with the number 3.

# %%
# **Queries and keys of different lengths.** A model that has read 997 tokens and processes 3 more
# has 3 queries and 1,000 keys, and its last query should see all the keys. ``n_visible`` therefore
# adds the difference of the lengths, which aligns the diagonal to the *bottom right*. PyTorch's
# ``is_causal=True`` aligns it to the top left.
#
# .. tilemap::


# Measuring
tiles_computed = []
for seqlen_q, seqlen_k, is_causal in (
    (128, 128, False), (128, 128, True), (100, 127, True), (40, 200, True), (200, 40, True)
):  # fmt: skip
    visits = trace(seqlen_q, seqlen_k, is_causal)
    expected = torch.zeros_like(visits)
    for number in range(len(visits)):
        sizes = (number * 32, seqlen_q, seqlen_k, 32, 16, is_causal)
        for start, _, is_cut in key_tiles(*sizes):
            expected[number, start // 16] = 2 if is_cut else 1
    row = {"queries, keys": f"{seqlen_q}, {seqlen_k}{', causal' * is_causal}"}
    row |= {"tiles": visits.numel()}
    row |= {name: (visits == n).sum().item() for n, name in ((1, "whole"), (2, "cut"))}
    tiles_computed.append(row | {"as key_tiles says": bool((visits == expected).all())})
    assert tiles_computed[-1]["as key_tiles says"]


def who_sees(operator, seqlen_q, seqlen_k):
    q = torch.zeros(1, 1, seqlen_q, 16, device=runtime.DEVICE)
    k = torch.zeros(1, 1, seqlen_k, 16, device=runtime.DEVICE)
    weights = operator(
        q, k, torch.eye(seqlen_k, 16, device=runtime.DEVICE).view_as(k), is_causal=True
    )
    seen = weights[0, 0] > 0
    return ["".join("■" if x else "·" for x in row[:seqlen_k]) for row in seen.tolist()]


rows = []
for seqlen_q, seqlen_k in ((3, 5), (5, 3)):
    ours = who_sees(attention, seqlen_q, seqlen_k)
    theirs = who_sees(F.scaled_dot_product_attention, seqlen_q, seqlen_k)
    rows += [
        {
            "queries, keys": f"{seqlen_q}, {seqlen_k}",
            "query": i,
            "Kernel Book": ours[i],
            "PyTorch": theirs[i],
        }
        for i in range(seqlen_q)
    ]
assert rows[2]["Kernel Book"] == "■■■■■"  # the last of three queries sees all five keys

# Of five queries and three keys, the first two queries see no key.
q = torch.randn(1, 1, 5, 16, device=runtime.DEVICE)
k, v = torch.randn(2, 1, 1, 3, 16, device=runtime.DEVICE)
mask = torch.ones(5, 3, dtype=torch.bool, device=runtime.DEVICE).tril(-2)
assert not attention(q, k, v, is_causal=True)[0, 0, :2].any()
assert not F.scaled_dot_product_attention(q, k, v, attn_mask=mask)[0, 0, :2].any()
assert standard_attention(q, k, v, is_causal=True)[0, 0, :2].isnan().all()

# %%

# Folded: Other lengths: the tiles that the kernel computes, and the keys that a query sees
lab.together(
    lab.table(tiles_computed, "Tiles computed, counted by the kernel"),
    lab.table(rows, "Which keys a query sees with is_causal"),
    lab.read(
        "**Without a causal mask,** the second stage computes at most the last tile, and only if "
        "that tile is partly filled."
    ),
    lab.read(
        "**With more queries than keys,** the first queries would see a negative number of keys, "
        "so the kernel raises `seen_by_all` to 0. These queries see no key at all, and the guards "
        "give them 0. Given our mask, PyTorch's `scaled_dot_product_attention` also returns 0, "
        "whereas `standard_attention` returns NaN."
    ),
)

# %%

# Measuring
WIDE = {"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 8, "num_stages": 3}
q, k, v = torch.randn(3, 1, 2, 512, 128, device=runtime.DEVICE).half()
fewer = [x[:, :, 64:].contiguous() for x in (k, v)]
without = run(_first_kernel, q, *fewer, False, BLOCK_M=128, BLOCK_N=64)
theirs, (truth, _) = standard_attention(q, k, v), reference.attention(q, k, v, False)
lost = lab.Case("", "", without, theirs, truth, factor=4).row()
assert not lost["ok"]


def tiled_cases():
    for seqlen_q, seqlen_k, is_causal in (
        (100, 100, False),
        (100, 100, True),
        (40, 90, True),
    ):
        q = torch.randn(2, 3, seqlen_q, 32, device=runtime.DEVICE)
        k, v = torch.randn(2, 2, 3, seqlen_k, 32, device=runtime.DEVICE)
        ours = tiled_attention(q, k, v, is_causal=is_causal, block_m=32, block_n=16)
        theirs = standard_attention(q, k, v, is_causal)
        truth, _ = reference.attention(q, k, v, is_causal)
        what = f"{seqlen_q} queries, {seqlen_k} keys{', causal' * is_causal}"
        yield lab.Case(what, "forward", ours, theirs, truth, factor=4)


def first_cases(kernel):
    for seqlen_q, seqlen_k, is_causal in (
        (100, 100, False),
        (100, 100, True),
        (40, 90, True),
    ):
        for dtype in (torch.float32, torch.float16):
            q = torch.randn(1, 2, seqlen_q, 32, device=runtime.DEVICE).to(dtype)
            k, v = torch.randn(2, 1, 2, seqlen_k, 32, device=runtime.DEVICE).to(dtype)
            ours = run(kernel, q, k, v, is_causal)
            theirs = standard_attention(q, k, v, is_causal)
            truth, _ = reference.attention(q, k, v, is_causal)
            what = f"{seqlen_q} queries, {seqlen_k} keys{', causal' * is_causal}"
            yield lab.Case(what, "forward", ours, theirs, truth, factor=4)


POINTS = [
    {
        "seqlen": 4096, "batch": 4, "heads": 16, "head_dim": 128,
        "mask": mask, "causal": part, "dtype": torch.bfloat16,
    }
    for mask, part in (("full", 1), ("causal", 0.5))
]  # fmt: skip


def cases_as_timed(kernels):
    """What the ladder times of ours, at its points and in its tiles."""
    for point in POINTS:
        sizes = [point[name] for name in ("batch", "heads", "seqlen", "head_dim")]
        dtype, is_causal = point["dtype"], point["mask"] == "causal"
        if runtime.INTERPRETED:  # too slow for more, and it does not round to bfloat16
            sizes, dtype = [1, 2, 512, 128], torch.float16
        q, k, v = torch.randn(3, *sizes, device=runtime.DEVICE).to(dtype)
        theirs = standard_attention(q, k, v, is_causal)
        of_each = zip(q.split(1), k.split(1), v.split(1), strict=True)  # less memory
        truth = torch.cat([reference.attention(*x, is_causal)[0] for x in of_each])
        blocks = {"block_m": 1024, "block_n": 1024}
        tiled, _ = tiled_forward(q, k, v, is_causal=is_causal, **blocks)
        found = {"tiled PyTorch": tiled}
        for name, kernel in kernels.items():
            found[name] = run(kernel, q, k, v, is_causal, **WIDE)
        for name, ours in found.items():
            what = f"{name}, {' × '.join(map(str, sizes))}, {point['mask']}"
            yield lab.Case(what, "forward", ours, theirs, truth, factor=4)
        if not is_causal:  # a result without one of the tiles of keys must not pass
            fewer = (x[:, :, WIDE["BLOCK_N"] :].contiguous() for x in (k, v))
            lost = run(kernels["in stages"], q, *fewer, is_causal, **WIDE)
            assert not lab.Case("", "", lost, theirs, truth, factor=4).row()["ok"]


# %%
# **Every version is checked** against float64. Its sums round in another order than those of
# standard attention, so we allow it four times the error of standard attention in the same dtype.

# Reading
lab.read(
    f"Does that let a mistake pass? A float16 kernel that leaves out one of eight tiles of keys "
    f"has {lost['error'] / lost['tolerance']:.0f} times the error that we allow."
)

# %%

# Folded: All versions, checked against float64
lab.together(
    lab.read(
        f"At length 4,096, these checks still notice one tile of keys missing among "
        f"{4096 // WIDE['BLOCK_N']}."
    ),
    lab.check("Tiled PyTorch", tiled_cases()),
    lab.check("The first kernel", first_cases(_first_kernel)),
    lab.check("With stages", first_cases(_staged_kernel)),
    lab.check(
        "In the tiles that are timed",
        cases_as_timed({"first kernel": _first_kernel, "in stages": _staged_kernel}),
    ),
)

# %%
# How fast is it?
# ---------------
#
# We time all versions under the causal mask, at length 4,096, and compare them with a
# :term:`cuBLAS` matmul in bfloat16. We count operations as above and halve them for the mask,
# whether or not a version skips the other half.


# Measuring
def recognised():
    from torch._dynamo.utils import counters

    rows = []
    for is_causal in (False, True):
        torch.compiler.reset()
        counters.clear()
        q, k, v = torch.randn(3, 1, 2, 256, 128, device=runtime.DEVICE).bfloat16()
        with torch.no_grad():
            torch.compile(standard_attention)(q, k, v, is_causal)
        found = counters["inductor"]["fuse_attention"]
        rows.append(
            {"mask": "causal" if is_causal else "full", "patterns that match": found}
        )
    return rows


matches = lab.measure(
    "Patterns of torch.compile that match standard attention", recognised
)

# %%


# Measuring
def ladder_providers(seqlen, batch, heads, head_dim, mask, causal, dtype):
    size = (3, batch, heads, seqlen, head_dim)
    q, k, v = torch.randn(size, device=runtime.DEVICE, dtype=dtype)
    is_causal = mask == "causal"
    compiled = torch.compile(standard_attention)
    blocks = {"block_m": 1024, "block_n": 1024}
    return {
        "matmul": matmul(),
        "PyTorch": lambda: standard_attention(q, k, v, is_causal),
        "torch.compile": lambda: compiled(q, k, v, is_causal),
        "tiled PyTorch": lambda: tiled_forward(q, k, v, is_causal=is_causal, **blocks),
        "first kernel": lambda: run(_first_kernel, q, k, v, is_causal, **WIDE),
        "in stages": lambda: run(_staged_kernel, q, k, v, is_causal, **WIDE),
    }


# %%

# Measuring
steps = lab.bench("ladder", POINTS, ladder_providers, **FORWARD)


LIBRARIES = ("SDPA flash", "SDPA cuDNN", "FlashAttention")


def of_libraries(slug):
    """The share of a matmul that each library reaches in the next chapter, by mask."""
    records = [r for r in results.recorded() if r["provenance"]["slug"] == slug]
    record = next((r for r in records if r["chapter"] == "attention_fast"), {})
    sweep = record.get("sweeps", {}).get("forward", {})
    found = {}
    for place, point in enumerate(sweep.get("points", [])):
        same = {"seqlen": 4096, "batch": 4, "heads": 16, "head_dim": 128}
        took = {name: times[place] for name, times in sweep["milliseconds"].items()}
        if same.items() <= point.items() and took["matmul"]:
            work = 4 * 64 * 4096**2 * 128 * point["causal"] / (2 * 8192**3)
            for name in LIBRARIES:
                if took.get(name):
                    found[name, point["mask"]] = (
                        work * took["matmul"][1] / took[name][1]
                    )
    return found


def at(name, mask):
    return steps.rate(name, mask=mask)


def percent(name, mask):
    return f"{100 * steps.share(name, mask=mask):.1f} %"


def with_mask(name):
    """How many more milliseconds a version takes with the mask than without."""
    full, causal = (steps.milliseconds_at(name, mask=m) for m in ("full", "causal"))
    return causal - full, 100 * (causal / full - 1)


# %%

# Reading
times_as_fast = {
    name: at("in stages", "causal") / at(name, "causal")
    for name in ("first kernel", "torch.compile", "PyTorch")
}
by_chip = at("first kernel", "causal") / at("PyTorch", "causal")
lab.read(
    f"**The kernel in stages is {times_as_fast['PyTorch']:.0f} times as fast as standard "
    f"attention,** and {times_as_fast['torch.compile']:.0f} times as fast as `torch.compile` makes "
    f"it."
)

# %%
# The hatched bars are libraries, as timed for the next chapter. *SDPA* is PyTorch's
# ``scaled_dot_product_attention``, here with the kernels of cuDNN and of FlashAttention-2, which
# was written for an older GPU, the A100. FlashAttention 4 is a package of its own.


# Drawing
RUNGS = {
    "PyTorch": "standard attention",
    "torch.compile": "with torch.compile",
    "tiled PyTorch": "tiles in PyTorch",
    "first kernel": "first kernel",
    "in stages": "kernel in stages",
    "SDPA flash": "SDPA, FlashAttention-2",
    "SDPA cuDNN": "SDPA, cuDNN",
    "FlashAttention": "FlashAttention 4",
}
OF_LIBRARIES = {  # each GPU's, by the first time of its own sweep
    sweep.rows[0]["ms"]: of_libraries(sweep.provenance["slug"])
    for sweep in (steps, *steps.elsewhere)
    if sweep.rows
}


def shares_of(rows):
    """The bars of a GPU: {(provider, mask): share of the matmul}."""
    ours = {(row["provider"], row["mask"]): row["share"] for row in rows}
    return ours | OF_LIBRARIES[rows[0]["ms"]]


def bars_in_words(rows):
    found = shares_of(rows)
    return (
        "Bars, % of the speed of a matmul: "
        + ", ".join(
            f"{label} {100 * found[name, 'causal']:.1f}"
            for name, label in RUNGS.items()
            if (name, "causal") in found
        )
        + "."
    )


def bars(axes, rows):
    found = shares_of(rows)
    axes.figure.set_size_inches(5.4, 3.8)
    grey, ink = lab.colour("matmul"), "#59636e"
    for place, name in enumerate(RUNGS):
        if (name, "causal") not in found:
            axes.text(1, place, "not recorded", va="center", fontsize=10)
            continue
        value = 100 * found[name, "causal"]
        look = {"color": lab.colour("Kernel Book") if name == "in stages" else grey}
        if name in LIBRARIES:
            look = {"facecolor": "none", "edgecolor": grey, "hatch": "////"}
        axes.barh(place, value, height=0.72, **look)
        axes.text(value + 1, place, f"{value:.1f}", va="center", fontsize=10)
    axes.axvline(100, color=ink, linestyle="--", linewidth=1)
    axes.text(
        99, -0.8, "matmul, cuBLAS", color=ink, ha="right", va="center", fontsize=10
    )
    axes.set_yticks(range(len(RUNGS)), list(RUNGS.values()))
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    axes.grid(visible=True, axis="x")
    axes.set(xlim=(0, 108), ylim=(len(RUNGS) - 0.4, -1.2))
    axes.set_xlabel("% of the speed of a matmul")


lab.draw(
    steps,
    "Causal forward, batch 4, 16 heads, 4,096 tokens, head_dim 128",
    bars_in_words,
    bars,
)

# %%

# Reading
slower = at("PyTorch", "full") / at("tiled PyTorch", "full")
under_mask = at("tiled PyTorch", "causal") / at("PyTorch", "causal")
by_compiling = at("torch.compile", "causal") / at("PyTorch", "causal")
keeps_table = not any(row["patterns that match"] for row in matches.rows)
took = {
    name: steps.milliseconds_at(name, mask="causal")
    for name in ("PyTorch", "in stages")
}
unmasked = 100 * (at("in stages", "full") / at("first kernel", "full") - 1)
in_loop = steps.milliseconds_at("tiled PyTorch", mask="full")
only_skips = under_mask > 1 and in_loop > took["PyTorch"]
lab.read(
    "**Tiles alone are not enough.** In plain PyTorch, every operation still writes its tile to "
    "memory. "
    + (
        f"Without a mask, the loop takes {slower:.1f} times as long as standard attention. "
        + (
            "Under the mask it is ahead, because it skips tiles."
            if only_skips
            else "Under the mask it is ahead."
            if under_mask > 1
            else ""
        )
    )
    if slower > 1
    else f"The loop reaches {under_mask:.1f} times the speed of standard attention with the mask, "
    f"and {1 / slower:.1f} times without."
)

# %%

# Reading
lab.read(
    f"**Tiles on the chip are the first gain.** The first kernel computes and masks every tile. "
    f"Still, it is {by_chip:.0f} times as fast as standard attention."
)

# %%

# Reading
share_left = 1 / times_as_fast["first kernel"]
rows_of_tiles, keys_in_row = 4096 // WIDE["BLOCK_M"], WIDE["BLOCK_M"] // WIDE["BLOCK_N"]
computed = keys_in_row * sum(range(1, rows_of_tiles + 1))
in_map = rows_of_tiles * (4096 // WIDE["BLOCK_N"])
lab.read(
    f"**The stages are the second gain.** The kernel in stages computes "
    f"{100 * computed / in_map:.0f} % of the tiles and needs {100 * share_left:.0f} % of the time "
    f"of the first. Without a causal mask, where it skips nothing and only masks less, it is "
    f"{abs(unmasked):.0f} % {'faster' if unmasked > 0 else 'slower'}."
)

# %%


# Measuring
def by_mask(sweep):
    """The share of a matmul that every version reaches on a GPU, with and without the mask."""
    found = shares_of(sweep.rows)
    return [
        {"version": label}
        | {
            what: f"{100 * found[name, mask]:.1f}"
            if (name, mask) in found
            else "not recorded"
            for what, mask in (("without a mask", "full"), ("causal", "causal"))
        }
        for name, label in RUNGS.items()
    ]


# %%

# Folded: How fast are they without a mask, and with which settings?
lab.together(
    *(
        lab.table(
            by_mask(sweep), f"% of the speed of a matmul, {sweep.provenance['gpu']}"
        )
        for sweep in (steps, *steps.elsewhere)
        if sweep.rows
    ),
    lab.read(
        f"The matmul multiplies square matrices of size 8,192. Each share is of the matmul that "
        f"was timed beside the same version. Our two kernels use tiles of {WIDE['BLOCK_M']} "
        f"queries and {WIDE['BLOCK_N']} keys, {WIDE['num_warps']} warps and {WIDE['num_stages']} "
        f"pipeline stages, and we try no other settings here."
    ),
    lab.read(
        f"The first kernel computes every tile with and without the mask, but takes "
        f"{with_mask('first kernel')[1]:.0f} % longer with it. We did not look for the cause."
        if with_mask("first kernel")[1] > 0
        else "The first kernel computes every tile with and without the mask, and its time does "
        "not grow."
    ),
)

# %%


# Measuring
def kernel_of(run):
    """The kernel that takes the most time of a run, by the name that the profiler gives it."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    found = [
        row for row in profiler.key_averages() if row.device_type == DeviceType.CUDA
    ]
    longest = max(found, key=lambda row: row.self_device_time_total, default=None)
    return "not seen" if longest is None else short_name(longest.key)


def short_name(kernel):
    """A kernel's name without its return type, its namespaces and its arguments."""
    name = re.sub(r"^void |at::native::|\(anonymous namespace\)::|<.*|\(.*", "", kernel)
    return (name or kernel)[:48]


def step_by_step(seqlen=4096):
    q, k, v = torch.randn(3, 4, 16, seqlen, 128, device=runtime.DEVICE).bfloat16()
    scores = q @ k.mT
    weights = torch.softmax(scores, dim=-1)
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    table, matrix = (x.numel() * x.itemsize / 1e9 for x in (scores, q))
    rows = []
    for step, run, gigabytes in (
        ("q @ k.mT", lambda: q @ k.mT, table + 2 * matrix),
        ("softmax", lambda: torch.softmax(scores, dim=-1), 2 * table),
        ("weights @ v", lambda: weights @ v, table + 2 * matrix),
        ("masked_fill_", lambda: scores.masked_fill_(hidden, -torch.inf), 2 * table),
    ):
        took = statistics.median(lab.event_times(run))
        row = {"step": step, "ms": round(took, 2), "GB moved": round(gigabytes, 2)}
        row |= {"GB/s": round(gigabytes / took * 1e3)}
        rows.append(row | {"kernel": kernel_of(run)})
    return rows


# Measuring
one_by_one = lab.measure("Standard attention, one step at a time", step_by_step)

# %%


# Measuring
filling = {row["step"]: row["ms"] for row in one_by_one.rows}.get("masked_fill_", nan)
copied = machine.rows[0]["copy, GB/s"] if machine.rows else nan
moved = {row["step"]: row["GB/s"] / copied for row in one_by_one.rows}


def wider_numbers(columns=4096):
    """How many times as long PyTorch's softmax takes in float32 as in bfloat16."""
    sweep = (results.find("softmax") or {}).get("sweeps", {}).get("forward", {})
    timed = sweep.get("milliseconds", {}).get("PyTorch", [])
    took = {
        point["dtype"]: found[1]
        for point, found in zip(sweep.get("points", []), timed, strict=False)
        if point["columns"] == columns and found
    }
    return took.get("float32", nan) / took.get("bfloat16", nan)


# %%

# Reading
longer = with_mask("PyTorch")[0]
without_mask = steps.milliseconds_at("PyTorch", mask="full")
slow = {step: 1 / rate for step, rate in moved.items()}  # times as long as a copy
twice_as_wide = wider_numbers()
idle = min(slow.get(step, nan) for step in ("softmax", "masked_fill_")) > 2
# Under the mask, masked_fill_ makes two more trips, and half of the operations count.
allowed = min(rate_of_table * 4 / 6, 1) / 2
lab.read(
    f"**Why does standard attention reach only {percent('PyTorch', 'causal')}?** Under the mask, "
    f"memory alone allows {100 * allowed:.0f} %, not {100 * min(rate_of_table, 1):.0f}, because "
    f"`masked_fill_` adds two trips of the table and we count half the operations. "
    + (
        f"Besides, softmax takes {slow['softmax']:.1f} times as long as a copy of the same bytes, "
        f"and `masked_fill_` {slow['masked_fill_']:.1f} times. We did not isolate why."
        if idle and filling > 0.6 * longer
        else "The figure shows each of its steps, beside a copy of the same bytes."
    )
)

# %%

# Drawing
COPIES = {
    table.provenance["slug"]: table.rows[0]["copy, GB/s"]
    for table in (machine, *machine.elsewhere)
    if table.rows and "copy, GB/s" in table.rows[0]
}
COPY_OF = {  # each GPU's, by the first time of its own table
    table.rows[0]["ms"]: COPIES.get(table.provenance["slug"], nan)
    for table in (one_by_one, *one_by_one.elsewhere)
    if table.rows
}


def against_a_copy(rows):
    """Of each step its label, its time, and that of a copy of its bytes, in milliseconds."""
    per_ms = COPY_OF[rows[0]["ms"]] / 1e3
    for row in rows:
        name = {"masked_fill_": "masked_fill_ (causal)"}.get(row["step"], row["step"])
        yield name, row["ms"], row["GB moved"] / per_ms


def steps_in_words(rows):
    found = (f"{name} {ms:.2f}, {copy:.2f}" for name, ms, copy in against_a_copy(rows))
    return f"Bars, in ms, measured and as a copy of the bytes: {'; '.join(found)}."


def step_bars(axes, rows):
    axes.figure.set_size_inches(5.4, 2.9)
    labels = []
    for place, (name, ms, copy) in enumerate(against_a_copy(rows)):
        labels.append(name)
        names = ("measured", "a copy of its bytes") if place == 0 else (None, None)
        axes.barh(place - 0.2, ms, 0.38, color=lab.colour("PyTorch"), label=names[0])
        axes.barh(place + 0.2, copy, 0.38, color=lab.colour("matmul"), label=names[1])
        axes.text(ms + 0.04, place - 0.2, f"{ms:.2f}", va="center", fontsize=10)
        axes.text(copy + 0.04, place + 0.2, f"{copy:.2f}", va="center", fontsize=10)
    axes.set_yticks(range(len(labels)), labels)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    axes.set(ylim=(len(labels) - 0.5, -0.5), xlabel="ms, each step by itself")
    axes.set_xlim(0, 1.12 * max(row["ms"] for row in rows))
    axes.legend(loc="lower left", bbox_to_anchor=(-0.02, 1), ncols=2, fontsize=10)


lab.draw(one_by_one, "Standard attention, step by step", steps_in_words, step_bars)

# %%

# Reading
copies = sum(row["GB moved"] for row in one_by_one.rows) / copied * 1e3  # milliseconds
lab.read(
    f"**Moving the bytes alone takes longer than our whole kernel.** As copies, the four steps "
    f"would take {copies:.1f} ms together. The kernel in stages takes {took['in stages']:.1f} ms."
    if copies > took["in stages"]
    else "With every step at the speed of a copy, standard attention could match the kernel in "
    "stages."
)

# %%


# Measuring
one_after_another = sum(
    row["ms"] for row in one_by_one.rows if row["step"] != "masked_fill_"
)
tile_mib = 4 * 16 * 1024**2 * 2 / 2**20
trips = 8 * 64 * 4096**2 * 2 / (copied * 1e6)  # milliseconds
of_trips = trips / steps.milliseconds_at("tiled PyTorch", mask="full")

# %%

# Folded: How do the steps add up, and what do compiling and tiles in PyTorch gain?
lab.together(
    lab.table(
        [
            {
                "step": row["step"]
                + " (causal only)" * (row["step"] == "masked_fill_"),
                "GB moved": row["GB moved"],
                "ms": row["ms"],
                "% of the speed of a copy": f"{100 * moved[row['step']]:.0f}",
            }
            for row in one_by_one.rows
        ],
        "Standard attention at length 4,096, each step timed by itself",
    ),
    lab.read(
        f"**The sum of the steps.** One by one, the three steps without the mask take "
        f"{one_after_another:.1f} ms. Standard attention as a whole takes {without_mask:.1f} ms "
        f"without the mask, and with it {took['PyTorch']:.1f}, in which it also scales q and "
        f"builds the mask. We did not isolate the differences."
    ),
    lab.read(
        (
            "**Bytes do not limit softmax.** "
            if twice_as_wide < 1.2
            else "**Softmax and bytes.** "
        )
        + f"In the chapter Online softmax, PyTorch's softmax over rows of 4,096 numbers takes "
        f"{twice_as_wide:.2f} times as long in float32 as in bfloat16, for twice the bytes."
    ),
    lab.read(
        f"**torch.compile** makes standard attention {by_compiling:.1f} times as fast under the "
        f"mask. "
        + (
            "It replaces attention with SDPA where the code matches one of its patterns, but its "
            "counter shows that none matches here."
            if keeps_table
            else "It recognises attention here and replaces it with SDPA."
        )
    ),
    lab.read(
        f"**The loop in PyTorch** is {under_mask:.1f} times as fast as standard attention under "
        f"the mask. "
        + ("The skipped tiles decide, because without" if only_skips else "Without")
        + f" a mask, where it skips none, it takes {in_loop:.1f} ms, against "
        f"{took['PyTorch']:.1f} for standard attention with the mask."
    ),
    lab.read(
        f"Its tiles are 1,024 wide, because each of its lines launches a kernel. For all 64 heads, "
        f"a tile of scores takes {tile_mib:.0f} MiB"
        + (", more than L2 holds" if tile_mib > l2 else "")
        + f". Maximum, difference, `exp` and sum are separate operations, so the scores make eight "
        f"trips instead of four. At the speed of a copy, these would take {100 * of_trips:.0f} % "
        f"of the time without a mask. We did not break down the rest."
    ),
)

# %%

# Reading
surplus = computed * WIDE["BLOCK_M"] * WIDE["BLOCK_N"] / (4096**2 / 2) - 1
own = {mask: steps.share("in stages", mask=mask) for mask in ("full", "causal")}
explained = 100 * own["full"] * (1 - 1 / (1 + surplus))
theirs_at = of_libraries(steps.provenance["slug"]) if steps.rows else {}


def standing(name):
    """Where the kernel in stages stands to a library's, in words."""
    ahead = [mask for mask in own if own[mask] > theirs_at[name, mask]]
    if len(ahead) == 1:
        return f"{'with' if ahead == ['causal'] else 'only without'} the mask ahead of"
    return "ahead of" if ahead else "behind"


fastest, ratios = "", []
for mask in ("causal", "full"):
    of_mask = {name: share for (name, m), share in theirs_at.items() if m == mask}
    if of_mask:
        fastest = RUNGS[max(of_mask, key=of_mask.get)].removeprefix("SDPA, ")
        ratios.append(f"{max(of_mask.values()) / own[mask]:.1f}")
lab.read(
    "**How far is it to the libraries?** "
    + (
        f"Our kernel in stages is {standing('SDPA flash')} FlashAttention-2 and "
        f"{standing('SDPA cuDNN')} cuDNN. The fastest library, {fastest}, is {ratios[0]} times as "
        f"fast as ours with the mask, and "
        + (f"{ratios[1]} times without." if len(set(ratios)) > 1 else "also without.")
        if len(theirs_at) >= 4
        else "They were not recorded on this GPU."
    )
)

# %%

# Reading
uneven = not own["full"] - own["causal"] <= 0.03
lab.read(
    f"**What does the mask cost?** Without it, our kernel reaches {100 * own['full']:.1f} % of the "
    f"speed of a matmul, and with it {100 * own['causal']:.1f}. The masked scores of the cut "
    f"tiles, which it computes but we do not count as work, explain {explained:.0f} points of the "
    f"difference."
    if uneven
    else "Per operation, our kernel is about as fast with the mask as without it."
)

# %%
# .. raw:: html
#
#    <span id="the-kernel"></span><span id="is-it-right"></span><span id="figure-2"></span>
#    <span id="figure-5"></span><span id="figure-6"></span>
#
# For the rest, we suspect uneven work, because programs for late queries have more tiles.
# :doc:`The next chapter </chapters/attention_fast>` tests this suspicion.

# %%
# What breaks it
# --------------
#
# With a wrong line, a kernel still runs, and many of its numbers look right. We plant four
# mistakes, one at a time, in a small causal kernel that computes every tile and has no guards. It
# calls the scores ``s``, the queries ``i`` and the keys ``j``:
#
# .. code-block:: python
#
#    p = tl.exp(s)              # no maximum: it should be tl.exp(s - m_new),
#    alpha = 1.0                #             and here, tl.exp(m_i - m_new)
#    seen = i > j               # > for >=: it should be i >= j
#    m_i = m_i                  # statistics not updated: it should be m_new
#    acc = tl.dot(p, v, acc)    # acc not rescaled: it should add to acc * alpha


# Whole: the small one for the mistakes
@triton.jit
def _fragile_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, scale, MISTAKE: tl.constexpr, MASK_VALUE: tl.constexpr,
    BLOCK_M: tl.constexpr = 64, BLOCK_N: tl.constexpr = 16, HEAD_DIM: tl.constexpr = 16,
):  # fmt: skip
    i, d = tl.arange(0, BLOCK_M)[:, None], tl.arange(0, HEAD_DIM)[None, :]
    q = tl.load(q_ptr + i * HEAD_DIM + d)
    m_i = tl.full((BLOCK_M, 1), float("-inf"), tl.float32)
    l_i, acc = (
        tl.zeros((BLOCK_M, 1), tl.float32),
        tl.zeros((BLOCK_M, HEAD_DIM), tl.float32),
    )
    for start_n in range(0, BLOCK_M, BLOCK_N):
        j = start_n + tl.arange(0, BLOCK_N)
        k = tl.load(k_ptr + j[:, None] * HEAD_DIM + d)
        v = tl.load(v_ptr + j[:, None] * HEAD_DIM + d)
        seen = i > j[None, :] if MISTAKE == "> for >=" else i >= j[None, :]
        s = tl.where(
            seen, tl.dot(q, tl.trans(k), input_precision="ieee") * scale, MASK_VALUE
        )
        m_new = tl.maximum(m_i, tl.max(s, axis=1, keep_dims=True))
        m_exp = m_new * 0 if MISTAKE == "no maximum" else m_new
        alpha, p = tl.exp(m_i - m_exp), tl.exp(s - m_exp)
        if MISTAKE == "no maximum":
            alpha = tl.full((BLOCK_M, 1), 1.0, tl.float32)
        l_i = l_i * alpha + tl.sum(p, axis=1, keep_dims=True)
        acc = acc if MISTAKE == "acc not rescaled" else acc * alpha
        acc = tl.dot(p, v, acc, input_precision="ieee")
        m_i = m_i if MISTAKE == "statistics not updated" else m_new
    tl.store(out_ptr + i * HEAD_DIM + d, acc / l_i)


# %%


# Measuring
def planted(q, k, v, scale, mistake, block=16):
    """The loop of _fragile_kernel in PyTorch, with the guard of this page's kernels."""
    i = torch.arange(len(q), device=q.device).view(-1, 1)
    m_i = torch.full((len(q), 1), -torch.inf, device=q.device)
    l_i, acc = torch.zeros_like(m_i), torch.zeros_like(v)
    for start_n in range(0, len(k), block):
        j = i[start_n : start_n + block].T
        s = q @ k[start_n : start_n + block].T * scale
        s = torch.where(i > j if mistake == "> for >=" else i >= j, s, -torch.inf)
        m_new = torch.maximum(m_i, s.amax(1, keepdim=True))
        m_exp = m_new.masked_fill(m_new == -torch.inf, 0)
        if mistake == "no maximum":
            m_exp, m_i = torch.zeros_like(m_new), torch.zeros_like(m_new)
        alpha, p = torch.exp(m_i - m_exp), torch.exp(s - m_exp)
        l_i = l_i * alpha + p.sum(1, keepdim=True)
        acc = acc if mistake == "acc not rescaled" else acc * alpha
        acc = acc + p @ v[start_n : start_n + block]
        m_i = m_i if mistake == "statistics not updated" else m_new
    return acc / l_i.masked_fill(l_i == 0, 1)


ends_as = {
    mistake: planted(torch.ones(3, 1), three_keys, their_values, 1.0, mistake, 2)[-1]
    for mistake in (
        "none",
        "no maximum",
        "> for >=",
        "statistics not updated",
        "acc not rescaled",
    )
}
assert torch.isclose(ends_as["none"], ends_as["no maximum"])
happened = {
    "none": "right",
    "no maximum": "still right: no exponential is infinite",
    "> for >=": "the query loses its own key",
    "statistics not updated": "alpha is 0: the second tile erases the first",
    "acc not rescaled": "l is relative to the new maximum, acc is not",
}
lab.table(
    [
        {
            "mistake": mistake,
            "output": f"{x.item():.3f}",
            "what happened": happened[mistake],
        }
        for mistake, x in ends_as.items()
    ],
    "Our three keys in tiles of two: the output of the last query, by the same loop in PyTorch",
)

# %%

# Reading
assert ends_as["acc not rescaled"] > 30
assert all(10 < ends_as[x] <= 30 for x in ends_as if x != "acc not rescaled")
lab.read(
    f"Only the last result gives itself away: {ends_as['acc not rescaled'].item():.1f} cannot be a "
    f"weighted mean of 10, 20 and 30."
)

# %%


# Measuring
def listed(row):
    return ", ".join(f"{value:.3f}" for value in row[:3].tolist())


def compare(mistake, queries, q, k, v, scale=0.25, mask_value=float("-inf")):
    heads = (x[None, None] for x in (q, k, v))
    truth = reference.attention(*heads, True, scale)[0][0, 0]
    rows = []
    for version, value in (("right", float("-inf")), (mistake, mask_value)):
        out = torch.empty_like(v)
        with runtime.launching_on(q):
            _fragile_kernel[(1,)](q, k, v, out, scale, version, value)
        off = (out - truth)[queries].abs().max().item()
        row = {"version": version} | {f"query {i}": listed(out[i]) for i in queries}
        rows.append(row | {"largest error": f"{off:.1g}"})
        assert (off < 1e-3) == (version == "right")
    return lab.table(rows, f"{mistake}: the first numbers of a result")


q, k, v = torch.randn(3, 64, 16, device=runtime.DEVICE)
rising = 3 * torch.linspace(0, 1, 64, device=runtime.DEVICE).unsqueeze(1)

# %%

# Reading
hidden = torch.ones(64, 64, dtype=torch.bool, device=q.device).triu(1)
largest = (2.0 * (20 * q) @ k.T).masked_fill(hidden, -torch.inf).amax(1).tolist()
lab.read(
    "The figure shows what the kernel makes of 64 queries, which see one to four tiles of 16 keys. "
    "Two mistakes need an input on which they show: large scores for **no maximum**, and scores "
    "that tend to rise with the key for **acc not rescaled**."
)

# %%


# Drawing
def fates_of(out, truth):
    off = (out - truth).abs().amax(1).tolist()
    nothing = (out == 0).all(1).tolist()
    return [
        "NaN" if x != x else "right" if x <= 1e-3 else "zeros" if zeros else "wrong"
        for x, zeros in zip(off, nothing, strict=True)
    ]


fates, guarded = {}, {}
for mistake, (*tensors, scale) in {
    "right": (q, k, v, 0.25),
    "no maximum": (20 * q, k, v, 2.0),
    "> for >=": (q, k, v, 0.25),
    "statistics not updated": (q, k, v, 0.25),
    "acc not rescaled": (q.abs(), k + rising, v, 0.25),
}.items():
    heads = (x[None, None] for x in tensors)
    truth = reference.attention(*heads, True, scale)[0][0, 0]
    out = torch.empty_like(v)
    with runtime.launching_on(q):
        _fragile_kernel[(1,)](*tensors, out, scale, mistake, float("-inf"))
    fates[mistake] = fates_of(out, truth)
    assert set(fates_of(planted(*tensors, scale, "right"), truth)) == {"right"}
    if mistake in ("> for >=", "statistics not updated"):
        guarded[mistake] = fates_of(planted(*tensors, scale, mistake), truth)
assert set(fates["right"]) == set(fates["acc not rescaled"][:16]) == {"right"}
assert fates["statistics not updated"].count("NaN") == 48
assert guarded["statistics not updated"].count("zeros") == 48
assert guarded["> for >="].count("zeros") == 1
assert not any("NaN" in fate for fate in guarded.values())


def strips(axes):
    looks = {
        "right": "#5b8fc9",
        "wrong": "#bc4c00",
        "NaN": "#1f2328",
    }
    for end, ink in looks.items():
        axes.barh(0, 0, color=ink, label=end)  # for the legend
    for row, fate in enumerate(fates.values()):
        start = 0
        for end, alike in groupby(fate):
            width = len(list(alike))
            axes.barh(row, width, left=start, height=0.66, color=looks[end])
            start += width
    for end in (16, 32, 48):
        axes.axvline(end, color="#59636e", linewidth=1, linestyle="--")
    names = ["no mistake" if name == "right" else name for name in fates]
    axes.set_yticks(range(len(fates)), names)
    axes.set_xticks([0, 16, 32, 48, 63])
    for number in range(4):
        text = f"{number + 1} tiles" if number else "see 1 tile"
        look = {"ha": "center", "va": "center", "fontsize": 10, "color": "#59636e"}
        axes.text(16 * number + 8, -0.7, text, **look)
    axes.set(xlim=(0, 64), ylim=(len(fates) - 0.5, -1), xlabel="query")
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False)
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(-0.02, 1),
        ncols=3,
        handlelength=1,
        fontsize=10,
    )


lab.sketch(
    "What becomes of each query",
    f"{lab.figures.in_words(len(fates)).capitalize()} strips of 64 queries. "
    + " ".join(
        f"{'no mistake' if mistake == 'right' else mistake}: "
        + ", ".join(f"{fate.count(x)} {x}" for x in dict.fromkeys(fate))
        + "."
        for mistake, fate in fates.items()
    ),
    strips,
    height=2.8,
)

# %%
# **NaN is the lucky case,** because it shows. Without a maximum, it appears where a score reaches
# 89, because the exponential of 89 is infinite in float32. A test needs such scores.
#
# **A guard hides the other NaNs.** They come from :math:`-\infty - (-\infty)`, where a query sees
# no key of a tile and its maximum is still :math:`-\infty`. The guards of this page turn them into
# zeros, so nothing warns us.
#
# **Plausible numbers** are caught only by a reference. With ``acc`` not rescaled, a query is right
# if its largest score lies in the first tile of keys. For queries 0 to 15 it always does, so a test
# needs several tiles.

# %%

# Folded: Why does each row end as it does? In numbers, and with -1e6 in place of minus infinity
unseen = torch.softmax(torch.full((3,), -1e6), -1) @ three_values
lab.together(
    lab.read(
        f"**The inputs** are in float32. For no maximum, scores reach {max(largest):.0f}, and for "
        f"acc not rescaled, later keys tend to score higher. The other rows share one random input."
    ),
    lab.read(
        "**No maximum.** Every query that reaches 89 divides infinity by infinity, which is NaN."
    ),
    compare("no maximum", [40], 20 * q, k, v, 2.0),
    lab.read(
        "**> for >=.** Every query loses its own key. Query 0 has no other and becomes NaN, or "
        "with guards zero, while all later queries get a plausible number."
    ),
    compare("> for >=", [0, 1], q, k, v, 0.25),
    lab.read(
        f"**Statistics not updated.** The old maximum stays −∞, so `alpha` is always 0, and every "
        f"tile erases those before it. The last 16 queries are left with the last tile alone. It "
        f"is masked for the other {guarded['statistics not updated'].count('zeros')}, which "
        f"become NaN, or with guards zero."
    ),
    compare("statistics not updated", [60], q, k, v, 0.25),
    lab.read(
        "**acc not rescaled.** The kernel still rescales `l`, so numerator and denominator end up "
        "on different scales, unless the largest score is in the first tile."
    ),
    compare("acc not rescaled", [40], q.abs(), k + rising, v),
    lab.read(
        f"**-1e6 in place of minus infinity.** A finite number avoids −∞ − (−∞) without a guard. "
        f"But if a query sees none of our three keys, all its scores are equal. Its output is then "
        f"{unseen:.0f}, the mean of the values 10, 20 and 30, none of which it may see. The "
        f"kernels with guards return 0."
    ),
)

# %%
# In short
# --------

# Reading
of_causal = [share for (_, mask), share in theirs_at.items() if mask == "causal"]
assert 0.45 < 1 - computed / in_map < 0.5  # almost half
lab.read(
    f"The table never has to exist, because a maximum, a sum and a weighted sum stand in for all "
    f"scores that a query has seen. Under the causal mask, almost half of the tiles in our timings "
    f"need no work, and most of the others no mask. The kernel in stages reaches "
    f"{percent('in stages', 'causal')} of the speed of a matmul"
    + (
        f", against {100 * max(of_causal):.1f} % for {fastest}. What lies between them is the "
        f"subject of the next chapter."
        if len(theirs_at) >= 4
        else "."
    )
)

# %%
# Exercises
# ---------
#
# **1. A sliding window.** Let query :math:`i` see only the last :math:`W` keys up to its own. Which
# tiles remain? The map above shows them if you set *keys to the left* to :math:`W - 1`. Write a
# kernel that computes no others.

# %%

# Solution: a sliding window


@triton.jit
def _window_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, length, window, scale_log2,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    queries, offsets, exist, q, m_i, l_i, acc = _begin(q_ptr, length, HEAD_DIM, BLOCK_M)
    start_m = tl.program_id(0) * BLOCK_M
    first = tl.maximum(start_m - window + 1, 0) // BLOCK_N * BLOCK_N
    for start_n in range(first, tl.minimum(start_m + BLOCK_M, length), BLOCK_N):
        keys = start_n + tl.arange(0, BLOCK_N)
        rows = tl.program_id(1).to(tl.int64) * length + keys
        at = rows[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
        k = tl.load(k_ptr + at, mask=keys[:, None] < length, other=0.0)
        v = tl.load(v_ptr + at, mask=keys[:, None] < length, other=0.0)
        qk = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
        behind = queries[:, None] - keys[None, :]
        qk = tl.where((behind >= 0) & (behind < window), qk, float("-inf"))
        acc, l_i, m_i = _update(acc, l_i, m_i, qk, v)
    tl.store(out_ptr + offsets, acc / l_i[:, None], mask=exist)


q, k, v = torch.randn(3, 1, 2, 150, 32, device=runtime.DEVICE)
out, scale_log2 = torch.empty_like(q), 32**-0.5 * 1.4426950408889634
_window_kernel[(triton.cdiv(150, 32), 2)](q, k, v, out, 150, 20, scale_log2, 32, 32, 16)
behind = torch.arange(150, device=q.device).view(-1, 1) - torch.arange(
    150, device=q.device
)
mask = (behind >= 0) & (behind < 20)
theirs, truth = (
    F.scaled_dot_product_attention(*(x.to(dtype) for x in (q, k, v)), attn_mask=mask)
    for dtype in (torch.float32, torch.float64)
)
lab.check(
    "A window of 20", [lab.Case("150 keys", "forward", out, theirs, truth, factor=4)]
)

# %%
# **2. ALiBi, without a new kernel.** ALiBi subtracts a penalty that grows with distance: the score
# becomes :math:`s_{ij} - c\,(i - j)`, where :math:`c` is a constant for each head. Can you get this
# from the package's ``attention``, unchanged, by adding columns to q, k and v?

# %%

# Solution: ALiBi, without a new kernel
#
# The term -c i is the same for all keys of a query, so it cancels in the softmax. That leaves c j,
# the product of a number that belongs to the query and one that belongs to the key: one more column
# is enough. v gets a column of zeros, because attention expects q, k and v to have the same width.


def alibi_attention(q, k, v, slopes):
    scale, length = q.shape[-1] ** -0.5, k.shape[2]
    places = torch.arange(length, device=q.device, dtype=q.dtype).view(1, 1, -1, 1)
    q_more = (slopes.view(1, -1, 1, 1) / scale).expand(*q.shape[:3], 1)
    k_more = places.expand(*k.shape[:3], 1)
    q, k = torch.cat((q, q_more), -1), torch.cat((k, k_more), -1)
    return attention(q, k, F.pad(v, (0, 1)), is_causal=True, scale=scale)[..., :-1]


q, k, v = torch.randn(3, 1, 2, 60, 64, device=runtime.DEVICE)
slopes = torch.tensor([0.125, 0.0625], device=q.device)
i, j = torch.arange(60, device=q.device).view(-1, 1), torch.arange(60, device=q.device)
bias = -slopes.view(1, 2, 1, 1) * (i - j)
bias = bias.masked_fill(i < j, -torch.inf)
theirs, truth = (
    F.scaled_dot_product_attention(
        *(x.to(dtype) for x in (q, k, v)), attn_mask=bias.to(dtype)
    )
    for dtype in (torch.float32, torch.float64)
)
ours = alibi_attention(q, k, v, slopes)
lab.check(
    "ALiBi", [lab.Case("60 keys, 2 heads", "forward", ours, theirs, truth, factor=8)]
)

# %%
# References
# ----------
#
# - Dao, Fu, Ermon, Rudra, Ré. *FlashAttention: fast and memory-efficient exact attention with
#   IO-awareness.* NeurIPS 2022.
# - Dao. *FlashAttention-2: faster attention with better parallelism and work partitioning.* ICLR
#   2024.
# - Milakov, Gimelshein. *Online normalizer calculation for softmax.* arXiv:1805.02867, 2018.
# - Rabe, Staats. *Self-attention does not need O(n²) memory.* arXiv:2112.05682, 2021.
# - Press, Smith, Lewis. *Train short, test long: attention with linear biases enables input length
#   extrapolation.* ICLR 2022.

# %%

# Closing
reached = [steps.share("in stages", mask=mask) for mask in ("causal", "full")]
lab.finish(
    f"{min(reached):.0%} to {max(reached):.0%} of the speed of a matmul at length 4,096"
)
