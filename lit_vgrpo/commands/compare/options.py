"""What was typed after ``lightning compare``."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_vgrpo.config.arguments import split_words, whole_number
from lit_vgrpo.config.recipe import Command, parse_command, read_recipe
from lit_vgrpo.errors import UserError, suggestion

VALUES = ("methods", "seeds", "first-seed", "target", "settings", "iterations", "evaluate-every", "jobs", "out")
FLAGS = ("sweep",)
SETTINGS = ("published", "tuned")
DEFAULT_METHODS = "vgrpo,flowgrpo,mixgrpo,nft,dgpo"
FIRST_SWEEP_SEED = 100
"""A sweep picks settings on seeds that no race is run with."""
INSTEAD = {
    "seed_everything": "--seeds and --first-seed",
    "run_dir": "--out",
    "name": "--out",
    "trainer.max_epochs": "--iterations",
    "trainer.check_val_every_n_epoch": "--evaluate-every",
}
FIXED = ("ckpt_path", "trainer.max_steps", "trainer.logger", "trainer.enable_checkpointing", "model.evaluate_at_start")


@dataclass
class Options:
    """The parsed command line.

    Attributes:
        command: the base recipe and its overrides.
        base: the base recipe as plain values.
        settings: ``None`` takes what each overlay has.
        targets: held-out rewards whose cost is wanted, ascending.
    """

    command: Command
    base: dict[str, Any]
    words: list[str]
    methods: list[str]
    seeds: list[int]
    settings: list[str] | None
    targets: list[float]
    iterations: int
    evaluate_every: int
    jobs: int
    out: Path
    sweep: bool

    @property
    def line(self) -> str:
        """The command as it was typed."""
        return shlex.join(["lightning", "compare", *self.words])


def parse_options(args: Sequence[str]) -> Options:
    """Take our options out of the words; the rest is a recipe and its overrides.

    Raises:
        UserError: with every fault of the options that was found.
    """
    taken = {key: f"is set by the comparison. Use {option}." for key, option in INSTEAD.items()}
    given, rest = split_words(args, "compare", VALUES, FLAGS, taken)
    command = parse_command(rest)
    faults = [f"{key} {taken[key]}" for key, _ in command.overrides if key in taken]
    faults += [f"{key} is set by the comparison. Leave it out." for key, _ in command.overrides if key in FIXED]
    base = read_recipe(command)
    sweep = "sweep" in given
    trainer = base.get("trainer")
    trainer = trainer if isinstance(trainer, dict) else {}
    epochs = trainer.get("max_epochs")
    usual = epochs if isinstance(epochs, int) and epochs > 0 else 60
    if sweep:
        usual = max(1, usual // 2)
    on_cpu = trainer.get("accelerator") == "cpu"
    defaults = {
        "seeds": 1 if sweep else 3,
        "first-seed": FIRST_SWEEP_SEED if sweep else 0,
        "iterations": usual,
        "evaluate-every": 5,
        "jobs": min(2, os.cpu_count() or 1) if on_cpu else 1,
    }
    numbers = {}
    for name, default in defaults.items():
        least = 0 if name == "first-seed" else 1
        numbers[name] = whole_number(name, given.get(name, str(default)), least, max(least, 3), faults)
    settings = _names("settings", given["settings"], faults) if "settings" in given else None
    for name in settings or []:
        if name not in SETTINGS:
            faults.append(f"--settings {name} is not one of the settings. {suggestion(name, SETTINGS)}")
    if sweep:
        faults += [
            f"--{name} has no effect with --sweep. Leave it out." for name in ("settings", "target") if name in given
        ]
    methods = _names("methods", given.get("methods", DEFAULT_METHODS), faults)
    targets = _targets(given.get("target", ""), faults)
    if faults:
        raise UserError(*faults)
    seeds = list(range(numbers["first-seed"], numbers["first-seed"] + numbers["seeds"]))
    kind = "sweep" if sweep else "compare"
    return Options(
        command=command,
        base=base,
        words=list(args),
        methods=methods,
        seeds=seeds,
        settings=settings,
        targets=targets,
        iterations=numbers["iterations"],
        evaluate_every=min(numbers["evaluate-every"], numbers["iterations"]),
        jobs=numbers["jobs"],
        out=Path(given.get("out", f"runs/{kind}-{command.recipe.stem}")).expanduser(),
        sweep=sweep,
    )


def _names(name: str, text: str, faults: list[str]) -> list[str]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        faults.append(f"--{name} {text!r} names nothing. Write --{name} a,b.")
    faults += [f"--{name} names {word} twice." for word in dict.fromkeys(words) if words.count(word) > 1]
    return words


def _targets(text: str, faults: list[str]) -> list[float]:
    targets = []
    for word in filter(None, (part.strip() for part in text.split(","))):
        try:
            value = float(word)
        except ValueError:
            value = float("nan")
        if value - value != 0:  # nan and inf
            faults.append(f"--target {word} is not a number. Give a held-out reward such as 0.7, or several: 0.6,0.7.")
        else:
            targets.append(value)
    return sorted(set(targets))
