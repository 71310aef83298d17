#!/bin/bash
# Llama 3 8B in fp8 on 8 H100: 9.49 s a step (examples/llama/README.md of Megatron-LM).
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=8
NUM_NODES=${NUM_NODES:-1}
WORLD_SIZE=$(($GPUS_PER_NODE * $NUM_NODES))
CP_SIZE=2
MICRO_BATCH=1
GLOBAL_BATCH=$((WORLD_SIZE * 16))
DTYPE="fp8"
CHECKPOINTS=${1:-"checkpoints"}

DISTRIBUTED=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NUM_NODES
    --node_rank ${NODE_RANK:-0}
    --master_addr ${MASTER_ADDR:-localhost}
)
MODEL=(
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336
    --num-attention-heads 32 --group-query-attention --num-query-groups 8
    --seq-length 8192 --max-position-embeddings 8192 --position-embedding-type rope
    --swiglu --normalization RMSNorm --disable-bias-linear
    --untie-embeddings-and-output-weights
    --attention-dropout 0.0 --hidden-dropout 0.0  # as published
)
TRAINING=(--micro-batch-size $MICRO_BATCH --global-batch-size $GLOBAL_BATCH --lr 1.5e-4 --bf16
    --grad-reduce-in-bf16 --cross-entropy-loss-fusion)
if [[ "$DTYPE" == "fp8" ]]; then
    TRAINING+=("--fp8-format hybrid" "--fp8-param-gather")
fi
DATA_ARGS=(--mock-data --tokenizer-type NullTokenizer --vocab-size 128256 --num-workers 1)

torchrun ${DISTRIBUTED[@]} pretrain_gpt.py \
    ${MODEL[@]} \
    ${TRAINING[@]} \
    --context-parallel-size $CP_SIZE --sequence-parallel \
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather \
    ${DATA_ARGS[@]} --save "$CHECKPOINTS" --log-interval 1
