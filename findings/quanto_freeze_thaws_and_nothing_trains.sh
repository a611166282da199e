#!/usr/bin/env bash
# optimum-quanto: freeze() makes frozen weights require gradients, and an optimizer's steps on them change nothing
#
# One would guess: quantize(network, weights=qint8) and freeze(network) leave requires_grad as it was. A LoRA may be
# added before or after that.
#
# What happens (optimum-quanto 0.2.7, diffusers 0.42.1, peft 0.21.2, torch 2.13.0): freeze() replaces each quantized
# weight by a new Parameter, which requires a gradient. In the backward pass it gets one, in float32. optimizer.step()
# raises no error and changes nothing. A small Stable Diffusion 3 network, 30 steps of AdamW:
#   qint8                                 weights that require a gradient    loss, before and after
#   frozen network, before freeze()       0
#   frozen network, after freeze()        33                                 1.7338    1.7338
#   LoRA of 16 factors added before       49                                 1.7338    1.7338
#   LoRA of 16 factors added after        16                                 1.7338    1.0642
# In the third line the LoRA is quantized as well. With qfloat8 its factors of zeros become NaN, and so does the output.
# Nothing is logged.
#
# Why it matters: base networks are quantized to save memory. A frozen text encoder or reference network then keeps a
# graph, and gradients of its weights in float32, which also count in clipping. A LoRA added too early has gradients and
# an optimizer, and is not trained. Call requires_grad_(False) after freeze(), and add the LoRA last.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 diffusers==0.42.1 transformers==5.24.0 \
    peft==0.21.2 optimum-quanto==0.2.7
cat > "$folder/check.py" <<'PY'
import diffusers
import optimum.quanto
import torch
from diffusers import SD3Transformer2DModel
from optimum.quanto import freeze, qfloat8, qint8, quantize
from peft import LoraConfig

print(f"optimum-quanto {optimum.quanto.__version__}, diffusers {diffusers.__version__}, torch {torch.__version__}")
diffusers.utils.logging.set_verbosity_error()
torch.manual_seed(1)
inputs = dict(hidden_states=torch.randn(1, 4, 8, 8), encoder_hidden_states=torch.randn(1, 3, 64),
              pooled_projections=torch.randn(1, 64), timestep=torch.tensor([500]))
target = torch.randn(1, 4, 8, 8)


def base():
    torch.manual_seed(0)
    return SD3Transformer2DModel(
        sample_size=8, patch_size=1, in_channels=4, num_layers=2, attention_head_dim=32, num_attention_heads=2,
        joint_attention_dim=64, caption_projection_dim=64, pooled_projection_dim=64, out_channels=4)


def lora(network):
    torch.manual_seed(2)
    network.add_adapter(LoraConfig(r=4, lora_alpha=4, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))


def quantized(network, kind):
    quantize(network, weights=kind)
    freeze(network)


def loss(network):
    return (network(**inputs).sample - target).square().mean()


def trained(network):
    return [weight for weight in network.parameters() if weight.requires_grad]


def train(network):
    """Return the loss before and after 30 steps, and how many weights have a gradient."""
    optimizer = torch.optim.AdamW(trained(network), lr=1e-2, weight_decay=0.0)
    before = loss(network).item()
    for _ in range(30):
        optimizer.zero_grad()
        loss(network).backward()
        optimizer.step()
    return before, loss(network).item(), sum(bool(weight.grad.any()) for weight in trained(network))


for kind in (qint8, qfloat8):
    network = base().requires_grad_(False)
    quantize(network, weights=kind)
    counts = [len(trained(network))]
    freeze(network)
    counts.append(len(trained(network)))
    before, after, gradients = train(network)
    print(f"{kind.name}, frozen network: {counts[0]} weights require a gradient, {counts[1]} after freeze(), of which "
          f"{gradients} have one of type {trained(network)[0].grad.dtype}; loss {before:.4f} -> {after:.4f}")
    assert counts[0] == 0 and counts[1] > 20 and gradients > 20, "changed: freeze() leaves requires_grad"
    assert after == before, "changed: an optimizer changes quantized weights"

    first = base().requires_grad_(False)
    lora(first)
    wanted = len(trained(first))
    quantized(first, kind)
    before, after, gradients = train(first)
    print(f"{kind.name}, LoRA first ({wanted} factors): {len(trained(first))} weights require a gradient, {gradients} "
          f"have one; loss {before:.4f} -> {after:.4f}")
    if kind is qfloat8:  # a quantized factor of zeros is NaN
        assert before != before, "changed: factors of zeros in float8"
    else:
        assert after == before and gradients > wanted / 2, "changed: the LoRA is trained"

    second = base().requires_grad_(False)
    quantized(second, kind)
    lora(second)
    before, after, _ = train(second)
    print(f"{kind.name}, quantized first: {len(trained(second))} weights require a gradient; "
          f"loss {before:.4f} -> {after:.4f}")
    assert len(trained(second)) == wanted and after < 0.99 * before
print("as described: freeze() unfreezes, and steps on quantized weights change nothing")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
