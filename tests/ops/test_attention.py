"""Attention against float64 truth, by property, and at every length where a rule changes."""

import gc
import math
import threading

import numpy
import pytest
import torch
import torch.nn.functional as F
from conftest import DEVICE, DTYPES
from conftest import assert_close as assert_within
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from kernelbook import lab, reference, runtime
from kernelbook.ops.attention import attention, backward, forward, operator, tiled, tiles, tuned
from kernelbook.ops.hopper import choice

FLOAT32_FACTOR = 8
"""Float32 results may err by eight times PyTorch's error instead of two: each product is the sum of
three in TF32, the maximum is that of a tile, and the hardware's exp2 errs by two units."""

LSE_FACTOR = 24
"""lse may err by 24 times the rounding to float32. Where a query sees few keys it is a score:
tensor cores add up its products with truncation, and three more roundings follow, of scale *
log2(e), of the sum of maximum and logarithm, and of their product with ln 2."""


def assert_close(ours, truth, torch_result):
    factors = {"factor": FLOAT32_FACTOR} if ours.dtype == torch.float32 else {}
    assert_within(ours, truth, torch_result, **factors)


def draw(batch, heads, heads_k, seqlen_q, seqlen_k, head_dim, dtype=torch.float32):
    """Draw q, k and v, which will be differentiated."""
    shapes = [(heads, seqlen_q), (heads_k, seqlen_k), (heads_k, seqlen_k)]
    tensors = [torch.randn(batch, *shape, head_dim, device=DEVICE).to(dtype) for shape in shapes]
    return [x.requires_grad_() for x in tensors]


def by_pytorch(q, k, v, is_causal=False, scale=None, window=None):
    """PyTorch's attention in the dtype of q, with the book's rule for is_causal and window."""
    group = q.shape[1] // max(k.shape[1], 1)
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    mask = None
    masked = is_causal or window is not None
    if masked:
        shift = k.shape[2] - q.shape[2]
        left, right = window or (None, None)
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
        mask = mask.tril(shift) if is_causal else mask
        mask = mask if left is None else mask.triu(shift - left)
        mask = mask if right is None else mask.tril(shift + right)
        blind = ~mask.any(1)
        mask = mask | blind.unsqueeze(1)  # rows that PyTorch would make NaN, set to zero below
    # A copy, because on a GPU PyTorch errs by its whole result for rows that start off 16 bytes.
    q, k, v = (x.clone(memory_format=torch.contiguous_format) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    return out.masked_fill(blind.unsqueeze(1), 0) if masked else out


def check(q, k, v, is_causal=False, scale=None, deterministic=True, window=None, backend=None):
    """Compare out, lse and gradients with the truth, and with PyTorch's error in the same dtype."""
    options = {"is_causal": is_causal, "scale": scale, "window": window}
    backend = backend or ("auto" if deterministic else "triton")  # which alone runs one sweep
    how = {"enable_gqa": True, "deterministic": deterministic, "backend": backend}
    out, lse = attention(q, k, v, **options, **how, return_lse=True)
    true_out, true_lse = reference.attention(q, k, v, **options)
    their_out = by_pytorch(q, k, v, **options)
    assert out.shape == q.shape
    assert out.dtype == q.dtype
    assert out.stride() == tiles.empty_dense_like(q).stride()
    assert lse.shape == q.shape[:3]
    assert lse.dtype == torch.float32
    assert_close(out, true_out, their_out)
    if true_lse.abs().max() > 0:
        assert_within(lse, true_lse, true_lse.float(), LSE_FACTOR)

    do = torch.randn(q.shape, device=DEVICE).to(q.dtype)
    ours = torch.autograd.grad(out, (q, k, v), do)
    theirs = torch.autograd.grad(their_out, (q, k, v), do)
    truth = reference.attention_backward(q, k, v, do, **options)
    for x, dx, their_dx, true_dx in zip((q, k, v), ours, theirs, truth, strict=True):
        assert dx.shape == x.shape
        assert dx.dtype == x.dtype
        if true_dx.abs().max() > 1e-9:
            assert_close(dx, true_dx, their_dx)
        else:
            assert dx.abs().max() <= rounding_of_a_gradient(q, k, v, do, scale)


def rounding_of_a_gradient(q, k, v, do, scale=None):
    """What a gradient may be where the truth is 0, because each query sees one key or none.

    dP - delta is then the difference of two equal sums over head_dim, each rounded in float32, and
    dk adds one a query. Nothing of it is rounded to 16 bits, but for the small result.
    """
    products = do.abs().max() * v.abs().max() * q.shape[-1] * torch.finfo(torch.float32).eps
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    group = q.shape[1] // k.shape[1]
    return products * scale * max(k.abs().max(), q.abs().max()) * q.shape[2] * group


# -- truth

SHAPES = {  # batch, heads, heads_k, seqlen_q, seqlen_k, head_dim
    "one": (2, 2, 2, 1, 1, 16),
    "one tile": (2, 2, 2, 32, 32, 16),
    "127": (1, 2, 2, 127, 127, 16),
    "more keys": (2, 2, 2, 33, 70, 16),
    "one more key": (1, 2, 2, 64, 65, 16),  # the diagonal cuts one key off a tile
    "fewer keys": (2, 2, 2, 70, 33, 16),
    "one query": (2, 2, 2, 1, 70, 16),
    "one key": (2, 2, 2, 70, 1, 16),
    "grouped": (2, 4, 2, 40, 50, 16),
    "shared": (1, 3, 1, 50, 40, 16),
}
LARGE = {
    "1000": (2, 3, 3, 1000, 1000, 64),
    "64": (2, 2, 2, 512, 384, 64),
    "128": (2, 3, 3, 640, 1024, 128),
    "128, grouped": (2, 8, 2, 300, 777, 128),
    "256": (2, 2, 2, 300, 500, 256),
    "long": (1, 2, 2, 4099, 4099, 64),
    "64, one more key": (1, 2, 2, 256, 257, 64),
    "128, one more key": (1, 2, 2, 256, 257, 128),
}
FULL_AND_CAUSAL = pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])


