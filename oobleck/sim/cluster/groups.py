"""The groups that a virtual worker has formed, and the all-reduces in them: the twin of `training.comm.groups`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Generator, Sequence

from oobleck.control.commit import CommitState, GroupKey
from oobleck.control.protocol import StorePut

from .fabric import Contribution, Fabric, Violation, Wait, label
from .moves import Moves
from .tempo import Tempo

__all__ = ["GroupTable"]


class GroupTable:
    """The groups of one worker. Members find each other by what they put on a board that all read."""

    def __init__(
        self, fabric: Fabric, commit_state: CommitState, *, put: Callable[[StorePut], None], tempo: Tempo
    ) -> None:
        """`put` writes to the boards of others."""
        self._worker_id = commit_state.worker_id
        self._fabric = fabric
        self._commit_state = commit_state
        self._put = put
        self._tempo = tempo
        self._board: set[str] = set()
        self._formed: set[GroupKey] = set()
        self._posted: Counter[GroupKey] = Counter()

    def read(self, key: str) -> None:
        """Note what another worker has put on the board."""
        self._board.add(key)

    def form(self, keys: Sequence[GroupKey]) -> Moves:
        """Form those groups that are not yet."""
        missing = sorted({key for key in keys if len(key.members) > 1} - self._formed)
        if not missing:
            return
        awaited: list[str] = []
        for key in missing:
            name = f"{label(key)}/{self._worker_id}"
            if name in self._board:
                raise Violation(f"{self._worker_id} forms {label(key)} twice")
            self._board.add(name)
            nodes = tuple(sorted({worker_id.node for worker_id in key.members}))
            self._put(StorePut(key=name, value=b"", nodes=nodes))
            awaited += [f"{label(key)}/{member}" for member in key.members]
        yield Wait(
            f"the groups {', '.join(label(key) for key in missing)}",
            lambda: self._board.issuperset(awaited) and all(self._fabric.is_whole(key.members) for key in missing),
            self._commit_state.is_fenced,
            lambda: any(map(self._fabric.lacks_a_member, missing)),
            touches_network=True,
            takes_s=self._tempo.forming_s([len(key.members) for key in missing]),
        )
        self._formed.update(missing)

    def keep(self, keys: Collection[GroupKey]) -> None:
        """Leave all groups but these."""
        self._formed.intersection_update(keys)

    def post(self, key: GroupKey, value: Contribution) -> int:
        """Take part in a group's next all-reduce; returns its number."""
        if len(key.members) > 1 and key not in self._formed:
            raise Violation(f"{self._worker_id} has not formed {label(key)}")
        sequence = self._posted[key]
        self._posted[key] += 1
        self._fabric.post(key, sequence, self._worker_id, value)
        return sequence

    def sum(
        self, key: GroupKey, sequence: int, step: int, *, takes_s: float = 0.0
    ) -> Generator[Wait, None, tuple[int, ...]]:
        """Wait for what all brought to an all-reduce of a step, put together."""
        yield Wait(
            f"all-reduce {sequence} of {label(key)} in step {step}",
            lambda: self._fabric.is_complete(key, sequence),
            self._commit_state.is_fenced,
            lambda: self._fabric.lacks_a_member(key),
            touches_network=len(key.members) > 1,
            takes_s=takes_s,
        )
        return self._fabric.total(key, sequence, step)
