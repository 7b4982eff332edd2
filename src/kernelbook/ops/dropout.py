"""Dropout that stores no mask.

    y[i] = x[i] / (1 - p)   where element i is kept, with probability 1 - p
    y[i] = 0                elsewhere

Elements are numbered in row-major order whatever the shape. Three kernels compute y: one reads a
stored mask; one draws a random number for each element; the last draws four numbers a call. All
three are linear in x and treat each element alone, so the backward pass is the same kernel with
dy in the place of x.

Sources: Srivastava et al., "Dropout: a simple way to prevent neural networks from overfitting",
JMLR 15, 2014. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011 (Philox).
"""

import torch
import triton
import triton.language as tl

from kernelbook import runtime
from kernelbook.ops import checks, library, visible
from kernelbook.ops.launch import planned
from kernelbook.ops.visible import VisibleLaunch

BLOCK_SIZE, NUM_WARPS = 1024, 4
"""Elements and warps per program: eight elements per thread, one 16-byte load in 16 bits and two in
32. On an H200 twice as many cost 3 % in float32, and half as many warps gain nothing. The last
block has a branch of its own, from load to store: with a mask on each block, 2**28 - 3 elements of
bfloat16 gave an H200 0.36 of a copy, with branches around load and store alone 0.78 to 0.87, and
so 0.95 (a seed that is a pointer) to 1.00. The seed is loaded first: behind a branch it cost 2**28
elements 5 %."""

N_ROUNDS = 7
"""Rounds of Philox. Seven pass every test of BigCrush (Salmon et al.); Triton's ten cost
arithmetic that a 16-bit copy does not hide."""


@triton.jit
def masked_dropout_kernel(
    x_ptr,  # input, n_elements
    y_ptr,  # output, n_elements
    keep_ptr,  # mask, n_elements, bool
    n_elements,
    scale,  # 1 / (1 - p)
    BLOCK_SIZE: tl.constexpr,
):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    inside = offsets < n_elements
    x = tl.load(x_ptr + offsets, mask=inside)
    keep = tl.load(keep_ptr + offsets, mask=inside)
    tl.store(y_ptr + offsets, tl.where(keep, x.to(tl.float32) * scale, 0.0), mask=inside)


@triton.jit(do_not_specialize=["seed"])
def rand_dropout_kernel(
    x_ptr,  # input, n_elements
    y_ptr,  # output, n_elements
    seed,
    n_elements,
    p,  # probability of dropping an element
    scale,  # 1 / (1 - p)
    BLOCK_SIZE: tl.constexpr,
    N_ROUNDS: tl.constexpr,
):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    inside = offsets < n_elements
    x = tl.load(x_ptr + offsets, mask=inside)
    keep = tl.rand(seed, offsets, N_ROUNDS) >= p
    tl.store(y_ptr + offsets, tl.where(keep, x.to(tl.float32) * scale, 0.0), mask=inside)


@triton.jit
def _dropped(
    x,  # elements start to start + BLOCK_SIZE
    start,
    seed,
    threshold,
    scale,
    BLOCK_SIZE: tl.constexpr,
    N_ROUNDS: tl.constexpr,
):
    # -- draw: one call of Philox for every four elements
    counter = start // 4 + tl.arange(0, BLOCK_SIZE // 4)
    r0, r1, r2, r3 = tl.randint4x(seed, counter, N_ROUNDS)
    random = tl.interleave(tl.interleave(r0, r2), tl.interleave(r1, r3))

    # -- decide: keep and scale
    keep = random >= tl.cast(threshold, tl.uint32)
    return tl.where(keep, x.to(tl.float32) * scale, 0.0)


@triton.jit(do_not_specialize=["seed", "threshold"])
def seeded_dropout_kernel(
    x_ptr,  # input, n_elements
    y_ptr,  # output, n_elements
    seed,  # an integer, or a pointer to one
    n_elements,
    threshold,  # p * 2**32, or the integer of 32 bits that has the same bits
    scale,  # 1 / (1 - p)
    BLOCK_SIZE: tl.constexpr,
    N_ROUNDS: tl.constexpr,
):
    # -- place: my seed, and which elements are mine
    if seed.dtype.is_ptr():
        seed = tl.load(seed)
    start = tl.program_id(0).to(tl.int64) * BLOCK_SIZE
    offsets = start + tl.arange(0, BLOCK_SIZE)

    # -- load, drop, store: with a mask, which may split wide loads, in the last block alone
    if start + BLOCK_SIZE <= n_elements:
        x = tl.load(x_ptr + offsets)
        y = _dropped(x, start, seed, threshold, scale, BLOCK_SIZE, N_ROUNDS)
        tl.store(y_ptr + offsets, y)
    else:
        inside = offsets < n_elements
        x = tl.load(x_ptr + offsets, mask=inside)
        y = _dropped(x, start, seed, threshold, scale, BLOCK_SIZE, N_ROUNDS)
        tl.store(y_ptr + offsets, y, mask=inside)


