"""Attention in Gluon against float64 truth, on a Hopper GPU, where a rule changes."""

import itertools
from dataclasses import replace

import pytest
import torch
from conftest import DEVICE
from conftest import assert_close as assert_within
from test_attention import LSE_FACTOR, by_pytorch

from kernelbook import reference, runtime
from kernelbook.ops.attention.forward import attention_forward as plain_forward
from kernelbook.ops.hopper import forward as hopper

SIXTEEN_BITS = (torch.bfloat16, torch.float16)
LENGTHS = (1, 63, 64, 65, 127, 128, 129, 191, 192, 193, 300, 1000)
MASKS = {
    "full": (False, None),
    "causal": (True, None),
    "window": (False, (70, 40)),
    "left": (False, (130, None)),
    "causal window": (True, (100, None)),
    "narrow": (False, (0, 0)),
    "ahead": (False, (None, 150)),
}


@pytest.fixture
def hopper_gpu():
    """Skip where the kernel cannot run."""
    if runtime.INTERPRETED:
        pytest.skip("needs a Hopper GPU")
    reason = hopper.supported(*draw(1, 1, 1, 64, 64, 64))
    if reason:
        pytest.skip(reason)


def draw(batch, heads, heads_k, seqlen_q, seqlen_k, head_dim, dtype=torch.bfloat16):
    shapes = ((heads, seqlen_q), (heads_k, seqlen_k), (heads_k, seqlen_k))
    return [torch.randn(batch, *s, head_dim, device=DEVICE).to(dtype) for s in shapes]


def check(q, k, v, mask="full", scale=None, config=None):
    """Compare out and lse with the truth, head by head, and with PyTorch's error."""
    is_causal, window = MASKS[mask]
    scale = q.shape[3] ** -0.5 if scale is None else scale
    assert hopper.supported(q, k, v) is None
    out, lse = hopper.attention_forward(q, k, v, is_causal, scale, window, config)
    true_out, true_lse = reference.attention(q, k, v, is_causal, scale, window)
    theirs = by_pytorch(q, k, v, is_causal, scale, window)
    assert (out.shape, out.dtype) == (q.shape, q.dtype)
    assert (lse.shape, lse.dtype) == (q.shape[:3], torch.float32)
    assert out.is_contiguous()
    for batch, head in itertools.product(*map(range, q.shape[:2])):
        assert_within(out[batch, head], true_out[batch, head], theirs[batch, head])
    if true_lse.abs().max() > 0:
        assert_within(lse, true_lse, true_lse.float(), LSE_FACTOR)
    return out, lse


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("seqlen_q", LENGTHS)
def test_every_length(hopper_gpu, head_dim, mask, seqlen_q):
    for dtype, seqlen_k in zip(itertools.cycle(SIXTEEN_BITS), LENGTHS, strict=False):
        check(*draw(1, 2, 1, seqlen_q, seqlen_k, head_dim, dtype), mask)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("mask", ["full", "causal", "window"])
def test_many_tiles_heads_and_groups(hopper_gpu, head_dim, mask):
    check(*draw(3, 6, 2, 1500, 2100, head_dim), mask)


