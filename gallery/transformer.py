"""
A transformer, measured
=======================

The kernels of this book are pieces of a model, and a kernel that is twice as fast is worth little
if a model hardly waits for it. *Where does the time of a training step go, where does its memory
go, and how much of either do the book's operators save?*

You will learn

- how to time a training step, to group the kernels of its profile by what they do, and to capture
  the step as a CUDA graph;
- what mixed precision changes in time, memory and dtypes, and which tensors fill the memory;
- what each operator of the book is worth in a whole model, eager, compiled and as a graph, beside
  PyTorch's own and its fused attention.

The folds whose titles are questions answer those of the second assignment of the Stanford course
CS336. The measurements need an NVIDIA GPU with 141 GB; without one they are those of a recorded
run, which ``KERNELBOOK_MODE=replay`` asks for on a smaller GPU.
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
)

# %%
# The step we follow
# ------------------
#
# We follow one training step of one model: first where its time goes, then where its memory goes,
# and at last what changes as the book's operators replace PyTorch's, one after the other. The bars
# at the top are of one layer on the GPU alone. In a whole step the :term:`host` has to launch the
# kernels, and there this model with the book's operators falls far behind SDPA, PyTorch's own fused
# attention, until a CUDA graph takes the host away.
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
# The attention to begin with is the formula itself: scores, the causal mask, softmax, a weighted
# sum of values. ``record_function`` names a range for the profiler and does nothing else.

lab.source(standard_attention)

# %%
# A layer adds its two branches to the stream ``x``. ``dropout``, ``attention`` and the layer norm
# within ``norm_1`` and ``norm_2`` are attributes, and that is all that we need to replace them.
# ``p`` is the share of numbers that dropout sets to zero.

lab.source(decoder.Block.forward)

# %%
# The first branch, ``attend``, makes q, k and v by one matmul, splits each into its heads, and
# joins the heads again after attention. The second, ``feed_forward``, is ``down(gelu(up(x)))``.

lab.source(decoder.Block.attend)

# %%
# **A layer is four linear layers, whose matmuls we leave to cuBLAS, and between them operators that
# we can replace.** The course CS336 has five sizes, all with batches of 4. *Large* has 36 layers
# and a ``d_model`` of 1,280.

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
# ``training.step()``, changes the parameters. The host only launches kernels and goes on, so a
# clock around a pass has to wait for the GPU before it is read. ``training`` holds a model, its
# optimiser and a batch.

lab.source(timed_step)

# %%
# We follow the step in float32 and under ``torch.autocast``, which lets the matmuls run in bfloat16
# and is called *bfloat16* below. The model is *large* at a context of 1,024, unless a size is
# named.

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
# A step launches thousands of kernels, but from a few operations of PyTorch, and the profiler tells
# for each operation how many microseconds its kernels took: ``self_device_time_total``. We add
# these up by what the operations do: ``group`` puts ``aten::mm`` and ``aten::bmm`` into the group
# “matmul”. The profile lists each kernel once more by itself, on the device; to count it once, we
# keep the operations, which ran on the CPU.


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
        name: sum(row[f"{name}, ms"] for row in chosen) for name in (*GROUPS, "other")
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
    f"{products['float32'] / products['bfloat16']:.0f} times as fast; PyTorch does not use these "
    "units for float32 unless told to. **Matmuls now are only "
    f"{in_step['bfloat16']:.0f} % of the time. What is left mostly moves bytes, and there the "
    "kernels of this book can help.** “Other” are additions, multiplications, the mask and the "
    "loss."
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
# Attention shows what moving bytes costs, because the formula takes its table of scores to memory
# and back again and again. We count for one score. Autocast runs softmax in float32, 4 bytes a
# number, and the rest of attention in bfloat16, 2 bytes.

# Drawing
TRIPS = [  # what is done, the range of the profile, bytes read and bytes written per score
    ("q kᵀ", "both matmuls, the scale, a cast", 0, 2),
    ("scale", "both matmuls, the scale, a cast", 2, 2),
    ("mask: copy", "mask", 2, 2),
    ("mask: fill", "mask", 2, 2),
    ("cast to float32", "softmax", 2, 4),
    ("softmax", "softmax", 4, 4),
    ("cast to bfloat16", "both matmuls, the scale, a cast", 4, 2),
    ("weights v", "both matmuls, the scale, a cast", 2, 0),
]
bytes_in = Counter()
for _, what, read, written in TRIPS:
    bytes_in[what] += read + written
INK_OF_RANGE = {
    "both matmuls, the scale, a cast": lab.colour("matmul"),
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
# The profile has four ranges of this trip. We join *scores* and *values*, which also casts the
# weights back, in one colour. The table sums up the bytes of each colour, and adds the FLOPs:
# :math:`4 d` per score in the two matmuls, for a head of :math:`d` numbers, and about five in
# softmax.


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
    "both matmuls, the scale, a cast": (4 * head + 1, ("scores", "values")),
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
    "Inside attention, forward in bfloat16, large at 1,024",
)

# %%

# Reading
at_speed = [
    100 * row["ms at a copy's speed"] / row["ms, measured"] for row in inside.values()
]
by_flops = 1e3 * (4 * head) * n_scores / of_matmul
lab.read(
    f"All three move their bytes at {min(at_speed):.0f} to {max(at_speed):.0f} % of the speed of a "
    "large copy. FLOPs do not explain their time: at the speed of a large matmul, the first row "
    f"would take {by_flops:.1f} ms."
)

# %%

# Reading
softmax_range = inside["softmax"]["ms, measured"]
softmax_group = in_groups("bfloat16", ["softmax"])
lab.read(
    "The range of softmax includes its cast to float32, which figure 1 counts as a cast. So the "
    f"{softmax_range:.1f} ms here, of forward alone, are "
    f"{'more' if softmax_range > softmax_group else 'less'} than the {softmax_group:.1f} of the "
    "group “softmax” in a whole step."
)

# %%
# .. admonition:: Key idea
#    :class: kb-key
#
#    In bfloat16 a step spends most of its time on operations that move bytes. Count their bytes,
#    and not their FLOPs, to know how fast they can be.
#
# Why there are casts
# -------------------
#
# :term:`Autocast <autocast>` leaves the parameters in float32 and runs each operation in the dtype
# that PyTorch lists for it: linear layers in bfloat16; softmax, layer norm and the loss in float32.
# **So a tensor is cast wherever a matmul follows an operator in float32, and each weight before its
# matmul.**

# Reading
lab.read(
    f"The group “casts and copies” takes {casts['float32']:.0f} ms in float32, where it only "
    "copies. In bfloat16 these copies move half the bytes, and yet the group takes "
    f"{casts['bfloat16']:.0f} ms, so at least {casts['bfloat16'] - casts['float32']:.0f} of them "
    "are casts."
)

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
# Which tensors fill the memory? Mostly those that forward keeps for backward. We count them per
# layer, for :math:`N` tokens (batch times context), width :math:`d`, a feed-forward width of
# :math:`f`, :math:`B` batches, :math:`H` heads and a context of :math:`T`. In float32 a layer keeps
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

# %%
# The last term of the bracket is a table of :math:`T^2` weights for each head. The picture shows
# the share of each term in the bytes of a layer of *large*, with batches of 4.

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
# **The tables of attention alone grow with the square of the context, and at 1,024 they are
# already about half of what a layer keeps.** A run has to confirm the count.


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
    f"from {min(CONTEXTS)} to {longest:,}. The table has the longest of them."
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
# the rest again in backward. For *large* in float32, the figure sums up what PyTorch's allocator
# gives and takes back over one step, with all kept and with checkpointing.


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
lab.read(
    "With all kept, a step holds the most when backward begins. **Checkpointing lowers this peak "
    f"from {peak['all kept']:.1f} GiB to {peak['checkpointed']:.1f}, at the price of another "
    "forward pass.**"
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
# The table of scores costs the most memory and much of the time, so attention is the first operator
# to replace. :doc:`The book's attention </chapters/attention_forward>` never stores the table.
# Before it goes into the model we time it by itself, as ``ours``, beside the formula in PyTorch, on
# the shapes of the course: a batch of 8 with one head of 64 numbers, in bfloat16 and causal. What
# attention *holds* is what forward keeps for backward beside q, k and v.

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


def attention_grid():
    providers = {
        "PyTorch": standard_attention,
        "torch.compile": torch.compile(standard_attention, dynamic=True),
        "Kernel Book": ours,
    }
    rows = []
    for head_dim, longest in GRID.items():
        for length in (length for length in LENGTHS if length <= longest):
            inputs = [drawn(8, 1, length, head_dim) for _ in range(4)]
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
            del inputs, runs
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


ATTENTIONS = {"PyTorch": "the formula", "Kernel Book": "the book's"}
lab.table(
    [
        {"length": length}
        | {
            f"{name}, ms": milliseconds(in_grid("both, ms", provider, length))
            for provider, name in ATTENTIONS.items()
        }
        | {
            f"{name} holds, MiB": milliseconds(in_grid("held, MiB", provider, length))
            for provider, name in ATTENTIONS.items()
        }
        for length in LENGTHS
    ]
    if grid.rows
    else [],
    "Forward and backward of attention, head size 64",
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
lab.read(
    "**Without the table, memory grows with the length, and not with its square**, because the "
    "book's attention keeps only the output and one logarithm per row, and computes the weights "
    "again in backward. "
    + (
        f"At 16,384 the book's attention is {times:.0f} times as fast"
        if times == times or not grid.rows
        else ""
    )
    + (
        f"; at 65,536, where a table has {8 * 65536**2 * 2 / 2**30:.0f} GiB, the formula runs out "
        "of memory."
        if out_of
        else "."
    )
)

# %%

# Folded: How is it for head sizes of 16 to 128, forward and backward apart, and compiled?
grid

# %%
# The book's operators in the model
# ---------------------------------
#
# ``Operators`` takes attention, layer norm and dropout, in this order, and what it is not given is
# PyTorch's. From *PyTorch* to *+ dropout*, each line of ``EAGER`` replaces more: *+ attention*
# replaces the softmax with it, and *+ dropout* has all that we replace, so it is called *the
# book's* below. The opponent is *SDPA*: PyTorch with its own fused attention, in its fastest
# backend.

sdpa = partial(F.scaled_dot_product_attention, is_causal=True)
layer_norm_16 = partial(layer_norm, out_dtype=torch.bfloat16)
EAGER = {
    "PyTorch": decoder.PYTORCH,
    "+ softmax": Operators(partial(standard_attention, softmax=softmax)),
    "+ attention": Operators(ours),
    "+ layer norm": Operators(ours, layer_norm_16),
    "+ dropout": Operators(ours, layer_norm_16, dropout),
    "SDPA": Operators(sdpa),
}

# %%
# ``out_dtype`` tells our layer norm to write bfloat16. Under autocast PyTorch's writes float32,
# which another kernel rounds for the matmul that follows; ours computes in float32 as well, and
# rounds once, as autocast would.

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
# ``torch.compile`` fuses layer norm, dropout, GELU and additions into a few kernels, but cannot
# look into an operator of ours. So we also compile four versions: *PyTorch*, *SDPA*, the book's
# attention alone, and all of the book's operators. The record calls the last one *Kernel Book*, and
# this page *the book's, compiled*.

# Measuring
COMPILED = {
    "torch.compile": decoder.PYTORCH,
    "SDPA, compiled": Operators(sdpa),
    "attention, compiled": Operators(ours),
    "Kernel Book": Operators(ours, layer_norm_16, dropout),
}

# %%
# Is it the same model?
# ---------------------
#
# Two tests compare the models: their gradients in float32, and what they learn under autocast.
#
# **Gradients.** We compute the gradient of every parameter of a small model three times: with the
# book's operators and with PyTorch's, both in float32, and in float64, which is taken as the truth.
# Dropout is on and draws the same masks in all three. The book's error may be eight times that of
# PyTorch.


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
# **Learning.** Under autocast the versions round differently, so we compare the loss that they
# reach. A tiny model trains for 200 steps on the source of the package, one byte a token, with ten
# seeds. A seed fixes the parameters and the batches, but not the masks of dropout, and other masks
# alone lead to another loss. To know by how much, we train PyTorch's model twice with each seed.
#
# In the figure a dot is one seed, and the line below the dots is their mean with its 95 % interval.

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
    f"{to_loss:.1f}, and ends {abs(offset):.3f} ± {BY_CHANCE * error:.3f} "
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
# What they change in a layer
# ---------------------------
#
# Which operator is worth most, as long as only kernels count? We time forward and backward of one
# layer in bfloat16, without the host; 100 % is the speed of a large matmul by cuBLAS. Blue are the
# versions with operators of the book.

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
OPERATORS_OF = {  # what the page calls the versions that are raced, by how they are launched
    "eager": {"PyTorch": "PyTorch", "SDPA": "SDPA", "+ dropout": "the book's"},
    "compiled": {
        "torch.compile": "PyTorch",
        "SDPA, compiled": "SDPA",
        "Kernel Book": "the book's",
    },
    "CUDA graph": {"SDPA, CUDA graph": "SDPA", "Kernel Book, CUDA graph": "the book's"},
}
RUNGS = {  # the versions of a layer in the order of the figure, and what it calls them
    "eager": {
        "PyTorch": "PyTorch",
        "SDPA": "SDPA",
        "+ softmax": "+ softmax",
        "+ attention": "+ attention",
        "+ layer norm": "+ layer norm",
        "+ dropout": "+ dropout: the book's",
    },
    "compiled": {
        "torch.compile": "PyTorch",
        "SDPA, compiled": "SDPA",
        "attention, compiled": "the book's attention",
        "Kernel Book": "the book's",
    },
}
OF_OTHERS = ("PyTorch", "SDPA", "torch.compile", "SDPA, compiled")


def layer_in_words(rows):
    shares = {row["provider"]: 100 * row["share"] for row in rows}
    return "Bars, % of the speed of a large matmul. " + " ".join(
        f"{mode.capitalize()}: "
        + ", ".join(
            f"{label} {shares[name]:.0f}"
            for name, label in rungs.items()
            if name in shares
        )
        + "."
        for mode, rungs in RUNGS.items()
    )


def layer_bars(axes, rows):
    axes.figure.set_size_inches(5.4, 4.3)
    axes.grid(axis="x", visible=True)
    axes.grid(axis="y", visible=False)
    shares = {row["provider"]: 100 * row["share"] for row in rows}
    place, ticks = 0, {}
    for mode, rungs in RUNGS.items():
        axes.text(1, place, mode, va="center", fontsize=11, fontweight="bold")
        for name, label in rungs.items():
            place += 1
            ticks[place] = label
            ink = lab.colour("copy" if name in OF_OTHERS else "Kernel Book")
            axes.barh(place, shares.get(name, 0), 0.7, color=ink)
            beside(axes, shares.get(name, 0), place, shown(shares.get(name), 0))
        place += 1.4
    axes.axvline(100, color=lab.colour("copy"), linestyle="--", linewidth=1)
    axes.set_yticks(list(ticks), list(ticks.values()))
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
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
by_attention = layer_ms("+ softmax") - layer_ms("+ attention")
fusing = layer_ms("attention, compiled") / layer_ms("Kernel Book")
lab.read(
    f"Eager, **attention saves {by_attention:.2f} of the {saved:.2f} ms** that the book's "
    "operators save in all. Compiled, the book's layer norm and dropout "
    + (
        "change less than 1 %"
        if abs(fusing - 1) < 0.01
        else f"{'save' if fusing > 1 else 'cost'} only {100 * abs(1 - 1 / fusing):.0f} %"
        if abs(fusing - 1) < 0.05
        else f"make it {layer_ms('Kernel Book'):.2f} ms"
    )
    + (
        ": the compiler writes fused kernels for these itself."
        if abs(fusing - 1) < 0.05
        else "."
    )
)

# %%
# Why a step gains less than a layer
# ----------------------------------
#
# In a layer on the GPU alone, the book's operators are ahead of SDPA. In a whole step they are
# behind. We suspect the host: it has to launch every kernel, and an operator of ours, which runs
# Python where PyTorch's runs C++, keeps it busy for longer. The picture follows five launches of a
# layer, not to scale.
#
# .. image:: /figures/transformer-launches.svg
#    :alt: Timelines of the host and the GPU for layer norm, qkv, attention, out and dropout. With
#          short launches the host is ahead, and the kernels follow each other without gaps. With
#          long launches of layer norm, attention and dropout the GPU waits before their kernels,
#          although these are shorter. As a CUDA graph, one call of the host launches all five
#          kernels, and there are no gaps.
#
# .. admonition:: Key idea
#    :class: kb-key
#
#    A step takes at least the longer of two times: that of its kernels, and that in which the host
#    launches them.
#
# The figure shows both times for five versions:
#
# - the narrow bar is how long the host takes to launch a step when nothing is queued;
# - the wide bar is the step: in colours its kernels by kind, and dotted what it takes beyond them.
#   *Between* are layer norm, dropout, GELU, additions and casts, and the formula's scale and mask.
#
# If the host sets the pace, the wide bar ends about where the narrow one does, and its dotted part
# is what waiting for the host costs.

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
    """Milliseconds from step to step, with the host free to run ahead, and those after which the
    host has launched the first step, before which nothing was queued."""
    torch.cuda.synchronize()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(TURN + 1)]
    begin, launched = time.perf_counter(), []
    for mark in marks:
        step()
        launched.append(1e3 * (time.perf_counter() - begin))
        mark.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in pairwise(marks)], launched[:1]


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
        linear = [row["linear layers, ms"] for row in each]
        rows[title][RANGE] = round(max(linear) - min(linear), 2)
    return rows


RANGE = "range of linear layers, ms"


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
    """Milliseconds of some rounds of steps, and of the host, by the name of the version."""
    times, draw = {label: ([], []) for label in steps}, numpy.random.default_rng(0)
    for _ in range(rounds):
        for label in draw.permutation(list(steps)):
            for all_found, found in zip(
                times[label], one_turn(steps[label]), strict=True
            ):
                all_found += found
    return times


def timing_of(times):
    """The median and the middle 60 % of the times of steps, and the median of the host's."""
    if not times:
        return dict.fromkeys(("step, ms", "p20, ms", "p80, ms", "host, ms"))
    took, launching = times
    low, middle, high = numpy.quantile(took, (0.2, 0.5, 0.8)).round(2).tolist()
    host = round(statistics.median(launching), 2)
    return {"step, ms": middle, "p20, ms": low, "p80, ms": high, "host, ms": host}


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


