/** A chat with the target: the runtime's front door. */

import { AnswerStream, type Answer, type Follower } from "./answer_stream.js";
import { AnswerRecord } from "./answer_view.js";
import {
  samplingOf,
  type ChatBundle,
  type ChatOptions,
  type ConnectOptions,
  type Overflow,
  type SendOptions,
  type Where,
} from "./chat_options.js";
import {
  ChatSaver,
  restoreSession,
  sessionIdFor,
  stateFromJson,
  stateToJson,
  type ChatState,
  type ChatStore,
} from "./chat_store.js";
import { hasGraph } from "./bundle/manifest.js";
import { ChatTemplateError, type ChatTokenizer, type Message } from "./chat_tokenizer.js";
import { USUAL_TIMING, type Timing } from "./connection.js";
import {
  Conversation,
  commonTurns,
  isAnswer,
  lengthOf,
  type Question,
  type Turns,
  type Unconfirmed,
} from "./conversation.js";
import { CostModel } from "./drafting/cost_model.js";
import type { LoopEvent } from "./drafting/events.js";
import { DraftingLoop } from "./drafting/loop.js";
import { USUAL_CONDITIONS, USUAL_SETTINGS, type Conditions, type Offline } from "./drafting/settings.js";
import { Driver } from "./driver.js";
import { Ending } from "./ending.js";
import { Endpoint, newSessionId } from "./endpoint.js";
import { ChatError, ConnectError, ContextFullError, MoaError } from "./errors.js";
import { EventQueue } from "./event_queue.js";
import type { AnswerUpdate, ChatEvent, LinkChanged } from "./events.js";
import { afterReasoning } from "./grammar/after_reasoning.js";
import type { Host } from "./host.js";
import { ClientSession } from "./session/client.js";
import type { Origin, Policy, RolledBack } from "./session/events.js";
import type { Sampling } from "./session/sampling.js";
import type { SnapshotJson } from "./session/snapshot.js";
import { newStatistics } from "./statistics.js";
import { commonLength } from "./tokens.js";
import { checkRequest } from "./validate.js";
import { RowEncoding } from "./wire/moa/v1/session_pb.js";

const USUAL_LENGTH = 512;

/** Ask for an answer; return a promise that is done when the question is stored, or undefined if there is nothing to ask. */
type Ask = () => Promise<unknown> | undefined;

/** The known beginning of an answer: tokens and their origins. */
interface Beginning {
  readonly tokens: readonly number[];
  readonly origins: readonly Origin[];
}

const NO_BEGINNING: Beginning = { tokens: [], origins: [] };

/** The outcome that `open` waits for. */
interface Opening {
  readonly opened: () => void;
  readonly failed: (error: MoaError) => void;
}

/**
 * One conversation. It keeps its history over turns and survives lost connections. Use {@link Chat.connect}:
 *
 * ```ts
 * const chat = await Chat.connect(bundle, { url: "wss://host" }, { drafter, host: browserHost() });
 * for await (const event of chat.send("Name three primary colours.")) console.log(event);
 * ```
 */
export class Chat {
  /** Called when the link has changed, between answers, too. */
  onLink: ((link: LinkChanged) => void) | undefined;
  private readonly events = new EventQueue();
  private readonly driver: Driver;
  private readonly loopEnd = new Ending(); // the loop has ended: the chat is closed, or there was a defect
  private record: AnswerRecord;
  private follower: Follower | undefined; // of the answer that is followed
  private isPending = false; // an answer of another program is under way, and is not followed yet
  private unfinished = false; // the application has not received the end of the record's answer
  private checking: Turns | undefined; // during a check: turns and marks as they were before it
  private closed = false;
  private refusal: ChatError | undefined;
  private opening: Opening | undefined;
  private running: Promise<void> | undefined;

