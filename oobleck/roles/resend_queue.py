"""What an agent has to say, until a master has surely heard it.

A master that is killed takes with it what it had received and not yet acted on. So an agent keeps what it said until
a heartbeat that was said after it is answered, and says it again to the next master. A heartbeat that nothing depends
on asks for no answer: where all is well, most do not. What is only of use while it is new is never said again, and
waits for the next message to go along with: a tunnel's packets cost the master more than what is in them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import trio

from oobleck.control import protocol

_OFFERS_WAITING = 32
_ALIVE = protocol.Heartbeat(sequence=None)

Outgoing = protocol.AgentMessage | protocol.RelaySaid | protocol.RelayHeard
"""What an agent says: its own, and what others say through it."""


_PASSING = (protocol.Pace, protocol.RankOutput, protocol.RelaySaid, protocol.RelayHeard)
_ONCE = (protocol.Heartbeat, protocol.Pace, protocol.RelaySaid, protocol.RelayHeard)
"""Of no use to a later master, said or not."""


class ResendQueue:
    """Messages in order; the oldest are dropped when a master is away for too long."""

    def __init__(self, *, limit: int) -> None:
        self._unsaid: deque[Outgoing] = deque(maxlen=limit)
        self._unheard: deque[Outgoing] = deque(maxlen=limit)
        """Said, heartbeats that ask among them, and not known to be heard."""
        self._is_pressing = False  # something unsaid is not only to go along with the next message
        self._sequence = 0
        self._is_sent = False  # what was taken last is on its way
        self._added, self._sent = trio.lowlevel.ParkingLot(), trio.lowlevel.ParkingLot()
        """Who waits for messages to be said, or for all to be."""

    def add(self, message: protocol.AgentMessage) -> None:
        """Have a message said."""
        self._unsaid.append(message)
        self._is_pressing = True
        self._is_sent = False
        self._added.unpark_all()

    def add_in_passing(self, message: protocol.Pace) -> None:
        """Have a message said along with the next one, and never again."""
        self._unsaid.append(message)

    def offer(self, message: protocol.RankOutput) -> bool:
        """Have a message said once; False where too much waits to be said: it is to be offered again later."""
        if len(self._unsaid) >= _OFFERS_WAITING:
            return False
        self._unsaid.append(message)
        self._is_sent = False
        self.wake()
        return True

    def pass_on(self, messages: Iterable[protocol.RelaySaid | protocol.RelayHeard]) -> None:
        """Have said what others say through this agent. They keep it themselves, and say it again."""
        self._unsaid.extend(messages)
        self.wake()

    def wake(self) -> None:
        """Have `wait` return: what speaks has something else to look at."""
        self._is_pressing = True
        self._added.unpark_all()

    def beat(self, *, asks: bool = False) -> None:
        """Have a heartbeat said. It is to be answered if it `asks`, or if something before it may not be heard."""
        if asks or self._unheard or not all(isinstance(message, _PASSING) for message in self._unsaid):
            self.add(protocol.Heartbeat(sequence=self._sequence))
            self._sequence += 1
        else:
            self.add(_ALIVE)

    def heard(self, sequence: int | None) -> None:
        """Forget what was said up to the heartbeat of this number."""
        if protocol.Heartbeat(sequence=sequence) in self._unheard:
            while self._unheard.popleft() != protocol.Heartbeat(sequence=sequence):
                pass

    def forget_news(self, news: str) -> None:
        """Forget what the master knows from others: see `news_in`."""
        for message in [message for message in self._unheard if protocol.news_in(message) == news]:
            self._unheard.remove(message)

    def repeat_unheard(self, also: Iterable[protocol.AgentMessage] = ()) -> None:
        """Have everything said that no master has surely heard; heartbeats were for the one before.

        What is to be said `also` comes first, unless it is among the rest.
        """
        unheard = [message for message in (*self._unheard, *self._unsaid) if not isinstance(message, _ONCE)]
        waiting = [*(message for message in also if message not in unheard), *unheard]
        self._unheard.clear()
        self._unsaid.clear()
        self._unsaid.extend(waiting)
        self._is_pressing = bool(waiting)
        self._added.unpark_all()

    async def wait(self) -> None:
        """Wait until there is something to be said."""
        while not self._is_pressing:
            await self._added.park()

    def take(self) -> list[Outgoing]:
        """Return all that there is to be said. It counts as said."""
        said = list(self._unsaid)
        self._unsaid.clear()
        self._is_pressing = False
        self._unheard.extend(message for message in said if message is not _ALIVE and not isinstance(message, _PASSING))
        return said

    def note_sent(self) -> None:
        """What `take` returned is on its way."""
        if not self._is_pressing:
            self._is_sent = True
            self._sent.unpark_all()

    async def all_said(self) -> None:
        """Wait until everything is on its way to a master."""
        while self._is_pressing or not self._is_sent:
            await self._sent.park()
