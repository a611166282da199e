"""Behaviour of every reward that runs a checkpoint."""

import json
import pickle
import shutil
import warnings
from importlib import import_module

import clip_pixels
import pytest
import scorer_files
import torch
from fake_hub import FakeHub, Pages
from support.pretended_gpu import pretended_gpu

from lit_vgrpo.rewards import AestheticScore, CLIPScore, HPSv2, ImageReward, PickScore, PythonReward, Weighted, judges
from lit_vgrpo.rewards.model import weights_file
from lit_vgrpo.system import hub
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


@pytest.mark.parametrize("kind", [PickScore, HPSv2, ImageReward])
def test_a_long_prompt_is_cut_and_keeps_its_end(tiny_reward, images, kind):
    words = LIMITS[kind] - 2
    prompts = ["a " * words, "a " * words + "b b", "a " * (words - 1) + "b b"]
    scores = tiny_reward(kind)(images[:1].expand(3, -1, -1, -1), prompts, [{}] * 3)
    assert scores[0] == scores[1] != scores[2]


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


@pytest.mark.slow
@pytest.mark.parametrize("kind", [PickScore, HPSv2, ImageReward, AestheticScore])
def test_sixteen_bits_keep_the_order_of_images(tiny_reward, kind):
    """Spearman's correlation over 512 images of one prompt was .9992 to .9999 in bfloat16, .9999 in float16."""
    coarse = torch.rand(512, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    pictures = torch.nn.functional.interpolate(coarse, (64, 64), mode="bilinear")
    ranks = torch.stack([
        tiny_reward(kind, batch_size=64, dtype=dtype)(pictures, PROMPTS[:1] * 512, [{}] * 512).argsort().argsort()
        for dtype in ("float32", "bfloat16", "float16")
    ])  # fmt: skip
    _, bfloat16, float16 = torch.corrcoef(ranks.double())[0].tolist()
    assert bfloat16 >= 0.999
    assert float16 >= 0.9999


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


CLIP, BLIP, HPS = "model.safetensors", "ImageReward.pt", "HPS_v2.1_compressed.pt"
NORM, PROJECTION = "blip.visual_encoder.norm.weight", "visual_projection.weight"
DIFFERENT = [
    *(
        (kind, option, CLIP, {"without": PROJECTION}, r"1 weight missing, such as visual_projection\.weight\.")
        for kind, option in ((PickScore, "checkpoint"), (CLIPScore, "checkpoint"), (AestheticScore, "clip"))
    ),
    (PickScore, "checkpoint", CLIP, {"extra": "text_model.more"}, r"1 weight not read, such as text_model\.more"),
    (ImageReward, "checkpoint", BLIP, {"without": NORM}, r'Missing key.*: "vision\.post_layernorm\.weight"'),
    (ImageReward, "checkpoint", BLIP, {"extra": NORM[:-11] + "more"}, r'Unexpected key.*encoder\.more"'),
    (HPSv2, "checkpoint", HPS, {"without": "text_projection"}, r'Missing key.*: "text_projection"'),
    (HPSv2, "checkpoint", HPS, {"extra": "more"}, r'Unexpected key.*: "more"'),
]


@pytest.mark.parametrize(("kind", "option", "file", "change", "message"), DIFFERENT)
def test_tensors_without_a_counterpart_are_one_line_from_check_and_load(
    tiny_reward, tmp_path, kind, option, file, change, message
):
    folder = scorer_files.changed(getattr(tiny_reward(kind), option), tmp_path / "changed", file, **change)
    broken = tiny_reward(kind, **{option: str(folder)})
    said = rf"^Cannot load \S+: .*{message}.* Set {kind.__name__}\.{option} "
    with pytest.raises(RuntimeError, match=said) as caught:
        broken.load()
    assert broken.check() == [str(caught.value)]


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
    said = rf"^Cannot load \S+: its tokenizer has \d tokens, but its encoder \d+. Set {kind.__name__}.{option} to a"
    for call in (reward.check, reward.load):
        with pytest.raises(RuntimeError, match=said):
            raise RuntimeError(*call())


class Trap:
    """Runs when it is unpickled."""

    def __reduce__(self):
        return (exec, ("import pathlib; pathlib.Path('trapped').touch()",))


@pytest.mark.parametrize("kind", [HPSv2, ImageReward])
@pytest.mark.parametrize("content", ["noise", "trap", "trap in zip", "numbers", "safetensors"])
def test_a_file_without_weights_is_one_line_and_runs_nothing(tiny_reward, kind, content, here):
    path = here / ("bad.safetensors" if content == "safetensors" else "bad.pt")
    if content == "trap in zip":
        torch.save({"state_dict": Trap()}, path)
    elif content == "numbers":
        torch.save({"epoch": 3}, path)
    else:
        trap = pickle.dumps(Trap(), protocol=2)
        path.write_bytes(trap if content == "trap" else b"noise" * 99)
    with pytest.raises(RuntimeError, match=rf"^Cannot load .*bad\.\w+: .* Set {kind.__name__}\.checkpoint .*$"):
        tiny_reward(kind, checkpoint=str(path)).load()
    assert not (here / "trapped").exists()


def test_a_clip_score_is_never_negative(tiny_reward):
    images = torch.stack([clip_pixels.photo(40, 40, seed) for seed in range(12)])
    scores = tiny_reward(CLIPScore)(images, [f"{letter} cat" for letter in "abcdefghijkl"], [{}] * 12)
    assert scores.min() == 0
    assert 0 < scores.max() <= 100


def test_the_published_processor_belongs_to_the_published_weights():
    assert PickScore().processor == "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
    assert PickScore("some/where").processor == "some/where"
    assert PickScore("some/where", processor="else/where").processor == "else/where"
    assert (CLIPScore().checkpoint, CLIPScore().processor) == ("openai/clip-vit-large-patch14",) * 2


def test_the_aesthetic_score_keeps_no_text_tower(tiny_reward):
    reward = tiny_reward(AestheticScore)
    reward.load()
    assert not any("text" in name for name, _ in reward._model.named_parameters())


def test_files_that_do_not_fit_are_one_line(tmp_path, clip_folder, aesthetic_file):
    clip, head = str(clip_folder), tmp_path / "head.pth"
    torch.save(scorer_files.head_weights(8, torch.Generator()), head)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "siglip"}))
    without_weights = shutil.copytree(clip_folder, tmp_path / "broken")
    (without_weights / "model.safetensors").unlink()
    for reward, said in [
        (AestheticScore(str(head), clip=clip), r"AestheticScore\.checkpoint and AestheticScore\.clip to a match"),
        (PickScore(str(tmp_path), processor=clip), r"PickScore\.checkpoint to"),
        (PickScore(str(without_weights)), r"PickScore\.checkpoint to"),
    ]:
        with pytest.raises(RuntimeError, match=rf"^Cannot load .*: .* Set {said}.*$"):
            reward.load()
    assert "PickScore.processor" in PickScore(str(tmp_path)).check()[0]
    assert "Set AestheticScore.clip to" in AestheticScore(str(aesthetic_file), clip=str(tmp_path / "no")).check()[0]


