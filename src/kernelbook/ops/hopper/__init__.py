"""Attention for Hopper GPUs in Gluon, the language below Triton's: warps have roles.

choice.py     which kernel computes a call of attention, this one or the plain one, and why
forward.py    the forward pass
fp8.py        the forward pass with operands of 8 bits; attention does not choose it yet
parts.py      what Gluon lacks, or its versions name differently
"""
