"""What follows for the other parts where a node or a worker is lost, or is reached again; plans are not among them."""

from __future__ import annotations

from oobleck.control.checkpoints import Saving
from oobleck.control.data import Sharding
from oobleck.control.journal import Loss
from oobleck.planner import WorkerId

from .reconfiguration import Reconfiguration
from .shutdown import Shutdown
from .startup import Startup

__all__ = ["Consequences"]


class Consequences:
    """Hands what happens to nodes and workers to the parts that it concerns."""

    def __init__(
        self,
        startup: Startup,
        shutdown: Shutdown,
        saving: Saving,
        sharding: Sharding,
        reconfiguration: Reconfiguration,
    ) -> None:
        self._startup = startup
        self._shutdown = shutdown
        self._saving = saving
        self._sharding = sharding
        self._reconfiguration = reconfiguration

    def node_lost(self, node: str, loss: Loss) -> None:
        """A node is given up."""
        if not self._reconfiguration.is_begun:
            self._startup.node_failed(node, loss)
            return
        self._saving.node_lost(node)
        self._sharding.lost(node)

    def worker_lost(self, worker_id: WorkerId) -> None:
        """A worker has ended, and is started again."""
        if not self._reconfiguration.is_begun:
            self._startup.worker_lost(worker_id)
            return
        self._saving.worker_lost(worker_id.node)
        self._sharding.lost(worker_id.node)

    def way_found(self) -> None:
        """A node is reached again: what was on the way to it is lost."""
        self._shutdown.ask_again()

    def worker_ready(self, shards: tuple[str, ...]) -> None:
        """A worker is ready, and names the shards of the data."""
        self._sharding.know(shards)

    def met(self, node: str) -> None:
        """A node that trains speaks to us: tell its workers what the steps to come take."""
        self._sharding.tell(
            worker_id for worker_id in self._reconfiguration.training_places() if worker_id.node == node
        )
