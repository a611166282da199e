"""``gpu.py --parts as_typed``: a recipe as typed, in an earlier build and in this one, and every switch alone.

    git archive --prefix=before/ COMMIT | tar -x -C build    # where git is not at hand, such as on a lent GPU
    python benchmarks/gpu.py --parts as_typed --before build/before
    python benchmarks/gpu.py --parts as_typed --before COMMIT --dry-run    # the same code on the CPU, with a tiny model

First whole iterations: before, now, before, now, then this build with each switch that acts on all of it. Then, in one
process, each other switch in its phase, between two measurements without it. A switch's gain is its share of the
iteration that was measured first. What does not fit into ``--seconds`` is left out, the switches of least worth first.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

HERE = Path(__file__).parent
RECIPE = "sd3_pickscore_fast"
LEAST_GAIN = 0.03
"""Share of an iteration that a switch must save to become the default."""
MOST_LEVELS, LEAST_RANK_CORRELATION = 0.5, 0.999
"""What a switch may do to images, in grey levels, and to the order of scores."""
WHOLE = {"compile: true": ["model.policy.compile=true"], "compile: auto": ["model.policy.compile=auto"]}
"""Switches that act on all of an iteration, as overrides."""

Row = dict[str, Any]


# --- whole iterations, in a process each ---


def whole_iterations(build: Path, words: list[str], iterations: int, timeout: float) -> Row:
    """Return seconds by phase of a build's iterations, and how many graphs were compiled by the end of each.

    Raises:
        RuntimeError: The process failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        given = json.dumps([str(build), words, iterations, str(out)])
        code = f"import sys; sys.path.append({str(HERE)!r}); import as_typed; as_typed.measure_build(*{given})"
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(build), os.environ.get("PYTHONPATH", "")])}
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, cwd=build, stdout=sys.stderr, timeout=timeout
        )
        if done.returncode != 0:
            raise RuntimeError(f"{build}: {' '.join(words)} ended with status {done.returncode}")
        found: Row = json.loads(out.read_text())
    return found


def measure_build(build: str, words: list[str], iterations: int, out: str) -> None:
    """Measure the build that this process imports."""
    sys.path.insert(0, f"{build}/benchmarks")
    import overhead
    from torch._dynamo.utils import counters

    import lit_vgrpo

    assert Path(lit_vgrpo.__file__).is_relative_to(build), f"{lit_vgrpo.__file__} is not of {build}"
    if any(word.startswith("model.policy.compile") for word in words):
        from lit_vgrpo.policies import acceleration
        from lit_vgrpo.training import compilation

        compilation.FEWEST_PASSES = 0  # however short the run is
        if not torch.cuda.is_available():
            compilation.can_compile = lambda policy: policy.compile_network == "auto"
            compilation.compile_for_run.__defaults__ = ("eager",)
            acceleration.compile_network.__defaults__ = ("eager", True, None)
    graphs, end = [], overhead.Stopwatch._end_iteration

    def end_and_count(watch: Any) -> None:
        end(watch)
        graphs.append(counters["stats"]["unique_graphs"])

    overhead.Stopwatch._end_iteration = end_and_count
    started = time.perf_counter()
    found = overhead.measure(words[0], iterations, words[1:])
    found |= {"graphs": graphs, "wall": time.perf_counter() - started}
    Path(out).write_text(json.dumps(found))


def phases(seconds: dict[str, float]) -> dict[str, float]:
    """Return an iteration's seconds by the phases that switches act on."""
    found = dict.fromkeys(("rollout", "decode", "reward", "update", "rest"), 0.0)
    for name, value in seconds.items():
        is_update = name.startswith(("forward", "backward", "pairs", "optimizer"))
        phase = (
            "rollout" if name == "forward, rollout" else name if name in found else "update" if is_update else "rest"
        )
        found[phase] += value
    return found


# --- switches of one phase, in one process ---


