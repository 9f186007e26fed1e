"""Parse command lines and YAML files into a Config, with tyro.

    table = flag_table(Config)
    values = read_tree(yaml_tree, table, "config.yaml") | read_argv(argv, table)      # later layers win
    cfg = build(Config, values, table, prog)

A layer is a mapping from keys ("lora.r") to the words of that flag; the values of a YAML file become words too. tyro
parses the words of all layers together. The blocks are checked only then, because they check their fields together: a
file that sets lora.alpha is valid only with the --lora.r of the command line.

Mistakes are reported together, one line each, and name the flag, or the file and its key.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import io
import json
import re
import sys
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

import tyro

from data.errors import UserError
from data.hints import NOTES, nearest, value_hint
from data.user_code import import_name, printable

T = TypeVar("T")
REPEATABLE = ("data", "eval_data")  # --data a --data b means --data a b; for any other repeated flag the last wins
HELP = ("-h", "--help", "--help-all")
LISTS = (tuple, list, set, frozenset, Sequence)
TYPES = {str: "text", int: "a whole number", float: "a number", bool: "true or false", NoneType: "None"}
COMMON = object()
Common = Annotated[T, COMMON]  # --help shows the flags with this type; --help-all shows all flags


class Mistakes(UserError):
    """Several errors, one line each."""

    def __init__(self, lines: Sequence[str]) -> None:
        self.lines = [_one_line(line) for line in lines]
        super().__init__("\n".join(self.lines))


def _report(found: Sequence[str], mistakes: list[str] | None = None) -> None:
    """Append what was found to the list of mistakes, or raise if there is no list."""
    if mistakes is not None:
        mistakes += found
    elif found:
        raise Mistakes(found) if len(found) > 1 else UserError(found[0])


def error_lines(error: BaseException) -> list[str]:
    """Return one printable line for each mistake that the error reports."""
    return error.lines if isinstance(error, Mistakes) else [_one_line(str(error)) or type(error).__name__]


def _one_line(text: str) -> str:
    return printable(" ".join(text.splitlines()))  # values may contain anything


# flags of a Config -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Flag:
    """One field of a Config or of one of its blocks."""

    key: str
    hint: Any  # type of the field
    required: bool
    module: str  # module that defines it

    @property
    def name(self) -> str:
        return "--" + self.key.replace("_", "-")

    @property
    def members(self) -> tuple[Any, ...]:
        """The types of a union; otherwise the type alone."""
        return _members(self.hint)

    @property
    def is_bool(self) -> bool:
        return self.members == (bool,)

    @property
    def is_list(self) -> bool:
        return any(get_origin(member) in LISTS for member in self.members)

    @property
    def is_positional(self) -> bool:
        return tyro.conf.Positional in _strip_annotated(self.hint)[1]

    @property
    def is_common(self) -> bool:
        return COMMON in _strip_annotated(self.hint)[1]

    def take(self, words: Sequence[str]) -> tuple[tuple[str, ...], list[str]]:
        """Split off the words that the flag takes, in a command with positional arguments."""
        is_value = bool(words) and (not self.is_bool or words[0].lower() in ("true", "false"))
        count = len(words) if self.is_list else int(is_value)
        return tuple(words[:count]), list(words[count:])

    def normalize(self, words: Sequence[str]) -> tuple[str, ...]:
        """--packing and --packing true become True."""
        if bool in self.members and (not words or (len(words) == 1 and words[0].lower() in ("true", "false"))):
            return (words[0].capitalize() if words else "True",)
        return tuple(words)


@dataclass(frozen=True)
class FlagValue:
    """The words of one flag; `source` is the file they were read from, None for the command line."""

    words: tuple[str, ...]
    source: str | None = None

    def label(self, flag: Flag) -> str:
        return flag.name if self.source is None else f"{self.source}: {flag.key}"


Values = dict[str, FlagValue]
Elsewhere = Callable[[str], str]
CONFIG = {"config": Flag("config", str, required=False, module=__name__)}  # --config FILE.yaml


def flag_table(config: type) -> dict[str, Flag]:
    """Return every flag of a Config class by key; a Flat block adds its fields without a prefix."""
    table: dict[str, Flag] = {}
    for field, hint, block, prefix in config_fields(config):
        owner, fields, hints = config, (field,), {field.name: hint}
        if block is not None:
            owner, fields, hints = block, dataclasses.fields(block), get_type_hints(block, include_extras=True)
        for inner in fields:
            key = prefix + inner.name
            if key in table:
                raise UserError(f"{config.__module__}.Config: flag {key} is defined twice; rename one field")
            defining = next(base for base in owner.__mro__ if inner.name in base.__dict__.get("__annotations__", ()))
            is_required = all(default_of(x) is dataclasses.MISSING for x in (field, inner))
            table[key] = Flag(key, hints[inner.name], is_required, defining.__module__)
    return table


def config_fields(config: type) -> Iterator[tuple[dataclasses.Field, Any, type | None, str]]:
    """Yield each field of a Config with its type and, for a block, its class and the prefix of its flags."""
    hints = get_type_hints(config, include_extras=True)
    for field in dataclasses.fields(config):
        hint = hints[field.name]
        block, markers = _strip_annotated(hint)
        if not dataclasses.is_dataclass(block):
            yield field, hint, None, ""
        else:
            yield field, hint, block, "" if tyro.conf.OmitArgPrefixes in markers else f"{field.name}."


def default_of(field: dataclasses.Field) -> Any:
    """Return the default of a field, or dataclasses.MISSING."""
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _strip_annotated(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    return (get_args(hint)[0], get_args(hint)[1:]) if get_origin(hint) is Annotated else (hint, ())


def _members(hint: Any) -> tuple[Any, ...]:
    hint, _ = _strip_annotated(hint)
    members = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return tuple(member[str, ...] if member is tuple else member[str] if member in LISTS else member  # bare: of text
                 for member in members)  # fmt: skip


# layers ----------------------------------------------------------------------------------------------------------


def nowhere(key: str) -> str:
    return ""


def read_argv(
    argv: Sequence[str], table: Mapping[str, Flag], mistakes: list[str] | None = None, elsewhere: Elsewhere = nowhere
) -> Values:
    """['--lora.r', '8', '--no-packing'] -> {'lora.r': FlagValue(('8',)), 'packing': FlagValue(('False',))}.

    Mistakes are appended to the list, or raised if there is none. elsewhere(key) is the hint for a flag that another
    table has, or "".
    """
    found: list[str] = []
    values: Values = {}
    positional = [flag for flag in table.values() if flag.is_positional]
    loose: list[str] = []  # words that belong to no flag
    for name, words in _split_argv(argv):
        key = name.lstrip("-").replace("-", "_")
        head, _, last = key.rpartition(".")
        positive = f"{head}.{last[3:]}" if head else last[3:]
        if not name:
            loose += words
        elif key in table and name.startswith("--"):
            flag = table[key]
            if positional:  # --merge-lora RUN OUT
                words, rest = flag.take(words)
                loose += rest
            words = flag.normalize(words)
            earlier = values[key].words if key in REPEATABLE and key in values else ()
            if len(words) > 1 and not flag.is_list and not flag.is_bool:
                text = f"{name}={' '.join(words)}"
                found.append(f"{text}: takes one value, got {len(words)}; quote a value that contains spaces")
            elif words or flag.is_list:
                values[key] = FlagValue((*earlier, *words))
            else:
                found.append(f"{name}: needs a value; attach a value that starts with - with =")
        elif last.startswith("no_") and positive in table and bool in table[positive].members:
            values[positive] = FlagValue(("False",))
            loose += words if positional else []
            if words and not positional:
                found.append(f"{name}: takes no value; remove {words[0]}")
        else:
            hint = "" if key in table else elsewhere(key)
            found.append(f"{name}: unknown flag; {hint or _unknown_hint(key, table, as_flag=True)}")
    found += [f"{word}: a value without a flag before it; write --flag VALUE" for word in loose[len(positional) :]]
    values |= {flag.key: FlagValue((word,)) for flag, word in zip(positional, loose, strict=False)}
    _report(found, mistakes)
    return values


def _split_argv(argv: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield each flag with the words after it; an empty name for words before the first flag."""
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


