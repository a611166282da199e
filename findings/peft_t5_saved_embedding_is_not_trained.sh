#!/usr/bin/env bash
# transformers, peft: get_input_embeddings() of T5's encoder is a module that is never run, and hooks or peft on it fail
#
# One would guess: the module that get_input_embeddings() returns embeds the tokens. modules_to_save=["shared"], its
# name in T5, trains a copy of it, and a forward hook on it sees each pass.
#
# What happens (transformers 5.24.0, peft 0.21.2, torch 2.13.0): "shared" and "encoder.embed_tokens" are two modules
# with one tied weight, and only the second runs. peft copies the weight of the first:
#   trained                             gradient    change of the output in ten steps
#   modules_to_save=["shared"]          None        0.0
#   modules_to_save=["embed_tokens"]    76          0.2
#   forward hooks called in one pass: on get_input_embeddings() 0, on encoder.embed_tokens 1
# The adapter counts "shared" among its trainable weights and saves it. UMT5 does the same; CLIP runs the module that it
# returns. ensure_weight_tying=True warns and changes nothing, and nothing is logged without it.
#
# Why it matters: T5 reads the prompts of FLUX.1, Stable Diffusion 3 and PixArt, UMT5 those of Wan. New tokens
# trained in this way stay as they were, and noise that a hook adds to the embeddings (NEFTune) is not added. Name
# "embed_tokens", or use trainable_token_indices, which works with both names.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 transformers==5.24.0 peft==0.21.2
cat > "$folder/check.py" <<'PY'
import peft
import torch
import transformers
from peft import LoraConfig, get_peft_model
from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel, UMT5Config, UMT5EncoderModel

print(f"transformers {transformers.__version__}, peft {peft.__version__}, torch {torch.__version__}")
sizes = dict(vocab_size=50, d_model=16, d_kv=4, d_ff=32, num_layers=2, num_heads=4)
tokens = torch.tensor([[3, 4, 5, 1]])


def encoder(kind):
    torch.manual_seed(0)
    if kind is CLIPTextModel:
        return kind(CLIPTextConfig(vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
                                   num_attention_heads=4, max_position_embeddings=8, bos_token_id=0, eos_token_id=1,
                                   pad_token_id=2)).eval()
    return kind((T5Config if kind is T5EncoderModel else UMT5Config)(**sizes)).eval()


def calls(kind):
    model, seen = encoder(kind), []
    model.get_input_embeddings().register_forward_hook(lambda *arguments: seen.append(1))
    with torch.no_grad():
        model(input_ids=tokens)
    return len(seen)


def train(kind, **options):
    """Return the gradient of the embedding and the change of the output in ten steps that train nothing else."""
    model = get_peft_model(encoder(kind), LoraConfig(r=2, target_modules=["q"], **options)).eval()
    weights = [weight for name, weight in model.named_parameters() if weight.requires_grad and "lora" not in name]
    assert len(weights) == 1
    optimizer = torch.optim.SGD(weights, lr=1e-4)
    start = model(input_ids=tokens)[0].detach()
    for _ in range(10):
        optimizer.zero_grad()
        model(input_ids=tokens)[0].sum(-1).square().sum().backward()
        optimizer.step()
    gradients = [None if weight.grad is None else weight.grad.norm().item() for weight in weights]
    return gradients, (model(input_ids=tokens)[0] - start).norm().item()


assert calls(CLIPTextModel) == 1
for kind in (T5EncoderModel, UMT5EncoderModel):
    print(f"{kind.__name__}: hooks on get_input_embeddings() called {calls(kind)} times, CLIP's once")
    assert calls(kind) == 0, "changed: the module is run"
    for options in ({"modules_to_save": ["shared"]}, {"modules_to_save": ["embed_tokens"]},
                    {"trainable_token_indices": {"shared": [3, 4]}}):
        gradients, change = train(kind, **options)
        print(f"  {options}: gradient {gradients}, change of the output {change:.2g}")
        if options == {"modules_to_save": ["shared"]}:
            assert gradients == [None] and change == 0, "changed: it is trained"
        else:
            assert change > 1e-3
print("as described: the module named shared is not run")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
