#!/bin/bash
# A preference training of TRL's scripts/dpo.py
trl dpo \
    --model_name_or_path Qwen/Qwen3-0.6B \
    --dataset_name trl-lib/ultrafeedback_binarized \
    --learning_rate 5.0e-7 \
    --max_steps 500 \
    --beta 0.2 \
    --loss_type robust \
    --label_smoothing 0.1 \
    --f_divergence_type js_divergence \
    --precompute_ref_log_probs true \
    --lora_r 16
