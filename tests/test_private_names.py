"""Tests use what packages give out: none reads a private name of ours, or replaces a part of our code."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parent
OWN = ("oobleck", "tests", "tools")
NOT_PRIVATE = {"_replace", "_asdict", "_fields", "_make"}
"""Of named tuples: public, by their documentation."""
PATCHES = {"setattr", "delattr", "patch"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name not in NOT_PRIVATE


@cache
def nodes_of(tree: ast.Module) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(tree))


@cache
def foreign_names(tree: ast.Module) -> set[str]:
    """The names in a file that are others' modules, or come from them."""
    names: set[str] = set()
    for node in nodes_of(tree):
        if isinstance(node, ast.Import):
            names |= {
                (alias.asname or alias.name).split(".")[0] for alias in node.names if not alias.name.startswith(OWN)
            }
        elif isinstance(node, ast.ImportFrom) and not node.level and not (node.module or "").startswith(OWN):
            names |= {alias.asname or alias.name for alias in node.names}
    return names


def root_of(node: ast.expr) -> str | None:
    """The name that a chain of attributes begins with."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def defined_names(tree: ast.Module) -> set[str]:
    """What this file's own classes define or assign."""
    functions = {node.name for node in nodes_of(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    stored = {
        node.attr for node in nodes_of(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }
    fields = {
        node.target.id
        for node in nodes_of(tree)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    return functions | stored | fields


def private_uses(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """The lines that read a private name of ours, with what they say."""
    foreign, own = foreign_names(tree), defined_names(tree)
    for node in nodes_of(tree):
        match node:
            case ast.Attribute(attr=name, value=value) if is_private(name):
                is_own = isinstance(value, ast.Name) and value.id in ("self", "cls") and name in own
                if not is_own and root_of(value) not in foreign:
                    yield node.lineno, ast.unparse(node)
            case ast.ImportFrom(module=module, names=names):
                if not node.level and not (module or "").startswith(OWN):
                    continue
                for name in (*(module or "").split("."), *(alias.name for alias in names)):
                    if is_private(name):
                        yield node.lineno, f"import of {name}"
            case ast.Call(args=[target, ast.Constant(value=str(name)), *_]) if is_private(name):
                if root_of(target) not in foreign:
                    yield node.lineno, ast.unparse(node)


def patches(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """The lines that replace an attribute of a module or an object of ours."""
    foreign = foreign_names(tree)
    for node in nodes_of(tree):
        match node:
            case ast.Call(func=ast.Attribute(attr=name), args=[target, *_]) if name in PATCHES:
                if isinstance(target, ast.Constant):
                    is_ours = str(target.value).startswith(OWN)
                else:
                    is_ours = root_of(target) not in foreign
                if is_ours:
                    yield node.lineno, ast.unparse(node)


def found(look: Callable[[ast.Module], Iterator[tuple[int, str]]]) -> list[str]:
    return [f"{name}:{line}: {said}" for name, tree in all_tests() for line, said in look(tree)]


@cache
def all_tests() -> tuple[tuple[str, ast.Module], ...]:
    return tuple(
        (str(path.relative_to(TESTS)), ast.parse(path.read_text(encoding="utf-8")))
        for path in sorted(TESTS.rglob("*.py"))
    )


def test_no_test_reads_a_private_name_of_ours():
    assert found(private_uses) == []


def test_no_test_replaces_a_part_of_our_code():
    assert found(patches) == []


def test_such_uses_are_found():
    source = """
import os
import trio
from oobleck.x import y, _z
class T(y):
    def t(self):
        self._mine = self._theirs
        os._exit(0)
        trio._core._run
        y.a._b
        getattr(y, "_c")
        self.pair._replace(a=1)
        monkeypatch.setattr(y, "d", 1)
        monkeypatch.setattr("oobleck.x.e", 1)
        monkeypatch.setattr(os, "environ", {})
"""
    tree = ast.parse(source)
    assert [line for line, _ in sorted(private_uses(tree))] == [4, 7, 10, 11]
    assert [line for line, _ in sorted(patches(tree))] == [13, 14]
