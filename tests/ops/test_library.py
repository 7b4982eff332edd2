"""What compilers, fake tensors and torch.func see of the operators."""

import re
import sys

import pytest
import torch
import torch.nn.functional as F
from conftest import DEVICE
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.utils import run_fw_bw_and_get_code
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import kernelbook
from kernelbook import runtime
from kernelbook.ops import library

BACKENDS = ["eager", "aot_eager", "inductor"]
ATTENTION_TOLERANCE = 1e-5
"""Between the same kernels, or a kernel and PyTorch, on numbers of about 1 in float32."""


def randn(*shape):
    return torch.randn(*shape, device=DEVICE)


def keep(x):
    """A mask of the shape of x that is the same in every run."""
    return torch.arange(x.numel(), device=x.device).view(x.shape) % 3 > 0


def weighted_sum(x, weight):
    """With the shape of x, as the results of the others have it."""
    return x * kernelbook.weighted_sum(x, weight).unsqueeze(-1)


def softmax(x):
    return kernelbook.softmax(x, dim=-1)


def softmax_inside(x):
    return kernelbook.softmax(x, dim=1)


def layer_norm(x, weight, bias):
    return kernelbook.layer_norm(x, x.shape[-1], weight, bias)


def layer_norm_in_16_bits(x, weight, bias):
    """With the dtype of x in the end, as the results of the others have it."""
    y = kernelbook.layer_norm(x, x.shape[-1], weight, bias, out_dtype=torch.float16)
    assert y.dtype == torch.float16
    return y.float()


def attention(q, k, v):
    return kernelbook.attention(q, k, v, is_causal=True)


def attention_window(q, k, v):
    return kernelbook.attention(q, k, v, window=(3, 2), deterministic=False)


def attention_and_lse(q, k, v):
    out, lse = kernelbook.attention(q, k, v, return_lse=True)
    return out + lse.unsqueeze(-1)


def attention_varlen(q, k, v):
    """The batch, packed: sequences of one length, and offsets that are made of the shape."""
    batch, seqlen = q.shape[:2]
    cu = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * seqlen
    packed = (x.flatten(0, 1) for x in (q, k, v))
    out, lse = kernelbook.attention_varlen(
        *packed, cu, cu, seqlen, seqlen, is_causal=True, return_lse=True
    )
    return (out + lse.mT.unsqueeze(-1)).unflatten(0, (batch, seqlen))


def masked_dropout(x):
    return kernelbook.masked_dropout(x, keep(x), 0.25)


def seeded_dropout(x):
    return kernelbook.seeded_dropout(x, 0.25, 17)


def seeded_by_tensor(x, seed):
    return kernelbook.seeded_dropout(x, 0.25, seed)


def parameters(n):
    return randn(n), randn(n)


def attention_fp8(q, k, v):
    """The sum of what was quantised, because FP8 has no gradient."""
    with torch.no_grad():
        q8, (k8, k_descale) = kernelbook.quantize(q), kernelbook.quantize(k)
        v8 = kernelbook.quantize(v, contiguous="seqlen")
        out = kernelbook.attention(q8, k8, v8, k_descale=k_descale, out_dtype=torch.float16)
    return out.float() * q * k * v


CASES = {
    "weighted_sum": (weighted_sum, lambda n: (randn(n, 24), randn(24))),
    "softmax": (softmax, lambda n: (randn(n, 40),)),
    "softmax, inside": (softmax_inside, lambda n: (randn(n, 7, 5),)),
    "layer_norm": (layer_norm, lambda n: (randn(n, 24), *parameters(24))),
    "layer_norm, 16 bits": (layer_norm_in_16_bits, lambda n: (randn(n, 24), *parameters(24))),
    "attention": (attention, lambda n: tuple(randn(n, 2, 20, 16) for _ in range(3))),
    "attention, window": (
        attention_window, lambda n: tuple(randn(n, 2, 20, 16) for _ in range(3)),
    ),
    "attention, lse": (attention_and_lse, lambda n: tuple(randn(n, 2, 9, 16) for _ in range(3))),
    "attention, FP8": (attention_fp8, lambda n: tuple(randn(n, 2, 9, 16) for _ in range(3))),
    "attention_varlen": (
        attention_varlen, lambda n: tuple(randn(n, 9, 2, 16) for _ in range(3)),
    ),
    "masked_dropout": (masked_dropout, lambda n: (randn(n, 33),)),
    "seeded_dropout": (seeded_dropout, lambda n: (randn(n, 33),)),
    "seeded by a tensor": (
        seeded_by_tensor, lambda n: (randn(n, 33), torch.tensor(5, device=DEVICE)),
    ),
}  # fmt: skip
ALL = pytest.mark.parametrize(("function", "draw"), CASES.values(), ids=CASES)


