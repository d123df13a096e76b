"""Imports by a process from which workers or ranks are forked. Imports nothing itself."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

FORKABLE: Mapping[str, str] = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""Variables for imports: packages ask `torch.cuda.is_available()`, which initializes CUDA's driver without this one."""
_DRIVER = "nvidia-uvm"
"""A device that CUDA's driver opens when it is initialized, and NVML does not."""


@contextmanager
def quick_imports() -> Iterator[None]:
    """Within the block, collect no garbage, since imports create millions of objects that all stay, and set `FORKABLE`.

    Rejected: hiding packages that transformers imports wherever they are installed, and that few models need (scipy,
    PIL). It saved a third of the import, but other packages need them (scikit-learn does), and transformers decides
    on import which functions it has.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    added = {name: value for name, value in FORKABLE.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]
        if was_enabled:
            gc.enable()


def has_cuda_driver() -> bool:
    """Whether this process has initialized CUDA's driver, which then serves no process that is forked from it."""
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the directory's own
            if os.path.basename(os.readlink(link)) == _DRIVER:
                return True
    return False
