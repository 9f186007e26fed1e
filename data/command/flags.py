"""The flags of a Config class, and how argv and YAML become an instance of it.

    table = flag_table(Config)
    values = read_tree(yaml_tree, table, "config.yaml") | read_argv(argv, table)      # later layers win
    cfg = build(Config, values, table, prog)

`Values` maps a flag's key ("lora.r") to the words given for it and their source. YAML values become words too, so that
the text 1e-6, which PyYAML reads as a string, becomes a float as it does on the command line.

tyro prints --help but does not parse: its errors are boxes, or sentences only through a hook that is not public; and it
takes lower layers as a default instance, which cannot be built, because a block checks its fields together (a file that
sets lora.alpha is right only with the --lora.r of the command line).
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

import tyro

from data.errors import UserError
from data.hints import NOTES, nearest, value_hint
from data.user_code import import_name, printable

REPEATABLE = ("data", "eval_data")  # --data a --data b means --data a b; of any other repeated flag the last wins
HELP = ("-h", "--help", "--help-all")
LISTS = {tuple: tuple, list: list, set: set, frozenset: frozenset, Sequence: tuple}  # -> what holds the values
TYPES = {str: "text", int: "a whole number", float: "a number", bool: "true or false", NoneType: "None"}


# flags of a Config -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Flag:
    """One field of a Config or of one of its blocks."""

    key: str
    members: tuple[Any, ...]  # of its type: (int, NoneType) for int | None
    required: bool
    module: str  # that defines it
    is_positional: bool

    @property
    def name(self) -> str:
        return "--" + self.key.replace("_", "-")

    @property
    def is_bool(self) -> bool:
        return self.members == (bool,)

    @property
    def may_be_bool(self) -> bool:
        return bool in self.members

    @property
    def is_list(self) -> bool:
        return any(get_origin(member) in LISTS for member in self.members)


@dataclass(frozen=True)
class FlagValue:
    """The words given for one flag; `source` is the file they were read from, None for the command line."""

    words: tuple[str, ...]
    source: str | None = None

    def label(self, flag: Flag) -> str:
        return flag.name if self.source is None else f"{self.source}: {flag.key}"


Values = dict[str, FlagValue]
CONFIG = {"config": Flag("config", (str,), required=False, module=__name__, is_positional=False)}  # --config FILE.yaml


def flag_table(config: type) -> dict[str, Flag]:
    """Every flag of a Config class by key; a Flat block adds its fields without a prefix."""
    table: dict[str, Flag] = {}
    for field, hint, block, prefix in config_fields(config):
        owner, fields, hints = config, [field], {field.name: hint}
        if block is not None:
            owner, fields, hints = block, dataclasses.fields(block), get_type_hints(block, include_extras=True)
        for inner in fields:
            key, hint = prefix + inner.name, hints[inner.name]
            if key in table:
                raise UserError(f"{config.__module__}.Config: flag {key} is defined twice; rename one field")
            defining = next(base for base in owner.__mro__ if inner.name in base.__dict__.get("__annotations__", ()))
            table[key] = Flag(
                key=key,
                members=_members(hint),
                required=all(default_of(x) is dataclasses.MISSING for x in (field, inner)),
                module=defining.__module__,
                is_positional=tyro.conf.Positional in _strip_annotated(hint)[1],
            )
    return table


def config_fields(config: type) -> Iterator[tuple[dataclasses.Field, Any, type | None, str]]:
    """Each field of a Config with its type, and for a block its class and the prefix of its flags."""
    hints = get_type_hints(config, include_extras=True)
    for field in dataclasses.fields(config):
        hint = hints[field.name]
        block, markers = _strip_annotated(hint)
        if not dataclasses.is_dataclass(block):
            yield field, hint, None, ""
        else:
            yield field, hint, block, "" if tyro.conf.OmitArgPrefixes in markers else f"{field.name}."


def _strip_annotated(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    if get_origin(hint) is Annotated:
        return get_args(hint)[0], get_args(hint)[1:]
    return hint, ()


def default_of(field: dataclasses.Field) -> Any:
    """Its default, or dataclasses.MISSING."""
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _members(hint: Any) -> tuple[Any, ...]:
    hint, _ = _strip_annotated(hint)
    members = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    bare = {tuple: tuple[str, ...], list: list[str], set: set[str], frozenset: frozenset[str], dict: dict[str, Any]}
    return tuple(bare.get(member, member) if isinstance(member, type) else member for member in members)


def _unknown_hint(key: str, table: dict[str, Flag], *, as_flag: bool) -> str:
    """What to write instead of a flag or key that this method does not have; empty if nothing is near."""
    if (note := NOTES.get(key)) is not None and (note.startswith("no ") or not as_flag):
        return note
    found = nearest(key, table)
    return "" if found is None else f"did you mean {table[found].name if as_flag else found}?"


def _all_unknown(what: str, hints: dict[str, str]) -> ValueError:
    """One error for all unknown names; what: "flag" or "key"."""
    if len(hints) == 1:
        ((name, hint),) = hints.items()
        return ValueError(f"{name}: unknown {what}; {hint or '--help-all lists them all'}")
    parts = []
    for name, hint in hints.items():
        shorter = re.sub(r"^did you mean (.*)\?$", r"use \1", hint)
        parts.append(f"{name}: unknown {what}{', ' if hint else ''}{shorter}")
    return ValueError("; ".join(parts + ([] if all(hints.values()) else ["--help-all lists them all"])))


# words of argv ---------------------------------------------------------------------------------------------------


def read_argv(argv: Sequence[str], table: dict[str, Flag]) -> Values:
    """['--lora.r', '8', '--no-packing'] -> {'lora.r': Given(('8',)), 'packing': Given(('False',))}."""
    values: Values = {}
    positional = [flag for flag in table.values() if flag.is_positional]
    loose: list[str] = []  # words that belong to no flag
    hints: dict[str, str] = {}  # of unknown flags
    for name, words in _split_argv(argv):
        if not name:
            loose += words
            continue
        key = name.lstrip("-").replace("-", "_")
        head, _, last = key.rpartition(".")
        positive = f"{head}.{last[3:]}" if head else last[3:]
        is_negated = key not in table and last.startswith("no_") and positive in table and table[positive].may_be_bool
        if positional and (is_negated or key in table):  # --merge-lora RUN OUT
            count = 0 if is_negated else _num_words(table[key], words)
            loose, words = loose + words[count:], words[:count]
        if is_negated:
            if words:
                raise UserError(f"{name}: takes no value; remove {words[0]}")
            values[positive] = FlagValue(("False",))
            continue
        if key not in table or not name.startswith("--"):
            hints[name] = _unknown_hint(key, table, as_flag=True)
            continue
        given = FlagValue(_checked_words(words, table[key], table[key].name))
        if key in REPEATABLE and key in values:
            given = FlagValue(values[key].words + given.words)
        values[key] = given
    if hints:
        raise _all_unknown("flag", hints)
    if len(loose) > len(positional):
        raise UserError(f"{loose[len(positional)]}: a value without a flag before it; write --flag VALUE")
    return values | {flag.key: FlagValue((word,)) for flag, word in zip(positional, loose, strict=False)}


def _num_words(flag: Flag, words: Sequence[str]) -> int:
    """How many of the words after a flag are its own, in a command with positional arguments."""
    if flag.is_list:
        return len(words)
    return int(bool(words) and (not flag.is_bool or words[0].lower() in ("true", "false")))


def _split_argv(argv: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Each flag with the words after it; an empty name for words before the first flag."""
    name, words = "", []
    for word in argv:
        if looks_like_flag(word):
            if name or words:
                yield name, words
            name, attached, value = word.partition("=")
            words = [value] if attached else []
        else:
            words.append(word)
    if name or words:
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
            raise UserError(f"{label}={' '.join(words)}: must be true or false")
        return (word.capitalize(),)
    if not words and flag.may_be_bool:  # a union with bool
        return ("True",)
    if not words:
        raise UserError(f"{label}: needs a value; one that starts with - is attached with =")
    if len(words) > 1:
        raise UserError(f"{label}={' '.join(words)}: takes one value, got {len(words)}; quote it if it holds spaces")
    if flag.may_be_bool and words[0].lower() in ("true", "false"):
        return (words[0].capitalize(),)
    return (words[0],)


