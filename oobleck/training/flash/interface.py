"""The two functions, and the state of this process that they share: its rank, and its last save or load."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import torch.distributed as dist

from oobleck.control.protocol import BadLosses
from oobleck.errors import BadStep, StatesLost, UsageError, shown
from oobleck.host.user_path import expand_user
from oobleck.job import MAX_STEPS
from oobleck.planner.formatting import counted
from oobleck.storage import scripts
from oobleck.training import attempts

from .loader import Found, Loader, Peers
from .losses import Losses
from .saver import DiskSaver, MemorySaver
from .tensors import Flat, flatten

_DEFAULT_DIRECTORY = "oobleck-checkpoints"
_DISK_EVERY = 100
_SHOWN_RANKS = 4


class _Process:
    def __init__(self) -> None:
        memory = os.environ.get(scripts.MEMORY_VARIABLE)
        self.memory = Path(memory) if memory else None
        self.directory = expand_user(os.environ.get(scripts.DIRECTORY_VARIABLE) or _DEFAULT_DIRECTORY).absolute()
        self.identity = scripts.ScriptIdentity.of_environment(os.environ, main=_main_path())
        self.start = ""  # until the first load or save settles it
        self.last_step = 0
        self.saved: scripts.PartNote | None = None
        """The last one of this start."""
        self.from_step: int | None = None
        self.began_s = 0.0
        self.losses = Losses()
        self.local_rank = 0
        self.peers: Peers | None = None
        self.num_saved = 0
        self.saver: DiskSaver | MemorySaver = DiskSaver(self.directory)
        if self.memory is not None:
            # LOCAL_RANK alone is 0 for all ranks of a node with --virtual-local-rank.
            local_rank = os.environ.get(scripts.LOCAL_RANK_VARIABLE) or os.environ.get("LOCAL_RANK", "0")
            self.local_rank = int(local_rank)
            num_local, room = (
                os.environ.get("LOCAL_WORLD_SIZE", "1"),
                os.environ.get(scripts.COPIES_VARIABLE, "0"),
            )
            self.saver = MemorySaver(self.memory, int(local_rank), num_local=int(num_local), room=float(room))

    def begin(self, step: int) -> None:
        """Note that steps begin after this one."""
        self.from_step, self.began_s = step, time.monotonic()

    def check(self, step: int, loss: float, *, redoes: bool) -> None:
        """Compare losses with all ranks. Raises BadStep in all of them if any is bad."""
        rank, world_size = place()
        if self.peers is None:
            self.peers = Peers(rank, world_size)
        mine = repr(float(loss)) if self.losses.is_bad(float(loss)) else ""
        answers = [answer.decode() for answer in self.peers.gather(mine.encode())]
        bad = tuple((each, answer) for each, answer in enumerate(answers) if answer)
        if not bad:
            return
        if self.memory is not None:
            note = BadLosses(step=step, start=self.start, is_redone=redoes, losses=bad)
            scripts.note_bad(self.memory, self.local_rank, note)
        who = ", ".join(f"{answer} on rank {each}" for each, answer in bad[:_SHOWN_RANKS])
        more = f" and {len(bad) - _SHOWN_RANKS} more" if len(bad) > _SHOWN_RANKS else ""
        raise BadStep(f"the loss of step {step} is {who}{more}; the step is not saved")

    def note(self, step: int, flat: Flat, *, is_planned: bool, loss: float | None) -> scripts.PartNote:
        rank, world_size = place()
        self.num_saved += 1
        if self.from_step is None:  # it has loaded nothing
            self.begin(max(0, step - 1))
        return scripts.PartNote(
            name=scripts.state_name(step, self.start),
            step=step,
            start=self.start,
            rank=rank,
            world_size=world_size,
            number=self.num_saved,
            saved_at=datetime.now(UTC).isoformat(timespec="microseconds"),
            is_planned=is_planned,
            shardings=flat.shardings,
            script=self.identity.script,
            arguments=self.identity.arguments,
            from_step=self.from_step or 0,
            worked_s=time.monotonic() - self.began_s,
            loss="" if loss is None else repr(float(loss)),
            recent_losses=self.losses.recent,
        )

    def parts(self, *, report: Callable[[str], None] = lambda problem: None) -> list[scripts.Part]:
        """Return all readable parts, and `report` the others. Raises UsageError if one is another script's."""
        parts = list(scripts.find_parts(self.memory, self.directory, tell=report))
        for part in parts:
            self.identity.check_script(part.note, str(self.directory))
        return parts

    def settle_start(self, peers: Peers, parts: Sequence[scripts.Part]) -> None:
        """Agree with all ranks on a number above all that any of them sees, unless this start has saved already."""
        seen = max((scripts.start_number(part.note.start) for part in parts), default=0)
        answers = [each.decode().split() for each in peers.gather(f"{seen} {time.time_ns()}".encode())]
        # All ranks compute the same name from the same answers.
        if not self.start:
            unique = os.environ.get(scripts.START_VARIABLE) or f"t{answers[0][1]}"
            self.start = scripts.start_name(1 + max(int(number) for number, _ in answers), unique)

    def settle_start_alone(self) -> None:
        """Choose the start that all ranks choose without communication, as none of them has called `load`."""
        words = os.environ.get("TORCHELASTIC_RUN_ID", "none"), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        unique = os.environ.get(scripts.START_VARIABLE) or "-".join(
            "".join(filter(str.isalnum, word)) for word in words
        )
        numbers = {part.note.start: scripts.start_number(part.note.start) for part in self.parts()}
        own = [number for start, number in numbers.items() if start == scripts.start_name(number, unique)]
        self.start = scripts.start_name(max(own or [1 + max(numbers.values(), default=0)]), unique)


