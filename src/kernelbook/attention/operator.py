"""Attention as PyTorch's autograd sees it: what is saved, and what goes in which dtype."""

import torch

from kernelbook import runtime
from kernelbook.attention.backward import _attention_backward
from kernelbook.attention.common import _fit
from kernelbook.attention.forward import _attention_forward
from kernelbook.attention.fp8 import _attention_fp8_forward


def _prepare(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Return tensors in the kernels' dtype, copied where they do not lie as descriptors ask."""
    return [_fit(x.to(runtime.kernel_dtype(x.dtype))) for x in tensors]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, is_causal, sm_scale, deterministic):
        ctx.set_materialize_grads(False)
        ctx.is_causal, ctx.sm_scale, ctx.deterministic = is_causal, sm_scale, deterministic
        if q.numel() and k.numel():
            with runtime.launching_on(q):
                out, lse = _attention_forward(*_prepare(q, k, v), is_causal, sm_scale)
        else:  # no query, or none that sees a key
            out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
            lse = torch.full(q.shape[:3], -torch.inf, device=q.device)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        return out, lse

    @staticmethod
    def backward(ctx, do, dlse):
        q, k, v, out, lse = ctx.saved_tensors
        with torch.no_grad():
            grads = _gradients(ctx, q, k, v, out, lse, do, dlse)
        if torch.is_grad_enabled():  # by create_graph=True
            grads = (_Once.apply(grad, q, k, v, do, dlse) for grad in grads)
        return *grads, None, None, None


def _gradients(ctx, q, k, v, out, lse, do, dlse):
    """Return dq, dk and dv; a gradient that did not come is None, and counts as zero."""
    if (do is None and dlse is None) or not (q.numel() and k.numel()):
        return tuple(torch.zeros_like(x) for x in (q, k, v))
    do = torch.zeros_like(out) if do is None else do
    with runtime.launching_on(q):
        dq, dk, dv = _attention_backward(
            *_prepare(q, k, v, out), lse, *_prepare(do), ctx.is_causal, ctx.sm_scale,
            ctx.deterministic, dlse,
        )  # fmt: skip
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


class _Once(torch.autograd.Function):
    """Hands a gradient on, and refuses to be differentiated itself."""

    @staticmethod
    def forward(ctx, grad, *operands):
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError(
            "attention can be differentiated once, and its gradient was to be differentiated: use "
            "softmax(scale * q @ k.mT) @ v where second derivatives are needed."
        )


@torch.compiler.disable
def _apply(q, k, v, is_causal, sm_scale, deterministic):
    """Run the operator; torch.compile breaks its graph here, and calls it as it is."""
    return _Attention.apply(q, k, v, is_causal, sm_scale, deterministic)


class _AttentionFP8(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, descales, is_causal, sm_scale, out_dtype):
        if q.numel() and k.numel():
            with runtime.launching_on(q):
                out, lse = _attention_fp8_forward(
                    *_prepare(q, k), v.to(runtime.kernel_dtype(v.dtype)), descales, is_causal,
                    sm_scale, runtime.kernel_dtype(out_dtype),
                )  # fmt: skip
        else:  # no query, or none that sees a key
            out = torch.zeros(q.shape, dtype=out_dtype, device=q.device)
            lse = torch.full(q.shape[:3], -torch.inf, device=q.device)
        return out.to(out_dtype), lse

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError(
            "attention with operands in FP8 has no gradient: pass q, k and v in bfloat16 where one "
            "is needed, or call it under torch.no_grad()."
        )


@torch.compiler.disable
def _apply_fp8(q, k, v, descales, is_causal, sm_scale, out_dtype):
    """Run the operator on 8-bit operands; torch.compile breaks its graph here."""
    return _AttentionFP8.apply(q, k, v, descales, is_causal, sm_scale, out_dtype)
