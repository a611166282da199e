# VQAScore: the probability of Yes to whether the image shows the prompt, 0 to 1
# Source: github.com/linzhiqiu/t2v_metrics at 6ecb74f92028f42c7e64546d3a71e98c8c73068f, vqascore_models/qwen3vl_model.py
# Licence: Apache-2.0 (code). Not run with the real weights.
set -e
python3.11 -m venv judges/VQAScore
. judges/VQAScore/bin/activate
pip install vllm
vllm serve Qwen/Qwen3-VL-8B-Instruct --host 127.0.0.1 --port 8000
# In the recipe, or with lightning score:
#   reward: {class_path: VQAScore, init_args: {url: "http://127.0.0.1:8000/v1"}}
