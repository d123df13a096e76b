"""`oobleck up`: its options, and a run that trains, wired together. The door loads the options alone."""

from __future__ import annotations

from .command import up

__all__ = ["up"]
