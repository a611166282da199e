"""Processes that share an image's tokens, and replicas of shards, against one process: the same images and weights."""

import json
import runpy
import shutil
import sys
from pathlib import Path

import pytest
import torch
from helpers import picture_prompts
from policies.families import FAMILIES, make_family
from processes import run_ranks
from safetensors.torch import load_file

from lit_vgrpo.policies import FluxPolicy, SD3Policy
from lit_vgrpo.training.context_parallel import context_errors
from lit_vgrpo.training.strategies import FSDP2

WORKER = Path(__file__).with_name("worker.py")
SIZES = {"height": 32, "width": 32}
SHARED, BOTH = {"context_parallel": 2}, {"shard_size": 2, "context_parallel": 2}
JOBS = {  # name: policy, rank of the adapter, strategies by number of processes, others
    "flux full": ("FluxPolicy", False, {2: SHARED, 4: BOTH}, {"iterations": 2}),  # the first: see below
    "flux lora": ("FluxPolicy", True, {4: {"context_parallel": 4}}, {}),
    "cut groups": ("FluxPolicy", True, {4: SHARED}, {"data": {"prompts_per_iteration": 1}}),
    "replicas": ("FluxPolicy", False, {4: {"shard_size": 2}}, {}),
    "DRaFT-K": ("FluxPolicy", True, {2: SHARED}, {"method": "DRaFT-K"}),
    "kontext": ("KontextPolicy", False, {2: SHARED}, {}),
    "flux2": ("Flux2Policy", False, {2: SHARED}, {}),
    "qwen_image": ("QwenImagePolicy", False, {2: SHARED}, {}),
    "wan": ("WanPolicy", False, {2: SHARED}, {}),
}
PLANNED = {"flux", "kontext", "qwen_image", "flux2", "flux_cfg", "flux2_dev", "wan", "wan22"}
PLANNED |= {family for family in FAMILIES if "edit" in family}
CLOCKS = ("cost/", "memory/", "time/")


@pytest.fixture(scope="module")
def options(tmp_path_factory, tiny, large_folder):
    """Of a job's policy."""
    made = tmp_path_factory.mktemp("pipelines")
    for name in ("FluxPolicy", "KontextPolicy"):  # with four attention heads
        tiny.build_flux(made / name, layers=1, edits=name == "KontextPolicy")
    large = {"Flux2Policy": "flux2", "QwenImagePolicy": "qwen_image", "WanPolicy": "wan"}

    def options(name):
        folder = large_folder(large[name]) if name in large else made / name
        frames = {"num_frames": 3} if name == "WanPolicy" else {}
        return {"checkpoint": str(folder), "max_sequence_length": 48 if name in large else 8, **SIZES, **frames}

    return options


@pytest.fixture(scope="module")
def folder(tmp_path_factory, options):
    """All runs: those of one process, made here, and those of two and of four, each in one launch."""
    folder = tmp_path_factory.mktemp("runs")
    edited = {"train": picture_prompts(folder, 32), "heldout": None}

    def spec(world):
        runs = []
        for name, (policy, lora, strategies, others) in JOBS.items():
            data = {"heldout_limit": 4, **(edited if name == "kontext" else others.get("data", {}))}
            job = {"policy": policy, "options": options(policy), "lora": lora, **others, "data": data}
            if world == 1 or world in strategies:
                runs.append({"name": f"{name}-{world}", "strategy": strategies.get(world), **job})
        # the second iteration after one process's first
        first = {**runs[0], "name": "first", "strategy": None, "iterations": 1}
        runs += [first] if world == 1 else [{**runs[0], "name": f"resumed-{world}", "start": "first"}]
        return {"folder": str(folder), "runs": runs}

    for world in (1, 2, 4):
        (folder / f"spec{world}.json").write_text(json.dumps(spec(world)))
    with pytest.MonkeyPatch.context() as patch:  # also as a script, whose rewards have the same code
        patch.setattr(sys, "argv", [str(WORKER), str(folder / "spec1.json")])
        runpy.run_path(str(WORKER), run_name="__main__")
    for world in (2, 4):
        run_ranks(WORKER, folder / f"spec{world}.json", world=world, logs=folder, timeout_s=600)
    return folder


