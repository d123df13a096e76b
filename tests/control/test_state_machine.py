"""The coordinator as a state machine: hypothesis itself chooses each move and each fault, and shrinks them one by one.

The model's workers answer it, and the model checks all promises after every move. `test_commit` lets chance and
priorities choose instead, which goes deeper; here a failure comes out as the shortest list of moves.
"""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.control.model import Shape, World
from tests.control.schedules import KINDS, Fault, finish, strike
from tests.control.test_commit import SHAPES
from tests.examples import examples

_FAULTS = 4
"""In one run; more leave nobody."""


class Run(RuleBasedStateMachine):
    """One run: whatever can happen next may, and at any time something may go wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.world: World | None = None
        self.faults = 0

    @initialize(shape=st.sampled_from(SHAPES))
    def begin(self, shape: Shape) -> None:
        self.world = World(shape)

    @rule(choices=st.lists(st.integers(0, 63), min_size=1, max_size=40))
    def go_on(self, choices: list[int]) -> None:
        """Make some of the moves that are possible."""
        for choice in choices:
            if moves := self._world.moves():
                self._world.make(moves[choice % len(moves)])

    @precondition(lambda self: self.world is not None and self.world.ended is None and self.faults < _FAULTS)
    @rule(kind=st.sampled_from(KINDS), victim=st.integers(0, 9), last_words=st.integers(0, 3))
    def go_wrong(self, kind: str, victim: int, last_words: int) -> None:
        """Let a fault strike."""
        self.faults += 1
        strike(self._world, Fault(after=0, kind=kind, target=victim, last_words=last_words))

    def teardown(self) -> None:
        """Let everybody move in turn: the run has to come to an end, and to a good one where it can."""
        if self.world is not None:
            finish(self.world)

    @property
    def _world(self) -> World:
        assert self.world is not None
        return self.world


TestRun = Run.TestCase
TestRun.settings = examples(60, stateful_step_count=30)
