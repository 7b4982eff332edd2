"""Packed sequences: each is attention by itself, and knows nothing of its neighbours."""

import itertools
import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from conftest import DEVICE, DTYPES
from conftest import assert_close as assert_within
from torch.utils.checkpoint import checkpoint

from kernelbook import attention, attention_varlen, reference, runtime
from kernelbook.ops.attention import tuned, varlen, varlen_backward, varlen_operator

FLOAT32_FACTOR = 8
"""As for attention: each product is the sum of three in TF32, and exp2 errs by two units."""


def assert_close(ours, truth, torch_result):
    factors = {"factor": FLOAT32_FACTOR} if ours.dtype == torch.float32 else {}
    assert_within(ours, truth, torch_result, **factors)


def offsets(lengths):
    """Where sequences of these lengths begin, and where the last one ends."""
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=DEVICE)


def packing(lengths_q, lengths_k):
    """The arguments that say how sequences are packed."""
    longest = max(lengths_q, default=0), max(lengths_k, default=0)
    return offsets(lengths_q), offsets(lengths_k), *longest


def draw(lengths_q, lengths_k, heads=2, heads_k=2, head_dim=16, dtype=torch.float32):
    """Draw packed q, k and v, which will be differentiated."""
    sizes = ((sum(lengths_q), heads), (sum(lengths_k), heads_k), (sum(lengths_k), heads_k))
    tensors = [torch.randn(*size, head_dim, device=DEVICE).to(dtype) for size in sizes]
    return [x.requires_grad_() for x in tensors]


def alone(x, lengths):
    """The sequences of a packed tensor, each as (1, heads, seqlen, head_dim)."""
    return [part.transpose(0, 1).unsqueeze(0) for part in x.split(lengths)]


def packed(parts):
    """The reverse of alone; of statistics, (1, heads, seqlen), it makes (heads, total)."""
    if parts[0].ndim == 3:
        return torch.cat([part.squeeze(0) for part in parts], 1)
    return torch.cat([part.squeeze(0).transpose(0, 1) for part in parts])


def seen(q, k, is_causal=False, window=None):
    """The mask of one sequence: which keys each query sees."""
    left, right = window or (None, None)
    right = 0 if is_causal else right
    distance = torch.arange(k.shape[2], device=q.device) - torch.arange(
        k.shape[2] - q.shape[2], k.shape[2], device=q.device
    ).unsqueeze(1)
    mask = torch.ones_like(distance, dtype=torch.bool)
    mask = mask if left is None else mask & (distance >= -left)
    return mask if right is None else mask & (distance <= right)


