"""
Measuring a kernel
==================

Time one short kernel in five ways and you get five answers, most of which tell more about the CPU
than about the kernel. *Which one is the kernel's, how far can we trust it, and what can make the
same kernel several times slower?*

You will learn

- what each way of timing measures besides the kernel, and how to keep it out;
- how many runs a claim needs, and how caches, clocks and power shift a result;
- how to judge a time by the roofline, and how to explain a bad one with the compiler and ``ncu``.

Without an NVIDIA GPU the scripts show the numbers of a recorded run.
"""

# sphinx_gallery_thumbnail_number = 5
import csv
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from unittest import mock

import numpy
from matplotlib.patches import Rectangle

from kernelbook import dropout, lab, reference, runtime, seeded_dropout, softmax
from kernelbook.lab import results
from kernelbook.lab.bench import MOST_REPEATS, REPEAT_MS, ROUNDS, _time_in_turn
from kernelbook.lab.schema import evaluate
from kernelbook.ops.dropout import _plan, seeded_dropout_kernel
from kernelbook.ops.softmax.forward import row_fwd_kernel

lab.start("measuring", "kernelbook.ops.dropout", "kernelbook.ops.softmax")

# %%
# Five ways to time one call
# --------------------------
#
# To make a kernel faster, you first need a time that is the kernel's alone. We time the bfloat16
# softmax of :doc:`a later chapter </chapters/softmax>`, which reads a matrix once and writes one of
# the same size. The obvious way is to read the clock before and after the call.


def clock(run):
    """Microseconds until the call returns."""
    begin = time.perf_counter()
    run()
    return 1e6 * (time.perf_counter() - begin)


# %%
# This measures the wrong machine. Python runs on the :term:`host`, the CPU, which only queues work
# for the GPU, like a waiter who pins an order up in the kitchen and leaves long before the dish is
# ready.
#
# .. admonition:: Key idea
#    :class: kb-key
#
#    A call to a GPU operator is *asynchronous*: the host puts the kernel into a queue, called a
#    :term:`stream`, and moves on without waiting for it to finish.
#
# ``clock`` therefore measures how long the host takes to queue the work. To include the kernel,
# wait for the GPU: ``torch.cuda.synchronize`` returns once the queue is empty.


def clock_and_wait(run):
    """Microseconds until the GPU has finished."""
    begin = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return 1e6 * (time.perf_counter() - begin)


# %%
# This time covers the whole kernel, but also what the host needs to launch it and to notice that it
# has finished. To leave the host out, let the GPU read its own clock: a :term:`CUDA event` is a
# marker in the queue, and the GPU records when it gets there.


def events(run, before=lambda: None):
    """Microseconds that the GPU takes from one event to the next."""
    before()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return 1e3 * start.elapsed_time(end)


# %%
# Even this can measure the host. If the queue is empty, the GPU reaches the first event at once and
# then waits for the host to launch the kernel, and that wait counts. The cure is a *pause*:
# ``before`` keeps the GPU occupied while the host queues everything else. The orange spans in the
# picture show what each way measures.
#
# .. image:: /figures/measuring-timelines.svg
#    :alt: Timelines of the host and the GPU for four ways of timing. The clock measures the launch.
#          With a wait, it measures launch, kernel and wait. Events include the GPU's wait for the
#          host. Events after a pause enclose the kernel alone.
#
# One effect of the previous run remains: a small input may still be in the :term:`L2` cache. We
# time the cold case: before the pause, the fifth way overwrites the cache with more zeros than any
# L2 holds.
#
# The function below does it all. Its pause, ``torch.cuda._sleep``, is private to PyTorch and counts
# clock cycles: two million take about a millisecond, longer than the host needs to queue the call.

import statistics

import torch


