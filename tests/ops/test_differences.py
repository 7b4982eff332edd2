"""The table "What differs from PyTorch" of docs/api.md: each row is run on both sides.

A row without its test here, or a test without its row, is a failure too.
"""

import re
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad

from kernelbook import attention, dropout, layer_norm, quantize, runtime, seeded_dropout, softmax

PAGE = Path(__file__).parents[2] / "docs" / "api.md"
ROWS = {}
randn = partial(torch.randn, device=runtime.DEVICE)


def row(function, what):
    """Register a test as that of one row."""

    def register(test):
        ROWS[function, what] = test
        return test

    return register


def refused(call, match=None, error=(TypeError, ValueError)):
    with pytest.raises(error, match=match):
        call()


def everywhere(x):
    """Return a call of each operator on (1, 1, 2, 16) numbers."""
    return (
        lambda: softmax(x),
        lambda: layer_norm(x, 16),
        lambda: dropout(x),
        lambda: attention(x, x, x),
    )


def operands(*shape):
    return [randn(shape or (1, 2, 5, 16)) for _ in range(3)]


@pytest.fixture
def x():
    return randn(4, 16)


@row("all", "float64")
def _float64():
    for call in everywhere(randn(1, 1, 2, 16).double()):
        refused(call, "must be float32")


@row("all", "forward mode")
def _forward_mode():
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(randn(1, 1, 2, 16), randn(1, 1, 2, 16))
        for call in everywhere(dual):
            refused(call, "jvp", NotImplementedError)


@row("all", "sparse tensors")
def _sparse():
    for call in everywhere(randn(1, 1, 2, 16).to_sparse()):
        refused(call, "must be a dense tensor")


@row("all", "nested tensors")
def _nested():
    with warnings.catch_warnings(action="ignore"):  # that they are a prototype
        nested = torch.nested.nested_tensor([randn(2, 16), randn(3, 16)])
    for call in everywhere(nested):
        refused(call, "must be a dense tensor, got a nested tensor")


@row("softmax", "dim left out")
def _default_dim(x):
    refused(lambda: torch.softmax(x))
    assert torch.equal(softmax(x), softmax(x, 1))


@row("softmax", "dim=None")
def _no_dim(x):
    refused(lambda: torch.softmax(x, None), error=(TypeError, RuntimeError))
    refused(lambda: softmax(x, None), "dim must be an int")


@row("softmax", "dtype")
def _softmax_dtype(x):
    assert torch.softmax(x, -1, dtype=torch.float64).dtype == torch.float64
    refused(lambda: softmax(x, -1, dtype=torch.float64), "dtype")


@row("softmax", "out")
def _softmax_out(x):
    torch.softmax(x, -1, out=torch.zeros_like(x))
    refused(lambda: softmax(x, -1, out=torch.zeros_like(x)), "out")


@row("softmax", "layout of the result")
def _softmax_layout():
    x = randn(2, 3, 4)
    assert torch.softmax(x, 1).stride() == (12, 4, 1)
    assert softmax(x, 1).stride() == (12, 1, 3)


@row("layer_norm", "an int as normalized_shape")
def _int_shape(x):
    refused(lambda: F.layer_norm(x, 16))
    assert torch.equal(layer_norm(x, 16), layer_norm(x, (16,)))


@row("layer_norm", "a negative eps")
def _negative_eps(x):
    assert F.layer_norm(x, (16,), eps=-100.0).isnan().all()
    refused(lambda: layer_norm(x, 16, eps=-100.0), "eps must lie in")


@row("dropout", "p=1")
def _all_dropped(x):
    assert not F.dropout(x, 1.0).any()
    refused(lambda: dropout(x, 1.0), "below 1")


@row("dropout", "inplace")
def _inplace(x):
    assert F.dropout(x, 0.0, True, True) is x
    refused(lambda: dropout(x, 0.0, True, True))
    refused(lambda: dropout(x, inplace=True), "inplace")


@row("dropout", "layout of the result")
def _dropout_layout(x):
    assert F.dropout(x.t()).stride() == (1, 16)
    assert dropout(x.t()).stride() == (4, 1)


@row("dropout", "the mask of a seed")
def _another_mask():
    ones = torch.ones(1000, device=runtime.DEVICE)
    masks = []
    for function in (F.dropout, dropout):
        torch.manual_seed(5)
        masks.append(function(ones))
    assert not torch.equal(*masks)
    flat = seeded_dropout(ones, 0.5, 5)
    assert torch.equal(seeded_dropout(ones.view(10, 100), 0.5, 5).view(-1), flat)


