"""Find the end of a completion: the device checks stop ids, the host checks stop strings in decoded text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from data.chat import is_harmony
from rollout.engine import Sampling
from rollout.harmony import split_messages


class StopCheck:
    def __init__(self, tokenizer: Any, sampling: Sampling) -> None:
        special = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
        # Decoding drops special tokens, so a special token given as a stop string is matched by id.
        self.stop_ids = {*sampling.stop_ids, *(special[text] for text in sampling.stop if text in special)}
        self.strings = [text for text in sampling.stop if text not in special]
        self.tokenizer = tokenizer
        # Every non-special token adds at least a byte. 8 more cover special tokens and a split character.
        self.window = max((len(text.encode()) for text in self.strings), default=0) + 8

    def end(self, ids: Sequence[int], before: int) -> int | None:
        """Return the completion's length if a token after the first `before` ends it, else None.

        `ids` never contains tokens after a stop id.
        """
        if self.strings and self._find(self._decode([ids[max(0, before - self.window) :]])[0]) is not None:
            for length in range(before + 1, len(ids) + 1):
                # Search the last tokens first; only on a hit decode the whole completion to confirm it.
                tail = ids[max(0, length - self.window) : length]
                if all(self._find(self._decode([tokens])[0]) is not None for tokens in (tail, ids[:length])):
                    return length
        return len(ids) if len(ids) > before and ids[-1] in self.stop_ids else None

    def texts(self, id_rows: Sequence[list[int]], stopped: Sequence[bool]) -> list[str]:
        """Decode completions, without the stop token or stop string that ended them.

        The text of a turn in harmony format is its answer (the final channel), without thoughts and calls.
        """
        by_id = [stop and row[-1] in self.stop_ids for row, stop in zip(id_rows, stopped, strict=True)]
        rows = [row[:-1] if cut else row for row, cut in zip(id_rows, by_id, strict=True)]
        texts = self._decode(rows)
        if is_harmony(self.tokenizer):  # without its special tokens, a text would not show where the answer begins
            turns = map(split_messages, self._decode(rows, special=True))
            texts = [
                "".join(message.text for message in turn if message.channel == "final") if turn else text
                for turn, text in zip(turns, texts, strict=True)
            ]
        if not self.strings:
            return texts
        by_text = [stop and not cut for stop, cut in zip(stopped, by_id, strict=True)]
        return [text[: self._find(text)] if cut else text for text, cut in zip(texts, by_text, strict=True)]

    def _find(self, text: str) -> int | None:
        return min((at for at in (text.find(string) for string in self.strings) if at >= 0), default=None)

    def _decode(self, id_rows: Sequence[Sequence[int]], *, special: bool = False) -> list[str]:
        from transformers import PreTrainedTokenizerFast as Fast

        # Fast decodes the rows in a loop; its backend decodes them in parallel.
        kind, methods = type(self.tokenizer), ("batch_decode", "decode", "_decode")
        if all(getattr(kind, name, None) is getattr(Fast, name) for name in methods):
            return self.tokenizer.backend_tokenizer.decode_batch(id_rows, skip_special_tokens=not special)
        options = {"skip_special_tokens": not special, "clean_up_tokenization_spaces": False}
        return self.tokenizer.batch_decode(id_rows, **options)
