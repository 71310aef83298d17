#!/bin/bash
# A launch script of Megatron-LM, with sizes above the command that uses them.
GPUS_PER_NODE=8
NUM_NODES=${NUM_NODES:-4}
TP=4
LAYERS=32
GLOBAL_BATCH=$((GPUS_PER_NODE * NUM_NODES * 8))

MODEL_ARGS=(
    --num-layers $LAYERS --hidden-size 4096 --ffn-hidden-size 14336
    --num-attention-heads 32 --group-query-attention --num-query-groups 8
    --seq-length 8192 --max-position-embeddings 8192 --position-embedding-type rope
    --swiglu --normalization RMSNorm --disable-bias-linear
    --untie-embeddings-and-output-weights --attention-dropout 0.0 --hidden-dropout 0.0
)
DATA_ARGS=(--data-path $DATA_PATH --tokenizer-type HuggingFaceTokenizer --vocab-size 128256)

torchrun --nproc_per_node $GPUS_PER_NODE --nnodes $NUM_NODES pretrain_gpt.py \
    "${MODEL_ARGS[@]}" "${DATA_ARGS[@]}" \
    --tensor-model-parallel-size $TP --sequence-parallel --micro-batch-size 1 \
    --global-batch-size $GLOBAL_BATCH --bf16 --lr 3e-4 --use-distributed-optimizer \
    --overlap-grad-reduce --overlap-param-gather --delay-wgrad-compute \
    --save ${CHECKPOINTS:-checkpoints} --log-interval 10
