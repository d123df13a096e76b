"""Where a run keeps its files: `<base_dir>/<tag>/`, readable by its user alone.

journal.jsonl        everything that the master saw and decided
metrics.jsonl        a sample of numbers for each committed step
lock                 held by the run's master while it lives
host                 the machine of the first master
owner                the script or job file of the first run of this tag
command              the command that started the newest master, for people
control.sock         status, kill and stop; a link to a short directory elsewhere if this path is too long
temporary            where the agents of virtual nodes have their sockets
agent<index>.log     one for each line of the hostfile
profile/             measured profiles
tensorboard/         the metrics again, where TensorBoard is installed
dial-in/             keys for nodes that dial in, and what their scheduler says
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shlex
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from oobleck.errors import ConfigError, UsageError
from oobleck.host.user_path import expand_user
from oobleck.host.writing import write_whole

from .private_paths import private_directory, temporary_directory
from .process_id import ProcessId

BASE_DIR_VARIABLE = "OOBLECK_BASE_DIR"

LAUNCHED_DIRECTORY = ".launched"
"""In the directory of all runs: jobs that `oobleck.launch` has written."""
MAX_SOCKET_PATH_BYTES = 100
"""Below the limit of every system we run on: 108 with its closing zero on Linux, 104 on macOS."""
_TAG_CHARS = 40
_DIGEST_CHARS = 8


def default_base_dir() -> Path:
    """The directory of all runs: $OOBLECK_BASE_DIR, or `~/.oobleck`."""
    configured = os.environ.get(BASE_DIR_VARIABLE)
    return expand_user(configured or "~/.oobleck")


def default_tag(base_dir: Path, tag: str, owner: str) -> str:
    """Return the tag of a run that the user has not named: `tag`, or one of its own where that is of another owner.

    `owner` is the path of what the run is of. The same one always gets the same tag, and with it its states.
    """
    digest = hashlib.sha256(os.fsencode(owner)).hexdigest()[:_DIGEST_CHARS]
    apart = f"{tag[: _TAG_CHARS - _DIGEST_CHARS - 1]}-{digest}"
    if RunDirectory(base_dir=base_dir, tag=apart).path.is_dir():
        return apart
    return tag if RunDirectory(base_dir=base_dir, tag=tag).owner in (None, owner) else apart


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDirectory:
    """The paths of one run; nothing exists before `create`."""

    base_dir: Path
    """By any of its names: links in it are followed once, here, so that agents and later masters find one place."""
    tag: str

    @property
    def path(self) -> Path:
        return self.base_dir.resolve() / self.tag

    @property
    def run_id(self) -> str:
        """A name for this run's files on the nodes: other machines and base directories may use the same tag.

        A master on another machine that shares this directory uses the same name, so it can take over.
        """
        digest = hashlib.sha256(f"{self._first_host}:{self.path}".encode()).hexdigest()[:8]
        return f"{self.tag}-{digest}"

    @property
    def _first_host(self) -> str:
        try:
            noted = (self.path / "host").read_text(encoding="utf-8").strip()
        except (OSError, ValueError):
            noted = ""
        return noted or socket.gethostname()

    @property
    def journal(self) -> Path:
        return self.path / "journal.jsonl"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def cache(self) -> Path:
        """Where tokenised text is kept: for all runs of this user, unless the base directory's is somebody else's."""
        shared = self.path.parent / "cache"
        is_foreign = shared.exists() and shared.stat().st_uid != os.getuid()
        return self.path / "cache" if is_foreign else shared

    @property
    def profile(self) -> Path:
        return self.path / "profile"

    @property
    def control_socket(self) -> Path:
        """Where the run listens: in its directory if that path is short enough for a socket."""
        path = self.path / "control.sock"
        if len(os.fsencode(path)) <= MAX_SOCKET_PATH_BYTES:
            return path
        try:
            return Path(os.readlink(path))  # other terminals may have another runtime directory than the master
        except OSError:
            return self._short_socket

    @property
    def _short_socket(self) -> Path:
        digest = hashlib.sha256(os.fsencode(self.path)).hexdigest()[:16]
        return _short_directory() / f"{digest}.sock"

    @property
    def master(self) -> ProcessId | None:
        """The process that holds the run's lock, or was the last to hold it; None when none ever did."""
        return ProcessId.read(self.path / "lock")

    @property
    def owner(self) -> str | None:
        """The path of what the first run of this tag was of; None where nothing says so."""
        try:
            return (self.path / "owner").read_text(encoding="utf-8", errors="surrogateescape").rstrip("\n") or None
        except OSError:
            return None

    def note_owner(self, owner: str) -> None:
        """Note what the run is of, unless the tag has an owner already. The lock must be held. Raises OSError."""
        if self.owner is None:
            write_whole(self.path / "owner", f"{owner}\n")

    @property
    def command(self) -> str:
        """The command that started the newest master, for people; empty where nobody has noted it."""
        try:
            return (self.path / "command").read_text(encoding="utf-8").strip()
        except (OSError, ValueError):
            return ""

    def note_command(self, words: Sequence[str]) -> None:
        """Note the command line of this process, without the values of variables and a script's arguments: those may
        be secrets. Best effort, raises nothing.
        """
        shown = list(words)
        for index, word in enumerate(words):
            if word.endswith(".py") or words[index - 1 : index] in (["-m"], ["--module"], ["--no-python"]):
                shown = [*shown[: index + 1], *(["…"] if words[index + 1 :] else [])]
                break
            name, equals, value = word.removeprefix("--env=").partition("=")
            if equals and value and (word.startswith("--env=") or words[index - 1 : index] == ["--env"]):
                shown[index] = f"{'--env=' if word.startswith('--env=') else ''}{name}=…"
        line = f"cd {shlex.quote(os.getcwd())} && {' '.join(map(_quoted, shown))}"
        with suppress(OSError, UnicodeEncodeError):
            write_whole(self.path / "command", f"{line}\n")

    def create(self) -> None:
        """Make the directory and its parents; the run's own becomes private, an existing base directory stays as it is.

        Raises ConfigError where that is impossible.
        """
        try:
            str(self.path).encode()
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        except UnicodeEncodeError as error:
            raise ConfigError(f"base directory {str(self.path.parent)!a}: its name must be UTF-8") from error
        except OSError as error:
            raise ConfigError(f"base directory {self.base_dir}: {error.strerror}") from error
        private_directory(self.path)
        private_directory(self.profile)
        if not (self.path / "host").exists():
            with suppress(OSError):  # without it, no master on another machine can take over
                write_whole(self.path / "host", f"{socket.gethostname()}\n")
        if self.control_socket.parent != self.path:
            self._link_socket()
        private_directory(self.control_socket.parent)

    def _link_socket(self) -> None:
        link = self.path / "control.sock"
        link.unlink(missing_ok=True)
        link.symlink_to(self._short_socket)

    def pin_temporary_directory(self) -> Path:
        """Where the run's virtual nodes have their agents: where those of a master before us are, if any are left.

        TMPDIR may have another value by now. The directory must exist.
        """
        note = self.path / "temporary"
        try:
            noted = Path(note.read_text(encoding="utf-8"))
            if (noted / f"oobleck-{os.getuid()}" / self.run_id).is_dir():
                return noted
        except (OSError, ValueError):
            pass
        chosen = temporary_directory()
        with suppress(OSError, UnicodeEncodeError):
            write_whole(note, str(chosen))
        return chosen

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the run's lock; the system releases it when the process dies. The directory must exist.

        Raises UsageError if another process holds it, ConfigError where it cannot be written.
        """
        descriptor = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.read(descriptor, 100).decode(errors="replace").split()[:1]
                raise UsageError(
                    f"a run with tag {self.tag} is active (process {holder[0] if holder else 'unknown'}); stop it with "
                    f"`oobleck stop {self.tag}` or choose another --tag"
                ) from None
            self._note_holder(descriptor)
            yield
        finally:
            os.close(descriptor)

    def _note_holder(self, lock: int) -> None:
        try:
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"{ProcessId.of(os.getpid())}\n".encode(), 0)
        except OSError as error:
            raise ConfigError(f"{self.path / 'lock'}: {error.strerror}") from error


def _quoted(word: str) -> str:
    return word if word.endswith("…") else shlex.quote(word)


def _short_directory() -> Path:
    """A directory of ours with a short path, for sockets whose own place is too deep."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and len(os.fsencode(runtime)) <= MAX_SOCKET_PATH_BYTES - len("/oobleck/0123456789abcdef.sock"):
        return Path(runtime) / "oobleck"
    shared = temporary_directory()
    if len(os.fsencode(shared)) > MAX_SOCKET_PATH_BYTES // 2:
        shared = Path("/tmp")  # noqa: S108 - the directory in it is checked to be ours alone
    return shared / f"oobleck-{os.getuid()}"