def read_tree(
    tree: Mapping[str, Any], table: Mapping[str, Flag], source: str, mistakes: list[str] | None = None,
    elsewhere: Elsewhere = nowhere,
) -> Values:  # fmt: skip
    """Read the mapping of a YAML file; nested mappings are blocks with a prefix."""
    found: list[str] = []
    values = _read_block(tree, table, source, "", found, elsewhere)
    _report(found, mistakes)
    return values


def _read_block(
    tree: Mapping[str, Any], table: Mapping[str, Flag], source: str, prefix: str, mistakes: list[str],
    elsewhere: Elsewhere,
) -> Values:  # fmt: skip
    values: Values = {}
    for name, value in tree.items():
        key = prefix + str(name).replace("-", "_")
        if isinstance(value, dict) and any(known.startswith(f"{key}.") for known in table):
            values |= _read_block(value, table, source, f"{key}.", mistakes, elsewhere)
        elif key in table:
            try:
                values[key] = FlagValue(_words_of(value, table[key]), source)
            except UserError as error:
                mistakes.append(f"{source}: {key}{error}")
        else:
            inner = next((str(name) for name in value if name in table), None) if isinstance(value, dict) else None
            hint = f"write its settings without it, as {inner}: ..." if inner else ""
            if key == "rl" and "method" in table:
                hint = f"write method: {value}"
            hint = hint or elsewhere(key) or _unknown_hint(key, table, as_flag=False)
            mistakes.append(f"{source}: {key}: unknown key; {hint}")
    return values


