"""Groups that are put aside end, whatever is stuck in them; those that go on are not disturbed."""

from __future__ import annotations

import gc
import json
import os
import random
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import psutil
import pytest
import torch
from torch.distributed import PrefixStore

from oobleck.control.protocol import GroupValue, WorkerAddress
from oobleck.control.steps import GroupKey
from oobleck.control.steps.commit_state import Interrupted, PeerLost
from oobleck.errors import ConfigError
from oobleck.planner import WorkerId
from oobleck.training.comm.rendezvous import RendezvousStore, RendezvousTable
from tests.training.freezing_peer import A, B, C, keys_of
from tests.training.table import LinkedTable, acquaint

PATIENCE_S = 60.0
NUM_TRIES = 60


def never() -> bool:
    return False


def members(worker_ids: Sequence[WorkerId], *others: WorkerAddress) -> list[LinkedTable]:
    """Members in this process that know where all listen, and these others."""
    made = [LinkedTable(worker_id) for worker_id in worker_ids]
    acquaint(made, others)
    return made


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(PATIENCE_S) for future in [pool.submit(call) for call in calls]]


def holdings() -> tuple[int, int]:
    """Descriptors and threads of this process."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def until(holds: Callable[[], bool]) -> bool:
    end_s = time.monotonic() + PATIENCE_S
    while not holds() and time.monotonic() < end_s:
        time.sleep(0.02)
    return holds()


def settled(look: Callable[[], tuple[int, int]], expected: tuple[int, int] | None) -> tuple[int, int]:
    """What is held once it is no more than expected; without an expectation, once it stays for more than a second.

    It may be less: on a busy machine what an earlier test has left may take longer to end.
    """
    end_s = time.monotonic() + PATIENCE_S
    looks: list[tuple[int, int]] = []
    while time.monotonic() < end_s:
        looks.append(look())
        if is_within(looks[-1], expected) if expected else looks[-30:] == [looks[-1]] * 30:
            break
        time.sleep(0.05)
    return looks[-1]


def is_within(held: tuple[int, int], expected: tuple[int, int]) -> bool:
    return all(now <= before for now, before in zip(held, expected, strict=True))


class Peer:
    """The member c, in a process of its own."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.training.freezing_peer"]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3]
        )
        self._writing = threading.Lock()
        self._told: SimpleQueue[dict[str, Any]] = SimpleQueue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        ready = self.hear()
        self.address = WorkerAddress(
            worker_id=C, host=ready["host"], port=ready["port"], ticket=bytes.fromhex(ready["ticket"])
        )

    def say(self, **words: object) -> None:
        assert self.process.stdin is not None
        with self._writing:
            self.process.stdin.write(json.dumps(words) + "\n")
            self.process.stdin.flush()

    def holdings(self) -> tuple[int, int]:
        self.say(count=True)
        told = self.hear()
        return told["descriptors"], told["threads"]

    def hear(self) -> dict[str, Any]:
        return self._told.get(timeout=PATIENCE_S)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._told.put(json.loads(line))

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


@pytest.fixture
def peer() -> Iterator[Peer]:
    peer = Peer()
    try:
        yield peer
    finally:
        peer.close()


def test_nothing_is_left_of_groups_in_which_all_waits_for_a_frozen_peer(peer: Peer) -> None:
    """While it is frozen, and after it goes on: neither here nor there."""
    one, two = members((A, B), peer.address)
    for address in (one.links.address, two.links.address):
        peer.say(know=[*address.worker_id, address.host, address.port, address.ticket.hex()])
    here: list[tuple[int, int]] = []
    there: list[tuple[int, int]] = []
    for generation in range(1, 4):
        keys = keys_of(generation)
        peer.say(form=generation)
        at_once(
            partial(one.groups.form, keys.values(), never, generation=generation),
            partial(two.groups.form, [keys["all"]], never, generation=generation),
        )
        assert peer.hear() == {"formed": generation}
        os.kill(peer.process.pid, signal.SIGSTOP)
        wait_in_vain(one, two, keys)
        for member in (one, two):
            member.groups.keep_only([], generation=generation + 1)
        if generation > 1:  # some threads are made once
            here.append(settled(holdings, here[-1] if here else None))
        assert (one.groups.num_received, two.groups.num_received) == (0, 0)
        os.kill(peer.process.pid, signal.SIGCONT)
        peer.say(let_go=generation)
        if generation > 1:
            there.append(settled(peer.holdings, there[-1] if there else None))
    assert is_within(here[1], here[0]), here
    assert is_within(there[1], there[0]), there


