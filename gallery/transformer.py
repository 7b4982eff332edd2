"""
A transformer, measured
=======================

The kernels of this book are pieces of a model, and a kernel that is twice as fast is worth little
if a model hardly waits for it. *Where does the time of a training step go, where does its memory
go, and how much of either do the book's operators save?*

You will learn

- how to time a training step, group the kernels of its profile by what they do, and capture the
  step as a CUDA graph;
- what mixed precision changes in time, memory and dtypes, and which tensors fill the memory;
- what each operator of the book is worth in a layer and in a whole step, beside PyTorch's own and
  its fused attention: eager, compiled and as a graph.

Folds whose titles are questions answer the second assignment of the Stanford course CS336. To
measure, you need a GPU with 141 GB of memory; on a smaller one this page shows recorded numbers.
"""

# sphinx_gallery_thumbnail_number = 6
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
from itertools import combinations, pairwise
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
# We follow one training step of one model. Where does its time go, and where its memory? The
# answers point at attention, layer norm and dropout, so we put the book's operators in their place,
# one after the other.
#
# The bars at the top time one layer on the GPU alone. In a whole step the :term:`host` also has to
# launch every kernel. Does the order of the bars survive that?
#
# The model is a decoder: it reads tokens and predicts, at each position, the token that follows.
# Each token becomes a vector of ``d_model`` numbers, called the *residual stream*, and each layer
# adds to it twice: the output of attention, and the output of a feed-forward network.
#
# .. image:: /figures/transformer-block.svg
#    :alt: One layer, from left to right. The residual stream runs straight through. A branch leaves
#          it through layer norm, the linear layer qkv, attention, the linear layer out and dropout,
#          and is added back. A second branch leaves it through layer norm, the linear layer up,
#          GELU, the linear layer down and dropout, and is added back. Attention, layer norm and
#          dropout are marked as operators that are replaced; the linear layers are matmuls.
#
# We begin with attention as its formula says: scores, the causal mask, softmax, a weighted sum of
# the values. ``record_function`` only names a range for the profiler.

lab.source(standard_attention)

# %%
# A layer adds its two branches to the stream ``x``; ``p`` is the share of numbers that dropout sets
# to zero. The model takes attention, dropout and the function inside ``norm_1`` and ``norm_2`` as
# arguments, so replacing an operator means passing another function.

lab.source(decoder.Block.forward)

# %%
# ``attend`` makes q, k and v by one matmul, splits each into its heads, and joins the heads again
# after attention. ``feed_forward`` is ``down(gelu(up(x)))``.
#
# **A layer is four linear layers, whose matmuls we leave to cuBLAS, and between them operators that
# we can replace.** CS336 has five sizes of this model, each trained with a batch of 4 sequences. We
# follow *large*: 36 layers and a ``d_model`` of 1,280.

# Folded: A layer and the model, whole
lab.listing({"A layer": decoder.Block, "The model around the layers": decoder.Decoder})

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

# Folded: How large are the five sizes?
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
    "The five sizes, all with a vocabulary of 10,000 tokens and a d_ff of four times d_model. The "
    "state is what exists before any activation: 16 bytes per parameter, for itself, its gradient "
    "and the two averages of AdamW. A step does two FLOPs per parameter and token in each of the "
    "three matmuls of a linear layer (output, gradient of the input, gradient of the weight), and "
    f"those of causal attention; here at a context of {CONTEXT:,}",
)

# %%
# Where the time goes
# -------------------
#
# A step has three passes: forward computes the loss, backward the gradients, and the optimiser,
# ``training.step()``, updates the parameters. The host only queues kernels and runs ahead, so a
# clock around a pass must wait for the GPU before it is read. ``training`` holds a model, its
# optimiser and a batch.

lab.source(timed_step)

# %%
# We follow the step in float32 and under ``torch.autocast``, which runs the matmuls in bfloat16; we
# call it *bfloat16* below. Unless another is named, the model is *large* at a context of 1,024.

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


def number(table, column, *first):
    """A number of a recorded table, by what stands first in its row; NaN before it is recorded."""
    found = [row for row in table.rows if tuple(row.values())[: len(first)] == first]
    return found[0][column] if found and found[0][column] is not None else nan


def ten_after(warmup, name):
    """Mean and standard deviation of ten steps."""
    times = [row[name] for row in first.rows[warmup:][:10]]
    return (statistics.fmean(times), statistics.stdev(times)) if times else (nan, nan)


# %%

# Folded: How many steps of warm-up does a measurement need?
cold = number(first, "forward", 1)
none, after_one, again = (ten_after(warmup, "forward") for warmup in (0, 1, 5))
lab.read(
    "Only a process that has not trained before can tell, so we start one for the size medium at a "
    f"context of 256. Its first forward pass takes {cold:,.0f} ms, because it loads each kernel "
    "when it is first called, sets up cuBLAS, and asks the driver for all of its memory. The mean "
    f"of ten passes is {none[0]:.1f} ms with that one and {after_one[0]:.1f} without, and after "
    f"five steps of warm-up {again[0]:.1f}. "
    + (
        "The last two differ by less than single steps scatter, so one step of warm-up would do "
        "here."
        if abs(again[0] - after_one[0]) <= max(again[1], after_one[1])
        else "The second step still differs from those after it, so one step of warm-up is not "
        "enough."
    )
    + " We leave out five, to be safe."
)

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
PASS_NAMES = dict(zip(PASSES, ("forward", "backward", "optimiser"), strict=True))
a_layer = {
    size: took[size, "bfloat16", "forward"] / SIZES[size].layers for size in SIZES
}
largest, smallest = list(SIZES)[-1], next(iter(SIZES))
backward_ratio = (
    took[largest, "float32", "backward"] / took[largest, "float32", "forward"]
)
wider = (SIZES[largest].d_model / SIZES[smallest].d_model) ** 2

# %%

# Folded: How long does a step of each size take at a context of 256, and how far do steps scatter?
scatter = {
    (name, dtype): 100
    * number(sizes, "forward, sd", name, dtype)
    / took[name, dtype, "forward"]
    for name in (smallest, largest)
    for dtype in DTYPES
}
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
        | {"peak, GiB": row["peak, GiB"]}
        for row in sizes.rows
    ],
    "Mean and standard deviation of ten steps, after five. Under autocast the forward pass of a "
    f"layer takes {min(a_layer.values()):.1f} to {max(a_layer.values()):.1f} ms, although the "
    f"linear layers of {largest} have {wider:.0f} times the FLOPs of those of {smallest}: at so "
    "short a context the time is hardly that of the kernels. For the forward pass of "
    f"{largest} the spread is {scatter[largest, 'float32']:.1f} % of the mean in float32 and "
    f"{scatter[largest, 'bfloat16']:.1f} % under autocast. A small spread alone does not show that "
    f"the GPU is busy: {smallest} in float32 has {scatter[smallest, 'float32']:.1f} %, at a time "
    f"per layer as short as under autocast. In float32 the backward pass of {largest} takes "
    f"{backward_ratio:.2f} times as long as forward, because each linear layer does two matmuls in "
    "it for one in forward",
)

# %%
# A step launches thousands of kernels, but from only a few operations of PyTorch. For each
# operation the profiler tells how many microseconds its kernels took, ``self_device_time_total``.
# We add these up by what the operations do; ``group`` puts ``aten::mm`` and ``aten::bmm`` into
# “matmul”. The profile lists every kernel again on the device, so we keep only what ran on the CPU.


def by_group(averages):
    """Milliseconds of kernels by the group of the operation that launched them."""
    times = Counter()
    for found in averages:
        if found.device_type == DeviceType.CPU:
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


