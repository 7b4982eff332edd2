"""Which kernel computes attention: the choice on GPUs that are made up, and what is refused."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton
from conftest import DEVICE
from test_attention import draw

from kernelbook import quantize, runtime
from kernelbook.ops import ring
from kernelbook.ops.attention import attention, backward, decoding, forward, operator
from kernelbook.ops.hopper import backward_choice, choice
from kernelbook.ops.hopper.choice import CHOICES, CONFIGS, forward_choice, unsupported

HOPPER = (9, 0)
HALF, BF16 = torch.float16, torch.bfloat16


def shapes(head_dim=128, seqlen_q=8192, seqlen_k=None):
    return (2, 8, seqlen_q, head_dim), (2, 4, seqlen_k or seqlen_q, head_dim)


def limits():
    """Each row of the table, its last length and the first behind it."""
    for (head_dim, mask), rows in CHOICES.items():
        for most, config in rows:
            longest = min(most, 2**20)
            yield head_dim, mask, longest, config
        for (most, _), (_, config) in zip(rows, rows[1:], strict=False):
            yield head_dim, mask, most + 1, config


def seeing(keys, mask):
    """Return the length and the options with which a query sees so many keys at most."""
    if mask == "window":
        return keys + 100, {"window": (keys - 1, 0)}
    return keys, {"is_causal": mask == "causal"}


# -- the table


@pytest.mark.parametrize("case", list(limits()), ids=str)
@pytest.mark.parametrize("dtype", [HALF, BF16], ids=str)
def test_the_table_decides_on_hopper(case, dtype):
    head_dim, mask, keys, config = case
    length, options = seeing(keys, mask)
    sizes = shapes(head_dim, length)
    chosen = forward_choice(HOPPER, dtype, *sizes, **options)
    assert (chosen.backend, chosen.config) == ("gluon" if config else "triton", config)
    assert f"{keys:,} keys, {mask}" in chosen.reason
    assert forward_choice(HOPPER, dtype, *sizes, **options, backend="triton").config is None
    named = forward_choice(HOPPER, dtype, *sizes, **options, backend="gluon")
    assert (named.backend, named.config) == ("gluon", config or CONFIGS[head_dim])


@pytest.mark.parametrize("row", CHOICES.values(), ids=map(str, CHOICES))
def test_a_row_is_in_order_and_ends_at_no_length(row):
    most = [length for length, _ in row]
    assert most == sorted(set(most))
    assert most[-1] == float("inf")
    assert all(config is None or config.consumers in choice.REGISTERS for _, config in row)


def test_a_window_counts_as_the_keys_that_a_query_sees(monkeypatch):
    table = dict.fromkeys(CHOICES, ((100, None), (float("inf"), CONFIGS[128])))
    table[128, "causal"] = ((float("inf"), None),)
    monkeypatch.setattr(choice, "CHOICES", table)

    def backend(**options):
        return forward_choice(HOPPER, BF16, *shapes(seqlen_q=500), **options).backend

    assert backend() == "gluon"
    assert backend(window=(60, 39)) == "triton"
    assert backend(window=(60, 40)) == "gluon"
    assert backend(window=(99, None), is_causal=True) == "triton"
    assert backend(window=(100, None), is_causal=True) == "gluon"
    assert backend(is_causal=True) == "triton"  # one bound alone
    assert backend(window=(100, None)) == "triton"
    assert backend(window=(499, 499)) == "gluon"  # no bound


WHY_NOT = {
    "the interpreter": ((0, 0), BF16, 128, "interpreter, and the kernel is for Hopper"),
    "A100": ((8, 0), BF16, 128, "compute capability 8.0 is not 9.0, which is Hopper"),
    "RTX 4090": ((8, 9), BF16, 128, "compute capability 8.9"),
    "B200": ((10, 0), BF16, 128, "compute capability 10.0"),
    "RTX 5090": ((12, 0), BF16, 128, "compute capability 12.0"),
    "float32": (HOPPER, torch.float32, 128, "the dtype is float32, and not float16 or bfloat16"),
    "FP8": (HOPPER, torch.float8_e4m3fn, 128, "the dtype is float8_e4m3fn"),
    "head_dim 32": (HOPPER, BF16, 32, "head_dim is 32, and not 64 or 128"),
    "head_dim 96": (HOPPER, BF16, 96, "head_dim is 96"),
    "head_dim 256": (HOPPER, BF16, 256, "head_dim is 256"),
}


@pytest.mark.parametrize(
    ("capability", "dtype", "head_dim", "words"), WHY_NOT.values(), ids=WHY_NOT
)
def test_where_it_cannot_run_the_plain_kernel_does(capability, dtype, head_dim, words):
    sizes = shapes(head_dim)
    chosen = forward_choice(capability, dtype, *sizes)
    assert (chosen.backend, chosen.config) == ("triton", None)
    assert words in chosen.reason
    with pytest.raises(ValueError, match=f"backend must be 'auto' or 'triton'.*{words}"):
        forward_choice(capability, dtype, *sizes, backend="gluon")


# -- packed sequences

BOUNDS = {"full": (None, None), "causal": (None, 0), "window": (9, 0)}


@pytest.mark.parametrize("keys", [1, 1024, 1024.5, 10**6])
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("case", choice.VARLEN, ids=str)
def test_the_tables_of_packed_sequences_decide_on_hopper(case, backward, keys):
    head_dim, mask = case
    rows = (backward_choice.VARLEN if backward else choice.VARLEN)[case]
    config = next(config for most, config in rows if keys <= most)
    of = BF16, head_dim, BOUNDS[mask], keys
    chosen = choice.varlen_choice(HOPPER, *of, backward=backward)
    assert (chosen.backend, chosen.config) == ("gluon" if config else "triton", config)
    assert mask in chosen.reason
    assert choice.varlen_choice(HOPPER, *of, "triton", backward).config is None
    named = choice.varlen_choice(HOPPER, *of, "gluon", backward)
    assert named.backend == "gluon"
    assert named.config is config or (config is None and named.config is not None)


@pytest.mark.parametrize(
    ("capability", "dtype", "head_dim", "words"), WHY_NOT.values(), ids=WHY_NOT
)
def test_where_gluon_cannot_run_packed_sequences_are_plain(capability, dtype, head_dim, words):
    chosen = choice.varlen_choice(capability, dtype, head_dim, (None, 0), 5000)
    assert (chosen.backend, chosen.config) == ("triton", None)
    assert words in chosen.reason
    with pytest.raises(ValueError, match=f"backend must be 'auto' or 'triton'.*{words}"):
        choice.varlen_choice(capability, dtype, head_dim, (None, 0), 5000, "gluon")


def test_versions_of_triton(monkeypatch):
    for version in ("3.6.0", "3.7.1", "3.9.0", "3.10.0", "4.0.0+git1"):
        monkeypatch.setattr(triton, "__version__", version)
        assert unsupported(HOPPER, BF16, 128) is None
    monkeypatch.setattr(triton, "__version__", "3.5.1")
    assert "Triton 3.5.1 is older than 3.6" in unsupported(HOPPER, BF16, 128)


def test_capabilities_mean_other_gpus_on_amd(monkeypatch):
    """The MI200 says 9.0."""
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert "AMD" in forward_choice(HOPPER, BF16, *shapes()).reason


def test_a_triton_without_a_name_that_the_kernel_imports_runs_the_plain_one(monkeypatch):
    monkeypatch.setitem(sys.modules, "kernelbook.ops.hopper.forward", None)
    choice._attention_in_gluon.cache_clear()
    try:
        chosen = forward_choice(HOPPER, BF16, *shapes())
        with pytest.raises(ValueError, match="lacks a part of Gluon"):
            forward_choice(HOPPER, BF16, *shapes(), backend="gluon")
    finally:
        choice._attention_in_gluon.cache_clear()
    assert chosen.backend == "triton"
    assert "lacks a part of Gluon" in chosen.reason


def test_importing_the_package_does_not_import_gluon():
    script = "import sys, kernelbook; print([m for m in sys.modules if 'kernelbook.ops.ho' in m])"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True,
        cwd=Path(__file__).parents[2] / "src",
    )  # fmt: skip
    names = ["", ".backward_choice", ".choice", ".fp8_choice"]
    assert sorted(eval(done.stdout)) == [f"kernelbook.ops.hopper{name}" for name in names]


# -- what attention does with it


@pytest.fixture
def differentiated(monkeypatch):
    """What attention would run for gradients: (kernels, configuration, deterministic)."""
    ran, plain = [], backward.attention_backward

    def of(name):
        def run(*args, config=None, **needed):
            ran.append((name, config, args[8]))
            return plain(*args[:8], True, *args[9:], **needed)

        return run

    monkeypatch.setattr(backward_choice, "attention_in_gluon", lambda: of("gluon"))
    monkeypatch.setattr(operator, "attention_backward", of("triton"))
    return ran


@pytest.fixture
def pretended(monkeypatch, differentiated):
    """A Hopper GPU that is not there. What runs is plain; the value says which kernel was meant."""
    ran = []

    def of(name, run):
        return lambda *args: (
            ran.append((name, args[6] if name == "gluon" else None)) or run(*args[:6])
        )

    monkeypatch.setattr(runtime, "capability", lambda device: HOPPER)
    monkeypatch.setattr(
        choice, "attention_in_gluon", lambda: of("gluon", forward.attention_forward)
    )
    monkeypatch.setattr(operator, "attention_forward", of("triton", forward.attention_forward))
    return ran


@pytest.fixture
def from_30_keys(monkeypatch):
    rows = ((29, None), (float("inf"), CONFIGS[64]))
    monkeypatch.setattr(choice, "CHOICES", dict.fromkeys(CHOICES, rows))


def small(seqlen_k=40, dtype=HALF):
    return [x.detach() for x in draw(2, 2, 2, 20, seqlen_k, 64, dtype=dtype)]


@pytest.mark.usefixtures("interpreted", "from_30_keys")
@pytest.mark.parametrize(
    ("options", "seqlen_k", "expected"),
    [
        ({}, 40, "gluon"),
        ({}, 29, "triton"),
        ({"is_causal": True}, 30, "gluon"),
        ({"window": (20, 8)}, 40, "triton"),
        ({"window": (20, 9)}, 40, "gluon"),
        ({"backend": "triton"}, 40, "triton"),
        ({"backend": "gluon"}, 29, "gluon"),
    ],
)
def test_attention_runs_what_was_chosen(pretended, options, seqlen_k, expected):
    operands = small(seqlen_k)
    out = attention(*operands, **options)
    assert pretended == [(expected, CONFIGS[64] if expected == "gluon" else None)]
    options = {**options, "backend": "triton"}
    assert torch.equal(out, attention(*operands, **options))
    assert pretended[1:] == [("triton", None)]


@pytest.mark.usefixtures("interpreted", "from_30_keys")
def test_gradients_compilers_and_batches_run_it_too(pretended):
    q, k, v = small()
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = attention(*leaves)
    grads = torch.autograd.grad(out.sum(), leaves)

    def call(q, k, v):
        return attention(q, k, v, backend="gluon")

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, k, v), out)
    batched = torch.func.vmap(lambda *x: call(*(y[None] for y in x))[0])
    assert torch.equal(batched(q, k, v), out)
    ours = torch.func.grad(lambda *x: call(*x).sum(), argnums=(0, 1, 2))(q, k, v)
    assert all(torch.equal(a, b) for a, b in zip(ours, grads, strict=True))
    of_compiled = torch.autograd.grad(compiled(*leaves).sum(), leaves)
    assert all(torch.equal(a, b) for a, b in zip(of_compiled, grads, strict=True))
    assert {name for name, _ in pretended} == {"gluon"}
    assert len(pretended) == 5


@pytest.mark.usefixtures("interpreted", "pretended")
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ("gluon", backward_choice.CONFIGS[64], True)),
        ({"deterministic": False}, ("gluon", backward_choice.FREE[64], False)),
        ({"window": (5, 3)}, ("triton", None, True)),
        ({"window": (5, 3), "deterministic": False}, ("triton", None, True)),
        ({"backend": "triton"}, ("triton", None, True)),
        ({"backend": "triton", "deterministic": False}, ("triton", None, False)),
        ({"backend": "gluon", "window": (5, 3)}, ("gluon", backward_choice.CONFIGS[64], True)),
    ],
    ids=str,
)
def test_gradients_run_what_was_chosen_for_them(differentiated, monkeypatch, options, expected):
    rows = {True: backward_choice.CONFIGS[64], False: backward_choice.FREE[64]}
    table = {key: ((29, None), (float("inf"), rows[key[2]])) for key in backward_choice.CHOICES}
    monkeypatch.setattr(backward_choice, "CHOICES", table)
    leaves = [x.requires_grad_() for x in small()]
    attention(*leaves, **options).sum().backward()
    assert differentiated == [expected]


@pytest.mark.usefixtures("interpreted", "from_30_keys")
def test_dynamic_lengths_choose_anew_in_each_call(pretended):
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager", dynamic=True)
    for seqlen_k in (40, 25, 31, 29):
        operands = small(seqlen_k)
        assert torch.equal(compiled(*operands), attention(*operands, backend="triton"))
    assert [name for name, _ in pretended[::2]] == ["gluon", "triton", "gluon", "triton"]


@pytest.mark.usefixtures("interpreted", "from_30_keys")
def test_decoding_is_plain_unless_gluon_is_named(pretended, monkeypatch):
    monkeypatch.setattr(decoding, "FEWEST_KEYS", 1)
    monkeypatch.setattr(decoding, "FEWEST_TILES", 1)
    q, k, v = draw(1, 2, 2, 1, 99, 64, dtype=HALF)
    assert decoding.n_parts(q, k, False) > 0
    expected = attention(q, k, v)
    attention(q, k, v, backend="triton")
    assert pretended == []
    named = attention(q, k, v, backend="gluon")
    assert pretended == [("gluon", CONFIGS[64])]
    torch.testing.assert_close(named, expected, rtol=2e-3, atol=2e-3)


@pytest.mark.usefixtures("interpreted", "from_30_keys")
def test_operands_that_no_descriptor_fits_are_copied_as_for_the_plain_kernel(pretended):
    q, k, v = small()
    padded = torch.zeros(2, 2, 40, 65, device=DEVICE, dtype=HALF)[..., 1:].copy_(k)
    assert torch.equal(attention(q, padded, v, backend="gluon"), attention(q, k, v))
    assert [name for name, _ in pretended] == ["gluon"] * 2


@pytest.mark.usefixtures("interpreted", "from_30_keys")
def test_each_rank_of_a_ring_chooses(pretended):
    class Alone:
        rank, size = (lambda self: 0), (lambda self: 1)

    q, k, v = small()
    out = ring._Ring.apply(q, k, v, False, 64**-0.5, "contiguous", Alone())
    assert torch.equal(out, attention(q, k, v, backend="triton"))
    assert [name for name, _ in pretended] == ["gluon", "triton"]


# -- what is refused

BACKEND = {
    "a list": (["auto"], TypeError, r"backend must be a str, got \['auto'\] \(list\): pass 'auto'"),
    "None": (None, TypeError, "backend must be a str, got None"),
    "a bool": (True, TypeError, r"backend must be a str, got True \(bool\)"),
    "another": ("cuda", ValueError, "backend must be one of 'auto', 'triton', 'gluon', got 'cuda'"),
    "upper case": ("Gluon", ValueError, "got 'Gluon'"),
}


@pytest.mark.parametrize(("backend", "kind", "message"), BACKEND.values(), ids=BACKEND)
def test_what_is_no_backend_is_refused(backend, kind, message):
    with pytest.raises(kind, match=message):
        attention(*small(), backend=backend)


def of_8_bits():
    q, k, v = small()
    v, v_descale = quantize(v, contiguous="seqlen")
    return [q, k, v], {"v_descale": v_descale}


REFUSED = {
    "float32": (lambda: (small(dtype=torch.float32), {}), "the dtype is float32"),
    "head_dim": (lambda: (draw(1, 2, 2, 20, 40, 32, dtype=HALF), {}), "head_dim is 32"),
    "no keys": (lambda: (small(0), {}), "k is empty"),
    "no queries": (lambda: ([small()[0][:, :, :0], *small()[1:]], {}), "q is empty"),
    "v in FP8": (of_8_bits, "q is float16, and the kernel multiplies 8 bits by 8 bits"),
}


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(("make", "message"), REFUSED.values(), ids=REFUSED)
def test_gluon_is_refused_before_anything_runs(pretended, make, message):
    operands, options = make()
    refusal = pytest.raises(ValueError, match=f"backend must be .* got 'gluon': {message}")
    with refusal:
        attention(*operands, **options, backend="gluon")
    assert pretended == []
    for other in ("auto", "triton"):
        attention(*operands, **options, backend=other)


@pytest.mark.usefixtures("interpreted")
def test_the_interpreter_has_no_gluon():
    q, k, v = small()
    with pytest.raises(ValueError, match="got 'gluon': kernels run in Triton's interpreter"):
        attention(q, k, v, backend="gluon")
    call = torch.func.vmap(lambda x: attention(x[None], x[None], x[None], backend="gluon")[0])
    with pytest.raises(ValueError, match="got 'gluon': kernels run in Triton's interpreter"):
        call(q)
    compiled = torch.compile(lambda *x: attention(*x, backend="gluon"), backend="eager")
    with pytest.raises(ValueError, match="got 'gluon': kernels run in Triton's interpreter"):
        compiled(q, k, v)


def test_without_numbers_there_is_nothing_to_run():
    q = torch.empty(1, 2, 20, 64, device="meta", dtype=HALF)
    assert attention(q, q, q, backend="gluon").shape == q.shape
    with pytest.raises(ValueError, match="head_dim is 32"):
        attention(*[q[..., :32]] * 3, backend="gluon")
