#!/usr/bin/env bash
# diffusers: a second pipeline with the same Z-Image ControlNet changes the images of the first
#
# One would guess: two pipelines may share a ControlNet, as those of Stable Diffusion, FLUX.1 and Qwen-Image may: each
# draws with its own network. The ControlNet's parameters are its own.
#
# What happens (diffusers 0.42.1, torch 2.13.0): Z-Image's ControlNet has no embedders of its own.
# ZImageControlNetPipeline puts those of its network, and the refiner blocks, into the ControlNet that it is given, as
# the same objects. The next pipeline replaces them by those of its own network, also for the first pipeline. Tiny
# networks A and B:
#   change of A's image after a pipeline of B with another ControlNet            0.00
#   change of A's image after a pipeline of B with the same ControlNet           0.54
#   parameters of the ControlNet, before and after it has a pipeline             55,744 and 381,936
#   weights of the frozen B with a gradient, after controlnet.requires_grad_()   39 of 73
#   change of B's own prediction after 10 steps of training the ControlNet       1.08
# Nothing is logged.
#
# Why it matters: a base and a tuned network are compared with one ControlNet, and the images of one of them come from a
# mixture of both. Where a ControlNet is trained, an optimizer over controlnet.parameters() also trains the base
# network. Load a ControlNet for each pipeline, and list its parameters before the pipeline is made.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 diffusers==0.42.1 transformers==5.24.0
cat > "$folder/check.py" <<'PY'
import diffusers
import torch
from diffusers import (
    AutoencoderKL, FlowMatchEulerDiscreteScheduler, ZImageControlNetModel, ZImageControlNetPipeline,
    ZImageTransformer2DModel,
)

print(f"diffusers {diffusers.__version__}, torch {torch.__version__}")
diffusers.utils.logging.set_verbosity_warning()
torch.manual_seed(0)
sizes = dict(dim=32, n_refiner_layers=1, n_heads=2, n_kv_heads=2)
vae = AutoencoderKL(latent_channels=4, block_out_channels=(8, 8), norm_num_groups=4, shift_factor=0.0,
                    down_block_types=["DownEncoderBlock2D"] * 2, up_block_types=["UpDecoderBlock2D"] * 2)
picture, prompt, noise = torch.rand(1, 3, 32, 32), torch.randn(7, 16), torch.randn(1, 4, 16, 16)


def make_network(seed):
    torch.manual_seed(seed)
    return ZImageTransformer2DModel(in_channels=4, n_layers=2, cap_feat_dim=16, axes_dims=[4, 6, 6],
                                    axes_lens=[64, 64, 64], **sizes).requires_grad_(False)


def make_controlnet():
    torch.manual_seed(2)
    controlnet = ZImageControlNetModel(
        control_layers_places=[0, 1], control_refiner_layers_places=[0], control_in_dim=4,
        add_control_noise_refiner="control_noise_refiner", **sizes)
    for name, weight in controlnet.named_parameters():
        if "before_proj" in name or "after_proj" in name:  # zero in a new ControlNet
            torch.nn.init.normal_(weight, std=0.2)
    return controlnet


def make_pipeline(network, controlnet):
    pipeline = ZImageControlNetPipeline(FlowMatchEulerDiscreteScheduler(), vae, None, None, network, controlnet)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def draw(pipeline):
    return pipeline(prompt_embeds=[prompt], control_image=picture, height=32, width=32, num_inference_steps=4,
                    guidance_scale=0.0, latents=noise.clone(), output_type="latent").images


def size(model):
    return sum(weight.numel() for weight in model.parameters())


def predict(network):
    with torch.no_grad():
        return network([noise[0].unsqueeze(1)], torch.tensor([0.5]), [prompt], return_dict=False)[0][0]


def distance(first, second):
    return ((first - second).norm() / second.norm()).item()


A, B, controlnet = make_network(0), make_network(1), make_controlnet()
own = size(controlnet)
first = make_pipeline(A, controlnet)
before = draw(first)
print(f"parameters of the ControlNet: {own} before, {size(controlnet)} after it has a pipeline")
assert size(controlnet) > 2 * own, "changed: a ControlNet keeps its own parameters only"
make_pipeline(B, make_controlnet())
assert torch.equal(draw(first), before)
make_pipeline(B, controlnet)
change = distance(draw(first), before)
print(f"another pipeline with network B: A's image changes by {change:.2f}")
assert change > 0.1, "changed: pipelines may share a ControlNet"

assert not any(weight.requires_grad for weight in B.parameters())
controlnet.requires_grad_(True)
controlnet.gradient_checkpointing = False  # without this attribute, a pass with gradients raises AttributeError
thawed, total = sum(weight.requires_grad for weight in B.parameters()), len(list(B.parameters()))
prediction = predict(B)
optimizer = torch.optim.AdamW(controlnet.parameters(), lr=1e-3)
for _ in range(10):
    optimizer.zero_grad()
    samples = controlnet([noise[0].unsqueeze(1)], torch.tensor([0.5]), [prompt], [noise[0].unsqueeze(1)])
    B([noise[0].unsqueeze(1)], torch.tensor([0.5]), [prompt], controlnet_block_samples=samples,
      return_dict=False)[0][0].square().mean().backward()
    optimizer.step()
moved = distance(predict(B), prediction)
print(f"controlnet.requires_grad_(True): {thawed} of {total} weights of B; after 10 steps of training the ControlNet, "
      f"the prediction of B alone has changed by {moved:.3f}")
assert thawed > 10 and moved > 1e-3, "changed: training a ControlNet leaves the network alone"
print("as described: the ControlNet holds parts of the last pipeline's network")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
