"""Attention for Hopper GPUs in Gluon, the language below Triton's: warps have roles."""
