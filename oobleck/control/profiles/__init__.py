"""The model's profile on each kind of node: what it depends on, and who is asked to measure it."""

from __future__ import annotations

from .kind_profiles import KindProfiles
from .profile_key import profile_key

__all__ = ["KindProfiles", "profile_key"]
