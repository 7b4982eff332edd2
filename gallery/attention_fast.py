"""
Attention at full speed
=======================

The kernel of the last chapter keeps its scores on the chip and skips the tiles that a mask empties,
and still it is far slower than a matmul with as many operations. *Which changes bring it closer,
and what is each of them worth?*

You will learn

- what each of six changes gains when it is made, and what the finished kernel loses without it;
- why two programs on an :term:`SM` can beat one, and how a loop may hide loads behind exponentials;
- what we suspect keeps the finished kernel below the libraries and a matmul.

The kernel is the package's in plain Triton, ``attention(..., backend="triton")``, timed here on one
generation of GPUs.
"""

# sphinx_gallery_thumbnail_number = 1
import heapq
import re
import textwrap
from functools import partial
from unittest import mock

import torch
import torch.nn.functional as F

from kernelbook import attention as public_attention
from kernelbook import lab, reference, runtime
from kernelbook.lab import results
from kernelbook.lab.attention_bench import (
    FORWARD,
    LIBRARIES,
    balance,
    draw,
    libraries,
    matmul,
    points,
)
from kernelbook.lab.display import Shown, show
from kernelbook.ops.attention import tuned
from kernelbook.ops.attention.forward import row_max
from kernelbook.ops.attention.tiles import (
    LOWEST,
    PRECISION,
    describe,
    head_of,
    load_tile,
    place,
)

# By default the package may take another kernel on a Hopper GPU. This page never does.
attention = partial(public_attention, backend="triton")

lab.start("attention_fast", "kernelbook.ops.attention")

# %%
# What could stop it
# ------------------
#
# Attention is two matmuls with exponentials in between, so two things could keep the tensor cores,
# the GPU's matmul units, waiting: memory that delivers the tiles too slowly, and the exponentials.
#
# **Memory.** Each tile of 128 queries loads all keys and values of its head again.


# Measuring
def moved_by(length):
    """MiB of one head in tiles of 128, and those if a program kept a tile of keys instead."""
    tensor, tiles = length * 128 * 2 / 2**20, length // 128
    queries_stay = tensor + tiles * 2 * tensor + tensor
    keys_stay = 2 * tensor + tiles * (tensor + 2 * tensor + 2 * tensor)
    return queries_stay, keys_stay


machine = lab.measure("What the GPU can do, bfloat16", balance)

# %%

# Reading
nan = float("nan")
best = machine.rows[0] if machine.rows else {}
matmul_speed, copy_speed = (best.get(x, nan) for x in ("matmul, TFLOP/s", "copy, GB/s"))
needed = 1e3 * matmul_speed / copy_speed
per_byte = 4 * 4096**2 * 128 / (moved_by(4096)[0] * 2**20)
from_hbm = per_byte * copy_speed / 1e3
lab.read(
    f"Attention does {per_byte:.0f} operations per byte that it loads or stores, and in this run "
    f"the GPU needed {needed:.0f} to keep its arithmetic busy. "
    + (
        f"So if every byte came from HBM, the memory outside the chip, attention would stop at "
        f"{from_hbm:.0f} TFLOP/s. But the programs of a head load the same keys and values at the "
        f"same time, so the L2 cache can serve many of the loads."
        if per_byte < needed
        else f"So memory allows {from_hbm:.0f} TFLOP/s, more than a matmul reaches, even if every "
        f"byte comes from HBM, the memory outside the chip."
    )
)

# %%

# Folded: The operations and the bytes, counted
lab.read(
    f"At length 4,096 and head_dim 128, a head does {4 * 4096**2 * 128 / 1e9:.2f} GFLOP on "
    f"{moved_by(4096)[0]:.0f} MiB. A matmul runs at {matmul_speed:.0f} TFLOP/s and a copy at "
    f"{copy_speed:,.0f} GB/s."
)

# %%

# Folded: Why not keep the keys and load the queries?
both_orders = {length: moved_by(length) for length in (4096, 16384)}
lab.read(
    f"A program that keeps a tile of keys has to read all queries, and to read and write back "
    f"their `acc` in float32. At length 4,096 this is {both_orders[4096][1]:,.0f} MiB for a head, "
    f"instead of {both_orders[4096][0]:,.0f}, and at 16,384 it is {both_orders[16384][1]:,.0f} "
    f"instead of {both_orders[16384][0]:,.0f}. It also meets a worse problem: programs with "
    f"different keys add to the same `acc`, so they would have to wait for each other. The first "
    f"FlashAttention avoided that by running one program per head, but a GPU with more than a "
    f"hundred SMs then stands idle for the most part if there are few heads. If queries stay, no "
    f"two programs write to the same address, and there are as many programs as tiles of queries."
)

# %%
# **Exponentials.** Each score costs :math:`4 D` operations in the two matmuls, for head_dim
# :math:`D`, and one exponential. A Hopper SM does 4,096 such operations in a cycle, but only 16
# exponentials. At head_dim 128 the matmuls of a score therefore take an eighth of a cycle, and its
# exponential a sixteenth. A kernel that never did both at once would leave the tensor cores idle
# for a third of its time.
#
# .. admonition:: Key idea
#    :class: kb-key
#
#    The way up is to do less besides the matmuls, and to do it at the same time.

# %%
# The ladder
# ----------
#
# We start from a variant of the staged kernel of :doc:`the chapter before
# </chapters/attention_forward>`, which is a little faster than that kernel (a fold below says by
# how much). To it we make six changes, one after the other: the *rungs* of a ladder. The
# staircase is read from top to bottom. A step to the right is a faster kernel, in percent of a
# :term:`cuBLAS` matmul timed in the same run. Under the name of each rung stands its aim.


# Whole
import triton
import triton.language as tl


@triton.jit
def _loop(
    acc, l_i, m_i, qk, q, k_head, v_head, start, end, n_visible, seqlen_k, scale_log2,
    HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
    DESCRIBED: tl.constexpr, AHEAD: tl.constexpr,
    TWO_STEPS: tl.constexpr, FOLDED: tl.constexpr,
):  # fmt: skip
    for start_n in range(start, end, BLOCK_N):
        if not AHEAD:
            k = _tile(k_head, start_n, seqlen_k, HEAD_DIM, BLOCK_N, MASKED, DESCRIBED)
            qk = tl.dot(q, k.T, input_precision=PRECISION)
        p, alpha, l_i, m_i = _weigh(
            qk, l_i, m_i, start_n, n_visible, scale_log2, MASKED, TWO_STEPS, FOLDED
        )
        v = _tile(v_head, start_n, seqlen_k, HEAD_DIM, BLOCK_N, MASKED, DESCRIBED)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
        if AHEAD:
            after = start_n + BLOCK_N
            k = _tile(k_head, after, seqlen_k, HEAD_DIM, BLOCK_N, True, DESCRIBED)
            qk = tl.dot(q, k.T, input_precision=PRECISION)
    return acc, l_i, m_i, qk


@triton.jit
def _tile(
    of_head, start, length, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr,
    MASKED: tl.constexpr, DESCRIBED: tl.constexpr,
):  # fmt: skip
    if DESCRIBED:
        return load_tile(of_head, start)
    else:
        rows = start + tl.arange(0, ROWS)[:, None]
        ptrs = of_head + rows * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
        if MASKED:
            return tl.load(ptrs, mask=rows < length, other=0.0)
        else:
            return tl.load(ptrs)


@triton.jit
def _weigh(
    qk, l_i, m_i, start_n, n_visible, scale_log2,
    MASKED: tl.constexpr, TWO_STEPS: tl.constexpr, FOLDED: tl.constexpr,
):  # fmt: skip
    if not FOLDED:
        qk = qk * scale_log2
    if MASKED:
        keys = start_n + tl.arange(0, qk.shape[1])
        qk = tl.where(keys[None, :] < n_visible[:, None], qk, float("-inf"))
    # -- maximum
    largest = row_max(qk) if TWO_STEPS else tl.max(qk, axis=1)
    # -- exponential
    if FOLDED:
        m_new = tl.maximum(m_i, largest * scale_log2)
        p = tl.exp2(qk * scale_log2 - m_new[:, None])
    else:
        m_new = tl.maximum(m_i, largest)
        p = tl.exp2(qk - m_new[:, None])
    # -- rescale
    alpha = tl.exp2(m_i - m_new)
    l_i = l_i * alpha + tl.sum(p, axis=1)
    return p, alpha, l_i, m_new


