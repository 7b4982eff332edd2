r"""
Placeholder
===========
How fast can a stored mask be, and what does :math:`x \odot m` cost?

You will learn

- how a kernel draws,
- what a **check** is, with ``literal`` text and :func:`kernelbook.dropout`,
- `a link <https://triton-lang.org>`_.
"""
# sphinx_gallery_thumbnail_number = 1
import matplotlib.pyplot as plt
from kernelbook.lab.display import note, read, table, source

note("Checks were run in Triton's interpreter. Speed was recorded on NVIDIA H200 (driver 580, torch 2.13.0, triton 3.7.1, commit abcdef1, 2026-11-20).")

# %%
# The problem
# -----------
# Some prose with mathematics.
#
# .. math::
#    y_i &= \frac{m_i x_i}{1 - p} \\
#    \sigma^2 &= \frac{1}{N}\sum_{i=1}^{N} (x_i - \mu)^2 + \int_0^1 \frac{a+b+c+d+e+f+g}{h+i+j+k}\, dx + \sum_{i=1}^{N} (x_i - \mu)^2
#
# .. note::
#    A note with ``code``.
#
# .. tip:: A tip.
#
# ==========  =====
# provider    time
# ==========  =====
# copy        1
# ours        2
# ==========  =====
#
# .. image:: /figures/zz.svg
#    :alt: a drawing of blocks

fig, ax = plt.subplots(figsize=(7, 3.6))
ax.plot([1, 2, 3], [1, 4, 9], label="ours")
ax.set_xlabel("elements"); ax.set_ylabel("% of copy"); ax.legend()
fig.set_label("A line that rises from 1 to 9")

# %%
# A paragraph before a table.

table([{"input": "(1000,)", "dtype": "float16", "pass": "forward", "error": "1e-4", "PyTorch's": "2e-4", "tolerance": "4e-4", "verdict": True, "registers": 32, "a wide column": "some wide value"}], "forward: error against float64.")

# %%
def kernel(x):
    # -- draw: numbers
    return x + 1  # a comment that is rather long so that the line scrolls on a phone width page

source(kernel, "draw")

# %%
# Reading
# sphinx_gallery_capture_repr_block = ("_repr_html_",)
read("The kernel reaches **0.99** of the copy at `2**28` elements, and so on for a sentence.")

# %%
# Exercises
# ---------
# 1. First exercise.
# 2. Second, see :doc:`/glossary` and :ref:`run-one-chapter`.

# Solution: a seed a row
print("hello from a solution")
table([{"a": 1}], "one row")
