"""Who sees what: the one rule of attention's mask, for the host and for kernels.

The last query is aligned with the last key: with shift = seqlen_k - seqlen_q,

    query i sees key j   if   i + shift - left <= j <= i + shift + right.

A bound that is None is no bound, and a causal mask is the bound right = 0. Both bounds rise with i.
So the first and the last query of a tile say which keys all of its queries see, and which keys some
of them see. :func:`key_stages` makes three ranges of that, for a tile of queries: at the left
edge, in the middle and at the right edge of what it sees. Tiles of keys in the middle need no mask,
those at the edges do, and those outside are never read. :func:`query_stages` does the same for a
tile of keys. A tile comes in one range only, also where a window is narrower than it.

Kernels get ``left`` and ``right`` at run time, so that a new window compiles nothing, and
``HAS_LEFT`` and ``HAS_RIGHT`` when they are compiled, so that a bound that is not there costs
nothing. Lengths may differ between the programs of a launch.

Source: the alignment: Dao, FlashAttention-2, ICLR 2024; windows: Beltagy, Peters and Cohan,
"Longformer", arXiv:2004.05150, 2020.
"""

import math

import triton
import triton.language as tl

from kernelbook.ops import checks

# -- on the host

Window = tuple[int | None, int | None]
"""Bounds (left, right) of what a query sees; None is no bound."""


FARTHEST = 2**62
"""A bound as good as none, which an operator's schema can hold."""


def checked_window(window: object) -> Window:
    """Return a window as (left, right), where None is no bound, or raise."""
    if window is None:
        return None, None
    if not isinstance(window, (tuple, list)):
        raise TypeError(
            f"window must be (left, right) or None, got {checks.described(window)}: pass "
            "(left, 0) for the last left + 1 keys, or (left, None) for no bound on the right."
        )
    if len(window) != 2:
        raise ValueError(
            f"window must be (left, right), got {len(window)} elements: pass None where there is "
            "no bound."
        )
    return _checked_bound("left", window[0]), _checked_bound("right", window[1])


def _checked_bound(side: str, bound: object) -> int | None:
    """Return a bound of a window as an int or None, or raise."""
    if bound is None:
        return None
    bound = checks.integer(f"{side} of window", bound)
    if bound < 0:
        raise ValueError(
            f"{side} of window must be at least 0, got {bound}: pass None where there is no bound."
        )
    return min(bound, FARTHEST)


def bounds(is_causal: bool, window: Window | None, seqlen_q: int, seqlen_k: int) -> Window:
    """Return (left, right): what a query sees on both sides, None where nothing is cut off.

    With ``is_causal`` a query sees what both the causal mask and the window let it see. A bound
    beyond the first or the last key of every query is none. What is returned is below the lengths,
    so that no sum of positions overflows. Where lengths differ between sequences, pass the longest.
    """
    left, right = window or (None, None)
    if is_causal:
        right = 0
    if left is not None and left >= seqlen_k - 1:
        left = None
    if right is not None and right >= seqlen_q - 1:
        right = None
    return left, right


def keys_seen(i, seqlen_q: int, seqlen_k: int, left: int | None, right: int | None) -> tuple:
    """Return (first, end): query i, a number or a tensor, sees keys first <= j < end."""
    own = i + seqlen_k - seqlen_q
    return 0 if left is None else own - left, seqlen_k if right is None else own + right + 1


def most_seen(left: int | None, right: int | None) -> float:
    """Return how many keys a query sees at most; where a bound is missing, infinity."""
    return math.inf if left is None or right is None else left + right + 1


def all_whole(left: int | None, right: int | None, seqlen_k: int, block_n: int) -> bool:
    """Whether every tile of queries sees all of every tile of keys, so that none is masked."""
    return left is None and right is None and seqlen_k % block_n == 0


def uneven(left: int | None, right: int | None) -> bool:
    """Whether tiles of queries see very different numbers of keys: one bound alone cuts a triangle.

    With a bound on both sides all tiles but the first and the last take equally long.
    """
    return (left is None) != (right is None)


# -- in a kernel


