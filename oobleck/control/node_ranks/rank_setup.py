"""A rank's environment, as torchrun would set it, and which of its output is shown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from oobleck.control.protocol import StartRanks
from oobleck.job.ranks import RanksSpec

_BY_PLACE = "--nnodes and --nproc-per-node say how many there are"
OWN_VARIABLES = {
    **dict.fromkeys(("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK"), _BY_PLACE),
    **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"), _BY_PLACE),
    "ROLE_NAME": "--role sets it",
    "MASTER_ADDR": "it is the address of the first node: its line of the hostfile says another with address=",
    "MASTER_PORT": "--master-port sets it",
    "TORCHELASTIC_RESTART_COUNT": "it counts the generations",
    "TORCHELASTIC_MAX_RESTARTS": "--max-restarts sets it",
    "TORCHELASTIC_RUN_ID": "--rdzv-id sets it",
    "TORCHELASTIC_USE_AGENT_STORE": "rank 0 serves the rendezvous",
    "TORCHELASTIC_ERROR_FILE": "--log-dir says below which directory it lies",
}
"""Variables that users cannot set in a rank's environment, and what sets them instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSetup:
    """One rank of a generation on its node."""

    run: RanksSpec
    order: StartRanks
    local_rank: int
    devices: tuple[int, ...]
    """The devices in the node's line of the hostfile."""

    @property
    def rank(self) -> int:
        return self.order.first_rank + self.local_rank

    @property
    def attempt(self) -> int:
        """How many generations came before this one: torchrun's number of restarts."""
        return self.order.generation - 1


def rank_environment(setup: RankSetup, inherited: Mapping[str, str]) -> dict[str, str]:
    """The variables that a rank finds beside those of its node, which are `inherited`; as torchrun 2.13 sets them."""
    run, order = setup.run, setup.order
    environment = {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": inherited.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        **run.environment,
        "RANK": str(setup.rank),
        "LOCAL_RANK": str(setup.local_rank),
        "WORLD_SIZE": str(order.world_size),
        "LOCAL_WORLD_SIZE": str(order.num_ranks),
        "GROUP_RANK": str(order.group_rank),
        "GROUP_WORLD_SIZE": str(order.num_groups),
        "ROLE_NAME": run.role,
        "ROLE_RANK": str(setup.rank),
        "ROLE_WORLD_SIZE": str(order.world_size),
        "MASTER_ADDR": order.master_address,
        "MASTER_PORT": str(order.master_port),
        "TORCHELASTIC_RESTART_COUNT": str(setup.attempt),
        "TORCHELASTIC_MAX_RESTARTS": str(run.max_restarts),
        "TORCHELASTIC_RUN_ID": run.run_id,
        "TORCHELASTIC_USE_AGENT_STORE": "False",  # rank 0 serves the rendezvous itself
        **_visible_devices(setup, {**inherited, **run.environment}),
    }
    if order.num_ranks > 1 and "OMP_NUM_THREADS" not in {**inherited, **run.environment}:
        environment["OMP_NUM_THREADS"] = "1"
    return environment


def _visible_devices(setup: RankSetup, inherited: Mapping[str, str]) -> dict[str, str]:
    """A node whose line names devices sees only these; with `hides_devices`, each rank sees one of them."""
    devices = [str(device) for device in setup.devices]
    is_plain = setup.devices == tuple(range(len(setup.devices)))
    visible = inherited.get("CUDA_VISIBLE_DEVICES", "").split(",") if is_plain else devices
    if setup.run.hides_devices:
        own = visible[setup.local_rank] if setup.local_rank < len(visible) else ""
        return {"CUDA_VISIBLE_DEVICES": own or str(setup.local_rank), "LOCAL_RANK": "0"}
    return {} if is_plain else {"CUDA_VISIBLE_DEVICES": ",".join(devices)}


def is_shown(setup: RankSetup, *, is_error: bool) -> bool:
    """Return whether a rank's stream is shown where the run was started."""
    run, local_rank = setup.run, setup.local_rank
    if run.shown_ranks and local_rank not in run.shown_ranks:
        return False
    redirected, teed = run.redirects.of(local_rank), run.tee.of(local_rank)
    if is_error:
        return teed.stderr or not redirected.stderr
    return teed.stdout or not redirected.stdout


def shown_text(setup: RankSetup, lines: str, *, is_error: bool) -> str:
    """Return lines as they are shown: with the rank's name before each, if `--tee` asks for that."""
    teed = setup.run.tee.of(setup.local_rank)
    if not (teed.stderr if is_error else teed.stdout):
        return lines
    prefix = f"[{setup.run.role}{setup.rank}]:"
    return "".join(f"{prefix}{line}" for line in lines.splitlines(keepends=True))
