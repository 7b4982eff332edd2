"""Launches that are remembered: the right kernel for every call, and no more than once compiled."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl

import kernelbook
from kernelbook import runtime
from kernelbook.ops import launch
from kernelbook.ops.attention import tiles, tuned
from kernelbook.ops.launch import Launch, planned

DEVICE = runtime.DEVICE


class Kernel:
    """A kernel that says with what it was launched, by way of the compiler or at once."""

    arg_names = ("x", "y", "n", "BLOCK")

    def __init__(self):
        self.launched = []

    def __getitem__(self, grid):
        def compile_and_run(*args, **options):
            self.launched.append(("compiled", grid, args, options))
            return Compiled(self)

        return compile_and_run


class Compiled:
    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return lambda *args: self.kernel.launched.append(("at once", grid, args, {}))


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(runtime, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return Kernel()


def numbers(n=64, dtype=torch.float32, offset=0):
    return torch.zeros(n + offset, dtype=dtype)[offset:]


def test_a_second_call_goes_to_the_compiled_kernel_with_its_own_tensors(kernel):
    run = Launch(kernel, (3,), 10, BLOCK=32, num_warps=2)
    calls = [(numbers(), numbers()), (numbers(), numbers())]
    for call in calls:
        run(*call)
    (first, grid, args, options), (second, grid_at_once, args_at_once, _) = kernel.launched
    assert (first, second) == ("compiled", "at once")
    assert (grid, grid_at_once) == ((3,), (3, 1, 1))
    assert args[2:] == (10, 32)
    assert args_at_once[2:] == (10, 32)
    assert options == {"num_warps": 2}
    for found, call in zip((args, args_at_once), calls, strict=True):
        assert all(a is b for a, b in zip(found[:2], call, strict=True))


OTHERS = {
    "another dtype": lambda: (numbers(dtype=torch.float16), numbers()),
    "an address that is not aligned": lambda: (numbers(offset=1), numbers()),
    "nothing": lambda: (numbers(), None),
    "an integer": lambda: (numbers(), 5),
    "an integer of 64 bits": lambda: (numbers(), 2**31),
    "a negative one": lambda: (numbers(), -(2**31) - 1),
    "a tuple": lambda: (numbers(), (numbers(dtype=torch.float16), 3)),
    "a tuple with a stride of 1": lambda: (numbers(), rows_apart(1)),
    "with one that 16 does not divide": lambda: (numbers(), rows_apart(65)),
    "with one of 64 bits": lambda: (numbers(), rows_apart(2**40)),
}


def rows_apart(stride):
    """A tensor as tiles.describe describes it without a descriptor."""
    return numbers(), 9, tl.constexpr(64), 0, 0, stride


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_whatever_is_compiled_for_otherwise_is_compiled(kernel, other):
    run = Launch(kernel, (1,), 10, BLOCK=32)
    run(numbers(), numbers())
    run(numbers(), rows_apart(64))
    run(*other())
    run(*other())
    assert [how for how, *_ in kernel.launched] == ["compiled"] * 3 + ["at once"]


@pytest.mark.parametrize(("one", "another"), [(2**31 - 1, 0), (-(2**31), 7), (2**31, 2**63 - 1)])
def test_integers_of_one_width_share_a_kernel(kernel, one, another):
    run = Launch(kernel, (1,), 10, BLOCK=32)
    run(numbers(), one)
    run(numbers(), another)
    assert [how for how, *_ in kernel.launched] == ["compiled", "at once"]


def test_each_device_has_its_own(kernel, monkeypatch):
    run = Launch(kernel, (1,), 10, BLOCK=32)
    run(numbers(), numbers())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    run(numbers(), numbers())
    assert [how for how, *_ in kernel.launched] == ["compiled", "compiled"]


def test_a_triton_without_that_door_is_asked_each_time(kernel, monkeypatch):
    monkeypatch.delattr(Compiled, "__getitem__")
    run = Launch(kernel, (1,), 10, BLOCK=32)
    for _ in range(3):
        run(numbers(), numbers())
    assert [how for how, *_ in kernel.launched] == ["compiled"] * 3


def test_a_plan_is_asked_once_until_it_is_forgotten():
    asked = []
    plan = planned(lambda n: asked.append(n) or n)
    assert [plan(1), plan(2), plan(1)] == [1, 2, 1]
    assert asked == [1, 2]
    launch.forget()
    assert plan(1) == 1
    assert asked == [1, 2, 1]


def test_a_plan_does_not_grow_without_end():
    plan = planned(lambda n: n)
    for n in range(3 * launch.LIMIT):
        plan(n)
    assert plan.cache_info().currsize == launch.LIMIT


# -- with plans


def specialized(x):
    """What Triton compiles for, of an argument."""
    if isinstance(x, torch.Tensor):
        return x.dtype, x.data_ptr() % 16 == 0
    if isinstance(x, tuple):
        return tuple(map(specialized, x))
    if isinstance(x, int):
        return x == 1, x % 16 == 0, -(2**31) <= x < 2**31
    if hasattr(x, "base"):
        return x.base.dtype, tuple(x.block_shape)
    return x.value if isinstance(x, tl.constexpr) else x


def layouts(batch, seqlen, heads, head_dim):
    """Tensors of one shape, of which no copy is made: with strides of 1, 0, odd and even units."""
    shape = batch, heads, seqlen, head_dim
    yield torch.zeros(shape)
    yield torch.zeros(batch, seqlen, heads, head_dim).transpose(1, 2)
    yield torch.zeros(batch, seqlen, heads, 3, head_dim)[..., 1, :].transpose(1, 2)
    yield torch.zeros(batch, heads, seqlen, head_dim + 4)[..., :head_dim]
    yield torch.zeros(1, 1, 1, head_dim).expand(shape)
    yield torch.zeros(4 * batch * heads * seqlen + head_dim).as_strided(
        shape, (4 * heads * seqlen, 4 * seqlen, 4, 1)
    )


def meet(q, k):
    kernelbook.attention(q, k, k)
    offsets = [torch.tensor([0, x.shape[2]], dtype=torch.int32) for x in (q, k)]
    packed = [x[0].transpose(0, 1).detach().requires_grad_() for x in (q, k, k)]
    kernelbook.attention_varlen(*packed, *offsets, q.shape[2], k.shape[2]).sum().backward()
    q, k = q.detach().requires_grad_(), k.detach().requires_grad_()
    kernelbook.attention(q, k, k, return_lse=True)[0].sum().backward()
    kernelbook.quantize(q)


@pytest.mark.skipif(not runtime.INTERPRETED, reason="nothing is launched here")
@pytest.mark.parametrize("seqlens", [(5, 7), (1, 1030)], ids=["forward", "decoding"])
@pytest.mark.parametrize("described", [True, False])
def test_what_is_remembered_is_compiled_for_all_that_it_is_taken_for(
    monkeypatch, described, seqlens
):
    config = replace(tuned.INTERPRETED, described=described, described_rows=described)
    monkeypatch.setattr(tuned, "INTERPRETED", config)
    compiled = {}

    def call(run, *tensors):
        known = isinstance(run, tiles.KnownLaunch)
        key = run if known else (run, *map(launch._seen, map(in_a_tuple, tensors)))
        found = specialized(tensors)
        assert compiled.setdefault(key, found) == found

    def in_a_tuple(x):  # _seen sees no tensors alone
        return (x,) if isinstance(x, torch.Tensor) else x

    monkeypatch.setattr(Launch, "__call__", call)
    monkeypatch.setattr(tiles.KnownLaunch, "__call__", call)
    for q in layouts(1, seqlens[0], 2, 64):
        for k in layouts(1, seqlens[1], 2, 64):
            meet(q, k)
    assert len(compiled) > 30


# -- with kernels


@triton.jit
def shift_kernel(x_ptr, y_ptr, n, by, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < n)
    tl.store(y_ptr + offsets, x + by, mask=offsets < n)


def test_tensors_of_every_alignment_and_dtype_are_read_where_they_lie():
    run = Launch(shift_kernel, (3,), 90, 3, BLOCK=32)
    memory = torch.arange(200, device=DEVICE)
    for _ in range(2):
        for dtype in (torch.float32, torch.float16, torch.int32):
            for offset in range(5):
                x = memory.to(dtype)[offset : offset + 90]
                y = torch.full((100,), -1, dtype=dtype, device=DEVICE)
                run(x, y)
                assert y[:90].tolist() == [offset + i + 3 for i in range(90)]
                assert y[90:].tolist() == [-1] * 10


CALLS = {
    "weighted sum": lambda x: kernelbook.weighted_sum(x, x[0]),
    "softmax": lambda x: kernelbook.softmax(x),
    "layer norm": lambda x: kernelbook.layer_norm(x, x.shape[-1]),
    "dropout": lambda x: kernelbook.seeded_dropout(x, 0.5, 7),
    "attention": lambda x: kernelbook.attention(*[x.view(1, 2, -1, 16)] * 3, is_causal=True),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_what_is_remembered_gives_the_same_bits(call):
    """Shapes by turns, so that every call but the first of each finds its launch."""
    draws = [torch.randn(4, n, device=DEVICE, dtype=d)
             for n in (64, 96, 160) for d in (torch.float32, torch.float16)]  # fmt: skip
    first = [call(x) for x in draws]
    again = [call(x) for _ in range(2) for x in draws]
    launch.forget()
    anew = [call(x) for x in draws]
    for y, *others in zip(first, again[: len(draws)], again[len(draws) :], anew, strict=True):
        assert y.any()
        assert all(torch.equal(y, other) for other in others)


@pytest.mark.usefixtures("gpu")
def test_threads_share_what_is_remembered():
    draws = [torch.randn(32, n, device=DEVICE) for n in range(40, 80)] * 5
    expected = [torch.softmax(x, -1) for x in draws]
    launch.forget()
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(kernelbook.softmax, draws))
    torch.cuda.synchronize()
    for y, truth in zip(found, expected, strict=True):
        torch.testing.assert_close(y, truth)


@pytest.mark.usefixtures("gpu")
def test_a_launch_is_queued_on_the_current_stream():
    x = torch.randn(2**13, 2**13, device=DEVICE)
    kernelbook.softmax(x)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10**8)
        x.fill_(1.0)
        y = kernelbook.softmax(x)
    stream.synchronize()
    torch.testing.assert_close(y, torch.full_like(y, 2.0**-13))
