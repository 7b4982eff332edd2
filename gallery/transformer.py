"""
A transformer, measured
=======================

The kernels of this book are parts of a model, and making one of them twice as fast achieves little
if the model hardly waits for it. *Where do the time and the memory of a training step go, and how
much of each do the book's operators save?*

You will learn

- how to time a training step, group the kernels in its profile by what they do, and capture the
  step as a CUDA graph;
- how mixed precision changes time, memory and dtypes, and which tensors fill the memory;
- how much the book's operators are worth in a layer and in a whole step: eager, compiled and as a
  graph.

Repeating every measurement takes a GPU with 141 GB of memory; on a smaller one this page shows
recorded numbers. Folds whose titles are questions answer the second assignment of Stanford's course
CS336.
"""

# sphinx_gallery_thumbnail_number = 8
import gc
import json
import linecache
import math
import os
import re
import statistics
import subprocess
import sys
import time
from collections import Counter, defaultdict
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import DeviceType
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

import kernelbook
from kernelbook import attention, dropout, lab, layer_norm, reference, runtime, softmax
from kernelbook.lab import decoder, results
from kernelbook.lab.decoder import (
    PASSES,
    SIZES,
    Decoder,
    Operators,
    Size,
    Training,
    standard_attention,
    timed_step,
)

lab.start(
    "transformer",
    "kernelbook.lab.decoder",
    "kernelbook.ops.attention",
    "kernelbook.ops.dropout",
    "kernelbook.ops.layer_norm",
    "kernelbook.ops.softmax",
    measures=runtime.INTERPRETED or torch.cuda.mem_get_info()[1] > 130 * 2**30,
)
# %%
# The step we follow
# ------------------
#
# The bars at the top show how fast one layer of a model runs on the GPU alone, with attention by
# its formula, with SDPA (PyTorch's fused attention) and with the book's operators. A whole training
# step adds a cost that they leave out, because the :term:`host` has to launch every kernel. Does
# the order of the bars survive?
#
# The model is a decoder: it reads tokens and predicts, at each position, the token that follows.
# Each token becomes a vector of ``d_model`` numbers, called the *residual stream*. Every layer adds
# to it twice: first the output of attention, then that of a feed-forward network.
#
# .. image:: /figures/transformer-block.svg
#    :alt: One layer. A branch of the residual stream runs through layer norm, the linear layer qkv,
#          attention, the linear layer out and dropout, and is added back; a second through layer
#          norm, the linear layer up, GELU, the linear layer down and dropout. Attention, layer norm
#          and dropout are marked as replaced, the linear layers as matmuls.
#
# We begin with attention exactly as its formula states it: a table of scores, one for each pair of
# query and key; causal mask; softmax; weighted sum of the values. ``record_function`` labels a
# range for the profiler.

lab.source(standard_attention)

# %%
# A layer in code, with dropout, which sets a fraction ``p`` of the numbers to zero:

lab.source(decoder.Block.forward)

# %%
# ``attend`` computes q, k and v in one matmul, splits each into heads, and joins the heads again
# after attention. ``feed_forward`` is ``down(gelu(up(x)))``.
#
# Of the five model sizes in CS336 we follow *large*: 36 layers, a ``d_model`` of 1,280 split into
# 20 heads of 64 numbers, a feed-forward width of 5,120, and a batch of 4 sequences. **A layer has
# four matmuls with weights, which we leave to cuBLAS; between them lie the operators that we can
# replace.**

# %%

# Measuring
BATCH, CONTEXT, SHORT, LONG = 4, 1024, 256, 16384
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def step_flops(size, batch, context):
    linear = 4 * size.d_model**2 + 2 * size.d_model * size.d_ff
    linear = size.layers * linear + size.d_model * size.vocabulary
    scores = size.layers * batch * context**2 * size.d_model
    return 6 * linear * batch * context + 7 * scores  # causal: half of 4, 3.5 times


# %%


# Measuring
def parameters(size, context=CONTEXT):
    return sum(p.numel() for p in Decoder(size, context, device="meta").parameters())


# %%

# Folded: How large are the five sizes, and what does the whole model look like?
lab.together(
    lab.table(
        [
            {
                "size": name,
                "d_model": size.d_model,
                "layers": size.layers,
                "parameters, M": round(parameters(size) / 1e6),
                "state, GiB": round(16 * parameters(size) / 2**30, 1),
                "TFLOP": round(step_flops(size, BATCH, CONTEXT) / 1e12, 1),
            }
            for name, size in SIZES.items()
        ],
        "The five sizes, all with 10,000 tokens and a d_ff of four times d_model. State: 16 bytes "
        "per parameter, for itself, its gradient and AdamW's two averages. TFLOP of a step: two "
        "per parameter and token in each of a linear layer's three matmuls (output, gradients of "
        f"input and weight), plus causal attention, at a context of {CONTEXT:,}",
    ),
    lab.listing(
        {"A layer": decoder.Block, "The model around the layers": decoder.Decoder}
    ),
)

# %%
# Where the time goes
# -------------------
#
# An object ``training`` holds a model, its optimiser and a batch. It has one method per pass;
# ``whole()`` runs all three:
#
# .. code-block:: python
#
#    with torch.autocast("cuda", torch.bfloat16):    # forward(); in float32 without this line
#        loss = model.loss(tokens, following)
#    loss.backward()                                 # backward()
#    optimizer.step()                                # step(), the optimiser alone
#    optimizer.zero_grad()
#
# We time *large* at a context of 1,024, in float32, with TF32 off as is PyTorch's default, and
# under :term:`autocast`, which runs the matmuls in bfloat16. The host merely queues kernels and
# runs ahead, so we call ``torch.cuda.synchronize()`` before each reading of the clock.

# %%

# Measuring
FRESH = """
import json
import torch
from kernelbook.lab.decoder import SIZES, Decoder, Training, timed_step
model = Decoder(SIZES["medium"], 256, device="cuda")
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
training = Training(model, optimizer).draw(4, 256)
torch.cuda.synchronize()
print(json.dumps([timed_step(training) for _ in range(15)]))
"""


def first_steps():
    path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", FRESH],
        env=os.environ | path,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=120,
    )
    return [
        {"number": number} | {name: round(took, 2) for name, took in times.items()}
        for number, times in enumerate(json.loads(done.stdout.splitlines()[-1]), 1)
    ]


first = lab.measure("Milliseconds of the first steps of a process", first_steps)

# %%


# Measuring
nan = float("nan")
PASS_NAMES = dict(zip(PASSES, ("forward", "backward", "optimiser"), strict=True))


def number(table, column, *first):
    """A number of a recorded table, by what stands first in its row; NaN before it is recorded."""
    found = [row for row in table.rows if tuple(row.values())[: len(first)] == first]
    return found[0][column] if found and found[0][column] is not None else nan


def ten_after(warmup, name):
    """Mean and standard deviation of ten steps."""
    times = [row[name] for row in first.rows[warmup:][:10]]
    return (statistics.fmean(times), statistics.stdev(times)) if times else (nan, nan)


def shown(value, digits=1):
    return "—" if value is None or value != value else f"{value:.{digits}f}"


# %%

# Measuring
torch_adamw = partial(torch.optim.AdamW, lr=1e-4, fused=True)


def freed():
    gc.collect()
    torch.cuda.empty_cache()


def new_training(name, context=CONTEXT, dtype="float32"):
    model = Decoder(SIZES[name], context, device=runtime.DEVICE)
    training = Training(model, torch_adamw(model.parameters()), DTYPES[dtype])
    return training.draw(BATCH, context)


def peak_gib(run):
    """The most memory that was allocated at any moment of a run, in GiB."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() / 2**30


def all_sizes():
    rows = []
    for name in SIZES:
        training = new_training(name, SHORT)
        for dtype in DTYPES:
            training.dtype = DTYPES[dtype]
            steps = [timed_step(training) for _ in range(15)][5:]
            row = {"size": name, "dtype": dtype}
            for part in PASSES:
                times = [step[part] for step in steps]
                row[f"{part}, ms"] = round(statistics.fmean(times), 2)
                row[f"{part}, sd"] = round(statistics.stdev(times), 2)
            row["peak, GiB"] = round(peak_gib(training.whole), 2)
            rows.append(row)
        del training
        freed()
    return rows


sizes = lab.measure("A step of every size, context 256", all_sizes)

# %%


# Measuring
took = {
    (size, dtype, part): number(sizes, f"{part}, ms", size, dtype)
    for size in SIZES
    for dtype in DTYPES
    for part in PASSES
}
a_layer = {
    size: took[size, "bfloat16", "forward"] / SIZES[size].layers for size in SIZES
}
largest, smallest = list(SIZES)[-1], next(iter(SIZES))
backward_ratio = (
    took[largest, "float32", "backward"] / took[largest, "float32", "forward"]
)
wider = (SIZES[largest].d_model / SIZES[smallest].d_model) ** 2

# %%

# Folded: How many steps of warm-up does a measurement need, and how far do steps scatter?
cold = number(first, "forward", 1)
later = [row["forward"] for row in first.rows[2:]] or [nan]
lab.together(
    lab.table(
        [
            {"warm-up steps": warmup}
            | {
                f"{name}, ms": "{:.1f} ± {:.1f}".format(*ten_after(warmup, part))
                for part, name in PASS_NAMES.items()
            }
            for warmup in (0, 1, 2, 5)
        ]
        if first.rows
        else [],
        "Mean and standard deviation of ten steps after some steps of warm-up: medium, float32, "
        "context 256, in a process that has never trained. Its first forward pass takes "
        f"{cold:,.0f} ms, the second {number(first, 'forward', 2):.0f}, those after it "
        f"{min(later):.0f} to {max(later):.0f}. The first must also load each kernel, set up "
        "cuBLAS and request memory, which we did not time apart. We discard five steps",
    ),
    lab.table(
        [
            {"size": row["size"], "dtype": row["dtype"]}
            | {
                f"{name}, ms": f"{row[f'{part}, ms']:.1f} ± {row[f'{part}, sd']:.1f}"
                for part, name in PASS_NAMES.items()
            }
            | {
                "forward, ms per layer": round(
                    row["forward, ms"] / SIZES[row["size"]].layers, 1
                )
            }
            | {"peak, GiB": shown(row["peak, GiB"])}
            for row in sizes.rows
        ],
        "A step of each size at a context of 256: mean and standard deviation of ten steps. Under "
        f"autocast forward takes {min(a_layer.values()):.1f} to {max(a_layer.values()):.1f} ms per "
        f"layer, although the linear layers of {largest} have {wider:.0f} times the FLOPs of those "
        f"of {smallest}: at so short a context the kernels hardly determine the time. In float32 "
        f"the backward pass of {largest} takes {backward_ratio:.2f} times as long as forward, as "
        "each linear layer does two matmuls in backward and one in forward",
    ),
)

# %%
# A step launches thousands of kernels, but the operations that launch them are of a few kinds. The
# profiler knows how long the kernels of each took:
#
# .. code-block:: python
#
#    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
#        training.forward()
#        torch.cuda.synchronize()
#    for found in profiler.key_averages():
#        if found.device_type == DeviceType.CPU:  # an operation; kernels have their own entries
#            print(found.key, found.self_device_time_total / 1e3, "ms")
#
# We sum these times by what an operation does: ``aten::bmm``, for example, is a matmul, and
# ``aten::copy_`` casts or copies.

# %%


# Measuring
def by_group(averages):
    """Milliseconds in kernels, by the group of the operation that launched them."""
    times = Counter()
    for found in averages:
        if found.device_type == DeviceType.CPU:  # kernels have their own entries
            times[group(found.key)] += found.self_device_time_total / 1e3
    return times


# %%

# Measuring
OURS = r"(kernelbook::)?{}(_backward|Backward)?$"
GROUPS = {  # what the operations of PyTorch belong to, by their names; the first that fits
    "attention": OURS.format("attention")
    + r"|.*(scaled_dot_product|flash|cudnn)_attention",
    "matmul": r"aten::(mm|addmm|bmm|baddbmm)$",
    "softmax": OURS.format("softmax") + r"|aten::_softmax",
    "layer norm": OURS.format("layer_norm") + r"|aten::native_layer_norm",
    "dropout": OURS.format(r"\w*dropout") + r"|aten::native_dropout",
    "GELU": r"aten::gelu",
    "scale and mask": r"aten::(mul|masked_fill_)$",
    "casts and copies": r"aten::(copy_|_foreach_copy_|cat)$",
    "AdamW": r"aten::_fused_adamw_",
}
REPEATS = 2


def group(operation):
    """The first group whose pattern fits the name of an operation."""
    fits = (name for name, pattern in GROUPS.items() if re.match(pattern, operation))
    return next(fits, "other")


def profiled(run):
    """Run something under the profiler, and return the profiler."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    return profiler


def medians(rows):
    """One row of the median of each number; words, and what is missing, are those of the first."""
    return {
        name: round(statistics.median(row[name] for row in rows), 3)
        if isinstance(value, int | float)
        else value
        for name, value in rows[0].items()
    }


def kernels(averages):
    """The kernels themselves, without the ranges that annotate them."""
    on_gpu = (found for found in averages if found.device_type == DeviceType.CUDA)
    return [found for found in on_gpu if not found.is_user_annotation]


def short_name(kernel):
    """The name of a kernel without its return type, its namespaces and its template arguments."""
    name = re.sub(r"^void |at::native::|\(anonymous namespace\)::|<.*|\(.*", "", kernel)
    return name[:44] or kernel[:44]


RANGES = ("scores", "mask", "softmax", "values")


def profile_row(averages):
    found, times = kernels(averages), by_group(averages)
    top = max(found, key=lambda kernel: kernel.self_device_time_total)
    often = max(found, key=lambda kernel: kernel.count)
    named = (
        row
        for row in averages
        if row.device_type == DeviceType.CPU and row.key in RANGES
    )
    ranges = {row.key: round(row.device_time_total / 1e3, 3) for row in named}
    total = sum(kernel.self_device_time_total for kernel in found) / 1e3
    return {
        "kernels, ms": round(total, 2),
        "kernels": sum(kernel.count for kernel in found),
        "most time": short_name(top.key),
        "its ms": round(top.self_device_time_total / 1e3, 2),
        "its calls": top.count,
        "most calls": short_name(often.key),
        "calls": often.count,
        **{f"{name}, ms": round(times[name], 3) for name in (*GROUPS, "other")},
        **{f"range {name}, ms": ranges.get(name) for name in RANGES},
    }


def profiles():
    rows = []
    for dtype in DTYPES:
        training = new_training("large", CONTEXT, dtype)
        clocks = [timed_step(training) for _ in range(3 + REPEATS)][3:]
        found = defaultdict(list)
        for clock in clocks:
            for part in PASSES:
                averages = profiled(getattr(training, part)).key_averages()
                row = {"clock, ms": round(clock[part], 2)} | profile_row(averages)
                found[part].append(row)
        rows += [
            {"dtype": dtype, "pass": part} | medians(found[part]) for part in PASSES
        ]
        del training
        freed()
    return rows


# %%

profile_of = lab.measure("Profiles of large, context 1,024", profiles)

# %%


# Drawing
def group_times(rows, dtype):
    chosen = [row for row in rows if row["dtype"] == dtype]
    times = {
        name: sum(row.get(f"{name}, ms") or 0 for row in chosen)
        for name in (*GROUPS, "other")
    }
    return {name: took for name, took in times.items() if took}


MODE_OF = {"float32": "float32", "bfloat16": "autocast"}


def groups_in_words(rows):
    found = (
        f"{MODE_OF[dtype]}: "
        + ", ".join(
            f"{name} {took:.1f}" for name, took in group_times(rows, dtype).items()
        )
        for dtype in DTYPES
    )
    return f"Milliseconds of kernels of a step by group. {'; '.join(found)}."


def beside(axes, value, place, label):
    """Write a label at the end of a bar."""
    axes.annotate(
        label,
        (value, place),
        xytext=(4, 0),
        textcoords="offset points",
        va="center",
        fontsize=10,
    )


END_OF_BARS = 60  # ms; a longer bar is cut, or the others would be stubs


def cut(axes, value, place):
    """Mark a bar that ends too early."""
    for shift in (-0.6, 0.6):
        slanted = (
            [value + shift - 0.5, value + shift + 0.5],
            [place + 0.24, place - 0.24],
        )
        axes.plot(*slanted, color="white", linewidth=2.2, solid_capstyle="butt")


def group_bars(axes, rows):
    axes.figure.set_size_inches(5.4, 4.4)
    axes.grid(axis="y", visible=False)
    took_most = Counter(group_times(rows, "bfloat16"))
    took_most["other"] = 0  # stands last
    names = [name for name, _ in took_most.most_common()]
    for offset, dtype in ((-0.2, "float32"), (0.2, "bfloat16")):
        times = group_times(rows, dtype)
        values = [times.get(name, 0) for name in names]
        ends_at = [min(value, END_OF_BARS) for value in values]
        places = [place + offset for place in range(len(names))]
        colour = lab.colour("quack" if dtype == "bfloat16" else "copy")
        axes.barh(places, ends_at, height=0.38, color=colour, label=MODE_OF[dtype])
        for place, value in zip(places, values, strict=True):
            if value > END_OF_BARS:
                cut(axes, 0.93 * END_OF_BARS, place)
            beside(axes, min(value, END_OF_BARS), place, f"{value:.1f}")
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.16 * END_OF_BARS)
    axes.set(xlabel="ms per step, large at 1,024; the longest bar is cut")


lab.draw(
    profile_of,
    "Autocast speeds up the matmuls and adds casts",
    groups_in_words,
    group_bars,
)

# %%


# Reading
def profile_number(column, dtype, part):
    return number(profile_of, column, dtype, part)


