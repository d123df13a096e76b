"""The tree and its mail against agents that do what real ones do, in any order of arrivals, losses and breaks."""

from __future__ import annotations

import math
import random
from collections import deque
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oobleck.control.events import BatchReceived, MessageReceived, NodesHeard, Send, SendAll
from oobleck.control.protocol import (
    BecomeRelay,
    Fence,
    Heartbeat,
    JoinRelay,
    KillWorker,
    LeaveRelay,
    MasterMessage,
    Relayed,
    RelayHeard,
    RelayJoined,
    RelayLeft,
    RelayOpen,
    RelayReport,
    RelaySaid,
    Resumed,
    UseRelay,
    numbers_in,
    runs_of,
)
from oobleck.control.relaying import child_towards
from oobleck.control.relays import RelayDesk
from oobleck.errors import PeerError
from oobleck.job import ControlSpec
from oobleck.planner import WorkerId
from oobleck.roles.master import decode_relayed
from oobleck.wire import FrameDecoder, encode_frame
from tests.examples import examples

CONTROL = ControlSpec(relay_nodes=4, relay_fanout=2)
FANOUT = CONTROL.relay_fanout


@dataclass
class _Agent:
    """What `roles/way.py` and `roles/relay.py` do, without time."""

    node: str
    position: int = -1
    number: int = 0
    told: deque[MasterMessage] = field(default_factory=deque)
    """Directly."""
    says: deque[RelayReport] = field(default_factory=deque)
    heard: list[int] = field(default_factory=list)
    relay: _Agent | None = None
    attempt: int = 0
    may_use: bool = False
    relayed: deque[Relayed] = field(default_factory=deque)
    """On the link to its relay."""
    children: dict[int, _Agent] = field(default_factory=dict)
    is_relay: bool = False
    is_alive: bool = True

    def leave(self, problem: str) -> None:
        if self.relay is not None:
            self.relay.children = {at: child for at, child in self.relay.children.items() if child is not self}
        self.relay, self.may_use = None, False
        self.relayed.clear()
        self.says.append(RelayLeft(heard=self.number, problem=problem))

    def take(self, message: Relayed) -> None:
        if message.number <= self.number:
            return
        self.number = message.number
        targets: dict[int, list[int]] = {}
        for position in numbers_in(message.to):
            child = child_towards(self.position, position, FANOUT)
            if child is not None:
                targets.setdefault(child, []).append(position)
        for at, positions in targets.items():
            if at in self.children:
                self.children[at].relayed.append(replace(message, to=runs_of(positions)))
        if self.position in numbers_in(message.to):
            (said,) = FrameDecoder[MasterMessage](MasterMessage).feed(message.message)
            self.obey(said)

    def obey(self, message: MasterMessage) -> None:
        assert isinstance(message, Fence)
        self.heard.append(message.generation)


