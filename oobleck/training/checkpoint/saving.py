"""A worker's part in checkpoints: saves its share when a commit asks for it, finds states, and restores layers.

The request to save is raised here and travels with the commit of a step, so that all workers save after the same one.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch

from oobleck import storage
from oobleck.control import protocol
from oobleck.control.checkpoints import saving_shares
from oobleck.errors import ConfigError, CorruptCheckpoint
from oobleck.host.places import place_of
from oobleck.planner import ExecutionPlan, WorkerId
from oobleck.training.model import Share
from oobleck.training.worker_log import WorkerLog

from .imported import IMPORTED
from .parts import cut_state, model_metadata, part_metadata, part_to_save, without_states
from .state import FlashSaver, LayerTensors, StateReader, write_layer
from .weights import gathered_in

_ANY_DEVICE = "device*"  # the states of the node's other workers can be read too

Report = Callable[[protocol.WorkerReport], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Share:
    """The layers that a worker saves under a plan."""

    plan: ExecutionPlan
    lost: frozenset[str]
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Findings:
    found: list[protocol.FoundState] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    misfits: list[str] = field(default_factory=list)


class LayerSaver:
    """The checkpoints of one worker. The control thread calls `want` and `find`, the training thread the rest."""

    def __init__(
        self,
        worker_id: WorkerId,
        paths: protocol.StoragePaths,
        share: Share,
        report: Report,
        *,
        tag: str,
        device: torch.device,
    ) -> None:
        """`tag` is the job's, since jobs may share a directory of checkpoints. `device` holds the layers."""
        structure = share.structure
        self._tag = tag
        self._part = share
        self._worker_id = worker_id
        self._run = paths.run
        self._structure = structure
        self._report = report
        self._memory = Path(paths.memory)
        self._checkpoints = storage.CheckpointDirectory(place_of(paths.checkpoints, "checkpoint.directory"))
        self._saver = FlashSaver(
            self._memory,
            f"device{worker_id.device}",
            metadata={**model_metadata(structure), **part_metadata(share)},
            report=self._saved,
            number=worker_id.device,
            device=device,
        )
        self._log = WorkerLog(__name__, worker_id)
        self._sizes = [
            sum(math.prod(share.whole.shapes[name]) for name in structure.layer_parameters(layer))
            for layer in range(structure.num_layers)
        ]
        self._wanted: int | None = None
        self._last_step = 0
        self._share: _Share | None = None

    # --- control thread ------------------------------------------------------------------------------------

    def want(self, message: protocol.SaveState) -> None:
        """Request a save, unless a save has answered this request already."""
        if message.step > self._last_step:
            self._wanted = message.step

    def go_back(self) -> None:
        """Note that steps are run again, and saved again."""
        self._last_step = 0

    def find(self, message: protocol.FindCheckpoints) -> None:
        """Look for states, and report them."""
        # Disks may be slow, and the control thread has to answer meanwhile.
        threading.Thread(target=lambda: self._find(message), daemon=True, name="find checkpoints").start()

    # --- training thread -----------------------------------------------------------------------------------

    def share_as(self, share: Share) -> None:
        """Share layers out so from now on; nothing is saved yet."""
        self._part = share

    def is_wanted(self, step: int) -> bool:
        """Return whether this worker requests a save after `step`."""
        wanted = self._wanted  # read once, since the control thread sets it
        return wanted is not None and self._last_step < wanted <= step

    def prepare(self, plan: ExecutionPlan, tensors_of: Callable[[int], Mapping[str, torch.Tensor]]) -> None:
        """Allocate memory for this worker's share under a plan, in the background."""
        if self._share is None or self._share.plan is not plan or self._share.lost:
            layers = self._take_share(plan, (), tensors_of)
            if layers:
                self._saver.prepare(layers)

    def save(
        self,
        plan: ExecutionPlan,
        lost: Collection[str],
        step: int,
        generation: int,
        tensors_of: Callable[[int], Mapping[str, torch.Tensor]],
        *,
        position: protocol.DataPosition | None = None,
    ) -> None:
        """Save this worker's share of the state after a committed step, among the nodes that are not lost.

        The state must not change until `settle` has returned. `position` is the run's position in its shards.
        """
        self._last_step = step  # what is wanted after a later one stays wanted
        layers = self._take_share(plan, lost, tensors_of)
        if layers:
            name = storage.checkpoint_name(self._run, step=step, generation=generation)
            self._saver.save(layers, name=name, step=step, generation=generation, position=position)

    def settle(self) -> None:
        self._saver.settle()

    def gather(
        self,
        plan: ExecutionPlan,
        lost: Collection[str],
        step: int,
        tensors_of: Callable[[int], Mapping[str, torch.Tensor]],
    ) -> Iterator[int]:
        """Write this worker's share of the weights for the script, next to the checkpoints; yields each layer.

        Whoever reads them sees what a full disk has left out.
        """
        gathered = gathered_in(self._checkpoints.path, step)
        directory, metadata = storage.CheckpointDirectory(gathered.parent), self._saver.metadata
        try:
            gathered.mkdir(mode=0o700, parents=True, exist_ok=True)
            for layer, tensors in self._take_share(plan, lost, tensors_of).items():
                yield layer
                write_layer(directory, gathered.name, layer, without_states(tensors), metadata=metadata)
        except OSError as error:
            self._log.warning("its weights after step %d are not gathered: %s", step, error)

    def load(self, restore: protocol.Restore, layer: int) -> Mapping[str, torch.Tensor]:
        """Return this worker's share of a layer's tensors from a checkpoint, verified. Raises CorruptCheckpoint."""
        elsewhere = (
            None if restore.directory is None else storage.CheckpointDirectory(place_of(restore.directory, "--resume"))
        )
        try:
            return cut_state(self._part, self._reader(elsewhere or self._checkpoints).load(restore.name, layer))
        except OSError as error:
            raise CorruptCheckpoint(f"layer {layer} of {restore.name}: {error}") from error

    def _take_share(
        self, plan: ExecutionPlan, lost: Collection[str], tensors_of: Callable[[int], Mapping[str, torch.Tensor]]
    ) -> LayerTensors:
        share = self._share
        if share is None or share.plan is not plan or share.lost != frozenset(lost):
            part = self._part
            dealt = saving_shares(plan, self._sizes, lost=lost, rank=part.rank, degree=part.degree)
            layers = dealt.get(self._worker_id, ())
            self._share = share = _Share(plan=plan, lost=frozenset(lost), layers=layers)
        return {layer: part_to_save(self._part, tensors_of(layer)) for layer in share.layers}

    # --- other threads -------------------------------------------------------------------------------------

    def _saved(self, saved: protocol.StateSaved | protocol.StateNotSaved) -> None:
        if isinstance(saved, protocol.StateNotSaved):
            self._log.warning("its share of %s is not saved: %s", saved.name, saved.reason)
        else:
            self._log.info(
                "has %d layers of %s in memory: %.1f MB, training waited %.3f s",
                len(saved.layers),
                saved.state.name,
                saved.size_bytes / 1e6,
                saved.pause_s,
            )
        self._report(saved)

    def _find(self, message: protocol.FindCheckpoints) -> None:
        findings = _Findings()
        for state, layers in self._reader(self._checkpoints).in_memory(fits=self._fits):
            findings.found.append(
                protocol.FoundState(
                    name=state.name,
                    run=storage.run_of(state.name),
                    step=state.step,
                    saved_at=state.saved_at,
                    layers=layers,
                    in_memory=True,
                    position=state.position,
                )
            )
        self._look_into(self._checkpoints, findings)
        if message.directory is not None:
            self._look_elsewhere(message.directory, findings)
        unfinished = tuple(name for name in self._checkpoints.names() if self._checkpoints.is_unfinished(name))
        self._report(
            protocol.CheckpointsFound(
                device=self._worker_id.device,
                request=message.request,
                found=tuple(findings.found),
                problems=tuple(findings.problems),
                unfinished=unfinished,
                misfits=tuple(findings.misfits),
            )
        )

    def _look_elsewhere(self, named: str, findings: _Findings) -> None:
        """Look at the path that the user names, which is one checkpoint or a directory of them."""
        try:
            path = place_of(named, "--resume")
        except ConfigError as error:
            findings.problems.append(str(error))
            return
        directory, only = path, None
        if not storage.CheckpointDirectory(path.parent).is_unfinished(path.name):
            directory, only = path.parent, path.name
        self._look_into(storage.CheckpointDirectory(directory), findings, elsewhere=str(directory), only=only)

    def _look_into(
        self,
        directory: storage.CheckpointDirectory,
        findings: _Findings,
        *,
        elsewhere: str | None = None,
        only: str | None = None,
    ) -> None:
        """Look at the checkpoints of a directory; `elsewhere` is its path if it is not this run's."""
        for entry in directory.find():
            if only is not None and entry.name != only:
                continue
            if entry.manifest is None:
                # Unfinished saves of our own are reported separately, and removed.
                if entry.is_damaged or elsewhere is not None:
                    findings.problems.append(f"{entry.problem}")
                continue
            if elsewhere is None and entry.manifest.tag not in (self._tag, IMPORTED):
                continue  # another job's
            problem = self._misfit(directory, entry.manifest)
            if problem is not None:
                text = f"{directory.path / entry.name}: {problem}"
                findings.problems.append(text)
                if elsewhere is None:
                    findings.misfits.append(text)
                continue
            findings.found.append(
                protocol.FoundState(
                    name=entry.name,
                    run=entry.manifest.run,
                    step=entry.manifest.step,
                    saved_at=entry.manifest.saved_at,
                    layers=directory.layers_here(entry.manifest),
                    in_memory=False,
                    directory=elsewhere,
                    position=entry.manifest.position,
                    origin=entry.manifest.origin,
                    is_final=entry.manifest.is_final,
                )
            )

    def _misfit(self, directory: storage.CheckpointDirectory, manifest: storage.Manifest) -> str | None:
        """Return why a checkpoint is of another model; None if it is of ours."""
        if manifest.layer_names != self._structure.layer_names:
            ours = self._structure.layer_names
            other = next((name for name in manifest.layer_names if name not in ours), None)
            what = f"{len(manifest.layer_names)} layers" if other is None else f"a layer {other}"
            return f"of another model, with {what}; ours has {len(ours)}, from {ours[0]} to {ours[-1]}"
        for shard in manifest.shards[:1]:
            # A damaged file is read again, and its fault reported, before it is used.
            with suppress(CorruptCheckpoint, OSError):
                file = storage.read_layer_file(directory.path / manifest.name / shard.file)
                return self._layer_misfit(shard.layer, [spec for spec, _ in file.tensors.values()], manifest.num_parts)
        return None

    def _fits(self, layout: storage.Layout) -> bool:
        """Return whether a state in memory is of our model: the job may have changed since it was saved."""
        specs: dict[int, list[storage.TensorSpec]] = {}
        for entry in layout.entries:
            specs.setdefault(entry.layer, []).append(entry.spec)
        return all(self._layer_misfit(layer, specs[layer], layout.num_parts) is None for layer in specs)

    def _layer_misfit(self, layer: int, specs: Sequence[storage.TensorSpec], num_parts: int) -> str | None:
        """Return why tensors are not those of a layer of our model; None if they are."""
        if layer not in range(self._structure.num_layers):
            return f"of another model, with a layer {layer}; ours has {self._structure.num_layers}"
        shapes = {spec.name: spec.shape for spec in specs}
        for name in self._structure.layer_parameters(layer):
            ours = tuple(self._part.whole.shapes[name])
            if name not in shapes:
                return f"of another model, without {name} in layer {layer}"
            # Parts of layers have shapes of their own.
            if num_parts == 1 and shapes[name] != ours:
                return f"of another model, whose {name} is {_size_text(shapes[name])}; ours is {_size_text(ours)}"
        return None

    def _reader(self, directory: storage.CheckpointDirectory) -> StateReader:
        return StateReader(self._memory, _ANY_DEVICE, directory)


def _size_text(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape)) or "a number"
