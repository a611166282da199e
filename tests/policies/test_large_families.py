"""Qwen-Image, FLUX.2-klein and Z-Image beyond the contract: what they refuse, and their own numbers."""

import pytest
from helpers import repeating
from policies.contract import PROMPTS, inputs
from policies.families import LARGE
from safetensors.torch import load

from lit_vgrpo import VGRPO, RolloutSpec, VGRPOModule
from lit_vgrpo.apps.memory.estimate import Pass, peak_of_pass
from lit_vgrpo.core.sizes import Sizes
from lit_vgrpo.policies import Conditioning, Flux2Policy
from lit_vgrpo.policies.embeddings import CRC_BYTES
from lit_vgrpo.policies.meta import policy_on_meta
from lit_vgrpo.rewards import JPEGCompressibility
from lit_vgrpo.training.settings import module_errors


@pytest.fixture(scope="module")
def distilled(tmp_path_factory):
    import tiny_large_models

    return tiny_large_models.build_flux2(tmp_path_factory.mktemp("distilled"), is_distilled=True)


GUIDED = RolloutSpec(guidance=4.0)


@pytest.mark.parametrize(
    ("key", "objective", "evaluation"),
    [
        ("objective.rollout.guidance", VGRPO(GUIDED), None),
        ("objective.training_guidance", VGRPO(training_guidance=4.0), None),
        ("evaluation.guidance", VGRPO(), GUIDED),
    ],
)
def test_a_distilled_model_refuses_guidance_before_its_weights_are_read(distilled, key, objective, evaluation):
    policy = Flux2Policy(str(distilled), height=32, width=32)
    module = VGRPOModule(policy, objective, JPEGCompressibility(), evaluation=evaluation)
    (error,) = module_errors(module, Sizes(2, 4))
    assert error.startswith(f"model.{key}=4: ")
    assert "is distilled (is_distilled in its model_index.json) and cannot be guided. Use a scale of 1" in error
    assert not policy.loaded


def test_a_distilled_model_predicts_without_guidance_alone(distilled, families):
    policy = Flux2Policy(str(distilled), height=32, width=32, max_sequence_length=32).load()
    policy(*inputs(policy))
    with pytest.raises(ValueError, match="is distilled"):
        policy(*inputs(policy), 2.0)
    base = families("flux2").policy_class(str(families("flux2").folder))
    assert base.guidance_error() is None


def test_prompts_without_a_mask_are_not_padded(families):
    cond = families("flux2").shared.encode(PROMPTS[:2])
    with pytest.raises(ValueError, match="need a tensor 'mask'. Pad all prompts to one length"):
        cond.joined_with(Conditioning({"tokens": cond.tensors["tokens"][:, :5]}))


@pytest.mark.slow
@pytest.mark.parametrize("name", repeating(LARGE, slow=LARGE[1:]))
def test_the_memory_estimate_follows_the_network(families, name):
    family, options = families(name), {"height": 64, "width": 64, "lora_rank": 2}
    policy = policy_on_meta(family.policy_class(str(family.folder), **{**family.options, **options}))
    plain, trained = (peak_of_pass(policy, Pass(2, 1.0, with_grad)) for with_grad in (False, True))
    guided = peak_of_pass(policy, Pass(2, 3.0, False))
    assert 0 < plain < trained
    assert guided == plain if policy.embeds_guidance else guided > plain


def test_only_a_prompts_tokens_are_cached(families, tmp_path):
    policy = families("z_image").load(embedding_cache=str(tmp_path))
    masks = policy.encode(PROMPTS[:2]).tensors["mask"]
    (lengths,) = [sorted(len(load(file.read_bytes()[CRC_BYTES:])["tokens"]) for file in tmp_path.iterdir())]
    assert lengths == sorted(masks.sum(dim=1).int().tolist())
    assert masks.shape == (2, 48)
