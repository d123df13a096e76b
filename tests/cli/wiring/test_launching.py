"""The nodes of a source, as its launcher first knows them."""

from __future__ import annotations

import pytest

from oobleck.cli.inputs import VirtualOnes
from oobleck.cli.wiring.launching import open_launcher
from oobleck.runtime.ssh import SSHOptions, open_ssh_loop


@pytest.mark.parametrize(
    ("num_gpus", "devices"),
    [
        (0, [(0, 1), (0, 1), (0, 1)]),
        (1, [(0, 0), (0, 0), (0, 0)]),
        (4, [(0, 1), (2, 3), (0, 1)]),
        (6, [(0, 1), (2, 3), (4, 5)]),
    ],
)
async def test_workers_of_virtual_nodes_take_the_machines_gpus_in_turn(
    num_gpus: int, devices: list[tuple[int, ...]]
) -> None:
    launching = open_launcher(VirtualOnes.alike(3), SSHOptions(), num_devices=2, num_spare=0, num_gpus=num_gpus)
    async with open_ssh_loop(), launching as launcher:
        assert [node.devices for node in launcher.nodes] == devices