@pytest.fixture(params=["triton", "gluon"])
def backend(request):
    """Each of the two kernels; skip the one that this GPU has not."""
    reason = request.param == "gluon" and choice.unsupported(
        runtime.capability(DEVICE), torch.bfloat16, 128
    )
    if reason:
        pytest.skip(reason)
    return request.param


@FULL_AND_CAUSAL
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_attention_is_the_truth(shape, is_causal):
    check(*draw(*shape, dtype=torch.float16), is_causal)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_in_every_dtype(dtype):
    check(*draw(2, 2, 1, 40, 70, 32, dtype=dtype), is_causal=True)


@pytest.mark.usefixtures("gpu")
@FULL_AND_CAUSAL
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [*SHAPES.values(), *LARGE.values()], ids=[*SHAPES, *LARGE])
def test_large_shapes_in_every_dtype(shape, dtype, is_causal):
    check(*draw(*shape, dtype=dtype), is_causal, backend="triton")


HEAD_DIMS = [17, 80] if runtime.INTERPRETED else range(16, 257)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_any_head_dim(head_dim):
    check(*draw(1, 2, 1, 20, 40, head_dim, dtype=torch.float16), is_causal=True)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [16, 32, 64, 80, 96, 128, 192, 256])
@FULL_AND_CAUSAL
def test_every_configuration(head_dim, dtype, is_causal):
    check(*draw(2, 4, 2, 260, 515, head_dim, dtype=dtype), is_causal, backend="triton")


@pytest.mark.parametrize("tile", [(64, 16), (16, 64), (16, 16)], ids=str)
@pytest.mark.parametrize("lengths", [(70, 70), (40, 100), (100, 40)], ids=str)
def test_tiles_of_queries_larger_and_smaller_than_those_of_keys(monkeypatch, tile, lengths):
    config = tuned.Config(*tile, num_warps=4, num_stages=1)
    monkeypatch.setattr(tuned, "forward_config", lambda *_: config)
    q, k, v = draw(2, 2, 2, *lengths, 16, dtype=torch.float16)
    out = attention(q, k, v, is_causal=True)
    assert_close(out, reference.attention(q, k, v, True)[0], by_pytorch(q, k, v, True))


@pytest.mark.parametrize("scale", [1, 0.01, 2.5])
def test_scale(scale):
    check(*draw(1, 2, 2, 40, 40, 16), scale=scale)


def test_gradients_of_lse_are_the_truth():
    q, k, v = draw(2, 4, 2, 40, 50, 16)
    out, lse = attention(q, k, v, is_causal=True, enable_gqa=True, return_lse=True)
    do, dlse = torch.randn_like(out), torch.randn_like(lse)
    theirs_lse = (q @ k.repeat_interleave(2, 1).mT / 4).masked_fill(
        torch.ones(40, 50, dtype=torch.bool, device=DEVICE).triu(11), -torch.inf
    ).logsumexp(-1)  # fmt: skip
    their_out = by_pytorch(q, k, v, True)
    both = torch.autograd.grad((out, lse), (q, k, v), (do, dlse))
    theirs = torch.autograd.grad((their_out, theirs_lse), (q, k, v), (do, dlse))
    truth = reference.attention_backward(q, k, v, do, True, dlse=dlse)
    for ours, their, true in zip(both, theirs, truth, strict=True):
        assert_close(ours, true, their)


def test_lse_alone_can_be_differentiated():
    q, k, v = draw(1, 2, 2, 20, 40, 16)
    _, lse = attention(q, k, v, return_lse=True)
    dq, dk, dv = torch.autograd.grad(lse.sum(), (q, k, v))
    truth = reference.attention_backward(
        q, k, v, torch.zeros_like(q), dlse=torch.ones_like(lse)
    )  # fmt: skip
    their_lse = (q @ k.mT / 4).logsumexp(-1)
    their_dq, their_dk = torch.autograd.grad(their_lse.sum(), (q, k))
    assert_close(dq, truth[0], their_dq)
    assert_close(dk, truth[1], their_dk)
    assert not dv.any()


@FULL_AND_CAUSAL
def test_one_sweep_with_atomics_is_the_truth(is_causal):
    check(*draw(2, 4, 2, 50, 70, 16), is_causal, deterministic=False)


# -- queries that see nothing, and numbers far from zero


def test_a_query_that_sees_nothing_gives_zero():
    q, k, v = draw(2, 2, 2, 90, 33, 16)
    out, lse = attention(q, k, v, is_causal=True, return_lse=True)
    grads = torch.autograd.grad(out, (q, k, v), torch.randn_like(out))
    assert not out[:, :, :57].any()
    assert (lse[:, :, :57] == -torch.inf).all()
    assert lse[:, :, 57:].isfinite().all()
    assert not grads[0][:, :, :57].any()
    assert all(grad.isfinite().all() for grad in grads)


@FULL_AND_CAUSAL
@pytest.mark.parametrize("offset", [-4e6, 4e6])
def test_scores_far_from_zero(offset, is_causal):
    """A mask of -1e6 instead of -inf would win over scores of -4e6."""
    q, k, v = (x.detach() for x in draw(2, 2, 2, 40, 70, 16))
    q.zero_()[..., 0], k[..., 0] = 2000, offset / 500  # every score is the offset
    out = attention(q, k, v, is_causal=is_causal)
    truth, _ = reference.attention(0 * q, k, v, is_causal)  # where all scores are 0 instead
    assert_close(out, truth, by_pytorch(0 * q, k, v, is_causal))


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered")  # the interpreter's
@FULL_AND_CAUSAL
@pytest.mark.parametrize(
    "hidden", [slice(0, 32), slice(32, 64), slice(0, 69), slice(69, 70)], ids=str
)
def test_keys_whose_scores_are_minus_infinity_weigh_nothing(hidden, is_causal):
    """A tile of nothing but -inf, first, later or last, whole or cut, changes nothing."""
    q, k, v = (x.detach() for x in draw(2, 2, 2, 70, 70, 16))
    q[..., 0], k[..., 0] = 1, 0
    k[:, :, hidden, 0] = -torch.inf
    out, lse = attention(q, k, v, is_causal=is_causal, return_lse=True)
    scores = q @ k.mT / 4
    if is_causal:
        scores = scores.masked_fill(
            torch.ones(70, 70, dtype=torch.bool, device=DEVICE).triu(1), -torch.inf
        )
    weights, true_lse = scores.double().softmax(-1), scores.double().logsumexp(-1)
    truth = weights @ v.double()
    undefined = truth.isnan()  # softmax of a query that sees nothing else, as PyTorch has it
    assert torch.equal(out.isnan(), undefined)
    assert torch.equal(lse.isnan(), undefined[..., 0])
    assert undefined.any() == (is_causal and hidden.start == 0)
    seen = ~undefined[0, 0, :, 0]
    assert_close(out[:, :, seen], truth[:, :, seen], (scores.softmax(-1) @ v)[:, :, seen])
    assert_close(lse[:, :, seen], true_lse[:, :, seen], true_lse[:, :, seen].float())


