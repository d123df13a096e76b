"""Settings of all tests."""

from __future__ import annotations

from hypothesis import settings

from tests.examples import examples

settings.register_profile("oobleck", examples(100))
settings.load_profile("oobleck")
