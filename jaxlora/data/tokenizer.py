"""Loads the tokenizer of a Hugging Face model without transformers."""

import contextlib
import copy
import datetime
import functools
import hashlib
import itertools
import json
import logging
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tokenizers
from jaxtyping import Int, Int32

from jaxlora.common.json_file import shown
from jaxlora.common.rust import wrap_errors, wrap_panics
from jaxlora.data.templates.chat import ModelChat
from jaxlora.data.templates.known import find_template
from jaxlora.data.tokenizer_files import read_tokenizer_files
from jaxlora.errors import ModelError

_log = logging.getLogger(__name__)


class Encoded(NamedTuple):
    """Token ids of a text, and where each token lies in it.

    Attributes:
        ids: Token ids, without the special tokens that go around a text.
        spans: For each token, the index of its first character and of the one after its
            last. Spaces belong to the token that they are part of. If a character takes
            several tokens, they all have its span.
    """

    ids: Int32[np.ndarray, " T"]
    spans: Int32[np.ndarray, "T 2"]


class Tokenizer:
    """A tokenizer, with the model's chat template.

    As in transformers 5, only the post-processor of tokenizer.json decides which
    special tokens go around a text. `add_bos_token` and `add_eos_token` of
    tokenizer_config.json have no effect, and a contradiction is logged as a warning.
    As in transformers, special tokens that are spelled out in a text are encoded as
    special tokens.

    Attributes:
        bos_token, eos_token, pad_token: Their texts, or None.
        bos_id, eos_id, pad_id: Their ids, or None.
        prefix_ids: Ids before a text that is encoded with special tokens.
        suffix_ids: Ids after such a text.
        vocab_size: Largest token id + 1, added tokens included.
        chat: The chat template.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: dict[str, str],
        template: str | dict[str, str] | None = None,
        *,
        source: str = "tokenizer",
        now: datetime.datetime | None = None,
    ):
        """Wraps `backend` and changes it; most callers use `load_tokenizer`.

        Args:
            backend: The tokenizer; its post-processor, truncation and padding are
                removed.
            special_tokens: Text of each special token, by `bos_token`, `eos_token`, ...
            template: The chat template, or several by name.
            source: Where the tokenizer came from, for errors.
            now: Time that chat templates see; None: the time of this call. It is fixed,
                so that the same records give the same tokens throughout a run.
        """
        self._backend = backend
        self._special_tokens = special_tokens
        self._source = source
        self.chat = ModelChat(
            template, special_tokens, source=source, now=now or datetime.datetime.now()
        )
        self.bos_token = special_tokens.get("bos_token")
        self.eos_token = special_tokens.get("eos_token")
        self.pad_token = special_tokens.get("pad_token")
        self.bos_id = self._required_id("bos_token")
        self.eos_id = self._required_id("eos_token")
        self.pad_id = backend.token_to_id(self.pad_token) if self.pad_token else None
        ids = backend.get_vocab(with_added_tokens=True).values()
        self.vocab_size = 1 + max(ids, default=-1)
        if not 0 < self.vocab_size <= 2**31:
            raise ModelError(
                f"{source}: the largest token id of tokenizer.json is "
                f"{self.vocab_size - 1}; expected a 32-bit integer, and at least one "
                "token. Fetch the file again."
            )
        backend.no_truncation()
        backend.no_padding()
        self.prefix_ids, self.suffix_ids = _take_off_post_processor(backend)

    def with_chat_template(
        self, template: str | dict[str, str], source: str
    ) -> "Tokenizer":
        """Returns the tokenizer with another chat template.

        Args:
            template: The template, or several by name.
            source: Where it comes from, for errors.
        """
        other = copy.copy(self)
        other.__dict__.pop("fingerprint", None)  # it depends on the template
        other.chat = ModelChat(
            template, self._special_tokens, source=source, now=self.chat.now
        )
        return other

    def with_setting(
        self,
        chat_template: str | None,
        kwargs: Mapping[str, Any] = types.MappingProxyType({}),
    ) -> "Tokenizer":
        """Returns the tokenizer with the template of the setting `chat_template`.

        Args:
            chat_template: See `find_template`; None: the tokenizer's own.
            kwargs: The setting `chat_template_kwargs`.

        Raises:
            DataError: There is no such template.
        """
        found = self
        if chat_template is not None:
            first, *_ = chat_template.splitlines()
            source = f"chat_template {first[: 80 if '{' in first else None]!r}"
            found = self.with_chat_template(find_template(chat_template), source)
        if kwargs:
            found = copy.copy(found)
            found.__dict__.pop("fingerprint", None)  # it depends on these
            found.chat = found.chat.with_kwargs(kwargs)
        return found

    @functools.cached_property
    def fingerprint(self) -> str:
        """A hash of everything that the tokens of texts and chats depend on."""
        digest = hashlib.sha256(self._backend.to_str().encode())
        around = [self.prefix_ids, self.suffix_ids, self.eos_id]
        digest.update(json.dumps(around).encode())
        digest.update(self.chat.fingerprint.encode())
        return digest.hexdigest()

    def _required_id(self, key: str) -> int | None:
        text = self._special_tokens.get(key)
        token_id = None if text is None else self._backend.token_to_id(text)
        if text is not None and token_id is None:
            raise ModelError(
                f"{self._source}: {key} is {shown(text)}, which is not in "
                f"tokenizer.json. Correct {key} in tokenizer_config.json, or save the "
                "tokenizer again with transformers."
            )
        return token_id

    def token_id(self, text: str) -> int | None:
        """Returns the id of a token by its text; None if there is none."""
        return self._backend.token_to_id(text)

    def num_given(self, ids: Sequence[int] | Int[np.ndarray, " T"]) -> int:
        """Counts the first ids of a text that are `prefix_ids`, spelled out in it.

        A text that was rendered before may begin with them, and needs no others.

        Args:
            ids: Ids of the text, or of its first part, without special tokens.
        """
        num = len(self.prefix_ids)
        is_given = len(ids) >= num and tuple(map(int, ids[:num])) == self.prefix_ids
        return num if is_given else 0

    def has_end(self, text: str) -> bool:
        """Whether a text ends with a special token, apart from spaces after it.

        Such a text was rendered before: its last turn, or the text itself, has an end.
        """
        return bool(self._ends) and text.rstrip().endswith(self._ends)

    @functools.cached_property
    def _ends(self) -> tuple[str, ...]:
        """Texts of the special tokens that may end a text."""
        added = self._backend.get_added_tokens_decoder().values()
        ends = {token.content for token in added if token.special}
        keys = ("bos_token", "pad_token", "unk_token", "mask_token")
        ends -= {self._special_tokens.get(key) for key in keys}
        return tuple(ends | ({self.eos_token} if self.eos_token else set()))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Encodes `text`, by default with the tokenizer's special tokens around it."""
        with self._wrap_panics():
            ids = self._backend.encode(text, add_special_tokens=False).ids
        if add_special_tokens:
            return [*self.prefix_ids, *ids, *self.suffix_ids]
        return ids

    def encode_ids(self, texts: Sequence[str]) -> list[Int32[np.ndarray, " T"]]:
        """Encodes many texts to ids; faster than `encode_batch`, which also has spans.

        The ids are the same. No special tokens are added.
        """
        texts = list(texts)
        with self._wrap_panics():
            encodings = self._backend.encode_batch_fast(texts, add_special_tokens=False)
        parts = [encoding.ids for encoding in encodings]
        flat = np.fromiter(itertools.chain.from_iterable(parts), np.int32)
        ends = itertools.accumulate(map(len, parts), initial=0)
        return [flat[start:end] for start, end in itertools.pairwise(ends)]

    def encode_batch(self, texts: Sequence[str]) -> list[Encoded]:
        """Encodes many texts at once, without special tokens around them."""
        texts = list(texts)
        with self._wrap_panics():
            encodings = self._backend.encode_batch(texts, add_special_tokens=False)
        # One array holds all texts, because an array for each text would be slow.
        flat = itertools.chain.from_iterable
        ids = np.fromiter(flat(e.ids for e in encodings), np.int32)
        places = np.fromiter(flat(flat(e.offsets for e in encodings)), np.int32)
        spans = places.reshape(-1, 2)
        ends = itertools.accumulate(map(len, encodings), initial=0)
        return [
            Encoded(ids[start:end], spans[start:end])
            for start, end in itertools.pairwise(ends)
        ]

    def decode(
        self,
        ids: Sequence[int] | Int[np.ndarray, " T"],
        *,
        skip_special_tokens: bool = False,
    ) -> str:
        """Decodes token ids to text."""
        numbers = [int(i) for i in ids]
        with self._wrap_panics():
            return self._backend.decode(
                numbers, skip_special_tokens=skip_special_tokens
            )

    def _wrap_panics(self) -> contextlib.AbstractContextManager[None]:
        cure = "The file is damaged, or lacks an unknown token: fetch it again."
        return wrap_panics(f"{self._source}: its tokenizer.json", cure, ModelError)

    def check_fits(self, vocab_size: int) -> None:
        """Checks that a model with `vocab_size` embeddings has one for every token.

        Raises:
            ModelError: The tokenizer has ids that the model has no embeddings for.
        """
        if self.vocab_size > vocab_size:
            last = self._backend.id_to_token(self.vocab_size - 1)
            raise ModelError(
                f"{self._source}: the tokenizer's largest token id is "
                f"{self.vocab_size - 1} ({last!r}), but the model has only "
                f"{vocab_size} embeddings. Use the model's own tokenizer, or remove "
                "the added tokens from tokenizer.json."
            )


