"""Kubernetes pods that run `oobleck node`, followed through the API server: a pod's deletion is a notice.

The pods dial in by themselves, and connections reveal losses. The API adds two facts: that a pod is about to be taken
away, even if its processes get no SIGTERM, and why a pod does not start.

A watch is a GET whose answer has one event per line and ends after minutes. The next one continues from the version of
the last event.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from oobleck.errors import ConfigError, PeerError, UsageError, shown
from oobleck.json_table import load_json

from .dial_in import DialedInNodes

if TYPE_CHECKING:
    from kubernetes.client import ApiException

_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"  # Kubernetes' own place for it
_ACCOUNT_VARIABLE = "OOBLECK_SERVICE_ACCOUNT"
_WATCH_S = 240  # the server ends a watch then, before proxies on the way lose patience
_SILENCE_S = 300.0  # a server that is silent for longer is gone, for it sends bookmarks every minute
_CONNECT_S = 10.0
_FIRST_WAIT_S = 1.0
_LONGEST_WAIT_S = 30.0
_NONE_S = 15.0  # other pods of the same manifests may be created a moment later
_GONE = 410
_OUT_OF_MEMORY = "OOMKilled"


class WatchExpired(Exception):
    """The server no longer has the events after the last one, so all pods must be listed again."""


class PodWatch:
    """Follows the events of a watch, and reports which pods will be taken away and why others do not start."""

    def __init__(
        self, *, leave: Callable[[str], None], ran_out: Callable[[str], None], report: Callable[[str], None]
    ) -> None:
        """`leave` receives the name of each deleted pod, `ran_out` that of a pod whose container was killed for its
        memory, `report` texts for people.
        """
        self.version: str | None = None
        """The last event's version, from which the next watch continues; None lists all pods."""
        self._leave = leave
        self._ran_out = ran_out
        self._report = report
        # Keyed by name and uid, because a pod that is made again has the same name.
        self._pods: dict[tuple[str, str], _Pod] = {}

    @property
    def num_pods(self) -> int:
        return len(self._pods)

    def take(self, line: bytes) -> None:
        """Handle an event. Raises WatchExpired, or PeerError for anything that is not an event."""
        try:
            event = load_json(line)
        except ValueError as error:
            raise PeerError(f"the API server sent a line that is not JSON: {shown(line)}") from error
        kind, thing = _text(event, "type"), _at(event, "object")
        key = _text(thing, "metadata", "name"), _text(thing, "metadata", "uid")
        match kind:
            case "ADDED" | "MODIFIED":
                self._see(key, thing)
            case "DELETED":
                self._pods.pop(key, None)
            case "BOOKMARK":
                pass
            case "ERROR":
                if _at(thing, "code") == _GONE:
                    self.version = None
                    raise WatchExpired
                raise PeerError(f"the API server ends the watch: {_text(thing, 'message') or shown(line)}")
            case _:
                raise PeerError(f"the API server sent {shown(line)}, which is not an event of a watch")
        # Bookmarks have a version too, so that it stays recent while no pod changes.
        self.version = _text(thing, "metadata", "resourceVersion") or self.version

    def _see(self, key: tuple[str, str], thing: object) -> None:
        is_leaving = _at(thing, "metadata", "deletionTimestamp") is not None
        problem = "" if is_leaving else next(_problems(_at(thing, "status")), "")
        kills = frozenset(_memory_kills(_at(thing, "status")))
        is_new, before = key not in self._pods, self._pods.get(key, _Pod())
        self._pods[key] = _Pod(is_leaving=is_leaving, problem=problem, memory_kills=before.memory_kills | kills)
        # Each later change of a pod repeats its state, and must be reported only once.
        if is_leaving and not before.is_leaving:
            self._leave(key[0])
        # A pod that is listed for the first time may have been killed under an earlier master, which knew.
        if kills - before.memory_kills and not is_new:
            self._ran_out(key[0])
        if problem and problem != before.problem:
            self._report(f"pod {key[0]}: {problem}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pod:
    is_leaving: bool = False
    problem: str = ""
    """Why it does not run."""
    memory_kills: frozenset[str] = frozenset()
    """The ids of containers that were killed for their memory."""


def _memory_kills(status: object) -> Iterator[str]:
    for container in _list(status, "containerStatuses"):
        for state in ("state", "lastState"):
            ended = _at(container, state, "terminated")
            if _text(ended, "reason") == _OUT_OF_MEMORY:
                yield _text(ended, "containerID")


def _problems(status: object) -> Iterator[str]:
    """Yield why the pod is not running; nothing while it is still starting."""
    if _text(status, "phase") == "Failed":
        yield _sentence("it has failed", status)
    for condition in _list(status, "conditions"):
        if _text(condition, "type") == "PodScheduled" and _text(condition, "reason") == "Unschedulable":
            yield _sentence("it has no place", condition)
    for container in _list(status, "containerStatuses"):
        waiting = _at(container, "state", "waiting")
        if any(_text(container, state, "terminated", "reason") == _OUT_OF_MEMORY for state in ("state", "lastState")):
            yield f"its container took more memory than its limit, and was killed ({_OUT_OF_MEMORY})"
        if _text(waiting, "reason") not in ("", "ContainerCreating", "PodInitializing"):
            yield _sentence("its container does not start", waiting)


def _sentence(what: str, thing: object) -> str:
    why = ": ".join(filter(None, (_text(thing, "reason"), _text(thing, "message"))))
    return f"{what} ({' '.join(why.split())})" if why else what


def _at(thing: object, *path: str) -> object:
    for key in path:
        thing = thing.get(key) if isinstance(thing, dict) else None
    return thing


def _text(thing: object, *path: str) -> str:
    value = _at(thing, *path)
    return value if isinstance(value, str) else ""


def _list(thing: object, key: str) -> list[object]:
    value = _at(thing, key)
    return value if isinstance(value, list) else []


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesAPI:
    """The API server of the cluster in which this process is a pod."""

    namespace: str
    account: Path
    """The directory of the service account's token and of the server's authority."""

    @classmethod
    def of_pod(cls) -> KubernetesAPI:
        """Return the API server that Kubernetes names to its pods.

        Raises UsageError if this process is not a pod, or the client is not installed.
        """
        account = Path(os.environ.get(_ACCOUNT_VARIABLE, _ACCOUNT))
        host, port = (os.environ.get(f"KUBERNETES_SERVICE_{what}", "") for what in ("HOST", "PORT"))
        try:
            namespace = (account / "namespace").read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError):
            namespace = ""
        if not host or not port.isdecimal() or not namespace:
            raise UsageError(
                "--kubernetes: this is no pod of Kubernetes with a service account; run it there, as "
                "deploy/kubernetes/master.yaml does, or leave it out and use --dial-in alone"
            )
        if importlib.util.find_spec("kubernetes") is None:
            raise UsageError(
                "--kubernetes: its client is not installed here; pip install kubernetes, or leave it out "
                "and use --dial-in alone"
            )
        return cls(namespace=namespace, account=account)

    async def watch(self, selector: str, version: str | None, take: Callable[[bytes], None]) -> None:
        """Pass every line of one watch to `take`, until the server ends it; `version` None starts from the beginning.

        Raises ConfigError if the service account cannot be used, WatchExpired, PeerError, OSError, and what `take`
        raises.
        """
        # The client blocks a thread. After a cancellation that thread runs until the server ends the watch.
        await trio.to_thread.run_sync(self._watch, selector, version, take, abandon_on_cancel=True)

    def _watch(self, selector: str, version: str | None, take: Callable[[bytes], None]) -> None:
        # The import takes half a second and 40 MiB, which other runs must not pay.
        from kubernetes import client, config
        from urllib3.exceptions import HTTPError, ProtocolError

        settings = client.Configuration(retries=False)  # PodFollower retries
        token, authority = str(self.account / "token"), str(self.account / "ca.crt")
        try:
            # The token changes from time to time, so each watch reads it again.
            config.incluster_config.InClusterConfigLoader(token, authority).load_and_set(settings)
        except (config.ConfigException, OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"the service account in {self.account} cannot be used: {error}") from error
        settings.proxy = None  # the server is inside the cluster
        try:
            with client.ApiClient(settings) as api, ExitStack() as stack:
                answer = client.CoreV1Api(api).list_namespaced_pod(
                    self.namespace,
                    watch=True,
                    label_selector=selector,
                    resource_version=version,
                    allow_watch_bookmarks=True,
                    timeout_seconds=_WATCH_S,
                    _request_timeout=(_CONNECT_S, _SILENCE_S),
                    _preload_content=False,  # the client's models of pods are stricter than servers are
                )
                stack.callback(answer.close)  # also where `take` raises, or an earlier watch was left behind
                with suppress(ProtocolError):  # the answer was cut off; the next watch continues from there
                    for line in answer:
                        # An answer that is cut off ends within a line, which the next watch brings again.
                        if line.endswith(b"\n") and line.strip():
                            trio.from_thread.run_sync(take, line)
        except client.ApiException as error:
            if error.status == _GONE:
                raise WatchExpired from error
            if not error.status:  # no answer, because the cluster's authority did not sign the certificate
                raise OSError(str(error.__context__ or error.reason)) from error
            raise PeerError(_refusal(error)) from error
        except HTTPError as error:
            raise OSError(str(error.__cause__ or error)) from error


