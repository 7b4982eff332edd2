"""The kernels of the chapter on roles, which no interpreter runs: they compile for Hopper."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMPILE = """
import ast, sys
from pathlib import Path
root = Path(sys.argv[1])
sys.path.insert(0, str(root / "tests"))
import compiling
compiled = compiling.pretend(compiling.GPUS["sm_90"])
import kernelbook, torch, triton

# what the script imports and defines, and not what it measures or shows
path = root / "gallery" / "warps_with_roles.py"
constants = {"BLOCK_M", "GLUON_DTYPES", "TILES", "RUNGS", "TRACE", "MISTAKES"}
c = {"__name__": "chapter"}
for node in ast.parse(path.read_text()).body:
    targets = [n for t in getattr(node, "targets", ()) for n in ast.walk(t)]
    wanted = constants & {getattr(n, "id", None) for n in targets}
    if wanted or isinstance(node, (ast.Import, ast.ImportFrom, ast.FunctionDef)):
        exec(compile(ast.Module([node], []), str(path), "exec"), c)

bf16 = torch.bfloat16
tile, a = torch.empty(64, 64, dtype=bf16), torch.empty(512, 512, dtype=bf16)
rows, log = torch.empty(192, 32), torch.empty(2, dtype=torch.int32)
c["through_shared"](c["copy_kernel"], rows)
for fence in (True, False):
    c["through_shared"](c["double_kernel"], rows, FENCE=fence)
c["chain"](tile, tile, tile)
for first, mistake in c["MISTAKES"].values():
    c["add_up"](rows, log, first, mistake)
c["turns_kernel"][(1,)](log, 6, True, num_warps=4)
for options in c["RUNGS"].values():
    c["multiply"](a, a, **options)
    c["multiply"](a, a, log=log, **options)
    c["multiply"](a[:128, :128], a[:128, :256], **options)  # one tile, two steps
c["dot"](a, a)
for found in compiled:
    print(found)
    assert "error" not in found, found
    assert found["spilled"] == 0, found
    assert found["shared"] <= compiling.GPUS["sm_90"].shared_memory, found
print(len(compiled), "kernels")
"""


def test_every_kernel_compiles_for_hopper_without_a_spill(tmp_path):
    pytest.importorskip("triton.backends.nvidia")
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, str(ROOT)],
        env={"PATH": "/usr/bin:/bin", "TRITON_CACHE_DIR": str(tmp_path), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-1000:]
    assert int(done.stdout.split()[-2]) >= 15
