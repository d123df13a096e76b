"""Profiles: the cost of one microbatch in each layer, and the device and network.

A profile is measured on a device or estimated from data sheets; the planner treats both alike and passes on the label
(`estimated`). Units are in the names; the file form is JSON with the same names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace

from oobleck.errors import ConfigError, shown
from oobleck.job import MAX_DEVICES
from oobleck.json_table import JsonTable, parse_json
from oobleck.planner.formatting import counted

from .links import LINKS, LinkSpeed

PROFILE_VERSION = 1

_SPLIT_KEYS = ("forward_s", "backward_input_s", "backward_weight_s", "kept_bytes")
_GPU_KEYS = ("copy_bytes", "transient_bytes", "message_bytes")
_BYTES_KEYS = ("param_bytes", "optimizer_bytes", "activation_bytes", "output_bytes")
_SHARDED_KEYS = ("expert_bytes", "expert_message_bytes", "context_bytes")
_OPTIONAL_KEYS = ("frozen_bytes", *_GPU_KEYS, *_SHARDED_KEYS)
_RECOMPUTED_KEYS = ("activation_bytes", "transient_bytes")
LEVELS = ("selective", "all")
"""What a layer may recompute: all but matrix products and attention, or all. The second keeps the least."""

_MAX_LAYERS = 1_024
_MAX_SECONDS = 1e6
# The planner divides by the seconds of stages, so some layer must take time.
_LEAST_SECONDS = 1e-9
_MAX_BYTES = 2**60
_MAX_BYTES_PER_S = 1e18


def _check_number(where: str, value: float, *, least: float = 0, most: float) -> None:
    if not least <= value <= most:
        raise ConfigError(f"{where} is {shown(value)}; it must be from {least:g} to {most:g}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitBackward:
    """One layer and one microbatch on one device, with the backward pass in two parts."""

    forward_s: float
    backward_input_s: float
    backward_weight_s: float
    kept_bytes: int
    """Bytes of activations and gradients kept between the two parts."""

    def __post_init__(self) -> None:
        for field_name in _SPLIT_KEYS:
            most = _MAX_BYTES if field_name == "kept_bytes" else _MAX_SECONDS
            _check_number(f"split: {field_name}", getattr(self, field_name), most=most)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recomputed:
    """One layer and one microbatch where it keeps less for its backward pass, and recomputes the rest."""

    more_s: Mapping[int, float]
    """By how many seconds the passes take longer, keyed as `LayerProfile.backward_s`."""
    activation_bytes: int
    transient_bytes: int = 0

    def __post_init__(self) -> None:
        for num_devices, seconds in self.more_s.items():
            _check_number(f"recomputed: more_s[{num_devices}]", seconds, most=_MAX_SECONDS)
        for field_name in _RECOMPUTED_KEYS:
            _check_number(f"recomputed: {field_name}", getattr(self, field_name), most=_MAX_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerProfile:
    """One layer and one microbatch. `forward_s` and `backward_s` map a device count within a node to seconds."""

    name: str
    forward_s: Mapping[int, float]
    backward_s: Mapping[int, float]
    param_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    """Bytes kept from the forward to the backward pass of one microbatch."""
    output_bytes: int
    """Bytes sent to the next layer; a gradient of the same size comes back."""
    update_s: float = 0.0
    """Seconds of each step, after all microbatches, in which one device updates the layer's parameters."""
    split: SplitBackward | None = None
    """None if not measured."""
    copy_bytes: int = 0
    """Bytes held on top of the state for any number of microbatches: weights cast by autocast, and on a GPU gradients
    being summed. A host counts neither these nor the next two."""
    transient_bytes: int = 0
    """The peak of a pass on top of kept bytes; the layers of a stage take it one at a time."""
    message_bytes: int = 0
    """Bytes of the output in the memory of the sending or receiving device; the gradient has as many."""
    frozen_bytes: int = 0
    """The share of `param_bytes` that is not trained: without gradients and optimizer state."""
    expert_bytes: int = 0
    """The share of `param_bytes` that belongs to experts which stay on the devices of a sharded stage."""
    expert_message_bytes: int = 0
    """Bytes of the tokens that a device sends to such experts, and of the outputs that come back."""
    context_bytes: int = 0
    """Bytes that a device sends in a forward pass to those that share its samples; as many in a backward pass."""
    recomputed: Mapping[str, Recomputed] = field(default_factory=dict)
    """Keyed by `LEVELS`: both, where a planner chooses what a layer recomputes; all else is then without."""

    def __post_init__(self) -> None:
        where = f"layer {self.name!r}"
        for field_name, seconds in (("forward_s", self.forward_s), ("backward_s", self.backward_s)):
            if 1 not in seconds:
                raise ConfigError(f"{where}: {field_name} has no time for 1 device")
            for num_devices, value in seconds.items():
                if not 1 <= num_devices <= MAX_DEVICES:
                    raise ConfigError(
                        f"{where}: {field_name} names {shown(num_devices)} devices; it must be from 1 to {MAX_DEVICES}"
                    )
                _check_number(f"{where}: {field_name}[{num_devices}]", value, most=_MAX_SECONDS)
        if set(self.forward_s) != set(self.backward_s):
            raise ConfigError(f"{where}: forward_s and backward_s must name the same device counts")
        if self.recomputed and set(self.recomputed) != set(LEVELS):
            raise ConfigError(
                f"{where}: recomputed names {', '.join(self.recomputed)}; it must name {', '.join(LEVELS)}"
            )
        if any(set(each.more_s) != set(self.backward_s) for each in self.recomputed.values()):
            raise ConfigError(f"{where}: recomputed and backward_s must name the same device counts")
        _check_number(f"{where}: update_s", self.update_s, most=_MAX_SECONDS)
        for field_name in (*_BYTES_KEYS, *_OPTIONAL_KEYS):
            _check_number(f"{where}: {field_name}", getattr(self, field_name), most=_MAX_BYTES)
        _check_number(f"{where}: frozen_bytes", self.frozen_bytes, most=self.param_bytes)
        _check_number(f"{where}: expert_bytes", self.expert_bytes, most=self.param_bytes)

    def at(self, level: Recomputed) -> LayerProfile:
        """Return the layer as it is at one of its levels."""
        return replace(
            self,
            backward_s={count: seconds + level.more_s[count] for count, seconds in self.backward_s.items()},
            activation_bytes=level.activation_bytes,
            transient_bytes=level.transient_bytes,
            recomputed={},
        )

    def with_recomputed(self, change: Callable[[Recomputed], Recomputed]) -> LayerProfile:
        """Return the layer with each of its `recomputed` changed."""
        return replace(self, recomputed={level: change(each) for level, each in self.recomputed.items()})

    @property
    def trained_bytes(self) -> int:
        """Bytes of trained parameters, and so of the gradients that are summed."""
        return self.param_bytes - self.frozen_bytes

    @property
    def exchanged_bytes(self) -> int:
        """Bytes of trained parameters whose gradients the devices of a sharded stage sum: of all but experts."""
        # A layer's experts are trained, or frozen, together.
        are_frozen = self.frozen_bytes >= self.expert_bytes
        return self.trained_bytes - (0 if are_frozen else min(self.trained_bytes, self.expert_bytes))

    @property
    def gathered_bytes(self) -> int:
        """Bytes of parameters that are put together where devices share out weights: of all but experts."""
        return self.param_bytes - self.expert_bytes

    @property
    def state_bytes(self) -> int:
        """Bytes that a worker needs to take the layer over: parameters and optimizer state."""
        return self.param_bytes + self.optimizer_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProfile:
    name: str
    memory_bytes: int
    communication_bytes: int = 0
    """Memory that the communication library takes; 0 where `memory_bytes` excludes it."""

    def __post_init__(self) -> None:
        _check_number("device: memory_bytes", self.memory_bytes, least=1, most=_MAX_BYTES)
        _check_number("device: communication_bytes", self.communication_bytes, most=_MAX_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkProfile:
    inter_node_bytes_per_s: float
    inter_node_latency_s: float
    intra_node_bytes_per_s: float
    intra_node_latency_s: float
    assumed: tuple[str, ...] = ()
    """The `LINKS` that are neither measured nor estimated."""

    def __post_init__(self) -> None:
        if unknown := [link for link in self.assumed if link not in LINKS]:
            raise ConfigError(f"network: assumed is {shown(unknown[0])}; it must be of {', '.join(LINKS)}")
        for key in ("inter_node_bytes_per_s", "intra_node_bytes_per_s"):
            _check_number(f"network: {key}", getattr(self, key), least=1, most=_MAX_BYTES_PER_S)
        for key in ("inter_node_latency_s", "intra_node_latency_s"):
            _check_number(f"network: {key}", getattr(self, key), most=_MAX_SECONDS)

    def with_link(self, link: str, speed: LinkSpeed) -> NetworkProfile:
        """Return the network with a measured speed for one of `LINKS`, if that is only assumed so far."""
        if link not in self.assumed:
            return self
        return replace(
            self,
            **{f"{link}_bytes_per_s": speed.bytes_per_s, f"{link}_latency_s": speed.latency_s},
            assumed=tuple(each for each in self.assumed if each != link),
        )

    def speed_of(self, link: str) -> LinkSpeed:
        return LinkSpeed(bytes_per_s=getattr(self, f"{link}_bytes_per_s"), latency_s=getattr(self, f"{link}_latency_s"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A model on a kind of device and network, for one microbatch size and sequence length."""

    model: str
    microbatch_size: int
    """In samples."""
    sequence_length: int
    """In tokens."""
    layers: tuple[LayerProfile, ...]
    device: DeviceProfile
    network: NetworkProfile
    version: int = PROFILE_VERSION
    estimated: bool = False
    """True where the times come from data sheets rather than from a device."""
    exchange_s_per_byte: float = 0.0
    """Seconds of each step for each trained byte of a stage, in which its devices exchange what they share out
    (`planner/sharding.py`). Files do not have it."""

    def __post_init__(self) -> None:
        if self.version != PROFILE_VERSION:
            raise ConfigError(
                f"profile version {shown(self.version)} is not known; this program reads {PROFILE_VERSION}"
            )
        where = f"profile of {self.model!r}"
        if not self.layers:
            raise ConfigError(f"{where} has 0 layers; it needs at least 1")
        if self.num_layers > _MAX_LAYERS:
            raise ConfigError(f"{where} has {self.num_layers} layers; it may have {_MAX_LAYERS}")
        _check_number(f"{where}: microbatch_size", self.microbatch_size, least=1, most=1_000_000)
        _check_number(f"{where}: sequence_length", self.sequence_length, least=1, most=1 << 24)
        for count in sorted(set.intersection(*(set(layer.forward_s) for layer in self.layers))):
            seconds = sum(layer.forward_s[count] + layer.backward_s[count] for layer in self.layers)
            if seconds < _LEAST_SECONDS:
                raise ConfigError(
                    f"{where}: no layer takes any time on {counted(count, 'device')}; "
                    f"forward_s and backward_s must be at least {_LEAST_SECONDS:g} in all"
                )

    @property
    def num_layers(self) -> int:
        return len(self.layers)


def with_speed(profile: Profile, speed: float) -> Profile:
    """Return the profile of a node that computes at another speed: 0.5 takes twice as long."""

    def at_speed(layer: LayerProfile) -> LayerProfile:
        split = layer.split
        if split is not None:
            split = replace(split, **{key: getattr(split, key) / speed for key in _SPLIT_KEYS if key.endswith("_s")})
        return replace(
            layer,
            forward_s={count: seconds / speed for count, seconds in layer.forward_s.items()},
            backward_s={count: seconds / speed for count, seconds in layer.backward_s.items()},
            split=split,
            update_s=layer.update_s / speed,
        ).with_recomputed(
            lambda each: replace(each, more_s={count: seconds / speed for count, seconds in each.more_s.items()})
        )

    return replace(profile, layers=tuple(map(at_speed, profile.layers)))


def in_one_layer(profile: Profile, *, name: str) -> Profile:
    """Return the profile of a model that is kept whole, as one layer, from that of its layers."""
    layers = profile.layers

    whole = LayerProfile(
        name="model",
        forward_s={count: sum(layer.forward_s[count] for layer in layers) for count in layers[0].forward_s},
        backward_s={count: sum(layer.backward_s[count] for layer in layers) for count in layers[0].backward_s},
        param_bytes=sum(layer.param_bytes for layer in layers),
        optimizer_bytes=sum(layer.optimizer_bytes for layer in layers),
        activation_bytes=sum(layer.activation_bytes for layer in layers),
        output_bytes=0,
        update_s=sum(layer.update_s for layer in layers),
        copy_bytes=sum(layer.copy_bytes for layer in layers),
        transient_bytes=max(layer.transient_bytes for layer in layers),
    )
    return replace(profile, model=name, layers=(whole,))


def profile_to_json(profile: Profile) -> str:
    """Return the profile as the text of a profile file; `profile_from_json` is the inverse."""
    document = {
        **{key: getattr(profile, key) for key in _PLAIN_KEYS},
        "layers": [
            {
                "name": layer.name,
                "forward_s": {str(count): layer.forward_s[count] for count in sorted(layer.forward_s)},
                "backward_s": {str(count): layer.backward_s[count] for count in sorted(layer.backward_s)},
                **{key: getattr(layer, key) for key in _BYTES_KEYS},
                **({} if layer.split is None else {"split": asdict(layer.split)}),
                **({"recomputed": _recomputed_to(layer)} if layer.recomputed else {}),
                **{key: value for key in ("update_s", *_OPTIONAL_KEYS) if (value := getattr(layer, key))},
            }
            for layer in profile.layers
        ],
        "device": {key: value for key, value in asdict(profile.device).items() if value != 0},
        "network": {key: value for key, value in asdict(profile.network).items() if value != ()},
    }
    return json.dumps(document, indent=1) + "\n"


def profile_from_json(text: str, *, source: str = "profile") -> Profile:
    """Read a profile file's text; `source` names the file in errors.

    Raises ConfigError that names the layer, the field and the expectation, or the known key nearest to an unknown one.
    """
    try:
        return _read_profile(JsonTable(parse_json(text), "the file"))
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None


_LAYER_KEYS = ("name", "forward_s", "backward_s", *_BYTES_KEYS)
_NETWORK_KEYS = tuple(f"{link}_{what}" for link in LINKS for what in ("bytes_per_s", "latency_s"))
_PLAIN_KEYS = ("version", "model", "microbatch_size", "sequence_length", "estimated")


def _read_profile(table: JsonTable) -> Profile:
    table.check_keys((*_PLAIN_KEYS[:-1], "layers", "device", "network"), optional=("estimated",))
    layers = table.list("layers")
    device, network = table.table("device"), table.table("network")
    device.check_keys(("name", "memory_bytes"), optional=("communication_bytes",))
    network.check_keys(_NETWORK_KEYS, optional=("assumed",))
    return Profile(
        version=table.integer("version"),
        model=table.text("model"),
        microbatch_size=table.integer("microbatch_size"),
        sequence_length=table.integer("sequence_length"),
        estimated=table.flag("estimated"),
        layers=tuple(_read_layer(layer, index) for index, layer in enumerate(layers)),
        device=DeviceProfile(
            name=device.text("name"),
            memory_bytes=device.integer("memory_bytes"),
            communication_bytes=_integer_or_0(device, "communication_bytes"),
        ),
        network=NetworkProfile(
            **{key: network.number(key) for key in _NETWORK_KEYS},
            assumed=network.texts("assumed") if "assumed" in network.items else (),
        ),
    )


def _read_layer(value: object, index: int) -> LayerProfile:
    table = JsonTable(value, f"layer {index}")
    if isinstance(name := table.items.get("name"), str):
        table.where = f"layer {index} ({name})"
    table.check_keys(_LAYER_KEYS, optional=("split", "recomputed", "update_s", *_OPTIONAL_KEYS))
    return LayerProfile(
        name=table.text("name"),
        forward_s=_read_seconds(table.table("forward_s")),
        backward_s=_read_seconds(table.table("backward_s")),
        **{key: table.integer(key) for key in _BYTES_KEYS},
        split=_read_split(table.table("split")) if "split" in table.items else None,
        recomputed=_read_recomputed(table.table("recomputed")) if "recomputed" in table.items else {},
        update_s=table.number("update_s") if "update_s" in table.items else 0.0,
        **{key: _integer_or_0(table, key) for key in _OPTIONAL_KEYS},
    )


def _recomputed_to(layer: LayerProfile) -> dict[str, object]:
    return {
        level: {
            "more_s": {str(count): each.more_s[count] for count in sorted(each.more_s)},
            **{key: getattr(each, key) for key in _RECOMPUTED_KEYS},
        }
        for level, each in layer.recomputed.items()
    }


def _read_recomputed(table: JsonTable) -> dict[str, Recomputed]:
    table.check_keys(LEVELS)
    found = {}
    for level in LEVELS:
        own = table.table(level)
        own.check_keys(("more_s", *_RECOMPUTED_KEYS))
        seconds = _read_seconds(own.table("more_s"))
        found[level] = Recomputed(more_s=seconds, **{key: own.integer(key) for key in _RECOMPUTED_KEYS})
    return found


def _integer_or_0(table: JsonTable, key: str) -> int:
    return table.integer(key) if key in table.items else 0


def _read_split(table: JsonTable) -> SplitBackward:
    table.check_keys(_SPLIT_KEYS)
    seconds = {key: table.number(key) for key in _SPLIT_KEYS if key.endswith("_s")}
    return SplitBackward(**seconds, kept_bytes=table.integer("kept_bytes"))


def _read_seconds(table: JsonTable) -> dict[int, float]:
    for count in table.items:
        if not re.fullmatch(r"[0-9]{1,9}", count):
            raise ConfigError(f"{table.where}: {shown(count)} is not a number of devices")
        # Devices that share a stage out may be any number (`with_times_of_groups`), and no file has these.
        if int(count) & (int(count) - 1):
            raise ConfigError(
                f"{table.where} names {shown(int(count))} devices; it must be a power of two, {MAX_DEVICES} at most"
            )
    return {int(count): table.number(count) for count in table.items}
