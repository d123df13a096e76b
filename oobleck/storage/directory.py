"""A directory of checkpoints on disk. A checkpoint is complete once its manifest has its name.

<directory>/step-00000120.5f3a9c1e.2/     step, run and generation: written once, never overwritten
    layer-0000.safetensors …              each with its optimizer state; layer-0000.0.safetensors, …1… are two parts
    manifest.json                         renamed last; has the SHA-256 of every file
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

from . import remote
from .layer_file import file_digest, fsync_directory, write_file, write_layer_file
from .layout import Layout
from .memory import Slot

MANIFEST_NAME = "manifest.json"
_PREFIX = "step-"
_REMOVED_PREFIX = ".removed-"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFault:
    file: Path
    problem: str

    def __str__(self) -> str:
        return f"{self.file}: {self.problem}"


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundManifest:
    """A checkpoint in the directory: its manifest, or the problem that makes it unusable."""

    name: str
    manifest: Manifest | None
    problem: str | None = None
    is_damaged: bool = False
    """Whether the checkpoint was complete once, but its manifest is unusable now."""


@dataclass(frozen=True, slots=True)
class CheckpointDirectory:
    """The directory of a run's checkpoints; it need not exist before the first `persist`."""

    path: Path
    """A path of this machine, or the place of a URL."""

    # --- writing -------------------------------------------------------------------------------------------

    def persist(self, name: str, slot: Slot) -> tuple[Shard, ...]:
        """Write the layers of a slot, one file each. O(size).

        Raises OSError, or CorruptCheckpoint if the slot is broken or does not hold the named state all the time.
        """
        # The worker may save a newer state into the slot at any time, which changes its sequence. Bytes that are broken
        # in memory must never get a checksum that declares them whole.
        sequence = slot.sequence
        if not slot.holds(name):
            raise CorruptCheckpoint(f"{slot.memory.path}: slot {slot.number} has another state than {name} by now")
        slot.verify()
        layout = slot.memory.layout
        target = self.path / name
        # Only once, and not for each layer: if another node removes the checkpoint meanwhile, writing it must fail.
        if remote.is_here(target):
            target.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            shards = tuple(self.write_layer(name, layer, layout, slot.data) for layer in layout.layers)
        except OSError:
            # The next save needs the room that these files take.
            with suppress(OSError):
                for layer in layout.layers:
                    (target / layer_file_name(layer, _part_of(layout))).unlink(missing_ok=True)
                target.rmdir()  # fails if other nodes have written there
            raise
        # What was read meanwhile may be a mixture of two states, although each file agrees with its checksum.
        if not slot.is_valid or slot.sequence != sequence:
            raise CorruptCheckpoint(f"{slot.memory.path}: slot {slot.number} was overwritten while it was read")
        return shards

    def write_layer(self, name: str, layer: int, layout: Layout, data: memoryview) -> Shard:
        """Write a layer's file into a checkpoint's existing directory. O(size). Raises OSError."""
        file = layer_file_name(layer, _part_of(layout))
        metadata = {**layout.metadata, "format": "pt", "layer": str(layer)}
        size, digest = write_layer_file(self.path / name / file, layout.entries_of(layer), data, metadata=metadata)
        return Shard(layer=layer, part=layout.part, file=file, size_bytes=size, sha256=digest)

    def commit(self, manifest: Manifest) -> None:
        """Write a checkpoint's manifest, which makes it complete. Several nodes may write the same one.

        Raises OSError; FileNotFoundError if the checkpoint's directory is not here.
        """
        target = self.path / manifest.name
        text = json.dumps(to_builtins(manifest), indent=1).encode() + b"\n"
        write_file(target / MANIFEST_NAME, [memoryview(text)])
        if remote.is_here(self.path):
            fsync_directory(self.path)  # it has the checkpoint's own name, which `write_file` has not synced

    def attach(self, name: str, file: str, content: bytes) -> None:
        """Put a file beside the layers of a checkpoint, which goes where the checkpoint goes. Raises OSError."""
        write_file(self.path / name / file, [memoryview(content)])

    def remove(self, names: Iterable[str]) -> None:
        """Remove checkpoints. Raises OSError."""
        for name in names:
            if not name.startswith(_PREFIX) or "/" in name:
                continue  # not a checkpoint
            if not remote.is_here(self.path):
                remote.remove(self.path / name, first=MANIFEST_NAME)
                continue
            try:
                # Renamed first, so that none is ever taken for complete while it is not, and that other nodes, which
                # may remove or complete it at the same time, find nothing under its name.
                (self.path / name).rename(self.path / f"{_REMOVED_PREFIX}{name}")
                fsync_directory(self.path)
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ENOTEMPTY):  # gone, or another node is removing it
                    raise
        if not remote.is_here(self.path):
            return
        # Nodes that were killed in the middle of a removal have left others.
        for renamed in self.path.glob(f"{_REMOVED_PREFIX}*"):
            shutil.rmtree(renamed, ignore_errors=True)

    def remove_unfinished(self, names: Iterable[str]) -> None:
        """Remove those of the checkpoints that have no manifest, not even a damaged one."""
        self.remove(name for name in names if self.is_unfinished(name))

    # --- reading -------------------------------------------------------------------------------------------

    def names(self) -> tuple[str, ...]:
        """Return the sorted names of all checkpoints, complete or not."""
        if not remote.is_here(self.path):
            return tuple(sorted(name for name in remote.directories(self.path) if name.startswith(_PREFIX)))
        if not self.path.is_dir():
            return ()
        return tuple(sorted(path.name for path in self.path.glob(f"{_PREFIX}*") if path.is_dir()))

    def is_unfinished(self, name: str) -> bool:
        """Whether a checkpoint was never complete: it has no manifest, not even a damaged one."""
        if not remote.is_here(self.path):
            return MANIFEST_NAME not in remote.sizes(self.path / name)
        return not os.path.lexists(self.path / name / MANIFEST_NAME)

    def find(self) -> tuple[FoundManifest, ...]:
        """Return all checkpoints, the newest first; reads only manifests."""
        found = [self._found(name) for name in self.names()]
        # Unusable ones have no age: they come last.
        age = ages(each.manifest for each in found if each.manifest is not None)
        whole = sorted((each for each in found if each.name in age), key=lambda each: age[each.name], reverse=True)
        return (*whole, *(each for each in reversed(found) if each.name not in age))

    def _found(self, name: str) -> FoundManifest:
        try:
            return FoundManifest(name=name, manifest=self.manifest(name))
        except CorruptCheckpoint as error:
            return FoundManifest(name=name, manifest=None, problem=str(error), is_damaged=not self.is_unfinished(name))

    def manifest(self, name: str) -> Manifest:
        """Read a checkpoint's manifest. Raises CorruptCheckpoint, which names the file, and StoreError."""
        path = self.path / name / MANIFEST_NAME
        try:
            raw = load_json(self.attached(name, MANIFEST_NAME))
            # Before the fields, because other versions have others, and the error must name the version.
            if not isinstance(raw, dict) or raw.get("version") != MANIFEST_VERSION:
                raise CorruptCheckpoint(f"{path}: not a manifest of version {MANIFEST_VERSION}")
            manifest = from_builtins(Manifest, raw)
        except FileNotFoundError:
            raise CorruptCheckpoint(f"{path}: missing; the checkpoint was never finished") from None
        except remote.StoreError:
            raise  # it may be whole: an older one must not be used in its place
        except (OSError, ValueError, PeerError) as error:
            raise CorruptCheckpoint(f"{path}: damaged: it cannot be read ({error})") from error
        if manifest.name != name:
            raise CorruptCheckpoint(f"{path}: belongs to {manifest.name}")
        if (wrong := what_is_wrong(manifest)) is not None:
            raise CorruptCheckpoint(f"{path}: damaged: {wrong}")
        return manifest

    def attached(self, name: str, file: str) -> bytes:
        """Return what a file beside the layers of a checkpoint has. Raises OSError and StoreError."""
        path = self.path / name / file
        return path.read_bytes() if remote.is_here(path) else bytes(remote.read(path))

    def layers_here(self, manifest: Manifest) -> tuple[int, ...]:
        """Return the layers whose files are all here with the right sizes; does not read their bytes."""
        if remote.is_here(self.path):
            whole = [shard for shard in manifest.shards if self._fault_in_size(manifest, shard) is None]
        else:
            there = remote.sizes(self.path / manifest.name)
            whole = [shard for shard in manifest.shards if there.get(shard.file) == shard.size_bytes]
        here = Counter(shard.layer for shard in whole)
        return tuple(sorted(layer for layer, count in here.items() if count == manifest.num_parts))

    def faults(self, manifest: Manifest) -> Iterator[FileFault]:
        """Read every file, and yield what is missing, cut off or changed. O(size)."""
        listed = {(shard.layer, shard.part) for shard in manifest.shards}
        for layer, part in product(range(len(manifest.layer_names)), range(manifest.num_parts)):
            if (layer, part) not in listed:
                file = layer_file_name(layer, None if manifest.num_parts == 1 else part)
                yield FileFault(file=self.path / manifest.name / file, problem="not in the manifest")
        for shard in manifest.shards:
            if (fault := self.fault_of(manifest, shard)) is not None:
                yield fault

    def fault_of(self, manifest: Manifest, shard: Shard) -> FileFault | None:
        """Compare a layer's file with the manifest; None if it is whole. O(size)."""
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
            size = path.stat().st_size if remote.is_here(path) else remote.sizes(path.parent).get(path.name)
            if size is None:
                return FileFault(file=path, problem="missing")
        except FileNotFoundError:
            return FileFault(file=path, problem="missing")
        except OSError as error:
            return FileFault(file=path, problem=error.strerror or str(error))
        if size != shard.size_bytes:
            return FileFault(file=path, problem=f"{size} bytes; it should have {shard.size_bytes}")
        return None


def _part_of(layout: Layout) -> int | None:
    return layout.part if "part" in layout.metadata else None


def layer_file_name(layer: int, part: int | None = None) -> str:
    return f"layer-{layer:04d}.safetensors" if part is None else f"layer-{layer:04d}.{part}.safetensors"