# Reading
in_step = {
    dtype: 100
    * sum(profile_number("matmul, ms", dtype, part) for part in PASSES)
    / sum(profile_number("kernels, ms", dtype, part) for part in PASSES)
    for dtype in DTYPES
}
CASTS = "casts and copies"


def in_groups(dtype, names):
    """Milliseconds of a whole step in some groups of kernels."""
    return sum(
        profile_number(f"{name}, ms", dtype, part) for name in names for part in PASSES
    )


products = {dtype: in_groups(dtype, ["matmul"]) for dtype in DTYPES}
casts = {dtype: in_groups(dtype, [CASTS]) for dtype in DTYPES}
all_kernels = {dtype: in_groups(dtype, ["kernels"]) for dtype in DTYPES}
lab.read(
    "Autocast makes the kernels of a step "
    f"{all_kernels['float32'] / all_kernels['bfloat16']:.1f} times as fast, because it runs "
    "the matmuls on the matrix units, where they are "
    f"{products['float32'] / products['bfloat16']:.0f} times as fast. **The matmuls now take only "
    f"{in_step['bfloat16']:.0f} % of the time; most of the rest goes to operations that mainly "
    "move bytes.**"
)

# %%

# Folded: Does the profiler agree with the clock, and which kernels take most?
top, its_calls = (
    {row["dtype"]: row[column] for row in profile_of.rows if row["pass"] == "forward"}
    for column in ("most time", "its calls")
)
cast_on_top = "elementwise" in top.get("bfloat16", "") and its_calls["bfloat16"] == (
    SIZES["large"].layers + 1
)
top_in_words = (
    "In forward most time goes to a matmul in float32, to an elementwise kernel under autocast: "
    "judging by its calls, one per layer plus one, it casts the scores and the logits to float32. "
    if cast_on_top and "gemm" in top["float32"]
    else ""
)
lab.table(
    [
        {"dtype": row["dtype"], "pass": PASS_NAMES[row["pass"]]}
        | {name: row[name] for name in ("clock, ms", "kernels, ms")}
        | {
            "of the clock, %": round(100 * row["kernels, ms"] / row["clock, ms"]),
            "matmuls, %": round(100 * row["matmul, ms"] / row["kernels, ms"]),
        }
        | {name: row[name] for name in ("kernels", "most time", "its ms", "its calls")}
        | {name: row[name] for name in ("most calls", "calls")}
        for row in profile_of.rows
    ],
    "The clock and the sum of the kernels (in the rest no kernel runs); the number of kernels, the "
    "one that takes the most time and the one called most often. "
    + top_in_words
    + "In the figure, “other” holds additions and the loss",
)

# %%
# Attention shows what moving bytes costs, because the formula sends its table of scores to memory
# and back again and again. Let us follow a single score. Softmax runs in float32, at 4 bytes per
# number, and the rest in bfloat16, at 2. The mask takes two trips, because ``masked_fill`` copies
# the table before it fills it.

# Drawing
OF_MATMULS, OF_SOFTMAX = "matmuls, scale, cast to bfloat16", "softmax and its cast"
TRIPS = [  # what is done, the range of the profile, bytes read and bytes written per score
    ("q kᵀ", OF_MATMULS, 0, 2),
    ("scale", OF_MATMULS, 2, 2),
    ("mask: copy", "mask", 2, 2),
    ("mask: fill", "mask", 2, 2),
    ("cast to float32", OF_SOFTMAX, 2, 4),
    ("softmax", OF_SOFTMAX, 4, 4),
    ("cast to bfloat16", OF_MATMULS, 4, 2),
    ("weights v", OF_MATMULS, 2, 0),
]
bytes_in = Counter()
for _, what, read, written in TRIPS:
    bytes_in[what] += read + written
INK_OF_RANGE = {
    OF_MATMULS: lab.colour("matmul"),
    "mask": lab.colour("torch.compile"),
    OF_SOFTMAX: lab.colour("SDPA flash"),
}


def legend_below(axes, inks, columns):
    """Name the colours of bars below them."""
    handles = [axes.barh(0, 0, color=ink, label=what) for what, ink in inks.items()]
    axes.figure.legend(
        handles=handles,
        loc="outside lower left",
        ncols=columns,
        frameon=False,
        fontsize=10,
        handlelength=1,
        columnspacing=1,
    )


def trips(axes):
    axes.grid(axis="y", visible=False)
    axes.axvline(0, color=lab.colour("copy"), linewidth=0.9)
    for place, (_, what, read, written) in enumerate(TRIPS):
        ink = INK_OF_RANGE[what]
        axes.barh(place, -read, 0.62, color=ink, alpha=0.55)
        axes.barh(place, written, 0.62, color=ink)
        for sign, value in ((-1, read), (1, written)):
            if value:
                axes.annotate(
                    str(value),
                    (sign * value, place),
                    xytext=(5 * sign, 0),
                    textcoords="offset points",
                    ha="left" if sign > 0 else "right",
                    va="center",
                    fontsize=10,
                )
    axes.set_yticks(range(len(TRIPS)), [name for name, *_ in TRIPS])
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.set_xlim(-5, 5)
    axes.set_xticks([])
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.text(-0.15, -0.75, "← bytes read per score", ha="right", fontsize=10)
    axes.text(0.15, -0.75, "bytes written →", fontsize=10)
    legend_below(axes, INK_OF_RANGE, 3)


lab.sketch(
    "A score's trips to memory and back",
    "Bytes read and written: "
    + ", ".join(f"{name} {r} and {w}" for name, _, r, w in TRIPS),
    trips,
    height=4.0,
)

# %%
# Each operation runs under a label of ``record_function``, so the profile also tells the time of
# each colour. For heads of 64 numbers, the two matmuls do 128 FLOPs each per score; scaling does
# one, and softmax about five.


def of_record(chapter, name):
    """The rows of a table that another chapter recorded."""
    tables = (results.find(chapter) or {"tables": {}})["tables"]
    found = tables.get(name, {"columns": [], "rows": []})
    return [dict(zip(found["columns"], row, strict=True)) for row in found["rows"]]


speeds = of_record("measuring", "The limits of the machine, bfloat16") or [{}]
of_memory = speeds[0].get("copy, GB/s", nan) * 1e9
of_matmul = speeds[0].get("matmul, TFLOP/s", nan) * 1e12
size = SIZES["large"]
head, n_scores = (
    size.d_model // size.heads,
    size.layers * BATCH * size.heads * CONTEXT**2,
)
INSIDE = {  # FLOPs of a score, and the ranges of the profile
    OF_MATMULS: (4 * head + 1, ("scores", "values")),
    OF_SOFTMAX: (5, ("softmax",)),
    "mask": (0, ("mask",)),
}
inside = {
    what: {
        "FLOPs per score": flops,
        "bytes per score": bytes_in[what],
        "ms at a copy's speed": 1e3 * bytes_in[what] * n_scores / of_memory,
        "ms, measured": sum(
            profile_number(f"range {name}, ms", "bfloat16", "forward") for name in names
        ),
    }
    for what, (flops, names) in INSIDE.items()
}
lab.table(
    [
        {"operations": what}
        | {"FLOPs": row["FLOPs per score"], "bytes": row["bytes per score"]}
        | {name: shown(row[name]) for name in ("ms at a copy's speed", "ms, measured")}
        for what, row in inside.items()
    ]
    if profile_of.rows and of_memory == of_memory
    else [],
    "Inside attention, forward pass of all layers: FLOPs and bytes per score, and times",
)

# %%

# Reading
by_flops = 1e3 * (4 * head) * n_scores / of_matmul
by_bytes, in_ranges = (
    sum(row[column] for row in inside.values())
    for column in ("ms at a copy's speed", "ms, measured")
)
lab.read(
    f"**Attention takes {in_ranges:.0f} of the "
    f"{profile_number('kernels, ms', 'bfloat16', 'forward'):.0f} ms that the kernels of forward "
    f"take.** Its matmuls could take {by_flops:.0f} ms at the speed of a large one, but its bytes "
    f"need {by_bytes:.0f} even at the speed of a copy."
)

# %%
# In the figure of all kernels, casts and copies grew most. Autocast runs linear layers in bfloat16,
# but softmax, layer norm and the loss in float32, so it must cast tensors in between, and every
# weight before its matmul.


# Measuring
def place_of(shape, parameters):
    """Where a tensor of large belongs, by its shape."""
    if shape[-2:] == (CONTEXT, CONTEXT):
        return "table of scores"
    if shape in parameters or shape[::-1] in parameters:
        return "parameters and their gradients"
    if len(shape) > 1 and shape[-1] == SIZES["large"].d_model:
        return "as wide as the stream"
    return "elsewhere"


def cast_places():
    """Milliseconds of casts and of copies in forward and backward, by the tensor."""
    training, times = new_training("large", CONTEXT, "bfloat16"), Counter()
    parameters_of = {tuple(p.shape) for p in training.model.parameters()}
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    for _ in range(3):
        training.whole()
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        with profile(activities=activities, record_shapes=True) as profiler:
            training.forward()
            training.backward()
            torch.cuda.synchronize()
        training.step()
        for event in profiler.events():
            if event.device_type == DeviceType.CPU and group(event.key) == CASTS:
                caller = event.cpu_parent.key if event.cpu_parent else ""
                what = "cast" if caller == "aten::_to_copy" else "copy"
                shape = next((tuple(one) for one in event.input_shapes if one), ())
                place = place_of(shape, parameters_of)
                times[what, place] += event.self_device_time_total / 1e3
    del training, profiler
    freed()
    return [
        {"what": what, "tensor": place, "ms": round(took / REPEATS, 3)}
        for (what, place), took in sorted(times.items())
    ]


cast_ms = lab.attempt("Casts and copies of large at 1,024, by the tensor", cast_places)

# %%

# Reading
by_tensor = Counter()
for row in cast_ms.rows:
    by_tensor[row["tensor"]] += row["ms"]
in_all = by_tensor.total()
where_cast, others_cast = "table of scores", "parameters and their gradients"
lab.read(
    "**Most of their time goes to the table of scores, "
    f"{by_tensor[where_cast]:.1f} of {casts['bfloat16']:.1f} ms**, so a kernel that never stores "
    "the table saves that too."
    if by_tensor[where_cast] > 0.6 * in_all > 0
    else f"They take {casts['bfloat16']:.1f} ms of a step, those of the table of scores "
    f"{by_tensor[where_cast]:.1f}."
    if cast_ms.rows
    else ""
)

# %%
# .. admonition:: Key idea
#    :class: kb-key
#
#    Most of a step's time may go to operations that mainly move bytes. To know how fast they can
#    be, count bytes, not FLOPs.

# %%


# Measuring
class Toy(nn.Module):
    def __init__(self, norm, **where):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 16, **where), nn.Linear(16, 4, **where)
        self.weight = nn.Parameter(torch.ones(16, **where))
        self.norm = norm

    def forward(self, x):
        hidden = self.fc1(x)
        normal = self.norm(F.relu(hidden), (16,), self.weight)
        return hidden, normal, self.fc2(normal)


# %%


# Measuring
def toy_dtypes():
    rows = []
    for kind, dtype, norm in (
        ("float16", torch.float16, F.layer_norm),
        ("bfloat16", torch.bfloat16, F.layer_norm),
        ("bfloat16, the book's layer norm", torch.bfloat16, layer_norm),
    ):
        toy = Toy(norm, device=runtime.DEVICE)
        x = torch.randn(32, 8, device=runtime.DEVICE)
        with torch.autocast(runtime.DEVICE.type, dtype):
            hidden, normal, logits = toy(x)
            loss = F.cross_entropy(logits, torch.arange(32, device=runtime.DEVICE) % 4)
        loss.backward()
        found = {
            "parameters": toy.fc1.weight,
            "first layer": hidden,
            "layer norm": normal,
            "logits": logits,
            "loss": loss,
            "gradients": toy.fc1.weight.grad,
        }
        names = {what: str(x.dtype).removeprefix("torch.") for what, x in found.items()}
        rows.append({"autocast to": kind} | names)
    return rows


toy = lab.measure("The dtypes of a toy model under autocast", toy_dtypes)

# %%


# Measuring
def norm_all_in(x):
    """Layer norm whose mean, squares and sum all have the dtype of x."""
    centred = x - x.mean(-1, keepdim=True)
    variance = (centred * centred).mean(-1, keepdim=True)
    return centred * (variance + 1e-5).rsqrt()


# %%

# Measuring
INPUTS = {
    "mean 0, standard deviation 1": (0, 1),
    "mean 0, standard deviation 400": (0, 400),
    "mean 0, standard deviation 0.0003": (0, 3e-4),
    "mean 100, standard deviation 1": (100, 1),
}


def norm_error(x, y):
    x = x.double()
    truth = F.layer_norm(x, x.shape[-1:])
    worst = (y.double() - truth).abs().max().item() / truth.abs().max().item()
    return f"{worst:.1e}" if math.isfinite(worst) else "not finite"


rows = []
for what, (mean, deviation) in INPUTS.items():
    drawn = mean + deviation * torch.randn(
        64, 1024, generator=torch.Generator().manual_seed(0)
    )
    row = {"input": what}
    for dtype in (torch.float16, torch.bfloat16):
        x = drawn.to(dtype)
        name = str(dtype).removeprefix("torch.")
        row[f"all in {name}"] = norm_error(x, norm_all_in(x))
        row[f"{name}, inside float32"] = norm_error(x, norm_all_in(x.float()).to(dtype))
    rows.append(row)
assert (
    rows[1]["all in float16"] == "1.0e+00" or rows[1]["all in float16"] == "not finite"
)
# %%

# Folded: Which dtypes does autocast give, and what in layer norm is sensitive to 16 bits?
kinds_of_cast = dict(
    zip(("float16", "bfloat16", "bfloat16, our norm"), toy.rows, strict=False)
)
gains = [
    float(row["all in bfloat16"]) / float(row["bfloat16, inside float32"])
    for row in rows
]
lab.together(
    lab.read(
        "Autocast leaves the parameters in float32. The profiler records shapes, which tell us the "
        "tensor of a cast or copy: those of parameters and their gradients take "
        f"{by_tensor[others_cast]:.1f} ms of a step."
    )
    if cast_ms.rows
    else None,
    lab.table(
        [
            {"tensor": tensor}
            | {kind: row[tensor] for kind, row in kinds_of_cast.items()}
            for tensor in (list(toy.rows[0])[1:] if toy.rows else ())
        ],
        "The dtypes in a toy model (linear layer, ReLU, layer norm, linear layer), by the dtype "
        "that autocast casts to. Only the outputs of linear layers have 16 bits",
    ),
    lab.table(
        rows,
        "Layer norm of 64 rows of 1,024 numbers: largest error over largest output, computed "
        "entirely in one dtype, or with only input and output in it",
    ),
    lab.read(
        "In float16 the squares are the weak point: a number above 256 has a square above 65,504, "
        "the largest float16, so the variance is infinite and the output zero."
    ),
    lab.read(
        "bfloat16 has the exponents of float32 and avoids this, but only 8 significant bits. "
        f"Computed in float32 inside, its error is {min(gains):.0f} to {max(gains):.0f} times "
        "smaller; autocast and the book's kernel do that."
    ),
)

# %%
# Where the memory goes
# ---------------------
#
# What forward keeps for backward fills most of the memory. We count it for one layer of width
# :math:`d`, with :math:`H` heads and a feed-forward network of width :math:`f`, and a batch of
# :math:`B` sequences of :math:`T` tokens, :math:`N = B T` in all. In float32 the layer keeps:
#
# - the inputs of both layer norms and of the four linear layers ``qkv``, ``out``, ``up`` and
#   ``down``, and the input of GELU: :math:`5 N d + 2 N f` numbers;
# - q, k and v, copied into the layout that the matmuls of attention need: :math:`3 N d`;
# - the output of softmax, the *attention table*: :math:`T^2` numbers for each head of each
#   sequence, :math:`B H T^2`;
# - the two dropout masks, one byte per number: :math:`2 N d` bytes.
#
# In bytes per layer, with 4 for each number of the first three items and without the causal mask,
# :math:`T^2` bytes:
#
# .. math::
#
#    4\,(8 N d + 2 N f + B H T^2) + 2 N d


# Measuring
BYTES = {  # of each kept number: stream, other activations, weights of attention, copies of weights
    "float32": (4, 4, 4, 0),
    "bfloat16": (4, 2, 6, 2),
}


def kept_on_paper(size, batch, context, dtype, squares=True):
    """Bytes that forward keeps for backward, with standard attention."""
    stream, other, weights, copies = BYTES[dtype]
    n, d, f = batch * context, size.d_model, size.d_ff
    layer = stream * 2 * n * d + other * (6 * n * d + 2 * n * f) + 2 * n * d
    layer += copies * (4 * d * d + 2 * d * f)
    if squares:
        layer += weights * batch * size.heads * context**2
    end = (
        stream * n * d
        + other * n * d
        + 4 * n * size.vocabulary
        + copies * d * size.vocabulary
    )
    return size.layers * layer + end  # the end: the last layer norm, the head, the loss


# %%


# Measuring
CONTEXTS = (128, 256, 512, 1024)


def memory_of(training, context):
    training.draw(BATCH, context)
    training.whole()  # which also makes the state of AdamW
    with torch.no_grad():
        alone = peak_gib(training.forward)
    training.loss = None
    before, peaks = torch.cuda.memory_allocated(), {}
    peaks["forward"] = peak_gib(training.forward)
    kept = (torch.cuda.memory_allocated() - before) / 2**30
    for part in PASSES[1:]:
        peaks[part] = peak_gib(getattr(training, part))
    highest = max(peaks, key=peaks.get)
    return {
        "forward alone, GiB": round(alone, 2),
        "step, GiB": round(peaks[highest], 2),
        "peak in": highest,
        "kept, GiB": round(kept, 5),
    }


