# What other scripts read: no command, lists of options in variables.
if [ -z ${HF_MODEL_CKPT} ]; then
    HF_MODEL_CKPT=Qwen/Qwen3-8B
    TOKENIZER_MODEL=Qwen/Qwen3-8B
fi
MODEL_ARGS=" \
    --micro-batch-size 1 --bf16 --disable-bias-linear --untie-embeddings-and-output-weights \
    --position-embedding-type rope --normalization RMSNorm --swiglu --num-layers 36 \
    --hidden-size 4096 --ffn-hidden-size 12288 --num-attention-heads 32 --group-query-attention \
    --num-query-groups 8 --kv-channels 128 --qk-layernorm --seq-length 4096 \
    --max-position-embeddings 40960 --tokenizer-type HuggingFaceTokenizer \
    --make-vocab-size-divisible-by 1187 --attention-dropout 0.0 --hidden-dropout 0.0 \
"