class World:
    """A master's desk, its agents, and what is on its way between them."""

    def __init__(self, num_agents: int) -> None:
        self.now_s = 0.0
        self.desk = RelayDesk(CONTROL, encode=encode_frame, decode=decode_relayed)
        self.agents: dict[str, _Agent] = {}
        self.doors: dict[int, _Agent] = {}
        self.expected: dict[str, list[int]] = {}
        self.num_said = 0
        for index in range(num_agents):
            self.come(f"n{index}")

    @property
    def living(self) -> list[str]:
        return [name for name, agent in self.agents.items() if agent.is_alive]

    def come(self, node: str, *, takes_calls: bool = True) -> None:
        self.agents[node], self.expected[node] = _Agent(node), []
        self.post(self.desk.add(node, self.now_s, takes_calls=takes_calls))

    def post(self, sends: list[Send]) -> None:
        for send in sends:
            if self.agents[send.node].is_alive:
                self.agents[send.node].told.append(send.message)

    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        for node in self.living:
            self.desk.note_heard(node, self.now_s)
        self.post(self.desk.handle_deadline(self.now_s))

    def say(self, nodes: list[str]) -> None:
        self.num_said += 1
        for node in nodes:
            self.expected[node].append(self.num_said)
        fence = Fence(device=0, generation=self.num_said, lost=())
        worker_ids = tuple(WorkerId(node=node, device=0) for node in nodes)
        self.post(list(self.desk.route(SendAll(worker_ids=worker_ids, message=fence), self.now_s)))

    def lose(self, node: str) -> None:
        agent = self.agents[node]
        agent.is_alive = False
        agent.told.clear()
        for child in list(agent.children.values()):
            child.leave("it ended")
        if agent.relay is not None:
            agent.leave("")
        agent.says.clear()
        self.post(self.desk.remove(node, self.now_s))

    # --- one thing arrives somewhere -------------------------------------------------------------------------

    def arrivals(self) -> list[tuple[str, str]]:
        return [
            (what, agent.node)
            for agent in self.agents.values()
            if agent.is_alive
            for what, there_is in (
                ("told", agent.told),
                ("says", agent.says),
                ("relayed", agent.may_use and agent.relayed),
            )
            if there_is
        ]

    def arrive(self, what: str, node: str) -> None:
        agent = self.agents[node]
        match what:
            case "told":
                self._obey(agent, agent.told.popleft())
            case "says":
                heard = self.desk.report(node, agent.says.popleft(), self.now_s)
                assert not heard.is_lost
                self.post(list(heard.sends))
            case _:
                agent.take(agent.relayed.popleft())

    def _obey(self, agent: _Agent, message: MasterMessage) -> None:
        match message:
            case BecomeRelay(position=position):
                for child in list(agent.children.values()):
                    child.leave("it moved")
                agent.position, agent.is_relay = position, True
                port = len(self.doors) + 1
                self.doors[port] = agent
                agent.says.append(RelayOpen(host="", port=port, ticket=b""))
            case JoinRelay(attempt=attempt, position=position, port=port):
                agent.position = position
                relay = self.doors[port]
                if not relay.is_alive:
                    agent.leave("refused")
                    return
                agent.relay, agent.attempt = relay, attempt
                relay.children[position] = agent
                agent.says.append(RelayJoined(attempt=attempt))
            case UseRelay(attempt=attempt, number=number):
                if agent.relay is not None and agent.attempt == attempt:
                    agent.number = max(agent.number, number)
                    agent.may_use = True
            case LeaveRelay():
                if agent.relay is not None:
                    agent.leave("")
            case Relayed():
                agent.take(message)
            case _:
                agent.obey(message)

    def settle(self, rng: random.Random | None = None) -> None:
        while arrivals := self.arrivals():
            self.arrive(*(arrivals[0] if rng is None else rng.choice(arrivals)))


def built(num_agents: int = 12) -> World:
    """A world in which all have their relays."""
    world = World(num_agents)
    for _ in range(6):
        world.pass_time(CONTROL.lease_s)
        world.settle()
    assert sum(not world.desk.is_direct(node) for node in world.living) == num_agents - FANOUT
    return world


def edges(world: World) -> set[tuple[str, str]]:
    return {(agent.node, agent.relay.node) for agent in world.agents.values() if agent.relay is not None}


def test_few_agents_speak_directly():
    world = World(CONTROL.relay_nodes - 1)
    for _ in range(6):
        world.pass_time(CONTROL.lease_s)
        world.settle()
    assert edges(world) == set()


def test_agents_that_take_no_calls_speak_directly_and_are_no_relays():
    world = built()
    away = [f"away{number}" for number in range(20)]
    for node in away:
        world.come(node, takes_calls=False)
    for _ in range(6):
        world.pass_time(CONTROL.lease_s)
        world.settle()
    assert all(world.desk.is_direct(node) for node in away)
    assert not {node for edge in edges(world) for node in edge} & {*away}
    world.say(world.living)
    world.settle()
    assert all(agent.heard == [1] for agent in world.agents.values())


def test_agents_that_take_no_calls_make_no_tree():
    world = World(CONTROL.relay_nodes - 1)
    for number in range(20):
        world.come(f"away{number}", takes_calls=False)
    world.pass_time(CONTROL.lease_s)
    world.settle()
    assert world.desk.due_s == math.inf
    assert edges(world) == set()


def test_an_agent_that_is_reached_otherwise_leaves_the_tree():
    world = built()
    moved, children = "n0", [child.node for child in world.agents["n0"].children.values()]
    for child in list(world.agents[moved].children.values()):
        child.leave("it ended")
    world.come(moved, takes_calls=False)
    for _ in range(6):
        world.pass_time(CONTROL.lease_s)
        world.settle()
    assert moved not in {node for edge in edges(world) for node in edge}
    assert len(edges(world)) == 11 - FANOUT
    world.say([moved, *children])
    world.settle()
    assert [world.agents[node].heard for node in [moved, *children]] == [[1]] * 3


def test_a_message_for_all_is_said_to_few():
    world = built()
    world.say(world.living)
    said = {node: list(agent.told) for node, agent in world.agents.items() if agent.told}
    assert sorted(said) == ["n0", "n1"]
    assert all(len(messages) == 2 for messages in said.values()), "one of its own, and one for those below it"