  private constructor(
    private readonly session: ClientSession,
    private readonly loop: DraftingLoop,
    private readonly conversation: Conversation,
    /** The bundle's tokenizer. */
    readonly tokenizer: ChatTokenizer,
    private readonly ownContext: number, // the bundle's
    private readonly overflow: Overflow,
    private readonly endpoint: Endpoint,
    private readonly sessionId: string,
    timing: Timing,
    private readonly saver: ChatSaver,
    private readonly host: Host,
  ) {
    loop.listen((event) => this.hear(event));
    this.driver = new Driver(loop, endpoint, sessionId, timing, host, {
      problem: (error) => this.onProblem(error, error.final),
      rest: () => this.opened(),
      store: () => (saver.keeps ? saver.save() : undefined),
    });
    this.record = this.newRecord({ messages: [], kept: 0, supplied: [] });
  }

  /**
   * Make a chat that does not connect before {@link open}.
   *
   * @throws ConnectError the address is invalid.
   * @throws StoreError the store is in use, or its content can be neither used nor set aside.
   */
  static async create(bundle: ChatBundle, { token, url }: Where, options: ChatOptions): Promise<Chat> {
    const { controller, drafter, host, overflow = "error", policy = "rollback", store, system = "", writer } = options;
    const { architecture, fingerprints, maxContext, stopTokens, vocabSize } = bundle.manifest;
    const tokenizer = await bundle.tokenizer();
    const endpoint = new Endpoint(url, token);
    // Memory rows are most of a verdict's bytes, and without a drafter they are not used.
    const rowEncoding = drafter && hasGraph(architecture ?? "moa") ? RowEncoding.INT8 : RowEncoding.UNSPECIFIED;
    const restored = (content: unknown) => {
      const state = stateFromJson(content);
      return { state, session: restoreSession(state, endpoint.url, fingerprints, { stopTokens, rowEncoding, vocabSize }) };
    };
    const saver: ChatSaver = new ChatSaver(() => chat.state(), host);
    const saved = store && (await saver.open(store, restored));
    const session = saved?.session ?? new ClientSession(fingerprints, { stopTokens, rowEncoding, vocabSize });
    session.policy = policy;
    const settings = { ...USUAL_SETTINGS, ...options.settings };
    const loop = new DraftingLoop(session, drafter, controller ?? new CostModel(), settings, writer);
    const timing = { ...USUAL_TIMING, ...options.timing };
    const conversation = new Conversation(tokenizer, system);
    const sessionId = saved ? sessionIdFor(saved.state, endpoint.url) : newSessionId();
    const rest = [endpoint, sessionId, timing, saver, host] as const;
    const chat = new Chat(session, loop, conversation, tokenizer, maxContext, overflow, ...rest);
    if (saved) chat.resume(saved.state);
    return chat;
  }

  /**
   * Make a chat and open the first connection.
   *
   * @throws ConnectError no verifier answers there, or it refuses the token.
   * @throws StoreError see {@link create}.
   * @throws MoaError the verifier serves another target, tokenizer or drafter than the bundle's.
   */
  static async connect(bundle: ChatBundle, where: Where, options: ConnectOptions): Promise<Chat> {
    const chat = await Chat.create(bundle, where, options);
    try {
      await chat.open(options.wait);
    } catch (error) {
      await chat.close();
      throw error;
    }
    return chat;
  }

  // -- the link ----------------------------------------------------------------------------------

  /**
   * Begin to connect.
   *
   * @param wait until the verifier has answered. Otherwise the chat begins offline, and `send` throws a refusal. The same holds
   *   with `wait` if no connection is made: in the background ({@link tellConditions}), or if the user goes offline before
   *   ({@link workOffline}) or meanwhile.
   * @throws ConnectError the chat was closed meanwhile; for the rest see {@link Chat.connect}.
   */
  async open(wait = true): Promise<void> {
    const opened = wait && new Promise<void>((resolve, reject) => (this.opening = { opened: resolve, failed: reject }));
    this.driver.begin();
    this.running = this.run();
    await opened;
  }

