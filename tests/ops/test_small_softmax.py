"""The small kernels of softmax against float64 truth, at lengths around their blocks."""

import pytest
import torch
from conftest import DEVICE
from conftest import assert_close as assert_within

from kernelbook import reference
from kernelbook.small.softmax import online_softmax, shared_row_kernel, shared_softmax

FACTOR = 4
"""Of PyTorch's error: the kernels rescale a sum at each of up to 63 blocks, one rounding each."""


def check(x, softmax=online_softmax, **blocks):
    truth = reference.softmax(x, -1)
    assert_within(softmax(x, **blocks), truth, torch.softmax(x, -1), factor=FACTOR)


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


@pytest.mark.parametrize("n_cols", [1, 15, 16, 17, 255, 256, 257, 1000])
@pytest.mark.parametrize("block", [16, 256])
def test_a_row_that_programs_share(n_cols, block):
    check(4 * torch.randn(3, n_cols, device=DEVICE), shared_softmax, block=block)


@pytest.mark.parametrize("max_polls", [0, 1])
def test_parts_that_are_late_are_computed(max_polls):
    check(torch.randn(5, 1000, device=DEVICE), shared_softmax, block=64, max_polls=max_polls)


def test_a_part_reads_the_pairs_of_the_others_from_their_slots():
    """Slots that are full from a launch before suffice, where the other parts cannot be read."""
    x = 4 * torch.randn(1, 64, device=DEVICE)
    slots, y = torch.zeros(4, dtype=torch.int64, device=DEVICE), torch.empty_like(x)
    shared_row_kernel[(4,)](x, y, slots, 64, 2**14 if DEVICE == "cuda" else 1, 4, 16)
    assert (slots != 0).all()
    alone = x.clone()
    alone[:, 16:] = float("nan")
    shared_row_kernel[(1,)](alone, y.zero_(), slots, 64, 0, 4, 16)
    truth, theirs = reference.softmax(x, -1), torch.softmax(x, -1)
    assert_within(y[:, :16], truth[:, :16], theirs[:, :16], factor=FACTOR)
