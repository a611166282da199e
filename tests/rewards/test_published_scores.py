"""The scores of every model reward against the published arithmetic, in float64 and with PIL."""

from pathlib import Path

import clip_pixels
import pytest
import scorer_files
import torch
from torch.nn import functional as F

from lit_vgrpo.rewards import AestheticScore, CLIPScore, HPSv2, ImageReward, PickScore

PROMPTS = ["a red cat", "ein blauer Bär, 猫", "two dogs", "x " * 200]


def pickscore(reward, image, prompt):
    cosine, scale = clip_pixels.cosine(reward.checkpoint, image, prompt)
    return scale * cosine / 26


def clipscore(reward, image, prompt):
    return 100 * max(clip_pixels.cosine(reward.checkpoint, image, prompt)[0], 0.0)


def aesthetic(reward, image, prompt):
    """CLIP's embedding at length 1, then five linear layers."""
    from transformers import CLIPModel

    clip = CLIPModel.from_pretrained(reward.clip).double().eval()
    x = clip.visual_projection(clip.vision_model(clip_pixels.cropped(image, 32)).pooler_output)[0]
    x = x / x.norm()
    weights = torch.load(reward.checkpoint)
    for place in scorer_files.HEAD_PLACES:
        x = weights[f"layers.{place}.weight"].double() @ x + weights[f"layers.{place}.bias"].double()
    return float(x)


def published_pixels(image, size):
    """HPSv2's ResizeMaxSize in float64: the longer side to ``size``, black on both sides of the shorter one."""
    height, width = image.shape[1:]
    longer = max(height, width)
    new = (round(height * size / longer), round(width * size / longer))
    resized = F.interpolate(image[None].double(), new, mode="bicubic", antialias=True, align_corners=False)
    square = torch.zeros(1, 3, size, size, dtype=torch.float64)
    top, left = (size - new[0]) // 2, (size - new[1]) // 2
    square[:, :, top : top + new[0], left : left + new[1]] = resized
    mean, std = (torch.tensor(values).double()[None, :, None, None] for values in (clip_pixels.MEAN, clip_pixels.STD))
    return (square - mean) / std


def hps(reward, image, prompt):
    import open_clip

    clip = open_clip.CLIP(**scorer_files.OPEN_CLIP_CONFIG).double().eval()
    clip.load_state_dict(torch.load(Path(reward.checkpoint) / "HPS_v2.1_compressed.pt")["state_dict"])
    a = clip.encode_image(published_pixels(image, 32))[0]
    b = clip.encode_text(open_clip.tokenize([prompt], context_length=12))[0]
    return float(a @ b / (a.norm() * b.norm()))


def published_score(weights, pixels, ids, mask):
    """ImageReward's forward pass in float64, from the published weights: ViT, BERT with cross-attention, head."""
    w = {name: weight.double() if weight.is_floating_point() else weight for name, weight in weights.items()}

    def linear(name, x):
        return F.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])

    def norm(name, x, eps):
        return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], eps)

    def attend(q, k, v, bias=0.0):
        q, k, v = (x.unflatten(-1, (-1, 64)).transpose(0, 1) for x in (q, k, v))
        return ((q @ k.mT / 8 + bias).softmax(-1) @ v).transpose(0, 1).flatten(1)

    vit, bert = "blip.visual_encoder", "blip.text_encoder"
    patches = F.conv2d(pixels, w[f"{vit}.patch_embed.proj.weight"], w[f"{vit}.patch_embed.proj.bias"], stride=16)
    x = torch.cat([w[f"{vit}.cls_token"][0], patches[0].flatten(1).T]) + w[f"{vit}.pos_embed"][0]
    for block in (f"{vit}.blocks.{number}" for number in range(2)):
        q, k, v = linear(f"{block}.attn.qkv", norm(f"{block}.norm1", x, 1e-6)).chunk(3, dim=-1)
        x = x + linear(f"{block}.attn.proj", attend(q, k, v))
        hidden = F.gelu(linear(f"{block}.mlp.fc1", norm(f"{block}.norm2", x, 1e-6)))
        x = x + linear(f"{block}.mlp.fc2", hidden)
    image = norm(f"{vit}.norm", x, 1e-6)

    y = w[f"{bert}.embeddings.word_embeddings.weight"][ids]
    y = norm(f"{bert}.embeddings.LayerNorm", y + w[f"{bert}.embeddings.position_embeddings.weight"][: len(ids)], 1e-12)
    for layer in (f"{bert}.encoder.layer.{number}" for number in range(2)):
        for kind, source, bias in (("attention", None, (1 - mask.double()) * -10000), ("crossattention", image, 0.0)):
            at = f"{layer}.{kind}"
            q, k, v = (linear(f"{at}.self.{part}", y if source is None or part == "query" else source)
                       for part in ("query", "key", "value"))  # fmt: skip
            y = norm(f"{at}.output.LayerNorm", linear(f"{at}.output.dense", attend(q, k, v, bias)) + y, 1e-12)
        hidden = F.gelu(linear(f"{layer}.intermediate.dense", y))
        y = norm(f"{layer}.output.LayerNorm", linear(f"{layer}.output.dense", hidden) + y, 1e-12)

    z = y[0]
    for place in (0, 2, 4, 6, 7):
        z = linear(f"mlp.layers.{place}", z)
    return (z.item() - 0.16717362830052426) / 1.0333394966054072


def image_reward(reward, image, prompt):
    from transformers import BertTokenizer

    text = BertTokenizer.from_pretrained(reward.tokenizer)(prompt, padding="max_length", truncation=True, max_length=35)
    ids, mask = torch.tensor(text["input_ids"]), torch.tensor(text["attention_mask"])
    weights = torch.load(Path(reward.checkpoint) / "ImageReward.pt")
    return published_score(weights, clip_pixels.cropped(image, 64), ids, mask)


CLIP_SIZES = [(32, 32), (20, 60), (200, 300)]
CASES = {
    # sizes, of which the first is the model's; tolerance there and for what is resized; least deviation of the scores
    PickScore: (pickscore, CLIP_SIZES, 1e-5, 1e-3, 0.02),
    CLIPScore: (clipscore, CLIP_SIZES, 1e-3, 0.1, 5),
    AestheticScore: (aesthetic, CLIP_SIZES, 1e-5, 2e-3, 0.02),
    HPSv2: (hps, [(32, 32), (32, 20), (20, 24), (200, 333)], 1e-5, 1e-5, 0.02),
    ImageReward: (image_reward, [(64, 64), (40, 100), (300, 200)], 1e-5, 2e-3, 0.03),
}
"""What is resized by PIL differs by a step in a few pixels."""


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        pytest.param(kind, size, marks=[pytest.mark.slow] * (sizes is CLIP_SIZES))
        for kind, (_, sizes, *_) in CASES.items()
        for size in sizes
    ],
)
@torch.no_grad()
def test_scores_are_the_published_arithmetic(tiny_reward, kind, size):
    plain, (native, *_), exact, resized, spread = CASES[kind]
    reward, images = tiny_reward(kind, batch_size=3), torch.stack([clip_pixels.photo(*size, seed) for seed in range(4)])
    scores = reward(images, PROMPTS, [{}] * 4)
    expected = torch.tensor([plain(reward, image, prompt) for image, prompt in zip(images, PROMPTS, strict=True)])
    assert scores.dtype == torch.float32
    assert expected.std() > spread  # else nothing is compared
    torch.testing.assert_close(scores, expected, atol=exact if size == native else resized, rtol=0)