NO_PROFILE = dict.fromkeys([*(f"{kind}, ms" for kind in KINDS), "busy, ms", RANGE])


def step_ladder():
    versions = {label: (operators, False) for label, operators in EAGER.items()}
    versions |= {label: (operators, True) for label, operators in COMPILED.items()}
    return versions_in_turn("large", BATCH, CONTEXT, versions)


# %%

steps = lab.measure("A step of large at 1,024, twelve versions", step_ladder)

# %%


# Drawing
def timed(rows):
    return [row for row in rows if row["step, ms"] is not None]


def steps_in_words(rows):
    found = (
        f"{row['version']} {row['step, ms']:.1f}"
        + (f", with a kernel {row['busy, ms']:.1f}" if row["busy, ms"] else "")
        + (f", launched in {row['host, ms']:.1f}" if row.get("host, ms") else "")
        for row in timed(rows)
        if row["version"] in FOLLOWED
    )
    return f"Milliseconds of a step: {'; '.join(found)}."


FOLLOWED = {  # the versions that are drawn, and what the figure calls them
    "PyTorch": "PyTorch",
    "SDPA": "SDPA",
    "+ dropout": "the book's",
    "SDPA, compiled": "SDPA, compiled",
    "Kernel Book": "the book's, compiled",
}
INKS = {
    "linear layers": lab.colour("matmul"),
    "attention": lab.colour("Kernel Book"),
    "between": lab.colour("PyTorch"),
    "AdamW": lab.colour("torch.compile"),
}


