"""Softmax over one dimension: forward.py, backward.py, and operator.py, which joins the two."""

from kernelbook.ops.softmax.operator import softmax

__all__ = ["softmax"]
