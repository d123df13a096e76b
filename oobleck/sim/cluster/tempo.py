"""The times of virtual work, from each schedule's timeline and the planner's network model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

from oobleck.control.protocol import PlanUpdate
from oobleck.control.speed import is_split, microbatch_s
from oobleck.planner import LayerTransfer, Pipeline, PipelineTemplate, Profile, WorkerId
from oobleck.planner.profiles import LINKS
from oobleck.schedule import Op, ScheduleKind, compile_schedule, timeline
from oobleck.schedule.choice import kind_for
from oobleck.sim.costs import Costs, StepTimes, costs_on

_FREE = Costs(**dict.fromkeys([part.name for part in fields(Costs)], 0.0))
# A microbatch's backward pass ends with one of these: in one part, or with the second of two.
_LAST_OF_BACKWARD = (Op.BACKWARD, Op.BACKWARD_WEIGHT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Delays:
    """Seconds that no profile states, as measured on a small machine."""

    connect_s: float = 0.02
    """An SSH handshake."""
    start_agent_s: float = 0.4
    """From the handshake to a listening agent."""
    warm_up_s: float = 3.0
    """A machine's import of torch before its first worker."""
    start_worker_s: float = 0.03
    """A fork of a warm process."""
    set_up_worker_s: float = 0.5
    """Reading the text and building the model's structure."""
    profile_s: float = 5.0
    """Measuring a profile that is not cached."""
    form_group_s: float = 0.02
    """Forming a group, unless costs give it."""
    notice_s: float = 0.02
    """The most from the end of a peer to its neighbours' errors."""
    link_latency_s: float = 0.0005
    """One way through a tunnel to an agent."""


@dataclass(frozen=True, slots=True)
class ProgramTimes:
    """The times of one stage's program, in seconds from its beginning."""

    end_s: float
    backward_ends_s: tuple[float, ...]


class Tempo:
    """The seconds of steps, transfers and orders. Only the speeds of nodes change."""

    def __init__(
        self,
        profile: Profile,
        *,
        profile_of: Callable[[str], Profile] | None = None,
        form_group_s: float = 0.0,
        costs: Costs | None = None,
    ) -> None:
        """Take `profile_of` for nodes of several kinds, and `costs` for the master's work, groups and commits.

        Without `costs`, forming groups takes `form_group_s`, and the rest no time.
        """
        # Without costs, groups that sum form while workers compute; costs are NCCL's, which forms all at once.
        self.forms_beside = costs is None
        self.costs = costs or replace(_FREE, form_s=form_group_s)
        self._profile = profile
        self._profile_of = profile_of or (lambda node: profile)
        self._factors: defaultdict[str, float] = defaultdict(lambda: 1.0)
        self._programs: dict[
            tuple[PipelineTemplate, tuple[float, ...], int, ScheduleKind, tuple[int, ...]], tuple[ProgramTimes, ...]
        ] = {}
        self.pace = StepTimes(profile, profile_of=profile_of)

    def set_factor(self, node: str, factor: float) -> None:
        """Let a node take `factor` times as long as usual, from its next program on."""
        self._factors[node] = factor

    def program(self, pipeline: Pipeline, stage: int, num_microbatches: int, kind: ScheduleKind) -> ProgramTimes:
        """Return the times of one stage, if all stages of its pipeline begin together."""
        factors = tuple(self._factors[node] for node in pipeline.nodes)
        own = tuple(map(self._profile_of, pipeline.nodes))
        key = pipeline.template, factors, num_microbatches, kind, tuple(map(id, own))
        if key not in self._programs:
            self._programs[key] = self._evaluate(own, pipeline.template, factors, num_microbatches, kind)
        return self._programs[key][stage]

    def compute_s(self, pipeline: Pipeline, stage: int, num_microbatches: int, kind: ScheduleKind) -> float:
        """Return the seconds in which a stage computes its microbatches, without its waits."""
        mine = pipeline.stages[stage]
        node = mine.worker_ids[0].node
        splits = is_split((0, stage), (kind,))
        return num_microbatches * microbatch_s(self._profile_of(node), mine, splits=splits) * self._factors[node]

    def _evaluate(
        self,
        profiles: tuple[Profile, ...],
        template: PipelineTemplate,
        factors: tuple[float, ...],
        num_microbatches: int,
        kind: ScheduleKind,
    ) -> tuple[ProgramTimes, ...]:
        costs = costs_on(profiles, template, kind, [factors[stage.node_index] for stage in template.stages])
        schedule = compile_schedule(
            kind_for(template, kind),
            num_stages=template.num_stages,
            num_chunks=template.num_chunks,
            num_microbatches=num_microbatches,
            commits=False,
        )
        evaluated = timeline(schedule, costs)
        programs = []
        for end_s, spans in zip(evaluated.ends_s, evaluated.spans, strict=True):
            instructions = [(span.end_s, span.instruction) for span in spans]
            # With several chunks, a microbatch's backward pass ends at the first one.
            ends_s = (at_s for at_s, each in instructions if each.op in _LAST_OF_BACKWARD and each.chunk == 0)
            programs.append(ProgramTimes(end_s=end_s, backward_ends_s=tuple(ends_s)))
        return tuple(programs)

    def ordering_s(self, update: PlanUpdate) -> float:
        """Return the seconds of the master's work for an update: asking, if workers trained, deciding and ordering."""
        num_workers = len(update.plan.worker_ids)
        asking_s = 0.0 if update.initial else self.costs.asking_s(num_workers)
        return asking_s + self.costs.deciding_s(num_workers) + self.costs.ordering_s(num_workers)

    def part_bytes(self, item: LayerTransfer) -> int:
        return self._profile.layers[item.layer].state_bytes // item.num_parts

    def latency_s(self, source: WorkerId, target: WorkerId) -> float:
        """Return the seconds of a short message between workers."""
        if not self.forms_beside:
            return 0.0  # part of `costs.committing_s`
        network = self._profile.network
        return network.intra_node_latency_s if source.node == target.node else network.inter_node_latency_s

    def transfer_s(self, item: LayerTransfer) -> float:
        """Return the seconds of a transfer; a worker receives its transfers in sequence."""
        # `LINKS` has the link between nodes first: False and True are their places.
        link = self._profile.network.speed_of(LINKS[item.source.node == item.target.node])
        return link.message_s(self.part_bytes(item))
