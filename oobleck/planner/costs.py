"""The costs of a stage: seconds and bytes of any run of layers on any number of a node's devices.

Prefix sums over layers make one stage cost O(1), and all L² of them one numpy expression.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from oobleck.errors import PlanningError
from oobleck.plan import PipelineTemplate, StageTemplate

from .profiles import NetworkProfile, Profile, activation_bytes, levels_of, transient_bytes
from .recomputation import Recomputation
from .tables import Floats, prefix_sums

GRADIENT_COPIES = 1
"""Gradients are kept in the parameters' own precision."""
MESSAGES_AT_A_CUT = 3
"""The most messages in a device's memory for each neighbour: two received ahead, and one being sent or used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """A pipeline's 1F1B step: `first_s + (m - 1) * next_s` bounds m microbatches from above."""

    first_s: float
    """One microbatch through all stages and back: the sum of the stages' times."""
    next_s: float
    """Each further microbatch: the slowest stage's time."""
    most_microbatches: float = math.inf
    """As many fit the memory, where fewer do than a step has."""

    def step_s(self, num_microbatches: int) -> float:
        """Return the seconds of one step without the reduction of gradients; infinity for more than fit the memory."""
        return math.inf if num_microbatches > self.most_microbatches else self.bound_s(num_microbatches)

    def bound_s(self, num_microbatches: int) -> float:
        """Return the seconds of a step of that many microbatches, whether they fit the memory or not."""
        return self.first_s + (num_microbatches - 1) * self.next_s


def taken_within(limit_s: float, first_s: Floats, next_s: Floats, most_microbatches: Floats) -> Floats:
    """Return the microbatches that pipelines of these timings take within a limit; below 1 for none."""
    taken: Floats = np.floor((limit_s - first_s) / next_s) + 1
    # Corrected to agree with Timing.step_s to the last bit.
    taken += first_s + taken * next_s <= limit_s
    taken -= first_s + (taken - 1) * next_s > limit_s
    return np.minimum(taken, most_microbatches)


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Bytes of a stage, summed over its devices."""

    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    copy_bytes: int
    """Copies of gradients and weights, for reductions and autocast."""
    communication_bytes: int
    """Messages in flight, and the communication library's buffers."""
    transient_bytes: int
    """The peak of a pass, on top of all else."""
    activation_bytes: int
    """One microbatch in flight, with the output that its backward pass starts from."""

    @property
    def static_bytes(self) -> int:
        """Bytes held with nothing in flight, and the room for a pass."""
        state = self.weight_bytes + self.gradient_bytes + self.optimizer_bytes
        return state + self.copy_bytes + self.communication_bytes + self.transient_bytes


def footprint(profile: Profile, first_layer: int, stop_layer: int, *, num_devices: int) -> Footprint:
    """Return the bytes that a stage of these layers holds on its devices, if it recomputes nothing; O(its layers)."""
    stage = StageTemplate(first_layer=first_layer, stop_layer=stop_layer, node_index=0, num_devices=num_devices)
    return stage_footprint(profile, stage)


def stage_footprint(profile: Profile, stage: StageTemplate) -> Footprint:
    """Return the bytes that a stage, or a chunk of one, holds on its devices; O(its layers)."""
    first_layer, stop_layer, num_devices = stage.first_layer, stage.stop_layer, stage.num_devices
    layers, levels = profile.layers[first_layer:stop_layer], levels_of(profile, stage)
    left = profile.layers[first_layer - 1].message_bytes if first_layer else 0
    right = layers[-1].message_bytes if stop_layer < profile.num_layers else 0
    # Each device of a stage has all of a message.
    messages = MESSAGES_AT_A_CUT * (left + right)
    return Footprint(
        weight_bytes=sum(layer.param_bytes for layer in layers),
        gradient_bytes=GRADIENT_COPIES * sum(layer.trained_bytes for layer in layers),
        optimizer_bytes=sum(layer.optimizer_bytes for layer in layers),
        copy_bytes=sum(layer.copy_bytes for layer in layers),
        communication_bytes=num_devices * (messages + profile.device.communication_bytes),
        transient_bytes=max(transient_bytes(*each) for each in levels),
        activation_bytes=sum(activation_bytes(*each) for each in levels) + num_devices * right,
    )


