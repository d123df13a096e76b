"""The files of a run: `<base_dir>/<tag>/`, readable by its user only.

journal.jsonl        everything that the master saw and decided
metrics.jsonl        a sample of numbers for each committed step
lock                 held by the run's master while it lives
host                 the machine of the first master
owner                the script or job file of the tag's first run
command              the command that started the newest master, for people
output.log           the output of `oobleck up --detach`
control.sock         status, kill and stop; a link to a short directory elsewhere if this path is too long
temporary            the directory with the sockets of virtual nodes' agents
agent-<node>.log     of the nodes that share this directory, such as virtual ones
profile/             measured profiles
tensorboard/         the metrics again, if TensorBoard is installed
dial-in/             keys for nodes that dial in, and the output of their scheduler
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shlex
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from oobleck.errors import ConfigError, UsageError
from oobleck.host.user_path import expand_user
from oobleck.host.writing import write_whole
from oobleck.job import MAX_TAG_CHARS
from oobleck.job.secrets import HIDDEN, public_words

from .private_paths import private_directory, temporary_directory
from .process_id import ProcessId

BASE_DIR_VARIABLE = "OOBLECK_BASE_DIR"

LAUNCHED_DIRECTORY = ".launched"
"""The part of the directory of all runs where `oobleck.launch` writes jobs."""
MAX_SOCKET_PATH_BYTES = 100
"""A length below the limits of Linux (108 with its closing zero) and macOS (104)."""
_HIDDEN_KEYS = r"(?:env|control\.(?:notice_headers|notice_command|notice_url|webhook_url))\b"
_VARIABLE = re.compile(rf"((?:--env[= ]|--set[= ]{_HIDDEN_KEYS})[^=]*=).+", re.DOTALL)
_DIGEST_CHARS = 8


def default_base_dir() -> Path:
    return expand_user(os.environ.get(BASE_DIR_VARIABLE) or "~/.oobleck")


def default_tag(base_dir: Path, tag: str, owner: str) -> str:
    """Return the tag of a run that the user has not named: `tag`, or a variant of it if another owner has that."""
    # A job or script always gets the same tag, and so finds its states, even if the other owner's run is removed.
    digest = hashlib.sha256(os.fsencode(owner)).hexdigest()[:_DIGEST_CHARS]
    apart = f"{tag[: MAX_TAG_CHARS - _DIGEST_CHARS - 1]}-{digest}"
    if RunDirectory(base_dir=base_dir, tag=apart).path.is_dir():
        return apart
    return tag if RunDirectory(base_dir=base_dir, tag=tag).owner in (None, owner) else apart


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDirectory:
    """The paths of one run; nothing exists before `create`."""

    base_dir: Path
    tag: str

    @property
    def path(self) -> Path:
        # Links are resolved, so that agents and later masters find the same place under any name.
        return self.base_dir.resolve() / self.tag

    @property
    def run_id(self) -> str:
        """The name for this run's files on the nodes, distinct from runs of other machines and base directories."""
        # The first master's host counts: a master on another machine that shares this directory can take over.
        host = ""
        with suppress(OSError, ValueError):
            host = (self.path / "host").read_text(encoding="utf-8").strip()
        digest = hashlib.sha256(f"{host or socket.gethostname()}:{self.path}".encode()).hexdigest()[:8]
        return f"{self.tag}-{digest}"

    @property
    def journal(self) -> Path:
        return self.path / "journal.jsonl"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def cache(self) -> Path:
        """The directory for tokenised text, which all runs share unless it belongs to another user."""
        shared = self.path.parent / "cache"
        is_foreign = shared.exists() and shared.stat().st_uid != os.getuid()
        return self.path / "cache" if is_foreign else shared

    @property
    def profile(self) -> Path:
        return self.path / "profile"

    @property
    def control_socket(self) -> Path:
        """The run's socket, in its directory if that path is short enough."""
        path = self.path / "control.sock"
        if len(os.fsencode(path)) <= MAX_SOCKET_PATH_BYTES:
            return path
        try:
            return Path(os.readlink(path))  # another terminal may have a different runtime directory than the master
        except OSError:
            return self._short_socket

    @property
    def _short_socket(self) -> Path:
        name = f"{hashlib.sha256(os.fsencode(self.path)).hexdigest()[:16]}.sock"
        runtime = os.environ.get("XDG_RUNTIME_DIR")
        if runtime and len(os.fsencode(f"{runtime}/oobleck/{name}")) <= MAX_SOCKET_PATH_BYTES:
            return Path(runtime) / "oobleck" / name
        shared = temporary_directory()
        if len(os.fsencode(shared)) > MAX_SOCKET_PATH_BYTES // 2:
            shared = Path("/tmp")  # noqa: S108 - the directory in it is checked to be ours alone
        return shared / f"oobleck-{os.getuid()}" / name

    @property
    def master(self) -> ProcessId | None:
        """The last process that held the run's lock, or holds it now; None if there was none."""
        return ProcessId.read(self.path / "lock")

    @property
    def owner(self) -> str | None:
        """The path of the job or script of the tag's first run, if noted."""
        try:
            return (self.path / "owner").read_text(encoding="utf-8", errors="surrogateescape").rstrip("\n") or None
        except OSError:
            return None

    def note_owner(self, owner: str) -> None:
        """Note the path of the run's job or script, unless the tag has one. Needs the lock. Raises OSError."""
        if self.owner is None:
            write_whole(self.path / "owner", f"{owner}\n")

    @property
    def command(self) -> str:
        """The command that started the newest master, for people; empty if not noted."""
        try:
            return (self.path / "command").read_text(encoding="utf-8").strip()
        except (OSError, ValueError):
            return ""

    def note_command(self, words: Sequence[str], arguments: Sequence[str]) -> None:
        """Note the command line of this process, of which `arguments` are a script's; best effort, raises nothing."""
        # The values of variables and a script's arguments may be secrets, so they are left out.
        shown, is_before = list(public_words(words)), True
        for index, word in enumerate(words):
            if not is_before and word in arguments:
                shown[index] = HIDDEN
            is_before &= not (
                word.endswith(".py") or words[index - 1 : index] in (["-m"], ["--module"], ["--no-python"])
            )
            before = f"{words[index - 1]} " if index and not word.startswith("-") else ""
            if (found := _VARIABLE.fullmatch(f"{before}{word}")) is not None:
                shown[index] = f"{found[1]}{HIDDEN}".removeprefix(before)
        shown = [word for word, last in zip(shown, ["", *shown], strict=False) if (word, last) != (HIDDEN, HIDDEN)]
        quoted = (word if word.endswith(HIDDEN) else shlex.quote(word) for word in shown)
        line = f"cd {shlex.quote(os.getcwd())} && {' '.join(quoted)}"
        with suppress(OSError, UnicodeEncodeError):
            write_whole(self.path / "command", f"{line}\n")

    def create(self) -> None:
        """Create the directory, private to its user, and its parents. Raises ConfigError."""
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
            # Other commands find the socket by this link, whatever their own runtime directory is.
            link = self.path / "control.sock"
            link.unlink(missing_ok=True)
            link.symlink_to(self._short_socket)
        private_directory(self.control_socket.parent)

    def pin_temporary_directory(self) -> Path:
        """Return the temporary directory for virtual nodes' agents, which must exist."""
        # TMPDIR may have changed since an earlier master, whose agents still use the old directory.
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
    def lock(self, *, is_master: bool = True) -> Iterator[None]:
        """Hold the run's lock, which the system releases when the process dies. The directory must exist.

        Others are given this process as the run's master, unless it is none.

        Raises UsageError if another process holds it, ConfigError if it cannot be written.
        """
        path = self.path / "lock"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # The run may have been removed since: then another process could hold the lock of a new file.
                if not path.exists() or not os.path.samestat(os.fstat(descriptor), path.stat()):
                    raise UsageError(f"run {self.tag} was just removed by `oobleck rm`; give the command again")
            except BlockingIOError:
                holder = os.read(descriptor, 100).decode(errors="replace").split()[:1]
                raise UsageError(
                    f"a run with tag {self.tag} is active (process {holder[0] if holder else 'unknown'}); stop it with "
                    f"`oobleck stop {self.tag}` or choose another --tag"
                ) from None
            try:
                if is_master:
                    os.ftruncate(descriptor, 0)
                    os.pwrite(descriptor, f"{ProcessId.of(os.getpid())}\n".encode(), 0)
            except OSError as error:
                raise ConfigError(f"{path}: {error.strerror}") from error
            yield
        finally:
            os.close(descriptor)