# values of a YAML tree -------------------------------------------------------------------------------------------


def read_tree(tree: dict[str, Any], table: dict[str, Flag], source: str) -> Values:
    """The mapping of a YAML file as Values; nested mappings are blocks with a prefix."""
    hints: dict[str, str] = {}  # of unknown keys
    values = _read_block(tree, table, source, "", hints)
    if hints:
        raise UserError(f"{source}: {_all_unknown('key', hints)}")
    return values


def _read_block(
    tree: dict[str, Any], table: dict[str, Flag], source: str, prefix: str, hints: dict[str, str]
) -> Values:
    values: Values = {}
    for name, value in tree.items():
        key = prefix + str(name).replace("-", "_")
        if isinstance(value, dict) and any(known.startswith(f"{key}.") for known in table):
            values |= _read_block(value, table, source, f"{key}.", hints)
        elif key not in table:
            inner = next((str(name) for name in value if name in table), None) if isinstance(value, dict) else None
            if inner is not None:
                hints[key] = f"write its settings without it, as {inner}: ..."
            elif key == "rl" and "method" in table:
                hints[key] = f"rl: {value} is method: {value} here"
            else:
                hints[key] = _unknown_hint(key, table, as_flag=False)
        else:
            values[key] = FlagValue(_words_of(value, table[key], f"{source}: {key}"), source)
    return values


