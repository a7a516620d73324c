/** A chat with the target: the runtime's front door. */

import { CostModel } from "../drafting/cost_model.js";
import { DraftingLoop } from "../drafting/loop.js";
import { USUAL_SETTINGS } from "../drafting/settings.js";
import { ChatError, ContextFullError } from "../errors.js";
import type { ChatEvent } from "../events.js";
import { Endpoint } from "../link/endpoint.js";
import { ownHost } from "../link/own_host.js";
import { newSessionId } from "../link/session_id.js";
import { USUAL_TIMING } from "../link/timing.js";
import { ClientSession } from "../session/client.js";
import type { Origin } from "../session/events.js";
import type { Message } from "../text/chat_tokenizer.js";
import { commonLength } from "../tokens.js";
import { RowEncoding } from "../wire/moa/v1/session_pb.js";
import { AnswerStream, type Follower } from "./answer_stream.js";
import { ChatChecks } from "./chat_checks.js";
import { ChatKeeper } from "./chat_keeper.js";
import type { ChatBundle, ChatOptions, ConnectOptions, Where } from "./chat_options.js";
import { restoreSession, sessionIdFor, stateFromJson } from "./chat_state.js";
import { Conversation, commonTurns, lengthOf } from "./conversation.js";
import type { Unconfirmed } from "./unconfirmed.js";
import { checkWishes, samplingOf, type SendOptions } from "./wishes.js";

const USUAL_LENGTH = 512;

/**
 * One conversation. It keeps its history over turns and survives lost connections. Use {@link Chat.connect}:
 *
 * ```ts
 * const chat = await Chat.connect(bundle, { url: "wss://host" }, { drafter });
 * for await (const event of chat.send("Name three primary colours.")) console.log(event);
 * ```
 */
export class Chat extends ChatChecks {
  private maxContext = 0;

