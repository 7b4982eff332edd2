"""Attention with operands of 8 bits: forward only, for GPUs with FP8 matmuls.

    value = stored * descale,   out = softmax(scale * q k^T) v

stored is float8_e4m3fn or float8_e5m2, and descale one float32 a tensor or one a (batch, head).
Either v alone has 8 bits, and q and k have 16, or all three have 8. The algorithm is that of
forward.py, with three additions:

    descales   those of q and k are part of the scale of the scores; that of v multiplies the result
    weights    p lies in [0, 1], where e4m3 has few numbers: p * 2^8 is what is rounded. Because
               their sum is of p * 2^8 too, the average needs no correction
    sums       Hopper accumulates FP8 matmuls in fewer bits than float32 has. Only the sum within
               one tile is left to it; sums over tiles are float32

An 8-bit matmul reads its second operand with the contracted dimension contiguous. For q k^T that
is head_dim, as k lies already; for p v it is the keys, so v has to lie with keys contiguous.

Sources: the formats: Micikevicius et al., "FP8 formats for deep learning", arXiv:2209.05433, 2022;
scaled weights and transposed values: Shah et al., "FlashAttention-3", arXiv:2407.08608, 2024.
"""

import torch
import triton
import triton.language as tl

from kernelbook import runtime
from kernelbook.ops import checks
from kernelbook.ops.attention import scope, tuned
from kernelbook.ops.attention.forward import sum_of_weights, weigh
from kernelbook.ops.attention.scope import key_stages, seen_keys
from kernelbook.ops.attention.tiles import (
    ALIGNMENT,
    LN2,
    LOG2E,
    LOWEST,
    describe,
    fits,
    head_block,
    head_of,
    load_tile,
    place,
)
from kernelbook.ops.launch import Launch, planned

DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)

P_LOG2 = tl.constexpr(8)
"""Weights are scaled to [0, 2^8]: the next power of two is above 448, the largest e4m3 number."""

TINY = tl.constexpr(2.0**-126)
"""The smallest normal number of float32."""


