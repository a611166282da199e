"""The memory estimate against what real networks, optimizers and methods hold."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from all_methods import METHODS
from commands import check
from helpers import Brightness, repeating
from huggingface_hub import constants
from torch import nn

from lit_vgrpo import OptimizerConfig
from lit_vgrpo.apps.memory.estimate import Pass, gradient_peak, peak_of_pass
from lit_vgrpo.apps.memory.shares import bytes_of, shares, tensors_of
from lit_vgrpo.core.sizes import Sizes
from lit_vgrpo.core.snapshots import trainable_parameters
from lit_vgrpo.core.types import RolloutRequest
from lit_vgrpo.objectives.base import PrepareContext
from lit_vgrpo.policies import FluxPolicy, KontextPolicy, SD3Policy, SDXLPolicy, UNetPolicy
from lit_vgrpo.policies.meta import AutocastOnMeta, NotEstimated, policy_on_meta
from lit_vgrpo.policies.published import KNOWN
from lit_vgrpo.rewards import as_weighted
from lit_vgrpo.training.memory_passes import LiveMemory, demand
from lit_vgrpo.training.optimizer import CustomOptimizer
from lit_vgrpo.training.sharded import FSDP2, ZeRO

FAMILIES = {"sd3": SD3Policy, "unet": UNetPolicy, "sdxl": SDXLPolicy, "flux": FluxPolicy}

ROOT = Path(__file__).parents[3]
FLASH = "model.objective={class_path: MixGRPO, init_args: {flash: true, rollout: {solver: flow_sde, steps: 9}}}"


OPTIONS = [{}, {"lora_rank": 4, "dtype": "bfloat16"}, {"gradient_checkpointing": True}]
OPTIONS += [{"lora_rank": 4, "gradient_checkpointing": True}]
EVERY = [(family, number) for family in FAMILIES for number in (0, 1, 3)] + [("sd3", 2)]
FIRST = [EVERY[0], ("unet", 3)]
"""A transformer and a UNet; the other cases are slow."""


def test_operations_on_meta_tensors_count_as_on_a_cpu():
    """Also from the second time on, when their results are allocated without them."""

    def counted(device):
        network = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 16)).to(device)
        with LiveMemory() as live:
            x = torch.zeros(4, 16, device=device)
            for _ in range(3):
                rows = network(x).add_(1).view(2, 2, 16).transpose(0, 1)
                x = torch.cat(rows.chunk(2, -1), -1).reshape(4, 16)
            x.sum().backward()
        return live.peak, live.live

    assert counted("meta") == counted("cpu")


@pytest.fixture
def make(request):
    """``make(family, **options)``: a policy of a family."""

    def made(family, **options):
        folder = request.getfixturevalue(f"{family}_folder")()
        return FAMILIES[family](str(folder), height=32, width=32, **options)

    return made


def real_pass(policy, rows):
    """The bytes that are counted in a real forward and backward pass, where gradients are there already."""
    cond = policy.encode(["a"])
    for weight in trainable_parameters(policy).values():
        weight.grad = torch.zeros_like(weight)
    with LiveMemory() as live:
        z, t = torch.randn(rows, *policy.latent_shape), torch.rand(rows)
        policy(z, t, cond.select(torch.zeros(rows, dtype=torch.int64))).sum().backward()
    return live.peak


@pytest.mark.parametrize(("family", "number"), repeating(EVERY, slow=[case for case in EVERY if case not in FIRST]))
def test_a_step_takes_what_a_real_one_takes(make, family, number):
    """Weights, gradients and moments to the byte; activations within 5 %."""
    options = OPTIONS[number]
    twin, policy = policy_on_meta(make(family, **options), "cpu"), make(family, **options).load()
    assert {p.device.type for p in twin.parameters()} == {"meta"}
    assert peak_of_pass(twin, Pass(4, 1.0, True)) == pytest.approx(real_pass(policy, 4), rel=0.05)
    config = OptimizerConfig()
    parts = shares(twin, config, None, 1, on_gpu=False).parts
    trained = trainable_parameters(policy).values()
    optimizer = config.build(trained)
    optimizer.step()
    moments = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    assert parts["trained weights"] == bytes_of(trained)
    assert parts["gradients"] == bytes_of(p.grad for p in trained)
    assert parts["AdamW's moments"] == bytes_of(moments)
    assert parts["frozen weights"] == bytes_of(p for p in tensors_of(policy.network) if not p.requires_grad)


@pytest.mark.slow
def test_a_gpus_autocast_keeps_norms_in_float32(tiny_sd3):
    own, gpus = (
        peak_of_pass(policy_on_meta(SD3Policy(str(tiny_sd3), dtype="bfloat16"), kind), Pass(4, 1.0, True))
        for kind in ("cpu", "cuda")
    )
    whole = peak_of_pass(policy_on_meta(SD3Policy(str(tiny_sd3)), "cuda"), Pass(4, 1.0, True))
    assert own < gpus < whole


def test_attention_keeps_no_matrix_of_all_pairs():
    query = torch.empty(1, 1, 512, 8, device="meta", requires_grad=True)
    with AutocastOnMeta(), LiveMemory() as live:
        torch.nn.functional.scaled_dot_product_attention(query, query, query)
    assert live.peak < 512 * 512


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_a_method_asks_for_what_it_says(tiny_sd3, name):
    """The passes are those of its table of costs, and what it keeps is what it really prepares."""
    make, updates, _ = METHODS[name]
    objective, policy = make(), SD3Policy(str(tiny_sd3), max_sequence_length=1).load()
    sizes = Sizes(2, 4, updates, 4)
    found = demand(objective, policy, sizes.plan(1))
    assert objective.copies == {}
    passes = objective.passes_per_image(sizes, policy)
    factor = policy.guidance_factor(found.trained.guidance)
    rows = found.trained.rows * found.trained.times
    assert rows * factor * sizes.uses_per_image == 4 * passes["update"]
    objective.setup(policy)
    assert found.copies == tuple(sorted(objective.copies))
    with LiveMemory() as live:
        rollout = objective.roll_out(policy, RolloutRequest(["a", "b"], [{}, {}], [0, 1], 4, 0, 0))
        advantages = torch.linspace(-1, 1, 8)
        asked = {"reward": as_weighted(Brightness()), "prompts": ["a"] * 8, "data_rows": [{}] * 8}
        context = PrepareContext(policy, rollout, advantages, micro_batch_size=4, updates=updates, **asked)
        kept = (rollout, objective.prepare(context))
        del context
    latent = torch.Size(policy.latent_shape).numel() * 4
    assert len(kept) == 2
    embeddings = bytes_of(rollout.conditioning.tensors.values())
    # The sampler's last latents and the trajectory's end are one tensor in the end, and two here.
    assert found.kept == pytest.approx((live.live - embeddings) / latent, rel=0.1, abs=9)


@pytest.mark.parametrize(
    ("strategy", "weights", "gradients", "state"),
    [(None, 1, 1, 1), (ZeRO(1), 1, 1, 4), (ZeRO(2), 1, 4, 4), (ZeRO(3), 4, 4, 4), (FSDP2(), 4, 4, 4)],
)
def test_strategies_share_out_what_they_shard(tiny_sd3, strategy, weights, gradients, state):
    policy = policy_on_meta(SD3Policy(str(tiny_sd3), lora_rank=4))
    whole, part = (shares(policy, OptimizerConfig(), one, world, True) for one, world in ((None, 1), (strategy, 4)))
    for name, of in {"trained weights": weights, "gradients": gradients, "AdamW's moments": state}.items():
        assert part.parts[name] == whole.parts[name] // of, name
    assert shares(policy, CustomOptimizer(torch.optim.SGD), None, 1, True).parts["SGD's moments"] == 0
    buffers = bytes_of(policy.network.buffers())
    assert 0 < buffers < whole.parts["frozen weights"]
    assert part.parts["frozen weights"] - buffers == (whole.parts["frozen weights"] - buffers) // weights
    assert part.trained == part.parts["trained weights"]
    assert part.movable == (part.parts["frozen weights"] if weights == 1 else 0)
    extra = part.parts.keys() - whole.parts.keys()
    assert bool(extra)  # buckets, gathered weights, a copy of ZeRO's own
    assert all(part.parts[name] > 0 for name in extra)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "checkpoint", "millions", "last_encoder"),
    [
        (SD3Policy, "stabilityai/stable-diffusion-3.5-medium", 2243, 4762),
        (FluxPolicy, "black-forest-labs/FLUX.1-dev", 11901, 4762),
        (KontextPolicy, "black-forest-labs/FLUX.1-Kontext-dev", 11901, 4762),
        (SDXLPolicy, "stabilityai/stable-diffusion-xl-base-1.0", 2567, 695),
        (UNetPolicy, "stable-diffusion-v1-5/stable-diffusion-v1-5", 860, 123),
    ],
)
def test_published_sizes_are_known_without_a_file(kind, checkpoint, millions, last_encoder):
    assert checkpoint in KNOWN
    twin = policy_on_meta(kind(checkpoint, lora_rank=32, dtype="bfloat16", height=512, width=512))
    trained = sum(p.numel() for p in trainable_parameters(twin).values())
    assert (sum(p.numel() for p in twin.network.parameters()) - trained) / 1e6 == pytest.approx(millions, abs=0.5)
    assert sum(p.numel() for p in twin.encoders()[-1].parameters()) / 1e6 == pytest.approx(last_encoder, abs=0.5)


def recipe_text(name):
    return (ROOT / "recipes" / f"{name}.yaml").read_text()


ROW = re.compile(r"^\| `(\w+)`(?: †)? \| ([\d.]+) \| ([\d.]+) \| ([\w' -]+?) \|", re.MULTILINE)
ROWS = ROW.findall((ROOT / "docs" / "memory.md").read_text())
KNOWN_ROWS = [
    row
    for row in ROWS
    if "edit" not in row[0] and any(f"checkpoint: {name}\n" in recipe_text(row[0]) for name in KNOWN)
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "always", "peak", "phase"), KNOWN_ROWS, ids=[row[0] for row in KNOWN_ROWS])
def test_documented_memory_is_the_estimate(name, always, peak, phase, capsys):
    assert check([name, "--memory=141GiB"]) == 2  # without the weights
    printed = capsys.readouterr()
    assert "Cannot load" in printed.err
    sizes = {line[:-11].strip(): shown_bytes(line[-11:]) for line in printed.out.splitlines() if line.endswith("iB")}
    kept = sum(size for part, size in sizes.items() if not part.startswith(("+", "peak", "Available")))
    (top,) = (part for part in sizes if part.startswith("peak"))
    assert (kept, sizes[top]) == pytest.approx((float(always), float(peak)), abs=0.06)
    assert top == f"peak, in {phase}"
    said = re.search(r"estimates ([\d.]+) GiB", recipe_text(name).replace("\n# ", " "))
    assert said is None or float(said[1]) == pytest.approx(sizes[top], abs=0.06)


@pytest.mark.slow
def test_what_does_not_fit_is_said_without_a_file(capsys):
    assert check(["sd3_pickscore", "--memory=24GiB"]) == 2
    too_large, missing, *commands = capsys.readouterr().err.splitlines()
    assert "needs about 27.48 GiB per rank" in too_large
    assert too_large.endswith("Set model.policy.offload_encoders=true, which needs 21.55 GiB.")
    assert missing.startswith("Cannot load models: ")
    assert "stabilityai/stable-diffusion-3.5-medium" in commands[0]


def shown_bytes(text):
    """Return a printed size in GiB."""
    number, unit = text.split()
    return float(number) * {"GiB": 1, "MiB": 2**-10, "KiB": 2**-20}[unit]


@pytest.mark.slow
def test_a_recipe_that_is_too_large_is_refused_with_what_to_type(tiny_recipe, capsys):
    assert check([str(tiny_recipe), "--memory=1.003GiB"]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith("The recipe needs about 3.7 MiB per rank, in decoding images; 3.1 MiB is available (the ")
    advice = "model.policy.decode_batch_size=4"
    assert error.endswith(f" given GPU). Set {advice}, which needs 3.0 MiB.")
    assert check([str(tiny_recipe), "--memory=1.003GiB", advice]) == 0


def test_without_the_configurations_it_says_so(tiny_recipe, tiny_sd3, tmp_path, capsys, monkeypatch):
    """A repository of which only a part is in the cache; a folder would be refused."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--some--model"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("a" * 40)
    folder = shutil.copytree(tiny_sd3, repository / "snapshots" / ("a" * 40))
    (folder / "transformer" / "config.json").unlink()
    assert check([str(tiny_recipe), "model.policy.checkpoint=some/model"]) == 0
    line = "memory: not estimated, small files of some/model are not on this machine. Run: hf download some/model "
    assert line in capsys.readouterr().out
    assert check([str(tiny_recipe), f"model.policy.checkpoint={folder}"]) == 2
    assert "/transformer: it has no config.json." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("word", "config", "line"),
    [
        ("model.objective.rollout.solver=dpm++", {"use_karras_sigmas": True}, "cannot follow use_karras_sigmas of the"),
        ("model.evaluation={solver: unipc, steps: 2}", {"use_beta_sigmas": True}, "cannot follow use_beta_sigmas of"),
        (FLASH, {"use_karras_sigmas": True}, "cannot follow use_karras_sigmas of the"),
        ("model.objective.rollout={solver: dpm++, steps: 1000}", {}, "steps=1000 has 1000 times from 0.999 to 0"),
    ],
)
def test_a_solver_without_a_schedule_is_an_error(tiny_recipe, tiny_sd3, tmp_path, capsys, word, config, line):
    folder = shutil.copytree(tiny_sd3, tmp_path / "pipeline")
    file = folder / "scheduler" / "scheduler_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **config}))
    assert check([str(tiny_recipe), f"model.policy.checkpoint={folder}", word]) == 2
    assert line in capsys.readouterr().err


