"""Rounding to 8 bits: every bit of what is stored and of its descale, against float64.

The rule is descale = max(abs(x)) / max(dtype) and stored = round(x / descale), with both quotients
rounded to float32 first. A quotient of float32 numbers in float64, rounded to float32, is the one
that is rounded once, because float64 has more than twice as many bits.
"""

import importlib

import pytest
import torch
from conftest import DEVICE, DTYPES
from strategies import LAYOUTS
from torch._subclasses.fake_tensor import FakeTensorMode

import kernelbook
from kernelbook import Quantized, attention, runtime
from kernelbook.ops.attention import tiles
from kernelbook.ops.launch import Launch

module = importlib.import_module("kernelbook.ops.attention.quantize")
quantize = kernelbook.quantize

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BOTH = pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
PER = pytest.mark.parametrize("per", ["head", "tensor"])
CONTIGUOUS = pytest.mark.parametrize("contiguous", ["head_dim", "seqlen"])
SHAPES = {
    "one": (1, 1, 1, 1),
    "one key": (2, 3, 1, 16),
    "one tile": (2, 2, 32, 16),
    "several tiles": (2, 3, 50, 17),
    "wide": (1, 2, 7, 300),
    "long": (1, 2, 300, 5),
}
LARGE = {
    "heads": ((4, 16, 4096, 128), torch.bfloat16),
    "heads in float16": ((4, 16, 4096, 128), torch.float16),
    "heads in float32": ((4, 16, 4096, 128), torch.float32),
    "1001": ((3, 7, 1001, 80), torch.bfloat16),
    "decoding": ((64, 32, 1, 128), torch.bfloat16),
    "256": ((1, 2, 5000, 256), torch.bfloat16),
    "5000": ((1, 2, 130, 5000), torch.bfloat16),
}


def rule(x, dtype=E4M3, per="head"):
    """What is to be stored, and its descale, by PyTorch in float64."""
    x = x.double()
    largest = torch.finfo(dtype).max
    amax = x.abs().amax((2, 3) if per == "head" else (0, 1, 2, 3), keepdim=True)
    descale = (amax / largest).float()
    descale = torch.where(descale == 0, 1.0, descale)
    stored = (x / descale.double()).float().clamp(-largest, largest).to(dtype)
    return stored, descale.view(x.shape[:2] if per == "head" else ())


def assert_same_bits(found, truth):
    """Compare the bits of 8-bit or 32-bit numbers. NaN may have any bits that mean it."""
    assert (found.shape, found.dtype) == (truth.shape, truth.dtype)
    is_nan = truth.float().isnan()
    assert torch.equal(found.float().isnan(), is_nan)
    bits = torch.uint8 if truth.itemsize == 1 else torch.int32
    same = found.contiguous().view(bits) == truth.contiguous().view(bits)
    assert (same | is_nan).all()


def assert_is_the_rule(x, dtype=E4M3, per="head", contiguous="head_dim"):
    found = quantize(x, dtype, per=per, contiguous=contiguous)
    truth = rule(x, dtype, per)
    assert_same_bits(found.stored, truth[0])
    assert_same_bits(found.descale, truth[1])
    assert tiles.fits(found.stored if contiguous == "head_dim" else found.stored.mT)
    return found


def of_many_sizes(*shape, dtype=torch.float32):
    """Heads of sizes from 1e-40 to 1e30, each with elements from its largest down to zero."""
    x = torch.randn(shape, device=DEVICE) * 2.0 ** -torch.randint(0, 20, shape, device=DEVICE)
    sizes = torch.tensor([1.0, 1e-3, 1e30, 1e-20, 1e-40, 1e-30], device=DEVICE)
    heads = torch.arange(shape[0] * shape[1], device=DEVICE) % len(sizes)
    x = x * sizes[heads].view(*shape[:2], 1, 1)
    x[..., ::7] = -0.0
    largest = torch.finfo(dtype).max
    return x.clamp(-largest, largest).to(dtype)


# -- the rule


@BOTH
@PER
@CONTIGUOUS
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_every_bit_is_the_rule(shape, contiguous, per, dtype):
    assert_is_the_rule(torch.randn(shape, device=DEVICE), dtype, per, contiguous)


@BOTH
@PER
@CONTIGUOUS
@pytest.mark.parametrize("x_dtype", DTYPES, ids=str)
def test_sizes_far_apart(x_dtype, contiguous, per, dtype):
    x = of_many_sizes(2, 3, 40, 20, dtype=x_dtype)
    stored, _ = assert_is_the_rule(x, dtype, per, contiguous)
    assert stored.float().isfinite().all()
    assert stored.float().abs().amax() == torch.finfo(dtype).max


