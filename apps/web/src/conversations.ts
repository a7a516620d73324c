/** The chats of the page: the open one, asking, the answer while it is written, and checks of answers written offline. */

import type { AnswerStream, Chat, ChatEvent, Disagreement } from "@moa-edge/runtime";

import { newChat, type Chats, type StoredChat } from "./chats.js";
import { correctedWords } from "./corrections.js";
import { canGoOn, settled, titleOf, turnsOf, type Message } from "./message.js";
import { newSeed, samplingOf, thinkingOf, type ChatSettings, type Recommended, type Settings } from "./settings.js";
import { CheckedAnswer, StreamingAnswer } from "./streaming_answer.js";
import { ALONE, AS_WRITTEN, PAUSES, asSentence, correctedSentence, countWords, readingWords } from "./strings.js";

const SAVE_MS = 700; // a crash loses at most the text of this time

/** The runtime's chat, and facts of its bundle. */
export interface Talk {
  readonly chat: Pick<
    Chat,
    | "send"
    | "continueAnswer"
    | "keepMine"
    | "pending"
    | "check"
    | "restore"
    | "messages"
    | "unconfirmed"
    | "question"
    | "link"
    | "newTokens"
    | "thinking"
    | "tokenizer"
  >;
  /** Fingerprint of the target. */
  readonly target: string;
  readonly recommended: Recommended | null;
}

/** A sentence for the user, and actions to choose from. */
export interface Notice {
  readonly text: string;
  readonly actions: readonly { readonly label: string; readonly run: () => void }[];
}

/** The page around the conversations. */
export interface Host {
  /** Redraw: something has changed. */
  changed(): void;
  tell(notice: Notice): void;
  /** Return a question that could not be asked to the field in which it was written. */
  giveBack(question: string): void;
}

/** The events of an answer; leaving them by `return` stops it. */
export type Events = Pick<AnswerStream, "next" | "return">;

/** An answer as the device wrote it, and as the target corrected it. */
interface Corrected {
  readonly chat: string;
  readonly position: number;
  readonly written: Message;
  readonly checked: Message;
}

/** Ask in the open chat, and store chats; answers written offline are checked while nothing else is asked. */
export class Conversations {
  /** The open chat; not stored before its first question. */
  chat: StoredChat;
  /** The answer that is being written or checked, perhaps in another chat. */
  answering: StreamingAnswer | null = null;
  /** Null while there is no chat of the runtime. */
  talk: Talk | null = null;
  private answered: StoredChat; // the chat in which `answering` is, or was last, written
  private following: Promise<void> = Promise.resolve(); // done when the events have ended, and the answer is stored
  private events: Events | null = null;
  private last: StreamingAnswer | null = null;
  private saving: ReturnType<typeof setTimeout> | null = null;
  private corrected: Corrected[] = []; // since the last report
  private correctedCount = 0; // words, since the last report
  private anyChecked = false; // since the last report
  private leavingCheck = false; // because the user wants something else

  /** @param settings returns the page's present settings. */
  constructor(
    private readonly chats: Chats,
    private readonly settings: () => Settings,
    private readonly host: Host,
  ) {
    this.chat = this.answered = newChat(settings().chats);
  }

  // -- the open chat -----------------------------------------------------------------------------

  /** Messages of the open chat, with the answer that is being written. */
  get messages(): readonly Message[] {
    const { answering, chat } = this;
    return answering?.place.chat === chat.id ? answering.shownIn(chat.messages) : chat.messages;
  }

  /** Open a new chat; it is stored with its first question. */
  newChat(): void {
    this.chat = newChat(this.settings().chats);
    this.host.changed();
  }

  /** Open a stored chat; return whether it exists. */
  async open(id: string): Promise<boolean> {
    const chat = await this.one(id);
    if (chat === null) return false;
    this.chat = chat;
    const last = chat.messages.at(-1);
    if (this.answering?.place.chat !== id && last?.role === "user") {
      // The page ended before there was an answer.
      this.host.giveBack(last.content);
      chat.messages = chat.messages.slice(0, -1);
    }
    this.host.changed();
    return true;
  }

