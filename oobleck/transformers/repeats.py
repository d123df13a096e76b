"""Finds a second `train()` in the text of a script, at its first one.

Finds certain repeats only: another call on the same trainer that always follows this one, and a loop around it. Any
other is refused when it is reached.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

_LOOPS = (ast.For, ast.While)
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Module)
_ENDS = (ast.Break, ast.Return, ast.Raise)
_SIMPLE = (ast.Expr, ast.Assign, ast.AnnAssign, ast.Return)

SecondTrain = tuple[int, bool]
"""The line of a call of `train()`, or of a loop around it, and whether it is a loop."""


def second_train(caller: FrameType | None) -> SecondTrain | None:
    """Return a second training that follows the call in progress; None where there is none for certain.

    `caller` is the frame that calls `train()`. Reads the script's file.
    """
    while caller is not None:
        is_of_script = caller.f_globals.get("__name__") == "__main__"
        if is_of_script and (found := _in_frame(caller)) is not None:
            return found
        caller = caller.f_back
    return None


def _in_frame(frame: FrameType) -> SecondTrain | None:
    try:
        tree = ast.parse(Path(frame.f_code.co_filename).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return None
    for path in _paths(tree, ()):
        call = path[-1]
        # The frame's line may be any one of a call's.
        if isinstance(call, ast.Call) and call.lineno <= frame.f_lineno <= (call.end_lineno or call.lineno):
            receiver = _receiver_of(call)
            if receiver is not None:
                return _after(path, receiver)
    return None


def _paths(node: ast.AST, above: tuple[ast.AST, ...]) -> Iterator[tuple[ast.AST, ...]]:
    path = (*above, node)
    yield path
    for child in ast.iter_child_nodes(node):
        yield from _paths(child, path)


def _receiver_of(node: ast.AST) -> str | None:
    # Equal texts are the same object, as far as the script's text tells: `trainer`, `self.trainer`.
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "train":
        return ast.dump(node.func.value)
    return None


def _after(path: Sequence[ast.AST], receiver: str) -> SecondTrain | None:
    for inner, outer in zip(reversed(path), reversed(path[:-1]), strict=False):
        for block in _blocks(outer):
            if inner in block:
                for later in block[block.index(inner) + 1 :]:
                    if (line := _line_in(later, receiver)) is not None:
                        return line, False
        if isinstance(outer, _LOOPS) and inner in outer.body and not any(map(_may_end, outer.body)):
            return outer.lineno, True
        # What follows a function depends on who calls it.
        if isinstance(outer, _SCOPES):
            break
    return None


def _line_in(statement: ast.stmt, receiver: str) -> int | None:
    # Other statements, such as `if` and `try`, may skip the call.
    if isinstance(statement, ast.With):
        return next(filter(None, (_line_in(each, receiver) for each in statement.body)), None)
    if isinstance(statement, _SIMPLE):
        return next((node.lineno for node in ast.walk(statement) if _receiver_of(node) == receiver), None)  # type: ignore[attr-defined]
    return None


def _may_end(statement: ast.stmt) -> bool:
    return any(isinstance(node, _ENDS) for node in ast.walk(statement))


def _blocks(node: ast.AST) -> Iterator[list[ast.stmt]]:
    """Yield the lists of statements in a node, each of which runs from its first to its last."""
    for name in ("body", "orelse", "finalbody"):
        if isinstance(block := getattr(node, name, None), list):
            yield block
