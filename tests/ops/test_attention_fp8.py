"""Attention with operands of 8 bits, head by head, against float64 truth and its own roundings.

The truth is float64 attention of the values that were stored. The yardstick is the error that the
rounding of weights makes by itself, in float64: no kernel that rounds them can do better.
"""

import pytest
import torch
from conftest import DEVICE, assert_close

from kernelbook import reference, runtime
from kernelbook.lab.check import error
from kernelbook.ops.attention import attention, fp8, operator, quantize, tiles, tuned

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
RMS_FACTOR = 1.1
"""How much above the error of the same roundings in float64 the root mean square error of a head
may be. What is left is arithmetic in float32, and FP8 products that are a little less exact."""

MANY = 16
"""Queries from which a root mean square says something. An exponential that falls on the other side
of a boundary changes a weight by 6 %, and among few that shows; so the largest error of a head is
held to the book's usual factor only."""

BOTH = pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
FULL_AND_CAUSAL = pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
ALL_OR_V = pytest.mark.parametrize("q_dtype", [E4M3, torch.bfloat16, torch.float16], ids=str)


def draw(batch, heads, heads_k, seqlen_q, seqlen_k, head_dim):
    """Draw q, k and v, of which every head has another size and, in v, another mean."""
    sizes = [(heads, seqlen_q), (heads_k, seqlen_k), (heads_k, seqlen_k)]
    q, k, v = (torch.randn(batch, h, length, head_dim, device=DEVICE) for h, length in sizes)
    shift = torch.arange(1, batch * heads_k + 1, device=DEVICE).view(batch, heads_k, 1, 1)
    return q, k * (1 + shift / 8), v * shift + shift / 4


def values(stored, descale=None):
    """What stored numbers mean, in float64."""
    if descale is None:
        return stored.double()
    return stored.double() * descale.double().reshape(*descale.shape, *[1] * (4 - descale.ndim))


def prepare(q, k, v, q_dtype=E4M3, v_dtype=E4M3, per="head", contiguous="seqlen"):
    """Return operands and descales for attention, and the values that they stand for."""
    v, v_descale = quantize(v, v_dtype, per=per, contiguous=contiguous)
    descales = {"v_descale": v_descale}
    if q_dtype in fp8.DTYPES:
        q, descales["q_descale"] = quantize(q, q_dtype, per=per)
        k, descales["k_descale"] = quantize(k, q_dtype, per=per)
    else:
        q, k = q.to(q_dtype), k.to(q_dtype)
    meant = [
        values(x, descales.get(f"{name}_descale")) for name, x in zip("qkv", (q, k, v), strict=True)
    ]
    return (q, k, v), descales, meant


def finite(lse):
    """lse, with zeros for queries that see nothing."""
    return lse.nan_to_num(0.0, 0.0, 0.0)


def root_mean_square(x):
    return x.double().square().mean().sqrt().item()


