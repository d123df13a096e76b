"""Collects the text of functions that the cells of a notebook define, with the text of all that they need.

A module that a function uses is imported again, and so is anything from a module. The text of a function or class of a
cell is taken too, and a plain value is written as it is now. Anything else lives in the notebook alone and is refused.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import linecache
import math
import symtable
import sys
import textwrap
import types
from collections.abc import Sequence

from oobleck.errors import ConfigError

_MAIN = "__main__"
_PLAIN = (bool, int, str, bytes, type(None))


def is_of_a_cell(value: object) -> bool:
    """Return whether a notebook's cell defines this function or class."""
    ipython = sys.modules.get("IPython")
    if ipython is None or ipython.get_ipython() is None or getattr(value, "__module__", None) != _MAIN:
        return False
    return _cell_of(value) is not None


def cell_text(values: Sequence[object]) -> str:
    """Return the text of these functions and classes, preceded by all that they need.

    Raises ConfigError that names a needed object that text cannot stand for.
    """
    collected = _Collected()
    for value in values:
        collected.take(getattr(value, "__name__", ""), value, "launch()")
    return "\n\n".join(collected.texts)


class _Collected:
    def __init__(self) -> None:
        self.texts: list[str] = []
        self._names: set[str] = set()

    def take(self, name: str, value: object, user: str) -> None:
        """Add the value of a name, after all that it needs itself."""
        if name in self._names:
            return
        self._names.add(name)
        self.texts.append(self._text(name, value, user))

    def _text(self, name: str, value: object, user: str) -> str:
        if isinstance(value, types.ModuleType):
            return _import(name, value)
        if _is_plain(value):
            return f"{name} = {value!r}"
        if is_of_a_cell(value):
            text = _definition(value)
            for needed in _globals_of(text):
                if (found := _namespace().get(needed, _MISSING)) is not _MISSING and needed != name:
                    self.take(needed, found, name)
            return text
        module, own = str(getattr(value, "__module__", _MAIN)), str(getattr(value, "__qualname__", ""))
        if module != _MAIN and getattr(sys.modules.get(module), own, None) is value:
            return f"from {module} import {own} as {name}"
        raise ConfigError(
            f"{user} uses {name}, a {type(value).__name__} that lives in this notebook alone; make it in the function, "
            "or put all of it into a file with `%%writefile job.py`, and give launch() its path"
        )


def _import(name: str, module: types.ModuleType) -> str:
    """Return the import of a module under a name, and those of a package's modules that cells import too."""
    if module.__name__ != name:
        return f"import {module.__name__} as {name}"
    inner = {
        alias.name
        for cell in _cells()
        for node in ast.walk(_parsed(cell))
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.asname is None and alias.name.startswith(f"{name}.")
    }
    return "\n".join(f"import {each}" for each in (name, *sorted(inner)))


_MISSING = object()


def _namespace() -> dict[str, object]:
    return vars(sys.modules[_MAIN])


def _cell_of(value: object) -> str | None:
    name = getattr(value, "__name__", "")
    members = vars(value).values() if isinstance(value, type) else [inspect.unwrap(value)] if callable(value) else []
    codes = (getattr(member, "__code__", None) for member in members)
    files = dict.fromkeys(code.co_filename for code in codes if isinstance(code, types.CodeType))
    # IPython keeps the text of each cell in linecache, under the name of its code's file.
    texts = ["".join(linecache.getlines(file)) for file in files]
    if isinstance(value, type):
        texts += reversed(_cells())  # a class without methods does not know its file
    return next((text for text in texts if _node(text, name) is not None), None)


def _cells() -> list[str]:
    """Return the cells that were run, oldest first, from IPython's own list."""
    cells = _namespace().get("In")
    return [text for text in cells if isinstance(text, str)] if isinstance(cells, list) else []


def _node(text: str, name: str) -> ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | None:
    """Return the last definition of a name at the top level of a cell."""
    found = [
        node for node in _parsed(text).body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    ]
    return next((node for node in reversed(found) if node.name == name), None)


def _parsed(text: str) -> ast.Module:
    """Parse a cell; one with a syntax error counts as empty."""
    try:
        return ast.parse(text)
    except SyntaxError:
        return ast.Module(body=[], type_ignores=[])


def _definition(value: object) -> str:
    text = _cell_of(value)
    assert text is not None
    node = _node(text, getattr(value, "__name__", ""))
    assert node is not None
    first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
    return textwrap.dedent("\n".join(text.splitlines()[first - 1 : node.end_lineno]))


def _globals_of(text: str) -> list[str]:
    """Return the global names that a definition uses, when it is made or when it is called."""
    table = symtable.symtable(text, "cell", "exec")
    used = {symbol.get_name() for symbol in table.get_symbols() if symbol.is_referenced()}
    waiting = list(table.get_children())
    while waiting:
        inner = waiting.pop()
        used |= {symbol.get_name() for symbol in inner.get_symbols() if symbol.is_global()}
        waiting += inner.get_children()
    return sorted(name for name in used if not hasattr(builtins, name) or name in _namespace())


def _is_plain(value: object) -> bool:
    """Return whether Python reads the `repr` of this value as an equal value."""
    # The `repr` of a subclass may be anything, so only the types themselves count.
    if isinstance(value, list | tuple | set | frozenset) and type(value) in (list, tuple, set, frozenset):
        return all(_is_plain(each) for each in value)
    if type(value) is dict:
        return all(_is_plain(each) for pair in value.items() for each in pair)
    # Python has no literals for nan and infinity.
    return math.isfinite(value) if type(value) is float else type(value) in _PLAIN
