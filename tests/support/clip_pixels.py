"""CLIP as its authors define it: the preprocessing with PIL and numpy alone, one picture and prompt at a time."""

import numpy as np
import torch
from PIL import Image

MEAN, STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]


def cropped(image, size):
    """Shorter side to ``size`` with bicubic antialiasing, the middle square, then mean and std.

    Args:
        image: shape ``(3, H, W)``, float in [0, 1].

    Returns:
        Shape ``(1, 3, size, size)``, float64.
    """
    picture = Image.fromarray((image.permute(1, 2, 0).numpy() * 255).round().astype(np.uint8))
    scale = size / min(picture.size)
    resized = picture.resize([int(side * scale) for side in picture.size], Image.Resampling.BICUBIC)
    left, top = round((resized.width - size) / 2), round((resized.height - size) / 2)
    pixels = np.asarray(resized.crop((left, top, left + size, top + size))) / 255
    return torch.from_numpy((pixels - MEAN) / STD).permute(2, 0, 1)[None]


def photo(height, width, seed=0):
    """A smooth random picture ``(3, height, width)``, in steps of 1/255."""
    coarse = torch.rand(1, 3, 6, 5, generator=torch.Generator().manual_seed(seed))
    smooth = torch.nn.functional.interpolate(coarse, (height, width), mode="bicubic").clamp(0, 1)
    return (smooth[0] * 255).round() / 255


@torch.no_grad()
def cosine(folder, image, prompt):
    """Of a picture and a prompt in the tests' CLIP model (32 pixels, 24 tokens), in float64; and its logit scale."""
    from transformers import AutoTokenizer, CLIPModel

    model = CLIPModel.from_pretrained(folder).double().eval()
    ids = AutoTokenizer.from_pretrained(folder)(prompt)["input_ids"]
    ids = ids if len(ids) <= 24 else [*ids[:23], ids[-1]]  # cut, but the end token stays
    a = model.visual_projection(model.vision_model(cropped(image, 32)).pooler_output)[0]
    b = model.text_projection(model.text_model(torch.tensor([ids])).pooler_output)[0]
    return float(a @ b / (a.norm() * b.norm())), float(model.logit_scale.exp())
