"""What the first ranks of a script import, and how a fork server comes to have imported the same.

    rank ── ImportLog ──> fork.imports ── Learner ──> the fork server's own modules, and so those of later ranks

Only what is installed counts: a script's own modules may be edited, and may do anything when they are imported. Where
the script had changed its environment before an import, the server changes its own in the same way for that import.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import json
import os
import site
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

__all__ = ["ImportLog", "Learner"]

_LOOK_S = 0.25
_QUIET_S = 1.0
"""The log has not grown for so long: the script has imported what it imports when it begins."""
_LONGEST_S = 15.0
"""After so long, what is there is imported, though it may still grow."""


class ImportLog:
    """A finder that finds nothing, and notes what is looked for: all modules that are not there yet."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._pid = os.getpid()
        self._environment = dict(os.environ)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Note the name, with what the script has changed of its environment; others find the module."""
        if os.getpid() == self._pid:  # not in processes that the script has forked
            changes = {key: value for key, value in os.environ.items() if self._environment.get(key) != value}
            line = json.dumps({"name": name, "environment": changes}) + "\n"
            with suppress(OSError):  # the script's import goes on, and a later start imports it for itself
                os.write(self._file, line.encode())
        return None


class Learner:
    """Imports, in a fork server, what a log has. `__call__` is to be called between requests."""

    def __init__(self, log: Path, warmth: Path) -> None:
        """`warmth` is a file that is there while all of the log is imported."""
        self._log = log
        self._warmth = warmth
        self._refused = log.with_suffix(".refused")
        self._read_bytes = 0
        self._size_bytes = 0
        self._since_s = self._grown_s = time.monotonic()
        self._waiting: list[tuple[str, Mapping[str, str]]] = []
        self._installed = tuple(_installed())

    def learn_all(self) -> None:
        """Import what the log has already: it was written under another server."""
        self._warmth.unlink(missing_ok=True)
        self._read()
        while self._waiting:
            self._import_next()
        if self._read_bytes:
            self._settle()

    def __call__(self) -> float:
        """Import a module, if one is due; returns after how many seconds to call again."""
        if self._waiting:
            self._import_next()
            if not self._waiting:
                self._settle()
            return 0.0
        now_s = time.monotonic()
        size_bytes = self._log.stat().st_size if self._log.exists() else 0
        if size_bytes == self._read_bytes:
            self._since_s = self._grown_s = now_s
        elif size_bytes != self._size_bytes:
            self._grown_s = now_s
        elif now_s - self._grown_s >= _QUIET_S or now_s - self._since_s >= _LONGEST_S:
            self._read()
            return 0.0
        self._size_bytes = size_bytes
        return _LOOK_S

    def _read(self) -> None:
        """Read the lines that are whole."""
        if not self._log.exists():
            return
        refused = set(self._refused.read_text().split()) if self._refused.exists() else set()
        with self._log.open("rb") as file:
            file.seek(self._read_bytes)
            for line in file:
                if line.endswith(b"\n"):
                    self._read_bytes += len(line)
                    said = json.loads(line)
                    if said["name"] not in refused:
                        self._waiting.append((said["name"], said["environment"]))

    def _import_next(self) -> None:
        name, environment = self._waiting.pop(0)
        if name in sys.modules or not self._is_installed(name):
            return
        with _environment_changed(environment):
            try:
                importlib.import_module(name)
            except (Exception, SystemExit):  # noqa: BLE001  others' code; the script may have met the same, and gone on
                return
        if _is_tainted():
            with self._refused.open("a") as file:
                file.write(f"{name}\n")
            sys.exit(f"the fork server ends, for {name} has started what no fork takes along; the next one skips it")

    def _settle(self) -> None:
        gc.collect()
        gc.freeze()
        self._warmth.touch()

    def _is_installed(self, name: str) -> bool:
        top = name.partition(".")[0]
        if top in sys.stdlib_module_names:
            return True
        try:
            spec = importlib.util.find_spec(top)
        except (ImportError, ValueError):
            return False
        places = [] if spec is None else [spec.origin, *(spec.submodule_search_locations or ())]
        return any(place is not None and place.startswith(self._installed) for place in places)


def _installed() -> Iterator[str]:
    """Where installed packages lie, as prefixes of their files' names."""
    places = {*site.getsitepackages(), site.getusersitepackages(), *sysconfig.get_paths().values()}
    yield from (f"{place}{os.sep}" for place in places if os.path.basename(place) in ("site-packages", "dist-packages"))


def _is_tainted() -> bool:
    """Whether something was started that a fork does not carry over: a thread of Python's, or a CUDA context."""
    torch = sys.modules.get("torch")
    has_context = torch is not None and torch.cuda.is_initialized()
    return has_context or threading.active_count() > 1


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
