"""Sliding windows: who sees what, against a mask made here, and what may not be read."""

import random

import numpy
import pytest
import test_attention_fp8 as in_fp8
import torch
import triton
import triton.language as tl
from conftest import DEVICE
from test_attention import assert_close, check, draw

from kernelbook import reference, runtime
from kernelbook.ops.attention import attention, operator, scope, tiled

ONE_OR_TWO = pytest.mark.parametrize("deterministic", [True, False], ids=["two", "one"])
TILE = 32 if runtime.INTERPRETED else 128
"""A whole number of tiles of any configuration, in queries and in keys."""


def mask(seqlen_q, seqlen_k, left, right):
    """Which keys each query sees, from the definition."""
    ahead = torch.arange(seqlen_k) - torch.arange(seqlen_q).unsqueeze(1) - (seqlen_k - seqlen_q)
    seen = torch.ones_like(ahead, dtype=torch.bool)
    if left is not None:
        seen &= ahead >= -left
    if right is not None:
        seen &= ahead <= right
    return seen


# -- truth

WINDOWS = {
    "both sides": (20, 7),
    "right is wider": (3, 40),
    "left": (17, None),
    "right": (None, 5),
    "its own key": (0, 0),
    "wide": (50, 60),
    "none": (None, None),
    "beyond the lengths": (10**12, 10**9),
}
SHAPES = {  # batch, heads, heads_k, seqlen_q, seqlen_k, head_dim
    "square, grouped": (2, 4, 2, 70, 70, 16),
    "more keys": (1, 2, 1, 33, 97, 16),
    "fewer keys": (1, 2, 2, 97, 33, 16),
}
if not runtime.INTERPRETED:
    WINDOWS |= {"300": (300, 0), "many": (129, 255)}
    SHAPES |= {
        "1000": (2, 4, 2, 1000, 1000, 64),
        "700 by 1000": (1, 2, 2, 700, 1000, 128),
        "256": (1, 2, 2, 500, 400, 256),
    }


@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@ONE_OR_TWO
def test_a_window_is_the_truth(shape, window, deterministic):
    check(*draw(*shape, dtype=torch.float16), window=window, deterministic=deterministic)


@pytest.mark.parametrize("window", [(20, 7), (20, 0), (None, 5), (40, None)], ids=str)
@ONE_OR_TWO
def test_causal_and_a_window(window, deterministic):
    """What is seen is what both let see."""
    q, k, v = draw(1, 2, 1, 70, 90, 16)
    check(q, k, v, is_causal=True, window=window, deterministic=deterministic)
    both = attention(q, k, v, is_causal=True, window=window, enable_gqa=True)
    assert torch.equal(both, attention(q, k, v, window=(window[0], 0), enable_gqa=True))