def wait_in_vain(one: LinkedTable, two: LinkedTable, keys: dict[str, GroupKey]) -> None:
    """Sum with the frozen peer, send to it, and receive from it, on every kind of thread that does."""
    pipeline_rank = one.groups[keys["lane"]]
    is_over = threading.Event()
    sums = [member.groups[keys["all"]].all_reduce(torch.ones(9)) for member in (one, two) * 3]
    inbox = pipeline_rank.inbox(1)
    room = torch.empty(4)
    inbox.expect(1, lambda tag: (pipeline_rank.post_receive(room, 1, tag), room))
    sends = [pipeline_rank.send(torch.ones(1 << 20), 1, tag) for tag in (2, 3)]

    def give_up(wait: Callable[[Callable[[], bool]], object]) -> None:
        with pytest.raises((Interrupted, PeerLost)):
            wait(is_over.is_set)

    waiting = threading.Thread(target=give_up, args=(inbox.take,))
    waiting.start()
    is_over.set()
    one.waiter.announce()
    waiting.join()
    give_up(lambda interrupted: one.waiter.call(sends[0].wait, interrupted))
    give_up(sums[0].wait)


def test_a_message_or_a_sum_may_take_longer_than_a_group_may_take_to_form() -> None:
    """A stage may wait for minutes while the one before it compiles, or computes a long microbatch."""
    two = [LinkedTable(worker_id, forming_timeout_s=3.0) for worker_id in (A, B)]
    acquaint(two)
    key = GroupKey("pipeline", 1, (A, B))
    at_once(*(partial(member.groups.form, [key], never, generation=1) for member in two))
    groups = [member.groups[key] for member in two]
    received, summed = torch.zeros(2), torch.ones(2)
    reduction = groups[1].all_reduce(summed)
    is_late = threading.Timer(4.0, lambda: groups[0].send(torch.ones(2), 1, 7).wait())
    is_late.start()
    groups[1].receive(received, 0, 7)
    is_late.join()
    assert received.tolist() == [1.0, 1.0]
    groups[0].all_reduce(torch.ones(2)).wait(never)
    reduction.wait(never)
    assert summed.tolist() == [2.0, 2.0]
    for member in two:
        member.groups.keep_only([], generation=2)
        member.links.close()


def test_members_gather_and_share_out_what_each_of_them_has_and_a_frozen_one_can_be_left() -> None:
    two = [LinkedTable(worker_id, forming_timeout_s=30.0) for worker_id in (A, B)]
    acquaint(two)
    key = GroupKey("stage", 1, (A, B))
    at_once(*(partial(member.groups.form, [key], never, generation=1) for member in two))
    groups, rows = [member.groups[key] for member in two], [torch.zeros(2, 3) for _ in two]
    gathers = [
        group.all_gather(each, torch.full((3,), -float(group.rank))) for group, each in zip(groups, rows, strict=True)
    ]
    for gather in gathers:
        gather.join(never)
    assert all(torch.equal(each.signbit(), torch.tensor([[True] * 3] * 2)) for each in rows), "-0.0 is no 0.0"
    assert rows[0].tolist() == rows[1].tolist() == [[0.0] * 3, [-1.0] * 3]
    parts = [torch.tensor([[1.0, 2.0], [3.0, 4.0]]) * (1 + group.rank) for group in groups]
    sums = [group.reduce_scatter(each) for group, each in zip(groups, parts, strict=True)]
    for posted, _ in sums:
        posted.join(never)
    assert [own.tolist() for _, own in sums] == [[3.0, 6.0], [9.0, 12.0]]
    assert parts[1].tolist() == [[2.0, 4.0], [6.0, 8.0]], "autograd may have given them"
    unanswered = groups[0].all_gather(rows[0], torch.ones(3))
    with pytest.raises(Interrupted):
        unanswered.join(lambda: True)
    for member in two:
        member.groups.keep_only([], generation=2)
        member.links.close()


