#!/usr/bin/env bash
# datasets: map stores what a transform returns and transforms it again, so that a changed row is transformed twice
#
# One would guess: with_transform changes rows where they are read, and map works on the stored rows, or at least its
# result holds what the function returned.
#
# What happens (datasets 5.2.0): map and filter give their function the transformed row. A column that the function
# returns is stored as transformed, the transform stays, and it is applied again when the result is read. Transform
# 10 x, stored x = 1:
#   map(add_y), which sets row["y"] = 0 and returns the row:   reads x = 100, stores x = 10
#   map that returns {"y": 0} only:                            reads x = 10, stores x = 1
#   filter(lambda row: row["x"] < 5) of x = 1, 2, 3:           no row
#   concatenate_datasets with a dataset that has no transform: reads x = 1, the transform is gone
# No warning is shown. sort goes by the stored values.
#
# Why it matters: a transform that resizes or normalises images is usual, and so is a function that sets an entry of its
# row and returns it, for instance a score. The images of the result are normalised twice; a second prompt template is
# put around the first. Use map before with_transform, or return new columns only.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile datasets==5.2.0
cat > "$folder/check.py" <<'PY'
import datasets

print(f"datasets {datasets.__version__}")
datasets.disable_progress_bars()


def tenfold(batch):
    return dict(batch) | {"x": [10 * x for x in batch["x"]]}


def add_y(row):
    row["y"] = 0
    return row


def shown(name, rows):
    result = rows[0]["x"], rows.with_format(None)[0]["x"]
    print(f"{name}: reads x = {result[0]}, stores x = {result[1]}")
    return result


plain = datasets.Dataset.from_dict({"x": [1, 2, 3]})
rows = plain.with_transform(tenfold)
assert shown("before", rows) == (10, 1)
assert shown("map that returns the row", rows.map(add_y)) == (100, 10), "changed: the row is transformed once"
assert shown("map that returns a new column", rows.map(lambda row: {"y": 0})) == (10, 1), "changed"
assert shown("map before the transform", plain.map(add_y).with_transform(tenfold)) == (10, 1), "changed"
assert len(rows.filter(lambda row: row["x"] < 5)) == 0, "changed: filter sees the stored values"
assert shown("concatenated", datasets.concatenate_datasets([rows, plain])) == (1, 1), "changed: the transform is kept"
assert rows.sort("x", reverse=True).with_format(None)["x"][:] == [3, 2, 1]
print("as described: map stores transformed values and the transform is applied again")
PY
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
