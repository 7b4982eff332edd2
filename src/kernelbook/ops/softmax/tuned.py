"""How softmax cuts rows into blocks, programs and parts, with where each was measured."""

from kernelbook import runtime

TILE_COLS = 8192
"""Longest row for a tile of whole rows, widened to float32. Longer rows of 16-bit numbers are
packed: at 32,768 columns on an H200 that gave 0.98 of a copy's speed against 0.79, because two
programs fit on an SM and one computes while the other loads."""

PACKED_WARP = 2048
"""Columns of a packed row for each warp, counted with its padding."""

WIDE_BYTES = 65536
"""Longest row for one program, in bytes, so that the registers hold a second one. On an H200
at 65,536 columns of bfloat16 one program a row gave 0.62 of a copy, and 16 parts gave 0.94."""

PART_COLS = 4096, 8192
"""Columns of a part of a longer row. Small parts hold few registers while they wait, and many parts
wait longer for the slowest. At 65,536 columns 4,096 gave 0.94 of a copy and 8,192 gave 0.93, at
131,072 columns 0.88 and 0.90. Backward holds two arrays: there 4,096 gave 0.92 at 131,072."""

SMALL_PARTS_UP_TO = {"forward": 65536, "backward": 131072}
"""Longest row for the smaller parts."""

ROW_COLS = 2**20
"""Longest row that ``row`` takes, in 128 parts."""

BLOCK_COLS = 8192
"""Numbers that a program of the algorithms that read a row several times holds at once."""

LOOP_COLS = 1024 if runtime.INTERPRETED else 128
"""Columns a warp and block when a part does read the row: few, because the registers of this path
count even if it is never taken. With 1,024 a program had 239 registers, and 0.55 of a copy. To
compute the numbers of each part one after the other, its own last, gave 0.86 instead of 0.93."""


PART_WARP, UNALIGNED_PART_WARP = 2048, 4096
"""Columns of a part for each warp. Where rows do not begin at multiples of 16 bytes, as with 50,257
columns of bfloat16, each number is a load of its own, and a thread has to have more of them under
way: 4,096 columns a warp gave 0.72 of a copy on an H200, and 2,048 gave 0.63."""


def split(n_cols: int, itemsize: int, direction: str) -> tuple[int, int, int]:
    """Return into how many parts a row is split, the columns of a part, and its warps."""
    block = PART_COLS[n_cols > SMALL_PARTS_UP_TO[direction]]
    warp = UNALIGNED_PART_WARP if n_cols * itemsize % 16 else PART_WARP
    return runtime.cdiv(n_cols, block), block, max(1, block // warp)
