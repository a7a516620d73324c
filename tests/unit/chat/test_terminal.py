"""The dialogue of ``moa-chat --terminal`` with a chat that plays scripts."""

from __future__ import annotations

import io
import json
import re
import signal
import sys
from types import SimpleNamespace
from unittest import mock

import pytest

from moa_chat.loop_thread import LoopThread, RunningAnswer
from moa_chat.terminal.answer_state import AnswerState, Palette, status_line, summary, tentative_spans
from moa_chat.terminal.app import Terminal, run_terminal
from moa_chat.terminal.renderer import LiveView, PlainView, Span
from moa_runtime.chat import ChatError
from moa_runtime.chat_store import StoreError
from moa_runtime.conversation import Unconfirmed
from moa_runtime.events import Disagreement, FinishReason, LinkChanged, LinkStatus, Paused, PauseReason
from moa_runtime.session.events import Sampling
from moa_runtime.transport import ConnectError
from support.chat.ansi_screen import AnsiScreen
from support.chat.fake_chat import HANG, FakeChat, FakeChatConfig, finished, update


class Lines:
    """What the user types; exceptions are raised as ``input`` would."""

    def __init__(self, *lines) -> None:
        self._lines = list(lines)
        self.prompts: list[str] = []

    def __call__(self, prompt: str) -> str:
        self.prompts.append(prompt)
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


def test_questions_and_answers():
    chat = FakeChat([update("Par", "is"), finished("Paris.")], [finished("Rome.")])
    out = talk(chat, Lines("France?", "", "Italy?"))
    assert chat.asked == ["France?", "Italy?"]
    assert "tiny-target at ws://127.0.0.1:8765" in out
    assert "Paris.\n6 tokens in 0.5 s | tau 2.00 | 12.0 tokens/s | 3 rounds | rtt 63 ms\n" in out
    assert "Rome.\n" in out
    assert chat.stopped == 0


def test_a_defect_is_told_and_is_no_end_of_the_answer():
    chat = FakeChat([update("Once upon"), LookupError("a defect")], [finished("Yes.")])
    out = talk(chat, Lines("story?", "still there?"))
    assert "the answer failed: LookupError('a defect')" in out and "Yes.\n" in out


def test_ctrl_c_stops_the_answer_and_the_next_question_works():
    def ctrl_c():
        signal.raise_signal(signal.SIGINT)

    chat = FakeChat([update("Once upon", " a time"), ctrl_c, HANG], [finished("Yes.")])
    before = signal.getsignal(signal.SIGINT)
    out = talk(chat, Lines("story?", "still there?"))
    assert chat.stopped == 1
    assert "Once upon\nstopped | 9 tokens" in out and "a time" not in out
    assert "Yes.\n" in out
    assert signal.getsignal(signal.SIGINT) is before


def test_what_was_written_offline_stays_readable_when_the_answer_is_stopped():
    def interrupt():
        signal.raise_signal(signal.SIGINT)

    chat = FakeChat([update("Par", "", "is, of course."), interrupt, HANG], [finished("Rome.")])
    out = io.StringIO()
    text = talk(chat, Lines("France?", "Italy?"), LiveView(out, lambda: (80, 24)))
    shown = out.getvalue()
    note = "(3 words written by this device alone: that stays as it is)"
    left = shown.split(note)[0].rsplit("Par", 1)[-1]
    assert text == "" and "is, of course." in left and "stopped | 3 tokens" in shown.split(note)[1]
    assert "Rome." in shown and chat.stopped == 1
    assert "this device alone" not in talk(FakeChat([update("a", "bc"), interrupt, HANG]), Lines("x?"))


