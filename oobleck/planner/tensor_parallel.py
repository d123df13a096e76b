"""Devices that share stages as the planner sees them: groups of a node's devices that act as one device.

With a degree of t, each t devices of a node hold the same layers, each its share. The planner plans for nodes with a
t-th of the devices and expands the result; a layer moves as t transfers, between devices of equal rank in their groups.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from oobleck.errors import PlanningError
from oobleck.plan import ExecutionPlan, LayerTransfer, PipelineTemplate, WorkerId

from .profiles import Profile
from .values import PlannerSettings


def grouped(profile: Profile, settings: PlannerSettings, degree: int) -> tuple[Profile, PlannerSettings]:
    """Return the profile and the settings of groups of devices. Raises PlanningError where the groups are not whole."""
    if settings.devices_per_node % degree:
        raise PlanningError(
            f"tensor_parallel is {degree}, and nodes have {settings.devices_per_node} devices; "
            "a node's devices must make whole groups"
        )
    device, layers = profile.device, profile.layers
    return replace(
        profile,
        device=replace(
            device, memory_bytes=degree * device.memory_bytes, communication_bytes=degree * device.communication_bytes
        ),
        # The devices of a group share its layers, but each holds the whole message.
        layers=tuple(replace(layer, message_bytes=degree * layer.message_bytes) for layer in layers),
    ), replace(
        settings,
        devices_per_node=settings.devices_per_node // degree,
        reserved_memory_bytes=settings.reserved_memory_bytes * degree,
    )


def with_sharded_state(profile: Profile, degree: int) -> Profile:
    """Return the profile of `degree` devices that hold a stage with sharded optimizer state, in bytes of all of them.

    Each computes a microbatch of its own, with whole weights and whole gradients. Once, the devices hold shares of
    trained weights and their sums beside the optimizer's state, and sums with other nodes. Microbatches of all devices
    take the time of one.
    """
    if degree == 1:
        return profile
    # `StageCosts` counts weights, gradients and optimizer state once, as of a stage that one device holds.
    layers = (
        replace(
            layer,
            activation_bytes=degree * layer.activation_bytes,
            transient_bytes=degree * layer.transient_bytes,
            recomputed={
                level: replace(
                    each,
                    activation_bytes=degree * each.activation_bytes,
                    transient_bytes=degree * each.transient_bytes,
                )
                for level, each in layer.recomputed.items()
            },
            copy_bytes=degree * layer.copy_bytes
            + (degree - 1) * layer.param_bytes
            + (degree + 1) * layer.trained_bytes,
        )
        for layer in profile.layers
    )
    return replace(profile, layers=tuple(layers))


def with_times_of_groups(profile: Profile, degree: int) -> Profile:
    """Return the profile of single devices with the times of groups added, for reports and forecasts."""
    if degree == 1:
        return profile

    def with_groups(seconds: Mapping[int, float]) -> Mapping[int, float]:
        return {**seconds, degree: seconds[1]}

    layers = (
        replace(
            layer,
            forward_s=with_groups(layer.forward_s),
            backward_s=with_groups(layer.backward_s),
            recomputed={
                level: replace(each, more_s=with_groups(each.more_s)) for level, each in layer.recomputed.items()
            },
        )
        for layer in profile.layers
    )
    return replace(profile, layers=tuple(layers))


def expand_plan(plan: ExecutionPlan, degree: int) -> ExecutionPlan:
    """Replace each group of devices by its `degree` devices."""
    return _with_devices(plan, degree, lambda number: number * degree)


def contract_plan(plan: ExecutionPlan, degree: int) -> ExecutionPlan:
    """Replace each `degree` devices by their group."""
    return _with_devices(plan, degree, lambda number: number // degree)


def _with_devices(plan: ExecutionPlan, degree: int, changed: Callable[[int], int]) -> ExecutionPlan:
    if degree == 1:
        return plan

    def with_devices(template: PipelineTemplate) -> PipelineTemplate:
        stages = (
            replace(stage, first_device=changed(stage.first_device), num_devices=changed(stage.num_devices))
            for stage in template.stages
        )
        return PipelineTemplate(stages=tuple(stages))

    return plan.with_templates(with_devices)


def expand_transfers(transfers: Sequence[LayerTransfer], degree: int) -> tuple[LayerTransfer, ...]:
    """Replace transfers between groups by transfers between their devices of equal rank."""
    if degree == 1:
        return tuple(transfers)
    return tuple(
        replace(
            item,
            source=WorkerId(item.source.node, item.source.device * degree + rank),
            target=WorkerId(item.target.node, item.target.device * degree + rank),
        )
        for item in transfers
        for rank in range(degree)
    )


def contract_held(held: Mapping[WorkerId, frozenset[int]], degree: int) -> Mapping[WorkerId, frozenset[int]]:
    """Return the layers that each group holds: those of which all its devices hold their shares."""
    if degree == 1:
        return held
    groups: dict[WorkerId, list[frozenset[int]]] = {}
    for worker_id, layers in held.items():
        groups.setdefault(WorkerId(node=worker_id.node, device=worker_id.device // degree), []).append(layers)
    return {
        # A group with a device missing holds no layer whole.
        group: frozenset.intersection(*shares) if len(shares) == degree else frozenset()
        for group, shares in groups.items()
    }
