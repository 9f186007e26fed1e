"""The flags of a Config class, and how argv and YAML become an instance of it.

    table = flag_table(Config)
    values = read_tree(yaml_tree, table, "config.yaml") | read_argv(argv, table)      # later layers win
    cfg = build(Config, values, table, prog)

`Values` maps a flag's key ("lora.r") to the words given for it and their source. Layers merge as plain dicts, and tyro
converts the words to typed fields, so the YAML text 1e-6, which PyYAML reads as a string, becomes a float as it does on
the command line. Sections: flags of a Config, argv, YAML, tyro.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import tyro

from data.user_code import import_name

REPEATABLE = ("data", "eval_data")  # --data a --data b means --data a b; of any other repeated flag the last wins
DASH = "\x1f"  # put before a list item such as "-x", which tyro would take for a flag; removed again


# flags of a Config -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Flag:
    """One field of a Config or of one of its blocks."""

    key: str
    is_bool: bool
    is_list: bool
    takes_none: bool
    takes_bool: bool
    is_mapping: bool
    required: bool

    @property
    def name(self) -> str:
        return "--" + self.key.replace("_", "-")


@dataclass(frozen=True)
class Given:
    """The words given for one flag; `source` is the file they were read from, None for the command line."""

    words: tuple[str, ...]
    source: str | None = None

    def label(self, flag: Flag) -> str:
        return flag.name if self.source is None else f"{self.source}: {flag.key}"


Values = dict[str, Given]


def flag_table(config: type) -> dict[str, Flag]:
    """Every flag of a Config class by key; a Flat block adds its fields without a prefix."""
    table: dict[str, Flag] = {}
    hints = get_type_hints(config, include_extras=True)
    for field in dataclasses.fields(config):
        block, markers = _strip_annotated(hints[field.name])
        if not dataclasses.is_dataclass(block):
            found = {field.name: _flag(field.name, block, _has_no_default(field))}
        else:
            prefix = "" if tyro.conf.OmitArgPrefixes in markers else f"{field.name}."
            inner_hints = get_type_hints(block)
            found = {
                prefix + inner.name: _flag(
                    prefix + inner.name, inner_hints[inner.name], _has_no_default(field) and _has_no_default(inner)
                )
                for inner in dataclasses.fields(block)
            }
        twice = table.keys() & found.keys()
        if twice:
            raise ValueError(f"{config.__module__}.Config: flag {min(twice)} is defined twice; rename one field")
        table |= found
    return table


def _strip_annotated(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    if get_origin(hint) is Annotated:
        return get_args(hint)[0], get_args(hint)[1:]
    return hint, ()


def _has_no_default(field: dataclasses.Field) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _flag(key: str, hint: Any, required: bool) -> Flag:
    hint, _ = _strip_annotated(hint)
    members = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return Flag(
        key=key,
        is_bool=hint is bool,
        is_list=any(get_origin(member) in (tuple, list) for member in members),
        takes_none=NoneType in members,
        takes_bool=bool in members,
        is_mapping=get_origin(hint) is dict,
        required=required,
    )


def nearest(word: str, names: Iterable[str]) -> str | None:
    """The name that a mistyped word most likely meant."""
    plain = {name.replace(".", "_").lower(): name for name in sorted(names, key=lambda name: "." in name)}
    word = word.replace("-", "_").replace(".", "_").lower()
    close = difflib.get_close_matches(word, plain, n=1, cutoff=0.8)
    close += [name for name in plain if "".join(part[0] for part in name.split("_") if part) == word]
    close += [name for name in plain if name.endswith(f"_{word}") or name.startswith(f"{word}_")]
    close += difflib.get_close_matches(word, plain, n=1, cutoff=0.6)
    return plain[close[0]] if close else None


def unknown(what: str, word: str, table: dict[str, Flag], *, as_flag: bool) -> ValueError:
    """The error for a flag or key that this method does not have."""
    found = nearest(word, table)
    if found is None:
        return ValueError(f"{what}; --help lists them all")
    return ValueError(f"{what}; did you mean {table[found].name if as_flag else found}?")


# words of argv ---------------------------------------------------------------------------------------------------


def read_argv(argv: Sequence[str], table: dict[str, Flag]) -> Values:
    """['--lora.r', '8', '--no-packing'] -> {'lora.r': Given(('8',)), 'packing': Given(('False',))}."""
    values: Values = {}
    for name, words in _split_argv(argv):
        key = name.lstrip("-").replace("-", "_")
        head, _, last = key.rpartition(".")
        positive = f"{head}.{last[3:]}" if head else last[3:]
        if key not in table and last.startswith("no_") and positive in table and table[positive].is_bool:
            if words:
                raise ValueError(f"{name}: takes no value; remove {words[0]}")
            values[positive] = Given(("False",))
            continue
        if key not in table or not name.startswith("--"):
            raise unknown(f"{name}: unknown flag", key, table, as_flag=True)
        given = Given(_checked_words(words, table[key], table[key].name))
        if key in REPEATABLE and key in values:
            given = Given(values[key].words + given.words)
        values[key] = given
    return values


def _split_argv(argv: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    name, words = "", []
    for word in argv:
        if looks_like_flag(word):
            if name:
                yield name, words
            name, attached, value = word.partition("=")
            words = [value] if attached else []
        elif not name:
            raise ValueError(f"{word}: a value without a flag before it; write --flag {word}")
        else:
            words.append(word)
    if name:
        yield name, words


def looks_like_flag(word: str) -> bool:
    """-x and --x are flags, -3, -.5 and -inf are numbers; a value such as -x is attached with = instead."""
    return re.match(r"-+[^\W\d_]", word) is not None and word.lower() not in ("-inf", "-infinity", "-nan")


def _checked_words(words: Sequence[str], flag: Flag, label: str) -> tuple[str, ...]:
    if flag.is_list:
        return tuple(words)
    if flag.is_bool:
        word = words[0].lower() if words else "true"
        if len(words) > 1 or word not in ("true", "false"):
            raise ValueError(f"{label}={' '.join(words)}: must be true or false")
        return (word.capitalize(),)
    if not words:
        raise ValueError(f"{label}: needs a value; one that starts with - is attached with =")
    if len(words) > 1:
        raise ValueError(f"{label}={' '.join(words)}: takes one value, got {len(words)}; quote it if it holds spaces")
    if flag.takes_bool and words[0].lower() in ("true", "false"):  # a union with bool
        return (words[0].capitalize(),)
    return (words[0],)


# values of a YAML tree -------------------------------------------------------------------------------------------


def read_tree(tree: dict[str, Any], table: dict[str, Flag], source: str, prefix: str = "") -> Values:
    """The mapping of a YAML file as Values; nested mappings are blocks with a prefix."""
    values: Values = {}
    for name, value in tree.items():
        key = prefix + str(name).replace("-", "_")
        if isinstance(value, dict) and any(known.startswith(f"{key}.") for known in table):
            values |= read_tree(value, table, source, f"{key}.")
        elif key not in table:
            raise unknown(f"{source}: {key}: unknown key", key, table, as_flag=False)
        else:
            values[key] = Given(_words_of(value, table[key], f"{source}: {key}"), source)
    return values


def _words_of(value: Any, flag: Flag, label: str) -> tuple[str, ...]:
    if value is None:
        if not flag.takes_none:
            raise ValueError(f"{label}: has no value; give one, or leave the key out for the default")
        return ("None",)
    if flag.is_list:
        items = value if isinstance(value, list) else [value]
        if flag.key in REPEATABLE:
            items = [_data_spec(item, label) if isinstance(item, dict) else item for item in items]
        return tuple(_word(item, label) for item in items)
    if isinstance(value, dict) and flag.is_mapping:
        return (_json(value, label),)
    if isinstance(value, bool) and not flag.takes_bool:
        raise ValueError(f"{label}={value}: YAML reads this as true or false; put it in quotes")
    return _checked_words((_word(value, label),), flag, label)


def _word(value: Any, label: str) -> str:
    if isinstance(value, (dict, list)) or value is None:
        raise ValueError(f"{label}={value}: expected a plain value, not a mapping or list")
    return str(value)


def _json(value: dict[Any, Any], label: str) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError) as error:  # a date, or a mapping that contains itself
        raise ValueError(f"{label}={value}: cannot be written as JSON ({error}); put such values in quotes") from None


def _data_spec(item: dict[str, Any], label: str) -> str:
    """{path: rows.jsonl, split: train, weight: 0.5} -> 'rows.jsonl:split=train,weight=0.5'.

    roles may be a mapping, as {user: [human, person]}; a comma within a value is escaped for parse_spec.
    """
    if not item.get("path"):
        raise ValueError(f"{label}={item}: a data entry needs a path")
    if isinstance(item.get("roles"), dict):
        roles = {role: [names] if isinstance(names, str) else names for role, names in item["roles"].items()}
        item = item | {"roles": ",".join(f"{role}={'|'.join(map(str, names))}" for role, names in roles.items())}
    options = [
        f"{key}={_word(value, label)}".replace(",", "\\,")
        for key, value in item.items()
        if key != "path" and value is not None
    ]
    return ":".join([str(item["path"]), ",".join(options)] if options else [str(item["path"])])


def config_to_tree(cfg: Any) -> dict[str, Any]:
    """A Config as nested plain data, Flat blocks merged at the top; the inverse of read_tree."""
    tree: dict[str, Any] = {}
    hints = get_type_hints(type(cfg), include_extras=True)
    for field in dataclasses.fields(cfg):
        value = getattr(cfg, field.name)
        if callable(value) or not dataclasses.is_dataclass(value):  # a record of a loss is both
            tree[field.name] = [_saved(item) for item in value] if isinstance(value, (tuple, list)) else _saved(value)
        elif tyro.conf.OmitArgPrefixes in _strip_annotated(hints[field.name])[1]:
            tree |= config_to_tree(value)
        else:
            tree[field.name] = config_to_tree(value)
    return tree


def _saved(item: Any) -> Any:
    return import_name(item) if callable(item) else item  # a function passed from Python


# words to a Config, by tyro --------------------------------------------------------------------------------------


def build(config: type, values: Values, table: dict[str, Flag], prog: str) -> Any:
    """An instance of the Config class; tyro's errors become one sentence."""
    missing = [flag.name for flag in table.values() if flag.required and flag.key not in values]
    if missing:
        raise ValueError(f"{' and '.join(missing)}: required; {prog} --help says what to give")

    def refuse(event: Any) -> None:
        flag = table[event.argument.lowered.name_or_flags[0].lstrip("-").replace("-", "_")] if event.argument else None
        given = values.get(flag.key, Given(())) if flag else Given(())
        if type(event).__name__ == "InvalidChoice":
            raise ValueError(f"{given.label(flag)}={event.value}: must be one of {', '.join(event.choices)}") from None
        if type(event).__name__ == "InstantiationFailure" and flag is not None:
            text = f"{given.label(flag)}={' '.join(given.words)}: expected {event.argument.lowered.metavar}"
            raise ValueError(text.replace(DASH, "")) from None
        if type(event).__name__ == "InstantiationFailure":
            raise ValueError(event.message.replace(DASH, "")) from None  # from a block's own check, already a sentence

    with _tyro_refusals(refuse):
        cfg = tyro.cli(config, args=tyro_args(values, table), prog=prog, config=(tyro.conf.HelptextFromCommentsOff,))
    return _without_dash_marks(cfg)


