"""Group tables of several workers in one process, which find each other by links over real sockets."""

from __future__ import annotations

from collections.abc import Sequence

from oobleck.control.protocol import GroupValue, PeerMessage, WorkerAddress
from oobleck.planner import WorkerId
from oobleck.training.comm.groups import GroupTable
from oobleck.training.comm.nccl_groups import NcclLibrary
from oobleck.training.comm.peer_links import PeerLinks
from oobleck.training.comm.waiter import Waiter

__all__ = ["LinkedTable", "acquaint"]


class LinkedTable:
    """A worker's groups and what forms them."""

    def __init__(
        self,
        worker_id: WorkerId,
        *,
        waiter: Waiter | None = None,
        stages: bool = False,
        degree: int = 1,
        owns_device: bool = True,
        library: NcclLibrary | None = None,
        forming_timeout_s: float = 60.0,
    ) -> None:
        self.worker_id = worker_id
        self.waiter = waiter or Waiter()
        self.links = PeerLinks(worker_id, "127.0.0.1", handle=self._hear)
        self.groups = GroupTable(
            worker_id,
            "127.0.0.1",
            self.links,
            self.waiter,
            stages=stages,
            degree=degree,
            owns_device=owns_device,
            library=library,
            forming_timeout_s=forming_timeout_s,
        )

    def _hear(self, _sender: WorkerId, message: PeerMessage) -> None:
        assert isinstance(message, GroupValue)
        self.groups.take(message)


def acquaint(tables: Sequence[LinkedTable], others: Sequence[WorkerAddress] = ()) -> None:
    """Tell all of them where each listens, and these others."""
    for table in tables:
        table.links.know([*(each.links.address for each in tables), *others])
