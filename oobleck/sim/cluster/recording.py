"""Coordinators in a simulation, which keep their decisions and may freeze with the master's process."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from oobleck.control.events import Command, Event
from oobleck.control.nodes import BaseCoordinator
from oobleck.control.scripts import RanksCoordinator
from oobleck.control.training import Coordinator


@dataclass(frozen=True, slots=True)
class Decided:
    """An event of the coordinator, and the commands that it answered with."""

    now_s: float
    event: Event | None
    """None for a deadline, or the start."""
    commands: tuple[Command, ...]


class Recording(BaseCoordinator):
    """Keeps its events and commands. While its process is frozen, events wait in `unread`."""

    decisions: list[Decided] | None = None
    frozen_until_s = 0.0
    unread: deque[Event]

    def start(self, now_s: float) -> list[Command]:
        self.unread = deque()
        return self._keep(now_s, None, super().start(now_s))

    def handle(self, now_s: float, event: Event) -> list[Command]:
        if now_s < self.frozen_until_s:
            self.unread.append(event)
            return []
        return [*self._thaw(now_s), *self._keep(now_s, event, super().handle(now_s, event))]

    def handle_deadline(self, now_s: float) -> list[Command]:
        if now_s < self.frozen_until_s:
            return []
        if self.frozen_until_s:
            return self._thaw(now_s)
        return self._keep(now_s, None, super().handle_deadline(now_s))

    def next_deadline(self) -> float:
        return self.frozen_until_s or super().next_deadline()

    def _thaw(self, now_s: float) -> list[Command]:
        if not self.frozen_until_s:
            return []
        self.frozen_until_s = 0.0
        # Overdue deadlines before any unread event: the worst order possible.
        commands = self._keep(now_s, None, super().handle_deadline(now_s))
        while self.unread:
            event = self.unread.popleft()
            commands += self._keep(now_s, event, super().handle(now_s, event))
        return commands

    def _keep(self, now_s: float, event: Event | None, commands: list[Command]) -> list[Command]:
        if self.decisions is not None:
            self.decisions.append(Decided(now_s, event, tuple(commands)))
        return commands


class TrainingCoordinator(Recording, Coordinator):
    """The coordinator of a job."""


class ScriptsCoordinator(Recording, RanksCoordinator):
    """The coordinator of a script's ranks."""
