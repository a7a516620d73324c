/** What the device wrote without the verifier is checked, answer by answer, while nothing else is asked for. */

import type { AnswerFinished, Disagreement, Unconfirmed } from "@moa-edge/runtime";

import { Answering } from "../answers/answering.js";
import { correctedWords } from "../answers/corrections.js";
import { AS_WRITTEN } from "../answers/figures.js";
import type { StoredChat } from "../chats/chats.js";
import { turnsOf, type Message } from "../chats/message.js";
import { asSentence, correctedSentence } from "../words.js";
import { Asking } from "./asking.js";

/** An answer while it is checked. The stored one stays until that is done. */
class Checking extends Answering {
  done = false;

  constructor(
    chat: StoredChat,
    position: number,
    /** As the device wrote it. */
    readonly written: Message,
    readonly mark: Unconfirmed,
  ) {
    const question = chat.messages[position - 1]!.content;
    super({ chat: chat.id, position, question, sampling: mark.sampling }, true);
    this.message = { ...written, dropped: [] };
  }

  /** Words of it do not replace the stored turns: the answer does, as a whole. */
  override get confirmed(): boolean {
    return false;
  }

  override get endedAlone(): boolean {
    return false;
  }

  override shownIn(messages: readonly Message[]): Message[] {
    return messages.with(this.place.position, this.message);
  }

  override finish(event: AnswerFinished): void {
    super.finish(event);
    this.message = { ...this.message, unconfirmed: null };
    this.done = true;
  }
}

/** An answer as the device wrote it and as the target did. */
interface Corrected {
  readonly chat: string;
  readonly position: number;
  readonly written: Message;
  readonly checked: Message;
}

export class Conversations extends Asking {
  private corrected: Corrected[] = [];
  private words = 0;
  private anyDone = false;
  private wanted = false; // something else, by the user

  /** Whether an answer is written; to check one keeps nobody from asking. */
  override get busy(): boolean {
    return super.busy && !(this.answering instanceof Checking);
  }

  override async send(text: string): Promise<void> {
    await this.leaveCheck();
    await super.send(text);
    await this.check();
  }

  override async edit(position: number, text: string): Promise<void> {
    await this.leaveCheck();
    await super.edit(position, text);
    await this.check();
  }

  override async continueAnswer(): Promise<void> {
    await this.leaveCheck();
    await super.continueAnswer();
    await this.check();
  }

  override async goOn(): Promise<void> {
    await super.goOn();
    await this.check();
  }

  /** Have the verifier, if it is there, check what was written without it, one answer after the other. */
  async check(): Promise<void> {
    for (;;) {
      const { talk } = this;
      if (this.answering !== null || talk === null || talk.chat.link.status !== "online") return;
      const found = await this.nextCheck(talk.target);
      if (this.answering !== null) return; // something was asked meanwhile
      if (found === null) {
        this.report();
        return;
      }
      const { chat, checking } = found;
      const before = chat.settings.system === "" ? 0 : 1;
      await this.begin(checking, chat, () => {
        const mark = { ...checking.mark, turn: checking.place.position + before };
        talk.chat.restore(turnsOf(chat.settings.system, chat.messages), [mark]);
        return talk.chat.check() ?? nothing();
      });
      if (this.wanted || !(checking.done || checking.message.unconfirmed === null)) return;
    }
  }

  /** Of a check one hears at its end. */
  protected override onDisagreement(event: Disagreement): void {
    if (!(this.answering instanceof Checking) || this.settings().onDisagreement === "mine") super.onDisagreement(event);
  }

  protected override async ended(answering: Answering, problem: Error | null): Promise<void> {
    if (!(answering instanceof Checking)) {
      await super.ended(answering, problem);
      return;
    }
    if (answering.done) await this.settle(answering);
    else if (problem !== null && this.talk?.chat.link.status === "online") {
      // Refused for good: it stays, and nobody checks it again.
      answering.message = asWritten(answering.written);
      await this.put(answering, [answering.message]);
    }
    this.answering = null;
    if (problem !== null) this.say(asSentence(problem.message));
  }

