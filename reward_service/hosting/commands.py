"""The commands that serve a reward: of `penstock reward` and of ``python -m penstock.reward_service``; imports nothing slow before one is run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from penstock.protocol.command_line import FLAT, Help, Host, Port, SigningKeys


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Where a reward is served, and where it is registered."""

    name: Annotated[str, Help("Reward name that rows request; default the name of the file or folder.")] = ""
    host: Host = "127.0.0.1"
    port: Port = 0
    url: Annotated[str, Help("URL at which the reward service reaches this endpoint; default from host and port.")] = ""
    register: Annotated[
        str,
        Help(
            "URL of the reward service to register at, e.g. http://127.0.0.1:8700; replicas with commas between them."
        ),
    ] = ""
    token_file: Annotated[Path | None, Help("File with the reward service's bearer token.")] = None
    secret_file: SigningKeys = None
    drain_s: Annotated[float, Help("Seconds that calls in progress may take after Ctrl-C.")] = 30.0


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """The chat endpoint of a grader's score_model."""

    base_url: Annotated[str, Help("Chat endpoint of score_model graders, e.g. http://.../v1")] = ""
    api_key_env: Annotated[str, Help("Environment variable with its API key.")] = ""
    api_key_file: Annotated[Path | None, Help("File with its API key.")] = None
    concurrency: Annotated[int, Help("Concurrent requests to the model.")] = 16
    timeout_s: Annotated[float, Help("Deadline of one model request in seconds, retries included.")] = 120.0


def serve(
    file: Annotated[Path, Help("The Python file.")],
    *,
    function: Annotated[str | None, Help("Name of the function, if the file has several.")] = None,
    conversational: Annotated[
        bool | None,
        Help(
            "TRL: give prompts and completions as lists of messages, or as texts; default as the function's code reads them.",
            negative="--no-conversational",
        ),
    ] = None,
    timeout_s: Annotated[float, Help("Deadline of one call in seconds, retries included.")] = 30.0,
    options: Annotated[ServeOptions, FLAT] = ServeOptions(),
) -> int:
    """Serve the reward function or class of a Python file (verl, TRL, OpenRLHF) as a reward endpoint.

    The file holds one of these (or several; choose one with --function); each may be async:

      def compute_score(data_source, solution_str, ground_truth, extra_info=None):      # verl, ROLL
          return 1.0                                    # or {"score": 1.0, "format": 0.5}: other keys are parts
      def compute_score(data_sources, solution_strs, ground_truths, extra_infos):       # verl in batches
          return [1.0, ...]
      def reward(prompts, completions, **columns):                                      # TRL, once per group
          return [1.0, ...]                             # columns of the row, each as a list
      def reward_func(queries, prompts, labels):                                        # OpenRLHF
          return {"rewards": [1.0, ...]}
      class Judge:                                                                      # keeps state between calls
          def setup(self): ...                          # once, before it is registered
          def __call__(self, completions, **columns): return [...]

    Raise an exception when a completion cannot be scored: it becomes the score's error, and the group is retried. An error is
    never a 0. The first traceback of each kind is printed here. Ctrl-C unregisters it and lets calls in progress finish; a
    second Ctrl-C exits at once.

    Example:  penstock reward serve my_reward.py --register http://127.0.0.1:8700
    Then:     penstock reward test my_reward
    """
    from penstock.reward_service.hosting.served_reward import serve_file

    return serve_file(file, function, options, conversational=conversational, timeout_s=timeout_s)


def serve_judge(
    file: Annotated[Path, Help("TOML file of the judge.")], *, options: Annotated[ServeOptions, FLAT] = ServeOptions()
) -> int:
    """Serve a language model as a judge endpoint, scoring single answers or comparing pairs.

    The file names the judge's model and settings; reward_service/hosting/judge_settings.py describes every key:

      base_url = "http://127.0.0.1:30000/v1"     # any server with OpenAI's /chat/completions
      model = "Qwen/Qwen3-32B"
      mode = "pointwise"                         # or "pairwise": shares of comparisons won in the group
      api_key_env = "OPENAI_API_KEY"             # or api_key_file = "..."; shown nowhere
      template = '''Task: {{prompt}}
      Answer: {{answer}}
      Write, as the last line: SCORE: a number from 0 to 10'''

    A verdict that cannot be read, is cut off or missing is an error, never a 0: its group is retried. Text from the policy is
    put between marks that it cannot guess, and the judge is instructed not to obey it; see docs/rewards.md.

    Example:  penstock reward serve-judge judge.toml --register http://127.0.0.1:8700
    Then:     penstock reward test judge "a good answer" "a bad one"
    """
    from penstock.reward_service.hosting.chat_rewards import JudgeReward
    from penstock.reward_service.hosting.served_reward import serve_reward

    return serve_reward(JudgeReward(file), file.stem, options)


def serve_grader(
    file: Annotated[Path, Help("JSON file of the grader.")],
    *,
    reference_key: Annotated[str, Help("Key of the ground truth in the item.")] = "reference_answer",
    chat: Annotated[ChatOptions, FLAT] = ChatOptions(),
    options: Annotated[ServeOptions, FLAT] = ServeOptions(),
) -> int:
    """Serve a grader in OpenAI's JSON format as a reward endpoint.

    The file is a grader as OpenAI's guide describes it: string_check, text_similarity, score_model, or multi of these:

      {"type": "multi",
       "graders": {
         "exact": {"type": "string_check", "operation": "eq", "name": "exact",
                   "input": "{{sample.output_text}}", "reference": "{{item.reference_answer}}"},
         "near": {"type": "text_similarity", "evaluation_metric": "fuzzy_match", "name": "near",
                  "input": "{{sample.output_text}}", "reference": "{{item.reference_answer}}"}},
       "calculate_output": "0.9 * exact + 0.1 * near"}

    item holds the row's columns, prompt, data_source, and the ground truth as reference_answer (--reference-key). score_model
    asks a chat endpoint: --base-url, and --api-key-env or --api-key-file. python graders are refused.

    Example:  penstock reward serve-grader grader.json --register http://127.0.0.1:8700
    Then:     penstock reward test grader
    """
    from penstock.reward_service.hosting.chat_rewards import GraderReward, model_settings
    from penstock.reward_service.hosting.served_reward import serve_reward

    return serve_reward(GraderReward(file, reference_key, model_settings(chat)), file.stem, options)
