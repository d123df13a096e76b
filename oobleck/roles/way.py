"""The way between an agent and its master: the connection that the master has made, or a relay while there is one.

    direct ── linked: RelayJoined is the last message ──> waiting ── UseRelay ──> through the relay
       ^                                                     └──────────┬────────────┘
       └── RelayLeft, then all that was not answered ──── the link ends, or LeaveRelay

No message is lost when a way ends: the agent repeats what the master has not answered, and the master what the agent
has not received, by the number in RelayLeft.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import assert_never

import trio
import trio.lowlevel

from oobleck.control import protocol
from oobleck.control.relaying import PATIENCE
from oobleck.errors import PeerError
from oobleck.wire import FrameDecoder

from .agent_ports import MasterConnection, RelayNetwork
from .channel import CLOSED, MessageChannel, close
from .relay import FromRelay, Relay, ToRelay
from .resend_queue import ResendQueue

_log = logging.getLogger("oobleck.agent")

_CALL_S = 5.0  # how long it may take to reach a relay


class _Uplink:
    """The link to a relay, or the attempt to make one."""

    def __init__(self, attempt: int) -> None:
        self.attempt = attempt
        self.scope = trio.CancelScope()
        self.channel: MessageChannel[ToRelay, FromRelay] | None = None  # None until the relay has answered
        self.is_announced = False
        self.settled = trio.Event()  # set once it may be used, or is lost
        self.gone = trio.Event()
        self.problem = ""


class Way:
    """The way of one conversation."""

    def __init__(
        self,
        connection: MasterConnection,
        queue: ResendQueue,
        nursery: trio.Nursery,
        *,
        network: RelayNetwork | None,
        deliver: Callable[[protocol.MasterMessage], None],
    ) -> None:
        """`nursery` ends with the conversation. `deliver` takes messages that come through a relay, and may raise
        PeerError. Without `network`, the agent uses no relay.
        """
        self._connection = connection
        self._queue = queue
        self._nursery = nursery
        self._network = network
        self._deliver = deliver
        self._reports: list[protocol.RelayReport] = []
        self._uplink: _Uplink | None = None
        self._relay: Relay | None = None
        self._relay_scope = trio.CancelScope()
        self._position = -1
        self._number = 0  # the number of the newest message that was relayed to this agent, or to others through it

    @property
    def is_direct(self) -> bool:
        return self._uplink is None

    def carry_out(self, order: protocol.RelayOrder, configure: protocol.Configure) -> None:
        """Carry out a master's order about relays. Raises PeerError."""
        match order:
            case protocol.Relayed():
                self._take(order)
            case protocol.BecomeRelay():
                self._position = order.position
                self._relay_scope.cancel()
                # Created here, since the next order may arrive before the task has started.
                self._relay_scope = trio.CancelScope()
                if self._network is not None:
                    self._nursery.start_soon(self._serve, self._relay_scope, order, configure, self._network)
            case protocol.JoinRelay():
                self._position = order.position
                if self._network is not None and self._uplink is None:
                    self._uplink = _Uplink(order.attempt)
                    self._nursery.start_soon(self._join, self._uplink, order, configure, self._network)
            case protocol.UseRelay():
                if self._uplink is not None and self._uplink.attempt == order.attempt:
                    self._number = max(self._number, order.number)
                    self._uplink.settled.set()
            case protocol.LeaveRelay():
                if self._uplink is not None:
                    self._uplink.scope.cancel()
            case _:
                assert_never(order)

    # --- from the agent ----------------------------------------------------------------------------------------

    async def speak(self, beat: Callable[[], float]) -> None:
        """Send what the queue has, at once, and call `beat` in time, which returns when to call it next."""
        beats_s = trio.current_time()
        while True:
            with trio.move_on_at(beats_s):
                await self._queue.wait()
            if trio.current_time() >= beats_s:
                beats_s = beat()
            if self._uplink is not None and self._uplink.is_announced:
                await self._say_through(self._uplink)
            else:
                await self._say_directly(self._uplink)
            self._queue.note_sent()

    async def _say_directly(self, uplink: _Uplink | None) -> None:
        reports, self._reports = self._reports, []
        messages = [*reports, *self._queue.take()]
        if uplink is None or uplink.channel is None:
            if messages:
                await self._connection.send(messages)
            return
        # RelayJoined is the last direct message, and UseRelay the last one back: none through the relay overtakes them.
        uplink.is_announced = True
        await self._connection.send([*messages, protocol.RelayJoined(attempt=uplink.attempt)])
        await uplink.settled.wait()  # the master always answers, or the conversation ends

    async def _say_through(self, uplink: _Uplink) -> None:
        reports, self._reports = self._reports, []
        # A relay passes on nothing that is about relays.
        if reports:
            await self._connection.send(reports)
        messages = self._queue.take()
        if messages and uplink.channel is not None:
            try:
                await uplink.channel.send(messages)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                uplink.problem = "it takes nothing any more"
                uplink.scope.cancel()  # what was lost is not answered, so it is sent again

    async def leave(self) -> None:
        """Speak directly from now on."""
        if self._uplink is not None:
            uplink = self._uplink
            uplink.scope.cancel()
            await uplink.gone.wait()

    # --- from the master, through others and for others ------------------------------------------------------

    def _take(self, message: protocol.Relayed) -> None:
        if message.number <= self._number:
            return  # it has arrived by another way
        self._number = message.number
        if self._relay is not None:
            self._relay.hand_on(message)
        if any(first <= self._position < first + count for first, count in message.to):
            for inner in FrameDecoder[protocol.MasterMessage](protocol.MasterMessage).feed(message.message):
                if isinstance(inner, protocol.ForWorker):
                    for device in message.devices:
                        self._deliver(replace(inner, device=device))
                else:
                    self._deliver(inner)

    async def _serve(
        self,
        scope: trio.CancelScope,
        order: protocol.BecomeRelay,
        configure: protocol.Configure,
        network: RelayNetwork,
    ) -> None:
        """Be a relay until the agent gets another position, or the conversation ends."""
        with scope:
            try:
                listener = await network.listen(configure.address)
            except OSError as error:
                _log.warning("cannot be a relay: nothing can listen at %s: %s", configure.address, error)
                return
            try:
                self._relay = relay = Relay(order, configure.job.control, self._queue.pass_on)
                self._reports.append(listener.door)
                self._queue.wake()
                await relay.run(listener)
            finally:
                await close(listener)

    # --- the link to a relay -----------------------------------------------------------------------------------

    async def _join(
        self, uplink: _Uplink, order: protocol.JoinRelay, configure: protocol.Configure, network: RelayNetwork
    ) -> None:
        """Reach a relay, and follow it until the link ends."""
        try:
            with uplink.scope:
                with trio.fail_after(_CALL_S):
                    stream = await network.dial(order.host, order.port, order.ticket)
                channel = MessageChannel[ToRelay, FromRelay](stream, FrameDecoder(FromRelay))
                try:
                    await self._follow(uplink, channel, patience_s=PATIENCE * configure.job.control.lease_s)
                finally:
                    await close(channel)
        except trio.TooSlowError:
            uplink.problem = "it is silent"
        except (*CLOSED, PeerError, OSError) as error:
            uplink.problem = str(error) or type(error).__name__
        self._uplink = None
        # `_say_directly` may be waiting for UseRelay, which has no use once the link has ended.
        uplink.settled.set()
        self._reports.append(protocol.RelayLeft(heard=self._number, problem=uplink.problem))
        self._say_again()
        uplink.gone.set()
        _log.info("speaks to the master directly; its relay: %s", uplink.problem or "left as asked")

    async def _follow(self, uplink: _Uplink, channel: MessageChannel[ToRelay, FromRelay], *, patience_s: float) -> None:
        with trio.fail_after(_CALL_S):
            await channel.send([protocol.RelayCall(position=self._position)])
            if not isinstance(await channel.receive(), protocol.RelayBeat):
                raise PeerError("began with another message than RelayBeat")
        uplink.channel = channel
        self._queue.wake()
        # Before UseRelay, a message through the relay could overtake a direct one.
        await uplink.settled.wait()
        while True:
            with trio.fail_after(patience_s):
                message = await channel.receive()
            match message:
                case protocol.Relayed():
                    self._take(message)
                case protocol.RelayBeat(known=known, says_again=says_again):
                    if known:
                        self._queue.forget_news(known)
                        if self._relay is not None:
                            self._relay.note_known(known)
                    if says_again:
                        self._say_again()
                case _:
                    assert_never(message)

    def _say_again(self) -> None:
        """Have messages repeated that may be lost, this agent's and those of others through it."""
        self._queue.repeat_unheard()
        self._queue.wake()
        if self._relay is not None:
            self._relay.say_again()
