"""Which kernel computes attention in FP8: the choice on made-up GPUs, and what is refused."""

import sys

import pytest
import torch
from conftest import DEVICE
from test_attention_fp8 import E4M3, E5M2, draw, prepare
from test_choice import HOPPER, seeing, shapes

from kernelbook import Quantized, attention, runtime
from kernelbook.ops.attention import fp8, operator
from kernelbook.ops.hopper import choice, fp8_choice
from kernelbook.ops.hopper.fp8_choice import CHOICES, CONFIGS

ASKED = fp8_choice.fp8_choice


@pytest.fixture
def interpreted():
    """Skip on a GPU, where no kernel runs as if it were another."""
    if not runtime.INTERPRETED:
        pytest.skip("pretends to run on another GPU")


@pytest.fixture
def pretended(monkeypatch, interpreted):
    """A Hopper GPU that is not there. What runs is plain; the value says which kernel was meant,
    and what it got."""
    ran, plain = [], fp8.attention_fp8_forward

    def in_gluon(q, k, v, descales, is_causal, sm_scale, out_dtype, window, config):
        ran.append(("gluon", config, descales, v.stride()))
        return plain(q, k, v, descales, is_causal, sm_scale, out_dtype, window=window)

    def in_triton(q, k, v, descales, *options, **window):
        ran.append(("triton", None, descales, v.stride()))
        return plain(q, k, v, descales, *options, **window)

    monkeypatch.setattr(runtime, "capability", lambda device: HOPPER)
    monkeypatch.setattr(fp8_choice, "attention_in_gluon", lambda: in_gluon)
    monkeypatch.setattr(operator, "attention_fp8_forward", in_triton)
    return ran


@pytest.fixture
def to_30_keys(monkeypatch):
    rows = ((30, CONFIGS[64]), (float("inf"), None))
    monkeypatch.setattr(fp8_choice, "CHOICES", dict.fromkeys(CHOICES, rows))


def small(seqlen_k=30, head_dim=64, **how):
    return prepare(*draw(2, 4, 2, 20, seqlen_k, head_dim), **how)[:2]


def kernels(pretended):
    return [name for name, *_ in pretended]


# -- the table


def test_gluon_is_taken_where_it_was_faster_and_nowhere_else():
    """Each row of the table at its last length, and the first behind it."""
    fast = set()
    for (head_dim, mask), rows in CHOICES.items():
        lengths = [most for most, _ in rows]
        assert lengths == sorted(set(lengths))
        assert lengths[-1] == float("inf")
        for keys in (2, 1024, 2048, 2049, 4096, 2**20):
            length, options = seeing(keys, mask)
            chosen = ASKED(HOPPER, E4M3, E5M2, *shapes(head_dim, length), **options)
            assert (chosen.backend == "gluon") == (chosen.config is not None)
            if mask == "window":  # no chapter times one with operands in FP8
                assert chosen.reason == "not measured with such a mask: window"
            else:
                assert f"measured to be faster for {keys:,} keys, {mask}" in chosen.reason
            if chosen.config:
                fast.add((head_dim, mask, keys))
                assert chosen.config is CONFIGS[head_dim]
            options["backend"] = "gluon"
            named = ASKED(HOPPER, E4M3, E4M3, *shapes(head_dim, length), **options)
            assert (named.backend, named.config) == ("gluon", CONFIGS[head_dim])
    assert fast == {(128, "causal", keys) for keys in (2, 1024, 2048)}


WHY_NOT = {
    "the interpreter": ((0, 0), E4M3, E4M3, 128, "interpreter"),
    "RTX 4090": ((8, 9), E4M3, E4M3, 128, "compute capability 8.9 is not 9.0"),
    "B200": ((10, 0), E4M3, E4M3, 128, "compute capability 10.0"),
    "v alone": (HOPPER, torch.bfloat16, E4M3, 128, "q is bfloat16, and the kernel multiplies 8"),
    "q and k alone": (HOPPER, E4M3, torch.float16, 128, "v is float16, and the kernel"),
    "head_dim 32": (HOPPER, E5M2, E4M3, 32, "head_dim is 32, and not 64 or 128"),
    "head_dim 256": (HOPPER, E4M3, E4M3, 256, "head_dim is 256"),
}


@pytest.mark.parametrize(
    ("capability", "q_dtype", "v_dtype", "head_dim", "words"), WHY_NOT.values(), ids=WHY_NOT
)
def test_where_it_cannot_run_the_plain_kernel_does(capability, q_dtype, v_dtype, head_dim, words):
    sizes = shapes(head_dim, 1024)
    chosen = ASKED(capability, q_dtype, v_dtype, *sizes, True)
    assert (chosen.backend, chosen.config) == ("triton", None)
    assert words in chosen.reason
    with pytest.raises(ValueError, match=f"backend must be 'auto' or 'triton'.*{words}"):
        ASKED(capability, q_dtype, v_dtype, *sizes, True, backend="gluon")