def memory_by_context(name="2.7B"):
    rows = []
    training = new_training(name, max(CONTEXTS))
    for dtype in DTYPES:
        training.dtype = DTYPES[dtype]
        for context in CONTEXTS:
            paper = kept_on_paper(SIZES[name], BATCH, context, dtype) / 2**30
            rows.append(
                {"dtype": dtype, "context": context}
                | memory_of(training, context)
                | {"on paper, GiB": round(paper, 5)}
            )
            freed()
    del training
    freed()
    return rows


memory = lab.measure("Memory of the size 2.7B", memory_by_context)

# %%

# Drawing
KEPT_INKS = {
    "inputs": lab.colour("matmul"),
    "q, k, v": lab.colour("Liger"),
    "attention tables": lab.colour("SDPA flash"),
    "masks, cast weights": lab.colour("torch.compile"),
}
KEPT_AT = {  # the bars, by their labels
    "context 256": (256, "float32"),
    "context 1,024": (1024, "float32"),
    "context 4,096": (4096, "float32"),
    "autocast, 1,024": (1024, "bfloat16"),
}


def kept_in_layer(context, dtype="float32"):
    """Bytes that a layer of large keeps, by the terms of the count."""
    shape = SIZES["large"]
    stream, other, weights, copies = BYTES[dtype]
    tokens, width, ff = BATCH * context, shape.d_model, shape.d_ff
    linear = 3 * tokens * width + 2 * tokens * ff
    found = {
        "inputs": stream * 2 * tokens * width + other * linear,
        "q, k, v": other * 3 * tokens * width,
        "attention tables": weights * BATCH * shape.heads * context**2,
        "masks, cast weights": 2 * tokens * width
        + copies * (4 * width**2 + 2 * width * ff),
    }
    both = [
        kept_on_paper(shape._replace(layers=layers), BATCH, context, dtype)
        for layers in (1, 2)
    ]
    assert sum(found.values()) == both[1] - both[0]
    return found


def kept_bars(axes):
    axes.grid(axis="y", visible=False)
    places = [
        place + 0.4 * (dtype != "float32")
        for place, (_, dtype) in enumerate(KEPT_AT.values())
    ]
    for place, where in zip(places, KEPT_AT.values(), strict=True):
        found = kept_in_layer(*where)
        total, reached = sum(found.values()), 0
        for term, ink in KEPT_INKS.items():
            share = 100 * found[term] / total
            axes.barh(place, share, 0.6, left=reached, color=ink)
            if share > 9:
                middle = reached + share / 2
                axes.text(
                    middle,
                    place,
                    f"{share:.0f} %",
                    ha="center",
                    va="center",
                    color="white",
                    fontsize=10,
                )
            reached += share
        beside(axes, 100, place, f"{total / 2**20:,.0f} MiB")
    axes.set_yticks(places, list(KEPT_AT))
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.set_xlim(0, 124)
    axes.set_xticks(range(0, 101, 25))
    axes.set(xlabel="% of what a layer keeps")
    axes.spines["bottom"].set_bounds(0, 100)
    legend_below(axes, KEPT_INKS, 4)


lab.sketch(
    "What a layer keeps (large, float32 unless noted)",
    "Attention tables: "
    + ", ".join(
        f"{100 * found['attention tables'] / sum(found.values()):.0f} % at {label}"
        for label, where in KEPT_AT.items()
        for found in [kept_in_layer(*where)]
    ),
    kept_bars,
    height=3.1,
)

# %%

# Reading
largest_size, longest = SIZES["2.7B"], max(CONTEXTS)
at = {
    (dtype, what): number(memory, f"{what}, GiB", dtype, longest)
    for dtype in DTYPES
    for what in ("forward alone", "step", "kept", "on paper")
}
off = [100 * (row["kept, GiB"] / row["on paper, GiB"] - 1) for row in memory.rows] or [
    nan
]
state = 12 * parameters(largest_size) / 2**30
copies = 2 * parameters(largest_size) / 2**30
by_term = kept_in_layer(CONTEXT)
table_share = 100 * by_term["attention tables"] / sum(by_term.values())
without_autocast, with_autocast = (
    sum(kept_in_layer(CONTEXT, dtype).values()) / 2**20 for dtype in DTYPES
)
in_tables = (
    kept_on_paper(SIZES["large"], BATCH, CONTEXT, "bfloat16")
    - kept_on_paper(SIZES["large"], BATCH, CONTEXT, "bfloat16", squares=False)
) / 2**30
lab.together(
    lab.read(
        "**The attention tables grow with the square of the context; at 1,024 they already make up "
        f"{table_share:.0f} % of what a layer keeps.** "
        + (
            "Autocast does not shrink it, because a layer then keeps the output of softmax in both "
            "dtypes."
            if with_autocast > without_autocast
            else "Under autocast a layer keeps the output of softmax in both dtypes."
        )
    ),
    lab.read(
        f"The tables of all layers take {in_tables:.1f} GiB under autocast, which attention "
        "without a table should save. We counted this on paper; in 2.7B, where we also measured, "
        f"the count is within {max(map(abs, off)):.1f} %."
    ),
)

# %%

# Folded: What is the peak of forward and of a step, and what does mixed precision change?
lab.table(
    [
        {
            name: value if name in ("dtype", "context", "peak in") else shown(value)
            for name, value in row.items()
        }
        for row in memory.rows
    ],
    "Memory of 2.7B, and what forward keeps for backward, measured and on paper. Forward alone "
    f"needs little beyond parameters and AdamW's averages ({state:.1f} GiB) and, under autocast, "
    f"bfloat16 copies of the parameters ({copies:.1f} GiB). At {longest:,} a step needs "
    f"{at['bfloat16', 'step']:.0f} GiB under autocast and {at['float32', 'step']:.0f} in float32. "
    "Under autocast most activations take 2 bytes, but a score takes 6, the inputs of the layer "
    "norms still 4, and each parameter of a linear layer has a copy of 2: per layer "
    "22 N d + 4 N f + 6 B H T² + 8 d² + 4 d f bytes",
)

# %%
# Does forward have to keep all this? With :term:`checkpointing` a layer keeps only its input and
# recomputes the rest in backward. We follow the memory through a step, once each way.


# Measuring
def allocator_trace():
    snapshot = torch.cuda.memory._snapshot()
    return snapshot["device_traces"][torch.cuda.current_device()]


def traced_step(training, context=None):
    """The live bytes before a step, what the allocator did, and where each pass ended."""
    before = torch.cuda.memory_allocated()
    torch.cuda.memory._record_memory_history(
        context=context, stacks="python", max_entries=10**6
    )
    start, ends = len(allocator_trace()), {}
    for name in PASSES:
        getattr(training, name)()
        torch.cuda.synchronize()
        trace = allocator_trace()[start:]
        ends[name] = len(trace)
    torch.cuda.memory._record_memory_history(enabled=None)
    return before, trace, ends


def live_bytes(before, trace):
    """The bytes in use after each event of a trace."""
    signs = {"alloc": 1, "free_completed": -1}
    return numpy.cumsum(
        [before, *(signs.get(e["action"], 0) * e["size"] for e in trace)]
    )[1:]


POINTS = 240


