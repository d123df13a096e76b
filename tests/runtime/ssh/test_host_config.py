"""What ssh's config says is read as ssh reads it."""

from __future__ import annotations

import pytest

from oobleck.runtime.ssh.host_config import Jump


@pytest.mark.parametrize(
    ("text", "jump"),
    [
        ("gate", Jump(host="gate")),
        ("gate:2222", Jump(host="gate", port=2222)),
        ("me@gate", Jump(host="gate", user="me")),
        ("me@corp.example@gate:2222", Jump(host="gate", port=2222, user="me@corp.example")),
        ("ssh://gate", Jump(host="gate")),
        ("ssh://me@gate:2222", Jump(host="gate", port=2222, user="me")),
        ("ssh://me@gate:2222/", Jump(host="gate", port=2222, user="me")),
        ("ssh://me%40corp@gate", Jump(host="gate", user="me@corp")),
        ("[::1]", Jump(host="::1")),
        ("[fe80::1%eth0]:2222", Jump(host="fe80::1%eth0", port=2222)),
        ("me@[::1]:2222", Jump(host="::1", port=2222, user="me")),
        ("ssh://[::1]:2222", Jump(host="::1", port=2222)),
    ],
)
def test_a_jump_host_is_written_in_all_the_ways_that_ssh_knows(text: str, jump: Jump) -> None:
    assert Jump.parse(text) == jump


@pytest.mark.parametrize("text", ["", "me@", "gate:", "gate:ssh", "gate:0", "gate:70000", "::1", "[::1", "[::1]2222"])
def test_what_names_no_jump_host_is_refused_by_name(text: str) -> None:
    if text == "gate:":
        assert Jump.parse(text) == Jump(host="gate")  # as by ssh
        return
    with pytest.raises(ValueError, match="ProxyJump"):
        Jump.parse(text)
