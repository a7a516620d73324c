/** Chats with a toy verifier: answers, stopping them, offline text, stores. Systems of real parts are in tests/e2e/web. */

import assert from "node:assert/strict";
import { test } from "node:test";

import { sessionIdFor, stateFromJson } from "../src/chat_store.js";
import { Chat, ChatError, ConnectError, EngineError, GREEDY, MoaError, NgramDrafter, StoreError, tau, wasted, wire } from "../src/index.js";
import type { AnswerFinished, AnswerUpdate, ChatEvent, Drafter, LoopEvent } from "../src/index.js";
import { ChatWorld, MemoryChatStore, bundle, own, tokenizer } from "./chatting.js";
import { FakeHost } from "./fake_host.js";

const QUESTION = "Name three colours.";
const LENGTH = 24;

function chat(name: string, live: (world: ChatWorld) => Promise<void>): void {
  test(`chat: ${name}`, async () => {
    MemoryChatStore.kept.clear();
    MemoryChatStore.open.clear();
    const world = new ChatWorld();
    await live(world);
    await world.end();
  });
}

function finished(events: readonly ChatEvent[]): AnswerFinished {
  const last = events.at(-1);
  assert.equal(last?.event, "AnswerFinished");
  return last as AnswerFinished;
}

function ids(answer: AnswerFinished | AnswerUpdate): number[] {
  return answer.tokens.map(({ token }) => token);
}

function offline(event: ChatEvent): number {
  const tokens = event.event === "AnswerUpdate" ? event.tokens : [];
  return tokens.filter(({ committed, origin }) => origin === "offline" && !committed).length;
}

/** Writes `hello` for ever, whatever was before: text for an outage. */
const PARROT: Drafter = {
  rows: 0,
  needsRows: false,
  stoppingRule: null,
  addRows: () => undefined,
  truncateRows: () => undefined,
  propose: (prefix, { nodes }) => {
    const word = tokenizer.encode(" hello");
    const tokens = Array.from({ length: Math.min(nodes, 4) }, (_, at) => word[(prefix.length + at) % word.length]!);
    return { tokens, parents: [...tokens.keys()], scores: tokens.map((_, at) => -0.1 * at), steps: [] };
  },
};

chat("two turns are the target's own", async (world) => {
  const talk = await world.begin();
  for (const turn of [0, 1]) {
    const events = await world.follow(talk.send(QUESTION, { maxNewTokens: LENGTH }));
    const end = finished(events);
    assert.deepEqual(ids(end), own(talk.promptTokens, LENGTH));
    assert.equal(end.text, tokenizer.decode(ids(end)));
    assert.equal(end.spans.map(({ text }) => text).join(""), end.text);
    assert.equal(end.reason, "length");
    assert.equal(end.statistics.dtype, "int4");
    assert.ok(end.statistics.tokens === LENGTH && tau(end.statistics) >= 1 && end.statistics.bytesDown > 0);
    assert.equal(wasted(end.statistics), end.statistics.drafted - end.statistics.accepted);
    assert.deepEqual(talk.messages.slice(2 * turn), [
      { role: "user", content: QUESTION },
      { role: "assistant", content: end.text },
    ]);
  }
  assert.deepEqual(talk.tokens, world.verifier.tokens);
});

chat("a link that is lost in an answer is made again, and the text is the target's", async (world) => {
  const talk = await world.begin();
  const events = talk.send(QUESTION, { maxNewTokens: LENGTH });
  const seen = await world.follow(events, (event) => {
    if (event.event === "AnswerUpdate" && event.tokens.length === 5) world.host.socket.dies();
    return event.event === "AnswerFinished";
  });
  assert.deepEqual(ids(finished(seen)), own(talk.promptTokens, LENGTH));
  const statuses = seen.filter(({ event }) => event === "LinkChanged").map((event) => "status" in event && event.status);
  assert.deepEqual(statuses, ["offline", "reconnecting", "online"]);
  assert.equal(finished(seen).statistics.reconnects, 1);
});

