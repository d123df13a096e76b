"""Copies of saved states on a model of a cluster: messages are late, ranks save on, and nodes are lost."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from random import Random
from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oobleck.control import protocol
from oobleck.control.protocol import (
    CopyDoor,
    CopyParts,
    HeldParity,
    HeldPart,
    KeepStates,
    Mix,
    PartNotCopied,
    ScriptState,
    StatesHeld,
)
from oobleck.control.scripts.copies import Copies
from tests.examples import examples

COPY_SLOTS = 2
Held = TypeVar("Held", HeldPart, HeldParity)


@dataclass
class Node:
    """A node with one rank: its slots, those for the copies of each rank, and the messages on their way."""

    own: list[tuple[ScriptState, HeldPart]] = field(default_factory=list)
    copies: dict[tuple[int, str], list[HeldPart]] = field(default_factory=dict)
    parities: dict[tuple[tuple[int, ...], str], list[HeldParity]] = field(default_factory=dict)
    mixed: dict[Mix, tuple[ScriptState, set[int]]] = field(default_factory=dict)
    """What is being mixed: of which state, and the ranks whose parts are in."""
    kept: KeepStates = field(default_factory=lambda: KeepStates(number=0, states=(), from_step=None))
    up: deque[StatesHeld | protocol.StatesKept | PartNotCopied] = field(default_factory=deque)
    down: deque[KeepStates | CopyParts] = field(default_factory=deque)

    def held(self) -> set[HeldPart]:
        return {part for _, part in self.own} | {part for parts in self.copies.values() for part in parts}

    def save(self, part: HeldPart, num_slots: int) -> None:
        """As a rank does: into the slot that is needed least."""
        newest = self.own[-1][0] if self.own else None
        wanted = min(
            (
                state.step
                for state, _ in self.own
                if state.start == part.state.start and state.start.endswith(self.kept.start)
                and self.kept.from_step is not None and state.step >= self.kept.from_step
            ),
            default=None,
        )  # fmt: skip

        def need(slot: tuple[ScriptState, HeldPart]) -> tuple[bool, bool, bool]:
            state = slot[0]
            is_wanted = state in self.kept.states or (state.start == part.state.start and state.step == wanted)
            return state == newest, state in self.kept.states[:1], is_wanted

        if len(self.own) == num_slots:
            self.own.remove(min(self.own, key=need))
        self.own.append((part.state, part))

    def receive(self, part: HeldPart) -> bool:
        """Take in a copy; return False if there is no room for it."""
        parts = self.copies.setdefault((part.rank, part.state.start), [])
        return self.store(parts, part)

    def store(self, held: list[Held], new: Held) -> bool:
        """Store in the slot that is needed least; return False if all are kept."""
        if len(held) == COPY_SLOTS:
            worst = min(held, key=lambda each: each.state in self.kept.states)
            if worst.state in self.kept.states:
                return False
            held.remove(worst)
        held.append(new)
        return True

    def parity(self, state: ScriptState, group: tuple[int, ...]) -> HeldParity | None:
        return next((each for each in self.parities.get((group, state.start), ()) if each.state == state), None)

    def mix(self, part: HeldPart, mix: Mix) -> bool:
        """Take in a part that is mixed with others; return False if there is no room, or if it comes too late."""
        state, ranks = self.mixed.get(mix, (part.state, set()))
        if state > part.state:
            return False
        if state < part.state:
            ranks = set()
        ranks.add(part.rank)
        self.mixed[mix] = part.state, ranks
        if ranks < mix.senders:
            return True
        del self.mixed[mix]
        if mix.missing is not None:
            return self.parity(part.state, mix.ranks) is not None and self.receive(replace(part, rank=mix.missing))
        parities = self.parities.setdefault((mix.ranks, part.state.start), [])
        return self.store(parities, HeldParity(state=part.state, ranks=mix.ranks, world_size=part.world_size))

    def keep(self, order: KeepStates, start: str) -> None:
        self.kept = order
        starts = {state.start for state in order.states} | {start}
        self.copies = {key: parts for key, parts in self.copies.items() if key[1] in starts}
        self.parities = {key: each for key, each in self.parities.items() if key[1] in starts}


class Cluster:
    """Nodes, their master's bookkeeping, and what happens in a drawn order."""

    def __init__(
        self, num_nodes: int, num_copies: int, random: Random, num_slots: int = 4, parity_nodes: int = 0
    ) -> None:
        self.random = random
        self.num_slots = num_slots
        self.protects, self.has_succeeded = (num_copies, parity_nodes), False
        self.master = Copies(*self.protects)
        self.nodes = {f"node{number}": Node() for number in range(num_nodes)}
        self.domains: dict[str, str] = {}
        self.sending: list[tuple[str, ScriptState, int, str, Mix | None]] = []
        self.now_s = 0.0
        self.generation = 0
        self.step = 0
        self.last_step = 0
        """The newest one that all ranks of the generation before had saved."""
        for node in self.nodes:
            self.master.meet(node, CopyDoor(node=node, host="", port=1, ticket=b""))
        self.begin()

    @property
    def start(self) -> str:
        return f"s{self.generation}-run-{self.generation:06d}"

    def begin(self) -> None:
        """Start ranks on all nodes, from the newest state that those can read."""
        self.generation += 1
        self.last_step = self.step
        loaded = max(self.whole(self.nodes), default=None)
        self.step = loaded.step if loaded is not None else 0
        self.ahead: set[str] = set()
        if loaded is not None:
            for node in self.nodes.values():
                node.own.sort(key=lambda slot: slot[0] == loaded)  # not overwritten by the first save
        self.master.begin(self.start.partition("-")[2], self.nodes)

    def whole(self, names: Iterable[str], *, also_lost: bool = False) -> list[ScriptState]:
        """The states of which these nodes have all parts; `also_lost` counts those that follow from parities."""
        nodes = [self.nodes[name] for name in names]
        parts = [part for node in nodes for part in node.held()]
        ranks: dict[ScriptState, set[int]] = {}
        for part in parts:
            ranks.setdefault(part.state, set()).add(part.rank)
        parities = [each for node in nodes for held in node.parities.values() for each in held]
        for each in parities if also_lost else ():
            if len(lost := set(each.ranks) - ranks.get(each.state, set())) == 1:
                ranks[each.state] |= lost
        return [part.state for part in parts if len(ranks[part.state]) == part.world_size]

    def recoverable(self, names: Iterable[str]) -> list[ScriptState]:
        return self.whole(names, also_lost=True)

    def save_one(self) -> None:
        """One rank saves; none is more than a step ahead of the others."""
        behind = [name for name in self.nodes if name not in self.ahead]
        name = self.random.choice(behind)
        state = ScriptState(number=self.generation, step=self.step + 1, start=self.start)
        rank = list(self.nodes).index(name)
        part = HeldPart(
            state=state, rank=rank, world_size=len(self.nodes), is_sharded=True, can_stay=self.num_slots > 2
        )
        self.nodes[name].save(part, self.num_slots)
        self.ahead.add(name)
        if len(self.ahead) == len(self.nodes):
            self.ahead, self.step = set(), self.step + 1

    def report(self, name: str) -> None:
        node = self.nodes[name]
        parities = tuple(each for held in node.parities.values() for each in held)
        node.up.append(StatesHeld(parts=tuple(node.held()), parities=parities, kept=node.kept.number))

    def hear(self, name: str) -> None:
        while self.nodes[name].up:
            match self.nodes[name].up.popleft():
                case StatesHeld(parts=parts, parities=parities, kept=kept):
                    self.master.hold(name, parts, kept=kept, parities=parities)
                case PartNotCopied() as failed:
                    self.master.fail(name, failed, 0.0)
                case protocol.StatesKept(door=door, order=order):
                    self.master.meet(name, door)
                    self.master.recall(name, order)
        self.decide()

    def decide(self) -> None:
        self.now_s += 1.0
        for name, order in self.master.orders(self.now_s, self.domains):
            self.nodes[name].down.append(order)

    def obey(self, name: str) -> None:
        node = self.nodes[name]
        while node.down:
            match node.down.popleft():
                case KeepStates() as order:
                    node.keep(order, self.start)
                case CopyParts(state=state, parts=parts):
                    new = [(name, state, part.rank, door.node, part.mix) for part in parts for door in part.doors]
                    under_way = {self.slot_of(each) for each in self.sending if each[0] in self.nodes}
                    twice = [each for each in new if self.slot_of(each) in under_way]
                    # A copy that was asked for by another master, or of a node that is lost since, may be under way.
                    assert self.has_succeeded or self.generation > 1 or not twice, "one at a time"
                    for _, of, rank, target, _ in twice:  # a port refuses what it is receiving already
                        refused = PartNotCopied(state=of, rank=rank, target=target, reason="", is_gone=False)
                        node.up.append(refused)
                    self.sending += [each for each in new if each not in twice]

    @staticmethod
    def slot_of(sent: tuple[str, ScriptState, int, str, Mix | None]) -> tuple[object, ...]:
        """What a node takes in once at a time: of mixed parts, those of a newer state put an end to the older."""
        _, state, rank, target, mix = sent
        return (state.start if mix is None else state), rank, target, mix

    def send(self) -> None:
        """Finish a copy that is under way, if its part is still there."""
        if not self.sending:
            return
        source, state, rank, target, mix = self.sending.pop(self.random.randrange(len(self.sending)))
        if source not in self.nodes:
            return
        found = [part for part in self.nodes[source].held() if (part.state, part.rank) == (state, rank)]
        if not found or target not in self.nodes or not self.take(found[0], target, mix):
            failed = PartNotCopied(state=state, rank=rank, target=target, reason="", is_gone=not found)
            self.nodes[source].up.append(failed)

    def take(self, part: HeldPart, target: str, mix: Mix | None) -> bool:
        node = self.nodes[target]
        return node.receive(part) if mix is None else node.mix(part, mix)

    def act(self, saves_per_round: int) -> None:
        for _ in range(saves_per_round):
            self.save_one()
        for name in self.random.sample(list(self.nodes), len(self.nodes)):
            for what in self.random.sample((self.report, self.hear, self.obey), 3):
                what(name)
        self.send()

    def succeed(self) -> None:
        """Have another master take over; nodes repeat what the one before may not have processed."""
        self.has_succeeded = True
        self.master = Copies(*self.protects)
        self.master.take_over(self.nodes)
        self.master.begin(self.start.partition("-")[2], self.nodes)
        for name, node in self.nodes.items():
            node.down.clear()
            order = node.kept if node.kept.number else None
            door = CopyDoor(node=name, host="", port=1, ticket=b"")
            node.up.append(protocol.StatesKept(door=door, order=order))
            self.report(name)

    def drain(self, name: str, saves_per_round: int, waits: int) -> None:
        """Have a node leave after some more saves, once others have what they need of it."""
        self.master.leave(name)
        for _ in range(waits):
            self.act(saves_per_round)
        self.master.end()
        for each in self.nodes:
            self.report(each)
            self.hear(each)
        for _ in range(2000):
            if not self.master.is_needed(name):
                break
            self.act(0)
        else:
            raise AssertionError("the node cannot leave")
        self.lose(name)

    def lose(self, *names: str) -> None:
        for name in names:
            self.nodes.pop(name)
            self.master.end()
            self.master.drop(name)
            self.decide()
        for _ in range(2000):
            if not self.master.is_rebuilding:
                break
            self.act(0)
        else:
            raise AssertionError("the next ranks wait endlessly")
        self.begin()


