"""Where `oobleck plan` has its profiles from: files, or estimates from a model's shape and data sheets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from oobleck.errors import ConfigError, UsageError
from oobleck.job import MAX_MICROBATCHES
from oobleck.json_table import parse_json
from oobleck.planner import NodeKind, Profile, profile_from_json, profiles
from oobleck.runtime.files import MAX_DATA_BYTES, read_input

from . import inputs

_PRECISIONS = ("float32", "bfloat16")
_DEFAULT_LENGTH = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileSource:
    """The options that a profile comes from."""

    file: Path | None
    model: str | None
    """A known name, or the path of a transformers configuration."""
    device: str | None
    """A known name, or the path of a data sheet."""
    microbatch_size: int | None
    sequence_length: int | None
    precision: str
    activation_checkpointing: bool
    devices_per_node: int

    @classmethod
    def of(cls, model: inputs.ModelOptions, batch: inputs.BatchOptions, devices_per_node: int) -> ProfileSource:
        return cls(
            file=model.profile_file,
            model=model.model,
            device=model.device,
            microbatch_size=batch.microbatch,
            sequence_length=batch.sequence_length,
            precision=batch.precision,
            activation_checkpointing=batch.recompute,
            devices_per_node=devices_per_node,
        )


def check_batch(global_batch: int, microbatch: int) -> None:
    """Raise UsageError for a batch that no microbatches make up, or too many."""
    if global_batch % microbatch:
        raise UsageError(f"--global-batch is {global_batch}; it must be a multiple of {microbatch}, the microbatch")
    if global_batch > MAX_MICROBATCHES * microbatch:
        most = f"{MAX_MICROBATCHES:,} microbatches of {microbatch}"
        raise UsageError(f"--global-batch is {global_batch}; it must be at most {most}")


def profile_of(source: ProfileSource) -> Profile:
    """Read or estimate the profile; UsageError says which options do not go together."""
    if source.precision not in _PRECISIONS:
        raise UsageError(f"--precision is {source.precision!r}; it must be {' or '.join(_PRECISIONS)}")
    if source.file is not None:
        return _read(source.file, source)
    if source.model is None or source.device is None:
        raise UsageError("nothing to plan with: pass --profile FILE, or --model NAME and --device NAME")
    if source.microbatch_size is None:
        raise UsageError("--microbatch is missing: an estimate needs the samples of a microbatch")
    return _estimate(source, _shape(source.model), _sheet(source.device), source.microbatch_size)


def kinds_of(
    counts: int | Sequence[inputs.KindCount], source: ProfileSource, profiles: str | None
) -> tuple[tuple[NodeKind, ...], dict[str, str]]:
    """Read or estimate the profile of each kind of nodes, and say of which each node is.

    `counts` is the number of nodes that are all alike, or of each kind: the name of a kind is that of its device,
    unless `profiles` has files.
    """
    if isinstance(counts, int):
        if profiles is not None:
            raise UsageError("--profiles is for nodes of several kinds; name them, as in --nodes A100:16,A40:16")
        profile = profile_of(source)
        alike = NodeKind(name=profile.device.name, profile=profile, devices_per_node=source.devices_per_node)
        return (alike,), {f"node{number}": alike.name for number in range(counts)}
    names = [count.kind for count in counts]
    files = inputs.parse_profiles(profiles, names) if profiles is not None else None
    if source.file is not None:
        raise UsageError("--profile and kinds of nodes were both given; pass --profiles KIND:FILE,KIND:FILE")
    if source.device is not None:
        raise UsageError("--device and kinds of nodes were both given; a kind's name is its device")
    kinds = []
    for count in counts:
        devices = count.devices_per_node or source.devices_per_node
        # Stages have several devices where all nodes are of one kind.
        own = replace(source, devices_per_node=devices if len(counts) == 1 else 1, device=count.kind)
        if files is not None:
            own = replace(own, device=None, file=files[count.kind])
        kinds.append(NodeKind(name=count.kind, profile=profile_of(own), devices_per_node=devices))
    return tuple(kinds), {node: count.kind for count in counts for node in count.names}


def utilisation_of(profile: Profile, source: ProfileSource, global_batch_size: int) -> tuple[float, float] | None:
    """(operations of one step, peak operations a second of one device), or None where they are not known."""
    model, device = source.model or profile.model, source.device or profile.device.name
    if source.file is not None and (
        model.lower() not in profiles.KNOWN_MODELS or device.lower() not in profiles.KNOWN_DEVICES
    ):
        return None
    shape, sheet = _shape(model), _sheet(device)
    flops = profiles.training_flops(shape, num_samples=global_batch_size, sequence_length=profile.sequence_length)
    return flops, sheet.bfloat16_flops if source.precision == "bfloat16" else sheet.float32_flops


def _read(path: Path, source: ProfileSource) -> Profile:
    for option, value in (("--model", source.model), ("--device", source.device)):
        if value is not None:
            raise UsageError(f"{option} and --profile were both given; a profile has its own")
    profile = profile_from_json(read_input(path, "profile", most_bytes=MAX_DATA_BYTES), source=str(path))
    for option, given, own in (
        ("--microbatch", source.microbatch_size, profile.microbatch_size),
        ("--sequence-length", source.sequence_length, profile.sequence_length),
    ):
        if given not in (None, own):
            raise UsageError(
                f"{option} is {given}, and {path} was made for {own}; leave the option out, or make a profile for it"
            )
    return profile


def _estimate(
    source: ProfileSource, shape: profiles.ModelShape, sheet: profiles.DeviceSheet, microbatch_size: int
) -> Profile:
    counts = tuple(1 << exponent for exponent in range(source.devices_per_node.bit_length()))
    return profiles.estimate_profile(
        shape,
        sheet,
        microbatch_size=microbatch_size,
        sequence_length=source.sequence_length or _usual_length(shape),
        precision="bfloat16" if source.precision == "bfloat16" else "float32",
        activation_checkpointing=source.activation_checkpointing,
        device_counts=counts,
    )


def _usual_length(shape: profiles.ModelShape) -> int:
    """The largest power of two that a model's positions allow: some have a few more for other ends."""
    return 1 << (shape.num_positions.bit_length() - 1) if shape.num_positions else _DEFAULT_LENGTH


def _shape(name: str) -> profiles.ModelShape:
    """A path wins over a name only where it looks like one, so that no stray file changes a plan."""
    if not name.endswith(".json"):
        return profiles.model_shape(name)
    text = read_input(Path(name), "configuration", most_bytes=MAX_DATA_BYTES)
    try:
        document = parse_json(text, of_others=True)
        if not isinstance(document, dict):
            raise ConfigError(f"must be an object, not {type(document).__name__}")
        return profiles.shape_from_config(document)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error


def _sheet(name: str) -> profiles.DeviceSheet:
    if not name.endswith(".json"):
        return profiles.device_sheet(name)
    return profiles.device_sheet_from_json(read_input(Path(name), "data sheet"), source=name)
