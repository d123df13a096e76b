"""Saves what DCP plans for a rank as that rank's part of a state."""

from __future__ import annotations

import io
import os
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from oobleck.errors import UsageError
from oobleck.storage.scripts import Sharding
from oobleck.training import flash
from oobleck.training.tensor_bytes import DTYPE_NAMES
from oobleck.wire import encode_json

from .items import Item, PartItems


class Writer(StorageWriter):
    """For `torch.distributed.checkpoint.save(state, storage_writer=Writer(step))`, and `async_save`; one for each save.

    A save is a copy in memory under `oobleck run`, with copies on other nodes as of any sharded state; under other
    launchers it is on disk when `save` returns. `step` grows from save to save; `disk_every` is as for
    `oobleck.checkpoint.save`. A checkpoint id is not used.
    """

    def __init__(self, step: int, *, disk_every: int = 100) -> None:
        self._step = step
        self._disk_every = disk_every

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: a step names a state."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: all ranks write alike."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Save this rank's part. Raises UsageError for what cannot be stored, and OSError."""
        rank, world_size = flash.place()
        flat = flash.Flat()
        # Each rank's part is a piece that no other rank has.
        flat.shardings = (Sharding(device="cpu", mesh=(world_size,), names=(), cut=(0,)),)
        items, results = [], []
        for number, each in enumerate(plan.items):
            item, tensor = _item(number, each, planner)
            flat.tensors[item.entry] = tensor
            items.append(item)
            results.append(WriteResult(index=each.index, size_in_bytes=tensor.nbytes, storage_data=item.entry))
        flat.tree = encode_json(PartItems(saver=rank, items=tuple(items))).decode()
        flash.save_flat(self._step, flat, disk_every=self._disk_every)
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Do nothing: a state is whole once all ranks have saved their parts."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def _item(number: int, each: WriteItem, planner: SavePlanner) -> tuple[Item, torch.Tensor]:
    data, name = planner.resolve_data(each), each.index.fqn
    entry = f"{number}:{name}"
    if each.type is WriteItemType.BYTE_IO:
        assert isinstance(data, io.BytesIO)
        raw = torch.frombuffer(bytearray(data.getbuffer()), dtype=torch.uint8)
        return Item(entry=entry, name=name, dtype="", size=(), offsets=(), sizes=(raw.numel(),)), raw
    assert isinstance(data, torch.Tensor)
    assert each.tensor_data is not None
    dtype = DTYPE_NAMES.get(data.dtype)
    if dtype is None or data.layout is not torch.strided:
        what = f"a tensor of {data.dtype} ({data.layout})"
        raise UsageError(f"oobleck.dcp.Writer: {name} is {what}, which cannot be stored")
    written = each.tensor_data
    item = Item(
        entry=entry,
        name=name,
        dtype=dtype,
        size=tuple(written.size),
        offsets=tuple(written.chunk.offsets),
        sizes=tuple(written.chunk.sizes),
        requires_grad=written.properties.requires_grad,
    )
    return item, data.detach()
