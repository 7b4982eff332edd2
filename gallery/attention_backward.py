"""
Attention backward
==================

The forward pass never stores the attention weights, one for every pair of a query and a key, yet
the gradient depends on every one of them. *How can we differentiate through a matrix that was never
stored?*

You will learn

- how one number per query, ``delta``, replaces a whole row of weights and their gradients;
- how programs divide the three gradients, and what sharing a sum costs compared with computing two
  matmuls twice;
- which tiles a causal gradient can skip, and what goes wrong when it forgets its mask.

:doc:`/chapters/attention_forward` explains tiles and causal stages, and
:doc:`/chapters/attention_fast` explains descriptors.
"""

# sphinx_gallery_thumbnail_number = 6
import math
import statistics
from functools import partial
from unittest import mock

import torch
import torch.nn.functional as F
from matplotlib.patches import Polygon, Rectangle

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
from kernelbook.lab.chapter import checked
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
# depends on every weight. With the scale :math:`\sigma = 1/\sqrt{d}`, where :math:`d` is the
# head_dim, attention for one head is three lines of PyTorch, which we call *the formula*:
#
# .. code-block:: python
#
#    s = scale * q @ k.mT  # scores: one row per query, one column per key
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

# Measuring
memory = lab.measure("Memory, 16 heads of head_dim 128, bfloat16", memory_experiment)

# %%

# Reading
nan = float("nan")
found = {(row["length"], row["version"]): row for row in memory.rows}


def needs(version, what, seqlen=16384):
    """MiB that a version keeps, or that its backward pass allocates."""
    return found.get((seqlen, version), {}).get(what, nan)


KEEPS, ALLOCATES = "kept, MiB", "peak in backward, MiB"
in_all, growth = {}, {}
for name in VERSIONS:
    at_4096, in_all[name] = (
        needs(name, KEEPS, n) + needs(name, ALLOCATES, n) for n in (4096, 16384)
    )
    growth[name] = in_all[name] / at_4096
of_formula = [needs("standard attention", what) / 1024 for what in (KEEPS, ALLOCATES)]
lab.together(
    lab.read(
        f"For 16,384 tokens and 16 heads of head_dim 128, the formula keeps {of_formula[0]:.0f} "
        f"GiB of weights for the backward pass, which then allocates another "
        f"{of_formula[1]:.0f} GiB."
    ),
    lab.read(
        f"We build two versions that store no such matrix. They loop over the pairs of queries and "
        f"keys twice or once, so we call them **two sweeps** and **one sweep**. Two sweeps need "
        f"{in_all['two sweeps']:.0f} MiB. One sweep needs "
        f"{in_all['one sweep'] - in_all['two sweeps']:.0f} MiB more, because it sums one gradient "
        f"in float32. The figure leaves out the inputs and gradients, which every version needs:"
    ),
)

# %%


# Drawing
OWN = ("never", "masked", "seen")  # tiles, drawn below in colours of this page
INKS = {name: lab.colour(name) for name in OWN}
INKS["two sweeps"] = lab.colour("Kernel Book")
INKS["one sweep"] = lab.colour("Kernel Book, one sweep")
INKS["standard attention"] = lab.colour("PyTorch")


def totals(rows):
    """For each version, its lengths and the MiB that it needs at each."""
    return {
        name: {
            row["length"]: row[KEEPS] + row[ALLOCATES]
            for row in rows
            if row["version"] == name
        }
        for name in ("standard attention", "one sweep", "two sweeps")
    }


def in_bytes(mib):
    return f"{mib / 1024:.0f} GiB" if mib > 1024 else f"{mib:.0f} MiB"


def memory_lines(axes, rows):
    axes.figure.set_figheight(3.0)
    for name, points_of in totals(rows).items():
        lengths, amounts = zip(*points_of.items(), strict=True)
        axes.plot(lengths, amounts, "o-", color=INKS[name], markersize=4.5)
        called = name.replace("standard attention", "the formula")
        said = f"{called}, {in_bytes(amounts[-1])}"
        place = {"va": "center", "fontsize": 10, "color": INKS[name]}
        axes.text(lengths[-1] * 1.12, amounts[-1], said, **place)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks([1024, 4096, 16384], ["1,024", "4,096", "16,384"])
    axes.set_yticks(
        [2**n for n in (1, 5, 9, 13)], ["2 MiB", "32 MiB", "512 MiB", "8 GiB"]
    )
    axes.set(xlim=(900, 64000), ylim=(2, 2**16.2), xlabel="tokens")
    axes.minorticks_off()


def memory_in_words(rows):
    found = (
        f"{name}: " + ", ".join(f"{in_bytes(x)} at {n:,}" for n, x in points_of.items())
        for name, points_of in totals(rows).items()
    )
    return f"Three lines, plotted against the number of tokens. {'; '.join(found)}."


lab.draw(
    memory,
    "Memory kept for the backward pass, and allocated in it",
    memory_in_words,
    memory_lines,
)

# %%

# Reading
lab.read(
    f"**With four times as many tokens, the formula needs {growth['standard attention']:.0f} times "
    f"the memory,** because it stores a number for every pair. Our versions need only "
    f"{growth['two sweeps']:.0f} times as much, because they store rows for tokens, and nothing "
    f"for pairs. For the backward pass, they keep just the output and one number per query."
)

# %%
# This number is ``lse``, the :term:`logsumexp` of the query's scores. From ``lse``, ``q`` and
# ``k``, the backward pass computes the weights again.
#
# **The price is one matmul in five.** With scores :math:`S`, weights :math:`P` and output
# :math:`O`, the forward pass is two matmuls, :math:`S = \sigma Q K^\top` and :math:`O = PV`. Each
# has two inputs, so their gradients take four matmuls, and computing :math:`S` again is the fifth.
#
# The mathematics
# ---------------
#
# The gradient of softmax needs whole rows of weights, but a kernel sees only one tile of them at a
# time. Fortunately, one number per query can replace the row.
#
# **An example.** One query sees three keys with weights 0.5, 0.3 and 0.2. With a head_dim of 1, let
# their values be 4, 1 and 1. The output is the weighted mean of the values, 2.5.
#
# What happens to the output if one score rises? Its weight grows, and the others shrink, because
# the weights sum to 1. The output therefore moves towards the value of that key, and rises only if
# this value is *above the mean*. The gradient of a score is its weight times the excess of its
# value over 2.5:


weights, values = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([4.0, 1.0, 1.0])
scores = weights.log().requires_grad_()
(by_autograd,) = torch.autograd.grad(scores.softmax(0) @ values, scores)
by_hand = weights * (values - 2.5)

# %%


# Reading
def in_cell(x):
    """A number of a table with one or two digits."""
    if 0 < x < 0.01:
        return f"{x:.0e}"
    if x == 0 or x >= 10:
        return f"{x:.0f}"
    return f"{x:.1f}" if x >= 1 else f"{x:#.2g}"


