"""What follows from a plan, and what changes from one to the next: the orders of each worker."""

from __future__ import annotations

from .orders import WrongBase, orders_of, update_of
from .plan_delta import apply_change, change_between, difference, numbers_in, rebuild, runs_of
from .sections import (
    PARTIAL_COMMIT_COPIES,
    apportion,
    committed_after,
    num_sections_of,
    sections_wanted,
    shares_of,
)

__all__ = [
    "PARTIAL_COMMIT_COPIES",
    "WrongBase",
    "apply_change",
    "apportion",
    "change_between",
    "committed_after",
    "difference",
    "num_sections_of",
    "numbers_in",
    "orders_of",
    "rebuild",
    "runs_of",
    "sections_wanted",
    "shares_of",
    "update_of",
]