@pytest.mark.parametrize("length", [TILE - 1, TILE, TILE + 1, 2 * TILE - 1, 2 * TILE, 2 * TILE + 1])
@pytest.mark.parametrize("left", [0, 1, TILE - 2, TILE - 1, TILE, TILE + 1, TILE + 2])
def test_ends_of_tiles(length, left):
    operands = draw(1, 1, 1, length, length, 16)
    check(*operands, window=(left, 0), deterministic=False)
    check(*operands, window=(left // 2, left), deterministic=True)


def test_a_gradient_of_the_logsumexp():
    q, k, v = draw(1, 2, 1, 50, 80, 16)
    options = {"window": (20, 3), "enable_gqa": True}
    out, lse = attention(q, k, v, return_lse=True, **options)
    do, dlse = torch.randn_like(out), torch.randn_like(lse)
    ours = torch.autograd.grad((out, lse), (q, k, v), (do, dlse))
    truth = reference.attention_backward(q, k, v, do, dlse=dlse, window=(20, 3))
    s = (q * 16**-0.5) @ k.mT
    s = s.masked_fill(~mask(50, 80, 20, 3).to(DEVICE), -torch.inf)
    theirs = torch.autograd.grad((s.softmax(-1) @ v, s.logsumexp(-1)), (q, k, v), (do, dlse))
    for dx, true_dx, their_dx in zip(ours, truth, theirs, strict=True):
        assert_close(dx, true_dx, their_dx)


def test_a_query_that_sees_nothing_gives_zeros():
    q, k, v = draw(1, 2, 2, 70, 40, 16)
    out, lse = attention(q, k, v, window=(5, 9), return_lse=True)
    blind = 70 - 40 - 9
    assert (out[:, :, :blind] == 0).all()
    assert (lse[:, :, :blind] == -torch.inf).all()
    assert (out[:, :, blind:] != 0).any(-1).all()
    dq, _, _ = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    assert (dq[:, :, :blind] == 0).all()


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_window_that_reaches_everything_changes_no_bit(deterministic):
    q, k, v = draw(1, 2, 2, 40, 70, 16)
    options = {"is_causal": True, "deterministic": deterministic}
    without = attention(q, k, v, **options)
    assert torch.equal(attention(q, k, v, window=(69, 0), **options), without)
    assert torch.equal(attention(q, k, v, window=(69, 39)), attention(q, k, v))
    assert torch.equal(attention(q, k, v, window=(2**100, 2**100)), attention(q, k, v))
    assert not torch.equal(attention(q, k, v, window=(68, 0), **options), without)


@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS)
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_tiled_is_the_truth(window, is_causal):
    q, k, v = (x.double().detach().requires_grad_() for x in draw(1, 2, 2, 30, 25, 16))
    options = {"is_causal": is_causal, "window": window}
    tiles = {"block_m": 8, "block_n": 4}
    out = tiled.tiled_attention(q, k, v, **options, **tiles)
    do = torch.randn_like(out)
    ours = torch.autograd.grad(out, (q, k, v), do)
    torch.testing.assert_close(out, reference.attention(q, k, v, **options)[0])
    torch.testing.assert_close(ours, reference.attention_backward(q, k, v, do, **options))


# -- the rule


@triton.jit
def _stages_kernel(
    keys_ptr, queries_ptr, seqlen_q, seqlen_k, left, right, HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    for start_m in range(0, seqlen_q, BLOCK_M):
        first, whole, cut, end = scope.key_stages(
            start_m, start_m + BLOCK_M - 1, seqlen_q, seqlen_k, left, right, HAS_LEFT, HAS_RIGHT,
            BLOCK_N,
        )  # fmt: skip
        to = keys_ptr + start_m // BLOCK_M * 4
        tl.store(to, first)
        tl.store(to + 1, whole)
        tl.store(to + 2, cut)
        tl.store(to + 3, end)
    for start_n in range(0, seqlen_k, BLOCK_N):
        first, whole, cut, end = scope.query_stages(
            start_n, start_n + BLOCK_N - 1, seqlen_q, seqlen_k, left, right, HAS_LEFT, HAS_RIGHT,
            BLOCK_M,
        )  # fmt: skip
        to = queries_ptr + start_n // BLOCK_N * 4
        tl.store(to, first)
        tl.store(to + 1, whole)
        tl.store(to + 2, cut)
        tl.store(to + 3, end)


def visits(stages, length, block):
    """In which stage each tile comes: none may come twice."""
    first, whole, cut, end = stages
    found = {}
    for stage, (start, stop) in enumerate(((first, whole), (whole, cut), (cut, end)), 1):
        for tile in range(start, stop, block):
            assert tile % block == 0
            assert tile < length
            assert tile not in found
            found[tile] = stage
    return found


def drawn_rules():
    yield 70, 100, 30, 0, 16, 16  # the last keys would be seen by queries past the end
    pick = random.Random(7)
    for _ in range(60):
        lengths = pick.randint(1, 150), pick.randint(1, 150)
        window = [pick.choice((None, 0, 1, 15, 16, 17, pick.randint(0, 160))) for _ in range(2)]
        yield *lengths, *window, pick.choice((16, 32)), pick.choice((16, 32))


@pytest.mark.parametrize("case", list(drawn_rules()), ids=str)
def test_stages_are_those_of_the_mask(case):
    seqlen_q, seqlen_k, *window, block_m, block_n = case
    left, right = scope.bounds(False, window, seqlen_q, seqlen_k)
    seen = mask(seqlen_q, seqlen_k, *window)
    starts_m, starts_n = range(0, seqlen_q, block_m), range(0, seqlen_k, block_n)
    by_queries, by_keys = (
        torch.empty(len(starts), 4, dtype=torch.int32, device=DEVICE)
        for starts in (starts_m, starts_n)
    )
    with runtime.launching_on(by_keys):
        _stages_kernel[(1,)](
            by_queries, by_keys, seqlen_q, seqlen_k, left or 0, right or 0, left is not None,
            right is not None, block_m, block_n,
        )  # fmt: skip
    for start_m, stages in zip(starts_m, by_queries.tolist(), strict=True):
        found = visits(stages, seqlen_k, block_n)
        host = tiled.key_tiles(start_m, seqlen_q, seqlen_k, block_m, block_n, False, window)
        host = {start_n: masked for start_n, _, masked in host}
        assert found.keys() == host.keys()
        for start_n in starts_n:
            part = seen[start_m : start_m + block_m, start_n : start_n + block_n]
            assert (start_n in found) == part.any()
            if start_n in found:
                assert host[start_n] == (not part.all())
                overhangs = start_n + block_n > seqlen_k
                assert found[start_n] == 2 or overhangs or not part.all()
                assert part.all() or found[start_n] != 2
                if found[start_n] == 3:  # where only the right bound is looked at
                    rows = torch.arange(start_m, min(start_m + block_m, seqlen_q))
                    first = rows + seqlen_k - seqlen_q - (left or 0)
                    assert left is None or (first <= start_n).all()
    for start_n, stages in zip(starts_n, by_keys.tolist(), strict=True):
        found = visits(stages, seqlen_q, block_m)
        for start_m in starts_m:
            part = seen[start_m : start_m + block_m, start_n : start_n + block_n]
            assert (start_m in found) == part.any()
            if start_m in found:
                assert part.all() or found[start_m] != 2


def test_bounds():
    assert scope.bounds(False, None, 5, 9) == (None, None)
    assert scope.bounds(True, None, 5, 9) == (None, 0)
    assert scope.bounds(True, None, 1, 9) == (None, None)  # one query sees all keys
    assert scope.bounds(True, (3, 7), 5, 9) == (3, 0)
    assert scope.bounds(False, (7, 3), 5, 9) == (7, 3)
    assert scope.bounds(False, (8, 4), 5, 9) == (None, None)


# -- what no query of a tile sees is not read


@ONE_OR_TWO
@pytest.mark.parametrize("window", [(TILE + 8, 8), (0, 0), (None, 4), (4, None)], ids=str)
def test_tiles_that_nobody_sees_are_not_read(window, deterministic):
    """NaN in a tile of keys, or of queries, changes nothing for tiles beyond its window."""
    n = 4
    q, k, v = draw(1, 1, 1, n * TILE, n * TILE, 16, dtype=torch.float16)
    do = torch.randn_like(q)
    meet = mask(n * TILE, n * TILE, *window).view(n, TILE, n, TILE).any(3).any(1)
    options = {"window": window, "deterministic": deterministic}

    def run(q, k, v, do):
        out = attention(q, k, v, **options)
        return out, *torch.autograd.grad(out, (q, k, v), do)

    clean = run(q, k, v, do)
    for tile in (0, 2):
        there = slice(tile * TILE, (tile + 1) * TILE)
        dyed = [x.detach().clone() for x in (q, k, v, do)]
        dyed[1][:, :, there] = dyed[2][:, :, there] = torch.nan
        out, dq, _, _ = run(*[x.requires_grad_() for x in dyed])
        for ours, expected in ((out, clean[0]), (dq, clean[1])):
            for rows in range(n):
                part = slice(rows * TILE, (rows + 1) * TILE)
                a, b = ours[:, :, part], expected[:, :, part]
                if meet[rows, tile]:
                    assert a.isnan().any()
                else:
                    torch.testing.assert_close(a, b, rtol=2e-3, atol=1e-3)
        dyed = [x.detach().clone() for x in (q, k, v, do)]
        dyed[0][:, :, there] = dyed[3][:, :, there] = torch.nan
        _, _, dk, dv = run(*[x.requires_grad_() for x in dyed])
        for ours, expected in ((dk, clean[2]), (dv, clean[3])):
            for rows in range(n):
                part = slice(rows * TILE, (rows + 1) * TILE)
                a, b = ours[:, :, part], expected[:, :, part]
                if meet[tile, rows]:
                    assert a.isnan().any()
                else:
                    torch.testing.assert_close(a, b, rtol=2e-3, atol=1e-3)


@pytest.mark.parametrize("window", [(20, 0), (3, 40), (None, 4), (70, None)], ids=str)
def test_fp8_is_the_truth(window):
    operands = in_fp8.prepare(*in_fp8.draw(2, 4, 2, 70, 90, 32))
    in_fp8.check(*operands, window=window)


def test_tiles_that_nobody_sees_are_not_read_in_fp8():
    q, k, v = in_fp8.draw(1, 1, 1, TILE, 4 * TILE, 32)
    (q, k, v), descales, _ = in_fp8.prepare(q, k, v, torch.float16)
    expected = attention(q, k, v, **descales, window=(TILE, 0))
    k[:, :, : 2 * TILE] = torch.nan
    v.view(torch.uint8)[:, :, : 2 * TILE] = 0x7F  # NaN in e4m3
    assert v[:, :, : 2 * TILE].float().isnan().all()
    assert torch.equal(attention(q, k, v, **descales, window=(TILE, 0)), expected)
    assert expected.isfinite().all()


# -- what is refused

REFUSED = {
    "an int": (5, TypeError, r"window must be \(left, right\) or None, got 5 \(int\): pass"),
    "a string": ("55", TypeError, "window must be"),
    "a set": ({1, 2}, TypeError, "window must be"),
    "one element": ((5,), ValueError, r"window must be \(left, right\), got 1 elements"),
    "three": ((1, 2, 3), ValueError, "got 3 elements"),
    "a bool": ((True, 0), TypeError, r"left of window must be an int, got True \(bool\)"),
    "a float": ((0, 2.0), TypeError, r"right of window must be an int, got 2.0 \(float\)"),
    "negative": ((-1, 0), ValueError, "left of window must be at least 0, got -1: pass None"),
}


@pytest.mark.parametrize(("window", "kind", "message"), REFUSED.values(), ids=REFUSED)
def test_windows_that_are_none_are_refused(monkeypatch, window, kind, message):
    monkeypatch.setattr(operator, "attention_forward", lambda *_: pytest.fail("was launched"))
    with pytest.raises(kind, match=message):
        attention(*draw(1, 2, 2, 5, 7, 16), window=window)


def test_a_window_may_be_a_list_and_of_numpy():
    q, k, v = draw(1, 2, 2, 20, 40, 16)
    expected = attention(q, k, v, window=(7, 2))
    assert torch.equal(attention(q, k, v, window=[numpy.int64(7), 2]), expected)


# -- compilers and torch.func


def test_a_batch_of_calls():
    q, k, v = (x.detach() for x in draw(3, 2, 2, 20, 40, 16))
    each = [attention(*(x[None, i] for x in (q, k, v)), window=(7, 2))[0] for i in range(3)]
    batched = torch.func.vmap(lambda *x: attention(*(y[None] for y in x), window=(7, 2))[0])
    torch.testing.assert_close(batched(q, k, v), torch.stack(each))


def test_the_operator_is_what_pytorch_asks_of_one():
    q, k, v = draw(1, 2, 2, 20, 40, 16)
    torch.library.opcheck(operator._ATTENTION.op, (q, k, v, False, 7, None, 0.25, True, "auto"))
