#!/usr/bin/env bash
# diffusers: a PRX pipeline that was loaded and saved again cannot be loaded
#
# One would guess: what save_pretrained writes, from_pretrained reads. A full fine-tune is saved in this way.
#
# What happens (diffusers 0.42.1, transformers 5.24.0, torch 2.13.0): diffusers reads the text encoder of a published
# folder with a class of its own, which has no public name. save_pretrained names that class in model_index.json, and
# writes the configuration of the encoder alone. It gives no warning. from_pretrained then ends in a ValueError,
# "diffusers has no class T5GemmaEncoder".
#
# Why it matters: the folder looks complete, and the error comes when somebody wants to draw with it. Save the network
# alone, and load it into the pipeline of the base checkpoint.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 diffusers==0.42.1 transformers==5.24.0 accelerate==1.15.0
cat > "$folder/check.py" <<'PY'
import json
import logging
from pathlib import Path
from tempfile import TemporaryDirectory

import diffusers
import torch
import transformers
from diffusers import AutoencoderKL, DiffusionPipeline, FlowMatchEulerDiscreteScheduler, PRXPipeline
from diffusers.models.transformers.transformer_prx import PRXTransformer2DModel
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, T5GemmaConfig, T5GemmaModuleConfig
from transformers.models.t5gemma.modeling_t5gemma import T5GemmaEncoder

print(f"diffusers {diffusers.__version__}, transformers {transformers.__version__}, torch {torch.__version__}")
for name in ("diffusers", "transformers"):
    logging.getLogger(name).setLevel(logging.CRITICAL)
sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
             head_dim=8, vocab_size=8, pad_token_id=0, bos_token_id=None, eos_token_id=1)
parts = T5GemmaConfig(encoder=T5GemmaModuleConfig(**sizes), decoder=T5GemmaModuleConfig(**sizes))
words = Tokenizer(models.WordLevel({"<pad>": 0, "</s>": 1, "a": 2, "dog": 3}, unk_token="<pad>"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="</s>", model_max_length=8)
network = PRXTransformer2DModel(
    in_channels=4, context_in_dim=16, hidden_size=32, num_heads=2, depth=2, axes_dim=[8, 8], patch_size=1)
vae = AutoencoderKL(block_out_channels=(4, 4), layers_per_block=1, latent_channels=4, norm_num_groups=2,
                    down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2)


def outcome(folder):
    try:
        pipeline = DiffusionPipeline.from_pretrained(folder)
    except Exception as error:
        return None, f"{type(error).__name__}: {str(error).splitlines()[0][:110]}"
    return pipeline, "loads"


with TemporaryDirectory() as place:
    first, second = Path(place, "first"), Path(place, "second")
    encoder = T5GemmaEncoder(parts.encoder)
    PRXPipeline(network, FlowMatchEulerDiscreteScheduler(), encoder, tokenizer, vae).save_pretrained(first)
    # As in a published folder: the configuration of the whole T5Gemma, of which the pipeline reads the encoder.
    (first / "text_encoder" / "config.json").write_text(json.dumps(parts.to_dict()))
    named = json.loads((first / "model_index.json").read_text())["text_encoder"]
    pipeline, result = outcome(first)
    print(f"first folder, text encoder {named}: {result}")
    assert named == ["transformers", "T5GemmaEncoder"] and result == "loads", "changed: a PRX folder"
    pipeline.save_pretrained(second)
    named = json.loads((second / "model_index.json").read_text())["text_encoder"]
    kind = json.loads((second / "text_encoder" / "config.json").read_text())["model_type"]
    _, result = outcome(second)
    print(f"saved again, text encoder {named} of type {kind}: {result}")
    assert named == ["diffusers", "T5GemmaEncoder"] and result.startswith("ValueError"), "changed: a PRX saved again"
    whole = DiffusionPipeline.from_pretrained(
        first, transformer=PRXTransformer2DModel.from_pretrained(second, subfolder="transformer"))
    same = all(torch.equal(one, other) for one, other in zip(
        whole.transformer.state_dict().values(), network.state_dict().values(), strict=True))
    print(f"the saved network in the first folder's pipeline: {'the same weights' if same else 'other weights'}")
    assert same, "changed: the network alone"
print("as described: save the network alone")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
