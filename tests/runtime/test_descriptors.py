"""How many files a process may have open: as many as it may allow itself, and enough for its nodes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from oobleck.errors import ConfigError
from oobleck.runtime.descriptors import require_descriptors

_RAISE = """\
import resource
from oobleck.runtime.descriptors import raise_descriptor_limit
print(raise_descriptor_limit(), *resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def limits_after(ulimits: str) -> str:
    command = f'{ulimits} && exec "$0" -c "$1"'
    return subprocess.run(
        ["/bin/sh", "-c", command, sys.executable, _RAISE], capture_output=True, text=True, check=True
    ).stdout


def test_the_soft_limit_becomes_the_hard_one() -> None:
    assert limits_after("ulimit -S -n 100 && ulimit -H -n 400") == "400 400 400\n"
    assert limits_after("ulimit -n 200") == "200 200 200\n"


@pytest.mark.parametrize(("num_nodes", "are_virtual"), [(600, False), (100, True)])
def test_too_low_a_limit_is_named_with_what_to_change(num_nodes: int, *, are_virtual: bool) -> None:
    with pytest.raises(
        ConfigError, match=rf"{num_nodes} nodes need \d+ open files .* may have 1024; .*`ulimit -n \d+`"
    ):
        require_descriptors(1024, num_nodes, are_virtual=are_virtual)


def test_the_usual_limit_is_enough_for_hundreds_of_nodes_and_a_dozen_virtual_ones() -> None:
    require_descriptors(1024, 400, are_virtual=False)
    require_descriptors(256, 16, are_virtual=True)
    require_descriptors(128, 4, are_virtual=True)
