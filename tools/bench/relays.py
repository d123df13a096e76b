"""What the tree of agents saves the master: with it and without it, in one run.

    python tools/bench/relays.py --agents 256 1024 --loss 1024 10000

The first table: a real master and real agents on plain sockets (no SSH), which are heard and do no more. Its processor
time is that of the master's process alone. All agents are in one process, so that it, and not the master, is what
limits their number; `--interval` spares it.

The second table: one node is lost. The coordinator alone, in this process: what it says is routed, encoded and counted,
and all survivors answer, each by itself or through relays that put equal answers together. Seconds are the master's
processor time; what relays do is not counted.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # run as a script, it finds its neighbours

from oobleck.control.events import Command, MessageReceived, NodeFailed, Send, SendAll, SendOrders
from oobleck.control.journal import ConnectionLost
from oobleck.control.protocol import (
    AgentMessage,
    Fence,
    FromAgent,
    JoinRelay,
    RelayHeard,
    RelayJoined,
    RelayOpen,
    RelaySaid,
    Status,
)
from oobleck.control.relaying import Gathering, parent_of
from oobleck.control.relays import RelayDesk
from oobleck.job import ControlSpec
from oobleck.roles.master import decode_relayed
from oobleck.wire import FrameDecoder, encode_frame
from tools.bench.control_processes import Agents, Cluster, run_master, serve_agents
from tools.bench.scale_control import ControlPlane, statuses_of
from tools.smoke import parse_arguments

__all__ = ["main"]

_STEP_S = 3600.0
_DOOR = RelayOpen(host="", port=1, ticket=b"")


@dataclass(frozen=True, slots=True, kw_only=True)
class Usual:
    """What the master does while nothing happens."""

    share: float
    """Of one processor."""
    heard_per_s: float
    memory_mib: float
    num_through: int
    """Agents that had a relay at the end: fewer than all where some process had no time to answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """What a lost node has the master do."""

    num_sent: int
    sent_bytes: int
    send_s: float
    """To route and encode fences and orders."""
    num_received: int
    answer_s: float
    """To decode the answers, and to decide."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    asked = _parse(arguments)
    print(f"a heartbeat every {asked.interval:g} s\n")
    print("| agents | fan-out | through relays | of a processor | an agent's share | received /s | memory, MiB |")
    print("|---|---|---|---|---|---|---|")
    for num_agents in asked.agents:
        for fanout in (0, asked.fanout):
            usual = _measure_usual(num_agents, fanout, asked.interval, asked.seconds)
            share = f"{usual.share:.2%} | {usual.share / num_agents:.5%}"
            rest = f"{usual.heard_per_s:.0f} | {usual.memory_mib:.0f}"
            print(f"| {num_agents} | {fanout or 'none'} | {usual.num_through} | {share} | {rest} |", flush=True)
    print("\n| nodes | fan-out | sent | bytes | to send, s | received | to decide, s |")
    print("|---|---|---|---|---|---|---|")
    for num_nodes in asked.loss:
        for fanout in (0, asked.fanout):
            loss = _measure_loss(num_nodes, fanout)
            sent = f"{loss.num_sent} | {loss.sent_bytes:,} | {loss.send_s:.3f}"
            received = f"{loss.num_received} | {loss.answer_s:.3f}"
            print(f"| {num_nodes} | {fanout or 'none'} | {sent} | {received} |", flush=True)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, nargs="*", default=(256, 1024))
    parser.add_argument("--loss", type=int, nargs="*", default=(1024, 4096, 10_000))
    parser.add_argument("--fanout", type=int, default=32)
    parser.add_argument("--interval", type=float, default=0.5, help="seconds between the heartbeats of an agent")
    parser.add_argument("--seconds", type=float, default=20.0, help="how long the usual is looked at")
    return parse_arguments(parser, arguments, agents=(6,), loss=(16,), fanout=2, seconds=1.0)


# --- heartbeats ------------------------------------------------------------------------------------------------


def _measure_usual(num_agents: int, fanout: int, interval_s: float, seconds: float) -> Usual:
    cluster = Cluster(
        agents=num_agents,
        pipelines=max(2, num_agents // 8),
        step_s=_STEP_S,
        interval_s=interval_s,
        lease_s=6 * interval_s,
        tunnels="none",
        relay_fanout=fanout,
        is_idle=True,
    )
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="obrl")))
        agents = stack.enter_context(serve_agents(cluster, directory))
        master = stack.enter_context(run_master(cluster, directory, None))
        num_through = max(0, num_agents - fanout) if fanout else 0
        master.wait_for("tree", lambda: _are_settled(agents, num_agents, num_through))
        time.sleep(min(seconds, 2.0))
        before, before_s, began_s = agents.counts(), master.processor_s, time.monotonic()
        time.sleep(seconds)
        took_s, used_s = time.monotonic() - began_s, master.processor_s - before_s
        after = agents.counts()
        said = after - before
        return Usual(
            share=used_s / took_s,
            heard_per_s=sum(number for what, number in said.items() if what.startswith("said ")) / took_s,
            memory_mib=master.memory_mib,
            num_through=_num_through(after),
        )


def _are_settled(agents: Agents, num_agents: int, num_through: int) -> bool:
    counts = agents.counts()
    is_answered = counts["heard UseRelay"] >= num_through
    return counts["heard Configure"] >= num_agents and is_answered and _num_through(counts) == num_through


def _num_through(counts: Counter[str]) -> int:
    """How many agents have a relay now: those that were asked to, but for those that have left theirs since."""
    return counts["heard JoinRelay"] - counts["said RelayLeft"]


# --- a loss ------------------------------------------------------------------------------------------------------


class _Tree:
    """A desk all of whose agents have their relays, and those relays."""

    def __init__(self, nodes: Sequence[str], fanout: int) -> None:
        control = ControlSpec(relay_nodes=1 if fanout else 0, relay_fanout=max(2, fanout))
        self.desk = RelayDesk(control, encode=encode_frame, decode=decode_relayed)
        self.position = {node: position for position, node in enumerate(nodes)}
        self._nodes = list(nodes)
        self._fanout = control.relay_fanout
        for node in nodes:
            self.desk.add(node, 0.0)
        now_s = 0.0
        while fanout and any(not self._is_settled(node) for node in nodes):
            now_s += control.lease_s / 8
            for node in nodes:
                self.desk.note_heard(node, now_s)
            for send in self.desk.handle_deadline(now_s):
                self._obey(send, now_s)

    def _is_settled(self, node: str) -> bool:
        return parent_of(self.position[node], self._fanout) is None or not self.desk.is_direct(node)

    def _obey(self, send: Send, now_s: float) -> None:
        if isinstance(send.message, JoinRelay):
            self.desk.report(send.node, RelayJoined(attempt=send.message.attempt), now_s)
        else:
            self.desk.report(send.node, _DOOR, now_s)

    def gather(self, said: Iterable[tuple[str, AgentMessage]]) -> Iterator[tuple[str, FromAgent]]:
        """Return what reaches the master of what nodes say, and from whom."""
        relays: dict[int, Gathering] = {}
        for node, message in said:
            above = None if self.desk.is_direct(node) else parent_of(self.position[node], self._fanout)
            if above is None:
                yield node, message
            else:
                self._relay(relays, above).hear(self.position[node], message, 0.0)
        while relays:
            deepest = max(relays)
            for passed in relays.pop(deepest).take(1.0):
                above = parent_of(deepest, self._fanout)
                if above is None:
                    yield self._nodes[deepest], passed
                else:
                    self._relay(relays, above).pass_on(deepest, passed, 0.0)

    def _relay(self, relays: dict[int, Gathering], position: int) -> Gathering:
        return relays.setdefault(position, Gathering(encode_frame, passes_s=0.1))


def _measure_loss(num_nodes: int, fanout: int) -> Loss:
    plane = ControlPlane(num_nodes)
    tree = _Tree(plane.nodes, fanout)
    plane.beat()
    lost = plane.nodes[num_nodes // 2]
    commands = plane.handle(NodeFailed(node=lost, loss=ConnectionLost()))
    while not (fences := [each for each in commands if isinstance(each, SendAll) and isinstance(each.message, Fence)]):
        commands = plane.wait()
    tree.desk.remove(lost, 0.0)
    survivors = [worker_id for worker_id in plane.update.plan.worker_ids if worker_id.node != lost]
    (fence,) = (each.message for each in fences)
    assert isinstance(fence, Fence)
    answers = statuses_of(survivors, plane.update, fence.generation)
    arriving = list(tree.gather((id_.node, status) for id_, status in zip(survivors, answers, strict=True)))
    frames = [(node, encode_frame(message)) for node, message in arriving]
    decoder = FrameDecoder[FromAgent](FromAgent)
    plane.now_s += 0.01
    answered: list[Command] = []
    answer_s = _timed(lambda: answered.extend(_take_in(plane, tree, decoder, frames)))
    used_s = plane.used_s
    while not (orders := [each for each in answered if isinstance(each, SendOrders)]):
        answered += plane.wait()
    answer_s += plane.used_s - used_s
    sent: list[int] = []
    send_s = _timed(lambda: sent.extend(_sizes(tree.desk, [*fences, *orders])))
    return Loss(num_sent=len(sent), sent_bytes=sum(sent), send_s=send_s, num_received=len(frames), answer_s=answer_s)


def _take_in(
    plane: ControlPlane, tree: _Tree, decoder: FrameDecoder[FromAgent], frames: Iterable[tuple[str, bytes]]
) -> Iterator[Command]:
    for node, frame in frames:
        for message in decoder.feed(frame):
            if isinstance(message, RelaySaid | RelayHeard):
                for event in tree.desk.report(node, message, 0.0).events:
                    yield from plane.handle(event)
            else:
                assert isinstance(message, Status)
                yield from plane.handle(MessageReceived(node=node, message=message))


def _sizes(desk: RelayDesk, commands: Iterable[SendAll | SendOrders]) -> Iterator[int]:
    for command in commands:
        for send in desk.route(command, 0.0):
            yield len(encode_frame(send.message))


def _timed(act: Callable[[], object]) -> float:
    """Processor seconds."""
    began_s = time.process_time()
    act()
    return time.process_time() - began_s


if __name__ == "__main__":
    main()