def gpu_time(run, n=50):
    """Median microseconds that the GPU takes for a call, from a cold cache."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(n + 5):  # the first five compile and warm up
        torch.cuda.synchronize()
        torch.zeros(2**28, dtype=torch.int8, device="cuda")  # flush L2
        torch.cuda._sleep(2_000_000)  # while the host queues what follows
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * start.elapsed_time(end))
    return statistics.median(times[5:])


# %%
# We try all five ways on a large softmax, 16,384 rows of 8,192 numbers, and on a small one, 64 rows
# of 1,024.


def pause():
    torch.cuda._sleep(2_000_000)


def cold():
    torch.zeros(2**28, dtype=torch.int8, device=runtime.DEVICE)
    pause()


def median(way, run, n=50):
    times = []
    for _ in range(n + 5):  # the first five compile and warm up
        torch.cuda.synchronize()
        times.append(way(run))
    return statistics.median(times[5:])


WAYS = {
    "clock": clock,
    "clock and wait": clock_and_wait,
    "events": events,
    "events after a pause": partial(events, before=pause),
    "events, pause and flush": partial(events, before=cold),
}


def matrix(rows, columns):
    return torch.randn(rows, columns, device=runtime.DEVICE, dtype=torch.bfloat16)


def timed_in_five_ways():
    runs = {
        "large, µs": partial(softmax, matrix(16384, 8192)),
        "small, µs": partial(softmax, matrix(64, 1024)),
        "nothing, µs": lambda: None,
    }
    return [
        {"way": name} | {what: round(median(way, run), 1) for what, run in runs.items()}
        for name, way in WAYS.items()
    ]


five_ways = lab.measure("One call, timed in five ways", timed_in_five_ways)

# %%


# Drawing
def bars_in_words(columns, unit):
    """The alt text of bars: what each is, and how long."""

    def words(rows):
        named = [
            ", ".join(
                f"{label} {row[column]:,.3g}" for column, label in columns.items()
            )
            for row in rows
        ]
        rows = (next(iter(row.values())) for row in rows)
        found = (f"{name}: {bar}" for name, bar in zip(rows, named, strict=True))
        return f"Bars, {unit}. {'; '.join(found)}."

    return words


def bars(columns, unit):
    """Draw a bar for each row of a table and each of some columns, which have labels."""

    def how(axes, rows):
        each = 0.8 / len(columns)
        axes.figure.set_size_inches(5.4, 1.3 + 0.3 * len(rows) * len(columns))
        for number, (column, label) in enumerate(columns.items()):
            ink = lab.colour("copy" if number else "Kernel Book")
            found = [row[column] for row in rows]
            places = [
                row + (number - (len(columns) - 1) / 2) * each
                for row in range(len(rows))
            ]
            axes.barh(places, found, 0.9 * each, color=ink, label=label)
            for place, value in zip(places, found, strict=True):
                axes.annotate(
                    f"{value:,.1f}".replace("-", "−"), (max(value, 0), place),
                    (6, 0), textcoords="offset points", va="center", fontsize=10,
                )  # fmt: skip
        axes.set_yticks(range(len(rows)), [next(iter(row.values())) for row in rows])
        axes.set(xlabel=unit)
        axes.margins(x=0.12)
        axes.grid(axis="y", visible=False)
        axes.tick_params(axis="y", length=0)
        axes.invert_yaxis()
        if len(columns) == 1:
            axes.containers[0].set_label("_alone")  # needs no legend

    return how


SOFTMAXES = {"large, µs": "large softmax", "small, µs": "small softmax"}
lab.draw(
    five_ways,
    "One call of softmax, timed in five ways",
    bars_in_words(SOFTMAXES, "µs"),
    bars(SOFTMAXES, "µs, median of 50 calls"),
)

# %%

# Measuring
nan = float("nan")


def cell(table, row, column):
    """A number of a recorded table, by what stands first in its row; NaN before it is recorded."""
    rows = {next(iter(found.values())): found for found in table.rows}
    return rows[row][column] if rows else nan


large, small = (
    {way: cell(five_ways, way, f"{size}, µs") for way in WAYS}
    for size in ("large", "small")
)

best = "events, pause and flush"
if small[best] > 0:  # "most of which" in the introduction
    assert 2 * sum(us > 2 * small[best] for us in small.values()) > len(small)
paused = "events after a pause"
nothing = {way: cell(five_ways, way, "nothing, µs") for way in WAYS}

# %%

# Folded: The numbers, also of a call that does nothing
lab.together(
    five_ways,
    lab.read(
        "Around a call that does nothing, `clock_and_wait` shows "
        f"{nothing['clock and wait']:.0f} µs, and two events without a pause show "
        f"{nothing['events']:.0f}. The rest of the overhead comes with the call."
    ),
)

# %%

# Reading
added = [
    found[way] - found[paused]
    for way in ("clock and wait", "events")
    for found in (large, small)
]
lab.together(
    lab.read(
        f"`clock` shows {large['clock']:.0f} µs for the large softmax and {small['clock']:.0f} for "
        f"the small one, although the large one takes {large[best] / small[best]:.0f} times as "
        "long: it never sees the kernel."
    ),
    lab.read(
        "At both sizes, `clock_and_wait` and two events without a pause show "
        f"{min(added):.0f} to {max(added):.0f} µs more than events after a pause. This overhead is "
        "the host's, because "
        + (
            "it hardly depends on the size, and "
            if max(added) < 1.3 * min(added)
            else ""
        )
        + "a pause takes it out of the events."
    ),
)

# %%

# Reading
lab.read(
    f"Even two events with nothing between them are {nothing[best]:.1f} µs apart. We do not "
    "subtract this, because part of it may overlap the kernel. Of 20 µs it could be "
    f"{100 * nothing[best] / 20:.0f} %, so **read times below 20 µs as upper bounds.**"
)

# %%
# Most figures in this book compare kernels and therefore use the fifth way. A user who waits for
# one answer also waits for the host, and then ``clock_and_wait`` is the honest way.
#
# **Is it right?** A kernel that skips half of its work is fast. Before you time one, compare its
# result with float64 under a stated tolerance.


# %%


# Measuring
def cases():
    shapes = ((64, 1024),) if runtime.INTERPRETED else ((64, 1024), (16384, 8192))
    for rows, columns in shapes:
        x = matrix(rows, columns)
        truth = reference.softmax(x, -1)
        what = f"({rows}, {columns})"
        yield lab.Case(f"softmax {what}", "forward", softmax(x), x.softmax(-1), truth)
    x = matrix(64, 1024)
    keep = reference.keep_mask(
        torch.arange(x.numel(), device=x.device).view(x.shape), 0.5, 7, rounds=7
    )
    ours, truth = seeded_dropout(x, 0.5, 7), reference.seeded_dropout(x, 0.5, 7)
    yield lab.Case("dropout (64, 1024)", "forward", ours, x * keep / 0.5, truth)


def sum_of_1000(number, accumulator):
    total = torch.zeros((), dtype=accumulator)
    for _ in range(1000):
        total += number  # PyTorch casts number to the dtype of total
    return total.item()


FOUR_WAYS = {  # of numbers: accumulators, and whether the numbers are cast before
    "float32": [("float32", False)],
    "float16": [("float16", False), ("float32", False), ("float32", True)],
    "bfloat16": [("bfloat16", False), ("float32", False)],
}


def sums():
    for numbers, ways in FOUR_WAYS.items():
        for accumulator, cast in ways:
            number = torch.tensor(0.01, dtype=getattr(torch, numbers))
            into = getattr(torch, accumulator)
            found = sum_of_1000(number.to(into) if cast else number, into)
            yield {
                "numbers in": numbers + (", cast first" if cast else ""),
                "accumulator in": accumulator,
                "sum": f"{found:.4f}",
                "off by, %": f"{100 * (found / 10 - 1):+.2f}".replace("-", "−"),
            }


rows = list(sums())
by_way = {(row["numbers in"], row["accumulator in"]): row["sum"] for row in rows}
assert by_way["float16", "float32"] == by_way["float16, cast first", "float32"]

# %%

# Reading
lab.read(
    "A common error is to sum in too few bits. Add 0.01 a thousand times in bfloat16, and you get "
    f"{float(by_way['bfloat16', 'bfloat16']):.0f} instead of 10 (the fold shows why). **Numbers "
    "may be stored in 16 bits, but sums belong in 32.**"
)

# %%

# Folded: Why 0.01, added a thousand times, makes 4, and the errors of softmax and dropout
lab.together(
    lab.source(sum_of_1000),
    lab.table(rows, "0.01, added a thousand times"),
    lab.read(
        "The gap between neighbouring floats grows with their size. In bfloat16 it is 1/32 from 4 "
        "on, so 4 + 0.01 rounds back to 4 and the sum stops growing. In float16 it keeps growing, "
        "but every addition is rounded to few bits."
    ),
    lab.read(
        "With a float32 accumulator, little is lost beyond the rounding of 0.01 itself, which is "
        f"{torch.tensor(0.01, dtype=torch.bfloat16).item():.5f} in bfloat16. Casting the number to "
        "float32 first makes no difference, since PyTorch casts before it adds."
    ),
    lab.read(
        "The tolerance is twice PyTorch's own error or one unit in the last place (ulp), whichever "
        "is larger."
    ),
    lab.check("What is timed", cases(), title="softmax and dropout"),
)

# %%
# CUDA graphs
# -----------
#
# A small kernel, then, takes more time on the host than on the GPU: per call, Python spends tens of
# microseconds checking arguments, allocating the output and launching the kernel.


# Measuring
import triton


def host_time(run, calls=20):
    torch.cuda.synchronize()
    return clock(lambda: [run() for _ in range(calls)]) / calls


def layers():
    x = matrix(64, 1024)
    y, n = torch.empty_like(x), x.numel()
    leaf = x.clone().requires_grad_()
    launch = _plan(seeded_dropout_kernel, n, 2**31, 2.0, N_ROUNDS=7)
    grid = (triton.cdiv(n, 1024),)
    ways = {
        "torch.empty_like": lambda: torch.empty_like(x),
        "copy_ of PyTorch": lambda: y.copy_(x),
        "a cached launch": lambda: launch(x, y, 7),
        "kernel[grid](...)": lambda: seeded_dropout_kernel[grid](
            x, y, 7, n, 2**31, 2.0, BLOCK_SIZE=1024, N_ROUNDS=7
        ),
        "seeded_dropout": lambda: seeded_dropout(x, 0.5, 7),
        "seeded_dropout, with autograd": lambda: seeded_dropout(leaf, 0.5, 7),
        "dropout, drawing a seed": lambda: dropout(x, 0.5),
    }
    fastest = dict.fromkeys(ways, float("inf"))
    for _ in range(60):
        for name, run in ways.items():
            fastest[name] = min(fastest[name], host_time(run))
    return [{"call": name, "µs": round(took, 2)} for name, took in fastest.items()]


host = lab.measure("What one call of dropout costs the host", layers)

# %%


# Measuring
IN_A_ROW = (1, 10, 100, 1000, 10000)


def calls_in_a_row(rounds=5):
    run = partial(softmax, matrix(64, 1024))
    median(clock_and_wait, run)
    times = {n: [] for n in IN_A_ROW}
    for _ in range(rounds):
        for n, found in times.items():

            def several(n=n):
                for _ in range(n):
                    run()

            for _ in range(max(1, 100 // n)):
                torch.cuda.synchronize()
                found.append(clock_and_wait(several) / n)
    return [
        {
            "calls in a row": n,
            "µs per call, median": round(statistics.median(found), 1),
            "fastest": round(min(found), 1),
            "slowest": round(max(found), 1),
        }
        for n, found in times.items()
    ]


# %%

# Measuring
in_a_row = lab.measure("A softmax of 64 × 1,024, by clock and wait", calls_in_a_row)

# %%


# Drawing
def host_parts(rows):
    """The parts of a call of dropout: each with where it begins and ends, in µs."""
    took = {row["call"]: row["µs"] for row in rows}
    made, launched = took["torch.empty_like"], took["a cached launch"]
    whole, drawn = took["seeded_dropout"], took["dropout, drawing a seed"]
    seed = drawn - whole
    ends = {
        "drawing a seed": seed,
        "making the output": seed + made,
        "launching the kernel": seed + made + launched,
        "the rest of seeded_dropout": drawn,
    }
    begins = [0, *ends.values()]
    return [
        (part, begins[place], end) for place, (part, end) in enumerate(ends.items())
    ]


BESIDES = {
    "kernel[grid](...)": "Triton's own launch",
    "copy_ of PyTorch": "all of y.copy_(x)",
}


def host_in_words(rows):
    took = {row["call"]: row["µs"] for row in rows}
    parts = "; ".join(
        f"{part} {end - begin:.1f}" for part, begin, end in host_parts(rows)
    )
    beside = "; ".join(f"{label} {took[call]:.1f}" for call, label in BESIDES.items())
    return f"Bars, µs of the host, each part from where the last ends: {parts}. Beside: {beside}."


def host_bars(axes, rows):
    took = {row["call"]: row["µs"] for row in rows}
    parts = host_parts(rows)
    beside = [(label, 0, took[call]) for call, label in BESIDES.items()]
    places = [*range(len(parts)), *(len(parts) + 0.5 + n for n in range(len(beside)))]
    for place, (_, begin, end) in zip(places, parts + beside, strict=True):
        ink = lab.colour("Kernel Book" if place < len(parts) else "copy")
        axes.barh(place, end - begin, 0.72, left=begin, color=ink)
        axes.annotate(
            f"{end - begin:.1f}", (end, place), (4, 0), va="center",
            textcoords="offset points", fontsize=10,
        )  # fmt: skip
        if 0 < place < len(parts):  # a thread from the part before
            axes.plot([begin, begin], [place - 1, place], color=ink, linewidth=0.8)
    axes.figure.set_size_inches(5.4, 3.3)
    axes.set_yticks(places, [label for label, *_ in parts + beside])
    axes.set(xlabel="µs per call on the host, fastest of 60 series of 20")
    axes.margins(x=0.12)
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()


# %%

# Folded: Where the host's time goes, and one call alone beside many in a row
alone, again = small["clock and wait"], cell(in_a_row, 1, "µs per call, median")
took = {
    name: cell(host, name, "µs")
    for name in (
        "a cached launch",
        "kernel[grid](...)",
        "dropout, drawing a seed",
        "copy_ of PyTorch",
    )
}
lab.together(
    lab.draw(
        host, "Where the host's time of one dropout goes", host_in_words, host_bars
    ),
    lab.read(
        "We take apart a call to dropout, which also draws a random seed. It keeps the host busy "
        f"for {took['dropout, drawing a seed']:.0f} µs. We time each part in series of twenty "
        "calls and show the fastest of 60 series, since other work on the host can only add to the "
        "time. The rest of `seeded_dropout` is Python code, which checks the arguments and plans "
        "the launch."
    ),
    lab.read(
        "The book's operators remember the compiled kernel, and launch it in "
        f"{took['a cached launch']:.1f} µs. Triton's own launch, `kernel[grid](...)`, examines "
        f"every argument to find that kernel, and takes {took['kernel[grid](...)']:.1f}. All of "
        f"PyTorch's `copy_`, whose host code is C++, takes {took['copy_ of PyTorch']:.1f}."
    ),
    lab.read(
        "A single call, timed with a wait, takes longer than one of many in a row, because many "
        "calls share one wait and the GPU works while the host queues the next call:"
    ),
    in_a_row,
    lab.read(
        "The host's speed changes even within one run of this page: for the same single call, "
        f"`clock_and_wait` shows {again:.0f} µs here and {alone:.0f} in the first figure. We do "
        "not know why. Compare times of the host only within one table."
        if max(alone, again) > 1.2 * min(alone, again)
        else f"For the same single call, `clock_and_wait` shows {again:.0f} µs here and "
        f"{alone:.0f} in the first figure."
    ),
)

# %%
# A :term:`CUDA graph` lets many kernels share this cost: it records their launches and replays them
# with one call.


# Drawing
def launches(axes):
    """Four short kernels on host and GPU: launched one by one, and replayed as a graph."""
    ours, grey = lab.colour("Kernel Book"), lab.colour("copy")

    def box(y, start, length, words, fill, ink):
        axes.barh(y, length, 0.75, start, color=fill, edgecolor=ink, linewidth=1.1)
        axes.text(start + length / 2, y, words, ha="center", va="center", fontsize=10)

    for top, title in ((0, "one by one"), (3, "as a graph")):
        graph = top > 0
        axes.text(-1.6, top - 0.85, title, va="center", fontweight="bold")
        for y, machine_name in ((top, "host"), (top + 0.95, "GPU")):
            axes.text(-0.2, y, machine_name, va="center", ha="right", color=grey)
        for turn in range(1 if graph else 4):
            box(top, 3 * turn, 2.92, "replay" if graph else "launch", "#f6f8fa", grey)
        for turn in range(4):
            start = 3 + turn if graph else 3 * (turn + 1)
            box(top + 0.95, start, 0.92, "k", "#eaf2fb", ours)
            if turn and not graph:
                axes.text(
                    start - 1.04, top + 0.95, "waits", ha="center", va="center",
                    fontsize=10, color=grey,
                )  # fmt: skip
    axes.set(xlim=(-1.7, 13.1), ylim=(4.5, -1.3), xticks=[], yticks=[])
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)


lab.sketch(
    "Four short kernels, launched one by one and as a graph",
    "Two timelines of the host and the GPU. One by one: four launches, and after each the GPU runs "
    "a short kernel, k, and waits for the next. As a graph: one replay, then four in a row.",
    launches,
    height=2.3,
)

# %%
# We time ten softmaxes of 1,024 columns with ``clock_and_wait``, called one by one and replayed.


def recorded_graph(run):
    run()  # compiles the kernel, because a graph records only launches
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


# %%


def graphs():
    rows = []
    for height in (16, 256, 4096, 65536):
        x = matrix(height, 1024)

        def ten(x=x):
            for _ in range(10):
                softmax(x)

        rows.append(
            {
                "rows": height,
                "one by one, µs": round(median(clock_and_wait, ten), 1),
                "as a graph, µs": round(median(clock_and_wait, recorded_graph(ten)), 1),
                "kernels alone, µs": round(
                    10 * median(WAYS[best], partial(softmax, x)), 1
                ),
            }
        )
    return rows


graph = lab.measure("Ten softmaxes in a row", graphs)

# %%

lab.table(
    [
        {"rows": f"{row['rows']:,}"}
        | {what: f"{row[what]:.0f}" for what in ("one by one, µs", "as a graph, µs")}
        for row in graph.rows
    ],
    "Ten softmaxes, timed with clock_and_wait",
)

# %%

# Reading
heights = [row["rows"] for row in graph.rows] or [16, 256, 4096, 65536]
as_graph, singly = (
    {row["rows"]: row[f"{way}, µs"] for row in graph.rows}
    or dict.fromkeys(heights, nan)
    for way in ("as a graph", "one by one")
)
*bound, many = (
    heights  # where the host takes longer than the kernels, and where it does not
)
gains = [singly[rows] / as_graph[rows] for rows in bound]
by_host = [singly[rows] for rows in bound]
alone_there = cell(graph, many, "kernels alone, µs")
lab.together(
    lab.read(
        f"Up to {bound[-1]:,} rows, the graph is {min(gains):.0f} to {max(gains):.0f} times as "
        "fast, because one call replaces ten."
        + (
            " (The fold shows how unsteady the host is.)"
            if max(by_host) > 1.2 * min(by_host)
            else ""
        )
    ),
    lab.read(
        f"At {many:,} rows, it saves {100 * (1 - as_graph[many] / singly[many]):.0f} %"
        + (
            ", because the kernels take longer than their launches"
            if alone_there > max(by_host)
            else ""
        )
        + ". A graph pays off for short kernels whose shapes and addresses stay the same, because "
        "it repeats the recorded launches exactly."
    ),
)

# %%
# The first calls
# ---------------
#
# A kernel's first call can spend seconds compiling, which says nothing about its speed. We time
# four functions from their first call to their tenth: a softmax kernel; a dropout kernel, chosen
# from nine configurations (:term:`autotuning`); softmax under ``torch.compile``; and a matmul from
# :term:`cuBLAS`. Guess which first call takes longest.

CALLS = (1, 2, 3, 10)


def first_calls():
    x, a = matrix(4096, 4096), matrix(2048, 2048)
    y = torch.empty_like(x)
    kernel = triton.jit(row_fwd_kernel.fn)  # another one, which nobody has compiled yet
    configs = [
        triton.Config({"BLOCK_SIZE": size}, num_warps=warps)
        for size in (512, 1024, 2048)
        for warps in (2, 4, 8)
    ]
    tuned = triton.autotune(configs, key=["n_elements"])(
        triton.jit(seeded_dropout_kernel.fn)
    )
    compiled = torch.compile(lambda x: torch.softmax(x, -1))

    def grid(meta):
        return (triton.cdiv(x.numel(), meta["BLOCK_SIZE"]),)

    runs = {
        "Triton": lambda: kernel[(4096,)](x, y, 4096, 4096, 4096, 1, 4096, num_warps=2),
        "Triton, autotuned": lambda: tuned[grid](
            x, y, 7, x.numel(), 2**31, 2.0, N_ROUNDS=7
        ),
        "torch.compile": lambda: compiled(x),
        "matmul": lambda: a @ a,
    }
    with mock.patch.dict(os.environ, TRITON_ALWAYS_COMPILE="1"):  # not from its cache
        times = {
            name: [clock_and_wait(run) for _ in range(max(CALLS))]
            for name, run in runs.items()
        }
    return [
        {"call": call}
        | {name: round(found[call - 1] / 1e3, 3) for name, found in times.items()}
        for call in CALLS
    ]


first = lab.measure("Milliseconds of the first calls", first_calls)

# %%


# Drawing
NAMES = {
    "Triton": "softmax",
    "Triton, autotuned": "dropout, autotuned",
    "torch.compile": "softmax, torch.compile",
    "matmul": "matmul, cuBLAS",
}


def in_units(us):
    """A time in words, in the unit that suits it."""
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if us >= size:
            return f"{us / size:.{1 if unit == 's' else 0}f} {unit}"
    return f"{us:.0f} µs"


def first_calls_in_words(rows):
    found = (
        f"{label} "
        + ", ".join(f"call {row['call']} {in_units(1e3 * row[name])}" for row in rows)
        for name, label in NAMES.items()
    )
    return f"Dots, the time of a call: {'; '.join(found)}."


def first_call_dots(axes, rows):
    """The calls of each function on one line, with the first and the last named."""
    ours, grey = lab.colour("Kernel Book"), lab.colour("copy")
    axes.figure.set_size_inches(5.4, 2.7)
    for place, name in enumerate(NAMES):
        took = [1e3 * row[name] for row in rows]
        axes.plot(took, [place] * len(took), color=grey, linewidth=0.8, zorder=1)
        axes.plot(took[0], place, "o", color=ours, ms=8, label="call 1")
        axes.plot(
            took[1:-1],
            [place] * len(took[1:-1]),
            "o",
            color=grey,
            ms=5,
            label="calls 2 and 3",
        )
        axes.plot(
            took[-1],
            place,
            "o",
            color=ours,
            markerfacecolor="#ffffff",
            ms=7,
            label="call 10",
        )
        for us in (took[0], took[-1]):
            axes.annotate(
                in_units(us), (us, place), (0, 7), textcoords="offset points",
                ha="center", fontsize=10,
            )  # fmt: skip
        if place:  # one legend for all lines
            for line in axes.lines[-3:]:
                line.set_label("_again")
    axes.set_xscale("log")
    ticks = [10.0**power for power in range(1, 8, 2)]
    axes.set_xticks(ticks, [in_units(tick).replace(".0", "") for tick in ticks])
    axes.minorticks_off()
    axes.set_yticks(range(len(NAMES)), NAMES.values())
    axes.set(xlabel="time of a call, by clock and wait", xlim=(10, 2e7))
    axes.set_ylim(len(NAMES) - 0.6, -0.8)
    axes.grid(axis="x", visible=True)
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="y", length=0)


lab.draw(
    first, "The first calls of four functions", first_calls_in_words, first_call_dots
)

# %%

# Reading
times = {name: [cell(first, call, name) for call in CALLS] for name in NAMES}
slowest_first = max(NAMES, key=lambda name: times[name][0])
ratio_of_first = times[slowest_first][0] / times[slowest_first][-1]
lab.read(
    (
        "Autotuning takes longest, since it compiles and times nine kernels: "
        if slowest_first == "Triton, autotuned"
        else f"The longest first call belongs to {NAMES[slowest_first]}: "
    )
    + f"{times[slowest_first][0] / 1e3:.1f} seconds, about "
    f"{float(f'{ratio_of_first:.0e}'):,.0f} times the tenth call. "
    "(We made Triton compile anew; usually it finds compiled kernels on disk.)"
)

# %%

# Reading
loaded = 1e3 * times["matmul"][0]  # µs
lab.read(
    (
        f"Even the matmul, which needs no compiler, first takes {in_units(loaded)}, perhaps to "
        "load cuBLAS. "
        if loaded > 1e3
        else ""
    )
    + "Always warm up with several calls"
    + (
        ": even the second is slower than the tenth"
        if all(found[1] > 1.1 * found[-1] for found in times.values())
        else ""
    )
    + ". Use the shapes, dtypes and options that you will measure, since changing any of them can "
    "compile or select another kernel."
)

# %%
# Cold and warm caches
# --------------------
#
# A warm-up also leaves its input in the cache, if it fits. To see when the flush matters, we copy
# tensors of increasing size from a cold and from a warm cache.


def copies():
    rows = []
    l2 = torch.cuda.get_device_properties(runtime.DEVICE).L2_cache_size / 2**20
    for mib in (1, 4, 16, 32, 48, 64, 96, 128, 256, 1024):
        x = torch.ones(mib * 2**19, dtype=torch.int8, device=runtime.DEVICE)
        run = partial(torch.empty_like(x).copy_, x)
        rows.append(
            {
                "MiB": mib,
                "warm, GB/s": round(
                    mib * 2**20 / median(WAYS["events after a pause"], run) / 1e3
                ),
                "cold, GB/s": round(mib * 2**20 / median(WAYS[best], run) / 1e3),
                "L2, MiB": round(l2, 1),
            }
        )
    return rows


by_size = lab.measure("A copy of growing size", copies)

# %%


# Drawing
def in_words(rows):
    found = (
        f"{row['MiB']:,} MiB {row['warm, GB/s']:,} and {row['cold, GB/s']:,}"
        for row in rows
    )
    return f"GB/s from a warm and from a cold cache: {'; '.join(found)}."


def two_lines(axes, rows):
    for name, ink in (("warm", "PyTorch"), ("cold", "Kernel Book")):
        axes.semilogx(
            [row["MiB"] for row in rows],
            [row[f"{name}, GB/s"] for row in rows],
            "o-",
            base=2,
            color=lab.colour(ink),
            label=f"{name} cache",
        )
    axes.axvline(rows[0]["L2, MiB"], linestyle="--", color=lab.colour("copy"))
    axes.annotate(
        f"L2 holds {rows[0]['L2, MiB']:.0f} MiB",
        (1.08 * rows[0]["L2, MiB"], 0),
        xytext=(0, 4),
        textcoords="offset points",
        color=lab.colour("copy"),
    )
    axes.set_xticks([row["MiB"] for row in rows if row["MiB"] not in (48, 96)])
    axes.xaxis.set_major_formatter(lambda mib, _: f"{mib:,.0f}")
    axes.yaxis.set_major_formatter(lambda speed, _: f"{speed:,.0f}")
    axes.set(
        xlabel="MiB, read plus written", ylabel="GB/s, by events after a pause", ylim=0
    )


lab.draw(by_size, "A copy from a warm and from a cold cache", in_words, two_lines)

# %%

# Reading
warm, unwarmed = (
    {row["MiB"]: row[f"{kind}, GB/s"] for row in by_size.rows} or {0: nan}
    for kind in ("warm", "cold")
)
gain = {mib: warm[mib] / unwarmed[mib] for mib in warm}
most, last = max(gain, key=gain.get), max(warm)
l2 = cell(by_size, last, "L2, MiB")
fits = next((mib for mib in gain if most < mib < l2), most)  # and yet gains less
beyond_l2 = [mib for mib in gain if mib > l2] or [last]
alike = next(  # from where on the cache helps by no more than 1 %
    (mib for mib in gain if all(gain[m] < 1.015 for m in gain if m >= mib)), last
)
ideal = (
    min(warm) * 2**20 / max(warm.values()) / 1e3
)  # µs of the smallest copy at full speed
lab.together(
    lab.read(
        f"The cache helps most at {most:,} MiB, where a warm copy is {gain[most]:.2f} times as "
        "fast."
        + (
            f" We do not know why the cache helps less at {fits:,} MiB, which would fit."
            if gain[fits] < gain[most]
            else ""
        )
    ),
    lab.read(
        f"Beyond L2, the gain shrinks from {100 * (gain[beyond_l2[0]] - 1):.0f} % at "
        f"{beyond_l2[0]:,} MiB to {100 * (gain[alike] - 1):.0f} % at {alike:,}, where you need no "
        "flush. For smaller inputs, flush, unless your program leaves them in the cache."
    ),
    lab.read(
        f"Small copies cannot show the speed of memory: at full speed, {min(warm):,} MiB would "
        f"take {ideal:.1f} µs, but two events alone are {nothing[best]:.1f} µs apart."
    )
    if ideal < nothing[best] / 3
    else None,
)

# %%
# Ready-made timing loops
# -----------------------
#
# Do you need to write such a loop yourself? Triton and PyTorch provide several, but not all of them
# keep the host and the cache out of a time. We time softmaxes of three sizes with each loop, three
# times over. The last column shows how far the repeats differ on the least steady size.


# Measuring
def batch(run, n):
    """Microseconds of a run, from n in a row."""

    def several():
        for _ in range(n):
            run()

    return events(several, before=run) / n


def loops():
    from torch.utils.benchmark import Timer
    from triton.testing import do_bench, do_bench_cudagraph

    def by_torch(run):
        found = Timer("run()", globals={"run": run}).blocked_autorange()
        together.setdefault("torch.utils.benchmark", found.number_per_run)
        return 1e6 * found.median

    ways = {
        "events around a loop": lambda run: batch(run, 200),
        "torch.utils.benchmark": by_torch,
        "do_bench": lambda run: 1e3 * do_bench(run, return_mode="median"),
        "do_bench_cudagraph": lambda run: (
            1e3 * do_bench_cudagraph(run, return_mode="median")
        ),
        "this book's": partial(median, WAYS[best]),
    }
    inputs = {
        f"{rows:,} × {columns:,}, µs": partial(softmax, matrix(rows, columns))
        for rows, columns in ((64, 1024), (2048, 4096), (16384, 8192))
    }
    together = {"events around a loop": 200, "do_bench": 1, "this book's": 1}
    times = {name: {what: [] for what in inputs} for name in ways}
    draw = numpy.random.default_rng(0)
    for _ in range(3):
        for name in draw.permutation(list(ways)):
            for what, run in inputs.items():
                times[name][what].append(ways[name](run))
    return [
        {"loop": name}
        | {
            what: round(statistics.median(found), 1)
            for what, found in times[name].items()
        }
        | {
            "apart, at most, %": max(
                round(100 * (max(found) / min(found) - 1), 1)
                for found in times[name].values()
            ),
            "calls at once": together.get(name, "a graph of them"),
        }
        for name in ways
    ]


suites = lab.measure("One softmax in five loops", loops)

# %%

# the last row is no loop of the book: it is median(...), as in the first figure
flushed, by_book = (
    cell(suites, loop, "64 × 1,024, µs") for loop in ("do_bench", "this book's")
)
apart_of = {row["loop"]: row["apart, at most, %"] for row in suites.rows}
too_brief = (  # do_bench's flush, to keep the host out: always, or in some repeats
    flushed > 1.2 * by_book or apart_of.get("do_bench", 0) > 20
)
LOOPS = {
    "events around a loop": ("yes", "yes"),
    "torch.utils.benchmark": ("yes", "yes"),
    "do_bench": ("perhaps" if too_brief else "no", "no"),
    "do_bench_cudagraph": ("no", "yes"),
    "this book's": ("no", "no"),
}
lab.table(
    [
        {"loop": row["loop"].replace("this book's", "gpu_time")}
        | dict(zip(("host included", "warm cache"), LOOPS[row["loop"]], strict=True))
        | {
            what.removesuffix(", µs"): f"{took:.1f}"
            for what, took in row.items()
            if "µs" in what and "16,384" not in what
        }
        | {"repeats differ, %": f"{row['apart, at most, %']:.0f}"}
        for row in suites.rows
    ],
    "The two smaller softmaxes in five loops, µs",
)

# %%

# Reading
sizes = ("64 × 1,024, µs", "2,048 × 4,096, µs", "16,384 × 8,192, µs")
all_large = [row[sizes[2]] for row in suites.rows] or [nan]


def found_by(loop):
    """What a loop found for the small and for the middle softmax."""
    return [cell(suites, loop, size) for size in sizes[:2]]


by_the_host = found_by("events around a loop") + found_by("torch.utils.benchmark")
in_graph = found_by("do_bench_cudagraph")[1]
by_graph = 2 * 2 * 2048 * 4096 / in_graph / 1e3  # read and written, in 16 bits
spans = numpy.ceil(100 * (max(all_large) / min(all_large) - 1))
steady = [loop for loop, percent in apart_of.items() if percent < 2]
lab.together(
    lab.read(
        "For a long kernel, the loop hardly matters: on 16,384 × 8,192, all agree within "
        f"{spans:.0f} %. For short ones it does. The first two loops show "
        f"{min(by_the_host):.0f} to {max(by_the_host):.0f} µs for both, although the second "
        f"softmax is {2048 * 4096 / 64 / 1024:.0f} times as large, because they show the pace of "
        "the host."
    ),
    lab.read(
        "`do_bench_cudagraph` keeps the host out, but does not flush. For the larger of the two, "
        f"its {in_graph:.1f} µs would mean {by_graph:,.0f} GB/s, more than any copy above, so some "
        "of the data came from the cache."
        if by_graph > 1.1 * max(warm.values())
        else "`do_bench_cudagraph` shows the shortest times: it does not flush."
    ),
    lab.read(
        "The two loops that keep the host out are steady: their repeats differ by "
        f"{numpy.ceil(max(apart_of[loop] for loop in steady)):.0f} % at most. Those of `do_bench` "
        f"differ by up to {apart_of['do_bench']:.0f} %. It has no pause: its flush keeps the GPU "
        "busy while the host queues the kernel, but presumably not always long enough."
    )
    if too_brief and steady == ["do_bench_cudagraph", "this book's"]
    else None,
)

# %%
# Choose the loop by what you want to know:
#
# - *A kernel from a cold cache:* ``gpu_time``, or ``do_bench`` with ``return_mode='median'`` if the
#   kernel takes far longer than its launch.
# - *A kernel that will be replayed in a graph:* ``do_bench_cudagraph``.
# - *The pace of many calls in a row, host included:* ``torch.utils.benchmark``.

# %%

# Folded: The loops in numbers
lab.together(
    suites,
    lab.read(
        "The order of the loops is drawn anew for each repeat, and the table shows the median of "
        "the three. `do_bench` returns the mean unless you call it with `return_mode='median'`, as "
        "we do."
    ),
    lab.read(
        "In the long series of the first two loops, the host is faster than in the single calls "
        "of the first figure."
    )
    if max(by_the_host) < small["clock"]
    else None,
)

# %%
# Clocks and power
# ----------------
#
# Even in a good loop, a kernel can slow down late in a long job, because a GPU lowers its clocks
# when it would otherwise exceed its *power limit*. We time each of four kernels after 0.4 seconds
# of rest, and again after running it for as long. Guess which suffers most: a matmul of random
# numbers or of zeros, or a copy of random numbers or of ones.


# Measuring
def asked_of_the_gpu(names):
    """What nvidia-smi reads, by its name for each column, or that it cannot."""
    gpu = torch.cuda.get_device_properties(runtime.DEVICE).uuid
    query = [f"--query-gpu={','.join(names.values())}", "--format=csv,noheader,nounits"]
    command = ["nvidia-smi", *query, f"--id=GPU-{gpu}"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20)
        return dict(zip(names, map(float, answer.stdout.split(",")), strict=True))
    except (OSError, subprocess.SubprocessError, ValueError):
        return dict.fromkeys(names, "not readable")


DRAWN = {
    "SM clock, MHz": "clocks.sm",
    "memory clock, MHz": "clocks.mem",
    "power, W": "power.draw",
    "power limit, W": "power.limit",
}


REASONS = {  # the bits in which nvidia-smi says why a clock is not higher
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x20: "temperature",
    0x40: "temperature, by the hardware",
    0x80: "power brake",
}


def reason_for_the_clock():
    """Why the clock is not higher, as nvidia-smi says it."""
    gpu = torch.cuda.get_device_properties(runtime.DEVICE).uuid
    query = ["--query-gpu=clocks_event_reasons.active", "--format=csv,noheader"]
    command = ["nvidia-smi", *query, f"--id=GPU-{gpu}"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20)
        bits = int(answer.stdout, 16)
    except (OSError, subprocess.SubprocessError, ValueError):
        return "not readable"
    return ", ".join(words for bit, words in REASONS.items() if bits & bit) or "none"


def counted_clock(cycles=10**6):
    """The SM clock now, in MHz: how many cycles a pause counts in a microsecond."""
    first = partial(torch.cuda._sleep, cycles // 4)  # while the host queues the rest
    return cycles / events(partial(torch.cuda._sleep, cycles), before=first)


def keep_busy(run, seconds):
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        batch(run, 100)


def under_load(run, turns=4, seconds=0.4):
    run()
    found = {"rested": [], "busy": []}
    clocks = {"rested": [], "busy": []}
    for _ in range(turns):
        for state, times in found.items():
            torch.cuda.synchronize()
            if state == "rested":
                time.sleep(seconds)
            else:
                keep_busy(run, seconds)
            times.append(batch(run, 10))
            clocks[state].append(counted_clock())
    # the power that nvidia-smi reads is an average over a second
    keep_busy(run, 1.2)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(lambda: (asked_of_the_gpu(DRAWN), reason_for_the_clock()))
        while not reading.done():
            batch(run, 100)
    drawn, reason = reading.result()
    rested, busy = (statistics.median(times) for times in found.values())
    pairs = zip(found["rested"], found["busy"], strict=True)
    by_turn = [100 * (after / before - 1) for before, after in pairs]
    return {
        "rested, µs": round(rested, 1),
        "busy, µs": round(busy, 1),
        "slower, %": round(100 * (busy / rested - 1), 1),
        "slower, least, %": round(min(by_turn), 1),
        "slower, most, %": round(max(by_turn), 1),
        "rested, MHz": round(statistics.median(clocks["rested"])),
        "busy, MHz": round(statistics.median(clocks["busy"])),
        "reason": reason,
    } | drawn


# %%


def loads():
    a, b = matrix(8192, 8192), matrix(8192, 8192)
    zeros, ones, y = torch.zeros_like(a), torch.ones_like(a), torch.empty_like(a)
    runs = {
        "matmul of random numbers": lambda: a @ b,
        "matmul of zeros": lambda: zeros @ zeros,
        "copy of random numbers": lambda: y.copy_(a),
        "copy of ones": lambda: y.copy_(ones),
    }
    return [{"work": name} | under_load(run) for name, run in runs.items()]


power = lab.measure("Under load, 8,192 × 8,192 in bfloat16", loads)

# %%


# Drawing
def load_in_words(rows):
    found = (f"{row['work']} {row['slower, %']:+.1f} %" for row in rows)
    return (
        f"Bars, how much longer a run takes when the GPU is busy: {'; '.join(found)}."
    )


def load_bars(axes, rows):
    turns = "; thin lines: four repeats" if "slower, most, %" in rows[0] else ""
    bars({"slower, %": ""}, f"% longer than at rest{turns}")(axes, rows)
    for place, row in enumerate(rows):
        if "slower, most, %" in row:  # from the least of the turns to the most
            ends = row["slower, least, %"], row["slower, most, %"]
            axes.plot(ends, [place] * 2, "|-", color="#1f2328", linewidth=1)
            axes.texts[place].xy = max(*ends, 0), place  # beyond the line, not on it
            if row["slower, %"] < 0:  # its number stands left of it, where the bar goes
                axes.texts[place].xy = min(ends), place
                axes.texts[place].set(position=(-6, 0), ha="right")
                axes.set_xlim(left=min(2 * min(ends), axes.get_xlim()[0]))
    names = [
        f"{row['work']}\n{row['power, W']:.0f} W, "
        + (f"{row['rested, MHz']:,} to " if "rested, MHz" in row else "")
        + f"{row.get('busy, MHz', row['SM clock, MHz']):,.0f} MHz"
        if isinstance(row["power, W"], float)
        else row["work"]
        for row in rows
    ]
    axes.figure.set_size_inches(5.2, 3.2)
    axes.set_yticks(range(len(rows)), names, ha="left", multialignment="left")
    axes.tick_params(axis="y", pad=160)
    axes.spines["left"].set_visible(False)  # the line at zero is the one to look at
    axes.axvline(0, color=lab.colour("copy"), linewidth=1)


lab.draw(
    power,
    "What a busy GPU does to a time, 8,192 × 8,192 in bfloat16",
    load_in_words,
    load_bars,
)

# %%

# Reading
names = (
    "matmul of random numbers",
    "matmul of zeros",
    "copy of random numbers",
    "copy of ones",
)
works = {row["work"]: row for row in power.rows} or dict.fromkeys(names, {})


def of_load(column):
    """A column of the table by the work; NaN where it was not recorded, or could not be read."""
    found = {name: row.get(column, nan) for name, row in works.items()}
    return {name: nan if isinstance(n, str) else n for name, n in found.items()}


busy, slower = of_load("busy, µs"), of_load("slower, %")
least, most = of_load("slower, least, %"), of_load("slower, most, %")
watts, limit = of_load("power, W"), of_load("power limit, W")
from_mhz, to_mhz = of_load("rested, MHz"), of_load("busy, MHz")
read_mhz = of_load("SM clock, MHz")
at_mhz = to_mhz if to_mhz[names[0]] > 0 else read_mhz
random, zeros = busy["matmul of random numbers"], busy["matmul of zeros"]
rested = of_load("rested, µs")
copies_of = names[2:]
slowed_at_rest = (  # slower than zeros, although the clock counted afterwards is the same
    rested[names[0]] > 1.02 * rested[names[1]]
    and from_mhz[names[0]] > 0.98 * from_mhz[names[1]]
)


def clock_falls(name):
    """By what the clock falls, as far as it is known; nothing where it does not."""
    if from_mhz[name] > 0:
        falls = to_mhz[name] < 0.98 * from_mhz[name]
        return f"from {from_mhz[name]:,.0f} to {to_mhz[name]:,.0f} MHz" if falls else ""
    return (
        f"to {at_mhz[name]:,.0f} MHz"
        if at_mhz[name] < 0.98 * max(at_mhz.values())
        else ""
    )


reason = works[names[0]].get("reason", "not readable")
by_clock = 100 * (from_mhz[names[0]] / to_mhz[names[0]] - 1)
falls = clock_falls(names[0])
low = watts[names[1]] < 0.9 * watts[names[0]]
same_reason = works[names[1]].get("reason") == reason
lab.together(
    lab.read(
        f"On a busy GPU, the matmul of random numbers takes {slower[names[0]]:.1f} % longer"
        + (" and its clock falls. " if falls else ". ")
        + (
            f"The GPU draws nearly its limit of {limit[names[0]]:.0f} W, and `nvidia-smi` gives "
            "the power cap as the reason."
            if falls
            and "power cap" in reason
            and watts[names[0]] > 0.95 * limit[names[0]]
            else f"`nvidia-smi` gives the reason “{reason}”."
            if falls and reason not in ("not readable", "none")
            else ""
        )
        + (
            " The copies do not slow down."
            if all(least[name] <= 0 and slower[name] < 1 for name in copies_of)
            else ""
        )
    ),
    lab.read(
        "The matmul of zeros slows down, too, "
        + (
            "with the same reason given, "
            if reason not in ("not readable", "none") and same_reason
            else ""
        )
        + f"although it draws only {watts[names[1]]:.0f} W. We do not know why."
    )
    if low and clock_falls(names[1])
    else None,
)

# %%

# Reading
lab.together(
    lab.read(
        f"Zeros flatter a matmul: on a busy GPU, it takes {zeros:,.0f} µs instead of the "
        f"{random:,.0f} on random numbers"
        + (
            " and draws far less power, presumably because bits that do not change cost little"
            if low
            else ""
        )
        + ". **Never time a matmul on zeros**, or on memory that nobody has filled."
        if random > 1.02 * zeros
        else f"On a busy GPU, the matmul takes {random:,.0f} µs on random numbers and {zeros:,.0f} "
        "on zeros, so on this machine the numbers hardly matter."
    ),
    lab.read(
        "Whenever you read a time, read the clock too, with `nvidia-smi -q -d CLOCK,PERFORMANCE`."
    ),
)

# %%

# Folded: The numbers of the figure, and what the clocks did
signed = [f"{slower[name]:+.1f}".replace("-", "−") for name in copies_of]
by_clock_of_zeros = 100 * (from_mhz[names[1]] / to_mhz[names[1]] - 1)
lab.together(
    power,
    lab.read(
        "In each of four repeats, the GPU rests for 0.4 seconds and runs a batch of ten, then "
        "stays busy for as long and runs another. We read the power from `nvidia-smi`, and the "
        "clock from how long a pause of known cycles takes after each batch."
    ),
    lab.read(
        f"The matmul of zeros follows its clock, which falls {clock_falls(names[1])}: it "
        f"should take {by_clock_of_zeros:.1f} % longer, and takes {slower[names[1]]:.1f} % longer."
    )
    if clock_falls(names[1]) and abs(by_clock_of_zeros - slower[names[1]]) < 1
    else None,
    lab.read(
        "If the matmul of random numbers followed its clock, it would take "
        f"{by_clock:.0f} % longer instead of {slower[names[0]]:.0f}. We do not know why it does "
        "not."
    )
    if by_clock > slower[names[0]] + 3
    else None,
    lab.read(
        "Even after a rest, it takes "
        f"{rested[names[0]]:,.0f} µs and the matmul of zeros {rested[names[1]]:,.0f}, although we "
        "count nearly the same clock after both. The clock may have dipped during the runs, in "
        "which case power costs this matmul more than the figure shows."
    )
    if slowed_at_rest and by_clock > slower[names[0]] + 3
    else None,
    lab.read(
        (
            "The copies lose clock too"
            if any(clock_falls(name) for name in copies_of)
            else "The copies keep their clock"
        )
        + f", and their times change by {signed[0]} and {signed[1]} %"
        + (
            ", faster in every repeat."
            if all(most[name] < 0 for name in copies_of)
            else ", slower in every repeat."
            if all(least[name] > 0 for name in copies_of)
            else ", less than the repeats differ among themselves."
            if all(least[name] <= 0 <= most[name] for name in copies_of)
            else "."
            if least[copies_of[0]] <= most[copies_of[0]]
            else ", which one measurement of each does not tell from chance."
        )
    ),
)

# %%
# Real and random differences
# ---------------------------
#
# Your new kernel takes 2 % less time. Is it faster, or is that chance? Time the old one twice.
#
# .. admonition:: Key idea
#    :class: kb-key
#
#    In an :term:`A/A test`, we time the same kernel under two names. Believe no difference smaller
#    than the one it shows.
#
# Chance enters every run, as 2,000 runs of one softmax show.


PERCENT = (0, 1, 2, *range(5, 100, 5), 98, 99, 100)


def percentiles():
    run = partial(softmax, matrix(4096, 4096))
    median(events, run)
    times = numpy.percentile([events(run, cold) for _ in range(2000)], PERCENT)
    return [
        {"% of the runs": share, "µs, at most": round(float(found), 3)}
        for share, found in zip(PERCENT, times, strict=True)
    ]


spread = lab.measure("2,000 runs of one softmax", percentiles)

# %%


# Drawing
def at_most(rows):
    return {row["% of the runs"]: row["µs, at most"] for row in rows}


def sorted_runs(rows):
    times = at_most(rows)
    found = ", ".join(f"{share} % {times[share]:.2f}" for share in (0, 20, 50, 80, 100))
    return f"The time that a share of the runs did not exceed, in µs: {found}."


def dots(axes, rows, runs=50):
    """One dot for each so many of the 2,000 runs, stacked where they take about as long."""
    times, ours = at_most(rows), lab.colour("Kernel Book")
    shares = numpy.arange(runs / 40, 100, runs / 20)
    width = (times[95] - times[0]) / 20
    found = numpy.interp(shares, list(times), list(times.values()))
    stacks = numpy.floor((found - times[0]) / width)
    heights = [sum(stacks[:place] == stack) for place, stack in enumerate(stacks)]
    axes.figure.set_size_inches(5.4, 2.5)
    axes.axvspan(times[20], times[80], color=ours, alpha=0.15, linewidth=0)
    axes.axvline(times[50], color=ours, linewidth=1.5)
    axes.plot(times[0] + (stacks + 0.5) * width, heights, "o", color=ours, ms=8)
    for share in (20, 50, 80):
        axes.annotate(
            f"p{share}", (times[share], 1), (0, 3), textcoords="offset points",
            ha="center", xycoords=axes.get_xaxis_transform(),
        )  # fmt: skip
    axes.set(
        xlabel=f"µs, by events, pause and flush; one dot per {runs} runs",
        yticks=[], ylim=(-0.8, max(heights) + 0.8),
    )  # fmt: skip
    axes.grid(visible=False)
    axes.spines["left"].set_visible(False)


lab.draw(
    spread,
    "How long 2,000 runs of a softmax of 4,096 × 4,096 took",
    sorted_runs,
    dots,
)

# %%


# Measuring
def strays(n, draws=1000):
    """By how many % the median of n runs strays at most, in 95 of 100 samples."""
    shares = 100 * numpy.random.default_rng(0).random((draws, n))
    times = at_most(spread.rows)
    samples = numpy.interp(shares, list(times), list(times.values()))
    off = numpy.abs(numpy.median(samples, axis=1) / times[50] - 1)
    return 100 * float(numpy.quantile(off, 0.95))


IN_ALL = ROUNDS * MOST_REPEATS  # the most runs behind a point of the book
SAMPLES = (20, IN_ALL)
by_median = [strays(n) if spread.rows else nan for n in SAMPLES]

# %%

# Reading
times = at_most(spread.rows) or dict.fromkeys((50, 80, 100), nan)
mean = numpy.trapezoid(list(times.values()), list(times)) / 100  # by the percentiles
above = 100 * (mean / times[50] - 1)
beyond = {share: 100 * (times[share] / times[50] - 1) for share in (80, 100)}
lab.together(
    lab.read(
        f"One run in five takes at least {beyond[80]:.1f} % longer than the median, and the "
        f"slowest, which no dot shows, {beyond[100]:.0f} %."
    ),
    lab.read(
        f"The median of several runs is steadier. Take {SAMPLES[0]} of these runs: in 95 of 100 "
        f"tries, their median is within {by_median[0]:.1f} % of the median of all. With "
        f"{SAMPLES[1]} runs, the most in this book, it is within {by_median[1]:.1f} %. We "
        "therefore report the median, **p50**, with a band from **p20** to **p80**."
    ),
)

# %%


# Measuring
def in_turn(runs, order, rounds=8):
    """The median µs of each run, from batches of 40 ms in a row, without a pause or a flush."""
    counts = {name: max(1, round(4e4 / batch(run, 5))) for name, run in runs.items()}
    times = {name: [] for name in runs}
    for _ in range(rounds):
        for name in order(list(runs)):
            times[name].append(batch(runs[name], counts[name]))
    return {name: statistics.median(found) for name, found in times.items()}


def twins_by_order():
    a, x, small = (
        matrix(*size) for size in ((8192, 8192), (16384, 8192), (2048, 2048))
    )
    kernels = {
        "softmax of 16,384 × 8,192": lambda: softmax(x),
        "matmul of 2,048": lambda: small @ small,
    }
    orders = {"fixed": list, "drawn": numpy.random.default_rng(0).permutation}
    rows = []
    for name, run in kernels.items():
        row = {"kernel": name}
        for kind, order in orders.items():
            found = in_turn({"matmul": lambda: a @ a, "A": run, "B": run}, order)
            row[f"A, {kind} order, µs"] = round(found["A"], 2)
            row[f"B, {kind} order, µs"] = round(found["B"], 2)
        rows.append(row)
    return rows


by_order = lab.measure("One kernel under two names, by the order", twins_by_order)

# %%

# Reading
apart = {
    kind: [
        100 * abs(row[f"A, {kind} order, µs"] / row[f"B, {kind} order, µs"] - 1)
        for row in by_order.rows
    ]
    or [nan]
    for kind in ("fixed", "drawn")
}
worst = apart["fixed"].index(max(apart["fixed"]))
twins = by_order.rows[worst] if by_order.rows else {}
lab.together(
    lab.read(
        "More runs do not help against what all of them share, such as another kernel that always "
        "runs just before yours." + ("" if by_order.rows else f" {nan}")
    ),
    lab.read(
        "We run an A/A test beside a large matmul, **M**, in eight rounds of long batches without "
        "a pause. In the **fixed order**, every round runs M, A, B. In the **drawn order**, chance "
        "decides anew for each round."
    ),
)

# %%


# Drawing
def order_of_rounds(place):
    """What ran, one after another, when the kernel in this place of the table was timed."""
    redraw = numpy.random.default_rng(0)  # again, as twins_by_order did
    drawn = [redraw.permutation(["matmul", "A", "B"]) for _ in range(8 * (place + 1))]
    chosen = numpy.hstack(drawn[-8:]).tolist()
    return {"fixed": ["matmul", "A", "B"] * 8, "drawn": chosen}


def count_after(order):
    """How often each twin came right after the large matmul."""
    return {twin: list(pairwise(order)).count(("matmul", twin)) for twin in "AB"}


def least_steady(rows):
    """The place of the kernel that differs most from itself in the fixed order, and its row."""
    return max(
        enumerate(rows),
        key=lambda found: abs(
            found[1]["A, fixed order, µs"] / found[1]["B, fixed order, µs"] - 1
        ),
    )


def twins_in_figures(row, kind):
    first_twin, other_twin = (row[f"{twin}, {kind} order, µs"] for twin in "AB")
    percent = 100 * abs(first_twin / other_twin - 1)
    return f"A {first_twin:.2f} µs, B {other_twin:.2f} µs: {percent:.1f} % apart"


def orders_in_words(rows):
    place, row = least_steady(rows)
    found = []
    for kind, order in order_of_rounds(place).items():
        follows = count_after(order)
        found.append(
            f"In the {kind} order, A follows the large matmul {follows['A']} times and B "
            f"{follows['B']} times. {twins_in_figures(row, kind)}."
        )
    return " ".join(found)


def order_boxes(axes, rows):
    """A box for each batch in turn; filled where a twin follows the large matmul."""
    place, row = least_steady(rows)
    inks = {"A": lab.colour("Kernel Book"), "B": lab.colour("PyTorch")}
    grey, size = lab.colour("copy"), {"ha": "center", "va": "center", "fontsize": 10}
    for line, (kind, order) in enumerate(order_of_rounds(place).items()):
        top = 2.6 * line
        axes.text(
            0, top - 0.85, f"{kind} order", va="center", fontweight="bold", fontsize=10
        )
        for turn, (before, what) in enumerate(pairwise(["", *order])):
            left = turn + 0.35 * (turn // 3)  # the rounds stand apart
            ink, full = inks.get(what, grey), before == "matmul" != what
            axes.add_patch(
                Rectangle(
                    (left, top - 0.4),
                    0.9,
                    0.8,
                    linewidth=1.2,
                    edgecolor=ink,
                    facecolor=ink
                    if full
                    else "#f6f8fa"
                    if what == "matmul"
                    else "none",
                )  # fmt: skip
            )
            letter = "M" if what == "matmul" else what
            axes.text(
                left + 0.45, top, letter, color="#ffffff" if full else ink, **size
            )
        axes.text(0, top + 0.85, twins_in_figures(row, kind), va="center", fontsize=10)
    axes.text(
        0,
        4.5,
        "filled: right after M, the large matmul",
        va="center",
        color=grey,
        fontsize=10,
    )
    axes.figure.set_size_inches(5.4, 2.5)
    axes.set(xlim=(-0.1, 26.6), ylim=(4.9, -1.3))
    axes.set_axis_off()


lab.draw(
    by_order,
    f"One {twins.get('kernel', 'kernel')} under two names".replace(
        "matmul of 2,048", "matmul of 2,048 × 2,048"
    ),
    orders_in_words,
    order_boxes,
)

# %%

# Reading
# is the slower twin, in either order, the one that came after the matmul more often?
after = {kind: count_after(order) for kind, order in order_of_rounds(worst).items()}
follows = bool(twins) and all(
    (after[kind]["A"] > after[kind]["B"])
    == (twins[f"A, {kind} order, µs"] > twins[f"B, {kind} order, µs"])
    and apart[kind][worst] > 1
    for kind in apart
)
lab.read(
    "Both times, the slower name is the one that came right after the large matmul more often, "
    "presumably because the matmul had lowered the clock. Eight draws did not even this out."
    if follows
    else "In the fixed order, A always comes right after the large matmul, and the kernel differs "
    f"from itself by {max(apart['fixed']):.1f} %, presumably because the matmul has lowered the "
    "clock. No number of rounds would reveal it, because every round repeats it."
    if max(apart["fixed"]) > max(1, 1.5 * max(apart["drawn"]))
    else f"On this GPU, A and B differ by up to {max(apart['fixed'] + apart['drawn']):.1f} %, "
    "whatever the order."
)

# %%


# Measuring
def twins_in_the_loop():
    a, x, few, small = (
        matrix(*size)
        for size in ((8192, 8192), (16384, 8192), (64, 1024), (2048, 2048))
    )
    kernels = {
        "softmax of 16,384 × 8,192": lambda: softmax(x),
        "softmax of 64 × 1,024": lambda: softmax(few),
        "matmul of 2,048": lambda: small @ small,
    }
    rows = []
    for name, run in kernels.items():
        runs = {"matmul": lambda: a @ a, "A": run, "B": run}
        medians = [
            {twin: found[1] for twin, found in _time_in_turn(runs)[0].items()}
            for _ in range(4)
        ]
        apart = [100 * abs(found["A"] / found["B"] - 1) for found in medians]
        row = {"kernel": name, "A, µs": round(1e3 * medians[0]["A"], 2)}
        row |= {"A and B apart, at most, %": round(max(apart), 2)}
        firsts = [found["A"] for found in medians]
        between = 100 * (max(firsts) / min(firsts) - 1)
        rows.append(row | {"four runs of the loop apart, %": round(between, 2)})
    return rows


in_the_loop = lab.measure(
    "One kernel under two names, in the book's loop", twins_in_the_loop
)

# %%

# Reading
resolved = max(
    (row["A and B apart, at most, %"] for row in in_the_loop.rows), default=nan
)
counts_as_none = max(1, numpy.ceil(10 * max(by_median[-1], resolved)) / 10)
lab.together(
    lab.read(
        "The book's loop also draws the order, and it pauses before each run. In it, A and B were "
        f"at most {resolved:.2g} % apart, for three kernels. To be safe, we treat differences "
        f"below {counts_as_none:g} % as none."
        + (
            " If your old and new kernel ran in this loop, the 2 % are more than chance."
            if counts_as_none < 2
            else ""
        )
    ),
    lab.read(
        "Compare only times taken **in one loop, together**"
        + (
            f": a GPU that gets busy can change a time by more ({slower[names[0]]:.0f} % above)."
            if slower[names[0]] > counts_as_none
            else "."
        )
    ),
)

# %%

# Folded: The loop of this book, its A/A test, and how sure a median is
lab.together(
    lab.read(
        f"Slow runs pull up the mean of the 2,000, here to {above:.1f} % above the median. We "
        f"recorded {len(PERCENT)} percentiles of the runs, and from these placed the dots, took "
        "the mean and drew the samples for the medians."
    ),
    lab.read(
        f"The book's loop makes {ROUNDS} rounds of {MOST_REPEATS} runs, or of {REPEAT_MS} "
        "milliseconds of kernel time if that is less:"
    ),
    lab.source(_time_in_turn),
    lab.read(
        "We ran it four times for each of three kernels, timing A and B along with the large "
        "matmul."
    ),
    in_the_loop,
    lab.read(
        (
            "Not every kernel depends on the order: the large softmax, timed as A and B, does not. "
            if apart["fixed"][0] < 0.5
            else ""
        )
        + "How often A and B followed the large matmul in the drawn order, we know from its seed."
    ),
    by_order,
)

# %%
# The roofline
# ------------
#
# To judge a time that we trust, we compare it with the shortest that the hardware allows. The
# weighted sum of :doc:`the first chapter </chapters/first_kernel>` multiplies and adds once for
# each 2-byte number. The GPU could do many such operations before the next number arrives, so
# memory sets the pace. In attention, which uses each number hundreds or thousands of times, the
# :term:`matrix units <matrix unit>` do.
#
# Suppose a kernel moves :math:`Q` bytes and does :math:`W` floating-point operations (FLOPs), on a
# GPU that can move :math:`\beta` bytes and do :math:`\pi` FLOPs per second. Its time :math:`T` is
# at least that of the slower of these two tasks. On a given GPU, its speed :math:`P = W / T`
# therefore has a ceiling set by its :term:`arithmetic intensity` :math:`I = W / Q`:
#
# .. math::
#
#    \begin{aligned}
#    T &\ge \max\left( \frac{Q}{\beta},\, \frac{W}{\pi} \right) \\
#    P = \frac{W}{T} &\le \min\left( \beta I,\, \pi \right)
#    \end{aligned}
#
# This is the :term:`roofline`. The two limits meet at :math:`I = \pi / \beta`, the *ridge*. Left of
# it, a kernel waits for memory; right of it, for arithmetic. We measure both limits on the same
# GPU, with a copy and a matmul.


# Measuring
def limits():
    x = torch.ones(2**30, dtype=torch.int8, device=runtime.DEVICE)
    y = torch.empty_like(x)
    a, b = matrix(8192, 8192), matrix(8192, 8192)
    moved = 2 * x.numel() / median(WAYS[best], lambda: y.copy_(x)) / 1e3
    flops = 2 * 8192**3 / median(WAYS[best], lambda: a @ b) / 1e6
    return [
        {
            "GPU": torch.cuda.get_device_name(runtime.DEVICE),
            "copy, GB/s": round(moved),
            "matmul, TFLOP/s": round(flops),
            "ridge, FLOPs per byte": round(1e3 * flops / moved),
        }
    ]


machine = lab.measure("The limits of the machine, bfloat16", limits)
row = machine.rows[0] if machine.rows else {}
pi, beta = row.get("matmul, TFLOP/s", nan), row.get("copy, GB/s", nan)
hot = 2 * 8192**3 / random / 1e6

# %%

# Reading
lab.read(
    f"The copy moves {beta:,.0f} GB/s and the matmul does {pi:,.0f} TFLOP/s, so the ridge is at "
    f"about {round(1e3 * pi / beta, -1):,.0f} FLOPs per byte. The weighted sum does 1 FLOP per "
    "byte: even at its roof, it does only "
    f"{100 * beta / 1e3 / pi:.1f} % of the FLOPs that the matmul does in the same time."
)

# %%
# **What breaks it: counting the wrong bytes.** :math:`Q` is what the job needs, not what one
# program happens to move. The five PyTorch operations at the beginning of :doc:`/chapters/softmax`
# read and write eight matrices, although the job needs only two.

# %%


# Reading
def softmax_speeds():
    """Of two softmaxes of 4,096 columns in 16 bits, in GB/s: by eight matrices, and by two."""
    ladder = results.find("softmax")["sweeps"]["ladder"]
    [at] = [i for i, p in enumerate(ladder["points"]) if p["columns"] == 4096]
    size = ladder["points"][at]["rows"] * 4096 * 2 / 1e6
    five, ours = (
        size / ladder["milliseconds"][name][at][1]
        for name in ("simple_softmax", "Kernel Book")
    )
    return 8 * five, 2 * five, 2 * ours


text = "The chapter on softmax has no record yet, so there is nothing to compare."
if results.find("softmax"):
    claimed, real, book = softmax_speeds()
    text = (
        "If we count all eight, the waste passes for speed: at 4,096 columns, the five operations "
        f"seem to reach {claimed:,.0f} GB/s. By the bytes needed, they reach {real:,.0f}, and the "
        f"book's kernel {book:,.0f}."
    )
lab.read(text)

# %%
# The figure shows the best point of each operator in bfloat16, and of attention also in FP8. Only
# the FP8 roof is not measured: NVIDIA states twice that of bfloat16.

# %%

# Measuring
OPERATORS = {  # chapter, sweep, provider, and FLOPs or bytes, whichever is not recorded
    "weighted sum": ("first_kernel", "forward", "Kernel Book", "2 * numbers"),
    "weighted sum, back": ("first_kernel", "backward", "Kernel Book", "3 * numbers"),
    "dropout": ("dropout", "forward", "Kernel Book", "numbers"),
    "dropout, back": ("dropout", "backward", "Kernel Book", "numbers"),
    "softmax": ("softmax", "forward", "Kernel Book", "5 * numbers"),
    "softmax, back": ("softmax", "backward", "Kernel Book", "4 * numbers"),
    "layer norm": ("layer_norm", "forward", "Kernel Book", "7 * numbers"),
    "layer norm, back": ("layer_norm", "backward", "Kernel Book", "13 * numbers"),
    "attention": ("attention", "forward", "Kernel Book", "4 * 2 * numbers"),
    "attention, back": ("attention", "backward", "Kernel Book", "8 * 2 * numbers"),
    "attention, in FP8": ("attention_fp8", "fp8", "all in FP8", "(3 + 2) * numbers"),
}  # numbers: the elements of the input; 2 bytes each in bfloat16
SIZES = ("elements", "rows", "columns", "batch", "heads", "seqlen", "head_dim")


def recorded_points(gpu):
    """Yield operator, FLOPs per byte and TFLOP/s of each point that a GPU recorded in bfloat16."""
    for name, (chapter, sweep, provider, formula) in OPERATORS.items():
        for record in results.recorded():
            found = record["sweeps"].get(sweep, {"milliseconds": {}})
            ours = record["chapter"].startswith(chapter)
            here = record["provenance"]["gpu"] == gpu
            if not (ours and here and provider in found["milliseconds"]):
                continue
            times = found["milliseconds"][provider]
            for point, took in zip(found["points"], times, strict=True):
                if (
                    point.get("dtype", "bfloat16") != "bfloat16"
                    or not took
                    or took[1] < 0.02
                ):
                    continue  # below 20 µs it would show the launch
                numbers = numpy.prod([point[size] for size in SIZES if size in point])
                point |= {"numbers": int(numbers)}
                counted = evaluate(found["work"], point), evaluate(formula, point)
                moved, flops = counted if found["unit"] == "GB/s" else counted[::-1]
                yield name, flops / moved, flops / took[1] / 1e9


def roof_of(name, intensity, row):
    """The most TFLOP/s, by a copy and a matmul; twice the matmul in FP8, as NVIDIA states."""
    times = 2 if name.endswith("FP8") else 1
    return min(row["copy, GB/s"] * intensity / 1e3, times * row["matmul, TFLOP/s"])


def under_the_roof(row):
    """The operators of a GPU: their intensities, and their shares of the roof, in per cent."""
    found = {}
    for name, intensity, speed in recorded_points(row["GPU"]):
        roof = roof_of(name, intensity, row)
        found.setdefault(name, []).append((intensity, 100 * speed / roof))
    return found


# %%


# Drawing
def span(values):
    low, high = (
        f"{value:,.{2 if value < 10 else 0}f}" for value in (min(values), max(values))
    )
    return low if low == high else f"{low} to {high}"


def operators_in_words(rows):
    best_of = {
        name: max(points, key=lambda point: point[1])
        for name, points in under_the_roof(rows[0]).items()
    }
    found = (
        f"{name} at {span([intensity])} FLOPs per byte reaches {share:.0f} %"
        for name, (intensity, share) in best_of.items()
    )
    return (
        f"The share of the roof that each operator reaches at best: {'; '.join(found)}."
    )


LOOKS = {"": ("o", "forward"), "back": ("s", "backward"), "in FP8": ("D", "in FP8")}


def of_family(name):
    return name.partition(", ")


def roofline(axes, rows):
    [row] = rows
    beta, pi = row["copy, GB/s"] / 1e3, row["matmul, TFLOP/s"]
    grey, near = lab.colour("copy"), {"textcoords": "offset points", "va": "center"}
    left, right = 0.1, 50000
    axes.figure.set_size_inches(5.4, 4.2)
    axes.axvspan(left, pi / beta, color=lab.colour("Kernel Book"), alpha=0.08, lw=0)
    axes.loglog(
        [left, pi / beta, right], [left * beta, pi, pi], "--", color=grey, linewidth=1.5
    )
    axes.plot([pi / beta] * 2, [0.3, pi], ":", color=grey, linewidth=1)
    for place, words in (
        (pi / beta, f"ridge: about {round(pi / beta, -1):,.0f}"),
        (left, "waits for memory"),
        (pi / beta, "waits for arithmetic"),
    ):
        height = 0.42 if words.startswith("ridge") else 60
        axes.annotate(words, (place, height), (6, 0), color=grey, fontsize=10, **near)
    axes.annotate("copy", (36, 36 * beta), (-9, 4), color=grey, ha="right", **near)
    axes.annotate("matmul", (pi / beta, pi), (6, -9), color=grey, **near)
    for line, family in enumerate(("layer norm", "softmax", "weighted sum", "dropout")):
        axes.annotate(
            family, (4, 2 * beta), (0, -13 * line - 5), color=lab.colour(family),
            fontsize=10, **near,
        )  # fmt: skip
    for marker, label in LOOKS.values():
        hollow = {"markerfacecolor": "none"} if marker == "s" else {}
        axes.plot([], [], marker, color=grey, label=label, **hollow)
    best_of = {}
    for name, intensity, speed in recorded_points(row["GPU"]):
        roof = roof_of(name, intensity, row)
        best_of[name] = max(best_of.get(name, (0,)), (speed / roof, intensity, speed))
    if any(name.endswith("FP8") for name in best_of):
        ends = [pi / beta, 2 * pi / beta, right]
        axes.plot(ends, [pi, 2 * pi, 2 * pi], "--", color=grey, linewidth=0.8)
        axes.annotate(
            "FP8, not measured", (ends[1], 2 * pi), (4, 8), color=grey, **near
        )
    for name, (_, *point) in best_of.items():
        family, _, kind = of_family(name)
        hollow = {"markerfacecolor": "none"} if kind == "back" else {}
        ink = lab.colour(family)
        axes.plot(*point, LOOKS[kind][0], color=ink, ms=6, **hollow)
        if family == "attention":
            words, way, aside = {
                "": ("attention,\nforward", (0, -28), "center"),
                "back": ("backward", (8, -2), "left"),
                "in FP8": ("in FP8", (8, 4), "left"),
            }[kind]
            axes.annotate(words, point, way, ha=aside, color=ink, fontsize=10, **near)
    axes.set(
        xlabel="FLOPs per byte", ylabel="TFLOP/s", xlim=(left, right), ylim=(0.3, 3000)
    )
    for axis, first, last in ((axes.xaxis, -1, 4), (axes.yaxis, 0, 3)):
        ticks = [10.0**power for power in range(first, last + 1)]
        axis.set_ticks(ticks, [f"{tick:,.10g}" for tick in ticks])
    axes.minorticks_off()


lab.draw(
    machine,
    "The operators of the book and the roofline",
    operators_in_words,
    roofline,
)

# %%


# Reading
def waits_for(points):
    left = {intensity < ridge for intensity, _ in points}
    return "either" if len(left) > 1 else "memory" if left.pop() else "arithmetic"


ridge = 1e3 * pi / beta
placed = under_the_roof(machine.rows[0]) if machine.rows else {}
waiting = [name for name, points in placed.items() if waits_for(points) == "memory"]
*others, last_one = dict.fromkeys(name.partition(",")[0] for name in waiting) or [""]
lab.read(
    f"{', '.join(others).capitalize()} and {last_one} lie left of the ridge and near the roof. "
    "There, a kernel gets faster only if the job needs fewer bytes: by a smaller dtype, or by "
    "fusing it with its neighbour."
)

# %%
# The best shape flatters, so the next figure shows every shape that took at least 20 µs.


# Drawing
def shares_in_words(rows):
    found = (
        f"{name} {span([share for _, share in points])} %"
        for name, points in under_the_roof(rows[0]).items()
    )
    return f"A dot for each shape, in % of the roof: {'; '.join(found)}."


def shares(axes, rows):
    axes.figure.set_size_inches(5.4, 4.2)
    axes.axvline(100, linestyle="--", color=lab.colour("copy"), linewidth=1)
    found = under_the_roof(rows[0])
    for place, (name, points) in enumerate(found.items()):
        family, _, kind = of_family(name)
        ink, dots = lab.colour(family), [share for _, share in points]
        hollow = {"markerfacecolor": "none"} if kind == "back" else {}
        axes.plot([min(dots), max(dots)], [place, place], color=ink, linewidth=0.8)
        axes.plot(dots, [place] * len(dots), LOOKS[kind][0], color=ink, ms=5, **hollow)
    left = sum(waits_for(points) == "memory" for points in found.values())
    axes.axhline(left - 0.5, color=lab.colour("copy"), linewidth=0.8)
    for place, text in ((0, "roof: a copy"), (left, "roof: a matmul")):
        axes.text(
            2, place, text, va="center", fontsize=10, color=lab.colour("copy"),
            bbox={"facecolor": axes.get_facecolor(), "edgecolor": "none", "pad": 1},
        )  # fmt: skip
    axes.set_yticks(range(len(found)), list(found))
    axes.set(xlabel="% of the roof", xlim=0)
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", visible=True)
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()


lab.draw(
    machine,
    "The share of its roof that each operator reaches",
    shares_in_words,
    shares,
)

# %%

# Reading
found = placed.get("attention", [(nan, nan)])
lowest = min(found, key=lambda point: point[1])
top = max(share for _, share in found)
shortest = lowest[0] == min(intensity for intensity, _ in found)
back = max((share for _, share in placed.get("softmax, back", ())), default=nan)
levels = (results.find("first_kernel") or {"tables": {}})["tables"].get(
    "The levels of memory: size, speed, latency", {"columns": [], "rows": []}
)
read_alone = next((row[2] for row in levels["rows"] if row[0] == "HBM"), nan)  # TB/s
reads_faster = 1e3 * read_alone > 1.05 * beta
below = [
    share
    for kind in ("back", "in FP8")
    for _, share in placed.get(f"attention, {kind}", ())
]
norms = (results.find("layer_norm_backward") or {"sweeps": {}})["sweeps"].get(
    "backward", {"points": []}
)["points"]
widths = [
    point["columns"]
    for point in norms
    if point.get("dtype", "bfloat16") == "bfloat16" and "columns" in point
]
of_norm = [share for _, share in placed.get("layer norm, back", ())]
of_waiting = [share for name in waiting for _, share in placed[name]]
lab.together(
    lab.read(
        "Left of the ridge, layer norm falls furthest: on rows of "
        f"{widths[-1]:,} numbers, its backward pass reaches {of_norm[-1]:.0f} %."
    )
    if of_norm
    and len(widths) == len(of_norm)
    and widths[-1] == max(widths)
    and of_norm[-1] == min(of_waiting)
    else None,
    lab.read(
        "Attention lies right of the ridge and further from its roof: its forward pass reaches "
        f"{lowest[1]:.0f} % "
        + ("on the shortest sequences" if shortest else "at worst")
        + f" and {top:.0f} % at best"
        + (
            "; its backward pass and FP8 version reach less."
            if max(below, default=nan) < top
            else "."
        )
    ),
    lab.read(
        "Softmax's backward pass can exceed 100 %, presumably because it reads more than it "
        "writes, and reading is faster than copying (see the fold)."
    )
    if back > 101 and reads_faster
    else None,
)

# %%

# Folded: How the figures count, and every operator in numbers
lab.together(
    lab.read(
        "We time the matmul with pauses, like every kernel in this book. On a busy GPU, it reached "
        f"{hot:,.0f} TFLOP/s instead of {pi:,.0f}."
    ),
    lab.read(
        "We count FLOPs by the formulas of each chapter (an exponential is one, random bits are "
        "none), and bytes as if each input were read once and each output written once. Each range "
        "covers all shapes that the chapter timed, except those below 20 µs."
    ),
    lab.read(
        "The percentages can be lower than those in a chapter, because a chapter divides by a copy "
        "as large as its own input, whereas this roof is a copy of 1 GiB."
    ),
    lab.read(
        "Reading alone can be faster than copying: a kernel in the first chapter that hardly "
        f"writes reached {1e3 * read_alone:,.0f} GB/s."
    )
    if reads_faster
    else None,
    lab.table(
        [
            {
                "operator": name,
                "FLOPs per byte": span([intensity for intensity, _ in points]),
                "waits for": waits_for(points),
                "of the roof, %": span([share for _, share in points]),
            }
            for name, points in placed.items()
        ],
        "Every operator of the book",
    ),
)

# %%
# The cause of a slow kernel
# --------------------------
#
# A kernel far below its roof wastes something. To practise the search, we make one slow on purpose:
# we launch ``row``, the softmax kernel, with ``maxnreg=32``, which leaves each thread only 32
# :term:`registers <register>`. If a thread needs more, the compiler must :term:`spill` values to
# memory and read them back.
#
# **Ask the compiler.** A launch returns the compiled kernel, which reports its registers and spills
# per thread:
#
# .. code-block:: python
#
#    compiled = row_fwd_kernel[(rows,)](x, y, ..., num_warps=2, maxnreg=32)
#    print(compiled.n_regs, compiled.n_spills)


# Measuring
def limited_softmax(x, y, registers=None, warps=2):
    rows, columns = x.shape
    limit = runtime.register_limit(registers)
    row_fwd_kernel[(rows,)](
        x, y, x.stride(0), rows, columns, 1, columns, num_warps=warps, **limit
    )


# %%

# Measuring
LIMITS = {f"{limit} registers": (limit, 2) for limit in (32, 48, 64)}
LIMITS |= {"32 registers, 4 warps": (32, 4), "Kernel Book": (None, 2)}


def runs_under(limits, rows, columns):
    x = matrix(rows, columns)
    y = torch.empty_like(x)
    return {
        name: partial(limited_softmax, x, y, *limit) for name, limit in limits.items()
    }


facts = lab.facts(
    "What the compiler made of the softmax kernel",
    {name: lambda name=name: runs_under(LIMITS, 64, 4096)[name]() for name in LIMITS},
)

# %%


def register_providers(rows, columns, dtype):
    x = torch.empty(rows, columns, device=runtime.DEVICE, dtype=dtype).normal_()
    y = torch.empty_like(x)
    limited = {
        name: partial(limited_softmax, x, y, *limit) for name, limit in LIMITS.items()
    }
    return {"copy": lambda: y.copy_(x)} | limited


limited = lab.bench(
    "registers",
    [{"columns": 4096, "rows": 32768, "dtype": torch.bfloat16}],
    register_providers,
    limit="copy",
    work="2 * rows * columns * itemsize",
)

# %%

per_row = {row["case"]: row["spills"] * 32 * row["warps"] for row in facts.rows}
lab.table(
    [
        {
            "limit": row["case"].replace(
                "Kernel Book", f"no limit ({row['registers']} used)"
            ),
            "spills per thread": row["spills"],
            "spills per row": f"{per_row[row['case']]:,}",
            "µs": f"{1e3 * limited.milliseconds_at(row['case']):.0f}",
            "% of a copy": round(100 * limited.share(row["case"])),
        }
        for row in sorted(facts.rows, key=lambda row: per_row[row["case"]])
    ],
    "A softmax of 32,768 × 4,096, against a copy of that size",
)

# %%

# Reading
needs = cell(facts, "Kernel Book", "registers")
untouched, tight, spread_out = (
    100 * limited.share(name)
    for name in ("Kernel Book", "32 registers", "32 registers, 4 warps")
)
rises = sorted(per_row, key=per_row.get) == sorted(per_row, key=limited.milliseconds_at)
lab.read(
    (
        f"With 32 registers instead of {needs:.0f}, the kernel takes {untouched / tight:.1f} times "
        "as long, because its threads spill. "
        if tight < 0.95 * untouched
        else f"With 32 registers instead of {needs:.0f}, the threads spill, yet the kernel is just "
        "as fast. "
    )
    + (
        "Four warps help under the same limit, since each thread then holds fewer values."
        + (
            " From line to line, the time rises with the spills per row."
            if rises
            else ""
        )
        if spread_out > 1.05 * tight
        else "More warps do not help."
    )
)

# %%

# Measuring
KINDS = {  # in SASS, and in PTX
    "load": (r"LDG\.", r"ld\.global"),
    "maximum": (r"FMNMX", r"max\.f32"),
    "exponential": (r"MUFU\.EX2", r"ex2\.approx"),
    "shuffle": (r"SHFL\.", r"shfl\.sync"),
    "barrier": (r"BAR\.SYNC", r"bar\.sync"),
    "store": (r"STG\.", r"st\.global"),
    "spill": (r"STL", r"st\.local"),
    "spill, read back": (r"LDL", r"ld\.local"),
}


def machine_code(run):
    """The name and the lines of what a kernel was compiled to, without nvdisasm's own columns."""
    [(_, compiled)] = lab.compiled_by(run)
    try:
        name, text = "SASS", compiled.asm["sass"]
    except (OSError, RuntimeError, subprocess.SubprocessError):
        name, text = "PTX", compiled.asm["ptx"]
    return name, [
        " ".join(line.split("\t", 1)[-1].split()) for line in text.splitlines()
    ]


