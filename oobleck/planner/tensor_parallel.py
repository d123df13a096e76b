"""Devices that share stages as the planner sees them: groups of a node's devices that act as one device.

With a degree of t, each t devices of a node hold the same layers, each its share. The planner plans for nodes with a
t-th of the devices and expands the result; a layer moves as t transfers, between devices of equal rank in their groups.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from oobleck.errors import PlanningError
from oobleck.job import Sharding
from oobleck.plan import ExecutionPlan, LayerTransfer, PipelineTemplate, WorkerId

from .profiles import LayerProfile, Profile
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
        # The devices of a group share its layers, but each may hold the whole message: what models cut by tokens is
        # known to workers alone.
        layers=tuple(
            replace(layer, message_bytes=degree * layer.message_bytes, update_s=layer.update_s / degree)
            for layer in layers
        ),
    ), replace(
        settings,
        devices_per_node=settings.devices_per_node // degree,
        reserved_memory_bytes=settings.reserved_memory_bytes * degree,
    )


def with_shares(profile: Profile, degree: int, sharding: Sharding, *, is_cast: bool = False) -> Profile:
    """Return the profile of `degree` devices that hold a sharded stage, in bytes of all of them.

    Each computes a microbatch of its own. Once, the devices hold shares of what is shared out; each of them holds whole
    what is not, and of a layer at a time what is. With `is_cast`, autocast computes blocks in a type of half the size:
    whole weights are of that type where gradients are summed in each pass. Microbatches of all devices take the time of
    one.
    """
    if sharding == "none":
        return profile
    layers = profile.layers
    frees_weights, frees_gradients = sharding == "all", sharding != "optimizer"
    saved = [
        layer.gathered_bytes // 2 if is_cast and frees_gradients and 0 < index < len(layers) - 1 else 0
        for index, layer in enumerate(layers)
    ]
    weights = [layer.gathered_bytes - less for layer, less in zip(layers, saved, strict=True)]

    def shared(index: int) -> LayerProfile:
        layer = layers[index]
        # `StageCosts` counts weights, gradients and optimizer state once: for these, the shares.
        frozen = layer.gathered_bytes - layer.exchanged_bytes
        whole = 0 if frees_weights else degree * weights[index] - frozen
        whole += 0 if frees_gradients else degree * layer.exchanged_bytes
        # A layer's gradients, and their copy that is summed; its weights, and those of the layer that comes next.
        unit = 2 * layer.exchanged_bytes - saved[index] if frees_gradients else 0
        if frees_weights:
            unit += weights[index] + max(
                (weights[at] for at in (index - 1, index + 1) if 0 <= at < len(layers)), default=0
            )
        # Each device has the gradient of its own experts alone, of which two thirds come at once.
        unit -= min(layer.transient_bytes, 2 * layer.expert_bytes // 3) * (degree - 1) // degree
        return replace(
            layer,
            activation_bytes=degree * layer.activation_bytes,
            transient_bytes=degree * (layer.transient_bytes + unit),
            recomputed={
                level: replace(
                    each,
                    activation_bytes=degree * each.activation_bytes,
                    transient_bytes=degree * (each.transient_bytes + unit),
                )
                for level, each in layer.recomputed.items()
            },
            # Such weights need no cast, and experts one on their own device.
            copy_bytes=_copies(layer, degree, without=saved[index]) + whole,
        )

    return replace(profile, layers=tuple(map(shared, range(len(layers)))))


def _copies(layer: LayerProfile, degree: int, *, without: int) -> int:
    """Return the bytes of casts and of copies of gradients on all devices; each has those of its own experts alone."""
    copies = max(0, layer.copy_bytes - without)
    of_experts = min(copies, layer.copy_bytes * layer.expert_bytes // max(1, layer.param_bytes))
    return degree * (copies - of_experts) + of_experts


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
