"""Rows converted in one process, in several, and from the cache are the same, and so are errors and the log."""

from __future__ import annotations

import copy
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from data.errors import UserError
from data.loader import Loader
from data.rows import cache, collect
from data.rows.cache import load_cached
from data.rows.documents import load_documents
from data.rows.held_out import train_and_held_out
from data.rows.pairs import load_pairs
from data.rows.prompts import load_prompts
from data.rows.sft import load_examples
from data.rows.stepwise import load_steps
from data.rows.stored import Stored
from data.rows.targets import load_targets
from data.rows.unpaired import load_labelled

NUM_ROWS = 7


def chat(i: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"{i}+{i}="}, {"role": "assistant", "content": "x" * i + f"{2 * i}"}]


# Loader, settings, row number i. Some rows are truncated, skipped or noted, so the log is not empty.
FAMILIES = {
    "sft": (load_examples, {"max_length": 50}, lambda i: {"messages": chat(i)}),
    "text": (load_examples, {"max_length": 8}, lambda i: {"text": "<|im_end|>" + "abc" * (i + 1)}),
    "documents": (load_documents, {"max_length": 50}, lambda i: {"messages": chat(i)} if i % 2 else {"text": "ab" * 9}),
    "pairs": (load_pairs, {"max_length": 45, "margins": True},
              lambda i: {"prompt": f"{i}=", "chosen": "a" * 9 * i + "b", "rejected": "b", "margin": i or None}),
    "labelled": (load_labelled, {}, lambda i: {"prompt": f"{i}=", "completion": f"{i}", "label": i % 2 == 0}),
    "steps": (load_steps, {"max_length": 9},
              lambda i: {"prompt": f"{i}=", "completions": ["a" * i, "b"], "labels": [True, i > 3]}),
    "prompts": (load_prompts, {"max_prompt_length": 30 + NUM_ROWS},
                lambda i: {"prompt": chat(10**i)[:1], "answer": {"n": [i, None, 0.5]}}),
    "targets": (load_targets, {"max_completion_length": 6}, lambda i: {"messages": chat(i) * 2, "n": i}),
}  # fmt: skip


