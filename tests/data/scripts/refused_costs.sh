#!/bin/bash
# Three things that a job does not have, and a size that is missing.
torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 24 --hidden-size 2048 --bf16 \
    --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048 --vocab-size 32000 \
    --micro-batch-size 1 --heterogeneous-layers-config-path layers.json --moe-extended-tp \
    --skip-train --global-batch-size many
