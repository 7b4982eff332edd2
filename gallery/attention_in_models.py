"""
Attention as models use it
==========================

Models seldom let every token attend to every other. Many layers look back over a window only,
training packs texts of all lengths into one batch, and a model that writes asks with one query at a
time. *What do these cost, if a kernel computes only what they need?*

You will learn

- how two bounds decide which tiles a sliding window needs;
- how programs find their sequence in a packed batch, without padding;
- how to split the keys of one query over the whole GPU, and how to merge the parts.

Without an NVIDIA GPU, the checks run in Triton's :term:`interpreter`, and the speeds are those of a
recorded run. The chapter extends the kernel of :doc:`/chapters/attention_fast`.
"""

# sphinx_gallery_thumbnail_number = 2
import inspect
import statistics
from functools import partial

import numpy
import torch
import torch.nn.functional as F
from matplotlib.patches import Rectangle

from kernelbook import attention, attention_varlen, lab, runtime
from kernelbook.lab.attention_bench import flash, flex, library, sdpa, timed
from kernelbook.ops.attention import decoding, tuned, varlen
from kernelbook.ops.hopper import choice
from kernelbook.small import attention_in_models as small

lab.start("attention_in_models", "kernelbook.ops.attention")

# %%
# The problem in PyTorch
# ----------------------
#
# PyTorch expresses windows and packed texts by a mask, a table that says which query sees which
# key:


def standard_attention(q, k, v, seen):
    scores = (q * q.shape[-1] ** -0.5) @ k.mT
    scores = scores.masked_fill(~seen, -torch.inf)
    return torch.softmax(scores, dim=-1) @ v


# %%
# The mask changes the result and not the work, because it discards scores that are already
# computed. The table shows how many of the scores are needed, and how many programs :doc:`the
# kernel so far </chapters/attention_fast>` launches: one for each 128 queries of a head.

# Measuring
TOKENS, LEFTS = 16384, (256, 1024, 4095)
SEQUENCES, SHORTEST, LONGEST = 32, 128, 4096
KEYS = 131072
HEADS = 16
AIM, OF_PADDED, OF_COPY, OF_COPY_GROUPED = 1.15, 0.9, 0.85, 0.8

seeded = torch.Generator().manual_seed(0)
LENGTHS = torch.randint(SHORTEST, LONGEST + 1, (SEQUENCES,), generator=seeded).tolist()


def pairs(length, left):
    """How many pairs a causal window leaves: query i sees at most left + 1 keys."""
    left = min(left, length - 1)
    return (left + 1) * (left + 2) // 2 + (length - left - 1) * (left + 1)


