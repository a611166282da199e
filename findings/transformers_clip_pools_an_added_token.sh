#!/usr/bin/env bash
# transformers: with eos_token_id=2, CLIP's pooled embedding is that of an added token, such as textual inversion's
#
# One would guess: the pooled output of CLIPTextModel is the state at the end-of-text token, whatever the prompt says.
#
# What happens (transformers 5.24.0, torch 2.13.0): a config with eos_token_id=2, as many published CLIP encoders have,
# stands for "the largest token id", since in CLIP's own vocabulary that is the end of text. A token that was added later
# has a larger id, so a prompt with it is pooled at that token. What follows the token in the prompt no longer changes
# the pooled output at all, because attention is causal. With the true id in the config, the end is pooled.
#
# Why it matters: SDXL, SD 3 and FLUX condition on the pooled output. With a textual inversion, prompts that differ only
# after its token get one and the same pooled embedding. Set config.eos_token_id to the tokenizer's id before use.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 transformers==5.24.0 ftfy==6.3.1
cat > "$folder/check.py" <<'PY'
import torch
import transformers
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

print(f"transformers {transformers.__version__}, torch {torch.__version__}")
symbols = [chr(code) for code in range(97, 123)]
vocab = {token: i for i, token in enumerate([*symbols, *(s + "</w>" for s in symbols), "<|startoftext|>", "<|endoftext|>"])}
words = CLIPTokenizer(vocab=vocab, merges=[], bos_token="<|startoftext|>", eos_token="<|endoftext|>",
                      pad_token="<|endoftext|>", model_max_length=20)
words.add_tokens("<toy>")
end = vocab["<|endoftext|>"]


def pooled(eos_token_id, prompt):
    torch.manual_seed(0)
    config = CLIPTextConfig(vocab_size=len(vocab), hidden_size=16, intermediate_size=32, num_hidden_layers=2,
                            num_attention_heads=2, max_position_embeddings=20, bos_token_id=end - 1,
                            eos_token_id=eos_token_id, pad_token_id=end)
    encoder = CLIPTextModel(config).eval()
    encoder.resize_token_embeddings(len(words), mean_resizing=False)
    tokens = words(prompt, padding="max_length", return_tensors="pt").input_ids
    with torch.no_grad():
        output = encoder(tokens)
    distances = (output.last_hidden_state[0] - output.pooler_output).abs().amax(dim=-1)
    return output.pooler_output, words.convert_ids_to_tokens(int(tokens[0, distances.argmin()]))


for eos in (2, end):
    (red, where), (blue, _) = pooled(eos, "a <toy> red"), pooled(eos, "a <toy> blue")
    plain = pooled(eos, "a red")[1]
    change = (red - blue).abs().max().item()
    print(f"eos_token_id={eos}: pooled at {where}, without it at {plain}; red for blue changes it by {change:.4f}")
    assert plain == "<|endoftext|>"
    if eos == 2:
        assert where == "<toy>" and change == 0, "changed: an added token no longer moves the pooled position"
    else:
        assert where == "<|endoftext|>" and change > 1e-3, "changed: the true id does not help"
print("as described: with eos_token_id=2 the added token is pooled")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
