"""What a script's own code remembers from call to call: whether results depend on it sooner or later.

A warm-up over a thousand steps shows in the first two; something that begins with the thousandth call does not. So what
changes with every call is set to what it would be much later (numbers, counts, the length of lists), and what has
changed it is asked again. `memory.py` finds the places.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from .memory import Place, places_of, position_of, state_of

_LATER = (1_000, 1_000_000)
"""How many calls later results are looked at."""
# Something may change results only now and then, such as at every fiftieth call.
_IN_A_ROW = 100
_LONGEST = 100_000
"""Elements that are added to a list, at most."""

States = dict[tuple[str, int], object]
"""What is kept, by the names of places, which are numbered where they are alike."""


def states_of(owners: Mapping[str, object]) -> States:
    """Return what is kept by `owners`, modules or functions or objects by their names, and by all that they reach."""
    return {key: state_of(place.read()) for key, place in _keyed(owners).items()}


def changed_since(owners: Mapping[str, object], before: States) -> list[str]:
    """Name what is kept otherwise than before; first what is nearest to its owner."""
    return [name for (name, number), state in states_of(owners).items() if before.get((name, number)) != state]


def counter_of(owners: Mapping[str, object], same: Callable[[], bool]) -> str | None:
    """Name something kept that results depend on, among what changes with every call.

    `same` calls what the owners belong to, and says whether it returns what it has returned before. What fails with
    other numbers is not counted. What is counted is put back.
    """
    before = states_of(owners)
    seen: list[States] = []
    # Three calls have two steps: a count grows with both, and something that is set once does not.
    for _ in range(3):
        if not same():
            # A count that the calls before have used up changes no more: only its owner is known.
            return next(iter(changed_since(owners, before)), next(iter(owners)))
        seen.append(states_of(owners))
    places = _keyed(owners)
    steps = {key: step for key in places if (step := _step(*(states.get(key) for states in seen))) is not None}
    if not steps:
        return None
    restores = [_restoring(places[key].read(), places[key].write) for key in steps]
    try:
        for key, step in steps.items():
            if not _is_same_later(places[key], step, same):
                return key[0]
        with suppress(Exception):  # it is somebody else's code, and may fail in any way
            if not all(same() for _ in range(_IN_A_ROW)):
                return next(iter(steps))[0]
    finally:
        for restore in restores:
            restore()
    return None


def _keyed(owners: Mapping[str, object]) -> dict[tuple[str, int], Place]:
    found: dict[tuple[str, int], Place] = {}
    numbers: dict[str, itertools.count[int]] = {}
    for place in places_of(owners):
        found[place.name, next(numbers.setdefault(place.name, itertools.count()))] = place
    return found


def _step(first: object, second: object, third: object) -> object | None:
    match first, second, third:
        case (tuple(), tuple(), tuple()) if len(first) == len(second) == len(third):
            steps = tuple(after - before for before, after in zip(second, third, strict=True))
            return steps if any(steps) and first != second else None
        case (int(), int(), int()) if first < second < third:
            return third - second
    return None


def _is_same_later(place: Place, step: Any, same: Callable[[], bool]) -> bool:
    for later in _LATER:
        value = place.read()
        restore = _restoring(value, place.write)
        try:
            with suppress(Exception):  # as above
                _advance(value, step, later, place.write)
                if not same():
                    return False
        finally:
            restore()
    return True


def _restoring(value: Any, write: Callable[[Any], None]) -> Callable[[], None]:
    """Return what puts back a value, as it is now."""
    match value:
        case torch.Tensor():
            kept = value.detach().clone()

            # A call may have put another object in the place, or changed this one.
            def restore() -> None:
                write(value)
                with torch.no_grad():
                    value.copy_(kept)

            return restore
        case np.ndarray():
            of_array = value.copy()
            return lambda: np.copyto(value, of_array)
        case list() | deque() | dict() | set():
            members = value.copy()

            def refill() -> None:
                value.clear()
                (value.extend if isinstance(value, list | deque) else value.update)(members)

            return refill
    return lambda: write(value)


@torch.no_grad()
def _advance(value: Any, step: Any, calls: int, write: Callable[[Any], None]) -> None:
    """Set a value to its expected value after `calls` more calls."""
    match value:
        case torch.Tensor():
            ahead = torch.tensor(step, dtype=torch.float64).view(value.shape) * calls
            value.copy_(value + ahead.to(value.device))
        case np.ndarray():
            np.copyto(value, value + np.reshape(step, value.shape) * calls, casting="unsafe")
        case list() | deque():
            value.extend(itertools.repeat(next(reversed(value)), min(step * calls, _LONGEST)))
        case dict():
            value.update(dict.fromkeys(_new_keys(value, min(step * calls, _LONGEST)), next(reversed(value.values()))))
        case set():
            value.update(_new_keys(value, min(step * calls, _LONGEST)))
        case int() | float() | np.integer():
            write(type(value)(value + step[0] * calls))
        case _:
            position = position_of(value)
            assert position is not None
            made = itertools.count(type(position[0])(position[0] + step[0] * calls), position[1])
            write(made if isinstance(value, itertools.count) else made.__next__)


def _new_keys(value: Any, number: int) -> list[object]:
    some = next(iter(value))
    if isinstance(some, int):
        return list(range(max(value) + 1, max(value) + 1 + number))
    return [f"{some} {each}" for each in range(number)] if isinstance(some, str) else [object() for _ in range(number)]