  /**
   * Disconnect from the verifier. A waiting {@link open} fails; the events of a running answer end. If the chat is stored, the
   * next program continues the answer.
   */
  async close(): Promise<void> {
    this.closed = true;
    void this.saver.save();
    this.events.end();
    this.takeOpening()?.failed(new ConnectError("the chat was closed before the verifier had answered", true));
    try {
      await this.driver.close();
      await this.running;
    } finally {
      await this.saver.close();
    }
  }

  /** The link's last change, between answers, too. */
  get link(): LinkChanged {
    return this.loop.link;
  }

  /** The link's state, as the user should see it. */
  get status(): LinkChanged["status"] {
    return this.loop.link.status;
  }

  /** Drop the connection and make no other, or connect again unless the chat is closed. */
  async workOffline(offline: boolean): Promise<void> {
    if (offline) await this.driver.goOffline();
    else if (!this.closed) this.driver.goOnline();
  }

  /**
   * Note that the device has another network: replace the connection, which may be dead, at once, not after the next ping or
   * backoff. No effect while working offline.
   */
  async networkChanged(): Promise<void> {
    await this.driver.reconnect();
  }

  /** The conditions last set by {@link tellConditions}. */
  get conditions(): Conditions {
    return this.driver.conditions;
  }

  /** Set what the host knows: hidden page, low power, metered network. Conditions left out are false. */
  tellConditions(conditions: Partial<Conditions>): void {
    this.driver.tellConditions({ ...USUAL_CONDITIONS, ...conditions });
  }

  /** What happens to text that was written offline; may be set at any time. */
  get policy(): Policy {
    return this.loop.policy;
  }

  set policy(policy: Policy) {
    this.loop.policy = policy;
  }

  /** What writes during an outage; may be set at any time. */
  get offline(): Offline {
    return this.loop.offline;
  }

  set offline(offline: Offline) {
    this.loop.offline = offline;
    this.driver.post(() => undefined); // an answer may wait for it
  }

  /**
   * Whether the target reasons before the next answers; undefined for its template's default. Set it between answers.
   *
   * @throws ChatTemplateError the template cannot switch it.
   */
  get thinking(): boolean | undefined {
    return this.conversation.thinking;
  }

  set thinking(thinking: boolean | undefined) {
    if (thinking !== undefined && !this.tokenizer.knowsThinking) {
      throw new ChatTemplateError("this target's chat template cannot switch reasoning on or off: leave it out");
    }
    this.conversation.thinking = thinking;
  }

  // -- the store ---------------------------------------------------------------------------------

  /** Store the conversation now, because the program may be frozen or ended; done when it is stored. */
  async save(): Promise<void> {
    await this.saver.save();
  }

  /**
   * Store the conversation there from now on, in place of the store's content. To continue that content, see
   * {@link Chat.connect}.
   *
   * @throws StoreError this chat is stored already, or the store is in use or cannot be used.
   */
  async keepIn(store: ChatStore): Promise<void> {
    await this.saver.open(store, () => undefined);
    await this.saver.save();
  }

  /** Why the stored chat was not continued, or why this one is not stored now, in a sentence; empty if all is well. */
  get storeProblem(): string {
    return this.saver.problem;
  }

  // -- the conversation --------------------------------------------------------------------------

  /** The turns so far, finished answers included. */
  get messages(): readonly Message[] {
    return [...this.turns.messages];
  }

  /** Tokens of the whole conversation that the target has confirmed. */
  get tokens(): readonly number[] {
    const { committed } = this.loop;
    return this.followed || this.isPending ? [...committed] : committed.slice(0, this.conversation.length);
  }

  /** Tokens of the conversation before the last answer. */
  get promptTokens(): number {
    return this.record.start;
  }

  /** Those of them that were sent with the last question, because the verifier had not read them yet. */
  get newTokens(): number {
    return this.record.question.supplied.length;
  }

  /** The question of the running or last answer; empty before the first question. */
  get question(): string {
    return this.record.question.messages.at(-1)?.content ?? "";
  }

