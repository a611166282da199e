#!/usr/bin/env bash
# peft: the "linear" mean of two adapters with the same effect can be zero
#
# One would guess: add_weighted_adapter(["a", "b"], [0.5, 0.5], combination_type="linear") makes an adapter whose
# change of the weights is the mean of the two changes.
#
# What happens (peft 0.21.2, torch 2.13.0): the factors A and B are combined separately, so the product has cross
# terms. Error relative to the mean of the changes, for two random adapters of rank 4 on an 8 x 8 layer:
#   linear 1.016, cat 0.000, svd (rank 8) 0.000
# An adapter and the same adapter with the signs of both factors turned, which is the same change of the weights:
#   change of each 1.055, change of their linear mean 0.000
# Nothing is logged. "cat" and "svd" with the summed rank are exact.
#
# Why it matters: adapters trained with different rewards are often averaged ("rewarded soups"), and so are adapters
# of several seeds. LoRA factors have no preferred sign or basis, so their linear mean can be anything between the
# mean of the changes and nothing. Use "cat", or switch both adapters on at once.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 transformers==5.24.0 peft==0.21.2
cat > "$folder/check.py" <<'PY'
import peft
import torch
from peft import LoraConfig, get_peft_model

print(f"peft {peft.__version__}, torch {torch.__version__}")
torch.manual_seed(0)
config = dict(r=4, lora_alpha=4, target_modules=["0"], init_lora_weights=False)
model = get_peft_model(torch.nn.Sequential(torch.nn.Linear(8, 8, bias=False)), LoraConfig(**config), adapter_name="a")
for name in ("b", "turned"):
    model.add_adapter(name, LoraConfig(**config))
layer = model.base_model.model[0]
with torch.no_grad():
    layer.lora_A["turned"].weight.copy_(-layer.lora_A["a"].weight)
    layer.lora_B["turned"].weight.copy_(-layer.lora_B["a"].weight)


def change(name):
    return layer.get_delta_weight(name).detach()


mean = 0.5 * change("a") + 0.5 * change("b")
errors = {}
for kind in ("linear", "cat", "svd"):
    model.add_weighted_adapter(["a", "b"], [0.5, 0.5], kind, combination_type=kind,
                               **(dict(svd_rank=8) if kind == "svd" else {}))
    errors[kind] = ((change(kind) - mean).norm() / mean.norm()).item()
print("error relative to the mean of the changes:", *(f"{kind} {error:.3f}" for kind, error in errors.items()))
assert torch.equal(change("a"), change("turned"))
model.add_weighted_adapter(["a", "turned"], [0.5, 0.5], "soup", combination_type="linear")
print(f"change of each {change('a').norm():.3f}, change of their linear mean {change('soup').norm():.3f}")
assert errors["linear"] > 0.1 and errors["cat"] < 1e-5 and errors["svd"] < 1e-4, "changed"
assert change("a").norm() > 0.1 and change("soup").norm() < 1e-6, "changed"
print("as described: the linear mean is not the mean")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