def chunks_footprint(profile: Profile, chunks: Sequence[StageTemplate]) -> Footprint:
    """Return the bytes that a stage of these chunks holds: their sum, counting once what the devices share."""
    num_devices = chunks[0].num_devices
    each = [stage_footprint(profile, chunk) for chunk in chunks]
    summed = Footprint(**{field.name: sum(getattr(held, field.name) for held in each) for field in fields(Footprint)})
    # The communication library's buffers belong to the devices, whatever the number of chunks.
    once = (len(chunks) - 1) * num_devices * profile.device.communication_bytes
    return replace(
        summed,
        communication_bytes=summed.communication_bytes - once,
        # A device runs one pass at a time.
        transient_bytes=max(held.transient_bytes for held in each),
    )


def closing_s(profile: Profile, chunks: Sequence[StageTemplate]) -> float:
    """Return the seconds of a step after a stage's last pass, but for the reduction.

    Its devices exchange what they share out, and update their parameters.
    """
    layers = [profile.layers[layer] for chunk in chunks for layer in chunk.layers]
    updating_s = sum(layer.update_s for layer in layers) / chunks[0].num_devices
    return profile.exchange_s_per_byte * sum(layer.exchanged_bytes for layer in layers) + updating_s


def cut_seconds(network: NetworkProfile, output_bytes: int, *, same_node: bool) -> float:
    """Return the seconds that one message of `output_bytes` takes between neighbouring stages."""
    if same_node:
        return network.intra_node_latency_s + output_bytes / network.intra_node_bytes_per_s
    return network.inter_node_latency_s + output_bytes / network.inter_node_bytes_per_s


