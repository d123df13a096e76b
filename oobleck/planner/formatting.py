"""Numbers and names in sentences."""

from __future__ import annotations

from collections.abc import Collection, Iterable

_MOST_NAMES = 8


def counted(number: int, noun: str) -> str:
    """Return the number with its noun: "1 node", "3 nodes", "1,024 nodes"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def size_text(num_bytes: float) -> str:
    """Return a size in a sentence: "1000 bytes", "26.2 MB", "12.6 GB"."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.4g} {unit}"
    return f"{num_bytes:.0f} bytes"


def listed(parts: Iterable[str]) -> str:
    """Return the parts as a list in a sentence: "a, b and c"."""
    words = list(parts)
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def named(nodes: Collection[str]) -> str:
    """Return the nodes' names, sorted, or their number if there are many."""
    return ", ".join(sorted(nodes)) if len(nodes) <= _MOST_NAMES else counted(len(nodes), "node")
