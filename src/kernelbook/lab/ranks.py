"""Ranks: processes that run an experiment together, each on a GPU of its own, or on the CPU.

Each is a fresh Python. A process that ``multiprocessing`` spawns would run the chapter's script
again to find the experiment there, and in a notebook it would find nothing. So a function of a
script travels as its source, with what it uses.
"""

import atexit
import dis
import inspect
import os
import pickle
import subprocess
import sys
import tempfile
import textwrap
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import CodeType, FunctionType, ModuleType

import torch

from kernelbook import runtime

PATIENCE = 90.0
"""Seconds after which a rank gives up waiting for the others."""

LIMIT = 300.0
"""Seconds that an experiment may take, with the start of the ranks, before they are ended."""

GRACE = 10.0
"""Seconds that the others get, beyond their patience, once a rank has failed."""


def at_hand() -> tuple[int, bool]:
    """Return how many ranks this machine has, and whether each has a GPU.

    They are as many as its GPUs, rounded down to a power of two. Without two GPUs they are two
    processes on the CPU.
    """
    count = 0 if runtime.INTERPRETED else torch.cuda.device_count()
    return (2, False) if count < 2 else (1 << (count.bit_length() - 1), True)


@dataclass(frozen=True)
class Answer:
    """What a rank returned, or why it did not, and after how many seconds."""

    rank: int
    value: object
    error: str | None
    seconds: float


class RanksFailed(RuntimeError):
    """Some ranks did not return; the message says which, and why."""


class Ranks:
    """So many processes in one group of ``torch.distributed``: NCCL on GPUs, Gloo on the CPU.

    They start when they are first asked, and stay for the next experiment. After a failure they
    are ended, because nobody knows what the others still wait for, and the next one starts anew.

    Args:
        world: how many.
        gpus: whether each has a GPU; if not, kernels run in Triton's interpreter.
        patience: after how many seconds a rank gives up waiting for the others.
    """

    def __init__(self, world: int, *, gpus: bool, patience: float = PATIENCE):
        self.world, self.gpus, self.patience = world, gpus, patience
        self._processes: list[subprocess.Popen] = []
        self._channels: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory | None = None

    def run(self, function: Callable, *args, limit: float = LIMIT) -> list:
        """Call ``function(rank, world, *args)`` on each rank; return what each returned, by rank.

        Raises:
            RanksFailed: a rank raised, died, or was not done after ``limit`` seconds.
        """
        answers = self.ask(function, *args, limit=limit)
        if failed := [answer for answer in answers if answer.error]:
            reasons = "\n".join(f"rank {one.rank} of {self.world}: {one.error}" for one in failed)
            raise RanksFailed(f"{getattr(function, '__name__', function)} failed.\n{reasons}")
        return [answer.value for answer in answers]

    def ask(self, function: Callable, *args, limit: float = LIMIT) -> list[Answer]:
        """Call a function as :meth:`run` does, and return what became of it on each rank."""
        message = pickle.dumps((_carried(function), args))
        begin = time.perf_counter()
        if self.gpus:  # what a run that is cut off was at
            name = getattr(function, "__name__", function)
            print(f"ranks: {name} begins {time.strftime('%H:%M:%S')}", file=sys.stderr, flush=True)
        if not self._processes:
            self._start()
        for channel in self._channels:
            try:
                channel.send_bytes(message)
            except OSError:  # it has died, which _collect finds
                continue
        try:
            answers = self._collect(begin, limit)
        except BaseException:
            self.stop()
            raise
        if any(answer.error for answer in answers):
            self.stop()
        return answers

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        atexit.register(self.stop)
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        if not self.gpus:
            alone = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
            environment |= alone
        for rank in range(self.world):
            ours, theirs = Pipe()
            told = f"{rank}, {self.world}, {self.gpus}, {self.patience}, {self._folder.name!r}"
            code = f"from kernelbook.lab.ranks import serve; serve({told}, {theirs.fileno()})"
            with self._said(rank).open("wb") as said:
                process = subprocess.Popen(
                    [sys.executable, "-c", code],
                    env=environment,
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=said,
                    stderr=said,
                )
            theirs.close()
            self._processes.append(process)
            self._channels.append(ours)

    def _said(self, rank: int) -> Path:
        return Path(self._folder.name, f"rank-{rank}.txt")

    def _collect(self, begin: float, limit: float) -> list[Answer]:
        """Wait for the answers of all ranks."""
        answers: dict[int, Answer] = {}
        end = begin + limit
        while len(answers) < self.world:
            waiting = {self._channels[r]: r for r in range(self.world) if r not in answers}
            ready = wait(list(waiting), max(0.0, end - time.perf_counter()))
            took = time.perf_counter() - begin
            if not ready:
                hung = f"did not answer within {took:.0f} seconds, and was ended"
                answers |= {r: Answer(r, None, hung, took) for r in waiting.values()}
            for channel in ready:
                rank = waiting[channel]
                try:
                    value, error, seconds = pickle.loads(channel.recv_bytes())
                except (EOFError, OSError):
                    value, error, seconds = None, self._death(rank), took
                answers[rank] = Answer(rank, value, error, seconds)
                if error:
                    end = min(end, time.perf_counter() + self.patience + GRACE)
        return [answers[rank] for rank in range(self.world)]

    def _death(self, rank: int) -> str:
        code = self._processes[rank].wait(GRACE)
        last = self._said(rank).read_text(errors="replace").strip().splitlines()[-15:]
        return "\n".join([f"died with exit code {code}", *(f"    {line}" for line in last)])

    def stop(self) -> None:
        """End the processes."""
        for channel in self._channels:
            channel.close()
        for process in self._processes:
            process.kill()
            process.wait()
        self._processes, self._channels = [], []
        if self._folder:
            self._folder.cleanup()
            self._folder = None
        atexit.unregister(self.stop)


