"""Talks to a Ray cluster for the master: `python -m oobleck.runtime.processes.ray_process`.

It is a separate process because Ray brings threads, signal handlers and a second of imports. It keeps an actor on every
node, whose process has `oobleck node` as its child. It prints a line for each event that people should know, and an
empty one whenever Ray answers. A line `end` ends the actors.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util import get_node_ip_address
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from oobleck.runtime.python_process import module_command

_NAMESPACE = "oobleck"
_ZONE = "ray.io/availability-zone"
_INTERVAL_S = 1.0
_AGAIN_S = 30.0
_ANSWER_S = 10.0
_STOP_S = 5.0
_TURN_S = 1.0  # how long `end` waits for `tend`, which never returns if Ray is gone
_KILL_S = 3.0
_SET_PARENT_DEATH_SIGNAL = 1
_OUTPUT = 1


class _NodeActor:
    """Runs `oobleck node` in a child process on a node of Ray's."""

    def __init__(self, line: str, variables: Mapping[str, str], keys: str) -> None:
        self._keys = os.memfd_create("node.json")  # never on a disk, and gone with the two processes
        self.update(keys)
        libc = ctypes.CDLL(None)
        self._process = subprocess.Popen(
            module_command("oobleck", "node", f"/proc/self/fd/{self._keys}", line),
            env={**os.environ, **variables},
            stdin=subprocess.DEVNULL,
            pass_fds=[self._keys],
            # If this process is killed, SIGTERM gives the node notice, so that it leaves the run if it still can.
            preexec_fn=lambda: libc.prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM),
        )

    def update(self, keys: str) -> None:
        """Replace the keys, which name the newest master; `oobleck node` reads them before each call."""
        os.ftruncate(self._keys, 0)
        os.pwrite(self._keys, keys.encode(), 0)

    def exit_code(self) -> int | None:
        return self._process.poll()

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()


@dataclass(frozen=True, slots=True, kw_only=True)
class _RayNode:
    node_id: str
    name: str
    num_gpus: int
    zone: str

    @property
    def line(self) -> str:
        line = f"{self.name} slots={self.num_gpus}" if self.num_gpus else self.name
        return f"{line} domain={self.zone}" if self.zone else line


def _living_nodes() -> list[_RayNode]:
    nodes = [each for each in ray.nodes() if each["Alive"] and each["Resources"].get("CPU", 0) >= 1]
    names = Counter(each["NodeName"] for each in nodes)  # several raylets on one machine share a name
    return [
        _RayNode(
            node_id=each["NodeID"],
            name=each["NodeName"] if names[each["NodeName"]] == 1 else f"{each['NodeName']}-{each['NodeID'][:8]}",
            num_gpus=int(each["Resources"].get("GPU", 0)),
            zone=(each.get("Labels") or {}).get(_ZONE, ""),  # older versions have no labels
        )
        for each in nodes
    ]


