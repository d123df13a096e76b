"""What travels between stages: hidden states, or a parcel of tensors with and without gradients, as one message.

A message of a parcel begins with a header in host memory. It says how many bytes follow, and the sizes of all values
before the cut, which the receiver has to know even of those that it is not sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .flow import Flow

_DTYPES = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool, torch.uint8,
    torch.int16, torch.int8, torch.complex64,
)  # fmt: skip
_ALIGNMENT = 16
"""A tensor's first byte in a message is a multiple of this."""

Size = tuple[int, ...]
"""The number of a type, and a shape."""


@dataclass(frozen=True, slots=True)
class Parcel:
    """The tensors that later layers read, and the sizes of all values that came before."""

    tensors: tuple[torch.Tensor, ...]
    """In the order of `Flow.travelling`; none of a microbatch without samples."""
    carries: tuple[bool, ...]
    """Whether the gradient of each travels back."""
    sizes: tuple[Size, ...]
    """In the order of `Flow.known_before`."""

    @property
    def carrying(self) -> tuple[torch.Tensor, ...]:
        """The tensors whose gradients travel back."""
        return tuple(each for each, carries in zip(self.tensors, self.carries, strict=True) if carries)

    def header(self) -> torch.Tensor:
        """Return what precedes the message. [`header_length`], int64"""
        numbers = [num_bytes(self.tensors), *(number for size in self.sizes for number in size)]
        return torch.tensor(numbers, dtype=torch.int64)

    @classmethod
    def received(cls, flow: Flow, layer: int, header: torch.Tensor, payload: torch.Tensor) -> Parcel:
        """Read what has travelled to a layer."""
        num_told, *numbers = header.tolist()
        sizes: dict[int, Size] = {}
        at = 0
        for number in flow.known_before(layer):
            stop = at + 1 + flow.values[number].num_dimensions
            sizes[number] = tuple(numbers[at:stop])
            at = stop
        if not num_told:
            return cls((), (), tuple(sizes.values()))
        tensors = unpacked(payload, [sizes[each] for each in flow.travelling[layer]])
        return cls(tuple(tensors), flow.carries(layer), tuple(sizes.values()))


Carried = torch.Tensor | Parcel
"""What a stage sends to the next."""


def size_of(tensor: torch.Tensor) -> Size:
    return _DTYPES.index(tensor.dtype), *tensor.shape


def dtype_of(size: Size) -> torch.dtype:
    return _DTYPES[size[0]]


def header_length(flow: Flow, layer: int) -> int:
    """Return the numbers in the header of a message to a layer."""
    return 1 + sum(1 + flow.values[each].num_dimensions for each in flow.known_before(layer))


def leaf_of(carried: Carried) -> Carried:
    """Have autograd begin at what was received, so that its gradients can be sent back."""
    if isinstance(carried, torch.Tensor):
        return carried.detach().requires_grad_()
    pairs = zip(carried.tensors, carried.carries, strict=True)
    return Parcel(tuple(each.detach().requires_grad_(carry) for each, carry in pairs), carried.carries, carried.sizes)


def gradients_of(leaf: Carried) -> list[torch.Tensor]:
    """Return the gradients to send back, after the backward pass."""
    if isinstance(leaf, torch.Tensor):
        assert leaf.grad is not None
        return [leaf.grad]
    return [torch.zeros_like(each) if each.grad is None else each.grad for each in leaf.carrying]


def run_backward(output: Carried, gradients: Sequence[torch.Tensor] | None) -> None:
    """Run the backward pass of an output with its gradients, None for those of a loss."""
    if isinstance(output, torch.Tensor):
        if output.requires_grad:  # False on a first stage that trains nothing
            output.backward(None if gradients is None else gradients[0])  # type: ignore[no-untyped-call]
        return
    # What a stage only passes on is a leaf of its own, which takes the gradient as it is.
    pairs = [pair for pair in zip(output.carrying, gradients or (), strict=True) if pair[0].requires_grad]
    if pairs:
        outputs, given = zip(*pairs, strict=True)
        torch.autograd.backward(outputs, given)


def packed(tensors: Sequence[torch.Tensor], *, device: torch.device) -> torch.Tensor:
    """Return tensors one after the other in one piece of memory: without a copy, if there is one."""
    parts = [each.detach().contiguous().reshape(-1).view(torch.uint8) for each in tensors]
    if len(parts) == 1:
        return parts[0]
    room = torch.empty(num_bytes(tensors), dtype=torch.uint8, device=device)
    at = 0
    for part in parts:
        room[at : at + len(part)] = part
        at += _padded(len(part))
    return room


def unpacked(payload: torch.Tensor, sizes: Sequence[Size]) -> list[torch.Tensor]:
    """Return the tensors of these sizes in a message."""
    found: list[torch.Tensor] = []
    at = 0
    for size in sizes:
        dtype, shape = dtype_of(size), torch.Size(size[1:])
        length = dtype.itemsize * shape.numel()
        found.append(payload[at : at + length].view(dtype).reshape(shape))
        at += _padded(length)
    return found


def num_bytes(tensors: Sequence[torch.Tensor]) -> int:
    """Return the bytes of a message."""
    if len(tensors) == 1:
        return tensors[0].numel() * tensors[0].element_size()
    return sum(_padded(each.numel() * each.element_size()) for each in tensors)


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