chat("a defect of the link reaches whoever waits: for the opening, for an answer, or next", async (world) => {
  const { host } = world;
  const serve = host.onsocket;
  const defect = (): undefined => {
    throw new RangeError("a defect");
  };
  host.answer = defect;
  host.onsocket = (socket) => socket.dies();
  const talk = await Chat.create(bundle, { url: "ws://toy" }, { drafter: new NgramDrafter([2]), host, settings: { drafting: "device" } });
  world.chat = talk;
  await assert.rejects(world.within(60, talk.open()), /^ConnectError: .* failed unexpectedly: RangeError: a defect$/);
  for (const _ of [0, 1]) {
    const refused = world.follow(talk.send(QUESTION));
    await assert.rejects(refused, (error: unknown) => error instanceof ChatError && error.cause instanceof RangeError);
  }
  host.onsocket = serve;
  await talk.workOffline(false);
  const events = talk.send(QUESTION, { maxNewTokens: LENGTH });
  const broken = world.follow(events, (event) => {
    if (event.event === "AnswerUpdate" && event.tokens.length === 5) {
      host.onsocket = (socket) => socket.dies();
      host.socket.dies();
    }
    return false;
  });
  await assert.rejects(broken, /^ChatError: .* failed unexpectedly: RangeError: a defect$/);
});

chat("a defect in a write is told, and the next write comes", async (world) => {
  const store = new MemoryChatStore("chat");
  const talk = await world.begin({ store });
  store.failure = new TypeError("a defect");
  const saved = Promise.all([talk.save(), world.host.pass(0.1).then(() => talk.save())]);
  await world.within(5, saved);
  assert.equal(talk.storeProblem, "storing it failed unexpectedly: TypeError: a defect");
  store.failure = "";
  await world.within(5, talk.save());
  assert.equal(talk.storeProblem, "");
});

chat("leaving the loop stops the answer where the target has confirmed it", async (world) => {
  const talk = await world.begin();
  const events = talk.send(QUESTION, { maxNewTokens: 200 });
  await world.follow(events, (event) => event.event === "AnswerUpdate" && event.tokens.length > 4);
  await world.host.pass(1);
  const [asked, answer] = talk.messages;
  assert.equal(asked!.content, QUESTION);
  const tokens = talk.tokens.slice(talk.promptTokens);
  assert.ok(tokens.length > 4 && tokens.length < 200);
  assert.deepEqual(tokens, own(talk.promptTokens, tokens.length));
  assert.equal(answer!.content, tokenizer.decode(tokens));
  assert.deepEqual(ids(finished(await world.follow(talk.send("Go on", { maxNewTokens: 4 })))), own(talk.promptTokens, 4));
});

chat("an answer that waits for nothing but a link is stopped at once", async (world) => {
  const talk = await world.begin({ settings: { offline: "off" } });
  await world.within(5, talk.workOffline(true));
  const events = talk.send(QUESTION);
  const first = await world.within(5, events.next());
  assert.deepEqual(first.value, { event: "Paused", reason: "off" });
  const second = events.next();
  await world.host.pass(100);
  await world.within(0.1, events.return());
  assert.deepEqual(await second, { done: true, value: undefined });
  assert.deepEqual(talk.messages, []);
});

chat("a closed chat makes no connection", async (world) => {
  const talk = await world.begin();
  const closing = talk.close();
  await talk.workOffline(false);
  await world.within(5, closing);
  await talk.workOffline(false);
  await world.host.pass(5);
  assert.equal(world.host.sockets.length, 1);
});

chat("what was written in an outage stays unconfirmed until it is checked", async (world) => {
  const talk = await world.begin({ writer: PARROT });
  await world.within(5, talk.workOffline(true));
  await world.follow(talk.send(QUESTION, { maxNewTokens: 40 }), (event) => offline(event) >= 10);
  await world.host.pass(1);
  assert.deepEqual(talk.unconfirmed.map(({ most, turn }) => [turn, most]), [[1, offlineTokens(talk)]]);
  assert.deepEqual(await world.follow(talk.check()), []); // without a verifier
  await talk.workOffline(false);
  await world.host.pass(1);
  const end = finished(await world.follow(talk.check()));
  assert.deepEqual(ids(end), own(talk.promptTokens, end.tokens.length));
  assert.deepEqual(talk.unconfirmed, []);
  assert.equal(talk.messages[1]!.content, end.text);
});

function offlineTokens(talk: Chat): number {
  return tokenizer.encode(talk.messages[1]!.content).length;
}