def differentiable(inputs):
    return [x.clone().requires_grad_(x.is_floating_point()) for x in inputs]


def gradients(function, inputs, dy):
    inputs = differentiable(inputs)
    y = function(*inputs)
    return y, torch.autograd.grad(y, [x for x in inputs if x.requires_grad], dy)


@pytest.fixture(autouse=True)
def _poisoned_memory():
    """Memory as it is: a compiler would see that it is poisoned."""


@pytest.fixture(autouse=True)
def _fresh_compiler():
    """Nothing is compiled yet, and nothing comes from the disk."""
    torch._dynamo.reset()
    with torch._functorch.config.patch(enable_autograd_cache=False):
        yield
    torch._dynamo.reset()


# -- compilers


@pytest.mark.parametrize("backend", BACKENDS)
@ALL
def test_compiled_is_eager(function, draw, backend):
    inputs = draw(3)
    compiled = torch.compile(lambda *x: function(*x) * 2, fullgraph=True, backend=backend)
    dy = torch.randn_like(function(*inputs))
    y, grads = gradients(compiled, inputs, dy)
    expected, truth = gradients(lambda *x: function(*x) * 2, inputs, dy)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(grads, truth)
    assert expected.abs().sum() > 0
    assert all(g.abs().sum() > 0 for g in truth)


SHOWN = {
    "softmax": (["row_fwd_kernel"], ["row_bwd_kernel"]),
    "softmax, inside": (["row_fwd_kernel"], []),  # backward reads a y that is not contiguous
    "layer_norm": (["row_fwd_kernel"], ["row_bwd_kernel", "buffer_sum_kernel"]),
    "layer_norm, 16 bits": (["row_fwd_kernel"], ["row_bwd_kernel", "buffer_sum_kernel"]),
    "masked_dropout": (["masked_dropout_kernel"],) * 2,
    "seeded by a tensor": (["seeded_dropout_kernel"],) * 2,
}
"""Kernels that compiled code launches itself, in forward and in backward."""


@pytest.mark.skipif(runtime.INTERPRETED, reason="needs a GPU")
@pytest.mark.parametrize("name", CASES)
def test_compiled_code_launches_the_kernels_that_are_shown(name):
    function, draw = CASES[name]
    inputs = differentiable(draw(64))
    compiled = torch.compile(function, fullgraph=True)
    _, codes = run_fw_bw_and_get_code(lambda: compiled(*inputs))
    for code, kernels in zip(codes, SHOWN.get(name, [[]]), strict=False):
        assert ("torch.ops.kernelbook" in code) == (not kernels)
        for kernel in kernels:
            assert len(re.findall(rf"{kernel}_\d\.run\(", code)) == 1
    if name == "seeded by a tensor":  # the launch is all: nothing is copied for it
        assert codes[0].count(".run(") == 1


@pytest.mark.skipif(runtime.INTERPRETED, reason="needs a GPU")
@pytest.mark.parametrize("p", [0.0, 2**-32, 0.1, 0.5, 1 - 2**-31])
def test_a_compiled_dropout_takes_any_probability(p):
    x = torch.ones(4097, device=DEVICE)
    seed = torch.tensor(3, device=DEVICE)
    compiled = torch.compile(lambda x: kernelbook.seeded_dropout(x, p, seed), fullgraph=True)
    assert torch.equal(compiled(x), kernelbook.seeded_dropout(x, p, 3))