  /** End a check that runs. */
  private async leaveCheck(): Promise<void> {
    if (!(this.answering instanceof Checking)) return;
    this.wanted = true;
    this.stop();
    await this.following;
    this.wanted = false;
  }

  /** First in the open chat. What was written for another target waits for that one. */
  private async nextCheck(target: string): Promise<{ chat: StoredChat; checking: Checking } | null> {
    const rows = (await this.attempt(() => this.chats.list(), [])).filter((row) => row.unconfirmed);
    const inOrder = [...rows.filter(({ id }) => id === this.chat.id), ...rows.filter(({ id }) => id !== this.chat.id)];
    for (const { id } of inOrder) {
      const chat = await this.one(id);
      for (const [position, written] of chat?.messages.entries() ?? []) {
        const mark = written.unconfirmed;
        const known = written.target === "" || written.target === target;
        if (mark !== null && known && chat!.messages[position - 1]?.role === "user") {
          return { chat: chat!, checking: new Checking(chat!, position, written, mark) };
        }
      }
    }
    return null;
  }

  /** Store an answer that was checked. Answers of the same target behind one that has changed are to another conversation now:
   * they are unconfirmed. */
  private async settle(checking: Checking): Promise<void> {
    const { written, mark, place } = checking;
    const checked = { ...checking.message, target: written.target };
    const behind = this.answered.messages.slice(place.position + 1);
    this.anyDone = true;
    if (checked.content === written.content) {
      await this.put(checking, [checked, ...behind]);
      return;
    }
    const most = mark.most === 0 ? 0 : Math.max(mark.most, this.answered.settings.maxNewTokens);
    const marked = behind.map((later, number): Message => {
      const same = later.target === "" || later.target === written.target;
      if (later.role !== "assistant" || later.unconfirmed !== null || !same) return later;
      const turn = place.position + 1 + number;
      return { ...later, unconfirmed: { turn, sampling: later.cutOff ?? mark.sampling, most } };
    });
    await this.put(checking, [checked, ...marked]);
    this.note({ chat: place.chat, position: place.position, written, checked });
    this.words += correctedWords(written, checked.content);
  }

  private async put({ place }: Checking, from: readonly Message[]): Promise<void> {
    const chat = this.answered;
    chat.messages = [...chat.messages.slice(0, place.position), ...from, ...chat.messages.slice(place.position + from.length)];
    await this.store(chat);
  }

  /** Of an answer that was checked twice, what the device wrote is what it was at first. */
  private note(corrected: Corrected): void {
    const again = this.corrected.findIndex(
      (one) =>
        one.chat === corrected.chat &&
        one.position === corrected.position &&
        one.checked.content === corrected.written.content,
    );
    if (again < 0) this.corrected.push(corrected);
    else this.corrected[again] = { ...this.corrected[again]!, checked: corrected.checked };
  }

  /** Say what was done since the last report. */
  private report(): void {
    const { anyDone, words, corrected } = this;
    this.anyDone = false;
    this.words = 0;
    this.corrected = [];
    if (words > 0) {
      const run = (): void => void this.undo(corrected);
      this.host.tell({ text: correctedSentence(words), actions: [{ label: "Undo", run }] });
    } else if (anyDone) {
      this.say("The verifier has confirmed what this device wrote.");
    }
  }

  /** Put the answers back as the device wrote them; nobody checks them again. What has changed since stays. */
  private async undo(corrected: readonly Corrected[]): Promise<void> {
    let all = true;
    for (const { chat: id, position, written, checked } of corrected) {
      const chat = await this.one(id);
      if (chat?.messages[position]?.content !== checked.content) {
        all = false;
        continue;
      }
      chat.messages = chat.messages.with(position, asWritten(written));
      await this.store(chat);
    }
    if (!all) this.say("Answers that have changed since stay as they are.");
    this.host.changed();
  }
}

/** As the device wrote it; what was taken back while it was written is no longer told. */
function asWritten(written: Message): Message {
  const alone = written.spans.length === 0 || !written.spans.every((span) => span.committed);
  return { ...written, unconfirmed: null, remarks: alone ? AS_WRITTEN : written.remarks, dropped: [] };
}

/** The verifier has gone meanwhile. */
async function* nothing(): AsyncGenerator<never, void, undefined> {}