def profiled(run):
    """Run something under the profiler, and return the profiler."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    return profiler


def group(operation):
    fits = (name for name, pattern in GROUPS.items() if re.match(pattern, operation))
    return next(fits, "other")


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


def groups_in_words(rows):
    found = (
        f"{dtype}: "
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
    names = list(group_times(rows, "bfloat16"))
    for offset, dtype in ((-0.2, "float32"), (0.2, "bfloat16")):
        times = group_times(rows, dtype)
        values = [times.get(name, 0) for name in names]
        ends_at = [min(value, END_OF_BARS) for value in values]
        places = [place + offset for place in range(len(names))]
        colour = lab.colour("Kernel Book" if dtype == "bfloat16" else "copy")
        axes.barh(places, ends_at, height=0.38, color=colour, label=dtype)
        for place, value in zip(places, values, strict=True):
            if value > END_OF_BARS:
                cut(axes, 0.93 * END_OF_BARS, place)
            beside(axes, min(value, END_OF_BARS), place, f"{value:.1f}")
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.16 * END_OF_BARS)
    axes.set(xlabel="ms of a step, large at 1,024; the longest bar is cut")


lab.draw(
    profile_of,
    "Autocast makes the matmuls fast, and adds casts",
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
    f"Autocast shortens the kernels of a step from {all_kernels['float32']:.0f} ms to "
    f"{all_kernels['bfloat16']:.0f}, because the matrix units make the matmuls "
    f"{products['float32'] / products['bfloat16']:.0f} times as fast; for float32 PyTorch uses "
    "these units only if told to. **Now matmuls are only "
    f"{in_step['bfloat16']:.0f} % of the time. Most of the rest moves bytes, and there the "
    "kernels of this book can help.** The bar “other” holds additions and the loss"
    + (
        "."
        if any("scale and mask, ms" in row for row in profile_of.rows)
        else ", and attention's scale and mask."
    )
)

# %%

# Folded: Does the profiler agree with the clock, and which kernels take most?
tops = {profile_number("most time", "float32", part) for part in PASSES[:2]}
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
    "The clock beside the sum of the kernels (in the rest the GPU waits for the host), the number "
    "of kernels, the one that takes the most time and the one called most often"
    + (
        "; cuBLAS chooses another for backward, by the shapes and by what is transposed"
        if len(tops) > 1
        else ""
    ),
)

# %%
# Attention shows what moving bytes costs: the formula takes its table of scores to memory and back
# again and again. We count the bytes for one score. Under autocast softmax runs in float32, 4 bytes
# per number, and the rest of attention in bfloat16, 2 bytes. ``masked_fill`` copies the table
# before it fills it.

# Drawing
TRIPS = [  # what is done, the range of the profile, bytes read and bytes written per score
    ("q kᵀ", "matmuls, scale, cast", 0, 2),
    ("scale", "matmuls, scale, cast", 2, 2),
    ("mask: copy", "mask", 2, 2),
    ("mask: fill", "mask", 2, 2),
    ("cast to float32", "softmax", 2, 4),
    ("softmax", "softmax", 4, 4),
    ("cast to bfloat16", "matmuls, scale, cast", 4, 2),
    ("weights v", "matmuls, scale, cast", 2, 0),
]
bytes_in = Counter()
for _, what, read, written in TRIPS:
    bytes_in[what] += read + written
INK_OF_RANGE = {
    "matmuls, scale, cast": lab.colour("matmul"),
    "mask": lab.colour("torch.compile"),
    "softmax": lab.colour("Kernel Book"),
}


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
    axes.set(xlabel="← bytes read per score   |   bytes written →")
    inks = INK_OF_RANGE.items()
    handles = [axes.barh(0, 0, color=ink, label=what) for what, ink in inks]
    axes.figure.legend(
        handles=handles, loc="outside lower left", ncols=3, frameon=False, fontsize=10
    )


lab.sketch(
    "The trips of a score to memory and back",
    "From the first to the last: "
    + ", ".join(f"{name} reads {r} bytes and writes {w}" for name, _, r, w in TRIPS)
    + ".",
    trips,
    height=4.0,
)

# %%
# The profile has timed these trips. The table adds up the bytes of each colour and sets the FLOPs
# beside them: :math:`4 d` per score in the two matmuls, for a head of :math:`d` numbers, and about
# five in softmax.


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
    "matmuls, scale, cast": (4 * head + 1, ("scores", "values")),
    "softmax": (5, ("softmax",)),
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
        {"range": what}
        | {name: round(value, 1) for name, value in row.items()}
        | {
            "% of a copy": round(
                100 * row["ms at a copy's speed"] / row["ms, measured"]
            )
        }
        for what, row in inside.items()
    ]
    if profile_of.rows and of_memory == of_memory
    else [],
    "Inside attention, forward in bfloat16, large at 1,024. Here softmax includes its cast to "
    "float32, which the figure above counts among the casts",
)

# %%

# Reading
at_speed = [
    100 * row["ms at a copy's speed"] / row["ms, measured"] for row in inside.values()
]
by_flops = 1e3 * (4 * head) * n_scores / of_matmul
products_range = inside["matmuls, scale, cast"]["ms, measured"]
lab.read(
    "**FLOPs do not explain these times; bytes explain "
    f"{min(at_speed):.0f} to {max(at_speed):.0f} % of them**, the share that the rows would take "
    "at the speed of a large copy. At the speed of a large matmul, the first row would take "
    f"{by_flops:.1f} ms and not {products_range:.1f}."
)

# %%
# .. admonition:: Key idea
#    :class: kb-key
#
#    With the formula, a step in bfloat16 spends most of its time moving bytes. To know how fast
#    such an operation can be, count its bytes and not its FLOPs.
#
# Why there are casts
# -------------------

# Reading
lab.read(
    f"One bar has grown under autocast: casts and copies take {casts['bfloat16']:.0f} ms"
    + (
        ", more than all matmuls together"
        if casts["bfloat16"] > products["bfloat16"]
        else ""
    )
    + f". In float32, where nothing is cast, the copies alone take {casts['float32']:.0f} ms, and "
    "in bfloat16 they move half the bytes. So at least "
    f"{casts['bfloat16'] - casts['float32']:.0f} ms are casts. Where do they come from?"
)

# %%
# :term:`Autocast <autocast>` leaves the parameters in float32 and runs each operation in the dtype
# that PyTorch lists for it: linear layers in bfloat16; softmax, layer norm and the loss in float32.
# **So a tensor is cast wherever a matmul follows an operator in float32, and each weight before its
# matmul.**

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

# Folded: Which dtypes does autocast give the tensors of a toy model?
kinds_of_cast = dict(
    zip(("float16", "bfloat16", "bfloat16, our norm"), toy.rows, strict=False)
)
lab.table(
    [
        {"tensor": tensor} | {kind: row[tensor] for kind, row in kinds_of_cast.items()}
        for tensor in (list(toy.rows[0])[1:] if toy.rows else ())
    ],
    "The dtypes of a linear layer, ReLU, layer norm and a second linear layer, by what autocast "
    "casts to. Only what a linear layer writes has 16 bits. The book's layer norm follows the same "
    "rule, unless its argument out_dtype says otherwise",
)

# %%
# .. dropdown:: What in layer norm is sensitive to 16 bits, and is it still in bfloat16?
#
#    In float16 the squares: a number above 256 has a square above 65,504, the largest number of
#    float16, so that the variance is infinite and the output zero. bfloat16 has the exponents of
#    float32, so that this begins only at :math:`10^{19}`. But it has 8 significant bits instead of
#    11, so the mean and the differences from it are known to two or three digits. So layer norm in
#    bfloat16 is safe from overflow and still wants its reductions in float32, which autocast and
#    the book's kernel give it.
#
#    To see it, we compute all of it in one dtype, and then only the input and the output in that
#    dtype and the rest in float32. The input is rounded first, so that the error against float64 is
#    layer norm's own.


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

# Folded: How large are the errors of layer norm in 16 bits?
lab.table(
    rows, "Layer norm of 64 rows of 1,024 numbers, largest error over largest output"
)

# %%
# Where the memory goes
# ---------------------
#
# Which tensors fill the memory? Mostly those that forward keeps for backward. We count them for one
# layer, whose batch is :math:`B` sequences of :math:`T` tokens, :math:`N = B T` in all. The width
# is :math:`d`, that of the feed-forward network :math:`f`, and there are :math:`H` heads. In
# float32 a layer keeps
#
# - the inputs of both layer norms and of the four linear layers ``qkv``, ``out``, ``up`` and
#   ``down``, and the input of GELU: :math:`5 N d + 2 N f` numbers;
# - q, k and v, which the matmuls of attention copy into the layout that they want: :math:`3 N d`;
# - the output of softmax: :math:`B H T^2`;
# - two masks of dropout, one byte per number: :math:`2 N d` bytes.
#
# Together, in bytes per layer, with 4 bytes for each number of the first three:
#
# .. math::
#
#    4\,(8 N d + 2 N f + B H T^2) + 2 N d
#
# .. dropdown:: What does mixed precision change in this count?
#
#    The inputs of the layer norms stay in float32 and most others have 2 bytes. But softmax
#    computes in float32 and keeps its output there, and the next matmul casts it and keeps the copy
#    as well: :math:`6 B H T^2` bytes instead of 4. Each weight is kept as a bfloat16 copy, too.
#    Together a layer keeps :math:`22 N d + 4 N f + 6 B H T^2 + 8 d^2 + 4 d f` bytes.

# %%
# The last term of the bracket is a table of :math:`T^2` weights for each head of each sequence. The
# picture shows the share of each term in the bytes of a layer of *large*, for a batch of 4.

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
    "q, k, v": lab.colour("torch.compile"),
    "tables of weights": lab.colour("PyTorch"),
    "masks": lab.colour("Kernel Book"),
}
KEPT_AT = (256, 1024, 4096)


def kept_in_layer(context):
    """Bytes that a layer of large keeps in float32, by the terms of the count."""
    shape = SIZES["large"]
    tokens, width = BATCH * context, shape.d_model
    found = {
        "inputs": 4 * (5 * tokens * width + 2 * tokens * shape.d_ff),
        "q, k, v": 4 * 3 * tokens * width,
        "tables of weights": 4 * BATCH * shape.heads * context**2,
        "masks": 2 * tokens * width,
    }
    both = [
        kept_on_paper(shape._replace(layers=layers), BATCH, context, "float32")
        for layers in (1, 2)
    ]
    assert sum(found.values()) == both[1] - both[0]
    return found


def kept_bars(axes):
    axes.grid(axis="y", visible=False)
    for place, context in enumerate(KEPT_AT):
        found = kept_in_layer(context)
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
    axes.set_yticks(
        range(len(KEPT_AT)), [f"context {context:,}" for context in KEPT_AT]
    )
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.set_xlim(0, 124)
    axes.set_xticks(range(0, 101, 25))
    axes.set(xlabel="% of what a layer keeps")
    inks = KEPT_INKS.items()
    handles = [axes.barh(0, 0, color=ink, label=term) for term, ink in inks]
    axes.figure.legend(
        handles=handles, loc="outside lower left", ncols=4, frameon=False, fontsize=10
    )


lab.sketch(
    "What a layer of large keeps, float32",
    "; ".join(
        f"At a context of {context:,}: "
        + ", ".join(
            f"{term} {100 * bytes_ / sum(found.values()):.0f} %"
            for term, bytes_ in found.items()
        )
        for context in KEPT_AT
        for found in [kept_in_layer(context)]
    )
    + ".",
    kept_bars,
    height=2.7,
)

# %%
# **The tables of attention grow with the square of the context, and at 1,024 they are already half
# of what a layer keeps.**


# Reading
def shown(value, digits=1):
    return "—" if value is None or value != value else f"{value:.{digits}f}"


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
lab.read(
    f"For the largest size, 2.7B, the count is right to {max(map(abs, off)):.1f} % at contexts "
    f"from {min(CONTEXTS)} to {longest:,}. The table shows the longest."
)

# %%

lab.table(
    [
        {
            "dtype": dtype,
            "kept, on paper": shown(at[dtype, "on paper"]),
            "kept, measured": shown(at[dtype, "kept"]),
            "peak of a step": shown(at[dtype, "step"]),
        }
        for dtype in DTYPES
    ]
    if memory.rows
    else [],
    f"Memory of a step of 2.7B at a context of {longest:,}, in GiB",
)

# %%

# Reading
lab.read(
    (
        "**Autocast saves no memory here"
        if at["bfloat16", "step"] >= at["float32", "step"]
        else "**Numbers of half the size need more than half of the memory"
    )
    + "**: it halves most activations, but keeps the weights of attention in both dtypes and a "
    "copy of every parameter."
)

# %%

# Folded: What is the peak of a forward pass and of a step, by context?
lab.table(
    memory.rows,
    "Memory of the size 2.7B, and what forward keeps, measured and on paper. A forward pass alone "
    f"needs little beyond the parameters and AdamW's averages ({state:.1f} GiB) and, under "
    f"autocast, bfloat16 copies of the weights ({copies:.1f} GiB)",
)

# %%
# What is kept need not stay: with :term:`checkpointing` a layer keeps only its input and computes
# the rest again in backward. The figure follows one step of *large* in float32, with all kept and
# with checkpointing, by what PyTorch's allocator hands out and takes back.


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
    for version, provider in (("all kept", "PyTorch"), ("checkpointed", "Kernel Book")):
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
        axes.text(third + 0.5, 0, name, ha="center", va="bottom", fontsize=10)
    axes.set_xticks([])
    axes.set(xlabel="allocations and releases, in order", ylabel="GiB in use", ylim=0)


lab.draw(
    timeline,
    "The memory of one step of large, float32",
    timeline_in_words,
    timeline_lines,
)

# %%

# Reading
peak = {
    version: max(
        (row["most, GiB"] for row in of_version(timeline.rows, version)), default=nan
    )
    for version in ("all kept", "checkpointed")
}
paper = kept_on_paper(SIZES["large"], BATCH, CONTEXT, "float32") / 2**30
inputs_of_layers = BATCH * CONTEXT * SIZES["large"].d_model * 4 / 2**30
spared = (SIZES["large"].layers - 1) * (
    paper / SIZES["large"].layers - inputs_of_layers
)
its_gradients = 4 * parameters(SIZES["large"]) / 2**30
at_first = 12 * parameters(SIZES["large"]) / 2**30
in_forward = sum(kept_in_layer(CONTEXT).values()) / 2**20
step_took = {
    row["version"]: sum(row[f"{part}, ms"] for part in PASSES)
    for row in checkpoint_ms.rows
}
lab.read(
    f"The parameters and AdamW's two averages alone take {at_first:.1f} GiB. Forward adds "
    f"the {in_forward:.0f} MiB of our count for each of {SIZES['large'].layers} layers, "
    f"{SIZES['large'].layers * in_forward / 1024:.0f} GiB. Backward releases them while the "
    "gradients grow, and the optimiser releases the gradients at the end. **Checkpointing lowers "
    f"the peak from {peak['all kept']:.1f} GiB to {peak['checkpointed']:.1f} and pays with another "
    "forward pass**"
    + (
        f": the step takes {step_took['checkpointed']:.0f} ms instead of "
        f"{step_took['all kept']:.0f}."
        if len(step_took) == 2
        else "."
    )
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

# Folded: Which lines allocate the largest tensors, and why does checkpointing not save more?
size = SIZES["large"]
table_mib = BATCH * size.heads * CONTEXT**2 * 4 / 2**20
hidden_mib = BATCH * CONTEXT * size.d_ff * 4 / 2**20
logits_mib = BATCH * CONTEXT * size.vocabulary * 4 / 2**20
tables = sum(
    row["times"]
    for row in allocations.rows
    if row["pass"] == "forward" and row["MiB"] == table_mib
)
lab.table(
    allocations.rows,
    "The largest allocations of a step; what backward allocates has no line, because autograd runs "
    f"it in C++. On paper a table of scores has {table_mib:.0f} MiB, the logits {logits_mib:.0f}, "
    f"and the hidden tensor of the feed-forward network {hidden_mib:.0f}. Per layer, standard "
    f"attention allocates {tables / size.layers:.0f} tables in forward (the scores, scaled, "
    "masked, and their softmax) and releases all but one before the next layer. By the count, "
    f"checkpointing saves {spared:.1f} GiB. It saves less, because the peak moves to the end of "
    f"backward, where all gradients, {its_gradients:.1f} GiB, exist as well",
)

# %%
# Attention without the table
# ---------------------------
#
# The table of scores fills half of what a layer keeps and costs much of the time, so attention is
# the first operator to replace. :doc:`The book's attention </chapters/attention_forward>` never
# stores the table. We time it by itself first, on the shapes of the course: a batch of 8 with one
# head of 64 numbers, in bfloat16 and causal. What it *holds* is what forward keeps for backward
# besides q, k and v.

ours = partial(attention, is_causal=True)

# %%

# Measuring
# head sizes, and the greatest length at each
GRID = {16: 16384, 32: 16384, 64: 65536, 128: 16384}
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


def medians_in_turn(runs, budget=40):
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
    for head_dim, longest in GRID.items():
        for length in (length for length in LENGTHS if length <= longest):
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


def grid_cell(value):
    return "—" if value == OUT_OF_MEMORY or value != value else milliseconds(value)


with_sdpa = any(row["provider"] in FUSED for row in grid.rows)
lab.table(
    [
        {"length": length}
        | {"formula, ms": grid_cell(in_grid("both, ms", "PyTorch", length))}
        | ({"SDPA, ms": grid_cell(fastest_fused(length))} if with_sdpa else {})
        | {
            "the book's, ms": grid_cell(in_grid("both, ms", "Kernel Book", length)),
            "formula holds, MiB": grid_cell(in_grid("held, MiB", "PyTorch", length)),
            "the book's holds, MiB": grid_cell(
                in_grid("held, MiB", "Kernel Book", length)
            ),
        }
        for length in LENGTHS
    ]
    if grid.rows
    else [],
    "Forward and backward of attention, head size 64"
    + ("; SDPA by the faster of flash and cuDNN" if with_sdpa else "")
    + "; — is out of memory",
)

# %%

# Reading
out_of = in_grid("both, ms", "PyTorch", 65536) == OUT_OF_MEMORY


def listed(names):
    """Names in a sentence."""
    names = list(names)
    return " and ".join([", ".join(names[:-1]), names[-1]] if names[1:] else names)


fast = in_grid("both, ms", "PyTorch", 16384), in_grid("both, ms", "Kernel Book", 16384)
times = nan if isinstance(fast[0], str) else fast[0] / fast[1]
by_sdpa = fastest_fused(16384)
lab.read(
    "**Without the table, memory grows with the length instead of its square**: the book's "
    "attention keeps only the output and one logarithm per row, and computes the weights again in "
    "backward. "
    + (
        f"At 16,384 it is {times:.0f} times as fast as the formula"
        if times == times or not grid.rows
        else ""
    )
    + (
        f"; at 65,536 a table has {8 * 65536**2 * 2 / 2**30:.0f} GiB, and the formula runs out of "
        "memory. "
        if out_of
        else ". "
    )
    + (
        "SDPA, PyTorch's own fused attention, does not store the table either"
        + (
            f", and at 16,384 the book's takes {100 * fast[1] / by_sdpa:.0f} % of its time."
            if by_sdpa == by_sdpa
            else "; in the model it is our opponent."
        )
    )
)

# %%

# Folded: How is it for head sizes of 16 to 128, forward and backward apart, and compiled?
grid

# %%
# The book's operators in the model
# ---------------------------------
#
# The model takes its operators as arguments:
#
# .. code-block:: python
#
#    Decoder(size, context, Operators(ours, layer_norm_16, dropout))
#
# ``out_dtype`` makes our layer norm write bfloat16. Under autocast PyTorch's writes float32, and
# another kernel rounds it for the matmul that follows; ours computes in float32 as well, and rounds
# once, as it writes.

sdpa = partial(F.scaled_dot_product_attention, is_causal=True)
layer_norm_16 = partial(layer_norm, out_dtype=torch.bfloat16)

# %%

# Folded: What does a layer norm that writes 16 bits save?
norms, per_norm = (
    2 * SIZES["large"].layers + 1,
    BATCH * CONTEXT * SIZES["large"].d_model,
)
lab.read(
    "Per number it spares 8 of 14 bytes in forward, and 8 in backward, whose gradient comes in "
    f"bfloat16. For the {norms} layer norms of a step this is {16 * norms * per_norm / 1e9:.1f} "
    f"GB, or {1e3 * 16 * norms * per_norm / of_memory:.1f} ms at the speed of memory."
)

# %%
# We put them in one after the other, and give each version a name. The opponent is *SDPA*.

# Measuring
EAGER = {
    "PyTorch": decoder.PYTORCH,
    "+ softmax": Operators(partial(standard_attention, softmax=softmax)),
    "+ attention": Operators(ours),
    "+ layer norm": Operators(ours, layer_norm_16),
    "+ dropout": Operators(ours, layer_norm_16, dropout),
    "SDPA": Operators(sdpa),
}
COMPILED = {
    "torch.compile": decoder.PYTORCH,
    "SDPA, compiled": Operators(sdpa),
    "attention, compiled": Operators(ours),
    "Kernel Book": Operators(ours, layer_norm_16, dropout),
}
NAMES = {  # what the page calls the versions, in the order of its figures and tables
    "PyTorch": "formula",
    "SDPA": "SDPA",
    "+ softmax": "+ softmax",
    "+ attention": "+ attention",
    "+ layer norm": "+ layer norm",
    "+ dropout": "the book's",
}
COMPILED_NAMES = {
    "torch.compile": "formula",
    "SDPA, compiled": "SDPA",
    "attention, compiled": "+ attention",
    "Kernel Book": "the book's",
}


def says(version, attends):
    """A row of the table of versions."""
    _, norm, drop = EAGER[version]
    return {"version": NAMES[version], "attention": attends} | {
        name: "PyTorch's" if own is theirs else "the book's"
        for name, own, theirs in (
            ("layer norm", norm, F.layer_norm),
            ("dropout", drop, F.dropout),
        )
    }


lab.table(
    [
        says("PyTorch", "the formula"),
        says("SDPA", "PyTorch's, fused"),
        says("+ softmax", "the formula, the book's softmax"),
        says("+ attention", "the book's"),
        says("+ layer norm", "the book's"),
        says("+ dropout", "the book's"),
    ],
    "The versions, and what each computes with",
)

# %%
# We run them eager and compiled. ``torch.compile`` fuses layer norm, dropout, GELU and additions
# into a few kernels of its own, but cannot look into an operator of ours. So of the book's we
# compile *+ attention*, which leaves it the rest, and all three together.
#
# Is it the same model?
# ---------------------
#
# Before we time them: do the versions compute the same gradients, and do they learn the same?
#
# **Gradients.** We compute those of every parameter of a small model three times: with the book's
# operators and with PyTorch's in float32, and in float64 as the truth. Dropout draws the same masks
# in all three. The book's error may be at most eight times PyTorch's.


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

lab.check("Every parameter of a small model", gradient_cases())

# %%
# **Learning.** Under autocast the versions round differently, so we compare the losses that they
# reach. A tiny model trains for 200 steps on the package's own source, one byte per token, from ten
# seeds. Other masks of dropout alone lead to another loss; to know how far off, we train PyTorch's
# model twice from each seed, with two sets of masks.
#
# A dot is one seed; the line below the dots is their mean with its 95 % interval.

# Measuring
LEARNER, WINDOW, TRAINED, EVERY = Size(256, 1024, 4, 4, 256), 256, 200, 10
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


lab.draw(learned, "How far the losses end apart", losses_in_words, loss_dots)

# %%

# Reading
by_ours = next(iter(gaps(learned.rows).values()))
offset, error = mean_and_error(by_ours)
odd = int(numpy.argmax(abs(by_ours)))
from_loss, to_loss = (
    statistics.fmean(row[f"Kernel Book, seed {seed}"] for seed in SEEDS)
    if learned.rows
    else nan
    for row in (learned.rows or [{}])[:: max(1, len(learned.rows) - 1)]
)
lab.read(
    f"**It trains**: with the book's operators the loss falls from {from_loss:.1f} to "
    f"{to_loss:.1f} and ends {abs(offset):.3f} ± {BY_CHANCE * error:.3f} "
    f"{'above' if offset > 0 else 'below'} the mean of PyTorch's two runs"
    + (
        f"; one seed alone lies {by_ours[odd]:+.2f} off. "
        if len(learned.rows) and abs(by_ours[odd]) > 2 * sorted(abs(by_ours))[-2]
        else ". "
    )
    + (
        "Ten seeds find no difference between the versions."
        if abs(offset) < BY_CHANCE * error
        else "These losses leave a doubt that it is the same model, because chance alone does this "
        "less than once in 20 times."
    )
)

# %%
# What they are worth in a layer
# ------------------------------
#
# Which operator is worth most, as long as only kernels count? We time forward and backward of one
# layer in bfloat16, on the GPU alone. 100 % is the speed of a large matmul by cuBLAS, for the FLOPs
# of the linear layers and of causal attention. Versions with operators of the book are blue.

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
RUNGS = {"eager": NAMES, "compiled": COMPILED_NAMES}
OF_OTHERS = ("PyTorch", "SDPA", "torch.compile", "SDPA, compiled")


def bar_label(row):
    return f"{100 * row['share']:.0f} %, {row['ms']:.2f} ms"


def layer_in_words(rows):
    found = {row["provider"]: bar_label(row) for row in rows}
    return "Bars, % of the speed of a large matmul. " + " ".join(
        f"{mode.capitalize()}: "
        + ", ".join(
            f"{label} {found[name]}" for name, label in rungs.items() if name in found
        )
        + "."
        for mode, rungs in RUNGS.items()
    )


def layer_bars(axes, rows):
    axes.figure.set_size_inches(5.4, 4.3)
    axes.grid(axis="x", visible=True)
    axes.grid(axis="y", visible=False)
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
    "One layer of large at 1,024, forward and backward",
    layer_in_words,
    layer_bars,
)

# %%


# Reading
def layer_ms(name):
    return layer.milliseconds_at(name)


saved = layer_ms("PyTorch") - layer_ms("+ dropout")
by_softmax = layer_ms("PyTorch") - layer_ms("+ softmax")
by_attention = layer_ms("+ softmax") - layer_ms("+ attention")
fusing = layer_ms("attention, compiled") / layer_ms("Kernel Book")
lab.read(
    (
        f"**A faster softmax alone saves only {by_softmax:.2f} ms, because the table of scores "
        "still goes to memory and back.** "
        if by_softmax < 0.25 * saved
        else f"A faster softmax alone saves {by_softmax:.2f} ms. "
    )
    + f"Attention without the table saves {by_attention:.2f} more, and layer norm and dropout "
    f"together {layer_ms('+ attention') - layer_ms('+ dropout'):.2f}. "
    + "Compiled, the book's layer norm and dropout "
    + (
        "change less than 1 %"
        if abs(fusing - 1) < 0.01
        else f"{'save' if fusing > 1 else 'cost'} only {100 * abs(1 - 1 / fusing):.0f} %"
        if abs(fusing - 1) < 0.05
        else f"make it {layer_ms('Kernel Book'):.2f} ms"
    )
    + (
        ", because there the compiler fuses PyTorch's."
        if abs(fusing - 1) < 0.05
        else "."
    )
)

# %%
# What they are worth in a step
# -----------------------------
#
# We train the whole of *large* with each version, and set its step beside its layer.

# Measuring
from contextlib import suppress

from torch._dynamo.utils import counters

ROUNDS, GRAPH_ROUNDS, TURN = 4, 12, 2  # at its limit of power a GPU's clock wanders
PROFILES = 3
GRAPHS = {
    "SDPA, compiled": "SDPA, CUDA graph",
    "Kernel Book": "Kernel Book, CUDA graph",
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
    launched the step before them, when nothing was queued; and those in which it launched each."""
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


