"""A script's ranks on one node, for its agent: their environment, their shown output, and their signs of life. Pure.

The environment is as torchrun would set it. `control/scripts/hang.py` concludes from the signs whether ranks hang.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from oobleck.control.protocol import RanksQuiet, StartRanks
from oobleck.job.ranks import RanksSpec

_IDLE_SHARE = 0.05
"""The share of a processor that a waiting rank may use, for the threads of libraries."""
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
        # torchrun counts restarts from 0, and generations count from 1.
        return self.order.generation - 1


def rank_environment(setup: RankSetup, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that torchrun 2.13 sets for a rank, next to those that are `inherited` from its node."""
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
    # As torchrun does: with a thread for every core in each of several ranks, they would hold each other up.
    if order.num_ranks > 1 and "OMP_NUM_THREADS" not in {**inherited, **run.environment}:
        environment["OMP_NUM_THREADS"] = "1"
    return environment


def _visible_devices(setup: RankSetup, inherited: Mapping[str, str]) -> dict[str, str]:
    """A node whose line names devices sees only these; with `hides_devices`, each rank sees one of them."""
    # The node may hide devices itself: the numbers of a plain line count among those that it leaves.
    devices = [str(device) for device in setup.devices]
    is_plain = setup.devices == tuple(range(len(setup.devices)))
    visible = inherited.get("CUDA_VISIBLE_DEVICES", "").split(",") if is_plain else devices
    # With torchrun's --virtual-local-rank, the one device that a rank sees has the number 0, and so has the rank.
    if setup.run.hides_devices:
        own = visible[setup.local_rank] if setup.local_rank < len(visible) else ""
        return {"CUDA_VISIBLE_DEVICES": own or str(setup.local_rank), "LOCAL_RANK": "0"}
    return {} if is_plain else {"CUDA_VISIBLE_DEVICES": ",".join(devices)}


def is_shown(setup: RankSetup, *, is_error: bool) -> bool:
    """Return whether a rank's stream is shown where the run was started."""
    run, local_rank = setup.run, setup.local_rank
    if run.shown_ranks and local_rank not in run.shown_ranks:
        return False
    # As with torchrun: --redirects sends a stream to its file alone, and --tee also shows it.
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


class NodeSigns:
    """The signs of life of one node's ranks in one generation."""

    def __init__(self, *, timeout_s: float, generation: int) -> None:
        self._timeout_s = timeout_s
        self._generation = generation
        self._count = 0
        self._since_s = 0.0
        self._used_s: Mapping[int, float] = {}
        self._has_shown = False
        self._report: RanksQuiet | None = None

    def repeat(self) -> None:
        """Report at the next look, changed or not: another master knows nothing yet."""
        self._report = None

    def look(self, now_s: float, *, count: int, used_s: Mapping[int, float]) -> RanksQuiet | None:
        """Return the report for the master if it has changed, else None.

        `count` grows with everything that ranks write or save; `used_s` is the processor time of each running rank.
        """
        # The first look of a generation only notes where ranks stand: quiet time is counted from there.
        if count != self._count or not self._used_s:
            self._has_shown = self._has_shown or count > 0
            self._count, self._since_s, self._used_s = count, now_s, dict(used_s)
        quiet_s = now_s - self._since_s
        is_quiet = quiet_s >= self._timeout_s
        report = RanksQuiet(
            generation=self._generation,
            is_quiet=is_quiet,
            has_shown=self._has_shown,
            idle=tuple(sorted(self._idle(used_s, quiet_s))) if is_quiet else (),
        )
        if report == self._report:
            return None
        self._report = report
        return report

    def _idle(self, used_s: Mapping[int, float], quiet_s: float) -> Iterable[int]:
        for rank, used in used_s.items():
            if used - self._used_s.get(rank, 0.0) < _IDLE_SHARE * quiet_s:
                yield rank
