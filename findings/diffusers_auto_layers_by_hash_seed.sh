#!/usr/bin/env bash
# diffusers: layers given to SkipLayerGuidance and its relatives belong to one stack or the other, by chance per process
#
# One would guess: LayerSkipConfig(indices=[1, 2]), whose fqn is "auto" by default, leaves out the same two blocks each
# time. In FLUX.1 and HunyuanVideo, which have double and single blocks, the double ones come first.
#
# What happens (diffusers 0.42.1, torch 2.13.0): "auto" takes the first name that the network has, of a tuple that was
# made from a set of strings. Its order follows Python's hash seed, which is another one in each process:
#   PYTHONHASHSEED         0        1        2        3        4        5        6        7
#   stack                  single   single   double   single   single   single   single   double
# FLUX.1 with the same seed of torch, weights and input predicts two different things in these processes. Without
# PYTHONHASHSEED, each process draws the stack. Nothing is logged. The guiders PerturbedAttentionGuidance, AutoGuidance
# and SmoothedEnergyGuidance use the same list.
#
# Why it matters: an evaluation cannot be repeated, and the ranks of one run may guide with different networks, as each
# is a process of its own. Give fqn="transformer_blocks".
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 diffusers==0.42.1 transformers==5.24.0
cat > "$folder/check.py" <<'PY'
import os
import subprocess
import sys
from collections import Counter

CHILD = """
import diffusers, torch
from diffusers import FluxTransformer2DModel, HunyuanVideoTransformer3DModel
from diffusers.hooks import LayerSkipConfig, apply_layer_skip

diffusers.utils.logging.set_verbosity_error()
torch.manual_seed(0)
heads = dict(num_attention_heads=2, attention_head_dim=8, num_layers=4, num_single_layers=4)
networks = {
    "FLUX.1": FluxTransformer2DModel(patch_size=1, in_channels=16, joint_attention_dim=16, pooled_projection_dim=16,
                                     axes_dims_rope=(2, 2, 4), **heads).eval(),
    "HunyuanVideo": HunyuanVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_refiner_layers=1, text_embed_dim=16, pooled_projection_dim=16,
        rope_axes_dim=(2, 2, 4), **heads),
}
result = []
for name, network in networks.items():
    apply_layer_skip(network, config := LayerSkipConfig(indices=[1, 2]))
    result.append(f"{name}: {config.fqn}")
network = networks["FLUX.1"]
for weight in network.parameters():
    weight.data.normal_(0, 0.3)
with torch.no_grad():
    output = network(torch.randn(1, 16, 16), encoder_hidden_states=torch.randn(1, 6, 16), timestep=torch.tensor([0.5]),
                     pooled_projections=torch.randn(1, 16), img_ids=torch.zeros(16, 3), txt_ids=torch.zeros(6, 3))[0]
print("FLUX.1's prediction: %.4f" % output.norm().item(), *result, sep=";")
"""


def run(**environment):
    result = subprocess.run([sys.executable, "-W", "ignore", "-c", CHILD], capture_output=True, text=True, check=True,
                            env={**os.environ, **environment})
    return result.stdout.strip().split(";")


seeded = [run(PYTHONHASHSEED=str(seed)) for seed in range(8)]
for seed, found in enumerate(seeded):
    print(f"PYTHONHASHSEED={seed}:", *found, sep="\n    ")
assert run(PYTHONHASHSEED="0") == seeded[0], "one hash seed, two results"
for place, name in enumerate(("FLUX.1", "HunyuanVideo"), 1):
    stacks = Counter(found[place] for found in seeded)
    assert len(stacks) > 1, f"changed: {name} leaves out the same stack in each process"
predictions = {found[0] for found in seeded}
print(f"{len(predictions)} different predictions of FLUX.1 with the same seed, weights and inputs")
assert len(predictions) == 2, "changed: predictions"
unset = {key: value for key, value in os.environ.items() if key != "PYTHONHASHSEED"}
os.environ.clear()
os.environ.update(unset)
print("without PYTHONHASHSEED, as usual:", Counter(run()[1] for _ in range(8)))
print("as described: the stack depends on the hash seed of the process")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