def by_pytorch(q, k, v, is_causal=False, window=None, scale=None):
    """PyTorch's attention of one sequence in the dtype of q, with the book's masks."""
    if not k.shape[2]:
        return q * 0
    k, v = (x.repeat_interleave(q.shape[1] // max(k.shape[1], 1), dim=1) for x in (k, v))
    mask = seen(q, k, is_causal, window)
    blind = ~mask.any(1).unsqueeze(1)  # rows that PyTorch would make NaN
    q, k, v = (x.clone(memory_format=torch.contiguous_format) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask | blind, scale=scale)
    return out.masked_fill(blind, 0)


def lse_by_pytorch(q, k, is_causal=False, window=None, scale=None):
    """The same of lse, where every query sees a key."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = (q @ k.mT) * (q.shape[-1] ** -0.5 if scale is None else scale)
    return scores.masked_fill(~seen(q, k, is_causal, window), -torch.inf).logsumexp(-1)


def lse_bound(q, k, true_lse, lengths, scale):
    """What float32 may make of lse, (heads, total).

    A score is a sum of products. In TF32 each is three: what is dropped of it, lo * lo, and what is
    rounded of both lo are 2**-22 each, 12 units of 2**-24, and 8 more are for the additions. exp2,
    log2 and the factors between the bases take 4 of the result. That is 24 of both together.
    """
    parts = zip(alone(q.detach(), lengths[0]), alone(k.detach(), lengths[1]), strict=True)
    terms = []
    for one_q, one_k in parts:
        one_k = one_k.repeat_interleave(q.shape[1] // k.shape[1], dim=1).double().abs()
        products = one_q.double().abs() @ one_k.mT
        none = products.new_zeros((*products.shape[:-1], 1))
        terms.append(torch.cat([products, none], -1).amax(-1))
    size = scale * packed(terms) + true_lse.abs().nan_to_num(posinf=0.0) + 1
    return 24 * 2.0**-24 * size


def true_gradients(q, k, v, do, **options):
    """Gradients of one sequence in float64, which are zeros where it has no queries or no keys."""
    if not (q.numel() and k.numel()):
        return [torch.zeros_like(x, dtype=torch.float64) for x in (q, k, v)]
    return reference.attention_backward(q, k, v, do, **options)


def check(q, k, v, lengths, is_causal=False, window=None, scale=None, lse_too=False):
    """Compare out, lse and gradients with the truth, and with PyTorch's error in the same dtype."""
    options = {"is_causal": is_causal, "window": window, "scale": scale}
    out, lse = attention_varlen(
        q, k, v, *packing(*lengths), **options, enable_gqa=True, return_lse=True
    )
    sequences = list(
        zip(alone(q, lengths[0]), *(alone(x, lengths[1]) for x in (k, v)), strict=True)
    )
    truths = [reference.attention(*sequence, **options) for sequence in sequences]
    true_out, true_lse = (packed(parts) for parts in zip(*truths, strict=True))
    their_out = packed([by_pytorch(*sequence, **options) for sequence in sequences])
    assert out.shape == q.shape
    assert out.dtype == q.dtype
    assert out.is_contiguous()
    assert lse.shape == (q.shape[1], len(q))
    assert lse.dtype == torch.float32
    assert_close(*(x.transpose(0, 1) for x in (out, true_out, their_out)))
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    assert torch.equal(lse == -torch.inf, true_lse == -torch.inf)
    off = (lse.double() - true_lse).abs().nan_to_num(nan=0.0)
    assert (off <= lse_bound(q, k, true_lse, lengths, factor)).all()

    do = torch.randn(q.shape, device=DEVICE).to(q.dtype)
    dlse = torch.randn(lse.shape, device=DEVICE) if lse_too else None
    outs, grads = ((out, lse), (do, dlse)) if lse_too else ((out,), (do,))
    ours = torch.autograd.grad(outs, (q, k, v), grads)
    dos = alone(do, lengths[0])
    dlses = [None] * len(dos)
    if lse_too:
        dlses = [part.unsqueeze(0) for part in dlse.split(lengths[0], 1)]
    true_grads = [
        true_gradients(*sequence, one_do, **options, dlse=one_dlse)
        for sequence, one_do, one_dlse in zip(sequences, dos, dlses, strict=True)
    ]
    their_outs = (their_out,)
    if lse_too:
        their_lse = [lse_by_pytorch(*sequence[:2], **options) for sequence in sequences]
        their_outs = their_out, packed(their_lse)
    theirs = torch.autograd.grad(their_outs, (q, k, v), grads)
    for i, (x, dx, their_dx) in enumerate(zip((q, k, v), ours, theirs, strict=True)):
        assert dx.shape == x.shape
        assert dx.dtype == x.dtype
        truth = packed([true[i] for true in true_grads])
        if truth.abs().max() > 1e-9:
            assert_close(*(t.transpose(0, 1) for t in (dx, truth, their_dx)))


# -- truth

SAME = ([40, 1, 70, 33],) * 2
LENGTHS = {  # of queries, and of keys
    "one": ([1], [1]),
    "one sequence": ([70], [70]),
    "ones": ([1, 1, 1], [1, 1, 1]),
    "several": SAME,
    "more keys": ([5, 33, 1], [70, 34, 64]),
    "fewer keys": ([70, 34, 64], [5, 33, 1]),
    "an empty one first": ([0, 40, 20], [0, 40, 20]),
    "empty ones": ([40, 0, 0, 20, 0], [40, 0, 0, 20, 0]),
    "no queries": ([40, 0, 20], [40, 35, 20]),
    "no keys": ([40, 35, 20], [40, 0, 20]),
}
LARGE = {
    "1000": ([1000, 3, 517], [1000, 3, 517]),
    "long": ([4099, 128, 129, 127], [4099, 128, 129, 127]),
    "unlike": ([300, 777, 64], [777, 300, 256]),
}
SCOPES = {
    "full": {},
    "causal": {"is_causal": True},
    "window": {"window": (9, 3)},
    "left": {"window": (20, None)},
    "causal window": {"window": (17, 0), "is_causal": True},
}
EVERY_SCOPE = pytest.mark.parametrize("scope", SCOPES.values(), ids=SCOPES)
FULL_AND_CAUSAL = pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])


