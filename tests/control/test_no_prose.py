"""No decision reads prose: nothing pure looks into a text that is meant for people.

The pure floors and the simulator may carry such a text, join it to another, and ask whether there is one. They may not
look for words in it, compare it with one, or match on it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "oobleck"
PROSE = frozenset({"reason", "evidence", "text", "problem", "detail", "fault", "message", "last_words", "traceback"})
"""Fields, and variables that hold them: sentences for people, or words that come from outside."""
READS = frozenset({
    *("startswith", "endswith", "find", "index", "count", "partition", "rpartition", "split", "removeprefix"),
    *("removesuffix", "casefold", "lower", "splitlines"),
})  # fmt: skip
SEARCHES = frozenset({"match", "search", "fullmatch", "findall", "sub", "split"})
"""Of a pattern, with the text as an argument."""
MAY_READ = frozenset({"control/journal/incidents.py", "sim/trace/convert.py"})
"""The one cuts a text to its first line, and decides nothing; what the other calls a text is a file."""


def name_of(node: ast.expr) -> str:
    match node:
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name
        case _:
            return ""


def is_prose(node: ast.expr) -> bool:
    return name_of(node) in PROSE


def is_text(node: ast.expr | None) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def patterns_of(node: ast.MatchClass) -> Iterator[tuple[str, ast.pattern]]:
    return zip(node.kwd_attrs, node.kwd_patterns, strict=True)


def readings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, what is done there) of everything that looks into prose."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(attr=attribute), args=args) if attribute in SEARCHES:
                yield from ((node.lineno, f"{attribute}({name_of(each)})") for each in args if is_prose(each))
            case ast.Call(func=ast.Attribute(value=value, attr=attribute)) if attribute in READS and is_prose(value):
                yield node.lineno, f"{name_of(value)}.{attribute}()"
            case ast.Compare(left=left, ops=ops, comparators=others):
                for operator, other in zip(ops, others, strict=True):
                    if isinstance(operator, ast.In | ast.NotIn) and is_prose(other):
                        yield node.lineno, f"in {name_of(other)}"
                    if isinstance(operator, ast.Eq | ast.NotEq | ast.In | ast.NotIn) and is_prose(left):
                        if is_text(other) and getattr(other, "value", None) == "":
                            continue  # whether there is a text is no reading of it
                        yield node.lineno, f"compares {name_of(left)}"
            case ast.Match(subject=subject) if is_prose(subject) and any(
                isinstance(case.pattern, ast.MatchValue) and is_text(case.pattern.value) for case in node.cases
            ):
                yield node.lineno, f"match {name_of(subject)}"
            case ast.MatchClass():
                for name, pattern in patterns_of(node):
                    if name in PROSE and isinstance(pattern, ast.MatchValue):
                        yield pattern.lineno, f"case {name}=…"


def pure_modules() -> list[Path]:
    return [path for floor in ("control", "sim") for path in sorted((PACKAGE / floor).rglob("*.py"))]


def test_nothing_pure_reads_prose():
    found = [
        f"oobleck/{place}:{line}: {what}"
        for path in pure_modules()
        if (place := str(path.relative_to(PACKAGE))) not in MAY_READ
        for line, what in readings(ast.parse(path.read_text()))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "line",
    [
        "if WORDS in entry.text: pass",
        "entry.reason.startswith('killed')",
        "pattern.search(entry.reason)",
        "if evidence == 'not heard of': pass",
        "node, _, why = notice.text.partition(': ')",
        "match entry:\n    case StopAgent(reason='drained'): pass",
        "match message.reason:\n    case 'drained': pass",
    ],
)
def test_a_module_that_reads_prose_is_found(line: str):
    assert list(readings(ast.parse(line)))


@pytest.mark.parametrize(
    "line",
    [
        "if entry.reason: pass",
        "text = f'{entry.reason}; {again}'",
        "if reason == '': pass",
        "re.match(PLACE, name)",
        "match finding.problem:\n    case Problem.HOT: pass",
    ],
)
def test_a_text_may_be_carried_and_asked_for(line: str):
    assert not list(readings(ast.parse(line)))
