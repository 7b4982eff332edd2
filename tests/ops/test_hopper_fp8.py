"""Attention in FP8 in Gluon against float64 truth and its own roundings, on a Hopper GPU.

The order of keys, which is a matter of layouts, is checked without one.
"""

import itertools
from dataclasses import replace

import pytest
import torch
from conftest import DEVICE, assert_close
from test_attention_fp8 import (
    E4M3,
    E5M2,
    MANY,
    RMS_FACTOR,
    assert_lse_close,
    prepare,
    root_mean_square,
    values,
)
from test_attention_fp8 import draw as draw_heads
from test_hopper import LENGTHS, MASKS

from kernelbook import reference, runtime
from kernelbook.lab.check import error
from kernelbook.ops.attention import fp8 as plain
from kernelbook.ops.hopper import fp8 as hopper

BLOCK_N = 128


@pytest.fixture
def hopper_gpu():
    """Skip where the kernel cannot run."""
    if runtime.INTERPRETED:
        pytest.skip("needs a Hopper GPU")
    stand = torch.zeros(1, 1, 64, 64, device=DEVICE).to(E4M3)
    if reason := hopper.supported(stand, stand, stand):
        pytest.skip(reason)


def draw(batch, heads, heads_k, seqlen_q, seqlen_k, head_dim, dtype=E4M3, v_dtype=E4M3, **how):
    """Draw operands; return them, their descales, and the values that they stand for."""
    drawn = draw_heads(batch, heads, heads_k, seqlen_q, seqlen_k, head_dim)
    operands, named, meant = prepare(*drawn, dtype, v_dtype, **how)
    return operands, tuple(named[f"{name}_descale"] for name in "qkv"), meant


def rounded_from_the_right(q, k, v, is_causal, scale, window):
    """reference.attention_fp8, of a kernel that meets the last tile of keys first."""
    lse, p = reference._attention_weights(q, k, is_causal, scale, window)
    scores = (p.log() + lse.unsqueeze(-1)).masked_fill(p == 0, -torch.inf)
    largest = torch.stack([tile.amax(-1) for tile in scores.split(BLOCK_N, dim=-1)], dim=-1)
    largest = largest.flip(-1).cummax(-1).values.flip(-1).clamp(min=-1e300)
    largest = largest.repeat_interleave(BLOCK_N, dim=-1)[..., : p.shape[-1]]
    weights = (256 * torch.exp(scores - largest)).to(E4M3).double() / 256
    return weights * torch.exp(largest - lse.clamp(min=-1e300).unsqueeze(-1)) @ v


