#!/usr/bin/env bash
# datasets: keys that only some rows have are lost, become None or stay absent, by the way the rows are loaded
#
# One would guess: rows such as GenEval's, of which only some have "exclude" and only some objects a "color", come back
# as they were, or with None for what is absent; and from_list, a JSON file and its table agree.
#
# What happens (datasets 5.2.0), with {"include": [{"class", "count", "color"}]} in the first row and, in the second,
# {"include": [{"class", "count"}], "exclude": [...]}:
#                               "exclude" of row 1   of row 2   "color" of row 2
#   Dataset.from_list                absent           absent         None
#   the same rows, other order       None             kept           None
#   load_dataset("json")             None             kept           absent
#   from_list, within "metadata"     None             kept           None
#   json file, within "metadata"     absent           kept           absent
# from_list takes the columns of the first row, and drops the others of later rows. Nothing is logged.
#
# Why it matters: with from_list a reward that checks "exclude" sees no such row, and pays for what the prompt forbids.
# With the others, `"exclude" in row` is true for every row. Give every row all keys, or keep them in one JSON text.
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
from datasets import Dataset, load_dataset

folder = Path(sys.argv[1])
datasets.disable_progress_bars()
print(f"datasets {datasets.__version__}")
plain = {"prompt": "two red cats", "include": [{"class": "cat", "count": 2, "color": "red"}]}
without = {"prompt": "a dog, no cat", "include": [{"class": "dog", "count": 1}], "exclude": [{"class": "cat", "count": 1}]}
nested = [{"prompt": row["prompt"], "metadata": {key: row[key] for key in row if key != "prompt"}}
          for row in (plain, without)]


def from_file(rows, name):
    path = folder / f"{name}.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return load_dataset("json", data_files=str(path), split="train", cache_dir=str(folder / "cache"))


def shown(title, table):
    cells = []
    for wanted in (plain, without):
        row = next(row for row in table if row["prompt"] == wanted["prompt"])
        row = row.get("metadata", row)
        exclude = "absent" if "exclude" not in row else "None" if row["exclude"] is None else "kept"
        need = row["include"][0]
        cells.append((exclude, "absent" if "color" not in need else need["color"]))
    print(f"{title}: exclude {cells[0][0]} and {cells[1][0]}, color of the second {cells[1][1]}")
    return cells[0][0], cells[1][0], cells[1][1]


found = {
    "from_list": shown("from_list", Dataset.from_list([plain, without])),
    "other order": shown("from_list, other order", Dataset.from_list([without, plain])),
    "json": shown("json file", from_file([plain, without], "flat")),
    "nested list": shown("from_list, within metadata", Dataset.from_list(nested)),
    "nested json": shown("json file, within metadata", from_file(nested, "nested")),
}
assert found["from_list"] == ("absent", "absent", None), "changed: from_list keeps later keys"
assert found["other order"] == ("None", "kept", None), "changed: the order of rows does not matter"
assert found["json"][:2] == ("None", "kept"), "changed: a JSON file is read otherwise"
assert found["nested list"] == ("None", "kept", None), "changed: from_list of nested rows"
assert found["json"][2] == "absent", "changed: a JSON file gives objects all keys"
assert found["nested json"] == ("absent", "kept", "absent"), "changed: a JSON file gives metadata all keys"
print("as described")
PY
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" "$folder/check.py" "$folder"
