"""Seconds per image of a rollout and of training, at a model's real size with random weights: nothing is downloaded.

    python benchmarks/policy_speed.py                               # SD 3.5 medium's architecture, on a GPU
    python benchmarks/policy_speed.py --model flux --batch 2        # FLUX.1-dev's: 24 GB of weights
    python benchmarks/policy_speed.py --model tiny --device cpu     # to see that it works, in seconds
    python benchmarks/policy_speed.py --profile --steps 4 --no-compile   # idle gaps, synchronisations, copies, kernels
    python benchmarks/policy_speed.py --base nf4                    # frozen weights in 4 bits

LoRA, bfloat16, V-GRPO's loss; prompts are random embeddings, and the VAE has no part. Each phase is measured as it is,
compiled, and in float32 with the adapter folded into the weights (rollouts only). Floating-point operations are
counted on the network as it is; what checkpointing computes again is counted too. They are compared with what the
device's own matrix multiplication reaches. Prints a table and writes it into ``benchmarks/results/policy_speed.json``,
where rows of other models and devices stay.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from torch.utils.flop_counter import FlopCounterMode

from lit_vgrpo import VGRPO, RolloutSpec
from lit_vgrpo.core.noise import STREAM_ROLLOUT, image_generators
from lit_vgrpo.core.sampling import sample
from lit_vgrpo.core.snapshots import trainable_parameters
from lit_vgrpo.core.types import Conditioning, Experience, Rollout
from lit_vgrpo.objectives.base import PrepareContext
from lit_vgrpo.policies import FluxPolicy, Policy, SD3Policy
from lit_vgrpo.policies.acceleration import compile_network
from lit_vgrpo.system.memory import measured_memory
from lit_vgrpo.system.paths import write_atomically
from lit_vgrpo.training.optimizer import OptimizerConfig

sys.path.append(str(Path(__file__).parents[1] / "tests/support"))
from real_architectures import FLUX_DEV, SD35_MEDIUM

RESULTS = Path(__file__).parent / "results" / "policy_speed.json"
SD35M, FLUX = (sizes["transformer"] for sizes in (SD35_MEDIUM, FLUX_DEV))
TINY = {
    **SD35M,
    "num_layers": 2,
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "sample_size": 8,
    "joint_attention_dim": 32,
    "caption_projection_dim": 32,
    "pooled_projection_dim": 16,
    "pos_embed_max_size": 8,
    "dual_attention_layers": (0,),
}


@dataclass
class Model:
    """An architecture, the length of its prompts in tokens, and the side of its pictures in pixels."""

    policy: type[Policy]
    pipeline: Callable[..., Any]
    network: type
    config: dict[str, Any]
    tokens: int
    guidance: float
    side: int

    def build(self, args: argparse.Namespace) -> Policy:
        """The policy with random weights, made on the device in its own type."""
        side = args.side or self.side
        policy = self.policy(
            "random weights",
            lora_rank=args.rank,
            lora_alpha=2 * args.rank,
            dtype=args.dtype,
            height=side,
            width=side,
            gradient_checkpointing=args.gradient_checkpointing,
            quantisation=args.base,
        )
        default = torch.get_default_dtype()
        torch.set_default_dtype(policy.dtype)  # no copy in float32 is ever there
        try:
            with torch.device(args.device):
                network = self.network(**self.config)
        finally:
            torch.set_default_dtype(default)
        parts = ("text_encoder", "text_encoder_2", "text_encoder_3", "tokenizer", "tokenizer_2", "tokenizer_3")
        absent = parts if self.pipeline is StableDiffusion3Pipeline else [p for p in parts if not p.endswith("_3")]
        vae = AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            block_out_channels=(8,) * 4,
            latent_channels=16,
            norm_num_groups=4,
            shift_factor=0.0,
        )
        scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
        pipeline = self.pipeline(transformer=network, vae=vae, scheduler=scheduler, **dict.fromkeys(absent))
        policy.adopt(pipeline).to(args.device)
        return policy

    def conditioning(self, rows: int, device: str) -> Conditioning:
        """Random embeddings of as many prompts."""
        tokens = torch.randn(rows, self.tokens, self.config["joint_attention_dim"], device=device)
        pooled = torch.randn(rows, self.config["pooled_projection_dim"], device=device)
        return Conditioning({"tokens": tokens, "pooled": pooled})


MODELS = {
    "sd35m": Model(SD3Policy, StableDiffusion3Pipeline, SD3Transformer2DModel, SD35M, 77 + 256, 1.0, 512),
    "flux": Model(FluxPolicy, FluxPipeline, FluxTransformer2DModel, FLUX, 512, 3.5, 512),
    "tiny": Model(SD3Policy, StableDiffusion3Pipeline, SD3Transformer2DModel, TINY, 4, 1.0, 64),
}


class Bench:
    """One policy, and the two phases of an iteration on it."""

    def __init__(self, model: Model, args: argparse.Namespace) -> None:
        self.args = args
        self.policy = model.build(args)
        self.spec = RolloutSpec(steps=args.steps, guidance=model.guidance)
        self.objective = VGRPO(self.spec, num_mc_samples=args.pairs)
        self.objective.setup(self.policy)
        weights = trainable_parameters(self.policy).values()
        self.optimizer = torch.optim.AdamW(weights, lr=OptimizerConfig().lr)
        self.cond = model.conditioning(1, args.device)
        self.take(args.batch, args.micro_batch)

    def take(self, images: int, micro_batch: int) -> None:
        """Set the number of images per phase and per training pass."""
        self.images, self.micro_batch = images, micro_batch
        self.rows = torch.zeros(images, dtype=torch.int64, device=self.args.device)
        self.noise = self.policy.prior(image_generators(STREAM_ROLLOUT, 0, 0, range(images)))
        times = torch.linspace(1, 1 / self.args.steps, self.args.steps, device=self.args.device)
        self.rollout = self._rollout(self.noise, times)

    def _rollout(self, latents: torch.Tensor, schedule: torch.Tensor) -> Rollout:
        ids = torch.arange(self.images)
        return Rollout(latents, ids * 0, ids, self.cond, self.rows, schedule, 0, 0, self.images, self.spec)

    def sample(self) -> None:
        self.rollout = self._rollout(*sample(self.policy, self.cond, self.rows, self.spec, self.noise))

    def train(self) -> None:
        """Prepare, and one update over all images, in micro-batches."""
        advantages = torch.linspace(-1, 1, self.images)
        size = self.micro_batch
        experience = self.objective.prepare(
            PrepareContext(self.policy, self.rollout, advantages, micro_batch_size=size, updates=1)
        )
        for micro in experience.micro_batches(size):
            self.backward(micro)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def backward(self, micro: Experience) -> None:
        loss, _ = self.objective.loss(self.policy, micro)
        (loss * len(micro) / self.images).backward()

    def flops(self, phase: Callable[[], None]) -> float:
        """Return a phase's floating-point operations per image, in units of 10^12.

        Counts on one image, because the counter keeps the tensors that gradient checkpointing would drop.
        """
        self.take(1, 1)
        with FlopCounterMode(display=False) as counter:
            phase()
        self.take(self.args.batch, self.args.micro_batch)
        return counter.get_total_flops() / 1e12

    def measure(self, phase: Callable[[], None]) -> dict[str, float]:
        """Seconds an image (median), of the first call, which compiles, and the peak of memory in GiB."""
        first = self._seconds(phase)
        with measured_memory() as memory:
            seconds = [self._seconds(phase) for _ in range(self.args.repeats)]
        cuda = self.args.device.startswith("cuda")
        peak = torch.cuda.max_memory_allocated() if cuda else memory.resident
        return {
            "seconds_per_image": statistics.median(seconds) / self.images,
            "first_call_s": first,
            "peak_gib": peak / 2**30,
        }

    def _seconds(self, phase: Callable[[], None]) -> float:
        self._wait()
        start = time.perf_counter()
        phase()
        self._wait()
        return time.perf_counter() - start

    def _wait(self) -> None:
        if self.args.device.startswith("cuda"):
            torch.cuda.synchronize()


def profile(phase: Callable[[], None]) -> dict[str, Any]:
    """Profile one phase, and return the GPU's share of busy time and the number of synchronisations and copies."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    with record(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as found:
        phase()
        torch.cuda.synchronize()
    events = found.events()
    kernels = sorted((e.time_range.start, e.time_range.end) for e in events if e.device_type == DeviceType.CUDA)
    busy, gaps, end = 0.0, [0.0], kernels[0][0]
    for start, stop in kernels:
        gaps.append(max(start - end, 0.0))
        busy += max(stop - max(start, end), 0.0)
        end = max(stop, end)
    names = [event.name for event in events]
    table = sorted(found.key_averages(), key=lambda row: -row.self_device_time_total)
    return {
        "gpu_busy": busy / (end - kernels[0][0]),
        "longest_gap_ms": max(gaps) / 1e3,
        "kernels": len(kernels),
        "synchronisations": sum("Synchronize" in name for name in names) - 1,
        "copies": {kind: sum(name.startswith(f"Memcpy {kind}") for name in names) for kind in ("HtoD", "DtoH", "DtoD")},
        "most_ms": {row.key[:100]: row.self_device_time_total / 1e3 for row in table[:12]},
    }


