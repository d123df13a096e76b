"""Pods of Kubernetes on which `oobleck node` runs, followed through its API server: a pod's deletion is a notice.

The pods dial in by themselves, and connections say which are lost. The API adds what connections cannot say: that a
pod is about to be taken away, even where nobody can send its processes a SIGTERM any more, and why a pod does not come.

A watch is a GET whose answer has one event a line, and that ends after minutes. It continues from the version of the
last event; what a server has forgotten meanwhile (410) does not matter, for then all pods are listed again.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from oobleck.errors import ConfigError, PeerError, UsageError, shown
from oobleck.json_table import load_json

from .dial_in import DialedInNodes

if TYPE_CHECKING:
    from kubernetes.client import ApiException

_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
"""Where Kubernetes puts what a pod needs to ask its API server, unless the pod has it projected elsewhere."""
_ACCOUNT_VARIABLE = "OOBLECK_SERVICE_ACCOUNT"
_WATCH_S = 240  # the server ends a watch after so long: less than what proxies in between are patient for
_SILENCE_S = 300.0
"""A server that says nothing for so long is gone: it ends the watch before, and sends bookmarks every minute."""
_CONNECT_S = 10.0
_FIRST_WAIT_S = 1.0
_LONGEST_WAIT_S = 30.0
_NONE_S = 15.0
"""After so long without any pod that is reported: others of the same manifests may be made a moment later."""
_GONE = 410


class WatchExpired(Exception):
    """The server does not know any more what came after the last event: all pods have to be listed again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pod:
    uid: str
    is_going: bool
    problem: str
    """Why it does not run, or did not; empty where nothing is wrong."""


class PodWatch:
    """Follows the events of a watch; says which pods are about to be taken away, and which do not come, and why."""

    def __init__(self, *, leave: Callable[[str], None], report: Callable[[str], None]) -> None:
        """`leave` is called with the name of a pod once it is deleted, `report` with what people should read."""
        self.version: str | None = None
        """The last event's, from which a next watch continues; None lists all pods."""
        self._leave = leave
        self._report = report
        self._pods: dict[str, _Pod] = {}

    @property
    def num_pods(self) -> int:
        return len(self._pods)

    def take(self, line: bytes) -> None:
        """Take an event. Raises WatchExpired, or PeerError for what is no event."""
        try:
            event = load_json(line)
        except ValueError as error:
            raise PeerError(f"the API server says what is not JSON: {shown(line)}") from error
        kind, thing = _text(event, "type"), _at(event, "object")
        match kind:
            case "ADDED" | "MODIFIED":
                self._see(_text(thing, "metadata", "name"), _pod(thing))
            case "DELETED":
                self._pods.pop(_text(thing, "metadata", "name"), None)
            case "BOOKMARK":
                pass
            case "ERROR":
                if _at(thing, "code") == _GONE:
                    self.forget()
                    raise WatchExpired
                raise PeerError(f"the API server ends the watch: {_text(thing, 'message') or shown(line)}")
            case _:
                raise PeerError(f"the API server says {shown(line)}, which is no event of a watch")
        self.version = _text(thing, "metadata", "resourceVersion") or self.version

    def forget(self) -> None:
        """Begin with a list of all pods next time."""
        self.version = None

    def _see(self, name: str, pod: _Pod) -> None:
        before = self._pods.get(name)
        if before is not None and before.uid != pod.uid:
            before = None  # deleted unseen, and made again by the same name
        self._pods[name] = pod
        if pod.is_going and (before is None or not before.is_going):
            self._leave(name)
        if pod.problem and (before is None or before.problem != pod.problem):
            self._report(f"pod {name}: {pod.problem}")


def _pod(thing: object) -> _Pod:
    uid, deleted = _text(thing, "metadata", "uid"), _at(thing, "metadata", "deletionTimestamp")
    problem = next(_problems(_at(thing, "status")), "") if deleted is None else ""
    return _Pod(uid=uid, is_going=deleted is not None, problem=problem)


def _problems(status: object) -> Iterator[str]:
    """Yield why the pod is not running; nothing while it is still starting."""
    if _text(status, "phase") == "Failed":
        yield _sentence("it has failed", status)
    for condition in _list(status, "conditions"):
        if _text(condition, "type") == "PodScheduled" and _text(condition, "reason") == "Unschedulable":
            yield _sentence("it has no place", condition)
    for container in _list(status, "containerStatuses"):
        waiting, ended = _at(container, "state", "waiting"), _at(container, "lastState", "terminated")
        if _text(ended, "reason") == "OOMKilled":
            yield "its container took more memory than its limit, and was killed (OOMKilled)"
        if _text(waiting, "reason") not in ("", "ContainerCreating", "PodInitializing"):
            yield _sentence("its container does not start", waiting)


def _sentence(what: str, thing: object) -> str:
    said = ": ".join(filter(None, (_text(thing, "reason"), _text(thing, "message"))))
    return f"{what} ({' '.join(said.split())})" if said else what


def _at(thing: object, *path: str) -> object:
    """A value in maps of maps; None where there is none."""
    for key in path:
        thing = thing.get(key) if isinstance(thing, dict) else None
    return thing


