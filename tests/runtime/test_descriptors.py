"""How many files a process may have open: as many as it may allow itself, and enough for its nodes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from oobleck.errors import ConfigError, ExitCode
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
        ConfigError,
        match=rf"{num_nodes} nodes .*RLIMIT_NOFILE.* 1024; .*`ulimit -n \d+`.*LimitNOFILE=\d+",
    ):
        require_descriptors(1024, num_nodes, are_virtual=are_virtual)


@pytest.mark.slow
def test_a_run_that_cannot_have_enough_says_so_before_anything_is_started(tmp_path: Path) -> None:
    up = [sys.executable, "-m", "oobleck", "up", "--local", "16", "--base-dir", str(tmp_path / "base")]
    done = subprocess.run(
        ["/bin/sh", "-c", 'ulimit -n 128 && exec "$@"', "sh", *up],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == ExitCode.CONFIG, done.stderr
    assert "16 nodes" in done.stderr
    assert " 208 " in done.stderr
    assert not (tmp_path / "base").exists()


def test_the_usual_limit_is_enough_for_hundreds_of_nodes_and_a_dozen_virtual_ones() -> None:
    require_descriptors(1024, 400, are_virtual=False)
    require_descriptors(256, 16, are_virtual=True)
    require_descriptors(128, 4, are_virtual=True)