def held_part(step: int, rank: int, worked_s: float) -> HeldPart:
    return HeldPart(
        state=ScriptState(number=1, step=step, start="s1-run"),
        rank=rank,
        world_size=2,
        is_sharded=True,
        progress=protocol.ScriptProgress(from_step=0, worked_s=worked_s, loss=""),
    )


reports = st.frozensets(st.builds(held_part, st.integers(1, 3), st.integers(0, 1), st.sampled_from([1.0, 2.0])))
"""What a node may hold, of which a part may be there twice: its step was saved again."""

seeds = st.integers(0, 2**32).map(Random)
clusters = st.builds(Cluster, st.integers(2, 5), st.integers(1, 2), seeds)
short_of_memory = st.builds(Cluster, st.integers(2, 5), st.integers(1, 2), seeds, st.just(2))
with_parity = st.builds(Cluster, st.integers(2, 7), st.just(1), seeds, st.just(4), st.integers(2, 4))
kinds_of_clusters = clusters | short_of_memory | with_parity


@examples(200)
@given(st.lists(st.tuples(st.sampled_from(["a", "b"]), reports), max_size=8))
def test_what_counts_is_what_nodes_report_last_each_part_once(said: list[tuple[str, frozenset[HeldPart]]]) -> None:
    master = Copies(1)
    for node in ("a", "b"):
        master.meet(node, CopyDoor(node=node, host="", port=1, ticket=b""))
    for now_s, (node, parts) in enumerate(said):
        master.hold(node, parts, kept=0)
        master.orders(float(now_s), {})
    last = dict(said)
    steps = [
        step
        for step in (1, 2, 3)
        if {part.rank for parts in last.values() for part in parts if part.state.step == step} == {0, 1}
    ]
    for node in last:
        assert master.protection.newest == max(steps, default=None)
        others = {
            part.rank for of in last.keys() - {node} for part in last[of] if steps and part.state.step == steps[-1]
        }
        assert master.is_needed(node) == (bool(steps) and others != {0, 1})
    for node in ("a", "b"):
        master.drop(node)
    master.orders(100.0, {})
    assert master.protection.newest is None


