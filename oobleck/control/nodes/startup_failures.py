"""Nodes that failed before training began, reported together: the same reason once, with all who gave it."""

from __future__ import annotations

from dataclasses import dataclass, field

from oobleck.control.journal import Loss, WorkerEnded
from oobleck.errors import ExitCode

_NAMES_SHOWN = 8


@dataclass(slots=True)
class StartupFailures:
    """What nodes could not start for."""

    num_nodes: int
    """Of the job."""
    _losses: dict[str, Loss] = field(default_factory=dict)
    """By node."""

    def __bool__(self) -> bool:
        return bool(self._losses)

    def note(self, node: str, loss: Loss) -> None:
        """Note why a node failed."""
        self._losses[node] = loss

    @property
    def exit_code(self) -> int:
        """That of a bad configuration when nothing else went wrong."""
        is_users = all(isinstance(loss, WorkerEnded) and loss.is_users for loss in self._losses.values())
        return ExitCode.CONFIG if is_users else ExitCode.FAILED

    def __str__(self) -> str:
        nodes_of: dict[str, list[str]] = {}
        for node, loss in sorted(self._losses.items()):
            nodes_of.setdefault(loss.text, []).append(node)
        return "\n".join(("cannot start:", *(f"{self._named(nodes)}: {why}" for why, nodes in nodes_of.items())))

    def _named(self, nodes: list[str]) -> str:
        if len(nodes) == self.num_nodes > 1:
            return f"all {len(nodes)} nodes"
        if len(nodes) > _NAMES_SHOWN:
            return f"{', '.join(nodes[:_NAMES_SHOWN])} and {len(nodes) - _NAMES_SHOWN} more nodes"
        return ", ".join(nodes)