  /**
   * The answers among `messages` that {@link check} would check, in order: written without the verifier and then left, by the
   * user or because there was nothing more to write.
   */
  get unconfirmed(): readonly Unconfirmed[] {
    return [...this.turns.marks];
  }

  /**
   * Set the conversation to these turns, so that the next question continues them.
   *
   * Use it to regenerate an answer (all turns but the last two), to edit a question (the turns before it) and to open a stored
   * chat. Works offline, too. The common beginning of new and old turns is not sent again. An answer that is being written is
   * dropped, and so is a `pending` one of another program.
   *
   * @param messages none, a system message, or turns up to an answer.
   * @param unconfirmed those answers among them that `check` is to have checked.
   * @throws MoaError a malformed message, or a mark on a turn that is no answer.
   */
  restore(messages: readonly Message[], unconfirmed: readonly Unconfirmed[] = []): void {
    this.conversation.restore(messages, unconfirmed);
    this.record.disputed = this.checking = undefined;
    this.follower?.leave();
    if (this.follower || this.isPending) {
      this.isPending = this.unfinished = false;
      this.driver.post(() => {
        this.unfinished = false; // the loop may have been about to ask
        this.loop.cancel();
      });
    }
    this.saver.touch();
  }

  // -- answers -----------------------------------------------------------------------------------

  /**
   * Ask, and follow the answer as it is written; the last event is `AnswerFinished`, unless the chat is closed before.
   *
   * Leaving the iteration early stops the answer at its last confirmed token. Asking anything else leaves it, too: its iteration
   * ends. Text that the device has written without the verifier stays as well, and is `unconfirmed`; with policy `keep` it stays
   * without a mark.
   *
   * With the first event it throws:
   *
   * @throws ContextFullError the conversation does not fit the target's context.
   * @throws ChatError the verifier refused it, or another answer is `pending`.
   * @throws ChatTemplateError the target's template refuses the conversation.
   */
  send(text: string, options: SendOptions = {}): AnswerStream {
    return this.stream(() => this.sent(text, options));
  }

  /**
   * Continue the last answer, which was cut off at its greatest length or stopped. Events, and leaving them, as with
   * {@link send}: texts are of the whole answer, figures of the continuation.
   *
   * With the sampling of the question (the default), seed included, the answer becomes the one that a larger limit would have
   * made. Its tokens are kept; an answer that came by {@link restore} is encoded from its text. `maxNewTokens` limits the
   * continuation.
   *
   * With the first event it throws:
   *
   * @throws ContextFullError the target's context is full.
   * @throws ChatError see {@link send}; there is no such answer, it has ended by itself, or it is `unconfirmed`.
   */
  continueAnswer(options: SendOptions = {}): AnswerStream {
    return this.stream(() => this.continued(options));
  }

  /**
   * Follow the answer that was under way when the program before ended. {@link question} is its question, and `messages` are
   * the turns before.
   *
   * @returns its events, like those of `send`; the first has all that was there. Undefined if no answer was under way, or it is
   *   followed already.
   */
  pending(): AnswerStream | undefined {
    return this.isPending ? this.stream(() => this.takeUp()) : undefined;
  }

  /**
   * Take the answer back to the last `Disagreement` and keep the device's text there. The target continues after it. No effect
   * without a disagreement, or after a {@link check} of an answer that other turns follow.
   *
   * @returns undefined while the answer is being written, because its events go on; afterwards the events of the continuation,
   *   like those of `send`.
   */
  keepMine(): AnswerStream | undefined {
    const { disputed } = this.record;
    this.record.disputed = undefined;
    if (!disputed || (this.checking && !this.followed)) return undefined; // leaving a check changes nothing
    if (!this.followed && !this.isPending) return this.stream(() => this.reopen(disputed));
    this.takeBack(disputed);
    return undefined;
  }

