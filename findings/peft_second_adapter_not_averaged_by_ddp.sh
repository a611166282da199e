#!/usr/bin/env bash
# peft, torch: DistributedDataParallel averages the gradients of the first adapter only, and reports no error
#
# One would guess: a network that has two adapters when it is wrapped trains either of them after set_adapter; all its
# parameters are there, so DistributedDataParallel averages their gradients, or complains as it does about unused ones.
#
# What happens (torch 2.13.0, peft 0.21.2): peft freezes an adapter that is not active, and DistributedDataParallel
# looks once, when it is made, at which parameters are trained. After set_adapter("critic"), each rank keeps its local
# gradients. Norm of the gradient of the critic's first factor, from different data on two ranks:
#                                           rank 0    rank 1
#   wrapped while "policy" is active         1010      4036
#   wrapped while "critic" is active         2523      2523
# This holds for find_unused_parameters=True and False. No error is raised and nothing is logged.
#
# Why it matters: two adapters in turn are common (policy and critic, two stages of video networks, a policy and its
# opponent). The adapter that is not active at the start trains on each rank's data alone, the ranks drift apart, and
# the checkpoint holds rank 0's. Set requires_grad of all adapters before wrapping and after set_adapter, with
# find_unused_parameters=True, or wrap again.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 transformers==5.24.0 peft==0.21.2
cat > "$folder/check.py" <<'PY'
import peft
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
config = LoraConfig(r=2, target_modules=["0", "1"], init_lora_weights=False)


def build(active, requires_all=False):
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    model = get_peft_model(network, config, adapter_name="policy")
    model.add_adapter("critic", config)
    model.set_adapter(active)
    for name, weight in model.named_parameters():
        if "lora" in name and requires_all:
            weight.requires_grad_(True)
    return model


def norms(model, wrapped):
    """Return the norm of the gradient of the critic's first factor on each rank, in the second of two passes."""
    for _ in range(2):
        model.zero_grad()
        wrapped(torch.full((2, 4), rank + 1.0)).square().sum().backward()
    weight = model.base_model.model[0].lora_A["critic"].weight
    found = [None, None]
    dist.all_gather_object(found, weight.grad.norm().item())
    return found


if rank == 0:
    print(f"torch {torch.__version__}, peft {peft.__version__}")
for finds_unused in (True, False):
    model = build("critic")
    right = norms(model, DistributedDataParallel(model, find_unused_parameters=finds_unused))
    model = build("policy")
    wrapped = DistributedDataParallel(model, find_unused_parameters=finds_unused)
    wrapped(torch.ones(2, 4)).sum().backward()
    model.set_adapter("critic")
    found = norms(model, wrapped)
    if rank == 0:
        print(f"find_unused_parameters={finds_unused}: norms of the critic's gradient on the two ranks {found}, "
              f"if active when wrapped {right}")
    assert right[0] == right[1]
    assert abs(found[0] / found[1] - 1) > 0.1, "changed: the ranks agree"
model = build("policy", requires_all=True)
wrapped = DistributedDataParallel(model, find_unused_parameters=True)
wrapped(torch.ones(2, 4)).sum().backward()
model.set_adapter("critic")
for name, weight in model.named_parameters():
    weight.requires_grad_("lora" in name)
found = norms(model, wrapped)
if rank == 0:
    print(f"with requires_grad of both adapters, before and after set_adapter: {found}")
assert found == right
if rank == 0:
    print("as described: the second adapter's gradients stay local")
dist.destroy_process_group()
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --standalone --nproc-per-node 2 "$folder/check.py"
