"""Communication between workers: groups, sums, messages, and layers that change hands."""

from __future__ import annotations

from .agreements import PeerAgreements
from .devices import choose_device, device_memory_bytes, synchronize, use_device
from .groups import Group, GroupKey, GroupTable, Reduction, open_device
from .inbox import Inbox
from .peer_links import PeerLinks
from .reachability_probe import probe_all
from .rendezvous import RendezvousStore, RendezvousTable
from .staging import HostCopy, Pending
from .transfer import LayerState, exchange_layers, fill_state
from .waiter import Waiter

__all__ = [
    "Group",
    "GroupKey",
    "GroupTable",
    "HostCopy",
    "Inbox",
    "LayerState",
    "PeerAgreements",
    "PeerLinks",
    "Pending",
    "Reduction",
    "RendezvousStore",
    "RendezvousTable",
    "Waiter",
    "choose_device",
    "device_memory_bytes",
    "exchange_layers",
    "fill_state",
    "open_device",
    "probe_all",
    "synchronize",
    "use_device",
]
