"""The whole backward kernel of the first chapter, beside float64."""

import pytest
import torch

from kernelbook import reference, runtime
from kernelbook.small.first_kernel import rows_backward


@pytest.mark.parametrize("block_rows", [1, 2, 8])
@pytest.mark.parametrize("shape", [(1, 1), (5, 6), (8, 64), (17, 65), (64, 1000)])
def test_gradients_agree_with_float64(shape, block_rows):
    x = torch.randn(shape, device=runtime.DEVICE) + 1
    w = torch.randn(shape[1], device=runtime.DEVICE)
    dy = torch.randn(shape[0], device=runtime.DEVICE) + 1
    found = rows_backward(dy, x, w, block_rows)
    for ours, truth in zip(found, reference.weighted_sum_backward(x, w, dy), strict=True):
        # a sum of n float32 products errs by at most n roundings of the sum of their sizes
        bound = 2.0**-23 * shape[0] * (dy.abs().double() @ x.abs().double()).max()
        assert ours.dtype == torch.float32
        assert (ours.double() - truth).abs().max() <= max(bound.item(), 1e-6)
        assert truth.abs().max() > max(bound.item(), 1e-6)  # so that zeros would fail
