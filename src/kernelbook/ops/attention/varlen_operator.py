"""The public function for packed sequences: what it refuses, and what autograd sees."""

from collections.abc import Sequence

import torch

from kernelbook import runtime
from kernelbook.ops import checks, library
from kernelbook.ops.attention import scope
from kernelbook.ops.attention.operator import (
    check_head_dim,
    check_heads,
    checked_backend,
    checked_scale,
)
from kernelbook.ops.attention.tiles import PACKED_END, fit
from kernelbook.ops.attention.varlen import attention_varlen_forward
from kernelbook.ops.attention.varlen_backward import attention_varlen_backward
from kernelbook.ops.hopper.choice import Choice, varlen_choice, varlen_in_gluon


def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    is_causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    backend: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of sequences that lie packed, one after the other, without padding.

    Each sequence attends to itself alone, as :func:`attention` computes it: rows
    cu_seqlens_q[b] to cu_seqlens_q[b + 1] of q to the same range of cu_seqlens_k of k and v. A
    sequence may be empty, and may have more keys than queries, or fewer. What one sequence holds,
    NaN for example, changes nothing in another.

    The host never waits for the GPU. It therefore cannot look at the offsets, and offsets that are
    wrong give wrong results instead of an error. Memory outside of the tensors is never touched:
    an end beyond the total counts as the total, one before its start as the start, and a sequence
    longer than the maximum is cut off there. Where no sequence holds a row, or it was cut off, its
    results and gradients are whatever the memory held before.

    A tensor is read where it lies, a slice of packed (total, 3, heads, head_dim) too, if its last
    dimension is contiguous and its address and other strides are multiples of 16 bytes. Any other
    is copied first. Gradients are the same bits in every run.

    Args:
        q: queries of all sequences, (total_q, heads, head_dim), float32, float16 or bfloat16;
            head_dim from 16 to 256.
        k: keys, (total_k, heads, head_dim), of the dtype of ``q``.
        v: values, of the shape and dtype of ``k``.
        cu_seqlens_q: where each sequence of ``q`` begins, and where the last one ends: int32,
            (batch + 1,), on the device of ``q``; the first is 0, the last total_q, and none is
            less than the one before.
        cu_seqlens_k: the same for ``k`` and ``v``.
        max_seqlen_q: at least the queries of the longest sequence. Any larger number gives the same
            results, and launches programs that find nothing to do.
        max_seqlen_k: the same for keys.
        is_causal: whether query i of a sequence sees only keys j <= i + seqlen_k - seqlen_q of it,
            so that its last query sees all its keys.
        window: ``(left, right)``, as in :func:`attention`, within each sequence.
        scale: what the products of q and k are multiplied by; ``None`` means head_dim ** -0.5.
        enable_gqa: whether ``k`` and ``v`` may have fewer heads than ``q``, by a whole factor g:
            query head h then reads head h // g.
        return_lse: whether to return ``(out, lse)``, where lse = log(sum(exp(scale * q k^T))).
        backend: which kernels run, as in :func:`attention`: ``"triton"``, those in plain Triton;
            ``"gluon"``, those for Hopper GPUs in Gluon, in 16 bits and at head_dim 64 or 128;
            ``"auto"``, whichever was measured to be faster.

    Returns:
        out, of the shape and dtype of ``q``, contiguous; with ``return_lse`` also lse, natural
        logarithm, float32, (heads, total_q): heads first, as FlashAttention returns it. A query
        that sees no key has out 0, lse -inf and a gradient of 0. Both can be differentiated once.

    Raises:
        TypeError: an argument is of another kind or dtype.
        ValueError: shapes do not go together, head_dim, ``scale`` or a length is out of range, a
            tensor is not where kernels run, or ``backend`` is ``"gluon"`` and cannot run.
        RuntimeError: a second derivative is asked for.

    Source: Dao, FlashAttention-2, ICLR 2024, whose ``flash_attn_varlen_func`` packs sequences in
    the same way.
    """
    is_causal = checks.flag("is_causal", is_causal)
    enable_gqa = checks.flag("enable_gqa", enable_gqa)
    return_lse = checks.flag("return_lse", return_lse)
    backend = checked_backend(backend)
    for name, x in (("q", q), ("k", k), ("v", v)):
        checks.tensor(name, x)
    for name, x in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        checks.tensor(name, x, (torch.int32,))
    if library.autocasts(q):
        q, k, v = (x.to(torch.get_autocast_dtype(q.device.type)) for x in (q, k, v))
    _check_operands(q, k, v, enable_gqa)
    _check_offsets(cu_seqlens_q, cu_seqlens_k)
    max_seqlen_q = _checked_length("q", max_seqlen_q, cu_seqlens_q.shape[0] - 1, q.shape[0])
    max_seqlen_k = _checked_length("k", max_seqlen_k, cu_seqlens_k.shape[0] - 1, k.shape[0])
    checks.same_device(q=q, k=k, v=v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    sm_scale = q.shape[-1] ** -0.5 if scale is None else checked_scale(scale)
    window = scope.checked_window(window)
    left, right = scope.bounds(is_causal, window, max_seqlen_q, max_seqlen_k)
    if backend == "gluon":
        _choice(q, k, cu_seqlens_k, left, right, backend)  # raises where it cannot run
    out, lse = _ATTENTION_VARLEN(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, left, right, sm_scale,
        backend,
    )  # fmt: skip
    return (out, lse) if return_lse else out


# -- what is refused

MOST_ROWS = PACKED_END.value
"""Where every sequence ends for a descriptor, so that none may be longer."""


def _check_operands(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, enable_gqa: bool) -> None:
    """Raise unless q, k and v are packed tensors that go together."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dtype != q.dtype:
            raise TypeError(
                f"{name} must have the dtype of q, {checks.spell(q.dtype)}, got "
                f"{checks.spell(x.dtype)}: pass {name}.to(q.dtype)."
            )
        if x.ndim != 3:
            raise ValueError(
                f"{name} must be (total, heads, head_dim), got shape {tuple(x.shape)}: join the "
                "sequences along the first dimension, without padding."
            )
        if x.shape[0] >= MOST_ROWS:
            raise ValueError(
                f"{name} must have fewer than {MOST_ROWS} rows, the most that a descriptor of "
                f"packed sequences counts, got {x.shape[0]}: call it for some of the sequences at "
                "a time."
            )
    _, heads, head_dim = q.shape
    check_head_dim(head_dim)
    if k.shape[2] != head_dim:
        raise ValueError(
            f"k must have the head_dim of q, {head_dim}, got {k.shape[2]}: pad with zeros, where "
            "that is meant."
        )
    if v.shape != k.shape:
        raise ValueError(
            f"v must have the shape of k, {tuple(k.shape)}, got {tuple(v.shape)}: for values of "
            "another size pad them with zeros."
        )
    check_heads(heads, k.shape[1], enable_gqa)


