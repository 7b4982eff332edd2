"""Where kernels run, decided once, on import."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl

from kernelbook import runtime
from kernelbook.ops import checks


def run(code, **environment):
    """Run code in a process of its own, with no GPU in sight, for two minutes at most."""
    hidden = {"CUDA_VISIBLE_DEVICES": "", "PATH": os.environ["PATH"]}
    paths = {"PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=hidden | paths | environment,
        check=False,
        timeout=120,
    )


def test_without_a_gpu_one_line_says_that_kernels_are_interpreted():
    done = run(
        "import kernelbook; print(kernelbook.runtime.INTERPRETED, kernelbook.runtime.DEVICE)"
    )
    assert done.stdout == "True cpu\n"
    assert done.stderr.count("kernelbook: ") == 1
    assert "no GPU was found, so kernels run in Triton's interpreter" in done.stderr


def test_the_interpreter_can_be_asked_for():
    done = run("import kernelbook", TRITON_INTERPRET="true")
    assert "TRITON_INTERPRET is set" in done.stderr


def test_triton_imported_first_is_an_error_that_says_what_to_do():
    done = run("import triton.language, kernelbook")
    assert done.returncode == 1
    assert "import kernelbook before triton" in done.stderr
    assert run("import triton.language, kernelbook", TRITON_INTERPRET="1").returncode == 0


def test_importing_leaves_cuda_to_processes_that_are_forked_later():
    """Where the driver's library says that there is a GPU, CUDA itself is not asked."""
    done = run(
        """
import torch
import torch._dynamo  # looks for CUDA's bindings, which torch for CPUs has not, if CUDA is there

def initialize():
    raise AssertionError("CUDA was initialized")

torch.cuda._is_compiled = lambda: True
torch.cuda._device_count_nvml = torch.cuda._device_count_amdsmi = lambda: 1
torch._C._cuda_getDeviceCount = torch._C._cuda_init = initialize
import kernelbook
print(kernelbook.runtime.DEVICE, torch.cuda.is_initialized())
import os
print(os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK"))
"""
    )
    assert done.stdout == "cuda False\nNone\n", done.stderr


def test_a_forked_process_may_launch_while_a_thread_of_its_parent_did():
    """It would wait forever for a lock that no thread of it holds."""
    done = run(
        """
import os, threading
import torch, kernelbook
launching, done = threading.Event(), threading.Event()

def launch():
    with kernelbook.runtime.launching_on(torch.empty(1)):
        launching.set()
        done.wait(1)

thread = threading.Thread(target=launch)
thread.start()
launching.wait()
child = os.fork()
if not child:
    answer = kernelbook.softmax(torch.zeros(2, 4))
    os._exit(int(not torch.equal(answer, torch.full((2, 4), 0.25))))
thread.join()
print(os.waitpid(child, 0)[1])
""",
        TRITON_INTERPRET="1",
    )
    assert done.stdout == "0\n", done.stderr


def test_devices_that_differ_are_named():
    here = torch.ones(1, device=runtime.DEVICE)
    checks.same_device(x=here, y=here, z=None)
    with pytest.raises(ValueError, match="y is on meta"):
        checks.same_device(x=here, y=here.to("meta"))


def test_the_environment_names_its_software():
    found = runtime.environment()
    assert found["torch"] == torch.__version__
    assert found["python"].startswith("3.")
    assert ("gpu" in found) != runtime.INTERPRETED


@pytest.mark.usefixtures("gpu")
def test_the_environment_names_the_gpu():
    found = runtime.environment()
    assert found["gpu"] == torch.cuda.get_device_name()
    assert found["sm_count"] > 0
    assert found["driver"] != "unknown"


def test_a_driver_that_does_not_answer_is_unknown(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert runtime._driver_and_clocks("GPU-0") == {"driver": "unknown", "clocks": {}}


def test_only_the_interpreter_gets_bfloat16_as_float32():
    for dtype in (torch.float32, torch.float16):
        assert runtime.kernel_dtype(dtype) == dtype
    interpreted = runtime.kernel_dtype(torch.bfloat16) == torch.float32
    assert interpreted == runtime.INTERPRETED


def test_a_gpu_of_amd_does_not_say_how_much_shared_memory_it_has(monkeypatch):
    """PyTorch's properties of it have no such attribute."""
    properties = SimpleNamespace(multi_processor_count=304, warp_size=64, L2_cache_size=2**22)
    monkeypatch.setattr(runtime, "INTERPRETED", False)
    monkeypatch.setattr(runtime, "_properties", lambda device: properties)
    assert runtime.shared_memory(runtime.DEVICE) == 64 * 1024
    properties.shared_memory_per_block_optin = 232_448
    assert runtime.shared_memory(runtime.DEVICE) == 232_448


@triton.jit
def rows_kernel(y_ptr, n_rows, n_cols, BLOCK: tl.constexpr):
    row, cols = tl.program_id(0), tl.arange(0, BLOCK)
    tl.store(y_ptr + row * BLOCK + cols, 1.0, mask=(cols < n_cols) & (row < n_rows))


def test_a_mask_may_be_made_of_a_block_and_a_scalar():
    """Triton 3.9's interpreter alone makes int32 of it."""
    y = torch.zeros(4, 8, device=runtime.DEVICE)
    rows_kernel[(4,)](y, 3, 5, BLOCK=8)
    assert y.nonzero().tolist() == [[row, col] for row in range(3) for col in range(5)]


@triton.jit
def twice(x):
    return x + x


@triton.jit
def sum_twice_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    x = tl.load(x_ptr + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))
    tl.store(y_ptr + tl.program_id(0), tl.sum(twice(x), axis=0))


@pytest.mark.skipif(not runtime.INTERPRETED, reason="there is nothing to replace on a GPU")
def test_the_interpreter_replaces_what_compiles_for_each_launch_and_no_longer():
    """Of functions that a kernel calls, those of its module and those of Triton itself."""
    x, y = torch.arange(12.0).view(3, 4), torch.empty(3)
    for _ in range(2):
        sum_twice_kernel[(3,)](x, y, BLOCK=4)
        assert torch.equal(y, 2 * x.sum(1))
        for name in ("arange", "load", "dot"):
            assert tl.core.is_builtin(getattr(tl, name))
        assert tl.core.is_builtin(tl.tensor.__add__)