def step_bars(axes, rows):
    axes.figure.set_size_inches(5.4, 4.9)
    axes.grid(axis="y", visible=False)
    rows = {row["version"]: row for row in timed(rows)}
    rows = [rows[version] for version in FOLLOWED if version in rows]
    grey = lab.colour("copy")
    rest = {"facecolor": "none", "edgecolor": grey, "linestyle": ":"}
    for place, row in enumerate(rows):
        host, took, reached = row.get("host, ms"), row["step, ms"], 0
        if host is not None:
            axes.barh(place - 0.34, host, 0.16, color=grey, alpha=0.45)
            beside(axes, host, place - 0.36, f"host {host:.0f}")
        for kind, ink in INKS.items():
            axes.barh(place, row[f"{kind}, ms"], 0.44, left=reached, color=ink)
            reached += row[f"{kind}, ms"]
        axes.barh(place, max(0, took - reached), 0.44, left=reached, **rest)
        label = f"step {took:.0f}, kernels {row['busy, ms']:.0f}"
        beside(axes, max(took, reached), place + 0.04, label)
    axes.set_yticks(range(len(rows)), [FOLLOWED[row["version"]] for row in rows])
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.set_xlim(0, 1.5 * max(row["step, ms"] for row in rows))
    axes.set(xlabel="ms of a training step")
    if any(row.get("host, ms") is not None for row in rows):
        axes.barh(0, 0, color=grey, alpha=0.45, label="host launches")
    for kind, ink in INKS.items():
        axes.barh(0, 0, color=ink, label=kind)
    axes.barh(0, 0, label="GPU waits", **rest)


