#!/usr/bin/env bash
# Lightning, accelerate: the last update of an epoch has fewer micro-batches, and its gradient is smaller, not a mean
#
# One would guess: an update over fewer micro-batches, where the accumulation does not divide the epoch, takes the mean
# gradient of those that it has, as transformers' Trainer does.
#
# What happens (lightning 2.6.6, accelerate 1.15.0, transformers 5.24.0, torch 2.13.0): Lightning and accelerate divide
# each loss by the full number, and step at the end of the epoch nevertheless. Gradients of the updates of one epoch,
# for a loss whose gradient is 1 in each micro-batch:
#   micro-batches, accumulation      6, 4           9, 4                  100, 64
#   Lightning                        1, 0.5         1, 1, 0.25            1, 0.5625
#   accelerate                       1, 0.5         1, 1, 0.25            1, 0.5625
#   transformers' Trainer            1, 1           1, 1, 1               1, 1
# Nothing is logged.
#
# Why it matters: LoRAs are trained on few images with large accumulation, so that one update in two or three may be so.
# It counts as a step of the schedule, weight decay is applied in full, and gradient clipping acts on less. The
# norm that is logged falls at the end of each epoch. The same settings give other updates in Trainer. Let the
# accumulation divide the number of micro-batches, or drop the rest.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 lightning==2.6.6 accelerate==1.15.0 \
  transformers==5.24.0
cat > "$folder/check.py" <<'PY'
import logging
import sys

import accelerate
import lightning as L
import torch
import transformers
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainingArguments

print(f"lightning {L.__version__}, accelerate {accelerate.__version__}, transformers {transformers.__version__}, "
      f"torch {torch.__version__}")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
transformers.logging.set_verbosity_error()


class Module(L.LightningModule):
    """A module whose loss has gradient 1."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.gradients = []

    def forward(self, x):
        return {"loss": (self.weight * x).mean(), "logits": x}

    def training_step(self, batch, index):
        return self(batch)["loss"]

    def on_before_optimizer_step(self, optimizer):
        self.gradients.append(self.weight.grad.item())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


def lightning(count, accumulation):
    module = Module()
    trainer = L.Trainer(max_epochs=1, accumulate_grad_batches=accumulation, logger=False, enable_progress_bar=False,
                        enable_model_summary=False, enable_checkpointing=False, accelerator="cpu")
    trainer.fit(module, DataLoader(torch.ones(count)))
    return module.gradients


def with_accelerate(count, accumulation):
    accelerator, module, gradients = Accelerator(cpu=True, gradient_accumulation_steps=accumulation), Module(), []
    model, optimizer, loader = accelerator.prepare(
        module, torch.optim.AdamW(module.parameters()), DataLoader(torch.ones(count)))
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch)["loss"])
            if accelerator.sync_gradients:
                gradients.append(module.weight.grad.item())
            optimizer.step()
            optimizer.zero_grad()
    return gradients


class Reader(TrainerCallback):
    def on_pre_optimizer_step(self, arguments, state, control, model=None, **others):
        model.gradients.append(model.weight.grad.item())


def transformers_trainer(count, accumulation):
    module = Module()
    arguments = TrainingArguments(
        sys.argv[1], per_device_train_batch_size=1, gradient_accumulation_steps=accumulation, num_train_epochs=1,
        report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True, remove_unused_columns=False,
        max_grad_norm=0, logging_strategy="no")
    Trainer(module, arguments, train_dataset=[{"x": torch.ones(1)}] * count, callbacks=[Reader()]).train()
    return module.gradients


for count, accumulation in ((6, 4), (9, 4), (100, 64)):
    full, rest = divmod(count, accumulation)
    for name, train in (("Lightning", lightning), ("accelerate", with_accelerate), ("Trainer", transformers_trainer)):
        found = train(count, accumulation)
        print(f"{count} micro-batches, accumulation {accumulation}, {name}:", *(round(each, 4) for each in found))
        last = 1.0 if name == "Trainer" else rest / accumulation
        expected = torch.tensor([1.0] * full + [last])
        assert torch.allclose(torch.tensor(found), expected, atol=1e-5), f"changed: {name}"
print("as described: the last update is smaller")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py" "$folder"