def timelines(name="large"):
    rows = []
    training = new_training(name)
    training.whole()
    for version in ("all kept", "checkpointed"):
        training.model.checkpointed = version == "checkpointed"
        training.whole()
        before, trace, ends = traced_step(training)
        live = live_bytes(before, trace)
        first_event = 0
        for part, end in ends.items():
            bins = numpy.array_split(live[first_event:end], POINTS // len(PASSES))
            rows += [
                {
                    "version": version,
                    "pass": part,
                    "most, GiB": round(float(bin.max()) / 2**30, 4),
                }
                for bin in bins
                if len(bin)
            ]
            first_event = end
    del training
    freed()
    return rows


timeline = lab.measure("Live memory over a step of large at 1,024, float32", timelines)


def checkpoint_times(name="large"):
    """The passes of a step with all kept and with checkpointing, medians of four steps."""
    training, rows = new_training(name), []
    for version in ("all kept", "checkpointed"):
        training.model.checkpointed = version == "checkpointed"
        steps = [timed_step(training) for _ in range(6)][2:]
        row = {"version": version}
        for part in PASSES:
            times = [step[part] for step in steps]
            row[f"{part}, ms"] = round(statistics.median(times), 1)
        rows.append(row)
    del training
    freed()
    return rows


checkpoint_ms = lab.measure(
    "The time of a step of large at 1,024, float32, with checkpointing",
    checkpoint_times,
)

# %%


# Drawing
def of_version(rows, version):
    return [row for row in rows if row["version"] == version]


def timeline_in_words(rows):
    found = []
    for version in ("all kept", "checkpointed"):
        chosen = of_version(rows, version)
        highest = max(chosen, key=lambda row: row["most, GiB"])
        found.append(
            f"{version}: from {chosen[0]['most, GiB']:.1f} GiB to a peak of "
            f"{highest['most, GiB']:.1f} in {PASS_NAMES[highest['pass']]}"
        )
    return f"Live memory over the allocations of one step. {'; '.join(found)}."


def timeline_lines(axes, rows):
    top = max(row["most, GiB"] for row in rows)
    for version, provider in (("all kept", "copy"), ("checkpointed", "SDPA flash")):
        chosen = of_version(rows, version)
        # each pass gets a third of the axis, whatever its number of events
        x, y = [], []
        for third, part in enumerate(PASSES):
            values = [row["most, GiB"] for row in chosen if row["pass"] == part]
            x += [third + (place + 0.5) / len(values) for place in range(len(values))]
            y += values
        axes.plot(x, y, color=lab.colour(provider), label=version)
    for third, part in enumerate(PASSES):
        axes.axvline(third, color=lab.colour("copy"), linewidth=0.7, linestyle=":")
        name = PASS_NAMES[part]
        axes.text(third + 0.5, 1.1 * top, name, ha="center", va="bottom", fontsize=10)
    axes.set_xticks([])
    axes.set(xlabel="allocations and releases, in order", ylabel="GiB in use")
    axes.set_ylim(0, 1.2 * top)


lab.draw(
    timeline,
    "Memory during one step of large, float32",
    timeline_in_words,
    timeline_lines,
)

# %%


# Measuring
def line_of(event):
    """The innermost line of the model that an event of the allocator comes from."""
    for frame in event.get("frames", ()):
        if frame["filename"].endswith("decoder.py"):
            return linecache.getline(decoder.__file__, frame["line"]).strip()
    return "no line of the model"


def largest_allocations(name="large"):
    training = new_training(name)
    training.whole()
    _, trace, ends = traced_step(training, context="alloc")  # with its line of Python
    found = Counter()
    for index, event in enumerate(trace):
        if event["action"] == "alloc":
            part = next(part for part, end in ends.items() if index < end)
            where = line_of(event) if part == "forward" else "autograd"
            found[round(event["size"] / 2**20, 1), part, where] += 1
    del training, trace
    freed()
    top = sorted(found, key=lambda key: (-key[0], -found[key]))[:8]
    return [
        {"MiB": size, "pass": part, "line": where, "times": found[size, part, where]}
        for size, part, where in top
    ]


allocations = lab.measure(
    "The largest allocations of a step, large, 1,024", largest_allocations
)

# %%

# Reading
peak = {
    version: max(
        (row["most, GiB"] for row in of_version(timeline.rows, version)), default=nan
    )
    for version in ("all kept", "checkpointed")
}
step_took = {
    row["version"]: sum(row[f"{part}, ms"] for part in PASSES)
    for row in checkpoint_ms.rows
}
lab.read(
    f"**Checkpointing lowers the peak from {peak['all kept']:.1f} GiB to "
    f"{peak['checkpointed']:.1f}.** The price is another forward pass: the step takes "
    f"{step_took.get('checkpointed', nan):.0f} ms instead of {step_took.get('all kept', nan):.0f}. "
    "Attention without a table recomputes only the scores."
)

# %%

# Folded: What does checkpointing save, and which lines allocate the largest tensors?
paper = kept_on_paper(SIZES["large"], BATCH, CONTEXT, "float32") / 2**30
inputs_of_layers = BATCH * CONTEXT * SIZES["large"].d_model * 4 / 2**30
spared = (SIZES["large"].layers - 1) * (
    paper / SIZES["large"].layers - inputs_of_layers
)
its_gradients = 4 * parameters(SIZES["large"]) / 2**30
at_first = 12 * parameters(SIZES["large"]) / 2**30
in_forward = sum(kept_in_layer(CONTEXT).values()) / 2**20
size = SIZES["large"]
table_mib = BATCH * size.heads * CONTEXT**2 * 4 / 2**20
hidden_mib = BATCH * CONTEXT * size.d_ff * 4 / 2**20
logits_mib = BATCH * CONTEXT * size.vocabulary * 4 / 2**20
tables = sum(
    row["times"]
    for row in allocations.rows
    if row["pass"] == "forward" and row["MiB"] == table_mib
)
lab.together(
    lab.read(
        f"The parameters and AdamW's averages take {at_first:.1f} GiB. The lines start higher, "
        "because a point shows the most in an 80th of a pass, and the first of them already holds "
        f"tensors of the first layer. Forward adds the {in_forward:.0f} MiB that we counted for "
        "each layer; backward releases them while the gradients grow."
    ),
    lab.read(
        f"By our count checkpointing would save {spared:.1f} GiB of the peak. It saves "
        f"{peak['all kept'] - peak['checkpointed']:.1f}, because the peak moves to the end of "
        f"backward, when the gradients ({its_gradients:.1f} GiB) are in memory too."
    ),
    lab.table(
        allocations.rows,
        "The largest allocations of a step; autograd runs those of backward in C++, so they show "
        f"no line. On paper a table of scores takes {table_mib:.0f} MiB, the logits "
        f"{logits_mib:.0f}, the hidden tensor of the feed-forward network {hidden_mib:.0f}, a "
        f"tensor of the residual stream {1024 * inputs_of_layers:.0f}. In forward, standard "
        f"attention allocates {tables / size.layers:.0f} tables per layer: the scores, scaled, "
        "masked, and their softmax",
    ),
)

# %%
# Attention without the table
# ---------------------------
#
# Two versions of attention never store the table:
# :doc:`the book's attention </chapters/attention_forward>` and SDPA, for which we always time the
# faster of the backends *flash* and *cuDNN*. First we time causal attention alone, in bfloat16,
# with a batch of 8 and one head of 64 numbers.

# Measuring
ours = partial(attention, is_causal=True)
HEAD_SIZES = (16, 32, 64, 128)
LENGTHS = (256, 1024, 4096, 8192, 16384, 65536)
OUT_OF_MEMORY = "out of memory"


def events(run, prepare):
    """Milliseconds that the GPU takes for a run, after a pause in which the host queues it.

    Where the pause ends before the host is ready, a run of less than 20 milliseconds is made again
    after one twice as long, up to 16 milliseconds.
    """
    for doublings in range(5):
        inputs = prepare()
        torch.cuda.synchronize()
        torch.cuda._sleep(2_000_000 * 2**doublings)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run(*inputs)
        end.record()
        in_time = not start.query()
        torch.cuda.synchronize()
        if in_time or start.elapsed_time(end) > 20:
            break
    return start.elapsed_time(end)


def medians_in_turn(runs, budget=30):
    """The medians of as many times of each run as fit into a budget of milliseconds, but 3 to 20.

    ``runs`` maps names to (run, prepare): what ``prepare`` returns is made anew for each run, and
    its time does not count. They take turns, in an order that is drawn anew in each round. Where
    the memory does not suffice, there is a word instead of a number.
    """
    times, counts = {}, {}
    for name, run in runs.items():
        first = attempt(partial(second_of_two, *run))
        if first != OUT_OF_MEMORY:
            times[name] = [first]
            counts[name] = max(3, min(20, int(budget / first)))
    draw, names = numpy.random.default_rng(0), list(times)
    for done in range(1, max(counts.values(), default=0)):
        for index in draw.permutation(len(names)):
            if counts[names[index]] > done:
                took = attempt(partial(events, *runs[names[index]]))
                times[names[index]] += [took] if took != OUT_OF_MEMORY else []
    return dict.fromkeys(runs, OUT_OF_MEMORY) | {
        name: statistics.median(found) for name, found in times.items()
    }


def second_of_two(run, prepare):
    """The milliseconds of a run after one in which it may have been compiled."""
    run(*prepare())
    return events(run, prepare)


def attempt(run):
    """What a run returns, or that the memory did not suffice."""
    try:
        return run()
    except torch.cuda.OutOfMemoryError:
        pass  # only outside of this clause is the memory of the run released
    freed()
    return OUT_OF_MEMORY


def drawn(*shape, grad=True, dtype=torch.bfloat16):
    return torch.randn(shape, device=runtime.DEVICE, dtype=dtype).requires_grad_(grad)


def held_mib(attend, q, k, v):
    """What a call holds for backward, and its result."""
    before = torch.cuda.memory_allocated()
    out = attend(q, k, v)
    held = torch.cuda.memory_allocated() - before
    del out
    return round(held / 2**20, 2)


def grid_runs(attend, q, k, v, do):
    """Forward, backward and both, each with what is made anew before it."""

    def backward(out):
        torch.autograd.grad(out, (q, k, v), do)

    def both():
        torch.autograd.grad(attend(q, k, v), (q, k, v), do)

    return {
        "forward, ms": (lambda: attend(q, k, v), lambda: ()),
        "backward, ms": (backward, lambda: (attend(q, k, v),)),
        "both, ms": (both, lambda: ()),
    }


def fused(backend):
    """PyTorch's fused attention by one of its backends."""

    def attend(q, k, v):
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    return attend


FUSED = {
    "SDPA flash": fused(SDPBackend.FLASH_ATTENTION),
    "SDPA cuDNN": fused(SDPBackend.CUDNN_ATTENTION),
}


def attention_grid():
    own = {
        "PyTorch": standard_attention,
        "torch.compile": torch.compile(standard_attention, dynamic=True),
        "Kernel Book": ours,
    }
    rows = []
    for head_dim in HEAD_SIZES:
        for length in LENGTHS:
            inputs = [drawn(8, 1, length, head_dim) for _ in range(4)]
            tried = {
                name: lab.tried(grid_runs(attend, *inputs)["both, ms"][0], name)
                for name, attend in FUSED.items()
            }
            providers = own | {
                name: FUSED[name]
                for name, run in tried.items()
                if not isinstance(run, lab.Absent)
            }
            runs = {
                (name, what): run
                for name, attend in providers.items()
                for what, run in grid_runs(attend, *inputs).items()
            }
            times = medians_in_turn(runs)
            for name, attend in providers.items():
                row = {"head size": head_dim, "length": length, "provider": name}
                for what in ("forward, ms", "backward, ms", "both, ms"):
                    took = times[name, what]
                    row[what] = took if took == OUT_OF_MEMORY else round(took, 4)
                held = attempt(partial(held_mib, attend, *inputs[:3]))
                rows.append(row | {"held, MiB": held})
            del inputs, runs, tried
            freed()
    torch.compiler.reset()
    return rows


grid = lab.measure(
    "Attention in turn, batch 8, one head, bfloat16, causal", attention_grid
)

# %%


# Reading
def in_grid(column, provider, length, head_dim=64):
    return number(grid, column, head_dim, length, provider)


def milliseconds(value):
    """A number as text, or that there is none."""
    if isinstance(value, str):
        return value
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def fastest_fused(length, head_dim=64):
    """The milliseconds of SDPA's faster backend, or NaN where none was timed."""
    found = (in_grid("both, ms", name, length, head_dim) for name in FUSED)
    return min(
        (took for took in found if not isinstance(took, str) and took == took),
        default=nan,
    )


def grid_cell(value, digits=None):
    """A time or an amount of memory, with three digits unless their number is given."""
    if value == OUT_OF_MEMORY or value != value:
        return "—"
    return milliseconds(value) if digits is None else f"{value:,.{digits}f}"


def listed(names):
    """Names in a sentence."""
    names = list(names)
    return " and ".join([", ".join(names[:-1]), names[-1]] if names[1:] else names)


# %%


# Drawing
def both_passes(rows):
    """The milliseconds of both passes at each length, for heads of 64 numbers, by version."""
    found = {
        (row["provider"], row["length"]): row["both, ms"]
        for row in rows
        if row["head size"] == 64 and row["both, ms"] != OUT_OF_MEMORY
    }
    named = {"formula": ("PyTorch",), "SDPA": (*FUSED,), "the book's": ("Kernel Book",)}
    return {
        version: {
            length: min(
                found[name, length] for name in names if (name, length) in found
            )
            for length in LENGTHS
            if any((name, length) in found for name in names)
        }
        for version, names in named.items()
    }


def both_in_words(rows):
    return "Milliseconds of both passes. " + "; ".join(
        f"{version} {milliseconds(times[max(times)])} at {max(times):,}"
        for version, times in both_passes(rows).items()
        if times
    )


def both_lines(axes, rows):
    axes.figure.set_size_inches(5.4, 3)
    looks = {  # the colour, the line, the length at which it is named, and where beside it
        "formula": ("copy", "o-", 16384, (-9, 3), "right"),
        "SDPA": ("SDPA flash", "s--", 65536, (-9, 3), "right"),
        "the book's": ("Kernel Book", "D-", 16384, (8, -11), "left"),
    }
    shown_lines = {name: found for name, found in both_passes(rows).items() if found}
    for version, times in shown_lines.items():
        provider, look, named_at, shift, side = looks[version]
        ink = lab.colour(provider)
        axes.plot(list(times), list(times.values()), look, color=ink, markersize=5)
        if named_at in times:
            lost = version == "formula" and max(times) < max(LENGTHS)
            axes.annotate(
                f"{version}, then out of memory" if lost else version,
                (named_at, times[named_at]),
                xytext=shift,
                textcoords="offset points",
                ha=side,
                color=ink,
                fontsize=10,
            )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(LENGTHS, [f"{length:,}" for length in LENGTHS], fontsize=9)
    axes.set_yticks([0.1, 1, 10, 100], ["0.1", "1", "10", "100"])
    axes.set_ylim(top=3 * max(max(found.values()) for found in shown_lines.values()))
    axes.minorticks_off()
    axes.set(xlabel="length", ylabel="ms, forward and backward")


lab.draw(grid, "Attention alone, with and without the table", both_in_words, both_lines)

# %%

# Reading
with_sdpa = any(row["provider"] in FUSED for row in grid.rows)
fast = in_grid("both, ms", "PyTorch", 16384), in_grid("both, ms", "Kernel Book", 16384)
times = nan if isinstance(fast[0], str) else fast[0] / fast[1]
both = both_passes(grid.rows)
of_sdpa_time = [
    100 * both["the book's"][length] / took for length, took in both["SDPA"].items()
]
held = [in_grid("held, MiB", name, 16384) for name in ("PyTorch", "Kernel Book")]
lab.together(
    lab.read(
        f"**At a length of 16,384 the book's is {times:.0f} times as fast as the formula.** For "
        f"backward it keeps {milliseconds(held[1])} MiB besides q, k and v; the formula keeps "
        f"{milliseconds(held[0])}."
        if times == times or not grid.rows
        else "**At a length of 16,384 the formula runs out of memory.**"
    ),
    lab.read(
        f"Depending on the length, the book's takes {min(of_sdpa_time):.0f} to "
        f"{max(of_sdpa_time):.0f} % of SDPA's time."
    )
    if of_sdpa_time
    else None,
)

# %%

# Folded: How fast is attention at other lengths and head sizes, and where does memory run out?
table_gib = 8 * 65536**2 * 2 / 2**30  # a batch of 8, one head, bfloat16
lab.together(
    lab.table(
        [
            {"length": length}
            | {"formula, ms": grid_cell(in_grid("both, ms", "PyTorch", length))}
            | ({"SDPA, ms": grid_cell(fastest_fused(length))} if with_sdpa else {})
            | {
                "the book's, ms": grid_cell(in_grid("both, ms", "Kernel Book", length)),
                "formula holds, MiB": grid_cell(
                    in_grid("held, MiB", "PyTorch", length), 1
                ),
                "the book's holds, MiB": grid_cell(
                    in_grid("held, MiB", "Kernel Book", length), 1
                ),
            }
            for length in LENGTHS
        ]
        if grid.rows
        else [],
        "Forward and backward of attention, head size 64; — means out of memory. A version holds "
        "what its forward pass keeps for backward besides q, k and v"
        + (
            f". At 65,536 the formula needs three tables of {table_gib:.0f} GiB at once in "
            "backward: the weights, their gradient and that of the scores"
            if in_grid("both, ms", "PyTorch", 65536) == OUT_OF_MEMORY
            else ""
        ),
    ),
    grid,
)

# %%
# What each operator is worth in a layer
# --------------------------------------
#
# To see what each operator saves, we replace them one at a time. The model takes its operators as
# arguments; one that a line omits is PyTorch's.

sdpa = partial(F.scaled_dot_product_attention, is_causal=True)
layer_norm_16 = partial(layer_norm, out_dtype=torch.bfloat16)

VERSIONS = {
    "formula": Operators(standard_attention, F.layer_norm, F.dropout),
    "formula, our softmax": Operators(partial(standard_attention, softmax=softmax)),
    "SDPA": Operators(sdpa),
    "our attention": Operators(ours),  # attention(q, k, v, is_causal=True)
    "our attention, norm": Operators(ours, layer_norm_16),
    "all ours": Operators(ours, layer_norm_16, dropout),
}

# %%
# With ``out_dtype`` our layer norm writes the bfloat16 that the next matmul reads. Under autocast
# PyTorch's writes float32, which another kernel then casts.
#
# A version runs either eager or compiled, layer by layer:
#
# .. code-block:: python
#
#    model = Decoder(size, context, VERSIONS["all ours"], device="cuda")
#    for block in model.blocks:
#        block.compile(dynamic=False)
#
# ``torch.compile`` fuses PyTorch's layer norm, dropout, GELU and additions into a few kernels; ours
# it can only launch.

# Measuring
NAMES = {  # what the page calls the versions; the keys are their names in the record
    "PyTorch": "formula",
    "SDPA": "SDPA",
    "+ softmax": "formula, our softmax",
    "+ attention": "our attention",
    "+ layer norm": "our attention, norm",
    "+ dropout": "all ours",
}
COMPILED_NAMES = {
    "torch.compile": "formula",
    "SDPA, compiled": "SDPA",
    "attention, compiled": "our attention",
    "Kernel Book": "all ours",
}
ALSO_COMPILED = {  # in the whole step alone
    "softmax, compiled": "formula, our softmax",
    "layer norm, compiled": "our attention, norm",
}
EAGER = {version: VERSIONS[name] for version, name in NAMES.items()}
COMPILED = {version: VERSIONS[name] for version, name in COMPILED_NAMES.items()}
norms, per_norm = (
    2 * SIZES["large"].layers + 1,
    BATCH * CONTEXT * SIZES["large"].d_model,
)

# %%


# Measuring
class Seeded:
    """A dropout whose calls are numbered, so that each version of a model draws the same masks."""

    def __init__(self, drop):
        self.drop, self.calls = drop, 0

    def __call__(self, x, p, training):
        self.calls += 1
        return self.drop(x, p, self.calls)


def masked_in_torch(x, p, seed):
    offsets = torch.arange(x.numel(), device=x.device).view(x.shape)
    return x * reference.keep_mask(offsets, p, seed, rounds=7) / (1 - p)


CHECKED = Size(d_model=64, d_ff=128, layers=2, heads=2, vocabulary=61)


def gradients(state, tokens, operators, dtype):
    model = Decoder(CHECKED, 80, operators, device=runtime.DEVICE, dtype=dtype)
    model.load_state_dict(state)
    loss = model.loss(*tokens)
    loss.backward()
    return {"loss": loss[None]} | {name: p.grad for name, p in model.named_parameters()}


def gradient_cases():
    torch.manual_seed(1)
    state = Decoder(CHECKED, 80, device=runtime.DEVICE).state_dict()
    tokens = torch.randint(CHECKED.vocabulary, (2, 3, 80), device=runtime.DEVICE)
    plain = {"attention": standard_attention, "layer_norm": F.layer_norm}
    book = Operators(ours, layer_norm, Seeded(kernelbook.seeded_dropout))
    found = gradients(state, tokens, book, torch.float32)
    theirs, truth = (
        gradients(
            state, tokens, Operators(**plain, dropout=Seeded(masked_in_torch)), dtype
        )
        for dtype in (torch.float32, torch.float64)
    )
    for name, result in found.items():
        way = "forward" if name == "loss" else "backward"
        yield lab.Case(name, way, result, theirs[name], truth[name], factor=8)


# %%

# Measuring
same_gradients = lab.check("Every parameter of a small model", gradient_cases())
# %%

# Measuring
LEARNER, WINDOW, TRAINED, EVERY = Size(256, 1024, 4, 4, 256), 256, 160, 10
SEEDS = range(10)
LEARNERS = {  # operators, and which masks are drawn
    "PyTorch": (decoder.PYTORCH, 0),
    "other masks": (decoder.PYTORCH, 1),
    "Kernel Book": (Operators(ours, layer_norm_16, dropout), 0),
}


def source_text():
    """The package's own source as bytes."""
    files = sorted(Path(kernelbook.__file__).parent.rglob("*.py"))
    text = b"".join(file.read_bytes() for file in files)
    return (
        torch.frombuffer(bytearray(text), dtype=torch.uint8).long().to(runtime.DEVICE)
    )


def losses(text, seed, operators, masks):
    """The mean loss of every ten steps."""
    torch.manual_seed(seed)
    model = Decoder(LEARNER, WINDOW, operators, device=runtime.DEVICE)
    torch.manual_seed(len(SEEDS) * masks + seed)
    training = Training(model, torch_adamw(model.parameters(), lr=1e-3), torch.bfloat16)
    batches = numpy.random.default_rng(seed)
    window, found = torch.arange(WINDOW + 1, device=runtime.DEVICE), []
    for _ in range(TRAINED):
        starts = torch.from_numpy(
            batches.integers(len(text) - WINDOW - 1, size=(16, 1))
        )
        tokens = text[starts.to(runtime.DEVICE) + window]
        training.tokens, training.following = tokens[:, :-1], tokens[:, 1:]
        training.forward()
        found.append(training.loss.detach())
        training.backward()
        training.step()
    return torch.stack(found).view(-1, EVERY).mean(1).tolist()


def learning():
    text = source_text()
    found = {
        f"{name}, seed {seed}": losses(text, seed, *learner)
        for seed in SEEDS
        for name, learner in LEARNERS.items()
    }
    return [
        {"steps": EVERY * (index + 1)}
        | {name: round(curve[index], 4) for name, curve in found.items()}
        for index in range(TRAINED // EVERY)
    ]


learned = lab.measure("Training loss, mean of ten steps", learning)
# %%


# Drawing
BY_CHANCE = (
    2.26  # standard errors that a mean of ten exceeds once in 20 times (Student)
)


def ends(rows, name):
    """For each seed the mean loss of a version in the last 30 steps."""
    last = rows[-3:]
    found = [[row[f"{name}, seed {seed}"] for row in last] or [nan] for seed in SEEDS]
    return numpy.mean(found, axis=1)


def gaps(rows):
    """What each seed's loss ends above the mean of PyTorch's two runs, or these runs apart."""
    first, second, own = (
        ends(rows, name) for name in ("PyTorch", "other masks", "Kernel Book")
    )
    return {
        "the book's minus\nmean of PyTorch's": own - (first + second) / 2,
        "PyTorch's second run\nminus its first": second - first,
    }


def mean_and_error(found):
    """The mean of some numbers, and its standard error."""
    return found.mean(), found.std(ddof=1) / len(found) ** 0.5


def losses_in_words(rows):
    found = (
        "{}: {:+.3f} ± {:.3f}".format(name.replace("\n", " "), *mean_and_error(gap))
        for name, gap in gaps(rows).items()
    )
    return (
        f"Differences of the loss at the end, mean and standard error of {len(SEEDS)} seeds. "
        f"{'; '.join(found)}."
    )


def loss_dots(axes, rows):
    axes.figure.set_size_inches(5.4, 2.3)
    axes.grid(axis="y", visible=False)
    axes.axvline(0, color=lab.colour("copy"), linewidth=0.9)
    found = gaps(rows)
    inks = [lab.colour(name) for name in ("Kernel Book", "PyTorch")]
    for place, (gap, ink) in enumerate(zip(found.values(), inks, strict=True)):
        axes.plot(gap, [place] * len(gap), "o", color=ink, markersize=5, alpha=0.5)
        mean, error = mean_and_error(gap)
        axes.errorbar(
            mean,
            place + 0.3,
            xerr=BY_CHANCE * error,
            color=ink,
            marker="|",
            markersize=12,
            capsize=4,
        )
    axes.set_yticks(range(len(found)), list(found))
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(found) - 0.4, -0.5)
    axes.set(xlabel="difference of the loss, mean of the last 30 steps")


CURVES = {"PyTorch": "PyTorch's", "Kernel Book": "the book's"}


def curve(rows, name):
    """The loss of a version over its steps, a column for each seed."""
    return numpy.array(
        [[row[f"{name}, seed {seed}"] for seed in SEEDS] for row in rows]
    )


def curves_in_words(rows):
    found = (
        f"With {label} operators the mean falls from {means[0]:.2f} to {means[-1]:.2f}"
        for name, label in CURVES.items()
        for means in [curve(rows, name).mean(1)]
    )
    return f"Training loss of {len(SEEDS)} seeds. {'; '.join(found)}."


def loss_curves(axes, rows):
    axes.figure.set_size_inches(5.4, 2.8)
    x = [row["steps"] for row in rows]
    for name, label in CURVES.items():
        found, ink = curve(rows, name), lab.colour(name)
        axes.plot(x, found, color=ink, linewidth=0.7, alpha=0.35)
        dashed = (
            (0, (3, 2)) if name == "Kernel Book" else "-"
        )  # they lie upon each other
        look = {"color": ink, "linewidth": 2.2, "linestyle": dashed}
        axes.plot(x, found.mean(1), label=label, **look)
    axes.set(xlabel="steps", ylabel="loss, mean of ten steps")


# %%

# Reading
by_ours = next(iter(gaps(learned.rows).values()))
offset, error = mean_and_error(by_ours)
by_seed = ends(learned.rows, "PyTorch").std(ddof=1)
lab.read(
    "Before we time a version, it must compute the same. With our operators the loss and every "
    "gradient of a small model stay within tolerance, and after training, the losses of a tiny one "
    "differ from those with PyTorch's "
    + (
        "by less than chance explains."
        if abs(offset) < 0.75 * BY_CHANCE * error
        else "by about as much as chance can explain."
        if abs(offset) < 1.25 * BY_CHANCE * error
        else "by more than chance explains."
    )
)

# %%

# Folded: Do the versions compute and learn the same?
below = sum(by_ours < 0)
lab.draw(learned, "The training loss of a tiny model", curves_in_words, loss_curves)
lab.draw(learned, "How far the losses end apart", losses_in_words, loss_dots)
lab.together(
    lab.read(
        f"In the figures a tiny model trains for {TRAINED} steps under autocast on this package's "
        "own source, one byte per token. A thin line is one seed, a thick line the mean of all."
    ),
    lab.read(
        "A seed fixes parameters and batches but not the dropout masks, because our dropout draws "
        "other random numbers than PyTorch's. So the second figure also shows how far apart two "
        "runs with PyTorch's operators end if their masks differ."
    ),
    lab.read(
        f"With our operators {below} of {len(SEEDS)} seeds end below PyTorch's. The mean "
        f"difference is {abs(offset):.4f}, the half width of its 95 % confidence interval "
        f"{BY_CHANCE * error:.4f}, and the largest difference of a seed {abs(by_ours).max():.2f}. "
        f"The final losses with PyTorch's operators have a standard deviation of {by_seed:.2f}."
    ),
    lab.read(
        "For the gradients, a small model in float32 is compared with float64 under the same "
        "dropout masks. The error with our operators may be at most eight times that with "
        "PyTorch's, because sums are taken in a different order."
    ),
    same_gradients,
)

# %%
# We time forward and backward of one layer under autocast, on the GPU alone. 100 % means doing the
# FLOPs of the linear layers and of causal attention at the speed of a large cuBLAS matmul.

# Measuring
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}


