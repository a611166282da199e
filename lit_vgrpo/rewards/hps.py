"""HPS v2: a CLIP model fine-tuned on human preferences between generated images."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from lit_vgrpo.core.pixels import letterboxed
from lit_vgrpo.core.ranges import checked
from lit_vgrpo.rewards.model import ModelReward, unit, weights_file
from lit_vgrpo.system.hub import loading

HUB_CHECKPOINT = "xswu/HPSv2"
FILENAME = "HPS_v2.1_compressed.pt"


@checked
@dataclass(eq=False)
class HPSv2(ModelReward):
    """The cosine similarity of image and prompt in HPS v2.1; about 0.2 to 0.35, reported as 20 to 35 in papers.

    Images are resized to fit their longer side and padded with black, not cropped. Resizing uses antialiasing, the
    torchvision default since 0.17; the published code depends on the version.

    Args:
        checkpoint: Hub name, local folder with ``HPS_v2.1_compressed.pt``, or such a file; HPS v2.0's file
            ``HPS_v2_compressed.pt`` also works.
        model: The checkpoint's architecture, an open_clip name.

    The other options are those of :class:`~lit_vgrpo.rewards.CLIPScore`.

    Source:
        arXiv 2306.09341; github.com/tgxs002/HPSv2, hpsv2/img_score.py and hpsv2/src/open_clip/transform.py.
    """

    name = "hpsv2"
    differentiable = True
    weight_files = (("checkpoint", FILENAME),)
    package = "open_clip"
    extra = "hps"

    checkpoint: str = HUB_CHECKPOINT
    model: str = "ViT-H-14"

    def _build(self) -> nn.Module:
        import open_clip

        path = weights_file(self.checkpoint, FILENAME)
        with loading(str(path), f"Set {self.option('checkpoint')} and {self.option('model')} to a matching pair."):
            device = torch.get_default_device().type  # meta in a check, which maps safetensors without reading them
            model: nn.Module = open_clip.create_model(self.model, device=device)
            place = "cpu" if path.suffix == ".safetensors" else device
            open_clip.load_checkpoint(model, str(path), device=place)  # unpickles only tensors, and needs all of them
        return model.to(getattr(torch, self.dtype))

    @cached_property
    def _tokenizer(self) -> Any:
        import open_clip

        return open_clip.get_tokenizer(self.model)

    def truncated(self, prompts: list[str]) -> tuple[list[bool], int]:
        most: int = self._tokenizer.context_length
        *last, padding = self._tokenizer([*prompts, ""], context_length=most + 1)[:, -1].tolist()
        return [token != padding for token in last], most

    def _read(self, prompts: list[str]) -> Tensor:
        return unit(self._model.encode_text(self._tokenizer(prompts).to(self._model.logit_scale.device)))

    def _score(self, images: Tensor, texts: Tensor) -> Tensor:
        size = self._model.visual.image_size
        pixels = letterboxed(images, size[0] if isinstance(size, tuple) else size)
        return (unit(self._model.encode_image(pixels.to(self._model.logit_scale))) * texts).sum(-1)
