"""How long virtual work takes: what each schedule's timeline and the planner's network model say."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass, fields, replace

from oobleck.control.protocol import PlanUpdate
from oobleck.control.speed import microbatch_s
from oobleck.planner import ExecutionPlan, LayerTransfer, Pipeline, PipelineTemplate, Profile, WorkerId
from oobleck.planner.profiles import LINKS
from oobleck.schedule import Op, ScheduleKind, compile_schedule, timeline
from oobleck.schedule.choice import kind_for
from oobleck.sim.costs import Costs, StepTimes, costs_on

_FREE = Costs(**dict.fromkeys([part.name for part in fields(Costs)], 0.0))
_LAST_OF_BACKWARD = (Op.BACKWARD, Op.BACKWARD_WEIGHT)
"""What takes a microbatch backward to the end, in one part or as the second of two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delays:
    """Seconds of what no profile states, as measured on a small machine."""

    connect_s: float = 0.02
    """An SSH handshake."""
    start_agent_s: float = 0.4
    """From the handshake to an agent that listens."""
    warm_up_s: float = 3.0
    """A machine's first worker imports torch."""
    start_worker_s: float = 0.03
    """Every worker is forked from a warm process."""
    set_up_worker_s: float = 0.5
    """Reading the text, building the model's structure."""
    profile_s: float = 5.0
    """Measuring a profile, where none is cached."""
    form_group_s: float = 0.02
    """Where no costs say it."""
    notice_s: float = 0.02
    """At most this long after the end of a peer its neighbours meet an error."""
    link_latency_s: float = 0.0005
    """One way through a tunnel to an agent."""


@dataclass(frozen=True, slots=True)
class ProgramTimes:
    """One stage's program, in seconds from its beginning."""

    end_s: float
    backward_ends_s: tuple[float, ...]


class Tempo:
    """Seconds of steps, reductions, transfers and orders. Mutable only in how slow each node is."""

    def __init__(
        self,
        profile: Profile,
        *,
        profile_of: Callable[[str], Profile] | None = None,
        form_group_s: float = 0.0,
        costs: Costs | None = None,
    ) -> None:
        """Without `costs`, forming takes `form_group_s`, and the master's work and commits take no time.

        Where nodes are of several kinds, `profile_of` returns the profile of each node's.
        """
        self.forms_beside = costs is None
        """Groups that sum are formed beside what is computed; costs are those of NCCL, which forms all at once."""
        self._costs = costs or replace(_FREE, form_s=form_group_s)
        self._profile = profile
        self._profile_of = profile_of or (lambda node: profile)
        self._factors: defaultdict[str, float] = defaultdict(lambda: 1.0)
        self._programs: dict[
            tuple[PipelineTemplate, tuple[float, ...], int, ScheduleKind, tuple[int, ...]], tuple[ProgramTimes, ...]
        ] = {}
        self._pace = StepTimes(profile, profile_of=profile_of)

    def set_factor(self, node: str, factor: float) -> None:
        """Have a node take `factor` times as long as usual, from its next program on."""
        self._factors[node] = factor

    def program(self, pipeline: Pipeline, stage: int, num_microbatches: int, kind: ScheduleKind) -> ProgramTimes:
        """What one stage does of a program that all stages of its pipeline begin together."""
        factors = tuple(self._factors[node] for node in pipeline.nodes)
        own = tuple(map(self._profile_of, pipeline.nodes))
        key = pipeline.template, factors, num_microbatches, kind, tuple(map(id, own))
        if key not in self._programs:
            self._programs[key] = self._evaluate(own, pipeline.template, factors, num_microbatches, kind)
        return self._programs[key][stage]

    def compute_s(self, pipeline: Pipeline, stage: int, num_microbatches: int) -> float:
        """Seconds in which a stage computes so many microbatches, those in which it waits left out."""
        mine = pipeline.stages[stage]
        node = mine.worker_ids[0].node
        return num_microbatches * microbatch_s(self._profile_of(node), mine) * self._factors[node]

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
        return tuple(
            ProgramTimes(
                end_s=end_s,
                backward_ends_s=tuple(
                    span.end_s
                    for span in spans
                    if span.instruction.op in _LAST_OF_BACKWARD and span.instruction.chunk == 0
                ),
            )
            for end_s, spans in zip(evaluated.ends_s, evaluated.spans, strict=True)
        )

    def reduce_s(self, plan: ExecutionPlan) -> float:
        return self._pace.reduce_s(plan)

    def committing_s(self, plan: ExecutionPlan) -> float:
        """Seconds in which all workers of a plan agree that a step is committed."""
        return self._costs.committing_s(len(plan.worker_ids))

    def forming_s(self, group_sizes: Collection[int]) -> float:
        """Seconds in which a worker forms groups of so many members, once all are there."""
        return self._costs.forming_s(group_sizes)

    def ordering_s(self, update: PlanUpdate) -> float:
        """Seconds that the master worked for an update: to ask all, if they trained, to decide, and to order."""
        num_workers = len(update.plan.worker_ids)
        asking_s = 0.0 if update.initial else self._costs.asking_s(num_workers)
        return asking_s + self._costs.deciding_s(num_workers) + self._costs.ordering_s(num_workers)

    def part_bytes(self, item: LayerTransfer) -> int:
        """Bytes that a transfer moves: parameters and optimizer state."""
        layer = self._profile.layers[item.layer]
        return (layer.param_bytes + layer.optimizer_bytes) // item.num_parts

    def latency_s(self, source: WorkerId, target: WorkerId) -> float:
        """Seconds that a short message takes from one worker to another; costs have it in `committing_s`."""
        if not self.forms_beside:
            return 0.0
        network = self._profile.network
        return network.intra_node_latency_s if source.node == target.node else network.inter_node_latency_s

    def transfer_s(self, item: LayerTransfer) -> float:
        """Seconds of a transfer; those to one worker come one after the other."""
        link = self._profile.network.speed_of(LINKS[item.source.node == item.target.node])
        return link.latency_s + self.part_bytes(item) / link.bytes_per_s
