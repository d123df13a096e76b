"""Stage costs on several kinds of nodes, in pipelines that may mix them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

from oobleck.errors import PlanningError
from oobleck.plan import PipelineTemplate

from .costs import StageCosts, Timing
from .values import NodeKind, PlannerSettings, with_shared_links

Counts = tuple[int, ...]
"""The number of nodes of each kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """A pipeline template whose nodes are of given kinds."""

    template: PipelineTemplate
    kinds: tuple[int, ...]
    """The index of each node's kind."""


class KindCosts:
    """The costs of stages on each kind of node. With several kinds, stages have one device."""

    def __init__(self, kinds: Sequence[NodeKind], settings: PlannerSettings) -> None:
        """Raise PlanningError where the kinds' profiles are not of one model."""
        _check(kinds, settings)
        self.kinds = tuple(kinds)
        self.settings = settings
        # A message between nodes takes the time of the slowest kind's profile, one within a node that of its own kind.
        profiles = with_shared_links([kind.profile for kind in kinds])
        self.network = profiles[0].network
        self.of = tuple(
            StageCosts(
                profile,
                devices_per_node=kind.devices_per_node,
                max_devices_per_stage=settings.max_devices_per_stage,
                max_in_flight=settings.num_microbatches,
                reserved_bytes=settings.reserved_memory_bytes,
            )
            for kind, profile in zip(kinds, profiles, strict=True)
        )
        self.num_layers = profiles[0].num_layers
        self.layer_bytes = tuple(layer.state_bytes for layer in profiles[0].layers)
        self.devices = tuple(kind.devices_per_node for kind in kinds)

    def timing(self, form: Form, speeds: Sequence[float] = ()) -> Timing:
        """Return the step times of a pipeline; `speeds` divides the compute of its nodes (1.0 is nominal)."""
        by_kind = {kind: self.of[kind].stage_seconds(form.template, speeds) for kind in set(form.kinds)}
        seconds = [by_kind[form.kinds[stage.node_index]][index] for index, stage in enumerate(form.template.stages)]
        size = form.template.num_stages  # of several chunks each, in a plan that was made while there was one kind
        return Timing(
            first_s=math.fsum(seconds),
            next_s=max(math.fsum(seconds[stage::size]) for stage in range(size)),
            most_microbatches=self.most_microbatches(form),
        )

    def with_most_in_flight(self, number: int) -> KindCosts:
        """Return the costs of pipelines that take at most `number` microbatches in a step."""
        other = copy(self)
        other.of = tuple(own.with_most_in_flight(number) for own in self.of)
        return other

    def most_microbatches(self, form: Form) -> float:
        """Return how many microbatches of its own a pipeline has memory for; infinity for any number."""
        template, size, least = form.template, form.template.num_stages, math.inf
        if template.num_chunks > 1:
            return math.inf if self.fits(form) else 0.0
        for index, stage in enumerate(template.stages):
            own = self.of[form.kinds[stage.node_index]]
            most = float(own.most_in_flight(stage.num_devices)[stage.first_layer, stage.stop_layer])
            if most < own.in_flight(size - index):
                least = min(least, max(0.0, most))
        return least

    def has_devices(self, form: Form) -> bool:
        """Return whether nodes of these kinds have the devices that a template names."""
        return all(stage.devices.stop <= self.devices[form.kinds[stage.node_index]] for stage in form.template.stages)

    def fits(self, form: Form, num_microbatches: int | None = None, *, more_copies: int = 0) -> bool:
        """Return whether every stage fits a device of its node's kind, with more copies of its gradients.

        `num_microbatches` are the pipeline's own, where they are known.
        """
        return all(
            self.of[form.kinds[stage.node_index]].stage_fits(
                form.template, index, num_microbatches, more_copies=more_copies
            )
            for index, stage in enumerate(form.template.stages[: form.template.num_stages])
        )


def _check(kinds: Sequence[NodeKind], settings: PlannerSettings) -> None:
    if not kinds:
        raise PlanningError("no kinds of nodes were given; a plan needs at least 1")
    names = [kind.name for kind in kinds]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise PlanningError(f"kind {twice[0]} is named twice; every kind has one profile")
    if len(kinds) > 1 and settings.max_devices_per_stage != 1:
        raise PlanningError(
            f"max_devices_per_stage is {settings.max_devices_per_stage}; with kinds of nodes, stages have 1 device"
        )
    first = kinds[0]
    for kind in kinds[1:]:
        for key, what in (
            ("num_layers", "layers"),
            ("microbatch_size", "samples a microbatch"),
            ("sequence_length", "tokens a sample"),
        ):
            one, other = getattr(first.profile, key), getattr(kind.profile, key)
            if one != other:
                raise PlanningError(
                    f"the profile of {kind.name} has {other} {what}, and that of {first.name} {one}; "
                    "profiles of all kinds have to be of one model"
                )
        for index, (here, there) in enumerate(zip(first.profile.layers, kind.profile.layers, strict=True)):
            for key, what in (("state_bytes", "bytes of state"), ("trained_bytes", "trained bytes")):
                one, other = getattr(here, key), getattr(there, key)
                if one != other:
                    raise PlanningError(
                        f"layer {index} ({here.name}) has {other} {what} in the profile of {kind.name}, and {one} in "
                        f"that of {first.name}; profiles of all kinds have to be of one model"
                    )
