"""The worker's end of its socket to the agent: blocking frames, a thread that reads, any thread that writes."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections import deque
from collections.abc import Callable

from oobleck.control.protocol import WorkerBound, WorkerMessage
from oobleck.errors import PeerError
from oobleck.wire import FrameDecoder, encode_frame

_log = logging.getLogger(__name__)

_EXIT_AGENT_GONE = 75  # EX_TEMPFAIL: the worker did nothing wrong


class AgentLink:
    """Frames to and from the agent over an inherited socket."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)  # the agent made it for trio
        self._socket = sock
        self._decoder: FrameDecoder[WorkerBound] = FrameDecoder(WorkerBound)
        self._writing = threading.Lock()
        self._arrived: deque[WorkerBound] = deque()

    def send(self, message: WorkerMessage) -> None:
        """Send a message; any thread may. A gone agent ends the process: without one there is no cluster."""
        frame = encode_frame(message)
        try:
            with self._writing:
                self._socket.sendall(frame)
        except OSError as error:
            _log.error("the agent cannot be reached: %s", error)
            os._exit(_EXIT_AGENT_GONE)

    def receive(self) -> WorkerBound:
        """Block for the next message; ends the process when the agent is gone or speaks nonsense."""
        while not self._arrived:
            try:
                data = self._socket.recv(1 << 16)
                self._arrived.extend(self._decoder.feed(data))
            except (OSError, PeerError) as error:
                _log.error("the agent's message is not valid: %s", error)
                os._exit(_EXIT_AGENT_GONE)
            if not data:
                _log.error("the agent is gone")
                os._exit(_EXIT_AGENT_GONE)
        return self._arrived.popleft()

    def start_reader(self, handle: Callable[[WorkerBound], None]) -> None:
        """Hand every message from now on to `handle`, on a daemon thread."""

        def read() -> None:
            while True:
                handle(self.receive())

        threading.Thread(target=read, daemon=True, name="control").start()