def _check_offsets(cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor) -> None:
    """Raise unless the offsets have a shape that can be right."""
    for name, x in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if x.ndim != 1 or x.shape[0] == 0:
            raise ValueError(
                f"{name} must be (batch + 1,), got shape {tuple(x.shape)}: pass where each "
                "sequence begins, and where the last one ends."
            )
    if cu_seqlens_q.shape[0] != cu_seqlens_k.shape[0]:
        raise ValueError(
            f"cu_seqlens_k must have as many offsets as cu_seqlens_q, {cu_seqlens_q.shape[0]}, got "
            f"{cu_seqlens_k.shape[0]}: repeat an offset for a sequence without keys."
        )


def _checked_length(of: str, length: object, batch: int, total: int) -> int:
    """Return the length of the longest sequence as an int, or raise where it cannot be."""
    name = f"max_seqlen_{of}"
    length = checks.integer(name, length)
    if not 0 <= length < 2**31:
        raise ValueError(
            f"{name} must lie in [0, 2**31), got {length}: pass the longest sequence's length."
        )
    if batch * length < total:
        raise ValueError(
            f"{name} must be the length of the longest sequence, got {length}: {batch} sequences "
            f"of it cannot hold the {total} rows of {of}."
        )
    return length


# -- autograd, compilers and torch.func


