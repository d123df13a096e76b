"""Whose a message is: the bases of all that a worker says, and of all that is said to one.

The agent relays by them, and the master checks by them. So a new message says once what it is: in its class.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True, kw_only=True)
class FromWorker:
    """Said by a worker of the node, or by its agent about one."""

    needs_orders: ClassVar[bool] = True
    """Only a worker that has had a plan can say this, so before the first plan it means nothing."""
    outlives_worker: ClassVar[bool] = False
    """It counts although the worker was asked to end since; else it is dropped then."""
    device: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ForWorker:
    """Said to one worker; its agent passes it on unread."""

    device: int