chat("the user is asked, and may keep what the device wrote", async (world) => {
  const talk = await world.begin({ policy: "ask", writer: PARROT });
  const events = talk.send(QUESTION, { maxNewTokens: 60 });
  let away = false;
  let back: Promise<void> | undefined;
  const seen = await world.follow(events, (event) => {
    if (event.event === "AnswerUpdate" && event.tokens.length >= 4 && !away) {
      away = true;
      void talk.workOffline(true);
    }
    if (offline(event) >= 20) back ??= talk.workOffline(false);
    return event.event === "AnswerFinished";
  });
  await back;
  const disputed = seen.find(({ event }) => event === "Disagreement");
  assert.ok(disputed?.event === "Disagreement" && disputed.droppedText.includes("hello hello"));
  assert.deepEqual(ids(finished(seen)), own(talk.promptTokens, 60));
  const again = finished(await world.follow(talk.keepMine()!));
  assert.ok(again.text.includes("hello hello"));
  assert.ok(again.statistics.kept >= 8 && again.tokens.length === 60);
  assert.equal(talk.keepMine(), undefined);
  assert.equal(talk.messages[1]!.content, again.text);
});

for (const when of ["in the loop", "after leaving it"]) {
  chat(`what the device wrote may be kept ${when}`, async (world) => {
    const talk = await world.begin({ policy: "ask", writer: PARROT });
    let away: Promise<void> | undefined;
    let back: Promise<void> | undefined;
    let disputed = false;
    const seen = await world.follow(talk.send(QUESTION, { maxNewTokens: 60 }), (event) => {
      if (event.event === "AnswerUpdate" && event.tokens.length >= 4) away ??= talk.workOffline(true);
      if (offline(event) >= 20) back ??= talk.workOffline(false);
      if (event.event === "Disagreement" && when === "in the loop") assert.equal(talk.keepMine(), undefined);
      disputed ||= event.event === "Disagreement";
      return disputed && when === "after leaving it";
    });
    await Promise.all([away, back]);
    const again = finished(when === "in the loop" ? seen : await world.follow(talk.keepMine()!));
    assert.ok(disputed && again.text.includes("hello hello") && again.statistics.kept >= 8);
    assert.deepEqual(talk.messages.map(({ content }) => content), [QUESTION, again.text]);
  });
}

chat("an answer that was cut off goes on as a larger limit would have made it", async (world) => {
  const talk = await world.begin();
  await world.follow(talk.send(QUESTION, { maxNewTokens: 10 }));
  const end = finished(await world.follow(talk.continueAnswer({ maxNewTokens: 12 })));
  assert.deepEqual(ids(end), own(talk.promptTokens, 22));
  assert.equal(talk.messages.length, 2);
});

// -- stores ------------------------------------------------------------------------------------------

/** Return what a program that is killed in the middle of an answer leaves in the store. */
async function leftInTheMiddle(world: ChatWorld): Promise<string> {
  const first = await world.begin({ store: new MemoryChatStore("a") });
  let left = "";
  await world.follow(first.send(QUESTION, { maxNewTokens: 60 }), (event) => {
    left = MemoryChatStore.kept.get("a")!;
    return event.event === "AnswerUpdate" && event.tokens.length >= 10;
  });
  await world.end();
  return left;
}

chat("the next program goes on with the answer of one that was killed", async (world) => {
  MemoryChatStore.kept.set("a", await leftInTheMiddle(world));
  const second = await world.begin({ store: new MemoryChatStore("a") });
  const end = finished(await world.follow(second.pending()!));
  assert.deepEqual(ids(end), own(second.promptTokens, 60));
  assert.equal(end.statistics.reconnects, 1);
});

chat("the writer does not begin before it is known whether there is a link", async (world) => {
  const left = await leftInTheMiddle(world);
  const { host } = world;
  const serve = host.onsocket;
  for (const [link, begins] of [["comes", undefined], ["is refused", 0.1], ["hangs", 1.2]] as const) {
    MemoryChatStore.kept.set("a", left);
    const start = host.now();
    let begun: number | undefined;
    const propose: Drafter["propose"] = (...how) => {
      begun ??= host.now() - start;
      return PARROT.propose(...how);
    };
    if (link === "is refused") host.onsocket = (socket) => socket.dies();
    else if (link === "hangs") host.onsocket = () => undefined;
    const talk = await world.begin({ store: new MemoryChatStore("a"), writer: { ...PARROT, propose } });
    if (link === "comes") finished(await world.follow(talk.pending()!));
    await host.pass(2);
    if (begins === undefined) assert.equal(begun, undefined);
    else assert.ok(begun !== undefined && begun <= begins, `${link}: ${begun} s`);
    await world.end();
    host.onsocket = serve;
  }
});

