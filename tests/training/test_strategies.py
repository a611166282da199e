"""Every strategy on two processes against one process: the same run, and checkpoints that go from each to each."""

import json
import runpy
from pathlib import Path

import pytest
import torch
from diffusers import SD3Transformer2DModel, StableDiffusion3Pipeline
from processes import run_ranks

# test_ranks and test_families hold DDP, ZeRO-2, ZeRO-3 and FSDP2 to one process in every run of the tests.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # the first test waits for all runs
WORKER = Path(__file__).with_name("worker.py")
KINDS = ["full", "lora"]
CASES = [*((name, kind) for name in ("fsdp2", "zero2", "zero3") for kind in KINDS)]
CASES += [("ddp", "lora"), ("zero1", "lora"), ("zero2_offload", "full")]  # ZeRO-3 with offload is in a relay
BROKEN = ["fsdp2", "zero2_offload"]
# A checkpoint goes from hand to hand, an iteration each; it starts and ends on one process.
RELAY = ["one", "fsdp2", "zero3", "one"]
RELAY_OF_LORA = ["one", "zero3_offload", "zero1", "one"]


def run(strategy, kind, **options):
    name = f"{strategy}-{options.get('dtype', kind)}"
    chosen = None if strategy == "one" else strategy
    iterations = 1 if "dtype" in options else 2
    return {"name": name, "strategy": chosen, "lora": kind == "lora", "iterations": iterations, **options}


def relay(kind):
    hands = RELAY if kind == "full" else RELAY_OF_LORA
    legs = []
    for number, strategy in enumerate(hands, start=1):
        leg = run(strategy, kind, name=f"relay{number}-{kind}", iterations=number)
        legs.append({**leg, "start": legs[-1]["name"]} if legs else leg)
    return legs


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_sd3):
    """All runs: those of one process, made here, and those of two, made in one launch."""
    folder = tmp_path_factory.mktemp("strategies")
    spec = {"folder": str(folder), "sd3": str(tiny_sd3)}
    alone = runpy.run_path(str(WORKER))["main"]
    legs = {kind: relay(kind) for kind in KINDS}
    runs = [run("one", kind) for kind in KINDS] + [legs[kind][0] for kind in KINDS]
    runs += [run("one", kind, name=f"whole-{kind}", iterations=4) for kind in KINDS]
    runs.append(run("one", "lora", dtype="bfloat16"))
    alone({**spec, "runs": [*runs, run("one", "full", name="one-broken", broken=True)]})
    writes = ("fsdp2", "zero2", "zero3")
    both = [run(*case, writes=case[0] in writes, as_named=case == ("zero3", "full")) for case in CASES]
    both += [run(name, "lora", dtype="bfloat16") for name in writes]
    both += [run(name, "full", name=f"{name}-broken", broken=True) for name in BROKEN]
    both += [*legs["full"][1:-1], *legs["lora"][1:-1]]
    (folder / "spec.json").write_text(json.dumps({**spec, "runs": both}))
    run_ranks(WORKER, folder / "spec.json", world=2, logs=folder)
    alone({**spec, "runs": [legs[kind][-1] for kind in KINDS]})
    return folder


def load(folder, name):
    return torch.load(folder / name, weights_only=True)


def trained(checkpoint):
    """All tensors of a checkpoint by a name, but for counters."""
    adam = checkpoint["optimizer_states"][0]["state"]
    return {
        **{f"weights {name}": value for name, value in checkpoint["state_dict"].items()},
        **{f"ema {name}": value for name, value in checkpoint["callbacks"]["EMA"]["average"].items()},
        **{f"anchor {n}": value for n, value in checkpoint["lit_vgrpo"]["objective"]["copies"]["anchor"].items()},
        **{f"{key} {index}": adam[index][key] for index in adam for key in ("exp_avg", "exp_avg_sq")},
    }


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("kind", KINDS)
def test_one_process_trains_and_averages(folder, kind):
    """Otherwise the comparisons below would say nothing."""
    checkpoint, shown = load(folder, f"whole-{kind}.ckpt"), load(folder, f"whole-{kind}.pt")
    start, compared = (load(folder, f"{name}-{kind}.ckpt")["state_dict"] for name in ("relay1", "one"))
    assert max((value - start[name]).abs().max() for name, value in compared.items()) > 3e-5  # in two steps
    assert max((value - start[name]).abs().max() for name, value in checkpoint["state_dict"].items()) > 1e-4
    assert (shown["images"] - shown["averaged"]).abs().max() > 1e-4
    assert all(norm > 0.05 for norm in shown["norms"]) or kind == "lora"  # clipped
    assert shown["steps"] == 8