def _refusal(error: ApiException) -> str:
    try:
        message = _text(load_json(error.body or ""), "message")
    except ValueError:
        message = ""
    return f"the API server answers {error.status}{f': {message}' if message else ''}"


class PodFollower:
    """Lets nodes leave when their pods are deleted, and reports pods that do not start."""

    def __init__(
        self,
        source: KubernetesAPI,
        selector: str,
        callers: DialedInNodes,
        *,
        first_wait_s: float = _FIRST_WAIT_S,
        none_s: float = _NONE_S,
    ) -> None:
        """`first_wait_s`, the pause between watches, doubles while none works; `none_s` without a pod is reported."""
        self._source = source
        self._selector = selector
        self._callers = callers
        self._first_wait_s = first_wait_s
        self._none_s = none_s
        self._wait_s = first_wait_s
        self._problem = ""
        self._watch = PodWatch(leave=callers.leave, ran_out=callers.ran_out_of_memory, report=callers.report)

    async def run(self) -> None:
        """Follow the pods, until cancelled; report failures and retry."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._report_none)
            while True:
                try:
                    await self._source.watch(self._selector, self._watch.version, self._take)
                except WatchExpired:
                    self._watch.version = None
                except (ConfigError, PeerError) as error:
                    # An event that cannot be used would fail each watch that begins before it.
                    self._watch.version = None
                    self._note(str(error))
                except OSError as error:
                    self._note(f"the API server cannot be asked: {error}")
                await trio.sleep(self._wait_s)
                self._wait_s = min(2 * self._wait_s, _LONGEST_WAIT_S)

    def _take(self, line: bytes) -> None:
        self._watch.take(line)
        # An event shows that the watch works again.
        self._wait_s, self._problem = self._first_wait_s, ""

    def _note(self, problem: str) -> None:
        if problem != self._problem:
            self._problem = problem
            self._callers.report(f"pods are not followed: {problem}; it is tried again, and the run continues without")

    async def _report_none(self) -> None:
        await trio.sleep(self._none_s)
        if not self._watch.num_pods and not self._problem:
            where = f"namespace {self._source.namespace}"
            self._callers.report(f"no pod of {where} has the labels {self._selector}; are they what its template says?")