class StageCosts:
    """The costs of all stages of one profile on nodes of `devices_per_node` devices.

    `device_counts` are the powers of two that a stage may have: up to `max_devices_per_stage`, and named by every layer
    of the profile. `max_in_flight`, the microbatches of a step, caps those in flight.
    """

    def __init__(
        self,
        profile: Profile,
        *,
        devices_per_node: int = 1,
        max_devices_per_stage: int = 1,
        max_in_flight: int,
        reserved_bytes: int = 0,
        communication: bool = True,
    ) -> None:
        if devices_per_node < 1 or max_devices_per_stage < 1:
            raise PlanningError(
                f"{devices_per_node} devices a node and {max_devices_per_stage} a stage: both must be at least 1"
            )
        layers = profile.layers
        self.profile = profile
        self.num_layers = len(layers)
        self.devices_per_node = devices_per_node
        self.max_in_flight = max_in_flight
        self.usable_bytes = profile.device.memory_bytes - reserved_bytes
        largest = min(devices_per_node, max_devices_per_stage)
        self.device_counts = tuple(
            count
            for count in (1 << exponent for exponent in range(largest.bit_length()))
            if count <= largest and all(count in layer.forward_s for layer in layers)
        )
        self._most_in_flight: dict[int, Floats] = {}
        self._closes = profile.exchange_s_per_byte > 0 or any(layer.update_s for layer in layers)
        self._closings: dict[tuple[object, ...], float] = {}
        self._compute = {
            count: prefix_sums([layer.forward_s[count] + layer.backward_s[count] for layer in layers])
            for count in self.device_counts
        }
        self._held = prefix_sums(
            [layer.state_bytes + GRADIENT_COPIES * layer.trained_bytes + layer.copy_bytes for layer in layers]
        )
        self._recomputation = Recomputation(profile, self.device_counts)
        self.recomputes = self._recomputation.is_chosen
        """Whether stages take longer where less memory is left, as they recompute more."""
        # The first stage exchanges nothing to its left, and the last one nothing to its right.
        self._messages = np.array([0, *(layer.message_bytes for layer in layers[:-1]), 0], dtype=np.float64)
        self._trained = prefix_sums([layer.trained_bytes for layer in layers])
        self._updating = prefix_sums([layer.update_s for layer in layers])
        self._exchanged = prefix_sums([layer.exchanged_bytes for layer in layers])
        self._empty = np.tri(self.num_layers + 1, dtype=bool)
        self._cuts = {}
        for same_node in (False, True):
            each_s = [cut_seconds(profile.network, layer.output_bytes, same_node=same_node) for layer in layers[:-1]]
            self._cuts[same_node] = np.array([0.0, *(each_s if communication else [0.0] * len(each_s)), 0.0])

    def with_most_in_flight(self, number: int) -> StageCosts:
        """Return the costs of pipelines that take at most `number` microbatches in a step."""
        # The tables do not depend on it.
        other = copy(self)
        other.max_in_flight = number
        return other

    def no_heavier_than(self, reduced_bytes: float) -> StageCosts:
        """Return the costs with only those stages that have at most their devices' share of a node's gradient bytes."""
        other, held = copy(self), self._trained[None, :] - self._trained[:, None]
        other._most_in_flight = {
            count: np.where(held > reduced_bytes * count / self.devices_per_node, -1.0, self.most_in_flight(count))
            for count in self.device_counts
        }
        return other

    # Every seconds value that the search compares comes from here, so that equal stages have equal bits.
    def seconds(self, num_devices: int, *, left_same_node: bool, right_same_node: bool, speed: float = 1.0) -> Floats:
        """Return the seconds of every stage: `[L + 1, L + 1]`, at [i, j] for layers i to j - 1; else infinite.

        `speed` divides the compute time (1.0 is nominal).
        """
        compute = self._compute[num_devices]
        table = compute[None, :] - compute[:, None]
        if speed != 1.0:
            table /= speed
        # A stage pays for the messages that it sends: its input's gradient to the previous stage, and its output to the
        # next. Summed over a pipeline, these are exactly one microbatch's way there and back.
        table += self._cuts[left_same_node][:, None]
        table += self._cuts[right_same_node][None, :]
        # Every stage has a layer.
        table[self._empty] = np.inf
        return table

    def most_in_flight(self, num_devices: int) -> Floats:
        """Return how many microbatches in flight fit every stage: `[L + 1, L + 1]`; -1 where the state alone does not.

        Callers share the array and must not change it.
        """
        if num_devices in self._most_in_flight:
            return self._most_in_flight[num_devices]
        most = self._recomputation.most_in_flight(*self._room(num_devices))
        self._most_in_flight[num_devices] = most
        return most

    def _room(self, num_devices: int) -> tuple[Floats, Floats]:
        """Return each stage's memory for activations and passes, and what each microbatch in flight holds besides."""
        at_cuts = MESSAGES_AT_A_CUT * (self._messages[None, :] + self._messages[:, None])
        room = num_devices * (self.usable_bytes - self.profile.device.communication_bytes - at_cuts)
        room -= self._held[None, :] - self._held[:, None]
        # Each device keeps the whole output, from which the backward pass starts.
        return room, num_devices * self._messages[None, :]

    def room(self, num_devices: int, first: NDArray[np.int64], stop: NDArray[np.int64]) -> tuple[Floats, Floats]:
        """Return the memory of some stages for microbatches in flight, and what each of these holds."""
        room, outputs = self._room(num_devices)
        transient, kept = self._recomputation.without(first, stop)
        return room[first, stop] - transient, kept + np.broadcast_to(outputs, room.shape)[first, stop]

    def recomputing_s(self, num_devices: int, in_flight: int) -> Floats:
        """Return the seconds that stages with `in_flight` microbatches in flight take longer, to fit: `[L + 1, L + 1]`.

        Infinite where they do not fit. Callers share the array and must not change it.
        """
        return self._recomputation.choose(num_devices, in_flight, *self._room(num_devices))[0]

    def marked(self, template: PipelineTemplate) -> PipelineTemplate:
        """Return the template with what each stage recomputes."""
        stages = []
        for index, stage in enumerate(template.stages):
            count = stage.num_devices
            in_flight = self._in_flight_at(template, index)
            _, selective, recomputed = self._recomputation.choose(count, in_flight, *self._room(count))
            at = stage.first_layer, stage.stop_layer
            stages.append(replace(stage, num_selective=int(selective[at]), num_recomputed=int(recomputed[at])))
        return PipelineTemplate(stages=tuple(stages))

    def in_flight(self, stages_to_end: int, num_microbatches: int | None = None) -> int:
        """Return the microbatches that 1F1B keeps in flight at a stage; `stages_to_end` counts the stage itself.

        `num_microbatches` are the pipeline's own, where they are known.
        """
        # What a stage recomputes, and so its seconds, depend on its pipeline alone and not on the pipeline's share.
        own = self.max_in_flight if num_microbatches is None or self.recomputes else num_microbatches
        return min(stages_to_end, self.max_in_flight, own)

    def stage_seconds(self, template: PipelineTemplate, speeds: Sequence[float] = ()) -> list[float]:
        """Return the seconds of each stage, or chunk; `speeds` divides the compute of its node (1.0 is nominal)."""
        stages = template.stages
        seconds = []
        for index, stage in enumerate(stages):
            table = self._compute[stage.num_devices]
            compute = float(table[stage.stop_layer] - table[stage.first_layer])
            if self.recomputes:
                more_s = self.recomputing_s(stage.num_devices, self._in_flight_at(template, index))
                compute += float(more_s[stage.first_layer, stage.stop_layer])
            if speeds:
                compute /= speeds[stage.node_index]
            left = index > 0 and stages[index - 1].node_index == stage.node_index
            right = index + 1 < len(stages) and stages[index + 1].node_index == stage.node_index
            # Added in the order of `seconds`, for equal bits.
            seconds.append(float(compute + self._cuts[left][stage.first_layer] + self._cuts[right][stage.stop_layer]))
        return seconds

    def timing(self, template: PipelineTemplate, speeds: Sequence[float] = ()) -> Timing:
        """Return the step times of a pipeline in O(S)."""
        seconds = self.stage_seconds(template, speeds)
        # The chunks of a stage take turns on its devices, so their seconds add up.
        size = template.num_stages
        return Timing(
            first_s=math.fsum(seconds) + self.closing_s(template),
            next_s=max(math.fsum(seconds[stage::size]) for stage in range(size)),
            # Whoever cuts chunks judges their memory by a timeline.
            most_microbatches=self.most_microbatches(template) if template.num_chunks == 1 else math.inf,
        )

    def most_microbatches(self, template: PipelineTemplate) -> float:
        """Return how many microbatches of its own a pipeline has memory for; infinity for any number.

        Pipelines of several chunks hold those of a whole step or none; `Cutter.most_microbatches` is exact for them.
        """
        if template.num_chunks > 1:
            return math.inf if self.fits(template) else 0.0
        tables = {count: self.most_in_flight(count) for count in {stage.num_devices for stage in template.stages}}
        least = math.inf
        for after, stage in enumerate(reversed(template.stages), 1):
            most = tables[stage.num_devices].item(stage.first_layer, stage.stop_layer)
            if most < after and most < self.in_flight(after):  # which is at most `after`, and takes longer
                least = min(least, max(0.0, most))
        return least

    def most_of_cuts(self, template: PipelineTemplate, stops: NDArray[np.int64]) -> Floats:
        """Return what `most_microbatches` would be for each of many cuts of the template, [candidate, S + 1]."""
        least = np.full(len(stops), np.inf)
        for index, stage in enumerate(template.stages):
            most = self.most_in_flight(stage.num_devices)[stops[:, index], stops[:, index + 1]]
            limited = most < self.in_flight(template.num_stages - index)
            least = np.where(limited, np.minimum(least, np.maximum(most, 0.0)), least)
        return least

    def least_slowest_s(self, template: PipelineTemplate) -> float:
        """Return a lower bound on the compute of the slowest stage of a template's devices, under any cut; O(L log L).

        Even into several chunks: whatever the smallest layers do, some stage has its share of the other layers.
        """
        size, counts = template.num_stages, {stage.num_devices for stage in template.stages}
        layers = sorted(np.minimum.reduce([np.diff(self._compute[count]) for count in counts]).tolist())
        sums = prefix_sums(layers)
        shares = [float(sums[least - (least - self.num_layers) // size] - sums[least]) for least in range(len(layers))]
        return max(float(sums[-1]) / size, *shares)

    def closing_s(self, template: PipelineTemplate) -> float:
        """Return `closing_s` of the stage where it is the longest."""
        if not self._closes:
            return 0.0
        return max(self._closing_s(template.chunks_of(stage)) for stage in range(template.num_stages))

    def _closing_s(self, chunks: Sequence[StageTemplate]) -> float:
        # The templates of a catalog have many stages of the same layers.
        key = chunks[0].num_devices, *((chunk.first_layer, chunk.stop_layer) for chunk in chunks)
        if key not in self._closings:
            self._closings[key] = closing_s(self.profile, chunks)
        return self._closings[key]

    def fits(self, template: PipelineTemplate, num_microbatches: int | None = None, *, more_copies: int = 0) -> bool:
        """Return whether every stage holds its state, its microbatches in flight, and more copies of gradients.

        `num_microbatches` are the pipeline's own, where they are known.
        """
        return all(
            self.stage_fits(template, index, num_microbatches, more_copies=more_copies)
            for index in range(template.num_stages)
        )

    def stage_fits(
        self, template: PipelineTemplate, index: int, num_microbatches: int | None = None, *, more_copies: int = 0
    ) -> bool:
        """Return whether one stage fits its devices; see `fits`."""
        # Of several chunks, all in flight count as much as the largest.
        chunks = (self.marked(template) if self.recomputes else template).chunks_of(index)
        held = chunks_footprint(self.profile, chunks)
        largest = max(stage_footprint(self.profile, each).activation_bytes for each in chunks)
        copies = sum(self._trained[each.stop_layer] - self._trained[each.first_layer] for each in chunks)
        activations = self._in_flight_at(template, index, num_microbatches) * largest
        needed = held.static_bytes + activations + more_copies * copies
        return bool(needed <= chunks[0].num_devices * self.usable_bytes)

    def _in_flight_at(self, template: PipelineTemplate, index: int, num_microbatches: int | None = None) -> int:
        after, num_chunks = template.num_stages - 1 - index, template.num_chunks
        if num_chunks == 1:
            in_flight = self.in_flight(after + 1, num_microbatches)
            # A stage that chooses what it recomputes does so for as many as its pipeline has memory for.
            return int(max(1, min(in_flight, self.most_microbatches(template)))) if self.recomputes else in_flight
        own = self.max_in_flight if num_microbatches is None else min(num_microbatches, self.max_in_flight)
        # See `schedule/orders.py` for the order of interleaved passes.
        return min(2 * after + (num_chunks - 1) * template.num_stages + 1, num_chunks * own)

    def reduced_bytes(self, template: PipelineTemplate) -> int:
        """Return the most gradient bytes that one node of the pipeline reduces with its peers."""
        nodes = [0] * template.num_nodes
        for stage in template.stages:
            nodes[stage.node_index] += int(self._trained[stage.stop_layer] - self._trained[stage.first_layer])
        return max(nodes)

    def closings_s(self, template: PipelineTemplate, stops: NDArray[np.int64]) -> Floats:
        """Return what `closing_s` would be for each of many cuts of the template, [candidate, S + 1]."""
        exchanging_s = self.profile.exchange_s_per_byte * np.diff(self._exchanged[stops], axis=1)
        counts = [stage.num_devices for stage in template.stages]
        longest: Floats = (exchanging_s + np.diff(self._updating[stops], axis=1) / counts).max(axis=1)
        return longest

    def most_reduced(self, template: PipelineTemplate, stops: NDArray[np.int64]) -> Floats:
        """Return what `reduced_bytes` would be for each of many cuts of the template, [candidate, S + 1]."""
        held = np.diff(self._trained[stops], axis=1)
        nodes = np.zeros((template.num_nodes, len(stops)))
        np.add.at(nodes, [stage.node_index for stage in template.stages], held.T)
        most: Floats = nodes.max(axis=0)
        return most

    def stage(self, first_layer: int, stop_layer: int, device: int, num_devices: int) -> StageTemplate:
        """Return a stage whose first device is number `device`, counted over all nodes of its pipeline."""
        node_index, first_device = divmod(device, self.devices_per_node)
        return StageTemplate(
            first_layer=first_layer,
            stop_layer=stop_layer,
            node_index=node_index,
            first_device=first_device,
            num_devices=num_devices,
        )
