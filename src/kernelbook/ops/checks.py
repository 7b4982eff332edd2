"""What input is refused, and how it is said.

Every message names the argument, says what came and what to pass instead. A wrong kind or dtype is
a ``TypeError``; a wrong shape, range or device is a ``ValueError``. Nothing is allocated or
launched before the checks are done.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from numbers import Integral, Real

import numpy
import torch
from torch._subclasses.fake_tensor import FakeTensor

from kernelbook import runtime

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
"""What kernels compute in."""


def tensor(name: str, x: object, dtypes: Sequence[torch.dtype] = FLOATS) -> None:
    """Raise unless x is a tensor of one of the dtypes whose numbers a kernel can read."""
    if type(x) is not torch.Tensor:
        _plain_tensor(name, x)
    if x.layout is not torch.strided or x.is_nested:
        came = "a nested tensor" if x.is_nested else f"one of layout {x.layout}"
        how = f"torch.nested.to_padded_tensor({name}, 0.0)" if x.is_nested else f"{name}.to_dense()"
        raise TypeError(f"{name} must be a dense tensor, got {came}: pass {how}.")
    if x.dtype not in dtypes:
        raise TypeError(
            f"{name} must be {either(dtypes)}, got {spell(x.dtype)}: pass "
            f"{name}.to(torch.{spell(dtypes[0])}), for example."
        )


def _plain_tensor(name: str, x: object) -> None:
    """Raise unless x is a tensor whose memory a kernel can read: a parameter is one."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(
            f"{name} must be a torch.Tensor, got {type(x).__name__}: pass "
            f"torch.tensor(...) of its numbers."
        )
    if isinstance(x, FakeTensor):
        return  # whoever asks what a result would look like
    if type(x).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ and not x.is_nested:
        raise TypeError(
            f"{name} must be a plain torch.Tensor, got {type(x).__name__}, whose numbers kernels "
            "cannot read: pass the tensor that it wraps."
        )


def holds_no_numbers(x: object) -> bool:
    """Tell whether x is a tensor that has a shape and no numbers: on meta, or fake."""
    if type(x) is torch.Tensor:
        return x.is_meta
    return isinstance(x, torch.Tensor) and (x.is_meta or isinstance(x, FakeTensor))


def same_device(**tensors: torch.Tensor | None) -> None:
    """Raise unless every tensor lies where kernels can reach it, and all on one device."""
    first = None
    for name, x in tensors.items():
        if x is None:
            continue
        if holds_no_numbers(x):
            pass  # no kernel will run
        elif not runtime.INTERPRETED and not x.is_cuda:
            raise ValueError(
                f"{name} is on {x.device}, and kernels run on the GPU: pass {name}.cuda()."
            )
        elif runtime.INTERPRETED and x.device.type != "cpu":
            raise ValueError(
                f"{name} is on {x.device}, and kernels are interpreted on the CPU: pass "
                f"{name}.cpu()."
            )
        if first is None:
            first = name
        elif x.device != tensors[first].device:
            raise ValueError(
                f"{name} is on {x.device} and {first} on {tensors[first].device}: pass both on "
                "one device."
            )


def flag(name: str, value: object) -> bool:
    """Return a flag as a bool: True, False, or what NumPy has for them."""
    if value is True or value is False:
        return value
    if isinstance(value, numpy.bool_):
        return bool(value)
    raise TypeError(f"{name} must be True or False, got {described(value)}.")


def integer(name: str, value: object) -> int:
    """Return an integer, Python's or NumPy's, as an int. True and False are no numbers here."""
    if type(value) is int:  # the others take the host a microsecond to tell
        return value
    if isinstance(value, torch.SymInt):  # an int in a graph that is being made
        return value
    if isinstance(value, Integral) and not isinstance(value, bool):
        return operator.index(value)
    raise TypeError(f"{name} must be an int, got {described(value)}: pass an int.")


def number(name: str, value: object) -> float:
    """Return a real number, Python's or NumPy's, as a float. True and False are no numbers here."""
    if type(value) is float:
        return value
    if isinstance(value, torch.SymInt | torch.SymFloat):  # likewise
        return torch.sym_float(value)
    if isinstance(value, Real) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise ValueError(
                f"{name} must be in the range of a float, and what came is too large: pass a "
                "smaller number."
            ) from None
    raise TypeError(f"{name} must be a number, got {described(value)}: pass a float.")


def choice(name: str, value: object, choices: Sequence[str]) -> str:
    """Return one of the choices, or raise."""
    if isinstance(value, str) and value in choices:
        return value
    raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}.")


def either(dtypes: Sequence[torch.dtype]) -> str:
    """Return dtypes as a sentence names them: float32, float16 or bfloat16."""
    names = [spell(dtype) for dtype in dtypes]
    return " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def spell(dtype: torch.dtype) -> str:
    """Return the name of a dtype without the name of its package."""
    return str(dtype).removeprefix("torch.")


def described(value: object) -> str:
    """Say what came: the value where it is short, and the name of its type."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    text = repr(value)
    kind = type(value).__name__
    return f"{text} ({kind})" if len(text) <= 40 else f"a value of type {kind}"


def also_named(**ours: str) -> Callable:
    """Let a function take PyTorch's keywords: ``also_named(input="x")`` hands ``input`` on as x."""

    def decorate(function: Callable) -> Callable:
        @functools.wraps(function)
        def renamed(*args, **kwargs):
            if kwargs:
                for theirs in ours.keys() & kwargs.keys():
                    if ours[theirs] in kwargs:
                        raise TypeError(
                            f"{function.__name__}() got both {theirs} and {ours[theirs]}, two "
                            "names of one argument: pass one."
                        )
                    kwargs[ours[theirs]] = kwargs.pop(theirs)
            return function(*args, **kwargs)

        return renamed

    return decorate
