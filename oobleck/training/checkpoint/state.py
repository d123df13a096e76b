"""A worker's layers into shared memory, and back from there or from disk.

    training thread    save: names the state to copy; settle: waits for the copy, before the state changes
    background thread  allocates memory beforehand, copies, computes checksums, and reports

The state changes only when the next step is applied, so the copy runs during that step's forward and backward passes.
The agent, which outlives this process, writes the state in memory to disk.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import torch

from oobleck import storage
from oobleck.control.protocol import DataPosition, StateNotSaved, StateSaved
from oobleck.errors import CorruptCheckpoint, PeerError
from oobleck.training.comm import DeviceSave, start_thread
from oobleck.training.tensor_bytes import DTYPE_NAMES, as_tensor, no_room
from oobleck.wire import decode_json, encode_json

from .parts import Tensors, join_parts, read_part, shards_of

LayerTensors = Mapping[int, Mapping[str, torch.Tensor]]
"""Each layer's tensors, keyed by their names in files."""

_CPU = torch.device("cpu")


class FlashSaver:
    """Saves a worker's share of the layers. One thread calls it, and another calls `report`."""

    def __init__(
        self,
        directory: Path,
        stem: str,
        *,
        metadata: Mapping[str, str],
        report: Callable[[StateSaved | StateNotSaved], None],
        number: int = 0,
        device: torch.device = _CPU,
    ) -> None:
        """Memory files are `<directory>/<stem>.<n>`, with `metadata` for every layer. `device` holds the layers, and
        is the worker's device `number` in reports.
        """
        self._directory = directory
        self._stem = stem
        self.metadata = dict(metadata)
        self._report = report
        self._number = number
        self._memory: storage.FlashMemory | None = None
        self._targets: tuple[tuple[torch.Tensor, ...], ...] = ()  # the tensors in each slot
        self._problem = "no memory was made"
        self._layout: storage.Layout | None = None
        self._busy = threading.Semaphore(1)
        self._copied = threading.Event()
        self._copied.set()
        self._waits_since_s: float | None = None
        self._device_save = DeviceSave.on(device)
        self._tasks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        start_thread(self._work, name="checkpoint", device=device)

    def prepare(self, layers: LayerTensors) -> None:
        """Allocate memory for these layers in the background, unless it exists already."""
        layout = layer_layout(layers, metadata=self.metadata)
        if layout != self._layout:
            self._layout = layout
            self._tasks.put(lambda: self._make(layout))

    def save(
        self, layers: LayerTensors, *, name: str, step: int, generation: int, position: DataPosition | None = None
    ) -> None:
        """Begin to copy these layers, which must not change until `settle` returns. Reports the outcome later."""
        began_s = time.monotonic()
        saved_at = datetime.now(UTC).isoformat(timespec="milliseconds")
        state = storage.SavedState(name=name, step=step, generation=generation, saved_at=saved_at, position=position)
        # Training never waits for the checksums of the save before.
        if not self._busy.acquire(blocking=False):
            self._give_up(state, "the save before is still being checked")
            return
        self.prepare(layers)
        sources = [tensor for _, tensors in sorted(layers.items()) for tensor in tensors.values()]
        self._waits_since_s = None
        # Cleared on this thread, since `settle` may be called before the copy begins.
        self._copied.clear()
        if self._device_save is not None:
            self._device_save.mark()
        called_s = time.monotonic() - began_s
        self._tasks.put(lambda: self._carry_out(state, sources, called_s))

    def settle(self) -> None:
        """Wait until the state that is being saved may change."""
        if not self._copied.is_set():
            self._waits_since_s = time.monotonic()
            self._copied.wait()

    # --- background thread ---------------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            self._tasks.get()()

    def _make(self, layout: storage.Layout) -> None:
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            memory = storage.FlashMemory.create(storage.next_memory_file(self._directory, self._stem), layout)
        except OSError as error:
            self._memory, self._problem = None, no_room(self._directory, layout, error)
            # The next `prepare` tries again.
            self._layout = None
        else:
            slots = memory.slots()
            # Pinned ranges must not share a page, and slots begin with one.
            if self._device_save is not None:
                self._device_save.pin(torch.frombuffer(slot.data, dtype=torch.uint8) for slot in slots if slot.data)
            self._memory, self._targets = memory, tuple(map(_tensors_over, slots))

    def _carry_out(self, state: storage.SavedState, sources: list[torch.Tensor], called_s: float) -> None:
        if self._memory is None:
            self._copied.set()
            self._busy.release()
            self._give_up(state, self._problem)
            return
        slot = self._memory.next_slot()
        slot.begin()
        try:
            copy_s, waited_s = self._copy(sources, self._targets[slot.number])
        except RuntimeError as error:
            # Only this save fails: the thread and later saves go on.
            self._busy.release()
            self._give_up(state, f"it could not be copied: {error}")
            return
        slot.sum()
        slot.seal(encode_json(state))
        # Until both slots are valid, a file of a former share has the second newest state.
        if len(slot.memory.valid_slots()) == len(slot.memory.slots()):
            self._forget_older_than(slot.memory)
        self._busy.release()
        layout = slot.memory.layout
        self._report(
            StateSaved(
                device=self._number,
                state=state,
                layers=layout.layers,
                size_bytes=layout.size_bytes,
                pause_s=called_s + waited_s,
                copy_s=copy_s,
            )
        )

    def _copy(self, sources: list[torch.Tensor], targets: Sequence[torch.Tensor]) -> tuple[float, float]:
        """Copy, then let training change the sources; return the duration, and how long training waited."""
        began_s = time.monotonic()
        try:
            with torch.no_grad():
                if self._device_save is None:
                    torch._foreach_copy_(list(targets), sources)
                else:
                    # On a stream of its own and into pinned memory, or the copy would delay computation and run at a
                    # fraction of the bus's speed.
                    self._device_save.copy(targets, sources)
        finally:
            copied_s = time.monotonic()
            # Also after an error: training must not wait forever.
            self._copied.set()
        # Summing the slot takes long, and does not need the sources.
        sources.clear()
        since_s = self._waits_since_s
        return copied_s - began_s, max(0.0, copied_s - since_s) if since_s is not None else 0.0

    def _forget_older_than(self, memory: storage.FlashMemory) -> None:
        for path in storage.memory_files(self._directory, self._stem):
            if path != memory.path:
                with suppress(FileNotFoundError):
                    path.unlink()

    def _give_up(self, state: storage.SavedState, problem: str) -> None:
        self._report(StateNotSaved(device=self._number, name=state.name, step=state.step, reason=problem))


