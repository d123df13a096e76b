"""Oobleck: resilient distributed training of large models.

The package root loads nothing heavy: `import oobleck` and `import oobleck.planner` work without torch and trio.
"""

from __future__ import annotations

from .script import Job

__all__ = ["Job", "__version__"]

__version__ = "0.1.0"
