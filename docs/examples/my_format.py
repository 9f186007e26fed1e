"""A data format for rows such as {"terms": [17, 25], "total": 42}, which no built-in format reads.

python -m data.show --data sums.jsonl --data-format my_format.sums --kind prompts --model builtin:tiny
python -m trainer --method grpo --data sums.jsonl --data-format my_format.sums
"""

from __future__ import annotations


def sums(cfg):
    """Called once with the Config of the run; what it returns is called with every row."""

    def to_prompt(row):
        question = "+".join(map(str, row["terms"])) + "="
        return {"prompt": [{"role": "user", "content": question}], "answer": str(row["total"])}

    return to_prompt, {"remove_columns": ["terms", "total"]}  # other columns stay, for the rewards
