# Read by slurm.sh.
export LAYERS=40 HIDDEN=5120 SEQ=4096
TP=4 PP=2
GBS=$((4 * 8 / TP / PP * 32))
