"""Where a script's own code may keep something from call to call: all that modules, functions and objects reach.

That is their attributes, those of the script's own classes, what functions close over, what their code names of their
module, attributes and defaults of functions, and what is in dictionaries, lists and objects there. Libraries' modules
are not entered, and neither is anything of ours.
"""

from __future__ import annotations

import functools
import itertools
import re
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

_MOST = 20_000
"""Places that are looked at."""
_LARGEST, _LONGEST = 256, 32
"""Members of a dictionary and of a list that is entered; of a larger one the length alone is looked at."""
_NUM_ELEMENTS = 64
"""Of a tensor whose numbers are looked at; of a larger one, whether it has been written to."""
_DEEPEST = 3
"""How far libraries' objects are entered from the script's own (a collator that wraps another, a subset)."""
_OURS = __name__.partition(".")[0]
_INSTALLED = frozenset({"site-packages", "dist-packages"})
_MODULES_OWN = vars(nn.Module()).keys() - {"training", "_buffers"}
_HOOKS = tuple(name for name in _MODULES_OWN if name.endswith("_hooks"))
_COUNT = re.compile(r"count\(([^,]+)(?:, (.+))?\)")


@dataclass(frozen=True, slots=True)
class Place:
    """Where something is kept."""

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], None]


@dataclass(frozen=True, slots=True, eq=False)
class _Held:
    """A large tensor, and how often it had been written to; held, so that no other takes its address."""

    tensor: torch.Tensor
    version: int

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Held) and other.tensor is self.tensor and other.version == self.version

    __hash__ = None  # type: ignore[assignment]


def state_of(value: Any) -> object:
    """Return something to compare a value with what it is later: numbers, a length, or whether it is another one.

    What has no value of its own is the same always.
    """
    match value:
        case torch.Tensor():
            if value.device.type != "cpu" or value.layout != torch.strided or value.dtype.is_complex:
                return None
            if type(value) not in (torch.Tensor, nn.Parameter) or value.numel() > _NUM_ELEMENTS:
                return _Held(value, value._version)
            return _numbers(value.detach().reshape(-1).tolist())
        case np.ndarray():
            return (
                _numbers(value.reshape(-1).tolist())
                if value.size <= _NUM_ELEMENTS and value.dtype.kind in "iuf"
                else None
            )
        # A bool is an int as well, and a flag must not look like a count.
        case bool() | str():
            return repr(value)
        case int() | float() | np.integer() | np.floating():
            return _numbers([value])
        case list() | dict() | set() | deque():
            return len(value)
    position = position_of(value)
    return None if position is None else _numbers(position[:1])


def position_of(value: object) -> tuple[Any, Any] | None:
    """Return the next number of an `itertools.count`, or of the `__next__` of one, and its step."""
    if isinstance(value, types.BuiltinMethodType | types.MethodWrapperType):
        value = value.__self__
    # Its repr tells the next number without drawing it.
    if type(value) is not itertools.count or (found := _COUNT.fullmatch(repr(value))) is None:
        return None
    first, step = (float(each) if "." in each or "e" in each else int(each) for each in (found[1], found[2] or "1"))
    return first, step


def _numbers(values: Iterable[Any]) -> tuple[float, ...]:
    return tuple(0 if value != value else value for value in values)  # so that not-a-number is the same as itself


def places_of(owners: Mapping[str, object]) -> Iterator[Place]:
    """Yield all places that `owners` reach, by their names; first those that are nearest. O(places)."""
    seen: set[object] = set()
    # A queue, so that the places nearest to an owner come first.
    queue = deque((name, owner, 0) for name, owner in owners.items())
    while queue:
        name, value, depth = queue.popleft()
        if id(value) in seen:
            continue
        seen.add(id(value))
        for place, holder, key in _inside(name, value):
            if (id(holder), key) in seen:
                continue
            seen.add((id(holder), key))
            # Each place adds itself and its value.
            if len(seen) > 2 * _MOST:
                return
            yield place
            found = place.read()
            inner = depth + (not _is_a_scripts(found))
            if inner <= _DEEPEST and _is_entered(found):
                queue.append((place.name, found, inner))


_Found = tuple[Place, object, object]
"""A place, with what holds it and under which key."""


def _inside(name: str, value: Any) -> Iterator[_Found]:
    match value:
        case types.FunctionType():
            yield from _in_function(name, value)
        case types.MethodType():
            yield from _fixed(name, value, [("", value.__self__), ("", value.__func__)])
        case functools.partial():
            yield from _fixed(name, value, [("", value.func), (".args", value.args), (".keywords", value.keywords)])
        case staticmethod() | classmethod():
            yield from _fixed(name, value, [("", value.__func__)])
        case property():
            yield from _fixed(name, value, [("", value.fget)])
        case type():
            yield from _in_class(value)
        case dict() | list() | deque() | tuple() | set() | frozenset():
            if len(value) <= (_LARGEST if isinstance(value, dict) else _LONGEST):
                yield from _in_container(name, value)
            if type(value).__module__ not in ("builtins", "collections"):
                yield from _in_object(name, value)
        case _:
            yield from _in_object(name, value)


def _in_container(name: str, value: Any) -> Iterator[_Found]:
    match value:
        case dict():
            yield from _in_mapping(name, value, value, form="{}[{!r}]")
        case list() | deque():
            kind: Any = list if isinstance(value, list) else deque  # a script's own may count what is read
            for index in range(len(value)):
                read = functools.partial(_item, kind, value, index)
                yield Place(f"{name}[{index}]", read, functools.partial(kind.__setitem__, value, index)), value, index
        case _:
            yield from _fixed(name, value, [(f"[{index}]", each) for index, each in enumerate(value)])


