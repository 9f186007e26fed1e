"""The user's module of the GDPO example: two rewards and a transform of the rows."""

import re


def format_reward(completions, **kwargs):
    """1 for a completion that is a number and nothing else."""
    return [float(bool(re.fullmatch(r"\s*-?\d+\s*", each[0]["content"]))) for each in completions]


def correctness_reward(completions, answer, **kwargs):
    """2 for the right number."""
    return [2.0 * (each[0]["content"].strip() == want) for each, want in zip(completions, answer, strict=True)]


def gsm8k_transform(cfg, *args, **kwargs):
    """The number behind #### is the answer."""

    def transform(example, tokenizer=None):
        answer = example["answer"].split("####")[-1].strip()
        return {"prompt": [{"role": "user", "content": example["question"]}], "answer": answer}

    return transform, {"remove_columns": ["question"]}