def tyro_args(values: Values, table: dict[str, Flag]) -> list[str]:
    """Values as command-line words for tyro."""
    args: list[str] = []
    for key, given in values.items():
        flag = table[key]
        if flag.is_bool:
            head, _, last = key.rpartition(".")
            args.append(flag.name if given.words == ("True",) else f"--{head}{'.' if head else ''}no-{last}")
        elif flag.is_list:
            args.append(flag.name)
            args += [DASH + word if looks_like_flag(word) or word.startswith(DASH) else word for word in given.words]
        else:
            args.append(f"{flag.name}={given.words[0]}")
    return args


def _tyro_refusals(hook: Any) -> contextlib.AbstractContextManager:
    """tyro's hook is not public API: a tyro without it prints its own error box and exits with 2."""
    errors = getattr(tyro, "_errors", None)
    return errors.on_parse_error(hook) if hasattr(errors, "on_parse_error") else contextlib.nullcontext()


def _without_dash_marks(cfg: Any) -> Any:
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(cfg):
        value = getattr(cfg, field.name)
        if dataclasses.is_dataclass(value):
            clean = _without_dash_marks(value)
        elif isinstance(value, tuple):
            clean = tuple(item.removeprefix(DASH) if isinstance(item, str) else item for item in value)
        else:
            continue
        if clean != value:
            changes[field.name] = clean
    return dataclasses.replace(cfg, **changes) if changes else cfg
