"""A directory of checkpoints on disk. A checkpoint is complete when its manifest has its name, and not before.

<directory>/step-00000120.5f3a9c1e.2/     step, run and generation: written once, never written over
    layer-0000.safetensors …              each with its optimizer state; layer-0000.0.safetensors, …1… are two parts
    manifest.json                         the last to get its name; holds the SHA-256 of every file
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from oobleck.control.protocol import MANIFEST_VERSION, Manifest, Shard, ages, what_is_wrong
from oobleck.errors import CorruptCheckpoint, PeerError
from oobleck.json_table import load_json
from oobleck.wire import from_builtins, to_builtins

from .layer_file import file_digest, fsync_directory, write_file, write_layer_file
from .layout import Layout
from .memory import Slot

MANIFEST_NAME = "manifest.json"
_PREFIX = "step-"
_REMOVED_PREFIX = ".removed-"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFault:
    """What is wrong with one file of a checkpoint."""

    file: Path
    problem: str

    def __str__(self) -> str:
        return f"{self.file}: {self.problem}"


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundManifest:
    """A checkpoint in the directory: complete with its manifest, or what keeps it from being used."""

    name: str
    manifest: Manifest | None
    problem: str | None = None
    is_damaged: bool = False
    """There is a manifest, and it cannot be used: the checkpoint was complete once."""


@dataclass(frozen=True, slots=True)
class CheckpointDirectory:
    """Where the checkpoints of a run lie; nothing exists before the first `persist`."""

    path: Path

    # --- writing -------------------------------------------------------------------------------------------

    def persist(self, name: str, slot: Slot) -> tuple[Shard, ...]:
        """Write the layers of a slot, one file each. O(size). Raises OSError, or CorruptCheckpoint for a bad slot.

        The slot must hold the state of that name, is verified before its bytes are written, and must be the same
        after: its worker may have saved a newer state into it since the caller found it, and what is broken in memory
        must never get a checksum that says it is whole.
        """
        sequence = slot.sequence  # first: whatever is saved into the slot from here on changes it
        if not slot.holds(name):
            raise CorruptCheckpoint(f"{slot.memory.path}: slot {slot.number} has another state than {name} by now")
        slot.verify()
        layout = slot.memory.layout
        target = self.path / name
        target.mkdir(mode=0o700, parents=True, exist_ok=True)  # once: where others remove it meanwhile, this fails
        try:
            shards = tuple(self.write_layer(name, layer, layout, slot.data) for layer in layout.layers)
        except OSError:
            self._take_back(target, layout)
            raise
        if not slot.is_valid or slot.sequence != sequence:
            raise CorruptCheckpoint(f"{slot.memory.path}: slot {slot.number} was written over while it was read")
        return shards

    def _take_back(self, target: Path, layout: Layout) -> None:
        """Remove what was written before the disk refused more: the next save needs the room."""
        with suppress(OSError):
            for layer in layout.layers:
                (target / layer_file_name(layer, _part_of(layout))).unlink(missing_ok=True)
            target.rmdir()  # unless others have written there

    def write_layer(self, name: str, layer: int, layout: Layout, data: memoryview) -> Shard:
        """Write a layer's file into a checkpoint's directory, which must be there. O(size). Raises OSError."""
        file = layer_file_name(layer, _part_of(layout))
        metadata = {**layout.metadata, "format": "pt", "layer": str(layer)}
        size, digest = write_layer_file(self.path / name / file, layout.entries_of(layer), data, metadata=metadata)
        return Shard(layer=layer, part=layout.part, file=file, size_bytes=size, sha256=digest)

    def commit(self, manifest: Manifest) -> None:
        """Give a checkpoint its manifest: from here on it is complete. Every node may do so; they write the same.

        Raises OSError; FileNotFoundError where nothing of it is here, or where it has just been removed.
        """
        target = self.path / manifest.name
        text = json.dumps(to_builtins(manifest), indent=1).encode() + b"\n"
        write_file(target / MANIFEST_NAME, [memoryview(text)])
        fsync_directory(self.path)

    def remove(self, names: Iterable[str]) -> None:
        """Remove checkpoints. Each loses its name first, so that none is ever taken for complete when it is not.

        Others may remove the same ones at the same time, or complete them: they find nothing under the name any more.
        Raises OSError.
        """
        for name in names:
            if not name.startswith(_PREFIX) or "/" in name:
                continue  # not one of ours
            try:
                (self.path / name).rename(self.path / f"{_REMOVED_PREFIX}{name}")
                fsync_directory(self.path)
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ENOTEMPTY):  # the latter: one of this name is being removed
                    raise
        for nameless in self.path.glob(f"{_REMOVED_PREFIX}*"):  # others', too: they may have been killed over it
            shutil.rmtree(nameless, ignore_errors=True)

    def remove_unfinished(self, names: Iterable[str]) -> None:
        """Remove what is there of saves that were given up; what has a manifest, whole or not, is left alone."""
        self.remove(name for name in names if self.is_unfinished(name))

    # --- reading -------------------------------------------------------------------------------------------

    def names(self) -> tuple[str, ...]:
        """Everything that looks like a checkpoint, complete or not, sorted."""
        if not self.path.is_dir():
            return ()
        return tuple(sorted(path.name for path in self.path.glob(f"{_PREFIX}*") if path.is_dir()))

    def is_unfinished(self, name: str) -> bool:
        """Whether a checkpoint has no manifest, not even a damaged one: it was never complete."""
        return not os.path.lexists(self.path / name / MANIFEST_NAME)

    def find(self) -> tuple[FoundManifest, ...]:
        """All checkpoints, the newest first; reads manifests only."""
        found = [self._found(name) for name in self.names()]
        age = ages(each.manifest for each in found if each.manifest is not None)
        whole = sorted((each for each in found if each.name in age), key=lambda each: age[each.name], reverse=True)
        return (*whole, *(each for each in reversed(found) if each.name not in age))

    def _found(self, name: str) -> FoundManifest:
        try:
            return FoundManifest(name=name, manifest=self.manifest(name))
        except CorruptCheckpoint as error:
            return FoundManifest(name=name, manifest=None, problem=str(error), is_damaged=not self.is_unfinished(name))

    def manifest(self, name: str) -> Manifest:
        """Read a checkpoint's manifest. Raises CorruptCheckpoint that names the file."""
        path = self.path / name / MANIFEST_NAME
        try:
            raw = load_json(path.read_bytes())
            if not isinstance(raw, dict) or raw.get("version") != MANIFEST_VERSION:
                raise CorruptCheckpoint(f"{path}: not a manifest of version {MANIFEST_VERSION}")
            manifest = from_builtins(Manifest, raw)
        except FileNotFoundError:
            raise CorruptCheckpoint(f"{path}: missing; the checkpoint was never finished") from None
        except (OSError, ValueError, PeerError) as error:
            raise CorruptCheckpoint(f"{path}: damaged: it cannot be read ({error})") from error
        if manifest.name != name:
            raise CorruptCheckpoint(f"{path}: belongs to {manifest.name}")
        if (wrong := what_is_wrong(manifest)) is not None:
            raise CorruptCheckpoint(f"{path}: damaged: {wrong}")
        return manifest

    def layers_here(self, manifest: Manifest) -> tuple[int, ...]:
        """The layers all of whose files are here and as long as they should be; their bytes are not looked at."""
        here = Counter(shard.layer for shard in manifest.shards if self._fault_in_size(manifest, shard) is None)
        return tuple(sorted(layer for layer, count in here.items() if count == manifest.num_parts))

    def faults(self, manifest: Manifest) -> Iterator[FileFault]:
        """Read every file and report what is missing, cut off or changed. O(size)."""
        told = {(shard.layer, shard.part) for shard in manifest.shards}
        for layer, part in product(range(len(manifest.layer_names)), range(manifest.num_parts)):
            if (layer, part) not in told:
                file = layer_file_name(layer, None if manifest.num_parts == 1 else part)
                yield FileFault(file=self.path / manifest.name / file, problem="not in the manifest")
        for shard in manifest.shards:
            fault = self.fault_of(manifest, shard)
            if fault is not None:
                yield fault

    def fault_of(self, manifest: Manifest, shard: Shard) -> FileFault | None:
        """Read a layer's file and compare it with the manifest; None when it is whole. O(size)."""
        fault = self._fault_in_size(manifest, shard)
        if fault is not None:
            return fault
        path = self.path / manifest.name / shard.file
        try:
            digest = file_digest(path)
        except OSError as error:
            return FileFault(file=path, problem=error.strerror or str(error))
        if digest != shard.sha256:
            return FileFault(file=path, problem=f"changed: its SHA-256 is {digest}, not {shard.sha256}")
        return None

    def _fault_in_size(self, manifest: Manifest, shard: Shard) -> FileFault | None:
        path = self.path / manifest.name / shard.file
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            return FileFault(file=path, problem="missing")
        except OSError as error:
            return FileFault(file=path, problem=error.strerror or str(error))
        if size != shard.size_bytes:
            return FileFault(file=path, problem=f"{size} bytes; it should have {shard.size_bytes}")
        return None


def _part_of(layout: Layout) -> int | None:
    """Which part of its layers a layout has, where these are cut."""
    return layout.part if "part" in layout.metadata else None


def layer_file_name(layer: int, part: int | None = None) -> str:
    """The name of a layer's file, or of that of one of its parts."""
    return f"layer-{layer:04d}.safetensors" if part is None else f"layer-{layer:04d}.{part}.safetensors"
