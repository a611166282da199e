"""Model families as fixtures: what the contract's functions take."""

import pytest
from helpers import repeating
from policies.families import FAMILIES, REPEATS, make_family


@pytest.fixture(scope="session")
def families(sd3_folder, unet_folder, sdxl_folder, flux_folder, large_folder):
    """``families(name)``: a family by name, made once."""
    made = {}

    def make(name):
        if name not in made:
            made[name] = make_family(name, sd3_folder, unet_folder, sdxl_folder, flux_folder, large_folder)
        return made[name]

    return make


@pytest.fixture(params=repeating(FAMILIES, slow=REPEATS))
def family(request, families):
    return families(request.param)
