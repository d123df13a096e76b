"""An agent's messages, until a master has surely processed them.

A master that is killed loses messages that it had received and not yet processed. So an agent keeps each message until
the master answers a later heartbeat, and repeats it to the next master. A heartbeat on which nothing depends asks for
no answer, as most do. A message that is only useful while it is new is never repeated, and waits to be sent with the
next one: a tunnel's packets cost the master more than their contents.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import trio

from oobleck.control import protocol

_OFFERS_WAITING = 32
_ALIVE = protocol.Heartbeat(sequence=None)

Outgoing = protocol.AgentMessage | protocol.RelaySaid | protocol.RelayHeard
"""An agent's own messages, and those of others through it."""

_PASSING = (protocol.Pace, protocol.NodeUse, protocol.RankOutput, protocol.RelaySaid, protocol.RelayHeard)
_ONCE = (protocol.Heartbeat, protocol.Pace, protocol.NodeUse, protocol.RelaySaid, protocol.RelayHeard)
"""Useless to a later master, sent or not."""


class ResendQueue:
    """Messages in order; the oldest are dropped when a master is away for too long."""

    def __init__(self, *, limit: int) -> None:
        self._unsaid: deque[Outgoing] = deque(maxlen=limit)
        self._unheard: deque[Outgoing] = deque(maxlen=limit)
        """Sent but not answered, heartbeats that ask included."""
        self._is_pressing = False  # whether an unsent message must not wait for another one
        self._sequence = 0
        self._is_sent = False  # whether the messages that were taken last are on their way
        self._added, self._sent = trio.lowlevel.ParkingLot(), trio.lowlevel.ParkingLot()

    def add(self, message: protocol.AgentMessage) -> None:
        self._unsaid.append(message)
        self._is_pressing = True
        self._is_sent = False
        self._added.unpark_all()

    def add_in_passing(self, message: protocol.Pace | protocol.NodeUse) -> None:
        """Queue a message that is sent with the next one, and never repeated."""
        self._unsaid.append(message)

    def offer(self, message: protocol.RankOutput) -> bool:
        """Queue a message that is never repeated; return False if too many wait, to be offered again later."""
        if len(self._unsaid) >= _OFFERS_WAITING:
            return False
        self._unsaid.append(message)
        self._is_sent = False
        self.wake()
        return True

    def pass_on(self, messages: Iterable[protocol.RelaySaid | protocol.RelayHeard]) -> None:
        """Queue messages of others through this agent, which keep and repeat them themselves."""
        self._unsaid.extend(messages)
        self.wake()

    def wake(self) -> None:
        """Have `wait` return, because the sender has something else to do."""
        self._is_pressing = True
        self._added.unpark_all()

    def beat(self, *, asks: bool = False) -> None:
        """Queue a heartbeat, to be answered if it `asks`, or if a message before it may be lost."""
        # An answer lets the queue forget what it keeps; without anything to forget, none is needed.
        if asks or self._unheard or not all(isinstance(message, _PASSING) for message in self._unsaid):
            self.add(protocol.Heartbeat(sequence=self._sequence))
            self._sequence += 1
        else:
            self.add(_ALIVE)

    def heard(self, sequence: int | None) -> None:
        """Forget the messages up to the heartbeat of this number."""
        # After `repeat_unheard` the heartbeat is gone, and a late answer to it forgets nothing.
        if protocol.Heartbeat(sequence=sequence) in self._unheard:
            while self._unheard.popleft() != protocol.Heartbeat(sequence=sequence):
                pass

    def forget_news(self, news: str) -> None:
        """Forget messages whose news the master has from others: see `news_in`."""
        for message in [message for message in self._unheard if protocol.news_in(message) == news]:
            self._unheard.remove(message)

    def repeat_unheard(self, also: Iterable[protocol.AgentMessage] = ()) -> None:
        """Queue all messages again that no master has surely processed, and before them those of `also`."""
        # Heartbeats were for the master before.
        unheard = [message for message in (*self._unheard, *self._unsaid) if not isinstance(message, _ONCE)]
        waiting = [*(message for message in also if message not in unheard), *unheard]
        self._unheard.clear()
        self._unsaid.clear()
        self._unsaid.extend(waiting)
        self._is_pressing = bool(waiting)
        self._added.unpark_all()

    async def wait(self) -> None:
        """Wait until there is something to send."""
        while not self._is_pressing:
            await self._added.park()

    def take(self) -> list[Outgoing]:
        """Return all queued messages, which count as sent."""
        taken = list(self._unsaid)
        self._unsaid.clear()
        self._is_pressing = False
        self._unheard.extend(
            message for message in taken if message is not _ALIVE and not isinstance(message, _PASSING)
        )
        return taken

    def note_sent(self) -> None:
        """Note that the messages of `take` are on their way."""
        # A message that was added while these were sent is not on its way yet.
        if not self._is_pressing:
            self._is_sent = True
            self._sent.unpark_all()

    async def all_said(self) -> None:
        """Wait until all messages are on their way to a master."""
        while self._is_pressing or not self._is_sent:
            await self._sent.park()
