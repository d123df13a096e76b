"""Which nodes begin after a check, and what is said of the others."""

from __future__ import annotations

from oobleck.cli.wiring.places import choose_nodes
from oobleck.control.events import NodeLeftOut
from oobleck.control.node_check.messages import NodeFacts
from oobleck.control.node_check.report import CheckedNode, CheckReport
from oobleck.control.node_check.rounds import Health, LinkVerdict, NodeVerdict
from oobleck.job import NodeSpec

FACTS = NodeFacts(
    pid=1, hostname="h", clock_s=0.0, versions={}, num_cpus=1, cuda_devices=(), free_disk_bytes=1, memory_bytes=1
)
NODES = tuple(NodeSpec(name=name, host=name) for name in ("a", "b", "c"))


def report(*healths: Health, unreached: str = "", links: tuple[LinkVerdict, ...] = ()) -> CheckReport:
    nodes = tuple(
        CheckedNode(
            verdict=NodeVerdict(node=spec.name, health=health, reason=f"{spec.name} is said to be so"),
            facts=None if spec.name == unreached else FACTS,
        )
        for spec, health in zip(NODES, healths, strict=True)
    )
    return CheckReport(nodes=nodes, links=links, exchanges=(), num_rounds=2, elapsed_s=8.0)


def test_healthy_nodes_all_begin():
    kept, remarks = choose_nodes(NODES, report(Health.HEALTHY, Health.HEALTHY, Health.HEALTHY))
    assert kept == NODES
    (remark,) = remarks
    assert remark.level == "info"
    assert remark.text.startswith("3 nodes ")


def test_a_faulty_node_is_left_out_and_named():
    kept, remarks = choose_nodes(NODES, report(Health.HEALTHY, Health.FAULTY, Health.HEALTHY))
    assert [spec.name for spec in kept] == ["a", "c"]
    assert remarks == (NodeLeftOut(node="b", fault="b is said to be so"),)


def test_slow_undecided_and_unreachable_nodes_begin_and_are_named():
    found = report(Health.SLOW, Health.UNDECIDED, Health.FAULTY, unreached="c")
    kept, remarks = choose_nodes(NODES, found)
    assert kept == NODES
    assert [remark.text.split()[0] for remark in remarks] == ["a", "b", "c"]
    assert all(health in remark.text for health, remark in zip(("slow", "undecided", "faulty"), remarks, strict=True))


def test_slow_nodes_are_left_out_where_that_is_asked_for():
    found = report(Health.SLOW, Health.HEALTHY, Health.SLOW, unreached="c")
    kept, _ = choose_nodes(NODES, found, leaves_out_slow=True)
    assert [spec.name for spec in kept] == ["b", "c"], "c was not reached: it is tried again"


def test_a_link_is_named_and_its_nodes_begin():
    link = LinkVerdict(nodes=("a", "b"), reason="nothing arrives")
    kept, (remark,) = choose_nodes(NODES, report(*3 * [Health.HEALTHY], links=(link,)))
    assert kept == NODES
    assert "a and b" in remark.text


def test_where_all_are_faulty_the_run_itself_is_to_say_why():
    kept, remarks = choose_nodes(NODES, report(*3 * [Health.FAULTY]))
    assert kept == NODES
    assert not any(isinstance(remark, NodeLeftOut) for remark in remarks)
