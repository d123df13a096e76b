from __future__ import annotations

import pytest

from tools.bench.control_plane import main


def test_the_master_is_measured_through_its_tunnels_in_a_run_that_loses_a_node(capsys: pytest.CaptureFixture[str]):
    main(["--agents", "4", "--seconds", "1", "--step", "0.5", "--tunnels", "embedded", "--work", "steps"])
    rows = [
        [word.strip() for word in line.split("|")[1:-1]]
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("| embedded")
    ]
    (usual, start, loss) = rows
    assert usual[1] == "steps"
    assert float(usual[2].rstrip("%")) < 100
    assert int(usual[4]) > 10  # MiB
    assert int(usual[5]) >= 8  # a heartbeat, and two commits of its pipeline's, of each node
    assert [start[1], loss[1]] == ["start", "loss"]
    assert 0 < float(loss[2]) <= float(loss[3])
    assert int(start[5]) >= 4 * 4  # hello, worker started, ready, resumed
