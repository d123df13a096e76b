"""Takes a state with torch tensors apart into a tree and named tensors, and puts it together again."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import cast

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from oobleck.errors import CorruptCheckpoint, UsageError
from oobleck.storage.scripts import Sharding, TreeNode, from_tree, shown_place, to_tree
from oobleck.training.tensor_bytes import DTYPE_NAMES


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    entry: str
    dtype: str
    shape: tuple[int, ...]
    """The shape of the whole tensor."""
    sharding: int | None
    """The number of its sharding; None if all ranks have the same tensor."""


@dataclass(slots=True)
class Flat:
    """A state's tree, and this rank's tensors, keyed by entry."""

    tree: TreeNode = None
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    shardings: tuple[Sharding, ...] = ()

    def add(self, value: object, path: str) -> TreeNode:
        """Add a leaf, and return its node. Raises UsageError unless it is a tensor that can be stored."""
        place = _named(path)
        if not isinstance(value, torch.Tensor):
            kind = type(value)
            raise UsageError(
                f"{place} is a {kind.__module__}.{kind.__qualname__}, which "
                "cannot be stored; make it a number, a text, a tensor, or a list or dict of these"
            )
        number: int | None = None
        if isinstance(value, DTensor):
            sharding = _sharding_of(value, path)
            if sharding not in self.shardings:
                self.shardings += (sharding,)
            number = self.shardings.index(sharding)
            local = value.to_local().detach()
        else:
            local = value.detach()
        if (
            local.layout is not torch.strided
            or local.is_quantized
            or type(local) not in (torch.Tensor, torch.nn.Parameter)
        ):
            raise UsageError(f"{place} is a {type(local).__name__} that is not dense and plain")
        if local.is_meta:
            raise UsageError(f"{place} is on the meta device, so it has no values to save")
        name = DTYPE_NAMES.get(local.dtype)
        if name is None:
            raise UsageError(f"{place} is of {local.dtype}, which cannot be stored")
        entry = f"{len(self.tensors)}:{path}"
        self.tensors[entry] = local
        return [entry, name, list(value.shape), number]


def flatten(state: object) -> Flat:
    """Take a state apart. Raises UsageError that names the value that cannot be stored."""
    flat = Flat()
    flat.tree = to_tree(state, flat.add)
    return flat


def _named(path: str) -> str:
    return f"oobleck.checkpoint.save: {shown_place(path)}"


def _sharding_of(tensor: DTensor, path: str) -> Sharding:
    place = _named(path)
    mesh = tensor.device_mesh
    num_ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    if mesh.mesh.flatten().tolist() != list(range(num_ranks)):
        raise UsageError(
            f"{place} is sharded over a mesh that has not all ranks in their order, as a part "
            "of a larger mesh: such shards cannot be saved"
        )
    cut = []
    are_late = []
    for index, placement in enumerate(tensor.placements):
        is_late = isinstance(placement, _StridedShard) and placement.split_factor == _num_cuts_after(tensor, index)
        are_late.append(is_late)
        # Another subclass may lay its rows out in another way.
        if isinstance(placement, Shard | _StridedShard) and (is_late or type(placement) is Shard):
            cut.append(placement.dim % tensor.ndim)  # it may count from the end
        elif type(placement) is Replicate:
            cut.append(-1)
        else:
            raise UsageError(f"{place} is placed as {placement}; it can be Shard or Replicate")
    names = tuple(mesh.mesh_dim_names or ())
    late = tuple(are_late) if any(are_late) else ()
    return Sharding(device=mesh.device_type, mesh=tuple(mesh.mesh.shape), names=names, cut=tuple(cut), is_late=late)


def _num_cuts_after(tensor: DTensor, index: int) -> int:
    """Return the number of pieces that later mesh dimensions cut the same dimension of a tensor into."""
    sizes, placements = tensor.device_mesh.mesh.shape, tensor.placements
    own = placements[index]
    later = range(index + 1, len(placements))
    return math.prod(sizes[each] for each in later if placements[each].is_shard(getattr(own, "dim", None)))


def leaves(tree: TreeNode) -> tuple[Leaf, ...]:
    """Return all tensors of a tree, in order. Raises CorruptCheckpoint."""
    found: list[Leaf] = []
    from_tree(tree, lambda node: found.append(_leaf(node)))
    return tuple(found)


def _leaf(node: TreeNode) -> Leaf:
    match node:
        case [str(entry), str(dtype), list(shape), (int() | None) as sharding] if dtype in DTYPE_NAMES.values() and all(
            type(size) is int and size >= 0 for size in shape
        ):
            return Leaf(entry=entry, dtype=dtype, shape=tuple(cast("list[int]", shape)), sharding=sharding)
        case _:
            raise CorruptCheckpoint(f"a state with a damaged tensor: {str(node)[:80]}")


def put_together(tree: TreeNode, tensors: Mapping[str, torch.Tensor], shardings: tuple[Sharding, ...]) -> object:
    """Return the state; `shardings` are those over the present ranks."""
    mesh_of = _meshes(shardings)

    def tensor_of(node: TreeNode) -> torch.Tensor:
        leaf = _leaf(node)
        local = tensors[leaf.entry]
        if leaf.sharding is None:
            return local
        sharding = shardings[leaf.sharding]
        placements = _placements(sharding)
        # The strides are those of the whole tensor, which no rank has.
        strides = torch.empty(leaf.shape, device="meta").stride()
        on_device = local.to(sharding.device)
        shape = torch.Size(leaf.shape)
        return DTensor.from_local(
            on_device, mesh_of(sharding), placements, run_check=False, shape=shape, stride=strides
        )

    return from_tree(tree, tensor_of)


def _placements(sharding: Sharding) -> list[Placement]:
    placements: list[Placement] = []
    are_late = sharding.is_late or (False,) * len(sharding.cut)
    for index, (cut, is_late) in enumerate(zip(sharding.cut, are_late, strict=True)):
        later = range(index + 1, len(sharding.cut))
        num_before = math.prod(sharding.mesh[each] for each in later if sharding.cut[each] == cut)
        placements.append(
            Replicate() if cut < 0 else _StridedShard(cut, split_factor=num_before) if is_late else Shard(cut)
        )
    return placements


def _meshes(shardings: tuple[Sharding, ...]) -> Callable[[Sharding], DeviceMesh]:
    """Make a mesh for each arrangement."""
    # All ranks take part in making a mesh, so they need one order: that of the state's shardings.
    made: dict[tuple[str, tuple[int, ...], tuple[str, ...]], DeviceMesh] = {}
    for each in shardings:
        key = each.device, each.mesh, each.names
        if key not in made:
            made[key] = init_device_mesh(each.device, each.mesh, mesh_dim_names=each.names or None)
    return lambda sharding: made[sharding.device, sharding.mesh, sharding.names]
