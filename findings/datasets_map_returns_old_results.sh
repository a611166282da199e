#!/usr/bin/env bash
# datasets: map returns the results of the old code after a function in an imported module was edited
#
# One would guess: map's cache goes by the function that it is given, as its documentation says, so that map computes
# again after the function's code was edited, wherever the function is defined.
#
# What happens (datasets 5.2.0): only functions of the main script, and lambdas, are hashed by their code. A function, a
# method or a callable object of an imported module is hashed by its name. Rows 1 and 2, multiplied by a module
# whose factor is edited from 1 to 10 between two processes:
#   map(score.function)                            1 2, from the cache of the old code
#   map(score.Scorer().method)                     1 2, from the cache of the old code
#   map(score.Scorer()), which has __call__        1 2, from the cache of the old code
#   map(a function of the script that calls score.times):     10 20
#   map(a function of the script that imported times itself): 1 2, from the cache of the old code
#   map(score.function, fn_kwargs={"factor": score.FACTOR}):   10 20
# Nothing is logged.
#
# Why it matters: a project's own package computes rewards, prompt templates, latents and text embeddings with map. After
# a bug in the reward is mended, the run reads the scores of the bug. Pass load_from_cache_file=False, or a version in
# fn_kwargs.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile datasets==5.2.0
cat > "$folder/check.py" <<'PY'
import json
import sys
from pathlib import Path

import datasets
import score
from score import times

datasets.disable_progress_bars()
folder = Path(__file__).parent
rows = datasets.load_dataset("json", data_files=str(folder / "rows.json"), split="train", cache_dir=f"{folder}/cache")


def by_module(row):
    return {"y": score.times(row["x"])}


def by_name(row):
    return {"y": times(row["x"])}


results = {
    "function": rows.map(score.function)["y"][:],
    "method": rows.map(score.Scorer().method)["y"][:],
    "callable object": rows.map(score.Scorer())["y"][:],
    "function of the script, by module": rows.map(by_module)["y"][:],
    "function of the script, by name": rows.map(by_name)["y"][:],
    "fn_kwargs": rows.map(score.scaled, fn_kwargs={"factor": score.FACTOR})["y"][:],
    "computed again": rows.map(score.function, load_from_cache_file=False)["y"][:],
}
for name, result in results.items():
    print(f"{name:35}", result)
Path(sys.argv[1]).write_text(json.dumps(results))
PY
edit() {
    cat > "$folder/score.py" <<PY
FACTOR = $1


def times(x):
    return x * $1


def function(row):
    return {"y": row["x"] * $1}


def scaled(row, factor):
    return {"y": row["x"] * factor}


class Scorer:
    def method(self, row):
        return {"y": row["x"] * $1}

    __call__ = method
PY
}
printf '{"x": 1}\n{"x": 2}\n' > "$folder/rows.json"
export PYTHONDONTWRITEBYTECODE=1 HF_HUB_OFFLINE=1
for factor in 1 10; do
    edit "$factor"
    echo "factor $factor"
    "$folder/venv/bin/python" -W ignore "$folder/check.py" "$folder/$factor.json"
done
"$folder/venv/bin/python" - "$folder" <<'PY'
import json
import sys
from pathlib import Path

import datasets

first, second = (json.loads((Path(sys.argv[1]) / f"{factor}.json").read_text()) for factor in (1, 10))
print(f"datasets {datasets.__version__}")
assert all(result == [1, 2] for result in first.values())
old = {name for name, result in second.items() if result == [1, 2]}
new = {name for name, result in second.items() if result == [10, 20]}
assert old == {"function", "method", "callable object", "function of the script, by name"}, "changed: map sees the edit"
assert new == {"function of the script, by module", "fn_kwargs", "computed again"}, "changed"
print("as described: map returns the results of the old code")
PY
