"""Messages from worker to worker: a listener each, and connections that are made when somebody has something to say.

    caller ── connects ──> listener
           <── LinkChallenge ──       a nonce
           ── LinkHello ──>           who calls, its own nonce, and an HMAC of both with the listener's ticket
           <── LinkProof ──           an HMAC of both with the same ticket
           <── messages ──>

Tickets travel with addresses, through the master alone; so each side knows that the other belongs to the run. What
follows is neither encrypted nor authenticated, like all else that workers exchange.

One thread reads all connections. Messages to one peer arrive in their order, or the link is lost. A link that has
carried nothing since the last `trim` is ended with a last word, so that what the other side sends meanwhile arrives.
"""

from __future__ import annotations

import os
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress

from oobleck.control.protocol import LinkEnd, PeerMessage, WorkerAddress
from oobleck.control.steps import PeerLost
from oobleck.planner import WorkerId
from oobleck.training.worker_log import WorkerLog

from .listening import listen_at
from .peer_link import Link

_TICKET_BYTES = 16
_PROOF_TIMEOUT_S = 10.0
_MAX_STRANGERS = 128
"""Callers that have proved nothing yet; the oldest is dropped for one more."""
_READ_BYTES = 1 << 12
_REST_S = 0.1


class PeerLinks:
    """This worker's links to its peers. Every method may be called by any thread, and none of them blocks."""

    def __init__(
        self,
        worker_id: WorkerId,
        address: str,
        *,
        handle: Callable[[WorkerId, PeerMessage], None],
        lost: Callable[[WorkerId], None] = lambda _worker_id: None,
    ) -> None:
        """Listen at an address, a host name or a network interface of this machine, until `close`.

        `handle(sender, message)` is called for each message that arrives, and `lost(peer)` when a link ends that
        neither side has ended on purpose, or cannot be made; both on the thread that reads, so they must not block.
        Raises ConfigError where no process can listen at the address.
        """
        self._worker_id = worker_id
        self._handle = handle
        self._lost = lost
        self._log = WorkerLog(__name__, worker_id)
        self._listener = listen_at(address)
        host, port = self._listener.getsockname()[:2]
        self.address = WorkerAddress(
            worker_id=worker_id, host=host, port=port, ticket=secrets.token_bytes(_TICKET_BYTES)
        )
        """What peers must be told to reach this worker."""
        self._lock = threading.RLock()
        self._addresses: dict[WorkerId, WorkerAddress] = {}
        self._links: dict[int, Link] = {}
        """All connections, by descriptor."""
        self._bound: dict[WorkerId, Link] = {}
        """By which connection a peer is spoken to."""
        self._is_closed = False
        self._poll = select.epoll()
        self._wake_read, wake_write = os.pipe()
        os.set_blocking(wake_write, False)
        self._wake_write: int | None = wake_write
        self._poll.register(self._wake_read, select.EPOLLIN)
        self._poll.register(self._listener, select.EPOLLIN)
        threading.Thread(target=self._run, daemon=True, name="peer links").start()

    # --- for all threads -------------------------------------------------------------------------------------

    def know(self, addresses: Iterable[WorkerAddress]) -> None:
        """Take in where peers listen. One that listens elsewhere than before is another process: its links end."""
        with self._lock:
            for address in addresses:
                worker_id = address.worker_id
                if worker_id == self._worker_id or self._addresses.get(worker_id) == address:
                    continue
                self._addresses[worker_id] = address
                for link in self._links_of({worker_id}):
                    if not link.is_with(address):
                        self._drop(link)

    def knows(self, worker_id: WorkerId) -> bool:
        """Return whether it is known where a peer listens."""
        with self._lock:
            return worker_id in self._addresses

    def send(self, worker_id: WorkerId, message: PeerMessage) -> None:
        """Send a message, over a link that is made if need be. `lost` is called if it may not have arrived.

        Raises PeerLost where no address of the peer is known.
        """
        with self._lock:
            link = self._bound.get(worker_id) or self._dial(worker_id)
            link.send(message)
            is_broken = link.is_broken
        if is_broken:
            self._wake()

    def forget(self, nodes: Collection[str]) -> None:
        """Forget where the workers of lost nodes listen, and end their links at once."""
        with self._lock:
            lost = frozenset(nodes)
            gone = {worker_id for worker_id in self._addresses if worker_id.node in lost}
            for worker_id in gone:
                del self._addresses[worker_id]
            for link in self._links_of(gone):
                self._drop(link)

    def renew(self) -> None:
        """Drop all links, for one of them may carry nothing though nobody was told of an error; others are made."""
        with self._lock:
            for link in list(self._links.values()):
                self._drop(link)

    def trim(self) -> None:
        """End the links that have carried nothing since the last call; one that is needed again is made again."""
        with self._lock:
            for link in list(self._bound.values()):
                if link.is_used or not link.is_proven:
                    link.is_used = False
                else:
                    self._end(link)

    @property
    def num_links(self) -> int:
        """How many connections there are, of strangers as well."""
        with self._lock:
            return len(self._links)

    def close(self) -> None:
        """Listen no more, and end all links at once. The thread ends."""
        with self._lock:
            self._is_closed = True
        self._wake()

    # --- connections; all under the lock -----------------------------------------------------------------------

    def _links_of(self, worker_ids: Collection[WorkerId]) -> list[Link]:
        return [link for link in self._links.values() if link.worker_id in worker_ids]

    def _dial(self, worker_id: WorkerId) -> Link:
        callee = self._addresses.get(worker_id)
        if callee is None or self._is_closed:
            raise PeerLost(f"{worker_id} cannot be spoken to: it is not known where it listens")
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        link = self._bound[worker_id] = Link(sock, self._poll, own=self.address, callee=callee)
        self._open(link)
        return link

    def _open(self, link: Link) -> None:
        self._links[link.fd] = link
        link.open()

    def _drop(self, link: Link) -> None:
        """Close a connection."""
        self._unbind(link)
        if self._links.pop(link.fd, None) is not None:
            link.close()

    def _unbind(self, link: Link) -> None:
        if link.worker_id is not None and self._bound.get(link.worker_id) is link:
            del self._bound[link.worker_id]

    def _end(self, link: Link) -> None:
        """Say the last word, and read on until the other side has said its own."""
        self._unbind(link)
        link.end()

    def _bind(self, link: Link) -> None:
        """Speak to a peer by a link that it has made, unless there is one, or another process of its made it."""
        if link.worker_id is None or not link.is_proven or link.is_ending:
            return
        known = self._addresses.get(link.worker_id)
        if known is None or link.is_with(known):
            self._bound.setdefault(link.worker_id, link)

    # --- the thread that reads -------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._is_closed:
            for fd, events in self._poll.poll(self._drop_strangers()):
                if fd == self._listener.fileno():
                    self._accept()
                elif fd == self._wake_read:
                    os.read(fd, _READ_BYTES)
                else:
                    self._serve(fd, events)
            self._drop_broken()
        with self._lock:
            for link in list(self._links.values()):
                self._drop(link)
            self._listener.close()
            self._poll.close()
            os.close(self._wake_read)
            wake_write, self._wake_write = self._wake_write, None
            assert wake_write is not None
            os.close(wake_write)

    def _wake(self) -> None:
        with self._lock:
            if self._wake_write is not None:
                with suppress(BlockingIOError):
                    os.write(self._wake_write, b"\0")

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:  # the caller is gone, or there are no descriptors left: take a rest
            time.sleep(_REST_S)
            return
        with self._lock:
            self._open(Link(sock, self._poll, own=self.address, until_s=time.monotonic() + _PROOF_TIMEOUT_S))

    def _serve(self, fd: int, events: int) -> None:
        with self._lock:
            link = self._links.get(fd)
            if link is None:
                return
            if events & select.EPOLLOUT:
                link.flush()
            heard = link.read() if events & ~select.EPOLLOUT else []
            if any(isinstance(message, LinkEnd) for message in heard):
                self._end(link)
            self._bind(link)
        for message in heard:
            if not isinstance(message, LinkEnd):
                assert link.worker_id is not None
                self._handle(link.worker_id, message)

    def _drop_broken(self) -> None:
        """Close the links that are broken, and say whose ends were not wanted."""
        with self._lock:
            broken = [link for link in self._links.values() if link.is_broken]
            for link in broken:
                self._drop(link)
        for link in broken:
            if link.worker_id is not None and not link.is_ending:
                self._log.debug("has lost its link to %s", link.worker_id)
                self._lost(link.worker_id)

    def _drop_strangers(self) -> float | None:
        """Drop callers that have not proved themselves in time; returns when the next is due, in seconds from now."""
        now_s = time.monotonic()
        with self._lock:
            strangers = [link for link in self._links.values() if link.is_stranger]  # the oldest first
            for link in strangers[: max(0, len(strangers) - _MAX_STRANGERS)]:
                self._drop(link)
            for link in strangers:
                if link.until_s <= now_s:
                    self._drop(link)
        return min((link.until_s - now_s for link in strangers if link.until_s > now_s), default=None)
