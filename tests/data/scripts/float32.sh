#!/bin/bash
# Neither --bf16 nor --fp16: training is in float32.
torchrun --nproc_per_node 8 --nnodes 2 pretrain_gpt.py \
    --tensor-model-parallel-size 4 \
    --sequence-parallel \
    --num-layers 24 \
    --hidden-size 2048 \
    --num-attention-heads 16 \
    --seq-length 2048 \
    --max-position-embeddings 2048 \
    --micro-batch-size 2 \
    --global-batch-size 64 \
    --attention-dropout 0 --hidden-dropout 0 \
    --vocab-size 50257 \
    --data-path data --mock-data
