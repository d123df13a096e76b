"""Whether a script's ranks hang, and which of them holds the others up. Pure.

Nothing is known of what a script does, so three things must come together, each of which alone has innocent causes:

    it has given signs of life before     a script that never prints or saves gives none to miss
    no rank gives any for a long time     output, or a save by `oobleck.checkpoint`
    a rank uses next to no processor      it waits; ranks that all compute are taken to be busy

An agent watches the ranks of its node (`node_ranks`), and the master puts together what agents say. Then all ranks are
asked where they are. A rank that is in a collective, or in a backward pass whose end is one, waits for others; one that
is elsewhere while others wait is what they wait for.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from oobleck.control.journal import HungRank
from oobleck.control.protocol import RanksQuiet, RankStacks

_ANSWERS_S = 5.0
"""How long stacks are waited for."""
_MOST_STACK_CHARS = 4000
_WAITING = re.compile(r"/torch/(distributed|autograd|nn/parallel)/")
_FRAME = re.compile(r'File "(?P<file>[^"]*)", line (?P<line>\d+) in (?P<function>.*)')


@dataclass(slots=True)
class HangWatch:
    """What agents have said of one generation."""

    generation: int
    _said: dict[str, RanksQuiet] = field(default_factory=dict)
    _stacks: dict[str, RankStacks] = field(default_factory=dict)
    due_s: float | None = None
    """Until when stacks are waited for; None where nobody was asked."""

    def hear(self, node: str, said: RanksQuiet) -> None:
        """Take in what an agent says. A sign of life takes all back."""
        self._said[node] = said
        if not said.is_quiet:
            self._stacks, self.due_s = {}, None

    def suspects(self, nodes: Iterable[str]) -> bool:
        """Whether all these nodes, whose ranks have not ended, are as those of a script that hangs."""
        said = [self._said.get(node) for node in nodes]
        known = [each for each in said if each is not None]
        return (
            bool(known)
            and len(known) == len(said)
            and all(each.is_quiet for each in known)
            and any(each.has_shown for each in self._said.values())
            and any(each.idle for each in known)
        )

    def ask(self, now_s: float) -> bool:
        """Begin to wait for stacks; returns False where that has begun."""
        if self.due_s is not None:
            return False
        self.due_s = now_s + _ANSWERS_S
        return True

    def answer(self, node: str, stacks: RankStacks) -> None:
        """Take in a node's stacks."""
        self._stacks[node] = stacks

    def is_answered(self, nodes: Iterable[str], now_s: float) -> bool:
        """Whether all stacks are there that will come."""
        return self.due_s is not None and (now_s >= self.due_s or self._stacks.keys() >= set(nodes))

    def ranks(self) -> tuple[HungRank, ...]:
        """All ranks that have said where they are, by rank."""
        found = [hung_rank(node, rank, stack) for node, said in self._stacks.items() for rank, stack in said.stacks]
        return tuple(sorted(found, key=lambda each: each.rank))


def hung_rank(node: str, rank: int, stack: str) -> HungRank:
    """Where a rank is, by what `faulthandler` writes: its threads, of which the one that took the signal is current."""
    _, _, current = stack.rpartition("Current thread")
    frames = [match for line in current.splitlines() if (match := _FRAME.search(line))]
    files = [match["file"] for match in frames]
    own = next((match for match in frames if "/torch/" not in match["file"]), frames[0] if frames else None)
    place = f"{own['file']}:{own['line']} in {own['function']}" if own is not None else ""
    is_waiting = bool(files) and _WAITING.search(files[0]) is not None
    return HungRank(node=node, rank=rank, place=place, is_waiting=is_waiting, stack=stack[-_MOST_STACK_CHARS:])
