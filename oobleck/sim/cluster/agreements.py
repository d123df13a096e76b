"""Agreements of a committee over virtual links: sends the messages of `control.steps.Agreements`."""

from __future__ import annotations

from collections.abc import Generator

from oobleck.control.protocol import CommitMessage, Subject, Totals
from oobleck.control.steps import Agreements, CommitState, Committee, Letter
from oobleck.planner import WorkerId

from .fabric import Wait
from .ports import WorkerPorts


class VirtualAgreements:
    def __init__(self, agreements: Agreements, commit_state: CommitState, ports: WorkerPorts) -> None:
        self._worker_id = commit_state.worker_id
        self._agreements = agreements
        self._commit_state = commit_state
        self._fabric, self._carry = ports.fabric, ports.carry

    def hear(self, source: WorkerId, message: CommitMessage) -> None:
        """Handle another worker's message, and send those that follow."""
        self._send(self._agreements.receive(source, message))

    def bring(self, committee: Committee, subject: Subject, part: Totals) -> None:
        self._fabric.bring(committee, subject, self._worker_id)
        self._send(self._agreements.post(committee, subject, part))

    def is_here(self, committee: Committee, subject: Subject) -> bool:
        return self._agreements.is_here(committee, subject)

    def arrival(self, committee: Committee, subject: Subject, *, takes_s: float = 0.0) -> Wait:
        """Return the wait for the total, which takes `takes_s` once it is here."""
        return Wait(
            f"all who agree on {subject.topic} {subject.step} of generation {committee.generation}",
            lambda: self.is_here(committee, subject),
            self._commit_state.is_fenced,
            lambda: self._lacks_a_sender(committee, subject),
            touches_network=len(committee.members) > 1,
            takes_s=takes_s,
        )

    def take(self, committee: Committee, subject: Subject) -> Totals:
        total = self._agreements.take(committee, subject)
        assert total is not None
        self._fabric.check_brought(committee, subject, self._worker_id)
        return total

    def total(
        self, committee: Committee, subject: Subject, part: Totals, *, takes_s: float = 0.0
    ) -> Generator[Wait, None, Totals]:
        self.bring(committee, subject, part)
        yield self.arrival(committee, subject, takes_s=takes_s)
        return self.take(committee, subject)

    def _lacks_a_sender(self, committee: Committee, subject: Subject) -> bool:
        """Return whether a worker has ended whose message is awaited."""
        awaited = self._agreements.awaited(committee, subject)
        return any(self._fabric.is_gone(worker_id, committee.generation) for worker_id in awaited)

    def _send(self, letters: tuple[Letter, ...]) -> None:
        for letter in letters:
            self._carry(letter.target, letter.message)
