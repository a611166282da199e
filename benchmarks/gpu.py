"""Check this project on your GPU: that it runs, correctness, speed, memory. Send us the file it writes.

    python benchmarks/gpu.py                          # everything, some 25 minutes on one H200
    python benchmarks/gpu.py --parts runs,answers     # some parts
    python benchmarks/gpu.py --device cpu             # tiny sizes: tries this script, and says nothing about speed
    python benchmarks/gpu.py --parts as_typed --before COMMIT    # an earlier build and every switch: as_typed.py

Needs no weights: networks of the real architectures get random ones. Each part is a process of its own, and a step that
fails is a row with its error. Prints a table and writes it, with what it ran on, to ``gpu.json``; rows of parts that
were not asked for stay.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lit_vgrpo.core.types import RolloutRequest
from lit_vgrpo.objectives.base import PrepareContext

HERE = Path(__file__).parent
sys.path += [str(HERE.parent / "tools"), str(HERE.parent / "tests" / "support")]

from real_architectures import SD35_MEDIUM  # noqa: E402

SMALL = (
    *("data.prompts_per_iteration=2", "data.group_size=4", "data.micro_batch_size=4", "trainer.max_epochs=2"),
    *("data.heldout_limit=2", "data.heldout_images_per_prompt=1", "data.eval_batch_size=2"),
    *("trainer.enable_progress_bar=false", "trainer.check_val_every_n_epoch=2"),
)
TINY = "model.objective.rollout.steps=4", "trainer.callbacks=[]"
"""On a CPU in addition: few steps, and no pictures or exports."""

LORA, BF16 = "model.policy.lora_rank=4", "model.policy.dtype=bfloat16"
METHODS = {
    "tiny_shapes": {
        **dict.fromkeys(("VGRPO", "DiffusionNFT", "DGPO", "AWM", "EPG", "RAM", "CRD", "RewardGradient"), "euler"),
        **{"FlowGRPO": "flow_sde", "MixGRPO": "flow_sde", "DanceGRPO": "dance_sde"},
    },
    "tiny_unet": {**dict.fromkeys(("VGRPO", "DiffusionNFT", "DGPO"), "ddim"), "DDPO": "ddim_sde"},
}
OPTIONS = (
    (LORA, "model.policy.offload_encoders=true"),
    (LORA, "model.policy.gradient_checkpointing=true", "model.rollout_device=cpu"),
    (BF16, "model.policy.gradient_checkpointing=true"),
    (LORA, "model.policy.fold_lora=true"),
    ("data.micro_batch_size=auto",),
)
COMPILED = ((LORA, BF16, "model.policy.compile=true"),)
"""On a GPU alone: a CPU's compiler takes minutes for them."""

PEAKS = (
    ("tiny_shapes", LORA, "model.policy.offload_encoders=true", "model.policy.offload_network=true"),
    ("tiny_shapes", "model.policy.decode_dtype=auto"),
    ("tiny_shapes", "model.objective=DiffusionNFT", "model.objective.kl_weight=0.1", "data.micro_batch_size=auto"),
    ("tiny_shapes", "model.policy.dtype=float16", "trainer.precision=16-mixed"),
    ("tiny_unet", "model.policy.channels_last=true"),
)

Row = dict[str, Any]


@dataclass
class Place:
    """Where a part runs.

    Attributes:
        device: ``cuda`` or ``cpu``; on a CPU all sizes are tiny.
        folder: for what is written on the way.
        prompts: prompts per iteration of the real recipes.
        recipes: of which the part ``iteration`` times one iteration.
        before: folder or commit of an earlier build, for the part ``as_typed``.
        seconds: after which that part starts nothing more.
    """

    device: str
    folder: Path
    prompts: int = 48
    recipes: tuple[str, ...] = ("sd3_pickscore", "wan_pickscore")
    before: str | None = None
    seconds: float = 540

    @property
    def is_gpu(self) -> bool:
        return self.device.startswith("cuda")

    @property
    def accelerator(self) -> str:
        """The override that trains there."""
        return f"trainer.accelerator={'gpu' if self.is_gpu else 'cpu'}"

    @property
    def small(self) -> tuple[str, ...]:
        """The overrides of a small run."""
        return SMALL if self.is_gpu else (*SMALL, *TINY)

    def train(self, name: str, recipe: str, *words: str) -> Path:
        """Train through the command, and return the run folder.

        Raises:
            RuntimeError: it ended with another status than 0.
        """
        from lit_vgrpo.cli.main import main

        folder = self.folder / name
        status = main(["run", recipe, self.accelerator, f"run_dir={folder}", *words])
        if status != 0:
            raise RuntimeError(f"lightning run {recipe} {' '.join(words)} ended with status {status}")
        return folder


