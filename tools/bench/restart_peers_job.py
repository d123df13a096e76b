"""What `restart_peers.py` runs with an interpreter that has the peers: the model of `restart_job.py`, as each wants it.

    restart_peers_job.py PEER DIRECTORY     a rank of `nvrx`, `dlrover` or `lm-resiliency`, or a replica of `torchft`
    restart_peers_job.py torchrun OPTIONS   torch's, which knows the rendezvous of LM Resiliency too
    restart_peers_job.py launch PEER DIRECTORY NODES RANKS    starts nodes of that many ranks, and what they need beside

Nothing here imports Oobleck. A node is what the peer starts on a machine; its processes have a TMPDIR of their own, by
which they are found. `launch torchrun` runs `restart_job.py`, with an interpreter that has Oobleck. Each rank writes a
line for each step, as `restart_job.py` does.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

_c10d: Any = dist  # its stubs export no stores
_SAVE_EVERY = 5
_PAUSE_S = 0.05


def build() -> torch.nn.Module:
    """The model of `restart_job.py`."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(128, 256), torch.nn.Linear(256, 128))


def take_step(model: Any, optimizer: Any) -> None:
    """One step on random numbers."""
    inputs = torch.randn(16, 128)
    optimizer.zero_grad()
    (model(inputs) - inputs).square().mean().backward()
    optimizer.step()


@contextmanager
def noting(directory: Path, rank: int) -> Iterator[Callable[[int, int, int], None]]:
    """Give a function that writes a line for a step: its number, its restart, and the number of ranks."""
    with (directory / f"rank{rank}.jsonl").open("a", encoding="utf-8") as log:

        def note(step: int, restart: int, world: int) -> None:
            said = {"step": step, "restart": restart, "pid": os.getpid(), "world": world, "t": time.time()}
            log.write(json.dumps(said) + "\n")
            log.flush()
            time.sleep(_PAUSE_S)

        yield note


# --- the peers -------------------------------------------------------------------------------------------------------


def run_torchft(directory: Path) -> None:
    """A replica of one rank, with torchft's DDP and optimizer; its lighthouse has its defaults."""
    from torchft import DistributedDataParallel as ReplicaParallel
    from torchft import Manager, Optimizer, ProcessGroupGloo

    rank = int(os.environ["REPLICA"])
    store = _c10d.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    model = build()
    inner = torch.optim.AdamW(model.parameters())

    def load(state: Any) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=1,
        replica_id=f"replica{rank}",
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,
        world_size=1,
        hostname="127.0.0.1",
    )
    parallel, optimizer = ReplicaParallel(manager, model), Optimizer(manager, inner)
    with noting(directory, rank) as note:
        while True:
            before = manager.current_step()
            take_step(parallel, optimizer)
            if manager.current_step() > before:  # else the step was thrown away
                note(manager.current_step(), int(manager.num_participants() < 2), manager.num_participants())


def run_nvrx(directory: Path) -> None:
    """A rank of NVRx's restart in the process, with its defaults; the function is called again after each loss."""
    from nvidia_resiliency_ext import inprocess

    port = int(os.environ["MASTER_PORT"])

    def train(base: Any, call_wrapper: Any = None) -> None:
        store = _c10d.PrefixStore(str(call_wrapper.iteration), base)
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
        train_plainly(directory, rank, restart=call_wrapper.iteration)

    base = _c10d.TCPStore(
        "127.0.0.1",
        port,
        int(os.environ["WORLD_SIZE"]),
        os.environ["RANK"] == "0",
        timedelta(seconds=60),
        multi_tenant=True,
    )
    # It looks for its own argument by the annotations, which have to be classes.
    train.__annotations__.update(base=_c10d.Store, call_wrapper=inprocess.CallWrapper)
    inprocess.Wrapper(store_kwargs={"host_name": "127.0.0.1", "port": port + 1})(train)(base)


def train_plainly(directory: Path, rank: int, *, restart: int) -> None:
    """Save every five steps to a file, as a script for torchrun does."""
    model = DistributedDataParallel(build())
    optimizer = torch.optim.AdamW(model.parameters())
    checkpoint, step = directory / "checkpoint.pt", 0
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    with noting(directory, rank) as note:
        while True:
            take_step(model, optimizer)
            step += 1
            if rank == 0 and step % _SAVE_EVERY == 0:
                state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                torch.save(state, checkpoint.with_suffix(".new"))
                os.replace(checkpoint.with_suffix(".new"), checkpoint)
            note(step, restart, dist.get_world_size())


