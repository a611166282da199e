import re
import shutil
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from cleanfid import fid as clean_fid
from cleanfid.inception_torchscript import InceptionV3W
from cleanfid.resize import build_resizer
from feature_networks import save_script
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import CLIPProcessor

from lit_vgrpo.cli.eval import image_metrics
from lit_vgrpo.errors import UserError
from lit_vgrpo.launch.build import build
from lit_vgrpo.metrics import feature_network, reference_statistics
from lit_vgrpo.metrics.features import INCEPTION_FILE, clean_resize
from lit_vgrpo.options import Evaluate
from lit_vgrpo.system.hub import LoadError


@pytest.fixture
def inception_home(tmp_path, monkeypatch):
    """The folder searched for the Inception file; it holds a small network that also returns 2048 values."""
    monkeypatch.setattr(torch.hub, "_hub_dir", str(tmp_path))
    (tmp_path / "checkpoints").mkdir()
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Conv2d(3, 2048, 8, stride=100), nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    save_script(nn.Sequential(OrderedDict(layers=layers)), tmp_path / "checkpoints" / INCEPTION_FILE)
    return tmp_path / "checkpoints"


def test_resize_is_clean_fids():
    picture = np.random.default_rng(0).integers(0, 256, (40, 64, 3), dtype=np.uint8)
    np.testing.assert_array_equal(clean_resize(picture, 299), build_resizer("clean")(picture))
    assert clean_resize(picture, 16).shape == (16, 16, 3)


def test_images_are_rounded_once(network):
    """A float image has the features of the file that it would be saved to."""
    images = torch.rand(3, 3, 20, 24, generator=torch.Generator().manual_seed(0))
    files = [(np.asarray(image.permute(1, 2, 0)) * 255).round().astype(np.uint8) for image in images]
    features = network(images)
    assert features.dtype == torch.float32
    assert features.shape == (3, 6) == (3, network.dimension)
    torch.testing.assert_close(features, network.extract(files), rtol=0, atol=0)
    images[1, 0, 5, 5] = float("nan")  # which a file would show as black
    assert network(images).isfinite().all(dim=1).tolist() == [True, False, True]


def test_a_batch_has_no_effect(network):
    images = torch.rand(11, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    together = network(images)
    assert torch.equal(torch.cat([network(image[None]) for image in images]), together)
    assert torch.equal(network(images.flip(0)).flip(0), together)
    assert network(images[:0]).shape == (0, 6)


def test_a_video_is_its_frames_side_by_side(network):
    videos = torch.rand(2, 3, 3, 16, 16)
    assert torch.equal(network(videos), network(torch.cat([*videos.unbind(1)], dim=3)))


def test_eval_refuses_fid_of_videos_before_loading(tmp_path):
    options = Evaluate(words=[], fid_reference=str(tmp_path))
    with pytest.raises(UserError, match="FID compares images, but the policy makes videos. Leave out --fid-reference"):
        image_metrics(build(["tiny_motion"], make_folder=False), options)


def test_autocast_does_not_reach_the_network(network):
    images = torch.rand(2, 3, 16, 16)
    with torch.autocast("cpu", torch.bfloat16):
        inside = network(images)
    assert torch.equal(inside, network(images))


def test_the_name_is_that_of_the_weights(network, script, torch_network, tmp_path):
    copied = tmp_path / "renamed.pt"
    copied.write_bytes(Path(script).read_bytes())
    assert network.name == feature_network(str(copied)).name
    other = save_script(nn.Sequential(torch_network, nn.ReLU()), tmp_path / Path(script).name)
    assert network.name != feature_network(str(other)).name


def test_inception_is_clean_fids(inception_home, folders):
    model = InceptionV3W(str(inception_home), download=False).eval()
    expected = clean_fid.get_folder_features(
        str(folders[0]), model, num_workers=0, device=torch.device("cpu"), verbose=False
    )
    found = reference_statistics(folders[0], feature_network(), keep_features=True).features
    assert found.shape == (17, 2048)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_inception_that_is_missing(inception_home):
    file = inception_home / INCEPTION_FILE
    file.unlink()
    with pytest.raises(LoadError, match=rf"^{re.escape(str(file))} does not exist. Download it: python -c "):
        feature_network().load()


def test_a_transformers_folder(tiny_clip):
    from PIL import Image
    from transformers import CLIPModel

    model, processor = CLIPModel.from_pretrained(tiny_clip).eval(), CLIPProcessor.from_pretrained(tiny_clip)
    network = feature_network(str(tiny_clip))
    network.load()
    picture = np.random.default_rng(0).integers(0, 256, (network.side, network.side, 3), dtype=np.uint8)
    pixels = processor(images=Image.fromarray(picture), return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        expected = model.get_image_features(pixels)
    expected = expected if isinstance(expected, torch.Tensor) else expected.pooler_output
    torch.testing.assert_close(network.extract([picture]), expected, rtol=1e-4, atol=1e-5)
    assert network.dimension == expected.shape[1]


def test_the_name_of_a_folder_is_that_of_what_is_loaded(tiny_clip, tmp_path):
    folder = shutil.copytree(tiny_clip, tmp_path / "copied")
    name = feature_network(str(folder)).name
    (folder / "added_tokens.json").write_text("{}")
    (folder / "training_args.bin").write_bytes(b"0")
    assert feature_network(str(folder)).name == name
    processor = CLIPProcessor.from_pretrained(folder)
    processor.image_processor.image_mean = [0.0, 0.0, 0.0]
    processor.save_pretrained(folder)
    names = [name, feature_network(str(folder)).name]
    weights = {key: value + 1 for key, value in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    assert len({*names, feature_network(str(folder)).name}) == 3


def test_a_network_that_would_be_random_in_part_is_refused(tmp_path):
    """A classifier's file holds no pooler, and its head is left out."""
    from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    ViTForImageClassification(ViTConfig(**sizes, image_size=16, patch_size=8)).save_pretrained(tmp_path)
    ViTImageProcessor(size={"height": 16, "width": 16}).save_pretrained(tmp_path)
    network = feature_network(str(tmp_path))
    for call in (network.check, network.load):
        with pytest.raises(LoadError, match=r": 2 weights missing, such as pooler\.dense\.bias\. Set features to a "):
            raise LoadError(*call())


def test_networks_that_cannot_be_loaded(tmp_path):
    (tmp_path / "text.pt").write_text("no network")
    for source, message in (
        ("missing.pt", "missing.pt does not exist. Set features to a TorchScript file, or to inception"),
        ("./missing", "missing is not a folder. Set features to a folder with config.json"),
        (str(tmp_path / "text.pt"), "^Cannot load .*text.pt: .* Set features to a TorchScript file"),
    ):
        with pytest.raises(LoadError, match=message):
            feature_network(source)(torch.zeros(1, 3, 8, 8))
