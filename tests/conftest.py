"""Settings of all tests."""

from __future__ import annotations

from hypothesis import settings

# How long an example takes depends on the machine; a test that is about time measures it itself.
settings.register_profile("oobleck", deadline=None)
settings.load_profile("oobleck")
