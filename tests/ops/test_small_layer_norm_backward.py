"""The small kernels of layer norm backward, against float64."""

import pytest
import torch

from kernelbook import reference, runtime
from kernelbook.small.layer_norm_backward import with_lock, without_lock


@pytest.mark.parametrize("gradients", [with_lock, without_lock])
@pytest.mark.parametrize(
    ("n_rows", "n_cols", "n_programs"),
    [(1, 5, 1), (3, 128, 5), (7, 127, 3), (10, 129, 10), (2, 4096, 2)],
)
def test_gradients(gradients, n_rows, n_cols, n_programs):
    """Also where programs have no row, or several, and where no block is full."""
    torch.manual_seed(0)
    x, dy = torch.randn(2, n_rows, n_cols, device=runtime.DEVICE)
    w = torch.randn(n_cols, device=runtime.DEVICE)
    deviation = x - x.mean(-1, keepdim=True)
    mean, rstd = x.mean(-1), (deviation.square().mean(-1) + 1e-5).rsqrt()
    truths = reference.layer_norm_backward(x, dy, 1, w)
    ours = gradients(x, w, mean, rstd, dy, n_programs)
    for gradient, truth in zip(ours, truths, strict=True):
        assert gradient.shape == truth.shape
        scale = truth.abs().max()
        # float32 rounds to 6e-8, and dx of a short row is a small difference of larger numbers
        assert (gradient - truth).abs().max() < 2e-6 * scale
        assert truth.abs().max() > 2e-6 * scale, "zeros must fail"
