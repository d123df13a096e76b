"""What reaches the coordinator, what it commands, and how its parts hand their effects on."""

from __future__ import annotations

from .effects import Effects, RunOver
from .inputs import (
    AddRequested,
    BatchReceived,
    Command,
    Connect,
    Disconnect,
    DrainRequested,
    End,
    Event,
    KillRequested,
    LookUpProfile,
    MessageReceived,
    NodeFailed,
    NodeLeftOut,
    NodeUp,
    PassOn,
    ProfileFound,
    Record,
    Remark,
    Send,
    SendAll,
    StopRequested,
    StoreProfile,
)
from .key_gathering import KeyGathering

__all__ = [
    "AddRequested",
    "BatchReceived",
    "Command",
    "Connect",
    "Disconnect",
    "DrainRequested",
    "Effects",
    "End",
    "Event",
    "KeyGathering",
    "KillRequested",
    "LookUpProfile",
    "MessageReceived",
    "NodeFailed",
    "NodeLeftOut",
    "NodeUp",
    "PassOn",
    "ProfileFound",
    "Record",
    "Remark",
    "RunOver",
    "Send",
    "SendAll",
    "StopRequested",
    "StoreProfile",
]
