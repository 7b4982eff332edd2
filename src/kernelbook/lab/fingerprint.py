"""Fingerprints: whether the code that was measured is the code at hand.

A fingerprint is a digest of syntax trees, so that comments, docstrings and layout do not count and
every change of code does. Nothing is imported for it, and it is the same in every Python from 3.11.
"""

import ast
import hashlib
import importlib.util
import inspect
import textwrap
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from pathlib import Path
from types import FunctionType

from triton.runtime.jit import KernelInterface

_PACKAGE = Path(__file__).resolve().parents[1]
_OPERATORS = "kernelbook.ops"


# -- modules --------------------------------------------------------------------------------------


def fingerprint(modules: Iterable[str]) -> str:
    """Return a digest of the modules and of all modules of operators that they import."""
    files = sorted(measured(modules).items())
    return _digest(f"{name} {_canonical_text(_text(path))}" for name, path in files)


def measured(modules: Iterable[str]) -> dict[str, Path]:
    """Return the files whose code the modules run, by dotted name.

    A package stands for all of its files. Imports are followed to every module of
    ``kernelbook.ops``, because a change there changes what is timed.
    """
    found: dict[str, Path] = {}
    waiting = []
    for name in modules:
        path = _file(name)
        if path is None:
            raise ModuleNotFoundError(f"no module named {name}")
        if path.name == "__init__.py":
            files = sorted(path.parent.rglob("*.py"))
            waiting += [(_dotted(name, file, path.parent), file) for file in files]
        else:
            waiting.append((name, path))
    while waiting:
        name, path = waiting.pop()
        if name not in found:
            found[name] = path
            waiting += [(other, _file(other)) for other in _imported(name, path)]
    return found


def _dotted(package: str, file: Path, folder: Path) -> str:
    """Return the dotted name of a file of a package."""
    parts = file.relative_to(folder).with_suffix("").parts
    return ".".join((package, *(part for part in parts if part != "__init__")))


def _file(name: str) -> Path | None:
    """Return the file of a module; a package's is its ``__init__.py``."""
    root, *rest = name.split(".")
    if root == _PACKAGE.name:  # found by its path: the import system would run its parents
        path = _PACKAGE.joinpath(*rest)
        candidates = (path / "__init__.py", path.with_suffix(".py"))
        return next((file for file in candidates if file.is_file()), None)
    found = importlib.util.find_spec(name)
    return Path(found.origin) if found and found.origin else None


def _imported(name: str, path: Path) -> Iterator[str]:
    """Yield the modules of operators that a module imports."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(_parse(_text(path))):
        if isinstance(node, ast.Import):
            candidates = [[alias.name] for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:  # relative: one dot is the package itself
                above = package.split(".")[: 1 - node.level or None]
                module = ".".join([*above, *filter(None, [module])])
            candidates = [[f"{module}.{alias.name}", module] for alias in node.names]
        else:
            continue
        for names in candidates:  # what is imported from a package may be a module of it
            known = [n for n in names if f"{n}.".startswith(f"{_OPERATORS}.") and _file(n)]
            yield from known[:1]


# -- the chapter's own script ---------------------------------------------------------------------


def script_fingerprint(script: Path | None) -> str | None:
    """Return a digest of the kernels that a chapter's script defines and of what runs them.

    These are every ``@triton.jit`` function, every function, class and table at the top of the
    script that mentions one, and what these mention in turn. None where there is no script: a
    notebook has none.
    """
    if script is None or not script.is_file():
        return None
    statements = list(_statements(_parse(_text(script)).body))
    bound, mentioned = [_bound(node) for node in statements], [_mentioned(n) for n in statements]
    everywhere = range(len(statements))
    chosen = {i for i in everywhere if _holds_kernel(statements[i])}
    definitions = {i for i in everywhere if isinstance(statements[i], _DEFINITIONS)}
    tables = {i for i in everywhere if isinstance(getattr(statements[i], "value", None), _TABLES)}
    of_lab = {i for i in everywhere if "lab" in mentioned[i]} - definitions  # what it measured

    def grow(candidates: set[int], theirs: list[set[str]], ours: list[set[str]]) -> None:
        """Add candidates, as long as there are any, whose names meet those of what is chosen."""
        size = -1
        while size < (size := len(chosen)):
            names = set().union(*(ours[i] for i in chosen))
            chosen.update(i for i in candidates if theirs[i] & names)

    grow(definitions | tables, mentioned, bound)
    grow(set(everywhere) - of_lab, bound, mentioned)
    return _digest(_canonical(statements[i]) for i in sorted(chosen))


_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_TABLES = (ast.Dict, ast.List, ast.Tuple, ast.Set, ast.Lambda, ast.Name, ast.Attribute)
_ASSIGNMENTS = (ast.Assign, ast.AnnAssign, ast.AugAssign)


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the definitions and assignments of a module, those under an ``if`` included."""
    for node in body:
        if isinstance(node, (*_DEFINITIONS, *_ASSIGNMENTS)):
            yield node
        elif isinstance(node, ast.If | ast.With | ast.Try):
            for part in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(node, part, []))


