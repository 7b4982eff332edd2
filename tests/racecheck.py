"""Look for races in shared memory with racecheck, also where warps have roles.

    python tests/racecheck.py none      launch a race of two roles, on a Hopper GPU
    python tests/racecheck.py mbarrier  the same exchange, ordered: so is "named barrier"

A kernel that gives its warps roles starts with Triton's dispatch. The first warps write a byte that
says which role each other warp takes, and the values that this role needs, into shared memory. All
warps of the program meet at barrier 1, the others read, and all meet there again; at the end the
first warps write the byte for "leave" between two more such meetings. So the order holds, but
racecheck does not follow these meetings, and reports a race for each of those pairs of accesses.

Only these reports are left out here: all their accesses are attributed to the ``def`` of the kernel
or to the statement that hands out the roles. What a role itself does has lines of its own.

Racecheck watches what threads read and write. Between the roles of the package's kernels, one side
of every exchange is the copy engine or a matmul, which are no threads: a wait that is missing there
is looked for by tests of results, repeated launches and many shapes. That racecheck sees a race of
two roles where both sides are threads, and none where they wait, is what CONTROLS ask of it.
"""

import ast
import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve()
HOPPER = HERE.parents[1] / "src" / "kernelbook" / "ops" / "hopper"

FOUND = re.compile(r"^=+ .*\b(?:Error|Warning)\b.*$", re.MULTILINE)
END = re.compile(r"^=+ *$", re.MULTILINE)
ACCESS = re.compile(r"(?:Read|Write) access at (\w+)\+0x[0-9a-f]+ in (\S+):(\d+)")
SUMMARY = re.compile(r"RACECHECK SUMMARY: (\d+) hazards? displayed \((\d+) errors?, (\d+) warn")

# Whether racecheck has to see a race between two roles, by what orders their accesses
CONTROLS = {"none": True, "mbarrier": False, "named barrier": False}


# -- reports


def dispatch(path: Path) -> set[tuple[str, str, int]]:
    """Return (kernel, file, line) of what hands out roles, in each kernel of a file.

    The lines are those of the ``def`` and of each statement around ``gl.warp_specialize``.
    """
    found = set()
    for kernel in ast.walk(ast.parse(path.read_text())):
        if isinstance(kernel, ast.FunctionDef):
            for statement in ast.walk(kernel):
                if isinstance(statement, ast.stmt) and _hands_out(statement):
                    found.add((kernel.name, path.name, statement.lineno))
    return found


def _hands_out(statement: ast.stmt) -> bool:
    names = (node for node in ast.walk(statement) if isinstance(node, ast.Attribute))
    return any(name.attr == "warp_specialize" for name in names)


def races(report: str, dispatch: set[tuple[str, str, int]]) -> list[str]:
    """Return what racecheck reports, but for races of the dispatch with itself.

    Raise ValueError if the report is not whole.
    """
    summaries = [[int(n) for n in summary] for summary in SUMMARY.findall(report)]
    starts = [found.start() for found in FOUND.finditer(report)]
    displayed = sum(n for n, _, _ in summaries)
    if not summaries or not displayed == len(starts) == sum(sum(n[1:]) for n in summaries):
        raise ValueError(
            f"the report of racecheck is not whole: it shows {len(starts)} races, and its "
            f"summaries are {summaries or 'missing'}"
        )
    found = (END.split(report[start:], maxsplit=1)[0].rstrip() for start in starts)
    return [race for race in found if not _is_dispatch(race, dispatch)]


def _is_dispatch(race: str, dispatch: set[tuple[str, str, int]]) -> bool:
    accesses = [ACCESS.search(line) for line in race.splitlines()]
    return len(accesses) > 1 and all(
        access and (access[1], access[2], int(access[3])) in dispatch for access in accesses
    )


# -- runs


def run(tool: str, *command: str) -> list[str]:
    """Run Python under racecheck and return the races that are not Triton's dispatch.

    Raise RuntimeError if the command fails, ValueError if its report is not whole.
    """
    with tempfile.TemporaryDirectory() as folder:
        options = ["--tool", "racecheck", "--print-limit", "1000000"]
        options += ["--log-file", f"{folder}/%p"]
        full = [tool, *options, sys.executable, *command]
        print("racecheck:", *full, flush=True)
        code = subprocess.run(full, check=False).returncode
        report = "\n".join(path.read_text() for path in sorted(Path(folder).iterdir()))
    if code:
        print(report, file=sys.stderr)
        raise RuntimeError(f"under racecheck this ended with {code}: {' '.join(command)}")
    known = set().union(*map(dispatch, (HERE, *HOPPER.glob("*.py"))))
    left = races(report, known)
    n_found = len(FOUND.findall(report))
    print(f"racecheck: {len(left)} races, {n_found - len(left)} reports of Triton's dispatch.")
    return left


def controls(tool: str) -> list[str]:
    """Return what racecheck gets wrong of roles whose order is known."""
    wrong = []
    for order, is_race in CONTROLS.items():
        found = run(tool, str(HERE), order)
        if bool(found) != is_race:
            what = "does not see a race of two roles" if is_race else "sees a race"
            wrong.append(f"racecheck {what} where what orders them is: {order}.")
            wrong += found
    return wrong


# -- a race of two roles, and the same exchange in order

if __name__ == "__main__":
    [order] = sys.argv[1:]
    if order not in CONTROLS:
        sys.exit(f"racecheck: {order!r} is none of {', '.join(CONTROLS)}.")
    sys.path.insert(0, str(HERE.parents[1] / "src"))

    import torch
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import mbarrier

    from kernelbook.ops.hopper.parts import named_barrier

    SIZE = gl.constexpr(512)

    @gluon.jit
    def write_role(x_ptr, tile, full, ORDER: gl.constexpr):
        at = gl.arange(0, SIZE, gl.BlockedLayout([4], [32], [4], [0]))
        tile.store(gl.load(x_ptr + at))
        if ORDER == "mbarrier":
            mbarrier.arrive(full)
        if ORDER == "named barrier":
            named_barrier("sync", 9, 256)

    @gluon.jit
    def read_role(y_ptr, tile, full, ORDER: gl.constexpr):
        layout: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
        if ORDER == "mbarrier":
            mbarrier.wait(full, 0)
        if ORDER == "named barrier":
            named_barrier("sync", 9, 256)
        gl.store(y_ptr + gl.arange(0, SIZE, layout), tile.load(layout))

    @gluon.jit
    def exchange_kernel(x_ptr, y_ptr, ORDER: gl.constexpr):
        shared: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        tile = gl.allocate_shared_memory(gl.float32, [SIZE], shared)
        full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(full, count=1)
        gl.warp_specialize(
            [
                (write_role, (x_ptr, tile, full, ORDER)),
                (read_role, (y_ptr, tile, full, ORDER)),
            ],
            [4],
            [24],
        )

    x = torch.randn(SIZE.value, device="cuda")
    y = torch.zeros_like(x)
    exchange_kernel[(1,)](x, y, order, num_warps=4)
    if order != "none" and not torch.equal(x, y):
        sys.exit(f"racecheck: what is read is not what was written, in order by {order}.")
