"""What the master does with commands of its coordinator."""

from __future__ import annotations

from contextlib import suppress

import pytest
import trio
import trio.testing

from oobleck.control.events import AddRequested, Command, Connect, Disconnect, End, Event, StopRequested
from oobleck.control.protocol import BecomeRelay, Greeting, MasterMessage
from oobleck.job import ControlSpec, JobSpec, NodeSpec
from oobleck.roles.master import Master, RunClock
from oobleck.roles.master_ports import AgentConnection

from .virtual import AgentEnd, AgentLink, agent_hello

NODE = NodeSpec(name="node1", host="node1")


class Asking:
    """Has the node reached at the start, and again for each request."""

    def start(self, now_s: float) -> list[Command]:
        return [Connect(node=NODE)]

    def handle(self, now_s: float, event: Event) -> list[Command]:
        match event:
            case AddRequested(spec=spec):
                return [Connect(node=spec)]
            case StopRequested():
                return [End(exit_code=0, reason="done")]
        return []

    def next_deadline(self) -> float:
        return 3600.0

    def handle_deadline(self, now_s: float) -> list[Command]:
        return []


class Silent:
    """A cluster whose node does not answer."""

    def __init__(self) -> None:
        self.tries = 0
        self.under_way = 0

    async def reach(self, node: NodeSpec, *, attach: bool) -> AgentConnection:
        self.tries += 1
        self.under_way += 1
        try:
            await trio.sleep_forever()
        finally:
            self.under_way -= 1

    async def kill(self, node: NodeSpec) -> bool:
        return False

    async def clean(self, node: NodeSpec) -> None:
        pass


async def test_a_node_is_tried_by_one_task_at_a_time(autojump_clock: trio.testing.MockClock) -> None:
    """Two would each end the agent that the other has started."""
    cluster = Silent()
    master = Master(Asking(), JobSpec(), cluster=cluster, journal=[], profiles=None, clock=RunClock())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(master.run)
        await trio.sleep(1)
        master.submit(AddRequested(spec=NODE))
        await trio.sleep(1)
        assert (cluster.tries, cluster.under_way) == (2, 1)
        master.submit(StopRequested(now=True, exit_code=0, reason="done"))


class Cleaning(Silent):
    """A cluster that notes what it is asked, and takes a while to clean a node."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[str] = []

    async def reach(self, node: NodeSpec, *, attach: bool) -> AgentConnection:
        self.noted.append("reach")
        return await super().reach(node, attach=attach)

    async def clean(self, node: NodeSpec) -> None:
        await trio.sleep(5.0)
        self.noted.append("cleaned")


class LosingAtOnce(Asking):
    """Loses the node for each request, and takes it in again in the same turn."""

    def handle(self, now_s: float, event: Event) -> list[Command]:
        commands = super().handle(now_s, event)
        return [Disconnect(node=NODE.name), *commands] if isinstance(event, AddRequested) else commands


@pytest.mark.parametrize("_number", range(8))  # which of two tasks begins first is chance
async def test_a_node_that_is_taken_in_again_is_reached_once_it_is_cleaned(
    autojump_clock: trio.testing.MockClock, _number: int
) -> None:
    cluster = Cleaning()
    master = Master(LosingAtOnce(), JobSpec(), cluster=cluster, journal=[], profiles=None, clock=RunClock())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(master.run)
        await trio.sleep(1.0)
        master.submit(AddRequested(spec=NODE))
        await trio.sleep(10.0)
        assert cluster.noted == ["reach", "cleaned", "reach"]
        nursery.cancel_scope.cancel()


class Speaking:
    """A cluster whose agents say hello, and nothing more."""

    def __init__(self, nursery: trio.Nursery, *, takes_calls: bool) -> None:
        self.told: list[MasterMessage] = []
        self._nursery = nursery
        self._takes_calls = takes_calls

    async def reach(self, node: NodeSpec, *, attach: bool) -> AgentEnd:
        link = AgentLink()
        link.master.takes_calls = self._takes_calls
        self._nursery.start_soon(self._speak, link, node.name)
        return link.master

    async def _speak(self, link: AgentLink, node: str) -> None:
        assert isinstance(await link.agent.receive(), Greeting)
        await link.agent.send([agent_hello(node=node)])
        with suppress(trio.EndOfChannel):
            while True:
                self.told.append(await link.agent.receive())

    async def kill(self, node: NodeSpec) -> bool:
        return False

    async def clean(self, node: NodeSpec) -> None:
        pass


@pytest.mark.parametrize("takes_calls", [True, False])
async def test_only_agents_that_take_calls_become_relays(
    autojump_clock: trio.testing.MockClock, *, takes_calls: bool
) -> None:
    job = JobSpec(control=ControlSpec(relay_nodes=2, relay_fanout=2))
    async with trio.open_nursery() as nursery:
        cluster = Speaking(nursery, takes_calls=takes_calls)
        master = Master(Asking(), job, cluster=cluster, journal=[], profiles=None, clock=RunClock())
        nursery.start_soon(master.run)
        for name in ("node2", "node3"):
            await trio.sleep(0.1)
            master.submit(AddRequested(spec=NodeSpec(name=name, host=name)))
        await trio.sleep(2 * job.control.lease_s)
        assert cluster.told == ([BecomeRelay(position=0, fanout=2)] if takes_calls else [])
        nursery.cancel_scope.cancel()
