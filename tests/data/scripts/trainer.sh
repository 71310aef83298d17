#!/bin/bash
# The Trainer of Transformers under DeepSpeed.
MODEL=meta-llama/Llama-2-7b-hf
deepspeed --num_nodes 2 --num_gpus 8 finetune.py \
    --model_name_or_path $MODEL --deepspeed ds_config.json --bf16 True --output_dir ./out \
    --per_device_train_batch_size 2 --gradient_accumulation_steps 4 --model_max_length 2048 \
    --gradient_checkpointing True --learning_rate 2e-5 --data_path ./data.json --logging_steps 1