@pytest.mark.skipif(runtime.INTERPRETED, reason="needs a GPU")
@pytest.mark.parametrize("name", ["softmax", "layer_norm", "masked_dropout", "seeded by a tensor"])
@pytest.mark.parametrize("n_cols", [1001, 2050])
@pytest.mark.filterwarnings("ignore:TensorFloat32")
def test_compiled_code_may_pad_rows(name, n_cols):
    """A matmul lets the compiler pad the rows of what it reads, which a kernel reads as well."""
    x, matrix = randn(300, n_cols), randn(n_cols, 8)
    more = {"layer_norm": parameters(n_cols), "seeded by a tensor": (torch.tensor(5).to(DEVICE),)}

    def model(x, matrix, *more):
        x = x.sin()
        y = CASES[name][0](x, *more)
        return x @ matrix, y @ matrix, y.cos()

    inputs = x, matrix, *more.get(name, ())
    padding = {"rtol": 1e-3, "atol": 1e-3}  # moves numbers, and changes results by about 1
    torch.testing.assert_close(torch.compile(model)(*inputs), model(*inputs), **padding)


@ALL
def test_another_batch_is_not_compiled_again(function, draw):
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, fullgraph=True, backend=counter, dynamic=True)
    counts = []
    for n in (3, 4, 7):
        inputs = draw(n)
        torch.testing.assert_close(compiled(*inputs), function(*inputs))
        counts.append(counter.frame_count)
    assert 0 < counts[0] == counts[-1]


@ALL
def test_exported_is_eager(function, draw):
    class Model(torch.nn.Module):
        def forward(self, *inputs):
            return function(*inputs)

    inputs = draw(3)
    of_batch = {0: torch.export.Dim.DYNAMIC}
    first, *rest = inputs
    shared = [of_batch if x.ndim == 4 else None for x in rest]
    exported = torch.export.export(Model(), inputs, dynamic_shapes=((of_batch, *shared),))
    again = draw(5)
    torch.testing.assert_close(exported.module()(*again), function(*again))


BY_ROWS = {name: case for name, case in CASES.items() if not name.startswith("attention")} | {
    "softmax, first": (lambda x: kernelbook.softmax(x, dim=0), lambda n: (randn(n, 40),))
}


@pytest.mark.parametrize("exported", [False, True])
@pytest.mark.parametrize(("function", "draw"), BY_ROWS.values(), ids=BY_ROWS)
def test_how_many_rows_there_are_may_depend_on_their_numbers(function, draw, exported):
    """Whoever makes such a graph knows no size, and may ask nothing of it, also in backward."""

    class Model(torch.nn.Module):
        def forward(self, x, chosen, *rest):
            return function(x[chosen] * 2, *rest)

    def choose(n):
        return torch.arange(12, device=DEVICE) < n

    first, *rest = draw(12)
    if exported:
        model = torch.export.export(Model(), (first, choose(5), *rest)).module()
    else:
        model = torch.compile(Model(), fullgraph=True, backend="aot_eager", dynamic=True)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        for n in (5, 8, 0):
            inputs = first, choose(n), *rest
            dy = torch.randn_like(Model()(*inputs))
            found, expected = gradients(model, inputs, dy), gradients(Model(), inputs, dy)
            torch.testing.assert_close(found, expected)
            assert all(bool(x.any()) == (n > 0) for x in (found[0], *found[1]))


