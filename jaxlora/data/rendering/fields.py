"""Templates over the fields of records, and warnings about fields that are not used."""

from collections.abc import Iterable, Sequence

from jaxlora.data.formats.format import as_text, found, is_template
from jaxlora.data.records.files import Record
from jaxlora.data.records.messages import Conversation
from jaxlora.data.records.notes import Notes
from jaxlora.data.records.preference import find_number_label
from jaxlora.data.templates.chat import ModelChat
from jaxlora.data.templates.template import Answer, Failure, run_task
from jaxlora.data.templates.template_task import Payload, Task
from jaxlora.errors import DataError

# Settings that may be a template over fields.
TEMPLATES = ("prompt", "completion", "text", "chosen", "rejected", "system")
# Fields whose text is the system message in common formats.
_SYSTEM_FIELDS = ("system", "system_prompt", "system_message")
# Fields that change the meaning of a record in common formats.
_SIGNIFICANT_FIELDS = frozenset(
    (
        "tools",
        "functions",
        *_SYSTEM_FIELDS,
        "history",
        "weight",
        "images",
        "image",
        "videos",
        "video",
        "audios",
        "audio",
        "documents",
        "chat_template_kwargs",
    )
)

# Keys that change the meaning of a message, if the chat template reads them.
_SIGNIFICANT_KEYS = (
    "reasoning_content",
    "reasoning",
    "reasoning_text",
    "thinking",
    "thinking_content",
    "thought",
    "thoughts",
    "images",
    "train",
    "training",
    "train_on",
    "train_on_turn",
    "loss",
    "mask",
)
_NOTHING = (None, "", [], {})
# How fields are used that are not.
_CURES = {
    name: f" Set data.system to {name} if it holds system messages of chats."
    for name in _SYSTEM_FIELDS
}

_LABEL_CURE = " Set the job's objective to kto if it says which answers are good."

# Roles that are as the user expects: `assistant` is trained on, the others are not.
_KNOWN_ROLES = frozenset(
    ("system", "developer", "user", "assistant", "tool", "function")
)


def check_template(source: str) -> None:
    """Checks that a template over fields parses; names of fields always do.

    Raises:
        DataError: It does not.
    """
    if not is_template(source):
        return
    (answer,) = run_task(Task(source), [Payload("names")])
    if isinstance(answer, Failure):
        raise DataError(
            f"the template {source!r} does not parse ({answer.why}). Correct the "
            "template."
        )


def _names(source: str) -> Iterable[str]:
    """Returns the fields that a setting reads; none if a template does not parse."""
    if not is_template(source):
        return [source]
    (answer,) = run_task(Task(source), [Payload("names")])
    return [] if isinstance(answer, Failure) else answer["names"]


class FieldTemplates:
    """Renders the templates over fields that settings have in place of a field's name.

    The text of a template becomes a field of the record, under the template as its
    name, so that formats read it as any other field.

    Attributes:
        sources: The fields that each template reads.
    """

    def __init__(self, sources: Iterable[str]):
        self.sources = {one: set(_names(one)) for one in sources if is_template(one)}

    def render(self, records: Sequence[Record]) -> list[tuple[Record, list[Answer]]]:
        """Renders the templates, which returns an answer for each of them."""
        answers = []
        for source, names in self.sources.items():
            fields = [{k: v for k, v in one.items() if k in names} for one in records]
            answers.append(run_task(Task(source), [Payload("text", f) for f in fields]))
        return [
            (record, [of_all[i] for of_all in answers])
            for i, record in enumerate(records)
        ]

    def filled(self, rendered: tuple[Record, list[Answer]]) -> Record:
        """Returns a record with the texts of templates.

        Raises:
            DataError: A template failed.
        """
        record, answers = rendered
        texts = {
            source: self._text(source, answer, record)
            for source, answer in zip(self.sources, answers, strict=True)
        }
        return record | texts

    def _text(self, source: str, answer: Answer, record: Record) -> str:
        if not isinstance(answer, Failure):
            return as_text(answer["text"], source)
        if answer.kind == "limit":
            raise DataError(
                f"the template {source!r} exceeds a limit: {answer.why}. Shorten the "
                "record or simplify the template."
            )
        where = "does not parse" if answer.kind == "syntax" else "failed"
        raise DataError(
            f"the template {source!r} {where} ({answer.why}; fields found: "
            f"{found(record)}). Correct the template."
        )


class UnusedFields:
    """Warns once about each field or role without effect that should have one."""

    def __init__(
        self, notes: Notes, sources: Iterable[str], chat: ModelChat | None, loss_on: str
    ):
        """Makes an object.

        Args:
            notes: Gets the warnings.
            sources: The fields that are used, and templates over fields.
            chat: The template of chats, if there are chats.
            loss_on: The setting of this name.
        """
        self._notes = notes
        self._used = {name for source in sources for name in _names(source)}
        self._keys: list[str] = []
        self._trains_one_role = False
        if chat is not None:
            self._keys = [key for key in _SIGNIFICANT_KEYS if not chat.mentions(key)]
            # A template with {% generation %} itself says what is trained on.
            is_marked = chat.mentions("endgeneration")
            self._trains_one_role = loss_on != "all" and not is_marked

    def check_fields(self, records: Iterable[Record]) -> None:
        """Warns about unused fields of records."""
        candidates = _SIGNIFICANT_FIELDS - self._used
        for record in records:
            for name in candidates & record.keys():
                if record[name] not in _NOTHING:
                    self._name(f"the field {name!r}", _CURES.get(name, ""))
            if (label := find_number_label(record)) and label not in self._used:
                self._name(f"the field {label!r}", _LABEL_CURE)

    def check_messages(self, conversations: Iterable[Conversation]) -> None:
        """Warns about keys and roles of messages."""
        for message in (one for chat in conversations for one in chat.messages):
            for key in self._keys:
                if message.get(key) not in _NOTHING:
                    self._name(f"the key {key!r} of messages")
            if self._trains_one_role and message["role"] not in _KNOWN_ROLES:
                self._notes.add_once(
                    f"messages with the role {message['role']!r:.80} are not "
                    "trained on. If they are the assistant's, set data.roles to "
                    f"{{{message['role']:.80}: assistant}}."
                )

    def _name(self, what: str, cure: str = "") -> None:
        self._notes.add_once(
            f"{what} is not used, because neither the chat template nor the configured "
            f"fields refer to it.{cure}"
        )