def load_tokenizer(
    folder: str | Path, *, now: datetime.datetime | None = None
) -> Tokenizer:
    """Reads the tokenizer of a Hugging Face model folder.

    Special tokens come from tokenizer_config.json. If it is of the old kind, without
    `added_tokens_decoder`, special_tokens_map.json overrides it. A missing
    end-of-sequence token is taken from generation_config.json or config.json. The chat
    template is chat_template.jinja, else `chat_template` of tokenizer_config.json.

    Args:
        folder: Folder with tokenizer.json.
        now: Time that chat templates see; None: the time of this call.

    Raises:
        ModelError: tokenizer.json is missing, or a file is damaged.
    """
    folder = Path(folder)
    cure = "Fetch the file again (it may be a git-lfs pointer), or save it with "
    where = str(folder / "tokenizer.json")
    with wrap_errors(where, f"{cure}transformers.", ModelError):
        return _load(folder, now)


def _load(folder: Path, now: datetime.datetime | None) -> Tokenizer:
    files = read_tokenizer_files(folder)
    tokenizer = Tokenizer(
        files.backend, files.special_tokens, files.template, source=str(folder), now=now
    )
    _warn_of_contradiction(tokenizer, files.config, folder)
    return tokenizer


def _take_off_post_processor(backend) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Removes the post-processor; returns the ids that it puts before and after texts.

    Byte-level post-processors trim spaces from the spans of tokens. Without one, spans
    keep their spaces.
    """
    encoding = backend.encode("a", add_special_tokens=True)
    whole, mask = encoding.ids, encoding.special_tokens_mask
    backend.post_processor = None
    inner = backend.encode("a", add_special_tokens=False).ids
    start = mask.index(0) if 0 in mask else len(mask)
    end = start + mask.count(0)
    if whole[start:end] != inner:
        raise ModelError(
            f"the post-processor of tokenizer.json turns {inner} into {whole}, but "
            "must put special tokens around a text and do nothing else. Use a "
            "TemplateProcessing."
        )
    return tuple(whole[:start]), tuple(whole[end:])


def _warn_of_contradiction(tokenizer: Tokenizer, config: dict, folder: Path) -> None:
    for name, around in (
        ("bos", tokenizer.prefix_ids),
        ("eos", tokenizer.suffix_ids),
    ):
        wanted = config.get(f"add_{name}_token")
        if isinstance(wanted, bool) and wanted != bool(around):
            _log.warning(
                "%s: add_%s_token=%s in tokenizer_config.json has no effect: the "
                "post-processor of tokenizer.json decides, and it adds %s.",
                folder,
                name,
                wanted,
                list(around) or "none",
            )
