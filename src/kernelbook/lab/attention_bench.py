"""How chapters time attention: at which points, beside which limit and which libraries.

A library is called as its documentation says, on inputs (batch, heads, seqlen, head_dim) that all
share. Where ``do``, the gradient of the output, is given, the backward pass alone is timed: the
inputs then require gradients. What a library lacks or refuses is :class:`kernelbook.lab.Absent`.
"""

import statistics
from collections.abc import Callable
from functools import partial

import torch
import torch._functorch.config
import torch.nn.functional as F

from kernelbook import runtime
from kernelbook.lab.bench import Absent, Sweep, event_times, peer

Tensors = tuple[torch.Tensor, ...]

LIBRARIES = ("SDPA flash", "SDPA cuDNN", "FlexAttention", "FlashAttention")
"""The names under which :func:`libraries` returns them."""

MASKS = {"full": 1.0, "causal": 0.5}
"""The share of the scores that a mask leaves; the formulas count no more."""

MATMUL = 8192
"""Rows and columns of the matrices whose product is the limit."""

FORWARD = {
    "limit": "matmul",
    "limit_work": f"2 * {MATMUL} * {MATMUL} * {MATMUL}",
    "work": "4 * batch * heads * seqlen * seqlen * head_dim * causal",
    "unit": "TFLOP/s",
}
"""What :func:`kernelbook.lab.bench` needs beside points and providers, for the forward pass."""

BACKWARD = FORWARD | {"work": f"2.5 * {FORWARD['work']}"}
"""The same for the backward pass, which has five matmuls where the forward pass has two."""


# -- points, and what is timed at them -------------------------------------------------------------


def points(
    lengths: list[int],
    head_dims: tuple[int, ...] = (64, 128),
    tokens: int = 16384,
    width: int = 2048,
) -> list[dict]:
    """Return points of so many tokens in all, and ``heads * head_dim`` of ``width``, in bfloat16.

    ``causal`` is the share of the scores that the mask leaves.
    """
    return [
        {
            "seqlen": length,
            "batch": tokens // length,
            "heads": width // head_dim,
            "head_dim": head_dim,
            "mask": mask,
            "causal": share,
            "dtype": torch.bfloat16,
        }
        for head_dim in head_dims
        for mask, share in MASKS.items()
        for length in lengths
    ]


def draw(
    batch: int,
    heads: int,
    seqlen: int,
    head_dim: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    heads_k: int | None = None,
    seqlen_k: int | None = None,
) -> Tensors:
    """Return random q, k and v, (batch, heads, seqlen, head_dim); k and v may have other heads and
    another length."""
    of_keys = (batch, heads_k or heads, seqlen_k or seqlen, head_dim)
    shapes = ((batch, heads, seqlen, head_dim), of_keys, of_keys)
    return tuple(torch.randn(shape, device=runtime.DEVICE, dtype=dtype) for shape in shapes)


def matmul() -> Callable:
    """Return the limit, as a function to time: a bfloat16 matmul of :data:`MATMUL` rows."""
    size = (2, MATMUL, MATMUL)
    a, b = torch.randn(size, device=runtime.DEVICE, dtype=torch.bfloat16).unbind()
    return lambda: a @ b


def balance() -> list[dict]:
    """Return the speed of the limit and of a copy, and how many FLOPs fit into the time of a byte.

    Both are timed with a pause before every run, as a sweep times its providers: a matmul that runs
    call after call makes the chip lower its clocks.
    """
    x = torch.empty(2**30, device=runtime.DEVICE, dtype=torch.int8)
    y = torch.empty_like(x)
    flops = 2 * MATMUL**3 / statistics.median(event_times(matmul())) * 1e3
    moved = 2 * x.numel() / statistics.median(event_times(lambda: y.copy_(x))) * 1e3
    row = {"matmul, TFLOP/s": round(flops / 1e12), "copy, GB/s": round(moved / 1e9)}
    return [row | {"FLOPs per byte": round(flops / moved)}]


