"""Small profiles for tests."""

from __future__ import annotations

from collections.abc import Sequence

from oobleck.planner import DeviceProfile, LayerProfile, NetworkProfile, Profile


def make_profile(
    forwards_s: Sequence[float],
    *,
    memory_bytes: int = 10**12,
    bytes_per_s: float = 1e9,
    param_bytes: int = 10**8,
    activation_bytes: int = 10**6,
    device_counts: Sequence[int] = (1,),
) -> Profile:
    """Layers with the given forward seconds on one device, twice as many backward, and equal sizes."""
    return Profile(
        model="test",
        microbatch_size=2,
        sequence_length=8,
        layers=tuple(
            LayerProfile(
                name=f"layer{index}",
                forward_s={count: forward_s / count for count in device_counts},
                backward_s={count: 2 * forward_s / count for count in device_counts},
                param_bytes=param_bytes,
                optimizer_bytes=2 * param_bytes,
                activation_bytes=activation_bytes,
                output_bytes=10**6 * (index + 1),
            )
            for index, forward_s in enumerate(forwards_s)
        ),
        device=DeviceProfile(name="device", memory_bytes=memory_bytes),
        network=NetworkProfile(
            inter_node_bytes_per_s=bytes_per_s,
            inter_node_latency_s=1e-4,
            intra_node_bytes_per_s=1e10,
            intra_node_latency_s=1e-5,
        ),
    )


def node_names(count: int) -> list[str]:
    return [f"node{number}" for number in range(count)]