@row("attention", "is_causal where lengths differ")
def _alignment():
    q, k, v = operands()
    q = q[:, :, :2]
    ours = attention(q, k, v, is_causal=True)
    for diagonal, differs in ((0, True), (3, False)):  # top left as PyTorch has it, bottom right
        seen = torch.ones(2, 5, dtype=torch.bool, device=q.device).tril(diagonal)
        theirs = F.scaled_dot_product_attention(q, k, v, seen)
        assert ((ours - theirs).abs().max() > 0.01) == differs
        if differs:
            aligned = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            torch.testing.assert_close(aligned, theirs)


def no_keyword(name, value):
    q, k, v = operands()
    F.scaled_dot_product_attention(q, k, v, **{name: value})
    refused(lambda: attention(q, k, v, **{name: value}), name)


row("attention", "attn_mask")(lambda: no_keyword("attn_mask", randn(5, 5)))
row("attention", "dropout_p")(lambda: no_keyword("dropout_p", 0.5))


@row("attention", "arguments after value")
def _by_keyword():
    q, k, v = operands()
    F.scaled_dot_product_attention(q, k, v, None)
    refused(lambda: attention(q, k, v, None), "positional arguments")


def torch_alone(q, k, v, match, **options):
    """What PyTorch computes, and what is refused here."""
    assert F.scaled_dot_product_attention(q, k, v, **options).isfinite().all()
    refused(lambda: attention(q, k, v, **options), match)


row("attention", "3 dimensions")(lambda: torch_alone(*operands(2, 5, 16), "must be \\(batch"))


@row("attention", "a batch to broadcast")
def _broadcast():
    q, k, v = operands(2, 2, 5, 16)
    torch_alone(q, k[:1], v[:1], "expand the batch")


@row("attention", "values of another size")
def _other_values():
    q, k, v = operands(1, 2, 5, 32)
    torch_alone(q, k, v[..., :16], "v must have the shape of k")


@row("attention", "head_dim below 16 or above 256")
def _head_dims():
    for head_dim in (8, 264):
        torch_alone(*operands(1, 1, 3, head_dim), "head_dim")


@row("attention", "scale=0 and below")
def _scales():
    for scale in (0.0, -1.0):
        torch_alone(*operands(), "scale must lie in", scale=scale)


@row("attention", "layout of the result")
def _attention_layout():
    q, k, v = (x.transpose(1, 2) for x in operands(1, 5, 2, 16))
    assert attention(q, k, v).stride() == q.stride()
    if runtime.INTERPRETED:
        assert F.scaled_dot_product_attention(q, k, v).stride() == q.stride()


@row("attention", "second derivative")
def _second_derivative():
    q, k, v = operands()
    q.requires_grad_()
    (dq,) = torch.autograd.grad(attention(q, k, v).sum(), q, create_graph=True)
    refused(lambda: dq.sum().backward(), "differentiated once", RuntimeError)


@row("attention", "operands in FP8")
def _fp8():
    q, k, v = (x.half() for x in operands())
    stored, descale = quantize(v, contiguous="seqlen")
    if not runtime.INTERPRETED and runtime.capability(q.device) < (8, 9):
        refused(lambda: attention(q, k, stored, v_descale=descale), "no FP8 products")
        return
    out = attention(q.requires_grad_(), k, stored, v_descale=descale)
    refused(lambda: F.scaled_dot_product_attention(q, k, stored), error=RuntimeError)
    refused(lambda: out.sum().backward(), "has no gradient", RuntimeError)


@pytest.mark.parametrize("test", ROWS.values(), ids=map(": ".join, ROWS))
def test_row(test, request):
    test(*([request.getfixturevalue("x")] if test.__code__.co_argcount else []))


def test_every_row_is_run_and_none_is_missing():
    lines = PAGE.read_text(encoding="utf-8").split("What differs from PyTorch")[1].splitlines()
    rows = [line.replace("`", "").strip("| ").split(" | ") for line in lines if line[:1] == "|"]
    assert {tuple(cells[:2]) for cells in rows[2:]} == set(ROWS)
    assert len(rows) - 2 == len(ROWS)
    assert all(re.search(r"\w", cell) for cells in rows[2:] for cell in cells)


def test_pytorchs_keywords_and_order_are_taken(x):
    assert torch.equal(softmax(input=x, dim=0), softmax(x, 0))
    weight, bias = randn(16), randn(16)
    ours = layer_norm(x, (16,), weight, bias, 0.1)
    named = {"normalized_shape": (16,), "weight": weight, "bias": bias, "eps": 0.1}
    assert torch.equal(layer_norm(input=x, **named), ours)
    torch.testing.assert_close(F.layer_norm(x, (16,), weight, bias, 0.1), ours)
    assert dropout(x, 0.5, False) is dropout(input=x, p=0.5, training=False) is x
    q, k, v = operands()
    assert torch.equal(attention(query=q, key=k, value=v), attention(q, k, v))
    refused(lambda: softmax(x, input=x), "multiple values for argument 'x'")
    refused(lambda: softmax(x=x, input=x), "both input and x")
