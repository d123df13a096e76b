"""`oobleck plan`: plans a job without running it, on a cluster that need not exist."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast, get_args

from oobleck.errors import UsageError
from oobleck.job import MAX_DEVICES, MAX_NODES, Sharding

from . import inputs
from .common_options import JsonOption
from .option_fields import flag, option, takes_options
from .pictures import PictureOptions

if TYPE_CHECKING:
    from oobleck.ui.plan_report import PlanReport


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    nodes: str = option(
        "--nodes",
        "N",
        "Nodes to plan for: 16 (node0, node1, …), or of several kinds: A100:16,A40:16x4 (A100-0, …).",
        default=...,
    )
    planning: inputs.PlanningOptions
    schedule: str = option("--schedule", f"{inputs.SCHEDULE_NAMES} (the fastest, except gpipe).", default="1f1b")
    sharding: str = option(
        "--sharding",
        "LEVEL",
        "What the devices of a node that hold a stage together share out, as a job's sharding.",
        default="none",
    )
    sharding_devices: int | None = option(
        "--sharding-devices",
        "N",
        "How many devices hold a stage together; all of a node's by default.",
        parser=inputs.whole(2, MAX_DEVICES),
    )
    expert_parallel: bool = flag(
        "--expert-parallel", "Have these devices send tokens to each other's experts, as a job's expert_parallel."
    )
    context_parallel: int = option(
        "--context-parallel",
        "N",
        "How many of these devices share each microbatch, as a job's context_parallel.",
        default=1,
        parser=inputs.whole(1, MAX_DEVICES),
    )
    prices: str | None = option(
        "--prices",
        "KIND:PRICE,…",
        "What a node of each kind costs an hour: also say which nodes train most for their price.",
    )
    max_redundancy: float | None = option(
        "--max-redundancy",
        "PERCENT",
        "Have f + 1 pipelines only if a step is at most so much longer.",
        parser=inputs.real(0.0, 1e6),
    )
    domains: int | None = option(
        "--domains",
        "N",
        "Failure domains (racks) of equally many nodes, which f counts.",
        parser=inputs.whole(1, MAX_NODES),
    )
    change_interval: float = option(
        "--change-interval",
        "SECONDS",
        "Expected time between changes of the nodes, in which a plan has to repay its copies.",
        default=3600.0,
        parser=inputs.real(1.0, 1e9),
    )
    after_losing: str | None = option(
        "--after-losing", "NODES", "Show what happens after losing these nodes: node3,node7."
    )
    as_json: JsonOption = False
    pictures: PictureOptions


@takes_options(PlanOptions)
def plan(options: PlanOptions) -> None:
    """Show the pipelines that a job would use, how long a step would take, and what failures would do.

    It starts nothing and needs no device: the numbers come from a measured profile, or from an estimate.
    """
    from oobleck.ui.pictures import chrome_trace, timeline_svg
    from oobleck.ui.plan_report import figures_of

    from .make_report import show_report

    counts = inputs.parse_nodes(options.nodes)
    options.pictures.check()
    report = _report(options, counts)
    figures = figures_of(report.shown)
    options.pictures.write(lambda: timeline_svg(figures), lambda: chrome_trace(figures))
    show_report(report, as_json=options.as_json)


def _report(options: PlanOptions, counts: int | tuple[inputs.KindCount, ...]) -> PlanReport:
    from oobleck.planner import Planner, PlannerSettings
    from oobleck.schedule import ScheduleKind
    from oobleck.schedule.interleaving import make_cutter

    from .make_report import make_report
    from .plan_profile import check_batch, kinds_of, utilisation_of

    planning = options.planning
    if options.expert_parallel and _sharding(options) == "none":
        raise UsageError("--expert-parallel was given without --sharding; experts are those of sharded stages")
    kinds, kind_of = kinds_of(
        counts, planning, expert_parallel=options.expert_parallel, context_parallel=options.context_parallel
    )
    if isinstance(counts, int) and options.prices is not None:
        raise UsageError("--prices is for nodes of several kinds; name them, as in --nodes A100:16,A40:16")
    if len(kinds) > 1 and options.schedule == "interleaved":
        raise UsageError("--schedule is interleaved; pipelines of several kinds of nodes have one chunk a stage")
    names, after = tuple(kind_of), options.after_losing
    lost = tuple(name.strip() for name in after.split(",")) if after else ()
    if unknown := sorted(set(lost) - set(names)):
        raise UsageError(f"--after-losing names {unknown[0]!r}; the nodes are {names[0]} to {names[-1]}")
    schedule = inputs.parse_schedule_name(options.schedule)
    kind = None if schedule == "auto" else ScheduleKind(schedule)
    batch, profile = planning.global_batch, kinds[0].profile
    num_devices, num_lanes = _shared_out(options)
    check_batch(batch, profile.microbatch_size * num_lanes)
    settings = PlannerSettings(
        num_microbatches=batch // (profile.microbatch_size * num_lanes),
        # Stages have several devices only where all nodes are of one kind, or they share them out.
        max_devices_per_stage=kinds[0].devices_per_node if len(kinds) == 1 and num_devices == 1 else 1,
        fault_threshold=planning.fault_threshold,
        num_pipelines=planning.pipelines,
        max_redundancy_percent=options.max_redundancy,
        mean_time_to_failure_s=options.change_interval,
    )
    prices = options.prices
    return make_report(
        Planner(
            kinds,
            settings,
            kind_of,
            domain_of=dict(zip(names, inputs.racks(len(names), options.domains), strict=False)),
            tensor_parallel=num_devices,
            sharding=_sharding(options),
            is_cast=planning.precision == "bfloat16",
            make_cutter=make_cutter(kind, planning.chunks),
        ),
        names,
        global_batch_size=batch,
        num_lanes=num_lanes,
        context_parallel=options.context_parallel,
        kind=kind,
        lost=lost,
        utilisation=utilisation_of(profile, planning) if isinstance(counts, int) else None,
        prices=None if prices is None else inputs.parse_prices(prices, [each.name for each in kinds]),
    )


def _sharding(options: PlanOptions) -> Sharding:
    """Return what devices share out. Raises UsageError."""
    for level in get_args(Sharding):
        if level == options.sharding:
            return cast("Sharding", level)
    raise UsageError(f"--sharding is {options.sharding!r}; it must be one of {', '.join(get_args(Sharding))}")


def _shared_out(options: PlanOptions) -> tuple[int, int]:
    """Return how many devices hold a stage together, and how many microbatches they compute at once.

    Raises UsageError for what cannot be shared out.
    """
    per_node = options.planning.devices_per_node
    number = options.sharding_devices or per_node
    if _sharding(options) == "none":
        if options.sharding_devices is not None:
            raise UsageError("--sharding-devices was given without --sharding, which says what they share out")
        if options.context_parallel > 1:
            raise UsageError("--context-parallel was given without --sharding; it is for devices of sharded stages")
        return 1, 1
    if number < 2 or per_node % number:
        raise UsageError(
            f"--sharding-devices is {number}; it must be 2 or more, and divide --gpus-per-node ({per_node})"
        )
    if number % options.context_parallel:
        raise UsageError(
            f"--context-parallel is {options.context_parallel}; it must divide the {number} devices of a stage"
        )
    return number, number // options.context_parallel
