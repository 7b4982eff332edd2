"""Attention spread over ranks, against float64 truth of the whole sequence and against one device.

Ranks are processes: on CPUs they talk through Gloo, and on a machine with several GPUs each has
one, through NCCL. They start once and run every test.
"""

import traceback
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from conftest import assert_close

from kernelbook import reference, runtime
from kernelbook.ops import ring
from kernelbook.ops.attention import operator

LARGEST = 4 if runtime.INTERPRETED else min(4, torch.cuda.device_count())
METHODS = {"ring": ring.ring_attention, "all to all": ring.all_to_all_attention}
TIMEOUT = timedelta(seconds=60)
PATIENCE = timedelta(seconds=10)
"""How long the ranks of one group wait for one that does not come."""

CASES = [
    ("ring", 2, "contiguous", False),
    ("ring", 2, "contiguous", True),
    ("ring", 2, "zigzag", True),
    ("ring", 3, "zigzag", True),
    ("ring", 4, "contiguous", True),
    ("ring", 4, "zigzag", False),
    ("ring", 4, "zigzag", True),
    ("all to all", 2, "contiguous", False),
    ("all to all", 2, "zigzag", True),
    ("all to all", 4, "contiguous", True),
    ("ring", 1, "zigzag", True),
    ("all to all", 1, "contiguous", True),
]


