import pytest
import torch
from feature_networks import SmallNetwork, pictures, save_script


@pytest.fixture(scope="session")
def script(tmp_path_factory):
    torch.manual_seed(1)
    return str(save_script(SmallNetwork(), tmp_path_factory.mktemp("network") / "small.pt"))


@pytest.fixture(scope="session")
def real(tmp_path_factory):
    folder = tmp_path_factory.mktemp("real")
    for index, data in enumerate(pictures(0, 11)):
        (folder / f"{index}.png").write_bytes(data)
    return str(folder)
