import clip_pixels
import pytest
import torch
from torch.nn import functional as F

from lit_vgrpo.rewards.image_reward import ImageReward

PROMPTS = ["a red cat", "ein bär", "two dogs on a bench"]


@pytest.fixture(scope="module")
def reward(tiny_reward):
    return tiny_reward(ImageReward)


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


@torch.no_grad()
def expected_score(folder, image, prompt):
    from transformers import BertTokenizer

    tokenizer = BertTokenizer.from_pretrained(folder)
    text = tokenizer(prompt, padding="max_length", truncation=True, max_length=35)
    ids, mask = torch.tensor(text["input_ids"]), torch.tensor(text["attention_mask"])
    return published_score(torch.load(folder / "ImageReward.pt"), clip_pixels.cropped(image, 64), ids, mask)


@pytest.mark.parametrize("size", [(64, 64), (40, 100), (300, 200)])
def test_scores_are_those_of_the_published_network(image_reward_folder, reward, size):
    images = torch.stack([clip_pixels.photo(*size, seed) for seed in range(3)])
    scores = reward(images, PROMPTS, [{}] * 3)
    expected = [expected_score(image_reward_folder, i, p) for i, p in zip(images, PROMPTS, strict=True)]
    assert torch.tensor(expected).std() > 0.03  # else nothing is compared
    atol = 1e-5 if size == (64, 64) else 2e-3  # what is resized differs by a step in a few pixels
    torch.testing.assert_close(scores, torch.tensor(expected), atol=atol, rtol=0)


def test_blips_own_tokens_follow_berts(reward):
    reward.load()
    assert reward._tokenizer.convert_tokens_to_ids(["[DEC]", "[ENC]"]) == [57, 58]


def test_a_prompt_is_cut_to_35_tokens(reward):
    image = clip_pixels.photo(64, 64)[None].expand(3, -1, -1, -1)
    scores = reward(image, ["a " * 33, "a " * 33 + "b b", "a " * 32 + "b b"], [{}] * 3)
    assert scores[0] == scores[1]
    assert scores[0] != scores[2]
