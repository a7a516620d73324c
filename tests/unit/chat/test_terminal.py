"""The dialogue of ``moa-chat --terminal`` with a chat that plays scripts."""

from __future__ import annotations

import contextlib
import io
import json
import signal
import sys
from types import SimpleNamespace
from unittest import mock

import pytest

from moa_chat import strings
from moa_chat.loop_thread import LoopThread, RunningAnswer
from moa_chat.terminal.answer_state import AnswerState, Palette, ending, figures, status_line, summary
from moa_chat.terminal.app import Terminal, run_terminal
from moa_chat.terminal.input import Keyboard
from moa_chat.terminal.renderer import LiveView, PlainView, Span
from moa_runtime.chat import ChatError
from moa_runtime.chat_store import StoreError
from moa_runtime.conversation import Unconfirmed
from moa_runtime.events import Disagreement, FinishReason, LinkChanged, LinkStatus, Paused, PauseReason, Statistics
from moa_runtime.session.events import Sampling
from moa_runtime.transport import ConnectError
from support.chat.ansi_screen import AnsiScreen
from support.chat.fake_chat import HANG, FakeChat, FakeChatConfig, finished, update

FIRST, SECOND = Unconfirmed(1, Sampling(), 8), Unconfirmed(3, Sampling(), 8)
OFFLINE = LinkChanged(LinkStatus.OFFLINE)
CTRL_C_TWICE = KeyboardInterrupt(), KeyboardInterrupt()


class Lines:
    """Lines that the user types; exceptions are raised as ``input`` would."""

    def __init__(self, *lines) -> None:
        self._lines = list(lines)
        self.prompts: list[str] = []

    def __call__(self, prompt: str, begun: str = "") -> str:
        self.prompts.append(prompt + begun)
        line = self._lines.pop(0) if self._lines else EOFError()
        if isinstance(line, BaseException):
            raise line
        return line


def talk(chat, lines, view=None):
    out = io.StringIO()
    worker = LoopThread()
    try:
        Terminal(FakeChatConfig(chat), worker, chat, view or PlainView(out), lines).loop()
    finally:
        worker.close()
    return out.getvalue()


def live() -> tuple[LiveView, AnsiScreen]:
    screen = AnsiScreen(200, 60)
    return LiveView(screen, lambda: (120, 24)), screen


def ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


def turns(*texts):
    return [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(texts)]


def in_order(text: str, *parts: str) -> bool:
    places = [text.rindex(part) for part in parts]
    return places == sorted(places)


def alone(count: int, later: str, limit: str = "") -> str:
    words = strings.ONE_WORD if count == 1 else strings.WORDS.format(count)
    return strings.WORDS_ALONE.format(words=words, limit=limit, later=later)


def test_questions_are_answered():
    chat = FakeChat([update("Par", "is"), finished("Paris.")], [finished("Rome.")])
    out = talk(chat, Lines("France?", "", "Italy?"))
    assert chat.asked == ["France?", "Italy?"] and chat.stopped == 0
    assert strings.TERMINAL_WELCOME.format("tiny-target (135M parameters)", "ws://127.0.0.1:8765/v1/session") in out
    assert "Paris.\n6 tokens in 0.5 s | tau 2.00 | 12.0 tokens/s | 3 rounds | rtt 63 ms\n" in out and "Rome.\n" in out


def test_a_defect_is_reported_and_does_not_end_the_answer_silently():
    chat = FakeChat([update("Once upon"), LookupError("a defect")], [finished("Yes.")])
    out = talk(chat, Lines("story?", "still there?"))
    assert "LookupError('a defect')" in out and "Yes.\n" in out


def test_ctrl_c_stops_the_answer_and_the_next_question_works():
    chat = FakeChat([update("Once upon", " a time"), ctrl_c, HANG], [finished("Yes.")])
    before = signal.getsignal(signal.SIGINT)
    out = talk(chat, Lines("story?", "still there?"))
    assert chat.stopped == 1 and f"Once upon\n{strings.STOPPED} | 9 tokens" in out and "a time" not in out
    assert "Yes.\n" in out and signal.getsignal(signal.SIGINT) is before


