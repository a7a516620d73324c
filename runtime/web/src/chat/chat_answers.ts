/** A chat's answers: followed while they are written, taken up again by the next program. */

import type { LoopEvent } from "../drafting/events.js";
import type { DraftingLoop } from "../drafting/loop.js";
import { ChatError } from "../errors.js";
import type { AnswerUpdate, ChatEvent } from "../events.js";
import type { Endpoint } from "../link/endpoint.js";
import type { Host } from "../link/host.js";
import type { Timing } from "../link/timing.js";
import type { ClientSession } from "../session/client.js";
import type { Origin, RolledBack } from "../session/events.js";
import type { SnapshotJson } from "../session/snapshot.js";
import type { ChatTokenizer } from "../text/chat_tokenizer.js";
import { AnswerRecord } from "./answer_record.js";
import { AnswerStream, type Follower } from "./answer_stream.js";
import type { ChatKeeper } from "./chat_keeper.js";
import { ChatLink } from "./chat_link.js";
import { stateToJson, type ChatState } from "./chat_state.js";
import { commonTurns, type Conversation, type Question } from "./conversation.js";
import { newStatistics } from "./statistics.js";
import type { Turns } from "./unconfirmed.js";

type Events = AsyncGenerator<ChatEvent, void, undefined>;

/** The beginning of an answer: tokens and where they came from. */
export interface Beginning {
  readonly tokens: readonly number[];
  readonly origins: readonly Origin[];
}

const NO_BEGINNING: Beginning = { tokens: [], origins: [] };

/** Answers, one after the other, and the conversation that they belong to. `Chat` is the class to use. */
export class ChatAnswers extends ChatLink {
  protected record: AnswerRecord;
  protected following = false;
  /** An answer of another program is under way, and nobody follows it yet. */
  protected isPending = false;
  /** The application has not heard the end of the record's answer. */
  protected unheard = false;
  /** While an answer is checked: turns and marks as they were, which stay until that is done. */
  protected checking: Turns | undefined;

  constructor(
    protected readonly session: ClientSession,
    loop: DraftingLoop,
    protected readonly conversation: Conversation,
    /** The bundle's. */
    readonly tokenizer: ChatTokenizer,
    private readonly endpoint: Endpoint,
    sessionId: string,
    timing: Timing,
    keeper: ChatKeeper,
    host: Host,
  ) {
    super(loop, endpoint, sessionId, timing, keeper, host);
    this.record = this.newRecord({ messages: [], kept: 0, supplied: [] });
  }

  /** What is being answered, or was last; empty before the first question. */
  get question(): string {
    return this.record.question.messages.at(-1)?.content ?? "";
  }

  /**
   * The answer that was under way when the program before ended: what it is the answer to says {@link question}, and
   * `messages` are the turns before.
   *
   * @returns its events, to be followed like those of `send`; the first has all that was there. Undefined where no answer
   *   was under way, or it is followed already.
   */
  pending(): AnswerStream | undefined {
    return this.isPending ? new AnswerStream((follower) => this.takeUp(follower)) : undefined;
  }

  /**
   * Take the answer back to the last `Disagreement` and keep what the device had written there. The target goes on behind
   * it. Without a disagreement nothing happens.
   *
   * @returns undefined while the answer is being written, whose events go on; after it, the events of what is written now,
   *   to be followed like those of `send`.
   */
  keepMine(): AnswerStream | undefined {
    const { disputed } = this.record;
    this.record.disputed = undefined;
    if (!disputed) return undefined;
    if (!this.following && !this.isPending) return new AnswerStream((follower) => this.reopen(follower, disputed));
    this.takeBack(disputed);
    return undefined;
  }

  // -- helpers ---------------------------------------------------------------------------------

  protected checkIdle(): void {
    if (this.following) throw new ChatError("an answer is being written: stop it or wait for its end");
  }

  protected checkComplete(): void {
    if (!this.isPending) return;
    throw new ChatError("the answer of the stored chat is not complete: follow pending(), or restore() other turns");
  }

  /** Have the loop ask, and follow the answer, of whose beginning tokens and origins may be known. */
  protected async *ask(follower: Follower, question: Question, ask: () => void, known = NO_BEGINNING): Events {
    this.events.clear();
    const edition = this.events.askForEdition();
    const asked = new Promise<void>((resolve) => {
      this.driver.post(() => {
        this.events.beginEdition(edition);
        this.record = this.newRecord(question);
        this.unheard = true;
        this.record.resume(known.tokens, known.origins, newStatistics());
        ask();
        resolve(this.keeper.save());
      });
    });
    // Whoever has seen a part of the answer finds the question again.
    yield* this.follow(follower, this.keeper.keeps ? asked : undefined);
  }

  private newRecord(question: Question): AnswerRecord {
    return new AnswerRecord(this.tokenizer, question, () => this.driver.bytesMoved, this.host);
  }

  private async *takeUp(follower: Follower): Events {
    this.checkIdle();
    this.isPending = false;
    yield* this.follow(follower);
  }

  private async *follow(follower: Follower, asked?: Promise<void>): Events {
    this.following = true;
    let ended = false;
    try {
      if (asked) await this.loopEnd.before(asked);
      while (!ended) {
        const event = await this.events.get(follower);
        if (event === "left") return;
        if (event === "end" || event.event === "AnswerFinished") {
          this.following = false;
          ended = true;
        }
        if (event === "end") return;
        if (event.event === "AnswerFinished") this.answered(event.text);
        yield event;
      }
    } finally {
      if (!ended) {
        try {
          await this.stopAnswer();
        } finally {
          this.following = false;
        }
      }
    }
  }