def _words_of(value: Any, flag: Flag) -> tuple[str, ...]:
    """The words of a YAML value; an error continues the sentence after the key."""
    if value is None:
        if NoneType not in flag.members:
            raise UserError(": has no value; set one, or remove the key to use the default")
        return ("None",)
    if flag.is_list:
        items = value if isinstance(value, list) else [value]
        if flag.key in REPEATABLE:
            items = [_data_spec(item) if isinstance(item, dict) else item for item in items]
        return tuple(_word(item) for item in items)
    if isinstance(value, dict) and any(dict in (member, get_origin(member)) for member in flag.members):
        try:
            return (json.dumps(value),)
        except (TypeError, ValueError) as error:  # a date, or a mapping that contains itself
            raise UserError(f"={value}: cannot be written as JSON ({error}); put such values in quotes") from None
    if isinstance(value, bool) and bool not in flag.members:
        raise UserError(f"={value}: YAML reads this as true or false; put it in quotes")
    return flag.normalize((_word(value),))


def _word(value: Any) -> str:
    if isinstance(value, (dict, list)) or value is None:
        raise UserError(f"={value}: expected a plain value, not a mapping or list")
    return str(value)


def _data_spec(item: dict[str, Any]) -> str:
    """{path: rows.jsonl, split: train, weight: 0.5} -> 'rows.jsonl:split=train,weight=0.5'.

    roles may be a mapping, as {user: [human, person]}; a comma within a value is escaped for parse_spec.
    """
    if not item.get("path"):
        raise UserError(f"={item}: a data entry needs a path")
    if "type" in item and ":" not in str(item["path"]):  # axolotl's; a task may have an option of that name
        raise UserError(f"={item}: write format: {item['type']}, not type")
    if isinstance(item.get("roles"), dict):
        roles = {role: [names] if isinstance(names, str) else names for role, names in item["roles"].items()}
        item = item | {"roles": ",".join(f"{role}={'|'.join(map(str, names))}" for role, names in roles.items())}
    options = [
        f"{key}={_word(value)}".replace(",", "\\,")
        for key, value in item.items()
        if key != "path" and value is not None
    ]
    return ":".join([str(item["path"]), ",".join(options)] if options else [str(item["path"])])


def _unknown_hint(key: str, table: Mapping[str, Flag], *, as_flag: bool) -> str:
    if (note := NOTES.get(key)) is not None and (note.startswith("no ") or not as_flag):
        return note
    match = nearest(key, table)
    return "--help-all lists all flags" if match is None else f"did you mean {table[match].name if as_flag else match}?"


def config_to_tree(block: Any) -> dict[str, Any]:
    """Return a Config as nested plain data, Flat blocks merged at the top; the inverse of read_tree."""
    tree: dict[str, Any] = {}
    for field, _, _, prefix in config_fields(type(block)):
        value = getattr(block, field.name)
        if callable(value) or not dataclasses.is_dataclass(value):  # a loss record is both
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
    if isinstance(item, str):
        return str(item)  # a PythonObject is its name
    return import_name(item) if callable(item) else item  # a function passed from Python


# tyro ------------------------------------------------------------------------------------------------------------

ESCAPE = "\0"  # before a word such as --x that is a value; tyro would read it as a flag
REGISTRY = tyro.constructors.ConstructorRegistry()


