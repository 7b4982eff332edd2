"""The small kernels of attention in models, against the formula in float64."""

import pytest
import torch

from kernelbook import runtime
from kernelbook.lab.check import error, tolerance
from kernelbook.small.attention_in_models import (
    attend_in_parts,
    packed_attention,
    window_attention,
)


def formula(q, k, v, seen, dtype):
    s = (q.to(dtype) * q.shape[-1] ** -0.5) @ k.to(dtype).mT
    return s.masked_fill(~seen, -torch.inf).softmax(-1) @ v.to(dtype)


def assert_near(out, q, k, v, seen):
    """Eight times PyTorch's error: the same sums in another order, as in the operators' tests."""
    truth, theirs = (formula(q, k, v, seen, dtype) for dtype in (torch.float64, torch.float32))
    allowed = tolerance(error(theirs, truth), torch.float32, 8)
    assert error(out, truth) <= allowed
    assert error(torch.zeros_like(out), truth) > allowed


@pytest.mark.parametrize("left", [0, 1, 14, 15, 16, 17, 40, 200])
def test_windows_around_the_size_of_a_tile(left):
    q, k, v = torch.randn(3, 64, 16, device=runtime.DEVICE)
    i = torch.arange(64, device=runtime.DEVICE)
    behind = i[:, None] - i
    assert_near(window_attention(q, k, v, left), q, k, v, (behind >= 0) & (behind <= left))


@pytest.mark.parametrize("lengths", [(20, 8, 32, 12), (1, 16, 17), (0, 33, 0, 1), (5,)])
def test_packed_sequences_see_themselves_alone(lengths):
    device = runtime.DEVICE
    offsets = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    q, k, v = torch.randn(3, sum(lengths), 16, device=device)
    out = packed_attention(q, k, v, offsets, max(lengths))
    which = torch.arange(len(lengths), device=device)
    which = which.repeat_interleave(torch.tensor(lengths, device=device))
    i = torch.arange(len(q), device=device)
    assert_near(out, q, k, v, (which[:, None] == which) & (i[:, None] >= i))


def test_nothing_leaks_into_a_packed_sequence():
    offsets = torch.tensor([0, 20, 28, 60], device=runtime.DEVICE).int()
    q, k, v = torch.randn(3, 60, 16, device=runtime.DEVICE)
    alone = packed_attention(q, k, v, offsets, 32)
    v[:20] = v[28:] = float("nan")
    assert torch.equal(packed_attention(q, k, v, offsets, 32)[20:28], alone[20:28])


@pytest.mark.parametrize(("keys", "share"), [(1, 1), (48, 16), (49, 16), (50, 17), (40, 64)])
def test_parts_merge_to_the_whole(keys, share):
    q = 3 * torch.randn(2, 32, device=runtime.DEVICE)
    k, v = torch.randn(2, 2, keys, 32, device=runtime.DEVICE)
    outs, lses = attend_in_parts(q, k, v, share)
    assert len(outs) == -(-keys // share)
    out = (lses.softmax(0)[..., None] * outs).sum(0)[:, None]
    seen = torch.ones(1, keys, dtype=torch.bool, device=runtime.DEVICE)
    assert_near(out, q[:, None], k, v, seen)
