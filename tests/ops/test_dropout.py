"""Dropout against float64 truth, by property, and its random numbers by statistics."""

import sys
from fractions import Fraction

import pytest
import torch
from conftest import DEVICE, DTYPES, assert_close
from torch.utils.checkpoint import checkpoint

from kernelbook import dropout, masked_dropout, reference, runtime, seeded_dropout

module = sys.modules["kernelbook.ops.dropout"]  # the function has the name of its module

# One element, an odd length, one block of 2048, one more, several blocks; one to three dimensions.
SHAPES = [(1,), (7,), (2048,), (2049,), (3, 1000), (2, 3, 1111)]
SEEDS = [0, 1, -5, 2**31, 2**40 + 3, 2**63 - 1, 2**64 - 1]
PROBABILITIES = [0.0, 0.1, 0.5, 0.9]

LONG = 2**17 if runtime.INTERPRETED else 2**26
"""Elements for statistics."""

ROUNDS = 7
"""Rounds of Philox that the public function promises."""

Z = 5.0
"""Bound on |z|: a fair generator passes it with probability 1 - 5.7e-7 a test."""


def plain(x, keep, p):
    """Dropout in PyTorch, in the dtype of x."""
    return x * keep / (1 - p)


def draw(*shape, dtype=torch.float32):
    return torch.randn(shape, device=DEVICE).to(dtype)


def positions(x):
    return torch.arange(x.numel(), device=x.device).view(x.shape)


def keep_of(x, p, seed):
    return reference.keep_mask(positions(x), p, seed, ROUNDS)


