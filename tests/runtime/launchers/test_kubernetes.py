"""What pods mean to a run: watches of an API server, played by one of ours, in every way that they come."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from oobleck.errors import PeerError, UsageError
from oobleck.runtime.launchers import KubernetesAPI, PodFollower
from oobleck.runtime.launchers.kubernetes import PodWatch, WatchExpired
from tests.kubernetes_api import Answer, FakeAPI, bookmark, event, failure, gone, pod, serve_kubernetes_api
from tests.runtime.ssh_servers import until

LABELS = "app=oobleck,role=node"


class Callers:
    """Takes what a follower says of nodes."""

    def __init__(self) -> None:
        self.leaving: list[str] = []
        self.said: list[str] = []
        self.ran_out: list[str] = []
        self.watch = PodWatch(leave=self.leave, ran_out=self.ran_out_of_memory, report=self.report)

    def leave(self, node: str) -> None:
        self.leaving.append(node)

    def ran_out_of_memory(self, node: str) -> None:
        self.ran_out.append(node)

    def report(self, text: str) -> None:
        self.said.append(text)

    def play(self, *lines: bytes) -> None:
        for line in lines:
            self.watch.take(line)


# --- a watch, line by line -----------------------------------------------------------------------------------------


def test_a_deletion_is_a_notice_once_and_the_end_of_a_pod_is_none() -> None:
    callers = Callers()
    callers.play(
        event("ADDED", pod("oobleck-node-0", version=10)),
        event("ADDED", pod("oobleck-node-1", version=11)),
        event("MODIFIED", pod("oobleck-node-1", version=20)),
        event("MODIFIED", pod("oobleck-node-1", version=21, deleted=True)),
        event("MODIFIED", pod("oobleck-node-1", version=22, deleted=True)),
        event("DELETED", pod("oobleck-node-1", version=23, deleted=True)),
    )
    assert (callers.leaving, callers.said, callers.watch.version) == (["oobleck-node-1"], [], "23")
    callers.play(
        event("ADDED", pod("oobleck-node-1", uid="another", version=30)),
        event("MODIFIED", pod("oobleck-node-1", uid="another", version=31, deleted=True)),
    )
    assert callers.leaving == ["oobleck-node-1"] * 2, "another pod of the same name"


def test_a_pod_that_was_deleted_while_nobody_looked_is_noticed_when_all_are_listed_again() -> None:
    callers = Callers()
    callers.play(event("ADDED", pod("oobleck-node-0")), event("ADDED", pod("oobleck-node-0", deleted=True)))
    assert callers.leaving == ["oobleck-node-0"]
    callers.play(event("ADDED", pod("oobleck-node-0", uid="another", deleted=True)))
    assert callers.leaving == ["oobleck-node-0"] * 2


def test_bookmarks_move_the_place_to_continue_from() -> None:
    callers = Callers()
    callers.play(event("ADDED", pod("oobleck-node-0", version=10)), bookmark(900))
    assert (callers.watch.version, callers.watch.num_pods) == ("900", 1)


def test_a_version_that_the_server_has_forgotten_lists_all_pods_again() -> None:
    callers = Callers()
    callers.play(bookmark(10))
    with pytest.raises(WatchExpired):
        callers.play(gone(10))
    assert callers.watch.version is None


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"", "not JSON"),
        (b'{"type": "ADDED", "obj', "not JSON"),
        (b"[1, 2]", "not an event of a watch"),
        (b'{"type": "RENAMED", "object": {}}', "not an event of a watch"),
        (event("ERROR", failure(500, "InternalError", "etcdserver: leader changed")), "etcdserver: leader changed"),
    ],
)
def test_what_is_no_event_is_named(line: bytes, words: str) -> None:
    with pytest.raises(PeerError, match=words):
        Callers().play(line)


UNSCHEDULABLE = {
    "phase": "Pending",
    "conditions": [
        {
            "type": "PodScheduled",
            "status": "False",
            "reason": "Unschedulable",
            "message": "0/5 nodes are available: 5 Insufficient nvidia.com/gpu.",
        }
    ],
}
WAITING = {"name": "node", "ready": False, "lastState": {}, "state": {"waiting": {"reason": "ImagePullBackOff"}}}
STARTING = {**WAITING, "state": {"waiting": {"reason": "ContainerCreating"}}}
KILLED = {**WAITING, "lastState": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}, "state": {"running": {}}}
EVICTED = {"phase": "Failed", "reason": "Evicted", "message": "The node was low on resource: memory."}


def killed_for_memory(container: str, *, in_state: str) -> dict[str, Any]:
    ended = {"exitCode": 137, "reason": "OOMKilled", "containerID": f"containerd://{container}"}
    return {"phase": "Running", "containerStatuses": [{"name": "node", in_state: {"terminated": ended}}]}


def test_each_container_that_was_killed_for_its_memory_is_told_once() -> None:
    callers = Callers()
    callers.play(
        event("ADDED", pod("n", status=killed_for_memory("before this master", in_state="lastState"))),
        event("MODIFIED", pod("n", status=killed_for_memory("first", in_state="state"))),
        event("MODIFIED", pod("n", status=killed_for_memory("first", in_state="lastState"))),
    )
    assert callers.ran_out == ["n"]
    callers.play(event("MODIFIED", pod("n", status=killed_for_memory("second", in_state="state"))))
    assert callers.ran_out == ["n", "n"]


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (UNSCHEDULABLE, "it has no place (Unschedulable: 0/5 nodes are available: 5 Insufficient nvidia.com/gpu.)"),
        ({"phase": "Pending", "containerStatuses": [WAITING]}, "its container does not start (ImagePullBackOff)"),
        ({"phase": "Running", "containerStatuses": [KILLED]}, "its container took more memory than its limit"),
        (EVICTED, "it has failed (Evicted: The node was low on resource: memory.)"),
        ({"phase": "Pending", "containerStatuses": [STARTING]}, None),
        ({"phase": "Pending"}, None),
    ],
)
def test_why_a_pod_does_not_come_is_said_once(status: dict[str, object], words: str | None) -> None:
    callers = Callers()
    callers.play(*[event("MODIFIED", pod("oobleck-node-3", status=status))] * 2)
    assert [said.partition(": ")[2].startswith(words or "") for said in callers.said] == ([True] if words else [])


# --- the API server ------------------------------------------------------------------------------------------------


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeAPI]:
    with serve_kubernetes_api(tmp_path / "account") as api:
        for name, value in api.environment.items():
            monkeypatch.setenv(name, value)
        yield api


@pytest.fixture
def callers(api: FakeAPI, nursery: trio.Nursery) -> Callers:
    return Callers()


def follow(callers: Callers, nursery: trio.Nursery, **waits: float) -> None:
    nursery.start_soon(PodFollower(KubernetesAPI.of_pod(), LABELS, callers, first_wait_s=0.01, **waits).run)


async def test_pods_are_followed_through_cuts_and_a_forgotten_version(
    api: FakeAPI, callers: Callers, nursery: trio.Nursery
) -> None:
    api.answers += [
        Answer([event("ADDED", pod("oobleck-node-0", version=5)), bookmark(9)]),
        Answer([event("MODIFIED", pod("oobleck-node-0", version=12))], is_cut=True),
        Answer([gone(12)]),
        Answer([event("ADDED", pod("oobleck-node-0", version=50))]),
        Answer([json.dumps(failure(410, "Expired", "too old resource version: 50 (90)")).encode()], status=410),
    ]
    follow(callers, nursery)
    api.live.put(event("ADDED", pod("oobleck-node-0", version=91)))
    api.live.put(event("MODIFIED", pod("oobleck-node-0", version=92, deleted=True)))
    await until(lambda: callers.leaving)
    assert (callers.leaving, callers.said) == (["oobleck-node-0"], [])
    assert [asked.get("resourceVersion") for asked in api.asked] == [None, "9", "12", None, "50", None]
    assert {(asked["watch"], asked["labelSelector"], asked["allowWatchBookmarks"]) for asked in api.asked} == {
        ("true", LABELS, "true")
    }


async def test_a_server_that_refuses_is_named_once_and_asked_again(
    api: FakeAPI, callers: Callers, nursery: trio.Nursery
) -> None:
    said = 'pods is forbidden: User "system:serviceaccount:training:oobleck-master" cannot watch resource "pods"'
    api.answers += [Answer([json.dumps(failure(403, "Forbidden", said)).encode()], status=403)] * 2
    follow(callers, nursery)
    api.live.put(event("ADDED", pod("oobleck-node-0", deleted=True)))
    await until(lambda: callers.leaving)
    (told,) = callers.said
    assert told.startswith(f"pods are not followed: the API server answers 403: {said}; it is tried again")


async def test_a_server_that_is_not_there_or_not_the_clusters_own_is_named(
    api: FakeAPI, callers: Callers, nursery: trio.Nursery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serve_kubernetes_api(tmp_path / "other") as other:
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(other.port))
        follow(callers, nursery)
        await until(lambda: callers.said)
    assert "the API server cannot be asked: " in callers.said[0]
    assert "certificate" in callers.said[0]
    assert other.asked == [], "the token is not shown to it"


async def test_labels_that_no_pod_has_are_named(api: FakeAPI, callers: Callers, nursery: trio.Nursery) -> None:
    api.live.put(bookmark(1))
    follow(callers, nursery, none_s=0.3)
    await until(lambda: callers.said)
    assert callers.said == [f"no pod of namespace training has the labels {LABELS}; are they what its template says?"]


def test_outside_of_a_pod_there_is_no_api_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OOBLECK_SERVICE_ACCOUNT", str(tmp_path))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(UsageError, match="this is no pod of Kubernetes"):
        KubernetesAPI.of_pod()


def test_a_missing_client_is_named_before_anything_is_launched(api: FakeAPI, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    with pytest.raises(UsageError, match=r"pip install kubernetes"):
        KubernetesAPI.of_pod()


async def test_a_service_account_without_a_token_is_named(
    api: FakeAPI, callers: Callers, nursery: trio.Nursery
) -> None:
    (api.account / "token").unlink()
    follow(callers, nursery)
    await until(lambda: callers.said)
    assert f"the service account in {api.account} cannot be used" in callers.said[0]
