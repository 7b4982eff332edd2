"""The libraries that attention is timed beside: all compute the same, or say why they do not."""

import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from kernelbook import lab
from kernelbook.lab import attention_bench
from kernelbook.lab.schema import evaluate

EAGER = {"backend": "eager"}


@pytest.fixture
def flash_attention(monkeypatch):
    """A library that stands for FlashAttention: (batch, seqlen, heads, head_dim), and lse."""

    def flash_attn_func(q, k, v, causal=False):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return out.transpose(1, 2), None

    interface = SimpleNamespace(flash_attn_func=flash_attn_func)
    for name in ("flash_attn", "flash_attn.cute", "flash_attn.cute.interface"):
        monkeypatch.setitem(sys.modules, name, interface)
    return interface


@pytest.fixture
def eager(monkeypatch):
    """What is compiled runs operation by operation: no compiler for the CPU is needed."""
    whole = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda function, **options: whole(function, **options | EAGER)
    )


def inputs(dtype=torch.float32):
    q, k, v = torch.randn(3, 1, 2, 24, 16).to(dtype).unbind()
    return q, k, v


@pytest.mark.parametrize("is_causal", [False, True])
def test_every_library_computes_the_same_attention(flash_attention, eager, is_causal):
    qkv = inputs()
    truth = F.scaled_dot_product_attention(*(x.double() for x in qkv), is_causal=is_causal)
    runs = attention_bench.libraries(qkv, is_causal)
    assert tuple(runs) == attention_bench.LIBRARIES
    ran = {name: run for name, run in runs.items() if not isinstance(run, lab.Absent)}
    assert {"SDPA flash", "FlexAttention", "FlashAttention"} <= set(ran)
    for name, run in ran.items():
        out = run()
        if name == "FlashAttention":
            out = out[0].transpose(1, 2)
        assert out.isfinite().all()
        torch.testing.assert_close(out.double(), truth, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("is_causal", [False, True])
def test_with_the_gradient_of_the_output_the_backward_pass_is_timed(
    flash_attention, eager, monkeypatch, is_causal
):
    def flexible(q, k, v, block_mask):  # FlexAttention has no backward pass on a CPU
        return F.scaled_dot_product_attention(q, k, v, is_causal=block_mask is not None)

    monkeypatch.setattr("torch.nn.attention.flex_attention.flex_attention", flexible)
    qkv, do = tuple(x.requires_grad_() for x in inputs()), torch.randn(1, 2, 24, 16)
    doubles = [x.detach().double().requires_grad_() for x in qkv]
    out = F.scaled_dot_product_attention(*doubles, is_causal=is_causal)
    truth = torch.autograd.grad(out, doubles, do.double())
    runs = attention_bench.libraries(qkv, is_causal, do)
    for name in ("SDPA flash", "FlexAttention", "FlashAttention"):
        for _ in range(2):  # a timer calls it again and again
            found = runs[name]()
        for ours, theirs in zip(found, truth, strict=True):
            ours = ours.transpose(1, 2) if name == "FlashAttention" else ours
            torch.testing.assert_close(ours.double(), theirs, atol=1e-5, rtol=1e-4)


def test_a_rule_of_its_own_reaches_flex_attention(eager):
    qkv = inputs()
    run = attention_bench.flex(qkv, sees=lambda b, h, i, j: (i >= j) & (i - j <= 3))
    ones = torch.ones(24, 24, dtype=torch.bool)
    seen = ones.tril() & ones.triu(-3)
    truth = F.scaled_dot_product_attention(*qkv, attn_mask=seen)
    torch.testing.assert_close(run(), truth, atol=1e-6, rtol=1e-5)


def test_a_library_that_is_absent_or_refuses_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    absent = attention_bench.flash(inputs(), causal=True)
    assert isinstance(absent, lab.Absent)
    assert "flash_attn" in absent.reason
    q, k, v = inputs()
    refused = attention_bench.sdpa("FLASH_ATTENTION", (q.double(), k, v))
    assert isinstance(refused, lab.Absent)
    assert refused.reason.startswith("torch refuses some inputs: ")


def test_a_mistake_of_ours_is_raised(flash_attention):
    with pytest.raises(RuntimeError, match="the book's own call of flash_attn.cute.interface"):
        attention_bench.flash(inputs(), is_causal=True)  # theirs is called causal


def test_points_have_the_same_tokens_and_width():
    found = attention_bench.points([1024, 16384], (64, 128))
    assert len({tuple(point.items()) for point in found}) == 8
    for point in found:
        assert point["batch"] * point["seqlen"] == 16384
        assert point["heads"] * point["head_dim"] == 2048
        scores = point["batch"] * point["heads"] * point["seqlen"] ** 2
        flops = scores * 4 * point["head_dim"] * {"full": 1, "causal": 0.5}[point["mask"]]
        assert evaluate(attention_bench.FORWARD["work"], point) == flops
        assert evaluate(attention_bench.BACKWARD["work"], point) == 2.5 * flops


def test_a_copy_moves_each_byte_twice(monkeypatch):
    monkeypatch.setattr(attention_bench, "matmul", lambda: None)
    monkeypatch.setattr(attention_bench, "event_times", lambda run: [1.0, 2.0, 30.0])
    moved, flops = 2 * 2**30 / 2e-3, 2 * 8192**3 / 2e-3
    assert attention_bench.balance() == [
        {
            "matmul, TFLOP/s": round(flops / 1e12),
            "copy, GB/s": round(moved / 1e9),
            "FLOPs per byte": round(flops / moved),
        }
    ]


def test_a_step_of_a_ladder_is_told_with_both_masks():
    rates = {("a", "causal"): 100.0, ("a", "full"): 200.0}
    rates |= {("b", "causal"): 110.0, ("b", "full"): 199.0}
    sweep = SimpleNamespace(rate=lambda name, mask: rates[name, mask])
    assert attention_bench.step(sweep, "a", "b") == (
        "**Measured:** With a causal mask it gains 10 % (100 → 110 TFLOP/s), without one it "
        "changes next to nothing (200 → 199 TFLOP/s). "
    )
    assert attention_bench.verdict(-0.2) == "loses 20 %"
    assert attention_bench.verdict(float("nan")) == "nan"