@pytest.mark.parametrize("dtype", SIXTEEN_BITS)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_layouts(hopper_gpu, head_dim, dtype):
    """Heads inside the sequence, one packed tensor, padded rows, and a batch that repeats."""
    for mask in ("full", "causal"):
        q, k, v = (
            torch.randn(2, 300, 3, head_dim, device=DEVICE).to(dtype).transpose(1, 2)
            for _ in range(3)
        )
        check(q, k, v, mask)
        packed = torch.randn(2, 200, 3, 4, head_dim, device=DEVICE).to(dtype)
        check(*packed.permute(2, 0, 3, 1, 4), mask)
        padded = torch.randn(3, 2, 4, 200, head_dim + 8, device=DEVICE).to(dtype)
        check(*padded[..., :head_dim], mask)
        q, k, v = draw(2, 2, 2, 200, 200, head_dim, dtype)
        check(q, k[:1].expand(2, -1, -1, -1), v, mask)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_far_from_zero(hopper_gpu, head_dim):
    for mask in ("full", "causal"):
        q, k, v = draw(1, 2, 2, 300, 500, head_dim)
        check(q, k + 8, v, mask)
        check(3 * q, 3 * k, v, mask)
        check(q, k, v + 100, mask)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_key_that_weighs_nothing_and_one_that_weighs_all(hopper_gpu, head_dim):
    q, k, v = draw(1, 1, 1, 200, 400, head_dim)
    q = q.abs() + 1
    for key in (0, 127, 128, 255, 399):
        low, high = k.clone(), k.clone()
        low[:, :, key] = -3e4
        high[:, :, key] = 30
        check(q, low, v)
        check(q, high, v)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_nan_and_infinity(hopper_gpu, head_dim):
    """NaN reaches who sees it, and of others at most those whose tile meets it.

    As in the plain kernel, a weight of 0 does not remove a NaN; its tiles may have more queries.
    """
    q, k, v = draw(1, 2, 2, 300, 500, head_dim)
    q = q.abs() + 1
    k[0, 0, 200] = -torch.inf
    k[0, 1] = -torch.inf
    v[0, 0, 450] = torch.nan
    for mask in ("full", "causal"):
        is_causal, window = MASKS[mask]
        out, lse = hopper.attention_forward(q, k, v, is_causal, 0.1, window)
        theirs, their_lse = plain_forward(q, k, v, is_causal, 0.1, window)
        torch.testing.assert_close(lse, their_lse, equal_nan=True, rtol=1e-4, atol=1e-4)
        assert out[0, 1].isnan().all()
        sees = 250 if is_causal else 0
        assert out[0, 0, sees:].isnan().all()
        meets = 128 if is_causal else 0  # the tile of 64 queries that sees keys from 384 on
        assert out[0, 0, :meets].isfinite().all()
        finite = out.isfinite() & theirs.isfinite()
        torch.testing.assert_close(out[finite], theirs[finite], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_queries_that_see_nothing(hopper_gpu, head_dim):
    q, k, v = draw(1, 2, 2, 400, 130, head_dim)
    out, lse = check(q, k, v, "causal")
    assert (out[:, :, :270] == 0).all()
    assert (lse[:, :, :270] == -torch.inf).all()
    assert lse[:, :, 270:].isfinite().all()


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("mask", ["full", "causal", "window"])
def test_equal_to_the_plain_kernel(hopper_gpu, head_dim, mask):
    q, k, v = draw(2, 4, 2, 1024, 1024, head_dim)
    is_causal, window = MASKS[mask]
    ours, lse = hopper.attention_forward(q, k, v, is_causal, 0.1, window)
    theirs, their_lse = plain_forward(q, k, v, is_causal, 0.1, window)
    truth, _ = reference.attention(q, k, v, is_causal, 0.1, window)
    assert_within(ours, truth, theirs)
    torch.testing.assert_close(lse, their_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_the_same_bits_again(hopper_gpu, head_dim, mask):
    """A race between the roles would show as other bits: many programs, many times."""
    q, k, v = draw(4, 16, 16, 2000, 2000, head_dim)
    is_causal, window = MASKS[mask]
    first = hopper.attention_forward(q, k, v, is_causal, 0.1, window)
    for _ in range(50):
        again = hopper.attention_forward(q, k, v, is_causal, 0.1, window)
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    "change",
    [
        {"take_turns": False},
        {"persistent": False},
        {"paired": False},
        {"consumers": 2},
        {"block_n": 64, "stages": 4},
        {"block_n": 64, "stages": 5},
        {"take_turns": False, "persistent": False},
    ],
    ids=str,
)
def test_every_configuration(hopper_gpu, head_dim, change):
    config = replace(hopper.CONFIGS[head_dim], **change)
    for mask in MASKS:
        check(*draw(1, 4, 2, 700, 900, head_dim), mask, config=config)
        check(*draw(9, 8, 2, 700, 400, head_dim), mask, config=config)  # turns of each program


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("batch", [27, 28])
@pytest.mark.parametrize("seqlen_q", [128, 300, 520])
def test_pairs(hopper_gpu, head_dim, batch, seqlen_q):
    """Programs take pairs of tiles: heads with an odd number of them, and one tile that is over."""
    for mask in ("causal", "left"):
        q, k, v = draw(batch, 5, 5, seqlen_q, 400, head_dim)
        check(q, k, v, mask, config=hopper.CONFIGS[head_dim])


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("uneven", [False, True])
def test_each_length_has_a_choice(head_dim, uneven):
    limits = [limit for limit, _ in hopper.CHOICES[head_dim, uneven]]
    assert limits == sorted(limits)
    for limit, config in hopper.CHOICES[head_dim, uneven]:
        longest = min(limit, 2**40)
        assert hopper.choose(head_dim, uneven, longest) == config
    assert hopper.choose(head_dim, uneven, 1) == hopper.CHOICES[head_dim, uneven][0][1]


def test_what_is_not_supported_says_why():
    q, k, v = draw(1, 2, 2, 64, 64, 64)
    if runtime.INTERPRETED or runtime.capability(q.device) != (9, 0):
        assert "Hopper" in hopper.supported(q, k, v)
        return
    assert hopper.supported(q, k, v) is None
    assert "head_dim" in hopper.supported(*draw(1, 2, 2, 64, 64, 32))
    assert "dtype" in hopper.supported(q.float(), k.float(), v.float())
    assert "empty" in hopper.supported(q, k[:, :, :0], v[:, :, :0])
    padded = torch.zeros(1, 2, 64, 65, device=DEVICE, dtype=q.dtype)[..., :64]
    assert "16 bytes" in hopper.supported(q, padded, v)
