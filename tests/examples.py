"""How many examples a property is tried with: few in every run of the tests, very many in a deep one.

HYPOTHESIS_PROFILE=brief, which `make test` sets, tries a tenth of each test's own number, which `make test-all`
tries, and of the cases of a test that build models, start processes or play a cluster, the first and the last;
HYPOTHESIS_PROFILE=deep tries 20,000, and 20 storms of each kind over real processes; HYPOTHESIS_PROFILE=hasty tries
many, stops at the first failure and shrinks nothing. STORM_SEEDS=20-49 has storms of these seeds, whatever the profile.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings

__all__ = ["examples", "first_of", "left_out", "seeds"]

_DEEP = 20_000
_DEEP_SEEDS = 20
_HASTE = 14
_BRIEF_PERCENT = 10
_COSTLY_ROOMS = ("tests/runtime/", "tests/sim/cluster/", "tests/training/", "tests/transformers/")
"""Where cases build models, start processes or play a cluster."""
# A failure's trace says what happened; explaining it by coverage costs more than it tells.
_PHASES = (Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink)


def examples(number: int, *, stateful_step_count: int = 50) -> settings:
    """Try so many examples, or what HYPOTHESIS_PROFILE says; a decorator, or the settings of a state machine.

    How long an example takes depends on the machine: a test that is about time measures it itself.
    """
    profile = os.environ.get("HYPOTHESIS_PROFILE", "")
    numbers = {"deep": _DEEP, "hasty": _HASTE * number, "brief": math.ceil(number * _BRIEF_PERCENT / 100)}
    return settings(
        max_examples=numbers.get(profile, number),
        stateful_step_count=stateful_step_count,
        deadline=None,
        phases=(Phase.generate,) if profile == "hasty" else _PHASES,
        database=None if profile == "hasty" else settings.default.database,
        suppress_health_check=[HealthCheck.too_slow],
    )


def first_of(number: int, values: Iterable[Any]) -> list[Any]:
    """Of the values of a parameter, mark all but the first `number` as slow: `make test-all` tries them."""
    return [
        value if index < number else pytest.param(value, marks=pytest.mark.slow) for index, value in enumerate(values)
    ]


def left_out(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Return the cases that a brief run leaves out: of a test where each is costly, all between two."""
    if os.environ.get("HYPOTHESIS_PROFILE") != "brief":
        return []
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.nodeid.startswith(_COSTLY_ROOMS) and not item.get_closest_marker("slow"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    return [item for found in cases.values() for item in found[1:-1]]


def seeds(number: int) -> range:
    """The seeds of as many runs of real processes, which take minutes each; of 20 in a deep run."""
    if asked := os.environ.get("STORM_SEEDS"):
        first, _, last = asked.partition("-")
        return range(int(first), int(last or first) + 1)
    return range(_DEEP_SEEDS if os.environ.get("HYPOTHESIS_PROFILE") == "deep" else number)
