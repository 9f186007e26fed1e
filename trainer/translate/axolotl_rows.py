"""Translate axolotl's datasets: entries of --data, each with a format and options, and settings they share.

datasets = datasets_of(config, "datasets")       # label -> dataset
rows_of(datasets, "dpo") == [{"path": "pairs.jsonl", "format": "chat_template.default", "field_messages": "turns"}]
shared_of(config, datasets, "prm") == ({"step_separator": "\n\n"}, [])    # flags of the run, and notes
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from data.chat import DELIMITERS
from data.errors import UserError
from data.format_options import FormatOptions
from data.formats.ebft import EBFT_FORMATS, EBFT_STRIDED_FORMATS
from data.formats.pairs import PAIR_FORMATS
from data.formats.registry import PROMPT_FORMATS, SFT_FORMATS
from data.formats.unpaired import UNPAIRED_FORMATS
from data.hints import suggest
from trainer.translate.keys import listed

PACKAGE = "axolotl.prompt_strategies."
FOLDERS = ("dpo", "kto", "orpo", "ebft")  # of that package; a type may begin with one
# axolotl's types of SFT rows -> strop's formats
SFT_TYPES = {"alpaca": "alpaca", "chat_template": "chat_template", "completion": "completion", "pretrain": "completion",
             "sharegpt": "sharegpt", "alpaca_chat.load_qa": "question_answer",
             "alpaca_chat.load_concise": "alpaca"}  # fmt: skip
SHAREGPT = ("from", "value")
ROLE_NAMES = {"gpt": "assistant", "human": "user"}
# Formats for SFT that axolotl renders without a chat template: plain text, and instructions with fixed headings.
PLAIN = ("completion", "user_defined", "input_output")
HEADINGS = ("alpaca", "question_answer")
# Settings of a dataset in axolotl that are flags of the run in strop, with axolotl's defaults.
SHARED: dict[str, dict[str, Any]] = {
    "sft": {"roles_to_train": ["assistant"], "train_on_eos": "turn"},
    "prm": {"step_separator": "\n", "max_completion_length": None, "train_on_last_step_only": False},
}
TRAINED = ("roles_to_train", "train_on_eos", "train_on_eot")
OWN_TEMPLATE = "tokenizer_default"
TEMPLATE = ("chat_template", "chat_template_jinja")
ENDS = ("none", "last", "turn", "all")  # values of train_on_eos; each trains the tokens of the values before it
BUILDERS = ("json", "csv", "parquet", "text", "arrow")  # datasets' own loaders, where a path is expected
USER_DEFINED = ("field_prompt", "field_system", "field_chosen", "field_rejected", "field_completion", "field_label",
                "prompt_format", "chosen_format", "rejected_format", "completion_format")  # fmt: skip
# of SFT, with axolotl's defaults
USER_DEFINED_SFT = {"field_instruction": "instruction", "field_input": "input", "field_output": "output",
                    "field_system": "system", "format": "{instruction} {input} ",
                    "no_input_format": "{instruction} ", "system_prompt": "", "system_format": "{system}"}  # fmt: skip


def datasets_of(config: Mapping[str, Any], key: str) -> dict[str, Mapping[str, Any]]:
    """Return the datasets of a list in the file, by label."""
    return {f"{key}[{number}]": dataset for number, dataset in enumerate(config.get(key) or [])}


def rows_of(datasets: Mapping[str, Mapping[str, Any]], method: str) -> list[dict[str, Any]]:
    """Return the entries of --data."""
    return [entry for label, dataset in datasets.items() for entry in _entries(dataset, label, method)]


def shared_of(
    config: Mapping[str, Any], datasets: Mapping[str, Mapping[str, Any]], method: str
) -> tuple[dict[str, Any], list[str]]:
    """Return the settings that strop has once for all datasets, and notes; raise if the datasets differ."""
    shared: dict[str, Any] = {}
    notes: list[str] = []
    for label, dataset in datasets.items():
        name = _format_of(dataset, label, method).get("format", "auto")
        reads = _reads(name, method)
        given = {key: value for key, value in dataset.items() if key in reads and value is not None}
        found = {key: given.get(key, default) for key, default in SHARED.get(method, {}).items()}
        if method == "sft":
            found["train_on_eos"] = _train_on_eos(given, label, config.get("eot_tokens"))
            found["roles_to_train"] = _trained_roles(found["roles_to_train"], dataset)
            if name in PLAIN:
                del found["roles_to_train"]
        if "chat_template" in reads:
            found["chat_template"] = _template(config, given, label, name)
        for key, value in found.items():
            if shared.setdefault(key, value) != value:
                raise UserError(
                    f"{label}.{key}={value!r}: another dataset has {shared[key]!r}, but {key} applies to all datasets; "
                    "use one value, or train on the datasets in separate runs"
                )
        ignored = [key for key in (*TRAINED, *TEMPLATE, "weight") if dataset.get(key) is not None and key not in given]
        if str(given.get("chat_template")).startswith(f"{OWN_TEMPLATE}_fallback"):
            notes.append(fallback_note(given["chat_template"]))
        if ignored:
            notes.append(f"{label}: axolotl does not read {', '.join(ignored)} with this type and method; dropped")
        if given.get("weight", 1) != 1:
            notes.append(
                f"{label}.weight={given['weight']}: each epoch trains a different part of the rows; in axolotl the same"
            )
    return shared, notes


def _reads(name: str, method: str) -> set[str]:
    """Return the settings of a dataset with this format that axolotl reads and that its --data entry lacks."""
    if method == "prm":
        return {"weight", *SHARED["prm"]}
    if method == "sft":
        return {"weight"} if name in (*PLAIN, *HEADINGS) else {"weight", *TRAINED, *TEMPLATE}
    by_template = name.removeprefix("bradley_terry.").startswith("chat_template") and method != "orpo"
    return {*(["weight"] if method == "rm" else []), *(TEMPLATE if by_template else [])}


def _train_on_eos(given: Mapping[str, Any], label: str, eot_tokens: Any) -> str:
    """Return which end-of-turn tokens to train; without eot_tokens, axolotl's two settings mean the same token."""
    eos = given.get("train_on_eos", "turn")
    eot = given.get("train_on_eot", eos)
    for key, value in (("train_on_eos", eos), ("train_on_eot", eot)):
        if value not in ENDS:
            raise UserError(f"{label}.{key}={value}: use one of {', '.join(ENDS)}")
    if eot != eos and eot_tokens:
        raise UserError(
            f"{label}.train_on_eot={eot}: train_on_eos is {eos}, but strop has one setting for eos and eot_tokens; use "
            "the same value for both"
        )
    return max(eos, eot, key=ENDS.index)