def test_a_triton_without_a_name_that_the_kernel_imports_runs_the_plain_one(monkeypatch):
    monkeypatch.setitem(sys.modules, "kernelbook.ops.hopper.fp8", None)
    fp8_choice._attention_in_gluon.cache_clear()
    ASKED.cache_clear()
    try:
        chosen = ASKED(HOPPER, E4M3, E4M3, *shapes(128, 1024), True)
    finally:
        fp8_choice._attention_in_gluon.cache_clear()
        ASKED.cache_clear()
    assert chosen.backend == "triton"
    assert "lacks a part of Gluon" in chosen.reason


# -- what runs


@pytest.mark.usefixtures("to_30_keys")
@pytest.mark.parametrize(
    ("options", "seqlen_k", "expected"),
    [
        ({}, 30, "gluon"),
        ({}, 31, "triton"),
        ({"is_causal": True}, 30, "gluon"),
        ({"window": (20, 9)}, 40, "gluon"),
        ({"window": (20, 10)}, 40, "triton"),
        ({"backend": "triton"}, 30, "triton"),
        ({"backend": "gluon"}, 40, "gluon"),
        ({"out_dtype": torch.float16}, 30, "gluon"),
    ],
)
def test_attention_runs_what_was_chosen(pretended, options, seqlen_k, expected):
    operands, descales = small(seqlen_k)
    out = attention(*operands, **descales, enable_gqa=True, **options)
    assert kernels(pretended) == [expected]
    assert pretended[0][1] == (CONFIGS[64] if expected == "gluon" else None)
    assert out.dtype == options.get("out_dtype", torch.bfloat16)
    again = {**options, "backend": "triton"}
    assert torch.equal(out, attention(*operands, **descales, enable_gqa=True, **again))
    assert kernels(pretended[1:]) == ["triton"]


@pytest.mark.usefixtures("to_30_keys")
@pytest.mark.parametrize("per", ["head", "tensor"])
def test_descales_pairs_and_layouts_reach_it(pretended, per):
    (q, k, v), descales = small(per=per, contiguous="head_dim")
    expected = attention(q, k, v, **descales, enable_gqa=True, backend="triton")
    pairs = [Quantized(x, descales[f"{n}_descale"]) for n, x in zip("qkv", (q, k, v), strict=True)]
    with torch.no_grad(), torch.autocast(DEVICE.type, torch.bfloat16):
        for operands in ([q, k, v], pairs):
            named = descales if operands[0] is q else {}
            assert torch.equal(attention(*operands, **named, enable_gqa=True), expected)
    assert kernels(pretended)[1:] == ["gluon"] * (len(pretended) - 1)
    for _, _, got, strides in pretended[1:]:
        passed = [descales[f"{n}_descale"] for n in "qkv"]
        assert all(torch.equal(x, y) for x, y in zip(got, passed, strict=True))
        assert strides == v.stride()
    attention(q, k, v.mT.contiguous().mT, enable_gqa=True)
    assert pretended[-1][0] == "gluon"
    assert pretended[-1][2] == (None, None, None)


@pytest.mark.usefixtures("to_30_keys")
def test_compilers_and_batches_run_it_too(pretended):
    (q, k, v), descales = small()
    q, k, v = q[:, :2], k, v
    descales = {**descales, "q_descale": descales["q_descale"][:, :2]}
    expected = attention(q, k, v, **descales, backend="triton")

    def call(q, k, v, **options):
        return attention(q, k, v, **options, backend="gluon")

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, k, v, **descales), expected)

    def one(q, k, v, *of):
        of = dict(zip(descales, (x[None] for x in of), strict=True))
        return call(q[None], k[None], v[None], **of)[0]

    assert torch.equal(torch.func.vmap(one)(q, k, v, *descales.values()), expected)
    assert kernels(pretended) == ["triton", "gluon", "gluon"]


# -- what is refused


def empty(of):
    operands, descales = small()
    operands = list(operands)
    operands[of] = operands[of][:, :, :0]
    if of:
        operands[1:] = [x[:, :, :0] for x in operands[1:]]
    return operands, descales


REFUSED = {
    "v alone": (lambda: small(q_dtype=torch.float16), "q is float16, and the kernel multiplies 8"),
    "head_dim": (lambda: small(head_dim=32), "head_dim is 32"),
    "no keys": (lambda: empty(1), "k is empty"),
    "no queries": (lambda: empty(0), "q is empty"),
}


@pytest.mark.parametrize(("make", "message"), REFUSED.values(), ids=REFUSED)
def test_gluon_is_refused_before_anything_runs(pretended, make, message):
    operands, descales = make()
    with pytest.raises(ValueError, match=f"backend must be .* got 'gluon': {message}"):
        attention(*operands, **descales, enable_gqa=True, backend="gluon")
    assert pretended == []
    for other in ("auto", "triton"):
        attention(*operands, **descales, enable_gqa=True, backend=other)
    assert "gluon" not in kernels(pretended)


def test_the_interpreter_refuses_gluon(interpreted):
    operands, descales = small()
    with pytest.raises(ValueError, match="got 'gluon': kernels run in Triton's interpreter"):
        attention(*operands, **descales, enable_gqa=True, backend="gluon")
    assert choice.BACKENDS == ("auto", "triton", "gluon")
