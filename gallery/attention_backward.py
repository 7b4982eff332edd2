"""
Attention backward
==================

The forward pass never stored the weights of attention, one for every pair of a query and a key, and
yet the gradient depends on all of them. *How can we differentiate through a matrix that was never
stored?*

You will learn

- how one number per query, ``delta``, replaces a whole row of weights and their gradients;
- how programs divide the three gradients, and that it is faster here to compute two matmuls twice
  than to share a sum;
- which tiles a causal gradient may skip, and what happens if it forgets its mask.

:doc:`/chapters/attention_forward` explains tiles and causal stages, and
:doc:`/chapters/attention_fast` explains descriptors.
"""

# sphinx_gallery_thumbnail_number = 4
import math
import statistics
from functools import partial
from unittest import mock

import torch
import torch.nn.functional as F
from matplotlib.patches import Rectangle

from kernelbook import lab, reference, runtime
from kernelbook.lab.attention_bench import (
    BACKWARD,
    LIBRARIES,
    balance,
    draw,
    flash,
    libraries,
    matmul,
    points,
    timed,
)
from kernelbook.lab.results import find
from kernelbook.ops.attention import attention, tiled, tuned
from kernelbook.ops.attention import backward as kernels
from kernelbook.ops.attention.forward import attention_forward
from kernelbook.small import attention_backward as smallest

lab.start("attention_backward", "kernelbook.ops.attention")

# %%
# The problem in PyTorch
# ----------------------
#
# Autograd keeps the whole matrix of weights for the backward pass, because the gradient of softmax
# depends on every weight. Attention of one head is three lines of PyTorch:
#
# .. code-block:: python
#
#    s = q @ k.mT * q.shape[-1] ** -0.5  # scores: a row for each query, a column for each key
#    p = torch.softmax(s, dim=-1)  # weights
#    out = p @ v


# Measuring
def visible(seqlen_q, seqlen_k):
    pairs = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=runtime.DEVICE)
    return pairs.tril(seqlen_k - seqlen_q)


# %%


# Measuring
def standard_attention(q, k, v, is_causal=False):
    s = q @ k.mT * q.shape[-1] ** -0.5
    if is_causal:
        sees = visible(*s.shape[-2:])
        # finite, so that a query that sees no key gets zeros below, and not NaN
        s = s.masked_fill(~sees, torch.finfo(s.dtype).min)
        return (torch.softmax(s, dim=-1) @ v) * sees.any(-1)[:, None]
    return torch.softmax(s, dim=-1) @ v


# %%


# Measuring
def allocated(run):
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = run()
    torch.cuda.synchronize()
    kept = torch.cuda.memory_allocated() - before
    peak = torch.cuda.max_memory_allocated() - before
    return result, kept / 2**20, peak / 2**20


def memory_of(run, seqlen):
    q, k, v, do = torch.randn(
        4, 1, 16, seqlen, 128, device=runtime.DEVICE, dtype=torch.bfloat16
    ).unbind()
    inputs = [x.requires_grad_() for x in (q, k, v)]
    gradients = 3 * q.numel() * 2 / 2**20
    out, kept, _ = allocated(lambda: run(*inputs))
    _, _, peak = allocated(lambda: torch.autograd.grad(out, inputs, do))
    return round(kept, 1), round(peak - gradients, 1)


# %%


# Measuring
two_sweeps = partial(attention, backend="triton")
one_sweep = partial(two_sweeps, deterministic=False)
VERSIONS = {
    "standard attention": standard_attention,
    "two sweeps": two_sweeps,
    "one sweep": one_sweep,
}


def memory_experiment():
    for run in VERSIONS.values():
        memory_of(run, 128)  # what libraries allocate once is not to be counted
    rows = []
    for seqlen in (1024, 4096, 16384):
        for name, run in VERSIONS.items():
            kept, peak = memory_of(run, seqlen)
            row = {"length": seqlen, "version": name}
            rows.append(row | {"kept, MiB": kept, "peak in backward, MiB": peak})
    return rows


# %%

# Folded: Memory of standard attention, and of the two versions that this chapter builds
memory = lab.measure("Memory, 16 heads of head_dim 128, bfloat16", memory_experiment)
memory

# %%

# Reading
nan = float("nan")
found = {(row["length"], row["version"]): row for row in memory.rows}


def kept(length, version):
    return found.get((length, version), {}).get("kept, MiB", nan)


def peak(length, version):
    return found.get((length, version), {}).get("peak in backward, MiB", nan)


lab.read(
    f"At 16,384 tokens and 16 heads of head_dim 128, standard attention keeps "
    f"{kept(16384, 'standard attention') / 1024:.0f} GiB for the backward pass, which then "
    f"allocates {peak(16384, 'standard attention') / 1024:.0f} GiB more. The faster of this "
    f"chapter's two versions, **two sweeps**, needs "
    f"{kept(16384, 'two sweeps') + peak(16384, 'two sweeps'):.0f} MiB. The inputs and their "
    f"three gradients, which every version needs, are not counted:"
)

# %%


# Drawing
def amounts(rows):
    """GiB that two versions keep, and that their backward pass allocates, at 16,384 tokens."""
    return {
        row["version"]: [row[what] / 1024 for what in AMOUNTS]
        for row in rows
        if row["length"] == 16384
        and row["version"] in ("standard attention", "two sweeps")
    }


AMOUNTS = {"kept, MiB": "kept", "peak in backward, MiB": "more in backward"}


def amount_bars(axes, rows):
    axes.figure.set_figheight(2.6)
    inks = [lab.colour(name) for name in ("matmul", "PyTorch")]
    for place, (keeps, more) in enumerate(amounts(rows).values()):
        labels = AMOUNTS.values() if place == 0 else (None, None)
        for begin, size, ink, label in zip(
            (0, keeps), (keeps, more), inks, labels, strict=True
        ):
            axes.barh(
                place,
                size,
                0.5,
                begin,
                color=ink,
                alpha=0.3,
                edgecolor=ink,
                label=label,
            )
        said = (
            f"{keeps + more:.0f} GiB"
            if keeps > 1
            else f"{1024 * (keeps + more):.0f} MiB"
        )
        axes.text(keeps + more + 0.4, place, said, va="center")
    axes.set_yticks(range(2), amounts(rows))
    axes.set(xlim=(0, 40), ylim=(1.5, -0.5), xlabel="GiB")
    axes.grid(axis="y", visible=False)


def amounts_in_words(rows):
    found = (
        f"{version}, {1024 * keeps:,.0f} MiB kept and {1024 * more:,.0f} more in backward"
        for version, (keeps, more) in amounts(rows).items()
    )
    return f"Two bars: {'; '.join(found)}."


lab.draw(
    memory, "Memory at 16,384 tokens, 16 heads of 128", amounts_in_words, amount_bars
)

# %%
# The kernels keep the output and ``lse``, the :term:`logsumexp` of each query's scores, from which
# the backward pass has to compute the weights again.
#
# **What does that cost?** Write :math:`S` for the scores, :math:`P` for the weights and :math:`O`
# for the output. The forward pass is two matmuls, :math:`S = QK^\top` times the scale and
# :math:`O = PV`, of :math:`2 N^2 d` floating-point operations (FLOPs) each, for :math:`N` queries
# and keys and head_dim :math:`d`. The backward pass takes five: two gradients for each of the two,
# and :math:`S` once more. It reads five matrices of :math:`d` columns (``q``, ``k``, ``v``, ``out``
# and ``do``, the gradient of ``out``) and writes three. In 16 bits, this is :math:`10 N^2 d`
# operations on :math:`16 N d` bytes, or :math:`5 N / 8` per byte.

import triton
import triton.language as tl

machine = lab.measure("Peak speed of a matmul and of a copy, bfloat16", balance)

# %%

# Folded: The speed of a matmul and of a copy
machine

# %%

# Reading
at_best = machine.rows[0] if machine.rows else {}
intensity = {1024: 5 * 2 * 1024 * 1024 * 128 / (8 * 1024 * 128 * 2)}
lab.read(
    f"At length 1,024 this is {intensity[1024]:.0f} FLOPs per byte, and the GPU can execute only "
    f"{at_best.get('FLOPs per byte', nan):.0f} in the time in which it copies one byte. So "
    f"arithmetic limits the backward pass, and a large matmul is its yardstick."
)

# %%
# The mathematics
# ---------------
#
# The gradient of a score depends on a whole row of weights, but a kernel sees one tile of keys at a
# time. One number per query can stand for the row.
#
# **An example.** One query sees three keys with weights 0.5, 0.3 and 0.2, and head_dim is 1. The
# values are 4, 1 and 1, so the output is their weighted mean, 2.5. If the gradient of the output is
# 1, the gradient of each weight is the value that it multiplies. But the weights sum to 1, so one
# grows only if others shrink, and a higher score raises the output only if its value is *above the
# mean*. The gradient of a score is its weight times the distance of its value from 2.5:


weights, values = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([4.0, 1.0, 1.0])
scores = weights.log().requires_grad_()
(by_autograd,) = torch.autograd.grad(scores.softmax(0) @ values, scores)
by_hand = weights * (values - 2.5)

# %%

# Reading
assert torch.allclose(by_autograd, by_hand)
by_hand, by_autograd = (
    ", ".join(f"{x:.2f}" for x in found.tolist()).replace("-", "−")
    for found in (by_hand, by_autograd)
)
lab.read(f"By hand this is {by_hand}; by autograd {by_autograd}.")

