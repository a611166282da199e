"""Not run in a Studio. Starts a job on a copy of a Studio in which this repository is installed.

pip install lightning-sdk, then: python deploy/lightning_studio.py
Both packages install a script named lightning, so the command here is lit-vgrpo.
"""

from lightning_sdk import Job, Machine

job = Job.run(
    name="lit-vgrpo",
    studio="my-studio",  # a Studio with the repository in ~/lit-vgrpo, installed by: pip install -e ".[rewards]"
    machine=Machine.H100_X_8,
    command="cd ~/lit-vgrpo && lit-vgrpo run sd3_pickscore run_dir=runs/job --resume trainer.devices=8",
)
job.wait()
