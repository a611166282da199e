"""Random weights of the model rewards, tiny and under the names of their publishers."""

import json
import shutil

import torch
from safetensors.torch import load_file, save_file

HEAD_WIDTHS = [1024, 128, 64, 16, 1]
HEAD_PLACES = [0, 2, 4, 6, 7]  # dropout takes the others


def head_weights(width, generator):
    """The regression head of ImageReward and of the LAION predictor."""
    weights = {}
    sizes = zip([width, *HEAD_WIDTHS], HEAD_WIDTHS, strict=False)
    for place, (inward, outward) in zip(HEAD_PLACES, sizes, strict=True):
        weights[f"layers.{place}.weight"] = torch.randn(outward, inward, generator=generator) / inward**0.5
        weights[f"layers.{place}.bias"] = torch.randn(outward, generator=generator) / 10
    return weights


def write_bert_tokenizer(folder):
    """A BERT tokenizer of single letters; anything else is unknown to it."""
    from transformers import BertTokenizer

    letters = "abcdefghijklmnopqrstuvwxyz"
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{letter}" for letter in letters)]
    tokenizer = BertTokenizer(vocab={token: number for number, token in enumerate(tokens)})
    tokenizer.save_pretrained(folder)
    return len(tokens)


def image_reward_weights(vocabulary, width=128, patch=16, size=64, layers=2):
    """ImageReward's state dict: BLIP's ViT, its BERT with cross-attention, two unused projections, and the head."""
    generator = torch.Generator().manual_seed(5)
    weights = {}

    def matrix(name, *shape, std=0.08):
        weights[name] = torch.randn(shape, generator=generator) * std

    def linear(name, inward, outward):
        matrix(f"{name}.weight", outward, inward)
        matrix(f"{name}.bias", outward)

    def norm(name):
        weights[f"{name}.weight"] = 1 + torch.randn(width, generator=generator) / 10
        matrix(f"{name}.bias", width)

    vit, bert = "blip.visual_encoder", "blip.text_encoder"
    # so small that the epsilon of the first norm counts
    matrix(f"{vit}.cls_token", 1, 1, width, std=2e-3)
    matrix(f"{vit}.pos_embed", 1, (size // patch) ** 2 + 1, width, std=2e-3)
    matrix(f"{vit}.patch_embed.proj.weight", width, 3, patch, patch, std=2e-4)
    matrix(f"{vit}.patch_embed.proj.bias", width, std=2e-4)
    for block in (f"{vit}.blocks.{number}" for number in range(layers)):
        norm(f"{block}.norm1")
        linear(f"{block}.attn.qkv", width, 3 * width)
        linear(f"{block}.attn.proj", width, width)
        norm(f"{block}.norm2")
        linear(f"{block}.mlp.fc1", width, 2 * width)
        linear(f"{block}.mlp.fc2", 2 * width, width)
    norm(f"{vit}.norm")

    weights[f"{bert}.embeddings.position_ids"] = torch.arange(40)[None]
    matrix(f"{bert}.embeddings.word_embeddings.weight", vocabulary + 2, width, std=1)
    matrix(f"{bert}.embeddings.position_embeddings.weight", 40, width, std=0.5)
    norm(f"{bert}.embeddings.LayerNorm")
    for layer in (f"{bert}.encoder.layer.{number}" for number in range(layers)):
        for attention in (f"{layer}.attention", f"{layer}.crossattention"):
            for part in ("query", "key", "value"):
                linear(f"{attention}.self.{part}", width, width)
            linear(f"{attention}.output.dense", width, width)
            norm(f"{attention}.output.LayerNorm")
        linear(f"{layer}.intermediate.dense", width, 2 * width)
        linear(f"{layer}.output.dense", 2 * width, width)
        norm(f"{layer}.output.LayerNorm")
    linear("blip.vision_proj", width, 16)
    linear("blip.text_proj", width, 16)
    weights.update({f"mlp.{name}": weight for name, weight in head_weights(width, generator).items()})
    return weights


def write_image_reward(folder):
    """A folder with ``ImageReward.pt`` and BERT's tokenizer."""
    weights = image_reward_weights(write_bert_tokenizer(folder))
    torch.save(weights, folder / "ImageReward.pt")
    return folder


def write_aesthetic(folder, width=16):
    """The LAION predictor's head for a CLIP model with embeddings of that width; returns its file."""
    path = folder / "sac+logos+ava1-l14-linearMSE.pth"
    torch.save(head_weights(width, torch.Generator().manual_seed(6)), path)
    return path


def changed(folder, to, name, without=None, extra=None):
    """Copy a folder with one tensor less or more in a file."""
    file, is_safe = shutil.copytree(folder, to) / name, name.endswith(".safetensors")
    weights = load_file(file) if is_safe else torch.load(file)
    tensors = weights.get("state_dict", weights)
    if without is not None:
        del tensors[without]
    if extra is not None:
        tensors[extra] = torch.zeros(1)
    save_file(weights, file, metadata={"format": "pt"}) if is_safe else torch.save(weights, file)
    return to


OPEN_CLIP_CONFIG = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 32, "layers": 2, "width": 32, "head_width": 16, "patch_size": 8},
    "text_cfg": {"context_length": 12, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2},
}


def write_hps(folder, name="tiny-hps", **changes):
    """``HPS_v2.1_compressed.pt`` of an architecture that open_clip is told of; returns the folder and that name."""
    import open_clip

    config = {**OPEN_CLIP_CONFIG, **changes}
    (folder / f"{name}.json").write_text(json.dumps(config))
    open_clip.add_model_config(folder / f"{name}.json")
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = open_clip.CLIP(**config)
        for key, weight in model.named_parameters():
            if weight.ndim > 1:  # the usual initialisation is so small that all inputs look alike
                torch.nn.init.normal_(weight, std=0.02 if "positional" in key else 0.3)
    state = {key: weight.half() for key, weight in model.state_dict().items()}
    torch.save({"epoch": 1, "state_dict": state}, folder / "HPS_v2.1_compressed.pt")
    return folder, name
