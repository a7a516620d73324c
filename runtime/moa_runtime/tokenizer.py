"""Text and tokens on the device: the bundle's tokenizer and its chat template, without transformers."""

from __future__ import annotations

import base64
import contextlib
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import groupby, takewhile
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from moa_runtime.bundle import Bundle
from moa_runtime.chat_template import ChatTemplate, ChatTemplateError, Message, Tool
from moa_runtime.checked_file import read_checked, read_checked_text
from moa_runtime.errors import MoaError, reason_of
from moa_runtime.reasoning import OPEN, ControlState, ControlTokens, Thought, split_reasoning

_LARGEST_TOKENIZER = 1 << 27
#: Characters of all replacements of a tokenizer, multiplied.
_MOST_GROWTH = 64
#: Instead of a chat template: the messages' texts one after the other.
_RAW = "{% for message in messages %}{{ message.content }}{% endfor %}"

#: Around the number of a special token that a user has typed. Unicode keeps these characters for internal use.
_GUARD_OPEN, _GUARD_CLOSE = "\ufdd0", "\ufdd1"
_GUARDED = re.compile(f"{_GUARD_OPEN}([0-9]+){_GUARD_CLOSE}")
#: A byte that is a token of its own.
_FALLBACK = re.compile("<0x([0-9A-F]{2})>")
#: The bytes of GPT-2's letters: printable ones are themselves, the others follow from 256 on.
_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_BYTES = {chr(byte): byte for byte in _PRINTABLE}
_BYTES |= {chr(256 + at): byte for at, byte in enumerate(sorted(set(range(256)).difference(_PRINTABLE)))}


class HistoryRewrittenError(ChatTemplateError):
    """The template renders earlier messages differently once others follow: some drop an answer's reasoning, Mistral's
    put the system message into the last question alone."""


