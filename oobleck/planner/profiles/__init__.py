"""Profiles: the cost of one microbatch in each layer, measured or estimated."""

from __future__ import annotations

from .devices import (
    ASSUMED_COMMUNICATION_BYTES,
    KNOWN_DEVICES,
    DeviceSheet,
    device_sheet,
    device_sheet_from_json,
    sheet_of_product,
)
from .estimate import MAX_LOGITS, estimate_profile
from .levels import activation_bytes, levels_of, more_s, stage_more_s, transient_bytes
from .links import LINKS, LINKS_IN_WORDS, LinkSpeed, fit_link, link_from_json, link_to_json, median_link
from .profile import (
    LEVELS,
    DeviceProfile,
    LayerProfile,
    NetworkProfile,
    Profile,
    Recomputed,
    SplitBackward,
    in_one_layer,
    profile_from_json,
    profile_to_json,
    with_speed,
)
from .shapes import CONFIG_KEYS, KNOWN_MODELS, ModelShape, model_shape, shape_from_config, shape_of_size, training_flops
from .together import typical_profile

__all__ = [
    "ASSUMED_COMMUNICATION_BYTES",
    "CONFIG_KEYS",
    "KNOWN_DEVICES",
    "KNOWN_MODELS",
    "LEVELS",
    "LINKS",
    "LINKS_IN_WORDS",
    "MAX_LOGITS",
    "DeviceProfile",
    "DeviceSheet",
    "LayerProfile",
    "LinkSpeed",
    "ModelShape",
    "NetworkProfile",
    "Profile",
    "Recomputed",
    "SplitBackward",
    "activation_bytes",
    "device_sheet",
    "device_sheet_from_json",
    "estimate_profile",
    "fit_link",
    "in_one_layer",
    "levels_of",
    "link_from_json",
    "link_to_json",
    "median_link",
    "model_shape",
    "more_s",
    "profile_from_json",
    "profile_to_json",
    "shape_from_config",
    "shape_of_size",
    "sheet_of_product",
    "stage_more_s",
    "training_flops",
    "transient_bytes",
    "typical_profile",
    "with_speed",
]