chat("closing is a cut, and the events end", async (world) => {
  const first = await world.begin({ store: new MemoryChatStore("a") });
  const events = first.send(QUESTION, { maxNewTokens: 60 });
  const seen: ChatEvent[] = [];
  const following = (async () => {
    for await (const event of events) seen.push(event);
  })();
  while (!seen.some((event) => event.event === "AnswerUpdate" && event.tokens.length >= 10)) await world.host.pass(0.01);
  await world.within(5, first.close());
  await following;
  assert.notEqual(seen.at(-1)!.event, "AnswerFinished");

  const second = await world.begin({ store: new MemoryChatStore("a") });
  assert.equal(second.storeProblem, "");
  assert.equal(second.question, QUESTION);
  assert.deepEqual(second.messages, []);
  await assert.rejects(second.send("And?").next(), ChatError);
  const rest = await world.follow(second.pending()!);
  assert.equal(rest[0]!.event, "AnswerUpdate");
  assert.ok((rest[0] as AnswerUpdate).tokens.length >= 10);
  assert.deepEqual(ids(finished(rest)), own(second.promptTokens, 60));
  assert.equal(second.pending(), undefined);
  assert.equal(second.messages.length, 2);
});

chat("the count of a Hello is in the store before it is sent", async (world) => {
  const store = new MemoryChatStore("a");
  await world.begin({ store });
  for (let count = 1; count <= 3; count++) {
    const hello = world.verifier.hellos.at(-1)!;
    assert.equal(hello.resume!.connection, BigInt(count));
    const { session } = stateFromJson(JSON.parse(MemoryChatStore.kept.get("a")!));
    assert.equal(session["connection"], count);
    const reconnecting = world.chat.networkChanged();
    await world.host.pass(0.5);
    await reconnecting;
  }
});

chat("the session id is the same for all connections and programs, and another verifier is told another", async (world) => {
  await world.begin({ store: new MemoryChatStore("a") });
  const reconnecting = world.chat.networkChanged();
  await world.host.pass(0.5);
  await reconnecting;
  await world.end();
  await world.begin({ store: new MemoryChatStore("a") });
  const state = stateFromJson(JSON.parse(MemoryChatStore.kept.get("a")!));
  assert.match(state.sessionId, /^[0-9a-f]{32}$/);
  const addresses = world.host.sockets.map(({ address }) => address);
  assert.deepEqual(addresses, Array(3).fill(`ws://toy/v1/session?x-session-id=${state.sessionId}`));
  assert.equal(sessionIdFor(state, "ws://toy"), state.sessionId);
  assert.notEqual(sessionIdFor(state, "ws://other"), state.sessionId);
});

chat("a stored chat of before session ids goes on, one with a broken id is set aside", async (world) => {
  await world.begin({ store: new MemoryChatStore("a") });
  await world.end();
  const { session_id: _, ...old } = JSON.parse(MemoryChatStore.kept.get("a")!) as Record<string, unknown>;
  MemoryChatStore.kept.set("a", JSON.stringify(old));
  const second = await world.begin({ store: new MemoryChatStore("a") });
  assert.equal(second.storeProblem, "");
  await world.end();
  MemoryChatStore.kept.set("a", JSON.stringify({ ...old, session_id: "a b" }));
  const third = await world.begin({ store: new MemoryChatStore("a") });
  assert.match(third.storeProblem, /^the stored chat is broken: "a b" is no session id, which has 32 hexadecimal digits; /);
});

chat("a second program is refused, and the first goes on", async (world) => {
  const talk = await world.begin({ store: new MemoryChatStore("a") });
  const second = Chat.create(bundle, { url: "ws://toy" }, { store: new MemoryChatStore("a"), host: world.host });
  await assert.rejects(second, StoreError);
  finished(await world.follow(talk.send(QUESTION, { maxNewTokens: 4 })));
});

