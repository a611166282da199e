#!/usr/bin/env bash
# diffusers: in a batch, CogView 4 draws another picture for a prompt if its neighbour is longer
#
# One would guess: pipeline([p, q]) draws what pipeline(p) and pipeline(q) draw from the same noise. 46 other small
# text-to-image and text-to-video pipelines of diffusers do, to 0.002 of 255.
#
# What happens (diffusers 0.42.1, transformers 5.24.0, torch 2.13.0): the prompts are padded to the longest one, rounded
# up to a multiple of 16, and neither the text encoder nor the network gets a mask. The padding is read as text.
#   prompts of 3 and 9 tokens together: 0.0000 0.0000    (both are padded to 16)
#   prompts of 3 and 20 tokens together: 0.4596 0.0000   (largest difference of each picture from its own)
# Nothing is logged. Kandinsky 5 does the same with its text embeddings.
#
# Why it matters: rewards and benchmarks are computed on batches of prompts. A prompt's picture then depends on the
# other prompts of its batch, so that the same seed scores differently with another batch size or order.
# Encode each prompt alone, or pass prompts of one padded length together.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 diffusers==0.42.1 transformers==5.24.0
cat > "$folder/check.py" <<'PY'
import diffusers
import torch
import transformers
from diffusers import AutoencoderKL, CogView4Pipeline, CogView4Transformer2DModel, FlowMatchEulerDiscreteScheduler
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GlmConfig, GlmModel, PreTrainedTokenizerFast

print(f"diffusers {diffusers.__version__}, transformers {transformers.__version__}, torch {torch.__version__}")
torch.manual_seed(0)
words = Tokenizer(models.WordLevel({"<pad>": 0, "<unk>": 1, "dog": 2, "red": 3}, unk_token="<unk>"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", padding_side="left")
encoder = GlmModel(GlmConfig(vocab_size=4, hidden_size=16, intermediate_size=32, num_hidden_layers=2, head_dim=8,
                             num_attention_heads=2, num_key_value_heads=2, pad_token_id=0)).eval()
network = CogView4Transformer2DModel(in_channels=4, out_channels=4, num_layers=2, num_attention_heads=2,
                                     attention_head_dim=16, text_embed_dim=16, time_embed_dim=16, condition_dim=4,
                                     sample_size=16, rope_axes_dim=(8, 8)).eval()
for weight in network.parameters():  # the shipped initialisation is too small to see the text
    torch.nn.init.normal_(weight, std=0.3)
vae = AutoencoderKL(latent_channels=4, block_out_channels=(8,), norm_num_groups=2).eval()
schedule = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, base_shift=0.25, max_shift=0.75,
                                           time_shift_type="linear")
pipeline = CogView4Pipeline(tokenizer=tokenizer, text_encoder=encoder, vae=vae, transformer=network, scheduler=schedule)
pipeline.set_progress_bar_config(disable=True)


def draw(prompts, noise):
    return pipeline(prompts, height=32, width=32, num_inference_steps=3, guidance_scale=1.0, latents=noise.clone(),
                    output_type="latent").images


noise = torch.randn(2, 4, *[32 // pipeline.vae_scale_factor] * 2)
short = "red red dog"
for length, is_same in ((9, True), (20, False)):
    prompts = [short, " ".join(["dog"] * length)]
    together = draw(prompts, noise)
    alone = torch.cat([draw([prompt], noise[i : i + 1]) for i, prompt in enumerate(prompts)])
    differ = [(one - other).abs().max().item() for one, other in zip(together, alone, strict=True)]
    print(f"prompts of 3 and {length} tokens together:", *(f"{value:.4f}" for value in differ))
    assert differ[1] < 1e-3, "changed: the longest prompt is drawn in another way"
    assert (differ[0] < 1e-3) == is_same, "changed: the shorter prompt"
print("as described: padding is read as text")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
