"""What the operators on rows share.

matrix.py    a tensor seen as a matrix of rows, and results that are no views
exchange.py  two numbers from each program of a row to all the others
packed.py    two 16-bit numbers in one register
pieces.py    a row whose length is no power of two
sums.py      two sums in one reduction
units.py     what divides the length of a row
"""
