# HPSv3: predicted human preference for an image and its prompt, without a fixed range
# Source: pypi.org/project/hpsv3 1.0.0 and github.com/MizzenAI/HPSv3
# Licence: MIT (code). Not run with the real weights.
set -e
python3.11 -m venv judges/HPSv3
. judges/HPSv3/bin/activate
pip install hpsv3==1.0.0  # pins transformers==4.45.2
pip install --no-deps lit-vgrpo  # its pinned packages would replace the judge's
pip install "fastapi>=0.165" "starlette>=1.10" "uvicorn>=0.30" "httpx>=0.27" "tenacity>=9" "typer>=0.20" "pydantic>=2" \
    "omegaconf>=2.3" "jsonargparse[signatures,omegaconf]>=4.41" safetensors pillow numpy
lightning serve-reward HPSv3 --port 8001
# In the recipe, or with lightning score:
#   reward: {class_path: HTTPReward, init_args: {url: "http://127.0.0.1:8001/score", name: hpsv3}}