def test_variables_that_would_mix_groups_up_have_no_effect() -> None:
    """With them, connections of groups that share a listener are told apart by nothing."""
    variables = {"TORCH_GLOO_LAZY_INIT": "1", "GLOO_ENABLE_RANK_AS_SEQUENCE_NUMBER": "1"}
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "from tests.training.comm.test_groups import overlapping_sums; print(overlapping_sums())",
        ],
        env={**os.environ, **variables},
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.stdout == f"{[[6.0, 4.0, 4.0]] * 3}\n", done.stderr


def overlapping_sums() -> list[list[float]]:
    """What three members get who sum in groups of all, and of each two."""
    three = members((A, B, C))
    keys = [GroupKey("reduce", 1, worker_ids) for worker_ids in ((A, B, C), (A, B), (A, C), (B, C))]

    def sums(member: LinkedTable) -> list[float]:
        own = {key: torch.full((3,), 2.0) for key in keys if member.worker_id in key.members}
        member.groups.form(own, never, generation=1)
        for each in [member.groups[key].all_reduce(tensor) for key, tensor in own.items()]:
            each.wait(never)
        return [float(tensor[0]) for tensor in own.values()]

    return at_once(*(partial(sums, member) for member in three))


def test_forming_that_is_given_up_ends_at_once_and_its_keys_are_not_kept() -> None:
    """The other member never comes."""
    alone, _ = members((A, B))
    before = threading.active_count()
    is_over = threading.Event()
    forming = threading.Thread(target=_form_in_vain, args=(alone, is_over))
    forming.start()
    assert until(lambda: alone.groups.num_received > 0)
    is_over.set()
    alone.waiter.announce()
    forming.join()
    assert until(lambda: threading.active_count() <= before)
    alone.groups.keep_only([], generation=2)
    assert alone.groups.num_received == 0
    alone.groups.take(GroupValue(generation=1, key="1/reduce/late/0", value=b"late"))
    assert alone.groups.num_received == 0


def test_groups_are_formed_beside_what_their_members_compute_and_are_there_once_that_was_waited_for() -> None:
    two = members((A, B))
    beside, needed = GroupKey("reduce", 1, (A, B)), GroupKey("transfer", 1, (A, B))

    def sums(member: LinkedTable) -> float:
        assert member.groups.form([needed], never, generation=1, beside=[needed, beside])
        with pytest.raises(KeyError):
            member.groups[beside]
        assert not member.groups.form([needed], never, generation=1), "others may be formed meanwhile"
        member.groups.keep_only([needed, beside], generation=1)
        member.groups.await_formed(never)
        assert not member.groups.form([], never, generation=1, beside=[needed, beside]), "all are there"
        tensor = torch.ones(3)
        member.groups[beside].all_reduce(tensor).wait(never)
        return float(tensor.sum())

    assert at_once(*(partial(sums, member) for member in two)) == [6.0, 6.0]
    for member in two:
        member.groups.keep_only([], generation=2)


def test_what_is_formed_beside_ends_when_it_is_abandoned_or_its_members_do_not_come() -> None:
    alone, _ = members((A, B))
    before = settled(holdings, None)
    key = GroupKey("reduce", 1, (A, B))
    assert alone.groups.form([], never, generation=1, beside=[key])
    alone.groups.abandon_forming()
    assert alone.groups.form([], never, generation=2, beside=[key])
    with pytest.raises(Interrupted):
        alone.groups.await_formed(lambda: True)
    alone.groups.abandon_forming()
    alone.groups.keep_only([], generation=3)
    left = before[0] + 2, before[1]  # both ends of the link to the one that never came
    assert is_within(settled(holdings, left), left)
    hasty = LinkedTable(A, forming_timeout_s=0.2)
    acquaint([hasty, *members((B,))])
    assert hasty.groups.form([], never, generation=1, beside=[key])
    with pytest.raises(PeerLost, match="forming groups of generation 1"):
        hasty.groups.await_formed(never)
    hasty.groups.keep_only([], generation=2)


def _form_in_vain(member: LinkedTable, is_over: threading.Event) -> None:
    with pytest.raises(Interrupted):
        member.groups.form([GroupKey("reduce", 1, (A, B))], is_over.is_set, generation=1)


