"""Train a step with the real TRL and the class of `counter.py`; print what TRL makes of the class. A program of an interpreter with `trl`."""

from __future__ import annotations

import json
import sys

import torch
from counter import Counter
from datasets import Dataset
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from transformers.utils import get_json_schema
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import qwen2_5_chat_template


class Noted(Counter):
    resets: list[int] = []  # noqa: RUF012 - printed at the end
    rewards: list[float] = []  # noqa: RUF012 - printed at the end

    def reset(self, goal: int = 3, **kwargs: object) -> str:
        self.resets.append(goal)
        return super().reset(goal, **kwargs)

    def get_reward(self) -> float:
        self.rewards.append(super().get_reward())
        return self.rewards[-1]


def main() -> None:
    folder = sys.argv[1]
    torch.manual_seed(0)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=f"{folder}/tokenizer.json", eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = qwen2_5_chat_template  # TRL reads calls of tools with templates that it knows
    size = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=len(tokenizer), max_position_embeddings=4096, **size))
    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": "Count."}], "goal": 4}] * 4)
    settings = GRPOConfig(
        output_dir=f"{folder}/out", max_steps=1, per_device_train_batch_size=2, num_generations=2, max_completion_length=8,
        report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=model, args=settings, train_dataset=rows, processing_class=tokenizer, environment_factory=Noted
    )
    trainer.train()
    tools = trainer._sync_tool_dicts[0] | trainer._async_tool_dicts[0]  # as TRL calls them by name
    print(
        json.dumps(
            {
                "tools": [get_json_schema(tool) for tool in tools.values()],
                "resets": Noted.resets,
                "rewards": Noted.rewards,
            }
        )
    )


if __name__ == "__main__":
    main()
