"""The node check over SSH: a probe on each node runs the tests that `NodeCheck` asks for."""

from __future__ import annotations

import platform
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import PurePosixPath
from typing import Final, TypeVar

import trio

from oobleck import __version__
from oobleck.control import node_check
from oobleck.job import NodeSpec
from oobleck.runtime.connections import NodeConnections

from .probe import RemoteProbe

_SOLO_TIMEOUT_S: Final = 60.0
_PAIR_TIMEOUT_S: Final = 15.0
_SLACK_S: Final = 5.0

Pair = tuple[str, str]
T = TypeVar("T")


async def check_nodes(
    nodes: Sequence[NodeSpec],
    connections: NodeConnections,
    *,
    python: str,
    directory: PurePosixPath,
    slow_factor: float,
    tell: Callable[[str], None] = lambda text: None,
) -> node_check.CheckReport:
    """Check nodes, whose faults are reported, not raised. Must be called within `open_ssh_loop`.

    `python` is the nodes' interpreter, `directory` the nodes' directory of all runs. `tell` receives progress messages.
    """
    began_s = trio.current_time()
    device_of = {spec.name: spec.device for spec in nodes}
    check = node_check.NodeCheck([spec.name for spec in nodes], slow_factor=slow_factor, device_of=device_of)
    num_rounds = 0
    async with trio.open_nursery() as nursery:
        cluster = _Cluster(nodes)
        try:
            tell(f"reaching {len(nodes)} node{'s' if len(nodes) != 1 else ''}")
            await cluster.start(connections, nursery, python=python, directory=directory)
            while (tests := check.next_round()) is not None:
                num_rounds += 1
                tell(_round_text(num_rounds, tests))
                check.take(await cluster.measure_alone(tests.solo), await cluster.measure_pairs(tests.pairs))
        finally:
            await cluster.aclose()
        nursery.cancel_scope.cancel()
    verdict = check.verdict()
    return node_check.CheckReport(
        nodes=tuple(cluster.describe(node) for node in verdict.nodes),
        links=verdict.links,
        exchanges=tuple(cluster.exchanges),
        num_rounds=num_rounds,
        elapsed_s=trio.current_time() - began_s,
    )