@pytest.mark.slow
def test_forming_may_be_given_up_at_any_moment() -> None:
    """In a process of its own: Gloo ended it, with a signal, where a thread came late to a network that was over."""
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "from tests.training.comm.test_groups import give_up_often; give_up_often()",
        ],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def give_up_often() -> None:
    """Form groups of three members, and have each give them up within milliseconds."""
    three = members((A, B, C))
    chance = random.Random(0)

    def form(member: LinkedTable, generation: int, gives_up_s: float) -> None:
        keys = [GroupKey("reduce", generation, pair) for pair in ((A, B), (A, C), (B, C)) if member.worker_id in pair]
        is_over = threading.Event()

        def give_up() -> None:
            is_over.set()
            member.waiter.announce()

        timer = threading.Timer(gives_up_s, give_up)
        timer.start()
        with suppress(Interrupted, PeerLost):
            member.groups.form(keys[:1], is_over.is_set, generation=generation, beside=keys[1:])
            member.groups.await_formed(is_over.is_set)
        timer.cancel()
        member.groups.abandon_forming()
        member.groups.keep_only([], generation=generation + 1)

    for generation in range(1, NUM_TRIES + 1):
        at_once(*(partial(form, member, generation, chance.uniform(0.0, 0.01)) for member in three))
    os._exit(0)  # threads that Gloo keeps, for a peer that does not come, end within a minute


def test_sums_go_round_rings_in_which_each_has_two_neighbours() -> None:
    """However many they are, and after others have been put aside; nobody can connect to them any more by then."""
    seven = members([WorkerId(node=f"n{index}", device=0) for index in range(7)])
    worker_ids = tuple(member.worker_id for member in seven)
    kept, dropped = GroupKey("reduce", 1, worker_ids), GroupKey("reduce", 2, worker_ids)
    before = listening_ports()
    at_once(*(partial(member.groups.form, [kept, dropped], never, generation=1) for member in seven))
    ports = listening_ports() - before
    assert len(connections_to(ports)) == 7 + 7
    for generation in (2, 3):
        at_once(*(partial(member.groups.keep_only, [kept], generation=generation) for member in seven))
        at_once(*(partial(member.groups.form, [kept], never, generation=generation) for member in seven))

        def add_up(member: LinkedTable, size: int) -> float:
            tensor = torch.arange(size, dtype=torch.float64)
            member.groups[kept].all_reduce(tensor).wait(never)
            return float(tensor.sum())

        for size in (1, 3, 1000, 100_003):
            expected = 7.0 * size * (size - 1) / 2
            assert at_once(*(partial(add_up, member, size) for member in seven)) == [expected] * 7
    assert until(lambda: len(ports & listening_ports()) == 7)
    for member in seven:
        member.groups.keep_only([], generation=4)
        member.links.close()
    assert until(lambda: not ports & listening_ports())


def test_links_that_only_formed_a_group_end_when_it_is_put_aside() -> None:
    """The others live on: a worker is left with what it had before layers came to it from many."""
    others = listening_ports()
    five = members([WorkerId(node=f"n{index}", device=0) for index in range(5)])
    target, *sources = five
    kept = GroupKey("reduce", 1, tuple(member.worker_id for member in five))
    moving = [GroupKey("transfer", 1, (target.worker_id, source.worker_id)) for source in sources]
    at_once(*(partial(member.groups.form, [kept], never, generation=1) for member in five))
    for member in five:
        member.groups.keep_only([kept], generation=1)
    ports, before = listening_ports() - others, settled(holdings, None)
    forms = [
        partial(source.groups.form, [key], never, generation=1) for source, key in zip(sources, moving, strict=True)
    ]
    at_once(partial(target.groups.form, moving, never, generation=1), *forms)
    assert target.links.num_links >= 4  # more where both have called
    for member in five:
        member.groups.keep_only([kept, *moving], generation=1)
    for member in five:
        member.groups.put_aside(moving)

    def have_no_links() -> bool:
        for member in five:  # what somebody said late was read late, too
            member.groups.put_aside(())
        return all(member.links.num_links == 0 for member in five)

    assert until(have_no_links)
    assert is_within(settled(holdings, before), before)
    assert at_once(*(partial(ones, member, kept) for member in five)) == [5.0] * 5
    for member in five:
        member.groups.keep_only([], generation=2)
        member.links.close()
    assert until(lambda: not ports & listening_ports())


