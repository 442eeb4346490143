"""Which built-in reward fits which data set, as data.

Keys are what the data sets of verl, ROLL and the usual collections write into ``data_source``. A
reward name found here works too, so that ``reward.name = "math_reasoning"`` means what its user expects.
"""

from __future__ import annotations

AUTO = "auto"  # the reward name that says: choose by the row's data_source

BY_SOURCE: dict[str, str] = {
    # answers after ####
    "gsm8k": "gsm8k",
    "openai/gsm8k": "gsm8k",
    "gsm8k_main": "gsm8k",
    # numbers and formulas, marked or not
    "math_reasoning": "math_flexible",
    # answers in \boxed{}
    "math": "math",
    "MATH": "math",
    "math500": "math",
    "lighteval/MATH": "math",
    "DigitalLearningGmbH/MATH-lighteval": "math",
    "HuggingFaceH4/MATH-500": "math",
    "hendrycks/competition_math": "math",
    "EleutherAI/hendrycks_math": "math",
    "agentica-org/DeepScaleR-Preview-Dataset": "math",
    "AI-MO/NuminaMath-CoT": "math",
    "numina_aops_forum": "math",
    "numina_synthetic_math": "math",
    "numina_amc_aime": "math",
    "numina_synthetic_amc": "math",
    "numina_cn_k12": "math",
    "numina_olympiads": "math",
    "hiyouga/geometry3k": "math",
    "amc23": "math",
    "minerva_math": "math",
    "olympiadbench": "math",
    # answers on a line "Answer: ...", or in a box
    "math_dapo": "answer_line",
    "math_dapo_reasoning": "answer_line",
    "BytedTsinghua-SIA/DAPO-Math-17k": "answer_line",
    "aime": "answer_line",
    "aime24": "answer_line",
    "aime2024": "answer_line",
    "aime2025": "answer_line",
    "aime25": "answer_line",
    "aime_2024": "answer_line",
    "aime_2025": "answer_line",
    "HuggingFaceH4/aime_2024": "answer_line",
    # programs
    "code": "code",
    "code_generation": "code",
    "codecontests": "code",
    "apps": "code",
    "codeforces": "code",
    "taco": "code",
    "livecodebench": "code",
    "humaneval": "code",
    "openai_humaneval": "code",
    "openai/openai_humaneval": "code",
    "mbpp": "code",
    "google-research-datasets/mbpp": "code",
    "PrimeIntellect/verifiable-coding-problems": "code",
    # answers in <answer> tags, by their words
    "qa": "qa_em",
    "trivia": "qa_em",
    **{
        f"searchR1_{name}": "qa_em"
        for name in ("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle")
    },
    # labels and letters
    "classification": "classification",
    "multiple_choice": "multiple_choice",
    # answers that are the whole completion
    "sort_digits": "exact_match",
    "exact_match": "exact_match",
    "spell_backward": "exact_match",
}
