"""Presets of benchmarks: where the prompts come from, the protocol, the scorers, and the papers that report them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, ValidationError

from lit_vgrpo.config.parts import built_part
from lit_vgrpo.config.recipe import SUFFIXES, loaded
from lit_vgrpo.config.tree import apply_override, expanded
from lit_vgrpo.errors import UserError, unknown_option
from lit_vgrpo.rewards import Reward, Weighted, as_weighted
from lit_vgrpo.rewards.http import validation_message
from lit_vgrpo.system.paths import shipped_root

REWARD = "reward"
SAME_SCORES = ("url", "batch_size", "device", "connection")
"""Options of a reward that do not change its scores."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Prompts(_Strict):
    """The files with a benchmark's prompts.

    Attributes:
        base: Address of the files' folder, with ``{revision}``.
        revision: The commit, which fixes the files.
        files: SHA-256 of each file; null if it is not known, and only the commit fixes the file.
        licence: Licence of the files, which are never copied.
        prompt: Field of the prompt.
        task: Field by which scores are grouped; ``file`` groups by file, null does not group.
        distinct: Use each distinct prompt once.
        picture: Field with the file of the picture that the prompt edits, relative to ``--pictures``.
        get_pictures: Command or advice on how to get the pictures, for a message.
    """

    base: str
    revision: str
    files: dict[str, str | None]
    licence: str
    prompt: str = "prompt"
    task: str | None = None
    distinct: bool = False
    picture: str | None = None
    get_pictures: str = ""

    @property
    def urls(self) -> dict[str, str]:
        """The address of each file."""
        return {name: self.base.format(revision=self.revision) + name for name in self.files}


class Paper(_Strict):
    """A paper that reports the benchmark.

    Attributes:
        name: The paper, its table, and where its protocol is stated.
        protocol: Parts of the protocol that the paper or its code states.
        never: Why no score of this preset may be put beside it; null if the protocol decides.
    """

    name: str
    protocol: dict[str, Any] = {}
    never: str | None = None


class Benchmark(_Strict):
    """A benchmark with its protocol.

    Attributes:
        images_per_prompt, height, width, steps, guidance, seed: The protocol; a size of null is the model's default.
        solver: ODE solver; null uses the first one of the model's family.
        limit: Use only this number of prompts, the first ones of every task in turn; null uses all.
        batch_size: Images per forward pass.
        reward: The scorers, as in a recipe.
        scale: Factors of reported scores by the scorer's name, such as 100.
        mean_of: The overall score is the mean of the tasks' means, or of all images.
        otherwise: What this preset does differently than the benchmark's own code.
        changed: Overrides that change the scorer.
    """

    name: str
    title: str
    prompts: Prompts
    images_per_prompt: PositiveInt
    height: PositiveInt | None
    width: PositiveInt | None
    steps: PositiveInt
    guidance: Annotated[float, Field(ge=1, le=1000)]
    solver: str | None = None
    seed: NonNegativeInt = 0
    limit: PositiveInt | None = None
    batch_size: PositiveInt = 8
    reward: Any
    scale: dict[str, float] = {}
    mean_of: Literal["tasks", "images"] = "images"
    papers: list[Paper]
    otherwise: list[str] = []
    changed: list[str] = []

    def build_reward(self) -> Weighted:
        """Build the scorers without loading them; raise UserError for an invalid option."""
        reward: Reward = built_part({REWARD: self.reward}, REWARD, Reward)
        return as_weighted(reward, REWARD)

    def protocol(self, count: int, solver: str) -> dict[str, Any]:
        """Return the parts of the protocol that papers may differ in, for a number of prompts and a solver."""
        names = ("images_per_prompt", "height", "width", "steps", "guidance")
        return {"prompts": count, **{name: getattr(self, name) for name in names}, "solver": solver}


def shipped_benchmarks() -> dict[str, Path]:
    """Return the presets installed with the package, by name."""
    return {file.stem: file for file in sorted((shipped_root() / "benchmarks").glob("*.yaml"))}


def read_benchmark(name: str, overrides: Sequence[str] = ()) -> Benchmark:
    """Read a preset and apply overrides such as ``steps=28`` or ``reward.url=http://...``.

    Args:
        name: A shipped benchmark, or a YAML file.

    Raises:
        UserError: There is no such benchmark, or a setting is invalid.
    """
    known = shipped_benchmarks()
    file = Path(name).expanduser() if name.endswith(SUFFIXES) else known.get(name)
    if file is None or not file.is_file():
        raise UserError(f"{name} is not a benchmark. Use one of: {', '.join(known)}; or a YAML file of the same form.")
    tree: dict[Any, Any] = {"name": file.stem, **loaded(file)}
    scorer = [word for word in overrides if word.startswith(REWARD)]
    for word in overrides:
        key, _, text = word.partition("=")
        apply_override(tree, key, text)
    changes = [word for word in scorer if word.partition("=")[0].rpartition(".")[2] not in SAME_SCORES]
    try:
        return Benchmark.model_validate({**tree, REWARD: expanded(tree.get(REWARD)), "changed": changes})
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        if first["type"] == "extra_forbidden":
            raise UserError(unknown_option(key, f"the benchmark {file.stem}", Benchmark.model_fields)) from error
        raise UserError(f"{file.stem}: {validation_message(error)}, not {first['input']!r}.") from error


def differences(paper: Paper, benchmark: Benchmark, protocols: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return why scores may not be put beside a paper's; empty if they may.

    Args:
        protocols: That of each model, from :meth:`Benchmark.protocol`.
    """
    if paper.never is not None:
        return [paper.never]
    found = [
        f"{name} {ours[name]} instead of {theirs}"
        for ours in protocols
        for name, theirs in paper.protocol.items()
        if ours[name] != theirs
    ]
    return list(dict.fromkeys([*found, *(f"another scorer: {word}" for word in benchmark.changed)]))
