"""`oobleck sim`: simulates a job on a cluster that fails as a trace says, alone or compared with other systems."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer

from oobleck.errors import ConfigError, UsageError, shown
from oobleck.job import MAX_STEPS, ScalingSpec
from oobleck.runtime.files import read_input

from . import inputs
from .common_options import JsonOption
from .inputs import duration_s
from .option_fields import given_options, one_of, option, takes_options
from .pictures import PictureOptions, write_output
from .trace import read_trace

if TYPE_CHECKING:
    from oobleck.sim import Repeated
    from oobleck.sim.costs import Outcome
    from oobleck.sim.sweep import SweepSettings
    from oobleck.sim.trace import Trace
    from oobleck.ui.run_panels import RunPanel

_POLICIES = (
    "oobleck",
    "restart",
    "varuna",
    "bamboo",
    "recycle",
    "torchft",
    "recover",
    "checkpointless",
    "hotswap",
    "decoupled-diloco",
)
_MAX_REPEAT = 1_000
_MAX_SPARES = 1_024
_SPARE_START_S = 60.0  # a warm standby takes about a minute


def _interval_s(text: str) -> float | None:
    return None if text == "auto" else duration_s(text)


@dataclass(frozen=True, kw_only=True)
class SimOptions:
    failures: Path = option(
        "--failures", "FILE", "Failure trace; see `oobleck trace`.", default=..., rich_help_panel="Trace"
    )
    planning: inputs.PlanningOptions
    nodes: str | None = option(
        "--nodes",
        "N",
        "Use the trace's first N nodes, or add healthy ones to reach N; of several kinds: A100:16,A40:16x4.",
        rich_help_panel="Trace",
    )
    policy: str = option(
        "--policy",
        "NAMES",
        f"{', '.join(_POLICIES)}; or several: a,b.",
        default="oobleck",
        autocompletion=one_of(*_POLICIES),
        rich_help_panel="Policies and costs",
    )
    checkpoint_interval: float | None = option(
        "--checkpoint-interval",
        "TIME|auto",
        "Time between checkpoints; auto: Young and Daly's for the trace and the cost of a checkpoint.",
        default=None,
        parser=_interval_s,
        show_default="auto",
        rich_help_panel="Policies and costs",
    )
    spares: int = option(
        "--spares",
        "S",
        "Additional nodes that stand by.",
        default=0,
        parser=inputs.whole(0, _MAX_SPARES),
        rich_help_panel="Trace",
    )
    spare_start: float | None = option(
        "--spare-start",
        "TIME",
        "Time until a spare is ready.",
        parser=duration_s,
        show_default="1m",
        rich_help_panel="Trace",
    )
    scaling: str = option(
        "--scaling",
        "all|efficient|deadline=TIME",
        "Policy oobleck: use all nodes, only those that add enough throughput, or the fewest that finish in time.",
        autocompletion=one_of("all", "efficient", "deadline="),
        default="all",
        rich_help_panel="Run",
    )
    steps: int | None = option(
        "--steps",
        "N",
        "Policy oobleck: the job ends after N steps.",
        parser=inputs.whole(1, MAX_STEPS),
        rich_help_panel="Run",
    )
    reductions: str = option(
        "--reductions-per-step",
        "R",
        "Gradient reductions per step, or auto.",
        default="auto",
        rich_help_panel="Policies and costs",
    )
    schedule: str = option(
        "--schedule",
        "KIND",
        f"Policy oobleck: {inputs.SCHEDULE_NAMES}.",
        default="1f1b",
        autocompletion=one_of(*inputs.SCHEDULE_NAMES.split(", ")),
        rich_help_panel="Run",
    )
    seed: int = option(
        "--seed",
        "N",
        "Seed of random choices in cluster mode.",
        default=0,
        parser=inputs.whole(-inputs.MAX_SEED, inputs.MAX_SEED),
        rich_help_panel="Run",
    )
    mode: str = option(
        "--mode",
        "sweep|cluster",
        "sweep: from event to event; cluster: the real master and agents on virtual nodes.",
        autocompletion=one_of("sweep", "cluster"),
        default="sweep",
        rich_help_panel="Run",
    )
    repeat: int = option(
        "--repeat",
        "N",
        "Play N traces, this one and others drawn like it, and show means with 95 % confidence intervals.",
        default=1,
        parser=inputs.whole(1, _MAX_REPEAT),
        rich_help_panel="Trace",
    )
    costs_file: Path | None = option(
        "--costs",
        "FILE",
        "Costs that replace the defaults, as a JSON object of numbers.",
        rich_help_panel="Policies and costs",
    )
    cost: list[str] | None = option(
        "--cost",
        "NAME=VALUE",
        "One such cost for all policies, as in form_s=5, or for one: varuna.node_start_s=60. May be repeated.",
        rich_help_panel="Policies and costs",
    )
    summary: Path | None = option(
        "--summary", "FILE", "Write the summary as JSON (by policy, if there are several).", rich_help_panel="Output"
    )
    pictures: PictureOptions
    as_json: JsonOption = False
    given: frozenset[str] = given_options()

    @property
    def activation_s(self) -> float:
        return _SPARE_START_S if self.spare_start is None else self.spare_start


@takes_options(SimOptions)
def sim(options: SimOptions) -> None:
    """Play a failure trace, and show goodput, lost time by cause, recoveries, and throughput over time.

    Policy `oobleck` runs the real decision code; the others are models of published systems. No process is started.
    """
    from oobleck.sim.costs import with_changes
    from oobleck.sim.trace import with_spares
    from oobleck.ui.pictures import run_trace, sim_svg
    from oobleck.ui.run_panels import panel_of

    names = _names(options.policy)
    mode = _mode(options.mode)
    _check_policies(options, names)
    options.pictures.check()
    given, counts = _on_nodes(read_trace(options.failures), options.nodes)
    trace = with_spares(given, options.spares, activation_s=options.activation_s)
    settings = _settings(options, counts)
    if settings.kinds and names != ["oobleck"]:
        raise UsageError("--policy: models of other systems know one kind of nodes; leave them, or the kinds, out")
    changes = _cost_changes(options.costs_file, options.cost or (), names)
    each = [replace(settings, costs=with_changes(settings.costs, changes, policy=name)) for name in names]
    outcomes = [
        _play(name, trace, own, mode=mode, quiet=options.as_json) for name, own in zip(names, each, strict=True)
    ]
    repeated = _repeated(options, given, outcomes, each) if options.repeat > 1 else []
    panels = [panel_of(outcome, trace) for outcome in outcomes]
    if options.summary is not None:
        write_output(options.summary, _summaries(outcomes))
    title = f"Throughput through {options.failures.name}"
    options.pictures.write(lambda: sim_svg(panels, title=title), lambda: run_trace(panels))
    _show(outcomes, panels, repeated, as_json=options.as_json)


def _check_policies(options: SimOptions, names: Sequence[str]) -> None:
    """Raise UsageError for options that nothing in this run follows, and for a comparison of unequal lengths."""
    if options.spare_start is not None and not options.spares:
        raise UsageError(
            f"--spare-start is {options.spare_start:g}s, and --spares is 0; leave it out, or add spares by --spares"
        )
    given = {
        "--scaling": options.scaling != "all",
        "--schedule": options.schedule != "1f1b",
        "--mode cluster": options.mode == "cluster",
    }
    if "oobleck" not in names and (unused := [name for name, is_given in given.items() if is_given]):
        raise UsageError(f"{unused[0]}: only policy oobleck follows it; leave it out, or name that policy too")
    if options.steps is not None and names != ["oobleck"]:
        raise UsageError("--steps: only policy oobleck ends then, and the others with the trace; name it alone")


def _on_nodes(trace: Trace, nodes: str | None) -> tuple[Trace, tuple[inputs.KindCount, ...]]:
    from oobleck.sim.trace import with_kinds, with_nodes

    counts = None if nodes is None else inputs.parse_nodes(nodes)
    if isinstance(counts, tuple):
        return with_kinds(trace, [count.kind for count in counts for _ in range(count.num_nodes)]), counts
    if counts is not None:
        trace = with_nodes(trace, counts)
    numbers = Counter(trace.kinds.values())
    return trace, tuple(
        inputs.KindCount(kind=kind, num_nodes=number, devices_per_node=None) for kind, number in numbers.items()
    )


def _settings(options: SimOptions, counts: tuple[inputs.KindCount, ...]) -> SweepSettings:
    """Return the job and its nodes, of the kinds that `counts` names, if it names any."""
    from oobleck.sim.sweep import SweepSettings

    from .plan_profile import check_batch, check_chunks, kinds_of, profile_of

    planning = options.planning
    if planning.profiles is not None and not counts:
        raise UsageError("--profiles is for nodes of several kinds; name them, as in --nodes A100:16,A40:16")
    kinds = kinds_of(counts, planning, options.given)[0] if counts else ()
    profile = kinds[0].profile if kinds else profile_of(planning, options.given)
    schedule = inputs.parse_schedule_name(options.schedule)
    check_chunks(schedule, planning, options.given)
    check_batch(planning.global_batch, profile.microbatch_size)
    if options.checkpoint_interval is not None and options.checkpoint_interval <= 0:
        raise UsageError("--checkpoint-interval is 0; it must be longer")
    reductions = options.reductions
    if reductions != "auto" and not re.fullmatch(r"0*[1-9][0-9]{0,4}", reductions):
        raise UsageError(f"--reductions-per-step is {reductions!r}; it must be auto or a number of 1 or more")
    return SweepSettings(
        profile=profile,
        global_batch_size=planning.global_batch,
        devices_per_node=planning.devices_per_node,
        kinds=kinds,
        fault_threshold=planning.fault_threshold,
        num_pipelines=planning.pipelines,
        reductions_per_step="auto" if reductions == "auto" else int(reductions),
        schedule=schedule,
        num_chunks=planning.chunks,
        checkpoint_interval_s=options.checkpoint_interval,
        scaling=inputs.parse_scaling(options.scaling, ScalingSpec()),
        max_steps=options.steps,
        seed=options.seed,
    )


def _cost_changes(file: Path | None, changes: Sequence[str], played: Sequence[str]) -> Mapping[str, float]:
    """Return the costs that a file changes, and then each NAME=VALUE or POLICY.NAME=VALUE. Raises UserError.

    A file may have costs of policies that are not played: it serves several runs.
    """
    from oobleck.sim.costs import changes_from_json
    from oobleck.sim.policies import POLICIES

    known: dict[str, float] = {}
    if file is not None:
        known = changes_from_json(read_input(file, "costs"), policies=tuple(POLICIES), source=str(file))
    for change in changes:
        name, value = _changed(change, tuple(POLICIES))
        policy, dot, _ = name.rpartition(".")
        if dot and policy not in played:
            raise UsageError(
                f"--cost {name} is a cost of {policy}, and --policy is {','.join(played)}; "
                "leave it out, or name that policy too"
            )
        known[name] = value
    return known


def _changed(change: str, policies: Sequence[str]) -> tuple[str, float]:
    from oobleck.sim.costs import Costs, with_changes

    name, is_given, value = change.partition("=")
    known = [part.name for part in fields(Costs)]
    policy, dot, own = name.rpartition(".")
    if dot and policy not in policies:
        raise UsageError(f"--cost {shown(name)} names policy {policy!r}; it must be one of {', '.join(policies)}")
    if own not in known:
        near = get_close_matches(own, known, n=1, cutoff=0.0)
        raise UsageError(f"--cost names {shown(own)}; did you mean {near[0]!r}?")
    try:
        number = float(value)
        with_changes(Costs(), {own: number}, policy="")
    except ValueError:
        problem = f"is {shown(value)}" if is_given else "has no value"
        raise UsageError(f"--cost {name} {problem}; write a number, such as {name}=5") from None
    except ConfigError as error:
        raise UsageError(f"--cost {error}") from None
    return name, number


def _names(policy: str) -> list[str]:
    from oobleck.sim.policies import POLICIES

    names, known = list(dict.fromkeys(name.strip() for name in policy.split(",") if name.strip())), ", ".join(POLICIES)
    if unknown := [name for name in names if name not in POLICIES]:
        raise UsageError(f"--policy names {unknown[0]!r}; it must be one of {known}")
    if not names:
        raise UsageError(f"--policy is empty; name one or several of {known}")
    return names


def _mode(text: str) -> Literal["sweep", "cluster"]:
    match text:
        case "sweep" | "cluster":
            return text
        case _:
            raise UsageError(f"--mode is {text!r}; it must be sweep or cluster")


def _repeated(
    options: SimOptions, trace: Trace, firsts: list[Outcome], settings: Sequence[SweepSettings]
) -> list[Repeated]:
    """Return the outcomes of each policy on a trace and on those drawn like it."""
    from oobleck.sim import Repeated
    from oobleck.sim.trace import generate, model_of, with_spares

    try:
        model = model_of(trace)
    except ConfigError as error:
        raise UsageError(f"--repeat: {error}") from None
    traces = []
    for seed in range(1, options.repeat):
        drawn = generate(
            model,
            num_nodes=len(trace.nodes),
            duration_s=trace.duration_s,
            seed=seed,
            domains=[trace.domains.get(node, "") for node in trace.nodes] if trace.domains else (),
        )
        kinds = {node: trace.kinds[old] for node, old in zip(drawn.nodes, trace.nodes, strict=True) if trace.kinds}
        traces.append(with_spares(replace(drawn, kinds=kinds), options.spares, activation_s=options.activation_s))
    return [
        Repeated(
            policy=first.policy,
            outcomes=(
                first,
                *(_play(first.policy, each, own, mode=_mode(options.mode), quiet=options.as_json) for each in traces),
            ),
        )
        for first, own in zip(firsts, settings, strict=True)
    ]


def _play(
    name: str, trace: Trace, settings: SweepSettings, *, mode: Literal["sweep", "cluster"], quiet: bool
) -> Outcome:
    from oobleck.sim import simulate

    with _progress(name, trace.duration_s, quiet=quiet) as report:
        return simulate(trace, settings, name, mode=mode, report=report)


@contextmanager
def _progress(name: str, duration_s: float, *, quiet: bool) -> Iterator[Callable[[float], None]]:
    if quiet or not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    share = TextColumn("{task.percentage:.0f} %")
    columns = TextColumn("{task.description}"), BarColumn(), share, TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(f"simulating {name}", total=duration_s)
        yield lambda now_s: progress.update(task, completed=now_s)


def _summaries(outcomes: list[Outcome]) -> str:
    if len(outcomes) == 1:
        return outcomes[0].summary.to_json() + "\n"
    return json.dumps({each.policy: json.loads(each.summary.to_json()) for each in outcomes}, indent=2) + "\n"


def _show(outcomes: list[Outcome], panels: list[RunPanel], repeated: list[Repeated], *, as_json: bool) -> None:
    if as_json:
        means = {each.policy: each.to_dict() for each in repeated}
        typer.echo(json.dumps(means, indent=2) if repeated else _summaries(outcomes), nl=bool(repeated))
        return
    from rich.console import Console

    from oobleck.ui.sim_report import repeated_report, sim_report
    from oobleck.ui.summary_table import summary_table

    console = Console()
    if len(outcomes) == 1:
        console.print(summary_table(outcomes[0].summary))
    console.print(sim_report(panels, width=console.width))
    if repeated:
        console.print(repeated_report(repeated))
