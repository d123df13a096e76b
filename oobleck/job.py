"""What a user asks for, as values: the job, and the nodes to run it on.

Pure values, shared by every floor. Reading them from YAML, hostfiles and command lines is `cli`'s business.
Names follow Hugging Face's `TrainingArguments` where it has one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from oobleck.errors import ConfigError

__all__ = [
    "CheckpointSpec",
    "ControlSpec",
    "DataSpec",
    "JobSpec",
    "ModelSpec",
    "NodeSpec",
    "OptimizerSpec",
    "ScalingSpec",
    "ScheduleName",
    "ScriptSpec",
]

Scalar = bool | int | float | str | None
ScheduleName = Literal["1f1b", "gpipe", "zero-bubble", "auto"]


def _require(condition: bool, field_name: str, value: object, expectation: str) -> None:
    if not condition:
        raise ConfigError(f"{field_name}: {value!r} is not possible; it must be {expectation}")


def _check_pattern(field_name: str, pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"{field_name}: {pattern!r} is no regular expression: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A transformers model, built from its configuration, or from a directory with its weights."""

    type: str = "gpt2"
    """The `model_type` of a transformers configuration: gpt2, llama, qwen2, …"""
    config: Mapping[str, Scalar] = field(default_factory=dict)
    """Overrides of that configuration. `vocab_size` is the tokenizer's where it is left out."""
    path: str | None = None
    """A directory, on every node, that transformers' `save_pretrained` wrote: `type` is its own then, training starts
    from its weights, and its tokenizer is taken unless another is named."""
    task: Literal["causal_lm", "masked_lm"] | None = None
    """What is predicted; None: masked tokens by encoders such as BERT, the next token by all others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSpec:
    """What to train on: text or tokens, packed into samples of `sequence_length` tokens."""

    paths: tuple[str, ...] = ()
    """Files or directories: text, JSON lines (.jsonl), or tokens (.bin, .npy). None means the sources of Python's own
    standard library."""
    dataset_path: str | None = None
    """A Hugging Face dataset in place of `paths`: what `datasets.load_dataset` takes for its path, or a directory that
    its `save_to_disk` wrote."""
    dataset_name: str | None = None
    """Which configuration of that dataset."""
    dataset_split: str = "train"
    text_column: str = "text"
    """The key of JSON lines, or the column of a dataset, that holds the text."""
    tokenizer: str | None = None
    """A tokenizer.json, or a directory with one; None: that of `model.path`, or else one is trained on the text."""
    token_dtype: Literal["uint16", "uint32", "int32", "int64"] = "uint16"  # noqa: S105  no password
    """Of .bin files, which are nothing but tokens in the byte order of Intel's processors."""
    shards: tuple[str, ...] = ()
    """In place of `paths`: files, patterns of file names, or streams (redis://HOST:PORT/KEY), of any lengths, that are
    handed out to steps as they are read. A record is a sample: a row of tokens (.bin, .npy), or a line of text."""
    follow: bool = False
    """Shards grow: whoever has read all of them waits for more, until a file NAME.end lies beside a file."""
    epochs: int = 1
    """How often shards are read; training ends then, if `max_steps` has not come before."""
    shards_at_once: int | None = None
    """How many shards are read side by side; None: one, or all of those that grow."""
    sequence_length: int = 64
    vocab_size: int = 4096
    """Size of the BPE tokenizer that is trained on the text; of tokens in files, one more than the largest can be."""
    max_bytes: int = 8_000_000
    """How much of the text is used."""
    validation_split: float = 0.0
    """The share of samples that is kept for evaluation and never trained on."""
    mlm_probability: float = 0.15
    """The share of a sample's tokens that masked language models predict."""

    def __post_init__(self) -> None:
        _require(self.sequence_length >= 2, "data.sequence_length", self.sequence_length, "at least 2")
        _require(self.vocab_size >= 257, "data.vocab_size", self.vocab_size, "at least 257 (256 bytes and an end)")
        _require(self.max_bytes >= 1, "data.max_bytes", self.max_bytes, "at least 1")
        _require(self.epochs >= 1, "data.epochs", self.epochs, "at least 1")
        _require(
            self.shards_at_once is None or 1 <= self.shards_at_once <= 64,
            "data.shards_at_once",
            self.shards_at_once,
            "between 1 and 64, or left out",
        )
        if self.shards:
            others = bool(self.paths or self.dataset_path)
            _require(not others, "data.shards", list(self.shards), "left out where paths or dataset_path are given")
            split = self.validation_split
            _require(not split, "data.validation_split", split, "0 where the data is in shards")
        _require(0 <= self.validation_split < 1, "data.validation_split", self.validation_split, "at least 0, under 1")
        _require(0 < self.mlm_probability < 1, "data.mlm_probability", self.mlm_probability, "between 0 and 1")
        _require(
            not (self.paths and self.dataset_path), "data.dataset_path", self.dataset_path, "left out where paths are"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSpec:
    """An optimizer of torch.optim with a learning-rate schedule and clipping by the global gradient norm."""

    optim: str = "adamw"
    """The class of torch.optim in small letters; `TrainingArguments`' adamw_torch and adamw_torch_fused too."""
    optim_args: Mapping[str, Scalar] = field(default_factory=dict)
    """Further arguments of that class."""
    learning_rate: float = 1e-3
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    adam_epsilon: float = 1e-8
    weight_decay: float = 0.1
    max_grad_norm: float = 1.0
    """0 turns clipping off."""
    lr_scheduler_type: Literal[
        "constant",
        "constant_with_warmup",
        "linear",
        "cosine",
        "cosine_with_restarts",
        "cosine_with_min_lr",
        "polynomial",
        "inverse_sqrt",
        "warmup_stable_decay",
    ] = "cosine"
    lr_scheduler_kwargs: Mapping[str, Scalar] = field(default_factory=dict)
    """Further arguments of the schedule, by the names that transformers gives them."""
    warmup_steps: int = 10

    def __post_init__(self) -> None:
        _require(self.learning_rate > 0, "optimizer.learning_rate", self.learning_rate, "positive")
        _require(self.max_grad_norm >= 0, "optimizer.max_grad_norm", self.max_grad_norm, "0 (off) or positive")
        _require(self.warmup_steps >= 0, "optimizer.warmup_steps", self.warmup_steps, "0 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlSpec:
    """How failures are noticed, in seconds."""

    heartbeat_interval_s: float = 0.5
    lease_s: float = 3.0
    """A node that was not heard of for this long is taken for lost."""
    connect_timeout_s: float = 10.0
    start_timeout_s: float = 120.0
    """How long a node may take from its connection to a worker that is ready."""
    orphan_timeout_s: float = 600.0
    """How long agents train on without a master before they stop, and how long a master that hears of none waits."""
    rejoin_after_s: float = 10.0
    """A lost node is tried again after this time, then after twice the time, and so on; 0 leaves it to the user."""
    notice_command: str | None = None
    """A shell command that succeeds when the node it runs on is about to be taken away; None: nothing is asked."""
    notice_url: str | None = None
    """A URL that answers 200 then."""
    notice_pattern: str | None = None
    """What its answer must contain then, as a regular expression; None: anything."""
    notice_headers: Mapping[str, Scalar] = field(default_factory=dict)
    """HTTP headers that it is asked with."""
    notice_interval_s: float = 5.0

    def __post_init__(self) -> None:
        _require(self.heartbeat_interval_s > 0, "control.heartbeat_interval_s", self.heartbeat_interval_s, "positive")
        _require(self.notice_interval_s > 0, "control.notice_interval_s", self.notice_interval_s, "positive")
        if self.notice_url is not None:
            is_web = self.notice_url.startswith(("http://", "https://"))
            _require(is_web, "control.notice_url", self.notice_url, "an address that begins with http:// or https://")
        if self.notice_pattern is not None:
            _check_pattern("control.notice_pattern", self.notice_pattern)
        _require(self.rejoin_after_s >= 0, "control.rejoin_after_s", self.rejoin_after_s, "0 (never) or positive")
        _require(
            self.lease_s >= 2 * self.heartbeat_interval_s,
            "control.lease_s",
            self.lease_s,
            f"at least two heartbeat intervals ({2 * self.heartbeat_interval_s})",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptSpec:
    """The Python script that a job comes from; workers run it again for what no setting can name."""

    name: str
    """Of the file."""
    source: str
    arguments: tuple[str, ...] = ()
    directory: str = ""
    """Where it lies; what it imports is looked for there, on nodes that have such a directory."""
    provides: tuple[str, ...] = ()
    """What the script makes itself: model, loss, data, eval_data, optimizer, lr_lambda, callbacks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSpec:
    """When the state is saved, and where."""

    enabled: bool = True
    save_steps: int | None = None
    """Save after every so many steps. Without this and `save_interval_s`, the interval follows from what a save costs
    and how often failures need one."""
    save_interval_s: float | None = None
    """Save every so many seconds."""
    save_total_limit: int = 3
    """How many checkpoints are kept; older ones are removed."""
    directory: str | None = None
    """Where checkpoints lie, on every node; None is `checkpoints` in the run's directory there. Shared by all nodes,
    or a lost node takes what it saved with it."""
    compare_steps: int = 100
    """After every so many steps the copies of each layer are compared; 0 turns it off."""

    def __post_init__(self) -> None:
        if self.save_steps is not None:
            _require(self.save_steps >= 1, "checkpoint.save_steps", self.save_steps, "at least 1")
        if self.save_interval_s is not None:
            _require(self.save_interval_s > 0, "checkpoint.save_interval_s", self.save_interval_s, "positive")
        _require(
            self.save_steps is None or self.save_interval_s is None,
            "checkpoint.save_interval_s",
            self.save_interval_s,
            "left out where save_steps is given",
        )
        _require(self.save_total_limit >= 1, "checkpoint.save_total_limit", self.save_total_limit, "at least 1")
        _require(self.compare_steps >= 0, "checkpoint.compare_steps", self.compare_steps, "0 (off) or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingSpec:
    """On how many of the nodes that are there the job trains; the others rest, connected."""

    policy: Literal["all", "efficient", "deadline"] = "all"
    """All; as many as add at least a fifth of what a node gives on average; or the fewest that end in time."""
    deadline_s: float | None = None
    """Of the policy `deadline`: seconds from the start of the run in which it is to end."""
    hysteresis_s: float = 60.0
    """Another number of nodes has to be the better one for so long."""

    def __post_init__(self) -> None:
        is_timed = self.policy == "deadline"
        _require(
            (self.deadline_s is not None) == is_timed,
            "scaling.deadline_s",
            self.deadline_s,
            "given where the policy is deadline" if is_timed else "left out unless the policy is deadline",
        )
        if self.deadline_s is not None:
            _require(self.deadline_s > 0, "scaling.deadline_s", self.deadline_s, "positive")
        _require(self.hysteresis_s >= 0, "scaling.hysteresis_s", self.hysteresis_s, "0 or positive")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """A training job, complete: what every worker needs to know beside the plan.

    The defaults are a GPT-2 of 11 million parameters, small enough to train on a laptop's processor.
    """

    tag: str = "gpt2-demo"
    """Names the run: its directory is `<base_dir>/<tag>`."""
    model: ModelSpec = field(
        default_factory=lambda: ModelSpec(type="gpt2", config={"n_embd": 320, "n_layer": 8, "n_head": 5})
    )
    data: DataSpec = field(default_factory=DataSpec)
    optimizer: OptimizerSpec = field(default_factory=OptimizerSpec)
    control: ControlSpec = field(default_factory=ControlSpec)
    checkpoint: CheckpointSpec = field(default_factory=CheckpointSpec)
    scaling: ScalingSpec = field(default_factory=ScalingSpec)
    max_steps: int = 120
    global_batch_size: int = 8
    """Samples in one step."""
    microbatch_size: int = 1
    """Samples in one microbatch; divides the global batch size."""
    dtype: Literal["float32", "float64", "bfloat16", "float16"] = "float32"
    """The last two are mixed precision: parameters stay float32; float16 scales its loss."""
    initial_loss_scale: float = 65536.0
    """Of float16; it is halved when gradients overflow, and doubled when they have not for long."""
    activation_checkpointing: bool = False
    """Blocks keep their input alone and compute what is between again in their backward pass."""
    compile: bool = False
    """Blocks are compiled by torch when they are first run."""
    device: Literal["cpu", "cuda"] = "cpu"
    seed: int = 0
    eval_steps: int | None = None
    """Evaluate after every so many steps; None: never."""
    max_eval_samples: int | None = None
    """At most so many of the samples kept for evaluation; None: all."""
    fault_threshold: int = 1
    """f: the number of simultaneous node failures that never cost state."""
    num_pipelines: int | None = None
    """Asks the planner for exactly this many pipelines as long as the nodes allow it; None leaves it free."""
    schedule: ScheduleName = "1f1b"
    """`auto` has every plan choose for each of its pipelines: zero-bubble where that saves time, else 1f1b."""
    reductions_per_step: int | Literal["auto"] = "auto"
    """How often a step's gradients are reduced, so that a failure costs a part of a step at most: a long step several
    times, by default. Each but the last keeps the sums so far in memory of their own."""
    tensor_parallel: int = 1
    """Devices of a node that share each stage, by the model's own plan."""
    device_memory_bytes: int | None = None
    """Memory of one device; None asks the nodes."""
    script: ScriptSpec | None = None
    """What the job comes from, if not from a file alone."""
    torch_threads: int | None = None
    """Threads a worker computes with; None divides a host's cores among its workers."""

    def __post_init__(self) -> None:
        valid_tag = self.tag and all(c.isalnum() or c in "._-" for c in self.tag) and self.tag[0] not in ".-"
        _require(bool(valid_tag), "tag", self.tag, "letters, digits, '.', '_' and '-', starting with none of '.-'")
        _require(len(self.tag) <= 40, "tag", self.tag, "at most 40 characters (it is part of a socket's path)")
        _require(self.max_steps >= 1, "max_steps", self.max_steps, "at least 1")
        _require(self.microbatch_size >= 1, "microbatch_size", self.microbatch_size, "at least 1")
        _require(
            self.global_batch_size >= 1 and self.global_batch_size % self.microbatch_size == 0,
            "global_batch_size",
            self.global_batch_size,
            f"a multiple of microbatch_size ({self.microbatch_size})",
        )
        _require(
            self.initial_loss_scale > 0 and math.frexp(self.initial_loss_scale)[0] == 0.5,
            "initial_loss_scale",
            self.initial_loss_scale,
            "a power of two, as 65536.0",
        )
        _require(self.tensor_parallel >= 1, "tensor_parallel", self.tensor_parallel, "at least 1")
        _require(
            self.tensor_parallel == 1 or self.schedule != "zero-bubble",
            "schedule",
            self.schedule,
            "1f1b, gpipe or auto where devices share stages (tensor_parallel)",
        )
        _require(
            not self.compile or (self.tensor_parallel == 1 and self.schedule != "zero-bubble"),
            "compile",
            self.compile,
            "false where devices share stages (tensor_parallel) or backward passes are split (zero-bubble)",
        )
        _require(self.fault_threshold >= 0, "fault_threshold", self.fault_threshold, "0 or more")
        _require(
            self.reductions_per_step == "auto" or self.reductions_per_step >= 1,
            "reductions_per_step",
            self.reductions_per_step,
            "auto, or at least 1",
        )
        for name in ("eval_steps", "max_eval_samples"):
            value = getattr(self, name)
            _require(value is None or value >= 1, name, value, "at least 1, or left out")
        if self.num_pipelines is not None:
            _require(self.num_pipelines >= 1, "num_pipelines", self.num_pipelines, "at least 1")
            _require(
                self.num_pipelines <= self.num_microbatches,
                "num_pipelines",
                self.num_pipelines,
                f"at most the {self.num_microbatches} microbatches of a step",
            )

    @property
    def text(self) -> DataSpec:
        """The data, with the tokenizer of the model's directory where no other is named."""
        return self.data if self.data.tokenizer else replace(self.data, tokenizer=self.model.path)

    @property
    def may_split_backward(self) -> bool:
        """Whether backward passes may be taken in two parts."""
        is_whole = self.tensor_parallel > 1 or self.compile
        return self.schedule == "zero-bubble" or (self.schedule == "auto" and not is_whole)

    def is_evaluated(self, step: int) -> bool:
        """Whether the model is evaluated after a step: that depends on its number alone, so that all agree."""
        return self.eval_steps is not None and step > 0 and step % self.eval_steps == 0

    @property
    def num_microbatches(self) -> int:
        """Microbatches in one step, over all pipelines."""
        return self.global_batch_size // self.microbatch_size


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSpec:
    """One line of the hostfile: how a node is reached and which of its devices are ours."""

    name: str
    """Unique in the job: the host, or host#2, host#3, … where the host appears again."""
    host: str
    devices: tuple[int, ...] = (0,)
    port: int | None = None
    """None leaves it to ~/.ssh/config."""
    user: str | None = None
    address: str | None = None
    """Where process groups listen: an address of the node, its name, or one of its network interfaces. None is the
    address that SSH reached it by."""

    @property
    def num_devices(self) -> int:
        return len(self.devices)