def check(
    operands, descales, meant, mask="full", scale=None, config=None, rms_factor=RMS_FACTOR,
    out_dtype=torch.bfloat16,
):  # fmt: skip
    """Compare each head on its own, as test_attention_fp8 does."""
    is_causal, window = MASKS[mask]
    q, k, v = operands
    assert hopper.supported(q, k, v) is None
    sm_scale = q.shape[3] ** -0.5 if scale is None else scale
    out, lse = hopper.attention_fp8_forward(
        q, k, v, descales, is_causal, sm_scale, out_dtype, window, config
    )
    assert (out.shape, out.dtype) == (q.shape, out_dtype)
    assert (lse.shape, lse.dtype) == (q.shape[:3], torch.float32)
    assert out.is_contiguous()
    group = q.shape[1] // k.shape[1]
    for b, h in itertools.product(*map(range, q.shape[:2])):
        one = [meant[0][b, h], meant[1][b, h // group], meant[2][b, h // group]]
        one = [x[None, None] for x in one]
        truth, true_lse = reference.attention(*one, is_causal, scale, window)
        rounded = rounded_from_the_right(*one, is_causal, scale, window).to(out_dtype)
        ours = out[b, h][None, None]
        assert_close(ours, truth, rounded)
        if q.shape[2] >= MANY and truth.any():
            bound = rms_factor * root_mean_square(rounded - truth)
            assert bound < 0.25 * root_mean_square(truth)
            measured = root_mean_square(ours - truth)
            assert measured <= bound, f"head {b, h}: rms {measured:.3g} is over {bound:.3g}"
        if not (true_lse == -torch.inf).all():
            lse_here = lse[b, h][None, None]
            assert_lse_close(lse_here, true_lse, *one[:2], q.dtype, scale, is_causal, window)
        else:
            assert (lse[b, h] == -torch.inf).all()
            assert not ours.any()
    return out, lse


# -- the order of keys


def columns_of_thread(b, block_n):
    """The columns of a row of wgmma's result that are in thread b of the four that share it."""
    return [8 * chunk + 2 * b + c for chunk in range(block_n // 8) for c in range(2)]


def contracted_by_thread(b, block_n):
    """What thread b holds of a row of wgmma's first operand, of 8 bits, by registers of four."""
    return [[16 * a + 4 * b + j for j in range(4)] for a in range(block_n // 16)]


def keys_of_columns(block_n, start):
    """Which key each row of a tile in shared memory is, as the copy engine brings it: all rows of
    one box, and then all rows of the next."""
    keys = torch.arange(4 * block_n).view(1, 1, -1, 1).expand(1, 1, -1, 16)
    view = hopper.in_quadruples(keys)
    first = start // 4
    boxes = [view[0, 0, first : first + block_n // 4, 2 * h : 2 * h + 2] for h in range(2)]
    return torch.cat([box.reshape(-1, 16) for box in boxes])[:, 0] - start


@pytest.mark.parametrize("block_n", [64, 128])
def test_keys_are_in_an_order_after_which_no_weight_changes_its_thread(block_n):
    """By the layouts of PTX: what thread b has of the scores are the keys that it feeds to the
    second matmul, and each register of four is there in the order in which packed() takes it."""
    keys = keys_of_columns(block_n, start=block_n).tolist()
    assert sorted(keys) == list(range(block_n))
    for b in range(4):
        has = {keys[column] for column in columns_of_thread(b, block_n)}
        assert has == set(itertools.chain(*contracted_by_thread(b, block_n)))
    for column, key in enumerate(keys):  # the formula of the module's docstring, as masks use it
        h, a, b, c = (
            column * 2 // block_n,
            column // 8 % (block_n // 16),
            column // 2 % 4,
            column % 2,
        )
        assert key == 16 * a + 4 * b + 2 * h + c
    # packed(): (rows, 2, a, 4, 2) -> (rows, a, 4, 2, 2), and words of the last two dimensions
    words = torch.tensor(keys).view(2, block_n // 16, 4, 2).permute(1, 2, 0, 3).reshape(-1, 4)
    assert torch.equal(words, torch.arange(block_n).view(-1, 4))


def test_in_quadruples_is_a_view_unless_it_would_reach_beyond_the_keys():
    for seqlen in range(1, 10):
        k = torch.arange(2 * 3 * seqlen * 16.0, device=DEVICE).view(2, 3, seqlen, 16)
        view = hopper.in_quadruples(k)
        assert view.shape == (2, 3, -(-seqlen // 4), 4, 16)
        assert torch.equal(view.flatten(2, 3)[:, :, :seqlen], k)
        assert (view.data_ptr() == k.data_ptr()) == (seqlen % 4 == 0)


# -- against the truth


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("seqlen_q", LENGTHS)
def test_every_length(hopper_gpu, head_dim, mask, seqlen_q):
    for seqlen_k in LENGTHS:
        check(*draw(1, 2, 1, seqlen_q, seqlen_k, head_dim), mask)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("mask", ["full", "causal", "window"])
def test_many_tiles_heads_and_groups(hopper_gpu, head_dim, mask):
    check(*draw(3, 6, 2, 1500, 2100, head_dim), mask)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("v_dtype", [E4M3, E5M2], ids=["v e4m3", "v e5m2"])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16], ids=str)
def test_formats(hopper_gpu, head_dim, dtype, v_dtype, out_dtype):
    for mask in ("full", "causal"):
        check(*draw(1, 4, 2, 300, 500, head_dim, dtype, v_dtype), mask, out_dtype=out_dtype)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("contiguous", ["head_dim", "seqlen"])
@pytest.mark.parametrize("per", ["head", "tensor"])
def test_layouts_and_descales(hopper_gpu, head_dim, per, contiguous):
    for seqlen_k in (256, 300, 301):
        (q, k, v), descales, meant = draw(
            2, 4, 2, 200, seqlen_k, head_dim, per=per, contiguous=contiguous
        )
        out, _ = check((q, k, v), descales, meant)
        inside = [
            x.view(torch.uint8).transpose(1, 2).contiguous().transpose(1, 2).view(E4M3)
            for x in (q, k)
        ]
        again, _ = check((*inside, v), descales, meant)
        assert torch.equal(out, again)
    none = (None, None, None)
    check((q, k, v), none, [values(x) for x in (q, k, v)], scale=1e-4)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("seqlen_k", [1, 126, 127, 129, 131])
def test_nothing_beyond_the_keys_counts(hopper_gpu, head_dim, seqlen_k):
    """NaN behind the last key of each head, in keys and values of which a part is taken."""
    q, k, v = draw_heads(1, 2, 2, 200, 256, head_dim)
    k[:, :, seqlen_k:], v[:, :, seqlen_k:] = 0, 0
    (q, k, v), named, _ = prepare(q, k, v)
    descales = tuple(named[f"{name}_descale"] for name in "qkv")
    for x in (k, v):
        x.view(torch.uint8)[:, :, seqlen_k:] = 0x7F  # NaN in e4m3
    operands = (q, k[:, :, :seqlen_k], v[:, :, :seqlen_k])
    meant = [values(x, descale) for x, descale in zip(operands, descales, strict=True)]
    for mask in ("full", "causal"):
        check(operands, descales, meant, mask)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_key_that_weighs_all(hopper_gpu, head_dim):
    """Each key of a tile once: a value beside another's weight would show."""
    q, k, v = draw_heads(1, 1, 1, 128, 160, head_dim)
    q, k = torch.zeros_like(q), torch.zeros_like(k)
    q[..., 0] = 1
    for key in range(160):
        one = k.clone()
        one[:, :, key, 0] = 1
        (a, b, c), named, meant = prepare(q, one, v)
        descales = tuple(named[f"{name}_descale"] for name in "qkv")
        out, _ = hopper.attention_fp8_forward(a, b, c, descales, False, 100.0, torch.bfloat16)
        expected = meant[2][:, :, key : key + 1].expand_as(out)
        torch.testing.assert_close(out.double(), expected, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("length", [8192, 16384])
def test_sums_over_many_keys(hopper_gpu, length, head_dim, is_causal):
    """Values of one sign, which a sum in few bits would cut off: see test_attention_fp8."""
    q, k, v = draw_heads(1, 3, 3, 128, length, head_dim)
    operands, named, meant = prepare(q, k, v.abs())
    descales = tuple(named[f"{name}_descale"] for name in "qkv")
    check(operands, descales, meant, "causal" if is_causal else "full", rms_factor=1.35)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_queries_that_see_nothing(hopper_gpu, head_dim):
    """They are zero, also where the program computed other queries before."""
    for batch in (1, 40):
        operands, descales, _ = draw(batch, 4, 4, 400, 130, head_dim)
        out, lse = hopper.attention_fp8_forward(*operands, descales, True, 0.1, torch.bfloat16)
        assert (out[:, :, :270] == 0).all()
        assert (lse[:, :, :270] == -torch.inf).all()
        assert lse[:, :, 270:].isfinite().all()


# -- against the plain kernel


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("mask", ["full", "causal", "window"])
def test_equal_to_the_plain_kernel(hopper_gpu, head_dim, mask):
    operands, descales, meant = draw(2, 4, 2, 1024, 1024, head_dim)
    is_causal, window = MASKS[mask]
    ours, lse = hopper.attention_fp8_forward(
        *operands, descales, is_causal, 0.1, torch.bfloat16, window
    )
    theirs, their_lse = plain.attention_fp8_forward(
        *operands, descales, is_causal, 0.1, torch.bfloat16, window=window
    )
    truth, _ = reference.attention(*meant, is_causal, 0.1, window)
    for o, t, their in zip(ours[0], truth[0], theirs[0], strict=True):
        assert root_mean_square(o - t) <= 1.1 * root_mean_square(their - t)
    torch.testing.assert_close(lse, their_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seqlen_k", [256, 300])
@pytest.mark.parametrize("value", [0.0, -0.5, float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("of", [0, 1, 2], ids="qkv")
def test_a_descale_that_is_no_scale_makes_its_head_nan(hopper_gpu, of, value, seqlen_k):
    """Its head only, also where the program computes another head before and after."""
    operands, descales, _ = draw(3, 100, 50, 130, seqlen_k, 64)
    changed = [x.clone() for x in descales]
    changed[of][1, 1] = value
    for is_causal in (False, True):
        call = (is_causal, 0.1, torch.bfloat16)
        ours, lse = hopper.attention_fp8_forward(*operands, tuple(changed), *call)
        right, right_lse = hopper.attention_fp8_forward(*operands, descales, *call)
        theirs, their_lse = plain.attention_fp8_forward(*operands, tuple(changed), *call)
        assert torch.equal(ours.isnan(), theirs.isnan())
        assert torch.equal(lse.isnan(), their_lse.isnan())
        heads = [1] if of == 0 else [2, 3]
        others = torch.ones(3, 100, dtype=torch.bool, device=DEVICE)
        others[1, heads] = False
        assert torch.equal(ours[others], right[others])
        assert torch.equal(lse[others], right_lse[others])
        assert not torch.equal(ours[1, heads], right[1, heads])


@pytest.mark.parametrize("of_q", [2e-38, 1e36])
def test_descales_far_from_one(hopper_gpu, of_q):
    operands, (q_descale, k_descale, v_descale), meant = draw(1, 2, 2, 200, 300, 64)
    ordinary = q_descale * k_descale
    far = torch.full((1, 2), of_q, device=DEVICE)
    scale = 400.0 if of_q > 1 else 0.2
    near = ordinary / of_q * (0.2 / scale)
    meant = [values(operands[0], far), values(operands[1], near), meant[2]]
    check(operands, (far, near, v_descale), meant, scale=scale)


def test_scores_far_from_zero(hopper_gpu):
    """Rounding an exponent of millions must not carry a weight past the largest e4m3 number."""
    q, k, v = draw_heads(2, 2, 2, 200, 300, 64)
    q.zero_()[..., 0], k[..., 0] = 1, 1
    operands, named, meant = prepare(q, k, v)
    descales = tuple(named[f"{name}_descale"] for name in "qkv")
    out, _ = hopper.attention_fp8_forward(*operands, descales, False, 3e6, torch.bfloat16)
    truth = meant[2].mean(2, keepdim=True).expand_as(out)
    assert all(
        error(o, t) < 2**-4 for o, t in zip(out.flatten(0, 1), truth.flatten(0, 1), strict=True)
    )


@pytest.mark.parametrize("head_dim", [64, 128])
def test_nan_reaches_who_sees_it(hopper_gpu, head_dim):
    (q, k, v), descales, _ = draw(1, 3, 3, 300, 500, head_dim)
    before, _ = hopper.attention_fp8_forward(q, k, v, descales, True, 0.1, torch.bfloat16)
    k.view(torch.uint8)[0, 0, 450, 3] = 0x7F
    v.view(torch.uint8)[0, 1, 450, 3] = 0x7F
    out, lse = hopper.attention_fp8_forward(q, k, v, descales, True, 0.1, torch.bfloat16)
    sees, meets = 250, 128  # query 250 is key 450; tiles of 64 queries from 128 on meet key 384
    assert out[0, 0, sees:].isnan().all()
    assert lse[0, 0, sees:].isnan().all()
    assert lse[0, 0, :sees].isfinite().all()
    assert torch.equal(out[0, 0, :sees], before[0, 0, :sees])
    assert out[0, 1, sees:, 3].isnan().all()
    assert torch.equal(out[0, 1, :meets], before[0, 1, :meets])
    assert torch.equal(out[0, 2], before[0, 2])


# -- roles


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_the_same_bits_again(hopper_gpu, head_dim, mask):
    """A race between the roles would show as other bits: many programs, many times."""
    operands, descales, _ = draw(4, 16, 16, 2000, 2000, head_dim)
    call = (*operands, descales, MASKS[mask][0], 0.1, torch.bfloat16)
    first = hopper.attention_fp8_forward(*call)
    for _ in range(50):
        again = hopper.attention_fp8_forward(*call)
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    "change",
    [
        {"take_turns": False},
        {"persistent": False},
        {"paired": False},
        {"stages": 2},
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
        check(*draw(batch, 5, 5, seqlen_q, 400, head_dim), mask)


def test_what_is_not_supported_says_why():
    q, k, v = (torch.zeros(1, 2, 64, 64, device=DEVICE).to(E4M3) for _ in range(3))
    assert "q is float16" in hopper.supported(q.half(), k.half(), v)
    assert "v is float16" in hopper.supported(q, k, v.half())
    assert "empty" in hopper.supported(q, k[:, :, :0], v[:, :, :0])
    if runtime.INTERPRETED or runtime.capability(q.device) != (9, 0):
        assert "Hopper" in hopper.supported(q, k, v)
        return
    assert hopper.supported(q, k, v) is None
    assert "head_dim" in hopper.supported(*(x[..., :32].contiguous() for x in (q, k, v)))
    padded = torch.zeros(1, 2, 64, 65, device=DEVICE).to(E4M3)[..., :64]
    assert "16 bytes" in hopper.supported(q, padded, v)