  /** Change the open chat's settings, from its next question on. */
  async changeSettings(settings: ChatSettings): Promise<void> {
    const { chat } = this;
    chat.settings = settings;
    await this.refresh();
    if (chat.messages.length > 0) await this.store(chat);
  }

  /** Take over what another tab has written in the open chat. */
  async refresh(): Promise<void> {
    const { chat } = this;
    if (chat.messages.length === 0) return;
    const stored = await this.attempt(() => this.chats.get(chat.id), null);
    if (stored === null || stored.updated <= chat.updated || this.answering?.place.chat === chat.id) return;
    chat.title = stored.title;
    chat.updated = stored.updated;
    chat.messages = stored.messages.map(settled);
    this.host.changed();
  }

  async rename(id: string, title: string): Promise<void> {
    await this.refresh();
    const chat = await this.one(id);
    if (chat === null || title.trim() === "") return;
    chat.title = title.trim();
    await this.store(chat);
    this.host.changed();
  }

  /** Delete a chat, after ending an answer that is being written in it. The user can undo it. */
  async remove(id: string): Promise<void> {
    if (this.answering?.place.chat === id) {
      this.stop();
      await this.following;
    }
    const chat = await this.one(id);
    if (chat === null) return;
    await this.attempt(() => this.chats.remove(id), undefined);
    if (this.chat.id === id) this.newChat();
    const undo = async (): Promise<void> => {
      await this.store(chat);
      await this.open(id);
    };
    this.host.tell({ text: "The chat was deleted.", actions: [{ label: "Undo", run: () => void undo() }] });
    this.host.changed();
  }

  // -- asking ------------------------------------------------------------------------------------

  /** Whether an answer is being written. A check does not count, because the user may ask meanwhile. */
  get busy(): boolean {
    return this.answering !== null && !(this.answering instanceof CheckedAnswer);
  }

  /** Whether the answer waits for the server at the limit of what the device writes alone: the user may ask something else. */
  get atLimit(): boolean {
    return this.busy && this.answering!.pause === "limit" && !this.answering!.replaces;
  }

  /** Why the answer does not go on, in a sentence; empty while it does. */
  get waiting(): string {
    const { answering, talk } = this;
    if (answering === null || talk === null) return "";
    if (answering.pause !== null) return PAUSES[answering.pause];
    if (answering.message.content !== "") return "";
    return talk.chat.link.status === "online" ? readingWords(talk.chat.newTokens) : ALONE;
  }

  /** Ask in the open chat. */
  async send(text: string): Promise<void> {
    if (this.atLimit) {
      this.stop();
      await this.following;
    }
    await this.leaveCheck();
    await this.ask(text, this.chat.messages.length);
    await this.check();
  }

  /** Ask the question at a position in other words; the messages after it go with the first words of an answer. */
  async edit(position: number, text: string): Promise<void> {
    await this.leaveCheck();
    await this.ask(text, position);
    await this.check();
  }

  /** Write the last answer again. */
  async again(): Promise<void> {
    const position = this.chat.messages.map(({ role }) => role).lastIndexOf("user");
    if (position >= 0) await this.edit(position, this.chat.messages[position]!.content);
  }

  /** Continue the last answer, which was cut off. */
  async continueAnswer(): Promise<void> {
    await this.leaveCheck();
    await this.continueLast();
    await this.check();
  }

  /** End the answer at its last confirmed token. */
  stop(): void {
    void this.events?.return();
  }

  /** Store the answer that is being written now: the browser may end the page at any time. */
  async saveNow(): Promise<void> {
    if (this.answering !== null) await this.save(this.answering);
  }

  /** Wait until no answer is being written or checked. */
  async idle(): Promise<void> {
    while (this.answering !== null) await this.following;
  }

