"""The geometry of torch's DTensor without torch: which piece of a sharded tensor a rank has.

Ranks form a mesh, in order. Along each mesh dimension a tensor is replicated, or cut along one of its own dimensions
like `torch.chunk`: into pieces of ceil(n / parts), of which the last may be shorter or empty.
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
        """Return its slices of a box that contains it."""
        places = zip(self.starts, self.sizes, other.starts, strict=True)
        return tuple(slice(start - origin, start - origin + size) for start, size, origin in places)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """How tensors are distributed over the ranks of a mesh."""

    device: str
    """The mesh's device type, in torch's terms."""
    mesh: tuple[int, ...]
    names: tuple[str, ...] = ()
    cut: tuple[int, ...]
    """The tensor's dimension that each mesh dimension cuts, or -1 if it replicates the tensor."""
    is_late: tuple[bool, ...] = ()
    """Whether a mesh dimension cuts only after all that are not late, as FSDP2 does beside tensor parallelism; empty
    if none is."""

    def __post_init__(self) -> None:
        is_known = len(self.cut) == len(self.mesh) and all(
            len(each) in (0, len(self.mesh)) for each in (self.names, self.is_late)
        )
        if not is_known or not all(1 <= size <= _MOST_RANKS for size in self.mesh) or min(self.cut, default=0) < -1:
            raise CorruptCheckpoint(f"a mesh of {self.mesh} with the names {self.names}, cut along {self.cut}")

    def place(self, rank: int) -> tuple[int, ...]:
        places = []
        for size in reversed(self.mesh):
            rank, place = divmod(rank, size)
            places.append(place)
        return tuple(reversed(places))

    def piece(self, rank: int) -> tuple[int, ...]:
        """Return the key of a rank's piece, which replicas share."""
        return tuple(place for place, cut in zip(self.place(rank), self.cut, strict=True) if cut >= 0)

    def box(self, rank: int, shape: tuple[int, ...]) -> Box:
        starts, sizes = [0] * len(shape), list(shape)
        # Several mesh dimensions may cut one dimension of the tensor: each cuts the piece that the one before left.
        are_late = self.is_late or (False,) * len(self.mesh)
        cuts = zip(are_late, self.place(rank), self.mesh, self.cut, strict=True)
        for _, place, parts, cut in sorted(cuts, key=lambda each: each[0]):
            if cut >= 0:
                chunk = -(-sizes[cut] // parts)
                skipped = min(place * chunk, sizes[cut])
                starts[cut] += skipped
                sizes[cut] = min(chunk, sizes[cut] - skipped)
        return Box(tuple(starts), tuple(sizes))


def is_covered(sharding: Sharding, ranks: Iterable[int]) -> bool:
    """Whether these ranks together have all pieces."""
    num_pieces = math.prod(size for size, cut in zip(sharding.mesh, sharding.cut, strict=True) if cut >= 0)
    return len({sharding.piece(rank) for rank in ranks}) == num_pieces


def resharded(sharding: Sharding, world_size: int) -> Sharding:
    """Distribute the same tensors over another number of ranks. Raises UsageError if the mesh is ambiguous."""
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
    """Return the intersection of two boxes; None if it is empty."""
    starts = tuple(map(max, one.starts, other.starts))
    stops = (min(a + b, c + d) for a, b, c, d in zip(one.starts, one.sizes, other.starts, other.sizes, strict=True))
    sizes = tuple(stop - start for start, stop in zip(starts, stops, strict=True))
    return Box(starts, sizes) if all(size > 0 for size in sizes) else None
