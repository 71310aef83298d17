#!/bin/bash
# A value that no one says: it is asked for by its name.
torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 24 --hidden-size 2048 --bf16 \
    --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048 --vocab-size 32000 \
    --tensor-model-parallel-size $TENSOR_RANKS --micro-batch-size 1 --data-path $WHERE
