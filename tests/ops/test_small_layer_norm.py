"""The small layer norms against float64 truth, at the lengths around a block's."""

import pytest
import torch
from conftest import DEVICE, DTYPES, assert_close

from kernelbook import reference
from kernelbook.small.layer_norm import norm


@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 2), (5, 127), (3, 128), (9, 129), (33, 1000), (2, 8192)])
def test_small_layer_norm_is_the_truth(shape, dtype, corrected):
    x, w, b = (torch.randn(size, device=DEVICE).to(dtype) for size in (shape, shape[1], shape[1]))
    y = norm(x, w, b, corrected=corrected)
    truth = reference.layer_norm(x, 1, w, b)
    theirs = torch.nn.functional.layer_norm(x, shape[1:], w, b)
    factor = 4 if dtype == torch.float32 else 2  # the hardware's rsqrt errs by two units
    assert_close(y, truth, theirs, factor=factor)
    with pytest.raises(AssertionError):
        assert_close(torch.zeros_like(y), truth, theirs, factor=factor)


def test_correction_keeps_the_variance_of_numbers_without_a_mean_in_float32():
    x = torch.tensor([[2.0**24, 2.0**24 + 2]], device=DEVICE)  # float32 has no 2**24 + 1
    ones, zeros = torch.ones(2, device=DEVICE), torch.zeros(2, device=DEVICE)
    plain, corrected = (norm(x, ones, zeros, 0.0, corrected=repair) for repair in (False, True))
    assert abs(plain.var(correction=0).item() - 0.5) < 1e-6
    assert abs(corrected.var(correction=0).item() - 1) < 1e-6


def test_correction_makes_equal_numbers_zeros():
    x = torch.full((1, 1024), 1000.1, device=DEVICE)
    w, b = torch.ones(1024, device=DEVICE), torch.zeros(1024, device=DEVICE)
    assert norm(x, w, b, corrected=True).abs().max().item() < 1e-3
