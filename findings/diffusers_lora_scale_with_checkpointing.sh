#!/usr/bin/env bash
# diffusers: with gradient checkpointing, a LoRA scale in attention_kwargs gives wrong gradients
#
# One would guess: gradient checkpointing changes memory and time, not gradients, whatever LoRA scale a call has.
#
# What happens (diffusers 0.42.1, peft 0.21.2, torch 2.13.0): the scale is set on the LoRA layers when forward starts
# and taken back when it returns. The backward pass computes the blocks again after that, with scale 1, and uses these
# values for the gradients. Error relative to the gradient without checkpointing, Stable Diffusion 3's network:
#   scale                             none    0.5     2.0
#   attention_kwargs                 0.000   0.048   0.085
#   set_adapters before forward        -     0.000     -
# Shapes agree, so torch.utils.checkpoint does not notice. Nothing is logged.
#
# Why it matters: a scale in training calls is used to train a slider in both directions, to weaken one adapter, or
# to draw scales at random. The loss is right and its gradient is not. Use set_adapters before forward, and leave it
# until backward is done.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 diffusers==0.42.1 transformers==5.24.0 peft==0.21.2
cat > "$folder/check.py" <<'PY'
import diffusers
import peft
import torch

print(f"diffusers {diffusers.__version__}, peft {peft.__version__}, torch {torch.__version__}")
torch.manual_seed(0)
network = diffusers.SD3Transformer2DModel(
    sample_size=8, patch_size=1, in_channels=4, num_layers=2, attention_head_dim=8, num_attention_heads=2,
    joint_attention_dim=16, caption_projection_dim=16, pooled_projection_dim=16, out_channels=4).train()
network.add_adapter(peft.LoraConfig(r=2, lora_alpha=2, target_modules=["to_q", "to_v"], init_lora_weights=False))
inputs = dict(hidden_states=torch.randn(1, 4, 8, 8), encoder_hidden_states=torch.randn(1, 3, 16),
              pooled_projections=torch.randn(1, 16), timestep=torch.tensor([500.0]), return_dict=False)


def loss_and_gradient(scale, by_set_adapters=False):
    network.zero_grad()
    kwargs = {}
    if by_set_adapters:
        network.set_adapters(["default"], [scale])
    elif scale is not None:
        kwargs = dict(joint_attention_kwargs={"scale": scale})
    loss = network(**inputs, **kwargs)[0].square().sum()
    loss.backward()
    if by_set_adapters:
        network.set_adapters(["default"], [1.0])
    gradients = [weight.grad.flatten() for weight in network.parameters() if weight.grad is not None]
    return loss.detach(), torch.cat(gradients)


errors = {}
for case in ((None,), (0.5,), (2.0,), (0.5, True)):
    network.disable_gradient_checkpointing()
    loss, true = loss_and_gradient(*case)
    network.enable_gradient_checkpointing()
    again, gradient = loss_and_gradient(*case)
    assert torch.allclose(loss, again), "the loss is the same"
    errors[case] = ((gradient - true).norm() / true.norm()).item()
    how = "set_adapters" if len(case) > 1 else "attention_kwargs"
    print(f"scale {case[0]} by {how}: error of the gradient {errors[case]:.3f}")
assert errors[(None,)] < 1e-4 and errors[(0.5, True)] < 1e-4, "set_adapters is right"
assert errors[(0.5,)] > 0.02 and errors[(2.0,)] > 0.02, "changed: the gradient is right"
print("as described: right loss, wrong gradient")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
