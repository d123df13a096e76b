"""A worker's log: lines for people, each with the worker and its generation.

The lines of all workers of a machine go to the log of the agent that started its fork server. The lines of one worker
show its way through a recovery: fence, order, groups, transfers, finish, adoption.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, MutableMapping
from typing import TYPE_CHECKING

from oobleck.host.hidden_log import hide_in_log
from oobleck.planner import WorkerId

if TYPE_CHECKING:
    from typing import Any

_FORMAT = "%(asctime)s %(levelname)s %(message)s"


class WorkerLog(logging.LoggerAdapter[logging.Logger]):
    """A logger whose lines begin with `[node1:0 generation 3]`."""

    def __init__(self, name: str, worker_id: WorkerId, generation: Callable[[], int] | None = None) -> None:
        """`name` is the module's; without `generation`, lines name the worker alone."""
        super().__init__(logging.getLogger(name))
        self._worker_id = worker_id
        self._generation = generation

    def process(self, msg: object, kwargs: MutableMapping[str, Any]) -> tuple[object, MutableMapping[str, Any]]:
        """Put the worker before a line, whose arguments are still formatted lazily."""
        which = "" if self._generation is None else f" generation {self._generation()}"
        return f"[{self._worker_id}{which}] {msg}", kwargs


def start_logging(level: str, hide: Callable[[str], str]) -> None:
    """Log, without secrets, to standard error: our lines from `level` on, those of others from warnings on."""
    logging.raiseExceptions = False  # a full disk, or a lost log, must not end a worker
    logging.basicConfig(level=logging.WARNING, format=_FORMAT, force=True)
    logging.getLogger("oobleck").setLevel(level.upper())
    hide_in_log(hide)
