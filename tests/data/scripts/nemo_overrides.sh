# Overrides of Hydra, with a variable.
LAYERS=40
python -m torch.distributed.run --nproc_per_node=8 --nnodes 2 megatron_gpt_pretraining.py \
    --config-path=conf trainer.precision=bf16 ++model.num_layers=$LAYERS model.hidden_size=5120 \
    model.ffn_hidden_size=13824 model.num_attention_heads=40 model.encoder_seq_length=4096 \
    model.max_position_embeddings=4096 model.micro_batch_size=1 model.global_batch_size=32 \
    model.tensor_model_parallel_size=4 model.activation=fast-swiglu model.normalization=rmsnorm \
    model.bias=False model.data.data_prefix=[1.0,/data/x] exp_manager.exp_dir=/results