def run_dlrover(directory: Path) -> None:
    """A rank under dlrover-run, which saves in memory after every step."""
    from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer, StorageType

    dist.init_process_group("gloo")
    checkpointer = DdpCheckpointer(str(directory / "dlrover"))
    model = DistributedDataParallel(build())
    optimizer = torch.optim.AdamW(model.parameters())
    state, step = checkpointer.load_checkpoint(), 0
    if state:
        state = state.get("model_states", state)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    with noting(directory, dist.get_rank()) as note:
        while True:
            take_step(model, optimizer)
            step += 1
            saved = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            checkpointer.save_checkpoint(step, saved, storage_type=StorageType.MEMORY)
            note(step, int(os.environ["TORCHELASTIC_RESTART_COUNT"]), dist.get_world_size())


def run_lm_resiliency(directory: Path) -> None:
    """A rank of LM Resiliency, which saves in memory and in its peer's after every step, by its GEMINI alone.

    Groups of its own choice, as with a worker config, are also NCCL's, so it is given one. What it keeps in memory
    becomes files when a rank ends by an exception or a signal; the rank then reports to the manager.
    """
    from lm_resiliency import InMemoryCkptConfig, enable_resiliency
    from lm_resiliency.integrations.torchrun import get_torchrun_worker_context
    from lm_resiliency.manager_api import OrchestrationHooks

    dist.init_process_group("gloo")
    context = get_torchrun_worker_context()
    report = directory / "tmp" / f"lost{context.generation}.json"

    def lost() -> None:
        decision = resiliency.describe_recovery("rank_lost", "latest", all_ranks_accessible=False, reason="rank_lost")
        new = report.with_suffix(f".{dist.get_rank()}")
        new.write_text(json.dumps(decision), encoding="utf-8")
        os.replace(new, report)

    model = DistributedDataParallel(build())
    optimizer = torch.optim.AdamW(model.parameters())
    resiliency = enable_resiliency(
        model,
        optimizer,
        interval=1,
        enable_detection=False,
        checkpoint=InMemoryCkptConfig(disk_flush_interval=0, disk_folder=str(directory / "tmp" / "gemini")),
        group=_c10d.group.WORLD,
        device=torch.device("cpu"),
        orchestration=OrchestrationHooks(restart_destination=lost),
        recovery_mode=context.recovery_mode,
    )
    with noting(directory, dist.get_rank()) as note:
        while True:
            take_step(model, optimizer)
            note(resiliency.step_count, context.generation, dist.get_world_size())


# --- nodes, and what they need beside ---------------------------------------------------------------------------------


def launch(peer: str, directory: Path, num_nodes: int, num_ranks: int) -> None:
    """Start the nodes, and end them with this process."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also where a shell has it ignored, in its background
    port = _free_port()
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    lighthouse: Any = None
    store: Any = None
    others: list[subprocess.Popen[bytes]] = []
    if peer == "torchft":
        from torchft.coordination import LighthouseServer

        lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1)
        environment["TORCHFT_LIGHTHOUSE"] = lighthouse.address()
    elif peer == "dlrover":
        environment |= {"DLROVER_MASTER_ADDR": f"127.0.0.1:{port}", "NODE_NUM": str(num_nodes)}
        master = [f"--port={port}", f"--node_num={num_nodes}", "--platform=local", "--job_name=bench"]
        others.append(subprocess.Popen([sys.executable, "-m", "dlrover.python.master.main", *master]))
    elif peer == "lm-resiliency":
        store = _c10d.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    nodes = [
        subprocess.Popen(
            [sys.executable, *_command(peer, directory, node, num_nodes, num_ranks, port)],
            env=environment | _own(directory, node) | {"WORLD_SIZE": str(num_nodes * num_ranks)},
        )
        for node in range(num_nodes)
    ]
    if peer == "lm-resiliency":
        threading.Thread(target=_manage, args=(store, directory, nodes, num_ranks), daemon=True).start()
    try:
        for each in nodes:
            each.wait()
    except KeyboardInterrupt:
        pass
    finally:
        for each in (*nodes, *others):
            each.kill()
            each.wait()


def _own(directory: Path, node: int) -> dict[str, str]:
    """What a node has in its environment that others have not."""
    home = directory / "tmp" / f"node{node}"
    home.mkdir()
    (home / "machine-id").write_text(_machine_id(node), encoding="ascii")
    own = {"TMPDIR": str(home), "LM_RESILIENCY_MACHINE_ID_PATH": str(home / "machine-id")}
    own["ELASTIC_JOB_NAME"] = f"{directory.name}-node{node}"  # DLRover's, which names its shared memory after it
    return own | dict.fromkeys(("RANK", "REPLICA", "NODE_RANK", "NODE_ID"), str(node))


def _machine_id(node: int) -> str:
    return f"{node + 1:032x}"


def _command(peer: str, directory: Path, node: int, num_nodes: int, num_ranks: int, port: int) -> list[str]:
    """What a node runs: its peer's launcher, which goes on with a node less, or the rank itself."""
    script = [__file__, peer, str(directory)]
    nodes = f"--nnodes={max(1, num_nodes - 1)}:{num_nodes}"
    options = [nodes, f"--nproc-per-node={num_ranks}", "--max-restarts=100"]
    rendezvous = ["--rdzv-id=bench", f"--rdzv-endpoint=127.0.0.1:{port}"]
    if peer == "torchrun":
        job = [str(Path(__file__).with_name("restart_job.py")), str(directory), "dcp"]
        conf = f"--rdzv-conf=is_host={node == 0}"
        return ["-m", "torch.distributed.run", *options, *rendezvous, "--rdzv-backend=c10d", conf, *job]
    if peer == "dlrover":
        return ["-m", "dlrover.trainer.torch.main", *options, *script]
    if peer == "lm-resiliency":
        context = directory / "tmp" / f"node{node}" / "context" / "context.json"
        conf = f"--rdzv-conf=is_host=false,lm_resiliency_restart_context_path={context}"
        return [__file__, "torchrun", *options, *rendezvous, "--rdzv-backend=lm_resiliency", conf, *script]
    return script


