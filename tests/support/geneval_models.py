"""Tiny real models for GenEval: a detector that knows a handful of pictures by heart, a segmenter of random weights."""

from __future__ import annotations

import torch
from torch.nn import functional as F

PAINT = {
    "cat": (1, 1, 0),
    "dog": (0, 1, 1),
    "clock": (1, 1, 1),
    "car": (1, 0, 0),
    "bus": (0, 0, 1),
    "mouse": (0, 1, 0),
}
NAMES = dict(enumerate(PAINT))
HEIGHT, WIDTH = 48, 96
# by picture: label, left, top, right, bottom in pixels
SCENES = [
    [("cat", 4, 12, 28, 36), ("dog", 60, 10, 90, 34)],
    [("cat", 64, 12, 88, 36), ("dog", 4, 10, 30, 38)],
    [("clock", 2, 14, 22, 34), ("clock", 38, 14, 58, 34), ("clock", 72, 14, 92, 34)],
    [("clock", 10, 4, 30, 24), ("clock", 60, 22, 80, 42)],
    [("car", 6, 20, 40, 40), ("bus", 54, 6, 92, 40)],
    [("mouse", 40, 20, 56, 30)],
    [],
]
SLOTS = 4


def pictures():
    """The scenes as images, shape (B, 3, H, W)."""
    images = torch.rand(len(SCENES), 3, HEIGHT, WIDTH, generator=torch.Generator().manual_seed(0)) * 0.1 + 0.45
    for image, scene in zip(images, SCENES, strict=True):
        for label, left, top, right, bottom in scene:
            image[:, top:bottom, left:right] = torch.tensor(PAINT[label]).view(3, 1, 1)
    return (images * 255).round() / 255


def save_detector(folder):
    """A random YOLOS whose last layers are solved for, so that it finds what the scenes hold, with its processor."""
    from transformers import YolosConfig, YolosForObjectDetection, YolosImageProcessor

    processor = YolosImageProcessor(size={"height": 32, "width": 64})
    pixels = processor(images=list((pictures() * 255).byte()), return_tensors="pt")["pixel_values"]
    number = {name: index for index, name in NAMES.items()}
    labels = torch.full((len(SCENES), SLOTS), len(NAMES))
    boxes = torch.full((len(SCENES), SLOTS, 4), 0.5)  # middle and size, as shares of the picture
    for i, scene in enumerate(SCENES):
        for slot, (label, left, top, right, bottom) in enumerate(scene):
            labels[i, slot] = number[label]
            box = torch.tensor([(left + right) / 2, (top + bottom) / 2, right - left, bottom - top])
            boxes[i, slot] = box / torch.tensor([WIDTH, HEIGHT, WIDTH, HEIGHT])
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        config = YolosConfig(
            **sizes, image_size=[32, 64], patch_size=8, num_detection_tokens=SLOTS, id2label=NAMES, label2id=number
        )
        model = YolosForObjectDetection(config).eval()
        for weight in model.parameters():
            if weight.ndim > 1:  # the usual initialisation is so small that all pictures look alike
                torch.nn.init.normal_(weight, std=0.3)
        features = model.vit(pixels).last_hidden_state[:, -SLOTS:]
        logits = 8.0 * F.one_hot(labels, len(NAMES) + 1)
        for head, wanted in ((model.class_labels_classifier, logits), (model.bbox_predictor, boxes.logit())):
            hidden = features
            for layer in head.layers[:-1]:
                hidden = layer(hidden).relu()
            inputs, outputs = hidden.flatten(0, 1).double(), wanted.flatten(0, 1).double()
            head.layers[-1].weight.copy_(torch.linalg.lstsq(inputs, outputs, driver="gelsd").solution.T)
            head.layers[-1].bias.zero_()
    model.save_pretrained(folder)
    processor.save_pretrained(folder)


def save_segmenter(folder, names=NAMES, queries=6):
    """A Mask2Former of random weights that knows these names, with its image processor."""
    from transformers import (
        Mask2FormerConfig,
        Mask2FormerForUniversalSegmentation,
        Mask2FormerImageProcessor,
        SwinConfig,
    )

    swin = SwinConfig(
        image_size=64, patch_size=4, embed_dim=8, depths=[1] * 4, num_heads=[1] * 4, window_size=4,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )  # fmt: skip
    config = Mask2FormerConfig(
        backbone_config=swin, feature_size=32, mask_feature_size=32, hidden_dim=32, encoder_feedforward_dim=32,
        encoder_layers=1, decoder_layers=2, num_attention_heads=2, dim_feedforward=32, num_queries=queries,
        id2label=names, label2id={name: index for index, name in names.items()},
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = Mask2FormerForUniversalSegmentation(config)
        for name, weight in model.named_parameters():
            if "class_predictor" in name or "mask_embedder" in name or "queries" in name:
                torch.nn.init.normal_(weight, std=1.0)  # else all queries are alike
    model.save_pretrained(folder)
    Mask2FormerImageProcessor(size={"height": 64, "width": 64}).save_pretrained(folder)
