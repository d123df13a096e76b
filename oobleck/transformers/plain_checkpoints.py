"""Checkpoints in a trainer's output_dir, as transformers' own Trainer writes them, of those that a run has saved.

Scripts and other tools read them: `from_pretrained("out/checkpoint-500")`, `get_last_checkpoint("out")`. The run itself
needs its own alone.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import trainer_utils
from transformers.trainer_utils import get_last_checkpoint

from oobleck.errors import CorruptCheckpoint
from oobleck.host.writing import write_in_place
from oobleck.job import CheckpointSpec
from oobleck.training.checkpoint import exported_optimizer
from oobleck.training.model import unwrapped

from .job import decayed_parameters, optimizer_options

if TYPE_CHECKING:
    from .job import TrainerJob

_STATE, _OPTIMIZER, _SCHEDULER = "trainer_state.json", "optimizer.pt", "scheduler.pt"
_RANDOM = "rng_state*.pth"
"""Random states, which transformers' own Trainer alone saves."""


def newest_of_transformers(directory: Path) -> str | None:
    """Return the newest checkpoint in an `output_dir`, if transformers' own Trainer saved it and not a run of ours."""
    if not directory.is_dir():
        return None
    found: str | None = get_last_checkpoint(str(directory))  # type: ignore[no-untyped-call]  # transformers' own
    return found if found is not None and any(Path(found).glob(_RANDOM)) else None


class PlainCheckpoints:
    def __init__(self, trainer: Any, job: TrainerJob) -> None:
        self._trainer = trainer
        self._job = job
        self._written: set[int] = set()
        self._found: set[int] = set()
        """Steps whose checkpoint an earlier run has left in the same place."""
        self._has_remarked = False

    def look_at(self, saves: CheckpointSpec, *, every: int) -> None:
        """Say on stderr if a run does not save all steps of which the script asks for a checkpoint."""
        own = saves.save_steps if saves.enabled else None
        if own is None or every % own:
            sys.stderr.write(
                f"oobleck: save_strategy asks for one every {every} steps, and the run saves others: its options "
                "(--save-every, checkpoint.save_steps) say which checkpoints there will be\n"
            )

    def of_step(self, step: int) -> Path | None:
        """Return the checkpoint of a step, if it was written in this run and is still there."""
        target = self._directory(step)
        return target if step in self._written and target.is_dir() else None

    def _directory(self, step: int) -> Path:
        return Path(self._trainer.args.output_dir) / f"checkpoint-{step}"

    def write(self, step: int, fetch: Callable[[], bool], saved: Path | None) -> None:
        """Write the checkpoint of a step, once `fetch` has put its weights into the trainer's model.

        `saved` is the run's own, which has the optimizer's state. Says once on stderr where weights are not here, or
        where the disk does not take them: nothing is left of that checkpoint, as others would continue from it.
        """
        target = self._directory(step)
        if step not in self._written and target.exists():
            self._found.add(step)
        try:
            if not fetch():
                self._remark(f"the weights of step {step} are not on this machine")
                return
            self._trainer.save_model(str(target), _internal_call=True)
            for stale in target.glob(_RANDOM):  # of another run, with this one's weights
                stale.unlink()
            self._written.add(step)
            if saved is not None and not self._trainer.args.save_only_model:
                self._write_optimizer(target, saved, step)
        # The run may have removed it, as save_total_limit asks for.
        except (CorruptCheckpoint, FileNotFoundError) as error:
            self._remark(str(error))
        except Exception as error:  # noqa: BLE001  a full disk: each library's writer raises its own
            self._drop(step, error)

    def _drop(self, step: int, error: Exception) -> None:
        self._written.discard(step)
        if step in self._found:  # it may be all that is left of the earlier run
            rest = "; an earlier run has left one there, of which some files may be this run's now"
        else:
            shutil.rmtree(self._directory(step), ignore_errors=True)
            rest = ""
        self._remark(f"that of step {step} cannot be written: {error}{rest}")

    def write_state(self, step: int, content: str) -> None:
        """Write the trainer's state beside the weights, if these could be written."""
        if (target := self.of_step(step)) is not None:
            try:
                write_in_place(target / _STATE, content)
            except OSError as error:
                self._drop(step, error)

    def rotate(self) -> None:
        """Remove those before the newest `save_total_limit`; the best one is kept, and named by the state."""
        args, state = self._trainer.args, self._trainer.state
        if state.best_global_step and (best := self.of_step(state.best_global_step)) is not None:
            state.best_model_checkpoint = str(best)
        if hasattr(trainer_utils, "rotate_checkpoints"):
            trainer_utils.rotate_checkpoints(
                output_dir=args.output_dir,
                save_total_limit=args.save_total_limit,
                best_model_checkpoint=state.best_model_checkpoint,
                use_mtime=True,
            )
        else:  # a method of the trainer, in other versions of transformers
            self._trainer._rotate_checkpoints(use_mtime=True, output_dir=args.output_dir)

    def leave_best(self) -> None:
        """Where `save_total_limit` is 1, remove all but the best one, as transformers does at the end."""
        args, best = self._trainer.args, self._trainer.state.best_model_checkpoint
        place = Path(args.output_dir)
        if args.save_total_limit != 1 or best is None or Path(best).resolve().parent != place.resolve():
            return
        for each in place.glob("checkpoint-*"):
            if each.name.removeprefix("checkpoint-").isdecimal() and not each.samefile(best):
                shutil.rmtree(each, ignore_errors=True)

    def _write_optimizer(self, target: Path, saved: Path, step: int) -> None:
        trainer, made = self._trainer, self._job.made
        optimizer = exported_optimizer(
            saved, unwrapped(trainer.model), decayed_parameters(trainer), made["optimizer"], optimizer_options(trainer)
        )
        factor = made["lr_lambda"]
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: factor(done + 1))
        optimizer._opt_called = True  # type: ignore[attr-defined]  # by which torch knows that it has taken steps
        scheduler.last_epoch, scheduler._step_count = step - 1, step
        scheduler.step()
        torch.save(optimizer.state_dict(), target / _OPTIMIZER)
        torch.save(scheduler.state_dict(), target / _SCHEDULER)

    def _remark(self, why: str) -> None:
        if not self._has_remarked:
            self._has_remarked = True
            sys.stderr.write(
                f"oobleck: {self._trainer.args.output_dir} has not all checkpoints of transformers' kind: {why}; the "
                "run's own are in its directory (docs/trainer.md, Checkpoints)\n"
            )
