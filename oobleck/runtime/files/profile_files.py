"""Measured profiles, cached as files under their keys."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["ProfileFiles"]


class ProfileFiles:
    """The profiles in one directory: `<key>.json`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def load(self, key: str) -> str | None:
        """Return the cached profile, or None where there is none that can be read."""
        try:
            return (self._directory / f"{key}.json").read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            return None

    def store(self, key: str, profile_json: str) -> None:
        """Cache a profile; readers see all of it or nothing."""
        path = self._directory / f"{key}.json"
        temporary = path.with_suffix(".tmp")
        temporary.write_text(profile_json, encoding="utf-8")
        os.replace(temporary, path)
