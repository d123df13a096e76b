"""The process that has imported what the first ranks of a script did, and forks the later ones. It may end at any time.

It reports the name of each module before the import, so that another process knows which one it hangs or ends in
(`warmer`). It imports installed modules only: a script's own may be edited, and may do anything on import. A package
that creates what a fork would share or lose (threads, processes, a CUDA context, a seeded generator of random numbers)
ends the process, and is left to the ranks.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import importlib.util
import os
import select
import signal
import site
import socket
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from oobleck.training.forking import (
    FORKABLE,
    NUM_DESCRIPTORS,
    SpareSupervisor,
    adopt_orphans,
    has_cuda_driver,
    set_name,
)

from .generators import LIBRARIES, generator_states
from .import_log import LogReader, Lookup

LEARN = b"l"
"""A number follows: import what the log has up to there. Any other request is for a fork."""
TRYING = b"t"
"""The name of the module follows that is imported next."""
REFUSED = b"x"
"""The name of a module follows that no fork can be made with, and the reason; the process ends."""
READY = b"r"
NUM_SPARES = min(os.cpu_count() or 1, 8)
"""Supervisors that stand by: as many as the ranks that usually start at once on a node."""

_forks: list[None] = []  # one element for each fork of this process since the last import began
_MESSAGE_BYTES = 4096
_PR_SET_PDEATHSIG = 1
_START_S = 1.0
"""The time after a rank's start in which its processors are left to it."""


def be_warm(
    sock: socket.socket, log: LogReader, refused: frozenset[str], work: Callable[[socket.socket], None]
) -> NoReturn:
    """Import and fork as the other end of `sock` requests, until it is closed."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.setsid()
    if os.getppid() != parent:  # the parent ended before the signal was set up
        os._exit(0)
    set_name("oobleck-warm")
    os.register_at_fork(after_in_parent=lambda: _forks.append(None))
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    sock.setblocking(True)
    spares: list[SpareSupervisor] = []

    def leave() -> None:
        sock.close()
        for spare in spares:
            spare.close()

    pause_s = 0.0  # before the next spare
    is_ready = False
    while True:
        lacks_spares = is_ready and len(spares) < NUM_SPARES
        if not select.select([sock], [], [], pause_s if lacks_spares else None)[0]:
            with suppress(OSError):  # there is no room for another process
                spares.append(SpareSupervisor(work, leave=leave))
            continue
        data, descriptors, _, _ = socket.recv_fds(sock, _MESSAGE_BYTES, NUM_DESCRIPTORS)
        if not data:
            os._exit(0)
        if data.startswith(LEARN):
            while spares:  # they would not have what is imported now
                spares.pop().close()
            _learn(sock, log.read(int(data[1:])), refused)
            sock.send(READY)
            is_ready, pause_s = True, 0.0
        elif len(descriptors) == NUM_DESCRIPTORS:
            _fork(descriptors, spares, lambda: SpareSupervisor(work, leave=leave))
            pause_s = _START_S


def _fork(descriptors: list[int], spares: list[SpareSupervisor], make: Callable[[], SpareSupervisor]) -> None:
    """Fork a rank; if no process can be made, the agent notices by the end of its pipe."""
    with suppress(OSError):
        while not (spares.pop() if spares else make()).supervise(descriptors):
            pass
    for descriptor in descriptors:
        os.close(descriptor)


def _learn(sock: socket.socket, found: Iterator[Lookup], refused: frozenset[str]) -> None:
    own = os.getpid()
    installed = tuple(_installed())
    adopt_orphans(True)  # processes that a package starts and abandons become children of this one
    gc.disable()  # imports make millions of objects that all stay
    # Libraries with generators come first: only then does a change show that another package seeds one.
    for each in sorted(found, key=lambda each: each.name not in LIBRARIES):
        if each.name in refused or each.name in sys.modules or not _is_installed(each.name, installed):
            continue
        sock.send(TRYING + each.name.encode())
        before = generator_states()
        _forks.clear()
        # An import that fails here may have failed in the script as well, which went on. The environment is the one
        # that the script had made by then.
        with _environment_changed({**FORKABLE, **each.environment}), suppress(Exception, SystemExit):
            importlib.import_module(each.name)
        if os.getpid() != own:  # the package has forked this process
            os._exit(0)
        if (taint := _taint(before)) is not None:
            _end_children()  # before it is known: the fork server ends this process then, and no daemon of a package
            sock.send(REFUSED + f"{each.name} {taint}".encode())
            os._exit(0)
    adopt_orphans(False)
    gc.enable()
    gc.collect()
    gc.freeze()


def _taint(before: Mapping[str, object]) -> str | None:
    """Return what the package did that a fork does not carry over; `before` is the state of generators before it."""
    torch = sys.modules.get("torch")
    if has_cuda_driver() or (torch is not None and hasattr(torch, "cuda") and torch.cuda.is_initialized()):
        return "makes a CUDA context"
    if threading.active_count() > 1:
        return "starts a thread"
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    # A process that the package forked may have ended by now; a rank that imports the package forks it all the same.
    if _forks or _children():
        return "starts a process"
    # Forks reseed all generators: ranks would get other numbers than if they imported the package themselves.
    after = generator_states()
    changed = [name for name, state in before.items() if after.get(name) != state]
    return f"sets the random numbers of {changed[0]}" if changed else None


def _children() -> list[int]:
    with suppress(OSError):
        return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
    return []


def _end_children() -> None:
    """End what packages have started, and its own children, which become ours."""
    while pids := _children():
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)


def _is_installed(name: str, installed: tuple[str, ...]) -> bool:
    top = name.partition(".")[0]
    if top in sys.stdlib_module_names:
        return True
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return False
    places = [] if spec is None else [spec.origin, *(spec.submodule_search_locations or ())]
    return any(place is not None and place.startswith(installed) for place in places)


def _installed() -> Iterator[str]:
    """Yield the directories of installed packages, as prefixes of their files' names."""
    places = {*site.getsitepackages(), site.getusersitepackages(), *sysconfig.get_paths().values()}
    yield from (f"{place}{os.sep}" for place in places if os.path.basename(place) in ("site-packages", "dist-packages"))


@contextmanager
def _environment_changed(changes: Mapping[str, str]) -> Iterator[None]:
    before = {key: os.environ.get(key) for key in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value
