"""The small kernel of the chapter on one sweep backward, against float64."""

import pytest
import torch

from kernelbook import reference, runtime
from kernelbook.lab.check import judge
from kernelbook.small.attention_hopper_backward import TILE, sweep_in_turn


@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize("seqlen", [TILE, 2 * TILE, 5 * TILE])
def test_gradients_are_right(seqlen, head_dim):
    torch.manual_seed(seqlen + head_dim)
    q, k, v, do = torch.randn(
        4, seqlen, head_dim, device=runtime.DEVICE, dtype=torch.float16
    ).unbind()
    scale = head_dim**-0.5
    batched = [x[None, None] for x in (q, k, v, do)]
    truth = reference.attention_backward(*batched, False, scale)
    leaves = [x.clone().requires_grad_() for x in batched[:3]]
    out = torch.nn.functional.scaled_dot_product_attention(*leaves)
    theirs = torch.autograd.grad(out, leaves, batched[3])
    ours = sweep_in_turn(q, k, v, do)
    for found, torchs, true in zip(ours, theirs, truth, strict=True):
        assert judge(found[None, None], torchs, true).ok
        assert not judge(torch.zeros_like(torchs), torchs, true).ok


def test_a_length_that_tiles_do_not_divide_is_refused():
    x = torch.zeros(TILE + 1, 16, device=runtime.DEVICE, dtype=torch.float16)
    with pytest.raises(ValueError, match="q has 65 rows"):
        sweep_in_turn(x, x, x, x)
