"""Data sheets by the names that drivers give GPUs."""

from __future__ import annotations

import pytest

from oobleck.planner import sheet_of_product


@pytest.mark.parametrize(
    ("name", "memory_bytes_per_s"),
    [
        ("NVIDIA A40", 696e9),
        ("NVIDIA A100-SXM4-80GB", 2.039e12),
        ("NVIDIA A100 80GB PCIe", 1.935e12),
        ("NVIDIA A100-PCIE-40GB", 1.555e12),
        ("NVIDIA H100 80GB HBM3", 3.35e12),
        ("NVIDIA H100 PCIe", 2.0e12),
        ("NVIDIA H200", 4.8e12),
        ("NVIDIA A4000", None),
        ("NVIDIA A40-48Q", None),
        ("NVIDIA A100-PG509-200", 2.039e12),
        ("NVIDIA A10G", 600e9),
        ("NVIDIA L4", 300e9),
        ("NVIDIA L40S", 864e9),
        ("NVIDIA GeForce RTX 4090", 1.008e12),
        ("NVIDIA B200", 8e12),
        ("NVIDIA A10-24Q", None),
        ("NVIDIA L40", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA H20", None),
        ("cpu: Intel Xeon", None),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", None),
        ("Tesla V100-SXM2-16GB", None),
    ],
)
def test_the_drivers_name_finds_the_data_sheet(name: str, memory_bytes_per_s: float | None):
    sheet = sheet_of_product(name)
    assert (None if sheet is None else sheet.memory_bytes_per_s) == memory_bytes_per_s
