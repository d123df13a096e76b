"""`oobleck up`: its options, and a run that trains, wired together. Only the options are loaded with the room."""

from __future__ import annotations

from .command import readable_file, up

__all__ = ["readable_file", "up"]