# --- 1: does it run? ---


def runs(place: Place) -> Iterator[tuple[str, Callable[[], Row]]]:
    """Two small iterations of every method and option, FID, and checkpoints that change the device."""
    cases: list[tuple[str, tuple[str, ...]]] = []
    for recipe, methods in METHODS.items():
        for method, solver in methods.items():
            chosen = [f"model.objective={method}", f"model.objective.rollout.solver={solver}"]
            chosen += ["model.reward=SmoothShapesReward"] if method == "RewardGradient" else []
            cases += [(recipe, (*chosen, *extra)) for extra in ((), (LORA, BF16))]
        cases += [(recipe, words) for words in (*OPTIONS, *(COMPILED if place.is_gpu else ()))]
    if not place.is_gpu:
        cases = cases[1:2]
    for number, (recipe, words) in enumerate(cases):
        yield f"{recipe} {' '.join(words)}", lambda n=number, r=recipe, w=words: _seconds(place, f"run{n}", r, *w)
    yield "FID", lambda: _with_fid(place)
    yield "cpu checkpoint on the device", lambda: _resumed(place, "there", "cpu", place.device)
    if place.is_gpu:
        yield "its checkpoint on the cpu", lambda: _resumed(place, "back", place.device, "cpu")


def _seconds(place: Place, name: str, recipe: str, *words: str) -> Row:
    start = time.perf_counter()
    place.train(name, recipe, *place.small, *words)
    return {"seconds": time.perf_counter() - start}


def _with_fid(place: Place) -> Row:
    from PIL import Image
    from tiny_pipelines import build_clip

    real = place.folder / "real"
    real.mkdir()
    for number in range(8):
        Image.effect_noise((32, 32), 40 + number).convert("RGB").save(real / f"{number}.png")
    options = f"{{reference: {real}, features: {build_clip(place.folder / 'features')}}}"
    run = place.train(
        "fid", "tiny_shapes", *place.small, f"trainer.callbacks+={{class_path: FID, init_args: {options}}}"
    )
    last = json.loads((run / "summary.json").read_text())["heldout_metrics_end"]
    return {name: value for name, value in last.items() if name.startswith("fid")}


def _resumed(place: Place, name: str, first: str, then: str) -> Row:
    start = Place(first, place.folder).train(name, "tiny_shapes", *place.small, "trainer.max_epochs=1")
    Place(then, place.folder).train(name, str(start / "config.yaml"), "trainer.max_epochs=2", "--resume")
    return {"iterations": json.loads((start / "summary.json").read_text())["iterations"]}


# --- 2: the same answer? ---


def answers(place: Place) -> Iterator[tuple[str, Callable[[], Row]]]:
    """Differences to the CPU, the ratio before an update in 16 bits, and between two runs of one recipe."""
    yield "float32, largest difference to the CPU", lambda: _differences(place)
    for precision in ("float32", "bfloat16") if place.is_gpu else ("bfloat16",):
        yield f"{precision}, |ratio - 1| before an update", lambda p=precision: _ratio(place, p)
    if place.is_gpu:  # compilation takes minutes on a CPU
        yield (
            "bfloat16, compiled, |ratio - 1| before an update",
            lambda: _ratio(place, "bfloat16", "model.policy.compile=true"),
        )
        yield "two runs, deterministic", lambda: _repeated(place, "trainer.deterministic=true")
    yield "two runs of one recipe", lambda: _repeated(place)