for (const [name, content, sentence] of [
  ["of another version", { version: 7 }, /^the stored chat has version 7, this program reads version 1: /],
  ["that is no chat", "text", /^the stored chat is broken: a chat must be an object, not text; /],
  ["that lacks something", { version: 1, messages: [] }, /^the stored chat is broken: server is missing; /],
] as const) {
  chat(`what is stored ${name} is set aside, and the chat begins anew`, async (world) => {
    MemoryChatStore.kept.set("a", JSON.stringify(content));
    const talk = await world.begin({ store: new MemoryChatStore("a") });
    assert.match(talk.storeProblem, sentence);
    assert.match(talk.storeProblem, /; what was stored is now aside$/);
    assert.equal(MemoryChatStore.kept.get("aside"), JSON.stringify(content));
    finished(await world.follow(talk.send(QUESTION, { maxNewTokens: 4 })));
  });
}

chat("a full disk is told, and forgotten when there is room", async (world) => {
  const store = new MemoryChatStore("a");
  const talk = await world.begin({ store });
  store.failure = "no room";
  finished(await world.follow(talk.send(QUESTION, { maxNewTokens: 4 })));
  assert.equal(talk.storeProblem, "no room");
  store.failure = "";
  await world.within(1, talk.save());
  assert.equal(talk.storeProblem, "");
});

chat("it is stored about once a second, and at once where that is wanted", async (world) => {
  const store = new MemoryChatStore("a");
  const talk = await world.begin({ store });
  await world.host.pass(5);
  const before = store.writes;
  talk.restore([{ role: "system", content: "Be brief." }]);
  talk.restore([]);
  await world.host.pass(0.9);
  assert.equal(store.writes, before);
  await world.host.pass(0.2);
  assert.equal(store.writes, before + 1);
  await world.within(0.1, Promise.all([talk.save(), talk.save(), talk.save()]));
  assert.equal(store.writes, before + 2);
});

// -- refusals ----------------------------------------------------------------------------------------

chat("what no verifier can do is refused with a sentence", async (world) => {
  const talk = await world.begin();
  const refused: [object, RegExp][] = [
    [{ sampling: { temperature: -1 } }, /^a temperature is 0 or more, not -1$/],
    [{ sampling: { topP: 2 } }, /^top_p is from 0 to 1, not 2$/],
    [{ sampling: { seed: 1n << 64n } }, /^a seed is a whole number of 64 bits/],
    [{ sampling: { topK: -1 } }, /^top_k is a whole number of 32 bits, 0 or more, not -1$/],
    [{ sampling: { presencePenalty: 2.5 } }, /^presence_penalty is from -2 to 2, not 2.5$/],
    [{ sampling: { repetitionPenalty: 0 } }, /^repetition_penalty is above 0 and at most 10, not 0$/],
    [{ sampling: { logitBias: [[3, 101]] } }, /^a logit_bias gives a token a number from -100 to 100, not 3, 101$/],
    [{ maxNewTokens: -1 }, /^an answer may have 0 tokens \(no limit\) or more, a whole number, not -1$/],
  ];
  for (const [options, sentence] of refused) {
    const refuses = (error: unknown): boolean => error instanceof ChatError && sentence.test(error.message);
    await assert.rejects(talk.send(QUESTION, options).next(), refuses);
  }
  await assert.rejects(talk.send("a\ud800b").next(), /halves of characters/);
  const turns = [{ role: "user", content: "a" }];
  assert.throws(() => talk.restore(turns, [{ turn: 0, sampling: GREEDY, most: 4 }]), MoaError);
  const tooLong = /the target's context holds 512; shorten the message or begin a new chat$/;
  await assert.rejects(talk.send("word ".repeat(600)).next(), tooLong);
});

