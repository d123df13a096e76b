"""`oobleck sim`: what a job would do on a cluster that fails as a trace says, alone or compared with other systems."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from oobleck.errors import ConfigError, UsageError, shown
from oobleck.job import MAX_STEPS, ScalingSpec
from oobleck.runtime.files import read_input

from . import inputs
from .common_options import JsonOption, takes_options
from .inputs import duration_s
from .trace import read_trace

if TYPE_CHECKING:
    from oobleck.planner import NodeKind
    from oobleck.sim.costs import Costs, Outcome
    from oobleck.sim.sweep import SweepSettings
    from oobleck.sim.trace import Trace
    from oobleck.ui.run_panels import RunPanel

    from .plan_profile import ProfileSource

_MODES = ("sweep", "cluster")
_MAX_SPARES = 1_024


@dataclass(frozen=True, kw_only=True)
class SimOptions:
    """The options of `oobleck sim`."""

    failures: Annotated[Path, typer.Option("--failures", metavar="FILE", help="Failure trace; see `oobleck trace`.")]
    model: inputs.ModelOptions
    batch: inputs.BatchOptions
    profiles: Annotated[
        str | None,
        typer.Option(
            "--profiles", metavar="KIND:FILE,…", help="Measured profiles of several kinds, in place of estimates."
        ),
    ] = None
    nodes: Annotated[
        str | None,
        typer.Option(
            "--nodes",
            metavar="N",
            help="Use the trace's first N nodes, or add healthy ones to reach N; of several kinds: A100:16,A40:16x4.",
        ),
    ] = None
    devices_per_node: inputs.DevicesPerNodeOption = 1
    policy: Annotated[
        str,
        typer.Option("--policy", metavar="NAMES", help="oobleck, restart, varuna, bamboo, recycle; or several: a,b."),
    ] = "oobleck"
    checkpoint_interval: Annotated[
        float,
        typer.Option(
            "--checkpoint-interval",
            metavar="TIME",
            parser=duration_s,
            show_default="30m",
            help="Time between checkpoints.",
        ),
    ] = 1800.0
    spares: Annotated[
        int,
        typer.Option(
            "--spares", metavar="S", parser=inputs.whole(0, _MAX_SPARES), help="Additional nodes that stand by."
        ),
    ] = 0
    spare_start: Annotated[
        float,
        typer.Option(
            "--spare-start", metavar="TIME", parser=duration_s, show_default="1m", help="Time until a spare is ready."
        ),
    ] = 60.0  # a warm standby takes about a minute
    fault_threshold: inputs.FaultThresholdOption = 1
    pipelines: inputs.PipelinesOption = None
    scaling: Annotated[
        str,
        typer.Option(
            "--scaling",
            metavar="all|efficient|deadline=TIME",
            help="Policy oobleck: use all nodes, only those that add enough throughput, or the fewest that finish "
            "in time.",
        ),
    ] = "all"
    steps: Annotated[
        int | None,
        typer.Option(
            "--steps",
            metavar="N",
            parser=inputs.whole(1, MAX_STEPS),
            help="Policy oobleck: the job ends after N steps.",
        ),
    ] = None
    reductions: Annotated[
        str, typer.Option("--reductions-per-step", metavar="R", help="Gradient reductions per step, or auto.")
    ] = "auto"
    schedule: Annotated[
        str,
        typer.Option("--schedule", metavar="KIND", help="Policy oobleck: 1f1b, gpipe, interleaved, zero-bubble, auto."),
    ] = "1f1b"
    chunks: inputs.ChunksOption = 2
    seed: Annotated[
        int,
        typer.Option(
            "--seed",
            metavar="N",
            parser=inputs.whole(-inputs.MAX_SEED, inputs.MAX_SEED),
            help="Seed of random choices in cluster mode.",
        ),
    ] = 0
    mode: Annotated[
        str,
        typer.Option(
            "--mode",
            metavar="sweep|cluster",
            help="sweep: from event to event; cluster: the real master and agents on virtual nodes.",
        ),
    ] = "sweep"
    costs_file: Annotated[
        Path | None, typer.Option("--costs", metavar="FILE", help="Costs that differ, as a JSON object of numbers.")
    ] = None
    cost: Annotated[
        list[str] | None,
        typer.Option("--cost", metavar="NAME=VALUE", help="A cost that differs, such as form_s=5. May be repeated."),
    ] = None
    summary: Annotated[
        Path | None,
        typer.Option("--summary", metavar="FILE", help="Write the summary as JSON (by policy, if there are several)."),
    ] = None
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE", help="Draw the runs as .svg, or as .png with the plot extra."),
    ] = None
    chrome_trace: Annotated[
        Path | None, typer.Option("--chrome-trace", metavar="FILE", help="Write the runs for Perfetto.")
    ] = None
    as_json: JsonOption = False


@takes_options(SimOptions)
def sim(options: SimOptions) -> None:
    """Play a failure trace: goodput, lost time by cause, recoveries, and throughput over time.

    Policy `oobleck` runs the real decision code; the others are models of published systems. Nothing is started.
    """
    from oobleck.sim.trace import with_spares
    from oobleck.ui.pictures import run_trace, sim_svg

    from .pictures import picture_writer, write_output

    names = _names(options.policy)
    if options.mode not in _MODES:
        raise UsageError(f"--mode is {options.mode!r}; it must be {' or '.join(_MODES)}")
    write_picture = picture_writer(options.plot) if options.plot is not None else None
    trace, counts = _on_nodes(read_trace(options.failures), options.nodes)
    trace = with_spares(trace, options.spares, activation_s=options.spare_start)
    settings = _settings(options, counts)
    if settings.kinds and names != ["oobleck"]:
        raise UsageError("--policy: models of other systems know one kind of nodes; leave them, or the kinds, out")
    outcomes = [_play(name, trace, settings, mode=options.mode, quiet=options.as_json) for name in names]
    panels = [_panel(outcome, trace) for outcome in outcomes]
    if options.summary is not None:
        write_output(options.summary, _summaries(outcomes).encode())
    if write_picture is not None:
        write_picture(sim_svg(panels, title=f"Throughput through {options.failures.name}"))
    if options.chrome_trace is not None:
        write_output(options.chrome_trace, run_trace(panels).encode())
    _show(outcomes, panels, as_json=options.as_json)


def _on_nodes(trace: Trace, nodes: str | None) -> tuple[Trace, tuple[inputs.KindCount, ...]]:
    """Return the trace on as many nodes as asked for, and how many there are of each kind, if there are several."""
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


def _kinds(counts: tuple[inputs.KindCount, ...], source: ProfileSource, profiles: str | None) -> tuple[NodeKind, ...]:
    """Return the profile of each kind; none where all nodes are of one."""
    from .plan_profile import kinds_of

    if profiles is not None and not counts:
        raise UsageError("--profiles is for nodes of several kinds; name them, as in --nodes A100:16,A40:16")
    return kinds_of(counts, source, profiles)[0] if counts else ()


def _settings(options: SimOptions, counts: tuple[inputs.KindCount, ...]) -> SweepSettings:
    """Return the job, and what its nodes are: of the kinds that are counted, if they are of several."""
    from oobleck.sim.sweep import SweepSettings

    from .plan_profile import ProfileSource, check_batch, profile_of

    source = ProfileSource.of(options.model, options.batch, options.devices_per_node)
    kinds = _kinds(counts, source, options.profiles)
    profile = kinds[0].profile if kinds else profile_of(source)
    schedule = inputs.parse_schedule_name(options.schedule)
    check_batch(options.batch.global_batch, profile.microbatch_size)
    if options.checkpoint_interval <= 0:
        raise UsageError("--checkpoint-interval is 0; it must be longer")
    reductions = options.reductions
    if reductions != "auto" and not re.fullmatch(r"0*[1-9][0-9]{0,4}", reductions):
        raise UsageError(f"--reductions-per-step is {reductions!r}; it must be auto or a number of 1 or more")
    return SweepSettings(
        profile=profile,
        global_batch_size=options.batch.global_batch,
        devices_per_node=options.devices_per_node,
        kinds=kinds,
        fault_threshold=options.fault_threshold,
        num_pipelines=options.pipelines,
        reductions_per_step="auto" if reductions == "auto" else int(reductions),
        schedule=schedule,
        num_chunks=options.chunks,
        costs=_parse_costs(options.costs_file, options.cost or ()),
        checkpoint_interval_s=options.checkpoint_interval,
        scaling=inputs.parse_scaling(options.scaling, ScalingSpec()),
        max_steps=options.steps,
        seed=options.seed,
    )


def _parse_costs(file: Path | None, changes: Sequence[str]) -> Costs:
    """Return the costs, changed by what a file says, and then by each NAME=VALUE.

    Raises UsageError or ConfigError that names the option or the file, and the cost.
    """
    from oobleck.sim.costs import Costs, costs_from_json

    costs = Costs()
    if file is not None:
        costs = costs_from_json(read_input(file, "costs"), costs, source=str(file))
    for change in changes:
        costs = _changed(costs, change)
    return costs


def _changed(costs: Costs, change: str) -> Costs:
    name, is_given, value = change.partition("=")
    known = [part.name for part in fields(costs)]
    if name not in known:
        near = get_close_matches(name, known, n=1, cutoff=0.0)
        raise UsageError(f"--cost names {shown(name)}; did you mean {near[0]!r}?")
    try:
        return replace(costs, **{name: float(value)})
    except ValueError:
        problem = f"is {shown(value)}" if is_given else "has no value"
        raise UsageError(f"--cost {name} {problem}; write a number, such as {name}=5") from None
    except ConfigError as error:
        raise UsageError(f"--cost {error}") from None


def _names(policy: str) -> list[str]:
    from oobleck.sim.policies import POLICIES

    names, known = list(dict.fromkeys(name.strip() for name in policy.split(",") if name.strip())), ", ".join(POLICIES)
    if unknown := [name for name in names if name not in POLICIES]:
        raise UsageError(f"--policy names {unknown[0]!r}; it must be of {known}")
    if not names:
        raise UsageError(f"--policy is empty; name one or several of {known}")
    return names


def _play(name: str, trace: Trace, settings: SweepSettings, *, mode: str, quiet: bool) -> Outcome:
    from oobleck.sim.policies import POLICIES, PolicySettings

    with _progress(name, trace.duration_s, quiet=quiet) as report:
        if name == "oobleck" and mode == "cluster":
            return _play_cluster(trace, settings, report)
        return POLICIES[name](trace, PolicySettings(job=settings, report=report))


def _play_cluster(trace: Trace, settings: SweepSettings, report: Callable[[float], None]) -> Outcome:
    from oobleck.sim.cluster import run_cluster
    from oobleck.sim.costs import outcome_of_journal
    from oobleck.sim.sweep import most_steps

    run = run_cluster(
        trace,
        job=settings.job(most_steps(trace, settings), is_timed=True),
        profile=settings.profile,
        seed=settings.seed,
        devices_per_node=settings.devices_per_node,
        kinds=settings.kinds,
        costs=settings.costs,
        observe=lambda entry: report(entry.t_s),
    )
    return outcome_of_journal(
        run.entries, policy="oobleck", about="Oobleck: the real master and agents on virtual nodes"
    )


@contextmanager
def _progress(name: str, duration_s: float, *, quiet: bool) -> Iterator[Callable[[float], None]]:
    """A progress bar on a terminal's stderr, gone at the end; nothing elsewhere."""
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