def timed(run: Callable, inputs: Tensors, do: torch.Tensor | None = None) -> Callable:
    """Return a function to time: ``run(*inputs)``, or its backward pass alone."""
    if do is None:
        return partial(run, *inputs)
    # what is compiled keeps its buffers, or a second backward pass of one graph would be refused
    torch._functorch.config.donated_buffer = False
    out = run(*inputs)
    out = out[0] if isinstance(out, tuple) else out  # beside lse
    return partial(torch.autograd.grad, out, inputs, do, retain_graph=True)


# -- libraries -------------------------------------------------------------------------------------


def library(
    module: str, prepare: Callable, inputs: Tensors, do: torch.Tensor | None = None
) -> Callable | Absent:
    """Return what is timed of the function ``prepare(module)``, or why it cannot be."""

    def use(imported):
        return timed(prepare(imported), inputs, do)

    return peer(module, use)


def sdpa(
    backend: str, inputs: Tensors, do: torch.Tensor | None = None, **options
) -> Callable | Absent:
    """PyTorch's ``scaled_dot_product_attention`` by one of its backends, as torch names them."""

    def prepare(attention):
        def run(q, k, v):
            with attention.sdpa_kernel(getattr(attention.SDPBackend, backend)):
                return F.scaled_dot_product_attention(q, k, v, **options)

        return run

    return library("torch.nn.attention", prepare, inputs, do)


def flex(
    inputs: Tensors, do: torch.Tensor | None = None, sees: Callable | None = None, **options
) -> Callable | Absent:
    """FlexAttention, compiled for these sizes.

    ``sees(batch, head, query, key)`` says which keys a query sees; all of them unless given.
    """
    q, k, _ = inputs

    def prepare(flexible):
        mask = None
        if sees is not None:
            sizes = (None, None, q.shape[2], k.shape[2])
            mask = flexible.create_block_mask(sees, *sizes, device=q.device)
        compiled = torch.compile(flexible.flex_attention, dynamic=False)
        return partial(compiled, block_mask=mask, **options)

    return library("torch.nn.attention.flex_attention", prepare, inputs, do)


def flash(inputs: Tensors, do: torch.Tensor | None = None, **options) -> Callable | Absent:
    """FlashAttention 4, which takes (batch, seqlen, heads, head_dim): the copies are not timed."""

    def prepare(interface):
        return partial(interface.flash_attn_func, **options)

    return library("flash_attn.cute.interface", prepare, *lengths_first(inputs, do))


def lengths_first(
    inputs: Tensors, do: torch.Tensor | None = None
) -> tuple[Tensors, torch.Tensor | None]:
    """Return the inputs, and the gradient of the output, as (batch, seqlen, heads, head_dim)."""
    moved = tuple(x.detach().transpose(1, 2).contiguous() for x in inputs)
    if do is None:
        return moved, None
    return tuple(x.requires_grad_() for x in moved), do.transpose(1, 2).contiguous()


def libraries(
    inputs: Tensors, is_causal: bool, do: torch.Tensor | None = None
) -> dict[str, Callable | Absent]:
    """Return all :data:`LIBRARIES`, without a mask or with a causal one, as providers."""

    def sees(batch, head, query, key):
        return query >= key

    return {
        "SDPA flash": sdpa("FLASH_ATTENTION", inputs, do, is_causal=is_causal),
        "SDPA cuDNN": sdpa("CUDNN_ATTENTION", inputs, do, is_causal=is_causal),
        "FlexAttention": flex(inputs, do, sees if is_causal else None),
        "FlashAttention": flash(inputs, do, causal=is_causal),
    }


# -- in words --------------------------------------------------------------------------------------


def verdict(change: float) -> str:
    """Return what a change of the speed is called: 0.05 is "gains 5 %"."""
    if change != change:
        return "nan"  # so that the paragraph says that it is not recorded
    if abs(change) < 0.01:
        return "changes next to nothing"
    return f"{'gains' if change > 0 else 'loses'} {100 * abs(change):.0f} %"


def step(sweep: Sweep, before: str, after: str) -> str:
    """Return a sentence: what one rung of a ladder gains over another, with each mask."""
    both = []
    for mask, how in (("causal", "With a causal mask"), ("full", "without one")):
        old, new = (sweep.rate(name, mask=mask) for name in (before, after))
        both.append(f"{how} it {verdict(new / old - 1)} ({old:.0f} → {new:.0f} TFLOP/s)")
    return f"**Measured:** {', '.join(both)}. "
