"""Paths as users write them: `~` is somebody's home."""

from __future__ import annotations

from pathlib import Path

from oobleck.errors import ConfigError

__all__ = ["expand_user"]


def expand_user(path: str | Path) -> Path:
    """Put a home in the place of `~` or `~name`. Raises ConfigError where nobody knows that home."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ConfigError(
            f"{path}: it is not known whose home {Path(path).parts[0]} is; write the whole path"
        ) from error
