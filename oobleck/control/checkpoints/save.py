"""One save under way: what is in memory of it, what is on disk, and who has its manifest."""

from __future__ import annotations

from dataclasses import dataclass, field

from oobleck.control.protocol import DataPosition, Shard
from oobleck.planner import WorkerId


@dataclass(slots=True)
class Save:
    """A save under way."""

    name: str
    step: int
    generation: int
    began_s: float
    saved_at: str = ""
    position: DataPosition | None = None
    savers: dict[WorkerId, tuple[int, ...]] = field(default_factory=dict)
    """Whose shares are whole in memory, and which layers these are."""
    shards: dict[tuple[int, int], Shard] = field(default_factory=dict)
    """By layer and part: devices that share a stage save a part each."""
    pause_s: float = 0.0
    copy_s: float = 0.0
    is_committing: bool = False
    asked: set[str] = field(default_factory=set)
    """The nodes that were told to write the manifest, and may still do so."""
    replaced: tuple[str, ...] = ()
    """Checkpoints that are too old once this one is complete."""
    committed: set[str] = field(default_factory=set)
    """The nodes whose disk has it."""

    def is_in_memory(self, num_layers: int, *, num_parts: int) -> bool:
        parts = {(layer, worker_id.device % num_parts) for worker_id, layers in self.savers.items() for layer in layers}
        return len(parts) == num_layers * num_parts

    def is_written(self, num_layers: int, *, num_parts: int) -> bool:
        return len(self.shards) == num_layers * num_parts

    @property
    def is_committed(self) -> bool:
        """Whether all that wrote layers, and are still there, have the manifest: each may have a disk of its own."""
        writers = {worker_id.node for worker_id in self.savers}
        return bool(self.committed) and writers & self.asked <= self.committed

    def unwritten(self, worker_id: WorkerId, *, num_parts: int) -> tuple[int, ...]:
        part = worker_id.device % num_parts
        return tuple(layer for layer in self.savers.get(worker_id, ()) if (layer, part) not in self.shards)
