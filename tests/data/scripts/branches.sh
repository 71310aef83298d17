#!/usr/bin/env bash
# Sizes by name, as of a table of a paper: if, elif, case, for, a function and tests.
set -euo pipefail
MODEL_SIZE=${MODEL_SIZE:-7.5B}
usage() {
    echo "usage: $0 SIZE" >&2
}
while [[ $# -gt 0 ]]; do
    case $1 in
        --size) MODEL_SIZE="$2"; shift 2 ;;
        *) usage; exit 1 ;;
    esac
done
if [ ${MODEL_SIZE} == "1.7B" ]; then
    TP=1; LAYERS=24; HIDDEN=2304; HEADS=24; MBS=16
elif [ ${MODEL_SIZE} == "7.5B" ]; then
    TP=4; LAYERS=36; HIDDEN=4096; HEADS=32; MBS=16
else
    echo "no such size"; exit 1
fi
case "$MODEL_SIZE" in
    1.7B|3.6B) RECOMPUTE="" ;;
    *) RECOMPUTE="--recompute-granularity full --recompute-method uniform" ;;
esac
[ -z "${GBS:-}" ] && GBS=512
for precision in fp16 bf16; do
    PRECISION="--$precision"
done
if [ -n "$RECOMPUTE" ] && [[ $LAYERS -gt 30 ]]; then EXTRA="$RECOMPUTE --recompute-num-layers 1"; else EXTRA=""; fi
if [ ! -f pretrain_gpt.py ]; then
    echo "run it from the checkout"
fi
command="python -u pretrain_gpt.py --tensor-model-parallel-size $TP --num-layers $LAYERS \
    --hidden-size ${HIDDEN} --num-attention-heads $HEADS --micro-batch-size $MBS \
    --global-batch-size $GBS --seq-length 2048 --max-position-embeddings 2048 \
    --tokenizer-type GPT2BPETokenizer $PRECISION $EXTRA"
mpirun -np 64 bash -c "${command}" 2>&1 | tee log.txt
