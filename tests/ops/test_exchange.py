"""The exchange between programs that share a row."""

import pytest
import torch
import triton
import triton.language as tl
from conftest import DEVICE

from kernelbook import layer_norm, runtime, softmax
from kernelbook.ops.layer_norm import backward as layer_norm_backward
from kernelbook.ops.layer_norm import forward as layer_norm_forward
from kernelbook.ops.layer_norm import tuned as layer_norm_tuned
from kernelbook.ops.rows import exchange
from kernelbook.ops.softmax import backward as softmax_backward
from kernelbook.ops.softmax import forward as softmax_forward
from kernelbook.ops.softmax import tuned as softmax_tuned

KERNELS = {
    "softmax forward": softmax_forward.split_row_fwd_kernel,
    "softmax backward": softmax_backward.split_row_bwd_kernel,
    "layer norm forward": layer_norm_forward.split_fwd_kernel,
    "layer norm backward": layer_norm_backward.split_bwd_kernel,
}


def layer_norm_of(x):
    return layer_norm(x, x.shape[-1])


@triton.jit
def pairs_kernel(pairs_ptr, slots_ptr, back_ptr, n_pairs, LOOKS: tl.constexpr):
    i = tl.arange(0, LOOKS)
    high = tl.load(pairs_ptr + 2 * i, mask=i < n_pairs)
    low = tl.load(pairs_ptr + 2 * i + 1, mask=i < n_pairs)
    slots = exchange.to_slot(high, low)
    tl.store(slots_ptr + i, slots, mask=i < n_pairs)
    high, low = exchange.collect(slots, i < n_pairs, float("-inf"), 0.0)
    tl.store(back_ptr + 2 * i, high)
    tl.store(back_ptr + 2 * i + 1, low)


def test_a_slot_holds_every_pair_and_none_is_empty():
    numbers = [0.0, -0.0, 1.5, -1e-45, 3e38, torch.inf, -torch.inf, torch.nan]
    pairs = torch.tensor([(a, b) for a in numbers for b in numbers], device=DEVICE)
    slots = torch.zeros(64, dtype=torch.int64, device=DEVICE)
    back = torch.empty(128, 2, device=DEVICE)
    with runtime.launching_on(pairs):
        pairs_kernel[(1,)](pairs, slots, back, 64, 128)
    assert slots.all()
    assert torch.equal(back[:64].view(torch.int32), pairs.view(torch.int32))
    assert (back[64:] == torch.tensor([-torch.inf, 0.0], device=DEVICE)).all()


@pytest.mark.parametrize("parts", [1, 2, 13, 32, 64, 128])
@pytest.mark.parametrize("num_warps", [1, 2, 8])
@pytest.mark.parametrize("rows", [1, 2])
def test_no_slot_is_held_by_two_threads_of_those_that_read_it_together(parts, num_warps, rows):
    looks, threads = exchange.looks(parts, num_warps, DEVICE, rows)
    lanes = runtime.warp_size(DEVICE)
    assert looks >= parts
    assert threads == num_warps * lanes
    assert rows * looks == lanes or rows * looks >= threads
    assert looks & (looks - 1) == 0


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_look_as_often_as_they_should(name, monkeypatch):
    kernel, launches = KERNELS[name], []
    run = kernel.run

    def seen(*args, **kwargs):
        given = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
        launches.append(given)
        return run(*args, **kwargs)

    monkeypatch.setattr(kernel, "run", seen)
    part = layer_norm_tuned.Part(cols=64, rows=2, registers=None)
    monkeypatch.setattr(layer_norm_tuned, "FORWARD_PARTS", {(4, 2**31): part})
    constants = {
        "TILE_BYTES": 0,
        "BWD_ROW_COLS": 0,
        "BWD_PART_COLS": {4: 64},
        "BWD_PART_WARP": {4: 16},
    }
    for constant, value in constants.items():
        monkeypatch.setattr(layer_norm_tuned, constant, value)
    constants = {"WIDE_BYTES": 0, "PART_COLS": (64, 64), "PART_WARP": 16, "UNALIGNED_PART_WARP": 16}
    for constant, value in constants.items():
        monkeypatch.setattr(softmax_tuned, constant, value)
    x = torch.randn(3, 200, device=DEVICE, requires_grad=True)
    y = (softmax if name.startswith("softmax") else layer_norm_of)(x)
    y.backward(torch.randn_like(y))
    (given,) = launches
    assert given["N_PARTS"] == 4
    looks = exchange.looks(4, given["num_warps"], DEVICE, given.get("BLOCK_ROWS", 1))
    assert (given["LOOKS"], given["THREADS"]) == looks


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n_cols", [131072, 262144, 524288])
@pytest.mark.parametrize("operator", [softmax, layer_norm_of])
def test_a_thousand_runs_agree_on_a_busy_gpu(operator, n_cols, dtype):
    x = torch.randn(3, n_cols, device=DEVICE).to(dtype).requires_grad_()
    dy = torch.randn_like(x)
    first = [(y := operator(x)), *torch.autograd.grad(y, x, dy)]
    others, wrong = torch.cuda.Stream(), torch.zeros((), dtype=torch.int64, device=DEVICE)
    noise = torch.empty(2**24, device=DEVICE)
    for _ in range(1000):
        with torch.cuda.stream(others):
            noise.mul_(0.5)
        y = operator(x)
        for a, b in zip(first, (y, *torch.autograd.grad(y, x, dy)), strict=True):
            wrong += (a != b).any()
    assert not wrong


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("n_cols", [32768, 65536, 131072])
@pytest.mark.parametrize("operator", [softmax, layer_norm_of])
def test_the_warps_of_a_program_give_up_together(operator, n_cols, monkeypatch):
    """With so little patience some warps have seen all slots when others have not."""
    x = torch.randn(40, n_cols, device=DEVICE, requires_grad=True)
    dy = torch.randn_like(x)
    truth = [(y := operator(x)), *torch.autograd.grad(y, x, dy)]
    for polls in (1, 2, 3, 4, 6, 8, 12, 16) * 4:
        monkeypatch.setattr(exchange, "MAX_POLLS", polls)
        for a, b in zip(truth, ((y := operator(x)), *torch.autograd.grad(y, x, dy)), strict=True):
            assert (a - b).abs().max() <= 1e-4 * a.abs().max()  # in another order, and no more
