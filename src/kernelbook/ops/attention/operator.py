"""The public function: what it refuses, what autograd sees, and what goes in which dtype."""

from collections.abc import Sequence

import torch

from kernelbook import runtime
from kernelbook.ops import checks, library
from kernelbook.ops.attention import fp8, scope
from kernelbook.ops.attention.backward import attention_backward
from kernelbook.ops.attention.decoding import attention_decode, n_parts
from kernelbook.ops.attention.forward import attention_forward
from kernelbook.ops.attention.fp8 import attention_fp8_forward
from kernelbook.ops.attention.quantize import Quantized, parts
from kernelbook.ops.attention.tiles import empty_dense_like, empty_like, prepare
from kernelbook.ops.hopper import backward_choice, choice, fp8_choice
from kernelbook.ops.launch import planned


@checks.also_named(query="q", key="k", value="v")
def attention(
    q: torch.Tensor | Quantized,
    k: torch.Tensor | Quantized,
    v: torch.Tensor | Quantized,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    window: tuple[int | None, int | None] | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    deterministic: bool = True,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention, as :func:`torch.nn.functional.scaled_dot_product_attention` computes it.

    out = softmax(scale * q k^T) v, a tile of keys at a time: besides inputs and outputs it needs
    memory that grows with the length, not with its square.

    Where queries are few and keys many, as in decoding, several programs share the keys of a head,
    and query heads that read the same keys share what is loaded: in how many parts depends on the
    shapes and the GPU, so out may differ in its last bits where shapes do, and never between runs.

    A tensor is read where it lies, a transposed view of (batch, seqlen, heads, head_dim) too, if
    its last dimension is contiguous and its address and other strides are multiples of 16 bytes.
    Any other is copied first. PyTorch's names ``query``, ``key`` and ``value`` are accepted for q,
    k and v.

    Scores, scale * q k^T, are float32. Above a million they are known to a tenth at best, and with
    them the logarithms of the weights; above 2**27, gradients in float16 may overflow.

    Operands may have 8 bits, ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``: v alone, beside q
    and k in float16 or bfloat16, or all three. Their values are stored * descale: pass the pair
    that :func:`quantize` returns in the place of the operand, or stored there and its descale by
    keyword. The weights are rounded to float8_e4m3fn. Keys of v are read
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
        scale: what the products of q and k are multiplied by, from 1.2e-38 to 2.2e38, because
            scale * log2(e) must be a normal number of float32; ``None`` means head_dim ** -0.5.
        window: (left, right), how many keys beside its own a query sees: query i sees the keys
            from i + shift - left to i + shift + right, both included, where shift is
            seqlen_k - seqlen_q. Each is at least 0, or ``None`` for no bound; (None, None) is as
            ``None``. With ``is_causal`` a query sees what both masks let it see, so that right
            does not matter. Keys outside the windows of a tile of queries are not read, and the
            time grows with the window, not with the length.
        enable_gqa: whether ``k`` and ``v`` may have fewer heads than ``q``, by a whole factor g:
            query head h then reads head h // g.
        return_lse: whether to return ``(out, lse)``, where lse = log(sum(exp(scale * q k^T))).
        deterministic: whether gradients are the same bits in every run. False lets backward add
            up the gradient of ``q`` in any order, where that was measured to be faster, or always
            in one sweep with ``backend="triton"``, unless
            :func:`torch.use_deterministic_algorithms` asks for the same bits.
        q_descale: with ``q`` in FP8, what its stored numbers are multiplied by: above 0, float32,
            one element, or (batch, heads) for one a head; ``None`` means 1. What is 0, negative,
            infinite or NaN makes its head NaN, because the host cannot look at it without waiting
            for the GPU.
        k_descale: the same for ``k``, and its heads.
        v_descale: the same for ``v``; it may be 0 or negative.
        out_dtype: with ``v`` in FP8, the dtype of the result, float16 or bfloat16; ``None`` means
            that of ``q``, or bfloat16 where ``q`` is in FP8.
        backend: which kernels compute out and lse, and the gradients. ``"triton"`` are those in
            plain Triton, for any GPU. ``"gluon"`` are those in Gluon, the language below Triton,
            for Hopper GPUs (compute capability 9.0), q, k and v in float16, bfloat16 or FP8, and
            head_dim 64 or 128; anything else is then refused, and so are empty tensors. ``"auto"``
            takes, in each pass, what was measured to be faster for such a head_dim, mask and
            number of keys, and ``"triton"`` where the other cannot run. Results differ by rounding
            alone. Decoding is plain Triton but under ``"gluon"``, and so is a gradient of q alone,
            or of k and v alone.

    Returns:
        out, of the shape and dtype of ``q``; with ``return_lse`` also lse, natural logarithm,
        float32, (batch, heads, seqlen_q), contiguous. out lies in memory as ``q`` does, without
        gaps: that of a transposed view of (batch, seqlen, heads, head_dim) is contiguous once it is
        transposed back. With operands in FP8, and where the last dimension of ``q`` is not the
        innermost, it is contiguous. Gradients lie as their operands do. A query that sees no key
        has out 0, lse -inf and a gradient of 0; one whose scores are all -inf has NaN. Both can be
        differentiated once.

    Raises:
        TypeError: an argument is of another kind or dtype.
        ValueError: shapes do not go together, head_dim or ``scale`` is out of range, a tensor is
            not where kernels run, a descale comes twice or requires a gradient, or the device has
            no FP8 products, or ``backend`` is ``"gluon"`` and that kernel cannot run, for a reason
            that the message gives.
        RuntimeError: a gradient is asked for that there is not.

    Sources: Dao et al., FlashAttention, NeurIPS 2022; Dao, FlashAttention-2, ICLR 2024. In Gluon:
    Shah et al., FlashAttention-3, NeurIPS 2024. Grouped heads: Ainslie et al., GQA, EMNLP 2023.
    """
    is_causal = checks.flag("is_causal", is_causal)
    enable_gqa = checks.flag("enable_gqa", enable_gqa)
    return_lse = checks.flag("return_lse", return_lse)
    deterministic = checks.flag("deterministic", deterministic)
    backend = checked_backend(backend)
    q, q_descale = parts("q", q, q_descale)
    k, k_descale = parts("k", k, k_descale)
    v, v_descale = parts("v", v, v_descale)
    passed = _passed(q, k, v, enable_gqa, backend)
    if not passed:
        for name, x in (("q", q), ("k", k), ("v", v)):
            checks.tensor(name, x, DTYPES)
        if library.autocasts(q):
            q, k, v = map(_autocast, (q, k, v))
        _check_operands(q, k, v, enable_gqa)
        if backend == "gluon":
            _check_gluon(q, k, v)
        passed.append(True)
    sm_scale = q.shape[-1] ** -0.5 if scale is None else checked_scale(scale)
    left, right = scope.checked_window(window)
    descales = {"q": q_descale, "k": k_descale, "v": v_descale}
    if not (q_descale is k_descale is v_descale is None):
        fp8.check_descales({"q": q, "k": k, "v": v}, descales)
    if v.dtype in fp8.DTYPES:
        dtype = fp8.result_dtype(q, out_dtype)
        out, lse = _ATTENTION_FP8(
            q, k, v, *descales.values(), is_causal, left, right, sm_scale, dtype, backend
        )
    elif out_dtype not in (None, q.dtype):
        raise TypeError(
            f"out_dtype must be None or the dtype of q where v is not in FP8, got {out_dtype}: "
            "convert the result."
        )
    else:
        out, lse = _ATTENTION(q, k, v, is_causal, left, right, sm_scale, deterministic, backend)
    return (out, lse) if return_lse else out


# -- what is refused

DTYPES = (*checks.FLOATS, *fp8.DTYPES)

SMALLEST_SCALE = torch.finfo(torch.float32).tiny
LARGEST_SCALE = torch.finfo(torch.float32).max / 1.5
"""Kernels compute scale * log2(e) in float32, which must be a normal number; log2(e) is 1.44."""


def checked_scale(scale: object) -> float:
    """Return the scale as a float, or raise."""
    scale = checks.number("scale", scale)
    if not SMALLEST_SCALE <= scale <= LARGEST_SCALE:
        negative = SMALLEST_SCALE <= -scale <= LARGEST_SCALE
        what_to_pass = f"-q and scale={-scale}" if negative else "one that is, or None"
        raise ValueError(
            f"scale must lie in [{SMALLEST_SCALE:.3g}, {LARGEST_SCALE:.3g}], got {scale}: pass "
            f"{what_to_pass}."
        )
    return scale


def checked_backend(backend: object) -> str:
    """Return the backend, or raise."""
    if not isinstance(backend, str):
        raise TypeError(
            f"backend must be a str, got {checks.described(backend)}: pass 'auto', 'triton' or "
            "'gluon'."
        )
    return checks.choice("backend", backend, choice.BACKENDS)


def _passed(q: object, k: object, v: object, enable_gqa: bool, backend: str) -> list[bool]:
    """Return a list that is not empty if operands of this kind have passed the checks, which cost
    the host more than to find this. What is appended to it is remembered for their kind.

    Only of plain tensors, whose sizes are numbers, and where nothing is cast.
    """
    if (
        not (type(q) is type(k) is type(v) is torch.Tensor)
        or torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or q.is_nested
        or k.is_nested
        or v.is_nested
        or library.autocasts(q)
    ):
        return []
    return _passed_of_kind(
        q.layout, k.layout, v.layout, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device,
        q.shape, k.shape, v.shape, enable_gqa, backend,
    )  # fmt: skip


@planned
def _passed_of_kind(*kind) -> list[bool]:
    return []


def _check_gluon(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Raise unless the Gluon kernel can compute this, on a device that has numbers.

    Looks at nothing that a tensor without numbers lacks, nor at where operands lie: what no
    descriptor fits is copied for either kernel.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.numel() == 0:
            choice.refuse(f"{name} is empty")
    capability = (9, 0) if q.is_meta else runtime.capability(q.device)  # no kernel will run
    if v.dtype in fp8.DTYPES:
        reason = fp8_choice.unsupported(capability, q.dtype, v.dtype, q.shape[3])
    else:
        reason = choice.unsupported(capability, q.dtype, q.shape[3])
    if reason:
        choice.refuse(reason)


def _autocast(x: torch.Tensor) -> torch.Tensor:
    """Return an operand in the dtype of autocast; 8 bits stay 8 bits."""
    return x if x.dtype in fp8.DTYPES else x.to(torch.get_autocast_dtype(x.device.type))


def _check_operands(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, enable_gqa: bool) -> None:
    """Raise unless q, k and v are tensors that go together, where kernels run."""
    operands = {"q": q, "k": k, "v": v}
    if any(x.dtype in fp8.DTYPES for x in operands.values()):
        fp8.check_operands(q, k, v)
    else:
        for name, x in operands.items():
            if x.dtype != q.dtype:
                raise TypeError(
                    f"{name} must have the dtype of q, {checks.spell(q.dtype)}, got "
                    f"{checks.spell(x.dtype)}: pass {name}.to(q.dtype)."
                )
    _check_shapes(q, k, v, enable_gqa)
    checks.same_device(q=q, k=k, v=v)


def _check_shapes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, enable_gqa: bool) -> None:
    """Raise unless the shapes of q, k and v go together."""
    for name, x in {"q": q, "k": k, "v": v}.items():
        if x.ndim != 4:
            raise ValueError(
                f"{name} must be (batch, heads, seqlen, head_dim), got shape {tuple(x.shape)}: "
                f"add the dimensions that are missing by unsqueeze, or split one by unflatten."
            )
    batch, heads, _, head_dim = q.shape
    check_head_dim(head_dim)
    if k.shape[0] != batch or k.shape[3] != head_dim:
        raise ValueError(
            f"k must agree with q in batch and head_dim, got k of shape {tuple(k.shape)} for q of "
            f"shape {tuple(q.shape)}: expand the batch, or pad with zeros, where that is meant."
        )
    if v.shape != k.shape:
        raise ValueError(
            f"v must have the shape of k, {tuple(k.shape)}, got {tuple(v.shape)}: for values of "
            "another size pad them with zeros."
        )
    check_heads(heads, k.shape[1], enable_gqa)


def check_head_dim(head_dim: int) -> None:
    """Raise unless the last size of q is one that kernels have tiles for."""
    if not 16 <= head_dim <= 256:
        instead = (
            "pad q, k and v with zeros to 16, and pass the scale that they had"
            if head_dim < 16
            else "use torch.nn.functional.scaled_dot_product_attention"
        )
        raise ValueError(
            f"head_dim, the last size of q, must lie in [16, 256], got {head_dim}: {instead}."
        )


def check_heads(heads: int, heads_k: int, enable_gqa: bool) -> None:
    """Raise unless every head of queries has a head of keys to read."""
    if enable_gqa:
        if heads != heads_k and (heads_k == 0 or heads % heads_k):
            raise ValueError(
                f"k must have a number of heads that divides that of q, {heads}, got {heads_k}: "
                "pass k and v with such a number."
            )
    elif heads != heads_k:
        instead = (
            "pass enable_gqa=True if query heads share keys"
            if heads_k and heads % heads_k == 0
            else "pass k and v with that number"
        )
        raise ValueError(f"k must have as many heads as q, {heads}, got {heads_k}: {instead}.")


# -- autograd, compilers and torch.func


def _of_no_key(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse) where there is no query, or none that sees a key."""
    out, lse = _like(q)
    return out.zero_(), lse.fill_(-torch.inf)


def run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    is_causal: bool,
    left: int | None,
    right: int | None,
    sm_scale: float,
    deterministic: bool,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out and lse."""
    if not (q.numel() and k.numel()):
        return _of_no_key(q)
    window = left, right
    with runtime.launching_on(q):
        prepared = prepare(q, k, v)
        # -- which kernel: where few queries are to share many keys, decoding, unless it is named
        parts = 0 if backend == "gluon" else n_parts(*prepared[:2], is_causal, window)
        if parts:
            out, lse = attention_decode(*prepared, is_causal, sm_scale, parts, window)
            return _in(q.dtype, out), lse
        chosen = choice.forward_choice(
            runtime.capability(q.device), q.dtype, q.shape, k.shape, is_causal, window, backend
        )
        if chosen.config:
            in_gluon = choice.attention_in_gluon()
            out, lse = in_gluon(*prepared, is_causal, sm_scale, window, chosen.config)
        else:
            out, lse = attention_forward(*prepared, is_causal, sm_scale, window)
    return _in(q.dtype, out), lse


def _in(dtype: torch.dtype, x: torch.Tensor) -> torch.Tensor:
    """Return x in a dtype: what the interpreter computed in another."""
    return x if x.dtype == dtype else x.to(dtype)


def setup_context(ctx, inputs, output):
    """Keep what backward reads: the inputs, out and lse."""
    q, k, v, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.set_materialize_grads(False)


def gradient(ctx, do, dlse):
    """Return the gradients of q, k and v. One that did not come is None, and counts as zero."""
    needed = list(ctx.needs_input_grad[:3])
    grads = _ATTENTION_BACKWARD(*ctx.saved_tensors, do, dlse, *ctx.options, needed)
    grads = [dx if n else None for dx, n in zip(grads, needed, strict=True)]
    return *grads, *[None] * len(ctx.options)


def run_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    do: torch.Tensor | None,
    dlse: torch.Tensor | None,
    is_causal: bool,
    left: int | None,
    right: int | None,
    sm_scale: float,
    deterministic: bool,
    backend: str,
    needed: Sequence[bool],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return dq, dk and dv; what is not needed is empty."""
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    if (do is None and dlse is None) or not (q.numel() and k.numel()):
        return tuple(dx.zero_() for dx in _gradients_like(q, k, v, needed))
    do = torch.zeros_like(out) if do is None else do
    dlse = None if dlse is None else runtime.readable(dlse)
    window = left, right
    with runtime.launching_on(q):
        chosen = backward_choice.backward_choice(
            runtime.capability(q.device), q.dtype, q.shape, k.shape, is_causal, window,
            deterministic, backend,
        )  # fmt: skip
        # plain Triton in one sweep, in any order, was slower than in two at all measured lengths
        kernels, options = attention_backward, {}
        deterministic = deterministic or backend == "auto"
        if chosen.config:
            kernels, options = backward_choice.attention_in_gluon(), {"config": chosen.config}
            deterministic = chosen.config.ordered
        *operands, do = prepare(q, k, v, out, do)
        grads = kernels(
            *operands, lse, do, is_causal, sm_scale, deterministic, dlse, window,
            dq_needed=needed[0], dkdv_needed=needed[1] or needed[2], **options,
        )  # fmt: skip
    if all(needed) and grads[0].dtype == q.dtype:
        return grads
    return tuple(
        dx.to(q.dtype) if n else torch.empty(0, dtype=q.dtype, device=q.device)
        for dx, n in zip(grads, needed, strict=True)
    )


def run_fp8(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_descale: torch.Tensor | None,
    k_descale: torch.Tensor | None,
    v_descale: torch.Tensor | None,
    is_causal: bool,
    left: int | None,
    right: int | None,
    sm_scale: float,
    out_dtype: torch.dtype,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out and lse of operands of 8 bits."""
    if not (q.numel() and k.numel()):
        out, lse = _like_fp8(q, out_dtype)
        return out.zero_(), lse.fill_(-torch.inf)
    window = left, right
    chosen = fp8_choice.fp8_choice(
        runtime.capability(q.device), q.dtype, v.dtype, q.shape, k.shape, is_causal, window, backend
    )
    with runtime.launching_on(q):
        operands = *prepare(q, k), runtime.readable(v), (q_descale, k_descale, v_descale)
        options = is_causal, sm_scale, runtime.kernel_dtype(out_dtype)
        if chosen.config:
            in_gluon = fp8_choice.attention_in_gluon()
            out, lse = in_gluon(*operands, *options, window, chosen.config)
        else:
            out, lse = attention_fp8_forward(*operands, *options, window=window)
    return out.to(out_dtype), lse


def _like(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out and lse without their numbers."""
    return empty_dense_like(q), torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)


def _like_fp8(q: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out and lse of operands of 8 bits without their numbers."""
    out = torch.empty(q.shape, dtype=dtype, device=q.device)
    return out, torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)


def _gradients_like(q, k, v, needed):
    """Return dq, dk and dv without their numbers; what is not needed is empty."""
    return tuple(
        empty_like(x.to(runtime.kernel_dtype(x.dtype))).to(x.dtype)
        if n
        else torch.empty(0, dtype=q.dtype, device=q.device)
        for x, n in zip((q, k, v), needed, strict=True)
    )


def _fold(info, in_dim: int | None, x: torch.Tensor | None) -> torch.Tensor | None:
    """Make the batch of calls a part of the batch that attention knows."""
    return None if x is None else library.batched(info, in_dim, x).flatten(0, 1)


def _unfold(info, results) -> tuple[torch.Tensor, ...]:
    """Take the batch of calls out of the batch again."""
    batch = info.batch_size
    return tuple(x.view(batch, x.shape[0] // batch, *x.shape[1:]) for x in results)


def _batch(info, in_dims, q, k, v, *options):
    folded = (_fold(info, d, x) for d, x in zip(in_dims, (q, k, v), strict=False))
    return _unfold(info, _ATTENTION.op(*folded, *options)), (0, 0)


def _batch_backward(info, in_dims, *args):
    tensors, (*options, needed) = args[:7], args[7:]
    folded = (_fold(info, d, x) for d, x in zip(in_dims, tensors, strict=False))
    grads = _ATTENTION_BACKWARD.op(*folded, *options, needed)
    whole = (_unfold(info, [dx])[0] if n else dx for dx, n in zip(grads, needed, strict=True))
    return tuple(whole), tuple(0 if n else None for n in needed)


def _batch_fp8(info, in_dims, q, k, v, *rest):
    descales, options = rest[:3], rest[3:]
    folded = [_fold(info, d, x) for d, x in zip(in_dims, (q, k, v), strict=False)]
    for x, d, descale in zip(folded[:3], in_dims[3:6], descales, strict=True):
        if descale is not None:
            heads = info.batch_size, x.shape[0] // info.batch_size, x.shape[1]
            descale = library.batched(info, d, descale)
            if descale.shape != heads:  # one for all heads of a call
                descale = descale.reshape(info.batch_size, 1, 1)
            descale = descale.expand(heads).flatten(0, 1)
        folded.append(descale)
    return _unfold(info, _ATTENTION_FP8.op(*folded, *options)), (0, 0)


_ATTENTION = library.Operator(
    "attention",
    run,
    fake=lambda q, *_: _like(q),
    batch=_batch,
    setup_context=setup_context,
    backward=gradient,
)
_ATTENTION_BACKWARD = library.Operator(
    "attention_backward",
    run_backward,
    fake=lambda *args: _gradients_like(*args[:3], args[-1]),
    batch=_batch_backward,
    **library.no_gradient(
        "attention can be differentiated once, and its gradient was to be differentiated: use "
        "softmax(scale * q @ k.mT) @ v where second derivatives are needed."
    ),
)
_ATTENTION_FP8 = library.Operator(
    "attention_fp8",
    run_fp8,
    fake=lambda *args: _like_fp8(args[0], args[-2]),
    batch=_batch_fp8,
    **library.no_gradient(
        "attention with operands in FP8 has no gradient: pass q, k and v in bfloat16 where one "
        "is needed, or call it under torch.no_grad()."
    ),
)