# %%
# The mean, 2.5, is the *output* (times its gradient, 1), which the forward pass has left in memory.
# So nobody has to sum over the keys again. In general:
#
# *Step 1: the last matmul.* From :math:`O = PV` follow :math:`dV = P^\top dO` and :math:`dP = dO\,
# V^\top`.
#
# *Step 2: softmax.* The weights of one query are :math:`p_j = e^{s_j} / \sum_k e^{s_k}`. A score
# :math:`s_i` is in one numerator and in all denominators, so :math:`\partial p_j / \partial s_i` is
# :math:`p_j\, (1 - p_j)` if :math:`i = j`, and :math:`-p_j\, p_i` otherwise. As a matrix, this is
# :math:`J = \mathrm{diag}(p) - p\, p^\top`.
#
# *Step 3: the gradient of the scores.* Because :math:`J` is symmetric,
#
# .. math::
#
#    ds = J\, dp = p \circ (dp - \delta), \qquad \delta = p^\top dp
#
# The circle is the elementwise product, and :math:`\delta` the weighted mean of :math:`dp`, 2.5 in
# the example. It is a sum over *all* keys, so a kernel would loop over the keys once for
# :math:`\delta`, and once more for :math:`ds`.
#
# *Step 4: the mean without P.* Substitute :math:`dp` and swap the two sums:
#
# .. math::
#
#    \begin{aligned}
#    \delta &= \sum_j p_j\, dp_j = \sum_j p_j \sum_c dO_c\, V_{jc} \\
#    &= \sum_c dO_c \sum_j p_j\, V_{jc} = \sum_c dO_c\, O_c
#    \end{aligned}
#
# The inner sum in the second line is the output.
#
# .. admonition:: Key idea
#    :class: kb-key
#
#    :math:`\delta = \mathrm{rowsum}(dO \circ O)`, in code :term:`delta`, is a sum over the columns
#    of one row, and needs neither :math:`P` nor :math:`dP`.
#
# *Step 5: the first matmul.* With the scale :math:`\sigma`, the scores are :math:`S = \sigma Q
# K^\top`. So :math:`dQ = \sigma\, dS\, K` and :math:`dK = \sigma\, dS^\top Q`.
#
# *Step 6: P from lse.* Because :math:`\mathrm{lse} = \log \sum_j e^{s_j}`, a weight no longer takes
# a maximum, a sum or a division: :math:`p_j = e^{s_j - \mathrm{lse}}`. The small kernels below
# compute it so. The GPU has an instruction for :math:`2^x`, so the package's kernels compute
# :math:`2^{\,s_j \log_2 e \,-\, \mathrm{lse} \log_2 e}`.
#
# .. dropdown:: Step 7: lse has a gradient, too
#
#    A caller may use ``lse``, for instance to merge the results of two attentions. From its
#    definition :math:`\partial\, \mathrm{lse} / \partial s_j = p_j`. A gradient
#    :math:`d\mathrm{lse}` thus adds
#
#    .. math::
#
#       \begin{aligned}
#       ds &= p \circ (dp - \delta) + p\, d\mathrm{lse} \\
#       &= p \circ \big( dp - (\delta - d\mathrm{lse}) \big)
#       \end{aligned}
#
#    This amounts to one subtraction from ``delta``, before anything else begins.
#
# Here are the steps in PyTorch, for random ``q``, ``k``, ``v`` and ``do``:

q = torch.randn(4, 3, dtype=torch.float64)  # 4 queries, 6 keys, head_dim 3
k, v = torch.randn(2, 6, 3, dtype=torch.float64)
do, sigma = torch.randn_like(q), 3**-0.5

s = sigma * q @ k.T
p = s.softmax(-1)
out, lse = p @ v, s.logsumexp(-1)  # end of the forward pass

dv, dp = p.T @ do, do @ v.T  # step 1
delta = (do * out).sum(-1)  # step 4
ds = p * (dp - delta[:, None])  # step 3
dq, dk = sigma * ds @ k, sigma * ds.T @ q  # step 5

# %%


# Measuring
from torch.autograd.functional import jacobian

dlse = torch.randn(4, dtype=torch.float64)


def true(output, x):
    return jacobian(lambda x: (output(x) * do).sum(), x)


def with_lse(s):
    return (s.softmax(-1) @ v * do).sum() + (s.logsumexp(-1) * dlse).sum()


log2e = math.log2(math.e)
J = p[0].diag() - torch.outer(p[0], p[0])
steps = {
    "1: dV": (dv, true(lambda v: p @ v, v)),
    "1: dP": (dp, true(lambda p: p @ v, p)),
    "2: J of a row": (J, jacobian(lambda s: s.softmax(-1), s[0])),
    "3: ds by J": (J @ dp[0], true(lambda s: s.softmax(-1) @ v, s)[0]),
    "4: delta": (delta, (p * dp).sum(-1)),
    "4: dS by delta": (ds, true(lambda s: s.softmax(-1) @ v, s)),
    "5: dQ": (dq, true(lambda q: (sigma * q @ k.T).softmax(-1) @ v, q)),
    "5: dK": (dk, true(lambda k: (sigma * q @ k.T).softmax(-1) @ v, k)),
    "6: P by exp2": (torch.exp2(s * log2e - (lse * log2e)[:, None]), p),
    "7: dS with dlse": (p * (dp - (delta - dlse)[:, None]), jacobian(with_lse, s)),
}

# %%

# Folded: Each step against automatic differentiation or the definition
rows, differences = [], []
for step, (ours, expected) in steps.items():
    differences.append((ours - expected).abs().max().item())
    rows.append({"step": step, "off by": f"{differences[-1]:.0e}"})
    rows[-1]["right"] = differences[-1] < 1e-14
assert all(row["right"] for row in rows)
lab.table(
    rows, "Each step against automatic differentiation or the definition, float64"
)

# %%

# Reading
lab.read(
    f"All {len(steps)} results are right; the largest difference from automatic differentiation, "
    f"or from the definition, is {max(differences):.0e}."
)

# %%
# In tiles, in PyTorch
# --------------------
#
# With ``lse`` and ``delta`` at hand, no formula needs a whole row, so each pair of a tile of
# queries and a tile of keys can be processed by itself. ``_i`` marks what belongs to the tile of
# queries, and ``_j`` what belongs to the tile of keys. ``_scores`` scales, and masks by ``rule``,
# which holds the lengths and the mask. ``_finite`` keeps a query that sees no key from becoming
# NaN:

lab.source(tiled.tiled_backward, "begin", "meet")

# %%

# Folded: The cases that PyTorch's gradcheck accepts, which compares with finite differences
rows = []
for is_causal in (False, True):
    for seqlen_q, seqlen_k in ((7, 7), (5, 8), (8, 5)):
        inputs = [
            torch.randn(2, n, 3, dtype=torch.float64, requires_grad=True)
            for n in (seqlen_q, seqlen_k, seqlen_k)
        ]
        options = {"is_causal": is_causal, "block_m": 3, "block_n": 2}
        passed = torch.autograd.gradcheck(
            lambda *x, options=options: tiled.tiled_attention(*x, **options), inputs
        )
        mask = "causal" if is_causal else "full"
        row = {"queries": seqlen_q, "keys": seqlen_k, "mask": mask}
        rows.append(row | {"gradcheck": passed})
assert all(row["gradcheck"] for row in rows)
lab.table(rows, "The tiled backward pass, tiles of 3 queries and 2 keys, float64")

# %%
# Dividing the work among programs
# --------------------------------
#
# Each pair of tiles *adds* to three gradients. Programs run at the same time, so the question is
# which of them adds to what.
#
# .. admonition:: Key idea
#    :class: kb-key
#
#    The gradient of a *query* is a sum over keys; the gradients of a *key* and its value are sums
#    over queries. If each pair of tiles is processed once, programs share at least one of these
#    sums.
#
# **Two sweeps.** In the first, a program owns a tile of keys, loops over tiles of queries, and
# keeps ``dk`` and ``dv`` in :term:`registers <register>`, because no other program adds to them. In
# the second, a program owns a tile of queries and its ``dq``, and loops over tiles of keys. So a
# *column* on the left is the work of one program, and on the right a *row*:
#
# .. animation:: two_sweeps
#
# The price is that :math:`P` and :math:`dP` are computed twice: seven matmuls where five would do.
#
# **One sweep.** A program owns a tile of keys and computes all three gradients. ``dk`` and ``dv``
# stay in registers as before, but its share of ``dq`` is *added in memory*, tile after tile.
#
# .. image:: /figures/attention-backward-shared-sum.svg
#    :alt: Five programs, each with its column of tiles, from the diagonal down; those on the
#          diagonal have a stroke. Below each column are its own dk and dv, to which nobody else
#          adds. On the right lies dq in float32 in memory. The last row of tiles is lit: it has a
#          tile of each of the five programs, and a bracket around all of it leads to the last tile
#          of dq, to which all five add, in any order.
#
# This takes five matmuls. But the additions have to be :term:`atomic`, and come in no fixed order,
# so the last bits of ``dq`` differ between runs. Which is faster, two matmuls more or a shared sum?
# We build both.
#
# The kernels
# -----------
#
# Here is the first sweep, as small as we can make it: one head in float32, causal, with a length
# ``n`` that the tiles divide. ``lse`` comes from the forward pass, and ``delta`` is computed before
# either sweep, by step 4.
#
# **1. Load.** A program owns ``BLOCK_N`` keys, the first of which is ``first_key``. It loads their
# ``k`` and ``v`` once, at the offsets ``own``, and starts their gradients at zero. The scale of the
# scores is applied here, to ``k``:

lab.source(smallest.dkdv_kernel, "load")

# %%
# **2. Find the queries.** Take tiles of 128 keys and 64 queries, and the program of the keys 128 to
# 255. Under a causal mask nobody before query 128 sees any of them, so its loop begins at ``first``
# = 128. Query 255 is the first that sees all of them. The next tile begins at ``whole`` = 256, and
# from there on no tile needs a mask:


