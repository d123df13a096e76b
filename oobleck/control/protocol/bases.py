"""The bases of all messages from and to a worker. The agent relays by them, and the master checks by them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True, kw_only=True)
class FromWorker:
    """From a worker of the node, or from its agent about one."""

    needs_orders: ClassVar[bool] = True
    """Only a worker that has had a plan can send this; before the first plan it is dropped."""
    outlives_worker: ClassVar[bool] = False
    """It counts even if the worker was asked to end since; else it is dropped then."""
    device: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ForWorker:
    """To one worker; its agent passes it on."""

    device: int