def test_a_loss_changes_a_few_edges():
    world = built(60)
    before = edges(world)
    world.lose("n3")
    for _ in range(6):
        world.settle()
        world.pass_time(CONTROL.lease_s)
    world.settle()
    after = edges(world)
    assert len(after) == 59 - FANOUT
    assert len(before - after) <= 2 + FANOUT, "its own, those of its children, and that of who takes its place"


def test_a_silent_relay_is_left_before_a_lease_lapses():
    world = built()
    children = {child.node for child in world.agents["n0"].children.values()}
    since_s = world.now_s
    while not any(isinstance(told, LeaveRelay) for told in world.agents["n2"].told):
        world.now_s += 0.05
        for node in world.living:
            if node != "n0":
                world.desk.note_heard(node, world.now_s)
        world.post(world.desk.handle_deadline(world.now_s))
        assert world.now_s - since_s < CONTROL.lease_s
    assert {node for node in world.living if LeaveRelay() in world.agents[node].told} == children


def test_a_master_that_was_held_up_leaves_no_relay():
    world = built()
    world.now_s += 60.0
    assert world.desk.handle_deadline(world.now_s) == []


def test_what_comes_through_relays_is_what_came_without():
    world = built()
    below = sorted(child.position for child in world.agents["n0"].children.values())
    names = [world.agents["n0"].children[position].node for position in below]
    heard = world.desk.report("n0", RelayHeard(heard=((250, runs_of(below)),)), world.now_s)
    assert heard.events[-1] == NodesHeard(heard=tuple((name, world.now_s - 0.25) for name in names))
    resumed = Resumed(device=0, generation=1, transfer_s=0.0, received_bytes=0, resumed_s=0.0, busy_s=())
    said = RelaySaid(by=runs_of(below), devices=(0, 1), message=encode_frame(resumed), news="")
    (batch,) = world.desk.report("n0", said, world.now_s).events
    assert isinstance(batch, BatchReceived)
    assert set(batch.worker_ids) == {WorkerId(node=name, device=device) for name in names for device in (0, 1)}
    beat = RelaySaid(by=runs_of(below), devices=(), message=encode_frame(Heartbeat(sequence=3)), news="")
    events = world.desk.report("n0", beat, world.now_s).events
    assert events == tuple(MessageReceived(node=name, message=Heartbeat(sequence=3)) for name in names)


def test_nobody_speaks_for_a_node_that_is_elsewhere():
    world = built()
    beat = encode_frame(Heartbeat(sequence=3))
    for position in (0, 1, world.agents["n1"].children.popitem()[0], 99):
        said = RelaySaid(by=((position, 1),), devices=(), message=beat, news="")
        assert world.desk.report("n0", said, world.now_s).events == ()


def test_nonsense_is_the_relays_fault():
    world = built()
    with pytest.raises(PeerError):
        world.desk.report("n0", RelaySaid(by=((2, 1),), devices=(), message=b"nonsense", news=""), world.now_s)


def test_a_message_for_an_agent_alone_keeps_its_place_in_the_order():
    world = built()
    (child,) = list(world.agents["n0"].children.values())[:1]
    world.post(list(world.desk.route(Send(node=child.node, message=KillWorker(device=0)), world.now_s)))
    assert not child.told
    (relayed,) = world.agents["n0"].told
    assert isinstance(relayed, Relayed)
    assert relayed.to == ((child.position, 1),)
    assert FrameDecoder[MasterMessage](MasterMessage).feed(relayed.message) == [KillWorker(device=0)]


@examples(60)
@given(st.integers(4, 16), st.integers(0, 2**32))
def test_every_message_arrives_once_and_in_order(num_agents: int, seed: int):
    """Agents come and are lost, links break, time passes, and all of it while messages are under way."""
    rng = random.Random(seed)
    world = World(num_agents)
    for _ in range(400):
        arrivals = world.arrivals()
        chance = rng.random()
        if arrivals and chance < 0.75:
            world.arrive(*rng.choice(arrivals))
        elif chance < 0.86:
            world.pass_time(rng.choice((0.0, 0.0, 0.01, CONTROL.lease_s)) if not arrivals else 0.0)
        elif chance < 0.97:
            nodes = world.living
            world.say(rng.sample(nodes, rng.randint(1, len(nodes))))
        elif chance < 0.98 and len(world.living) > 3:
            world.lose(rng.choice(world.living))
        elif chance < 0.985:
            world.come(f"n{len(world.agents)}")
        else:
            linked = [agent for agent in world.agents.values() if agent.relay is not None]
            if linked:
                rng.choice(linked).leave("the link broke")
    world.settle(rng)
    for node in world.living:
        assert world.agents[node].heard == world.expected[node], node
