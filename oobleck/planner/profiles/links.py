"""The speed of a link, fitted to the seconds of messages of several sizes."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from oobleck.errors import ConfigError, shown
from oobleck.json_table import JsonTable, parse_json

LINKS = ("inter_node", "intra_node")
LINKS_IN_WORDS = {"inter_node": "between nodes", "intra_node": "between the devices of a node"}

# A fit has this result where the times do not grow with the size.
_MOST_BYTES_PER_S = 1e15


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSpeed:
    """A message of n bytes takes `latency_s + n / bytes_per_s`."""

    bytes_per_s: float
    latency_s: float

    def message_s(self, num_bytes: float) -> float:
        return self.latency_s + num_bytes / self.bytes_per_s

    def __str__(self) -> str:
        return f"{self.bytes_per_s / 1e9:.3g} GB/s, {self.latency_s * 1e6:.3g} µs"


def fit_link(seconds: Mapping[int, float]) -> LinkSpeed:
    """Fit a link to the seconds, above 0, of messages by their bytes, of at least two sizes.

    Where the fitted latency is below 0, it is 0, and the largest message gives the rate.
    """
    assert len(seconds) > 1, "a line needs two points"
    # Least squares of the relative error: the absolute one depends on the largest message alone, the latency on chance.
    points = sorted(seconds.items())
    rise = run = 0.0
    for (size, time_s), (larger, later_s) in combinations(points, 2):
        weight = (time_s * later_s) ** -2.0
        rise += weight * (larger - size) * (later_s - time_s)
        run += weight * (larger - size) ** 2
    slope = rise / run
    weights = [time_s**-2.0 for _, time_s in points]
    offsets = [time_s - slope * size for size, time_s in points]
    latency_s = sum(weight * offset for weight, offset in zip(weights, offsets, strict=True)) / sum(weights)
    if slope <= 0:
        return LinkSpeed(bytes_per_s=_MOST_BYTES_PER_S, latency_s=min(seconds.values()))
    if latency_s < 0:
        size, time_s = points[-1]
        latency_s, slope = 0.0, time_s / size
    return LinkSpeed(bytes_per_s=min(1 / slope, _MOST_BYTES_PER_S), latency_s=latency_s)


def median_link(links: Sequence[LinkSpeed]) -> LinkSpeed:
    """Return the median rate and the median latency of links; of two, the slower."""
    assert links
    return LinkSpeed(
        bytes_per_s=statistics.median_low(link.bytes_per_s for link in links),
        latency_s=statistics.median_high(link.latency_s for link in links),
    )


def link_to_json(link: str, speed: LinkSpeed) -> str:
    """Return a speed of one of `LINKS` as the text of a file; `link_from_json` is the inverse."""
    return json.dumps({"link": link, "bytes_per_s": speed.bytes_per_s, "latency_s": speed.latency_s}) + "\n"


def link_from_json(text: str) -> tuple[str, LinkSpeed]:
    """Read the text of a file from `link_to_json`. Raises ConfigError."""
    table = JsonTable(parse_json(text), "the file")
    table.check_keys(("link", "bytes_per_s", "latency_s"))
    if (link := table.text("link")) not in LINKS:
        raise ConfigError(f"link is {shown(link)}; it must be of {', '.join(LINKS)}")
    return link, LinkSpeed(bytes_per_s=table.number("bytes_per_s"), latency_s=table.number("latency_s"))