@FULL_AND_CAUSAL
@pytest.mark.parametrize("sign", [-1, 1])
def test_scores_that_overflow_are_never_an_answer(sign, is_causal):
    """Products of 1e40 are infinite in float32. What cannot be known is NaN, and is no zero."""
    q, k, v = draw(2, 2, 2, 40, 40, 16)
    with torch.no_grad():
        q[:, 0], k[:, 0] = 1e20, sign * 1e20
    out, lse = attention(q, k, v, is_causal=is_causal, return_lse=True)
    assert out[:, 0].isnan().all()
    assert not lse[:, 0].isfinite().any()
    assert out[:, 1].isfinite().all()
    grads = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    assert all(grad[:, 0].isnan().any(-1).all() for grad in grads)
    assert all(grad[:, 1].isfinite().all() for grad in grads)


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered")  # the interpreter's
@pytest.mark.parametrize("where", ["q", "k", "v"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
def test_what_is_not_finite_comes_out_where_pytorch_has_it(where, value):
    q, k, v = (x.detach() for x in draw(2, 2, 2, 40, 70, 16))
    {"q": q, "k": k, "v": v}[where][:, 1, 33, 3] = value
    ours = attention(q, k, v)
    theirs = (q @ k.mT / 4).softmax(-1) @ v
    assert torch.equal(ours.isfinite(), theirs.isfinite())
    assert torch.equal(ours.isnan(), theirs.isnan())


def test_lost_keys_are_seen():
    """64 keys that the last 128 queries lose, of 4,099, are small beside what the first have."""
    q, k, v = (x.detach() for x in draw(1, 2, 2, 4099, 4099, 32, dtype=torch.bfloat16))
    truth, _ = reference.attention(q, k, v, True)
    theirs = by_pytorch(q, k, v, True)
    rows = slice(4099 - 128, 4099)
    scores = q[:, :, rows].float() @ k.float().mT * 32**-0.5
    seen = torch.ones(128, 4099, dtype=torch.bool, device=DEVICE).tril(4099 - 128)
    seen[:, 2048 : 2048 + 64] = False
    wrong = theirs.clone()
    wrong[:, :, rows] = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v.float()
    assert_close(theirs, truth, theirs)
    with pytest.raises(AssertionError, match="is over"):
        assert_close(wrong, truth, theirs)


# -- properties


@FULL_AND_CAUSAL
def test_rows_are_averages_of_values(is_causal):
    q, k, v = draw(2, 2, 2, 50, 70, 16)
    out = attention(q, k, torch.ones_like(v), is_causal=is_causal)
    # A sum of 70 rounded weights errs by a few units in the last place of 1.
    assert torch.allclose(out, torch.ones_like(out), atol=2e-6, rtol=0)
    out = attention(q, k, v, is_causal=is_causal)
    assert (out <= v.amax(2, keepdim=True) + 1e-6).all()
    assert (out >= v.amin(2, keepdim=True) - 1e-6).all()


@pytest.mark.parametrize("shift", [0, 20])
def test_the_future_changes_nothing(shift):
    q, k, v = (x.detach() for x in draw(2, 2, 2, 70, 70 + shift, 16, dtype=torch.float16))
    before = attention(q, k, v, is_causal=True)
    seen = 45 + shift  # query 44 sees keys 0 to seen - 1
    k[:, :, seen:], v[:, :, seen:] = 100, -50
    after = attention(q, k, v, is_causal=True)
    assert torch.equal(after[:, :, :45], before[:, :, :45])
    assert (after[:, :, 45:] != before[:, :, 45:]).any(-1).all()


def test_the_order_of_keys_changes_nothing():
    q, k, v = draw(2, 2, 2, 40, 90, 16)
    order = torch.randperm(90, device=DEVICE)
    out = attention(q, k[:, :, order], v[:, :, order])
    assert torch.allclose(out, attention(q, k, v), atol=2e-6)


@FULL_AND_CAUSAL
def test_heads_know_nothing_of_each_other(is_causal):
    """Lengths that no tile divides: a flattened descriptor would read the next head's rows."""
    q, k, v = draw(2, 3, 3, 45, 70, 16)
    do = torch.randn_like(q)
    out = attention(q, k, v, is_causal=is_causal)
    grads = torch.autograd.grad(out, (q, k, v), do)
    for b in range(2):
        for h in range(3):
            one = [x[b : b + 1, h : h + 1].detach().requires_grad_() for x in (q, k, v)]
            alone = attention(*one, is_causal=is_causal)
            assert torch.equal(alone[0, 0], out[b, h])
            grads_alone = torch.autograd.grad(alone, one, do[b : b + 1, h : h + 1])
            for theirs, ours in zip(grads, grads_alone, strict=True):
                assert torch.equal(ours[0, 0], theirs[b, h])


def test_nan_stays_in_its_head():
    q, k, v = (x.detach() for x in draw(2, 3, 3, 45, 70, 16))
    before = attention(q, k, v)
    q[:, 1], k[:, 1], v[:, 1] = 1e4, -1e4, float("nan")
    after = attention(q, k, v)
    assert torch.equal(after[:, ::2], before[:, ::2])
    assert after[:, 1].isnan().all()


def test_grouped_heads_are_repeated_heads():
    q, k, v = draw(2, 6, 2, 40, 50, 16)
    repeated = [x.repeat_interleave(3, dim=1) for x in (k, v)]
    assert torch.equal(attention(q, k, v, enable_gqa=True), attention(q, *repeated))


def test_where_lengths_are_equal_causal_is_that_of_pytorch():
    q, k, v = draw(2, 2, 2, 50, 50, 16)
    theirs = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert torch.allclose(attention(q, k, v, is_causal=True), theirs, atol=1e-6)


# -- layouts


def views():
    """Strided operands: name, whether they are read where they lie, and q, k and v."""

    def heads_inside(seqlen, columns=16, dtype=torch.float16):  # (batch, seqlen, heads, head_dim)
        x = torch.randn(2, seqlen, 3, columns, device=DEVICE, dtype=torch.float32).to(dtype)
        return x.transpose(1, 2)

    qkv = torch.randn(2, 40, 3, 3, 16, device=DEVICE).half()
    return {
        "heads inside": (True, [heads_inside(40), heads_inside(70), heads_inside(70)]),
        "packed": (True, [x.transpose(1, 2) for x in qkv.unbind(2)]),
        "every second row": (True, [heads_inside(80)[:, :, ::2] for _ in range(3)]),
        "a slice of columns": (True, [heads_inside(40, 32)[..., 8:24] for _ in range(3)]),
        "shifted by one": (False, [heads_inside(40, 32)[..., 1:17] for _ in range(3)]),
        "rows of 34 bytes": (False, [heads_inside(40, 17) for _ in range(3)]),
        "columns apart": (False, [heads_inside(40, 32)[..., ::2] for _ in range(3)]),
        "head_dim outside": (
            False,
            [torch.randn(2, 3, 16, 40, device=DEVICE).half().mT for _ in range(3)],
        ),
        "expanded": (
            True,
            [torch.randn(2, 1, 40, 16, device=DEVICE).half().expand(2, 3, 40, 16)] * 3,
        ),
        "one of each": (True, [torch.randn(1, 1, 40, 16, device=DEVICE).half()] * 3),
    }


@pytest.mark.parametrize("name", views())
def test_views_give_the_truth_and_are_copied_only_where_they_must(monkeypatch, name):
    in_place, (q, k, v) = views()[name]  # drawn here, so that the seed is the test's
    described = []
    describe_by = forward.describe_by
    monkeypatch.setattr(
        forward,
        "describe_by",
        lambda rest, x: described.append(x.data_ptr()) or describe_by(rest, x),
    )
    attention(q, k, v)
    assert (described == [x.data_ptr() for x in (q, k, v)]) == in_place
    assert all(tiles.fits(x) == in_place for x in (q, k, v))
    check(*(x.detach().requires_grad_() for x in (q, k, v)), is_causal=True)


@pytest.mark.parametrize("layout", ["expanded", "transposed", "columns apart"])
def test_gradients_of_out_may_lie_anyhow(layout):
    q, k, v = draw(2, 2, 2, 40, 50, 16)
    do = {
        "expanded": torch.randn(1, 1, 1, 1, device=DEVICE).expand(q.shape),
        "transposed": torch.randn(2, 40, 2, 16, device=DEVICE).transpose(1, 2),
        "columns apart": torch.randn(2, 2, 40, 32, device=DEVICE)[..., ::2],
    }[layout]
    out = attention(q, k, v)
    ours = torch.autograd.grad(out, (q, k, v), do, retain_graph=True)
    expected = torch.autograd.grad(out, (q, k, v), do.contiguous())
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


EMPTY = [(0, 2, 5, 5), (2, 0, 5, 5), (2, 2, 0, 5), (2, 2, 5, 0), (2, 2, 0, 0)]


@FULL_AND_CAUSAL
@pytest.mark.parametrize("sizes", EMPTY, ids=str)
def test_empty_tensors(sizes, is_causal):
    batch, heads, seqlen_q, seqlen_k = sizes
    q, k, v = draw(batch, heads, heads, seqlen_q, seqlen_k, 16)
    out, lse = attention(q, k, v, is_causal=is_causal, return_lse=True)
    out.sum().backward()
    assert out.shape == q.shape
    assert not out.any()
    assert (lse == -torch.inf).all()
    assert all(x.grad.shape == x.shape and not x.grad.any() for x in (q, k, v))


def test_no_head_may_read_any_number_of_heads():
    q, k, v = draw(2, 0, 3, 20, 40, 16)
    out = attention(q, k, v, enable_gqa=True)
    out.sum().backward()
    assert out.shape == q.shape
    assert not k.grad.any()
    assert not v.grad.any()


@pytest.mark.parametrize("seqlen_k", [0, 5])
def test_lse_is_float32_whatever_the_default_dtype(seqlen_k):
    q, k, v = draw(2, 2, 2, 5, seqlen_k, 16, dtype=torch.float16)
    torch.set_default_dtype(torch.float64)
    try:
        out, lse = attention(q, k, v, return_lse=True)
    finally:
        torch.set_default_dtype(torch.float32)
    assert out.dtype == torch.float16
    assert lse.dtype == torch.float32


def negated(x):
    """The numbers of x, as a view of what is -x in memory: PyTorch negates it when it reads it.

    Such is ``conj().imag``, whose elements lie apart and are copied anyway; these are neighbours.
    """
    view = torch._neg_view(-x)
    assert view.is_neg()
    assert tiles.fits(view) or x.ndim < 4
    return view


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_pending_negation_is_read(dtype):
    q, k, v = (x.detach() for x in draw(2, 2, 2, 40, 50, 16, dtype=dtype))
    do, dlse = torch.randn(q.shape, device=DEVICE).to(dtype), torch.randn(2, 2, 40, device=DEVICE)

    def run(q, k, v, do, dlse):
        inputs = [x.requires_grad_() for x in (q, k, v)]
        outs = attention(*inputs, return_lse=True)
        return *outs, *torch.autograd.grad(outs, inputs, (do, dlse))

    expected = run(q.clone(), k.clone(), v.clone(), do, dlse)
    ours = run(*(negated(x) for x in (q, k, v, do, dlse)))
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


def test_inputs_are_left_alone():
    q, k, v = draw(1, 2, 2, 40, 50, 16)
    before = [x.clone() for x in (q, k, v)]
    attention(q, k, v).sum().backward()
    assert all(torch.equal(a, b) for a, b in zip((q, k, v), before, strict=True))


# -- autograd


def test_checkpointing_gives_the_same_gradients():
    q, k, v = draw(1, 2, 2, 40, 50, 16)
    out = attention(q, k, v, is_causal=True)
    expected = torch.autograd.grad(out.square().sum(), (q, k, v))
    again = checkpoint(lambda *x: attention(*x, is_causal=True), q, k, v, use_reentrant=False)
    ours = torch.autograd.grad(again.square().sum(), (q, k, v))
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo's
def test_compiled_functions_may_call_it():
    q, k, v = draw(1, 2, 2, 40, 50, 16)
    compiled = torch.compile(lambda q, k, v: 2 * attention(q + 0, k, v), backend="eager")
    ours = torch.autograd.grad(compiled(q, k, v).sum(), (q, k, v))
    expected = torch.autograd.grad(2 * attention(q, k, v).sum(), (q, k, v))
    assert torch.equal(compiled(q, k, v), 2 * attention(q, k, v))
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(ours, expected, strict=True))


def test_second_derivatives_are_refused():
    q, k, v = draw(1, 1, 1, 20, 20, 16)
    (dq,) = torch.autograd.grad(attention(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="attention can be differentiated once"):
        dq.sum().backward()


@pytest.mark.parametrize("needing", ["q", "k", "v", "kv", "qv"])
def test_second_derivatives_are_refused_where_some_inputs_need_gradients(needing):
    inputs = dict(zip("qkv", draw(1, 1, 1, 20, 20, 16), strict=True))
    inputs = {name: x.detach().requires_grad_(name in needing) for name, x in inputs.items()}
    leaves = [inputs[name] for name in needing]
    out = attention(**inputs, is_causal=True)
    grads = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
    with pytest.raises(RuntimeError, match="attention can be differentiated once"):
        sum(grad.sum() for grad in grads).backward()


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"deterministic": False},
        {"backend": "triton"},
        {"deterministic": False, "backend": "triton"},
    ],
    ids=str,
)
@pytest.mark.parametrize("needing", ["q", "k", "v", "qk", "qv", "kv", "qkv"])
def test_only_what_is_needed_is_computed(monkeypatch, needing, how):
    launched = []
    for name in ("_keys_backward", "_queries_backward"):
        run = getattr(backward, name)
        monkeypatch.setattr(
            backward, name, lambda *x, name=name, run=run: launched.append(name) or run(*x)
        )
    inputs = dict(zip("qkv", draw(2, 4, 2, 40, 50, 16), strict=True))
    options = {"is_causal": True, "enable_gqa": True, **how}
    do = torch.randn(2, 4, 40, 16, device=DEVICE)
    expected = torch.autograd.grad(attention(**inputs, **options), inputs.values(), do)
    launched.clear()

    some = {name: x.detach().requires_grad_(name in needing) for name, x in inputs.items()}
    attention(**some, **options).backward(do)
    keys = ["_keys_backward"] if set(needing) & {"k", "v"} else []
    one_sweep = keys and "q" in needing and len(how) == 2  # slower, so that "auto" never takes it
    queries = ["_queries_backward"] if "q" in needing and not one_sweep else []
    assert launched == keys + queries
    for (name, x), dx in zip(some.items(), expected, strict=True):
        assert (x.grad is not None) == (name in needing)
        # In float32 the two ways to add dq up differ by a few roundings of its largest terms.
        assert x.grad is None or torch.allclose(x.grad, dx, rtol=0, atol=3e-6)


