"""What a committee agrees on, over links between workers: sends the letters that `control.steps.Agreements` returns.

The thread that reads the links forwards the messages of other workers, so a commit passes through a worker whose
training thread computes. Only this worker's own part waits for that thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from oobleck.control.protocol import CommitMessage, Subject, Totals
from oobleck.control.steps import Agreements, Committee, Letter, PeerLost
from oobleck.planner import WorkerId

from .waiter import Waiter


class PeerAgreements:
    """This worker's part in agreements, and its waits for them."""

    def __init__(self, worker_id: WorkerId, waiter: Waiter, send: Callable[[WorkerId, CommitMessage], None]) -> None:
        """`send` sends a message to another worker. It must not block, and may raise PeerLost."""
        self._agreements = Agreements(worker_id, lock=threading.Lock())
        self._waiter = waiter
        self._send = send
        self._lock = threading.Lock()
        self._lost: frozenset[WorkerId] = frozenset()  # peers whose links have ended since the newest `join`

    # --- the thread that reads the links ---------------------------------------------------------------------

    def hear(self, source: WorkerId, message: CommitMessage) -> None:
        """Take another worker's message, and send what follows from it. Never blocks."""
        self._carry(self._agreements.receive(source, message))
        self._waiter.announce()

    def note_lost(self, worker_id: WorkerId) -> None:
        """Note that messages from or to another worker may be lost, so waiting for it is futile."""
        with self._lock:
            self._lost |= {worker_id}
        self._waiter.announce()

    # --- the training thread ---------------------------------------------------------------------------------

    def join(self, committee: Committee) -> None:
        """Take part in a committee, and disregard peers that were lost before."""
        # Found here and kept, while groups form, since this takes O(N).
        self._agreements.neighbours(committee)
        with self._lock:
            self._lost = frozenset()

    def bring(self, committee: Committee, subject: Subject, part: Totals) -> None:
        self._carry(self._agreements.post(committee, subject, part))

    def is_done(self, committee: Committee, subject: Subject) -> bool:
        """Return whether `wait` would not block: all parts are summed, or a peer is lost that has to send one."""
        return self._agreements.is_here(committee, subject) or self._failed(committee, subject) is not None

    def others(self, committee: Committee) -> tuple[WorkerId, ...]:
        """Return the workers whose messages this one waits for."""
        neighbours = self._agreements.neighbours(committee)
        parent = () if neighbours.parent is None else (neighbours.parent,)
        return (*neighbours.children, *parent)

    def wait(self, committee: Committee, subject: Subject, interrupted: Callable[[], bool]) -> Totals:
        """Wait for the total of all parts. Raises Interrupted or PeerLost."""
        self._waiter.wait(lambda: self.is_done(committee, subject), interrupted, self.others(committee))
        # A total is used even if a peer is lost meanwhile: its holder knows that all parts were posted.
        total = self._agreements.take(committee, subject)
        if total is None:
            failed = self._failed(committee, subject)
            raise PeerLost(f"the link to {failed} has ended, which has to agree on {subject.topic} {subject.step}")
        return total

    def total(self, committee: Committee, subject: Subject, part: Totals, interrupted: Callable[[], bool]) -> Totals:
        """Contribute a part, and wait for the total. Raises Interrupted or PeerLost."""
        self.bring(committee, subject, part)
        return self.wait(committee, subject, interrupted)

    def _failed(self, committee: Committee, subject: Subject) -> WorkerId | None:
        """Return a lost peer that has to send something next, if any."""
        lost = self._lost  # replaced as a whole, so that reading it needs no lock
        awaited = self._agreements.awaited(committee, subject) if lost else ()
        return next((worker_id for worker_id in awaited if worker_id in lost), None)

    def _carry(self, letters: tuple[Letter, ...]) -> None:
        for letter in letters:
            try:
                self._send(letter.target, letter.message)
            except PeerLost:
                # Not raised: the thread that reads the links comes here too, for agreements of other workers.
                self.note_lost(letter.target)