longest_kernels = []  # of the versions that race, as their profiles come


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


def profile_of_replays(replay, kinds, steps=4):
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


def profiles_in_turn(steps, kinds, which):
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
        for (kind, kernel), took in profiles[-1][0].most_common(12):
            row = {
                "version": title,
                "kind": kind,
                "kernel": kernel,
                "ms": round(took, 2),
            }
            longest_kernels.append(which | row)
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


def graphs_in_turn(trainings, kinds, which):
    """The times, peaks and profiles of steps as CUDA graphs, and why there is none."""
    steps, peaks, times, profiles, remarks = {}, {}, {}, {}, {}
    for label, title in GRAPHS.items():
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
        times = times_in_turn(steps, GRAPH_ROUNDS)
        kinds_of = {title: kinds[label] for label, title in GRAPHS.items()}
        profiles = profiles_in_turn(steps, kinds_of, which)
    except Exception as error:
        remarks |= dict.fromkeys(steps, in_short(error))
    return times, peaks, profiles, remarks


def in_short(error):
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}"[:120]


def times_in_turn(steps, rounds=ROUNDS):
    """What some rounds of turns took, by the name of the version: see one_turn."""
    times, draw = {label: ([], [], []) for label in steps}, numpy.random.default_rng(0)
    for _ in range(rounds):
        for label in draw.permutation(list(steps)):
            for all_found, found in zip(
                times[label], one_turn(steps[label]), strict=True
            ):
                all_found += found
    return times


