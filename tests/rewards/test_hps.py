import clip_pixels
import pytest
import scorer_files
import torch
from torch.nn import functional as F

from lit_vgrpo.rewards.hps import HPSv2

PROMPTS = ["a red cat", "ein blauer Bär, 猫", "two dogs"]


@pytest.fixture(scope="module")
def reward(tiny_reward):
    return tiny_reward(HPSv2)


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


@torch.no_grad()
def plain_score(folder, image, prompt):
    import open_clip

    clip = open_clip.CLIP(**scorer_files.OPEN_CLIP_CONFIG).double().eval()
    clip.load_state_dict(torch.load(folder / "HPS_v2.1_compressed.pt")["state_dict"])
    a = clip.encode_image(published_pixels(image, 32))[0]
    b = clip.encode_text(open_clip.tokenize([prompt], context_length=12))[0]
    return float(a @ b / (a.norm() * b.norm()))


@pytest.mark.parametrize("size", [(32, 32), (32, 20), (20, 24), (200, 333)])
def test_scores_are_the_published_arithmetic(hps_checkpoint, reward, size):
    images = torch.stack([clip_pixels.photo(*size, seed) for seed in range(3)])
    scores = reward(images, PROMPTS, [{}] * 3)
    expected = torch.tensor([plain_score(hps_checkpoint[0], i, p) for i, p in zip(images, PROMPTS, strict=True)])
    assert expected.std() > 0.02  # else nothing is compared
    torch.testing.assert_close(scores, expected, atol=1e-5, rtol=0)


def test_a_long_prompt_is_cut_to_the_context_and_keeps_its_end(reward):
    images = clip_pixels.photo(40, 40)[None].expand(3, -1, -1, -1)
    scores = reward(images, ["a " * 10, "a " * 10 + "b b", "a " * 9 + "b b"], [{}] * 3)  # start, 10 words, end
    assert scores[0] == scores[1]
    assert scores[0] != scores[2]


def test_the_file_itself_and_safetensors_are_read_too(hps_checkpoint, reward, tmp_path):
    from safetensors.torch import save_file

    folder, name = hps_checkpoint
    path = folder / "HPS_v2.1_compressed.pt"
    save_file(torch.load(path)["state_dict"], tmp_path / "hps.safetensors")
    batch = (clip_pixels.photo(40, 40)[None], ["a cat"], [{}])
    for other in (path, tmp_path / "hps.safetensors"):
        assert torch.equal(HPSv2(str(other), model=name)(*batch), reward(*batch))


@pytest.mark.parametrize("name", ["no-such-model", "wider-hps"])
def test_another_architecture_is_one_line(hps_checkpoint, tmp_path, name):
    scorer_files.write_hps(tmp_path, "wider-hps", embed_dim=24)
    reward = HPSv2(str(hps_checkpoint[0]), model=name)
    with pytest.raises(
        RuntimeError, match=r"^Cannot load .*\.pt: .* Set HPSv2\.checkpoint and HPSv2\.model to"
    ) as caught:
        reward.load()
    assert "\n" not in str(caught.value)
