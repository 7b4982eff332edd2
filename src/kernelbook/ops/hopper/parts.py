"""Parts of kernels with roles that Gluon lacks, or that its versions name differently.

Gluon is Triton's lower language: a kernel says which warps do what, and where each number lies.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

# Triton 3.8 gave the copies of the copy engine other names.
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


@gluon.constexpr_function
def _barrier(verb, number, threads):
    return f"bar.{verb} {number}, {threads}; mov.u32 $0, $1;"


@gluon.jit
def named_barrier(VERB: gl.constexpr, NUMBER: gl.constexpr, THREADS: gl.constexpr):
    """Meet ``THREADS`` threads of a program: "sync" waits for them, "arrive" only counts.

    There are 16 of these barriers, and Triton uses those of low numbers: take 9 or more.
    While some are waiting at a number, others may come to it only with the same ``THREADS``.
    """
    code: gl.constexpr = _barrier(VERB, NUMBER, THREADS)
    gl.inline_asm_elementwise(
        code, "=r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def clock():
    """Return the SM's count of cycles, int64."""
    return gl.inline_asm_elementwise(
        "{ .reg .u32 unused; mov.u32 unused, $1; mov.u64 $0, %clock64; }",
        "=l,r", [gl.to_tensor(0)], dtype=gl.int64, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def pause(NANOSECONDS: gl.constexpr):
    """Let the calling threads sleep for about so long."""
    gl.inline_asm_elementwise(
        "nanosleep.u32 $1; mov.u32 $0, $1;",
        "=r,r", [gl.to_tensor(NANOSECONDS)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