lab.draw(steps, "A step of large at 1,024, by host and GPU", steps_in_words, step_bars)

# %%


# Reading
def step(column, version):
    found = [row.get(column) for row in timed(steps.rows) if row["version"] == version]
    return found[0] if found and found[0] is not None else nan


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


last = "+ attention", "+ dropout"
our_took, sdpa_took = (
    step("step, ms", name) for name in ("Kernel Book", "SDPA, compiled")
)
our_ran, sdpa_ran = (
    step("busy, ms", name) for name in ("Kernel Book", "SDPA, compiled")
)
eager_host = step("host, ms", "+ dropout")
lab.read(
    "**Eager, the book's operators shorten the kernels to "
    f"{100 * step('busy, ms', '+ dropout') / step('busy, ms', 'PyTorch'):.0f} % and the peak of "
    "the memory to "
    f"{100 * step('peak, GiB', '+ dropout') / step('peak, GiB', 'PyTorch'):.0f} % of PyTorch's, "
    "but the step is "
    + (
        "far slower than with SDPA**"
        if step("step, ms", "+ dropout") > 1.2 * step("step, ms", "SDPA")
        else f"{step('step, ms', '+ dropout') / step('step, ms', 'SDPA'):.2f} times as long as "
        "with SDPA**"
    )
    + (
        ". Both take about as long as the host needs to launch them"
        if abs(eager_host / step("step, ms", "+ dropout") - 1) < 0.05
        and abs(step("host, ms", "SDPA") / step("step, ms", "SDPA") - 1) < 0.05
        else ""
    )
    + ". "
    + (
        "Our layer norm even makes the step slower: from "
        f"{step('step, ms', '+ attention'):.0f} ms with attention alone to "
        f"{step('step, ms', '+ layer norm'):.0f}, although its kernels are faster than PyTorch's."
        if differs(step_row("+ attention"), step_row("+ layer norm"))
        and change("step, ms", "+ attention", "+ layer norm") > 0
        and change("between, ms", "+ attention", "+ layer norm") < 0
        else ""
    )
)

