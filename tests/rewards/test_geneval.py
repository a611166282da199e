import math
import shutil

import clip_pixels
import numpy as np
import pytest
import torch
from geneval_models import HEIGHT, NAMES, SCENES, WIDTH, pictures, save_detector, save_segmenter
from PIL import Image
from scorer_files import changed

from lit_vgrpo.rewards.geneval import GenEval, ObjectDetector, object_crop
from lit_vgrpo.rewards.geneval_rules import COLORS, Detection
from lit_vgrpo.system.hub import LoadError

PAIR, SWAPPED, THREE, TWO, TRAFFIC, MOUSE, EMPTY = range(len(SCENES))
CLOCKS = {"tag": "counting", "include": [{"class": "clock", "count": 3}], "exclude": [{"class": "clock", "count": 4}]}
LEFT = {
    "tag": "position",
    "include": [{"class": "cat", "count": 1}, {"class": "dog", "count": 1, "position": ["left of", 0]}],
}


@pytest.fixture(scope="session")
def detector_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("yolos")
    save_detector(folder)
    return folder


@pytest.fixture(scope="session")
def segmenter_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mask2former")
    save_segmenter(folder)
    return folder


@pytest.fixture(scope="module")
def reward(detector_folder, clip_folder):
    return GenEval(str(detector_folder), str(clip_folder), batch_size=3)


def scores(reward, scenes, rows):
    rows = rows if isinstance(rows, list) else [rows] * len(scenes)
    return reward(pictures()[scenes], ["a photo"] * len(rows), rows).tolist()


def test_a_detector_without_a_tensor_is_one_line_from_check_and_load(segmenter_folder, clip_folder, tmp_path):
    folder = changed(segmenter_folder, tmp_path / "changed", "model.safetensors", without="class_predictor.bias")
    reward = GenEval(str(folder), str(clip_folder))
    said = r"/changed: 1 weight missing, such as class_predictor\.bias\. Set GenEval\.detector"
    for call in (reward.check, reward.load):
        with pytest.raises(LoadError, match=said):
            raise LoadError(*call())


def test_the_objects_of_every_picture_are_found_where_they_are(detector_folder):
    found = ObjectDetector(str(detector_folder), "float32", "x").find((pictures() * 255).byte(), 0.3)
    for detections, scene in zip(found, SCENES, strict=True):
        assert [detection.label for detection in detections] == [
            "computer mouse" if label == "mouse" else label for label, *_ in scene
        ]
        for detection, (_, *box) in zip(detections, scene, strict=True):
            assert detection.box == pytest.approx(box, abs=0.5)
            assert detection.score > 0.95
            assert detection.mask is None


def test_pictures_are_judged_by_what_is_found(reward):
    two = {"tag": "two_object", "include": [{"class": "dog", "count": 1}, {"class": "cat", "count": 1}]}
    mouse = {"tag": "single_object", "include": [{"class": "computer mouse", "count": 1}]}
    assert scores(reward, [PAIR, SWAPPED, THREE, EMPTY], two) == [1, 1, 0, 0]
    assert scores(reward, [MOUSE, PAIR], mouse) == [1, 0]
    assert scores(reward, [THREE, TWO, EMPTY], CLOCKS) == pytest.approx([1, 2 / 3, 0])
    assert scores(reward, [SWAPPED, PAIR], LEFT) == pytest.approx([1, 2 / 3])
    strict = GenEval(reward.detector, reward.clip, score="strict")
    assert scores(strict, [THREE, TWO, EMPTY], CLOCKS) == [1, 0, 0]


