"""Loaded policies for the tests of every method."""

import pytest
from policy_copies import load_copy

from lit_vgrpo.policies import SD3Policy, UNetPolicy


@pytest.fixture
def policy(tiny_sd3):
    return load_copy(SD3Policy, tiny_sd3, max_sequence_length=1)


@pytest.fixture
def network(request, tiny_sd3, unet_folder):
    """Indirect: ``flow``, ``epsilon`` or ``v_prediction``, with ``-lora`` for an adapter."""
    kind, _, adapter = request.param.partition("-")
    options = {"lora_rank": 4} if adapter else {}
    if kind == "flow":
        return load_copy(SD3Policy, tiny_sd3, max_sequence_length=1, **options)
    return load_copy(UNetPolicy, unet_folder(kind), **options)
