"""Milliseconds per image of the rewards, each at its real size, with random weights: nothing is downloaded.

    python benchmarks/reward_speed.py                                    # all of them, on the CPU
    python benchmarks/reward_speed.py HPSv2 PickScore --dtype bfloat16
    python benchmarks/reward_speed.py --device cuda --batch 16

Scores one batch of pictures of one prompt, as a group is. The CPU time is summed over threads: with one thread it is
what the wall time would be on an idle machine. Prints a table and writes it into
``benchmarks/results/reward_speed.json``, where rows of other rewards, dtypes and devices stay.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lit_vgrpo.rewards.clip import AestheticScore, CLIPEncoder, CLIPScore, PickScore
from lit_vgrpo.rewards.hps import HPSv2
from lit_vgrpo.rewards.image_reward import ImageReward, blip_modules
from lit_vgrpo.rewards.model import ModelReward, ScoreHead

RESULTS = Path(__file__).parent / "results" / "reward_speed.json"
PROMPT = "a red cat on a wooden bench in front of a bakery, oil painting"
# text width, layers, heads, then the same of the ViT, then the shared width
CLIP_SIZES = {"ViT-L/14": (768, 12, 12, 1024, 24, 16, 768), "ViT-H/14": (1024, 24, 16, 1280, 32, 16, 1024)}


def clip(size: str) -> Any:
    from transformers import CLIPConfig, CLIPModel

    text, text_layers, text_heads, vision, vision_layers, vision_heads, shared = CLIP_SIZES[size]
    config = CLIPConfig(
        text_config={
            "hidden_size": text,
            "intermediate_size": 4 * text,
            "num_hidden_layers": text_layers,
            "num_attention_heads": text_heads,
        },
        vision_config={
            "hidden_size": vision,
            "intermediate_size": 4 * vision,
            "num_hidden_layers": vision_layers,
            "num_attention_heads": vision_heads,
            "patch_size": 14,
        },
        projection_dim=shared,
    )
    return CLIPModel(config)


def clip_processor() -> Any:
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import CLIPImageProcessor, CLIPProcessor, CLIPTokenizer

    letters = sorted(ByteLevel.alphabet())
    tokens = [*letters, *(letter + "</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    tokenizer = CLIPTokenizer(vocab={token: number for number, token in enumerate(tokens)}, merges=[])
    return CLIPProcessor(image_processor=CLIPImageProcessor(), tokenizer=tokenizer)


def pickscore(reward: PickScore) -> None:
    reward._model = clip("ViT-H/14")
    reward._encoder = CLIPEncoder(reward._model, clip_processor())


def clipscore(reward: CLIPScore) -> None:
    reward._model = clip("ViT-L/14")
    reward._encoder = CLIPEncoder(reward._model, clip_processor())


def aesthetic(reward: AestheticScore) -> None:
    model = clip("ViT-L/14")
    parts = {"vision": model.vision_model, "projection": model.visual_projection, "head": ScoreHead(768).float()}
    reward._model, reward._processor = torch.nn.ModuleDict(parts), clip_processor()


def hpsv2(reward: HPSv2) -> None:
    import open_clip

    reward._model, reward._tokenizer = open_clip.create_model(reward.model), open_clip.get_tokenizer(reward.model)


def image_reward(reward: ImageReward) -> None:
    from transformers import BertTokenizer

    shapes: dict[str, tuple[int, ...]] = {
        "vision.embeddings.patch_embedding.weight": (1024, 3, 16, 16),
        "vision.embeddings.position_embedding": (1, 197, 1024),
        "text.embeddings.word_embeddings.weight": (30524, 768),
        "text.embeddings.position_embeddings.weight": (512, 768),
        "text.encoder.layer.0.crossattention.self.key.weight": (768, 1024),
        **{f"vision.encoder.layers.{number}.mlp.fc1.weight": (4096, 1024) for number in range(24)},
        **{f"text.encoder.layer.{number}.intermediate.dense.weight": (3072, 768) for number in range(12)},
    }
    model = blip_modules({name: torch.empty(shape, device="meta") for name, shape in shapes.items()})
    model["head"].float()
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *PROMPT.replace(",", " ,").split()]
    reward._model = model
    reward._tokenizer = BertTokenizer(vocab={word: n for n, word in enumerate(dict.fromkeys(vocabulary))})


REWARDS: dict[str, tuple[type[ModelReward], Callable[[Any], None]]] = {
    "PickScore": (PickScore, pickscore),
    "CLIPScore": (CLIPScore, clipscore),
    "HPSv2": (HPSv2, hpsv2),
    "ImageReward": (ImageReward, image_reward),
    "AestheticScore": (AestheticScore, aesthetic),
}


def measure(name: str, dtype: str, device: str, batch: int, side: int, repeats: int) -> dict[str, Any]:
    kind, fill = REWARDS[name]
    reward: Any = kind(dtype=dtype, batch_size=batch)  # type: ignore[call-arg]
    default = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype))  # no copy in float32 is ever there
    try:
        fill(reward)
    finally:
        torch.set_default_dtype(default)
    reward._model.eval().requires_grad_(False)
    images = torch.rand(batch, 3, side, side).to(device)
    reward(images[:1], [PROMPT], [{}])
    seconds, cpu_seconds = [], []
    for _ in range(repeats):
        start, cpu_start = time.perf_counter(), time.process_time()
        reward(images, [PROMPT] * batch, [{}] * batch).sum().item()  # waits for the device
        seconds.append((time.perf_counter() - start) / batch)
        cpu_seconds.append((time.process_time() - cpu_start) / batch)
    return {
        "reward": name,
        "device": torch.cuda.get_device_name() if device.startswith("cuda") else f"CPU ({processor()})",
        "dtype": dtype,
        "million_parameters": round(sum(weight.numel() for weight in reward._model.parameters()) / 1e6),
        "batch": batch,
        "image_side": side,
        "threads": torch.get_num_threads(),
        "seconds_per_image": round(min(seconds), 4),
        "cpu_seconds_per_image": round(min(cpu_seconds), 4),
        "load_average": round(os.getloadavg()[0], 1),
        "torch": torch.__version__,
    }


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def merged(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Old rows and new ones; of the same reward, device and dtype the new one."""
    rows = {(row["reward"], row["device"], row["dtype"]): row for row in [*old, *new]}
    return [rows[key] for key in sorted(rows)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rewards", nargs="*", metavar="REWARD", help=f"of {', '.join(REWARDS)}")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--side", type=int, default=512, help="of the pictures, in pixels")
    parser.add_argument("--repeats", type=int, default=2, help="the fastest one counts")
    args = parser.parse_args()
    for name in args.rewards:
        if name not in REWARDS:
            parser.error(f"{name} is not one of: {', '.join(REWARDS)}.")

    torch.manual_seed(0)
    logging.disable(logging.WARNING)  # open_clip warns that the weights are random
    print(f"{'reward':<15} {'parameters':>10} {'dtype':>9} {'ms / image':>10} {'CPU ms':>8}")
    for name in args.rewards or REWARDS:
        row = measure(name, args.dtype, args.device, args.batch, args.side, args.repeats)
        line = f"{name:<15} {row['million_parameters']:>8} M {row['dtype']:>9} {1e3 * row['seconds_per_image']:>10.2f}"
        print(f"{line} {1e3 * row['cpu_seconds_per_image']:>8.1f}", flush=True)
        old = json.loads(RESULTS.read_text()) if RESULTS.is_file() else []
        RESULTS.write_text(json.dumps(merged(old, [row]), indent=2) + "\n")
        gc.collect()


if __name__ == "__main__":
    main()
