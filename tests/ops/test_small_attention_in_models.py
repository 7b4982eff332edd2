"""The small kernels of attention in models, against the formula in float64."""

import pytest
import torch

from kernelbook import runtime
from kernelbook.lab.check import error, tolerance
from kernelbook.small.attention_in_models import attend_in_parts, window_attention


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


@pytest.mark.parametrize(("keys", "share"), [(1, 1), (48, 16), (49, 16), (50, 17), (40, 64)])
def test_parts_merge_to_the_whole(keys, share):
    q = 3 * torch.randn(2, 32, device=runtime.DEVICE)
    k, v = torch.randn(2, 2, keys, 32, device=runtime.DEVICE)
    outs, lses = attend_in_parts(q, k, v, share)
    assert len(outs) == -(-keys // share)
    out = (lses.softmax(0)[..., None] * outs).sum(0)[:, None]
    seen = torch.ones(1, keys, dtype=torch.bool, device=runtime.DEVICE)
    assert_near(out, q[:, None], k, v, seen)