def _prepare(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Return packed tensors as kernels read them: (1, heads, total, head_dim), that fits."""
    return [fit(runtime.readable(x).transpose(0, 1).unsqueeze(0)) for x in tensors]


def _choice(
    q: torch.Tensor,
    k: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    left: int | None,
    right: int | None,
    backend: str,
    backward: bool = False,
) -> Choice:
    """Return which kernels run."""
    capability = runtime.capability(q.device)
    keys = len(k) / max(len(cu_seqlens_k) - 1, 1)
    return varlen_choice(capability, q.dtype, q.shape[2], (left, right), keys, backend, backward)


def run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    left: int | None,
    right: int | None,
    sm_scale: float,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out and lse."""
    if not (q.numel() and k.numel()):
        out, lse = _like(q)
        return out.zero_(), lse.fill_(-torch.inf)
    offsets = [runtime.readable(x).contiguous() for x in (cu_seqlens_q, cu_seqlens_k)]
    with runtime.launching_on(q):
        operands = *_prepare(q, k, v), *offsets, (max_seqlen_q, max_seqlen_k), (left, right)
        config = _choice(q, k, cu_seqlens_k, left, right, backend).config
        if config:
            forward = varlen_in_gluon()[0].attention_varlen_forward
            out, lse = forward(*operands, sm_scale, config)
        else:
            out, lse = attention_varlen_forward(*operands, sm_scale)
    return out.to(q.dtype), lse


def setup_context(ctx, inputs, output):
    """Keep what backward reads: the inputs, out and lse."""
    q, k, v, cu_seqlens_q, cu_seqlens_k, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, cu_seqlens_q, cu_seqlens_k, *output)
    ctx.set_materialize_grads(False)


def gradient(ctx, do, dlse):
    """Return the gradients of q, k and v. One that did not come is None, and counts as zero."""
    needed = list(ctx.needs_input_grad[:3])
    grads = _ATTENTION_VARLEN_BACKWARD(*ctx.saved_tensors, do, dlse, *ctx.options, needed)
    grads = (dx if n else None for dx, n in zip(grads, needed, strict=True))
    return *grads, *[None] * (2 + len(ctx.options))


def run_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    do: torch.Tensor | None,
    dlse: torch.Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    left: int | None,
    right: int | None,
    sm_scale: float,
    backend: str,
    needed: Sequence[bool],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return dq, dk and dv; what is not needed is empty."""
    if (do is None and dlse is None) or not (q.numel() and k.numel()):
        return tuple(dx.zero_() for dx in _gradients_like(q, k, v, needed))
    do = torch.zeros_like(out) if do is None else do
    dlse = None if dlse is None else runtime.readable(dlse).contiguous()
    offsets = [runtime.readable(x).contiguous() for x in (cu_seqlens_q, cu_seqlens_k)]
    with runtime.launching_on(q):
        operands = (
            *_prepare(q, k, v, do), runtime.readable(out).contiguous(), lse.contiguous(), dlse,
            *offsets, (max_seqlen_q, max_seqlen_k), (left, right), sm_scale,
        )  # fmt: skip
        which = {"dq_needed": needed[0], "dkdv_needed": needed[1] or needed[2]}
        config = _choice(q, k, cu_seqlens_k, left, right, backend, backward=True).config
        if config and all(which.values()):  # for some of them one of the two sweeps suffices
            grads = varlen_in_gluon()[0].attention_varlen_backward(*operands, config)
        else:
            grads = attention_varlen_backward(*operands, **which)
    return tuple(
        dx.squeeze(0).transpose(0, 1).contiguous().to(q.dtype)
        if n
        else torch.empty(0, dtype=q.dtype, device=q.device)
        for dx, n in zip(grads, needed, strict=True)
    )


def _like(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out and lse without their numbers."""
    lse = torch.empty((q.shape[1], q.shape[0]), dtype=torch.float32, device=q.device)
    return torch.empty(q.shape, dtype=q.dtype, device=q.device), lse


def _gradients_like(q, k, v, needed):
    """Return dq, dk and dv without their numbers; what is not needed is empty."""
    shapes = (x.shape if n else (0,) for x, n in zip((q, k, v), needed, strict=True))
    return tuple(torch.empty(shape, dtype=q.dtype, device=q.device) for shape in shapes)