@EVERY_SCOPE
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_packed_attention_is_the_truth(lengths, scope):
    check(*draw(*lengths, dtype=torch.float16), lengths, **scope)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_in_every_dtype(dtype):
    check(*draw(*SAME, heads=4, head_dim=32, dtype=dtype), SAME, is_causal=True)


@pytest.mark.parametrize("scope", [SCOPES["full"], SCOPES["causal"], SCOPES["window"]], ids=str)
def test_every_length_around_a_tile(scope):
    around = [0, 1, 31, 32, 33, 63, 64, 65]
    if not runtime.INTERPRETED:
        around += [127, 128, 129, 255, 256, 257]
    lengths_q = [a for a in around for _ in (0, 1, 2)]
    lengths_k = [b for a in around for b in (a, max(a - 1, 0), a + 33)]
    check(*draw(lengths_q, lengths_k, dtype=torch.float16), (lengths_q, lengths_k), **scope)


@pytest.mark.parametrize("head_dim", [17, 80])
def test_any_head_dim(head_dim):
    check(*draw(*SAME, head_dim=head_dim, dtype=torch.float16), SAME, is_causal=True)


@pytest.mark.usefixtures("gpu")
@EVERY_SCOPE
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lengths", [*LENGTHS.values(), *LARGE.values()], ids=[*LENGTHS, *LARGE])
def test_large_shapes_in_every_dtype(lengths, dtype, scope):
    check(*draw(*lengths, head_dim=64, dtype=dtype), lengths, **scope)


@pytest.mark.usefixtures("gpu")
@EVERY_SCOPE
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [16, 32, 64, 80, 96, 128, 192, 256])
def test_every_configuration(head_dim, dtype, scope):
    lengths = [260, 1, 515, 130], [515, 7, 260, 130]
    check(*draw(*lengths, heads=4, head_dim=head_dim, dtype=dtype), lengths, **scope)


@EVERY_SCOPE
@pytest.mark.parametrize("tile", [(64, 16), (16, 64), (16, 16)], ids=str)
def test_by_addresses_and_in_tiles_of_other_shapes(monkeypatch, tile, scope):
    config = tuned.Config(*tile, num_warps=4, num_stages=1)
    monkeypatch.setattr(tuned, "config", lambda *_: config)
    lengths = [40, 1, 70], [70, 20, 40]
    check(*draw(*lengths, heads=4, dtype=torch.float16), lengths, **scope)


@pytest.mark.parametrize("scale", [1, 0.01, 2.5])
def test_scale(scale):
    check(*draw(*SAME), SAME, scale=scale)


@EVERY_SCOPE
def test_gradients_of_lse_are_the_truth(scope):
    lengths = [40, 1, 33], [50, 20, 33]
    check(*draw(*lengths, heads=4), lengths, **scope, lse_too=True)


