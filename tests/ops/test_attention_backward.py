"""The gradients of attention against float64 truth, in both modes, and what may not change them."""

import math

import pytest
import torch
from conftest import DEVICE, DTYPES, assert_close

from kernelbook import reference, runtime
from kernelbook.lab.check import error
from kernelbook.ops.attention import backward as module
from kernelbook.ops.attention import tuned
from kernelbook.ops.attention.tiles import fit
from kernelbook.ops.attention.tuned import Config

DETERMINISTIC = pytest.mark.parametrize("deterministic", [True, False], ids=["two", "one"])
CAUSAL = pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])

# batch, heads, heads_k, seqlen_q, seqlen_k, head_dim
SHAPES = {
    "one tile": (1, 2, 2, 32, 32, 16),
    "grouped, ragged": (2, 2, 1, 50, 40, 64),
    "one query": (1, 2, 1, 1, 70, 96),
    "one key": (1, 1, 1, 40, 1, 32),
    "more keys": (1, 2, 2, 33, 70, 80),
    "more queries": (1, 2, 1, 70, 33, 128),
    "odd head_dim": (1, 1, 1, 40, 40, 17),
}
if not runtime.INTERPRETED:
    SHAPES |= {
        "127": (2, 3, 3, 127, 127, 64),
        "1000": (2, 4, 4, 1000, 1000, 128),
        "1000 by 300": (2, 4, 2, 1000, 300, 64),
        "300 by 1000": (2, 4, 1, 300, 1000, 128),
        "wide": (1, 2, 2, 500, 500, 256),
        "192": (1, 2, 2, 300, 300, 192),
    }

FLOAT32_FACTOR = 8
"""Float32 may err by eight times PyTorch's error: tiles sum in another order, and exp2 of a
scaled difference rounds the exponent once more than exp does."""


def draw(batch, heads, heads_k, seqlen_q, seqlen_k, head_dim, dtype=torch.float32):
    """q, k, v and do."""
    sizes = (heads, seqlen_q), (heads_k, seqlen_k), (heads_k, seqlen_k), (heads, seqlen_q)
    return [torch.randn(batch, *size, head_dim, device=DEVICE).to(dtype) for size in sizes]


def forward(q, k, v, is_causal, scale):
    """The truth of forward, as a kernel would hand it over: out in q's dtype, lse in float32."""
    out, lse = reference.attention(q, k, v, is_causal, scale)
    return out.to(q.dtype), lse.float()


def backward(q, k, v, do, is_causal, deterministic, scale=None, dlse=None):
    """The gradients, prepared as the operator prepares them."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out, lse = forward(q, k, v, is_causal, scale)
    prepared = [fit(x.to(runtime.kernel_dtype(x.dtype))) for x in (q, k, v, out, do)]
    q_, k_, v_, out_, do_ = prepared
    with runtime.launching_on(q):
        gradients = module.attention_backward(
            q_, k_, v_, out_, lse, do_, is_causal, scale, deterministic, dlse
        )
    return [gradient.to(q.dtype) for gradient in gradients]


def torch_backward(q, k, v, do, is_causal, scale=None, dlse=None):
    """The gradients by PyTorch's autograd of the dense formula, in the dtype of q."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    s = q @ k.repeat_interleave(group, 1).mT * scale
    if is_causal:
        seqlen_q, seqlen_k = s.shape[-2:]
        visible = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device)
        s = s.masked_fill(~visible.tril(seqlen_k - seqlen_q), -1e4)
        sees = visible.tril(seqlen_k - seqlen_q).any(-1)[:, None]
    else:
        sees = torch.ones((), dtype=torch.bool, device=s.device)
    out = (torch.softmax(s, -1) @ v.repeat_interleave(group, 1)) * sees
    outputs, gradients = [out], [do]
    if dlse is not None:
        outputs, gradients = [out, s.float().logsumexp(-1)], [do, dlse]
    return torch.autograd.grad(outputs, (q, k, v), gradients)


def check(q, k, v, do, is_causal, deterministic, scale=None, dlse=None):
    """Compare all three gradients with the truth, and with PyTorch's error in the same dtype."""
    ours = backward(q, k, v, do, is_causal, deterministic, scale, dlse)
    truth = reference.attention_backward(q, k, v, do, is_causal, scale, dlse)
    theirs = torch_backward(q, k, v, do, is_causal, scale, dlse)
    factors = {"factor": FLOAT32_FACTOR} if q.dtype == torch.float32 else {}
    for a, b, c, x in zip(ours, truth, theirs, (q, k, v), strict=True):
        assert a.shape == x.shape
        if b.abs().max() > 1e-12:  # a query that sees one key, and that key, have gradient zero
            assert_close(a, b, c, **factors)
        else:
            # dP - delta is the difference of two equal sums over head_dim, each rounded in float32,
            # and dk adds one a query. Only the small result is rounded to 16 bits.
            products = do.abs().max() * v.abs().max() * q.shape[-1] * torch.finfo(torch.float32).eps
            largest = max(q.abs().max(), k.abs().max()) * (scale or q.shape[-1] ** -0.5)
            assert a.abs().max() <= products * largest * q.shape[2] * q.shape[1] / k.shape[1]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@CAUSAL