def in_text(x):
    """A small number as a power of ten, on one line."""
    digit, power = f"{x:.0e}".split("e")
    small = str(int(power)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"{digit}×10{small}"


assert torch.allclose(by_autograd, by_hand)
first_two, last = (
    ", ".join(f"{x:.2f}" for x in part.tolist()).replace("-", "−")
    for part in by_hand.split([2, 1])
)
lab.read(f"Autograd and this rule both give {first_two} and {last}.")

# %%
# In the drawing, each of them is an *area*, as wide as the weight and as high as the excess. The
# areas above and below the mean cancel, because no weight changes if all scores rise by the same
# amount:


# Drawing
def areas(axes):
    """The gradient of each score, as its weight times the excess of its value."""
    grey, left = lab.colour("matmul"), 0.0
    mean = (weights * values).sum().item()
    for number, (weight, value) in enumerate(
        zip(weights.tolist(), values.tolist(), strict=True), 1
    ):
        ink = lab.colour("Kernel Book" if value > mean else "PyTorch")
        box = (left, min(value, mean)), weight, abs(value - mean)
        axes.add_patch(Rectangle(*box, fc=ink, alpha=0.15))
        axes.add_patch(Rectangle(*box, fill=False, ec=ink, lw=1.5))
        at, area = left + weight / 2, weight * (value - mean)
        words = {"ha": "center", "va": "center", "fontsize": 10}
        said = f"{area:+.2f}".replace("-", "−")
        axes.text(at, (value + mean) / 2, said, **(words | {"fontsize": 12}))
        axes.text(
            at, 0.72, f"key {number}\nweight {weight:.1f}", **(words | {"va": "top"})
        )
        left += weight
    axes.axhline(mean, color=grey, linestyle="--", linewidth=1)
    ticks = {f"value {x:.0f}": x for x in sorted({*values.tolist()})}
    ticks[f"mean {mean}"] = mean
    axes.set_yticks(list(ticks.values()), list(ticks))
    axes.tick_params(axis="y", length=0)
    axes.set(xlim=(-0.02, 1.02), ylim=(0, 4.3), xticks=[])
    axes.spines[:].set_visible(False)
    axes.grid(visible=False)


lab.sketch(
    "The gradient of a score is an area",
    "Three boxes side by side, as wide as the weights of the keys. A dashed line marks the mean of "
    "the values. The box of key 1 reaches from it up to 4, and those of keys 2 and 3 reach down "
    "to 1. Their areas, counted as negative below the line, are the gradients: "
    + ", ".join(f"{x:.2f}" for x in by_hand.tolist())
    + ".",
    areas,
    height=2.9,
)

# %%
# The mean, 2.5, is the *output*, and the forward pass has left it in memory. So we need no sum over
# the keys. In general:
#
# *Step 1: the last matmul.* From :math:`O = PV` we get :math:`dV = P^\top dO` and :math:`dP = dO\,
# V^\top`.
#
# *Step 2: softmax.* The weights of one query are :math:`p_j = e^{s_j} / \sum_k e^{s_k}`. A score
# :math:`s_i` appears in one numerator and in every denominator, so
# :math:`\partial p_j / \partial s_i` is :math:`p_j\, (1 - p_j)` if :math:`i = j`, and
# :math:`-p_j\, p_i` otherwise. As a matrix, this is :math:`J = \mathrm{diag}(p) - p\, p^\top`.
#
# *Step 3: the gradient of the scores.* Since :math:`J` is symmetric,
#
# .. math::
#
#    ds = J\, dp = p \circ (dp - \delta), \qquad \delta = p^\top dp
#
# The circle denotes the elementwise product. In the example, the gradient of the output is 1, so
# :math:`dp` is the values, and their weighted mean :math:`\delta` is 2.5. It is a sum over *all*
# keys, so a kernel would have to loop over them twice, once for :math:`\delta` and again for
# :math:`ds`.
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
#    :math:`\delta = \mathrm{rowsum}(dO \circ O)`, called :term:`delta` in code, is a sum over the
#    columns of one row and needs neither :math:`P` nor :math:`dP`.
#
# *Step 5: the first matmul.* From :math:`S = \sigma Q K^\top` we get :math:`dQ = \sigma\, dS\, K`
# and :math:`dK = \sigma\, dS^\top Q`.
#
# *Step 6: P from lse.* With :math:`\mathrm{lse} = \log \sum_j e^{s_j}`, a weight no longer requires
# a maximum, a sum or a division: :math:`p_j = e^{s_j - \mathrm{lse}}`. The package's kernels use
# powers of 2 instead, for which the GPU has an instruction.
#
# .. dropdown:: Step 7: the gradient of lse
#
#    A caller may use ``lse`` too, for instance to merge the results of two attention calls. Its
#    definition gives :math:`\partial\, \mathrm{lse} / \partial s_j = p_j`, so a gradient
#    :math:`d\mathrm{lse}` adds one term:
#
#    .. math::
#
#       \begin{aligned}
#       ds &= p \circ (dp - \delta) + p\, d\mathrm{lse} \\
#       &= p \circ \big( dp - (\delta - d\mathrm{lse}) \big)
#       \end{aligned}
#
#    In code, this is a single subtraction from ``delta`` before the other steps begin.
#
# Here are the steps in PyTorch, for random ``q``, ``k``, ``v`` and ``do``, the gradient of ``out``:

q = torch.randn(4, 3, dtype=torch.float64)  # 4 queries, 6 keys, head_dim 3
k, v = torch.randn(2, 6, 3, dtype=torch.float64)
do, scale = torch.randn_like(q), 3**-0.5

s = scale * q @ k.T
p = s.softmax(-1)
out, lse = p @ v, s.logsumexp(-1)  # end of the forward pass

dv, dp = p.T @ do, do @ v.T  # step 1
delta = (do * out).sum(-1)  # step 4
ds = p * (dp - delta[:, None])  # step 3
dq, dk = scale * ds @ k, scale * ds.T @ q  # step 5


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
    "5: dQ": (dq, true(lambda q: (scale * q @ k.T).softmax(-1) @ v, q)),
    "5: dK": (dk, true(lambda k: (scale * q @ k.T).softmax(-1) @ v, k)),
    "6: P by exp2": (torch.exp2(s * log2e - (lse * log2e)[:, None]), p),
    "7: dS with dlse": (p * (dp - (delta - dlse)[:, None]), jacobian(with_lse, s)),
}

rows, differences = [], []
for step, (ours, expected) in steps.items():
    differences.append((ours - expected).abs().max().item())
    rows.append({"step": step, "off by": in_cell(differences[-1])})
    rows[-1]["right"] = differences[-1] < 1e-14
assert all(row["right"] for row in rows)
step_table = lab.table(
    rows, "Each step against automatic differentiation or the definition, float64"
)

# %%

# Reading
lab.read(
    f"Every step agrees with automatic differentiation, or with its definition, to within "
    f"{in_text(max(differences))}."
)

# %%
# Dividing the work among programs
# --------------------------------
#
# With ``lse`` and ``delta`` at hand, no formula needs a whole row, so we can process each pair of a
# query tile and a key tile on its own. Here we split the ``q``, ``k`` and ``v`` from above into
# tiles of 2 queries and 3 keys:

dq_sum, dk_sum, dv_sum = (torch.zeros_like(x) for x in (q, k, v))
for i in torch.arange(4).split(2):  # tiles of queries
    for j in torch.arange(6).split(3):  # tiles of keys
        p_ij = (scale * q[i] @ k[j].T - lse[i, None]).exp()  # step 6
        dv_sum[j] += p_ij.T @ do[i]  # step 1
        ds_ij = p_ij * (do[i] @ v[j].T - delta[i, None])  # steps 1 and 3
        dq_sum[i] += scale * ds_ij @ k[j]  # step 5
        dk_sum[j] += scale * ds_ij.T @ q[i]  # step 5

# %%

# Reading
sums = {"dq": (dq_sum, dq), "dk": (dk_sum, dk), "dv": (dv_sum, dv)}
apart = max((ours - whole).abs().max().item() for ours, whole in sums.values())
assert apart < 1e-14
lab.read(f"The three sums match the gradients above to within {in_text(apart)}.")

# %%

