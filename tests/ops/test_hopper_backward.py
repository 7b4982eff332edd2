"""The backward pass in Gluon against float64 truth, on a Hopper GPU, where a rule changes."""

import itertools
from dataclasses import replace

import pytest
import torch
from conftest import DEVICE
from conftest import assert_close as assert_within
from test_attention import by_pytorch, rounding_of_a_gradient
from test_hopper import LENGTHS, MASKS, SIXTEEN_BITS, draw

from kernelbook import reference, runtime
from kernelbook.ops.attention.backward import attention_backward as plain_backward
from kernelbook.ops.attention.forward import attention_forward
from kernelbook.ops.hopper import backward as hopper
from kernelbook.ops.hopper.backward_choice import CONFIGS, FREE


@pytest.fixture
def hopper_gpu():
    """Skip where the kernel cannot run."""
    if runtime.INTERPRETED:
        pytest.skip("needs a Hopper GPU")
    q, k, v = draw(1, 1, 1, 64, 64, 64)
    reason = hopper.supported(q, k, v, q)
    if reason:
        pytest.skip(reason)


def poison():
    """Leave NaN where the next tensors will be allocated, so that what is not written is seen."""
    left = [torch.full((2**n,), torch.nan, device=DEVICE) for n in range(10, 25)]
    del left


