"""Classifies the exception that ends a worker, in the worker, where it is still an object."""

from __future__ import annotations

import re
import traceback

import torch

from oobleck.control.protocol import ErrorKind, Raised
from oobleck.control.steps import PeerLost
from oobleck.errors import DataError, UserError

# Torch raises plain RuntimeErrors for failures of allocators and of Gloo, which differ in their words alone. No other
# place compares words.
_MEMORY = re.compile(r"out of memory|can't allocate memory|cannot allocate memory", re.IGNORECASE)
_PEERS = re.compile(r"connection closed by peer|connection reset by peer|\bgloo\b|\bnccl\b", re.IGNORECASE)


def raised(error: BaseException | None) -> Raised:
    """Describe an exception to the agent."""
    return Raised(
        kind=kind_of(error),
        message=str(error) if isinstance(error, UserError) else first_line(error),
        traceback="".join(traceback.format_exception(error)),
    )


def first_line(error: BaseException | None) -> str:
    """Return an exception's class and the first line of its words: those of CUDA's errors end with general advice."""
    kind, words = type(error), str(error or "").strip()
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    first, _, rest = words.partition("\n")
    # load_state_dict says after a colon what did not fit.
    said = f"{first} {rest.strip().splitlines()[0].strip()}" if first.endswith(":") and rest.strip() else first
    return f"{name}: {said}" if said else name


def kind_of(error: BaseException | None) -> ErrorKind:
    """Return what caused an exception."""
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
            if _MEMORY.search(str(error)):
                return ErrorKind.MEMORY
            return ErrorKind.PEER if _PEERS.search(str(error)) else ErrorKind.CODE
        case _:
            return ErrorKind.CODE
