#!/usr/bin/env bash
# Lightning: with precision="bf16-true" random numbers drawn in training_step are bfloat16
#
# One would guess: "true" half precision casts the module and its inputs; a new tensor such as torch.rand(n) made in
# training_step stays float32, as it does with "bf16-mixed".
#
# What happens (lightning 2.6.6, torch 2.13.0): torch's default dtype is bfloat16 during the step, so all new floating
# tensors are bfloat16. 4096 draws of torch.rand and 1001 points of torch.linspace(0, 1, 1001) have this many values:
#   32-true and bf16-mixed 4095 and 1001 (float32), bf16-true 689 and 504 (bfloat16)
# The largest of torch.rand(4096) * 1000 is 996, and neighbouring times of a fine grid fall together. Nothing is
# logged.
#
# Why it matters: diffusion losses draw their times and noise in training_step. With "bf16-true" the times lie on a
# coarse grid (steps of 4 near t = 1000), log-densities and advantages made there are rounded to 8 bits, and the same
# seed gives other times than the other precisions. State dtype=torch.float32 wherever a tensor is made.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 lightning==2.6.6
cat > "$folder/check.py" <<'PY'
import lightning
import torch

print(f"lightning {lightning.__version__}, torch {torch.__version__}")
found = {}


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch, index):
        times = torch.rand(4096, generator=torch.Generator().manual_seed(0))
        grid = torch.linspace(0, 1, 1001)
        found[self.trainer.precision] = times.dtype, times.unique().numel(), grid.unique().numel()
        print(f"{self.trainer.precision}: {times.dtype}, {times.unique().numel()} values of 4096 draws, "
              f"{grid.unique().numel()} of 1001 points, largest time {1000 * times.max():.1f}")
        return self.layer(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
for precision in ("32-true", "bf16-mixed", "bf16-true"):
    loader = torch.utils.data.DataLoader(torch.rand(2, 2), batch_size=2)
    lightning.Trainer(max_steps=1, accelerator="cpu", precision=precision, **quiet).fit(Module(), loader)
for precision in ("32-true", "bf16-mixed"):
    assert found[precision][0] == torch.float32 and found[precision][1] > 4000 and found[precision][2] == 1001
dtype, times, grid = found["bf16-true"]
assert dtype == torch.bfloat16 and times < 1000 and grid < 600, "changed: new tensors are float32"
print("as described: new tensors are bfloat16 with bf16-true")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
