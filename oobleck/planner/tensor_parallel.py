"""Tensor parallelism seen by the planner: the devices of a node, taken in groups that act as one device.

With a degree of t, every t devices of a node hold the same layers, each device its share of them. So a plan is made
for nodes with a t-th of the devices and then written out; the shares of one rank within the groups are as separate
from the others' as if they were another model, and a layer moves as t transfers, between devices of like rank.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from oobleck.errors import PlanningError
from oobleck.plan import ExecutionPlan, LayerTransfer, PipelineTemplate, WorkerId

from .cutter import Cutter
from .decision import Decision
from .planner import Planner
from .profiles import LayerProfile, Profile
from .settings import PlannerSettings


class TensorParallelPlanner(Planner):
    """A planner whose stages have `degree` devices each; everything that it takes and gives names single devices."""

    def __init__(
        self,
        profile: Profile,
        settings: PlannerSettings,
        degree: int,
        *,
        make_cutter: Callable[[Profile], Cutter] | None = None,
    ) -> None:
        """`profile` is that of one device. Raises PlanningError where nodes' devices make no whole groups."""
        if settings.devices_per_node % degree:
            raise PlanningError(
                f"tensor_parallel is {degree}, and nodes have {settings.devices_per_node} devices; "
                "a node's devices must make whole groups"
            )
        super().__init__(
            _of_groups(profile, degree),
            replace(
                settings,
                devices_per_node=settings.devices_per_node // degree,
                reserved_memory_bytes=settings.reserved_memory_bytes * degree,
            ),
            make_cutter=make_cutter,
        )
        self.degree = degree
        # What reports and forecasts read speaks of devices; a group is planned with the times of one.
        self.settings = settings
        self.profile = replace(profile, layers=tuple(_with_times_of(layer, degree) for layer in profile.layers))

    def initial_plan(self, nodes: Sequence[str], *, slow: Mapping[str, float] | None = None) -> Decision:
        return self._expand(super().initial_plan(nodes, slow=slow))

    def reconfigure(
        self,
        plan: ExecutionPlan,
        *,
        lost: Collection[str] = (),
        joined: Collection[str] = (),
        leaving: Collection[str] = (),
        resting: Collection[str] = (),
        slow: Mapping[str, float] | None = None,
        held: Mapping[WorkerId, frozenset[int]] | None = None,
    ) -> Decision:
        decision = super().reconfigure(
            _contract_plan(plan, self.degree),
            lost=lost,
            joined=joined,
            leaving=leaving,
            resting=resting,
            slow=slow,
            held=None if held is None else _contract_held(held, self.degree),
        )
        return self._expand(decision)

    def rest_s(
        self, plan: ExecutionPlan, rests: Mapping[int, tuple[int, int]], *, slow: Mapping[str, float] | None = None
    ) -> float:
        return super().rest_s(_contract_plan(plan, self.degree), rests, slow=slow)

    def has_room(self, plan: ExecutionPlan, *, gradient_copies: int) -> bool:
        return super().has_room(_contract_plan(plan, self.degree), gradient_copies=gradient_copies)

    def _expand(self, decision: Decision) -> Decision:
        return replace(
            decision,
            plan=expand_plan(decision.plan, self.degree),
            transfers=expand_transfers(decision.transfers, self.degree),
        )


def _of_groups(profile: Profile, degree: int) -> Profile:
    """The profile of groups of devices that act as one: they share the layers, and each has all of a message."""
    device, layers = profile.device, profile.layers
    return replace(
        profile,
        device=replace(
            device,
            memory_bytes=degree * device.memory_bytes,
            communication_bytes=degree * device.communication_bytes,
        ),
        layers=tuple(replace(layer, message_bytes=degree * layer.message_bytes) for layer in layers),
    )


def expand_plan(plan: ExecutionPlan, degree: int) -> ExecutionPlan:
    """Give every stage `degree` devices for each that it has; a plan of single devices stays the object that it is."""
    if degree == 1:
        return plan
    return _with_devices(plan, lambda number: number * degree)


def _contract_plan(plan: ExecutionPlan, degree: int) -> ExecutionPlan:
    if degree == 1:
        return plan
    return _with_devices(plan, lambda number: number // degree)


def _with_devices(plan: ExecutionPlan, changed: Callable[[int], int]) -> ExecutionPlan:
    """Change the numbers of all stages' devices, the first and how many. Pipelines of one template still share it."""
    known = {id(pipeline.template): pipeline.template for pipeline in plan.pipelines}
    templates = {key: _template_with(template, changed) for key, template in known.items()}
    pipelines = tuple(replace(each, template=templates[id(each.template)]) for each in plan.pipelines)
    return replace(plan, pipelines=pipelines)


def _template_with(template: PipelineTemplate, changed: Callable[[int], int]) -> PipelineTemplate:
    stages = tuple(
        replace(stage, first_device=changed(stage.first_device), num_devices=changed(stage.num_devices))
        for stage in template.stages
    )
    return PipelineTemplate(stages=stages)


def expand_transfers(transfers: Sequence[LayerTransfer], degree: int) -> tuple[LayerTransfer, ...]:
    """Write out transfers between groups as transfers between their devices of like rank."""
    if degree == 1:
        return tuple(transfers)
    return tuple(
        replace(item, source=_device(item.source, degree, rank), target=_device(item.target, degree, rank))
        for item in transfers
        for rank in range(degree)
    )


def _with_times_of(layer: LayerProfile, degree: int) -> LayerProfile:
    forward_s, backward_s = layer.forward_s, layer.backward_s
    return replace(
        layer,
        forward_s={degree: forward_s[1], **forward_s},
        backward_s={degree: backward_s[1], **backward_s},
    )


def _device(group: WorkerId, degree: int, rank: int) -> WorkerId:
    return WorkerId(node=group.node, device=group.device * degree + rank)


def _contract_held(held: Mapping[WorkerId, frozenset[int]], degree: int) -> Mapping[WorkerId, frozenset[int]]:
    """A group holds what all of its devices hold their shares of."""
    if degree == 1:
        return held
    groups: dict[WorkerId, list[frozenset[int]]] = {}
    for worker_id, layers in held.items():
        groups.setdefault(WorkerId(node=worker_id.node, device=worker_id.device // degree), []).append(layers)
    return {
        group: frozenset.intersection(*shares) if len(shares) == degree else frozenset()
        for group, shares in groups.items()
    }
