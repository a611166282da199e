"""Loaded policies for the tests of every method."""

import pytest

from lit_vgrpo.policies import SD3Policy, UNetPolicy


@pytest.fixture
def policy(tiny_sd3):
    return SD3Policy(str(tiny_sd3), max_sequence_length=1).load()


@pytest.fixture
def network(request, tiny_sd3, unet_folder):
    """Indirect: ``flow``, ``epsilon`` or ``v_prediction``, with ``-lora`` for an adapter."""
    kind, _, adapter = request.param.partition("-")
    options = {"lora_rank": 4} if adapter else {}
    if kind == "flow":
        return SD3Policy(str(tiny_sd3), max_sequence_length=1, **options).load()
    return UNetPolicy(str(unet_folder(kind)), **options).load()