SAME_STEPS = "host in these steps, ms"


def timing_of(times):
    """The median and the middle 60 % of the times of steps, and the medians of the host's."""
    if not times:
        return dict.fromkeys(("step, ms", "p20, ms", "p80, ms", "host, ms", SAME_STEPS))
    took, first, same = times
    low, middle, high = numpy.quantile(took, (0.2, 0.5, 0.8)).round(2).tolist()
    host, in_these = (round(statistics.median(found), 2) for found in (first, same))
    found = {"step, ms": middle, "p20, ms": low, "p80, ms": high}
    return found | {"host, ms": host, SAME_STEPS: in_these}


def versions_in_turn(name, batch, context, versions):
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
        times = times_in_turn({label: each.whole for label, each in trainings.items()})
        for label, each in trainings.items():
            kinds[label], profiles[label] = profile_of_step(each)
        which = {"size": name, "context": context}
        graph_times, graph_peaks, graph_profiles, remarks = graphs_in_turn(
            trainings, kinds, which
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
        for label in (*versions, *GRAPHS.values())
    ]
    del training, trainings, each
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
    return versions_in_turn("large", BATCH, CONTEXT, versions)


# %%

steps = lab.measure("A step of large at 1,024, twelve versions", step_ladder)

# %%


# Measuring
def timed(rows):
    return [row for row in rows if row["step, ms"] is not None]


