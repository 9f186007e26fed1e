"""Reading rows: specs, files, splits, tasks and datasets."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.sources import SUFFIXES, DataSpec, load_rows, parse_spec, slice_rows

ROWS = [{"prompt": f"{n}+{n}=", "answer": str(2 * n)} for n in range(10)]


def write(path: Path, rows=ROWS) -> str:
    """Write rows in the format of the suffix."""
    name = path.name.removesuffix(".gz")
    if name.endswith((".jsonl", ".ndjson")):
        text = "".join(json.dumps(row) + "\n" for row in rows)
    elif name.endswith(".json"):
        text = json.dumps(rows, indent=1)
    else:
        comma = "\t" if name.endswith(".tsv") else ","
        text = comma.join(["prompt", "answer\n"]) + "".join(f"{r['prompt']}{comma}{r['answer']}\n" for r in rows)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return str(path)


def test_parse_spec():
    assert parse_spec("a/b.jsonl") == DataSpec(path="a/b.jsonl")
    assert parse_spec("openai/gsm8k:name=main,split=train[:1%],format=gsm8k,weight=0.5") == DataSpec(
        path="openai/gsm8k", name="main", split="train[:1%]", format="gsm8k", weight=0.5
    )
    assert parse_spec("x.csv:split=train[10:20]").split == "train[10:20]"
    assert parse_spec("task:addition") == DataSpec(path="task:addition")
    assert parse_spec("task:addition:size=5,seed=3,difficulty=2,sloppy=0.25,split=sft") == DataSpec(
        path="task:addition", split="sft", options={"size": 5, "seed": 3, "difficulty": 2, "sloppy": 0.25}
    )
    assert parse_spec("C:/rows.jsonl:weight=2").path == "C:/rows.jsonl"
    options = "field_messages=a.b,roles=user=human|person,assistant=gpt"
    spec = parse_spec(f"a.jsonl:format=chat_template,{options},split=train")
    assert spec.format_options == {"field_messages": "a.b", "roles": "user=human|person,assistant=gpt"}
    assert spec.split == "train"
    assert parse_spec(r"a.jsonl:prompt_format=Well\, {prompt} ,weight=2").format_options == {
        "prompt_format": "Well, {prompt} "
    }


BAD_SPECS = [
    ("a.jsonl:splt=train", "unknown key 'splt'; did you mean 'split'"),
    ("a.jsonl:split=train,weight", "'weight' is not key=value"),
    ("a.jsonl:weight=much", "weight=much is not a number"),
    ("a.jsonl:weight=0", "weight=0.0 must be above 0"),
    ("a.jsonl:weight=nan", "weight=nan must be above 0"),
    ("task:addition:size=2.5", "size=2.5 is not an integer"),
    ("a.jsonl:size=5", "size is only for"),
    ("a.jsonl:name=main", "name=main is only for"),
    ("a.jsonl:split=a,split=b", "split is set twice"),
    ("", "no path"),
]


def test_parse_spec_errors():
    for text, message in BAD_SPECS:
        with pytest.raises(ValueError, match=message):
            parse_spec(text)


def test_local_files(tmp_path):
    for name in ("R.JSONL", *(f"r{suffix}" for suffix in SUFFIXES)):
        path = tmp_path / name
        if name.endswith(".parquet"):
            import pyarrow
            import pyarrow.parquet

            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
        elif name == "R.JSONL":
            write(tmp_path / "x.jsonl")
            (tmp_path / "x.jsonl").rename(path)
        else:
            write(path)
        rows = load_rows(parse_spec(str(path)))
        assert [row.columns for row in rows] == ROWS
        assert rows[2].source == f"{path}:3"


def test_line_numbers_of_jsonl_include_blank_lines(tmp_path):
    path = tmp_path / "r.jsonl"
    path.write_text('{"prompt": "a"}\n\n{"prompt": "b\u2028c"}\n', encoding="utf-8")
    rows = load_rows(parse_spec(str(path)))
    assert [(row.source, row.columns["prompt"]) for row in rows] == [(f"{path}:1", "a"), (f"{path}:3", "b\u2028c")]


def test_json_that_is_really_jsonl_and_json_with_a_data_key(tmp_path):
    path = tmp_path / "r.json"
    path.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    assert [row.columns["prompt"] for row in load_rows(parse_spec(str(path)))] == ["a", "b"]
    path.write_text('{"version": 1, "data": [{"prompt": "a"}]}')
    assert [row.columns for row in load_rows(parse_spec(str(path)))] == [{"prompt": "a"}]


def test_csv_with_quotes_bom_and_long_fields(tmp_path):
    path = tmp_path / "r.csv"
    path.write_bytes(b'\xef\xbb\xbfprompt,answer\n"a, ""b""\nc",' + b"x" * 200_000 + b"\n")
    (row,) = load_rows(parse_spec(str(path)))
    assert row.columns == {"prompt": 'a, "b"\nc', "answer": "x" * 200_000}


BAD_FILES = [
    ("r.jsonl", b'{"a": 1}\n{"a": \n', r"r.jsonl:2: not valid JSON \(.*column"),
    ("r.jsonl", b'{"a": 1}\n[1]\n', "r.jsonl:2: must be a JSON object, not list"),
    ("r.json", b'[\n{"a": 1},\n{"a" 2}]', "r.json:3: not valid JSON"),
    ("r.json", b"3", "must contain a list of objects, not int"),
    ("r.json", b'{"a": 1}\n{"a": }\n', "r.json:2: not valid JSON"),
    ("r.csv", b"a,b\n1,2\n3\n", "r.csv:2: the number of fields"),
    ("r.csv", b"a,b\n1,2,3\n", "r.csv:1: the number of fields"),
    ("r.jsonl", b"", "contains no rows"),
    ("r.jsonl", b'{"a": "\xff"}', r"r.jsonl:1: not UTF-8 text \(byte 7 of the file\)"),
    ("r.jsonl.gz", b"not gzip", "cannot be read"),
    ("r.parquet", b"not parquet", "cannot be read as parquet"),
    ("r.dat", b"hello", "unknown file type"),
    ("r.txt", b"hello", "plain text has no rows; .*jsonl"),
    ("r.jsonl.gz", gzip.compress(b'{"a": 1}\n' * 1000)[:30], "cannot be read"),  # damaged
]


def test_bad_files(tmp_path):
    for name, content, message in BAD_FILES:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=message) as caught:
            list(load_rows(parse_spec(str(tmp_path / name))))
        assert "\n" not in str(caught.value)


def test_unpacked_size_is_limited(tmp_path, monkeypatch):
    import pyarrow
    import pyarrow.parquet

    rows = [{"text": "x" * 100}] * 3000
    (tmp_path / "r.jsonl.gz").write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "r.parquet")
    for name in ("r.jsonl.gz", "r.parquet"):
        spec = parse_spec(str(tmp_path / name))
        monkeypatch.setenv("STROP_MAX_UNPACKED_GIB", "0.001")
        assert [row.columns for row in load_rows(spec)] == rows
        monkeypatch.setenv("STROP_MAX_UNPACKED_GIB", "0.0001")  # 107,374 bytes
        with pytest.raises(ValueError, match=rf"{name}: .* 0\.0001 GiB .*STROP_MAX_UNPACKED_GIB"):
            load_rows(spec)
    monkeypatch.setenv("STROP_MAX_UNPACKED_GIB", "ten")
    with pytest.raises(ValueError, match="STROP_MAX_UNPACKED_GIB=ten"):
        load_rows(spec)


def test_missing_file():
    for path in ["missing.jsonl", "./missing", "/nowhere/missing"]:
        with pytest.raises(ValueError, match=f"data={path}: no such file"):
            load_rows(parse_spec(path))


def test_split_of_a_local_file(tmp_path):
    path = write(tmp_path / "r.jsonl")

    def answers(split):
        return [int(row.columns["answer"]) // 2 for row in load_rows(parse_spec(f"{path}:split={split}"))]

    assert answers("train") == list(range(10))
    assert answers("train[:3]") == [0, 1, 2]
    assert answers("train[4:6]") == [4, 5]
    assert answers("train[-2:]") == [8, 9]
    assert answers("train[:20%]+train[90%:]") == [0, 1, 9]
    assert load_rows(parse_spec(f"{path}:split=train[4:6]"))[0].source == f"{path}:5"  # the line in the file
    for split, message in {
        "test": "split=test does not exist",
        "train[5:5]": r"split=train\[5:5\] contains no rows",
        "train[:3": r"split=train\[:3: invalid",
        "train[:200%]": "percentage",
    }.items():
        with pytest.raises(ValueError, match=message):
            answers(split)


BOUND = st.one_of(st.just(""), st.integers(-100, 100).map(str))


@settings(max_examples=60, deadline=None)
@given(start=BOUND, stop=BOUND, percent=st.booleans(), num_rows=st.integers(0, 130))
def test_slices_match_datasets(start, stop, percent, num_rows):
    import datasets

    sign = "%" if percent else ""
    split = f"train[{start + sign if start else ''}:{stop + sign if stop else ''}]"
    (theirs,) = datasets.ReadInstruction.from_spec(split).to_absolute({"train": num_rows})
    assert slice_rows(split, num_rows) == ({"train"}, list(range(theirs.from_, theirs.to)))


def test_task_rows():
    rows = load_rows(parse_spec("task:addition:size=20,seed=4,split=train[5:7]"))
    assert [row.source for row in rows] == ["task:addition:6", "task:addition:7"]
    assert {"prompt", "answer", "completion"} <= rows[0].columns.keys()
    assert load_rows(parse_spec("task:addition:split=eval,size=30"))[0].columns["prompt"][0]["role"] == "user"
    with pytest.raises(ValueError, match="split=validation does not exist"):
        load_rows(parse_spec("task:addition:split=validation"))
    with pytest.raises(ValueError, match="joins splits"):
        load_rows(parse_spec("task:addition:split=train+eval"))


def test_a_folder_is_read_by_datasets(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "rows"
    folder.mkdir()
    write(folder / "train.jsonl")
    rows = load_rows(parse_spec(f"{folder}:split=train[20%:40%]"))
    assert [(row.source, row.columns) for row in rows] == [(f"{folder}:1", ROWS[2]), (f"{folder}:2", ROWS[3])]
    (folder / "train.jsonl").write_text("{")
    with pytest.raises(ValueError, match="a folder that the datasets library cannot load .*name its files"):
        load_rows(parse_spec(str(folder)))


def test_network_failure_is_one_sentence(monkeypatch):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError) as caught:
        load_rows(parse_spec("no-such-owner/no-such-set:name=main,split=train[:5]"))
    message = str(caught.value)
    assert message.startswith("data=no-such-owner/no-such-set: ") and "\n" not in message
    assert "HF_HUB_OFFLINE is set" in message
