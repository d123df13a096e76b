"""`oobleck plan`: the plan of a job that need not exist, on a cluster that one need not have."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from oobleck.errors import UsageError
from oobleck.job import MAX_MICROBATCHES

from . import inputs
from .common_options import JsonOption

if TYPE_CHECKING:
    from collections.abc import Sequence

    from oobleck.planner import NodeKind, PlannerSettings
    from oobleck.schedule import ScheduleKind


_NodesOption = Annotated[
    str,
    typer.Option(
        "--nodes",
        metavar="N",
        help="Nodes to plan for: 16 (node0, node1, …), or of several kinds: A100:16,A40:16x4 (A100-0, …).",
    ),
]
_ScheduleOption = Annotated[
    str,
    typer.Option("--schedule", help="gpipe, 1f1b, interleaved, zero-bubble, or auto (the fastest but gpipe)."),
]
_ProfilesOption = Annotated[
    str | None,
    typer.Option(
        "--profiles", metavar="KIND:FILE,…", help="Profiles of kinds of nodes; estimates where it is missing."
    ),
]
_PricesOption = Annotated[
    str | None,
    typer.Option(
        "--prices",
        metavar="KIND:PRICE,…",
        help="What a node of each kind costs an hour: also say which nodes train most for their price.",
    ),
]
_AfterLosingOption = Annotated[
    str | None,
    typer.Option("--after-losing", metavar="NODES", help="Show what happens after losing these nodes: node3,node7."),
]
_PlotOption = Annotated[
    Path | None,
    typer.Option("--plot", metavar="FILE", help="Draw the timeline as .svg, or as .png with the plot extra."),
]
_TraceOption = Annotated[
    Path | None, typer.Option("--chrome-trace", metavar="FILE", help="Write the timeline for Perfetto.")
]


def plan(
    *,
    profile_file: inputs.ProfileOption = None,
    model: inputs.ModelOption = None,
    device: inputs.DeviceOption = None,
    nodes: _NodesOption,
    devices_per_node: inputs.DevicesPerNodeOption = 1,
    fault_threshold: inputs.FaultThresholdOption = 1,
    global_batch: inputs.GlobalBatchOption,
    microbatch: inputs.MicrobatchOption = None,
    sequence_length: inputs.SequenceLengthOption = None,
    precision: inputs.PrecisionOption = "bfloat16",
    recompute: inputs.RecomputeOption = False,
    pipelines: inputs.PipelinesOption = None,
    schedule: _ScheduleOption = "1f1b",
    chunks: inputs.ChunksOption = 2,
    profiles: _ProfilesOption = None,
    prices: _PricesOption = None,
    after_losing: _AfterLosingOption = None,
    as_json: JsonOption = False,
    plot: _PlotOption = None,
    chrome_trace: _TraceOption = None,
) -> None:
    """Show the pipelines that a job would use, how long a step would take, and what failures would do.

    Nothing is started and no device is needed: the numbers come from a measured profile, or from an estimate.
    """
    from oobleck.planner import Planner
    from oobleck.schedule.interleaving import make_cutter
    from oobleck.ui.pictures import chrome_trace as trace_of
    from oobleck.ui.pictures import timeline_svg
    from oobleck.ui.plan_report import figures_of

    from .make_report import make_report, show_report
    from .pictures import picture_writer, write_output
    from .plan_profile import ProfileSource, kinds_of, utilisation_of

    counts = inputs.parse_nodes(nodes)
    write_picture = picture_writer(plot) if plot is not None else None
    source = ProfileSource(
        file=profile_file,
        model=model,
        device=device,
        microbatch_size=microbatch,
        sequence_length=sequence_length,
        precision=precision,
        activation_checkpointing=recompute,
        devices_per_node=devices_per_node,
    )
    kinds, kind_of = kinds_of(counts, source, profiles)
    if isinstance(counts, int) and prices is not None:
        raise UsageError("--prices is for nodes of several kinds; name them, as in --nodes A100:16,A40:16")
    if len(kinds) > 1 and schedule == "interleaved":
        raise UsageError("--schedule is interleaved; pipelines of several kinds of nodes have one chunk a stage")
    names, lost = tuple(kind_of), tuple(name.strip() for name in after_losing.split(",")) if after_losing else ()
    if unknown := sorted(set(lost) - set(names)):
        raise UsageError(f"--after-losing names {unknown[0]!r}; the nodes are {names[0]} to {names[-1]}")
    kind = _kind(schedule)
    settings = _settings(kinds, global_batch, fault_threshold=fault_threshold, num_pipelines=pipelines)
    report = make_report(
        Planner(kinds, settings, kind_of, make_cutter=make_cutter(kind, chunks)),
        names,
        global_batch_size=global_batch,
        kind=kind,
        lost=lost,
        utilisation=utilisation_of(kinds[0].profile, source, global_batch) if isinstance(counts, int) else None,
        prices=inputs.parse_prices(prices, [kind.name for kind in kinds]) if prices is not None else None,
    )
    figures = figures_of(report.shown)
    if write_picture is not None:
        write_picture(timeline_svg(figures))
    if chrome_trace is not None:
        write_output(chrome_trace, trace_of(figures).encode())
    show_report(report, as_json=as_json)


def _settings(
    kinds: Sequence[NodeKind], global_batch_size: int, *, fault_threshold: int, num_pipelines: int | None
) -> PlannerSettings:
    from oobleck.planner import PlannerSettings

    microbatch_size = kinds[0].profile.microbatch_size
    if global_batch_size % microbatch_size:
        raise UsageError(
            f"--global-batch is {global_batch_size}; it must be a multiple of {microbatch_size}, the microbatch"
        )
    if global_batch_size > MAX_MICROBATCHES * microbatch_size:
        raise UsageError(
            f"--global-batch is {global_batch_size}; it must be at most {MAX_MICROBATCHES:,} microbatches of "
            f"{microbatch_size}"
        )
    return PlannerSettings(
        num_microbatches=global_batch_size // microbatch_size,
        max_devices_per_stage=kinds[0].devices_per_node if len(kinds) == 1 else 1,
        fault_threshold=fault_threshold,
        num_pipelines=num_pipelines,
    )


def _kind(name: str) -> ScheduleKind | None:
    from oobleck.schedule import ScheduleKind

    return None if inputs.parse_schedule_name(name) == "auto" else ScheduleKind(name)
