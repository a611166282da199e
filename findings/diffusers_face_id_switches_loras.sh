#!/usr/bin/env bash
# diffusers, peft: load_ip_adapter() of a FaceID adapter switches other LoRAs off, and its own LoRA stays when it leaves
#
# One would guess: an IP-Adapter FaceID, whose file holds a LoRA, is added to the LoRAs in use. unload_ip_adapter()
# takes out all of it, and another FaceID then comes with its own LoRA.
#
# What happens (diffusers 0.42.1, peft 0.21.2, torch 2.13.0): load_ip_adapter() adds the LoRA as "faceid_0" and makes it
# the only active one. unload_ip_adapter() leaves it there, active. As the name is taken, the LoRA of the next FaceID is
# not loaded. A tiny UNet, with the LoRA "style" loaded first:
#   call                                      active LoRAs    output is that of
#   load_ip_adapter(A)                        faceid_0        A without style
#   unload_ip_adapter()                       faceid_0        A's LoRA alone, without style
#   load_ip_adapter(B)                        faceid_0        B with the LoRA of A
#   load_ip_adapter([A, B]), in a new UNet    faceid_1        A and B with the LoRA of B
# Relative to the network with style, the output after unload_ip_adapter() is off by 87 % here. Nothing is logged.
#
# Why it matters: a loop over FaceID files draws all but the first with a foreign LoRA, and images "without FaceID" have
# one. Call delete_adapters("faceid_0") together with unload_ip_adapter(), and set_adapters() after load_ip_adapter().
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 diffusers==0.42.1 transformers==5.24.0 \
    peft==0.21.2 accelerate==1.15.0
cat > "$folder/check.py" <<'PY'
import diffusers
import peft
import torch
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from peft import LoraConfig

print(f"diffusers {diffusers.__version__}, peft {peft.__version__}, torch {torch.__version__}")
diffusers.utils.logging.set_verbosity_error()
torch.manual_seed(0)
latents, prompt, face = torch.randn(1, 4, 8, 8), torch.randn(1, 6, 16), torch.randn(1, 1, 16)


def make_pipeline():
    torch.manual_seed(0)
    unet = UNet2DConditionModel(
        sample_size=8, block_out_channels=(8, 16), layers_per_block=1, cross_attention_dim=16, attention_head_dim=2,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=4)
    vae = AutoencoderKL(latent_channels=4, block_out_channels=(8,), norm_num_groups=4)
    return StableDiffusionPipeline(vae, None, None, unet, DDIMScheduler(), None, None, requires_safety_checker=False)


layers = {name: make_pipeline().unet.get_submodule(name.removesuffix(".processor"))
          for name in make_pipeline().unet.attn_processors}


def face_id(seed):
    """Return random weights in the format of the published FaceID adapters."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for number, (name, layer) in enumerate(layers.items()):
        if "attn2" in name:
            for part in ("k", "v"):
                shape = layer.to_k.weight.shape
                weights[f"{number}.to_{part}_ip.weight"] = torch.randn(shape, generator=generator) * 0.3
        for part, linear in dict(q=layer.to_q, k=layer.to_k, v=layer.to_v, out=layer.to_out[0]).items():
            rows, columns = linear.weight.shape
            weights[f"{number}.to_{part}_lora.down.weight"] = torch.randn(4, columns, generator=generator)
            weights[f"{number}.to_{part}_lora.up.weight"] = torch.randn(rows, 4, generator=generator) * 0.3
    projection = {"proj.0.weight": torch.randn(32, 16, generator=generator), "proj.0.bias": torch.zeros(32),
                  "proj.2.weight": torch.randn(64, 32, generator=generator), "proj.2.bias": torch.zeros(64),
                  "norm.weight": torch.ones(16), "norm.bias": torch.zeros(16)}
    return {"image_proj": projection, "ip_adapter": weights}


def load(pipeline, *adapters):
    pipeline.load_ip_adapter(list(adapters), subfolder=None, weight_name=["-"] * len(adapters),
                             image_encoder_folder=None)


def output(pipeline, faces=1):
    with torch.no_grad():
        return pipeline.unet(latents, 500, prompt, added_cond_kwargs={"image_embeds": [face] * faces}).sample


def lora_of(pipeline):
    return [weight.clone() for name, weight in pipeline.unet.named_parameters() if "faceid_0" in name]


def distance(first, second):
    return ((first - second).norm() / second.norm()).item()


A, B = face_id(1), face_id(2)
only_a, only_b = make_pipeline(), make_pipeline()
load(only_a, A)
load(only_b, B)

pipeline = make_pipeline()
pipeline.unet.add_adapter(LoraConfig(r=4, target_modules=["to_q", "to_v"], init_lora_weights=False), "style")
style = output(pipeline, 0)
load(pipeline, A)
alone = distance(output(pipeline), output(only_a))
print(f"A loaded: active {pipeline.get_active_adapters()}, {alone:.1e} from A alone")
assert pipeline.get_active_adapters() == ["faceid_0"] and alone < 1e-5, "changed: other LoRAs stay active"
pipeline.unload_ip_adapter()
left = distance(output(pipeline, 0), style)
print(f"A unloaded: active {pipeline.get_active_adapters()}, {left:.2f} from the network with style")
assert pipeline.get_active_adapters() == ["faceid_0"] and left > 0.1, "changed: the LoRA leaves with its adapter"
load(pipeline, B)
foreign = distance(output(pipeline), output(only_b))
print(f"B loaded: active {pipeline.get_active_adapters()}, {foreign:.2f} from B alone")
assert all(map(torch.equal, lora_of(pipeline), lora_of(only_a))) and foreign > 0.1, "changed: B has its own LoRA"
pipeline.unload_ip_adapter()
pipeline.delete_adapters("faceid_0")
load(pipeline, B)
assert distance(output(pipeline), output(only_b)) < 1e-5, "changed: deleting the LoRA does not help"

both = make_pipeline()
load(both, A, B)
print(f"A and B loaded together: active {both.get_active_adapters()} of {both.get_list_adapters()['unet']}")
assert both.get_active_adapters() == ["faceid_1"], "changed: the LoRAs of several FaceID adapters"
print("as described: the LoRA of a FaceID adapter is switched on alone, and not unloaded")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
