"""Makes the one long import of a worker shorter. Imports nothing itself."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_UNUSED = ("PIL", "scipy")
"""What transformers loads if it is installed and causal language models never use: scipy, for the matching in
the loss of object detectors."""


@contextmanager
def quick_imports() -> Iterator[None]:
    """Within the block, import transformers without packages that a worker has no use for, and without pauses.

    Imports make millions of objects that all stay, so collecting garbage meanwhile finds none. A package that
    is loaded already stays so; one that is hidden can be imported again after the block.
    """
    hidden = [name for name in _UNUSED if name not in sys.modules]
    was_enabled = gc.isenabled()
    gc.disable()
    # None is how the import system marks a module that is not to be found.
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # typeshed knows of modules alone
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]
        if was_enabled:
            gc.enable()
