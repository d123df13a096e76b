"""What follows from a plan, and what changes from one to the next: each worker's orders, and sections of a step.

It also has the key of the profile that a plan was made for.
"""

from __future__ import annotations

from .orders import orders_of, update_of
from .plan_delta import WrongBase, apply_change, change_between
from .profile_key import profile_key
from .sections import PARTIAL_COMMIT_COPIES, apportion, committed_after, num_sections_of, sections_wanted, shares_of

__all__ = [
    "PARTIAL_COMMIT_COPIES",
    "WrongBase",
    "apply_change",
    "apportion",
    "change_between",
    "committed_after",
    "num_sections_of",
    "orders_of",
    "profile_key",
    "sections_wanted",
    "shares_of",
    "update_of",
]
