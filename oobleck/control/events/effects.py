"""What the coordinator's parts have to say: commands, gathered in order while one event is handled."""

from __future__ import annotations

from oobleck.control.journal import JournalEntry, Notice
from oobleck.control.protocol import MasterMessage, WorkerCommand
from oobleck.planner import WorkerId

from .inputs import Command, PassOn, Record, Send, SendAll

__all__ = ["Effects", "RunOver"]


class RunOver(Exception):
    """There is no way on, or nothing left to do: the coordinator ends the run."""

    def __init__(self, exit_code: int, reason: str) -> None:
        super().__init__(reason)
        self.exit_code = int(exit_code)  # what journals and processes know
        self.reason = reason


class Effects:
    """Mutable: the commands so far, and the time of the event that they follow from."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._commands: list[Command] = []

    def command(self, *commands: Command) -> None:
        self._commands.extend(commands)

    def send(self, node: str, message: MasterMessage) -> None:
        self._commands.append(Send(node=node, message=message))

    def send_all(self, worker_ids: tuple[WorkerId, ...], message: WorkerCommand) -> None:
        """Send a message to many workers, to each for its own device."""
        self._commands.append(SendAll(worker_ids=worker_ids, message=message))

    def pass_on(self, nodes: tuple[str, ...], key: str, value: bytes) -> None:
        """Send a rendezvous key to nodes."""
        self._commands.append(PassOn(nodes=nodes, key=key, value=value))

    def record(self, entry: JournalEntry) -> None:
        self._commands.append(Record(entry=entry))

    def notice(self, level: str, text: str) -> None:
        """Have people told something."""
        self.record(Notice(t_s=self.now_s, level=level, text=text))

    def take(self) -> list[Command]:
        """Hand over all commands gathered since the last time."""
        commands, self._commands = self._commands, []
        return commands
