"""`--costs` and `--cost`: what recoveries and commits cost in a simulation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

from oobleck.errors import ConfigError, UsageError, shown
from oobleck.runtime.files import read_input

if TYPE_CHECKING:
    from oobleck.sim.costs import Costs


def parse_costs(file: Path | None, changes: Sequence[str]) -> Costs:
    """Return the costs, changed by what a file says, and then by each NAME=VALUE.

    Raises UsageError or ConfigError that names the option or the file, and the cost.
    """
    from oobleck.sim.costs import Costs, costs_from_json

    costs = Costs()
    if file is not None:
        costs = costs_from_json(read_input(file, "costs"), costs, source=str(file))
    for change in changes:
        costs = _changed(costs, change)
    return costs


def _changed(costs: Costs, change: str) -> Costs:
    name, is_given, value = change.partition("=")
    known = [part.name for part in fields(costs)]
    if name not in known:
        near = get_close_matches(name, known, n=1, cutoff=0.0)
        raise UsageError(f"--cost names {shown(name)}; did you mean {near[0]!r}?")
    try:
        return replace(costs, **{name: float(value)})
    except ValueError:
        problem = f"is {shown(value)}" if is_given else "has no value"
        raise UsageError(f"--cost {name} {problem}; write a number, such as {name}=5") from None
    except ConfigError as error:
        raise UsageError(f"--cost {error}") from None
