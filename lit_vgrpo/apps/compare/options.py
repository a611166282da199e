"""Options of ``lightning compare``."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lit_vgrpo.config.recipe import Command, read_recipe, refuse_overrides
from lit_vgrpo.config.tree import Place, set_value
from lit_vgrpo.errors import UserError, suggestion

SETTINGS = ("published", "tuned")
DEFAULT_METHODS = ("vgrpo", "flowgrpo", "mixgrpo", "nft", "dgpo")
FIRST_SWEEP_SEED = 100
"""A sweep chooses settings on seeds that comparisons do not use."""
SWEEP_HELDOUT_FRACTION = 0.2
"""Share of the training prompts that a sweep evaluates on, so that it does not see the race's held-out prompts."""
INSTEAD = {
    "seed_everything": "Use --seeds and --first-seed.",
    "run_dir": "Use --out.",
    "name": "Use --out.",
    "trainer.max_epochs": "Use --iterations.",
    "trainer.check_val_every_n_epoch": "Use --evaluate-every.",
    **dict.fromkeys(
        ("ckpt_path", "trainer.max_steps", "trainer.logger", "trainer.enable_checkpointing", "model.evaluate_at_start"),
        "Leave it out.",
    ),
}


def read_names(text: str) -> list[str]:
    """Return the names, which commas separate; raise UserError if there is none, or one is there twice."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise UserError(f"{text!r} names nothing. Separate names with commas: a,b.")
    if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise UserError(*(f"names {name} twice." for name in twice))
    return names


def read_settings(text: str) -> list[str]:
    """Return the names of settings, see :func:`read_names`."""
    names = read_names(text)
    if unknown := [name for name in names if name not in SETTINGS]:
        raise UserError(*(f"{name} is not one of the settings. {suggestion(name, SETTINGS)}" for name in unknown))
    return names


def read_rewards(text: str) -> list[float]:
    """Return the numbers in ascending order, which commas separate; raise UserError if one is not a finite number."""
    numbers, errors = set(), []
    for word in filter(None, map(str.strip, text.split(","))):
        try:
            number = float(word)
        except ValueError:
            number = math.nan
        if math.isfinite(number):
            numbers.add(number)
        else:
            errors.append(f"{word} is not a number. Give a held-out reward such as 0.7, or several: 0.6,0.7.")
    if errors:
        raise UserError(*errors)
    return sorted(numbers)


def sweep_prompts(base: dict[str, Any], overridden: Set[str]) -> tuple[str, str]:
    """Replace the recipe's held-out prompts by a share of its training prompts, in place.

    Prompts that the command line sets stay. So does a share that the recipe itself holds out by hash, since any other
    share would contain it or lie in it.

    Args:
        texts: Its values from the environment, as written.
        base: The base recipe as plain values.
        overridden: Keys that the command line sets.

    Returns:
        Which prompts the sweep is evaluated on, in a word or two and in full.
    """
    data = base.get("data")
    data = data if isinstance(data, dict) else {}
    if any(key in ("data", "data.heldout_fraction") or f"{key}.".startswith("data.heldout.") for key in overridden):
        return "prompts of the command line", "the held-out prompts that the command line sets"
    if data.get("heldout_fraction") is not None:
        text = "the recipe's own held-out prompts, which a comparison uses too: it holds them out of its training file"
        return "held-out prompts", text
    set_value(base, "data.heldout", None)
    set_value(base, "data.heldout_fraction", SWEEP_HELDOUT_FRACTION)
    return "training prompts", (
        f"training prompts held out by hash (data.heldout=null, data.heldout_fraction={SWEEP_HELDOUT_FRACTION}), "
        "none of the recipe's held-out prompts"
    )


@dataclass(kw_only=True)
class CompareOptions:
    """Options of ``lightning compare``, whose help describes the first ones.

    Attributes:
        words: The recipe and its overrides.
        line: The command as it was typed.
        command: The base recipe and its overrides.
        texts: Its values from the environment, as written.
        base: The base recipe as plain values; in a sweep with other held-out prompts, see :func:`sweep_prompts`.
        heldout_text: Which prompts the evaluation is on.
        heldout_kind: The same in a word or two.
    """

    words: Sequence[str]
    methods: list[str] = field(default_factory=lambda: list(DEFAULT_METHODS))
    num_seeds: Any = None
    first_seed: Any = None
    base_method: Any = None
    settings: list[str] | None = None
    targets: list[float] = field(default_factory=list)
    iterations: Any = None
    evaluate_every: int = 5
    jobs: Any = None
    out: Any = None
    sweep: bool = False
    line: str = "lightning compare"
    command: Command = field(init=False)
    texts: dict[Place, str] = field(init=False)
    base: dict[str, Any] = field(init=False)
    heldout_text: str = field(init=False, default="the recipe's held-out prompts")
    heldout_kind: str = field(init=False, default="held-out prompts")

    def __post_init__(self) -> None:
        refuse_overrides(self.words, {key: f"is set by the comparison. {advice}" for key, advice in INSTEAD.items()})
        self.command = Command.parse(self.words)
        recipe = read_recipe(self.command)
        self.base, self.texts = recipe.values, recipe.texts
        trainer = self.base.get("trainer")
        trainer = trainer if isinstance(trainer, dict) else {}
        given = {"settings": self.settings, "base": self.base_method}
        unused = [name for name, value in given.items() if self.sweep and value is not None]
        if unused:
            raise UserError(*(f"--{name} has no effect with --sweep. Leave it out." for name in unused))
        if self.sweep:
            keys = {key.rstrip("+") for key, _ in self.command.overrides}
            self.heldout_kind, self.heldout_text = sweep_prompts(self.base, keys)
        epochs = trainer.get("max_epochs")
        epochs = epochs if isinstance(epochs, int) and epochs > 0 else 60
        names = [Path(method).stem for method in self.methods]  # an overlay's own file goes by its stem
        self.base_method = self.base_method or names[0]
        if self.base_method not in names:
            raise UserError(
                f"--base {self.base_method} is not one of the methods. {suggestion(self.base_method, names)}"
            )
        self.num_seeds = self.num_seeds or (1 if self.sweep else 3)
        if self.first_seed is None:
            self.first_seed = FIRST_SWEEP_SEED if self.sweep else 0
        self.iterations = self.iterations or (max(1, epochs // 2) if self.sweep else epochs)
        self.evaluate_every = min(self.evaluate_every, self.iterations)
        self.jobs = self.jobs or (min(2, os.cpu_count() or 1) if trainer.get("accelerator") == "cpu" else 1)
        self.out = self.out or Path("runs", f"{'sweep' if self.sweep else 'compare'}-{self.command.recipe.stem}")
        self._refuse_anothers_results()

    def _refuse_anothers_results(self) -> None:
        own = self.command.recipe.stem
        for name in ("compare.json", "sweep.json"):
            try:
                other = json.loads((self.out / name).read_text())["recipe"]
            except (OSError, ValueError, KeyError, TypeError):
                continue  # no results there, or none that anything could be lost of
            if other != own:
                raise UserError(f"--out {self.out} holds the results of {other}. Give {own} a folder of its own.")

    @property
    def seeds(self) -> list[int]:
        """Seeds that every method is run with."""
        return list(range(self.first_seed, self.first_seed + self.num_seeds))