@dataclass
class Bench:
    """The loaded parts of a recipe, and what each phase works on.

    Attributes:
        images: Images per phase, one group.
    """

    module: Any
    images: int

    def __post_init__(self) -> None:
        from lit_vgrpo.core.noise import image_generators

        self.policy, self.reward = self.module.policy, self.module.reward.leaves()[0]
        self.policy.decode_dtype, self.policy._tries_float16 = torch.float32, False
        self.cond = self.policy.encode(["a red cat"], self.policy.blank_references(1))
        self.rows = torch.zeros(self.images, dtype=torch.int64, device=self.policy.device)
        self.noise = self.policy.prior(image_generators(1, 0, 0, range(self.images)))
        self.pixels = self.policy.decode(self.noise)

    @torch.no_grad()
    def rollout(self) -> Tensor:
        t = torch.full((self.images,), 0.5, device=self.policy.device)
        for _ in range(4):
            prediction: Tensor = self.policy(self.noise, t, self.cond.select(self.rows))
        return prediction

    def update(self) -> Tensor:
        size = min(self.images, 8)
        t = torch.full((size,), 0.5, device=self.policy.device)
        prediction: Tensor = self.policy(self.noise[:size], t, self.cond.select(self.rows[:size]))
        prediction.square().mean().backward()
        self.policy.zero_grad()
        return prediction.detach()

    def decode(self) -> Tensor:
        return self.policy.decode(self.noise)

    def score(self) -> Tensor:
        return self.reward(self.pixels, ["a red cat"] * self.images, [{}] * self.images)

    def timed(self, phase: Callable[[], Tensor], repeats: int) -> tuple[float, Tensor]:
        """Return the fastest seconds after a first call, and the result."""
        result, best = phase(), float("inf")
        for _ in range(repeats):
            self.wait()
            start = time.perf_counter()
            result = phase()
            self.wait()
            best = min(best, time.perf_counter() - start)
        return best, result

    def wait(self) -> None:
        if self.noise.is_cuda:
            torch.cuda.synchronize()


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def scored_in(bench: Bench, dtype: torch.dtype) -> Iterator[None]:
    model = bench.reward._model
    exact = [(tensor, tensor.data) for tensor in (*model.parameters(), *model.buffers())]
    model.to(dtype)
    try:
        yield
    finally:
        for tensor, value in exact:
            tensor.data = value


@contextmanager
def vae_compiled(bench: Bench) -> Iterator[None]:
    decoder = bench.policy.pipeline.vae.decoder
    decoder.compile(backend="inductor" if bench.noise.is_cuda else "eager")
    try:
        yield
    finally:
        decoder._compiled_call_impl = None


@contextmanager
def adapters_uncast(bench: Bench) -> Iterator[None]:
    """peft casts a layer's input to the adapter's type, before autocast casts it back."""
    from lit_vgrpo.policies.acceleration import lora_layers

    layers = [*lora_layers(bench.policy.network).values()]
    with contextlib.ExitStack() as stack:
        for layer in layers:
            stack.enter_context(replaced(layer, "cast_input_dtype_enabled", False))
        yield


@contextmanager
def fused(bench: Bench) -> Iterator[None]:
    """An upper bound: the fused projections leave out the adapter."""
    bench.policy.network.fuse_qkv_projections()
    try:
        yield
    finally:
        bench.policy.network.unfuse_qkv_projections()


def attention(name: str) -> Callable[[Bench], AbstractContextManager[Any]]:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return lambda bench: sdpa_kernel(getattr(SDPBackend, name))


def in_float16(bench: Bench) -> AbstractContextManager[None]:
    return replaced(bench.policy, "decode_dtype", torch.float16)


