#!/usr/bin/env bash
# diffusers: one call with LoRA scale 0 sets the weights of all active adapters back to 1
#
# One would guess: the scale in attention_kwargs, joint_attention_kwargs or cross_attention_kwargs holds for that call.
# After it, the adapters have the weights that set_adapters gave them.
#
# What happens (diffusers 0.42.1, peft 0.21.2, torch 2.13.0): a scale other than 0 is divided out again after the call.
# A scale of 0 cannot be, so each active adapter is set to weight 1 instead. Norm of a LoRA's change of the output:
#                         weight 0.5   weight 1   weight 0.5, after a call with scale 0
#   Stable Diffusion 3       0.183      0.363                  0.363
#   Stable Diffusion's UNet  0.258      0.531                  0.531
# The wrapper is the same in the other networks. Nothing is logged.
#
# Why it matters: a call with scale 0 draws the base network's picture next to the tuned one, or asks the reference in a
# KL penalty. After it all pictures are drawn with weight 1: LoRAs mixed at chosen weights are no longer that mix.
# Use disable_lora() and enable_lora(), which keep the weights.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 diffusers==0.42.1 transformers==5.24.0 peft==0.21.2
cat > "$folder/check.py" <<'PY'
import diffusers
import peft
import torch
from diffusers import SD3Transformer2DModel, UNet2DConditionModel

print(f"diffusers {diffusers.__version__}, peft {peft.__version__}, torch {torch.__version__}")
torch.manual_seed(0)
transformer = SD3Transformer2DModel(
    sample_size=8, patch_size=1, in_channels=4, num_layers=1, attention_head_dim=8, num_attention_heads=2,
    joint_attention_dim=16, caption_projection_dim=16, pooled_projection_dim=16, out_channels=4).eval()
unet = UNet2DConditionModel(
    sample_size=8, block_out_channels=(16, 16), layers_per_block=1, norm_num_groups=4, cross_attention_dim=16,
    attention_head_dim=8, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
    up_block_types=("UpBlock2D", "CrossAttnUpBlock2D")).eval()
image, text, pooled = torch.randn(1, 4, 8, 8), torch.randn(1, 3, 16), torch.randn(1, 16)
time = torch.tensor([500])
networks = {
    "Stable Diffusion 3": (transformer, "joint_attention_kwargs",
                           dict(hidden_states=image, encoder_hidden_states=text, pooled_projections=pooled)),
    "UNet": (unet, "cross_attention_kwargs", dict(sample=image, encoder_hidden_states=text)),
}


def weights(network):
    """The weight of the LoRA in each of its layers."""
    return {module.scaling["a"] for module in network.modules() if hasattr(module, "scaling")}


for name, (network, key, inputs) in networks.items():
    config = peft.LoraConfig(r=2, lora_alpha=2, target_modules=["to_q", "to_v"], init_lora_weights=False)
    network.add_adapter(config, adapter_name="a")

    @torch.no_grad()
    def draw(scale=None):
        kwargs = {} if scale is None else {key: {"scale": scale}}
        return network(**inputs, timestep=time, return_dict=False, **kwargs)[0]

    whole = draw()
    network.disable_adapters()
    base = draw()
    network.enable_adapters()
    network.set_adapters(["a"], [0.5])
    half = draw()
    draw(0.7)
    assert torch.allclose(draw(), half, atol=1e-6), "a scale of 0.7 does not stay"
    network.disable_adapters()
    draw()
    network.enable_adapters()
    assert torch.equal(draw(), half), "disabling keeps the weight"
    assert torch.allclose(draw(0), base, atol=1e-6), "scale 0 is the base network"
    after = draw()
    print(f"{name}: change of the output at weight 0.5: {(half - base).norm():.3f}, at weight 1: "
          f"{(whole - base).norm():.3f}, at weight 0.5 after one call with scale 0: {(after - base).norm():.3f}; "
          f"weights now {weights(network)}")
    assert not torch.allclose(whole, half, atol=1e-3)
    assert torch.equal(after, whole) and weights(network) == {1.0}, "changed: the weight 0.5 is kept"
print("as described: a call with scale 0 sets the weight to 1")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