@PER
@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_makes_all_that_shares_its_descale_nan(number, per):
    x = torch.randn(2, 3, 40, 20, device=DEVICE)
    x[1, 1, 33, 19] = number
    x[1, 1, 0, 0] = 0.0
    stored, descale = assert_is_the_rule(x, per=per, contiguous="seqlen")
    back = stored.double() * descale.double().reshape(*descale.shape, *[1] * (4 - descale.ndim))
    touched = torch.zeros(2, 3, dtype=torch.bool, device=DEVICE)
    touched[1, 1] = True
    assert back[touched].isnan().all()
    assert back.isnan().sum() == (20 * 40 if per == "head" else back.numel())


@BOTH
@PER
def test_zeros_have_a_descale_of_one(per, dtype):
    x = torch.zeros(2, 3, 40, 20, device=DEVICE)
    x[0, 1] = -0.0
    stored, descale = assert_is_the_rule(x, dtype, per)
    assert not stored.float().any()
    assert (descale == 1).all()


DIVISORS = [2.0**23, 2.0**24 - 1, 2.0**24 - 2, 2.0**23 + 1, 9 * 2.0**20, 15 * 2.0**20 + 1, 12345677]


@BOTH
@pytest.mark.parametrize("power", [-149, -130, -103, -102, -60, -23, 0, 60])
def test_quotients_beside_the_middle_of_two_numbers(power, dtype):
    """Where the last bit of the quotient decides which of two 8-bit numbers is stored."""
    largest = torch.finfo(dtype).max
    numbers = torch.arange(128, dtype=torch.uint8).view(dtype).double()
    numbers = numbers[numbers.isfinite()].sort().values
    middles = torch.cat([numbers, (numbers[1:] + numbers[:-1]) / 2])
    heads = []
    for divisor in DIVISORS:
        descale = torch.tensor(divisor * 2.0**power).double().float().double()
        near = (middles * descale).float()
        near = torch.cat([near, near.nextafter(torch.tensor(0.0)), near.nextafter(near * 2)])
        near = torch.cat([near, -near, (largest * descale).float()[None]])
        heads.append(near.clamp(-near[-1], near[-1]))
    x = torch.stack(heads)[None, ..., None].to(DEVICE)
    assert_is_the_rule(x, dtype)


@CONTIGUOUS
@pytest.mark.parametrize("layout", LAYOUTS)
def test_x_may_lie_anyhow(layout, contiguous):
    x = LAYOUTS[layout](torch.randn(2, 3, 40, 20, device=DEVICE))
    assert_is_the_rule(x, contiguous=contiguous)


@CONTIGUOUS
def test_x_is_read_where_it_lies(monkeypatch, contiguous):
    seen = []

    def watched(self, x, *rest, run=Launch.__call__):
        seen.append(x.data_ptr())
        run(self, x, *rest)

    monkeypatch.setattr(Launch, "__call__", watched)
    for x in (
        torch.randn(2, 40, 3, 20, device=DEVICE).transpose(1, 2),
        torch.randn(2, 3, 20, 40, device=DEVICE).mT,
        torch.randn(20, 3, 2, 40, device=DEVICE).permute(2, 1, 3, 0)[:, :, ::2],
        torch.randn(1, 3, 1, 20, device=DEVICE).expand(2, 3, 40, 20),
    ):
        before = x.clone()
        assert_is_the_rule(x, contiguous=contiguous)
        assert torch.equal(x, before)
        assert seen == [x.data_ptr()] * 2
        seen.clear()


@PER
@CONTIGUOUS
@pytest.mark.parametrize("shape", [(0, 2, 5, 16), (2, 0, 5, 16), (2, 2, 0, 16), (2, 2, 5, 0)])
def test_empty_tensors(shape, contiguous, per):
    stored, descale = quantize(torch.ones(shape, device=DEVICE), per=per, contiguous=contiguous)
    assert stored.shape == shape
    assert stored.dtype == E4M3
    assert descale.shape == (shape[:2] if per == "head" else ())
    assert (descale == 1).all()


@BOTH
@PER
@CONTIGUOUS
def test_pytorch_computes_the_same_where_no_kernel_can(monkeypatch, contiguous, per, dtype):
    x = of_many_sizes(2, 3, 40, 20)
    x[1, 2, 5, 5] = float("inf")
    monkeypatch.setattr(runtime, "INTERPRETED", False)
    monkeypatch.setattr(runtime, "capability", lambda _: (8, 6))
    monkeypatch.setattr(module, "_by_kernels", lambda *_: pytest.fail("a kernel was launched"))
    found = module._quantize(x, dtype, per == "head", contiguous == "seqlen")
    for ours, truth in zip(found, rule(x, dtype, per), strict=True):
        assert_same_bits(ours, truth)


