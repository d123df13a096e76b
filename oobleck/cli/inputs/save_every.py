"""`--save-every`: how often to save, as one word."""

from __future__ import annotations

import re
from dataclasses import replace

from oobleck.errors import UsageError
from oobleck.job import CheckpointSpec

__all__ = ["with_save_every"]

_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0}
_STEPS = re.compile(r"[0-9]{1,15}")
_DURATION = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,15})?)([smh])")


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
    duration = _DURATION.fullmatch(text)
    if duration is not None and float(duration[1]) > 0:
        return replace(fresh, save_interval_s=float(duration[1]) * _UNITS_S[duration[2]])
    raise UsageError(f"--save-every: {text!r} is neither steps (50) nor a time (90s, 5m, 1h), nor auto or never")
