"""`oobleck plan`: the plan of a job that need not exist, on a cluster that one need not have."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from oobleck.errors import UsageError

from . import inputs
from .common_options import JsonOption, takes_options

if TYPE_CHECKING:
    from collections.abc import Sequence

    from oobleck.planner import NodeKind, PlannerSettings
    from oobleck.schedule import ScheduleKind
    from oobleck.ui.plan_report import PlanReport


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What is given to `oobleck plan`."""

    model: inputs.ModelOptions
    nodes: Annotated[
        str,
        typer.Option(
            "--nodes",
            metavar="N",
            help="Nodes to plan for: 16 (node0, node1, …), or of several kinds: A100:16,A40:16x4 (A100-0, …).",
        ),
    ]
    devices_per_node: inputs.DevicesPerNodeOption = 1
    fault_threshold: inputs.FaultThresholdOption = 1
    batch: inputs.BatchOptions
    pipelines: inputs.PipelinesOption = None
    schedule: Annotated[
        str,
        typer.Option("--schedule", help="gpipe, 1f1b, interleaved, zero-bubble, or auto (the fastest but gpipe)."),
    ] = "1f1b"
    chunks: inputs.ChunksOption = 2
    profiles: Annotated[
        str | None,
        typer.Option(
            "--profiles", metavar="KIND:FILE,…", help="Profiles of kinds of nodes; estimates where it is missing."
        ),
    ] = None
    prices: Annotated[
        str | None,
        typer.Option(
            "--prices",
            metavar="KIND:PRICE,…",
            help="What a node of each kind costs an hour: also say which nodes train most for their price.",
        ),
    ] = None
    after_losing: Annotated[
        str | None,
        typer.Option(
            "--after-losing", metavar="NODES", help="Show what happens after losing these nodes: node3,node7."
        ),
    ] = None
    as_json: JsonOption = False
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE", help="Draw the timeline as .svg, or as .png with the plot extra."),
    ] = None
    chrome_trace: Annotated[
        Path | None, typer.Option("--chrome-trace", metavar="FILE", help="Write the timeline for Perfetto.")
    ] = None


@takes_options(PlanOptions)
def plan(options: PlanOptions) -> None:
    """Show the pipelines that a job would use, how long a step would take, and what failures would do.

    Nothing is started and no device is needed: the numbers come from a measured profile, or from an estimate.
    """
    from oobleck.ui.pictures import chrome_trace, timeline_svg
    from oobleck.ui.plan_report import figures_of

    from .make_report import show_report
    from .pictures import picture_writer, write_output

    counts = inputs.parse_nodes(options.nodes)
    write_picture = picture_writer(options.plot) if options.plot is not None else None
    report = _report(options, counts)
    figures = figures_of(report.shown)
    if write_picture is not None:
        write_picture(timeline_svg(figures))
    if options.chrome_trace is not None:
        write_output(options.chrome_trace, chrome_trace(figures).encode())
    show_report(report, as_json=options.as_json)


def _report(options: PlanOptions, counts: int | tuple[inputs.KindCount, ...]) -> PlanReport:
    from oobleck.planner import Planner
    from oobleck.schedule.interleaving import make_cutter

    from .make_report import make_report
    from .plan_profile import ProfileSource, kinds_of, utilisation_of

    batch = options.batch.global_batch
    source = ProfileSource.of(options.model, options.batch, options.devices_per_node)
    kinds, kind_of = kinds_of(counts, source, options.profiles)
    if isinstance(counts, int) and options.prices is not None:
        raise UsageError("--prices is for nodes of several kinds; name them, as in --nodes A100:16,A40:16")
    if len(kinds) > 1 and options.schedule == "interleaved":
        raise UsageError("--schedule is interleaved; pipelines of several kinds of nodes have one chunk a stage")
    names, after = tuple(kind_of), options.after_losing
    lost = tuple(name.strip() for name in after.split(",")) if after else ()
    if unknown := sorted(set(lost) - set(names)):
        raise UsageError(f"--after-losing names {unknown[0]!r}; the nodes are {names[0]} to {names[-1]}")
    kind, known = _kind(options.schedule), [kind.name for kind in kinds]
    return make_report(
        Planner(kinds, _settings(options, kinds), kind_of, make_cutter=make_cutter(kind, options.chunks)),
        names,
        global_batch_size=batch,
        kind=kind,
        lost=lost,
        utilisation=utilisation_of(kinds[0].profile, source, batch) if isinstance(counts, int) else None,
        prices=inputs.parse_prices(options.prices, known) if options.prices is not None else None,
    )


def _settings(options: PlanOptions, kinds: Sequence[NodeKind]) -> PlannerSettings:
    from oobleck.planner import PlannerSettings

    from .plan_profile import check_batch

    batch, microbatch = options.batch.global_batch, kinds[0].profile.microbatch_size
    check_batch(batch, microbatch)
    return PlannerSettings(
        num_microbatches=batch // microbatch,
        max_devices_per_stage=kinds[0].devices_per_node if len(kinds) == 1 else 1,
        fault_threshold=options.fault_threshold,
        num_pipelines=options.pipelines,
    )


def _kind(name: str) -> ScheduleKind | None:
    from oobleck.schedule import ScheduleKind

    return None if inputs.parse_schedule_name(name) == "auto" else ScheduleKind(name)
