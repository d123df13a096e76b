"""The time that messages of several sizes take from one worker to another, over the same carrier as in training.

One of the two leads: it announces the number and size of the next messages and sends them; the other returns each.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

import torch

from oobleck.control.steps import GroupKey, Interrupted, PeerLost
from oobleck.planner import WorkerId
from oobleck.planner.profiles import fit_link

from .group import Group
from .groups import GroupTable

_SIZES_BYTES = (1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 23, 1 << 26)
_NEEDED_SIZES = 2  # timed however long they take
_SIZE_S = 0.06  # the time for one size
_LEAST_TIMES, _MOST_TIMES = 3, 8  # round trips of a message, of which the first warms up and does not count
_GENERATION = 0  # older than that of any plan


def time_link(
    groups: GroupTable,
    worker_id: WorkerId,
    peer: WorkerId,
    *,
    leads: bool,
    timeout_s: float,
    interrupted: Callable[[], bool],
) -> dict[int, float]:
    """Return the seconds of one message by its size in bytes, or nothing unless this worker leads.

    The peer has to call this too. For the training thread. Raises Interrupted, or PeerLost unless the two have met and
    finished within `timeout_s`.
    """
    until_s = time.monotonic() + timeout_s
    # `is_over` depends on the time, which announces nothing.
    wake = threading.Timer(timeout_s, groups.waiter.announce)
    wake.daemon = True
    wake.start()
    key = GroupKey("link", _GENERATION, tuple(sorted((worker_id, peer))))

    def is_over() -> bool:
        return interrupted() or time.monotonic() >= until_s

    try:
        groups.form([key], is_over, generation=_GENERATION)
        end = _End(groups[key], peer, is_over)
        return end.lead() if leads else end.follow()
    except Interrupted:
        if interrupted():
            raise
        raise PeerLost(f"no answer from {peer} within {timeout_s:g} s") from None
    finally:
        wake.cancel()
        groups.put_aside([key])


def num_round_trips(seconds: Mapping[int, float], size: int) -> int:
    """Return how many messages of a size to time after smaller ones; 0 where they would fill the link for too long."""
    if len(seconds) < _NEEDED_SIZES:
        return _MOST_TIMES if not seconds else _LEAST_TIMES
    # By the line through the smaller ones: on a busy machine, or over a long way, they take long and do not grow.
    fitting = int(_SIZE_S / (2 * fit_link(seconds).message_s(size)))
    return min(fitting, _MOST_TIMES) if fitting >= _LEAST_TIMES else 0


class _End:
    """One of the two ends. Messages travel like those between a pipeline's stages."""

    def __init__(self, group: Group, peer: WorkerId, interrupted: Callable[[], bool]) -> None:
        self._group = group
        self._rank = group.rank_of(peer)
        self._interrupted = interrupted
        self._device = group.waiter.device
        self._num_sent = 0
        self._num_expected = 0
        self._sent: list[object] = []  # must live until the peer has received it

    def lead(self) -> dict[int, float]:
        seconds: dict[int, float] = {}
        for size in _SIZES_BYTES:
            if not (times := num_round_trips(seconds, size)):
                break
            # The quickest counts, since other work on the machines only ever adds to the time.
            seconds[size] = min(self._there_and_back(size, times=times)) / 2
        return seconds

    def follow(self) -> dict[int, float]:
        """Send every message back, until the other end closes the group."""
        try:
            while True:
                self._expect(2, torch.int64)
                size, times = self._take().tolist()
                for _ in range(times):
                    self._expect(size, torch.uint8)
                for _ in range(times):
                    self._send(self._take())
        except PeerLost:
            return {}

    def _there_and_back(self, size: int, *, times: int) -> list[float]:
        """Return the seconds of all round trips but the first, which allocates buffers."""
        payload = torch.zeros(size, dtype=torch.uint8, device=self._device)
        for _ in range(times):
            self._expect(size, torch.uint8)
        coming = torch.zeros(2, dtype=torch.int64, device=self._device)
        coming[0], coming[1] = size, times
        self._send(coming)
        seconds = []
        for _ in range(times):
            began_s = time.perf_counter()
            self._send(payload)
            self._take()
            seconds.append(time.perf_counter() - began_s)
        return seconds[1:]

    def _send(self, tensor: torch.Tensor) -> None:
        pending = self._group.send_off(tensor, self._rank, _tag(self._num_sent, self._group.rank))
        # The last two are enough: an answer, or the next message, shows that those before them have arrived.
        self._sent = [(tensor, pending), *self._sent[:1]]
        self._num_sent += 1

    def _expect(self, num_elements: int, dtype: torch.dtype) -> None:
        group, device, rank = self._group, self._device, self._rank
        group.inbox(rank).expect(
            _tag(self._num_expected, rank),
            lambda tag: group.post_receive_ahead((num_elements,), dtype, device, rank, tag),
        )
        self._num_expected += 1

    def _take(self) -> torch.Tensor:
        # Without a wait for the device: what is sent back leaves once it has arrived, and a peer may die meanwhile.
        return self._group.inbox(self._rank).take(self._interrupted)


def _tag(number: int, sender: int) -> int:
    # Each direction has its own tags, so that the words of edges about their messages are not confused.
    return 2 * number + sender
