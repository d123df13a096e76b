"""Copies of a layer must be equal to the last bit after a step; if they are not, hardware has computed wrongly.

At regular intervals workers report a digest of each layer that they hold. Of three copies or more the odd one out is
wrong; of two that differ either may be, and both are named.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping

from oobleck.control.events import Turn
from oobleck.control.journal import ReplicasDiffer
from oobleck.control.protocol import ReplicaDigests
from oobleck.planner import WorkerId

# After this many failed checks in a row, machines are taken to compute differently by nature.
_MOST_IN_A_ROW = 3


def odd_ones(digests: Mapping[WorkerId, int]) -> tuple[frozenset[WorkerId], bool]:
    """Return the copies to replace, and whether it is certain that they are the wrong ones."""
    # The most frequent digest counts as right, and among equally frequent ones that of the first worker.
    counts = Counter(digests.values())
    trusted = max(sorted(digests), key=lambda worker_id: counts[digests[worker_id]])
    odd = frozenset(worker_id for worker_id, digest in digests.items() if digest != digests[trusted])
    return odd, 2 * counts[digests[trusted]] > len(digests)


class ReplicaCheck:
    """The digests of the newest reported step."""

    def __init__(self, *, degree: int = 1, device_of: Callable[[str], str] = lambda node: "") -> None:
        """`device_of` names the devices of a node. If `degree` devices share each stage, those of like rank have copies
        of the same part."""
        self._degree = degree
        self._device_of = device_of
        self._key = (0, 0)
        self._digests: dict[WorkerId, dict[int, int]] = {}
        self._in_a_row = 0

    def take(
        self, turn: Turn, worker_id: WorkerId, message: ReplicaDigests, worker_ids: Collection[WorkerId]
    ) -> Mapping[WorkerId, frozenset[int]]:
        """Note a worker's digests; once all `worker_ids` have sent theirs, return the layers to replace, by holder."""
        key = (message.generation, message.step)
        if key < self._key or self._in_a_row >= _MOST_IN_A_ROW:
            return {}
        if key > self._key:
            self._key, self._digests = key, {}
        self._digests[worker_id] = dict(zip(message.layers, message.digests, strict=True))
        return self._compare(turn) if self._digests.keys() >= set(worker_ids) else {}

    def _compare(self, turn: Turn) -> Mapping[WorkerId, frozenset[int]]:
        digests_of, self._digests = self._digests, {}
        distrusted: dict[WorkerId, set[int]] = {}
        for layer in sorted({layer for digests in digests_of.values() for layer in digests}):
            comparable: dict[tuple[int, str], dict[WorkerId, int]] = {}
            for worker_id, digests in digests_of.items():
                if layer in digests:
                    # All apply the same gradients, but devices of different kinds may round the optimizer's arithmetic
                    # differently, each of them rightly.
                    alike = worker_id.device % self._degree, self._device_of(worker_id.node)
                    comparable.setdefault(alike, {})[worker_id] = digests[layer]
            for _, copies in sorted(comparable.items()):
                odd, is_sure = odd_ones(copies)
                if odd:
                    entry = ReplicasDiffer(
                        t_s=turn.now_s,
                        step=self._key[1],
                        layer=layer,
                        odd=tuple(sorted(odd)),
                        trusted=tuple(sorted(copies.keys() - odd)),
                        is_sure=is_sure,
                    )
                    turn.record(entry)
                for worker_id in odd:
                    distrusted.setdefault(worker_id, set()).add(layer)
        self._in_a_row = self._in_a_row + 1 if distrusted else 0
        if self._in_a_row >= _MOST_IN_A_ROW:
            turn.note("error", "copies keep differing: their machines compute differently, and are compared no more")
            return {}
        return {each: frozenset(layers) for each, layers in sorted(distrusted.items())}
