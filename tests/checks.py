"""Types and shapes in the signatures of the package are checked while tests run.

beartype checks types and jaxtyping checks shapes. jaxtyping's own import hook would
check arguments twice in each call, and would make two checkers whenever a function
within a function is defined. Here, a function gets its checker in its first call.
"""

import ast
import dataclasses
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import random
import sys
import types
import typing
from collections.abc import Callable, Generator, Sequence
from typing import Any
from unittest import mock

import jaxtyping

# beartype draws the item of a list that it checks. Its numbers are its own: threads of
# servers check while hypothesis draws examples, which it must do from `random` alone.
with mock.patch("random.getrandbits", random.Random(0).getrandbits):
    from beartype import BeartypeConf, beartype

# An int is welcome where a float is asked for, as in PEP 484.
_check = beartype(conf=BeartypeConf(is_pep484_tower=True))
# Sizes that jaxtyping has bound to names hold for one call.
_call = jaxtyping.jaxtyped("context")
_PYC = ".checked1.pyc"  # another number where code is changed in another way
# A run of a tiny model calls some functions ten thousand times. Checks of all would
# take a sixth of the time of all tests, and those of 20 calls 3 % more than of five.
CALLS_PER_TEST = 5


class _Test:
    """The test that runs: each of them checks its own first calls of a function."""

    number = 0


def begin_test() -> None:
    """The first calls of all functions are checked again."""
    _Test.number += 1


def check_imports(package: str, unchecked: Sequence[str], checked: Sequence[str]):
    """Checks the modules of a package that are imported from now on.

    Args:
        package: The package. What its `__init__` modules define is not checked.
        unchecked: Beginnings of the names of modules that are left as they are.
        checked: Modules that are checked nevertheless.
    """
    finder = _Finder((f"{package}.", *unchecked), frozenset(checked))
    sys.meta_path.insert(0, finder)


def checked(thing: Any) -> Any:
    """Returns a function, or a dataclass, whose arguments are checked."""
    if not isinstance(thing, type):
        return _checked_function(thing) if thing.__annotations__ else thing
    init = thing.__init__
    if dataclasses.is_dataclass(thing) and not hasattr(init, "_is_checked"):
        thing.__init__ = _checked_function(init)
    return thing


def _checked_function(function: Callable[..., Any]) -> Callable[..., Any]:
    checker: Callable[..., Any] | None = None
    is_generator = inspect.isgeneratorfunction(function)
    test, calls_left = -1, 0

    @functools.wraps(function)
    def call(*args, **kwargs):
        nonlocal checker, test, calls_left
        if test != _Test.number:
            test, calls_left = _Test.number, CALLS_PER_TEST
        if not calls_left or jaxtyping.config.jaxtyping_disable:
            return function(*args, **kwargs)
        calls_left -= 1
        if checker is None:
            checker = _checker(function)
        if is_generator:
            return _OwnSizes(checker(*args, **kwargs))
        with _call:
            return checker(*args, **kwargs)

    call._is_checked = True
    return call


# A stand-in of each function within a function, and its checker, by the id of its code.
_checkers: dict[int, tuple[Callable[..., Any], Callable[..., Any]]] = {}


def _checker(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that calls another one and checks its arguments and result.

    beartype takes milliseconds to make one, and functions within functions are new in
    each call of the outer one: all of the same code are checked by copies of one.
    """
    if "<locals>" not in function.__qualname__:
        function.__annotations__ = _resolved(function)
        return _check(function)
    code = function.__code__
    if id(code) not in _checkers:
        # It must not keep alive what the function closes over.
        cells = tuple(types.CellType() for _ in code.co_freevars)
        stand_in = types.FunctionType(
            code, function.__globals__, function.__name__, function.__defaults__, cells
        )
        stand_in.__kwdefaults__ = function.__kwdefaults__
        stand_in.__qualname__ = function.__qualname__
        stand_in.__module__ = function.__module__
        stand_in.__annotations__ = _resolved(function)
        _checkers[id(code)] = stand_in, _check(stand_in)
    stand_in, made = _checkers[id(code)]
    if made is stand_in:  # its annotations allow everything
        return function
    # beartype's function gets the one that it calls as the default of an argument.
    given = made.__kwdefaults__
    assert stand_in in given.values()
    copy = types.FunctionType(made.__code__, made.__globals__, made.__name__)
    copy.__kwdefaults__ = {
        name: function if value is stand_in else value for name, value in given.items()
    }
    return copy


class _OwnSizes:
    """A generator whose arguments are checked in its first step, as of a call."""

    def __init__(self, made: Generator):
        self._made, self._has_begun = made, False

    def __iter__(self):
        return self

    def __next__(self):
        return self.send(None)

    def send(self, value: Any) -> Any:
        if self._has_begun:
            return self._made.send(value)
        self._has_begun = True
        with _call:
            return self._made.send(value)

    def throw(self, *error: Any) -> Any:
        return self._made.throw(*error)

    def close(self) -> None:
        self._made.close()


def _resolved(function: Callable[..., Any]) -> dict[str, Any]:
    """Returns the annotations; Any where one names what only a type checker knows.

    That is what it alone imports, and the class that a method belongs to.
    """
    found = {}
    for name, hint in function.__annotations__.items():
        one = types.SimpleNamespace(__annotations__={name: hint})
        try:
            found |= typing.get_type_hints(
                one, function.__globals__, include_extras=True
            )
        except NameError:
            found[name] = Any
        if found[name] is typing.Self:
            found[name] = Any
    return found


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, begins: tuple[str, ...], checked: frozenset[str]):
        self._package, self._unchecked = begins[0], begins[1:]
        self._checked = checked

    def find_spec(self, fullname, path=None, target=None):
        if not fullname.startswith(self._package):
            return None
        if fullname.startswith(self._unchecked) and fullname not in self._checked:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.submodule_search_locations is not None:
            return spec
        if isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(fullname, spec.loader.path)
        return spec


class _Loader(importlib.machinery.SourceFileLoader):
    """Compiles modules with the decorator, and keeps them beside the plain ones."""

    def get_data(self, path):
        return super().get_data(path.replace(".pyc", _PYC))

    def set_data(self, path, data, *, _mode=0o666):
        super().set_data(path.replace(".pyc", _PYC), data, _mode=_mode)

    def source_to_code(self, data, path, *, _optimize=-1):
        tree = _Decorate().visit(ast.parse(data, path))
        return compile(tree, path, "exec", dont_inherit=True, optimize=_optimize)


class _Decorate(ast.NodeTransformer):
    """Adds the decorator where `no_type_check` does not forbid it."""

    def visit_Module(self, node: ast.Module):
        self.generic_visit(node)
        (line,) = ast.parse(f"from {__name__} import checked as _checked_by_tests").body
        at = int(ast.get_docstring(node, clean=False) is not None)
        node.body.insert(at, line)
        return node

    def visit_ClassDef(self, node: ast.ClassDef):
        if not _is_forbidden(node):
            self.generic_visit(node)
            node.decorator_list.insert(0, _decorator(node))  # it sees a dataclass
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef):
        if not _is_forbidden(node):
            self.generic_visit(node)
            # `jax.jit` and `property` are given the function that is checked.
            node.decorator_list.append(_decorator(node))
        return node


def _is_forbidden(node: ast.ClassDef | ast.FunctionDef) -> bool:
    return any(ast.unparse(d).endswith("no_type_check") for d in node.decorator_list)


def _decorator(node: ast.AST) -> ast.expr:
    return ast.copy_location(ast.Name("_checked_by_tests", ast.Load()), node)