@REGISTRY.primitive_rule
def _text(info: tyro.constructors.PrimitiveTypeInfo) -> tyro.constructors.PrimitiveConstructorSpec | None:
    if info.type not in (str, Path):
        return None
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="STR",
        instance_from_str=lambda words: info.type(words[0].removeprefix(ESCAPE)),
        is_instance=lambda value: isinstance(value, info.type),
        str_from_instance=lambda value: [str(value)],
    )


def build(
    config: type, values: Values, table: Mapping[str, Flag], prog: str, mistakes: Sequence[str] = (),
    objects: Mapping[str, Any] | None = None,
) -> Any:  # fmt: skip
    """Return an instance of the Config class, or raise all mistakes, including those found before.

    `objects`: values by key that are not parsed, such as functions passed from Python.
    """
    objects = objects or {}
    missing = [flag for flag in table.values() if flag.required and flag.key not in (*values, *objects)]
    if missing and not mistakes:
        names = " and ".join(flag.key.upper() if flag.is_positional else flag.name for flag in missing)
        mistakes = [f"{names}: required; {prog} --help lists all flags"]
    words = [word for key, given in values.items() for word in _for_tyro(table[key], given.words)]
    parsed = None if mistakes else _parse(_only(config, values), words, prog)
    if parsed is None:
        wrong = [_explain(given, table[key]) for key, given in values.items() if not _is_valid(table[key], given)]
        _report([*mistakes, *wrong] or [f"{prog}: tyro rejects {' '.join(words)}"])
    try:
        return _check(config, parsed, objects)
    except UserError as error:
        raise Mistakes([_with_file(line, values) for line in error_lines(error)]) from None


def _with_file(line: str, values: Values) -> str:
    """Name the file of a setting that a check rejects: "temperature=-1: ..." -> "run.yaml: temperature=-1: ..."."""
    name = line.partition("=")[0]
    given = [values[name]] if name in values else [values[key] for key in values if key.endswith(f".{name}")]
    return f"{given[0].source}: {line}" if len(given) == 1 and given[0].source is not None else line


def _for_tyro(flag: Flag, words: Sequence[str]) -> list[str]:
    escaped = [ESCAPE + word if looks_like_flag(word) or word.startswith(("--", ESCAPE)) else word for word in words]
    return escaped if flag.is_positional else [flag.name, *escaped]


def _parse(config: type, words: Sequence[str], prog: str) -> Any:
    """The only call of tyro's parser. Returns None after an error; tyro prints it as a box, which is dropped."""
    markers = (tyro.conf.FlagConversionOff, tyro.conf.HelptextFromCommentsOff)  # --packing True, for all layers alike
    with contextlib.redirect_stderr(io.StringIO()), contextlib.suppress(SystemExit):
        return tyro.cli(
            config, args=words, prog=prog, registry=REGISTRY, config=markers, console_outputs=False, add_help=False
        )
    return None


def _is_valid(flag: Flag, given: FlagValue) -> bool:
    """Parse the flag alone."""
    hint = _strip_annotated(flag.hint)[0] if flag.is_positional else flag.hint
    alone = Flag("value", hint, required=True, module="")
    config = dataclasses.make_dataclass("Alone", [(alone.key, hint)])
    return _parse(config, _for_tyro(alone, given.words), "") is not None


def _explain(given: FlagValue, flag: Flag) -> str:
    """The sentence for words that tyro rejects."""
    label = given.label(flag)
    (member, *others) = flag.members
    item = get_args(member)[0] if flag.is_list else member
    if not others and get_origin(item) is Literal:
        choices = [str(choice) for choice in get_args(item)]
        wrong = next((word for word in given.words if word not in choices), None)
        if wrong is not None:
            return f"{label}={wrong}: must be one of {', '.join(choices)}{value_hint(flag.key, wrong)}"
    return f"{label}={' '.join(given.words)}: expected {' or '.join(map(_described, flag.members))}"


def _described(member: Any) -> str:
    origin, kinds = get_origin(member), get_args(member)
    if origin is Literal:
        return f"one of {', '.join(map(str, kinds))}"
    if isinstance(member, type) and issubclass(member, enum.Enum):
        return f"one of {', '.join(member.__members__)}"
    if origin in LISTS:
        count = "values" if origin is not tuple or kinds[1:] == (...,) else f"{len(kinds)} values"
        return f"{count}, each {' or '.join(map(_described, _members(kinds[0])))}"
    if dict in (member, origin):
        return 'a JSON object such as {"NAME": VALUE}'
    return TYPES.get(member, getattr(member, "__name__", str(member)))


