"""`oobleck.transformers.Trainer`: transformers' Trainer, whose `train()` trains on the nodes of a run."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterable, MutableMapping
from pathlib import Path
from typing import Any, ClassVar

import torch
import transformers
from transformers import PreTrainedTokenizerBase, ProcessorMixin, TrainingArguments, trainer_utils
from transformers.trainer_utils import HubStrategy, TrainOutput

from oobleck.errors import UsageError
from oobleck.host.handover import is_in_worker, is_received, take_over
from oobleck.training.checkpoint import import_trainer_checkpoint, is_trainer_checkpoint
from oobleck.training.model import unwrapped

from .checks import check_trainer, default_arguments
from .follower import RunFollower
from .job import TrainerJob, decayed_parameters, optimizer_options
from .kept_state import adopt_state
from .launched import TRAINS_ONCE, script_to_launch, show_user_errors_alone, train_here
from .plain_checkpoints import newest_of_transformers
from .repeats import second_train

_COMPARES = "compare_trainer_and_checkpoint_args"


class Trainer(transformers.Trainer):
    """transformers' Trainer, with one difference: `train()` trains on the nodes of `oobleck up`.

    docs/trainer.md has the effect of each argument.
    """

    arguments_kind: ClassVar[type[TrainingArguments]] = TrainingArguments
    counts_for_logs: ClassVar[frozenset[str]] = frozenset()
    """Numbers of the trainer that its loss may change, since logs alone read them."""

    def metrics_for_logs(self) -> Iterable[MutableMapping[str, Any]]:
        """Return what the loss notes for logs."""
        return ()

    def __init__(
        self,
        model: transformers.PreTrainedModel | torch.nn.Module | None = None,
        args: TrainingArguments | None = None,
        *others: Any,
        **named: Any,
    ) -> None:
        """All arguments are transformers' own."""
        self._has_trained = False
        self._script_name = ""
        self._resumes_from: str | bool | None = None
        self.resumes_from: Path | None = None
        """The checkpoint of ours that `train()` was given, or what has been made of transformers' own."""
        self.ignored_keys: list[str] | None = None
        """Outputs of the model that evaluations leave out."""
        args = args or self.arguments_kind(output_dir="tmp_trainer")
        if is_in_worker():
            args.push_to_hub = False  # the script's own process does
        self._default = default_arguments(args)  # before the trainer, as arguments set devices up
        # A worker computes on one GPU, as a rank of torchrun does. Otherwise a batch would be for all of a machine's.
        args._n_gpu = min(args.n_gpu, 1)
        # By name where that is possible: in some subclasses, others come before it.
        named |= {} if others else {"args": args}
        super().__init__(model, *((args, *others) if others else ()), **named)

    def train(
        self,
        resume_from_checkpoint: str | os.PathLike[str] | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Train on the nodes; returns once the run has ended, with the trained weights in `model`.

        Raises ConfigError that names an unsupported feature.
        """
        if not is_received():
            show_user_errors_alone()
        if trial is not None:
            raise UsageError("Trainer.train(trial=…): start one run for each trial")
        if self._has_trained:
            raise UsageError(f"Trainer.train() is called twice: {TRAINS_ONCE}")
        self._has_trained = True
        self._script_name = Path(sys.argv[0]).stem
        if isinstance(resume_from_checkpoint, os.PathLike):
            resume_from_checkpoint = os.fspath(resume_from_checkpoint)
        self._resumes_from = resume_from_checkpoint or None
        self.ignored_keys = ignore_keys_for_eval
        # A run trains once, because workers run the script up to its first `train()`: a second one is refused now, and
        # not hours later. A loop may be left after its first pass.
        if (found := second_train(sys._getframe(1))) is not None:
            line, is_loop = found
            if not is_loop:
                raise UsageError(f"Trainer.train() is called again in line {line}: {TRAINS_ONCE}")
            warnings.warn(f"Trainer.train() is called in the loop of line {line}: {TRAINS_ONCE}", stacklevel=2)
        check_trainer(self, self._default)
        if self.model_init is not None:
            # Workers call it as well: with the same seed, all make the same model.
            transformers.set_seed(self.args.seed)
            self.model = self.call_model_init()
        # Only a process of a run receives the trainer; a script started by plain `python` starts a run itself.
        output: TrainOutput = take_over(self) if is_received() else train_here(self, script_to_launch())
        if self.args.push_to_hub and self.args.hub_strategy == HubStrategy.EVERY_SAVE:
            self.push_to_hub(commit_message=f"Training in progress, step {self.state.global_step}")
        return output

    def job(self) -> TrainerJob:
        """Return this trainer's job. Raises ConfigError for a trainer that cannot be trained."""
        # transformers' own train() does this first; the padding token says which token of a sample is classified.
        if isinstance(self.processing_class, PreTrainedTokenizerBase | ProcessorMixin):
            if hasattr(trainer_utils, "align_special_tokens"):
                trainer_utils.align_special_tokens(self.model, self.processing_class)  # type: ignore[no-untyped-call]
            else:  # a method of the trainer, in other versions of transformers
                getattr(self, "_align_special_tokens", lambda: None)()
        return TrainerJob(self, tag=self._script_name)

    def resume(self, job: TrainerJob) -> str | bool | None:
        """Return the checkpoint to resume this trainer's job from: its path, True for the run's newest, or None.

        With `resume_from_checkpoint=True`, it is the newest one in `output_dir` if transformers' own Trainer saved it.

        Converts a checkpoint of transformers. Raises ConfigError for one that cannot be converted.
        """
        wanted = self._resumes_from
        if wanted is True:
            wanted = newest_of_transformers(Path(self.args.output_dir or ".")) or True
        if not isinstance(wanted, str):
            return wanted
        if is_trainer_checkpoint(Path(wanted)):
            self._load_from_checkpoint(wanted)
            model, options = unwrapped(self.model), optimizer_options(self)
            decayed, whole = decayed_parameters(self), job.whole_loss
            self.resumes_from = import_trainer_checkpoint(
                Path(wanted), model, decayed, options, whole_loss=whole, flow=job.flow
            )
            state = adopt_state(Path(wanted), self.resumes_from)
            # Its warnings name the arguments that have changed. In other versions of transformers it is a method.
            owner = trainer_utils if hasattr(trainer_utils, _COMPARES) else self
            getattr(owner, _COMPARES)(self.args, state)
            return str(self.resumes_from)
        self.resumes_from = Path(wanted)
        return wanted

    def follow(self, job: TrainerJob) -> RunFollower:
        """Return the follower that applies the events of the job's run to this trainer."""
        return RunFollower(self, job)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate in the script's own process, on its own device, as transformers does."""
        self.place_model()
        return super().evaluation_loop(*args, **kwargs)

    def place_model(self) -> None:
        """Move the model to the script's own device, for an evaluation: training leaves it where it is."""
        if getattr(self, "place_model_on_device", True) and self.model is not None:
            super()._move_model_to_device(self.model, self.args.device)
        if self.is_in_train and not self.accelerator._models:  # as training by transformers itself would have done
            self.accelerator.prepare_model(self.model, evaluation_mode=True)

    def _move_model_to_device(self, model: torch.nn.Module, device: torch.device) -> None:
        """Do nothing: workers compute with their own parts of the model, and `evaluation_loop` moves it when needed."""


class Seq2SeqTrainer(Trainer, transformers.Seq2SeqTrainer):
    """transformers' Seq2SeqTrainer, whose evaluations may generate: they run in the script's own process."""