def test_lse_alone_can_be_differentiated():
    q, k, v = draw(*SAME)
    _, lse = attention_varlen(q, k, v, *packing(*SAME), return_lse=True)
    dq, dk, dv = torch.autograd.grad(lse.sum(), (q, k, v))
    sequences = zip(alone(q, SAME[0]), alone(k, SAME[1]), strict=True)
    their_lse = [(one_q @ one_k.mT / 4).logsumexp(-1) for one_q, one_k in sequences]
    their_dq, their_dk = torch.autograd.grad(packed(their_lse).sum(), (q, k))
    torch.testing.assert_close(dq, their_dq, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(dk, their_dk, atol=1e-5, rtol=1e-5)
    assert dq.any()
    assert dk.any()
    assert not dv.any()


@FULL_AND_CAUSAL
def test_equal_lengths_are_a_batch(is_causal):
    lengths = ([45] * 3, [70] * 3)
    q, k, v = draw(*lengths)
    do = torch.randn_like(q)
    out = attention_varlen(q, k, v, *packing(*lengths), is_causal=is_causal)
    batch = [x.detach().unflatten(0, (3, -1)).transpose(1, 2) for x in (q, k, v)]
    batch = [x.requires_grad_() for x in batch]
    theirs = attention(*batch, is_causal=is_causal)
    grads = torch.autograd.grad(out, (q, k, v), do)
    their_grads = torch.autograd.grad(theirs, batch, do.unflatten(0, (3, 45)).transpose(1, 2))
    # The same tiles in the same order; a compiler may still fuse other operations.
    for ours, their in zip((out, *grads), (theirs, *their_grads), strict=True):
        their = their.transpose(1, 2).flatten(0, 1)
        torch.testing.assert_close(ours, their, atol=2e-6, rtol=2e-6)


# -- neighbours


def results(q, k, v, do, dlse, lengths, **options):
    """Out, lse and the gradients; statistics with the rows first, as the others have them."""
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    out, lse = attention_varlen(
        *leaves, *packing(*lengths), **options, enable_gqa=True, return_lse=True
    )
    grads = torch.autograd.grad((out, lse), leaves, (do, dlse))
    return [out.detach(), lse.detach().mT, grads[0]], list(grads[1:])


@EVERY_SCOPE
@pytest.mark.parametrize("described", [True, False], ids=["descriptors", "addresses"])
def test_nan_in_the_neighbours_changes_nothing(monkeypatch, described, scope):
    if not described:
        config = tuned.Config(32, 32, num_warps=4, num_stages=1)
        monkeypatch.setattr(tuned, "config", lambda *_: config)
    lengths = [37, 1, 0, 32, 20, 5], [40, 20, 33, 64, 1, 0]
    q, k, v = draw(*lengths, heads=2, heads_k=1, dtype=torch.float16)
    do, dlse = torch.randn_like(q), torch.randn(2, len(q), device=DEVICE)
    of_queries, of_keys = results(q, k, v, do, dlse, lengths, **scope)
    assert all(x.isfinite().all() for x in (of_queries[0], of_queries[2], *of_keys))
    belongs = [
        torch.repeat_interleave(torch.arange(len(n)), torch.tensor(n)).to(DEVICE) for n in lengths
    ]
    for odd in (0, 1):  # every second sequence, so that each has its neighbours poisoned once
        mine_q, mine_k = (of % 2 == odd for of in belongs)
        poisoned = [
            x.detach().masked_fill(~mine[:, None, None], math.nan)
            for x, mine in ((q, mine_q), (k, mine_k), (v, mine_k), (do, mine_q))
        ]
        again_q, again_k = results(*poisoned, dlse.masked_fill(~mine_q, math.nan), lengths, **scope)
        for before, after in zip(of_queries, again_q, strict=True):
            assert torch.equal(before[mine_q], after[mine_q])
        for before, after in zip(of_keys, again_k, strict=True):
            assert torch.equal(before[mine_k], after[mine_k])


def test_the_neighbours_are_poisoned_indeed():
    """What the test above would see of a kernel that read a neighbour."""
    lengths = [20, 20], [20, 20]
    q, k, v = (x.detach() for x in draw(*lengths))
    v[20:] = math.nan
    out = attention_varlen(q, k, v, *packing(*lengths))
    assert out[:20].isfinite().all()
    assert out[20:].isnan().all()


def test_a_query_that_sees_nothing_gives_zero():
    lengths = [90, 20, 35], [33, 20, 0]
    q, k, v = draw(*lengths)
    out, lse = attention_varlen(q, k, v, *packing(*lengths), is_causal=True, return_lse=True)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), torch.randn_like(out))
    blind = torch.zeros(145, dtype=torch.bool, device=DEVICE)
    blind[:57] = blind[110:] = True
    assert not out[blind].any()
    assert (lse[:, blind] == -torch.inf).all()
    assert lse[:, ~blind].isfinite().all()
    assert not dq[blind].any()
    assert all(grad.isfinite().all() for grad in (dq, dk, dv))
    assert out[~blind].any(-1).all()


def test_a_larger_maximum_changes_nothing():
    q, k, v = draw(*SAME, dtype=torch.float16)
    cu_q, cu_k, *longest = packing(*SAME)
    expected = attention_varlen(q, k, v, cu_q, cu_k, *longest, is_causal=True)
    ours = attention_varlen(q, k, v, cu_q, cu_k, 1000, 300, is_causal=True)
    assert torch.equal(ours, expected)
    grads = [torch.autograd.grad(y.sum(), (q, k, v)) for y in (ours, expected)]
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_grouped_heads_are_repeated_heads():
    q, k, v = draw(*SAME, heads=6)
    repeated = [x.repeat_interleave(3, dim=1) for x in (k, v)]
    ours = attention_varlen(q, k, v, *packing(*SAME), enable_gqa=True)
    assert torch.equal(ours, attention_varlen(q, *repeated, *packing(*SAME)))


def test_gradients_are_the_same_bits_in_every_run():
    q, k, v = draw(*SAME, heads=4, dtype=torch.float16)
    out = attention_varlen(q, k, v, *packing(*SAME), enable_gqa=True)
    do = torch.randn_like(out)
    runs = [torch.autograd.grad(out, (q, k, v), do, retain_graph=True) for _ in range(3)]
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(run, runs[0], strict=True))