@torch.no_grad()
def plain_color(folder, crop, label):
    """Zero-shot classification written out, in float64 and with numpy in place of the processor."""
    from transformers import AutoTokenizer, CLIPModel

    def unit(vectors):
        return vectors / vectors.norm(dim=-1, keepdim=True)

    model, tokenizer = CLIPModel.from_pretrained(folder).double().eval(), AutoTokenizer.from_pretrained(folder)
    directions, templates = [], ("a photo of a {} {}", "a photo of a {}-colored {}", "a photo of a {} object")
    for color in COLORS:
        ids = [tokenizer(template.format(color, label))["input_ids"] for template in templates]
        ids = [one if len(one) <= 24 else [*one[:23], one[-1]] for one in ids]
        embeds = [model.text_projection(model.text_model(torch.tensor([one])).pooler_output)[0] for one in ids]
        directions.append(unit(unit(torch.stack(embeds)).mean(0)))
    pixels = clip_pixels.cropped(torch.from_numpy(np.array(crop)).permute(2, 0, 1) / 255, 32)
    features = unit(model.visual_projection(model.vision_model(pixels).pooler_output)[0])
    return COLORS[int(torch.stack([features @ direction for direction in directions]).argmax())]


@pytest.mark.slow
def test_colours_are_zero_shot_classification(clip_folder, reward):
    reward.load()
    generator = np.random.default_rng(0)
    flat = [generator.integers(0, 256, 3) * np.ones((14, 20, 3)) for _ in range(10)]
    crops = [Image.fromarray(pixels.astype(np.uint8)) for pixels in flat]
    labels = [["car", "bus", "cat"][number % 3] for number in range(10)]
    with torch.no_grad():
        named = reward.colors(crops, labels)
    assert len(set(named)) > 2  # else nothing is compared
    assert named == [plain_color(clip_folder, crop, label) for crop, label in zip(crops, labels, strict=True)]


def test_a_picture_passes_with_the_colours_it_has(reward, clip_folder):
    picture = Image.fromarray((pictures()[TRAFFIC].permute(1, 2, 0) * 255).byte().numpy())
    car, bus = (plain_color(clip_folder, picture.crop(box), label) for label, *box in SCENES[TRAFFIC])
    other = next(color for color in COLORS if color not in (car, bus))

    def row(car_color, bus_color):
        include = [{"class": "car", "count": 1, "color": car_color}, {"class": "bus", "count": 1, "color": bus_color}]
        return {"tag": "color_attr", "include": include}

    rows = [row(other, other), row(car, other), row(car, bus)]  # six crops, two batches
    assert scores(reward, [TRAFFIC] * 3, rows) == [0.5, 0.75, 1]


def test_a_crop_holds_the_object_alone():
    picture = Image.new("RGB", (20, 10), (255, 0, 0))
    mask = np.zeros((10, 20), dtype=bool)
    mask[2:6, 4:8] = True
    crop = np.asarray(object_crop(picture, Detection("car", 0.9, (2.6, 2.0, 9.7, 8.0), mask)))
    assert crop.shape == (6, 7, 3)
    assert (crop[0:4, 1:5] == (255, 0, 0)).all()
    assert (crop[4:] == 0x99).all()
    assert (crop[:, 5:] == 0x99).all()
    assert (np.asarray(object_crop(picture, Detection("car", 0.9, (2, 2, 9, 8)))) == (255, 0, 0)).all()


@pytest.mark.parametrize(
    ("box", "size"), [((5.2, 5.2, 5.3, 5.3), (1, 1)), ((-4, -4, 30, 30), (20, 10)), ((-5, 2, -1, 4), (1, 2))]
)
def test_a_crop_is_never_empty_and_stays_in_the_picture(box, size):
    assert object_crop(Image.new("RGB", (20, 10)), Detection("car", 0.9, box)).size == size


