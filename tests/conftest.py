"""What the tests share: seeds, poisoned memory, and the one way to compare with the truth."""

import pytest
import torch

from kernelbook import runtime
from kernelbook.lab.check import FACTOR, error, tolerance

DEVICE = runtime.DEVICE
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(20)


@pytest.fixture(autouse=True)
def _poisoned_memory(monkeypatch):
    """Fill what torch allocates without a value with NaN, so that an unwritten output shows."""

    def poison(allocate):
        def poisoned(*args, **kwargs):
            tensor = allocate(*args, **kwargs)
            if tensor.is_floating_point() and not tensor.requires_grad:
                tensor.fill_(float("nan"))
            return tensor

        return poisoned

    monkeypatch.setattr(torch, "empty", poison(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poison(torch.empty_like))


@pytest.fixture
def gpu():
    """Skip, by name, a test that the interpreter cannot stand in for."""
    if runtime.INTERPRETED:
        pytest.skip("needs a GPU")


def assert_close(ours, truth, torch_result, factor=FACTOR):
    """Assert that the error of ours is within the book's tolerance: see lab.check.tolerance."""
    measured = error(ours, truth)
    bound = tolerance(error(torch_result, truth), ours.dtype, factor)
    assert measured <= bound, f"error {measured:.3g} is over {bound:.3g}"
