"""Gives back the shared memory of a run's nodes, once nothing is in it that anyone could need."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import trio

from oobleck.control.nodes import saying_farewell_s
from oobleck.errors import ExitCode
from oobleck.job import NodeSpec
from oobleck.roles.master_ports import LiveCluster

ENDS_WELL = (ExitCode.DONE, ExitCode.INTERRUPTED, ExitCode.TERMINATED)
"""The newest state is on disk after these."""

_FORGET_S = 5.0


async def give_memory_back(cluster: LiveCluster, nodes: Sequence[NodeSpec], *, keeps_only_copies: bool = False) -> None:
    """Nodes that ended by themselves have done so; lost ones, and those that were just coming back, have not.

    With `keeps_only_copies`, what an agent has left there because it could not be written stays.
    """
    with trio.move_on_after(saying_farewell_s(_FORGET_S, len(nodes))):
        async with trio.open_nursery() as forgetting:
            for spec in nodes:
                forgetting.start_soon(partial(cluster.forget, spec, keeps_only_copy=keeps_only_copies))