  /** Continue the answer of the page before, unless its chat is gone, then check. */
  async goOn(): Promise<void> {
    await this.takeUpPending();
    await this.check();
  }

  /** Have the verifier, if it is there, check the answers written without it, one after the other. */
  async check(): Promise<void> {
    for (;;) {
      const { talk } = this;
      if (this.answering !== null || talk === null || talk.chat.link.status !== "online") return;
      const found = await this.nextCheck(talk.target);
      if (this.answering !== null) return; // the user has asked something meanwhile
      if (found === null) {
        this.report();
        return;
      }
      const { chat, checking } = found;
      const before = chat.settings.system === "" ? 0 : 1;
      await this.begin(checking, chat, () => {
        const mark = { ...checking.mark, turn: checking.place.position + before };
        talk.chat.thinking = thinkingOf(chat.settings, talk.chat.tokenizer.knowsThinking);
        talk.chat.restore(turnsOf(chat.settings.system, chat.messages), [mark]);
        return talk.chat.check();
      });
      if (this.leavingCheck || !(checking.done || checking.message.unconfirmed === null)) return;
    }
  }

  private async ask(text: string, position: number): Promise<void> {
    const { chat, talk } = this;
    if (this.busy || talk === null) {
      if (chat.messages[position]?.content !== text) this.host.giveBack(text); // else it was a second tap on Again
      return;
    }
    if (chat.title === "") chat.title = titleOf(text);
    const { settings } = chat;
    const sampling = samplingOf(settings, talk.recommended, newSeed());
    const turns = turnsOf(settings.system, chat.messages.slice(0, position));
    const thinking = thinkingOf(settings, talk.chat.tokenizer.knowsThinking);
    const begun = talk.chat.tokenizer.beginsReasoning(thinking);
    const place = { chat: chat.id, position: position + 1, question: text, sampling, begun };
    const answering = new StreamingAnswer(place, position < chat.messages.length);
    await this.begin(answering, chat, () => {
      talk.chat.thinking = thinking;
      talk.chat.restore(turns);
      return talk.chat.send(text, { maxNewTokens: settings.maxNewTokens, sampling });
    });
  }

  private async continueLast(): Promise<void> {
    const { chat, talk } = this;
    const last = chat.messages.at(-1);
    const question = chat.messages.at(-2);
    if (this.busy || talk === null || last === undefined || question === undefined || !canGoOn(last)) return;
    if (last.target !== "" && last.target !== talk.target) {
      this.say("Another model wrote this answer; only that model can continue it.");
      return;
    }
    const sampling = last.cutOff!;
    const { begun } = last;
    const place = { chat: chat.id, position: chat.messages.length - 1, question: question.content, sampling, begun };
    const turns = turnsOf(chat.settings.system, chat.messages);
    await this.begin(new StreamingAnswer(place, false, last), chat, () => {
      talk.chat.thinking = thinkingOf(chat.settings, talk.chat.tokenizer.knowsThinking);
      if (!sameTurns(talk.chat.messages, turns)) talk.chat.restore(turns);
      return talk.chat.continueAnswer({ maxNewTokens: chat.settings.maxNewTokens, sampling });
    });
  }