def best_backend(name, batch, context):
    """The name of SDPA's fastest backend for a layer's attention, forward and backward."""
    size = SIZES[name]
    shape = batch, size.heads, context, size.d_model // size.heads
    q, k, v, do = (drawn(*shape) for _ in range(4))
    runs = {}
    for label, backend in BACKENDS.items():

        def run(backend=backend):
            with sdpa_kernel(backend):
                return torch.autograd.grad(sdpa(q, k, v), (q, k, v), do)

        usable = lab.peer("torch.nn.attention", lambda _, run=run: run)
        if not isinstance(usable, lab.Absent):
            runs[label] = usable, lambda: ()
    times = medians_in_turn(runs)
    return min(times, key=times.get)


def layer_run(layer, backend, x, dy, dtype):
    inputs = [x, *layer.parameters()]

    def run():
        with torch.autocast(x.device.type, dtype), sdpa_kernel(backend):
            y = layer(x)
        return torch.autograd.grad(y, inputs, dy)

    return run


def layer_providers(context, batch, width, heads, ff, dtype):
    size = Size(width, ff, 1, heads)
    where = {"device": runtime.DEVICE}
    own = decoder.Block(size, decoder.PYTORCH, 0.1, **where)
    backend = BACKENDS[best_backend("large", batch, context)]
    x = drawn(batch, context, width, dtype=torch.float32)
    dy = torch.randn_like(x)
    a, b = (drawn(8192, 8192, grad=False) for _ in range(2))
    runs = {"matmul": lambda: a @ b}
    for versions in (EAGER, COMPILED):
        for name, operators in versions.items():
            layer = decoder.Block(size, operators, 0.1, device="meta")
            layer.load_state_dict(own.state_dict(keep_vars=True), assign=True)
            if versions is COMPILED:
                layer.compile(dynamic=False)
            runs[name] = layer_run(layer, backend, x, dy, dtype)
    return runs


# %%

of_large = SIZES["large"]
layer = lab.bench(
    "layer",
    [
        {
            "context": CONTEXT,
            "batch": BATCH,
            "width": of_large.d_model,
            "heads": of_large.heads,
            "ff": of_large.d_ff,
            "dtype": torch.bfloat16,
        }
    ],
    layer_providers,
    limit="matmul",
    work="batch * context * width * (24 * width + 12 * ff + 7 * context)",
    limit_work="2 * 8192 * 8192 * 8192",
    unit="TFLOP/s",
)

# %%

# Drawing
RUNGS = {  # in the order of the figure and of the tables
    "eager": {
        name: NAMES[name]
        for name in (
            "PyTorch",
            "+ softmax",
            "SDPA",
            "+ attention",
            "+ layer norm",
            "+ dropout",
        )
    },
    "compiled": COMPILED_NAMES,
}
OF_OTHERS = ("PyTorch", "SDPA", "torch.compile", "SDPA, compiled")


def bar_label(row):
    return f"{100 * row['share']:.0f} %, {row['ms']:.2f} ms"


def layer_in_words(rows):
    found = {row["provider"]: bar_label(row) for row in rows}
    return "% of the speed of a large matmul. " + " ".join(
        f"{mode.capitalize()}: "
        + ", ".join(
            f"{label} {found[name]}" for name, label in rungs.items() if name in found
        )
        + "."
        for mode, rungs in RUNGS.items()
    )


def layer_bars(axes, rows):
    axes.figure.set_size_inches(5.4, 4.3)
    axes.grid(visible=False)
    by_name = {row["provider"]: row for row in rows}
    place, ticks = 0, {}
    for mode, rungs in RUNGS.items():
        axes.text(1, place, mode, va="center", fontsize=11, fontweight="bold")
        for name, label in rungs.items():
            place += 1
            ticks[place] = label
            ink = lab.colour("copy" if name in OF_OTHERS else "Kernel Book")
            if name in by_name:
                share = 100 * by_name[name]["share"]
                axes.barh(place, share, 0.7, color=ink)
                beside(axes, share, place, bar_label(by_name[name]))
        place += 1.4
    axes.axvline(100, color=lab.colour("copy"), linestyle="--", linewidth=1)
    axes.set_yticks(list(ticks), list(ticks.values()))
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(place - 0.8, -0.6)
    axes.set_xlim(0, 112)
    axes.set(xlabel="% of the speed of a large matmul")


lab.draw(
    layer,
    "One layer, forward and backward: large at 1,024",
    layer_in_words,
    layer_bars,
)
# %%


# Reading
def layer_ms(name):
    return layer.milliseconds_at(name)


def saves(before, after):
    """How many milliseconds of a layer a change saves."""
    return layer_ms(before) - layer_ms(after)


fusing = layer_ms("attention, compiled") / layer_ms("Kernel Book")
normed = saves("+ attention", "+ layer norm")
normed_percent = 100 * abs(normed) / layer_ms("+ attention")
by_dropout = saves("+ layer norm", "+ dropout")
lab.together(
    lab.read(
        "**In eager mode our attention, which stores no table and skips the masked half, saves "
        f"{saves('PyTorch', '+ attention'):.2f} of the layer's {layer_ms('PyTorch'):.2f} ms.** "
        f"SDPA saves {saves('PyTorch', 'SDPA'):.2f}."
    ),
    lab.read(
        f"Our layer norm {'saves' if normed > 0 else 'costs'} {normed_percent:.0f} % of the time "
        "that is left, our dropout "
        + (
            "nothing measurable. "
            if abs(by_dropout) < 0.01 * layer_ms("+ dropout")
            else f"{by_dropout:.2f} ms. "
        )
        + "In a compiled layer, where those of PyTorch are fused, the two together "
        + (
            "change less than 1 %."
            if abs(fusing - 1) < 0.01
            else f"{'still save' if fusing > 1 else 'cost'} {100 * abs(1 - 1 / fusing):.0f} %."
        )
    ),
)

# %%
# What the operators are worth in a step
# --------------------------------------
#

# Measuring
from contextlib import suppress

from torch._dynamo.utils import counters

# Versions take turns, because at its limit of power a GPU's clock wanders. A turn is one step that
# finds nothing queued, and TURN steps that are timed; a version has as many turns as fit into some
# seconds, but a least number and at most MOST_TURNS.
TURN, MOST_TURNS = 5, 12
PROFILES = 3
GRAPHS = {  # the two that race
    "SDPA, compiled": "SDPA, CUDA graph",
    "Kernel Book": "Kernel Book, CUDA graph",
}
ALL_GRAPHS = GRAPHS | {
    "torch.compile": "torch.compile, CUDA graph",
    "+ dropout": "+ dropout, CUDA graph",
    "SDPA": "SDPA eager, CUDA graph",
    "PyTorch": "PyTorch, CUDA graph",
}
PRODUCTS = ("aten::mm", "aten::addmm")
IN_ATTENTION = ("attention", "softmax", "matmul")  # whose matmuls are aten::bmm
KINDS = ("linear layers", "attention", "between", "AdamW")


def version_of(training, name, context, operators, compiled):
    """The same training, on the same parameters, with other operators."""
    model = Decoder(SIZES[name], context, operators, device="meta")
    model.load_state_dict(training.model.state_dict(keep_vars=True), assign=True)
    if compiled:
        for layer in model.blocks:
            layer.compile(dynamic=False)
    other = Training(model, training.optimizer, training.dtype)
    other.tokens, other.following = training.tokens, training.following
    return other


def one_turn(step):
    """Milliseconds from step to step, with the host free to run ahead; those in which the host
    launched the step before them, when nothing was queued; and those in which it launched each.

    A step is launched when its last call returns; nobody waits for the GPU then.
    """
    torch.cuda.synchronize()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(TURN + 1)]
    begin, launched = time.perf_counter(), []
    for mark in marks:
        step()
        launched.append(1e3 * (time.perf_counter() - begin))
        mark.record()
    torch.cuda.synchronize()
    took = [start.elapsed_time(end) for start, end in pairwise(marks)]
    return took, launched[:1], [after - before for before, after in pairwise(launched)]


def kind_of(operation, kernel):
    """The kind of a kernel, by its name and the operation that ran it."""
    found = group(operation)
    if found == "AdamW" or "FusedAdam" in kernel:
        return "AdamW"
    if operation in PRODUCTS:
        return "linear layers"
    if found in IN_ATTENTION and not kernel.startswith("triton_"):
        return "attention"
    return "between"


def on_gpu(events):
    return [
        event
        for event in events
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation
    ]


def kinds_in(events):
    """How long the kernels of each name ran in a profile, by the kind of what launched them."""
    kinds = defaultdict(Counter)
    for event in events:
        if event.device_type == DeviceType.CPU:
            for kernel in event.kernels:
                kind = kind_of(event.key, kernel.name)
                kinds[kernel.name][kind] += max(kernel.duration, 1e-3)
    return kinds


def kernel_times(events, kinds):
    """Milliseconds of a profile by kind and kernel.

    Where kernels of one name are of two kinds, they share its time as the operations do.
    """
    times = Counter()
    for event in on_gpu(events):
        shares = kinds[event.name] or Counter({kind_of("", event.name): 1})
        took = event.time_range.elapsed_us() / 1e3
        for kind, share in shares.items():
            times[kind, short_name(event.name)] += took * share / shares.total()
    return times


def busy_ms(events):
    """Milliseconds in which the GPU runs a kernel or a copy."""
    spans = sorted(
        (event.time_range.start, event.time_range.end) for event in on_gpu(events)
    )
    busy, reached = 0.0, 0.0
    for start, end in spans:
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return busy / 1e3


def profile_of_step(training):
    """The kinds of the kernels of a step, and the milliseconds of each kind."""
    found = profiled(training.whole).events()
    kinds = kinds_in(found)
    return kinds, by_kind(kernel_times(found, kinds), busy_ms(found))


def by_kind(times, busy):
    found = Counter()
    for (kind, _), took in times.items():
        found[kind] += took
    of_kinds = {f"{kind}, ms": round(found[kind], 2) for kind in KINDS}
    return of_kinds | {"busy, ms": round(busy, 2)}


def profile_of_replays(replay, kinds, steps=3):
    """The milliseconds of each kind and kernel in a step, as the steps of a race follow each other,
    and those in which any runs. A graph has no operations, so that ``kinds`` tells what each kernel
    belongs to."""

    def several():
        for _ in range(steps):
            replay()

    several()
    found = profiled(several).events()
    times = Counter()
    for where, took in kernel_times(found, kinds).items():
        times[where] += took / steps
    return times, busy_ms(found) / steps


def profiles_in_turn(steps, kinds):
    """The medians of some profiles of each graph.

    The graphs take turns, because two profiles of one graph differ as well: by how much, the range
    of its linear layers says.
    """
    found = {title: [] for title in steps}
    for _ in range(PROFILES):
        for title, replay in steps.items():
            found[title].append(profile_of_replays(replay, kinds[title]))
    rows = {}
    for title, profiles in found.items():
        each = [by_kind(times, busy) for times, busy in profiles]
        rows[title] = {
            name: statistics.median(row[name] for row in each) for name in each[0]
        }
        for kind in KINDS:
            took = [row[f"{kind}, ms"] for row in each]
            rows[title][RANGE.format(kind)] = round(max(took) - min(took), 2)
    return rows


RANGE = "range of {}, ms"


def graph_of(training):
    """A CUDA graph of a step, and the peak of its memory in GiB."""
    freed()
    graphs = []
    peak = peak_gib(lambda: graphs.append(decoder.captured(training)))
    graphs[0].replay()
    torch.cuda.synchronize()
    return graphs[0], peak


def graphs_in_turn(trainings, kinds):
    """The times, peaks and profiles of steps as CUDA graphs, and why there is none."""
    wanted = {label: title for label, title in ALL_GRAPHS.items() if label in trainings}
    steps, peaks, times, profiles, remarks = {}, {}, {}, {}, {}
    for label, title in wanted.items():
        try:
            graph, peaks[title] = graph_of(trainings[label])
            steps[title] = graph.replay
        except Exception as error:  # whatever cannot be captured
            remarks[title] = in_short(error)
        if title in remarks:
            torch.cuda.set_stream(torch.cuda.default_stream())
            trainings[label].loss = None
            trainings[label].optimizer.zero_grad()
    try:
        times = times_in_turn(steps, seconds=4, fewest=5)
        kinds_of = {title: kinds[label] for label, title in GRAPHS.items()}
        race = {title: replay for title, replay in steps.items() if title in kinds_of}
        profiles = profiles_in_turn(race, kinds_of)
    except Exception as error:
        remarks |= dict.fromkeys(steps, in_short(error))
    return times, peaks, profiles, remarks


def in_short(error):
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}"[:120]


def times_in_turn(steps, seconds, fewest):
    """What the turns of each version took, by its name: see one_turn."""
    counts, draw = {}, numpy.random.default_rng(0)
    for label, step in steps.items():
        begin = time.perf_counter()
        one_turn(step)  # does not count
        fits = int(seconds / (time.perf_counter() - begin))
        counts[label] = max(fewest, min(MOST_TURNS, fits))
    times = {label: ([], [], []) for label in steps}
    for done in range(max(counts.values(), default=0)):
        for label in draw.permutation(list(steps)):
            if counts[label] > done:
                found = one_turn(steps[label])
                for all_found, of_turn in zip(times[label], found, strict=True):
                    all_found += of_turn
    return times


QUANTILES = {"p20": 0.2, "p50": 0.5, "p80": 0.8}
TIMES = ("steps", *(f"{what} {q}, ms" for what in ("step", "host") for q in QUANTILES))


def quantiles(found, what):
    """The median of some times and their middle 60 %, by the names of columns."""
    return {
        f"{what} {name}, ms": round(float(numpy.quantile(found, share)), 3)
        for name, share in QUANTILES.items()
    }


def timing_of(times):
    """The times of steps, and those in which the host launched them.

    The first step after a pause may find the host slower; in the steps that are timed it may have
    to wait, if it is a thousand launches ahead. Both are bounds, and the lesser counts.
    """
    if not times:
        return dict.fromkeys(TIMES)
    took, first, following = times
    host = min(first, following, key=statistics.median)
    return {"steps": len(took)} | quantiles(took, "step") | quantiles(host, "host")


def versions_in_turn(name, batch, context, versions, seconds, fewest):
    """A row for each version of a step: (operators, compiled) by its name; and for its graph."""
    backend = best_backend(name, batch, context)
    training = new_training(name, context, "bfloat16").draw(batch, context)
    before = counters["stats"]["unique_graphs"]
    trainings = {
        label: version_of(training, name, context, *version)
        for label, version in versions.items()
    }
    peaks, kinds, profiles = {}, {}, {}
    with sdpa_kernel(BACKENDS[backend]):
        for label, each in trainings.items():
            each.whole()  # which compiles
            peaks[label] = peak_gib(each.whole)
        layers = counters["stats"]["unique_graphs"] - before
        if layers != sum(compiled for _, compiled in versions.values()):
            raise RuntimeError(
                f"{layers} graphs were compiled: a layer was compiled again."
            )
        launched = {label: each.whole for label, each in trainings.items()}
        times = times_in_turn(launched, seconds, fewest)
        for label, each in trainings.items():
            kinds[label], profiles[label] = profile_of_step(each)
        graph_times, graph_peaks, graph_profiles, remarks = graphs_in_turn(
            trainings, kinds
        )
    times, peaks, profiles = (
        times | graph_times,
        peaks | graph_peaks,
        profiles | graph_profiles,
    )
    rows = [
        {"size": name, "context": context, "version": label, "batch": batch}
        | timing_of(times.get(label))
        | {"peak, GiB": round(peaks[label], 2) if label in peaks else None}
        | {"SDPA backend": backend, "remark": remarks.get(label, "")}
        | NO_PROFILE
        | profiles.get(label, {})
        for label in (*versions, *(ALL_GRAPHS[v] for v in versions if v in ALL_GRAPHS))
    ]
    del training, trainings, launched, each
    clean_up()
    return rows


def clean_up():
    with suppress(RuntimeError):  # of a GPU that a capture has stopped
        torch.compiler.reset()
        freed()


NO_PROFILE = dict.fromkeys(
    [
        *(f"{kind}, ms" for kind in KINDS),
        "busy, ms",
        *(RANGE.format(kind) for kind in KINDS),
    ]
)


def step_ladder():
    versions = {label: (operators, False) for label, operators in EAGER.items()}
    versions |= {label: (operators, True) for label, operators in COMPILED.items()}
    versions |= {label: (VERSIONS[name], True) for label, name in ALSO_COMPILED.items()}
    return versions_in_turn("large", BATCH, CONTEXT, versions, seconds=5, fewest=4)


# %%


