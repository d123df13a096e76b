"""What reaches the coordinator, what it commands, and how its parts hand their effects on."""

from __future__ import annotations

from .effects import Outbox, RunOver
from .inputs import (
    AddRequested,
    AllSaid,
    Command,
    Connect,
    Disconnect,
    DrainRequested,
    End,
    Event,
    KillRequested,
    LookUpProfile,
    NodeFailed,
    NodeUp,
    PassOn,
    ProfileFound,
    Record,
    Remark,
    Said,
    Send,
    SendAll,
    StopRequested,
    StoreProfile,
)
from .key_gathering import KeyGathering

__all__ = [
    "AddRequested",
    "AllSaid",
    "Command",
    "Connect",
    "Disconnect",
    "DrainRequested",
    "End",
    "Event",
    "KeyGathering",
    "KillRequested",
    "LookUpProfile",
    "NodeFailed",
    "NodeUp",
    "Outbox",
    "PassOn",
    "ProfileFound",
    "Record",
    "Remark",
    "RunOver",
    "Said",
    "Send",
    "SendAll",
    "StopRequested",
    "StoreProfile",
]
