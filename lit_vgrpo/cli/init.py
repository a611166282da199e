"""``lightning init``: write a folder with a recipe, prompts and a reward to start from."""

from __future__ import annotations

import json
import re
from pathlib import Path

from lit_vgrpo.config.recipe import RECIPE_NAME, STAGES, find_recipe, loaded
from lit_vgrpo.core.pictures import PICTURE
from lit_vgrpo.errors import UserError, say, shell_line
from lit_vgrpo.system.hub import local_folder
from lit_vgrpo.system.paths import SHIPPED_PREFIX, shipped_root, vacant_folder, write_new_folder

STARTER = "starter"
"""Shipped folder with the files."""
FILES = (RECIPE_NAME, "train.txt", "heldout.txt", "reward.py")
POLICY = re.compile(r"^  policy:\n(?:    .*\n)+", re.MULTILINE)
LEARNED = """  policy:
    checkpoint: {checkpoint}  # any pipeline of diffusers: docs/any_pipeline.md
    lora_rank: 32
    lora_alpha: 64
    dtype: bfloat16
    gradient_checkpointing: true
"""
ODE_SOLVER = re.compile(r"(?<=\{)solver: (?:euler|dpm\+\+|unipc|ddim), ")
"""Chosen for a recipe's own pipeline; without it, another pipeline's own solver is used."""
NAME = "my_run"
"""Name in the files, replaced by the new folder's."""


def write_starter(text: str, source: str | None = None, checkpoint: str | None = None) -> int:
    """Write a recipe, prompts and a reward that run unchanged on a tiny pipeline, or copy a source and its prompts.

    Args:
        text: The folder to write, new or empty; its name, with _ for other characters, becomes the run's.
        checkpoint: Train a LoRA of this pipeline instead, whatever its class is.
    """
    name = re.sub(r"[^\w.-]+", "_", Path(text).expanduser().absolute().name).lstrip("-.")
    if not name:
        raise UserError(f"{text!r} cannot name a run. Use letters, digits, '_', '-' and '.': lightning init {NAME}")
    folder = vacant_folder(text)
    files = _starter(name, folder) if source is None else _copy_of(source, name)
    if checkpoint is not None:
        place = json.dumps(str(local.absolute()) if (local := local_folder(checkpoint)) is not None else checkpoint)
        recipe = POLICY.sub(lambda _: LEARNED.format(checkpoint=place), files[RECIPE_NAME], count=1)
        files[RECIPE_NAME] = ODE_SOLVER.sub("", recipe)
    with write_new_folder(folder, "Choose another folder.") as draft:
        for file, content in files.items():
            (draft / file).write_text(content, encoding="utf-8")
    enter = shell_line("cd", folder)
    say(f"Wrote {', '.join(files)} to {shell_line(folder)}.")
    if source is not None or checkpoint is not None:
        say(f"Find errors and estimate memory, then train:\n  {enter} && lightning check {RECIPE_NAME} --memory 80GiB")
        say(f"  lightning run {RECIPE_NAME}")
        return 0
    say(
        f"Try the reward on a few images, then train on the tiny pipeline:\n  {enter} && lightning check-reward "
        f"{RECIPE_NAME}\n  lightning run {RECIPE_NAME}\n"
        f"For a real model, change the lines marked CHANGE in {RECIPE_NAME}, then the prompts, reward.py, steps and "
        "iterations.\nOr start from a real recipe: lightning init FOLDER --from sd3_pickscore"
    )
    return 0


def _starter(name: str, folder: Path) -> dict[str, str]:
    files = {file: (shipped_root() / STARTER / file).read_text(encoding="utf-8") for file in FILES}
    enter = shell_line("cd", folder.resolve().name)
    return {file: text.replace(f"cd {NAME} ", f"{enter} ").replace(NAME, name) for file, text in files.items()}


def _copy_of(source: str, name: str) -> dict[str, str]:
    """Return the texts of a recipe and its shipped prompts, by file name."""
    path = find_recipe(source)
    if stages := loaded(path).get(STAGES):
        raise UserError(f"{source} is a curriculum of several recipes. Copy one of them: --from {stages[0]}")
    text, files = path.read_text(encoding="utf-8"), {RECIPE_NAME: ""}
    for prompts in dict.fromkeys(re.findall(rf"{SHIPPED_PREFIX}(prompts/[\w.]+)", text)):
        content = (shipped_root() / prompts).read_text(encoding="utf-8")
        if f'"{PICTURE}"' not in content:  # else the rows name pictures by paths relative to the file
            files[Path(prompts).name] = content
            text = text.replace(f"{SHIPPED_PREFIX}{prompts}", Path(prompts).name)
    text = re.sub(rf"lightning run {path.stem}\b", f"lightning run {RECIPE_NAME}", text)
    files[RECIPE_NAME] = re.sub(
        r"^(?=[^#])", f'name: "{name}"  # the run folder is runs/{name}\n', text, count=1, flags=re.M
    )
    return files
