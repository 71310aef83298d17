#!/bin/bash
# A script within the script.
MBS=2
ARGS="--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 \
  --max-position-embeddings 1024 --micro-batch-size $MBS --global-batch-size 64 --fp16 --vocab-size 50257"
sbatch <<EOF
#!/bin/bash
#SBATCH -N 2
#SBATCH --gpus-per-node=8
srun python -m torch.distributed.run --nproc_per_node 8 pretrain_gpt.py ${ARGS}
EOF
