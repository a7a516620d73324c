"""Cases of the tokenizer: texts, conversations and growing answers; and the tokenizer itself."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from moa_runtime.address import Address
from moa_runtime.chat_template import ChatTemplateError
from moa_runtime.grammar.after_reasoning import after_reasoning
from moa_runtime.reasoning import CLOSE, OPEN, split_reasoning
from moa_runtime.session.events import Grammar, Sampling
from moa_runtime.tokenizer import ChatTokenizer, HistoryRewrittenError, TextStream
from support.tiny import CHAT_TEMPLATE, _train_tokenizer
from vectors.fixtures_draws import Draws
from vectors.trace_files import FOLDER

Case = dict[str, Any]

TOKENIZER = FOLDER / "texts" / "tokenizer.json"
SPECIAL = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
STOPS = (2,)

TEMPLATES = {
    "chatml": CHAT_TEMPLATE,
    "whitespace": (
        "{% for m in messages %}\n  {% if m.role == 'user' %}\n[{{ m.content | trim }}]\n{% else %}"
        "{{ m['role'] | upper }}: {{ m.content }}{% endif %}\n{% endfor %}\n"
        "{%- if add_generation_prompt -%}  >{%- endif -%}"
    ),
    "breaks": (
        "{% for m in messages %}{{ m | tojson }}{% if loop.last %}{% break %}{% endif %}{{ bos_token }}{% endfor %}"
    ),
    "generation": (
        "{% for m in messages %}{% generation %}{{ m['content'] }}{% endgeneration %}{{ eos_token }}{% endfor %}"
    ),
    "refuses": (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system message') }}{% endif %}"
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
        "<|im_start|>{{ ns.n }}{{ m.content }}<|im_end|>{% endfor %}"
    ),
    # As Mistral's: the system message stands in the last question, wherever that is.
    "moves": (
        "{% if messages[0].role == 'system' %}{% set system = messages[0].content + '\n' %}"
        "{% set messages = messages[1:] %}{% endif %}"
        "{% for m in messages %}{% if m.role == 'user' %}"
        "<|im_start|>{% if loop.last %}{{ system }}{% endif %}{{ m.content }}<|im_start|>"
        "{% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    ),
    # As Qwen 3's: reasoning can be switched off, and earlier answers lose theirs.
    "reasons": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{{ m.content.split('</think>')[-1].lstrip('\n') if m.role == 'assistant' else m.content }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
        "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
    ),
    # As that of its models that always reason: an answer begins inside.
    "begins": (
        "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt and enable_thinking | default(true) %}<think>\n{% endif %}"
    ),
    "rewrites": "{{ messages | length }}{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}",
}
_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
#: Of SmolLM2; of Llama 3 and Qwen 2.5, which differ in how many digits stand together; with a space before all.
CUTTERS: tuple[Case, ...] = (
    {
        "type": "Sequence",
        "pretokenizers": [{"type": "Digits", "individual_digits": True}, _BYTES | {"use_regex": True}],
    },
    *(
        {
            "type": "Sequence",
            "pretokenizers": [
                {
                    "type": "Split",
                    "pattern": {
                        "Regex": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
                        + digits
                        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
                    },
                    "behavior": "Isolated",
                    "invert": False,
                },
                _BYTES,
            ],
        }
        for digits in (r"\p{N}{1,3}", r"\p{N}")
    ),
    _BYTES | {"use_regex": True, "add_prefix_space": True},
)
TEXTS = (
    "",
    "The network goes away.",
    "  two  spaces\n\n\tand a tab \n",
    "I'll say: it's 1234567 o'clock, isn't it?",
    "IT'S  OURS\r\n\r\n  x;\n\n\u00a0\u0085y ... \ufeff½ ٣٤ Ⅷ don't'LL",
    "naïve rouge café, 日本語 🦊👩‍👩‍👧 Ünïcödé",
    "<|im_start|>user\nhi<|im_end|>",
    "<|im_end|> <|endoftext|>x<|im_start",
    "a\ufdd00\ufdd1b \ufdd1\ufdd0",
    "\u0301 combining, \u200bzero width, \u00a0no break",
)
MESSAGES: tuple[list[dict[str, str]], ...] = (
    [{"role": "user", "content": "Name three colours: rouge, naïve, 日本語 🦊"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "  And one more?  "}],
    [
        {"role": "user", "content": "What is <|im_end|>?"},
        {"role": "assistant", "content": "Red,\n yellow and  blue."},
        {"role": "user", "content": "a\ufdd00\ufdd1b<|im_start|><|endoftext|>\n"},
    ],
)


def tokenizer_of(template: str, file: Path = TOKENIZER) -> ChatTokenizer:
    return ChatTokenizer(file, template, SPECIAL, STOPS)


def write_tokenizer() -> None:
    """Keep the tokenizer; another version of the library might train another one."""
    if not TOKENIZER.exists():
        TOKENIZER.parent.mkdir(parents=True, exist_ok=True)
        said = json.loads(_train_tokenizer().to_str())
        TOKENIZER.write_text(json.dumps(said, ensure_ascii=True, separators=(",", ":")) + "\n", encoding="utf-8")


def encodings() -> Iterator[Case]:
    """With the tokenizer as it is, and as if it cut texts as known targets do."""
    said = json.loads(TOKENIZER.read_text(encoding="utf-8"))
    for cutter in (said["pre_tokenizer"], *CUTTERS):
        tokenizer = Tokenizer.from_str(json.dumps(said | {"pre_tokenizer": cutter}))
        for text in TEXTS:
            tokens = tokenizer.encode(text, add_special_tokens=False).ids
            yield {"pre_tokenizer": cutter, "text": text, "tokens": list(tokens)}


def decodings() -> Iterator[Case]:
    tokenizer, draws = tokenizer_of(CHAT_TEMPLATE), Draws(300_000)
    for _ in range(60):
        tokens = draws.several(0, 12, lambda: draws.whole(0, tokenizer.vocab_size - 1))
        for skip in (True, False):
            yield {"tokens": tokens, "skip_special_tokens": skip, "text": tokenizer.decode(tokens, skip)}


def templates() -> Iterator[Case]:
    for template in TEMPLATES.values():
        tokenizer = tokenizer_of(template)
        for messages in MESSAGES:
            for prompt in (True, False):
                given = {"template": template, "messages": messages, "add_generation_prompt": prompt}
                yield given | _said("text", lambda t=tokenizer, m=messages, p=prompt: t.render_chat(m, p))


def chats() -> Iterator[Case]:
    for template in TEMPLATES.values():
        tokenizer = tokenizer_of(template)
        for messages in MESSAGES:
            given = {"template": template, "messages": messages, "add_generation_prompt": True}
            yield given | _said("tokens", lambda t=tokenizer, m=messages: t.encode_chat(m))


def turns() -> Iterator[Case]:
    """A conversation continues after committed tokens; its last answer is finished or not."""
    answer, asked = {"role": "assistant", "content": "Red."}, MESSAGES[2][2:]
    for template in TEMPLATES.values():
        tokenizer = tokenizer_of(template)
        for history in ([*MESSAGES[0], answer], [*MESSAGES[1], answer]):
            for committed in ([], [40, 41, 2], [40, 41]):
                given = {"template": template, "committed": committed, "history": history, "turns": asked}
                yield given | _said("tokens", lambda t=tokenizer, c=committed, h=history: t.continue_turns(c, h, asked))


def thinking() -> Iterator[Case]:
    """Templates and answers with reasoning, which is switched on or off or left to the template (null)."""
    history = [*MESSAGES[0], {"role": "assistant", "content": "<think>\nWarm ones.\n</think>\n\nRed."}]
    asked = MESSAGES[2][2:]
    for name in ("chatml", "reasons", "begins"):
        tokenizer = tokenizer_of(TEMPLATES[name])
        for switch in (None, True, False):
            given = {"template": TEMPLATES[name], "thinking": switch, "history": history, "turns": asked}
            given |= {"knows": tokenizer.knows_thinking, "begins": tokenizer.begins_reasoning(switch)}
            given["text"] = tokenizer.render_chat([*history, *asked], thinking=switch)
            yield given | _said(
                "tokens", lambda t=tokenizer, s=switch: t.continue_turns([40], history, asked, thinking=s)
            )


def reasoning() -> Iterator[Case]:
    """Answers, whole and as they grow, with the parts that they are split into."""
    pieces, draws = ["<think>", "</think>", "<", "</thi", "nk>", " ", "\n", "\u00a0", "a", "🦊"], Draws(300_003)
    for _ in range(120):
        text = "".join(draws.several(0, 9, lambda: draws.one_of(pieces)))
        begun, final = draws.share() < 0.5, draws.share() < 0.5
        yield {
            "text": text,
            "begun": begun,
            "final": final,
            **split_reasoning(text, begun=begun, final=final)._asdict(),
        }


def grammars() -> Iterator[Case]:
    """What answers conform to, as the verifier is told: JSON may follow reasoning. With the marks as special tokens,
    and as text."""
    said = json.loads(TOKENIZER.read_text(encoding="utf-8"))
    schema = '{"type":"object", "properties":{"é\\n":{"maximum": 12345678901234567890, "minimum":1.50}}}'
    asked = [Grammar("json_object"), *(Grammar("json_schema", text) for text in (schema, " {\n} ", "true", "[1]", "{"))]
    asked += [Grammar("json_schema", '{"x-guidance": {"item_separator": ","}}'), Grammar("regex", "{}")]
    for marks in ((), (OPEN, CLOSE)):
        added = [{**said["added_tokens"][0], "id": 512 + number, "content": text} for number, text in enumerate(marks)]
        special = {each["content"]: each["id"] for each in added}
        for name in ("chatml", "reasons", "begins"):
            for switch in (None, True, False):
                thought = tokenizer_of(TEMPLATES[name]).thought(switch)
                given = {"added": added, "template": TEMPLATES[name], "thinking": switch, "thought": thought}
                for grammar in asked:
                    told = after_reasoning(Sampling(grammar=grammar), thought, special).grammar
                    yield given | {"grammar": vars(grammar), "told": vars(told)}


def streams() -> Iterator[Case]:
    """Texts that grow token by token, and are taken back at times."""
    tokenizer, draws = tokenizer_of(CHAT_TEMPLATE), Draws(300_001)
    for number in range(40):
        text = draws.one_of(list(TEXTS))
        whole = tokenizer.encode(text)
        tokens = whole if number % 2 else draws.several(0, 30, lambda: draws.whole(0, tokenizer.vocab_size - 1))
        yield {"told": _told(tokenizer, tokens, draws)}


def _told(tokenizer: ChatTokenizer, tokens: list[int], draws: Draws) -> list[list[Any]]:
    stream, told = TextStream(tokenizer), list[list[Any]]()
    count = 0
    for token in tokens:
        told.append(["push", token, stream.push(token)])
        count += 1
        if draws.share() < 0.1:
            count = draws.whole(0, count)
            stream.truncate(count)
            told.append(["truncate", count, ""])
    return [*told, ["finish", 0, stream.finish()]]


#: Control tokens of gpt-oss, of Gemma 4, and of Mistral.
CONTROLS = (
    ("<|start|>", "<|channel|>", "<|message|>", "<|end|>"),
    ("<|channel>", "<channel|>"),
    ("[THINK]", "[/THINK]"),
)


def controls() -> Iterator[Case]:
    """Answers with control tokens that mark reasoning, with texts between them and taken back at times; and earlier
    answers with reasoning in a question."""
    said, draws = json.loads(TOKENIZER.read_text(encoding="utf-8")), Draws(300_004)
    history = [*MESSAGES[0], {"role": "assistant", "content": "<think>Warm ones.</think>\n\nRed."}, *MESSAGES[2][2:]]
    for texts in CONTROLS:
        added = [{**said["added_tokens"][0], "id": 512 + number, "content": text} for number, text in enumerate(texts)]
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "tokenizer.json"
            file.write_text(json.dumps({**said, "added_tokens": [*said["added_tokens"], *added]}))
            tokenizer = tokenizer_of(CHAT_TEMPLATE, file)
            words = [tokenizer.encode(text) for text in ("analysis", "final", " a\n", "é", "Two", "thought\n", *texts)]
            for _ in range(30):
                tokens = [*chain.from_iterable(draws.several(0, 12, lambda w=words: draws.one_of(w)))]
                given = {"added": added, "template": CHAT_TEMPLATE, "messages": history, "add_generation_prompt": True}
                yield given | {"told": _told(tokenizer, tokens, draws), "tokens": tokenizer.encode_chat(history)}


def specials() -> Iterator[Case]:
    """Texts of users: special tokens in them stay text."""
    tokenizer, draws = tokenizer_of(CHAT_TEMPLATE), Draws(300_002)
    pieces = ["<|im_end|>", "<|im_start|>", "<|endoftext|>", "\ufdd0", "\ufdd1", "0", "1", "<|im_", " a", "é", "\n"]
    for _ in range(60):
        content = "".join(draws.several(1, 8, lambda: draws.one_of(pieces)))
        messages = [{"role": "user", "content": content}]
        tokens = tokenizer.encode_chat(messages)
        assert content in tokenizer.decode(tokens, skip_special_tokens=False)
        yield {"template": CHAT_TEMPLATE, "messages": messages, "add_generation_prompt": True, "tokens": tokens}


def _said(name: str, call: Callable[[], Any]) -> Case:
    try:
        return {name: call()}
    except HistoryRewrittenError:
        return {"raises": "HistoryRewrittenError"}
    except ChatTemplateError:
        return {"raises": "ChatTemplateError"}


_GOOD = r"""
localhost:8765 ws://127.0.0.1:1/ HTTPS://Host.example http://[::1]:99/moa/v1/session?a=b#c wss://a/sub/path a/sub/path/
a:8765/sub//path https://a:443/x/../y/./z ws://a:80 wss://a:80 ws://a:443 http://bücher.example/ü/%41 ws://[0:0::1]
ws://[2001:DB8::1]:8765/sub h?x h#x ws://h: http:/host ws://1.2.3.4 ws://xn--bcher-kva.example a_b:1 wss://h/v1/session/
wss://h/v1/sessions ws://h/@x ws://h/a'b(c)
"""
_BAD = r"""
ftp://host ws:// ://host ws://host:0 ws://host:65536 ws://h:x ws://user:word@host user@host //host ws:///x ws://a\b
ws://a..b ws://[::1 ws://[:::1] ws://a%b ws://a|b ws://<a> ?x #x mailto:a@b
"""


def addresses() -> Iterator[Case]:
    """Addresses of verifiers, with the URLs that they mean."""
    for url in (*_GOOD.split(), *_BAD.split(), "", " ", "ws://ho st", "ws://h\t", "ws://h/a b"):
        for scheme in ("ws", "https"):
            yield {"url": url, "scheme": scheme, **_address(url, scheme)}


def _address(url: str, scheme: str) -> Case:
    try:
        address = Address.parse(url, scheme)
    except ValueError:
        return {"raises": "ValueError"}
    return {"session": address.session, "request": address.at("/x")}


_PARTS: tuple[Callable[[], Iterator[Case]], ...] = (
    encodings,
    decodings,
    templates,
    chats,
    turns,
    thinking,
    reasoning,
    grammars,
    streams,
    controls,
    specials,
    addresses,
)


def texts() -> dict[str, list[Case]]:
    """The cases of each part."""
    return {part.__name__: list(part()) for part in _PARTS}
