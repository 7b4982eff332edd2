"""Layer normalisation over the last dimensions.

forward.py   the normalised rows, and the statistics that backward needs
backward.py  the gradient of x
sums.py      the gradients of weight and bias: sums that programs share
tuned.py     how rows are cut, with where it was measured
operator.py  the autograd Function, and the public function
"""

from kernelbook.ops.layer_norm.operator import layer_norm

__all__ = ["layer_norm"]
