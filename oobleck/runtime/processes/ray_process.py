"""Talks to a Ray cluster for the master: `python -m oobleck.runtime.processes.ray_process`.

A process of its own, for Ray brings threads, signal handlers and a second of imports along. It keeps an actor on every
node, whose process has `oobleck node` as its child. It writes a line for each thing that people should know, and an
empty one whenever Ray has answered: calls into Ray block for a minute where its head is gone. Actors are detached: they
outlive this process and the master, and those of the next one find them by name. At a line `end` they are ended; where
the input just ends, the master has died, and they stay.
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
_INTERVAL_S = 1.0
_AGAIN_S = 30.0
_ANSWER_S = 10.0
_STOP_S = 5.0
_TURN_S = 1.0  # how long an end waits for a look at the nodes that is under way; one whose Ray is gone never returns
_KILL_S = 3.0
_SET_PARENT_DEATH_SIGNAL = 1


_OUTPUT = 1


class _NodeActor:
    """Runs `oobleck node` on its node of Ray's, in a process below its own."""

    def __init__(self, line: str, variables: Mapping[str, str], keys: str) -> None:
        self._keys = os.memfd_create("node.json")  # on no disk, and gone with the two processes
        self.update(keys)
        libc = ctypes.CDLL(None)
        self._process = subprocess.Popen(
            module_command("oobleck", "node", f"/proc/self/fd/{self._keys}", line),
            env={**os.environ, **variables},
            stdin=subprocess.DEVNULL,
            pass_fds=[self._keys],
            # Where this process is killed, that is the node's notice: it leaves the run if it still can.
            preexec_fn=lambda: libc.prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM),
        )

    def update(self, keys: str) -> None:
        """Name the newest master: `oobleck node` reads this before each call."""
        os.ftruncate(self._keys, 0)
        os.pwrite(self._keys, keys.encode(), 0)

    def exit_code(self) -> int | None:
        """How it has ended; None while it runs."""
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

    @property
    def line(self) -> str:
        return f"{self.name} slots={self.num_gpus}" if self.num_gpus else self.name


def _living_nodes() -> list[_RayNode]:
    """The nodes that may run work. Ray gives several raylets of one machine one name."""
    found = [each for each in ray.nodes() if each["Alive"] and each["Resources"].get("CPU", 0) >= 1]
    names = Counter(each["NodeName"] for each in found)
    return [
        _RayNode(
            node_id=each["NodeID"],
            name=each["NodeName"] if names[each["NodeName"]] == 1 else f"{each['NodeName']}-{each['NodeID'][:8]}",
            num_gpus=int(each["Resources"].get("GPU", 0)),
        )
        for each in found
    ]


class _Actors:
    """One on every node, started again where it has failed; none where the run has let the node go."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._keys = ""
        self._actors: dict[str, Any] = {}
        self._again_s: dict[str, float] = {}
        self._let_go: set[str] = set()
        self._turn = threading.Lock()

    def tend(self, keys: str) -> None:
        """Look at every node once; nodes need `keys`."""
        with self._turn:
            self._keys = keys
            self._tend()

    def _tend(self) -> None:
        nodes = {node.node_id: node for node in _living_nodes()}
        for node_id in self._actors.keys() - nodes.keys():
            del self._actors[node_id]  # with its node; connections have said so long before
        for node_id, node in nodes.items():
            _say("")
            if node_id in self._actors:
                self._look_after(node)
            elif node_id not in self._let_go and time.monotonic() >= self._again_s.get(node_id, 0.0):
                self._start(node)

    def _start(self, node: _RayNode) -> None:
        """Start an actor, or find the one that a master before has started there."""
        variables = {"OOBLECK_ORIGIN": f"Ray node {node.node_id[:12]}", "OOBLECK_GRANT": node.node_id}
        self._again_s[node.node_id] = time.monotonic() + _AGAIN_S
        actor = self._actors[node.node_id] = (
            ray.remote(_NodeActor)
            .options(
                name=f"{self._run_id} {node.node_id}",
                lifetime="detached",
                get_if_exists=True,
                num_cpus=1,
                num_gpus=node.num_gpus,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node.node_id, soft=False),
            )
            .remote(node.line, variables, self._keys)
        )
        actor.update.remote(self._keys)

    def _look_after(self, node: _RayNode) -> None:
        actor = self._actors[node.node_id]
        ready, _ = ray.wait([asked := actor.exit_code.remote()], timeout=_ANSWER_S)
        if not ready:
            return  # it waits for its turn: something else has the node's resources
        try:
            code = ray.get(asked)
        except RayError as error:
            _say(f"the actor on {node.name} has failed: {str(error).splitlines()[0]}")
            del self._actors[node.node_id]
            return
        if code is None:
            return
        if code == 0:
            self._let_go.add(node.node_id)
        else:
            _say(f"`oobleck node` on {node.name} has ended with exit code {code}; Ray's logs of the actor say why")
        ray.kill(actor)
        del self._actors[node.node_id]

    def end(self) -> None:
        """End all of them, also where Ray's head is gone: actors are called without it, and killed by it."""
        self._turn.acquire(timeout=_TURN_S)
        actors = list(self._actors.values())
        if not actors:
            return
        stopping = [actor.stop.remote() for actor in actors]
        ray.wait(stopping, num_returns=len(stopping), timeout=2 * _STOP_S)
        killing = threading.Thread(target=lambda: [ray.kill(actor) for actor in actors], daemon=True)
        killing.start()
        killing.join(_KILL_S)


def _end_when_told(actors: _Actors) -> None:
    """Wait for the line that ends all, or for the end of the input. In a thread, for Ray may hold the main one up."""
    if sys.stdin.readline() == "end\n":
        actors.end()
    os._exit(0)  # Ray's own threads do not hold this up


def _say(text: str) -> None:
    os.write(_OUTPUT, f"{text}\n".encode())


def _own_output() -> int:
    """A descriptor for what we say: what Ray and its libraries print goes where errors go, and so into the log."""
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
        keys = sys.stdin.readline()  # what nodes need; {ip} in it is this machine's address
        threading.Thread(target=_end_when_told, args=[actors], daemon=True).start()
    try:
        ray.init(address="auto", namespace=_NAMESPACE, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, RuntimeError) as error:
        sys.exit(f"no Ray cluster can be joined from here: {str(error).splitlines()[0]}")
    if arguments.list:
        for node in _living_nodes():
            _say(node.name)
        return
    keys = keys.replace("{ip}", get_node_ip_address())
    while True:
        try:
            actors.tend(keys)
            _say("")
        except RayError as error:
            _say(f"Ray does not answer: {str(error).splitlines()[0]}")
        time.sleep(_INTERVAL_S)


if __name__ == "__main__":
    _OUTPUT = _own_output()
    main()
