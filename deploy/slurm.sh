#!/usr/bin/env bash
# SLURM: one task per GPU. A job that is preempted, loses a node or reaches its time limit continues its run.
#   sbatch deploy/slurm.sh sd3_pickscore model.objective.num_mc_samples=8
#   SWEEP="seed_everything=1 seed_everything=2" sbatch --array=0-1 deploy/slurm.sh    # one of them for each task
# Run on CPUs with SLURM 22.05: pytest -m slow tests/training/test_slurm.py
#SBATCH --nodes=1
#SBATCH --gpus-per-node=8
#SBATCH --ntasks-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
cd "$SLURM_SUBMIT_DIR"
PATH=$PWD/.venv/bin:$PATH
if ! command -v lit-vgrpo >/dev/null; then
    echo "No lit-vgrpo in $PWD/.venv or on the PATH. Run sbatch in the repository, or activate its environment first." >&2
    exit 2
fi
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK  # which srun no longer takes from the job
RECIPE=${1:-${RECIPE:-sd3_pickscore}}
sweep=($SWEEP)

# SLURM does not requeue a job at its time limit, so the job does it, once the run has been saved.
end_for_requeue() {
    requeue=yes
    scancel --signal=TERM "$SLURM_JOB_ID"  # only the ranks
}
trap end_for_requeue USR1
srun lit-vgrpo run "$RECIPE" run_dir="runs/job${SLURM_ARRAY_TASK_ID:+-$SLURM_ARRAY_TASK_ID}" --resume \
    trainer.devices="$SLURM_NTASKS_PER_NODE" trainer.num_nodes="$SLURM_NNODES" \
    "${@:2}" ${sweep[$SLURM_ARRAY_TASK_ID]} &
while status=0; wait $! || status=$?; kill -0 $! 2>/dev/null; do :; done
[ -z "$requeue" ] || scontrol requeue "$SLURM_JOB_ID"
exit "$status"