SWITCHES: dict[str, tuple[str, Callable[[Bench], AbstractContextManager[Any]]]] = {
    "decode_dtype: float16": ("decode", in_float16),
    "reward dtype: bfloat16": ("reward", lambda bench: scored_in(bench, torch.bfloat16)),
    "reward dtype: float16": ("reward", lambda bench: scored_in(bench, torch.float16)),
    "VAE compiled": ("decode", vae_compiled),
    "decode_batch_size: 24": ("decode", lambda bench: replaced(bench.policy, "decode_batch_size", bench.images)),
    "attention: cuDNN": ("rollout", attention("CUDNN_ATTENTION")),
    "attention: flash": ("rollout", attention("FLASH_ATTENTION")),
    "adapters' inputs not cast, rollout": ("rollout", adapters_uncast),
    "adapters' inputs not cast, update": ("update", adapters_uncast),
    "QKV fused (without the adapter)": ("rollout", fused),
}
"""By name, in the order of worth: the phase, and a context in which the switch is on."""
PHASES = {"rollout": Bench.rollout, "update": Bench.update, "decode": Bench.decode, "reward": Bench.score}


def switched(bench: Bench, name: str, repeats: int) -> Row:
    """Return how many times as fast a phase is with a switch, and what the switch does to its result."""
    phase, switch = SWITCHES[name]
    run = lambda: PHASES[phase](bench)  # noqa: E731
    before, exact = bench.timed(run, repeats)
    with switch(bench):
        seconds, found = bench.timed(run, repeats)
    plain = min(before, bench.timed(run, repeats)[0])
    row: Row = {"phase": phase, "seconds": seconds, "without": plain, "times": plain / seconds}
    if phase == "decode":
        row["levels"] = float(255 * (found - exact).abs().max())
    elif phase == "reward":
        row["rank correlation"] = rank_correlation(found, exact)
    else:
        row["relative difference"] = float((found - exact).norm() / exact.norm())
    return row


def rank_correlation(one: Tensor, other: Tensor) -> float:
    """Return Spearman's correlation of two tensors ``(B,)``."""
    ranks = torch.stack([values.cpu().argsort().argsort().double() for values in (one, other)])
    return float(torch.corrcoef(ranks)[0, 1])


def load_bench(words: list[str], device: str, images: int, folder: Path) -> Bench:
    from lit_vgrpo.launch.build import build

    module = build([*words, f"run_dir={folder / 'switches'}"], make_folder=False).model
    module.configure_model()
    module.policy.to(device)
    return Bench(module, images)


# --- the result ---


def gain_of(row: Row, iteration: dict[str, float]) -> float:
    """Return the share of an iteration that a switch saves."""
    if "phases" in row:
        return 1 - sum(row["phases"].values()) / sum(iteration.values())
    return (1 - 1 / row["times"]) * iteration[row["phase"]] / sum(iteration.values())


def obstacle(row: Row) -> str | None:
    """Return why a switch does not become the default however much it saves, or ``None``."""
    if row.get("recompiled"):
        return f"{row['recompiled']} graphs compiled after the first iteration"
    if row.get("levels", 0) >= MOST_LEVELS:
        return f"{row['levels']:.2f} grey levels"
    if row.get("rank correlation", 1) < LEAST_RANK_CORRELATION:
        return f"rank correlation {row['rank correlation']:.4f}"
    return "without the adapter" if "without the adapter" in row["name"] else None


