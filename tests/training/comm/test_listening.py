"""Workers that are reached, and workers that are not, on this machine's own addresses."""

from __future__ import annotations

import socket
import time

from oobleck.control.protocol import WorkerAddress
from oobleck.planner import WorkerId
from oobleck.training.comm.listening import probe_all
from oobleck.training.comm.peer_links import PeerLinks

PLACE = WorkerId(node="n0", device=0)


def test_who_does_not_answer_is_named():
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    gone = WorkerAddress(worker_id=WorkerId(node="n1", device=0), host="127.0.0.1", port=port)
    links = PeerLinks(PLACE, "127.0.0.1", handle=lambda _sender, _message: None)
    assert probe_all([links.address, links.address]) == ()
    assert probe_all([links.address, gone]) == (gone.worker_id,)
    links.close()


def test_a_peer_that_drops_packets_costs_half_a_second():
    silent = WorkerAddress(worker_id=PLACE, host="192.0.2.1", port=9)  # RFC 5737: an address of nobody
    began_s = time.monotonic()
    assert probe_all([silent] * 8) == (PLACE,) * 8
    assert time.monotonic() - began_s < 2.0
