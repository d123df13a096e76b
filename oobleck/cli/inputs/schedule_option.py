"""`--schedule`: the order in which stages work, as a job names it."""

from __future__ import annotations

from typing import cast, get_args

from oobleck.errors import UsageError
from oobleck.job import ScheduleName


def parse_schedule_name(name: str) -> ScheduleName:
    """Return the name of a schedule. Raises UsageError for another."""
    known = get_args(ScheduleName)
    if name not in known:
        raise UsageError(f"--schedule is {name!r}; it must be one of {', '.join(known)}")
    return cast("ScheduleName", name)
