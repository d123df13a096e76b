"""Whether a script's ranks hang, and which of them holds the others up. Pure.

Nothing is known of what a script does, so three things must come together, each of which alone has innocent causes:

    it has shown signs of life before     a script that never prints or saves has none to miss
    no rank shows any for a long time     output, or a save by `oobleck.checkpoint`
    a rank uses next to no processor      it waits; ranks that all compute count as busy

An agent watches the ranks of its node (`node_ranks`), and the master puts the agents' reports together. Then it asks
all ranks where they are (`Asking` in `machine.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from oobleck.control.journal import HungRank, RanksHung
from oobleck.control.protocol import GroupRecord, RanksQuiet, RankStacks

_MOST_CULPRITS = 4
"""How many ranks an entry names, with their stacks."""
_MOST_STACK_CHARS = 4000
# A rank waits for others if it is in a collective, or in a backward pass that ends in one.
_WAITING = re.compile(r"/torch/(distributed|autograd|nn/parallel)/")
_FRAME = re.compile(r'File "(?P<file>[^"]*)", line (?P<line>\d+) in (?P<function>.*)')


@dataclass(slots=True)
class HangWatch:
    """What the agents have reported of one generation, keyed by node."""

    _reports: dict[str, RanksQuiet] = field(default_factory=dict)
    _stacks: dict[str, RankStacks] = field(default_factory=dict)

    def hear(self, node: str, report: RanksQuiet) -> None:
        """Take a report in. A sign of life discards all stacks."""
        self._reports[node] = report
        if not report.is_quiet:
            self._stacks.clear()

    def suspects(self, nodes: Iterable[str]) -> bool:
        """Whether all these nodes, whose ranks have not ended, look like those of a script that hangs."""
        reports = [self._reports.get(node) for node in nodes]
        known = [each for each in reports if each is not None]
        return (
            bool(known)
            and len(known) == len(reports)
            and all(each.is_quiet for each in known)
            and any(each.has_shown for each in self._reports.values())
            and any(each.idle for each in known)
        )

    def answer(self, node: str, stacks: RankStacks) -> None:
        self._stacks[node] = stacks

    def has_stacks_of(self, nodes: Iterable[str]) -> bool:
        return self._stacks.keys() >= set(nodes)

    def finding(self, *, t_s: float, generation: int, quiet_s: float) -> RanksHung:
        """Return the entry about ranks that hang: who holds the others up, as far as their stacks tell."""
        found = [hung_rank(node, rank, stack) for node, each in self._stacks.items() for rank, stack in each.stacks]
        ranks = sorted(found, key=lambda each: each.rank)
        missing = find_missing({rank: groups for each in self._stacks.values() for rank, groups in each.groups})
        if missing is not None:
            num_waiting, others = missing.num_waiting, [each for each in ranks if each.rank in missing.ranks]
        else:
            others = [each for each in ranks if not each.is_waiting]
            num_waiting = len(ranks) - len(others)
        return RanksHung(
            t_s=t_s,
            generation=generation,
            quiet_s=quiet_s,
            # While some wait, the ranks that are elsewhere are what they wait for. If none waits, none can be named.
            culprits=tuple(others[:_MOST_CULPRITS]) if num_waiting else (),
            num_waiting=num_waiting,
            not_joined="" if missing is None else missing.what,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """Ranks that have not joined a collective."""

    what: str
    """The collective, for people."""
    ranks: tuple[int, ...]
    num_waiting: int
    """How many have joined it."""


def find_missing(records: Mapping[int, tuple[GroupRecord, ...]]) -> Missing | None:
    """Compare the process groups of ranks, keyed by rank. O(ranks · groups)."""
    found: list[Missing] = []
    by_group: dict[tuple[str, tuple[int, ...]], dict[int, GroupRecord]] = {}
    for rank, groups in records.items():
        for each in groups:
            by_group.setdefault((each.group, each.ranks), {})[rank] = each
    for (name, members), group in sorted(by_group.items()):
        newest = max(group.values(), key=lambda each: each.num_joined)
        # A rank that has not made the group yet has joined nothing of it; one without a recorder says nothing.
        late = [rank for rank in members if rank in records and _num_joined(group.get(rank)) < newest.num_joined]
        if late and newest.is_waiting:
            what = f"collective {newest.num_joined} ({newest.what}) of group {name}"
            found.append(Missing(what=what, ranks=tuple(late), num_waiting=len(members) - len(late)))
    waiting = {rank for rank, groups in records.items() if any(each.is_waiting for each in groups)}
    # Who waits in another collective is held up itself, unless all do: then they have come to different ones.
    return min(found, key=lambda each: len(waiting & set(each.ranks)), default=None)


def _num_joined(record: GroupRecord | None) -> int:
    return 0 if record is None else record.num_joined


def hung_rank(node: str, rank: int, stack: str) -> HungRank:
    """Read where a rank is from what `faulthandler` writes: its threads; the one that took the signal is current."""
    _, _, current = stack.rpartition("Current thread")
    frames = [match for line in current.splitlines() if (match := _FRAME.search(line))]
    files = [match["file"] for match in frames]
    own = next((match for match in frames if "/torch/" not in match["file"]), frames[0] if frames else None)
    place = f"{own['file']}:{own['line']} in {own['function']}" if own is not None else ""
    # The innermost call comes first.
    is_waiting = bool(files) and _WAITING.search(files[0]) is not None
    return HungRank(node=node, rank=rank, place=place, is_waiting=is_waiting, stack=stack[-_MOST_STACK_CHARS:])
