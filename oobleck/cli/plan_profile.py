"""The profiles of `oobleck plan` and `oobleck sim`: measured, or estimated from data sheets."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import cast, get_args

from oobleck.errors import ConfigError, UsageError
from oobleck.job import MAX_MICROBATCHES, Recompute, ScheduleName
from oobleck.json_table import parse_json
from oobleck.planner import NodeKind, Profile, profile_from_json, profiles
from oobleck.runtime.files import MAX_DATA_BYTES, read_input

from . import inputs

_PRECISIONS = ("float32", "bfloat16")
_DEFAULT_LENGTH = 2048


def check_batch(global_batch: int, microbatch: int) -> None:
    """Raise UsageError for a batch that is no multiple of the microbatch, or has too many of them."""
    if global_batch % microbatch:
        raise UsageError(f"--global-batch is {global_batch}; it must be a multiple of {microbatch}, the microbatch")
    if global_batch > MAX_MICROBATCHES * microbatch:
        most = f"{MAX_MICROBATCHES:,} microbatches of {microbatch}"
        raise UsageError(f"--global-batch is {global_batch}; it must be at most {most}")


def check_chunks(schedule: ScheduleName, options: inputs.PlanningOptions, given: Set[str]) -> None:
    """Raise UsageError if a number of chunks was given and no stage of the schedule has several."""
    if "chunks" in given and schedule not in ("interleaved", "auto"):
        raise UsageError(
            f"--chunks is {options.chunks}, and --schedule is {schedule}; "
            "leave --chunks out, or choose interleaved or auto"
        )


def profile_of(
    options: inputs.PlanningOptions, given: Set[str], *, expert_parallel: bool = False, context_parallel: int = 1
) -> Profile:
    """Read or estimate the profile. Raises UsageError that names the options that do not go together.

    `given` are the names of the fields whose options were given.
    """
    if options.precision not in _PRECISIONS:
        raise UsageError(f"--precision is {options.precision!r}; it must be {' or '.join(_PRECISIONS)}")
    if options.profile_file is not None:
        if expert_parallel:
            raise UsageError(
                "--expert-parallel and --profile were both given; a profile has been made with it or without"
            )
        if context_parallel > 1:
            raise UsageError(
                "--context-parallel and --profile were both given; a profile is made for a number of devices"
            )
        return _read(options.profile_file, options, given)
    if options.model is None or options.device is None:
        raise UsageError("nothing to plan with: pass --profile FILE, or --model NAME and --device NAME")
    if options.microbatch is None:
        raise UsageError("--microbatch is missing: an estimate needs the samples of a microbatch")
    shape = _shape(options.model)
    if expert_parallel and not shape.num_experts:
        raise UsageError(f"--expert-parallel: {shape.name} has no experts that tokens choose from; leave it out")
    if options.recomputes_all and "recompute" in given and options.recompute != "all":
        raise UsageError(
            f"--recompute is {options.recompute!r}, and --activation-checkpointing is short for all; leave one out"
        )
    recompute = "all" if options.recomputes_all else options.recompute
    if recompute not in get_args(Recompute):
        raise UsageError(f"--recompute is {recompute!r}; it must be one of {', '.join(get_args(Recompute))}")
    return profiles.estimate_profile(
        shape,
        _sheet(options.device),
        microbatch_size=options.microbatch,
        sequence_length=options.sequence_length or _usual_length(shape),
        precision="bfloat16" if options.precision == "bfloat16" else "float32",
        recompute=cast("Recompute", recompute),
        device_counts=tuple(1 << exponent for exponent in range(options.devices_per_node.bit_length())),
        expert_parallel=expert_parallel,
        context_parallel=context_parallel,
    )


def kinds_of(
    counts: int | Sequence[inputs.KindCount],
    options: inputs.PlanningOptions,
    given: Set[str],
    *,
    expert_parallel: bool = False,
    context_parallel: int = 1,
) -> tuple[tuple[NodeKind, ...], dict[str, str]]:
    """Read or estimate the profile of each kind of nodes, and return the kind of each node.

    `counts` is the number of nodes that are all alike, or of each kind; `given` are the names of the fields whose
    options were given. Unless `--profiles` names files, a kind has the name of its device.
    """
    if isinstance(counts, int):
        if options.profiles is not None:
            raise UsageError("--profiles is for nodes of several kinds; name them, as in --nodes A100:16,A40:16")
        profile = profile_of(options, given, expert_parallel=expert_parallel, context_parallel=context_parallel)
        alike = NodeKind(name=profile.device.name, profile=profile, devices_per_node=options.devices_per_node)
        return (alike,), {f"node{number}": alike.name for number in range(counts)}
    names = [count.kind for count in counts]
    files = inputs.parse_profiles(options.profiles, names) if options.profiles is not None else None
    if options.profile_file is not None:
        raise UsageError("--profile and kinds of nodes were both given; pass --profiles KIND:FILE,KIND:FILE")
    if options.device is not None:
        raise UsageError("--device and kinds of nodes were both given; a kind's name is its device")
    kinds = []
    for count in counts:
        devices = count.devices_per_node or options.devices_per_node
        # Stages have several devices only where all nodes are of one kind.
        own = replace(options, devices_per_node=devices if len(counts) == 1 else 1)
        own = replace(own, device=count.kind) if files is None else replace(own, profile_file=files[count.kind])
        profile = profile_of(own, given, expert_parallel=expert_parallel, context_parallel=context_parallel)
        kinds.append(NodeKind(name=count.kind, profile=profile, devices_per_node=devices))
    return tuple(kinds), {node: count.kind for count in counts for node in count.names}


def utilisation_of(profile: Profile, options: inputs.PlanningOptions) -> tuple[float, float] | None:
    """Return (operations of one step, peak operations a second of one device), or None where they are not known."""
    model, device = options.model or profile.model, options.device or profile.device.name
    if options.profile_file is not None and (
        model.lower() not in profiles.KNOWN_MODELS or device.lower() not in profiles.KNOWN_DEVICES
    ):
        return None
    shape, sheet = _shape(model), _sheet(device)
    flops = profiles.training_flops(shape, num_samples=options.global_batch, sequence_length=profile.sequence_length)
    return flops, sheet.bfloat16_flops if options.precision == "bfloat16" else sheet.float32_flops


def _read(path: Path, options: inputs.PlanningOptions, given: Set[str]) -> Profile:
    for option, value in (("--model", options.model), ("--device", options.device)):
        if value is not None:
            raise UsageError(f"{option} and --profile were both given; a profile has its own")
    source = "--profile" if options.profiles is None else "--profiles"
    for option, field in (("--recompute", "recompute"), ("--activation-checkpointing", "recomputes_all")):
        if field in given:
            raise UsageError(f"{option} and {source} were both given; a profile has been measured with its own level")
    profile = profile_from_json(read_input(path, "profile", most_bytes=MAX_DATA_BYTES), source=str(path))
    for option, named, own in (
        ("--microbatch", options.microbatch, profile.microbatch_size),
        ("--sequence-length", options.sequence_length, profile.sequence_length),
    ):
        if named not in (None, own):
            raise UsageError(
                f"{option} is {named}, and {path} was made for {own}; leave the option out, or make a profile for it"
            )
    return profile


def _usual_length(shape: profiles.ModelShape) -> int:
    # Some models have a few special positions on top of a power of two.
    return 1 << (shape.num_positions.bit_length() - 1) if shape.num_positions else _DEFAULT_LENGTH


def _shape(name: str) -> profiles.ModelShape:
    # A file counts only where the name looks like one, so that no stray file changes a plan.
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