# %%


# Reading
launched_ms = [
    (100 * (row["host, ms"] / row["step, ms"] - 1), row["version"])
    for row in timed(steps.rows)
    if row.get("host, ms") and row["version"] in (*EAGER, *COMPILED)
]
over_drawn = max((by for by, name in launched_ms if name in FOLLOWED), default=nan)
over_all, over_name = max(launched_ms, default=(nan, ""))
beyond_both = step("step, ms", "SDPA, compiled") - max(
    step("host, ms", "SDPA, compiled"), step("busy, ms", "SDPA, compiled")
)
lab.read(
    "The bars come from separate measurements, so “at least” holds only as far as they agree: "
    + (
        f"a host's bar is up to {over_drawn:.0f} % longer than its step, and of all versions up to "
        f"{over_all:.0f} % (“{over_name}”). "
        if over_drawn > 0
        else "here no host's bar is longer than its step. "
    )
    + (
        f"SDPA, compiled, takes {beyond_both:.0f} ms more than the longer of its two times; we "
        "have not measured why. "
        if beyond_both > 1
        else ""
    )
    + "For PyTorch the host's bar is only an upper bound, because a host that is far ahead has to "
    "wait for the GPU."
)

# %%

# Reading
lab.read(
    f"**Compiled, the step takes {our_took:.0f} ms with our operators and {sdpa_took:.0f} with SDPA"
    + (
        ", although our kernels are no slower.** "
        if our_ran <= sdpa_ran < our_took
        else ".** "
    )
    + (
        "With SDPA compiling even makes the step slower than eager; its kernels get shorter, but "
        "the host takes longer to launch them. "
        if change("step, ms", "SDPA", "SDPA, compiled") > 0
        and differs(step_row("SDPA"), step_row("SDPA, compiled"))
        and change("busy, ms", "SDPA", "SDPA, compiled") < 0
        and change("host, ms", "SDPA", "SDPA, compiled") > 0
        else ""
    )
    + "If the host is the cause, the loss must disappear without it."
)

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
        "ours, µs": round(own),
        "PyTorch's, µs": round(theirs),
        "ours longer in a step, ms": round(calls * (own - theirs) / 1e3, 1),
    }
    for name, (chapter, calls) in calls_of.items()
    for own, theirs in [of_host(chapter)]
    if own == own and theirs == theirs
]
more_of_host = sum(row["ours longer in a step, ms"] for row in host_rows)
more_eager = change("step, ms", "SDPA", "+ dropout")