def instructions():
    runs = runs_under(LIMITS, 64, 4096)
    language, lines = machine_code(runs["Kernel Book"])
    _, squeezed = machine_code(runs["32 registers"])
    rows = []
    for kind, patterns in KINDS.items():
        pattern = re.compile(rf"^(@!?%?U?[Pp]\w+ )?{patterns[language == 'PTX']}")
        here, there = (
            [line for line in text if pattern.match(line)] for text in (lines, squeezed)
        )
        rows.append(
            {
                "kind": kind,
                f"first in {language}": next(iter(here + there), "none"),
                "times": len(here),
                "times with 32 registers": len(there),
            }
        )
    return rows


# %%

code = lab.measure("The instructions of the softmax kernel", instructions)

# %%

# Folded: In machine code: the instructions, counted, and how to read a line
load = cell(code, "load", "times")
became = (
    f"With 32 registers, the compiler adds {cell(code, 'spill', 'times with 32 registers'):.0f} "
    "stores to local memory, where spilled values live, and "
    f"{cell(code, 'spill, read back', 'times with 32 registers'):.0f} loads from it. That is more "
    f"than the {cell(facts, '32 registers', 'spills'):.0f} spills in the table above, which counts "
    "32-bit slots in memory: one slot holds several values in turn."
)
if code.rows and "first in PTX" in code.rows[0]:
    became = "PTX shows no spills, because `ptxas` decides on them later; see the table above."
