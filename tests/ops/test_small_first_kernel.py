"""The small kernel of the first chapter against float64 truth, at sizes around its blocks."""

import pytest
import torch
from conftest import DEVICE
from conftest import assert_close as assert_within

from kernelbook.small.first_kernel import row_sums

FACTOR = 4
"""Of PyTorch's error: the order of up to 1,001 additions is another one."""


@pytest.mark.parametrize("block_rows", [1, 2, 4])
@pytest.mark.parametrize("n_cols", [1, 2, 127, 128, 129, 1001])
@pytest.mark.parametrize("n_rows", [1, 2, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_sums_of_rows_around_blocks(n_rows, n_cols, block_rows, dtype):
    x = (100 + torch.randn(n_rows, n_cols, device=DEVICE)).to(dtype)
    y = torch.full((n_rows + 1,), -1.0, device=DEVICE)
    row_sums(x, y[:n_rows], block_rows)
    assert_within(y[:n_rows], x.double().sum(-1), x.float().sum(-1), factor=FACTOR)
    assert y[n_rows] == -1  # nothing past the last row


def test_the_check_refuses_zeros():
    x = torch.ones(2, 64, device=DEVICE)
    with pytest.raises(AssertionError):
        assert_within(torch.zeros(2, device=DEVICE), x.double().sum(-1), x.sum(-1), factor=FACTOR)