# Folded: The ten checks of the steps, and the loop for every length and mask
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
lab.together(
    step_table,
    lab.read(
        "The package's loop over tiles handles any length. `key_tiles` lists the tiles of keys "
        "that a tile of queries sees; `_scores` scales and masks according to `rule`, which holds "
        "the lengths and the mask; and `_finite` keeps a query that sees no key from producing "
        "NaN. PyTorch's `gradcheck` compares the loop's gradients with finite differences:"
    ),
    lab.source(tiled.tiled_backward, "begin", "meet"),
    lab.table(rows, "The loop in tiles of 3 queries and 2 keys, float64"),
)

# %%
# Each pair of tiles *adds* to three gradients. Since programs run at the same time, two of them may
# try to update the same sum at once.
#
# .. admonition:: Key idea
#    :class: kb-key
#
#    The gradient of a *query* is a sum over keys; the gradients of a *key* and its value are sums
#    over queries. A pair of tiles adds to both, so programs that process each pair only once must
#    share one of these sums.
#
# **Two sweeps.** In the first sweep, a program owns a tile of keys, loops over tiles of queries,
# and keeps ``dk`` and ``dv`` in :term:`registers <register>`, since no other program adds to them.
# In the second, a program owns a tile of queries with its ``dq`` and loops over tiles of keys.
#
# In the animation, one program processes a *column* on the left or a *row* on the right:
#
# .. animation:: two_sweeps
#
# The price is that :math:`S` and :math:`dP` are computed twice, so each tile takes seven matmuls
# instead of five.
#
# **One sweep.** A program owns a tile of keys and computes all three gradients. As before, ``dk``
# and ``dv`` stay in registers, but the program *adds* its share of ``dq`` *in memory*, tile by
# tile.
#
# .. image:: /figures/attention-backward-shared-sum.svg
#    :alt: Five programs, each with a column of tiles from the diagonal down, and its own dk and dv
#          below. The last row has a tile of each program. All five add to the last tile of dq,
#          which is in memory in float32, in any order.
#
# This takes only five matmuls per tile. However, the additions have to be :term:`atomic` and happen
# in no fixed order, so the last bits of ``dq`` can differ between runs. Which is faster, two extra
# matmuls or a shared sum? We build both.
#
# The kernels
# -----------
#
# We keep the first sweep as small as possible: one head in float32, a causal mask, and a length
# ``n`` that the tiles divide evenly. The forward pass supplies ``lse``, and step 4 gives ``delta``
# before either sweep starts.
#
# **1. Load.** A program owns ``BLOCK_N`` keys, starting at ``first_key``. It loads their ``k`` and
# ``v`` once, from the offsets ``own``, and sets their gradients to zero. The scale of the scores is
# applied here, to ``k``:

lab.source(smallest.dkdv_kernel, "load")

# %%
# **2. Find the queries.** With tiles of 128 keys and 64 queries, consider the program that owns
# keys 128 to 255. Under a causal mask, no query before 128 sees any of these keys, so the loop
# begins at ``first`` = 128. Query 255 is the first to see all of them, so from ``whole`` = 256 on,
# no tile needs a mask:


# Drawing
def column(axes):
    """The tiles of queries that the program of the keys 128 to 255 visits."""
    for top in range(0, 384, 64):
        kind = "never" if top < 128 else "masked" if top < 256 else "seen"
        ink = lab.colour(
            {"never": "matmul", "seen": "Kernel Book"}.get(kind, "PyTorch")
        )
        fill = {"facecolor": ink, "alpha": 0.0 if kind == "never" else 0.15}
        axes.add_patch(Rectangle((128, top), 128, 64, **fill))
        style = "--" if kind == "never" else "-"
        axes.add_patch(Rectangle((128, top), 128, 64, fill=False, ec=ink, ls=style))
        axes.text(122, top, top, ha="right", fontsize=10, va="center")
    for end, name, before in (
        (128, "first = 128", "not visited"),
        (256, "whole = 256", "on the diagonal: mask needed"),
        (384, "n = 384", "below the diagonal: no mask"),
    ):
        axes.text(268, end - 64, before, fontsize=10, va="center")
        axes.text(268, end, f"← {name}", fontsize=10, va="center")
    hidden = [(128, 128), (256, 128), (256, 256)]
    axes.add_patch(Polygon(hidden, facecolor=lab.colour("matmul"), alpha=0.35))
    axes.text(216, 146, "hidden", fontsize=10, ha="center", va="center")
    axes.text(160, 222, "seen", fontsize=10, ha="center", va="center")
    axes.text(192, -14, "keys 128 to 255 →", fontsize=10, ha="center")
    axes.text(84, -14, "queries ↓", fontsize=10, ha="right")
    axes.set(xlim=(-60, 480), ylim=(400, -40), xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
    axes.grid(visible=False)


lab.sketch(
    "The tiles of queries that one program visits",
    "A column of six tiles of 64 queries, over the keys 128 to 255. The first two tiles are not "
    "visited. From first, 128, to whole, 256, the diagonal cuts two tiles, which need a mask: keys "
    "above it are hidden, and keys below it are seen. From whole to n, 384, two tiles lie below it "
    "and need no mask.",
    column,
    height=3.4,
)

# %%
# In the code, ``first`` is ``first_key`` rounded down to a multiple of ``BLOCK_M``, and ``whole``
# is ``last_key`` rounded up:

lab.source(smallest.dkdv_kernel, "stages")

# %%
# **3. Sweep and write.** Two loops visit the tiles of queries, and ``add_queries``, shown next,
# adds the contribution of each tile. ``MASKED`` is a constant, so the second loop is compiled
# without a mask. At the end, plain stores suffice, and ``dk`` receives the scale of step 5:

lab.source(smallest.dkdv_kernel, "sweep", "write")

# %%
# **4. Process one tile.** For ``BLOCK_M`` queries from ``start`` on, ``add_queries`` loads the rows
# of ``q`` and ``do`` with ``lse`` and ``delta``, and computes the weights by step 6. They are
# *transposed*, hence the suffix ``_t``, because :math:`dV` and :math:`dK` take :math:`P^\top` and
# :math:`dS^\top`. ``"ieee"`` asks for full float32, which Triton would otherwise round to
# :term:`TF32` for the :term:`matrix unit`:

lab.source(smallest.add_queries, "queries", "weights")

# %%
# The gradients follow steps 1, 3 and 5, with :math:`dS^\top = P^\top \circ (dP^\top - \delta)`. The
# third argument of ``tl.dot`` is the accumulator it adds to:

lab.source(smallest.add_queries, "gradients")


# %%


# Measuring
import triton
import triton.language as tl


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
dv_check = lab.check(
    "dv from the transpose of S", [lab.Case(f"{size}", "dv", dv, theirs, truth)]
)

# %%

# Measuring
ways = lab.measure("dv of 8,192 queries and keys, computed in two ways", both_ways)

# %%


# Folded: What the transposed weights save in 16 bits, and which thread holds them
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
    f"Two blocks of 8 by 8 elements with the number of the thread that holds each. Left, as a "
    f"matmul leaves them and a left operand needs them: thread 0 has the first two of the first "
    f"row, and so on to thread 31. Right, transposed: {stay} elements stay with their thread, and "
    f"{len(pairs) - stay} belong to another.",
    blocks,
    panels=2,
    height=3.3,
)
direct, detour = ways.rows if ways.rows else 2 * [{}]
slower = detour.get("µs", nan) / direct.get("µs", nan)
lab.together(
    lab.read(
        "In 16 bits, Hopper's matrix unit can take its left operand from registers if the threads "
        "hold it in the layout in which a matmul leaves its result. `Pᵀ`, the left operand of "
        "`dV = Pᵀ dO`, already has this layout and needs no trip through shared memory."
    ),
    lab.read(
        f"We compare two kernels that compute `dv` alone. The one that computes `S` and then "
        f"transposes `P` takes {slower:.2f} times as long. It contains "
        f"{detour.get('stmatrix', nan)} `stmatrix` instructions, which store to shared memory; the "
        f"other has {direct.get('stmatrix', nan)}."
    ),
    ways,
)