line = str(cell(code, "load", "first in SASS")) if "SASS" in str(code.rows) else ""
pattern = r"@(P\d) LDG\.E(?:\.[A-Z]+)*\.(\d+) R(\d+), desc\[\w+\]\[R(\d+)\.64\];"
if parts := re.fullmatch(pattern, line):
    predicate, bits, into, address = parts[1], *map(int, parts.groups()[1:])
    text = (
        f"`{line}` runs where the predicate {predicate}, the mask of the load, holds. It loads "
        f"{bits} bits from global memory (`LDG`) into the registers R{into} to "
        f"R{into + bits // 32 - 1}, from the 64-bit address (`E`) in R{address} and R{address + 1}."
        + (" `EL` asks the cache to evict them last." if ".EL." in line else "")
    )
else:
    text = "Each line names the operation, then where its result goes, then its inputs."
lab.together(
    lab.read(
        "In SASS, the machine code of NVIDIA GPUs, a spill is a store to a thread's own memory and "
        "a later load from it. If `nvdisasm` is installed, Triton provides the SASS as "
        "`compiled.asm['sass']`; otherwise look at PTX, the language from which it is made, in "
        "`compiled.asm['ptx']`. The table counts the instructions of each kind, without a limit on "
        "registers and with a limit of 32."
    ),
    code,
    lab.read(
        f"Each thread holds 64 numbers of 16 bits and loads them with {load:.0f} instructions of "
        f"{64 * 16 / load:.0f} bits each, the widest that Hopper has. {text}"
    ),
    lab.read(became),
)

