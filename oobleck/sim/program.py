"""A virtual worker's programs: they take as long as the schedule's timeline says."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from oobleck.control.messages import Pace
from oobleck.control.pace_meter import PaceMeter
from oobleck.control.standing import Interrupted, PeerLost, Standing
from oobleck.planner import Place
from oobleck.schedule import section_stops

from .bank import Bank
from .fabric import Fabric, GroupKey, Violation, Wait
from .lane import Lane
from .moves import Moves, pause
from .tempo import ProgramTimes, Tempo

__all__ = ["Programs", "Work"]

_BUSY_TIMES = 16
"""As many stretches of computation are remembered as a real worker remembers."""


@dataclass(slots=True)
class Work:
    """What a worker has done of a step, and has not put into a section."""

    step: int
    microbatches: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Running:
    """A program under way."""

    began_s: float
    times: ProgramTimes
    noted: int = 0
    """Microbatches whose backward pass is noted."""


class Programs:
    """Mutable: the program that one worker runs, and what it ran lately."""

    def __init__(
        self,
        place: Place,
        fabric: Fabric,
        standing: Standing,
        bank: Bank,
        *,
        tempo: Tempo,
        clock: Callable[[], float],
        on_begin: Callable[[], None],
    ) -> None:
        """`on_begin` is called whenever one is begun."""
        self.place = place
        self.fabric = fabric
        self.standing = standing
        self.bank = bank
        self.on_begin = on_begin
        self.spoiled: set[GroupKey] = set()
        """Groups whose traffic was given up half-way: their messages cannot be told apart any more."""
        self._tempo = tempo
        self._clock = clock
        self._running: _Running | None = None
        self._busy_s: deque[tuple[float, float]] = deque(maxlen=_BUSY_TIMES)
        self._busy_in_step: list[tuple[float, float]] = []
        self._pace = PaceMeter(place.device, clock())

    def execute(self, work: Work, lane: Lane, microbatches: Sequence[int], num_sections: int = 1) -> Moves:
        """Run this stage's program for some microbatches; it ends when the schedule's timeline says.

        At the end of each section but the last, what is done is to be banked.
        """
        if self.standing.is_broken:
            raise PeerLost("a program of this step failed half-way before")
        if lane.key in self.spoiled:
            raise Violation(f"{self.place} computes over {lane.key.name}, which was given up half-way before")
        self.on_begin()
        times = self._tempo.program(lane.pipeline, lane.stage, len(microbatches), lane.schedule)
        compute_s = self._tempo.compute_s(lane.pipeline, lane.stage, len(microbatches))
        self._running = running = _Running(self._clock(), times)
        try:
            done, began_s = 0, 0.0
            for stop in section_stops(len(microbatches), num_sections):
                is_last = stop == len(microbatches)
                ends_s = times.end_s if is_last else times.backward_ends_s[stop - 1]
                yield from self._run_section(work, lane, ends_s - began_s)
                work.microbatches += microbatches[done:stop]
                done, began_s = stop, ends_s
                if not is_last:
                    yield from self.begin_bank(work)
        except (Interrupted, PeerLost) as error:
            self.spoiled.add(lane.key)
            self._end()
            if isinstance(error, PeerLost):
                self.standing.note_broken()
            raise
        self._end()
        self._busy_in_step.append((running.began_s, self._clock()))
        self._pace.add(compute_s, len(microbatches))

    def _run_section(self, work: Work, lane: Lane, takes_s: float) -> Moves:
        """Compute for a while; with a section on its way, look after it now and then."""
        stopped = self.standing.is_pipeline_stopped
        parts = 3 if self.bank.is_busy else 1
        for part in range(parts):
            yield Wait(
                f"a program of step {work.step}",
                lambda: not stopped(),
                stopped,
                lambda: self.fabric.lacks_a_member(lane.key),
                touches_network=len(lane.places) > 1,
                takes_s=takes_s / parts,
            )
            if part < parts - 1:
                yield from self.bank.look()

    def begin_bank(self, work: Work) -> Moves:
        """Have what is done banked beside what follows; nothing is banked any more once that has failed."""
        try:
            yield from self.bank.settle()
        except PeerLost:
            return
        except Interrupted:
            if self.standing.is_pipeline_stopped():
                raise
            return
        yield from pause("about to post a section")
        if not self.standing.is_fenced():
            mine, work.microbatches = tuple(work.microbatches), []
            self.bank.begin(work.step, mine)

    def _end(self) -> None:
        self.note_microbatches()
        self._running = None

    def note_microbatches(self) -> None:
        """Count what the program under way has done by now."""
        running = self._running
        if running is None:
            return
        done = bisect_right(running.times.backward_ends_s, self._clock() - running.began_s)
        self.standing.note_microbatch(done - running.noted)
        running.noted = done

    @property
    def busy_s(self) -> tuple[tuple[float, float], ...]:
        """When this worker last computed for steps that are applied."""
        return tuple(self._busy_s)

    def take_pace(self) -> Pace | None:
        """The report of how fast this worker computes, where it is due."""
        return self._pace.take(self._clock())

    def end_step(self) -> None:
        """The step in flight is applied: it was not computed for nothing."""
        self._busy_s.extend(self._busy_in_step)

    def forget_step(self) -> None:
        self._busy_in_step = []
