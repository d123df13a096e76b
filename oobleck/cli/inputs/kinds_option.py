"""`--nodes A100:16,A40:16x4`, `--prices`, `--profiles` and `--local`: nodes of several kinds on a command line."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from oobleck.errors import ConfigError, UsageError, shown
from oobleck.job import MAX_DEVICES, MAX_KINDS, MAX_NODES, check_kind_name

from .values import did_you_mean

_WHOLE = re.compile(r"\s*[-+]?[0-9]{1,40}\s*")
_COUNT = re.compile(r"([0-9]{1,9})(?:x([0-9]{1,9}))?")
_MOST_PRICE = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class KindCount:
    kind: str
    num_nodes: int
    devices_per_node: int | None
    """None leaves it to `--gpus-per-node`."""

    @property
    def names(self) -> tuple[str, ...]:
        """A100-0, A100-1, …"""
        return tuple(f"{self.kind}-{number}" for number in range(self.num_nodes))


def parse_nodes(text: str, option: str = "--nodes") -> int | tuple[KindCount, ...]:
    """Read a number of nodes, or one for each kind. Raises UsageError that names the part and what to change."""
    if _WHOLE.fullmatch(text):
        if not 1 <= int(text) <= MAX_NODES:
            raise UsageError(
                f"Invalid value for '{option}': {text.strip()} is not possible; it must be a whole number from 1 to "
                f"{MAX_NODES:,}"
            )
        return int(text)
    counts = []
    for kind, value in _kind_values(option, text).items():
        match = _COUNT.fullmatch(value)
        if match is None:
            raise UsageError(
                f"{option} {shown(f'{kind}:{value}')}: write KIND:NODES or KIND:NODESxDEVICES, as in A40:16x4"
            )
        devices = int(match[2]) if match[2] else None
        if not 1 <= int(match[1]) <= MAX_NODES or (devices is not None and not 1 <= devices <= MAX_DEVICES):
            raise UsageError(
                f"{option} {kind}:{value} is not possible; a kind has 1 to {MAX_NODES:,} nodes of 1 to {MAX_DEVICES} "
                "devices"
            )
        counts.append(KindCount(kind=kind, num_nodes=int(match[1]), devices_per_node=devices))
    if len(counts) > MAX_KINDS:
        raise UsageError(f"{option} names {len(counts)} kinds; there may be {MAX_KINDS}")
    return tuple(counts)


def parse_local(text: str) -> int | tuple[KindCount, ...]:
    """Read a number of virtual nodes, or one for each kind. Raises UsageError."""
    # The limit of a bare number depends on the machine, so the caller checks it.
    return int(text) if _WHOLE.fullmatch(text) else parse_nodes(text, "--local")


def parse_prices(text: str, kinds: Collection[str]) -> dict[str, float]:
    """Read the price of a node of each kind for an hour."""
    prices = {}
    for kind, value in _of_kinds("--prices", text, kinds).items():
        try:
            prices[kind] = float(value)
        except ValueError:
            # This is out of the bounds below.
            prices[kind] = -1.0
        if not 0 < prices[kind] <= _MOST_PRICE:
            raise UsageError(
                f"--prices {kind}:{value} is not possible; it must be a number above 0, {_MOST_PRICE:,g} at most"
            )
    return prices


def parse_profiles(text: str, kinds: Collection[str]) -> dict[str, Path]:
    return {kind: Path(value) for kind, value in _of_kinds("--profiles", text, kinds).items()}


def _kind_values(option: str, text: str) -> dict[str, str]:
    """Read KIND:VALUE,KIND:VALUE,… in its order."""
    values: dict[str, str] = {}
    for part in text.split(","):
        kind, _, value = part.strip().partition(":")
        if not value or not _is_name(kind):
            raise UsageError(f"{option} {shown(part)} is not KIND:VALUE; separate them by commas, as in A100:16,A40:16")
        if kind in values:
            raise UsageError(f"{option} names {kind} twice; name each kind once")
        values[kind] = value
    return values


def _is_name(kind: str) -> bool:
    try:
        check_kind_name(kind)
    except ConfigError:
        return False
    return True


def _of_kinds(option: str, text: str, kinds: Collection[str]) -> dict[str, str]:
    values = _kind_values(option, text)
    for kind in values:
        if kind not in kinds:
            raise UsageError(f"{option} names {kind}, which --nodes does not; {did_you_mean(kind, kinds)}")
    if missing := [kind for kind in kinds if kind not in values]:
        raise UsageError(f"{option} leaves {missing[0]} out; name each kind of --nodes")
    return values