@planned
def _plan(kernel, n_elements: int, *numbers: float, **constants: int) -> VisibleLaunch:
    grid = (runtime.cdiv(n_elements, BLOCK_SIZE),)
    return VisibleLaunch(kernel, grid, n_elements, *numbers, BLOCK_SIZE=BLOCK_SIZE, **constants,
                         num_warps=NUM_WARPS)  # fmt: skip


def _run(kernel, x: torch.Tensor, mask_or_seed: torch.Tensor | int, *numbers, **constants):
    """Allocate y in row-major order and run ``kernel`` over all elements of x."""
    dtype = x.dtype
    x = runtime.readable(x).contiguous()
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        with runtime.launching_on(x):
            _plan(kernel, x.numel(), *numbers, **constants)(x, y, mask_or_seed)
    return y if y.dtype == dtype else y.to(dtype)


def _masked_dropout(x: torch.Tensor, keep: torch.Tensor, p: float) -> torch.Tensor:
    # I/O: read x + read keep (1 byte an element) + write y
    return _run(masked_dropout_kernel, x, keep.contiguous(), 1 / (1 - p))


def _rand_dropout(x: torch.Tensor, p: float, seed: int, n_rounds: int = 10) -> torch.Tensor:
    # I/O: read x + write y
    return _run(rand_dropout_kernel, x, seed, p, 1 / (1 - p), N_ROUNDS=n_rounds)


def _seeded_dropout(
    x: torch.Tensor, p: float, seed: int | torch.Tensor, n_rounds: int = N_ROUNDS
) -> torch.Tensor:
    # I/O: read x + write y
    threshold, scale = min(round(p * 2**32), 2**32 - 1), 1 / (1 - p)
    if threshold >= 2**31:
        threshold -= 2**32  # compilers hand integers of 32 bits to a kernel, and these have a sign
    return _run(seeded_dropout_kernel, x, seed, threshold, scale, N_ROUNDS=n_rounds)


# -- autograd, compilers and torch.func


def _run_masked(x: torch.Tensor, keep: torch.Tensor, p: float) -> torch.Tensor:
    return _masked_dropout(x, keep, p)


def _run_seeded(
    x: torch.Tensor, p: float, seed: int, seed_tensor: torch.Tensor | None
) -> torch.Tensor:
    """The seed is a number, or a tensor of one, if there is one."""
    return _seeded_dropout(x, p, seed if seed_tensor is None else seed_tensor)


def _keep_mask(ctx, inputs, output):
    _, keep, ctx.p = inputs
    ctx.save_for_backward(keep)


def _masked_gradient(ctx, dy):
    (keep,) = ctx.saved_tensors
    return _MASKED(dy, keep, ctx.p), None, None


def _keep_seed(ctx, inputs, output):
    _, ctx.p, ctx.seed, seed_tensor = inputs
    ctx.save_for_backward(seed_tensor)


def seeded_gradient(ctx, dy):
    """Return the gradient of x: dy, through the same mask."""
    (seed_tensor,) = ctx.saved_tensors
    return _SEEDED(dy, ctx.p, ctx.seed, seed_tensor), None, None, None


def _fake(x, *_):
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _batch_masked(info, in_dims, x, keep, p):
    x, keep = (library.batched(info, d, t) for d, t in zip(in_dims, (x, keep), strict=False))
    return _MASKED.op(x, keep, p), 0


def _batch_seeded(info, in_dims, x, p, seed, seed_tensor):
    """Elements are numbered from the beginning in each call, so that each has a launch."""
    x = library.batched(info, in_dims[0], x)
    seeds = [None] * info.batch_size
    if seed_tensor is not None:
        seeds = library.batched(info, in_dims[3], seed_tensor)
    return torch.stack([_SEEDED.op(one, p, seed, s) for one, s in zip(x, seeds, strict=True)]), 0


_MASKED = library.Operator(
    "masked_dropout",
    _run_masked,
    fake=_fake,
    batch=_batch_masked,
    setup_context=_keep_mask,
    backward=_masked_gradient,
)
_SEEDED = library.Operator(
    "seeded_dropout",
    _run_seeded,
    fake=_fake,
    batch=_batch_seeded,
    setup_context=_keep_seed,
    backward=seeded_gradient,
)
visible.show(_MASKED, masked_dropout_kernel)
visible.show(_SEEDED, seeded_dropout_kernel, where=lambda x, p, seed, tensor: tensor is not None)


# -- the public functions


def _check_input(x: torch.Tensor, p: float) -> float:
    """Return p as a float, or raise unless it is a probability below 1 and kernels take x."""
    checks.tensor("x", x)
    p = checks.number("p", p)
    if not 0 <= p < 1:
        raise ValueError(
            f"p must be at least 0 and below 1, got {p}: pass the probability of dropping an "
            "element, 0.5 for example."
        )
    checks.same_device(x=x)
    return p