class _Cluster:
    def __init__(self, nodes: Sequence[NodeSpec]) -> None:
        self._probes = {spec.name: RemoteProbe(spec, self._pass_on) for spec in nodes}
        self._versions = _our_versions()
        self._num_pairs = 0
        self.exchanges: list[tuple[str, str, float, float]] = []

    async def start(
        self, connections: NodeConnections, nursery: trio.Nursery, *, python: str, directory: PurePosixPath
    ) -> None:
        async def start(probe: RemoteProbe) -> None:
            await probe.start(connections, nursery, python=python, directory=directory)

        await _together(start, self._probes.values())

    async def aclose(self) -> None:
        await _together(RemoteProbe.aclose, self._probes.values())

    async def measure_alone(self, nodes: Iterable[str]) -> list[node_check.SoloResult]:
        # Nodes that share a machine are measured one after the other, because they would slow each other down.
        by_machine: defaultdict[str, list[str]] = defaultdict(list)
        for node in nodes:
            by_machine[self._probes[node].machine].append(node)
        results: list[node_check.SoloResult] = []

        async def measure(names: Sequence[str]) -> None:
            results.extend([await self._measure_one(name) for name in names])

        await _together(measure, by_machine.values())
        return results

    async def measure_pairs(self, pairs: Iterable[Pair]) -> list[node_check.PairResult]:
        results: list[node_check.PairResult] = []

        async def measure(pair: Pair) -> None:
            results.append(await self._measure_pair(pair))

        for wave in _waves(pairs, lambda node: self._probes[node].machine):
            await _together(measure, wave)
        return results

    def describe(self, verdict: node_check.NodeVerdict) -> node_check.CheckedNode:
        probe = self._probes[verdict.node]
        facts, offset_s = probe.facts, probe.clock_offset_s
        findings = node_check.findings_about(probe.gpus)
        warnings: tuple[str, ...] = ()
        if facts is not None and offset_s is not None:
            warnings = node_check.warnings_about(facts, offset_s, self._versions)
        return node_check.CheckedNode(
            verdict=node_check.slowed_by(verdict, findings),
            warnings=warnings,
            facts=facts,
            clock_offset_s=offset_s,
            seconds=probe.seconds,
            gpus=probe.gpus,
            findings=findings,
        )

    async def _measure_one(self, node: str) -> node_check.SoloResult:
        probe = self._probes[node]
        if probe.facts is not None and (reason := node_check.misfit(probe.facts, probe.spec, self._versions)):
            return node_check.SoloResult(node=node, error=reason, is_final=True)
        if not probe.failure:
            await probe.ask(node_check.MeasureAlone())
            with trio.move_on_after(_SOLO_TIMEOUT_S):
                while (answer := await probe.receive(_SOLO_TIMEOUT_S)) is not None:
                    if isinstance(answer, node_check.SoloDone):  # else a late answer of a pair
                        # Other work on the machine only ever makes a time longer, so the best of all rounds counts.
                        before, now = probe.seconds, answer.seconds
                        probe.seconds = {name: min(value, before.get(name, value)) for name, value in now.items()}
                        probe.gpus = tuple(facts for facts in answer.gpus if facts.index in probe.spec.devices)
                        fault = node_check.fault_of(node_check.findings_about(probe.gpus))
                        return node_check.SoloResult(
                            node=node, seconds=answer.seconds, error=fault or answer.error, is_final=bool(fault)
                        )
        silence = f"it measured nothing within {_SOLO_TIMEOUT_S:g} s"
        return node_check.SoloResult(node=node, error=probe.failure or silence, is_final=True)

    async def _measure_pair(self, pair: Pair) -> node_check.PairResult:
        self._num_pairs += 1
        key = f"pair{self._num_pairs}"
        done: dict[str, node_check.PairDone] = {}

        async def ask(node: str) -> None:
            probe = self._probes[node]
            if probe.failure:
                return
            request = node_check.MeasurePair(key=key, nodes=pair, address=probe.address, timeout_s=_PAIR_TIMEOUT_S)
            await probe.ask(request)
            with trio.move_on_after(_PAIR_TIMEOUT_S + _SLACK_S):
                while (answer := await probe.receive(_PAIR_TIMEOUT_S + _SLACK_S)) is not None:
                    if isinstance(answer, node_check.PairDone) and answer.key == key:  # else a late answer
                        done[node] = answer
                        return

        await _together(ask, pair)
        return self._conclude(pair, [done.get(node) for node in pair])

    def _conclude(self, pair: Pair, answers: Sequence[node_check.PairDone | None]) -> node_check.PairResult:
        """Return the slower node's time, or the error if a node did not exchange."""
        failure = next((self._probes[node].failure for node in pair if self._probes[node].failure), "")
        seconds = latency_s = 0.0
        for answer in answers:
            if answer is None:
                error = failure or f"no answer within {_PAIR_TIMEOUT_S + _SLACK_S:g} s"
                return node_check.PairResult(nodes=pair, error=error)
            if answer.seconds is None:
                return node_check.PairResult(nodes=pair, error=failure or answer.error)
            seconds = max(seconds, answer.seconds)
            latency_s = max(latency_s, answer.latency_s or 0.0)
        self.exchanges.append((*pair, latency_s, seconds))
        return node_check.PairResult(nodes=pair, seconds=seconds)

    async def _pass_on(self, sender: str, put: node_check.PairValue) -> None:
        for node in put.nodes:
            if node != sender and node in self._probes:
                await self._probes[node].ask(put)


async def _together(function: Callable[[T], Awaitable[None]], items: Iterable[T]) -> None:
    async with trio.open_nursery() as nursery:
        for item in items:
            nursery.start_soon(function, item)


def _waves(pairs: Iterable[Pair], machine: Callable[[str], str]) -> list[list[Pair]]:
    """Group pairs into waves that can run at once: no machine is in two pairs of a wave."""
    waves: list[tuple[set[str], list[Pair]]] = []
    for pair in pairs:
        busy = {machine(node) for node in pair}
        for taken, wave in waves:
            if not taken & busy:
                taken |= busy
                wave.append(pair)
                break
        else:
            waves.append((busy, [pair]))
    return [wave for _, wave in waves]


def _our_versions() -> dict[str, str]:
    """Return this machine's versions, which nodes must match."""
    versions = {"oobleck": __version__, "python": platform.python_version()}
    for package in ("torch", "transformers", "trio", "numpy"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


def _round_text(number: int, tests: node_check.CheckRound) -> str:
    parts = []
    if tests.solo:
        parts.append(f"{len(tests.solo)} alone")
    if tests.pairs:
        parts.append(f"{len(tests.pairs)} pair{'s' if len(tests.pairs) != 1 else ''}")
    return f"round {number}: {' and '.join(parts)}"
