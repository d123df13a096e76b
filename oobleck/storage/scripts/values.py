"""Values of a state as JSON, without pickle: reading can only return values, and never runs code.

None, a bool, an int, a float, a str, a list    as in JSON
a tuple                                         {"tuple": [...]}
a dict                                          {"dict": [[key, value], ...]}, with keys of any plain type
a collections.Counter                           {"counter": [[key, value], ...]}
an int of more than 1,024 bits                  {"int": "0x..."}, because JSON's readers limit its digits
anything else                                   {"leaf": ...}, written by the caller
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping

from oobleck.errors import CorruptCheckpoint, UsageError, shown

TreeNode = None | bool | int | float | str | list["TreeNode"] | dict[str, "TreeNode"]

_PLAIN = (type(None), bool, int, float, str)
_KEYS = (bool, int, float, str)
# Far below Python's own limit of recursion, whose error would not name the value.
_MOST_DEEP = 100
_MOST_BITS = 1024
_MOST_SHOWN = 80
_HEX = re.compile(r"-?0x[0-9a-f]+")


def to_tree(value: object, leaf: Callable[[object, str], TreeNode], *, path: str = "") -> TreeNode:
    """Return a value's tree; `leaf(value, path)` writes other values, or raises UsageError.

    Raises UsageError, which names the path of a value that cannot be stored.
    """
    if path.count(".") > _MOST_DEEP:
        raise UsageError(f"{shown_place(path)}: nested more than {_MOST_DEEP} deep")
    if type(value) is int and value.bit_length() > _MOST_BITS:
        return {"int": hex(value)}
    # Exact classes alone: a value of a subclass, such as numpy's float64, would come back as another class.
    if type(value) in _PLAIN:
        return value  # type: ignore[return-value]  # mypy does not narrow by `type(...) in`
    if isinstance(value, Mapping):
        kind = type(value)
        # torch's MultiStepLR has one in its state.
        if hasattr(kind, "__missing__") and kind is not Counter:
            raise UsageError(
                f"{shown_place(path)} is a {kind.__module__}.{kind.__qualname__}, which would come back as a dict, "
                "without its defaults; save dict(…) of it"
            )
        pairs: TreeNode = [[_key(key, path), to_tree(each, leaf, path=_at(path, key))] for key, each in value.items()]
        return {"counter" if kind is Counter else "dict": pairs}
    if type(value) in (list, tuple):
        assert isinstance(value, list | tuple)
        items = [to_tree(each, leaf, path=_at(path, number)) for number, each in enumerate(value)]
        return items if isinstance(value, list) else {"tuple": items}
    return {"leaf": leaf(value, path)}


def from_tree(tree: TreeNode, leaf: Callable[[TreeNode], object]) -> object:
    """Return the value of a tree. Raises CorruptCheckpoint."""
    if type(tree) in _PLAIN:
        return tree
    match tree:
        case list():
            return [from_tree(each, leaf) for each in tree]
        case {"tuple": list(items)}:
            return tuple(from_tree(each, leaf) for each in items)
        case {"dict": list(pairs)}:
            return {key: from_tree(value, leaf) for key, value in map(_pair, pairs)}
        case {"counter": list(pairs)}:
            return Counter({key: from_tree(value, leaf) for key, value in map(_pair, pairs)})
        case {"int": str(text)} if _HEX.fullmatch(text):
            return int(text, 16)
        case {"leaf": node}:
            return leaf(node)
        case _:
            raise CorruptCheckpoint(f"a state with {str(tree)[:80]!r}, which is not a value")


def shown_place(path: str) -> str:
    """Return the path of a value for an error message, without its middle if it is long."""
    if len(path) <= _MOST_SHOWN:
        return path or "the state"
    half = _MOST_SHOWN // 2
    return f"{path[:half]}…{path[-half:]}"


def _key(key: object, path: str) -> TreeNode:
    if type(key) not in _KEYS or (isinstance(key, int) and key.bit_length() > _MOST_BITS):
        raise UsageError(f"{shown_place(path)}: the key {shown(key)} cannot be stored; keys are numbers or texts")
    return key  # type: ignore[return-value]  # as above


def _at(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def _pair(pair: TreeNode) -> tuple[TreeNode, TreeNode]:
    if not isinstance(pair, list) or len(pair) != 2 or type(pair[0]) not in _KEYS:
        raise CorruptCheckpoint("a state with a damaged dict")
    return pair[0], pair[1]
