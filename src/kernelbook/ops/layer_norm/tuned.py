"""How layer norm cuts rows into tiles, pieces and parts, with where each was measured."""

from dataclasses import dataclass

from kernelbook import runtime
from kernelbook.ops.rows.pieces import in_pieces

TILE, TILE_BYTES, WARP = 2048, 32768, 1024
"""Least bytes of a forward tile of whole rows, and most; and the bytes of a row for each of up to
four warps. A row that one warp holds is reduced without a barrier: on an H200 rows of 512 columns
of bfloat16 gave 0.98 of a copy, and 0.83 in tiles of 4,096 bytes with four warps. The loads of x
ask L2 to keep x: with that hint 4,096 columns gave 0.99 of a copy, and 0.96 without."""

SHORT_COLS, SHORTEST_COLS = 32, 8
"""Longest rows of which a warp holds many. One warp a tile would be too few loads at a time where
rows are not aligned: on an H200 at 31 columns of float32 two gave 0.50 of a copy and one 0.29, at
7 columns of bfloat16 0.38 and 0.34. At 7 columns of float32 four gave 0.52 and two 0.40."""


def row_warps(block: int, itemsize: int) -> int:
    """Return the warps of a forward tile of whole rows, each padded to ``block`` columns."""
    if block <= SHORTEST_COLS:
        return itemsize
    if block <= SHORT_COLS:
        return 2
    return min(4, max(1, block * itemsize // WARP))


PIECE_COLS, PIECE_WARP = 128, 512
"""Least columns of a piece, and bytes of it for each warp: 16 for each thread, in one load. On an
H200 a row of bfloat16 of 1,280 columns gave 0.96 of a copy in pieces and 0.80 in one block, one of
5,120 columns 1.00 and 0.79, and one of 12,288, packed, 0.95 and 0.81."""


TILE_COLS, PACKED_COLS = 8192, 65536
"""Longer rows of 16-bit numbers are packed two to a register. On an H200 at 16,384 columns of
bfloat16 that gave 0.95 of a copy against 0.91 for a tile, at 32,768 0.93 against 0.69 for parts,
and at 65,536 0.70 against 0.50."""

PACKED = {16384: (16, 40), 32768: (16, 64), 65536: (32, 64)}
"""Warps of a packed row and registers a thread, so that three programs, two, or one fit on
an SM. 64 registers gave 0.84 at 16,384 columns, and no limit 0.66 at 32,768. The hint to L2 costs
at 32,768: 0.88 of a copy with it, and 0.94 in an earlier run whose loads went past L1 instead."""

MAX_PARTS, MAX_PART_COLS = 64, 8192
"""Rows that neither rule takes are split in parts. Rows too long for 64 parts get larger ones."""


@dataclass(frozen=True)
class Part:
    """What a program of a split row takes: ``cols`` columns of so many ``rows``."""

    cols: int
    rows: int
    registers: int | None


FORWARD_PARTS = {
    (2, 2**16): Part(2048, 2, None),
    (2, 2**31): Part(8192, 1, 128),
    (4, 2**15): Part(2048, 2, 128),
    (4, 2**16): Part(4096, 2, 128),
    (4, 2**31): Part(2048, 2, 128),
}
"""Parts by the bytes of an element and the longest row. A program that takes its part of two rows
loads weight and bias half as often: read again for each row, they are as many bytes as x and y. On
an H200, as a share of a copy: bfloat16 at 131,072 columns 0.70, and 0.60 with 8,192 columns of two
rows; float32 at 32,768 columns 0.96, and 0.93 without the limit of registers."""


def forward_part(n_cols: int, itemsize: int) -> Part:
    """Return what a program takes of a row that is split in forward."""
    return next(
        p for (size, up_to), p in FORWARD_PARTS.items() if size == itemsize and n_cols <= up_to
    )


LOOP_COLS = 4096
"""Columns in each iteration of a loop over a row that is too long even for that: 16 elements a
thread with 8 warps, one or two loads of 16 bytes."""

BWD_TILE, BWD_WARP = 2048, 512
"""Backward works on tiles of at least 2,048 elements, with a warp for every 512. A thread has 16
of each array: 32 registers hold its sums, and x, dy and w with what is made of them stay below
128 registers from 1,024 columns on."""

BWD_ROW_COLS = 8192
"""Longest row for one program in backward: its tile and its partial sums fill an SM."""

BWD_STAGES = 3
"""Iterations of the loop whose loads are in flight at once, where the shared memory holds them. An
SM with one program needs them, because no other program would load while it computes. On an H200 at
8,192 columns of bfloat16 three gave 0.92 of a copy, one 0.69 and two 0.60."""

BWD_PACKED_COLS = 16384
"""Longest row of 16-bit numbers that is packed in backward, one program per SM: the partial sums of
all columns take half of its registers, and what masks need would spill. So a row must consist of
whole pieces, as one of 12,288 columns does."""


BWD_THREADS = 512
"""Threads of looping programs on an SM: 128 of its 65,536 registers for each. All
programs run from the beginning to the end, and each leaves one row of sums."""

BWD_PIECES = {3: (512, 384), 5: (256, 384)}
"""Rows of 16-bit numbers that backward takes in pieces, by how many these are: bytes of a piece for
each warp, and threads on an SM. One block would pad such a row by a third or three fifths of it.
On an H200 at 1,280 columns of bfloat16 pieces gave 0.95 of a copy and a block 0.87, at 2,560 0.98
and 0.81, at 5,120 0.95 and 0.77, at 3,072 0.96 and 0.92. With 512 threads 2,560 columns gave 0.81.
Rows of seven pieces, and those of float32, gained nothing or lost."""


def backward_pieces(n_cols: int, itemsizes: tuple[int, int]) -> tuple[int, int, int, int] | None:
    """Return the pieces of a row, the columns of a piece, a program's warps, and the threads on an
    SM; or None where backward takes a row as one block."""
    count, piece = in_pieces(n_cols)
    if max(itemsizes) > 2 or count not in BWD_PIECES or piece < 2 * PIECE_COLS:
        return None
    piece_warp, threads = BWD_PIECES[count]
    num_warps = 2 * piece // piece_warp
    if 32 * num_warps > threads // 2:  # two programs at least
        threads = BWD_THREADS
    return count, piece, num_warps, threads


def is_packed_backward(n_cols: int) -> bool:
    """Whether backward packs rows of 16-bit numbers of such a length."""
    pieces, piece = in_pieces(n_cols, least=3)
    whole = pieces * piece == n_cols and pieces <= 4
    return whole and BWD_ROW_COLS < n_cols <= BWD_PACKED_COLS


BWD_PART_COLS, BWD_MAX_PART_COLS = {2: 2048, 4: 1024}, 4096
"""A longer row is split in parts, for programs that exchange their share of c1 and c2; columns by
the bytes of an element. In float32 at 32,768 columns parts of 1,024 gave 0.77 of a copy on an H200,
parts of 2,048 0.74. Rows too long for 64 such parts get larger ones."""

BWD_PART_WARP = {2: 1024, 4: 512}
"""Columns a warp of a part: a thread then has 64 bytes of x in either case, and what it loads ahead
is what keeps the memory busy. With 512 columns bfloat16 fell from 0.64 of a copy to 0.46 at 32,768
columns, though some registers spill with 1,024."""

BWD_PART_THREADS = 256
"""Threads on an SM then. The previous row and the next one wait in registers, so that a
thread needs up to 255 of them; in bfloat16 at 32,768 columns 384 threads gave 0.57. A program that
does not run yet cannot answer, so no more are started than run at once."""

COLUMN_COLS, COLUMN_PROGRAMS = 1024, 8
"""Rows too long for parts: a program sums a block of 1,024 columns over its share of the rows,
8 elements a thread with 4 warps, and 8 such programs fit on an SM."""

SUM_ROWS, SUM_COLS = 128, 32
"""Tile of the kernel that reduces the buffers. 32 columns are 128 bytes, one cache line, and so
narrow a tile gives 32 programs even for 1,024 columns; 128 rows put 32 loads per thread in
flight."""

LOCK_BUFFERS = 64
"""Buffers that programs share under "lock". With more of them each lock is less contended, and more
buffers have to be reduced at the end."""


def split(n_cols: int, part_cols: int) -> tuple[int, int]:
    """Return into how many parts a row is split, and the columns of a part."""
    block = max(part_cols, runtime.next_power_of_2(runtime.cdiv(n_cols, MAX_PARTS)))
    return runtime.cdiv(n_cols, block), block
