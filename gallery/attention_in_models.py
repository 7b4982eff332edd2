"""
Attention as models use it
==========================

Models seldom let every token attend to every other. Many layers look back only over a window,
training packs texts of all lengths into one batch, and a model that generates text asks one query
at a time. *What does each of these cost if a kernel computes only what is needed?*

You will learn

- how to find, from two bounds, the tiles that a sliding window needs;
- how to find a program's sequence in a packed batch, without padding;
- how to split the keys of one query over the whole GPU and merge the parts.

Without an NVIDIA GPU, the checks run in Triton's :term:`interpreter`, and the speeds are those of a
recorded run.
"""

# sphinx_gallery_thumbnail_number = 3
import inspect
import statistics
from functools import partial

import numpy
import torch
import torch.nn.functional as F
from matplotlib.patches import PathPatch, Rectangle
from matplotlib.path import Path

from kernelbook import attention, attention_varlen, lab, runtime
from kernelbook.lab.attention_bench import flash, flex, library, sdpa, timed
from kernelbook.ops.attention import decoding, tuned, varlen
from kernelbook.ops.hopper import backward_choice, choice
from kernelbook.small import attention_in_models as small

lab.start("attention_in_models", "kernelbook.ops.attention")

# %%
# The problem in PyTorch
# ----------------------
#
# The simplest way to express windows and packed texts in PyTorch is a mask, a table that says which
# query sees which key:


def standard_attention(q, k, v, seen):
    scores = (q * q.shape[-1] ** -0.5) @ k.mT
    scores = scores.masked_fill(~seen, -torch.inf)
    return torch.softmax(scores, dim=-1) @ v


# %%
# The mask changes the result but not the work, because it discards scores that have already been
# computed. :doc:`Our kernel so far </chapters/attention_fast>` skips the tiles that a causal mask
# hides, but no others. In the drawing, queries go down and keys to the right, and the kernel
# computes the grey scores in vain:

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


used = sum(pairs(length, length) for length in LENGTHS)
SHARE = used / (
    SEQUENCES * pairs(LONGEST, LONGEST)
)  # of the scores of the padded batch

# %%