def test_what_a_folder_names_beside_its_libraries_is_not_imported(tiny_sd3, tmp_path, monkeypatch):
    folder = tmp_path / "pipeline"
    shutil.copytree(tiny_sd3, folder)
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps({**index, "transformer": ["trap_of_a_folder", "Network"]}))
    (tmp_path / "trap_of_a_folder.py").write_text("open('sprung', 'w').close()")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(NotEstimated):
        policy_on_meta(SD3Policy(str(folder)))
    assert not (tmp_path / "sprung").exists()


def test_live_memory_counts_storages_until_they_are_freed():
    with LiveMemory() as live:
        x = torch.zeros(1000)
        y = x.view(10, 100)[2:].add_(1)
        assert live.live == 4000
        z = x + 1
        del x, y
        assert (live.live, live.peak) == (4000, 8000)
        del z
        assert live.live == 0


@pytest.mark.slow
@pytest.mark.parametrize(("crop", "halved"), [(None, False), (0.5, False), (None, True)])
def test_the_gradient_of_a_reward_takes_what_a_real_one_does(make, crop, halved):
    policy = make("sd3", decode_batch_size=2)
    found = gradient_peak(policy_on_meta(policy), crop, halved)
    policy.load()
    side = policy.latent_shape[-1] // (1 if crop is None else 2)
    with LiveMemory() as live:
        latents = torch.randn(2, *policy.latent_shape, requires_grad=True)
        policy.decode_with_gradient(latents[..., :side, :side], halved).sum().backward()
    assert found == pytest.approx(live.peak, rel=0.05)
