"""All words that a user of the window or the terminal reads, by the place where they stand.

Values stand in braces, for ``str.format``. Sentences of errors stand beside their codes, where they are raised, and
those of ``--help`` in :mod:`moa_chat.options`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from moa_runtime.events import FinishReason, LinkChanged, LinkStatus, Origin, PauseReason

#: The word by itself, not as a part of a path.
_VERIFIER = re.compile(r"(?<![\w/.\\-])[Vv]erifier(?![\w/\\-])")

# -- where text comes from ---------------------------------------------------------------------

#: Short names, for the legend.
ORIGINS = {
    Origin.DRAFTED: "drafted, accepted",
    Origin.CORRECTED: "by the server",
    Origin.OFFLINE: "offline",
    Origin.KEPT: "kept",
}
DROPPED = "taken back"
TENTATIVE = "not confirmed"
_CONFIRMED = {
    Origin.DRAFTED: "This device proposed it, and the server accepted it.",
    Origin.CORRECTED: "The server wrote this itself: a correction, or the word after an accepted draft.",
    Origin.OFFLINE: "This device wrote it offline; the server accepted it later.",
    Origin.KEPT: "This device wrote it offline, and you kept it.",
}
_UNCONFIRMED = {
    Origin.DRAFTED: "This device proposes it; the server has not checked it yet.",
    Origin.CORRECTED: "The server wrote this itself.",
    Origin.OFFLINE: "This device wrote it offline; the server may still change it.",
    Origin.KEPT: "You keep it; the server will continue from here.",
}
DROPPED_TEXT = "This device wrote “{}”, and the server replaced it."

# -- an answer ---------------------------------------------------------------------------------

#: Shown in place of an answer without text while the device cannot continue it.
PAUSES = {
    PauseReason.END: "Complete; waiting for the server to confirm it…",
    PauseReason.LENGTH: "Length limit reached; waiting for the server to confirm it…",
    PauseReason.LIMIT: "Offline limit reached; waiting for the server…",
    PauseReason.GRAMMAR: "This device cannot follow the answer's format; waiting for the server…",
    PauseReason.OFF: "Waiting for the server…",
    PauseReason.UNSURE: "This device is not sure of the next words; waiting for the server…",
    PauseReason.UNPREPARED: "This device cannot write here on its own; waiting for the server…",
    PauseReason.LOW_POWER: "Saving power: this device writes nothing on its own; waiting for the server…",
    PauseReason.BACKGROUND: "Paused in the background; continues when you return…",
}
AWAY = "The server is away; this device continues as far as it can…"
READING = "The server reads your text…"
READING_TOKENS = "The server reads your text ({:,} tokens)…"
FINISH = {
    FinishReason.STOP: "",
    FinishReason.LENGTH: "cut off at the length limit",
    FinishReason.CONTEXT: "the model's context is full",
    FinishReason.GRAMMAR: "the answer's grammar reached a limit; the format may be wrong",
}
STOPPED = "stopped"
INTERRUPTED = "interrupted"
#: For an answer that the device wrote, and that the user kept or the server refused.
AS_WRITTEN = "as this device wrote it, not confirmed"
PARTLY_AS_WRITTEN = "partly as this device wrote it, not confirmed"
PARTLY_OFFLINE = "partly written offline"
WITHOUT_OLDEST = "without the oldest messages ({}), which do not fit"
CORRECTED = "corrected by the server"
CHECKING = "The server is checking this answer"
UNCONFIRMED_WORD = "1 word not confirmed yet"
UNCONFIRMED_WORDS = "{} words not confirmed yet"
ALL_CONFIRMED = "The server has confirmed what this device wrote."
CORRECTED_WORD = "1 word that this device wrote was corrected."
CORRECTED_WORDS = "{} words that this device wrote were corrected."
UNDO_STAYS = "Answers that have changed since the correction stay as they are."
OTHER_MODEL = "Another model wrote this answer; only that model can continue it."
CHAT_DELETED = "The chat was deleted."
NEW_CHAT = "New chat"

# -- the terminal ------------------------------------------------------------------------------

TERMINAL_HELP = """\
/help       this list
/offline    work without the server, or with it again
/stats      figures of the last answer
/regen      answer the last question again (the same text with --temperature 0 or --seed)
/new        begin another conversation
/save FILE  write the conversation as Markdown (.md) or JSON (.json)
/quit       leave (also Ctrl-D, or Ctrl-C twice)
While an answer is written: Ctrl-C stops it, Tab switches between offline and online,
Ctrl-K keeps offline text that the server corrected."""
TERMINAL_FINISH = {**FINISH, FinishReason.LENGTH: "cut off at --max-new-tokens"}
TERMINAL_WELCOME = "{} at {}; /help lists the commands, Ctrl-C stops an answer"
NO_DRAFTER = (
    "the bundle has no drafter: the server streams answers, and they stop while it is away; with a drafter (published "
    "for this model, or made by moa-train) answers are faster and continue offline (docs/models.md)"
)
KEPT_NOWHERE = "{}; this conversation is not stored"
WRITER_ANSWERS = "{}; until the server can be reached, the small model on this device answers"
HOW_TO_LEAVE = "Ctrl-C again or Ctrl-D leaves; /help lists the commands"
UNKNOWN_COMMAND = "unknown command {}; /help lists the commands"
NOW_OFFLINE = "working offline: answers stay unconfirmed; /offline connects again"
NOW_ONLINE = "connecting again"
ONLINE_AGAIN = "online again"
STILL_OFFLINE = "still offline ({}); further attempts follow"
NO_ANSWER_YET = "no answer yet"
NEW_CONVERSATION = "a new conversation"
CONTINUES = "the conversation continues; /new begins another"
EARLIER_MESSAGES = "({} earlier messages; /save FILE writes all)"
MAY_OVERWRITE = "{} exists: overwrite it? [y/N] "
NOT_SAVED = "not saved"
SAVED = "saved as {}"
CHECKED = "written offline, and now checked by the server:"
CHECK_STOPPED = "(the check did not finish; the next question repeats it, and until then this text stays unconfirmed)"
DIFFERS = "The server disagrees with the text written offline. From the first difference on:"
KEEP_MINE_ASKED = "Keep mine, and continue from there? [y/N] "
KEEP_KEY = "the server disagrees; Ctrl-K: keep the offline text"
OFFLINE_KEY = "Tab: go offline"
ONLINE_KEY = "Tab: go online"
STAY_OFFLINE_KEY = "Tab: stay offline"
ASK_ON_KEY = "Enter: leave this answer as it is, to ask the next question"
WORDS_ALONE = "({words} written offline{limit}; {later})"
ONE_WORD = "1 word"
WORDS = "{} words"
LIMIT_REACHED = ", the limit is reached"
CHECKED_LATER = "the server checks this when it is back"
STAYS = "this stays as it is"
STARTING_LOCAL = "starting a server on this device"
ONCE_OFFLINE = "moa-chat: offline: {}; the answer continues when the server is back, Ctrl-C stops it"
ONCE_ONLINE = f"moa-chat: {ONLINE_AGAIN}"
ONCE_CUT = "moa-chat: {}"
NO_JSON = "the answer is not complete JSON: {}"

# -- the window: link and connection -----------------------------------------------------------

CONNECTION = "Connection"
CONNECTING = "Connecting…"
CONNECTING_STATE = "connecting"
NOT_CONNECTED = "not connected"
LOCAL_SERVER = "a server on this device"
FETCHING = "Fetching the small model, once: {:.1f} of {:.1f} MB"
PREPARING = "Preparing this device for the model, once: {}"
STAGE_NEXT = "{}, then {}"
STAGE_LEFT = "; {:.0f} s to go"
FIRST_STAGE = "reading the model"
STARTING = "A server is starting on this device."
STARTING_FIRST = STARTING + " The first start fetches its model, which may take minutes."
PROGRESS = "Progress"
IN_PROGRESS = "In progress"
SECONDS = "{} ({:.0f} s)"
TRY_AGAIN = "Try again"
CANCEL = "Cancel"

WELCOME = "Welcome"
WELCOME_HEADLINE = "Welcome to moa-chat"
WELCOME_LEAD = (
    "A small model on this device drafts; a large model on a server checks every word. "
    "The answer continues when the network fails."
)
START_CHATTING = "Start chatting"
SERVER = "Server"
ABOUT_SERVER = "It has the large model, which checks what this device writes."
START_LOCAL = "On this device, while the window is open"
USE_REMOTE = "At this address or link:"
DETAILS = "Details"
ADDRESS_NAME = "Address of the server"
ADDRESS_EXAMPLE = "wss://host:8765"
TOKEN = "Token"
TOKEN_NAME = "Token of the server"
TOKEN_HINT = "empty if the server needs none"
TEST_CONNECTION = "Test the connection"
CONNECTION_STATE = "State of the connection"
CONNECTED = "Connected. The server has {}; the small model matches it."

CERTIFICATE = "Certificate"
CERTIFICATE_TRUSTED = "trusted by you"
CERTIFICATE_CHECKED = "checked by the system"
CERTIFICATE_FROM_FILE = "From a file…"
CERTIFICATE_FROM_FILE_NAME = "Trust the certificate in a file"
CERTIFICATE_FILE = "Certificate of the server"
CERTIFICATE_FILES = "Certificates (*.pem *.crt)"
NO_CERTIFICATE = "{} is not a certificate in PEM format."
FORGET = "Forget"
FORGET_CERTIFICATE = "Forget the trusted certificate"
TRUST_QUESTION = (
    "The server signed its certificate itself. This is usual for your own server, but does not "
    "prove the server's identity. Compare this fingerprint (SHA-256) with the one on the server:"
)
TRUST_COMMAND = "On the server: openssl x509 -noout -fingerprint -sha256 -in cert.pem"
FINGERPRINT = "Fingerprint of the certificate"
TRUST = "They are the same: trust this certificate"

BUNDLE = "Small model"
BUNDLE_CACHED = "The default, on this device."
BUNDLE_MISSING = "The default, made at the first start."
BUNDLE_OF_SERVER = "From the server."
BUNDLE_FOLDER = "Folder of the small model"
CHOOSE_FOLDER = "Choose a folder…"
USE_DEFAULT = "Use the default"

# -- the window: the conversation --------------------------------------------------------------

CONVERSATION = "Conversation"
EMPTY_CHAT = "Ask something. The answer continues without a network, too."
MODEL_ANSWERS = "{}, {}"
MODEL_HERE = "{}: fetched and prepared at the first start"
TRIAL_TARGET = "smollm2-135m-instruct"
TRIAL_MODEL = "A small model for first tries: moa-serve --model NAME runs a better one."
EXAMPLES = (
    "Why does the moon have phases? Explain in three sentences.",
    "Write a short poem about a train in a tunnel.",
    "Give me three ideas for a quick dinner.",
)
SHOW_EARLIER = "Show earlier messages"
MESSAGE = "Message"
ASK_ANYTHING = "Ask anything"
SEND = "Send"
SEND_KEY = "Send (Enter)"
STOP_KEY = "Stop (Esc)"
MESSAGE_TEXT = "Text of a message"
YOUR_MESSAGE = "Your message"
COPY = "Copy"
COPY_MESSAGE = "Copy your message"
EDIT = "Edit"
EDIT_MESSAGE = "Edit your message"
EDIT_AND_SEND = "Edit and send again"
EDIT_REPLACES = "Everything below this message is replaced."
ANSWER_STATE = "State of the answer"
ANSWER_AGAIN = "Answer again"
AGAIN = "Again"
CONTINUE = "Continue"
CONTINUE_ANSWER = "Continue this answer, which was cut off"
COPY_ANSWER = "Copy the answer as Markdown"
CODE = "Code"
CODE_LANGUAGE = "code"
COPY_CODE = "Copy this code"
LEGEND = "Colours of the text"
NOTICE = "Notice"
CLOSE_NOTICE = "Close this notice"
UNDO = "Undo"
DISAGREES = "The server disagrees from here"
BOTH_VERSIONS = "Both versions"
VERSIONS = "Mine: “{}”\nServer: “{}”"
ALWAYS = "Always do this"
USE_THEIRS = "Use the server's version"
KEEP_MINE = "Keep mine"
CONTEXT = "Context of the model"
CONTEXT_FILLED = "Context {} % full"
CONTEXT_FULL = "The chat fills {} % of the model's context: begin a new chat soon"
CONTEXT_TOKENS = "{:,} of the model's {:,} tokens (pieces of words) are used."
FIND = "Find in this chat"
FIND_PREVIOUS = "Previous match"
FIND_NEXT = "Next match"
FIND_CLOSE = "Close the search"
FOUND = "Matches"
FOUND_PLACE = "{} of {}"
NOT_FOUND = "not found"

# -- the window: header, list of chats and commands --------------------------------------------

TITLE = "Title of the chat: {}"
MODEL = "Model: {}"
OFFLINE = "Offline"
COLOURS = "Origins"
FIGURES = "Figures"
SAVE = "Save"
CHATS = "Chats"
NEW = "New"
SEARCH_CHATS = "Search chats"
NO_CHATS_YET = "No chats yet"
NO_CHAT_FOUND = "No chat contains these words"
RENAME = "Rename"
DELETE = "Delete"
SAVE_AS = "Save this chat"
SAVE_KINDS = "Markdown (*.md);;JSON (*.json)"
SAVED_AS = "Saved as {}."
SAVE_FAILED = "The chat could not be saved as {}: {}."
HISTORY_DAMAGED = "The history was damaged; a new one has begun. The old file: {}"
ALREADY_OPEN = "moa-chat is already open with this profile."
ALREADY_OPEN_WHY = "Two windows would write over each other's settings and chats."
SHOW_OPEN = "Show the open window"
CLOSE = "Close"
OPEN_HANGS = "The open window does not respond. End the program moa-chat, and start it again."

COMMAND_SEARCH = "Search the chats"
COMMAND_LIST = "Go to the list of chats"
COMMAND_WRITE = "Write a message"
COMMAND_FIND_NEXT = "Next match"
COMMAND_FIND_PREVIOUS = "Previous match"
COMMAND_ESCAPE = "Close the search, or stop the answer"
COMMAND_CONTINUE = "Continue an answer that was cut off"
COMMAND_EDIT = "Edit the last question"
COMMAND_COPY = "Copy the last answer"
COMMAND_JUMP = "Jump to the newest message"
COMMAND_SAVE = "Save this chat as a file"
COMMAND_OFFLINE = "Work offline"
COMMAND_ORIGINS = "Colour the text by origin"
COMMAND_FIGURES = "Show figures of the answer"
COMMAND_SIDEBAR = "Show or hide the chats"
COMMAND_LARGER = "Larger text"
COMMAND_SMALLER = "Smaller text"
COMMAND_QUIT = "Quit"
KEYBOARD = "Keyboard"
#: Keys that belong to no command.
OTHER_KEYS = (
    ("Enter", "Send"),
    ("Shift+Enter", "New line"),
    ("PgUp, PgDown", "Scroll the conversation"),
    ("F2, Del", "Rename or delete the chat chosen in the list"),
    ("Tab", "Next button or field"),
)

# -- the window: settings ----------------------------------------------------------------------

SETTINGS = "Settings"
SETTINGS_PARTS = "Parts of the settings"
CHAT_SETTINGS = "Chat settings"
ANSWERS = "Answers"
ABOUT_ANSWERS = "New chats begin with these settings. A chat in progress has settings of its own."
ABOUT_CHAT_SETTINGS = "These settings apply from the next question on. For new chats, see Settings, “Answers”."
WHEN_DISAGREES = "When the server disagrees"
WHEN_DISAGREES_WITH = "with text that this device wrote offline, in all chats"
DISAGREEMENTS = {"ask": "Ask", "theirs": "Use the server's version", "mine": "Keep what this device wrote"}
APPEARANCE = "Appearance"
THEME = "Theme"
THEMES = {"system": "System", "light": "Light", "dark": "Dark"}
ZOOM = "Text size"
INSTRUCTIONS = "Instructions"
INSTRUCTIONS_NAME = "Instructions to the model"
NO_INSTRUCTIONS = "none"
LONGEST_ANSWER = "Longest answer"
TOKENS = "{} tokens"
FORM_OF_ANSWERS = "Format"
AS_JSON = "Answer as JSON"
SCHEMA = "JSON schema"
SCHEMA_NAME = "JSON schema of the answers"
ANY_OBJECT = "none: any JSON object"
CHOICE_OF_WORDS = "Choice of words"
RECOMMENDED = "As the model's authors recommend"
RECOMMENDED_VALUES = "Temperature {:g}, top-p {:g}: with these values, small models repeat less."
NO_RECOMMENDATION = "The authors recommend no values: the likeliest word is chosen."
TEMPERATURE = "Temperature"
TEMPERATURE_NAME = "Temperature: 0 always takes the likeliest word"
TOP_P = "Top-p"
TOP_P_NAME = "Top-p: 1 keeps every word"

# -- the window: figures of an answer, each with what it means -----------------------------------

FIGURES_NAME = "Figures of the answer"
FIGURES_LATER = "Figures come with the next answer."
SPEED = ("{:.1f} words a second", "after the first ones")
FIRST_WORD = ("first word after {:.2f} s", "counted from “Send”")
DRAFTED = ("{} of {} tokens drafted by {} were used", "the others were wrong or too late, and did not count")
THIS_DEVICE = "this device"
THE_SERVER = "the server"
PASSES = ("{} tokens in {} passes of the model", "without drafts: one pass for each token; τ = {}")
STREAMED = ("new text every {:.0f} ms", "the server drafts now, and continues on its own")
ROUND_TRIP = ("a reply from the server after {:.0f} ms", "network and model together")
NUMBERS = ("number type of the model: {}", "other types of numbers round differently")
TRAFFIC = ("{} sent, {} received", "in total for this answer")
ROUND_TIMES = "Time of a round"
ROUND_TOKENS = "Tokens confirmed in a round"
CHART_EMPTY = "none yet"
CHART_VALUES = "now {}, at most {}"


def origin_sentence(origin: Origin, committed: bool) -> str:
    return (_CONFIRMED if committed else _UNCONFIRMED)[origin]


def reading_words(tokens: int) -> str:
    """Return why an answer has no words yet: the target reads the prompt, with ``tokens`` new tokens (0: unknown)."""
    return READING_TOKENS.format(tokens) if tokens else READING


def model_words(name: str, parameters: int) -> str:
    """Return a model's name and size; ``parameters`` is 0 if that is not known.

    >>> model_words("qwen3-0.6b", 596_049_920), model_words("llama-3.1-8b-instruct", 8_030_261_248)
    ('qwen3-0.6b (596M parameters)', 'llama-3.1-8b-instruct (8.0B parameters)')
    """
    if not parameters:
        return name
    size = f"{parameters / 1e9:.1f}B" if parameters >= 1e9 else f"{parameters / 1e6:.3g}M"
    return f"{name} ({size} parameters)"


def stage_words(said: Mapping[str, Any]) -> str:
    """Return a line of :class:`moa_export.progress.JsonProgress` in words."""
    following, stage = str(said.get("next", "")), str(said["stage"])
    left = STAGE_LEFT.format(max(1, said["left_s"])) if said.get("left_s") else ""
    return STAGE_NEXT.format(stage, following) + left if following else stage


def corrected_sentence(words: int) -> str:
    return CORRECTED_WORD if words == 1 else CORRECTED_WORDS.format(words)


def excerpt(text: str, most: int) -> str:
    """Shorten a text to one line of at most ``most`` characters and an ellipsis, cut between words.

    >>> excerpt("one two\\nthree", 10)
    'one two…'
    """
    line = " ".join(text.split())
    if len(line) <= most:
        return line
    whole = line[: most + 1].rpartition(" ")[0]
    return (whole or line[:most]) + "…"


def link_words(link: LinkChanged, retry_in_s: float | None, *, wanted_offline: bool, slow: bool = False) -> str:
    """Return the state of the link in words; ``retry_in_s`` is the time left until the next attempt."""
    if wanted_offline:
        return "working offline"
    if link.status is LinkStatus.ONLINE:
        return "slow" if slow or link.late else "online"
    if link.status is LinkStatus.RECONNECTING:
        return "reconnecting"
    return f"reconnecting in {max(1, round(retry_in_s))} s" if retry_in_s else "no connection"


def as_sentence(text: str) -> str:
    """Return a message of the runtime as a sentence for users: a capital letter, a full stop, "server" for "verifier".

    >>> as_sentence("the verifier is away")
    'The server is away.'
    """
    text = _VERIFIER.sub(lambda found: "Server" if found[0].istitle() else "server", text.strip())
    ending = "" if text.endswith((".", "!", "?", "…")) else "."
    return text[:1].upper() + text[1:] + ending
