"""Correlate the rewards of cheap scouts with those of full images, by solver and steps, before any training.

    python benchmarks/scouts.py

Every prompt gets 16 images from the same noise with each setting. For groups of 4 chosen among 8 and 16 scouts it
prints the rank correlation of the chosen scouts' and images' rewards, and the images' std within groups.
"""

from __future__ import annotations

import json

import torch
from torch import Tensor

from lit_vgrpo import RolloutSpec, SD3Policy
from lit_vgrpo.core.advantages import extremes, rank_correlation
from lit_vgrpo.core.sampling import rollout_batches
from lit_vgrpo.core.types import RolloutRequest
from lit_vgrpo.rewards import ShapesReward, Weighted
from lit_vgrpo.system.paths import resolve_path

PROMPTS, GROUP, MOST, FULL = 32, 4, 16, RolloutSpec("euler", 10)
SCOUTS = [RolloutSpec("euler", steps) for steps in (2, 3, 4, 6)] + [RolloutSpec("dpm++", steps) for steps in (2, 3, 4)]


def main() -> None:
    torch.set_num_threads(1)
    lines = resolve_path("shipped:prompts/shapes_train.jsonl").read_text().splitlines()[:PROMPTS]
    rows = [json.loads(line) for line in lines]
    policy = SD3Policy("shipped:assets/tiny_sd3", max_sequence_length=1, decode_batch_size=32).load()
    reward = Weighted([ShapesReward(check=check) for check in ("colour", "shape", "place")])
    reward.load()

    def scored(spec: RolloutSpec) -> Tensor:
        """Return the rewards of all images, ``(P, S)``."""
        found: list[Tensor] = []

        prompts = [row["prompt"] for row in rows]
        request = RolloutRequest(prompts, rows, list(range(len(rows))), MOST, batch_size=64)
        for batch in rollout_batches(policy, request, spec):
            own = [rows[group] for group in batch.group_ids.tolist()]
            found.append(reward.score(policy.decode(batch.latents), [row["prompt"] for row in own], own).total)
        return torch.cat(found).view(len(rows), MOST)

    images = scored(FULL)
    print(f"images {FULL.solver} {FULL.steps}: std within groups of {GROUP}, unchosen: {spread(images[:, :GROUP]):.3f}")
    for spec in SCOUTS:
        scouts = scored(spec)
        words = [f"scouts {spec.solver} {spec.steps}"]
        for factor in (2, 4):
            chosen = extremes(scouts[:, : factor * GROUP], GROUP)
            ours = images.gather(1, chosen)
            correlation = rank_correlation(scouts.gather(1, chosen), ours)
            words.append(f"factor {factor}: correlation {correlation:.2f}, std {spread(ours):.3f}")
        print("; ".join(words), flush=True)


def spread(rewards: Tensor) -> float:
    """Return the root mean variance within groups ``(P, G)``."""
    return float(rewards.var(dim=1, correction=0).mean().sqrt())


if __name__ == "__main__":
    main()
