"""`oobleck.checkpoint.load`, `save` and `notice`, for scripts that torchrun can start, under any launcher.

Under `oobleck run`, a save is a copy into shared memory that outlives the rank; the agent writes it to disk later.
Elsewhere each save is written to disk before it returns.
"""

from __future__ import annotations

from oobleck.errors import BadStep

from .files import load_files, save_files
from .interface import find_newest, load, place, save, save_flat
from .notice import notice
from .tensors import Flat

__all__ = [
    "BadStep",
    "Flat",
    "find_newest",
    "load",
    "load_files",
    "notice",
    "place",
    "save",
    "save_files",
    "save_flat",
]
