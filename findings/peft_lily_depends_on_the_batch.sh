#!/usr/bin/env bash
# peft: with a Lily adapter, the output of one image depends on the other images of its batch
#
# One would guess: an adapter on linear layers treats each image of a batch by itself, as LoRA does. Lily's router
# weighs its matrices B by the input, as a mixture of experts does: for each token, or for each image.
#
# What happens (peft 0.21.2, diffusers 0.42.1, torch 2.13.0): the layer averages the router's weights over all tokens of
# all images, and applies one mixture to the whole batch. Output of Stable Diffusion 3's network for one image and one
# noise, relative to what a random adapter changes in it:
#                                                     LoRA      Lily
#   with three other images instead of alone          0.0000    0.02
#   alone, twice                                      0.0000    0.0000
# The gradient of one image's output with respect to another image is not zero either. The help of num_B speaks of one
# matrix "for each forward pass", and nowhere of the images of a batch. Nothing is logged.
#
# Why it matters: a policy's likelihoods are computed in other batches than those in which it drew its images, and
# classifier-free guidance puts negative prompts into the batch. Ratios of GRPO or PPO are then not 1 before the first
# update, and a validation picture depends on the batch size. Evaluate Lily one image at a time, or use LoRA.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 diffusers==0.42.1 transformers==5.24.0 peft==0.21.2
cat > "$folder/check.py" <<'PY'
import diffusers
import peft
import torch
from diffusers import SD3Transformer2DModel
from peft import LilyConfig, LoraConfig, get_peft_model

print(f"peft {peft.__version__}, diffusers {diffusers.__version__}, torch {torch.__version__}")


def network(config=None):
    torch.manual_seed(0)
    base = SD3Transformer2DModel(
        sample_size=8, patch_size=1, in_channels=4, num_layers=2, attention_head_dim=8, num_attention_heads=4,
        joint_attention_dim=32, caption_projection_dim=32, pooled_projection_dim=16, out_channels=4).eval()
    return base if config is None else get_peft_model(base, config).eval()


noise = torch.Generator().manual_seed(1)
latents = torch.randn(4, 4, 8, 8, generator=noise)
prompts, pooled = torch.randn(4, 5, 32, generator=noise), torch.randn(4, 16, generator=noise)


def draw(model, count, values=latents):
    return model(hidden_states=values[:count], encoder_hidden_states=prompts[:count],
                 pooled_projections=pooled[:count], timestep=torch.full((count,), 500.0), return_dict=False)[0]


targets, shares = ["to_q", "to_v", "net.0.proj"], {}
configs = {"LoRA": LoraConfig(r=8, lora_alpha=64, target_modules=targets, init_lora_weights=False),
           "Lily": LilyConfig(r=8, scaling=8.0, stride_A=1, num_B=4, target_modules=targets, init_weights=False)}
base = draw(network(), 1).detach()
for name, config in configs.items():
    model = network(config)
    with torch.no_grad():
        alone, again, together = draw(model, 1), draw(model, 1), draw(model, 4)[:1]
    change = (alone - base).norm()
    shares[name] = ((together - alone).norm() / change).item()
    inputs = latents.clone().requires_grad_()
    gradient = torch.autograd.grad(draw(model, 4, inputs)[0].square().sum(), inputs)[0]
    others = (gradient[1:].norm() / gradient[:1].norm()).item()
    print(f"{name}: the adapter changes {(change / base.norm()).item():.2f} of the output; with three other images "
          f"{shares[name]:.4f} of that; gradient with respect to the others {others:.1e} of the own one")
    assert torch.equal(alone, again) and change > 0.05 * base.norm()
    assert others == 0 if name == "LoRA" else others > 1e-6, "changed: the images of a batch are independent"
assert shares["LoRA"] < 1e-4 and shares["Lily"] > 0.01, "changed: Lily does not depend on the batch"
print("as described: Lily mixes the images of a batch")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