# -- offsets that are wrong

WRONG = {
    "past the end": [0, 40, 10_000],
    "before the beginning": [-500, 40, 80],
    "falling": [0, 60, 40],
    "extreme": [2**31 - 1, -(2**31), 2**31 - 1],
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("longest", [80, 40], ids=str)
def test_wrong_offsets_stay_within_the_tensors(wrong, longest):
    """Results are of no use, and the process lives; make memcheck would see the memory."""
    q, k, v = draw([40, 40], [40, 40])
    cu = torch.tensor(wrong, dtype=torch.int32, device=DEVICE)
    out = attention_varlen(q, k, v, cu, cu, longest, longest, is_causal=True)
    torch.autograd.grad(out, (q, k, v), torch.randn_like(out))
    if wrong[1] == 40 and (wrong[0] == 0 or longest == 80):
        right = attention_varlen(q, k, v, *packing([40, 40], [40, 40]), is_causal=True)
        assert torch.equal(out[:40], right[:40])


def test_a_sequence_beyond_the_maximum_is_cut_off():
    lengths = [60, 20, 10], [60, 20, 10]
    q, k, v = (x.detach() for x in draw(*lengths))
    cu, _, *_ = packing(*lengths)
    out = attention_varlen(q, k, v, cu, cu, 40, 40, is_causal=True)
    right = attention_varlen(q, k, v, cu, cu, 60, 60, is_causal=True)
    assert torch.equal(out[:40], right[:40])
    assert torch.equal(out[60:], right[60:])


# -- layouts and sizes


def views():
    """Strided operands of 90 rows: name, whether they are read where they lie, and q, k and v."""
    qkv = torch.randn(90, 3, 2, 16, device=DEVICE).half()
    wide = torch.randn(90, 2, 32, device=DEVICE).half()
    return {
        "packed": (True, list(qkv.unbind(1))),
        "heads outside": (
            True, list(torch.randn(3, 2, 90, 16, device=DEVICE).half().transpose(1, 2))
        ),
        "a slice of columns": (True, [wide[..., 8:24]] * 3),
        "every second row": (True, [torch.randn(180, 2, 16, device=DEVICE).half()[::2]] * 3),
        "expanded": (True, [torch.randn(90, 1, 16, device=DEVICE).half().expand(90, 2, 16)] * 3),
        "shifted by one": (False, [wide[..., 1:17]] * 3),
        "columns apart": (False, [wide[..., ::2]] * 3),
        "rows of 34 bytes": (
            False,
            [torch.randn(90, 2, 17, device=DEVICE).half() for _ in range(3)],
        ),
    }  # fmt: skip


@pytest.mark.parametrize("name", views())
def test_views_give_the_truth_and_are_copied_only_where_they_must(monkeypatch, name):
    in_place, (q, k, v) = views()[name]
    described = []
    describe = varlen.describe
    monkeypatch.setattr(
        varlen,
        "describe",
        lambda x, *rest, **how: described.append(x.data_ptr()) or describe(x, *rest, **how),
    )
    lengths = [20, 33, 37], [20, 33, 37]
    attention_varlen(q, k, v, *packing(*lengths))
    assert (described == [x.data_ptr() for x in (q, k, v)]) == in_place
    check(*(x.detach().requires_grad_() for x in (q, k, v)), lengths, is_causal=True)


@pytest.mark.parametrize("layout", ["expanded", "heads outside", "columns apart"])
def test_gradients_of_out_may_lie_anyhow(layout):
    q, k, v = draw(*SAME)
    do = {
        "expanded": torch.randn(1, 1, 1, device=DEVICE).expand(q.shape),
        "heads outside": torch.randn(2, len(q), 16, device=DEVICE).transpose(0, 1),
        "columns apart": torch.randn(len(q), 2, 32, device=DEVICE)[..., ::2],
    }[layout]
    out = attention_varlen(q, k, v, *packing(*SAME))
    ours = torch.autograd.grad(out, (q, k, v), do, retain_graph=True)
    expected = torch.autograd.grad(out, (q, k, v), do.contiguous())
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


def test_offsets_may_lie_apart():
    q, k, v = draw(*SAME)
    cu, _, *longest = packing(*SAME)
    apart = torch.stack([cu, -cu], 1)[:, 0]
    assert not apart.is_contiguous()
    ours = attention_varlen(q, k, v, apart, apart, *longest)
    assert torch.equal(ours, attention_varlen(q, k, v, cu, cu, *longest))


def test_as_many_rows_as_a_descriptor_holds():
    """All keys are one, so that memory holds them."""
    n_keys, left = 2**30 - 1, 40
    q = torch.randn(50, 1, 16, device=DEVICE).half()
    k, v = (torch.randn(1, 1, 16, device=DEVICE).half().expand(n_keys, 1, 16) for _ in range(2))
    positions = offsets([50]), offsets([n_keys]), 50, n_keys
    out, lse = attention_varlen(q, k, v, *positions, window=(left, 0), return_lse=True)
    torch.testing.assert_close(out, v[:50], atol=0, rtol=2**-10)
    scores = (q.double() @ k[0, 0].double()).T / 4
    torch.testing.assert_close(lse.double(), scores + math.log(left + 1), atol=1e-5, rtol=1e-5)


EMPTY = {  # lengths of queries and keys, heads
    "no sequence": ([], [], 2),
    "empty sequences": ([0, 0], [0, 0], 2),
    "no query": ([0, 0], [3, 4], 2),
    "no key": ([3, 4], [0, 0], 2),
    "no head": ([3, 4], [3, 4], 0),
}


@FULL_AND_CAUSAL
@pytest.mark.parametrize("sizes", EMPTY.values(), ids=EMPTY)
def test_empty_tensors(sizes, is_causal):
    lengths_q, lengths_k, heads = sizes
    q, k, v = draw(lengths_q, lengths_k, heads, heads)
    out, lse = attention_varlen(
        q, k, v, *packing(lengths_q, lengths_k), is_causal=is_causal, return_lse=True
    )
    out.sum().backward()
    assert out.shape == q.shape
    assert not out.any()
    assert lse.shape == (heads, len(q))
    assert (lse == -torch.inf).all()
    assert all(x.grad.shape == x.shape and not x.grad.any() for x in (q, k, v))


def test_inputs_are_left_alone():
    q, k, v = draw(*SAME)
    arguments = packing(*SAME)
    before = [x.detach().clone() for x in (q, k, v, *arguments[:2])]
    attention_varlen(q, k, v, *arguments).sum().backward()
    after = q, k, v, *arguments[:2]
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


# -- autograd


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo's
def test_compiled_functions_may_call_it():
    q, k, v = draw(*SAME)
    arguments = packing(*SAME)
    compiled = torch.compile(
        lambda q, k, v: 2 * attention_varlen(q + 0, k, v, *arguments), backend="eager"
    )
    expected = 2 * attention_varlen(q, k, v, *arguments)
    ours = compiled(q, k, v)
    grads = [torch.autograd.grad(y.sum(), (q, k, v)) for y in (ours, expected)]
    assert torch.equal(ours, expected)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*grads, strict=True))