  /**
   * Have the verifier check the first of {@link unconfirmed}: the device's text is the draft of the answer, and the target's
   * text replaces it from the first difference on.
   *
   * The turns after it stay. If the answer changed, theirs belong to another conversation and become unconfirmed. Leaving the
   * iteration early changes nothing. If the verifier refuses the answer, it stays as the device wrote it and is no longer
   * unconfirmed.
   *
   * @returns the answer's events, like those of `send`; none if all is confirmed, or without a link. With the first it throws
   *   ChatError if an answer is `pending`.
   */
  check(): AnswerStream {
    return new AnswerStream((follower) => this.checked(follower));
  }

  // -- asking ------------------------------------------------------------------------------------

  private sent(text: string, options: SendOptions): Promise<unknown> {
    const { maxNewTokens = USUAL_LENGTH, whileAway = true } = options;
    const sampling = this.chosen(options.sampling ?? {});
    this.checkReady();
    checkRequest(maxNewTokens, sampling, this.session.capabilities);
    const { loop, maxContext } = this;
    this.limitContext();
    const question = this.conversation.ask(loop.committed, text);
    const length = lengthOf(question);
    if (length >= maxContext) {
      throw new ContextFullError(
        `the conversation would have ${length} tokens, the target's context holds ${maxContext}; shorten the message or ` +
          "begin a new chat",
      );
    }
    const most = Math.min(maxNewTokens, maxContext);
    const ask = (): void => loop.ask(question.kept, question.supplied, sampling, most, { whileAway });
    return this.ask(question, ask);
  }

  private continued(options: SendOptions): Promise<unknown> {
    const { maxNewTokens = USUAL_LENGTH, whileAway = true } = options;
    this.checkReady();
    const { conversation, loop, maxContext, record } = this;
    const sampling = options.sampling ? this.chosen(options.sampling) : this.session.sampling;
    checkRequest(maxNewTokens, sampling, this.session.capabilities);
    const { committed } = loop;
    this.limitContext();
    const [question, tokens] = conversation.lastAnswer(committed);
    const last = tokens.at(-1);
    if (last === undefined || this.tokenizer.stopTokens.has(last)) {
      throw new ChatError("the answer has ended by itself: there is nothing to continue");
    }
    const whole = [...committed.slice(0, question.kept), ...question.supplied, ...tokens];
    if (whole.length >= maxContext) {
      const text = `the target's context holds ${maxContext} tokens, which the conversation has: begin a new chat`;
      throw new ContextFullError(text);
    }
    const asked = record.question.messages;
    const sameTurns = commonTurns(asked, question.messages) === Math.max(asked.length, question.messages.length);
    const known = sameTurns && record.origins.length === tokens.length;
    const origins: Origin[] = known ? record.origins : tokens.map(() => "corrected");
    const kept = commonLength(committed, whole);
    const start = lengthOf(question);
    const most = Math.min(maxNewTokens, maxContext);
    conversation.restore(question.messages.slice(0, -1), conversation.unconfirmed);
    const goOn = (): void => loop.continueAnswer(kept, whole.slice(kept), start, sampling, most, whileAway);
    return this.ask(question, goOn, { tokens, origins });
  }

  /** Return the sampling of an answer, which may reason before it conforms to a schema. */
  private chosen(asked: Partial<Sampling>): Sampling {
    const { tokenizer } = this;
    const sampling = samplingOf(asked);
    if (!sampling.grammar) return sampling;
    return afterReasoning(sampling, tokenizer.thought(this.thinking), tokenizer.specialIds);
  }

