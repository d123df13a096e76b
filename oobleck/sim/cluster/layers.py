"""The layers that a virtual worker holds, each as the history of the steps applied to it.

Losses and tensors have no part in the protocol. What must never happen to a layer raises `Violation` on the spot.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from oobleck.control.protocol import CommitRecord, SectionRecord
from oobleck.planner import WorkerId

from .fabric import Violation


@dataclass(frozen=True, slots=True)
class Version:
    """The state of a layer, as far as the protocol can tell."""

    step: int
    generation: int
    """The generation of that step's commit."""
    digest: int
    """Equal for equal histories."""
    partial: tuple[int, ...] = ()
    """The sorted microbatches of committed sections of the next step."""
    weights: int = 0
    """Equal for equal histories of steps: sections change what is summed, and no weights."""

    def with_section(self, microbatches: Sequence[int], record: SectionRecord) -> Version:
        """Return the version after one more section of the step in flight."""
        # Hashes of whole numbers are the same in every process.
        digest = hash((self.digest, record.step, record.generation, record.number))
        return replace(self, digest=digest, partial=tuple(sorted((*self.partial, *microbatches))))

    def then(self, record: CommitRecord) -> Version:
        digest = hash((self.digest, record.step, record.generation))
        return Version(record.step, record.generation, digest, weights=digest)


INITIAL = Version(0, 0, 0)


class HeldLayers:
    """The layers of one worker, with those of the previous plan that it keeps until all have adopted the new one."""

    def __init__(self, worker_id: WorkerId, *, num_microbatches: int) -> None:
        self.held: dict[int, Version] = {}
        self.kept: dict[int, Version] = {}
        self._worker_id = worker_id
        self._whole = tuple(range(num_microbatches))

    def digests(self, layers: Sequence[int]) -> tuple[int, ...]:
        return tuple(self.held[layer].digest for layer in layers)

    def weights(self) -> tuple[int, ...]:
        """Return what identifies the weights of each layer, in the order of layers."""
        return tuple(self.held[layer].weights for layer in sorted(self.held))

    def fold(self, summed: Mapping[int, tuple[int, ...]], record: SectionRecord) -> None:
        self._advance(summed, lambda layer, version: version.with_section(summed[layer], record))

    def apply(self, summed: Mapping[int, tuple[int, ...]], record: CommitRecord) -> None:
        """Apply a step with the microbatches that were summed for each layer, besides committed sections."""

        def advanced(layer: int, version: Version) -> Version:
            own, partial = summed[layer], version.partial
            if own != self._whole and tuple(sorted((*partial, *own))) != self._whole:
                what = f"{own} beside {partial}" if partial else f"{own}"
                raise Violation(f"step {record.step}: layer {layer} on {self._worker_id} sums microbatches {what}")
            return version.then(record)

        self._advance(summed, advanced)

    def _advance(self, summed: Mapping[int, tuple[int, ...]], advanced: Callable[[int, Version], Version]) -> None:
        newer: dict[tuple[int, int], Version] = {}
        for layer, version in self.held.items():
            key = version.digest, id(summed[layer])  # layers of a bucket share their sum
            if key not in newer:
                newer[key] = advanced(layer, version)
            self.held[layer] = newer[key]
        self.kept = {}  # a commit shows that all workers have adopted the plan

    def state(self, layer: int) -> Version:
        """Return the version of a layer to send to another worker."""
        if layer not in self.held and layer not in self.kept:
            raise Violation(f"{self._worker_id} is to send layer {layer}, which it does not hold")
        return self.kept[layer] if layer in self.kept else self.held[layer]

    def adopt(
        self, wanted: Collection[int], received: dict[int, Version], keeping: dict[int, Version], *, initial: bool
    ) -> None:
        """Hold the layers of a plan, with the received ones, and keep others; `initial` layers start over."""
        if initial:
            self.held = dict.fromkeys(wanted, INITIAL)
        else:
            before = self.held | self.kept | received
            missing = [layer for layer in wanted if layer not in before]
            if missing:
                raise Violation(f"{self._worker_id} adopts layers {missing}, which no worker sent")
            self.held = {layer: before[layer] for layer in wanted}
        self.kept = keeping
