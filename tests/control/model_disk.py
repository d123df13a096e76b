"""What the model's agents keep of saves: states in memory, and what of them is written, one task after the other."""

from __future__ import annotations

from collections import deque
from typing import assert_never

from oobleck.control.protocol import (
    AgentMessage,
    CheckpointCommitted,
    CommitCheckpoint,
    LayersPersisted,
    PersistState,
    RemoveOld,
    RemoveUnfinished,
    Shard,
    StateSaved,
)

__all__ = ["Task", "VirtualDisk"]

Task = StateSaved | PersistState | CommitCheckpoint | RemoveOld | RemoveUnfinished


class VirtualDisk:
    """One node's memory and disk; both outlive its workers."""

    def __init__(self) -> None:
        self.tasks: deque[Task] = deque()
        self.checkpoints: set[str] = set()
        """The names of those with a manifest."""
        self.reports: dict[str, list[AgentMessage]] = {}
        """By save, what the agent tells every master that it meets."""
        self._in_memory: list[StateSaved] = []

    def take(self, task: Task) -> None:
        """Have something done; a state that is saved is in memory from now on."""
        if isinstance(task, StateSaved):
            self._in_memory.append(task)
            self.reports.setdefault(task.state.name, []).append(task)
        elif isinstance(task, RemoveUnfinished):
            for name in task.names:
                self.reports.pop(name, None)
        elif isinstance(task, PersistState):
            self.reports.setdefault(task.name, [])
        self.tasks.append(task)

    def work(self) -> AgentMessage | None:
        """Do the next task; returns what the agent says of it."""
        match self.tasks.popleft():
            case StateSaved() as saved:
                return self._persisted(saved.state.name, [saved])
            case PersistState(name=name):
                return self._persisted(name, [saved for saved in self._in_memory if saved.state.name == name])
            case CommitCheckpoint(manifest=manifest):
                self.checkpoints.add(manifest.name)
                return CheckpointCommitted(name=manifest.name)
            case RemoveOld() | RemoveUnfinished():
                return None
            case task:
                assert_never(task)

    def _persisted(self, name: str, parts: list[StateSaved]) -> LayersPersisted:
        layers = sorted({layer for part in parts for layer in part.layers})
        shards = tuple(Shard(layer=layer, file=f"layer-{layer}", size_bytes=1, sha256="") for layer in layers)
        written = LayersPersisted(device=0, name=name, shards=shards, duration_s=0.0)
        if name in self.reports:  # else it was given up meanwhile
            self.reports[name].append(written)
        return written