@checks.also_named(input="x")
def masked_dropout(x: torch.Tensor, keep: torch.Tensor, p: float) -> torch.Tensor:
    """Drop the elements that a stored mask names, and scale the others.

    y = x / (1 - p) where ``keep`` is true, 0 elsewhere (also where x is NaN or infinite).

    This is the baseline: it reads the mask, one byte an element, in forward and in backward.

    Args:
        x: the input, of any shape and stride, float32, float16 or bfloat16.
        keep: the mask, bool, of the shape and on the device of ``x``; true keeps an element.
        p: the probability that an element was dropped when the mask was drawn, in [0, 1).

    Returns:
        y, contiguous, of the shape and dtype of ``x``. Gradients flow to ``x``.

    Raises:
        TypeError: ``x`` is no tensor or of another dtype, ``keep`` is no bool tensor, ``p`` is no
            number.
        ValueError: ``p`` is outside [0, 1), ``keep`` has another shape or device than ``x``, or a
            tensor is not where kernels run.

    Source: Srivastava et al., JMLR 15, 2014, section 4, with the scale moved to training.
    """
    p = _check_input(x, p)
    checks.tensor("keep", keep, [torch.bool])
    if keep.shape != x.shape:
        raise ValueError(
            f"keep must have the shape of x, {tuple(x.shape)}, got {tuple(keep.shape)}: "
            "pass keep.expand_as(x), for example."
        )
    checks.same_device(x=x, keep=keep)
    return _MASKED(x, keep, p)


@checks.also_named(input="x")
def seeded_dropout(x: torch.Tensor, p: float, seed: int | torch.Tensor) -> torch.Tensor:
    """Drop elements at random, with a mask that is computed and never stored.

    y = x / (1 - p) where r >= p * 2**32, 0 elsewhere (also where x is NaN or infinite). For the
    element of row-major index i, r is number i % 4 of the four 32-bit numbers that Philox4x32-7
    makes of the counter i // 4 and the key ``seed``. The mask thus depends on ``(seed, i)`` alone:
    not on the shape, the dtype, the block size or the device. Backward computes it again.

    Args:
        x: the input, of any shape and stride, float32, float16 or bfloat16.
        p: the probability of dropping an element, in [0, 1), honoured to a multiple of 2**-32.
        seed: an integer in [-2**63, 2**64), or a tensor that holds one int64 on the device of
            ``x`` (read by the kernel, so that no transfer waits for it). Seeds that are equal
            modulo 2**64 give one mask.

    Returns:
        y, contiguous, of the shape and dtype of ``x``. Gradients of any order flow to ``x``.

    Raises:
        TypeError: ``x`` is no tensor or of another dtype, ``p`` is no number, ``seed`` is neither
            an integer nor an int64 tensor.
        ValueError: ``p`` or ``seed`` is out of range, ``seed`` holds more than one element or
            lies on another device, or ``x`` is not where kernels run.

    Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
    """
    p = _check_input(x, p)
    if isinstance(seed, torch.Tensor):
        checks.tensor("seed", seed, [torch.int64])
        if seed.numel() != 1:
            raise ValueError(
                f"a seed tensor must hold one element, got {seed.numel()}: pass one of them."
            )
        checks.same_device(x=x, seed=seed)
        return _SEEDED(x, p, 0, seed)
    seed = checks.integer("seed", seed)
    if not -(2**63) <= seed < 2**64:
        raise ValueError(
            f"seed must lie in [-2**63, 2**64), got {seed}: pass seed % 2**64, for example."
        )
    return _SEEDED(x, p, seed - 2**64 if seed >= 2**63 else seed, None)  # the same 64 bits


@checks.also_named(input="x")
def dropout(x: torch.Tensor, p: float = 0.5, training: bool = True) -> torch.Tensor:
    """Drop elements at random, as :func:`torch.nn.functional.dropout` does, and store no mask.

    The seed is drawn from torch's generator on the device of ``x``, which it advances:
    ``torch.manual_seed`` makes the result reproducible, ``torch.utils.checkpoint`` replays it, a
    CUDA graph draws anew at every replay, and the host never waits. See :func:`seeded_dropout`.

    Args:
        x: the input, of any shape and stride, float32, float16 or bfloat16.
        p: the probability of dropping an element, in [0, 1). PyTorch also takes 1.
        training: when false, ``x`` is returned as it is.

    Returns:
        y, contiguous, of the shape and dtype of ``x``, or ``x`` itself when not training.
        Gradients flow to ``x``.

    Raises:
        TypeError: ``x`` is no tensor or of another dtype, or ``p`` is no number.
        ValueError: ``p`` is outside [0, 1), or ``x`` is not where kernels run.

    Source: Srivastava et al., JMLR 15, 2014.
    """
    p = _check_input(x, p)
    if not checks.flag("training", training):
        return x
    lowest, highest = -(2**63), 2**63 - 1
    seed = torch.randint(lowest, highest, (), dtype=torch.int64, device=x.device)
    return _SEEDED(x, p, 0, seed)
