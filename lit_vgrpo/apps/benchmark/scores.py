"""Sampling and scoring of a benchmark's images, appended to a file batch by batch, so that it can continue."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from lit_vgrpo.apps.benchmark.preset import SAME_SCORES, Benchmark
from lit_vgrpo.core.types import RolloutSpec
from lit_vgrpo.data.datasets import HeldOutDataset
from lit_vgrpo.data.prompts import Rows
from lit_vgrpo.errors import UserError, say
from lit_vgrpo.policies.base import Policy
from lit_vgrpo.rewards import RewardError, Weighted
from lit_vgrpo.system.hub import LoadError
from lit_vgrpo.training.evaluation import Evaluator

Scores = dict[int, dict[str, float]]
"""By image number, each reward's score; NaN if it failed. Image ``i`` is of prompt ``i // images_per_prompt``."""


@dataclass
class Subject:
    """A model with a set of weights, one column of the table.

    Args:
        label: Its name in the table.
        identity: What determines its images apart from the benchmark: model, weights and options.
        solver: The ODE solver that samples them.
        load: Returns the loaded policy.
        folder: Folder of its scores.
    """

    label: str
    identity: dict[str, Any]
    solver: str
    load: Callable[[], Policy]
    folder: Path
    scores: Scores = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)

    def stem(self, benchmark: Benchmark, rows: Rows) -> Path:
        """Return the path of the score files without suffix; other images or scorers have another."""
        settings = benchmark.model_dump(include={"images_per_prompt", "height", "width", "steps", "guidance", "seed"})
        parts = [self.identity, self.solver, settings, _without_addresses(benchmark.reward), rows]
        key = sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()
        return self.folder / f"{benchmark.name}-{key[:10]}"

    def read(self, stem: Path) -> None:
        """Read the scores so far; the line of a batch that was being written is ignored."""
        for file in sorted(stem.parent.glob(f"{stem.name}*.jsonl")):
            for line in file.read_text(encoding="utf-8").splitlines():
                try:
                    batch = json.loads(line)
                except ValueError:
                    continue
                for number, *values in zip(batch["images"], *batch["scores"].values(), strict=True):
                    scores = [math.nan if value is None else value for value in values]
                    self.scores[number] = dict(zip(batch["scores"], scores, strict=True))
                self.errors |= batch["errors"]


def _without_addresses(node: Any) -> Any:
    """Return a scorer's plain values without the options that do not change its scores."""
    if isinstance(node, dict):
        return {key: _without_addresses(value) for key, value in node.items() if key not in SAME_SCORES}
    return [_without_addresses(value) for value in node] if isinstance(node, list) else node


def fill(
    subjects: Sequence[Subject], benchmark: Benchmark, rows: Rows, reward: Weighted, share: tuple[int, int] = (1, 1)
) -> None:
    """Sample and score the images that have no scores yet, and those that a reward failed to score.

    Batches are the same whether or not an evaluation was interrupted, and so are the scores.

    Args:
        share: ``(2, 8)`` takes the second of eight shares of the images, for as many processes.

    Raises:
        UserError: A model or a scorer cannot be loaded, or a scorer cannot continue; scores so far are kept.
    """
    number, shares = share
    dataset = HeldOutDataset(rows, benchmark.images_per_prompt, benchmark.batch_size, shares, number - 1)
    plans = []
    for subject in subjects:
        stem = subject.stem(benchmark, rows)
        subject.read(stem)
        done = {image for image, scores in subject.scores.items() if all(map(math.isfinite, scores.values()))}
        plans.append([index for index, part in enumerate(dataset.parts) if not done.issuperset(part)])
    left = sum(len(dataset.parts[index]) for plan in plans for index in plan)
    total = len(subjects) * sum(map(len, dataset.parts))
    with tqdm(None, benchmark.name, total, initial=total - left, unit="image", disable=not sys.stderr.isatty()) as bar:
        try:
            if left:
                reward.load()
            for subject, plan in zip(subjects, plans, strict=True):
                for index in plan and _fill_one(subject, benchmark, rows, reward, dataset, plan, share):
                    bar.update(index)
        except (LoadError, ModuleNotFoundError, ValueError) as error:
            raise UserError(str(error)) from error
        except RewardError as error:
            raise UserError(f"{error} Scores so far are kept: run the same command to continue.") from error
        except KeyboardInterrupt:
            say("Scores so far are kept: run the same command to continue.", error=True)
            raise
        finally:
            reward.close()


def _fill_one(
    subject: Subject,
    benchmark: Benchmark,
    rows: Rows,
    reward: Weighted,
    dataset: HeldOutDataset,
    plan: list[int],
    share: tuple[int, int],
) -> Any:
    """Score the batches of a plan; yield the number of images of each."""
    policy = subject.load().to("cuda" if torch.cuda.is_available() else "cpu")
    spec = RolloutSpec(subject.solver, benchmark.steps, benchmark.guidance)
    evaluator = Evaluator(policy, reward, spec=spec, batch_size=benchmark.batch_size, seed=benchmark.seed)
    stem = subject.stem(benchmark, rows)
    stem.parent.mkdir(parents=True, exist_ok=True)
    name = f"{stem.name}.jsonl" if share == (1, 1) else f"{stem.name}-{share[0]}of{share[1]}.jsonl"
    with (stem.parent / name).open("a", encoding="utf-8") as file:
        for index in plan:
            batch = dataset[index]
            found = reward.score(evaluator.generate_batch(batch), batch.prompts, batch.rows)
            parts = {part: scores.tolist() for part, scores in found.parts.items()}
            plain = {part: [x if math.isfinite(x) else None for x in values] for part, values in parts.items()}
            line = json.dumps({"images": batch.slots, "scores": plain, "errors": found.errors})
            file.write(f"\n{line}\n")  # a line that a killed process left unfinished stays a line
            file.flush()
            for place, image in enumerate(batch.slots):
                subject.scores[image] = {part: values[place] for part, values in parts.items()}
            subject.errors |= found.errors
            yield len(batch.slots)
