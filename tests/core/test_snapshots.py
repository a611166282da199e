import pytest
import torch
from torch import nn

from lit_vgrpo.core import snapshots
from lit_vgrpo.core.sharding import write
from lit_vgrpo.core.snapshots import Snapshot, trainable_parameters
from lit_vgrpo.policies import SD3Policy


def network():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    module[1].requires_grad_(False)
    return module


def test_holds_only_what_is_trained():
    assert set(Snapshot(network()).tensors) == {"0.weight", "0.bias"} == set(trainable_parameters(network()))


def test_swap_puts_the_copy_in_and_the_weights_back():
    module = network()
    copy = Snapshot(module)
    with torch.no_grad():
        module[0].weight.add_(1)
    trained = module[0].weight.detach().clone()
    with copy.swapped_into(module):
        torch.testing.assert_close(module[0].weight.detach(), trained - 1)
    assert torch.equal(module[0].weight, trained)


def test_a_signal_while_the_weights_are_put_back_does_not_leave_the_copy(monkeypatch):
    module, calls = network(), []
    copy = Snapshot(module)
    with torch.no_grad():
        module[0].weight.add_(1)
    trained = module[0].weight.detach().clone()

    def interrupted(*given):
        calls.append(given)
        if len(calls) == 2:
            raise KeyboardInterrupt
        write(*given)

    monkeypatch.setattr(snapshots, "write", interrupted)
    with pytest.raises(KeyboardInterrupt), copy.swapped_into(module):
        pass
    assert torch.equal(module[0].weight, trained)


def test_other_weights_are_refused():
    copy, other = Snapshot(network()), network().requires_grad_(True)
    with pytest.raises(RuntimeError, match="2 differ, such as 1.bias"), copy.swapped_into(other):
        pass
    with pytest.raises(RuntimeError, match="The copy and the policy train different weights: "):
        copy.load_state_dict({})


def test_a_copy_is_float32_and_survives_a_half_precision_policy():
    module = network().to(torch.bfloat16)
    copy = Snapshot(module)
    assert copy.tensors["0.weight"].dtype == torch.float32
    with copy.swapped_into(module):
        assert module[0].weight.dtype == torch.bfloat16


def test_nothing_is_swapped_between_a_forward_and_its_backward():
    module = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2))
    copy = Snapshot(module)
    loss = module(torch.ones(1, 2)).square().sum()
    with copy.swapped_into(module):
        pass
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_no_gradient_reaches_swapped_weights():
    module = network()
    with Snapshot(module).swapped_into(module):
        assert not module(torch.ones(1, 2)).requires_grad
    assert module(torch.ones(1, 2)).requires_grad


def test_with_lora_the_copy_of_the_start_is_the_network_without_its_adapter(tiny_sd3):
    policy = SD3Policy(str(tiny_sd3), max_sequence_length=1, lora_rank=2).load()
    reference = Snapshot(policy)
    with torch.no_grad():
        for parameter in trainable_parameters(policy).values():
            parameter.add_(0.1)
    cond = policy.encode(["a red circle on the left"])
    z, t = torch.randn(1, *policy.latent_shape, generator=torch.Generator().manual_seed(0)), torch.tensor([0.7])
    with reference.swapped_into(policy):
        swapped = policy(z, t, cond)
    policy.network.disable_adapters()
    with torch.no_grad():
        off = policy(z, t, cond)
    policy.network.enable_adapters()
    torch.testing.assert_close(swapped, off)
    assert not torch.allclose(policy(z, t, cond), off, atol=1e-4)


@pytest.mark.parametrize("options", [{"lora_rank": 2}, {}], ids=["lora", "full"])
def test_a_pass_sees_the_weights_of_its_moment_under_an_outer_autocast(tiny_sd3, options):
    """An outermost autocast would keep 16-bit weights from before a swap, and without their gradient."""
    policy = SD3Policy(str(tiny_sd3), max_sequence_length=1, dtype="bfloat16", **options).load()
    trained = trainable_parameters(policy)
    with torch.no_grad():
        for weight in trained.values():
            weight.add_(0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)))
    given = torch.randn(2, *policy.latent_shape), torch.tensor([0.2, 0.8]), policy.encode(["a", "b"])
    copy, own = Snapshot(policy), policy(*given).detach()
    with torch.no_grad():
        for weight in trained.values():
            weight.mul_(2)
    moved = policy(*given).detach()
    assert not torch.equal(moved, own)
    with torch.autocast("cpu", enabled=False):
        with copy.swapped_into(policy):
            assert torch.equal(policy(*given), own)
        after = policy(*given)
        after.sum().backward()
    assert torch.equal(after.detach(), moved)
    assert all(
        weight.grad is not None
        for name, weight in trained.items()
        if name.endswith("proj_out.weight") or "lora_B" in name
    )