def test_checkpointing_gives_the_same_gradients():
    q, k, v = draw(*SAME)

    def run(q, k, v):
        return attention_varlen(q, k, v, *packing(*SAME), is_causal=True).square().sum()

    expected = torch.autograd.grad(run(q, k, v), (q, k, v))
    ours = torch.autograd.grad(checkpoint(run, q, k, v, use_reentrant=False), (q, k, v))
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


def test_second_derivatives_are_refused():
    q, k, v = draw(*SAME)
    out = attention_varlen(q, k, v, *packing(*SAME))
    (dq,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="attention_varlen can be differentiated once"):
        dq.sum().backward()


@pytest.mark.parametrize("needing", ["q", "k", "v", "qk", "kv", "qkv"])
def test_only_what_is_needed_is_computed(monkeypatch, needing):
    launched = []
    for name in ("_keys_backward", "_queries_backward"):
        run = getattr(varlen_backward, name)
        monkeypatch.setattr(
            varlen_backward, name, lambda *x, name=name, run=run: launched.append(name) or run(*x)
        )
    inputs = dict(zip("qkv", draw(*SAME, heads=4), strict=True))
    positions = dict(
        zip(("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"), packing(*SAME),
            strict=True)
    )  # fmt: skip
    do = torch.randn_like(inputs["q"])
    out = attention_varlen(**inputs, **positions, enable_gqa=True)
    expected = torch.autograd.grad(out, inputs.values(), do)
    launched.clear()
    some = {name: x.detach().requires_grad_(name in needing) for name, x in inputs.items()}
    attention_varlen(**some, **positions, enable_gqa=True).backward(do)
    keys = ["_keys_backward"] if set(needing) & {"k", "v"} else []
    assert launched == keys + (["_queries_backward"] if "q" in needing else [])
    for (name, x), dx in zip(some.items(), expected, strict=True):
        assert (x.grad is not None) == (name in needing)
        assert x.grad is None or torch.equal(x.grad, dx)


