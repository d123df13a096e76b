"""Communication between workers: groups, sums, messages, and transfers of layers."""

from __future__ import annotations

from oobleck.control.steps import GroupKey

from .agreements import PeerAgreements
from .devices import DeviceWork, blaming_peers, choose_device, device_memory_bytes, gpu_id_of, start_thread, use_device
from .group import Group, Reduction
from .groups import GroupTable
from .inbox import JOINED, Inbox, Post
from .link_timing import time_link
from .listening import probe_all
from .nccl import LARGE_SUM
from .network import open_device
from .peer_links import PeerLinks
from .rendezvous import RendezvousStore, RendezvousTable
from .stage_sums import StageSums
from .staging import CopyStreams, DeviceSave, HostCopy, Pending
from .transfer import LayerState, exchange_layers, fill_state
from .waiter import Mark, Waiter

__all__ = [
    "JOINED",
    "LARGE_SUM",
    "CopyStreams",
    "DeviceSave",
    "DeviceWork",
    "Group",
    "GroupKey",
    "GroupTable",
    "HostCopy",
    "Inbox",
    "LayerState",
    "Mark",
    "PeerAgreements",
    "PeerLinks",
    "Pending",
    "Post",
    "Reduction",
    "RendezvousStore",
    "RendezvousTable",
    "StageSums",
    "Waiter",
    "blaming_peers",
    "choose_device",
    "device_memory_bytes",
    "exchange_layers",
    "fill_state",
    "gpu_id_of",
    "open_device",
    "probe_all",
    "start_thread",
    "time_link",
    "use_device",
]
