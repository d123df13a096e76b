"""What an exception that ends a worker was about.

Said here, where the exception is still an object. Torch raises plain RuntimeErrors for what it met in an allocator or
in gloo, so their words are all there is to tell these by: this is the one place that looks at words, and they are not
ours.
"""

from __future__ import annotations

import re
import traceback

import torch

from oobleck.control.protocol import ErrorKind, Raised
from oobleck.control.steps import PeerLost
from oobleck.errors import DataError, UserError

_MEMORY = re.compile(r"out of memory|can't allocate memory|cannot allocate memory", re.IGNORECASE)
_PEERS = re.compile(r"connection closed by peer|connection reset by peer|\bgloo\b|\bnccl\b", re.IGNORECASE)


def raised(error: BaseException | None) -> Raised:
    """An exception as the value that the agent receives."""
    text = "".join(traceback.format_exception(error))
    lines = text.strip().splitlines() or [""]
    return Raised(
        kind=kind_of(error), message=str(error) if isinstance(error, UserError) else lines[-1], traceback=text
    )


def kind_of(error: BaseException | None) -> ErrorKind:
    """What an exception was about."""
    match error:
        case DataError():
            return ErrorKind.DATA
        case UserError():
            return ErrorKind.JOB
        case MemoryError() | torch.OutOfMemoryError():
            return ErrorKind.MEMORY
        case torch.AcceleratorError():
            return ErrorKind.DEVICE
        case PeerLost():
            return ErrorKind.PEER
        case RuntimeError() | OSError():
            return _kind_of_words(str(error))
        case _:
            return ErrorKind.CODE


def _kind_of_words(text: str) -> ErrorKind:
    if _MEMORY.search(text):
        return ErrorKind.MEMORY
    return ErrorKind.PEER if _PEERS.search(text) else ErrorKind.CODE