def test_text_written_offline_stays_readable_when_the_answer_is_stopped():
    chat = FakeChat([update("Par", "", "is, of course."), ctrl_c, HANG], [finished("Rome.")])
    out, note = io.StringIO(), alone(3, strings.STAYS)
    text = talk(chat, Lines("France?", "Italy?"), LiveView(out, lambda: (80, 24)))
    before, after = out.getvalue().split(note)
    assert text == "" and "is, of course." in before.rsplit("Par", 1)[-1]
    assert f"{strings.STOPPED} | 3 tokens" in after and "Rome." in after and chat.stopped == 1
    assert alone(1, strings.STAYS) not in talk(FakeChat([update("a", "", "b"), ctrl_c, HANG]), Lines("x?"))


@pytest.mark.parametrize("reason", [PauseReason.END, PauseReason.LENGTH, PauseReason.LIMIT])
def test_an_answer_at_its_end_need_not_be_waited_for(reason):
    """On a terminal. A pipe gets confirmed text alone."""
    chat = FakeChat([update("", "", "Paris is one of them."), Paused(reason), HANG], [finished("Rome.")])
    chat.marks, chat.status = [FIRST], LinkStatus.OFFLINE
    view, screen = live()
    talk(chat, Lines("/offline", "France?", "Italy?"), view)
    rows = screen.text()
    limit = strings.LIMIT_REACHED if reason is PauseReason.LIMIT else ""
    assert rows[rows.index("Paris is one of them.") + 1] == alone(5, strings.CHECKED_LATER, limit)
    assert not any(strings.STOPPED in row for row in rows)
    assert chat.asked == ["France?", "Italy?"] and chat.stopped == 1 and "Rome." in rows


def test_an_answer_that_ended_in_a_late_link_need_not_be_waited_for_after_its_loss():
    """Text written after a late verdict is drafted text; after the loss of the link it is offline text, the same."""
    chat = FakeChat([update("", "Paris."), Paused(PauseReason.LENGTH), update("", "", "Paris."), HANG])
    view, screen = live()
    talk(chat, Lines("France?"), view)
    assert chat.stopped == 1 and alone(1, strings.STAYS) in screen.text()
    shown = AnswerState(OFFLINE)  # at the offline limit one waits for a verifier that one wants
    for event in (update("", "", "Paris"), Paused(PauseReason.LIMIT)):
        shown.take(event)
    assert shown.ended_alone(wanted_offline=True) and not shown.ended_alone(wanted_offline=False)


def test_at_the_offline_limit_enter_leaves_the_answer(monkeypatch):
    keyboard = Keyboard()
    keyboard.reads_keys, keyboard.pressed = True, lambda: "\n"
    monkeypatch.setattr("moa_chat.terminal.app.watch_keyboard", lambda: contextlib.nullcontext(keyboard))
    chat = FakeChat([update("", "", "Paris"), Paused(PauseReason.LIMIT), HANG], [finished("Rome.")])
    chat.status = LinkStatus.OFFLINE
    view, screen = live()
    talk(chat, Lines("France?", "Italy?"), view)
    assert chat.asked == ["France?", "Italy?"] and chat.stopped == 1
    assert alone(1, strings.STAYS, strings.LIMIT_REACHED) in screen.text() and "Rome." in screen.text()


def test_text_written_alone_is_checked_before_the_next_question():
    chat = FakeChat([finished("Paris.")], [finished("Rome.")], [finished("Bern.")])
    chat.messages, chat.marks = turns("France?", "Pisa.", "Italy?", "Rome."), [FIRST, SECOND]
    out = talk(chat, Lines("Switzerland?"))
    assert [each["content"] for each in chat.messages[1:4:2]] == ["Paris.", "Rome."] and chat.marks == []
    assert in_order(out, "you> France?", "Paris.", "you> Italy?", "Rome.", "Bern.")
    assert out.count(strings.CHECKED) == 2 and chat.asked == ["Switzerland?"]


def test_a_stopped_check_waits_and_the_text_stays_marked(tmp_path):
    """The prompt stays usable: Ctrl-C leaves, and a saved file says what is not confirmed."""
    markdown, data = tmp_path / "talk.md", tmp_path / "talk.json"
    chat, lines = FakeChat([update("Par"), ctrl_c, HANG]), Lines(f"/save {markdown}", f"/save {data}", *CTRL_C_TWICE)
    chat.messages, chat.marks = turns("France?", "Pisa."), [FIRST]
    out = talk(chat, lines)
    assert out.count(strings.CHECKED) == 1 and in_order(out, "Par\n", strings.CHECK_STOPPED, strings.HOW_TO_LEAVE)
    assert len(lines.prompts) == 4 and chat.messages[1]["content"] == "Pisa."
    assert f"({strings.TENTATIVE})\n\nPisa." in markdown.read_text()
    assert json.loads(data.read_text())["unconfirmed"] == [1]


