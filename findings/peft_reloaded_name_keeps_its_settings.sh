#!/usr/bin/env bash
# peft: load_adapter with a name that is in use loads the factors, and keeps the alpha and the layers of the old adapter
#
# One would guess: model.load_adapter(folder, "policy") replaces adapter "policy" by the one in the folder, or refuses a
# name that is taken.
#
# What happens (peft 0.21.2, torch 2.13.0): the folder's adapter_config.json is ignored. Factors of equal shapes are
# copied, factors that the folder does not have stay, and those that the model does not have are dropped. Norm of the
# change of the output, after an adapter on layers 0 and 1 with lora_alpha=2 was loaded under the same name:
#   adapter in the folder          loaded alone     loaded over the old one
#   lora_alpha=8                      9.41             2.11
#   use_rslora=True                   2.98             2.11
#   layer 0 only                      1.07             2.32
#   layers 0, 1 and 2                 3.16             2.11
# No warning is given. The result of the call lists missing and unexpected keys, but nothing about alpha. Only another
# rank raises an error.
#
# Why it matters: a server that draws images or scores them, and a self-play opponent, load each new version of the
# policy under one name. A new run with another alpha or other layers is then served at a wrong strength, or as a mix of
# two runs. Load it under a new name and delete the old one.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 transformers==5.24.0 peft==0.21.2
cat > "$folder/check.py" <<'PY'
import tempfile
import warnings

import peft
import torch
from peft import LoraConfig, PeftModel, get_peft_model

print(f"peft {peft.__version__}, torch {torch.__version__}")
old = dict(r=2, lora_alpha=2, target_modules=["0", "1"], init_lora_weights=False)
torch.manual_seed(0)
inputs = torch.randn(8, 16)


def build():
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(3)))


@torch.no_grad()
def change(model):
    return (model(inputs) - build()(inputs)).norm().item()


def saved(seed, **options):
    network = build()
    torch.manual_seed(seed)
    folder = tempfile.mkdtemp()
    get_peft_model(network, LoraConfig(**{**old, **options}), adapter_name="policy").save_pretrained(folder)
    return folder + "/policy"


first = saved(1)
cases = {"the same settings": {}, "lora_alpha=8": dict(lora_alpha=8), "use_rslora=True": dict(use_rslora=True),
         "layer 0 only": dict(target_modules=["0"]), "layers 0, 1 and 2": dict(target_modules=["0", "1", "2"])}
for name, options in cases.items():
    second = saved(2, **options)
    alone = change(PeftModel.from_pretrained(build(), second, adapter_name="policy"))
    model = PeftModel.from_pretrained(build(), first, adapter_name="policy")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.load_adapter(second, "policy")
    over = change(model)
    print(f"{name}: loaded alone {alone:.3f}, over the old adapter {over:.3f}, warnings {len(caught)}")
    assert not caught, "changed: a warning"
    assert abs(over - alone) < 1e-4 if not options else abs(over / alone - 1) > 0.05, "changed"
    model = PeftModel.from_pretrained(build(), first, adapter_name="policy")
    model.load_adapter(second, "newer policy")
    model.set_adapter("newer policy")
    model.delete_adapter("policy")
    assert abs(change(model) - alone) < 1e-4, "right under a new name"
print("as described: the old settings stay")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" "$folder/check.py"
