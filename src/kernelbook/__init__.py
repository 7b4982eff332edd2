"""Kernel Book: GPU kernels in Triton, each explained in a chapter and tested against float64."""

from kernelbook import runtime  # noqa: F401  (first: it decides how kernels run)
from kernelbook.ops.attention import Quantized, attention, attention_varlen, quantize
from kernelbook.ops.dropout import dropout, masked_dropout, seeded_dropout
from kernelbook.ops.layer_norm import layer_norm
from kernelbook.ops.ring import (
    all_to_all_attention,
    ring_attention,
    shard_sequence,
    unshard_sequence,
)
from kernelbook.ops.softmax import softmax
from kernelbook.ops.weighted_sum import weighted_sum

__all__ = [
    "Quantized",
    "all_to_all_attention",
    "attention",
    "attention_varlen",
    "dropout",
    "layer_norm",
    "masked_dropout",
    "quantize",
    "ring_attention",
    "seeded_dropout",
    "shard_sequence",
    "softmax",
    "unshard_sequence",
    "weighted_sum",
]
