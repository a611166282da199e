"""ImageReward's network in transformers' Blip classes, and the names of its published weights there."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor, nn

from lit_vgrpo.rewards.model import ScoreHead

if TYPE_CHECKING:
    from transformers.models.blip.modeling_blip import BlipVisionModel
    from transformers.models.blip.modeling_blip_text import BlipTextModel

HEAD_WIDTH = 64  # of every attention head, in BERT and the ViT: the only size that the weights do not reveal

# weights without a match do not affect the score: the projections of BLIP's contrastive loss
NAMES = {
    r"blip\.visual_encoder\.cls_token": "vision.embeddings.class_embedding",
    r"blip\.visual_encoder\.pos_embed": "vision.embeddings.position_embedding",
    r"blip\.visual_encoder\.patch_embed\.proj\.(\w+)": r"vision.embeddings.patch_embedding.\1",
    r"blip\.visual_encoder\.norm\.(\w+)": r"vision.post_layernorm.\1",
    r"blip\.visual_encoder\.blocks\.(\d+)\.norm([12])\.(\w+)": r"vision.encoder.layers.\1.layer_norm\2.\3",
    r"blip\.visual_encoder\.blocks\.(\d+)\.attn\.qkv\.(\w+)": r"vision.encoder.layers.\1.self_attn.qkv.\2",
    r"blip\.visual_encoder\.blocks\.(\d+)\.attn\.proj\.(\w+)": r"vision.encoder.layers.\1.self_attn.projection.\2",
    r"blip\.visual_encoder\.blocks\.(\d+)\.mlp\.(fc[12])\.(\w+)": r"vision.encoder.layers.\1.mlp.\2.\3",
    r"blip\.text_encoder\.((?!embeddings\.position_ids).+)": r"text.\1",
    r"mlp\.(.+)": r"head.\1",
}


def renamed(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the published weights under their names in :func:`blip_modules`."""
    found = {}
    for name, weight in weights.items():
        for pattern, new in NAMES.items():
            if match := re.fullmatch(pattern, name):
                found[match.expand(new)] = weight
    return found


def blip_modules(weights: Mapping[str, Tensor]) -> nn.ModuleDict:
    """Build ``vision``, ``text`` and ``head`` with the sizes of renamed weights, without loading them.

    Raises:
        KeyError: a weight that determines a size is missing.
    """
    text = _text_model(weights)
    return nn.ModuleDict({"vision": _vision_model(weights), "text": text, "head": ScoreHead(text.config.hidden_size)})


def _vision_model(weights: Mapping[str, Tensor]) -> BlipVisionModel:
    from transformers import BlipVisionConfig
    from transformers.models.blip.modeling_blip import BlipVisionModel

    width, _, patch, _ = weights["vision.embeddings.patch_embedding.weight"].shape
    places = weights["vision.embeddings.position_embedding"].shape[1] - 1  # the first is the class token's
    config = BlipVisionConfig(
        hidden_size=width,
        intermediate_size=weights["vision.encoder.layers.0.mlp.fc1.weight"].shape[0],
        num_hidden_layers=_layers(weights, "vision.encoder.layers."),
        num_attention_heads=max(1, width // HEAD_WIDTH),
        image_size=patch * math.isqrt(places),
        patch_size=patch,
        layer_norm_eps=1e-6,  # the ViT's; the class's default differs
    )
    return BlipVisionModel(config)


def _text_model(weights: Mapping[str, Tensor]) -> BlipTextModel:
    from transformers import BlipTextConfig
    from transformers.models.blip.modeling_blip_text import BlipTextModel

    vocabulary, width = weights["text.embeddings.word_embeddings.weight"].shape
    config = BlipTextConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        encoder_hidden_size=weights["text.encoder.layer.0.crossattention.self.key.weight"].shape[1],
        intermediate_size=weights["text.encoder.layer.0.intermediate.dense.weight"].shape[0],
        num_hidden_layers=_layers(weights, "text.encoder.layer."),
        num_attention_heads=max(1, width // HEAD_WIDTH),
        max_position_embeddings=weights["text.embeddings.position_embeddings.weight"].shape[0],
        layer_norm_eps=1e-12,
    )
    return BlipTextModel(config, add_pooling_layer=False)


def _layers(weights: Mapping[str, Tensor], prefix: str) -> int:
    return len({name.removeprefix(prefix).split(".")[0] for name in weights if name.startswith(prefix)})
