"""Packed sequences in Gluon, on a Hopper GPU: each is attention by itself."""

import pytest
import torch
from conftest import DEVICE
from test_attention_varlen import LARGE, LENGTHS, SCOPES, WRONG, check, draw, packing, results
from test_hopper import SIXTEEN_BITS

from kernelbook import attention_varlen, runtime
from kernelbook.ops import launch
from kernelbook.ops.hopper import backward_choice, choice

EVERY_SCOPE = pytest.mark.parametrize("scope", SCOPES.values(), ids=SCOPES)
HEAD_DIMS = pytest.mark.parametrize("head_dim", [64, 128])
AROUND = [0, 1, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257]


@pytest.fixture(autouse=True)
def in_gluon(monkeypatch):
    """Run the Gluon kernels whatever mask there is, and skip where they cannot."""
    if runtime.INTERPRETED:
        pytest.skip("needs a Hopper GPU")
    reason = choice.unsupported(runtime.capability(DEVICE), torch.float16, 128)
    if reason or choice.varlen_in_gluon()[1]:
        pytest.skip(reason or choice.varlen_in_gluon()[1])
    for table, configs in (
        (choice.VARLEN, choice.VARLEN_DEFAULTS),
        (backward_choice.VARLEN, backward_choice.CONFIGS),
    ):
        for (head_dim, mask), rows in table.items():
            always = tuple((most, config or configs[head_dim]) for most, config in rows)
            monkeypatch.setitem(table, (head_dim, mask), always)
    module, ran = choice.varlen_in_gluon()[0], []
    for name in ("attention_varlen_forward", "attention_varlen_backward"):
        function = getattr(module, name)

        def noting(*args, function=function):
            ran.append(function)
            return function(*args)

        monkeypatch.setattr(module, name, noting)
    launch.forget()
    yield
    launch.forget()
    assert ran


@EVERY_SCOPE
@HEAD_DIMS
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_packed_attention_is_the_truth(lengths, head_dim, scope):
    check(*draw(*lengths, head_dim=head_dim, dtype=torch.float16), lengths, **scope)


@EVERY_SCOPE
@HEAD_DIMS
@pytest.mark.parametrize("dtype", SIXTEEN_BITS, ids=str)
@pytest.mark.parametrize("lengths", LARGE.values(), ids=LARGE)
def test_large_shapes(lengths, dtype, head_dim, scope):
    check(*draw(*lengths, head_dim=head_dim, dtype=dtype), lengths, **scope)


@EVERY_SCOPE
@HEAD_DIMS
def test_every_length_around_a_tile(head_dim, scope):
    lengths_q = [a for a in AROUND for _ in (0, 1, 2)]
    lengths_k = [b for a in AROUND for b in (a, max(a - 1, 0), a + 33)]
    check(
        *draw(lengths_q, lengths_k, head_dim=head_dim, dtype=torch.float16),
        (lengths_q, lengths_k), **scope,
    )  # fmt: skip


@EVERY_SCOPE
@HEAD_DIMS
def test_grouped_heads_and_gradients_of_lse(head_dim, scope):
    lengths = [260, 1, 515, 130], [515, 7, 260, 130]
    operands = draw(*lengths, heads=6, heads_k=2, head_dim=head_dim, dtype=torch.bfloat16)
    check(*operands, lengths, **scope)
    seen = [260, 515, 130], [515, 600, 130]  # PyTorch's lse of a row without keys has no gradient
    operands = draw(*seen, heads=2, head_dim=head_dim, dtype=torch.bfloat16)
    check(*operands, seen, **scope, lse_too=True)


