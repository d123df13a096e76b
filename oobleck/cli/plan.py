"""`oobleck plan`: the plan of a job that need not exist, on a cluster that one need not have."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from oobleck.errors import UsageError
from oobleck.job import MAX_MICROBATCHES, MAX_NODES

from .inputs import (
    DeviceOption,
    DevicesPerNodeOption,
    FaultThresholdOption,
    GlobalBatchOption,
    JsonOption,
    MicrobatchOption,
    ModelOption,
    PipelinesOption,
    PrecisionOption,
    ProfileOption,
    RecomputeOption,
    SequenceLengthOption,
    parse_schedule_name,
    whole,
)

if TYPE_CHECKING:
    from oobleck.planner import Planner, Profile
    from oobleck.schedule import ScheduleKind
    from oobleck.ui.plan_report import PlanReport

__all__ = ["plan"]


def plan(
    *,
    profile_file: ProfileOption = None,
    model: ModelOption = None,
    device: DeviceOption = None,
    nodes: Annotated[
        int, typer.Option("--nodes", metavar="N", parser=whole(1, MAX_NODES), help="Nodes to plan for: node0, node1, …")
    ],
    devices_per_node: DevicesPerNodeOption = 1,
    fault_threshold: FaultThresholdOption = 1,
    global_batch: GlobalBatchOption,
    microbatch: MicrobatchOption = None,
    sequence_length: SequenceLengthOption = None,
    precision: PrecisionOption = "bfloat16",
    recompute: RecomputeOption = False,
    pipelines: PipelinesOption = None,
    schedule: Annotated[
        str, typer.Option("--schedule", help="gpipe, 1f1b, zero-bubble, or auto (the faster of the last two).")
    ] = "1f1b",
    after_losing: Annotated[
        str | None,
        typer.Option(
            "--after-losing", metavar="NODES", help="Show what happens after losing these nodes: node3,node7."
        ),
    ] = None,
    as_json: JsonOption = False,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE", help="Draw the timeline as .svg, or as .png with the plot extra."),
    ] = None,
    chrome_trace: Annotated[
        Path | None, typer.Option("--chrome-trace", metavar="FILE", help="Write the timeline for Perfetto.")
    ] = None,
) -> None:
    """Show the pipelines that a job would use, how long a step would take, and what failures would do.

    Nothing is started and no device is needed: the numbers come from a measured profile, or from an estimate.
    """
    from .make_report import make_report, show_report
    from .pictures import picture_writer, write_output
    from .plan_profile import ProfileSource, profile_of, utilisation_of

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
    profile = profile_of(source)
    lost = tuple(name.strip() for name in after_losing.split(",")) if after_losing else ()
    planner = _planner(
        profile,
        devices_per_node=devices_per_node,
        fault_threshold=fault_threshold,
        global_batch_size=global_batch,
        num_pipelines=pipelines,
    )
    report = make_report(
        planner,
        _names(nodes, lost),
        global_batch_size=global_batch,
        kind=_kind(schedule),
        lost=lost,
        utilisation=utilisation_of(profile, source, global_batch),
    )
    if write_picture is not None:
        write_picture(_svg(report))
    if chrome_trace is not None:
        write_output(chrome_trace, _trace(report).encode())
    show_report(report, as_json=as_json)


def _planner(
    profile: Profile,
    *,
    devices_per_node: int,
    fault_threshold: int,
    global_batch_size: int,
    num_pipelines: int | None,
) -> Planner:
    from oobleck.planner import Planner, PlannerSettings

    if global_batch_size % profile.microbatch_size:
        raise UsageError(
            f"--global-batch is {global_batch_size}; it must be a multiple of {profile.microbatch_size}, the microbatch"
        )
    if global_batch_size > MAX_MICROBATCHES * profile.microbatch_size:
        raise UsageError(
            f"--global-batch is {global_batch_size}; it must be at most {MAX_MICROBATCHES:,} microbatches of "
            f"{profile.microbatch_size}"
        )
    settings = PlannerSettings(
        num_microbatches=global_batch_size // profile.microbatch_size,
        devices_per_node=devices_per_node,
        max_devices_per_stage=devices_per_node,
        fault_threshold=fault_threshold,
        num_pipelines=num_pipelines,
    )
    return Planner(profile, settings)


def _kind(name: str) -> ScheduleKind | None:
    from oobleck.schedule import ScheduleKind

    return None if parse_schedule_name(name) == "auto" else ScheduleKind(name)


def _names(num_nodes: int, lost: tuple[str, ...]) -> tuple[str, ...]:
    names = tuple(f"node{number}" for number in range(num_nodes))
    if unknown := sorted(set(lost) - set(names)):
        raise UsageError(f"--after-losing names {unknown[0]!r}; the nodes are {names[0]} to {names[-1]}")
    return names


def _svg(report: PlanReport) -> str:
    from oobleck.ui.pictures import timeline_svg
    from oobleck.ui.plan_report import figures_of

    return timeline_svg(figures_of(report.shown))


def _trace(report: PlanReport) -> str:
    from oobleck.ui.pictures import chrome_trace
    from oobleck.ui.plan_report import figures_of

    return chrome_trace(figures_of(report.shown))
