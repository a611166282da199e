"""Behaviour of every reward that runs a checkpoint."""

import pickle
import shutil
import warnings

import clip_pixels
import pytest
import torch
from support.pretended_gpu import pretended_gpu

from lit_vgrpo.rewards import AestheticScore, CLIPScore, HPSv2, ImageReward, PickScore, PythonReward, Weighted
from lit_vgrpo.system.hub import LoadError

PROMPTS = ["a red cat", "a dog", "a red cat", "the long way " * 40, "a dog"]
ALL = [PickScore, CLIPScore, HPSv2, ImageReward, AestheticScore]
WITH_HEAD = [ImageReward, AestheticScore]


@pytest.fixture(scope="session")
def images():
    return torch.stack([clip_pixels.photo(52, 44, seed) for seed in range(5)])


@pytest.mark.parametrize("kind", ALL)
def test_neither_batch_size_nor_neighbours_matter(tiny_reward, images, kind):
    assert tiny_reward(kind).check() == []
    scores = tiny_reward(kind, batch_size=2)(images, PROMPTS, [{}] * 5)
    assert scores.shape == (5,)
    assert scores.dtype == torch.float32
    assert scores.std() > 1e-3
    reward = tiny_reward(kind)
    together = reward(images, PROMPTS, [{}] * 5)
    torch.testing.assert_close(scores, together, atol=1e-4, rtol=1e-5)
    alone = torch.cat([reward(images[i : i + 1], PROMPTS[i : i + 1], [{}]) for i in range(5)])
    assert torch.equal(alone, together)
    assert torch.equal(reward(images.flip(0), PROMPTS[::-1], [{}] * 5).flip(0), together)
    assert reward(images[:0], [], []).shape == (0,)


LIMITS = {PickScore: 24, CLIPScore: 24, HPSv2: 12, ImageReward: 35}


@pytest.mark.parametrize("kind", ALL)
def test_prompts_that_are_truncated_are_named_once_and_before_weights_are_loaded(tiny_reward, images, kind):
    rows, limit = [{"prompt": prompt} for prompt in [*PROMPTS, "not scored by it " * 9]], LIMITS.get(kind)
    rows[-1]["rewards"] = "other"
    reward, other = tiny_reward(kind), PythonReward(lambda images, prompts: [0] * len(prompts), name="other")
    found = Weighted([reward, other]).truncations(rows)
    said = (
        f'Reward "{reward.name}": 1 of 3 prompts are longer than the {limit} tokens that it reads, and are truncated.'
    )
    assert [line[: len(said)] for line in found] == [said] * (limit is not None)
    assert reward._model is None
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        for one in (reward, tiny_reward(kind)):
            for _ in range(2):
                one(images, PROMPTS, [{}] * 5)
    assert sum(str(one.message).startswith(said) for one in shown) == (limit is not None)
    if limit is not None:
        longest, longer = ("a " * (limit - 2), "a " * (limit - 1))  # besides the first and the last token
        assert tiny_reward(kind).truncated([longest, longer]) == ([False, True], limit)


def test_a_tokenizer_that_cannot_be_read_is_left_to_loading(clip_folder, tmp_path):
    shutil.copytree(clip_folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "tokenizer.json").write_text("no tokenizer")
    reward = PickScore(str(tmp_path))
    assert reward.truncation(PROMPTS) is None
    with pytest.raises(LoadError, match="Cannot load"):
        reward.load()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ALL)