# %%
# **Ask the counters.** NVIDIA's Nsight Compute, ``ncu``, runs a script and prints the hardware
# counters that you name for each kernel launch. These four tell you the most:
#
# .. code-block:: console
#
#    ncu --kernel-name "regex:row_fwd|online_fwd" --metrics \
#    dram__bytes_read.sum,dram__bytes_write.sum,\
#    dram__throughput.avg.pct_of_peak_sustained_elapsed,\
#    sm__throughput.avg.pct_of_peak_sustained_elapsed \
#        python script.py
#
# If it answers ``ERR_NVGPUCTRPERM``, an administrator must first permit access to the counters. By
# default, it fixes the clock and flushes the caches before each launch, so take bytes from it and
# times from ``gpu_time``.
#
# We profile three softmaxes, each with an input and an output of 268 MB: ``row``, the slow ``row``
# from above, and ``online``, another kernel of the softmax chapter, which loads every row twice.
# Guess how many bytes ``online`` reads from :term:`HBM`, the GPU's memory.

# Measuring
COUNTERS = {
    "gpu__time_duration.sum": "time of the kernel",
    "dram__bytes_read.sum": "read from HBM",
    "dram__bytes_write.sum": "written to HBM",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "HBM, of its peak",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": "SMs, of their peak",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "active warps, of the most",
    "launch__registers_per_thread": "registers per thread",
}
KERNELS = {"row": "row_fwd_kernel", "online": "online_fwd_kernel"}
PROFILED = """
import torch
from kernelbook import softmax
x = torch.randn(16384, 8192, device="cuda", dtype=torch.bfloat16)
softmax(x)
softmax(x, algorithm="online")
torch.cuda.synchronize()
"""