def step(column, version):
    found = [row.get(column) for row in timed(steps.rows) if row["version"] == version]
    return found[0] if found and found[0] is not None else nan


def host_of(row):
    """The milliseconds that the host needs to launch a step, by the lesser of two bounds.

    The first step after a pause may find the host slower; in the steps that are timed it may have
    to wait, if it is a thousand launches ahead.
    """
    found = (row.get(column) for column in ("host, ms", SAME_STEPS))
    return min((took for took in found if took is not None), default=nan)


def host_ms(version):
    found = [host_of(row) for row in timed(steps.rows) if row["version"] == version]
    return found[0] if found else nan


def change(column, before, after):
    return step(column, after) - step(column, before)


def differs(theirs, own):
    """Whether two rows of times differ by 1 %, and the middle 60 % of their times all."""
    if abs(theirs["step, ms"] / own["step, ms"] - 1) < 0.01:
        return False
    return own["p80, ms"] < theirs["p20, ms"] or theirs["p80, ms"] < own["p20, ms"]


def step_row(version):
    found = [row for row in timed(steps.rows) if row["version"] == version]
    return found[0] if found else dict.fromkeys(("step, ms", "p20, ms", "p80, ms"), nan)


def spread(row):
    """The median of a version's times, with the middle 60 % of them."""
    if row["step, ms"] is None:
        return "—"
    return f"{row['step, ms']:.1f} ({row['p20, ms']:.1f}–{row['p80, ms']:.1f})"


compiled_of = {name: version for version, name in COMPILED_NAMES.items()}
lab.table(
    [
        {
            "version": name,
            "a layer, eager": shown(layer_ms(version), 2),
            "a step, eager": spread(step_row(version)),
            "a layer, compiled": shown(layer_ms(compiled_of[name]), 2)
            if name in compiled_of
            else "—",
            "a step, compiled": spread(step_row(compiled_of[name]))
            if name in compiled_of
            else "—",
        }
        for version, name in NAMES.items()
    ]
    if steps.rows
    else [],
    "Milliseconds of a layer, forward and backward on the GPU alone, and of a whole step of large "
    "at 1,024, p50 (p20–p80). SDPA runs with its faster backend, "
    f"{listed(sorted({row['SDPA backend'] for row in steps.rows}))}. We tell two steps apart if "
    "they differ by at least 1 % and the middle 60 % of their times, p20 to p80, do not overlap",
)

# %%

# Reading
shorten = layer_ms("+ dropout") < layer_ms("+ attention")
lengthen = (
    differs(step_row("+ attention"), step_row("+ dropout"))
    and change("step, ms", "+ attention", "+ dropout") > 0
)
last_in_step = (
    min(COMPILED_NAMES, key=layer_ms) == "Kernel Book"
    and max(COMPILED_NAMES, key=partial(step, "step, ms")) == "Kernel Book"
)
our_eager = ("+ attention", "+ layer norm", "+ dropout")
alike = [  # pairs of our versions
    f"{NAMES[one]} from {NAMES[other]}"
    for one, other in combinations(our_eager, 2)
    if not differs(step_row(one), step_row(other))
]
lab.read(
    (
        "**Our layer norm and dropout make a layer faster, and a step slower.** "
        if shorten and lengthen
        else ""
    )
    + (
        "**The order of the bars does not survive: compiled, the book's layer is the fastest and "
        f"its step the slowest by the median**, {step('step, ms', 'Kernel Book'):.0f} ms against "
        f"{step('step, ms', 'SDPA, compiled'):.0f} with SDPA and "
        f"{step('step, ms', 'torch.compile'):.0f} with the formula"
        + (
            ""
            if differs(step_row("torch.compile"), step_row("Kernel Book"))
            else ", whose p20–p80 overlaps with ours"
        )
        + ". "
        if last_in_step
        else ""
    )
    + (
        f"Eager, where p20–p80 overlaps, we do not tell {', nor '.join(alike)}."
        if alike
        else ""
    )
)

