"""Generators of random numbers that libraries keep for a whole process: all forks of one process would share a state.

A fresh process seeds each of them from the system's own source. To add a library, add its row to `_GENERATORS`.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any


def _reseed_torch(torch: Any) -> None:
    # Not `torch.seed()`, which would give all devices one seed: a fresh process seeds each device's generator by
    # itself, together with the device's context, which no process has that ranks are forked from.
    torch.default_generator.seed()


def _state_of_numpy(numpy: Any) -> object:
    _, words, position, *_ = numpy.get_state(legacy=True)
    return words.tobytes(), position


_Generator = tuple[Callable[[Any], object], Callable[[Any], object]]
_GENERATORS: Mapping[str, _Generator] = {
    "random": (lambda _: random.seed(), lambda _: random.getstate()),
    "numpy.random": (lambda numpy: numpy.seed(), _state_of_numpy),
    "torch": (_reseed_torch, lambda torch: torch.initial_seed()),
}
"""For each module, a function that seeds it as a fresh process does, and one that returns what seeding changes."""

LIBRARIES = frozenset(name.partition(".")[0] for name in _GENERATORS)


def reseed_generators() -> None:
    """Seed the generators of all loaded modules, as a fresh process does."""
    for name, (reseed, _) in _GENERATORS.items():
        if (module := _loaded(name)) is not None:
            reseed(module)


def generator_states() -> Mapping[str, object]:
    """Return what seeding changes, keyed by the loaded module's name."""
    states = {}
    for name, (_, state) in _GENERATORS.items():
        if (module := _loaded(name)) is not None:
            states[name] = state(module)
    return states


def _loaded(name: str) -> ModuleType | None:
    module = sys.modules.get(name)
    # A module has no generator during its import, or after a failed one.
    return module if module is not None and hasattr(module, "initial_seed" if name == "torch" else "seed") else None
