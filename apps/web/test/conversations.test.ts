/** What happens to conversations, with a runtime whose answers are written here. */

import assert from "node:assert/strict";
import { test } from "node:test";

import { Conversations } from "../src/conversations.js";
import { USUAL_SETTINGS, type Settings } from "../src/settings.js";
import { FakeHost, FakeTalk, MemoryChats, finished, update } from "./fake_talk.js";
import { pieces } from "./spans.js";

class World {
  readonly chats = new MemoryChats();
  readonly host = new FakeHost();
  readonly talk = new FakeTalk();
  settings: Settings = USUAL_SETTINGS;
  readonly conversations = new Conversations(this.chats, () => this.settings, this.host);

  constructor() {
    this.conversations.talk = this.talk;
  }

  /** Contents of the only stored chat. */
  get stored(): string[] {
    const [chat, ...more] = this.chats.stored.values();
    assert.equal(more.length, 0);
    return chat?.messages.map(({ content }) => content) ?? [];
  }

  get sentence(): string {
    return this.host.told.at(-1)?.text ?? "";
  }

  async asked(question: string, answer: string): Promise<void> {
    this.talk.script = [finished(pieces([answer, "corrected"]))];
    await this.conversations.send(question);
  }
}

const OFFLINE = pieces(["red green", "offline", false]);

async function settledSoon(): Promise<void> {
  for (let turn = 0; turn < 50; turn++) await Promise.resolve();
}

test("a question and its answer are stored, under the question's title", async () => {
  const world = new World();
  await world.asked("What is red?\nSay.", "A colour.");
  assert.deepEqual(world.stored, ["What is red?\nSay.", "A colour."]);
  assert.equal(world.conversations.chat.title, "What is red?");
  const answer = world.conversations.messages[1]!;
  assert.ok(answer.finished && answer.figures.some((line) => line.includes("6 of 8 tokens")));
  assert.equal(answer.target, "target-1");
});

test("a chat's reasoning is switched, and its answers may begin inside", async () => {
  const world = new World();
  await world.asked("one", "1");
  assert.deepEqual([world.talk.chat.thinking, world.conversations.messages[1]!.begun], [undefined, false]);
  await world.conversations.changeSettings({ ...USUAL_SETTINGS.chats, thinking: "on" });
  await world.asked("two", "a </think> 2");
  assert.deepEqual([world.talk.chat.thinking, world.conversations.messages[3]!.begun], [true, true]);
});

test("instructions come before the turns", async () => {
  const world = new World();
  await world.conversations.changeSettings({ ...USUAL_SETTINGS.chats, system: "Be brief." });
  await world.asked("one", "1");
  await world.asked("two", "2");
  assert.deepEqual(world.talk.restored.map(({ role }) => role), ["system", "user", "assistant"]);
});

test("a refused question goes back to where it was written, and leaves nothing", async () => {
  const world = new World();
  world.talk.script = [new Error("the verifier refused the token; check it")];
  await world.conversations.send("one");
  assert.deepEqual(world.host.returned, ["one"]);
  assert.equal(world.sentence, "The server refused the token; check it.");
  assert.equal(world.chats.stored.size, 0);
});

test("without a connection a question goes back", async () => {
  const world = new World();
  world.conversations.talk = null;
  await world.conversations.send("one");
  assert.deepEqual(world.host.returned, ["one"]);
});

test("an answer that is left keeps what the target has confirmed, and can be continued", async () => {
  const world = new World();
  world.talk.script = [update(pieces(["red", "corrected"], [" green", "drafted", false]))];
  await world.conversations.send("one");
  const answer = world.conversations.messages[1]!;
  assert.deepEqual([answer.content, answer.remarks], ["red", "stopped"]);
  world.talk.script = [finished(pieces(["red", "corrected"], [" blue", "corrected"]))];
  await world.conversations.continueAnswer();
  assert.deepEqual(world.stored, ["one", "red blue"]);
});

test("what follows an edited question stays until words of the new answer are confirmed", async () => {
  const world = new World();
  await world.asked("one", "1");
  await world.asked("two", "2");
  world.talk.script = [new Error("the verifier is away")];
  await world.conversations.edit(0, "uno");
  assert.deepEqual(world.stored, ["one", "1", "two", "2"]);
  assert.deepEqual(world.conversations.messages.map(({ content }) => content), ["one", "1", "two", "2"]);
  world.talk.script = [finished(pieces(["eins", "corrected"]))];
  await world.conversations.edit(0, "uno");
  assert.deepEqual(world.stored, ["uno", "eins"]);
});

test("what the device wrote alone is kept, marked, checked, and can be had back", async () => {
  const world = new World();
  world.talk.leftAlone = "red green";
  world.talk.script = [update(OFFLINE), { event: "Paused", reason: "end" }];
  world.talk.checked = [finished(pieces(["red ", "offline"], ["blue", "corrected"]))];
  world.talk.chat.link = { event: "LinkChanged", status: "offline", detail: "", retryInS: 3, late: false };
  await world.conversations.send("one");
  assert.deepEqual(world.stored, ["one", "red green"]);
  assert.equal(world.conversations.messages[1]!.remarks, "2 words not confirmed yet");

  world.talk.chat.link = { event: "LinkChanged", status: "online", detail: "", retryInS: null, late: false };
  await world.conversations.check();
  assert.deepEqual(world.stored, ["one", "red blue"]);
  assert.equal(world.sentence, "1 word that this device wrote was corrected.");
  assert.equal(world.conversations.messages[1]!.unconfirmed, null);

  world.host.press("Undo");
  await settledSoon();
  assert.deepEqual(world.stored, ["one", "red green"]);
  await world.conversations.check(); // it is not checked again
  assert.deepEqual(world.stored, ["one", "red green"]);
});