def test_pictures_are_resized_on_a_gpu_as_on_a_cpu(tiny_reward, images, kind):
    """Off the CPU torchvision would round other pixels than PIL does: these scores moved by 2e-3 to 7e-2."""
    expected = tiny_reward(kind)(images, PROMPTS, [{}] * 5)
    with pretended_gpu():
        found = tiny_reward(kind)(images.to("cuda"), PROMPTS, [{}] * 5)
        assert found.device.type == "cuda"
        torch.testing.assert_close(found.cpu(), expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("kind", [PickScore, CLIPScore, HPSv2, ImageReward])
def test_each_distinct_prompt_is_read_once(tiny_reward, images, kind, monkeypatch):
    reward, read = tiny_reward(kind, batch_size=2), []
    reward.load()
    before = reward._read
    monkeypatch.setattr(reward, "_read", lambda prompts: read.extend(prompts) or before(prompts))
    reward(images, PROMPTS, [{}] * 5)
    assert read == list(dict.fromkeys(PROMPTS))


@pytest.mark.parametrize("kind", ALL)
def test_bfloat16_weights_give_float32_scores_nearby(tiny_reward, images, kind):
    exact = tiny_reward(kind)(images, PROMPTS, [{}] * 5)
    half = tiny_reward(kind, dtype="bfloat16")
    scores = half(images, PROMPTS, [{}] * 5)
    dtypes = {name.startswith("head."): weight.dtype for name, weight in half._model.named_parameters()}
    assert dtypes == {False: torch.bfloat16, **({True: torch.float32} if kind in WITH_HEAD else {})}
    assert scores.dtype == torch.float32
    assert not torch.equal(scores, exact)
    tolerance = {CLIPScore: 3.0, ImageReward: 0.1, AestheticScore: 0.05}.get(kind, 0.1)
    torch.testing.assert_close(scores, exact, atol=tolerance, rtol=0)


@pytest.mark.parametrize("kind", ALL)
def test_the_model_is_frozen_and_loaded_once(tiny_reward, images, kind):
    reward = tiny_reward(kind)
    reward.load()
    model = reward._model
    assert not any(module.training for module in model.modules())
    assert not any(weight.requires_grad for weight in model.parameters())
    assert not reward(images.clone().requires_grad_(), PROMPTS, [{}] * 5).requires_grad
    assert reward._model is model


def test_an_unknown_device_is_an_error():
    assert PickScore(device="gpu").check()[0].startswith("PickScore.device=gpu: Expected one of cpu, cuda")


@pytest.mark.parametrize("kind", ALL)
def test_a_published_name_that_cannot_be_reached_is_said_in_one_line(kind, monkeypatch, tmp_path):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    errors = kind().check()
    assert any(error.startswith(f"Cannot load {kind().checkpoint}: not in the local cache") for error in errors)
    assert not any("\n" in error for error in errors)


@pytest.mark.parametrize("kind", ALL)
def test_a_missing_folder_or_file_is_an_error(tiny_reward, kind, tmp_path):
    for missing in ("no", "no.pt"):
        path = tmp_path / missing
        errors = tiny_reward(kind, checkpoint=str(path)).check()
        assert errors[0].startswith(f"{path} is not a folder. Set {kind.__name__}.checkpoint to")
        with pytest.raises(RuntimeError, match="is not a folder"):
            tiny_reward(kind, checkpoint=str(path)).load()


@pytest.mark.parametrize("kind", [PickScore, CLIPScore, AestheticScore])
def test_a_clip_folder_that_lacks_a_weight_is_one_line(tiny_reward, kind, clip_folder, tmp_path):
    from safetensors.torch import load_file, save_file

    folder = shutil.copytree(clip_folder, tmp_path / "clip")
    weights = load_file(folder / "model.safetensors")
    del weights["visual_projection.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    argument = "clip" if kind is AestheticScore else "checkpoint"
    said = rf"^Cannot load .*: 1 weight missing, such as visual_projection\.weight\. Set {kind.__name__}\.{argument} to"
    with pytest.raises(RuntimeError, match=said):
        tiny_reward(kind, **{argument: str(folder)}).load()


def changed(folder, to, name, without=None, extra=None):
    """A copy of a folder with one tensor less or more in a file."""
    from safetensors.torch import load_file, save_file

    file, is_safe = shutil.copytree(folder, to) / name, name.endswith(".safetensors")
    weights = load_file(file) if is_safe else torch.load(file)
    tensors = weights.get("state_dict", weights)
    if without is not None:
        del tensors[without]
    if extra is not None:
        tensors[extra] = torch.zeros(1)
    save_file(weights, file, metadata={"format": "pt"}) if is_safe else torch.save(weights, file)
    return to


TOO_FEW, TOO_MANY = {"without": "text_projection"}, {"extra": "more"}
BLIP = "blip.visual_encoder.norm.weight"
DIFFERENT = {
    "CLIP": (
        PickScore,
        "model.safetensors",
        {"extra": "text_model.more"},
        r"1 weight not read, such as text_model\.more",
    ),
    "BLIP lacks": (
        ImageReward,
        "ImageReward.pt",
        {"without": BLIP},
        r'Missing key.*: "vision\.post_layernorm\.weight"',
    ),
    "BLIP has more": (ImageReward, "ImageReward.pt", {"extra": BLIP[:-11] + "more"}, r'Unexpected key.*encoder\.more"'),
    "HPS lacks": (HPSv2, "HPS_v2.1_compressed.pt", TOO_FEW, r'Missing key.*: "text_projection"'),
    "HPS has more": (HPSv2, "HPS_v2.1_compressed.pt", TOO_MANY, r'Unexpected key.*: "more"'),
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_tensors_without_a_counterpart_are_one_line_from_check_and_load(tiny_reward, tmp_path, case):
    kind, file, change, message = DIFFERENT[case]
    folder = changed(tiny_reward(kind).checkpoint, tmp_path / "changed", file, **change)
    (error,) = tiny_reward(kind, checkpoint=str(folder)).check()
    with pytest.raises(
        RuntimeError, match=rf"^Cannot load \S+: .*{message}.* Set {kind.__name__}\.checkpoint "
    ) as caught:
        tiny_reward(kind, checkpoint=str(folder)).load()
    assert str(caught.value) == error


@pytest.mark.parametrize(
    ("kind", "option"), [(CLIPScore, "processor"), (ImageReward, "tokenizer"), (AestheticScore, "clip")]
)
def test_a_tokenizer_without_its_words_is_one_line(
    tiny_reward, tmp_path, clip_folder, image_reward_folder, kind, option
):
    folder = shutil.copytree(image_reward_folder if kind is ImageReward else clip_folder, tmp_path / "changed")
    for name in ("tokenizer.json", "vocab.json", "merges.txt"):
        (folder / name).unlink(missing_ok=True)
    reward = tiny_reward(kind, **{option: str(folder)})
    said = (
        rf"^Cannot load \S+: its tokenizer has \d tokens, but its encoder \d+. Set {kind.__name__}.{option} to a folder"
    )
    for call in (reward.check, reward.load):
        with pytest.raises(RuntimeError, match=said):
            raise RuntimeError(*call())


class Trap:
    """Runs when it is unpickled."""

    def __reduce__(self):
        return (exec, ("import pathlib; pathlib.Path('trapped').touch()",))


@pytest.mark.parametrize("kind", [HPSv2, ImageReward])
@pytest.mark.parametrize("content", ["noise", "trap", "trap in zip", "numbers", "safetensors"])
def test_a_file_without_weights_is_one_line_and_runs_nothing(tiny_reward, kind, content, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / ("bad.safetensors" if content == "safetensors" else "bad.pt")
    if content == "trap in zip":
        torch.save({"state_dict": Trap()}, path)
    elif content == "numbers":
        torch.save({"epoch": 3}, path)
    else:
        trap = pickle.dumps(Trap(), protocol=2)
        path.write_bytes(trap if content == "trap" else b"noise" * 99)
    with pytest.raises(RuntimeError, match=rf"^Cannot load .*bad\.\w+: .* Set {kind.__name__}\.checkpoint ") as caught:
        tiny_reward(kind, checkpoint=str(path)).load()
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "trapped").exists()