chat("a conversation that outgrows the context loses its oldest turns", async (world) => {
  const talk = await world.begin({ overflow: "trim" });
  const system = { role: "system", content: "Be brief." };
  const roles = ["user", "assistant"];
  const turns = Array.from({ length: 40 }, (_, at) => ({ role: roles[at % 2]!, content: `${at} ${"word ".repeat(9)}` }));
  talk.restore([system, ...turns]);
  const answer = finished(await world.follow(talk.send(QUESTION, { maxNewTokens: 8 })));
  const { droppedTurns } = answer.statistics;
  const asked = { role: "user", content: QUESTION };
  const left = (dropped: number): number[] => tokenizer.encodeChat([system, ...turns.slice(dropped), asked]);
  assert.ok(droppedTurns > 0 && droppedTurns % 2 === 0 && talk.messages.length === 43);
  assert.deepEqual(talk.tokens.slice(0, talk.promptTokens), left(droppedTurns));
  assert.ok(talk.promptTokens <= 256 && left(droppedTurns - 2).length > 256);
  assert.deepEqual(ids(answer), own(talk.promptTokens, 8));
  const whole = finished(await world.follow(talk.continueAnswer({ maxNewTokens: 4 })));
  assert.deepEqual(ids(whole).slice(0, 8), ids(answer));
  assert.equal(whole.statistics.droppedTurns, droppedTurns);
  const again = finished(await world.follow(talk.send("And why?", { maxNewTokens: 4 })));
  assert.equal(again.statistics.droppedTurns, droppedTurns);
  assert.ok(talk.promptTokens < 300);
  await assert.rejects(talk.send("word ".repeat(600)).next(), /shorten the message or begin a new chat$/);
});

chat("a grammar reaches the verifier, and without it the device writes nothing", async (world) => {
  const sampling = { grammar: { kind: "json_schema", text: "{}" } } as const;
  const talk = await world.begin({ drafter: PARROT, policy: "keep" });
  await assert.rejects(talk.send(QUESTION, { sampling }).next(), /has no grammars/);
  await world.within(5, talk.close());
  world.verifier.capabilities = [wire.Capability.GRAMMAR];
  const again = await world.begin({ drafter: PARROT, policy: "keep" });
  let away: Promise<void> | undefined;
  const seen = await world.follow(again.send(QUESTION, { maxNewTokens: LENGTH, sampling }), (event) => {
    if (event.event === "AnswerUpdate" && event.committed) away ??= again.workOffline(true);
    if (event.event === "Paused") void again.workOffline(false);
    return event.event === "AnswerFinished";
  });
  await world.within(5, Promise.all([away]));
  const end = finished(seen);
  assert.ok(end.statistics.reconnects === 1 && end.statistics.offline === 0);
  assert.deepEqual(ids(end), own(again.promptTokens, LENGTH));
  const { grammar } = world.verifier.prompts.at(-1)!.sampling!;
  assert.deepEqual([grammar?.kind, grammar?.text], [wire.GrammarKind.JSON_SCHEMA, "{}"]);
  const snapshot = again["session"].snapshot()["sampling"] as object;
  assert.deepEqual(snapshot, { ...snapshot, grammar: sampling.grammar });
});

chat("JSON may follow the reasoning of a target that reasons", async (world) => {
  world.verifier.capabilities = [wire.Capability.GRAMMAR];
  const talk = await world.begin();
  const begun = { thought: () => "begun", specialIds: new Map([["</think>", 7]]) };
  Object.assign(talk, { tokenizer: Object.assign(Object.create(talk["tokenizer"]), begun) });
  await world.follow(talk.send(QUESTION, { maxNewTokens: 1, sampling: { grammar: { kind: "json_object", text: "" } } }));
  const { grammar } = world.verifier.prompts.at(-1)!.sampling!;
  assert.equal(grammar?.kind, wire.GrammarKind.LARK);
  assert.match(grammar.text, /^start: thought SPACE answer\nthought: \/.*\/ <\[7\]>$/m);
});

chat("one answer at a time", async (world) => {
  const talk = await world.begin();
  await world.within(5, talk.workOffline(true));
  talk.offline = "off";
  const turns = [{ role: "user", content: QUESTION }, { role: "assistant", content: "None of them." }];
  const others = [
    async () => void (await talk.send("And now?").next()),
    async () => void (await talk.check().next()),
    async () => talk.restore(turns),
  ];
  for (const other of others) {
    const events = talk.send(QUESTION);
    await world.within(5, events.next());
    const waiting = world.follow(events);
    await world.within(5, other());
    assert.ok(!(await waiting).some(({ event }) => event === "AnswerFinished"));
  }
  assert.deepEqual(talk.messages, turns);
});