def _in_object(name: str, value: Any) -> Iterator[_Found]:
    own: dict[str, Any] = getattr(value, "__dict__", {})
    if isinstance(value, nn.Module):
        yield from _in_mapping(name, value._buffers, value._buffers)
        yield from _fixed(name, value, [(f".{kind}", own[kind]) for kind in _HOOKS if own.get(kind)])
        yield from _in_mapping(name, own, own.keys() - _MODULES_OWN)
    else:
        yield from _in_mapping(name, own, own)
    for each in type(value).__mro__:
        if is_of_a_script(each.__module__):
            for slot, member in vars(each).items():
                if isinstance(member, types.MemberDescriptorType) and hasattr(value, slot):
                    read, write = functools.partial(getattr, value, slot), functools.partial(setattr, value, slot)
                    yield Place(f"{name}.{slot}", read, write), value, slot
    yield from _fixed(name, type(value), [("", type(value))])


def _in_class(kind: type) -> Iterator[_Found]:
    for each in kind.__mro__:
        is_users = is_of_a_script(each.__module__)
        for name, value in list(vars(each).items()):
            if name.startswith("__") and not callable(value):
                continue
            # A script may put a function of its own in the place of a library's.
            if is_users or (isinstance(value, types.FunctionType) and _is_a_scripts(value)):
                read, write = functools.partial(_attribute, each, name), functools.partial(setattr, each, name)
                yield Place(f"{each.__qualname__}.{name}", read, write), each, name


def _in_function(name: str, function: types.FunctionType) -> Iterator[_Found]:
    for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        read, write = functools.partial(_content, cell), functools.partial(_fill, cell)
        yield Place(f"{name}.{variable}", read, write), cell, variable
    yield from _in_mapping(name, function.__dict__, function.__dict__)
    if not _is_a_scripts(function):
        return
    held = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    yield from _fixed(name, function, [(f"'s default {index}", each) for index, each in enumerate(held)])
    names, known = _names_in(function.__code__), function.__globals__
    for each in sorted(names & known.keys()):
        value = known[each]
        if not isinstance(value, types.ModuleType):
            yield from _in_mapping("the global", known, [each], form="{} {}")
        elif is_of_a_script(value.__name__):
            yield from _in_mapping(each, vars(value), sorted(names & vars(value).keys()))


def _in_mapping(name: str, values: dict[Any, Any], keys: Iterable[Any], form: str = "{}.{}") -> Iterator[_Found]:
    for key in list(keys):
        if key in values:
            read, write = functools.partial(dict.get, values, key), functools.partial(dict.__setitem__, values, key)
            yield Place(form.format(name, key) if name else str(key), read, write), values, key


def _fixed(name: str, holder: object, values: Iterable[tuple[str, Any]]) -> Iterator[_Found]:
    # Nothing else can be put in these places, but they may hold something that changes.
    for number, (suffix, value) in enumerate(values):
        yield Place(name + suffix, functools.partial(_same, value), _ignore), holder, number


def _names_in(code: types.CodeType) -> set[str]:
    inner = (each for each in code.co_consts if isinstance(each, types.CodeType))
    return {*code.co_names}.union(*map(_names_in, inner))


def _is_entered(value: object) -> bool:
    match value:
        case torch.Tensor() | np.ndarray() | types.ModuleType() | str() | bytes() | int() | float() | None:
            return False
        case types.FunctionType() | type():
            return not _of(value).startswith(_OURS)
        case types.MethodType() | functools.partial() | staticmethod() | classmethod() | property():
            return True
        case dict() | list() | tuple() | set() | frozenset() | deque():
            return True
        case types.SimpleNamespace() | functools._lru_cache_wrapper():
            return True
    of = _of(type(value))
    is_standard = of.partition(".")[0] in sys.stdlib_module_names
    has_attributes = hasattr(value, "__dict__") or is_of_a_script(of)  # or slots
    return has_attributes and not is_standard and not of.startswith((_OURS, "torch."))


def _is_a_scripts(value: object) -> bool:
    # Containers and wrappers belong to their holders.
    if isinstance(value, dict | list | tuple | set | frozenset | deque | types.MethodType | functools.partial):
        return True
    if isinstance(value, staticmethod | classmethod | property | types.SimpleNamespace):
        return True
    return is_of_a_script(_of(value if isinstance(value, types.FunctionType | type) else type(value)))


def _of(value: Any) -> str:
    # `functools.wraps` copies `__module__`, so a wrapper claims to be from the module of what it wraps.
    of = value.__globals__.get("__name__") if isinstance(value, types.FunctionType) else value.__module__
    return str(of)


@functools.cache
def is_of_a_script(module: str) -> bool:
    """Say whether a module, by its name, is none of the standard library's, of ours, or of an installed package."""
    if module.partition(".")[0] in (*sys.stdlib_module_names, _OURS):
        return False
    file = getattr(sys.modules.get(module), "__file__", None)
    return file is None or not _INSTALLED.intersection(Path(file).parts)


def _same(value: Any) -> Any:
    return value


def _ignore(_value: Any) -> None:
    """Where nothing can be put."""


def _item(kind: Any, values: Any, index: int) -> Any:
    return kind.__getitem__(values, index) if index < len(values) else None


def _attribute(kind: type, name: str) -> Any:
    return vars(kind).get(name)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None


def _fill(cell: types.CellType, value: Any) -> None:
    cell.cell_contents = value
