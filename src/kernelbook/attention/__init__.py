"""Exact attention in tiles: softmax(scale * q k^T) v, without the matrix of scores in memory.

    forward.py    one kernel: queries stay, keys and values stream past
    backward.py   the gradients
    fp8.py        operands of 8 bits, forward only
    tiled.py      the same algorithm in plain PyTorch, to read first
    operator.py   the autograd Function
    common.py     what they share: tensor descriptors, who sees what, configurations

Sources: Dao, Fu, Ermon, Rudra and Ré, "FlashAttention: fast and memory-efficient exact attention
with IO-awareness", NeurIPS 2022; Dao, "FlashAttention-2", ICLR 2024.
"""

import math

import torch

from kernelbook import runtime
from kernelbook.attention import fp8
from kernelbook.attention.fp8 import quantize
from kernelbook.attention.operator import _apply, _apply_fp8

__all__ = ["attention", "quantize"]


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    deterministic: bool = True,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention, as :func:`torch.nn.functional.scaled_dot_product_attention` computes it.

    out = softmax(scale * q k^T) v, a tile of keys at a time: besides inputs and outputs it needs
    memory that grows with the length, not with its square.

    A tensor is read where it lies, a transposed view of (batch, seqlen, heads, head_dim) too, if
    its last dimension is contiguous and its address and other strides are multiples of 16 bytes.
    Any other is copied first.

    Operands may have 8 bits, ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``: v alone, beside q
    and k in float16 or bfloat16, or all three. Their values are stored * descale, as
    :func:`quantize` returns them. The weights are rounded to float8_e4m3fn. Keys of v are read
    contiguous, that is v.stride(2) == 1: ``quantize(v, contiguous="seqlen")``. Any other v is
    copied into that layout first, which reads and writes it once. There is no gradient.

    Args:
        q: queries, (batch, heads, seqlen_q, head_dim), float32, float16, bfloat16 or FP8; head_dim
            from 16 to 256, fastest at 64 and 128 and never faster than at the next power of two.
        k: keys, (batch, heads, seqlen_k, head_dim), of the dtype of ``q``.
        v: values, of the shape of ``k``, and of the dtype of ``q`` or FP8.
        is_causal: whether query i sees only keys j <= i + seqlen_k - seqlen_q, so that the last
            query sees all keys. PyTorch aligns the first query with the first key instead, which
            differs when the lengths do.
        scale: what the products of q and k are multiplied by, above 0; ``None`` means
            head_dim ** -0.5.
        enable_gqa: whether ``k`` and ``v`` may have fewer heads than ``q``, by a whole factor g:
            query head h then reads head h // g.
        return_lse: whether to return ``(out, lse)``, where lse = log(sum(exp(scale * q k^T))).
        deterministic: whether gradients are the same bits in every run. False lets backward add
            up the gradient of ``q`` in any order, in one sweep instead of two.
        q_descale: with ``q`` in FP8, what its stored numbers are multiplied by: above 0, float32,
            one element, or (batch, heads) for one a head; ``None`` means 1.
        k_descale: the same for ``k``, and its heads.
        v_descale: the same for ``v``; it may have either sign.
        out_dtype: with ``v`` in FP8, the dtype of the result, float16 or bfloat16; ``None`` means
            that of ``q``, or bfloat16 where ``q`` is in FP8.

    Returns:
        out, of the shape and dtype of ``q``, contiguous; with ``return_lse`` also lse, natural
        logarithm, float32, (batch, heads, seqlen_q). A query that sees no key has out 0, lse -inf
        and a gradient of 0. Both can be differentiated once.

    Raises:
        TypeError: an argument is of another kind or dtype.
        ValueError: shapes do not go together, head_dim or ``scale`` is out of range, a tensor is
            not where kernels run, or the device has no FP8 products.
        RuntimeError: a gradient is asked for that there is not.

    Sources: Dao et al., FlashAttention, NeurIPS 2022; Dao, FlashAttention-2, ICLR 2024. Grouped
    heads: Ainslie et al., GQA, EMNLP 2023.
    """
    flags = {
        "is_causal": is_causal,
        "enable_gqa": enable_gqa,
        "return_lse": return_lse,
        "deterministic": deterministic,
    }
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise TypeError(f"{name} must be a bool, got {type(flag).__name__}.")
    _check_tensors(q, k, v, enable_gqa)
    if scale is None:
        scale = q.shape[-1] ** -0.5
    elif isinstance(scale, bool) or not isinstance(scale, int | float):
        raise TypeError(f"scale must be a float or None, got {type(scale).__name__}.")
    elif not 0 < scale < math.inf:
        raise ValueError(
            f"scale must be above 0 and finite, got {scale}: for a negative one pass -q and -scale."
        )
    descales = {"q": q_descale, "k": k_descale, "v": v_descale}
    fp8.check_descales({"q": q, "k": k, "v": v}, descales)
    if v.dtype in fp8.DTYPES:
        dtype = fp8.result_dtype(q, out_dtype)
        out, lse = _apply_fp8(q, k, v, tuple(descales.values()), is_causal, float(scale), dtype)
    elif out_dtype not in (None, q.dtype):
        raise TypeError(
            f"out_dtype must be None where v is not FP8, got {out_dtype}: convert the result."
        )
    else:
        out, lse = _apply(q, k, v, is_causal, float(scale), deterministic)
    return (out, lse) if return_lse else out


def _check_tensors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, enable_gqa: bool) -> None:
    """Raise unless q, k and v are tensors that go together, where kernels run."""
    operands = {"q": q, "k": k, "v": v}
    for name, x in operands.items():
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}.")
    in_fp8 = any(x.dtype in fp8.DTYPES for x in operands.values())
    if in_fp8:
        fp8.check_operands(q, k, v)
    for name, x in operands.items():
        if not in_fp8 and x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise TypeError(
                f"{name} must be float32, float16 or bfloat16, got {x.dtype}: pass "
                f"{name}.float(), for example."
            )
        if not in_fp8 and x.dtype != q.dtype:
            raise TypeError(
                f"{name} must have the dtype of q, {q.dtype}, got {x.dtype}: pass {name}.to(q)."
            )
        if x.ndim != 4:
            raise ValueError(
                f"{name} must be (batch, heads, seqlen, head_dim), got shape {tuple(x.shape)}: "
                f"add the dimensions that are missing by unsqueeze."
            )
    batch, heads, _, head_dim = q.shape
    if not 16 <= head_dim <= 256:
        raise ValueError(
            f"head_dim, the last size of q, must lie in [16, 256], got {head_dim}: pad q, k and v "
            "with zeros and pass scale, or split them into more heads."
        )
    if k.shape[0] != batch or k.shape[3] != head_dim:
        raise ValueError(
            f"k must agree with q in batch and head_dim, got k of shape {tuple(k.shape)} for q of "
            f"shape {tuple(q.shape)}."
        )
    if v.shape != k.shape:
        raise ValueError(
            f"v must have the shape of k, {tuple(k.shape)}, got {tuple(v.shape)}: for values of "
            "another size pad them with zeros."
        )
    heads_k = k.shape[1]
    if enable_gqa:
        if heads != heads_k and (heads_k == 0 or heads % heads_k):
            raise ValueError(
                f"the heads of k must divide those of q, got {heads_k} for {heads}: pass k and v "
                f"whose number of heads divides {heads}."
            )
    elif heads != heads_k:
        raise ValueError(
            f"k must have as many heads as q, {heads}, got {heads_k}: pass enable_gqa=True if "
            "query heads share keys."
        )
    runtime.require_device(q=q, k=k, v=v)