test("an answer behind a corrected one is to be checked too", async () => {
  const world = new World();
  world.talk.leftAlone = "red green";
  world.talk.script = [update(OFFLINE), { event: "Paused", reason: "end" }];
  world.talk.chat.link = { event: "LinkChanged", status: "offline", detail: "", retryInS: 3, late: false };
  await world.conversations.send("one");
  world.talk.leftAlone = null;
  await world.asked("two", "2");
  world.talk.chat.link = { event: "LinkChanged", status: "online", detail: "", retryInS: null, late: false };
  let checks = 0;
  const check = world.talk.chat.check.bind(world.talk.chat);
  world.talk.chat.check = () => {
    world.talk.checked = [finished(pieces([++checks === 1 ? "red blue" : "zwei", "corrected"]))];
    return check();
  };
  await world.conversations.check();
  assert.equal(checks, 2);
  assert.deepEqual(world.stored, ["one", "red blue", "two", "zwei"]);
});

test("a disagreement is told, kept, or asked about, as is set", async () => {
  const disagreement = { event: "Disagreement", position: 0, offset: 0, droppedText: "green grass", replacementText: "" } as const;
  const world = new World();
  world.talk.script = [update(OFFLINE), disagreement, finished(pieces(["red", "corrected"]))];
  await world.conversations.send("one");
  assert.equal(world.sentence, "2 words that this device wrote were corrected.");
  world.talk.kept = [finished(pieces(["red green grass", "kept"]))];
  world.host.press("Undo");
  await settledSoon();
  assert.deepEqual(world.stored, ["one", "red green grass"]);

  world.settings = { ...USUAL_SETTINGS, onDisagreement: "ask" };
  world.talk.kept = null;
  await world.conversations.send("two");
  assert.deepEqual(world.host.told.at(-1)!.actions.map(({ label }) => label), ["Keep mine", "Take the server's"]);
});

test("a deleted chat can be had back", async () => {
  const world = new World();
  await world.asked("one", "1");
  const { id } = world.conversations.chat;
  await world.conversations.remove(id);
  assert.equal(world.chats.stored.size, 0);
  assert.deepEqual(world.conversations.messages, []);
  world.host.press("Undo");
  await settledSoon();
  assert.deepEqual(world.stored, ["one", "1"]);
  assert.equal(world.conversations.chat.id, id);
});

test("a chat that ended with a question gives it back", async () => {
  const world = new World();
  await world.asked("one", "1");
  const chat = [...world.chats.stored.values()][0]!;
  chat.messages = chat.messages.slice(0, 1);
  world.conversations.newChat();
  assert.ok(await world.conversations.open(chat.id));
  assert.deepEqual(world.host.returned, ["one"]);
  assert.ok(!(await world.conversations.open("gone")));
});

test("what cannot be stored is said, and the answer is shown all the same", async () => {
  const world = new World();
  world.chats.put = () => Promise.reject(new Error("this browser could not store the chat; its storage is full"));
  await world.asked("one", "1");
  assert.equal(world.sentence, "This browser could not store the chat; its storage is full.");
  assert.deepEqual(world.conversations.messages.map(({ content }) => content), ["one", "1"]);
});

test("a tab that was open before another one wrote on does not put its older chat in the place of that", async () => {
  const world = new World();
  await world.asked("one", "1");
  const other = new Conversations(world.chats, () => world.settings, new FakeHost());
  await other.open(world.conversations.chat.id);
  await new Promise((resolve) => setTimeout(resolve, 2)); // the clock of stored chats counts milliseconds
  await world.asked("two", "2");
  await other.changeSettings({ ...USUAL_SETTINGS.chats, system: "Be brief." });
  await other.rename(other.chat.id, "Numbers");
  assert.deepEqual(world.stored, ["one", "1", "two", "2"]);
  assert.deepEqual(other.messages.map(({ content }) => content), ["one", "1", "two", "2"]);
});

test("a tab that gets the connection goes on with the chat as another one left it", async () => {
  const world = new World();
  await world.asked("one", "1");
  const other = new Conversations(world.chats, () => world.settings, new FakeHost());
  await other.open(world.conversations.chat.id);
  await new Promise((resolve) => setTimeout(resolve, 2));
  await world.asked("two", "2");
  other.talk = world.talk;
  await other.goOn();
  world.talk.script = [finished(pieces(["3", "corrected"]))];
  await other.send("three");
  assert.deepEqual(world.stored, ["one", "1", "two", "2", "three", "3"]);
});

test("a second tap on Again does nothing", async () => {
  const world = new World();
  await world.asked("one", "1");
  await Promise.all([world.conversations.again(), world.conversations.again()]);
  assert.deepEqual(world.talk.asked, ["one", "one"]);
  assert.deepEqual(world.host.returned, []);
});
