"""`oobleck plan`: plans a job without running it, on a cluster that need not exist."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast, get_args

from oobleck.errors import UsageError, UserError
from oobleck.job import MAX_DEVICES, MAX_NODES, Sharding

from . import inputs
from .common_options import JsonOption
from .option_fields import flag, given_options, option, takes_options
from .pictures import PictureOptions

if TYPE_CHECKING:
    from oobleck.planner import NodeKind, Planner
    from oobleck.schedule import ScheduleKind
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
        "What the devices of a node that hold a stage together share out, as a job's sharding; auto: the fastest.",
        default="none",
    )
    sharding_devices: int | None = option(
        "--sharding-devices",
        "N",
        "How many devices hold a stage together; all of a node's by default, and with auto the fastest.",
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
    given: frozenset[str] = given_options()


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
    from oobleck.schedule import ScheduleKind

    from .make_report import make_report
    from .plan_profile import check_chunks, kinds_of, utilisation_of

    planning, divisions = options.planning, _divisions(options)
    kinds, kind_of = kinds_of(
        counts,
        planning,
        options.given,
        expert_parallel=options.expert_parallel,
        context_parallel=options.context_parallel,
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
    check_chunks(schedule, planning, options.given)
    kind = None if schedule == "auto" else ScheduleKind(schedule)
    planner, division, choices = _fastest(
        divisions,
        lambda each: _planner_of(options, each, kinds, kind_of, kind),
        names,
        kind=kind,
        global_batch_size=planning.global_batch,
        microbatch_size=kinds[0].profile.microbatch_size,
    )
    prices = options.prices
    return make_report(
        planner,
        names,
        global_batch_size=planning.global_batch,
        num_lanes=division.num_lanes,
        context_parallel=options.context_parallel,
        choices=choices,
        kind=kind,
        lost=lost,
        utilisation=utilisation_of(kinds[0].profile, planning) if isinstance(counts, int) else None,
        prices=None if prices is None else inputs.parse_prices(prices, [each.name for each in kinds]),
    )


@dataclass(frozen=True, slots=True)
class _Division:
    """What the devices of a node share out."""

    sharding: Sharding
    num_devices: int = 1
    """The devices that hold a stage together."""
    num_lanes: int = 1
    """The microbatches that these compute at once."""

    def __str__(self) -> str:
        return self.sharding if self.sharding == "none" else f"{self.sharding} over {self.num_devices} devices"


def _divisions(options: PlanOptions) -> tuple[_Division, ...]:
    """Return what devices may share out: one way, unless it is left to the planner. Raises UsageError."""
    levels, per_node, number = get_args(Sharding), options.planning.devices_per_node, options.sharding_devices
    if options.sharding not in (*levels, "auto"):
        raise UsageError(f"--sharding is {options.sharding!r}; it must be auto, or one of {', '.join(levels)}")
    if options.sharding == "none":
        for is_given, what in (
            (number is not None, "--sharding-devices was given without --sharding, which says what they share out"),
            (
                options.context_parallel > 1,
                "--context-parallel was given without --sharding; it is for devices of sharded stages",
            ),
            (
                options.expert_parallel,
                "--expert-parallel was given without --sharding; experts are those of sharded stages",
            ),
        ):
            if is_given:
                raise UsageError(what)
        return (_Division("none"),)
    numbers = [number or per_node]
    if options.sharding == "auto" and number is None:
        numbers = [each for each in range(2, per_node + 1) if per_node % each == 0]
        numbers = [each for each in numbers if each % options.context_parallel == 0] or [per_node]
    for each in numbers:
        if each < 2 or per_node % each:
            raise UsageError(
                f"--sharding-devices is {each}; it must be 2 or more, and divide --gpus-per-node ({per_node})"
            )
        if each % options.context_parallel:
            raise UsageError(
                f"--context-parallel is {options.context_parallel}; it must divide the {each} devices of a stage"
            )
    found = [
        _Division(cast("Sharding", level), each, each // options.context_parallel)
        for level in levels
        for each in numbers
        if level != "none" and options.sharding in (level, "auto")
    ]
    is_shared = options.expert_parallel or options.context_parallel > 1
    return tuple(found) if options.sharding != "auto" or is_shared else (_Division("none"), *found)


def _planner_of(
    options: PlanOptions,
    division: _Division,
    kinds: Sequence[NodeKind],
    kind_of: Mapping[str, str],
    kind: ScheduleKind | None,
) -> Planner:
    from oobleck.planner import Planner, PlannerSettings
    from oobleck.schedule.interleaving import make_cutter

    planning = options.planning
    settings = PlannerSettings(
        num_microbatches=planning.global_batch // (kinds[0].profile.microbatch_size * division.num_lanes),
        # Stages have several devices only where all nodes are of one kind, or they share them out.
        max_devices_per_stage=kinds[0].devices_per_node if len(kinds) == 1 and division.num_devices == 1 else 1,
        fault_threshold=planning.fault_threshold,
        num_pipelines=planning.pipelines,
        max_redundancy_percent=options.max_redundancy,
        mean_time_to_failure_s=options.change_interval,
    )
    return Planner(
        kinds,
        settings,
        kind_of,
        domain_of=dict(zip(kind_of, inputs.racks(len(kind_of), options.domains), strict=False)),
        tensor_parallel=division.num_devices,
        sharding=division.sharding,
        is_cast=planning.precision == "bfloat16",
        make_cutter=make_cutter(kind, planning.chunks),
    )


def _fastest(
    divisions: Sequence[_Division],
    planner_of: Callable[[_Division], Planner],
    names: Sequence[str],
    *,
    kind: ScheduleKind | None,
    global_batch_size: int,
    microbatch_size: int,
) -> tuple[Planner, _Division, tuple[tuple[str, float | None], ...]]:
    """Return the planner whose first plan takes the shortest step, and the step of each if there are several.

    It is one that keeps f + 1 copies of each layer, if any does.

    Raises UsageError if the batch goes with none of them, PlanningError if none has a plan.
    """
    from .make_report import first_step
    from .plan_profile import check_batch

    found: list[tuple[bool, float, Planner, _Division]] = []
    choices: list[tuple[str, float | None]] = []
    for division in divisions:
        try:
            check_batch(global_batch_size, microbatch_size * division.num_lanes)
            planner = planner_of(division)
            redundant, step_s = first_step(planner, names, kind) if len(divisions) > 1 else (True, 0.0)
        except UserError as error:
            last = error
            choices.append((str(division), None))
        else:
            choices.append((str(division), step_s))
            found.append((not redundant, step_s, planner, division))
    if not found:
        raise last
    _, _, planner, division = min(found, key=lambda each: each[:2])
    return planner, division, tuple(choices) if len(divisions) > 1 else ()