def test_pytorch_may_ask_for_deterministic_gradients(monkeypatch):
    asked = []
    run = operator.attention_backward
    monkeypatch.setattr(
        operator, "attention_backward", lambda *x, **y: asked.append(x[8]) or run(*x, **y)
    )
    inputs = draw(1, 2, 2, 40, 50, 16)
    try:
        for wanted in (False, True):
            torch.use_deterministic_algorithms(wanted)
            out = attention(*inputs, deterministic=False, backend="triton")
            torch.autograd.grad(out, inputs, torch.ones_like(out))
    finally:
        torch.use_deterministic_algorithms(False)
    assert asked == [False, True]


def test_nothing_is_saved_for_a_gradient_that_nobody_wants():
    q, k, v = draw(1, 2, 2, 20, 20, 16)
    with torch.no_grad():
        assert not attention(q, k, v).requires_grad


@pytest.mark.parametrize("modified", ["out", "lse", "both"])
def test_results_may_be_modified_in_place(modified):
    """What backward needs is gone then, and autograd says so, as it does for PyTorch's own."""
    q, k, v = draw(1, 2, 2, 20, 40, 16)
    out, lse = attention(q, k, v, return_lse=True)
    expected = out.detach().relu(), lse.detach() * 2
    if modified != "lse":
        assert torch.equal(out.relu_(), expected[0])
    if modified != "out":
        assert torch.equal(lse.mul_(2), expected[1])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (out.sum() + lse.sum()).backward()