@DETERMINISTIC
def test_gradients_are_the_truth(shape, dtype, is_causal, deterministic):
    check(*draw(*shape, dtype), is_causal, deterministic)


@CAUSAL
@DETERMINISTIC
def test_a_gradient_of_the_logsumexp(is_causal, deterministic):
    operands = draw(2, 2, 1, 40, 70, 32)
    check(*operands, is_causal, deterministic, dlse=torch.randn(2, 2, 40, device=DEVICE))


@DETERMINISTIC
@pytest.mark.parametrize("scale", [0.01, 1.0])
def test_a_scale(scale, deterministic):
    check(*draw(1, 2, 2, 40, 70, 16), True, deterministic, scale)


# -- where tensors lie


@CAUSAL
@DETERMINISTIC
def test_heads_beside_each_other_are_read_where_they_lie(is_causal, deterministic):
    q, k, v, do = (x.mT.contiguous().mT for x in draw(2, 3, 3, 40, 50, 32))
    q, k, v, do = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v, do))
    assert all(fit(x) is x for x in (q, k, v, do))
    check(q, k, v, do, is_causal, deterministic)


@DETERMINISTIC
@pytest.mark.parametrize("expanded", ["head_dim", "heads", "batch", "all"])
def test_an_expanded_gradient(expanded, deterministic):
    q, k, v, do = draw(2, 2, 2, 40, 40, 32)
    narrow = {
        "head_dim": do[..., :1],
        "heads": do[:, :1],
        "batch": do[:1],
        "all": do[:1, :1, :1, :1],
    }
    check(q, k, v, narrow[expanded].expand(do.shape), True, deterministic)


@DETERMINISTIC
def test_parts_of_larger_tensors(deterministic):
    """What lies around a head must not be read, and NaN around it shows if it is."""
    whole = draw(2, 3, 3, 52, 50, 48)
    for x in whole:
        inside = x[1:, 1:3, 5:-7, 8:40].clone()
        x.fill_(float("nan"))
        x[1:, 1:3, 5:-7, 8:40] = inside
    check(*(x[1:, 1:3, 5:-7, 8:40] for x in whole), True, deterministic)


# -- masks


@DETERMINISTIC
def test_queries_that_see_nothing_have_gradient_zero(deterministic):
    q, k, v, do = draw(1, 2, 1, 100, 33, 16)
    dq, dk, dv = backward(q, k, v, do, True, deterministic)
    assert (dq[:, :, : 100 - 33] == 0).all()
    assert all(x.isfinite().all() for x in (dq, dk, dv))
    do[:, :, : 100 - 33] = 1e30  # nothing of theirs reaches a key
    again = backward(q, k, v, do, True, deterministic)
    assert torch.equal(again[1], dk)
    assert torch.equal(again[2], dv)


@CAUSAL
@DETERMINISTIC
def test_the_flag_alone_decides_whether_the_first_query_sees_the_last_key(is_causal, deterministic):
    q, k, v, do = draw(1, 1, 1, 70, 70, 16)
    do[:, :, 1:] = 0
    _, dk, dv = backward(q, k, v, do, is_causal, deterministic)
    assert (dv[:, :, 1:] == 0).all() == is_causal
    assert (dk[:, :, 1:] == 0).all() == is_causal


@CAUSAL
@DETERMINISTIC
@pytest.mark.parametrize("score", [-300.0, 300.0])
def test_scores_far_from_those_of_keys_past_the_end(score, is_causal, deterministic):
    """A key past the end has score 0, and exp(0 - lse) overflows when lse is -300."""
    q, k, v, do = draw(1, 1, 1, 50, 41, 16)
    q[..., 0], k[..., 0] = 10.0, score * 4 / 10
    assert reference.attention(q, k, v)[1].abs().min() > 200
    ours = backward(q, k, v, do, is_causal, deterministic)
    truth = reference.attention_backward(q, k, v, do, is_causal)
    for a, b in zip(ours, truth, strict=True):
        # Scores around 300 are rounded to 3e-5, and differences of their exponentials cancel.
        assert error(a, b) < 0.02


# -- properties


@CAUSAL
def test_two_sweeps_give_the_same_bits_in_every_run(is_causal):
    operands = draw(2, 2, 1, 40, 50, 32, torch.float16)
    first = backward(*operands, is_causal, True)
    for _ in range(3):
        again = backward(*operands, is_causal, True)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@DETERMINISTIC