def test_calls_of_their_own_offsets_are_a_batch():
    """vmap over the offsets too: every call packs its rows in another way."""
    q, k, v = (torch.randn(3, 40, 2, 16, device=DEVICE) for _ in range(3))
    cu = torch.stack([offsets([10, 30]), offsets([25, 15]), offsets([0, 40])])

    def run(q, k, v, cu):
        return attention_varlen(q, k, v, cu, cu, 40, 40, is_causal=True, return_lse=True)

    ours = torch.vmap(run)(q, k, v, cu)
    calls = [run(*call) for call in zip(q, k, v, cu, strict=True)]
    for found, expected in zip(ours, zip(*calls, strict=True), strict=True):
        assert torch.equal(found, torch.stack(expected))


@pytest.mark.parametrize("first", [0, 3])
def test_rows_between_the_sequences_of_calls_belong_to_none(first):
    """vmap over buffers that end with padding, which holds NaN, or begin with it."""
    q, k, v = (torch.randn(3, 40, 2, 16, device=DEVICE) for _ in range(3))
    cu = (first + offsets([10, 20])).to(torch.int32)
    for x in (q, k, v):
        x[:, :first] = x[:, first + 30 :] = math.nan

    def one(*inputs):
        return attention_varlen(*inputs, cu, cu, 40, 40)[first : first + 30]

    def run(*inputs):
        inputs = [x.clone().requires_grad_() for x in inputs]
        out = (torch.vmap(one) if inputs[0].ndim == 4 else one)(*inputs)
        out.backward(torch.ones_like(out))
        return out, *(x.grad[..., first : first + 30, :, :] for x in inputs)

    ours, calls = run(q, k, v), [run(*call) for call in zip(q, k, v, strict=True)]
    for found, expected in zip(ours, zip(*calls, strict=True), strict=True):
        assert not found.isnan().any()
        assert torch.equal(found, torch.stack(expected))


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_wrong_offsets_of_a_call_stay_within_its_rows(wrong):
    """vmap over three calls, of which the one in the middle has such offsets."""
    q, k, v, do = (torch.randn(3, 80, 2, 16, device=DEVICE) for _ in range(4))
    cu = torch.stack([offsets([40, 40])] * 3)
    cu[1] = torch.tensor(wrong)

    def run(q, k, v, do, cu):
        def function(*inputs):
            return attention_varlen(*inputs, cu, cu, 80, 80, return_lse=True)

        (out, lse), vjp = torch.func.vjp(function, q, k, v)
        return out, lse.mT, *vjp((do, torch.ones_like(lse)))

    ours = torch.vmap(run)(q, k, v, do, cu)
    calls = [run(*call) for call in zip(q, k, v, do, cu, strict=True)]
    for found, expected in zip(ours, zip(*calls, strict=True), strict=True):
        for i in range(3):
            if i != 1 or wrong[1] == 40:  # falling offsets leave rows that nothing writes
                assert found[i].any()
                assert torch.equal(found[i], expected[i])


# -- the host


@pytest.mark.usefixtures("gpu")
def test_the_host_never_waits():
    lengths = [500, 1, 0, 300], [500, 1, 7, 200]
    q, k, v = draw(*lengths, heads=4, head_dim=64, dtype=torch.bfloat16)
    arguments = packing(*lengths)
    do = torch.randn_like(q)

    def run():
        out = attention_varlen(q, k, v, *arguments, is_causal=True, enable_gqa=True)
        torch.autograd.grad(out, (q, k, v), do)

    run()  # compiles, and may wait
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # this call itself warns that it is a prototype
        torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            run()
    finally:
        torch.cuda.set_sync_debug_mode("default")


# -- errors


def zeros(*shape, dtype=torch.float32):
    return torch.zeros(shape, device=DEVICE, dtype=dtype)


def operands(**changes):
    """Arguments that are right but for what is changed."""
    cu = offsets([3, 2])
    q, k, v = (zeros(5, 4, 16) for _ in range(3))
    right = {"q": q, "k": k, "v": v, "cu_seqlens_q": cu, "cu_seqlens_k": cu}
    return right | {"max_seqlen_q": 3, "max_seqlen_k": 3} | changes