# %%
# A step keeps two machines busy: the GPU runs the kernels, and the host launches every one of them.
# An operator of ours runs Python where PyTorch's runs C++, so its launch takes longer. The picture
# follows five launches of a layer; its lengths are schematic.
#
# .. image:: /figures/transformer-launches.svg
#    :alt: Timelines of the host and the GPU for layer norm, qkv, attention, out and dropout. With
#          SDPA the launches are shorter: the GPU waits a little before layer norm and hardly before
#          qkv. With the book's operators the launches of layer norm, attention and dropout are
#          long, that of layer norm the longest, and the GPU waits before four of the five kernels,
#          although their kernels are shorter. As a CUDA graph, one call of the host launches all
#          five kernels, and there are no gaps.
#
# .. admonition:: Key idea
#    :class: kb-key
#
#    The slower of two sets the pace of a step: the GPU, which runs the kernels, or the host, which
#    launches them.
#
# In the figure, the narrow bar is how long the host takes to launch a step. The wide bar is the
# step: in colours its kernels by kind, and dotted the time in which the GPU waits. *Element-wise*
# stands for layer norm, dropout, GELU, additions and casts.

# Drawing
FOLLOWED = {  # the versions that are drawn, and what the figure calls them
    "eager": {
        name: NAMES[name] for name in NAMES if name not in ("PyTorch", "+ softmax")
    },
    "compiled": {
        name: COMPILED_NAMES[name] for name in COMPILED_NAMES if name != "torch.compile"
    },
}
KIND_NAMES = {kind: kind for kind in KINDS} | {"between": "element-wise"}
INKS = {
    "linear layers": lab.colour("matmul"),
    "attention": lab.colour("Kernel Book"),
    "between": lab.colour("PyTorch"),
    "AdamW": lab.colour("torch.compile"),
}


def steps_in_words(rows):
    rows = {row["version"]: row for row in timed(rows)}
    return "Milliseconds of a step. " + " ".join(
        f"{mode.capitalize()}: "
        + "; ".join(
            f"{label} {rows[name]['step, ms']:.1f}, its kernels {rows[name]['busy, ms']:.1f}, "
            f"launched in {host_of(rows[name]):.1f}"
            for name, label in versions.items()
            if name in rows
        )
        + "."
        for mode, versions in FOLLOWED.items()
    )


