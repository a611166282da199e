"""An alarm for reward hacking."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import lightning as L
from lightning.pytorch.utilities import rank_zero_warn

from lit_vgrpo.callbacks.divergence import Divergence, Measurement, finite_mean
from lit_vgrpo.callbacks.diversity import HeldOutDiversity
from lit_vgrpo.callbacks.stop import StopsRun
from lit_vgrpo.core.gather import raise_together
from lit_vgrpo.core.ranges import PositiveInt, Range, checked
from lit_vgrpo.data.module import PromptDataModule
from lit_vgrpo.module import VGRPOModule
from lit_vgrpo.training.best_evaluation import TRAINED, UNTRAINED, NewestEvaluation

Action = Literal["warn", "stop"]
DIVERSITY = "heldout/diversity"


@checked
class RewardHackAlarm(StopsRun):
    """Warns or stops when the trained reward rises while an untrained score falls.

    After every evaluation the trained reward is compared with an untrained one, or with the diversity of each prompt's
    images, on the same held-out images. (Training images are not comparable, since their prompts change.) The baseline
    is the evaluation where the untrained score was highest. A change counts if it exceeds both a share of the baseline
    and two standard errors of the per-image differences. The warning is given once, until the divergence ends.

    Args:
        metric: the held-out metric that must not fall while ``heldout/reward`` rises; null uses only diversity.
        patience: consecutive evaluations.
        min_change: minimum rise and fall, as a share of the previous value.
        diversity: ``pixels``, or a feature network as for FID; null leaves it out. See ``HeldOutDiversity``.
        min_diversity_drop: minimum fall of the diversity, as a share; large, since learning to follow a prompt also
            makes its images more alike.
        action: warn and continue, or stop the run.

    Raises:
        ValueError: a number or action is invalid, or there is nothing to compare.
    """

    def __init__(
        self,
        metric: str | None = UNTRAINED,
        patience: PositiveInt = 3,
        min_change: Annotated[float, Range(least=0, below=1, example=0.02)] = 0.02,
        diversity: str | None = None,
        min_diversity_drop: Annotated[float, Range(least=0, below=1, example=0.5)] = 0.5,
        action: Action = "warn",
    ) -> None:
        if metric == TRAINED:
            raise ValueError(f"metric={metric} is the trained reward. Use {UNTRAINED}.")
        if metric is None and diversity is None:
            raise ValueError(f"metric=null leaves nothing to compare. Use {UNTRAINED}, or diversity=pixels.")
        self.metric = metric
        self.patience = patience
        self.action = action
        self.diversity = None if diversity is None else HeldOutDiversity(diversity)
        self.watches: dict[str, Divergence] = {}
        if metric is not None:
            self.watches[metric] = Divergence(min_change, min_change)
        if diversity is not None:
            self.watches[DIVERSITY] = Divergence(min_change, min_diversity_drop)
        self._newest = NewestEvaluation()

    @property
    def state_key(self) -> str:
        parts = {"watches": list(self.watches)}
        return f"{type(self).__qualname__}{parts}"

    def check(self, module: VGRPOModule, data: PromptDataModule) -> list[str]:
        """Return errors that can be found without loading weights, one line each."""
        errors = []
        if not data.has_heldout:
            errors.append("RewardHackAlarm needs held-out images, and there are none. Set data.heldout.")
        if self.metric == UNTRAINED and module.evaluator.untrained is None and self.diversity is None:
            errors.append(
                "RewardHackAlarm needs a reward that is not trained on. "
                "Add model.heldout_reward, such as PickScore, or the alarm's diversity=pixels."
            )
        return errors if self.diversity is None else [*errors, *self.diversity.check(data.heldout_images_per_prompt)]

    # --- hooks, in the order they fire -----------------------------------------------------------------------------

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        assert isinstance(pl_module, VGRPOModule)
        errors = self.check(pl_module, trainer.datamodule)  # type: ignore[attr-defined]
        raise_together(ValueError(errors[0]) if errors else None)
        if self.diversity is not None and self.diversity not in pl_module.evaluator.observers:
            pl_module.evaluator.observers.append(self.diversity)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._look(trainer, pl_module)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.diversity is not None:
            self.diversity.start_over()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._look(trainer, pl_module)

    def state_dict(self) -> dict[str, Any]:
        return {name: watch.state_dict() for name, watch in self.watches.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for name, watch in self.watches.items():
            if name in state_dict:
                watch.load_state_dict(state_dict[name])

    # --- the alarm -------------------------------------------------------------------------------------------------

    def _look(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Process the latest evaluation, once."""
        assert isinstance(pl_module, VGRPOModule)
        if not self._newest.is_new(pl_module.evaluator.step, trainer.global_step):
            return
        rang = []
        for name, watch in self.watches.items():
            if name in pl_module.evaluator.latest:
                now = self._measured(pl_module, name)
                if watch.add(now) == self.patience:  # warn once
                    rang.append(self._line(name, watch, now))
            elif name != UNTRAINED:
                rank_zero_warn(f"No evaluation measured {name}, which RewardHackAlarm needs.")
        # Rank 0 decides for all, so that none continues alone.
        rang = trainer.strategy.broadcast(rang)
        for line in rang if self.action == "warn" else []:
            advice = "raise model.objective.kl_weight (V-GRPO: with kl_to=reference)"
            rank_zero_warn(f"{line} Look at the samples, or {advice}.")
        if rang and self.action == "stop":
            self.end_run(trainer, "reward hacking", " ".join(rang))

    def _measured(self, module: VGRPOModule, name: str) -> Measurement:
        watched = self.diversity.of_prompts if name == DIVERSITY and self.diversity else self._values(module, name)
        return Measurement(module.evaluator.history[-1].iteration, self._values(module, TRAINED), watched)

    @staticmethod
    def _values(module: VGRPOModule, name: str) -> list[float]:
        """Return a held-out metric per image, or its mean if it is defined only for the whole set."""
        of_images = module.evaluator.of_images(name)
        return [module.evaluator.latest[name]] if of_images is None else of_images.tolist()

    def _line(self, name: str, watch: Divergence, now: Measurement) -> str:
        before = watch.reference
        assert before is not None
        trained, watched = (
            f"from {finite_mean(old):.4g} to {finite_mean(new):.4g}"
            for old, new in ((before.trained, now.trained), (before.watched, now.watched))
        )
        return (
            f"Reward hacking? Since iteration {before.iteration} {TRAINED} rose {trained} while {name} fell {watched}, "
            f"down for {self.patience} evaluations in a row."
        )