def _trained_roles(names: Sequence[str], dataset: Mapping[str, Any]) -> list[str]:
    roles = {source: role for role, sources in (_roles(dataset.get("roles")) or {}).items() for source in sources}
    return [(roles or ROLE_NAMES).get(name, name) for name in names]


def _template(config: Mapping[str, Any], given: Mapping[str, Any], label: str, name: str) -> str:
    """Return --chat-template for a dataset; tokenizer_default is the template of the run, which the tokenizer gets."""
    own, jinja = (given.get(key) for key in TEMPLATE)
    if jinja is not None and own is None and name == "chat_template":
        raise UserError(f"{label}.chat_template_jinja: axolotl reads it only with chat_template: jinja; add that")
    of_run = template_of(*(config.get(key) for key in TEMPLATE))
    found = of_run if not jinja and own is None or own == OWN_TEMPLATE else template_of(own, jinja)
    if of_run not in (None, found):
        raise UserError(
            f"{label}.chat_template={own or jinja}: the run has {of_run}, which applies to all datasets; remove one"
        )
    return found or OWN_TEMPLATE


def _entries(dataset: Mapping[str, Any], label: str, method: str) -> list[dict[str, Any]]:
    entry = _format_of(dataset, label, method) | _messages_of(dataset, label, method)
    for theirs, ours in (("split", "split"), ("name", "name"), ("field_chosen", "field_chosen"),
                         ("field_rejected", "field_rejected")):  # fmt: skip
        if dataset.get(theirs) is not None:
            entry.setdefault(ours, str(dataset[theirs]))
    if dataset.get("weight", 1) not in (None, 1) and method in ("sft", "rm", "prm"):  # axolotl's rl does not read it
        entry["weight"] = dataset["weight"]
    _check_fixed(dataset, label)
    for name, default in (("field_chosen", "chosen"), ("field_rejected", "rejected"), ("field_messages", "messages")):
        if entry.get(name) == default:
            del entry[name]
    return [{"path": path, **entry} for path in _paths(dataset, label)]