# A batch of calls is one call with more sequences: one after the other, their rows are packed. Rows
# that no sequence of a call holds are two more, one of queries without keys and one of keys alone.


def _join(info, in_dim: int | None, x: torch.Tensor | None, rows: int = 0) -> torch.Tensor | None:
    """Put the calls one after the other along the dimension that counts the rows."""
    return None if x is None else library.batched(info, in_dim, x).movedim(0, rows).flatten(
        rows, rows + 1
    )  # fmt: skip


def _join_offsets(
    info, in_dim: int | None, offsets: torch.Tensor, total: int, of_keys: bool = False
) -> torch.Tensor:
    """Let the offsets of each call begin where the rows of the call before end.

    Those outside of a call's rows, which a call alone takes for its nearest row, would be rows of
    another call.
    """
    calls = torch.arange(info.batch_size, dtype=torch.int32, device=offsets.device) * total
    offsets = library.batched(info, in_dim, offsets).clamp(0, total) + calls.unsqueeze(1)
    end = torch.full((1,), info.batch_size * total, dtype=torch.int32, device=offsets.device)
    between = offsets[:, -1] if of_keys else torch.cat([offsets[1:, 0], end])
    return torch.cat([torch.cat([offsets, between.unsqueeze(1)], 1).flatten(), end])


def _part(info, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """Take the calls apart again."""
    return x.unflatten(dim, (info.batch_size, x.shape[dim] // info.batch_size))


def _batch(info, in_dims, q, k, v, cu_seqlens_q, cu_seqlens_k, *options):
    q, k, v = (_join(info, d, x) for d, x in zip(in_dims[:3], (q, k, v), strict=True))
    cu_seqlens_q = _join_offsets(info, in_dims[3], cu_seqlens_q, q.shape[0] // info.batch_size)
    total_k = k.shape[0] // info.batch_size
    cu_seqlens_k = _join_offsets(info, in_dims[4], cu_seqlens_k, total_k, of_keys=True)
    out, lse = _ATTENTION_VARLEN.op(q, k, v, cu_seqlens_q, cu_seqlens_k, *options)
    return (_part(info, out), _part(info, lse, 1)), (0, 1)


def _batch_backward(info, in_dims, *args):
    q, k, v, cu_seqlens_q, cu_seqlens_k, out, lse, do, dlse, *options, needed = args
    rows = (q, k, v, out, do)
    places = (*in_dims[:3], in_dims[5], in_dims[7])
    q, k, v, out, do = (_join(info, d, x) for d, x in zip(places, rows, strict=True))
    lse, dlse = _join(info, in_dims[6], lse, 1), _join(info, in_dims[8], dlse, 1)
    cu_seqlens_q = _join_offsets(info, in_dims[3], cu_seqlens_q, q.shape[0] // info.batch_size)
    total_k = k.shape[0] // info.batch_size
    cu_seqlens_k = _join_offsets(info, in_dims[4], cu_seqlens_k, total_k, of_keys=True)
    grads = _ATTENTION_VARLEN_BACKWARD.op(
        q, k, v, cu_seqlens_q, cu_seqlens_k, out, lse, do, dlse, *options, needed
    )
    parts = (_part(info, dx) if n else dx for dx, n in zip(grads, needed, strict=True))
    return tuple(parts), tuple(0 if n else None for n in needed)


_ATTENTION_VARLEN = library.Operator(
    "attention_varlen",
    run,
    fake=lambda q, *_: _like(q),
    batch=_batch,
    setup_context=setup_context,
    backward=gradient,
)
_ATTENTION_VARLEN_BACKWARD = library.Operator(
    "attention_varlen_backward",
    run_backward,
    fake=lambda *args: _gradients_like(*args[:3], args[-1]),
    batch=_batch_backward,
    **library.no_gradient(
        "attention_varlen can be differentiated once, and its gradient was to be differentiated: "
        "use softmax(scale * q @ k.mT) @ v of each sequence where second derivatives are needed."
    ),
)