@examples(150)
@given(kinds_of_clusters, st.integers(1, 12), st.lists(st.integers(0, 60), min_size=1, max_size=4))
def test_what_is_called_protected_survives_the_loss_of_any_node_at_any_moment(
    cluster: Cluster, saves_per_round: int, waits: list[int]
) -> None:
    for wait in waits:
        for _ in range(wait):
            cluster.act(saves_per_round)
            now = cluster.master.protection
            if now.protected is None or now.num_missing:
                continue
            for lost in cluster.nodes:
                left = [name for name in cluster.nodes if name != lost]
                steps = [state.step for state in cluster.recoverable(left)]
                assert max(steps, default=0) >= now.protected, f"without {lost}, after step {cluster.step}"
        if len(cluster.nodes) > 1:
            protection = cluster.master.protection
            cluster.lose(cluster.random.choice(list(cluster.nodes)))
            if protection.protected is not None:
                assert cluster.step >= protection.protected


@examples(100)
@given(kinds_of_clusters, st.integers(1, 12), st.lists(st.tuples(st.integers(0, 60), st.integers(0, 30)), max_size=3))
def test_nodes_that_drain_hand_on_what_their_ranks_have_saved(
    cluster: Cluster, saves_per_round: int, waits: list[tuple[int, int]]
) -> None:
    for before, after in waits:
        for _ in range(before):
            cluster.act(saves_per_round)
        if len(cluster.nodes) > 1:
            cluster.drain(cluster.random.choice(list(cluster.nodes)), saves_per_round, after)
            assert cluster.step == cluster.last_step, "not the newest state that all ranks have saved"


