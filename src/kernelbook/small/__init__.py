"""The smallest complete kernels of some chapters: what a reader writes first.

Each is naive where that teaches: one row or one tile per program, no dispatch, no masks beyond the
end of a row. They are right for the sizes that they name, and nothing is timed with them; the
operators are in ``kernelbook.ops``.
"""