@pytest.mark.parametrize(
    ("rounds", "counter", "seed", "expected"),
    [
        (7, 0, 0, (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
        (10, 0, 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ],
)
def test_reference_philox_gives_the_published_vectors(rounds, counter, seed, expected):
    """The known answers that come with Random123, the authors' own library."""
    assert tuple(reference.philox(seed, torch.tensor(counter), rounds).tolist()) == expected


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("p", PROBABILITIES)
def test_masked_dropout_is_the_truth(shape, dtype, p):
    x = draw(*shape, dtype=dtype).requires_grad_()
    keep = torch.rand(shape, device=DEVICE) >= p
    keep.view(-1)[0] = True  # one kept element at least, or the truth is zero everywhere
    dy = draw(*shape, dtype=dtype)
    y = masked_dropout(x, keep, p)
    y.backward(dy)
    assert y.dtype == dtype
    assert_close(y, reference.masked_dropout(x, keep, p), plain(x, keep, p))
    assert_close(x.grad, reference.masked_dropout(dy, keep, p), plain(dy, keep, p))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES[1:])
@pytest.mark.parametrize("p", PROBABILITIES)
def test_seeded_dropout_is_the_truth(shape, dtype, p):
    x = draw(*shape, dtype=dtype).requires_grad_()
    dy = draw(*shape, dtype=dtype)
    seed = 12
    y = seeded_dropout(x, p, seed)
    y.backward(dy)
    keep = keep_of(x, p, seed)
    assert y.dtype == dtype
    assert_close(y, reference.seeded_dropout(x, p, seed), plain(x, keep, p))
    assert_close(x.grad, reference.seeded_dropout(dy, p, seed), plain(dy, keep, p))


def test_a_number_equal_to_the_threshold_keeps_its_element():
    """By chance that happens once in 2**32 elements, so each number is made the threshold."""
    numbers = reference.philox(3, torch.arange(4, device=DEVICE), ROUNDS).flatten()
    x = torch.ones(numbers.numel(), device=DEVICE)
    for number in numbers:
        kept = seeded_dropout(x, number.item() / 2**32, seed=3) != 0  # exact in float64
        assert torch.equal(kept, numbers >= number)


@pytest.mark.parametrize("seed", SEEDS)
def test_every_seed_makes_the_mask_of_the_truth(seed):
    x = torch.ones(5000, device=DEVICE)
    expected = keep_of(x, 0.5, seed)
    assert torch.equal(seeded_dropout(x, 0.5, seed) != 0, expected)
    signed = seed if seed < 2**63 else seed - 2**64
    as_tensor = torch.tensor(signed, device=DEVICE)
    assert torch.equal(seeded_dropout(x, 0.5, as_tensor) != 0, expected)


def test_one_number_an_element_drops_at_the_right_rate_and_scales():
    x = torch.ones(LONG, device=DEVICE)
    y = module._rand_dropout(x, 0.25, 3)
    assert sorted(y.unique().tolist()) == pytest.approx([0, 1 / 0.75])
    assert abs(z_of_rate(y != 0, 0.25)) < Z


def test_the_mask_depends_on_seed_and_index_alone(monkeypatch):
    x = torch.ones(6, 1024, device=DEVICE)
    mask = seeded_dropout(x, 0.5, 9) != 0
    assert torch.equal(seeded_dropout(x.view(-1), 0.5, 9).view(6, 1024) != 0, mask)
    assert torch.equal(seeded_dropout(x.half(), 0.5, 9) != 0, mask)
    assert torch.equal(seeded_dropout(x[:2], 0.5, 9) != 0, mask[:2])
    assert torch.equal(seeded_dropout(x * 3, 0.5, 9) != 0, mask)
    assert not torch.equal(seeded_dropout(x, 0.5, 10) != 0, mask)
    for block_size in (128, 1024, 4096):
        monkeypatch.setattr(module, "BLOCK_SIZE", block_size)
        assert torch.equal(seeded_dropout(x, 0.5, 9) != 0, mask)


STRIDED = {
    "transposed": lambda: draw(65, 33).t(),
    "every second column": lambda: draw(40, 90)[:, ::2],
    "offset by one element": lambda: draw(3001)[1:],
    "expanded": lambda: draw(1, 77).expand(50, 77),
    "permuted": lambda: draw(4, 5, 6, 7).permute(3, 1, 0, 2),
}


@pytest.mark.parametrize("make", STRIDED.values(), ids=STRIDED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_strides_do_not_matter(make, dtype):
    x = make().to(dtype).detach().requires_grad_()
    keep = keep_of(x, 0.5, 4)
    dy = draw(1, dtype=dtype).expand(x.shape)  # the gradient of a sum has stride 0
    for y in (seeded_dropout(x, 0.5, 4), masked_dropout(x, keep, 0.5)):
        assert_close(y, reference.masked_dropout(x, keep, 0.5), plain(x, keep, 0.5))
        (dx,) = torch.autograd.grad(y, x, dy)
        assert_close(dx, reference.masked_dropout(dy, keep, 0.5), plain(dy, keep, 0.5))
    strided_keep = keep.t().contiguous().t() if keep.ndim == 2 else keep
    assert torch.equal(masked_dropout(x, strided_keep, 0.5), masked_dropout(x, keep, 0.5))


@pytest.mark.parametrize("shape", [(0,), (3, 0, 2), ()])
def test_empty_tensors_and_scalars(shape):
    x = torch.ones(shape, device=DEVICE, requires_grad=True)
    for y in (dropout(x, 0.0), masked_dropout(x, torch.ones_like(x, dtype=torch.bool), 0.0)):
        assert y.shape == shape
        y.sum().backward()
        assert torch.equal(y, x)
        assert x.grad.shape == shape


def test_dropping_nothing_changes_nothing():
    x = draw(5000)
    assert torch.equal(dropout(x, 0.0), x)
    assert torch.equal(seeded_dropout(x, 0, 1), x)


@pytest.mark.parametrize("p", [1 - 1e-3, 1 - 2**-24, 1 - 2**-53])
def test_p_close_to_one_drops_nearly_all_and_stays_finite(p):
    x = torch.ones(LONG, device=DEVICE)
    y = seeded_dropout(x, p, 1)
    kept = y != 0
    # Poisson: more than mean + 6 sqrt(mean) + 10 kept elements have probability below 1e-9.
    mean = LONG * (1 - p)
    assert kept.sum().item() <= mean + 6 * mean**0.5 + 10
    if p < 0.9999:
        assert kept.any()
        assert y[kept].double().allclose(torch.tensor(1 / (1 - p)).double(), rtol=1e-6)


def test_what_is_dropped_is_zero_even_where_x_is_not_finite():
    x = torch.full((4096,), float("nan"), device=DEVICE)
    x[::2] = float("inf")
    keep = keep_of(x, 0.5, 2)
    for y in (seeded_dropout(x, 0.5, 2), masked_dropout(x, keep, 0.5)):
        assert (y[~keep] == 0).all()
        assert not y[keep].isfinite().any()


def test_second_derivatives_exist():
    x = draw(300).double().float().requires_grad_()
    y = seeded_dropout(x, 0.5, 6)
    (dx,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
    (ddx,) = torch.autograd.grad(dx.sum(), x)
    keep = keep_of(x, 0.5, 6)
    truth = torch.where(keep, 6 * 8 * x.detach().double(), 0.0)
    assert_close(ddx, truth, truth.float())


def test_gradients_that_are_not_needed_are_not_computed():
    y = seeded_dropout(draw(10), 0.5, 1)
    assert not y.requires_grad


# -- torch's generator


def test_the_generator_makes_dropout_reproducible_and_moves_on():
    x = torch.ones(4096, device=DEVICE)
    torch.manual_seed(1)
    first, second = dropout(x), dropout(x)
    assert not torch.equal(first, second)
    torch.manual_seed(1)
    assert torch.equal(dropout(x), first)
    assert torch.equal(dropout(x), second)


def test_without_training_the_input_comes_back():
    x = draw(10).requires_grad_()
    assert dropout(x, 0.5, training=False) is x


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_replays_the_mask(use_reentrant):
    x = draw(4096).requires_grad_()
    masks = []

    def layer(x):
        y = dropout(x, 0.5)
        masks.append(y.detach() != 0)
        return y**2

    y = checkpoint(layer, x, use_reentrant=use_reentrant)
    torch.rand(7, device=DEVICE)  # the generator moves on between forward and backward
    y.sum().backward()
    assert len(masks) == 2
    assert torch.equal(masks[0], masks[1])
    truth = torch.where(masks[0], 8 * x.detach().double(), 0.0)
    assert_close(x.grad, truth, truth.float())


def test_nothing_of_the_size_of_x_is_kept_for_backward():
    kept = []

    def pack(tensor):
        kept.append(tensor.numel() * tensor.element_size())
        return tensor

    x = draw(4096).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        dropout(x, 0.5)
        seeded_dropout(x, 0.5, 3)
        assert sum(kept) == 8  # one int64 seed
        masked_dropout(x, x > 0, 0.5)
        assert sum(kept) == 8 + 4096


# -- the random numbers


def z_of_rate(mask, p):
    n = mask.numel()
    return (mask.sum().item() - n * (1 - p)) / (n * p * (1 - p)) ** 0.5


def z_of_correlation(a, b, p):
    a, b = a.double() - (1 - p), b.double() - (1 - p)
    return (a * b).sum().item() / (a.numel() ** 0.5 * p * (1 - p))


@pytest.mark.parametrize("p", [0.5, 0.1, 0.01])
def test_masks_are_as_random_as_coin_tosses(p):
    """23 z-scores a value of p; a fair generator fails one of all 69 with probability 4e-5."""
    x = torch.ones(LONG, device=DEVICE)
    mask = seeded_dropout(x, p, 77) != 0
    found = {"rate": z_of_rate(mask, p)}
    for lag in (1, 2, 3, 4, 5, 8, 16, 32, 64, 128, 1024, 4096):
        found[f"lag {lag}"] = z_of_correlation(mask[:-lag], mask[lag:], p)
    for seed in (78, 76, 77 ^ 2**16, 77 ^ 2**31, 77 ^ 2**32, 77 ^ 2**48, 77 ^ 2**63):
        other = seeded_dropout(x, p, seed) != 0
        found[f"seed {seed}"] = z_of_correlation(mask, other, p)
    for lane in range(3):
        found[f"lane {lane}"] = z_of_rate(mask[lane::4], p)
    assert {name: z for name, z in found.items() if abs(z) > Z} == {}


def test_the_statistics_see_too_few_rounds():
    """The tests above have teeth: four rounds of Philox fail them by far."""
    x = torch.ones(LONG, device=DEVICE)
    masks = [module._seeded_dropout(x, 0.5, seed, n_rounds=4) != 0 for seed in (77, 78)]
    lags = [z_of_correlation(masks[0][:-lag], masks[0][lag:], 0.5) for lag in (1, 2, 3, 4, 8)]
    assert max(map(abs, [*lags, z_of_correlation(*masks, 0.5)])) > 2 * Z


# -- errors, all raised before anything runs


@pytest.fixture
def _no_launch(monkeypatch):
    monkeypatch.setattr(module, "_run", lambda *_, **__: pytest.fail("a kernel was launched"))


ERRORS = {
    "x is a list": (lambda x: dropout([1.0]), TypeError, "x must be a torch.Tensor"),
    "x is integer": (lambda x: dropout(x.int()), TypeError, "float32, float16 or bfloat16"),
    "x is float64": (lambda x: dropout(x.double()), TypeError, "float32, float16 or bfloat16"),
    "p is 1": (lambda x: dropout(x, 1.0), ValueError, "p must be at least 0 and below 1, got 1.0"),
    "p is negative": (lambda x: seeded_dropout(x, -0.1, 0), ValueError, "below 1, got -0.1"),
    "p rounds to 1": (
        lambda x: dropout(x, Fraction(2**60 - 1, 2**60)),
        ValueError,
        "below 1, got 1.0",
    ),
    "p is a bool": (lambda x: dropout(x, True), TypeError, "p must be a number, got True"),
    "seed is a bool": (lambda x: seeded_dropout(x, 0.5, True), TypeError, "seed must be an int"),
    "training is a number": (lambda x: dropout(x, 0.5, 1), TypeError, "training must be True or F"),
    "p is NaN": (lambda x: masked_dropout(x, x > 0, float("nan")), ValueError, "got nan"),
    "p is text": (lambda x: dropout(x, "0.5"), TypeError, "p must be a number, got '0.5'"),
    "mask of another shape": (
        lambda x: masked_dropout(x, x[:3] > 0, 0.5),
        ValueError,
        r"keep must have the shape of x, \(8,\), got \(3,\)",
    ),
    "mask is no bool": (
        lambda x: masked_dropout(x, x, 0.5),
        TypeError,
        "keep must be bool, got float32",
    ),
    "mask is a list": (lambda x: masked_dropout(x, [1], 0.5), TypeError, "keep.*got list"),
    "mask on another device": (
        lambda x: masked_dropout(x, (x > 0).to("meta"), 0.5),
        ValueError,
        "keep is on meta",
    ),
    "seed is a float": (lambda x: seeded_dropout(x, 0.5, 1.5), TypeError, "seed must be an int"),
    "seed is out of range": (lambda x: seeded_dropout(x, 0.5, 2**64), ValueError, "seed must lie"),
    "seed tensor is int32": (
        lambda x: seeded_dropout(x, 0.5, torch.tensor(1, dtype=torch.int32)),
        TypeError,
        "seed must be int64",
    ),
    "two seeds": (
        lambda x: seeded_dropout(x, 0.5, torch.tensor([1, 2])),
        ValueError,
        "must hold one element, got 2",
    ),
}


@pytest.mark.usefixtures("_no_launch")
@pytest.mark.parametrize(("call", "kind", "message"), ERRORS.values(), ids=ERRORS)
def test_errors_say_what_came_and_what_to_pass(call, kind, message):
    with pytest.raises(kind, match=message):
        call(torch.ones(8, device=DEVICE))


@pytest.mark.usefixtures("gpu", "_no_launch")
def test_a_tensor_on_the_cpu_is_refused_where_kernels_run_on_a_gpu():
    with pytest.raises(ValueError, match=r"x is on cpu.*pass x\.cuda\(\)"):
        dropout(torch.ones(8))


# -- what only a GPU can show


@pytest.mark.usefixtures("gpu")
def test_more_than_2_to_the_31_elements():
    n = 2**31 + 4097
    x = torch.ones(n, device=DEVICE, dtype=torch.float16)
    y = seeded_dropout(x, 0.5, 8)
    masked = masked_dropout(x, torch.ones(1, dtype=torch.bool, device=DEVICE).expand(n), 0.5)
    assert (masked[-5000:] == 2).all()
    for start in (0, 2**31 - 3000, n - 6000):
        index = torch.arange(start, min(start + 6000, n), device=DEVICE)
        expected = reference.keep_mask(index, 0.5, 8, ROUNDS)
        assert torch.equal(y[start : start + 6000] != 0, expected)


@pytest.mark.usefixtures("gpu")
def test_counters_past_32_bits():
    """Element 2**34 is the first whose counter, index // 4, needs a 33rd bit."""
    n = 2**34 + 4096
    if torch.cuda.mem_get_info()[0] < 2 * n * 2 + 2**30:
        pytest.skip("needs a GPU with 66 GiB free")
    x = torch.ones(n, device=DEVICE, dtype=torch.float16)
    y = seeded_dropout(x, 0.5, 8)
    index = torch.arange(2**34 - 2048, n, device=DEVICE)
    assert torch.equal(y[index[0] :] != 0, reference.keep_mask(index, 0.5, 8, ROUNDS))


@pytest.mark.usefixtures("gpu")
def test_a_cuda_graph_draws_a_new_mask_at_every_replay():
    x = torch.ones(4096, device=DEVICE)
    dropout(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = dropout(x)
    graph.replay()
    first = y.clone()
    graph.replay()
    assert not torch.equal(first, y)
    assert set(y.unique().tolist()) == {0.0, 2.0}