class ChatTokenizer:
    """A tokenizer with its chat template. Any thread may use it.

    Args:
        tokenizer_file: a ``tokenizer.json`` of the tokenizers library.
        template: the chat template's source (Jinja, as in transformers). None for raw text: a message is its text
            alone, after the tokens that the tokenizer itself puts before a text.
        special_tokens: names that the template may use, such as ``{"bos_token": "<s>"}``.
        stop_tokens: ids that end the assistant's turn.

    Attributes:
        raw: whether there is no template.

    Raises:
        MoaError: the tokenizer file or the template cannot be read.
    """

    def __init__(
        self,
        tokenizer_file: Path,
        template: str | None,
        special_tokens: Mapping[str, str],
        stop_tokens: Collection[int],
    ) -> None:
        self._file = tokenizer_file
        self._tokenizer = self._read()
        self.raw = template is None
        self._template = ChatTemplate(_RAW if template is None else template, special_tokens)
        self.stop_tokens = frozenset(stop_tokens)

    @classmethod
    def from_bundle(cls, bundle: Bundle, *, raw: bool = False) -> ChatTokenizer:
        """Return the bundle's tokenizer, the same object for each call; ``raw`` without its template."""
        manifest = bundle.manifest
        return _of_bundle(
            bundle.tokenizer_path,
            manifest.fingerprints.tokenizer,
            None if raw else _source_of(bundle.chat_template_path),
            tuple(manifest.special_tokens.items()),
            manifest.stop_tokens,
        )

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included."""
        return int(self._tokenizer.get_vocab_size())

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        # As a batch it lets other threads run meanwhile, and computes no offsets.
        with self._failures():
            [encoded] = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(encoded.ids)

    def decode(
        self, tokens: Sequence[int], skip_special_tokens: bool = True, *, shown: Collection[int] = frozenset()
    ) -> str:
        """Return the text of ``tokens``; bytes that are no UTF-8 become replacement characters.

        Args:
            shown: special tokens that are not skipped, such as the marks of a tool call.
        """
        with self._failures():
            if not any(token in shown for token in tokens):
                return str(self._tokenizer.decode(list(tokens), skip_special_tokens=skip_special_tokens))
            runs = groupby(tokens, key=lambda token: token in shown)
            return "".join(self._tokenizer.decode(list(run), skip_special_tokens=not special) for special, run in runs)

    @property
    def template_source(self) -> str:
        """The chat template as Jinja."""
        return self._template.source

    def special_tokens(self, texts: Collection[str]) -> dict[str, int]:
        """Return the ids of those of ``texts`` that are special tokens."""
        found = {text: self._tokenizer.token_to_id(text) for text in self._specials if text in texts}
        return {text: token for text, token in found.items() if token is not None}

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of a token in the middle of a text, perhaps of a part of a character."""
        written = str(self._tokenizer.id_to_token(token) or "")
        if token in self._added:
            return written.encode()
        if fallback := _FALLBACK.fullmatch(written):
            return bytes.fromhex(fallback[1])
        if self._by_bytes and all(letter in _BYTES for letter in written):
            return bytes(_BYTES[letter] for letter in written)
        return self.decode([*self._letter, token])[len(self.decode(self._letter)) :].encode()

    @cached_property
    def control_tokens(self) -> ControlTokens:
        """The control tokens of answers; none without a template."""
        added = self._tokenizer.get_added_tokens_decoder().items()
        special = {token.content: number for number, token in added if token.special and not self.raw}
        return ControlTokens(special, lambda token: self.decode([token]))

    @property
    def knows_thinking(self) -> bool:
        """Whether the template can switch reasoning on and off."""
        return self._template.knows_thinking

    def begins_reasoning(self, thinking: bool | None = None) -> bool:
        """Return whether the prompt ends with the mark that opens reasoning, so that answers begin inside."""
        try:
            prompt = self.render_chat([{"role": "user", "content": "?"}], thinking=thinking)
        except ChatTemplateError:
            return False
        return prompt.rstrip().endswith(OPEN)

    def thought(self, thinking: bool | None = None) -> Thought:
        """Return whether answers have reasoning between Qwen 3's marks, as far as the template shows that."""
        if self.begins_reasoning(thinking):
            return "begun"
        return "may" if OPEN in self.template_source and thinking is not False else ""

    def render_chat(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        *,
        thinking: bool | None = None,
        tools: Sequence[Tool] | None = None,
    ) -> str:
        """Return the text of a conversation, see :meth:`moa_runtime.chat_template.ChatTemplate.render`."""
        return self._template.render(messages, add_generation_prompt, thinking=thinking, tools=tools)

    def encode_chat(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        *,
        thinking: bool | None = None,
        tools: Sequence[Tool] | None = None,
    ) -> list[int]:
        """Return the tokens of a conversation, as transformers' ``apply_chat_template`` does, but a special token in a
        message stays the text that the user typed."""
        text = self.render_chat(
            self._guard(messages), add_generation_prompt, thinking=thinking, tools=self._guard_texts(tools)
        )
        tokens = self._encode_guarded(text)
        return [*self._text_beginning, *tokens] if self.raw else tokens

    def continue_chat(self, committed: Sequence[int], history: Sequence[Message], text: str) -> list[int]:
        """Return the tokens that follow ``committed`` to ask ``text``; see :meth:`continue_turns`."""
        return self.continue_turns(committed, history, [{"role": "user", "content": text}])

    def continue_turns(
        self,
        committed: Sequence[int],
        history: Sequence[Message],
        turns: Sequence[Message],
        *,
        thinking: bool | None = None,
        tools: Sequence[Tool] | None = None,
    ) -> list[int]:
        """Return the tokens that follow ``committed`` up to the next answer, generation prompt included.

        The committed tokens stay as they are, even if encoding the last answer's text again would give other tokens. If
        it was cut off, its end-of-turn token comes first.

        Example (ChatML): after ``...<|im_end|>`` comes a newline, then ``<|im_start|>user`` and so on.

        Args:
            committed: the conversation's tokens so far; empty for a new one.
            history: its messages, the last one the assistant's; before the first question perhaps a system message.
            turns: the messages that follow, the last one the user's or a tool's.
            thinking, tools: see :meth:`moa_runtime.chat_template.ChatTemplate.render`.

        Raises:
            HistoryRewrittenError: the conversation cannot be continued token by token.
            ChatTemplateError: the template refuses the messages.
        """
        if not committed:
            return self.encode_chat([*history, *turns], thinking=thinking, tools=tools)
        options: dict[str, Any] = {"thinking": thinking, "tools": self._guard_texts(tools)}
        # The committed tokens began as this.
        asked = self.render_chat(self._guard(history[:-1]), **options)
        before = self.render_chat(self._guard(history), add_generation_prompt=False, **options)
        after = self.render_chat(self._guard([*history, *turns]), **options)
        end_text, cut = self._last_stop(before)
        if not after.startswith(asked) or not after.startswith(before[:cut]):
            text = "the chat template changes earlier messages when a new one follows; start a new conversation"
            raise HistoryRewrittenError(text, code="history_rewritten")
        # Encoded after the end-of-turn token, because some tokenizers treat the start of a text specially.
        end = self.encode(end_text)
        tokens = self._encode_guarded(end_text + after[cut:])[len(end) :]
        return tokens if committed[-1] in self.stop_tokens else [*end, *tokens]

    @cached_property
    def _text_beginning(self) -> list[int]:
        """Tokens that the tokenizer itself puts before a text."""
        with self._failures():
            encoded = self._tokenizer.encode("a", add_special_tokens=True)
        marked = zip(encoded.ids, encoded.special_tokens_mask, strict=True)
        return [token for token, _ in takewhile(lambda each: each[1], marked)]

    @cached_property
    def _added(self) -> frozenset[int]:
        return frozenset(self._tokenizer.get_added_tokens_decoder())

    @cached_property
    def _by_bytes(self) -> bool:
        """Whether a token's letters are its bytes, as in GPT-2."""
        decoder = self._tokenizer.decoder
        parts = [] if decoder is None else _parts_of(json.loads(decoder.__getstate__()))
        return any(part.get("type") == "ByteLevel" for part in parts)

    @cached_property
    def _letter(self) -> list[int]:
        """A text before a token, whose space a decoder would drop at the beginning."""
        return self.encode("a")

    # -- special tokens typed by a user --------------------------------------------------------

    @cached_property
    def _specials(self) -> list[str]:
        added = self._tokenizer.get_added_tokens_decoder().values()
        # Longest first, so that one that begins another does not match in its place.
        return sorted((token.content for token in added if token.special), key=len, reverse=True)

    @cached_property
    def _special(self) -> re.Pattern[str]:
        """Any special token, as a group, so that splitting keeps it; matches nothing without special tokens."""
        return re.compile(f"({'|'.join(map(re.escape, self._specials)) or '(?!)'})")

    @cached_property
    def _guarded(self) -> list[str]:
        """Texts that are guarded in a message: special tokens, and the placeholders' own characters."""
        return [*self._specials, _GUARD_OPEN, _GUARD_CLOSE]

    @cached_property
    def _to_guard(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, self._guarded)))

    @cached_property
    def _plain(self) -> Tokenizer:
        """The same tokenizer without special tokens; rarely needed, so read only then."""
        plain = self._read()
        plain.encode_special_tokens = True
        return plain

    def _guard(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages with a placeholder for each of :attr:`_guarded` in their texts. Reasoning that control
        tokens mark is left out: templates know it by these tokens alone, and drop it."""

        def content(message: Message) -> str:
            drops = self.control_tokens and message["role"] == "assistant"
            return split_reasoning(message["content"]).answer if drops else message["content"]

        return [self._guard_texts({**message, "content": content(message)}) for message in messages]

    def _guard_texts(self, value: Any) -> Any:
        """Return a JSON value with a placeholder for each of :attr:`_guarded` in its texts."""

        def placeholder(match: re.Match[str]) -> str:
            return f"{_GUARD_OPEN}{self._guarded.index(match[0])}{_GUARD_CLOSE}"

        if isinstance(value, str):
            return self._to_guard.sub(placeholder, value)
        if isinstance(value, Mapping):
            return {self._guard_texts(name): self._guard_texts(part) for name, part in value.items()}
        return [self._guard_texts(part) for part in value] if isinstance(value, list | tuple) else value

    def _encode_guarded(self, text: str) -> list[int]:
        """Encode a rendered conversation, with placeholders turned back into plain text."""
        if _GUARD_OPEN not in text:
            return self.encode(text)
        tokens: list[int] = []
        ordinary = ""
        for piece in self._special.split(text):
            restored = _GUARDED.sub(lambda match: self._guarded[int(match[1])], piece)
            if restored == piece:
                ordinary += piece
                continue
            tokens += self.encode(ordinary)
            with self._failures():
                tokens += self._plain.encode(restored, add_special_tokens=False).ids
            ordinary = ""
        return tokens + self.encode(ordinary)

    def _read(self) -> Tokenizer:
        return read_tokenizer(self._file)

    @contextlib.contextmanager
    def _failures(self) -> Iterator[None]:
        """Turn errors of the tokenizers library into a MoaError; those of its Rust code are no Exception."""
        try:
            yield
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            raise MoaError(f"the tokenizer {self._file} fails: {error}", code="tokenizer_failed") from error

    def _last_stop(self, text: str) -> tuple[str, int]:
        """Return the last end-of-turn token in ``text`` and the offset after it; without one, the end of the text."""
        pieces = [str(self._tokenizer.id_to_token(token) or "") for token in self.stop_tokens]
        found = [(text.rfind(piece), piece) for piece in pieces if piece and piece in text]
        start, piece = max(found, default=(len(text), ""))
        return piece, start + len(piece)


def read_tokenizer(file: Path) -> Tokenizer:
    """Read a ``tokenizer.json``, which neither pads nor truncates then. Raises MoaError (``unreadable``)."""
    try:
        content = read_checked(file, _LARGEST_TOKENIZER)
        _check_tables(content)
        tokenizer = Tokenizer.from_buffer(content)
        tokenizer.no_padding()  # to any length
        tokenizer.no_truncation()
        _check_growth(tokenizer)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library raises bare Exception, and its Rust code what is none
        reason = reason_of(error) if isinstance(error, OSError) else error
        raise MoaError(f"cannot read the tokenizer {file}: {reason}", code="unreadable") from error
    return tokenizer


def _check_tables(content: bytes) -> None:
    """Raise ValueError for tables of a normalizer (``Precompiled``) whose length is wrong: the library would end the
    process, as it cannot allocate it."""
    # Letters are not escaped in files of the library: those that are may spell the name.
    if b"precompiled_charsmap" not in content and not re.search(rb"\\u00[4-7]", content):
        return
    for part in _parts_of(json.loads(content)):
        if (table := part.get("precompiled_charsmap")) is not None:
            data = base64.b64decode(table, validate=True)
            if int.from_bytes(data[:4], "little") > len(data) - 4:
                raise ValueError("its precompiled_charsmap is cut")


def _check_growth(tokenizer: Tokenizer) -> None:
    """Raise ValueError if the replacements of a tokenizer, one after the other, could make a text much longer."""
    growth = 1
    for step in (tokenizer.normalizer, tokenizer.pre_tokenizer, tokenizer.decoder):
        for part in _parts_of(json.loads(step.__getstate__())) if step is not None else ():
            growth *= max(1, len(str(part.get("content", ""))), len(str(part.get("prepend", ""))))
            if growth > _MOST_GROWTH:
                raise ValueError("its replacements are too long")


def _parts_of(value: Any) -> Iterator[dict[str, Any]]:
    """Yield all objects in parsed JSON."""
    found = [value]
    while found:
        each = found.pop()
        if isinstance(each, dict):
            yield each
        found += each.values() if isinstance(each, dict) else each if isinstance(each, list) else ()


def _source_of(template: Path) -> str:
    try:
        return read_checked_text(template)
    except (OSError, UnicodeDecodeError) as error:
        text = f"the chat template {template} cannot be read: export the bundle again"
        raise ChatTemplateError(text, code="unreadable") from error


@lru_cache(maxsize=4)
def _of_bundle(
    tokenizer_file: Path,
    fingerprint: str,  # of the file, which may have been replaced
    template: str | None,
    special_tokens: tuple[tuple[str, str], ...],
    stop_tokens: tuple[int, ...],
) -> ChatTokenizer:
    return ChatTokenizer(tokenizer_file, template, dict(special_tokens), stop_tokens)


_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
#: Longer runs of replacement characters are the model's own noise, not a character still to come.
_NOISE = 8


class TextStream:
    """Decode a growing list of tokens piece by piece, without ever emitting half a character.

    Example: a character whose UTF-8 bytes are spread over two tokens comes with the second: the tokens ``Caf``,
    ``0xC3``, ``0xA9`` give ``"Caf"``, ``""``, ``"é"``.

    Args:
        behind: tokens of a text that they continue. By default they begin a text, whose leading space some decoders
            drop.
        shown: see :meth:`ChatTokenizer.decode`.
    """

    def __init__(
        self, tokenizer: ChatTokenizer, behind: Sequence[int] = (), shown: Collection[int] = frozenset()
    ) -> None:
        self._tokenizer, self._shown = tokenizer, shown
        self._tokens = list(behind)
        self._lead = len(behind)
        # The text up to token `_anchor` was emitted. Decoding starts at `_window` before it, because decoders treat the
        # first token's leading space specially, and not at 0, which would take quadratic time.
        self._window = 0
        self._anchor = len(behind)
        self._emitted = 0  # characters after the anchor that were emitted
        self._control = ControlState()
        self._states: list[tuple[int, int, int, ControlState]] = []  # these four before each token

    def push(self, token: int) -> str:
        """Add one token; return the text that is certain now, perhaps none."""
        self._states.append((self._window, self._anchor, self._emitted, self._control))
        self._control, instead = self._tokenizer.control_tokens.step(self._control, token)
        if instead is not None:
            piece = self.finish() + instead
            self._tokens.append(token)
            self._window = self._anchor = len(self._tokens)
            self._emitted = 0
            return piece
        self._tokens.append(token)
        pending = self._pending()
        whole = pending.rstrip(_REPLACEMENT)
        if 0 < len(pending) - len(whole) <= _NOISE:
            piece = whole[self._emitted :]
            self._emitted += len(piece)
        else:
            piece = pending[self._emitted :]
            self._window, self._anchor, self._emitted = self._anchor, len(self._tokens), 0
        return piece

    def finish(self) -> str:
        """Return the text held back; an incomplete character becomes a replacement character."""
        return self._pending()[self._emitted :]

    def truncate(self, count: int) -> None:
        """Forget all but the first ``count`` tokens."""
        if count < len(self._states):
            self._window, self._anchor, self._emitted, self._control = self._states[count]
            del self._tokens[self._lead + count :], self._states[count:]

    def _pending(self) -> str:
        known = self._tokenizer.decode(self._tokens[self._window : self._anchor], shown=self._shown)
        return self._tokenizer.decode(self._tokens[self._window :], shown=self._shown)[len(known) :]
