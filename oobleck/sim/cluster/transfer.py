"""Transfers of layers between virtual workers: the twin of `training.comm.transfer`."""

from __future__ import annotations

from collections.abc import Generator

from oobleck.control.protocol import PlanUpdate
from oobleck.control.steps import CommitState, GroupKey, transfer_key
from oobleck.planner import LayerTransfer

from .fabric import Violation, Wait
from .layers import HeldLayers, Version
from .ports import WorkerPorts, pause


class Transfers:
    def __init__(self, ports: WorkerPorts, commit_state: CommitState) -> None:
        self.took_s = 0.0
        self.received_bytes = 0
        self._worker_id = commit_state.worker_id
        self._fabric, self._tempo, self._clock = ports.fabric, ports.tempo, ports.clock
        self._commit_state = commit_state

    def exchange(self, update: PlanUpdate, layers: HeldLayers) -> Generator[Wait, None, dict[int, Version]]:
        """Send and receive this worker's layers of a plan update; return the received ones."""
        for item in update.transfers:
            if item.source == self._worker_id:
                key = transfer_key(item, update.generation)
                self._fabric.send(key, self._worker_id, item.target, item.layer, layers.state(item.layer))
        yield from pause("sent layers")
        began_s, self.received_bytes = self._clock(), 0
        received: dict[int, Version] = {}
        for item in update.transfers:
            if item.target == self._worker_id:
                state = yield from self._receive(transfer_key(item, update.generation), item)
                if received.setdefault(item.layer, state) != state:
                    raise Violation(f"{self._worker_id} receives layer {item.layer} in parts of different versions")
        self.took_s = self._clock() - began_s
        return received

    def _receive(self, key: GroupKey, item: LayerTransfer) -> Generator[Wait, None, Version]:
        yield Wait(
            f"layer {item.layer} from {item.source}",
            lambda: self._fabric.has_mail(key, item.source, self._worker_id, item.layer),
            self._commit_state.is_fenced,
            lambda: self._fabric.lacks_a_member(key),
            touches_network=True,
            takes_s=self._tempo.transfer_s(item),
        )
        self.received_bytes += self._tempo.part_bytes(item)
        state = self._fabric.receive(key, item.source, self._worker_id, item.layer)
        assert isinstance(state, Version)
        return state