class _Actors:
    """Keeps an actor on every node that the run has not let go, and starts failed ones again."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._keys = ""
        self._actors: dict[str, Any] = {}
        self._again_s: dict[str, float] = {}
        self._let_go: set[str] = set()
        self._turn = threading.Lock()

    def tend(self, keys: str) -> None:
        """Visit every node once; actors that it starts get `keys`."""
        with self._turn:
            self._keys = keys
            nodes = {node.node_id: node for node in _living_nodes()}
            for node_id in self._actors.keys() - nodes.keys():
                del self._actors[node_id]  # its node is gone, which connections have revealed long before
            for node_id, node in nodes.items():
                # Calls into Ray block for a minute if its head is gone, so the master waits for a sign of each.
                _print("")
                if node_id in self._actors:
                    self._check(node)
                elif node_id not in self._let_go and time.monotonic() >= self._again_s.get(node_id, 0.0):
                    self._start(node)

    def _start(self, node: _RayNode) -> None:
        """Start an actor, or find the one that an earlier master has started there."""
        variables = {"OOBLECK_ORIGIN": f"Ray node {node.node_id[:12]}", "OOBLECK_GRANT": node.node_id}
        self._again_s[node.node_id] = time.monotonic() + _AGAIN_S
        actor = self._actors[node.node_id] = (
            ray.remote(_NodeActor)
            .options(
                # A detached actor outlives this process and the master, and the next master finds it by name.
                name=f"{self._run_id} {node.node_id}",
                lifetime="detached",
                get_if_exists=True,
                num_cpus=1,
                num_gpus=node.num_gpus,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node.node_id, soft=False),
            )
            .remote(node.line, variables, self._keys)
        )
        # An actor that an earlier master has started knows only that one's address.
        actor.update.remote(self._keys)

    def _check(self, node: _RayNode) -> None:
        actor = self._actors[node.node_id]
        answer = actor.exit_code.remote()
        ready, _ = ray.wait([answer], timeout=_ANSWER_S)
        if not ready:
            return  # other work holds the node's resources, so the actor still waits to start
        try:
            code = ray.get(answer)
        except RayError as error:
            _print(f"the actor on {node.name} has failed: {str(error).splitlines()[0]}")
            del self._actors[node.node_id]
            return
        if code is None:
            return
        if code == 0:
            self._let_go.add(node.node_id)
        else:
            _print(f"`oobleck node` on {node.name} has ended with exit code {code}; Ray's logs of the actor say why")
        ray.kill(actor)
        del self._actors[node.node_id]

    def end(self) -> None:
        self._turn.acquire(timeout=_TURN_S)
        actors = list(self._actors.values())
        if not actors:
            return
        # Calls of actors work without Ray's head; killing them may block without it.
        stopping = [actor.stop.remote() for actor in actors]
        ray.wait(stopping, num_returns=len(stopping), timeout=2 * _STOP_S)
        killing = threading.Thread(target=lambda: [ray.kill(actor) for actor in actors], daemon=True)
        killing.start()
        killing.join(_KILL_S)


def _end_on_request(actors: _Actors) -> None:
    """Wait for the line `end`, or for the end of the input, in a thread because Ray may block the main one."""
    # If the input ends without this line, the master has died, and the actors stay for the next one.
    if sys.stdin.readline() == "end\n":
        actors.end()
    os._exit(0)  # does not wait for Ray's own threads


def _print(text: str) -> None:
    os.write(_OUTPUT, f"{text}\n".encode())


def _own_output() -> int:
    """Return a descriptor of our standard output, and redirect what Ray and its libraries print to stderr."""
    ours = os.dup(1)
    os.dup2(2, 1)
    return ours


def main() -> None:
    """Keep `oobleck node` on all nodes of the cluster, or list them."""
    parser = argparse.ArgumentParser(description="Keep `oobleck node` on all nodes of a Ray cluster.")
    parser.add_argument("--list", action="store_true", help="print the nodes' names and end")
    parser.add_argument("--run", default="", help="id that distinguishes this run from others")
    arguments = parser.parse_args()
    actors, keys = _Actors(arguments.run), ""
    if not arguments.list:
        keys = sys.stdin.readline()  # the nodes' file, where {ip} stands for this machine's address
        threading.Thread(target=_end_on_request, args=[actors], daemon=True).start()
    try:
        ray.init(address="auto", namespace=_NAMESPACE, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, RuntimeError) as error:
        sys.exit(f"no Ray cluster can be joined from here: {str(error).splitlines()[0]}")
    if arguments.list:
        for node in _living_nodes():
            _print(node.name)
        return
    keys = keys.replace("{ip}", get_node_ip_address())
    while True:
        try:
            actors.tend(keys)
            _print("")
        except RayError as error:
            _print(f"Ray does not answer: {str(error).splitlines()[0]}")
        time.sleep(_INTERVAL_S)


if __name__ == "__main__":
    _OUTPUT = _own_output()
    main()
