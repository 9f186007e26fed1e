#!/bin/bash
# GRPO on 2 nodes of 8 GPUs: on each node four processes train on GPUs 0-3 and four vLLM servers run on GPUs 4-7.
#
#     sbatch docs/slurm.sh
#
# The clone with its .venv, the run folder and run.yaml (model, data, rewards) must be on a file system that both nodes
# share. tests/test_slurm.py runs this file on two nodes without GPUs; it has never run on GPUs.
#SBATCH --job-name=strop
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@180
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail

cd "$SLURM_SUBMIT_DIR"
. .venv/bin/activate
export RUN="runs/slurm-$SLURM_JOB_ID"
STROP_VLLM_TOKEN=$(python -c 'import secrets; print(secrets.token_urlsafe(32))')
export STROP_VLLM_TOKEN  # anyone who has it can replace the weights; both steps inherit it

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
urls=()
for node in "${nodes[@]}"; do
    for port in 8000 8001 8002 8003; do urls+=("http://$node:$port"); done
done

# model, dtype, lora.r and sync.backend of run.yaml are read by both sides.
srun --overlap --gpus-per-task=8 bash -c \
    'exec python -m rollout.serve --config run.yaml --vllm.host "$SLURMD_NODENAME" --vllm.port 8000 --vllm.replicas 4 --vllm.devices 4 5 6 7' &
servers=$!
trap 'kill "$servers" 2>/dev/null || true' EXIT
for url in "${urls[@]}"; do
    until curl -sf -o /dev/null -H "Authorization: Bearer $STROP_VLLM_TOKEN" "$url/health"; do
        kill -0 "$servers"  # a server that failed to start has logged the reason
        sleep 5
    done
done

# A requeued job resumes from its last checkpoint.
if [ -f "$RUN/config.yaml" ]; then start=(--resume "$RUN"); else start=(--config run.yaml --output-dir "$RUN"); fi
srun --overlap --gpus-per-task=8 torchrun --shutdown-timeout 150 \
    --nnodes 2 --nproc-per-node 4 --max-restarts 3 \
    --rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d --rdzv-endpoint "${nodes[0]}:29500" \
    -m trainer "${start[@]}" \
    --parallel.mode fsdp --parallel.shard 4 \
    --rollout.engine vllm --vllm.url "${urls[@]}" --sync.backend process_group &
trainer=$!

# 180 s before the time limit: end only the trainer, which finishes its step with the servers and saves a checkpoint.
# SIGTERM for srun itself would kill its tasks.
stop() { stopped=1; scancel --signal=TERM "$SLURM_JOB_ID.1"; } # step 0: servers, step 1: torchrun
trap stop USR1
code=0
wait "$trainer" || code=$?
if [ -n "${stopped-}" ]; then
    wait "$trainer" && exit 0
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