def assert_same(folder, one, other):
    alone, shared = (torch.load(folder / f"{name}.ckpt", weights_only=True) for name in (one, other))
    averages = (c["callbacks"]["EMA"]["average"] for c in (alone, shared))
    for expected, found in ((alone["state_dict"], shared["state_dict"]), averages):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    # a gradient that is off by a factor moves Adam's weights little
    moments = [c["optimizer_states"][0]["state"] for c in (alone, shared)]
    largest = max(float(state["exp_avg"].abs().max()) for state in moments[0].values())
    for expected, found in zip(*(of.values() for of in moments), strict=True):
        torch.testing.assert_close(found["exp_avg"], expected["exp_avg"], rtol=0, atol=1e-5 * largest)
    expected, found = (torch.load(folder / f"{name}.pt", weights_only=True) for name in (one, other))
    for key in expected.keys() | found.keys():  # of each image once
        if not key.startswith(CLOCKS) and "seconds" not in key:
            assert found[key] == pytest.approx(expected[key], rel=1e-5, abs=1e-5), key


@pytest.mark.slow
@pytest.mark.timeout(1500)  # three launches
def test_processes_that_share_tokens_equal_one(folder):
    for name, (_, lora, strategies, _) in JOBS.items():
        for world in strategies:
            assert_same(folder, f"{name}-1", f"{name}-{world}")
            of_one, of_many = (sorted((folder / f"{name}-{n}-export").rglob("*.safetensors")) for n in (1, world))
            for ours, theirs in zip(of_many, of_one, strict=True):
                if lora or "transformer" in str(ours):
                    found, expected = load_file(ours), load_file(theirs)  # the latter with weights that nothing uses
                    torch.testing.assert_close(found, {key: expected[key] for key in found}, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_a_run_continues_with_another_number_of_processes(folder):
    for world in (2, 4):
        assert_same(folder, "flux full-1", f"resumed-{world}")


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_families_without_a_plan_are_refused(name, sd3_folder, unet_folder, sdxl_folder, flux_folder, large_folder):
    family = make_family(name, sd3_folder, unet_folder, sdxl_folder, flux_folder, large_folder)
    policy = family.policy_class(str(family.folder), **family.options)
    assert bool(context_errors(policy, 2)) == (name not in PLANNED)


@pytest.mark.slow
def test_what_the_degree_does_not_divide_is_refused(tiny, tmp_path):
    def errors(degree, height=24, length=8, sides=(None, None), loads=True):
        policy = FluxPolicy(str(folder), max_sequence_length=length, height=height, width=32)
        return context_errors(policy.load() if loads else policy, degree, sides)

    folder, option = tiny.build_flux(tmp_path / "flux", layers=1), "trainer.strategy.context_parallel"
    assert errors(2) == errors(4, sides=(16, 16)) == []
    assert errors(1, length=7) == []
    heads = f"{option}=3 does not divide the 4 attention heads of {folder}. Use a divisor of it."
    assert errors(3, loads=False) == [heads]
    length = "the 6 tokens of a prompt. Set model.policy.max_sequence_length=8."
    assert errors(4, length=6, loads=False) == [f"{option}=4 does not divide {length}"]
    small = "the 2 tokens of an image. Set another model.{}.height or width."
    assert errors(4, height=8, sides=(32, 32)) == []
    assert errors(4, sides=(8, 16)) == [f"{option}=4 does not divide {small.format('evaluation')}"]
    unplanned = f"{option}=2: diffusers cannot split the tokens of SD3Transformer2DModel, only those of FLUX, FLUX.2, "
    assert context_errors(SD3Policy("shipped:assets/tiny_sd3"), 2) == [f"{unplanned}Qwen-Image and Wan."]
    shutil.rmtree(folder / "transformer")
    assert errors(3, loads=False) == []  # not known before it is loaded


def test_processes_that_cannot_be_divided_are_refused():
    strategy = FSDP2(shard_size=4, context_parallel=2)
    strategy.parallel_devices = [torch.device("cpu")] * 3
    multiple = "does not divide 3 processes. Set trainer.devices to a multiple of"
    assert strategy.mesh_errors() == [
        f"trainer.strategy.shard_size=4 {multiple} 4.",
        f"trainer.strategy.context_parallel=2 {multiple} 2.",
    ]
    strategy.parallel_devices *= 4
    assert strategy.mesh_errors() == []