ERRORS = {
    "q is a list": ({"q": [1.0]}, TypeError, "q must be a torch.Tensor, got list"),
    "q is float64": (
        {"q": zeros(5, 4, 16, dtype=torch.float64)}, TypeError,
        "q must be float32, float16 or bfloat16, got float64",
    ),
    "q has 8 bits": (
        {"q": zeros(5, 4, 16).to(torch.float8_e4m3fn)}, TypeError, "got float8_e4m3fn"
    ),
    "dtypes differ": (
        {"v": zeros(5, 4, 16, dtype=torch.float16)}, TypeError, "v must have the dtype of q"
    ),
    "four dimensions": (
        {"q": zeros(1, 5, 4, 16)}, ValueError, r"q must be \(total, heads, head_dim\), got shape"
    ),
    "head_dim is small": (
        dict.fromkeys("qkv", zeros(5, 4, 8)), ValueError, r"must lie in \[16, 256\], got 8"
    ),
    "head_dims differ": (
        dict.fromkeys("kv", zeros(5, 4, 32)), ValueError, "k must have the head_dim of q, 16, got"
    ),
    "k and v differ": ({"v": zeros(6, 4, 16)}, ValueError, r"v must have the shape of k, \(5"),
    "too many rows": (
        dict.fromkeys("kv", zeros(1, 4, 16).expand(2**30, 4, 16)), ValueError,
        "k must have fewer than 1073741824 rows, the most that a descriptor of packed sequences",
    ),
    "heads differ": (
        dict.fromkeys("kv", zeros(5, 2, 16)), ValueError, "got 2: pass enable_gqa=True"
    ),
    "heads do not divide": (
        dict.fromkeys("kv", zeros(5, 3, 16)) | {"enable_gqa": True}, ValueError,
        "k must have a number of heads that divides that of q, 4, got 3",
    ),
    "offsets are int64": (
        {"cu_seqlens_q": offsets([3, 2]).long()}, TypeError,
        r"cu_seqlens_q must be int32, got int64: pass cu_seqlens_q.to\(torch.int32\)",
    ),
    "offsets are a list": (
        {"cu_seqlens_k": [0, 3, 5]}, TypeError, "cu_seqlens_k must be a torch.Tensor, got list"
    ),
    "offsets are a matrix": (
        {"cu_seqlens_k": offsets([3, 2])[None]}, ValueError,
        r"cu_seqlens_k must be \(batch \+ 1,\), got shape \(1, 3\)",
    ),
    "no offset": (
        {"cu_seqlens_q": offsets([3, 2])[:0]}, ValueError, r"must be \(batch \+ 1,\), got shape \(0"
    ),
    "batches differ": (
        {"cu_seqlens_k": offsets([3, 1, 1])}, ValueError,
        "cu_seqlens_k must have as many offsets as cu_seqlens_q, 3, got 4",
    ),
    "a maximum that is a tensor": (
        {"max_seqlen_q": offsets([3])[1]}, TypeError, "max_seqlen_q must be an int, got a tensor"
    ),
    "a maximum that is negative": (
        {"max_seqlen_k": -1}, ValueError, r"max_seqlen_k must lie in \[0, 2\*\*31\), got -1"
    ),
    "a maximum that cannot be": (
        {"max_seqlen_k": 2}, ValueError, "2 sequences of it cannot hold the 5 rows of k"
    ),
    "offsets on meta": (
        {"cu_seqlens_k": offsets([3, 2]).to("meta")}, ValueError, "cu_seqlens_k is on meta and q on"
    ),
    "is_causal is an int": ({"is_causal": 1}, TypeError, "is_causal must be True or False, got 1"),
    "return_lse is None": ({"return_lse": None}, TypeError, "return_lse must be True or False"),
    "scale is a string": ({"scale": "1"}, TypeError, r"scale must be a number, got '1' \(str\)"),
    "scale is negative": ({"scale": -0.5}, ValueError, "got -0.5: pass -q and scale=0.5"),
    "a window of one": ({"window": (3,)}, ValueError, r"window must be \(left, right\)"),
    "a negative window": ({"window": (-1, 0)}, ValueError, "left of window must be at least 0"),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "kind", "message"), ERRORS.values(), ids=ERRORS)
def test_errors_say_what_came_and_what_to_pass(monkeypatch, changes, kind, message):
    def launched(*_):
        pytest.fail("was launched")

    monkeypatch.setattr(varlen_operator, "attention_varlen_forward", launched)
    monkeypatch.setattr(torch, "empty", lambda *_: pytest.fail("was allocated"))
    with pytest.raises(kind, match=message):
        attention_varlen(**operands(**changes))