# Measuring
def layer_launches():
    """How long the host takes to launch both passes of a layer while nothing is queued."""
    point = {
        "context": CONTEXT,
        "batch": BATCH,
        "width": SIZES["large"].d_model,
        "heads": SIZES["large"].heads,
        "ff": SIZES["large"].d_ff,
        "dtype": torch.bfloat16,
    }
    runs = layer_providers(**point)
    del runs["matmul"]
    for run in runs.values():  # which compiles
        run()
        run()
    times, draw = {name: [] for name in runs}, numpy.random.default_rng(0)
    for _ in range(12):
        for name in draw.permutation(list(runs)):
            for _ in range(10):
                torch.cuda.synchronize()
                begin = time.perf_counter()
                runs[name]()
                times[name].append(1e3 * (time.perf_counter() - begin))
    del runs
    torch.compiler.reset()
    freed()
    return [
        {"version": name, "calls": len(found)} | quantiles(found, "host")
        for name, found in times.items()
    ]


layer_host = lab.measure("How long the host takes to launch a layer", layer_launches)

# %%

steps = lab.measure("A step of large at 1,024, and as CUDA graphs", step_ladder)

# %%


# Measuring
def timed(rows):
    return [row for row in rows if row["step p50, ms"] is not None]


BY_VERSION = {row["version"]: row for row in timed(steps.rows)}


def step(column, version):
    """A number of a version's step; NaN where it is not recorded."""
    found = BY_VERSION.get(version, {}).get(column)
    return nan if found is None else found


step_ms = partial(step, "step p50, ms")
host_ms = partial(step, "host p50, ms")
busy_ms_of = partial(step, "busy, ms")


def measured(text, *numbers):
    """A text, if its numbers are there: one graph that fails must not cost a page."""
    return text if all(number == number for number in numbers) or not BY_VERSION else ""


def overlap(one, other, what):
    """Whether the middle 60 % of two rows of times overlap."""
    low, high = (f"{what} {name}, ms" for name in ("p20", "p80"))
    return one[low] <= other[high] and other[low] <= one[high]


def differs(one, other, what="step"):
    """Whether two rows of times differ by 1 %, and the middle 60 % of their times all."""
    apart = abs(one[f"{what} p50, ms"] / other[f"{what} p50, ms"] - 1)
    return apart >= 0.01 and not overlap(one, other, what)


def step_row(version):
    return BY_VERSION.get(version, dict.fromkeys(TIMES, nan))


def spread(row, what="step", digits=1):
    """The median of some times, with the middle 60 % of them."""
    if row.get(f"{what} p50, ms") is None:
        return "—"
    low, middle, high = (shown(row[f"{what} {name}, ms"], digits) for name in QUANTILES)
    return f"{middle} ({low}–{high})"


compiled_of = {name: version for version, name in COMPILED_NAMES.items()}

# %%

# Reading
fastest_in_layer = min(COMPILED_NAMES, key=layer_ms) == "Kernel Book"
our_took, sdpa_took = step_ms("Kernel Book"), step_ms("SDPA, compiled")
n_layers, of_adamw = SIZES["large"].layers, step("AdamW, ms", "Kernel Book")
expected = n_layers * layer_ms("Kernel Book") + of_adamw
our_busy = busy_ms_of("Kernel Book")
lab.read(
    (
        "Does the fastest layer also give the fastest step? **No: compiled, the step takes "
        f"{our_took:.0f} ms with all our operators, {sdpa_took:.0f} with SDPA and "
        f"{step_ms('torch.compile'):.0f} with the formula.** "
        if fastest_in_layer and our_took > sdpa_took
        else f"How long is a compiled step? **With ours it takes {our_took:.0f} ms, with SDPA "
        f"{sdpa_took:.0f}, and with the formula {step_ms('torch.compile'):.0f}.** "
    )
    + f"With ours, kernels run for {our_busy:.0f} of the {our_took:.0f} ms; for the rest the GPU "
    "waits."
)

# %%
# It waits for the host. A kernel starts once it has been launched and the one before it has
# finished, so launches that take longer than kernels leave gaps. The picture follows five launches
# of an eager layer. Its lengths are schematic, our operators are blue, and its last row belongs to
# the next section.

# Drawing
FIVE = ("layer norm", "qkv", "attention", "out", "dropout")
REPLACED = ("layer norm", "attention", "dropout")
LANES = {  # lengths of the five launches and kernels, in no unit
    "SDPA: the GPU waits a little": (
        (46, 46, 46, 46, 46),
        (34, 42, 42, 25, 25),
    ),
    "The book's: launches take longer, so the GPU waits longer": (
        (92, 46, 77, 46, 70),
        (27, 42, 40, 25, 24),
    ),
    "The book's as a CUDA graph: one launch for all five": (
        (30,),
        (27, 42, 40, 25, 24),
    ),
}
FILLS = {  # of a box, its fill and its edge
    "PyTorch's": ("#f6f8fa", "#59636e"),
    "ours": ("#eaf2fb", "#0b63ce"),
    "waits": ("#ffffff", "#59636e"),
}


def box(axes, start, length, top, kind, label=""):
    fill, edge = FILLS[kind]
    line = {"linestyle": ":", "linewidth": 0.8} if kind == "waits" else {}
    axes.barh(top, length - 1.5, 26, left=start, color=fill, edgecolor=edge, **line)
    middle = start + length / 2 - 0.75
    axes.text(middle, top, label, ha="center", va="center", fontsize=10)


def lanes(axes):
    for place, (title, (launches, kernels)) in enumerate(LANES.items()):
        top = 104 * place
        axes.text(0, top - 30, title, fontsize=10.5, fontweight="bold", va="center")
        launched, ended = 0, 0
        ends = []
        for number_of, length in enumerate(launches):
            kind = "ours" if length > min(launches) else "PyTorch's"
            label = f"{number_of + 1}" if launches[1:] else ""
            box(axes, launched, length, top, kind, label)
            launched += length
            ends.append(launched)
        if not launches[1:]:
            ends *= len(kernels)
            axes.text(launched + 5, top, "graph.replay()", va="center", fontsize=10)
        for number_of, (length, ready) in enumerate(zip(kernels, ends, strict=True)):
            if ready > ended:
                wait = ready - ended
                box(axes, ended, wait, top + 32, "waits", "waits" if wait > 40 else "")
            ended = max(ended, ready)
            own = place > 0 and FIVE[number_of] in REPLACED
            kind = "ours" if own else "PyTorch's"
            box(axes, ended, length, top + 32, kind, f"{number_of + 1}")
            ended += length
        for row, who in enumerate(("host", "GPU")):
            axes.text(-6, top + 32 * row, who, ha="right", va="center", fontsize=10)
    named = ", ".join(f"{place} {what}" for place, what in enumerate(FIVE, 1))
    axes.text(0, 104 * len(LANES) - 42, named, fontsize=10, va="center")
    axes.set_ylim(104 * len(LANES) - 30, -44)
    axes.set_xlim(-32, 362)
    axes.axis("off")


lab.sketch(
    "Host and GPU during five launches of a layer",
    "The five are "
    + ", ".join(f"{place} {what}" for place, what in enumerate(FIVE, 1))
    + ". With SDPA the GPU waits a little before each; with the book's operators launches are "
    "longer, and so are the waits. As a CUDA graph, one launch serves all five, without gaps.",
    lanes,
    height=3.7,
)

# %%
# .. admonition:: Key idea
#    :class: kb-key
#
#    A step runs at the pace of whichever is slower: the GPU, which runs the kernels, or the host,
#    which launches them.
#
# To find out which of the two sets the pace of your step, read the clock twice:
#
# .. code-block:: python
#
#    torch.cuda.synchronize()
#    begin = time.perf_counter()
#    training.whole()
#    host = time.perf_counter() - begin  # everything is launched
#    torch.cuda.synchronize()
#    step = time.perf_counter() - begin  # everything has run
#
# If ``host`` is nearly as long as ``step``, the host sets the pace; if it is much shorter, the GPU.
# The striped bars show ``host``, the solid bars the kernels in a profile. The times of a version
# come from different steps, so a step is only about as long as its longer bar.

# Drawing
MODES = {  # the versions that are drawn, and what the figures call them
    "eager": {name: NAMES[name] for name in ("PyTorch", "SDPA", "+ dropout")},
    "compiled": {
        name: COMPILED_NAMES[name]
        for name in ("torch.compile", "SDPA, compiled", "Kernel Book")
    },
}
KIND_NAMES = {kind: kind for kind in KINDS} | {"between": "between the matmuls"}
INKS = {
    "linear layers": lab.colour("matmul"),
    "attention": lab.colour("SDPA flash"),
    "between": lab.colour("torch.compile"),
    "AdamW": lab.colour("quack"),
}


def mark_ours(axes):
    """Write the names of our versions in the colour of the book."""
    for label in axes.get_yticklabels():
        if "our" in label.get_text():
            label.set_color(lab.colour("Kernel Book"))


def steps_in_words(rows):
    rows = {row["version"]: row for row in timed(rows)}
    return "Milliseconds of a step. " + " ".join(
        f"{mode.capitalize()}: "
        + "; ".join(
            f"{label} {rows[name]['step p50, ms']:.1f}, its kernels "
            f"{rows[name]['busy, ms']:.1f}, launched in {rows[name]['host p50, ms']:.1f}"
            for name, label in versions.items()
            if name in rows
        )
        + "."
        for mode, versions in MODES.items()
    )


