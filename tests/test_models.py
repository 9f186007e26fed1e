"""The table of docs/models.md equals what the code does; `python -m tests.models --write docs/models.md` updates it."""

from __future__ import annotations

import pytest
import torch
import transformers

from data.errors import UserError
from rollout.engines.forward import TransformersForward
from tests.entry import ROOT
from tests.models import ATTENTION, CPU, RECURRENT, all_rows, make_model, read_rows, row_of
from trainer.policy.load import quantize_layers
from trainer.policy.logps import head_of

PAGE = (ROOT / "docs/models.md").read_text(encoding="utf-8")
other_version = pytest.mark.skipif(
    f"transformers {transformers.__version__}," not in PAGE, reason="the page has another version of transformers"
)


@other_version
@pytest.mark.parametrize("kind", ["llama", "gpt_oss", "lfm2"])
def test_some_rows_are_up_to_date(kind, tmp_path):
    row = row_of(kind, tmp_path)
    assert {name: read_rows(PAGE)[kind][name] for name in row} == row


@other_version
@pytest.mark.slow
def test_all_rows_are_up_to_date(tmp_path):
    """Without .venv-vllm the column of vLLM is not compared."""
    page, rows = read_rows(PAGE), all_rows(ATTENTION | RECURRENT, tmp_path)
    assert {kind: {name: page[kind][name] for name in row} for kind, row in rows.items()} == rows
    assert page.keys() == rows.keys() and len(page) >= 24


def test_models_without_linear_layers_are_rejected_in_4_bits():
    with pytest.raises(UserError, match=r"^load_in_4bit=True: GPT2LMHeadModel "):
        quantize_layers(make_model("gpt2"), CPU)


def test_the_logit_cap_of_xlstm_is_applied():
    assert head_of(make_model("xlstm"))["softcap"] == 30


def test_layers_that_cannot_continue_from_a_state_use_no_pages():
    """Rows that were evicted and turns of a conversation start from a state."""
    with pytest.raises(ValueError, match="ignore the state"):
        _ = TransformersForward(make_model("jamba").eval(), torch.float32).states
