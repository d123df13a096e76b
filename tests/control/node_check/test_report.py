"""What makes a node unfit before anything is measured, and what is only worth a warning."""

from __future__ import annotations

from dataclasses import replace

import pytest

from oobleck.control.node_check.messages import NodeFacts
from oobleck.control.node_check.report import misfit, warnings_about
from oobleck.job import NodeSpec

VERSIONS = {"oobleck": "1.0", "python": "3.11.4", "torch": "2.13.0", "numpy": "2.1"}
FACTS = NodeFacts(pid=1, hostname="h", clock_s=0.0, versions=VERSIONS, num_cpus=2, free_disk_bytes=10**10)
SPEC = NodeSpec(name="a", host="a")


def test_a_node_like_ours_fits_without_warnings():
    assert misfit(FACTS, SPEC, VERSIONS) is None
    assert warnings_about(FACTS, 0.1, VERSIONS) == ()


@pytest.mark.parametrize(
    ("package", "found", "says"),
    [("python", "3.12.1", "--python"), ("oobleck", "0.9", "same version"), ("torch", "2.12.0", "same version")],
)
def test_software_of_another_version_does_not_fit(package, found, says):
    reason = misfit(replace(FACTS, versions=VERSIONS | {package: found}), SPEC, VERSIONS)
    assert reason is not None
    assert found in reason
    assert says in reason


def test_another_patch_release_of_python_fits_with_a_warning():
    facts = replace(FACTS, versions=VERSIONS | {"python": "3.11.9"})
    assert misfit(facts, SPEC, VERSIONS) is None
    assert warnings_about(facts, 0.0, VERSIONS) == ("python 3.11.9 there, 3.11.4 here",)


def test_devices_that_are_not_there_are_named():
    facts = replace(FACTS, cuda_devices=("A40", "A40"))
    assert misfit(facts, replace(SPEC, devices=(0, 1)), VERSIONS) is None
    reason = misfit(facts, replace(SPEC, devices=(0, 1, 2)), VERSIONS)
    assert reason is not None
    assert "device 2" in reason


def test_a_full_disk_does_not_fit():
    reason = misfit(replace(FACTS, free_disk_bytes=10**8), SPEC, VERSIONS)
    assert reason is not None
    assert "0.1 GB" in reason


def test_a_clock_that_is_off_is_a_warning():
    (warning,) = warnings_about(FACTS, -7.25, VERSIONS)
    assert "-7.2 s off" in warning
