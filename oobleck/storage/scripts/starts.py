"""Which of two states is the newer one: that of the later start, then that of the later step. Clocks have no say.

A *start* is one generation of one run of a script. Its number is one more than that of any start whose states its ranks
can see, so starts that continue from each other are in order, whatever the clocks of their nodes show.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_NAME = re.compile(r"s(\d{1,18})-")


@dataclass(frozen=True, slots=True, order=True)
class StateAge:
    """Greater for the newer state."""

    number: int
    step: int
    start: str
    """Two starts have the same number where neither has seen the other: then any order that all ranks have will do."""


def start_name(number: int, unique: str) -> str:
    """Return what a start is called; `unique` tells it from others of its number."""
    return f"s{number}-{unique}"


def start_number(start: str) -> int:
    """Return the number of a start; 0 for one of a version that did not count them."""
    found = _NAME.match(start)
    return int(found[1]) if found else 0


def age_of(start: str, step: int) -> StateAge:
    """Return the age of the state that a start saved after a step."""
    return StateAge(start_number(start), step, start)
