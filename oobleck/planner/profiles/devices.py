"""Data sheets of devices: the makers' published peak rates, dense, and memory."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches

from oobleck.errors import ConfigError, shown
from oobleck.json_table import JsonTable, parse_json

from .profile import NetworkProfile

# NCCL's buffers for one neighbour, of its protocols Simple, LL and LL128: the defaults in its init.cc and device.h.
_CHANNEL_BYTES = 4_194_304 + 524_288 + 4_915_200
# Two communicators (gradients, and layers that other pipelines cut elsewhere, such as a tied table), each with two
# neighbours in a ring over 16 channels.
_SUM_BYTES = 2 * 2 * 16 * _CHANNEL_BYTES
# Two communicators, one for each direction, with each of the two neighbouring stages, over 2 channels each.
_EDGE_BYTES = 2 * 2 * 2 * _CHANNEL_BYTES
# Not measured: the number of channels for sums depends on the links.
ASSUMED_COMMUNICATION_BYTES = _SUM_BYTES + _EDGE_BYTES
"""NCCL's bytes on a GPU with neighbouring stages on both sides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSheet:
    """A device's data sheet, with the links that usually come with it."""

    name: str
    memory_bytes: int
    memory_bytes_per_s: float
    float32_flops: float
    """Operations of matrix products in float32 a second, without reduced-precision formats."""
    bfloat16_flops: float
    intra_node_bytes_per_s: float
    """One way."""
    intra_node_latency_s: float = 5e-6
    inter_node_bytes_per_s: float = 2.5e10
    """One way; the default is 200 Gb/s."""
    inter_node_latency_s: float = 1e-5
    is_host: bool = False
    """Whether the device computes in the host's own memory; no file can set this."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in ("name", "is_host"):
                continue
            least, most = (1e-12, 1e6) if field.name.endswith("latency_s") else (1, 1e18)
            if not least <= value <= most:
                raise ConfigError(
                    f"device {self.name!r}: {field.name} is {shown(value)}; it must be from {least:g} to {most:g}"
                )

    @property
    def network(self) -> NetworkProfile:
        return NetworkProfile(
            inter_node_bytes_per_s=self.inter_node_bytes_per_s,
            inter_node_latency_s=self.inter_node_latency_s,
            intra_node_bytes_per_s=self.intra_node_bytes_per_s,
            intra_node_latency_s=self.intra_node_latency_s,
        )


def _sheet(
    name: str, memory_gb: int, memory_rate: float, f32: float, bf16: float, inside: float, outside: float = 2.5e10
) -> DeviceSheet:
    return DeviceSheet(
        name=name,
        memory_bytes=memory_gb * 10**9,
        memory_bytes_per_s=memory_rate,
        float32_flops=f32,
        bfloat16_flops=bf16,
        intra_node_bytes_per_s=inside,
        inter_node_bytes_per_s=outside,
    )


_A100 = _sheet("A100", 80, 2.039e12, 19.5e12, 312e12, 3e11)
_H100 = _sheet("H100", 80, 3.35e12, 67e12, 989.4e12, 4.5e11, 5e10)
_PCIE_4 = 3.2e10
# Left out are GPUs without bfloat16 in hardware (V100, T4), and those that NCCL does not run on.
_SHEETS = (
    _sheet("A10", 24, 600e9, 31.2e12, 125e12, _PCIE_4),
    _sheet("A10G", 24, 600e9, 35e12, 70e12, _PCIE_4),
    _sheet("A40", 48, 696e9, 37.4e12, 149.7e12, _PCIE_4),
    _sheet("L4", 24, 300e9, 30.3e12, 121e12, _PCIE_4),
    _sheet("L40S", 48, 864e9, 91.6e12, 362.05e12, _PCIE_4),
    _sheet("4090", 24, 1.008e12, 82.6e12, 165.2e12, _PCIE_4),
    _A100,
    _H100,
    replace(_H100, name="H200", memory_bytes=141 * 10**9, memory_bytes_per_s=4.8e12),
    _sheet("B200", 180, 8e12, 75e12, 2.25e15, 9e11, 5e10),  # as in an HGX board
    # One server core with 256-bit vectors (2 × 8 fused multiply-adds a cycle at 3 GHz) and its share of memory.
    replace(_sheet("CPU", 8, 1e10, 96e9, 96e9, 5e9, 1.25e9), inter_node_latency_s=5e-5, is_host=True),
)
KNOWN_DEVICES: Mapping[str, DeviceSheet] = {sheet.name.lower(): sheet for sheet in _SHEETS}


def device_sheet(name: str) -> DeviceSheet:
    """Return the data sheet of a known device; ConfigError suggests the nearest name."""
    if (sheet := KNOWN_DEVICES.get(name.lower())) is not None:
        return sheet
    near = get_close_matches(name.lower(), KNOWN_DEVICES, n=1, cutoff=0.0)[0]
    raise ConfigError(
        f"device {name!r} is not known; did you mean {KNOWN_DEVICES[near].name!r}? Others can be given as a file"
    )


def sheet_of_product(name: str) -> DeviceSheet | None:
    """Return the data sheet of a GPU by its driver's name; None for an unknown GPU or a part of one (MIG)."""
    if "MIG" in name:
        return None
    return next((sheet for pattern, sheet in _PRODUCTS if re.search(rf"\b{pattern}", name)), None)


# Variants come before the plain name, whose pattern their names match too.
_PRODUCTS = (
    *((rf"{name}(?![\w-])", device_sheet(name)) for name in ("A10", "A10G", "A40", "L4", "L40S")),
    ("4090$", device_sheet("4090")),  # neither a 4090 D nor a laptop's
    ("A100 80GB PCIe", replace(_A100, memory_bytes_per_s=1.935e12)),
    ("A100-SXM4-40GB", replace(_A100, memory_bytes=40 * 10**9, memory_bytes_per_s=1.555e12)),
    ("A100-PCIE-40GB", replace(_A100, memory_bytes=40 * 10**9, memory_bytes_per_s=1.555e12)),
    (r"A100(?!\w)", _A100),
    ("H100 PCIe", replace(_H100, memory_bytes_per_s=2.0e12, bfloat16_flops=756e12)),
    (r"H100(?!\w)", _H100),
    (r"H200(?!\w)", device_sheet("H200")),
    (r"B200(?!\w)", device_sheet("B200")),
)


def device_sheet_from_json(text: str, *, source: str = "device") -> DeviceSheet:
    """Read a data sheet with the field names of `DeviceSheet`; ConfigError names the field that is wrong."""
    names = [field.name for field in fields(DeviceSheet) if field.name != "is_host"]
    required = [name for name in names if "latency" not in name and name != "inter_node_bytes_per_s"]
    try:
        document = parse_json(text)
        table = JsonTable(document, "the sheet")
        table.check_keys(required, names)
        for key in table.items:
            (table.text if key == "name" else table.number)(key)
        assert isinstance(document, dict), "JsonTable takes nothing else"
        return DeviceSheet(**document)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
