#!/usr/bin/env bash
# Lightning, torch: with decay=0.9999 EMAWeightAveraging changes the position ids of a frozen CLIP text encoder
#
# One would guess: the moving average of something that never changes is that thing, and a frozen text encoder gives the
# same embeddings in the averaged module as in the trained one.
#
# What happens (lightning 2.6.6, torch 2.13.0, transformers 5.24.0): the callback averages buffers too, integer ones
# included. decay * 11 + (1 - decay) * 11 is 10.999999 in float32, and is cut off to 10. CLIP keeps its position ids
# in such a buffer. After two updates or a thousand, by decay:
#   decay                        0.9     0.95    0.99    0.999   0.9995   0.9999   0.99999
#   wrong ids of 77              22      12      0       0       23       10       10
#   wrong ids of 1,000           280     187     0       0       301      198      165
# With 0.9999 the first ones are 11, 22 and 29, which become 10, 21 and 28. Random CLIP text encoder in a module that
# trains another layer: the hidden states differ by 36 % from those before training, since fit() ends by copying the
# average into the module. torch's AveragedModel with get_ema_multi_avg_fn and use_buffers=True does the same;
# use_buffers=False copies buffers as they are. Nothing is logged, and the default decay, 0.999, is not affected.
#
# Why it matters: 0.9999 is the usual decay for diffusion models. Validation and final pictures of the average are drawn
# from prompts whose words at ten places have the position of their neighbour. Index tables of window attention (Swin)
# are integer buffers as well, and are saved. Set use_buffers=False, or keep frozen networks out of the module.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 numpy==2.4.6 lightning==2.6.6 transformers==5.24.0
cat > "$folder/check.py" <<'PY'
import logging

import lightning
import torch
import transformers
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn
from torch.utils.data import DataLoader
from transformers import CLIPTextConfig, CLIPTextModel

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
print(f"lightning {lightning.__version__}, torch {torch.__version__}, transformers {transformers.__version__}")


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.text = CLIPTextModel(CLIPTextConfig(
            vocab_size=1000, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
            bos_token_id=998, eos_token_id=999, pad_token_id=999)).requires_grad_(False).eval()
        self.head = torch.nn.Linear(32, 1)

    def training_step(self, batch):
        return self.head(self.text(batch).pooler_output).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.head.parameters(), lr=0.1)


def train(**options):
    """Return the relative change of the frozen encoder's output, and its position ids at the end."""
    module = Module()
    prompts = torch.randint(0, 900, (8, 77), generator=torch.Generator().manual_seed(1))
    prompts[:, -1] = 999
    before = module.text(prompts).last_hidden_state
    trainer = lightning.Trainer(max_steps=4, accelerator="cpu", logger=False, enable_checkpointing=False,
                                enable_progress_bar=False, enable_model_summary=False,
                                callbacks=[EMAWeightAveraging(**options)])
    trainer.fit(module, DataLoader(prompts, batch_size=2))
    change = ((module.text(prompts).last_hidden_state - before).norm() / before.norm()).item()
    ids = module.text.embeddings.position_ids
    wrong = (ids[0] != torch.arange(77)).nonzero().flatten().tolist()
    print(f"{options}: wrong position ids {wrong}, change of the hidden states {change:.3f}")
    return change, wrong


class Table(torch.nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.register_buffer("ids", torch.arange(size))


def wrong(size, updates=3, **options):
    table = Table(size)
    average = AveragedModel(table, use_buffers=True, **options)
    for _ in range(updates):
        average.update_parameters(table)
    error = average.module.ids - table.ids
    assert -2 <= error.min() and error.max() <= 0
    return (error != 0).sum().item()


for decay, few, many in ((0.9, 22, 280), (0.95, 12, 187), (0.99, 0, 0), (0.999, 0, 0), (0.9995, 23, 301),
                         (0.9999, 10, 198), (0.99999, 10, 165)):
    counts = [wrong(size, multi_avg_fn=get_ema_multi_avg_fn(decay)) for size in (77, 1000)]
    print(f"decay {decay}: wrong ids of 77 and 1,000: {counts}")
    assert counts == [wrong(size, avg_fn=get_ema_avg_fn(decay)) for size in (77, 1000)]
    assert counts == [few, many], "changed: integer buffers"
assert wrong(1000, updates=1000, avg_fn=get_ema_avg_fn(0.9999)) == 198

change, ids = train(decay=0.9999)
assert change > 0.1 and ids[:3] == [11, 22, 29] and len(ids) == 10, "changed: the callback keeps integers"
for options in (dict(decay=0.9999, use_buffers=False), {}):
    change, ids = train(**options)
    assert change < 1e-5 and not ids
print("as described: the average of constant integers is lower than they are")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