def step_bars(axes, rows):
    axes.figure.set_size_inches(5.4, 6)
    axes.grid(axis="x", visible=True)
    axes.grid(axis="y", visible=False)
    rows = {row["version"]: row for row in timed(rows)}
    grey = lab.colour("copy")
    rest = {"facecolor": "none", "edgecolor": grey, "linestyle": ":"}
    place, ticks, longest = 0, {}, 0
    for mode, versions in FOLLOWED.items():
        axes.text(1, place, mode, va="center", fontsize=11, fontweight="bold")
        for name, label in versions.items():
            if name not in rows:
                continue
            place += 1
            ticks[place] = label
            row = rows[name]
            host, took, reached = host_of(row), row["step, ms"], 0
            axes.barh(place - 0.34, host, 0.16, color=grey, alpha=0.45)
            beside(axes, host, place - 0.36, f"host {host:.0f}")
            for kind, ink in INKS.items():
                axes.barh(place, row[f"{kind}, ms"], 0.44, left=reached, color=ink)
                reached += row[f"{kind}, ms"]
            axes.barh(place, max(0, took - reached), 0.44, left=reached, **rest)
            label = f"step {took:.0f}, kernels {row['busy, ms']:.0f}"
            beside(axes, max(took, reached), place + 0.04, label)
            longest = max(longest, host, took)
        place += 1.2
    axes.set_yticks(list(ticks), list(ticks.values()))
    axes.set_ylim(place - 0.6, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.set_xlim(0, 1.36 * longest)
    axes.set(xlabel="ms of a training step")
    axes.barh(1, 0, color=grey, alpha=0.45, label="host launches")
    for kind, ink in INKS.items():
        axes.barh(1, 0, color=ink, label=KIND_NAMES[kind])
    axes.barh(1, 0, label="GPU waits", **rest)


lab.draw(steps, "A step of large at 1,024, by host and GPU", steps_in_words, step_bars)

# %%


# Measuring
def of_host(chapter):
    """Microseconds of the host for both passes of a chapter's operator: ours and PyTorch's."""
    rows = of_record(chapter, "What a call costs the host")
    both = {row["pass"]: row for row in rows}.get("forward and backward", {})
    return [both.get(f"{name} (µs)", nan) for name in ("Kernel Book", "PyTorch")]


n_layers = SIZES["large"].layers
calls_of = {  # operator: the chapter that timed it, its calls in a step
    "attention": ("attention_backward", n_layers),
    "layer norm": ("layer_norm", norms),
    "dropout": ("dropout", 2 * n_layers),
}
host_rows = [
    {
        "operator": name,
        "calls in a step": calls,
        "the book's, µs": round(own),
        "PyTorch's, µs": round(theirs),
        "longer in a step, ms": round(calls * (own - theirs) / 1e3, 1),
    }
    for name, (chapter, calls) in calls_of.items()
    for own, theirs in [of_host(chapter)]
    if own == own and theirs == theirs
]

# %%

# Reading
our_took, sdpa_took = (
    step("step, ms", name) for name in ("Kernel Book", "SDPA, compiled")
)
our_host, sdpa_host = (host_ms(name) for name in ("+ dropout", "SDPA"))
pace = {  # how far a step is from the slower of host and GPU
    name: step("step, ms", name) / max(host_ms(name), step("busy, ms", name)) - 1
    for versions in FOLLOWED.values()
    for name in versions
}
paced = max(map(abs, pace.values()))
waits = {name: host_ms(name) / step("busy, ms", name) for name in pace}
by_host = [name for name in pace if waits[name] > 1.1]
ours_alone = all(
    (waits[name] > 1.1) == (name not in ("SDPA", "SDPA, compiled")) for name in waits
)
lab.read(
    (
        "**It is the host wherever operators of the book are in the step.** "
        if by_host and ours_alone and paced < 0.25
        else "**Where the host needs longer than the kernels, the step follows the host.** "
        if by_host and paced < 0.25
        else ""
    )
    + f"Eager, it launches a step in {sdpa_host:.0f} ms with SDPA, and in "
    f"{min(map(host_ms, our_eager)):.0f} to {max(map(host_ms, our_eager)):.0f} with our three "
    "versions. "
    + (
        "Compiling hardly helps, because compiled code still calls our operators one by one. "
        if abs(host_ms("Kernel Book") / our_host - 1) < 0.15
        else ""
    )
    + (
        "A bar of the host may be longer than its step (here by up to "
        f"{100 / (1 + min(pace.values())) - 100:.0f} %), because it is of the first step after a "
        "pause, and the step is the median of those that follow. "
        if min(pace.values()) < -0.05
        else ""
    )
)

# %%

# Folded: What does one call cost the host?
lab.table(
    host_rows,
    "Microseconds in which one call of an operator, forward and backward, keeps the host busy, as "
    "the chapters on the operators measured it",
)

# %%

# Folded: What are the numbers of all versions, and which kinds of kernels get shorter?
lab.table(
    [
        {
            "version": row["version"],
            "step, ms": shown(row["step, ms"]),
            "p20 to p80": f"{row['p20, ms']:.1f} to {row['p80, ms']:.1f}",
            "host": shown(host_of(row)),
            "peak, GiB": shown(row["peak, GiB"]),
        }
        | {KIND_NAMES[kind]: shown(row[f"{kind}, ms"]) for kind in KINDS}
        | {"kernels": shown(row["busy, ms"])}
        for row in timed(steps.rows)
    ],
    f"Milliseconds of a step of large at 1,024 (the median of {ROUNDS * TURN} steps, or of "
    f"{GRAPH_ROUNDS * TURN} of a graph, and the middle 60 % of them), of the host to launch one, "
    "and of the kernels by kind in other steps, under the profiler; and the peak of memory. The "
    "record calls the book's compiled operators Kernel Book; element-wise includes the formula's "
    "scale and mask",
)

# %%
# One launch for a whole step
# ---------------------------
#
# How fast are the same kernels if no launch delays them? A :term:`CUDA graph` records the launches
# of a step once; from then on one call of the host replays them all. Our step is
# ``training.whole()``: forward, backward and optimiser.
#
# .. code-block:: python
#
#    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
#    training = Training(model, optimizer, torch.bfloat16).draw(4, 1024)
#    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
#
#    stream.wait_stream(torch.cuda.current_stream())
#    with torch.cuda.stream(stream):  # not in the graph: what is set up once
#        training.whole()
#    torch.cuda.current_stream().wait_stream(stream)
#
#    for group in optimizer.param_groups:
#        group["capturable"] = True   # fused AdamW counts its steps on the GPU
#    with torch.cuda.graph(graph, stream=stream):
#        training.whole()             # recorded, and not run
#    graph.replay()                   # one step, with new masks of dropout
#
# The masks are new, because the graph reads the state of PyTorch's generator from memory of the
# GPU, where each replay first writes the next one.

# Folded: The function that captures, whole
lab.source(decoder.captured)

# %%

# Measuring
MODES = {
    "eager": {name: NAMES[name] for name in ("PyTorch", "SDPA", "+ dropout")},
    "compiled": {
        name: COMPILED_NAMES[name]
        for name in ("torch.compile", "SDPA, compiled", "Kernel Book")
    },
    "CUDA graph": {"SDPA, CUDA graph": "SDPA", "Kernel Book, CUDA graph": "the book's"},
}
lab.table(
    [
        {
            "mode": mode,
            "version": label,
            "step, ms": shown(step("step, ms", name)),
            "kernels, ms": shown(step("busy, ms", name)),
            "host, ms": shown(host_ms(name)),
            "peak, GiB": shown(step("peak, GiB", name)),
        }
        for mode, versions in MODES.items()
        for name, label in versions.items()
    ]
    if steps.rows
    else [],
    "A step of large at 1,024; the graphs are of compiled steps. The kernels are timed in "
    "other steps, under the profiler; the formula's host time is an upper bound, because a host "
    "that is a thousand launches ahead waits for the GPU",
)

# %%

# Reading
graphed, sdpa_graphed = "Kernel Book, CUDA graph", "SDPA, CUDA graph"
shorter = {  # by how much a change shortens the kernels
    "operators": -change("busy, ms", "PyTorch", "+ dropout"),
    "SDPA": -change("busy, ms", "PyTorch", "SDPA"),
    "compiling the formula": -change("busy, ms", "PyTorch", "torch.compile"),
    "compiling ours": -change("busy, ms", "+ dropout", "Kernel Book"),
    "the graph": -change("busy, ms", "Kernel Book", graphed),
}
no_waiting = step("step, ms", graphed) < 1.05 * step("busy, ms", graphed)
lab.read(
    (
        "**So it was the host.** "
        if no_waiting
        and our_took > 1.1 * sdpa_took
        and step("step, ms", graphed) < 1.02 * step("step, ms", sdpa_graphed)
        else ""
    )
    + f"As a graph, the step with the book's operators takes {step('step, ms', graphed):.1f} ms "
    f"instead of {our_took:.1f}"
    + (", hardly longer than its kernels" if no_waiting else "")
    + f"; that with SDPA takes {step('step, ms', sdpa_graphed):.1f}."
)

# %%

# Reading
lab.read(
    (
        "**Operators shorten the kernels, from "
        f"{step('busy, ms', 'PyTorch'):.0f} ms to {step('busy, ms', '+ dropout'):.0f}; compiling "
        "shortens those of the formula and hardly ours; a graph shortens none, but none waits for "
        "the host any more.** "
        if min(shorter["operators"], shorter["SDPA"])
        > shorter["compiling the formula"]
        > 10
        and -1 < shorter["compiling ours"] < 5
        and shorter["the graph"] < 1
        and no_waiting
        else ""
    )
    + f"The book's operators take the peak of the memory from {step('peak, GiB', 'PyTorch'):.1f} "
    f"GiB to {step('peak, GiB', '+ dropout'):.1f}, and SDPA to {step('peak, GiB', 'SDPA'):.1f}: it "
    "is the table that goes."
)

# %%
# Four more models
# ----------------
#
# We race the two graphs in three more sizes and at one longer
# context, 16,384, where the batch is a single sequence.

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
            rows += versions_in_turn(name, batch, context, versions)
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


more = lab.measure("Compiled steps of other models, with and without a graph", races)

# %%


def raced():
    """The rows of each model by version, the short context first and then by size."""
    found = defaultdict(dict)
    for row in (*more.rows, *steps.rows):
        if row["version"] in (*GRAPHS, *GRAPHS.values()):
            found[f"{row['size']} at {row['context']:,}"][row["version"]] = row
    names = [f"{size} at {CONTEXT:,}" for size in SIZES] + [f"large at {LONG:,}"]
    return {name: found[name] for name in names if name in found}


def ratio(rows, theirs, own):
    """How many times as fast the second of two versions is."""
    times = rows[theirs]["step, ms"], rows[own]["step, ms"]
    return nan if None in times else times[0] / times[1]


race, without, graphs = raced(), list(GRAPHS), list(GRAPHS.values())


def apart(model):
    """Whether the graphs of a model differ, by the rule."""
    return differs(*(race[model][name] for name in graphs))


def verdict(model):
    """By how much the time of our graph differs, if it does by the rule."""
    fast = ratio(race[model], *graphs)
    if fast != fast:
        return "—"
    if not apart(model):
        return "not told apart"
    return f"{100 / fast - 100:+.1f} %".replace("-", "−")


lab.table(
    [
        {
            "model": model,
            "SDPA": spread(rows[graphs[0]]),
            "the book's": spread(rows[graphs[1]]),
            "difference": verdict(model),
            "SDPA, no graph": shown(rows[without[0]]["step, ms"], 0),
            "the book's, no graph": shown(rows[without[1]]["step, ms"], 0),
        }
        for model, rows in race.items()
    ],
    "Milliseconds of a compiled step: as a CUDA graph, p50 (p20–p80), and launched by the host",
)

# %%


# Reading
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


far = f"large at {LONG:,}"
waiting = [
    model
    for model, rows in race.items()
    if ratio(rows, *without) < 0.9 and differs(*(rows[name] for name in without))
]
no_gain = [
    model
    for model, rows in race.items()
    if ratio(rows, *graphs) == ratio(rows, *graphs)
    and not any(differs(rows[name], rows[GRAPHS[name]]) for name in without)
    and all(host_of(rows[name]) < rows[name]["busy, ms"] for name in without)
]
lab.read(
    (
        f"**As a graph, the step with the book's operators is faster in {listed(ahead)}"
        if ahead
        else "**As a graph, the step with the book's operators is faster in no model"
    )
    + (f", and slower in {listed(behind)}" if behind else ", and slower in none")
    + ".** "
    + (
        f"Launched by the host, it is far slower in {listed(waiting)}"
        + (
            ", where our launches take longer than the kernels. "
            if all(
                host_of(race[model][without[1]]) > race[model][without[1]]["busy, ms"]
                for model in waiting
            )
            else ". "
        )
        if waiting
        else ""
    )
    + (
        f"In {listed(no_gain)}, where the kernels take longer than the launches, our rule tells no "
        "graph from a step without one. "
        if no_gain
        else ""
    )
    + (f"Not measured: {'; '.join(failed)}." if failed else "")
)

# %%
# Which kernels make the difference? Three profiles of each graph, taken in turn, tell: a bar shows
# by how much longer a kind of kernels takes with the book's operators. The linear layers run the
# same kernels in both graphs, so their bars show how far to trust the others.


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


APART = {
    "linear layers": lab.colour("matmul"),
    "attention": lab.colour("Kernel Book"),
    "between": lab.colour("PyTorch"),
}


def kinds_in_words(_):
    said = (
        f"{model}: "
        + ", ".join(
            f"{KIND_NAMES[kind]} {longer(model, f'{kind}, ms'):+.1f}" for kind in APART
        )
        for model in race
    )
    return f"Milliseconds that kernels take longer with the book's: {'; '.join(said)}."


def kind_bars(axes, _):
    axes.figure.set_size_inches(5.4, 5.2)
    axes.grid(axis="y", visible=False)
    axes.axvline(0, color=lab.colour("copy"), linewidth=0.9)
    has_scatter = False
    for place, model in enumerate(race):
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
                f"{apart_by:+.1f}".replace("-", "−"),
                (end, where_to),
                xytext=(4 if apart_by > 0 else -4, 0),
                textcoords="offset points",
                ha="left" if apart_by > 0 else "right",
                va="center",
                fontsize=10,
            )
    axes.margins(x=0.12)
    axes.set_yticks(range(len(race)), list(race))
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.set(xlabel="ms longer (right) or shorter (left) with the book's operators")
    handles = [
        axes.barh(0, 0, color=ink, label=KIND_NAMES[kind])
        for kind, ink in APART.items()
    ]
    if has_scatter:
        look = {"color": lab.colour("copy"), "linewidth": 1.2}
        handles += axes.plot([], [], label="scatter of the profiles", **look)
    axes.legend(handles=handles, loc="lower left", frameon=False)


