"""`oobleck checkpoint`: shows, verifies and converts what runs have saved."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated

import typer

from oobleck.control.journal import JobStarted
from oobleck.errors import ConfigError, CorruptCheckpoint, ExitCode, UsageError
from oobleck.host.places import place_of
from oobleck.runtime.files import RunDirectory
from oobleck.runtime.journals import read_journal
from oobleck.runtime.processes import convert, find_tokenizer, write_tokenizer
from oobleck.storage import CheckpointDirectory, FileFault, FoundManifest, Manifest, read_layer_file, remote
from oobleck.storage.layer_file import write_file
from oobleck.wire import to_builtins

from .common_options import BaseDirOption, JsonOption, base_dir_of, complete_tags
from .option_fields import one_of

WhereArgument = Annotated[
    str,
    typer.Argument(
        help="A checkpoint, or a directory of checkpoints (its newest), as path or URL; or the tag of a run.",
        autocompletion=complete_tags,
    ),
]


def list_checkpoints(
    where: Annotated[
        str | None,
        typer.Argument(
            help="A directory of checkpoints, or the tag of a run.", show_default=False, autocompletion=complete_tags
        ),
    ] = None,
    *,
    as_json: JsonOption = False,
    base_dir: BaseDirOption = None,
) -> None:
    """Show the checkpoints of a run, or of all runs, newest first."""
    directories = [_directory(where, base_dir)] if where is not None else _all_directories(base_dir)
    found: list[tuple[CheckpointDirectory, FoundManifest]] = []
    unreached: list[remote.StoreError] = []
    for directory in directories:
        try:
            with remote.patience(0.2, 1.0):  # a person waits
                found += [(directory, entry) for entry in directory.find()]
        except remote.StoreError as error:
            if where is not None:
                raise
            unreached.append(error)  # and those of other runs are shown all the same
    # Each directory is in order already. Several runs know nothing of each other, so the time of the save decides.
    if len(directories) > 1:
        found.sort(key=lambda each: each[1].manifest.saved_at if each[1].manifest is not None else "", reverse=True)
    if as_json:
        typer.echo(json.dumps([_listed(directory, entry) for directory, entry in found], indent=2))
    elif not found:
        typer.echo("no checkpoints")
    else:
        for directory, entry in found:
            typer.echo(_line(directory, entry))
    for refusal in unreached:
        typer.echo(f"oobleck: {refusal}", err=True)
    if unreached:
        raise SystemExit(ExitCode.FAILED)


def inspect_checkpoint(where: WhereArgument, *, as_json: JsonOption = False, base_dir: BaseDirOption = None) -> None:
    """Show the contents of a checkpoint: its step, its layers, their tensors. It reads no data."""
    directory, manifest = _one(where, base_dir)
    if as_json:
        written = to_builtins(manifest)
        assert isinstance(written, dict)
        typer.echo(json.dumps({"path": str(directory.path / manifest.name), **written}, indent=2))
        return
    loss = "unknown" if manifest.loss is None else f"{manifest.loss:.6g}"
    typer.echo(f"{directory.path / manifest.name}")
    typer.echo(f"  step {manifest.step}, loss {loss}, saved at {manifest.saved_at} by run {manifest.tag}")
    typer.echo(f"  {manifest.samples_seen} samples seen, {manifest.global_batch_size} a step, seed {manifest.seed}")
    width = max(map(len, manifest.layer_names), default=0)
    for shard in manifest.shards:
        file = read_layer_file(directory.path / manifest.name / shard.file)
        own = sorted({spec.dtype for name, (spec, _) in file.tensors.items() if not name.startswith("optimizer.")})
        name = manifest.layer_names[shard.layer] if shard.layer < len(manifest.layer_names) else "?"
        number = f"{shard.layer:4}" if manifest.num_parts == 1 else f"{shard.layer:4}.{shard.part}"
        typer.echo(
            f"  {number} {name.ljust(width)} {_mib(shard.size_bytes):>12}  {len(file.tensors)} tensors, {'/'.join(own)}"
        )
    parts = f", each in {manifest.num_parts} parts" if manifest.num_parts > 1 else ""
    typer.echo(f"  {len(manifest.layer_names)} layers{parts}, {_mib(manifest.size_bytes)}")


def verify_checkpoint(where: WhereArgument, *, as_json: JsonOption = False, base_dir: BaseDirOption = None) -> None:
    """Read every byte of a checkpoint and compare it with its checksums. The exit code is 1 if anything is wrong."""
    directory, manifest = _one(where, base_dir)
    faults = list(directory.faults(manifest))
    # `where` is a whole directory, not one checkpoint.
    if directory.path.absolute() != place_of(where, "WHERE").absolute().parent:
        damaged = [found for found in directory.find() if found.is_damaged]
        faults += [FileFault(file=directory.path / found.name, problem=found.problem or "") for found in damaged]
    if as_json:
        listed = [{"file": str(fault.file), "problem": fault.problem} for fault in faults]
        typer.echo(json.dumps({"path": str(directory.path / manifest.name), "faults": listed}, indent=2))
    else:
        for fault in faults:
            typer.echo(str(fault))
        verdict = f"{len(faults)} files cannot be used" if faults else "whole"
        typer.echo(f"{directory.path / manifest.name}: {verdict}, {_mib(manifest.size_bytes)}")
    if faults:
        raise SystemExit(ExitCode.FAILED)


def export_checkpoint(
    where: WhereArgument,
    target: Annotated[str, typer.Argument(help="The model directory to write; may be a URL.")],
    *,
    form: Annotated[
        str,
        typer.Option(
            "--format",
            help="hf: as transformers' save_pretrained, with adapters merged into the weights; peft: adapters alone; "
            "dcp: torch's distributed checkpoint, with the optimizer's state.",
            autocompletion=one_of("hf", "peft", "dcp"),
        ),
    ] = "hf",
    base_dir: BaseDirOption = None,
) -> None:
    """Write a checkpoint for transformers, PEFT or torch. Every byte is verified first."""
    if form not in ("hf", "peft", "dcp"):
        raise UsageError(f"--format: {form} is not known; it is hf, peft or dcp")
    directory, manifest = _one(where, base_dir)
    place = place_of(target, "TARGET")
    if _is_taken(place):
        raise UsageError(f"{target} exists already; name a directory that is new or empty")
    with _written_to(place) as path:
        convert(form, directory.path / manifest.name, path)
        if form == "dcp":
            with_it = ", with the optimizer's state"
        elif (tokenizer := find_tokenizer(base_dir_of(base_dir) / "cache", manifest.data_digest)) is not None:
            write_tokenizer(tokenizer, path)
            with_it = ", with the tokenizer of its data"
        else:
            with_it = "; the tokenizer of its data is not on this machine"
    typer.echo(f"step {manifest.step} exported to {target}{with_it}")


def _is_taken(place: Path) -> bool:
    """Whether something is there that an export would mix with or replace. Raises StoreError."""
    if not remote.is_here(place):
        return bool(remote.listed(place))
    return place.exists() and (not place.is_dir() or any(place.iterdir()))


@contextmanager
def _written_to(place: Path) -> Iterator[Path]:
    """Give a directory to write into, whose files are copied to a place that is no path here. Raises ConfigError."""
    if remote.is_here(place):
        yield place.absolute()
        return
    with tempfile.TemporaryDirectory(prefix="oobleck-export-") as made:
        yield (path := Path(made) / "model")
        try:
            for file in sorted(path.iterdir()):
                write_file(place / file.name, [memoryview(file.read_bytes())])
        except OSError as error:
            raise ConfigError(f"TARGET: {error}") from error


def import_checkpoint(
    source: Annotated[
        Path, typer.Argument(help="A model directory, as save_pretrained writes it, or one of torch's DCP.")
    ],
    target: Annotated[str, typer.Argument(help="The directory of checkpoints to write into; may be a URL.")],
    *,
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="PATH", help="For DCP: a model directory, or ORG/NAME, with its config.json."),
    ] = None,
) -> None:
    """Make a checkpoint from a model, to begin a run from: `oobleck up … --resume PATH`.

    A model directory gives the weights of step 0; a directory of torch's distributed checkpoints also the state of the
    optimizer, and the step.
    """
    is_dcp = (source / ".metadata").is_file()
    if is_dcp and model is None:
        raise UsageError(f"{source} is of torch's DCP, which does not say what model it is; name it with --model")
    if model is not None and not is_dcp:
        raise UsageError(f"--model: {source} is no directory of torch's DCP (it has no .metadata); leave --model out")
    path = convert("import", source.absolute(), place_of(target, "TARGET").absolute(), model=model)
    typer.echo(f"imported to {path}")


def _directory(where: str, base_dir: Path | None) -> CheckpointDirectory:
    """Return the directory that a path or a run's tag names. Raises UsageError."""
    path = place_of(where, "WHERE")
    here = CheckpointDirectory(path) if remote.is_directory(path) else None
    run = RunDirectory(base_dir=base_dir_of(base_dir), tag=where)
    of_run = _of_run(run) if "/" not in where and run.path.is_dir() else None
    if of_run is None or not remote.is_directory(of_run.path):
        if here is None:
            why = (
                "which is not on this machine" if of_run and remote.is_here(of_run.path) else "where there are none yet"
            )
            where_else = f"; its job has them in {of_run.path}, {why}" if of_run else ""
            raise UsageError(f"{where}: neither a directory nor the tag of a run that has checkpoints{where_else}")
        return here
    if here is not None and here.names() and here.path.absolute() != of_run.path.absolute():
        raise UsageError(
            f"{where} is both a run and a directory here, and both have checkpoints; name one by its whole path: "
            f"{of_run.path} or {here.path.absolute()}"
        )
    return of_run


