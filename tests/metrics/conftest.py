import pytest
from feature_networks import pictures, small_network

from lit_vgrpo.metrics import feature_network


@pytest.fixture(scope="session")
def torch_network():
    return small_network()


@pytest.fixture
def network(script):
    return feature_network(script)


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """Two folders, of 17 and of 23 PNG files, one of them in a subfolder."""
    made = []
    for name, count, darkest in (("generated", 17, 0), ("real", 23, 80)):
        folder = tmp_path_factory.mktemp(name)
        (folder / "more").mkdir()
        for index, data in enumerate(pictures(count, count, darkest)):
            (folder / ("more" if index == 3 else "") / f"{index}.png").write_bytes(data)
        made.append(folder)
    return made
