# UnifiedReward 2.0: alignment, coherence and style of an image, the mean of three scores from 1 to 5
# Source: github.com/CodeGoat24/UnifiedReward at ff6f520247a2d36e2aff7b2ba53a935afd437f66, inference_qwen/UnifiedReward-2.0-inference
# Licence: MIT (code; card of the Qwen2.5-VL 32B model). Not run with the real weights.
set -e
python3.11 -m venv judges/UnifiedReward2
. judges/UnifiedReward2/bin/activate
pip install vllm qwen-vl-utils==0.0.14
vllm serve CodeGoat24/UnifiedReward-2.0-qwen3vl-8b --host 127.0.0.1 --port 8000 --limit-mm-per-prompt.image 32
# In the recipe, or with lightning score:
#   reward: {class_path: UnifiedReward2, init_args: {url: "http://127.0.0.1:8000/v1"}}
# Add compare: pairs (or group) to init_args to compare the images of a prompt.
