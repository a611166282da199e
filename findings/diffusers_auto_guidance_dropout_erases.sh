#!/usr/bin/env bash
# diffusers: AutoGuidance with dropout 0.9 in one block erases 90 % of all features, and with 1.0 leaves the block out
#
# One would guess: AutoGuidance runs a weaker network for the same prompt, in which the outputs of the given layers are
# dropped with a probability: at 0 the network is whole, at 1 the layers are left out, and in between it is in between.
#
# What happens (diffusers 0.42.1, torch 2.13.0): at 1.0 a block returns its input. Below 1.0 dropout is applied to what
# the block returns, which is the sum of its input and its own part: features of all blocks before are set to zero too,
# and the rest is divided by 1 - dropout. Block 1 of 4 of a Wan network, average of 20 passes:
#   dropout                            0       0.01    0.1     0.5     0.9     0.99    1
#   features that are zero after it    0.00    0.01    0.10    0.50    0.90    0.99    0.00
#   change of the prediction           0.00    0.09    0.31    0.74    1.14    1.22    0.26
# The zeros are drawn from torch's own random state: two equal calls differ, whatever generator a pipeline has. And the
# second pass is not one for the same prompt: it takes the negative prompt. In networks whose blocks return two tensors,
# such as SD 3 and FLUX.1, a dropout below 1 raises TypeError. Nothing is logged.
#
# Why it matters: a search over dropout looks for the weak network where there is none. Use 1.0, and pass the prompt as
# the negative prompt, or the guidance is classifier-free guidance too.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 diffusers==0.42.1 transformers==5.24.0
cat > "$folder/check.py" <<'PY'
import diffusers
import torch
from diffusers import SD3Transformer2DModel, WanTransformer3DModel
from diffusers.guiders import AutoGuidance
from diffusers.hooks import LayerSkipConfig, apply_layer_skip

print(f"diffusers {diffusers.__version__}, torch {torch.__version__}")
diffusers.utils.logging.set_verbosity_error()
torch.manual_seed(0)
network = WanTransformer3DModel(num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4,
                                text_dim=32, freq_dim=32, ffn_dim=64, num_layers=4, rope_max_seq_len=32).eval()
for weight in network.parameters():
    if weight.ndim > 1:
        torch.nn.init.normal_(weight, std=0.1)
latents, time = torch.randn(1, 4, 2, 8, 8), torch.tensor([500.0])
prompt, negative = torch.randn(2, 1, 6, 32)
streams, texts = [], []
network.blocks[2].register_forward_pre_hook(lambda block, inputs: streams.append(inputs[0]))


def passes(dropout, negative=negative):
    """Return the predictions of a step's two passes, as pipelines with a guider run them."""
    guider = AutoGuidance(guidance_scale=4.0, dropout=dropout,
                          auto_guidance_config=LayerSkipConfig([1], fqn="blocks", dropout=dropout))
    guider.set_state(step=0, num_inference_steps=10, timestep=time)
    batches = guider.prepare_inputs({"encoder_hidden_states": (prompt, negative)})
    for batch in batches:
        guider.prepare_models(network)
        texts.append(batch.encoder_hidden_states)
        with torch.no_grad():
            batch.noise_pred = network(latents, time, batch.encoder_hidden_states).sample
        guider.cleanup_models(network)
    return [batch.noise_pred for batch in batches]


changes, zeros = {}, {}
for dropout in (0.0, 0.01, 0.1, 0.5, 0.9, 0.99, 1.0):
    found = []
    for _ in range(20):
        whole, weak = passes(dropout, negative=prompt)
        found.append(((weak - whole).norm() / whole.norm()).item())
    changes[dropout], zeros[dropout] = sum(found) / 20, (streams[-1] == 0).float().mean().item()
    print(f"dropout {dropout:4}: features that are zero {zeros[dropout]:.2f}, change {changes[dropout]:.2f}")
assert changes[0.0] < 1e-6 and zeros[1.0] == 0 and 0.05 < changes[1.0] < 0.5, "changed: dropout 0 and 1"
assert all(abs(zeros[p] - p) < 0.05 for p in (0.1, 0.5, 0.9, 0.99)), "changed: what dropout sets to zero"
assert min(changes[0.5], changes[0.9], changes[0.99]) > 2 * changes[1.0], "changed: a dropout between 0 and 1"

torch.manual_seed(0)
first, second = passes(0.5)[1], passes(0.5)[1]
torch.manual_seed(0)
assert not torch.equal(first, second) and torch.equal(first, passes(0.5)[1]), "changed: the zeros' randomness"
passes(1.0)
assert texts[-2] is not texts[-1] and torch.equal(texts[-1], negative), "changed: the prompt of the second pass"

other = SD3Transformer2DModel(sample_size=8, patch_size=2, in_channels=4, num_layers=3, attention_head_dim=8,
                              num_attention_heads=2, joint_attention_dim=32, caption_projection_dim=16,
                              pooled_projection_dim=32, out_channels=4, pos_embed_max_size=8)
apply_layer_skip(other, LayerSkipConfig([1], fqn="transformer_blocks", dropout=0.5))
try:
    other(torch.randn(1, 4, 8, 8), prompt, prompt[:, 0], time)
    raise SystemExit("changed: SD 3 takes a dropout")
except TypeError as error:
    print("SD 3, dropout 0.5: TypeError,", error)
print("as described: dropout erases the stream of features")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
