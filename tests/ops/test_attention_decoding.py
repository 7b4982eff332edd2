"""Keys shared among programs: every number of parts gives the truth, and the rule says how many."""

import math

import pytest
import torch
from conftest import DEVICE, DTYPES
from test_attention import FULL_AND_CAUSAL, assert_close, by_pytorch, draw

from kernelbook import reference, runtime
from kernelbook.ops.attention import attention, decoding, operator, tiles, tuned
from kernelbook.ops.attention.forward import attention_forward

PARTS = (1, 2, 7) if runtime.INTERPRETED else (1, 2, 3, 4, 5, 6, 7)


def decode(q, k, v, parts, is_causal=False, scale=None, window=None):
    """(out, lse), with the keys of each head shared in parts."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    with runtime.launching_on(q):
        out, lse = decoding.attention_decode(
            *tiles.prepare(q, k, v), is_causal, scale, parts, window
        )
    return out.to(q.dtype), lse


def undifferentiated(*shape, dtype=torch.float32):
    return [x.detach() for x in draw(*shape, dtype=dtype)]


def check(q, k, v, parts, is_causal=False, scale=None):
    """Compare out and lse with the truth; no part of either may be left as it was allocated."""
    out, lse = decode(q, k, v, parts, is_causal, scale)
    truth, true_lse = reference.attention(q, k, v, is_causal, scale)
    assert out.shape == q.shape
    assert out.dtype == q.dtype
    assert lse.shape == q.shape[:3]
    assert lse.dtype == torch.float32
    assert_close(out, truth, by_pytorch(q, k, v, is_causal, scale))
    assert_close(lse, true_lse, true_lse.float())
    return out, lse


# -- truth

SHAPES = {  # batch, heads, heads_k, seqlen_q, seqlen_k, head_dim
    "one query": (2, 2, 2, 1, 255, 16),
    "one key more than tiles": (1, 2, 2, 1, 257, 16),
    "three heads a group": (1, 6, 2, 5, 200, 24),
    "four heads, four queries": (1, 4, 1, 4, 200, 16),
    "eight heads a group": (2, 8, 1, 1, 200, 32),
    "a tile and a row": (1, 3, 1, 11, 200, 16),
    "several tiles of rows": (1, 4, 2, 32, 135, 16),
    "fewer keys than parts have tiles": (1, 2, 2, 1, 40, 16),
    "more queries than keys": (1, 2, 1, 40, 33, 16),
}
LARGE = {
    "one query": (1, 16, 16, 1, 8192, 128),
    "unaligned": (2, 8, 2, 1, 8191, 128),
    "speculated": (2, 8, 2, 5, 4099, 64),
    "thirty-two queries": (1, 32, 8, 32, 4097, 128),
    "many queries": (1, 2, 2, 300, 5000, 64),
    "wide": (1, 8, 1, 3, 3000, 256),
}


@FULL_AND_CAUSAL
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_any_number_of_parts_is_the_truth(shape, is_causal):
    operands = undifferentiated(*shape, dtype=torch.float16)
    for parts in PARTS:
        check(*operands, parts, is_causal)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [16, 17, 80] if runtime.INTERPRETED else [16, 80, 128, 256])
def test_every_dtype_and_head_dim(head_dim, dtype):
    check(*undifferentiated(2, 4, 2, 3, 130, head_dim, dtype=dtype), 3, True)


@pytest.mark.usefixtures("gpu")
@FULL_AND_CAUSAL
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", LARGE.values(), ids=LARGE)
def test_large_shapes(shape, dtype, is_causal):
    operands = undifferentiated(*shape, dtype=dtype)
    for parts in (1, 7, 64, 200):
        check(*operands, parts, is_causal)


WINDOWS = [(0, None), (40, 0), (100, None), (70, 1), (31, 2)]


@FULL_AND_CAUSAL
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_windows(window, is_causal):
    q, k, v = undifferentiated(1, 3, 1, 13, 270, 16)
    truth, true_lse = reference.attention(q, k, v, is_causal, window=window)
    with runtime.launching_on(q):
        theirs, _ = attention_forward(q, k, v, is_causal, 0.25, window)
    for parts in PARTS:
        out, lse = decode(q, k, v, parts, is_causal, window=window)
        assert_close(out, truth, theirs)
        assert_close(lse, true_lse, true_lse.float())


def test_keys_outside_the_windows_are_not_read():
    q, k, v = undifferentiated(1, 4, 2, 3, 300, 16)
    expected = [decode(q, k, v, parts, window=(40, 0)) for parts in PARTS]
    for x in (k, v):
        x[:, :, :192] = math.nan  # the first query sees keys from 257
    for parts, before in zip(PARTS, expected, strict=True):
        after = decode(q, k, v, parts, window=(40, 0))
        assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


@pytest.mark.parametrize("scale", [0.01, 2.5])
def test_scale(scale):
    check(*undifferentiated(1, 4, 2, 2, 130, 16), 3, scale=scale)


@FULL_AND_CAUSAL
def test_the_forward_kernel_gives_the_same(is_causal):
    q, k, v = undifferentiated(2, 6, 2, 5, 300, 16)
    with runtime.launching_on(q):
        expected = attention_forward(q, k, v, is_causal, 0.25)
    for parts in PARTS:
        for ours, theirs in zip(decode(q, k, v, parts, is_causal), expected, strict=True):
            assert torch.allclose(ours, theirs, rtol=2e-6, atol=2e-6)


def test_every_run_gives_the_same_bits():
    q, k, v = undifferentiated(2, 6, 2, 5, 300, 16)
    for parts in (1, 5):
        first = decode(q, k, v, parts)
        for _ in range(3 if runtime.INTERPRETED else 300):
            again = decode(q, k, v, parts)
            assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_a_key_of_each_part_is_seen():
    """Each query looks for one key: what it finds there is what out must be."""
    q, k, v = undifferentiated(1, 2, 1, 7, 320, 16)
    k.copy_(torch.randn_like(k).sign())
    found = torch.tensor([0, 31, 32, 127, 128, 300, 319], device=DEVICE)
    q = 100 * k[:, :, found].expand(1, 2, 7, 16)
    for parts in PARTS:
        out, _ = decode(q, k, v, parts)
        for i, j in enumerate(found):
            same = (k[0, 0] == k[0, 0, j]).all(-1)  # keys with the same signs weigh the same
            assert torch.allclose(out[0, :, i], v[0, 0, same].mean(0), atol=1e-6)


# -- queries that see nothing, and numbers far from zero


def test_a_query_that_sees_nothing_gives_zero():
    q, k, v = undifferentiated(2, 4, 2, 60, 40, 16)
    for parts in PARTS:
        out, lse = decode(q, k, v, parts, is_causal=True)
        assert not out[:, :, :20].any()
        assert (lse[:, :, :20] == -torch.inf).all()
        assert lse[:, :, 20:].isfinite().all()


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered")  # the interpreter's
@pytest.mark.parametrize(
    "hidden", [slice(0, 32), slice(32, 96), slice(0, 269), slice(269, 270), slice(0, 270)], ids=str
)
def test_keys_whose_scores_are_minus_infinity_weigh_nothing(hidden):
    """A part of nothing but -inf changes nothing, and nothing but such parts is undefined."""
    q, k, v = undifferentiated(2, 2, 1, 3, 270, 16)
    q[..., 0], k[..., 0] = 1, 0
    k[:, :, hidden, 0] = -torch.inf
    scores = q.double() @ k.double().expand(2, 2, 270, 16).mT / 4
    truth, true_lse = scores.softmax(-1) @ v.double(), scores.logsumexp(-1)
    theirs = scores.float().softmax(-1) @ v
    for parts in PARTS:
        out, lse = decode(q, k, v, parts)
        if hidden == slice(0, 270):
            assert out.isnan().all()
            assert lse.isnan().all()
        else:
            assert_close(out, truth, theirs)
            assert_close(lse, true_lse, true_lse.float())


@pytest.mark.parametrize("offset", [-4e6, 4e6])
def test_scores_far_from_zero(offset):
    """The sum of such weights is lost beside the score, if a part keeps its logsumexp alone."""
    q, k, v = undifferentiated(2, 4, 2, 3, 270, 16)
    q.zero_()[..., 0], k[..., 0] = 2000, offset / 500  # every score is the offset
    truth, _ = reference.attention(0 * q, k, v)  # where all scores are 0 instead
    theirs = by_pytorch(0 * q, k, v)
    for parts in PARTS:
        assert_close(decode(q, k, v, parts)[0], truth, theirs)


@pytest.mark.parametrize("step", [-1000.0, 1000.0])
def test_parts_whose_scores_are_far_apart(step):
    q, k, v = undifferentiated(1, 2, 2, 3, 270, 16)
    q[..., 0] = 1
    k[..., 0] = step * torch.arange(270, device=DEVICE).div(32, rounding_mode="floor")
    for parts in PARTS:
        check(q, k, v, parts)


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered")  # the interpreter's
@pytest.mark.parametrize("where", ["q", "k", "v"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
def test_what_is_not_finite_comes_out_where_the_forward_kernel_has_it(where, value):
    q, k, v = undifferentiated(2, 2, 2, 5, 270, 16)
    {"q": q, "k": k, "v": v}[where][:, 1, 3, 3] = value
    with runtime.launching_on(q):
        expected = attention_forward(q, k, v, False, 0.25)
    for parts in PARTS:
        for ours, theirs in zip(decode(q, k, v, parts), expected, strict=True):
            assert torch.equal(ours.isnan(), theirs.isnan())
            assert torch.equal(ours.isfinite(), theirs.isfinite())


def test_what_lies_beyond_the_keys_is_never_read():
    """Keys of a longer cache, which is full of NaN where nothing was written yet."""
    q, k, v = undifferentiated(1, 4, 2, 2, 100, 16)
    caches = [torch.full((1, 2, 256, 16), math.nan, device=DEVICE) for _ in range(2)]
    for cache, x in zip(caches, (k, v), strict=True):
        cache[:, :, :100] = x
    for parts in PARTS:
        ours = decode(q, *(cache[:, :, :100] for cache in caches), parts)
        assert all(torch.equal(a, b) for a, b in zip(ours, decode(q, k, v, parts), strict=True))


def test_the_future_changes_nothing():
    q, k, v = undifferentiated(1, 4, 2, 4, 200, 16)
    before, _ = decode(q, k, v, 5, is_causal=True)
    k[:, :, 198:], v[:, :, 198:] = 100, -50
    after, _ = decode(q, k, v, 5, is_causal=True)
    assert torch.equal(after[:, :, :2], before[:, :, :2])
    assert (after[:, :, 2:] != before[:, :, 2:]).any(-1).all()


# -- layouts

VIEWS = {
    "heads inside": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "every second row": lambda x: x.repeat_interleave(2, dim=2)[:, :, ::2],
    "columns apart": lambda x: x.repeat_interleave(2, dim=3)[..., ::2],
    "expanded heads": lambda x: x[:, :1].expand(x.shape),
    "expanded batch": lambda x: x[:1].expand(x.shape),
    "negative": lambda x: torch._neg_view(-x),
}


@pytest.mark.parametrize("view", VIEWS)
def test_views(view):
    q, k, v = (VIEWS[view](x) for x in undifferentiated(2, 4, 2, 3, 150, 16))
    ours = decode(q, k, v, 4, is_causal=True)
    copies = (x.clone(memory_format=torch.contiguous_format) for x in (q, k, v))
    expected = decode(*copies, 4, is_causal=True)
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


@pytest.mark.usefixtures("gpu")
def test_offsets_past_two_to_the_thirty_one():
    k = torch.randn(1, 1, 2**21, 128, device=DEVICE, dtype=torch.bfloat16)
    k = torch.cat([k] * 17, dim=1)[:, ::16]  # the second head begins past 2**31
    assert k.stride(1) > 2**31
    q = torch.randn(1, 2, 1, 128, device=DEVICE, dtype=torch.bfloat16)
    out, lse = attention(q, k, k, return_lse=True)
    one, one_lse = attention(q[:, 1:], k[:, 1:].clone(), k[:, 1:].clone(), return_lse=True)
    truth, true_lse = reference.attention(q[:, 1:], k[:, 1:], k[:, 1:])
    assert_close(out[:, 1:], truth, one)
    assert_close(lse[:, 1:], true_lse, one_lse)


# -- the rule


@pytest.fixture
def decoding_at_once(monkeypatch):
    """Share keys in calls that are small enough for the interpreter; return what was shared."""
    monkeypatch.setattr(decoding, "FEWEST_KEYS", 64)
    monkeypatch.setattr(decoding, "FEWEST_TILES", 1)
    shared, run = [], operator.attention_decode
    monkeypatch.setattr(
        operator, "attention_decode", lambda *args: shared.append(args[5]) or run(*args)
    )
    return shared


@FULL_AND_CAUSAL
@pytest.mark.parametrize("deterministic", [True, False], ids=["two", "one"])
def test_gradients_are_the_truth(decoding_at_once, is_causal, deterministic):
    q, k, v = draw(2, 4, 2, 3, 200, 16)
    options = {"is_causal": is_causal, "enable_gqa": True, "deterministic": deterministic}
    out, lse = attention(q, k, v, **options, return_lse=True, backend="triton")
    assert decoding_at_once
    do, dlse = torch.randn_like(out), torch.randn_like(lse)
    ours = torch.autograd.grad((out, lse), (q, k, v), (do, dlse))
    truth = reference.attention_backward(q, k, v, do, is_causal, dlse=dlse)
    mask = torch.ones(3, 200, dtype=torch.bool, device=DEVICE).triu(198) if is_causal else None
    scores = q @ k.repeat_interleave(2, 1).mT / 4
    scores = scores if mask is None else scores.masked_fill(mask, -torch.inf)
    their_out = scores.softmax(-1) @ v.repeat_interleave(2, 1)
    theirs = torch.autograd.grad((their_out, scores.logsumexp(-1)), (q, k, v), (do, dlse))
    for dx, their_dx, true_dx in zip(ours, theirs, truth, strict=True):
        assert_close(dx, true_dx, their_dx)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo's
def test_compilers_and_vmap_meet_the_same_operator(decoding_at_once):
    q, k, v = undifferentiated(3, 2, 2, 2, 150, 16)
    expected = attention(q, k, v, is_causal=True)
    run = lambda q, k, v: attention(q, k, v, is_causal=True)  # noqa: E731
    compiled = torch.compile(run, backend="aot_eager")(q, k, v)
    assert torch.allclose(compiled, expected, atol=2e-6)
    each = torch.vmap(run)(*(x.unsqueeze(1) for x in (q, k, v)))
    assert torch.allclose(each.squeeze(1), expected, atol=2e-6)
    assert len(decoding_at_once) == 3


def parts(q_shape, k_shape, left=None, multiprocessors=132):
    """What the rule says on a GPU with tiles of 128 queries, and of 64 rows and 64 keys."""
    forward = tuned.Config(128, 64, 8, 2)
    decode = tuned.Config(64, 64, 4, 3)
    return decoding._n_parts(q_shape, k_shape, left, decode, forward, multiprocessors)


def test_one_query_fills_the_gpu():
    for batch, heads, n_keys in ((1, 16, 2**17), (8, 8, 8192), (1, 40, 8192), (5, 14, 8192)):
        n = parts((batch, heads, 1, 128), (batch, heads, n_keys, 128))
        assert 0.75 <= batch * heads * n / (decoding.PROGRAMS * 132) <= 1  # and all run at once


@pytest.mark.parametrize(
    ("q_shape", "k_shape", "decodes"),
    [
        ((1, 16, 1, 128), (1, 16, decoding.FEWEST_KEYS - 1, 128), False),
        ((1, 16, 1, 128), (1, 16, decoding.FEWEST_KEYS, 128), True),
        ((64, 32, 1, 128), (64, 32, 8192, 128), True),  # all SMs have work, in tiles of one row
        ((64, 32, 64, 128), (64, 32, 8192, 128), True),  # the most rows of a tile
        ((64, 32, 65, 128), (64, 32, 8192, 128), False),
        ((64, 32, 33, 128), (64, 16, 8192, 128), False),  # as many rows, of two heads
        ((1, 33, 128, 128), (1, 33, 8192, 128), True),  # a quarter of the SMs has a program
        ((1, 34, 128, 128), (1, 34, 8192, 128), False),
        ((4, 16, 4096, 128), (4, 16, 4096, 128), False),
        ((1, 1, 1024, 128), (1, 1, 8192, 128), True),
        ((1, 1, 1025, 128), (1, 1, 8192, 128), False),
    ],
    ids=str,
)
def test_few_queries_or_idle_SMs_decode(q_shape, k_shape, decodes):
    assert (parts(q_shape, k_shape) > 0) == decodes


def test_a_window_leaves_few_keys():
    shapes = (1, 16, 1, 128), (1, 16, 2**17, 128)
    assert parts(*shapes, left=decoding.FEWEST_KEYS - 2) == 0
    assert parts(*shapes, left=8191) == parts((1, 16, 1, 128), (1, 16, 8192, 128)) > 0


@pytest.mark.parametrize("seqlen_k", [1024, 1025, 4096, 5000, 2**17, 2**17 + 1, 2**20])
@pytest.mark.parametrize("heads", [1, 3, 16, 2048])
def test_parts_are_never_empty_nor_too_many(seqlen_k, heads):
    n = parts((1, heads, 1, 128), (1, heads, seqlen_k, 128))
    tiles = -(-seqlen_k // 64)
    share = -(-tiles // n)
    assert 1 <= n <= decoding.MOST_PARTS
    assert (n - 1) * share < tiles
    assert n == 1 or share >= decoding.FEWEST_TILES
    assert heads < 2048 or n == 1


def test_where_no_tile_of_rows_fits_the_forward_kernel_runs():
    shapes = (1, 1, 1, 256), (1, 1, 2**17, 256)
    assert decoding._n_parts(*shapes, None, None, tuned.Config(128, 64, 8, 2), 132) == 0