def test_the_file_itself_and_safetensors_are_read_too(hps_checkpoint, tiny_reward, images, tmp_path):
    from safetensors.torch import save_file

    folder, name = hps_checkpoint
    path = folder / "HPS_v2.1_compressed.pt"
    save_file(torch.load(path)["state_dict"], tmp_path / "hps.safetensors")
    batch = (images[:1], ["a cat"], [{}])
    for other in (path, tmp_path / "hps.safetensors"):
        assert torch.equal(HPSv2(str(other), model=name)(*batch), tiny_reward(HPSv2)(*batch))


@pytest.mark.parametrize("name", ["no-such-model", "wider-hps"])
def test_another_architecture_is_one_line(hps_checkpoint, tmp_path, name):
    scorer_files.write_hps(tmp_path, "wider-hps", embed_dim=24)
    reward = HPSv2(str(hps_checkpoint[0]), model=name)
    with pytest.raises(RuntimeError, match=r"^Cannot load .*\.pt: .* Set HPSv2\.checkpoint and HPSv2\.model to.*$"):
        reward.load()


def test_blips_own_tokens_follow_berts(tiny_reward):
    reward = tiny_reward(ImageReward)
    reward.load()
    assert reward._tokenizer.convert_tokens_to_ids(["[DEC]", "[ENC]"]) == [57, 58]


@pytest.mark.parametrize("asks", ["file", "judge"])
def test_a_hub_that_never_answers_costs_no_reward_minutes(tmp_path, monkeypatch, asks):
    monkeypatch.setattr(Pages, "route", lambda page, pages: page.server.owner.closing.wait(60))
    monkeypatch.setattr(hub, "HUB_TIMEOUT_S", 0.2)
    import_module("huggingface_hub.constants")  # otherwise imported when it is first used
    monkeypatch.setattr(judges, "_deqa", lambda judge: None)
    with FakeHub() as server:
        server.use(monkeypatch, tmp_path)
        with pytest.warns(UserWarning, match="did not answer within"):
            if asks == "judge":
                judges.PackagedJudge("DeQA").load()
            else:
                with pytest.raises(OSError, match="cache"):
                    weights_file("owner/scorer", "head.pth")