# -- in the process of a rank ---------------------------------------------------------------------


def serve(rank: int, world: int, gpus: bool, patience: float, folder: str, channel: int) -> None:
    """Be a rank: join the group, and run what comes out of the channel until it is closed."""
    import torch.distributed as dist

    if gpus:
        torch.cuda.set_device(rank)
    pipe = Connection(channel)
    dist.init_process_group(
        "nccl" if gpus else "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=patience),
    )
    while True:
        try:
            message = pipe.recv_bytes()
        except (EOFError, OSError):
            os._exit(0)  # the group is not taken down in order: the others may be gone
        begin = time.perf_counter()
        try:
            carried, args = pickle.loads(message)
            value, error = _unpacked(carried)(rank, world, *args), None
            answer = pickle.dumps((value, error, time.perf_counter() - begin))
        except Exception as raised:  # whoever asked decides what it means
            where = "".join(traceback.format_tb(raised.__traceback__)[-3:])
            error = f"{type(raised).__name__}: {raised}\n{where}"
            answer = pickle.dumps((None, error, time.perf_counter() - begin))
        pipe.send_bytes(answer)


# -- how a function travels ------------------------------------------------------------------------


def _carried(function: Callable) -> Callable | tuple[str, str, dict]:
    """Return a function as it travels: itself, if it can be imported, or its source with what it
    uses: other functions of the script likewise, modules by name, and values."""
    if not isinstance(function, FunctionType) or function.__module__ != "__main__":
        return function
    sources, values, waiting = {}, {}, [function]
    while waiting:
        one = waiting.pop()
        if one.__name__ in sources:
            continue
        sources[one.__name__] = textwrap.dedent(inspect.getsource(one))
        for name in _globals_of(one.__code__):
            value = one.__globals__.get(name)
            if isinstance(value, FunctionType) and value.__module__ == "__main__":
                waiting.append(value)
            elif isinstance(value, ModuleType):
                values[name] = _Imported(value.__name__)
            elif name in one.__globals__:
                values[name] = value
    return function.__name__, "\n\n".join(sources.values()), values


@dataclass(frozen=True)
class _Imported:
    """A module, by its name."""

    name: str


def _globals_of(code: CodeType) -> Iterator[str]:
    """Yield the names of the module that a function reads, and the functions inside it."""
    for instruction in dis.get_instructions(code):
        if instruction.opname == "LOAD_GLOBAL":
            yield instruction.argval
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _globals_of(inner)


def _unpacked(carried: Callable | tuple[str, str, dict]) -> Callable:
    if not isinstance(carried, tuple):
        return carried
    name, source, values = carried
    space = {
        key: import_module(value.name) if isinstance(value, _Imported) else value
        for key, value in values.items()
    }
    exec(compile(source, "<experiment>", "exec"), space)  # it is the chapter's own
    return space[name]