def ncu(program=PROFILED, kernels=None, counters=None):
    """What Nsight Compute prints of a program's kernels, or raise with its own words."""
    kernels, counters = kernels or KERNELS.values(), counters or COUNTERS
    options = ["--csv", "--print-units", "base", "--clock-control", "none"]
    options += ["--kernel-name", f"regex:{'|'.join(kernels)}"]
    options += ["--metrics", ",".join(counters)]
    path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        ["ncu", *options, sys.executable, "-c", program],
        env=os.environ | path,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    table = [line for line in done.stdout.splitlines() if line.startswith('"')]
    if not table:
        said = re.findall(r"==ERROR== (.*)", done.stdout + done.stderr)
        raise OSError(said[0] if said else f"ended with {done.returncode}")
    return list(csv.DictReader(table))


def counters():
    try:
        found = {(row["Kernel Name"], row["Metric Name"]): row for row in ncu()}
    except FileNotFoundError:
        found = "ncu is not installed"
    except (OSError, subprocess.SubprocessError) as error:
        found = f"ncu: {error}"
    rows = []
    for counter, what in COUNTERS.items() if isinstance(found, dict) else ():
        values = {
            kernel: (float(row["Metric Value"].replace(",", "")), row["Metric Unit"])
            for (name, metric), row in found.items()
            for kernel, whole in KERNELS.items()
            if metric == counter and name.startswith(whole)
        }
        if len(values) == len(KERNELS):
            [unit] = {unit for _, unit in values.values()}
            numbers = {kernel: values[kernel][0] for kernel in KERNELS}
            rows.append({"what": what, **numbers, "unit": unit, "counter": counter})
    if not rows:
        said = found if isinstance(found, str) else "ncu did not name both kernels"
        nothing = dict.fromkeys(KERNELS, 0)
        rows = [{"what": "absent", **nothing, "unit": "", "counter": said}]
    return rows


