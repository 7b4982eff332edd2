"""The smallest online softmax against float64 truth, at lengths around its blocks."""

import pytest
import torch
from conftest import DEVICE
from conftest import assert_close as assert_within

from kernelbook import reference
from kernelbook.small.softmax import online_softmax

FACTOR = 4
"""Of PyTorch's error: the kernel rescales its sum at each of up to 63 blocks, one rounding each."""


def check(x, **blocks):
    truth = reference.softmax(x, -1)
    assert_within(online_softmax(x, **blocks), truth, torch.softmax(x, -1), factor=FACTOR)


@pytest.mark.parametrize("n_cols", [1, 15, 16, 17, 255, 256, 257, 1000])
@pytest.mark.parametrize("block_cols", [16, 256])
def test_rows_around_blocks(n_cols, block_cols):
    check(4 * torch.randn(3, n_cols, device=DEVICE), block_cols=block_cols)


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("offset", [-1000, 0, 1000])
def test_a_maximum_that_rises_in_every_block_or_in_none(descending, offset):
    x = 10 * torch.randn(2, 300, device=DEVICE)
    check((x + offset).sort(descending=descending).values.contiguous(), block_cols=16)


def test_minus_infinity_after_the_first_block_of_a_row():
    x = torch.randn(2, 64, device=DEVICE)
    x[:, 16:48] = float("-inf")
    check(x, block_cols=16)


def test_the_check_refuses_zeros_and_a_sum_that_is_not_repaired():
    x = torch.randn(2, 64, device=DEVICE)
    truth, theirs = reference.softmax(x, -1), torch.softmax(x, -1)
    block_by_block = x.view(2, 4, 16).softmax(-1).view(2, 64)
    for wrong in (torch.zeros_like(x), block_by_block, truth.float() * (1 + 1e-5)):
        with pytest.raises(AssertionError):
            assert_within(wrong, truth, theirs, factor=FACTOR)