def run_torchrun(options: list[str]) -> None:
    """Torch's launcher.

    Version 0.2.0's entry point is a function that torch calls without its argument: the rendezvous is registered here.
    """
    from lm_resiliency.integrations.torchrun import get_rendezvous_handler_creator
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
    from torch.distributed.run import main as torchrun

    rendezvous_handler_registry.register("lm_resiliency", get_rendezvous_handler_creator())
    torchrun(options)


def _manage(store: Any, directory: Path, nodes: list[subprocess.Popen[bytes]], num_ranks: int) -> None:
    """Publish a plan once a rank has reported what it kept: for the same nodes, or the spare for one that has ended."""
    from lm_resiliency.integrations.torchrun import (
        TorchrunRecoveryCoordinator,
        TorchrunRecoveryRequest,
        derive_torchrun_node_id,
    )

    report = directory / "tmp" / "lost0.json"
    while not report.exists():
        time.sleep(0.01)
    decision = json.loads(report.read_text(encoding="utf-8"))
    request = TorchrunRecoveryRequest(
        plan_id="plan",
        intent_id="loss",
        reason_code=decision["failure_kind"],
        recovery_mode=decision["recovery_mode"],
        checkpoint_source=decision["checkpoint_source"],
        checkpoint_step=decision["checkpoint_step"],
        checkpoint_manifest_id=f"step{decision['checkpoint_step']}",
        topology_digest=decision["topology_digest"],
        restart_deadline_unix_ms=time.time_ns() // 1_000_000 + 120_000,
    )
    coordinator = TorchrunRecoveryCoordinator(store, run_id="bench")
    placement = coordinator.initial_placement(active_node_count=max(1, len(nodes) - 1), allocated_node_count=len(nodes))
    ended = [derive_torchrun_node_id(_machine_id(node)) for node, each in enumerate(nodes) if each.poll() is not None]
    coordinator.publish_successor(
        generation=0,
        active_node_ids=placement.active_node_ids,
        quarantined_node_ids=(),
        request=request,
        local_world_size=num_ranks,
        replacement=(placement.active_node_ids.index(ended[0]), placement.standby_node_ids[0]) if ended else None,
    )
    threading.Event().wait()  # the coordinator renews its plan as long as it is there


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


_PEERS = {"torchft": run_torchft, "nvrx": run_nvrx, "dlrover": run_dlrover, "lm-resiliency": run_lm_resiliency}


def main() -> None:
    """Be a rank, or start all."""
    torch.set_num_threads(1)
    if sys.argv[1] == "launch":
        launch(sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))
    elif sys.argv[1] == "torchrun":
        run_torchrun(sys.argv[2:])
    else:
        _PEERS[sys.argv[1]](Path(sys.argv[2]))


if __name__ == "__main__":
    main()
