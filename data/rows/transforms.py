"""Whether rows are read by a user's transform, a dotted name such as my_module.my_transform."""

from __future__ import annotations

from collections.abc import Sequence

from data.formats.ebft import EBFT_FORMATS, EBFT_STRIDED_FORMATS
from data.formats.pairs import PAIR_FORMATS
from data.formats.registry import PROMPT_FORMATS, SFT_FORMATS, formats_of
from data.formats.unpaired import UNPAIRED_FORMATS
from data.rows.stepwise import STEP_FORMATS

BUILT_IN = {*PROMPT_FORMATS, *SFT_FORMATS, *PAIR_FORMATS, *UNPAIRED_FORMATS, *STEP_FORMATS, *EBFT_FORMATS,
            *EBFT_STRIDED_FORMATS}  # fmt: skip


def uses_transform(specs: Sequence[str], data_format: str) -> bool:
    return any("." in name and name not in BUILT_IN for name in formats_of(specs, data_format))