@triton.jit
def seen_keys(
    query, seqlen_q, seqlen_k, left, right, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr
):
    """Return (first, end): query i sees the keys first <= j < end. Of a tensor, each of its own.

    A query that sees no key has end 0.
    """
    own = query + (seqlen_k - seqlen_q)
    first, end = own * 0, own * 0 + seqlen_k
    if HAS_LEFT:
        first = tl.maximum(own - left, 0)
    if HAS_RIGHT:
        end = tl.maximum(tl.minimum(own + right + 1, seqlen_k), 0)
    return first, end


@triton.jit
def seeing_queries(
    key, seqlen_q, seqlen_k, left, right, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr
):
    """Return (first, end): the queries first <= i < end see key j. Of a tensor, each of its own.

    Only positions from 0 to seqlen_q are queries, and first and end may lie outside. Keys past the
    end are treated as if they were there: where they must not count, mask them.
    """
    own = key - (seqlen_k - seqlen_q)
    first, end = own * 0, own * 0 + seqlen_q
    if HAS_LEFT:
        end = own + left + 1
    if HAS_RIGHT:
        first = own - right
    return first, end


@triton.jit
def key_stages(
    first_query,  # of a tile of queries, which exists
    last_query,  # of the tile; it may lie past the end
    seqlen_q,
    seqlen_k,
    left,
    right,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Return (first, whole, cut, end): which keys a tile of queries has to meet, and how.

    Keys from first to whole are at the left edge, and masked; those from whole to cut are seen by
    every query; those from cut to end are at the right edge, or past the last key, and masked.
    first, whole and cut are multiples of BLOCK_N, and first is whole where there is no left bound.
    A tile of keys at the left edge may be cut by both bounds, one at the right edge only by right.
    """
    # -- stages: keys that some query sees, rounded outwards; those that all see, inwards
    last_query = tl.minimum(last_query, seqlen_q - 1)
    first_some, end_all = seen_keys(
        first_query, seqlen_q, seqlen_k, left, right, HAS_LEFT, HAS_RIGHT
    )
    first_all, end = seen_keys(last_query, seqlen_q, seqlen_k, left, right, HAS_LEFT, HAS_RIGHT)
    first, whole = first_some * 0, first_some * 0
    cut = end_all // BLOCK_N * BLOCK_N
    if HAS_LEFT:
        first = first_some // BLOCK_N * BLOCK_N
        whole = tl.cdiv(tl.minimum(first_all, end), BLOCK_N) * BLOCK_N
        cut = tl.maximum(cut, whole)
    return first, whole, cut, end


@triton.jit
def query_stages(
    first_key,  # of a tile of keys, which exists
    last_key,  # of the tile; it may lie past the end
    seqlen_q,
    seqlen_k,
    left,
    right,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Return (first, whole, cut, end): which queries a tile of keys has to meet, and how.

    Queries from first to whole do not see the last keys of the tile, or these are past the end;
    queries from whole to cut see all; those from cut to end do not see the first keys. All are
    multiples of BLOCK_M but end, and cut where it is end: without a left bound nothing is masked
    there. So queries past the end are not masked, and must have statistics that make them weigh 0.
    """
    first_some, end_all = seeing_queries(
        first_key, seqlen_q, seqlen_k, left, right, HAS_LEFT, HAS_RIGHT
    )
    first_all, end_some = seeing_queries(
        tl.minimum(last_key, seqlen_k - 1), seqlen_q, seqlen_k, left, right, HAS_LEFT, HAS_RIGHT
    )
    first, end = 0, seqlen_q
    if HAS_RIGHT:
        first = tl.maximum(first_some, 0) // BLOCK_M * BLOCK_M
    if HAS_LEFT:
        end = tl.minimum(tl.maximum(end_some, 0), seqlen_q)
    first_all = tl.where(last_key < seqlen_k, tl.maximum(first_all, 0), seqlen_q)
    whole = tl.cdiv(tl.minimum(first_all, end), BLOCK_M) * BLOCK_M
    cut = end
    if HAS_LEFT:
        end_all = tl.minimum(tl.maximum(end_all, 0), end)  # beyond the end there is no query
        cut = tl.maximum(end_all // BLOCK_M * BLOCK_M, whole)
    return first, whole, cut, end