@pytest.mark.parametrize(("strategy", "kind"), CASES)
def test_two_processes_equal_one(folder, strategy, kind):
    one, two = (load(folder, f"{name}-{kind}.pt") for name in ("one", strategy))
    assert two["steps"] == one["steps"]
    for key in ("images", "averaged", "heldout"):
        torch.testing.assert_close(two[key], one[key], rtol=0, atol=1e-5)
    assert torch.equal(two["images"], two["after_swap"])
    torch.testing.assert_close(torch.stack(two["rewards"]), torch.stack(one["rewards"]), rtol=0, atol=1e-5)
    torch.testing.assert_close(torch.stack(two["norms"]), torch.stack(one["norms"]), rtol=1e-3, atol=0)
    assert_equal(trained(load(folder, f"{strategy}-{kind}.ckpt")), trained(load(folder, f"one-{kind}.ckpt")))


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_goes_from_strategy_to_strategy(folder, kind):
    last, whole = load(folder, f"relay4-{kind}.ckpt"), load(folder, f"whole-{kind}.ckpt")
    assert last["global_step"] == whole["global_step"] == 8
    assert_equal(trained(last), trained(whole))


@pytest.mark.parametrize("strategy", [strategy for strategy, kind in CASES if kind == "lora"])
def test_a_checkpoint_is_what_one_process_would_have_written(folder, strategy):
    one, two = (load(folder, f"{name}-lora.ckpt") for name in ("one", strategy))
    assert two.keys() == one.keys()
    first, second = (checkpoint["optimizer_states"][0] for checkpoint in (one, two))
    assert second["param_groups"] == first["param_groups"]
    assert [state["step"] for state in second["state"].values()] == [torch.tensor(4.0)] * len(first["state"])
    assert two["lr_schedulers"] == one["lr_schedulers"]
    size = (folder / f"{strategy}-lora.ckpt").stat().st_size
    held = sum(value.numel() * value.element_size() for value in trained(two).values())
    assert size < 1.1 * held, f"{size} bytes for {held} of trained tensors"


@pytest.mark.parametrize("strategy", ["fsdp2", "zero2", "zero3"])
def test_a_frozen_base_stays_in_bfloat16(folder, strategy):
    one, two = (load(folder, f"{name}-bfloat16.pt") for name in ("one", strategy))
    assert two["dtypes"] == one["dtypes"] == ["False torch.bfloat16", "True torch.float32"]
    torch.testing.assert_close(two["images"], one["images"], rtol=0, atol=0.02)
    weights, expected = (load(folder, f"{name}-bfloat16.ckpt")["state_dict"] for name in (strategy, "one"))
    assert all(value.dtype == torch.float32 for value in weights.values())
    moved = torch.cat([(weights[name] - value).flatten() for name, value in expected.items()])
    assert moved.abs().mean() < 5e-5  # two steps of at most 2e-4 each


@pytest.mark.parametrize("strategy", BROKEN)
def test_an_update_that_is_not_finite_is_left_out(folder, strategy):
    """DeepSpeed leaves it out by itself, the others because they are told to; no clock of ours or Adam's moves."""
    one, two = (load(folder, f"{name}-broken.pt") for name in ("one", strategy))
    assert (two["steps"], two["updates"]) == (one["steps"], one["updates"]) == (4, 3)
    checkpoint = load(folder, f"{strategy}-broken.ckpt")
    assert checkpoint["optimizer_states"][0]["state"][0]["step"] == 3
    assert_equal(trained(checkpoint), trained(load(folder, "one-broken.ckpt")))


@pytest.mark.parametrize("strategy", ["fsdp2", "zero2", "zero3"])
def test_full_weights_are_exported_as_a_pipeline(folder, strategy):
    exported = folder / f"{strategy}-full-export"
    StableDiffusion3Pipeline.from_pretrained(exported, text_encoder_3=None, tokenizer_3=None)
    network = SD3Transformer2DModel.from_pretrained(exported / "transformer")
    average = load(folder, f"{strategy}-full.ckpt")["callbacks"]["EMA"]["average"]
    for name, value in network.named_parameters():
        assert torch.equal(value, average[f"policy.network.{name}"])


@pytest.mark.parametrize("strategy", ["fsdp2", "zero2", "zero3"])
def test_an_adapter_is_exported(folder, strategy, tiny_sd3):
    pipeline = StableDiffusion3Pipeline.from_pretrained(tiny_sd3, text_encoder_3=None, tokenizer_3=None)
    pipeline.load_lora_weights(folder / f"{strategy}-lora-export")
    average = load(folder, f"{strategy}-lora.ckpt")["callbacks"]["EMA"]["average"]
    found = {name.replace("default_0", "default"): p for name, p in pipeline.transformer.named_parameters()}
    for name, value in average.items():
        assert torch.equal(found[name.removeprefix("policy.network.")], value)


def test_pictures_are_drawn_by_all_ranks_and_written_by_one(folder):
    assert {"before.png", "iteration_00001.png", "after.png"} <= {file.name for file in (folder / "samples").iterdir()}