def _of_run(run: RunDirectory) -> CheckpointDirectory:
    """Return where a run has its checkpoints: where its journal says, or else in the run's own directory."""
    named = None
    if run.journal.is_file():
        # The job is in the first entry, and the journal may be gigabytes long.
        first = next(iter(read_journal(run.journal)), None)
        named = first.job.checkpoint.directory if isinstance(first, JobStarted) else None
    return CheckpointDirectory(run.path / "checkpoints" if named is None else place_of(named, "checkpoint.directory"))


def _all_directories(base_dir: Path | None) -> list[CheckpointDirectory]:
    base = base_dir_of(base_dir)
    runs = {path.parent for path in (*base.glob("*/checkpoints"), *base.glob("*/journal.jsonl"))}
    found: dict[Path, CheckpointDirectory] = {}
    for path in sorted(runs):
        directory = CheckpointDirectory(path / "checkpoints")
        with suppress(ConfigError):  # a journal of another version leaves the run's own directory
            directory = _of_run(RunDirectory(base_dir=base, tag=path.name))
        found[directory.path.absolute()] = directory
    return list(found.values())


def _one(where: str, base_dir: Path | None) -> tuple[CheckpointDirectory, Manifest]:
    """Return the checkpoint at a path, or else the newest complete one. Raises UsageError or ConfigError."""
    try:
        path = place_of(where, "WHERE").absolute()
        whole = CheckpointDirectory(path.parent)
        if not whole.is_unfinished(path.name):
            return whole, whole.manifest(path.name)
        directory = _directory(where, base_dir)
        complete = [entry.manifest for entry in directory.find() if entry.manifest is not None]
    except CorruptCheckpoint as error:
        raise ConfigError(str(error)) from error
    if not complete:
        raise ConfigError(f"{directory.path}: no complete checkpoint")
    return directory, complete[0]


def _line(directory: CheckpointDirectory, entry: FoundManifest) -> str:
    manifest = entry.manifest
    path = directory.path / entry.name
    if manifest is None:
        return f"{'damaged':>12}  {entry.problem}" if entry.is_damaged else f"{'unfinished':>12}  {path}"
    lacking = len(manifest.layer_names) - len(directory.layers_here(manifest))
    state = f", {lacking} layers missing or cut off" if lacking else ""
    return f"step {manifest.step:>7}  {manifest.saved_at}  {_mib(manifest.size_bytes):>12}  {path}{state}"


def _listed(directory: CheckpointDirectory, entry: FoundManifest) -> dict[str, object]:
    manifest = entry.manifest
    known = {} if manifest is None else {"step": manifest.step, "saved_at": manifest.saved_at}
    return {
        "path": str(directory.path / entry.name),
        "complete": manifest is not None and len(directory.layers_here(manifest)) == len(manifest.layer_names),
        **known,
        "size_bytes": manifest.size_bytes if manifest else None,
        "damaged": entry.is_damaged,
        "problem": entry.problem,
    }


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:,.1f} MiB"