  /**
   * A chat that does not connect before {@link open}.
   *
   * @throws ConnectError the address is none.
   * @throws StoreError somebody else has the store, or it can be neither used nor set aside.
   */
  static async create(bundle: ChatBundle, { token, url }: Where, options: ChatOptions = {}): Promise<Chat> {
    const { controller, drafter, policy = "rollback", store, system = "", writer } = options;
    const { fingerprints, maxContext, stopTokens, vocabSize } = bundle.manifest;
    const tokenizer = await bundle.tokenizer();
    const host = options.host ?? ownHost();
    const verifier = new Endpoint(url, token);
    // Without a drafter nobody would read the memory rows, and they are most of what a verdict weighs.
    const rowEncoding = drafter ? RowEncoding.INT8 : RowEncoding.UNSPECIFIED;
    const restored = (content: unknown) => {
      const state = stateFromJson(content);
      return { state, session: restoreSession(state, verifier.url, fingerprints, { stopTokens, rowEncoding, vocabSize }) };
    };
    const keeper: ChatKeeper = new ChatKeeper(() => chat.state(), host);
    const saved = store && (await keeper.open(store, restored));
    const session = saved?.session ?? new ClientSession(fingerprints, { stopTokens, rowEncoding, vocabSize });
    session.policy = policy;
    const settings = { ...USUAL_SETTINGS, ...options.settings };
    const loop = new DraftingLoop(session, drafter, controller ?? new CostModel(), settings, writer);
    const timing = { ...USUAL_TIMING, ...options.timing };
    const conversation = new Conversation(tokenizer, system);
    const sessionId = saved ? sessionIdFor(saved.state, verifier.url) : newSessionId();
    const chat = new Chat(session, loop, conversation, tokenizer, verifier, sessionId, timing, keeper, host);
    chat.maxContext = maxContext;
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
  static async connect(bundle: ChatBundle, where: Where, options: ConnectOptions = {}): Promise<Chat> {
    const chat = await Chat.create(bundle, where, options);
    try {
      await chat.open(options.wait);
    } catch (error) {
      await chat.close();
      throw error;
    }
    return chat;
  }

  /** The turns so far, finished answers included. */
  get messages(): readonly Message[] {
    return [...this.turns.messages];
  }

  /** Tokens of the whole conversation that the target has confirmed. */
  get tokens(): readonly number[] {
    const { committed } = this.loop;
    return this.following || this.isPending ? [...committed] : committed.slice(0, this.conversation.length);
  }

  /** How many tokens the conversation had up to the last answer's beginning. */
  get promptTokens(): number {
    return this.record.start;
  }

  /** How many of these the verifier was given with the last question: it had not read them yet. */
  get newTokens(): number {
    return this.record.question.supplied.length;
  }

  /**
   * Set the conversation to these turns, so that the next question continues them.
   *
   * For regenerating an answer (all turns but the last two), editing a question (the turns before it) and opening a stored
   * chat. Works offline too. What the new turns have in common with the old ones is not sent again. An answer of another
   * program that was `pending` is dropped.
   *
   * @param messages none, a system message, or turns up to an answer.
   * @param unconfirmed those answers among them that `check` is to have checked.
   * @throws ChatError an answer is being written.
   * @throws MoaError a message of another form, or a mark on what is no answer.
   */
  restore(messages: readonly Message[], unconfirmed: readonly Unconfirmed[] = []): void {
    this.checkIdle();
    this.conversation.restore(messages, unconfirmed);
    this.record.disputed = undefined;
    if (this.isPending) {
      this.isPending = this.unheard = false;
      this.driver.post(() => this.loop.cancel());
    }
    this.keeper.touch();
  }

  /**
   * Ask, and follow the answer as it is written; the last event is `AnswerFinished`, unless the chat is closed before.
   *
   * Leaving the iteration early stops the answer where the target has confirmed it. What the device has written while the
   * verifier was away stays as well, and is `unconfirmed`; with policy `keep` it just stays.
   *
   * With the first event it throws:
   *
   * @throws ContextFullError the conversation does not fit the target's context.
   * @throws ChatError the verifier refused it, or another answer is being written, or `pending`.
   * @throws ChatTemplateError the target's template refuses the conversation.
   */
  send(text: string, options: SendOptions = {}): AnswerStream {
    return new AnswerStream((follower) => this.sent(follower, text, options));
  }

  /**
   * Go on with the last answer, which was cut off at its greatest length or stopped. Events, and leaving them, as of
   * {@link send}: texts are of the whole answer, figures of what is written now.
   *
   * With the sampling that it was asked with, which is taken when omitted, seed included, the answer becomes what a larger
   * limit would have made it. Its tokens are those that it was written with; of one that came by {@link restore} only the
   * text is known, which is encoded anew. `maxNewTokens` is by how many it may become longer.
   *
   * With the first event it throws:
   *
   * @throws ContextFullError the target's context is full.
   * @throws ChatError see {@link send}; there is no such answer, it has ended by itself, or it is `unconfirmed`.
   */
  continueAnswer(options: SendOptions = {}): AnswerStream {
    return new AnswerStream((follower) => this.continued(follower, options));
  }

  // -- helpers ---------------------------------------------------------------------------------

  private async *sent(follower: Follower, text: string, options: SendOptions): AsyncGenerator<ChatEvent, void, undefined> {
    const { maxNewTokens = USUAL_LENGTH, whileAway = true } = options;
    const sampling = samplingOf(options.sampling ?? {});
    this.checkReady();
    checkWishes(maxNewTokens, sampling);
    const { loop, maxContext } = this;
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
    yield* this.ask(follower, question, ask);
  }

  private async *continued(follower: Follower, options: SendOptions): AsyncGenerator<ChatEvent, void, undefined> {
    const { maxNewTokens = USUAL_LENGTH, whileAway = true } = options;
    this.checkReady();
    const { conversation, loop, maxContext, record } = this;
    const sampling = options.sampling ? samplingOf(options.sampling) : this.session.sampling;
    checkWishes(maxNewTokens, sampling);
    const { committed } = loop;
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
    yield* this.ask(follower, question, goOn, { tokens, origins });
  }

  /** @throws ChatError nothing can be asked now. */
  private checkReady(): void {
    this.checkIdle();
    this.checkComplete();
    this.checkAccepted();
  }
}