def _panel(outcome: Outcome, trace: Trace) -> RunPanel:
    from oobleck.ui.run_panels import Band, RunPanel

    bands = [
        Band(
            start_s=each.start_s,
            stop_s=min(each.stop_s, trace.duration_s),
            activity=each.activity.value,
            samples_per_s=each.samples_per_s,
        )
        for each in outcome.stretches
        if each.start_s < trace.duration_s
    ]
    return RunPanel(
        name=outcome.policy,
        about=outcome.about,
        duration_s=trace.duration_s,
        bands=bands,
        num_nodes=trace.counts,
        samples_per_s=outcome.samples_per_s,
        summary=outcome.summary,
    )


def _summaries(outcomes: list[Outcome]) -> str:
    """The summary of one policy as it is, those of several by their names."""
    if len(outcomes) == 1:
        return outcomes[0].summary.to_json() + "\n"
    return json.dumps({each.policy: json.loads(each.summary.to_json()) for each in outcomes}, indent=2) + "\n"


def _show(outcomes: list[Outcome], panels: list[RunPanel], *, as_json: bool) -> None:
    if as_json:
        typer.echo(_summaries(outcomes), nl=False)
        return
    from rich.console import Console

    from oobleck.ui.sim_report import sim_report
    from oobleck.ui.summary_table import summary_table

    console = Console()
    if len(outcomes) == 1:
        console.print(summary_table(outcomes[0].summary))
    console.print(sim_report(panels, width=console.width))