@pytest.mark.parametrize("reason", [PauseReason.END, PauseReason.LENGTH, PauseReason.LIMIT])
def test_an_answer_at_its_end_need_not_be_waited_for(reason):
    """On a terminal. What goes into a pipe is confirmed text alone."""
    chat = FakeChat([update("", "", "Paris is one of them."), Paused(reason), HANG], [finished("Rome.")])
    chat.marks = [Unconfirmed(1, Sampling(), 8)]
    chat.status = LinkStatus.OFFLINE
    screen = AnsiScreen(200, 60)
    talk(chat, Lines("/offline", "France?", "Italy?"), LiveView(screen, lambda: (20, 24)))
    rows = screen.text()
    at = rows.index("Paris is one of")
    limit = "; no more may be written offline" if reason is PauseReason.LIMIT else ""
    note = f"(5 words written by this device alone{limit}: the verifier checks that when it is back)"
    assert rows[at + 1 : at + 3] == ["them.", note] and not any("stopped" in row for row in rows)
    assert chat.asked == ["France?", "Italy?"] and chat.stopped == 1 and "Rome." in rows


def test_an_answer_that_ended_in_a_late_link_need_not_be_waited_for_once_that_is_lost():
    """What was written behind a late verdict is drafted text; once the link is lost it is offline text, the same."""
    chat = FakeChat([update("", "Paris."), Paused(PauseReason.LENGTH), update("", "", "Paris."), HANG])
    screen = AnsiScreen(200, 60)
    talk(chat, Lines("France?"), LiveView(screen, lambda: (80, 24)))
    assert chat.stopped == 1 and "(1 word written by this device alone: that stays as it is)" in screen.text()


def test_at_the_offline_limit_one_waits_for_a_verifier_that_one_wants():
    shown = AnswerState(LinkChanged(LinkStatus.OFFLINE))
    for event in (update("", "", "Paris"), Paused(PauseReason.LIMIT)):
        shown.take(event)
    assert shown.ended_alone(wanted_offline=True) and not shown.ended_alone(wanted_offline=False)


def test_what_was_written_alone_is_checked_before_the_next_question():
    chat = FakeChat([finished("Paris.")], [finished("Rome.")], [finished("Bern.")])
    chat.messages = [
        {"role": role, "content": text}
        for role, text in [("user", "France?"), ("assistant", "Pisa."), ("user", "Italy?"), ("assistant", "Rome.")]
    ]
    chat.marks = [Unconfirmed(1, Sampling(), 8), Unconfirmed(3, Sampling(), 8)]
    out = talk(chat, Lines("Switzerland?"))
    assert [each["content"] for each in chat.messages[1:4:2]] == ["Paris.", "Rome."] and chat.marks == []
    order = ["you> France?", "Paris.", "you> Italy?", "Rome.", "Bern."]
    places = [out.rindex(each) for each in order]
    assert places == sorted(places)
    assert out.count("checked by the verifier") == 2 and chat.asked == ["Switzerland?"]


def test_a_check_that_is_stopped_is_not_begun_again_at_once():
    def interrupt():
        signal.raise_signal(signal.SIGINT)

    chat = FakeChat([interrupt, HANG])
    chat.messages = [{"role": "user", "content": "France?"}, {"role": "assistant", "content": "Pisa."}]
    chat.marks = [Unconfirmed(1, Sampling(), 8)]
    out = talk(chat, Lines())
    assert out.count("checked by the verifier") == 1 and chat.messages[1]["content"] == "Pisa."


def test_ctrl_c_at_the_prompt_hints_and_leaves_at_the_second():
    lines = Lines(KeyboardInterrupt(), "/stats", KeyboardInterrupt(), KeyboardInterrupt(), "never read")
    out = talk(FakeChat(), lines)
    assert out.count("Ctrl-C again or Ctrl-D leaves") == 2
    assert len(lines.prompts) == 4


def test_commands():
    chat = FakeChat([finished("Hi.")])
    lines = Lines("/stats", "/nonsense now", "/help", "/offline", "hello", "/offline", "/stats", "/quit", "never asked")
    out = talk(chat, lines)
    assert "no answer yet" in out and "unknown command /nonsense" in out
    assert all(command in out for command in ("/help ", "/offline ", "/stats ", "/quit "))
    assert chat.worked_offline == [True, False]
    assert lines.prompts[4] == "(offline) you> " and lines.prompts[0] == "you> "
    assert "tokens per second    6.0" in out
    assert chat.asked == ["hello"]


