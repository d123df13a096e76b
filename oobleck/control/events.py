"""A coordinator's events, its commands, and the turn that collects the commands of an event or a deadline."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NoReturn

from oobleck.control import protocol
from oobleck.control.journal import JournalEntry, Loss, Notice
from oobleck.control.plans import orders_of
from oobleck.errors import ExitCode
from oobleck.job import DEFAULT_KIND, NodeSpec
from oobleck.planner import ExecutionPlan, WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeUp:
    """An agent answered; `address` is where its peers reach it."""

    node: str
    hello: protocol.Hello
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFailed:
    """A node cannot be reached, or its connection broke."""

    node: str
    loss: Loss


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageReceived:
    """A node's agent, or a worker through it, sent something."""

    node: str
    message: protocol.AgentMessage


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchReceived:
    """Many workers sent equal messages at once, each for its own device: one event for thousands of them."""

    worker_ids: tuple[WorkerId, ...]
    message: protocol.Status | protocol.Resumed | protocol.Pace


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesHeard:
    """Many nodes live: one event for the heartbeats of thousands."""

    heard: tuple[tuple[str, float], ...]
    """(node, when it was heard)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileFound:
    """The answer to LookUpProfile; None when nothing is cached under the key."""

    profile_json: str | None
    kind: str = DEFAULT_KIND


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFound:
    """The answer to LookUpLink; None when nothing is cached under the key."""

    key: str
    link_json: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequested:
    """The user ends the run: after the step in flight, or now."""

    now: bool
    exit_code: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptAnswered:
    """The job's script has heard of a step, and lets others begin; `control.waits_for_script` has workers wait."""

    step: int
    """The newest one that it has heard of."""
    through: int
    """The last one that may begin before it is asked again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptEnded:
    """The job's script answers no more, so no step waits for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AddRequested:
    """The job gets another node, or a lost one again."""

    spec: NodeSpec
    by_itself: bool = False
    """Whether it came without a request: it stays out while it is in quarantine."""
    has_arrived: bool = False
    """Whether a launcher has seen it arrive: if its loss is not known yet, it joins once that is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KillRequested:
    """The user kills a node, to see the run recover; it is not tried again."""

    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainRequested:
    """The user, or a termination notice, wants a node out of the job."""

    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRanOut:
    """A scheduler says that it has killed all processes of a node, which took more memory than they may."""

    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLeftOut:
    """The check before the run found a node faulty: the run begins without it."""

    node: str
    fault: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Remark:
    """A text for people in the journal, which changes nothing."""

    level: str
    """`info` or `warning`."""
    text: str


Event = (
    AddRequested
    | BatchReceived
    | DrainRequested
    | KillRequested
    | LinkFound
    | MemoryRanOut
    | NodeFailed
    | NodeLeftOut
    | NodeUp
    | NodesHeard
    | ProfileFound
    | Remark
    | MessageReceived
    | ScriptAnswered
    | ScriptEnded
    | StopRequested
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Connect:
    """Reach a node and start its agent; an earlier master's agent is ended before."""

    node: NodeSpec
    attach: bool = False
    """Whether to connect to an earlier master's agent instead, if it lives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    node: str
    message: protocol.MasterMessage


@dataclass(frozen=True, slots=True, kw_only=True)
class SendAll:
    """Send an equal message to many workers, each for its own device."""

    worker_ids: tuple[WorkerId, ...]
    message: protocol.WorkerCommand

    def each(self) -> Iterator[Send]:
        # Only through relays does one message reach many nodes; the others get one each.
        for worker_id in self.worker_ids:
            yield Send(node=worker_id.node, message=replace(self.message, device=worker_id.device))


@dataclass(frozen=True, slots=True, kw_only=True)
class SendOrders:
    """Send each worker what a plan update means for it."""

    worker_ids: tuple[WorkerId, ...]
    update: protocol.PlanUpdate
    bases: Mapping[WorkerId, protocol.PlanId]
    """The plans that workers have, as far as they have reported them."""
    known: Mapping[int, protocol.OrderedPlan]
    """The plans that orders can be changes of, keyed by generation."""
    in_force: ExecutionPlan | None
    """The plan under which the step in flight is finished."""
    addresses: tuple[tuple[int, protocol.WorkerAddress], ...]
    """Where ready workers listen, each with the generation in which it became ready."""

    def each(self) -> Iterator[Send]:
        orders = orders_of(
            self.update,
            self.worker_ids,
            bases=self.bases,
            known=self.known,
            in_force=self.in_force,
            addresses=self.addresses,
        )
        for worker_id, order in orders:
            yield Send(node=worker_id.node, message=order)


@dataclass(frozen=True, slots=True, kw_only=True)
class Disconnect:
    """Give a node up, and end what still runs there."""

    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    entry: JournalEntry


@dataclass(frozen=True, slots=True, kw_only=True)
class LookUpProfile:
    """Look for a cached profile; answered by ProfileFound."""

    key: str
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LookUpLink:
    """Look for the cached speed of a link; answered by LinkFound."""

    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Store:
    """Cache a measured profile, or the speed of a link."""

    key: str
    value_json: str


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    exit_code: int
    reason: str


Command = Connect | Send | SendAll | SendOrders | Disconnect | Record | LookUpProfile | LookUpLink | Store | End


# --- turns -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class EndRun:
    """The run is finished, or cannot continue."""

    reason: str
    exit_code: int = ExitCode.FAILED


class RunOver(Exception):
    """The run ends, and this turn with it. Its commands so far stay."""

    def __init__(self, end: EndRun) -> None:
        super().__init__(end.reason)
        self.end = end


class Turn:
    """The turn of one event or deadline: its time, and the commands so far. Parts pass it along in their calls."""

    # A turn belongs to one call. No part keeps it, or its time.

    def __init__(self, now_s: float) -> None:
        self.now_s = now_s
        self.commands: list[Command] = []

    def do(self, effects: Iterable[Command | EndRun]) -> None:
        """Add the commands that a part has returned. Raises RunOver if one ends the run."""
        for effect in effects:
            if isinstance(effect, EndRun):
                raise RunOver(effect)
            self.commands.append(effect)

    def record(self, entry: JournalEntry) -> None:
        self.commands.append(Record(entry=entry))

    def send(self, node: str, message: protocol.MasterMessage) -> None:
        self.commands.append(Send(node=node, message=message))

    def note(self, level: str, text: str) -> None:
        self.commands.append(notice(self.now_s, level, text))

    def end(self, reason: str, exit_code: int = ExitCode.FAILED) -> NoReturn:
        """End the run: raises RunOver."""
        raise RunOver(EndRun(reason=reason, exit_code=exit_code))


def notice(now_s: float, level: str, text: str) -> Record:
    """Return the command that appends a text for people to the journal."""
    return Record(entry=Notice(t_s=now_s, level=level, text=text))