  private checked(follower: Follower): Answer {
    const { conversation, loop, session } = this;
    let check: { readonly mark: Unconfirmed; readonly written: string; readonly before: Turns } | undefined;
    let done = false;
    const answer = this.follow(follower, () => {
      this.checkComplete();
      const { messages, unconfirmed: marks } = conversation;
      const mark = marks[0];
      if (!mark || this.status !== "online") return undefined;
      const written = messages[mark.turn]!.content;
      conversation.restore(messages.slice(0, mark.turn - 1));
      const before = (this.checking = { messages, marks });
      check = { mark, written, before };
      this.limitContext();
      const question = conversation.ask(loop.committed, messages[mark.turn - 1]!.content);
      const draft = this.tokenizer.encode(written);
      const most = Math.min(mark.most, session.limits.maxContext);
      return this.ask(question, () => {
        loop.ask(question.kept, question.supplied, mark.sampling, most, { draft });
        this.publish(); // otherwise the first verdict could not say what it replaces
      });
    });
    const next = async (): Promise<ChatEvent | undefined> => {
      const event = await answer.next();
      if (check && event?.event === "AnswerFinished") {
        const { mark, written } = check;
        const { marks, messages } = check.before;
        conversation.add(messages, this.marksAfter(marks, mark, messages, event.text !== written));
        done = true;
        this.checking = undefined;
        if (mark.turn < messages.length - 1) this.record.disputed = undefined; // keeping it would drop the turns after it
        void this.saver.save();
      }
      return event;
    };
    const end = async (error?: unknown): Promise<void> => {
      try {
        await answer.end();
      } finally {
        if (check && !done) {
          const { messages, marks } = check.before;
          // Refused for good, for example because the target's context has no room for it: asking again would not help.
          const refused = error instanceof MoaError && this.status === "online";
          this.record.disputed = undefined;
          if (this.checking === check.before) {
            this.checking = undefined;
            conversation.restore(messages, refused ? marks.slice(1) : marks);
            this.saver.touch();
          }
        }
      }
    };
    return { begin: answer.begin, next, end };
  }

  /**
   * Return the marks after a turn that was checked. An answer without a mark has no known limit; the limit is then at least its
   * current length.
   */
  private marksAfter(
    marks: readonly Unconfirmed[],
    checked: Unconfirmed,
    turns: readonly Message[],
    changed: boolean,
  ): Unconfirmed[] {
    const known = marks.filter(({ turn }) => turn > checked.turn);
    if (!changed) return known;
    const left: Unconfirmed[] = [];
    for (let turn = checked.turn + 1; turn < turns.length; turn++) {
      const mark = known.find((each) => each.turn === turn);
      if (mark) {
        left.push(mark);
      } else if (isAnswer(turns, turn)) {
        const length = this.tokenizer.encode(turns[turn]!.content).length + 1; // and its stop token
        left.push({ turn, sampling: checked.sampling, most: checked.most ? Math.max(checked.most, length) : 0 });
      }
    }
    return left;
  }

  /** Tell the conversation how many tokens the target holds, if it is to be trimmed. */
  private limitContext(): void {
    this.conversation.context = this.overflow === "trim" ? this.maxContext : 0;
  }

  /** Tokens that the target's context holds here: a verifier may hold fewer, which its first answer tells. */
  private get maxContext(): number {
    const { capabilities, limits } = this.session;
    return capabilities === null ? this.ownContext : Math.min(this.ownContext, limits.maxContext);
  }

  /** Have the loop ask for an answer, whose beginning may be known. */
  private ask(question: Question, ask: () => void, known = NO_BEGINNING): Promise<unknown> {
    this.events.clear();
    const edition = this.events.askForEdition();
    const asked = new Promise<void>((resolve) => {
      this.driver.post(() => {
        this.events.beginEdition(edition);
        this.record = this.newRecord(question);
        this.unfinished = true;
        const statistics = { ...newStatistics(), droppedTurns: question.dropped ?? 0 };
        this.record.resume(known.tokens, known.origins, statistics);
        ask();
        resolve(this.saver.save());
      });
    });
    // The question is stored before any part of its answer is shown.
    return this.saver.keeps ? this.loopEnd.before(asked) : Promise.resolve();
  }

  private newRecord(question: Question): AnswerRecord {
    return new AnswerRecord(this.tokenizer, question, () => this.driver.bytesMoved, this.host);
  }

  private takeUp(): Promise<unknown> {
    this.isPending = false;
    return Promise.resolve();
  }

