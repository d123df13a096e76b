"""Tensor parallelism seen by the planner: the devices of a node, taken in groups that act as one device.

With a degree of t, every t devices of a node hold the same layers, each device its share of them. So a plan is made
for nodes with a t-th of the devices and then written out; the shares of one rank within the groups are as separate
from the others' as if they were another model, and a layer moves as t transfers, between devices of like rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from oobleck.errors import PlanningError
from oobleck.plan import ExecutionPlan, LayerTransfer, PipelineTemplate, WorkerId

from .profiles import Profile
from .values import PlannerSettings


def grouped(profile: Profile, settings: PlannerSettings, degree: int) -> tuple[Profile, PlannerSettings]:
    """Return the profile and the settings of groups of devices: they share the layers, and each has all of a message.

    Raises PlanningError where nodes' devices make no whole groups.
    """
    if settings.devices_per_node % degree:
        raise PlanningError(
            f"tensor_parallel is {degree}, and nodes have {settings.devices_per_node} devices; "
            "a node's devices must make whole groups"
        )
    device, layers = profile.device, profile.layers
    return replace(
        profile,
        device=replace(
            device,
            memory_bytes=degree * device.memory_bytes,
            communication_bytes=degree * device.communication_bytes,
        ),
        layers=tuple(replace(layer, message_bytes=degree * layer.message_bytes) for layer in layers),
    ), replace(
        settings,
        devices_per_node=settings.devices_per_node // degree,
        reserved_memory_bytes=settings.reserved_memory_bytes * degree,
    )


def with_times_of_groups(profile: Profile, degree: int) -> Profile:
    """Return the profile of single devices, as reports and forecasts read it, with the times of groups beside."""
    if degree == 1:
        return profile

    def with_groups(seconds: Mapping[int, float]) -> Mapping[int, float]:
        return {degree: seconds[1], **seconds}

    layers = (
        replace(layer, forward_s=with_groups(layer.forward_s), backward_s=with_groups(layer.backward_s))
        for layer in profile.layers
    )
    return replace(profile, layers=tuple(layers))


def expand_plan(plan: ExecutionPlan, degree: int) -> ExecutionPlan:
    """Give every stage `degree` devices for each that it has; a plan of single devices stays the object that it is."""
    return plan if degree == 1 else _with_devices(plan, lambda number: number * degree)


def contract_plan(plan: ExecutionPlan, degree: int) -> ExecutionPlan:
    """Return the plan of groups that was expanded."""
    return plan if degree == 1 else _with_devices(plan, lambda number: number // degree)


def _with_devices(plan: ExecutionPlan, changed: Callable[[int], int]) -> ExecutionPlan:
    """Change the numbers of all stages' devices, the first and how many. Pipelines of one template still share it."""
    templates = {
        id(template): PipelineTemplate(
            stages=tuple(
                replace(stage, first_device=changed(stage.first_device), num_devices=changed(stage.num_devices))
                for stage in template.stages
            )
        )
        for template in {id(each.template): each.template for each in plan.pipelines}.values()
    }
    pipelines = tuple(replace(each, template=templates[id(each.template)]) for each in plan.pipelines)
    return replace(plan, pipelines=pipelines)


def expand_transfers(transfers: Sequence[LayerTransfer], degree: int) -> tuple[LayerTransfer, ...]:
    """Write out transfers between groups as transfers between their devices of like rank."""
    if degree == 1:
        return tuple(transfers)

    def device(group: WorkerId, rank: int) -> WorkerId:
        return WorkerId(node=group.node, device=group.device * degree + rank)

    return tuple(
        replace(item, source=device(item.source, rank), target=device(item.target, rank))
        for item in transfers
        for rank in range(degree)
    )


def contract_held(held: Mapping[WorkerId, frozenset[int]], degree: int) -> Mapping[WorkerId, frozenset[int]]:
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