def check(q, k, v, mask="full", scale=None, config=None, do=None, dlse=None, orders=(True, False)):
    """Compare the gradients with the truth, head by head, and with PyTorch's error."""
    is_causal, window = MASKS[mask]
    scale = q.shape[3] ** -0.5 if scale is None else scale
    do = torch.randn(q.shape, device=DEVICE).to(q.dtype) if do is None else do
    assert hopper.supported(q, k, v, do) is None
    out, lse = attention_forward(q, k, v, is_causal, scale, window)
    truth = reference.attention_backward(q, k, v, do, is_causal, scale, dlse, window)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    their_out = [by_pytorch(*leaves, is_causal, scale, window)]
    given = [do]
    if dlse is not None:
        scores = (leaves[0] @ leaves[1].repeat_interleave(q.shape[1] // k.shape[1], 1).mT) * scale
        hidden = torch.ones(scores.shape[2:], dtype=torch.bool, device=DEVICE).triu(
            scores.shape[3] - scores.shape[2] + 1 if is_causal else scores.shape[3]
        )
        their_out.append(scores.masked_fill(hidden, -torch.inf).logsumexp(-1))
        given.append(dlse.to(q.dtype))
    theirs = torch.autograd.grad(their_out, leaves, given)
    for deterministic in orders:
        poison()
        ours = hopper.attention_backward(
            q, k, v, out, lse, do, is_causal, scale, deterministic, dlse, window, config=config
        )
        for x, dx, their_dx, true_dx in zip((q, k, v), ours, theirs, truth, strict=True):
            assert (dx.shape, dx.dtype) == (x.shape, x.dtype)
            for batch, head in itertools.product(*map(range, x.shape[:2])):
                at = batch, head
                # a query that sees one key or none has no gradient, but for rounding
                some = true_dx[at].abs().amax(-1) > 1e-9
                if some.any():
                    assert_within(dx[at][some], true_dx[at][some], their_dx[at][some])
                if not some.all():
                    assert dx[at][~some].abs().max() <= rounding_of_a_gradient(q, k, v, do, scale)
    return ours


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("seqlen_q", LENGTHS)
def test_every_length(hopper_gpu, head_dim, mask, seqlen_q):
    for dtype, seqlen_k in zip(itertools.cycle(SIXTEEN_BITS), LENGTHS, strict=False):
        check(*draw(1, 2, 1, seqlen_q, seqlen_k, head_dim, dtype), mask)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("mask", MASKS)
def test_many_tiles_heads_and_groups(hopper_gpu, head_dim, mask):
    check(*draw(3, 6, 2, 1500, 2100, head_dim), mask)
    check(*draw(1, 4, 4, 1500, 700, head_dim), mask)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_a_gradient_of_the_logsumexp(hopper_gpu, head_dim, mask):
    q, k, v = draw(2, 4, 2, 300, 400, head_dim)
    check(q, k, v, mask, dlse=torch.randn(2, 4, 300, device=DEVICE))


@pytest.mark.parametrize("dtype", SIXTEEN_BITS)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_layouts(hopper_gpu, head_dim, dtype):
    """Heads inside the sequence, one packed tensor, padded rows, and a batch that repeats."""
    for mask in ("full", "causal"):
        q, k, v, do = (
            torch.randn(2, 300, 3, head_dim, device=DEVICE).to(dtype).transpose(1, 2)
            for _ in range(4)
        )
        check(q, k, v, mask, do=do)
        packed = torch.randn(2, 200, 3, 4, head_dim, device=DEVICE).to(dtype)
        check(*packed.permute(2, 0, 3, 1, 4), mask)
        padded = torch.randn(3, 2, 4, 200, head_dim + 8, device=DEVICE).to(dtype)
        check(*padded[..., :head_dim], mask)
        q, k, v = draw(2, 2, 2, 200, 200, head_dim, dtype)
        check(q, k[:1].expand(2, -1, -1, -1), v, mask, do=q[:1].expand(2, -1, -1, -1))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_far_from_zero(hopper_gpu, head_dim):
    for mask in ("full", "causal"):
        q, k, v = draw(1, 2, 2, 300, 500, head_dim)
        check(3 * q, 3 * k, v, mask)
        q, k, v = (x.half() for x in (q, k, v))  # bfloat16 errs too much in PyTorch to compare with
        check(q, k, v + 8, mask)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_scores_far_below_zero_reach_no_gradient_past_the_last_key(hopper_gpu, head_dim):
    """A key that is not there would weigh exp(-lse), more than float32 holds."""
    q, k, v = draw(1, 2, 2, 200, 330, head_dim, torch.float16)  # no row sees few keys
    q, k = q.abs() + 1, -k.abs() - 1
    scale = 48 / head_dim  # lse of about -120
    check(q, k, v, "full", scale)
    check(q, k, v, "causal", scale)


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_nan_stays_in_its_head(hopper_gpu, head_dim, deterministic):
    q, k, v = draw(1, 4, 2, 300, 500, head_dim)
    do = torch.randn_like(q)
    v[0, 0, 200] = torch.nan
    out, lse = attention_forward(q, k, v, False, 0.1)
    dq, dk, dv = hopper.attention_backward(q, k, v, out, lse, do, False, 0.1, deterministic)
    assert dq[0, :2].isnan().all()
    assert dk[0, 0].isnan().all()
    assert all(x[0, heads].isfinite().all() for x, heads in ((dq, slice(2, 4)), (dk, 1), (dv, 1)))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_queries_that_see_nothing_have_gradient_zero(hopper_gpu, head_dim):
    q, k, v = draw(1, 2, 2, 400, 130, head_dim)
    dq, _, _ = check(q, k, v, "causal")
    assert not dq[:, :, :270].any()
    assert dq[:, :, 271:].any(-1).all()


@pytest.mark.parametrize("head_dim", [64, 128])
def test_keys_that_nobody_sees_have_gradient_zero(hopper_gpu, head_dim):
    q, k, v = draw(1, 2, 1, 130, 700, head_dim)
    _, dk, dv = check(q, k, v, "window")
    assert not dk[:, :, :500].any()
    assert not dv[:, :, :500].any()


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("heads_k", [16, 4])
def test_the_same_bits_again(hopper_gpu, head_dim, mask, heads_k):
    """Of many programs, many times. A race between the roles would show in dk and dv as well."""
    q, k, v = draw(4, 16, heads_k, 2000, 2000, head_dim)
    is_causal, window = MASKS[mask]
    do = torch.randn_like(q)
    out, lse = attention_forward(q, k, v, is_causal, 0.1, window)
    for deterministic in (True, False):
        runs = (
            hopper.attention_backward(
                q, k, v, out, lse, do, is_causal, 0.1, deterministic, window=window
            )
            for _ in range(50)
        )
        first = next(runs)
        for again in runs:
            assert all(torch.equal(x, y) for x, y in zip(first[1:], again[1:], strict=True))
            assert not deterministic or torch.equal(first[0], again[0])


@pytest.mark.parametrize(
    "change",
    [
        {"q_stages": 3},
        {"block_m": 64},
        {"late": True, "heads": 3},
        {"late": False, "heads": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_every_configuration(hopper_gpu, head_dim, change):
    config = replace(hopper.CONFIGS[head_dim], **change)
    for mask in MASKS:
        check(*draw(1, 4, 2, 700, 900, head_dim), mask, config=config)
        check(*draw(9, 8, 2, 700, 400, head_dim), mask, config=config)


@pytest.mark.parametrize("needed", [(True, False), (False, True), (False, False)])
def test_what_is_not_needed_is_none(hopper_gpu, needed):
    q, k, v = draw(1, 2, 2, 200, 200, 64)
    out, lse = attention_forward(q, k, v, True, 0.1)
    options = dict(zip(("dq_needed", "dkdv_needed"), needed, strict=True))
    ours = hopper.attention_backward(q, k, v, out, lse, q, True, 0.1, **options)
    theirs = plain_backward(q, k, v, out, lse, q, True, 0.1, True, **options)
    assert [x is not None for x in ours] == [needed[0], needed[1], needed[1]]
    assert all(x is y is None or torch.equal(x, y) for x, y in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_fixed_order_where_the_configuration_or_the_caller_wants_it(hopper_gpu, head_dim):
    """Of many programs the sums of a free order differ soon, and those of a fixed one never."""
    q, k, v = draw(4, 16, 16, 2000, 2000, head_dim)
    do = torch.randn_like(q)
    out, lse = attention_forward(q, k, v, False, 0.1)
    for deterministic, config in itertools.product((True, False), (CONFIGS, FREE)):
        dqs = [
            hopper.attention_backward(
                q, k, v, out, lse, do, False, 0.1, deterministic, config=config[head_dim]
            )[0]
            for _ in range(20)
        ]
        same = all(torch.equal(dqs[0], dq) for dq in dqs)
        assert same == (deterministic or config is CONFIGS)


def test_what_is_not_supported_says_why():
    q, k, v = draw(1, 2, 2, 64, 64, 64)
    if runtime.INTERPRETED or runtime.capability(q.device) != (9, 0):
        assert "Hopper" in hopper.supported(q, k, v, q)
        return
    assert hopper.supported(q, k, v, q) is None
    assert "head_dim" in hopper.supported(*draw(1, 2, 2, 64, 64, 32), q)
    padded = torch.zeros(1, 2, 64, 65, device=DEVICE, dtype=q.dtype)[..., :64]
    assert "of do" in hopper.supported(q, k, v, padded)