def _differences(place: Place) -> Row:
    found, expected = (_iteration_on(device) for device in (place.device, "cpu"))
    return {name: float((found[name] - value).abs().max() / value.abs().max()) for name, value in expected.items()}


def _iteration_on(device: str) -> dict[str, torch.Tensor]:
    """Rollout, surrogate and gradient of one iteration on the tiny pipeline, on the CPU for comparison."""
    from lit_vgrpo import VGRPO, RolloutSpec, SD3Policy
    from lit_vgrpo.core.snapshots import trainable_parameters

    policy = SD3Policy("shipped:assets/tiny_sd3", max_sequence_length=1).load().to(device)
    objective = VGRPO(RolloutSpec(steps=10), num_mc_samples=4)
    objective.setup(policy)
    prompts = ["a red circle on the left", "a blue square on the right"]
    rollout = objective.roll_out(policy, RolloutRequest(prompts, [{}, {}], [0, 1], 4, 0, seed=0))
    advantages = torch.linspace(-1, 1, len(rollout), device=device)
    experience = objective.prepare(PrepareContext(policy, rollout, advantages, micro_batch_size=8, updates=1))
    loss, metrics = objective.loss(policy, experience)
    loss.backward()
    gradient = torch.cat([p.grad.flatten() for p in trainable_parameters(policy).values() if p.grad is not None])
    found = {"rollout": rollout.latents, "surrogate": metrics["surrogate"], "gradient": gradient}
    return {name: value.detach().float().cpu() for name, value in found.items()}


def _ratio(place: Place, precision: str, *more: str) -> Row:
    chain = ("model.objective=FlowGRPO", "model.objective.rollout.solver=flow_sde", f"model.policy.dtype={precision}")
    found = {}
    for recompute in (False, True):
        words = (*place.small, *chain, LORA, *more, f"model.objective.recompute_old={str(recompute).lower()}")
        run = place.train(f"ratio-{precision}-{len(more)}-{recompute}", "tiny_shapes", *words)
        with (run / "metrics.csv").open() as file:
            values = [row["policy/ratio_deviation_before_update"] for row in csv.DictReader(file)]
        found["recomputed" if recompute else "of the rollout"] = max(float(value) for value in values if value)
    return found


def _repeated(place: Place, *words: str) -> Row:
    weights, seconds = [], []
    for number in range(2):
        start = time.perf_counter()
        run = place.train(f"same-{len(words)}-{number}", "tiny_shapes", *place.small, BF16, LORA, *words)
        seconds.append(time.perf_counter() - start)
        weights.append(
            torch.load(run / "checkpoints" / "last.ckpt", weights_only=True, map_location="cpu")["state_dict"]
        )
    one, other = weights
    return {"largest difference": max(float((one[n] - other[n]).abs().max()) for n in one), "seconds": min(seconds)}


# --- 3: how fast? ---


def speed(place: Place) -> Iterator[tuple[str, Callable[[], Row]]]:
    """``policy_speed.py`` on SD 3.5 medium and FLUX.1-dev: seconds an image, and the share of the matrix rate."""
    words = {"SD 3.5 medium": "--model sd35m", "FLUX.1-dev": "--model flux --batch 2 --micro-batch 1"}
    if not place.is_gpu:
        words = {"tiny": "--model tiny --steps 2 --pairs 1 --batch 2 --side 32 --rank 2 --repeats 1 --no-compile"}
    for name, chosen in words.items():
        yield name, lambda n=name, w=chosen: _policy_speed(place, n, w)


def _policy_speed(place: Place, name: str, words: str) -> Row:
    import policy_speed

    file = place.folder / f"{name}.json"
    policy_speed.main([*words.split(), "--device", place.device, "--out", str(file)])
    found: Row = {}
    for row in json.loads(file.read_text()):
        case = f"{row['phase']}, {row['variant']}"
        found[f"{case}: s an image"] = row["seconds_per_image"]
        found[f"{case}: share of the matrix rate"] = row["tflops"] / row["matmul_tflops"]
    return found


# --- 4 and 5: how large, and one real iteration ---