  /** Continue an answer that has ended. */
  private reopen(disputed: RolledBack): Promise<unknown> {
    this.checkReady();
    this.conversation.restore(this.record.question.messages);
    this.record.resumeClock();
    this.takeBack(disputed);
    return Promise.resolve();
  }

  private takeBack({ start, tokens }: RolledBack): void {
    const edition = this.events.askForEdition();
    this.driver.post(() => {
      this.events.beginEdition(edition);
      this.unfinished = true;
      this.loop.keep(start, tokens);
      this.record.takeBack(start);
      this.publish();
      void this.saver.save();
    });
  }

  private stream(ask: Ask): AnswerStream {
    return new AnswerStream((follower) => this.follow(follower, ask));
  }

  /** Return the answer that `ask` asks for, after the one that is followed now has stopped. */
  private follow(follower: Follower, ask: Ask): Answer {
    let asked = false;
    let known = "";
    const begin = async (): Promise<void> => {
      while (this.follower) await this.follower.stop();
      this.follower = follower; // at once: another question may have waited, too
      if (follower.left) return;
      const stored = ask();
      asked = stored !== undefined;
      await stored;
    };
    const next = async (): Promise<ChatEvent | undefined> => {
      const event = asked ? await this.events.get(follower) : "left";
      if (event === "left") return undefined;
      if (event === "end" || event.event === "AnswerFinished") {
        this.follower = undefined;
        asked = false;
      }
      if (event === "end") return undefined;
      if (event.event === "AnswerFinished") this.answered(event.text);
      if (event.event !== "AnswerUpdate") return event;
      const update = event.since(known);
      known = event.committed;
      return update;
    };
    const end = async (): Promise<void> => {
      try {
        if (asked) await this.stopAnswer();
      } finally {
        if (this.follower === follower) this.follower = undefined;
      }
    };
    return { begin, next, end };
  }