# Drawing
def column(axes):
    """The tiles of queries that the program of the keys 128 to 255 visits."""
    inks = {"never": "matmul", "masked": "PyTorch", "whole": "Kernel Book"}
    for top in range(0, 384, 64):
        kind = "never" if top < 128 else "masked" if top < 256 else "whole"
        ink = lab.colour(inks[kind])
        fill = {"facecolor": ink, "alpha": 0.0 if kind == "never" else 0.15}
        axes.add_patch(Rectangle((128, top), 128, 64, **fill))
        style = "--" if kind == "never" else "-"
        axes.add_patch(Rectangle((128, top), 128, 64, fill=False, ec=ink, ls=style))
        words = {"fontsize": 10, "va": "center"}
        # beside the diagonal, which cuts the tiles from 128 and from 192
        beside_it = {128: 226, 192: 158}.get(top, 192)
        said = {"never": "not visited"}.get(kind, kind)
        axes.text(beside_it, top + 32, said, ha="center", **words)
        axes.text(122, top, top, ha="right", **words)
    for end, name in ((128, "first = 128"), (256, "whole = 256"), (384, "n = 384")):
        axes.text(268, end, f"← {name}", fontsize=10, va="center")
    axes.plot((128, 256), (128, 256), color=lab.colour("matmul"), linewidth=1)
    axes.text(192, -14, "keys 128 to 255", fontsize=10, ha="center")
    axes.text(94, -14, "queries from", fontsize=10, ha="right")
    axes.set(xlim=(-90, 420), ylim=(400, -40), xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
    axes.grid(visible=False)


lab.sketch(
    "One program's tiles of queries, below and on the diagonal",
    "A column of six tiles of 64 queries, over the keys 128 to 255. The first two tiles are not "
    "visited. From first, 128, to whole, 256, the diagonal cuts two tiles, which are masked. From "
    "whole to n, 384, two tiles lie below it and are whole.",
    column,
    height=3.4,
)

# %%
# In code, both are rounded to a multiple of ``BLOCK_M``, the first down and the second up:

lab.source(smallest.dkdv_kernel, "stages")

# %%
# **3. Sweep and write.** Two loops visit the tiles of queries, and ``add_queries`` adds what one of
# them contributes. ``MASKED`` is a constant, so the second loop is compiled without a mask. At the
# end a plain store is enough, and ``dk`` takes the scale of step 5:

lab.source(smallest.dkdv_kernel, "sweep", "write")

# %%
# **4. Meet one tile.** ``add_queries`` loads what belongs to the ``BLOCK_M`` queries from ``start``
# on: rows of ``q`` and ``do``, and ``lse`` and ``delta``. Then it computes the weights by step 6.
# ``_t`` says that they are *transposed*: keys are rows. On Hopper, the left operand of a matmul may
# stay in registers, if the threads hold it as a matmul leaves its result. :math:`P^\top` is held
# so, and is the left operand of :math:`dV = P^\top dO`, so it never leaves the registers.
# ``"ieee"`` keeps a :term:`matrix unit` from rounding float32 to :term:`TF32`:

lab.source(smallest.add_queries, "queries", "weights")

# %%
# The gradients are steps 1, 3 and 5, a line for each formula, with :math:`dS^\top = P^\top \circ
# (dP^\top - \delta)`. The third argument of ``tl.dot`` is the sum that it adds to:

lab.source(smallest.add_queries, "gradients")

# %%

# Folded: The kernel whole
lab.listing(
    {
        "The program that owns a tile of keys": smallest.dkdv_kernel,
        "What it does with one tile of queries": smallest.add_queries,
    }
)

# %%
# .. dropdown:: The package's kernel, for any length and dtype, and the one before it
#
#    .. literalinclude:: /../src/kernelbook/ops/attention/backward.py
#       :language: python
#       :pyobject: sweep_queries
#       :start-at: for start_m in tl.range
#       :lines: 1-10, 17-21
#       :dedent:
#       :linenos:
#
#    ``load_row`` reads a tile of row ``row`` of ``lse_rows``, which has one row per head, padded to
#    ``padded_q`` numbers, with a descriptor where ``DESCRIBED`` says so. ``scale_log2`` is
#    :math:`\sigma \log_2 e`, and ``lse`` is kept in base 2. ``PRECISION`` keeps a matrix unit from
#    rounding float32 to TF32. ``first_seeing`` holds, for each key, the first query that sees it.
#    Line 12 loads ``delta`` before the matmul of line 13 begins, so that no wait for a load stands
#    between matmuls.
#
#    **The kernel before** computes ``delta``. ``None`` is a constant for Triton, so without a
#    gradient of ``lse`` the lines for ``dlse_ptr`` are not even compiled. Queries that see no key,
#    and queries past the end, which exist because the last tile must be full, get the ``lse``
#    :math:`+\infty`. Then
#    :math:`2^{s - \infty} = 0`,
#    so these rows contribute nothing, and the sweeps need no test for them. The counter at the end
#    is one that another kernel of the package wants set to zero; here it is ``None``.
#
#    .. literalinclude:: /../src/kernelbook/ops/attention/backward.py
#       :language: python
#       :pyobject: preprocess_kernel
#       :start-at: # -- delta
#       :dedent:
#
#    **The tile.** ``place`` gives each program a tile and a head. Programs with the most work start
#    first, so that no long program is left over at the end; in a causal sweep these own the
#    *first* keys, because the most queries see them.
#
#    Queries from ``first`` to ``whole`` do not see all keys of the tile, so they are masked, and
#    those from ``whole`` to ``cut`` see all. With a causal mask ``cut`` is ``end``; a window that
#    ends on the left, too, makes a third range.
#
#    Keys past the end were loaded as zeros. They need no mask, because each of them affects only
#    its own row of ``dk`` and ``dv``, which is never stored. In ``dq`` they would contribute to
#    rows that count, so one sweep has to mask them.
#
#    .. literalinclude:: /../src/kernelbook/ops/attention/backward.py
#       :language: python
#       :pyobject: dkdv_kernel
#       :start-at: # -- place
#       :end-before: # -- sweep
#       :dedent:

# %%


# Measuring
@triton.jit
def _dv_kernel(
    q_ptr, k_ptr, do_ptr, lse_ptr, dv_ptr, n_queries, scale_log2,
    TRANSPOSED: tl.constexpr, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    rows, cols = tl.arange(0, BLOCK)[:, None], tl.arange(0, HEAD_DIM)[None, :]
    own = tl.program_id(0) * BLOCK + rows
    k = tl.load(k_ptr + own * HEAD_DIM + cols)
    dv = tl.zeros((BLOCK, HEAD_DIM), tl.float32)
    for start in range(0, n_queries, BLOCK):
        q = tl.load(q_ptr + (start + rows) * HEAD_DIM + cols)
        do = tl.load(do_ptr + (start + rows) * HEAD_DIM + cols)
        lse_log2 = tl.load(lse_ptr + start + tl.arange(0, BLOCK))
        if TRANSPOSED:
            p_t = tl.exp2(tl.dot(k, q.T) * scale_log2 - lse_log2[None, :])
        else:
            p = tl.exp2(tl.dot(q, k.T) * scale_log2 - lse_log2[:, None])
            p_t = p.T
        dv = tl.dot(p_t.to(do.dtype), do, dv)
    tl.store(dv_ptr + own * HEAD_DIM + cols, dv.to(dv_ptr.dtype.element_ty))


# %%


# Measuring
def relative(x, truth):
    return ((x.double() - truth).abs().max() / truth.abs().max()).item()


def dv_of(q, k, do, transposed, block):
    s = q.double() @ k.double().T * q.shape[1] ** -0.5
    lse_log2 = (s.logsumexp(-1) * log2e).float()
    dv = torch.empty_like(k)
    compiled = _dv_kernel[(len(k) // block,)](
        q, k, do, lse_log2, dv, len(q), q.shape[1] ** -0.5 * log2e, transposed, block,
        q.shape[1],
    )  # fmt: skip
    return dv, s.softmax(-1).T @ do.double(), compiled


size = (64, 32) if runtime.INTERPRETED else (1024, 128)
q, k, do = torch.randn(3, *size, device=runtime.DEVICE, dtype=torch.float16).unbind()
theirs = (q @ k.T * size[1] ** -0.5).softmax(-1).T @ do
dv, truth, _ = dv_of(q, k, do, True, size[1] // 2)

# %%


# Measuring
def both_ways():
    q, k, do = torch.randn(3, 8192, 128, device=runtime.DEVICE, dtype=torch.float16)
    rows, zeros = [], torch.zeros(8192, device=runtime.DEVICE)
    for name, transposed in {"Sᵀ from the start": True, "S, then Pᵀ": False}.items():
        dv, truth, compiled = dv_of(q, k, do, transposed, 64)
        assert relative(dv, truth) < 1e-2

        def run(way=transposed, dv=dv):
            _dv_kernel[(128,)](q, k, do, zeros, dv, 8192, 0.1, way, 64, 128)

        rows.append(
            {
                "computed": name,
                "stmatrix": compiled.asm["ptx"].count("stmatrix"),
                "shared, KiB": round(compiled.metadata.shared / 1024, 1),
                "µs": round(1e3 * triton.testing.do_bench(run), 1),
            }
        )
    return rows


# %%

# Measuring
checked = lab.check(
    "dv from the transpose of S", [lab.Case(f"{size}", "dv", dv, theirs, truth)]
)

# %%

# Measuring
ways = lab.measure("dv of 8,192 queries and keys, computed in two ways", both_ways)

# %%

# Folded: What transposing the weights costs
direct, detour = ways.rows if ways.rows else 2 * [{}]
slower = detour.get("µs", nan) / direct.get("µs", nan)
lab.read(
    f"A kernel that computes `dv` alone, and transposes `P` on the way through shared memory, "
    f"takes {slower:.2f} times as long."
)

# %%


# Folded: Which thread holds what
def holder(row, column):
    """The thread of a warp that holds an element of a block of 8 by 8 after a matmul."""
    return 4 * row + column // 2


def blocks(as_left, after_transposing):
    for axes, transposed in ((as_left, False), (after_transposing, True)):
        for row in range(8):
            for column in range(8):
                holds = holder(column, row) if transposed else holder(row, column)
                stays = holds == holder(row, column)
                ink = lab.colour("Kernel Book" if stays else "PyTorch")
                axes.barh(row + 0.5, 1, 1, column, color=ink, alpha=0.18)
                place = {"ha": "center", "va": "center", "fontsize": 10}
                axes.text(column + 0.5, row + 0.5, holds, **place)
        axes.set(xlim=(0, 8), ylim=(8, 0), xticks=[], yticks=[], aspect="equal")
        axes.spines[:].set_visible(False)
    as_left.set_title("from Sᵀ: as a matmul leaves it", fontsize=11)
    after_transposing.set_title("from S: transposed", fontsize=11)


pairs = [(row, column) for row in range(8) for column in range(8)]
stay = sum(holder(*pair) == holder(*pair[::-1]) for pair in pairs)
lab.sketch(
    "Which thread holds each element of the left operand",
    f"Two blocks of 8 by 8 elements, each with the number of the thread that holds it. Left, as a "
    f"matmul leaves them: thread 0 has the first two elements of the first row, and so on up to "
    f"thread 31. This is how a left operand has to be distributed. Right, transposed: {stay} "
    f"elements are where they have to be, and {len(pairs) - stay} belong to another thread.",
    blocks,
    panels=2,
    height=3.3,
)

# %%
# **The second sweep** mirrors the first. Its program holds ``q``, ``do``, ``lse`` and ``delta``,
# and ``add_keys`` loads a tile of ``k``, times the scale, and of ``v``. So ``dq``, which sums over
# ``k``, has its scale already. The weights need no transposing here, because :math:`dQ = dS\, K`
# takes :math:`dS` with queries as rows. After ``p`` come three lines:

lab.source(smallest.add_keys, "gradient")

# %%

# Folded: The second sweep whole
lab.listing(
    {
        "The program that owns a tile of queries": smallest.dq_kernel,
        "What it does with one tile of keys": smallest.add_keys,
    }
)

# %%
# **Launch.** Each sweep is one launch, with a program for each tile that is owned. An owned tile
# has 64 rows here, and a visited one 32. The first lines stand in for the forward pass, and
# ``sees`` is the causal mask:

from kernelbook.small.attention_backward import dkdv_kernel, dq_kernel

n, head_dim, scale = 384, 32, 32**-0.5
q, k, v, do = torch.randn(4, n, head_dim, device=runtime.DEVICE)
sees = torch.ones(n, n, device=runtime.DEVICE).tril().bool()
s = (q @ k.T * scale).masked_fill(~sees, -torch.inf)
out, lse = s.softmax(-1) @ v, s.logsumexp(-1)  # what the forward pass leaves
delta = (do * out).sum(-1)  # step 4

dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
inputs = (q, k, v, do, lse, delta)
dkdv_kernel[(n // 64,)](
    *inputs, dk, dv, n, scale, BLOCK_M=32, BLOCK_N=64, HEAD_DIM=head_dim
)
dq_kernel[(n // 64,)](*inputs, dq, n, scale, BLOCK_M=64, BLOCK_N=32, HEAD_DIM=head_dim)

# %%

# Reading
four = [x[None, None] for x in (q, k, v, do)]
truths = reference.attention_backward(*four, True)
far = [
    (x - y[0, 0]).abs().max() / y.abs().max()
    for x, y in zip((dq, dk, dv), truths, strict=True)
]
assert max(far) < 1e-5
lab.read(
    f"On 384 tokens, the three gradients of both small kernels differ from float64 by at most "
    f"{max(far):.0e} of their largest element."
)

# %%
# **One sweep** is the first sweep with a fifth matmul, :math:`dQ = dS\, K`, at the end of its loop.
# This takes :math:`dS` with queries as rows, so a matrix has to be transposed after all. With a
# :term:`descriptor`, one instruction then adds a whole tile to the sums in memory. ``dq_desc``
# describes ``dq`` of all heads, one below the other, each padded to ``padded_q`` rows; ``row`` is
# the number of the head, and ``start_m`` the first query. In the package, where the host multiplies
# the sums by the scale at the end:
#
# .. literalinclude:: /../src/kernelbook/ops/attention/backward.py
#    :language: python
#    :pyobject: sweep_queries
#    :start-at: dq = tl.dot
#    :end-at: dq_desc.atomic_add
#    :dedent:
#
# .. dropdown:: The kernels whole, what the host does, and what autograd sees
#
#    One tile of queries after another, for the program that owns a tile of keys:
#
#    .. literalinclude:: /../src/kernelbook/ops/attention/backward.py
#       :language: python
#       :pyobject: sweep_queries
#
#    The kernel of the first sweep, and of one sweep:
#
#    .. literalinclude:: /../src/kernelbook/ops/attention/backward.py
#       :language: python
#       :pyobject: dkdv_kernel
#
#    The second sweep:
#
#    .. literalinclude:: /../src/kernelbook/ops/attention/backward.py
#       :language: python
#       :pyobject: sweep_keys
#
#    .. literalinclude:: /../src/kernelbook/ops/attention/backward.py
#       :language: python
#       :pyobject: dq_kernel
#
#    The host of plain Triton chooses between one sweep and two:
#
#    .. literalinclude:: /../src/kernelbook/ops/attention/backward.py
#       :language: python
#       :pyobject: attention_backward
#
#    Autograd sees a single function. It saves its inputs, ``out`` and ``lse``, and computes only
#    the gradients that are requested. Forward and backward are registered as operators with
#    PyTorch's dispatcher, so ``torch.compile`` treats each as one node of its graph and does not
#    trace into it.
#
#    .. literalinclude:: /../src/kernelbook/ops/attention/operator.py
#       :language: python
#       :pyobject: setup_context
#
#    .. literalinclude:: /../src/kernelbook/ops/attention/operator.py
#       :language: python
#       :pyobject: gradient
#
# Is it right?
# ------------
#
# The truth is computed in float64, and *PyTorch's* error is that of the first section's lines in
# the same dtype. In 16 bits our error may be twice as large, or one unit in the last place, because
# the two round at different moments; in float32 eight times, because tiles are summed in another
# order and the exponent is rounded once more.


# Measuring
def gradients(operator, q, k, v, do):
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    return torch.autograd.grad(operator(*inputs), inputs, do)


def grouped(is_causal):
    def run(q, k, v):
        group = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
        return standard_attention(q, k, v, is_causal)

    return run


def ours(is_causal, deterministic):
    run = two_sweeps if deterministic else one_sweep
    return partial(run, is_causal=is_causal, enable_gqa=True)


def cases(sizes, dtype, is_causal, deterministic, note="", expanded=False):
    batch, heads, heads_k, seqlen_q, seqlen_k, dim = sizes
    q, k, v, do = (
        torch.randn(batch, *size, dim, device=runtime.DEVICE).to(dtype)
        for size in (
            (heads, seqlen_q),
            (heads_k, seqlen_k),
            (heads_k, seqlen_k),
            (heads, seqlen_q),
        )
    )
    if expanded:
        do = do[:1, :1, :1].expand_as(q)
    results = gradients(ours(is_causal, deterministic), q, k, v, do)
    theirs = gradients(grouped(is_causal), q, k, v, do)
    truths = reference.attention_backward(q, k, v, do, is_causal)
    mask = "causal" if is_causal else "full"
    sweeps = "two sweeps" if deterministic else "one sweep"
    what = f"{seqlen_q} × {seqlen_k}, {dim}, {mask}, {sweeps}{note}"
    factor = 8 if dtype == torch.float32 else 2
    for row in zip(("dq", "dk", "dv"), results, theirs, truths, strict=True):
        yield lab.Case(what, *row, factor)


# %%

# Measuring
half, single = torch.float16, torch.float32
plain = (2, 2, 2, 45, 45, 32) if runtime.INTERPRETED else (2, 4, 4, 1000, 1000, 128)
lab.check(
    "The gradients, batch and heads above 1",
    [
        case
        for dtype in (torch.float32, torch.float16, torch.bfloat16)
        for is_causal in (False, True)
        for deterministic in (True, False)
        for case in cases(plain, dtype, is_causal, deterministic)
    ],
)

# %%
# Awkward cases are checked as well: a head_dim that is no power of two, heads that share keys, a
# gradient for ``lse``, and queries that see no key.

# Measuring
awkward = [
    ((2, 2, 2, 1, 70, 64), half, False, True),
    ((1, 2, 2, 33, 70, 32), half, True, True, ""),
    ((1, 2, 2, 33, 70, 32), half, True, False, ""),
    ((1, 2, 2, 70, 33, 32), half, True, True, ", masked rows"),
    ((1, 2, 2, 70, 33, 32), half, True, False, ", masked rows"),
    ((1, 4, 2, 40, 50, 32), single, True, True, ", grouped heads"),
    ((1, 4, 1, 40, 50, 32), single, False, False, ", grouped heads"),
    ((1, 2, 2, 40, 40, 80), single, True, True, ""),
    ((1, 2, 2, 40, 40, 17), single, False, False, ""),
    ((2, 2, 2, 40, 40, 32), single, True, True, ", expanded do", True),
    ((2, 2, 2, 40, 40, 32), half, False, False, ", expanded do", True),
]
if not runtime.INTERPRETED:
    awkward += [
        ((1, 4, 2, 1000, 300, 64), torch.bfloat16, True, True, ", masked rows"),
        ((1, 4, 1, 127, 2049, 128), torch.bfloat16, True, False, ", grouped heads"),
        ((1, 2, 2, 300, 300, 256), torch.bfloat16, True, True),
    ]

# %%

# Folded: The check of awkward sizes
lab.check("Awkward sizes", [case for row in awkward for case in cases(*row)])

# %%

# Folded: Queries that see no key, and the check with a gradient of lse
q, do = torch.randn(2, 1, 2, 40, 32, device=runtime.DEVICE)
k, v = torch.randn(2, 1, 2, 33, 32, device=runtime.DEVICE)
dq, *_ = gradients(ours(True, True), q, k, v, do)
assert not dq[:, :, : 40 - 33].any()
dlse = torch.randn(1, 2, 40, device=runtime.DEVICE)
weight = (do, dlse)
inputs = [x.requires_grad_() for x in (q, k, v)]
results = torch.autograd.grad(two_sweeps(*inputs, return_lse=True), inputs, weight)
s = q @ k.mT * 32**-0.5
dense = (s.softmax(-1) @ v, s.logsumexp(-1))
theirs = torch.autograd.grad(dense, inputs, weight)
truths = reference.attention_backward(q, k, v, do, dlse=dlse)
lab.check(
    "With a gradient of lse",
    [
        lab.Case("40 × 33, 32, full", *row, factor=8)
        for row in zip(("dq", "dk", "dv"), results, theirs, truths, strict=True)
    ],
)

# %%
# **Is a tile visited in vain?** NaN shows it like a dye, because it spreads through every matmul,
# even times zero: if one tile of ``do`` is NaN, each program of the first sweep that reads it
# writes NaN to its ``dv``, even if it masks the tile. A tile of ``v`` dyes ``dq`` in the second.


# Measuring
def stains(x, block):
    return x.isnan().any(-1)[0, 0].view(-1, block).any(-1).tolist()


def visited(is_causal):
    q = torch.randn(1, 1, 16, 16, device=runtime.DEVICE, dtype=torch.float16)
    first, second = (tuned.backward_config(sweep, q) for sweep in ("dkdv", "dq"))
    sides = first.block_m, first.block_n, second.block_m, second.block_n
    n = max(192, 3 * max(sides))
    q, k, v, do = torch.randn(4, 1, 1, n, 16, device=q.device, dtype=q.dtype).unbind()
    out, lse = attention_forward(q, k, v, is_causal, 0.25)
    rest = (*kernels._preprocess(out, lse, do, None), is_causal, 0.25)
    by_keys, by_queries = [], []
    for start in range(0, n, first.block_m):
        dyed = do.clone()
        dyed[:, :, start : start + first.block_m] = nan
        _, dv = kernels._keys_backward(q, k, v, dyed, *rest)
        by_keys.append(stains(dv, first.block_n))
    for start in range(0, n, second.block_n):
        dyed = v.clone()
        dyed[:, :, start : start + second.block_n] = nan
        dq = kernels._queries_backward(q, k, dyed, do, *rest)
        by_queries.append(stains(dq, second.block_m))
    by_queries = [list(row) for row in zip(*by_queries, strict=True)]
    return {"dk and dv": (by_keys, first), "dq": (by_queries, second)}


# %%

# Measuring
rows = []
for is_causal in (False, True):
    with runtime.launching_on(q):
        maps = visited(is_causal)
    for sweep, (stained, config) in maps.items():
        n = len(stained) * config.block_m
        pairs = visible(n, n) if is_causal else torch.ones(n, n)
        blocks = pairs.view(len(stained), config.block_m, -1, config.block_n)
        needed = blocks.bool().any(3).any(1).tolist()
        assert stained == needed
        rows.append(
            {
                "sweep": sweep,
                "mask": "causal" if is_causal else "full",
                "tile": f"{config.block_m} × {config.block_n}",
                "tiles": len(stained) * len(stained[0]),
                "visited": sum(map(sum, stained)),
                "as needed": stained == needed,
            }
        )

# %%

# Reading
found = {row["sweep"]: row for row in rows if row["mask"] == "causal"}
assert all(row["as needed"] for row in rows)
in_first, in_second = (
    f"{found[sweep]['visited']} of {found[sweep]['tiles']} tiles of {found[sweep]['tile']}"
    for sweep in ("dk and dv", "dq")
)
lab.read(
    f"Under a causal mask, the first sweep visits {in_first}"
    + (
        ", and so does the second: "
        if in_first == in_second
        else f", and the second {in_second}: "
    )
    + "those in which a query sees a key, and no others."
)

# %%

# Folded: The tiles that the causal sweep for dk and dv visits
stained, config = maps["dk and dv"]
lab.table(
    [
        {"queries from": i * config.block_m}
        | {f"{j * config.block_n}": "yes" if hit else "–" for j, hit in enumerate(row)}
        for i, row in enumerate(stained)
    ],
    "Causal, dk and dv: visited tiles, by the first key of the tile",
)

# %%


# Measuring
def runs_differ():
    q, k, v, do = torch.randn(
        4, 2, 16, 2048, 128, device=runtime.DEVICE, dtype=torch.bfloat16
    ).unbind()
    rows = []
    for name, deterministic in {"two sweeps": True, "one sweep": False}.items():
        run = ours(True, deterministic)
        first = gradients(run, q, k, v, do)
        unlike = {x: [] for x in ("dq", "dk", "dv")}
        for _ in range(99):
            for x, a, b in zip(unlike, gradients(run, q, k, v, do), first, strict=True):
                unlike[x].append((a != b).sum().item())
        row = {"version": name}
        row |= {x: sum(n > 0 for n in counts) for x, counts in unlike.items()}
        most = 100 * max(unlike["dq"]) / q.numel()
        rows.append(row | {"elements of dq, %": most})
    return rows


repeated = lab.measure("In how many of 99 causal runs a gradient differs", runs_differ)

# %%

# Reading
unlike = {row["version"]: row for row in repeated.rows}
in_two, in_one = (
    unlike.get(name, {}).get("dq", nan) for name in ("two sweeps", "one sweep")
)
lab.read(
    f"**Does every run give the same bits?** In two sweeps `dq` differs in {in_two:.0f} of 99 "
    f"repeated runs, because each sum belongs to one program, which adds its tiles in order. In "
    f"one sweep it differs in {in_one:.0f}."
)

# %%

# Folded: In how many of 99 causal runs a gradient differs
repeated

# %%
# How fast is it?
# ---------------
#
# The :term:`limit` is a matmul of two matrices of 8,192 by 8,192. Work is counted as the field
# does: five matmuls, half of that if causal. Two sweeps execute seven, so they can reach
# :math:`5/7`, which is 71 percent of the limit, at best.
#
# Only the backward pass is timed.
#
# *Standard attention* is the PyTorch code of the first section, run eagerly or through
# ``torch.compile``, and *tiled PyTorch* is our loop over tiles.
#
# .. dropdown:: The sizes
#
#    Every point has 16,384 tokens, and heads times head_dim is 2,048.
#
# Without a mask:


# Measuring
def inputs_of(batch, heads, seqlen, head_dim, dtype):
    q, k, v = draw(batch, heads, seqlen, head_dim, dtype)
    return tuple(x.requires_grad_() for x in (q, k, v)), torch.randn_like(q)


def versions(inputs, do, is_causal):
    return {
        name: timed(ours(is_causal, deterministic), inputs, do)
        for name, deterministic in MODES.items()
    }


def all_tiles(q, k, v, do, is_causal):
    q, k, v = (x.detach() for x in (q, k, v))
    scale = q.shape[-1] ** -0.5
    out, lse = attention_forward(q, k, v, is_causal, scale)
    return lambda: kernels.attention_backward(q, k, v, out, lse, do, False, scale, True)


def in_tiles(q, k, v, do, is_causal):
    q, k, v = (x.detach() for x in (q, k, v))
    options = {"is_causal": is_causal, "block_m": 512, "block_n": 512}
    out, lse = tiled.tiled_forward(q, k, v, **options)
    return lambda: tiled.tiled_backward(q, k, v, out, lse, do, **options)


def ladder_providers(seqlen, batch, heads, head_dim, mask, causal, dtype):
    is_causal = mask == "causal"
    inputs, do = inputs_of(batch, heads, seqlen, head_dim, dtype)
    compiled = torch.compile(standard_attention)
    return {
        "matmul": matmul(),
        "standard attention": timed(
            partial(standard_attention, is_causal=is_causal), inputs, do
        ),
        "torch.compile": timed(partial(compiled, is_causal=is_causal), inputs, do),
        "tiled PyTorch": in_tiles(*inputs, do, is_causal),
        "all tiles": all_tiles(*inputs, do, is_causal),
        **versions(inputs, do, is_causal),
    }


# %%

MODES = {"Kernel Book": True, "Kernel Book, one sweep": False}
RUNGS = ["standard attention", "torch.compile", "tiled PyTorch"]
RUNGS += ["Kernel Book, one sweep", "Kernel Book"]
NAMES = {
    "Kernel Book": "two sweeps",
    "Kernel Book, one sweep": "one sweep",
    "all tiles": "two sweeps, all tiles",
}
ladder = lab.bench(
    "ladder", points([4096], head_dims=(128,)), ladder_providers, **BACKWARD
)
lab.ladder(
    ladder,
    "Backward without a mask, 4,096 tokens, head_dim 128, bfloat16",
    RUNGS,
    by="mask",
    where={"seqlen": 4096, "mask": "full"},
    names=NAMES,
)

# %%

# Reading
share = {
    (name, mask): 100 * ladder.share(name, mask=mask)
    for name in RUNGS
    for mask in ("full", "causal")
}
one = share["Kernel Book, one sweep", "full"]
compiled, full = (share[name, "full"] for name in ("torch.compile", "Kernel Book"))
lab.read(
    (
        "**Two sweeps beat one**, although they execute two matmuls more. "
        if full > 1.01 * one
        else "**Two sweeps do not beat one.** "
    )
    + (
        "But `torch.compile` is ahead of both. How can three lines of PyTorch be faster than our "
        "kernels?"
        if compiled > 1.01 * full
        else "`torch.compile` is not ahead of them."
    )
)

# %%

# Folded: The same with a causal mask
lab.ladder(
    ladder,
    "Backward with a causal mask, 4,096 tokens, head_dim 128, bfloat16",
    [*RUNGS[:-1], "all tiles", RUNGS[-1]],
    by="mask",
    where={"seqlen": 4096, "mask": "causal"},
    names=NAMES,
)

# %%

# Reading
skipping = ladder.milliseconds_at("all tiles", mask="causal")
skipping /= ladder.milliseconds_at("Kernel Book", mask="causal")
lab.read(
    f"**Skipping tiles pays.** With a causal mask, two sweeps over all tiles take {skipping:.2f} "
    f"times as long as two sweeps that skip."
    if skipping > 1.02
    else f"With a causal mask, two sweeps over all tiles take {skipping:.2f} times as long as two "
    f"sweeps that skip."
)

# %%
# **The libraries** are two backends of PyTorch's ``scaled_dot_product_attention`` (SDPA): *flash*,
# which is FlashAttention 2, and *cuDNN*, NVIDIA's own; then FlexAttention, and FlashAttention in
# its version 4. Here are three lengths:


# Measuring
def providers(seqlen, batch, heads, head_dim, mask, causal, dtype):
    is_causal = mask == "causal"
    inputs, do = inputs_of(batch, heads, seqlen, head_dim, dtype)
    others = libraries(inputs, is_causal, do)
    return {"matmul": matmul()} | others | versions(inputs, do, is_causal)


# %%

LENGTHS = (1024, 4096, 16384)
backward = lab.bench("backward", points([*LENGTHS]), providers, **BACKWARD)
lab.plot(
    backward,
    "Backward, head_dim 128, full, bfloat16",
    where={"head_dim": 128, "mask": "full"},
    names=NAMES,
)

# %%

# Folded: The three lengths with a causal mask, and with head_dim 64
lab.plot(
    backward,
    "Backward, head_dim 128, causal, bfloat16",
    where={"head_dim": 128, "mask": "causal"},
    names=NAMES,
)
lab.plot(
    backward,
    "Backward, head_dim 64, full, bfloat16",
    where={"head_dim": 64, "mask": "full"},
    names=NAMES,
)
lab.plot(
    backward,
    "Backward, head_dim 64, causal, bfloat16",
    where={"head_dim": 64, "mask": "causal"},
    names=NAMES,
)

# %%


# Measuring
def measured_at(*lengths, head_dims=(64, 128)):
    found = points([*lengths], head_dims)
    return [
        {key: point[key] for key in ("seqlen", "head_dim", "mask")} for point in found
    ]


speeds = []
for point in measured_at(16384, head_dims=(128, 64)):
    rates = {name: backward.rate(name, **point) for name in (*MODES, *LIBRARIES)}
    known = [name for name in LIBRARIES if rates[name] == rates[name]]
    peer = max(known, key=rates.get, default="none")
    row = {"head_dim": point["head_dim"], "mask": point["mask"]}
    row |= {"two sweeps": rates["Kernel Book"]}
    row |= {"one sweep": rates["Kernel Book, one sweep"]}
    speeds.append(row | {"fastest library": peer, "library": rates.get(peer, nan)})

# %%

# Measuring
hosted = lab.host_times(
    {
        "Kernel Book": lambda q, k, v: attention(q, k, v, is_causal=True),
        "PyTorch": lambda q, k, v: F.scaled_dot_product_attention(
            q, k, v, is_causal=True
        ),
    },
    *torch.ones(3, 1, 2, 128, 64, device=runtime.DEVICE).bfloat16(),
)

# %%

# Folded: Two sweeps, one sweep and the fastest library at 16,384 tokens
lab.table(speeds, "TFLOP/s at 16,384 tokens")

# %%

# Reading
everywhere = measured_at(*LENGTHS)
rates = [
    {name: backward.rate(name, **point) for name in (*MODES, *LIBRARIES)}
    for point in everywhere
]


def points_where(ahead, behind):
    """Where one is ahead by more than 1 %."""
    return sum(rate[ahead] > 1.01 * rate[behind] for rate in rates)


def of_all(count):
    return f"{'all' if count == len(rates) else f'{count} of'} {len(rates)} points"


measured = [
    name for name in LIBRARIES if all(rate[name] == rate[name] for rate in rates)
]
ahead = {name: points_where(name, "Kernel Book") for name in measured}
beaten = [n for n in measured if points_where("Kernel Book", n) == len(rates)]
ratios = [  # of the fastest library to us
    max((rate[name] for name in LIBRARIES if rate[name] == rate[name]), default=nan)
    / rate["Kernel Book"]
    for rate in rates
]
losses = " and ".join(f"{name} at {of_all(n)}" for name, n in ahead.items() if n)
slower_ones = [*beaten, "one sweep"] if points_where(*MODES) == len(rates) else beaten
listed = " and ".join(filter(None, [", ".join(slower_ones[:-1]), *slower_ones[-1:]]))
lab.read(
    (
        f"**Two sweeps are behind {losses}**. The fastest library is up to {max(ratios):.2f} times "
        f"as fast. "
        if losses
        else ""
    )
    + (f"Two sweeps are everywhere faster than {listed}." if slower_ones else "")
    + (
        " FlashAttention is absent from this run; the notes under the figures say why."
        if "FlashAttention" in backward.skipped
        else ""
    )
)

# %%


# Measuring
FIXED = "FlashAttention, deterministic"


def peers_differ(seqlen=4096, batch=4, heads=16, head_dim=128):
    sizes = {"seqlen": seqlen, "batch": batch, "heads": heads, "head_dim": head_dim}
    sizes["dtype"] = torch.bfloat16
    runs = providers(**sizes, mask="causal", causal=0.5)
    runs[FIXED] = flash(*inputs_of(**sizes), causal=True, deterministic=True)
    flops = 2.5 * 4 * batch * heads * seqlen**2 * head_dim * 0.5
    rows = []
    for name, run in runs.items():
        if name == "matmul" or isinstance(run, lab.Absent):
            continue
        first, *others = (run()[0] for _ in range(20))
        different = sum(not torch.equal(dq, first) for dq in others)
        took = statistics.median(lab.event_times(run))
        row = {"version": name, "runs that differ, of 19": different}
        rows.append(row | {"TFLOP/s": round(flops / took / 1e9)})
    return rows


# %%

# Measuring
others = lab.measure("dq in 20 runs, 4,096 tokens, head_dim 128, causal", peers_differ)

# %%

# Reading
unlike = {row["version"]: row["runs that differ, of 19"] for row in others.rows}
speed = {row["version"]: row["TFLOP/s"] for row in others.rows}
in_figure = backward.rate("Kernel Book", seqlen=4096, head_dim=128, mask="causal")
fixed_wins = not unlike.get(FIXED, 1) and speed[FIXED] > 1.01 * max(
    in_figure, speed["Kernel Book"]
)
lab.read(
    f"**Nor are the same bits ours alone.** FlashAttention's deterministic mode repeats its bits, "
    f"too, and is faster: at 4,096 tokens with a causal mask it reaches {speed[FIXED]:.0f} TFLOP/s "
    f"where two sweeps reach {speed['Kernel Book']:.0f}, both with a warm cache and shorter "
    f"pauses; in the causal figure two sweeps reach {in_figure:.0f}."
    if fixed_wins
    else "**Which libraries give the same bits in every run?** The table below says so."
)

# %%

# Folded: Whose dq differs between runs, and speeds with a warm cache and shorter pauses
others

# %%

# Reading
alike = {
    name: backward.milliseconds_at(name, seqlen=4096, head_dim=128, mask="full")
    for name in measured
}
by_compiler = ladder.milliseconds_at("torch.compile", mask="full")
twin = min(alike, key=lambda name: abs(alike[name] / by_compiler - 1), default="none")
lab.read(
    f"**And `torch.compile`?** Without a mask, at 4,096 tokens, its code takes "
    f"{by_compiler:.2f} ms, and {twin} {alike[twin]:.2f}, because the compiler searches PyTorch "
    f"code for attention, and replaces what it finds by SDPA. It does not know the causal form, "
    f"and falls far behind two sweeps there."
    if abs(alike.get(twin, nan) / by_compiler - 1) < 0.02
    and 2 * share["torch.compile", "causal"]
    < min(compiled, share["Kernel Book", "causal"])
    else "The compiler searches PyTorch code for attention, and replaces what it finds by SDPA."
)

# %%

# Reading
on_host = {row["pass"]: row for row in hosted.rows}.get("forward and backward", {})
lab.read(
    f"A forward and backward pass of ours also takes the host "
    f"{on_host['Kernel Book (µs)'] / on_host['PyTorch (µs)']:.1f} times as long as PyTorch's."
    if on_host
    else "What a call costs the host is not recorded yet."
)

# %%
# Why one sweep loses here
# ------------------------
#
# One sweep executes five matmuls where two sweeps execute seven, and yet it takes longer. To see
# where its time goes, we time ``dk`` and ``dv`` alone, in the tiles of either version. For one
# sweep, ``dq`` is what the full run takes beyond that:


# Measuring
def as_of(sweep):
    """Run what follows with the tiles that are tuned for a sweep."""
    choose = tuned.backward_config
    return mock.patch.object(
        tuned, "backward_config", lambda _, q, *seen: choose(sweep, q, *seen)
    )


def parts_of_the_work(seqlen=16384):
    size = (4, 1, 16, seqlen, 128)
    q, k, v, do = torch.randn(size, device=runtime.DEVICE, dtype=torch.bfloat16)
    scale = 128**-0.5
    out, lse = attention_forward(q, k, v, False, scale)
    run = partial(kernels.attention_backward, q, k, v, out, lse, do, False, scale)

    def part(tuned_for, options):
        with as_of(tuned_for):
            run(**options)

    rows, runs = [], []
    for computes, matmuls, options, tiles in (
        ("dk, dv", 4, {"deterministic": True, "dq_needed": False}, ("dkdv", "all")),
        ("dq", 3, {"deterministic": True, "dkdv_needed": False}, ("dq",)),
        ("dk, dv, dq", 5, {"deterministic": False}, ("all",)),
    ):
        for tuned_for in tiles:
            config = tuned.backward_config(tuned_for, q)
            row = {"computes": computes, "matmuls": matmuls}
            row["tile"] = f"{config.block_m} × {config.block_n}"
            rows.append(row | {"warps": config.num_warps, "tuned for": tuned_for})
            runs.append(partial(part, tuned_for, options))
    times = [[] for _ in runs]
    for _ in range(4):  # in turn, so that a drift of clocks meets all alike
        for run_one, found in zip(runs, times, strict=True):
            found += lab.event_times(run_one, repeats=5)
    return [
        row | {"ms": round(statistics.median(found), 2)}
        for row, found in zip(rows, times, strict=True)
    ]


# %%

# Folded: The tiles of each
parts = lab.measure(
    "Parts of the work, 16,384 tokens, 16 heads of 128", parts_of_the_work
)
parts

# %%


# Drawing
SIZE = {"seqlen": 16384, "head_dim": 128, "mask": "full"}


def segments_of(rows):
    """For each version, its parts as (milliseconds, what it is, matmuls)."""
    ms = {(row["computes"], row["tuned for"]): round(row["ms"], 1) for row in rows}
    first, again = ms["dk, dv", "dkdv"], ms["dq", "dq"]
    wide, everything = ms["dk, dv", "all"], ms["dk, dv, dq", "all"]
    return {
        "two sweeps": [(first, "dk, dv", "4 matmuls"), (again, "dq", "3 matmuls")],
        "one sweep": [
            (wide, "dk, dv", "4 matmuls"),
            (everything - wide, "dq", "1 matmul, adding"),
        ],
    }


def time_bars(axes, rows):
    versions_shown = segments_of(rows)
    inks = [lab.colour(name) for name in ("Kernel Book", "PyTorch", "matmul")]
    for place, found in enumerate(versions_shown.values()):
        begin = 0.0
        for number, (took, what, matmuls) in enumerate(found):
            ink = inks[number]
            axes.barh(place, took, 0.6, begin, color=ink, alpha=0.25, edgecolor=ink)
            words = {"ha": "center", "va": "center", "fontsize": 10}
            text = f"{what}\n{matmuls}\n{took:.1f} ms"
            axes.text(begin + took / 2, place, text, **words)
            begin += took
    axes.set_yticks(range(len(versions_shown)), versions_shown)
    axes.set_ylim(1.5, -0.5)
    axes.figure.set_figheight(3.0)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("milliseconds")


def describe_bars(rows):
    found = (
        f"{name}: " + ", ".join(f"{what} {took:.1f} ms" for took, what, _ in segments)
        for name, segments in segments_of(rows).items()
    )
    return f"Two bars, cut into parts. {'; '.join(found)}."


lab.draw(
    parts,
    "Parts of the work, 16,384 tokens, 16 heads of 128",
    describe_bars,
    time_bars,
)

# %%


# Measuring
def launch(head_dim, deterministic):
    q, do = torch.randn(
        2, 1, 2, 256, head_dim, device=runtime.DEVICE, dtype=torch.bfloat16
    ).unbind()
    lse, scale = torch.zeros(1, 2, 256, device=runtime.DEVICE), head_dim**-0.5
    return lambda: kernels.attention_backward(
        q, q, q, q, lse, do, True, scale, deterministic
    )


# %%

# Measuring
facts = lab.facts(
    "What the compiler made of the kernels",
    {
        f"head_dim {head_dim}, {'two sweeps' if deterministic else 'one sweep'}": launch(
            head_dim, deterministic
        )
        for head_dim in (64, 128)
        for deterministic in (True, False)
    },
)

# %%

# Reading
took = {  # as the figure shows it
    (row["computes"], row["tuned for"]): round(row["ms"], 1) for row in parts.rows
}
tile_of = {row["tuned for"]: row["tile"].split(" × ") for row in parts.rows}
keys_at_once = {name: int(sides[1]) for name, sides in tile_of.items()}
two, one = (took.get(("dk, dv", tiles), nan) for tiles in ("dkdv", "all"))
whole = took.get(("dk, dv, dq", "all"), nan)
adding, fifth = whole - one, one / 4
saved = took.get(("dq", "dq"), nan)
lab.read(
    f"**The fifth matmul is not to blame.** At the pace of the other four it would take "
    f"{fifth:.1f} ms, but the second part of the bar takes {adding:.1f}. The rest comes with "
    f"adding `dq` in memory."
    if adding > 2 * fifth
    else f"The fifth matmul and the additions take {adding:.1f} ms."
)

# %%

# Reading
times = keys_at_once["all"] / keys_at_once["dkdv"] if tile_of else nan
lab.read(
    f"The first part is slower than that of two sweeps, too: its tiles have "
    f"{keys_at_once['all']} keys instead of {keys_at_once['dkdv']}. With smaller tiles there would "
    f"be {'twice' if times == 2 else f'{times:.1f} times'} as much to add, because each tile of "
    f"keys adds to all of `dq`."
    if tile_of and one > two and times > 1
    else f"In the tiles of one sweep, `dk` and `dv` take {one:.1f} ms instead of {two:.1f}."
)

# %%

# Folded: Two sweeps in one call, beside their parts
together = backward.milliseconds_at("Kernel Book", **SIZE)
lab.read(
    f"In one call, as in the last section, two sweeps take {together:.1f} ms, and not the "
    f"{two + saved:.1f} of their two parts. We do not know why."
    if abs(together - two - saved) > 0.1
    else "The parts of two sweeps add up to what they took in one call."
)

# %%

# Measuring
added, gigabytes = {}, {}
for head_dim in (64, 128):
    tile = tuned.HOPPER["all", head_dim, 2]
    if not runtime.INTERPRETED:
        like = torch.empty(1, 1, 1, head_dim, device=runtime.DEVICE).bfloat16()
        tile = tuned.backward_config("all", like)
    point = measured_at(16384, head_dims=(head_dim,))[0]
    gigabytes[head_dim] = 4 * 2048 * 16384 * (16384 // tile.block_n) / 1e9
    added[head_dim] = gigabytes[head_dim] / backward.milliseconds_at(
        "Kernel Book, one sweep", **point
    )
at_that_rate = round(gigabytes[128] / added[64], 1)
at_once = one + round(fifth, 1)
spilling = [row["case"] for row in facts.rows if row["spills"]]
in_turn = at_once + at_that_rate

# %%

# Reading
lab.read(
    f"**Do the matmuls hide the additions?** At head_dim 64, the same kernel adds "
    f"{added[64]:.1f} TB/s to memory. At head_dim 128 all programs together add "
    f"{gigabytes[128]:.0f} GB, and if nothing overlaps, the times have to add up:"
)

# %%
lab.table(
    [
        {"part of one sweep": "four matmuls, timed alone", "ms": one},
        {"part of one sweep": "a fifth, at their pace", "ms": round(fifth, 1)},
        {
            "part of one sweep": "additions, at that rate",
            "ms": at_that_rate,
        },
        {"part of one sweep": "sum", "ms": round(in_turn, 1)},
        {"part of one sweep": "one sweep, measured", "ms": whole},
    ],
    "One sweep, as if nothing in it overlapped",
)

# %%

# Reading
lab.read(
    (
        "The sum comes close to what one sweep takes, which suggests that the matmuls hide few of "
        "the additions. "
        if 0.85 < in_turn / whole < 1.05
        else "The sum is not what one sweep takes, so it explains only a part. "
    )
    + "This is no proof: the rate counts the whole run at head_dim 64, matmuls included, so "
    "the estimate of the additions is an upper one"
    + (
        ". And this kernel is the only one on the page that spills registers to memory; we have "
        "not measured what that costs."
        if spilling == ["head_dim 128, one sweep"]
        else "."
    )
)

# %%

# Reading
lab.read(
    f"If the additions were hidden, one sweep would take as long as its matmuls, {at_once:.1f} ms, "
    f"and beat two."
    if at_once < min(two + saved, together)
    else f"The five matmuls alone take {at_once:.1f} ms, and do not clearly beat two sweeps."
)

# %%
# **Could another program hide them?** While one program on an SM adds, another can multiply.

# %%

# Folded: The programs that fit on an SM
SM = {"registers": 65_536, "shared memory": 228 * 1024}  # of Hopper
if not runtime.INTERPRETED:
    gpu = torch.cuda.get_device_properties(runtime.DEVICE)
    SM["shared memory"] = gpu.shared_memory_per_multiprocessor


def room(row):
    """What a program takes of an SM, as shares, and how many programs fit."""
    registers = -(-row["registers"] // 8) * 8 * 32 * row["warps"]  # given out by eights
    shared = row["shared_bytes"] + 1024  # of which the system keeps 1 KiB
    shares = registers / SM["registers"], shared / SM["shared memory"]
    return dict(zip(SM, shares, strict=True)), int(1 / max(shares))


def sweeps_of(rows):
    for row in rows:
        if row["kernel"] != "preprocess_kernel":
            head_dim, _, version = row["case"].partition(", ")
            if version == "two sweeps":
                version = (
                    f"{'first' if row['kernel'] == 'dkdv_kernel' else 'second'} of two"
                )
            yield f"{head_dim}, {version}", row


def in_words(rows):
    found = (
        f"{name}: {', '.join(f'{x:.0%} of the {of}' for of, x in room(row)[0].items())}, "
        f"{room(row)[1]} at a time"
        for name, row in sweeps_of(rows)
    )
    return f"What a program takes of an SM, and how many fit. {'; '.join(found)}."


def boxes(axes, rows):
    kernels_shown = list(sweeps_of(rows))
    for place, (_, row) in enumerate(kernels_shown):
        shares, programs = room(row)
        for (of, share), shift in zip(shares.items(), (-0.2, 0.2), strict=True):
            ink = lab.colour("Kernel Book" if of == "registers" else "PyTorch")
            label = of if place == 0 else None
            for number in range(programs):
                look = {"color": ink, "alpha": 0.35, "edgecolor": ink, "linewidth": 1.5}
                axes.barh(
                    place + shift, share, 0.36, share * number, label=label, **look
                )
                label = None
        words = f"{programs} program{'s' * (programs > 1)}"
        axes.text(1.03, place, words, va="center", fontsize=10)
    axes.axvline(1, color=lab.colour("matmul"), linestyle="--")
    axes.set_yticks(range(len(kernels_shown)), [name for name, _ in kernels_shown])
    axes.invert_yaxis()
    axes.xaxis.set_major_formatter("{x:.0%}")
    axes.set(xlim=(0, 1.32), xticks=(0, 0.5, 1), xlabel="of an SM")
    axes.grid(axis="y", visible=False)


lab.draw(facts, "The programs that fit on an SM", in_words, boxes)

# %%

# Reading
fits = {(row["case"], row["kernel"]): room(row)[1] for row in facts.rows}
once = fits.get(("head_dim 128, one sweep", "dkdv_kernel"), nan)
small = fits.get(("head_dim 64, one sweep", "dkdv_kernel"), nan)
relative_speed = {
    row["head_dim"]: 100 * row["one sweep"] / row["two sweeps"]
    for row in speeds
    if row["mask"] == "full"
}
lab.read(
    f"At head_dim 64, {small:.0f} programs of one sweep fit, and it reaches "
    f"{relative_speed[64]:.0f} % of the speed of two sweeps at 16,384 tokens without a mask. "
    f"At head_dim 128 only {once:.0f} fits, and it reaches {relative_speed[128]:.0f} %. That "
    f"agrees, but tiles and spills differ, too."
    if small > once and relative_speed[64] > relative_speed[128]
    else f"At head_dim 64, {small:.0f} programs of one sweep fit, and at 128 {once:.0f}."
)

# %%

# Folded: What the compiler made of the kernels: registers, shared memory and spills
facts

# %%
# **The way out** is to hide the additions *within* a program. In
# :doc:`/chapters/attention_hopper_backward`, groups of warps load, multiply and add at the same
# time.

# Reading
later = find("attention_hopper_backward") or {"sweeps": {}}
rungs = later["sweeps"].get("ladder", {"points": [], "milliseconds": {}})
unmasked = [n for n, at in enumerate(rungs["points"]) if at["mask"] == "full"]
at_work = {
    name: rungs["milliseconds"][name][unmasked[0]][1]
    for name in (
        "two sweeps",
        "one sweep, plain Triton",
        "one sweep with roles",
    )
    if unmasked and rungs["milliseconds"].get(name)
}
plain, roles, swept = (
    at_work.get(name, nan)
    for name in ("one sweep, plain Triton", "one sweep with roles", "two sweeps")
)
lab.read(
    f"There, at 4,096 tokens without a mask, one sweep takes {roles:.1f} ms instead of "
    f"{plain:.1f}, so "
    + (
        "it beats two sweeps."
        if roles < 0.97 * swept
        else "it catches up with two sweeps, and no more."
        if roles < 1.03 * swept
        else "it does not yet catch up with two sweeps."
    )
    if len(at_work) == 3
    else "No run of that chapter is recorded yet."
)

# %%
# .. dropdown:: Which version a call runs
#
#    In plain Triton (``backend="triton"``) it is two sweeps, because one sweep was slower at all
#    points above, which are in bfloat16; the other dtypes follow.
#    ``deterministic=False`` asks for one sweep. Without a ``backend``, 16-bit inputs on Hopper run
#    the one sweep of the later chapter, where a table there says so.

# %%
# What breaks it
# --------------
#
# Each of these mistakes runs without an error. Here are the gradients by the formula, first right
# and then with one mistake at a time:


def with_mistake(q, k, v, do, mistake):
    scale, factor = q.shape[-1] ** -0.5, log2e
    s = scale * q @ k.mT
    out, lse = s.softmax(-1) @ v, s.logsumexp(-1)
    delta = (do * out).sum(-1, keepdim=True)
    if mistake == "delta left out":
        delta = 0.0
    if mistake == "lse not converted to base 2":
        factor = 1.0
    if mistake == "lse in bfloat16":
        lse = lse.bfloat16().to(q)
    p = torch.exp2(s * log2e - (lse * factor)[..., None])
    ds = p * (do @ v.mT - delta)
    dq, dk = scale * ds @ k, scale * ds.mT @ q
    if mistake == "dk without its scale":
        dk = ds.mT @ q
    return dq, dk, p.mT @ do


# %%


# Measuring
MISTAKES = (
    "none",
    "delta left out",
    "lse not converted to base 2",
    "lse in bfloat16",
    "dk without its scale",
)
q, k, v, do = torch.randn(4, 1, 1, 200, 64, device=runtime.DEVICE).unbind()
truths = reference.attention_backward(q, k, v, do)
rows = []
for mistake in MISTAKES:
    row = {"mistake": mistake}
    for name, x, truth in zip(
        ("dq", "dk", "dv"), with_mistake(q, k, v, do, mistake), truths, strict=True
    ):
        row[name] = f"{relative(x, truth):.0e}"
    rows.append(row)
lab.table(rows, "Relative error of the three gradients, float32")

# %%
# A test of ``dv`` alone finds only two of the four mistakes, and one with ``scale=1`` would miss
# the last.

# %%
# **A forgotten mask** does not crash, either. The kernel of Triton's tutorial was always causal in
# its backward pass (`issue 4541 <https://github.com/triton-lang/triton/issues/4541>`__), and its
# test, always causal, too, did not notice:

# Measuring
q, k, v, do = torch.randn(4, 2, 2, 100, 32, device=runtime.DEVICE).unbind()
rows = []
for forward_mask in (False, True):
    out, lse = reference.attention(q, k, v, forward_mask)
    truths = reference.attention_backward(q, k, v, do, forward_mask)
    for backward_mask in (False, True):
        with runtime.launching_on(q):
            grads = kernels.attention_backward(
                q, k, v, out.float(), lse.float(), do, backward_mask, 32**-0.5, True
            )
        row = {"forward": "causal" if forward_mask else "full"}
        row["backward"] = "causal" if backward_mask else "full"
        for name, ours, truth in zip(("dq", "dk", "dv"), grads, truths, strict=True):
            row[name] = f"{relative(ours, truth):.1e}"
        rows.append(row)
lab.table(rows, "Relative error, when the two passes do not have the same mask")

# %%
# The errors are largest where backward sees more keys than forward did: ``lse`` lacks these keys,
# so every row of :math:`e^{s - \mathrm{lse}}` but the last sums to more than 1.

# %%

# Folded: What a row of such weights sums to
s = 32**-0.5 * q.double() @ k.double().mT
_, lse = reference.attention(q, k, v, True)
sums = (s - lse[..., None]).exp().sum(-1)[0, 0]
lab.table(
    [{"query": i, "sum of its weights": f"{sums[i]:.2f}"} for i in (0, 1, 10, 50, 99)],
    "Causal lse with all keys",
)

# %%
# In short
# --------
#
# The weights need not be stored, because one number per query, ``lse``, brings them back, and
# another, ``delta``, stands for the sum over all keys. Two sweeps give each sum a program of its
# own, and so the same bits in every run, for seven matmuls instead of five. One sweep needs only
# five, and loses in plain Triton, probably because its matmuls and its additions take turns; what
# its spills cost, we have not measured.

# Reading
lab.read(
    ("The best libraries are faster than both" if losses else "No library is faster")
    + (", and FlashAttention can repeat its bits, too." if fixed_wins else ".")
)

# %%
# :doc:`/chapters/attention_in_models` is next, with windows, packed batches and decoding.
#
# Exercises
# ---------
#
# **1. The gradient of a bias.** ALiBi adds :math:`a\,(j - i)` to the score of query :math:`i` and
# key :math:`j`, with a slope :math:`a` for each head. If the slopes are learned, what is their
# gradient? Write a kernel that stores no matrix and gives the same result in every run.

# %%

# Solution: the gradient of a bias
#
# The bias is added to the score, so the gradient of the bias is dS, and the gradient of the slope
# is the sum of dS times (j - i).


@triton.jit
def _slope_bwd_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, slope_ptr, part_ptr, n, scale,
    BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    tile, head = tl.program_id(0), tl.program_id(1)
    cols = tl.arange(0, HEAD_DIM)[None, :]
    rows = tile * BLOCK + tl.arange(0, BLOCK)
    offsets = (head * n + rows)[:, None] * HEAD_DIM + cols
    q, do = tl.load(q_ptr + offsets), tl.load(do_ptr + offsets)
    lse = tl.load(lse_ptr + head * n + rows)[:, None]
    delta = tl.load(delta_ptr + head * n + rows)[:, None]
    slope, total = tl.load(slope_ptr + head), tl.zeros((BLOCK,), tl.float32)
    for start in range(0, (tile + 1) * BLOCK, BLOCK):
        keys = start + tl.arange(0, BLOCK)
        offsets = (head * n + keys)[:, None] * HEAD_DIM + cols
        k, v = tl.load(k_ptr + offsets), tl.load(v_ptr + offsets)
        distance = (keys[None, :] - rows[:, None]).to(tl.float32)
        s = tl.dot(q, k.T, input_precision="ieee") * scale + slope * distance
        p = tl.where(distance <= 0, tl.exp(s - lse), 0.0)
        dp = tl.dot(do, v.T, input_precision="ieee")
        total += tl.sum(p * (dp - delta) * distance, axis=1)
    tl.store(part_ptr + head * tl.num_programs(0) + tile, tl.sum(total, axis=0))


def alibi(q, k, v, slope):
    n = q.shape[1]
    i, j = torch.arange(n, device=q.device)[:, None], torch.arange(n, device=q.device)
    s = q @ k.mT * q.shape[-1] ** -0.5 + slope[:, None, None] * (j - i)
    s = s.masked_fill(j > i, -torch.inf)
    return s.softmax(-1) @ v, s.logsumexp(-1)


def slope_gradient(q, k, v, slope, do):
    slope = slope.clone().requires_grad_()
    return torch.autograd.grad(alibi(q, k, v, slope)[0], slope, do)[0]


q, k, v, do = torch.randn(4, 6, 64, 16, device=runtime.DEVICE).unbind()
slope = 0.5 ** torch.arange(1, 7, device=runtime.DEVICE)
out, lse = alibi(q, k, v, slope)
parts = torch.empty(6, 4, device=runtime.DEVICE)
tensors = (q, k, v, do, lse, (do * out).sum(-1), slope, parts)
_slope_bwd_kernel[(4, 6)](*tensors, 64, 0.25, BLOCK=16, HEAD_DIM=16)
theirs = slope_gradient(q, k, v, slope, do)
truth = slope_gradient(*(x.double() for x in (q, k, v, slope, do)))
# sixteen times PyTorch's error, because a slope is a sum over all pairs, here in another order
lab.check(
    "Slopes of six heads",
    [lab.Case("64 × 64, 16", "slope", parts.sum(1), theirs, truth, factor=16)],
)

# %%
# **2. Dropout inside attention.** Weights are dropped after the softmax, :math:`O = (P \circ Z)\,
# V`, where :math:`Z` is 0, or :math:`1/(1 - r)` for a drop probability :math:`r`. What becomes of
# ``delta``? Write the tiled backward pass so that no mask is stored, as in the chapter on dropout.


# %%

# Solution: dropout inside attention
#
# dV = (P ∘ Z)^T dO and dP = (dO V^T) ∘ Z. Then delta = sum_j p_j z_j (dO · v_j) = dO · O, where O
# is the output *after* dropout. So delta is computed as before.


def mask_of(rows, keys, n_keys, p, seed):
    index = rows[:, None] * n_keys + keys
    return reference.keep_mask(index, p, seed, 7).double() / (1 - p)


class DroppedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, p, seed):
        i, j = torch.arange(len(q)), torch.arange(len(k))
        s = q @ k.T
        out = (s.softmax(-1) * mask_of(i, j, len(k), p, seed)) @ v
        ctx.save_for_backward(q, k, v, out, s.logsumexp(-1))
        ctx.p, ctx.seed = p, seed
        return out

    @staticmethod
    def backward(ctx, do):
        q, k, v, out, lse = ctx.saved_tensors
        dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
        delta = (do * out).sum(-1, keepdim=True)
        for i in torch.arange(len(q)).split(4):
            for j in torch.arange(len(k)).split(3):
                z = mask_of(i, j, len(k), ctx.p, ctx.seed)
                p = (q[i] @ k[j].T - lse[i, None]).exp()
                dv[j] += (p * z).T @ do[i]
                ds = p * ((do[i] @ v[j].T) * z - delta[i])
                dq[i] += ds @ k[j]
                dk[j] += ds.T @ q[i]
        return dq, dk, dv, None, None


inputs = [
    torch.randn(n, 5, dtype=torch.float64, requires_grad=True) for n in (10, 8, 8)
]
kept = mask_of(torch.arange(10), torch.arange(8), 8, 0.3, 7).bool().float().mean()
passed = torch.autograd.gradcheck(DroppedAttention.apply, (*inputs, 0.3, 7))
assert passed
lab.table(
    [{"kept": f"{kept:.0%}", "of": "10 × 8 pairs", "gradcheck": passed}],
    "Dropout with p = 0.3, its mask recomputed in tiles of 4 × 3",
)

# %%
# **3. Checkpointing whole layers.** ``torch.utils.checkpoint`` runs a layer's forward pass again
# during the backward pass. How many matmuls does a step take then? Do the gradients change?

# %%

# Solution: checkpointing whole layers
#
# Without checkpointing: 2 matmuls forward, and 7 backward in two sweeps. With it: 2 more, so 11
# instead of 9. Scores are then computed four times: forward, forward again, and in both sweeps.
# Only the input of each layer is kept; q, k, v, out and lse exist for one layer at a time.

from torch.utils.checkpoint import checkpoint

calls = 0


def layer(x, w):
    global calls
    calls += 1
    q, k, v = (x @ w).view(1, 40, 3, 2, 32).permute(2, 0, 3, 1, 4)
    out = attention(q, k, v, is_causal=True)
    return x + out.transpose(1, 2).reshape(x.shape)


def step(wrapped):
    global calls
    calls, y = 0, x
    for w in weights:
        y = checkpoint(layer, y, w, use_reentrant=False) if wrapped else layer(y, w)
    return torch.autograd.grad(y.sum(), weights), calls


x = torch.randn(1, 40, 64, device=runtime.DEVICE)
weights = [
    (torch.randn(64, 192, device=runtime.DEVICE) / 8).requires_grad_() for _ in range(3)
]

plain_grads, once = step(False)
again_grads, twice = step(True)
same = all(torch.equal(a, b) for a, b in zip(plain_grads, again_grads, strict=True))
assert (once, twice) == (3, 6)
assert same
lab.table(
    [
        {"layers": 3, "checkpoint": "no", "forward passes": once, "same bits": same},
        {"layers": 3, "checkpoint": "yes", "forward passes": twice, "same bits": same},
    ],
    "A step of three layers of attention",
)

# %%
# References
# ----------
#
# - Dao et al. *FlashAttention: fast and memory-efficient exact attention with
#   IO-awareness.* NeurIPS 2022.
# - Dao. *FlashAttention-2: faster attention with better parallelism and work partitioning.* ICLR
#   2024.
# - Zadouri et al. *FlashAttention-4: algorithm and kernel
#   pipelining co-design for asymmetric hardware scaling.* arXiv:2603.05451, 2026.
# - Dong et al. *Flex Attention: a programming model for generating optimized
#   attention kernels.* arXiv:2412.05496, 2024.
# - PyTorch, `fuse_attention.py
#   <https://github.com/pytorch/pytorch/blob/main/torch/_inductor/fx_passes/fuse_attention.py>`__:
#   the forms of attention that ``torch.compile`` replaces.
# - Press et al. *Train short, test long: attention with linear biases enables input length
#   extrapolation.* ICLR 2022.

# %%

# Closing
reached = {
    name: [backward.share(name, **point) for point in measured_at(*LENGTHS)]
    for name in MODES
}
lab.finish(
    f"{min(reached['Kernel Book']):.0%} to {max(reached['Kernel Book']):.0%} of the speed of a "
    f"matmul, the same bits in every run; in one sweep "
    f"{min(reached['Kernel Book, one sweep']):.0%} to "
    f"{max(reached['Kernel Book, one sweep']):.0%}"
)
