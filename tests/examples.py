"""How many examples a property is tried with: few in every run of the tests, very many in a deep one."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

from hypothesis import HealthCheck, Phase, settings

__all__ = ["examples"]

Test = TypeVar("Test", bound=Callable[..., None])

_DEEP = 20_000
# A failure's trace says what happened; explaining it by coverage costs more than it tells.
_PHASES = (Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink)


def examples(number: int) -> Callable[[Test], Test]:
    """Try so many examples, or 20,000 under HYPOTHESIS_PROFILE=deep."""
    is_deep = os.environ.get("HYPOTHESIS_PROFILE") == "deep"
    return settings(
        max_examples=_DEEP if is_deep else number,
        deadline=None,
        phases=_PHASES,
        suppress_health_check=[HealthCheck.too_slow],
    )
