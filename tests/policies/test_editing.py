"""Policies that edit pictures, beyond the contract: what they refuse, and what the embedding cache tells apart."""

import json
from dataclasses import replace

import pytest
import torch
from helpers import make_data, make_module, make_trainer, repeating
from PIL import Image
from policies.contract import HEIGHT, NEGATIVE, PROMPTS, WIDTH, encoded, pictures, same_image_as_the_pipeline
from policies.families import SLOW
from rollouts import roll_out

from lit_vgrpo.apps.memory.estimate import Pass, encoding_peak, peak_of_pass
from lit_vgrpo.callbacks import Report, RewardLogger, SampleGrid
from lit_vgrpo.core.snapshots import trainable_parameters
from lit_vgrpo.core.types import RolloutRequest, RolloutSpec
from lit_vgrpo.launch.checks import picture_errors
from lit_vgrpo.policies import Flux2DevEditPolicy, Flux2EditPolicy, KontextPolicy, QwenImageEditPolicy, SD3Policy
from lit_vgrpo.policies.embeddings import encoder_fingerprint
from lit_vgrpo.policies.meta import policy_on_meta
from lit_vgrpo.training.memory_passes import LiveMemory

EDITORS = ("kontext", *SLOW)


@pytest.fixture(params=repeating(EDITORS, slow=SLOW))
def editor(request, families):
    return families(request.param)


def test_the_cache_tells_pictures_apart(editor, tmp_path):
    policy = editor.load(embedding_cache=str(tmp_path))
    first, other = pictures(policy, PROMPTS[:2])
    changed = first.clone()
    changed[0, 0, 0] ^= 1
    policy.encode([PROMPTS[0]] * 3, [first, other, first])
    assert len(list(tmp_path.glob("*.row"))) == 2
    policy.encode([PROMPTS[0]], [changed])
    assert len(list(tmp_path.glob("*.row"))) == 3
    again = editor.load(embedding_cache=str(tmp_path)).encode([PROMPTS[0]], [first])
    fresh = editor.shared.encode([PROMPTS[0]], [first])
    for name, value in fresh.tensors.items():
        assert torch.equal(again.tensors[name], value), name


def test_pictures_are_for_families_that_edit(editor, families):
    with pytest.raises(ValueError, match="needs an image in each row"):
        editor.shared.encode(PROMPTS[:1])
    with pytest.raises(ValueError, match="FluxPolicy takes no image"):
        families("flux").shared.encode(PROMPTS[:1], [torch.zeros(3, 8, 8, dtype=torch.uint8)])
    with pytest.raises(ValueError, match=r'The picture of ".*" has 8 x 16 pixels .*, but the images have'):
        editor.shared.encode(PROMPTS[:1], [torch.zeros(3, 8, 16, dtype=torch.uint8)])


def test_rows_are_checked_before_weights_are_read(tmp_path):
    Image.new("RGB", (WIDTH, 8)).save(tmp_path / "flat.png")
    edit, plain = {"prompt": "red", "image": str(tmp_path / "flat.png")}, {"prompt": "a cat"}
    kontext, sd3 = KontextPolicy("nowhere", height=HEIGHT, width=WIDTH), SD3Policy("nowhere")
    (missing,) = picture_errors(kontext, [plain])
    assert missing.startswith('KontextPolicy edits pictures, but row 1 of the prompts, "a cat", has none.')
    (unused,) = picture_errors(sd3, [plain, edit])
    assert unused.startswith('SD3Policy cannot edit pictures, but row 2 of the prompts, "red", has the field image.')
    (size,) = picture_errors(kontext, [edit])
    assert f'flat.png, of row 1 of the prompts, "red", has 8 x {WIDTH} pixels' in size
    assert picture_errors(sd3, [plain]) == []