# %%

SPILLING = """
import torch
from kernelbook.ops.softmax.forward import row_fwd_kernel
x = torch.randn(32768, 4096, device="cuda", dtype=torch.bfloat16)
y = torch.empty_like(x)
for limit in {}, {"maxnreg": 32}:
    args = x, y, 4096, 32768, 4096, 1, 4096
    row_fwd_kernel[(32768,)](*args, num_warps=2, **limit)
torch.cuda.synchronize()
"""
OF_SPILLS = {
    "dram__bytes_read.sum": "read from HBM",
    "dram__bytes_write.sum": "written to HBM",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "HBM, of its peak",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": "SMs, of their peak",
    "l1tex__t_bytes_pipe_lsu_mem_local_op_st.sum": "spilled",
    "l1tex__t_bytes_pipe_lsu_mem_local_op_ld.sum": "spills read back",
}


def counters_of_spills():
    """Of the same kernel, first with all registers that it wants, and then with 32."""
    found = {counter: [] for counter in OF_SPILLS}
    for row in ncu(SPILLING, ["row_fwd_kernel"], OF_SPILLS):
        if row["Metric Name"] in found:
            found[row["Metric Name"]].append(
                float(row["Metric Value"].replace(",", ""))
            )
    return [
        {
            "what": OF_SPILLS[counter],
            "no limit": of_both[0],
            "32 registers": of_both[1],
            "counter": counter,
        }
        for counter, of_both in found.items()
    ]