  /** Go on with an answer that has ended. */
  private async *reopen(follower: Follower, disputed: RolledBack): Events {
    this.checkIdle();
    this.checkAccepted();
    this.conversation.restore(this.record.question.messages);
    this.record.resumeClock();
    this.takeBack(disputed);
    yield* this.follow(follower);
  }

  private takeBack({ start, tokens }: RolledBack): void {
    const edition = this.events.askForEdition();
    this.driver.post(() => {
      this.events.beginEdition(edition);
      this.unheard = true;
      this.loop.keep(start, tokens);
      this.record.takeBack(start);
      this.publish();
      void this.keeper.save();
    });
  }

  /** Cancel, and keep of question and answer what the target has confirmed, and what the device wrote without it. */
  private async stopAnswer(): Promise<void> {
    if (this.closed) return;
    let written = "";
    let most = 0;
    const stopped = new Promise<void>((resolve) => {
      this.driver.post(() => {
        [written, most] = this.writtenAlone();
        this.loop.cancel();
        resolve();
      });
    });
    await this.loopEnd.before(stopped);
    if (!this.unheard || this.closed) return;
    const { conversation, loop, record, session } = this;
    if (written) conversation.setAside(record.question, written, session.sampling, most, this.policy === "keep");
    else if (loop.committed.length >= record.start) this.answered(record.confirmedText());
    this.unheard = false;
    void this.keeper.save();
  }

  /**
   * The answer as it stands and how many tokens it may have, if the device wrote of it without the verifier; else no text.
   * Where it is not at its end, the user wants no more.
   */
  private writtenAlone(): [string, number] {
    const { loop, session } = this;
    if (!loop.unconfirmed.some(([, origin]) => origin === "offline")) return ["", 0];
    const { committed, tentative } = this.record.update(loop.unconfirmed);
    const most = session.tentativeFinish ? session.maxNewTokens : session.length - session.answerStart;
    return [committed + tentative, most];
  }

  /** The conversation's turns, and the marks of those that are unconfirmed. */
  protected get turns(): Turns {
    return this.checking ?? { messages: this.conversation.messages, marks: this.conversation.unconfirmed };
  }

  private answered(text: string): void {
    this.record.pauseClock();
    this.conversation.answered(this.record.question, text, this.loop.committed.length);
    this.unheard = false;
    void this.keeper.save();
  }

  // -- from program to program -----------------------------------------------------------------

  /** What the next program needs. */
  protected state(): SnapshotJson {
    const { conversation, record } = this;
    let { messages, marks } = this.turns;
    let answer: ChatState["answer"] = null;
    if (this.unheard && !this.checking) {
      const { ended, origins, question, start } = record;
      answer = { question: this.question, kept: question.kept, start, origins, statistics: record.figures(), ended };
      messages = question.messages.slice(0, -1);
      marks = marks.filter(({ turn }) => turn < messages.length);
    }
    const same = commonTurns(conversation.messages, messages); // the tokens of a check may be of another text
    const ends = conversation.ends.filter(([turns]) => turns <= same);
    const session = this.session.snapshot();
    const { sessionId } = this;
    return stateToJson({ server: this.endpoint.url, session, messages, ends, answer, unconfirmed: marks, sessionId });
  }

  /** Go on where another program ended; the session does already. */
  protected resume({ answer, ends, messages, session: snapshot, unconfirmed }: ChatState): void {
    const { conversation, session } = this;
    const { committed } = session;
    conversation.resume(messages, ends, answer ? answer.kept : committed.length, unconfirmed);
    if (!answer) {
      const start = Number(snapshot["answer_start"] ?? 0);
      this.record = this.newRecord({ messages: [], kept: 0, supplied: committed.slice(0, start) });
      return;
    }
    const asked = [...messages, { role: "user", content: answer.question }];
    const question = conversation.question(asked, session.tokens.slice(0, answer.start), answer.kept);
    const record = (this.record = this.newRecord(question));
    record.resume(committed.slice(answer.start), answer.origins, answer.statistics);
    if (!session.answering && answer.ended === null) {
      // The user had stopped it.
      if (committed.length >= answer.start) conversation.answered(question, record.confirmedText(), committed.length);
      return;
    }
    this.unheard = this.isPending = true;
    this.events.publish(record.update(this.loop.unconfirmed), true);
    if (answer.ended !== null) this.events.put(record.finish(answer.ended));
    else record.statistics.reconnects++;
  }

  // -- what the loop says ----------------------------------------------------------------------

  protected override hear(event: LoopEvent): void {
    this.record.hear(event);
    if (event.event === "Committed") this.committed();
    else if (event.event === "Drafted") this.publish();
    else if (event.event === "Finished") this.events.put(this.record.finish(event.reason));
    else if (event.event === "PauseBegan") this.events.put({ event: "Paused", reason: event.reason });
    else if (event.event === "LinkChanged" && this.following) this.events.put(event);
    // What is kept by the user's policy nobody would write again.
    const kept = event.event === "Committed" && event.origins.includes("kept");
    if (kept || event.event === "Finished" || event.event === "Welcomed") void this.keeper.save();
    else this.keeper.touch();
    super.hear(event);
  }

  private committed(): void {
    const disagreement = this.record.disagreement(this.publish());
    const { disputed } = this.record;
    if (disputed && !this.loop.mayKeep(disputed.start, disputed.tokens)) {
      this.record.disputed = undefined; // where nothing can be kept, nobody is asked
    } else if (disagreement && this.policy === "ask") {
      this.events.put(disagreement);
    }
  }

  private publish(): AnswerUpdate {
    const update = this.record.update(this.loop.unconfirmed);
    this.events.publish(update);
    return update;
  }
}
