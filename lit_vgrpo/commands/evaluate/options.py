"""Options of ``lightning eval``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from lit_vgrpo.commands.saved_policy import RunOptions
from lit_vgrpo.config.arguments import flag, option, read_path
from lit_vgrpo.errors import UserError
from lit_vgrpo.runs.saved_weights import AVERAGE, REFERENCE, TRAINED

INSTEAD = {"ckpt_path": "--checkpoint FILE", "run_dir": "--out FILE.json", "name": "--out FILE.json"}


@dataclass(kw_only=True)
class EvaluateOptions(RunOptions):
    """Options of ``lightning eval``; other arguments override the run's recipe.

    Attributes:
        reference: Evaluate the reference too.
        features: Feature network of FID and diversity; ``None`` uses that of the recipe's FID.
        fid_reference: Real images, or a file of their statistics; ``None`` uses those of the recipe's FID.
        out: JSON file to write, under the next free name if it exists.
    """

    subcommand: ClassVar[str] = "eval"
    refused: ClassVar[Mapping[str, str]] = {
        key: f"has no effect on an evaluation. Use {name}." for key, name in INSTEAD.items()
    }

    reference: bool = flag()
    features: str | None = option()
    fid_reference: str | None = option()
    out: Path = option(read=read_path)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.out = self.out or self.run / "eval.json"
        if self.out.suffix != ".json" or self.out.is_dir():
            raise UserError(f"--out {self.out} is not a JSON file. Use --out {self.out.with_suffix('.json')}.")

    @property
    def variants(self) -> list[str]:
        """Sets of weights to evaluate."""
        return [TRAINED, *([AVERAGE] if self.ema else []), *([REFERENCE] if self.reference else [])]
