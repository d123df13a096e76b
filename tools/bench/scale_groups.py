"""Groups as they grow, for `scale.py`: ranks as threads of one process, connected by the workers' own code.

A group that sums is a ring, in which each rank has two neighbours. Beside it is what every group was before: each rank
connected to each other one, as those are still that carry messages between stages.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch

from oobleck.control.protocol import GroupValue, PeerMessage
from oobleck.planner import WorkerId
from oobleck.training.comm import GroupKey, GroupTable, PeerLinks, Waiter

__all__ = ["Formed", "measure_groups"]

_NUM_SUMS = 5
_SUM_ELEMENTS = 4096
_ENDING_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Formed:
    """A group of all ranks: what forming it took, what it keeps open, and what a sum in it takes."""

    wall_s: float
    cpu_s: float
    """Of all ranks together."""
    descriptors: float
    """Of one rank."""
    sum_s: float
    links: float
    """Connections of one rank by which the ranks found each other."""


class _Rank:
    def __init__(self, worker_id: WorkerId) -> None:
        self.links = PeerLinks(worker_id, "127.0.0.1", handle=self._hear)
        self.groups = GroupTable(worker_id, "127.0.0.1", self.links, Waiter())

    def _hear(self, _sender: WorkerId, message: PeerMessage) -> None:
        assert isinstance(message, GroupValue)
        self.groups.take(message)

    def form(self, key: GroupKey) -> None:
        self.groups.form([key], _never, generation=1)

    def sum(self, key: GroupKey) -> None:
        for _ in range(_NUM_SUMS):
            self.groups[key].all_reduce(torch.ones(_SUM_ELEMENTS)).wait(_never)

    def close(self) -> None:
        self.groups.keep_only([], generation=2)
        self.links.close()


def measure_groups(num_ranks: int) -> dict[str, Formed]:
    """Form a group of so many ranks as a ring, and with all connected to all."""
    torch.set_num_threads(1)
    worker_ids = tuple(WorkerId(node=f"node{index}", device=0) for index in range(num_ranks))
    return {
        "ring": _measure(worker_ids, GroupKey("reduce", 1, worker_ids)),
        "mesh": _measure(worker_ids, GroupKey("evaluation", 1, worker_ids)),
    }


def _measure(worker_ids: Sequence[WorkerId], key: GroupKey) -> Formed:
    ranks = [_Rank(worker_id) for worker_id in worker_ids]
    for rank in ranks:
        rank.links.know(each.links.address for each in ranks)
    before = _num_descriptors()
    wall_s, cpu_s = _at_once([partial(rank.form, key) for rank in ranks])
    num_links = sum(rank.links.num_links for rank in ranks)
    num_kept = _num_descriptors() - before - num_links
    sums_s, _ = _at_once([partial(rank.sum, key) for rank in ranks])
    for rank in ranks:
        rank.close()
    _await_ends()
    return Formed(
        wall_s=wall_s,
        cpu_s=cpu_s,
        descriptors=num_kept / len(ranks),
        sum_s=sums_s / _NUM_SUMS,
        links=num_links / len(ranks),
    )


def _at_once(calls: Sequence[Callable[[], None]]) -> tuple[float, float]:
    """Make calls on a thread each; returns seconds, and processor seconds, until all are done."""
    began_s, used_s = time.perf_counter(), time.process_time()
    with ThreadPoolExecutor(len(calls)) as pool:
        for done in [pool.submit(call) for call in calls]:
            done.result()
    return time.perf_counter() - began_s, time.process_time() - used_s


def _await_ends() -> None:
    """Wait until what was given up has ended: it has threads that may not outlive the process."""
    end_s = time.monotonic() + _ENDING_S
    while threading.active_count() > 1 and time.monotonic() < end_s:
        time.sleep(0.05)


def _num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _never() -> bool:
    return False
