"""roles_to_train, train_on_inputs and train_on_eos: the trained tokens of a conversation."""

from __future__ import annotations

import pytest

from data.chat import Trained, render_conversation, set_chat_template
from data.rows.sft import load_examples

TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "2+2="},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "and 3+3?"},
    {"role": "assistant", "content": "six"},
]
BOS = {"llama3": "<|begin_of_text|>", "gemma": "<bos>"}
END = {"chatml": "<|im_end|>", "llama3": "<|eot_id|>", "gemma": "<end_of_turn>", "phi_3": "<|end|>",
       "phi_4": "<|im_end|>", "qwen_25": "<|im_end|>", "qwen3": "<|im_end|>"}  # fmt: skip
CASES = {  # trained parts of TURNS; . is the end-of-turn token
    Trained(): ["4.", "six."],
    Trained(eos="none"): ["4", "six"],
    Trained(eos="last"): ["4", "six."],
    Trained(eos="all"): [".", ".", "4.", ".", "six."],
    Trained(("user",)): ["2+2=.", "and 3+3?."],
    Trained(("user",), "none"): ["2+2=", "and 3+3?"],
    Trained(("user",), "last"): ["2+2=", "and 3+3?."],
    Trained(("user", "assistant")): ["2+2=.", "4.", "and 3+3?.", "six."],
    Trained(("system",)): ["Be brief.."],
    Trained(("system",), "all"): ["Be brief..", ".", ".", ".", "."],
    Trained(inputs=True): ["Be brief..", "2+2=.", "4.", "and 3+3?.", "six."],
    Trained(inputs=True, eos="last"): ["Be brief.", "2+2=", "4", "and 3+3?", "six."],
}


def pieces(tokenizer, ids: list[int], mask: list[bool], end: str) -> list[str]:
    """Decode the runs of trained tokens, with . for the end-of-turn token."""
    runs, open_run = [], False
    for token, trains in zip(ids, mask, strict=True):
        if trains:
            runs = [*runs[:-1], [*runs[-1], token]] if open_run else [*runs, [token]]
        open_run = trains
    return [tokenizer.decode(run).replace(end, ".") for run in runs]


@pytest.mark.parametrize("trained", CASES, ids=str)
@pytest.mark.parametrize("name", sorted(END))
def test_roles_and_end_tokens(name, trained, tokenizer_of):
    tokenizer = tokenizer_of(name, bos=BOS.get(name))
    set_chat_template(tokenizer, name)
    ids, mask = render_conversation(tokenizer, TURNS, trained=trained)
    wanted = list(CASES[trained])
    if name == "gemma" and wanted[0] == "Be brief..":  # the system text is in the first user turn
        wanted[0] = "Be brief."
    if name == "gemma" and trained.eos == "all":
        wanted = wanted[1:] if wanted[0] == "." else wanted
    if name == "qwen3" and wanted[-1].startswith("six"):  # it writes an empty thought before the last answer
        wanted[-1] = "<think>\n\n</think>\n\n" + wanted[-1]
    got = pieces(tokenizer, ids, mask, END[name])
    if name == "phi_4" and trained.eos == "all":  # end token and next header are adjacent
        assert "".join(got) == "".join(wanted)
    else:
        assert got == wanted


def test_results_of_tools_are_text_within_their_turn(tokenizer_of):
    tokenizer = tokenizer_of("qwen_25")
    set_chat_template(tokenizer, "qwen_25")
    call = {"function": {"name": "add", "arguments": {}}}
    turns = [*TURNS[1:2], {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "4"},
             {"role": "tool", "content": "5"}, TURNS[2]]  # fmt: skip
    ids, mask = render_conversation(tokenizer, turns, trained=Trained(("tool",)))
    assert pieces(tokenizer, ids, mask, "<|im_end|>") == ["4", "5", "."]


def test_text_that_merges_with_the_text_before_it_is_rejected(tokenizer_of):
    tokenizer = tokenizer_of("chatml", merges=(("r", "h"),))
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role + m.content + '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}assistant{% endif %}"
    )
    turns = [{"role": "user", "content": "hm"}, TURNS[2]]
    assert render_conversation(tokenizer, turns)
    with pytest.raises(ValueError, match=r"messages\[0\]: .* not a prefix"):
        render_conversation(tokenizer, turns, trained=Trained(("user",)))


def trained_text(tokenizer, path: str, trained: Trained) -> list[str]:
    (example,) = load_examples([path], tokenizer, trained=trained)
    return pieces(tokenizer, example.ids, example.mask, "<|endoftext|>")


def test_prompts_of_plain_text(chatml, write):
    path = write({"prompt": "2+2=", "completion": "4"})
    assert trained_text(chatml, path, Trained()) == ["4."]
    assert trained_text(chatml, path, Trained(eos="none")) == ["4"]
    assert trained_text(chatml, path, Trained(inputs=True)) == ["+2=4."]  # nothing predicts the first token
    text = write({"text": "2+2=4"}, name="text.jsonl")
    assert trained_text(chatml, text, Trained()) == ["+2=4."]
    assert trained_text(chatml, text, Trained(eos="none")) == ["+2=4"]
    with pytest.raises(ValueError, match="train_on_inputs=True: has no effect"):
        trained_text(chatml, text, Trained(inputs=True))
    with pytest.raises(ValueError, match="roles_to_train: has no effect"):
        trained_text(chatml, path, Trained(("user",)))


def test_a_prompt_of_messages_is_context_unless_inputs_are_trained(chatml, write):
    path = write({"prompt": TURNS[:4], "completion": "six"})
    for trained, wanted in (
        (Trained(("user", "assistant")), ["six."]),
        (Trained(inputs=True), ["Be brief..", "2+2=.", "4.", "and 3+3?.", "six."]),
    ):
        (example,) = load_examples([path], chatml, trained=trained)
        assert pieces(chatml, example.ids, example.mask, "<|im_end|>") == wanted
    with pytest.raises(ValueError, match="none of the 1 rows has a turn of user"):
        load_examples([path], chatml, trained=Trained(("user",)))
