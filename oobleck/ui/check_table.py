"""The table of a node check."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from oobleck.control.node_check import CheckedNode, CheckReport, Health, sentences_of
from oobleck.planner.formatting import counted

from .formatting import bytes_text, one_line

_STYLES = {Health.HEALTHY: "green", Health.SLOW: "yellow", Health.FAULTY: "bold red", Health.UNDECIDED: "yellow"}
# As in `training/process/node_probe.py`, which would load torch.
_COPY_BYTES = 32 << 20
_EXCHANGE_BYTES = 8 << 20


def check_table(report: CheckReport) -> RenderableType:
    """Draw a report: a row for each node, then all problems, then one line that sums up."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("node", no_wrap=True)
    table.add_column("health", no_wrap=True)
    for header in ("product", "memory", "disk", "devices"):
        table.add_column(header, justify="right", no_wrap=True)
    for node in report.nodes:
        table.add_row(*_cells(node))
    return Group(table, *_complaints(report), _exchanges(report), _conclusion(report))


def _cells(node: CheckedNode) -> tuple[RenderableType, ...]:
    health = node.verdict.health
    seconds, facts = node.seconds, node.facts
    compute = f"{1000 * seconds['compute']:.2f} ms" if "compute" in seconds else "–"
    memory = f"{bytes_text(_COPY_BYTES / seconds['memory'])}/s" if "memory" in seconds else "–"
    disk = f"{bytes_text((16 << 20) / seconds['disk'])}/s" if "disk" in seconds else "–"
    devices = "–"
    if facts is not None:
        count = len(facts.cuda_devices)
        devices = f"{count} × {facts.cuda_devices[0]}" if count else f"{facts.num_cpus} CPUs"
    return node.verdict.node, Text(health.value, style=_STYLES[health]), compute, memory, disk, devices


def _complaints(report: CheckReport) -> Iterator[Text]:
    for node in report.nodes:
        verdict = node.verdict
        if verdict.reason:
            yield Text(f"{verdict.node}: {one_line(verdict.reason)}", style=_STYLES[verdict.health])
        for health in (Health.FAULTY, Health.SLOW, Health.HEALTHY):
            for sentence in sentences_of(each for each in node.findings if each.health is health):
                if sentence != verdict.reason:
                    style = "yellow" if health is Health.HEALTHY else _STYLES[health]
                    yield Text(f"{verdict.node}: {one_line(sentence)}", style=style)
        if (speeds := _speeds(node)) is not None:
            yield speeds
        for warning in node.warnings:
            yield Text(f"{verdict.node}: {one_line(warning)}", style="yellow")
    for link in report.links:
        yield Text(f"link {link.nodes[0]} to {link.nodes[1]}: {one_line(link.reason)}", style="bold red")


def _speeds(node: CheckedNode) -> Text | None:
    products = sorted(each.product_flops for each in node.gpus if each.product_flops is not None)
    copies = sorted(each.memory_bytes_per_s for each in node.gpus if each.memory_bytes_per_s is not None)
    if not products or not copies:
        return None
    return Text(
        f"{node.verdict.node}: its GPUs reach {products[0] / 1e12:.0f} to {products[-1] / 1e12:.0f} TFLOP/s in "
        f"bfloat16, and copy at {bytes_text(copies[0])}/s to {bytes_text(copies[-1])}/s"
    )


def _exchanges(report: CheckReport) -> Text:
    if not report.exchanges:
        return Text("no two nodes have exchanged anything")
    rates = sorted(_EXCHANGE_BYTES / seconds for _, _, _, seconds in report.exchanges)
    latencies_ms = sorted(1000 * latency_s for _, _, latency_s, _ in report.exchanges)
    return Text(
        f"pairs exchange {bytes_text(rates[0])}/s to {bytes_text(rates[-1])}/s each way; "
        f"a number takes {latencies_ms[0]:.2f} to {latencies_ms[-1]:.2f} ms"
    )


def _conclusion(report: CheckReport) -> Text:
    bad = [node.verdict for node in report.nodes if node.verdict.health is not Health.HEALTHY]
    took = f"{counted(report.num_rounds, 'round')} in {report.elapsed_s:.1f} s"
    if report.is_healthy:
        return Text(f"all {len(report.nodes)} nodes are healthy ({took})", style="green")
    if bad:
        names = ", ".join(f"{verdict.node} ({verdict.health.value})" for verdict in bad)
        return Text(f"not healthy: {names}; leave them out of the hostfile, or repair them ({took})", style="bold red")
    return Text(f"all nodes are healthy, but not all links between them ({took})", style="bold red")