# %%

# Folded: What does one call cost the host?
lab.table(
    host_rows,
    "Microseconds in which one call of an operator, forward and backward, keeps the host busy, as "
    f"the page on hardware lists them. In sum ours keep it busy for {more_of_host:.0f} ms more in "
    f"an eager step, {100 * more_of_host / more_eager:.0f} % of the {more_eager:.0f} ms that its "
    "median is above that with SDPA; steps that wait for the host scatter widely",
)

# %%

# Folded: What are the numbers of all versions, and which kinds of kernels get shorter?
lab.table(
    [
        {
            "version": row["version"],
            "step, ms": shown(row["step, ms"]),
            "p20 to p80": f"{row['p20, ms']:.1f} to {row['p80, ms']:.1f}",
            "host": shown(row.get("host, ms")),
            "peak, GiB": shown(row["peak, GiB"]),
        }
        | {kind: shown(row[f"{kind}, ms"]) for kind in KINDS}
        | {"kernels": shown(row["busy, ms"])}
        for row in timed(steps.rows)
    ],
    f"Milliseconds of a step of large at 1,024 (the median of {ROUNDS * TURN} steps, or of "
    f"{GRAPH_ROUNDS * TURN} of a graph, and the middle 60 % of them), of the host to launch one "
    "when nothing is queued, and of the kernels by kind in other steps, under the profiler; and "
    "the peak of memory. A host that is a thousand launches ahead has to wait for the GPU, so that "
    "its time is an upper bound. SDPA ran with its fastest "
    f"backend, {listed(sorted({row['SDPA backend'] for row in steps.rows}))}",
)

# %%
# A graph takes the host away
# ---------------------------
#
# How fast are the same kernels if no launch delays them? A :term:`CUDA graph` records the launches
# of a step once and hands all of them to the GPU in one call. ``training.whole()`` is a step,
# forward, backward and optimiser, and we capture all of it.
#
# .. code-block:: python
#
#    with torch.cuda.stream(stream):  # not in the graph: what a stream sets up once
#        training.whole()
#    for group in optimizer.param_groups:
#        group["capturable"] = True   # AdamW counts its steps on the GPU
#    with torch.cuda.graph(graph, stream=stream):
#        training.whole()             # recorded, and not run
#    graph.replay()                   # one step, with new masks of dropout

# Folded: The function that captures, whole
lab.source(decoder.captured)

# %%
# Rows of one mode in this table differ only in their operators; the same operators in two modes
# differ only in what compiles or launches them.

lab.table(
    [
        {
            "mode": mode,
            "operators": label,
            "step, ms": shown(step("step, ms", name)),
            "kernels, ms": shown(step("busy, ms", name)),
            "host, ms": shown(step("host, ms", name)),
        }
        for mode, versions in OPERATORS_OF.items()
        for name, label in versions.items()
    ]
    if steps.rows
    else [],
    "A step of large at 1,024. Both graphs are of compiled steps; a graph of PyTorch's formula was "
    "not measured",
)

