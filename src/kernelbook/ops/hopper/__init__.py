"""Attention for Hopper GPUs in Gluon, the language below Triton's: warps have roles.

choice.py            which kernel computes a call of attention, this one or the plain one, and why
backward_choice.py   the same for gradients
fp8_choice.py        the same for operands of 8 bits
forward.py           the forward pass
backward.py          the backward pass, in one sweep
fp8.py               the forward pass with operands of 8 bits
varlen.py            both passes of packed sequences
parts.py             what Gluon lacks, or its versions name differently
"""
