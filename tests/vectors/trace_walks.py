"""The random walks of the property tests, the same in every year and version of Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from moa_runtime.session.events import Policy
from unit.session.test_session_properties import KeepMachine, LossyMachine
from vectors.fixtures_draws import Draws

STEPS = 20
#: Rules that every walk has, so that it progresses.
_ALWAYS = {"deliver", "undisturbed_round", "draft", "reconnect"}
_SHARE = 0.6  # of the other rules, which a walk has


class AskMachine(LossyMachine):
    policy = Policy.ASK


KINDS: tuple[type[LossyMachine], ...] = (LossyMachine, KeepMachine, AskMachine)


#: Arguments of each rule, drawn as its strategies do.
ARGUMENTS: dict[str, Callable[[Draws], dict[str, Any]]] = {
    "draft": lambda draws: {"count": draws.whole(1, 12), "right": draws.flag(), "online": draws.flag()},
    "declare_offline": lambda draws: {"after": draws.whole(0, 12)},
    "undisturbed_round": lambda draws: {"most": draws.whole(0, 16)},
    "propose": lambda draws: {"most": draws.whole(0, 16)},
    "propose_tree": Draws.tree,
    "undisturbed_tree": Draws.tree,
    "resend": lambda draws: {},
    "grant_credit": lambda draws: {"ahead": draws.whole(1, 20)},
    "revoke_credit": lambda draws: {},
    "server_pushes_within_the_credit": lambda draws: {"drafted": draws.whole(0, 6)},
    "the_engine_fails": lambda draws: {},
    "deliver": Draws.queue,
    "drop": Draws.queue,
    "duplicate": Draws.queue,
    "split": lambda draws: draws.queue() | {"cut": draws.whole(1, 30)},
    "inject_noise": lambda draws: {
        "noise": bytes(draws.several(0, 40, lambda: draws.whole(0, 255))),
        "upward": draws.flag(),
    },
    "cut_link": lambda draws: {},
    "server_continues_alone": lambda draws: {"tokens": draws.whole(1, 40)},
    "reconnect": lambda draws: {},
    "server_restarts": lambda draws: {"trees": draws.flag()},
    "close_and_restore": lambda draws: {},
    "save": lambda draws: {},
    "crash_and_restore": lambda draws: {},
    "finish_and_ask_again": lambda draws: {"prompt": draws.prompt()},
    "cancel_and_ask_again": lambda draws: {"prompt": draws.prompt()},
    "rewind_and_ask_again": lambda draws: {"place": draws.whole(0, 95), "prompt": draws.prompt()},
    "keep": lambda draws: {"place": draws.whole(0, 95), "kept": draws.prompt()},
    "complete": lambda draws: {},
}


def preconditions(machine: LossyMachine, rule: str) -> bool:
    """Return whether a rule may be applied now."""
    needed = getattr(type(machine), rule).hypothesis_stateful_rule.preconditions
    return all(holds(machine) for holds in needed)


def walk(seed: int) -> None:
    """Do one walk: a conversation with random events that is finished at the end."""
    draws = Draws(seed)
    machine = KINDS[seed % len(KINDS)]()
    machine.begin(
        greeted=draws.flag(),
        max_new_tokens=draws.one_of([0, 5, 20, 40]),
        prompt=draws.prompt(6),
        trees=draws.share() < 0.75,
        while_away=draws.flag(),
    )
    rules = [rule for rule in ARGUMENTS if rule in _ALWAYS or draws.share() < _SHARE]
    for _ in range(STEPS):
        rule = draws.one_of(rules)
        arguments = ARGUMENTS[rule](draws)
        if preconditions(machine, rule):
            getattr(machine, rule)(**arguments)
            machine.committed_text_is_the_targets()
            machine.rows_belong_to_the_committed_tokens()
            machine.a_duplicate_never_truncates_the_server()
            machine.every_drafted_token_is_accounted_for()
    machine.teardown()