def ones(member: LinkedTable, key: GroupKey) -> float:
    """One from each member."""
    tensor = torch.ones(1)
    member.groups[key].all_reduce(tensor).wait(never)
    return float(tensor)


def connections_to(ports: set[int]) -> list[int]:
    """Descriptors of what this process has accepted at ports of its own."""
    connections = psutil.Process().net_connections(kind="tcp")
    return [one.fd for one in connections if one.status == psutil.CONN_ESTABLISHED and one.laddr.port in ports]


@pytest.mark.parametrize("is_beside", [False, True])
def test_strangers_cannot_connect_to_groups_that_are_formed(is_beside: bool) -> None:
    """Each could hold a descriptor for ever; Gloo ends the process when there is none left.

    Nobody may have waited yet for those that are formed beside what is computed.
    """
    two = members((A, B))
    before = listening_ports()
    keys = [GroupKey("reduce", 1, (A, B)), GroupKey("evaluation", 1, (A, B))]
    now, later = ([], keys) if is_beside else (keys, [])
    at_once(*(partial(member.groups.form, now, never, generation=1, beside=later) for member in two))
    assert until(lambda: not any(thread.name == "abandonable" for thread in threading.enumerate()))
    ports = listening_ports() - before
    assert len(ports) == 4
    for port in ports:
        with pytest.raises(TimeoutError):
            socket.create_connection(("127.0.0.1", port), timeout=0.2)
    for member in two:
        member.groups.abandon_forming()
        member.groups.keep_only([], generation=2)
    assert until(lambda: listening_ports() <= before)


def listening_ports() -> set[int]:
    """The TCP ports on which this process listens."""
    connections = psutil.Process().net_connections(kind="tcp")
    return {one.laddr.port for one in connections if one.status == psutil.CONN_LISTEN}


def test_groups_that_are_formed_while_others_end_can_end_too() -> None:
    """What ends leaves its descriptors' numbers to what is opened; a group that took the one for the other would hold
    its connections for ever, and who waits for its member as well."""
    two = members((A, B))
    keys = [GroupKey("transfer", generation, (A, B)) for generation in range(1, 25)]
    is_over = threading.Event()

    def end_others() -> None:
        while not is_over.is_set():
            others = [select.epoll() for _ in range(8)]
            time.sleep(3e-4)
            for other in others:
                other.close()
            time.sleep(3e-4)

    ending = threading.Thread(target=end_others)
    ending.start()
    try:
        at_once(*(partial(member.groups.form, keys, never, generation=1) for member in two))
    finally:
        is_over.set()
        ending.join()
    receiving = [partial(two[1].groups[key].receive, torch.empty(1), 0, 7) for key in keys]
    two[0].groups.keep_only([], generation=2)
    with ThreadPoolExecutor(len(keys)) as pool:
        for waiting in [pool.submit(receive) for receive in receiving]:
            with pytest.raises(PeerLost):
                waiting.result(PATIENCE_S)
    two[1].groups.keep_only([], generation=2)
    for member in two:
        member.links.close()


def test_too_few_descriptors_are_named_before_gloo_ends_the_process() -> None:
    (alone,) = members((A,))
    gc.collect()  # what tests before left open is not to be closed while this one counts
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 8, hard))
    try:
        with pytest.raises(ConfigError, match=r"\d+ open files .*`ulimit -n`"):
            alone.groups.form([GroupKey("reduce", 1, (A, B))], never, generation=1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_store_takes_the_keys_of_its_group_alone():
    """Torch's watchdog sets signals for a whole job past all prefixes, which would be told to all members and stay."""
    table, pushed = RendezvousTable(), list[str]()
    store = RendezvousStore(table, lambda key, _value: pushed.append(key), 10.0, group="1/reduce/a7")
    PrefixStore("1/reduce/a7/nccl", store).set("0", "the communicator's id")
    store.set("exception_dump", "0")
    assert pushed == ["1/reduce/a7/nccl/0"]
    assert len(table) == 1
    assert not store.check(["exception_dump"])