def memory(place: Place) -> Iterator[tuple[str, Callable[[], Row]]]:
    """The estimate of ``lightning check --memory`` against the allocator's peak."""
    for checkpointing in ("true", "false") if place.is_gpu else ("true",):
        words = (f"model.policy.gradient_checkpointing={checkpointing}", *_fewer(place))
        if checkpointing == "false":
            words += ("data.micro_batch_size=4",)  # 8 images do not fit in 80 GB
        yield f"sd3_pickscore, gradient_checkpointing={checkpointing}", lambda w=words: _iteration(place, *w)[1]
    yield "micro_batch_size: auto", lambda: _iteration(place, "data.micro_batch_size=auto", *_fewer(place))[1]


def _fewer(place: Place) -> tuple[str, ...]:
    """Enough images for a micro-batch of the recipe's size, in few steps."""
    if not place.is_gpu:
        return ()
    return "data.prompts_per_iteration=2", "data.group_size=8", "model.objective.rollout.steps=4"


def iteration(place: Place) -> Iterator[tuple[str, Callable[[], Row]]]:
    """Time each phase of an iteration, with PickScore's ViT-H."""
    for recipe in place.recipes:
        for compiled in (False, True) if place.is_gpu else (False,):
            words = (f"model.policy.compile={str(compiled).lower()}",)
            words += (f"data.prompts_per_iteration={place.prompts}",) if place.is_gpu else ()
            what = f"{recipe}, {place.prompts} prompts{', compiled' if compiled else ''}"
            yield what, lambda r=recipe, w=words: _phases(place, r, *w)


def _phases(place: Place, recipe: str, *words: str) -> Row:
    found, peak = _iteration(place, *words, recipe=recipe)
    seconds = {f"{name}: s": value for name, value in found["seconds"].items()}
    return {**seconds, "iteration: s": found["iteration"], "outside the network's passes": found["outside"], **peak}


def peaks(place: Place) -> Iterator[tuple[str, Callable[[], Row]]]:
    """The estimate against the peak with options of memory and precision, on tiny weights."""
    for recipe, *words in PEAKS if place.is_gpu else PEAKS[:1]:
        given = [recipe, place.accelerator, *place.small, *words]
        yield " ".join([recipe, *words]), lambda g=given: _with_peak(place, g)[1]


def _iteration(place: Place, *words: str, recipe: str = "sd3_pickscore") -> tuple[dict[str, Any], Row]:
    """Return :func:`_with_peak` for one real iteration."""
    return _with_peak(place, [*real_recipe(place, recipe), *words])


def _with_peak(place: Place, words: list[str]) -> tuple[dict[str, Any], Row]:
    """Return ``overhead.py``'s result for one iteration, and the estimated and measured peak memory."""
    import overhead

    from lit_vgrpo.apps.memory.estimate import estimate
    from lit_vgrpo.launch.build import build

    given = [*words, "data.heldout=null"]
    cli = build([*given, f"run_dir={place.folder / 'estimated'}"], make_folder=False)
    device, is_given = torch.device(place.device), "data.micro_batch_size=auto" not in words
    row = {"estimated GiB": estimate(cli, device).peak / 2**30} if is_given else {}
    del cli
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    found = overhead.measure(given[0], 1, given[1:])
    of_phase = {phase: peak / 2**30 for phase, peak in found["peak_by_phase"].items()}
    row["allocated GiB"] = max(of_phase.values())  # on a CPU, the whole process's resident memory
    row |= {f"allocated GiB, {phase}": peak for phase, peak in of_phase.items()}
    return found, {**row, "reserved GiB": found["peak_memory_bytes"] / 2**30}


