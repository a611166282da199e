#!/usr/bin/env bash
# diffusers and transformers: the index of sharded weights does not decide which shard a tensor is read from
#
# One would guess: model.safetensors.index.json says in which shard a tensor lies, and a copy of that tensor in
# another shard is not read; a tensor that the index does not name is not loaded.
#
# What happens (diffusers 0.42.1, transformers 5.24.0, torch 2.13.0): each shard that the index names is read whole,
# in the order of the names, so a stale copy in a later shard replaces the tensor that the index points to. In
# diffusers a tensor that is in a shard but not in the index is loaded and yet reported as "newly initialized".
#   diffusers:    stale copy in an earlier shard is ignored, in the last shard it wins; no entry in the index: loaded
#   transformers: stale copy in an earlier shard is ignored, in the last shard it wins
# Nothing is logged about the stale copy.
#
# Why it matters: policies of billions of weights are saved in shards. A folder in which shards of two saves are
# mixed, or a tool that rewrites one tensor in "its" shard, gives a network with old weights in it, without an error.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 diffusers==0.42.1 transformers==5.24.0
cat > "$folder/check.py" <<'PY'
import json
import tempfile
from pathlib import Path

import diffusers
import torch
import transformers
from diffusers import SD3Transformer2DModel
from safetensors.torch import load_file, save_file
from transformers import CLIPTextConfig, CLIPTextModel

print(f"diffusers {diffusers.__version__}, transformers {transformers.__version__}, torch {torch.__version__}")
diffusers.utils.logging.disable_progress_bar()
transformers.utils.logging.disable_progress_bar()
torch.manual_seed(0)
models = {
    "diffusers": SD3Transformer2DModel(
        sample_size=8, num_layers=2, attention_head_dim=8, num_attention_heads=2, in_channels=4, out_channels=4,
        joint_attention_dim=16, caption_projection_dim=16, pooled_projection_dim=16, pos_embed_max_size=8),
    "transformers": CLIPTextModel(CLIPTextConfig(
        vocab_size=99, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, bos_token_id=1,
        eos_token_id=2, pad_token_id=0)),
}
for library, model in models.items():
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model.save_pretrained(folder, max_shard_size="5KB")
        shards, index = sorted(folder.glob("*.safetensors")), next(folder.glob("*.index.json"))
        places = json.loads(index.read_text())["weight_map"]
        key = next(k for k in places if k.endswith(("blocks.0.attn.to_q.weight", "layers.0.self_attn.q_proj.weight")))
        own = folder / places[key]
        assert shards[0] < own < shards[-1]

        def loaded():
            return type(model).from_pretrained(folder).state_dict()[key]

        right = loaded()
        assert right.abs().max() > 0
        results = []
        for shard in (shards[0], shards[-1]):
            content = load_file(shard)
            save_file(content | {key: torch.zeros_like(right)}, shard, metadata={"format": "pt"})
            results.append("replaces it" if not loaded().any() else "is ignored" if torch.equal(loaded(), right) else "?")
            save_file(content, shard, metadata={"format": "pt"})
        print(f"{library}: {key} is in shard {1 + shards.index(own)} of {len(shards)}; a copy of zeros in the first shard "
              f"{results[0]}, in the last shard {results[1]}")
        assert results == ["is ignored", "replaces it"], "changed"
        if library == "diffusers":
            content = json.loads(index.read_text())
            del content["weight_map"][key]
            index.write_text(json.dumps(content))
            same = torch.equal(loaded(), right)
            print(f"{library}: the tensor without an entry in the index is {'loaded' if same else 'not loaded'}")
            assert same, "changed"
print("as described: the last shard wins")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