class StateReader:
    """Reads whole layers, joined from their parts, from a node's memory and from a directory of checkpoints."""

    def __init__(self, directory: Path, stem: str, checkpoints: storage.CheckpointDirectory) -> None:
        """Memory files are `<directory>/<stem>.<n>`; `stem` may be a pattern that matches several workers'."""
        self._directory = directory
        self._stem = stem
        self._checkpoints = checkpoints
        self._verified: set[tuple[Path, int, int]] = set()

    def in_memory(
        self, *, fits: Callable[[storage.Layout], bool] = lambda _: True
    ) -> tuple[tuple[storage.SavedState, tuple[int, ...]], ...]:
        """Return the states in memory, newest first, each with its complete layers, if its layout `fits`."""
        parts: dict[str, dict[int, set[int]]] = {}
        states: dict[str, tuple[storage.SavedState, int]] = {}
        for state, slot in self._slots():
            if not fits(slot.memory.layout):
                continue
            states.setdefault(state.name, (state, slot.memory.layout.num_parts))
            for layer in slot.memory.layout.layers:
                parts.setdefault(state.name, {}).setdefault(layer, set()).add(slot.memory.layout.part)
        return tuple(
            (state, tuple(sorted(layer for layer, found in parts[name].items() if len(found) == num_parts)))
            for name, (state, num_parts) in states.items()
        )

    def load(self, name: str, layer: int) -> Tensors:
        """Return a layer of a checkpoint, from memory if it is complete there, else from disk. O(size).

        Verifies every checksum. The tensors may be views of the memory or the file itself: copy them before the next
        save. Raises CorruptCheckpoint.
        """
        try:
            return self._load_from_memory(name, layer)
        except CorruptCheckpoint as in_memory:
            try:
                return self._load_from_disk(name, layer)
            except CorruptCheckpoint as on_disk:
                raise CorruptCheckpoint(f"{on_disk}; {in_memory}") from on_disk

    def _load_from_memory(self, name: str, layer: int) -> Tensors:
        parts: dict[int, storage.Slot] = {}
        for state, slot in self._slots():
            if state.name == name and layer in slot.memory.layout.layers:
                parts.setdefault(slot.memory.layout.part, slot)
        num_parts = max((slot.memory.layout.num_parts for slot in parts.values()), default=1)
        if len(parts) < num_parts:
            present = f"{len(parts)} of {num_parts} parts" if parts else "nothing"
            raise CorruptCheckpoint(f"layer {layer} of {name} is not in memory: {present}")
        return self._joined(layer, name, [self._part_in(slot, layer) for _, slot in sorted(parts.items())])

    def _part_in(self, slot: storage.Slot, layer: int) -> tuple[Mapping[str, str], Tensors]:
        key = (slot.memory.path, slot.number, slot.sequence)
        # A checksum covers a whole slot, and layers are loaded one by one.
        if key not in self._verified:
            slot.verify()
            self._verified.add(key)
        layout = slot.memory.layout
        return layout.metadata, {
            entry.spec.name: as_tensor(entry.spec, slot.data[entry.offset : entry.stop])
            for entry in layout.entries_of(layer)
        }

    def _load_from_disk(self, name: str, layer: int) -> Tensors:
        manifest = self._checkpoints.manifest(name)
        shards = shards_of(manifest, layer)
        if len(shards) != manifest.num_parts:
            raise CorruptCheckpoint(f"{self._checkpoints.path / name}: its manifest has no layer {layer}")
        for shard in shards:
            if (fault := self._checkpoints.fault_of(manifest, shard)) is not None:
                raise CorruptCheckpoint(str(fault))
        parts = [read_part(self._checkpoints.path / name / shard.file) for shard in shards]
        return self._joined(layer, name, parts)

    def _joined(self, layer: int, name: str, parts: Sequence[tuple[Mapping[str, str], Tensors]]) -> Tensors:
        try:
            return join_parts(parts)
        except (ValueError, KeyError, RuntimeError) as error:
            raise CorruptCheckpoint(f"layer {layer} of {name}: its parts do not fit together ({error})") from error

    def _slots(self) -> list[tuple[storage.SavedState, storage.Slot]]:
        """Return the slots of memory files, newest first."""
        slots: list[tuple[storage.SavedState, storage.Slot]] = []
        for slot in storage.find_slots(self._directory, self._stem):
            with suppress(PeerError):  # of another version
                slots.append((decode_json(storage.SavedState, slot.note), slot))
        return slots


def layer_layout(layers: LayerTensors, *, metadata: Mapping[str, str]) -> storage.Layout:
    """Return the layout of a slot for these tensors."""
    specs = {
        layer: [
            storage.TensorSpec(name=name, dtype=DTYPE_NAMES[tensor.dtype], shape=tuple(tensor.shape))
            for name, tensor in tensors.items()
        ]
        for layer, tensors in layers.items()
    }
    return storage.Layout.of(specs, metadata=metadata)


def write_layer(
    directory: storage.CheckpointDirectory, name: str, layer: int, tensors: Tensors, *, metadata: Mapping[str, str]
) -> storage.Shard:
    """Write a layer's file into an existing checkpoint. Raises OSError."""
    layout = layer_layout({layer: tensors}, metadata=metadata)
    data = memoryview(bytearray(layout.size_bytes))
    for entry in layout.entries:
        as_tensor(entry.spec, data[entry.offset : entry.stop]).copy_(tensors[entry.spec.name])
    return directory.write_layer(name, layer, layout, data)


def _tensors_over(slot: storage.Slot) -> tuple[torch.Tensor, ...]:
    return tuple(as_tensor(entry.spec, slot.data[entry.offset : entry.stop]) for entry in slot.memory.layout.entries)
