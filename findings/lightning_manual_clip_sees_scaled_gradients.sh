#!/usr/bin/env bash
# Lightning: with manual optimization and 16-mixed, clip_gradients clips the gradients with the loss scale on them
#
# One would guess: self.clip_gradients(optimizer, 1.0), which the documentation calls between manual_backward and
# optimizer.step, clips as Trainer(gradient_clip_val=1.0) does under automatic optimization, in 16-mixed too.
#
# What happens (lightning 2.6.6, torch 2.13.0), a gradient of 20 clipped to 1, one SGD step with rate 1:
#                            32-true   16-mixed, scale 256   16-mixed, scale 1,024
#   automatic optimization    1.0000          1.0000                 1.0000
#   manual optimization       1.0000          0.0039                 0.0010
# The scaler removes its factor within optimizer.step, after the clipping, so that the limit is 1 / scale. A scaler
# starts at 65,536 and doubles. Nothing is logged. The issue is known (Lightning 18089, open).
#
# Why it matters: GRPO and GANs need manual optimization, and clip at 1 or lower. In 16-mixed such a run hardly learns
# with SGD. With Adam, which divides by the gradients' size, every step counts as clipped, so that large and small
# gradients get the same weight in its averages. Clip in on_before_optimizer_step, which runs after the scale is off.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 lightning==2.6.6
cat > "$folder/check.py" <<'PY'
import logging

import lightning
import torch
from lightning.pytorch.plugins import MixedPrecision

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
print(f"lightning {lightning.__version__}, torch {torch.__version__}")


class Module(lightning.LightningModule):
    def __init__(self, way):
        super().__init__()
        self.automatic_optimization = way == "automatic"
        self.way, self.layer = way, torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(self.layer.weight)

    def training_step(self, batch, index):
        loss = (self.layer(batch) - 10).square().mean()
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        self.manual_backward(loss)
        if self.way == "manual":
            self.clip_gradients(optimizer, 1.0, "norm")
        optimizer.step()

    def on_before_optimizer_step(self, optimizer):
        if self.way == "hook":
            self.clip_gradients(optimizer, 1.0, "norm")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


def step(way, scale):
    scaled = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=float(scale or 1)))
    module = Module(way)
    trainer = lightning.Trainer(max_steps=1, accelerator="cpu", logger=False, enable_checkpointing=False,
                                enable_progress_bar=False, enable_model_summary=False, plugins=scale and [scaled],
                                gradient_clip_val=1.0 if way == "automatic" else None)
    trainer.fit(module, torch.utils.data.DataLoader(torch.ones(1, 1)))
    return module.layer.weight.item()


moved = {way: [step(way, scale) for scale in (None, 256, 1024)] for way in ("automatic", "manual", "hook")}
for way, found in moved.items():
    print(f"{way}: " + " ".join(f"{one:.4f}" for one in found))
near = lambda found, wanted: all(abs(a / b - 1) < 0.01 for a, b in zip(found, wanted))
assert near(moved["automatic"], [1, 1, 1]) and near(moved["hook"], [1, 1, 1]), "changed: the right ways differ"
assert near(moved["manual"], [1, 1 / 256, 1 / 1024]), "changed: clip_gradients clips unscaled gradients"
print("as described")
PY
"$folder/venv/bin/python" "$folder/check.py"
