"""`oobleck up --dry-run`: shows the plan that a run would begin with, and starts nothing.

Times come from the newest measured profile in the run's directory that fits the job, or else from an estimate by the
model's shape and a data sheet. The sizes of layers are the model's own in either case.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from oobleck.control.scaling import first_target
from oobleck.control.training import check_possible, choose_sharding, fixed_schedule, planner_for
from oobleck.errors import ConfigError, UsageError, UserError
from oobleck.host.machine import this_machine
from oobleck.host.places import is_url
from oobleck.host.user_path import expand_user
from oobleck.job import DEFAULT_KIND, JobSpec, NodeSpec
from oobleck.planner import KNOWN_DEVICES, LayerProfile, NodeKind, Profile, profile_from_json
from oobleck.planner.profiles import (
    ModelShape,
    device_sheet,
    estimate_profile,
    in_one_layer,
    shape_from_config,
    shape_of_size,
)
from oobleck.runtime.files import MAX_DATA_BYTES, RunDirectory, read_input
from oobleck.runtime.processes import LayerOutline, ModelOutline, outline_of
from oobleck.runtime.profile_files import ProfileFiles

from .inputs import NodeSource, VirtualOnes, check_local_files
from .make_report import make_report, show_report

_ITEM_BYTES = {"float32": 4, "float64": 8, "bfloat16": 4, "float16": 4}  # mixed precision keeps parameters in float32
_MOMENTS = 2  # for each parameter, as Adam has them


def dry_run(
    job: JobSpec,
    source: NodeSource,
    *,
    base_dir: Path,
    as_json: bool,
    find_outline: Callable[[JobSpec], ModelOutline] = outline_of,
) -> None:
    """Print the plan of a job on the nodes of a source.

    `find_outline` returns the layers of the job's model; by default, it asks a process that loads torch.

    Raises ConfigError for a model, an optimizer, nodes or a base directory that a run would refuse as well, and for
    paths that virtual nodes lack. Only a run can check the paths of a hostfile's nodes.
    """
    _check_base_dir(base_dir)
    num_local = source.count if isinstance(source, VirtualOnes) else 0
    if num_local:
        _check_paths(job)
    shapes = _shapes(source, job)
    first, *others = dict.fromkeys(shapes.values())
    if others:
        kinds, times = _several_kinds(job, [first, *others], find_outline, num_local=num_local)
    else:
        kinds, times = _one_kind(job, base_dir, first, find_outline, num_local=num_local)
    domains = {spec.name: spec.domain for spec in source.specs if spec.domain}
    make_planner = partial(
        planner_for, job, kinds, {node: shape.kind for node, shape in shapes.items()}, domain_of=domains
    )
    sharding, choices = (
        choose_sharding(job, lambda each: make_planner(sharding=each), list(shapes))
        if len(job.shardings) > 1
        else (None, ())
    )
    planner = make_planner(sharding=sharding)
    ordered = planner.best_first(list(shapes))
    target = first_target(job, planner, ordered)
    resting = frozenset(ordered[target.num_nodes :])
    report = make_report(
        planner,
        [node for node in shapes if node not in resting],
        global_batch_size=job.global_batch_size,
        kind=fixed_schedule(job),
        num_lanes=job.num_lanes,
        context_parallel=job.context_parallel,
        choices=choices,
    )
    if not as_json:
        text = f"dry run of {job.tag}: nothing is started. Times: {times}\n"
        if resting:
            policy = job.scaling.policy
            text += f"\n{target.num_nodes} of {len(shapes)} nodes are to train ({policy}): {target.reason}\n"
        Console().print(text, markup=False, highlight=False, soft_wrap=True)
    show_report(report, as_json=as_json)


def _check_base_dir(base_dir: Path) -> None:
    """Raise ConfigError unless a run could make its directory there."""
    if problem := _why_not_made(base_dir):
        raise ConfigError(f"base directory {base_dir}: {problem}; name another by --base-dir")


def _why_not_made(directory: Path) -> str | None:
    """Return why a directory that may not exist yet cannot be made and written to; None if it can be."""
    there = next(path for path in (directory.absolute(), *directory.absolute().parents) if os.path.lexists(path))
    if not there.is_dir():
        return f"{there} is not a directory"
    if not os.access(there, os.W_OK | os.X_OK):
        return f"you may not write in {there}"
    try:
        # Some file systems, such as /proc, say that anyone may write, and refuse each attempt.
        os.rmdir(tempfile.mkdtemp(prefix=".oobleck-", dir=there))
    except OSError as error:
        return f"nothing can be written in {there} ({error.strerror})"
    return None


def _check_paths(job: JobSpec) -> None:
    """Raise ConfigError for files, or a place for checkpoints, that this machine does not have."""
    check_local_files(job.data, job.checkpoint)
    directory = job.checkpoint.directory
    is_here = job.checkpoint.enabled and directory is not None and not is_url(directory)
    if is_here and directory is not None and (problem := _why_not_made(expand_user(directory))):
        raise ConfigError(f"checkpoint.directory: {directory}: {problem}; name another one")


class _Shape(NamedTuple):
    device: str
    num_devices: int
    kind: str


def _shapes(source: NodeSource, job: JobSpec) -> dict[str, _Shape]:
    """Return the shape of each node, keyed by its name; nodes that are not known yet count as of one kind."""
    specs: Sequence[NodeSpec] = source.specs
    if not specs:
        each = [(DEFAULT_KIND, job.devices_per_stage)] * len(source.names)
        if isinstance(source, VirtualOnes):
            each = list(source.shapes(num_spare=0, num_devices=job.devices_per_stage))
        specs = [
            NodeSpec(name=name, host=name, device=device, devices=tuple(range(number)))
            for name, (device, number) in zip(source.names, each, strict=True)
        ]
    return {spec.name: _Shape(spec.device, spec.num_devices, spec.kind) for spec in specs}


def _one_kind(
    job: JobSpec, base_dir: Path, shape: _Shape, find_outline: Callable[[JobSpec], ModelOutline], *, num_local: int
) -> tuple[list[NodeKind], str]:
    if job.device != "cpu":
        raise UsageError(f"--dry-run: estimates are for CPUs, not for {job.device}; use `oobleck plan --device`")
    directory, outline = RunDirectory(base_dir=base_dir, tag=job.tag).profile, find_outline(job)
    measured = next(_fitting(directory, job, outline), None)
    known = measured[1] if measured else _estimate(job, outline, num_local=num_local)
    known = _with_memory(known, job, num_local=num_local)  # a profile may be of a run on another number of nodes
    profile = ProfileFiles(directory).with_links(known)
    times = f"measured before ({measured[0]})" if measured else "an estimate; the run itself measures first"
    return [NodeKind(name=shape.kind, profile=profile, devices_per_node=shape.num_devices)], times


def _several_kinds(
    job: JobSpec, shapes: Collection[_Shape], find_outline: Callable[[JobSpec], ModelOutline], *, num_local: int
) -> tuple[list[NodeKind], str]:
    check_possible(job, kinds=[shape.kind for shape in shapes])
    unknown = sorted({shape.device for shape in shapes if shape.device.lower() not in KNOWN_DEVICES})
    if unknown and job.device != "cpu":
        raise UsageError(
            f"--dry-run: there is no data sheet of {unknown[0]}; estimates are for {', '.join(KNOWN_DEVICES)}"
        )
    outline = find_outline(job)
    kinds = [
        NodeKind(
            name=shape.kind,
            profile=_estimate(job, outline, num_local=num_local, sheet=shape.device),
            devices_per_node=shape.num_devices,
        )
        for shape in shapes
    ]
    times = "estimates; the run itself measures each kind first"
    if unknown:
        times += f"\nNo data sheet is known of {', '.join(unknown)}: that of a CPU core is used"
    return kinds, times


def _fitting(directory: Path, job: JobSpec, outline: ModelOutline) -> Iterator[tuple[Path, Profile]]:
    """Yield the measured profiles that fit the job, newest first."""
    paths = directory.glob("*.json") if directory.is_dir() else ()
    for path in sorted(paths, key=lambda path: path.stat().st_mtime_ns, reverse=True):
        try:
            profile = profile_from_json(read_input(path, "profile", most_bytes=MAX_DATA_BYTES), source=str(path))
        except UserError:
            continue  # it is torn, or another version's: a run would measure again
        if _fits(profile, job, outline):
            yield path, profile


def _fits(profile: Profile, job: JobSpec, outline: ModelOutline) -> bool:
    """Return whether a profile is of this model and these shapes, by the names and the bytes of its layers."""
    return (
        profile.model == outline.config["model_type"]
        and profile.microbatch_size == job.microbatch_size
        and profile.sequence_length == job.data.sequence_length
        and len(profile.layers) == len(outline.layers)
        and all(
            _is_same_layer(layer, other, _ITEM_BYTES[job.dtype], is_end=index in (0, len(outline.layers) - 1))
            for index, (layer, other) in enumerate(zip(profile.layers, outline.layers, strict=True))
        )
    )


def _is_same_layer(layer: LayerProfile, other: LayerOutline, item_bytes: int, *, is_end: bool) -> bool:
    expected, frozen_bytes = other.parameters * item_bytes, (other.parameters - other.trained) * item_bytes
    # A small text yields a smaller vocabulary than requested, which shrinks the embedding and the head.
    if is_end:
        same_size = layer.param_bytes <= expected and layer.frozen_bytes <= frozen_bytes
    else:
        same_size = layer.param_bytes == expected and layer.frozen_bytes == frozen_bytes
    return layer.name == other.name and same_size


def _estimate(job: JobSpec, outline: ModelOutline, *, num_local: int, sheet: str = "CPU") -> Profile:
    """Estimate times from a data sheet, or from that of a CPU core if there is none; sizes are the model's own."""
    is_whole = len(outline.layers) == 1
    profile = estimate_profile(
        shape_of_size(outline.layers[0].parameters) if is_whole else _shape_of(outline),
        device_sheet(sheet if sheet.lower() in KNOWN_DEVICES else "CPU"),
        microbatch_size=job.microbatch_size,
        sequence_length=job.data.sequence_length,
        precision="bfloat16" if job.dtype in ("bfloat16", "float16") else "float32",
        recompute=job.recompute,
        expert_parallel=job.expert_parallel,
        context_parallel=job.context_parallel,
    )
    if is_whole:
        profile = in_one_layer(profile, name=str(outline.config["model_type"]))
    item_bytes = _ITEM_BYTES[job.dtype]
    layers = (_scaled(layer, other, item_bytes) for layer, other in zip(profile.layers, outline.layers, strict=True))
    return _with_memory(replace(profile, layers=tuple(layers)), job, num_local=num_local)