chat("a writer that fails leaves the answer to drafter and server", async (world) => {
  const broken: Drafter = { ...PARROT, propose: () => Promise.reject(new EngineError("no such graph")) };
  const talk = await world.begin({ drafter: PARROT, writer: broken });
  let away: Promise<void> | undefined;
  let back: Promise<void> | undefined;
  const seen = await world.follow(talk.send(QUESTION, { maxNewTokens: 60 }), (event) => {
    if (event.event === "AnswerUpdate" && event.tokens.length >= 4) away ??= talk.workOffline(true);
    if (offline(event) >= 8) back ??= talk.workOffline(false);
    return event.event === "AnswerFinished";
  });
  await Promise.all([away, back]);
  const told = seen.filter((event) => event.event === "LinkChanged" && event.detail === "the offline writer failed: no such graph");
  assert.equal(told.length, 1);
  assert.deepEqual(ids(finished(seen)), own(talk.promptTokens, 60));
});

chat("a drafter that fails ends the chat with its error", async (world) => {
  const broken: Drafter = { ...PARROT, propose: () => Promise.reject(new Error("the worker is gone")) };
  const talk = await world.begin({ drafter: broken });
  await assert.rejects(world.follow(talk.send(QUESTION)), /^ChatError: the drafting loop failed: Error: the worker is gone$/);
  await assert.rejects(talk.send(QUESTION).next(), ChatError);
});

test("chat: closing ends the opening", async () => {
  const host = new FakeHost();
  const talk = await Chat.create(bundle, { url: "ws://toy" }, { host });
  const opening = talk.open();
  const failed = assert.rejects(opening, (error) => error instanceof ConnectError && error.final);
  await host.pass(1);
  const closing = talk.close();
  await host.pass(2);
  await closing;
  await failed;
});

test("chat: opening in the background waits for nothing", async () => {
  const world = new ChatWorld();
  const { host } = world;
  const options = { drafter: new NgramDrafter([2]), host, settings: { drafting: "device" } } as const;
  const talk = await Chat.create(bundle, { url: "ws://toy" }, options);
  world.chat = talk;
  talk.tellConditions({ background: true });
  assert.equal(talk.conditions.background, true); // at once: the next call may be made of them
  await world.within(1, talk.open());
  assert.deepEqual([talk.status, talk.link.detail], ["offline", "no connection is made in the background"]);
  talk.tellConditions({});
  assert.deepEqual(ids(finished(await world.follow(talk.send(QUESTION, { maxNewTokens: 4 })))), own(talk.promptTokens, 4));
  await world.end();
});

chat("the next question ends an answer that was left", async (world) => {
  const talk = await world.begin();
  const events = talk.send(QUESTION, { maxNewTokens: 200 });
  for (let count = 0; count < 3; count++) await world.within(5, events.next());
  assert.deepEqual(ids(finished(await world.follow(talk.send("And now?", { maxNewTokens: 4 })))), own(talk.promptTokens, 4));
  assert.deepEqual(talk.messages.map(({ content }) => content).filter((_, at) => at % 2 === 0), [QUESTION, "And now?"]);
  assert.ok(talk.messages[1]!.content.length > 0);
  assert.deepEqual(await world.within(5, events.next()), { done: true, value: undefined });
});

chat("of several questions at once, each ends the one before", async (world) => {
  const talk = await world.begin();
  const read = async (name: string): Promise<string> => {
    const seen: ChatEvent[] = [];
    for await (const event of talk.send(name, { maxNewTokens: name === "A" ? 200 : 8 })) seen.push(event);
    return seen.at(-1)?.event === "AnswerFinished" ? `${name} finished` : `${name} ended`;
  };
  const first = read("A");
  await world.host.pass(0.05);
  const all = Promise.all([first, read("B"), read("C"), first.then(() => read("D"))]);
  const ends = await world.within(60, all);
  assert.deepEqual(ends.slice(0, 1), ["A ended"]);
  assert.equal(ends.filter((each) => each.endsWith("finished")).length, 1);
  assert.deepEqual(ids(finished(await world.follow(talk.send("E", { maxNewTokens: 4 })))), own(talk.promptTokens, 4));
});

chat("working offline may be chosen before the chat is opened", async (world) => {
  const { host } = world;
  const talk = (world.chat = await Chat.create(bundle, { url: "ws://toy" }, { drafter: new NgramDrafter([2]), host }));
  await world.within(5, talk.workOffline(true));
  await world.within(5, talk.open());
  await host.pass(5);
  assert.deepEqual([talk.status, talk.link.detail, host.sockets.length], ["offline", "working offline", 0]);
  await talk.workOffline(false);
  await host.pass(1);
  assert.equal(talk.status, "online");
});

