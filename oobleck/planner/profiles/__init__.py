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
from .links import LINKS, LINKS_IN_WORDS, LinkSpeed, fit_link, link_from_json, link_to_json, median_link
from .profile import (
    DeviceProfile,
    LayerProfile,
    NetworkProfile,
    Profile,
    SplitBackward,
    in_one_layer,
    profile_from_json,
    profile_to_json,
    with_speed,
)
from .shapes import KNOWN_MODELS, ModelShape, model_shape, shape_from_config, shape_of_size, training_flops

__all__ = [
    "ASSUMED_COMMUNICATION_BYTES",
    "KNOWN_DEVICES",
    "KNOWN_MODELS",
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
    "SplitBackward",
    "device_sheet",
    "device_sheet_from_json",
    "estimate_profile",
    "fit_link",
    "in_one_layer",
    "link_from_json",
    "link_to_json",
    "median_link",
    "model_shape",
    "profile_from_json",
    "profile_to_json",
    "shape_from_config",
    "shape_of_size",
    "sheet_of_product",
    "training_flops",
    "with_speed",
]
