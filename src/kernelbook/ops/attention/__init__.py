"""Exact attention in tiles: softmax(scale * q k^T) v, without the matrix of scores in memory.

    operator.py   the public function, what it refuses, and what autograd sees
    forward.py    one kernel: queries stay, keys and values stream past
    decoding.py   few queries and many keys: programs share the keys of a head, and merge
    backward.py   the gradients
    fp8.py        operands of 8 bits, forward only
    varlen.py     packed sequences; varlen_backward.py and varlen_operator.py belong to it
    scope.py      who sees what: causal masks and windows
    quantize.py   how operands get 8 bits
    tiles.py      what the kernels share: tensor descriptors
    tuned.py      how kernels are cut into tiles, by architecture
    tiled.py      the same algorithm in plain PyTorch, to read first

On Hopper GPUs there is a second forward kernel, in Gluon: see kernelbook.ops.hopper.

Sources: Dao, Fu, Ermon, Rudra and Ré, "FlashAttention: fast and memory-efficient exact attention
with IO-awareness", NeurIPS 2022; Dao, "FlashAttention-2", ICLR 2024.
"""

from kernelbook.ops.attention.operator import attention
from kernelbook.ops.attention.quantize import Quantized, quantize
from kernelbook.ops.attention.varlen_operator import attention_varlen

__all__ = ["Quantized", "attention", "attention_varlen", "quantize"]
