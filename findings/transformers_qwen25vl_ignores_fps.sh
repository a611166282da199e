#!/usr/bin/env bash
# transformers: Qwen2.5-VL's processor ignores fps and takes each video for one of 24 frames per second
#
# One would guess: processor(text=..., videos=[frames], fps=2.0) tells the model that the frames are half a second
# apart. qwen-vl-utils returns fps for this call, and Qwen2.5-VL's rotary positions are in real time.
#
# What happens (transformers 5.24.0, torch 2.15.0): the processor reads the rate from video_metadata only. Without it,
# it assumes 24, whatever fps is. For 16 frames (8 temporal patches):
#                                                 second_per_grid_ts     temporal positions of the 8 patches
#   fps=2.0, fps=8.0, or neither                        0.083                1 1 1 1 1 1 2 2
#   video_metadata=[{"fps": 2.0, ...}]                  1.000                1 3 5 7 9 11 13 15
# So six of eight patches have the same position, and the video seems to last 0.7 seconds instead of 8. Nothing is
# logged.
#
# Why it matters: video rewards ask Qwen2.5-VL about motion in a few sampled frames. By their positions, most of the
# frames are simultaneous, at any rate. Pass video_metadata=[{"fps": ..., "total_num_frames": ...}].
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.15.0 torchvision==0.29.2 transformers==5.24.0
cat > "$folder/check.py" <<'PY'
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    PreTrainedTokenizerFast, Qwen2_5_VLConfig, Qwen2_5_VLModel, Qwen2_5_VLProcessor, Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor)

print(f"transformers {transformers.__version__}, torch {torch.__version__}")
transformers.logging.set_verbosity_error()
words = ["<|endoftext|>", "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>", "describe"]
tokenizer = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token=words[0]))
tokenizer.pre_tokenizer = WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=words[0],
                                    additional_special_tokens=words[1:5])
processor = Qwen2_5_VLProcessor(Qwen2VLImageProcessor(), tokenizer, Qwen2VLVideoProcessor())
config = Qwen2_5_VLConfig(
    text_config=dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
                     num_key_value_heads=1, vocab_size=6, bos_token_id=None, eos_token_id=None,
                     rope_parameters={"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}),
    vision_config=dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=16,
                       tokens_per_second=2, fullatt_block_indexes=[0]),  # 2 per second, as in Qwen2.5-VL 3B and 7B
    image_token_id=1, video_token_id=2, vision_start_token_id=3, vision_end_token_id=4)
model = Qwen2_5_VLModel(config)
frames = torch.zeros(16, 3, 56, 56, dtype=torch.uint8)


def positions(**options):
    """Return the seconds per temporal patch, and the temporal position of each patch."""
    inputs = processor(text=["<|vision_start|><|video_pad|><|vision_end|> describe"], videos=[frames],
                       return_tensors="pt", **options)
    chosen = ("video_grid_thw", "attention_mask", "mm_token_type_ids", "second_per_grid_ts")
    found, _ = model.get_rope_index(inputs["input_ids"], **{name: inputs[name] for name in chosen})
    temporal = found[0, 0, inputs["input_ids"][0] == 2].view(inputs["video_grid_thw"][0, 0], -1)[:, 0].tolist()
    seconds = inputs["second_per_grid_ts"][0].item()
    print(f"{options}: {seconds:.3f} seconds per patch, temporal positions {temporal}")
    return seconds, temporal


assumed = positions()
assert abs(assumed[0] - 2 / 24) < 1e-6 and len(set(assumed[1])) == 2, "changed: without fps"
for options in (dict(fps=2.0), dict(fps=8.0), dict(fps=2.0, do_sample_frames=False), dict(videos_kwargs=dict(fps=2.0))):
    assert positions(**options) == assumed, "changed: fps counts"
right = positions(video_metadata=[dict(fps=2.0, total_num_frames=16)])
assert right == (1.0, list(range(1, 16, 2))), "changed: video_metadata"
print("as described: fps is ignored")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
