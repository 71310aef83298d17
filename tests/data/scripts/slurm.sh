#!/bin/bash
#SBATCH --job-name=pretrain
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --gres=gpu:8
# Options in a here-document that `read` takes, and a command that `srun` starts.
source ./common.sh
read -r -d '' OPTIONS <<EOF
    --num-layers $LAYERS --hidden-size $HIDDEN --num-attention-heads $((HIDDEN / 128)) \
    --seq-length ${SEQ} --max-position-embeddings ${SEQ} --swiglu --disable-bias-linear
    --tensor-model-parallel-size ${TP} --pipeline-model-parallel-size $PP
    --micro-batch-size 1 --global-batch-size ${GBS} --bf16 --vocab-size 50257
    --data-path ${DATA} --tensorboard-dir ${SLURM_JOB_ID}/logs
EOF
eval "echo starting $SLURM_JOB_NAME"
srun -l --output=%x_%j.log sh -c "python pretrain_gpt.py ${OPTIONS}"
