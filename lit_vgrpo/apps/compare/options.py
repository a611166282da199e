"""Options of ``lightning compare``."""

from __future__ import annotations

import json
import os
from collections.abc import Set
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lit_vgrpo.config.recipe import Command, read_recipe, refuse_overrides, shipped
from lit_vgrpo.config.tree import Place, set_value
from lit_vgrpo.errors import UserError, suggestion
from lit_vgrpo.options import COMPARED, Compare
from lit_vgrpo.system.paths import read_regular

SETTINGS = ("published", "tuned")
FIRST_SWEEP_SEED = 100
"""A sweep chooses settings on seeds that comparisons do not use."""
SWEEP_HELDOUT_FRACTION = 0.2
"""Share of the training prompts that a sweep evaluates on, so that it does not see the race's held-out prompts."""
REFUSED = (
    *("seed_everything", "run_dir", "name", "ckpt_path", "model.evaluate_at_start", "trainer.max_epochs"),
    *("trainer.max_steps", "trainer.check_val_every_n_epoch", "trainer.logger", "trainer.enable_checkpointing"),
)


def read_names(text: str) -> list[str]:
    """Return the comma-separated names, each once."""
    return list(dict.fromkeys(filter(None, map(str.strip, text.split(",")))))


def set_sweep_prompts(base: dict[str, Any], overridden: Set[str]) -> str:
    """Replace the recipe's held-out prompts by a share of its other training prompts, in place; return their name.

    Prompts set on the command line, by the ``overridden`` keys, are kept. A share that the recipe itself holds out by
    hash is kept too, since any other share would contain it or lie in it.
    """
    if any(key in ("data", "data.heldout_fraction") or f"{key}.".startswith("data.heldout.") for key in overridden):
        return "prompts of the command line"
    if base.get("data", {}).get("heldout_fraction") is not None:
        return "held-out prompts"
    if base.get("data", {}).get("heldout") is not None:
        set_value(base, "data.exclude", base["data"]["heldout"])
    set_value(base, "data.heldout", None)
    set_value(base, "data.heldout_fraction", SWEEP_HELDOUT_FRACTION)
    return "training prompts"


@dataclass(kw_only=True)
class CompareOptions(Compare):
    """Options of ``lightning compare``.

    Attributes:
        methods: Names of shipped overlays, or files.
        settings: Kinds of settings; ``None`` takes all that an overlay has.
        texts: Its values from the environment, as written.
        base: The base recipe as plain values; in a sweep with other held-out prompts, see :func:`set_sweep_prompts`.
        prompts: Name of the prompts that methods are evaluated on.
    """

    methods: list[str] = field(init=False)
    settings: list[str] | None = field(init=False)
    targets: list[float] = field(init=False)
    command: Command = field(init=False)
    texts: dict[Place, str] = field(init=False)
    base: dict[str, Any] = field(init=False)
    prompts: str = field(init=False, default="held-out prompts")

    def __post_init__(self) -> None:
        self.methods = read_names(self.named or "") or read_names(COMPARED)
        self.settings = None if self.kinds is None else read_names(self.kinds)
        if not set(self.settings or ()) <= set(SETTINGS):
            raise UserError(f"--settings {self.kinds} is not published, tuned or published,tuned.")
        try:
            self.targets = sorted({float(word) for word in read_names(self.target or "")})
        except ValueError as error:
            advice = "is not a held-out reward such as 0.7, or several: 0.6,0.7."
            raise UserError(f"--target {self.target} {advice}") from error
        if self.named and (others := [word for word in self.words[1:] if word in shipped("compare")]):
            raise UserError(f"Separate methods by commas: --methods {','.join([self.named, *others])}")
        refuse_overrides(self.words, dict.fromkeys(REFUSED, "is set by the comparison. Use its options."))
        self.command = Command.parse(self.words)
        recipe = read_recipe(self.command)
        self.base, self.texts = recipe.values, recipe.texts
        if self.sweep:
            self.prompts = set_sweep_prompts(self.base, {key.rstrip("+") for key, _ in self.command.overrides})
        names = [Path(method).stem for method in self.methods]  # an overlay file's method is its stem
        self.base_method = self.base_method or names[0]
        if self.base_method not in names:
            meant = suggestion(self.base_method, names)
            raise UserError(f"--base {self.base_method} is not one of the methods. {meant}")
        trainer = self.base.get("trainer", {})
        epochs = trainer.get("max_epochs") or 60
        self.num_seeds = self.num_seeds or (1 if self.sweep else 3)
        self.iterations = self.iterations or (max(1, epochs // 2) if self.sweep else epochs)
        self.evaluate_every = min(self.evaluate_every, self.iterations)
        self.jobs = self.jobs or (min(2, os.cpu_count() or 1) if trainer.get("accelerator") == "cpu" else 1)
        name = "sweep" if self.sweep else "compare"
        self.out = self.out or Path("runs", f"{name}-{self.command.recipe.stem}")

    def refuse_others_results(self) -> None:
        """Raise UserError if the folder has results of another comparison, whose runs would be repeated."""
        earlier = self.out / ("sweep.json" if self.sweep else "compare.json")
        mine = {"iterations": self.iterations, "evaluate_every": self.evaluate_every}
        others = "another recipe or override"
        with suppress(OSError, ValueError, AttributeError):
            found = json.loads(read_regular(earlier)) if earlier.exists() else {"task": self.task}
            if found.get("task") == self.task:
                lengths = {name: found.get(name, own) for name, own in mine.items() if found.get(name, own) != own}
                others = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in lengths.items())
        if others:
            raise UserError(f"{earlier} has results of {others}. Choose another folder: --out DIR.")

    @property
    def task(self) -> list[str]:
        """The names of the recipe and its overlays, and the overrides."""
        names = [file.stem for file in (self.command.recipe, *self.command.overlays)]
        return [*names, *sorted(f"{key}={text}" for key, text in self.command.overrides)]

    @property
    def seeds(self) -> list[int]:
        """Seeds that every method is run with."""
        first = FIRST_SWEEP_SEED if self.sweep else 0
        return list(range(first, first + self.num_seeds))
