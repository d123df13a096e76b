from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given

from oobleck.errors import ConfigError
from oobleck.planner import DeviceProfile, LayerProfile, Profile, profile_from_json, profile_to_json
from tests.planner.drawing import make_layer, make_network, make_profile, profiles

DESIGNED = """
{"version": 1, "model": "gpt2", "microbatch_size": 2, "sequence_length": 1024,
 "layers": [{"name": "transformer.h.0", "forward_s": {"1": 0.004, "2": 0.0022},
             "backward_s": {"1": 0.009, "2": 0.0048}, "param_bytes": 28311552, "optimizer_bytes": 56623104,
             "activation_bytes": 50331648, "output_bytes": 3145728}],
 "device": {"name": "A40", "memory_bytes": 48000000000},
 "network": {"inter_node_bytes_per_s": 2.5e10, "inter_node_latency_s": 5e-6,
             "intra_node_bytes_per_s": 5e10, "intra_node_latency_s": 2e-6}}
"""


def changed(change: Callable[[Any], object]) -> str:
    document = json.loads(DESIGNED)
    change(document)
    return json.dumps(document)


def test_the_documented_file_is_read() -> None:
    profile = profile_from_json(DESIGNED)
    assert profile.layers[0].backward_s == {1: 0.009, 2: 0.0048}
    assert profile.layers[0].state_bytes == 28311552 + 56623104
    assert profile.device == DeviceProfile(name="A40", memory_bytes=48_000_000_000)
    assert profile.network.inter_node_latency_s == 5e-6
    assert not profile.estimated


def test_what_older_files_do_not_count_is_zero_and_not_written() -> None:
    profile = profile_from_json(DESIGNED)
    (layer,) = profile.layers
    assert (layer.copy_bytes, layer.transient_bytes, layer.message_bytes) == (0, 0, 0)
    assert profile.device.communication_bytes == 0
    assert json.loads(profile_to_json(profile)) == json.loads(DESIGNED) | {"estimated": False}


@given(profile=profiles(device_counts=(1, 2, 4)))
def test_the_text_form_and_its_inverse(profile: Profile) -> None:
    assert profile_from_json(profile_to_json(profile)) == profile


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nonsense", r"my\.json: not JSON"),
        ("[]", "the file must be an object, not list"),
        (changed(lambda d: d.update(modle="x")), "unknown key 'modle'; did you mean 'model'"),
        (changed(lambda d: d.pop("model")), "the file: model is missing"),
        (changed(lambda d: d.update(model=3)), "model is 3; it must be text"),
        (changed(lambda d: d.update(version="1")), "version is '1'; it must be a whole number"),
        (changed(lambda d: d.update(version=2)), "version 2 is not known"),
        (changed(lambda d: d.update(estimated=1)), "estimated is 1; it must be true or false"),
        (changed(lambda d: d.update(layers={})), "layers must be a list, not dict"),
        (changed(lambda d: d.update(layers=[])), "0 layers"),
        (changed(lambda d: d.update(microbatch_size=0)), "must be from 1 to"),
        (changed(lambda d: d.update(device=3)), "device must be an object, not int"),
        (changed(lambda d: d["device"].update(memory_bytes=0)), "memory_bytes is 0; it must be from 1 to"),
        (changed(lambda d: d["device"].update(communication_bytes=-1)), "communication_bytes is -1; it must be from 0"),
        (changed(lambda d: d["layers"][0].update(copy_bytes="4")), "copy_bytes is '4'; it must be a whole number"),
        (changed(lambda d: d["network"].update(intra_node_latency_s=-1)), "intra_node_latency_s is -1.0"),
        (changed(lambda d: d["network"].update(inter_node_bytes_per_s=True)), "is True; it must be a number"),
        (
            changed(lambda d: d["layers"][0].update(parm_bytes=3)),
            r"layer 0 \(transformer\.h\.0\): unknown key 'parm_bytes'; did you mean 'param_bytes'",
        ),
        (changed(lambda d: d["layers"][0].pop("name")), "layer 0: name is missing"),
        (changed(lambda d: d["layers"].append(7)), "layer 1 must be an object"),
        (changed(lambda d: d["layers"][0]["forward_s"].update(x=1)), "forward_s: 'x' is not a number of devices"),
        (changed(lambda d: d["layers"][0]["forward_s"].update({"1": "a"})), "forward_s: 1 is 'a'; it must be a number"),
        (changed(lambda d: d["layers"][0]["forward_s"].pop("1")), "forward_s has no time for 1 device"),
        (changed(lambda d: d["layers"][0]["forward_s"].pop("2")), "must name the same device counts"),
        (
            changed(lambda d: d["layers"][0]["backward_s"].update({"3": 1})),
            "3 devices; it must be a power of two",
        ),
        (changed(lambda d: d["layers"][0]["backward_s"].update({"1": -1})), r"backward_s\[1\] is -1.0"),
        (changed(lambda d: d["layers"][0].update(param_bytes=-1)), "param_bytes is -1"),
        (changed(lambda d: d["layers"][0].update(param_bytes=1.5)), "param_bytes is 1.5; it must be a whole number"),
    ],
)
def test_a_file_that_is_wrong_names_the_place(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        profile_from_json(text, source="my.json")


def test_infinite_times_are_not_possible() -> None:
    with pytest.raises(ConfigError, match=r"forward_s\[1\] is inf; it must be from 0 to 1e\+06"):
        make_layer(float("inf"))


def test_a_profile_knows_its_layers() -> None:
    profile = make_profile([make_layer(), make_layer()], network=make_network())
    assert profile.num_layers == 2
    assert isinstance(profile.layers[0], LayerProfile)


@pytest.mark.parametrize(("counts", "message"), [((1,), "on 1 device;"), ((1, 2), "on 2 devices;")])
def test_a_model_that_takes_no_time_is_named(counts: tuple[int, ...], message: str) -> None:
    layer = make_layer(3.0 if len(counts) > 1 else 0.0, device_counts=counts, sharing=0.0)
    with pytest.raises(ConfigError, match=f"no layer takes any time {message}"):
        make_profile([layer, layer])