@pytest.mark.parametrize(
    ("function", "shapes", "dim"),
    [
        (lambda x: kernelbook.layer_norm(x, x.shape[-1:]), [(4, 6), (4, 9)], 1),
        (lambda x: attention_varlen(x, x, x), [(3, 4, 2, 16), (3, 7, 2, 16)], 1),
        (lambda x: kernelbook.attention(x, x, x, window=(x.shape[2] // 2, 0)),
         [(1, 2, 8, 16), (1, 2, 12, 16)], 2),
    ],
    ids=["layer_norm", "attention_varlen", "attention"],
)  # fmt: skip
def test_a_size_of_an_exported_graph_may_be_an_argument(function, shapes, dim):
    """While it is made, such a size is no int."""

    class Model(torch.nn.Module):
        def forward(self, x):
            return function(x)

    one, other = (randn(*shape) for shape in shapes)
    dynamic = ({dim: torch.export.Dim.DYNAMIC},)
    exported = torch.export.export(Model(), (one,), dynamic_shapes=dynamic).module()
    torch.testing.assert_close(exported(other), function(other))


@ALL
def test_an_exported_graph_can_be_differentiated(function, draw):
    """Whether its inputs require a gradient is not known when it is made."""

    class Model(torch.nn.Module):
        def forward(self, *inputs):
            return function(*inputs)

    inputs = draw(3)
    exported = torch.export.export(Model(), inputs).module()
    dy = torch.randn_like(function(*inputs))
    found, expected = gradients(exported, inputs, dy), gradients(function, inputs, dy)
    torch.testing.assert_close(found, expected)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ["softmax", "layer_norm", "seeded_dropout", "attention"])
def test_a_trace_is_eager(name):
    """By ``torch.jit.trace``, in which sizes are tensors."""
    function, draw = CASES[name]
    inputs = draw(3)
    whole = (
        (lambda x, w, b: kernelbook.layer_norm(x, 24, w, b)) if name == "layer_norm" else function
    )
    traced = torch.jit.trace(whole, inputs, check_trace=False)
    again = draw(3)
    torch.testing.assert_close(traced(*again), function(*again))


@ALL
def test_meta_tensors_have_a_shape(function, draw):
    inputs = draw(3)
    y = function(*(x.to("meta") for x in inputs))
    assert y.is_meta
    assert (y.shape, y.dtype) == (inputs[0].shape, inputs[0].dtype)


@ALL
def test_fake_tensors_have_the_layout_of_real_ones(function, draw):
    inputs = draw(3)
    y, grads = gradients(function, inputs, torch.ones_like(function(*inputs)))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [mode.from_tensor(x) for x in inputs]
        dy = torch.ones(y.shape, dtype=y.dtype, device=y.device)
        fake_y, fake_grads = gradients(function, fakes, dy)
    for fake, real in zip((fake_y, *fake_grads), (y, *grads), strict=True):
        assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)


def a_row(device):
    """Contiguous, because it is one row, whose stride does not matter."""
    return torch.ones(2, 6, device=device)[:1, :3]


@pytest.mark.parametrize(
    ("function", "draw"),
    [
        (lambda x: kernelbook.softmax(x, 0), lambda device: torch.ones(0, 3, device=device)),
        (seeded_dropout, a_row),
        (masked_dropout, a_row),
    ],
    ids=["softmax of nothing", "seeded_dropout of a row", "masked_dropout of a row"],
)
def test_strides_that_do_not_matter_are_those_on_meta(function, draw):
    assert function(draw(DEVICE)).stride() == function(draw("meta")).stride()


def halves():
    """Offsets of two sequences in nine rows."""
    return torch.tensor([0, 4, 9], dtype=torch.int32, device=DEVICE)


OPERATORS = torch.ops.kernelbook
CALLS = {
    "weighted_sum": (
        OPERATORS.weighted_sum,
        lambda: (randn(3, 24).requires_grad_(), randn(24).requires_grad_(), torch.float32),
    ),
    "weighted_sum_backward": (
        OPERATORS.weighted_sum_backward,
        lambda: (
            randn(3).requires_grad_(), randn(3, 24).requires_grad_(), randn(24).requires_grad_(),
            [True, True],
        ),
    ),
    "softmax": (OPERATORS.softmax, lambda: (randn(3, 40).requires_grad_(), -1, "row")),
    "softmax_backward": (
        OPERATORS.softmax_backward, lambda: (randn(3, 40), randn(3, 40), -1, "row")
    ),
    "layer_norm": (
        OPERATORS.layer_norm,
        lambda: (
            randn(3, 24).requires_grad_(), *parameters(24), [24], 1e-5, True, torch.float16
        ),
    ),
    "layer_norm_backward": (
        OPERATORS.layer_norm_backward,
        lambda: (
            randn(3, 24), randn(3, 24), *parameters(24), randn(3), randn(3), [24],
            [True, True, False],
        ),
    ),
    "attention": (
        OPERATORS.attention,
        lambda: (
            *(randn(1, 2, 9, 16).requires_grad_() for _ in range(3)), True, None, 0, 0.25, True,
            "auto",
        ),
    ),
    "attention_backward": (
        OPERATORS.attention_backward,
        lambda: (
            *(randn(1, 2, 9, 16) for _ in range(4)), randn(1, 2, 9), randn(1, 2, 9, 16), None,
            True, None, 0, 0.25, True, "auto", [True, False, False],
        ),
    ),
    "attention_varlen": (
        OPERATORS.attention_varlen,
        lambda: (
            *(randn(9, 2, 16).requires_grad_() for _ in range(3)), *[halves()] * 2, 5, 5, None, 0,
            0.25, "auto",
        ),
    ),
    "attention_varlen_backward": (
        OPERATORS.attention_varlen_backward,
        lambda: (
            *(randn(9, 2, 16) for _ in range(3)), *[halves()] * 2, randn(9, 2, 16), randn(2, 9),
            randn(9, 2, 16), None, 5, 5, None, 0, 0.25, "auto", [True, False, False],
        ),
    ),
    "masked_dropout": (
        OPERATORS.masked_dropout, lambda: (randn(7).requires_grad_(), keep(randn(7)), 0.5)
    ),
    "quantize": (OPERATORS.quantize, lambda: (randn(1, 2, 9, 16), torch.float8_e4m3fn, True, True)),
    "seeded_dropout": (OPERATORS.seeded_dropout, lambda: (randn(7).requires_grad_(), 0.5, 3, None)),
}  # fmt: skip


