"""Measured profiles and speeds of links, cached as files under their keys."""

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
        """Return the cached profile, or None where there is none that can be read."""
        try:
            return (self._directory / f"{key}.json").read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            return None

    def store(self, key: str, profile_json: str) -> None:
        """Cache a profile; readers see all of it or nothing. Where the disk refuses it, it is measured again."""
        try:
            write_whole(self._directory / f"{key}.json", profile_json)
        except OSError as error:
            _log.warning("a measured profile is not kept: %s: %s", error.filename, error.strerror)

    def with_links(self, profile: Profile) -> Profile:
        """Return a profile with what runs have timed in place of what it assumes: of each link, the newest file."""
        network = profile.network
        paths = [path for path in self._directory.glob(f"{LINK_KEYS}*.json") if path.is_file()]
        for path in sorted(paths, key=lambda path: path.stat().st_mtime_ns, reverse=True):
            try:
                network = network.with_link(*link_from_json(self.load(path.stem) or ""))
            except ConfigError:
                continue  # torn: a run times the link again
        return replace(profile, network=network)