def test_gradients_are_linear_in_do(deterministic):
    q, k, v, do = draw(1, 2, 2, 40, 40, 32)
    single = backward(q, k, v, do, True, deterministic)
    double = backward(q, k, v, 2 * do, True, deterministic)
    for a, b in zip(single, double, strict=True):
        # Doubling is exact in every product and sum, unless additions come in another order.
        assert torch.allclose(2 * a, b, rtol=0, atol=1e-5 * a.abs().max().item())


@DETERMINISTIC
def test_inputs_are_left_alone(deterministic):
    operands = draw(1, 2, 2, 40, 40, 32)
    before = [x.clone() for x in operands]
    backward(*operands, False, deterministic)
    assert all(torch.equal(a, b) for a, b in zip(operands, before, strict=True))


def test_a_result_of_zeros_would_fail():
    q, k, v, do = draw(1, 2, 2, 70, 70, 32, torch.bfloat16)
    truth = reference.attention_backward(q, k, v, do)
    for right, theirs in zip(truth, torch_backward(q, k, v, do, False), strict=True):
        with pytest.raises(AssertionError, match="error 1 is over"):
            assert_close(torch.zeros_like(theirs), right, theirs)


def test_a_limit_of_registers_reaches_every_launch(monkeypatch):
    limited = Config(32, 32, 1, 1, maxnreg=96)
    monkeypatch.setattr(tuned, "backward_config", lambda *_: limited)
    passed = {}

    class Spy:
        arg_names = ()

        def __init__(self, name):
            self.name = name

        def __getitem__(self, grid):
            return lambda *_, **options: passed.update({self.name: options["maxnreg"]})

    for name in ("dkdv_kernel", "dq_kernel"):
        monkeypatch.setattr(module, name, Spy(name))
    backward(*draw(1, 1, 1, 20, 20, 16), False, True)
    assert passed == {"dkdv_kernel": 96, "dq_kernel": 96}


# -- configurations

TILES = [Config(16, 64, 1, 1), Config(64, 16, 1, 1), Config(32, 32, 1, 2)]


@CAUSAL
@DETERMINISTIC
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_tiles_of_other_shapes(monkeypatch, tile, is_causal, deterministic):
    if not runtime.INTERPRETED:
        tile = Config(tile.block_m, tile.block_n, 4, tile.num_stages)
    monkeypatch.setattr(tuned, "backward_config", lambda *_: tile)
    check(*draw(1, 2, 1, 70, 90, 16), is_causal, deterministic)


@CAUSAL
@DETERMINISTIC
@pytest.mark.parametrize("at_once", [1, 3, 100])
def test_heads_that_take_turns_all_get_their_turn(monkeypatch, at_once, is_causal, deterministic):
    monkeypatch.setattr(tuned, "backward_heads_at_once", lambda *_: at_once)
    check(*draw(2, 2, 1, 40, 40, 16), is_causal, deterministic)


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [16, 80, 128, 256])
@pytest.mark.parametrize("sweep", ["dkdv", "dq", "all"])
def test_every_gpu_has_a_configuration(monkeypatch, sweep, head_dim, dtype, capability):
    kib = {(8, 0): 163, (9, 0): 227, (10, 0): 227}.get(capability, 99)
    monkeypatch.setattr(runtime, "INTERPRETED", False)
    monkeypatch.setattr(runtime, "shared_memory", lambda _: kib * 1024)
    monkeypatch.setattr(runtime, "capability", lambda _: capability)
    q = torch.ones(1, 1, 1, head_dim, dtype=dtype, device=DEVICE)
    if (sweep, head_dim, dtype, kib) == ("all", 256, torch.float32, 99):
        assert tuned.config(sweep, q) is None  # and two sweeps take its place
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "A small GPU")
        with pytest.raises(ValueError, match="pass a smaller head_dim or a 16-bit dtype"):
            tuned.backward_config(sweep, q)
        return
    config = tuned.backward_config(sweep, q)
    assert config.shared <= kib * 1024
    assert module.PADDING % config.block_m == 0


def test_narrow_windows_have_tiles_of_fewer_queries_on_hopper_alone(monkeypatch):
    monkeypatch.setattr(runtime, "INTERPRETED", False)
    monkeypatch.setattr(runtime, "shared_memory", lambda _: 227 * 1024)
    q = torch.ones(1, 1, 1, 128, dtype=torch.bfloat16, device=DEVICE)
    for capability, differ in (((9, 0), True), ((10, 0), False), ((8, 0), False)):
        monkeypatch.setattr(runtime, "capability", lambda _, is_=capability: is_)
        wide = tuned.backward_config("dq", q)
        narrow = tuned.backward_config("dq", q, tuned.NARROW)
        assert tuned.backward_config("dq", q, tuned.NARROW + 1) is wide
        assert tuned.backward_config("dkdv", q, 1) is tuned.backward_config("dkdv", q)
        assert (narrow is not wide) == differ
        assert narrow.block_m < wide.block_m or not differ


