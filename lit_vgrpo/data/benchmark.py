"""Benchmark presets: where the prompts come from, the protocol, the scorers, and the papers that report them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, ValidationError

from lit_vgrpo.config.parts import built_part
from lit_vgrpo.config.recipe import SUFFIXES, loaded
from lit_vgrpo.config.tree import apply_override, expanded
from lit_vgrpo.errors import UserError, unknown_option
from lit_vgrpo.rewards import Reward, Weighted, as_weighted
from lit_vgrpo.rewards.http import validation_message
from lit_vgrpo.system.paths import shipped, typed_path

REWARD = "reward"
SAME_SCORES = ("url", "batch_size", "device", "connection")
"""Options of a reward that do not change its scores."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Prompts(_Strict):
    """A benchmark's prompt files, which are downloaded and never shipped."""

    base: str  # URL of the files' folder, with {revision}
    revision: str  # commit that pins the files
    files: dict[str, str | None]  # SHA-256 of each file; null if unknown, so that only the commit pins the file
    licence: str
    prompt: str = "prompt"  # field of the prompt
    task: str | None = None  # field by which scores are grouped; "file" groups by file, null does not group
    distinct: bool = False  # use each distinct prompt once
    picture: str | None = None  # field with the file of the picture that the prompt edits, relative to --pictures
    get_pictures: str = ""  # command or advice for getting the pictures, for error messages

    @property
    def address(self) -> str:
        """The URL of the files' folder."""
        return self.base.format(revision=self.revision)


class Paper(_Strict):
    """A paper that reports the benchmark, with the parts of the protocol that it or its code states."""

    name: str
    protocol: dict[str, Any] = {}
    never: str | None = None  # why no score of this preset is comparable to it; null if the protocol decides


class Benchmark(_Strict):
    """A benchmark with its protocol."""

    name: str
    title: str
    prompts: Prompts
    images_per_prompt: PositiveInt
    height: PositiveInt | None  # null is the model's default
    width: PositiveInt | None
    steps: PositiveInt
    guidance: Annotated[float, Field(ge=1, le=1000)]
    solver: str | None = None  # null uses the first one of the model's family
    seed: NonNegativeInt = 0
    limit: PositiveInt | None = None  # maximum number of prompts, taken from the tasks in turn
    batch_size: PositiveInt = 8
    reward: Any  # the scorers, as in a recipe
    scale: dict[str, float] = {}  # factor on the reported scores by the scorer's name, such as 100
    mean_of: Literal["tasks", "images"] = "images"  # the overall score is the mean of the tasks' means, or of images
    papers: list[Paper] = []
    otherwise: list[str] = []  # how this preset differs from the benchmark's code
    changed: list[str] = []  # overrides that change the scorer

    def build_reward(self) -> Weighted:
        """Build the scorers without loading them; raise UserError for an invalid option."""
        reward: Reward = built_part({REWARD: expanded(self.reward)}, REWARD, Reward)
        return as_weighted(reward, REWARD)

    def protocol(self, count: int, solver: str) -> dict[str, Any]:
        """Return the parts of the protocol that may differ between papers, for a number of prompts and a solver."""
        names = ("images_per_prompt", "height", "width", "steps", "guidance")
        return {"prompts": count, **{name: getattr(self, name) for name in names}, "solver": solver}


def read_benchmark(name: str, overrides: Sequence[str] = ()) -> Benchmark:
    """Read a preset or a YAML file with overrides such as ``steps=28``; raise UserError if anything is invalid."""
    known = shipped("benchmarks")
    file = typed_path(name) if name.endswith(SUFFIXES) else known.get(name)
    if file is None or not file.is_file():
        raise UserError(f"{name} is not a benchmark. Use one of: {', '.join(known)}; or a YAML file in that format.")
    tree: dict[Any, Any] = {"name": file.stem, **loaded(file), "changed": []}
    for word in overrides:
        key, _, text = word.partition("=")
        apply_override(tree, key, text)
        if key.startswith(REWARD) and key.rpartition(".")[2] not in SAME_SCORES:
            tree["changed"].append(word)
    try:
        return Benchmark.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        if first["type"] == "missing":
            raise UserError(f"The benchmark {file.stem} lacks {key}. Add {key}: VALUE to {file}.") from error
        if first["type"] == "extra_forbidden":
            raise UserError(unknown_option(key, f"the benchmark {file.stem}", Benchmark.model_fields)) from error
        raise UserError(f"{file.stem}: {validation_message(error)}, not {first['input']!r}.") from error


def differences(paper: Paper, benchmark: Benchmark, protocols: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return why scores by each model's :meth:`Benchmark.protocol` are not comparable to a paper's, or nothing."""
    differing = [
        f"{name} {ours[name] or 'by default'} instead of {theirs or 'the default'}"
        for ours in protocols
        for name, theirs in paper.protocol.items()
        if ours[name] != theirs
    ]
    scorers = [f"another scorer: {word}" for word in benchmark.changed]
    return [paper.never] if paper.never is not None else list(dict.fromkeys([*differing, *scorers]))
