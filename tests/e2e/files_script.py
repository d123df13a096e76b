"""A script whose framework writes its own checkpoints, which are saved in memory; it notes its losses.

`files_script.py FRAMEWORK OUT STEPS SECONDS_A_STEP`: `trainer` (transformers), `accelerate`, `lightning` or
`deepspeed`. A node's checkpoints are on its own disk, which is lost with its memory.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import oobleck.checkpoint

EVERY = 2
BATCH = 4

framework, out, steps, pause_s = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
disk = Path(os.environ["OOBLECK_CHECKPOINT_MEMORY"]) / "disk"
written, again = disk / "out", disk / "again"
rank = int(os.environ["RANK"])
torch.set_num_threads(1)
torch.manual_seed(0)


class Numbers(torch.utils.data.Dataset[Any]):
    """The same examples in every run."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> Any:
        inputs = torch.randn(20, generator=torch.Generator().manual_seed(index))
        return {"inputs": inputs, "labels": inputs.sum().reshape(1)}


class Model(torch.nn.Module):
    """Gives its loss, as transformers' do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(20, 48), torch.nn.Tanh(), torch.nn.Linear(48, 1))

    def forward(self, inputs: Any, labels: Any) -> Any:
        return {"loss": (self.layers(inputs) - labels).square().mean()}


def note(step: int, loss: float) -> None:
    """Write a line; other ranks' losses are in it."""
    said = {"step": step, "loss": loss, "restarts": int(os.environ["TORCHELASTIC_RESTART_COUNT"])}
    with open(f"{out}/log.{rank}", "a", encoding="utf-8") as log:
        log.write(json.dumps(said) + "\n")
    time.sleep(pause_s)


def mean(loss: Any) -> float:
    """The mean of a loss over all ranks."""
    total = loss.detach().clone()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def loader(taken: int = 0) -> torch.utils.data.DataLoader[Any]:
    """This rank's batches, in one order, without those that were taken before."""
    sampler: Any = torch.utils.data.DistributedSampler(Numbers(), shuffle=False)
    return torch.utils.data.DataLoader(Numbers(), batch_size=BATCH, sampler=list(sampler)[taken * BATCH :])


def by_trainer() -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class InMemory(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            oobleck.checkpoint.save_files(state.global_step, f"{args.output_dir}/checkpoint-{state.global_step}")

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if "loss" in logs:
                note(state.global_step, float(logs["loss"]))

    args = TrainingArguments(
        output_dir=str(written),
        max_steps=steps,
        per_device_train_batch_size=BATCH,
        learning_rate=1e-2,
        save_steps=EVERY,
        save_total_limit=1,
        logging_steps=1,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    args.device  # noqa: B018  # makes the process group
    step = oobleck.checkpoint.load_files(again)
    trainer = Trainer(model=Model(), args=args, train_dataset=Numbers(), callbacks=[InMemory()])
    trainer.train(resume_from_checkpoint=None if step is None else str(again))


def by_accelerate() -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model: Any = Model()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, batches = accelerator.prepare(
        model, optimizer, torch.utils.data.DataLoader(Numbers(), batch_size=BATCH)
    )
    step = oobleck.checkpoint.load_files(again) or 0
    if step:
        accelerator.load_state(str(again))
    for batch in accelerator.skip_first_batches(batches, step):
        if step == steps:
            break
        loss = model(**batch)["loss"]
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % EVERY == 0:
            accelerator.save_state(str(written))
            oobleck.checkpoint.save_files(step, written)
        note(step, mean(loss))
    accelerator.end_training()


def by_lightning() -> None:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Model()

        def training_step(self, batch: Any, index: int) -> Any:
            self.last = self.model(**batch)["loss"]
            return self.last

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    class InMemory(lightning.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            if trainer.global_step % EVERY == 0:
                trainer.save_checkpoint(written / "last.ckpt")
                oobleck.checkpoint.save_files(trainer.global_step, written)
            note(trainer.global_step, mean(module.last))

    dist.init_process_group("gloo")
    step = oobleck.checkpoint.load_files(again)
    trainer = lightning.Trainer(
        max_steps=steps,
        accelerator="cpu",
        strategy="ddp",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
        callbacks=[InMemory()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        use_distributed_sampler=False,
    )
    # Lightning counts the batches of an epoch that was begun, and leaves it to the loader to continue there.
    trainer.fit(Module(), loader(step or 0), ckpt_path=None if step is None else str(again / "last.ckpt"))


def by_deepspeed() -> None:
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo")
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
        "steps_per_print": 10**6,
    }
    model = Model()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    step = oobleck.checkpoint.load_files(again) or 0
    if step:
        engine.load_checkpoint(str(again))
    for batch in loader(step):
        if step == steps:
            break
        loss = engine(**batch)["loss"]
        engine.backward(loss)
        engine.step()
        step += 1
        if step % EVERY == 0:
            engine.save_checkpoint(str(written), tag="newest")
            oobleck.checkpoint.save_files(step, written)
        note(step, mean(loss))


{"trainer": by_trainer, "accelerate": by_accelerate, "lightning": by_lightning, "deepspeed": by_deepspeed}[framework]()
if dist.is_initialized():
    dist.destroy_process_group()