def test_the_rule_for_dq_hears_of_both_bounds(monkeypatch):
    heard, choose = [], tuned.backward_config

    def listen(sweep, q, *keys_seen):
        heard.append((sweep, *keys_seen))
        return choose(sweep, q, *keys_seen)

    monkeypatch.setattr(tuned, "backward_config", listen)
    q, k, v, do = draw(1, 1, 1, 40, 40, 16)
    for window in ((5, 7), (5, None), None):
        out, lse = forward(q, k, v, False, 0.25)  # of which the rule hears nothing
        with runtime.launching_on(q):
            module.attention_backward(q, k, v, out, lse, do, False, 0.25, True, None, window)
    found = [rest for sweep, *rest in heard if sweep == "dq"]
    assert found == [[13], [math.inf], [math.inf]]


# -- what only a GPU can show


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("head_dim", [64, 128])
@CAUSAL
def test_a_thousand_runs_give_the_same_bits(head_dim, is_causal):
    """A product that is read before it is finished would show as a difference between runs."""
    operands = draw(1, 8, 8, 1000, 1000, head_dim, torch.bfloat16)
    scale = head_dim**-0.5
    q, k, v, do = operands
    out, lse = forward(q, k, v, is_causal, scale)
    for deterministic in (True, False):
        first = module.attention_backward(q, k, v, out, lse, do, is_causal, scale, deterministic)
        checked = slice(0 if deterministic else 1, 3)  # dq of one sweep depends on the order
        for _ in range(1000):
            again = module.attention_backward(
                q, k, v, out, lse, do, is_causal, scale, deterministic
            )
            pairs = zip(first[checked], again[checked], strict=True)
            assert all(torch.equal(a, b) for a, b in pairs)
            assert torch.allclose(first[0].float(), again[0].float(), atol=0.02, rtol=0.02)


@pytest.mark.usefixtures("gpu")
@CAUSAL
@DETERMINISTIC
@pytest.mark.parametrize("capability", [(8, 0), (8, 6)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_configurations_of_other_gpus(
    monkeypatch, head_dim, dtype, capability, is_causal, deterministic
):
    monkeypatch.setattr(runtime, "capability", lambda _: capability)
    check(*draw(1, 2, 1, 200, 150, head_dim, dtype), is_causal, deterministic)


@pytest.mark.usefixtures("gpu")
@CAUSAL
@pytest.mark.parametrize("block_m", [32, 64])
@pytest.mark.parametrize("block_n", [64, 128])
@pytest.mark.parametrize("num_warps", [4, 8])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_transposed_products(monkeypatch, head_dim, num_warps, block_n, block_m, is_causal):
    """One sweep multiplies a transposed product, which came out wrong elsewhere for some tiles."""
    config = Config(block_m, block_n, num_warps, 1)
    monkeypatch.setattr(tuned, "backward_config", lambda *_: config)
    check(*draw(2, 2, 1, 300, 300, head_dim, torch.bfloat16), is_causal, False)


@pytest.mark.usefixtures("gpu")
@DETERMINISTIC
def test_more_than_2_to_the_31_elements(deterministic):
    q, k, v, do = draw(1, 2, 2, 8, 48, 64, torch.bfloat16)
    rows = 2**24 + 5
    q, do = (x.repeat(1, 1, -(-rows // 8), 1)[:, :, :rows] for x in (q, do))
    out, lse = (torch.empty_like(q), torch.empty(q.shape[:3], device=DEVICE))
    some, some_lse = forward(q[:, :, :8], k, v, False, 0.125)
    for start in range(0, rows, 8):
        if start >= 2**12:  # the rest by doubling: rows repeat with period 8
            break
        stop = min(start + 8, rows)
        out[:, :, start:stop], lse[:, :, start:stop] = some[:, :, : stop - start], some_lse
    filled = 2**12
    while filled < rows:
        more = min(filled, rows - filled)
        out[:, :, filled : filled + more] = out[:, :, :more]
        lse[:, :, filled : filled + more] = lse[:, :, :more]
        filled += more
    dq, _, _ = module.attention_backward(q, k, v, out, lse, do, False, 0.125, deterministic)
    last = slice(rows - rows % 8 - 8, rows - rows % 8)
    truth = reference.attention_backward(q[:, :, :8], k, v, do[:, :, :8])[0]
    theirs = torch_backward(q[:, :, :8], k, v, do[:, :, :8], False)[0]
    assert_close(dq[:, :, :8], truth, theirs)
    assert_close(dq[:, :, last], truth, theirs)
