"""Sampling and scoring of a benchmark's images; scores are appended batch by batch, so that a run can continue."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from pydantic_core import to_json

from lit_vgrpo.core.types import RolloutSpec
from lit_vgrpo.data.benchmark import SAME_SCORES, Benchmark
from lit_vgrpo.data.datasets import HeldOutDataset
from lit_vgrpo.data.prompts import Rows
from lit_vgrpo.errors import UserError, say
from lit_vgrpo.policies.base import Policy
from lit_vgrpo.rewards import RewardError, Weighted
from lit_vgrpo.system.hub import LoadError
from lit_vgrpo.system.process import bar
from lit_vgrpo.training.evaluation import Evaluator
from lit_vgrpo.training.resume_guard import hashed

KEPT = "Scores so far are kept: run the same command to continue."


@dataclass
class Subject:
    """A model with a set of weights, one column of the table.

    Args:
        identity: What determines its images apart from the benchmark: model, weights and options.
        solver: The ODE solver that samples them.
        load: Returns the loaded policy.
        scores: Each reward's score by image index, NaN if it failed; image ``i`` belongs to prompt
            ``i // images_per_prompt``.
        errors: Last error of each reward that failed for some image.
        stem: Name of the score files without suffix; it differs for other images or scorers.
    """

    label: str
    identity: dict[str, Any]
    solver: str
    load: Callable[[], Policy]
    folder: Path
    scores: dict[int, dict[str, float]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    stem: str = ""

    def set_stem(self, benchmark: Benchmark, rows: Rows, scorer: str) -> None:
        """Set the name of the score files, for scorers with this hash."""
        settings = benchmark.model_dump(include={"images_per_prompt", "height", "width", "steps", "guidance", "seed"})
        parts = [self.identity, self.solver, settings, _without_addresses(benchmark.reward), scorer, rows]
        key = sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()
        self.stem = f"{benchmark.name}-{key[:10]}"

    def read(self) -> None:
        """Read the scores so far; an unfinished line of a killed process is ignored."""
        for file in sorted(self.folder.glob(f"{self.stem}*.jsonl")):
            for line in file.read_text().splitlines():
                with suppress(ValueError):
                    self.add(json.loads(line))

    def add(self, batch: Mapping[str, Any]) -> None:
        """Add a batch: its ``images``, their ``scores`` by reward, ``None`` if one failed, and ``errors``.

        A failure does not replace an earlier score.
        """
        for number, *values in zip(batch["images"], *batch["scores"].values(), strict=True):
            scores = {name: value for name, value in zip(batch["scores"], values, strict=True) if value is not None}
            self.scores[number] = dict.fromkeys(batch["scores"], math.nan) | self.scores.get(number, {}) | scores
        self.errors |= batch["errors"]


def _without_addresses(node: Any) -> Any:
    """Return a scorer's plain values without the options that do not change its scores."""
    if isinstance(node, dict):
        return {key: _without_addresses(value) for key, value in node.items() if key not in SAME_SCORES}
    return [_without_addresses(value) for value in node] if isinstance(node, list) else node


def fill(
    subjects: Sequence[Subject], benchmark: Benchmark, rows: Rows, reward: Weighted, share: tuple[int, int] = (1, 1)
) -> None:
    """Sample and score the images without scores, and those that a reward failed on; an interruption changes nothing.

    Args:
        share: ``(2, 8)`` takes the second of eight shares of the images, for eight processes.

    Raises:
        UserError: A model or a scorer cannot be loaded, or a scorer cannot continue; scores so far are kept.
    """
    try:
        dataset = HeldOutDataset(rows, benchmark.images_per_prompt, benchmark.batch_size, share[1], share[0] - 1)
        plans, scorer = [], hashed(reward)  # with its code, before loading changes its attributes
        for subject in subjects:
            subject.set_stem(benchmark, rows, scorer)
            subject.read()
            done = {image for image, scores in subject.scores.items() if all(map(math.isfinite, scores.values()))}
            plans.append([index for index, part in enumerate(dataset.parts) if not done.issuperset(part)])
        total = len(subjects) * sum(map(len, dataset.parts))
        done_before = total - sum(len(dataset.parts[index]) for plan in plans for index in plan)
        if any(plans):
            reward.load()
        with bar(benchmark.name, total=total, initial=done_before, leave=True) as seen:
            for subject, plan in zip(subjects, plans, strict=True):
                if plan:
                    seen.set_postfix_str(subject.label)
                    _fill_one(subject, benchmark, reward, share, [dataset[index] for index in plan], seen)
    except (LoadError, ModuleNotFoundError, ValueError) as error:
        raise UserError(str(error)) from error
    except RewardError as error:
        raise UserError(f"{error} {KEPT}") from error
    except KeyboardInterrupt:
        say(KEPT, error=True)
        raise
    finally:
        reward.close()


def _fill_one(
    subject: Subject, benchmark: Benchmark, reward: Weighted, share: tuple[int, int], batches: Any, bar: Any
) -> None:
    """Score the batches of one model."""
    policy = subject.load().to("cuda" if torch.cuda.is_available() else "cpu")
    spec = RolloutSpec(subject.solver, benchmark.steps, benchmark.guidance)
    evaluator = Evaluator(policy, reward, spec=spec, batch_size=benchmark.batch_size, seed=benchmark.seed)
    subject.folder.mkdir(parents=True, exist_ok=True)
    name = f"{subject.stem}.jsonl" if share == (1, 1) else f"{subject.stem}-{share[0]}of{share[1]}.jsonl"
    with (subject.folder / name).open("a") as file:
        for batch in batches:
            result = reward.score(evaluator.generate_batch(batch), batch.prompts, batch.rows)
            parts = {part: scores.tolist() for part, scores in result.parts.items()}
            line = {"images": batch.slots, "scores": parts, "errors": result.errors}
            text = to_json(line, inf_nan_mode="null").decode()
            file.write(f"\n{text}\n")  # an unfinished line of a killed process stays separate
            file.flush()
            subject.add(json.loads(text))
            bar.update(len(batch.slots))
