"""Shortens the one long import of a worker. Imports nothing itself."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quick_imports() -> Iterator[None]:
    """Collect no garbage within the block: imports create millions of objects that all stay.

    Rejected: hiding packages that transformers imports wherever they are installed, and that few models need (scipy,
    PIL). It saved a third of the import, but other packages need them (scikit-learn does), and transformers decides
    on import which functions it has.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