@pytest.mark.parametrize(("operator", "draw"), CALLS.values(), ids=CALLS)
def test_opcheck(operator, draw):
    torch.library.opcheck(operator, draw())


class Seen(TorchDispatchMode):
    """The operators of the book that the dispatcher meets."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "kernelbook":
            self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize(("operator", "draw"), CALLS.values(), ids=CALLS)
def test_a_dispatch_mode_sees_the_operator_once(operator, draw, grad):
    with torch.set_grad_enabled(grad), Seen() as seen:
        operator(*draw())
    assert seen.names == [operator.default.__name__]


@pytest.mark.parametrize(("operator", "draw"), CALLS.values(), ids=CALLS)
def test_an_operator_without_a_gradient_is_not_recorded(operator, draw):
    with torch.no_grad():
        results = operator(*draw())
    results = results if isinstance(results, tuple) else (results,)
    assert not any(x.requires_grad for x in results)


def test_a_call_from_compiled_code_goes_through_few_functions():
    """The host decides how fast a compiled model runs, and each function costs it time."""
    entered = []

    def count(frame, event, arg):
        if event == "call":
            entered.append(frame.f_code.co_name)

    twice = library.Operator(
        "twice",
        _twice,
        fake=torch.empty_like,
        batch=lambda info, in_dims, x: (_twice(x), in_dims[0]),
        setup_context=lambda ctx, inputs, output: None,
        backward=lambda ctx, dy: (2 * dy,),
    )
    x = randn(3).requires_grad_()
    with torch.no_grad():
        twice.op(x)
        sys.setprofile(count)
        try:
            y = twice.op(x)
        finally:
            sys.setprofile(None)
    assert torch.equal(y, 2 * x)
    assert entered.count("_twice") == 1
    assert len(entered) <= 4  # PyTorch's own, autograd's, what asks which comes next, and _twice
    assert torch.equal(torch.autograd.grad(twice.op(x).sum(), x)[0], torch.full_like(x, 2))


def _twice(x: torch.Tensor) -> torch.Tensor:
    return x + x


# -- torch.func


@ALL
def test_func_grad_is_autograd(function, draw):
    inputs = draw(3)
    dy = torch.randn_like(function(*inputs))
    places = tuple(i for i, x in enumerate(inputs) if x.is_floating_point())
    found = torch.func.grad(lambda *x: (function(*x) * dy).sum(), places)(*inputs)
    torch.testing.assert_close(found, gradients(function, inputs, dy)[1])


@ALL
def test_vmap_is_a_loop(function, draw):
    calls = [draw(2) for _ in range(3)]
    for shared in (False, True):
        first, *rest = (torch.stack(x) for x in zip(*calls, strict=True))
        stacked = [first, *calls[0][1:]] if shared else [first, *rest]
        dims = (0, *([None if shared else 0] * len(rest)))
        if shared and not rest:
            continue
        one = [(c[0], *(calls[0][1:] if shared else c[1:])) for c in calls]
        expected = torch.stack([function(*c) for c in one])
        torch.testing.assert_close(torch.vmap(function, dims)(*stacked), expected)


@ALL
def test_gradients_of_each_example(function, draw):
    """vmap of grad, as for the gradients of each example."""
    calls = [draw(2) for _ in range(3)]
    stacked = [torch.stack(x) for x in zip(*calls, strict=True)]
    dy = torch.randn_like(function(*calls[0]))

    def loss(*x):
        return (function(*x) * dy).sum()

    found = torch.vmap(torch.func.grad(loss))(*stacked)
    expected = torch.stack([gradients(function, c, dy)[1][0] for c in calls])
    torch.testing.assert_close(found, expected)


@ALL
def test_a_gradient_flows_through_vmap(function, draw):
    """Within vmap no tensor says that it requires a gradient, as in an ensemble of models."""
    stacked = [torch.stack(x) for x in zip(*(draw(2) for _ in range(3)), strict=True)]
    dy = torch.randn_like(torch.vmap(function)(*stacked))
    _, found = gradients(torch.vmap(function), stacked, dy)
    places = [x.is_floating_point() for x in stacked]
    expected = [gradients(function, calls, d)[1] for *calls, d in zip(*stacked, dy, strict=True)]
    assert len(found) == sum(places)
    for ours, parts in zip(found, zip(*expected, strict=True), strict=True):
        torch.testing.assert_close(ours, torch.stack(parts))


@ALL
def test_vmap_over_no_calls(function, draw):
    inputs = draw(2)
    none = [x.new_empty(0, *x.shape) for x in inputs]
    assert torch.vmap(function)(*none).shape == (0, *function(*inputs).shape)
    _, grads = gradients(torch.vmap(function), none, none[0])
    assert [g.shape for g in grads] == [x.shape for x in none if x.is_floating_point()]


@ALL
def test_a_batch_of_gradients_is_a_loop(function, draw):
    """By ``is_grads_batched``, whose vmap is not that of torch.func."""
    inputs = differentiable(draw(2))
    y = function(*inputs)
    wanted = [x for x in inputs if x.requires_grad]
    batch = torch.randn(3, *y.shape, device=DEVICE)
    found = torch.autograd.grad(y, wanted, batch, is_grads_batched=True, retain_graph=True)
    loop = [torch.autograd.grad(y, wanted, dy, retain_graph=True) for dy in batch]
    for ours, parts in zip(found, zip(*loop, strict=True), strict=True):
        torch.testing.assert_close(ours, torch.stack(parts))


@ALL
def test_functionalize_changes_nothing(function, draw):
    inputs = draw(3)
    torch.testing.assert_close(torch.func.functionalize(function)(*inputs), function(*inputs))


def test_second_gradients_by_func():
    x, w = randn(3, 8), randn(3, 8)

    def twice(function):
        inner = torch.func.grad(lambda x: (function(x) * w).sum())
        return torch.func.grad(lambda x: (inner(x) * w).sum())(x)

    torch.testing.assert_close(twice(softmax), twice(lambda x: x.softmax(-1)))
    ours = twice(lambda x: weighted_sum(x, w[0]))
    torch.testing.assert_close(ours, twice(lambda x: x * (x * w[0]).sum(-1, keepdim=True)))
    ours = twice(lambda x: kernelbook.layer_norm(x, 8))
    torch.testing.assert_close(ours, twice(lambda x: F.layer_norm(x, (8,))), rtol=1e-4, atol=1e-5)


def test_attention_has_no_second_gradient_by_func_either():
    q, k, v = CASES["attention"][1](1)
    inner = torch.func.grad(lambda q: attention(q, k, v).square().sum())
    with pytest.raises(RuntimeError, match="attention can be differentiated once"):
        torch.func.grad(lambda q: inner(q).square().sum())(q)


# -- autocast

KIND = torch.device(DEVICE).type
HALF = torch.bfloat16
PYTORCHS = {
    "softmax": (softmax, lambda x: x.softmax(-1)),
    "layer_norm": (layer_norm, lambda x, w, b: F.layer_norm(x, (24,), w, b)),
    "attention": (
        kernelbook.attention, lambda q, k, v: F.scaled_dot_product_attention(q, k, v)
    ),
    "seeded_dropout": (seeded_dropout, lambda x: F.dropout(x, 0.25)),
}  # fmt: skip


@pytest.mark.parametrize("dtypes", [[torch.float32] * 3, [HALF] * 3, [HALF, torch.float32, HALF]])
@pytest.mark.parametrize("name", PYTORCHS)
def test_autocast_is_pytorchs(name, dtypes):
    ours, pytorchs = PYTORCHS[name]
    inputs = [x.to(dtype) for x, dtype in zip(CASES[name][1](2), dtypes, strict=False)]
    with torch.autocast(KIND, HALF):
        y = ours(*inputs)
        expected = pytorchs(*(inputs if KIND == "cuda" else [x.to(dtypes[0]) for x in inputs]))
    assert y.dtype == expected.dtype
    if name != "seeded_dropout":
        torch.testing.assert_close(y, expected, rtol=2e-2, atol=2e-2)
    leaves = [x.clone().requires_grad_() for x in inputs]
    with torch.autocast(KIND, HALF):
        loss = ours(*leaves).float().square().sum()
    for leaf, dx in zip(leaves, torch.autograd.grad(loss, leaves), strict=True):
        assert dx.dtype == leaf.dtype
        assert dx.abs().sum() > 0


def test_compiled_under_autocast():
    q, k, v = CASES["attention"][1](2)
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    with torch.autocast(KIND, HALF):
        y = compiled(q, k, v)
    assert y.dtype == HALF
    torch.testing.assert_close(y.float(), attention(q, k, v), rtol=2e-2, atol=2e-2)


# -- random numbers


def test_a_compiled_dropout_draws_anew():
    x = torch.ones(4096, device=DEVICE)
    compiled = torch.compile(lambda x: kernelbook.dropout(x, 0.5), fullgraph=True)
    first, second = compiled(x), compiled(x)
    assert 0.4 < (first > 0).float().mean() < 0.6
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    one = compiled(x)
    torch.manual_seed(3)
    assert torch.equal(one, compiled(x))


@pytest.mark.skipif(not runtime.INTERPRETED, reason="a GPU has no autocast of the CPU")
def test_nothing_of_the_dispatcher_is_in_the_way_of_eager():
    with torch.profiler.profile() as profile:
        softmax(randn(2, 8))
    assert not any("kernelbook" in event.name for event in profile.events())


# -- CUDA graphs


@pytest.mark.usefixtures("gpu")
@ALL
def test_a_graph_replays_forward_and_backward(function, draw):
    inputs = differentiable(draw(3))
    leaves = [x for x in inputs if x.requires_grad]
    dy = torch.randn_like(function(*inputs))
    torch.autograd.grad(function(*inputs), leaves, dy)  # compile before anything is captured
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = function(*inputs)
        grads = torch.autograd.grad(y, leaves, dy)
    for _ in range(2):
        with torch.no_grad():
            for x, new in zip(inputs, draw(3), strict=True):
                x.copy_(new)
        graph.replay()
        expected, truth = gradients(function, [x.detach() for x in inputs], dy)
        torch.testing.assert_close(y, expected)
        torch.testing.assert_close(grads, truth)


@pytest.mark.usefixtures("gpu")
def test_a_graph_of_dropout_draws_anew_and_backward_finds_its_mask():
    x = torch.ones(4096, device=DEVICE, requires_grad=True)
    kernelbook.dropout(x).sum().backward()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = kernelbook.dropout(x)
        (dx,) = torch.autograd.grad(y.sum(), x)
    seen = []
    for _ in range(3):
        graph.replay()
        assert torch.equal(y > 0, dx > 0)
        seen.append(y.clone())
    assert not torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[1], seen[2])


# -- checkpointing


def test_checkpointing_replays_the_mask():
    x = torch.randn(4096, device=DEVICE, requires_grad=True)

    def model(x):
        return kernelbook.dropout(x, 0.5) * 3

    for step in (model, torch.compile(model, backend="aot_eager")):
        y = checkpoint(step, x, use_reentrant=False)
        (dx,) = torch.autograd.grad(y.sum(), x)
        assert torch.equal(y != 0, dx != 0)
        assert 0.4 < (dx != 0).float().mean() < 0.6
