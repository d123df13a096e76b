"""The layers that a virtual worker holds: of each, the history of what was applied to it.

Losses and tensors have no part in the protocol. What must never happen to a layer raises `Violation` on the spot.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from oobleck.control.protocol import CommitRecord, SectionRecord
from oobleck.planner import WorkerId

from .fabric import Violation


@dataclass(frozen=True, slots=True)
class Version:
    """The state of a layer, as far as the protocol can tell: what was applied to its initial values."""

    step: int
    generation: int
    """Of the commit of that step."""
    digest: int
    """Equal for equal histories."""
    partial: tuple[int, ...] = ()
    """The microbatches whose gradients are committed beside it, sorted."""

    def with_section(self, microbatches: Sequence[int], record: SectionRecord) -> Version:
        """The version after one more section of the step in flight."""
        digest = hash((self.digest, record.step, record.generation, record.number))
        return Version(self.step, self.generation, digest, tuple(sorted((*self.partial, *microbatches))))

    def then(self, record: CommitRecord) -> Version:
        """The version after one more step."""
        return Version(record.step, record.generation, hash((self.digest, record.step, record.generation)))


INITIAL = Version(0, 0, 0)


class HeldLayers:
    """The layers of one worker, and those of the plan before that it keeps until all have adopted."""

    def __init__(self, worker_id: WorkerId, *, num_microbatches: int) -> None:
        """`num_microbatches` make a whole step."""
        self.held: dict[int, Version] = {}
        self.kept: dict[int, Version] = {}
        self._worker_id = worker_id
        self._whole = tuple(range(num_microbatches))

    def digests(self, layers: Sequence[int]) -> tuple[int, ...]:
        return tuple(self.held[layer].digest for layer in layers)

    def fold(self, summed: Mapping[int, tuple[int, ...]], record: SectionRecord) -> None:
        """Put a section's sums to those of the layers: all workers are under the new plan then."""
        newer: dict[tuple[int, int], Version] = {}
        for layer, version in self.held.items():
            key = version.digest, id(summed[layer])  # layers of a bucket share their sum
            if key not in newer:
                newer[key] = version.with_section(summed[layer], record)
            self.held[layer] = newer[key]
        self.kept = {}

    def apply(self, summed: Mapping[int, tuple[int, ...]], record: CommitRecord) -> None:
        """Apply a step, of which these microbatches were summed for each layer beside what is committed."""
        newer: dict[tuple[int, int], Version] = {}
        for layer, version in self.held.items():
            key = version.digest, id(summed[layer])  # layers of a bucket share their sum
            if key not in newer:
                self._check_sum(record.step, layer, version.partial, summed[layer])
                newer[key] = version.then(record)
            self.held[layer] = newer[key]
        self.kept = {}

    def _check_sum(self, step: int, layer: int, partial: tuple[int, ...], summed: tuple[int, ...]) -> None:
        if summed != self._whole and tuple(sorted((*partial, *summed))) != self._whole:
            what = f"{summed} beside {partial}" if partial else f"{summed}"
            raise Violation(f"step {step}: layer {layer} on {self._worker_id} sums microbatches {what}")

    def state(self, layer: int) -> Version:
        """What is sent of a layer to the worker that is to hold it."""
        if layer not in self.held and layer not in self.kept:
            raise Violation(f"{self._worker_id} is to send layer {layer}, which it does not hold")
        return self.kept[layer] if layer in self.kept else self.held[layer]

    def states(self, layers: Iterable[int]) -> dict[int, Version]:
        return {layer: self.state(layer) for layer in layers}

    def adopt(
        self, wanted: Collection[int], received: dict[int, Version], keeping: dict[int, Version], *, initial: bool
    ) -> None:
        """Hold the layers of a plan, with what was received, and keep others; `initial` ones begin again."""
        if initial:
            self.held = dict.fromkeys(wanted, INITIAL)
        else:
            before = self.held | self.kept | received
            missing = [layer for layer in wanted if layer not in before]
            if missing:
                raise Violation(f"{self._worker_id} adopts layers {missing}, which no worker sent")
            self.held = {layer: before[layer] for layer in wanted}
        self.kept = keeping
