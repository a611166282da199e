# RationalRewards (T2I): faithfulness, quality and rendered text, the mean of up to three scores from 1 to 4
# Source: github.com/TIGER-AI-Lab/RationalRewards at 44e27ab68d537bee8a6831efe000701664853435, README.md
# Licence: Apache-2.0 (card of the Edit model). Not run with the real weights.
set -e
python3.11 -m venv judges/RationalRewards
. judges/RationalRewards/bin/activate
pip install vllm
vllm serve TIGER-Lab/RationalRewards-8B-T2I --host 127.0.0.1 --port 8000
# In the recipe, or with lightning score:
#   reward: {class_path: RationalRewards, init_args: {url: "http://127.0.0.1:8000/v1"}}
