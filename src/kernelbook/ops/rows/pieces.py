"""A row in pieces: what a kernel takes where the length of a row is no power of two.

A block has to be a power of two, and of a row of 1,280 numbers a block of 2,048 would be three
eighths padding, for which threads and registers are taken all the same.
"""

import triton
import triton.language as tl

from kernelbook import runtime

EIGHTHS = 8
"""A row is padded to a multiple of an eighth of the next power of two, and not to that power."""


def in_pieces(n_cols: int, least: int = 1) -> tuple[int, int]:
    """Return into how many pieces a row is cut, at least so many, and the columns of a piece."""
    piece = max(1, runtime.next_power_of_2(n_cols) // EIGHTHS)
    count = runtime.cdiv(n_cols, piece)
    while count % 2 == 0 and count // 2 >= least:
        count, piece = count // 2, piece * 2
    return count, piece


@triton.jit
def where_piece(piece, n_numbers, LENGTH: tl.constexpr, FULL: tl.constexpr):
    """Where a piece of a row lies, and which of it is there: all, without asking, if FULL."""
    offsets = piece * LENGTH + tl.arange(0, LENGTH)
    return offsets, FULL | (offsets < n_numbers)


@triton.jit
def afresh(pieces, zero, N_PIECES: tl.constexpr):
    """The same numbers, which the compiler takes for new ones and so does not keep widened."""
    same = ()
    for piece in tl.static_range(N_PIECES):
        same = same + (pieces[piece] + zero,)
    return same
