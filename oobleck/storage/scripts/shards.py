"""Where the piece of a sharded tensor lies that a rank has: the geometry of torch's DTensor, without torch.

Ranks stand in a mesh, in order. Along each of its dimensions a tensor is replicated, or cut along one of its own
dimensions as `torch.chunk` cuts: pieces of ceil(n / parts), the last ones shorter or empty.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from oobleck.errors import CorruptCheckpoint, UsageError

_MOST_RANKS = 1 << 24


@dataclass(frozen=True, slots=True)
class Box:
    """A part of a tensor: `sizes[d]` elements from `starts[d]` on, in each dimension."""

    starts: tuple[int, ...]
    sizes: tuple[int, ...]

    def within(self, other: Box) -> tuple[slice, ...]:
        """Where it lies in a box that it is part of."""
        places = zip(self.starts, self.sizes, other.starts, strict=True)
        return tuple(slice(start - origin, start - origin + size) for start, size, origin in places)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """How tensors lie on the ranks of a mesh."""

    device: str
    """The mesh's, as torch calls its type."""
    mesh: tuple[int, ...]
    names: tuple[str, ...] = ()
    """Of the mesh's dimensions, if they have any."""
    cut: tuple[int, ...]
    """By dimension of the mesh: the tensor's dimension that is cut along it, or -1 where it is replicated."""

    def __post_init__(self) -> None:
        is_known = len(self.cut) == len(self.mesh) and len(self.names) in (0, len(self.mesh))
        if not is_known or not all(1 <= size <= _MOST_RANKS for size in self.mesh) or min(self.cut, default=0) < -1:
            raise CorruptCheckpoint(f"a mesh of {self.mesh} with the names {self.names}, cut along {self.cut}")

    def place(self, rank: int) -> tuple[int, ...]:
        """A rank's coordinates in the mesh."""
        places = []
        for size in reversed(self.mesh):
            rank, place = divmod(rank, size)
            places.append(place)
        return tuple(reversed(places))

    def piece(self, rank: int) -> tuple[int, ...]:
        """Which piece a rank has: the same for those that are replicas of each other."""
        return tuple(place for place, cut in zip(self.place(rank), self.cut, strict=True) if cut >= 0)

    def box(self, rank: int, shape: tuple[int, ...]) -> Box:
        """The part of a tensor of this shape that a rank has."""
        starts, sizes = [0] * len(shape), list(shape)
        for place, parts, cut in zip(self.place(rank), self.mesh, self.cut, strict=True):
            if cut >= 0:
                chunk = -(-sizes[cut] // parts)
                skipped = min(place * chunk, sizes[cut])
                starts[cut] += skipped
                sizes[cut] = min(chunk, sizes[cut] - skipped)
        return Box(tuple(starts), tuple(sizes))


def is_covered(sharding: Sharding, ranks: Iterable[int]) -> bool:
    """Whether these ranks together have all pieces."""
    wanted = math.prod(size for size, cut in zip(sharding.mesh, sharding.cut, strict=True) if cut >= 0)
    return len({sharding.piece(rank) for rank in ranks}) == wanted


def resharded(sharding: Sharding, world_size: int) -> Sharding:
    """How the same tensors lie on another number of ranks. Raises UsageError where that cannot be known."""
    if math.prod(sharding.mesh) == world_size:
        return sharding
    if len(sharding.mesh) != 1:
        was = "x".join(map(str, sharding.mesh))
        raise UsageError(
            f"the saved state is sharded over a mesh of {was} ranks, and there are {world_size}: how they should be "
            "arranged is not known; use as many ranks again, or a mesh of one dimension"
        )
    return Sharding(device=sharding.device, mesh=(world_size,), names=sharding.names, cut=sharding.cut)


def overlap(one: Box, other: Box) -> Box | None:
    """What two boxes share; None for nothing."""
    starts = tuple(map(max, one.starts, other.starts))
    stops = (min(a + b, c + d) for a, b, c, d in zip(one.starts, one.sizes, other.starts, other.sizes, strict=True))
    sizes = tuple(stop - start for start, stop in zip(starts, stops, strict=True))
    return Box(starts, sizes) if all(size > 0 for size in sizes) else None