  /** Cancel the answer; keep its confirmed part, and the text that the device wrote without the verifier. */
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
    if (!this.unfinished || this.closed) return;
    const { conversation, loop, record, session } = this;
    if (written) conversation.setAside(record.question, written, session.sampling, most, this.policy === "keep");
    else if (loop.committed.length >= record.start) this.answered(record.confirmedText());
    this.unfinished = false;
    void this.saver.save();
  }

  /**
   * Return the answer as it stands and its token limit, if the device wrote any of it without the verifier; else no text. The
   * limit of an answer that is not at its end is its length, because the user has stopped it.
   */
  private writtenAlone(): [string, number] {
    const { loop, session } = this;
    if (!loop.unconfirmed.some(([, origin]) => origin === "offline")) return ["", 0];
    const { committed, tentative } = this.record.update(loop.unconfirmed);
    const most = session.tentativeFinish ? session.maxNewTokens : session.length - session.answerStart;
    return [committed + tentative, most];
  }

  private answered(text: string): void {
    this.record.pauseClock();
    this.conversation.answered(this.record.question, text, this.loop.committed.length);
    this.unfinished = false;
    void this.saver.save();
  }

  /** The conversation's turns, and the marks of those that are unconfirmed. */
  private get turns(): Turns {
    return this.checking ?? { messages: this.conversation.messages, marks: this.conversation.unconfirmed };
  }

  // -- from program to program -------------------------------------------------------------------

  /** Return the state that the next program needs. */
  private state(): SnapshotJson {
    const { conversation, record } = this;
    let { messages, marks } = this.turns;
    let answer: ChatState["answer"] = null;
    if (this.unfinished && !this.checking) {
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

  /** Continue from the state of another program; the session is restored already. */
  private resume({ answer, ends, messages, session: snapshot, unconfirmed }: ChatState): void {
    const { conversation, session } = this;
    const { committed } = session;
    conversation.resume(messages, ends, answer ? answer.kept : committed.length, unconfirmed);
    if (!answer) {
      const start = Number(snapshot["answer_start"] ?? 0);
      this.record = this.newRecord({ messages: [], kept: 0, supplied: committed.slice(0, start) });
      return;
    }
    const asked = [...messages, { role: "user", content: answer.question }];
    const dropped = answer.statistics.droppedTurns;
    const question = { ...conversation.question(asked, session.tokens.slice(0, answer.start), answer.kept), dropped };
    const record = (this.record = this.newRecord(question));
    record.resume(committed.slice(answer.start), answer.origins, answer.statistics);
    if (!session.answering && answer.ended === null) {
      // The user had stopped it.
      if (committed.length >= answer.start) conversation.answered(question, record.confirmedText(), committed.length);
      return;
    }
    this.unfinished = this.isPending = true;
    this.events.publish(record.update(this.loop.unconfirmed), true);
    if (answer.ended !== null) this.events.put(record.finish(answer.ended));
    else record.statistics.reconnects++;
  }

  // -- events of the loop ------------------------------------------------------------------------

  private hear(event: LoopEvent): void {
    if (event.event === "Decided") this.record.noteDtype(this.session.dtype);
    this.record.hear(event);
    if (event.event === "Committed") this.committed();
    else if (event.event === "Drafted") this.publish();
    else if (event.event === "Finished") this.events.put(this.record.finish(event.reason));
    else if (event.event === "PauseBegan") this.events.put({ event: "Paused", reason: event.reason });
    else if (event.event === "LinkChanged" && this.followed) this.events.put(event);
    // Text kept by the user's policy is stored at once: the target would not write it again.
    if (event.event === "LinkChanged") this.onLink?.(event);
    const kept = event.event === "Committed" && event.origins.includes("kept");
    if (kept || event.event === "Finished" || event.event === "Welcomed") void this.saver.save();
    else this.saver.touch();
    if (event.event === "LinkChanged" && event.status === "online") this.opened();
    else if (event.event === "Problem") this.onProblem(new MoaError(event.error), event.final);
  }

  private committed(): void {
    const disagreement = this.record.disagreement(this.publish());
    const { disputed } = this.record;
    if (disputed && !this.loop.mayKeep(disputed.start, disputed.tokens)) {
      this.record.disputed = undefined; // nothing could be kept, so do not ask
    } else if (disagreement && this.policy === "ask") {
      this.events.put(disagreement);
    }
  }

  private publish(): AnswerUpdate {
    const update = this.record.update(this.loop.unconfirmed);
    this.events.publish(update);
    return update;
  }

  /** Run the driver. It ends by closing or by a defect, which must not leave the application waiting. */
  private async run(): Promise<void> {
    try {
      await this.driver.run();
    } catch (error) {
      this.loopEnd.end();
      this.onProblem(new ChatError(`the drafting loop failed: ${String(error)}`, { cause: error }), true);
    } finally {
      this.loopEnd.end();
    }
  }

  private onProblem(problem: MoaError, final: boolean): void {
    this.takeOpening()?.failed(problem);
    if (!final) return;
    this.refusal = problem instanceof ChatError ? problem : new ChatError(problem.message, { cause: problem.cause });
    this.events.put(this.refusal);
  }

  private opened(): void {
    this.takeOpening()?.opened();
  }

  private takeOpening(): Opening | undefined {
    const { opening } = this;
    this.opening = undefined;
    return opening;
  }

  // -- checks ------------------------------------------------------------------------------------

  /** @throws ChatError nothing can be asked now. */
  private checkReady(): void {
    this.checkComplete();
    this.checkAccepted();
  }

  /** Whether the application follows an answer. */
  private get followed(): boolean {
    return this.follower !== undefined && !this.follower.left;
  }

  private checkComplete(): void {
    if (!this.isPending) return;
    throw new ChatError("the answer of the stored chat is not complete: follow pending(), or restore() other turns");
  }

  /** @throws ChatError the verifier refused, or the loop has ended. */
  private checkAccepted(): void {
    if (this.refusal && (this.driver.gaveUp || !this.running || this.loopEnd.ended)) throw this.refusal;
  }
}