# %%

# Reading
graphed = "Kernel Book, CUDA graph"
shorter = {  # by how much a change shortens the kernels
    "operators": -change("busy, ms", "PyTorch", "+ dropout"),
    "SDPA": -change("busy, ms", "PyTorch", "SDPA"),
    "compiling the formula": -change("busy, ms", "PyTorch", "torch.compile"),
    "compiling ours": -change("busy, ms", "+ dropout", "Kernel Book"),
    "the graph": -change("busy, ms", "Kernel Book", graphed),
}
lab.read(
    (
        "**Operators, ours as well as SDPA's, shorten the kernels most. Compiling shortens those "
        "of the formula, and ours hardly. The graph shortens no kernel, but brings the step down "
        "to its kernels.** "
        if min(shorter["operators"], shorter["SDPA"])
        > shorter["compiling the formula"]
        > 10
        and 0 <= shorter["compiling ours"] < 5
        and shorter["the graph"] <= 0
        and step("step, ms", graphed) < 1.05 * step("busy, ms", graphed)
        else "The last rows show what is left without the host. "
    )
    + (
        "So it was the host: in a graph the same kernels make our step as fast as SDPA's."
        if not differs(step_row("SDPA, CUDA graph"), step_row(graphed))
        and our_took > 1.1 * sdpa_took
        else ""
    )
)

# %%
# Does this hold beyond one model? We race the two graphs in four more models; at 16,384 the batch
# is a single sequence. **We call two times different if they are at least 1 % apart and the middle
# 60 % of the steps, p20 to p80, do not overlap.**

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


def spread(row):
    """The median of a version's times, with the middle 60 % of them."""
    if row["step, ms"] is None:
        return "—"
    return f"{row['step, ms']:.1f} ({row['p20, ms']:.1f}–{row['p80, ms']:.1f})"


race, without, graphs = raced(), list(GRAPHS), list(GRAPHS.values())


def apart(model):
    """Whether the graphs of a model differ, by the rule."""
    return differs(*(race[model][name] for name in graphs))


def verdict(model):
    """How much less or more time our graph takes, if the two differ."""
    fast = ratio(race[model], *graphs)
    if fast != fast:
        return "—"
    if not apart(model):
        return "no difference"
    return f"{abs(100 / fast - 100):.1f} % {'less' if fast > 1 else 'more'}"


