# EditReward (MiMo-VL-7B): how well an image follows an edit of a picture, without a fixed range
# Source: github.com/TIGER-AI-Lab/EditReward at edb027edde6080b8a9521ef8e87049b3797f8374, README.md
# Licence: MIT (code). Not run with the real weights.
set -e
python3.10 -m venv judges/EditReward
. judges/EditReward/bin/activate
pip install torch==2.5.1 torchvision==0.20.1 torchaudio==2.5.1 --index-url https://download.pytorch.org/whl/cu124
pip install datasets pillow openai megfile sentencepiece deepspeed fire omegaconf matplotlib peft trl==0.8.6 tensorboard \
    scipy transformers==4.57.0 accelerate
pip install https://github.com/Dao-AILab/flash-attention/releases/download/v2.7.2.post1/\
flash_attn-2.7.2.post1+cu12torch2.5cxx11abiFALSE-cp310-cp310-linux_x86_64.whl
git clone https://github.com/TIGER-AI-Lab/EditReward.git judges/EditReward/code
git -C judges/EditReward/code checkout edb027edde6080b8a9521ef8e87049b3797f8374
pip install --no-deps lit-vgrpo  # its pinned packages would replace the judge's
pip install "fastapi>=0.165" "starlette>=1.10" "uvicorn>=0.30" "httpx>=0.27" "tenacity>=9" "typer>=0.20" "pydantic>=2" \
    "omegaconf>=2.3" "jsonargparse[signatures,omegaconf]>=4.41" safetensors pillow numpy
cd judges/EditReward/code  # the package is imported from here
lightning serve-reward EditReward --port 8001
# In the recipe, or with lightning score:
#   reward: {class_path: HTTPReward, init_args: {url: "http://127.0.0.1:8001/score", name: edit_reward, send_pictures: true}}