  private async takeUpPending(): Promise<void> {
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
      const { begun, cutOff: sampling } = answer;
      const place = { chat: id, position: known + 1, question: question.content, sampling, begun };
      await this.begin(new StreamingAnswer(place), this.chat, () => events);
      return;
    }
  }

  /** Restore the device's text at the last disagreement. */
  private keepMine(): void {
    const events = this.talk?.chat.keepMine();
    const { last } = this;
    if (events === undefined || last === null || this.busy) return;
    void this.begin(new StreamingAnswer(last.place, false), this.answered, () => events);
  }

  // -- following an answer -----------------------------------------------------------------------

  /** Follow an answer. @param open returns its events; an error is shown to the user. */
  private async begin(answering: StreamingAnswer, chat: StoredChat, open: () => Events): Promise<void> {
    this.answering = answering;
    this.answered = chat;
    this.following = this.follow(open);
    this.host.changed();
    await this.following;
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
    if (answering instanceof CheckedAnswer) await this.checkEnded(answering, problem);
    else await this.answerEnded(answering);
    if (problem !== null) this.say(asSentence(problem.message));
    this.host.changed();
  }

  private take(answering: StreamingAnswer, event: ChatEvent): void {
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

  private onDisagreement({ droppedText }: Disagreement): void {
    const { onDisagreement } = this.settings();
    // The corrections of a check are reported at its end.
    if (this.answering instanceof CheckedAnswer && onDisagreement !== "mine") return;
    const words = countWords(droppedText);
    const keep = (): void => this.keepMine();
    switch (onDisagreement) {
      case "mine":
        keep();
        break;
      case "server":
        this.host.tell({ text: correctedSentence(words), actions: [{ label: "Undo", run: keep }] });
        break;
      case "ask":
        this.host.tell({
          text: `The server's text differs from “${droppedText.trim()}”, which this device wrote.`,
          actions: [
            { label: "Keep mine", run: keep },
            { label: "Take the server's", run: () => undefined },
          ],
        });
    }
  }

  private async answerEnded(answering: StreamingAnswer): Promise<void> {
    this.answering = null;
    if (!answering.message.finished) {
      const left = answering.replaces ? null : this.leftAlone(answering.place.position);
      if (left === null) answering.stop();
      else answering.setAside(left.text, left.mark);
    }
    this.last = answering;
    if (answering.message.content !== "") await this.keep(answering);
    else await this.takeBack(answering);
  }

  /** Store the answer as it stands, unless it replaces another one and has no confirmed words yet. */
  private async save(answering: StreamingAnswer): Promise<void> {
    if (answering.confirmed) answering.replaces = false;
    if (!answering.replaces) await this.keep(answering);
  }

  private async keep(answering: StreamingAnswer): Promise<void> {
    answering.message = { ...answering.message, target: this.talk?.target ?? "" };
    this.answered.messages = answering.shownIn(this.answered.messages);
    this.answered.updated = Date.now();
    await this.store(this.answered);
  }

  /** Give the question of an empty answer back; messages that it was to replace stay. */
  private async takeBack({ place, replaces }: StreamingAnswer): Promise<void> {
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

  /** Return text and mark of the answer at `position` that has just been left, if the device wrote any of it offline. */
  private leftAlone(position: number): { text: string; mark: NonNullable<Message["unconfirmed"]> } | null {
    const { messages: turns, unconfirmed } = this.talk!.chat;
    const last = turns.length - 1;
    const mark = unconfirmed.at(-1);
    if (mark?.turn !== last || last - (turns[0]?.role === "system" ? 1 : 0) !== position) return null;
    return { text: turns[last]!.content, mark };
  }

  // -- checks ------------------------------------------------------------------------------------

  private async checkEnded(answering: CheckedAnswer, problem: Error | null): Promise<void> {
    if (answering.done) {
      await this.settle(answering);
    } else if (problem !== null && this.talk?.chat.link.status === "online") {
      // Refused for good: the answer stays and is not checked again.
      answering.message = asWritten(answering.written);
      await this.put(answering, [answering.message]);
    }
    this.answering = null;
  }

  /** End a running check. */
  private async leaveCheck(): Promise<void> {
    if (!(this.answering instanceof CheckedAnswer)) return;
    this.leavingCheck = true;
    this.stop();
    await this.following;
    this.leavingCheck = false;
  }

  /** Return the next answer to check, those of the open chat first. Answers of another target wait for that one. */
  private async nextCheck(target: string): Promise<{ chat: StoredChat; checking: CheckedAnswer } | null> {
    const rows = (await this.attempt(() => this.chats.list(), [])).filter((row) => row.unconfirmed);
    const inOrder = [...rows.filter(({ id }) => id === this.chat.id), ...rows.filter(({ id }) => id !== this.chat.id)];
    for (const { id } of inOrder) {
      const chat = await this.one(id);
      for (const [position, written] of chat?.messages.entries() ?? []) {
        const mark = written.unconfirmed;
        const known = written.target === "" || written.target === target;
        const question = chat!.messages[position - 1];
        if (mark !== null && known && question?.role === "user") {
          const { begun } = written;
          const place = { chat: id, position, question: question.content, sampling: mark.sampling, begun };
          return { chat: chat!, checking: new CheckedAnswer(place, written, mark) };
        }
      }
    }
    return null;
  }

  /** Store a checked answer. If it changed, later answers of the same target belong to another conversation: they become
   * unconfirmed. */
  private async settle(checking: CheckedAnswer): Promise<void> {
    const { written, mark, place } = checking;
    const checked = { ...checking.message, target: written.target };
    const after = this.answered.messages.slice(place.position + 1);
    this.anyChecked = true;
    if (checked.content === written.content) {
      await this.put(checking, [checked, ...after]);
      return;
    }
    const most = mark.most === 0 ? 0 : Math.max(mark.most, this.answered.settings.maxNewTokens);
    const marked = after.map((later, number): Message => {
      const same = later.target === "" || later.target === written.target;
      if (later.role !== "assistant" || later.unconfirmed !== null || !same) return later;
      const turn = place.position + 1 + number;
      return { ...later, unconfirmed: { turn, sampling: later.cutOff ?? mark.sampling, most } };
    });
    await this.put(checking, [checked, ...marked]);
    this.note({ chat: place.chat, position: place.position, written, checked });
    this.correctedCount += correctedWords(written, checked.content);
  }

  private async put({ place }: CheckedAnswer, from: readonly Message[]): Promise<void> {
    const chat = this.answered;
    chat.messages = [...chat.messages.slice(0, place.position), ...from, ...chat.messages.slice(place.position + from.length)];
    await this.store(chat);
  }

  /** Note a correction. For an answer that was checked twice, the text written by the device is the first one. */
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

  /** Tell the user of the checks since the last report. */
  private report(): void {
    const { anyChecked, correctedCount, corrected } = this;
    this.anyChecked = false;
    this.correctedCount = 0;
    this.corrected = [];
    if (correctedCount > 0) {
      const run = (): void => void this.undo(corrected);
      this.host.tell({ text: correctedSentence(correctedCount), actions: [{ label: "Undo", run }] });
    } else if (anyChecked) {
      this.say("The server has confirmed what this device wrote.");
    }
  }

  /** Restore answers as the device wrote them; they are not checked again. Answers that have changed since stay. */
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
    if (!all) this.say("Answers that have changed since the correction stay as they are.");
    this.host.changed();
  }

  // -- storage -----------------------------------------------------------------------------------

  /** Return a chat, as the one object of it that is in use if there is one; null if it is not stored. */
  private async one(id: string): Promise<StoredChat | null> {
    if (id === this.chat.id) return this.chat;
    if (this.answering?.place.chat === id) return this.answered;
    const stored = await this.attempt(() => this.chats.get(id), null);
    return stored && { ...stored, messages: stored.messages.map(settled) };
  }

  private store(chat: StoredChat): Promise<void> {
    return this.attempt(() => this.chats.put(chat), undefined);
  }

  /** Use the storage; show an error to the user and return `otherwise`. */
  private async attempt<T>(does: () => Promise<T>, otherwise: T): Promise<T> {
    try {
      return await does();
    } catch (error) {
      this.say(asSentence((error as Error).message));
      return otherwise;
    }
  }

  private say(text: string): void {
    this.host.tell({ text, actions: [] });
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

/** Return an answer as the device wrote it, without the text that was taken back meanwhile. */
function asWritten(written: Message): Message {
  const alone = written.spans.length === 0 || !written.spans.every((span) => span.committed);
  return { ...written, unconfirmed: null, remarks: alone ? AS_WRITTEN : written.remarks, dropped: [] };
}