def assert_every_head_close(
    q, out, lse, meant, is_causal=False, scale=None, rms_factor=RMS_FACTOR, window=None
):
    """Compare each head on its own, so that one that is wrong cannot hide behind a larger one."""
    block_n = tuned.fp8_config(q).block_n
    for b in range(out.shape[0]):
        for h in range(out.shape[1]):
            group = out.shape[1] // meant[1].shape[1]
            one = [meant[0][b, h], meant[1][b, h // group], meant[2][b, h // group]]
            one = [x[None, None] for x in one]
            truth, true_lse = reference.attention(*one, is_causal, scale, window)
            rounded, _ = reference.attention_fp8(*one, is_causal, scale, block_n, window)
            ours, rounded = out[b, h][None, None], rounded.to(out.dtype)
            assert_close(ours, truth, rounded)
            if out.shape[2] >= MANY:
                bound = rms_factor * root_mean_square(rounded - truth)
                assert bound < 0.25 * root_mean_square(truth)
                measured = root_mean_square(ours - truth)
                assert measured <= bound, f"head {b, h}: rms {measured:.3g} is over {bound:.3g}"
            assert_lse_close(
                lse[b, h][None, None], true_lse, *one[:2], q.dtype, scale, is_causal, window
            )


def lost_by_8_bits(q, k):
    """Return a bound of what each product of a query and a key loses in a matmul of 8 bits.

    Hopper adds 32 products to the sum so far at a time, and truncates each of these 33 terms 13
    bits below the leading bit of the largest, as the chapter measures. So a term loses no more than
    2^-13 of the largest, nor more than itself. A product of two 8-bit floats has at most 8 bits,
    so that nothing is lost of what is at least 2^-5 of the largest. The sum counts as truncated
    before and after.
    """
    bounds = []
    for rows in q.split(256):
        bound, so_far = (rows.new_zeros(len(rows), len(k)) for _ in range(2))
        for some_q, some_k in zip(rows.split(32, -1), k.split(32, -1), strict=True):
            terms = (some_q[:, None] * some_k).abs()
            before, so_far = so_far, so_far + some_q @ some_k.T
            largest = torch.stack([terms.amax(-1), before.abs(), so_far.abs()]).amax(0)
            unit = 2**-13 * largest
            small = terms < 2**-5 * largest[..., None]
            bound += (terms.minimum(unit[..., None]) * small).sum(-1) + 2 * unit
        bounds.append(bound)
    return torch.cat(bounds)


def assert_lse_close(lse, truth, q, k, q_dtype, scale, is_causal=False, window=None):
    """Compare lse, which rounded weights do not touch, with the truth, row by row, of one head.

    A score is a sum over head_dim, and may be wrong by some roundings to float32 of the sizes of
    its terms, and on a GPU by what a matmul of 8 bits loses. If each score is off by no more than
    its e, lse is off by no more than log(sum(p * exp(e))). It has roundings of its own, among them
    those of its logarithm, which is 8 higher before 2^8 is taken off.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    _, p = reference._attention_weights(q, k, is_causal, scale, window)
    sizes = (q.double().abs() @ k.double().abs().mT).amax(-1) * scale
    bound = 2**-21 * (sizes + finite(truth).abs() + 8)
    if q_dtype in fp8.DTYPES and not runtime.INTERPRETED:
        lost = scale * lost_by_8_bits(q[0, 0].double(), k[0, 0].double())
        bound = bound + finite((p * lost.exp()).sum(-1).log())
    many = (p > 0).sum(-1) >= MANY
    if many.any():  # zeros must fail; with few keys lse may be 0 by chance
        assert root_mean_square(bound[many]) < 0.1 * root_mean_square(truth[many])
    assert torch.equal(lse == -torch.inf, truth == -torch.inf)
    off = finite(lse - truth).abs()
    assert not lse.isnan().any()
    assert (off <= bound).all(), f"lse is off by up to {(off / bound).max():.3g} of its bound"


def check(operands, descales, meant, is_causal=False, rms_factor=RMS_FACTOR, **options):
    out, lse = attention(
        *operands, **descales, is_causal=is_causal, enable_gqa=True, return_lse=True, **options
    )
    q = operands[0]
    expected = torch.bfloat16 if q.dtype in fp8.DTYPES else q.dtype
    assert out.dtype == options.get("out_dtype", expected)
    assert out.shape == q.shape
    assert out.is_contiguous()
    assert lse.dtype == torch.float32
    scale, window = options.get("scale"), options.get("window")
    assert_every_head_close(q, out, lse, meant, is_causal, scale, rms_factor, window)
    return out


# -- truth

SHAPES = {  # batch, heads, heads_k, seqlen_q, seqlen_k, head_dim
    "one": (2, 2, 2, 1, 1, 16),
    "one tile": (2, 2, 2, 32, 32, 32),
    "127": (1, 2, 2, 127, 127, 16),
    "more keys": (2, 3, 3, 33, 70, 32),
    "fewer keys, but one a query": (2, 2, 2, 70, 70, 32),
    "one query": (2, 2, 2, 1, 70, 16),
    "one key": (2, 2, 2, 1, 1, 32),
    "grouped": (2, 4, 2, 40, 50, 32),
    "shared": (2, 3, 1, 40, 50, 16),
    "80": (2, 2, 2, 40, 50, 80),
    "17": (1, 2, 2, 20, 40, 17),
}
LARGE = {
    "1000": (2, 3, 3, 1000, 1000, 64),
    "32": (2, 4, 4, 500, 700, 32),
    "64, grouped": (3, 8, 2, 512, 640, 64),
    "128": (2, 5, 5, 640, 1027, 128),
    "128, grouped": (2, 8, 2, 300, 777, 128),
    "256": (2, 2, 2, 300, 500, 256),
    "long": (1, 2, 2, 4099, 4099, 64),
}


@FULL_AND_CAUSAL
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_every_head_is_the_truth(shape, is_causal):
    check(*prepare(*draw(*shape)), is_causal)


@BOTH
@ALL_OR_V
def test_v_alone_and_all_three(q_dtype, dtype):
    check(*prepare(*draw(2, 4, 2, 40, 70, 32), q_dtype, dtype), is_causal=True)


@BOTH
@pytest.mark.parametrize("contiguous", ["head_dim", "seqlen"])
@pytest.mark.parametrize("per", ["head", "tensor"])
def test_layouts_and_descales(per, contiguous, dtype):
    q, k, v = draw(2, 4, 2, 40, 70, 32)
    check(*prepare(q, k, v, dtype, dtype, per, contiguous), is_causal=True)


def test_the_layout_of_v_changes_nothing():
    q, k, v = draw(2, 2, 2, 40, 77, 32)
    outs = [
        attention(*operands, **descales)
        for operands, descales, _ in (
            prepare(q, k, v, contiguous=contiguous) for contiguous in ("head_dim", "seqlen")
        )
    ]
    assert torch.equal(*outs)


def test_one_descale_for_k_and_many_for_q_and_v():
    (q, k, v), descales, _ = prepare(*draw(2, 4, 2, 40, 50, 32))
    descales["k_descale"] = torch.tensor([0.02], device=DEVICE)
    meant = [values(x, descales[f"{name}_descale"]) for name, x in {"q": q, "v": v}.items()]
    check((q, k, v), descales, [meant[0], values(k) * descales["k_descale"].item(), meant[1]])


def test_no_descale_is_a_descale_of_one():
    q, k, v = (x.to(E4M3) for x in draw(2, 2, 2, 40, 50, 32))
    check((q, k, v), {}, [x.double() for x in (q, k, v)])


def test_descales_may_lie_anyhow_and_have_a_sign():
    (q, k, v), descales, (q_meant, k_meant, v_meant) = prepare(*draw(2, 3, 3, 40, 50, 32))
    descales["v_descale"] = -descales["v_descale"].t().contiguous().t()
    descales["q_descale"] = torch.stack([descales["q_descale"]] * 2, dim=-1)[..., 0]
    check((q, k, v), descales, [q_meant, k_meant, -v_meant])


@pytest.mark.parametrize("out_dtype", [torch.float16, torch.bfloat16], ids=str)
def test_the_dtype_of_the_result_may_be_chosen(out_dtype):
    operands = prepare(*draw(2, 2, 2, 40, 50, 32))
    check(*operands, out_dtype=out_dtype, scale=0.3)


def test_what_a_tile_adds_up_makes_no_difference_here():
    (q, k, v), descales, _ = prepare(*draw(2, 2, 2, 40, 77, 32), q_dtype=torch.float16)
    arguments = [q, k, v.to(runtime.kernel_dtype(v.dtype)), (None, None, descales["v_descale"])]
    with runtime.launching_on(q):
        outs = [
            fp8.attention_fp8_forward(*arguments, True, 0.2, torch.float16, promoted)[0]
            for promoted in (True, False)
        ]
    assert torch.allclose(*outs, rtol=2e-3, atol=1e-3 * outs[0].abs().max().item())


def test_a_query_that_sees_nothing_gives_zero():
    operands, descales, meant = prepare(*draw(2, 2, 2, 90, 33, 32))
    out, lse = attention(*operands, **descales, is_causal=True, return_lse=True)
    assert not out[:, :, :57].any()
    assert (lse[:, :, :57] == -torch.inf).all()
    rest = [meant[0][:, :, 57:], *meant[1:]]
    assert_every_head_close(operands[0], out[:, :, 57:], lse[:, :, 57:], rest, True)


@pytest.mark.parametrize("sizes", [(0, 2, 5, 5), (2, 0, 5, 5), (2, 2, 0, 5), (2, 2, 5, 0)], ids=str)
def test_empty_tensors(sizes):
    batch, heads, seqlen_q, seqlen_k = sizes
    operands, descales, _ = prepare(*draw(batch, heads, heads, seqlen_q, seqlen_k, 16))
    out, lse = attention(*operands, **descales, return_lse=True)
    assert out.shape == operands[0].shape
    assert not out.any()
    assert (lse == -torch.inf).all()


def test_scores_far_from_zero():
    """Rounding an exponent of millions must not carry a weight past the largest e4m3 number."""
    q, k, v = draw(2, 2, 2, 40, 70, 32)
    q.zero_()[..., 0], k[..., 0] = 1, 1
    (q, k, v), descales, meant = prepare(q, k, v)
    out = attention(q, k, v, **descales, scale=3e6)
    truth = meant[2].mean(2, keepdim=True).expand_as(out)
    # All weights are alike, but off a power of two by what the exponent lost, and rounded so: 2^-4.
    assert all(
        error(o, t) < 2**-4 for o, t in zip(out.flatten(0, 1), truth.flatten(0, 1), strict=True)
    )


@pytest.mark.parametrize("seqlen_k", [64, 70])
@pytest.mark.parametrize("value", [0.0, -0.5, float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_a_descale_that_is_no_scale_makes_its_head_nan(name, value, seqlen_k):
    """Of v, 0 and negative numbers are scales; infinity times a stored 0 is not."""
    operands, descales, _ = prepare(*draw(2, 2, 2, 20, seqlen_k, 32))
    right = attention(*operands, **descales, out_dtype=torch.float16)
    changed = descales[f"{name}_descale"].clone()
    changed[1, 1] = value
    out, lse = attention(
        *operands, **descales | {f"{name}_descale": changed}, return_lse=True,
        out_dtype=torch.float16,
    )  # fmt: skip
    others = torch.ones(2, 2, dtype=torch.bool, device=DEVICE)
    others[1, 1] = False
    assert torch.equal(out[others], right[others])
    assert lse[others].isfinite().all()
    if name == "v" and abs(value) < 1:
        factor = value / descales["v_descale"][1, 1]
        # three roundings to float16, normal or not: of right, of its product, and of out
        assert torch.allclose(out[1, 1], right[1, 1] * factor, rtol=3 * 2**-11, atol=3 * 2**-25)
    else:
        assert out[1, 1].isnan().all()
    assert lse[1, 1].isfinite().all() if name == "v" else lse[1, 1].isnan().all()


@pytest.mark.parametrize("of_q", [2e-38, 1e36])
def test_descales_far_from_one(of_q):
    """Their product is ordinary, but that of one with the scale is subnormal, or overflows."""
    (q, k, v), descales, (*_, v_meant) = prepare(*draw(1, 2, 2, 40, 50, 32))
    ordinary = descales["q_descale"] * descales["k_descale"]
    descales["q_descale"] = torch.full((1, 2), of_q, device=DEVICE)
    scale = 400.0 if of_q > 1 else 0.2
    descales["k_descale"] = ordinary / of_q * (0.2 / scale)
    meant = [values(q, descales["q_descale"]), values(k, descales["k_descale"]), v_meant]
    check((q, k, v), descales, meant, scale=scale)


def test_a_pending_negation_is_read():
    def negated(x):
        return torch._neg_view(-x)  # what conj().imag is, but with elements beside each other

    q, k, v = draw(1, 2, 2, 40, 50, 32)
    assert negated(q).is_neg()
    for x, y in zip(quantize(negated(q)), quantize(q), strict=True):
        assert torch.equal(x.float(), y.float())
    operands, descales, _ = prepare(q, k, v)
    views = {name: negated(x) for name, x in descales.items()}
    expected = attention(*operands, **descales)
    assert torch.equal(attention(*operands, **views), expected)
    q, k = q.half(), k.half()
    expected = attention(q, k, operands[2], v_descale=descales["v_descale"])
    ours = attention(negated(q), negated(k), operands[2], v_descale=descales["v_descale"])
    assert torch.equal(ours, expected)


def test_lse_is_float32_whatever_the_default_dtype():
    operands, descales, _ = prepare(*draw(2, 2, 2, 5, 0, 16))
    torch.set_default_dtype(torch.float64)
    try:
        _, lse = attention(*operands, **descales, return_lse=True)
    finally:
        torch.set_default_dtype(torch.float32)
    assert lse.dtype == torch.float32


# -- properties


def test_heads_know_nothing_of_each_other():
    """Lengths that no tile divides: a flattened descriptor would read the next head's keys."""
    (q, k, v), descales, _ = prepare(*draw(2, 3, 3, 45, 70, 32))
    out = attention(q, k, v, **descales)
    for b in range(2):
        for h in range(3):
            part = (slice(b, b + 1), slice(h, h + 1))
            alone = {name: x[part] for name, x in descales.items()}
            one = attention(q[part], k[part], v[part], **alone)
            assert torch.equal(one[0, 0], out[b, h])


def test_grouped_heads_are_repeated_heads():
    (q, k, v), descales, _ = prepare(*draw(2, 6, 2, 40, 50, 32))
    out = attention(q, k, v, **descales, enable_gqa=True)
    for name in ("k_descale", "v_descale"):
        descales[name] = descales[name].repeat_interleave(3, dim=1)
    k, v = (x.view(torch.uint8).repeat_interleave(3, dim=1).view(E4M3) for x in (k, v))
    assert torch.equal(attention(q, k, v, **descales), out)


def test_the_future_changes_nothing():
    (q, k, v), descales, _ = prepare(*draw(2, 2, 2, 70, 70, 32))
    before = attention(q, k, v, **descales, is_causal=True)
    k[:, :, 45:], v[:, :, 45:] = 100, -50
    after = attention(q, k, v, **descales, is_causal=True)
    assert torch.equal(after[:, :, :45], before[:, :, :45])
    assert (after[:, :, 45:] != before[:, :, 45:]).any(-1).all()


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered")  # the interpreter's
@pytest.mark.parametrize("where", ["q", "k", "v"])
def test_nan_stays_in_its_head_and_comes_out(where):
    q, k, v = draw(2, 3, 3, 45, 70, 32)
    operands, descales, _ = prepare(q, k, v)
    before = attention(*operands, **descales)
    {"q": q, "k": k, "v": v}[where][:, 1, 7, 3] = float("nan")
    operands, descales, _ = prepare(q, k, v)
    after = attention(*operands, **descales)
    assert torch.equal(after[:, ::2], before[:, ::2])
    assert after[:, 1].isnan().all()


def test_operands_are_left_alone_and_are_read_where_they_lie(monkeypatch):
    (q, k, v), descales, _ = prepare(*draw(1, 2, 2, 40, 50, 32))
    before = [x.view(torch.uint8).clone() for x in (q, k, v)]
    attention(q, k, v, **descales)
    assert all(torch.equal(x.view(torch.uint8), y) for x, y in zip((q, k, v), before, strict=True))
    assert fp8._keys_contiguous(v).data_ptr() == v.data_ptr()
    assert tiles.fits(fp8._keys_contiguous(v.contiguous()))


def test_heads_may_lie_inside_of_rows():
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in draw(2, 3, 3, 40, 50, 32))
    _, descales, meant = prepare(q, k, v)
    stored = [
        (x.transpose(1, 2) / descales[f"{name}_descale"][:, None, :, None]).to(E4M3).transpose(1, 2)
        for name, x in {"q": q, "k": k, "v": v}.items()
    ]
    check(stored, descales, meant)


@pytest.mark.parametrize("calls", [(3,), (2, 3), (0, 3), (3, 0)], ids=str)
@pytest.mark.parametrize("of", [(), (1,), (2, 2)], ids=str)
def test_calls_of_their_own_descales_are_a_batch(of, calls):
    """vmap within vmap, too, over no calls, and over descales of a tensor and of its heads."""
    q, k, v = (torch.randn(*calls, 2, 2, 9, 16, device=DEVICE).to(E4M3) for _ in range(3))
    descale = torch.rand(*calls, *of, device=DEVICE) + 0.5

    def one(q, k, v, descale):
        return attention(q, k, v, q_descale=descale, v_descale=descale)

    batch = one
    for _ in calls:
        batch = torch.vmap(batch)
    found = batch(q, k, v, descale)
    assert found.shape == q.shape
    each = (x.reshape(-1, *x.shape[len(calls) :]) for x in (found, q, k, v, descale))
    for ours, *call in zip(*each, strict=True):
        assert ours.any()
        assert torch.equal(ours, one(*call))


# -- gradients and errors


@pytest.mark.parametrize("leaf", ["q", "k", "v"])
def test_gradients_are_refused(leaf):
    (q, k, v), descales, _ = prepare(*draw(1, 2, 2, 20, 20, 16), q_dtype=torch.float16)
    {"q": q, "k": k, "v": v}[leaf].requires_grad_()
    out = attention(q, k, v, **descales)
    with pytest.raises(RuntimeError, match="attention with operands in FP8 has no gradient"):
        out.sum().backward()
    with torch.no_grad():
        assert not attention(q, k, v, **descales).requires_grad


def test_a_result_modified_in_place_has_no_gradient_either():
    (q, k, v), descales, _ = prepare(*draw(1, 2, 2, 20, 20, 16), q_dtype=torch.float16)
    out = attention(q.requires_grad_(), k, v, **descales)
    expected = out.detach().relu()
    assert torch.equal(out.relu_(), expected)
    with pytest.raises(RuntimeError, match="attention with operands in FP8 has no gradient"):
        out.sum().backward()


def test_a_descale_that_learns_may_be_used_where_nothing_does():
    operands, descales, _ = prepare(*draw(1, 2, 2, 20, 20, 16))
    expected = attention(*operands, **descales)
    with torch.no_grad():
        learning = {name: x.requires_grad_() for name, x in descales.items()}
        assert torch.equal(attention(*operands, **learning), expected)


def test_compiled_functions_may_call_it():
    (q, k, v), descales, _ = prepare(*draw(1, 2, 2, 20, 20, 16))
    compiled = torch.compile(lambda *x: 2 * attention(*x, **descales), backend="eager")
    assert torch.equal(compiled(q, k, v), 2 * attention(q, k, v, **descales))


def stand(dtype=torch.float32, shape=(2, 4, 5, 16)):
    return torch.zeros(shape, device=DEVICE).to(dtype)


ERRORS = {
    "q alone": (
        {"q": stand(E4M3), "v": stand(torch.float16)},
        TypeError,
        "k must have the dtype of q, float8_e4m3fn, got float16: pass both",
    ),
    "k alone": ({"k": stand(E5M2), "v": stand()}, TypeError, "k must have the dtype of q, float16"),
    "q and k": (
        {"q": stand(E4M3), "k": stand(E4M3), "v": stand(torch.float16)},
        TypeError,
        r"v must be in FP8 where q and k are, got float16.* results of quantize\(v, cont",
    ),
    "k beside v": ({"k": stand(E4M3)}, TypeError, "k must have the dtype of q, float16"),
    "q in float32": ({"q": stand(), "k": stand()}, TypeError, "q must be float16, bfloat16 or FP8"),
    "q and k differ": ({"q": stand(E4M3), "k": stand(E5M2)}, TypeError, "or both in the same FP8"),
    "shape": ({"v": stand(E4M3, (2, 4, 6, 16))}, ValueError, "v must have the shape of k"),
    "descale of q": (
        {"q_descale": stand(shape=())}, TypeError, "q_descale goes with q in FP8, got it with"
    ),
    "a number": ({"v_descale": 0.5}, TypeError, "v_descale must be a torch.Tensor, got float"),
    "float16": (
        {"v_descale": stand(torch.float16, ())},
        TypeError,
        r"must be float32, got float16: pass v_descale.to\(torch.float32\)",
    ),
    "one a key": (
        {"v_descale": stand(shape=(2, 4, 5))}, ValueError, r"of v, \(2, 4\), got shape \(2, 4, 5\)"
    ),
    "a descale that learns": (
        {"v_descale": torch.ones((), device=DEVICE, requires_grad=True)},
        ValueError,
        r"v_descale requires a gradient, and .* has none: pass v_descale.detach\(\)",
    ),
    "a sparse descale": (
        {"v_descale": stand(shape=(2, 4)).to_sparse()}, TypeError, r"pass v_descale.to_dense\(\)"
    ),
    "a descale on meta": (
        {"v_descale": torch.ones((), device="meta")}, ValueError, "v_descale is on meta"
    ),
    "out_dtype": ({"out_dtype": torch.float32}, TypeError, "out_dtype must be float16, bfloat16"),
    "out_dtype without FP8": (
        {"v": stand(torch.float16), "out_dtype": torch.bfloat16},
        TypeError,
        "must be None or the dtype of q where v is not in FP8",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "kind", "message"), ERRORS.values(), ids=ERRORS)
def test_errors_say_what_came_and_what_to_pass(monkeypatch, changes, kind, message):
    operands = {"q": stand(torch.float16), "k": stand(torch.float16), "v": stand(E4M3)} | changes
    monkeypatch.setattr(operator, "attention_fp8_forward", lambda *_: pytest.fail("was launched"))
    with pytest.raises(kind, match=message):
        attention(**operands)


def test_a_device_without_8_bit_products_is_named(monkeypatch):
    class OnGPU:
        dtype, device = E4M3, DEVICE

    monkeypatch.setattr(runtime, "INTERPRETED", False)
    monkeypatch.setattr(runtime, "capability", lambda _: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "An old GPU")
    with pytest.raises(ValueError, match=r"An old GPU has compute capability 8\.0 and no FP8"):
        fp8.check_operands(OnGPU, OnGPU, OnGPU)
    monkeypatch.setattr(runtime, "capability", lambda _: (8, 9))
    fp8.check_operands(OnGPU, OnGPU, OnGPU)


def test_a_device_with_little_shared_memory_gets_a_smaller_configuration(monkeypatch):
    monkeypatch.setattr(runtime, "INTERPRETED", False)
    monkeypatch.setattr(runtime, "capability", lambda _: (9, 0))
    q = stand(E4M3, (1, 1, 1, 128))
    tiles = []
    for available in (232_448, 40_000):
        monkeypatch.setattr(runtime, "shared_memory", lambda _, bytes_=available: bytes_)
        tiles.append(tuned.fp8_config(q).block_m * tuned.fp8_config(q).block_n)
    assert tiles == sorted(set(tiles), reverse=True)
    monkeypatch.setattr(runtime, "shared_memory", lambda _: 5_000)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "A small GPU")
    with pytest.raises(ValueError, match="bytes of shared memory.*A small GPU: pass a smaller"):
        tuned.fp8_config(q)


