python -m verl.trainer.sft_trainer \
    model.partial_pretrain=/models/Qwen2.5-7B-Instruct \
    model.lora_rank=32 \
    model.lora_alpha=64 \
    model.target_modules=all-linear \
    data.train_files=/data/sft_train.parquet \
    data.val_files=/data/sft_val.parquet \
    data.prompt_dict_keys=['question'] \
    data.prompt_key=extra_info \
    data.response_key=response \
    data.max_length=4096 \
    optim.lr=1e-5 \
    trainer.total_epochs=3 \
    trainer.n_gpus_per_node=4 \
    trainer.experiment_name=qwen7b_sft