def matmul_rate(device: str, dtype: torch.dtype) -> float:
    """Return the device's matrix multiplication speed in TFLOP/s, the best of several."""
    side = 8192 if device.startswith("cuda") else 512
    one, other = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    best = float("inf")
    for _ in range(10):
        start = time.perf_counter()
        (one @ other).sum().item()  # waits for the device
        best = min(best, time.perf_counter() - start)
    return 2 * side**3 / best / 1e12


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure every variant, and print a row for each."""
    model = MODELS[args.model]
    bench = Bench(model, args)
    policy = bench.policy
    cuda = args.device.startswith("cuda")
    about = {
        "model": args.model,
        "device": torch.cuda.get_device_name() if cuda else f"CPU ({platform.machine()})",
        "dtype": args.dtype,
        "million_parameters": round(sum(p.numel() for p in policy.network.parameters()) / 1e6, 1),
        "matmul_tflops": matmul_rate(args.device, policy.dtype),
        **{name: getattr(args, name) for name in ("steps", "pairs", "batch", "micro_batch", "rank")},
        "gradient_checkpointing": args.gradient_checkpointing,
        "side": args.side or model.side,
        "torch": torch.__version__,
    }
    policy.fold_lora = False
    phases = {"rollout": bench.sample, "training": bench.train}
    counted = {name: bench.flops(phase) for name, phase in phases.items()}
    parameters, matmul = about["million_parameters"], about["matmul_tflops"]
    print(
        f"{args.model}: {parameters} M parameters on {about['device']}, {args.dtype}, {matmul:.3g} TFLOP/s in a matmul"
    )
    print("phase      variant             s / image   TFLOP/s of matmul  peak GiB  first s")
    rows = []
    for compiled in (False, True) if args.compile and not args.base else (False,):
        if compiled:
            compile_network(policy.network)
            policy.compile_network = True
            policy._folded = None  # the uncompiled view with the adapter merged
        for phase, folded in (("rollout", False), ("rollout", True), ("training", False)):
            if folded and args.dtype != "float32":
                continue  # refused
            policy.fold_lora = folded
            found: dict[str, Any] = bench.measure(phases[phase])
            rate = counted[phase] / found["seconds_per_image"]
            found |= {"profile": profile(phases[phase])} if args.profile else {}
            variant = " + ".join(["compiled"] * compiled + ["folded"] * folded) or args.base or "plain"
            result = {"phase": phase, "variant": variant, "tflop_per_image": counted[phase], "tflops": rate}
            rows.append({**about, **result, **found})
            print(
                f"{phase:<10} {variant:<18} {found['seconds_per_image']:>10.4f} {rate:>9.3g} {rate / matmul:>9.1%} "
                f"{found['peak_gib']:>9.2f} {found['first_call_s']:>8.1f}",
                flush=True,
            )
            for name, value in found.get("profile", {}).items():
                print(f"    {name:<18} {value}")
    return rows


def merged(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Old rows and new ones; of the same model, device, phase and variant the new one."""
    rows = {tuple(row[key] for key in ("model", "device", "phase", "variant")): row for row in [*old, *new]}
    return [rows[key] for key in sorted(rows)]


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="sd35m", choices=list(MODELS))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--side", type=int, help="of the pictures, in pixels")
    parser.add_argument("--steps", type=int, default=40, help="of the rollout")
    parser.add_argument("--pairs", type=int, default=4, help="N_MC of the training")
    parser.add_argument("--batch", type=int, default=8, help="images of a rollout, in one pass")
    parser.add_argument("--micro-batch", type=int, default=2, help="images of a training pass, times the pairs")
    parser.add_argument("--rank", type=int, default=32, help="of the LoRA adapter")
    parser.add_argument("--base", choices=["nf4", "int8"], help="keep the frozen weights in 4 or 8 bits")
    parser.add_argument("--repeats", type=int, default=3, help="the median counts")
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="leave the compiled variants out")
    parser.add_argument("--profile", action="store_true", help="also profile each phase once (GPU only)")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args(words)
    if args.device == "cpu":
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))
    torch.manual_seed(0)
    rows = run(args)
    old = json.loads(args.out.read_text()) if args.out.is_file() else []
    args.out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(args.out, json.dumps(merged(old, rows), indent=2) + "\n")


if __name__ == "__main__":
    main()
