"""Doorbells on this machine's own addresses."""

from __future__ import annotations

import socket
import time

import pytest

from oobleck.control.protocol import ProbeAddress
from oobleck.planner import WorkerId
from oobleck.training.comm.reachability_probe import listen_for_probes, probe_all

PLACE = WorkerId(node="n0", device=0)


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost", "lo"])
def test_a_doorbell_answers_as_often_as_it_is_rung(address: str):
    probe_address = listen_for_probes(PLACE, address)
    assert probe_address.host == "127.0.0.1"
    assert probe_all([probe_address, probe_address]) == ()
    assert probe_all([probe_address]) == ()


def test_who_does_not_answer_is_named():
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    gone = ProbeAddress(worker_id=WorkerId(node="n1", device=0), host="127.0.0.1", port=port)
    assert probe_all([listen_for_probes(PLACE, "127.0.0.1"), gone]) == (gone.worker_id,)


def test_a_peer_that_drops_packets_costs_half_a_second():
    silent = ProbeAddress(worker_id=PLACE, host="192.0.2.1", port=9)  # RFC 5737: an address of nobody
    began_s = time.monotonic()
    assert probe_all([silent] * 8) == (PLACE,) * 8
    assert time.monotonic() - began_s < 2.0
