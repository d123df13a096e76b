"""`oobleck trace`: makes, converts and describes failure traces."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from oobleck.errors import ConfigError, UsageError
from oobleck.job import MAX_NODES
from oobleck.json_table import to_json
from oobleck.runtime.files import MAX_DATA_BYTES, read_input

from .common_options import JsonOption
from .inputs import MAX_SEED, duration_s, racks, real, whole
from .option_fields import argument, flag, option, takes_options
from .pictures import write_output

if TYPE_CHECKING:
    from oobleck.sim.trace import FailureModel, Trace


@dataclass(frozen=True, kw_only=True)
class _OutputOptions:
    seed: int = option("--seed", "N", "Seed of all random choices.", default=0, parser=whole(-MAX_SEED, MAX_SEED))
    output: Path | None = option("-o", "--output", "FILE", "File to write; by default, standard output.")


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    nodes: int = option(
        "--nodes", "N", "Nodes of the cluster: node0, node1, …", default=..., parser=whole(1, MAX_NODES)
    )
    duration: float = option(
        "--duration", "TIME", "Length of the trace: 10m, 3.1h, 54d.", default=..., parser=duration_s
    )
    preset: str | None = option(
        "--preset",
        "NAME",
        "Published rates: llama3, rsc1, rsc2, infinitehbd, byterobust, spot-p3, spot-g4dn, spot-gcp.",
    )
    mtbf: float | None = option("--mtbf", "TIME", "Mean time between losses, over all nodes.", parser=duration_s)
    shape: float | None = option(
        "--weibull-shape", "K", "Shape of lifetimes; below 1, losses come in clusters.", parser=real(0.1, 10)
    )
    batches: str | None = option("--batches", "SIZE:WEIGHT,…", "Nodes lost at once, such as 1:39,2:13,3:15.")
    domains: int | None = option(
        "--domains", "N", "Failure domains (racks) of equally many nodes: rack0, rack1, …", parser=whole(1, MAX_NODES)
    )
    domain_losses: float | None = option(
        "--domain-losses", "PERCENT", "Share of losses that take a whole domain at once.", parser=real(0, 100)
    )
    repair: float | None = option("--repair", "TIME", "Time after which a lost node is back.", parser=duration_s)
    no_repair: bool = flag("--no-repair", "Lost nodes never come back.")
    notice: float | None = option("--notice", "TIME", "Announce losses this long in advance.", parser=duration_s)
    fail_slow: float | None = option(
        "--fail-slow",
        "RATE",
        "Slowdowns per 1,000 node-days, each 24 minutes long, by 1.1 to 2 times.",
        parser=real(0, 1e6),
    )
    to: _OutputOptions


@takes_options(GenerateOptions)
def generate_trace(options: GenerateOptions) -> None:
    """Generate a failure trace from published failure rates, or from your own.

    The same options give the same trace everywhere. `oobleck trace info` shows what was generated.
    """
    from oobleck.sim.trace import generate

    if options.duration <= 0:
        raise UsageError("--duration is 0; it must be longer")
    if options.domain_losses is not None and options.domains is None:
        raise UsageError("--domain-losses needs domains; give --domains N")
    if options.repair is not None and options.no_repair:
        raise UsageError("--repair and --no-repair were both given; leave one out")
    try:  # no file is involved, so whatever is wrong came from the command line
        model = _changed(_model(options), options)
        trace = generate(
            model,
            num_nodes=options.nodes,
            duration_s=options.duration,
            seed=options.to.seed,
            domains=racks(options.nodes, options.domains),
        )
    except ConfigError as error:
        raise UsageError(str(error)) from error
    _write(trace, options.to.output)


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    file: Path = argument("FILE", "A public trace.", default=...)
    format_name: str | None = option(
        "--format", "NAME", "oobleck, bamboo, infinitehbd, parcae, skypilot or lanl; detected by default."
    )
    unit: str | None = option("--unit", "ms|s|h", "Unit of the times in a file of counts that does not name it.")
    nodes: int | None = option(
        "--nodes", "N", "Size of the cluster, if the file names only nodes that fail.", parser=whole(1, MAX_NODES)
    )
    to: _OutputOptions


@takes_options(ConvertOptions)
def convert_trace(options: ConvertOptions) -> None:
    """Convert a public trace of failures or preemptions to Oobleck's format.

    If the file has only node counts, the nodes that leave are chosen at random, by the seed.
    """
    from oobleck.sim.trace import FORMATS, UNITS, convert, detect_format

    file, unit = options.file, options.unit
    if unit is not None and unit not in UNITS:
        raise UsageError(f"--unit is {unit!r}; it must be one of {', '.join(UNITS)}")
    text = read_input(file, "trace", most_bytes=MAX_DATA_BYTES)
    name = options.format_name or detect_format(text)
    if name is None:
        raise UsageError(f"{file}: its format was not recognised; name it with --format {'|'.join(FORMATS)}")
    if name not in FORMATS:
        raise UsageError(f"--format is {name!r}; it must be one of {', '.join(FORMATS)}")
    to = options.to
    trace = convert(text, format_name=name, name=file.name, seed=to.seed, num_nodes=options.nodes, unit=unit)
    _write(trace, to.output)


def trace_info(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A trace.")], *, as_json: JsonOption = False
) -> None:
    """Show the contents of a trace: its nodes, how often and how many of them are lost, and how many are up."""
    from oobleck.sim.trace import facts_of

    trace = read_trace(file)
    facts = facts_of(trace)
    if as_json:
        typer.echo(to_json(facts.to_dict(), indent=2))
        return
    from rich.console import Console

    from oobleck.ui.sim_report import trace_report

    console = Console()
    console.print(trace_report(file.name, facts.to_dict(), trace.counts, trace.duration_s, width=console.width))


def read_trace(path: Path) -> Trace:
    """Read a trace file. Raises ConfigError that names the file, and the event where there is one."""
    from oobleck.sim.trace import trace_from_json

    return trace_from_json(read_input(path, "trace", most_bytes=MAX_DATA_BYTES), source=str(path))


def _write(trace: Trace, output: Path | None) -> None:
    from oobleck.sim.trace import trace_to_json

    text = trace_to_json(trace)
    if output is None:
        typer.echo(text, nl=False)
        return
    write_output(output, text, "--output")
    typer.echo(f"{output}: {len(trace.nodes)} nodes, {len(trace.events)} events", err=True)


def _model(options: GenerateOptions) -> FailureModel:
    from oobleck.sim.trace import PRESETS, FailureModel

    preset, mtbf = options.preset, options.mtbf
    if (preset is None) == (mtbf is None):
        raise UsageError("how often do nodes fail? give either --preset NAME or --mtbf TIME")
    if mtbf is not None:
        words = f"one loss in {mtbf:g} s on average"
        return FailureModel(mean_lifetime_s=mtbf * options.nodes, batches={1: 1.0}, source=words)
    if preset is None or preset not in PRESETS:
        raise UsageError(f"--preset is {preset!r}; it must be one of {', '.join(PRESETS)}")
    return PRESETS[preset]


def _changed(model: FailureModel, options: GenerateOptions) -> FailureModel:
    from oobleck.sim.trace import FailSlow

    if options.shape is not None:
        model = replace(model, shape=options.shape)
    if options.batches is not None:
        model = replace(model, batches=_batches(options.batches))
    if options.domain_losses is not None:
        model = replace(model, domain_share=options.domain_losses / 100)
    if options.repair is not None:
        model = replace(model, repairs=((1.0, max(options.repair, 1e-9)),))
    if options.no_repair:
        model = replace(model, repairs=())
    if options.notice is not None:
        model = replace(model, notice_s=options.notice)
    if options.fail_slow is not None:
        # GREYHOUND (ATC 2025): 24 minutes on average in jobs of four nodes.
        rate, mean_s = options.fail_slow / 24_000, 24 * 60.0
        slow = FailSlow(rate_per_node_hour=rate, mean_duration_s=mean_s, least_factor=1.1, most_factor=2.0)
        model = replace(model, fail_slow=slow)
    return model


def _batches(text: str) -> dict[int, float]:
    found: dict[int, float] = {}
    for part in text.split(","):
        size, _, weight = part.partition(":")
        try:
            found[int(size)] = float(weight)
        except ValueError as error:
            raise UsageError(f"--batches: {part!r} is not SIZE:WEIGHT, such as 2:13") from error
    return found