def _paths(dataset: Mapping[str, Any], label: str) -> list[str]:
    path, files = dataset.get("path"), listed(dataset.get("data_files"))
    if str(path).startswith(("s3://", "gs://", "gcs://", "az://", "abfs://", "oci://")):
        raise UserError(f"{label}.path={path}: remote stores are not supported; download it, and name the file")
    if not files:
        if path is None:
            raise UserError(f"{label}: has neither path nor data_files; name a file or a dataset")
        return [str(path)]
    if path is None or path in BUILDERS:
        return [str(file) for file in files]
    if not Path(str(path)).expanduser().is_dir():
        raise UserError(f"{label}.data_files={files[0]}: is in the dataset {path}; download it, and name it as path")
    return [str(Path(str(path)) / str(file)) for file in files]


# formats ---------------------------------------------------------------------------------------------------------


def _format_of(dataset: Mapping[str, Any], label: str, method: str) -> dict[str, Any]:
    """Return the format, and for user_defined its options."""
    kind = dataset.get("type")
    if isinstance(kind, Mapping):
        return _user_defined(kind, f"{label}.type", method)
    if kind is None:
        return {}
    name = str(kind).removeprefix(PACKAGE)
    folder, _, rest = name.partition(".")
    name = rest if folder in FOLDERS and rest else name
    if method == "sft":
        return _sft_format(name, dataset, label)
    known = _formats(method)
    if name in known:
        return {"format": name}
    family = name.partition(".")[0]
    if "." not in name and f"{name}.default" in known:
        return {"format": f"{name}.default"}
    ours = any(other.startswith(f"{family}.") for other in known) and not Path(f"{family}.py").is_file()
    if "." not in name or ours or str(kind).startswith(PACKAGE):
        raise UserError(
            f"{label}.type={kind}: there is no such format for {method}; {suggest(name, known)}, or write a transform, "
            "my_module.my_transform"
        )
    return {"format": name}  # the user's own transform


def _formats(method: str) -> Sequence[str]:
    if method in ("grpo", "gdpo", "rloo"):
        return list(PROMPT_FORMATS)
    if method == "ebft":
        return [*EBFT_FORMATS, *EBFT_STRIDED_FORMATS, *PROMPT_FORMATS]
    if method == "kto":
        return list(UNPAIRED_FORMATS)
    return ["stepwise_supervised"] if method == "prm" else list(PAIR_FORMATS)


def _sft_format(name: str, dataset: Mapping[str, Any], label: str) -> dict[str, Any]:
    kind, _, variant = name.partition(":")  # alpaca:chat and the like name an old template
    known = SFT_TYPES | {name: name for name in SFT_FORMATS}
    found = known.get(kind) or known.get(kind.removesuffix(".load"))
    if found is None and "." in kind and not _is_axolotls(kind):
        return {"format": kind}  # the user's own transform
    if found is None or variant:
        raise UserError(
            f"{label}.type={name}: there is no such format for sft; {suggest(kind, known)}, or write a transform, "
            "my_module.my_transform"
        )
    column = dataset.get("field") or dataset.get("text_column")
    options = {"field_text": column} if found == "completion" and column not in (None, "text") else {}
    if found == "completion":
        options["long_text"] = "split"
    if found == "chat_template" and dataset.get("drop_system_message"):
        options["system_message"] = "drop"
    return {"format": found, **options}


def _is_axolotls(name: str) -> bool:
    """Return whether a dotted type for SFT is one of axolotl's modules, not a local file."""
    head = name.partition(".")[0]
    theirs = ("alpaca_chat", "alpaca_instruct", "alpaca_w_system", "chat_template", "completion", "context_qa",
              "creative_acr", "creative_acr_summarize", "input_output", "instruct", "llama2_chat", "metharme",
              "messages", "orcamini", "pygmalion", "sharegpt", "user_defined")  # fmt: skip
    return head in theirs and not Path(f"{head}.py").is_file()


def _user_defined(kind: Mapping[str, Any], label: str, method: str) -> dict[str, Any]:
    if method == "sft":
        return _user_defined_sft(kind, label)
    options = {name: str(kind[name]) for name in USER_DEFINED if kind.get(name) is not None}
    if options.get("field_system") and "{system}" not in options.get("prompt_format", ""):
        del options["field_system"]  # axolotl reads it only for a prompt_format with {system}
    return {"format": "user_defined", **{name: value for name, value in options.items() if value != _default(name)}}


def _default(name: str) -> str:
    part, _, kind = name.partition("_")
    return kind if part == "field" else f"{{{part}}}"


def _user_defined_sft(kind: Mapping[str, Any], label: str) -> dict[str, Any]:
    """The system text and one of two formats, by whether the row has an input; ours have {prompt} for {instruction}."""
    given = {name: str(value) for name, value in kind.items() if value is not None}
    unknown = sorted(given.keys() - USER_DEFINED_SFT.keys())
    if unknown:
        raise UserError(f"{label}.{unknown[0]}: is not for sft; use {', '.join(USER_DEFINED_SFT)}")
    values = USER_DEFINED_SFT | given
    system = "{system}" if values["system_format"] else ""
    options = {"field_prompt": values["field_instruction"], "field_completion": values["field_output"],
               "field_input": values["field_input"],
               "prompt_format": system + values["no_input_format"].replace("{instruction}", "{prompt}"),
               "input_format": system + values["format"].replace("{instruction}", "{prompt}")}  # fmt: skip
    if system:
        options |= {"field_system": values["field_system"], "system_format": values["system_format"],
                    "default_system": values["system_prompt"]}  # fmt: skip
    changed = {name: value for name, value in options.items() if value != getattr(FormatOptions, name)}
    return {"format": "user_defined", **changed, "tokenise": "apart"}


# messages --------------------------------------------------------------------------------------------------------


def _messages_of(dataset: Mapping[str, Any], label: str, method: str) -> dict[str, Any]:
    """Column, keys and roles of messages."""
    found: dict[str, Any] = {}
    if dataset.get("field_messages") is not None:
        found["field_messages"] = str(dataset["field_messages"])
    mapping = dict(dataset.get("message_property_mappings") or {})
    for key, old in (("role", "message_field_role"), ("content", "message_field_content")):
        if dataset.get(old) is not None:
            if mapping.get(key, dataset[old]) != dataset[old]:
                raise UserError(f"{label}.{old}={dataset[old]}: message_property_mappings has {mapping[key]}; keep one")
            mapping[key] = dataset[old]
    for key, column in mapping.items():
        if key not in ("role", "content") and key != column:
            raise UserError(
                f"{label}.message_property_mappings.{key}={column}: only role and content are renamed; rename the key "
                "in the rows"
            )
    keys = (mapping.get("role", "role"), mapping.get("content", "content"))
    if keys == SHAREGPT and method != "sft":  # recognised, with the names of its roles, which SFT keeps as they are
        keys = ("role", "content")
    for name, key in zip(("role_key", "content_key"), keys, strict=True):
        if key != name.removesuffix("_key"):
            found[name] = key
    roles = _roles(dataset.get("roles"))
    if roles:
        found["roles"] = roles
    return found


def _roles(given: Mapping[str, Any] | None) -> dict[str, list[str]] | None:
    """Without names that stay as they are; None if there is no mapping."""
    if not given:
        return None
    named = {role: listed(names) for role, names in given.items()}
    return {role: names for role, names in named.items() if names not in ([], [role])}


def _check_fixed(dataset: Mapping[str, Any], label: str) -> None:
    """Columns and keys that have one name here."""
    for name, ours in (("field_tools", "tools"), ("field_thinking", "reasoning_content"),
                       ("template_thinking_key", "reasoning_content")):  # fmt: skip
        if dataset.get(name) not in (None, ours):
            raise UserError(f"{label}.{name}={dataset[name]}: is {ours} here; rename it in the rows")


# chat templates --------------------------------------------------------------------------------------------------


def fallback_note(name: str) -> str:
    return f"chat_template={name}: the tokenizer's own is used; if it has none, pass --chat-template"


def template_of(name: Any, jinja: Any) -> str | None:
    """--chat-template for chat_template and chat_template_jinja; None: the tokenizer's own."""
    if jinja is not None and name in (None, "jinja"):
        if "{" not in str(jinja) and not Path(str(jinja)).expanduser().is_file():
            raise UserError(f"chat_template_jinja={jinja}: is neither a template nor a file here; check the path")
        return str(jinja)
    if name is None or str(name).startswith(OWN_TEMPLATE):
        return None
    if name not in DELIMITERS:
        raise UserError(
            f"chat_template={name}: is not built in ({', '.join(DELIMITERS)}); use {OWN_TEMPLATE}, or "
            "chat_template_jinja: FILE.jinja"
        )
    return str(name)