def real_recipe(place: Place, recipe: str = "sd3_pickscore") -> list[str]:
    """A recipe on random weights of its architectures, which are written once.

    The text encoders have their real widths and one or two layers: they take a few seconds of an iteration at most.
    """
    from tiny_large_models import build_qwen_image, build_wan
    from tiny_pipelines import build_clip, build_sd3, build_sdxl

    builders: dict[str, Callable[[Path], Path]] = {
        "sd3_pickscore": lambda folder: build_sd3(folder, small=True, t5=True, shift=3.0),
        "sd3_pickscore_fast": lambda folder: build_sd3(folder, small=True, t5=True, shift=3.0),
        "wan_pickscore": build_wan,
        "sdxl_preference": lambda folder: build_sdxl(folder, small=True),
        "qwen_image_pickscore": build_qwen_image,
    }
    policy, reward, is_video = place.folder / recipe, place.folder / "pickscore", recipe == "wan_pickscore"
    if not policy.exists():
        builders[recipe](policy)
        if place.is_gpu:
            _write_real_sizes(policy, REAL_SIZES[recipe], place.device)
    if not reward.exists():
        build_clip(reward)
        if place.is_gpu:
            _write_real_reward(reward, place.device)
    scorer = "model.reward.reward" if is_video else "model.reward"
    words = [recipe, f"model.policy.checkpoint={policy}", f"{scorer}=PickScore", f"{scorer}.checkpoint={reward}"]
    words += ["model.untrained_reward=null"]
    words += [place.accelerator, "trainer.enable_progress_bar=false"]
    if not place.is_gpu:
        words += ["data.prompts_per_iteration=2", "data.group_size=2", "data.micro_batch_size=2"]
        words += ["model.policy.height=32", "model.policy.width=32"]
        words += [] if recipe == "sdxl_preference" else ["model.policy.max_sequence_length=8"]
        words += ["model.objective.rollout.steps=2", "model.policy.dtype=float32", "model.rollout_batch_size=4"]
        words += ["model.policy.num_frames=5"] if is_video else []
    return words