# %%
# **The second sweep** mirrors the first. Each program holds ``q``, ``do``, ``lse`` and ``delta``
# and loops over tiles of keys, from key 0 to the position of its last query. Neither :math:`P` nor
# :math:`dS` is transposed, because :math:`dQ` takes :math:`dS` with queries as rows. ``add_keys``
# multiplies ``k`` by the scale on loading, so ``dq`` is already scaled. After ``p``, three lines
# remain:

lab.source(smallest.add_keys, "gradient")

# %%

# Folded: The whole small kernels, of both sweeps
lab.listing(
    {
        "The first sweep: the program that owns a tile of keys": smallest.dkdv_kernel,
        "What it does with one tile of queries": smallest.add_queries,
        "The second sweep: the program that owns a tile of queries": smallest.dq_kernel,
        "What it does with one tile of keys": smallest.add_keys,
    }
)

# %%
# **Launch.** Each sweep is one kernel launch, with one program per owned tile:

# Measuring
from kernelbook.small.attention_backward import dkdv_kernel, dq_kernel

n, head_dim, scale = 384, 32, 32**-0.5
q, k, v, do = torch.randn(4, n, head_dim, device=runtime.DEVICE)
sees = torch.ones(n, n, device=runtime.DEVICE).tril().bool()
s = (q @ k.T * scale).masked_fill(~sees, -torch.inf)
out, lse = s.softmax(-1) @ v, s.logsumexp(-1)  # what the forward pass leaves
delta = (do * out).sum(-1)  # step 4

# %%

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
    f"On {n} tokens, the gradients from both kernels differ from those in float64 by at most "
    f"{in_text(max(far))} of their largest element."
)

# %%
# **One sweep** is the first sweep with a fifth matmul, :math:`dQ = dS\, K`, at the end of its loop.
# For this matmul, ``ds_t`` is transposed back. The product is added to sums in memory, where a
# :term:`descriptor` lets a single instruction add the whole tile.
#
# These lines are from the package, whose sums hold all heads, one below the other. The sums of head
# number ``row`` begin at ``row * padded_q``, and the tile's first query is ``start_m``. Here, ``k``
# is not scaled, so the host, which sets the sums to zero before the launch, scales them after it:
#
# .. literalinclude:: /../src/kernelbook/ops/attention/backward.py
#    :language: python
#    :pyobject: sweep_queries
#    :start-at: dq = tl.dot
#    :end-at: dq_desc.atomic_add
#    :dedent:
#
# .. dropdown:: The package's kernels, for any length and dtype, what the host does, and autograd
#
#    **First, delta.** A kernel computes it before either sweep. To Triton, ``None`` is a constant,
#    so without a gradient of ``lse`` the lines for ``dlse_ptr`` are not even compiled. Queries that
#    see no key get an ``lse`` of :math:`+\infty`, and so do queries past the end, which exist
#    because the last tile must be full. Since :math:`2^{s - \infty} = 0`, these rows contribute
#    nothing, and the sweeps need not test for them. Another kernel of the package needs the counter
#    at the end set to zero; here it is ``None``.
#
#    .. literalinclude:: /../src/kernelbook/ops/attention/backward.py
#       :language: python
#       :pyobject: preprocess_kernel
#       :start-at: # -- delta
#       :dedent:
#
#    **One tile of queries after another,** in the program that owns a tile of keys. ``lse_rows``
#    has one row per head, padded to ``padded_q`` numbers; ``load_row`` reads a tile of its row
#    ``row``, through a descriptor where ``DESCRIBED`` says so. ``scale_log2`` is :math:`\sigma
#    \log_2 e`, and ``lse`` is kept in base 2, so a weight is :math:`2^{\,s_j \log_2 e \,-\,
#    \mathrm{lse} \log_2 e}`. ``PRECISION`` keeps float32 from being rounded to TF32. For each key,
#    ``first_seeing`` holds the first query that sees it. ``delta`` is loaded before the matmul for
#    ``dv`` begins, so that no wait for a load comes between matmuls.
#
#    .. literalinclude:: /../src/kernelbook/ops/attention/backward.py
#       :language: python
#       :pyobject: sweep_queries
#
#    **Adding dq.** The sums of all heads are stacked, each head padded to ``padded_q`` rows, so
#    that no tile of one head extends into the next. ``DQ`` says how to add, since a GPU without an
#    instruction for whole tiles has to add number by number.
#
#    **The first sweep, and one sweep.** ``place`` assigns each program a tile and a head. Programs
#    with the most work start first, so that no long one is left running at the end; in a causal
#    sweep, these own the *first* keys, which the most queries see.
#
#    Queries from ``first`` to ``whole`` do not see every key of the tile and are masked. Those from
#    ``whole`` to ``cut`` see all of them. With a causal mask, ``cut`` equals ``end``; a window that
#    also ends on the left adds a third range.
#
#    Keys past the end are loaded as zeros. For ``dk`` and ``dv`` they need no mask, because each
#    affects only its own row, which is never stored. In ``dq`` they would contribute to rows that
#    count, so one sweep has to mask them.
#
#    .. literalinclude:: /../src/kernelbook/ops/attention/backward.py
#       :language: python
#       :pyobject: dkdv_kernel
#
#    **The second sweep.**
#
#    .. literalinclude:: /../src/kernelbook/ops/attention/backward.py
#       :language: python
#       :pyobject: sweep_keys
#
#    .. literalinclude:: /../src/kernelbook/ops/attention/backward.py
#       :language: python
#       :pyobject: dq_kernel
#
#    **The host code** of the plain Triton version chooses between one sweep and two.
#
#    .. literalinclude:: /../src/kernelbook/ops/attention/backward.py
#       :language: python
#       :pyobject: attention_backward
#
#    **Autograd** sees a single function, which saves its inputs, ``out`` and ``lse``, and computes
#    only the gradients that are requested. Both passes are registered as operators with PyTorch's
#    dispatcher, so ``torch.compile`` treats each as one node of its graph and does not trace into
#    it.
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
# We compare each gradient with float64. Its error may be at most twice that of the formula in the
# same dtype, or eight times in float32 (the fold at the end of the section says why).


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
basic = [
    case
    for dtype in (torch.float32, torch.float16, torch.bfloat16)
    for is_causal in (False, True)
    for deterministic in (True, False)
    for case in cases(plain, dtype, is_causal, deterministic)
]
basic_checks = lab.check("The gradients, batch and heads above 1", basic)

# %%

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
odd = [case for row in awkward for case in cases(*row)]
odd_checks = lab.check("Awkward sizes", odd)

# %%

# Measuring
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
of_lse = [
    lab.Case("40 × 33, 32, full", *row, factor=8)
    for row in zip(("dq", "dk", "dv"), results, theirs, truths, strict=True)
]
lse_checks = lab.check("With a gradient of lse", of_lse)

# %%

# Reading
runs = {
    name: next(iter(checked(name, [case.row() for case in found]).items()))
    for name, found in (
        ("The gradients, batch and heads above 1", basic),
        ("Awkward sizes", odd),
        ("With a gradient of lse", of_lse),
    )
}
(where, first), (_, second), (_, third) = runs.values()
used, used_there = (
    max(row["error"] / row["tolerance"] for row in found)
    for found in (first, [*second, *third])
)
lab.read(
    f"All {len(first) + len(second) + len(third)} checks pass {where}, in three dtypes, the worst "
    f"with {max(used, used_there):.2f} of the allowed error. Among them are awkward cases: lengths "
    f"that no tile divides, heads that share keys, queries that see no key, and a gradient for "
    f"`lse`."
)