def _main_path() -> str:
    """Return the path of the running script; empty for a module, or for code that no file has."""
    main = sys.modules["__main__"]
    path = getattr(main, "__file__", None)
    return os.path.abspath(path) if path and getattr(main, "__spec__", None) is None else ""


_process: _Process | None = None


def _this() -> _Process:
    global _process
    if _process is None:
        _process = _Process()
    return _process


def _forget() -> None:
    """Be another rank from now on."""
    global _process
    _process = None


attempts.on_next_attempt(_forget)


def load() -> object | None:
    """Return the newest state that all ranks have saved, or None if there is none.

    All ranks must call this, after `torch.distributed.init_process_group` if there are several. They load the same
    step: from memory, or from other ranks' memory, else from disk. Tensors are copies on the CPU. Sharded tensors
    (DTensor) are sharded again over the present ranks, on their device.

    Raises UsageError if the state cannot be laid out on this number of ranks, or is another script's, and StatesLost if
    states were saved and none is complete any more, or none can be read.
    """
    loader, report = _begin_load()
    loaded = loader.load()
    report()
    if loaded is None:
        _note_none()
        return None
    state, chosen = loaded
    _note_loaded(chosen)
    return state


def find_newest() -> Found | None:
    """Find what `load` would load, for ranks that read it themselves; all of them close it once they have."""
    loader, report = _begin_load()
    found = loader.find()
    report()
    if found is None:
        _note_none()
        return None
    found.on_close(lambda: _note_loaded(found.chosen))
    return found


def _begin_load() -> tuple[Loader, Callable[[], None]]:
    """Return a loader of what this rank can read, and what says afterwards which parts are not used."""
    this = _this()
    peers = all_ranks("oobleck.checkpoint.load")
    problems: list[str] = []
    parts = this.parts(report=problems.append)
    this.settle_start(peers, parts)

    def report() -> None:
        for problem in problems:
            sys.stderr.write(f"oobleck: not used: {problem}\n")

    return Loader(peers, parts, problems), report


def _note_none() -> None:
    this = _this()
    if saved := os.environ.get(scripts.SAVED_VARIABLE):
        raise StatesLost(f"step {saved} was saved, and no part of it is left in memory or in {this.directory}")
    this.begin(0)


def _note_loaded(chosen: scripts.Chosen) -> None:
    this, (rank, _) = _this(), place()
    this.identity.check_arguments(chosen.note, str(this.directory))
    this.last_step = chosen.note.step
    this.saved = chosen.note if chosen.note.start == this.start else None
    this.saver.protect(chosen.note.name)
    if rank == 0:
        saved = f"saved by {counted(chosen.note.world_size, 'rank')}"
        if this.identity.arguments and chosen.note.arguments not in ("", this.identity.arguments):
            saved += " with other arguments"
        sys.stderr.write(f"oobleck: continues after step {this.last_step}, {saved}, from {chosen.place}\n")
    this.begin(this.last_step)
    if rank in chosen.notes:
        this.losses = Losses(chosen.notes[rank].recent_losses)


