"""What a check is: something that measures numbers, and a rule of its own that judges them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from tools.gpu.prerequisites import Need

__all__ = ["ROOT", "Check", "NotHere", "Numbers", "Outcome", "Result", "exactly", "exit_code_of", "run", "within"]

Numbers = Mapping[str, float]

ROOT = Path(__file__).parents[2]


class NotHere(Exception):
    """A check cannot be run on this machine; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Something to verify."""

    tier: str
    name: str
    measure: Callable[[], Numbers]
    """Raises NotHere if it finds that it cannot be run here."""
    judge: Callable[[Numbers], str | None]
    """What falls short; None if nothing does."""
    num_gpus: int = 1
    """How many it needs."""
    needs: Sequence[Need] = ()
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
    num_gpus: int
    """How many it needs: one that needs none verifies no GPU."""


class Outcome(IntEnum):
    """The exit status for all results together."""

    PASSED = 0
    FAILED = 1
    NOTHING_VERIFIED = 3
    """No check that needs a GPU was run."""

    @classmethod
    def of(cls, results: Sequence[Result]) -> Outcome:
        if any(each.outcome == "failed" for each in results):
            return cls.FAILED
        verified = any(each.outcome == "passed" and each.num_gpus for each in results)
        return cls.PASSED if verified else cls.NOTHING_VERIFIED


def run(check: Check, *, num_gpus: int, missing: Mapping[Need, str], limit_s: float = 300.0) -> Result:
    """Measure and judge; what cannot be measured here says so, and what takes longer fails.

    `missing` are prerequisites that are not met.
    """

    def result(outcome: str, detail: str, seconds: float = 0.0, numbers: Numbers | None = None) -> Result:
        return Result(
            name=check.name,
            outcome=outcome,
            detail=detail,
            seconds=seconds,
            numbers=numbers or {},
            num_gpus=check.num_gpus,
        )

    if num_gpus < check.num_gpus:
        devices = f"{check.num_gpus} CUDA device{'s' if check.num_gpus > 1 else ''}"
        return result("not run", f"it needs {devices}; torch sees {num_gpus} here")
    if lacking := [missing[need] for need in check.needs if need in missing]:
        return result("not run", "; ".join(lacking))
    began_s = time.monotonic()
    numbers: Numbers = {}
    try:
        if (reason := check.why_not()) is not None:
            return result("not run", reason)
        with _within(limit_s):
            numbers = check.measure()
        problem = check.judge(numbers)
    except NotHere as reason:
        return result("not run", str(reason))
    except Exception as error:  # noqa: BLE001  whatever it is: the other checks still say what they find
        problem = f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - began_s
    return result("passed" if problem is None else "failed", problem or "", seconds, numbers)


@contextmanager
def _within(limit_s: float) -> Iterator[None]:
    """Raise TimeoutError in the block, which the main thread must be in, once it has taken so long."""

    def expire(_: int, __: object) -> None:
        raise TimeoutError(f"it has taken more than {limit_s:g} s")

    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


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
