"""The model card of an export: ``README.md``, as model hubs show it."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import yaml

from lit_vgrpo.apps.report.loading import load_lines
from lit_vgrpo.apps.report.page import RunPage, environment
from lit_vgrpo.apps.report.recipe_diff import config_text
from lit_vgrpo.apps.report.run_data import RunData, read_run
from lit_vgrpo.config.tree import class_name
from lit_vgrpo.errors import UserError, report
from lit_vgrpo.policies.base import Policy
from lit_vgrpo.system.hub import file_at_hand, source_of

CARD_NAME, PICTURE_NAME = "README.md", "before_after.png"
LICENCE_KEYS = ("license", "license_name", "license_link")
OF_THIS_MACHINE = ("name:", "run_dir:", "ckpt_path:", "allow_changes:", "#")
"""Starts of the lines of ``config.yaml`` that mean nothing to others."""


@dataclass(frozen=True)
class Exported:
    """An export.

    Attributes:
        base: hub name or folder of the model that training started from.
        base_card: its model card, where it is on this machine.
        what: the kind of weights, such as ``LoRA of rank 32, float32``.
        is_adapter: they are loaded on top of the base model.
        variant: ``trained`` or ``EMA``.
        iterations: iterations after which they were saved.
        lines: lines of Python that load them.
    """

    base: str
    base_card: Path | None
    what: str
    is_adapter: bool
    variant: str
    iterations: int
    lines: list[str]


def add_card(
    folder: Path,
    run: Path,
    policy: Policy,
    written: Path,
    variant: str,
    iterations: int,
    dtype: torch.dtype = torch.float32,
    merged: bool = False,
) -> None:
    """Write the model card into an export; where that fails, say so, since the weights are what counts.

    Args:
        folder: the export, perhaps still under the name of a draft.
        run: the run folder.
        written: what diffusers loads, under its final name.
        variant: set of weights.
        iterations: iterations after which they were saved.
        dtype: of what was written.
        merged: an adapter was merged into the weights.
    """
    what, lines = load_lines(policy, written, dtype, merged, folder)
    exported = Exported(
        base=source_of(policy.checkpoint),
        base_card=file_at_hand(policy.checkpoint, CARD_NAME, policy.revision),
        what=what,
        is_adapter=policy.lora_rank is not None and not merged,
        variant=variant,
        iterations=iterations,
        lines=lines,
    )
    try:
        write_card(folder, run, exported)
    except (OSError, UserError) as error:
        report([f"No model card in {written}: {error}"])


def write_card(folder: Path, run: Path, exported: Exported) -> None:
    """Write the card and its picture into an export.

    Raises:
        UserError: the run cannot be read.
        OSError: a file cannot be written.
    """
    data = _until(read_run(run), exported.iterations)
    picture = run / "samples" / "after.png"
    # The last grid is of the end of training, not of an earlier checkpoint.
    has_picture = picture.is_file() and exported.iterations == data.summary.get("iterations")
    if has_picture:
        shutil.copyfile(picture, folder / PICTURE_NAME)
    (folder / CARD_NAME).write_text(card(data, exported, has_picture), encoding="utf-8")


def card(run: RunData, exported: Exported, has_picture: bool) -> str:
    """Return the card's text, with the metadata that hubs read in front."""
    licence = base_licence(exported.base_card)
    is_on_hub = not Path(exported.base).exists() and exported.base.count("/") == 1
    head: dict[str, Any] = {
        "library_name": "diffusers",
        "pipeline_tag": "text-to-image",
        **({"base_model": exported.base} if is_on_hub else {}),
        **({"base_model_relation": "adapter" if exported.is_adapter else "finetune"} if is_on_hub else {}),
        **licence,
        "tags": ["text-to-image", "reinforcement-learning", "lit-vgrpo", *(["lora"] if exported.is_adapter else [])],
    }
    model = run.recipe.get("model") or {}
    data = run.recipe.get("data") or {}
    return (
        environment()
        .get_template("card.md.j2")
        .render(
            head=yaml.safe_dump(head, sort_keys=False, allow_unicode=True),
            page=RunPage(run),
            exported=exported,
            base=exported.base if is_on_hub else Path(exported.base).name,
            licence=licence,
            method=class_name(model.get("objective")) or "not known",
            rewards=_rewards(model.get("reward")),
            unseen=_rewards(model.get("heldout_reward")),
            prompts=_files(data.get("train")),
            heldout=_files(data.get("heldout")),
            picture=PICTURE_NAME if has_picture else None,
            recipe=_recipe(run.folder),
        )
    )


def base_licence(card: Path | None) -> dict[str, str]:
    """Return the licence that a model card states in its metadata; nothing where it states none."""
    try:
        text = card.read_text(encoding="utf-8") if card is not None else ""
        parts = text.split("---\n", 2)
        head = yaml.safe_load(parts[1]) if len(parts) == 3 and not parts[0].strip() else None
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return {}
    found = head if isinstance(head, Mapping) else {}
    return {key: str(found[key]) for key in LICENCE_KEYS if found.get(key)}


def _until(run: RunData, iterations: int) -> RunData:
    """Return a run as it was after some iterations; the summary stays if that is its end."""
    if run.num_iterations <= iterations:
        return run
    return replace(
        run,
        summary={},
        iterations=[point for point in run.iterations if point.iteration <= iterations],
        evaluations=[point for point in run.evaluations if point.iteration <= iterations],
    )


def _rewards(part: Any) -> list[str]:
    """Return the rewards' class names, with their weights where there are several."""
    if part is None:
        return []
    options = (part.get("init_args") or {}) if isinstance(part, Mapping) else {}
    own = options.get("rewards")
    if not isinstance(own, list):
        return [class_name(part)]
    weights = options.get("weights") or [None] * len(own)
    pairs = zip([_described(reward) for reward in own], weights, strict=False)
    return [name if weight is None else f"{name} (weight {weight:g})" for name, weight in pairs]


def _described(reward: Any) -> str:
    options = (reward.get("init_args") or {}) if isinstance(reward, Mapping) else {}
    known = [str(options[key]) for key in ("check", "function", "name") if options.get(key)]
    return f"{class_name(reward)} {' '.join(known)}".strip()


def _files(setting: Any) -> list[str]:
    """Return the names of prompt files or datasets, without the folders of this machine."""
    entries = setting if isinstance(setting, list) else [] if setting is None else [setting]
    texts = [entry.get("path") if isinstance(entry, Mapping) else entry for entry in entries]
    return [Path(str(text)).name if str(text).startswith(("/", "~", ".")) else str(text) for text in texts if text]


def _recipe(run: Path) -> str:
    """Return the run's recipe without what means nothing on another machine; it cannot end its own block."""
    lines = [line for line in config_text(run).splitlines() if not line.startswith(OF_THIS_MACHINE)]
    return "\n".join(lines).replace("````", "` ` ` `")