WAN = {"num_attention_heads": 12, "attention_head_dim": 128, "ffn_dim": 8960, "num_layers": 30, "in_channels": 16}
WAN |= {"out_channels": 16, "text_dim": 4096, "freq_dim": 256, "rope_max_seq_len": 1024}
QWEN_VAE = {"base_dim": 96, "z_dim": 16, "dim_mult": [1, 2, 4, 4], "temperal_downsample": [False, True, True]}
QWEN_VAE |= {"num_res_blocks": 2, "latents_mean": [0.0] * 16, "latents_std": [1.0] * 16}
WAN_VAE = {**QWEN_VAE, "scale_factor_temporal": 4, "scale_factor_spatial": 8}
QWEN = {"num_attention_heads": 24, "attention_head_dim": 128, "num_layers": 60, "in_channels": 64, "out_channels": 16}
QWEN |= {"joint_attention_dim": 3584, "axes_dims_rope": [16, 56, 56]}
QWEN_TEXT = {"hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4}
QWEN_TEXT |= {"rope_parameters": {"rope_type": "default", "mrope_section": [16, 24, 24], "rope_theta": 1e6}}
QWEN_ENCODER = {"text_config": QWEN_TEXT, "vision_config": {"out_hidden_size": 3584}}
SDXL = {
    "in_channels": 4,
    "out_channels": 4,
    "sample_size": 128,
    "block_out_channels": [320, 640, 1280],
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
    "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
    "layers_per_block": 2,
    "transformer_layers_per_block": [1, 2, 10],
    "attention_head_dim": [5, 10, 20],
    "cross_attention_dim": 2048,
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
    "norm_num_groups": 32,
}
REAL_SIZES: dict[str, dict[str, dict[str, Any]]] = {
    "sd3_pickscore": {
        **{part: SD35_MEDIUM[part] for part in ("transformer", "vae")},
        "text_encoder": {"hidden_size": 768, "projection_dim": 768},
        "text_encoder_2": {"hidden_size": 1280, "projection_dim": 1280},
        "text_encoder_3": {"d_model": 4096},
    },
    "sdxl_preference": {
        "unet": SDXL,
        "vae": {**SD35_MEDIUM["vae"], "latent_channels": 4, "use_quant_conv": True, "use_post_quant_conv": True},
        "text_encoder": {"hidden_size": 768, "projection_dim": 768},
        "text_encoder_2": {"hidden_size": 1280, "projection_dim": 1280},
    },
    "qwen_image_pickscore": {"transformer": QWEN, "vae": QWEN_VAE, "text_encoder": QWEN_ENCODER},
    "wan_pickscore": {"transformer": WAN, "vae": WAN_VAE, "text_encoder": {"d_model": 4096}},
}
REAL_SIZES["sd3_pickscore_fast"] = REAL_SIZES["sd3_pickscore"]
"""The published sizes of the networks and VAEs, and the widths of the text encoders."""


def _write_real_sizes(pipeline: Path, sizes: dict[str, dict[str, Any]], device: str) -> None:
    import diffusers
    import transformers

    index = json.loads((pipeline / "model_index.json").read_text())
    for part, changed in sizes.items():
        library, name = index[part]
        kind = getattr(diffusers if library == "diffusers" else transformers, name)
        file = pipeline / part / "config.json"
        config = json.loads(file.read_text())
        for key, value in changed.items():
            config[key] = {**config[key], **value} if isinstance(value, dict) else value
        file.write_text(json.dumps(config))
        torch.set_default_dtype(torch.bfloat16)  # 20 billion float32 weights are too many for 80 GB
        try:
            with torch.device(device):
                read = kind.load_config if library == "diffusers" else kind.config_class.from_pretrained
                config = read(pipeline / part)
                model = kind.from_config(config) if library == "diffusers" else kind(config)
        finally:
            torch.set_default_dtype(torch.float32)
        for weights in (pipeline / part).glob("*.safetensors"):  # shards would not replace the small model's file
            weights.unlink()
        model.to(torch.bfloat16).save_pretrained(pipeline / part)
        del model


def _write_real_reward(reward: Path, device: str) -> None:
    from reward_speed import clip, clip_processor

    with torch.device(device):
        model = clip("ViT-H/14")
    model.to(torch.bfloat16).save_pretrained(reward)
    clip_processor().save_pretrained(reward)


# --- 6: the race ---


def race(place: Place) -> Iterator[tuple[str, Callable[[], Row]]]:
    """``lightning compare tiny_shapes``: wall time and final reward of the methods."""
    methods, words = "vgrpo_anchor,vgrpo,mixgrpo,nft,dgpo,awm", ["--seeds", "3", "--iterations", "50"]
    if not place.is_gpu:
        methods, words = "vgrpo", ["--seeds", "1", "--iterations", "1", "--evaluate-every", "1", *SMALL[:3]]
    yield methods, lambda: _compared(place, methods, words)


def _compared(place: Place, methods: str, words: list[str]) -> Row:
    from lit_vgrpo.cli.main import main

    out = place.folder / "race"
    given = ["tiny_shapes", place.accelerator, "--methods", methods, *words, "--target", "0.7", "--jobs", "1"]
    status = main(["compare", *given, "--out", str(out)])
    if status != 0:
        raise RuntimeError(f"lightning compare ended with status {status}")
    found: Row = {}
    saved = json.loads((out / "compare.json").read_text())
    for run in saved["final"]:
        found[f"{run['method']} {run['settings']}, seed {run['seed']}: final"] = run["final"]
    for row in saved["costs"]:
        name = f"{row.pop('method')} {row.pop('settings')}"
        found |= {f"{name}: to {row['target']:g}, {cost}": value for cost, value in row.items()}
    return found


# --- 7: as typed, before and after ---


def as_typed(place: Place) -> Iterator[tuple[str, Callable[[], Row]]]:
    """A recipe in an earlier build and in this one, and every switch alone; writes ``as_typed.md``."""
    import as_typed as part

    words = [*real_recipe(place, part.RECIPE), "data.prompts_per_iteration=2", "data.heldout=null"]
    words += ["trainer.callbacks=[]"]

    def step() -> Row:
        rows: list[Row] = []

        def write(found: list[Row]) -> None:
            rows[:] = found
            if any(row["part"] == "run" and row["name"] == "now" for row in found):
                Path("as_typed.md").write_text(part.report(found, about(place.device)["device"]))

        part.measure(words, place.before, place.device, place.folder, place.seconds, write)
        print(Path("as_typed.md").read_text(), file=sys.stderr)
        return {"rows": json.dumps(rows)}

    yield part.RECIPE, step


# --- the script ---

PARTS = {"runs": runs, "answers": answers, "speed": speed, "memory": memory, "iteration": iteration, "race": race}
PARTS |= {"peaks": peaks, "as_typed": as_typed}


def measured(
    part: str, device: str, folder: str, prompts: str, recipes: str, before: str, seconds: str, out: Path
) -> None:
    """Write a row for every step of a part when it ends; a failed step's row has its error."""
    rows = []
    place = Place(device, Path(folder), int(prompts), tuple(recipes.split(",")), before or None, float(seconds))
    for what, step in PARTS[part](place):
        row: Row = {"part": part, "what": what}
        try:
            row["found"] = step()
        except (Exception, SystemExit) as error:
            traceback.print_exception(error)
            row["error"] = f"{type(error).__name__}: {error}".splitlines()[0]
        rows.append(row)
        out.write_text(json.dumps(rows))


def about(device: str) -> dict[str, Any]:
    """Return the device and the versions of a run."""
    from lit_vgrpo.callbacks.summary import versions
    from lit_vgrpo.system.memory import device_name

    place = torch.device("cuda", 0) if device == "cuda" else torch.device(device)
    return {"device": device_name(place), "cuda": torch.version.cuda, "versions": versions()}


def table(rows: list[Row]) -> str:
    """A line for every number, and for every error."""
    lines = []
    for row in rows:
        head = f"{row['part']:<10} {row['what']}"
        if "error" in row:
            lines.append(f"{head}: FAILED, {row['error']}")
        for name, value in row.get("found", {}).items():
            lines.append(f"{head}: {name} {value:.4g}" if isinstance(value, float) else f"{head}: {name} {value}")
    return "\n".join(lines)


def main(words: list[str] | None = None) -> int:
    """Measure, print and write.

    Returns:
        0; 1 where a step failed.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--parts", default=",".join([*PARTS][:-1]), help="of " + ", ".join(PARTS))
    parser.add_argument("--before", default="", help="commit or folder of an earlier build, for as_typed")
    parser.add_argument("--seconds", type=float, default=540, help="after which as_typed starts nothing more")
    parser.add_argument("--dry-run", dest="device", action="store_const", const="cpu", help="as --device cpu")
    parser.add_argument("--prompts", type=int, default=48, help="prompts per real iteration")
    parser.add_argument("--recipes", default=",".join(Place.recipes), help="to iterate; of " + ", ".join(REAL_SIZES))
    parser.add_argument("--out", type=Path, default=Path("gpu.json"))
    args = parser.parse_args(words)
    parts = args.parts.split(",")
    for option, given, known in (("parts", parts, PARTS), ("recipes", args.recipes.split(","), REAL_SIZES)):
        for name in given:
            if name not in known:
                parser.error(f"--{option} {name} is none of {', '.join(known)}")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch finds no GPU. Try the script itself with --device cpu")
    old = json.loads(args.out.read_text())["rows"] if args.out.is_file() else []
    rows = [row for row in old if row["part"] not in parts]
    with tempfile.TemporaryDirectory() as folder:
        for part in parts:
            rows += _in_its_own_process(
                part, args.device, folder, str(args.prompts), args.recipes, args.before, str(args.seconds)
            )
            args.out.write_text(json.dumps({**about(args.device), "rows": rows}, indent=2) + "\n")
    print(table(rows))
    return 1 if any("error" in row for row in rows) else 0


def _in_its_own_process(part: str, *words: str) -> list[Row]:
    """The rows of a part; a process that dies, such as after an illegal access on the GPU, adds one."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        code = "import sys, gpu; _, out, *words = sys.argv; gpu.measured(*words, gpu.Path(out))"
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])}
        done = subprocess.run([sys.executable, "-c", code, str(out), part, *words], env=environment, stdout=sys.stderr)
        rows = json.loads(out.read_text()) if out.exists() else []
    if done.returncode != 0:
        rows.append({"part": part, "what": "the part", "error": f"its process ended with status {done.returncode}"})
    return rows


if __name__ == "__main__":
    sys.exit(main())