chat("an answer that waits goes on when the writer is switched on", async (world) => {
  const talk = await world.begin({ writer: PARROT, settings: { offline: "off" } });
  await world.within(5, talk.workOffline(true));
  const events = talk.send(QUESTION, { maxNewTokens: 40 });
  assert.deepEqual((await world.within(5, events.next())).value, { event: "Paused", reason: "off" });
  const next = events.next();
  await world.host.pass(5);
  talk.offline = "writer";
  const update = (await world.within(0.5, next)).value;
  assert.ok(update?.event === "AnswerUpdate" && offline(update));
  await world.within(5, events.return());
});

chat("a check tells the text of the device that the target replaces, from the first token on, too", async (world) => {
  const talk = await world.begin({ policy: "ask" });
  const written = " hello".repeat(12);
  talk.restore([{ role: "user", content: QUESTION }, { role: "assistant", content: written }], [{ turn: 1, sampling: GREEDY, most: 64 }]);
  const seen = await world.follow(talk.check());
  const disputed = seen.find((event) => event.event === "Disagreement");
  assert.ok(disputed?.event === "Disagreement" && disputed.position === 0);
  assert.equal(disputed.droppedText, written);
  const dropped = seen.flatMap((event) => (event.event === "AnswerUpdate" && event.dropped ? [event.dropped] : []));
  assert.equal(dropped[0], written);
  const kept = finished(await world.follow(talk.keepMine()!));
  assert.ok(kept.text.startsWith(written) && kept.statistics.kept >= 8);
  assert.deepEqual(talk.messages.map(({ content }) => content), [QUESTION, kept.text]);

  const turns = [{ role: "user", content: QUESTION }, { role: "assistant", content: written }];
  talk.restore([...turns, ...talk.messages], [{ turn: 1, sampling: GREEDY, most: 64 }]);
  await world.follow(talk.check());
  assert.equal(talk.keepMine(), undefined); // the turns after it would be lost
  assert.equal(talk.messages.length, 4);
});

chat("other turns take the place of an answer that was left", async (world) => {
  const talk = await world.begin();
  const turns = [{ role: "user", content: QUESTION }, { role: "assistant", content: "None of them." }];
  const events = talk.send(QUESTION, { maxNewTokens: 200 });
  await world.within(5, events.next());
  talk.restore(turns);
  await world.within(5, events.return());
  assert.deepEqual(talk.messages, turns);
  talk.restore(turns, [{ turn: 1, sampling: GREEDY, most: 16 }]);
  const checks = talk.check();
  await world.within(5, checks.next());
  assert.deepEqual(talk.messages, turns);
  talk.restore([]);
  await world.within(5, checks.return());
  assert.deepEqual([talk.messages, talk.unconfirmed], [[], []]);
});

chat("the texts of updates are the answer, and they are all of its JSON", async (world) => {
  const talk = await world.begin();
  const seen = await world.follow(talk.send(QUESTION, { maxNewTokens: 300 }));
  let written = "";
  let json = 0;
  for (const event of seen) {
    if (event.event !== "AnswerUpdate") continue;
    assert.equal(event.start, written.length);
    written += event.text;
    assert.equal(event.committed, written);
    assert.equal(event.spans.map(({ text }) => text).join(""), event.committed + event.tentative);
    json += JSON.stringify(event).length - event.tentative.length;
  }
  assert.equal(written, finished(seen).text);
  assert.ok(json < 100 * seen.length + written.length);
});

chat("each change of the link has a sentence", async (world) => {
  const talk = await world.begin();
  const details = new Set([talk.link.detail]);
  const hear = (event: LoopEvent) => event.event === "LinkChanged" && details.add(`${event.status}: ${event.detail}`);
  talk["loop"].listen(hear);
  await world.within(5, talk.workOffline(true));
  await talk.workOffline(false);
  await world.host.pass(1);
  assert.deepEqual([...details], [
    "connected to the server",
    "offline: working offline",
    "reconnecting: a connection to the server is being made",
    "online: connected to the server",
  ]);
});