@EVERY_SCOPE
@HEAD_DIMS
def test_nan_in_the_neighbours_changes_nothing(head_dim, scope):
    lengths = [137, 1, 0, 64, 200, 5, 300], [140, 20, 133, 128, 1, 0, 257]
    q, k, v = draw(*lengths, heads=2, heads_k=1, head_dim=head_dim, dtype=torch.float16)
    do, dlse = torch.randn_like(q), torch.randn(2, len(q), device=DEVICE)
    of_queries, of_keys = results(q, k, v, do, dlse, lengths, **scope)
    assert all(x.isfinite().all() for x in (of_queries[0], of_queries[2], *of_keys))
    belongs = [
        torch.repeat_interleave(torch.arange(len(n)), torch.tensor(n)).to(DEVICE) for n in lengths
    ]
    for odd in (0, 1):
        mine_q, mine_k = (of % 2 == odd for of in belongs)
        poisoned = [
            x.detach().masked_fill(~mine[:, None, None], torch.nan)
            for x, mine in ((q, mine_q), (k, mine_k), (v, mine_k), (do, mine_q))
        ]
        poisoned_dlse = dlse.masked_fill(~mine_q, torch.nan)
        again_q, again_k = results(*poisoned, poisoned_dlse, lengths, **scope)
        for before, after in zip(of_queries, again_q, strict=True):
            assert torch.equal(before[mine_q], after[mine_q])
        for before, after in zip(of_keys, again_k, strict=True):
            assert torch.equal(before[mine_k], after[mine_k])


@EVERY_SCOPE
@HEAD_DIMS
def test_gradients_are_the_same_bits_in_every_run(head_dim, scope):
    """Also with more sequences than fill the GPU, and other work beside."""
    lengths = torch.randint(0, 700, (60,), generator=torch.Generator().manual_seed(1)).tolist()
    q, k, v = draw(lengths, lengths, 4, 2, head_dim, torch.bfloat16)
    out = attention_varlen(q, k, v, *packing(lengths, lengths), enable_gqa=True, **scope)
    do = torch.randn_like(out)
    runs = [torch.autograd.grad(out, (q, k, v), do, retain_graph=True) for _ in range(20)]
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(run, runs[0], strict=True))
    assert all(x.any() for x in runs[0])


def test_a_query_that_sees_nothing_gives_zero():
    lengths = [390, 120, 135], [133, 120, 0]
    q, k, v = draw(*lengths, head_dim=128, dtype=torch.bfloat16)
    left = [torch.full((2**n,), torch.nan, device=DEVICE) for n in range(10, 25)]
    del left
    out, lse = attention_varlen(q, k, v, *packing(*lengths), is_causal=True, return_lse=True)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), torch.randn_like(out))
    blind = torch.zeros(645, dtype=torch.bool, device=DEVICE)
    blind[:257] = blind[510:] = True
    assert not out[blind].any()
    assert (lse[:, blind] == -torch.inf).all()
    assert not dq[blind].any()
    assert all(grad.isfinite().all() for grad in (dq, dk, dv))
    assert out[~blind].any(-1).all()


@pytest.mark.parametrize("wrong", [*WRONG.values(), [0, 700, 100, 900, 50, 1000]], ids=str)
@pytest.mark.parametrize("longest", [1000, 500], ids=str)
def test_wrong_offsets_stay_within_the_tensors_and_end(wrong, longest):
    q, k, v = draw([1000], [1000], head_dim=128, dtype=torch.bfloat16)
    cu = torch.tensor(wrong, dtype=torch.int32, device=DEVICE)
    out = attention_varlen(q, k, v, cu, cu, longest, longest, is_causal=True)
    grads = torch.autograd.grad(out, (q, k, v), torch.randn_like(out))
    torch.cuda.synchronize()
    assert grads[0].shape == q.shape


def test_operands_are_read_where_they_lie():
    lengths = [100, 300, 57], [100, 300, 57]
    qkv = torch.randn(457, 3, 2, 128, device=DEVICE).half()
    check(*(x.requires_grad_() for x in qkv.unbind(1)), lengths, is_causal=True)
    heads_outside = torch.randn(3, 2, 457, 128, device=DEVICE).half().transpose(1, 2)
    check(*(x.requires_grad_() for x in heads_outside), lengths, is_causal=True)
