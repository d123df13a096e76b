"""Messages from worker to worker, over a listener for each worker and connections that are made on demand.

    caller ── connects ──> listener
           <── LinkChallenge ──       a nonce
           ── LinkHello ──>           the caller, its own nonce, and an HMAC of both with the listener's ticket
           <── LinkProof ──           an HMAC of both with the same ticket
           <── messages ──>

Tickets travel with addresses, through the master alone, so each side knows that the other belongs to the run. Later
messages are neither encrypted nor authenticated, like all traffic between workers.

One thread reads all connections. Messages to one peer arrive in order, or the link is lost. `trim` ends a link that has
carried nothing since the last `trim` with a LinkEnd, so that messages the other side sends meanwhile still arrive.
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
_MAX_STRANGERS = 128  # callers without a proof; one more replaces the oldest
_READ_BYTES = 1 << 12
_PAUSE_S = 0.1


class PeerLinks:
    """This worker's links to its peers. Any thread may call any method, and none of them blocks."""

    def __init__(
        self,
        worker_id: WorkerId,
        address: str,
        *,
        handle: Callable[[WorkerId, PeerMessage], None],
        lost: Callable[[WorkerId], None] = lambda _worker_id: None,
    ) -> None:
        """Listen at an address, a host name or a network interface of this machine, until `close`.

        The reading thread calls `handle(sender, message)` for each message, and `lost(peer)` when a link cannot be
        made, or ends without either side intending it. Neither may block. Raises ConfigError where no process can
        listen at the address.
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
        self._lock = threading.RLock()  # taken again where `close` wakes the thread
        self._addresses: dict[WorkerId, WorkerAddress] = {}
        self._links: dict[int, Link] = {}  # all connections, keyed by descriptor
        self._bound: dict[WorkerId, Link] = {}  # the connection on which messages to a peer are sent
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
        """Take peers' addresses. A peer with a new address is another process, so the links to the old one end."""
        with self._lock:
            for address in addresses:
                worker_id = address.worker_id
                if worker_id == self._worker_id or self._addresses.get(worker_id) == address:
                    continue
                self._addresses[worker_id] = address
                self._drop_all(link for link in self._links_of({worker_id}) if not link.is_with(address))

    def send(self, worker_id: WorkerId, message: PeerMessage) -> None:
        """Send a message, over a new link if necessary. `lost` is called if it may not have arrived.

        Raises PeerLost if the peer's address is not known.
        """
        with self._lock:
            link = self._bound.get(worker_id) or self._dial(worker_id)
            link.send(message)
            is_broken = link.is_broken
        # The reading thread closes it, since that alone may call `lost`.
        if is_broken:
            self._wake()

    def forget(self, nodes: Collection[str]) -> None:
        """Forget the addresses of lost nodes' workers, and close their links at once."""
        with self._lock:
            lost = frozenset(nodes)
            gone = {worker_id for worker_id in self._addresses if worker_id.node in lost}
            for worker_id in gone:
                del self._addresses[worker_id]
            self._drop_all(self._links_of(gone))

    def renew(self) -> None:
        """Close all links, since one may have failed without an error. New ones are made on demand."""
        with self._lock:
            self._drop_all(list(self._links.values()))

    def trim(self) -> None:
        """End the links that have carried nothing since the last call. New ones are made on demand."""
        with self._lock:
            for link in list(self._bound.values()):
                # A link whose proofs are under way may still hold messages.
                if link.is_used or not link.is_proven:
                    link.is_used = False
                else:
                    self._end(link)

    @property
    def num_links(self) -> int:
        """The number of connections, including those of strangers."""
        with self._lock:
            return len(self._links)

    def close(self) -> None:
        """Stop listening, close all links at once, and end the thread."""
        with self._lock:
            self._is_closed = True
        self._wake()

    # --- connections; all under the lock -----------------------------------------------------------------------

    def _links_of(self, worker_ids: Collection[WorkerId]) -> list[Link]:
        return [link for link in self._links.values() if link.worker_id in worker_ids]

    def _dial(self, worker_id: WorkerId) -> Link:
        callee = self._addresses.get(worker_id)
        if callee is None or self._is_closed:
            raise PeerLost(f"{worker_id} cannot be reached: its address is not known")
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        # Bound before it is proven, so that the next messages wait on the same link and stay in order.
        link = self._bound[worker_id] = Link(sock, self._poll, own=self.address, callee=callee)
        self._open(link)
        return link

    def _open(self, link: Link) -> None:
        self._links[link.fd] = link
        link.open()

    def _drop_all(self, links: Iterable[Link]) -> None:
        for link in links:
            self._unbind(link)
            if self._links.pop(link.fd, None) is not None:
                link.close()

    def _unbind(self, link: Link) -> None:
        if link.worker_id is not None and self._bound.get(link.worker_id) is link:
            del self._bound[link.worker_id]

    def _end(self, link: Link) -> None:
        """Send a LinkEnd, and continue to read until the other side has sent its own."""
        # No message may follow a LinkEnd: the next one to this peer takes a new link.
        self._unbind(link)
        link.end()

    def _bind(self, link: Link) -> None:
        """Send messages to a peer on the link that it has made, unless there is one, or an older process made it."""
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
        # Under the lock, so that `_wake` never writes to a descriptor that is closed, or another file's by now.
        with self._lock:
            self._drop_all(list(self._links.values()))
            self._listener.close()
            self._poll.close()
            os.close(self._wake_read)
            wake_write, self._wake_write = self._wake_write, None
            assert wake_write is not None
            os.close(wake_write)

    def _wake(self) -> None:
        with self._lock:
            if self._wake_write is not None:
                with suppress(BlockingIOError):  # a full pipe wakes the thread as well
                    os.write(self._wake_write, b"\0")

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            # The caller has hung up, or there are no descriptors left. In the latter case the listener stays readable,
            # and would keep this thread busy without the pause.
            time.sleep(_PAUSE_S)
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
            messages = link.read() if events & ~select.EPOLLOUT else []
            if any(isinstance(message, LinkEnd) for message in messages):
                self._end(link)
            self._bind(link)
        # Without the lock, so that a handler never delays threads that send.
        for message in messages:
            if not isinstance(message, LinkEnd):
                assert link.worker_id is not None
                self._handle(link.worker_id, message)

    def _drop_broken(self) -> None:
        """Close broken links, and report those that no side has ended."""
        with self._lock:
            broken = [link for link in self._links.values() if link.is_broken]
            self._drop_all(broken)
        for link in broken:
            if link.worker_id is not None and not link.is_ending:
                self._log.debug("has lost its link to %s", link.worker_id)
                self._lost(link.worker_id)

    def _drop_strangers(self) -> float | None:
        """Drop callers whose proof is late, and return the seconds until the next is due."""
        now_s = time.monotonic()
        with self._lock:
            strangers = [link for link in self._links.values() if link.is_stranger]  # the oldest first
            self._drop_all(strangers[: max(0, len(strangers) - _MAX_STRANGERS)])
            self._drop_all(link for link in strangers if link.until_s <= now_s)
        return min((link.until_s - now_s for link in strangers if link.until_s > now_s), default=None)
