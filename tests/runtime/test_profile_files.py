"""What is cached of profiles and links."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from oobleck.planner.profiles import LINKS, LinkSpeed, link_to_json
from oobleck.runtime.profile_files import ProfileFiles
from tests.planner.drawing import uniform_profile

OLD, NEW = LinkSpeed(bytes_per_s=1e9, latency_s=1e-4), LinkSpeed(bytes_per_s=3e9, latency_s=2e-5)


def test_a_profile_takes_the_newest_links_in_place_of_what_it_assumes(tmp_path: Path) -> None:
    files = ProfileFiles(tmp_path)
    given = uniform_profile(4, memory_bytes=60, seconds=0.5)
    assumed = replace(given, network=replace(given.network, assumed=LINKS))
    assert files.with_links(assumed) == assumed
    for age, (key, text) in enumerate(
        {
            "link-old": link_to_json("inter_node", OLD),
            "link-new": link_to_json("inter_node", NEW),
            "link-torn": "{torn",
            "profile": "no link",
        }.items()
    ):
        files.store(key, text)
        os.utime(tmp_path / f"{key}.json", (age, age))
    network = files.with_links(assumed).network
    assert network.speed_of("inter_node") == NEW
    assert network.speed_of("intra_node") == given.network.speed_of("intra_node")
    assert network.assumed == ("intra_node",)
    assert files.with_links(given) == given, "nothing in it is assumed"