@BOTH
@PER
def test_values_are_within_half_a_step(per, dtype):
    """What the rule is for: an error of half of the last place, and the largest number used."""
    x = torch.randn(2, 3, 50, 17, device=DEVICE)
    x *= torch.tensor([[1e-3], [1e3]], device=DEVICE)[..., None, None]
    stored, descale = quantize(x, dtype, per=per)
    factor = descale.double().reshape(*descale.shape, *[1] * (4 - descale.ndim))
    info = torch.finfo(dtype)
    sizes = torch.maximum(x.double().abs(), info.tiny * factor)  # below it steps no longer shrink
    assert ((stored.double() * factor - x).abs() <= info.eps / 2 * sizes * 1.0001).all()
    share = (2, 3) if per == "head" else (0, 1, 2, 3)
    assert (stored.float().abs().amax(share) == info.max).all()


# -- what PyTorch sees


def test_a_batch_of_calls_is_a_loop():
    x = torch.randn(3, 2, 3, 40, 20, device=DEVICE)
    for per in ("head", "tensor"):
        for contiguous in ("head_dim", "seqlen"):
            options = {"per": per, "contiguous": contiguous}
            found = torch.vmap(lambda x, options=options: quantize(x, **options), 1)(
                x.transpose(0, 1)
            )
            assert isinstance(found, Quantized)
            for i, call in enumerate(x):
                for ours, one in zip(found, quantize(call, **options), strict=True):
                    assert_same_bits(ours[i], one)


@PER
@CONTIGUOUS
@pytest.mark.parametrize("shape", [(2, 3, 40, 20), (2, 3, 0, 16)])
def test_fake_tensors_have_the_layout_of_real_ones(shape, contiguous, per):
    real = quantize(torch.ones(shape, device=DEVICE), per=per, contiguous=contiguous)
    with FakeTensorMode() as mode:
        x = mode.from_tensor(torch.ones(shape, device=DEVICE))
        fake = quantize(x, per=per, contiguous=contiguous)
    for ours, one in zip(fake, real, strict=True):
        assert (ours.shape, ours.stride(), ours.dtype) == (one.shape, one.stride(), one.dtype)


def test_compiled_functions_may_call_it():
    def function(q, k, v):
        v = quantize(v, contiguous="seqlen")
        return attention(quantize(q), quantize(k), v) * 2

    operands = torch.randn(3, 1, 2, 20, 16, device=DEVICE)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*operands), function(*operands))


def test_what_learns_may_be_quantised():
    x = torch.randn(1, 2, 20, 16, device=DEVICE, requires_grad=True)
    assert not any(y.requires_grad for y in quantize(x))


# -- errors

ERRORS = {
    "a list": (([1.0],), {}, TypeError, "x must be a torch.Tensor, got list"),
    "float64": ((torch.ones(1, 1, 1, 16).double(),), {}, TypeError, r"pass x.to\(torch.float32\)"),
    "int8": ((torch.ones(1, 1, 1, 16), torch.int8), {}, TypeError, "dtype must be float8_e4m3fn"),
    "two dimensions": ((torch.ones(2, 16),), {}, ValueError, r"got shape \(2, 16\)"),
    "sparse": ((torch.ones(1, 1, 1, 16).to_sparse(),), {}, TypeError, r"pass x.to_dense\(\)"),
    "nested": (
        (torch.nested.nested_tensor([torch.ones(1, 1, 16)], layout=torch.jagged),),
        {},
        TypeError,
        "x must be a dense tensor, got a nested tensor",
    ),
    "per": (
        (torch.ones(1, 1, 1, 16),),
        {"per": "row"},
        ValueError,
        "per must be one of 'head', 'tensor', got 'row'",
    ),
    "contiguous": (
        (torch.ones(1, 1, 1, 16),),
        {"contiguous": "keys"},
        ValueError,
        "contiguous must be one of 'head_dim', 'seqlen', got 'keys'",
    ),
}


@pytest.mark.parametrize(("arguments", "options", "kind", "message"), ERRORS.values(), ids=ERRORS)
def test_it_says_what_came_and_what_to_pass(arguments, options, kind, message):
    with pytest.raises(kind, match=message):
        quantize(*arguments, **options)


# -- the pair as an operand


def operands():
    q, k, v = torch.randn(3, 2, 4, 40, 32, device=DEVICE)
    return quantize(q), quantize(k[:, ::2]), quantize(v[:, ::2], contiguous="seqlen")


