"""The messages of a pipeline's stages: hidden states of a known size, or parcels behind headers with their sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from oobleck.training import flow as flows
from oobleck.training.comm import JOINED, Group, Pending, Post
from oobleck.training.model import StageModel

Sent = tuple[Pending, torch.Tensor]
"""A send under way, and its tensor, which must live until the receiver has it."""


@dataclass(slots=True)
class Messages:
    """The messages between a stage and its neighbours, by tags that no other message of a step has."""

    model: StageModel
    group: Group
    batch_size: int
    """The number of samples in a microbatch."""
    _parcels: dict[int, tuple[Pending, torch.Tensor]] = field(init=False, default_factory=dict)
    """What has arrived behind headers, by tag."""

    def post_from(self, source: int, *, to_chunk: int | None) -> Post:
        """Return what begins to receive a message to a chunk, or with None of gradients. Raises PeerLost."""
        model, group, flow = self.model, self.group, self.model.structure.flow
        if flow is None:
            shape = model.hidden_shape(self.batch_size)
            return lambda tag: group.post_receive_ahead(shape, model.hidden_dtype, model.device, source, tag)
        length = 1 if to_chunk is None else flows.header_length(flow, model.chunks[to_chunk].start)

        def post(tag: int) -> tuple[Pending, torch.Tensor]:
            header = torch.empty(length, dtype=torch.int64)
            return _Following(group.post_receive(header, source, 2 * tag), lambda: follow(header, tag)), header

        def follow(header: torch.Tensor, tag: int) -> None:
            size = max(1, int(header[0]))
            work, payload = group.post_receive_ahead((size,), torch.uint8, model.device, source, 2 * tag + 1)
            work.wait()
            self._parcels[tag] = work, payload

        return post

    def received(self, tag: int, taken: torch.Tensor, chunk: int) -> flows.Carried:
        """Return what has been sent to a chunk, from what its inbox has given."""
        if (flow := self.model.structure.flow) is None:
            return taken
        return flows.Parcel.received(flow, self.model.chunks[chunk].start, taken, self._payload(tag))

    def gradients(self, tag: int, taken: torch.Tensor, output: flows.Carried) -> list[torch.Tensor]:
        """Return the gradients of what a chunk has sent, from what its inbox has given."""
        if isinstance(output, torch.Tensor):
            return [taken]
        return flows.unpacked(self._payload(tag), [flows.size_of(each) for each in output.carrying])

    def send(self, carried: flows.Carried, target: int, tag: int) -> list[Sent]:
        """Send what a chunk has computed; returns what to keep until the step is committed. Raises PeerLost."""
        return [
            (work, tensor)
            for tensor, own_tag in self._parts(carried, tag)
            if (work := self._sent_off(tensor, target, own_tag)) is not None
        ]

    def send_gradients(self, gradients: Sequence[torch.Tensor], target: int, tag: int) -> list[Sent]:
        """Send the gradients of what a chunk has received, as `send` does."""
        if self.model.structure.flow is None:
            parts = [(gradients[0].contiguous(), tag)]
        else:
            parts = self._parcel(torch.tensor([flows.num_bytes(gradients)]), gradients, tag)
        sent = ((self._sent_off(tensor, target, own_tag), tensor) for tensor, own_tag in parts)
        return [(work, tensor) for work, tensor in sent if work is not None]

    def send_and_wait_later(self, carried: flows.Carried, target: int, tag: int) -> list[Sent]:
        """Send what a chunk has computed to a neighbour that calls `receive`. Raises PeerLost."""
        return [(self.group.send(tensor, target, own), tensor) for tensor, own in self._parts(carried, tag)]

    def receive(self, source: int, tag: int, chunk: int) -> flows.Carried:
        """Block until a chunk has what `send_and_wait_later` has sent to it. Raises PeerLost."""
        model, flow = self.model, self.model.structure.flow
        if flow is None:
            hidden = torch.empty(model.hidden_shape(self.batch_size), dtype=model.hidden_dtype, device=model.device)
            self.group.receive(hidden, source, tag)
            return hidden
        layer = model.chunks[chunk].start
        header = torch.empty(flows.header_length(flow, layer), dtype=torch.int64)
        self.group.receive(header, source, 2 * tag)
        payload = torch.empty(max(1, int(header[0])), dtype=torch.uint8, device=model.device)
        self.group.receive(payload, source, 2 * tag + 1)
        return flows.Parcel.received(flow, layer, header, payload)

    def _payload(self, tag: int) -> torch.Tensor:
        work, payload = self._parcels.pop(tag)
        if isinstance(work, JOINED):
            work.join()
        return payload

    def _parts(self, carried: flows.Carried, tag: int) -> list[tuple[torch.Tensor, int]]:
        if isinstance(carried, torch.Tensor):
            return [(carried.detach().contiguous(), tag)]
        return self._parcel(carried.header(), carried.tensors, tag)

    def _parcel(
        self, header: torch.Tensor, tensors: Sequence[torch.Tensor], tag: int
    ) -> list[tuple[torch.Tensor, int]]:
        payload = flows.packed(tensors, device=self.model.device)
        if not len(payload):  # a message has a byte at least
            payload = torch.zeros(1, dtype=torch.uint8, device=self.model.device)
        return [(header, 2 * tag), (payload, 2 * tag + 1)]

    def _sent_off(self, tensor: torch.Tensor, target: int, tag: int) -> Pending | None:
        # Headers stay in host memory, which NCCL does not carry.
        is_header = self.model.structure.flow is not None and tag % 2 == 0
        return self.group.send(tensor, target, tag) if is_header else self.group.send_off(tensor, target, tag)


@dataclass(frozen=True, slots=True)
class _Following:
    """The receive of a header, and of what follows it, which waits for it."""

    header: Pending
    follow: Callable[[], None]

    def wait(self) -> object:
        self.header.wait()
        self.follow()
        return None