def _text(thing: object, *path: str) -> str:
    found = _at(thing, *path)
    return found if isinstance(found, str) else ""


def _list(thing: object, *path: str) -> list[object]:
    found = _at(thing, *path)
    return found if isinstance(found, list) else []


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesAPI:
    """The API server of the cluster that this process is a pod of."""

    namespace: str
    account: Path
    """A directory with the service account's token, which changes from time to time, and the server's authority."""

    @classmethod
    def of_pod(cls) -> KubernetesAPI:
        """The one that Kubernetes names to its pods. Raises UsageError elsewhere, and where its client is missing."""
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
                "--kubernetes: its client is not installed here; pip install 'oobleck[kubernetes]', or leave it out "
                "and use --dial-in alone"
            )
        return cls(namespace=namespace, account=account)

    async def watch(self, selector: str, version: str | None, take: Callable[[bytes], None]) -> None:
        """Hand every line of one watch to `take`, until the server ends it; from the start where `version` is None.

        Raises ConfigError where the service account cannot be used, WatchExpired, PeerError, OSError, and what `take`
        raises. The client blocks a thread; one that is cancelled is left to the end of its watch.
        """
        await trio.to_thread.run_sync(self._watch, selector, version, take, abandon_on_cancel=True)

    def _watch(self, selector: str, version: str | None, take: Callable[[bytes], None]) -> None:
        # Half a second and 40 MiB, which no other run has a use for.
        from kubernetes import client, config
        from urllib3.exceptions import HTTPError, ProtocolError

        settings = client.Configuration(retries=False)  # who follows has waits of its own
        token, authority = str(self.account / "token"), str(self.account / "ca.crt")
        try:
            config.incluster_config.InClusterConfigLoader(token, authority).load_and_set(settings)
        except (config.ConfigException, OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"the service account in {self.account} cannot be used: {error}") from error
        settings.proxy = None  # the server is inside of the cluster
        try:
            with client.ApiClient(settings) as api:
                answer = client.CoreV1Api(api).list_namespaced_pod(
                    self.namespace,
                    watch=True,
                    label_selector=selector,
                    resource_version=version,
                    allow_watch_bookmarks=True,
                    timeout_seconds=_WATCH_S,
                    _request_timeout=(_CONNECT_S, _SILENCE_S),
                    _preload_content=False,  # its own models of pods are stricter than servers are
                )
                with suppress(ProtocolError):  # an answer that is cut off: the next watch continues from there
                    for line in answer:
                        if line.endswith(b"\n") and line.strip():
                            trio.from_thread.run_sync(take, line)
        except client.ApiException as error:
            if error.status == _GONE:
                raise WatchExpired from error
            if not error.status:  # none was answered: the certificate is not that of the cluster's authority
                raise OSError(str(error.__context__ or error.reason)) from error
            raise PeerError(_refusal(error)) from error
        except HTTPError as error:
            raise OSError(str(error.__cause__ or error)) from error


def _refusal(error: ApiException) -> str:
    try:
        said = _text(load_json(error.body or ""), "message")
    except ValueError:
        said = ""
    return f"the API server answers {error.status}{f': {said}' if said else ''}"


class PodFollower:
    """Has nodes leave whose pods are deleted, and reports which pods do not come."""

    def __init__(
        self,
        source: KubernetesAPI,
        selector: str,
        callers: DialedInNodes,
        *,
        first_wait_s: float = _FIRST_WAIT_S,
        none_s: float = _NONE_S,
    ) -> None:
        """`first_wait_s` is before a next watch, and doubles while none works; `none_s` before it is said that no pod
        is there.
        """
        self._source = source
        self._selector = selector
        self._callers = callers
        self._first_wait_s = first_wait_s
        self._none_s = none_s
        self._wait_s = first_wait_s
        self._problem = ""
        self._watch = PodWatch(leave=callers.leave, report=callers.report)

    async def run(self) -> None:
        """Follow the pods, until cancelled. The run continues while that is not possible."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._report_none)
            while True:
                try:
                    await self._source.watch(self._selector, self._watch.version, self._take)
                except WatchExpired:
                    self._watch.forget()
                except (ConfigError, PeerError) as error:
                    self._watch.forget()
                    self._note(str(error))
                except OSError as error:
                    self._note(f"the API server cannot be asked: {error}")
                await trio.sleep(self._wait_s)
                self._wait_s = min(2 * self._wait_s, _LONGEST_WAIT_S)

    def _take(self, line: bytes) -> None:
        self._watch.take(line)
        self._wait_s, self._problem = self._first_wait_s, ""

    def _note(self, problem: str) -> None:
        """Report a problem, once until there is another."""
        if problem != self._problem:
            self._problem = problem
            self._callers.report(f"pods are not followed: {problem}; it is tried again, and the run continues without")

    async def _report_none(self) -> None:
        await trio.sleep(self._none_s)
        if not self._watch.num_pods and not self._problem:
            where = f"namespace {self._source.namespace}"
            self._callers.report(f"no pod of {where} has the labels {self._selector}; are they what its template says?")
