"""A docstring below an attribute is about that attribute, and so is preceded by one."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def statements(tree: ast.AST) -> Iterator[list[ast.stmt]]:
    """Each block of statements."""
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list):
                yield block


def is_text(statement: ast.stmt) -> bool:
    """Whether a statement is a string, and no more."""
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


@pytest.mark.parametrize("folder", ["oobleck", "tests", "tools"])
def test_a_docstring_opens_its_block_or_follows_an_assignment(folder: str) -> None:
    """One that was left behind when its attribute moved follows another docstring, or what it cannot describe."""
    misplaced = [
        f"{path.relative_to(ROOT)}:{after.lineno}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for block in statements(ast.parse(path.read_text(encoding="utf-8")))
        for before, after in pairwise(block)
        if is_text(after) and not isinstance(before, ast.Assign | ast.AnnAssign)
    ]
    assert misplaced == []
