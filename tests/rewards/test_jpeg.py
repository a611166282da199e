import pytest
import torch
from PIL import Image

from lit_vgrpo.rewards.jpeg import JPEGCompressibility, JPEGIncompressibility


def test_it_is_minus_the_kilobytes_of_the_file_and_incompressibility_its_negative(tmp_path):
    images = torch.rand(2, 3, 24, 40, generator=torch.Generator().manual_seed(0))
    scores = JPEGCompressibility(quality=80)(images, ["a", "b"], [{}, {}])
    assert scores.shape == (2,)
    assert scores.dtype == torch.float32
    for number, (image, score) in enumerate(zip(images, scores, strict=True)):
        path = tmp_path / f"{number}.jpg"
        Image.fromarray((image.permute(1, 2, 0) * 255).round().byte().numpy()).save(path, quality=80)
        assert score.item() == pytest.approx(-path.stat().st_size / 1000)
    torch.testing.assert_close(JPEGIncompressibility(quality=80)(images, ["a", "b"], [{}, {}]), -scores)
