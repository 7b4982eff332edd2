"""Which kernels compute the gradients of attention: the choice on GPUs that are made up."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton
from test_choice import BF16, HALF, HOPPER, WHY_NOT, seeing, shapes

from kernelbook.ops.hopper import backward_choice as choice
from kernelbook.ops.hopper.backward_choice import CHOICES, CONFIGS, FREE, SHORT, backward_choice


def limits():
    """Each row of the table, its last length and the first behind it."""
    for key, rows in CHOICES.items():
        for most, config in rows:
            yield *key, min(most, 2**20), config
        for (most, _), (_, config) in zip(rows, rows[1:], strict=False):
            yield *key, most + 1, config


@pytest.mark.parametrize("case", list(limits()), ids=str)
@pytest.mark.parametrize("dtype", [HALF, BF16], ids=str)
def test_the_table_decides_on_hopper(case, dtype):
    head_dim, mask, deterministic, keys, config = case
    length, options = seeing(keys, mask)
    sizes = shapes(head_dim, length)
    options |= {"deterministic": deterministic}
    chosen = backward_choice(HOPPER, dtype, *sizes, **options)
    assert (chosen.backend, chosen.config) == ("gluon" if config else "triton", config)
    assert f"{keys:,} keys, {mask}" in chosen.reason
    assert backward_choice(HOPPER, dtype, *sizes, **options, backend="triton").config is None
    named = backward_choice(HOPPER, dtype, *sizes, **options, backend="gluon")
    assert (named.backend, named.config) == ("gluon", config or CONFIGS[head_dim])


def test_the_table_is_whole():
    masks = ("full", "causal", "window")
    assert set(CHOICES) == {(d, mask, same) for d in CONFIGS for mask in masks for same in (0, 1)}


@pytest.mark.parametrize("key", CHOICES, ids=str)
def test_a_row_is_in_order_and_ends_at_no_length(key):
    head_dim, _, deterministic = key
    most = [length for length, _ in CHOICES[key]]
    assert most == sorted(set(most))
    assert most[-1] == float("inf")
    for _, config in CHOICES[key]:
        assert config in (None, CONFIGS[head_dim], FREE[head_dim], *([SHORT] * (head_dim == 128)))
        assert config is None or config.ordered or not deterministic


@pytest.mark.parametrize(
    ("capability", "dtype", "head_dim", "words"), WHY_NOT.values(), ids=WHY_NOT
)
def test_where_it_cannot_run_the_plain_kernels_do(capability, dtype, head_dim, words):
    sizes = shapes(head_dim)
    chosen = backward_choice(capability, dtype, *sizes)
    assert (chosen.backend, chosen.config) == ("triton", None)
    assert words in chosen.reason
    with pytest.raises(ValueError, match=f"backend must be 'auto' or 'triton'.*{words}"):
        backward_choice(capability, dtype, *sizes, backend="gluon")


def test_a_triton_without_a_name_that_the_kernel_imports_runs_the_plain_ones(monkeypatch):
    monkeypatch.setitem(sys.modules, "kernelbook.ops.hopper.backward", None)
    choice._attention_in_gluon.cache_clear()
    try:
        chosen = backward_choice(HOPPER, BF16, *shapes())
    finally:
        choice._attention_in_gluon.cache_clear()
    assert chosen.backend == "triton"
    assert f"Triton {triton.__version__} lacks a part of Gluon" in chosen.reason


def test_what_the_host_function_is():
    from kernelbook.ops.hopper.backward import attention_backward

    assert choice.attention_in_gluon() is attention_backward


def test_operands_that_do_not_fit_say_why(monkeypatch):
    monkeypatch.setattr(choice.choice, "supported", lambda q, k, v: None)
    q = torch.zeros(1, 2, 8, 64, dtype=HALF)
    padded = torch.zeros(1, 2, 8, 65, dtype=HALF)[..., :64]
    assert choice.supported(q, q, q, q) is None
    assert "of do is not a multiple of 16 bytes" in choice.supported(q, q, q, padded)


def test_importing_it_does_not_import_gluon():
    script = (
        "import sys, kernelbook.ops.hopper.backward_choice;"
        "print([m for m in sys.modules if 'kernelbook.ops.hopper.' in m])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True,
        cwd=Path(__file__).parents[2] / "src",
    )  # fmt: skip
    names = {name.rpartition(".")[2] for name in eval(done.stdout)}
    assert names == {"choice", "backward_choice", "fp8_choice"}
