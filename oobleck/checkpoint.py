"""Saves a script's own state in memory under `oobleck run`, and loads it again; see `docs/scripts.md`."""

from __future__ import annotations

from oobleck.training.flash import BadStep, load, load_files, notice, save, save_files

__all__ = ["BadStep", "load", "load_files", "notice", "save", "save_files"]
