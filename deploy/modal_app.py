"""Not run on Modal. Trains in a container; the run folder and the hub's cache are on a volume.

modal run --detach deploy/modal_app.py --recipe sd3_pickscore
"""

import subprocess

import modal

GPUS = 8
image = (
    modal.Image.debian_slim(python_version="3.12")
    .add_local_dir(".", "/app", copy=True, ignore=[".venv", ".git", "runs", "build"])
    .run_commands('pip install "/app[rewards]"')
    .env({"HF_HOME": "/data/hub"})
)
app = modal.App("lit-vgrpo", image=image)
volume = modal.Volume.from_name("lit-vgrpo", create_if_missing=True)


@app.function(
    gpu=f"H100:{GPUS}",
    timeout=24 * 3600,
    retries=3,
    volumes={"/data": volume},
    secrets=[modal.Secret.from_name("huggingface")],  # HF_TOKEN, for gated weights
)
def train(recipe: str) -> None:
    """Start the run, or continue it after a retry."""
    command = ["lit-vgrpo", "run", recipe, "run_dir=/data/job", "--resume", f"trainer.devices={GPUS}"]
    subprocess.run(command, check=True)


@app.local_entrypoint()
def main(recipe: str = "sd3_pickscore") -> None:
    """Run on Modal's machines."""
    train.remote(recipe)
