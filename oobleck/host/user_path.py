"""Paths as users write them, where `~` is a home directory."""

from __future__ import annotations

from pathlib import Path

from oobleck.errors import ConfigError


def expand_user(path: str | Path) -> Path:
    """Replace `~` or `~name` by a home directory. Raises ConfigError if there is no such home."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        user = Path(path).parts[0]
        raise ConfigError(f"{path}: there is no home directory {user}; write the whole path") from error
