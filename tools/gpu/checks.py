"""What a check is: something that measures numbers, and a rule of its own that judges them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ROOT", "Check", "Numbers", "Result", "exactly", "exit_code_of", "run", "within"]

Numbers = Mapping[str, float]

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Something to verify."""

    tier: str
    name: str
    measure: Callable[[], Numbers]
    judge: Callable[[Numbers], str | None]
    """What falls short; None if nothing does."""
    num_gpus: int = 1
    """How many it needs."""
    why_not: Callable[[], str | None] = lambda: None
    """Why it cannot be run on a GPU that is here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What became of a check."""

    name: str
    outcome: str
    """passed, failed, or not run."""
    detail: str
    seconds: float
    numbers: Numbers


def run(check: Check, *, num_gpus: int) -> Result:
    """Measure and judge; what cannot be measured here says so."""
    if num_gpus < check.num_gpus:
        detail = f"it needs {check.num_gpus} CUDA device{'s' if check.num_gpus > 1 else ''}; torch sees {num_gpus} here"
        return Result(name=check.name, outcome="not run", detail=detail, seconds=0.0, numbers={})
    if (reason := check.why_not()) is not None:
        return Result(name=check.name, outcome="not run", detail=reason, seconds=0.0, numbers={})
    began_s = time.monotonic()
    numbers: Numbers = {}
    try:
        numbers = check.measure()
        problem = check.judge(numbers)
    except Exception as error:  # noqa: BLE001  whatever it is: the other checks still say what they find
        problem = f"{type(error).__name__}: {error}"
    return Result(
        name=check.name,
        outcome="passed" if problem is None else "failed",
        detail=problem or "",
        seconds=time.monotonic() - began_s,
        numbers=numbers,
    )


def exactly(**wanted: float) -> Callable[[Numbers], str | None]:
    """Return the rule that these numbers are what they must be."""

    def judge(numbers: Numbers) -> str | None:
        wrong = [f"{name} is {numbers[name]}, not {value}" for name, value in wanted.items() if numbers[name] != value]
        return "; ".join(wrong) or None

    return judge


def within(least: Numbers, most: Numbers) -> Callable[[Numbers], str | None]:
    """Return the rule that numbers are at least, or at most, so much."""

    def judge(numbers: Numbers) -> str | None:
        wrong = [
            f"{name} is {numbers[name]:.4g}, under {value:g}" for name, value in least.items() if numbers[name] < value
        ]
        wrong += [
            f"{name} is {numbers[name]:.4g}, over {value:g}" for name, value in most.items() if numbers[name] > value
        ]
        return "; ".join(wrong) or None

    return judge


def exit_code_of(source: str) -> int:
    """Run a script in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", source], env=environment, timeout=200, check=False)
    return done.returncode
