#!/usr/bin/env bash
# diffusers: TextKVCache knows a prompt by its address in memory, and draws the second prompt as the first
#
# One would guess: the cache of a prompt's keys and values, which its documentation calls exact and lossless, goes by
# the prompt's values, or by the tensor, so that another prompt is computed anew.
#
# What happens (diffusers 0.42.1, torch 2.13.0): the key is data_ptr() of encoder_hidden_states, and the cache holds no
# reference to the tensor. A later tensor of this size is often put into the memory that the first one left. Distance of
# a small Nucleus-Image network's output to what it computes without the cache:
#                                                              prompt A    B       C       D
#   each prompt freed before the next is made                  0.0         0.57    0.57    0.52
#   all prompts kept                                           0.0         0.0     0.0     0.0
#   one buffer, into which each prompt is copied               0.0         0.57    0.57    0.52
#   prompt A again, after weights that read it were changed    0.90
# In the first row and the third, B, C and D are drawn as A to the last bit, and in the last the output is that of the
# old weights. Nothing is logged. A pipeline empties the cache at its end, and no one else does.
#
# Why it matters: training loops, rollouts of reinforcement learning and modular code call the network themselves. With
# the cache on they train or score each prompt with the first one's keys, and sampling does not see the trained weights.
# Call network._reset_stateful_cache() after each change of prompts or weights, or leave the cache off.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 diffusers==0.42.1 transformers==5.24.0
cat > "$folder/check.py" <<'PY'
import diffusers
import torch
from diffusers import NucleusMoEImageTransformer2DModel
from diffusers.hooks import TextKVCacheConfig

print(f"diffusers {diffusers.__version__}, torch {torch.__version__}")
latents = torch.randn(1, 16, 16, generator=torch.Generator().manual_seed(1))
numbers = range(4)


def network(cached=True):
    torch.manual_seed(0)
    model = NucleusMoEImageTransformer2DModel(
        patch_size=2, in_channels=16, out_channels=4, num_layers=2, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, axes_dims_rope=(4, 6, 6), moe_enabled=False).eval()
    if cached:
        model.enable_cache(TextKVCacheConfig())
    return model


def prompt(number):
    return torch.randn(1, 7, 32, generator=torch.Generator().manual_seed(10 + number))


@torch.no_grad()
def draw(model, embeddings):
    return model(hidden_states=latents, img_shapes=[(1, 4, 4)], encoder_hidden_states=embeddings,
                 timestep=torch.tensor([0.5]), return_dict=False)[0]


def change_text_weights(model):
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "encoder_proj" in name or "add_v_proj" in name:
                weight.mul_(2)


def distances(outputs):
    return [round((output - plain).norm().item(), 2) for output, plain in zip(outputs, exact)]


exact = [draw(network(cached=False), prompt(number)) for number in numbers]
model, addresses, freed = network(), [], []
for number in numbers:
    embeddings = prompt(number)
    addresses.append(embeddings.data_ptr())
    freed.append(draw(model, embeddings))
    del embeddings
print(f"freed: {distances(freed)}, different addresses: {len(set(addresses))}")
model, prompts = network(), [prompt(number) for number in numbers]
kept = [draw(model, embeddings) for embeddings in prompts]
print(f"kept: {distances(kept)}")
assert max(distances(kept)) == 0

model, buffer, copied = network(), torch.empty(1, 7, 32), []
for number in numbers:
    copied.append(draw(model, buffer.copy_(prompt(number))))
print(f"copied into one buffer: {distances(copied)}")
assert all(torch.equal(output, exact[0]) for output in copied), "changed: the cache does not go by the address"
for number in numbers:
    if addresses[number] == addresses[0]:
        assert torch.equal(freed[number], exact[0])
model._reset_stateful_cache()
assert torch.equal(draw(model, buffer.copy_(prompt(1))), exact[1])

changed = network(cached=False)
change_text_weights(changed)
wanted, model, embeddings = draw(changed, prompts[0]), network(), prompts[0]
before = draw(model, embeddings)
change_text_weights(model)
after = draw(model, embeddings)
print(f"text weights changed: distance {(after - wanted).norm().item():.2f} to the new output, "
      f"{(after - before).norm().item():.2f} to the old one")
assert torch.equal(after, before) and (after - wanted).norm() > 0.1, "changed: the weights are noticed"
print("as described: a prompt at the first one's address is drawn as the first one")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