def programs(batch, queries):
    return batch * HEADS * -(-queries // 128)


used = sum(pairs(length, length) for length in LENGTHS)
rows = [
    {
        "use": f"window of {LEFTS[1] + 1:,} keys, {TOKENS:,} tokens",
        "seen": pairs(TOKENS, LEFTS[1]),
        "table": TOKENS**2,
        "programs": programs(1, TOKENS),
    },
    {
        "use": f"{SEQUENCES} texts padded to {LONGEST:,} tokens, causal",
        "seen": used,
        "table": SEQUENCES * LONGEST**2,
        "programs": programs(SEQUENCES, LONGEST),
    },
    {
        "use": f"one query, {KEYS:,} keys",
        "seen": KEYS,
        "table": KEYS,
        "programs": programs(1, 1),
    },
]
lab.table(
    [
        {
            "use": row["use"],
            "scores needed": f"{100 * row['seen'] / row['table']:.0f} %",
            "programs": row["programs"],
        }
        for row in rows
    ],
    "Three uses of attention, 16 heads",
)

# %%

# Reading
lab.read(
    "The first two compute too much. The single query has the opposite problem: every score is "
    f"needed, but {rows[-1]['programs']} programs cannot fill a GPU with more than a hundred SMs."
)

# %%

# Reading
lab.read(
    "A perfect kernel would spend time on the needed scores alone, and read the keys of a single "
    "query as fast as the memory allows. As rough guesses of what is possible, we aim at a window "
    f"that takes {100 * (AIM - 1):.0f} % longer than its share of the scores, a packed batch that "
    f"takes {100 * (1 / OF_PADDED - 1):.0f} % longer, and a single query that reads its keys at "
    f"{100 * OF_COPY:.0f} % of the speed of a copy, or {100 * OF_COPY_GROUPED:.0f} % where heads "
    "share keys."
)

# %%
# Sliding windows
# ---------------
#
# A *sliding window* lets a query see ``left`` keys before its own position and ``right`` keys after
# it, so time grows with the length and not with its square. With the window (2, 0), query 6 sees
# keys 4, 5 and 6. Query :math:`i` sees key :math:`j` if
#
# .. math::
#
#    i - \text{left} \;\le\; j \;\le\; i + \text{right}
#
# A causal mask is the bound :math:`\text{right} = 0` alone.
#
# .. admonition:: Key idea
#    :class: kb-key
#
#    Both bounds rise with :math:`i`, so the first and the last query of a tile decide which keys
#    *some* query sees, and which keys *all* of them see.
#
# **One tile, by hand.** Take tiles of 4 queries and 4 keys, a window of (9, 0), and the queries 12
# to 15. Query 12 sees keys 3 to 12, and query 15 keys 6 to 15. So the loop over keys falls into
# three: the left edge is masked, the middle needs no mask, and the right edge is masked again. The
# last loop ends at key 16.


# Reading
def stages(first_query, last_query, left, block):
    """What a program computes before its loops: the bounds, and the ends of the three loops."""
    first_some, first_all = max(first_query - left, 0), max(last_query - left, 0)
    end_all, end = first_query + 1, last_query + 1
    first, whole = first_some // block * block, -(-first_all // block) * block
    bounds = {"first_some": first_some, "first_all": first_all, "end_all": end_all}
    cut = max(end_all // block * block, whole)
    return bounds | {"first": first, "whole": whole, "cut": cut, "end": end}


ours = stages(12, 15, 9, 4)
narrow = stages(12, 15, 2, 4)
assert list(ours.values())[3:] == [0, 8, 12, 16]
assert narrow["end_all"] // 4 * 4 == 12 < narrow["whole"] == narrow["cut"] == 16
lab.table(
    [
        {
            "of the queries 12 to 15": what,
            "key": f"{name} = {ours[name]}",
            "to a tile": way,
        }
        | {"loop begins at": f"{to} = {ours[to]}"}
        for what, name, way, to in (
            ("the first key that some see", "first_some", "rounded down", "first"),
            ("the first key that all see", "first_all", "rounded up", "whole"),
            ("one past the last that all see", "end_all", "rounded down", "cut"),
        )
    ],
    "Where each of the three loops begins, for one tile of queries",
)

# %%


# Drawing
def band(axes):
    """Two windows, one below the other: a tile of queries with its tiles of keys."""
    kinds = {"masked": "PyTorch", "whole": "Kernel Book"}
    for top, left in ((0, 9), (8.8, 2)):
        at = stages(12, 15, left, 4)
        axes.text(0, top - 1.5, f"window ({left}, 0)", fontsize=11, fontweight="bold")
        for tile in range(0, 16, 4):
            kind = "whole" if at["whole"] <= tile < at["cut"] else "masked"
            unseen = tile < at["first"]
            ink = lab.colour("matmul" if unseen else kinds[kind])
            look = {"facecolor": ink, "alpha": 0.0 if unseen else 0.15}
            axes.add_patch(Rectangle((tile, top), 4, 4, **look))
            style = "--" if unseen else "-"
            axes.add_patch(Rectangle((tile, top), 4, 4, fill=False, ec=ink, ls=style))
            axes.text(tile, top - 0.2, tile, fontsize=10, ha="center")
            for query in range(4):
                for key in range(tile, tile + 4):
                    if 0 <= 12 + query - key <= left:
                        axes.plot(key + 0.5, top + query + 0.5, "o", color=ink, ms=4)
        axes.text(16, top - 0.2, "16", fontsize=10, ha="center")
        for query in range(4):
            words = {"fontsize": 10, "ha": "right", "va": "center"}
            axes.text(-0.3, top + query + 0.5, f"query {12 + query}", **words)
        names = {}
        for name in ("first", "whole", "cut", "end"):
            names.setdefault(at[name], []).append(name)
        for key, named in names.items():
            words = {"fontsize": 10, "ha": "right" if len(named) > 2 else "center", "va": "top"}
            arrow = {"fontsize": 10, "ha": "center", "va": "top"}
            axes.text(key, top + 4.2, "↑", **arrow)
            axes.text(key + 0.3 * (len(named) > 2), top + 4.9, ", ".join(named), **words)
    axes.set(xlim=(-3, 16.8), ylim=(14.8, -2.6), xticks=[], yticks=[], aspect="equal")
    axes.spines[:].set_visible(False)
    axes.grid(visible=False)


lab.sketch(
    "Queries 12 to 15, and the tiles of keys that they need",
    "Four rows of queries over four tiles of keys, with a dot for each key that a query sees. With "
    "the window (9, 0) the first two tiles are masked, from first to whole, the third is whole, "
    "from whole to cut, and the last is masked, from cut to end. With the window (2, 0) the first "
    "two tiles are not visited and the last two are masked: first is 8, and whole, cut and end "
    "are all 16.",
    band,
    height=4.4,
)

# %%
# Orange tiles are masked, blue tiles are whole, and dashed tiles are never loaded. The shorter
# window leaves no tile whole. For it the table's rules give ``whole`` = 16 and ``cut`` = 12, so the
# first loop and the last would both add the keys 12 to 15. Therefore ``cut`` is at least ``whole``.
#
# **The kernel.** Here it is for one head in float32, with tiles of ``BLOCK`` queries or keys that
# divide the length. A program loads the queries ``first_query`` to ``last_query``, and keeps the
# running maximum ``m_i``, sum ``l_i`` and output ``acc`` of :doc:`/chapters/attention_forward`.
# First it computes the numbers of the table, under the same names:

lab.source(small.window_kernel, "stages")

# %%
# The loops run between these numbers, and only the two edges are masked:

lab.source(small.window_kernel, "loops")

# %%
# ``attend`` computes the scores of one tile of keys, masks them where it has to, and hands them to
# ``update``, which is that of :doc:`/chapters/attention_forward` without its guard against
# :math:`-\infty`. ``behind`` says how far a key lies behind a query:

lab.source(small.attend)

# %%

# Folded: The kernel whole, and update
lab.listing({"The kernel": small.window_kernel, "The update": small.update})

# %%
# ``update`` needs no guard, because ``m_i`` begins at :math:`-10^{30}`, which is *finite*. With the
# window (9, 0) of the figure, query 15 sees none of the keys 0 to 3, its first tile. Had ``m_i``
# begun at :math:`-\infty`, its weights there would be :math:`e^{-\infty + \infty}`, which is NaN;
# as it is, they are 0.
#
# The launch has a program for each tile of queries:

q, k, v = torch.randn(3, 64, 32, device=runtime.DEVICE)
out = torch.empty_like(q)
small.window_kernel[(64 // 16,)](q, k, v, out, 20, 32**-0.5, BLOCK=16, HEAD_DIM=32)

# %%


# Reading
def errors_of(out, q, k, v, seen):
    """The largest errors of a result, and of the formula in PyTorch, from float64."""
    theirs, truth = (
        standard_attention(*(x.to(kind) for x in (q, k, v)), seen)
        for kind in (torch.float32, torch.float64)
    )
    ours, theirs = ((x - truth).abs().max().item() for x in (out, theirs))
    assert ours <= max(8 * theirs, 1e-6) < truth.abs().max()
    return ours, theirs


i = torch.arange(64, device=runtime.DEVICE)
behind = i[:, None] - i
seen = (behind >= 0) & (behind <= 20)
errors = {"a window of (20, 0), 64 tokens": errors_of(out, q, k, v, seen)}

# %%
# .. dropdown:: In the operator: bounds on both sides, lengths that no tile divides, and backward
#
#    If there are more keys than queries, the last query is aligned with the last key, so both
#    bounds move by :math:`\text{seqlen}_k - \text{seqlen}_q`. The operator computes the three
#    beginnings in ``key_stages``, from the first key that a query sees and one past the last. The
#    bounds are given at run time, so a new window compiles nothing; only whether there are such
#    bounds (``HAS_LEFT``, ``HAS_RIGHT``) is compiled in.
#
#    .. literalinclude:: /../src/kernelbook/ops/attention/scope.py
#       :language: python
#       :pyobject: key_stages
#       :start-at: # -- stages
#       :dedent:
#
#    Its ``attend`` is the loop of :doc:`/chapters/attention_fast`, which weighs each tile of keys
#    and computes the scores of the next. The tile that begins at ``last`` has no next, so the loops
#    end before it and the kernel weighs it separately. ``first_visible`` and ``n_visible`` are, for
#    each query, the first key that it sees and one past the last.
#
#    .. literalinclude:: /../src/kernelbook/ops/attention/forward.py
#       :language: python
#       :pyobject: attention_fwd_kernel
#       :start-at: # -- attend
#       :end-before: # -- end
#       :dedent:
#
#    The backward pass takes such a loop for the gradient of a tile of queries. For the gradients of
#    a tile of keys it loops over queries, by the same bounds solved for :math:`i`.

# %%


# Reading
def poison(window, is_causal, seqlen_q, seqlen_k):
    """Which tiles of keys each tile of queries loads: (tiles of queries, tiles of keys)."""
    q = torch.randn(1, 1, seqlen_q, 32, device=runtime.DEVICE)
    k, v = torch.randn(2, 1, 1, seqlen_k, 32, device=runtime.DEVICE)
    tile = tuned.forward_config(q)
    columns = []
    for keys in torch.arange(seqlen_k, device=q.device).split(tile.block_n):
        poisoned = v.index_fill(2, keys, float("nan"))
        out = attention(q, k, poisoned, is_causal=is_causal, window=window)
        spoilt = out[0, 0].isnan().any(-1).split(tile.block_m)
        assert all(queries.all() == queries.any() for queries in spoilt)
        columns.append(torch.stack([queries.any() for queries in spoilt]))
    return torch.stack(columns, dim=1)


def sees(seqlen_q, seqlen_k, left, right):
    i = torch.arange(seqlen_q, device=runtime.DEVICE).unsqueeze(1)
    own = i + seqlen_k - seqlen_q
    j = torch.arange(seqlen_k, device=runtime.DEVICE)
    return (j >= own - left) & (j <= own + right)


def kinds(seen):
    """For each tile, whether some of its pairs are seen, and whether all are."""
    tile = tuned.forward_config(torch.empty(1, 1, 1, 32, device=runtime.DEVICE))
    tiles = [
        part.split(tile.block_n, dim=1) for part in seen.split(tile.block_m, dim=0)
    ]
    some, every = (
        torch.tensor([[bool(kind(part)) for part in row] for row in tiles])
        for kind in (torch.any, torch.all)
    )
    return some, every


TILE = tuned.forward_config(torch.empty(1, 1, 1, 32, device=runtime.DEVICE)).block_m
cases = (
    ((5 * TILE // 2, 0), False, 6 * TILE, 6 * TILE),
    ((TILE, 0), False, 3 * TILE, 3 * TILE),
    ((TILE // 2, TILE // 3), False, 3 * TILE - 5, 3 * TILE - 5),
    ((0, 0), False, 2 * TILE, 2 * TILE),
    ((TILE, None), True, TILE + 7, 4 * TILE - 1),
)
for window, is_causal, seqlen_q, seqlen_k in cases:
    left, right = window
    some, _ = kinds(sees(seqlen_q, seqlen_k, left, 0 if is_causal else right))
    loaded = poison(window, is_causal, seqlen_q, seqlen_k).cpu()
    assert torch.equal(loaded, some)


def hopper_loads():
    """The same for one window in the kernel of Hopper GPUs, which has tiles of 128 by 128."""
    length, left = 768, 320
    q, k, v = torch.randn(
        3, 1, 1, length, 128, device=runtime.DEVICE, dtype=torch.bfloat16
    )
    columns = []
    for keys in torch.arange(length, device=q.device).split(128):
        poisoned = v.index_fill(2, keys, float("nan"))
        out = attention(
            q, k, poisoned, is_causal=True, window=(left, 0), backend="gluon"
        )
        columns.append(out[0, 0].isnan().reshape(6, -1).any(1))
    loaded = torch.stack(columns, dim=1)
    needed = sees(length, length, left, 0).view(6, 128, 6, 128).any(3).any(1)
    return [
        {
            "tiles needed": int(needed.sum()),
            "needed and loaded": int((loaded & needed).sum()),
            "loaded, not needed": int((loaded & ~needed).sum()),
        }
    ]


by_hopper = lab.attempt("Tiles of values, by the kernel of Hopper GPUs", hopper_loads)
[of_hopper] = by_hopper.rows or [None]
passes_too = of_hopper and (
    of_hopper["needed and loaded"] == of_hopper["tiles needed"]
    and of_hopper["loaded, not needed"] == 0
)
lab.read(
    "**Values outside are never loaded.** A loaded NaN spoils the output even where its weight is "
    "zero, because zero times NaN is NaN. So we filled the values of one tile of keys after the "
    f"other with NaN, for {len(cases)} shapes and windows. In plain Triton, exactly "
    "those tiles of queries that see one of these keys became NaN. "
    + (
        "The faster kernel of Hopper GPUs, timed below, passed this test with one window."
        if passes_too
        else "The faster kernel of Hopper GPUs, timed below, loaded "
        f"{of_hopper['loaded, not needed']} tiles that nobody needs in the same test, beside "
        f"{of_hopper['tiles needed']} that it must load."
        if of_hopper
        else "This says nothing of the faster kernel of Hopper GPUs, timed below."
    )
)

# %%

# Folded: The tiles of values that one window loads, as NaN shows them
length, left = 6 * TILE, 5 * TILE // 2
loaded = poison((left, 0), False, length, length).cpu()
some, every = kinds(sees(length, length, left, 0))
assert torch.equal(loaded, some)
rows = []
for number, row in enumerate(loaded.tolist()):
    words = [
        ("whole" if every[number, n] else "cut") if one else "·"
        for n, one in enumerate(row)
    ]
    rows.append({"queries": f"tile {number}"})
    rows[-1] |= {f"k {n}": word for n, word in enumerate(words)}
lab.table(
    rows, f"Tiles of values that were loaded: {length} tokens, window ({left}, 0)"
)

# %%
# How fast are windows?
# ~~~~~~~~~~~~~~~~~~~~~
#
# With 16,384 tokens, a window of 1,025 keys leaves 6 % of all scores, which is an eighth of what a
# causal mask leaves. Does it take an eighth of the time? In the figure, 100 % is the time of
# ``attention`` with a causal mask and no window, and the dashed line marks the share of the scores.
# There are 16 heads of head_dim 128, in bfloat16.
#
# - *plain Triton* is this chapter's kernel, as the operator ``attention`` contains it;
# - *Kernel Book* is what ``attention`` runs by itself: on a Hopper GPU like this one, the faster
#   kernel of :doc:`a later chapter </chapters/attention_hopper>`.

# Measuring
BF16 = torch.bfloat16
PASSES = {"forward": 4, "backward": 10}  # FLOPs for each score and number of a head


def inputs_of(passes, *shapes):
    """Random q, k and v, and the gradient of the output, which is None where it is not needed."""
    q, k, v = (torch.randn(s, device=runtime.DEVICE, dtype=BF16) for s in shapes)
    if passes == "forward":
        return (q, k, v), None
    return tuple(x.requires_grad_() for x in (q, k, v)), torch.randn_like(q)


def window_providers(left, passes, factor, pairs, seqlen, heads, head_dim, dtype):
    inputs, do = inputs_of(passes, *[(1, heads, seqlen, head_dim)] * 3)

    def masked(functional):
        seen = sees(seqlen, seqlen, left, 0)
        return partial(functional.scaled_dot_product_attention, attn_mask=seen)

    def within(b, h, i, j):
        return (i >= j) & (i - j <= left)

    causal = partial(attention, is_causal=True)
    windowed = partial(causal, window=(left, 0))
    return {
        "no window": timed(causal, inputs, do),
        "SDPA, mask": library("torch.nn.functional", masked, inputs, do),
        "FlexAttention": flex(inputs, do, within),
        "FlashAttention": flash(inputs, do, causal=True, window_size=(left, 0)),
        "plain Triton": timed(partial(windowed, backend="triton"), inputs, do),
        "Kernel Book": timed(windowed, inputs, do),
    }


windows = lab.bench(
    "windows",
    [
        {
            "left": left, "passes": passes, "factor": factor, "pairs": pairs(TOKENS, left),
            "seqlen": TOKENS, "heads": HEADS, "head_dim": 128, "dtype": BF16,
        }
        for passes, factor in PASSES.items()
        for left in LEFTS
    ],
    window_providers,
    limit="no window",
    work="factor * heads * head_dim * pairs",
    limit_work="factor * heads * head_dim * seqlen * (seqlen + 1) / 2",
    unit="TFLOP/s",
)  # fmt: skip

# %%


# Drawing
short, middle, wide = LEFTS
nan = float("nan")
SEEN = {left: pairs(TOKENS, left) / pairs(TOKENS, TOKENS) for left in (0, *LEFTS)}


def cost(name, left, passes="forward"):
    """The time of a window as a share of that of `attention` without one, in this run."""
    took, full = (
        windows.milliseconds_at(of, left=left, passes=passes) for of in (name, "no window")
    )
    return took / full


def bars(axes, groups, names, needed, what):
    """Bars of time in percent of ``what``, with a dashed line at the share that is needed.

    groups: for each title, the percent and the milliseconds of each name.
    """
    down, ticks = 0, []
    every = [percent for found in groups.values() for percent, _ in found.values()]
    longest = max(every, default=100)
    for title, found in groups.items():
        axes.text(longest / 100, down - 0.1, title, fontsize=11, color=lab.colour("matmul"))
        top = down + 0.35
        for name in names:
            down += 1
            ticks.append((down, name))
            if name not in found:
                axes.text(1, down, "absent", va="center", fontsize=10)
                continue
            percent, ms = found[name]
            ink = lab.colour("Kernel Book" if name == "Kernel Book" else "matmul")
            axes.barh(down, percent, color=ink, height=0.72)
            crossed = 0 < 100 * needed - percent < longest / 4  # the label would be crossed
            end = (100 * needed if crossed else percent) + longest / 100
            words = {"va": "center", "fontsize": 10}
            axes.text(end, down, f"{percent:.0f} %, {ms:.2f} ms", **words)
        at = [100 * needed] * 2
        axes.plot(at, [top, down + 0.5], "--", color=lab.colour("PyTorch"), lw=1.6)
        down += 1.4
    axes.text(100 * needed, down - 0.35, "needed", ha="center", fontsize=10)
    axes.set_yticks(*zip(*ticks, strict=True))
    axes.tick_params(axis="y", length=0)
    axes.set(xlim=(0, 1.3 * longest), ylim=(down - 0.2, -0.7), xlabel=f"% of the time of {what}")
    axes.grid(axis="y", visible=False)
    axes.figure.set_size_inches(5.4, 1.1 + 0.31 * (len(ticks) + 1.4 * len(groups)))


def bars_in_words(groups, needed, what):
    """The same for those who do not see it."""
    found = (
        f"{title}: " + ", ".join(f"{name} {percent:.0f}" for name, (percent, _) in of.items())
        for title, of in groups.items()
    )
    return (
        f"Bars of time in percent of {what}, with a dashed line at {100 * needed:.0f}. "
        f"{'; '.join(found)}."
    )


def window_times(rows):
    """Of the window in the middle: percent of the time of attention without one, and milliseconds.

    SDPA's bar would be longer than the figure is wide.
    """
    groups = {}
    for passes in PASSES:
        at = {
            row["provider"]: row["ms"]
            for row in rows
            if (row["left"], row["passes"]) == (middle, passes)
        }
        full = at.get("no window", nan)
        groups[passes] = {
            name: (100 * at[name] / full, at[name])
            for name in RUN
            if name in at and full == full
        }
    return groups


RUN = ["FlexAttention", "FlashAttention", "plain Triton", "Kernel Book"]
NO_WINDOW = "attention without a window"
lab.draw(
    windows,
    "What a window of 1,025 keys costs",
    lambda rows: bars_in_words(window_times(rows), SEEN[middle], NO_WINDOW),
    lambda axes, rows: bars(axes, window_times(rows), RUN, SEEN[middle], NO_WINDOW),
)

# %%

# Reading
def in_percent(value):
    """A share in a table, or a dash where none was measured."""
    return "—" if value != value else f"{100 * value:.0f} %"


def behind_flash():
    """Where FlashAttention is faster than ours, by pass."""
    leads = []
    for passes in PASSES:
        by = {
            left: cost("Kernel Book", left, passes) / cost("FlashAttention", left, passes)
            for left in LEFTS
        }
        at = {left: more - 1 for left, more in by.items() if more > 1.02}
        if at:
            keys = " and ".join(f"{left + 1:,}" for left in at)
            where = "with every window" if len(at) == len(by) else f"with {keys} keys"
            up_to = "up to " if len(at) > 1 else ""
            leads.append(f"{passes} {where}, by {up_to}{100 * max(at.values()):.0f} %")
    said = f"FlashAttention is faster than ours {', and '.join(leads)}; we did not measure why."
    return said if leads else ""


took = {passes: 100 * cost("Kernel Book", middle, passes) for passes in PASSES}
dense = min(cost("SDPA, mask", left) for left in LEFTS)
lab.read(
    f"**{100 * SEEN[middle]:.0f} % of the scores take {took['forward']:.0f} % of the time** "
    f"forward, and {took['backward']:.0f} % backward. PyTorch's SDPA, which gets the window as a "
    f"mask of all pairs, takes {dense:.1f} times as long forward as `attention` without a window. "
    f"{behind_flash()}"
)

# %%

# Folded: All windows, forward and backward
lab.table(
    [
        {"version": "share of the scores"}
        | {f"{left + 1:,} keys": in_percent(SEEN[left]) for left in LEFTS}
    ]
    + [
        {"version": f"{name}, {passes}"}
        | {
            f"{left + 1:,} keys": in_percent(cost(name, left, passes)) for left in LEFTS
        }
        for passes in PASSES
        for name in ("SDPA, mask", *RUN)
    ],
    "Time, in percent of attention without a window",
)

# %%
# Why does a window take more than its share?
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# A tile that a bound cuts is computed whole, although some of its scores are then masked. And a
# window saves no memory traffic: q, k and v must be read and the output written, 268 MB at these
# sizes, however few scores are needed. To see this second cost nearly alone, we also time a window
# of one key, (0, 0).

# Measuring
def traffic_providers(keys, seqlen, heads, head_dim, dtype):
    inputs, _ = inputs_of("forward", *[(1, heads, seqlen, head_dim)] * 3)
    read = torch.randn(2, heads, seqlen, head_dim, device=runtime.DEVICE, dtype=dtype)
    return {
        "copy": partial(torch.empty_like(read).copy_, read),
        "Kernel Book": timed(
            partial(attention, is_causal=True, window=(keys - 1, 0)), inputs
        ),
    }


traffic = lab.bench(
    "one key",
    [{"keys": 1, "seqlen": TOKENS, "heads": HEADS, "head_dim": 128, "dtype": BF16}],
    traffic_providers,
    limit="copy",
    work="4 * heads * seqlen * head_dim * itemsize",
)
MOVED = 4 * TOKENS * HEADS * 128 * 2  # bytes of q, k, v and the output
assert round(MOVED / 1e6) == 268


def computed(left, block_m, block_n):
    """How many scores are computed for each that is needed, with tiles of this shape."""
    tiles = sum(
        -(-(start + block_m) // block_n) - max(start - left, 0) // block_n
        for start in range(0, TOKENS, block_m)
    )
    return tiles * block_m * block_n / pairs(TOKENS, left)


shape = 64 * choice.CONFIGS[128].consumers, choice.CONFIGS[128].block_n
rows, left_over, measured = [], {}, {}
for left in (0, *LEFTS):
    at = {"left": left, "passes": "forward"}
    full = 1e3 * windows.milliseconds_at("no window", **at | {"left": left or short})
    measured[left] = 1e3 * (
        windows.milliseconds_at("Kernel Book", **at)
        if left
        else traffic.milliseconds_at("Kernel Book", keys=1)
    )
    needed = full * SEEN[left]
    masked = needed * (computed(left, *shape) / computed(TOKENS, *shape) - 1)
    left_over[left] = measured[left] - needed - masked
    columns = {
        "needed scores": needed,
        "masked scores": masked,
        "the rest": left_over[left],
        "measured": measured[left],
    }
    rows.append(
        {"window": f"{left + 1:,} key{'s' * (left > 0)}"}
        | {
            name: "—" if value != value else f"{value:.0f}"
            for name, value in columns.items()
        }
    )
lab.table(rows, "Where the microseconds of a window go: Kernel Book, forward")

# %%


# Reading
copied = 1e3 * traffic.milliseconds_at("copy", keys=1)
least, most = min(left_over.values()), max(left_over.values())
lab.read(
    "The first two columns turn scores into time, at the speed of attention without a window, "
    "which pays for its own masked scores: the second counts only what a window adds. The rest is "
    f"{least:.0f} to {most:.0f} µs, and a copy of as many bytes takes {copied:.0f} µs. "
    + (
        "**The rest does not grow with the window.** It is at most the time of that memory "
        "traffic, and a longer window may hide more of the traffic behind its matmuls, which we "
        "did not measure. So the shorter the window, the further its time lies above its share."
        if left_over[wide] < 1.2 * left_over[short] and 0.3 * copied < most < 1.5 * copied
        else "So the memory traffic alone does not explain it, and we did not measure what else "
        "is in it."
        if copied == copied
        else ""
    )
)

# %%
# .. raw:: html
#
#    <span id="the-course-s-test"></span>

# Measuring
COURSE = (1, 16, 16384, 64)


def course_steps(q, k, v):
    """For each version forward and backward, or why there is none."""
    seen = sees(q.shape[2], q.shape[2], q.shape[2], 0)
    causal = {"is_causal": True}

    def step(run, *inputs, **options):
        def both():
            found = run(*inputs, **options)
            (found[0] if isinstance(found, tuple) else found).sum().backward()

        return both

    def by_sdpa(backend):
        run = sdpa(backend, (q, k, v), **causal)
        return run if isinstance(run, lab.Absent) else lab.tried(step(run))

    def by_flash(interface):
        moved = (x.transpose(1, 2) for x in (q, k, v))
        return step(interface.flash_attn_func, *moved, causal=True)

    return {
        "PyTorch": step(standard_attention, q, k, v, seen),
        "torch.compile": step(torch.compile(standard_attention), q, k, v, seen),
        "SDPA flash": by_sdpa("FLASH_ATTENTION"),
        "SDPA cuDNN": by_sdpa("CUDNN_ATTENTION"),
        "FlashAttention": lab.peer("flash_attn.cute.interface", by_flash),
        "plain Triton": step(attention, q, k, v, backend="triton", **causal),
        "Kernel Book": step(attention, q, k, v, **causal),
    }


def in_short(absent):
    """Why there is no time, for a cell: the library's name and the details left out."""
    return absent.reason.partition(":")[0].partition(" ")[2].removeprefix("is ")


def course():
    from triton.testing import do_bench

    q, k, v = (torch.randn(COURSE, device=runtime.DEVICE, dtype=BF16) for _ in range(3))
    runs = course_steps(*(x.requires_grad_() for x in (q, k, v)))
    times = {name: [] for name in runs}
    failed = {
        name: (in_short(run), run.reason)
        for name, run in runs.items()
        if isinstance(run, lab.Absent)
    }
    peaks, order = {}, numpy.random.default_rng(0)
    for _ in range(5):
        for name in map(str, order.permutation(list(runs))):
            if name in failed:
                continue
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            try:
                times[name].append(do_bench(runs[name], warmup=100, rep=200))
            except torch.cuda.OutOfMemoryError:
                failed[name] = "out of memory", "the memory of the GPU does not suffice"
            peaks[name] = round(torch.cuda.max_memory_allocated() / 2**30, 1)
    rows = []
    for name in runs:
        cell, why = failed.get(name, (None, ""))
        rows.append(
            {
                "version": name,
                "milliseconds": cell or round(statistics.median(times[name]), 2),
                "peak, GiB": "—" if cell else peaks[name],
                "reason": why,
            }
        )
    return rows


test = lab.measure("Forward and backward in turn, 16 × 16,384 × 64, causal", course)

# %%


# Reading
def why(reason):
    """Why a library was not timed; the notes under the figures have the error itself."""
    missing = "a library that it needs could not be loaded on the machine of this run"
    return missing if "ImportError" in reason else reason


times = {
    row["version"]: row["milliseconds"]
    for row in test.rows
    if not isinstance(row["milliseconds"], str)
}
own = times.get("Kernel Book", nan)
quicker = [
    f"{name} takes {100 * (1 - spent / own):.0f} % less"
    for name, spent in times.items()
    if spent < 0.99 * own and name != "plain Triton"
]
lab.read(
    "Without a window, we also run the test by which Stanford's course CS336 ranks its students' "
    "kernels: both passes at head_dim 64, with the host's launches. "
    + (
        f"In it {' and '.join(quicker)} time than ours."
        if quicker
        else f"In it no library beats our {own:.2f} ms."
    )
    + "".join(
        f" No time for {row['version']}: {why(row['reason'])}."
        for row in test.rows
        if row["reason"]
    )
)

# %%

# Folded: The course's test, in every version
lab.table(
    [
        {"version": row["version"], "milliseconds": row["milliseconds"]}
        | {"peak, GiB": row["peak, GiB"]}
        for row in test.rows
    ],
    "Forward and backward, causal, 16 heads, 16,384 tokens, head_dim 64, bfloat16",
)
# %%
# Packed sequences
# ----------------
#
# *Padding* extends every text of a batch to the length of the longest, so the kernel computes
# scores of tokens that do not exist. *Packing* puts the texts one after the other into one tensor,
# beside the *offsets* at which the sequences begin and the last one ends (``cu_seqlens``).
#
# .. image:: /figures/attention-packed.svg
#    :alt: Above, four sequences of 5, 2, 8 and 3 tokens padded to 8: 14 of 32 rows are padding.
#          Below, the same 18 tokens in one row, with the offsets 0, 5, 7, 15 and 18.

# Reading
real, box = sum(LENGTHS), SEQUENCES * LONGEST
used_padded = used / (SEQUENCES * pairs(LONGEST, LONGEST))
lab.read(
    f"We time {SEQUENCES} texts below. Padded, {100 * real / box:.0f} % of their rows are tokens, "
    f"and a causal kernel needs only {100 * used_padded:.0f} % of the scores that it computes, "
    "because these grow with the square of the length. (Of all pairs, as the first table counts "
    f"them, that is {100 * used / (SEQUENCES * LONGEST**2):.0f} %.)"
)

# %%
# **How a program finds its sequence.** The offsets are on the GPU, and reading them would make the
# host wait, so the host is given only the length of the longest sequence. It launches as many
# programs for each sequence as the longest one needs. A program reads two neighbouring offsets, and
# returns at once if its tile lies past the end of its sequence:

lab.source(small.packed_kernel, "place")

# %%
# For the sequences of the figure and tiles of 4 queries, each sequence gets two programs:

# Reading
drawn = (5, 2, 8, 3)
begins = [sum(drawn[:number]) for number in range(5)]
finds = []
for number, n_tokens in enumerate(drawn):
    found_by = {"sequence": number, "begin": begins[number], "length": n_tokens}
    for tile in range(2):
        first_row = begins[number] + 4 * tile
        last_row = begins[number] + min(4 * tile + 4, n_tokens) - 1
        said_of = f"row {first_row}" if first_row == last_row else ""
        said_of = said_of or f"rows {first_row} to {last_row}"
        found_by[f"tile {tile}"] = said_of if 4 * tile < n_tokens else "returns"
    finds.append(found_by)
lab.table(finds, "The rows of the packed tensor that each of eight programs finds")

# %%
# The program moves all pointers by ``begin`` rows, and from there on is a causal kernel of one
# text. Two things are new. A tile of queries may reach past the end of its sequence, so its last
# rows must not be stored, because they belong to the next one. And a tile of keys may, too, into
# the next sequence or, after the last one, past the end of the tensor. The causal mask gives those
# keys the weight zero, but zero times NaN is NaN, and memory that is not ours may hold NaN. So they
# must read as zeros:

lab.source(small.packed_kernel, "loop", "write")

# %%

# Folded: The kernel of a packed batch whole
lab.source(small.packed_kernel)

# %%
# We launch it for the same four sequences, each four times as long, with tiles of 16:

offsets = torch.tensor([0, 20, 28, 60, 72], device=runtime.DEVICE).int()
q, k, v = torch.randn(3, 72, 32, device=runtime.DEVICE)
out = torch.empty_like(q)
small.packed_kernel[(4, 2)](q, k, v, out, offsets, 32**-0.5, BLOCK=16, HEAD_DIM=32)

# %%

# Reading
which = torch.arange(4, device=runtime.DEVICE).repeat_interleave(offsets.diff())
i = torch.arange(72, device=runtime.DEVICE)
seen = (which[:, None] == which) & (i[:, None] >= i)
errors["a packed batch of 4 sequences, 72 tokens"] = errors_of(out, q, k, v, seen)

# %%

# Folded: The operator's kernel of packed sequences; it calls sequence to find its rows
lab.listing(
    {
        "Which rows belong to a sequence": varlen.sequence,
        "The kernel": varlen.attention_varlen_fwd_kernel,
    }
)

# %%
# .. dropdown:: How the operator reads zeros past the end of a sequence
#
#    The copy engine, which loads the operator's tiles, reads zeros outside of a tensor, so we
#    describe the tensor to it as if it ended with the sequence. It compares a coordinate with the
#    size of its dimension, and knows no other end. So we say that the dimension has
#    :math:`E = 2^{30}` rows, and give row :math:`i` of a sequence the coordinate :math:`E` -
#    length + :math:`i`: the rows that follow the sequence then lie outside. Two more dimensions
#    correct the address: one adds the row at which the sequence ends, the other takes :math:`E`
#    rows off again.
#
#    .. literalinclude:: /../src/kernelbook/ops/attention/tiles.py
#       :language: python
#       :pyobject: head_of_sequence

# %%

# Reading
lengths = (37, 1, 64, 0, 90)
offsets = torch.tensor([0, *lengths], device=runtime.DEVICE).cumsum(0).int()


def packed(q, k, v, do):
    """The output of all sequences, and their gradients."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out = attention_varlen(
        q, k, v, offsets, offsets, max(lengths), max(lengths), is_causal=True
    )
    return out.detach(), *torch.autograd.grad(out, (q, k, v), do)


inputs = torch.randn(4, sum(lengths), 2, 32, device=runtime.DEVICE)
alone = packed(*inputs)
for number in range(len(lengths)):
    own = slice(offsets[number], offsets[number + 1])
    poisoned = torch.full_like(inputs, float("nan"))
    poisoned[:, own] = inputs[:, own]
    found = packed(*poisoned)
    assert all(torch.equal(a[own], b[own]) for a, b in zip(found, alone, strict=True))
lab.read(
    "Nothing leaks from one sequence into another in the operator, either: if all but one of "
    f"{len(lengths)} are filled with NaN, its output and gradients keep the same bits."
)

# %%
# How fast are packed batches?
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# In the figure, 100 % is the time of ``attention`` on the padded batch, and the dashed line marks
# the share of its scores that are needed. A packed kernel that is as fast per score would end
# there. ``varlen_attn`` is PyTorch's own function for packed sequences. As for windows, *plain
# Triton* is this chapter's kernel as the operator contains it, and *Kernel Book* is what
# ``attention_varlen`` runs by itself: on a Hopper GPU, the faster kernel of a later chapter.

# Measuring
OFFSETS = torch.tensor([0, *LENGTHS], device=runtime.DEVICE).cumsum(0).int()


def packed_providers(
    tokens, passes, factor, pairs, padded_pairs, sequences, longest, heads, head_dim, dtype
):  # fmt: skip
    inputs, do = inputs_of(passes, *[(tokens, heads, head_dim)] * 3)
    padded = inputs_of(passes, *[(sequences, heads, longest, head_dim)] * 3)
    flexible = inputs_of(passes, *[(1, heads, tokens, head_dim)] * 3)
    where = (OFFSETS, OFFSETS, longest, longest)
    counts = OFFSETS.diff()
    document = torch.arange(sequences, device=OFFSETS.device).repeat_interleave(counts)

    def same_document(b, h, i, j):
        return (document[i] == document[j]) & (i >= j)

    def pytorch(module):
        known = inspect.signature(module.varlen_attn).parameters
        causal = {"window_size": (-1, 0)} if "window_size" in known else {}
        causal = causal or {"is_causal": True}
        return lambda q, k, v: module.varlen_attn(q, k, v, *where, **causal)

    def packed_flash(interface):
        names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
        known = inspect.signature(interface.flash_attn_varlen_func).parameters
        options = {n: x for n, x in zip(names, where, strict=True) if n in known}
        return partial(interface.flash_attn_varlen_func, causal=True, **options)

    def ours(q, k, v, backend="auto"):
        return attention_varlen(q, k, v, *where, is_causal=True, backend=backend)

    causal = partial(attention, is_causal=True)
    return {
        "padded": timed(causal, *padded),
        "padded, plain Triton": timed(partial(causal, backend="triton"), *padded),
        "FlexAttention": flex(*flexible, same_document),
        "varlen_attn": library("torch.nn.attention.varlen", pytorch, inputs, do),
        "FlashAttention": library(
            "flash_attn.cute.interface", packed_flash, inputs, do
        ),
        "plain Triton": timed(partial(ours, backend="triton"), inputs, do),
        "Kernel Book": timed(ours, inputs, do),
    }


batches = lab.bench(
    "packed",
    [
        {
            "tokens": sum(LENGTHS), "passes": passes, "factor": factor,
            "pairs": sum(pairs(length, length) for length in LENGTHS),
            "padded_pairs": SEQUENCES * pairs(LONGEST, LONGEST),
            "sequences": SEQUENCES, "longest": LONGEST, "heads": HEADS, "head_dim": 128,
            "dtype": BF16,
        }
        for passes, factor in PASSES.items()
    ],
    packed_providers,
    limit="padded",
    work="factor * heads * head_dim * pairs",
    limit_work="factor * heads * head_dim * padded_pairs",
    unit="TFLOP/s",
)  # fmt: skip

# %%


# Drawing
def packed_times(rows):
    """Percent of the time of the padded batch, and milliseconds."""
    groups = {}
    for passes in PASSES:
        at = {row["provider"]: row["ms"] for row in rows if row["passes"] == passes}
        groups[passes] = {
            name: (100 * at[name] / at["padded"], at[name]) for name in PACKED if name in at
        }
    return groups


PACKED = [
    "padded, plain Triton", "FlexAttention", "varlen_attn", "FlashAttention", "plain Triton",
    "Kernel Book",
]  # fmt: skip
PADDED = "attention on the padded batch"
lab.draw(
    batches,
    "What 32 texts cost, padded and packed",
    lambda rows: bars_in_words(packed_times(rows), used_padded, PADDED),
    lambda axes, rows: bars(axes, packed_times(rows), PACKED, used_padded, PADDED),
)

# %%


# Reading
PACKERS = ("FlexAttention", "varlen_attn", "FlashAttention")
SHARE = used_padded


def packed_cost(name, passes):
    """The time of a packed batch as a share of that of the padded one."""
    took, full = (batches.milliseconds_at(of, passes=passes) for of in (name, "padded"))
    return took / full


kept = {passes: packed_cost("Kernel Book", passes) for passes in PASSES}
per_score = {  # the speed per needed score beside the padded batch, in the same kernel
    passes: SHARE / kept[passes] for passes in PASSES
}
quicker = []
for name in PACKERS:
    at = {passes: kept[passes] / packed_cost(name, passes) - 1 for passes in PASSES}
    ahead = [f"{100 * more:.0f} % {passes}" for passes, more in at.items() if more > 0.01]
    if ahead:
        quicker.append(f"{name} is faster than ours by {' and '.join(ahead)}")
beyond = [
    f"{name} {passes}"
    for name in PACKERS
    for passes in PASSES
    if packed_cost(name, passes) < SHARE
]
lab.read(
    ("**Packing halves the time**" if max(kept.values()) < 0.56 else "**Packing saves time**")
    + f": {100 * kept['forward']:.0f} % of it is left forward, and {100 * kept['backward']:.0f} % "
    "backward. "
    + f"Per needed score, the packed batch runs at {100 * per_score['forward']:.0f} % of the speed "
    f"of the padded one forward, and at {100 * per_score['backward']:.0f} % backward."
)

# %%

# Reading
lab.read(
    (
        f"**{' and '.join(quicker)}**; we did not measure why. "
        if quicker
        else "No library is faster than ours. "
    )
    + (
        f"The bar of {' and of '.join(beyond)} reaches the dashed line, which is no limit: it "
        "assumes the speed of our padded batch, and the library is faster per needed score."
        if beyond
        else ""
    )
)

# %%
# Decoding
# --------
#
# A model that writes text computes one token at a time, so a layer has a single query per head and
# many keys, the *KV cache* of all earlier tokens. With :math:`N` keys and head_dim :math:`D`, it
# does :math:`4 N D` operations on :math:`2 N D` numbers of 2 bytes. That is one operation per byte,
# and a GPU can do more than a hundred while it moves one. So the limit is the speed at which keys
# and values are read.
#
# To reach it, all :term:`SMs <SM>` must read. One program per head leaves most of them idle, so we
# split the *keys*: each program computes the output of a part of them, as if there were no others,
# and then the parts are merged. This is known as *Flash-Decoding*. In the figure a square stands
# for an SM, and it is blue if there is a program for it.

# Measuring
CACHE = {"heads": HEADS, "heads_k": HEADS, "head_dim": 128, "dtype": BF16}
OF_KEYS = {
    "limit": "copy",
    "work": "2 * batch * heads_k * seqlen_k * head_dim * itemsize",
}
OF_KEYS["limit_work"] = f"2 * {OF_KEYS['work']}"
PARTS = (1, 4, 16, 64, 256)


def cache(batch, heads, heads_k, seqlen_k, head_dim, dtype):
    q = torch.randn(batch, heads, 1, head_dim, device=runtime.DEVICE, dtype=dtype)
    size = (2, batch, heads_k, seqlen_k, head_dim)
    return q, torch.randn(size, device=runtime.DEVICE, dtype=dtype)


def parts_providers(parts, **sizes):
    q, kv = cache(**sizes)
    scale = q.shape[-1] ** -0.5
    return {
        "copy": partial(torch.empty_like(kv).copy_, kv),
        "Kernel Book": partial(decoding.attention_decode, q, *kv, False, scale, parts),
    }


by_parts = lab.bench(
    "parts",
    [{"parts": n, "batch": 1, "seqlen_k": KEYS} | CACHE for n in PARTS],
    parts_providers,
    **OF_KEYS,
)

# %%


# Drawing
SHOWN = (1, 4, 16)


def processors(rows):
    """How many SMs the GPU has that these rows were measured on."""
    sweeps = (by_parts, *by_parts.elsewhere)
    return next(s.provenance["sm_count"] for s in sweeps if s.rows == rows)


def rates_of(rows):
    """GB/s by the number of parts."""
    return {r["parts"]: r["rate"] for r in rows if r["provider"] == "Kernel Book"}


def busy(axes, rows):
    count, wide = processors(rows), 12
    for place, parts in enumerate(SHOWN):
        left, programs = 14 * place, HEADS * parts
        for sm in range(count):
            works = sm < programs
            ink = lab.colour("Kernel Book" if works else "matmul")
            at = (left + sm % wide, sm // wide)
            axes.add_patch(
                Rectangle(at, 0.8, 0.8, ec=ink, fc=ink if works else "none", lw=0.6)
            )
        words = {"ha": "left", "fontsize": 10}
        name = f"{parts} part{'s' * (parts > 1)}, {programs} programs"
        axes.text(left, -1.0, name, **words)
        below = -(-count // wide) + 1.6
        axes.text(left, below, f"{rates_of(rows)[parts]:,.0f} GB/s", **words)
    axes.set(xlim=(-0.3, 40.6), ylim=(below + 0.6, -2.4), xticks=[], yticks=[])
    axes.set_aspect("equal")
    axes.spines[:].set_visible(False)
    axes.grid(visible=False)
    axes.figure.set_size_inches(5.4, 2.4)


def describe_busy(rows):
    found = (
        f"with {n} parts {min(HEADS * n, processors(rows))} of {processors(rows)} SMs work, and "
        f"read {rates_of(rows)[n]:,.0f} GB/s"
        for n in SHOWN
    )
    return f"Three grids of squares, one square per SM: {'; '.join(found)}."


lab.draw(by_parts, "SMs that read the keys of one query, 16 heads", describe_busy, busy)

# %%

# Folded: The speed by the number of parts, beside a copy
lab.plot(by_parts, "One query, 131,072 keys, by the number of parts")

# %%

# Reading
rates = {n: by_parts.rate("Kernel Book", parts=n) for n in PARTS}
best = max(PARTS, key=lambda n: rates[n])
slowest = min(rates[n] for n in PARTS if n >= best) / rates[best]
lab.read(
    f"**With {best} parts the keys are read {rates[best] / rates[1]:.1f} times as fast** as with "
    "one. "
    + (
        f"More parts gain nothing: they are up to {100 * (1 - slowest):.0f} % slower. "
        if best < PARTS[-1] and slowest < 0.99
        else ""
    )
    + "But each part knows only its own keys, so how do their outputs become one?"
)

# %%
# **The merge.** Let :math:`A` and :math:`B` be two parts of the keys. Each gives an average of its
# values: their weighted sum, divided by the part's own sum of exponentials. If these sums are 1 in
# :math:`A` and 3 in :math:`B`, the output over all keys is a quarter of the first average and three
# quarters of the second. So a part leaves its average and the logarithm of its sum, the
# :term:`logsumexp` :math:`lse_A = \log \sum_{j \in A} e^{s_j}` of its scores :math:`s_j`, and both
# together give
#
# .. math::
#
#    out = \frac{e^{lse_A}\, out_A + e^{lse_B}\, out_B}{e^{lse_A} + e^{lse_B}}
#
# .. admonition:: Key idea
#    :class: kb-key
#
#    With any number of parts, the merge is an average of their outputs, weighted by the softmax of
#    their lse.
#
# In PyTorch:


def merge(outs, lses):
    """Merge parts of the same queries: outs (parts, ..., head_dim), lses (parts, ...)."""
    weights = torch.softmax(lses, dim=0)
    return (weights.unsqueeze(-1) * outs).sum(0), torch.logsumexp(lses, dim=0)


# %%
# **The kernel.** A program takes one head and one part of ``share`` keys:

lab.source(small.part_kernel, "place")

# %%
# Here ``m_i`` may begin at :math:`-\infty`, because every tile of a part has at least one key, so
# ``m_new`` is finite from the first iteration on. There is a single query, so a score is a sum and
# no matmul. The rest is the loop of :doc:`/chapters/attention_forward`, in which ``m_i`` and
# ``l_i`` are single numbers:

lab.source(small.part_kernel, "loop")

# %%
# In the end the part stores its average, ``acc / l_i``, and its lse, ``m_i + tl.log(l_i)``.

# %%

# Folded: The kernel of one part whole
lab.source(small.part_kernel)

# %%
# With three heads and 100 keys in parts of 32, ``attend_in_parts`` launches 3 × 4 of these
# programs:

q = torch.randn(3, 32, device=runtime.DEVICE)
k, v = torch.randn(2, 3, 100, 32, device=runtime.DEVICE)
outs, lses = small.attend_in_parts(q, k, v, share=32)
out, lse = merge(outs, lses)

# %%

# Reading
every = torch.ones(1, 100, dtype=torch.bool, device=runtime.DEVICE)
errors["100 keys in parts of 32, 3 heads"] = errors_of(out[:, None], q[:, None], k, v, every)

# %%
# The operator does the same in two launches, one for the parts and a small one that merges them.
#
# **Grouped heads.** In *grouped-query attention* (GQA), several query heads share one head of keys
# and values. With a program per query head, each would read the same keys. So a program takes all
# queries of a group as the rows of one tile, and reads each key once. In PyTorch, with 8 query
# heads on 2 heads of keys:

q = torch.randn(8, 32, device=runtime.DEVICE)
k, v = torch.randn(2, 2, 100, 32, device=runtime.DEVICE)
rows = q.view(2, 4, 32)  # for each head of keys, the four queries that share it
weights = torch.softmax(32**-0.5 * rows @ k.mT, dim=-1)
out = (weights @ v).view(8, 32)

repeated = (x.repeat_interleave(4, dim=0) for x in (k, v))  # a copy for every query head
torch.testing.assert_close(
    out, F.scaled_dot_product_attention(q[:, None], *repeated)[:, 0]
)

# %%
# The scores of a group are a matmul again. In the kernel its tile has at least 16 rows, the fewest
# that ``tl.dot`` takes, so for a small group some rows stay empty.
#
# .. dropdown:: The kernel that merges
#
#    A part leaves its lse as two numbers, ``m_i`` and ``l_i``, because their :math:`m + \log l`
#    would be rounded, which loses :math:`\log l` if scores are in the millions. So the merge
#    rescales the parts to ``m``, the largest ``m_i`` of all. It adds the parts always in the same
#    order, so that every run gives the same bits.
#
#    .. literalinclude:: /../src/kernelbook/ops/attention/decoding.py
#       :language: python
#       :pyobject: attention_merge_kernel

# %%

# Folded: The kernel of decoding, and how it loads the queries of several heads as one tile
lab.listing(
    {
        "A tile of queries of several heads": decoding.rows_of_group,
        "The kernel": decoding.attention_decode_kernel,
    }
)

# %%
# How fast is decoding?
# ~~~~~~~~~~~~~~~~~~~~~
#
# ``attention`` chooses the number of parts so that each SM gets two programs and each part at least
# two tiles of keys:
#
# .. code-block:: python
#
#    parts = max(1, min(2 * n_sms // (batch * heads_k), n_tiles // 2, 256))

# Reading
assert (decoding.PROGRAMS, decoding.FEWEST_TILES, decoding.MOST_PARTS) == (2, 2, 256)
n_sms = by_parts.provenance["sm_count"] if by_parts.provenance else 132
by_rule = 2 * n_sms // HEADS
lab.read(
    f"With {n_sms} SMs and one query in each of {HEADS} heads these are {by_rule} parts"
    + (", the best number above." if by_rule == best else ".")
)

# %%
# In each column, 100 % is what a copy of the same keys and values moves per second, read and
# written bytes together. Decoding only reads, so this is a yardstick and no hard limit. *One part*
# is our kernel without a split. The last column is a batch of 8, in which 32 query heads share 8
# heads of keys.

# %%


# Measuring
def decode_providers(**sizes):
    q, kv = cache(**sizes)
    inputs, shared = (q, *kv), {"enable_gqa": sizes["heads"] != sizes["heads_k"]}
    choosing = flash(inputs, num_splits=0)  # 0: as many parts as it likes
    refused = isinstance(choosing, lab.Absent)
    scale = q.shape[-1] ** -0.5
    parts = max(1, decoding.n_parts(q, kv[0], False))
    few = parts * tuned.decode_config(q).block_n  # keys, if each part has a single tile
    short_k, short_v = kv[:, :, :, :few].contiguous()
    return {
        "copy": partial(torch.empty_like(kv).copy_, kv),
        "SDPA flash": sdpa("FLASH_ATTENTION", inputs, **shared),
        "SDPA cuDNN": sdpa("CUDNN_ATTENTION", inputs, **shared),
        "FlexAttention": flex(inputs, **shared),
        "FlashAttention": flash(inputs) if refused else choosing,
        "one part": partial(decoding.attention_decode, *inputs, False, scale, 1),
        "one tile in each part": partial(
            decoding.attention_decode, q, short_k, short_v, False, scale, parts
        ),
        "Kernel Book": partial(attention, *inputs, **shared),
    }


def how_flash_splits():
    """Whether FlashAttention chooses a number of splits on this GPU, or refuses the option."""
    q, kv = cache(batch=1, seqlen_k=16384, **CACHE)
    choosing = flash((q, *kv), num_splits=0)
    refused = isinstance(choosing, lab.Absent)
    why = choosing.reason if refused else ""
    return [{"num_splits=0": "refused" if refused else "taken", "reason": why}]


KEY_LENGTHS = (1024, 16384, KEYS)
GROUPED = {"seqlen_k": 8192, "batch": 8} | CACHE | {"heads": 32, "heads_k": 8}
steps = lab.bench(
    "decoding",
    [{"seqlen_k": n, "batch": 1} | CACHE for n in KEY_LENGTHS] + [GROUPED],
    decode_providers,
    **OF_KEYS,
)

# %%

# Folded: The speed by the number of keys
READERS = ("SDPA flash", "SDPA cuDNN", "FlexAttention", "FlashAttention", "Kernel Book")
lab.plot(
    steps,
    "Decoding: one query, 16 heads of head_dim 128",
    share=True,
    where={"batch": 1, "provider": ("copy", "one part", *READERS)},
)

# %%
splits = lab.measure("How FlashAttention takes its number of splits", how_flash_splits)
CALLED = {
    "taken": "FlashAttention, splits of its choice",
    "refused": "FlashAttention, which refuses to split here",
}
flash_is = splits.rows[0]["num_splits=0"] if splits.rows else ""
long, grouped = {"batch": 1, "seqlen_k": KEYS}, {"batch": 8}
few = {"batch": 1, "seqlen_k": KEY_LENGTHS[0]}
rows = [
    {
        "version": CALLED.get(flash_is, name) if name == "FlashAttention" else name,
        f"{KEY_LENGTHS[0]:,} keys": in_percent(steps.share(name, **few)),
        f"{KEYS:,} keys": in_percent(steps.share(name, **long)),
        "8 × 8,192 keys, grouped": in_percent(steps.share(name, **grouped)),
    }
    for name in ("one part", *READERS)
]
lab.table(rows, "Bytes of keys and values per second, in percent of a copy")

# %%


# Reading
def micro(name, where):
    """Microseconds of a version."""
    return 1e3 * steps.milliseconds_at(name, **where)


AT = {
    f"{KEYS:,} keys": long,
    "8 × 8,192 keys, grouped": grouped,
    f"{KEY_LENGTHS[0]:,} keys": few,
}
of_ours = [steps.share("Kernel Book", **where) for where in AT.values()]
beaten = [
    f"{name} is faster than ours by {100 * (by - 1):.0f} % with {what}"
    for name in READERS[:-1]
    for what, where in AT.items()
    if (by := steps.share(name, **where) / steps.share("Kernel Book", **where)) > 1.02
]
slow = {name: steps.share(name, **long) for name in ("FlexAttention", "FlashAttention")}
alone = steps.share("one part", **long)
lab.read(
    (
        f"With {KEYS:,} keys, **our kernel and SDPA cuDNN read about as fast as a copy**. "
        if min(of_ours[0], steps.share("SDPA cuDNN", **long)) > 0.95
        else f"With {KEYS:,} keys our kernel reads at {100 * of_ours[0]:.0f} % of a copy's speed. "
    )
    + (f"{' and '.join(beaten)}. " if beaten else "")
    + (
        "FlashAttention's general function `flash_attn_func` stays near one part"
        + (
            "; asked to choose the number of parts, it refuses on this GPU. Its function for KV "
            "caches we did not time. "
            if flash_is == "refused"
            else ". "
        )
        if slow["FlashAttention"] < 1.6 * alone
        else ""
    )
    + (
        "FlexAttention is slower than one part; we did not measure why."
        if slow["FlexAttention"] < 0.9 * alone
        else ""
    )
)

# %%

# Reading
most = max(steps.share(name, **few) for name in READERS if steps.share(name, **few) > 0)
all_keys, one_tile = micro("Kernel Book", few), micro("one tile in each part", few)
at_copy_speed = {  # microseconds
    what: micro("Kernel Book", where)
    * steps.rate("Kernel Book", **where)
    / steps.rate("copy", **long)
    for what, where in AT.items()
}
reading = at_copy_speed[f"{KEY_LENGTHS[0]:,} keys"]
lab.read(
    (
        f"**With {KEY_LENGTHS[0]:,} keys nobody comes near a copy.** "
        if most < 0.7
        else f"With {KEY_LENGTHS[0]:,} keys our kernel reaches {100 * of_ours[2]:.0f} % of a copy. "
    )
    + "A copy of so few keys is slow itself: at the speed of the longest copy, reading them would "
    f"take {reading:.1f} µs, and our kernel takes {all_keys:.1f}. "
    + (
        f"With half of the keys, so that each part has one tile instead of two, it still takes "
        f"{one_tile:.1f} µs. So the "
        "bandwidth is not what limits the kernel here; we did not measure what does."
        if one_tile > 0.6 * all_keys
        else f"Half of the keys, a single tile in each part, take {one_tile:.1f} µs."
    )
)

# %%

# Folded: The same for the other two columns of the table
lab.table(
    [
        {"keys": what}
        | {
            name: "—" if value != value else f"{value:.1f}"
            for name, value in (
                ("all keys", micro("Kernel Book", where)),
                ("reading, as fast as the longest copy", at_copy_speed[what]),
                ("one tile in each part", micro("one tile in each part", where)),
            )
        }
        for what, where in AT.items()
    ],
    "Microseconds of our kernel, by how many keys are left to it",
)

# %%
# Is it right?
# ------------
#
# The three small kernels of this page agree with float64 about as well as the formula in PyTorch
# does.

# %%

# Folded: The errors of the small kernels
lab.table(
    [
        {"kernel": what, "error": f"{ours:.0e}", "PyTorch's error": f"{theirs:.0e}"}
        for what, (ours, theirs) in errors.items()
    ],
    "The small kernels, in float32",
)

# %%
# For the operator, output and gradients may be off by a multiple of what PyTorch is off by: eight
# times in float32; in 16 bits twice for the output, and four times for a gradient. PyTorch's error
# counts as at least the rounding of the largest number, half a unit in its last place.

# Measuring
NAMES = ("out", "dq", "dk", "dv")


def by_formula(q, k, v, do, seen, dtype):
    """The output and the gradients of the formula, in a dtype."""
    q, k, v = (x.detach().to(dtype).requires_grad_() for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k_all, v_all = (x.repeat_interleave(group, dim=1) for x in (k, v))
    out = standard_attention(q, k_all, v_all, seen)
    return out.detach(), *torch.autograd.grad(out, (q, k, v), do.to(dtype))


def compared(what, ours, q, k, v, do, seen):
    theirs = by_formula(q, k, v, do, seen, q.dtype)
    truth = by_formula(q, k, v, do, seen, torch.float64)
    for name, *three in zip(NAMES, ours, theirs, truth, strict=True):
        factor = 8 if q.dtype == torch.float32 else 2 if name == "out" else 4
        yield lab.Case(what, name, *three, factor)


def with_gradients(run, *inputs, do):
    inputs = [x.detach().requires_grad_() for x in inputs]
    out = run(*inputs)
    return out.detach(), *torch.autograd.grad(out, inputs, do)


def random(dtype, *shapes):
    return [torch.randn(s, device=runtime.DEVICE).to(dtype) for s in shapes]


def window_cases(dtype):
    size = 150 if runtime.INTERPRETED else 1000
    for seqlen_q, seqlen_k, left, right, heads_k in (
        (size, size, 20, 0, 2),
        (size - 7, size - 7, 9, 33, 1),
        (size // 3, size, 64, 0, 2),
    ):
        of_keys = (1, heads_k, seqlen_k, 64)
        q, do, k, v = random(dtype, *[(1, 2, seqlen_q, 64)] * 2, of_keys, of_keys)
        windowed = partial(attention, window=(left, right), enable_gqa=True)
        what = f"window ({left}, {right}), {seqlen_q} queries, {seqlen_k} keys"
        seen = sees(seqlen_q, seqlen_k, left, right)
        runs = {what: windowed}
        if dtype != torch.float32:  # for which there is another kernel, on some GPUs
            runs[f"{what}, plain"] = partial(windowed, backend="triton")
        for name, run in runs.items():
            ours = with_gradients(run, q, k, v, do=do)
            yield from compared(name, ours, q, k, v, do, seen)


def packed_cases(dtype):
    lengths = (37, 1, 64, 90) if runtime.INTERPRETED else (37, 1, 640, 1, 999, 128)
    offsets = torch.tensor([0, *lengths], device=runtime.DEVICE).cumsum(0).int()
    q, k, v, do = random(dtype, *[(sum(lengths), 2, 64)] * 4)
    where = (offsets, offsets, max(lengths), max(lengths))
    ours = with_gradients(
        lambda q, k, v: attention_varlen(q, k, v, *where, is_causal=True),
        q, k, v, do=do,
    )  # fmt: skip
    for number, length in enumerate(lengths):
        if length == 1:
            continue  # dq and dk are 0 there: the table above compares its bits
        own = slice(offsets[number], offsets[number + 1])
        found, parts = (
            [x[own].transpose(0, 1).unsqueeze(0) for x in some]
            for some in (ours, (q, k, v, do))
        )
        seen = sees(length, length, length, 0)
        yield from compared(f"packed, {length} tokens", found, *parts, seen)


def decoding_cases(dtype):
    for batch, heads, heads_k, seqlen_k in ((1, 2, 2, 1500), (2, 6, 2, 1111)):
        of_keys = (batch, heads_k, seqlen_k, 64)
        q, k, v = random(dtype, (batch, heads, 1, 64), of_keys, of_keys)
        assert decoding.n_parts(q, k, False) > 0
        seen = sees(1, seqlen_k, seqlen_k, 0)
        ours = attention(q, k, v, enable_gqa=True)
        theirs, truth = (
            by_formula(q, k, v, torch.zeros_like(q), seen, kind)[0]
            for kind in (dtype, torch.float64)
        )
        what = f"decoding, {batch} × {heads} heads on {heads_k}, {seqlen_k:,} keys"
        factor = 8 if dtype == torch.float32 else 2
        yield lab.Case(what, "out", ours, theirs, truth, factor)


# %%


def every_case():
    half = torch.float16 if runtime.INTERPRETED else torch.bfloat16
    for dtype in (torch.float32, half):
        for cases_of in (window_cases, packed_cases, decoding_cases):
            yield from cases_of(dtype)


lab.check("Windows, packed batches and decoding", every_case())

# %%
# What breaks it
# --------------
#
# Each of these mistakes returns numbers that look right.
#
# **A window off by one.** Papers count a window of :math:`W` keys with the query's own, and
# ``left`` does not count it. To see the weights, we make all scores equal and the values unit
# vectors.


def seen_by(query, window):
    q = k = torch.zeros(1, 1, 8, 16, device=runtime.DEVICE)
    v = torch.eye(8, 16, device=runtime.DEVICE).view_as(k)
    weights = attention(q, k, v, is_causal=True, window=window)[0, 0, query, :8]
    return "".join("■" if weight > 0 else "□" for weight in weights.tolist())


W = 3

# %%

# Measuring
rows = [
    {"window": f"({name}, 0)", "keys that query 6 sees": seen_by(6, (left, 0))}
    for name, left in (("W - 1", W - 1), ("W", W))
]
assert [row["keys that query 6 sees"].count("■") for row in rows] == [W, W + 1]
lab.table(rows, f"A window of W = {W} keys")

# %%
# **Offsets shifted by one.** Suppose each offset points one token too far, so that the first token
# of a text belongs to the text before. The first query of a sequence then sees all of the sequence
# before, and the others miss their first key.

lengths = (40, 30, 50)
right = torch.tensor([0, *lengths], device=runtime.DEVICE).cumsum(0).int()
shifted = right + 1
shifted[0], shifted[-1] = 0, right[-1]
q, k, v = torch.randn(3, sum(lengths), 1, 32, device=runtime.DEVICE)
ours, wrong = (
    attention_varlen(q, k, v, offsets, offsets, 60, 60, is_causal=True)
    for offsets in (right, shifted)
)

# %%

# Measuring
rows = []
for number in range(len(lengths)):
    own = slice(right[number], right[number + 1])
    off = (ours - wrong)[own].abs().amax((-1, -2))
    row = {"sequence": number, "queries": len(off), "changed": int((off > 0).sum())}
    row |= {"first query off by": f"{off[0]:.1g}"}
    rows.append(row | {"last query off by": f"{off[-1]:.1g}"})
assert [row["changed"] for row in rows] == [0, 30, 50]
lab.table(rows, "Output with offsets shifted by one, beside the right one")

# %%
# In the first sequence no query changed, so a test of one sequence would pass.
#
# **Parts merged without lse.** A plain average would be right only if all parts had the same sum of
# exponentials. We merge eight parts with small scores, with scores of usual size, and with one key
# that the query matches well.

# Measuring
rows = []
for name, size in (("small", 0.1), ("usual", 1.0), ("one key stands out", 1.0)):
    q = size * torch.randn(1, 1, 1, 64, device=runtime.DEVICE)
    k, v = torch.randn(2, 1, 1, 240, 64, device=runtime.DEVICE)
    if name == "one key stands out":
        k[:, :, 100] = 2 * q[:, :, 0]
    pairs_of = zip(k.chunk(8, dim=2), v.chunk(8, dim=2), strict=True)
    parts = [attention(q, *pair, return_lse=True) for pair in pairs_of]
    outs, lses = (torch.stack(kind) for kind in zip(*parts, strict=True))
    truth = attention(q, k, v)
    good, bad = (
        ((out - truth).norm() / truth.norm()).item()
        for out in (merge(outs, lses)[0], outs.mean(0))
    )
    assert good < 1e-5 < bad
    rows.append(
        {
            "scores": name,
            "by lse, off by": f"{good:.0e}",
            "averaged, off by": f"{100 * bad:.0f} %",
        }
    )
lab.table(rows, "Eight parts merged: error relative to the output")

# %%
# With small scores a loose test would pass.

# %%
# In short
# --------
#
# - The first and the last query of a tile decide which tiles of keys a window loads, and which of
#   them it masks.
# - A program of a packed batch finds its rows by two offsets. Keys past the end of its sequence
#   must read as zeros.
# - For a single query, programs share its keys, and their outputs are merged by the logsumexp of
#   their scores.
# - A window saves less time than scores: tiles at its edges are computed whole, and q, k, v and the
#   output still move through memory, though a part of that may be hidden.

# %%

# Folded: The aims of the beginning, and what was reached
assert (AIM, LEFTS[1]) == (1.15, 1024)
goals = {}  # what 100 % is, the aim, and what each version reached
for passes in PASSES:
    goals[f"window, {passes}"] = (
        "time without a window",
        AIM * SEEN[middle],
        {
            name: cost(name, middle, passes)
            for name in ("FlexAttention", "FlashAttention", "Kernel Book")
        },
    )
for passes in PASSES:
    goals[f"packed, {passes}"] = (
        "time of the padded batch",
        SHARE / OF_PADDED,
        {name: packed_cost(name, passes) for name in (*PACKERS, "Kernel Book")},
    )
for (what, where), aim in zip(AT.items(), (OF_COPY, OF_COPY_GROUPED), strict=False):
    reached = {name: steps.share(name, **where) for name in READERS}
    goals[f"decoding, {what}"] = ("speed of a copy", aim, reached)
board, missed, unknown = [], [], False
for what, (of, aim, reached) in goals.items():
    sign = 1 if of.startswith("speed") else -1  # of times, the least is best
    ours = reached.pop("Kernel Book")
    others = {name: value for name, value in reached.items() if value == value}
    first = max(others, key=lambda name: sign * others[name], default="")
    lost, unknown = sign * ours < sign * aim, unknown or ours != ours
    missed += [what] if lost else []
    board.append(
        {
            "use": what,
            "100 % is": of,
            "aim": f"at {'least' if sign > 0 else 'most'} {in_percent(aim)}",
            "reached": in_percent(ours) + (":\N{NO-BREAK SPACE}missed" if lost else ""),
            "fastest library": f"{in_percent(others[first])}, {first}" if first else "—",
        }
    )
lab.table(board, "Aims, and what was reached; the window has 1,025 keys")

# %%

# Reading
kinds_of = {"window": "windows", "packed": "packed batches", "decoding": "decoding"}
whole = [
    name
    for kind, name in kinds_of.items()
    if not any(what.startswith(kind) for what in missed)
]
lab.read(
    (
        f"{nan}"
        if unknown
        else f"**{len(missed)} of {len(board)} aims are missed**"
        if missed
        else "**All aims are reached**"
    )
    + (f", and only {whole[0]} reached all of its own." if len(whole) == 1 else ".")
)

# %%
# Next is :doc:`/chapters/attention_fp8`. :doc:`/chapters/attention_across_gpus` merges parts in the
# same way, with the keys on several GPUs.
#
# Exercises
# ---------
#
# **1. A shared prompt.** Four users continue one prompt of 256 keys, and each has 40 keys of its
# own. Compute one step of decoding that reads the prompt once, and not once per user.

# %%

# Solution: a shared prompt
#
# The queries of all users become rows of one tile, as those of grouped heads do. Each user's own
# keys are the second part, and the parts are merged by lse.


def shared_prompt(q, prompt_k, prompt_v, k, v):
    """q (users, heads, 1, d), prompt (1, heads, n, d), own keys and values (users, heads, m, d)."""
    together = q.permute(
        2, 1, 0, 3
    )  # (1, heads, users, d): users are queries of one head
    out, lse = attention(together, prompt_k, prompt_v, return_lse=True)
    prompt = out.permute(2, 1, 0, 3), lse.permute(2, 1, 0)
    own = attention(q, k, v, return_lse=True)
    return merge(*(torch.stack(kind) for kind in zip(prompt, own, strict=True)))[0]


users = 4
q = torch.randn(users, 2, 1, 32, device=runtime.DEVICE)
prompt_k, prompt_v = torch.randn(2, 1, 2, 256, 32, device=runtime.DEVICE)
k, v = torch.randn(2, users, 2, 40, 32, device=runtime.DEVICE)
ours = shared_prompt(q, prompt_k, prompt_v, k, v)
k_all, v_all = (
    torch.cat((prompt.expand(users, -1, -1, -1), own), dim=2)
    for prompt, own in ((prompt_k, k), (prompt_v, v))
)
theirs, truth = (
    F.scaled_dot_product_attention(*(x.to(dtype) for x in (q, k_all, v_all)))
    for dtype in (torch.float32, torch.float64)
)
lab.check(
    "A shared prompt", [lab.Case("4 users", "forward", ours, theirs, truth, factor=8)]
)

# %%
# **2. Caches of different length.** Five users have caches of 7, 300, 64, 1 and 129 keys, packed
# into one tensor. Compute one step for all of them in one call.

# %%

# Solution: decoding with caches of different length
#
# Each sequence has one query, so its offsets count up by one. A causal mask would change nothing,
# because it is aligned to the last key: the only query sees all keys of its own sequence.

caches = (7, 300, 64, 1, 129)
of_queries = torch.arange(len(caches) + 1, device=runtime.DEVICE).int()
of_keys = torch.tensor([0, *caches], device=runtime.DEVICE).cumsum(0).int()
q = torch.randn(len(caches), 2, 32, device=runtime.DEVICE)
k, v = torch.randn(2, sum(caches), 2, 32, device=runtime.DEVICE)
ours = attention_varlen(q, k, v, of_queries, of_keys, 1, max(caches))
cases = []
for number, length in enumerate(caches):
    own = slice(of_keys[number], of_keys[number + 1])
    one = [x.transpose(0, 1)[None] for x in (q[number : number + 1], k[own], v[own])]
    theirs, truth = (
        F.scaled_dot_product_attention(*(x.to(dtype) for x in one))
        for dtype in (torch.float32, torch.float64)
    )
    found = ours[number : number + 1].transpose(0, 1)[None]
    cases.append(lab.Case(f"{length} keys", "forward", found, theirs, truth, factor=8))
lab.check("Caches of different length", cases)

# %%
# **3. A window with sinks.** Models with a window work better if every query also sees the first
# few tokens, the *attention sinks*. Let query :math:`i` see the first four keys and the last ``left
# + 1``, with ``merge`` and ``attention(..., return_lse=True)`` alone.

# %%

# Solution: a window with sinks
#
# Cut off the first four tokens. The first four queries see only each other, causally. All other
# queries see all four sinks, without a mask, and a causal window over the keys that are left. These
# two sets have no key in common.


def with_sinks(q, k, v, left, sinks=4):
    head = attention(*(x[:, :, :sinks] for x in (q, k, v)), is_causal=True)
    later = q[:, :, sinks:]
    both = (
        attention(later, k[:, :, :sinks], v[:, :, :sinks], return_lse=True),
        attention(
            later, k[:, :, sinks:], v[:, :, sinks:],
            is_causal=True, window=(left, 0), return_lse=True,
        ),
    )  # fmt: skip
    tail, _ = merge(*(torch.stack(kind) for kind in zip(*both, strict=True)))
    return torch.cat((head, tail), dim=2)


q, k, v = torch.randn(3, 1, 2, 120, 32, device=runtime.DEVICE)
ours = with_sinks(q, k, v, 16)
i = torch.arange(120, device=runtime.DEVICE)
seen = sees(120, 120, 16, 0) | ((i < 4) & (i <= i.unsqueeze(1)))
theirs, truth = (
    F.scaled_dot_product_attention(*(x.to(dtype) for x in (q, k, v)), attn_mask=seen)
    for dtype in (torch.float32, torch.float64)
)
lab.check(
    "A window with sinks",
    [lab.Case("120 tokens", "forward", ours, theirs, truth, factor=8)],
)

# %%
# References
# ----------
#
# - Dao. *FlashAttention-2: faster attention with better parallelism and work partitioning.* ICLR
#   2024.
# - Dao, Haziza, Massa, Sizov. *Flash-Decoding for long-context inference.* 2023.
# - Ainslie and others. *GQA: training generalized multi-query transformer models from multi-head
#   checkpoints.* EMNLP 2023.
# - Dong, Feng, Guessous, Liang, He. *Flex Attention: a programming model for generating optimized
#   attention kernels.* arXiv:2412.05496, 2024.
# - Xiao, Tian, Chen, Han, Lewis. *Efficient streaming language models with attention sinks.* ICLR
#   2024.
# - Stanford CS336. *Language modeling from scratch*, assignment 2: systems.

# %%

# Closing
of_windows = SEEN[middle] / cost("Kernel Book", middle)
of_packed = SHARE / packed_cost("Kernel Book", "forward")
of_copy = steps.share("Kernel Book", **long)
lab.finish(
    f"per useful score, a window runs at {of_windows:.0%} of the speed of attention without one, a "
    f"packed batch at {of_packed:.0%} of that of a padded one, and decoding reads its "
    f"cache at {of_copy:.0%} of the speed of a copy"
)