@triton.jit
def to_e4m3(p, dtype: tl.constexpr):
    """Round numbers from 0 to 448 to float8_e4m3fn, for a matmul with numbers of this dtype.

    In the interpreter 8-bit numbers are held in float32, and the result is too. There, half of the
    last place kept is 2^-4 of the power of two below p, and adding 2^23 halves rounds to it.
    """
    if dtype == tl.float32:
        power = (p.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        shift = tl.maximum(power, 0.015625) * 1572864.0  # 2^-6 or more, times 1.5 * 2^20
        return (p + shift) - shift
    return p.to(tl.float8e4nv)


@triton.jit
def load_descale(descale_ptr, index, step, SIGNED: tl.constexpr):
    """Read the descale of a head, or 1 where there is none; step is 0 where heads share one.

    One that is infinite, or not above 0 unless SIGNED, becomes NaN, and so does all of its head:
    the host cannot look at it without waiting for the GPU.
    """
    descale = 1.0
    if descale_ptr is not None:
        descale = tl.load(descale_ptr + index * step)
        size = tl.abs(descale) if SIGNED else descale
        descale = tl.where((size < float("inf")) & (SIGNED | (size > 0)), descale, float("nan"))
    return descale


@triton.jit
def scale_of_scores(sm_scale, q_descale, k_descale):
    """Return what turns a product of stored q and k into an exponent of 2, in float32.

    The factors are multiplied in float64, where a small one and a large one meet without loss.
    Below the normal numbers of float32 every score is 0 anyway, if the scale itself is not.
    """
    scale_log2 = tl.full((), sm_scale, tl.float64) * LOG2E * q_descale * k_descale
    return tl.where(scale_log2 < TINY, TINY, scale_log2).to(tl.float32)


@triton.jit
def add_values(acc, p, alpha, v, PROMOTED: tl.constexpr):
    """Return acc * alpha + p v, where the matmul of a tile starts from zero if PROMOTED."""
    p, acc = to_e4m3(p, v.dtype), acc * alpha[:, None]
    return acc + tl.dot(p, v) if PROMOTED else tl.dot(p, v, acc)


@triton.jit
def attend_fp8(
    acc,  # sum over keys of 2^8 * p * stored v so far, (BLOCK_M, BLOCK_D)
    l_i,  # sum over keys of 2^8 * p so far, (BLOCK_M,)
    m_i,  # largest score so far, in base 2, (BLOCK_M,)
    qk,  # dot products with the first tile of keys, (BLOCK_M, BLOCK_N)
    q,  # queries, (BLOCK_M, BLOCK_D)
    k_head,  # keys of one head, and its values with keys contiguous: see head_of
    v_head,
    first_key,  # of the keys to attend to: a multiple of BLOCK_N
    last_key,  # one past the last
    n_visible,  # one past the last key that each query sees, (BLOCK_M,)
    scale_log2,  # turns a product of stored q and k into an exponent of 2
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,  # whether some query does not see some of these keys
    PROMOTED: tl.constexpr,  # whether tiles are accumulated in float32, not by the matmul itself
    first_visible=0,  # the first key that each query sees, (BLOCK_M,)
    LEFT: tl.constexpr = False,  # whether some of these keys lie before it
):
    """Attend to the keys from first_key to last_key, a tile at a time, and score the next tile."""
    for start_n in range(first_key, last_key, BLOCK_N):
        # -- weigh: the weights come times 2^8
        p, alpha, l_i, m_i = weigh(
            qk, l_i, m_i, start_n, n_visible, scale_log2, MASKED, P_LOG2, first_visible, LEFT
        )
        # -- accumulate: one matmul, of weights and values
        v = load_tile(v_head, 0, start_n).T
        acc = add_values(acc, p, alpha, v, PROMOTED)
        # -- score: for the next iteration
        k = load_tile(k_head, start_n + BLOCK_N)
        qk = tl.dot(q, k.T)
    return acc, l_i, m_i, qk


# If one key were a constant, all weights but one would be the same register, and ptxas would fill
# half of a word of converted weights from a register that nothing wrote. On sm_100 it does so.
@triton.jit(do_not_specialize=["left", "right", "seqlen_k"])
def attention_fp8_fwd_kernel(
    q_desc,  # queries, (batch, heads, seqlen_q, HEAD_DIM)
    k_desc,  # keys, (batch, heads // group, seqlen_k, HEAD_DIM)
    v_desc,  # values, (batch, heads // group, HEAD_DIM, seqlen_k)
    q_descale_ptr,  # one number, one for each (batch, head), or None
    k_descale_ptr,
    v_descale_ptr,
    out_ptr,  # output, as the queries, contiguous
    lse_ptr,  # natural logarithm of the sum of exponentials, (batch, heads, seqlen_q), contiguous
    q_step,  # from the descale of one head to that of the next: 0 or 1
    k_step,
    v_step,
    batch_heads,  # batch * heads
    heads,
    group,  # query heads that share a head of keys
    seqlen_q,
    seqlen_k,
    left,  # bounds of what a query sees, where there are any: see scope
    right,
    sm_scale,  # the scores are sm_scale * q k^T
    HEADS_AT_ONCE: tl.constexpr,  # heads whose tiles alternate: see tuned.forward_heads_at_once
    HEAD_DIM: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    ALL_WHOLE: tl.constexpr,  # whether no tile has to be masked
    PROMOTED: tl.constexpr,
    BLOCK_M: tl.constexpr,  # queries in a tile
    BLOCK_N: tl.constexpr,  # keys in a tile
    BLOCK_D: tl.constexpr,  # a power of two, at least HEAD_DIM
):
    # -- place: which tile of which head; the last queries see the most keys and come first
    n_tiles = tl.cdiv(seqlen_q, BLOCK_M)
    tile, batch_head = place(n_tiles, batch_heads, HEADS_AT_ONCE)
    batch, head = batch_head // heads, batch_head % heads
    k_head = head_of(k_desc, batch, head // group, BLOCK_N, BLOCK_D)
    v_head = head_of(v_desc, batch, head // group, BLOCK_D, BLOCK_N)
    start_m = (n_tiles - 1 - tile) * BLOCK_M

    # -- load: the queries, and what turns stored numbers into values
    q = load_tile(head_of(q_desc, batch, head, BLOCK_M, BLOCK_D), start_m)
    q_descale = load_descale(q_descale_ptr, batch_head, q_step, SIGNED=False)
    k_descale = load_descale(k_descale_ptr, batch_head // group, k_step, SIGNED=False)
    v_descale = load_descale(v_descale_ptr, batch_head // group, v_step, SIGNED=True)
    scale_log2 = scale_of_scores(sm_scale, q_descale, k_descale)
    m_i = tl.full((BLOCK_M,), LOWEST, tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)

    # -- stages: keys that all queries of the tile see, between keys that some see, and no others
    first_visible, n_visible = seen_keys(
        start_m + tl.arange(0, BLOCK_M), seqlen_q, seqlen_k, left, right, HAS_LEFT, HAS_RIGHT
    )
    first, whole, cut, end = key_stages(
        start_m, start_m + BLOCK_M - 1, seqlen_q, seqlen_k, left, right, HAS_LEFT, HAS_RIGHT,
        BLOCK_N,
    )  # fmt: skip

    # -- begin: the scores of the first tile of keys
    k = load_tile(k_head, first)
    qk = tl.dot(q, k.T)

    # -- attend: the last tile comes after the loops
    last = tl.maximum(tl.cdiv(end, BLOCK_N) - 1, 0) * BLOCK_N
    cut = tl.minimum(cut, last)
    if HAS_LEFT:
        whole = tl.minimum(whole, last)
        acc, l_i, m_i, qk = attend_fp8(
            acc, l_i, m_i, qk, q, k_head, v_head, first, whole, n_visible, scale_log2, BLOCK_N,
            True, PROMOTED, first_visible, LEFT=True,
        )  # fmt: skip
    acc, l_i, m_i, qk = attend_fp8(
        acc, l_i, m_i, qk, q, k_head, v_head, whole, cut, n_visible, scale_log2, BLOCK_N, False,
        PROMOTED,
    )  # fmt: skip
    if not ALL_WHOLE:
        acc, l_i, m_i, qk = attend_fp8(
            acc, l_i, m_i, qk, q, k_head, v_head, cut, last, n_visible, scale_log2, BLOCK_N, True,
            PROMOTED,
        )  # fmt: skip
    p, alpha, l_i, m_i = weigh(
        qk, l_i, m_i, last, n_visible, scale_log2, not ALL_WHOLE, P_LOG2, first_visible, HAS_LEFT
    )
    acc = add_values(acc, p, alpha, load_tile(v_head, 0, last).T, PROMOTED)

    # -- write: the average, whose two sums both hold 2^8, and the logarithm of one of them
    l_i = sum_of_weights(l_i, n_visible)
    out = acc * (v_descale / tl.where(l_i == 0, 1.0, l_i))[:, None]
    queries = start_m + tl.arange(0, BLOCK_M)
    rows = batch_head.to(tl.int64) * seqlen_q + queries
    cols = tl.arange(0, BLOCK_D)
    inside = queries < seqlen_q
    out_ptrs = out_ptr + rows[:, None] * HEAD_DIM + cols[None, :]
    tl.store(out_ptrs, out, mask=inside[:, None] & (cols < HEAD_DIM)[None, :])
    tl.store(lse_ptr + rows, (m_i - P_LOG2 + tl.log2(l_i)) * LN2, mask=inside)


@triton.jit
def transpose_kernel(
    x_ptr,  # (batch, heads, seqlen, head_dim)
    y_ptr,  # output, (batch, heads, head_dim, padded), contiguous
    stride_xb,
    stride_xh,
    stride_xn,
    stride_xd,
    heads,
    seqlen,
    padded,  # seqlen rounded up; what is beyond seqlen becomes zero
    head_dim,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,  # a power of two, at least head_dim
):
    n_tiles = tl.cdiv(padded, BLOCK_N)
    batch_head = (tl.program_id(0) // n_tiles).to(tl.int64)
    batch, head = batch_head // heads, batch_head % heads
    keys = (tl.program_id(0) % n_tiles).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    cols = tl.arange(0, BLOCK_D)
    x_ptrs = x_ptr + batch * stride_xb + head * stride_xh
    x_ptrs += keys[:, None] * stride_xn + cols[None, :] * stride_xd
    x = tl.load(x_ptrs, mask=(keys < seqlen)[:, None] & (cols < head_dim)[None, :], other=0)
    y_ptrs = y_ptr + (batch_head * head_dim + cols[:, None]) * padded + keys[None, :]
    tl.store(y_ptrs, x.T, mask=(cols < head_dim)[:, None] & (keys < padded)[None, :])


def _keys_contiguous(v: torch.Tensor) -> torch.Tensor:
    """Return v as (batch, heads, head_dim, seqlen), fit for a descriptor: a view, or a copy."""
    if fits(v.mT):
        return v.mT
    batch, heads, seqlen, head_dim = v.shape
    unit = ALIGNMENT.value // v.itemsize
    padded = runtime.cdiv(seqlen, unit) * unit
    v_t = torch.empty((batch, heads, head_dim, padded), dtype=v.dtype, device=v.device)
    # A copy does not look at what it copies, and bytes are cheaper to move than 8-bit floats.
    x, y = (t.view(torch.uint8) if t.dtype in DTYPES else t for t in (v, v_t))
    block_n = 32 if runtime.INTERPRETED else 128
    transpose_kernel[(batch * heads * runtime.cdiv(padded, block_n),)](
        x, y, *x.stride(), heads, seqlen, padded, head_dim,
        BLOCK_N=block_n, BLOCK_D=head_block(head_dim), num_warps=4,
    )  # fmt: skip
    return v_t[..., :seqlen]


def attention_fp8_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    descales: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None],
    is_causal: bool,
    sm_scale: float,
    out_dtype: torch.dtype,
    promoted: bool = True,
    window: scope.Window | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse) for operands that are checked and not empty; q and k fit a descriptor."""
    # I/O: read q + read k + read v + write out + write lse
    v_t = _keys_contiguous(v)
    out = torch.empty(q.shape, dtype=out_dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    config, columns = tuned.fp8_config(q), tuned.fp8_columns(q.shape[3])
    steps = tuple(0 if x is None or x.numel() == 1 else 1 for x in descales)
    left, right = scope.bounds(is_causal, window, q.shape[2], k.shape[2])
    uneven = scope.uneven(left, right)
    at_once = tuned.forward_heads_at_once(k, q.shape[1] // k.shape[1], uneven)
    run = _launch(config, q.shape, k.shape, left, right, sm_scale, at_once, steps, promoted)
    run(
        describe(q, config.block_m, columns, config.described),
        describe(k, config.block_n, columns, config.described),
        describe(v_t, columns, config.block_n, config.described),
        *(None if x is None else runtime.readable(x).contiguous() for x in descales),
        out,
        lse,
    )
    return out, lse


@planned
def _launch(
    config, q_shape, k_shape, left, right, sm_scale, heads_at_once, steps, promoted
) -> Launch:
    batch, heads, seqlen_q, head_dim = q_shape
    heads_k, seqlen_k = k_shape[1:3]
    return Launch(
        attention_fp8_fwd_kernel, (batch * heads * runtime.cdiv(seqlen_q, config.block_m),),
        *steps, batch * heads, heads, heads // heads_k, seqlen_q, seqlen_k, left or 0, right or 0,
        sm_scale,
        HEADS_AT_ONCE=heads_at_once,
        HEAD_DIM=head_dim,
        HAS_LEFT=left is not None,
        HAS_RIGHT=right is not None,
        ALL_WHOLE=scope.all_whole(left, right, seqlen_k, config.block_n),
        PROMOTED=promoted,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_D=tuned.fp8_columns(head_dim),
        **config.options,
    )  # fmt: skip


def check_operands(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Raise unless the dtypes of q, k and v, one of which is FP8, go together."""
    if k.dtype != q.dtype:
        raise TypeError(
            f"k must have the dtype of q, {checks.spell(q.dtype)}, got {checks.spell(k.dtype)}: "
            "pass both in float16 or bfloat16, or both in the same FP8, by quantize."
        )
    if v.dtype not in DTYPES:
        raise TypeError(
            f"v must be in FP8 where q and k are, got {checks.spell(v.dtype)}, because no product "
            'has that pair: pass both results of quantize(v, contiguous="seqlen").'
        )
    if q.dtype not in (torch.float16, torch.bfloat16, *DTYPES):
        raise TypeError(
            f"q must be float16, bfloat16 or FP8 where v is {checks.spell(v.dtype)}, got "
            f"{checks.spell(q.dtype)}: pass q.bfloat16() and k.bfloat16(), for example."
        )
    if runtime.INTERPRETED or v.device.type != runtime.DEVICE.type:  # that is refused elsewhere
        return
    major, minor = runtime.capability(v.device)
    if (major, minor) < (8, 9):
        raise ValueError(
            f"{torch.cuda.get_device_name(v.device)} has compute capability {major}.{minor} and no "
            "FP8 products, which need 8.9 or above: pass q, k and v in bfloat16."
        )


def check_descales(operands: dict[str, torch.Tensor], descales: dict[str, object]) -> None:
    """Raise unless every descale is one float32, or one a head, for an operand in FP8."""
    for of, descale in descales.items():
        if descale is None:
            continue
        x, name = operands[of], f"{of}_descale"
        if x.dtype not in DTYPES:
            raise TypeError(
                f"{name} goes with {of} in FP8, got it with {checks.spell(x.dtype)}: leave it out, "
                f"or pass both results of quantize({of})."
            )
        checks.tensor(name, descale, (torch.float32,))
        if descale.numel() != 1 and descale.shape != x.shape[:2]:
            raise ValueError(
                f"{name} must have one element or one for each (batch, head) of {of}, "
                f"{tuple(x.shape[:2])}, got shape {tuple(descale.shape)}."
            )
        if descale.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{name} requires a gradient, and attention with operands in FP8 has none: pass "
                f"{name}.detach()."
            )
        checks.same_device(**{of: x, name: descale})


def result_dtype(q: torch.Tensor, out_dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype of out: what is asked for, or that of q, or bfloat16 where q has 8 bits."""
    if out_dtype is None:
        return torch.bfloat16 if q.dtype in DTYPES else q.dtype
    if out_dtype not in (torch.float16, torch.bfloat16):
        raise TypeError(
            f"out_dtype must be float16, bfloat16 or None where v is in FP8, got {out_dtype}: "
            "convert the result."
        )
    return out_dtype
