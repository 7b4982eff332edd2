"""The smallest complete kernels of some chapters: what a reader writes first.

Each is naive where that teaches: one row, part or tile per program, and no dispatch. They are right
for the sizes that they name, and nothing is timed with them; the operators are in
``kernelbook.ops``.
"""
