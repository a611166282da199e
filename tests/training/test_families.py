"""One iteration of every network: the same weights on two processes as on one, and exports that diffusers reads."""

import json
import re
import runpy
from pathlib import Path

import diffusers
import pytest
import torch
from helpers import picture_prompts
from processes import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # the first test waits for the runs of all families
WORKER = Path(__file__).with_name("worker.py")
LARGE = {"flux2": "Flux2Policy", "z_image": "ZImagePolicy", "qwen_image_edit": "QwenImageEditPolicy"}
LARGE |= {"qwen_image21": "QwenImage21Policy", "chroma": "ChromaPolicy", "krea2": "Krea2Policy"}
LARGE |= {"lumina2": "Lumina2Policy", "sana": "SanaPolicy", "wan22": "WanPolicy"}
LENGTHS = {"chroma": 16, "sana": 16, "wan22": 16}
FAMILIES = {"unet": "UNetPolicy", "sdxl": "SDXLPolicy", "flux": "FluxPolicy", **LARGE}
"""One family per network class, preferably with pictures or with two networks."""
UNUSED = {"qwen_image_edit": ("transformer_blocks.1.attn.to_add_out.", "transformer_blocks.1.txt_mlp.")}
"""Starts of the names of weights that no output depends on, which are not trained."""
FILES = {"wan22": [{"weight_name": "pytorch_lora_weights.safetensors"}]}
FILES["wan22"].append({"weight_name": "pytorch_lora_weights_2.safetensors", "load_into_transformer_2": True})
WITH_LORA = ("sdxl", "qwen_image_edit", "wan22")
"""Families that also train a LoRA here; it is wrapped like full weights. ``test_strategies.py`` covers the rest."""
KINDS = {name: ["full", "lora"] if name in WITH_LORA else ["full"] for name in FAMILIES}
every_family = pytest.mark.parametrize("family", FAMILIES)


@pytest.fixture(scope="module")
def options(unet_folder, sdxl_folder, flux_folder, large_folder):
    """Of a family's policy."""
    made = {
        "unet": lambda: {"checkpoint": str(unet_folder())},
        "sdxl": lambda: {"checkpoint": str(sdxl_folder())},
        "flux": lambda: {"checkpoint": str(flux_folder()), "max_sequence_length": 8, "height": 32, "width": 32},
    }
    sizes = {"height": 32, "width": 32}
    for name in LARGE:
        length = {"max_sequence_length": LENGTHS.get(name, 48), **({"num_frames": 3} if "wan" in name else {})}
        made[name] = lambda name=name, length=length: {"checkpoint": str(large_folder(name)), **sizes, **length}
    return lambda family: made[family]()


@pytest.fixture(scope="module")
def folder(tmp_path_factory, options):
    """All runs of all families: those of one process, made here, and those of two, made in one launch."""
    folder = tmp_path_factory.mktemp("families")
    edited = {"train": picture_prompts(folder, 32), "heldout": None}
    keys = ("name", "policy", "options", "lora", "strategy", "data")

    def spec(strategy):
        rows = [
            (f"{family}-{kind}-{strategy}", policy, options(family), kind == "lora", strategy, data)
            for family, policy in FAMILIES.items()
            for data in [edited if "edit" in family else {}]
            for kind in KINDS[family]
        ]
        return {"folder": str(folder), "runs": [dict(zip(keys, row, strict=True)) for row in rows]}

    runpy.run_path(str(WORKER))["main"](spec(None))
    (folder / "spec.json").write_text(json.dumps(spec("fsdp2")))
    run_ranks(WORKER, folder / "spec.json", world=2, logs=folder, timeout_s=600)
    return folder


def load(folder, family, kind, strategy=None):
    return torch.load(folder / f"{family}-{kind}-{strategy}.ckpt", weights_only=True)


def weights(checkpoint):
    average = checkpoint["callbacks"]["EMA"]["average"]
    return {**checkpoint["state_dict"], **{f"EMA {name}": value for name, value in average.items()}}


@every_family
def test_two_processes_equal_one(folder, family):
    for kind in KINDS[family]:
        one, two = load(folder, family, kind), load(folder, family, kind, "fsdp2")
        assert two["global_step"] == one["global_step"] == 2
        found, expected = weights(two), weights(one)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            at = f"{kind}, {name}"
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6, msg=lambda m, at=at: f"{at}: {m}")


@every_family
def test_one_process_trains(folder, family):
    """Otherwise the comparison would say nothing: two steps of Adam move a weight by about twice the learning rate."""
    for kind in KINDS[family]:
        checkpoint = load(folder, family, kind)
        moments = checkpoint["optimizer_states"][0]["state"].values()
        reached = [state["exp_avg"].abs().max() > 0 for state in moments]
        assert sum(reached) > 0.8 * len(reached)
        average = checkpoint["callbacks"]["EMA"]["average"]
        moved = max((value - average[name]).abs().max() for name, value in checkpoint["state_dict"].items())
        assert moved > (1e-4 if kind == "lora" else 1e-5)


@every_family
def test_fsdp2_exports_what_it_trained(folder, options, family):
    average = load(folder, family, "full", "fsdp2")["callbacks"]["EMA"]["average"]
    network = weights_of(plain(folder / f"{family}-full-fsdp2-export"))
    trained = {f"policy.network.{name}" for name in network if not name.startswith(UNUSED.get(family, ()))}
    assert trained == average.keys()
    for name, value in average.items():
        assert torch.equal(network[name.removeprefix("policy.network.")], value), name

    if family not in WITH_LORA:
        return
    average = load(folder, family, "lora", "fsdp2")["callbacks"]["EMA"]["average"]
    pipeline = plain(Path(options(family)["checkpoint"]))
    for file in FILES.get(family, [{}]):
        pipeline.load_lora_weights(folder / f"{family}-lora-fsdp2-export", **file)
    found = {re.sub(r"default_\d", "default", name): weight for name, weight in weights_of(pipeline).items()}
    assert {name for name in found if "lora" in name} == {name.removeprefix("policy.network.") for name in average}
    for name, value in average.items():
        assert torch.equal(found[name.removeprefix("policy.network.")], value), name


def plain(folder):
    index = json.loads((folder / "model_index.json").read_text())
    missing = {name: None for name, value in index.items() if isinstance(value, list) and value[0] is None}
    return diffusers.DiffusionPipeline.from_pretrained(folder, **missing)


def weights_of(pipeline):
    """By the names that a run gives them: two networks have their names in front."""
    networks = {name: getattr(pipeline, name, None) for name in ("unet", "transformer", "transformer_2")}
    networks = {name: network for name, network in networks.items() if network is not None}
    several = len(networks) > 1
    weights = [(name, *item) for name, network in networks.items() for item in network.named_parameters()]
    return {f"{name}.{key}" if several else key: weight for name, key, weight in weights}
