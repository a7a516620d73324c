/** Asking, and the answer while it is written. Knows nothing of the page. */

import type { AnswerStream, ChatEvent, Disagreement } from "@moa-edge/runtime";

import { Answering } from "../answers/answering.js";
import type { StoredChat } from "../chats/chats.js";
import { canGoOn, titleOf, turnsOf } from "../chats/message.js";
import { newSeed, samplingOf } from "../settings.js";
import { asSentence, correctedSentence, countWords, PAUSES, readingWords } from "../words.js";
import { OpenChat } from "./open_chat.js";
import type { Talk } from "./talk.js";

const SAVE_MS = 700; // a crash loses at most what came after

/** Of an answer; leaving them by `return` stops it. */
export type Events = Pick<AnswerStream, "next" | "return">;

export class Asking extends OpenChat {
  /** Null while there is no connection to anything. */
  talk: Talk | null = null;
  /** Settles when the events that are followed have ended, and what they left behind is stored. */
  protected following: Promise<void> = Promise.resolve();
  private events: Events | null = null;
  private last: Answering | null = null;
  private saving: ReturnType<typeof setTimeout> | null = null;

  get busy(): boolean {
    return this.answering !== null;
  }

  /** What one waits for in an answer that does not go on; empty where it does. */
  get waiting(): string {
    const { answering, talk } = this;
    if (answering === null || talk === null) return "";
    if (answering.pause !== null) return PAUSES[answering.pause];
    if (answering.message.content !== "") return "";
    return talk.chat.link.status === "online" ? readingWords(talk.chat.newTokens) : PAUSES.off;
  }

  /** Ask in the open chat. */
  async send(text: string): Promise<void> {
    await this.ask(text, this.chat.messages.length);
  }

  /** Ask the question at a position in other words; what followed is gone with the first words of an answer. */
  async edit(position: number, text: string): Promise<void> {
    await this.ask(text, position);
  }

  /** Write the last answer once more. */
  async again(): Promise<void> {
    const position = this.chat.messages.map(({ role }) => role).lastIndexOf("user");
    if (position >= 0) await this.edit(position, this.chat.messages[position]!.content);
  }

  /** Go on with the last answer, which was cut off. */
  async continueAnswer(): Promise<void> {
    const { chat, talk } = this;
    const last = chat.messages.at(-1);
    const question = chat.messages.at(-2);
    if (this.busy || talk === null || last === undefined || question === undefined || !canGoOn(last)) return;
    if (last.target !== "" && last.target !== talk.target) {
      this.say("Another model wrote this answer, and only that one can continue it.");
      return;
    }
    const sampling = last.cutOff!;
    const place = { chat: chat.id, position: chat.messages.length - 1, question: question.content, sampling };
    const turns = turnsOf(chat.settings.system, chat.messages);
    await this.begin(new Answering(place, false, last), chat, () => {
      if (!sameTurns(talk.chat.messages, turns)) talk.chat.restore(turns);
      return talk.chat.continueAnswer({ maxNewTokens: chat.settings.maxNewTokens, sampling });
    });
  }

  /** An answer that is being written in it ends first. */
  override async remove(id: string): Promise<void> {
    if (this.answering?.place.chat === id) {
      this.stop();
      await this.following;
    }
    await super.remove(id);
  }

  /** End the answer where it is confirmed. */
  stop(): void {
    void this.events?.return();
  }

  /** Store what is being written now: the browser may end the page at any time. */
  async saveNow(): Promise<void> {
    if (this.answering !== null) await this.save(this.answering);
  }

  /** Wait until nothing is being written. */
  async idle(): Promise<void> {
    while (this.answering !== null) await this.following;
  }

  /** Go on with the answer of the page before, unless its chat is gone. */
  async goOn(): Promise<void> {
    await this.refresh();
    const { talk } = this;
    const events = this.busy ? undefined : talk?.chat.pending();
    if (talk === null || events === undefined) return;
    const known = talk.chat.messages.filter(({ role }) => role !== "system").length;
    for (const { id, unfinished } of await this.attempt(() => this.chats.list(), [])) {
      const chat = unfinished ? await this.attempt(() => this.chats.get(id), null) : null;
      const [question, answer] = chat?.messages.slice(known) ?? [];
      if (answer === undefined || answer.finished || question?.content !== talk.chat.question) continue;
      if (!(await this.open(id))) return;
      const place = { chat: id, position: known + 1, question: question.content, sampling: answer.cutOff };
      await this.begin(new Answering(place), this.chat, () => events);
      return;
    }
  }

  /** The answer that the user prefers to the target's, where both differ. */
  protected keepMine(): void {
    const events = this.talk?.chat.keepMine();
    const { last } = this;
    if (events === undefined || last === null || this.busy) return;
    void this.begin(new Answering(last.place, false), this.answered, () => events);
  }

  protected say(text: string): void {
    this.host.tell({ text, actions: [] });
  }

  /** Follow an answer. @param open makes its events; what it throws is said. */
  protected async begin(answering: Answering, chat: StoredChat, open: () => Events): Promise<void> {
    this.answering = answering;
    this.answered = chat;
    this.following = this.follow(open);
    this.host.changed();
    await this.following;
  }