counted = lab.measure("Counters of two softmaxes, 16,384 × 8,192", counters)
of_spills = lab.attempt(
    "Counters of a softmax that spills, 32,768 × 4,096", counters_of_spills
)

# %%

counts = {row["what"]: row for row in counted.rows}
slow = {row["what"]: row["32 registers"] for row in of_spills.rows}


def count(what, kernel="row"):
    return counts.get(what, {}).get(kernel, nan)


paper = 16384 * 8192 * 2 / 1e6
shown = {
    "read from HBM, MB": ("read from HBM", 1e6),
    "written to HBM, MB": ("written to HBM", 1e6),
    "HBM busy, % of its peak": ("HBM, of its peak", 1),
    "SMs busy, % of their peak": ("SMs, of their peak", 1),
}
lab.table(
    [
        {"counted": label}
        | {kernel: f"{count(what, kernel) / unit:,.0f}" for kernel in KERNELS}
        | ({"row, 32 registers": f"{slow[what] / unit:,.0f}"} if what in slow else {})
        for label, (what, unit) in shown.items()
        if "absent" not in counts
    ],
    "What the hardware counted",
)

# %%

# Reading
read, twice, written = (
    count("read from HBM") / 1e6,
    count("read from HBM", "online") / 1e6,
    count("written to HBM") / 1e6,
)
writes = (
    " and writes a little less (see the fold)"
    if written < 0.98 * paper
    else " and writes no more"
    if written < 1.02 * paper
    else f" and writes {written:.0f} MB"
)
by_row = (
    f"`row` reads what it must on paper{writes}. It keeps HBM {count('HBM, of its peak'):.0f} % "
    "busy. More is hardly possible, because in the table above `row` is as fast as a copy of as "
    "many bytes. The kernel waits for memory, as the roofline predicts."
    if read < 1.02 * paper and untouched > 98
    else f"`row` reads what it must on paper{writes}. It keeps HBM "
    f"{count('HBM, of its peak'):.0f} % busy, and reached {untouched:.0f} % of a copy's speed."
    if read < 1.02 * paper
    else f"`row` reads {read:.0f} MB from HBM, although {paper:.0f} would do."
)
by_online = (
    "`online` reads no more, so it must have found each row in a cache the second time."
    if twice < 1.05 * paper
    else f"`online` reads {twice:.0f} MB, some bytes twice."
)
if "absent" in counts:
    by_row = f"On this machine, we could not read them: {counted.rows[0]['counter']}."
lab.read(by_row)

# %%

# Reading
None if "absent" in counts else lab.read(by_online)

# %%

# Reading
moved = (slow.get("read from HBM", nan) + slow.get("written to HBM", nan)) / 1e6
local = (slow.get("spilled", nan) + slow.get("spills read back", nan)) / 1e6
share = slow.get("HBM, of its peak", nan)
longer = moved / (read + written) * count("HBM, of its peak") / share  # bytes by rate
found = ""
if moved > 1.2 * 2 * paper:
    found = (
        f"The slow kernel moves {moved / 2 / paper:.1f} times the bytes that its job needs, "
        "because much of what its threads spill passes through HBM (see the fold). "
        + (
            f"At {share:.0f} instead of {count('HBM, of its peak'):.0f} % of HBM's peak, these "
            f"bytes explain why the kernel takes {untouched / tight:.1f} times as long. **Busy "
            "alone proves nothing**: compare the bytes with those on paper."
            if abs(longer / (untouched / tight) - 1) < 0.1
            and share > 0.7 * count("HBM, of its peak")
            else f"HBM is {share:.0f} % busy, so **busy alone proves nothing**: compare "
            "the bytes with those on paper."
            if share > 0.7 * count("HBM, of its peak")
            else f"Even so, HBM is only {share:.0f} % busy."
        )
    )
elif moved > 0:
    found = (
        f"For the slow kernel, HBM moves hardly more than on paper, {moved:,.0f} MB, and is only "
        f"{share:.0f} % busy, so the spilled values stay in the caches: they account for "
        f"{local:,.0f} MB that pass through L1."
    )
lab.read(found) if found else None

# %%

# Folded: All counters, and the account of the spills
both = [count(what, "online") for what in ("HBM, of its peak", "SMs, of their peak")]
spilled_mb, back_mb = (
    slow.get(what, nan) / 1e6 for what in ("spilled", "spills read back")
)
more_written, more_read = (
    slow.get(what, nan) / 1e6 - paper for what in ("written to HBM", "read from HBM")
)
lab.together(
    lab.read(
        "`ncu` runs a kernel several times to read all its counters. We left the clock free, with "
        "`--clock-control none`."
        + (
            f" About {round(paper) - round(written)} MB of the output of `row` are probably still "
            "in L2 when the kernel ends, and not written to HBM yet."
            if paper - written > 0.02 * paper
            else ""
        )
        + (" `online` keeps both HBM and the SMs busy." if min(both) > 60 else "")
    ),
    counted,
    of_spills,
    lab.read(
        f"The threads of the slow kernel store {spilled_mb:,.0f} MB of spilled values and read "
        f"{back_mb:,.0f} back. HBM writes {more_written:,.0f} MB more than the job needs and reads "
        f"{more_read:,.0f} more: most of the spilled values are written to HBM in the end, but "
        "more than half of what the threads read back comes from a cache."
        if more_read < 0.5 * back_mb and more_written > 0.5 * spilled_mb
        else f"The threads of the slow kernel store {spilled_mb:,.0f} MB of spilled values and "
        f"read {back_mb:,.0f} back, while HBM writes {more_written:,.0f} MB and reads "
        f"{more_read:,.0f} MB more than the job needs."
    )
    if slow
    else None,
)

# %%
# These four numbers tell you where to search. As a rule of thumb, HBM or an :term:`SM` is busy
# above 60 % of its peak.
#
# - *HBM above 80 %, bytes as on paper:* the kernel is near its roof. Use a smaller dtype, or
#   fuse it with its neighbour.
# - *HBM busy, more bytes than on paper:* look for spills, a second read that no cache catches, or
#   neighbouring threads that do not load neighbouring addresses (:term:`coalescing`).
# - *SMs busy:* use fewer instructions, or :term:`matrix units <matrix unit>` for any matmul.
# - *Both busy:* begin with the busier of the two.
# - *Neither busy:* threads wait. Give each SM more :term:`warps <warp>` (:term:`occupancy`), or
#   each thread more loads at a time.

# %%
# A checklist
# -----------
#
# If a time looks wrong, start from the symptom:
#
# - *Too fast to be true:* the call returned before the kernel had run. Wait for the GPU.
# - *Tens of microseconds, whatever the kernel does:* you timed the host. Pause before the first
#   event.
# - *Faster than memory allows:* the input was in the cache. Flush L2 before each run.
# - *Seconds on the first call:* the kernel was compiling. Warm up with the same shapes, dtypes and
#   options.
# - *Different on every run:* identical runs vary. Take the median of more of them.
# - *Different after another kernel:* the clock may have changed. Pause, shuffle the order, and run
#   an A/A test.
# - *Dominated by the host:* launches outlast kernels. Replay a CUDA graph.
# - *Far below the roof:* the kernel wastes something. Print ``n_regs`` and ``n_spills``, then
#   compare the bytes of ``ncu`` with those on paper.
#
# Exercises
# ---------
#
# **1. How sure is a median?** However the times are distributed, each of :math:`n` independent runs
# is below the true median with probability 1/2. For 20 and for 100 runs, find the largest :math:`k`
# for which the true median lies between the :math:`k`-th fastest and the :math:`k`-th slowest run
# in at least 95 of 100 measurements. Check your answer with times from a long-tailed distribution.

# %%

# Solution: how sure is a median?
from math import comb


def order_statistic(n, confidence=0.95):
    """The largest k such that the interval from the k-th fastest to the k-th slowest holds."""
    k, outside = 0, 0.0
    while 2 * (outside + comb(n, k) / 2**n) <= 1 - confidence:
        outside += comb(n, k) / 2**n
        k += 1
    return k


draw = numpy.random.default_rng(0)
rows = []
for n in (20, 100):
    k = order_statistic(n)
    samples = numpy.sort(draw.exponential(size=(20000, n)), axis=1)
    truth = numpy.log(2)  # the median of the exponential distribution
    inside = ((samples[:, k - 1] <= truth) & (truth <= samples[:, n - k])).mean()
    rows.append({"runs": n, "k": k, "of 100 intervals hold": round(100 * inside, 1)})
    assert 0.945 < inside < 0.98
lab.table(rows, "The median lies between the k-th fastest and the k-th slowest run")

# %%
# **2. Time your own kernel.** With ``clock_and_wait`` and ``gpu_time``, time the weighted sum of
# :doc:`the first chapter </chapters/first_kernel>`, ``kernelbook.weighted_sum(x, weight)``, in
# bfloat16 on 16 and on 65,536 rows of 4,096 columns. Run an A/A test. What share of a copy's speed
# does the larger input reach?

# %%

# Solution: time your own kernel
text = "The first chapter has no record yet, so there is nothing to compare with."
if record := results.find("first_kernel"):
    sweep = record["sweeps"]["forward"]
    tall = {point["rows"]: place for place, point in enumerate(sweep["points"])}
    few, whole, copied = (
        1e3 * sweep["milliseconds"][name][tall[rows]][1]
        for name, rows in (("Kernel Book", 16), ("Kernel Book", 65536), ("copy", 65536))
    )
    text = (
        f"The record of the first chapter shows {few:.1f} µs for 16 rows, too short to be more "
        f"than an upper bound, and {whole:.0f} µs for 65,536 rows, which is "
        f"{100 * copied / whole:.0f} % of the speed of a copy that moves as many bytes. "
        "`clock_and_wait` should show tens of microseconds more for either, all of them the host's."
    )
lab.read(text)

# %%
# **3. A sum in float16 that loses nothing.** Add 0.01 a thousand times in float16, as in the fold
# under “Is it right?”. In a second float16 number, keep what each addition rounds away, and give it
# back with the next addition (Kahan, 1965). How far off is the sum now?

# %%


# Solution: a sum in float16 that loses nothing
def compensated(number):
    total, lost = torch.zeros_like(number), torch.zeros_like(number)
    for _ in range(1000):
        number_and_lost = number - lost
        sum_now = total + number_and_lost
        lost = (sum_now - total) - number_and_lost  # zero, if it were exact
        total = sum_now
    return total


term = torch.tensor(0.01, dtype=torch.float16)
truth = 1000 * term.double()
plain = torch.zeros_like(term)
for _ in range(1000):
    plain += term
print(
    f"Instead of {truth.item():.4f}, the sum is {plain.item():.4f} without the second number, and "
    f"{compensated(term).item():.4f} with it, the nearest number in float16."
)
assert compensated(term) == truth.to(torch.float16)
lab.check(
    "A compensated sum",
    [
        lab.Case(
            "1,000 numbers",
            "forward",
            compensated(term)[None],
            term.expand(1000).sum()[None],  # which PyTorch accumulates in float32
            truth[None],
        )
    ],
)

# %%
# **4. Where does a matmul cross the ridge?** A matmul of two :math:`n \times n` matrices in
# bfloat16 does :math:`2 n^3` FLOPs. Count its bytes, derive its intensity, and find how large
# :math:`n` must be before arithmetic, rather than memory, limits it on the recorded GPU.

# %%

# Solution: where does a matmul cross the ridge?
for n in (256, 1024):
    intensity = evaluate("2 * n * n * n / (3 * n * n * 2)", {"n": n})
    assert intensity == n / 3  # three matrices of 2 bytes per number
lab.read(
    "The intensity is n / 3, so the matmul crosses the ridge at n of about "
    f"{round(3 * ridge, -1):,.0f}. Far below that, it waits for memory, as a copy does, and is so "
    "small that it also waits for its launch."
)

# %%
# References
# ----------
#
# - Williams, Waterman, Patterson. *Roofline: an insightful visual performance model for multicore
#   architectures.* Communications of the ACM 52(4), 2009.
# - Hoefler, Belli. *Scientific benchmarking of parallel computing systems: twelve ways to tell the
#   masses when reporting performance results.* SC 2015.
# - Kahan. *Further remarks on reducing truncation errors.* Communications of the ACM 8(1), 1965.
# - Micikevicius et al. *Mixed precision training.* ICLR 2018.

# %%

# Closing
lab.finish(
    f"A small softmax takes {min(small.values()):.0f} to {max(small.values()):.0f} µs, depending "
    "on how it is timed"
)
