"""The node check: faults are found, whoever they are paired with, and nobody else is named for them."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from oobleck.control.node_check.rounds import CheckVerdict, Health, NodeCheck, PairResult, SoloResult

PROVING_ROUNDS = 4


@dataclass
class Cluster:
    """Nodes and links with faults; every measurement is a little off, as in the world."""

    num_nodes: int
    broken_alone: set[str] = field(default_factory=set)
    slow_alone: dict[str, float] = field(default_factory=dict)
    dead_network: set[str] = field(default_factory=set)
    slow_network: dict[str, float] = field(default_factory=dict)
    links: dict[tuple[str, str], float | None] = field(default_factory=dict)
    """None for a dead link, else how many times slower it is."""
    generator: random.Random = field(default_factory=lambda: random.Random(0))
    num_rounds: int = 0
    tested: set[tuple[str, str]] = field(default_factory=set)

    @property
    def nodes(self) -> list[str]:
        return [f"node{index:02}" for index in range(self.num_nodes)]

    @property
    def at_fault(self) -> set[str]:
        return self.broken_alone | set(self.slow_alone) | self.dead_network | set(self.slow_network)

    def alone(self, node: str) -> SoloResult:
        if node in self.broken_alone:
            return SoloResult(node=node, error="matrix product is wrong")
        factor = self.slow_alone.get(node, 1.0)
        return SoloResult(
            node=node,
            seconds={
                "compute": factor * self.noise(0.2),
                "memory": self.noise(0.1),
                "disk": self.noise(0.05) * self.noise(1),
            },
        )

    def together(self, pair: tuple[str, str]) -> PairResult:
        key = tuple(sorted(pair))
        assert len(key) == 2
        self.tested.add(key)
        link = self.links.get(key, 1.0)
        if link is None or self.dead_network.intersection(pair):
            return PairResult(nodes=pair, error="nothing came within 10 s")
        slowest = max(link, *(max(self.slow_network.get(n, 1.0), self.slow_alone.get(n, 1.0)) for n in pair))
        return PairResult(nodes=pair, seconds=slowest * self.noise(0.01))

    def noise(self, seconds: float) -> float:
        return seconds * self.generator.uniform(1.0, 1.15)

    def check(self) -> CheckVerdict:
        check = NodeCheck(self.nodes)
        while (tests := check.next_round()) is not None:
            self.num_rounds += 1
            check.take([self.alone(node) for node in tests.solo], [self.together(pair) for pair in tests.pairs])
        return check.verdict()


def random_cluster(num_nodes: int, seed: int) -> Cluster:
    """Up to a quarter as many faults as there are nodes, of nodes and of links."""
    generator = random.Random(f"{num_nodes}/{seed}")
    cluster = Cluster(num_nodes, generator=generator)
    for _ in range(generator.randint(0, num_nodes // 4)):
        node, other = generator.sample(cluster.nodes, 2)
        factor = generator.uniform(3.0, 20.0)
        match generator.choice(["broken", "slow", "dead network", "slow network", "dead link", "slow link"]):
            case "broken":
                cluster.broken_alone.add(node)
            case "slow":
                cluster.slow_alone[node] = factor
            case "dead network":
                cluster.dead_network.add(node)
            case "slow network":
                cluster.slow_network[node] = factor
            case "dead link":
                cluster.links[tuple(sorted((node, other)))] = None  # type: ignore[index]
            case _:
                cluster.links[tuple(sorted((node, other)))] = factor  # type: ignore[index]
    return cluster


@pytest.mark.parametrize("num_nodes", [4, 5, 8, 16, 64])
def test_up_to_a_quarter_of_faults_is_found_and_no_healthy_node_condemned(num_nodes):
    for seed in range(300):
        cluster = random_cluster(num_nodes, seed)
        verdict = cluster.check()
        condemned = {node.node for node in verdict.nodes if node.health is not Health.HEALTHY}
        ends = [node for link in cluster.links for node in link]
        # A node at the end of two faulty links cannot be told from one whose own network is at fault.
        ambiguous = {node for node in ends if ends.count(node) > 1}
        assert cluster.at_fault <= condemned <= cluster.at_fault | ambiguous, seed
        assert all(node.health is not Health.UNDECIDED for node in verdict.nodes), seed
        named = {link.nodes for link in verdict.links}
        healthy = {link for link in cluster.links.keys() & cluster.tested if not condemned.intersection(link)}
        assert named == healthy, seed
        assert cluster.num_rounds <= PROVING_ROUNDS, seed


@pytest.mark.parametrize("num_nodes", [4, 5, 8, 16])
def test_each_single_fault_is_named_as_what_it_is(num_nodes):
    for index in range(num_nodes):
        node = f"node{index:02}"
        for health, faults in [
            (Health.FAULTY, {"broken_alone": {node}}),
            (Health.SLOW, {"slow_alone": {node: 3.0}}),
            (Health.FAULTY, {"dead_network": {node}}),
            (Health.SLOW, {"slow_network": {node: 5.0}}),
        ]:
            verdict = Cluster(num_nodes, **faults).check()  # type: ignore[arg-type]
            assert {n.node: n.health for n in verdict.nodes if n.health is not Health.HEALTHY} == {node: health}


def test_how_slow_a_node_is_is_told():
    verdict = Cluster(4, slow_alone={"node02": 4.0}).check()
    slow = verdict.nodes[2]
    assert slow.factor == pytest.approx(4.0, rel=0.2)
    assert "compute" in slow.reason


def test_a_bad_link_is_named_and_not_its_ends():
    verdict = Cluster(4, links={("node00", "node01"): None}).check()
    assert [node.health for node in verdict.nodes] == [Health.HEALTHY] * 4
    assert [link.nodes for link in verdict.links] == [("node00", "node01")]
    assert not verdict.is_healthy


def test_a_node_that_was_slow_once_and_not_again_is_healthy():
    cluster = Cluster(4, slow_alone={"node01": 3.0})
    check = NodeCheck(cluster.nodes)
    while (tests := check.next_round()) is not None:
        check.take([cluster.alone(node) for node in tests.solo], [cluster.together(pair) for pair in tests.pairs])
        cluster.slow_alone.clear()
    assert check.verdict().is_healthy


def test_one_node_is_judged_alone():
    assert Cluster(1).check().is_healthy
    assert Cluster(1, broken_alone={"node00"}).check().nodes[0].health is Health.FAULTY


def test_two_nodes_that_do_not_work_together_are_both_undecided():
    verdict = Cluster(2, links={("node00", "node01"): None}).check()
    assert [node.health for node in verdict.nodes] == [Health.UNDECIDED] * 2


def test_of_three_nodes_the_faulty_one_is_named_whoever_it_is_paired_with():
    for node in ("node00", "node01", "node02"):
        verdict = Cluster(3, dead_network={node}).check()
        assert {n.node for n in verdict.nodes if n.health is not Health.HEALTHY} == {node}


def test_a_node_that_cannot_be_reached_is_not_tested_again():
    check = NodeCheck(["a", "b", "c"])
    assert check.next_round() is not None
    good = {"compute": 1.0}
    gone = SoloResult(node="c", error="no route to host", is_final=True)
    check.take([SoloResult(node="a", seconds=good), SoloResult(node="b", seconds=good), gone], [])
    tests = check.next_round()
    assert tests is not None
    assert tests.pairs == (("a", "b"),)
    check.take([], [PairResult(nodes=("a", "b"), seconds=0.01)])
    assert check.next_round() is None
    assert [(n.health, n.reason) for n in check.verdict().nodes][2] == (Health.FAULTY, "no route to host")


def test_nothing_is_asked_for_ever_when_all_fail():
    cluster = Cluster(9, dead_network={f"node{index:02}" for index in range(9)})
    verdict = cluster.check()
    assert cluster.num_rounds <= 6
    assert all(node.health is Health.UNDECIDED for node in verdict.nodes)


def test_nodes_are_compared_with_those_that_have_such_devices():
    """Four nodes of another kind are three times slower, and one of them is slow even so."""
    seconds = {f"f{number}": 1.0 for number in range(6)} | {"s0": 3.0, "s1": 3.1, "s2": 9.0, "s3": 2.9}
    for device_of, expected in (
        ({node: node[0] for node in seconds}, {"s2"}),
        (None, {"s0", "s1", "s2", "s3"}),
    ):
        check = NodeCheck(list(seconds), device_of=device_of)
        while (tests := check.next_round()) is not None:
            check.take(
                [SoloResult(node=node, seconds={"compute": seconds[node]}) for node in tests.solo],
                [PairResult(nodes=pair, seconds=0.1) for pair in tests.pairs],
            )
        slow = {each.node for each in check.verdict().nodes if each.health is Health.SLOW}
        assert slow == expected
