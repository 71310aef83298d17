#!/bin/bash
# A job of 32 GPUs.
MODEL_ARGS=(
    --num-layers 32 --hidden-size 4096 \
    --ffn-hidden-size=14336
    --num-attention-heads 32 --group-query-attention --num-query-groups 8
    --swiglu --normalization RMSNorm --disable-bias-linear
    --position-embedding-type rope --max-position-embeddings 8192
    --untie-embeddings-and-output-weights --vocab-size 128256
    --attention-dropout 0.0 --hidden-dropout 0.0
)
torchrun --nproc_per_node 8 pretrain_gpt.py --seq-length 8192 --micro-batch-size 1 \
    --global-batch-size 64 --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 \
    --num-layers-per-virtual-pipeline-stage 4 --sequence-parallel --bf16 \
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --lr 3e-4
