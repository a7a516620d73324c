/** Texts and tokens are those of Python. */

import assert from "node:assert/strict";
import { test } from "node:test";

import { afterReasoning } from "../src/grammar/after_reasoning.js";
import {
  ChatTemplateError,
  ChatTokenizer,
  GREEDY,
  TextStream,
  splitReasoning,
  type Grammar,
  type Message,
} from "../src/index.js";
import type { Thought } from "../src/reasoning.js";
import { strftime } from "../src/strftime.js";
import { read, readJson } from "./vectors.js";

interface Case {
  readonly text: string;
  readonly tokens: number[];
  readonly skip_special_tokens: boolean;
  readonly template?: string;
  readonly messages: Message[];
  readonly add_generation_prompt: boolean;
  readonly committed: number[];
  readonly history: Message[];
  readonly turns: Message[];
  readonly added: object[];
  readonly pre_tokenizer: object;
  readonly thinking: boolean | null;
  readonly knows: boolean;
  readonly begins: boolean;
  readonly begun: boolean;
  readonly final: boolean;
  readonly reasoning: string;
  readonly answer: string;
  readonly grammar: Grammar;
  readonly told: [string, number, string][] & Grammar;
  readonly thought: Thought;
  readonly raises?: string;
}

const FILE = readJson("texts/tokenizer.json") as { readonly added_tokens: object[] };
const SPECIAL = { bos_token: "<|im_start|>", eos_token: "<|im_end|>" };

/** Our library for templates forgets what the same turn of a loop wrote before it. */
const UNLIKE = "{% break %}";

function tokenizerOf(template = ""): ChatTokenizer {
  return new ChatTokenizer(FILE, template, SPECIAL, [2]);
}

function part(name: string, check: (given: Case, where: string) => void): void {
  test(`texts: ${name}`, () => {
    read<Case>(`texts/${name}`).forEach((given, number) => {
      if (!given.template?.includes(UNLIKE)) check(given, `${name}, case ${number}`);
    });
  });
}

/** What `make` makes, or the name of what it throws. */
function outcome<T>(make: () => T): T | string {
  try {
    return make();
  } catch (error) {
    if (error instanceof ChatTemplateError) return `raises ${error.name}`;
    throw error;
  }
}

function expected<T>(given: Case, value: T): T | string {
  return given.raises ? `raises ${given.raises}` : value;
}

const PLAIN = tokenizerOf();

part("encodings", (given, where) => {
  const tokenizer = new ChatTokenizer({ ...FILE, pre_tokenizer: given.pre_tokenizer }, "", SPECIAL, [2]);
  assert.deepEqual(tokenizer.encode(given.text), given.tokens, `${where}: ${JSON.stringify(given.text)}`);
});

test("texts: a pattern may escape a hyphen, which JavaScript takes in classes alone", () => {
  const pieces = [
    { type: "Split", pattern: { Regex: "[,\\-]+|b\\-" }, behavior: "Isolated", invert: false },
    { type: "ByteLevel", add_prefix_space: false, use_regex: false },
  ];
  const tokenizer = new ChatTokenizer({ ...FILE, pre_tokenizer: { type: "Sequence", pretokenizers: pieces } }, "", SPECIAL, [2]);
  assert.equal(tokenizer.decode(tokenizer.encode("a--, b-c"), false), "a--, b-c");
});

part("decodings", (given, where) => {
  assert.equal(PLAIN.decode(given.tokens, given.skip_special_tokens), given.text, where);
});

part("templates", (given, where) => {
  const tokenizer = tokenizerOf(given.template);
  const text = outcome(() => tokenizer.renderChat(given.messages, given.add_generation_prompt));
  assert.deepEqual(text, expected(given, given.text), where);
});

for (const name of ["chats", "specials"]) {
  part(name, (given, where) => {
    const tokenizer = tokenizerOf(given.template);
    const tokens = outcome(() => tokenizer.encodeChat(given.messages, given.add_generation_prompt));
    assert.deepEqual(tokens, expected(given, given.tokens), where);
  });
}

part("turns", (given, where) => {
  const tokenizer = tokenizerOf(given.template);
  const tokens = outcome(() => tokenizer.continueTurns(given.committed, given.history, given.turns));
  assert.deepEqual(tokens, expected(given, given.tokens), where);
});

part("thinking", (given, where) => {
  const { begins, history, knows, text, turns } = given;
  const tokenizer = tokenizerOf(given.template);
  const thinking = given.thinking ?? undefined;
  assert.equal(tokenizer.knowsThinking, knows, where);
  assert.equal(tokenizer.beginsReasoning(thinking), begins, where);
  assert.equal(tokenizer.renderChat([...history, ...turns], true, thinking), text, where);
  const tokens = outcome(() => tokenizer.continueTurns([40], history, turns, thinking));
  assert.deepEqual(tokens, expected(given, given.tokens), where);
});

part("reasoning", ({ answer, begun, final, reasoning, text }, where) => {
  assert.deepEqual(splitReasoning(text, begun, final), { reasoning, answer }, where);
});

/** A grammar, with its schema as JSON: that may be spelled otherwise. */
function meaningOf({ kind, text }: Grammar): unknown[] {
  const [rules, schema] = text.split(" %json ");
  return [kind, rules, schema === undefined ? undefined : JSON.parse(schema)];
}

part("grammars", ({ added, grammar, template, thinking, thought, told }, where) => {
  const tokenizer = new ChatTokenizer({ ...FILE, added_tokens: [...FILE.added_tokens, ...added] }, template!, SPECIAL, [2]);
  assert.equal(tokenizer.thought(thinking ?? undefined), thought, where);
  const { grammar: found } = afterReasoning({ ...GREEDY, grammar }, thought, tokenizer.specialIds);
  assert.deepEqual(meaningOf(found!), meaningOf(told), where);
});

function checkStream(tokenizer: ChatTokenizer, { told }: Case, where: string): void {
  const stream = new TextStream(tokenizer);
  for (const [what, number, piece] of told) {
    if (what === "truncate") stream.truncate(number);
    else assert.equal(what === "push" ? stream.push(number) : stream.finish(), piece, where);
  }
}

part("streams", (given, where) => checkStream(PLAIN, given, where));

part("controls", (given, where) => {
  const file = { ...FILE, added_tokens: [...FILE.added_tokens, ...given.added] };
  const tokenizer = new ChatTokenizer(file, given.template!, SPECIAL, [2]);
  checkStream(tokenizer, given, where);
  assert.deepEqual(tokenizer.encodeChat(given.messages), given.tokens, where);
});

test("texts: a word of a text that is pasted may be very long", () => {
  const words = ["abc".repeat(70_000), " ".repeat(200_000), "\u4e2d\u6587".repeat(50_000)];
  for (const word of words) assert.equal(PLAIN.decode(PLAIN.encode(word)), word); // pair by pair it would take hours
});

test("texts: a date that a template asks for is in English", () => {
  const template = "{% if strftime_now is defined %}{{ strftime_now('%d %b %Y') }}{% endif %}";
  const date = new ChatTokenizer(readJson("texts/tokenizer.json"), template, {}, [2]).renderChat([]);
  assert.match(date, /^\d\d (Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec) \d{4}$/);
  const written = strftime(new Date(2026, 10, 8, 0, 5, 9), "%A %a %B %b %d %m %y %I:%M:%S %p %H %% %Q");
  assert.equal(written, "Sunday Sun November Nov 08 11 26 12:05:09 AM 00 % %Q");
});