# Drawing
def three_uses(axes):
    """To scale: a window, the texts of a padded batch, and the one row of a single query."""
    ink, grey = lab.colour("Kernel Book"), lab.colour("matmul")
    words = {"fontsize": 10, "ha": "center", "va": "center"}

    def triangle(x, y, side):
        return Path([(x, y), (x, y + side), (x + side, y + side), (x, y)])

    side = 10
    wide = side * (LEFTS[1] + 1) / TOKENS
    band = Path([(0, 0), (0, wide), (side - wide, side), (side, side), (0, 0)])
    where = [(14.3 + 1.75 * (n % 6), 1.72 * (n // 6)) for n in range(SEQUENCES)]
    texts = zip(where, LENGTHS, strict=True)
    under_the_mask = [triangle(0, 0, side), *(triangle(*at, 1.4) for at in where)]
    needed = [band, *(triangle(*at, 1.4 * n / LONGEST) for at, n in texts)]
    for shapes, look in (
        (under_the_mask, {"fc": grey, "alpha": 0.3}),
        (needed, {"fc": ink}),
    ):
        axes.add_patch(PathPatch(Path.make_compound_path(*shapes), lw=0, **look))
    axes.add_patch(Rectangle((28, 4.9), side, 0.2, fc=ink))
    shares = (pairs(TOKENS, LEFTS[1]) / pairs(TOKENS, TOKENS), SHARE, 1)
    for x, name, size, share in zip(
        (side / 2, 19.4, 28 + side / 2),
        ("a window", f"{SEQUENCES} padded texts", "one query"),
        (
            f"{LEFTS[1] + 1:,} of {TOKENS:,} keys",
            f"up to {LONGEST:,} tokens",
            f"{KEYS:,} keys",
        ),
        shares,
        strict=True,
    ):
        axes.text(x, -2.9, name, **words | {"fontsize": 11, "fontweight": "bold"})
        axes.text(x, -1.4, size, **words)
        axes.text(x, side + 1.5, f"{100 * share:.0f} % needed", **words)
    axes.set(xlim=(-0.5, 38.5), ylim=(12.2, -3.6), xticks=[], yticks=[], aspect="equal")
    axes.spines[:].set_visible(False)
    axes.grid(visible=False)


lab.sketch(
    "Three uses of attention, and the scores that they need",
    f"Queries go down and keys to the right. A window needs a narrow band, "
    f"{100 * pairs(TOKENS, LEFTS[1]) / pairs(TOKENS, TOKENS):.0f} % of the triangle under a causal "
    f"mask. Of {SEQUENCES} padded texts, each needs a smaller triangle in the corner of its own, "
    f"together {100 * SHARE:.0f} %. One query needs all scores of a single row.",
    three_uses,
    height=2.4,
)

# %%
# The single query has another problem. The kernel launches one program for every 128 queries of a
# head, so 16 heads with one query each get 16 programs, and most of a GPU's more than a hundred
# :term:`SMs <SM>` have nothing to do.

# %%
# Sliding windows
# ---------------
#
# In a *sliding window*, a query sees its own key, the ``left`` keys before it and the ``right``
# keys after it, so work grows with the length of a text and not with its square. With the window
# (``left``, ``right``) = (2, 0), query 6 sees keys 4, 5 and 6. Query :math:`i` sees key :math:`j`
# if
#
# .. math::
#
#    i - \text{left} \;\le\; j \;\le\; i + \text{right}
#
# A causal mask has :math:`\text{right} = 0` and no left bound.
#
# **One tile, by hand.** Take tiles of 4 queries and 4 keys, and the window (9, 0). Of the queries
# 12 to 15, the first sees keys 3 to 12, and the last sees keys 6 to 15. Each dot is a key that a
# query sees:


# Drawing
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
            wide = 3.85 if unseen else 4  # two dashed lines do not meet
            axes.add_patch(
                Rectangle((tile, top), wide, 4, fill=False, ec=ink, ls=style)
            )
            axes.text(tile, top - 0.2, tile, fontsize=10, ha="center")
            for query in range(4):
                for key in range(tile, tile + 4):
                    if 0 <= 12 + query - key <= left:
                        axes.plot(key + 0.5, top + query + 0.5, "o", color=ink, ms=4)
        axes.text(16, top - 0.2, "16", fontsize=10, ha="center")
        axes.text(-0.8, top - 0.2, "key", fontsize=10, ha="right")
        for query in range(4):
            words = {"fontsize": 10, "ha": "right", "va": "center"}
            axes.text(-0.3, top + query + 0.5, f"query {12 + query}", **words)
        names = {}
        for name in ("first", "whole", "cut", "end"):
            names.setdefault(at[name], []).append(name)
        for key, named in names.items():
            words = {"fontsize": 10, "ha": "center", "va": "top"}
            axes.text(key, top + 4.2, "↑", **words)
            axes.text(key, top + 4.9, ", ".join(named), **words)
    axes.set(xlim=(-3, 18.2), ylim=(14.8, -2.6), xticks=[], yticks=[], aspect="equal")
    axes.spines[:].set_visible(False)
    axes.grid(visible=False)


lab.sketch(
    "Queries 12 to 15, and the tiles of keys that they need",
    "Four queries over four tiles of keys, with a dot for each key that a query sees. With the "
    "window (9, 0) only the third tile is whole; the others are masked. With the window (2, 0) the "
    "first two tiles are not loaded, and the last two are masked.",
    band,
    height=4.4,
)

# %%
# All four queries see the keys 6 to 12, so the blue tile needs no mask. Orange tiles are masked,
# and dashed tiles are never loaded. Two queries are enough to know this:
#
# .. admonition:: Key idea
#    :class: kb-key
#
#    Both bounds rise with :math:`i`, so the first and last queries of a tile decide which keys
#    *some* of its queries see, and which *all* of them see.
#
# The loop over keys therefore splits into three, because only its first and last tiles need a mask.
# The bounds of the three loops are rounded to tiles:

# Reading
lab.table(
    [
        {
            "for queries 12 to 15": what,
            "key": f"{name} = {key}",
            "rounded to a tile": way,
            "bound of the loops": f"{to} = {ours[to]}",
        }
        for what, name, key, way, to in (
            (
                "first key that some see",
                "first_some",
                ours["first_some"],
                "down",
                "first",
            ),
            (
                "first key that all see",
                "first_all",
                ours["first_all"],
                "up",
                "whole",
            ),
            (
                "one past the last key that all see",
                "end_all",
                ours["end_all"],
                "down",
                "cut",
            ),
            ("one past the last key that some see", "end", ours["end"], "no", "end"),
        )
    ],
    "Where the three loops begin and end, for one tile of queries",
)

# %%
# The window (2, 0) leaves no tile whole, and these rules alone would give ``whole`` = 16 and
# ``cut`` = 12. The first and last loops would then both add keys 12 to 15, so the kernel never lets
# ``cut`` fall below ``whole``.
#
# **The kernel.** This version handles one head in float32 with a causal window (``right`` = 0), and
# ``BLOCK`` divides the length. A program owns the queries from ``first_query`` to ``last_query``,
# and keeps the running maximum ``m_i``, sum ``l_i`` and output ``acc`` of
# :doc:`/chapters/attention_forward`. It first computes the bounds in the table:

lab.source(small.window_kernel, "stages")

# %%
# Then it runs the three loops:

lab.source(small.window_kernel, "loops")

# %%
# Each calls ``attend`` for one tile of keys:

lab.source(small.attend)

# %%
# ``update`` is the function from :doc:`/chapters/attention_forward` without its guard against
# :math:`-\infty`, because here ``m_i`` begins at :math:`-10^{30}`, which is *finite*. In the
# figure, query 15 sees none of the keys in its first tile, 0 to 3. Had ``m_i`` begun at
# :math:`-\infty`, their weights would be :math:`e^{-\infty + \infty}`, which is NaN. As it is,
# they are 0.

# Folded: The whole kernel, update, and the launch
lab.listing(
    {
        "The kernel": small.window_kernel,
        "The update": small.update,
        "The launch, with a program for each tile of queries": small.window_attention,
    }
)

# %%

# Measuring
left = 20
q, k, v = torch.randn(3, 64, 32, device=runtime.DEVICE)
out = small.window_attention(q, k, v, left)


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
seen = (behind >= 0) & (behind <= left)
errors = {f"a window of ({left}, 0), 64 tokens": errors_of(out, q, k, v, seen)}

# %%
# **Backward.** The gradients of a tile of keys need the queries that see them, which the same
# inequality gives when solved for the query:
#
# .. math::
#
#    j - \text{right} \;\le\; i \;\le\; j + \text{left}
#
# The bounds of that loop over queries come from the first and last keys of the tile.
#
# .. dropdown:: In the operator: bounds on both sides, and lengths that no tile divides
#
#    If there are more keys than queries, the last query is aligned with the last key, so both
#    bounds shift by :math:`\text{seqlen}_k - \text{seqlen}_q`. The operator computes where the
#    three loops begin in ``key_stages``, from the first key that a query sees and one past the
#    last. The bounds are passed at run time, so a new window triggers no compilation; only the
#    existence of each bound (``HAS_LEFT``, ``HAS_RIGHT``) is compiled in.
#
#    .. literalinclude:: /../src/kernelbook/ops/attention/scope.py
#       :language: python
#       :pyobject: key_stages
#       :start-at: # -- stages
#       :dedent:
#
#    Its ``attend`` is the loop of :doc:`/chapters/attention_fast`, which weighs each tile of keys
#    and computes the scores of the next. The tile that begins at ``last`` has no successor, so the
#    loops end before it and the kernel weighs it separately. For each query, ``first_visible`` is
#    the first key that it sees, and ``n_visible`` is one past the last.
#
#    .. literalinclude:: /../src/kernelbook/ops/attention/forward.py
#       :language: python
#       :pyobject: attention_fwd_kernel
#       :start-at: # -- attend
#       :end-before: # -- end
#       :dedent:

# %%
# How fast are windows?
# ~~~~~~~~~~~~~~~~~~~~~
#
# *Plain Triton* is the operator's version of this chapter's kernel, and *Kernel Book* is what
# ``attention`` runs by default, on a Hopper GPU the faster kernel of
# :doc:`a later chapter </chapters/attention_hopper>`. FlexAttention is PyTorch's function that
# compiles a mask, and FlashAttention is version 4. Unless noted, timings are in bfloat16 with 16
# heads of ``head_dim`` 128.
#
# The text has 16,384 tokens. The dashed line marks the share of the scores under a causal mask that
# a window of 1,025 keys (``left`` = 1,024) needs.

# Measuring
BF16 = torch.bfloat16
PASSES = {"forward": 4, "backward": 10}  # FLOPs for each score and number of a head


def sees(seqlen_q, seqlen_k, left, right):
    i = torch.arange(seqlen_q, device=runtime.DEVICE).unsqueeze(1)
    own = i + seqlen_k - seqlen_q
    j = torch.arange(seqlen_k, device=runtime.DEVICE)
    return (j >= own - left) & (j <= own + right)


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
        windows.milliseconds_at(of, left=left, passes=passes)
        for of in (name, "no window")
    )
    return took / full


def bars(axes, groups, names, needed, what):
    """Bars of time in percent of ``what``, with a dashed line at the share that is needed.

    groups: for each title, the percent and the milliseconds of each name; names: all of its names.
    The longest comes first.
    """
    down, ticks = 0, []
    every = [percent for found in groups.values() for percent, _ in found.values()]
    longest = max(every, default=100)
    for title, found in groups.items():
        axes.text(
            longest / 100, down - 0.1, title, fontsize=11, color=lab.colour("matmul")
        )
        top = down + 0.35
        for name in sorted(
            names[title], key=lambda name: -found.get(name, (2 * longest, 0))[0]
        ):
            down += 1
            ticks.append((down, name))
            if name not in found:
                axes.text(1, down, "absent", va="center", fontsize=10)
                continue
            percent, ms = found[name]
            ink = lab.colour("Kernel Book" if name.startswith("Kernel") else "matmul")
            pale = 0.45 if name.startswith("padded") else 1
            axes.barh(down, percent, color=ink, height=0.72, alpha=pale)
            crossed = (
                0 <= 100 * needed - percent < longest / 4
            )  # the label would be crossed
            end = 100 * needed + longest / 60 if crossed else percent
            end += longest / 45
            words = {"va": "center", "fontsize": 10}
            time = f"{ms:.{3 if ms < 1 else 2}f} ms"
            axes.text(end, down, f"{percent:.0f} %, {time}", **words)
        at = [100 * needed] * 2
        axes.plot(at, [top, down + 0.5], "--", color=lab.colour("PyTorch"), lw=1.6)
        down += 1.4
    axes.text(100 * needed, down - 0.35, "needed", ha="center", fontsize=10)
    axes.set_yticks(*zip(*ticks, strict=True))
    axes.tick_params(axis="y", length=0)
    axes.set(
        xlim=(0, 1.38 * longest),
        ylim=(down - 0.2, -0.7),
        xlabel=f"% of the time of {what}",
    )
    axes.grid(axis="y", visible=False)
    axes.figure.set_size_inches(5.4, 1.1 + 0.31 * (len(ticks) + 1.4 * len(groups)))


def bars_in_words(groups, needed, what):
    """The same for those who do not see it."""
    found = (
        f"{title}: "
        + ", ".join(f"{name} {percent:.0f}" for name, (percent, _) in of.items())
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
NO_WINDOW = "Kernel Book without a window"
lab.draw(
    windows,
    "What a window of 1,025 keys costs",
    lambda rows: bars_in_words(window_times(rows), SEEN[middle], NO_WINDOW),
    lambda axes, rows: bars(
        axes,
        window_times(rows),
        dict.fromkeys(PASSES, RUN),
        SEEN[middle],
        NO_WINDOW,
    ),
)

# %%


# Reading
def in_percent(value, digits=0):
    """A share in a table, or a dash where none was measured."""
    return "—" if value != value else f"{100 * value:.{digits}f} %"


def more_time(much, digits=0):
    """By how many percent a time is longer or shorter."""
    return f"{100 * abs(much):.{digits}f} % {'more' if much >= 0 else 'less'} time"


def digits_for(aim, *costs):
    """How many digits tell the costs from their aim, in percent."""
    apart = (
        digits
        for digits in range(4)
        if all(f"{cost:.{digits}%}" != f"{aim:.{digits}%}" for cost in costs)
    )
    return next(apart, 3)


def against(share, allowed, costs, when=""):
    """What became of the aim, to take at most ``allowed`` times the share of the scores."""
    if any(cost != cost for cost in costs.values()):
        return f"{nan}"
    aim = allowed * share
    met = [passes for passes in costs if costs[passes] <= aim]
    verdict = (
        f"reached it {met[0]} but missed it {next(p for p in PASSES if p not in met)}"
        if len(met) == 1
        else "reached it in both passes"
        if met
        else "missed it in both passes"
    )
    return (
        f"Our aim{when} was at most {100 * aim:.1f} %; we {verdict}."
    )


MORE = {  # of our time than of FlashAttention's
    (passes, left): cost("Kernel Book", left, passes)
    / cost("FlashAttention", left, passes)
    - 1
    for passes in PASSES
    for left in LEFTS
}
HAS_FLASH = all(much == much for much in MORE.values())
took = {passes: cost("Kernel Book", middle, passes) for passes in PASSES}
dense = cost("SDPA, mask", middle) / took["forward"]
beside = {
    passes: f"{100 * abs(MORE[passes, middle]):.0f} % "
    + ("more" if MORE[passes, middle] >= 0 else "less")
    for passes in PASSES
    if HAS_FLASH
}
lab.read(
    f"**{100 * SEEN[middle]:.0f} % of the scores take {100 * took['forward']:.0f} % of the time "
    f"forward.** {against(SEEN[middle], AIM, took, ', set before we measured,')}"
)

# %%

# Reading
lab.read(
    (
        f"Our kernel takes {beside['forward']} time than FlashAttention forward and "
        f"{beside['backward']} backward. "
        if HAS_FLASH
        else "We have no times of FlashAttention. "
    )
    + "With a mask instead of a window, PyTorch's `scaled_dot_product_attention` (SDPA) takes "
    f"{dense:.0f} times as long as our kernel forward, too long to draw."
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
    f"{name} is faster: ours takes {100 * (own / spent - 1):.0f} % longer"
    for name, spent in times.items()
    if spent < 0.99 * own and name != "plain Triton"
]

# %%

# Folded: All windows, and without a window the test of Stanford's course CS336
lab.together(
    lab.table(
        [
            {"version": "share of the scores"}
            | {f"{left + 1:,} keys": in_percent(SEEN[left], 1) for left in LEFTS}
        ]
        + [
            {"version": f"{name}, {passes}"}
            | {
                f"{left + 1:,} keys": in_percent(cost(name, left, passes), 1)
                for left in LEFTS
            }
            for passes in PASSES
            for name in ("SDPA, mask", *RUN)
        ],
        "Time, in percent of Kernel Book without a window",
    ),
    lab.read(
        f"Over these {len(LEFTS)} windows and both passes, our kernel takes at worst "
        f"{more_time(max(MORE.values()))} than FlashAttention."
    )
    if HAS_FLASH
    else None,
    lab.read(
        "Stanford's course CS336 ranks its students' kernels by the time of both passes without a "
        "window, at `head_dim` 64, including the host's launch time. "
        + (
            f"In this test {', and '.join(quicker)}."
            if quicker
            else f"In this test no library beats our {own:.2f} ms."
        )
        + "".join(
            f" We have no time for {row['version']}: {why(row['reason'])}."
            for row in test.rows
            if row["reason"]
        )
    ),
    lab.table(
        [
            {"version": row["version"], "milliseconds": row["milliseconds"]}
            | {"peak, GiB": row["peak, GiB"]}
            for row in test.rows
        ],
        "Forward and backward, causal, 16 heads, 16,384 tokens, head_dim 64, bfloat16",
    ),
)

# %%
# Why does a window take more than its share?
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# We split the time of *Kernel Book* in three: *needed scores*, *masked scores*, which are computed
# in vain, and *the rest*. The time per computed score without a window gives an estimate of the
# first two. A window of one key needs almost no scores.


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


def computed(left, block_m, block_n):
    """How many scores are computed for each that is needed, with tiles of this shape."""
    tiles = sum(
        -(-(start + block_m) // block_n) - max(start - left, 0) // block_n
        for start in range(0, TOKENS, block_m)
    )
    return tiles * block_m * block_n / pairs(TOKENS, left)


def to_one(value):
    """Rounded, so that the columns of the table add up."""
    return value if value != value else round(value)


SHAPE = 64 * choice.CONFIGS[128].consumers, choice.CONFIGS[128].block_n


def spent(windows, traffic):
    """For each window the microseconds of its forward pass, split into three."""
    found = {}
    for left in (0, *LEFTS):
        at = {"left": left, "passes": "forward"}
        full = 1e3 * windows.milliseconds_at(
            "no window", **at | {"left": left or short}
        )
        measured = 1e3 * (
            windows.milliseconds_at("Kernel Book", **at)
            if left
            else traffic.milliseconds_at("Kernel Book", keys=1)
        )
        needed = full * SEEN[left] / computed(TOKENS, *SHAPE)
        masked = needed * (computed(left, *SHAPE) - 1)
        needed, masked, measured = map(to_one, (needed, masked, measured))
        found[left] = {
            "the rest": measured - needed - masked,
            "masked scores": masked,
            "needed scores": needed,
            "measured": measured,
        }
    return found


def keys_of(left):
    return f"{left + 1:,} key{'s' * (left > 0)}"


# %%


# Drawing
SHOWN = (0, short, middle)  # the widest window would be three times as long


def spent_of(rows):
    """The same of the GPU on which these rows of `traffic` were measured, and its copy."""
    known = {s.provenance["slug"]: s for s in (windows, *windows.elsewhere) if s.rows}
    here = next(s for s in (traffic, *traffic.elsewhere) if s.rows == rows)
    there = known[here.provenance["slug"]]
    return spent(there, here), 1e3 * here.milliseconds_at("copy", keys=1)


def stacked(axes, rows):
    """What a window cannot shrink, from the left, and below the time of a copy."""
    inks = {
        "the rest": "matmul",
        "masked scores": "PyTorch",
        "needed scores": "Kernel Book",
    }
    found, copied = spent_of(rows)
    words = {"va": "center", "fontsize": 10}
    longest = max(found[left]["measured"] for left in SHOWN)
    for place, left in enumerate(SHOWN):
        begin = 0
        for name, ink in inks.items():
            width, look = found[left][name], {"color": lab.colour(ink), "alpha": 0.35}
            axes.barh(place, width, 0.7, begin, label=None if place else name, **look)
            if width > longest / 20:
                at = begin + width / 2
                axes.text(at, place, f"{width:.0f}", ha="center", **words)
            begin += width
        end = begin + longest / 60
        axes.text(end, place, f"{found[left]['measured']:.0f} µs", **words)
    last = len(SHOWN)
    axes.barh(last, copied, 0.7, fill=False, ec=lab.colour("copy"), ls="--", lw=1.4)
    axes.text(copied + longest / 60, last, f"{copied:.0f} µs", **words)
    names = [*map(keys_of, SHOWN), "copy of as\nmany bytes"]
    axes.set_yticks(range(last + 1), names, multialignment="right")
    axes.tick_params(axis="y", length=0)
    axes.set(xlim=(0, 1.16 * longest), ylim=(last + 0.6, -0.6), xlabel="µs")
    axes.grid(axis="y", visible=False)
    axes.legend(loc="upper right", fontsize=10)
    axes.figure.set_size_inches(5.4, 2.8)


def stacked_in_words(rows):
    found, copied = spent_of(rows)
    each = (
        f"{keys_of(left)}: "
        + ", ".join(f"{name} {value:.0f}" for name, value in found[left].items())
        for left in SHOWN
    )
    return (
        f"Stacked bars of microseconds. {'; '.join(each)}. A copy takes {copied:.0f}."
    )


lab.draw(traffic, "Where the time of a window goes, forward", stacked_in_words, stacked)

# %%


# Reading
by_window = spent(windows, traffic)
copied = 1e3 * traffic.milliseconds_at("copy", keys=1)
in_middle = by_window[middle]
beyond = in_middle["the rest"] + in_middle["masked scores"]
lab.read(
    f"**With {keys_of(middle)}, an estimated {beyond:.0f} of {in_middle['measured']:.0f} µs do not "
    "go to needed scores.**"
)


# %%


# Reading
def masked_of_query(left, *shape):
    """How many masked scores the kernel computes for a query, on average."""
    return (computed(left, *shape) - 1) * pairs(TOKENS, left) / TOKENS


of_query = [masked_of_query(left, *SHAPE) for left in SHOWN]
lab.read(
    f"In each of these windows, the kernel masks {min(of_query):.0f} to {max(of_query):.0f} scores "
    f"per query, because a tile of {SHAPE[0]} queries sees {SHAPE[0] - 1} keys more than each of "
    "its queries. So masked scores weigh most in a short window."
)

# %%

# Folded: The same numbers, with the widest window, and the rest
alone, *others = (found["the rest"] for found in by_window.values())
WINDOWED = choice.choose(128, "window", middle + 1)
UNBOUNDED = choice.choose(128, "causal", TOKENS)
lab.together(
    lab.table(
        [
            {"window": keys_of(left)}
            | {
                name: "—" if found[name] != found[name] else f"{found[name]:.0f}"
                for name in ("needed scores", "masked scores", "the rest", "measured")
            }
            for left, found in by_window.items()
        ],
        "Where the time of a window goes, forward (µs)",
    ),
    lab.read(
        "The time per computed score is the time without a window divided by all scores computed "
        "there, including those that the causal mask hides. "
        + (
            "We assume that a window changes it little, although the kernel has one program per SM "
            "with a window, and one per tile without. "
            if WINDOWED.persistent and not UNBOUNDED.persistent
            else "We assume that a window changes it little. "
        )
        + f"Together, q, k, v and the output occupy {MOVED / 1e6:.0f} MB."
    ),
    lab.read(
        f"The rest is {alone:.0f} µs with one key and {min(others):.0f} to {max(others):.0f} µs "
        f"with more, and copying as many bytes takes {copied:.0f} µs. The rest may be memory "
        "traffic, which longer windows could hide behind their matmuls."
    ),
)

# %%
# Packed sequences
# ----------------
#
# *Padding* extends every text in a batch to the length of the longest. *Packing* lays the texts end
# to end in one tensor. A second tensor, ``cu_seqlens``, lists the *offsets* at which the sequences
# begin and the last one ends.


# Drawing
DRAWN, TILE_ROWS = (5, 2, 8, 3), 4


def packing(axes):
    """Four sequences, padded and packed, and the tiles of queries that each of them has."""
    ink, grey = lab.colour("Kernel Book"), lab.colour("matmul")
    small_words = {"fontsize": 10, "va": "center"}

    def token(x, y, number, real=True):
        tint = {"facecolor": ink, "alpha": 0.34 if number % 2 else 0.14}
        if real:
            axes.add_patch(Rectangle((x, y), 0.88, 1.2, **tint))
        style = {"ec": ink if real else grey, "ls": "-" if real else ":", "lw": 0.9}
        axes.add_patch(Rectangle((x, y), 0.88, 1.2, fill=False, **style))

    axes.text(
        0, -0.9, "padded: 4 sequences of up to 8 tokens", fontsize=11, fontweight="bold"
    )
    for number, length in enumerate(DRAWN):
        axes.text(
            -0.4, 1.5 * number + 0.6, f"sequence {number}", ha="right", **small_words
        )
        for place in range(max(DRAWN)):
            token(place, 1.5 * number, number, place < length)
    axes.text(8.6, 2.4, "14 of 32 rows", **small_words)
    axes.text(8.6, 3.6, "are padding", **small_words)
    axes.text(0, 8.0, "packed: 18 rows", fontsize=11, fontweight="bold")
    begin = 0
    axes.text(-0.4, 9.4, "offset", ha="right", **small_words)
    axes.text(-0.4, 12.6, "tile 0 of each", ha="right", **small_words)
    axes.text(-0.4, 14.0, "tile 1 of each", ha="right", **small_words)
    for number, length in enumerate(DRAWN):
        axes.text(begin, 9.4, begin, ha="center", **small_words)
        for place in range(length):
            token(begin + place, 10.2, number)
        for tile in range(2):
            y, first = 12.6 + 1.4 * tile, begin + TILE_ROWS * tile
            last = begin + min(TILE_ROWS * (tile + 1), length)
            if first >= last:
                axes.text(
                    begin, y, "returns", color=grey, style="italic", **small_words
                )
                continue
            ends = (first + 0.14, last - 0.32)
            axes.plot(ends, [y, y], color=ink, lw=2)
            for end in ends:
                axes.plot([end, end], [y - 0.3, y + 0.3], color=ink, lw=2)
        begin += length
    axes.text(begin, 9.4, begin, ha="center", **small_words)
    axes.set(xlim=(-3.6, 18.6), ylim=(15.4, -1.6), xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
    axes.grid(visible=False)


assert (sum(DRAWN), len(DRAWN) * max(DRAWN)) == (18, 32)
lab.sketch(
    "Four sequences, padded and packed",
    "Above, four sequences of 5, 2, 8 and 3 tokens padded to 8: 14 of 32 rows are padding. Below, "
    "the same 18 tokens in one row, with the offsets 0, 5, 7, 15 and 18. Sequences 0 and 2 have "
    "two tiles of 4 queries, and sequences 1 and 3 one; their second programs return.",
    packing,
    height=3.6,
)

# %%

# Reading
real, box = sum(LENGTHS), SEQUENCES * LONGEST
lab.read(
    "**Padding wastes more scores than rows**, because scores grow with the square of the length. "
    f"In the padded batch of {SEQUENCES} texts, {100 * real / box:.0f} % of the rows are tokens, "
    f"but only {100 * SHARE:.0f} % of the scores are needed."
)

# %%
# **How a program finds its sequence.** The offsets lie in GPU memory, and the host would have to
# wait to read them. So the caller also passes the length of the longest sequence, and each sequence
# gets as many programs as the longest needs. A program reads two neighbouring offsets, and returns
# at once if its tile lies past the end:

lab.source(small.packed_kernel, "place")

# %%
# After advancing all pointers by ``begin`` rows, the program is a causal kernel for a single text,
# with one difference: a tile may extend past the end of the sequence, or even of the tensor. The
# next sequence's keys would do no harm, because the causal mask replaces their scores. Its values
# would if one were NaN, because even a weight of zero times NaN is NaN. So both loads are masked,
# and what lies past the end reads as zero:
#
# .. literalinclude:: /../src/kernelbook/small/attention_in_models.py
#    :language: python
#    :pyobject: packed_kernel
#    :start-at: keys = start
#    :end-before: s = tl.dot
#    :dedent:
#
# The queries are loaded, and the output is stored, under the mask ``own``:
#
# .. literalinclude:: /../src/kernelbook/small/attention_in_models.py
#    :language: python
#    :pyobject: packed_kernel
#    :start-at: own =
#    :end-before: acc =
#    :dedent:

# Measuring
offsets = torch.tensor([0, 20, 28, 60, 72], device=runtime.DEVICE).int()
q, k, v = torch.randn(3, 72, 32, device=runtime.DEVICE)
out = small.packed_attention(q, k, v, offsets, longest=32)
which = torch.arange(4, device=runtime.DEVICE).repeat_interleave(offsets.diff())
i = torch.arange(72, device=runtime.DEVICE)
seen = (which[:, None] == which) & (i[:, None] >= i)
errors["a packed batch of 4 sequences, 72 tokens"] = errors_of(out, q, k, v, seen)

# %%

# Folded: The whole kernel and its launch, and the operator's kernel
lab.listing(
    {
        "The kernel": small.packed_kernel,
        "The launch": small.packed_attention,
        "In the operator: which rows belong to a sequence": varlen.sequence,
        "In the operator: the kernel": varlen.attention_varlen_fwd_kernel,
    }
)

# %%


# Reading
def slots(offsets, rows):
    """At which slot each sequence begins, and how many there are, with so many rows in a tile."""
    return [begin // rows + number for number, begin in enumerate(offsets)]


def tiles(lengths, rows):
    return sum(-(-length // rows) for length in lengths)


for rows_of_tile in (4, 64, 128):
    for some in (DRAWN, LENGTHS, (0, 1, 0, 127, 128, 129, 256, 64, 4)):
        ends = [sum(some[:number]) for number in range(len(some) + 1)]
        begins = slots(ends, rows_of_tile)
        assert begins[-1] == sum(some) // rows_of_tile + len(some)
        for length, begin, end in zip(some, begins, begins[1:], strict=False):
            assert 0 <= end - begin - tiles([length], rows_of_tile) <= 1
in_grid, in_slots = SEQUENCES * (LONGEST // 128), sum(LENGTHS) // 128 + SEQUENCES
needs = tiles(LENGTHS, 128)
assert 64 * choice.VARLEN_DEFAULTS[128].consumers == 128
lab.read(
    f"**With tiles of 128 queries, {in_grid - needs:,} of {in_grid:,} programs per head return at "
    "once** for the texts that we time."
)

# %%
# .. dropdown:: On Hopper GPUs, fewer programs; in all operators, zeros past the end of a sequence
#
#    In our kernels for Hopper GPUs, sequence ``b`` begins at slot ``cu[b] // 128 + b``, where
#    ``cu`` holds the offsets, and has as many slots as tiles, or one more. The backward pass
#    launches one program per slot. The forward pass launches one per SM, which computes tile after
#    tile, so that short tiles do not each have to start and finish a program. Before that, a small
#    kernel writes a table of the tiles. As long as L2 holds the keys and values of a head, tiles
#    that see many keys come first, so that no long tile starts last. None of this makes the host
#    read the offsets.
#
#    With tiles of :math:`M` rows, let a sequence of :math:`L` rows begin at row :math:`c`. The next
#    one begins :math:`\lfloor (c + L) / M \rfloor - \lfloor c / M \rfloor + 1` slots later. The
#    difference of the two floors is :math:`\lfloor L / M \rfloor` or one more, so the sequence
#    never has fewer slots than tiles, of which there are :math:`\lceil L / M \rceil`, and at most
#    one slot more. Since the rule needs only one offset per sequence, a program finds the sequence
#    of its slot by bisection:
#
#    .. literalinclude:: /../src/kernelbook/ops/hopper/varlen.py
#       :language: python
#       :pyobject: sequence_of_slot
#
#    The copy engine, which loads the operator's tiles, reads zeros outside a tensor, so we describe
#    the tensor to it as if it ended with the sequence. The engine checks a coordinate only against
#    the size of its dimension. We therefore declare a dimension of :math:`E = 2^{30}` rows, and
#    give row :math:`i` of a sequence the coordinate :math:`E` - length + :math:`i`, which places
#    the rows after the sequence outside. Two more dimensions correct the address: one adds the row
#    at which the sequence ends, and the other subtracts :math:`E` rows.
#
#    .. literalinclude:: /../src/kernelbook/ops/attention/tiles.py
#       :language: python
#       :pyobject: head_of_sequence
#
# How fast are packed batches?
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# The dashed line again marks the share of the scores that are needed. It scales the time of our own
# padded kernel, so it is not a limit. ``varlen_attn`` is PyTorch's function for packed sequences.

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
BY_ITSELF = {  # which kernel attention_varlen runs on a Hopper GPU
    passes: "our kernel for Hopper"
    if choice.up_to(sum(LENGTHS) / SEQUENCES, table[128, "causal"])
    else "plain Triton"
    for passes, table in zip(
        PASSES, (choice.VARLEN, backward_choice.VARLEN), strict=True
    )
}


def packed_times(rows):
    """Percent of the time of the padded batch, and milliseconds."""
    groups = {}
    for passes in PASSES:
        at = {row["provider"]: row["ms"] for row in rows if row["passes"] == passes}
        groups[passes] = {
            label: (100 * at[name] / at["padded"], at[name])
            for name, label in packed_names(passes).items()
            if name in at
        }
    return groups


def packed_names(passes):
    """What each version is called in the figure. A kernel that is both has one bar."""
    if BY_ITSELF[passes] != "plain Triton":
        return PACKED
    names = {name: label for name, label in PACKED.items() if name != "plain Triton"}
    return names | {"Kernel Book": "Kernel Book (plain Triton)"}


PACKED = {
    "padded": "padded, Kernel Book",
    "padded, plain Triton": "padded, plain Triton",
    "FlexAttention": "FlexAttention",
    "varlen_attn": "varlen_attn",
    "FlashAttention": "FlashAttention",
    "plain Triton": "plain Triton",
    "Kernel Book": "Kernel Book",
}
PADDED = "Kernel Book on the padded batch"
lab.draw(
    batches,
    "What 32 texts cost, padded and packed",
    lambda rows: bars_in_words(packed_times(rows), SHARE, PADDED),
    lambda axes, rows: bars(
        axes,
        packed_times(rows),
        {passes: packed_names(passes).values() for passes in PASSES},
        SHARE,
        PADDED,
    ),
)

# %%


# Reading
PACKERS = ("FlexAttention", "varlen_attn", "FlashAttention")


def packed_cost(name, passes):
    """The time of a packed batch as a share of that of the padded one."""
    took, full = (batches.milliseconds_at(of, passes=passes) for of in (name, "padded"))
    return took / full


kept = {passes: packed_cost("Kernel Book", passes) for passes in PASSES}
in_triton = {
    passes: packed_cost("plain Triton", passes)
    / (SHARE * packed_cost("padded, plain Triton", passes))
    - 1
    for passes in PASSES
}
slower = packed_cost("padded, plain Triton", "forward") - 1
two_kernels = BY_ITSELF["forward"] == "plain Triton" and slower > 0.01


def scatter(passes):
    """From the 20th to the 80th percentile of our times, as a share of the padded time."""
    spread = [
        row["p80"] - row["p20"]
        for row in batches.rows
        if (row["provider"], row["passes"]) == ("Kernel Book", passes)
    ]
    padded = batches.milliseconds_at("padded", passes=passes)
    return spread[0] / padded if spread else nan


missed_by_little = [
    passes
    for passes in PASSES
    if 0 < kept[passes] - SHARE / OF_PADDED < scatter(passes)
]
lab.read(
    f"**Packing takes {100 * kept['forward']:.0f} % of the padded time forward and "
    f"{100 * kept['backward']:.0f} % backward.** "
    f"{against(SHARE, 1 / OF_PADDED, kept)}"
    + (
        " In the forward pass, the figure compares two kernels: the padded batch runs in our "
        "kernel for Hopper GPUs, and the packed one in plain Triton."
        if two_kernels
        else ""
    )
)

# %%

# Reading
ahead = []
for name in PACKERS:
    at = {passes: packed_cost(name, passes) for passes in PASSES}
    more = {passes: kept[passes] / at[passes] - 1 for passes in PASSES}
    slower = [
        f"takes {100 * more[passes]:.0f} % longer than {name} {passes}"
        if more[passes] > 0.01
        else f"is level with {name} {passes}"
        for passes in PASSES
        if more[passes] >= -0.01
    ]
    slower[1:] = [words.replace(f" than {name}", "") for words in slower[1:]]
    if max(more.values()) > 0.01:
        ahead.append(f"our kernel {' and '.join(slower)}")
said = "; ".join(ahead)
lab.read(
    f"{said[0].upper()}{said[1:]}."
    if ahead
    else "No library is faster than ours by more than 1 %."
)

# %%

# Folded: The lengths, the programs per head, and plain Triton for both batches
within = max(in_triton.values()) <= 1 / OF_PADDED - 1
one_kernel = len(set(BY_ITSELF.values())) == 1
lab.together(
    lab.read(
        f"The lengths of the {SEQUENCES} texts are drawn uniformly from {SHORTEST:,} to "
        f"{LONGEST:,} tokens. On a Hopper GPU, `attention_varlen` runs "
        + (
            f"{BY_ITSELF['forward']}"
            if one_kernel
            else f"{BY_ITSELF['forward']} forward and {BY_ITSELF['backward']} backward"
        )
        + f", because {'it' if one_kernel else 'each'} was the faster of our two when we compared "
        "them."
    ),
    lab.table(
        [
            {"what": "tiles that the texts have", "number": f"{needs:,}"},
            {"what": "programs of the grid above", "number": f"{in_grid:,}"},
            {"what": "slots of our kernels for Hopper", "number": f"{in_slots:,}"},
        ],
        "For each head, with tiles of 128 queries",
    ),
    lab.read(
        "With plain Triton for both the padded and the packed batch, packing takes "
        f"{more_time(in_triton['forward'])} than its share forward and "
        f"{more_time(in_triton['backward'])} backward"
        + (
            ", and would reach both aims."
            if two_kernels and within and kept["forward"] > SHARE / OF_PADDED
            else "."
        )
        + "".join(
            f" Before rounding, our kernel misses the aim {passes} by "
            f"{100 * (kept[passes] - SHARE / OF_PADDED):.2f} points. Its timings scatter by "
            f"{100 * scatter(passes):.2f} points from the 20th to the 80th percentile."
            for passes in missed_by_little
        )
    ),
)

# %%
# Decoding
# --------
#
# A model that generates text computes one token at a time, so a layer has a single query per head,
# but many keys: the *KV cache* of all earlier tokens.
#
# With :math:`N` keys and ``head_dim`` :math:`D`, a head does :math:`4 N D` operations on
# :math:`2 N D` numbers of 2 bytes, which is one operation per byte. A GPU can do more than a
# hundred per byte that it moves, so reading the keys and values limits the speed of decoding.
#
# To reach that limit, all SMs must read. We therefore split the *keys*: each program attends to its
# part as if there were no other keys, and the parts are merged (*Flash-Decoding*).

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
n_sms = by_parts.provenance["sm_count"] if by_parts.provenance else 132

# %%


# Drawing
def busy(axes):
    """The SMs of a GPU as squares, filled if there is a program for it, for two splits."""
    ink, grey = lab.colour("Kernel Book"), lab.colour("matmul")
    across = 22
    down = -(-n_sms // across)
    for number, parts in enumerate((1, 16)):
        top = number * (down + 2.2)
        some = "1 part" if parts == 1 else f"{parts} parts"
        title = f"{some}: {HEADS * parts} programs"
        axes.text(0, top - 0.6, title, fontsize=11, fontweight="bold")
        squares = [
            Path([(x, y), (x + 0.8, y), (x + 0.8, y + 0.8), (x, y + 0.8), (x, y)])
            for x, y in ((sm % across, top + sm // across) for sm in range(n_sms))
        ]
        with_one = min(n_sms, HEADS * parts)
        for some, look in (
            (squares[:with_one], {"fc": ink, "lw": 0, "alpha": 0.75}),
            (squares[with_one:], {"fill": False, "ec": grey, "lw": 0.8}),
        ):
            if some:
                axes.add_patch(PathPatch(Path.make_compound_path(*some), **look))
    axes.set(xlim=(-0.3, across + 0.3), ylim=(2 * down + 2.3, -1.7))
    axes.set(xticks=[], yticks=[], aspect="equal")
    axes.spines[:].set_visible(False)
    axes.grid(visible=False)


lab.sketch(
    f"{n_sms} SMs, and those with a program to run",
    f"Two arrays of {n_sms} squares, one for each SM. With one part, {HEADS} of them have a "
    f"program. With 16 parts there are {16 * HEADS} programs, enough for all.",
    busy,
    height=3.1,
)

# %%
# The dashed line in the next figure is the speed of copying the same keys and values, counting
# bytes read and written. Decoding only reads, so the copy is a yardstick rather than a hard limit.


# Drawing
def processors(rows):
    """How many SMs the GPU has that these rows were measured on."""
    sweeps = (by_parts, *by_parts.elsewhere)
    return next(s.provenance["sm_count"] for s in sweeps if s.rows == rows)


def rates_of(rows, provider="Kernel Book"):
    """GB/s by the number of parts."""
    return {r["parts"]: r["rate"] for r in rows if r["provider"] == provider}


def curve(axes, rows):
    """Bytes read per second by the number of parts, beside a copy."""
    rates, copied = rates_of(rows), statistics.median(rates_of(rows, "copy").values())
    ink, grey = lab.colour("Kernel Book"), lab.colour("matmul")
    axes.set_xscale("log", base=2)
    axes.axhline(copied, color=grey, ls="--", lw=1.3)
    axes.text(1, 1.02 * copied, f"a copy: {copied:,.0f}", fontsize=10, va="bottom")
    axes.plot(list(rates), list(rates.values()), "o-", color=ink, lw=2.2, ms=5)
    for parts in (1, 4, 16):
        above = parts == 16
        words = {"ha": "left", "va": "top", "fontsize": 10}
        at = (parts, 0.94 * rates[parts]) if above else (1.25 * parts, rates[parts])
        axes.text(*at, f"{rates[parts]:,.0f}", **words)
    full = processors(rows) / HEADS
    axes.axvline(full, color=lab.colour("PyTorch"), ls=":", lw=1.4)
    words = {"fontsize": 10, "va": "bottom"}
    axes.text(
        1.1 * full, 0.06 * copied, f"{processors(rows)} programs:\none per SM", **words
    )
    axes.minorticks_off()
    axes.set_xticks(list(rates), [f"{n}\n{HEADS * n:,}" for n in rates])
    axes.set(ylim=(0, 1.16 * copied), ylabel="GB/s")
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel(f"parts of the keys (below: programs of all {HEADS} heads)")
    axes.figure.set_size_inches(5.4, 3.2)


def curve_in_words(rows):
    copied = statistics.median(rates_of(rows, "copy").values())
    found = ", ".join(f"{n}: {rate:,.0f}" for n, rate in rates_of(rows).items())
    return (
        f"GB/s by the number of parts. {found}. A copy: {copied:,.0f}. A mark stands at "
        f"{processors(rows)} programs, one per SM."
    )


lab.draw(by_parts, "One query per head, 131,072 keys in parts", curve_in_words, curve)

# %%

# Reading
rates = {n: by_parts.rate("Kernel Book", parts=n) for n in PARTS}
best = max(PARTS, key=lambda n: rates[n])
lab.read(
    f"**With {best} parts, the fastest of {len(PARTS)} choices, the kernel reads its keys "
    f"{rates[best] / rates[1]:.1f} times as fast as with one.**"
)

# %%
# **The merge.** Each part yields an average of its values: their weighted sum, divided by the
# part's own sum of exponentials. A part with a larger sum must count for more:


# Drawing
PART_WEIGHTS = {"A": (0.4, 0.1, 0.3, 0.2), "B": (1.2, 0.3, 0.9, 0.6)}  # exp(score)
assert [round(sum(weights), 6) for weights in PART_WEIGHTS.values()] == [1, 3]


def merging(axes):
    """The exponentials of eight keys in two parts, and the shares of the parts in the output."""
    words = {"fontsize": 10, "ha": "center", "va": "center"}
    begin, floor = 0, 1.9
    for left, (name, weights) in zip((0, 6), PART_WEIGHTS.items(), strict=True):
        total = round(sum(weights))
        ink = lab.colour("Kernel Book" if name == "A" else "PyTorch")
        look = {"fc": ink, "ec": ink, "alpha": 0.3}
        for key, weight in enumerate(weights):
            axes.add_patch(
                Rectangle((left + key, floor - weight), 0.86, weight, **look)
            )
        axes.text(left + 1.93, 0.1, f"part {name}", **words | {"fontweight": "bold"})
        axes.text(left + 1.93, floor + 0.45, f"sum {total}", **words)
        width = 9.86 * total / 4
        axes.add_patch(Rectangle((begin, floor + 1.15), width, 0.75, **look))
        quarters = {1: "¼", 3: "¾"}[total]
        merged = f"{quarters} output {name}"
        axes.text(begin + width / 2, floor + 1.52, merged, **words)
        begin += width
    words |= {"ha": "right"}
    axes.text(-0.3, floor - 0.35, "exp(score)", **words)
    axes.text(-0.3, floor + 1.52, "output", **words)
    axes.set(xlim=(-2.6, 10), ylim=(floor + 2.3, -0.3), xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
    axes.grid(visible=False)


lab.sketch(
    "Two parts of the keys, and their merge",
    "Eight keys in two parts, with a bar for the exponential of each key's score. The bars of part "
    "A add up to 1, and those of part B to 3. Below, the output as one bar, of which a quarter is "
    "the output of A and three quarters that of B.",
    merging,
    height=2.2,
)

# %%
# Each part therefore also stores its sum, as a logarithm because the sum itself could overflow.
# This is the :term:`logsumexp` :math:`\mathrm{lse}_A = \log \sum_{j \in A} e^{s_j}` of its scores
# :math:`s_j`. The merged output is
#
# .. math::
#
#    \mathrm{out} = \frac{e^{\mathrm{lse}_A}\, \mathrm{out}_A + e^{\mathrm{lse}_B}\, \mathrm{out}_B}
#    {e^{\mathrm{lse}_A} + e^{\mathrm{lse}_B}}
#
# .. admonition:: Key idea
#    :class: kb-key
#
#    With any number of parts, the merged output is the average of their outputs, weighted by the
#    softmax of their lse.
#
# In PyTorch:


def merge(outs, lses):
    """Merge parts of the same queries: outs (parts, ..., head_dim), lses (parts, ...)."""
    weights = torch.softmax(lses, dim=0)
    return (weights.unsqueeze(-1) * outs).sum(0), torch.logsumexp(lses, dim=0)


# %%
# **Parts merged without lse.** A plain average is right only if all parts have the same sum of
# exponentials. We merge eight parts of 30 keys both ways:

# Measuring
rows = []
for name, size in (("small", 0.1), ("usual", 1.0), ("one key stands out", 1.0)):
    q = size * torch.randn(1, 1, 1, 64, device=runtime.DEVICE)
    k, v = torch.randn(2, 1, 1, 240, 64, device=runtime.DEVICE)
    described = f"standard deviation {size:.1f}"
    if name == "one key stands out":
        k[:, :, 100] = 2 * q[:, :, 0]
        score = (q[0, 0, 0] @ k[0, 0, 100]).item() * 64**-0.5
        described = f"the same, with one key of score {score:.0f}"
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
            "scores": described,
            "weighted by lse": f"{good:.0e}",
            "plain average": f"{100 * bad:.0f} %",
        }
    )
lab.table(rows, "Eight parts merged: error relative to the output")

# %%
# **The kernel.** Program (``head``, ``part``) loads one query ``q``, scales it, and loops over the
# ``share`` keys of its part. The loop is that of :doc:`/chapters/attention_forward` for a single
# query, so a score is a sum of products, and ``m_i`` and ``l_i`` are single numbers. Unlike in a
# window, the query sees at least one key of every tile, so ``m_i`` may begin at :math:`-\infty`:

lab.source(small.part_kernel, "loop")

# %%

# Measuring
q = torch.randn(3, 32, device=runtime.DEVICE)
k, v = torch.randn(2, 3, 100, 32, device=runtime.DEVICE)

# %%
# At the end, the program stores its average, ``acc / l_i``, and its lse, :math:`m_i + \log l_i`.
# For three heads and 100 keys in parts of 32, ``attend_in_parts`` launches 3 × 4 of these programs:


outs, lses = small.attend_in_parts(q, k, v, share=32)
out, lse = merge(outs, lses)

# %%

# Reading
every = torch.ones(1, 100, dtype=torch.bool, device=runtime.DEVICE)
errors["100 keys in parts of 32, 3 heads"] = errors_of(
    out[:, None], q[:, None], k, v, every
)

# %%

# Measuring
q = torch.randn(8, 32, device=runtime.DEVICE)
k, v = torch.randn(2, 2, 100, 32, device=runtime.DEVICE)

# %%
# **Grouped heads.** In *grouped-query attention* (GQA), several query heads share one head of keys
# and values. One program takes all queries of a group as the rows of a tile, so each key is read
# once, and the scores become a matmul again. In PyTorch, with 8 query heads sharing 2 heads of
# keys:

rows = q.view(2, 4, 32)  # for each head of keys, the four queries that share it
weights = torch.softmax(32**-0.5 * rows @ k.mT, dim=-1)
out = (weights @ v).view(8, 32)

# %%

# Measuring
repeated = (
    x.repeat_interleave(4, dim=0) for x in (k, v)
)  # a copy for every query head
torch.testing.assert_close(
    out, F.scaled_dot_product_attention(q[:, None], *repeated)[:, 0]
)

# %%

# Folded: The whole kernel of one part, and the operator's two kernels
lab.together(
    lab.listing(
        {
            "The kernel of one part": small.part_kernel,
            "The launch": small.attend_in_parts,
        }
    ),
    lab.listing(
        {
            "In the operator: a tile of queries of several heads": decoding.rows_of_group,
            "In the operator: the kernel of a part": decoding.attention_decode_kernel,
        }
    ),
    lab.read(
        "In the operator, each part stores its lse as two numbers, `m_i` and `l_i`, because "
        "rounding `m_i + log(l_i)` would lose `log(l_i)` if scores are in the millions. The merge "
        "then rescales the parts to the largest `m_i` of all. It always adds them in the same "
        "order, so every run gives the same bits."
    ),
    lab.listing({"In the operator: the merge": decoding.attention_merge_kernel}),
)

# %%
# How fast is decoding?
# ~~~~~~~~~~~~~~~~~~~~~
#
# ``attention`` splits the keys until there are about two programs per SM, but gives each part at
# least two tiles. It stops at 256 parts, because one program merges all the parts of a query:
#
# .. code-block:: python
#
#    # n_tiles: how many tiles the keys of a head have
#    parts = max(1, min(2 * n_sms // (batch * heads_k), n_tiles // 2, 256))

# Reading
assert (decoding.PROGRAMS, decoding.FEWEST_TILES, decoding.MOST_PARTS) == (2, 2, 256)
by_rule = 2 * n_sms // HEADS
lab.read(
    f"With {n_sms} SMs and {HEADS} heads, the rule gives {by_rule} parts"
    + (", the fastest choice in the figure." if by_rule == best else ".")
)

# %%
# *One part* is our kernel without a split. In the last column, 32 query heads share 8 heads of
# keys, in a batch of 8.


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
splits = lab.measure("How FlashAttention takes its number of splits", how_flash_splits)
flash_is = splits.rows[0]["num_splits=0"] if splits.rows else ""
READERS = ("SDPA flash", "SDPA cuDNN", "FlexAttention", "FlashAttention", "Kernel Book")
long, grouped = {"batch": 1, "seqlen_k": KEYS}, {"batch": 8}
few = {"batch": 1, "seqlen_k": KEY_LENGTHS[0]}
rows = [
    {
        "version": f"{name}, flash_attn_func" if name == "FlashAttention" else name,
        f"{KEY_LENGTHS[0]:,} keys": in_percent(steps.share(name, **few)),
        f"{KEYS:,} keys": in_percent(steps.share(name, **long)),
        "8 × 8,192 keys, grouped": in_percent(steps.share(name, **grouped)),
    }
    for name in ("one part", *READERS)
]
lab.table(
    rows, "Bytes of keys and values per second, as a percentage of a copy's speed"
)

# %%

# Reading
twice = (
    (  # the same work, in the figure and in the table
        (by_parts.milliseconds_at("Kernel Book", parts=1), ("one part", long)),
        (by_parts.milliseconds_at("Kernel Book", parts=by_rule), ("Kernel Book", long)),
        (by_parts.milliseconds_at("copy", parts=by_rule), ("copy", long)),
    )
    if by_rule in PARTS
    else ()
)
apart = [
    abs(ms / steps.milliseconds_at(name, **where) - 1) for ms, (name, where) in twice
]


def micro(name, where):
    """Microseconds of a version."""
    return 1e3 * steps.milliseconds_at(name, **where)


AT = {
    f"{KEYS:,} keys": long,
    "8 × 8,192 keys, grouped": grouped,
    f"{KEY_LENGTHS[0]:,} keys": few,
}
of_ours = [steps.share("Kernel Book", **where) for where in AT.values()]


def best_reader(where):
    """The fastest library, and its share of the speed of a copy."""
    return steps.best_peer(*READERS[:-1], **where)


(at_long, long_peer), (at_grouped, grouped_peer) = (
    best_reader(long),
    best_reader(grouped),
)
gained = of_ours[0] / steps.share("one part", **long)
lab.read(
    f"**With {KEYS:,} keys, our kernel reads at {100 * of_ours[0]:.0f} % of a copy's speed, and "
    f"with grouped heads at {100 * of_ours[1]:.0f} %**"
    + f"; our aims were {100 * OF_COPY:.0f} and {100 * OF_COPY_GROUPED:.0f} %. "
    + (
        f"The fastest library, {at_long}, is level with it in both cases. "
        if at_long == at_grouped
        and max(abs(long_peer / of_ours[0] - 1), abs(grouped_peer / of_ours[1] - 1))
        < 0.02
        else f"The fastest libraries are {at_long} with {100 * long_peer:.0f} %, and {at_grouped} "
        f"with {100 * grouped_peer:.0f} %. "
    )
    + (
        "FlashAttention's `flash_attn_func` refuses to split keys on this GPU; we did not time its "
        "function for KV caches."
        if flash_is == "refused"
        else "We did not time FlashAttention's function for KV caches."
    )
)

# %%

# Reading
_, few_peer = best_reader(few)
most = max(few_peer, of_ours[2])
all_keys, one_tile = micro("Kernel Book", few), micro("one tile in each part", few)
at_copy_speed = {  # microseconds
    what: micro("Kernel Book", where)
    * steps.rate("Kernel Book", **where)
    / steps.rate("copy", **long)
    for what, where in AT.items()
}
lab.read(
    (
        f"**With {KEY_LENGTHS[0]:,} keys, even the fastest version reaches only {100 * most:.0f} % "
        "of a copy's speed.** "
        if most < 0.5
        else f"With {KEY_LENGTHS[0]:,} keys, our kernel reads at {100 * of_ours[2]:.0f} % of a "
        "copy's speed. "
    )
    + (
        "Bandwidth does not limit ours here: half as many keys in the same number of parts still "
        f"take {one_tile:.1f} µs instead of {all_keys:.1f}."
        if one_tile > 0.6 * all_keys
        else "With half as many keys in the same number of parts, ours takes "
        f"{one_tile:.1f} µs instead of {all_keys:.1f}."
    )
)

# %%

# Folded: The speed by the number of keys, and the microseconds of our kernel
lab.plot(
    steps,
    "Decoding: one query, 16 heads of head_dim 128",
    share=True,
    where={"batch": 1, "provider": ("copy", "one part", *READERS)},
)
lab.together(
    lab.table(
        [
            {"keys": what}
            | {
                name: "—" if value != value else f"{value:.1f}"
                for name, value in (
                    ("a copy", micro("copy", where)),
                    ("our kernel", micro("Kernel Book", where)),
                    ("reading, as fast as the longest copy", at_copy_speed[what]),
                    ("one tile in each part", micro("one tile in each part", where)),
                )
            }
            for what, where in AT.items()
        ],
        "Microseconds of a copy and of our kernel, with all its keys and with fewer",
    ),
    lab.read(
        "We timed these columns apart from the figure of the parts, so times of the same work "
        f"differ by up to {100 * max(apart):.1f} %. Before rounding, the split is {gained:.1f} "
        f"times as fast as one part with {KEYS:,} keys."
    )
    if apart
    else None,
)

# %%
# Is it right?
# ------------

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


def every_case():
    half = torch.float16 if runtime.INTERPRETED else torch.bfloat16
    for dtype in (torch.float32, half):
        for cases_of in (window_cases, packed_cases, decoding_cases):
            yield from cases_of(dtype)


checked = lab.check("Windows, packed batches and decoding", every_case())

# %%

# Reading
worst = [max(found) for found in zip(*errors.values(), strict=True)]
lab.read(
    (
        "Measured against float64, the worst error of the three small kernels is no larger than "
        "that of the formula in PyTorch. "
        if worst[0] <= worst[1]
        else f"The three small kernels differ from float64 by at most {worst[0]:.0e}, and the "
        f"formula in PyTorch by at most {worst[1]:.0e}. "
    )
    + "For the operator's output and gradients, "
    f"{checked.plain.partition(chr(10))[0].partition(': ')[2].partition(';')[0].rstrip('.')}."
)

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
length, left = 6 * TILE, 5 * TILE // 2
loaded = poison((left, 0), False, length, length).cpu()
some, every = kinds(sees(length, length, left, 0))
assert torch.equal(loaded, some)

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
    "**NaN as a probe.** A correct output does not show which tiles were loaded, but a NaN does, "
    "because it spoils the output even where its weight is zero. We filled one tile of values at "
    f"a time with NaN, in plain Triton with {len(cases)} windows. **No tile of values was loaded "
    "in vain.** "
    + (
        "Nor was one by the kernel for Hopper GPUs, with the only window that we tried there."
        if passes_too
        else "The kernel for Hopper GPUs loaded "
        f"{of_hopper['loaded, not needed']} tiles that no query needs, in addition to "
        f"{of_hopper['tiles needed']} that it must load."
        if of_hopper
        else "This says nothing about the kernel for Hopper GPUs."
    )
    + " This is one window in plain Triton, with a row for each tile of queries:"
)

# %%


# Drawing
def found_by_nan(axes):
    """Each tile of queries as a row of the tiles of values that NaN shows it to have loaded."""
    inks = [lab.colour(name) for name in ("matmul", "PyTorch", "Kernel Book")]
    n_rows, n_columns = loaded.shape
    for y in range(n_rows):
        for x in range(n_columns):
            kind = int(loaded[y, x]) * (1 + int(every[y, x]))
            axes.add_patch(
                Rectangle((x, y), 0.86, 0.86, fc=inks[kind], alpha=0.15 * (kind > 0))
            )
            style = {"ec": inks[kind], "ls": "-" if kind else "--", "lw": 0.9}
            axes.add_patch(Rectangle((x, y), 0.86, 0.86, fill=False, **style))
    words = {"fontsize": 10, "va": "center"}
    for y in range(n_rows):
        axes.text(-0.25, y + 0.43, f"queries {y}", ha="right", **words)
    for x in range(n_columns):
        axes.text(x + 0.43, -0.45, x, ha="center", **words)
    axes.text(-0.25, -0.45, "values", ha="right", **words)
    for number, (kind, what) in enumerate(
        (
            (2, "NaN, every query sees all"),
            (1, "NaN, masked"),
            (0, "no NaN, not loaded"),
        )
    ):
        y = 1.5 + 1.2 * number
        key = {"ec": inks[kind], "ls": "-" if kind else "--", "lw": 0.9}
        x = n_columns + 0.6
        axes.add_patch(
            Rectangle((x, y), 0.6, 0.6, fc=inks[kind], alpha=0.15 * (kind > 0))
        )
        axes.add_patch(Rectangle((x, y), 0.6, 0.6, fill=False, **key))
        axes.text(x + 0.85, y + 0.3, what, **words)
    axes.set(xlim=(-2.1, n_columns + 6.4), ylim=(n_rows + 0.1, -1), aspect="equal")
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
    axes.grid(visible=False)


lab.sketch(
    f"Which tiles of values were loaded, window ({left}, 0)",
    f"A grid of {len(loaded)} tiles of queries by {loaded.shape[1]} tiles of values. NaN reached "
    f"{int(loaded.sum())} tiles in a band along the diagonal, of which {int(every.sum())} are seen "
    "whole. The others were not loaded.",
    found_by_nan,
    height=2.5,
)

# %%

# Folded: The errors of the small kernels, the tolerance, and every check
lab.together(
    lab.table(
        [
            {"kernel": what, "error": f"{ours:.0e}", "PyTorch's error": f"{theirs:.0e}"}
            for what, (ours, theirs) in errors.items()
        ],
        "The small kernels, in float32",
    ),
    lab.read(
        "We allow the operator's output and gradients a multiple of PyTorch's error: eight times "
        "in float32, and in 16 bits twice for the output and four times for a gradient. We count "
        "PyTorch's error as at least the rounding of the largest number, half a unit in its last "
        "place."
    ),
    checked,
    lab.read(
        "In a packed batch in plain Triton, filling all other sequences with NaN changes "
        f"no bit of a sequence's output and gradients, for each of {len(lengths)} sequences. The "
        "package's tests repeat this second check with the kernels for Hopper."
    ),
)

# %%
# What breaks it
# --------------
#
# Like merging without lse, these mistakes raise no error and return finite numbers.
#
# **A window off by one.** In papers, a window of :math:`W` keys includes the query's own key, which
# ``left`` does not count:
#
# .. code-block:: python
#
#    attention(q, k, v, window=(W, 0))  # wrong: W + 1 keys
#    attention(q, k, v, window=(W - 1, 0))  # right


# Measuring
def seen_by(query, window):
    q = k = torch.zeros(1, 1, 8, 16, device=runtime.DEVICE)
    v = torch.eye(8, 16, device=runtime.DEVICE).view_as(k)
    weights = attention(q, k, v, is_causal=True, window=window)[0, 0, query, :8]
    return "".join("■" if weight > 0 else "□" for weight in weights.tolist())


W, SEES = 3, "which of the keys 0 to 7 query 6 sees"
rows = [
    {"window": f"({name}, 0)", SEES: seen_by(6, (left, 0))}
    for name, left in (("W - 1", W - 1), ("W", W))
]
assert [row[SEES].count("■") for row in rows] == [W, W + 1]
lab.table(rows, f"A window of W = {W} keys")

# %%
# **Offsets shifted by one.** Suppose each offset between two texts points one token too far. The
# first token of a text should see only itself, but now sees the text before. All later tokens of
# its text miss their first key.

# Measuring
lengths = (40, 30, 50)
right_offsets = torch.tensor([0, *lengths], device=runtime.DEVICE).cumsum(0).int()
shifted = right_offsets + 1
shifted[0], shifted[-1] = 0, right_offsets[-1]
q, k, v = torch.randn(3, sum(lengths), 1, 32, device=runtime.DEVICE)
ours, wrong = (
    attention_varlen(
        q, k, v, offsets, offsets, max(lengths), max(lengths), is_causal=True
    )
    for offsets in (right_offsets, shifted)
)
rows = []
for number in range(len(lengths)):
    own = slice(right_offsets[number], right_offsets[number + 1])
    off = (ours - wrong)[own].abs().amax((-1, -2))
    relative = (ours - wrong)[own].norm(dim=(-1, -2)) / ours[own].norm(dim=(-1, -2))
    row = {
        "text": ("first", "second", "third")[number],
        "queries changed": f"{int((off > 0).sum())} of {len(off)}",
    }
    row |= {"first query's error": f"{100 * relative[0]:.0f} %"}
    rows.append(row | {"last query's error": f"{100 * relative[-1]:.0f} %"})
assert [row["queries changed"].split()[0] for row in rows] == ["0", "30", "50"]
lab.table(rows, "Offsets shifted by one: error relative to the query's output")

# %%
# A test with a single text would pass, because it has no such offset.

# %%

# Folded: What we did not find out
slowest = all(
    steps.share("FlexAttention", **where) < steps.share(name, **where)
    for where in AT.values()
    for name in ("one part", *READERS)
    if name != "FlexAttention"
)
behind_flash = HAS_FLASH and max(MORE.values()) > 0.01
unknown = (
    "what the rest of a window's time is",
    "what the programs that return at once cost in a packed batch",
    "why FlashAttention is faster for some windows" * behind_flash,
    "why FlexAttention is the slowest in decoding" * slowest,
    "why our kernel is further from a copy's speed with grouped heads"
    * (of_ours[1] < of_ours[0] - 0.05),
)
*most_of_it, last_of_it = (question for question in unknown if question)
lab.read(f"We did not isolate {', '.join(most_of_it)}, or {last_of_it}.")

# %%
# In short
# --------
#
# - For a window, the first and last queries of a tile decide which tiles of keys to load, and which
#   of them to mask.
# - In a packed batch, two offsets tell a program its rows, and values past the last must read as
#   zeros.
# - For a single query, programs share the keys, and a merge weights their outputs by lse.

# Reading
goals = {}  # the aim, and what was reached
for passes in PASSES:
    goals[f"window, {passes}"] = AIM * SEEN[middle], took[passes]
for passes in PASSES:
    goals[f"packed, {passes}"] = SHARE / OF_PADDED, kept[passes]
for what, aim, ours in zip(AT, (OF_COPY, OF_COPY_GROUPED), of_ours, strict=False):
    goals[f"decoding, {what}"] = aim, ours


def to_digits(value, digits):
    return "—" if value != value else f"{100 * value:.{digits}f} %"


OF_WHAT = {
    "window": "time without a window",
    "packed": "padded time",
    "decoding": "speed of a copy",
}
PRECISE = {  # digits that tell a use from its aims
    use: max(digits_for(*goal) for what, goal in goals.items() if what.startswith(use))
    for use in OF_WHAT
}
board, met = [], {}
for what, (aim, ours) in goals.items():
    fast = what.startswith(
        "decoding"
    )  # its aim is a speed, and those of the others are times
    met[what] = ours >= aim if fast else ours <= aim
    use = what.partition(",")[0]
    digits = max(1, PRECISE[use])
    board.append(
        {
            "use (what is 100 %)": f"{what} ({OF_WHAT[use]})",
            "aim": f"at {'least' if fast else 'most'} {to_digits(aim, digits)}",
            "measured": to_digits(ours, digits),
            "result": "—" if ours != ours else "reached" if met[what] else "missed",
        }
    )
missed = [what.replace(", ", " ") for what, reached in met.items() if not reached]
lab.read(
    f"{nan}"
    if any(ours != ours for _, ours in goals.values())
    else f"**We reached {sum(met.values())} of the {len(met)} aims** set before we measured"
    + (
        f", and missed those for {', '.join(missed[:-1])}{' and ' * (len(missed) > 1)}{missed[-1]}."
        if missed
        else "."
    )
)

# %%

# Folded: All aims, and what we measured
lab.table(
    board,
    "Aims and results of Kernel Book",
)

# %%
# :doc:`/chapters/attention_across_gpus` merges parts of keys on several GPUs in the same way.
#
# Exercises
# ---------
#
# **1. A shared prompt.** Four users continue one prompt of 256 keys, each with 40 keys of their
# own. Compute one step of decoding that reads the prompt once instead of once per user.

# %%

# Solution: a shared prompt
#
# The queries of all users become rows of one tile, like those of grouped heads. Each user's own
# keys form the second part, and we merge the parts by lse.


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
# into one tensor. Compute one step for all of them in a single call.

# %%

# Solution: decoding with caches of different length
#
# Each sequence has one query, so the offsets of the queries count up by one. A causal mask would
# change nothing, because it is aligned with the last key: the only query sees all keys of its own
# sequence.

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
# few tokens, the *attention sinks*. Let query :math:`i` see the first four keys and the last
# ``left + 1``. Use only ``merge`` and ``attention`` with ``return_lse=True``. Count no key twice,
# and no key after the query.

# %%

# Solution: a window with sinks
#
# Split off the first four tokens. Their queries see only one another, causally. All later queries
# see all four sinks, without a mask, and a causal window over the remaining keys. These two sets
# have no key in common.


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
# - Ainslie et al. *GQA: training generalized multi-query transformer models from multi-head
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
    f"packed batch at {of_packed:.0%} of the speed of a padded one, and decoding reads its "
    f"cache at {of_copy:.0%} of the speed of a copy"
)