@triton.jit
def _rung_kernel(
    q, k, v, out_ptr, heads, seqlen_q, seqlen_k, scale_log2,
    HEAD_DIM: tl.constexpr, IS_CAUSAL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    DESCRIBED: tl.constexpr, AHEAD: tl.constexpr, TWO_STEPS: tl.constexpr,
    FOLDED: tl.constexpr, HEAVY_FIRST: tl.constexpr, HEADS_AT_ONCE: tl.constexpr,
):  # fmt: skip
    n_tiles = tl.cdiv(seqlen_q, BLOCK_M)
    tile, head = place(n_tiles, heads, HEADS_AT_ONCE)
    if HEAVY_FIRST:
        tile = n_tiles - 1 - tile
    start_m = tile * BLOCK_M
    queries = start_m + tl.arange(0, BLOCK_M)

    # -- load the queries, which stay
    head_64 = head.to(tl.int64)
    if DESCRIBED:
        q_head = head_of(q, 0, head, BLOCK_M, HEAD_DIM)
        k_head = head_of(k, 0, head, BLOCK_N, HEAD_DIM)
        v_head = head_of(v, 0, head, BLOCK_N, HEAD_DIM)
    else:
        q_head = q + head_64 * seqlen_q * HEAD_DIM
        k_head = k + head_64 * seqlen_k * HEAD_DIM
        v_head = v + head_64 * seqlen_k * HEAD_DIM
    q_i = _tile(q_head, start_m, seqlen_q, HEAD_DIM, BLOCK_M, True, DESCRIBED)
    m_i = tl.full((BLOCK_M,), LOWEST, tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, HEAD_DIM), tl.float32)
    qk = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)

    # -- divide the keys between the two stages
    n_visible = tl.zeros((BLOCK_M,), tl.int32) + seqlen_k
    seen_by_all, end = seqlen_k, seqlen_k
    if IS_CAUSAL:
        shift = seqlen_k - seqlen_q
        n_visible = tl.minimum(queries + 1 + shift, seqlen_k)
        seen_by_all = tl.maximum(tl.minimum(start_m + 1 + shift, seqlen_k), 0)
        end = tl.maximum(tl.minimum(start_m + BLOCK_M + shift, seqlen_k), 0)
    if AHEAD:  # the last tile has no next one, so it comes after the loops
        k_0 = _tile(k_head, 0, seqlen_k, HEAD_DIM, BLOCK_N, True, DESCRIBED)
        qk = tl.dot(q_i, k_0.T, input_precision=PRECISION)
        end = tl.maximum(tl.cdiv(end, BLOCK_N) - 1, 0) * BLOCK_N
    whole = tl.minimum(seen_by_all // BLOCK_N * BLOCK_N, end)
    acc, l_i, m_i, qk = _loop(
        acc, l_i, m_i, qk, q_i, k_head, v_head, 0, whole, n_visible, seqlen_k, scale_log2,
        HEAD_DIM, BLOCK_N, False, DESCRIBED, AHEAD, TWO_STEPS, FOLDED,
    )  # fmt: skip
    acc, l_i, m_i, qk = _loop(
        acc, l_i, m_i, qk, q_i, k_head, v_head, whole, end, n_visible, seqlen_k, scale_log2,
        HEAD_DIM, BLOCK_N, True, DESCRIBED, AHEAD, TWO_STEPS, FOLDED,
    )  # fmt: skip
    if AHEAD:
        p, alpha, l_i, m_i = _weigh(
            qk, l_i, m_i, end, n_visible, scale_log2, True, TWO_STEPS, FOLDED
        )
        v_i = _tile(v_head, end, seqlen_k, HEAD_DIM, BLOCK_N, True, DESCRIBED)
        acc = tl.dot(
            p.to(v_i.dtype), v_i, acc * alpha[:, None], input_precision=PRECISION
        )

    # -- write
    out = acc * (1 / tl.where(l_i == 0, 1.0, l_i))[:, None]
    rows = head_64 * seqlen_q + queries
    offsets = rows[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
    tl.store(out_ptr + offsets, out, mask=queries[:, None] < seqlen_q)


# %%


# Measuring
LADDER = {
    "in stages": {
        "num_stages": 3, "DESCRIBED": False, "AHEAD": False,
        "TWO_STEPS": False, "FOLDED": False, "HEAVY_FIRST": False,
    },
    "two programs": {"num_stages": 2} | runtime.register_limit(128),
    "descriptors": {"DESCRIBED": True},
    "one iteration ahead": {"AHEAD": True},
    "two-step maximum": {"TWO_STEPS": True},
    "scale folded": {"FOLDED": True},
    "heavy first": {"HEAVY_FIRST": True},
}  # fmt: skip
WIDE = {"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 8}
RUNGS, so_far = {}, {}
for name, change in LADDER.items():
    RUNGS[name] = so_far = so_far | change


def run(q, k, v, is_causal, **options):
    batch, n_heads, seqlen_q, head_dim = q.shape
    heads, seqlen_k = batch * n_heads, k.shape[2]
    out, scale_log2 = torch.empty_like(q), head_dim**-0.5 * 1.4426950408889634
    sizes = (heads, seqlen_q, seqlen_k, scale_log2)
    at_once = 1
    if options["HEAVY_FIRST"]:
        at_once = tuned.forward_heads_at_once(k, 1, is_causal)
    if options["DESCRIBED"]:
        rows = (options["BLOCK_M"], options["BLOCK_N"], options["BLOCK_N"])
        flat = (x.view(1, heads, -1, head_dim) for x in (q, k, v))
        q, k, v = (describe(x, n) for x, n in zip(flat, rows, strict=True))
    grid = (triton.cdiv(seqlen_q, options["BLOCK_M"]) * heads,)
    constants = {"HEAD_DIM": head_dim, "IS_CAUSAL": is_causal, "HEADS_AT_ONCE": at_once}
    _rung_kernel[grid](q, k, v, out, *sizes, **constants, **options)
    return out


def cases():
    blocks = {"BLOCK_M": 64, "BLOCK_N": 32}  # small: even small inputs have many tiles
    sizes = ((100, 100, False), (100, 100, True), (40, 90, True))
    for seqlen_q, seqlen_k, is_causal in sizes:
        for dtype in (torch.float32, torch.float16):
            q = torch.randn(1, 2, seqlen_q, 32, device=runtime.DEVICE).to(dtype)
            k, v = torch.randn(2, 1, 2, seqlen_k, 32, device=runtime.DEVICE).to(dtype)
            mask = torch.ones(
                seqlen_q, seqlen_k, dtype=torch.bool, device=runtime.DEVICE
            )
            mask = mask.tril(seqlen_k - seqlen_q) if is_causal else mask
            theirs = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            truth, _ = reference.attention(q, k, v, is_causal)
            for name, options in RUNGS.items():
                ours = run(q, k, v, is_causal, **blocks, **options)
                what = f"{name}, {seqlen_q} × {seqlen_k}{', causal' * is_causal}"
                yield lab.Case(what, "forward", ours, theirs, truth, factor=8)


# %%


# Measuring
def without(name):
    """The options of the last rung with one change taken back."""
    kept = {key: value for key, value in so_far.items() if key not in LADDER[name]}
    start = RUNGS["in stages"]
    return kept | {key: start[key] for key in LADDER[name] if key in start}


TAKEN_BACK = {f"without {name}": without(name) for name in list(LADDER)[1:-1]}
HALVES = {  # the rung "two programs" is two changes; the last rung with one of them taken back
    "without register limit": {k: v for k, v in so_far.items() if k != "maxnreg"},
    "without two stages": so_far | {"num_stages": 3},
}


def ladder_providers(seqlen, batch, heads, head_dim, mask, causal, dtype):
    inputs = (*draw(batch, heads, seqlen, head_dim, dtype), mask == "causal")
    timed = {
        name: partial(run, *inputs, **WIDE, **options)
        for name, options in (RUNGS | TAKEN_BACK | HALVES).items()
    }
    timed["Kernel Book"] = lambda: attention(*inputs[:3], is_causal=inputs[3])
    return {"matmul": matmul()} | timed


steps = lab.bench("ladder", points([4096], [128]), ladder_providers, **FORWARD)

# %%


# Drawing
CAUSES = {
    "in stages": "one program per SM",
    "two programs": "one works while one waits",
    "descriptors": "no addresses in registers",
    "one iteration ahead": "exponentials during copies",
    "two-step maximum": "matmuls that need no wait",
    "scale folded": "one multiplication less",
    "heavy first": "no late long programs",
}


def shares(rows):
    """Percent of the matmul of each rung, with a causal mask and without."""
    found = {(r["provider"], r["mask"]): 100 * r["share"] for r in rows}
    complete = all((name, "causal") in found for name in LADDER)
    return [
        [found[name, mask] for name in LADDER] if complete else []
        for mask in ("causal", "full")
    ]


def steps_in_words(rows):
    causal, full = shares(rows)
    said = (
        f"{name} {a:.0f} and {b:.0f}"
        for name, a, b in zip(LADDER, causal, full, strict=bool(causal))
    )
    return f"A staircase, percent of a matmul, causal and without a mask: {', '.join(said)}."


def staircase(axes, rows):
    causal, full = shares(rows)
    axes.figure.set_figheight(5.3)
    axes.grid(visible=False)
    if not causal:
        axes.text(0.5, 0.5, "This GPU's record has an older ladder.", ha="center")
        return
    edges, ours, other = range(8), lab.colour("Kernel Book"), lab.colour("matmul")
    look = {"orientation": "horizontal", "fill": True, "alpha": 0.22, "color": ours}
    axes.stairs(causal, edges, label="causal mask", **look)
    axes.stairs(full, edges, orientation="horizontal", color=other, label="no mask")
    for step, (name, cause) in enumerate(CAUSES.items()):
        number = f"{step} " if step else ""
        axes.text(1, step + 0.33, f"{number}{name}", va="center", fontweight="bold")
        axes.text(1, step + 0.7, cause, va="center")
        for values, put in ((causal, "right"), (full, "left")):
            said = f"{values[step]:.0f} %"
            if step:
                change = values[step] / values[step - 1] - 1
                said = f"{100 * change:+.0f} %" if abs(change) >= 0.01 else "same"
            at = values[step] + (1 if put == "left" else -1)
            weight = "bold" if put == "right" else "normal"
            said = said.replace("-", "−")
            axes.text(at, step + 0.33, said, ha=put, va="center", fontweight=weight)
    axes.axvline(100, color=other, linestyle="--", linewidth=1)
    axes.set(xlim=(0, 104), ylim=(7, 0), yticks=[], xlabel="% of the speed of matmul")


lab.draw(steps, "Each rung, and by how much it is faster", steps_in_words, staircase)


def you_are_here(name):
    """Show the staircase small, with the step of one rung lit: in the colours of the page."""
    causal, _ = shares(steps.rows)
    lit = list(LADDER).index(name)
    parts = []
    for number, value in enumerate(causal):
        x, y = 44 * number, 74 - 2.4 * (value - 50)
        shade = 0.85 if number == lit else 0.2
        colour = "#bc4c00" if number == lit else "currentColor"
        parts.append(
            f'<rect x="{x}" y="{y:.1f}" width="43" height="{74 - y:.1f}" fill="{colour}" '
            f'opacity="{shade}"/><text x="{x + 22}" y="90" text-anchor="middle" '
            f'font-weight="{"bold" if number == lit else "normal"}">{number or "start"}</text>'
        )
    said = f"You are here: step {lit} of the staircase, {name}."
    svg = (
        f'<svg viewBox="0 0 308 96" width="308" height="96" role="img" aria-label="{said}" '
        f'font-size="13" fill="currentColor">{"".join(parts)}</svg>'
    )
    return show(Shown(f'<div class="kb-here">{svg}</div>', said)) if causal else None


# %%

# Reading


def spread(name):
    """By how much the middle three fifths of a rung's timings lie off their median, at most."""
    return max(
        max(1 - low / median, high / median - 1)
        for low, median, high in steps.milliseconds[name]
    )


scatter = max(map(spread, LADDER)) if steps.rows else nan
of_ladder = steps.rate("matmul", mask="full")
lab.read(
    f"Every step is a median, and the middle three fifths of its timings lie within "
    f"{100 * scatter:.1f} % of it, so a step of little more than 1 % may be chance."
    + (
        f" (The matmul reaches {of_ladder:.0f} TFLOP/s here. In the first section it was "
        f"{matmul_speed:.0f}, because it ran call after call, and the chip lowers its clocks then.)"
        if matmul_speed < 0.98 * of_ladder
        else ""
    )
)

# %%

# Reading
steps_up = {
    name: steps.rate(name, mask="causal") / steps.rate(before, mask="causal") - 1
    for before, name in zip(list(LADDER)[:-1], list(LADDER)[1:], strict=True)
}
lab.read(
    (
        "Two steps surprise. Rung 1 brings next to nothing where it is made, and yet the finished "
        "kernel loses most without it, as taking it back will show. "
        if abs(steps_up["two programs"]) < 0.02
        else ""
    )
    + (
        "The largest step, rung 4, rewrites a single line, which returns the same numbers as "
        "before. "
        if max(steps_up, key=steps_up.get) == "two-step maximum"
        else ""
    )
    + "We take the rungs one by one."
)

# %%


# Measuring
def of_chapter_before(mask):
    """The staged kernel's share of a matmul in the chapter before, and ours' time over its time."""
    record = results.find("attention_forward") or {}
    sweep = record.get("sweeps", {}).get("ladder", {})
    if not steps.rows or "in stages" not in sweep.get("milliseconds", {}):
        return nan, nan
    step = [point["mask"] for point in sweep["points"]].index(mask)
    kernel, limit = (sweep["milliseconds"][x][step][1] for x in ("in stages", "matmul"))
    ours = steps.milliseconds_at("in stages", mask=mask)
    flops = 4 * 64 * 4096**2 * 128 * (0.5 if mask == "causal" else 1)
    return flops / (2 * 8192**3) * limit / kernel, kernel / ours - 1


# %%

# Folded: Where the ladder begins, and where the chapter before ends
there, slower = of_chapter_before("causal")
begins, ends_at = (
    steps.share(x, mask="causal") for x in ("in stages", list(LADDER)[-1])
)
smaller = [
    name
    for before, name in zip(list(LADDER)[:-1], list(LADDER)[1:], strict=True)
    if steps.rate(name, mask="causal") / steps.rate(before, mask="causal") - 1 < slower
]
from_there, from_here = (100 * (ends_at / x - 1) for x in (there, begins))
lab.read(
    f"The chapter before ends at {100 * there:.0f} %, and this ladder begins at "
    f"{100 * begins:.0f}, because it begins with other code: among other things, it starts `m_i` "
    f"from a finite number and loads `v` after the weights. The old kernel takes "
    f"{100 * slower:.0f} % longer; the rest lies in the two runs' matmuls. So this unlisted step "
    f"is worth more than {len(smaller)} of the six rungs, and we have not timed its parts. From "
    f"the old kernel to the last rung, the share of a matmul rises by {from_there:.0f} %, and from "
    f"this start by {from_here:.0f} %."
)

# %%

# Folded: The steps in TFLOP/s
lab.table(
    [
        {"rung": name}
        | {
            f"{mask}, TFLOP/s": f"{steps.rate(name, mask=mask):.0f}"
            for mask in ("causal", "full")
        }
        for name in ("matmul", *LADDER, "Kernel Book")
    ]
    if steps.rows
    else [],
    "The ladder, length 4,096, head_dim 128",
)

# %%
# The loop
# --------
#
# All rungs are one kernel, and each change is a flag of it or an option of its launch. Here is the
# loop without its flags. It loads a tile of keys, computes the scores ``qk``, turns them into
# weights ``p``, and adds the weighted values to ``acc``:
#
# .. code-block:: python
#
#    for start_n in range(start, end, BLOCK_N):
#        k = _tile(k_head, start_n)
#        qk = tl.dot(q, k.T)
#        p, alpha, l_i, m_i = _weigh(qk, l_i, m_i)
#        v = _tile(v_head, start_n)
#        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None])
#
# - ``_tile`` loads the rows of a head from ``start_n`` on. Rung 2 shows it.
# - ``_weigh`` makes the weights. It also updates ``m_i`` and ``l_i``, the largest score and the sum
#   of weights of each query, and returns ``alpha``, which converts old sums to the new maximum.
#   Rung 5 shows it.
#
# .. dropdown:: The loop with its flags
#
#    .. literalinclude:: attention_fast.py
#       :language: python
#       :pyobject: _loop
#       :start-at: for start_n
#       :end-before: return acc
#       :dedent:
#
#    ``DESCRIBED`` is the flag of rung 2, ``AHEAD`` of rung 3, ``TWO_STEPS`` of rung 4 and
#    ``FOLDED`` of rung 5. ``MASKED`` is set for tiles that the causal mask cuts; there each query
#    keeps its first ``n_visible`` keys.
#
# .. dropdown:: Three details: ``LOWEST``, ``PRECISION``, and the checks
#
#    ``m_i`` starts at ``LOWEST``, the lowest finite number of float32, and not at :math:`-\infty`.
#    This saves the guard against :math:`-\infty - (-\infty)`, which is NaN, because :math:`-\infty`
#    minus a finite number is :math:`-\infty`, whose exponential is 0.
#
#    ``PRECISION`` is ``"tf32x3"`` on NVIDIA GPUs and matters in float32 only: it splits each number
#    into a coarse part and a remainder, both in :term:`TF32`, and replaces one matmul by three on
#    the tensor cores.
#
#    The rungs are checked in float32 and float16, with small tiles and to eight times PyTorch's
#    error; the package's kernel, below, also in bfloat16.

# Folded: Every rung, checked against float64
lab.check("The rungs", cases())

# %%


# Measuring
def made_by_the_compiler(versions):
    inputs = (*draw(4, 16, 4096, 128), True)  # as timed, so that few are compiled anew
    rows = []
    for name, options in versions.items():
        launch = partial(run, *inputs, **WIDE, **options)
        ((_, compiled),) = lab.compiled_by(launch)
        words = compiled.asm["sass"].split()
        row = {"version": name, "registers": compiled.n_regs}
        row["spills"] = compiled.n_spills
        row["shared memory, KiB"] = round(compiled.metadata.shared / 1024)
        row["matmul instructions"] = sum(w.startswith("HGMMA") for w in words)
        row["waits for them"] = sum(w.startswith("WARPGROUP.DEPBAR") for w in words)
        rows.append(row)
    return rows


compiled_rungs = lab.measure(
    "The rungs as compiled, causal", partial(made_by_the_compiler, RUNGS | TAKEN_BACK)
)
made = {row["version"]: row for row in compiled_rungs.rows}


def compiled_to(name, what):
    return made.get(name, {}).get(what, nan)


def gain(name, mask):
    names = list(LADDER)
    before = names[names.index(name) - 1]
    return steps.rate(name, mask=mask) / steps.rate(before, mask=mask) - 1


def in_percent(share):
    """What a change of the speed is called: less than 1 % is no difference."""
    if share != share:
        return "nan"  # so that the paragraph says that it is not recorded
    if abs(share) < 0.01:
        return "makes no difference"
    return f"{'gains' if share > 0 else 'loses'} {100 * abs(share):.0f} %"


def told(name):
    """What a rung gains, in words."""
    causal, full = (in_percent(gain(name, mask)) for mask in ("causal", "full"))
    if causal == full:
        return f"**Measured:** it {causal}, with a causal mask and without one. "
    if causal.split()[0] == full.split()[0]:
        full = full.split(maxsplit=1)[1]
    return f"**Measured:** it {causal} with a causal mask, and {full} without one. "


def waits_of(name):
    """How often the code of a rung waits for its matmuls, in words."""
    waits, matmuls = (
        compiled_to(name, what) for what in ("waits for them", "matmul instructions")
    )
    if waits == matmuls:
        return f"after each of its {matmuls} matmul instructions"
    return f"{waits} times for {matmuls} matmul instructions"


# %%
# Rung 1: two programs on an SM
# -----------------------------

# Drawing
you_are_here("two programs")

# %%
# A second program on the same SM can work while the first one waits for its keys, for a matmul, or
# for exponentials. But it fits only if each takes at most half of the SM's storage, of which there
# are two kinds.
#
# .. image:: /figures/attention-two-programs.svg
#    :alt: Two SMs, each a box of registers and a box of shared memory. On the left one program with
#          three stages fills 128 of 227 KiB of shared memory and three quarters of the registers,
#          and a second one does not fit. On the right two programs with two stages take 96 KiB and
#          half of the registers each.
#
# **Shared memory** holds the tiles. ``num_stages``, the number of *pipeline stages*, says how many
# tiles of keys, and of values, are on their way or in use at a time. A program takes 32 KiB for its
# queries and 32 KiB for each pipeline stage, so two programs fit into the 227 KiB of an SM with two
# stages, but not with three.
#
# **Registers**, private to a thread, hold ``acc`` and the scores. Two programs of 8 :term:`warps
# <warp>` are 512 threads, so of the SM's 65,536 registers each thread gets 128. The option
# ``maxnreg`` of the launch sets this limit. Values that do not fit :term:`spill <spill>` to memory.


# Measuring
START = RUNGS["in stages"]
compiled_halves = lab.measure(
    "Two programs in halves, as compiled, causal",
    partial(
        made_by_the_compiler,
        {
            "start": START,
            "start, two stages alone": START | {"num_stages": 2},
            "start, register limit alone": START | runtime.register_limit(128),
            "finished": so_far,
            "finished, two stages alone": HALVES["without register limit"],
            "finished, register limit alone": HALVES["without two stages"],
            "finished, neither": TAKEN_BACK["without two programs"],
        },
    ),
)
half = {row["version"]: row for row in compiled_halves.rows}


def programs_on_an_sm(row):
    """How many fit by registers, of 8 warps, and by shared memory, of which 227 KiB are free."""
    by_registers = 65536 // (8 * 32 * -(-row["registers"] // 8) * 8)
    return min(by_registers, 227 // (row["shared memory, KiB"] + 1))


def by_half(rows):
    return [
        {
            "change": name,
            "registers": row["registers"],
            "spills": row["spills"],
            "shared, KiB": row["shared memory, KiB"],
            "waits": f"{row['waits for them']} for {row['matmul instructions']}",
            "programs": programs_on_an_sm(row),
        }
        for name, row in rows.items()
        if row
    ]


# %%

# Folded: What each of the two changes does alone
lab.table(
    by_half(
        {
            "none": half.get("start"),
            "two pipeline stages alone": half.get("start, two stages alone"),
            "register limit alone": half.get("start, register limit alone"),
            "both": made.get("two programs"),
        }
    ),
    "What it takes for a second program, causal",
)

# %%

# Reading
early = max(gain("two programs", mask) for mask in ("causal", "full")) < 0.05
stages_change_none = bool(half) and all(
    half["start"][what] == half["start, two stages alone"][what]
    for what in ("spills", "waits for them")
)
lab.read(
    told("two programs")
    + (
        f"The code of the two loops waits {waits_of('two programs')} (before: "
        f"{compiled_to('in stages', 'waits for them')} times), and "
        f"{compiled_to('two programs', 'spills')} values spill. "
        + (
            "Both come from the register limit, because two stages alone change neither (fold). "
            if stages_change_none
            else ""
        )
        + "We suspect that they eat the gain; at this rung limit and stages were not timed apart."
        if early
        else f"A thread, which had {compiled_to('in stages', 'registers')} registers, is left with "
        f"128, and the code waits {waits_of('two programs')}."
    )
)

# %%
# Rung 2: descriptors name tiles
# ------------------------------

# Drawing
you_are_here("descriptors")

# %%
# With a descriptor, a thread no longer computes and keeps an address and a mask for each of its
# elements. A :term:`tensor descriptor <descriptor>` states once what a tensor looks like: its
# address, its sizes, its strides, and the size of a tile.
#
# .. image:: /figures/attention-descriptor.svg
#    :alt: Above, without a descriptor: 256 threads each compute addresses and a mask in registers,
#          and load their own part of a tile. Below, with a descriptor: one thread names the tile by
#          its coordinates, and the copy engine TMA computes addresses, checks the bounds, and puts
#          the tile into shared memory.
#
# One thread then names a tile by its coordinates. The Tensor Memory Accelerator (TMA), the copy
# engine of an SM since Hopper, computes the addresses, fills with zeros what lies outside, and puts
# the tile into shared memory. ``_tile`` holds both ways:
#
# .. literalinclude:: attention_fast.py
#    :language: python
#    :pyobject: _tile
#    :start-at: if DESCRIBED
#    :dedent:
#
# - **With a descriptor**, ``of_head`` is the descriptor and where the head lies in it.
#   ``load_tile`` is in essence ``desc.load([batch, head, start, 0])``.
# - **Without**, ``of_head`` is the address of the head, ``rows`` are the numbers of the tile's
#   rows, and ``ptrs`` holds an address for each element. Rows past the end of the head are masked.

# Reading
lab.read(
    told("descriptors")
    + f"The number of spills goes from {compiled_to('two programs', 'spills')} to "
    f"{compiled_to('descriptors', 'spills')}. "
    + (
        "The waits stay; the assembler reports too few registers for a matmul beside other work, "
        "as a fold under rung 4 tells."
        if compiled_to("descriptors", "waits for them")
        >= compiled_to("two programs", "waits for them")
        else f"The code now waits {waits_of('descriptors')}."
    )
)

# %%
# .. dropdown:: How a descriptor is made, and GPUs without a copy engine
#
#    The host describes a tensor with ``describe``. In the kernel, ``head_of`` joins the descriptor
#    with the numbers of batch and head, ``coordinates`` adds the row and column of a tile, and
#    ``load_tile`` reads the tile.
#
#    .. literalinclude:: /../src/kernelbook/ops/attention/tiles.py
#       :pyobject: describe
#
#    .. literalinclude:: /../src/kernelbook/ops/attention/tiles.py
#       :pyobject: coordinates
#
#    .. literalinclude:: /../src/kernelbook/ops/attention/tiles.py
#       :pyobject: load_tile
#
#    GPUs before Hopper have no TMA. The GeForce RTX 50 series has one, but its matmul instructions
#    read registers and not shared memory, so a tile in shared memory is not yet where it is needed.
#    On both, the package's kernel gets the address of a head instead, because Triton would turn a
#    descriptor into addresses and masks again, and into slow ones: before a thread may load 16
#    bytes at once, the compiler has to know that neighbours in a row are neighbours in memory, and
#    a descriptor that comes from the host does not tell it so at compile time. ``head_of`` gives it
#    an address whose last stride is the constant 1, and ``inside`` computes the addresses of a tile
#    from it.
#
#    .. literalinclude:: /../src/kernelbook/ops/attention/tiles.py
#       :pyobject: head_of
#
#    .. literalinclude:: /../src/kernelbook/ops/attention/tiles.py
#       :pyobject: inside

# %%
# Rung 3: scores one iteration ahead
# ----------------------------------

# Drawing
you_are_here("one iteration ahead")

# %%
# An iteration that begins with exponentials does not have to wait for its keys, because
# exponentials need no new data once the scores are there. A matmul at the beginning has to wait
# until the copy of its keys is complete. The figure sketches how we think this happens with two
# pipeline stages; we have not traced it.
#
# .. image:: /figures/attention-ahead.svg
#    :alt: Two timelines of one iteration. Above, it begins with a matmul: keys and values are
#          copied and the program waits. Then come q k, exponentials, and p v. Below, it begins with
#          exponentials, and values and the next keys are copied meanwhile. Then come p v, and
#          q k of the next tile. The iteration is shorter by the wait.
#
# So with ``AHEAD``, each iteration ends with the scores of the *next* tile, and the next one begins
# with their exponentials, while its values and the keys after them arrive:
#
# .. literalinclude:: attention_fast.py
#    :language: python
#    :pyobject: _loop
#    :start-at: if AHEAD:
#    :end-before: return acc
#    :dedent:
#
# The scores of the first tile are computed before the loops, which end one tile early. After them
# the kernel weighs the last scores and adds the last values.

# Reading

outside = compiled_to("one iteration ahead", "matmul instructions") - compiled_to(
    "descriptors", "matmul instructions"
)
lab.read(
    told("one iteration ahead")
    + f"The code still waits {waits_of('one iteration ahead')}, {outside} of them outside the "
    f"loops, but the assembler now reports another reason, which the next rung takes up."
)

# %%
# Rung 4: the maximum in two steps
# --------------------------------

# Drawing
you_are_here("two-step maximum")

# %%
# A matmul on Hopper runs beside other work until the program waits for its result. After rung 3 the
# code still waits after every matmul instruction. The culprit is an innocent line, the maximum of a
# row, ``tl.max(qk, axis=1)``: put back into the finished kernel, it brings all waits back.
# ``row_max`` returns the same numbers, and ``TWO_STEPS`` selects it:
#
# .. literalinclude:: /../src/kernelbook/ops/attention/forward.py
#    :language: python
#    :pyobject: row_max
#    :start-at: halves
#    :dedent:
#
# The difference is in the *layout*, which says which thread holds which element of a tile.


# Drawing
def owners(block, rows):
    shades, middle = ("Kernel Book", "PyTorch"), {"ha": "center", "va": "center"}
    for row in range(8):
        for column in range(8):
            ink = lab.colour(shades[row == 2])
            block.barh(row + 0.5, 1, 1, column, color=ink, alpha=0.18)
            thread = 4 * row + column // 2
            block.text(column + 0.5, row + 0.5, thread, **middle, fontsize=12)
    block.set(xlim=(0, 8), ylim=(8, 0), aspect="equal")
    block.set_title("the first 8 × 8 elements", fontsize=12)
    for y, blocks, name in (
        (1.5, 8, "scores: 64 columns"),
        (0, 16, "acc: 128 columns"),
    ):
        for at in range(blocks):
            rows.barh(y, 0.92, 0.5, at + 0.04, color=lab.colour(shades[1]), alpha=0.3)
        rows.text(0, y + 0.36, name, fontsize=12)
        rows.text(blocks / 2, y, f"{2 * blocks} a thread", **middle, fontsize=12)
    rows.set(xlim=(0, 16), ylim=(-0.6, 2.4))
    rows.set_title("the third row, whole", fontsize=12)
    for axes in (block, rows):
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set_visible(False)


lab.sketch(
    "Which thread holds which element",
    "Left, a block of 8 by 8 elements of the scores or of acc, with the number of the thread that "
    "holds each: the first row belongs to threads 0 to 3, two elements each, the next row to "
    "threads 4 to 7, and so on; the third row, threads 8 to 11, is marked. Right, the third row "
    "whole: in the scores the block repeats 8 times, so each of the four threads holds 16 elements "
    "of the row, and in acc 16 times, so each holds 32.",
    owners,
    panels=2,
    height=3.0,
)

# %%
# A row of scores and the same row of ``acc`` belong to the same four threads. But a thread holds 16
# elements of the one and 32 of the other, so for the compiler these are two layouts. The maximum of
# a row inherits the layout of the scores, and so does ``alpha``. For ``acc * alpha`` the compiler
# has to bring both into one layout, in one of two ways:
#
# - **Convert** ``alpha``. This costs next to nothing, because it is one number per row. The
#   compiler does so up to rung 2.
# - **Convert** ``acc``, all 128 × 128 numbers of it: into the layout of the scores, to be scaled,
#   and back, because the matmul adds to it in its own layout. With ``AHEAD``, Triton 3.6 does this;
#   why, we have not traced.
#
# Converting means to have the data twice. Imagine a thread with four numbers, which the matmul
# keeps in registers as ``abcd`` and the scaling wants as ``acbd``. A conversion does not reorder
# them in place: it makes a second list, and the first has to stay until the second is complete. So
# four numbers need eight registers. Of ``acc``, a thread has 64.
#
# With ``row_max``, the reshape gives the maximum a layout of its own, and the compiler again
# converts ``alpha``. In the registers of a thread:


# Drawing
def registers_of(name):
    """How the registers of a thread divide: the parts, and what the code does for want of them."""
    acc, scores = ("acc", 128 * 128 // 256), ("scores", 128 * 64 // 256)
    waits = compiled_to(name, "waits for them")
    matmuls = compiled_to(name, "matmul instructions")
    said = f"waits {waits} of {matmuls}, spills {compiled_to(name, 'spills')}"
    if name == "one iteration ahead":  # as Triton's intermediate code has it
        return [acc, ("acc again", acc[1]), scores], said
    rest = compiled_to(name, "registers") - acc[1] - scores[1]
    return [acc, scores, ("rest", rest)], said


def budget(names):
    """Draw the registers of a thread at some rungs, beside the 128 that it may have."""
    shades = {
        "acc": lab.colour("Kernel Book"),
        "acc again": lab.colour("PyTorch"),
        "scores": lab.colour("torch.compile"),
        "rest": lab.colour("matmul"),
    }

    def bars(axes):
        for step, name in enumerate(names):
            parts, said = registers_of(name)
            number = list(LADDER).index(name)
            title = f"rung {number}" if number else "start"
            paper = ", on paper" if parts[1][0] == "acc again" else ""
            axes.text(0, step - 0.38, f"{title}{paper}", va="center", fontweight="bold")
            axes.text(200, step - 0.38, said, va="center", ha="right")
            at = 0
            for part, size in parts:
                axes.barh(
                    step,
                    size - 1,
                    0.42,
                    at,
                    color=shades[part],
                    alpha=0.3,
                    align="center",
                )
                words = (
                    f"{part} {size}"
                    if size > 36 or part != "scores"
                    else f"scores {size}"
                )
                axes.text(
                    at + size / 2, step, words, ha="center", va="center", fontsize=11
                )
                at += size
        axes.axvline(128, color=lab.colour("PyTorch"), linestyle="--", linewidth=1.3)
        axes.set(
            xlim=(0, 200),
            ylim=(len(names) - 0.6, -0.65),
            yticks=[],
            xticks=[0, 64, 128, 192],
        )
        axes.set_xlabel("registers of a thread; dashed: the limit with two programs")
        axes.grid(visible=False)

    if made:
        alt = "; ".join(
            f"{name}: {', '.join(f'{part} {size}' for part, size in registers_of(name)[0])}, "
            f"{registers_of(name)[1]}"
            for name in names
        )
        title = "Registers of a thread, up to rung 4"
        lab.sketch(title, alt, bars, height=0.75 + 0.68 * len(names))


budget(list(LADDER)[:5])

# %%

# Reading
lab.read(
    f"Two lists of `acc` and the scores would take 160 registers, and a thread has 128, yet only "
    f"{compiled_to('one iteration ahead', 'spills')} values spill. In a message that this page "
    f"does not record (fold), the assembler says that it waits for each matmul because other "
    f"instructions touch the registers of one that is under way. We suspect that the two "
    f"lists share registers."
)

# %%

# Reading
lab.read(
    told("two-step maximum")
    + f"Of {compiled_to('one iteration ahead', 'waits for them')} waits "
    f"{compiled_to('two-step maximum', 'waits for them')} are left."
)

# %%
# .. dropdown:: Where to see this: the conversions, and the messages that Triton hides
#
#    Triton's intermediate code, ``compiled.asm["ttgir"]``, names every conversion,
#    ``ttg.convert_layout``. In the loop over cut tiles it converts ``tensor<128x1xf32>`` up to rung
#    2, ``tensor<128x128xf32>`` twice in rung 3, and ``tensor<128x1xf32>`` again in this one.
#
#    The assembler, ptxas, reports the waits of rung 3 as C7514. Those of the first two rungs it
#    reports as C7512, too few registers to overlap a matmul with anything. Triton shows neither
#    message, and this page records neither them nor the conversions. It records the waits
#    (``WARPGROUP.DEPBAR``) and the matmul instructions (``HGMMA``), counted in the machine code.

# %%
# Rung 5: the scale inside the exponential
# ----------------------------------------

# Drawing
you_are_here("scale folded")

# %%
# The kernel can save a multiplication per score. So far it multiplies every score by the scale and
# then subtracts the maximum. The scale is positive, so the maximum may be taken before scaling.
# With :math:`x` for a dot product, :math:`c` for the scale times :math:`\log_2 e` (``scale_log2``),
# and :math:`m = c \max x`, a weight is :math:`2^{c x - m}`, whose exponent is one instruction, a
# fused multiply-add. First ``_weigh`` scales (without ``FOLDED``), masks, and takes the maximum:
#
# .. literalinclude:: attention_fast.py
#    :language: python
#    :pyobject: _weigh
#    :start-at: if not FOLDED
#    :end-before: # -- exponential
#    :dedent:
#
# Then come the weights, in the old way or the new, and the update of ``l_i``:
#
# .. literalinclude:: attention_fast.py
#    :language: python
#    :pyobject: _weigh
#    :start-at: # -- exponential
#    :dedent:


# Reading
little = max(abs(gain("scale folded", mask)) for mask in ("full", "causal")) < 0.02
lab.read(
    told("scale folded")
    + (
        "One multiplication less per score is worth little, so these instructions are not what "
        "limits the loop."
        if little
        else "One multiplication less per score is worth that much, so the instructions beside "
        "the exponential do slow the loop."
    )
)

# %%
# .. dropdown:: The instructions of one exponential
#
#    The table counts what the compiler makes of one exponential, written in three ways: additions
#    (``FADD``), multiplications (``FMUL``), fused multiply-adds (``FFMA``), and the exponential
#    itself (``MUFU.EX2``). From the first row to the second only the base changes, from the second
#    to the third only the place of the scale.


# %%


# Measuring
@triton.jit
def _exponent_kernel(x_ptr, y_ptr, m, scale, WAY: tl.constexpr):
    at = tl.arange(0, 128)
    x = tl.load(x_ptr + at)
    if WAY == 0:
        y = tl.exp((x - m) * scale)
    elif WAY == 1:
        y = tl.exp2((x - m) * scale)
    else:
        y = tl.exp2(x * scale - m)
    tl.store(y_ptr + at, y)


def instructions():
    x = torch.ones(128, device=runtime.DEVICE)
    ways = ("exp((x - m) * scale)", "exp2((x - m) * scale)", "exp2(x * scale - m)")
    rows = []
    for number, name in enumerate(ways):
        compiled = _exponent_kernel[(1,)](x, torch.empty_like(x), 3.7, 0.3, number)
        words = compiled.asm["sass"].split()
        row = {"written as": name}
        for kind in ("FADD", "FMUL", "FFMA", "MUFU.EX2"):
            row[kind] = sum(
                word == kind or word.startswith(kind + ".") for word in words
            )
        rows.append(row)
    return rows


# %%

# Folded: The instructions, counted
lab.measure("Instructions for one exponential", instructions)

# %%
# Rung 6: heavy tiles first
# -------------------------

# Drawing
you_are_here("heavy first")

# %%
# The last change is the order in which the programs start. In causal attention the last queries see
# the most keys. If they start last, a few heavy programs run on at the end while the rest of the
# GPU has nothing to do.

# %% An animation
# Here the 16 programs of two heads run on three SMs, two at a time on each. Light first and head by
# head, a program of 8 tiles starts when most of the work is done. Heavy first, across both heads,
# the light programs fill the gaps.
#
# .. animation:: light_or_heavy_first

# %%
# ``place`` turns the number of a program into a tile of queries and a head, and ``HEAVY_FIRST``
# reverses the order of the ``n_tiles`` tiles. The same rung lets programs alternate between
# ``HEADS_AT_ONCE`` heads, because otherwise the heavy tiles of the last heads still start late:
#
# .. literalinclude:: attention_fast.py
#    :language: python
#    :pyobject: _rung_kernel
#    :start-at: n_tiles = tl.cdiv
#    :end-before: start_m = tile
#    :dedent:

# %%

# Folded: A simulation of all programs on an H200


def finish_time(weights, slots=264):
    free = [0] * slots
    for weight in weights:
        heapq.heappush(free, heapq.heappop(free) + weight)
    return max(free)


def heavy_first(tiles, heads, at_once):
    """The tiles of keys of each program, in the order of `place` with its tiles reversed."""
    return [
        tiles - tile
        for first in range(0, heads, at_once)
        for tile in range(tiles)
        for _ in range(min(at_once, heads - first))
    ]


rows = []
for tiles, heads in ((32, 64), (32, 16), (128, 16)):
    fitting = 30 * 2**20 // (2 * tiles * 128 * 128 * 2)  # into half of an H200's L2
    at_once = 2 ** (fitting.bit_length() - 1)
    light_first = [t + 1 for _ in range(heads) for t in range(tiles)]
    ideal = sum(light_first) / 264
    row = {"tiles of queries": tiles, "heads": heads}
    busy = [
        round(100 * ideal / finish_time(weights))
        for weights in (
            light_first,
            *(heavy_first(tiles, heads, n) for n in (1, at_once, heads)),
        )
    ]
    row["light first"], row["heavy first, head by head"] = (f"{x} %" for x in busy[:2])
    row["as many heads as run at once"] = f"{at_once} heads: {busy[2]} %"
    row["all heads"] = f"{busy[3]} %"
    if not rows:
        reversal_alone, promised = (x / busy[0] - 1 for x in busy[1:3])
    rows.append(row)

lab.table(
    rows,
    "Share of the slots at work, causal. 132 SMs with two slots each; a slot that is free takes "
    "the next program, whose time is its tiles of keys. The ladder measures the first row",
)

# %%
# All heads at once may have more keys and values than L2 holds, so the programs alternate between
# only as many heads as fit into half of the cache, a power of two, and without a mask not at all.
#
# .. dropdown:: Which tile of which head a program computes
#
#    .. literalinclude:: /../src/kernelbook/ops/attention/tiles.py
#       :pyobject: place

# %%

# Reading
short = gain("heavy first", "causal") < promised
lab.read(
    told("heavy first")
    + f"A simulation of this order with the causal mask promises {100 * promised:.0f} %, and of "
    f"the reversal alone, head by head, "
    + ("nothing. " if abs(reversal_alone) < 0.01 else f"{100 * reversal_alone:.0f} %. ")
    + (
        "We measure less, and suspect that a program beside an idle slot runs faster, which the "
        "simulation leaves out. "
        if short
        else ""
    )
    + "Without a mask all programs are equally heavy."
)

# %%
# Each change taken back
# ----------------------

# Reading
last = list(LADDER)[-1]
raised = {
    mask: steps.rate(last, mask=mask) / steps.rate("in stages", mask=mask) - 1
    for mask in ("causal", "full")
}
above = steps.rate(last, mask="full") > from_hbm
lab.read(
    f"Together, the six changes raise the speed by {100 * raised['causal']:.0f} % with the causal "
    f"mask, and by {100 * raised['full']:.0f} % without. We call the last rung the **finished "
    f"kernel**. "
    + (
        f"Without a mask it reaches {steps.rate(last, mask='full'):.0f} TFLOP/s, more than HBM "
        f"alone would allow, so L2 does serve some of the loads."
        if above
        else ""
    )
)

# %%
# .. admonition:: Key idea
#    :class: kb-key
#
#    A change may be worth little at one place of the ladder and much at another.
#
# So we also take each change back by itself, from the finished kernel. The last two columns count
# the spills of what is left, and how often it waits for how many matmul instructions (causal):


# Measuring
rows = []
for name in list(LADDER)[1:]:
    version = f"without {name}" if name != last else list(LADDER)[-2]
    changes = {"when made, causal": gain(name, "causal")}
    for mask in ("causal", "full"):
        changes[f"taken back, {mask}"] = (
            steps.rate(version, mask=mask) / steps.rate(last, mask=mask) - 1
        )
    row = {"change": name} | {
        what: "same" if abs(x) < 0.01 else f"{100 * x:+.0f} %".replace("-", "−")
        for what, x in changes.items()
    }
    row["spills then"] = compiled_to(version, "spills")
    waits, matmuls = (
        compiled_to(version, what) for what in ("waits for them", "matmul instructions")
    )
    row["waits then"] = f"{waits} for {matmuls}"
    rows.append(row)
if steps.provenance is None or not made:
    rows = []
lab.table(rows, "Each change when made, and taken back from the finished kernel")

# %%

# Reading
worth = {
    name: 1
    - steps.rate(f"without {name}", mask="causal") / steps.rate(last, mask="causal")
    for name in list(LADDER)[1:-1]
}
most = max(worth, key=worth.get)
little = [name for name, share in worth.items() if abs(share) < 0.02]
alone = "two programs"


lab.read(
    f"With a causal mask the finished kernel loses most, {100 * worth[most]:.0f} %, without "
    f"“{most}”"
    + (
        ", because three stages leave no room for a second program. "
        if most == alone
        else ". "
    )
    + (
        "At its rung it brought next to nothing, but since then the waits after each matmul "
        "instruction have gone."
        if most == alone and abs(gain(alone, "causal")) < 0.02
        else ""
    )
)

# %%

# Reading
crowded = compiled_to("without descriptors", "spills") > compiled_to(
    "two programs", "spills"
)
scarce = compiled_to("without one iteration ahead", "waits for them") == compiled_to(
    "without one iteration ahead", "matmul instructions"
)
lab.read(
    (
        f"Two more changes are worth more than the ladder showed. "
        f"Without descriptors, {compiled_to('without descriptors', 'spills')} values spill. "
        f"Without scores ahead, the code waits {waits_of('without one iteration ahead')}. "
        if crowded
        and scarce
        and all(
            worth[name] > gain(name, "causal")
            for name in ("descriptors", "one iteration ahead")
        )
        else f"Without descriptors the code has {compiled_to('without descriptors', 'spills')} "
        f"spills, and without scores ahead it waits {waits_of('without one iteration ahead')}. "
    )
    + (f"Worth less than 2 %: {', '.join(little)}." if little else "")
)

# %%

# Folded: The two changes of rung 1 in the finished kernel
TIMED = {
    "both": ("finished", list(LADDER)[-1]),
    "two pipeline stages alone": (
        "finished, two stages alone",
        "without register limit",
    ),
    "register limit alone": ("finished, register limit alone", "without two stages"),
    "none": ("finished, neither", "without two programs"),
}
lab.table(
    [
        row
        | {
            f"{mask}, TFLOP/s": f"{steps.rate(TIMED[row['change']][1], mask=mask):.0f}"
            for mask in ("causal", "full")
        }
        for row in by_half({name: half.get(of) for name, (of, _) in TIMED.items()})
    ],
    "The finished kernel with one or both halves of rung 1, causal",
)

# %%

# Reading
by_stages, by_limit, by_both, by_none = (
    steps.rate(TIMED[x][1], mask="causal")
    for x in ("two pipeline stages alone", "register limit alone", "both", "none")
)
lab.read(
    "Of the two halves of rung 1, the finished kernel needs the stages alone: without the register "
    "limit it is as fast, and with the limit but three stages as slow as with neither (fold)."
    if abs(by_stages / by_both - 1) < 0.01 and abs(by_limit / by_none - 1) < 0.01
    else f"With a causal mask the finished kernel reaches {by_stages:.0f} TFLOP/s with two stages "
    f"alone, {by_both:.0f} with both, and {by_limit:.0f} with the limit alone."
)

# %%
# The kernel of the package
# -------------------------
#
# The package's kernel has this loop with every flag on. It also takes any head_dim up to 256,
# windows, grouped heads and strides, and writes :term:`lse <logsumexp>`, from which the backward
# pass computes the weights again.
#
# .. dropdown:: Grouped heads, strides, sizes of tiles, and how it writes ``out`` and ``lse``
#
#    Several query heads may share one head of keys and values. If :math:`g` of them share one,
#    query head :math:`h` reads head :math:`h / g` of the keys, rounded down, which is
#    ``head // group`` in the kernel. Nothing is copied.
#
#    A model often keeps its tensors as (batch, length, heads, head_dim) and passes a transposed
#    view. A descriptor takes any strides, as long as the last dimension is contiguous and the
#    others are multiples of 16 bytes. Any other view is copied first.
#
#    With more queries in a tile, keys and values are read less often, but a larger tile needs more
#    registers and more shared memory. We tuned this once, and the package keeps the winners in a
#    table.
#
#    ``m_i`` is in base 2, so a factor :math:`\ln 2` turns it into a natural logarithm. Row numbers
#    are 64 bits wide, because ``out`` may have more than :math:`2^{31}` elements.
#    ``sum_of_weights`` returns ``l_i``, or NaN where a query sees keys and all their scores are
#    :math:`-\infty`.
#
#    .. literalinclude:: /../src/kernelbook/ops/attention/forward.py
#       :pyobject: attention_fwd_kernel
#       :start-at: # -- write
#       :dedent:

# %%

# Folded: Tile sizes on Hopper
rows = []
for (kernel, head_dim, itemsize), config in tuned.HOPPER.items():
    if kernel != "forward":
        continue
    row = {"head_dim up to": head_dim, "bits per element": 8 * itemsize}
    row |= {"queries per tile": config.block_m, "keys per tile": config.block_n}
    row |= {"warps": config.num_warps, "pipeline stages": config.num_stages}
    row |= {"register limit": config.maxnreg or 255}
    rows.append(row | {"shared memory, bytes": f"{config.shared:,}"})
lab.table(rows, "Tile sizes, warps and pipeline stages on Hopper")

# %%
# .. dropdown:: The kernel whole
#
#    ``P_LOG2`` is 0 here; it belongs to :doc:`the chapter on FP8 </chapters/attention_fp8>`.
#
#    .. literalinclude:: /../src/kernelbook/ops/attention/forward.py
#       :pyobject: row_max
#
#    .. literalinclude:: /../src/kernelbook/ops/attention/forward.py
#       :pyobject: weigh
#
#    .. literalinclude:: /../src/kernelbook/ops/attention/forward.py
#       :pyobject: attend
#
#    .. literalinclude:: /../src/kernelbook/ops/attention/forward.py
#       :pyobject: attention_fwd_kernel

# %%
# Is it right?
# ------------
#
# A kernel like this goes wrong first at sizes that no tile divides, such as lengths of 1, 127 and
# 1,000, or head_dim 80. So the check compares these with float64.
#
# .. dropdown:: How much error is allowed, and what the name of an input lists
#
#    In 16 bits the error may be twice PyTorch's, or one unit in the last place, and in float32
#    eight times, because each multiplication by ``alpha`` adds a rounding. The name of an input
#    lists batch, heads, heads of keys, queries, keys and head_dim. A *transposed* input is a view
#    of tensors with the length before the heads.


# Measuring
def attention_case(shape, dtype, is_causal, transposed=False):
    batch, heads, heads_k, seqlen_q, seqlen_k, head_dim = shape
    tensors = []
    for n_heads, length in (
        (heads, seqlen_q),
        (heads_k, seqlen_k),
        (heads_k, seqlen_k),
    ):
        size = (batch, length, n_heads) if transposed else (batch, n_heads, length)
        x = torch.randn(*size, head_dim, device=runtime.DEVICE).to(dtype)
        tensors.append(x.transpose(1, 2) if transposed else x)
    q, k, v = tensors
    ours, lse = attention(
        q, k, v, is_causal=is_causal, enable_gqa=True, return_lse=True
    )
    truth, true_lse = reference.attention(q, k, v, is_causal)
    k, v = (x.repeat_interleave(heads // heads_k, dim=1) for x in (k, v))
    mask = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=q.device)
    mask = mask.tril(seqlen_k - seqlen_q) if is_causal else mask
    theirs = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    scores = (q.float() @ k.float().mT * head_dim**-0.5).masked_fill(~mask, -torch.inf)
    what = f"{shape}{', causal' * is_causal}{', transposed' * transposed}"
    factor = 8 if dtype == torch.float32 else 2
    yield lab.Case(what, "forward", ours, theirs, truth, factor)
    yield lab.Case(what, "lse", lse, scores.logsumexp(-1), true_lse, 8)


# %%

shapes = [  # batch, heads, heads of keys, queries, keys, head_dim
    (2, 2, 2, 1, 127, 64),
    (1, 2, 2, 127, 127, 80),
    (2, 4, 2, 33, 100, 96),
    (1, 3, 1, 1, 1000, 128),
]
if not runtime.INTERPRETED:
    shapes += [
        (2, 8, 2, 1000, 1000, 64),
        (1, 4, 4, 1000, 4096, 128),
        (1, 2, 2, 500, 500, 256),
    ]


def every_case():
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for number, shape in enumerate(shapes):
            for is_causal in (False, True) if dtype == torch.float32 else (True,):
                transposed = number % 2 == 0
                yield from attention_case(shape, dtype, is_causal, transposed)


lab.check("attention", every_case())

# %%


# Measuring
q, k, v = torch.randn(3, 2, 3, 70, 32, device=runtime.DEVICE)
k_later, v_later = k.clone(), v.clone()
k_later[:, :, 50:], v_later[:, :, 50:] = 7.0, 1e30
order = torch.randperm(70, device=runtime.DEVICE)
out, lse = attention(q, k, v, return_lse=True)
causal = attention(q, k, v, is_causal=True)
changed = attention(q, k_later, v_later, is_causal=True)
moved, moved_lse = attention(q, k[:, :, order], v[:, :, order], return_lse=True)
shifted, shifted_lse = attention(q, k + k[:, :, :1], v, return_lse=True)
added = (q * k[:, :, :1]).sum(-1) * 32**-0.5
properties = {
    "changing the keys after a query changes no bit": torch.equal(
        causal[:, :, :50], changed[:, :, :50]
    ),
    "all values 1 give 1": torch.allclose(attention(q, k, v * 0 + 1), v * 0 + 1),
    "the order of the keys does not matter": torch.allclose(out, moved, atol=1e-4),
    "nor does it for lse": torch.allclose(lse, moved_lse, atol=1e-4),
    "one vector added to all keys does not matter": torch.allclose(
        out, shifted, atol=1e-4
    ),
    "and moves lse by its score": torch.allclose(lse + added, shifted_lse, atol=1e-4),
    "the last query sees what it sees without a mask": torch.allclose(
        causal[:, :, -1], out[:, :, -1], atol=1e-4
    ),
}
assert all(properties.values())

# %%

# Folded: Relations that must be true for any input, all of which hold
lab.table(
    [{"property": name, "holds": holds} for name, holds in properties.items()],
    "Properties",
)

# %%
# How fast is it?
# ---------------
#
# The best libraries are still faster than the kernel in plain Triton. Three of those timed come
# with PyTorch: FlexAttention, which it compiles, and two kernels of
# ``scaled_dot_product_attention``, FlashAttention-2 (*SDPA flash*) and NVIDIA's (*SDPA cuDNN*).
# The line *FlashAttention* is FlashAttention 4. Every point has 16,384 tokens in all.

# Measuring
LENGTHS = [1024, 4096, 16384]


def providers(seqlen, batch, heads, head_dim, mask, causal, dtype):
    q, k, v = draw(batch, heads, seqlen, head_dim, dtype)
    is_causal = mask == "causal"
    ours = {"Kernel Book": lambda: attention(q, k, v, is_causal=is_causal)}
    return {"matmul": matmul()} | libraries((q, k, v), is_causal) | ours


speed = lab.bench("forward", points(LENGTHS), providers, **FORWARD)
lab.plot(speed, "head_dim 128, full", where={"head_dim": 128, "mask": "full"})

# %%

lab.plot(speed, "head_dim 128, causal", where={"head_dim": 128, "mask": "causal"})

# %%

# Folded: The same at head_dim 64
lab.plot(speed, "head_dim 64, full", where={"head_dim": 64, "mask": "full"})
lab.plot(speed, "head_dim 64, causal", where={"head_dim": 64, "mask": "causal"})

# %%

# Folded: All points, and the libraries that are faster


def ahead_of_ours(**where):
    """The libraries that are faster at a point by more than 1 %, with their TFLOP/s."""
    ours = speed.rate("Kernel Book", **where)
    ahead = speed.ahead_of("Kernel Book", *LIBRARIES, **where)
    return [(name, rate) for name, rate in ahead if rate > 1.01 * ours]


at_points = []
for point in points(LENGTHS, (128, 64)):
    where = {key: point[key] for key in ("head_dim", "mask", "seqlen")}
    faster = ahead_of_ours(**where)
    at_points.append(
        {
            "head_dim": point["head_dim"],
            "mask": point["mask"],
            "length": point["seqlen"],
            "TFLOP/s": f"{speed.rate('Kernel Book', **where):.0f}",
            "of the matmul": f"{100 * speed.share('Kernel Book', **where):.0f} %",
            "faster libraries": ", ".join(f"{name} {rate:.0f}" for name, rate in faster)
            or "none",
        }
    )

lab.table(
    at_points if speed.rows else [],
    "The plain Triton kernel, and the libraries that are faster by more than 1 %",
)

# %%


# Reading
def gaps(name):
    """By how many percent a library is ahead, at the points where it is."""
    found = []
    for point in points(LENGTHS, (128, 64)):
        where = {key: point[key] for key in ("head_dim", "mask", "seqlen")}
        ahead = dict(ahead_of_ours(**where))
        if name in ahead:
            share = ahead[name] / speed.rate("Kernel Book", **where) - 1
            found.append(100 * share)
    return found


def told_of(name):
    """Where a library is ahead, in words."""
    if name in speed.skipped:
        return f"{name} is absent from this run; the notes under the figures say why. "
    found = gaps(name)
    if not found:
        return f"{name} is faster at none. "
    return f"{name} is faster at {len(found)}, by up to {max(found):.0f} %. "


beaten = sum(row["faster libraries"] != "none" for row in at_points)

lab.read(
    f"Of all {len(at_points)} points, those in the fold included, a library is faster by more than "
    f"1 % at {beaten}. "
    + "".join(told_of(name) for name in ("FlashAttention", "SDPA cuDNN"))
    if speed.rows
    else f"{speed.rate('Kernel Book')}"
)

# %%
# **Short lengths are further from the matmul.** We suspect that what happens once per program, such
# as loading the queries, weighs more there.

# Reading


def constants_of(name):
    """What happens once per program, in tiles of 64 keys, by two pairs of lengths."""
    where = {"head_dim": 128, "mask": "full"}
    found = []
    for far in (16384, 4096):
        short, long = (
            speed.milliseconds_at(name, seqlen=length, **where)
            for length in (1024, far)
        )
        per_tile = (long - short) / ((far - 1024) / 64)
        found.append(short / per_tile - 1024 / 64)
    return found


own = constants_of("Kernel Book")
best, _ = speed.best_peer(*LIBRARIES, head_dim=128, mask="full", seqlen=1024)
beside = constants_of(best) if best != "none" else [nan, nan]
once = [100 * tiles / (16 + tiles) for tiles in own]
lab.read(
    f"Two estimates put it at {once[0]:.0f} and {once[1]:.0f} % of our kernel's time at length "
    f"1,024 without a mask."
)

# %%

# Folded: How the two estimates were made
lab.read(
    f"We assume that the time of a program is a constant plus a time for each tile of keys. All "
    f"three lengths have the same number of programs, so any two of their times, at head_dim 128 "
    f"without a mask, give both parts. From 1,024 and 16,384 the constant is as long as "
    f"{own[0]:.1f} tiles of 64 keys, and from 1,024 and 4,096 as {own[1]:.1f}. The two differ, so "
    f"the assumption holds only roughly. For {best}, the fastest library at 1,024, they are "
    f"{beside[0]:.1f} and {beside[1]:.1f}. With a causal mask the kernel also discards half of "
    f"each tile on the diagonal, at length 1,024 an eighth more work."
)

# %%

# Reading
long = {
    head_dim: speed.share("Kernel Book", head_dim=head_dim, mask="full", seqlen=16384)
    for head_dim in (128, 64)
}
lab.read(
    f"**What keeps it below a matmul at long lengths?** We suspect the exponentials. At length "
    f"16,384 without a mask, it reaches {100 * long[128]:.0f} % of a matmul at head_dim 128, and "
    f"{100 * long[64]:.0f} % at 64"
    + (
        ", where the same exponential stands beside half as many operations."
        if long[64] < long[128]
        else "."
    )
)

# %%
# While one program waits for a matmul, the other may compute exponentials, but nothing keeps them
# in step. :doc:`/chapters/attention_hopper` does so with warps in different roles, which plain
# Triton cannot express.

# %%


# Measuring
def launch(head_dim, dtype):
    q, k, v = draw(1, 4, 1024, head_dim, dtype)
    return lambda: attention(q, k, v, is_causal=True)


# %%

# Folded: What the compiler made of the kernel in each dtype
facts = lab.facts(
    "What the compiler made of the kernel, causal",
    {
        f"head_dim {head_dim}, {str(dtype).removeprefix('torch.')}": (
            lambda head_dim=head_dim, dtype=dtype: launch(head_dim, dtype)()
        )
        for head_dim in (64, 128, 256)
        for dtype in (torch.bfloat16, torch.float32)
    },
)
facts

# %%


# Measuring
def microseconds(run, *inputs, repeats=200):
    for _ in range(20):
        run(*inputs)
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        run(*inputs)
    end.record()
    torch.cuda.synchronize()
    return round(1e3 * start.elapsed_time(end) / repeats, 1)


def small_inputs():
    rows = []
    for length in (128, 512, 2048, 4096):
        inputs = draw(1, 16, length, 128)
        row = {"length": length}
        row["SDPA, µs"] = microseconds(F.scaled_dot_product_attention, *inputs)
        row["Kernel Book, µs"] = microseconds(attention, *inputs)
        rows.append(row)
    return rows


# %%

# Folded: Time per call
small = lab.measure("Time per call, back to back, 16 heads, head_dim 128", small_inputs)
small

# %%

# Reading
first, second, last_one = (
    (small.rows[0], small.rows[1], small.rows[-1]) if small.rows else ({}, {}, {})
)


def beside_sdpa(row):
    """How long a call takes beside PyTorch's, in words."""
    ratio = row.get("Kernel Book, µs", nan) / row.get("SDPA, µs", nan)
    if abs(ratio - 1) < 0.05:
        return "about as long as PyTorch's"
    if ratio < 1:
        return f"{100 * (1 - ratio):.0f} % less than PyTorch's"
    return f"{ratio:.1f} times as long as PyTorch's"


outlasts = last_one.get("Kernel Book, µs", nan) > 1.3 * first.get(
    "Kernel Book, µs", nan
)
lab.read(
    f"**Small inputs.** At length {first.get('length', nan):,} a call takes "
    f"{first.get('Kernel Book, µs', nan):.0f} µs, {beside_sdpa(first)}"
    + (
        f". At {second.get('length', nan):,} it takes about as long, so the host code sets the "
        f"time, Python here and C++ in PyTorch."
        if abs(
            second.get("Kernel Book, µs", nan) / first.get("Kernel Book, µs", nan) - 1
        )
        < 0.05
        else "."
    )
    + (
        f" At {last_one.get('length', nan):,} the kernel outlasts the host code."
        if outlasts
        else ""
    )
)

# %%
# What breaks it
# --------------
#
# **A descriptor that flattens the heads.** All heads lie one after the other in memory. If a
# descriptor presents them as one matrix of (batch · heads · length) rows, the copy engine does not
# know where a head ends. In this example with two heads of 20 rows, and tiles of 16, one program
# copies the last tile of the *first* head, times ten:

from triton.tools.tensor_descriptor import TensorDescriptor


@triton.jit
def _last_tile_kernel(x_desc, y_desc, FLAT: tl.constexpr):
    if FLAT:  # (heads * length, head_dim): the tile starts at row 16 of the matrix
        y_desc.store([16, 0], x_desc.load([16, 0]) * 10)
    else:  # (heads, length, head_dim): it starts at row 16 of head 0
        y_desc.store([0, 16, 0], x_desc.load([0, 16, 0]) * 10)


# %%

# Measuring
x = torch.ones(2, 20, 16, device=runtime.DEVICE)
x[1] = 2
rows = []
for flat in (False, True):
    y = torch.zeros_like(x)
    shape, block = ([40, 16], [16, 16]) if flat else ([2, 20, 16], [1, 16, 16])
    views = (t.view(shape) for t in (x, y))
    descs = [TensorDescriptor(t, shape, list(t.stride()), block) for t in views]
    _last_tile_kernel[(1,)](*descs, flat)
    rows.append(
        {
            "descriptor": "flattened" if flat else "heads apart",
            "in head 0": (y[0, :, 0] != 0).sum().item(),
            "in head 1": (y[1, :, 0] != 0).sum().item(),
        }
    )
assert [row["in head 1"] for row in rows] == [0, 12]
lab.table(rows, "Rows that the program of head 0 wrote")

# %%
# The program wrote 12 rows of the wrong head. The program of that head writes them, too, and
# whichever finishes last wins. Where the length is a multiple of the tile, nothing goes wrong,
# which is why such a kernel passes many tests.

# %%

# Folded: Why reading past the end of a head is not harmless either
v = torch.zeros(32, 16)
v[20:] = torch.inf  # the first rows of the next head
weights = torch.zeros(1, 32)
weights[:, :20] = 1 / 20
found = (weights @ v)[0, 0].item()
lab.read(
    f"With 20 values of 0, and 12 infinite ones of the next head at weight zero, the sum is "
    f"{str(found).replace('nan', 'NaN')}, because zero times infinity is."
)

# %%
# **Too much shared memory.** Every pipeline stage has its own tile of keys and of values.


# Measuring
def greedy():
    q, _, _ = draw(1, 4, 1024, 128)
    config = tuned.by_descriptor(128, 128, num_warps=8, num_stages=5, shared=0)
    try:
        with mock.patch.object(tuned, "forward_config", return_value=config):
            attention(q, q, q)
        said = "Nothing: this GPU has enough."
    except Exception as error:
        said = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return [{"what the launch says": line} for line in textwrap.wrap(said, 56)]


refused = lab.measure("128 queries and 128 keys in a tile, 5 stages", greedy)

# %%

# Reading
said = " ".join(row["what the launch says"] for row in refused.rows) or f"{nan}"
sizes = re.search(r"Required: (\d+), Hardware limit: (\d+)", said)
lab.read(
    f"With 5 stages of 128 keys, the kernel would need {int(sizes[1]):,} bytes, and a program may "
    f"have {int(sizes[2]):,}. The launch raises `{said.split(':')[0]}`, so the package takes the "
    f"first configuration that fits."
    if sizes
    else said
)

# %%

# Folded: What the package says on a made-up device that has only 8 KiB
made_up = {"INTERPRETED": False, "capability": lambda device: (8, 6)}
made_up["shared_memory"] = lambda device: 8192
name = mock.patch.object(
    torch.cuda, "get_device_name", return_value="a GPU that is made up"
)
with mock.patch.multiple(runtime, **made_up), name:
    try:
        tuned.forward_config(torch.empty(1, 1, 1, 128, dtype=torch.float16))
    except ValueError as error:
        message = str(error)
lines = textwrap.wrap(f"ValueError: {message}", 56)
lab.table([{"what the package says": line} for line in lines], "Too little memory")

# %%
# .. dropdown:: A third trap: an address that the compiler cannot prove aligned
#
#    A thread may load 16 bytes at once only if the compiler knows that their address is aligned.
#    Here it starts at a number unknown at compile time: ``tl.multiple_of`` promises what the
#    compiler cannot prove. With a descriptor no promise is needed.


# Measuring
@triton.jit(do_not_specialize=["tile", "rows"])
def _offset_kernel(x_ptr, y_ptr, tile, rows, PROMISE: tl.constexpr):
    start = tile * rows
    if PROMISE:
        start = tl.multiple_of(start, 8)
    at = tl.arange(0, 1024)
    tl.store(y_ptr + at, tl.load(x_ptr + start + at))


def widths():
    x = torch.ones(4096, device=runtime.DEVICE, dtype=torch.float16)
    rows = []
    for promise in (False, True):
        compiled = _offset_kernel[(1,)](x, torch.empty_like(x), 4, 64, promise)
        words = [w for w in compiled.asm["ptx"].split() if w.startswith("ld.global")]
        kind = "with" if promise else "without"
        rows.append(
            {"tl.multiple_of": kind, "loads per thread": len(words), "kind": words[0]}
        )
    return rows


# %%

# Folded: The loads with and without the promise
lab.measure("Loads of eight 16-bit elements per thread", widths)

# %%
# In short
# --------
#
# Four of the six changes cost the finished kernel most when they are taken back: a second program
# on the SM, tiles that the copy engine brings, scores computed one iteration ahead, and a maximum
# in two steps. With all six, the code waits for few of its matmul instructions. We suspect that
# exponentials still keep it below a matmul, because nothing keeps them in step with the matmuls.
#
# :doc:`/chapters/attention_backward` turns to the gradient, and
# :doc:`/chapters/attention_in_models` to a single query, whose keys it splits among programs.
#
# Exercises
# ---------
#
# **1. How many programs fit?** Which tiles of 64, 128 or 256 keys, and how many pipeline stages,
# leave room on an SM for two programs of 128 queries at head_dim 128 in 16 bits, by shared memory
# alone?

# %%

# Solution: how many programs fit
rows = []
for keys in (64, 128, 256):
    row = {"keys per tile": keys}
    for stages in (1, 2, 3):
        kib = (128 + stages * 2 * keys) * 128 * 2 / 1024
        what = "1 stage" if stages == 1 else f"{stages} stages"
        row[what] = f"{kib:.0f} KiB: {int(227 // kib)}"
    rows.append(row)
assert rows[0]["2 stages"] == "96 KiB: 2"
lab.table(rows, "Shared memory per program, and how many programs fit on an SM")

# %%
# **2. A soft cap.** Some models bound their scores: a score :math:`s` becomes
# :math:`b \tanh(s / b)` before the mask. Write the lines of ``_weigh`` for it, in PyTorch if you
# like. How much of rung 5 is left?

# %%

# Solution: a soft cap
#
# tanh rises with its argument, so the maximum may still be taken of the raw dot products. Their
# scale is now inside tanh and takes a multiplication again. But the factor b log2(e) outside is
# joined with the subtraction of the maximum in one fused multiply-add, as the scale was.
x, scale, bound = 30 * torch.randn(4, 64, dtype=torch.float64), 128**-0.5, 5.0
inside, outside = scale / bound, bound * 1.4426950408889634
m_new = outside * torch.tanh(x.amax(-1) * inside)
p = torch.exp2(torch.tanh(x * inside) * outside - m_new[:, None])
truth = torch.softmax(bound * torch.tanh(x * scale / bound), -1)
off = (p / p.sum(-1, keepdim=True) - truth).abs().max().item()
assert off < 1e-14
lab.table(
    [{"bound": bound, "off by": f"{off:.0e}"}], "Weights under a soft cap, float64"
)

# %%
# References
# ----------
#
# - Dao, Fu, Ermon, Rudra, Ré. *FlashAttention: fast and memory-efficient exact attention with
#   IO-awareness.* NeurIPS 2022.
# - Dao. *FlashAttention-2: faster attention with better parallelism and work partitioning.* ICLR
#   2024.
# - Shah, Bikshandi, Zhang, Thakkar, Ramani, Dao. *FlashAttention-3: fast and accurate attention
#   with asynchrony and low-precision.* NeurIPS 2024.
# - Zadouri, Hoehnerbach, Shah, Liu, Thakkar, Dao. *FlashAttention-4: algorithm and kernel
#   pipelining co-design for asymmetric hardware scaling.* arXiv:2603.05451, 2026.
# - Ainslie and others. *GQA: training generalized multi-query transformer models from multi-head
#   checkpoints.* EMNLP 2023.
# - NVIDIA. *CUDA C++ programming guide*, throughput of native arithmetic instructions: exponentials
#   per SM and cycle.

# %%

# Closing
reached = [
    speed.share("Kernel Book", head_dim=head_dim, mask=mask, seqlen=16384)
    for head_dim in (64, 128)
    for mask in ("full", "causal")
]
lab.finish(
    f"{min(reached):.0%} to {max(reached):.0%} of the speed of a matmul at length 16,384"
)
