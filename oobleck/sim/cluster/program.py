"""A virtual worker's programs, which take the times of the schedule's timeline."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from oobleck.control import steps
from oobleck.control.speed import PaceMeter
from oobleck.schedule import section_stops

from .fabric import Violation, Wait, label
from .groups import NodeSums
from .ports import Moves, WorkerPorts
from .tempo import ProgramTimes

# A real worker remembers as many busy times.
_BUSY_TIMES = 16


@dataclass(slots=True)
class Work:
    """The microbatches of a step that a worker has done, and not posted in a section."""

    step: int
    microbatches: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Running:
    began_s: float
    times: ProgramTimes
    noted: int = 0
    """The microbatches whose backward pass the commit state counts."""


class Programs:
    """A worker's current program, and the busy times of recent ones."""

    def __init__(
        self,
        ports: WorkerPorts,
        commit_state: steps.CommitState,
        partial_commit: steps.PartialCommit,
        carry_out: Callable[[steps.WorkerEffects], Moves],
        node_sums: NodeSums,
    ) -> None:
        """Take the partial commit to advance during programs; `carry_out` carries out its effects."""
        self.worker_id = commit_state.worker_id
        self.fabric, self._tempo, self._clock = ports.fabric, ports.tempo, ports.clock
        self.commit_state = commit_state
        self.partial_commit = partial_commit
        self.carry_out = carry_out
        self.node_sums = node_sums
        self.spoiled: set[steps.GroupKey] = set()  # groups abandoned in mid-program: their messages are ambiguous
        self._running: _Running | None = None
        self._busy_s: deque[tuple[float, float]] = deque(maxlen=_BUSY_TIMES)
        self._busy_in_step: list[tuple[float, float]] = []
        self.pace = PaceMeter(commit_state.worker_id.device, ports.clock())

    def execute(self, work: Work, seat: steps.PlaceInPlan, program: steps.Compute) -> Moves:
        """Run the stage's program for some microbatches, and begin to commit each section but the last."""
        microbatches = program.microbatches
        if seat.lane_key in self.spoiled:
            raise Violation(
                f"{self.worker_id} computes over {label(seat.lane_key)}, which was given up half-way before"
            )
        times = self._tempo.program(seat.pipeline, seat.stage, len(microbatches), seat.schedule)
        compute_s = self._tempo.compute_s(seat.pipeline, seat.stage, len(microbatches), seat.schedule)
        self._running = running = _Running(self._clock(), times)
        try:
            done, began_s = 0, 0.0
            yield from self.node_sums.begin(seat.stage_key, work.step)
            for stop in section_stops(
                len(microbatches), program.num_sections, round_size=seat.pipeline.template.round_size
            ):
                is_last = stop == len(microbatches)
                ends_s = times.end_s if is_last else times.backward_ends_s[stop - 1]
                yield from self._run_section(work, seat, ends_s - began_s)
                for microbatch in microbatches[done:stop]:
                    yield from self.node_sums.forward(seat.stage_key, work.step)
                    yield from self.node_sums.backward(seat.stage_key, work.step, microbatch)
                yield from self.node_sums.conclude(seat.stage_key, work.step, microbatches[done:stop])
                work.microbatches += microbatches[done:stop]
                done, began_s = stop, ends_s
                if not is_last and program.ends_under_plan:
                    yield from self.carry_out(self.partial_commit.begin(work.step))
        except (steps.Interrupted, steps.PeerLost):
            # Messages of the unfinished program are still in flight: later ones could be taken for them.
            self.spoiled.add(seat.lane_key)
            self._end()
            raise
        self._end()
        self._busy_in_step.append((running.began_s, self._clock()))
        self.pace.add(compute_s, len(microbatches))

    def _run_section(self, work: Work, seat: steps.PlaceInPlan, takes_s: float) -> Moves:
        """Compute for a while, and advance a section that is being committed meanwhile."""
        stopped = self.commit_state.is_pipeline_stopped
        parts = 3 if self.partial_commit.section is not None and self.partial_commit.section.failure is None else 1
        # A real worker looks at its sums between instructions: here twice in each stretch of work.
        for part in range(parts):
            yield Wait(
                f"a program of step {work.step}",
                lambda: not stopped(),
                stopped,
                lambda: self.fabric.lacks_a_member(seat.lane_key),
                touches_network=len(seat.pipeline.worker_ids) > 1,
                takes_s=takes_s / parts,
            )
            if part < parts - 1:
                yield from self.carry_out(self.partial_commit.look())

    def _end(self) -> None:
        self.note_microbatches()
        self._running = None

    def note_microbatches(self) -> None:
        """Count the microbatches that the current program has done by now."""
        running = self._running
        if running is None:
            return
        done = bisect_right(running.times.backward_ends_s, self._clock() - running.began_s)
        self.commit_state.note_microbatch(done - running.noted)
        running.noted = done

    @property
    def busy_s(self) -> tuple[tuple[float, float], ...]:
        """The latest times in which this worker computed for applied steps."""
        return tuple(self._busy_s)

    def end_step(self) -> None:
        """Count the busy times of the step, which is applied."""
        self._busy_s.extend(self._busy_in_step)

    def forget_step(self) -> None:
        self._busy_in_step = []
