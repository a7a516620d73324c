"""One outage for people: the text before it, what was written meanwhile, and what became of that."""

from __future__ import annotations

from moa_bench.offline.measure import Trial
from moa_bench.transcript import MARKS, ROLLED_BACK, show_answer, show_tokens
from moa_runtime.session.events import Origin
from moa_runtime.tokenizer import ChatTokenizer


def show_trial(trial: Trial, tokenizer: ChatTokenizer) -> None:
    """Print one question to stderr: the answer up to the cut, every writer's text, and the target's own."""
    show_answer(trial.question, trial.answer.tokens, trial.answer.origins, tokenizer)
    for writer, written in trial.written.items():
        tokens, kept = written.text.tokens, written.kept
        if tokens:
            marks = [MARKS[Origin.OFFLINE]] * kept + [ROLLED_BACK] * (len(tokens) - kept)
            title = f"> written offline by {writer}, {kept} of {len(tokens)} tokens kept:"
            show_tokens(title, tokens, marks, tokenizer)
    own = trial.target.tokens
    show_tokens("> the target itself:", own, [MARKS[Origin.CORRECTED]] * len(own), tokenizer)
