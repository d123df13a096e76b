"""The seconds in which devices that share a stage out exchange its weights and its gradients.

An all-gather puts whole weights together from the devices' rows, and sends (d - 1) / d of their bytes over each link; a
sum of gradients sends twice as much, as a ring does (Patarasuk and Yuan 2009). With `optimizer`, both follow the last
pass of a step, and nothing overlaps. With `gradients`, a layer's gradients are summed while the one before it computes
its backward pass, in each microbatch. With `all`, a layer's weights come while the one before it computes, in both
passes, as well. Where experts stay on their devices, or devices share samples, a pass waits for tokens and heads on
their way there and back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from oobleck.job import Sharding

from .profiles import LayerProfile, NetworkProfile, Profile


def with_exchanges(profile: Profile, degree: int, sharding: Sharding) -> Profile:
    """Return the profile of `degree` devices that share a stage out, with the seconds of what they exchange."""
    if sharding == "none" or degree == 1:
        return profile
    network, each_pass = profile.network, sharding in ("gradients", "all")
    gather_s, sum_s = _s_per_byte(network, degree, 1), _s_per_byte(network, degree, 2)
    per_step_s = (0.0 if sharding == "all" else gather_s) + (0.0 if each_pass else sum_s)
    layers = tuple(_with_messages(layer, network, degree) for layer in profile.layers)
    if not each_pass:
        return replace(profile, layers=layers, exchange_s_per_byte=per_step_s)

    def exchanging(layer: LayerProfile) -> LayerProfile:
        latency_s = network.intra_node_latency_s
        gathered, summed = layer.gathered_bytes, layer.exchanged_bytes
        weights_s = latency_s + gathered * gather_s if sharding == "all" and gathered else 0.0
        gradients_s = latency_s + summed * sum_s if summed else 0.0
        return replace(
            layer,
            # What a layer does not hide behind its own pass of the same length, the pass waits for.
            forward_s=_at_least(layer.forward_s, weights_s),
            backward_s=_at_least(layer.backward_s, weights_s + gradients_s),
        )

    return replace(profile, layers=tuple(map(exchanging, layers)), exchange_s_per_byte=per_step_s)


def _with_messages(layer: LayerProfile, network: NetworkProfile, degree: int) -> LayerProfile:
    """Return a layer with the seconds in which tokens travel to experts, and heads to other tokens, in each pass."""
    experts_s = 2 * layer.expert_message_bytes * _s_per_byte(network, degree, 1)
    contexts_s = layer.context_bytes / network.intra_node_bytes_per_s
    # Both travel there and back.
    latencies_s = 2 * network.intra_node_latency_s * (bool(experts_s) + bool(contexts_s))
    if not latencies_s and not experts_s and not contexts_s:
        return layer

    def longer(seconds: Mapping[int, float]) -> Mapping[int, float]:
        return {count: own_s + experts_s + contexts_s + latencies_s for count, own_s in seconds.items()}

    # What is computed again sends its tokens again.
    again = layer.with_recomputed(lambda each: replace(each, more_s=longer(each.more_s)))
    return replace(again, forward_s=longer(layer.forward_s), backward_s=longer(layer.backward_s))


def _s_per_byte(network: NetworkProfile, degree: int, times: int) -> float:
    return times * (degree - 1) / degree / network.intra_node_bytes_per_s


def _at_least(seconds: Mapping[int, float], least_s: float) -> Mapping[int, float]:
    return {count: max(own_s, least_s) for count, own_s in seconds.items()}