def forced(monkeypatch, *, processes: int) -> None:
    """Convert two rows at a time, in this many processes from the first row on, and cache files of any size."""
    monkeypatch.setattr(collect, "CHUNK", 2)
    monkeypatch.setattr(collect, "ALONE_S", -1.0)
    monkeypatch.setattr(collect, "num_processes", lambda: processes)
    monkeypatch.setattr(cache, "MIN_BYTES", 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_several_processes_and_the_cache_give_the_same_rows(family, write, chatml, monkeypatch, tmp_path, capfd):
    load, settings, row = FAMILIES[family]
    specs = [f"{write(*map(row, range(NUM_ROWS)))}:weight=0.5", "task:steps:size=2,split=train"]
    results = []
    for processes, folder in ((1, "none"), (2, "none"), (2, tmp_path / "cache"), (1, tmp_path / "cache")):
        forced(monkeypatch, processes=processes)
        rows = load_cached(load, specs, chatml, folder=str(folder), **settings)
        log = capfd.readouterr().err.splitlines()
        state = Loader(rows, batch_size=2, seed=0).state_dict()
        results.append((list(rows), [line for line in log if f"{tmp_path}/cache" not in line], state))
    (one, log, state), *others = results
    assert one and all(other == (one, log, state) for other in others)
    assert Loader(one, batch_size=2, seed=0).state_dict() == state  # as for lists of records
    assert isinstance(rows, Stored) and max(x.itemsize for x in rows.values.values()) <= 4  # bytes
    for record, again in zip(one, rows, strict=True):  # lists of Python's ints and bools
        assert repr(record) == repr(again)


def test_the_first_bad_row_of_the_file_is_reported(write, chatml, monkeypatch):
    good, bad = {"messages": chat(1)}, {"messages": [{"role": "user"}]}
    path = write(good, good, good, good | {"messages": 3}, bad, good)
    messages = set()
    for processes in (1, 2):
        forced(monkeypatch, processes=processes)
        with pytest.raises(UserError) as caught:
            load_examples([path], chatml)
        messages.add(str(caught.value))
    assert len(messages) == 1 and messages.pop().startswith(f"{path}:4: ")


def test_a_killed_process_is_an_error(write, chatml, monkeypatch):
    forced(monkeypatch, processes=2)
    parent = os.getpid()
    monkeypatch.setattr("data.rows.sft._tokenise", lambda *_: os.getpid() == parent or os.kill(os.getpid(), 9))
    with pytest.raises(UserError, match="2 processes"):
        load_examples([write(*[{"messages": chat(1)}] * 8)], chatml)


def test_a_transform_sees_all_rows_in_order_in_one_process(write, chatml, monkeypatch, tmp_path):
    forced(monkeypatch, processes=2)
    (tmp_path / "counting.py").write_text(
        "def numbered(cfg):\n    seen = []\n    def transform(example):\n        seen.append(example)\n"
        "        return {'prompt': f'{len(seen)}', 'columns': {len(seen)}}\n    return transform\n"
    )
    monkeypatch.chdir(tmp_path)
    path = write(*[{"text": "a"}] * NUM_ROWS)
    options = {"data_format": "counting.numbered", "cfg": None}
    prompts = load_cached(load_prompts, [path], chatml, folder=str(tmp_path / "cache"), **options)
    assert [prompt.prompt for prompt in prompts] == [str(i + 1) for i in range(NUM_ROWS)]
    assert prompts[2].columns["columns"] == {3}  # any Python value
    assert not (tmp_path / "cache").exists()


def entries(folder) -> set[str]:
    return {path.name for path in folder.iterdir() if path.is_dir()}


def test_everything_that_changes_the_rows_is_part_of_the_key(write, chatml, tokenizer_of, monkeypatch, tmp_path):
    forced(monkeypatch, processes=1)
    path, folder = write(*({"messages": chat(i)} for i in range(NUM_ROWS))), tmp_path / "cache"

    def load(tokenizer=chatml, specs=(path,), loader=load_examples, **settings):
        before = entries(folder) if folder.exists() else set()
        rows = load_cached(loader, specs, tokenizer, folder=str(folder), **settings)
        return rows, len(entries(folder) - before)

    assert load()[1] == 1 and load()[1] == 0
    monkeypatch.setattr(cache, "MIN_BYTES", 10 * cache.TASK_ROW)
    assert [load(specs=(f"task:addition:size={size}",))[1] for size in (9, 10, 10)] == [0, 1, 0]
    monkeypatch.setattr(cache, "MIN_BYTES", 1)
    other = copy.deepcopy(chatml)
    other.chat_template = chatml.chat_template.replace("<|im_start|>", "<|im_start|> ")
    merged = tokenizer_of("chatml", merges=(("x", "x"),))
    merged.chat_template = chatml.chat_template
    marked = copy.deepcopy(chatml)
    marked.strop_allow_special = True
    assert [load(tokenizer)[1] for tokenizer in (other, merged, marked)] == [1, 1, 1]
    assert load(max_length=40)[1] == 1 and load(system_prompt="Be brief.")[1] == 1
    assert load(specs=(f"{path}:split=train[:3]",))[1] == 1 and load(loader=load_documents)[1] == 1
    assert load(cfg=object())[1] == 0  # only transforms read it
    file, stat = Path(path), os.stat(path)
    file.write_text(file.read_text().replace("0+0=", "9+0="))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    rows, num_new = load()  # the same size and time
    assert num_new == 1 and "9+0=" in chatml.decode(rows[0].ids)
    monkeypatch.setattr(cache, "_code", lambda: "a newer version")
    assert load()[1] == 1
    own = copy.deepcopy(chatml)
    own.__class__ = type("Own", (type(chatml),), {"__module__": "transformers_modules.model"})
    assert load(own)[1] == 0, "a model's own code may change"


def test_damaged_entries_are_written_again_and_old_entries_deleted(write, chatml, monkeypatch, tmp_path, capfd):
    forced(monkeypatch, processes=1)
    path, folder = write(*({"messages": chat(i)} for i in range(NUM_ROWS))), tmp_path / "cache"
    expected = load_examples([path], chatml)
    load_cached(load_examples, [path], chatml, folder=str(folder))
    (name,) = entries(folder)
    (folder / f"{name}.tmp").mkdir()  # of a process that was killed
    (folder / f"{name}.tmp" / "ids.values.npy").write_bytes(b"x")
    capfd.readouterr()
    damages = {
        "ids.values.npy": lambda file: file.write_bytes(file.read_bytes()[:-4]),
        "mask.lengths.npy": lambda file: file.write_bytes(b""),
        "rest.npy": lambda file: file.unlink(),
        "about.json": lambda file: file.write_text(file.read_text()[:20]),
        "weights.npy": lambda file: file.write_bytes((folder / name / "rest.npy").read_bytes()),
    }
    for file, damage in damages.items():
        damage(folder / name / file)
        assert load_cached(load_examples, [path], chatml, folder=str(folder)) == expected
        assert name not in capfd.readouterr().err  # converted again
        assert load_cached(load_examples, [path], chatml, folder=str(folder)) == expected
        assert name in capfd.readouterr().err
    for old in ("0" * 32, "photos"):
        (folder / old).mkdir()
        os.utime(folder / old, (0, time.time() - 31 * 86400))
    load_cached(load_examples, [path], chatml, folder=str(folder), max_length=40)
    assert len(entries(folder)) == 3 and {name, "photos"} < entries(folder)  # only entries are deleted
    assert load_cached(load_examples, [path], chatml, folder=path) == expected  # not a folder
    assert f"row_cache={path}" in capfd.readouterr().err


def test_values_that_json_would_change_are_not_cached(chatml, monkeypatch, tmp_path, capfd):
    import pyarrow
    import pyarrow.parquet

    forced(monkeypatch, processes=2)
    path = str(tmp_path / "rows.parquet")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"prompt": "a", "when": b"\x00"}] * 5), path)
    rows = load_cached(load_prompts, [path], chatml, folder=str(tmp_path / "cache"))
    assert rows[4].columns == {"when": b"\x00"} and rows[4].source == f"{path}:5"
    assert not entries(tmp_path / "cache") and "not written" in capfd.readouterr().err


def test_held_out_rows_share_the_arrays(write, chatml):
    path = write(*({"messages": chat(i % 5)} for i in range(9)))
    settings = SimpleNamespace(data=[path], eval_data=[], val_set_size=2, dedup=True, max_eval_rows=5)
    stored, lists = (
        train_and_held_out(settings, 0, lambda specs, kind=kind: kind(load_examples(specs, chatml)))
        for kind in (lambda rows: rows, list)
    )
    assert stored == lists and len(stored[0]) == 3
    assert stored[0].values is stored[1].values
    assert stored[0][-1] == lists[0][-1] and stored[0][1:] == lists[0][1:]
    with pytest.raises(IndexError):
        stored[0][3]