def report(rows: list[Row], device: str) -> str:
    """Return the tables in Markdown, and which defaults to move."""
    runs = [row for row in rows if row["part"] == "run"]
    lines = [f"# {RECIPE} as typed, {device}", "", "Seconds of an iteration, with two prompts:", ""]
    names = [*runs[0]["phases"]]
    lines += [f"| build | {' | '.join(names)} | iteration | graphs after the first | whole run |"]
    lines.append("|---" * (len(names) + 4) + "|")
    for row in runs:
        cells = [f"{value:.3g}" for value in (*row["phases"].values(), sum(row["phases"].values()))]
        lines.append(f"| {row['name']} | {' | '.join(cells)} | {row['recompiled']} | {row['wall']:.0f} |")
    now = [row for row in runs if row["name"] == "now"]
    base = {name: sum(row["phases"][name] for row in now) / len(now) for name in names}
    earlier = [sum(row["phases"].values()) for row in runs if row["name"] == "before"]
    if earlier:
        lines += [
            "",
            f"This build takes {sum(base.values()) * len(earlier) / sum(earlier):.3f} times as long as before.",
        ]
    lines += ["", "| switch | phase | times as fast | of an iteration | result |", "|---|---|--:|--:|---|"]
    moves = []
    for row in rows:
        if "error" in row:
            lines.append(f"| {row['name']} | | | | failed: {row['error']} |")
        if (row["part"] == "run" and row["name"] not in WHOLE) or "error" in row:
            continue
        gain, why_not = gain_of(row, base), obstacle(row)
        times = row.get("times") or 1 / (1 - gain)
        shown = [f"{key} {row[key]:.4g}" for key in ("levels", "rank correlation", "relative difference") if key in row]
        result = ", ".join(shown) or f"{row['recompiled']} graphs after the first iteration"
        lines.append(f"| {row['name']} | {row.get('phase', 'all')} | {times:.2f} | {gain:+.1%} | {result} |")
        if gain >= LEAST_GAIN:
            moves.append(f"- {row['name']}: {gain:.1%}" + (f", but not: {why_not}." if why_not else "."))
    found = moves or ["- none."]
    return "\n".join([*lines, "", f"Defaults to move, since they save {LEAST_GAIN:.0%} or more:", "", *found, ""])


@contextmanager
def earlier_build(before: str, folder: Path) -> Iterator[Path]:
    """Provide an earlier build: the given folder, or a git worktree of the given commit."""
    if Path(before).is_dir():
        yield Path(before).resolve()
        return
    tree, git = folder / "before", ["git", "-C", str(HERE.parent), "worktree"]
    subprocess.run([*git, "add", "--detach", str(tree), before], check=True, stdout=sys.stderr)
    try:
        yield tree
    finally:
        subprocess.run([*git, "remove", "--force", str(tree)], check=True, stdout=sys.stderr)


def measure(
    words: list[str], before: str | None, device: str, folder: Path, seconds: float, say: Callable[[list[Row]], None]
) -> None:
    """Measure in the order of worth until the time is over; call ``say`` with all rows after each.

    Args:
        words: The recipe and its overrides.
        before: Folder or commit of the earlier build; ``None`` measures this one alone.
        seconds: Nothing more is started after this time.
    """
    rows: list[Row] = []
    started, is_gpu = time.perf_counter(), device.startswith("cuda")
    iterations, images = (2, 24) if is_gpu else (1, 2)

    def add(part: str, name: str, step: Callable[[], Row]) -> None:
        left = seconds - (time.perf_counter() - started)
        row: Row = {"part": part, "name": name}
        try:
            row |= step() if left > 0 else {"error": f"left out after {seconds:.0f} s"}
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {error}".splitlines()[0]
        rows.append(row if "error" not in row else {**row, "part": "failed"})
        say(rows)

    def run(build: Path, more: list[str]) -> Row:
        left = seconds - (time.perf_counter() - started)
        found = whole_iterations(build, [*words, *more], iterations, left + 60)
        graphs = found["graphs"]  # the first is before the first iteration
        return {"phases": phases(found["seconds"]), "recompiled": graphs[-1] - graphs[1], "wall": found["wall"]}

    with contextlib.ExitStack() as stack:
        old = None if before is None else stack.enter_context(earlier_build(before, folder))
        for _ in range(2 if is_gpu else 1):
            if old is not None:
                add("run", "before", lambda: run(old, []))
            add("run", "now", lambda: run(HERE.parent, []))
    for name, more in WHOLE.items():
        add("run", name, lambda m=more: run(HERE.parent, m))
    bench: list[Bench] = []

    def one(name: str) -> Row:
        if not bench:
            bench.append(load_bench(words, device, images, folder))
        return switched(bench[0], name, 3 if is_gpu else 1)

    for name in SWITCHES:
        add("switch", name, lambda n=name: one(n))
