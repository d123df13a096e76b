"""The master: a task for each node, and a loop that feeds the coordinator and carries out its commands."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, repeat

import trio

from oobleck.control import events as control_events
from oobleck.control import journal as entries
from oobleck.control import protocol
from oobleck.control.nodes import saying_farewell_s
from oobleck.control.relays import RelayDesk
from oobleck.errors import AgentGone, FaultyNode, NodeUnreachable, PeerError
from oobleck.job import JobSpec, NodeSpec
from oobleck.job.ranks import RanksSpec
from oobleck.job.secrets import Hiding
from oobleck.wire import FrameDecoder, encode_frame

from .channel import CLOSED, close
from .master_ports import AgentConnection, Cluster, Decisions, Journal, LinkLost, ProfileCache

_EVENTS_BUFFERED = 10_000
_EVENTS_AT_ONCE = 100  # the most events that are taken in before commands are carried out
_MESSAGES_BUFFERED = 10_000  # for each node; a node that leaves that many unread is lost
_AGAIN_S = (0.0, 0.1, 0.5, 1.0, 2.0)
"""The waits before each try to reach an agent again; the last one repeats."""
_FAREWELL_S = 5.0  # how long a few agents may take to end their workers once they are asked to stop


class RunClock:
    """Seconds since a run started, under all its masters, by trio's clock. `start` it within trio."""

    def __init__(self, *, elapsed_s: float = 0.0, held_up_s: Callable[[], float] = lambda: 0.0) -> None:
        """`elapsed_s` is the run's time under earlier masters.

        `held_up_s` returns how long this process was stopped so far, if trio's clock does not count that.
        """
        self._elapsed_s = elapsed_s
        self._held_up_s = held_up_s
        self._started_s = 0.0

    def start(self) -> None:
        self._started_s = trio.current_time() - self._elapsed_s + self._held_up_s()

    @property
    def now_s(self) -> float:
        """Seconds since the run started, including those in which this process was stopped."""
        return trio.current_time() - self._started_s + self._held_up_s()

    def deadline(self, at_s: float) -> float:
        """Return the trio time of a moment of the run; infinity stays infinity."""
        return at_s + self._started_s - self._held_up_s()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reported:
    """An agent sent something about relays, or passed on messages of others."""

    node: str
    report: protocol.RelayReport