def test_a_check_that_ctrl_c_breaks_off_waits_too():
    """The third Ctrl-C raises an exception."""
    chat = FakeChat()
    chat.messages, chat.marks = turns("France?", "Pisa."), [FIRST]
    with mock.patch.object(Terminal, "_follow", side_effect=KeyboardInterrupt):
        assert talk(chat, Lines("/stats")).count(strings.CHECKED) == 1


@pytest.mark.parametrize("typed", [("Italy?",), ("/offline", "/offline")])
def test_a_stopped_check_begins_again_with_a_question_or_a_new_link(typed):
    chat = FakeChat([update("Par"), ctrl_c, HANG], [finished("Paris.")], [finished("Rome.")])
    chat.messages, chat.marks = turns("France?", "Pisa."), [FIRST]
    out = talk(chat, Lines("/stats", *typed))
    assert out.count(strings.CHECKED) == 2 and out.count(strings.CHECK_STOPPED) == 1
    assert chat.messages[1]["content"] == "Paris." and chat.marks == []


@pytest.mark.parametrize(("most", "note"), [(5, strings.STOPPED), (512, strings.TERMINAL_FINISH[FinishReason.LENGTH])])
def test_a_checked_answer_that_was_stopped_is_not_cut_off(most, note):
    """It may have no more tokens than it had."""
    chat = FakeChat([finished("There", FinishReason.LENGTH)])
    chat.messages, chat.marks = turns("France?", "Their"), [Unconfirmed(1, Sampling(), most)]
    assert f"There\n{note} | 5 tokens" in talk(chat, Lines())


@pytest.mark.parametrize("shown", ["", "There"])
def test_text_of_a_stopped_answer_stays_if_it_was_shown(shown):
    def keep():
        chat.messages, chat.marks = turns("France?", "Paris.", "Italy?", "There"), [FIRST, SECOND]

    chat = FakeChat([update("", "", shown), keep, ctrl_c, HANG])
    chat.messages, chat.marks, chat.status = turns("France?", "Paris."), [FIRST], LinkStatus.OFFLINE
    talk(chat, Lines("Italy?"))
    assert (len(chat.messages), len(chat.marks)) == ((4, 2) if shown else (2, 1))


def test_ctrl_c_at_the_prompt_hints_and_leaves_at_the_second():
    lines = Lines(KeyboardInterrupt(), "/stats", KeyboardInterrupt(), KeyboardInterrupt(), "never read")
    assert talk(FakeChat(), lines).count(strings.HOW_TO_LEAVE) == 2 and len(lines.prompts) == 4


def test_commands_are_obeyed():
    chat = FakeChat([finished("Hi.")])
    lines = Lines("/stats", "/nonsense now", "/help", "/offline", "hello", "/offline", "/stats", "/quit", "never asked")
    out = talk(chat, lines)
    said = (strings.NO_ANSWER_YET, strings.TERMINAL_HELP, strings.UNKNOWN_COMMAND.format("/nonsense"))
    assert all(words in out for words in said) and "tokens per second    6.0" in out
    assert chat.worked_offline == [True, False] and chat.asked == ["hello"]
    assert lines.prompts[4] == "(offline) you> " and lines.prompts[0] == lines.prompts[6] == "you> "
    assert in_order(out, strings.NOW_OFFLINE, strings.NOW_ONLINE, strings.ONLINE_AGAIN)


def test_the_help_names_the_keys_of_the_status_row():
    for hint in (strings.KEEP_KEY, strings.OFFLINE_KEY, strings.ONLINE_KEY, strings.STAY_OFFLINE_KEY):
        assert hint.partition(":")[0].split()[-1] in strings.TERMINAL_HELP
    # Answers are sampled without an option, too.
    assert "--temperature 0" in strings.TERMINAL_HELP


def test_a_link_that_does_not_come_back_is_told(monkeypatch):
    monkeypatch.setattr("moa_chat.terminal.app._CONNECT_S", 0.0)
    monkeypatch.setattr(FakeChat, "link", LinkChanged(LinkStatus.OFFLINE, "REFUSED"))
    chat = FakeChat()
    monkeypatch.setattr(chat, "work_offline", lambda offline: _nothing())
    chat.status = LinkStatus.OFFLINE
    assert strings.STILL_OFFLINE.format("REFUSED") in talk(chat, Lines("/offline", "/offline"))


