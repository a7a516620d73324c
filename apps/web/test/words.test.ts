/** What the page says. */

import assert from "node:assert/strict";
import { test } from "node:test";

import { message, parted, titleOf } from "../src/message.js";
import { withConfirmedOrigins } from "../src/streaming_answer.js";
import { answersWords, asSentence, correctedSentence, linkWords, megabytes, modelWords, remarksOf, unconfirmedWords } from "../src/strings.js";
import { STATISTICS } from "./fake_talk.js";
import { pieces } from "./spans.js";

test("the link in words", () => {
  const link = { event: "LinkChanged", detail: "", retryInS: null, late: false } as const;
  assert.equal(linkWords({ ...link, status: "online" }, null, false), "online");
  assert.equal(linkWords({ ...link, status: "online", late: true }, null, false), "slow");
  assert.equal(linkWords({ ...link, status: "reconnecting" }, null, false), "reconnecting");
  assert.equal(linkWords({ ...link, status: "offline" }, 3.4, false), "reconnecting in 3 s");
  assert.equal(linkWords({ ...link, status: "offline" }, 0, false), "no connection");
  assert.equal(linkWords({ ...link, status: "online" }, null, true), "working offline");
});

test("a model has its size beside its name", () => {
  assert.equal(modelWords("qwen3-0.6b", 596_049_920), "qwen3-0.6b (596M parameters)");
  assert.equal(modelWords("llama-3.1-8b-instruct", 8_030_261_248), "llama-3.1-8b-instruct (8.0B parameters)");
  assert.equal(answersWords("other", 0, "host"), "other, on host");
});

test("numbers in sentences", () => {
  assert.equal(correctedSentence(1), "1 word that this device wrote was corrected.");
  assert.equal(correctedSentence(12), "12 words that this device wrote were corrected.");
  assert.equal(unconfirmedWords(2), "2 words not confirmed yet");
  assert.equal(megabytes(50_400_000), "50.4 MB");
  assert.equal(megabytes(147_900_000), "148 MB");
});

test("a message of the runtime is a sentence", () => {
  assert.equal(asSentence(" no verifier answers; start one "), "No server answers; start one.");
  assert.equal(asSentence("Verifier at wss://verifier.example/verifier."), "Server at wss://verifier.example/verifier.");
  assert.equal(asSentence("Why?"), "Why?");
});

test("the reasoning of an answer is apart, with origins and texts that were taken back", () => {
  const spans = pieces(["<think>\nTwo ", "drafted"], ["and two.\n</think>", "corrected"], ["\n\n4", "offline", false]);
  const content = spans.map(({ text }) => text).join("");
  const dropped = [{ offset: 12, text: "or" }, { offset: content.length, text: "5" }];
  const { answer, reasoning } = parted(message("assistant", content, { spans, dropped }));
  assert.equal(reasoning!.content, "Two and two.");
  assert.deepEqual(reasoning!.spans, pieces(["Two ", "drafted"], ["and two.", "corrected"]));
  assert.deepEqual(reasoning!.dropped, [{ offset: 4, text: "or" }]);
  assert.deepEqual([answer.content, answer.spans], ["4", pieces(["4", "offline", false])]);
  assert.deepEqual(answer.dropped, [{ offset: 1, text: "5" }]);

  assert.equal(parted(message("assistant", "a </think> b")).reasoning, null);
  const begun = parted(message("assistant", "a </think> b", { begun: true, finished: false }));
  assert.deepEqual([begun.reasoning?.content, begun.answer.content], ["a", "b"]);
  assert.equal(parted(message("assistant", "<think>\n\n</think>\n\nb")).reasoning, null);
  const cutOff = parted(message("assistant", "<think>a </th", { finished: false }));
  assert.deepEqual([cutOff.reasoning?.content, cutOff.answer.content], ["a", ""]);
});

test("a chat is called after its first question", () => {
  assert.equal(titleOf("  What is\nthe capital?"), "What is");
  assert.equal(titleOf("\n\n"), "New chat");
  assert.equal(titleOf("word ".repeat(20)), `${"word ".repeat(9).trim()}…`);
  assert.equal(titleOf("x".repeat(60)).length, 49);
});

test("text that the target had confirmed keeps its origin in a check", () => {
  const spans = [
    { text: "red, ", origin: "drafted", committed: true },
    { text: "green", origin: "offline", committed: false },
  ] as const;
  const written = { ...message("assistant", "red, green"), spans };
  const checked = [
    { text: "red, gre", origin: "kept", committed: true },
    { text: "y", origin: "corrected", committed: true },
  ] as const;
  assert.deepEqual(withConfirmedOrigins(checked, written), [
    spans[0],
    { text: "gre", origin: "kept", committed: true },
    checked[1],
  ]);
  assert.deepEqual(withConfirmedOrigins(checked, { ...written, spans: [] }), checked);
});

test("a remark tells of text that was written offline, not of tokens without any", () => {
  const statistics = { ...STATISTICS, offline: 1 };
  const red = { text: "red ", origin: "corrected", committed: true } as const;
  const blue = { text: "blue", origin: "offline", committed: true } as const;
  assert.equal(remarksOf(statistics, "length", [red, blue]).includes("partly written offline"), true);
  assert.equal(remarksOf(statistics, "length", [red]).includes("offline"), false);
  assert.equal(remarksOf(statistics, "length", [red, { ...blue, text: "\n" }]).includes("offline"), false);
});
