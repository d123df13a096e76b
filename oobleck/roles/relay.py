"""The relay's side of a link between agents: it passes on the master's messages, and merges those of the agents.

It keeps nothing. Both ends repeat what is lost with it: see `way.py` and `control/relays/mail.py`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace

import trio

from oobleck.control import protocol
from oobleck.control.relaying import Gathering, child_towards, parent_of
from oobleck.errors import PeerError
from oobleck.job import ControlSpec
from oobleck.wire import FrameDecoder, encode_frame

from .agent_ports import RelayListener
from .channel import CLOSED, MessageChannel, close

ToRelay = protocol.FromAgent | protocol.RelayCall
FromRelay = protocol.Relayed | protocol.RelayBeat

_CALL_S = 10.0
_MAX_STRANGERS = 128  # callers that have not told their position yet; further ones wait
_UNSENT_LIMIT = 10_000  # messages queued for a child; a child that reads none of them is left to the master
_PASSES = 4
"""How often in an interval a relay reports who was heard, which limits the delay of each level of the tree."""
_BEATS = 8  # how often in a lease a relay's children hear it, at least


def beats_s(control: ControlSpec) -> float:
    """Return how often a relay sends something to its children, in seconds."""
    return min(control.heartbeat_interval_s, control.lease_s / _BEATS)


class _Child:
    """An agent that speaks through this one."""

    def __init__(self, channel: MessageChannel[FromRelay, ToRelay]) -> None:
        self.scope = trio.CancelScope()
        self._channel = channel
        self._post, self._outgoing = trio.open_memory_channel[FromRelay](_UNSENT_LIMIT)

    def post(self, message: FromRelay) -> None:
        try:
            self._post.send_nowait(message)
        except trio.WouldBlock:
            self.scope.cancel()

    async def write(self, every_s: float) -> None:
        """Send what is posted, and a beat if nothing is."""
        while True:
            messages: list[FromRelay] = []
            with trio.move_on_after(every_s):
                messages.append(await self._outgoing.receive())
            with suppress(trio.WouldBlock):
                while True:
                    messages.append(self._outgoing.receive_nowait())
            await self._channel.send(messages or [protocol.RelayBeat()])


class Relay:
    """Serves the agents whose relay this one is, for as long as its own conversation with the master lasts."""

    def __init__(
        self,
        order: protocol.BecomeRelay,
        control: ControlSpec,
        pass_up: Callable[[Iterable[protocol.RelaySaid | protocol.RelayHeard]], None],
    ) -> None:
        self._position = order.position
        self._fanout = order.fanout
        self._beats_s = beats_s(control)
        self._pass_up = pass_up
        self._gathering = Gathering(encode_frame, passes_s=control.heartbeat_interval_s / _PASSES)
        self._children: dict[int, _Child] = {}
        self._is_due_sooner = trio.Event()
        self._strangers = trio.Semaphore(_MAX_STRANGERS)

    def hand_on(self, message: protocol.Relayed) -> None:
        """Pass a message on to all that it is for, but this agent."""
        targets: defaultdict[int, list[int]] = defaultdict(list)
        for position in protocol.numbers_in(message.to):
            child = child_towards(self._position, position, self._fanout)
            if child is not None:
                targets[child].append(position)
        for child, positions in targets.items():
            # The master looks after a child that is gone.
            if child in self._children:
                self._children[child].post(replace(message, to=protocol.runs_of(positions)))

    def say_again(self) -> None:
        """Have the children repeat messages that may be lost."""
        self._gathering.forget()
        for child in self._children.values():
            child.post(protocol.RelayBeat(says_again=True))

    def note_known(self, news: str) -> None:
        """Tell a child that the master has its news from others, so that it need not keep them."""
        child = self._gathering.source_of(news)
        if child in self._children:
            self._children[child].post(protocol.RelayBeat(known=news))

    async def run(self, listener: RelayListener) -> None:
        """Take in children until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._pass_up_in_time)
            while True:
                await self._strangers.acquire()
                nursery.start_soon(self._serve, listener, await listener.accept())

    async def _pass_up_in_time(self) -> None:
        while True:
            with trio.move_on_at(self._gathering.due_s):
                await self._is_due_sooner.wait()
            self._is_due_sooner = trio.Event()
            self._pass_up(self._gathering.take(trio.current_time()))

    async def _serve(self, listener: RelayListener, caller: trio.abc.Stream) -> None:
        try:
            try:
                channel = MessageChannel[FromRelay, ToRelay](await listener.greet(caller), FrameDecoder(ToRelay))
                position = await self._meet(channel)
            finally:
                self._strangers.release()
            await self._speak_for(_Child(channel), channel, position)
        except* (*CLOSED, PeerError, trio.TooSlowError):
            pass  # it speaks to the master directly now, or is lost, or does not belong to the run
        finally:
            await close(caller)

    async def _speak_for(self, child: _Child, channel: MessageChannel[FromRelay, ToRelay], position: int) -> None:
        """Pass on messages from and to a child until its link ends."""
        # The newest caller has the position now; an older link is one that it has lost.
        if position in self._children:
            self._children[position].scope.cancel()
        self._children[position] = child
        child.post(protocol.RelayBeat())
        try:
            with child.scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(child.write, self._beats_s)
                    await self._listen(child, channel, position)
        finally:
            # A newer link of the position may have taken its place.
            if self._children.get(position) is child:
                del self._children[position]

    async def _meet(self, channel: MessageChannel[FromRelay, ToRelay]) -> int:
        with trio.fail_after(_CALL_S):
            call = await channel.receive()
        if not isinstance(call, protocol.RelayCall) or parent_of(call.position, self._fanout) != self._position:
            raise PeerError(f"began with {call}; a child of position {self._position} begins with RelayCall")
        return call.position

    async def _listen(self, child: _Child, channel: MessageChannel[FromRelay, ToRelay], position: int) -> None:
        while True:
            message = await channel.receive()
            due_s, now_s = self._gathering.due_s, trio.current_time()
            match message:
                case protocol.RelaySaid() | protocol.RelayHeard():
                    is_passed_on = self._gathering.pass_on(position, message, now_s)
                case protocol.RelayCall() | protocol.RelayOpen() | protocol.RelayJoined() | protocol.RelayLeft():
                    raise PeerError(f"sent {type(message).__name__}, which is for the master")
                case _:
                    is_passed_on = self._gathering.hear(position, message, now_s)
            # Another child has sent the same news, so this one need not keep or repeat its own.
            if not is_passed_on:
                news = message.news if isinstance(message, protocol.RelaySaid) else protocol.news_in(message)
                child.post(protocol.RelayBeat(known=news))
            if self._gathering.due_s < due_s:
                self._is_due_sooner.set()