# -- what only a GPU can show


@pytest.mark.usefixtures("gpu")
@FULL_AND_CAUSAL
@BOTH
@ALL_OR_V
@pytest.mark.parametrize("shape", [*SHAPES.values(), *LARGE.values()], ids=[*SHAPES, *LARGE])
def test_large_shapes(shape, q_dtype, dtype, is_causal):
    check(*prepare(*draw(*shape), q_dtype, dtype), is_causal)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("head_dim", [16, 24, 32, 64, 72, 80, 96, 128, 192, 256])
@ALL_OR_V
def test_every_head_dim(head_dim, q_dtype):
    check(*prepare(*draw(2, 4, 2, 260, 515, head_dim), q_dtype), is_causal=True)


@pytest.mark.usefixtures("gpu")
@FULL_AND_CAUSAL
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("length", [8192, 16384])
def test_sums_over_many_keys(length, head_dim, is_causal):
    """Sums that the product keeps in fewer bits than float32 are cut off, and drift.

    Values of one sign show it best. A tile's sum of 128 products is left to the hardware and errs
    by a quarter of what rounding does; sums over all keys must not be.
    """
    q, k, v = draw(1, 3, 3, 128, length, head_dim)
    operands, descales, meant = prepare(q, k, v.abs())
    check(operands, descales, meant, is_causal, rms_factor=1.35)
    out, lse = fp8.attention_fp8_forward(
        *operands, tuple(descales.values()), is_causal, head_dim**-0.5, torch.bfloat16, False
    )
    with pytest.raises(AssertionError, match="is over"):
        assert_every_head_close(operands[0], out, lse, meant, is_causal, rms_factor=5)