def save(
    step: int,
    state: object,
    *,
    loss: float | None = None,
    on_bad_step: Literal["redo", "stop"] | None = None,
    disk_every: int = _DISK_EVERY,
) -> None:
    """Save a state after a step: dicts, lists, numbers, texts, tensors. All ranks call this, for the same steps.

    Values and plain tensors must be the same on all ranks, as those of a DDP model are; DTensors are saved piece by
    piece. When it returns, the state is in shared memory, and may be changed. O(size).

    Arguments:
        step: a number that grows. The last one may be saved again, with the same state: the later save counts.
        loss: the step's loss, which `oobleck status` and the report show with the step; that of rank 0 counts.
        on_bad_step: what follows if any rank's own loss is not finite, or exceeds the highest of its last 32 by more
            than three times their range; all ranks name a loss then, and compare them. With "stop" the run ends. With
            "redo" all start again from the newest saved state, with each rank on another node than before: if the
            loss of the step is good there, the node is named that computed it wrongly; if it is bad again, the data
            is at fault, or the script, and the run ends. Without it, losses are only shown.
        disk_every: the agent also writes the first save at or after each multiple of `disk_every` to disk. Under a
            launcher other than `oobleck run`, every save is written to disk before this returns.

    Raises UsageError that names what cannot be saved, and where it is, or a step before the last one, OSError if memory
    or disk is full, and in all ranks BadStep for a bad step, which is not saved. A script that catches it may skip the
    step: `load` returns the state before.
    """
    check_step("oobleck.checkpoint.save", step, disk_every)
    this = _begin_save()
    if on_bad_step is not None:
        if on_bad_step not in ("redo", "stop") or loss is None:
            raise UsageError(
                f"oobleck.checkpoint.save: on_bad_step={on_bad_step!r} with loss={loss!r}; it can be 'redo' or 'stop', "
                "and needs the step's loss"
            )
        this.check(step, loss, redoes=on_bad_step == "redo")
    _save(this, step, flatten(state), loss=loss, disk_every=disk_every)


def save_flat(step: int, flat: Flat, *, disk_every: int = _DISK_EVERY) -> None:
    """Save what a rank has of a state, as `save` does."""
    check_step("oobleck.checkpoint.save", step, disk_every)
    _save(_begin_save(), step, flat, loss=None, disk_every=disk_every)


def _begin_save() -> _Process:
    attempts.check_attempt()
    this = _this()
    if not this.start:
        this.settle_start_alone()
    return this


def _save(this: _Process, step: int, flat: Flat, *, loss: float | None, disk_every: int) -> None:
    is_planned = step // disk_every != this.last_step // disk_every
    if this.saved is not None and this.saved.step == step:
        is_planned |= this.saved.is_planned  # what is on disk is replaced as well
    note = this.note(step, flat, is_planned=is_planned, loss=loss)
    this.saver.save(note, flat)
    this.last_step, this.saved = step, note
    attempts.note_saved()


def check_step(call: str, step: int, disk_every: int) -> None:
    """Raise UsageError, which names the call, unless both are numbers that the next save takes."""
    if type(step) is not int or not 0 <= step <= MAX_STEPS:
        raise UsageError(f"{call}: step {shown(step)} is not a whole number from 0 to {MAX_STEPS:,}")
    if type(disk_every) is not int or not 1 <= disk_every <= MAX_STEPS:
        raise UsageError(f"{call}: disk_every={shown(disk_every)}; it must be a whole number from 1 to {MAX_STEPS:,}")
    saved = _this().saved
    if saved is not None and step < saved.step:
        raise UsageError(f"{call}: step {step} follows step {saved.step}, which is saved already; steps must grow")


def all_ranks(call: str) -> Peers:
    """Return all ranks, which make this call together. Raises UsageError that names it, and Interrupted."""
    attempts.check_attempt()
    rank, world_size = place()
    if world_size > 1 and not dist.is_initialized():
        raise UsageError(f"{call}: call it after torch.distributed.init_process_group(), for all ranks act together")
    return Peers(rank, world_size)


def place() -> tuple[int, int]:
    """Return (rank, number of ranks), from the process group or the launcher."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
