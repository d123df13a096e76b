"""Nodes that failed before training began, told together: the same reason once, with all who gave it."""

from __future__ import annotations

from dataclasses import dataclass, field

from oobleck.exit_codes import ExitCode

__all__ = ["StartupFailures"]

_NAMES_SHOWN = 8


@dataclass(slots=True)
class StartupFailures:
    """What nodes could not start for."""

    num_nodes: int
    """Of the job."""
    _reasons: dict[str, str] = field(default_factory=dict)
    _is_user_error: dict[str, bool] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self._reasons)

    def note(self, node: str, reason: str, *, is_user_error: bool) -> None:
        """Note why a node failed; `is_user_error` when it is the job that must be changed, and not the node."""
        self._reasons[node] = reason
        self._is_user_error[node] = is_user_error

    @property
    def exit_code(self) -> int:
        """That of a bad configuration when nothing else went wrong."""
        return ExitCode.CONFIG if all(self._is_user_error.values()) else ExitCode.FAILED

    def __str__(self) -> str:
        nodes_of: dict[str, list[str]] = {}
        for node in sorted(self._reasons):
            nodes_of.setdefault(self._reasons[node], []).append(node)
        return "\n".join(("cannot start:", *(f"{self._named(nodes)}: {why}" for why, nodes in nodes_of.items())))

    def _named(self, nodes: list[str]) -> str:
        if len(nodes) == self.num_nodes > 1:
            return f"all {len(nodes)} nodes"
        if len(nodes) > _NAMES_SHOWN:
            return f"{', '.join(nodes[:_NAMES_SHOWN])} and {len(nodes) - _NAMES_SHOWN} more nodes"
        return ", ".join(nodes)