def test_masks_give_boxes_scores_and_labels(segmenter_folder):
    from transformers.models.mask2former.modeling_mask2former import Mask2FormerForUniversalSegmentationOutput

    detector = ObjectDetector(str(segmenter_folder), "float32", "x")
    masks = torch.full((2, 3, HEIGHT, WIDTH), -20.0)
    masks[0, 0, 10:20, 30:50] = 20
    masks[0, 1, 0:48, 5:6] = 20
    masks[0, 2, 1:2, 1:2] = 20
    classes = torch.zeros(2, 3, len(NAMES) + 1)
    classes[0, 0, 5], classes[0, 1, 0] = 9, 4
    classes[0, 2, -1] = classes[1, :, -1] = 9
    outputs = Mask2FormerForUniversalSegmentationOutput(class_queries_logits=classes, masks_queries_logits=masks)
    (mouse, cat), nothing = detector._from_masks(outputs, 0.3, [(HEIGHT, WIDTH)] * 2)
    if mouse.label == "cat":
        mouse, cat = cat, mouse
    assert nothing == []
    assert (mouse.label, cat.label) == ("computer mouse", "cat")
    assert mouse.box == (30, 10, 50, 20)
    assert cat.box == (5, 0, 6, 48)
    assert cat.score == pytest.approx(math.exp(4) / (math.exp(4) + 6), abs=5e-3)  # less at the mask's edge
    assert mouse.mask.dtype == bool
    assert mouse.mask.shape == (HEIGHT, WIDTH)
    assert mouse.mask[11:19, 31:49].all()  # corners are rounded
    assert mouse.mask.sum() <= 200


def test_a_segmenter_scores_whole_pictures(segmenter_folder, clip_folder):
    reward = GenEval(str(segmenter_folder), str(clip_folder), counting_threshold=0.3, batch_size=4)
    reward.load()
    found = reward._objects.find((pictures() * 255).byte(), 0.3)
    expected = [max(0, 1 - abs(sum(d.label == "clock" for d in one) - 3) / 3) for one in found]
    assert len({round(score, 3) for score in expected}) > 1
    assert scores(reward, list(range(len(SCENES))), CLOCKS) == pytest.approx(expected)
    row = {"tag": "colors", "include": [{"class": "clock", "count": 1, "color": "red"}]}
    assert set(scores(reward, list(range(len(SCENES))), row)) <= {0, 0.5, 1}


def test_a_score_depends_on_neither_batch_nor_neighbours(detector_folder, clip_folder):
    reward = GenEval(str(detector_folder), str(clip_folder), counting_threshold=0.9999, batch_size=2)
    row = {"include": [{"class": "car", "count": 1, "color": "red"}, {"class": "bus", "count": 1, "color": "blue"}]}
    clocks = {"include": CLOCKS["include"]}
    rows = [LEFT, LEFT, CLOCKS, clocks, row, LEFT, row]
    scenes = [PAIR, SWAPPED, THREE, THREE, TRAFFIC, MOUSE, EMPTY]
    together = scores(reward, scenes, rows)
    assert together[1:4] == [1, 0, 1]  # each by the threshold of its own row
    assert together == [scores(reward, [i], [one])[0] for i, one in zip(scenes, rows, strict=True)]
    assert together == scores(reward, scenes[::-1], rows[::-1])[::-1]


def test_a_row_that_cannot_be_judged_is_a_failure(reward):
    values = reward(pictures()[[THREE, THREE]], ["no row", "clocks"], [{}, CLOCKS])
    assert math.isnan(values[0])
    assert values[1] == 1
    assert reward.failure.startswith('Prompt "no row": include: Field required.')
    scores(reward, [THREE], CLOCKS)
    assert reward.failure is None
    assert reward(pictures()[:0], [], []).shape == (0,)
    zebra = {"include": [{"class": "zebra", "count": 1}]}
    assert math.isnan(scores(reward, [THREE], zebra)[0])
    error = reward.prompt_error("a zebra", zebra)
    assert error.startswith("Prompt \"a zebra\": class='zebra' is not a class of the detector.")
    assert GenEval().prompt_error("a zebra", zebra) is None  # no detector is at hand: COCO's classes
    assert "Did you mean zebra?" in GenEval().prompt_error("x", {"include": [{"class": "zebbra", "count": 1}]})


@pytest.mark.parametrize("missing", ["model.safetensors", "preprocessor_config.json"])
def test_a_folder_without_weights_or_processor_is_one_line(tmp_path, detector_folder, clip_folder, missing):
    broken = tmp_path / "broken"
    shutil.copytree(detector_folder, broken)
    (broken / missing).unlink()
    with pytest.raises(LoadError, match=r"^Cannot load .*broken: .* Set GenEval\.detector to.*$"):
        GenEval(str(broken), str(clip_folder)).load()