class Master:
    """Runs one job to its end. Others, such as a control socket, feed events by `submit`."""

    def __init__(
        self,
        coordinator: Decisions,
        job: JobSpec | RanksSpec,
        *,
        cluster: Cluster,
        journal: Journal,
        profiles: ProfileCache,
        clock: RunClock,
        known: Sequence[NodeSpec] = (),
        hide: Hiding | None = None,
    ) -> None:
        """`known` are the nodes of the master before, lost ones included: they are cleaned at the end.

        `hide` takes secrets out of entries before anybody gets them.
        """
        self._hide = Hiding(None, {}) if hide is None else hide
        self._coordinator = coordinator
        self._nodes = {spec.name: spec for spec in known}
        self._tag = job.tag
        self._cluster = cluster
        self._journal = journal
        self._profiles = profiles
        self._hello_timeout_s = job.control.connect_timeout_s
        self._clock = clock
        self._events, self._inbox = trio.open_memory_channel[control_events.Event | _Reported](_EVENTS_BUFFERED)
        self._tunnels: dict[str, _Tunnel] = {}
        self._cleaned: dict[str, trio.Event] = {}
        """When what is left on each node that was lost is ended."""
        self._observers: list[Callable[[entries.JournalEntry], None]] = []
        self._listeners: list[Callable[[str, float], None]] = []
        self._gauges: list[Callable[[str, protocol.NodeUse], None]] = []
        self._screens: list[Callable[[protocol.RankOutput], None]] = []
        self._outcome: control_events.End | None = None
        self._relays = RelayDesk(job.control, encode=encode_frame, decode=decode_relayed)

    @property
    def now_s(self) -> float:
        return self._clock.now_s

    @property
    def nodes(self) -> tuple[NodeSpec, ...]:
        """All nodes that the run knows, lost ones included."""
        return tuple(self._nodes.values())

    def observe(self, observer: Callable[[entries.JournalEntry], None]) -> None:
        """Have every journal entry handed to `observer`, after it is written."""
        self._observers.append(observer)

    def listen(self, listener: Callable[[str, float], None]) -> None:
        """Have `listener` called with (node, seconds since the start) whenever a node is heard."""
        self._listeners.append(listener)

    def measure(self, gauge: Callable[[str, protocol.NodeUse], None]) -> None:
        """Have `gauge` called with (node, use) whenever a node reports what its processes use. It decides nothing."""
        self._gauges.append(gauge)

    def show_output(self, screen: Callable[[protocol.RankOutput], None]) -> None:
        """Have the output of ranks handed to `screen`. It is for people, and decides nothing."""
        self._screens.append(screen)

    def submit(self, event: control_events.Event) -> None:
        """Feed an event. Raises trio.WouldBlock when the master is hopelessly behind."""
        self._events.send_nowait(event)

    async def kill(self, node: str) -> bool:
        """Kill a node, as if its power had been cut; the run treats its loss like any other. Raises NodeUnreachable.

        Returns False if nothing ran there, or still does.
        """
        # This comes first: when the connection ends, the coordinator has to know that the node stays away.
        self.submit(control_events.KillRequested(node=node))
        return await self._cluster.kill(self._nodes[node])

    async def run(self) -> control_events.End:
        """Run the job; return how it ended, once nothing of it is left running."""
        self._clock.start()
        async with trio.open_nursery() as nursery:
            self._carry_out(self._coordinator.start(self.now_s), nursery)
            while self._outcome is None:
                self._carry_out(await self._next_commands(), nursery)
            await self._say_farewell()
            nursery.cancel_scope.cancel()
        farewell_s = saying_farewell_s(_FAREWELL_S, len(self._nodes))
        # Even if this is cancelled, nodes are cleaned: what is left there would keep their devices in use.
        with trio.CancelScope(shield=True), trio.move_on_after(farewell_s):
            async with trio.open_nursery() as nursery:
                for spec in self._nodes.values():
                    nursery.start_soon(self._cluster.clean, spec)
        return self._outcome

    async def _next_commands(self) -> list[control_events.Command]:
        at = self._clock.deadline(min(self._coordinator.next_deadline(), self._relays.due_s))
        with trio.move_on_at(at):
            commands = self._feed(await self._inbox.receive())
            with suppress(trio.WouldBlock):  # heartbeats of many nodes arrive together: one wake-up serves them all
                for _ in range(_EVENTS_AT_ONCE):
                    commands += self._feed(self._inbox.receive_nowait())
            return commands
        self._post_all(self._relays.handle_deadline(self.now_s))
        return self._coordinator.handle_deadline(self.now_s)

    def _feed(self, event: control_events.Event | _Reported) -> list[control_events.Command]:
        now_s = self.now_s
        match event:
            case _Reported(node=node, report=report):
                return self._take_report(node, report)
            case control_events.MessageReceived(node=node, message=message):
                if isinstance(message, protocol.RankOutput):
                    for screen in self._screens:
                        screen(message)
                if isinstance(message, protocol.NodeUse):
                    for gauge in self._gauges:
                        gauge(node, message)
                self._relays.note_heard(node, now_s)
                self._note_heard(node, now_s)
            case control_events.NodesHeard(heard=heard):
                for node, heard_s in heard:
                    self._note_heard(node, heard_s)
            case control_events.NodeUp(node=node):
                self._meet(node)
        return self._coordinator.handle(now_s, event)

    def _meet(self, node: str) -> None:
        """An agent has said hello; it has no relay now, whatever it had before."""
        if node in self._tunnels:
            self._post_all(self._relays.add(node, self.now_s, takes_calls=self._tunnels[node].takes_calls))
            self._look_after_tunnel(node)

    def _note_heard(self, node: str, heard_s: float) -> None:
        for listener in self._listeners:
            listener(node, heard_s)

    def _take_report(self, node: str, report: protocol.RelayReport) -> list[control_events.Command]:
        try:
            heard = self._relays.report(node, report, self.now_s)
        except PeerError as error:
            return self._coordinator.handle(
                self.now_s, control_events.NodeFailed(node=node, loss=entries.ProtocolBroken(problem=str(error)))
            )
        if isinstance(report, protocol.RelayJoined | protocol.RelayLeft):
            self._look_after_tunnel(node)
        self._post_all(heard.sends)
        for lost in heard.is_lost:  # a new conversation begins with a hello, after which nothing counts as received
            if lost in self._tunnels:
                self._tunnels[lost].begin_again()
        return [command for event in heard.events for command in self._feed(event)]

    def _look_after_tunnel(self, node: str) -> None:
        if node in self._tunnels:
            self._tunnels[node].rest(not self._relays.is_direct(node))

    def _carry_out(self, commands: list[control_events.Command], nursery: trio.Nursery) -> None:
        for command in commands:
            match command:
                case control_events.Send() | control_events.SendAll() | control_events.SendOrders():
                    self._post_all(self._relays.route(command, self.now_s))
                case control_events.Record(entry=entry):
                    if not isinstance(entry, entries.JobStarted | entries.PlanAdopted | entries.StepDone):
                        entry = self._hide.value(entry)
                    self._journal.append(entry)
                    for observer in self._observers:
                        observer(entry)
                case control_events.Connect(node=spec, attach=attach):
                    self._nodes[spec.name] = spec
                    if (before := self._tunnels.get(spec.name)) is not None:
                        before.scope.cancel()  # it still tries, and two would each end the other's agent
                    self._tunnels[spec.name] = tunnel = _Tunnel(spec, self._tag, self._events, attach=attach)
                    cleaned = self._cleaned.get(spec.name)
                    nursery.start_soon(tunnel.run, self._cluster, self._hello_timeout_s, cleaned)
                case control_events.Disconnect(node=node):
                    self._tunnels.pop(node).scope.cancel()
                    self._post_all(self._relays.remove(node, self.now_s))
                    cleaned = self._cleaned[node] = trio.Event()
                    nursery.start_soon(self._clean, self._nodes[node], cleaned)
                case control_events.LookUpProfile(key=key, kind=kind):
                    self.submit(control_events.ProfileFound(profile_json=self._profiles.load(key), kind=kind))
                case control_events.LookUpLink(key=key):
                    self.submit(control_events.LinkFound(key=key, link_json=self._profiles.load(key)))
                case control_events.Store(key=key, value_json=value_json):
                    self._profiles.store(key, value_json)
                case control_events.End():
                    self._outcome = self._hide.value(command)

    async def _clean(self, node: NodeSpec, cleaned: trio.Event) -> None:
        """End what is left on a node. Its next agent is started once that is done, or it would be ended as well."""
        try:
            await self._cluster.clean(node)
        finally:
            cleaned.set()

    def _post_all(self, sends: Iterable[control_events.Send]) -> None:
        for send in sends:
            if send.node in self._tunnels:
                self._tunnels[send.node].post(send.message)

    async def _say_farewell(self) -> None:
        """Let agents end by themselves; `Cluster.clean` ends those that take too long."""
        with trio.move_on_after(saying_farewell_s(_FAREWELL_S, len(self._nodes))):
            for tunnel in self._tunnels.values():
                await tunnel.closed.wait()


