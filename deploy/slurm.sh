#!/usr/bin/env bash
# Not run on a cluster. SLURM: one task per GPU; a requeued job continues its run.
#   sbatch deploy/slurm.sh
#SBATCH --nodes=1
#SBATCH --gpus-per-node=8
#SBATCH --ntasks-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=SIGTERM@120
#SBATCH --requeue
set -e
cd "$SLURM_SUBMIT_DIR"
RECIPE=${RECIPE:-sd3_pickscore}
srun .venv/bin/lit-vgrpo run "$RECIPE" run_dir=runs/job --resume \
    trainer.devices="$SLURM_NTASKS_PER_NODE" trainer.num_nodes="$SLURM_NNODES"