async def _nothing() -> None:
    """Stay as it is."""


def test_what_is_typed_during_an_answer_comes_after_it(monkeypatch):
    keyboard, keys = Keyboard(), ["Ita", "lx\x7fy?\x1b[A\n\n", "Switz"]
    keyboard.pressed = lambda: keys.pop(0) if keys else ""
    monkeypatch.setattr("moa_chat.terminal.app.watch_keyboard", lambda: contextlib.nullcontext(keyboard))
    chat, lines = FakeChat([update("P"), 0.3, finished("Paris.")], [finished("Rome.")]), Lines("France?", "/quit")
    out = talk(chat, lines)
    assert chat.asked == ["France?", "Italy?"] and in_order(out, "Paris.", "you> Italy?", "Rome.")
    assert lines.prompts == ["you> ", "you> Switz"]
    keys += ["/quit\n"]
    lines = Lines("France?", "never asked")
    talk(FakeChat([update("P"), finished("Paris.")]), lines)
    assert len(lines.prompts) == 1
    keys += ["\x04"]  # Ctrl-D
    talk(FakeChat([update("P"), finished("Paris.")]), lines := Lines("France?", "never asked"))
    assert len(lines.prompts) == 1


def test_statistics_count_what_is_not_confirmed():
    chat = FakeChat([update("", "", "Paris"), Paused(PauseReason.END), HANG])
    chat.status = LinkStatus.OFFLINE
    view, screen = live()
    talk(chat, Lines("France?", "/stats"), view)
    assert "tentative            5" in screen.text()


def test_a_refused_question_leaves_the_chat_usable():
    chat = FakeChat(
        [ChatError("LONG", code="refused")], [update("a"), ChatError("GONE\x1b[2J", code="refused")], [finished("Yes.")]
    )
    out = talk(chat, Lines("long", "short", "again"))
    assert "error: LONG\n\n" in out and "Yes." in out
    assert f"a\nerror: GONE\\x1b[2J\n{strings.STOPPED} | 1 tokens in" in out