@pytest.mark.usefixtures("gpu")
@FULL_AND_CAUSAL
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("q_dtype", [E4M3, torch.bfloat16], ids=str)
def test_a_thousand_runs_agree(q_dtype, head_dim, is_causal):
    """A wait that does not cover all warps would show as a difference between runs."""
    operands, descales, _ = prepare(*draw(4, 16, 16, 1000, 1000, head_dim), q_dtype)
    out = attention(*operands, **descales, is_causal=is_causal)
    for _ in range(1000):
        assert torch.equal(attention(*operands, **descales, is_causal=is_causal), out)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("contiguous", ["head_dim", "seqlen"])
def test_more_than_2_to_the_31_elements_of_values(contiguous):
    q = torch.randn(2, 32, 128, 128, device=DEVICE)
    k, v = (
        torch.randn(2, 32, 2**18 + 3, 128, device=DEVICE, dtype=torch.bfloat16) for _ in range(2)
    )
    (q, k, v), descales, _ = prepare(q, k, v, contiguous=contiguous)
    out, lse = attention(q, k, v, **descales, return_lse=True)
    for part in ((slice(0, 1), slice(0, 1)), (slice(1, 2), slice(31, 32))):
        meant = [
            values(x[part], descales[f"{n}_descale"][part])
            for n, x in zip("qkv", (q, k, v), strict=True)
        ]
        assert_every_head_close(q, out[part], lse[part], meant)