def test_ranks_on_one_node_may_begin_before_a_draining_node_has_handed_on_its_parts() -> None:
    cluster = Cluster(2, 1, Random(0))
    while cluster.master.protection.protected is None:
        cluster.act(1)
    cluster.save_one()
    cluster.save_one()
    cluster.master.leave("node0")
    cluster.master.begin("run-000002", ["node1"])
    for name in cluster.nodes:
        cluster.report(name)
        cluster.hear(name)
    assert cluster.master.is_needed("node0")
    for _ in range(20):
        cluster.act(0)
    assert not cluster.master.is_needed("node0")


@examples(100)
@given(st.integers(1, 3), seeds, st.integers(1, 12), st.integers(0, 120))
def test_one_copy_survives_the_loss_of_either_of_two_domains_of_one_size(
    size: int, random: Random, saves_per_round: int, wait: int
) -> None:
    cluster = Cluster(2 * size, 1, random)
    sides = random.sample(["left", "right"] * size, 2 * size)
    cluster.domains = dict(zip(cluster.nodes, sides, strict=True))
    for _ in range(wait):
        cluster.act(saves_per_round)
        now = cluster.master.protection
        for lost in ("left", "right"):
            left = [name for name, side in cluster.domains.items() if side != lost]
            steps = [state.step for state in cluster.whole(left)]
            assert now.protected is None or max(steps, default=0) >= now.protected, f"without {lost}"
    protected = cluster.master.protection.protected
    cluster.lose(*(name for name, side in cluster.domains.items() if side == "left"))
    assert cluster.step >= (protected or 0)


@examples(100)
@given(clusters | with_parity, st.integers(1, 12), st.lists(st.integers(0, 60), min_size=1, max_size=4))
def test_what_was_protected_under_the_master_before_stays_until_something_newer_is(
    cluster: Cluster, saves_per_round: int, waits: list[int]
) -> None:
    protected = 0
    for wait in waits:
        for _ in range(wait):
            cluster.act(saves_per_round)
            now = cluster.master.protection
            if now.protected is not None and not now.num_missing:
                protected = now.protected
            for lost in cluster.nodes:
                left = [name for name in cluster.nodes if name != lost]
                assert max((state.step for state in cluster.recoverable(left)), default=0) >= protected, lost
        cluster.succeed()


@pytest.mark.slow
@examples(50)
@given(clusters | with_parity, st.integers(1, 20))
def test_states_are_protected_again_and_again_however_fast_ranks_save(cluster: Cluster, saves_per_round: int) -> None:
    for _ in range(400):
        cluster.act(saves_per_round)
        if cluster.master.protection.protected is not None:
            break
    first = cluster.master.protection.protected
    assert first is not None
    for _ in range(800):
        cluster.act(saves_per_round)
    later = cluster.master.protection.protected
    assert later is not None
    assert later > first


@examples(50)
@given(clusters | with_parity)
def test_what_protects_is_made_again_after_a_loss_without_a_save(cluster: Cluster) -> None:
    while cluster.master.protection.protected is None:
        cluster.act(1)
    if len(cluster.nodes) < 3:
        return
    cluster.lose(cluster.random.choice(list(cluster.nodes)))
    step = cluster.step
    for _ in range(200):
        cluster.act(0)
    assert cluster.master.protection.num_missing == 0
    for lost in cluster.nodes:
        left = [name for name in cluster.nodes if name != lost]
        assert max(state.step for state in cluster.recoverable(left)) == step