def _shape_of(outline: ModelOutline) -> ModelShape:
    try:
        return shape_from_config(outline.config)
    except ConfigError as error:
        raise ConfigError(
            f"this model cannot be estimated ({error}), and no run has measured it: train some steps first, which "
            "`--steps 3` does"
        ) from error


def _with_memory(profile: Profile, job: JobSpec, *, num_local: int) -> Profile:
    device = profile.device
    # Virtual nodes share the memory of this machine.
    memory_bytes = job.device_memory_bytes or (
        this_machine().usable_memory_bytes // num_local if num_local else device.memory_bytes
    )
    return replace(profile, device=replace(device, memory_bytes=memory_bytes))


def _scaled(layer: LayerProfile, other: LayerOutline, item_bytes: int) -> LayerProfile:
    """Return a layer with the model's own name and sizes, and times in proportion to the width of numbers."""
    factor = item_bytes // _ITEM_BYTES["float32"]
    param_bytes, trained_bytes = other.parameters * item_bytes, other.trained * item_bytes
    return replace(
        layer,
        name=other.name,
        forward_s={count: factor * seconds for count, seconds in layer.forward_s.items()},
        backward_s={count: factor * seconds for count, seconds in layer.backward_s.items()},
        param_bytes=param_bytes,
        frozen_bytes=param_bytes - trained_bytes,
        optimizer_bytes=_MOMENTS * trained_bytes,
        activation_bytes=factor * layer.activation_bytes,
        output_bytes=factor * layer.output_bytes,
        # Not all blocks of a mixture have experts, of which its shape knows nothing.
        expert_bytes=min(param_bytes, factor * layer.expert_bytes),
        expert_message_bytes=factor * layer.expert_message_bytes,
        context_bytes=factor * layer.context_bytes,
    ).with_recomputed(
        lambda each: replace(
            each,
            more_s={count: factor * seconds for count, seconds in each.more_s.items()},
            activation_bytes=factor * each.activation_bytes,
        )
    )
