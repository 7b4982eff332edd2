"""The operators, one room each. Their public functions are those of :mod:`kernelbook`."""
