# DeQA-Score: technical quality of an image, 1 to 5, whatever its prompt
# Source: github.com/zhiyuanyou/DeQA-Score at 8e4abc826ed84a15f7c0bc3ac119e8b9245c7b2f, README.md and pyproject.toml
# Licence: MIT. Not run with the real weights.
set -e
python3.11 -m venv judges/DeQA
. judges/DeQA/bin/activate
pip install torch==2.0.1 torchvision==0.15.2 transformers==4.36.1 tokenizers==0.15.0 sentencepiece==0.1.99 accelerate==0.21.0 \
    einops==0.6.1 icecream scipy "numpy<2"
pip install --no-deps lit-vgrpo  # its pinned packages would replace the judge's
pip install "fastapi>=0.165" "starlette>=1.10" "uvicorn>=0.30" "httpx>=0.27" "tenacity>=9" "typer>=0.20" "pydantic>=2" \
    "omegaconf>=2.3" "jsonargparse[signatures,omegaconf]>=4.41" safetensors pillow numpy
lightning serve-reward DeQA --port 8001
# In the recipe, or with lightning score:
#   reward: {class_path: HTTPReward, init_args: {url: "http://127.0.0.1:8001/score", name: deqa}}
