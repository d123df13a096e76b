"""Profiles for tests: by hand, and drawn by hypothesis."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from oobleck.planner import DeviceProfile, LayerProfile, NetworkProfile, Profile, SplitBackward

ROOMY_BYTES = 10**12


def make_layer(
    seconds: float = 3.0,
    *,
    name: str = "block",
    param_bytes: int = 4,
    activation_bytes: int = 1,
    output_bytes: int = 0,
    device_counts: Sequence[int] = (1,),
    sharing: float = 0.6,
    split: SplitBackward | None = None,
    copy_bytes: int = 0,
    transient_bytes: int = 0,
    message_bytes: int = 0,
) -> LayerProfile:
    """A layer that takes `seconds` forward and backward on one device, `sharing` of it on twice as many."""
    times = {count: seconds * sharing ** (count.bit_length() - 1) for count in device_counts}
    return LayerProfile(
        name=name,
        forward_s={count: time / 3 for count, time in times.items()},
        backward_s={count: time * 2 / 3 for count, time in times.items()},
        param_bytes=param_bytes,
        optimizer_bytes=2 * param_bytes,
        activation_bytes=activation_bytes,
        output_bytes=output_bytes,
        split=split,
        copy_bytes=copy_bytes,
        transient_bytes=transient_bytes,
        message_bytes=message_bytes,
    )


def make_network(inter: float = 100.0, intra: float = 1000.0, latency_s: float = 0.01) -> NetworkProfile:
    return NetworkProfile(
        inter_node_bytes_per_s=inter,
        inter_node_latency_s=latency_s,
        intra_node_bytes_per_s=intra,
        intra_node_latency_s=latency_s / 10,
    )


def make_profile(
    layers: Sequence[LayerProfile],
    *,
    memory_bytes: int = ROOMY_BYTES,
    communication_bytes: int = 0,
    network: NetworkProfile | None = None,
) -> Profile:
    return Profile(
        model="test",
        microbatch_size=1,
        sequence_length=8,
        layers=tuple(layers),
        device=DeviceProfile(name="test device", memory_bytes=memory_bytes, communication_bytes=communication_bytes),
        network=network or make_network(),
    )


def uniform_profile(num_layers: int, *, memory_bytes: int = ROOMY_BYTES, seconds: float = 3.0) -> Profile:
    return make_profile([make_layer(seconds, name=f"layer {i}") for i in range(num_layers)], memory_bytes=memory_bytes)


@st.composite
def profiles(
    draw: st.DrawFn, *, min_layers: int = 1, max_layers: int = 7, device_counts: Sequence[int] = (1,)
) -> Profile:
    """Uneven layers, real communication, and memory from scarce to plenty."""
    sharing = draw(st.sampled_from((0.5, 0.6, 0.9)))
    splits = st.builds(
        SplitBackward,
        forward_s=st.integers(1, 4),
        backward_input_s=st.integers(1, 4),
        backward_weight_s=st.integers(0, 4),
        kept_bytes=st.integers(0, 9),
    )
    are_split, on_gpu = draw(st.booleans()), draw(st.booleans())
    layers = [
        make_layer(
            draw(st.integers(1, 9)),
            name=f"layer {index}",
            param_bytes=draw(st.integers(0, 9)),
            activation_bytes=draw(st.integers(0, 9)),
            output_bytes=draw(st.sampled_from((0, 10, 100, 300))),
            device_counts=device_counts,
            sharing=sharing,
            split=draw(splits) if are_split else None,
            copy_bytes=draw(st.integers(0, 9)) if on_gpu else 0,
            transient_bytes=draw(st.integers(0, 9)) if on_gpu else 0,
            message_bytes=draw(st.integers(0, 3)) if on_gpu else 0,
        )
        for index in range(draw(st.integers(min_layers, max_layers)))
    ]
    memory_bytes = draw(st.sampled_from((ROOMY_BYTES, 60, 100, 150, 250)))
    communication_bytes = draw(st.integers(0, 9)) if on_gpu else 0
    return make_profile(layers, memory_bytes=memory_bytes, communication_bytes=communication_bytes)
