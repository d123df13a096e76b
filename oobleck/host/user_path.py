"""Paths as users write them: `~` is somebody's home."""

from __future__ import annotations

from pathlib import Path

from oobleck.errors import ConfigError


def expand_user(path: str | Path) -> Path:
    """Put a home in the place of `~` or `~name`. Raises ConfigError where nobody knows that home."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        user = Path(path).parts[0]
        raise ConfigError(f"{path}: there is no home that {user} stands for; write the whole path") from error