def test_a_refused_question_leaves_the_chat_usable():
    chat = FakeChat([ChatError("too long")], [update("a"), ChatError("gone\x1b[2J")], [finished("Yes.")])
    out = talk(chat, Lines("long", "short", "again"))
    assert "error: too long\n\n" in out and "Yes." in out
    assert "a\nerror: gone␛[2J\nstopped | 1 tokens in" in out


def test_on_a_terminal(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    screen = AnsiScreen(120, 10)
    seen = []

    status = "offline | tau 3.00 | 6.0 tokens/s | 1 rounds | rtt 63 ms | 6 tentative"
    drawn = ["Paris and", f"{status} | the verdict is late; the device writes on"]

    def look():
        for _ in range(1000):  # until the main thread has drawn all of it
            if screen.text()[-2:] == drawn:
                break
            signal.sigtimedwait([], 0.02)
        seen.append((screen.text(), screen.styled("2;3"), screen.styled("2;3;33")))

    lost = LinkChanged(LinkStatus.OFFLINE, "the verdict is late; the device writes on")
    chat = FakeChat([update("Par"), lost, update("Par", "is", " and"), look, finished("Paris.")])
    talk(chat, Lines("France?"), LiveView(screen, lambda: (120, 10)))
    text, drafted, offline = seen[0]
    assert text[-2:] == drawn
    assert drafted == "is" and offline.startswith(" and")
    assert screen.text()[1:3] == ["Paris.", "6 tokens in 0.5 s | tau 2.00 | 12.0 tokens/s | 3 rounds | rtt 63 ms"]
    assert screen.cursor_shown


def test_tentative_text_is_split_where_the_device_went_on_alone():
    palette = Palette()
    assert tentative_spans(update("a", "b", "c"), palette) == [Span("b", "2;3"), Span("c", "2;3;33")]
    assert tentative_spans(update("a", "bc"), palette) == [Span("bc", "2;3")]
    assert tentative_spans(update("a"), palette) == []


def test_the_status_row_says_what_the_device_waits_for():
    shown = AnswerState(LinkChanged(LinkStatus.ONLINE))

    def row(wanted_offline=False):
        return "".join(s.text for s in shown.status(Palette(), wanted_offline=wanted_offline, hint="a hint"))

    assert row() == "online | a hint"
    shown.take(LinkChanged(LinkStatus.OFFLINE, "the connection was closed", 3.0))
    assert row() == "offline, reconnecting in 3 s | the connection was closed | a hint"
    assert row(wanted_offline=True) == "working offline | a hint"
    shown.take(Paused(PauseReason.UNPREPARED))
    assert "Waiting for the verifier: it has to read a question" in row()
    shown.take(update("a"))
    assert "Waiting" not in row() and "tau" in row() and row().endswith("a hint")
    shown.take(Disagreement(1, 1, "mine", "yours"))
    assert row().index("a hint") < row().index("tau")


def test_an_answer_is_written_again():
    chat = FakeChat([finished("Paris.")], [finished("Lyon.")])
    out = talk(chat, Lines("/regen", "France?", "/regen"))
    assert "no answer yet" in out and chat.asked == ["France?", "France?"] and "Lyon." in out
    assert [turn["content"] for turn in chat.messages] == ["France?", "Lyon."]


def test_an_answer_that_is_written_again_keeps_the_others_marked():
    chat = FakeChat([finished("Lyon.")])
    chat.messages = [{"role": role, "content": "x"} for role in ("user", "assistant") * 2]
    chat.marks, chat.status = [Unconfirmed(1, Sampling(), 8), Unconfirmed(3, Sampling(), 8)], LinkStatus.OFFLINE
    talk(chat, Lines("/regen"))
    assert chat.marks == [Unconfirmed(1, Sampling(), 8)] and chat.messages[-1]["content"] == "Lyon."


def test_a_conversation_is_saved(tmp_path):
    chat = FakeChat([finished("Paris.")])
    markdown, data = tmp_path / "talk.md", tmp_path / "talk.json"
    lines = Lines(
        f"/save {markdown}",
        "France?",
        f"/save {markdown}",
        f"/save {data}",
        f"/save {data}",
        "n",
        f"/save {tmp_path}/talk.txt",
        "/save",
        f"/save {tmp_path}/nowhere/talk.md",
    )
    out = talk(chat, lines)
    assert "nothing to save yet" in out
    assert out.count(f"saved as {markdown}") == 1 and "Paris." in markdown.read_text()
    assert json.loads(data.read_text())["title"] == "France?"
    assert lines.prompts[5] == f"{data} exists: overwrite it? [y/N] " and "not saved" in out
    assert out.count("has no known ending: expected a file name with .md or .json") == 1
    assert "error: a file name is missing: /save FILE" in out
    assert "cannot write" in out and "No such file" in out


def test_a_file_is_overwritten_when_agreed(tmp_path):
    path = tmp_path / "talk.md"
    path.write_text("something else")
    out = talk(FakeChat([finished("Paris.")]), Lines("France?", f"/save {path}", "yes"))
    assert f"saved as {path}" in out and "Paris." in path.read_text()


@pytest.mark.parametrize("keeps", [True, False])
def test_the_user_decides_about_text_written_offline(keeps):
    disagreement = Disagreement(2, 3, "\n is mine" * 20, "is the")
    script = [update("It"), update("It", "", " is mine"), disagreement, finished("It is the server's.")]
    chat = FakeChat(script, [finished("It is mine.")])
    out = talk(chat, Lines("Whose?", "y" if keeps else ""))
    assert "  server: is the server's.\n" in out and re.search(r"  mine:   is mine .*( is| mine)…\n", out)
    assert chat.kept == keeps and ("It is mine.\n" in out) == keeps


def test_no_color(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    palette = Palette.from_environment()
    row = status_line(LinkChanged(LinkStatus.OFFLINE), "offline", update("a", "b"), palette)
    spans = [*row, Span("", palette.offline)]
    colours = {str(code) for code in (*range(30, 50), *range(90, 108))}
    assert not any(colours & set(span.style.split(";")) for span in spans)
    assert palette.offline != palette.tentative


@pytest.mark.parametrize(
    ("reason", "said"), [(FinishReason.LENGTH, "cut off"), (FinishReason.CONTEXT, "context is full"), (None, "stopped")]
)
def test_a_summary_says_why_an_answer_is_incomplete(reason, said):
    assert said in summary(reason, finished("a").statistics)


# -- conversations that were kept --------------------------------------------------------------------------


def turns(*texts):
    return [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(texts)]


def test_a_kept_conversation_is_shown_and_its_answer_finished():
    chat = FakeChat([finished("Rome.")])
    chat.messages, chat.question = turns("Hello?", "Hi."), "France?"
    chat.pending_script = [update("Par", "is"), finished("Paris.")]
    out = talk(chat, Lines("Italy?"))
    before, rest = out.split("the conversation continues; /new begins another\n")
    assert "Hi." not in out and "(2 earlier messages; /save FILE writes all)\nyou> France?\nParis.\n6 tokens" in rest
    assert chat.asked == ["Italy?"] and "Rome." in rest and "tiny-target at" in before


def test_a_kept_conversation_without_a_running_answer_is_shown():
    chat = FakeChat()
    chat.messages = [{"role": "system", "content": "Be brief."}, *turns("A?", "a.", "B?", "b\x1b[2J.")]
    chat.store_problem = "the old file is elsewhere"
    out = talk(chat, Lines("/new"))
    assert "error: the old file is elsewhere\n" in out
    assert "(2 earlier messages; /save FILE writes all)\nyou> B?\nb␛[2J.\n" in out and "Be brief" not in out
    assert "a new conversation\n" in out and chat.messages == []


def test_a_stop_of_the_program_stops_no_answer():
    def terminated():
        signal.raise_signal(signal.SIGTERM)

    chat = FakeChat([update("Once"), terminated, HANG])
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    stopped = []
    worker = LoopThread()
    stop = RunningAnswer.stop
    try:
        with mock.patch.object(RunningAnswer, "stop", lambda self: (stopped.append(self), stop(self))):
            with pytest.raises(SystemExit):
                Terminal(FakeChatConfig(chat), worker, chat, PlainView(io.StringIO()), Lines("story?")).loop()
            assert not stopped
    finally:
        signal.signal(signal.SIGTERM, before)
        worker.close()


def test_a_kept_chat_opens_without_its_verifier_and_a_new_one_does_not(tmp_path, monkeypatch):
    away = ConnectError("no verifier answers", final=False, code="unreachable")
    chat, opened = FakeChat(), []

    async def connect(self, *, wait=True):
        opened.append((wait, self.store))
        if wait:
            raise away
        return chat

    monkeypatch.setattr(FakeChatConfig, "connect", connect)
    monkeypatch.setattr("moa_chat.terminal.app.input", lambda _: "/quit", raising=False)
    with pytest.raises(ConnectError):
        run_terminal(FakeChatConfig(chat))
    assert opened == [(True, None)]
    with pytest.raises(ConnectError):
        run_terminal(FakeChatConfig(chat, store=tmp_path))
    assert chat.closed and opened[1:] == [(True, tmp_path), (False, tmp_path)]
    chat.messages = turns("A?", "a.")
    assert run_terminal(FakeChatConfig(chat, store=tmp_path)) == 0


@pytest.mark.parametrize(
    "writer, offline, on_a_terminal",
    [(1, "writer", True), (None, "writer", True), (1, "drafter", True), (1, "writer", False)],
)
def test_a_chat_begins_without_its_verifier_where_the_writer_can_be_seen(
    writer, offline, on_a_terminal, monkeypatch, capsys
):
    async def connect(self, *, wait=True):
        if wait:
            raise ConnectError("no verifier answers", final=False, code="unreachable")
        return self.chat

    view = LiveView(io.StringIO(), lambda: (80, 24)) if on_a_terminal else PlainView(io.StringIO())
    monkeypatch.setattr(FakeChatConfig, "connect", connect)
    monkeypatch.setattr("moa_chat.terminal.app.view_for", lambda _: view)
    monkeypatch.setattr("moa_chat.terminal.app.input", lambda _: "/quit", raising=False)
    manifest = SimpleNamespace(target="tiny-target", writer=writer)
    config = FakeChatConfig(FakeChat(), bundle=SimpleNamespace(manifest=manifest), offline=offline)
    if writer and offline == "writer" and on_a_terminal:
        assert run_terminal(config) == 0
        assert "no verifier answers; until then the writer on this device answers" in capsys.readouterr().err
    else:
        with pytest.raises(ConnectError):
            run_terminal(config)


def test_a_chat_that_another_program_has_is_left_to_it(tmp_path, monkeypatch, capsys):
    chat = FakeChat()

    async def connect(self, *, wait=True):
        if self.store is not None:
            raise StoreError("the chat is open in another program")
        return chat

    monkeypatch.setattr(FakeChatConfig, "connect", connect)
    monkeypatch.setattr("moa_chat.terminal.app.input", lambda _: "/quit", raising=False)
    with pytest.raises(StoreError):
        run_terminal(FakeChatConfig(chat, store=tmp_path, must_store=True))
    assert run_terminal(FakeChatConfig(chat, store=tmp_path)) == 0
    assert "the chat is open in another program; this one is kept nowhere" in capsys.readouterr().err