def _words_of(value: Any, flag: Flag, label: str) -> tuple[str, ...]:
    if value is None:
        if NoneType not in flag.members:
            raise UserError(f"{label}: has no value; give one, or leave the key out for the default")
        return ("None",)
    if flag.is_list:
        items = value if isinstance(value, list) else [value]
        if flag.key in REPEATABLE:
            items = [_data_spec(item, label) if isinstance(item, dict) else item for item in items]
        return tuple(_word(item, label) for item in items)
    if isinstance(value, dict) and any(get_origin(member) is dict for member in flag.members):
        return (_json(value, label),)
    if isinstance(value, bool) and not flag.may_be_bool:
        raise UserError(f"{label}={value}: YAML reads this as true or false; put it in quotes")
    return _checked_words((_word(value, label),), flag, label)


def _word(value: Any, label: str) -> str:
    if isinstance(value, (dict, list)) or value is None:
        raise UserError(f"{label}={value}: expected a plain value, not a mapping or list")
    return str(value)


def _json(value: dict[Any, Any], label: str) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError) as error:  # a date, or a mapping that contains itself
        raise UserError(f"{label}={value}: cannot be written as JSON ({error}); put such values in quotes") from None


def _data_spec(item: dict[str, Any], label: str) -> str:
    """{path: rows.jsonl, split: train, weight: 0.5} -> 'rows.jsonl:split=train,weight=0.5'.

    roles may be a mapping, as {user: [human, person]}; a comma within a value is escaped for parse_spec.
    """
    if not item.get("path"):
        raise UserError(f"{label}={item}: a data entry needs a path")
    if "type" in item and ":" not in str(item["path"]):  # axolotl's; a task may have an option of that name
        raise UserError(f"{label}={item}: an entry's type is format here; write format: {item['type']}")
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
    for field, _, _, prefix in config_fields(type(cfg)):
        value = getattr(cfg, field.name)
        if callable(value) or not dataclasses.is_dataclass(value):  # a record of a loss is both
            is_list = isinstance(value, (tuple, list, set, frozenset))
            tree[field.name] = [_saved(item) for item in value] if is_list else _saved(value)
        elif prefix:
            tree[field.name] = config_to_tree(value)
        else:
            tree |= config_to_tree(value)
    return tree


def _saved(item: Any) -> Any:
    if isinstance(item, (enum.Enum, Path)):
        return item.name if isinstance(item, enum.Enum) else str(item)
    return import_name(item) if callable(item) else item  # a function passed from Python


# words to a Config -----------------------------------------------------------------------------------------------


def build(config: type, values: Values, table: dict[str, Flag], prog: str) -> Any:
    """An instance of the Config class."""
    missing = [flag for flag in table.values() if flag.required and flag.key not in values]
    if missing:
        names = " and ".join(flag.key.upper() if flag.is_positional else flag.name for flag in missing)
        raise UserError(f"{names}: required; {prog} --help says what to give")
    typed = {key: _typed(given, table[key]) for key, given in values.items()}
    try:
        blocks: dict[str, Any] = {}
        for field, _, block, prefix in config_fields(config):
            keys = [prefix + inner.name for inner in dataclasses.fields(block)] if block else [field.name]
            found = {key.removeprefix(prefix): typed[key] for key in keys if key in typed}
            if block is None:
                blocks |= found
            else:
                default = default_of(field)
                is_given = default is not dataclasses.MISSING
                blocks[field.name] = dataclasses.replace(default, **found) if is_given else block(**found)
        return config(**blocks)
    except ValueError as error:  # a check in __post_init__, also of the user's own Config: a sentence
        raise UserError(str(error)) from None


def _typed(given: FlagValue, flag: Flag) -> Any:
    try:
        return _value(flag.members, given.words)
    except (ValueError, TypeError, RecursionError):
        label = given.label(flag)
    (member, *others) = flag.members
    item = get_args(member)[0] if flag.is_list else member
    if not others and get_origin(item) is Literal:
        choices = [str(choice) for choice in get_args(item)]
        wrong = next((word for word in given.words if word not in choices), None)
        if wrong is not None:
            raise UserError(f"{label}={wrong}: must be one of {', '.join(choices)}{value_hint(flag.key, wrong)}")
    raise UserError(f"{label}={' '.join(given.words)}: expected {' or '.join(map(_described, flag.members))}")


