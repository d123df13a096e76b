"""`--save-every`: how often to save, as one word."""

from __future__ import annotations

import re
from dataclasses import replace

from oobleck.errors import UsageError
from oobleck.job import CheckpointSpec
from oobleck.job.bounds import MAX_SECONDS

from .durations import parse_duration

_STEPS = re.compile(r"[0-9]{1,15}")


def with_save_every(spec: CheckpointSpec, text: str) -> CheckpointSpec:
    """Change when to save: `50` (steps), `90s`, `5m`, `1h`, `auto` or `never`.

    Raises UsageError for anything else.
    """
    fresh = replace(spec, enabled=True, save_steps=None, save_interval_s=None)
    if text == "auto":
        return fresh
    if text == "never":
        return replace(fresh, enabled=False)
    if _STEPS.fullmatch(text) and int(text) > 0:
        return replace(fresh, save_steps=int(text))
    interval_s = parse_duration(text) if text[-1:].isalpha() else None
    if interval_s and interval_s <= MAX_SECONDS:
        return replace(fresh, save_interval_s=interval_s)
    raise UsageError(f"--save-every: {text!r} is neither steps (50) nor a time (90s, 5m, 1h), nor auto or never")
