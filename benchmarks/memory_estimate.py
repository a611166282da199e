"""Compare `lightning check`'s memory estimate of a training step with a real one on this machine's CPU.

    python benchmarks/memory_estimate.py

For a mid-size transformer and UNet, LoRA and full weights, with and without gradient checkpointing: the bytes of a
forward and backward pass as estimated on the meta device, as counted live in a real pass, and as the growth of the
process's resident memory. Each real pass has a process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

import torch

ROWS, SIDE, RANK = 6, 128, 16
sys.path.append(str(Path(__file__).parents[1] / "tools"))


def main() -> None:
    with tempfile.TemporaryDirectory() as place:
        folders = build(Path(place))
        print("network  trains  checkpointing  estimated  counted  resident  estimated/counted  resident/estimated")
        results = []
        for name, lora, checkpointing in product(folders, (True, False), (False, True)):
            case = {"folder": folders[name], "family": name, "lora": lora, "checkpointing": checkpointing}
            command = [sys.executable, __file__, json.dumps(case)]
            # Blocks that are freed go back to the system at once, instead of staying resident for the next.
            environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
            output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout
            seen = json.loads(output.splitlines()[-1])
            results.append({**case, **seen})
            estimated, counted, resident = (seen[key] / 2**20 for key in ("estimated", "counted", "resident"))
            print(
                f"{name:<7}  {'LoRA' if lora else 'full':<6}  {'on' if checkpointing else 'off':<13}"
                f"  {estimated:6.1f} MiB  {counted:6.1f}  {resident:6.1f}"
                f"  {estimated / counted:.3f}  {resident / estimated:.3f}",
                flush=True,
            )


def build(place: Path) -> dict[str, str]:
    """Pipelines of tens of millions of parameters with random weights, 128 px."""
    from diffusers import SD3Transformer2DModel, UNet2DConditionModel
    from tiny_pipelines import build_sd3, build_unet

    sizes: dict[str, dict[str, Any]] = {
        "SD3": {
            "sample_size": 32,
            "num_layers": 8,
            "num_attention_heads": 6,
            "attention_head_dim": 64,
            "caption_projection_dim": 384,
            "pos_embed_max_size": 32,
        },
        "UNet": {
            "sample_size": 32,
            "block_out_channels": (96, 192),
            "layers_per_block": 2,
            "attention_head_dim": 6,
        },
    }
    folders = {"SD3": build_sd3(place / "sd3", small=True), "UNet": build_unet(place / "unet", small=True)}
    networks: dict[str, Any] = {"SD3": (SD3Transformer2DModel, "transformer"), "UNet": (UNet2DConditionModel, "unet")}
    for name, folder in folders.items():
        kind, part = networks[name]
        config = {key: value for key, value in kind.load_config(folder / part).items() if not key.startswith("_")}
        kind.from_config({**config, **sizes[name]}).save_pretrained(folder / part)
    return {name: str(folder) for name, folder in folders.items()}


def measure(case: dict[str, Any]) -> dict[str, int]:
    from lit_vgrpo.apps.memory.estimate import peak_of_pass
    from lit_vgrpo.policies import SD3Policy, UNetPolicy
    from lit_vgrpo.policies.meta import policy_on_meta
    from lit_vgrpo.system.memory import measured_memory
    from lit_vgrpo.training.memory_passes import LiveMemory, Pass

    torch.manual_seed(0)
    family = {"SD3": SD3Policy, "UNet": UNetPolicy}[case["family"]]
    policy = family(
        case["folder"],
        height=SIDE,
        width=SIDE,
        lora_rank=RANK if case["lora"] else None,
        gradient_checkpointing=case["checkpointing"],
    )
    estimated = peak_of_pass(policy_on_meta(policy, "cpu"), Pass(ROWS, 1.0, True))
    policy.load()
    cond = policy.encode(["a red circle"])
    for weight in policy.parameters():
        if weight.requires_grad:
            weight.grad = torch.zeros_like(weight)

    def step(rows: int) -> None:
        z, t = torch.randn(rows, *policy.latent_shape), torch.rand(rows)
        policy(z, t, cond.select(torch.zeros(rows, dtype=torch.int64))).sum().backward()

    step(1)  # what libraries take the first time
    with measured_memory() as use:
        step(ROWS)
    with LiveMemory() as live:
        step(ROWS)
    return {"estimated": estimated, "counted": live.peak, "resident": use.resident}


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(measure(json.loads(sys.argv[1]))))
    else:
        main()
