"""Explore what the property tests do not: other examples for as many minutes as there are.

    python tests/fuzz.py --minutes 10            every property in turn, with random seeds
    python tests/fuzz.py --only softmax          one of them
    python tests/fuzz.py --case softmax "Softmax(x=Numbers(shape=(3, 65)))"

It is quiet until the end. A failure is shrunk and printed with the one line that repeats it, and
the other properties go on. It belongs into ``tests/ops/test_properties.py``, as an ``@example``.
"""

import argparse
import math
import random
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, reject, seed, settings

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE / "ops"), str(HERE.parent / "src")]

import strategies  # noqa: E402
from test_properties import PROPERTIES  # noqa: E402

from kernelbook import runtime  # noqa: E402

ROUND = 50 if strategies.LARGE else 20
"""Examples of one property before the next has its turn."""


class TimeIsUp(BaseException):
    """Leaves the middle of a round."""


REFUTED = (Exception, pytest.fail.Exception)  # what pytest.raises raises is no Exception


def explore(name: str, start: int, until: float) -> tuple[int, str | None]:
    """Run one round of a property. Return how many examples it had, and how it failed."""
    strategy, check = PROPERTIES[name]
    examples, failing, shrinking = 0, None, False

    def once(case):
        nonlocal examples, failing, shrinking
        if time.monotonic() > until and not shrinking:
            raise TimeIsUp
        examples += 1
        try:
            check(case)
        except torch.OutOfMemoryError:  # somebody else has the memory: it says nothing of the case
            torch.cuda.empty_cache()
            reject()
        except REFUTED:
            failing, shrinking = case, True
            raise

    run = settings(
        max_examples=ROUND,
        deadline=None,
        database=None,
        derandomize=False,
        print_blob=False,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
    )(seed(start)(given(strategy)(once)))
    try:
        run()
    except TimeIsUp:
        return examples, None
    except REFUTED as error:
        line = f"python {Path(__file__).relative_to(Path.cwd())}" if _inside() else "python fuzz.py"
        while isinstance(error, ExceptionGroup):  # it failed once, and not again
            error = error.exceptions[0]
        said = f"{type(error).__name__}: {error}".splitlines()[0]
        case = repr(failing).replace('"', "'")
        return examples, f'{name} failed: {said}\n    {line} --case {name} "{case}"'
    return examples, None


def _inside() -> bool:
    return Path(__file__).is_relative_to(Path.cwd())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=1.0, help="how long (1)")
    parser.add_argument("--only", choices=PROPERTIES, help="one property")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    parser.add_argument("--case", nargs=2, metavar=("PROPERTY", "CASE"), help="repeat one example")
    options = parser.parse_args()
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    torch.set_num_threads(1 if runtime.INTERPRETED else torch.get_num_threads())  # small tensors
    torch.empty, torch.empty_like = map(strategies.poison, (torch.empty, torch.empty_like))
    if options.case:
        name, text = options.case
        names = {**vars(strategies), "nan": math.nan, "inf": math.inf}
        PROPERTIES[name][1](eval(text, names))  # Python of our own making: a repr
        print("It holds.")
        return 0

    until = time.monotonic() + 60 * options.minutes
    names = [options.only] if options.only else list(PROPERTIES)
    counts, failures = dict.fromkeys(names, 0), {}
    start = options.seed
    while time.monotonic() < until and len(failures) < len(names):
        for name in names:
            if name in failures:
                continue
            start += 1
            examples, failure = explore(name, start, until)
            counts[name] += examples
            if failure:
                failures[name] = failure
                print(failure, flush=True)
    where = "in the interpreter" if runtime.INTERPRETED else f"on {torch.cuda.get_device_name()}"
    print(f"{sum(counts.values())} examples {where}, from seed {options.seed}:")
    for name, count in counts.items():
        print(f"  {count:6d}  {name}{'   FAILED' if name in failures else ''}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
