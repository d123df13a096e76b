"""Generators of random numbers that libraries keep for a whole process: all forks of one process would share a state.

A fresh process seeds each of them from the system's own source. A library is added here as a row, with how it does so.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any


def _reseed_torch(torch: Any) -> None:
    # The CPU's alone: `torch.seed()` would leave one seed for all devices, whose generators a fresh process seeds one
    # by one. They are made with a device's context, which no process has that ranks are forked from.
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
"""By module: what seeds it as a fresh process does, and what of it changes when it is seeded."""


LIBRARIES = frozenset(name.partition(".")[0] for name in _GENERATORS)


def reseed_generators() -> None:
    """Seed all that are loaded, as a fresh process does."""
    for name, (reseed, _) in _GENERATORS.items():
        if (module := _loaded(name)) is not None:
            reseed(module)


def generator_states() -> Mapping[str, object]:
    """Return what changes of each loaded one when it is seeded, by the library's name."""
    loaded = {name: (_loaded(name), state) for name, (_, state) in _GENERATORS.items()}
    return {name: state(module) for name, (module, state) in loaded.items() if module is not None}


def _loaded(name: str) -> ModuleType | None:
    module = sys.modules.get(name)
    # A module that is being imported, or whose import has failed, has no generator yet.
    return module if module is not None and hasattr(module, "initial_seed" if name == "torch" else "seed") else None
