#!/usr/bin/env bash
# transformers, open_clip: a prompt with typographic quotes is read as other tokens once ftfy is installed
#
# One would guess: CLIP's tokenizer is one fixed function. CLIPTokenizer, CLIPTokenizerFast and open_clip's tokenizer
# have the same vocabulary, so they return the same token ids for a prompt of plain text.
#
# What happens (transformers 4.57.6 and 5.24.0, open_clip 3.3.0, ftfy 6.3.1), for a typographic apostrophe and quotes:
#   open_clip, CLIPTokenizer of 4.57.6 with ftfy        a woman 's " portrait "         (as for straight quotes)
#   CLIPTokenizerFast, CLIPTokenizer of 4.57.6 without ftfy, CLIPTokenizer of 5.24.0
#                                                       a woman ’ s “ portrait ”        (12 tokens instead of 8)
# CLIPTokenizer 4.x repairs text with ftfy if it can import it; open_clip, which HPSv2 needs, installs ftfy. The same
# holds for ligatures and for "R&amp;B". Only the version without ftfy writes a line to the log.
#
# Why it matters: prompts written by language models contain such quotes. The text encoders of Stable Diffusion, SDXL,
# SD 3.5 and FLUX.1 are CLIP's, and diffusers loads CLIPTokenizer: installing a reward's package, or upgrading
# transformers from 4 to 5, changes the images of a fixed seed, and two rewards on CLIP read two prompts. Replace
# typographic quotes in prompt files.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/check.py" <<'PY'
import gzip
import json
import sys
from importlib.metadata import version
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path

import transformers
from transformers import CLIPTokenizer, CLIPTokenizerFast

# The tokenizer's file alone, since the package imports torchvision and timm.
source = Path(find_spec("open_clip").submodule_search_locations[0], "tokenizer.py")
open_clip = module_from_spec(spec := spec_from_file_location("open_clip_tokenizer", source))
spec.loader.exec_module(open_clip)

print(*(f"{name} {version(name)}" for name in ("transformers", "open_clip_torch", "ftfy")), sep=", ")
reference = open_clip.SimpleTokenizer()
names = {"<start_of_text>": "<|startoftext|>", "<end_of_text>": "<|endoftext|>"}
ids = {names.get(token, token): number for token, number in reference.encoder.items()}
tokens = {number: token for token, number in ids.items()}
with gzip.open(open_clip.default_bpe(), "rt", encoding="utf-8") as file:
    merges = file.read().split("\n")[1:][: len(ids) - 2 * 256 - 2]
folder = Path(sys.argv[1])
(folder / "vocab.json").write_text(json.dumps(ids))
(folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n", encoding="utf-8")


def loaded(kind):
    if transformers.__version__.startswith("4"):
        return kind(str(folder / "vocab.json"), str(folder / "merges.txt"))
    return kind(vocab=ids, merges=[tuple(line.split()) for line in merges])


curly, straight = "a woman\u2019s \u201cportrait\u201d", "a woman's \"portrait\""
read = {"open_clip": lambda text: [number for number in reference(text)[0].tolist() if number]}
with_ftfy, fast = loaded(CLIPTokenizer), loaded(CLIPTokenizerFast)
sys.modules["ftfy"] = None  # as if it were not installed
without = loaded(CLIPTokenizer)
read |= {"CLIPTokenizer, ftfy installed": with_ftfy, "CLIPTokenizer, no ftfy": without, "CLIPTokenizerFast": fast}
same = {}
for name, tokenizer in read.items():
    one, two = (result if isinstance(result, list) else result["input_ids"] for result in map(tokenizer, (curly, straight)))
    same[name] = one == two
    assert two == read["open_clip"](straight), f"changed: {name} reads straight quotes differently"
    print(f"{name}: {len(one)} and {len(two)} tokens, {'the same' if one == two else 'different'}")
repairs = {"open_clip"} | ({"CLIPTokenizer, ftfy installed"} if transformers.__version__.startswith("4") else set())
assert {name for name, equal in same.items() if equal} == repairs, "changed: who reads typographic quotes as straight ones"
PY
for pin in 4.57.6 5.24.0; do
    python3 -m venv "$folder/$pin"
    "$folder/$pin/bin/pip" install --quiet --no-compile torch==2.13.0 "transformers==$pin" ftfy==6.3.1
    "$folder/$pin/bin/pip" install --quiet --no-compile --no-deps open_clip_torch==3.3.0
    "$folder/$pin/bin/python" -W ignore "$folder/check.py" "$folder"
done
echo "as described: typographic quotes are straight quotes to open_clip, and to transformers 4 where ftfy is installed"