def test_drafted_and_offline_text_differ_on_a_terminal(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    view, screen = live()
    seen = []
    drawn = ["Paris and", f"no connection | {figures(update('Par').statistics)} | 6 tentative | LATE"]

    def look():
        for _ in range(1000):  # until the main thread has drawn all of it
            if screen.text()[-2:] == drawn:
                break
            signal.sigtimedwait([], 0.02)
        seen.append((screen.text()[-2:], screen.styled("2;3"), screen.styled("2;3;33")))

    lost = LinkChanged(LinkStatus.OFFLINE, "LATE")
    chat = FakeChat([update("Par"), lost, update("Par", "is", " and"), look, finished("Paris.")])
    talk(chat, Lines("France?"), view)
    text, drafted, offline = seen[0]
    assert text == drawn and drafted == "is" and offline.startswith(" and")
    assert screen.text()[1:3] == ["Paris.", summary("", finished("Paris.").statistics)]
    assert screen.cursor_shown


def test_tentative_text_is_styled_by_origin_and_without_color_otherwise(monkeypatch):
    palette = Palette()
    shown = AnswerState(OFFLINE)
    assert shown.tentative(palette) == []
    shown.take(update("a", "b", "c"))
    assert shown.tentative(palette) == [Span("b", "2;3"), Span("c", "2;3;33")]
    monkeypatch.setenv("NO_COLOR", "1")
    palette = Palette.from_environment()
    spans = [*status_line(OFFLINE, "offline", update("a", "b"), palette), Span("", palette.offline)]
    colours = {str(code) for code in (*range(30, 50), *range(90, 108))}
    assert not any(colours & set(span.style.split(";")) for span in spans) and palette.offline != palette.tentative


def test_the_status_row_says_why_the_device_waits():
    shown = AnswerState(LinkChanged(LinkStatus.ONLINE))

    def row(wanted_offline=False):
        return "".join(s.text for s in shown.status(Palette(), wanted_offline=wanted_offline, hint="HINT"))

    assert row() == "online | HINT"
    shown.take(LinkChanged(LinkStatus.OFFLINE, "CLOSED", 3.0))
    assert row() == "reconnecting in 3 s | HINT | CLOSED"
    assert row(wanted_offline=True) == "working offline | HINT"
    shown.take(Paused(PauseReason.UNPREPARED))
    assert strings.PAUSES[PauseReason.UNPREPARED] in row()
    shown.take(update("a"))
    assert strings.PAUSES[PauseReason.UNPREPARED] not in row() and in_order(row(), "HINT", "tau")
    shown.take(Disagreement(1, 1, "mine", "yours"))
    assert in_order(row(), "HINT", "tau")
    for reason in (FinishReason.LENGTH, FinishReason.CONTEXT):
        assert ending(reason) == strings.TERMINAL_FINISH[reason]
    cut = strings.TERMINAL_FINISH[FinishReason.LENGTH]
    assert ending(FinishReason.LENGTH, '{"a": ', as_json=True) == strings.NO_JSON.format(cut)
    assert ending(FinishReason.LENGTH, '{"a": 1}', as_json=True) == cut and not ending(FinishReason.STOP, as_json=True)
    assert strings.WITHOUT_OLDEST.format(4) in summary("", Statistics(dropped_turns=4))


@pytest.mark.parametrize(
    ("status", "offline", "key"),
    [
        (LinkStatus.ONLINE, False, strings.OFFLINE_KEY),
        (LinkStatus.OFFLINE, False, strings.STAY_OFFLINE_KEY),
        (LinkStatus.OFFLINE, True, strings.ONLINE_KEY),
    ],
)
def test_the_key_that_is_named_fits_the_link(status, offline, key):
    """While the chat is offline, no text offers to go offline."""
    terminal, keyboard = SimpleNamespace(_offline=offline), SimpleNamespace(reads_keys=True)
    assert Terminal._hint(terminal, AnswerState(LinkChanged(status)), keyboard) == key


def test_an_answer_is_written_again_and_earlier_marks_stay():
    chat = FakeChat([finished("Paris.")], [finished("Lyon.")])
    out = talk(chat, Lines("/regen", "France?", "/regen"))
    assert strings.NO_ANSWER_YET in out and chat.asked == ["France?", "France?"]
    assert chat.messages == turns("France?", "Lyon.")
    chat = FakeChat([finished("Lyon.")])
    chat.messages, chat.marks, chat.status = turns("x", "x", "x", "x"), [FIRST, SECOND], LinkStatus.OFFLINE
    talk(chat, Lines("/regen"))
    assert chat.marks == [FIRST] and chat.messages[-1]["content"] == "Lyon."


def test_a_conversation_is_saved(tmp_path):
    chat = FakeChat([finished("Paris.")])
    markdown, data = tmp_path / "talk.md", tmp_path / "talk.json"
    saves = (
        markdown,
        data,
        data,
        "n",
        markdown,
        "yes",
        tmp_path / "talk.txt",
        "",
        tmp_path / "nowhere" / "talk.md",
        "x" * 300 + ".md",
    )
    typed = [name if name in ("n", "yes") else f"/save {name}" for name in saves]
    lines = Lines(f"/save {markdown}", "France?", *typed)
    out = talk(chat, lines)
    assert out.count(strings.SAVED.format(markdown)) == 2 and "Paris." in markdown.read_text()
    assert json.loads(data.read_text())["title"] == "France?"
    assert lines.prompts[5] == strings.MAY_OVERWRITE.format(data) and strings.NOT_SAVED in out
    # Nothing to save yet, another ending, no name, no such folder, and too long a name.
    assert out.count("error: ") == 5 and all(name in out for name in (".md or .json", "/save FILE", "No such file"))


@pytest.mark.parametrize("keeps", [True, False])
def test_the_user_decides_about_text_written_offline(keeps):
    disagreement = Disagreement(2, 3, "\n is mine" * 20, "is the")
    script = [update("It"), update("It", "", " is mine"), disagreement, finished("It is the server's.")]
    chat = FakeChat(script, [finished("It is mine.")])
    out = talk(chat, Lines("Whose?", "y" if keeps else ""))
    assert f"{strings.DIFFERS}\n  server: is the server's.\n  mine:   is mine is mine" in out
    assert chat.kept == keeps and ("It is mine.\n" in out) == keeps


# -- conversations that were kept --------------------------------------------------------------------------


def test_a_kept_conversation_is_shown_and_its_answer_finished():
    chat = FakeChat([finished("Rome.")])
    chat.messages, chat.question = turns("Hello?", "Hi."), "France?"
    chat.pending_script = [update("Par", "is"), finished("Paris.")]
    out = talk(chat, Lines("Italy?"))
    before, rest = out.split(f"{strings.CONTINUES}\n")
    assert "Hi." not in out and f"{strings.EARLIER_MESSAGES.format(2)}\nyou> France?\nParis.\n6 tokens" in rest
    assert chat.asked == ["Italy?"] and "Rome." in rest and "tiny-target" in before


def test_a_kept_conversation_without_a_running_answer_is_shown():
    chat = FakeChat()
    chat.messages = [{"role": "system", "content": "Be brief."}, *turns("A?", "a.", "B?", "b\x1b[2J.")]
    chat.store_problem = "ELSEWHERE"
    out = talk(chat, Lines("/new"))
    assert "error: ELSEWHERE\n" in out and "Be brief" not in out
    assert f"{strings.EARLIER_MESSAGES.format(2)}\nyou> B?\nb␛[2J.\n" in out
    assert f"{strings.NEW_CONVERSATION}\n" in out and chat.messages == []


def test_a_terminated_program_stops_no_answer():
    """It continues at the next start."""
    chat = FakeChat([update("Once"), lambda: signal.raise_signal(signal.SIGTERM), HANG])
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        with mock.patch.object(RunningAnswer, "stop", autospec=True) as stop, pytest.raises(SystemExit):
            talk(chat, Lines("story?"))
        assert not stop.called
    finally:
        signal.signal(signal.SIGTERM, before)


class UnreachableConfig(FakeChatConfig):
    """A config whose verifier is away."""

    opened: list[bool]

    async def connect(self, *, wait: bool = True) -> FakeChat:
        self.__dict__.setdefault("opened", []).append(wait)
        if wait:
            raise ConnectError("AWAY", final=False, code="unreachable")
        return self.chat


@pytest.fixture
def leaving(monkeypatch):
    """The user leaves at once."""
    monkeypatch.setattr("moa_chat.terminal.app.read_line", lambda *_: "/quit")


def test_a_kept_chat_opens_without_its_verifier_and_a_new_one_does_not(tmp_path, leaving):
    chat, new = FakeChat(), UnreachableConfig(FakeChat())
    with pytest.raises(ConnectError):
        run_terminal(new)
    empty = UnreachableConfig(chat, store=tmp_path)
    with pytest.raises(ConnectError):
        run_terminal(empty)
    assert (new.opened, empty.opened) == ([True], [True, False]) and chat.closed
    chat.messages = turns("A?", "a.")
    assert run_terminal(UnreachableConfig(chat, store=tmp_path)) == 0


@pytest.mark.parametrize(
    "writer, offline, on_a_terminal",
    [(1, "writer", True), (None, "writer", True), (1, "drafter", True), (1, "writer", False)],
)
def test_a_chat_begins_without_its_verifier_if_the_writer_can_be_seen(
    writer, offline, on_a_terminal, monkeypatch, capsys, leaving
):
    view = live()[0] if on_a_terminal else PlainView(io.StringIO())
    monkeypatch.setattr("moa_chat.terminal.app.view_for", lambda _: view)
    manifest = SimpleNamespace(target="tiny-target", target_parameters=0, writer=writer, has_graph=True)
    config = UnreachableConfig(FakeChat(), bundle=SimpleNamespace(manifest=manifest), offline=offline)
    if writer and offline == "writer" and on_a_terminal:
        assert run_terminal(config) == 0
        assert strings.WRITER_ANSWERS.format("AWAY") in capsys.readouterr().err
    else:
        with pytest.raises(ConnectError):
            run_terminal(config)


def test_a_chat_that_another_program_has_open_is_left_to_it(tmp_path, monkeypatch, capsys, leaving):
    chat = FakeChat()

    async def connect(self, *, wait=True):
        if self.store is not None:
            raise StoreError("OPEN ELSEWHERE", code="refused")
        return chat

    monkeypatch.setattr(FakeChatConfig, "connect", connect)
    with pytest.raises(StoreError):
        run_terminal(FakeChatConfig(store=tmp_path, must_store=True))
    assert run_terminal(FakeChatConfig(store=tmp_path)) == 0
    assert strings.KEPT_NOWHERE.format("OPEN ELSEWHERE") in capsys.readouterr().err
