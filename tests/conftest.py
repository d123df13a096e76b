"""Settings of all tests."""

from __future__ import annotations

import os
import shutil
import tempfile

import pytest
from hypothesis import settings

from tests.examples import examples

settings.register_profile("oobleck", examples(100))
settings.load_profile("oobleck")

_LONGEST_DIRECTORY = 20
"""Sockets' paths end at 107 characters, and pytest and the tests take most of them."""

_short = pytest.StashKey[str]()


def pytest_configure(config: pytest.Config) -> None:
    """Have tests make their files in a directory with a short name; batch systems' TMPDIR has a long one."""
    if len(tempfile.gettempdir()) > _LONGEST_DIRECTORY:
        config.stash[_short] = tempfile.mkdtemp(prefix="ob", dir="/tmp")
        os.environ["TMPDIR"] = tempfile.tempdir = config.stash[_short]  # for workers and what tests start as well


def pytest_unconfigure(config: pytest.Config) -> None:
    """Leave nothing of it."""
    if _short in config.stash:
        shutil.rmtree(config.stash[_short], ignore_errors=True)
