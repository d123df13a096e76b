"""Where a worker computes: which device is its own, what it has, and what can carry sums between such devices.

The one module that asks torch about GPUs for the sake of training; where there are none, all of it is about the CPU.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from enum import StrEnum
from typing import Any

import torch
import torch.distributed as dist

from oobleck.errors import ConfigError

__all__ = [
    "Carrier",
    "carrier_of",
    "choose_device",
    "device_identity",
    "device_memory_bytes",
    "prepare_nccl",
    "synchronize",
    "use_device",
]

_MEMORY_LEFT = 0.1
"""Share of a GPU's memory that is left to its contexts, libraries and torch's allocator."""


class Carrier(StrEnum):
    """What sums tensors over the members of a group."""

    GLOO = "gloo"
    """Through the host's memory: any devices, shared ones too."""
    NCCL = "nccl"
    """Between GPUs, one a member."""


def choose_device(kind: str, number: int, *, num_devices: int | None = None) -> torch.device:
    """Return the device of a worker: the CPU, or the GPU that its machine counts as `number`.

    Raises ConfigError where there is no such GPU; `num_devices` is how many there are, which torch is asked for.
    """
    if kind == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count() if num_devices is None else num_devices
    if count == 0:
        raise ConfigError("device: there is no CUDA device here that torch can use")
    if number >= count:
        raise ConfigError(
            f"device: this machine has {count} CUDA devices, numbered from 0, and the hostfile asks for {number}; "
            "change slots= or devices="
        )
    return torch.device(kind, number)


def use_device(device: torch.device) -> None:
    """Have this thread compute on a device where none is named."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def device_memory_bytes(device: torch.device, *, num_sharing: int) -> int | None:
    """Return what one of `num_sharing` workers on a GPU may use of its memory; None for a CPU, of which others know."""
    if device.type == "cpu":
        return None
    total: int = torch.cuda.get_device_properties(device).total_memory
    return int(total * (1 - _MEMORY_LEFT)) // num_sharing


def device_identity(device: torch.device) -> str | None:
    """Return what identifies a GPU among all in the world; None for what NCCL cannot reach from here."""
    if device.type != "cuda" or not dist.is_nccl_available():
        return None
    properties: Any = torch.cuda.get_device_properties(device)
    return str(properties.uuid)


def carrier_of(identities: Sequence[str | None]) -> Carrier:
    """Say what carries the sums of a group whose members compute on these devices.

    NCCL wants each member to have a GPU of its own; all members come to the same answer, as they look at the same list.
    """
    is_distinct = len(set(identities)) == len(identities)
    return Carrier.NCCL if identities and None not in identities and is_distinct else Carrier.GLOO


def prepare_nccl() -> None:
    """Have NCCL's groups leave it to us what is done about lost peers; before the first of them is made.

    Torch's watchdog would end the process when a peer is gone, or when a sum takes long.
    """
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    os.environ["TORCH_NCCL_ENABLE_MONITORING"] = "0"
    os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] = "0"


def synchronize(device: torch.device) -> None:
    """Block until a device has done all that it was given; a CPU always has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
