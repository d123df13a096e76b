"""The node check before a job: which nodes of a hostfile begin, and what is said of the others.

Virtual nodes are not checked: they are one machine, whose faults all of them would share.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set

from oobleck.control.events import NodeLeftOut, Remark
from oobleck.control.node_check import CheckedNode, CheckReport, Health
from oobleck.job import NodeSpec


def choose_nodes(
    nodes: Sequence[NodeSpec], report: CheckReport, *, leaves_out_slow: bool = False
) -> tuple[tuple[NodeSpec, ...], tuple[NodeLeftOut | Remark, ...]]:
    """Return the nodes to begin with, and what the journal should say.

    Nodes that were reached and found faulty are left out, unless none would be left. A node that was not reached is
    the run's to try again. Slow nodes take part, as they get fewer microbatches, unless they are to be left out.
    """
    reasons = {Health.FAULTY, Health.SLOW} if leaves_out_slow else {Health.FAULTY}
    at_fault = {checked.verdict.node for checked in report.nodes if _is_at_fault(checked, reasons)}
    kept = tuple(spec for spec in nodes if spec.name not in at_fault)
    return kept or tuple(nodes), tuple(_remarks(report, at_fault if kept else set()))


def _is_at_fault(checked: CheckedNode, reasons: Set[Health]) -> bool:
    return checked.facts is not None and checked.verdict.health in reasons


def _remarks(report: CheckReport, left_out: set[str]) -> Iterator[NodeLeftOut | Remark]:
    if report.is_healthy:
        yield Remark(
            level="info", text=f"{len(report.nodes)} nodes are healthy; the check took {report.elapsed_s:.1f} s"
        )
    for link in report.links:
        yield Remark(level="warning", text=f"the link between {' and '.join(link.nodes)} is not healthy: {link.reason}")
    for checked in report.nodes:
        node, verdict = checked.verdict.node, checked.verdict
        if node in left_out:
            yield NodeLeftOut(node=node, fault=verdict.reason)
        elif verdict.health is not Health.HEALTHY:
            yield Remark(level="warning", text=f"{node} is {verdict.health}: {verdict.reason}")
