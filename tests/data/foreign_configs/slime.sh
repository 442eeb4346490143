#!/bin/bash
BASE=/models
CKPT_ARGS=(
   --hf-checkpoint ${BASE}/Qwen3-4B
   --ref-load ${BASE}/Qwen3-4B_torch_dist
   --save ${BASE}/out
   --save-interval 20
)
ROLLOUT_ARGS=(
   --prompt-data /data/dapo-math-17k.jsonl
   --input-key prompt
   --label-key label
   --apply-chat-template
   --rollout-shuffle
   --rm-type deepscaler
   --num-rollout 3000
   --rollout-batch-size 32
   --n-samples-per-prompt 8
   --rollout-max-response-len 8192
   --rollout-temperature 1
   --rollout-stop "</answer>"
   # the trainer's batch, in completions
   --global-batch-size 256
   --balance-data
)
GRPO_ARGS=(
   --advantage-estimator grpo
   --use-kl-loss
   --kl-loss-coef 0.001
   --kl-loss-type low_var_kl
   --entropy-coef 0.00
   --eps-clip 0.2
   --eps-clip-high 0.28
   --use-tis
)
OPTIMIZER_ARGS=( --optimizer adam --lr 1e-6 --lr-decay-style constant --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.98 )
SGLANG_ARGS=(
   --rollout-num-gpus-per-engine 2
   --sglang-mem-fraction-static 0.7
)
ray job submit --address="http://127.0.0.1:8265" -- python3 train_async.py \
   --actor-num-nodes 1 --actor-num-gpus-per-node 4 --rollout-num-gpus 4 \
   ${CKPT_ARGS[@]} "${ROLLOUT_ARGS[@]}" ${GRPO_ARGS[@]} ${OPTIMIZER_ARGS[@]} ${SGLANG_ARGS[@]} \
   --max-tokens-per-gpu 9216 --tensor-model-parallel-size 2 --sequence-parallel
