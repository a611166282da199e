"""``compile: auto``: where it compiles, with what, how often, and what follows from a failing compiler."""

from functools import partial

import pytest
import torch
from all_methods import METHODS
from helpers import fit, make_data, make_module, make_trainer, same, weights
from lightning.pytorch.callbacks import LambdaCallback
from support.pretended_gpu import pretended_gpu
from torch._dynamo.testing import CompileCounter

from lit_vgrpo import VGRPO, EvaluationSpec, RolloutSpec, SD3Policy
from lit_vgrpo.core.sizes import Sizes
from lit_vgrpo.policies import acceleration
from lit_vgrpo.policies.acceleration import repeated_blocks
from lit_vgrpo.training import compilation

AUTO = {"policy_options": {"compile": "auto", "lora_rank": 2}, "iterations": 2}


def is_compiled(network):
    return any(block._compiled_call_impl is not None for block in repeated_blocks(network))


@pytest.fixture
def on_gpu(monkeypatch):
    """Any run counts as a long one on a GPU; ``on_gpu(backend)`` sets the compiler."""
    torch._dynamo.reset()
    monkeypatch.setattr(compilation, "can_compile", lambda policy: True)
    monkeypatch.setattr(compilation, "FEWEST_PASSES", 1)
    compile_for_run = compilation.compile_for_run
    yield lambda backend: monkeypatch.setattr(compilation, "compile_for_run", partial(compile_for_run, backend=backend))
    torch._dynamo.reset()


def test_a_gpu_with_whole_weights_compiles_and_a_cpu_does_not(tiny_sd3):
    def policy(**options):
        options = {"dtype": "bfloat16", **options}
        return SD3Policy(str(tiny_sd3), max_sequence_length=1, compile="auto", **options).load()

    assert not compilation.can_compile(policy())
    with pretended_gpu():
        assert compilation.can_compile(policy().to("cuda"))
        assert not compilation.can_compile(policy(dtype="float32").to("cuda"))
        quantised = policy(lora_rank=2, quantisation="nf4")
        assert not compilation.can_compile(quantised.to("cuda"))
        blockless = policy().to("cuda")
        blockless.network._repeated_blocks = ["Absent"]
        assert not compilation.can_compile(blockless)


@pytest.mark.parametrize(("epochs", "steps", "iterations"), [(3, -1, 3), (3, 4, 2), (-1, 4, 2), (-1, -1, float("inf"))])
def test_a_runs_passes_follow_from_its_length(tiny_sd3, tmp_path, epochs, steps, iterations):
    module = make_module(tiny_sd3, VGRPO(RolloutSpec(steps=5, guidance=2.0), num_mc_samples=3), policy_options={})
    module.policy.load()
    module.trainer = make_trainer(tmp_path, epochs, max_steps=steps)
    module.trainer.datamodule = make_data(updates_per_iteration=2)
    each = 5 * 2 + 3 * 2 + 3  # the rollout with guidance, two updates, and the old policy's pass
    assert compilation.passes_of(module) == 8 * each * iterations


@pytest.mark.parametrize(
    ("method", "updates", "compares"),
    [
        (VGRPO(RolloutSpec(steps=2)), 1, False),
        (VGRPO(RolloutSpec(steps=2)), 2, True),
        (VGRPO(RolloutSpec(steps=2), anchor_weight=1.0, anchor_decay=0.3), 1, True),
        (METHODS["Flow-GRPO, guidance, KL"][0](), 1, True),
    ],
)
def test_only_a_method_that_compares_passes_needs_exact_ones(tiny_sd3, monkeypatch, method, updates, compares):
    assert method.compares_passes(Sizes(2, 4, updates)) is compares
    policy, options = SD3Policy(str(tiny_sd3), max_sequence_length=1).load(), []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda block, **given: options.append(given["options"]))
    acceleration.compile_network(policy.network, exact=compares)
    assert options == [{"emulate_precision_casts": True} if compares else None] * 2


def broken(graph, inputs):
    raise RuntimeError("no such\ncompiler")


@pytest.mark.parametrize(
    ("backend", "error"),
    [
        ("absent", "InvalidBackend: Invalid backend: 'absent'"),
        pytest.param(broken, "no such compiler", marks=pytest.mark.slow),
    ],
)
def test_a_failing_compiler_is_a_line_and_the_run_goes_on(tiny_sd3, tmp_path, capsys, on_gpu, backend, error):
    on_gpu(backend)
    module, _ = fit(tiny_sd3, tmp_path, **AUTO)
    began, ended = capsys.readouterr().out.splitlines()
    assert began.startswith("compile: auto compiles the network. On an H100 that took about a minute")
    assert ended.startswith("compile: auto failed (")
    assert error in ended
    assert ended.endswith("The run continues without it.")
    assert not is_compiled(module.policy.network)
    plain, _ = fit(tiny_sd3, tmp_path, policy_options={"lora_rank": 2}, iterations=2)
    assert same(weights(module), weights(plain))
    assert module.ledger.counts == plain.ledger.counts


def test_a_short_run_and_a_cpu_stay_as_they_are(tiny_sd3, tmp_path, capsys, monkeypatch):
    module, _ = fit(tiny_sd3, tmp_path, **AUTO)
    monkeypatch.setattr(compilation, "can_compile", lambda policy: True)
    again, _ = fit(tiny_sd3, tmp_path, **AUTO)
    assert not is_compiled(module.policy.network)
    assert not is_compiled(again.policy.network)
    assert capsys.readouterr().out == ""


@pytest.mark.slow
def test_a_run_compiles_before_its_first_image_and_never_again(tiny_sd3, tmp_path, capsys, on_gpu):
    """With guidance in the evaluations alone, a last batch that is not full, and other sizes with and without grad."""
    on_gpu(counter := CompileCounter())
    sizes = {"micro_batch_size": 2, "heldout_limit": 5, "eval_batch_size": 4}
    options = {"evaluation": EvaluationSpec(steps=2, guidance=3.0), "rollout_batch_size": 3, "data": sizes}
    options["evaluate_at_start"] = False
    plain, _ = fit(tiny_sd3, tmp_path, **options, policy_options={"lora_rank": 2, "dtype": "bfloat16"}, iterations=2)
    graphs = []
    policy_options = {"lora_rank": 2, "dtype": "bfloat16", "compile": "auto"}
    callback = LambdaCallback(on_train_start=lambda *_: graphs.append(counter.frame_count))
    module, _ = fit(tiny_sd3, tmp_path, [callback], 2, policy_options=policy_options, **options)
    assert capsys.readouterr().out.splitlines()[1].startswith("compile: auto took ")
    assert is_compiled(module.policy.network)
    assert graphs == [counter.frame_count]
    assert counter.frame_count > 2
    torch.testing.assert_close(module.record.rewards, plain.record.rewards, rtol=0, atol=0.01)
    assert module.ledger.counts == plain.ledger.counts