lab.draw(more, "Where the two graphs differ", kinds_in_words, kind_bars)

# %%


# Reading
def padded(model):
    """What the heads of a model have to do with tiles, where their size is no power of two."""
    shape = SIZES[model.partition(" ")[0]]
    head = shape.d_model // shape.heads
    tile = 1 << (head - 1).bit_length()
    return (
        f". Its heads have {head} numbers, which our kernels pad to {tile}; we suspect the "
        "padding"
    ) * (head < tile)


share_of = {
    context: 100 * 7 * context / (72 * SIZES["large"].d_model + 7 * context)
    for context in (CONTEXT, LONG)
}
sides = {  # the models in which a kind of kernels is clearly faster or slower
    (kind, sign): [
        model
        for model in race
        if clear(model, kind) and sign * longer(model, f"{kind}, ms") > 0
    ]
    for kind in ("attention", "between")
    for sign in (-1, 1)
}


def tally(kind):
    """In how many models a kind of kernels is faster or slower with the book's operators."""
    faster, slower = len(sides[kind, -1]), len(sides[kind, 1])
    return f"faster in {faster} of {len(race)} models" + (
        f" and slower in {slower}" if slower else ""
    )


of_kind = any(
    scatter_of(model, "attention") == scatter_of(model, "attention") for model in race
)
same = {model: abs(longer(model, "linear layers, ms")) for model in race}
lab.read(
    "**Element-wise kernels are "
    f"{tally('between')}; attention is {tally('attention')}.** "
    + (
        "We count a bar only if it is longer than the profiles scatter. "
        if of_kind
        else "The linear layers differ by up to "
        f"{max(same.values(), default=nan):.1f} ms, and we count a bar only if it is longer than "
        "theirs. "
    )
    + (
        f"At {LONG:,}, where attention is {share_of[LONG]:.0f} % of the FLOPs of a layer instead "
        f"of {share_of[CONTEXT]:.0f} %, it saves {-longer(far, 'attention, ms'):.1f} ms. "
        if far in sides["attention", -1]
        else ""
    )
    + "".join(
        f"In {model} it takes {longer(model, 'attention, ms'):.1f} ms longer{padded(model)}. "
        for model in sides["attention", 1]
    )
)

# %%

# Folded: What are the numbers of this figure?
lab.table(
    [
        {"model": model}
        | {
            KIND_NAMES[kind]: " / ".join(
                shown(rows[name][f"{kind}, ms"]) for name in graphs
            )
            for kind in KINDS
        }
        | {"all": " / ".join(shown(rows[name]["busy, ms"]) for name in graphs)}
        | {"race": " / ".join(shown(rows[name]["step, ms"]) for name in graphs)}
        | {
            "range": " / ".join(
                shown(rows[name].get(RANGE.format("linear layers"))) for name in graphs
            )
        }
        for model, rows in race.items()
    ],
    "Milliseconds of the kernels of a step, SDPA / the book's, the medians of three profiles of a "
    "graph; beside them the time of a step in the race, and by how much the linear layers of the "
    "three profiles differ",
)

# %%

# Measuring
longest_of = lab.measure(
    "The kernels that take most in a compiled step", lambda: list(longest_kernels)
)

# %%

# Folded: Which kernels take most?
lab.table(
    [row | {"kind": KIND_NAMES[row["kind"]]} for row in longest_of.rows],
    "The kernels that take most in a compiled step, captured as a graph, in milliseconds",
)

# %%
# What breaks it
# --------------
#
# **Parameters in bfloat16.** Autocast leaves the parameters in float32, and that is no waste: in
# bfloat16 an update smaller than half the gap to the next number is rounded away, however often it
# comes.

for dtype in (torch.float32, torch.bfloat16):
    weight = torch.ones((), dtype=dtype)
    for _ in range(1000):
        weight -= 1e-3
    print(f"{dtype}: {weight.item():.4f} after 1,000 updates of -0.001")

# %%
# **A graph replayed on other data.** A CUDA graph reads its batch where it lay at capture. So
# ``training.tokens.copy_(batch)`` gives it the next batch, and ``training.tokens = batch`` does
# not, because that only gives other memory the name: the next replay trains on the old batch again,
# without an error. Here a function that keeps its tensor stands in for the graph:

captured_batch, next_batch = torch.zeros(4), torch.ones(4)
replay = partial(torch.sum, captured_batch)  # keeps this tensor
new_name = next_batch
print(f"a new name for the batch:  {replay():.0f}, the old sum")
captured_batch.copy_(next_batch)
print(f"copied to where it reads:  {replay():.0f}, the new sum")

# %%
# In short
# --------
#

# Reading
lab.read(
    "**With the formula, most of a step in bfloat16 goes to moving bytes, and most of its memory "
    "to what forward keeps for backward.** Attention without the table shortens the kernels of a "
    f"step from {step('busy, ms', 'PyTorch'):.0f} ms to {step('busy, ms', '+ attention'):.0f} and "
    f"lowers the peak of the memory from {step('peak, GiB', 'PyTorch'):.0f} GiB to "
    f"{step('peak, GiB', '+ attention'):.0f}; SDPA does the same "
    f"({step('busy, ms', 'SDPA'):.0f} ms, {step('peak, GiB', 'SDPA'):.0f} GiB)."
)

# %%

# Reading
lab.read(
    "**A whole step also pays for its launches"
    + (
        ", so the fastest compiled layer, the book's, makes the slowest step in the median"
        if last_in_step
        else ""
    )
    + f".** Compiled, it takes {sdpa_took:.0f} ms with SDPA, "
    f"{step('step, ms', 'torch.compile'):.0f} with the formula and {our_took:.0f} with our "
    f"operators; as a CUDA graph, {step('step, ms', sdpa_graphed):.0f} with SDPA and "
    f"{step('step, ms', graphed):.0f} with our operators"
    + (
        ", which our rule does not tell apart."
        if not differs(step_row(sdpa_graphed), step_row(graphed))
        else "."
    )
)

# %%

# Reading
lab.read(
    (
        "**So where the kernels of a model are this short, capture its step as a graph. Without "
        "one, take SDPA"
        + (
            " or replace attention alone.**"
            if step("step, ms", "+ attention") < 0.85 * step("step, ms", "+ dropout")
            else ".**"
        )
        if waiting
        else "In no model that we raced does the GPU wait long for the host."
    )
    + f" As graphs, our operators are ahead of SDPA in {len(ahead)} of {len(by_model)} models and "
    + (f"behind in {len(behind)}." if behind else "never behind.")
)

# %%
# Exercises
# ---------
#
# **1. Where does attention overtake?** Count the FLOPs of a layer: :math:`72 d^2` per token in the
# linear layers and :math:`7 T d` in causal attention. At which context are they equal?

# %%

# Solution: where does attention overtake?
rows = []
for name, size in SIZES.items():
    context = 72 * size.d_model // 7
    linear, scores = 72 * size.d_model**2, 7 * context * size.d_model
    assert abs(linear - scores) / linear < 1e-3
    rows.append({"size": name, "context": context})
lab.table(rows, "From here on attention does most of the work")

# %%
# **2. What fits?** 2.7B has 2.57 billion parameters, a :math:`d` of 2,560, :math:`f = 4 d`, and 32
# layers of 32 heads. A parameter takes 16 bytes: itself, its gradient and AdamW's two averages.
# What is the longest context, in powers of two, at which the model trains in 140 GB with a batch of
# 4? Count for float32, as above; for autocast, where a layer keeps :math:`22 N d + 4 N f + 6 B H
# T^2 + 8 d^2 + 4 d f` bytes; and for autocast without the table.

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
# - Hendrycks, Gimpel. *Gaussian error linear units (GELUs).* arXiv:1606.08415, 2016.
# - Loshchilov, Hutter. *Decoupled weight decay regularization.* ICLR 2019.
# - Micikevicius et al. *Mixed precision training.* ICLR 2018.
# - Chen et al. *Training deep nets with sublinear memory cost.* arXiv:1604.06174, 2016.
# - Korthikanti et al. *Reducing activation recomputation in large Transformer models.* MLSys 2023.
# - Hashimoto, Liang. *CS336: Language modeling from scratch*, assignment 2: systems. Stanford
#   University.

# %%

# Closing
lab.finish(
    f"A compiled training step of large takes {our_took:.0f} ms, with SDPA {sdpa_took:.0f}; "
    f"as a CUDA graph {step('step, ms', graphed):.0f} ms, with SDPA "
    f"{step('step, ms', 'SDPA, CUDA graph'):.0f}"
)