def two_bars(axes, rows):
    """For each version the host's time above the GPU's, and the step's at the right."""
    axes.figure.set_size_inches(5.4, 4.5)
    axes.grid(visible=False)
    rows = {row["version"]: row for row in timed(rows)}
    grey, blue = lab.colour("copy"), lab.colour("Kernel Book")
    striped = {"facecolor": "none", "hatch": "/////", "linewidth": 0.8}
    whisker = {"fmt": "none", "ecolor": "#1f2328", "elinewidth": 1.2, "capsize": 2}
    place, ticks, heads = 0, {}, []
    at_right = {"ha": "right", "va": "center"}
    longest = max(
        (
            max(rows[name]["host p80, ms"], rows[name]["step p50, ms"])
            for versions in MODES.values()
            for name in versions
            if name in rows
        ),
        default=1,
    )
    for mode, versions in MODES.items():
        axes.text(1, place, mode, va="center", fontsize=11, fontweight="bold")
        heads.append(place)
        for name, label in versions.items():
            if name not in rows:
                continue
            place += 1
            ticks[place] = label
            row = rows[name]
            host, busy = row["host p50, ms"], row["busy, ms"]
            low, high = row["host p20, ms"], row["host p80, ms"]
            ink = blue if "ours" in label else grey
            axes.barh(place - 0.19, host, 0.3, edgecolor=ink, **striped)
            reach = [[host - low], [high - host]]
            axes.errorbar(host, place - 0.19, xerr=reach, **whisker)
            beside(axes, max(host, high), place - 0.2, f"host {host:.0f}")
            axes.barh(place + 0.19, busy, 0.3, color=ink)
            beside(axes, busy, place + 0.2, f"GPU {busy:.0f}")
            took = f"{row['step p50, ms']:.0f}"
            bold = {"fontsize": 11, "fontweight": "bold"}
            axes.text(1.36 * longest, place, took, **bold, **at_right)
        place += 1.2
    axes.text(1.36 * longest, heads[0], "step, ms", fontsize=10, **at_right)
    axes.set_yticks(list(ticks), list(ticks.values()))
    mark_ours(axes)
    axes.set_ylim(place - 0.6, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.set_xlim(0, 1.38 * longest)
    axes.set_xticks(range(0, int(longest) + 20, 50))
    axes.set(xlabel="ms per training step")
    axes.barh(1, 0, edgecolor=grey, label="the host launches", **striped)
    axes.barh(1, 0, color=grey, label="the GPU runs kernels")
    axes.errorbar(nan, nan, xerr=1, label="host, middle 60 %", **whisker)


lab.draw(steps, "One step, by host and GPU: large at 1,024", steps_in_words, two_bars)

# %%


# Measuring
def of_layer_host(version, column="host p50, ms"):
    return number(layer_host, column, version)


ADDED = {
    "+ attention": "attention",
    "+ layer norm": "layer norm",
    "+ dropout": "dropout",
}
dearer = {  # by how many milliseconds each of our operators lengthens the launches of a layer
    ADDED[after]: of_layer_host(after) - of_layer_host(before)
    for before, after in pairwise(("SDPA", *ADDED))
}


# %%

# Reading
saved_peak = step("peak, GiB", "PyTorch") - step("peak, GiB", "SDPA")
peaks = {f"{step('peak, GiB', name):.0f}" for name in ("SDPA", "+ dropout")}
promised = n_layers * saves("PyTorch", "+ dropout")
busy_saved = busy_ms_of("PyTorch") - busy_ms_of("+ dropout")
our_host, sdpa_host = host_ms("+ dropout"), host_ms("SDPA")
lone = [
    row
    for name in ("+ dropout", "Kernel Book")
    for row in layer_host.rows
    if row["version"] == name
]
lone_saves = of_layer_host("+ dropout") - of_layer_host("Kernel Book")
waits = {
    name: host_ms(name) / busy_ms_of(name)
    for versions in MODES.values()
    for name in versions
}
by_host = {name for name in waits if waits[name] > 1}
clearly_by_host = {
    name for name in waits if step("host p20, ms", name) > busy_ms_of(name)
}
first_ours = host_ms("+ attention")
attention_adds = first_ours > host_ms("SDPA") and not overlap(
    step_row("+ attention"), step_row("SDPA"), "host"
)
unclear_hosts = any(
    overlap(step_row(name), step_row(sdpa_name), "host")
    for name, sdpa_name in (("+ dropout", "SDPA"), ("Kernel Book", "SDPA, compiled"))
)
lab.together(
    lab.read(
        (
            "**In every step except those of the formula, the striped bar of the host is clearly "
            "the longer,** "
            if clearly_by_host == {*waits} - {"PyTorch", "torch.compile"}
            else "**With all our operators the striped bars of the host are the longer,** "
            if {"+ dropout", "Kernel Book"} <= by_host
            else "**In some steps the striped bar of the host is the longer,** "
        )
        + "so faster kernels no longer shorten these steps."
        + (
            " Host times scatter so widely that we trust none of their differences."
            if unclear_hosts
            else " With our operators the host takes longer than with SDPA."
        )
    )
    if by_host
    else None,
    lab.read(
        (
            "On the GPU a step saves what we expected. "
            if abs(busy_saved / promised - 1) < 0.1 and abs(saved_peak / in_tables - 1) < 0.1
            else ""
        )
        + f"With all our operators the kernels of an eager step take {busy_saved:.0f} ms less; "
        f"{n_layers} layers promised {promised:.0f}. Peak memory falls from "
        f"{step('peak, GiB', 'PyTorch'):.0f} GiB to {' or '.join(sorted(peaks, reverse=True))}: "
        f"SDPA lowers it by {saved_peak:.1f}, and we counted {in_tables:.1f} for the tables."
    ),
)

# %%


# Drawing
def layer_spread(version):
    """The median of the launches of a layer, with the middle 60 % of them."""
    row = {row["version"]: row for row in layer_host.rows}[version]
    low, middle, high = (row[f"host {name}, ms"] for name in QUANTILES)
    return f"{middle:.2f} ({low:.2f}–{high:.2f})"


# %%

# Folded: What fills the GPU's time, how do softmax and matmuls compare, and how long is a launch?
softmax_took = in_groups("bfloat16", ["softmax"])
took_inside = {
    "matmuls": (12 * head, step("attention, ms", "PyTorch") - softmax_took),
    "softmax": (9, softmax_took),
}
lab.together(
    lab.read(
        f"{n_layers} compiled layers of {layer_ms('Kernel Book'):.2f} ms and AdamW's "
        f"{of_adamw:.1f} make {expected:.0f} ms; the kernels of the compiled step take "
        f"{our_busy:.0f}."
    ),
    lab.read(
        "Launched alone, a layer takes the host "
        f"{sum(dearer.values()):.2f} ms longer with all our operators than with SDPA, or "
        f"{n_layers * sum(dearer.values()):.0f} for {n_layers}. An eager step takes it "
        f"{our_host - sdpa_host:.0f} ms longer."
    ),
    lab.read(
        f"The host launches an eager step in {our_host:.0f} ms with all our operators and in "
        f"{sdpa_host:.0f} with SDPA, a compiled one in {host_ms('Kernel Book'):.0f} and "
        f"{host_ms('SDPA, compiled'):.0f}. "
        + (
            f"Our attention alone raises the eager {sdpa_host:.0f} to {first_ours:.0f}. "
            if attention_adds
            else ""
        )
        + "These times scatter, so in a step we trust only the differences between ours and SDPA, "
        "neither the order of our versions nor the effect of compiling."
    ),
    lab.read(
        "`torch.compile` launches the kernels of our layer norm and dropout itself. Of our "
        "attention it knows only the shapes and dtypes of what it returns."
        + (
            f" Launched alone, a layer takes {lone[1]['host p50, ms']:.1f} ms compiled and "
            f"{lone[0]['host p50, ms']:.1f} eager"
            + (
                ", but the whole step hardly gains."
                if our_host - host_ms("Kernel Book") < n_layers * lone_saves / 2
                else "."
            )
            if lone and lone_saves > 0 and not overlap(*lone, "host")
            else ""
        )
    ),
    lab.table(
        [
            {
                "mode": mode,
                "version": label,
                "step": spread(BY_VERSION[name]),
                "host": spread(BY_VERSION[name], "host"),
                "as a graph": shown(step_ms(ALL_GRAPHS.get(name))),
                "peak, GiB": shown(BY_VERSION[name]["peak, GiB"]),
                "steps": BY_VERSION[name]["steps"],
            }
            | {
                KIND_NAMES[kind]: shown(BY_VERSION[name][f"{kind}, ms"])
                for kind in KINDS
            }
            | {"kernels": shown(BY_VERSION[name]["busy, ms"])}
            for mode, versions in {
                "eager": RUNGS["eager"],
                "compiled": COMPILED_NAMES | ALSO_COMPILED,
            }.items()
            for name, label in versions.items()
            if name in BY_VERSION
        ],
        "Milliseconds of a step of large at 1,024 and of its launches, with the middle 60 %; of "
        "the step as a graph (next section); and its peak memory. SDPA runs with "
        + listed(sorted({row["SDPA backend"] for row in steps.rows}) or ["—"])
        + ". Kernels were profiled in other steps; those between the matmuls are layer norm, "
        "dropout, GELU, additions and casts, and with the formula scale and mask. With the formula "
        "the host's time is an upper bound, because a host that is a thousand launches ahead waits "
        f"for the GPU. By writing bfloat16, the {norms} layer norms of a step move "
        f"{16 * norms * per_norm / 1e9:.1f} GB less, which at the speed of a copy takes "
        f"{1e3 * 16 * norms * per_norm / of_memory:.1f} ms",
    ),
    lab.table(
        [
            {
                "version": name,
                "eager, ms": layer_spread(version),
                "compiled, ms": layer_spread(compiled_of[name])
                if name in compiled_of
                else "—",
                "kernels, eager, ms": shown(layer_ms(version), 2),
            }
            for version, name in RUNGS["eager"].items()
        ]
        if layer_host.rows
        else [],
        "How long the host takes to launch forward and backward of one layer of large while "
        "nothing is queued: medians of 120 calls, with their middle 60 %. In eager mode our "
        f"attention adds {dearer['attention']:.1f} ms to the time with SDPA, our layer norm "
        f"{dearer['layer norm']:.1f} and our dropout {dearer['dropout']:.1f}. Compare only "
        "differences, because each call also enters autocast and starts autograd anew",
    ),
    lab.table(
        [
            {
                "inside attention": what,
                "FLOPs per score": flops,
                "TFLOP": round(flops * n_scores / 1e12, 2),
                "ms": round(milli, 1),
                "TFLOP/s": round(flops * n_scores / milli / 1e9, 1),
            }
            for what, (flops, milli) in took_inside.items()
        ]
        if steps.rows and profile_of.rows
        else [],
        "Both passes of the eager formula under autocast, large at 1,024, without scale, mask and "
        "casts. With the table stored, backward does four matmuls and forward two; softmax does "
        "about five FLOPs per score in forward and four in backward. "
        + (
            f"The matmuls do {12 * head / 9:.0f} times the FLOPs in less time. "
            if took_inside["matmuls"][1] < took_inside["softmax"][1]
            else ""
        )
        + "Their time is that of attention in the first table minus that of softmax, which comes "
        "from another profile",
    ),
)

# %%
# One launch for a whole step
# ---------------------------
#
# A step can be as fast as its kernels if it gets rid of its launches. Every step launches the same
# kernels, so a :term:`CUDA graph` can capture the launches once; from then on a single call from
# the host replays them all.
#
# .. code-block:: python
#
#    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
#    training = Training(model, optimizer, torch.bfloat16).draw(4, 1024)
#
#    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
#    stream.wait_stream(torch.cuda.current_stream())
#    with torch.cuda.stream(stream):
#        training.whole()             # run, not recorded
#    torch.cuda.current_stream().wait_stream(stream)
#
#    optimizer.param_groups[0]["capturable"] = True  # else AdamW refuses the capture
#    with torch.cuda.graph(graph, stream=stream):
#        training.whole()             # recorded, not run
#    graph.replay()                   # one step, with new dropout masks
#
# One step runs on the separate stream beforehand, because one-off work, such as compiling, must not
# be recorded.
#
# **A graph reads its batch from the memory that held it at capture**, so the next batch must be
# copied there: ``training.tokens.copy_(tokens)``, and likewise ``following``.

# Folded: The whole capture function
lab.together(
    lab.read(
        "`torch.compile(mode=\"reduce-overhead\")` captures only what it compiles, here each "
        "layer. By hand one graph holds the whole step, AdamW included."
    ),
    lab.read(
        "`wait_stream` enforces the order, because streams do not wait for each other by "
        "themselves. Libraries, too, do some set-up for a new stream, and the first step keeps it "
        "out of the graph."
    ),
    lab.read(
        "A capture needs AdamW's count of steps on the GPU: `fused=True` keeps it there and "
        "`capturable` says so, but draws a warning if set before the first step. A learning rate "
        "that is a Python number is fixed at capture; to change it, make it a tensor and fill it."
    ),
    lab.read(
        "The dropout masks are new in each replay: PyTorch writes the state of its "
        "generator into memory that the graph reads, and our dropout draws its seed from that "
        "generator on the GPU."
    ),
    lab.source(decoder.captured),
)

# %%


# Drawing
def graphs_in_words(rows):
    rows = {row["version"]: row for row in timed(rows)}
    return "Milliseconds of a step, launched by the host and as a graph. " + " ".join(
        f"{mode.capitalize()}: "
        + "; ".join(
            f"{label} {rows[name]['step p50, ms']:.1f} and "
            f"{rows[ALL_GRAPHS[name]]['step p50, ms']:.1f}"
            for name, label in versions.items()
            if name in rows and ALL_GRAPHS[name] in rows
        )
        + "."
        for mode, versions in MODES.items()
    )


HOLLOW = {"markersize": 8, "markerfacecolor": "white"}


def two_dots(axes, place, launched, graph, ink, unit=1):
    """The milliseconds of a step that the host launches, and of the same step as a graph."""
    axes.plot([graph / unit, launched / unit], [place] * 2, color=ink, linewidth=1.5)
    axes.plot(launched / unit, place, "o", color=ink, **HOLLOW)
    axes.plot(graph / unit, place, "D", color=ink, markersize=8)
    sign = 1 if launched > 0.95 * graph else -1
    for side, took, text in (
        (-sign, graph, f"{graph:.1f}"),
        (sign, launched, f"{launched:.0f}"),
    ):
        axes.annotate(
            text,
            (took / unit, place),
            xytext=(8 * side, 0),
            textcoords="offset points",
            ha="left" if side > 0 else "right",
            va="center",
            fontsize=10,
        )


def name_dots(axes, ink):
    """What the two marks mean, for the legend."""
    axes.plot([], [], "D", color=ink, markersize=8, label="as a graph")
    axes.plot([], [], "o", color=ink, label="launched by the host", **HOLLOW)


def graph_dots(axes, rows):
    axes.figure.set_size_inches(5.4, 3.6)
    axes.grid(visible=False)
    rows = {row["version"]: row for row in timed(rows)}
    grey, blue = lab.colour("copy"), lab.colour("Kernel Book")
    place, ticks, longest = 0, {}, 0
    for mode, versions in MODES.items():
        axes.text(1, place, mode, va="center", fontsize=11, fontweight="bold")
        for name, label in versions.items():
            if name not in rows or ALL_GRAPHS[name] not in rows:
                continue
            place += 1
            ticks[place] = label
            took = rows[name]["step p50, ms"]
            graph_took = rows[ALL_GRAPHS[name]]["step p50, ms"]
            ink = blue if "ours" in label else grey
            two_dots(axes, place, took, graph_took, ink)
            longest = max(longest, took, graph_took)
        place += 1.2
    axes.set_yticks(list(ticks), list(ticks.values()))
    mark_ours(axes)
    axes.set_ylim(place - 0.6, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.set_xlim(0, 1.12 * longest)
    axes.set(xlabel="ms per training step")
    name_dots(axes, grey)


lab.draw(steps, "The same steps as CUDA graphs", graphs_in_words, graph_dots)

# %%

# Reading
graphed, sdpa_graphed = ALL_GRAPHS["Kernel Book"], ALL_GRAPHS["SDPA, compiled"]
eager_graphed = ALL_GRAPHS["+ dropout"]
no_waiting = step_ms(graphed) < 1.05 * busy_ms_of(graphed)
gained = {name: step_ms(name) / step_ms(title) for name, title in ALL_GRAPHS.items()}
by_kernels = busy_ms_of(sdpa_graphed) - busy_ms_of(graphed)
by_step = round(step_ms(sdpa_graphed), 1) - round(step_ms(graphed), 1)  # as shown
by_compiling = step_ms(eager_graphed) - step_ms(graphed)
AT_TOP = [
    ALL_GRAPHS[name]
    for name in ("PyTorch", "torch.compile", "SDPA, compiled", "Kernel Book")
]
lab.together(
    lab.read(
        measured(
            f"**{'The host was the bottleneck: as' if no_waiting else 'As'} a graph, the compiled "
            f"step with all our operators takes {step_ms(graphed):.0f} ms instead of "
            f"{our_took:.0f}.** "
            + (
                "The difference from the graph with SDPA is within the scatter. "
                if not differs(step_row(sdpa_graphed), step_row(graphed))
                else f"It is now {'faster' if by_step > 0 else 'slower'} than with SDPA. "
            )
            + (
                "The order of the bars at the top is restored."
                if all(step_ms(a) > step_ms(b) for a, b in pairwise(AT_TOP))
                else ""
            ),
            by_step,
        )
    ),
    lab.read(
        measured(
            "The eager formula hardly gains, because its kernels take longer than its launches."
            if gained["PyTorch"] < 1.03 and host_ms("PyTorch") < busy_ms_of("PyTorch")
            else f"A graph saves {100 - 100 / gained['PyTorch']:.0f} % of the eager formula.",
            gained["PyTorch"],
        )
    ),
)

# %%
# With the launches gone, only the kernels are left. Why do the bars at the top end so far below
# 100? The figure sorts the kernels of those four versions in a whole step.

# Drawing
FOUR = {  # the bars at the top
    "PyTorch": "formula, eager",
    "torch.compile": "formula",
    "SDPA, compiled": "SDPA",
    "Kernel Book": "all ours",
}


def kinds_of_step(row):
    return {kind: row[f"{kind}, ms"] for kind in KINDS}


def four_in_words(rows):
    rows = {row["version"]: row for row in timed(rows)}
    return "Milliseconds of kernels in a step. " + "; ".join(
        f"{label}: "
        + ", ".join(
            f"{KIND_NAMES[kind]} {took:.1f}"
            for kind, took in kinds_of_step(rows[name]).items()
        )
        for name, label in FOUR.items()
        if name in rows
    )


def four_bars(axes, rows):
    axes.figure.set_size_inches(5.4, 2.9)
    axes.grid(visible=False)
    rows = {row["version"]: row for row in timed(rows) if row["version"] in FOUR}
    for place, name in enumerate(rows):
        reached = 0
        for kind, took in kinds_of_step(rows[name]).items():
            label = "" if place else KIND_NAMES[kind]
            axes.barh(place, took, 0.62, left=reached, color=INKS[kind], label=label)
            if took > 9:
                white = {"color": "white", "ha": "center", "va": "center"}
                axes.text(reached + took / 2, place, f"{took:.0f}", fontsize=10, **white)
            reached += took
        beside(axes, reached, place, f"{reached:.0f} ms")
    axes.set_yticks(range(len(rows)), [FOUR[name] for name in rows])
    mark_ours(axes)
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set(xlabel="ms of kernels per step; all but the first are compiled")


lab.draw(steps, "What the GPU runs during one step", four_in_words, four_bars)

# %%

# Reading
of_linear, of_between = (
    step(f"{kind}, ms", "Kernel Book") for kind in ("linear layers", "between")
)
scores_flops = 7 * n_layers * BATCH * CONTEXT**2 * SIZES["large"].d_model
linear_flops = step_flops(SIZES["large"], BATCH, CONTEXT) - scores_flops
our_share = layer.share("Kernel Book")
lost = n_layers * layer_ms("Kernel Book") * (1 - our_share)  # milliseconds above the limit
linear_percent = 100 * 1e3 * linear_flops / of_linear / of_matmul
lab.together(
    lab.read(
        f"**What keeps the book's bar at the top at {100 * our_share:.0f} "
        f"{'is mostly' if of_between > lost / 2 else 'is partly'} the {of_between:.0f} ms between "
        "the matmuls:** layer norm, dropout, GELU, additions and casts, which move bytes and do "
        "hardly any FLOPs. The linear layers already run at "
        f"{linear_percent:.0f} % of the speed of a large matmul, and at all of it would take only "
        f"{of_linear * (1 - linear_percent / 100):.0f} ms less."
    ),
)

# %%
# Other sizes and a longer context
# --------------------------------
#
# A graph pays only where the host sets the pace. We time the two compiled steps in three more
# sizes, and in *large* at a context of 16,384 with a single sequence.

# Measuring
RACES = (
    ("medium", CONTEXT, BATCH),
    ("xl", CONTEXT, BATCH),
    ("2.7B", CONTEXT, BATCH),
    ("large", LONG, 1),
)


def races():
    versions = {label: (COMPILED[label], True) for label in GRAPHS}
    rows = []
    for name, context, batch in RACES:
        try:
            rows += versions_in_turn(name, batch, context, versions, 3, fewest=2)
            continue
        except Exception as error:  # one model that fails must not cost the others
            reason = in_short(error)
        rows += [
            {"size": name, "context": context, "version": label, "batch": batch}
            | timing_of([])
            | {"peak, GiB": None, "SDPA backend": None, "remark": reason}
            | NO_PROFILE
            for label in (*GRAPHS, *GRAPHS.values())
        ]
        clean_up()
    return rows


more = lab.measure("Compiled steps of other models, and as CUDA graphs", races)

# %%


# Measuring
def heads_of_80():
    """Both passes of attention in the shape of 2.7B, with heads of other sizes beside its 80."""
    heads, rows = SIZES["2.7B"].heads, []
    backend = BACKENDS[best_backend("2.7B", BATCH, CONTEXT)]
    for head_dim in (64, 80, 128):
        inputs = [drawn(BATCH, heads, CONTEXT, head_dim) for _ in range(4)]
        times = medians_in_turn(
            {
                name: grid_runs(attend, *inputs)["both, ms"]
                for name, attend in {"SDPA": fused(backend), "the book's": ours}.items()
            }
        )
        rows.append(
            {"head size": head_dim}
            | {f"{name}, ms": round(took, 4) for name, took in times.items()}
        )
    del inputs
    freed()
    return rows


of_heads = lab.measure("Attention of 2.7B by the size of its heads", heads_of_80)

# %%


# Drawing
def model_name(size, context):
    """What the page calls a model: the context is 1,024 unless its name says another."""
    return size if context == CONTEXT else f"{size} at {context:,}"


def raced():
    """The rows of each model by version, the short context first and then by size."""
    found = defaultdict(dict)
    for row in (*more.rows, *steps.rows):
        if row["version"] in (*GRAPHS, *GRAPHS.values()):
            name = model_name(row["size"], row["context"])
            found[name][row["version"]] = row
    names = [*SIZES, model_name("large", LONG)]
    return {name: found[name] for name in names if name in found}


def ratio(rows, theirs, own):
    """How many times as fast the second of two versions is."""
    times = rows[theirs]["step p50, ms"], rows[own]["step p50, ms"]
    return nan if None in times else times[0] / times[1]


race, without, graphs = raced(), list(GRAPHS), list(GRAPHS.values())
race = {model: rows for model, rows in race.items() if {*without, *graphs} <= {*rows}}


def races_in_words(_):
    return "Milliseconds of a compiled step, launched by the host and as a graph. " + "; ".join(
        f"{model}: "
        + ", ".join(
            f"{label} {shown(rows[launched]['step p50, ms'])} and "
            f"{shown(rows[GRAPHS[launched]]['step p50, ms'])}"
            for label, launched in zip(("SDPA", "ours"), without, strict=True)
        )
        for model, rows in race.items()
    )


def race_dots(axes, _):
    axes.figure.set_size_inches(5.4, 4.2)
    axes.grid(visible=False)
    inks, ends = (lab.colour("copy"), lab.colour("Kernel Book")), [100]
    for place, rows in enumerate(race.values()):
        unit = (rows[graphs[0]]["step p50, ms"] or nan) / 100  # the graph with SDPA is 100
        for shift, launched, ink in zip((-0.2, 0.2), without, inks, strict=True):
            times = [rows[name]["step p50, ms"] for name in (launched, GRAPHS[launched])]
            if None not in times and unit == unit:
                two_dots(axes, place + shift, *times, ink, unit)
                ends.append(max(times) / unit)
    axes.set_yticks(range(len(race)), list(race))
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(race) - 0.45, -0.55)
    axes.set_xlim(35, 1.13 * max(ends))
    axes.set(xlabel="100 is the graph with SDPA; the numbers are ms")
    name_dots(axes, inks[0])
    for label, ink in zip(("SDPA", "all ours"), inks, strict=True):
        axes.plot([], [], color=ink, linewidth=3, label=label)


lab.draw(more, "Compiled steps of five models", races_in_words, race_dots)

# %%


# Reading
def apart(model, names=graphs):
    """Whether two versions of a model differ, by the rule."""
    rows = [race[model][name] for name in names]
    return not any(row["step p50, ms"] is None for row in rows) and differs(*rows)


by_model = {model: ratio(rows, *graphs) for model, rows in race.items()}
by_model = {model: value for model, value in by_model.items() if value == value}
ahead = [name for name, value in by_model.items() if value > 1 and apart(name)]
behind = [name for name, value in by_model.items() if value < 1 and apart(name)]
level = [name for name in by_model if not apart(name)]
failed = [
    f"{row['version']} of {model}: {row['remark']}"
    for model, rows in race.items()
    for row in rows.values()
    if row["remark"]
]
waiting = [
    model
    for model, rows in race.items()
    if ratio(rows, *without) < 0.9 and apart(model, without)
]
no_gain = [
    model
    for model in by_model
    if not any(
        apart(model, (name, GRAPHS[name]))
        and ratio(race[model], name, GRAPHS[name]) > 1
        for name in without
    )
    and all(
        race[model][name]["host p50, ms"] < race[model][name]["busy, ms"]
        for name in without
    )
]

# %%


# Reading
def longer(model, column):
    """By how many milliseconds the book's graph takes longer than that with SDPA."""
    theirs, own = (race.get(model, {}).get(name, {}).get(column) for name in graphs)
    return nan if None in (theirs, own) else own - theirs


# %%


# Drawing
def scatter_of(model, kind):
    """By how many milliseconds the profiles of each of the two graphs differ, if it is recorded."""
    found = [
        race.get(model, {}).get(name, {}).get(RANGE.format(kind)) for name in graphs
    ]
    return nan if None in found else sum(found)


def clear(model, kind):
    """Whether a bar is longer than the scatter of the profiles, or else than that of the linear
    layers."""
    noise = scatter_of(model, kind)
    noise = noise if noise == noise else abs(longer(model, "linear layers, ms"))
    return abs(longer(model, f"{kind}, ms")) > noise


APART = {kind: INKS[kind] for kind in ("linear layers", "attention", "between")}


with_profiles = [model for model in race if not math.isnan(longer(model, "busy, ms"))]


def kinds_in_words(_):
    said = (
        f"{model}: "
        + ", ".join(
            f"{KIND_NAMES[kind]} {longer(model, f'{kind}, ms'):+.1f}" for kind in APART
        )
        for model in with_profiles
    )
    return (
        f"Milliseconds that kernels take longer with our operators: {'; '.join(said)}."
    )


def kind_bars(axes, _):
    axes.figure.set_size_inches(5.4, 5.2)
    axes.grid(axis="y", visible=False)
    axes.axvline(0, color=lab.colour("copy"), linewidth=0.9)
    has_scatter = False
    for place, model in enumerate(with_profiles):
        for row, (kind, ink) in enumerate(APART.items()):
            apart_by = longer(model, f"{kind}, ms")
            where_to = place + 0.27 * (row - 1)
            axes.barh(where_to, apart_by, 0.24, color=ink)
            half, end = scatter_of(model, kind) / 2, apart_by
            if half == half and scatter_of(model, "attention") == scatter_of(
                model, "attention"
            ):
                ends = [apart_by - half, apart_by + half]
                axes.plot(ends, [where_to] * 2, color=lab.colour("copy"), linewidth=1.2)
                end = max(ends) if apart_by > 0 else min(ends)
                has_scatter = True
            axes.annotate(
                f"{round(apart_by, 1) + 0.0:+.1f}".replace("-", "−"),
                (end, where_to),
                xytext=(4 if apart_by > 0 else -4, 0),
                textcoords="offset points",
                ha="left" if apart_by > 0 else "right",
                va="center",
                fontsize=10,
            )
    axes.margins(x=0.18)
    axes.set_yticks(range(len(with_profiles)), with_profiles)
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.set(xlabel="ms longer (right) or shorter (left) with our operators")
    handles = [
        axes.barh(0, 0, color=ink, label=KIND_NAMES[kind])
        for kind, ink in APART.items()
    ]
    if has_scatter:
        look = {"color": lab.colour("copy"), "linewidth": 1.2}
        handles += axes.plot([], [], label="scatter of the profiles", **look)
    axes.legend(handles=handles, loc="lower left", frameon=False)


# %%


# Reading
sides = {  # the models in which a kind of kernels is clearly faster or slower
    (kind, sign): [
        model
        for model in race
        if clear(model, kind) and sign * longer(model, f"{kind}, ms") > 0
    ]
    for kind in ("attention", "between")
    for sign in (-1, 1)
}
FEW = {1: "one", 2: "two", 3: "three", 4: "four", 5: "five"}


def tally(kind):
    """In which models a kind of kernels takes less or more time with the book's operators."""
    faster, slower = sides[kind, -1], sides[kind, 1]
    even = [model for model in race if model not in faster + slower]
    return (
        (f"less time in {listed(faster)}" if faster else "less time nowhere")
        + (f", more in {listed(slower)}" if slower else "")
        + (f", and the same within the scatter in {listed(even)}" if even else "")
    )


pads = number(of_heads, "the book's, ms", 80) / number(of_heads, "the book's, ms", 128)
shorter = [100 * (1 - 1 / by_model[model]) for model in ahead]
lead = " to ".join(
    dict.fromkeys(f"{end(shorter):.0f}" for end in (min, max) if shorter)
)
DEEP, WIDE = "xl", "2.7B"  # the two models that the text compares
as_rows = {
    model: {
        "host": race.get(model, {}).get("Kernel Book", {}).get("host p50, ms") or nan,
        "busy": race.get(model, {}).get("Kernel Book", {}).get("busy, ms") or nan,
        "step": race.get(model, {}).get("Kernel Book", {}).get("step p50, ms") or nan,
        "graph": race.get(model, {}).get(graphed, {}).get("step p50, ms") or nan,
    }
    for model in (DEEP, WIDE)
}
deep, wide = as_rows.values()
by_graph_slower = {  # by how many percent
    (whose, model): 100 * (1 / ratio(race[model], name, GRAPHS[name]) - 1)
    for model in by_model
    for whose, name in zip(("SDPA", "our operators"), without, strict=True)
    if ratio(race[model], name, GRAPHS[name]) < 1 and apart(model, (name, GRAPHS[name]))
}
slower_by = []  # of the numbers that the table shows
for model in waiting:
    theirs, own = (round(race[model][name]["step p50, ms"]) for name in without)
    slower_by.append(100 * (own / theirs - 1))
of_sdpa = {model: ratio(rows, without[0], graphs[0]) for model, rows in race.items()}
at_short = [value for model, value in of_sdpa.items() if model in SIZES]
lab.together(
    lab.read(
        (
            "**The larger the model, the less it waits for the host.** "
            if at_short and at_short == sorted(at_short, reverse=True)
            else ""
        )
        + (
            f"In {listed(no_gain)} the GPU sets the pace, so a graph gains nothing. "
            if no_gain
            else ""
        )
        + (f"Not measured: {'; '.join(failed)}." if failed else "")
        + ("" if race else f"{nan}")
    ),
    lab.read(
        (
            "Launched by the host, steps with our operators take "
            + " to ".join(
                dict.fromkeys(f"{end(slower_by):.0f}" for end in (min, max) if slower_by)
            )
            + f" % longer than with SDPA in {listed(waiting)}. "
            if waiting
            else ""
        )
        + (
            f"As graphs they take {lead} % less time in {listed(ahead)}"
            if ahead
            else "As graphs they win nowhere"
        )
        + (f", and lose in {listed(behind)}. " if behind else ". ")
        + (f"In {listed(level)} they are level within the scatter." if level else "")
        + ("" if race else f"{nan}")
    ),
)

# %%

# Folded: How far do these times scatter, and in which kernels do the two graphs differ?
lab.draw(more, "Where the two graphs differ", kinds_in_words, kind_bars)
lab.together(
    lab.table(
        [
            {"model": model}
            | {
                f"{label}, {how}": spread(rows[name], digits=digits)
                for label, launched in zip(("SDPA", "ours"), without, strict=True)
                for how, name, digits in (
                    ("launched", launched, 0),
                    ("graph", GRAPHS[launched], 1),
                )
            }
            for model, rows in race.items()
        ],
        "Milliseconds per compiled step, launched by the host and as a graph: medians, with their "
        "middle 60 %. Two times differ if their medians are at least 1 % apart and these ranges do "
        "not overlap",
    ),
    lab.read(
        "Launching a step can even be faster than a graph. By this rule it is with "
        + listed(
            f"{whose} in {model} ({percent:.0f} %)"
            for (whose, model), percent in by_graph_slower.items()
        )
        + "."
    )
    if by_graph_slower
    else None,
    lab.read(
        "Profiles compare the kernels of the two graphs. Between the matmuls, those with our "
        f"operators take {tally('between')}. In attention they take {tally('attention')}."
    ),
    lab.read(
        f"In 2.7B our attention pads heads of 80 numbers to 128. They take {100 * pads:.0f} % of "
        "the time of heads of 128, although they need only 5/8 of the FLOPs."
    )
    if pads == pads
    else None,
    lab.read(
        measured(
            f"In large, the kernels of the two graphs differ by {by_kernels:.1f} ms and the steps "
            f"by {by_step:.1f}. A step takes "
            f"{step_ms(sdpa_graphed) - busy_ms_of(sdpa_graphed):.1f} ms longer than its kernels "
            f"with SDPA and {step_ms(graphed) - busy_ms_of(graphed):.1f} with our operators. "
            "The graph of the eager step with all our "
            "operators takes "
            + (
                f"{by_compiling:.1f} ms more than that of the compiled one."
                if by_compiling > 0
                and differs(step_row(eager_graphed), step_row(graphed))
                else "as long as that of the compiled one, within the scatter."
            ),
            by_kernels,
            by_step,
            by_compiling,
        )
    ),
    lab.read(
        f"With more and narrower layers than {WIDE}, {DEEP} launches more and shorter kernels. "
        "With our operators it waits for the host, and a graph takes "
        f"{100 * (1 - deep['graph'] / round(deep['step'])):.0f} % off its step."
    )
    if deep["host"] > deep["busy"]
    and wide["host"] < wide["busy"]
    and deep["host"] > wide["host"]
    and deep["busy"] < wide["busy"]
    else None,
    lab.table(
        [
            {
                "model": model,
                "graph": label,
                "step": spread(rows[name]),
                "steps": rows[name]["steps"],
                "kernels": shown(rows[name]["busy, ms"]),
            }
            | {KIND_NAMES[kind]: shown(rows[name][f"{kind}, ms"]) for kind in KINDS}
            for model, rows in race.items()
            for name, label in zip(graphs, ("SDPA", "ours"), strict=True)
        ],
        "Milliseconds of a step as a graph, with their middle 60 %, and of its kernels by kind, as "
        "medians of three profiles",
    ),
)

# %%
# What breaks it
# --------------
#
# **Parameters in bfloat16.** Autocast keeps the parameters in float32, because in bfloat16 any
# update smaller than half the gap to the next number is rounded away, however often it is repeated.

for dtype in (torch.float32, torch.bfloat16):
    weight = torch.ones((), dtype=dtype)
    for _ in range(1000):
        weight -= 1e-3
    print(f"{dtype}: {weight.item():.4f} after 1,000 updates of -0.001")

# %%
# **A graph replayed on other data.** Here we capture a sum of four zeros, then ask the graph to
# sum four ones.


def sums_of_replays():
    captured_batch = torch.zeros(4, device="cuda")
    batch, next_batch = captured_batch, torch.ones(4, device="cuda")
    torch.sum(batch)  # loads the kernel before the capture
    with torch.cuda.graph(graph := torch.cuda.CUDAGraph()):
        total = torch.sum(batch)

    batch = next_batch  # the mistake: only the name changes
    graph.replay()
    renamed = total.item()

    captured_batch.copy_(next_batch)  # right: new numbers where the graph reads
    graph.replay()
    return [{"batch = next_batch": renamed, "copy_(next_batch)": total.item()}]


# %%

# Measuring
replayed = lab.measure("The sum that the graph returns", sums_of_replays)

# %%

# Reading
renamed, copied = (replayed.rows[0] if replayed.rows else {"": nan, " ": nan}).values()
lab.read(
    f"After `batch = next_batch` the graph returns {renamed:.0f}; only after `copy_(next_batch)` "
    f"does it return {copied:.0f}."
)

# %%

# Folded: What this chapter leaves open
lab.together(
    lab.read(
        "**Attention by the formula** takes longer than its bytes need at the speed of a copy. We "
        "did not isolate what takes the rest."
    ),
    lab.read(
        "**Why the host takes longer with our operators** we did not isolate. Before each launch "
        "ours run Python where PyTorch's run C++, which may be a reason. Nor do we know why, eager "
        "or compiled, the launches of a whole step do not add up from those of its layers."
    ),
    lab.read(
        "**In 2.7B** our attention pads its heads, which may be why SDPA is faster there; we have "
        "not removed the padding to find out."
    )
    if pads > 0.9 and "2.7B" in sides["attention", 1]
    else None,
    lab.read(
        "**Graphs.** We did not time `reduce-overhead`, nor what each of our operators is worth in "
        "a graph, nor what fills a replayed step beside its kernels."
        + (" Nor do we know why launching is sometimes faster." if by_graph_slower else "")
    ),
)

# %%
# In short
# --------
#

# Reading
busy_halves = busy_ms_of("SDPA") < 0.5 * busy_ms_of("PyTorch")
lab.together(
    lab.read(
        "**While attention stores its table, a step under autocast mainly moves bytes.**"
        + (
            " Without the table, the kernels of an eager step take less than half the time, and "
            "peak memory is halved."
            if busy_halves and saved_peak > 0.48 * step("peak, GiB", "PyTorch")
            else ""
        )
    ),
    lab.read(
        "**A step also pays for its launches**, which timing a layer on the GPU alone does not "
        "show"
        + (
            ": launched by the host, our operators lose to SDPA. "
            if our_took > sdpa_took
            else ". "
        )
        + "So find out first whether host or GPU sets the pace of your step. Where it is the host, "
        "capture the step as a graph."
    ),
    lab.read(
        (
            f"As graphs, our operators are slightly ahead of SDPA in {FEW[len(ahead)]} of "
            f"{FEW[len(by_model)]} cases"
            if ahead
            else "As graphs, our operators are ahead of SDPA in no case"
        )
        + (f", behind in {FEW[len(behind)]}" if behind else "")
        + (f", level within the scatter in {FEW[len(level)]}." if level else ".")
        + ("" if race else f"{nan}")
    ),
)


# %%
# Exercises
# ---------
#
# **1. Where does attention overtake?** A layer has :math:`12 d^2` weights in its linear layers.
# Count the FLOPs per token, forward and backward, of these layers and of causal attention over
# :math:`T` tokens. Without the table, attention does two matmuls in forward and five in backward.
# At which context do the linear layers and attention do the same work?

# %%

# Solution: where does attention overtake?
#
# Linear layers: two FLOPs per weight and token in each of three matmuls (output, gradient of the
# input, gradient of the weight): 2 * 3 * 12 d^2 = 72 d^2.
# Attention: a query sees T / 2 keys on average, in two matmuls of 2 d FLOPs per key: 2 T d.
# Backward does 5 / 2 of that, 5 T d. Together: 7 T d.
rows = []
for name, size in SIZES.items():
    context = 72 * size.d_model // 7
    linear, scores = 72 * size.d_model**2, 7 * context * size.d_model
    assert abs(linear - scores) / linear < 1e-3
    rows.append({"size": name, "context": context})
lab.table(
    rows,
    "From this context on, attention does most of the work"
    + (
        f"; large at {LONG:,}, which we raced above, lies beyond it"
        if 72 * SIZES["large"].d_model // 7 < LONG
        else ""
    ),
)

# %%
# **2. What fits?** 2.7B has 2.57 billion parameters, a :math:`d` of 2,560, :math:`f = 4 d`, and 32
# layers of 32 heads. Each parameter takes 16 bytes: itself, its gradient and two averages. What is
# the longest context, a power of two, at which it trains in 140 GB with a batch of 4? Count as
# above for float32; for autocast, where a layer keeps
# :math:`22 N d + 4 N f + 6 B H T^2 + 8 d^2 + 4 d f` bytes, the last two terms for its weights in
# bfloat16; and for autocast without the table.

# %%

# Solution: what fits?
size, n = SIZES["2.7B"], BATCH * CONTEXT
d, f = size.d_model, size.d_ff
one, two = (
    kept_on_paper(size._replace(layers=layers), BATCH, CONTEXT, "bfloat16")
    for layers in (1, 2)
)
table = BATCH * size.heads * CONTEXT**2
assert two - one == 22 * n * d + 4 * n * f + 6 * table + 8 * d**2 + 4 * d * f
rows = []
for what, dtype, squares in (
    ("float32", "float32", True),
    ("autocast", "bfloat16", True),
    ("autocast, no table", "bfloat16", False),
):
    fits = 0
    for context in (2**k for k in range(7, 18)):
        kept = kept_on_paper(size, BATCH, context, dtype, squares)
        if 16 * parameters(size, context) + kept < 140e9:
            fits = context
    rows.append({"version": what, "longest context": fits})
assert rows[0]["longest context"] <= rows[2]["longest context"]
lab.table(rows, "The longest context of the size 2.7B")

# %%
# **3. One matrix, two gradients.** A linear layer :math:`y = x W^\top` of :math:`N` tokens does
# :math:`2 N d f` FLOPs in forward. Count those of backward, and check with PyTorch's own counter.

# %%

# Solution: one matrix, two gradients
from torch.utils.flop_counter import FlopCounterMode

x, weight = (
    torch.ones(8, 16, requires_grad=True),
    torch.ones(32, 16, requires_grad=True),
)
with FlopCounterMode(display=False) as forward:
    y = F.linear(x, weight)
with FlopCounterMode(display=False) as backward:
    y.sum().backward()
assert forward.get_total_flops() == 2 * 8 * 16 * 32
assert backward.get_total_flops() == 2 * forward.get_total_flops()
print(forward.get_total_flops(), backward.get_total_flops())

# %%
# References
# ----------
#
# - Vaswani et al. *Attention is all you need.* NeurIPS 2017.
# - Xiong et al. *On layer normalization in the Transformer architecture.* ICML 2020.
# - Micikevicius et al. *Mixed precision training.* ICLR 2018.
# - Chen et al. *Training deep nets with sublinear memory cost.* arXiv:1604.06174, 2016.
# - Hashimoto, Liang. *CS336: Language modeling from scratch*, assignment 2: systems. Stanford
#   University.

# %%

# Closing
lab.finish(
    f"A compiled training step of large takes {our_took:.0f} ms, with SDPA {sdpa_took:.0f}; "
    f"as a CUDA graph {step_ms(graphed):.0f} ms, with SDPA {step_ms(sdpa_graphed):.0f}"
)
