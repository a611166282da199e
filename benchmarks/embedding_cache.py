"""Reading cached prompt embeddings, against plain safetensors files without checksums.

    python benchmarks/embedding_cache.py

Prints the CPU time of each way as a multiple of the cache's, for embeddings that the system already has in
its memory.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from lit_vgrpo.policies.embeddings import EmbeddingCache

Shapes = dict[str, tuple[int, ...]]
FAMILIES: dict[str, Shapes] = {
    "SD 1.5": {"tokens": (77, 768)},
    "SDXL": {"tokens": (77, 2048), "pooled": (1280,)},
}
PROMPTS = 1000
PER_ITERATION = 48
REPEATS = 7


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where to write about 1 GB; default: the system's temporary folder")
    with tempfile.TemporaryDirectory(dir=parser.parse_args().folder) as folder:
        for name, shapes in FAMILIES.items():
            measure(Path(folder) / name, name, shapes)


def measure(folder: Path, family: str, shapes: Shapes) -> None:
    texts = [f"prompt {number}" for number in range(PROMPTS)]
    cache = EmbeddingCache(folder / "cache", 10**10, "encoder")
    values = {name: torch.randn(PROMPTS, *shape).bfloat16() for name, shape in shapes.items()}
    for start in range(0, PROMPTS, PER_ITERATION):
        part = slice(start, start + PER_ITERATION)
        cache.write(texts[part], [{name: value[row] for name, value in values.items()} for row in rows_in(part)])
    (folder / "each").mkdir()
    for row in range(PROMPTS):
        save_file({name: value[row].clone() for name, value in values.items()}, folder / "each" / str(row))
    save_file(values, folder / "stacked")
    print(f"{family}: {PROMPTS} prompts in {len(list((folder / 'cache').iterdir()))} files of the cache")
    for count in (PER_ITERATION, PROMPTS):
        rows = torch.randperm(PROMPTS, generator=torch.Generator().manual_seed(0))[:count]
        wanted = [texts[row] for row in rows]
        ways: dict[str, Callable[[], dict[str, torch.Tensor]]] = {
            "the cache": lambda wanted=wanted: stacked(cache.read(wanted)),
            "a row at a time of one file": lambda rows=rows: rows_of(folder / "stacked", rows, list(shapes)),
            "a file a prompt": lambda rows=rows: files_of(folder / "each", rows, list(shapes)),
        }
        expected = {name: value[rows] for name, value in values.items()}
        seconds = {}
        for name, way in ways.items():
            got = way()
            assert all(torch.equal(got[key], value) for key, value in expected.items())
            seconds[name] = min(timed(way) for _ in range(REPEATS))
        base = seconds["the cache"]
        for name, took in seconds.items():
            print(f"{count:5} prompts  {name:28} {took / base:6.2f} x  ({1000 * took:.1f} ms)")


def rows_in(part: slice) -> range:
    return range(part.start, min(part.stop, PROMPTS))


def stacked(rows: Sequence[Mapping[str, torch.Tensor] | None]) -> dict[str, torch.Tensor]:
    """Return what a policy makes of rows, here on the CPU."""
    there = [row for row in rows if row is not None]
    return {name: torch.stack([row[name] for row in there]) for name in there[0]}


def rows_of(path: Path, rows: torch.Tensor, names: list[str]) -> dict[str, torch.Tensor]:
    found: dict[str, list[torch.Tensor]] = {name: [] for name in names}
    for row in rows.tolist():
        with safe_open(path, "pt") as file:
            for name in names:
                found[name].append(file.get_slice(name)[row])
    return {name: torch.stack(values) for name, values in found.items()}


def files_of(folder: Path, rows: torch.Tensor, names: list[str]) -> dict[str, torch.Tensor]:
    loaded = [load_file(folder / str(row)) for row in rows.tolist()]
    return {name: torch.stack([tensors[name] for tensors in loaded]) for name in names}


def timed(way: Callable[[], object]) -> float:
    start = time.process_time()
    way()
    return time.process_time() - start


if __name__ == "__main__":
    main()