class _Tunnel:
    """The conversation with one agent (`agent.py`): a task reads, a task writes, and its end becomes an event."""

    def __init__(
        self,
        spec: NodeSpec,
        tag: str,
        events: trio.MemorySendChannel[control_events.Event | _Reported],
        *,
        attach: bool,
    ) -> None:
        self.scope = trio.CancelScope()
        self.closed = trio.Event()
        self._spec = spec
        self._greeting = protocol.Greeting(protocol=protocol.PROTOCOL_VERSION, tag=tag)
        self._events = events
        self._attach = attach  # an agent lives there: connect to it, and start none
        self._connection: AgentConnection | None = None
        self.takes_calls = False  # the newest connection's
        self._conversation = trio.CancelScope()
        self._post, self._outgoing = trio.open_memory_channel[protocol.MasterMessage](_MESSAGES_BUFFERED)

    def post(self, message: protocol.MasterMessage) -> None:
        """Queue a message. Never waits, so that a slow node delays no other."""
        try:
            self._post.send_nowait(message)
        except trio.WouldBlock:
            self._fail(entries.NotReading(num_unread=_MESSAGES_BUFFERED))
            self.scope.cancel()

    def rest(self, is_resting: bool) -> None:
        """Note whether the agent is heard through another one for now."""
        if self._connection is not None:
            self._connection.rest(is_resting)

    def begin_again(self) -> None:
        """End the connection, and reach the agent by a new one: messages may not have arrived."""
        self._conversation.cancel()

    async def run(self, cluster: Cluster, hello_timeout_s: float, cleaned: trio.Event | None) -> None:
        """Talk to the agent until its end, or until `scope` is cancelled; begin once the node is `cleaned`."""
        try:
            with self.scope:
                if cleaned is not None:
                    await cleaned.wait()
                # If only the connection is lost, and not the agent, it connects again until the coordinator has waited
                # long enough, and keeps messages meanwhile.
                for wait_s in chain(_AGAIN_S, repeat(_AGAIN_S[-1])):
                    if not await self._is_only_out_of_reach(cluster, hello_timeout_s):
                        break
                    await trio.sleep(wait_s)
        except AgentGone:
            self._fail(entries.AgentLost())
        except FaultyNode as error:
            self._fail(entries.Unfit(fault=error.reason))
        except NodeUnreachable as error:
            self._fail(entries.Unreachable(problem=error.reason))
        finally:
            self.closed.set()

    async def _is_only_out_of_reach(self, cluster: Cluster, hello_timeout_s: float) -> bool:
        """Talk to the agent until the connection ends; return whether the agent may still live."""
        try:
            connection = await cluster.reach(self._spec, attach=self._attach)
        except NodeUnreachable as error:
            # An agent lives there as far as is known, so perhaps only the way to it is lost.
            if self._attach and not isinstance(error, AgentGone | FaultyNode):
                return True
            raise
        self._connection, self.takes_calls = connection, connection.takes_calls
        try:
            with trio.CancelScope() as self._conversation:
                return await self._talk(connection, hello_timeout_s)
            # `begin_again` has ended the conversation, and not the agent.
            return True
        finally:
            self._connection = None
            await close(connection)

    async def _talk(self, connection: AgentConnection, hello_timeout_s: float) -> bool:
        is_link_lost = False
        try:
            with trio.fail_after(hello_timeout_s):
                await connection.send([self._greeting])
                hello = await connection.receive()
            if not isinstance(hello, protocol.Hello):
                raise PeerError(f"sent {type(hello).__name__} before Hello")
            self._events.send_nowait(
                control_events.NodeUp(node=self._spec.name, hello=hello, address=connection.address)
            )
            # From now on a new connection is to this agent: another start would end it, and its workers.
            self._attach = True
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._write, connection)
                await self._read(connection)
        except* LinkLost:
            is_link_lost = True
        except* CLOSED:
            self._fail(entries.ConnectionLost())
        except* trio.TooSlowError:
            is_link_lost = self._attach
            if not self._attach:
                self._fail(entries.Unreachable(problem=f"its agent did not answer within {hello_timeout_s:g} s"))
        except* PeerError as errors:
            self._fail(entries.ProtocolBroken(problem=str(errors.exceptions[0])))
        return is_link_lost

    async def _read(self, connection: AgentConnection) -> None:
        while True:
            message = await connection.receive()
            event: control_events.Event | _Reported
            if isinstance(message, protocol.RelayReport):
                event = _Reported(node=self._spec.name, report=message)
            else:
                event = control_events.MessageReceived(node=self._spec.name, message=message)
            try:
                self._events.send_nowait(event)
            except trio.WouldBlock:
                await self._events.send(event)

    async def _write(self, connection: AgentConnection) -> None:
        while True:
            messages = [await self._outgoing.receive()]
            # One write for all that waits: a tunnel's packets cost more than their contents.
            with suppress(trio.WouldBlock):
                while True:
                    messages.append(self._outgoing.receive_nowait())
            try:
                await connection.send(messages)
            except trio.BrokenResourceError:
                return  # `_read` finds out what was lost

    def _fail(self, loss: entries.Loss) -> None:
        self._events.send_nowait(control_events.NodeFailed(node=self._spec.name, loss=loss))


def decode_relayed(frame: bytes) -> protocol.AgentMessage:
    """Read a message that a relay has passed on. Raises PeerError."""
    messages = FrameDecoder[protocol.AgentMessage](protocol.AgentMessage).feed(frame)
    if len(messages) != 1:
        raise PeerError(f"passes on a frame with {len(messages)} messages; it must have one")
    return messages[0]