def test_the_number_of_pictures_is_checked_before_weights_are_read(tmp_path):
    Image.new("RGB", (32, 32)).save(tmp_path / "a.png")
    one, two = ({"prompt": "red", "image": [str(tmp_path / "a.png")] * number} for number in (1, 2))
    assert picture_errors(QwenImageEditPolicy("nowhere", references=2, height=32, width=32), [two, two]) == []
    (fewer,) = picture_errors(Flux2EditPolicy("nowhere", references=2), [two, one])
    assert fewer.startswith('Flux2EditPolicy edits 2 pictures per prompt, but row 2 of the prompts, "red", has 1. ')
    assert "Give every row the same number, and set model.policy.references of" in fewer
    (more,) = picture_errors(KontextPolicy("nowhere"), [two])
    assert more.startswith('KontextPolicy edits 1 picture per prompt, but row 1 of the prompts, "red", has 2. ')
    for family, most in ((QwenImageEditPolicy, 3), (Flux2EditPolicy, 4), (Flux2DevEditPolicy, 6)):
        with pytest.raises(ValueError, match=f"references={most + 1}: .* {most}"):
            family("nowhere", references=most + 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_several_pictures_give_the_pipelines_image(families, name):
    single = families(name)
    longer = {"max_sequence_length": 96} if name == "qwen_image_edit" else {}  # its encoder reads the pictures
    family = replace(single, options={**single.options, "references": 2, **longer})
    same_image_as_the_pipeline(family, "euler", 3.0)
    policy = family.shared
    swapped = [picture.flip(0) for picture in pictures(policy, PROMPTS[:1])]
    z, t = torch.randn(1, *policy.latent_shape), torch.tensor([0.5])
    conditionings = encoded(policy, PROMPTS[:1]), policy.encode(PROMPTS[:1], swapped)
    with torch.no_grad():
        first, other = (policy(z, t, cond) for cond in conditionings)
    assert (first - other).abs().max() > 1e-5  # their order counts


@pytest.mark.slow
def test_a_run_edits_several_pictures(families, tmp_path):
    """They reach the rewards, the log, the sample grid and the report."""
    family, rows = families("flux2_edit"), []
    height, width = family.size
    for number in range(4):
        names = [f"{number}{name}.png" for name in "ab"]
        for shade, name in enumerate(names):
            Image.new("RGB", (width, height), (60 * number, 100 * shade, 50)).save(tmp_path / name)
        rows.append({"prompt": "join them", "image": names})
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))

    def likeness(images, prompts, references):
        assert references.shape == (len(images), 2, 3, height, width)
        return -(images[:, None] - references).abs().mean((1, 2, 3, 4))

    policy = family.policy_class(str(family.folder), **family.all_options({"references": 2, "lora_rank": 2}))
    module = make_module(None, policy=policy, reward=likeness)
    data = make_data(train=str(tmp_path / "rows.jsonl"), heldout=str(tmp_path / "rows.jsonl"))
    callbacks = [RewardLogger(), SampleGrid(num_prompts=2, images_per_prompt=1), Report()]
    trainer = make_trainer(tmp_path, 1, callbacks)
    trainer.fit(module, datamodule=data)
    assert 0 < trainer.callback_metrics["edit/similarity_to_reference"] < 1
    layout = json.loads(Image.open(tmp_path / "samples" / "after.png").info["layout"])
    assert len(layout["left"]) == 4  # the reference, the image and both pictures
    (edited, *_) = sorted((tmp_path / "report").glob("*_edited.png"))
    assert Image.open(edited).size == (2 * width, height)


def test_a_group_edits_its_own_picture(editor, tmp_path):
    """A rollout's images depend on their group's picture, in any micro-batch."""
    policy, rows = editor.shared, []
    for number, picture in enumerate(pictures(policy, PROMPTS[:2])):
        file = tmp_path / f"{number}.png"
        Image.fromarray(picture.permute(1, 2, 0).numpy()).save(file)
        rows.append({"prompt": "a red circle", "image": str(file)})

    def drawn(own, slots, batch_size):
        request = RolloutRequest(["a red circle"] * len(own), own, slots, group_size=2, batch_size=batch_size)
        return roll_out(policy, request, RolloutSpec(steps=2))

    both, swapped = drawn(rows, [0, 1], 1), drawn(rows[::-1], [0, 1], 1)
    assert torch.equal(drawn(rows[1:], [1], 1).latents, both.latents[2:])
    assert (swapped.latents - both.latents).abs().amax(dim=(1, 2, 3)).min() > 1e-5
    assert (both.conditioning.tensors["reference_latents"][0] - both.conditioning.tensors["reference_latents"][1]).any()


@pytest.mark.slow
def test_the_memory_estimate_counts_the_picture(editor):
    """Its tokens in a training pass, and what the encoders take for it."""
    options = {**editor.options, "height": 64, "width": 64, "lora_rank": 2}
    twin = policy_on_meta(editor.policy_class(str(editor.folder), **options), "cpu")
    policy = editor.policy_class(str(editor.folder), **options).load()
    for weight in trainable_parameters(policy).values():
        weight.grad = torch.zeros_like(weight)
    with LiveMemory() as of_encoders:
        cond = policy.encode(["a"], policy.blank_references(1))
    with LiveMemory() as of_pass:
        z, rows = torch.randn(2, *policy.latent_shape), torch.zeros(2, dtype=torch.int64)
        policy(z, torch.rand(2), cond.select(rows)).sum().backward()
    assert peak_of_pass(twin, Pass(2, 1.0, True)) == pytest.approx(of_pass.peak, rel=0.05)
    assert encoding_peak(twin, 1) == pytest.approx(of_encoders.peak, rel=0.05)  # though a pass has encoded a prompt


@pytest.mark.slow
def test_a_negative_prompt_is_read_with_its_picture(families, tmp_path):
    """Beside a cache that holds the rows of another negative prompt."""
    family = families("qwen_image_edit")
    policies = [family.load(embedding_cache=str(tmp_path), negative_prompt=text) for text in ("", NEGATIVE)]
    given = [PROMPTS[0]] * 2, pictures(policies[0], PROMPTS[:2])
    empty, negative = (policy.encode(*given) for policy in policies)
    embedded, other = (cond.tensors["reference_negative"] for cond in (empty, negative))
    assert (embedded[0] - embedded[1]).abs().max() > 1e-2
    assert (embedded[0] - other[0]).abs().max() > 1e-2
    assert torch.equal(empty.tensors["tokens"], negative.tensors["tokens"])

    before = encoder_fingerprint(policies[0])
    policies[0].pipeline.vae.enable_tiling()  # it encodes pictures in tiles too
    assert encoder_fingerprint(policies[0]) != before
    before = encoder_fingerprint(policies[0])
    policies[0].pipeline.processor.image_processor.image_mean = [0.0, 0.0, 0.0]
    assert encoder_fingerprint(policies[0]) != before
