"""Settings of all tests."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator

import pytest
from hypothesis import settings

# What they assert is shown with its values, too. Nothing may have imported them before.
pytest.register_assert_rewrite("tests.e2e.elastic", "tests.e2e.harness", "tests.e2e.ranks")

from tests.examples import examples, left_out  # noqa: E402

settings.register_profile("oobleck", examples(100))
settings.load_profile("oobleck")

_LONGEST_DIRECTORY = 20
"""Sockets' paths end at 107 characters, and pytest and the tests take most of them."""

_SLOW_TIMEOUT_S = 900
"""Of slow tests that name no limit of their own: a machine that others use as well takes some times as long."""

_short = pytest.StashKey[str]()


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Have files made in a directory with a short name where TMPDIR has a long one, and Ctrl-C end what tests start."""
    # A shell's background commands ignore it, and so would all that the tests start and interrupt.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if len(tempfile.gettempdir()) <= _LONGEST_DIRECTORY:
        return
    config.stash[_short] = tempfile.mkdtemp(prefix="ob", dir="/tmp")
    if config.option.basetemp is None:
        config.option.basetemp = os.path.join(config.stash[_short], "t")
    os.environ["TMPDIR"] = tempfile.tempdir = config.stash[_short]  # for what tests start, too


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(_SLOW_TIMEOUT_S))
    if deselected := set(left_out(items)):
        config.hook.pytest_deselected(items=[item for item in items if item in deselected])
        items[:] = [item for item in items if item not in deselected]


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Leave nothing of it, but for what a failed test wrote."""
    if _short in session.config.stash and exitstatus == 0:
        shutil.rmtree(session.config.stash[_short], ignore_errors=True)


@pytest.fixture(autouse=True)
def main_module_and_search_path() -> Iterator[None]:
    """Put back what a script that a test runs in this process takes over; processes forked later would look for it."""
    main_module, search_path = sys.modules["__main__"], sys.path[:]
    yield
    sys.modules["__main__"] = main_module
    sys.path[:] = search_path