def test_attention_takes_the_pair():
    q, k, v = operands()
    options = {"enable_gqa": True, "return_lse": True}
    descales = {"q_descale": q.descale, "k_descale": k.descale, "v_descale": v.descale}
    expected = attention(q.stored, k.stored, v.stored, **descales, **options)
    assert expected[0].abs().amax() > 0.1
    for arguments, rest in (
        ((q, k, v), {}),
        ((q, k.stored, v), {"k_descale": k.descale}),
        ((), {"query": q, "key": k, "value": v}),
    ):
        found = attention(*arguments, **rest, **options)
        assert all(torch.equal(ours, one) for ours, one in zip(found, expected, strict=True))


def test_v_alone_may_be_a_pair():
    q, k, v = operands()
    q, k = q.stored.bfloat16(), k.stored.bfloat16()
    found = attention(q, k, v, enable_gqa=True)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, attention(q, k, v.stored, v_descale=v.descale, enable_gqa=True))


def test_a_pair_without_a_descale_has_one_of_one():
    q, k, v = operands()
    found = attention(q, k, Quantized(v.stored, None), enable_gqa=True)
    assert torch.equal(found, attention(q, k, v.stored, enable_gqa=True))


def test_a_batch_of_calls_may_pass_pairs():
    q, k, v = torch.randn(3, 3, 1, 2, 20, 16, device=DEVICE)

    def one(q, k, v):
        return attention(quantize(q), quantize(k), quantize(v, contiguous="seqlen"))

    expected = torch.stack([one(*call) for call in zip(q, k, v, strict=True)])
    assert torch.equal(torch.vmap(one)(q, k, v), expected)


PAIR_ERRORS = {
    "two descales": (
        lambda q, k, v: attention(q, k, v, enable_gqa=True, k_descale=k.descale),
        ValueError,
        "k is Quantized and brings its descale, got k_descale as well: leave k_descale out",
    ),
    "a tuple": (
        lambda q, k, v: attention(tuple(q), k, v, enable_gqa=True),
        TypeError,
        "q must be a torch.Tensor, got tuple",
    ),
    "16 bits": (
        lambda q, k, v: attention(q, k, Quantized(v.stored.half(), v.descale), enable_gqa=True),
        TypeError,
        "v must be in FP8 where q and k are, got float16",
    ),
    "a descale of another shape": (
        lambda q, k, v: attention(q, k, Quantized(v.stored, v.descale[:1]), enable_gqa=True),
        ValueError,
        r"v_descale must have one element or one for each \(batch, head\) of v, \(2, 2\), got",
    ),
}


@pytest.mark.parametrize(("call", "kind", "message"), PAIR_ERRORS.values(), ids=PAIR_ERRORS)
def test_pairs_that_cannot_be_are_refused(call, kind, message):
    with pytest.raises(kind, match=message):
        call(*operands())


# -- what only a GPU can show


@pytest.mark.usefixtures("gpu")
@BOTH
@PER
@CONTIGUOUS
@pytest.mark.parametrize(("shape", "x_dtype"), LARGE.values(), ids=LARGE)
def test_large_shapes(shape, x_dtype, contiguous, per, dtype):
    x = torch.randn(shape, device=DEVICE, dtype=x_dtype)
    x *= torch.logspace(-3, 3, shape[1], device=DEVICE).view(-1, 1, 1).to(x_dtype)
    assert_is_the_rule(x, dtype, per, contiguous)


@pytest.mark.usefixtures("gpu")
@CONTIGUOUS
def test_a_hundred_runs_agree(contiguous):
    """An atomic maximum that came too late would show as another descale."""
    x = torch.randn(4, 16, 1000, 128, device=DEVICE, dtype=torch.bfloat16)
    first = quantize(x, per="tensor", contiguous=contiguous)
    for _ in range(100):
        again = quantize(x, per="tensor", contiguous=contiguous)
        for ours, one in zip(again, first, strict=True):
            assert_same_bits(ours, one)


@pytest.mark.usefixtures("gpu")
@CONTIGUOUS
@pytest.mark.parametrize("transposed", [False, True])
def test_more_than_2_to_the_31_elements(transposed, contiguous):
    x = torch.randn(2, 2**22 + 3, 2, 128, device=DEVICE, dtype=torch.bfloat16).transpose(1, 2)
    if transposed:  # whose columns lie 2^23 elements apart
        x = x.permute(1, 3, 0, 2).contiguous().permute(2, 0, 3, 1)
    stored, descale = quantize(x, contiguous=contiguous)
    assert torch.equal(descale, x.abs().amax((2, 3)).float() / torch.tensor(448.0, device=DEVICE))
    for keys in (slice(0, 100), slice(2**21, 2**21 + 100), slice(-100, None)):
        part = x[:, :, keys].float() / descale[..., None, None]
        assert_same_bits(stored[:, :, keys], part.clamp(-448, 448).to(E4M3))
