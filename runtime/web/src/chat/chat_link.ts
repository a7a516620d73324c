/** A chat's link to its verifier: opening, closing, and what the host knows of network and device. */

import type { LoopEvent } from "../drafting/events.js";
import type { DraftingLoop } from "../drafting/loop.js";
import { USUAL_CONDITIONS, type Conditions, type Offline } from "../drafting/settings.js";
import { ChatError, MoaError } from "../errors.js";
import type { LinkChanged } from "../events.js";
import { ConnectError } from "../link/connect_error.js";
import { Driver } from "../link/driver.js";
import { Ending } from "../link/ending.js";
import type { Endpoint } from "../link/endpoint.js";
import type { Host } from "../link/host.js";
import type { Timing } from "../link/timing.js";
import type { Policy } from "../session/events.js";
import { AnswerEvents } from "./answer_events.js";
import type { ChatKeeper } from "./chat_keeper.js";
import type { ChatStore } from "./chat_store.js";

/** Who waits for `open`. */
interface Opening {
  readonly opened: () => void;
  readonly failed: (error: MoaError) => void;
}

/** All of a chat but its questions and answers. `Chat` is the class to use. */
export class ChatLink {
  protected readonly events = new AnswerEvents();
  protected readonly driver: Driver;
  /** The loop has ended: it is closed, or had a defect. */
  protected readonly loopEnd = new Ending();
  protected closed = false;
  private refusal: ChatError | undefined;
  private opening: Opening | undefined;
  private running: Promise<void> | undefined;

  constructor(
    protected readonly loop: DraftingLoop,
    endpoint: Endpoint,
    protected readonly sessionId: string,
    timing: Timing,
    protected readonly keeper: ChatKeeper,
    protected readonly host: Host,
  ) {
    loop.listen((event) => this.hear(event));
    this.driver = new Driver(loop, endpoint, sessionId, timing, host, {
      problem: (error) => this.onProblem(error, error.final),
      rest: () => this.opened(),
      store: () => (keeper.keeps ? keeper.save() : undefined),
    });
  }

  /**
   * Begin to connect.
   *
   * @param wait until the verifier has answered. Otherwise the chat begins offline, and a refusal is thrown by `send`. So it
   *   does with `wait` where no connection is made: in the background ({@link tellConditions}), or when the user goes
   *   offline meanwhile.
   * @throws ConnectError the chat was closed meanwhile; for the rest see `Chat.connect`.
   */
  async open(wait = true): Promise<void> {
    const opened = wait && new Promise<void>((resolve, reject) => (this.opening = { opened: resolve, failed: reject }));
    this.running = this.run();
    this.driver.goOnline();
    await opened;
  }

  /**
   * Leave the verifier. An {@link open} that waits is ended with an error; the events of an answer under way end, and where
   * the chat is stored, the answer goes on with the next program.
   */
  async close(): Promise<void> {
    this.closed = true;
    void this.keeper.save();
    this.events.end();
    this.takeOpening()?.failed(new ConnectError("the chat was closed before the verifier had answered", true));
    try {
      await this.driver.close();
      await this.running;
    } finally {
      await this.keeper.close();
    }
  }

  /** Store the conversation now: whoever runs the program is about to freeze or to end it. Done when that is kept. */
  async save(): Promise<void> {
    await this.keeper.save();
  }

  /**
   * Store the conversation there from now on, in the place of what is there. To go on with what is there, see
   * `Chat.connect`.
   *
   * @throws StoreError this chat is stored already, somebody else has the place, or it cannot be used.
   */
  async keepIn(store: ChatStore): Promise<void> {
    await this.keeper.open(store, () => undefined);
    await this.keeper.save();
  }

  /** The link's last change, also one between answers. */
  get link(): LinkChanged {
    return this.loop.link;
  }

  /** The link as the user should see it. */
  get status(): LinkChanged["status"] {
    return this.loop.link.status;
  }

  /** Why the stored chat did not go on, or why this one is not stored now, in a sentence; empty where all is well. */
  get storeProblem(): string {
    return this.keeper.problem;
  }

  /** What becomes of text written offline; may be set at any time. */
  get policy(): Policy {
    return this.loop.policy;
  }

  set policy(policy: Policy) {
    this.loop.policy = policy;
  }

  /** What writes while there is no verifier; may be set at any time. */
  get offline(): Offline {
    return this.loop.offline;
  }

  set offline(offline: Offline) {
    this.loop.offline = offline;
  }

  /** Drop the connection and make no other, or connect again. */
  async workOffline(offline: boolean): Promise<void> {
    if (offline) await this.driver.goOffline();
    else this.driver.goOnline();
  }

  /** What the host said last, see {@link tellConditions}. */
  get conditions(): Conditions {
    return this.loop.conditions;
  }

  /** The page was hidden or is seen again, power is low, the network is metered; what is left out is not so. */
  tellConditions(conditions: Partial<Conditions>): void {
    this.driver.tellConditions({ ...USUAL_CONDITIONS, ...conditions });
  }

  /**
   * The device has another network: the connection, which may be dead, is made anew at once, not after the next ping or
   * backoff. Nothing while working offline.
   */
  async networkChanged(): Promise<void> {
    await this.driver.reconnect();
  }

  // -- helpers ---------------------------------------------------------------------------------

  /** @throws ChatError the verifier refused, or the loop has ended. */
  protected checkAccepted(): void {
    if (this.refusal && (this.driver.gaveUp || !this.running || this.loopEnd.ended)) throw this.refusal;
  }

  /** What the loop says. */
  protected hear(event: LoopEvent): void {
    if (event.event === "LinkChanged" && event.status === "online") this.opened();
    else if (event.event === "Problem") this.onProblem(new MoaError(event.error), event.final);
  }

  /** The loop only ends by closing or by a defect, which must not leave the application waiting. */
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

  /** What `open` waits for, while it does. */
  private takeOpening(): Opening | undefined {
    const { opening } = this;
    this.opening = undefined;
    return opening;
  }
}