def _bound(node: ast.stmt) -> set[str]:
    """Return the names that a statement binds."""
    if isinstance(node, _DEFINITIONS):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return {name.id for t in targets for name in ast.walk(t) if isinstance(name, ast.Name)}


def _mentioned(node: ast.stmt) -> set[str]:
    """Return the names of the script that a statement reads, without a function's own."""
    names = [inner for inner in ast.walk(node) if isinstance(inner, ast.Name)]
    read = {name.id for name in names if isinstance(name.ctx, ast.Load)}
    own = {inner.arg for inner in ast.walk(node) if isinstance(inner, ast.arg)}
    if isinstance(node, _DEFINITIONS):
        own |= {name.id for name in names if isinstance(name.ctx, ast.Store)}
    return read - own


def _holds_kernel(node: ast.stmt) -> bool:
    """Tell whether a ``triton.jit`` decorates something in the statement."""
    decorators = [d for inner in ast.walk(node) for d in getattr(inner, "decorator_list", ())]
    return any("jit" in ast.unparse(decorator).split("(")[0].split(".") for decorator in decorators)


# -- one function ---------------------------------------------------------------------------------


def function_fingerprint(function: Callable | None) -> str | None:
    """Return a digest of a function's code and of what it uses of its own module, or None where
    its source is not to be had."""
    function = _plain(function)
    if not isinstance(function, FunctionType):
        return None
    sources: dict[str, str] = {}
    waiting = [function]
    while waiting:
        one = waiting.pop()
        if one.__qualname__ in sources:
            continue
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(one)))
        except (OSError, SyntaxError, TypeError):  # typed at a prompt, or a lambda inside a call
            return None
        sources[one.__qualname__] = _canonical(tree)
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        used = (_plain(function.__globals__.get(name)) for name in sorted(names))
        waiting += [
            value
            for value in used
            if isinstance(value, FunctionType) and value.__globals__ is function.__globals__
        ]
    return _digest(f"{name} {sources[name]}" for name in sorted(sources))


def _plain(value: object) -> object:
    """Return the function inside a partial one, or inside a kernel and its tuner."""
    while isinstance(value, partial | KernelInterface):
        value = value.func if isinstance(value, partial) else value.fn
    return value


# -- syntax trees ---------------------------------------------------------------------------------


def _digest(texts: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        digest.update(f"{text}\n".encode())
    return digest.hexdigest()


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


_parse = cache(ast.parse)  # every figure of a chapter asks, and every page that lists results


@cache
def _canonical_text(text: str) -> str:
    return _canonical(_parse(text))


def _canonical(node) -> str:
    """Write a syntax tree as text, without docstrings and what differs between Pythons."""
    if isinstance(node, ast.AST):
        fields = []
        for name, value in ast.iter_fields(node):
            if name == "body" and isinstance(value, list):
                value = [item for item in value if not _is_bare_string(item)]
            if value not in (None, []) and name not in ("kind", "type_comment"):
                fields.append(f"{name}={_canonical(value)}")
        return f"{type(node).__name__}({','.join(fields)})"
    if isinstance(node, list):
        return f"[{','.join(map(_canonical, node))}]"
    return repr(node)


def _is_bare_string(node: ast.AST) -> bool:
    """Tell whether a statement is a string alone: a docstring, or one behind a constant."""
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )
