"""Options of the formats user_defined, completion and chat_template.*: column names, format strings, tokenisation.

Column names may be nested: a.b is key b of the object in column a. Every --data entry can override the options.
"""

from __future__ import annotations

import string
from dataclasses import dataclass

from data.chat import ROLES
from data.errors import UserError
from data.hints import suggest


@dataclass(frozen=True, kw_only=True)
class FormatOptions:
    """Names of columns and keys, format strings, and how text becomes tokens."""

    field_prompt: str = "prompt"
    """Column of the prompt (user_defined)."""
    field_system: str = "system"
    """Column of the system text, for a prompt_format with {system} (user_defined)."""
    field_input: str = "input"
    """Column of a second input, for input_format (user_defined of sft)."""
    field_chosen: str = "chosen"
    """Column of the preferred response (user_defined, chat_template.*)."""
    field_rejected: str = "rejected"
    """Column of the dispreferred response (user_defined, chat_template.*)."""
    field_completion: str = "completion"
    """Column of the response of an unpaired row (user_defined)."""
    field_label: str = "label"
    """Column of the label of an unpaired response, true if desirable (user_defined)."""
    prompt_format: str = "{prompt}"
    """Format of the prompt, with {prompt} and {system}; double all other braces (user_defined)."""
    input_format: str = ""
    """Format of the prompt of rows with an input, with {prompt}, {input} and {system} (user_defined of sft)."""
    system_format: str = "{system}"
    """Format of a system text that is not empty, before it replaces {system} (user_defined of sft)."""
    default_system: str = ""
    """System text of rows without the column field_system (user_defined of sft)."""
    tokenise: str = "together"
    """together: prompt and completion as one text; apart: each alone, as in axolotl (user_defined of sft)."""
    chosen_format: str = "{chosen}"
    """Format of the preferred response (user_defined)."""
    rejected_format: str = "{rejected}"
    """Format of the dispreferred response (user_defined)."""
    completion_format: str = "{completion}"
    """Format of the response of an unpaired row (user_defined)."""
    field_text: str = "text"
    """Column of plain text (completion)."""
    long_text: str = "truncate"
    """Text longer than --max-length: truncate it, or split it into several rows (completion)."""
    field_messages: str = "messages"
    """Column of the conversation; for pairs, the turns before the responses (chat_template, sharegpt)."""
    system_message: str = "keep"
    """keep or drop the system message of a conversation (chat_template of sft)."""
    role_key: str = "role"
    """Message key of the role (chat_template.*, sharegpt)."""
    content_key: str = "content"
    """Message key of the text (chat_template.*, sharegpt)."""
    roles: str = ""
    """Role names in the data, e.g. user=human|person,assistant=gpt (chat_template.*, sharegpt)."""

    def __post_init__(self) -> None:
        for name in ("chosen", "rejected", "completion", "system"):
            self._check_format(name, {name}, name)
        self._check_format("prompt", {"prompt", "system"}, "prompt")
        if self.input_format:
            self._check_format("input", {"prompt", "input", "system"}, "prompt")
        for name in ("field_system", "system_format", "default_system"):
            value = getattr(self, name)
            if value != getattr(FormatOptions, name) and "{system}" not in self.prompt_format + self.input_format:
                raise UserError(f"format.{name}={value}: has no effect without {{system}} in format.prompt_format")
        if self.field_input != "input" and not self.input_format:
            raise UserError(f"format.field_input={self.field_input}: has no effect without format.input_format")
        for name, choices in (("tokenise", ("together", "apart")), ("long_text", ("truncate", "split")),
                              ("system_message", ("keep", "drop"))):  # fmt: skip
            if getattr(self, name) not in choices:
                raise UserError(f"format.{name}={getattr(self, name)}: must be {' or '.join(choices)}")
        unknown = sorted(set(self.role_names.values()) - set(ROLES))
        if unknown:
            raise UserError(f"format.roles={self.roles}: role {unknown[0]!r} is unknown; {suggest(unknown[0], ROLES)}")

    def _check_format(self, name: str, known: set[str], needed: str) -> None:
        value = getattr(self, f"{name}_format")
        try:
            names = {field for _, field, _, _ in string.Formatter().parse(value) if field is not None}
        except ValueError as error:
            raise UserError(f"format.{name}_format={value!r}: {error}; double literal braces") from None
        if names - known:
            unknown = min(names - known)
            raise UserError(
                f"format.{name}_format={value!r}: unknown name {{{unknown}}}; use {{{'}, {'.join(sorted(known))}}}"
            )
        if needed not in names:
            raise UserError(f"format.{name}_format={value!r}: {{{needed}}} is missing; add it")

    @property
    def role_names(self) -> dict[str, str]:
        """Mapping from names in the data to roles."""
        names: dict[str, str] = {}
        for part in filter(None, (piece.strip() for piece in self.roles.split(","))):
            role, equals, sources = (piece.strip() for piece in part.partition("="))
            if not equals or not sources:
                raise UserError(f"format.roles={self.roles}: {part!r} is not role=name, such as user=human")
            names |= {source.strip(): role for source in sources.split("|")}
        return names