def _only(config: type, keys: Container[str]) -> type:
    """Return a dataclass with these flags only: tyro takes most of its time for flags that are not set."""
    fields: list[tuple[str, Any]] = []
    for field, hint, block, prefix in config_fields(config):
        if block is not None:
            inner = [(x.name, kind) for x, kind, _, _ in config_fields(block) if prefix + x.name in keys]
            if inner:
                markers = _strip_annotated(hint)[1]
                part = dataclasses.make_dataclass(block.__name__, inner)
                fields.append((field.name, Annotated[part, *markers] if markers else part))
        elif field.name in keys:
            fields.append((field.name, hint))
    return dataclasses.make_dataclass(config.__name__, fields)


def _check(config: type, parsed: Any, objects: Mapping[str, Any]) -> Any:
    """Construct the blocks and the Config from what tyro parsed, objects and defaults; each checks its fields."""
    fields: dict[str, Any] = {}
    mistakes: list[str] = []
    for field, _, block, prefix in config_fields(config):
        value, default = getattr(parsed, field.name, dataclasses.MISSING), default_of(field)
        names = [field.name] if block is None else [x.name for x in dataclasses.fields(block)]
        given = {name: objects[prefix + name] for name in names if prefix + name in objects}
        if block is None:
            value = given.get(field.name, value)
        elif given or value is not dataclasses.MISSING or default is dataclasses.MISSING:
            values = ({} if value is dataclasses.MISSING else vars(value)) | given
            try:
                value = block(**values) if default is dataclasses.MISSING else dataclasses.replace(default, **values)
            except ValueError as error:  # from a check in __post_init__, including a custom Config's
                mistakes.append(str(error))
        if value is not dataclasses.MISSING:
            fields[field.name] = value
    _report(mistakes)
    try:
        return config(**fields)
    except ValueError as error:
        raise UserError(str(error)) from None


def _without_checks(config: type, is_shown: Callable[[str], bool] = lambda key: True) -> type:
    """Return a copy of the Config class that checks nothing and hides the flags that --help does not show."""
    changed = []
    for field, hint, block, prefix in config_fields(config):
        default = {name: getattr(field, name) for name in ("default", "default_factory")}
        if block is None and not is_shown(field.name):
            changed.append((field.name, tyro.conf.Suppress[hint], dataclasses.field(**default)))
        elif block is not None:
            kind = _without_checks(block, lambda name, prefix=prefix: is_shown(prefix + name))
            if (whole := default_of(field)) is not dataclasses.MISSING:
                values = {inner.name: getattr(whole, inner.name) for inner in dataclasses.fields(block)}
                default = {"default_factory": lambda kind=kind, values=values: kind(**values)}
            markers = _strip_annotated(hint)[1]
            changed.append((field.name, Annotated[kind, *markers] if markers else kind, dataclasses.field(**default)))
    copy = dataclasses.make_dataclass(
        config.__name__, changed, bases=(config,), kw_only=True, frozen=config.__dataclass_params__.frozen,
        namespace={"__post_init__": lambda self: None},
    )  # fmt: skip
    copy.__doc__ = config.__doc__
    return copy


def print_help(config: type, prog: str, note: str = "", is_shown: Callable[[str], bool] | None = None) -> NoReturn:
    """Print the flags by block, those that is_shown(key) selects; then raise SystemExit(0)."""
    shown = config if is_shown is None else _without_checks(config, is_shown)
    doc = "\n\n".join(part for part in (config.__doc__ or "", note) if part)
    tyro.cli(shown, args=["--help"], prog=prog, description=doc, config=(tyro.conf.HelptextFromCommentsOff,))
    raise AssertionError("tyro exits after --help")


def parse_command(config: type[T], argv: Sequence[str] | None, prog: str) -> T:
    """Return the Config of a command whose only layer is argv; print its help and exit if argv asks for it."""
    argv = sys.argv[1:] if argv is None else argv
    if any(word in HELP for word in argv):
        print_help(config, prog)
    table = flag_table(config)
    mistakes: list[str] = []
    return build(config, read_argv(argv, table, mistakes), table, prog, mistakes)


def run_command(command: Callable[[], None]) -> int:
    """Return the exit status of a command: 0, or 2 after printing one line for each mistake."""
    try:
        command()
    except ValueError as error:
        print("\n".join(f"error: {line}" for line in error_lines(error)), file=sys.stderr)
        return 2
    return 0