# %%
# **No tile is visited in vain.** NaN serves as a dye, because it spreads through every matmul, even
# when multiplied by zero. We set one tile of ``do`` to NaN. Each program of the first sweep that
# reads it writes NaN to its ``dv``, even if it masks the tile. In the second sweep, a tile of ``v``
# dyes ``dq`` in the same way.


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


# Drawing
def dyed(*panels):
    """Which tiles of the two causal sweeps left their dye."""
    for axes, name in zip(panels, maps, strict=True):
        stained, config = maps[name]
        owner = {"dk and dv": "first sweep", "dq": "second sweep"}[name]
        width, height = config.block_n, config.block_m
        for i, row in enumerate(stained):
            for j, hit in enumerate(row):
                ink = lab.colour("PyTorch" if hit else "matmul")
                at = (j * width, i * height)
                if hit:
                    axes.add_patch(Rectangle(at, width, height, fc=ink, alpha=0.3))
                edge = {"fill": False, "ec": ink, "ls": "-" if hit else "--"}
                axes.add_patch(Rectangle(at, width, height, zorder=1 + hit / 2, **edge))
        n = len(stained) * height
        axes.plot((0, n), (0, n), color=lab.colour("Kernel Book"), linewidth=1.5)
        axes.set(xlim=(-2, n + 2), ylim=(n + 2, -2), xticks=[], yticks=[])
        axes.set(aspect="equal", xlabel="keys →", ylabel="← queries")  # turned: ↓
        axes.set_title(f"{owner}: NaN in {name[-2:]}", fontsize=11)
        axes.spines[:].set_visible(False)
        axes.grid(visible=False)


causal = {row["sweep"]: row for row in rows if row["mask"] == "causal"}
lab.sketch(
    "The tiles that dyed a gradient, under a causal mask",
    "Two squares of tiles, one for each sweep. The tiles on and below the diagonal are dyed: "
    + " and ".join(
        f"{row['visited']} of {row['tiles']} for {name[-2:]}"
        for name, row in causal.items()
    )
    + ".",
    dyed,
    panels=2,
    height=3.2,
)

# %%

