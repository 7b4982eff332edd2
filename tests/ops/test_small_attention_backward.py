"""The small kernels of attention backward, against the formula in float64."""

import pytest
import torch

from kernelbook import reference, runtime
from kernelbook.lab.check import error, tolerance
from kernelbook.small.attention_backward import keys_backward, queries_backward


def by_autograd(q, k, v, do):
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    n = len(q)
    unseen = torch.ones(n, n, dtype=torch.bool, device=q.device).triu(1)
    s = (q @ k.T * q.shape[1] ** -0.5).masked_fill(unseen, -torch.inf)
    out = s.softmax(-1) @ v
    lse, delta = s.logsumexp(-1).detach(), (do * out).sum(-1).detach()
    return torch.autograd.grad(out, (q, k, v), do), lse, delta


@pytest.mark.parametrize(
    ("n", "block_m", "block_n"), [(16, 16, 16), (64, 16, 32), (64, 32, 16), (48, 16, 16)]
)
def test_gradients(n, block_m, block_n):
    q, k, v, do = torch.randn(4, n, 32, device=runtime.DEVICE)
    theirs, lse, delta = by_autograd(q, k, v, do)
    inputs = (q, k, v, do, lse, delta, block_m, block_n)
    found = (queries_backward(*inputs), *keys_backward(*inputs))
    four = (x[None, None] for x in (q, k, v, do))
    truths = reference.attention_backward(*four, True)
    for ours, peer, truth in zip(found, theirs, truths, strict=True):
        truth = truth[0, 0]
        # eight times PyTorch's error: the same sums in another order, as in the operators' tests
        allowed = tolerance(error(peer, truth), torch.float32, 8)
        assert error(ours, truth) <= allowed
        assert error(torch.zeros_like(ours), truth) > allowed