lab.table(
    [
        {
            "model": model,
            "SDPA": spread(rows[graphs[0]]),
            "the book's": spread(rows[graphs[1]]),
            "ours takes": verdict(model),
            "launched by the host": " / ".join(
                shown(rows[name]["step, ms"], 0) for name in without
            ),
        }
        for model, rows in race.items()
    ],
    "Milliseconds of a compiled step as a CUDA graph, p50 (p20–p80); and launched by the host, "
    "SDPA / the book's",
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


near, far = f"large at {CONTEXT:,}", f"large at {LONG:,}"
lab.read(
    (
        f"**The book's step takes less time in {listed(ahead)}"
        if ahead
        else "**The book's step takes less time in no model"
    )
    + (f", and more in {listed(behind)}" if behind else ", and more in none")
    + ".** "
    + (f"Not measured: {'; '.join(failed)}." if failed else "")
)

# %%
# What is left to differ without the host lies on the GPU, and three profiles of each graph, taken
# in turn, show in which kernels. A bar shows by how much longer a kind of kernels takes with the
# book's operators. AdamW, the same in both, is left out.


# Reading
def longer(model, column):
    """By how many milliseconds the book's graph takes longer than that with SDPA."""
    theirs, own = (race.get(model, {}).get(name, {}).get(column) for name in graphs)
    return nan if None in (theirs, own) else own - theirs


# %%

# Drawing
APART = {
    "linear layers": lab.colour("matmul"),
    "attention": lab.colour("Kernel Book"),
    "between": lab.colour("PyTorch"),
}


def kinds_in_words(_):
    said = (
        f"{model}: "
        + ", ".join(f"{kind} {longer(model, f'{kind}, ms'):+.1f}" for kind in KINDS)
        for model in race
    )
    return f"Milliseconds that kernels take longer with the book's: {'; '.join(said)}."


def kind_bars(axes, _):
    axes.figure.set_size_inches(5.4, 5.2)
    axes.grid(axis="y", visible=False)
    axes.axvline(0, color=lab.colour("copy"), linewidth=0.9)
    for place, model in enumerate(race):
        for row, (kind, ink) in enumerate(APART.items()):
            apart_by = longer(model, f"{kind}, ms")
            where_to = place + 0.27 * (row - 1)
            axes.barh(where_to, apart_by, 0.24, color=ink)
            axes.annotate(
                f"{apart_by:+.1f}".replace("-", "−"),
                (apart_by, where_to),
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
    handles = [axes.barh(0, 0, color=ink, label=kind) for kind, ink in APART.items()]
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
gained = {
    kind: [model for model in race if longer(model, f"{kind}, ms") < 0]
    for kind in ("attention", "between")
}
same = {model: abs(longer(model, "linear layers, ms")) for model in race}
scatter = [rows[name].get(RANGE) for rows in race.values() for name in graphs]
scatter = max((value for value in scatter if value is not None), default=nan)
lab.read(
    "**With the book's operators, what is between takes less time in "
    f"{len(gained['between'])} of {len(race)} models, and attention in "
    f"{len(gained['attention'])}.** The linear layers, the same kernels in both graphs, say how "
    f"far to trust such a bar: they differ by up to {max(same.values(), default=nan):.1f} ms, and "
    f"between the profiles of one graph by up to {scatter:.1f}."
)

# %%

# Reading
lab.read(
    (
        f"At {LONG:,}, where attention is {share_of[LONG]:.0f} % of the FLOPs of a layer instead "
        f"of {share_of[CONTEXT]:.0f} %, it saves {-longer(far, 'attention, ms'):.1f} ms. "
        if far in gained["attention"]
        else ""
    )
    + "".join(
        f"**In {model} attention takes {longer(model, 'attention, ms'):.1f} ms longer**"
        f"{padded(model)}. "
        for model in race
        if model not in gained["attention"]
    )
)

# %%

# Folded: What are the numbers of this figure?
lab.table(
    [
        {"model": model}
        | {
            kind: " / ".join(shown(rows[name][f"{kind}, ms"]) for name in graphs)
            for kind in KINDS
        }
        | {"all": " / ".join(shown(rows[name]["busy, ms"]) for name in graphs)}
        | {"race": " / ".join(shown(rows[name]["step, ms"]) for name in graphs)}
        | {"range": " / ".join(shown(rows[name].get(RANGE)) for name in graphs)}
        for model, rows in race.items()
    ],
    "Milliseconds of the kernels of a step, SDPA / the book's, the medians of three profiles of a "
    "graph; beside them the time of a step in the race, and by how much the linear layers of the "
    "three profiles differ",
)

# %%

# Folded: Which kernels take most?
longest_of = lab.measure(
    "The kernels that take most in a compiled step", lambda: list(longest_kernels)
)
longest_of

# %%
# What breaks it
# --------------
#
# **Parameters in bfloat16.** Autocast leaves parameters in float32, and that is not waste, because
# an update that is less than half of the gap between neighbours in bfloat16 is rounded away,
# however often it comes.

for dtype in (torch.float32, torch.bfloat16):
    weight = torch.ones((), dtype=dtype)
    for _ in range(1000):
        weight -= 1e-3
    print(f"{dtype}: {weight.item():.4f} after 1,000 updates of -0.001")

# %%
# **A graph replayed on other data.** A CUDA graph reads its batch where it lay when the graph was
# captured. So ``training.tokens.copy_(batch)`` gives it the next batch, and ``training.tokens =
# batch`` does not, because this only names other memory: the next replay would train on the old
# batch again, without an error. Only a GPU can capture a graph, so a function that keeps its tensor
# stands in for one:

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
# Most of a step in bfloat16 goes to operations that move bytes, and most of its memory to what
# forward keeps for backward. Attention without a table removes most of that time and halves the
# peak of the memory.

# Reading
finished = graphed
waiting = [
    model
    for model, rows in race.items()
    if ratio(rows, *without) < 0.9 and differs(*(rows[name] for name in without))
]
lab.read(
    "Eager, a step of large takes "
    f"{step('step, ms', 'PyTorch'):.0f} ms with the formula, "
    f"{step('step, ms', 'SDPA'):.0f} with SDPA and "
    f"{step('step, ms', '+ dropout'):.0f} with the book's operators"
    + (
        ", which keep the host busy for longer. "
        if step("host, ms", "+ dropout") > step("host, ms", "SDPA")
        else ". "
    )
    + f"**As a CUDA graph it takes {step('step, ms', finished):.0f} with the book's and "
    f"{step('step, ms', 'SDPA, CUDA graph'):.0f} with SDPA"
    + (", no difference by our rule.**" if near in level else ".**")
)

# %%

# Reading
lab.read(
    f"Our graph is ahead of SDPA's in {len(ahead)} of {len(race)} models, and behind in "
    f"{len(behind)}. "
    + (
        f"Launched by the host, our compiled steps of {listed(waiting)} are far behind: "
        "**where the kernels of a model are this short, take SDPA or capture a graph.**"
        if waiting
        else ""
    )
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
# **2. What fits?** By the count, what is the longest context, in powers of two, at which 2.7B
# trains in 140 GB with a batch of 4: in float32, under autocast, and under autocast without the
# table of weights?

# %%

# Solution: what fits?
rows = []
for what, dtype, squares in (
    ("float32", "float32", True),
    ("autocast", "bfloat16", True),
    ("autocast, no table", "bfloat16", False),
):
    size, fits = SIZES["2.7B"], 0
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
