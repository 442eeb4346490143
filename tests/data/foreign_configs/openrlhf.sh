ray start --head --node-ip-address 0.0.0.0 --num-gpus 8
ray job submit --address="http://127.0.0.1:8265" \
   --runtime-env-json='{"working_dir": "/openrlhf"}' \
   -- python3 -m openrlhf.cli.train_ppo_ray \
   --ref_num_nodes 1 --ref_num_gpus_per_node 4 \
   --actor_num_nodes 1 --actor_num_gpus_per_node 4 \
   --vllm_num_engines 4 --vllm_tensor_parallel_size 1 \
   --pretrain OpenRLHF/Llama-3-8b-sft-mixture \
   --remote_rm_url http://localhost:5000/get_reward \
   --save_path /output/llama3_8b_rlhf --ckpt_path /output/ckpt \
   --micro_train_batch_size 8 --train_batch_size 128 \
   --micro_rollout_batch_size 16 --rollout_batch_size 64 \
   --n_samples_per_prompt 8 --max_samples 100000 --max_epochs 1 --num_episodes 2 \
   --prompt_max_len 1024 --generate_max_len 1024 \
   --advantage_estimator group_norm --use_kl_loss --init_kl_coef 1e-3 --kl_estimator k3 \
   --eps_clip_low_high 0.2 0.28 --zero_stage 3 --bf16 \
   --actor_learning_rate 5e-7 --lr_warmup_ratio 0.03 \
   --prompt_data OpenRLHF/prompt-collection --input_key context_messages --apply_chat_template \
   --packing_samples --gradient_checkpointing --vllm_sync_backend nccl --enforce_eager
