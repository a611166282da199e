import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from lit_vgrpo.rewards import PickScore, Weighted

PROMPTS = ["a red cat", "ein blauer Bär, 猫", "a red cat", "x " * 200]


@pytest.fixture
def images():
    generator = torch.Generator().manual_seed(0)
    coarse = torch.rand(4, 3, 6, 5, generator=generator)
    return torch.nn.functional.interpolate(coarse, (48, 40), mode="bilinear").clamp(0, 1)


@pytest.fixture
def reward(clip_folder):
    return PickScore(str(clip_folder), batch_size=3)


@torch.no_grad()
def plain_score(folder, image, prompt):
    """The published arithmetic on one picture, with PIL's resize and numpy instead of the processor."""
    from transformers import AutoTokenizer, CLIPModel

    picture = Image.fromarray((image.permute(1, 2, 0).numpy() * 255).round().astype(np.uint8))
    width, height = picture.size
    scale = 32 / min(width, height)
    picture = picture.resize((int(width * scale), int(height * scale)), Image.Resampling.BICUBIC)
    left, top = (picture.width - 32) // 2, (picture.height - 32) // 2
    pixels = np.asarray(picture.crop((left, top, left + 32, top + 32))) / 255
    mean, std = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
    pixel_values = torch.from_numpy((pixels - mean) / std).permute(2, 0, 1)[None].double()

    model = CLIPModel.from_pretrained(folder).double().eval()
    ids = AutoTokenizer.from_pretrained(folder)(prompt)["input_ids"]
    ids = ids if len(ids) <= 24 else [*ids[:23], ids[-1]]
    a = model.visual_projection(model.vision_model(pixel_values).pooler_output)[0]
    b = model.text_projection(model.text_model(torch.tensor([ids])).pooler_output)[0]
    return float(model.logit_scale.exp() * (a @ b) / (a.norm() * b.norm()) / 26)


def test_scores_are_the_published_arithmetic(clip_folder, reward, images):
    scores = reward(images, PROMPTS, [{}] * 4)
    assert scores.shape == (4,)
    assert scores.dtype == torch.float32
    expected = torch.tensor([plain_score(clip_folder, i, p) for i, p in zip(images, PROMPTS, strict=True)])
    assert expected.std() > 0.02  # else nothing is compared
    # torchvision's and PIL's bicubic differ by up to one step of 255: 4e-5 was seen
    torch.testing.assert_close(scores, expected, atol=2e-4, rtol=0)


def test_a_score_depends_on_neither_batch_nor_neighbours(reward, images):
    together = reward(images, PROMPTS, [{}] * 4)
    alone = [reward(images[i : i + 1], PROMPTS[i : i + 1], [{}]) for i in range(4)]
    torch.testing.assert_close(together, torch.cat(alone), atol=1e-6, rtol=1e-5)


def test_prompt_and_picture_both_matter(reward, images):
    scores = reward(images[[0, 0, 1]], ["a cat", "a dog", "a cat"], [{}] * 3)
    assert len(set(scores.tolist())) == 3


def test_images_are_rounded_to_uint8(reward, images):
    rounded = (images * 255).round() / 255
    nudged = rounded + 0.4 / 255 * torch.sign(0.5 - rounded)
    assert torch.equal(reward(nudged, PROMPTS, [{}] * 4), reward(rounded, PROMPTS, [{}] * 4))


def test_the_model_is_frozen_and_loaded_once(reward, images):
    reward.load()
    model = reward._model
    assert not model.training
    assert not any(weight.requires_grad for weight in model.parameters())
    scores = reward(images.requires_grad_(), PROMPTS, [{}] * 4)
    assert not scores.requires_grad
    assert reward._model is model


def test_bfloat16_weights_still_give_float32_scores(clip_folder, reward, images):
    half = PickScore(str(clip_folder), dtype="bfloat16")(images, PROMPTS, [{}] * 4)
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, reward(images, PROMPTS, [{}] * 4), atol=0.1, rtol=0)


def test_it_counts_as_a_part(reward, images):
    batch = Weighted([reward]).score(images, PROMPTS, [{}] * 4)
    assert batch.ok.all()
    torch.testing.assert_close(batch.parts["pickscore"], reward(images, PROMPTS, [{}] * 4))


def test_building_one_loads_nothing():
    code = "import sys; from lit_vgrpo.rewards import PickScore; PickScore(); print('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


def test_the_published_processor_belongs_to_the_published_weights():
    assert PickScore().processor == "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
    assert PickScore("some/where").processor == "some/where"
    assert PickScore("some/where", processor="else/where").processor == "else/where"


def test_a_whole_folder_has_no_fault(reward):
    assert reward.check() == []


def test_a_missing_folder_is_a_fault(tmp_path):
    faults = PickScore(str(tmp_path / "no")).check()
    assert faults == [
        f"{tmp_path / 'no'} is not a folder. Set PickScore.checkpoint to a folder that holds config.json, "
        "or to a hub name."
    ]


def test_a_folder_without_config_is_a_fault(tmp_path, clip_folder):
    (fault,) = PickScore(str(tmp_path), processor=str(clip_folder)).check()
    assert "holds no config.json" in fault


@pytest.mark.parametrize(
    ("config", "said"),
    [('{"model_type": "siglip"}', "'siglip', not 'clip'"), ("[]", "None, not 'clip'"), ("{", "is not JSON")],
)
def test_a_model_of_another_family_is_a_fault(tmp_path, clip_folder, config, said):
    (tmp_path / "config.json").write_text(config)
    (fault,) = PickScore(str(tmp_path), processor=str(clip_folder)).check()
    assert said in fault
    assert "\n" not in fault
    with pytest.raises(RuntimeError, match=r"config\.json|type"):
        PickScore(str(tmp_path), processor=str(clip_folder)).load()


def test_a_folder_without_weights_is_one_line(tmp_path, clip_folder):
    broken = tmp_path / "broken"
    shutil.copytree(clip_folder, broken)
    (broken / "model.safetensors").unlink()
    with pytest.raises(RuntimeError, match=r"^Cannot load .*broken: .* Set PickScore\.checkpoint to") as caught:
        PickScore(str(broken)).load()
    assert "\n" not in str(caught.value)


def test_a_folder_without_tokenizer_is_a_fault_of_the_processor(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "clip"}))
    (fault,) = PickScore(str(tmp_path)).check()
    assert "PickScore.processor" in fault


@pytest.mark.parametrize(
    ("arguments", "said"),
    [({"batch_size": 0}, "batch_size=0"), ({"dtype": "int8"}, "dtype='int8'")],
)
def test_wrong_arguments_are_refused(arguments, said):
    with pytest.raises(ValueError, match=said):
        PickScore(**arguments)