  protected take(answering: Answering, event: ChatEvent): void {
    switch (event.event) {
      case "AnswerUpdate":
        answering.update(event);
        break;
      case "AnswerFinished":
        answering.finish(event);
        break;
      case "Paused":
        answering.pause = event.reason;
        break;
      case "Disagreement":
        this.onDisagreement(event);
        break;
      case "LinkChanged":
        break;
    }
    if (answering.endedAlone) this.stop();
    this.saving ??= setTimeout(() => {
      this.saving = null;
      if (this.answering !== null) void this.save(this.answering);
    }, SAVE_MS);
  }

  protected onDisagreement({ droppedText }: Disagreement): void {
    const words = countWords(droppedText);
    const keep = (): void => this.keepMine();
    switch (this.settings().onDisagreement) {
      case "mine":
        keep();
        break;
      case "server":
        this.host.tell({ text: correctedSentence(words), actions: [{ label: "Undo", run: keep }] });
        break;
      case "ask":
        this.host.tell({
          text: `The server would have written something else than “${droppedText.trim()}”, which this device wrote.`,
          actions: [
            { label: "Keep mine", run: keep },
            { label: "Take the server's", run: () => undefined },
          ],
        });
    }
  }

  /** The events have ended. @param problem why, where they failed. */
  protected async ended(answering: Answering, problem: Error | null): Promise<void> {
    this.answering = null;
    if (!answering.message.finished) {
      const left = answering.replaces ? null : this.leftAlone(answering.place.position);
      if (left === null) answering.stop();
      else answering.setAside(left.text, left.mark);
    }
    this.last = answering;
    if (answering.message.content !== "") await this.keep(answering);
    else await this.takeBack(answering);
    if (problem !== null) this.say(asSentence(problem.message));
  }

  private async ask(text: string, position: number): Promise<void> {
    const { chat, talk } = this;
    if (this.busy || talk === null) {
      if (chat.messages[position]?.content !== text) this.host.giveBack(text); // else nothing is lost: a second tap on Again
      return;
    }
    if (chat.title === "") chat.title = titleOf(text);
    const { settings } = chat;
    const sampling = samplingOf(settings, talk.recommended, newSeed());
    const turns = turnsOf(settings.system, chat.messages.slice(0, position));
    const place = { chat: chat.id, position: position + 1, question: text, sampling };
    const answering = new Answering(place, position < chat.messages.length);
    await this.begin(answering, chat, () => {
      talk.chat.restore(turns);
      return talk.chat.send(text, { maxNewTokens: settings.maxNewTokens, sampling });
    });
  }

  private async follow(open: () => Events): Promise<void> {
    const answering = this.answering!;
    let problem: Error | null = null;
    try {
      const events = (this.events = open());
      if (!answering.replaces) await this.save(answering);
      for (let next = await events.next(); next.done !== true; next = await events.next()) {
        this.take(answering, next.value);
        this.host.changed();
      }
    } catch (error) {
      problem = error as Error;
    }
    this.events = null;
    if (this.saving !== null) clearTimeout(this.saving);
    this.saving = null;
    await this.ended(answering, problem);
    this.host.changed();
  }

  /** Store the answer as it stands, once there is something to store in the place of what it replaces. */
  private async save(answering: Answering): Promise<void> {
    if (answering.confirmed) answering.replaces = false;
    if (!answering.replaces) await this.keep(answering);
  }

  private async keep(answering: Answering): Promise<void> {
    answering.message = { ...answering.message, target: this.talk?.target ?? "" };
    this.answered.messages = answering.shownIn(this.answered.messages);
    this.answered.updated = Date.now();
    await this.store(this.answered);
  }

  /** Nothing came: the question goes back to where it was written, and what it was to replace stays. */
  private async takeBack({ place, replaces }: Answering): Promise<void> {
    const chat = this.answered;
    const there = replaces && chat.messages.some(({ content }) => content === place.question);
    if (this.chat.id === place.chat && !there) this.host.giveBack(place.question);
    if (replaces) return;
    chat.messages = chat.messages.slice(0, place.position - 1);
    if (chat.messages.length > 0) {
      await this.store(chat);
      return;
    }
    chat.title = "";
    await this.attempt(() => this.chats.remove(chat.id), undefined);
  }

  /** The answer that has just been left, the message at `position`, where the device had written of it without the verifier. */
  private leftAlone(position: number): { text: string; mark: NonNullable<Answering["message"]["unconfirmed"]> } | null {
    const { messages: turns, unconfirmed } = this.talk!.chat;
    const last = turns.length - 1;
    const mark = unconfirmed.at(-1);
    if (mark?.turn !== last || last - (turns[0]?.role === "system" ? 1 : 0) !== position) return null;
    return { text: turns[last]!.content, mark };
  }
}

function sameTurns(
  one: readonly { role: string; content: string }[],
  other: readonly { role: string; content: string }[],
): boolean {
  const same = (each: { role: string; content: string }, at: number): boolean =>
    each.role === other[at]!.role && each.content === other[at]!.content;
  return one.length === other.length && one.every(same);
}
