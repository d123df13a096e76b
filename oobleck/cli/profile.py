"""`oobleck profile`: measures what a job's layers cost on this machine, for the planner."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from oobleck.errors import UsageError

from .common_options import BaseDirOption, JsonOption, base_dir_of
from .inputs import JobSource, read_job, whole
from .option_fields import argument, flag, option, takes_options
from .pictures import write_output

if TYPE_CHECKING:
    from oobleck.planner import Profile


@dataclass(frozen=True, kw_only=True)
class ProfileOptions:
    job: list[str] | None = argument("[JOB.yaml | SCRIPT.py] [-- ARGUMENTS]", "The job; without one, the default job.")
    device: str | None = option("--device", "cpu or cuda; by default, the job's device.")
    settings: list[str] | None = option("--set", "KEY=VALUE", "Override a key of the job.")
    workers: int = option("--workers", "N", "Workers that will share this machine.", default=1, parser=whole(1, 1024))
    output: Path | None = option("--output", "FILE", "Write the profile here as well.")
    fresh: bool = flag("--fresh", "Measure again, even if there is a profile.")
    as_json: JsonOption = False
    base_dir: BaseDirOption = None


@takes_options(ProfileOptions)
def profile(options: ProfileOptions) -> None:
    """Measure a job's layers as its workers run them, and keep the profile where runs look for it.

    As long as the model, its shapes, the precision, the device and the versions stay the same, one measurement is
    enough. The speeds of links are those that runs of this name have timed, or else assumed.
    """
    from oobleck.planner import profile_from_json, profile_to_json
    from oobleck.runtime.files import RunDirectory
    from oobleck.runtime.processes import run_profiler
    from oobleck.runtime.profile_files import ProfileFiles

    device = options.device
    if device not in (None, "cpu", "cuda"):
        raise UsageError(f"--device: {device} is not known; it is cpu or cuda")
    spec = read_job(_parse_words(options.job or [], options.settings or []), num_nodes=1)
    if device is not None:
        spec = replace(spec, device=device)  # type: ignore[arg-type]  # checked above
    directory = RunDirectory(base_dir=base_dir_of(options.base_dir), tag=spec.tag)
    directory.create()
    measured = run_profiler(
        spec,
        cache_dir=directory.path.parent / "cache",
        profile_dir=directory.profile,
        num_workers=options.workers,
        fresh=options.fresh,
    )
    files = ProfileFiles(directory.profile)
    files.store(measured.key, measured.profile_json)
    found = files.with_links(profile_from_json(measured.profile_json, source=measured.key))
    profile_json = profile_to_json(found)
    if options.output is not None:
        write_output(options.output, profile_json, "--output")
    if options.as_json:
        typer.echo(profile_json, nl=False)
        return
    verb = "measured before" if measured.was_cached else "measured"
    _show(found, f"{verb}: {directory.profile / measured.key}.json")


def _parse_words(words: list[str], settings: list[str]) -> JobSource:
    if words and words[0].endswith(".py"):
        return JobSource(script=Path(words[0]), arguments=tuple(words[1:]), settings=settings)
    if len(words) > 1:
        raise UsageError(f"{words[1]}: only a script, whose name ends in .py, takes arguments")
    return JobSource(file=Path(words[0]) if words else None, settings=settings)


def _show(profile: Profile, where: str) -> None:
    from rich.console import Console
    from rich.table import Table

    from oobleck.planner.profiles import LINKS, LINKS_IN_WORDS

    table = Table(title=f"{profile.model} on {profile.device.name}, microbatches of {profile.microbatch_size}")
    for heading in ("layer", "forward, ms", "backward, ms", "parameters, MB", "activations, MB"):
        table.add_column(heading, justify="left" if heading == "layer" else "right", no_wrap=heading == "layer")
    for layer in profile.layers:
        times = (layer.forward_s[1] * 1e3, layer.backward_s[1] * 1e3)
        sizes = (layer.param_bytes / 1e6, layer.activation_bytes / 1e6)
        table.add_row(layer.name, *(f"{value:.3f}" for value in (*times, *sizes)))
    console = Console()
    console.print(table)
    for link in LINKS:
        how = "assumed; a run times it" if link in profile.network.assumed else "timed by a run"
        text = f"links {LINKS_IN_WORDS[link]}: {profile.network.speed_of(link)} ({how})"
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    console.print(where, markup=False, highlight=False, soft_wrap=True)