def serve(rank, path, pipe):
    """Be a rank: run what comes out of the pipe, in the group of the world that it names."""
    if not runtime.INTERPRETED:
        torch.cuda.set_device(rank)
    torch.set_num_threads(1)
    backend = "gloo" if runtime.INTERPRETED else "nccl"
    dist.init_process_group(
        backend, init_method=f"file://{path}", rank=rank, world_size=LARGEST, timeout=TIMEOUT
    )
    groups = [dist.new_group(list(range(n)), timeout=TIMEOUT) for n in range(1, LARGEST + 1)]
    groups.append(dist.new_group([0, 1], timeout=PATIENCE, backend="gloo"))
    while task := pipe.recv():
        function, world, args = task
        try:
            pipe.send((True, function(groups[world - 1], *args)))
        except Exception as error:  # the test decides whether it was expected
            pipe.send((False, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Call it with a function, a world and arguments: what each rank returns, or raises as text."""
    if LARGEST < 2:
        pytest.skip("needs two GPUs")
    context = mp.get_context("spawn")
    path = tmp_path_factory.mktemp("ranks") / "store"
    pipes, processes = [], []
    for rank in range(LARGEST):
        ours, theirs = context.Pipe()
        process = context.Process(target=serve, args=(rank, path, theirs), daemon=True)
        process.start()
        pipes.append(ours)
        processes.append(process)

    def answer(rank):
        assert pipes[rank].poll(300), f"rank {rank} hangs"
        return pipes[rank].recv()

    def run(function, world, *args):
        called = range(world or 2)
        for rank in called:
            pipes[rank].send((function, world, args))
        return [answer(rank) for rank in called]

    yield run
    for pipe in pipes:
        pipe.send(None)
    for process in processes:
        process.join(30)
        process.kill()


def results(answers):
    """What the ranks returned; a rank that raised fails the test."""
    for good, answer in answers:
        assert good, answer
    return [answer for _, answer in answers]


def draw(seqlen_q, seqlen_k, heads, heads_k, head_dim, dtype):
    """q, k, v and do of the whole sequence, the same on every rank."""
    torch.manual_seed(20)
    sizes = (heads, seqlen_q), (heads_k, seqlen_k), (heads_k, seqlen_k), (heads, seqlen_q)
    return [torch.randn(2, *size, head_dim).to(dtype) for size in sizes]


AS_IT_LIES = {
    "contiguous": lambda x: x,
    "(batch, seqlen, heads, head_dim)": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "a pending negation": lambda x: torch._neg_view(-x),
}


def spread(group, method, layout, is_causal, shape, dtype, lies="contiguous", scale=None):
    """Return out, dq, dk and dv of the whole sequence, as the ranks compute them."""
    whole = [x.to(runtime.DEVICE) for x in draw(*shape, dtype)]
    *parts, do = (
        AS_IT_LIES[lies](ring.shard_sequence(x, 2, layout=layout, group=group)) for x in whole
    )
    parts = [x.detach().requires_grad_() for x in parts]
    options = {"is_causal": is_causal, "scale": scale, "enable_gqa": True, "layout": layout}
    out = METHODS[method](*parts, **options, group=group)
    out.backward(do)
    own = out, *(x.grad for x in parts)
    return [ring.unshard_sequence(x, 2, layout=layout, group=group).cpu() for x in own]


def expected(is_causal, shape, dtype, scale=None):
    """The truth in float64, and what the operator gives on one device."""
    q, k, v, do = draw(*shape, dtype)
    truth = (
        reference.attention(q, k, v, is_causal, scale)[0],
        *reference.attention_backward(q, k, v, do, is_causal, scale),
    )
    one = [x.to(runtime.DEVICE).requires_grad_() for x in (q, k, v)]
    out = operator.attention(*one, is_causal=is_causal, scale=scale, enable_gqa=True)
    out.backward(do.to(runtime.DEVICE))
    return truth, [x.cpu() for x in (out.detach(), *(x.grad for x in one))]


FACTOR = 8
"""Times the error of one device: each part is rounded to the dtype of q, and then their sum."""


@pytest.mark.parametrize(("method", "world", "layout", "is_causal"), CASES)
def test_spread_over_ranks_gives_the_truth(ranks, method, world, layout, is_causal):
    if world > LARGEST:
        pytest.skip(f"needs {world} GPUs")
    length = 2 * world * (9 if runtime.INTERPRETED else 300)
    shape = (length, length, 4, 4 if method == "all to all" else 2, 16)
    answers = results(ranks(spread, world, method, layout, is_causal, shape, torch.float32))
    truth, one = expected(is_causal, shape, torch.float32)
    for every_rank in answers:
        for ours, true, alone in zip(every_rank, truth, one, strict=True):
            assert_close(ours, true, alone, FACTOR)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_sixteen_bits_give_the_truth(ranks, dtype):
    length = 36 if runtime.INTERPRETED else 2000
    shape = (length, length, 2, 2, 64)
    answers = results(ranks(spread, 2, "ring", "zigzag", True, shape, dtype))
    truth, one = expected(True, shape, dtype)
    for ours, true, alone in zip(answers[0], truth, one, strict=True):
        assert_close(ours, true, alone, FACTOR)


@pytest.mark.parametrize("method", METHODS)
def test_queries_and_keys_may_differ_in_number(ranks, method):
    shape = (24, 64, 2, 2, 16)
    answers = results(ranks(spread, 2, method, "contiguous", False, shape, torch.float32))
    truth, one = expected(False, shape, torch.float32)
    for ours, true, alone in zip(answers[0], truth, one, strict=True):
        assert_close(ours, true, alone, FACTOR)


def agrees(answers, shape, dtype, is_causal=True, scale=None):
    """Assert that what every rank returned is the truth."""
    truth, one = expected(is_causal, shape, dtype, scale)
    for every_rank in results(answers):
        for ours, true, alone in zip(every_rank, truth, one, strict=True):
            assert_close(ours, true, alone, FACTOR)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
@pytest.mark.parametrize("method", METHODS)
def test_a_head_dim_whose_rows_have_gaps(ranks, method, dtype):
    """Gradients of 33 numbers a row begin at multiples of 16 bytes."""
    shape = (24, 24, 2, 2, 33)
    agrees(ranks(spread, 2, method, "zigzag", True, shape, dtype), shape, dtype)


@pytest.mark.parametrize("method", METHODS)
def test_the_scale_and_groups_of_heads(ranks, method):
    shape = (24, 24, 8, 4, 16)
    answers = ranks(spread, 2, method, "zigzag", True, shape, torch.float32, "contiguous", 0.7)
    agrees(answers, shape, torch.float32, scale=0.7)


@pytest.mark.parametrize("lies", [*AS_IT_LIES][1:])
@pytest.mark.parametrize("method", METHODS)
def test_parts_may_lie_in_memory_in_any_way(ranks, method, lies):
    shape = (24, 24, 2, 2, 16)
    answers = ranks(spread, 2, method, "zigzag", True, shape, torch.float32, lies)
    agrees(answers, shape, torch.float32)


def spread_over_some(everyone, method, shape):
    """Ranks of a group are numbered from 0, whichever processes they are."""
    some = dist.new_group([1, LARGEST - 1], timeout=TIMEOUT)
    if some == dist.GroupMember.NON_GROUP_MEMBER:
        q = torch.ones(1, 2, 4, 16, device=runtime.DEVICE)
        with pytest.raises(TypeError, match="group must be a process group that this rank belongs"):
            METHODS[method](q, q, q, group=some)
        return None
    return spread(some, method, "zigzag", True, shape, torch.float32)


@pytest.mark.parametrize("method", METHODS)
def test_a_group_of_some_ranks(ranks, method):
    if LARGEST < 3:
        pytest.skip("needs 3 GPUs")
    shape = (24, 24, 2, 2, 16)
    answers = results(ranks(spread_over_some, LARGEST, method, shape))
    members = [(True, answer) for answer in answers if answer]
    assert len(members) == 2
    agrees(members, shape, torch.float32)


def spread_empty(group, method, shape):
    own = spread(group, method, "zigzag", shape[0] == shape[1], shape, torch.float32)
    return [x.shape for x in own], [int(x.count_nonzero()) for x in own]


@pytest.mark.parametrize("lengths", [(0, 0), (0, 8), (8, 0)])
@pytest.mark.parametrize("method", METHODS)
def test_no_queries_or_no_keys(ranks, method, lengths):
    for shapes, nonzero in results(ranks(spread_empty, 2, method, (*lengths, 2, 2, 16))):
        assert shapes == [(2, 2, n, 16) for n in (lengths[0], *lengths, lengths[1])]
        assert nonzero == [0] * 4


def some_gradients(group, method, required, asked):
    """The gradients that each rank asks for, beside the truth of its part."""
    q, k, v, do = draw(16, 16, 2, 2, 16, torch.float32)
    truth = reference.attention_backward(q, k, v, do)
    *parts, do = (ring.shard_sequence(x.to(runtime.DEVICE), 2, group=group) for x in (q, k, v, do))
    rank = group.rank()
    parts = [x.requires_grad_(i in required[rank]) for i, x in enumerate(parts)]
    out = METHODS[method](*parts, group=group)
    grads = torch.autograd.grad(out, [parts[i] for i in asked[rank]], do)
    truth = [ring.shard_sequence(truth[i], 2, group=group) for i in asked[rank]]
    return [(ours.cpu(), true) for ours, true in zip(grads, truth, strict=True)]


@pytest.mark.parametrize(
    ("required", "asked"),
    [
        (((0, 1, 2), (0, 2)), ((0, 1, 2), (0, 2))),
        (((0,), (1,)), ((0,), (1,))),
        (((0, 1, 2), (0, 1, 2)), ((0,), (2,))),
    ],
)
@pytest.mark.parametrize("method", METHODS)
def test_ranks_may_need_different_gradients(ranks, method, required, asked):
    for pairs in results(ranks(some_gradients, 2, method, required, asked)):
        for ours, true in pairs:
            assert_close(ours, true, true.float(), FACTOR * 4)  # sums, not rounded once as these


def gradient_of_a_gradient(group, method):
    parts = [torch.randn(1, 2, 4, 16, device=runtime.DEVICE).requires_grad_() for _ in range(3)]
    out = METHODS[method](*parts, group=group)
    (dq,) = torch.autograd.grad(out.sum(), parts[0], create_graph=True)
    (dq.square().sum() + parts[0].sum()).backward()  # what stands beside dq has a gradient


@pytest.mark.parametrize("method", METHODS)
def test_a_second_gradient_is_refused(ranks, method):
    for good, said in ranks(gradient_of_a_gradient, 2, method):
        assert not good
        assert "attention over ranks can be differentiated once" in said


def exact_sums(group):
    """With q = 0 every weight is 1 / keys. Then dq and dv are sums of 2048, 1, 1 and 1."""
    rank, options = group.rank(), {"dtype": torch.float16, "device": runtime.DEVICE}
    q, k, v, do = (torch.zeros(1, 1, 4, 16, **options) for _ in range(4))
    sign, term = (-1) ** rank, 4 * (1 if rank else 2048)
    k[..., 2], v[..., 0] = sign * term, sign
    do[..., 0], do[..., 1] = 1, term
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    dq, _, dv = torch.autograd.grad(
        ring.ring_attention(q, k, v, scale=1, group=group), (q, k, v), do
    )
    return dq[..., 2].cpu(), dv[..., 1].cpu()


def test_gradients_of_many_ranks_are_not_added_in_sixteen_bits(ranks):
    """float16 holds 2050 and 2052 next to 2051, but 2048 + 1 + 1 + 1 is 2048 there."""
    if LARGEST < 4:
        pytest.skip("needs 4 GPUs")
    for sums in results(ranks(exact_sums, 4)):
        for x in sums:
            assert ((x - 2051).abs() <= 1).all()


def average(group):
    """With q = 0 out is the mean of v, and v is the same for all keys of a rank."""
    torch.manual_seed(20 + group.rank())
    v = torch.randn(2, 2, 1, 256).half().expand(2, 2, 4, 256).to(runtime.DEVICE)
    zero = torch.zeros_like(v)
    return v[:, :, :1].cpu(), ring.ring_attention(zero, zero, v, group=group)[:, :, :1].cpu()


def test_results_of_many_ranks_are_not_added_in_sixteen_bits(ranks):
    """Rounding out once errs by so much; rounding it after each of three parts, by a third more."""
    if LARGEST < 4:
        pytest.skip("needs 4 GPUs")
    values, outs = zip(*results(ranks(average, 4)), strict=True)
    truth = torch.stack(values).double().mean(0)
    rounded_once = (truth.half() - truth).norm()
    for out in outs:
        assert (out - truth).norm() <= 1.1 * rounded_once


def compiled(group, method):
    """Return what compiled code gives, beside what it gives uncompiled."""
    parts = [torch.randn(1, 2, 4, 16, device=runtime.DEVICE).requires_grad_() for _ in range(3)]

    def function(q, k, v):
        return 2 * METHODS[method](q, k, v, group=group)

    found = []
    for call in (torch.compile(function, backend="aot_eager"), function):
        out = call(*parts)
        found.append((out.detach(), *torch.autograd.grad(out, parts, torch.ones_like(out))))
    assert all(x.any() for x in found[1])
    return all(map(torch.equal, *found))


@pytest.mark.parametrize("method", METHODS)
def test_compiled_code_calls_it(ranks, method):
    assert all(results(ranks(compiled, 2, method)))


def under_a_default_device(group):
    q = torch.randn(1, 2, 4, 16, device=runtime.DEVICE)
    with torch.device("meta"):
        return bool(ring.ring_attention(q, q, q, group=group).any())


def test_a_default_device_does_not_matter(ranks):
    assert all(results(ranks(under_a_default_device, 2)))


def held(group, layout):
    return ring.shard_sequence(torch.arange(24), 0, layout=layout, group=group).tolist()


def test_zigzag_gives_each_rank_pieces_from_both_ends(ranks):
    assert results(ranks(held, 2, "contiguous")) == [[*range(12)], [*range(12, 24)]]
    first, second = results(ranks(held, 2, "zigzag"))
    assert first == [*range(6), *range(18, 24)]
    assert second == [*range(6, 18)]


def refused_dim(group, name):
    found = []
    for x, dim in ((torch.arange(24), 1), (torch.arange(24), "a"), (None, 0)):
        with pytest.raises((TypeError, ValueError), match=r"^(x|dim) must ") as raised:
            getattr(ring, name)(x, dim, group=group)
        found.append(raised.type.__name__)
    if name == "unshard_sequence":
        with pytest.raises(ValueError, match="even size along dim in the layout zigzag.*got 5"):
            ring.unshard_sequence(torch.arange(5), 0, layout="zigzag", group=group)
    return found


@pytest.mark.parametrize("name", ["shard_sequence", "unshard_sequence"])
def test_a_sequence_has_the_dimension(ranks, name):
    answers = results(ranks(refused_dim, 2, name))
    assert answers == [["ValueError", "TypeError", "TypeError"]] * 2


@pytest.mark.parametrize("world", [2, 3, 4, 8, 64])
def test_zigzag_balances_a_causal_mask(world):
    """Each rank computes as many scores in each step, and all together compute those of one."""
    length = 8
    for rank in range(world):
        scores = []
        for source in range(world):
            rows, keys, causal = ring._work(rank, source, True, "zigzag", length)
            n_rows, n_keys = (len(range(length)[part]) for part in (rows, keys))
            scores.append(n_rows * (n_rows + 1) // 2 if causal else n_rows * n_keys)
        own = scores.pop(rank)
        assert own == length * (length + 1) // 2
        assert set(scores) == {length * length // 2}


def refused(group, rank, what):
    """One rank passes something else."""
    q, k, v = (torch.randn(1, 2, 8, 16, device=runtime.DEVICE) for _ in range(3))
    options = {}
    if group.rank() == rank:
        if what == "dtype":
            q = q.to(torch.int32)
        elif what == "length":
            k, v = (torch.randn(1, 2, 10, 16, device=runtime.DEVICE) for _ in range(2))
        elif what == "mask":
            options["is_causal"] = True
        elif what == "layout":
            options["layout"] = "zigzag"
        elif what == "odd length":
            q, options["layout"] = q[:, :, :5], "zigzag"
        elif what == "gradient":
            v.requires_grad_()
    ring.ring_attention(q, k, v, group=group, **options)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("dtype", "q must be float32, float16 or bfloat16, got int32"),
        ("length", "k must be the same on all ranks, got float32 of shape (1, 2, 10, 16)"),
        ("mask", "is_causal must be the same on all ranks, got True"),
        ("layout", "layout must be the same on all ranks, got zigzag"),
        ("odd length", "q must have an even length in the layout zigzag, two pieces, got 5"),
        ("gradient", "whether a gradient is needed must be the same on all ranks, got True"),
    ],
)
def test_what_one_rank_gets_wrong_is_refused_on_all_and_named(ranks, what, said):
    answers = ranks(refused, 2, 1, what)
    assert not any(good for good, _ in answers)
    (_, other), (_, own) = answers
    assert said in own
    assert said in other
    assert "rank 1" in other
    assert all(good for good, _ in ranks(held, 2, "zigzag"))  # they go on together


def leave_alone(group):
    """Only the first rank calls."""
    if group.rank() == 0:
        q = torch.randn(1, 2, 8, 16, device=runtime.DEVICE)
        ring._agreed("ring_attention", lambda: (q, q, q, False, 1.0), "contiguous", group)


def test_a_rank_that_does_not_come_is_an_error_within_the_time_out(ranks):
    (good, said), (absent_good, why) = ranks(leave_alone, 0)  # the group that is not patient
    assert absent_good, why
    assert not good
    assert "rank 0 of 2 waited for the others in vain" in said


def test_without_a_process_group_it_says_what_to_do():
    x = torch.randn(1, 1, 4, 16, device=runtime.DEVICE)
    with pytest.raises(RuntimeError, match="init_process_group"):
        ring.ring_attention(x, x, x)


def test_merge_of_parts_is_attention_to_their_union():
    q, k, v = (torch.randn(1, 2, 12, 16).double() for _ in range(3))
    truth, lse_truth = reference.attention(q, k, v, False)
    out, lse = torch.zeros(1, 2, 12, 16), torch.full((1, 2, 12), -torch.inf)
    for keys in (slice(0, 5), slice(5, 6), slice(6, 12)):
        part, lse_part = reference.attention(q, k[:, :, keys], v[:, :, keys], False)
        ring.merge(out, lse, part, lse_part.float())
    torch.testing.assert_close(out.double(), truth, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse.double(), lse_truth, rtol=1e-5, atol=1e-6)
    before = out.clone(), lse.clone()
    ring.merge(out, lse, torch.full_like(out, 7), torch.full_like(lse, -torch.inf))
    assert torch.equal(out, before[0])
    assert torch.equal(lse, before[1])