def _value(members: tuple[Any, ...], words: tuple[str, ...]) -> Any:
    """The words as the first type that takes them; text takes anything, so it is last."""
    for member in sorted(members, key=lambda member: (member is str, member is not NoneType)):
        with contextlib.suppress(*([ValueError, TypeError] if len(members) > 1 else [])):
            return _value_of(member, words)
    raise UserError("fits no type")


def _value_of(member: Any, words: tuple[str, ...]) -> Any:
    origin = get_origin(member)
    if origin in LISTS:
        kinds = get_args(member)
        if origin is not tuple or kinds[1:] == (...,):
            kinds = kinds[:1] * len(words)
        return LISTS[origin](_value(_members(kind), (word,)) for kind, word in zip(kinds, words, strict=True))
    (word,) = words
    if origin is dict:
        if not isinstance(found := json.loads(word), dict):
            raise UserError("not a JSON object")
        return found
    if isinstance(member, type) and issubclass(member, enum.Enum):
        if word not in member.__members__:
            raise UserError("not a member")
        return member[word]
    choices = {NoneType: (None,), bool: (True, False)}.get(member, get_args(member) if origin is Literal else None)
    if choices is None:
        return member(word)  # str, int, float, Path
    if word not in map(str, choices):
        raise UserError("not a choice")
    return next(choice for choice in choices if str(choice) == word)


def _described(member: Any) -> str:
    origin, kinds = get_origin(member), get_args(member)
    if origin is Literal:
        return f"one of {', '.join(map(str, kinds))}"
    if isinstance(member, type) and issubclass(member, enum.Enum):
        return f"one of {', '.join(member.__members__)}"
    if origin in LISTS:
        count = "values" if origin is not tuple or kinds[1:] == (...,) else f"{len(kinds)} values"
        return f"{count}, each {' or '.join(map(_described, _members(kinds[0])))}"
    if origin is dict:
        return 'a JSON object such as {"NAME": VALUE}'
    return TYPES.get(member, getattr(member, "__name__", str(member)))


# help, and commands without layers -------------------------------------------------------------------------------


def print_help(config: type, prog: str, note: str = "", is_shown: Callable[[str], bool] | None = None) -> NoReturn:
    """The flags by block, those that is_shown(key) chooses; then SystemExit(0)."""
    shown = config if is_shown is None else _with_flags(config, is_shown)
    doc = "\n\n".join(part for part in (config.__doc__ or "", note) if part)
    tyro.cli(shown, args=["--help"], prog=prog, description=doc, config=(tyro.conf.HelptextFromCommentsOff,))
    raise AssertionError("tyro exits after --help")


def _with_flags(config: type, is_shown: Callable[[str], bool]) -> type:
    """A subclass in which all other flags are hidden."""
    changed = []
    for field, hint, block, prefix in config_fields(config):
        default = {name: getattr(field, name) for name in ("default", "default_factory")}
        if block is None and not is_shown(field.name):
            changed.append((field.name, tyro.conf.Suppress[hint], dataclasses.field(**default)))
        elif block is not None:
            kind = _with_flags(block, lambda name, prefix=prefix: is_shown(prefix + name))
            if (whole := default_of(field)) is not dataclasses.MISSING:
                given = {inner.name: getattr(whole, inner.name) for inner in dataclasses.fields(block)}
                default = {"default_factory": lambda kind=kind, given=given: kind(**given)}
            markers = _strip_annotated(hint)[1]
            changed.append((field.name, Annotated[kind, *markers] if markers else kind, dataclasses.field(**default)))
    is_frozen = config.__dataclass_params__.frozen
    made = dataclasses.make_dataclass(config.__name__, changed, bases=(config,), kw_only=True, frozen=is_frozen)
    made.__doc__ = config.__doc__
    return made


def parse_command(config: type, argv: Sequence[str] | None, prog: str) -> Any:
    """The Config of a command whose only layer is argv; its help and SystemExit(0) if that is asked for."""
    argv = sys.argv[1:] if argv is None else argv
    if any(word in HELP for word in argv):
        print_help(config, prog)
    table = flag_table(config)
    return build(config, read_argv(argv, table), table, prog)


def run_command(command: Callable[[], None]) -> int:
    """Exit status of a command: 0, or 2 after one line that says what is wrong."""
    try:
        command()
    except ValueError as error:
        print("error:", printable(" ".join(str(error).splitlines())), file=sys.stderr)
        return 2
    return 0
