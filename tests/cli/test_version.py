from __future__ import annotations

import json
import platform

import oobleck
from oobleck.cli.main import main
from oobleck.cli.version import installed


def test_versions_are_listed(capsys):
    assert main(["version"]) == 0
    lines = dict(line.split() for line in capsys.readouterr().out.splitlines())
    assert lines["oobleck"] == oobleck.__version__
    assert lines["python"] == platform.python_version()
    assert set(lines) == {"oobleck", "python", "torch", "transformers", "trio", "asyncssh"}


def test_versions_as_json(capsys):
    assert main(["version", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["oobleck"] == oobleck.__version__


def test_a_package_that_is_missing_is_said_to_be():
    assert installed("no-such-package-at-all") == "not installed"
