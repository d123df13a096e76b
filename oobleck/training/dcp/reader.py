"""Loads a state for DCP: all ranks choose the same one, and exchange the pieces that others cannot read."""

from __future__ import annotations

import io
import os
import pickle
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from oobleck.errors import CorruptCheckpoint, UsageError
from oobleck.training import flash
from oobleck.training.tensor_bytes import TORCH_DTYPES, as_tensor
from oobleck.wire import decode_json, encode_json

from .items import Item, PartItems, Want, Wants


class Reader(StorageReader):
    """For `torch.distributed.checkpoint.load(state, storage_reader=reader)`, once; all ranks make one alike.

    `step` is that of the newest state that all ranks have saved and that can be read, None if there is none. Values
    that are no tensors are unpickled only as far as `torch.load(weights_only=True)` allows.
    """

    def __init__(self) -> None:
        """Choose the state. Raises as `oobleck.checkpoint.load` does, and UsageError if no Writer has saved it."""
        self._found = found = flash.find_newest()
        self.step = None if found is None else found.chosen.note.step
        self._items: dict[int, dict[str, Item]] = {}
        if found is None:
            return
        for text in found.texts("oobleck.dcp.Reader"):
            part = decode_json(PartItems, text)
            self._items[part.saver] = {item.entry: item for item in part.items}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: the reader has chosen its state."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp.Metadata:
        """Return what the parts of all ranks have. Raises UsageError if there is no state."""
        if self._found is None:
            raise UsageError("oobleck.dcp.Reader: there is no saved state; load only if its `step` is not None")
        tensors: dict[str, dcp.TensorStorageMetadata] = {}
        state: dict[str, dcp.STORAGE_TYPES] = {}
        stored: dict[dcp.MetadataIndex, tuple[int, str]] = {}
        for saver, items in sorted(self._items.items()):
            for item in items.values():
                if not item.dtype:
                    state[item.name] = dcp.BytesStorageMetadata()
                    stored[dcp.MetadataIndex(item.name)] = saver, item.entry
                    continue
                properties = dcp.TensorProperties(dtype=TORCH_DTYPES[item.dtype], requires_grad=item.requires_grad)
                size = torch.Size(item.size)
                entry = tensors.setdefault(item.name, dcp.TensorStorageMetadata(properties, size, []))
                offsets = torch.Size(item.offsets)
                entry.chunks.append(dcp.ChunkStorageMetadata(offsets, torch.Size(item.sizes)))
                stored[dcp.MetadataIndex(item.name, offsets)] = saver, item.entry
        return dcp.Metadata(state_dict_metadata={**state, **tensors}, storage_data=stored)

    def set_up_storage_reader(self, metadata: dcp.Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._stored: dict[dcp.MetadataIndex, tuple[int, str]] = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the state. O(size). Raises CorruptCheckpoint."""
        found = self._found
        assert found is not None
        wants = [self._want(item) for item in plan.items]
        remote = Wants(wants=tuple(want for want in wants if want.saver not in found.parts))
        asked = [decode_json(Wants, text).wants for text in found.peers.gather(encode_json(remote))]
        requests = [
            found.peers.send(self._box(want).contiguous(), rank)
            for rank, others in enumerate(asked)
            if rank != found.peers.rank
            for want in others
            if want.saver in found.served and 0 not in want.sizes
        ]
        for item, want in zip(plan.items, wants, strict=True):
            if want.saver in found.parts:
                box = self._box(want)
            else:
                dtype = self._items[want.saver][want.entry].dtype
                box = torch.empty(want.sizes, dtype=TORCH_DTYPES[dtype] if dtype else torch.uint8)
                if box.numel():
                    found.peers.receive(box, found.servers[want.saver])
            _fill(item, box, planner)
        for request in requests:
            request.wait()
        found.close()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    def _want(self, item: ReadItem) -> Want:
        saver, entry = self._stored[item.storage_index]
        stored = self._items[saver][entry]
        if item.type is LoadItemType.BYTE_IO:
            return Want(saver=saver, entry=entry, offsets=(0,), sizes=stored.sizes)
        return Want(saver=saver, entry=entry, offsets=tuple(item.storage_offsets), sizes=tuple(item.lengths))

    def _box(self, want: Want) -> torch.Tensor:
        assert self._found is not None
        tensor = as_tensor(*self._found.parts[want.saver].read()[want.entry])
        return tensor[tuple(slice(start, start + size) for start, size in zip(want.offsets, want.sizes, strict=True))]


def _fill(item: ReadItem, box: torch.Tensor, planner: LoadPlanner) -> None:
    if item.type is LoadItemType.BYTE_IO:
        raw = box.numpy().tobytes()
        try:
            torch.load(io.BytesIO(raw), weights_only=True)
        except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
            raise CorruptCheckpoint(f"{item.storage_index.fqn} is not loaded: {error}") from error
        planner.load_bytes(item, io.BytesIO(raw))
        return
    target = planner.resolve_tensor(item).detach()
    target.copy_(box)
    planner.commit_tensor(item, target)
