import numpy as np
import pytest
import torch
from feature_networks import save_script
from PIL import EpsImagePlugin
from torch import nn

from lit_vgrpo.cli.image_files import read_image
from lit_vgrpo.metrics import Reference, feature_network, reference_errors, reference_statistics
from lit_vgrpo.metrics.__main__ import main


def test_a_file_holds_all_of_it(folders, network, tmp_path):
    made = reference_statistics(folders[1], network, keep_features=True)
    made.save(tmp_path / "deep" / "real.npz")
    read = reference_statistics(tmp_path / "deep" / "real.npz", network, keep_features=True)
    for name in ("mean", "cov", "features"):
        assert torch.equal(getattr(read, name), getattr(made, name))
    assert read.network == network.name


def test_a_file_of_another_network_is_refused_and_kid_needs_the_features(folders, network, torch_network, tmp_path):
    reference_statistics(folders[0], network).save(tmp_path / "x.npz")
    other = save_script(nn.Sequential(torch_network, nn.Tanh()), tmp_path / "other.pt")
    made = (
        rf"x.npz was made with the feature network {network.name}, not with .* version of this package. Make it again"
    )
    with pytest.raises(ValueError, match=rf"{made}: python -m lit_vgrpo.metrics FOLDER .*x.npz --features .*other.pt$"):
        reference_statistics(tmp_path / "x.npz", feature_network(str(other)))
    with pytest.raises(ValueError, match=r"x.npz has no features, which KID needs"):
        reference_statistics(tmp_path / "x.npz", network, keep_features=True)


def test_clean_fids_own_file_goes_with_its_network_only(network, tmp_path):
    np.savez(tmp_path / "ffhq.npz", mu=np.zeros(6), sigma=np.eye(6))
    assert reference_errors(tmp_path / "ffhq.npz") == []
    with pytest.raises(ValueError, match=r"ffhq.npz has clean-fid's statistics"):
        reference_statistics(tmp_path / "ffhq.npz", network)
    read = Reference.load(tmp_path / "ffhq.npz", feature_network())
    assert read.cov.trace() == 6


def test_errors(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "torn.npz").write_bytes(b"PK\x03\x04 torn")
    np.savez(tmp_path / "other.npz", weights=np.zeros(3))
    expected = {
        "empty": "empty has 0 images",
        "nowhere.npz": "nowhere.npz cannot be read",
        "torn.npz": "torn.npz cannot be read",
        "other.npz": "other.npz has no statistics, only weights",
    }
    for name, message in expected.items():
        (error,) = reference_errors(tmp_path / name)
        assert message in error
        assert "\n" not in error
    assert reference_errors("shipped:../../x") != []


def test_a_file_that_pillow_would_run_is_none_either(folders, network, tmp_path, monkeypatch):
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *_, **__: pytest.fail("Ghostscript was run"))
    (tmp_path / "0.png").write_bytes(next(folders[0].glob("*.png")).read_bytes())
    (tmp_path / "1.png").write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 4 4\n%%EndComments\nshowpage\n")
    with pytest.raises(ValueError, match=r"1.png is not a readable image"):
        reference_statistics(tmp_path, network)
    with pytest.raises(ValueError, match=r"1.png is not a readable image"):
        read_image(tmp_path / "1.png")


def test_the_command(folders, network, tmp_path):
    options = ["--features", network.source, "--kid", "--device", "cpu"]
    main([str(folders[1]), str(tmp_path / "real.npz"), *options])
    assert Reference.load(tmp_path / "real.npz", network).features.shape == (23, 6)
    with pytest.raises(SystemExit, match="^Error: reference="):
        main([str(tmp_path / "nowhere"), str(tmp_path / "x.npz"), *options])
