#!/usr/bin/env bash
# Lightning, torchmetrics: with precision="bf16-true" metrics of a module stop counting after 256 updates
#
# One would guess: a torchmetrics metric that is an attribute of a LightningModule keeps float32 states under
# "bf16-true": torchmetrics guards them, so that module.bfloat16() leaves them alone.
#
# What happens (lightning 2.6.6, torchmetrics 1.9.0, torch 2.13.0): Lightning calls module.to(torch.bfloat16), which the
# guard does not see, and the states become bfloat16. A count stops at 256, since 256 + 1 is rounded to 256. Validation
# over 1,000 batches whose value is 0 in the first half and 1 in the second:
#                            32-true   bf16-mixed   bf16-true
#   self.log("name", value)   0.5        0.5          0.5
#   MeanMetric                0.5        0.5          1.0     (count and sum both stop at 256)
#   SumMetric                 500        500          256
#   PSNR                      2.15       2.15         2.92
# Nothing is logged.
#
# Why it matters: rewards are averaged with MeanMetric, images compared with PSNR or SSIM, and one update per batch is
# soon beyond 256. The mean of a constant still looks right, so a quick check shows nothing. Log plain numbers, or keep
# the metrics outside the module.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 lightning==2.6.6 torchmetrics==1.9.0
cat > "$folder/check.py" <<'PY'
import logging

import lightning
import torch
import torchmetrics

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
print(f"lightning {lightning.__version__}, torchmetrics {torchmetrics.__version__}, torch {torch.__version__}")


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.mean, self.sum = torchmetrics.MeanMetric(), torchmetrics.SumMetric()
        self.psnr = torchmetrics.image.PeakSignalNoiseRatio(data_range=1.0)

    def validation_step(self, batch, index):
        value = float(index >= 500)
        self.mean.update(value)
        self.sum.update(value)
        self.psnr.update(torch.zeros(1, 1, 4, 4), torch.full((1, 1, 4, 4), 0.1 + value))
        self.log_dict({"plain": value, "mean": self.mean, "sum": self.sum, "psnr": self.psnr})


results = {}
for precision in ("32-true", "bf16-mixed", "bf16-true"):
    module = Module()
    trainer = lightning.Trainer(precision=precision, accelerator="cpu", logger=False, enable_checkpointing=False,
                                enable_progress_bar=False, enable_model_summary=False)
    trainer.validate(module, torch.utils.data.DataLoader(torch.zeros(1000, 1), batch_size=1), verbose=False)
    results[precision] = {name: round(value.item(), 3) for name, value in trainer.callback_metrics.items()}
    print(precision, results[precision], module.mean.mean_value.dtype)
guarded, cast = (torch.nn.ModuleDict({"mean": torchmetrics.MeanMetric()}) for _ in range(2))
types = guarded.bfloat16()["mean"].mean_value.dtype, cast.to(torch.bfloat16)["mean"].mean_value.dtype
print("MeanMetric in a module: after .bfloat16()", types[0], "after .to(torch.bfloat16)", types[1])
assert results["32-true"] == results["bf16-mixed"]
assert results["32-true"]["mean"] == results["bf16-true"]["plain"] == 0.5 and results["32-true"]["sum"] == 500
assert types == (torch.float32, torch.bfloat16), "changed: the guard"
wrong = results["bf16-true"]
assert wrong["sum"] == 256 and wrong["mean"] == 1 and wrong["psnr"] > 2.8, "changed: the metrics count on"
print("as described")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
