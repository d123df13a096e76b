"""A cache of measured profiles and link speeds, one file per key."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from oobleck.control.speed import LINK_KEYS
from oobleck.errors import ConfigError
from oobleck.host.writing import write_whole
from oobleck.planner import Profile
from oobleck.planner.profiles import link_from_json

_log = logging.getLogger("oobleck.up")


class ProfileFiles:
    """The profiles and links in one directory: `<key>.json`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def load(self, key: str) -> str | None:
        """Return the cached profile, or None if there is none that can be read."""
        try:
            return (self._directory / f"{key}.json").read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            return None

    def store(self, key: str, profile_json: str) -> None:
        """Cache a profile, atomically; if that fails, a later run measures again."""
        try:
            write_whole(self._directory / f"{key}.json", profile_json)
        except OSError as error:
            _log.warning("a measured profile is not kept: %s: %s", error.filename, error.strerror)

    def with_links(self, profile: Profile) -> Profile:
        """Return a profile whose assumed link speeds are replaced by measured ones, the newest of each link."""
        network = profile.network
        paths = [path for path in self._directory.glob(f"{LINK_KEYS}*.json") if path.is_file()]
        for path in sorted(paths, key=lambda path: path.stat().st_mtime_ns, reverse=True):
            try:
                network = network.with_link(*link_from_json(self.load(path.stem) or ""))
            except ConfigError:
                continue  # a torn file; some run will measure the link again
        return replace(profile, network=network)