# Reading
assert all(row["as needed"] for row in rows)
in_first, in_second = (
    f"{causal[sweep]['visited']} of {causal[sweep]['tiles']} tiles of {causal[sweep]['tile']}"
    for sweep in ("dk and dv", "dq")
)
lab.read(
    ("In Triton's interpreter, " if runtime.INTERPRETED else "Here, ")
    + (
        f"both sweeps visit {in_first}"
        if in_first == in_second
        else f"the first sweep visits {in_first}, and the second {in_second}"
    )
    + ", exactly those in which some query sees a key."
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
in_two, in_one, most = (
    unlike.get(name, {}).get(what, nan)
    for name, what in (
        ("two sweeps", "dq"),
        ("one sweep", "dq"),
        ("one sweep", "elements of dq, %"),
    )
)
every = "all 99" if in_one == 99 else f"{in_one:.0f} of them"
lab.read(
    (
        "**Two sweeps give the same bits in every run.** When we repeat a causal run 99 times, "
        "`dq` never differs, because each sum belongs to one program, which adds its tiles in "
        "order. "
        if in_two == 0
        else f"**Do all runs give the same bits?** When we repeat a causal run 99 times, `dq` "
        f"differs in {in_two:.0f} of the repeats. "
    )
    + f"With one sweep, it differs in {every}, though in at most {most:.4f} % of its elements."
)

# %%

# Folded: All checks, and in how many runs a gradient differs
lab.together(
    lab.read(
        "The column `PyTorch's` holds the error of the formula in the same dtype. In 16 bits, our "
        "error may be twice as large, or one unit in the last place, since the two versions round "
        "at different points. In float32 it may be eight times as large, because we sum tiles in "
        "another order and round the exponent once more."
    ),
    basic_checks,
    odd_checks,
    lse_checks,
    repeated,
)

# %%
# How fast is it?
# ---------------

# Measuring
machine = lab.measure("Peak speed of a matmul and of a copy, bfloat16", balance)

# %%


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

# Measuring
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

# %%

# Measuring
MASKS = ("full", "causal")
share = {
    (name, mask): 100 * ladder.share(name, mask=mask)
    for name in RUNGS
    for mask in MASKS
}
gain = [
    share["Kernel Book", mask] / share["Kernel Book, one sweep", mask] for mask in MASKS
]
# %%

# Reading
at_best = machine.rows[0] if machine.rows else {}
intensity = 5 * 2 * 1024 * 1024 * 128 / (8 * 1024 * 128 * 2)
lab.read(
    f"**Arithmetic sets the limit.** While the GPU moves one byte, it can execute "
    f"{at_best.get('FLOPs per byte', nan):.0f} floating-point operations (FLOPs). At only 1,024 "
    f"tokens and under a causal mask, the backward pass already has {intensity / 2:.0f} to do per "
    f"byte, if each input is read once and each gradient written once. Programs read the same "
    f"tiles many times, but most of these reads may be served by the L2 cache."
)

# %%
# In the figure, 100 is therefore the :term:`limit` of arithmetic, the speed of multiplying two
# matrices of 8,192 by 8,192. We time only the backward pass and credit every version with five
# matmuls, or half of that under a causal mask. Two sweeps execute seven, so they can reach at most
# the dotted line at :math:`5/7`. *Tiled PyTorch* is the loop over tiles from above, in tiles of 512
# by 512:


# Drawing
CALLED = {
    "standard attention": "formula in PyTorch",
    "torch.compile": "the formula, compiled",
    "Kernel Book, one sweep": "one sweep",
    "all tiles": "two sweeps, all tiles",
    "Kernel Book": "two sweeps",
}


def bars_of(rows):
    """For each mask, the names of what is drawn, with the percentage of the limit."""
    share = {(row["mask"], row["provider"]): 100 * row["share"] for row in rows}
    drawn = {"full": RUNGS, "causal": [*RUNGS[:-1], "all tiles", RUNGS[-1]]}
    return {
        mask: [(CALLED.get(name, name), share[mask, name]) for name in names]
        for mask, names in drawn.items()
    }


def speed_bars(axes, rows):
    axes.figure.set_figheight(4.4)
    place, ticks, grey = 0, {}, lab.colour("matmul")
    for mask, bars in bars_of(rows).items():
        heading = {"full": "without a mask", "causal": "with a causal mask"}[mask]
        axes.text(0, place, heading, fontsize=11, color=grey, va="center")
        for name, value in bars:
            place += 1
            ours = name in ("two sweeps", "one sweep")
            ink = lab.colour("Kernel Book") if ours else grey
            axes.barh(
                place, value, 0.72, color=ink, alpha=1 if name != "one sweep" else 0.6
            )
            axes.text(value + 1, place, f"{value:.0f}", va="center", fontsize=10)
            ticks[place] = name
        place += 1.3
    for at, words in ((500 / 7, "most for two sweeps, 5/7"), (100, "matmul")):
        style, side = ("--", "center") if at == 100 else (":", "right")
        axes.axvline(at, color=grey, linestyle=style, linewidth=1)
        axes.text(at, -1.0, words, fontsize=10, color=grey, ha=side)
    axes.set_yticks(list(ticks), list(ticks.values()))
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", visible=False)
    axes.set(
        xlim=(0, 112), ylim=(place - 0.7, -0.7), xlabel="% of the speed of a matmul"
    )


def speeds_in_words(rows):
    found = (
        f"{mask}: " + ", ".join(f"{name} {value:.0f}" for name, value in bars)
        for mask, bars in bars_of(rows).items()
    )
    return f"Bars, % of the speed of a matmul. {'; '.join(found)}."


lab.draw(
    ladder,
    "Backward, 4,096 tokens, head_dim 128, bfloat16",
    speeds_in_words,
    speed_bars,
)

# %%

# Reading
lab.read(
    (
        "**In plain Triton, two sweeps win.** "
        if min(gain) > 1.01
        else "**Two sweeps do not always win.** "
    )
    + f"They are {gain[0]:.2f} times as fast as one sweep without a mask, and {gain[1]:.2f} times "
    f"under a causal mask. If we count all seven matmuls, they run at "
    f"{share['Kernel Book', 'full'] * 7 / 5:.0f} % of the limit without a mask."
)

# %%


# Measuring
def providers(seqlen, batch, heads, head_dim, mask, causal, dtype):
    is_causal = mask == "causal"
    inputs, do = inputs_of(batch, heads, seqlen, head_dim, dtype)
    others = libraries(inputs, is_causal, do)
    return {"matmul": matmul()} | others | versions(inputs, do, is_causal)


LENGTHS = (1024, 4096, 16384)
backward = lab.bench("backward", points([*LENGTHS]), providers, **BACKWARD)

# %%


# Measuring
def measured_at(*lengths, head_dims=(64, 128)):
    found = points([*lengths], head_dims)
    return [
        {key: point[key] for key in ("seqlen", "head_dim", "mask")} for point in found
    ]


everywhere = measured_at(*LENGTHS)
all_rates = [
    {name: backward.rate(name, **point) for name in (*MODES, *LIBRARIES)}
    for point in everywhere
]
measured = [
    name for name in LIBRARIES if all(rate[name] == rate[name] for rate in all_rates)
]

# %%

# Reading
skipping = ladder.milliseconds_at("all tiles", mask="causal")
skipping /= ladder.milliseconds_at("Kernel Book", mask="causal")

lab.read(
    f"**Skipping tiles pays.** Under a causal mask, almost half of the tiles lie above the "
    f"diagonal. Two sweeps that visit them too take {skipping:.2f} times as long, although we "
    f"spare them the mask (and so get wrong gradients)."
)

# %%

# Reading
took = {
    (name, mask): backward.milliseconds_at(name, seqlen=4096, head_dim=128, mask=mask)
    for name in measured
    for mask in MASKS
}
by_compiler = {
    mask: ladder.milliseconds_at("torch.compile", mask=mask) for mask in MASKS
}
near = {name: abs(took[name, "full"] / by_compiler["full"] - 1) for name in measured}
twin = min(near, key=near.get, default="none")
compiled, full = (share[name, "full"] for name in ("torch.compile", "Kernel Book"))
agree = near.get(twin, nan) < 0.02 and 2 * share["torch.compile", "causal"] < min(
    compiled, share["Kernel Book", "causal"]
)
lab.read(
    (
        "**Without a mask, the compiled formula beats both versions.** "
        if compiled > 1.01 * full
        else ""
    )
    + "Where `torch.compile` recognises attention, it calls PyTorch's fused attention instead, "
    "`scaled_dot_product_attention` (SDPA). "
    + (
        f"The times agree with this: {by_compiler['full']:.2f} ms for the compiled formula, and "
        f"{took[twin, 'full']:.2f} ms for {twin}. Under a causal mask, the compiled "
        f"formula takes {by_compiler['causal'] / took[twin, 'causal']:.1f} times as long as "
        f"{twin}, so the compiler seems not to recognise our way of masking."
        if agree
        else ""
    )
)

# %%
# **The libraries** are two backends of SDPA, *flash* (FlashAttention 2) and *cuDNN* (NVIDIA's own),
# along with FlexAttention and FlashAttention 4, here called FlashAttention:

# Drawing
lab.plot(
    backward,
    "Backward, head_dim 128, without a mask, bfloat16",
    share=True,
    where={"head_dim": 128, "mask": "full"},
    names=NAMES,
)

# %%


# Measuring
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


# Reading
def at_points(name, behind="Kernel Book"):
    """The points at which a version or library is ahead by more than 1 %."""
    return [
        point
        for point, rate in zip(everywhere, all_rates, strict=True)
        if rate[name] > 1.01 * rate[behind]
    ]


def how_often(name):
    ahead, behind = (len(found) for found in (at_points(name), left[name]))
    return f"to {name} at {ahead}" if behind else f"to {name} at all {ahead}"


left = {name: [p for p in everywhere if p not in at_points(name)] for name in measured}
losses = sorted(filter(at_points, measured), key=lambda name: len(left[name]))
beaten = [n for n in measured if len(at_points("Kernel Book", n)) == len(all_rates)]
slower_ones = [*beaten, "one sweep"]
if len(at_points(*MODES)) < len(all_rates):
    slower_ones = beaten
listed = " and ".join(filter(None, [", ".join(slower_ones[:-1]), *slower_ones[-1:]]))
ratios = [  # of the fastest library to us
    max((rate[name] for name in LIBRARIES if rate[name] == rate[name]), default=nan)
    / rate["Kernel Book"]
    for rate in all_rates
]
lab.read(
    (
        f"**The best library is up to {max(ratios):.2f} times as fast as two sweeps.** We timed "
        f"{len(all_rates)} points: three lengths, two head_dims, both masks. Two sweeps lose "
        f"{' and '.join(map(how_often, losses))}. "
        if losses
        else ""
    )
    + (f"They beat {listed} everywhere." if slower_ones else "")
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
steady = [n for n in LIBRARIES if unlike.get(n) == 0]
lab.read(
    f"**Libraries can repeat their bits too.** {' and '.join([*steady, 'FlashAttention'])} in its "
    f"deterministic mode returned the same `dq` in all 20 runs (4,096 tokens, causal). Even in "
    f"this mode, FlashAttention is {speed[FIXED] / speed['Kernel Book']:.2f} times as fast as two "
    f"sweeps."
    if fixed_wins
    else "**Which libraries give the same bits in every run?** The table below shows it."
)

# %%

# Folded: The causal mask and head_dim 64, speeds at 16,384 tokens, and whose dq differs
lab.plot(
    backward,
    "Backward, head_dim 128, causal, bfloat16",
    share=True,
    where={"head_dim": 128, "mask": "causal"},
    names=NAMES,
)
lab.plot(
    backward,
    "Backward, head_dim 64, without a mask, bfloat16",
    share=True,
    where={"head_dim": 64, "mask": "full"},
    names=NAMES,
)
lab.plot(
    backward,
    "Backward, head_dim 64, causal, bfloat16",
    share=True,
    where={"head_dim": 64, "mask": "causal"},
    names=NAMES,
)
lab.together(
    lab.read(
        "Every point processes 16,384 tokens in total, and heads times head_dim is always 2,048. "
        "The backward pass reads five matrices of d columns (`q`, `k`, `v`, `out` and `do`) and "
        "writes three. For N queries and keys, each of its five matmuls takes 2 N² d FLOPs. In 16 "
        "bits, that makes 10 N² d FLOPs for 16 N d bytes, or 5 N / 8 per byte. In a matmul and in "
        "a copy, the GPU reaches:"
    ),
    machine,
    lab.table(speeds, "TFLOP/s at 16,384 tokens"),
    lab.read(
        "The speeds of the next table come from a loop of their own, so compare them only with "
        "each other:"
    ),
    others,
)

# %%
# Why one sweep loses here
# ------------------------
#
# One sweep executes fewer matmuls and yet takes longer. Where does the time go? For two sweeps, we
# time each of the two. For one sweep, we time ``dk`` and ``dv`` alone and count the rest of a full
# run as ``dq``. One sweep would end at the dashed line if ``dq`` cost just one more matmul, as fast
# as the other four:


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

# Measuring
parts = lab.measure(
    "Parts of the work, 16,384 tokens, 16 heads of 128", parts_of_the_work
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

# Measuring
SIZE = {"seqlen": 16384, "head_dim": 128, "mask": "full"}
took = {  # as the figure shows it
    (row["computes"], row["tuned for"]): round(row["ms"], 1) for row in parts.rows
}
tile_of = {row["tuned for"]: row["tile"].split(" × ") for row in parts.rows}
keys_at_once = {name: int(sides[1]) for name, sides in tile_of.items()}
two, one = (took.get(("dk, dv", tiles), nan) for tiles in ("dkdv", "all"))
whole = took.get(("dk, dv, dq", "all"), nan)
adding, fifth = whole - one, round(one / 4, 1)
saved = took.get(("dq", "dq"), nan)
together = backward.milliseconds_at("Kernel Book", **SIZE)
# By head_dim: what one sweep adds to dq, and its milliseconds
gigabytes, swept_in = {}, {}
for head_dim in (64, 128):
    tile = tuned.HOPPER["all", head_dim, 2]
    if not runtime.INTERPRETED:
        like = torch.empty(1, 1, 1, head_dim, device=runtime.DEVICE).bfloat16()
        tile = tuned.backward_config("all", like)
    gigabytes[head_dim] = 4 * 2048 * 16384 * (16384 // tile.block_n) / 1e9
    swept_in[head_dim] = backward.milliseconds_at(
        "Kernel Book, one sweep", **(SIZE | {"head_dim": head_dim})
    )
at_once = one + fifth
spilling = [row["case"] for row in facts.rows if row["spills"]]
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


fits = {(row["case"], row["kernel"]): room(row)[1] for row in facts.rows}
small, large = (
    fits.get((f"head_dim {d}, one sweep", "dkdv_kernel"), nan) for d in (64, 128)
)

# %%


# Drawing
def segments_of(rows):
    """For each version, its parts as (milliseconds, what it is, how)."""
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
    shown = segments_of(rows)
    inks = [lab.colour(name) for name in ("Kernel Book", "PyTorch")]
    wide = shown["one sweep"][0][0]
    alone = wide + round(wide / 4, 1)  # five matmuls
    for place, found in enumerate(shown.values()):
        begin = 0.0
        for number, (took, what, how) in enumerate(found):
            ink = inks[number]
            axes.barh(place, took, 0.6, begin, color=ink, alpha=0.25, edgecolor=ink)
            left = max(begin, alone) if how == "1 matmul, adding" else begin
            text = f"{what}\n{how}\n{took:.1f} ms"
            words = {"ha": "center", "va": "center", "fontsize": 10}
            axes.text((left + begin + took) / 2, place, text, **words)
            begin += took
        axes.text(begin + 0.2, place, f"{begin:.1f}", va="center", fontsize=10)
    axes.plot((alone, alone), (0.6, 1.6), color=lab.colour("matmul"), linestyle="--")
    said = f"{alone:.1f}: five matmuls alone"
    axes.text(alone + 0.2, 1.5, said, va="center", fontsize=10)
    axes.set_yticks(range(len(shown)), shown)
    axes.set_xticks(range(0, 21, 5))
    axes.set(xlim=(0, 20.5), ylim=(len(shown) - 0.3, -0.5), xlabel="milliseconds")
    axes.figure.set_figheight(3.0)
    axes.grid(axis="y", visible=False)


def describe_bars(rows):
    found = (
        f"{' '.join(name.split())}: "
        + ", ".join(f"{what} {took:.1f} ms" for took, what, _ in segments)
        for name, segments in segments_of(rows).items()
    )
    return (
        f"Bars, cut into parts. {'; '.join(found)}. A dashed line marks where five matmuls alone "
        f"would end."
    )


lab.draw(
    parts,
    "Parts of the work, 16,384 tokens, without a mask, bfloat16",
    describe_bars,
    time_bars,
)

# %%

# Reading
lost = whole - two - saved
lab.read(
    f"**{'Most of the loss is' if 2 * (adding - saved) > lost else 'Part of the loss is'} in dq.** "
    f"One sweep spends {adding - saved:.1f} ms more on it than two sweeps, and loses {lost:.1f} ms "
    f"in all."
)

# %%

# Reading
lab.read(
    f"**One more matmul does not explain it.** With that matmul alone, one sweep would take about "
    f"{at_once:.1f} ms, against {two + saved:.1f} for two sweeps. However, one sweep also "
    f"transposes `ds_t`, adds `dq` in memory, and has to clear the sums first and scale them last."
    if adding > 2 * fifth
    else f"The fifth matmul and the additions take {adding:.1f} ms."
)

# %%

# Reading
more_bytes = gigabytes[64] / gigabytes[128]
as_many = "twice as many" if more_bytes == 2 else f"{more_bytes:.1f} times as many"
lab.together(
    lab.read(
        f"**Nor do the added bytes alone.** With head_dim 64 and twice the heads, one sweep "
        f"executes as many FLOPs and, in tiles of fewer keys, adds {as_many} bytes. Yet it takes "
        f"only {swept_in[64] / swept_in[128]:.2f} of the time."
        if gigabytes[64] > gigabytes[128] and swept_in[64] < swept_in[128]
        else f"One sweep adds {gigabytes[128]:.0f} GB to `dq` in {swept_in[128]:.1f} ms."
    ),
    lab.read(
        f"**Two differences may matter.** With head_dim 64, {small:.0f} programs fit on an SM, so "
        f"one may multiply while another adds; with head_dim 128, only one fits. The kernel for "
        f"128 also spills registers to memory (the fold below counts them, for a causal mask). Our "
        f"runs do not separate the two."
    )
    if small > large == 1 and spilling == ["head_dim 128, one sweep"]
    else None,
)

# %%

# Reading
wider = keys_at_once["all"] / keys_at_once["dkdv"] if tile_of else nan
lab.read(
    f"**The rest is in dk and dv.** One sweep takes {keys_at_once['all']} keys per tile instead of "
    f"{keys_at_once['dkdv']}, which halves its additions to `dq`. With the settings chosen for "
    f"this, `dk` and `dv` take {one:.1f} ms instead of {two:.1f}."
    if tile_of and one > two and wider == 2
    else f"In the tiles of one sweep, `dk` and `dv` take {one:.1f} ms instead of {two:.1f}."
)

# %%


# Folded: Registers, spills, and how many programs fit on an SM
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
lab.together(
    lab.read(
        "Registers and spills are those of kernels compiled for a causal mask. The times below are "
        "without one; that of one sweep includes setting its sums to zero and scaling them:"
    ),
    parts,
    lab.read(
        f"In a single call, as in the last section, two sweeps take {together:.1f} ms instead of "
        f"the {two + saved:.1f} ms of their two parts. We do not know why."
        if abs(together - two - saved) > 0.1
        else "The times of the two sweeps add up to the time of a single call."
    ),
    facts,
)

# %%
# **One sweep can do better.** In :doc:`/chapters/attention_hopper_backward`, groups of warps load,
# multiply and add at the same time, and programs can take turns adding, which fixes the order of
# each sum.


# Reading
later = find("attention_hopper_backward") or {"sweeps": {}}
rungs = later["sweeps"].get("ladder", {"points": [], "milliseconds": {}})
unmasked = [n for n, at in enumerate(rungs["points"]) if at["mask"] == "full"]
at_work = {
    name: rungs["milliseconds"][name][unmasked[0]][1]
    for name in (
        "two sweeps",
        "one sweep with roles",
        "Kernel Book",
    )
    if unmasked and rungs["milliseconds"].get(name)
}
roles, finished, swept = (
    at_work.get(name, nan)
    for name in ("one sweep with roles", "Kernel Book", "two sweeps")
)
lab.read(
    "There, at 4,096 tokens without a mask, one sweep "
    + (
        "with such groups catches up with two sweeps"
        if 0.97 <= roles / swept < 1.03
        else f"with such groups takes {roles / swept:.2f} of the time of two sweeps"
    )
    + f"; after further changes it takes {finished / swept:.2f} of their time."
    if len(at_work) == 3
    else "No run of that chapter is recorded yet."
)

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

# Folded: Which version a call runs, and what it costs the host
on_host = {row["pass"]: row for row in hosted.rows}.get("forward and backward", {})
lab.together(
    lab.read(
        'In plain Triton (`backend="triton"`), a call runs two sweeps, because one sweep was '
        "slower at every point above. Those points are all in bfloat16; the other dtypes follow "
        "suit. `deterministic=False` requests one sweep. Without a `backend`, 16-bit inputs on "
        "Hopper run the one sweep of the later chapter wherever a table there says so."
    ),
    lab.read(
        f"In such a call, on 128 tokens, the host spends "
        f"{on_host['Kernel Book (µs)'] / on_host['PyTorch (µs)']:.1f} times as long on our forward "
        f"and backward passes as on those of PyTorch's SDPA."
        if on_host
        else "The host's time per call is not recorded yet."
    ),
    hosted,
)

# %%
# What breaks it
# --------------
#
# None of these mistakes raises an error. This code is correct; each comment names what we break in
# its line:
#
# .. code-block:: python
#
#    p = torch.exp2(s * log2e - (lse * log2e)[..., None])  # lse not converted, or in bfloat16
#    ds = p * (do @ v.mT - delta[..., None])  # delta left out
#    dq, dk = scale * ds @ k, scale * ds.mT @ q  # dk without its scale


# Measuring
def with_mistake(q, k, v, do, mistake):
    scale, factor = q.shape[-1] ** -0.5, log2e
    s = scale * q @ k.mT
    out, lse = s.softmax(-1) @ v, s.logsumexp(-1)
    delta = (do * out).sum(-1)
    if mistake == "delta left out":
        delta = torch.zeros_like(delta)
    if mistake == "lse not converted to base 2":
        factor = 1.0
    if mistake == "lse in bfloat16":
        lse = lse.bfloat16().to(q)
    p = torch.exp2(s * log2e - (lse * factor)[..., None])
    ds = p * (do @ v.mT - delta[..., None])
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
rows, found_by = [], {"dq": [], "dk": [], "dv": []}
for mistake in MISTAKES:
    row = {"mistake": mistake}
    grads = with_mistake(q, k, v, do, mistake)
    for name, x, truth in zip(found_by, grads, truths, strict=True):
        row[name] = in_cell(relative(x, truth))
        if relative(x, truth) > 1e-4:
            found_by[name].append(mistake)
    rows.append(row)
lab.table(rows, "Errors, as shares of the largest element, float32")

# %%

# Reading
assert found_by["dk"] == list(MISTAKES[1:])
lse = (q.shape[-1] ** -0.5 * q.double() @ k.double().mT).logsumexp(-1)
apart = torch.finfo(torch.bfloat16).eps * 2 ** math.floor(math.log2(lse.mean()))
lab.together(
    lab.read(
        f"Only a test of `dk` finds all of them: `dq` shows {len(found_by['dq'])} of the "
        f"{len(MISTAKES) - 1}, and `dv` {len(found_by['dv'])}. With `scale=1`, even `dk` would "
        f"hide the last."
    ),
    lab.read(
        f"**Why does `lse` need float32?** It is {lse.mean():.1f} on average here, where "
        f"neighbouring bfloat16 numbers lie {apart:.3f} apart. Rounding moves it by up to half of "
        f"that, and an error of {apart / 2:.3f} in an exponent changes a weight by "
        f"{100 * math.expm1(apart / 2):.1f} %."
    ),
)

# %%
# **A forgotten mask** does not crash either. The backward pass of Triton's tutorial was always
# causal (`issue 4541 <https://github.com/triton-lang/triton/issues/4541>`__), and its test, causal
# too, did not notice. The errors for each pair of masks:

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
            row[name] = in_cell(relative(ours, truth))
        rows.append(row)
lab.table(rows, "Errors, as shares of the largest element, by the masks of the passes")

# %%

# Reading
s = 32**-0.5 * q.double() @ k.double().mT
_, lse = reference.attention(q, k, v, True)
summed = (s - lse[..., None]).exp().sum(-1)[0, 0, 0]
lab.read(
    f"The errors are largest where the backward pass sees more keys than the forward pass did. "
    f"Those keys are missing from `lse`, so the recomputed weights of the first query sum to "
    f"{summed:.0f} instead of 1. A test needs one case with a mask and one without."
)

# %%
# In short
# --------
#
# The weights need not be stored. One number per query, ``lse``, brings them back, and another,
# ``delta``, replaces the sum over all keys.
#
# Two sweeps give each sum its own program and thus the same bits in every run, at the price of
# computing two of five matmuls twice.

# Reading
lab.read(
    (
        "In plain Triton, one sweep is slower nonetheless, and most of the loss is in `dq`. "
        if one > two and adding - saved > lost / 2
        else "In plain Triton, one sweep is slower nonetheless. "
        if lost > 0
        else ""
    )
    + ("The best libraries are faster than both" if losses else "No library is faster")
    + (
        ". Where we timed it, FlashAttention is faster even in its deterministic mode."
        if fixed_wins
        else "."
    )
)


# %%
# Exercises
# ---------
#
# **1. The gradient of a bias.** ALiBi adds :math:`a\,(j - i)` to the score of query :math:`i` and
# key :math:`j`, with one slope :math:`a` per head. If the slopes are learned, what is their
# gradient? Write a kernel that stores no matrix and gives the same result in every run.

# %%

# Solution: the gradient of a bias
#
# The bias is added to the score, so its gradient is dS, and the gradient of the slope is the sum of
# dS times (j - i).


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
# **2. Dropout inside attention.** Dropout acts after the softmax: :math:`O = (P \circ Z)\, V`,
# where each element of :math:`Z` is 0 or :math:`1/(1 - r)` for a drop probability :math:`r`.
# What becomes of ``delta``? Write a tiled backward pass that stores no mask, as in
# :doc:`the chapter on dropout </chapters/dropout>`.


# %%

# Solution: dropout inside attention
#
# dV = (P ∘ Z)^T dO and dP = (dO V^T) ∘ Z. Then delta = sum_j p_j z_j (dO · v_j) = dO · O, where O
# is the output *after* dropout. We can therefore compute delta as before.


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
# during the backward pass. How many matmuls does its attention then take per step? Do the gradients
# change?

# %%

# Solution: checkpointing whole layers
#
# Without checkpointing, attention takes 2 matmuls forward and 7 backward in two sweeps. With it, 2
# more make 11 instead of 9. The scores are then computed four times: forward, forward again, and in
# both sweeps. Only the input of each layer is kept; q, k, v, out and lse exist for one layer at a
# time. The gradients do not change by a bit:

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
