"""The turns of a chat, and how many committed tokens each takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moa_runtime.errors import MoaError
from moa_runtime.sequences import common_length
from moa_runtime.tokenizer import ChatTokenizer, HistoryRewrittenError


@dataclass(frozen=True)
class Question:
    """A question in its conversation.

    Attributes:
        messages: the turns, the question included.
        kept: how many of the committed tokens stay.
        supplied: the tokens that follow them, at least one.
    """

    messages: list[dict[str, str]]
    kept: int
    supplied: list[int]

    @property
    def length(self) -> int:
        """Tokens up to the answer."""
        return self.kept + len(self.supplied)


class Conversation:
    """Turns as messages, ``{"role": ..., "content": ...}``.

    Answers keep the tokens that were committed: encoding their text anew could give others. So it is remembered
    where each answer ends; text that came from elsewhere is encoded.
    """

    def __init__(self, tokenizer: ChatTokenizer, system: str | None = None) -> None:
        self.messages: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []
        self._tokenizer = tokenizer
        self._ends = [(0, 0)]  # (turns, committed tokens that these take)

    @property
    def length(self) -> int:
        """Committed tokens that belong to the turns."""
        return self._ends[-1][1]

    @property
    def ends(self) -> list[tuple[int, int]]:
        """How many committed tokens so many turns take."""
        return list(self._ends)

    def resume(self, messages: Sequence[Mapping[str, str]], ends: Sequence[tuple[int, int]], committed: int) -> None:
        """Go on with the turns of another program, of whose tokens ``committed`` are left."""
        self.messages = [checked_turn(message) for message in messages]
        self._ends = [(0, 0), *(end for end in ends if 0 < end[1] <= committed)]

    def restore(self, messages: Sequence[Mapping[str, str]]) -> None:
        """Replace the turns.

        Raises:
            MoaError: a message that is not ``{"role": text, "content": text}``.
        """
        turns = [checked_turn(message) for message in messages]
        common = common_length(self.messages, turns)
        self._ends = [end for end in self._ends if end[0] <= common]
        self.messages = turns

    def ask(self, committed: Sequence[int], text: str) -> Question:
        """What to send for a question.

        Args:
            committed: the session's tokens, which may still hold turns that were replaced.

        Raises:
            ChatTemplateError: the template refuses the conversation.
            MoaError: what is no text.
        """
        messages = [*self.messages, checked_turn({"role": "user", "content": text})]
        turns, length = self._ends[-1]
        known = list(committed[:length])
        try:
            whole = known + self._tokenizer.continue_turns(known, messages[:turns], messages[turns:])
        except HistoryRewrittenError:
            whole = self._tokenizer.encode_chat(messages)
        kept = min(common_length(committed, whole), len(whole) - 1)
        return Question(messages, kept, whole[kept:])

    def answered(self, question: Question, text: str, length: int) -> None:
        """Add a question and its answer; ``length`` committed tokens hold the conversation up to its end."""
        self.messages = [*question.messages, {"role": "assistant", "content": text}]
        self._ends = [end for end in self._ends if end[1] <= question.kept]
        self._ends.append((len(self.messages), length))


def checked_turn(message: Mapping[str, str]) -> dict[str, str]:
    """A turn as a conversation has it.

    Raises:
        MoaError: it is not ``{"role": text, "content": text}``.
    """
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not isinstance(content, str):
        raise MoaError(f'a message must be {{"role": text, "content": text}}, not {dict(message)!r}')
    if any("\ud800" <= char <= "\udfff" for char in role + content):
        raise MoaError("a message must be text, without halves of characters (surrogates)")
    return {"role": role, "content": content}
