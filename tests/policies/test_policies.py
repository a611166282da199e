"""Every family through the same checks, on small real pipelines."""

import itertools

import pytest
from helpers import repeating
from policies import contract
from policies.families import FAMILIES, SLOW

SOLVERS = [*itertools.product([*FAMILIES, "sdxl_v"], [0, 1, 2])]
OF_EVERY_KIND = ("sd3", "unet_eps", "flux")
# The others have the network of one of these, with another text encoder, prediction or guidance.
SAME_NETWORK = ("sd3_t5", "unet_v", "flux_cfg", *SLOW)
of_each_network = pytest.mark.parametrize("family", repeating(FAMILIES, slow=SAME_NETWORK), indirect=True)


@pytest.mark.parametrize(
    ("family", "position"),
    repeating(
        SOLVERS,
        slow=[(name, number) for name, number in SOLVERS if (number or name == "sdxl_v") and name not in OF_EVERY_KIND],
    ),
    indirect=["family"],
)
def test_same_noise_same_image_as_the_pipeline(family, position):
    for solver in family.policy_class.solvers[position : position + 1]:
        contract.same_image_as_the_pipeline(family, solver, guidance=1.0)
        contract.same_image_as_the_pipeline(family, solver, guidance=3.0)
        if not family.shared.embeds_guidance:
            contract.same_image_as_the_pipeline(family, solver, guidance=3.0, negative=True)


def test_prompts_show_in_the_pictures(family):
    contract.prompts_show_in_the_pictures(family)


def test_unknown_solvers_are_refused(family):
    contract.unknown_solvers_are_refused(family)


@of_each_network
@pytest.mark.parametrize("trained", ["full", "adapter", "partial"])
def test_gradient_reaches_exactly_the_trained_weights(family, trained):
    options = {"full": {}, "adapter": {"lora_rank": 2}, "partial": {"train_only": [family.train_only]}}[trained]
    contract.gradient_reaches_exactly_the_trained_weights(family, **options)


@of_each_network
def test_checkpointing_changes_no_gradient(family):
    contract.checkpointing_changes_no_gradient(family)


@of_each_network
def test_a_fresh_adapter_changes_nothing(family):
    contract.a_fresh_adapter_changes_nothing(family)


def test_a_row_does_not_depend_on_its_batch(family):
    contract.a_row_does_not_depend_on_its_batch(family)


@of_each_network
def test_an_image_has_the_same_bits_anywhere(family):
    contract.an_image_has_the_same_bits_anywhere(family)


def test_padding_changes_no_prediction(family):
    contract.padding_changes_no_prediction(family)


def test_noise_depends_on_the_image_number_alone(family):
    contract.noise_depends_on_the_image_number_alone(family)


def test_prompts_and_guidance_count(family):
    contract.prompts_and_guidance_count(family)


def test_a_negative_prompt_counts_with_guidance_alone(family):
    contract.a_negative_prompt_counts_with_guidance_alone(family)


def test_long_prompts_are_cut_with_one_warning(family, capfd):
    contract.long_prompts_are_cut_with_one_warning(family)
    assert "truncated" not in capfd.readouterr().err


@of_each_network
def test_bfloat16_keeps_trained_weights_in_float32(family):
    contract.bfloat16_keeps_trained_weights_in_float32(family)


@of_each_network
def test_helpers_follow_the_network_to_its_device(family):
    contract.helpers_follow_the_network_to_its_device(family)


def test_decode_and_encode_are_inverse_up_to_the_vae(family):
    contract.decode_and_encode_are_inverse_up_to_the_vae(family)


@of_each_network
@pytest.mark.parametrize("trained", repeating(["full", "partial"], slow=["partial"]))  # see test_trained.py
def test_trained_weights_are_saved_as_a_pipeline(family, tmp_path, trained):
    options = {} if trained == "full" else {"train_only": [family.train_only]}
    contract.trained_weights_are_saved_as_a_pipeline(family, tmp_path / "out", **options)


@of_each_network
def test_an_adapter_is_saved_so_that_the_pipeline_loads_it(family, tmp_path):
    contract.an_adapter_is_saved_so_that_the_pipeline_loads_it(family, tmp_path / "lora")
