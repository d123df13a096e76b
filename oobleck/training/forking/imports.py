"""Shortens the one long import of a worker. Imports nothing itself."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# Packages that transformers loads if installed, and that language models never use.
_UNUSED = ("PIL", "scipy")


@contextmanager
def quick_imports() -> Iterator[None]:
    """Within the block, hide packages that a worker does not use, unless they are loaded, and collect no garbage."""
    hidden = [name for name in _UNUSED if name not in sys.modules]
    was_enabled = gc.isenabled()
    # Imports create millions of objects that all stay, so a collection would find none.
    gc.disable()
    # The import system treats None as a module that does not exist.
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # typeshed knows of modules alone
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]
        if was_enabled:
            gc.enable()