def test_results_that_need_no_gradient_may_be_modified_in_place():
    q, k, v = (x.detach() for x in draw(1, 2, 2, 20, 40, 16))
    expected = attention(q, k, v).mul(3).relu()
    assert torch.equal(attention(q, k, v).mul_(3).relu_(), expected)


def test_threads_do_not_disturb_each_other():
    q, k, v = draw(1, 2, 2, 20, 40, 16)
    do = torch.randn_like(q)

    def run():
        out = attention(q, k, v, is_causal=True)
        return out.detach(), *torch.autograd.grad(out, (q, k, v), do)

    expected, found = run(), []
    threads = [
        threading.Thread(target=lambda: found.extend(run() for _ in range(3))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 12
    assert all(torch.equal(a, b) for x in found for a, b in zip(x, expected, strict=True))


# -- the tiled algorithm in plain PyTorch


@FULL_AND_CAUSAL
@pytest.mark.parametrize("lengths", [(7, 7), (5, 9), (9, 5), (1, 1)], ids=str)
@pytest.mark.parametrize("tile", [(3, 2), (2, 3), (16, 16)], ids=str)
def test_tiled_has_the_gradients_of_its_outputs(tile, lengths, is_causal):
    q, k, v = (
        torch.randn(2, length, 3, dtype=torch.float64, requires_grad=True)
        for length in (lengths[0], lengths[1], lengths[1])
    )
    options = {"is_causal": is_causal, "block_m": tile[0], "block_n": tile[1]}
    assert torch.autograd.gradcheck(lambda *x: tiled.tiled_attention(*x, **options), (q, k, v))
    truth = reference.attention(*(x.unsqueeze(1) for x in (q, k, v)), is_causal)
    for ours, true in zip(tiled.tiled_forward(q, k, v, **options), truth, strict=True):
        assert torch.allclose(ours, true.squeeze(1), atol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tiled_is_the_truth_in_every_dtype(dtype):
    q, k, v = draw(2, 2, 2, 70, 90, 16, dtype=dtype)
    ours = tiled.tiled_attention(q, k, v, is_causal=True, block_m=128, block_n=128)
    options = {"factor": 4} if dtype != torch.float32 else {"factor": FLOAT32_FACTOR}
    # Scores, weights and sums are rounded to the dtype, where PyTorch keeps them in float32.
    truth, _ = reference.attention(q, k, v, True)
    assert_within(ours, truth, by_pytorch(q, k, v, True), **options)


def test_tiles_beyond_the_diagonal_are_never_met():
    tiles = [list(tiled.key_tiles(start, 64, 64, 16, 16, True)) for start in range(0, 64, 16)]
    assert [len(row) for row in tiles] == [1, 2, 3, 4]
    assert all(
        [masked for *_, masked in row] == [False] * i + [True] for i, row in enumerate(tiles)
    )
    assert list(tiled.key_tiles(0, 64, 10, 16, 16, True)) == []
    assert [end for _, end, _ in tiled.key_tiles(0, 5, 40, 16, 16, False)] == [16, 32, 40]


# -- errors


def operands(**changes):
    """Arguments that are right but for what is changed."""
    q, k, v = (torch.zeros(2, 4, 5, 16, device=DEVICE) for _ in range(3))
    return {"q": q, "k": k, "v": v} | changes


def zeros(*shape, dtype=torch.float32):
    return torch.zeros(shape, device=DEVICE, dtype=dtype)


ERRORS = {
    "q is a list": ({"q": [1.0]}, TypeError, "q must be a torch.Tensor, got list"),
    "q is float64": (
        {"q": zeros(2, 4, 5, 16, dtype=torch.float64)},
        TypeError,
        r"q must be float32, .* or float8_e5m2, got float64: pass q.to\(torch.float32\)",
    ),
    "dtypes differ": (
        {"v": zeros(2, 4, 5, 16, dtype=torch.float16)},
        TypeError,
        r"v must have the dtype of q, float32, got float16: pass v.to\(q.dtype\)",
    ),
    "sparse": ({"k": zeros(2, 4, 5, 16).to_sparse()}, TypeError, r"pass k.to_dense\(\)"),
    "nested": (
        {"v": torch.nested.nested_tensor([zeros(4, 5, 16)] * 2, layout=torch.jagged)},
        TypeError,
        r"v must be a dense tensor, got a nested tensor: pass torch.nested.to_padded_tensor",
    ),
    "on meta": (
        {"k": torch.zeros(2, 4, 5, 16, device="meta")}, ValueError, "k is on meta and q on"
    ),
    "three dimensions": ({"k": zeros(4, 5, 16)}, ValueError, r"k must be \(batch, heads, seqlen"),
    "head_dim is small": (
        dict.fromkeys("qkv", zeros(2, 4, 5, 8)), ValueError, r"must lie in \[16, 256\], got 8"
    ),
    "head_dim is large": (
        dict.fromkeys("qkv", zeros(2, 4, 5, 264)), ValueError, r"must lie in \[16, 256\], got 264"
    ),
    "batches differ": (
        {"k": zeros(3, 4, 5, 16)}, ValueError, "k must agree with q in batch and head_dim"
    ),
    "k and v differ": (
        {"v": zeros(2, 4, 6, 16)}, ValueError, r"v must have the shape of k, \(2, 4, 5, 16\)"
    ),
    "heads differ": (
        dict.fromkeys("kv", zeros(2, 2, 5, 16)), ValueError, "got 2: pass enable_gqa=True"
    ),
    "heads differ and do not divide": (
        dict.fromkeys("kv", zeros(2, 3, 5, 16)), ValueError, "got 3: pass k and v with that number"
    ),
    "heads do not divide": (
        dict.fromkeys("kv", zeros(2, 3, 5, 16)) | {"enable_gqa": True},
        ValueError,
        "k must have a number of heads that divides that of q, 4, got 3",
    ),
    "no heads to share": (
        dict.fromkeys("kv", zeros(2, 0, 5, 16)) | {"enable_gqa": True},
        ValueError,
        "k must have a number of heads that divides that of q, 4, got 0",
    ),
    "is_causal is an int": (
        {"is_causal": 1}, TypeError, r"is_causal must be True or False, got 1 \(int\)"
    ),
    "return_lse is None": ({"return_lse": None}, TypeError, "return_lse must be True or False"),
    "scale is a string": ({"scale": "1"}, TypeError, r"scale must be a number, got '1' \(str\)"),
    "scale is True": ({"scale": True}, TypeError, r"scale must be a number, got True \(bool\)"),
    "scale is np.True_": ({"scale": numpy.True_}, TypeError, "scale must be a number, got"),
    "scale is negative": ({"scale": -0.5}, ValueError, "got -0.5: pass -q and scale=0.5"),
    "scale is NaN": ({"scale": float("nan")}, ValueError, r"must lie in \[1.18e-38, .*got nan"),
    "both names": (
        {"query": zeros(2, 4, 5, 16)}, TypeError, "got both query and q, two names of one argument"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "kind", "message"), ERRORS.values(), ids=ERRORS)
def test_errors_say_what_came_and_what_to_pass(monkeypatch, changes, kind, message):
    monkeypatch.setattr(operator, "attention_forward", lambda *_: pytest.fail("was launched"))
    monkeypatch.setattr(torch, "empty", lambda *_: pytest.fail("was allocated"))
    with pytest.raises(kind, match=message):
        attention(**operands(**changes))


@pytest.mark.parametrize("scale", [0, 0.0, -0.0, 1e-50, 1e-39, 2.5e38, 1e39, math.inf, -math.inf])
def test_a_scale_that_is_no_normal_number_of_float32_is_refused(scale):
    """1e-39 is subnormal, and 2.5e38 overflows when it is multiplied by log2(e)."""
    with pytest.raises(ValueError, match=r"scale must lie in .*: pass one that is, or None"):
        attention(**operands(scale=scale))


@pytest.mark.parametrize("scale", [1.18e-38, 2.2e38])
def test_the_smallest_and_the_largest_scale(scale):
    """With the one all weights are alike, with the other those of the largest scores."""
    q, k, v = (x.detach() for x in draw(1, 2, 2, 20, 40, 16))
    k = k.sign() * 2**-3 if scale > 1 else k
    q = q.sign() * 2**-100 if scale > 1 else q  # products are exact, and so are ties
    out = attention(q, k, v, scale=scale)
    truth, _ = reference.attention(q, k, v, scale=scale)
    assert_close(out, truth, (torch.softmax((q @ k.mT) * scale, -1) @ v))


def test_scalars_of_numpy_are_numbers():
    q, k, v = draw(1, 2, 2, 20, 40, 16)
    ours = attention(q, k, v, scale=numpy.float32(0.5), is_causal=numpy.True_)
    assert torch.equal(ours, attention(q, k, v, scale=0.5, is_causal=True))
    assert torch.equal(attention(q, k, v, scale=numpy.int64(1)), attention(q, k, v, scale=1.0))


def test_names_of_pytorch_are_accepted():
    q, k, v = draw(1, 2, 2, 20, 40, 16)
    named = attention(query=q, key=k, value=v)
    assert torch.equal(named, attention(q, k, v))
    assert torch.equal(attention(q, k, value=v), named)


@pytest.mark.usefixtures("gpu")
def test_a_tensor_on_the_cpu_is_refused_where_kernels_run_on_a_gpu():
    with pytest.raises(ValueError, match=r"k is on cpu.*pass k\.cuda\(\)"):
        attention(**operands(k=torch.zeros(2, 4, 5, 16)))


def test_a_device_with_little_shared_memory_gets_a_smaller_configuration(monkeypatch):
    monkeypatch.setattr(runtime, "INTERPRETED", False)
    monkeypatch.setattr(runtime, "capability", lambda _: (8, 0))
    q = zeros(1, 1, 1, 128, dtype=torch.float16)
    chosen = []
    for available in (200_000, 65_000, 50_000):
        monkeypatch.setattr(runtime, "shared_memory", lambda _, bytes_=available: bytes_)
        chosen.append(tuned.forward_config(q))
    assert [c.block_m * c.block_n for c in chosen] == sorted(
        (c.block_m * c.block_n for c in chosen), reverse=True
    )
    assert chosen[0] != chosen[-1]
    monkeypatch.setattr(runtime, "shared_memory", lambda _: 10_000)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "A small GPU")
    with pytest.raises(ValueError, match="bytes of shared memory.*A small GPU: pass a smaller"):
        tuned.forward_config(q)


# -- what only a GPU can show


@pytest.mark.usefixtures("gpu")
@FULL_AND_CAUSAL
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_thousand_runs_agree(head_dim, is_causal, backend):
    """A wait that does not cover all warps would show as a difference between runs."""
    q, k, v = draw(2, 8, 8, 1000, 1000, head_dim, dtype=torch.bfloat16)
    do = torch.randn_like(q)
    out = attention(q, k, v, is_causal=is_causal, backend=backend)
    grads = torch.autograd.grad(out, (q, k, v), do)
    for _ in range(1000):
        again = attention(q, k, v, is_causal=is_causal, backend=backend)
        assert torch.equal(again, out)
        for ours, first in zip(torch.autograd.grad(again, (q, k, v), do), grads, strict=True):
            assert torch.equal(ours, first)


@pytest.mark.usefixtures("gpu")
@FULL_AND_CAUSAL
@pytest.mark.parametrize("head_dim", [32, 64, 128, 256])
def test_a_product_is_waited_for_once(head_dim, is_causal):
    """An assembler that meets acc in use waits for each instruction instead: see row_max."""
    if runtime.capability(DEVICE)[0] != 9:
        pytest.skip("needs a Hopper GPU")
    q, k, v = draw(1, 2, 2, 1024, 1024, head_dim, dtype=torch.bfloat16)
    options = {"is_causal": is_causal, "backend": "triton"}
    ((_, compiled),) = lab.compiled_by(lambda: attention(q, k, v, **options))
    words = compiled.asm["sass"].split()
    instructions = sum(word.startswith("HGMMA") for word in words)
    waits = sum(word.startswith("WARPGROUP.DEPBAR") for word in words)
    assert instructions >= 16
    assert 0 < waits <= instructions / 3


@pytest.mark.usefixtures("gpu")
def test_more_than_2_to_the_31_elements_of_queries(backend):
    q, k, v = draw(2, 32, 32, 2**18 + 3, 128, 128, dtype=torch.bfloat16)
    out, lse = attention(q, k, v, return_lse=True, backend=backend)
    do = torch.randn_like(out)
    (dq,) = torch.autograd.grad(out, q, do)
    for b, h, rows in ((0, 0, slice(0, 9)), (1, 31, slice(2**18 - 9, None))):
        one = [x[b : b + 1, h : h + 1].detach().requires_grad_() for x in (q[:, :, rows], k, v)]
        part = (slice(b, b + 1), slice(h, h + 1), rows)
        truth, true_lse = reference.attention(*one)
        theirs = by_pytorch(*one)
        assert_close(out[part], truth, theirs)
        assert_close(lse[part], true_lse, true_lse.float())
        (their_dq,) = torch.autograd.grad(theirs, one[0], do[part])
        assert_close(dq[part], reference.attention_backward(*one, do[part])[0], their_dq)


@pytest.mark.usefixtures("gpu")
def test_more_than_2_to_the_31_elements_of_keys(backend):
    q, k, v = draw(2, 32, 32, 128, 2**18 + 3, 128, dtype=torch.bfloat16)
    out = attention(q, k, v, backend=backend)
    do = torch.randn_like(out)
    grads = torch.autograd.grad(out, (q, k, v), do)
    for b, h in ((0, 0), (1, 31)):
        part = (slice(b, b + 1), slice(h, h + 1))
        one = [x[part].detach().requires_grad_() for x in (q, k, v)]
        theirs = by_pytorch(*one)
        assert_close(out[part], reference.attention(*one)[0], theirs)
        their_grads = torch.autograd.grad(theirs, one, do[part])
        truth = reference.attention_backward(*one, do[part])
        for ours, true, their in zip(grads, truth, their_grads, strict=True):
            assert_close(ours[part], true, their)


@pytest.mark.usefixtures("gpu")
def test_memory_grows_with_the_length_and_not_with_its_square(backend):
    used = []
    for length in (4096, 8192, 16384):
        q, k, v = draw(1, 8, 8, length, length, 64, dtype=torch.bfloat16)
        gc.collect()  # what other tests left must not be freed between the two readings
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        attention(q, k, v, is_causal=True, backend=backend).sum().backward()
        used.append((torch.cuda.max_memory_allocated() - before) / length)
        del q, k, v
    assert max(used) < 1.1 * min(used)


# -- layout

LAYOUTS = {
    "contiguous": lambda n, h, d: torch.randn(2, h, n, d, device=DEVICE),
    "heads inside": lambda n, h, d: torch.randn(2, n, h, d, device=DEVICE).transpose(1, 2),
    "sequence first": lambda n, h, d: torch.randn(n, 2, h, d, device=DEVICE).permute(1, 2, 0, 3),
    "packed": lambda n, h, d: torch.randn(2, n, 3, h, d, device=DEVICE)[:, :, 1].transpose(1, 2),
    "a slice of columns": lambda n, h, d: torch.randn(2, n, h, d + 8, device=DEVICE)[
        ..., 8:
    ].transpose(1, 2),
    "shifted by one": lambda n, h, d: torch.randn(2, n, h, d + 3, device=DEVICE)[
        ..., 1 : d + 1
    ].transpose(1, 2),
    "expanded": lambda n, h, d: torch.randn(1, h, n, d, device=DEVICE).expand(2, h, n, d),
    "columns outside": lambda n, h, d: torch.randn(2, h, d, n, device=DEVICE).mT,
}
"""Where a tensor (2, heads, seqlen, head_dim) lies, as a function of these."""

INSIDE = {"heads inside", "packed", "a slice of columns", "shifted by one"}
"""Those of which (batch, seqlen, heads, head_dim) is the order in memory."""


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("head_dim", "seqlens"),
    [(16, (20, 30)), (18, (20, 30)), (64, (1, 30)), (16, (2, 1030)), (18, (1, 1030))],
)
def test_results_lie_as_operands_do(layout, head_dim, seqlens):
    """Dense, in the order of the operand's dimensions, also where a copy of it was read and where
    programs share keys: a transformer takes heads together again without a copy."""
    q, k, v = (LAYOUTS[layout](n, 3, head_dim).requires_grad_() for n in (*seqlens, seqlens[1]))
    out = attention(q, k, v, is_causal=True)
    do = torch.randn(out.shape, device=DEVICE)
    results = out, *torch.autograd.grad(out, (q, k, v), do)
    for result, operand in zip(results, (q, q, k, v), strict=True):
        assert result.shape == operand.shape
        assert result.stride(-1) == 1
        if layout in INSIDE:
            back = result.transpose(1, 2)
            assert back.is_contiguous() or head_dim == 18
            assert sorted(back.stride(), reverse=True) == list(back.stride())
        elif layout == "sequence first":
            back = result.permute(2, 0, 1, 3)
            assert back.is_contiguous() or head_dim == 18
        elif layout != "expanded":
            assert result.is_contiguous() or head_dim == 18
    if layout in INSIDE:
        assert out.transpose(1, 2).flatten(2).data_ptr() == out.data_ptr()
    # -- and the same numbers as of operands that are contiguous
    plain = [x.detach().clone(memory_format=torch.contiguous_format) for x in (q, k, v)]
    plain = [x.requires_grad_() for x in plain]
    theirs = attention(*plain, is_causal=True)
    theirs = theirs, *torch.autograd.grad(theirs, plain, do)
    assert all(torch.equal(a, b) for a, b in zip(results, theirs, strict=True))


@pytest.mark.parametrize("head_dim", [16, 18])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_compilers_know_where_results_lie(layout, head_dim):
    operands = [LAYOUTS[layout](20, 3, head_dim).half().requires_grad_() for _ in range(3)]
    out = attention(*operands)
    grads = torch.autograd.grad(out, operands, torch.ones_like(out))
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in operands]
        fake_out = attention(*fakes)
        needed = [True] * 3
        rest = fakes[0].new_empty(out.shape[:3], dtype=torch.float32), fake_out, None
        fake_grads = torch.ops.kernelbook.attention_backward(
            *fakes, fake_out, *rest, False, None, None, 0.1, True, "auto", needed
        )
    for real, fake in zip((out, *grads), (fake_out, *fake_grads), strict=True):
        assert (real.shape, real.dtype, real.stride()) == (fake.shape, fake.dtype, fake.stride())


def test_a_compiled_model_takes_heads_together_without_a_copy():
    def model(x):
        q, k, v = (y.transpose(1, 2) for y in x.unbind(2))
        out = attention(q, k, v, is_causal=True)
        return out, out.transpose(1, 2).flatten(2)

    x = torch.randn(2, 20, 3, 2, 16, device=DEVICE)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for function in (model, compiled):
        out, flat = function(x)
        assert out.transpose(1, 2).is_contiguous()
        assert torch.equal(flat, model(x)[1])
